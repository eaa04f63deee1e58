"""``autofuse``: what users call."""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from jax_fastops import _explain
from jax_fastops._arguments import array_leaves
from jax_fastops._autofuse import rewrite
from jax_fastops._autofuse.graph import Value
from jax_fastops._autofuse.meaning import resolve

source_info_util.register_exclusion(__file__)  # it calls functions of users

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A pattern that :class:`autofuse` replaces.

    Attributes:
      pattern: its name, with ``"add + "`` or ``"bias + "`` if the op takes the sum before it too.
      where: the file and line of its last operation.
      shape: the shape of its result.
      dtype: the dtype of its result.
      why: why the call takes the kernel.
      saves: the bytes of the arrays between its operations, at least as large as its result. XLA
        fuses some of them, so this is the most that the op does not write.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fastops as fo
      >>> with fo.use_implementation("native"):
      ...     found = fo.autofuse.report(jax.nn.softmax)(jnp.ones((2, 8)))
      >>> found.replaced[0].pattern, found.replaced[0].shape
      ('softmax', (2, 8))
    """

    pattern: str
    where: str
    shape: tuple[int, ...]
    dtype: str
    saves: int
    why: str


@dataclasses.dataclass(frozen=True)
class Missed:
    """A pattern that :class:`autofuse` leaves as it is.

    Attributes:
      pattern: its name, or ``"derivative"`` for a function that computes one.
      where: the file and line of the operation that does not fit, or of the result.
      equation: this operation and its operands.
      reason: why the pattern stays.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fastops as fo
      >>> with fo.use_implementation("xla"):
      ...     found = fo.autofuse.report(jax.nn.softmax)(jnp.ones((2, 8)))
      >>> found.missed[0].pattern, found.missed[0].reason
      ('softmax', "the implementation is 'xla'")
    """

    pattern: str
    where: str
    equation: str
    reason: str


@dataclasses.dataclass(frozen=True)
class FuseReport:
    """What :class:`autofuse` does with a function. Its text is a table.

    Attributes:
      replaced: the patterns that ops replace, in the order of the program.
      missed: the patterns that stay, those of which a large part was found, and those of which a
        smaller one is replaced.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fastops as fo
      >>> len(fo.autofuse.report(jnp.sin)(jnp.ones(2)).replaced)
      0
    """

    replaced: tuple[Replaced, ...]
    missed: tuple[Missed, ...]

    def __str__(self) -> str:
        rows = [
            (
                r.pattern,
                f"{r.dtype}[{','.join(map(str, r.shape))}]",
                _explain.size(r.saves),
                r.where,
                r.why,
            )
            for r in self.replaced
        ]
        header = ("pattern", "result", "saves", "where", "why")
        text = f"{len(rows)} patterns replaced\n" + (
            _explain.table([header, *rows]) if rows else ""
        )
        if self.missed:
            alike: dict[tuple, list[Missed]] = {}  # each layer of a model has the same
            for m in self.missed:
                alike.setdefault((m.pattern, m.where, m.reason), []).append(m)
            missed = [
                (name + (f" ({len(found)} times)" if found[1:] else ""), found[0].equation, *rest)
                for (name, *rest), found in alike.items()
            ]
            header = ("pattern", "up to", "where", "why")
            text += f"{len(self.missed)} patterns left\n" + _explain.table([header, *missed])
        return text.rstrip()


class autofuse(Generic[_P, _T]):
    """``fn`` with our ops in place of the patterns that they compute.

    Traces ``fn`` and looks for what our ops compute, written by hand or by a library: activations
    with a bias or a gate before them, relu of a sum, softmax and log_softmax, layer norm, RMS norm
    and batch norm with what stands next to them, cross entropy with integer labels, also with the
    product that makes its logits, interpolation, sums over windows, a bias and its attention heads.
    A pattern is replaced where the call takes the kernel (see :func:`kernel_or`) and the result,
    its dtype and its derivatives are the same but for rounding. All else stays as it is. It looks
    into ``jit``, ``scan``, ``while_loop``, ``cond``, ``checkpoint``, ``shard_map`` and functions
    with a derivative rule of their own, which keep the rule.

    A mask by ``jnp.where`` or a sum, with -inf or a number of at most -1e9 (half of the lowest
    number in float16), becomes the mask of :func:`softmax` if its elements are known when the
    function is traced and each row has one that counts, as in a causal mask. The logits must be far
    above that number. If padding has set every logit of a row that counts to that number, too, the
    function gives the masked elements weight, and the op does not; ``check=True`` raises an error
    for such arguments. In a row with NaN, masked elements are then 0. Other masks stay in the
    operand.

    The function is traced whenever it is called, so put ``jax.jit`` around it. Put ``jax.grad``
    around it too: ``jax.grad(autofuse(loss))``. It does not see the patterns in a derivative.
    Modules of ``flax.nnx`` may be arguments, and are updated as without it.

    Args:
      fn: a function of arrays.
      dropout: whether dropout with a mask by ``jax.random.bernoulli`` or ``uniform`` becomes
        :func:`dropout` with the same key and rate. Its masks are those of :func:`dropout_mask`, not
        those of ``jax.random``.
      check: whether each call runs both functions on its arguments and compares the results. Where
        they differ, it runs ``fn`` once more, on arguments that differ by a rounding.

    Raises:
      ValueError: both ``dropout`` and ``check`` are set. With ``check``, the results differ by more
        than rounding explains, or there are no values yet, under ``jax.jit`` or ``jax.grad``.
      Whatever ``fn`` raises.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fastops as fo
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

    def __init__(self, fn: Callable[_P, _T], *, dropout: bool = False, check: bool = False):
        if check and dropout:
            raise ValueError(
                "autofuse: dropout=True changes masks, so check=True finds differences"
            )
        functools.update_wrapper(self, fn)
        self._fn, self._check, self._dropout = fn, check, bool(dropout)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        settings = rewrite.Settings(dropout=self._dropout)
        run = _checked if self._check else functools.partial(_traced, settings=settings)
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
        fn, drops = (fn._fn, fn._dropout) if isinstance(fn, autofuse) else (fn, False)

        @functools.wraps(fn)
        def reported(*args: Any, **kwargs: Any) -> FuseReport:
            plans: list[rewrite.Plan] = []
            operands, with_arrays = array_leaves(args, kwargs, _is_array)

            def run(*arrays):
                a, k = with_arrays(arrays)
                settings = rewrite.Settings(plans.append, drops)
                found = _call(fn, a, k, functools.partial(_traced, settings=settings))
                return list(filter(_is_array, jax.tree.leaves(found)))

            jax.eval_shape(run, *operands)
            return _report(plans)

        return reported


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _call(fn: Callable, args: tuple, kwargs: dict, run: Callable) -> Any:
    """What ``run`` makes of a function that changes no argument: of Flax' modules, their states."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None:
        kinds = getattr(nnx, "Pytree", nnx.Module), nnx.Variable  # also optimizers and keys

        def is_module(x):
            return isinstance(x, kinds)

        def is_whole(x):  # the variables of a state are values
            return is_module(x) or isinstance(x, nnx.State)

        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_whole)
        if any(map(is_module, leaves)):
            return _call_with_modules(nnx, fn, leaves, tree, is_module, run)
    return run(fn, args, kwargs)


def _traced(fn: Callable, args: tuple, kwargs: dict, settings: rewrite.Settings) -> Any:
    operands, with_arrays = array_leaves(args, kwargs, _is_array)
    rest: list[Any] = []

    def traced(*arrays):
        a, k = with_arrays(arrays)
        results, out = jax.tree.flatten(fn(*a, **k))
        is_array = [_is_array(x) for x in results]
        others = [None if a else x for a, x in zip(is_array, results, strict=True)]
        rest[:] = [out, others, is_array]
        return list(filter(_is_array, results))

    program = jax.make_jaxpr(traced)(*operands)
    found = iter(rewrite.fused(program.jaxpr, program.consts, operands, settings))
    out, others, is_array = rest
    results = [next(found) if a else x for a, x in zip(is_array, others, strict=True)]
    return jax.tree.unflatten(out, results)


def _call_with_modules(nnx, fn: Callable, leaves, tree, is_module, run: Callable) -> Any:
    """Flax' modules as their states: what the function changes in them is a result."""
    modules = tuple(filter(is_module, leaves))
    graph, state = nnx.split(modules)

    def pure(state, others):
        merged = nnx.merge(graph, state)
        given, rest = iter(merged), iter(others)
        args, kwargs = jax.tree.unflatten(
            tree, [next(given) if is_module(x) else next(rest) for x in leaves]
        )
        result = fn(*args, **kwargs)
        after, new = nnx.split(merged)
        if after != graph:
            raise ValueError(
                "autofuse: the function adds a variable to a module, or changes an attribute that "
                "is not a variable; do that outside"
            )
        return result, new

    others = [x for x in leaves if not is_module(x)]
    result, state = run(pure, (state, others), {})
    nnx.update(modules, state)
    return result


def _checked(fn: Callable, args: tuple, kwargs: dict) -> Any:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
        raise ValueError("autofuse: check=True needs values: call it outside of jit and grad")
    plans: list[rewrite.Plan] = []

    def copied(change: Callable = lambda x: x) -> tuple:  # because the function may donate them
        return jax.tree.map(lambda x: change(x.copy()) if _is_value(x) else x, (args, kwargs))

    a, k = copied()
    got = _traced(fn, a, k, rewrite.Settings(plans.append))
    rounding = max(map(_rounding, plans), default=0.0)
    a, k = copied()
    want = fn(*a, **k)
    if not all(d.error <= d.limit for d in _differences(want, got, rounding)):
        # How much does a rounding of the arguments change?
        a, k = copied(functools.partial(_rounded, rounding=rounding))
        changes = _differences(want, fn(*a, **k), rounding)
        for d, change in zip(_differences(want, got, rounding), changes, strict=True):
            limit = max(d.limit, 20 * change.typical)
            if not d.error <= limit:
                raise ValueError(
                    f"autofuse: result{d.path} differs by {d.error:.3g} where its largest element "
                    f"is {d.scale:.3g}; rounding explains {limit:.3g}"
                )
    return got


def _is_value(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def _rounded(x: Any, rounding: float) -> Any:
    """``x`` with a relative error of an epsilon in each element. Whole numbers stay: masks."""
    if not jnp.issubdtype(x.dtype, jnp.inexact) or bool(jnp.all(jnp.round(x) == x)):
        return x
    eps = max(rounding, float(jnp.finfo(x.dtype).eps))
    signs = np.random.default_rng(0).choice([-eps, eps], x.shape)
    return (x * (1 + signs)).astype(x.dtype)


def _numbers(x: Any) -> np.ndarray:
    typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if typed else x)


def _rounding(plan: rewrite.Plan) -> float:
    """That of the narrowest dtype that a replaced pattern has."""
    values = (v for m in plan.matches for v in (m.root, *m.reads) if v.is_floating)
    return max((float(jnp.finfo(v.dtype).eps) for v in values), default=0.0)


class _Difference(NamedTuple):
    """How much a result differs, and what rounding explains.

    ``error`` is the largest difference, ``typical`` the root mean square.
    """

    path: str
    error: float
    typical: float
    scale: float
    limit: float


def _differences(want: Any, got: Any, rounding: float) -> list[_Difference]:
    """Those of all results that are arrays."""
    pairs = zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True)
    return [
        _difference(jax.tree_util.keystr(path), _numbers(a), _numbers(b), rounding)
        for (path, a), b in pairs
        if _is_array(a)
    ]


def _difference(path: str, want: np.ndarray, got: np.ndarray, rounding: float) -> _Difference:
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        error = float(not np.array_equal(want, got))
        return _Difference(path, error, error, 1.0, 0.0)
    tolerance = 50 * max(rounding, float(jnp.finfo(want.dtype).eps))
    kind = np.complex128 if np.iscomplexobj(want) else np.float64
    want, got = want.astype(kind), got.astype(kind)
    finite = np.isfinite(want)
    scale = float(np.max(np.abs(want), where=finite, initial=0.0))
    same = np.array_equal(np.where(finite, 0, want), np.where(finite, 0, got), equal_nan=True)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(want - got), 0.0)
    typical = float(np.sqrt(np.mean(error**2, where=np.isfinite(error)))) if error.size else 0.0
    largest = float(np.max(error, initial=0.0)) if same else np.inf
    return _Difference(path, largest, typical, scale, tolerance * scale)


def _report(plans: list[rewrite.Plan]) -> FuseReport:
    replaced, missed = [], []
    for plan in plans:
        for match in reversed(plan.matches):
            root, name = match.root, match.before + match.pattern.name
            if plan.rule:
                reason = f"the rule of a {plan.rule} runs in a gradient; replaced only without one"
                missed.append(Missed(name, *_place(root), reason))
                continue
            large = [v for v in match.inner if v.size >= root.size and v.places]
            saved = sum(v.size * v.dtype.itemsize for v in large if v is not root)
            found = Replaced(
                name,
                root.line,
                root.shape,
                str(root.dtype),
                saved,
                plan.programs.why(match.call),
            )
            replaced.append(found)
        taken = {v for match in plan.matches for v in (*match.inner, match.root)}
        seen = set()
        for miss in reversed(plan.misses):
            shown = {miss.value, resolve(miss.value, narrowing=True)[0]}
            key = miss.value, miss.pattern if miss.is_taken else ""
            if (miss.is_taken or not shown & taken) and key not in seen:
                seen.add(key)
                missed.append(Missed(miss.pattern, *_place(miss.value), miss.reason))
    derivative = next((p.derivative for p in plans if p.derivative is not None), None)
    if derivative is not None:
        missed.insert(0, Missed("derivative", *_place(derivative), _PUT_GRAD_AROUND))
        if not replaced:
            warnings.warn(f"autofuse: nothing is replaced: {_PUT_GRAD_AROUND}", stacklevel=3)
    return FuseReport(tuple(replaced), tuple(missed))


_PUT_GRAD_AROUND = (
    "the function computes a derivative, in which patterns are not seen; put grad around autofuse: "
    "jax.grad(autofuse(f))"
)


def _place(value: Value) -> tuple[str, str]:
    """The line of a value, and the operation that makes it."""
    if value.node is None:
        return "", ""
    equation = value.node.equation
    operands = ", ".join(v.aval.str_short() for v in equation.invars)
    return value.line, f"{equation.primitive.name}({operands})"
