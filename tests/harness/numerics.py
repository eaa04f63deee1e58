"""Compares results, and draws the values of arguments.

There are two rules. An exact op must give the bits of its reference on the same platform (any NaN
equals any NaN). Any other op may be at most twice as far from the float64 oracle as its reference
is, in norm and in the worst element.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the oracle.

    Attributes:
      factor: the multiple of the reference's own error.
      ulps: the error, in units of the dtype's epsilon, that is accepted in the worst element
        whatever the reference's error (the reference may be exact by chance). The norm may have
        half of it.
      small: the error of an element is relative to the element, or to this multiple of the root
        mean square if that is larger. With 0 it is always relative to the element, which is right
        for positive sums.
      lone: for a result of one element: the least value for its root mean square. Give the size
        of the terms of a sum that cancels.
    """

    factor: float = 2.0
    ulps: float = 1.0
    small: float = 1.0
    lone: float = 0.0


DEFAULT_TOLERANCE = Tolerance()


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative errors against the oracle: in norm, and of the worst element with its index."""

    norm: float
    worst: float
    index: tuple[int, ...]


def is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def same_bits(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Elementwise: the same bits, or both NaN."""
    if not is_float(want.dtype):
        return got == want
    unsigned = np.dtype(f"u{want.dtype.itemsize}")
    bits = np.ascontiguousarray(got).view(unsigned) == np.ascontiguousarray(want).view(unsigned)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        return (bits | (np.isnan(got) & np.isnan(want))).reshape(want.shape)


def errors(got: np.ndarray, oracle: np.ndarray, small: float = 1.0, lone: float = 0.0) -> Errors:
    """The relative errors of `got`. Leaves out elements that are not finite in either array."""
    got, oracle = np.asarray(got, np.float64), np.asarray(oracle, np.float64)
    finite = np.isfinite(got) & np.isfinite(oracle)
    if not finite.any():
        return Errors(0.0, 0.0, ())
    exact = np.where(finite, oracle, 0.0)
    difference = np.abs(np.where(finite, got, 0.0) - exact)
    norm = float(np.sqrt(np.mean(exact**2)))
    if exact.size == 1:
        norm = max(norm, lone)
    if norm == 0.0:  # the exact result is zero everywhere: the error is absolute
        relative, total = difference, float(np.sqrt(np.mean(difference**2)))
    else:
        scale = np.maximum(np.abs(exact), small * norm)
        relative = np.divide(difference, scale, out=np.zeros_like(difference), where=difference > 0)
        total = float(np.sqrt(np.mean(difference**2))) / norm
    index = np.unravel_index(int(np.argmax(relative)), relative.shape)
    return Errors(total, float(relative[index]), tuple(int(i) for i in index))


def assert_bitwise_equal(got: Any, want: Any, where: str = "result") -> None:
    """Two arrays have the same shape, dtype and bits (any NaN equals any NaN)."""
    got, want = _pair(got, want, where)
    same = same_bits(got, want)
    if not same.all():
        first = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{where}: {int((~same).sum())} of {same.size} elements differ in their bits from the "
            f"reference; the first at {first}: got {got[first]!r}, want {want[first]!r}"
        )


def assert_accurate(
    got: Any,
    want: Any,
    oracle: Any,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    where: str = "result",
) -> None:
    """`got` is about as close to `oracle` as `want`, the reference's result in the same dtype."""
    got, want = _pair(got, want, where)
    oracle = np.asarray(oracle)
    assert oracle.shape == want.shape, (
        f"{where}: the oracle has shape {oracle.shape}, not {want.shape}"
    )
    special = ~np.isfinite(want)
    if not same_bits(got[special], want[special]).all() or not np.isfinite(got[~special]).all():
        raise AssertionError(
            f"{where}: NaN and Inf are not where the reference has them:\n{got}\nwant:\n{want}"
        )
    eps = float(jnp.finfo(want.dtype).eps)
    ours, theirs = (errors(x, oracle, tolerance.small, tolerance.lone) for x in (got, want))
    for name, floor in (("norm", tolerance.ulps * eps / 2), ("worst", tolerance.ulps * eps)):
        mine, limit = getattr(ours, name), max(tolerance.factor * getattr(theirs, name), floor)
        if mine > limit:
            at, reference = ours.index, getattr(theirs, name)
            raise AssertionError(
                f"{where}: relative error ({name}) {mine:.3g}, more than {limit:.3g} (the "
                f"reference's is {reference:.3g}); the worst is at {at}: got {got[at]}, the "
                f"reference gives {want[at]}, exact is {oracle[at]}"
            )


def is_within_floor(got: Any, types: Any, oracle: Any, tolerance: Tolerance) -> bool:
    """Whether `assert_matches` accepts finite results of these types whatever the reference gives:
    they have no more than the error that is accepted even if the reference is exact."""

    def accepts(mine, kind, exact):
        if (mine.shape, mine.dtype) != (kind.shape, kind.dtype) or not is_float(kind.dtype):
            return False
        if not (np.isfinite(mine).all() and np.isfinite(exact).all()):
            return False
        limit = tolerance.ulps * float(jnp.finfo(kind.dtype).eps)
        found = errors(mine, exact, tolerance.small, tolerance.lone)
        return found.norm <= limit / 2 and found.worst <= limit

    same = jax.tree.structure(got) == jax.tree.structure(types) == jax.tree.structure(oracle)
    return same and all(map(accepts, *map(jax.tree.leaves, (got, types, oracle))))


def assert_matches(
    got: Any,
    want: Any,
    oracle: Any = None,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    where: str = "result",
) -> None:
    """Compares two pytrees of arrays: by accuracy if there is an oracle, otherwise bitwise."""
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    want_leaves, want_tree = jax.tree_util.tree_flatten_with_path(want)
    assert got_tree == want_tree, (
        f"{where}: the result is {got_tree}, the reference gives {want_tree}"
    )
    oracle_leaves: Sequence[Any] = (
        jax.tree.leaves(oracle) if oracle is not None else [None] * len(want_leaves)
    )
    for (path, mine), (_, theirs), exact in zip(
        got_leaves, want_leaves, oracle_leaves, strict=True
    ):
        name = where + jax.tree_util.keystr(path)
        if exact is None or not is_float(theirs.dtype):
            assert_bitwise_equal(mine, theirs, name)
        else:
            assert_accurate(mine, theirs, exact, tolerance, name)


def assert_within(
    got: np.ndarray, exact: np.ndarray, unit: Any, where: str, wide: Any = None
) -> None:
    """The error is at most half a unit in the last place, plus `unit` times the epsilon of the
    accumulator's dtype `wide` (default: float32 or wider). Values that are not finite are equal."""
    got = np.asarray(got)
    info = jnp.finfo(got.dtype)
    if wide is None:
        wide = jnp.promote_types(got.dtype, jnp.float32)
    eps = float(jnp.finfo(wide).eps)
    # XLA and the kernels may treat subnormal numbers of wide types as 0.
    least = info.smallest_subnormal if got.dtype == np.float16 else info.smallest_normal
    got = got.astype(np.float64)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite], err_msg=where)
    exact = np.where(finite, exact, 0)
    limit = 0.51 * float(info.eps) * np.abs(exact) + eps * unit + 1.01 * float(least)
    error = np.where(finite, np.abs(got - exact), 0)
    if not (error <= limit).all():
        worst = np.unravel_index(np.argmax(error - limit), error.shape)
        raise AssertionError(
            f"{where}: off by {error[worst]:.3g} at {worst}, more than {limit[worst]:.3g}: got "
            f"{got[worst]}, exact is {exact[worst]}"
        )


def assert_close(got: Any, want: Any, rtol: float, atol: float) -> None:
    """Two pytrees of arrays agree in structure, shapes and dtypes, and closely in values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        np.testing.assert_allclose(
            *(np.asarray(x, np.float64) for x in (mine, theirs)), rtol=rtol, atol=atol
        )


def norm_errors(got: Any, want: Any) -> dict[str, float]:
    """The error of each array of a pytree in norm, relative to the norm of the expected array."""

    def error(path, a, b):
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    named = jax.tree.leaves_with_path(jax.tree.map_with_path(error, got, want))
    return {jax.tree_util.keystr(path): value for path, value in named}


def assert_close_in_norm(got: Any, want: Any, tolerance: float, dtypes: bool = True) -> None:
    """Two pytrees agree in structure, shapes and (by default) dtypes, and in `norm_errors`."""
    if dtypes:
        assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, want)
    for path, value in norm_errors(got, want).items():
        assert value <= tolerance, f"{path} differs by {value:.1e}"


def of_products(tolerance: float) -> float:
    """A tolerance for float32 products, which a GPU rounds to ten bits (TF32) by default.

    For programs whose products must not have a precision; others use `exact_products`.
    """
    return tolerance if jax.default_backend() == "cpu" else max(tolerance, 2e-3)


def unbroadcast(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The sum of `x` over the dimensions along which an array of `shape` is broadcast to it."""
    lead = x.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(
        i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1
    )
    return x.sum(axes).reshape(shape)


def _pair(got: Any, want: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, f"{where}: dtype {got.dtype}, the reference has {want.dtype}"
    assert got.shape == want.shape, f"{where}: shape {got.shape}, the reference has {want.shape}"
    return got, want


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Standard normal values."""
    return np.asarray(rng.standard_normal(tuple(shape))).astype(dtype)


def any_value(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Random values of any dtype."""
    dtype = jnp.dtype(dtype)
    if is_float(dtype):
        return normal(rng, shape, dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (normal(rng, shape, np.float64) + 1j * normal(rng, shape, np.float64)).astype(dtype)
    return rng.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)


def raw_key(seed: int) -> np.ndarray:
    """A random key. It is not from jax.random, because the harness also draws while tracing."""
    return np.random.default_rng(seed).integers(0, 2**32, 2, np.uint32)


def stacked(x: Any) -> jax.Array:
    """Three examples along a new first axis."""
    return jnp.stack([x, -2 * x, x / 2])


def specials(dtype: Any) -> np.ndarray:
    """Values that break code most often: zeros, NaN, infinities, subnormals, ends of the range."""
    info = jnp.finfo(dtype)
    positive = [0.0, np.inf, info.smallest_subnormal, info.smallest_normal, info.max, 1.0]
    halfway = np.asarray(info.smallest_normal).astype(dtype) / np.asarray(2).astype(dtype)
    values = np.asarray([*positive, np.nan]).astype(dtype)
    return np.concatenate([values, -values, np.asarray([halfway, -halfway]).astype(dtype)])


def sprinkled(
    rng: np.random.Generator, shape: Sequence[int], dtype: Any, share: float = 0.3
) -> np.ndarray:
    """Normal values, a `share` of them replaced by special ones."""
    values = normal(rng, shape, dtype)
    chosen = rng.choice(specials(dtype), size=values.shape)
    return np.where(rng.random(values.shape) < share, chosen, values)


def special_rows(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Rows of normal values in which one, two or all are special; each row in turn has others."""
    values = normal(rng, shape, np.float64)
    if not values.size:
        return values.astype(dtype)
    rows, (inf, nan), info = (
        values.reshape(-1, values.shape[-1] if values.ndim else 1),
        (np.inf, np.nan),
        jnp.finfo(dtype),
    )
    half, last = rows.shape[1] // 2, rows.shape[1] - 1
    kinds = [{half: nan}, {last: nan}, {half: inf}, {last: -inf}, {0: inf, last: -inf}]
    kinds += [{half: 1e3}, {half: 0.0}, {0: inf, last: inf}, {0: inf, last: nan}]
    whole = [inf, -inf, nan, 0.0, -0.0, 2.0, float(info.smallest_normal)]
    for i, row in enumerate(rows):
        kind = i % (len(kinds) + len(whole))
        if kind < len(kinds):
            row[list(kinds[kind])] = list(kinds[kind].values())
        else:
            row[:] = whole[kind - len(kinds)]
    return values.astype(dtype)
