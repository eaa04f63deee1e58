"""The norms: transformations, shapes, parameters, special values, residuals, errors."""

import dataclasses
import functools
import itertools
import math
import re
import zlib

import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, assert_bitwise_equal, assert_matches, checks
from harness.case import FLOAT_DTYPES, NESTED_VARIANT, VARIANT, outputs
from harness.compat import make_mesh, x64
from harness.numerics import assert_close, assert_within, normal
from harness.programs import outputs_and_gradients, targets
from harness.properties import LENGTHS, SHORT
from harness.sharding import (
    device_count,
    mesh_for,
    over_kinds,
    over_mesh,
)
from harness.transforms import oracle
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]

# name -> arguments after x, in the order of its signature and then by name
OPS = {
    "layer_norm": ("scale", "bias"),
    "rms_norm": ("scale",),
    "residual_layer_norm": ("residual", "scale", "bias", "input_bias"),
    "residual_rms_norm": ("residual", "scale", "input_bias"),
}


def reference(
    name, x, *, residual=None, scale=None, bias=None, input_bias=None, eps=1e-6, return_sum=False
):
    """Computes in float32, or in float64, and rounds the sum, as between two layers.

    With float64 arrays it gives the exact results, because the sum is then not rounded.
    """
    dtype = x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)
    wide = jnp.promote_types(dtype, np.float32)
    s = x.astype(wide)
    s = s if input_bias is None else s + input_bias.astype(wide)
    s = s if residual is None else s + residual.astype(wide)
    # Without the barrier, XLA on a GPU would skip the rounding.
    y = jax.lax.optimization_barrier(s.astype(dtype)).astype(wide)
    if "rms" not in name:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y = y if scale is None else y * scale.astype(wide)
    y = (y if bias is None else y + bias.astype(wide)).astype(dtype)
    return (y, s.astype(dtype)) if return_sum else y


def fanned(op, x, **options):
    """Calls the op with ``fanout=True``. Returns its results as a flat tuple, with y twice."""
    found = op(x, fanout=True, **options)
    return (*found[0], found[1]) if options.get("return_sum") else found


def fanned_reference(name, x, **options):
    y, *s = outputs(reference(name, x, **options))
    return y, y, *s


def variant(name, given, fanout=False, **options):
    """The op and its reference, as functions of x and the other given arguments."""
    op = getattr(fo, name)
    op = functools.partial(fanned, op) if fanout else op
    plain = functools.partial(fanned_reference if fanout else reference, name)
    return tuple(
        lambda x, *rest, f=f: f(x, **dict(zip(given, rest, strict=True)), **options)
        for f in (op, plain)
    )


def draws(shape, given, parameters=None, of_residual=None):
    """Draws x and the other given arguments. The scale is about 1."""

    def make(rng, dtype):
        args = [normal(rng, shape, dtype)]
        for what in given:
            if what == "residual":
                args.append(normal(rng, shape, dtype).astype(of_residual or dtype))
                continue
            own = parameters or dtype
            value = normal(rng, shape[-1:], np.float64)
            args.append((value / 4 + 1 if what == "scale" else value).astype(own))
        return tuple(args)

    return make


def spread(name, dim, given, results=1):
    """Shards x and the residual. Each parameter gradient needs an all-reduce."""
    return Sharding(
        name,
        (dim, *(dim if what == "residual" else None for what in given)),
        (dim,) * results,
        gradient_all_reduces=sum(what != "residual" for what in given),
    )


def row(last, given, results):
    inputs = (last, *(last if what == "residual" else 0 for what in given))
    return Sharding("row", inputs, (last,) * results, whole=True)


def kept(op, given, x, *rest):
    """x or the sum, the scale, and the statistics; not the biases or the norm."""
    rest = dict(zip(given, rest, strict=True))
    total = jnp.promote_types(x.dtype, rest.get("residual", x).dtype)
    scale = [(jnp.promote_types(a.dtype, total), a.size) for k, a in rest.items() if k == "scale"]
    statistics = jnp.promote_types(total, np.float32), x.size // x.shape[-1]
    return [(total, x.size), *scale, *[statistics] * (1 if "rms" in op else 2)]


def case(name, op, given, shape, sharded=None, parameters=None, eps=1e-6, **more):
    return_sum, fanout = more.pop("return_sum", False), more.pop("fanout", False)
    dtypes = parameters, more.pop("of_residual", None)
    options = {"return_sum": True} if return_sum else {}
    fn, plain = variant(op, given, fanout, eps=eps, **options)
    if fanout:
        more["one_user"] = variant(op, given, eps=eps, **options)[0]
    if sharded is not None:
        more["make_sharded_args"] = draws(sharded, given, *dtypes)
        names = ("batch", "sequence")[: len(sharded) - 1]
        more["shardings"] = tuple(
            spread(n, dim, given, 1 + fanout + return_sum) for dim, n in enumerate(names)
        )
        if sharded[-1] % 8 == 0 and parameters is None:
            more["shardings"] += (row(len(sharded) - 1, given, 1 + fanout + return_sum),)
    return Case(
        name=name,
        fn=fn,
        reference=plain,
        make_args=draws(shape, given, *dtypes),
        tolerance=Tolerance(ulps=32.0),
        shards_under_vmap=set(given) <= {"residual"},
        kernels=("norm", "norm_bwd"),
        maps=(tuple(range(1 + ("residual" in given))),),
        kept=functools.partial(kept, op, given),
        **more,
    )


LAYER_NORM = case(
    "layer_norm",
    "layer_norm",
    ("scale", "bias"),
    (3, 7),
    (64, 16),
    symbolic=("b, n", "n", "n"),
    sizes=({"b": 257, "n": 133}, {"b": 3, "n": 40_001}),
    versions=True,
)

RESIDUAL_RMS_NORM = case(
    "residual_rms_norm",
    "residual_rms_norm",
    ("residual", "scale", "input_bias"),
    (2, 2, 5),
    (64, 16),
    return_sum=True,
    eps=0.1,
    dtypes=("float32", "bfloat16"),
    modes=("native",),
    symbolic=("b, s, n", "b, s, n", "n", "n"),
    sizes=({"b": 2, "s": 15, "n": 1024}, {"b": 1, "s": 3, "n": 20_000}),
    quick=NESTED_VARIANT,
)

RMS_NORM = case(
    "rms_norm",
    "rms_norm",
    ("scale",),
    (3, 8),
    (16, 8),
    eps=1e-3,
    symbolic=("b, 8", "8"),
    sizes=({"b": 257},),
    quick=VARIANT,
)

PLAIN_LAYER_NORM = case(
    "plain_layer_norm",
    "layer_norm",
    (),
    (3, 2, 5),
    (8, 16, 5),
    symbolic=("a, b, n",),
    eps=0.5,
    quick=VARIANT,
)

RESIDUAL_LAYER_NORM = case(
    "residual_layer_norm",
    "residual_layer_norm",
    ("residual", "scale", "bias", "input_bias"),
    (3, 9),
    (8, 64, 16),
    dtypes=("float32", "bfloat16", "float16"),
    modes=("native",),
    symbolic=("b, 9", "b, 9", "9", "9", "9"),
    sizes=({"b": 257},),
    quick=VARIANT,
)

PRE_NORM = case(
    "pre_norm",
    "residual_layer_norm",
    ("residual", "scale"),
    (2, 3, 4),
    (16, 8, 4),
    return_sum=True,
    dtypes=("bfloat16", "float32"),
    modes=("native",),
)

# Parameters are often float32 while the data has half precision.
FLOAT32_PARAMETERS = case(
    "float32_parameters",
    "residual_layer_norm",
    ("residual", "scale", "bias", "input_bias"),
    (4, 16),
    (16, 16),
    parameters=np.float32,
    return_sum=True,
    dtypes=("bfloat16", "float16"),
    modes=("native",),
)

FANOUT = case(
    "fanout",
    "residual_layer_norm",
    ("residual", "scale", "bias"),
    (3, 7),
    (64, 12),
    fanout=True,
    dtypes=("float32", "bfloat16"),
    modes=("native",),
    symbolic=("b, n", "b, n", "n", "n"),
)

FANOUT_SUM = case(
    "fanout_sum",
    "residual_rms_norm",
    ("residual", "scale", "input_bias"),
    (2, 2, 5),
    (8, 64, 12),
    fanout=True,
    return_sum=True,
    eps=0.1,
    dtypes=("float32", "bfloat16"),
    modes=("native",),
)

basic = functools.partial(case, basic_only=True, modes=("native",))
SINGLE, HALF = ("float32",), ("bfloat16",)
MIXED = basic("float32_scale", "rms_norm", ("scale",), (4, 16), parameters=np.float32, dtypes=HALF)
MIXED_ALL = basic(
    "float32_all",
    "residual_layer_norm",
    OPS["residual_layer_norm"],
    (4, 16),
    parameters=np.float32,
    return_sum=True,
    dtypes=HALF,
)
WIDE_RESIDUAL = case(
    "float32_residual",
    "residual_layer_norm",
    OPS["residual_layer_norm"],
    (4, 16),
    (16, 16),
    of_residual=np.float32,
    return_sum=True,
    dtypes=("bfloat16", "float16"),
    modes=("native",),
)
NARROW_RESIDUAL = basic(
    "bfloat16_residual",
    "residual_rms_norm",
    OPS["residual_rms_norm"],
    (3, 9),
    of_residual=jnp.bfloat16,
    return_sum=True,
    dtypes=("float32", "float64"),
)
BIAS_ALONE = basic("bias_alone", "layer_norm", ("bias",), (3, 33), dtypes=SINGLE)
SCALE_ALONE = basic("scale_alone", "layer_norm", ("scale",), (3, 33), dtypes=HALF)
RESIDUAL_ALONE = basic(
    "residual_alone", "residual_layer_norm", ("residual",), (2, 8), dtypes=SINGLE
)
INPUT_BIAS_ALONE = basic(
    "input_bias_alone", "residual_rms_norm", ("residual", "input_bias"), (5, 7), dtypes=SINGLE
)
SUM_ALONE = basic(
    "sum_alone", "residual_rms_norm", ("residual",), (3, 17), return_sum=True, dtypes=HALF
)
LONG = basic("long", "layer_norm", ("scale", "bias"), (2, 1001), dtypes=HALF)
ONE = basic("one", "rms_norm", ("scale",), (4, 1), eps=0.5, dtypes=SINGLE)
ONE_ROW = basic("one_row", "layer_norm", ("scale", "bias"), (9,), dtypes=SINGLE)
FANOUT_ALONE = basic("fanout_alone", "layer_norm", (), (3, 5), fanout=True, dtypes=SINGLE)

# Row lengths for every variant of the kernels, and some that vectorized loads do not divide.
TWO_USERS = [(70, 1), (15, 17), (7, 24), (300, 64), (33, 768), (41, 1000), (9, 1001), (5, 3000)]
TWO_USERS += [(6, 8192), (3, 8191), (2, 20_000), (2, 600_001)]
FANOUTS = [
    basic(
        f"fanout_{op}{'_sum' * return_sum}",
        op,
        given,
        (3, 7),
        fanout=True,
        return_sum=return_sum,
        dtypes=("bfloat16", "float32"),
        symbolic=["b, n" if what in ("x", "residual") else "n" for what in ("x", *given)],
        sizes=[dict(b=b, n=n) for b, n in (TWO_USERS[3:8] if return_sum else TWO_USERS)],
    )
    for op, given in OPS.items()
    for return_sum in ([False, True] if "residual" in op else [False])
]

QUICK = (LAYER_NORM, RESIDUAL_RMS_NORM, RMS_NORM, PLAIN_LAYER_NORM, RESIDUAL_LAYER_NORM)
BASIC = (
    MIXED,
    MIXED_ALL,
    dataclasses.replace(
        WIDE_RESIDUAL, name="float32_residual_basic", basic_only=True, modes=("native", "xla")
    ),
    NARROW_RESIDUAL,
    BIAS_ALONE,
    SCALE_ALONE,
    RESIDUAL_ALONE,
    INPUT_BIAS_ALONE,
    SUM_ALONE,
    LONG,
    ONE,
    ONE_ROW,
    FANOUT_ALONE,
    *FANOUTS,
)
SLOW = (PRE_NORM, FLOAT32_PARAMETERS, WIDE_RESIDUAL, FANOUT, FANOUT_SUM)


@checks(*QUICK, *BASIC)
def test_harness(check):
    check()


@pytest.mark.slow
@checks(*SLOW)
def test_harness_of_variants(check):
    check()


@pytest.fixture(params=OPS)
def name(request):
    return request.param


# Shapes -------------------------------------------------------------------------------------------


def growth(n):
    """The error bound, in units of rounding, of a sum of `n` terms in many partial sums."""
    return 4 + math.sqrt(n) / 8


def mean(a):
    return a.mean(-1, keepdims=True)


def check_one(name, dtype, values, cotangents, got, gradients, eps, what):
    """Compares with NumPy in float64. `values` are x and the other arguments, by name."""
    wide = np.float64 if dtype == np.float64 else np.float32
    x, given = values["x"], {k: v.astype(np.float64) for k, v in values.items()}
    s = x.astype(wide)
    s = s + values["input_bias"].astype(wide) if "input_bias" in values else s
    s = s + values["residual"].astype(wide) if "residual" in values else s
    saved = s.astype(dtype)
    if len(got) == 2:
        assert_bitwise_equal(got[1], saved, f"sum of {what}")
    s = saved.astype(np.float64)
    n = s.shape[-1]
    rows = tuple(range(s.ndim - 1))
    count = math.prod(s.shape[:-1])
    layer = "rms" not in name
    centre = mean(s) if layer else 0
    rstd = 1 / np.sqrt(mean((s - centre) ** 2) + eps)
    xhat = (s - centre) * rstd
    # The size of the numbers relative to their deviations. Rounding errors grow by this factor.
    ratio = 1 + rstd * (mean(np.abs(s)) + np.abs(s)) if layer else 1.0
    scale = given.get("scale", np.ones(n))
    y = xhat * scale + given.get("bias", 0)
    unit = np.abs(scale) * growth(n) * (ratio + 3 * np.abs(xhat)) + np.abs(given.get("bias", 0))
    assert_within(got[0], y, unit, what, wide)

    dy = cotangents[0].astype(np.float64)
    g = dy * scale
    inner = g - xhat * mean(g * xhat)
    inner = inner - mean(g) if layer else inner
    dx = rstd * inner
    size = np.abs(xhat) + ratio
    unit = rstd * growth(n) * 2 * (np.abs(g) + mean(np.abs(g)) + size * mean(np.abs(g) * size))
    if len(got) == 2:
        dx = dx + cotangents[1].astype(np.float64)
        unit = unit + np.abs(dx)
    found = dict(zip(values, gradients, strict=True))
    assert_within(found["x"], dx, unit, f"gradient of x, {what}", wide)
    if "residual" in found:
        assert_bitwise_equal(found["residual"], found["x"], f"gradient of the residual, {what}")
    sums = {
        "scale": (dy * xhat, np.abs(dy) * size * growth(n)),
        "bias": (dy, np.abs(dy)),
        "input_bias": (dx, unit),
    }
    for key, (terms, of_terms) in sums.items():
        if key in found:
            assert found[key].dtype == values[key].dtype
            of_sum = of_terms.sum(rows) + growth(count) * np.abs(terms).sum(rows)
            total = terms.sum(rows)
            assert_within(found[key], total, of_sum, f"gradient of {key}, {what}", wide)


def uneven(rng, shape, dtype):
    """Random values, with larger ones at the start and end of a row and in the last row."""
    x = rng.standard_normal(shape)
    x[..., :2] *= 5
    x[..., -3:] *= 6
    if len(shape) > 1:
        x[..., -1:, :] *= 3
    return x.astype(dtype)


def check_shapes(name, dtype, shapes, given=None, parameters=None, eps=1e-6, return_sum=False):
    """Checks results and gradients of many shapes in one program."""
    given = OPS[name] if given is None else given
    rng = np.random.default_rng(zlib.crc32(f"{name}{shapes}".encode()))
    options = {"return_sum": True} if return_sum else {}
    fn = variant(name, given, eps=eps, **options)[0]
    examples = []
    for shape in shapes:
        args = draws(shape, given, parameters)(rng, dtype)
        args = tuple(
            uneven(rng, shape, dtype) if a.shape == shape and len(shape) > 1 else a for a in args
        )
        examples.append((args, [uneven(rng, shape, dtype) for _ in range(1 + return_sum)]))
    results = jax.jit(lambda all: [outputs_and_gradients(fn)(*e) for e in all])(examples)
    for shape, (args, cts), (got, gradients) in zip(shapes, examples, results, strict=True):
        values = dict(zip(("x", *given), args, strict=True))
        got, gradients = jax.tree.map(np.asarray, (got, gradients))
        what = f"{name}({', '.join(values)}) of {dtype}{shape}"
        assert got[0].dtype == dtype and got[0].shape == shape, what
        check_one(name, dtype, values, cts, got, gradients, eps, what)


# With all their arguments, the residual norms compute everything that the other norms compute.
WHOLE = ("residual_layer_norm", "residual_rms_norm")


LONGER = [pytest.param(LENGTHS[key], marks=pytest.mark.slow, id=key) for key in LENGTHS]


@pytest.mark.parametrize("op", WHOLE)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(op, kind, lengths):
    """Rows of many lengths, three rows at a time."""
    check_shapes(op, jnp.dtype(kind), [(3, n) for n in lengths], return_sum=True)


@pytest.mark.parametrize("op", WHOLE)
@pytest.mark.parametrize("lengths", [[1, 2, 3, 7, 8, 9, 17, 33, 64, 100, 1001], *LONGER])
def test_lengths_every_dtype(op, dtype, lengths):
    check_shapes(op, dtype, [(3, n) for n in lengths], return_sum=True)


@pytest.mark.parametrize("lengths", SHORT.values(), ids=SHORT)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_lengths_without_a_residual(op, lengths):
    for kind in ("float32", "bfloat16"):
        check_shapes(op, jnp.dtype(kind), [(2, n) for n in lengths[::2]], eps=1e-3)


ROWS = [1, 2, 3, 5, 8, 17, 63, 64, 65, 127, 263, 264, 265, 529, 1031, 4097]


@pytest.mark.parametrize("op", WHOLE)
def test_numbers_of_rows(op):
    """Each row counts once in the parameters' gradients, however the rows are grouped."""
    check_shapes(op, jnp.dtype("float32"), [(rows, 5) for rows in ROWS])
    check_shapes(op, jnp.dtype("bfloat16"), [(rows, 40) for rows in ROWS], parameters=np.float32)


def subsets(names):
    return [c for k in range(len(names) + 1) for c in itertools.combinations(names, k)]


@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("parameters", [None, np.float32])
def test_every_set_of_parameters(name, parameters, return_sum):
    """All, some and no parameters, in the dtype of x, and in float32 with bfloat16 x."""
    if return_sum and not name.startswith("residual"):
        pytest.skip("there is no sum")
    kind = jnp.dtype("bfloat16" if parameters else "float32")
    residual = ("residual",) * name.startswith("residual")
    for chosen in subsets([what for what in OPS[name] if what != "residual"]):
        check_shapes(name, kind, [(6, 33)], (*residual, *chosen), parameters, return_sum=return_sum)


@pytest.mark.slow
@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("lengths", [[1, 3, 8, 100, 1000, 1001, 16385], [5000, 40000]], ids=str)
def test_every_set_of_parameters_in_every_dtype(name, dtype, lengths, return_sum):
    if return_sum and not name.startswith("residual"):
        pytest.skip("there is no sum")
    residual = ("residual",) * name.startswith("residual")
    wide = np.float64 if dtype == np.float64 else np.float32
    for chosen in subsets([what for what in OPS[name] if what != "residual"]):
        for parameters in (None, wide):
            given = (*residual, *chosen)
            shapes = [(11, n) for n in lengths]
            check_shapes(name, dtype, shapes, given, parameters, return_sum=return_sum)


def test_ranks(name):
    shapes = [(7,), (1,), (100,), (2, 3, 4, 5), (1, 1, 1, 9), (3, 1, 2, 1), (2, 1, 3, 1, 2, 8)]
    check_shapes(name, jnp.dtype("float32"), shapes)


LARGE = [(3, 131072), (3, 262144), (3, 262145), (1, 1 << 20), (1, (1 << 22) + 1)]
LARGE += [(1, (1 << 24) + 3), (20011, 1000), (3, 1000, 4096), (1 << 19, 17)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_large_arrays(name, kind, shape):
    check_shapes(name, jnp.dtype(kind), [shape])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 5, 67, 264, 1031])
@pytest.mark.parametrize("lengths", SHORT.values(), ids=SHORT)
def test_rows(name, dtype, rows, lengths):
    check_shapes(name, dtype, [(rows, n) for n in lengths])


def test_offsets(name, dtype):
    """Numbers that are large compared with their deviations: the reference's error is the limit."""
    if "rms" in name or dtype == np.float64:
        pytest.skip("there is no mean, or nothing more accurate to compare with")
    offset, size = (1e4, 1.0) if jnp.finfo(dtype).eps < 1e-4 else (64.0, 4.0)
    rng = np.random.default_rng(1)
    for n in (9, 1000):
        x = (offset + size * rng.standard_normal((4, n))).astype(dtype)
        given = OPS[name]
        args = (x, *draws(x.shape, given)(rng, dtype)[1:])
        fn, plain = (outputs_and_gradients(f) for f in variant(name, given))
        cts = (normal(rng, x.shape, dtype),)
        got, want = jax.jit(fn)(args, cts), jax.jit(plain)(args, cts)
        exact = oracle(plain, args, cts)
        assert_matches(got, want, exact, Tolerance(ulps=8.0, factor=4.0), f"{n} columns")


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1.0, 1e6, 1, np.float32(0.25), np.float64(1e-3)])
def test_eps(name, eps):
    check_shapes(name, jnp.dtype("float32"), [(4, 8), (3, 37), (2, 1000)], eps=eps)


# Special values -----------------------------------------------------------------------------------


def test_gradients_of_rows_without_deviations(dtype):
    """The rounding of the sum must not count as a deviation from the mean."""
    for n in (1, 8, 100):
        x, residual = np.ones((2, n), dtype), np.full((2, n), 0.003, dtype)
        scale, dy = np.ones(n, dtype), normal(np.random.default_rng(n), (2, n), dtype)
        fn = outputs_and_gradients(lambda *args: fo.residual_layer_norm(*args))
        _, (dx, _, dscale) = jax.jit(fn)((x, residual, scale), (dy,))
        dx, dscale, g = (np.asarray(a).astype(np.float64) for a in (dx, dscale, dy))
        size = np.abs(g).max()
        # Without deviations, the reciprocal standard deviation is 1 / sqrt(1e-6) = 1000.
        limit = 1000 * size * max(1e-4, float(jnp.finfo(dtype).eps))
        np.testing.assert_allclose(dx, 1000 * (g - mean(g)), atol=limit, rtol=1e-2)
        np.testing.assert_allclose(dscale, 0, atol=2e-2 * size)


def test_constant_rows(name, dtype):
    """The layer norm of a constant row is NaN with ``eps=0``, and otherwise the bias."""
    x = np.full((3, 16), 2, dtype)
    kwargs = {"residual": np.zeros_like(x)} if "residual" in OPS[name] else {}
    fn = functools.partial(getattr(fo, name), **kwargs)
    y = np.asarray(jax.jit(functools.partial(fn, eps=0.0))(x)).astype(np.float64)
    if "rms" in name:
        assert (y == 1).all()
        return
    assert np.isnan(y).all()
    bias = np.arange(16).astype(dtype)
    np.testing.assert_array_equal(
        np.asarray(fn(x, bias=bias)).astype(np.float64), np.broadcast_to(np.arange(16.0), (3, 16))
    )
    dx = jax.vjp(fn, x)[1](np.full_like(x, 3))[0]
    assert not np.asarray(dx).astype(np.float64).any()


def test_the_sum_is_rounded_once(dtype):
    """The sum is rounded once, and the norm is that of the rounded sum."""
    if dtype == np.float64:
        pytest.skip("it has no wider dtype")
    eps = float(jnp.finfo(dtype).eps)
    x = np.ones((4, 64), dtype)
    if dtype != np.float32:
        # The terms add slightly more than half an eps to 1. Rounded twice, the sum would be 1.
        residual, bias = np.full_like(x, eps / 2), np.full(64, eps / 1024, dtype)
        for name in WHOLE:
            op = getattr(fo, name)
            assert_bitwise_equal(
                op(x, residual, input_bias=bias, return_sum=True)[1], np.full_like(x, 1 + eps)
            )
    # The deviations are lost in the rounded sum.
    sign = np.where(np.arange(64) % 2, 1, -1)
    residual = np.broadcast_to(sign * eps / 8, x.shape).astype(dtype)
    y, s = fo.residual_layer_norm(x, residual, return_sum=True)
    assert_bitwise_equal(s, x)
    assert_bitwise_equal(y, np.zeros_like(x))


# Two users of one result --------------------------------------------------------------------------


# Row lengths for every variant of the kernels, and some that vectorized loads do not divide.


@pytest.mark.jax
@pytest.mark.parametrize("what", ["nothing", "x", "scale"])
def test_two_users_with_what_is_wanted(name, what):
    """The backward without parameters, without parameter gradients, and with one of them."""
    given = tuple(g for g in OPS[name] if g == "residual" or what != "nothing")
    (fn, _), args, dys = example(name, (37, 40), np.float32, given, seed=23, count=2)
    both, _ = variant(name, given, fanout=True)
    at = 1 + given.index("scale") if what == "scale" else 0

    def gradient(fn, cts):
        one = lambda a: outputs(fn(*args[:at], a, *args[at + 1 :]))  # noqa: E731
        return jax.jit(lambda a: jax.vjp(one, a)[1](cts)[0])(args[at])

    assert_bitwise_equal(gradient(both, dys), gradient(fn, (jnp.add(*dys),)))


# Determinism and implementations ------------------------------------------------------------------


def example(name, shape=(6, 5, 16), dtype=np.float32, given=None, seed=6, count=1):
    """The op and its reference (with all arguments by default), operands, and cotangents."""
    given = OPS[name] if given is None else given
    rng = np.random.default_rng(seed)
    args = draws(shape, given)(rng, jnp.dtype(dtype))
    cts = tuple(normal(rng, shape, jnp.dtype(dtype)) for _ in range(count))
    return variant(name, given), args, cts


def test_a_gradient_computes_what_is_wanted(name):
    """The backward computes only the wanted sums, bitwise equal to those of all together."""
    (fn, _), args, cts = example(name)
    everything = jax.jit(outputs_and_gradients(fn))(args, cts)[1]
    for i, what in enumerate(("x", *OPS[name])):

        def of_one(arg, i=i):
            one = lambda a: outputs(fn(*args[:i], a, *args[i + 1 :]))  # noqa: E731
            return jax.vjp(one, arg)[1](cts)[0]

        text = jax.jit(of_one).lower(args[i]).compile().as_text()
        assert targets(text) == ["norm", "norm_bwd"]
        call = next(line for line in text.splitlines() if "jax_fastops.norm_bwd" in line)
        wanted = {key: f" {key}: ..." in call for key in ("dscale", "dbias", "dinput_bias")}
        assert wanted == {key: key == f"d{what}" for key in wanted}, call
        assert_bitwise_equal(jax.jit(of_one)(args[i]), everything[i], what)


# Residuals ----------------------------------------------------------------------------------------


# vmap and derivatives -----------------------------------------------------------------------------


# Sharding -----------------------------------------------------------------------------------------


CLOSE = dict(rtol=2e-4, atol=2e-5)


def reduced_elements(text):
    """The number of elements that the all-reduces of a program sum.

    XLA may merge all-reduces into one operation, and on a GPU into one array.
    """
    found = re.findall(r"= (\(?[^=]*?\)?) all-reduce(?:-start)?\(", text)
    shapes = [dims for types in found for dims in re.findall(r"\w+\[([\d,]*)\]", types)]
    return sum(math.prod(int(d) for d in dims.split(",") if d) for dims in shapes)


@pytest.mark.jax
@over_kinds
def test_a_device_has_as_many_sums_as_alone(name, axis_type):
    """Each device writes more than 66 partial sums, and at most 132, the limit of one device. All
    devices together sum as many elements as the gradients of the parameters have."""
    (fn, _), args, cts = example(name, (16, 512, 24))
    specs = tuple(P("a") if a.ndim > 1 else P() for a in args)
    _, text = over_mesh(
        mesh_for(axis_type), outputs_and_gradients(fn), (args, cts), (specs, P("a"))
    )
    (call,) = (line for line in text.splitlines() if "norm_bwd" in line and "custom-call(" in line)
    shapes = re.findall(r"f32\[([\d,]*)\]", call.split(" custom-call(")[0])[1:]
    assert shapes
    for shape in shapes:
        *sums, n = map(int, shape.split(","))
        assert n == 24 and 66 < math.prod(sums) <= 132
    assert reduced_elements(text) == sum(a.size for a in args if a.ndim == 1)


# Sizes and types ----------------------------------------------------------------------------------


def test_a_weak_residual_takes_the_dtype_of_x():
    x = jnp.ones((2, 4), jnp.bfloat16)
    weak = jnp.broadcast_to(jnp.asarray(2.0), (2, 4))
    for name in WHOLE:
        y, s = getattr(fo, name)(x, weak, return_sum=True)
        assert y.dtype == s.dtype == jnp.bfloat16
        assert_bitwise_equal(s, np.full((2, 4), 3, jnp.bfloat16))


@pytest.mark.parametrize("op", WHOLE)
@pytest.mark.parametrize("n", [40, 256])
@pytest.mark.parametrize("mode", ["native", "xla"])
def test_dropout_of_another_width(op, n, mode):
    """It follows the cast to the wider dtype, as the input bias does."""
    rng, key = np.random.default_rng(4), jax.random.key(2)
    x = normal(rng, (5, n), jnp.bfloat16)
    residual, bias, ct = (normal(rng, shape, np.float32) for shape in ((5, n), (n,), (5, n)))
    more = dict(dropout_key=key, dropout_rate=0.4, return_sum=True)

    @jax.jit
    def step(x, residual, bias):
        fn = lambda *args: getattr(fo, op)(args[0], args[1], input_bias=args[2], **more)  # noqa: E731
        found, pullback = jax.vjp(fn, x, residual, bias)
        return found, pullback((ct, ct))

    with fo.use_implementation(mode):
        found, (dx, *rest) = step(x, residual, bias)
        wanted, (dwide, *wanted_rest) = step(x.astype(np.float32), residual, bias)

    def same(got, want):
        if mode == "native":
            return assert_bitwise_equal(got, want)
        eps = float(jnp.finfo(got.dtype).eps)  # XLA may fuse the two programs in different ways
        got, want = (np.asarray(y, np.float32) for y in (got, want))
        np.testing.assert_allclose(got, want, rtol=2 * eps, atol=1e-6)

    jax.tree.map(same, (found, rest), (wanted, wanted_rest))
    same(dx, dwide.astype(jnp.bfloat16))
    kept = fo.dropout_mask(key, x.shape, 0.4)
    total = np.where(kept, (x.astype(np.float32) + bias) / np.float32(0.6), 0) + residual
    np.testing.assert_allclose(found[1], total, rtol=1e-4, atol=1e-5)


WIDTHS = [(x, p) for x in FLOAT_DTYPES for p in FLOAT_DTYPES if x != p]


@pytest.mark.parametrize("mode", ["native", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("of_x", "of_parameters"), WIDTHS)
def test_parameters_of_every_dtype(of_x, of_parameters, mode):
    """The result has the dtype of x, and each gradient that of its operand."""
    name = "residual_layer_norm"
    with x64("float64" in (of_x, of_parameters)), fo.use_implementation(mode):
        dtype, parameters = jnp.dtype(of_x), jnp.dtype(of_parameters)
        given = OPS[name]
        rng = np.random.default_rng(9)
        args = draws((40, 24), given, parameters)(rng, dtype)
        cts = (normal(rng, (40, 24), dtype),)
        (y,), found = jax.jit(outputs_and_gradients(variant(name, given)[0]))(args, cts)
        assert y.dtype == dtype and [g.dtype for g in found] == [a.dtype for a in args]
        # With "xla", the rounding of the sum may be skipped.
        if mode == "native" and (parameters != np.float64 or dtype == np.float64):
            values = dict(zip(("x", *given), args, strict=True))
            got = jax.tree.map(np.asarray, ((y,), found))
            check_one(name, dtype, values, cts, *got, 1e-6, f"{of_x}, {of_parameters}")


# Errors -------------------------------------------------------------------------------------------

X = normal(np.random.default_rng(11), (2, 3, 8), np.float32)
ROW = np.ones(8, np.float32)

BAD_PARAMETERS = {
    "short": (np.ones(7, np.float32), ValueError, ["(7,)", "(8,)", "(2, 3, 8)"]),
    "of one": (np.ones(1, np.float32), ValueError, ["(1,)", "(8,)"]),
    "a number": (2.0, ValueError, ["()", "(8,)"]),
    "of two dimensions": (np.ones((1, 8), np.float32), ValueError, ["(1, 8)", "(8,)"]),
    "of the shape of x": (X, ValueError, ["(2, 3, 8)", "(8,)"]),
    "integers": (np.ones(8, np.int32), TypeError, ["int32", "float32", "(8,)"]),
    "booleans": (np.ones(8, bool), TypeError, ["bool", "float32"]),
    "complex": (np.ones(8, np.complex64), TypeError, ["complex64", "float32"]),
    "a list": ([1.0] * 8, TypeError, ["list", "array"]),
    "a text": ("ones", TypeError, ["str", "array"]),
}

BAD_X = {
    "integers": (X.astype(np.int32), TypeError, ["x has dtype int32", "(2, 3, 8)", "float32"]),
    "booleans": (X > 0, TypeError, ["x has dtype bool", "float32"]),
    "complex": (X * 1j, TypeError, ["x has dtype complex64", "float32"]),
    "eight bits": (X.astype(jnp.float8_e4m3fn), TypeError, ["x has dtype float8", "float32"]),
    "None": (None, TypeError, ["x is None", "array"]),
    "a list": ([1.0, 2.0], TypeError, ["x is of type list", "array"]),
    "a text": ("text", TypeError, ["x is of type str", "array"]),
    "keys": (jax.random.key(0), TypeError, ["x has dtype key<"]),
    "no dimension": (np.float32(1), ValueError, ["x has shape ()", "1 dimension"]),
    "a number": (2.0, ValueError, ["x has shape ()", "1 dimension"]),
}

BAD_EPS = {
    "None": (None, TypeError, ["eps is None", "number"]),
    "a text": ("1e-6", TypeError, ["str", "number"]),
    "an array": (np.ones(2), TypeError, ["ndarray", "number"]),
    "a jax.Array": (jnp.float32(1e-6), TypeError, ["number"]),
    "a bool": (True, TypeError, ["bool", "number"]),
    "complex": (1j, TypeError, ["complex", "number"]),
    "a complex of NumPy": (np.complex64(1), TypeError, ["complex", "number"]),
    "NaN": (float("nan"), ValueError, ["nan"]),
    "a NaN of NumPy": (np.float32("nan"), ValueError, ["nan"]),
    "infinite": (float("inf"), ValueError, ["inf", "0 or more, and finite"]),
    "negative": (-1, ValueError, ["-1.0", "0 or more"]),
    "a bit below 0": (np.float64(-1e-9), ValueError, ["-1e-09", "0 or more"]),
    "larger than any float": (10**400, ValueError, ["eps"]),
}

BAD_RESIDUALS = {
    "of another shape": (X[:1], ValueError, ["(1, 3, 8)", "(2, 3, 8)"]),
    "of fewer dimensions": (ROW, ValueError, ["(8,)", "(2, 3, 8)"]),
    "integers": (X.astype(np.int32), TypeError, ["int32", "float32"]),
    "a number": (1.0, ValueError, ["()", "(2, 3, 8)"]),
    "None": (None, TypeError, ["None", "array"]),
    "a list": ([1.0], TypeError, ["list", "array"]),
    "another narrow dtype": (X.astype(jnp.bfloat16), TypeError, ["bfloat16", "must be the same"]),
}


def refused(name, error, words, x=X, **kwargs):
    """Checks that the message names the op, the argument, what was given and what is accepted."""
    if "residual" in OPS[name] and "residual" not in kwargs:
        kwargs["residual"] = X
    with pytest.raises(error) as raised:
        getattr(fo, name)(x, **kwargs)
    message = str(raised.value)
    assert not [word for word in (f"{name}:", *words) if word not in message], message


BAD = {"parameter": BAD_PARAMETERS, "x": BAD_X, "eps": BAD_EPS, "residual": BAD_RESIDUALS}
REFUSED = [(argument, what) for argument, table in BAD.items() for what in table]


@pytest.mark.parametrize("argument, what", REFUSED)
def test_refused(name, argument, what):
    value, error, words = BAD[argument][what]
    parameters = [own for own in OPS[name] if own != "residual"]
    for own in parameters if argument == "parameter" else (argument,):
        if own == "residual" and own not in OPS[name]:
            pytest.skip("has no residual")
        given = {own: value}
        if "residual" in OPS[name]:  # that of x has the same error, and the message names the first
            x = X.astype(np.float16) if "narrow" in what else X
            given = {"x": x, "residual": given.get("x", X)} | given
        refused(name, error, [own, *words], **given)


def test_a_traced_eps_is_refused(name):
    more = {"residual": X} if "residual" in OPS[name] else {}
    with pytest.raises(TypeError, match="eps is traced"):
        jax.jit(lambda x, e: getattr(fo, name)(x, eps=e, **more))(X, 1e-6)


def test_arguments_that_there_are_not():
    with pytest.raises(TypeError):
        fo.rms_norm(X, ROW, ROW)
    with pytest.raises(TypeError):
        fo.residual_rms_norm(X, X, ROW, ROW)
    with pytest.raises(TypeError):
        fo.layer_norm(X, ROW, ROW, 1e-6)
    with pytest.raises(TypeError):
        fo.residual_layer_norm(X)
    with pytest.raises(TypeError):
        fo.layer_norm(X, return_sum=True)


def test_refused_under_jit_before_anything_runs(name):
    shape = jax.ShapeDtypeStruct((2, 8), np.float32)
    more = (shape,) if "residual" in OPS[name] else ()
    with pytest.raises(ValueError, match=r"scale has shape \(7,\)"):
        jax.eval_shape(getattr(fo, name), shape, *more, jax.ShapeDtypeStruct((7,), np.float32))


@pytest.mark.jax
def test_a_gradient_of_any_size_over_several_devices_can_be_exported():
    """The number of shards of a symbolic dimension is unknown, so it is one group."""
    mesh = make_mesh({"a": device_count()}, AxisType.Auto)
    (fn, _), args, cts = example("layer_norm", (8, 4, 16), np.float32)
    b, s = jax.export.symbolic_shape(f"{mesh.size}*b, s")
    rows = NamedSharding(mesh, P("a"))
    whole = NamedSharding(mesh, P())
    shapes = [jax.ShapeDtypeStruct((b, s, 16), np.float32)] + [
        jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args[1:]
    ]
    run = jax.jit(
        lambda args, ct: outputs_and_gradients(fn)(args, (ct,)),
        in_shardings=((rows, *[whole] * len(args[1:])), rows),
    )
    exported = jax.export.export(run, disabled_checks=fo.export_checks())(tuple(shapes), shapes[0])
    got = jax.jit(exported.call)(
        jax.device_put(tuple(args), (rows, *[whole] * len(args[1:]))), jax.device_put(cts[0], rows)
    )
    want = outputs_and_gradients(fn)(args, cts)
    assert_close(got, want, rtol=1e-5, atol=1e-5)
