"""The layers for Flax NNX, compared with those of Flax."""

import importlib.util
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_bitwise_equal
from harness.compat import make_mesh, x64
from harness.numerics import normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops import _dispatch

pytest.importorskip("flax", reason="the layers need Flax")

from flax import linen, nnx

import jax_fastops.nnx as ours

LAYERS = ("BatchNorm", "LayerNorm", "RMSNorm")
ROWS = LAYERS[1:]
SHAPE = (6, 5, 8)
MASK = np.arange(6 * 5).reshape(6, 5, 1) % 3 > 0
# Relative to the largest element. Flax computes in the narrow dtype at inference, and its fast
# variance loses digits.
TOLERANCE = {"float64": 1e-12, "float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}


def draw(seed, shape=SHAPE, dtype=jnp.float32):
    return jnp.asarray(normal(np.random.default_rng(seed), shape, np.float64) + 0.5, dtype)


def pair(name, features=8, **options):
    """A layer of Flax and one of jax_fastops, with the same random state."""
    extra = {key: options.pop(key) for key in ("activation",) if key in options}
    theirs = getattr(nnx, name)(features, rngs=nnx.Rngs(0), **options)
    mine = getattr(ours, name)(features, rngs=nnx.Rngs(1), **options, **extra)
    rng = np.random.default_rng(7)
    state = jax.tree.map(
        lambda v: jnp.asarray(rng.uniform(0.5, 1.5, v.shape), v.dtype), nnx.state(theirs)
    )
    nnx.update(theirs, state)
    nnx.update(mine, state)
    return theirs, mine


def calling(layer, **call):
    return lambda x: layer(x, **call)


def apply_in(layer, function):
    """``function`` as a pure function, which also returns the state; parameters and state."""
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    def pure(params, rest, *arrays):
        # Flax updates only variables that were created at the current trace level.
        params, rest = jax.tree.map(lambda a: a, (params, rest))
        merged = nnx.merge(graphdef, params, rest)
        result = function(merged, *arrays)
        return result, nnx.split(merged, nnx.Param, ...)[2]

    return pure, params, rest


def trained(layer, function, *arrays, steps=2):
    """Results, gradients and state of each training step, and the result in eval mode."""
    pure, params, rest = apply_in(layer, function)

    def evaluate(layer, *arrays):
        layer.eval()
        return function(layer, *arrays)

    evaluation = apply_in(layer, evaluate)[0]
    has_two_modes = hasattr(layer, "use_running_average")

    @jax.jit
    def step(params, rest, *arrays):
        def loss(params, *arrays):
            result, moved = pure(params, rest, *arrays)
            terms = [
                jnp.sum(jnp.sin(jnp.arange(y.size).reshape(y.shape)) * y)
                for y in jax.tree.leaves(result)
            ]
            return sum(terms), (result, moved)

        argnums = tuple(range(1 + len(arrays)))
        grads, (result, moved) = jax.grad(loss, argnums, has_aux=True)(params, *arrays)
        params = jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), params, grads[0])
        evaluated = evaluation(params, moved, *arrays)[0] if has_two_modes else None
        return result, grads, params, moved, evaluated

    found = []
    for _ in range(steps):
        found.append(step(params, rest, *arrays))
        params, rest = found[-1][2:4]
    return found


def assert_close(got, want, least=None):
    """Checks tree, shapes, dtypes, and values up to the rounding of the narrowest dtype."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    paths = jax.tree_util.tree_leaves_with_path(want)
    for mine, (path, theirs) in zip(jax.tree.leaves(got), paths, strict=True):
        where = jax.tree_util.keystr(path)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), where
        tolerance = TOLERANCE[str(theirs.dtype)]
        tolerance = max(tolerance, TOLERANCE[str(jnp.dtype(least or theirs.dtype))])
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        largest = max(1.0, np.abs(theirs).max(initial=0))
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * largest, err_msg=where)


def assert_same_bits(got, want):
    """Checks the tree (for states: paths, variable classes, metadata) and bitwise equality."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bitwise_equal(a, b)


def uses_op(layer, x, **call):
    """Whether the program of a call contains a primitive of this package."""
    pure, params, rest = apply_in(layer, lambda layer, x: layer(x, **call))
    return "_norm" in str(jax.make_jaxpr(pure)(params, rest, x))


# ---- the same results as Flax --------------------------------------------------------------------

BATCH_NORM = [
    {},
    {"axis": 1, "features": 5},
    {"axis": (0,), "features": 6},
    {"use_bias": False},
    {"use_scale": False, "use_bias": False, "momentum": 0.5},
    {"epsilon": 0.1, "use_fast_variance": False},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.float16, "param_dtype": jnp.float16, "x": jnp.float16},
    {"x": jnp.bfloat16},
    {"x": jnp.bfloat16, "use_bias": False, "use_scale": False},
    {"x": jnp.bfloat16, "dtype": jnp.float32, "param_dtype": jnp.bfloat16},
    {"x": jnp.int32, "dtype": jnp.float32},
    {"mask": MASK, "fallback": True},
]

ROW_NORM = [
    {},
    {"use_scale": False},
    {"epsilon": 0.1, "use_fast_variance": False, "reduction_axes": 2, "feature_axes": (-1,)},
    {"dtype": jnp.bfloat16},
    {"param_dtype": jnp.bfloat16, "x": jnp.bfloat16},
    {"x": jnp.float16},
    {"reduction_axes": (1, 2), "fallback": True},
    {"reduction_axes": 1, "feature_axes": 1, "features": 5, "fallback": True},
    {"mask": MASK, "fallback": True},
]


def spelled(options):
    words = (f"{k}={getattr(v, '__name__', v)}" for k, v in options.items() if k != "mask")
    return ",".join(words) + (",mask" if "mask" in options else "") or "defaults"


def layer_and_input(name, options, **more):
    options = dict(options) | more
    fallback, dtype = options.pop("fallback", False), options.pop("x", jnp.float32)
    call = {"mask": options.pop("mask")} if "mask" in options else {}
    floats = jnp.issubdtype(dtype, jnp.floating)
    x = draw(1, dtype=dtype) if floats else jnp.asarray(4 * draw(1), dtype)
    narrow = [dtype if floats else None, options.get("dtype"), options.get("param_dtype")]
    narrow = max((d for d in narrow if d), key=lambda d: TOLERANCE[str(jnp.dtype(d))])
    return *pair(name, **options), x, call, fallback, narrow


def assert_same_training(name, options):
    theirs, mine, x, call, fallback, narrow = layer_and_input(name, options)
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    arrays = (x,) if floats else ()
    run = lambda layer, *given: layer(*(given or (x,)), **call)  # noqa: E731
    assert uses_op(mine, jnp.asarray(x, jnp.float32), **call) != fallback
    assert_close(trained(mine, run, *arrays), trained(theirs, run, *arrays), narrow)


@pytest.mark.jax
@pytest.mark.parametrize("options", BATCH_NORM, ids=spelled)
def test_batch_norm_trains_as_flax_does(options, native):
    assert_same_training("BatchNorm", options)


@pytest.mark.jax
@pytest.mark.parametrize("options", ROW_NORM, ids=spelled)
@pytest.mark.parametrize("name", ROWS)
def test_row_norms_train_as_flax_does(name, options, native):
    assert_same_training(name, options)


def test_several_axes_of_features_are_left_to_flax(native):
    """Flax accepts several axes only at inference, because its running statistics are flat."""
    theirs, mine = pair("BatchNorm", features=40, axis=(1, 2), use_running_average=True)
    x = draw(1)
    assert not uses_op(mine, x)
    assert_bitwise_equal(mine(x), theirs(x))


@pytest.mark.parametrize("name", LAYERS)
def test_float64(name, native):
    with x64():
        theirs, mine = pair(name, param_dtype=jnp.float64, use_fast_variance=False)
        x = draw(1, dtype=jnp.float64)
        run = lambda layer, x: layer(x)  # noqa: E731
        # The running statistics are float32, so float64 accuracy is not possible.
        assert_close(trained(mine, run, x, steps=1), trained(theirs, run, x, steps=1), jnp.float32)


@pytest.mark.parametrize("epsilon", [np.nan, np.inf, -1e-3])
@pytest.mark.parametrize("name", LAYERS)
def test_an_epsilon_that_no_op_takes_is_left_to_flax(name, epsilon, native):
    theirs, mine = pair(name, epsilon=epsilon)
    assert_bitwise_equal(mine(draw(1)), theirs(draw(1)))


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_a_list(name, native):
    """jax_fastops accepts lists with every jax, Flax only with newer ones (batch norm never)."""
    theirs, mine = pair(name, features=2)
    rows = [[1.0, 2.0], [3.0, -1.0]]
    assert_close(mine(rows), theirs(jnp.asarray(rows)))
    assert_close(mine(rows, residual=jnp.ones((2, 2))), theirs(jnp.asarray(rows) + 1))


@pytest.mark.jax
@pytest.mark.parametrize("mode", ("xla", "auto"))
@pytest.mark.parametrize("name", LAYERS)
def test_without_kernels_it_is_flax_bit_for_bit(name, mode, monkeypatch):
    """Under "auto", Flax's code runs where the kernels gain nothing."""
    never = {"forward": False, "grad": False}
    entries = ("batch_norm", "layer_norm", "rms_norm")
    trees = {entry: dict.fromkeys(("float32", "bfloat16"), never) for entry in entries}
    monkeypatch.setattr(_dispatch, "trees", lambda platform: trees)
    for options in ({}, {"dtype": jnp.bfloat16}, {"use_scale": False}):
        theirs, mine = pair(name, **options)
        x = draw(2)
        with fo.use_implementation(mode):
            assert not uses_op(mine, x)
            assert_bitwise_equal(mine(x), theirs(x))
            assert_same_bits(nnx.state(mine), nnx.state(theirs))


@pytest.mark.parametrize("name", LAYERS)
def test_an_input_that_is_widened_is_left_to_flax(name, native):
    x = jax.ShapeDtypeStruct((1 << 18, 8), jnp.bfloat16)
    assert not uses_op(pair(name)[1], x)
    assert uses_op(pair(name, dtype=jnp.bfloat16)[1], x)


@pytest.mark.parametrize("name", LAYERS)
def test_no_digits_are_lost_to_a_large_mean(name, native):
    theirs, mine = pair(name, use_scale=False)
    x = draw(3) + 3000
    wide = np.asarray(x, np.float64)
    axes = (0, 1) if name == "BatchNorm" else -1
    centred = wide - (0 if name == "RMSNorm" else wide.mean(axes, keepdims=True))
    exact = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + theirs.epsilon)
    exact = exact if name == "RMSNorm" else exact + np.asarray(mine.bias[...], np.float64)
    np.testing.assert_allclose(np.asarray(mine(x), np.float64), exact, rtol=0, atol=1e-3)


# ---- as in Flax's tests: the same results as flax.linen ------------------------------------------


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("param_dtype", (jnp.float32, jnp.float16))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.float16))
@pytest.mark.parametrize("name", LAYERS)
def test_equals_linen_before_a_dense_layer(name, dtype, param_dtype, masked):
    options = dict(dtype=dtype, param_dtype=param_dtype, use_fast_variance=not masked)
    own = {"use_running_average": False} if name == "BatchNorm" else {}
    mask = np.array([True, True, False, True, False, True]) if masked else None
    x = draw(4, (9, 6), dtype)  # flax.linen does not round its input, flax.nnx does
    norm = getattr(linen, name)(**options, **own)
    dense = linen.Dense(3, dtype=dtype, param_dtype=param_dtype)
    norm_variables = norm.init(jax.random.key(0), x)
    dense_variables = dense.init(jax.random.key(1), x)
    want, moved = norm.apply(norm_variables, x, mask=mask, mutable=["batch_stats"])
    want = dense.apply(dense_variables, want)

    layer = getattr(ours, name)(6, rngs=nnx.Rngs(0), **options, **own)
    linear = nnx.Linear(6, 3, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    linear.kernel[...] = dense_variables["params"]["kernel"]
    linear.bias[...] = dense_variables["params"]["bias"]
    with fo.use_implementation("xla"):
        assert_bitwise_equal(linear(layer(x, mask=mask)), want)
    for what, value in moved.get("batch_stats", {}).items():
        assert_bitwise_equal(getattr(layer, what)[...], value)


@pytest.mark.parametrize("name", LAYERS)
def test_close_to_linen_with_kernels(name, native):
    own = {"use_running_average": False} if name == "BatchNorm" else {}
    norm = getattr(linen, name)(**own)
    x = draw(4, (9, 6))
    variables = norm.init(jax.random.key(0), x)
    want, moved = norm.apply(variables, x, mutable=["batch_stats"])
    layer = getattr(ours, name)(6, rngs=nnx.Rngs(0), **own)
    assert_close(layer(x), want)
    for what, value in moved.get("batch_stats", {}).items():
        assert_close(getattr(layer, what)[...], value)


# ---- state and checkpoints -----------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.parametrize(
    "options", ({}, {"use_scale": False}, {"param_dtype": jnp.bfloat16}), ids=spelled
)
@pytest.mark.parametrize("name", LAYERS)
def test_state_is_that_of_flax(name, options):
    theirs = getattr(nnx, name)(8, rngs=nnx.Rngs(0), **options)
    mine = getattr(ours, name)(8, rngs=nnx.Rngs(0), activation="relu", **options)
    assert_same_bits(nnx.state(mine), nnx.state(theirs))
    assert isinstance(mine, getattr(nnx, name))


@pytest.mark.parametrize("name", LAYERS)
def test_checkpoints_go_both_ways(name, tmp_path):
    import orbax.checkpoint as ocp

    x = draw(5)
    classes = getattr(nnx, name), getattr(ours, name)
    with ocp.StandardCheckpointer() as checkpointer:
        for saver, loader in (classes, classes[::-1]):
            saved = saver(8, rngs=nnx.Rngs(0))
            saved(x)
            saved.scale[...] = saved.scale[...] + 1
            path = tmp_path / saver.__module__
            checkpointer.save(path, nnx.state(saved))
            checkpointer.wait_until_finished()
            loaded = loader(8, rngs=nnx.Rngs(0))
            nnx.update(loaded, checkpointer.restore(path, nnx.state(loaded)))
            assert_same_bits(nnx.state(loaded), nnx.state(saved))


@pytest.mark.parametrize("name", LAYERS)
def test_constructor_arguments_are_those_of_flax(name):
    init = getattr(nnx, name).__init__
    want = inspect.signature(init).parameters
    got = dict(inspect.signature(getattr(ours, name).__init__).parameters)
    assert got.pop("activation").default is None
    assert list(got.items()) == list(want.items())
    call = inspect.signature(getattr(nnx, name).__call__).parameters
    mine = inspect.signature(getattr(ours, name).__call__).parameters
    assert list(mine)[: len(call)] == list(call)
    for theirs in call.values():  # ours may also be positional
        assert mine[theirs.name].default == theirs.default
        assert mine[theirs.name].kind in (theirs.kind, theirs.POSITIONAL_OR_KEYWORD)


class Block(nnx.Module):
    def __init__(self, layers, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.batch = layers.BatchNorm(8, rngs=rngs)
        self.rows = layers.LayerNorm(8, rngs=rngs)
        self.rms = layers.RMSNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.rms(self.rows(jax.nn.relu(self.batch(self.linear(x)))))


@pytest.mark.jax
def test_nnx_transformations(native):
    """nnx.jit and nnx.value_and_grad update statistics in place; split and merge copy them."""
    x, found = draw(6, (12, 8)), []

    @nnx.jit
    def step(model, x):
        def loss(model, x):
            return jnp.sum(jnp.sin(model(x)))

        value, grads = nnx.value_and_grad(loss, argnums=(0, 1))(model, x)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads[0]))
        return value, grads[1]

    for layers in (ours, nnx):
        model = Block(layers, nnx.Rngs(0))
        values = [step(model, x) for _ in range(3)]
        model.eval()
        copy = nnx.merge(*nnx.split(model))
        assert copy.batch.use_running_average
        found.append((values, copy(x), nnx.state(copy)))
    assert_close(found[0], found[1])


@pytest.mark.jax
@pytest.mark.parametrize("name", LAYERS)
def test_nnx_vmap_over_layers(name, native):
    def ensemble(cls):
        scale_init = jax.nn.initializers.truncated_normal()
        layer = nnx.vmap(lambda key: cls(8, scale_init=scale_init, rngs=nnx.Rngs(key)))(
            jax.random.split(jax.random.key(0), 3)
        )
        y = nnx.vmap(lambda layer, x: layer(x))(layer, draw(7, (3, 6, 8)))
        return y, nnx.state(layer)

    assert_close(ensemble(getattr(ours, name)), ensemble(getattr(nnx, name)))


def test_train_eval_and_the_call_choose_the_statistics(native):
    theirs, mine = pair("BatchNorm")
    x = draw(8)
    for layer in (theirs, mine):
        layer.eval()
    before = jax.tree.map(jnp.copy, nnx.state(mine))
    assert_close(mine(x), theirs(x))
    assert_same_bits(nnx.state(mine), before)
    assert_close(mine(x, use_running_average=False), theirs(x, use_running_average=False))
    assert_close(nnx.state(mine), nnx.state(theirs))
    for layer in (theirs, mine):
        layer.train()
    assert_close(mine(x), theirs(x))
    for layer in (theirs, mine):
        layer.set_attributes(use_running_average=True)
    assert_close(mine(x), theirs(x))
    assert_close(mine(x, False), theirs(x, False))
    assert_close(nnx.state(mine), nnx.state(theirs))
    mine.set_attributes(use_running_average=None)
    with pytest.raises(ValueError, match="No `use_running_average` argument was provided"):
        mine(x)


# ---- residual and activation ---------------------------------------------------------------------

BATCH_NORM_RESIDUALS = [
    # options, dtype of x, dtype and shape of the residual
    ({}, jnp.float32, jnp.float32, SHAPE),
    ({"axis": 1, "features": 5}, jnp.float32, jnp.float32, SHAPE),
    ({}, jnp.bfloat16, jnp.bfloat16, SHAPE),
    ({"dtype": jnp.bfloat16}, jnp.bfloat16, jnp.bfloat16, SHAPE),
    ({"dtype": jnp.bfloat16}, jnp.bfloat16, jnp.float32, SHAPE),
    ({}, jnp.float32, jnp.float32, (5, 1)),
]


@pytest.mark.parametrize("mode", ("native", "auto"))
@pytest.mark.parametrize("options,dtype,residual,shape", BATCH_NORM_RESIDUALS)
def test_batch_norm_with_residual_and_relu(options, dtype, residual, shape, mode):
    theirs, mine = pair("BatchNorm", **options, activation="relu")
    arrays = draw(1, dtype=dtype), draw(2, shape, residual) - 0.5
    fused = lambda layer, x, residual: layer(x, residual=residual)  # noqa: E731
    plain = lambda layer, x, residual: jax.nn.relu(layer(x) + residual)  # noqa: E731
    with fo.use_implementation(mode):
        assert_close(trained(mine, fused, *arrays), trained(theirs, plain, *arrays), dtype)


def test_relu_or_residual_alone(native):
    theirs, mine = pair("BatchNorm", activation="relu")
    x = draw(1)
    got, want = mine(x), jax.nn.relu(theirs(x))
    assert_close(got, want)
    theirs, mine = pair("BatchNorm")
    assert_close(mine(x, residual=x), theirs(x) + x)
    assert_close(mine(x, residual=2.0), theirs(x) + 2.0)
    assert_close(mine(x, mask=MASK, residual=x), theirs(x, mask=MASK) + x)
    assert_close(nnx.state(mine), nnx.state(theirs))


ROW_RESIDUALS = [
    ({}, jnp.float32, jnp.float32, SHAPE),
    ({}, jnp.bfloat16, jnp.float32, SHAPE),
    ({}, jnp.bfloat16, jnp.bfloat16, SHAPE),
    ({"dtype": jnp.bfloat16}, jnp.bfloat16, jnp.bfloat16, SHAPE),
    ({"dtype": jnp.bfloat16}, jnp.bfloat16, jnp.float32, SHAPE),
    ({}, jnp.float32, jnp.float32, (5, 1)),
]


@pytest.mark.parametrize("options,dtype,residual,shape", ROW_RESIDUALS)
@pytest.mark.parametrize("name", ROWS)
def test_row_norms_with_residual(name, options, dtype, residual, shape, native):
    """The returned sum has the dtype of ``x + residual``."""
    theirs, mine = pair(name, **options)
    arrays = draw(1, dtype=dtype), draw(2, shape, residual) - 0.5

    def plain(layer, x, residual):
        s = x + residual
        return layer(s), s

    fused = lambda layer, x, residual: layer(x, residual=residual, return_sum=True)  # noqa: E731
    assert_close(trained(mine, fused, *arrays), trained(theirs, plain, *arrays), dtype)


@pytest.mark.parametrize("mode", ("native", "auto"))
@pytest.mark.parametrize("name", ROWS)
def test_row_norms_with_one_or_the_other(name, mode):
    theirs, mine = pair(name, activation="relu")
    x, residual = draw(1), draw(2)
    with fo.use_implementation(mode):
        assert_close(mine(x), jax.nn.relu(theirs(x)))
        assert_close(mine(x, residual=residual), jax.nn.relu(theirs(x + residual)))
        y, s = mine(x, return_sum=True)
        assert_close((y, s), (jax.nn.relu(theirs(x)), x))
        y, s = mine(x, mask=MASK, residual=residual, return_sum=True)
        assert_close((y, s), (jax.nn.relu(theirs(x + residual, mask=MASK)), x + residual))


@pytest.mark.jax
@pytest.mark.parametrize("name", ROWS)
def test_residual_is_added_by_the_op(name, native):
    """The op adds only if the sum has the dtype that is normalized. ``x`` may be narrower."""
    mine = getattr(ours, name)(8, rngs=nnx.Rngs(0))
    op = {"LayerNorm": "residual_layer_norm", "RMSNorm": "residual_rms_norm"}[name]
    F32, BF16 = jnp.float32, jnp.bfloat16
    for of_x, of_residual, fused in (
        (F32, F32, True),
        (BF16, BF16, False),
        (BF16, F32, True),
        (F32, BF16, True),
    ):
        x, residual = draw(1, dtype=of_x), draw(2, dtype=of_residual)
        pure, params, rest = apply_in(mine, lambda layer, x, r: layer(x, residual=r))
        assert (op in str(jax.make_jaxpr(pure)(params, rest, x, residual))) == fused


def test_batch_norm_keeps_bits_for_the_relu(native):
    """Only the input, and one bit per element, are kept at that size."""
    mine = ours.BatchNorm(8, activation="relu", rngs=nnx.Rngs(0))
    x = draw(1, (64, 32, 8))
    pure, params, rest = apply_in(mine, lambda layer, x, r: layer(x, residual=r))
    _, pullback = jax.vjp(lambda p, x, r: pure(p, rest, x, r)[0], params, x, x + 1)
    kept = sum(a.nbytes for a in jax.tree.leaves(pullback))
    assert kept <= x.nbytes + x.size // 8 + 1024


# ---- statistics over a mapped axis ---------------------------------------------------------------


@pytest.mark.jax
def test_axis_name_under_vmap(native):
    theirs, mine = pair("BatchNorm", axis_name="parts", activation="relu")
    whole = pair("BatchNorm")[0]
    x = draw(9, (4, 6, 8))

    def mapped(layer, x):
        return layer(x)

    def run(layer, finish):
        pure, params, rest = apply_in(layer, mapped)

        def loss(params, x):
            y, moved = jax.vmap(
                lambda x: pure(params, rest, x), axis_name="parts", out_axes=(0, None)
            )(x)
            return jnp.sum(jnp.sin(finish(y))), (finish(y), moved)

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    got = run(mine, lambda y: y)
    assert_close(got, run(theirs, jax.nn.relu))
    assert_close(got[1][0], jax.nn.relu(whole(x)))


@pytest.mark.jax
@pytest.mark.parametrize("names", ("a", ("a", "b")))
def test_axis_name_under_shard_map(names, native):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = make_mesh({"a": 2, "b": 2}, AxisType.Auto)
    theirs, mine = pair("BatchNorm", axis_name=names)
    whole = pair("BatchNorm")[0]
    x = draw(10, (8, 6, 8))

    def run(layer):
        pure, params, rest = apply_in(layer, lambda layer, x: layer(x))
        sharded = jax.shard_map(
            pure, mesh=mesh, in_specs=(P(), P(), P(names)), out_specs=(P(names), P())
        )

        def loss(params, x):
            y, moved = sharded(params, rest, x)
            return jnp.sum(jnp.sin(y)), (y, moved)

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    got = run(mine)
    assert_close(got, run(theirs))
    assert_close(got[1][0], whole(x))


def test_axis_index_groups_are_left_to_flax(native):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = make_mesh({"a": 4}, AxisType.Auto)
    layers = pair("BatchNorm", axis_name="a", axis_index_groups=[[0, 1], [2, 3]])
    x = draw(11, (8, 6, 8))
    found = []
    for layer in layers:
        pure, params, rest = apply_in(layer, lambda layer, x: layer(x))
        run = jax.shard_map(
            lambda x, pure=pure, params=params, rest=rest: pure(params, rest, x)[0],
            mesh=mesh,
            in_specs=P("a"),
            out_specs=P("a"),
            check_vma=False,
        )
        found.append(jax.jit(run)(x))
    assert_bitwise_equal(*found)
    assert_close(found[0][:4], pair("BatchNorm")[1](x[:4]))


@pytest.mark.parametrize("name", ROWS)
def test_row_norms_over_a_mapped_axis_are_left_to_flax(name, native):
    theirs, mine = pair(name, features=4, axis_name="parts")
    x = draw(12, (2, 6, 4))
    found = [jax.vmap(calling(layer), axis_name="parts")(x) for layer in (mine, theirs)]
    assert_bitwise_equal(*found)


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_unknown_activation(name):
    message = f"{name}: activation is 'gelu'; it must be None or 'relu'"
    with pytest.raises(ValueError, match=message):
        getattr(ours, name)(8, activation="gelu", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_size_is_flax_error(name, native):
    theirs, mine = pair(name)
    with pytest.raises(TypeError) as want:
        theirs(draw(1, (4, 6)))
    with pytest.raises(TypeError) as got:
        mine(draw(1, (4, 6)))
    assert str(got.value) == str(want.value)


def test_without_flax_the_error_says_what_to_install(monkeypatch):
    for name in [m for m in sys.modules if m == "flax" or m.startswith("flax.")]:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("nnx_without_flax", ours.__file__)
    with pytest.raises(ImportError, match=r"pip install 'flax>=0.12'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["native", "auto", "xla"])
def test_dropout(mode):
    """Flax' keys, the package's masks."""
    x = draw(0)
    layer, theirs = (kind.Dropout(0.3, rngs=nnx.Rngs(dropout=5)) for kind in (ours, nnx))
    keys = nnx.Dropout(0.3, rngs=nnx.Rngs(dropout=5)).rngs
    with fo.use_implementation(mode):
        for _ in range(2):
            assert_bitwise_equal(layer(x), fo.dropout(x, keys(), 0.3))
        assert_bitwise_equal(layer(x, deterministic=True), x)
        key = jax.random.key(9)
        assert_bitwise_equal(layer(x, rngs=key), fo.dropout(x, key, 0.3))
        layer.eval()
        assert_bitwise_equal(layer(x), x)
    assert int(layer.rngs.count[...]) == 2
    theirs(x)
    assert jax.tree.structure(nnx.state(layer)) == jax.tree.structure(nnx.state(theirs))
    assert inspect.signature(ours.Dropout.__init__) == inspect.signature(nnx.Dropout.__init__)


def test_dropout_by_flax():
    """Shared masks and the rates at the ends are Flax's code, as are the errors."""
    x = draw(0)
    for rate, options in ((0.5, dict(broadcast_dims=(1,))), (0.0, {}), (1.0, {})):
        layer, theirs = (kind.Dropout(rate, rngs=nnx.Rngs(3), **options) for kind in (ours, nnx))
        assert_bitwise_equal(layer(x), theirs(x))
    with pytest.raises(ValueError, match="rngs"):
        ours.Dropout(0.5)(x)


@pytest.mark.parametrize("mode", ["native", "auto", "xla"])
@pytest.mark.parametrize("name", ROWS)
def test_norm_with_dropout(name, mode):
    """The norm of the residual plus the dropped input, with one key for each call."""
    x, residual = draw(0), draw(1)
    _, norm = pair(name)
    for given in (residual, None, residual[:1], residual.astype(jnp.bfloat16)):
        for deterministic in (False, True):
            make = lambda d=deterministic: ours.Dropout(0.3, deterministic=d, rngs=nnx.Rngs(4))  # noqa: E731
            with fo.use_implementation(mode):
                used = make()
                found = norm(x, residual=given, dropout=used, return_sum=True)
                summed = make()(x)
                summed = summed if given is None else summed + given
                wanted = norm(summed, return_sum=True)
            assert int(used.rngs.count[...]) == (not deterministic)
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
