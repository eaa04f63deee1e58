"""`dense_act`: transformations, which calls take the kernel, its values, and the models."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, checks
from harness.compat import x64
from harness.numerics import normal
from harness.programs import cuda_targets_of, equations
from harness.sharding import mesh_for
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops import _native
from jax_fastops._activations import ACTIVATIONS
from jax_fastops.models import bert, decoder

pytestmark = pytest.mark.kernels

HERE = jax.default_backend() == "gpu" and "jax_fastops.dense_act" in _native.kernels("cuda")
HERE = HERE and _native.device("cuda")[1] == 9.0
on_gpu = pytest.mark.skipif(not HERE, reason="needs a GPU of compute capability 9.0")


def plain(x, kernel, bias=None, *, activation="gelu"):
    y = x @ kernel
    return ACTIVATIONS[activation](y if bias is None else y + bias.astype(x.dtype))


def draws(*lead):
    def make(rng, dtype):
        return tuple(normal(rng, shape, dtype) for shape in ((*lead, 8), (8, 16), (16,)))

    return make


CASE = Case(
    name="dense",
    fn=fo.dense_act,
    reference=plain,
    make_args=draws(2, 3),
    make_sharded_args=draws(8, 2),
    dtypes=("bfloat16", "float16"),
    tolerance=Tolerance(ulps=16.0),
    shardings=(Sharding("batch", (0, None, None), (0,), gradient_all_reduces=2),),
    symbolic=("a, b, 8", "8, 16", "16"),
    sizes=({"a": 2, "b": 65},),
    quick="^value$|^vjp$|^vmap/(x.|all)/first$|symbolic|empty|sharded/auto/batch/v|shard_map/batch/v",
)


@checks(CASE)
def test_transforms(check):
    check()


# ---- which calls take the kernel -----------------------------------------------------------------


def operands(*lead, k=64, n=2048, dtype="bfloat16"):
    return jnp.ones((*lead, k), dtype), jnp.ones((k, n), dtype), jnp.ones(n)


def calls(fn, *args):
    return cuda_targets_of(fn, *args).count("dense_act")


@pytest.mark.jax
def test_calls(cuda_programs):
    x, kernel, bias = operands(3, 96)
    assert calls(fo.dense_act, x, kernel, bias) == calls(fo.dense_act, x, kernel) == 1
    assert calls(jax.vmap(fo.dense_act, (0, None, None)), x, kernel, bias) == 1
    own = jnp.stack([kernel] * 3), jnp.stack([bias] * 3)
    assert calls(jax.vmap(fo.dense_act, (0, 0, None)), x, own[0], bias) == 0
    assert calls(jax.vmap(fo.dense_act, (0, None, 0)), x, kernel, own[1]) == 0
    mesh = mesh_for(AxisType.Explicit)
    with jax.set_mesh(mesh):
        for array, spec, of_result in (
            (0, P("a"), P("a", None)),
            (0, P(None, "a"), P(None, None)),
            (1, P(None, "a"), P(None, "a")),
        ):
            args = list(operands(96 * 8))
            args[array] = jax.device_put(args[array], NamedSharding(mesh, spec))
            assert calls(fo.dense_act, *args) == (spec == P("a")), spec
            assert jax.eval_shape(fo.dense_act, *args).sharding.spec == of_result, spec


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(dtype="float32"), "the kernel does not take float32"),
        (dict(k=41), "a size of kernel is no multiple of 8"),
        (dict(n=71), "a size of kernel is no multiple of 8"),
        (dict(n=0), "there are no elements"),
        (dict(k=72), "the kernel was measured as no faster: rows of no multiple of 128 bytes"),
        (dict(n=1984), "arrays of 254 kB (below 262 kB)"),
        (dict(rows=95), "95 rows (below 96)"),
        (dict(capability=8.0), "the kernel needs compute capability 9.0; the device has 8.0"),
        (
            dict(),
            "faster: rows of a multiple of 128 bytes, 99 rows (96 or more)",
        ),
    ],
)
def test_limits(cuda_programs, monkeypatch, changes, reason):
    given = dict(changes)
    rows, capability = given.pop("rows", 99), given.pop("capability", 9.0)
    monkeypatch.setattr(_native, "device", lambda p: ("", capability, 0.0))
    call, *others = fo.explain(lambda *args: fo.dense_act(*args))(*operands(rows, **given)).calls
    assert (call.op, call.kernel) == ("dense_act", not changes) and reason in call.reason
    assert [other.op for other in others] == ["bias_act"] * bool(changes)
    assert all("test_dense_act.py" in c.where for c in (call, *others))


@pytest.mark.parametrize(
    "args, error, message",
    [
        ((np.float32(1), np.ones((1, 8))), ValueError, "x is a number"),
        ((np.ones((2, 3)), np.ones((4, 8))), ValueError, r"kernel has shape \(4, 8\); .* \(3, n\)"),
        ((np.ones((2, 3)), np.ones(3)), ValueError, r"kernel has shape \(3,\)"),
        (
            (np.ones(3), np.ones((3, 8)), np.ones(3)),
            ValueError,
            r"bias has shape \(3,\); .* \(8,\)",
        ),
        ((np.ones(3), np.ones((3, 8), "float16")), TypeError, "kernel has dtype float16, but x"),
        ((np.ones(3, int), np.ones((3, 8))), TypeError, "x has dtype int32"),
        ((np.ones(3), np.ones((3, 8)), np.ones(8, int)), TypeError, "bias has dtype int32"),
        (([1.0], np.ones((1, 8))), TypeError, "x is of type list"),
    ],
)
def test_errors(args, error, message):
    with pytest.raises(error, match=f"^dense_act: {message}"):
        fo.dense_act(*args)


def test_activation_is_checked():
    with pytest.raises(ValueError, match="dense_act: activation is 'tanh'; it must be one of"):
        fo.dense_act(*operands(2), activation="tanh")


# ---- models --------------------------------------------------------------------------------------


def composed(x, kernel, bias=None, *, activation="gelu"):
    return fo.bias_act(jnp.matmul(x, kernel), bias, activation=activation)


SIZES = dict(dtype="bfloat16", intermediate_size=2048)
BERT = dataclasses.replace(bert.SMALL, activation="gelu_exact", **SIZES)
GPT = dataclasses.replace(
    decoder.SMALL, activation="gelu", positions=128, kv_heads=4, norms="pre", **SIZES
)


def network(module, config, rows=2, length=70):
    """The network as a function of its parameters."""
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), config))
    tokens = jnp.arange(rows * length).reshape(rows, length) % 64

    def apply(params, ops=module.FASTOPS):
        return module.apply(params, tokens, config, ops=ops)[0]

    return apply, params


@pytest.mark.parametrize("module, config", [(bert, BERT), (decoder, GPT)], ids=["bert", "gpt"])
def test_models(cuda_programs, module, config):
    """A forward takes the kernel, and a gradient is as without it."""
    apply, params = network(module, config)
    assert calls(apply, params) == config.layers
    sharded = dataclasses.replace(config, tensor_parallel=True)
    for other in (network(module, sharded), network(module, config, rows=1, length=1)):
        assert calls(*other) == 0

    def step(ops):
        def program(params):
            y, pullback = jax.vjp(functools.partial(apply, ops=ops), params)
            return pullback(jnp.cos(y))

        jaxpr = jax.make_jaxpr(program)(params).jaxpr
        return [(e.primitive.name, *(str(x.aval) for x in e.outvars)) for e in equations(jaxpr)]

    found = step(module.FASTOPS)
    assert found == step(module.FASTOPS._replace(dense_act=composed))
    assert not [name for name, *_ in found if "dense_act" in name]


# ---- values --------------------------------------------------------------------------------------

SHAPES = [(1, 8, 8), (7, 200, 72), (129, 776, 520), (1000, 200, 520), (1000, 776, 8), (129, 8, 72)]
# On 132 processors: three tiles for a block, of 64 columns and of groups in turns; tiles of 192.
SHAPES += [(16993, 8, 72), (4097, 392, 1032), (1025, 776, 2312)]


@on_gpu
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values(dtype, activation):
    """Sums and activation in float32, rounded once. What is next to the operands is not read."""
    rng, eps = np.random.default_rng(0), float(jnp.finfo(dtype).eps)

    @functools.partial(jax.jit, static_argnums=3)
    def inside(x, kernel, bias, start):
        """Of parts of larger arrays."""
        x, kernel = x[start:-1], kernel[start:-1]
        return fo.dense_act(x, kernel, bias, activation=activation)

    for place, (rows, k, n) in enumerate(SHAPES):
        x, kernel = normal(rng, (rows, k), dtype), normal(rng, (k, n), dtype)
        kernel = (kernel.astype("float32") / np.sqrt(k)).astype(dtype)
        bias = (None, normal(rng, (n,), "float32"), normal(rng, (n,), dtype))[place % 3]
        start = place % 2 + 1
        around = (np.pad(a, ((start, 1), (0, 0)), constant_values=np.nan) for a in (x, kernel))
        y = np.asarray(inside(*around, bias, start), np.float64)
        with x64(), jax.default_device(jax.devices("cpu")[0]):
            total = x.astype("float64") @ kernel.astype("float64")
            total += 0 if bias is None else bias.astype("float64")
            wanted = np.asarray(ACTIVATIONS[activation](jnp.asarray(total)))
        error, size = np.abs(y - wanted), np.sqrt(np.mean(wanted**2))
        # One rounding has an error of 0.19 to 0.23 epsilons in norm, the reference 0.26 to 0.34.
        units = 0.25 if dtype == "bfloat16" and y.size > 100 else 0.5
        assert np.sqrt(np.mean(error**2)) <= units * eps * size, (rows, k, n)
        assert np.max(error / (np.abs(wanted) + size)) <= eps, (rows, k, n)


@on_gpu
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(activation):
    """A row with infinities or a NaN is as in the reference, and changes no other row."""
    x = np.ones((200, 64), jnp.bfloat16)
    x[3, 5], x[70, 0], x[199, 63] = np.inf, np.nan, -np.inf
    kernel = np.where(np.arange(64) % 2, 1, -1).astype(jnp.bfloat16) * np.ones((64, 1), x.dtype)
    run = functools.partial(fo.dense_act, activation=activation)
    y = jax.jit(run)(x, kernel)
    with fo.use_implementation("xla"):
        wanted = jax.jit(lambda *args: run(*args))(x, kernel)
    pair = (np.asarray(a, np.float32) for a in (y, wanted))
    np.testing.assert_allclose(*pair, rtol=1e-2, atol=1e-6)
