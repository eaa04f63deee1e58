"""ResNets: architecture; FASTOPS and PLAIN train alike, also on several devices."""

import dataclasses
import functools
import inspect
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import make_mesh, x64
from harness.numerics import assert_close_in_norm, norm_errors
from harness.programs import assert_strict
from harness.sharding import collectives, device_count, mesh_for, over_kinds, over_mesh
from jax.extend.core import Literal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops.models import resnet

pytestmark = pytest.mark.usefixtures("exact_products")

# Few blocks of every kind: with and without stride, with and without a projection.
BASIC = resnet.Config((2, 1), "basic", width=8, classes=10, dtype="float32", zero_init=False)
BOTTLENECK = resnet.Config(
    (2, 1), "bottleneck", width=8, classes=10, dtype="float32", zero_init=False
)
CONFIGS = {"basic": BASIC, "bottleneck": BOTTLENECK}
MOMENTUM, RATE = 0.9, 0.5


@functools.cache
def made(config: resnet.Config):
    return jax.jit(resnet.init, static_argnums=1)(jax.random.key(0), config)


@functools.cache
def start(config: resnet.Config):
    """Parameters and statistics, none of which are all zero or all one."""
    params, statistics = made(config)
    rng = np.random.default_rng(0)

    def changed(path, leaf):
        if path[-1].key == "kernel":
            return leaf
        return leaf + rng.uniform(0.1, 0.5, leaf.shape).astype(leaf.dtype)

    return jax.tree.map_with_path(changed, (params, statistics))


def batch(config: resnet.Config, n: int = 8, size: int = 32):
    rng = np.random.default_rng(1)
    images = rng.standard_normal((n, size, size, config.channels), np.float32)
    return images, (np.arange(n) % config.classes).astype(np.int32)


def loss(params, statistics, images, labels, config, implementation, axis_name=None):
    logits, statistics = resnet.apply(
        params,
        statistics,
        images,
        config,
        train=True,
        batch_norm=implementation,
        axis_name=axis_name,
    )
    each = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    mean = each.mean() if axis_name is None else jax.lax.pmean(each.mean(), axis_name)
    return mean, (logits, statistics)


def training_step(config, implementation, axis_name=None):
    """A function of parameters, statistics, images and labels; gives results and gradients."""

    def step(params, statistics, images, labels):
        (value, (logits, new)), grads = jax.value_and_grad(loss, has_aux=True)(
            params, statistics, images, labels, config, implementation, axis_name
        )
        return {"loss": value, "logits": logits, "statistics": new, "gradients": grads}

    return step


def by_shard_map(mesh, config, implementation):
    """A training step whose batch is sharded over the mesh axis ``"batch"``."""
    return jax.shard_map(
        training_step(config, implementation, "batch"),
        mesh=mesh,
        in_specs=(P(), P(), P("batch"), P("batch")),
        out_specs={"loss": P(), "logits": P("batch"), "statistics": P(), "gradients": P()},
    )


@functools.cache
def stepped(config, implementation):
    with fo.use_implementation("native"):
        step = jax.jit(training_step(config, implementation))
        return jax.tree.map(np.asarray, step(*start(config), *batch(config)))


# ---- architecture --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, parameters, multiplications",
    [(resnet.RESNET18, 11_689_512, 1.814e9), (resnet.RESNET50, 25_557_032, 4.089e9)],
    ids=["18", "50"],
)
def test_size(config, parameters, multiplications):
    """The counts of torchvision's models at 224 x 224, which depend on strides and paddings."""
    state = jax.eval_shape(lambda key: resnet.init(key, config), jax.random.key(0))
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, resnet.shapes(config))
    assert sum(math.prod(a.shape) for a in jax.tree.leaves(state[0])) == parameters
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    apply = functools.partial(resnet.apply, config=config, train=False, batch_norm=resnet.PLAIN)
    equations = jax.make_jaxpr(apply)(*state, images).eqns
    count = 512 * 1000 if config.block == "basic" else 2048 * 1000
    strided = []
    for equation in equations:
        if equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            count += equation.outvars[0].aval.size * math.prod(kernel[:3])
            assert equation.invars[0].aval.dtype == jnp.bfloat16
            if equation.params["window_strides"] == (2, 2):
                strided.append(kernel[0])
    assert count == pytest.approx(multiplications, rel=5e-4)
    assert sorted(strided) == [1, 1, 1, 3, 3, 3, 7]


@pytest.mark.jax
def test_batch_norms_are_fused():
    """ResNet-50 has 53: 49 are followed by ReLU, and 16 of these add a residual."""
    calls = []

    def training(x, scale, bias, *, activation, residual, **options):
        calls.append((activation, residual is not None))
        return resnet.plain_batch_norm(
            x, scale, bias, activation=activation, residual=residual, **options
        )

    spy = resnet.BatchNorm(training, resnet.plain_batch_norm_inference)
    params, statistics = resnet.shapes(resnet.RESNET50)
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    apply = functools.partial(resnet.apply, config=resnet.RESNET50, train=True, batch_norm=spy)
    logits, new = jax.eval_shape(apply, params, statistics, images)
    assert (logits.shape, logits.dtype) == ((2, 1000), jnp.float32)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, statistics)
    kinds = (("relu", False), ("relu", True), (None, False))
    assert [calls.count(kind) for kind in kinds] == [33, 16, 4]
    assert len(calls) == 53


def test_zero_init():
    """Blocks without a projection start as the identity on positive inputs."""
    config = dataclasses.replace(BASIC, zero_init=True)
    params, _ = made(config)
    scales = [params["layer1"][0][bn]["scale"] for bn in ("bn1", "bn2")]
    assert np.all(scales[0] == 1) and np.all(scales[1] == 0)
    projected = params["layer2"][0]["downsample"]["bn"]["scale"]
    assert np.all(projected == 1)
    plain, _ = made(BASIC)
    assert np.all(plain["layer1"][0]["bn2"]["scale"] == 1)
    spread = float(jnp.std(params["layer1"][0]["conv1"]["kernel"]))
    assert spread == pytest.approx(math.sqrt(2 / (9 * 8)), rel=0.1)
    assert not np.array_equal(
        params["layer1"][0]["conv1"]["kernel"], params["layer1"][1]["conv1"]["kernel"]
    )


# ---- FASTOPS and PLAIN ---------------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.parametrize("kind", CONFIGS)
def test_twins_agree(kind):
    """Logits, new statistics and the gradient of every parameter."""
    config = CONFIGS[kind]
    ours, plain = (stepped(config, which) for which in (resnet.FASTOPS, resnet.PLAIN))
    assert_close_in_norm(ours, plain, 5e-5)
    assert min(np.linalg.norm(g) for g in jax.tree.leaves(ours["gradients"])) > 1e-4


@pytest.mark.parametrize("train", [True, False])
def test_the_stem_pools_before_it_normalises(train):
    """Batch norm is monotonic per channel, so pooling before it gives the same result."""
    params, statistics = start(BASIC)
    scale = params["bn1"]["scale"]
    params = params | {"bn1": params["bn1"] | {"scale": scale.at[1::3].multiply(-1)}}
    scales = []

    def pool(x, scale=None):
        scales.append(scale)
        return resnet.max_pool(x, scale)

    ours = resnet.FASTOPS._replace(max_pool=pool)
    found = []
    for implementation in (ours, ours._replace(statistics=None), resnet.PLAIN):
        if train:
            run = training_step(BASIC, implementation)
        else:
            options = dict(config=BASIC, train=False, batch_norm=implementation)
            run = lambda p, s, images, _, o=options: resnet.apply(p, s, images, **o)  # noqa: E731
        with fo.use_implementation("native"):
            found.append(jax.jit(run)(params, statistics, *batch(BASIC)))
    assert [scale is not None for scale in scales] == [True, False]
    for other in found[1:]:
        assert_close_in_norm(found[0], other, 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("full", [resnet.RESNET18, resnet.RESNET50], ids=["18", "50"])
def test_twins_agree_in_full_depth(full):
    """In float64, where the formula of the variance makes no difference."""
    config = dataclasses.replace(full, width=8, classes=10, dtype="float64")
    given = (*start(dataclasses.replace(config, dtype="float32")), *batch(config, 4, 64))
    with x64(), fo.use_implementation("native"):
        given = jax.tree.map(
            lambda a: np.asarray(a, np.float64 if a.dtype == np.float32 else None), given
        )
        ours, plain = (
            jax.jit(training_step(config, which))(*given)
            for which in (resnet.FASTOPS, resnet.PLAIN)
        )
        assert ours["logits"].dtype == np.float64
        assert_close_in_norm(ours, plain, 1e-9)


def test_bfloat16():
    """The error against float32 is bounded by that of plain JAX, on average and per array."""
    config = dataclasses.replace(BASIC, dtype="bfloat16")
    exact = stepped(BASIC, resnet.PLAIN)
    ours, plain = (stepped(config, which) for which in (resnet.FASTOPS, resnet.PLAIN))
    assert all(a.dtype == np.float32 for a in jax.tree.leaves(ours))
    assert_close_in_norm(ours["logits"], exact["logits"], 0.1)
    assert_close_in_norm(ours["statistics"], exact["statistics"], 0.05)
    mine, theirs = (norm_errors(x["gradients"], exact["gradients"]) for x in (ours, plain))
    assert np.mean(list(mine.values())) <= 1.5 * np.mean(list(theirs.values()))
    for path, value in mine.items():
        assert value <= max(2 * theirs[path], 0.1), f"{path}: {value:.2f}, {theirs[path]:.2f}"


@pytest.mark.jax
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_training(native, dtype):
    """The loss of a fixed batch falls as in plain JAX."""
    config = dataclasses.replace(resnet.SMALL, stages=(1, 1), dtype=dtype)
    curves = {}
    for which in (resnet.FASTOPS, resnet.PLAIN):
        step = training_step(config, which)

        @jax.jit
        def update(params, statistics, velocity, images, labels, step=step):
            found = step(params, statistics, images, labels)
            velocity = jax.tree.map(
                lambda v, g: MOMENTUM * v - RATE * g, velocity, found["gradients"]
            )
            params = jax.tree.map(jnp.add, params, velocity)
            return params, found["statistics"], velocity, found["loss"]

        params, statistics = made(config)
        velocity = jax.tree.map(jnp.zeros_like, params)
        losses = curves[which] = []
        for _ in range(30):
            params, statistics, velocity, value = update(
                params, statistics, velocity, *batch(config, 16, 8)
            )
            losses.append(float(value))
        assert losses[0] > 2 and losses[-1] < 0.1 * losses[0]
    gap = np.max(np.abs(np.subtract(*curves.values())))
    assert gap <= (1e-2 if dtype == "float32" else 0.1)


def test_new_statistics():
    """Running statistics are a weighted mean; those of the batch give the same logits."""
    config = dataclasses.replace(BASIC, momentum=0.0)
    found = stepped(BASIC, resnet.FASTOPS)
    params, old = start(BASIC)
    images, _ = batch(BASIC)
    train, infer = (
        jax.jit(functools.partial(resnet.apply, config=config, train=train))
        for train in (True, False)
    )
    logits, of_batch = train(params, old, images)
    weighed = jax.tree.map(lambda a, b: np.asarray(0.9 * a + 0.1 * b), old, of_batch)
    assert_close_in_norm(found["statistics"], weighed, 1e-5)
    again, kept = infer(params, of_batch, images)
    assert_close_in_norm(np.asarray(again), np.asarray(logits), 1e-5)
    jax.tree.map(np.testing.assert_array_equal, kept, of_batch)


def test_inference(native):
    params, statistics = start(BOTTLENECK)
    images, _ = batch(BOTTLENECK)

    def logits(params, implementation):
        return resnet.apply(
            params, statistics, images, BOTTLENECK, train=False, batch_norm=implementation
        )[0]

    ours, plain = (
        jax.jit(logits, static_argnums=1)(params, which) for which in (resnet.FASTOPS, resnet.PLAIN)
    )
    assert_close_in_norm(np.asarray(ours), np.asarray(plain), 1e-5)
    # The logits of an image do not depend on the other images.
    images = images[:3]
    assert_close_in_norm(np.asarray(logits(params, resnet.FASTOPS)), np.asarray(ours[:3]), 1e-5)


@pytest.mark.jax
def test_statistics_have_no_gradient():
    params, statistics = start(resnet.SMALL)
    images, _ = batch(resnet.SMALL, 4, 8)

    def total(params):
        new = resnet.apply(params, statistics, images, resnet.SMALL, train=True)[1]
        return sum(map(jnp.sum, jax.tree.leaves(new)))

    assert not any(np.any(g) for g in jax.tree.leaves(jax.jit(jax.grad(total))(params)))


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("parameters", ["both", "neither"])
def test_plain_batch_norm(axis, parameters):
    """It has the signature and the results of the function of FASTOPS."""
    for mine, other in zip(resnet.PLAIN[:3], resnet.FASTOPS[:3], strict=True):
        mine, other = (list(inspect.signature(f).parameters.values()) for f in (mine, other))
        assert [(p.name, p.kind, p.default) for p in mine] == [
            (p.name, p.kind, p.default) for p in other
        ]
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 4, 6, 5, 3), np.float32)
    c = x.shape[axis]
    given = rng.standard_normal((2, c), np.float32) if parameters == "both" else (None, None)
    options = dict(axis=axis, eps=1e-3, residual=residual, activation="relu")
    plain, ours = (f(x, *given, **options) for f in (resnet.plain_batch_norm, fo.batch_norm))
    for a, b in zip(plain, ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    y = resnet.plain_batch_norm_inference(x, *ours[1:], *given, **options)
    np.testing.assert_allclose(y, ours[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("which", ["native", "xla", "plain"])
def test_strict_settings(which, name):
    config = dataclasses.replace(CONFIGS[name], stages=(1, 1), dtype="bfloat16", remat=1)
    implementation = resnet.PLAIN if which == "plain" else resnet.FASTOPS
    images, labels = batch(config, n=4, size=16)

    def run(params, statistics, images, labels):
        given, options = (params, statistics, images), dict(batch_norm=implementation)
        trained = training_step(config, implementation)(*given, labels)
        return trained, resnet.apply(*given, config, train=False, **options)

    with fo.use_implementation("xla" if which == "xla" else "native"):
        assert_strict(run, *start(config), images, labels)


# ---- max pooling ---------------------------------------------------------------------------------

IMAGE = np.zeros((1, 4, 4, 3), np.float32)
POOLS = (resnet.max_pool, resnet.plain_max_pool)
POOLS_BY_SCALE = tuple(functools.partial(pool, scale=np.float32([-1, 2])) for pool in POOLS)
# Many equal elements; zeros of both signs; windows of minus infinity only; NaN.
CONTENTS = {
    "integers": [-1, 0, 1],
    "zeros": [-1, -0.0, 0.0],
    "infinite": [-np.inf, -np.inf, -np.inf, -np.inf, -np.inf, 1, np.inf],
    "nan": [0, 1, 2, 3, 4, 5, 6, 7, np.nan],
}


def pooled(shape) -> tuple[int, ...]:
    n, h, w, c = shape
    return n, -(-h // 2), -(-w // 2), c


def pool_operands(content: str, shape, dtype="float32"):
    """An array and a cotangent of small integers, whose sums are exact."""
    rng = np.random.default_rng(0)
    x = rng.choice(np.array(CONTENTS[content], np.float32), shape)
    return jnp.asarray(x, dtype), jnp.asarray(rng.integers(1, 9, pooled(shape)), dtype)


def in_windows_of_nan(nan):
    """The elements that may share a window with a NaN."""
    padded = np.pad(nan, ((0, 0), (2, 2), (2, 2), (0, 0)))
    around = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), (1, 2))
    return around.any((-2, -1))


def with_gradient(pool):
    def run(x, dy):
        y, pullback = jax.vjp(pool, x)
        return y, *pullback(dy)

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(2, 8, 10, 3), (2, 7, 9, 3), (3, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("scale", [None, -2.0, 0.0], ids=str)
def test_max_pool(shape, dtype, scale):
    """Result and gradient equal XLA's, also for equal elements and at edges. A negative scale gives
    the minimum."""
    scales = None if scale is None else jnp.full(shape[-1:], scale).at[2:].set(1)
    pools = [functools.partial(pool, scale=scales) for pool in POOLS]
    runs = [jax.jit(with_gradient(pool)) for pool in pools]
    for content in CONTENTS:
        given = pool_operands(content, shape, dtype)
        (y, dx), (y_plain, dx_plain) = (run(*given) for run in runs)
        assert y.shape == pooled(shape) and y.dtype == dx.dtype == dtype
        wide = [np.asarray(a, np.float32) for a in (y, y_plain, dx, dx_plain)]
        np.testing.assert_array_equal(*wide[:2], err_msg=content)
        if content == "nan":
            assert shape[1] == 1 or 0 < np.isnan(wide[0]).sum() < wide[0].size
        # In a window with a NaN, any element may get the gradient.
        known = ~in_windows_of_nan(np.isnan(given[0].astype(jnp.float32)))
        np.testing.assert_array_equal(*(a[known] for a in wide[2:]), err_msg=content)
        alone = np.array(pools[0](given[0]), np.float32)  # not differentiated
        np.testing.assert_array_equal(alone, wide[0])
        if scale is not None:
            turned = given[0].at[..., :2].multiply(float(np.sign(scale)) or 1)
            alone[..., :2] *= np.sign(scale) or 1
            np.testing.assert_array_equal(alone, resnet.max_pool(turned).astype(np.float32))


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (2, 0, 4, 3), (2, 5, 0, 3), (2, 8, 8, 0)], ids=str)
def test_max_pool_of_nothing(shape):
    y, dx = jax.jit(with_gradient(resnet.max_pool))(jnp.zeros(shape), jnp.zeros(pooled(shape)))
    assert y.shape == pooled(shape) and dx.shape == shape


@pytest.mark.parametrize(
    "x, scale, error, text",
    [
        (IMAGE.astype(np.int32), None, TypeError, "max_pool: x has dtype int32; it must be"),
        (IMAGE[0, ..., :1], None, ValueError, r"max_pool: x has shape \(4, 4, 1\); it must be"),
        (IMAGE, np.float32(1), ValueError, r"max_pool: scale has shape \(\); it must be \(3,\)"),
        (IMAGE, np.float32([1]), ValueError, r"max_pool: scale has shape \(1,\); it must be \(3"),
        (IMAGE, np.ones(3, np.int32), TypeError, "max_pool: scale has dtype int32"),
        (IMAGE, [1.0, 2.0, 3.0], TypeError, "max_pool: scale"),
    ],
)
def test_max_pool_of_what_is_no_image(x, scale, error, text):
    with pytest.raises(error, match=text):
        resnet.max_pool(x, scale)


def test_max_pool_gives_all_gradients_to_one():
    """The gradient goes to the first of equal elements; none is lost or counted twice."""
    _, pullback = jax.vjp(resnet.max_pool, jnp.zeros((1, 4, 4, 1)))
    dy = jnp.asarray([[1.0, 10.0], [100.0, 1000.0]])[None, :, :, None]
    wanted = np.zeros((4, 4))
    # A window at an edge has padding before its first element.
    wanted[0, 0], wanted[0, 1], wanted[1, 0], wanted[1, 1] = 1, 10, 100, 1000
    np.testing.assert_array_equal(pullback(dy)[0][0, :, :, 0], wanted)


@pytest.mark.jax
@pytest.mark.parametrize("pools", [POOLS, POOLS_BY_SCALE], ids=["plain", "scaled"])
def test_max_pool_derivatives(pools):
    """Forward mode and second derivatives under vmap equal those of plain JAX.

    In float64, because each has a sum over all elements, whose order differs between programs.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(pool, x, v):
        def f(x):
            return jnp.sin(x * x + pool(x).sum()).sum() + (pool(jnp.cos(x)) ** 3).sum()

        v = v * jnp.arange(x.size).reshape(x.shape)
        return {
            "tangent": jax.jvp(pool, (x,), (v,)),
            "gradient": jax.grad(f)(x),
            "forward of reverse": jax.jvp(jax.grad(f), (x,), (v,))[1],
            "reverse of reverse": jax.grad(lambda x: (jax.grad(f)(x) * v).sum())(x),
        }

    with x64():
        x = pool_operands("integers", (6, 6, 5, 2), "float64")[0].reshape(2, 3, 6, 5, 2)
        ours, plain = (
            jax.vmap(functools.partial(derivatives, pool), (0, None))(x, 0.3) for pool in pools
        )
        assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {np.dtype("float64")}
        assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(ours)) > 0.1
        assert_close_in_norm(ours, plain, 1e-6)


def test_max_pool_keeps_places():
    """It keeps one byte per result, and computes no places without differentiation."""
    x, _ = pool_operands("integers", (2, 8, 10, 3))
    scaled = functools.partial(resnet.max_pool, scale=np.float32([-1, 2, 1]))
    for pool in (resnet.max_pool, jax.jit(resnet.max_pool), scaled):
        kept = [k for k in jax.tree.leaves(jax.vjp(pool, x)[1]) if k.size > 4]  # without tables
        assert [(k.shape, k.dtype) for k in kept] == [(pooled(x.shape), jnp.uint8)]
    kept = jax.tree.leaves(jax.vjp(jax.checkpoint(resnet.max_pool), x)[1])
    assert [k.shape for k in kept if k.size > 4] == [x.shape]
    assert "u8" not in str(jax.make_jaxpr(resnet.max_pool)(x))


@pytest.mark.jax
@pytest.mark.parametrize("pools", [POOLS, POOLS_BY_SCALE], ids=["plain", "scaled"])
@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map"])
def test_max_pool_sharded(kind, pools):
    """Each device pools its own images, without communication."""
    if (count := device_count()) < 2:
        pytest.skip("needs two devices")
    mesh = make_mesh({"batch": count}, AxisType.Explicit if kind == "explicit" else AxisType.Auto)
    given = pool_operands("integers", (2 * count, 7, 8, 2))
    wanted = with_gradient(pools[1])(*given)
    spread = jax.device_put(given, NamedSharding(mesh, P("batch")))
    run = with_gradient(pools[0])
    with jax.set_mesh(mesh):
        if kind == "shard_map":
            run = jax.shard_map(run, in_specs=P("batch"), out_specs=P("batch"))
        compiled = jax.jit(run).lower(*spread).compile()
        found = compiled(*spread)
    assert not collectives(compiled.as_text())
    for a, b in zip(found, wanted, strict=True):
        assert a.sharding.shard_shape(a.shape)[0] == 2
        np.testing.assert_array_equal(a, b)


@pytest.mark.jax
@pytest.mark.parametrize("pools", [POOLS, POOLS_BY_SCALE], ids=["plain", "scaled"])
def test_max_pool_export(pools):
    """One exported program for all batch sizes."""
    (n,) = jax.export.symbolic_shape("n")
    types = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in [(n, 7, 8, 2), (n, *pooled((1, 7, 8, 2))[1:])]
    ]
    exported = jax.export.export(jax.jit(with_gradient(pools[0])))(*types)
    exported = jax.export.deserialize(exported.serialize())
    given = pool_operands("integers", (3, 7, 8, 2))
    wanted = with_gradient(pools[1])(*given)
    jax.tree.map(np.testing.assert_array_equal, tuple(exported.call(*given)), wanted)


# ---- recomputed results --------------------------------------------------------------------------


def kept_bytes(config, implementation) -> int:
    """The bytes of the residuals, except the arguments."""

    def pullback(params, *rest):
        rest = (*rest, config, implementation)
        return jax.tree.leaves(jax.vjp(lambda params: loss(params, *rest)[0], params)[1])

    program = jax.make_jaxpr(pullback)(*resnet.shapes(config), *batch(config)).jaxpr
    # A reshaped array takes no additional memory.
    viewed = {e.outvars[0]: e.invars[0] for e in program.eqns if e.primitive.name == "reshape"}
    kept = set()
    for v in program.outvars:
        while not isinstance(v, Literal) and v in viewed:
            v = viewed[v]
        if not isinstance(v, Literal) and v not in program.invars:
            kept.add(v)
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)


@pytest.mark.jax
@pytest.mark.parametrize("stages", [(1,), (1, 1)], ids=str)
def test_remat_keeps_less(native, stages):
    """Remat of one block saves the results of the inner norms of the first block."""
    config = dataclasses.replace(BOTTLENECK, stages=stages)
    kept, less = (kept_bytes(dataclasses.replace(config, remat=n), resnet.FASTOPS) for n in (0, 1))
    # Images of 32 x 32 have 8 x 8 pixels after the stem.
    results = 2 * len(batch(config)[0]) * 8 * 8 * config.width * 4
    assert 0.99 * results < kept - less <= results  # the statistics are kept


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("remat", [1, 9])
def test_remat(config, remat):
    """The step is the same with one block or all blocks recomputed."""
    found = stepped(dataclasses.replace(config, remat=remat), resnet.FASTOPS)
    assert_close_in_norm(found, stepped(config, resnet.FASTOPS), 5e-6)


@pytest.mark.jax
def test_remat_of_images_and_inference():
    """The gradient of the images, in training and in inference."""
    config = BOTTLENECK
    params, statistics = start(config)
    images, _ = batch(config, 2)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def gradients(images, remat, train):
        def summed(images, params):
            mine = dataclasses.replace(config, remat=remat)
            return jnp.sin(resnet.apply(params, statistics, images, mine, train=train)[0]).sum()

        return jax.grad(summed, (0, 1))(images, params)

    for train in (False, True):
        assert_close_in_norm(gradients(images, 2, train), gradients(images, 0, train), 2e-5)


@pytest.mark.jax
def test_remat_of_plain_jax_changes_nothing():
    programs = [
        jax.make_jaxpr(training_step(dataclasses.replace(BASIC, remat=n), resnet.PLAIN))(
            *resnet.shapes(BASIC), *batch(BASIC)
        )
        for n in (0, 2)
    ]
    assert str(programs[0]) == str(programs[1])


@pytest.mark.jax
def test_remat_derivatives():
    """Every derivative is that of the convolution of the recomputed input."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 4, 4, 2)).astype(np.float32)
    kernel = rng.standard_normal((3, 3, 2, 2)).astype(np.float32)

    def convolved(x, kernel, again):
        params, y = {"kernel": kernel}, jnp.tanh(x)
        if again:
            return resnet._conv_of_made(jnp.tanh, y, params, 1, (x,))
        return resnet._conv(y, params, 1)

    @functools.partial(jax.jit, static_argnums=2)
    def derivatives(x, kernel, again):
        def f(x, kernel):
            return jnp.sin(convolved(x, kernel, again)).sum()

        gradient, given = jax.grad(f, (0, 1)), (x, kernel)
        return gradient(*given), jax.jvp(f, given, given), jax.jvp(gradient, given, given)

    assert_close_in_norm(derivatives(x, kernel, True), derivatives(x, kernel, False), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_remat_sharded(native, kind):
    """Recomputation adds no communication."""

    def make(mesh, remat=1):
        config = dataclasses.replace(resnet.SMALL, remat=remat)
        if kind == "explicit":
            return training_step(config, resnet.FASTOPS)
        return by_shard_map(mesh, config, resnet.FASTOPS)

    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    found, program = over_devices(axis_type, resnet.SMALL, make)
    _, keeping = over_devices(axis_type, resnet.SMALL, functools.partial(make, remat=0))
    assert collectives(program) == collectives(keeping)
    assert_close_in_norm(jax.tree.map(np.asarray, found), on_one_device(resnet.SMALL), 2e-5)


# ---- several devices -----------------------------------------------------------------------------


NETS = {"small": resnet.SMALL, "imagenet_stem": dataclasses.replace(BASIC, stages=(1,))}


@functools.cache
def on_one_device(config):
    given = (*start(config), *batch(config, 32, 8))
    return jax.tree.map(np.asarray, jax.jit(training_step(config, resnet.FASTOPS))(*given))


def over_devices(axis_type, config, make):
    """Runs ``make(mesh)`` on a sharded batch; returns the results and the compiled program."""
    mesh = mesh_for(axis_type, 1, "batch")
    given = (*start(config), *batch(config, 32, 8))
    specs = (P(), P(), P("batch"), P("batch"))
    return over_mesh(mesh, lambda *args: make(mesh)(*args), given, specs)


def norms(config) -> int:
    return len(jax.tree.leaves(resnet.shapes(config)[1])) // 2


@pytest.mark.jax
@over_kinds
@pytest.mark.parametrize("config", NETS.values(), ids=NETS)
def test_sharded_batch(native, config, axis_type):
    """The statistics are those of the whole batch. The only communication is all-reduces."""
    found, program = over_devices(
        axis_type, config, lambda mesh: training_step(config, resnet.FASTOPS)
    )
    counts = collectives(program)
    leaves = len(jax.tree.leaves(resnet.shapes(config)[0]))
    # Statistics, sums of the backward, gradients of all parameters, the loss.
    assert 0 < counts.pop("all-reduce") <= 2 * norms(config) + leaves + 1
    assert not counts
    assert found["logits"].sharding.shard_shape(found["logits"].shape)[0] == 32 // device_count()
    assert_close_in_norm(jax.tree.map(np.asarray, found), on_one_device(config), 2e-5)


@pytest.mark.jax
@pytest.mark.parametrize("config", NETS.values(), ids=NETS)
@pytest.mark.parametrize("implementation", [resnet.FASTOPS, resnet.PLAIN], ids=["ours", "plain"])
def test_shard_map(native, config, implementation):
    """The same results with named axes; the type of replicated results says so."""
    found, program = over_devices(
        AxisType.Auto, config, lambda mesh: by_shard_map(mesh, config, implementation)
    )
    assert set(collectives(program)) == {"all-reduce"}
    assert_close_in_norm(jax.tree.map(np.asarray, found), on_one_device(config), 2e-5)


# ---- state and errors ----------------------------------------------------------------------------


@pytest.mark.jax
def test_checkpoint(tmp_path):
    """The state is named arrays, which can be restored without the network."""
    state = start(resnet.SMALL)
    named, _ = jax.tree.flatten_with_path(state)
    assert all(isinstance(leaf, jax.Array) for _, leaf in named)
    np.savez(tmp_path / "state.npz", **{jax.tree_util.keystr(p): leaf for p, leaf in named})
    with np.load(tmp_path / "state.npz") as saved:
        restored = jax.tree.map_with_path(
            lambda path, _: saved[jax.tree_util.keystr(path)], resnet.shapes(resnet.SMALL)
        )
    images, _ = batch(resnet.SMALL, 4, 8)
    before, after = (
        resnet.apply(*state, images, resnet.SMALL, train=False)[0] for state in (state, restored)
    )
    np.testing.assert_array_equal(before, after)


def test_config_is_static():
    """Configs with equal values are equal and have one hash, whatever types were given."""
    config = dataclasses.replace(resnet.SMALL, stages=[1, np.int64(1), 1], dtype=jnp.float32)
    assert config == resnet.SMALL and hash(config) == hash(resnet.SMALL)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(stages=()), ValueError, "stages is empty"),
        (dict(stages=2), TypeError, "stages is 2; it must be a sequence of integers"),
        (dict(stages=(2, 0)), ValueError, r"stages\[1\] is 0; it must be 1 or more"),
        (dict(width=8.0), TypeError, "width is 8.0; it must be an integer"),
        (dict(remat=-1), ValueError, "remat is -1; it must be 0 or more"),
        (dict(remat=0.5), TypeError, "remat is 0.5; it must be an integer"),
        (dict(block="wide"), ValueError, "block is 'wide'; it must be one of 'basic', 'bott"),
        (dict(stem="none"), ValueError, "stem is 'none'; it must be one of 'imagenet', 'small'"),
        (dict(dtype="int32"), ValueError, "dtype is 'int32'; it must be one of 'float32', "),
        (dict(dtype=None), TypeError, "dtype is None; it must be a dtype"),
        (dict(momentum=1.5), ValueError, "momentum is 1.5; it must be from 0 to 1"),
        (dict(momentum="0.9"), TypeError, "momentum is of type str; it must be a Python or NumPy"),
        (dict(eps=math.nan), ValueError, "eps is nan; it must be a number"),
    ],
)
def test_config_errors(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(resnet.SMALL, **changes)


@pytest.mark.parametrize(
    "function", [resnet.shapes, lambda config: resnet.init(jax.random.key(0), config)]
)
def test_config_of_another_type(function):
    with pytest.raises(TypeError, match="resnet: config is of type str; it must be a Config"):
        function("resnet50")


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (dict(images=np.zeros((2, 8, 8, 1), np.uint8)), TypeError, "images is of uint8; it must"),
        (dict(images="cat.png"), TypeError, "images is of str; it must be an array"),
        (dict(images=np.zeros((8, 8, 1), np.float32)), ValueError, r"images has shape \(8, 8, 1\)"),
        (
            dict(images=np.zeros((2, 8, 8, 3), np.float32)),
            ValueError,
            r"shape \(2, 8, 8, 3\); it must be \(n, height, width, 1\)",
        ),
        (dict(batch_norm=fo.batch_norm), TypeError, "batch_norm is of type function; it must be a"),
        (dict(config="resnet50"), TypeError, "config is of type str; it must be a Config"),
        (
            dict(config=dataclasses.replace(resnet.SMALL, width=32)),
            ValueError,
            r"params\['bn1'\]\['bias'\] has shape \(16,\); by config it must be \(32,\)",
        ),
        (
            dict(config=dataclasses.replace(resnet.SMALL, stages=(1, 1, 1, 1))),
            ValueError,
            r"params\['fc'\]\['kernel'\] has shape \(64, 10\); by config it must be \(128, 10\)",
        ),
        (
            dict(config=dataclasses.replace(resnet.SMALL, stages=(1, 1, 2))),
            ValueError,
            r"params has no \['layer3'\]\[1\]\['bn1'\]\['bias'\], which config has",
        ),
        (dict(statistics={}), ValueError, r"statistics has no \['bn1'\]\['mean'\]"),
    ],
)
def test_errors(wrong, error, message):
    params, statistics = resnet.shapes(resnet.SMALL)
    given = dict(params=params, statistics=statistics, config=resnet.SMALL)
    given |= dict(images=np.zeros((2, 8, 8, 1), np.float32)) | wrong
    with pytest.raises(error, match=message):
        resnet.apply(**given, train=True)
