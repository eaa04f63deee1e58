"""`autofuse` of gathers of rows, and of scatters that add rows to zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.numerics import assert_bitwise_equal
from harness.programs import targets_of
from test_autofuse import left, names

import jax_fastops as fo

pytestmark = pytest.mark.usefixtures("native")

RNG = np.random.default_rng(0)
ROWS = 20
TABLE = jnp.asarray(RNG.integers(-4, 5, (ROWS, 3)), jnp.float32)
IDS = jnp.asarray(RNG.integers(-ROWS, ROWS, (4, 7)))
OUTSIDE = IDS.at[0, :4].set(jnp.array([-1, ROWS, ROWS + 1, -ROWS - 1]))
DATA = jnp.asarray(RNG.integers(-4, 5, (28, 3)), jnp.float32)

TAKES = {
    "index": lambda table, ids: table[ids],
    "take": lambda table, ids: jnp.take(table, ids, axis=0),
    "promise": lambda table, ids: table.at[ids].get(mode="promise_in_bounds"),
    "unsigned": lambda table, ids: table[ids.astype(jnp.uint32)],
    "clip": lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"),
    "wrap": lambda table, ids: jnp.take(table, ids, axis=0, mode="wrap"),
    "drop": lambda table, ids: table.at[ids].get(mode="drop"),
    "one dimension": lambda table, ids: jnp.take(table[:, 0], ids),
    "three dimensions": lambda table, ids: jnp.take(jnp.stack([table, table], 2), ids, axis=0),
    "vmap": lambda table, ids: jax.vmap(lambda i: jnp.take(table, i, axis=0))(ids),
    "narrow": lambda table, ids: jnp.take(table, ids.astype(jnp.int8), axis=0),
}
SUMS = {
    "segment_sum": lambda data, ids: jax.ops.segment_sum(data, ids.reshape(-1), ROWS),
    "add": lambda data, ids: jnp.zeros((ROWS, 3)).at[ids.reshape(-1)].add(data),
    "two dimensions": lambda data, ids: jnp.zeros((ROWS, 3)).at[ids].add(data.reshape(4, 7, 3)),
    "bincount": lambda data, ids: jnp.zeros(ROWS).at[ids].add(data[:, 0].reshape(4, 7)),
    "sorted": lambda data, ids: jax.ops.segment_sum(
        data, jnp.sort(ids.reshape(-1)), ROWS, indices_are_sorted=True
    ),
}


def gradient(f, ids):
    return jax.grad(lambda x: jnp.sum(jnp.nan_to_num(f(x, ids)) ** 2))


@pytest.mark.parametrize("form", TAKES)
def test_takes(form):
    f, ids = TAKES[form], OUTSIDE
    assert names(f, TABLE, ids) == ["take"]
    assert_bitwise_equal(jax.jit(fo.autofuse(f))(TABLE, ids), jax.jit(f)(TABLE, ids))
    mine = gradient(fo.autofuse(f), ids)
    assert targets_of(mine, TABLE) == ["segment_sum"]
    assert_bitwise_equal(jax.jit(mine)(TABLE), jax.jit(gradient(f, ids))(TABLE))


@pytest.mark.parametrize("form", SUMS)
def test_sums(form):
    f = SUMS[form]
    assert names(f, DATA, OUTSIDE) == ["segment_sum"]
    assert_bitwise_equal(jax.jit(fo.autofuse(f))(DATA, OUTSIDE), jax.jit(f)(DATA, OUTSIDE))
    mine, plain = gradient(fo.autofuse(f), OUTSIDE), gradient(f, OUTSIDE)
    assert_bitwise_equal(jax.jit(mine)(DATA), jax.jit(plain)(DATA))


FLAT = IDS.reshape(-1)
NEAR_MISSES = {
    "other numbers than 0": lambda x, ids: jnp.ones((ROWS, 3)).at[FLAT].add(x),
    "clipped": lambda x, ids: jnp.zeros((ROWS, 3)).at[FLAT].add(x, mode="clip"),
    "a number takes the place": lambda x, ids: x.at[ids].get(mode="fill", fill_value=0),
    "no index occurs twice": lambda x, ids: x.at[jnp.arange(5)].get(unique_indices=True),
    "": lambda x, ids: x[ids % 3, ids % 3],
    "set": lambda x, ids: jnp.zeros((ROWS, 3)).at[FLAT].set(x),
    "max": lambda x, ids: jnp.zeros((ROWS, 3)).at[FLAT].max(x),
    "multiply": lambda x, ids: jnp.ones((ROWS, 3)).at[FLAT].multiply(x),
    "columns": lambda x, ids: jnp.take(x, ids % 3, axis=1),
    "added columns": lambda x, ids: jnp.zeros((3, ROWS)).at[:, FLAT].add(x.T),
    "one number": lambda x, ids: jnp.zeros((ROWS, 3)).at[FLAT, 1].add(x[:, 0]),
    "windows": lambda x, ids: jax.vmap(lambda i: jax.lax.dynamic_slice(x, (i, 0), (2, 3)))(FLAT),
    "batches": lambda x, ids: jax.vmap(lambda t, i: t[i])(jnp.stack([x] * 4), ids),
    "integers": lambda x, ids: x.astype(int)[ids],
}


@pytest.mark.parametrize("form", NEAR_MISSES)
def test_near_misses(form):
    f = NEAR_MISSES[form]
    assert names(f, DATA, IDS) == []
    assert_bitwise_equal(fo.autofuse(f)(DATA, IDS), f(DATA, IDS))
    reasons = " ".join(reason for _, reason in left(f, DATA, IDS))
    assert form in reasons or not reasons
