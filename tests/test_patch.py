"""`patch`: which calls become ours, equal results and gradients, threads, blocks, caches."""

import functools
import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.case import implementation
from harness.programs import targets_of
from jax.nn import gelu, log_softmax, relu, silu, softmax  # by name, before anything is patched

import jax_fastops as fo

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((6, 40)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, 40, 6))


@pytest.fixture(autouse=True)
def native():
    with implementation("native"):
        yield


def kernels(f, *args):
    """The kernels that a function and its gradient call, as seen by a new trace."""
    found = targets_of(lambda *a: f(*a), *args)
    grad = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a).astype(jnp.float32))))
    return sorted(set(found) | set(targets_of(lambda *a: grad(*a), *args)))


def optax_loss(logits, labels=LABELS, **options):
    optax = pytest.importorskip("optax")
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels, **options)


FUNCTIONS = {
    "relu": (relu, "relu"),
    "gelu": (gelu, "bias_act"),
    "exact gelu": (lambda x: gelu(x, approximate=False), "bias_act"),
    "silu": (silu, "bias_act"),
    "swish": (jax.nn.swish, "bias_act"),
    "softmax": (softmax, "softmax"),
    "softmax of axis 0": (lambda x: softmax(x, 0), "softmax"),
    "masked softmax": (lambda x: softmax(x, where=x > -1), "softmax"),
    "log_softmax": (functools.partial(log_softmax, axis=0), "softmax"),
    "module": (lambda x: jax.nn.softmax(x), "softmax"),
    "loss": (optax_loss, "cross_entropy"),
    "jit": (jax.jit(lambda x: softmax(x) + relu(x)), "softmax"),
}


@pytest.mark.parametrize("f", [relu, gelu, silu, log_softmax])
def test_a_trace_leaves_to_xla_what_it_fuses(f):
    x = jnp.ones((1024, 1024))
    with fo.use_implementation("auto"), fo.patch():
        assert kernels(f, x) == []
        assert kernels(softmax, x)
    with fo.patch():
        assert kernels(f, x)


@pytest.mark.settings
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, dtype):
    f, kernel = FUNCTIONS[name]
    x = X.astype(dtype)

    def run(x):
        y, pullback = jax.vjp(f, x)
        return y, pullback(jnp.cos(y))[0]

    before = jax.jit(run)(x)
    assert not kernels(f, x)
    with fo.patch():
        inside = jax.jit(run)(x)
        found = kernels(f, x)
    assert any(k.startswith(kernel) for k in found) and any(k.endswith("bwd") for k in found)
    assert not kernels(f, x)
    for mine, theirs in zip(inside, before, strict=True):
        assert mine.dtype == theirs.dtype
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            np.asarray(mine, np.float64), np.asarray(theirs, np.float64), rtol=8 * eps, atol=8 * eps
        )


@pytest.mark.parametrize(
    "f",
    [
        lambda: relu(jnp.arange(3)),
        lambda: relu(2.0),
        lambda: gelu(jnp.arange(3)),
        lambda: gelu(X, False),
        lambda: silu(1.5),
        lambda: relu(jnp.array(-1.0)),
        lambda: softmax(np.arange(3.0, dtype=np.float32)),
        lambda: softmax(jnp.zeros((0, 3))),
        lambda: softmax(X, axis=(0, 1)),
        lambda: softmax(X, 0, X > 0),
        lambda: softmax(jnp.arange(3)),
        lambda: gelu(jnp.array(-1)),
        lambda: silu(jnp.array(1j)),
        lambda: log_softmax(jnp.arange(3)),
        lambda: optax_loss(X, jnp.array([0, -1, 39, 3, -40, 5])),
        lambda: optax_loss(X, jnp.array([0, 40, 41, 3, -41, 5])),
        lambda: optax_loss(X.T, axis=0),
        lambda: jax.nn.glu(X, 0),
        lambda: optax_loss(X.at[:, ::3].set(jnp.inf)),
        lambda: optax_loss(X.at[:, ::3].set(-jnp.inf)),
        lambda: optax_loss(X, where=X > -9),
        lambda: jax.nn.dot_product_attention(X, X, X),
    ],
)
def test_every_call_gives_what_the_original_gives(f):
    want = f()
    with fo.patch():
        got = f()
    assert got.dtype == want.dtype and got.shape == want.shape and got.weak_type == want.weak_type
    np.testing.assert_allclose(got, want, rtol=2e-6)


@pytest.mark.parametrize(
    "f",
    [
        lambda: softmax(X, 2),
        lambda: relu("x"),
        lambda: log_softmax(None),
        lambda: softmax(X[0, 0]),
        lambda: softmax(X, where=LABELS[:, None]),
        lambda: silu(LABELS),
        lambda: jax.nn.dot_product_attention(QUERY, QUERY, QUERY, mask=QUERY),
        lambda: jax.nn.dot_product_attention(QUERY, QUERY, QUERY, implementation="other"),
        lambda: jax.nn.dot_product_attention(QUERY, QUERY[:1], QUERY[:1]),
    ],
)
def test_errors_are_those_of_the_original(f):
    with pytest.raises(Exception) as theirs:
        f()
    with fo.patch(), pytest.raises(theirs.type):
        f()


def test_blocks():
    assert kernels(softmax, X) == []
    with fo.patch(without="relu"):
        assert kernels(relu, X) == [] and kernels(softmax, X)
        with fo.patch(only=["relu"]):
            assert kernels(relu, X) and kernels(softmax, X) == []
        assert kernels(relu, X) == []
    with pytest.raises(KeyError), fo.patch():
        raise KeyError
    assert kernels(softmax, X) == []
    block = fo.patch()
    with block, block:
        assert kernels(softmax, X)
    assert kernels(softmax, X) == []


def test_decorator():
    @fo.patch(only="softmax")
    def f(x):
        return relu(softmax(x))

    assert {k.removesuffix("_bwd") for k in kernels(f, X)} == {"softmax"}
    assert kernels(lambda x: softmax(x), X) == []
    assert f.__name__ == "f"


def test_only_in_its_thread():
    found = []
    with fo.patch():
        thread = threading.Thread(target=lambda: found.append(kernels(softmax, X)))
        thread.start()
        thread.join()
    assert found == [[]]


def test_traced_functions_are_not_reused():
    f = jax.jit(lambda x: softmax(x))
    before = f.lower(X).as_text()
    with fo.patch():
        assert "fastops" in f.lower(X).as_text()
    assert "fastops" not in before and "fastops" not in f.lower(X).as_text()


def test_transformations():
    with fo.patch():
        mapped = jax.vmap(jax.grad(lambda x: jnp.max(softmax(x))))(X)
        scanned = jax.lax.scan(lambda c, x: (c, relu(x)), 0, X)[1]
        again = jax.grad(lambda x: jnp.sum(jax.checkpoint(log_softmax)(x) ** 2))(X)
        second = jax.hessian(lambda x: jnp.sum(softmax(x) ** 3))(X[0])
    np.testing.assert_allclose(
        mapped, jax.vmap(jax.grad(lambda x: jnp.max(softmax(x))))(X), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(scanned, relu(X))
    np.testing.assert_allclose(
        again, jax.grad(lambda x: jnp.sum(log_softmax(x) ** 2))(X), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        second, jax.hessian(lambda x: jnp.sum(softmax(x) ** 3))(X[0]), rtol=1e-4, atol=1e-6
    )


def test_our_own_references_are_not_replaced():
    with fo.patch(), fo.use_implementation("xla"):
        assert targets_of(lambda x: fo.softmax(x), X) == []
    with fo.patch():
        assert targets_of(lambda x: fo.softmax(x), X) == ["softmax"]


@pytest.mark.parametrize("argument", ["only", "without"])
def test_errors(argument):
    with pytest.raises(ValueError, match=f"patch: {argument} has 'tanh'; it may have 'relu', "):
        fo.patch(**{argument: ["tanh"]})


def close(got, want, tolerance=2e-5):
    got, want = jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(want)
    for (path, a), (other, b) in zip(got, want, strict=True):
        assert path == other and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=str(path))


# Attention: the cases of test_nn.py of JAX --------------------------------------------------------


def normal(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def agree(call, *args, tolerance):
    """Results and gradients of a call of `jax.nn` or Flax in and outside of a block."""

    def run(*args):
        y, pullback = jax.vjp(call, *args)
        return y, pullback(jax.tree.map(lambda a: jnp.cos(a).astype(a.dtype), y))

    # Compiled, the products of JAX's own attention in float16 are not supported by XLA on a CPU.
    jit = (lambda run: run) if args[0].dtype == "float16" else jax.jit
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want = jit(run)(*args)  # JAX's own code promotes
    with fo.patch(only="attention"):
        close(jit(run)(*args), want, tolerance)
        assert tuple(targets_of(call, *args)) == ("softmax",)


MODES = {
    "none": {},
    "causal": dict(is_causal=True),
    "bias": dict(bias=normal(1, 4, 32, 32)),
    "custom": dict(mask=np.tri(32, dtype=bool)[None, None]),
    "pairs": dict(mask=np.random.default_rng(0).random((2, 1, 32, 32)) < 0.9),
    "window": dict(local_window_size=3),
    "causal window": dict(local_window_size=(3, 2), is_causal=True),
    "left window": dict(local_window_size=(3, 0)),
    "padding": dict(query_seq_lengths=np.int32([16, 8]), key_value_seq_lengths=np.int32([8, 16])),
    "scale": dict(scale=0.5),
    "residual": dict(return_residual=True),
}
MODES["causal padding"] = MODES["causal"] | MODES["padding"]
MODES["custom padding"] = MODES["custom"] | MODES["padding"]
MODES["bias causal"] = MODES["bias"] | MODES["causal"]


@pytest.mark.settings
@pytest.mark.parametrize(
    "groups, dtype", [(1, "float32"), (4, "float32"), (4, "bfloat16"), (1, "float16")]
)
@pytest.mark.parametrize("mode", MODES)
def test_attention(groups, mode, dtype):
    q, k, v = (normal(2, 32, n, 8, dtype=dtype) for n in (4, 4 // groups, 4 // groups))
    options = {
        k: v if isinstance(v, (int, float, tuple)) else jnp.asarray(v)
        for k, v in MODES[mode].items()
    }
    eps = float(jnp.finfo(dtype).eps)
    agree(lambda *args: jax.nn.dot_product_attention(*args, **options), q, k, v, tolerance=16 * eps)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("mapped", [False, True])
def test_attention_with_a_gradient_of_the_bias(batch, mapped):
    """Also without a batch, under `vmap`."""
    x, bias, mask = normal(batch, 32, 4, 8), normal(batch, 4, 32, 32), jnp.ones((1, 1, 32), bool)

    def attention(x, bias):
        return jax.nn.dot_product_attention(x, x, x, bias, mask)

    agree(jax.vmap(attention) if mapped else attention, x, bias, tolerance=1e-5)


QUERY = normal(2, 8, 2, 4)


def of_flax(module, **options):
    name = "dot_product_attention"
    return lambda q, k, v: getattr(pytest.importorskip(module), name)(q, k, v, **options)


EINSUMS = dict(qk_attn_weights_einsum=jnp.einsum, attn_weights_value_einsum=jnp.einsum)


@pytest.mark.parametrize(
    "call, kernels",
    [
        (of_flax("flax.linen"), ["softmax"]),
        (of_flax("flax.linen.attention", mask=np.tri(8)), ["softmax"]),
        (of_flax("flax.linen", bias=normal(2, 1, 1, 8), dtype="bfloat16"), ["softmax"]),
        (of_flax("flax.linen", dropout_rate=0.5, deterministic=True), ["softmax"]),
        (of_flax("flax.linen", dropout_rate=0.5, dropout_rng=jax.random.key(0)), []),
        (of_flax("flax.linen", precision="highest"), []),
        (of_flax("flax.linen", einsum_dot_general=jax.lax.dot_general), []),
        (of_flax("flax.linen", **EINSUMS), []),
        (of_flax("flax.linen", force_fp32_for_softmax=True), []),
        (of_flax("flax.nnx"), ["softmax"]),
        (of_flax("flax.nnx.nn.attention", mask=np.tri(8), is_causal=True), ["softmax"]),
        (of_flax("flax.nnx", dropout_rate=0.5, deterministic=True), ["softmax"]),
        (of_flax("flax.nnx", dropout_rate=0.5, dropout_rng=jax.random.key(0)), []),
        (of_flax("jax.nn", implementation="xla"), []),
        (of_flax("jax.nn", scale=jnp.float32(2)), []),
        (of_flax("jax.nn", bias=jnp.ones((1, 1, 8, 8), int)), []),
    ],
)
def test_attention_of_options(call, kernels):
    """Options that ours does not have are left to the original."""
    want = call(QUERY, QUERY, QUERY)
    with fo.patch(only="attention"):
        got = call(QUERY, QUERY, QUERY)
        assert targets_of(lambda q: call(q, q, q), QUERY) == kernels
    close(got, want, 2e-2 if got.dtype == jnp.bfloat16 else 2e-6)
    if kernels == []:
        with fo.patch():  # the softmax in it is ours, unless its options keep it in another form
            close(call(QUERY, QUERY, QUERY), want)


@pytest.mark.parametrize("module", ["flax.nnx", "flax.linen"])
def test_attention_with_dropout(module):
    """Each head has its own mask, that of `attention`."""
    drop = dict(dropout_rng=jax.random.key(0), dropout_rate=0.5, broadcast_dropout=False)
    with fo.patch():
        y = of_flax(module, **drop)(QUERY, QUERY, QUERY)
    options = dict(dropout_key=drop["dropout_rng"], dropout_rate=0.5)
    np.testing.assert_array_equal(y, fo.attention(QUERY, QUERY, QUERY, **options))


def test_attention_in_layers():
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    x, layer = normal(3, 8, 16), linen.MultiHeadDotProductAttention(2)
    variables = layer.init(jax.random.key(0), x)
    agree(lambda x: layer.apply(variables, x), x, tolerance=1e-5)
    agree(nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0)), x, tolerance=1e-5)
    with fo.patch():  # weights that are kept
        run = functools.partial(layer.apply, variables, sow_weights=True, mutable="intermediates")
        assert jax.tree.leaves(run(x)[1])


def test_attention_without_a_key():
    """The only other difference from `jax.nn`: 0 in place of the mean of all values."""
    mask = jnp.zeros((1, 1, 8, 8), bool)
    with fo.patch():
        y = jax.nn.dot_product_attention(QUERY, QUERY, QUERY, mask=mask)
    np.testing.assert_array_equal(y, 0)


# Flax ---------------------------------------------------------------------------------------------


@pytest.mark.settings
@pytest.mark.parametrize("train", [False, True])
def test_nnx(train):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.parts = nnx.List(
                kind(40, rngs=rngs) for kind in (nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm)
            )
            self.parts.append(nnx.Linear(40, 40, rngs=rngs))

        def __call__(self, x):
            for part in self.parts:
                x = jax.nn.relu(part(x)) + x
            return x

    def run():
        model = Model(nnx.Rngs(0))
        (model.train if train else model.eval)()
        loss, grads = nnx.value_and_grad(lambda m: jnp.sum(m(X) ** 2))(model)
        return loss, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model))

    want = run()
    with fo.patch():
        got = run()
        found = targets_of(lambda x: Model(nnx.Rngs(0))(x), X)
    close(got, want)
    assert found.count("norm") == 2 and found.count("relu") == 4
    assert any("batch_norm" in kernel for kernel in found)


@pytest.mark.settings
@pytest.mark.parametrize("options", [{}, dict(use_bias=False), dict(epsilon=0.1)])
def test_linen(options):
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x, mask=None):
            x = linen.LayerNorm(**options, name="first")(linen.Dense(40)(x), mask=mask)
            x = linen.relu(x) + linen.RMSNorm(name="second")(x)
            return linen.GroupNorm(num_groups=4)(x)

    model, mask = Model(), RNG.random(X.shape) < 0.5
    variables = model.init(jax.random.key(0), X)

    def run(**given):
        return jax.value_and_grad(lambda v: jnp.sum(model.apply(v, X, **given) ** 2))(variables)

    want = run(), run(mask=mask)
    with fo.patch():
        got = run(), run(mask=mask)
        again = model.init(jax.random.key(0), X)
        found = targets_of(lambda v: model.apply(v, X), variables)
        masked = targets_of(lambda v: model.apply(v, X, mask=mask), variables)
    close(got, want)
    close(again, variables, 0)
    assert found.count("norm") == 2 and masked.count("norm") == 1
    with fo.patch(only="rms_norm"):
        assert targets_of(lambda v: model.apply(v, X), variables).count("norm") == 1


@pytest.mark.parametrize("epsilon", [-0.1, jnp.float32(0.1)])
def test_an_epsilon_that_no_op_takes(epsilon):
    linen = pytest.importorskip("flax.linen")
    for layer in (
        linen.LayerNorm(epsilon=epsilon),
        linen.BatchNorm(epsilon=epsilon, use_running_average=False),
    ):
        x = X.reshape(-1, X.shape[-1])
        variables = layer.init(jax.random.key(0), x)
        want = layer.apply(variables, x, mutable=["batch_stats"])
        with fo.patch():
            got = layer.apply(variables, x, mutable=["batch_stats"])
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("options", [{}, dict(axis=1, use_scale=False), dict(dtype="bfloat16")])
def test_linen_batch_norm(options, average):
    linen = pytest.importorskip("flax.linen")
    x = jnp.tile(X, (2, 4, 1, 1)).astype(options.get("dtype", "float32"))  # [2, 4, 6, 40]
    model = linen.BatchNorm(use_running_average=average, **options)
    variables = model.init(jax.random.key(0), x)

    def run(x):
        def loss(variables):
            y, state = model.apply(variables, x, mutable=["batch_stats"])
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, state)

        (_, found), gradients = jax.value_and_grad(loss, has_aux=True)(variables)
        return found, gradients["params"]

    want = run(x)
    with fo.patch():
        got = run(x)
        kernels = targets_of(lambda x: run(x)[0], x)
        close(model.init(jax.random.key(0), x), variables, 0)
    close(got, want, 0.05 if options.get("dtype") else 1e-4)
    assert any("batch_norm" in k for k in kernels)


@pytest.mark.parametrize("case", ["mask", "axis_name", "axes", "subclass", "float32", "without"])
def test_linen_batch_norms_that_stay(case):
    """What the op does not compute, among it statistics of several devices."""
    linen = pytest.importorskip("flax.linen")
    kind = type("Mine", (linen.BatchNorm,), {}) if case == "subclass" else linen.BatchNorm
    options = {"axis_name": dict(axis_name="batch"), "axes": dict(axis=(1, 2))}.get(case, {})
    model = kind(use_running_average=False, **options)
    x = jnp.tile(X, (4, 1, 1)).astype("bfloat16" if case == "float32" else "float32")
    variables = model.init(jax.random.key(0), x)
    given = dict(mask=x > 0) if case == "mask" else {}

    def apply(x):
        return model.apply(variables, x, mutable=["batch_stats"], **given)

    def run(x):
        return jax.vmap(apply, axis_name="batch")(x) if case == "axis_name" else apply(x)

    want = run(x)
    with fo.patch(without=["batch_norm"] if case == "without" else []):
        assert targets_of(run, x) == []
        close(run(x), want, 0)


def test_linen_norms_whose_kernel_does_not_take_the_call():
    """The parameters are then still the layer's to declare."""
    linen = pytest.importorskip("flax.linen")
    for layer in (linen.LayerNorm(), linen.RMSNorm(), linen.BatchNorm(use_running_average=False)):
        variables = layer.init(jax.random.key(0), X)

        def run(x):
            return layer.apply(variables, x, mutable=["batch_stats"])  # noqa: B023

        for x, mode in ((X.astype(jnp.bfloat16), "native"), (X, "xla")):
            with fo.use_implementation(mode):
                want = run(x)
                with fo.patch():
                    close(run(x), want, 0)


@pytest.mark.parametrize("module", ["flax.nnx", "flax.linen"])
def test_dropout(module):
    flax = pytest.importorskip(module)

    def run(deterministic):
        if module == "flax.nnx":
            layer = flax.Dropout(0.4, deterministic=deterministic, rngs=flax.Rngs(dropout=1))
            return layer(X)
        layer = flax.Dropout(0.4, deterministic=deterministic)
        return layer.apply({}, X, rngs={"dropout": jax.random.key(1)})

    with fo.patch():
        y = run(False)
        np.testing.assert_array_equal(run(True), X)
        assert "dropout" in targets_of(lambda: run(False))
    kept = np.asarray(y != 0)
    np.testing.assert_allclose(np.asarray(y)[kept], np.asarray(X / 0.6)[kept], rtol=1e-6)
    assert 0.4 < kept.mean() < 0.8
    assert "dropout" not in targets_of(lambda: run(False))


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_layers_under_strict_settings(implementation):
    """What runs without `patch` runs with it, forward and backward."""
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    layers = linen.LayerNorm(), linen.RMSNorm(), linen.BatchNorm(use_running_average=False)
    own = nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm

    def run():
        results = []
        for layer in layers:
            variables = layer.init(jax.random.key(0), X)

            def loss(variables, layer=layer):
                return jnp.sum(jnp.sin(layer.apply(variables, X, mutable=["batch_stats"])[0]))

            results.append(jax.jit(jax.value_and_grad(loss))(variables))
        for kind in own:
            model = kind(40, rngs=nnx.Rngs(0))
            value, grads = nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(X))))(model)
            results.append((value, nnx.to_pure_dict(grads)))
        return results

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        want = run()
        with fo.patch(), fo.use_implementation(implementation):
            close(run(), want, 1e-4)


def test_a_number_that_is_not_finite_raises_as_without_patch():
    def f(x):
        return jnp.sum(softmax(x * 2))

    with jax.debug_nans(True), fo.patch():
        for call in (lambda f: f, jax.jit, lambda f: jax.jit(jax.value_and_grad(f))):
            with pytest.raises(FloatingPointError):
                call(f)(X.at[0, 0].set(jnp.inf))
        np.testing.assert_allclose(jax.jit(f)(X), len(X), rtol=1e-6)
        relu(X.at[0, 0].set(-jnp.inf))


def test_labels_that_are_no_class():
    """The loss is NaN, and its gradient that of a logit that no class has."""
    labels = jnp.array([0, -1, 40, -41, 1000, -40])

    def run():
        losses, pull = jax.vjp(lambda x: optax_loss(x, labels), X)
        return losses, pull(jnp.ones(6))[0]

    want = run()
    with fo.patch():
        got = run()
        assert kernels(lambda x: optax_loss(x, labels), X)
    assert np.isnan(want[0]).sum() == 3
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-6)


def test_labels_of_few_bits():
    logits = jnp.asarray(RNG.standard_normal((2, 300)), jnp.float32)
    for labels in (jnp.array([200, 3], jnp.uint8), jnp.array([-1, 100], jnp.int8)):
        want = optax_loss(logits, labels.astype(jnp.int32))
        with fo.patch():
            np.testing.assert_allclose(optax_loss(logits, labels), want, rtol=1e-6)


def test_the_line_of_a_call_after_a_block():
    def loss(x):
        return jax.nn.softmax(x[:3]).max()

    with fo.patch():
        pass
    with fo.use_implementation("native"):
        (found,) = fo.autofuse.report(loss)(jnp.ones((4, 8))).replaced
    assert "test_patch.py" in found.where


def test_sources_are_those_of_the_originals():
    with fo.patch():
        pass
    assert inspect.getsource(jax.nn.softmax).startswith("def softmax(")
