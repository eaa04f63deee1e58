"""`split_qkv_heads` with grouped heads, norms of queries and keys, rotary embedding and layouts."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, checks
from harness.case import SLOW
from harness.compat import saved_residuals, x64
from harness.numerics import any_value, normal
from harness.programs import targets_of
from harness.transforms import widen

import jax_fastops as fo

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]

EPS = 1e-5


def turned(x, cos, sin, interleaved):
    """Rotates the first elements of each head of `[..., sequence, heads, size]`."""
    x, cos, sin = jnp.asarray(x), cos[..., None, :], sin[..., None, :]
    pairs = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    a, b = x[..., first], x[..., second]
    x = x.at[..., first].set(a * cos - b * sin)
    return x.at[..., second].set(b * cos + a * sin)


def reference(
    qkv,
    bias=None,
    *,
    num_heads,
    num_kv_heads=None,
    rotary=None,
    q_scale=None,
    k_scale=None,
    eps=EPS,
    interleaved=False,
    layout="heads_first",
):
    """In the wider dtype, rounded once."""
    num_kv_heads = num_kv_heads or num_heads
    wide = jnp.promote_types(qkv.dtype, jnp.float32)
    x = jnp.asarray(qkv, wide) + (0 if bias is None else bias.astype(wide))
    heads = num_heads, num_kv_heads, num_kv_heads
    x = x.reshape(*x.shape[:-1], sum(heads), x.shape[-1] // sum(heads))
    parts = [x[..., :num_heads, :]]
    parts += [x[..., num_heads : num_heads + num_kv_heads, :], x[..., -num_kv_heads:, :]]
    for i, scale in enumerate((q_scale, k_scale)):
        if scale is not None:
            rms = jnp.sqrt(jnp.square(parts[i]).mean(-1, keepdims=True) + eps)
            parts[i] = parts[i] / rms * scale.astype(wide)
        if rotary is not None:
            parts[i] = turned(parts[i], *(a.astype(wide) for a in rotary), interleaved)
    if layout == "heads_first":
        parts = [jnp.swapaxes(part, -3, -2) for part in parts]
    return tuple(part.astype(qkv.dtype) for part in parts)


def example(rng, lead, sequence, heads, kv_heads, size, pairs, dtype, angles_lead=(), fill=normal):
    """The operands: features, bias, scales, cosines and sines."""
    features = (heads + 2 * kv_heads) * size
    wide = np.float64 if dtype == np.float64 else np.float32
    angles = rng.uniform(-4, 4, (*angles_lead, sequence, pairs))
    return (
        fill(rng, (*lead, sequence, features), dtype),
        normal(rng, (features,), dtype),
        normal(rng, (size,), wide) + wide(1),
        normal(rng, (size,), dtype),
        np.cos(angles).astype(wide),
        np.sin(angles).astype(wide),
    )


def apply(fn, x, bias, q_scale, k_scale, cos, sin, **options):
    return fn(x, bias, rotary=(cos, sin), q_scale=q_scale, k_scale=k_scale, eps=EPS, **options)


# In the harness, gradients are those of one dtype, so every operand has the dtype of the case.
def draws(lead, sequence, features, size, pairs, batched=False):
    def make(rng, dtype):
        angles = rng.uniform(-4, 4, (*lead * batched, sequence, pairs))
        arrays = np.cos(angles), np.sin(angles)
        return (
            any_value(rng, (*lead, sequence, features), dtype),
            *(normal(rng, shape, dtype) for shape in ((features,), (size,), (size,))),
            *(a.astype(dtype) for a in arrays),
        )

    return make


GROUPED = dict(num_heads=2, num_kv_heads=1)
SHARDED = dict(gradient_all_reduces=3)
TOLERANCE = Tolerance(ulps=32.0)

EVERYTHING = Case(
    kernels=("rotary_heads", "rotary_heads_bwd"),
    name="split_qkv_heads_norm_rotary",
    fn=functools.partial(apply, fo.split_qkv_heads, **GROUPED),
    reference=functools.partial(apply, reference, **GROUPED),
    make_args=draws((2,), 3, 16, 4, 2),
    make_sharded_args=draws((8,), 512, 16, 4, 2, batched=True),
    tolerance=TOLERANCE,
    differentiable=(0, 1, 2, 3),
    shardings=(
        Sharding("batch", (0, None, None, None, 0, 0), (0, 0, 0), **SHARDED),
        Sharding("sequence", (1, None, None, None, 1, 1), (2, 2, 2), **SHARDED),
    ),
    shards_under_vmap=False,
)

ROTARY = Case(
    name="split_qkv_heads_rotary",
    fn=lambda x, a: fo.split_qkv_heads(
        x, rotary=a, interleaved=True, layout="sequence_first", **GROUPED
    ),
    reference=lambda x, a: reference(
        x, rotary=(jnp.cos(a), jnp.sin(a)), interleaved=True, layout="sequence_first", **GROUPED
    ),
    make_args=lambda rng, dtype: (
        any_value(rng, (2, 3, 24), dtype),
        normal(rng, (3, 2), dtype),
    ),
    make_sharded_args=lambda rng, dtype: (
        any_value(rng, (8, 16, 24), dtype),
        normal(rng, (8, 16, 2), dtype),
    ),
    dtypes=("float32", "float64"),
    tolerance=TOLERANCE,
    shardings=(
        Sharding("batch", (0, 0), (0, 0, 0)),
        Sharding("sequence", (1, 1), (1, 1, 1)),
    ),
    symbolic=("b, 3, 24", "3, 2"),
)

# Only moves elements, of any dtype by the reference.
MOVES = Case(
    kernels=("rotary_heads", "rotary_heads_bwd"),
    name="split_qkv_heads_grouped",
    fn=lambda x: fo.split_qkv_heads(x, **GROUPED),
    reference=lambda x: reference(x, **GROUPED),
    make_args=lambda rng, dtype: (any_value(rng, (2, 3, 12), dtype),),
    make_sharded_args=lambda rng, dtype: (any_value(rng, (8, 16, 12), dtype),),
    dtypes=("float32", "bfloat16"),
    linear=(0,),
    shardings=(Sharding("batch", (0,), (0, 0, 0)), Sharding("sequence", (1,), (2, 2, 2))),
)


@checks(EVERYTHING, ROTARY, MOVES)
def test_harness(check):
    check()


# Values -------------------------------------------------------------------------------------------

SHAPES = [
    # (leading dimensions, sequence, heads, kv_heads, head size, pairs, dimensions of the angles)
    ((), 5, 3, 1, 7, 2, ()),
    ((2,), 9, 2, 2, 6, 3, (2,)),
    ((2, 3), 4, 2, 1, 20, 10, (1, 3)),
    ((2, 3), 4, 2, 1, 16, 8, (2, 1)),
    ((2,), 33, 4, 2, 64, 32, ()),
    ((1,), 17, 4, 1, 64, 16, ()),
    ((2,), 130, 2, 1, 80, 40, (2,)),
    ((1,), 20, 6, 2, 96, 48, ()),
    ((2,), 40, 8, 2, 128, 64, ()),
    ((1,), 3, 2, 1, 256, 100, ()),
    ((1,), 2, 1, 1, 512, 256, ()),
    ((3,), 1, 5, 5, 2, 1, ()),
    ((0,), 4, 2, 1, 4, 2, ()),
    ((2,), 0, 2, 1, 4, 2, ()),
    ((2,), 4, 2, 1, 0, 0, ()),
]


def of_all(fn, examples, all_cts, all_options):
    """Results, and gradients of the first four operands, of all examples in one program."""

    def one(args, cts, options):
        out, pull = jax.vjp(lambda *some: apply(fn, *some, *args[4:], **options), *args[:4])
        return *out, *pull(cts)

    def each(*given):
        return [one(*some) for some in zip(*given, all_options, strict=True)]

    return jax.jit(each)(examples, all_cts)


def exact(examples, all_cts, all_options):
    """The same by the reference in float64."""
    with x64(), jax.default_device(jax.devices("cpu")[0]):
        return of_all(reference, *widen((examples, all_cts)), all_options)


def error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected)
    assert found.shape == expected.shape
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)


LAYOUTS = [
    dict(layout=layout, interleaved=interleaved)
    for layout in ("heads_first", "sequence_first")
    for interleaved in (False, True)
]


# Over the four turns, each shape has each layout. Turn 3 differs from turn 0 in both parts of it.
@pytest.mark.parametrize("turn", [0, 3, *(pytest.param(i, marks=SLOW) for i in (1, 2))])
def test_values_and_gradients(dtype, turn):
    """In norm, errors are at most twice those of the reference, or a rounding of the results."""
    rng = np.random.default_rng(0)
    options = [
        dict(num_heads=s[2], num_kv_heads=s[3], **LAYOUTS[(i % 4) ^ turn])
        for i, s in enumerate(SHAPES)
    ]
    examples = [example(rng, *s[:-1], dtype, s[-1]) for s in SHAPES]
    all_cts = []
    for args, o in zip(examples, options, strict=True):
        shapes = jax.eval_shape(functools.partial(apply, reference, **o), *args)
        all_cts.append(tuple(normal(rng, y.shape, y.dtype) for y in shapes))

    ours, plain = (of_all(f, examples, all_cts, options) for f in (fo.split_qkv_heads, reference))
    wanted = exact(examples, all_cts, options)
    rounding = 4 * float(jnp.finfo(dtype).eps)
    for shape, found, other, expected in zip(SHAPES, ours, plain, wanted, strict=True):
        for i, (a, b, e) in enumerate(zip(found, other, expected, strict=True)):
            assert a.dtype == b.dtype
            limit = max(2 * error(b, e), rounding)
            assert error(a, e) <= limit, f"{shape}, array {i}: {error(a, e)} > {limit}"


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=4)))
def test_each_part_by_itself(present):
    """Every choice of bias, scales and angles, with an array of angles."""
    rng = np.random.default_rng(1)
    bias, q_scale, k_scale, rotary = present
    x, *arrays = example(rng, (2,), 8, 4, 2, 16, 8, np.float32)
    angles = np.arctan2(arrays[-1], arrays[-2])
    names = ("bias", "q_scale", "k_scale")
    given = {n: a for n, a, p in zip(names, arrays, (bias, q_scale, k_scale), strict=False) if p}

    def run(fn, turn):
        def of(x, given):
            options = dict(rotary=turn) if rotary else {}
            return fn(x, **given, **options, num_heads=4, num_kv_heads=2, eps=EPS)

        out, pull = jax.vjp(of, x, given)
        return jax.tree.leaves((out, pull(jax.tree.map(jnp.cos, out))))

    turn = np.cos(angles), np.sin(angles)
    found, expected = run(fo.split_qkv_heads, angles), run(reference, turn)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sequence", [1, 2, 3, 31, 64, 97, 128, 190, 257])
def test_sums(sequence):
    """The parameters' gradients of every division of the sequence into groups."""
    args = example(np.random.default_rng(3), (2,), sequence, 2, 1, 6, 3, np.float32)
    shapes = jax.eval_shape(functools.partial(apply, reference, **GROUPED), *args)
    cts = tuple(normal(np.random.default_rng(4), y.shape, y.dtype) for y in shapes)
    run = functools.partial(apply, fo.split_qkv_heads, **GROUPED)
    _, pull = jax.vjp(lambda *some: run(*some, *args[4:]), *args[:4])
    (expected,) = exact([args], [cts], [GROUPED])
    for a, b in zip(pull(cts), expected[3:], strict=True):
        assert error(a, b) < 1e-5


# Kernels and residuals ----------------------------------------------------------------------------


def test_other_calls_are_as_before():
    x = np.ones((2, 32, 24), np.float32)
    assert targets_of(lambda x: fo.split_qkv_heads(x, num_heads=2), x) == ["split_heads"]
    for kv_heads, kernel in ((2, "split_heads"), (1, "rotary_heads")):
        split = functools.partial(fo.split_qkv_heads, num_heads=2, num_kv_heads=kv_heads)
        assert targets_of(split, x) == [kernel]


@pytest.mark.parametrize("with_bias", [False, True])
def test_an_odd_number_of_heads_without_eps(with_bias):
    """Two heads share the sum of a scale's gradient; the last head shares it with none."""
    arrays = example(np.random.default_rng(9), (2,), 37, 5, 1, 16, 8, np.float32)
    x, bias, *parameters, cos, sin = arrays
    bias = bias if with_bias else None

    def of(fn, x, q_scale, k_scale):
        options = dict(num_heads=5, num_kv_heads=1, rotary=(cos, sin), eps=0.0)
        return fn(x, bias, q_scale=q_scale, k_scale=k_scale, **options)

    got, want = (
        jax.grad(
            lambda *args, fn=fn: sum(jnp.sum(jnp.sin(y)) for y in of(fn, *args)), argnums=(0, 1, 2)
        )(x, *parameters)
        for fn in (fo.split_qkv_heads, reference)
    )
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-4)


def test_large_angles_in_float64():
    """Angles keep their digits until their cosines and sines are rounded."""
    with x64():
        angles = 1e5 + np.random.default_rng(3).uniform(0, 4, (6, 4))
        x = np.random.default_rng(4).normal(size=(6, 24)).astype(np.float32)
        got = fo.split_qkv_heads(x, num_heads=1, rotary=angles)
        want = reference(x, num_heads=1, rotary=(np.cos(angles), np.sin(angles)))
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_symbolic_features():
    """A size that is not known at export takes the reference."""
    (size,) = jax.export.symbolic_shape("d")
    x = jax.ShapeDtypeStruct((2, 5, 12 * size), np.float32)
    split = functools.partial(fo.split_qkv_heads, num_heads=4, layout="sequence_first")
    exported = jax.export.export(jax.jit(split))(x)
    given = np.arange(2 * 5 * 24, dtype=np.float32).reshape(2, 5, 24)
    for mine, theirs in zip(exported.call(given), split(given), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("norm", [False, True])
def test_residuals(norm):
    """Without a norm, nothing is kept but the angles."""
    x, _, q_scale, k_scale, cos, sin = example(
        np.random.default_rng(7), (2,), 32, 2, 1, 8, 4, np.float32
    )
    scales = dict(q_scale=q_scale, k_scale=k_scale) if norm else {}

    def fn(x):
        return fo.split_qkv_heads(x, rotary=(cos, sin), **scales, **GROUPED)

    kept = re.findall(r"^\w+\[([\d,]*)\]", saved_residuals(fn, x), re.MULTILINE)
    assert sorted(kept) == sorted(["1,32,8"] + ["8", "8", "2,32,32"] * norm)


# Errors -------------------------------------------------------------------------------------------

X = np.ones((2, 4, 32), np.float32)
ERRORS = [
    (dict(num_kv_heads=3), ValueError, "num_kv_heads is 3; it must divide num_heads, 4"),
    (dict(num_kv_heads=0), ValueError, "num_kv_heads is 0"),
    (dict(num_kv_heads=1.0), TypeError, "num_kv_heads is 1.0; it must be an integer"),
    (dict(num_kv_heads=4), ValueError, "cannot be divided into 3 * num_heads = 12 equal parts"),
    (dict(num_kv_heads=1), ValueError, "into num_heads + 2 * num_kv_heads = 6 equal parts"),
    (dict(q_scale=np.ones(3)), ValueError, "q_scale has shape (3,); it must be (4,)"),
    (dict(k_scale=np.ones(4, int)), TypeError, "k_scale has dtype int"),
    (dict(k_scale="x"), TypeError, "k_scale is of type str"),
    (dict(rotary=np.ones((4, 3))), ValueError, "rotary has shape (4, 3), for 6 elements"),
    (dict(rotary=np.ones((5, 2))), ValueError, "rotary has shape (5, 2); it must have 2 dim"),
    (dict(rotary=np.ones(2)), ValueError, "rotary has shape (2,)"),
    (dict(rotary=np.ones((4, 2), int)), TypeError, "rotary has dtype int"),
    (dict(rotary=(np.ones((4, 2)),)), ValueError, "rotary has 1 arrays"),
    (dict(rotary=(np.ones((4, 2)), np.ones((1, 2)))), ValueError, "rotary[1] has shape (1, 2)"),
    (dict(eps=float("nan"), q_scale=np.ones(4)), ValueError, "eps is nan"),
    (dict(eps=-1.0, q_scale=np.ones(4)), ValueError, "eps is -1.0; it must be 0 or more"),
    (dict(eps="1"), TypeError, "eps is of type str"),
    (dict(interleaved=1), TypeError, "interleaved is 1; it must be True or False"),
    (dict(layout="bhsd"), ValueError, "layout is 'bhsd'; it must be one of 'heads_first'"),
]


@pytest.mark.parametrize(("options", "kind", "message"), ERRORS, ids=lambda v: str(v)[:40])
def test_errors(options, kind, message):
    options = dict(num_heads=4, num_kv_heads=2) | options
    with pytest.raises(kind, match=r"^split_qkv_heads: .*" + re.escape(message)):
        jax.eval_shape(lambda x: fo.split_qkv_heads(x, **options), X)


def test_dtypes_without_arithmetic():
    """Elements of any dtype can be split; norms and rotations need floating-point numbers."""
    x = np.arange(2 * 4 * 32).reshape(2, 4, 32).astype(np.int32)
    for a, b in zip(fo.split_qkv_heads(x, **GROUPED), reference_of_integers(x), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(TypeError, match="qkv has dtype int32; with rotary"):
        fo.split_qkv_heads(x, q_scale=np.ones(8), **GROUPED)


def reference_of_integers(x):
    parts = np.split(x.reshape(2, 4, 4, 8), (2, 3), axis=2)
    return [np.swapaxes(part, 1, 2) for part in parts]
