"""``autofuse``: what users call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from jax_fastops._arguments import array_leaves, check_function
from jax_fastops._explain import Waiting
from jax_fastops.autofuse._evaluate import Plan, Settings, fused
from jax_fastops.autofuse._report import FuseReport, report_of

source_info_util.register_exclusion(__file__)  # it calls functions of users

_P = ParamSpec("_P")
_T = TypeVar("_T")


class autofuse(Generic[_P, _T]):
    """``fn`` with our ops in place of the patterns that they compute.

    Traces ``fn`` and looks for what our ops compute, written by hand or by a library: activations
    with a bias or a gate before them, relu of a sum, attention, softmax and log_softmax, layer
    norm, RMS norm, batch norm and group norm with what stands next to them, cross entropy with
    integer labels, also with the product that makes its logits, interpolation, sums over windows, a
    bias and its attention heads. Rows of a table that is cast to a narrower dtype are cast in place
    of the table: the rows are the same, and the gradient is summed in the wider dtype. A pattern is
    replaced where the call takes the kernel (see :func:`kernel_or`) and the result, its dtype and
    its derivatives are the same but for rounding. All else stays as it is. What is next to a
    pattern counts, too: on a GPU, a call that would move more bytes than XLA's fusions stays, and
    with ``tune=True``, both forms are measured in place. It looks into ``jit``, ``scan``,
    ``while_loop``, ``cond``, ``checkpoint``, ``shard_map`` and functions with a derivative rule of
    their own, which keep the rule.

    A mask by ``jnp.where`` or a sum becomes a mask of :func:`attention`. A query that may attend to
    no key then gives 0; the report tells where a mask might leave one. It becomes the mask of
    :func:`softmax` if its elements are known when the function is traced, and each row has one that
    counts, as in a causal mask. Masked elements must be -inf or at most -1e9 (in float16, half of
    the lowest number), and the logits far above. If padding has set every logit of a row that
    counts to that number, too, the function gives the masked elements weight, and the op does not;
    ``check=True`` raises an error for such arguments. In a row with NaN, masked elements are then
    0.

    The function is traced whenever it is called, so put ``jax.jit`` around it. Put ``jax.grad``
    around it too: ``jax.grad(autofuse(loss))``. It does not see the patterns in a derivative.
    Modules of ``flax.nnx`` may be arguments, and are updated as without it.

    Args:
      fn: a function of arrays.
      tune: whether a trace measures what it does not know yet. Patterns and the element-wise
        operations next to them are compiled with and without the ops, and timed on the default
        device, forward and with gradients. The faster form is taken, but a form with the ops that
        needs much less memory may be up to 10% slower. The times are kept in files in the folder
        ``JAX_FASTOPS_CACHE`` (default: ``~/.cache/jax_fastops``), which later functions read, with
        ``tune`` or without. Nothing is measured or read in a program of several processes, nor in
        one of several devices outside of ``jax.shard_map``.
      dropout: whether dropout with a mask by ``jax.random.bernoulli`` or ``uniform`` becomes
        :func:`dropout` with the same key and rate. Its masks are those of :func:`dropout_mask`, not
        those of ``jax.random``. With ``"independent"``, this also holds for the dropout of an
        attention whose mask is shared by batch or heads, as in Flax: each head and example then has
        its own mask.
      check: whether each call runs both functions on its arguments and compares the results. Where
        they differ, it runs ``fn`` once more, on arguments that differ by a rounding.

    Raises:
      ValueError: both ``dropout`` and ``check`` are set, or ``dropout`` is another string. With
        ``check``, the results differ by more than rounding explains, or there are no values yet,
        under ``jax.jit`` or ``jax.grad``.
      Whatever ``fn`` raises.

    Example:
      >>> def attention(x):
      ...     e = jnp.exp(x - x.max(-1, keepdims=True))
      ...     return e / e.sum(-1, keepdims=True)
      >>> with fo.use_implementation("native"):
      ...     y = jax.jit(fo.autofuse(attention))(jnp.zeros((1, 4)))
      ...     print(fo.autofuse.report(attention)(jnp.zeros((2, 4))).replaced[0].pattern)
      softmax
      >>> y.tolist()
      [[0.25, 0.25, 0.25, 0.25]]
    """

    def __init__(
        self,
        fn: Callable[_P, _T],
        *,
        tune: bool = False,
        dropout: bool | str = False,
        check: bool = False,
    ):
        check_function("autofuse", fn)
        if check and dropout:
            raise ValueError(
                "autofuse: dropout=True changes masks, so check=True finds differences"
            )
        if isinstance(dropout, str) and dropout != "independent":
            raise ValueError(
                f"autofuse: dropout is {dropout!r}; it must be True, False or 'independent'"
            )
        functools.update_wrapper(self, fn)
        self._fn, self._check, self._dropout, self._tune = fn, check, dropout, tune

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        settings = Settings(dropout=self._dropout, tune=self._tune)
        run = functools.partial(_checked if self._check else _traced, settings=settings)
        return _call(self._fn, args, kwargs, run)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @staticmethod
    def report(fn: Callable[..., Any]) -> Callable[..., FuseReport]:
        """Shows what :class:`autofuse` does with a function. Runs nothing.

        Args:
          fn: a function of arrays, or the :class:`autofuse` of one, with its options.

        Returns:
          A function of the arguments of ``fn``, where ``jax.ShapeDtypeStruct`` may stand for an
          array. It returns a :class:`FuseReport`, and warns if nothing is replaced because ``fn``
          computes a derivative.
        """
        settings = Settings()
        if isinstance(fn, autofuse):
            fn, settings = fn._fn, Settings(dropout=fn._dropout, tune=fn._tune)
        check_function("autofuse.report", fn)

        def reported(*args: Any, **kwargs: Any) -> FuseReport:
            plans: list[Plan] = []
            operands, with_arrays = array_leaves(args, kwargs, _is_array)

            def run(*arrays):
                a, k = with_arrays(arrays)
                seen = settings._replace(observe=plans.append)
                results = _call(fn, a, k, functools.partial(_traced, settings=seen))
                return list(filter(_is_array, jax.tree.leaves(results)))

            jax.eval_shape(run, *operands)

            def other(f: Callable) -> FuseReport:
                return autofuse.report(autofuse(f, dropout=settings.dropout))(*args, **kwargs)

            return report_of(plans, fn, other)

        return Waiting("autofuse.report", fn, reported)


def _is_array(x: Any) -> bool:
    is_array = isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
    return is_array and x.dtype != jax.dtypes.float0


def _call(fn: Callable, args: tuple, kwargs: dict, run: Callable) -> Any:
    """``run`` of a function that changes no argument: Flax' modules are given as their states."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return run(fn, args, kwargs)
    kinds = getattr(nnx, "Pytree", nnx.Module), nnx.Variable  # also optimizers and keys
    whole = (*kinds, nnx.State)  # the variables of a state are values
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, whole))
    is_module = [isinstance(x, kinds) for x in leaves]
    modules = tuple(x for x, here in zip(leaves, is_module, strict=True) if here)
    others = [x for x, here in zip(leaves, is_module, strict=True) if not here]
    if not modules:
        return run(fn, args, kwargs)
    graph, state = nnx.split(modules)

    def pure(state, others):
        merged = nnx.merge(graph, state)
        sources = iter(others), iter(merged)
        args, kwargs = jax.tree.unflatten(tree, [next(sources[here]) for here in is_module])
        result = fn(*args, **kwargs)
        after, new = nnx.split(merged)
        if after != graph:
            raise ValueError(
                "autofuse: the function adds a variable to a module, or changes an attribute that "
                "is not a variable; do that outside"
            )
        return result, new

    result, state = run(pure, (state, others), {})
    nnx.update(modules, state)
    return result


def _traced(fn: Callable, args: tuple, kwargs: dict, settings: Settings) -> Any:
    operands, with_arrays = array_leaves(args, kwargs, _is_array)
    rest: list[Any] = []

    def traced(*arrays):
        a, k = with_arrays(arrays)
        results, out = jax.tree.flatten(fn(*a, **k))
        is_array = [isinstance(x, jax.Array) for x in results]
        others = [None if a else x for a, x in zip(is_array, results, strict=True)]
        rest[:] = [out, others, is_array]
        return [x for x in results if isinstance(x, jax.Array)]

    program = jax.make_jaxpr(traced)(*operands)
    found = fused(program.jaxpr, program.consts, operands, settings)
    # A number that the function makes, as by ``jnp.float32(0)``, is a literal of the program.
    arrays = (x if isinstance(x, jax.Array) else jnp.asarray(x) for x in found)
    out, others, is_array = rest
    results = [next(arrays) if a else x for a, x in zip(is_array, others, strict=True)]
    return jax.tree.unflatten(out, results)


# ---- the check -----------------------------------------------------------------------------------


def _checked(fn: Callable, args: tuple, kwargs: dict, settings: Settings) -> Any:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
        raise ValueError("autofuse: check=True needs values: call it outside of jit and grad")
    plans: list[Plan] = []

    def run(call: Callable, change: Callable = lambda x: x) -> Any:
        def copy(x):  # because the function may donate it
            return change(x.copy()) if isinstance(x, (jax.Array, np.ndarray)) else x

        return call(*jax.tree.map(copy, (args, kwargs)))

    def plain(args, kwargs):
        return fn(*args, **kwargs)

    settings = settings._replace(observe=plans.append)
    got = run(lambda a, k: _traced(fn, a, k, settings))
    # Results are rounded as by the narrowest dtype that a replaced pattern has.
    values = (v for p in plans for r in p.rewrites for v in (r.root, *r.reads) if v.is_floating)
    rounding = max((float(jnp.finfo(v.dtype).eps) for v in values), default=0.0)
    want = run(plain)
    differences = _differences(want, got, rounding)
    if all(error <= limit for _, error, _, _, limit in differences):
        return got
    # How much does a rounding of the arguments change?
    rounded = functools.partial(_rounded, rounding=rounding)
    changes = _differences(want, run(plain, rounded), rounding)
    pairs = zip(differences, changes, strict=True)
    for (path, error, _, scale, limit), (_, _, typical, _, _) in pairs:
        limit = max(limit, 20 * typical)
        if not error <= limit:
            raise ValueError(
                f"autofuse: result{path} differs by {error:.3g} where its largest element is "
                f"{scale:.3g}; rounding explains {limit:.3g}"
            )
    return got


def _rounded(x: Any, rounding: float) -> Any:
    """``x`` with a relative error of an epsilon in each element. Whole numbers stay: masks."""
    if not jnp.issubdtype(x.dtype, jnp.inexact) or bool(jnp.all(jnp.round(x) == x)):
        return x
    eps = max(rounding, float(jnp.finfo(x.dtype).eps))
    signs = np.random.default_rng(0).choice([-eps, eps], x.shape)
    return (x * (1 + signs)).astype(x.dtype)


def _differences(want: Any, got: Any, rounding: float) -> list[tuple]:
    """For each array of the results: its path, errors, its scale, and what rounding explains."""
    pairs = zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True)
    return [
        (jax.tree_util.keystr(path), *_difference(a, b, rounding))
        for (path, a), b in pairs
        if _is_array(a)
    ]


def _difference(want: Any, got: Any, rounding: float) -> tuple[float, float, float, float]:
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        want, got = jax.random.key_data(want), jax.random.key_data(got)
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        error = float(not np.array_equal(want, got))
        return error, error, 1.0, 0.0
    tolerance = 50 * max(rounding, float(jnp.finfo(want.dtype).eps))
    wide = np.complex128 if jnp.iscomplexobj(want) else np.float64
    want, got = np.asarray(want).astype(wide), np.asarray(got).astype(wide)
    finite = np.isfinite(want)
    scale = float(np.max(np.abs(want), where=finite, initial=0.0))
    same = np.array_equal(np.where(finite, 0, want), np.where(finite, 0, got), equal_nan=True)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(want - got), 0.0)
    typical = float(np.sqrt(np.mean(error**2, where=np.isfinite(error)))) if error.size else 0.0
    largest = float(np.max(error, initial=0.0)) if same else np.inf
    return largest, typical, scale, tolerance * scale
