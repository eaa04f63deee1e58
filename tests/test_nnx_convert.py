"""The layers of a built Flax NNX model exchanged by ``jax_fastops.nnx.convert``."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.numerics import assert_close_in_norm

pytest.importorskip("flax", reason="the layers need Flax")

from flax import nnx

import jax_fastops.nnx as ours

NORMS = ("BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm")


class Net(nnx.Module):
    """A network that has every layer, one of them twice."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        more = {"GroupNorm": dict(num_groups=2)}
        self.norms = nnx.List(
            getattr(nnx, name)(8, epsilon=1e-3, rngs=rngs, **more.get(name, {})) for name in NORMS
        )
        for norm in self.norms:
            norm.scale[...] = jnp.linspace(0.5, 1.5, 8)
            norm.scale.set_metadata(own="kept")
        self.shared = self.norms[3]
        self.attention = nnx.MultiHeadAttention(
            2, 8, decode=False, normalize_qk=True, dropout_rate=0.0, rngs=rngs
        )
        self.half = nnx.LayerNorm(8, param_dtype=jnp.float16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for norm in self.norms:
            x = norm(x) + x
        x = self.dropout(self.attention(self.shared(x)))
        return x + self.half(x)


def trained(model, x):
    """Loss and gradients of a step that updates running statistics, and the state after it."""
    model.dropout.deterministic = True

    @nnx.jit
    def step(model, x):
        return nnx.value_and_grad(lambda model: jnp.sum(jnp.sin(model(x)) ** 2))(model)

    loss, gradients = step(model, x)
    states = {"gradients": gradients, "statistics": nnx.state(model, nnx.BatchStat)}
    return {"loss": loss} | {name: nnx.to_pure_dict(state) for name, state in states.items()}


def test_equal_before_and_after(native):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 8)), jnp.float32)
    model, theirs = Net(), Net()
    params = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    scale, before = model.norms[0].scale, nnx.state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours.convert(model) is model
        ours.convert(model)  # nothing is left to do
    assert [type(norm) for norm in model.norms] == [getattr(ours, name) for name in NORMS]
    assert type(model.dropout) is ours.Dropout and type(model.half) is ours.LayerNorm
    assert type(model.attention.query_ln) is ours.LayerNorm
    assert model.attention.attention_fn is ours.dot_product_attention
    assert model.shared is model.norms[3] and model.norms[0].scale is scale
    after = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert after.keys() == params.keys()
    for path, param in params.items():
        assert after[path].dtype == param.dtype
        assert after[path].get_metadata() == param.get_metadata()
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)
    nnx.update(model, nnx.state(theirs))  # a checkpoint of Flax's model
    assert_close_in_norm(trained(model, x), trained(theirs, x), 3e-5)
    model.eval()
    fused = str(jax.make_jaxpr(lambda x: model(x))(x))
    assert all(f"fastops_{op}" in fused for op in ("layer_norm", "group_norm", "batch_norm"))


def test_dropout_takes_the_same_keys():
    model = nnx.clone(Net().dropout)
    x = jnp.ones((64, 64))
    counts = [model.rngs.count[...]]
    dropped = ours.convert(model)(x)
    counts.append(model.rngs.count[...])
    assert type(model) is ours.Dropout and counts[1] == counts[0] + 1
    assert 0.4 < float((dropped == 0).mean()) < 0.6


class Own(nnx.LayerNorm):
    pass


def attention_fn(*args, **kwargs):
    return nnx.dot_product_attention(*args, **kwargs)


def test_layers_that_stay():
    """One warning says which they are, and why."""
    rngs = nnx.Rngs(0)
    attention = dict(num_heads=2, in_features=8, decode=False, rngs=rngs)
    groups = dict(axis_name="a", axis_index_groups=((0, 1),))
    left = {
        "it is a subclass": Own(8, rngs=rngs),
        "broadcast_dims is (0,)": nnx.Dropout(0.5, broadcast_dims=(0,), rngs=rngs),
        "epsilon is nan": nnx.RMSNorm(8, epsilon=np.nan, rngs=rngs),
        "it has axis_index_groups": nnx.BatchNorm(8, rngs=rngs, **groups),
        "axis is (1, 2)": nnx.BatchNorm(8, axis=(1, 2), rngs=rngs),
        "axis_name is 'a'": nnx.GroupNorm(8, num_groups=2, axis_name="a", rngs=rngs),
        "reduction_axes is (-1, -2)": nnx.LayerNorm(8, reduction_axes=(-1, -2), rngs=rngs),
        "its attention_fn": nnx.MultiHeadAttention(attention_fn=attention_fn, **attention),
        "its attention in training": nnx.MultiHeadAttention(dropout_rate=0.1, **attention),
    }
    kinds = [type(layer) for layer in left.values()]
    model = nnx.Dict(own=nnx.List(left.values()))
    with pytest.warns(UserWarning) as caught:
        ours.convert(model)
    assert [type(layer) for layer in model.own] == kinds
    assert len(caught) == 1 and caught[0].filename == __file__
    lines = str(caught[0].message).splitlines()[1:]
    for index, (line, kind, reason) in enumerate(zip(lines, kinds, left, strict=True)):
        assert line.startswith(f"  own.{index} ({kind.__name__}): {reason}")


def test_nothing_to_convert():
    with pytest.warns(UserWarning, match="no layers to exchange"):
        ours.convert(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="convert: model is of type dict"):
        ours.convert({"norm": nnx.LayerNorm(8, rngs=nnx.Rngs(0))})
