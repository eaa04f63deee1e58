"""`NAME`: transformations, bits, shapes, errors."""

import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, checks
from harness.numerics import normal
from harness.properties import shapes

import jax_fastops as fo

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]

NAME = Case(
    name="NAME",
    fn=lambda x: fo.NAME(x),
    reference=lambda x: x + x,
    make_args=lambda rng, dtype: (normal(rng, (3, 5), dtype),),
    make_sharded_args=lambda rng, dtype: (normal(rng, (8, 16), dtype),),
    linear=(0,),
    exact=True,
    shardings=(Sharding("rows", (0,), (0,)),),
    symbolic=("a, b",),
    sizes=({"a": 7, "b": 129},),
    kernels=("NAME", "NAME"),
    maps=((0,),),
    kept=lambda x: [],
    shapes=shapes().map(lambda shape: (shape,)),
)


@checks(NAME)
def test_harness(check):
    check()


def test_errors():
    with pytest.raises(TypeError, match="x has dtype"):
        fo.NAME(jnp.zeros(3, np.int32))
