"""``models.zero``: which dimension is sharded, and in which dtypes parameters and gradients move.

test_train_examples.py trains with it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import make_mesh
from harness.sharding import device_count
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_fastops.models import zero


def mesh_of_four():
    if device_count() < 4:
        pytest.skip("needs four devices")
    return make_mesh(dict(data=2, tensor=2), AxisType.Auto)


def test_shardings():
    shapes = {"kernel": (4, 6), "odd": (3, 8), "none": (3, 5), "scale": (6,)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    specs = {"kernel": P("tensor"), "odd": P(None, "tensor"), "none": P(), "scale": P()}
    found = zero.shardings(arrays, mesh_of_four(), specs=specs)
    assert jax.tree.map(lambda a: a.spec, found) == {
        "kernel": P("tensor", "data"),
        "odd": P(None, "tensor"),
        "none": P(None, None),
        "scale": P("data"),
    }
    with pytest.raises(ValueError, match="axis is 'x'; the mesh has"):
        zero.shardings(arrays, mesh_of_four(), axis="x")


@pytest.mark.jax
def test_gather():
    """Kernels and tables move in bfloat16; the sums of gradients are float32 and sharded."""
    mesh, rng = mesh_of_four(), np.random.default_rng(0)
    params = {"table": rng.standard_normal((8, 3)), "norm": {"scale": rng.standard_normal(4)}}
    params = jax.tree.map(np.float32, params)
    places = zero.shardings(params, mesh)
    params = jax.device_put(params, places)

    def whole(params):
        return zero.gather(params, mesh, "bfloat16")

    def total(params):
        return sum(jnp.sum(a.astype(jnp.float32)) for a in jax.tree.leaves(whole(params)))

    found, grads = jax.jit(lambda params: (whole(params), jax.grad(total)(params)))(params)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(found))
    assert found["table"].dtype == jnp.bfloat16 and found["norm"]["scale"].dtype == jnp.float32
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(b.dtype), b), params, found)
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, np.ones(a.shape, np.float32)), grads)
    assert all(
        a.sharding.is_equivalent_to(place, a.ndim)
        for a, place in zip(jax.tree.leaves(grads), jax.tree.leaves(places), strict=True)
    )
