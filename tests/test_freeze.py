"""``freeze``: few arrays, the same results, other parameters without a compilation."""

import functools
import re
import time

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import make_mesh
from harness.programs import equations
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops.models import bert

SIZE = 256  # a kernel of float32 takes 256 KiB

# On a GPU, XLA chooses products for each program, also of operands with 10 bits.
OF_TWO_PROGRAMS = dict(rtol=2e-3, atol=1e-3) if jax.default_backend() == "gpu" else {}


def assert_alike(found, expected, **bounds):
    """Compares the results of two programs. Without bounds they are equal on a CPU."""
    bounds = dict(rtol=0) | bounds | OF_TWO_PROGRAMS
    np.testing.assert_allclose(found, expected, **bounds)


def network(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x * params["scale"]


def new(seed: int = 0, layers: int = 3) -> dict:
    keys = jax.random.split(jax.random.key(seed), layers)
    return {
        "layers": [
            {"kernel": jax.random.normal(key, (SIZE, SIZE)) / SIZE**0.5, "bias": key_bias}
            for key, key_bias in zip(keys, jax.random.normal(keys[0], (layers, SIZE)), strict=True)
        ],
        "scale": 2.0,
    }


X = jnp.linspace(-1, 1, 4 * SIZE).reshape(4, SIZE)


# All leaves are stacked.
freeze = functools.partial(fo.freeze, max_bytes=2**40)


def test_equal_leaves_are_stacked():
    params = new()
    frozen = freeze(network, params)
    assert sorted(a.shape for a in frozen.arrays) == [(), (3, SIZE), (3, SIZE, SIZE)]
    assert jax.tree.leaves(frozen) == list(frozen.arrays)
    jax.tree.map(np.testing.assert_array_equal, frozen.params, params)
    assert_alike(frozen(X), jax.jit(network)(params, X))
    np.testing.assert_array_equal(frozen(x=X), frozen(X))


def test_programs_copy_no_parameter_of_a_product():
    frozen = fo.freeze(network, new())
    assert len(frozen.arrays) == 5
    text = frozen.apply.lower(frozen.arrays, X).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    assert f"[{SIZE},{SIZE}]" in entry
    assert not re.findall(rf" = \S*\[{SIZE},{SIZE}\]\S* (?!parameter|bitcast)", entry)


def test_other_parameters_compile_nothing():
    traces = []

    def counted(params, x):
        traces.append(1)
        return network(params, x)

    frozen = freeze(counted, new())
    other = frozen.replace(jax.tree.map(np.asarray, new(1)))
    assert jax.tree.structure(other) == jax.tree.structure(frozen)
    outer = jax.jit(lambda frozen, x: frozen(x))
    for call in (lambda f: f(X), lambda f: outer(f, X)):
        call(frozen)
        count = len(traces)
        np.testing.assert_allclose(call(other), network(new(1), X), rtol=1e-4, atol=1e-5)
        assert len(traces) == count
    assert frozen.apply._cache_size() == outer._cache_size() == 1
    # Another function is another structure.
    assert jax.tree.structure(freeze(network, new())) != jax.tree.structure(frozen)


@pytest.mark.parametrize("committed", [False, True])
def test_other_places_compile_nothing(committed):
    def run(params, x):
        return network(params, x) + jax.random.normal(params["key"], (SIZE,))

    def place(params, device):
        return jax.tree.map(lambda a: jax.device_put(a, device), params)

    first, second = (new(seed) | {"key": jax.random.key(seed)} for seed in (0, 1))
    devices = jax.devices()[:2]
    frozen = fo.freeze(run, place(first, devices[0]) if committed else first)
    apart = {name: place(second[name], devices[-1]) for name in ("scale", "key")}
    apart["layers"] = [
        place(layer, devices[i % len(devices)]) for i, layer in enumerate(second["layers"])
    ]
    outer = jax.jit(lambda frozen, x: frozen(x))
    expected = jax.jit(run)(second, X)
    frozen(X), outer(frozen, X)
    for params in (second, place(second, devices[0]), place(second, devices[-1]), apart):
        other = frozen.replace(params)
        for a, b in zip(other.arrays, frozen.arrays, strict=True):
            assert (a.committed, a.sharding) == (b.committed, b.sharding)
            assert a.committed == committed
        np.testing.assert_allclose(other(X), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(outer(other, X), expected, rtol=1e-4, atol=1e-5)
    assert frozen.apply._cache_size() == outer._cache_size() == 1


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_arguments_decide_where_uncommitted_parameters_are():
    frozen = freeze(network, new())
    mesh = make_mesh({"data": 2}, AxisType.Auto)
    for place in (jax.devices()[1], NamedSharding(mesh, P("data"))):
        result = frozen(jax.device_put(X, place))
        assert result.devices() == jax.jit(network)(new(), jax.device_put(X, place)).devices()
        np.testing.assert_allclose(result, network(new(), X), rtol=1e-4, atol=1e-5)


def test_weak_types():
    def scaled(params, x):
        return params["s"] * x + params["t"] + params["n"]

    params = {"s": 2.0, "t": 3.0, "n": 1}
    frozen, x = fo.freeze(scaled, params), jnp.ones(2, jnp.bfloat16)
    assert len(frozen.arrays) == 3
    assert jax.typeof(frozen(x)) == jax.typeof(jax.jit(scaled)(params, x))
    assert frozen(x).dtype == jnp.bfloat16
    outer = jax.jit(lambda frozen, x: frozen(x))
    outer(frozen, x)
    strong = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), params, frozen.params)
    for other in ({"s": 4.0, "t": 3.0, "n": 1}, strong, jax.device_put(strong, jax.devices()[0])):
        other = frozen.replace(other)
        assert all(jax.typeof(a).weak_type for a in other.arrays)
        assert other(x).dtype == outer(other, x).dtype == jnp.bfloat16
    assert frozen.apply._cache_size() == outer._cache_size() == 1
    assert not jax.typeof(fo.freeze(lambda p: p, jnp.float32(1)).replace(2.0)()).weak_type


def test_keywords_of_any_name():
    def run(params, arrays, args, kwargs, self):
        return params * arrays + args + kwargs + self

    frozen = fo.freeze(run, jnp.ones(2))
    assert frozen(arrays=2.0, args=1.0, kwargs=1.0, self=1.0).tolist() == [5.0, 5.0]


def test_closed_over_arrays_are_constants():
    frozen = fo.freeze(network, new())
    closed = jax.make_jaxpr(lambda x: frozen(x))(X)
    assert len(closed.consts) == len(frozen.arrays)
    assert len(jax.make_jaxpr(lambda frozen, x: frozen(x))(frozen, X).consts) == 0


def test_transformations():
    params = new()
    frozen, inputs = freeze(network, params), jnp.stack([X, 2 * X])
    expected = jax.vmap(network, (None, 0))(params, inputs)
    assert_alike(jax.vmap(frozen)(inputs), expected, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda frozen: frozen(X).sum())(frozen)
    expected = jax.grad(lambda params: network(params, X).sum())(params)
    jax.tree.map(
        lambda a, b: assert_alike(a, b, rtol=1e-4, atol=1e-5),
        gradient.params,
        expected,
    )
    made = jax.jit(lambda params: freeze(network, params))(params)  # of traced arrays
    assert_alike(made(X), frozen(X), rtol=1e-6)
    again = jax.jit(lambda frozen, params: frozen.replace(params))(frozen, params)
    assert jax.tree.structure(again) == jax.tree.structure(frozen)


def test_export_and_saved_executables():
    # On a CPU, jaxlib cannot save again what it loaded from a cache, so the program is a new one.
    salt = time.time_ns() % 10**6 / 1e6
    frozen = freeze(lambda params, x: network(params, x) + salt, new())
    exported = jax.export.export(frozen.apply)(frozen.arrays, X)
    exported = jax.export.deserialize(exported.serialize())
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(frozen.apply.lower(frozen.arrays, X).compile()),
        execution_devices=jax.devices()[:1],
    )
    for each in (frozen, frozen.replace(new(1))):
        for run in (exported.call, loaded):
            np.testing.assert_allclose(run(each.arrays, X), each(X), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_parameters(kind):
    mesh = make_mesh({"tensor": 2}, kind)
    columns, rows = (NamedSharding(mesh, spec) for spec in (P(None, "tensor"), P("tensor", None)))

    def place(params):
        for index, layer in enumerate(params["layers"]):
            layer["kernel"] = jax.device_put(layer["kernel"], rows if index % 2 else columns)
            layer["bias"] = jax.device_put(layer["bias"], NamedSharding(mesh, P()))
        return params

    def run(params, x):
        for layer in params["layers"]:
            out = NamedSharding(mesh, P()) if kind == AxisType.Explicit else None
            x = jnp.tanh(jnp.dot(x, layer["kernel"], out_sharding=out) + layer["bias"])
        return x

    with jax.set_mesh(mesh):
        params, x = place(new(layers=4)), jax.device_put(X, NamedSharding(mesh, P()))
        frozen = freeze(run, params)
        shardings = {a.sharding.spec: a.shape for a in frozen.arrays if a.ndim == 3}
        assert shardings == {
            P(None, None, "tensor"): (2, SIZE, SIZE),
            P(None, "tensor", None): (2, SIZE, SIZE),
        }
        np.testing.assert_allclose(frozen(x), jax.jit(run)(params, x), rtol=1e-4, atol=1e-5)
        other = frozen.replace(new(1, layers=4))
        assert [a.sharding for a in other.arrays] == [a.sharding for a in frozen.arrays]
        np.testing.assert_allclose(
            other(x), jax.jit(run)(place(new(1, layers=4)), x), rtol=1e-4, atol=1e-5
        )


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_traced_parameters_of_explicit_sharding():
    mesh = make_mesh({"t": 2}, AxisType.Explicit)
    specs = {"a": P("t", None), "b": P(None, "t"), "c": P("t", None)}

    def run(params, x):
        return sum(jax.sharding.reshard(leaf * x, P(None, None)) for leaf in params.values())

    with jax.set_mesh(mesh):
        params = {
            name: jax.device_put(jnp.full((4, 4), float(i), "float32"), NamedSharding(mesh, spec))
            for i, (name, spec) in enumerate(specs.items())
        }
        made = jax.jit(lambda params: fo.freeze(run, params))(params)
        assert len(made.arrays) == 2
        np.testing.assert_array_equal(made(2.0), run(params, 2.0))


def test_arrays_of_any_kind():
    params = {"seed": jax.random.key(0), "other": jax.random.key(1), "w": np.ones(2), "n": 1}
    frozen = fo.freeze(lambda p, x: jax.random.normal(p["other"]) + p["w"] * x + p["n"], params)
    assert frozen(1.0).tolist() == (jax.random.normal(jax.random.key(1)) + np.full(2, 2.0)).tolist()
    assert fo.freeze(lambda params, x: x, {})(1.0) == 1


def test_a_model():
    config = bert.SMALL
    params = bert.init(jax.random.key(0), config)

    def forward(params, tokens, mask):
        return bert.apply(params, tokens, config, mask=mask)

    tokens = jnp.array([[5, 6, 7, 0], [8, 9, 0, 0]])
    frozen = fo.freeze(forward, params)
    assert len(frozen.arrays) < len(jax.tree.leaves(params)) / 2
    pairs = zip(
        frozen(tokens, tokens != 0), jax.jit(forward)(params, tokens, tokens != 0), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_branches_read_the_stacks():
    """A slice that is read before a branch is an operand of it, of which XLA makes a copy."""
    params = bert.init(jax.random.key(0), bert.SMALL)
    tokens = jnp.array([[5, 6, 7, 0], [8, 9, 0, 0]])

    def forward(params, tokens, mask):
        return bert.apply(params, tokens, bert.SMALL, mask=mask, token_capacity=6)[0]

    frozen, mask = fo.freeze(forward, params), tokens != 0
    jaxpr = jax.make_jaxpr(frozen.apply)(frozen.arrays, tokens, mask).jaxpr
    (branch,) = (e for e in equations(jaxpr) if e.primitive.name == "cond")
    assert not [x for x in branch.invars if x.aval.ndim == 1]
    assert_alike(frozen(tokens, mask), jax.jit(forward)(params, tokens, mask))


def test_errors():
    frozen = fo.freeze(network, new())
    with pytest.raises(TypeError, match="fn is of type int; it must be a function"):
        fo.freeze(1, {})
    with pytest.raises(TypeError, match=r"max_bytes is 1\.5; it must be an integer"):
        fo.freeze(network, {}, max_bytes=1.5)
    with pytest.raises(ValueError, match=r"params has the structure .*; it must be "):
        frozen.replace(new(layers=2))
    with pytest.raises(ValueError, match=r"array of shape \(1,\); it must be \(\), as before"):
        frozen.replace(new() | {"scale": jnp.ones(1)})
    with pytest.raises(TypeError, match="array of bfloat16; it must be of float32, as before"):
        frozen.replace(new() | {"scale": jnp.bfloat16(1)})
