"""`autofuse` of group norm and instance norm, by libraries and by hand, and of near misses."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autofuse_programs import IMAGES, group_norm, group_norm_first
from test_autofuse import left, names
from test_autofuse_forms import SCALE, SHIFT, check
from test_autofuse_regions import found, verdicts_on_cuda

import jax_fastops as fo
from jax_fastops.autofuse import _cost

pytestmark = pytest.mark.usefixtures("native")
FIRST = IMAGES.swapaxes(1, 3)


# Libraries ----------------------------------------------------------------------------------------


def filled(tree):
    """The tree with numbers in its arrays."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda v: jnp.asarray(rng.standard_normal(v.shape), v.dtype), tree)


def linen():
    nn = pytest.importorskip("flax.linen")
    layers = [
        nn.GroupNorm(4),
        nn.GroupNorm(None, group_size=1, use_fast_variance=False),
        nn.GroupNorm(1, use_bias=False, use_scale=False),
        nn.InstanceNorm(use_bias=False),
        nn.GroupNorm(2, dtype=jnp.bfloat16),
    ]
    of = filled([jax.eval_shape(layer.init, jax.random.key(0), IMAGES) for layer in layers])

    def f(x, of):
        pairs = zip(layers, of, strict=True)
        return [nn.silu(m.apply(v, x.astype(m.dtype or x.dtype))) for m, v in pairs]

    return f, of


def nnx():
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    norms = [nnx.GroupNorm(8, num_groups=2, rngs=rngs), nnx.InstanceNorm(8, rngs=rngs)]
    graph, state = nnx.split(norms)
    return lambda x, of: [jax.nn.relu(m(x)) for m in nnx.merge(graph, of)], filled(state)


def equinox():
    eqx = pytest.importorskip("equinox")
    norms = eqx.nn.GroupNorm(2, 8), eqx.nn.GroupNorm(4, channelwise_affine=False)
    of = filled(eqx.filter(norms, eqx.is_array))

    def f(x, of):
        return [jax.nn.gelu(jax.vmap(m)(x.swapaxes(1, 3))) for m in eqx.combine(of, norms)]

    return f, of


def haiku():
    hk = pytest.importorskip("haiku")

    def norms(x):
        first, offset = x.swapaxes(1, 3), dict(create_offset=True)
        return [
            hk.GroupNorm(4)(x),
            hk.GroupNorm(4, data_format="channels_first")(first),
            hk.InstanceNorm(create_scale=True, **offset)(x),
            hk.InstanceNorm(create_scale=False, data_format="channels_first", **offset)(first),
        ]

    model = hk.without_apply_rng(hk.transform(norms))
    of = filled(jax.eval_shape(model.init, jax.random.key(0), IMAGES))
    return lambda x, of: model.apply(of, x), of


@pytest.mark.jax
@pytest.mark.parametrize(
    "library, patterns",
    [
        (linen, ["group_norm + silu"] * 5),
        (nnx, ["group_norm + relu"] * 2),
        (equinox, ["group_norm + gelu"] * 2),
        (haiku, ["group_norm"] * 4),
    ],
)
def test_layers_of_libraries(library, patterns):
    f, of = library()
    leaves, tree = jax.tree.flatten(of)
    check(lambda x, *leaves: f(x, tree.unflatten(leaves)), (IMAGES, *leaves), patterns, 0.02)


def test_a_network_of_diffusion():
    """All 21 norms, each with the activation after it."""
    pytest.importorskip("flax")
    sys.path.append(str(pathlib.Path(__file__).parents[1]))
    packages = pytest.importorskip("benchmarks.others.packages")
    program = packages.flax_unet(True, jnp.bfloat16)
    report = fo.autofuse.report(program.loss)(program.params, *program.batch)
    norms = [r.pattern for r in report.replaced if "group_norm" in r.pattern]
    assert len(norms) == 21 and sum("silu" in norm for norm in norms) == 17


# By hand ------------------------------------------------------------------------------------------


def by_parts(x, axes=(1, 2, 4), mean_axes=None, ddof=0, dtype=jnp.float32):
    """A norm of channels in groups of two, whose statistics may be over other axes."""
    h = x.reshape(*x.shape[:-1], -1, 2).astype(dtype)
    mean, var = h.mean(mean_axes or axes, keepdims=True), h.var(axes, keepdims=True, ddof=ddof)
    return ((h - mean) * jax.lax.rsqrt(var + 1e-3)).reshape(x.shape) * SCALE + SHIFT


def eps_outside(x):
    h = x.reshape(2, 25, 2, 4)
    mean, std = h.mean((1, 3), keepdims=True), h.std((1, 3), keepdims=True)
    return ((h - mean) / (std + 1e-3)).reshape(x.shape) * SCALE + SHIFT


def of_groups(x):
    """Scale and bias have an element for each group."""
    h = x.reshape(2, 25, 4, 2)
    h = (h - h.mean((1, 3), keepdims=True)) * jax.lax.rsqrt(h.var((1, 3), keepdims=True) + 1e-3)
    return h * SCALE[:4, None] + SHIFT[:4, None]


def in_the_middle(x):
    h, axes = x.reshape(2, 5, 4, 2, 5), (1, 3, 4)
    h = (h - h.mean(axes, keepdims=True)) * jax.lax.rsqrt(h.var(axes, keepdims=True) + 1e-3)
    return h.reshape(x.shape) * SCALE[:, None] + SHIFT[:, None]


NORM = ["group_norm"]
FORMS = {
    "under vmap": (lambda x: jax.vmap(group_norm, (0, None, None))(x[None], SCALE, SHIFT), NORM),
    "one sample": (lambda x: group_norm(x[:1], SCALE, SHIFT), NORM),
    "no positions": (lambda x: group_norm(x[:, 0, 0], SCALE, SHIFT), NORM),
    "over samples": (lambda x: by_parts(x, (0, 1, 2, 4)), NORM),
    "over rows": (lambda x: by_parts(x, (2, 4)), NORM),
    "over positions": (lambda x: by_parts(x, (1, 2)), NORM),
    "over all": (lambda x: by_parts(x, (1, 2, 3, 4)), NORM),
    "unequal groups": (
        lambda x: [group_norm(x[..., at], SCALE[at], SHIFT[at], 1) for at in (slice(3), slice(5))],
        NORM * 2,
    ),
    "scale of groups": (of_groups, NORM),
    "channels between positions": (lambda x: in_the_middle(x.swapaxes(2, 3)), NORM),
    "deviation": (lambda x: by_parts(x, ddof=1), []),
    "another mean": (lambda x: by_parts(x, mean_axes=(1, 4)), []),
    "eps outside": (eps_outside, []),
    "a norm of two values": (
        lambda x: (lambda y: (jnp.sin(y), jax.nn.silu(y)))(by_parts(x)),
        [*NORM, "silu"],
    ),
    "a sum that is used": (lambda x: (by_parts(x + x[::-1]), x + x[::-1]), ["add + group_norm"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    f, patterns = FORMS[name]
    check(f, (IMAGES,), patterns, 1e-4)


def test_sizes_that_are_alike():
    """A dimension is not taken for another one of its size."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4, 4, 4)), jnp.float32)
    scale = x[0, 0, 0]

    def f(x):
        for axes in ((1, 2), (1, 3), (0, 3), (2, 3), (1, 2, 3)):
            h = (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(x.var(axes, keepdims=True) + 1e-3)
            yield h * scale, h + scale[:, None], h * scale[:, None, None], h.swapaxes(1, 2) * scale

    check(lambda x: [jnp.sin(y) for ys in f(x) for y in ys], (x,), names(lambda x: [*f(x)], x))


# The report and the model -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f, found, reason",
    [
        (lambda x: by_parts(x, ddof=1), "group_norm", "the formula differs from here on"),
        (
            lambda x: (lambda y: jax.nn.silu(y) + y)(by_parts(x)),
            "group_norm + silu",
            "the value is used elsewhere",
        ),
        (
            lambda x: by_parts(x, dtype=jnp.bfloat16),
            "group_norm",
            "bfloat16 is narrower than the result's float32",
        ),
    ],
)
def test_what_stays(f, found, reason):
    assert (found, reason) in left(f, IMAGES)


def test_what_takes_no_kernel():
    """One row for a norm with its activation, though the activation has a kernel."""
    with fo.use_implementation("xla"):
        report = fo.autofuse.report(lambda x: jax.nn.relu(by_parts(x)))(IMAGES)
    rows = [m for m in report.missed if "norm" in m.pattern]
    assert [(m.pattern, m.reason) for m in rows] == [
        ("group_norm + relu", "the implementation is 'xla'")
    ]


def test_regions(monkeypatch):
    """A kernel saves passes over large groups; the model does not speak against it."""
    image = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 1024, 1024, 128), (128,), (128,))]
    norm = functools.partial(group_norm, groups=32)
    (region,) = found(lambda *a: jax.nn.silu(norm(*a)), *image)
    passes = [_cost.traffic(region, True, step) // 2**29 for step in (False, True)]
    assert passes == [3, 8]  # statistics are a pass of their own
    assert all(_cost.more_bytes(region, step) is None for step in (False, True))
    assert verdicts_on_cuda(monkeypatch, group_norm_first, FIRST, SCALE, SHIFT) == {}
