"""The layers of a network in turn: as a list or a scan, and in groups that are recomputed."""

from collections.abc import Callable
from typing import Any

import jax


def in_turn(layer: Callable, x: Any, each: Any, config: Any) -> tuple[Any, Any]:
    """Applies ``layer(x, one)``, which returns the next ``x`` and another result, to each layer.

    With ``config.remat_every``, the backward recomputes groups of so many layers from their first
    ``x``. The last group may be smaller.

    Args:
      layer: the function.
      x: the input of the first layer.
      each: what ``layer`` gets: a list, or with ``config.scan`` a tree whose arrays have a leading
        axis over the layers.
      config: with ``scan`` and ``remat_every``.

    Returns:
      The last ``x``, and the other results in the form of ``each``.
    """

    def run(x, each):
        if config.scan:
            return jax.lax.scan(layer, x, each)
        results: list[Any] = []
        for one in each:
            x, result = layer(x, one)
            results.append(result)
        return x, results

    size = config.remat_every
    if size is None:
        return run(x, each)
    group = jax.checkpoint(run)
    if not config.scan:
        results: list[Any] = []
        for first in range(0, len(each), size):
            x, more = group(x, each[first : first + size])
            results += more
        return x, results
    count = len(jax.tree.leaves(each)[0])
    rest = count % size

    def groups(a):
        return a[: count - rest].reshape(-1, size, *a.shape[1:])

    # XLA does not merge a scan's body with its backward, so no CSE barrier is needed.
    inside = jax.checkpoint(run, prevent_cse=False)
    x, results = jax.lax.scan(inside, x, jax.tree.map(groups, each))
    results = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results)
    if rest:
        x, more = group(x, jax.tree.map(lambda a: a[count - rest :], each))
        results = jax.tree.map(lambda *a: jax.numpy.concatenate(a), results, more)
    return x, results
