"""Arrays of more than 2^31 elements: results beyond the range of 32-bit indices are correct.

A test needs up to 20 GB. So these tests run only on a GPU with at least 40 GB, and are slow tests.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fastops as fo

pytestmark = pytest.mark.slow

ROWS = {4096: 2**19 + 16, 4099: 2**19 + 8}  # elements per row: rows. Rows of 4099 are unaligned
BORDER = 2**31
ROOM = 40e9


@pytest.fixture(autouse=True)
def large_gpu():
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform == "gpu" else None
    if not stats or stats.get("bytes_limit", 0) < ROOM:
        pytest.skip("needs a GPU with room for several arrays of 4 GB")
    with fo.use_implementation("native"):
        yield


@functools.partial(jax.jit, static_argnums=(0, 1))
def pattern(shape, seed):
    """Multiples of 1/4, exact in bfloat16, that differ from row to row."""
    place = sum(
        jax.lax.broadcasted_iota(jnp.int32, shape, d) % 97 * step
        for d, step in enumerate((5, 3)[-len(shape) :])
    )
    return ((place + seed) % 13 - 6).astype(jnp.bfloat16) / 4


def somewhere(rows, columns):
    """Row ranges at the beginning, where flat indices pass 2^31, and at the end."""
    border = BORDER // columns
    assert border + 2 < rows
    return [slice(0, 3), slice(border - 2, border + 2), slice(rows - 3, rows)]


def behind_border(dy):
    """``dy`` near and beyond flat index 2^31, and 0 before. Only these elements matter in a sum."""
    rows = jax.lax.broadcasted_iota(jnp.int32, dy.shape, 0)
    return jnp.where(rows >= BORDER // dy.shape[1] - 2, dy, 0)


def assert_rows(function, reference, args, tolerance=0.01):
    """Some rows of `function(*args)` equal `reference` of these rows of the arguments. Arrays with
    one dimension or one row are passed whole."""
    rows, columns = jnp.broadcast_shapes(*(a.shape for a in args))
    found = jax.jit(function)(*args)
    for part in somewhere(rows, columns):
        own = [a[part] if a.ndim == 2 and a.shape[0] == rows else a for a in args]
        expected = reference(*(a.astype(jnp.float32) for a in own))
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(
                np.asarray(ours[part], np.float32), theirs, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("columns", ROWS)
def test_lerp(columns):
    rows = ROWS[columns]
    shapes = (1, columns), (rows, columns), (rows, 1)
    args = [pattern(shape, seed) for seed, shape in enumerate(shapes)]
    assert_rows(fo.lerp, lambda s, e, w: s + w * (e - s), args)


@pytest.mark.parametrize("columns", ROWS)
def test_gradients_of_lerp(columns):
    rows = ROWS[columns]
    row, full, column = (
        pattern(shape, seed) for seed, shape in enumerate([(columns,), (rows, columns), (rows, 1)])
    )
    dy = jax.jit(behind_border)(pattern((rows, columns), 3))

    @jax.jit
    def gradients(*args):
        return jax.vjp(fo.lerp, *args[:3])[1](args[3])

    dstart, dend, dweight = gradients(row, full, column, dy)
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    expected = jax.jit(lambda w, dy: jnp.sum(wide(dy) * (1 - wide(w)), 0))(column, dy)
    scale = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(wide(dstart), expected, rtol=0.01, atol=0.01 * scale)
    for part in somewhere(rows, columns):
        some = wide(dy[part])
        np.testing.assert_allclose(wide(dend[part]), some * wide(column[part]), rtol=0.01)
        sums = jnp.sum(some * (wide(full[part]) - wide(row)), 1, keepdims=True)
        np.testing.assert_allclose(wide(dweight[part]), sums, rtol=0.01, atol=0.5)


@pytest.mark.parametrize("columns", ROWS)
@pytest.mark.parametrize("activation", ("relu", "silu"))
def test_bias_act(columns, activation):
    x, bias = pattern((ROWS[columns], columns), 0), pattern((columns,), 1)
    act = getattr(jax.nn, activation)
    ours = functools.partial(fo.bias_act, activation=activation)
    assert_rows(ours, lambda x, bias: act(x + bias), (x, bias))


@pytest.mark.parametrize("columns", ROWS)
@pytest.mark.parametrize("activation", ("relu", "silu"))
def test_gradients_of_bias_act(columns, activation):
    x, bias = pattern((ROWS[columns], columns), 0), pattern((columns,), 1)
    dy = jax.jit(behind_border)(pattern((ROWS[columns], columns), 2))
    act = getattr(jax.nn, activation)

    def gradients(function):
        return jax.jit(lambda x, bias, dy: jax.vjp(function, x, bias)[1](dy))

    dx, dbias = gradients(functools.partial(fo.bias_act, activation=activation))(x, bias, dy)
    summed = jax.jit(
        lambda x, bias, dy: jnp.sum(
            dy.astype(jnp.float32)
            * jax.vmap(jax.vmap(jax.grad(act)))(x.astype(jnp.float32) + bias.astype(jnp.float32)),
            0,
        )
    )(x, bias, dy)
    scale = float(jnp.max(jnp.abs(summed)))
    np.testing.assert_allclose(dbias.astype(jnp.float32), summed, rtol=0.01, atol=0.01 * scale)
    reference = gradients(lambda x, bias: act(x + bias))
    for part in somewhere(*x.shape):
        some = [a.astype(jnp.float32) for a in (x[part], bias, dy[part])]
        expected = reference(*some)[0]
        np.testing.assert_allclose(dx[part].astype(jnp.float32), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("columns", ROWS)
@pytest.mark.parametrize("radius", (2, 40))
def test_window_sum_along_rows(columns, radius):
    x = pattern((ROWS[columns], columns), 0)
    ours = functools.partial(fo.window_sum, radius=radius, padding="SAME")
    assert_rows(ours, functools.partial(windows, radius=radius), (x,), 0.02)


@pytest.mark.parametrize("columns", ROWS)
def test_window_sum_along_columns(columns):
    radius, x = 5, pattern((ROWS[columns], columns), 0)
    found = jax.jit(functools.partial(fo.window_sum, radius=radius, axis=0))(x)
    for part in somewhere(*found.shape):
        some = x[part.start : part.stop + 2 * radius].astype(jnp.float32)
        expected = windows(some.T, radius).T[radius:-radius]
        np.testing.assert_allclose(found[part].astype(jnp.float32), expected, rtol=0.01, atol=0.02)


def windows(x, radius):
    """Window sums along the last axis, with zeros as padding."""
    padded = jnp.pad(x, ((0, 0), (radius, radius)))
    return sum(padded[:, k : k + x.shape[1]] for k in range(2 * radius + 1))


@pytest.mark.parametrize("columns", ROWS)
@pytest.mark.parametrize("axis", (0, 1))
def test_batch_norm(columns, axis):
    """Compares the statistics of all rows, and the results and gradients of some."""
    x = pattern((ROWS[columns], columns), 0)
    dy = jax.jit(behind_border)(pattern(x.shape, 1))

    @jax.jit
    def ours(x, dy):
        (y, mean, var), pullback = jax.vjp(
            lambda x: fo.batch_norm(x, None, None, axis=axis, activation="relu"), x
        )
        return y, mean, var, pullback((dy, jnp.zeros_like(mean), jnp.zeros_like(var)))[0]

    @jax.jit
    def plain(x, dy):
        along = lambda values: jnp.expand_dims(values, 1 - axis)  # noqa: E731
        x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
        mean = jnp.mean(x, 1 - axis)
        centred = x - along(mean)
        var = jnp.mean(jnp.square(centred), 1 - axis)
        g = jnp.where(centred > 0, dy, 0)
        return mean, var, jnp.mean(g, 1 - axis), jnp.mean(g * centred, 1 - axis)

    y, mean, var, dx = ours(x, dy)
    exact_mean, exact_var, *sums = plain(x, dy)
    np.testing.assert_allclose(mean, exact_mean, atol=1e-4)
    np.testing.assert_allclose(var, exact_var, rtol=1e-3)
    for part in somewhere(*x.shape):
        own = part if axis == 0 else slice(None)
        along = lambda values, own=own: jnp.expand_dims(values[own], 1 - axis)  # noqa: E731
        centred = x[part].astype(jnp.float32) - along(mean)
        rstd = 1 / jnp.sqrt(along(var) + 1e-5)
        found = y[part].astype(jnp.float32)
        np.testing.assert_allclose(found, jax.nn.relu(centred * rstd), rtol=0.01, atol=0.01)
        g = jnp.where(found > 0, dy[part].astype(jnp.float32), 0)
        want = rstd * (g - along(sums[0]) - centred * along(sums[1]) * rstd**2)
        sure = np.abs(centred) > 1e-3
        np.testing.assert_allclose(
            np.where(sure, dx[part].astype(jnp.float32), 0), np.where(sure, want, 0), atol=0.02
        )
