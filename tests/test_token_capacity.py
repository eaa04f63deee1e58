"""``bert.apply(..., token_capacity=n)``: the results of tokens are those with padding."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import make_mesh, strict
from harness.programs import equations
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops.models import bert

BASE = dataclasses.replace(bert.SMALL, hidden_size=32, intermediate_size=64, vocab_size=32)
# Holes, a row that begins with padding, a full one, an empty one: 15 tokens.
MASK = jnp.array(
    [
        [1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
)
TOKENS = jax.random.randint(jax.random.key(0), MASK.shape, 0, BASE.vocab_size)
CONFIGS = {
    "softmax": {},
    "xla": dict(attention="xla"),
    "scan": dict(scan=True),
    "tensor": dict(tensor_parallel=True, activation="gelu"),
    "remat": dict(remat=True),
}


@functools.cache
def parameters(config):
    return bert.init(jax.random.key(1), config)


def run(config, capacity, params=None, tokens=TOKENS, mask=MASK, **options):
    """The hidden states, zero in the padding, and the pooled ones."""
    apply = jax.jit(bert.apply, static_argnames=("config", "ops", "token_capacity"))
    params = parameters(config) if params is None else params
    x, pooled = apply(params, tokens, config, mask=mask, token_capacity=capacity, **options)
    return jnp.where(mask[..., None] != 0, x, 0) if capacity is None else x, pooled


@pytest.mark.parametrize(
    "name, ops", [*((name, "FASTOPS") for name in CONFIGS), ("softmax", "PLAIN")]
)
def test_as_with_padding(name, ops):
    config, ops = dataclasses.replace(BASE, **CONFIGS[name]), getattr(bert, ops)
    (expected, _), (x, pooled) = (run(config, n, ops=ops) for n in (None, 20))
    np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)
    assert not x[MASK == 0].any()
    # The pooler reads the first token, which is padding in two rows.
    np.testing.assert_allclose(pooled[::2], run(config, None, ops=ops)[1][::2], atol=1e-5)


@pytest.mark.parametrize("ops", ["FASTOPS", "PLAIN"])
def test_strict_settings(ops):
    config = dataclasses.replace(BASE, layers=1, dtype="bfloat16")
    with strict():
        x, _ = run(config, 20, ops=getattr(bert, ops))
    expected, _ = run(config, None)
    np.testing.assert_allclose(
        x.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.05, atol=0.1
    )


def test_exactly_full_and_overflow():
    expected, _ = run(BASE, None)
    for capacity in (15, 14, 1, 32, 100):
        x, _ = run(BASE, capacity)
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)


def test_layers_compute_the_capacity():
    def rows(capacity):
        """Of the products with the first kernel of the feed-forward."""
        program = jax.make_jaxpr(
            lambda tokens: bert.apply(
                parameters(BASE), tokens, BASE, mask=MASK, token_capacity=capacity
            )
        )(TOKENS)
        return sorted(
            int(np.prod(equation.outvars[0].aval.shape)) // BASE.intermediate_size
            for equation in equations(program.jaxpr)
            if equation.primitive.name == "dot_general"
            and equation.invars[1].aval.shape == (BASE.hidden_size, BASE.intermediate_size)
        )

    assert rows(20) == [20, 20, 32, 32]
    assert rows(32) == [32, 32]  # which all batches have


def test_gradients():
    weights = jax.random.normal(jax.random.key(2), (*MASK.shape, BASE.hidden_size))

    def loss(params, capacity):
        x, _ = run(BASE, capacity, params)
        return (jnp.where(MASK[..., None] != 0, x, 0) * weights).sum()

    params = parameters(BASE)
    expected = jax.grad(loss)(params, None)
    for capacity in (16, 14):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
            jax.grad(loss)(params, capacity),
            expected,
        )


def test_types_positions_and_wrong_tokens():
    types = jax.random.randint(jax.random.key(3), MASK.shape, 0, 2)
    for positions in (
        jnp.arange(8)[::-1],
        jax.random.permutation(jax.random.key(4), 8)[None] + MASK,
    ):
        more = dict(token_types=types, positions=positions)
        np.testing.assert_allclose(
            run(BASE, 20, **more)[0], run(BASE, None, **more)[0], rtol=1e-4, atol=1e-5
        )
    # A token outside of the vocabulary makes its own sequence NaN.
    tokens = TOKENS.at[1, 3].set(1000)
    x, _ = run(BASE, 20, tokens=tokens)
    assert jnp.isnan(x[1][MASK[1] != 0]).all() and not jnp.isnan(x[jnp.array([0, 2, 3])]).any()


def test_dropout():
    config = dataclasses.replace(BASE, dropout=0.5, attention_dropout=0.5)
    x, other = (run(config, 20, key=jax.random.key(seed))[0] for seed in (5, 6))
    assert jnp.isfinite(x).all() and (x != other).any()


def test_transformations():
    masks = jnp.stack([MASK, 1 - MASK])  # 15 tokens, and 17
    each = [run(BASE, 16, mask=mask)[0] for mask in masks]
    mapped = jax.vmap(lambda mask: run(BASE, 16, mask=mask)[0])(masks)
    np.testing.assert_allclose(mapped, jnp.stack(each), rtol=1e-4, atol=1e-5)
    frozen = fo.freeze(
        lambda params, tokens, mask: run(BASE, 16, params, tokens, mask)[0], parameters(BASE)
    )
    np.testing.assert_allclose(frozen(TOKENS, MASK), each[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_sharded_batches():
    mesh = make_mesh({"data": 2}, AxisType.Auto)
    batch = NamedSharding(mesh, P("data"))
    tokens, mask = (jax.device_put(a, batch) for a in (TOKENS, MASK))
    expected, _ = run(BASE, None)
    np.testing.assert_allclose(run(BASE, 20, tokens=tokens, mask=mask)[0], expected, atol=1e-5)
    # In a shard_map, each device has a list of its own: of 8 and 7 tokens.
    for capacity in (8, 7):
        mapped = jax.shard_map(
            functools.partial(lambda *args, n: run(BASE, n, *args)[0], n=capacity),
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P("data"),
        )
        np.testing.assert_allclose(mapped(parameters(BASE), tokens, mask), expected, atol=1e-5)
    mesh = make_mesh({"data": 2}, AxisType.Explicit)
    tokens, mask = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (TOKENS, MASK))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"the mask is sharded as .*shard_map"):
        run(BASE, 20, tokens=tokens, mask=mask)


def test_symbolic_batch():
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 8"), jnp.int32)
    program = jax.jit(functools.partial(run, BASE, 20, None))
    with pytest.raises(ValueError, match=r"token_capacity is 20, but tokens has the symbolic"):
        jax.export.export(program)(shape, shape)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(token_capacity=0), ValueError, "token_capacity is 0; it must be 1 or more"),
        (dict(token_capacity=1.5), TypeError, "token_capacity is 1.5; it must be an integer"),
        (dict(mask=None), ValueError, "for a batch with a mask and without segment_ids"),
        (dict(segment_ids=MASK), ValueError, "for a batch with a mask and without segment_ids"),
    ],
)
def test_errors(changes, error, message):
    options = dict(mask=MASK, token_capacity=20) | changes
    with pytest.raises(error, match=message):
        bert.apply(parameters(BASE), TOKENS, BASE, **options)
