"""`autofuse`: keys of dropout that are used twice, metadata for XLA, and what else users do."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops.autofuse import _pattern

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("native")]
X = jax.random.normal(jax.random.key(0), (4, 40)) + 3
S = jnp.linspace(0.5, 1.5, 40)


def names(f, *args):
    return [r.pattern for r in fo.autofuse.report(f)(*args).replaced]


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def norm(x):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * S + 1


# Keys --------------------------------------------------------------------------------------------


def kept(x, key):
    return jax.random.bernoulli(key, 0.75, x.shape)


def drop(x, key):
    return jnp.where(kept(x, key), x / 0.75, 0)


def drop_by_rule(x, key):
    f = jax.custom_vjp(drop)
    f.defvjp(lambda x, k: (drop(x, k), k), lambda k, ct: (drop(ct, k), None))
    return f(x, key)


def fold(key):
    return jax.random.fold_in(key, 3)


def copy(key):
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key)
    return jax.random.wrap_key_data(key)


def layers(x, key, layer=drop):
    keys = jax.random.split(key)
    return lax.scan(lambda c, k: (layer(c, k),) * 2, x, keys)


def remat(x, key, layer=drop):
    return layers(x, key, jax.checkpoint(layer))[0]


def in_branch(x, key):
    return lax.cond(x[0, 0] > -99, drop, lambda x, k: x, x, key)


def all_and_one(x, key, one):
    keys = jax.random.split(key, 4)
    return jax.vmap(drop)(x, keys)[1], one(x[1], keys[1])


def step_and_one(x, key):
    keys = jax.random.split(key, 4)
    return lax.scan(lambda c, a: (c, drop(*a)), 0, (x, keys))[1][1], kept(x[1], keys[1])


# Two arrays that are 0 where one mask says so.
ONE_MASK = {
    "mask": lambda x, k: (drop(x, k), kept(x, k)),
    "other factor": lambda x, k: (drop(x, k), jnp.where(kept(x, k), x / 0.5, 0)),
    "fold": lambda x, k: (drop(x, fold(k)), kept(x, fold(k))),
    "copy": lambda x, k: (drop(x, k), kept(x, copy(k))),
    "barrier": lambda x, k: (drop(x, k), kept(x, lax.optimization_barrier(k))),
    "flat": lambda x, k: (drop(x, k), kept(x.ravel(), k).reshape(x.shape)),
    "two shapes": lambda x, k: (drop(x, k), drop(x.ravel(), k).reshape(x.shape)),
    "all and one": functools.partial(all_and_one, one=kept),
    "step and one": step_and_one,
    "softmax": lambda x, k: (drop(softmax(x), k), kept(x, k)),
    "keys": lambda x, k: [jax.vmap(f)(x, jax.random.split(k, 4)) for f in (drop, kept)],
    "branch": lambda x, k: (in_branch(x, k), kept(x, k)),
    "two bodies": lambda x, k: [jax.checkpoint(f)(x, k) for f in (drop, kept)],
    "scans": lambda x, k: (layers(x, k)[1], layers(x, k, lambda x, k: x * kept(x, k))[1]),
    "remat": lambda x, k: (remat(x, k), jax.grad(lambda x: remat(x, k).sum())(x)),
    "rule": lambda x, k: (drop(x, k), jax.grad(lambda x: drop_by_rule(x, k).sum())(x)),
}


@pytest.mark.parametrize("kind", ["key", "PRNGKey"])
def test_all_uses_of_a_key_see_one_mask(kind):
    key = getattr(jax.random, kind)(7)
    fused = [fo.autofuse(f, dropout=True) for f in ONE_MASK.values()]
    results = jax.jit(lambda x, k: [f(x, k) for f in fused])(X, key)
    for name, (a, b) in zip(ONE_MASK, results, strict=True):
        np.testing.assert_array_equal(a != 0, b != 0, name)
    loss = jax.grad(lambda x: fo.autofuse(drop_by_rule, dropout=True)(x, key).sum())
    forward = fo.autofuse(drop_by_rule, dropout=True)(X, key)
    np.testing.assert_array_equal(forward != 0, loss(X) != 0)


# Programs in which all draws are replaced, or keys differ.
TAKEN = {
    "two arrays": (lambda x, k: (drop(x, k), drop(x * 2, k)), 2),
    "two sizes": (lambda x, k: (drop(x, k), kept(x[:2], k)), 1),
    "all and one": (functools.partial(all_and_one, one=drop), 2),
    "two folds": (lambda x, k: (drop(x, fold(k)), kept(x, k)), 1),
    "layers": (lambda x, k: layers(x, k)[0], 1),
    "remat": (remat, 1),
    "branches": (lambda x, k: lax.cond(x[0, 0] > 0, drop, lambda x, k: drop(-x, k), x, k), 2),
}


@pytest.mark.parametrize("kind", ["key", "PRNGKey"])
def test_keys_whose_masks_are_all_replaced(kind):
    key = getattr(jax.random, kind)(7)
    for name, (f, count) in TAKEN.items():
        assert names(fo.autofuse(f, dropout=True), X, key) == ["dropout"] * count, name


def test_an_equal_program_with_equal_keys():
    f = fo.autofuse(lambda x, a, b: (drop(x, a), kept(x, b)), dropout=True)
    keys = jax.random.split(jax.random.key(7))
    pairs = jax.jit(lambda x, a, b: [f(x, a, b), f(x, a, a), f(x, b, a)])(X, *keys)
    taken = [
        np.array_equal(y != 0, fo.dropout_mask(k, X.shape, 0.25))
        for (y, _), k in zip(pairs, keys[jnp.array([0, 0, 1])], strict=True)
    ]
    assert taken == [True, False, True]
    np.testing.assert_array_equal(pairs[1][0] != 0, pairs[1][1])


# Contexts ----------------------------------------------------------------------------------------


def tagged(f, tag, **more):
    def g(x):
        with set_xla_metadata(tag=tag, **more):
            return f(x)

    return g


def test_metadata_for_xla_stay():
    def f(x):
        x = lax.scan(lambda c, _: (tagged(jax.jit(softmax), "a")(c), None), x, length=2)[0]
        x = tagged(jax.jit(norm), "b", inlineable="false")(x)
        return softmax(x)

    step = jax.grad(lambda x: jnp.sin(fo.autofuse(f)(x)).sum())
    lines = jax.jit(step).lower(X).as_text().splitlines()
    calls = [x for x in lines if "@jax_fastops" in x]
    of_norm = [x for x in calls if "@jax_fastops.norm" in x]
    of_softmax = [x for x in calls if "@jax_fastops.softmax" in x]
    assert len(of_norm) == 2 and all('tag = "b"' in x for x in of_norm)
    assert sorted('tag = "a"' in x for x in of_softmax) == [False, False, True, True]
    assert sum(" call " in x and 'inlineable = "false"' in x for x in lines) >= 2
    np.testing.assert_allclose(jax.jit(fo.autofuse(f))(X), f(X), rtol=1e-5)


def test_patterns_are_traced_without_metadata():
    _pattern.compiled.cache_clear()
    _pattern._traced.cache_clear()
    with set_xla_metadata(inlineable="false"):
        assert names(norm, X * 3) == ["layer_norm"]


def on_host(x):
    if "out_memory_spaces" in inspect.signature(compute_on).parameters:
        pytest.skip("its equation has a program, as jax >= 0.12 has it")
    with compute_on("device_host"):
        return softmax(x)


def part_of_norm(x):
    mean = tagged(lambda x: x.mean(-1, keepdims=True), "a")(x)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * S + 1


@pytest.mark.parametrize("f, same", [(on_host, softmax), (part_of_norm, norm)])
def test_what_differs_in_context_stays(f, same):
    for _ in range(2):
        assert jax.jit(fo.autofuse(same))(X).shape == X.shape  # the program that is equal
        assert "@jax_fastops" not in jax.jit(fo.autofuse(f)).lower(X).as_text()
    report = fo.autofuse.report(f)(X)
    assert not report.replaced and "compute_on" in report.missed[0].reason


# Uses --------------------------------------------------------------------------------------------


def stopped(x):
    stop = lax.stop_gradient
    e = jnp.exp(x - x.max(-1, keepdims=True))
    mean = x.mean(-1, keepdims=True)
    scale = lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return e / stop(e.sum(-1, keepdims=True)), (x - mean) * stop(scale), stop(norm(x)) + softmax(x)


def named(x):
    mean = checkpoint_name(x.mean(-1, keepdims=True), "mean")
    scale = lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return (x - mean) * checkpoint_name(scale, "scale") * S + 1


def saved(x):
    policy = jax.checkpoint_policies.save_only_these_names("mean", "h")
    return jax.checkpoint(lambda x: norm(checkpoint_name(named(x), "h")), policy=policy)(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def own(g, x, y):
    return g(softmax(x)) * y


own.defvjp(
    lambda g, x, y: (own(g, x.value, y.value), (y.value, x.perturbed, y.perturbed)),
    lambda g, kept, ct: (ct * kept[0] if kept[1] else None, ct * 3 if kept[2] else None),
    symbolic_zeros=True,
)


def carries(x):
    def body(carry, row):
        i, total = carry
        return (i + 1, total * 0.5 + softmax(row).sum()), norm(row) * i

    return lax.scan(body, (0, 0.0), x)


def partly_manual(x):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds, devices=jax.devices()[:4])
    f = jax.shard_map(
        lambda x: norm(x) + lax.psum(softmax(x), "a"),
        mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"},
    )  # fmt: skip
    return f(x)


def many(x):
    y = softmax(x)
    return y, x, {"y": y, "none": None}, softmax(x).T, norm(y) * 2, y


USES = {
    "stop_gradient": stopped,
    "saved names": saved,
    "symbolic zeros": lambda x: norm(own(jnp.sin, x, 2.0)),
    "carries": carries,
    "partly manual": partly_manual,
    "aliases": many,
}


@pytest.mark.parametrize("name", USES)
def test_uses(name):
    f = USES[name]
    if name == "partly manual" and len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")

    def both(f, x):
        def loss(x):
            return sum(jnp.sin(y * 1.0).sum() for y in jax.tree.leaves(f(x)))

        return f(x), jax.grad(loss)(x)

    assert "@jax_fastops" in jax.jit(fo.autofuse(f)).lower(X).as_text()
    got, want = (jax.jit(functools.partial(both, g))(X) for g in (fo.autofuse(f), f))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_parts_in_auto_axes():
    """A call runs in the mesh of its operations, as a gather with an output sharding does."""
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    kinds, auto_axes = (jax.sharding.AxisType.Explicit,), jax.sharding.auto_axes
    mesh = jax.make_mesh((4,), ("a",), axis_types=kinds, devices=jax.devices()[:4])

    def looped(x):
        return lax.scan(lambda c, _: (norm(c), None), x, length=2)[0]

    def f(x, ids):
        rows = x.at[ids].get(out_sharding=P("a"))
        return softmax(rows) + auto_axes(looped, out_sharding=P("a"))(x)

    def step(f):
        return jax.jit(jax.value_and_grad(lambda x, ids: jnp.sin(f(x, ids)).sum()))

    with jax.set_mesh(mesh):
        x, ids = jax.device_put(X, P()), jax.device_put(jnp.arange(4), P("a"))
        assert sorted(names(f, x, ids)) == ["layer_norm", "softmax", "take"]
        assert jax.typeof(fo.autofuse(f)(x, ids)) == jax.typeof(f(x, ids))
        for a, b in zip(step(fo.autofuse(f))(x, ids), step(f)(x, ids), strict=True):
            assert jax.typeof(a) == jax.typeof(b)
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
