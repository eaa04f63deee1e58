"""`max_pool` equals `reduce_window`. test_resnet.py has its transformations and special values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fastops as fo

# Shape, window, strides, padding.
CASES = {
    "3x3 at 2, SAME": ((2, 8, 10, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "2x2 at 2, VALID": ((2, 7, 9, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "3x3 at 1, SAME": ((2, 6, 5, 3), (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
    "channels first": ((2, 3, 9, 8), (1, 1, 3, 2), (1, 1, 2, 3), ((0, 0), (0, 0), (1, 2), (2, 0))),
    "one axis": ((11,), (5,), (3,), ((4, 3),)),
    "gaps": ((3, 13), (1, 2), (1, 5), "VALID"),
    "three axes": ((5, 6, 7), (2, 3, 2), (1, 2, 3), "SAME"),
    "more padding than window": ((2, 4), (1, 2), (1, 2), ((0, 0), (3, 5))),
    "strides alone": ((5, 6), (1, 1), (2, 3), "VALID"),
    "padding alone": ((3, 4), (1, 1), (1, 1), ((1, 0), (0, 2))),
    "longer than the axis": ((2, 3), (1, 5), (1, 1), "VALID"),
    "all of an axis": ((4, 200), (1, 200), (1, 1), "VALID"),
    "nothing to do": ((3, 4), (1, 1), None, "VALID"),
}


def plain(x, window, strides, padding):
    strides = (1,) * x.ndim if strides is None else strides
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_equals_reduce_window(case, dtype):
    """Result and gradient, also where elements of a window are equal."""
    shape, *options = CASES[case]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-3, 4, shape), dtype)
    results = []
    for pool in (fo.max_pool, plain):
        y, pullback = jax.vjp(jax.jit(lambda x: pool(x, *options)), x)  # noqa: B023
        dy = jnp.asarray(rng.integers(1, 9, y.shape), dtype) if not results else results[0][1]
        results.append((y, dy, *pullback(dy)))
    for ours, wanted in zip(*results, strict=True):
        assert ours.dtype == wanted.dtype and ours.shape == wanted.shape
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("shape", [(1, 3, 1), (3, 1), (2, 1, 1), (1, 1, 1)])
def test_minima_where_the_scale_is_negative(shape):
    """Of each channel, so that a later product with the scale commutes with the pooling."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 8)), jnp.float32)
    scale = jnp.where(jnp.arange(np.prod(shape)) % 2 == 0, -2.0, 3.0).reshape(shape)
    options = ((1, 1, 3), (1, 1, 2), "SAME")
    pooled = fo.max_pool(x, *options, scale=scale)
    np.testing.assert_array_equal(pooled * scale, plain(x * scale, *options))


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"x": np.zeros((4, 4), int)}, TypeError, "x has dtype int"),
        ({"window": (2,)}, ValueError, r"window is \(2,\); it must have a number from 1 for each"),
        ({"window": (0, 2)}, ValueError, r"window is \(0, 2\)"),
        ({"window": (2.5, 2)}, TypeError, r"window\[0\] is 2.5"),
        ({"window": (16, 16)}, ValueError, "at most 255 elements"),
        ({"strides": (1, -1)}, ValueError, r"strides is \(1, -1\)"),
        ({"padding": "FULL"}, ValueError, "padding is 'FULL'"),
        ({"padding": ((0, 0),)}, ValueError, "padding is"),
        ({"padding": ((0, 0), (-1, 0))}, ValueError, "padding is"),
        ({"scale": np.ones(4, np.float32)}, ValueError, r"scale has shape \(4,\)"),
        ({"scale": 1}, TypeError, "scale has dtype"),
    ],
    ids=str,
)
def test_wrong_arguments(change, error, text):
    given = {"x": np.zeros((4, 4), np.float32), "window": (2, 2)}
    with pytest.raises(error, match=f"max_pool: .*{text}|max_pool: {text}"):
        fo.max_pool(**given | change)


def test_symbolic_batch():
    """One exported program for all sizes of an axis without windows."""
    (n,) = jax.export.symbolic_shape("n")
    pool = functools.partial(fo.max_pool, window=(1, 3), strides=(1, 2), padding="SAME")
    gradient = jax.jit(jax.grad(lambda x: (pool(x) ** 2).sum()))
    exported = jax.export.export(gradient)(jax.ShapeDtypeStruct((n, 7), jnp.float32))
    x = jnp.arange(21.0).reshape(3, 7)
    np.testing.assert_array_equal(exported.call(x), gradient(x))
