"""`linear_cross_entropy`: values and gradients, chunks, transformations, sharding, memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, checks
from harness.case import OTHER_FORM, SLOW
from harness.compat import make_mesh, x64
from harness.numerics import assert_close_in_norm, normal
from harness.programs import assert_strict, equations, targets_of
from harness.sharding import mesh_for, over_kinds
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

# A GPU rounds the operands of float32 products to 10 bits otherwise.
pytestmark = pytest.mark.usefixtures("exact_products")
TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}
HARD = dict(label_smoothing=0.1, z_loss=0.01, softcap=5.0)


def expected(x, table, bias, labels, where, reduction, label_smoothing=0, z_loss=0, softcap=None):
    """By the logits, in float64."""
    logits = x @ table.T + bias
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    kept = (labels >= 0) & where
    lse = jax.nn.logsumexp(logits, -1)
    index = jnp.where(kept, labels, 0)[..., None]  # one that is too large picks NaN
    each = (1 - label_smoothing) * (lse - jnp.take_along_axis(logits, index, -1)[..., 0])
    each = each + label_smoothing * (lse - logits.mean(-1)) + z_loss * lse**2
    each = jnp.where(kept, each, 0)
    if reduction == "none":
        return each
    return each.sum() / (jnp.maximum(kept.sum(), 1) if reduction == "mean" else 1)


def draw(shape, classes, dtype, width=24, seed=0):
    rng = np.random.default_rng(seed)
    x, table, bias = (
        jnp.asarray(rng.standard_normal(size), dtype)
        for size in ((*shape, width), (classes, width), classes)
    )
    return x, table, bias, rng.integers(-1, classes, shape), rng.random(shape) < 0.8


def compare(found, wanted, tolerance):
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        error = np.abs(np.asarray(mine, float) - theirs).max()
        assert error <= tolerance * (np.abs(theirs).max() + 0.1)


def turned(table, class_axis):
    """A table ``[v, d]`` with the classes along this axis, or the inverse."""
    return table.T if class_axis else table


def drawn(shape, class_axis):
    def make(rng, dtype):
        sizes = (*shape, 3), (3, 5) if class_axis else (5, 3), (5,)
        given = (normal(rng, size, dtype) for size in sizes)
        return *given, rng.integers(-1, 5, shape).astype(np.int32)

    return make


def case(reduction, shape, sharded, sharding, class_axis=0, **more):
    """Two chunks. Where bias and softcap are not fused, 16-bit logits are rounded more often than
    those of the reference: for them see TOLERANCE."""
    options = {key: more.pop(key) for key in HARD if key in more}

    def ours(x, table, bias, labels):
        chunk = 8 if x.shape[0] == sharded[0] else 2
        more = dict(bias=bias, reduction=reduction, chunk=chunk, class_axis=class_axis, **options)
        return fo.linear_cross_entropy(x, table, labels, **more)

    def reference(x, table, bias, labels):
        rows = turned(table, class_axis)
        return expected(x, rows, bias, labels, True, reduction, **options)

    return Case(
        name=f"{reduction} of columns" if class_axis else reduction,
        fn=ours,
        reference=reference,
        make_args=drawn(shape, class_axis),
        make_sharded_args=drawn(sharded, class_axis),
        dtypes=("float32", "float64"),
        tolerance=Tolerance(ulps=16.0, lone=1.0),  # terms of a tangent cancel
        shardings=(sharding,),
        modes=("native",),
        **more,
    )


TOKENS = (0, None, None, 0)
# The losses and their number; the gradients of table and bias.
SUMS = Sharding("tokens", TOKENS, (None,), 2, gradient_all_reduces=2, shard_map=False)
BY_TOKENS = Sharding("tokens", TOKENS, (0,), gradient_all_reduces=2)
BY_SUM = Sharding("tokens", TOKENS, (None,), 1)
SOME = rf"{OTHER_FORM}|scan/grad|checkpoint/default"
MEAN = case("mean", (3,), (16,), SUMS, symbolic=("b, d", "v, d", "v", "b"), empty="", versions=True)
NONE = case("none", (2, 2), (16, 2), BY_TOKENS, quick=SOME)
SUM = case("sum", (2, 2), (16, 2), BY_SUM, basic_only=True, **HARD)
COLUMNS = [
    case("mean", (3,), (16,), SUMS, 1, symbolic=("b, d", "d, v", "v", "b"), empty="", quick=SOME),
    case("none", (2, 2), (16, 2), BY_TOKENS, 1, quick=SOME),
    case("sum", (2, 2), (16, 2), BY_SUM, 1, basic_only=True, quick="vjp", **HARD),
]


@checks(MEAN, NONE, SUM, *COLUMNS)
def test_transforms(check, native):
    check()


# In float16 and float64, quick tests have all options at the same time.
@pytest.mark.parametrize(
    "dtype, chunk, options",
    [
        pytest.param(
            dtype, chunk, options, marks=[SLOW] * (not options and dtype in ("float16", "float64"))
        )
        for dtype in TOLERANCE
        for chunk, options in [(None, {}), (7, {}), (7, HARD)]
    ],
)
@pytest.mark.parametrize("classes", [1, 7, 1030])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients(dtype, classes, reduction, chunk, options):
    """In chunks, the table has the classes along its last axis."""
    class_axis = 0 if chunk is None else 1
    with x64():
        *given, labels, where = draw((3, 11), classes, dtype)
        given[1] = turned(given[1], class_axis)
        weights = 1.0 + np.arange(11) if reduction == "none" else 1.0

        def ours(x, table, bias):
            more = dict(where=where, reduction=reduction, chunk=chunk, class_axis=class_axis)
            more |= dict(bias=bias, **options)
            return (fo.linear_cross_entropy(x, table, labels, **more) * weights).sum()

        def theirs(x, table, bias):
            rows = turned(table, class_axis)
            found = expected(x, rows, bias, labels, where, reduction, **options)
            return (found * weights).sum()

        found = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(*given)
        assert [g.dtype for g in found[1]] == [a.dtype for a in given]
        wide = [a.astype(np.float64) for a in given]
        wanted = jax.value_and_grad(theirs, (0, 1, 2))(*wide)
        compare(found, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("classes, width", [(30522, 8), (2**17 + 1, 8)])
def test_large_vocabularies(classes, width):
    x, table, bias, labels, _ = draw((9,), classes, np.float32, width)
    loss = lambda *args: fo.linear_cross_entropy(args[0], args[1], labels, bias=args[2])  # noqa: E731
    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, table, bias)
    with x64():
        wide = [jnp.asarray(a, np.float64) for a in (x, table, bias)]
        theirs = functools.partial(expected, labels=labels, where=True, reduction="mean")
        wanted = jax.value_and_grad(theirs, (0, 1, 2))(*wide)
        compare(found, wanted, 2e-5)


@pytest.mark.parametrize("class_axis", [0, 1])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("classes", [4096, 4099])
def test_the_table_is_not_transposed(class_axis, platform, classes):
    """Neither the table nor its gradient, also if it is padded."""
    x, table, bias, labels, _ = draw((4, 16), classes, "bfloat16")
    table = turned(table.astype(np.float32), class_axis)
    loss = lambda *args: fo.linear_cross_entropy(*args, labels, bias=bias, class_axis=class_axis)  # noqa: E731
    for fn in (loss, jax.value_and_grad(loss, (0, 1))):
        with fo.use_implementation("xla"):
            lowered = jax.jit(fn).trace(x, table).lower(lowering_platforms=(platform,))
        found = re.findall(r"stablehlo.transpose .*-> tensor<([0-9x]+)x", lowered.as_text())
        sizes = [np.prod([int(n) for n in shape.split("x")]) for shape in found]
        assert all(size < table.size for size in sizes)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_tokens_that_are_left_out(reduction):
    """Nothing that they hold is in a gradient."""
    x, table, bias, labels, where = draw((8,), 50, np.float32)
    labels[3], where[5], labels[5] = -1, False, 50
    hidden = x.at[3].set(np.nan).at[5].set(np.inf)

    def loss(x, table):
        more = dict(bias=bias, where=where, reduction=reduction)
        return fo.linear_cross_entropy(x, table, labels, **more).sum()

    found, wanted = (jax.value_and_grad(loss, (0, 1))(given, table) for given in (hidden, x))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.any(found[1][0][np.array([3, 5])])


@pytest.mark.parametrize("classes", [50, 1030])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_labels_that_are_too_large(reduction, classes, chunk):
    """The loss is NaN, and the gradients are finite, as those of optax' loss of the logits.

    The padded table has a row 1030.
    """
    x, table, bias, labels, where = draw((8,), classes, np.float32)
    labels[2:5], where[2:5] = [classes, classes + 57, 2**31 - 1], True
    keep = np.arange(8) < 2

    def step(fn, where):
        def loss(x, table, bias):
            losses = fn(x, table, bias, labels, where, reduction)
            return losses.sum(), losses

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, table, bias)

    def ours(x, table, bias, labels, where, reduction):
        more = dict(bias=bias, where=where, reduction=reduction, chunk=chunk)
        return fo.linear_cross_entropy(x, table, labels, **more)

    (_, losses), gradients = step(ours, where)
    (_, wanted), wanted_gradients = step(expected, where)
    assert np.isnan(np.asarray(losses)[()] if reduction != "none" else losses[2:5]).all()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5, atol=1e-6)
    compare(gradients, wanted_gradients, 2e-5)
    assert np.any(gradients[0][2])
    compare(step(ours, keep), step(expected, keep), 2e-5)  # tokens without a class are left out


@pytest.mark.parametrize("reduction, value", [("mean", 0), ("sum", 0), ("none", np.zeros(8))])
def test_no_token_counts(reduction, value):
    x, table, _, labels, _ = draw((8,), 50, np.float32)
    loss = functools.partial(fo.linear_cross_entropy, where=False, reduction=reduction)
    np.testing.assert_array_equal(loss(x, table, labels), value)
    assert not np.any(jax.grad(lambda t: loss(x, t, labels).sum())(table))
    assert np.all(loss(x[:0], table, labels[:0]) == 0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_class(reduction):
    """No label is a class of an empty table."""
    x, labels = jnp.ones((2, 5)), np.array([0, -1])
    loss = lambda t: fo.linear_cross_entropy(x, t, labels, reduction=reduction)  # noqa: E731
    wanted = [np.nan, 0] if reduction == "none" else np.nan
    np.testing.assert_array_equal(loss(jnp.ones((0, 5))), wanted)
    assert jax.grad(lambda t: loss(t).sum())(jnp.ones((0, 5))).shape == (0, 5)


@pytest.mark.parametrize("mode", ["native", "xla"])
@pytest.mark.parametrize(
    "reduction, classes, options", [("mean", 1030, {}), ("none", 1030, {}), ("none", 7, HARD)]
)
def test_strict_settings(reduction, classes, options, mode):
    """With a bias, a mask of a lower rank, and a padded table."""
    *given, labels, _ = draw((2, 3), classes, "bfloat16", 4)
    given[1] = given[1].astype(np.float32)
    options = options | dict(where=np.array([True, True, False]), chunk=4, reduction=reduction)

    def everything(x, table, bias):
        loss = lambda *args: fo.linear_cross_entropy(*args[:2], labels, bias=args[2], **options)  # noqa: E731
        gradient = jax.grad(lambda *args: jnp.sin(loss(*args)).sum(), (0, 1, 2))
        args = x, table, bias
        mapped = jax.vmap(gradient, (0, None, 0))(jnp.stack([x, x]), table, jnp.stack([bias, bias]))
        return loss(*args), jax.jvp(gradient, args, args), mapped

    with fo.use_implementation(mode):
        assert_strict(everything, *given)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_debug_infs(reduction, dtype, chunk):
    """Operands and results are finite, and so is what an eager call computes between them."""
    x, table, bias, labels, _ = draw((6,), 1030, dtype, 2)

    def step():
        loss = lambda x, t, b: fo.linear_cross_entropy(  # noqa: E731
            x, t, labels, bias=b, z_loss=0.01, chunk=chunk, reduction=reduction
        ).sum()
        return jax.value_and_grad(loss, (0, 1, 2))(x, table, bias)

    wanted = step()
    with jax.debug_infs(True):
        jax.tree.map(np.testing.assert_array_equal, step(), wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("far", [-1.0, -(2.0**14)])
def test_padding_has_no_probability(dtype, far):
    """Also if all logits are far below 0."""
    with x64():
        x, table = jnp.ones((2, 1), dtype), jnp.full((1030, 1), far, dtype)
        labels = np.array([0, 1029])
        loss = lambda t: fo.linear_cross_entropy(x, t, labels)  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(table)
    np.testing.assert_allclose(value, np.log(1030), rtol=1e-5)
    wanted = np.full((1030, 1), 1 / 1030)
    wanted[labels] -= 0.5
    np.testing.assert_allclose(np.asarray(gradient, float), wanted, rtol=1e-2)


@pytest.mark.parametrize("reduction, count", [("mean", 3), ("none", 4)])
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("given", ["precision", "setting"])
def test_precision(reduction, count, chunk, given):
    """All products of a step have it. Losses of tokens compute the logits again."""
    x, table, _, labels, _ = draw((6,), 40, np.float32)
    HIGHEST, HIGH = jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH

    def found(precision):
        more = dict(chunk=chunk, reduction=reduction)
        if given == "precision":
            more["precision"] = precision
        setting = precision if given == "setting" else None
        loss = lambda x, t: fo.linear_cross_entropy(x, t, labels, **more).sum()  # noqa: E731
        with jax.default_matmul_precision(setting):
            step = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, table)
        products = [e for e in equations(step.jaxpr) if e.primitive.name == "dot_general"]
        return [equation.params["precision"] for equation in products]

    assert found(None) == [None] * count
    assert found("highest") == [(HIGHEST, HIGHEST)] * count
    if given == "precision":
        assert found(HIGH) == [(HIGH, HIGH)] * count
        assert found((HIGHEST, HIGH)) == [(HIGHEST, HIGH)] * count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_logits(dtype):
    """One logit far above the others, all equal, and all far below 0."""
    table = jnp.asarray(np.stack([np.eye(3)[0] * 1e4, np.zeros(3), np.zeros(3)]), dtype)
    x, labels = (
        jnp.asarray(np.array([[1, 0, 0], [0, 1, 1], [-1, 0, 0]]), dtype),
        np.array([0, 1, 0]),
    )
    loss = functools.partial(fo.linear_cross_entropy, reduction="none")
    found = np.asarray(loss(x, table, labels), float)
    wanted = [0, np.log(3), float(table[0, 0]) + np.log(2)]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert np.all(np.isfinite(jax.grad(lambda t: loss(x, t, labels).sum())(table)))


def test_large_sums_in_float16():
    """In float16 the gradients of the sum over these tokens are infinite, not those of the mean."""
    x, table = jnp.full((20000, 3), 8, jnp.float16), jnp.zeros((4, 3), jnp.float16)
    bias, labels = jnp.zeros(4, jnp.float16), jnp.zeros(20000, int)
    loss = lambda t, b: fo.linear_cross_entropy(x, t, labels, bias=b)  # noqa: E731
    dtable, dbias = jax.grad(loss, (0, 1))(table, bias)
    wanted = np.array([-0.75, 0.25, 0.25, 0.25])
    np.testing.assert_allclose(dtable, np.repeat(8 * wanted[:, None], 3, 1), rtol=1e-3)
    np.testing.assert_allclose(dbias, wanted, rtol=1e-3)


@pytest.mark.parametrize("classes", [9, 1030])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_infinite_logits(reduction, classes):
    """Classes whose bias is -inf have no probability and no gradient."""
    x, table, bias, labels, _ = draw((6,), classes, np.float32)
    bias, labels = bias.at[5:].set(-np.inf), labels % 5

    def loss(x, table, bias, fn):
        found = fn(x, table, labels, bias=bias, reduction=reduction)
        return jnp.sum(found)

    found = jax.value_and_grad(loss, (0, 1, 2))(x, table, bias, fo.linear_cross_entropy)
    few = jax.value_and_grad(loss, (0, 1, 2))(x, table[:5], bias[:5], fo.linear_cross_entropy)
    compare((found[0], found[1][0]), (few[0], few[1][0]), 1e-6)
    for mine, theirs in zip(found[1][1:], few[1][1:], strict=True):
        compare(mine[:5], theirs, 1e-6)
        assert not np.any(mine[5:])
    gone = loss(x, table, jnp.full(classes, -np.inf), fo.linear_cross_entropy)
    assert np.isnan(gone), "as in jax.nn"


def test_explain():
    """The passes are shown, with how often they run."""
    x, table, _, labels, _ = draw((64,), 2000, np.float32)
    with fo.use_implementation("native"):
        loss = lambda x: fo.linear_cross_entropy(x, table, labels, chunk=16)  # noqa: E731
        (call,) = fo.explain(jax.grad(loss))(x).calls
    assert call.op == "cross_entropy" and call.kernel and call.differentiated and call.calls == 4


def loss_of(table, x, labels, **options):
    return fo.linear_cross_entropy(x, table, labels, chunk=5, **options)


@pytest.mark.parametrize("reduction, classes", [("mean", 40), ("sum", 1030), ("none", 1030)])
def test_derivatives(reduction, classes):
    """Forward mode, and second derivatives."""
    with x64():
        x, table, _, labels, _ = draw((13,), classes, np.float64)
        loss = lambda t: loss_of(t, x, labels, reduction=reduction).mean()  # noqa: E731
        plain = lambda t: expected(x, t, 0, labels, True, reduction).mean()  # noqa: E731
        gradient = jax.grad(plain)(table)
        np.testing.assert_allclose(
            jax.jvp(loss, (table,), (table,))[1], (gradient * table).sum(), rtol=1e-10
        )
        hessian = lambda f: jax.jvp(jax.grad(f), (table,), (x[:1] * table,))[1]  # noqa: E731
        np.testing.assert_allclose(hessian(loss), hessian(plain), rtol=1e-8, atol=1e-12)
        twice = lambda f: jax.grad(lambda t: (jax.grad(f)(t) ** 2).sum())(table)  # noqa: E731
        np.testing.assert_allclose(twice(loss), twice(plain), rtol=1e-8, atol=1e-12)


def test_kernels_and_residuals(native):
    """Passes of cross_entropy, and no residual of the size of the logits."""
    x, table, bias, labels, _ = draw((64,), 2000, np.float32)
    loss = lambda x, t, b: fo.linear_cross_entropy(x, t, labels, bias=b, chunk=16)  # noqa: E731
    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    assert targets_of(step, x, table, bias) == ["cross_entropy", "cross_entropy_bwd"]
    assert targets_of(jax.jit(loss), x, table, bias) == ["cross_entropy"]
    kept = jax.tree.leaves(jax.vjp(loss, x, table, bias)[1])
    assert sorted(a.shape for a in kept if a.ndim) == sorted([x.shape, table.shape, bias.shape])
    memory = step.lower(x, table, bias).compile().memory_analysis()
    if memory is not None:  # the padded table and its gradient, and a chunk's logits with theirs
        logits = 64 * 2000 * 4
        assert memory.temp_size_in_bytes < 3 * table.nbytes + 0.7 * logits


@over_kinds
@pytest.mark.parametrize("sharded, class_axis", [("tokens", 0), ("classes", 0), ("classes", 1)])
def test_sharding(axis_type, sharded, class_axis):
    """Tokens need the sums of results only. Classes are reduced over the devices by XLA."""
    mesh = mesh_for(axis_type)
    x, table, bias, labels, _ = draw((16, 12), 128, np.float32)
    table, options = turned(table, class_axis), dict(chunk=48, class_axis=class_axis)
    loss = lambda x, t, b, labels: fo.linear_cross_entropy(x, t, labels, bias=b, **options)  # noqa: E731
    step = jax.value_and_grad(loss, (0, 1, 2))
    wanted = jax.jit(step)(x, table, bias, labels)
    tokens, classes = (P("a"), P()) if sharded == "tokens" else (P(), P("a"))
    specs = tokens, P(None, *classes) if class_axis else classes, classes, tokens
    given = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((x, table, bias, labels), specs, strict=True)
    ]
    mode = "xla" if sharded == "classes" else "auto"
    with jax.set_mesh(mesh), fo.use_implementation(mode):
        compiled = jax.jit(step).lower(*given).compile()
    for mine, theirs in zip(
        jax.tree.leaves(compiled(*given)), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(np.asarray(mine), theirs, rtol=2e-5, atol=1e-6)
    pattern = r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\("
    found = re.findall(pattern, compiled.as_text())
    # Tokens: the gradients with the loss, and the number of tokens. Classes: the maximum, the sum
    # of exponentials with the picked logit, and the gradient of x. XLA may combine those of tokens.
    assert found in [["all-reduce"] * n for n in ((1, 2) if sharded == "tokens" else (3,))]


@pytest.mark.parametrize("tokens, classes", [(P("a"), P()), (P(None, "a"), P()), (P(), P("a"))])
def test_chunks_of_a_device(tokens, classes):
    """Over explicit axes, the chunks are as large on each device as on one device by itself."""
    mesh = mesh_for(AxisType.Explicit)
    shapes = ((16, 4096, 8), tokens), ((2**17, 8), classes), ((16, 4096), tokens)
    dtypes = jnp.bfloat16, jnp.bfloat16, np.int32

    def length(places):
        given = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=places(spec))
            for (shape, spec), dtype in zip(shapes, dtypes, strict=True)
        ]
        program = str(jax.make_jaxpr(fo.linear_cross_entropy)(*given))
        return int(re.search(r"length=(\d+)", program)[1])

    assert length(lambda spec: None) == 32
    with jax.set_mesh(mesh), fo.use_implementation("xla"):
        assert length(lambda spec: NamedSharding(mesh, spec)) == 32 // mesh.size


def test_only_the_table_is_in_the_mesh():
    """Tokens that were made outside of the mesh have no axes to count the shards of the table."""
    x, table, _, labels, _ = draw((16,), 128, np.float32)
    wanted = fo.linear_cross_entropy(x, table, labels)
    mesh = mesh_for(AxisType.Explicit)
    table = jax.device_put(table, NamedSharding(mesh, P("a")))
    with jax.set_mesh(mesh), fo.use_implementation("xla"):
        got = fo.linear_cross_entropy(x, table, labels)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@over_kinds
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("class_axis", [0, 1])
def test_features_of_the_table_are_sharded_as_tokens(axis_type, class_axis, reduction):
    """The table is gathered, and its gradient is sharded as it is."""
    mesh = mesh_for(axis_type)
    x, table, _, labels, _ = draw((16, 12), 128, np.float32)
    table = turned(table, class_axis)

    def loss(x, table):
        options = dict(chunk=96, class_axis=class_axis, reduction=reduction)
        return jnp.square(fo.linear_cross_entropy(x, table, labels, **options)).sum()

    step = jax.value_and_grad(loss, (0, 1))
    wanted = step(x, table)
    specs = P("a"), P("a", None) if class_axis else P(None, "a")
    given = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip((x, table), specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        labels = jax.device_put(labels, NamedSharding(mesh, P("a")))
        found = jax.jit(step)(*given)
    assert_close_in_norm(found, wanted, 2e-6)
    if axis_type == AxisType.Explicit:
        assert found[1][1].sharding.is_equivalent_to(given[1].sharding, 2)


@over_kinds
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "tokens, classes", [(P("a"), P("b")), (P("a", "b"), P()), (P("a", "b"), P("c"))]
)
def test_several_axes(axis_type, reduction, tokens, classes):
    """Nothing is gathered if axes of the tokens and the classes are sharded, in two chunks."""
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    mesh = make_mesh({"a": 2, "b": 2, "c": 2}, axis_type)
    mode = "native" if classes == P() else "xla"
    x, table, bias, labels, _ = draw((16, 12), 128, np.float32)

    def loss(x, table, bias, labels):
        options = dict(bias=bias, chunk=96, reduction=reduction)
        losses = fo.linear_cross_entropy(x, table, labels, **options)
        return jnp.square(losses).sum(), losses

    step = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    wanted = jax.jit(step)(x, table, bias, labels)
    specs = (tokens, classes, classes, tokens)
    given = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip((x, table, bias, labels), specs, strict=True)
    ]
    with jax.set_mesh(mesh), fo.use_implementation(mode):
        compiled = jax.jit(step).lower(*given).compile()
    found = compiled(*given)
    assert reduction == "mean" or found[0][1].sharding.is_equivalent_to(given[3].sharding, 2)
    assert found[1][0].sharding.is_equivalent_to(given[0].sharding, 3)
    assert_close_in_norm(found, wanted, 2e-6)
    assert found[1][1].sharding.is_equivalent_to(given[1].sharding, 2)
    assert not re.search("all-gather|all-to-all|collective-permute", compiled.as_text())


X, TABLE, LABELS = np.ones((3, 4), np.float32), np.ones((5, 4), np.float32), np.zeros(3, int)


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        ((X.astype(int), TABLE, LABELS), {}, TypeError, "x has dtype int"),
        ((X, TABLE.astype(int), LABELS), {}, TypeError, "table has dtype int"),
        ((X, TABLE, LABELS * 1.0), {}, TypeError, "labels has dtype float"),
        (
            (X, TABLE[:, 1:], LABELS),
            {},
            ValueError,
            r"table has shape \(5, 3\); it must be \[v, d\]",
        ),
        ((X, TABLE, LABELS[1:]), {}, ValueError, r"labels has shape \(2,\); it must be \(3,\)"),
        (
            (X, TABLE, LABELS),
            dict(class_axis=1),
            ValueError,
            r"table has shape \(5, 4\); it must be \[d, v\]",
        ),
        ((X, TABLE.T, LABELS), dict(class_axis=2), ValueError, "class_axis is 2"),
        ((X[0, 0], TABLE, LABELS), {}, ValueError, "x has shape"),
        (
            (X, TABLE, LABELS),
            dict(bias=X[0]),
            ValueError,
            r"bias has shape \(4,\); it must be \(5,\)",
        ),
        ((X, TABLE, LABELS), dict(where=X), TypeError, "where"),
        ((X, TABLE, LABELS), dict(chunk=0), ValueError, "chunk is 0"),
        ((X, TABLE, LABELS), dict(chunk=1.5), TypeError, "chunk"),
        ((X, TABLE, LABELS), dict(softcap=0), ValueError, "softcap is 0"),
        ((X, TABLE, LABELS), dict(softcap=np.nan), ValueError, "softcap is nan"),
        ((X, TABLE, LABELS), dict(reduction="max"), ValueError, "reduction is 'max'"),
        ((X, TABLE, LABELS), dict(label_smoothing=2), ValueError, "label_smoothing is 2"),
    ],
)
def test_errors(args, options, error, message):
    with pytest.raises(error, match=f"linear_cross_entropy: .*{message}"):
        fo.linear_cross_entropy(*args, **options)


@pytest.mark.parametrize("lowest", [-1e38, float(np.finfo(np.float32).min), -np.inf])
def test_padded_classes_have_no_weight(lowest):
    """The table is padded to 1088 rows. All classes are alike, unless their logits are -inf."""
    x, table = np.ones((5, 8), np.float32), np.zeros((1030, 8), np.float32)
    labels, bias = np.arange(5), np.full(1030, lowest, np.float32)
    with jax.default_matmul_precision("highest"):
        loss = fo.linear_cross_entropy(x, table, labels, bias=bias, reduction="sum")
    want = 5 * np.log(1030) if np.isfinite(lowest) else np.nan
    np.testing.assert_allclose(loss, want, rtol=1e-5)
