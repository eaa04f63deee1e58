"""The report of :func:`autofuse`: what it replaces, and what it leaves and why."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

from jax_fastops import _tables
from jax_fastops.autofuse._evaluate import Plan
from jax_fastops.autofuse._rule import Rewrite, why
from jax_fastops.autofuse._value import NO_EQUATION, Value


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A pattern that :class:`autofuse` replaces.

    Attributes:
      pattern: its name, with ``"add + "`` or ``"bias + "`` if the op takes the sum before it too.
      where: the file and line of its last operation. For one inside of an installed package, the
        line of the program that calls the package.
      shape: the shape of its result.
      dtype: the dtype of its result.
      why: why the call takes the kernel, after a note if the op gives another result somewhere.
      saves: the bytes of the arrays between its operations, at least as large as its result. XLA
        fuses some of them, so this is the most that the op does not write.

    Example:
      >>> with fo.use_implementation("native"):
      ...     report = fo.autofuse.report(jax.nn.softmax)(jnp.ones((2, 8)))
      >>> report.replaced[0].pattern, report.replaced[0].shape
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
      >>> with fo.use_implementation("xla"):
      ...     report = fo.autofuse.report(jax.nn.softmax)(jnp.ones((2, 8)))
      >>> report.missed[0].pattern, report.missed[0].reason
      ('softmax', "the implementation is 'xla'")
    """

    pattern: str
    where: str
    equation: str
    reason: str


@dataclasses.dataclass(frozen=True)
class FuseReport:
    """What :class:`autofuse` does with a function. Its text has one row for equal patterns.

    Attributes:
      replaced: the patterns that ops replace, in the order of the program.
      missed: the patterns that stay, also those that are there in large part, and those of which
        a part is replaced by a smaller pattern.

    Example:
      >>> len(fo.autofuse.report(jnp.sin)(jnp.ones(2)).replaced)
      0
    """

    replaced: tuple[Replaced, ...]
    missed: tuple[Missed, ...]

    def __str__(self) -> str:
        parts = ((title, _tables.text(rows)) for title, rows in self._tables())
        return "\n".join(filter(None, (part for both in parts for part in both)))

    def _repr_html_(self) -> str:
        """The tables, in a notebook."""
        return "".join(f"<p>{title}</p>{_tables.as_html(rows)}" for title, rows in self._tables())

    def to_markdown(self) -> str:
        """The tables in Markdown, with whole paths and operations: for an issue or a log."""
        parts = ((title, _tables.as_markdown(rows)) for title, rows in self._tables())
        return "\n\n".join(filter(None, (part for both in parts for part in both)))

    def _tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """The titles and rows of the tables. The first row has the names of columns."""
        rows: list[tuple[str, ...]] = [("pattern", "result", "saves", "where", "why")]
        for r, n in Counter(self.replaced).items():  # each layer of a model has the same
            result = f"{r.dtype}[{','.join(map(str, r.shape))}]"
            rows.append((_times(r.pattern, n), result, _tables.size(r.saves), r.where, r.why))
        tables = [(f"{_patterns(self.replaced)} replaced", rows if self.replaced else [])]
        if self.missed:
            alike: dict[tuple, list[Missed]] = {}
            for m in self.missed:
                alike.setdefault((m.pattern, m.where, m.reason), []).append(m)
            rows = [("pattern", "up to", "where", "why")]
            for (name, *rest), group in alike.items():
                rows.append((_times(name, len(group)), group[0].equation, *rest))
            tables.append((f"{_patterns(self.missed)} left", rows))
        return tables


def _patterns(found: tuple) -> str:
    return f"{len(found)} pattern{'s' * (len(found) != 1)}"


def _times(name: str, n: int) -> str:
    return name + f" ({n} times)" * (n > 1)


# ---- what plans say ------------------------------------------------------------------------------

_PUT_GRAD_AROUND = (
    "the function computes a derivative, in which patterns are not seen; put grad around autofuse: "
    "jax.grad(autofuse(f))"
)


def report_of(
    plans: list[Plan], function: Callable, report: Callable[[Callable], FuseReport]
) -> FuseReport:
    """The report of the plans of a function. ``report`` gives that of another function."""
    replaced, missed = [], []
    for plan in plans:
        for rewrite in reversed(plan.rewrites):
            root = rewrite.root
            if plan.rule:
                reason = f"the rule of {plan.rule} runs in a gradient; replaced only without one"
                missed.append(_missed(rewrite.name, root, reason))
                continue
            large = (v for v in rewrite.inner if v.size >= root.size and v.is_array)
            saves = sum(v.size * v.dtype.itemsize for v in large if v is not root)
            reason = "; ".join(filter(None, _reasons(plan, rewrite)))
            dtype = str(root.dtype)
            replaced.append(Replaced(rewrite.name, root.line, root.shape, dtype, saves, reason))
        taken = {v for rewrite in plan.rewrites for v in (*rewrite.inner, rewrite.root)}
        seen = set()
        for miss in reversed(plan.search.misses):
            shown = {miss.value, miss.value.source(narrowing=True).value, *miss.seen}
            key = miss.value, miss.name if miss.is_part else ""
            if plan.derivative is not None and miss.value.node.is_of_derivative:
                continue  # it has other patterns, which may be nearly these
            if (miss.is_part or not shown & taken) and key not in seen:
                seen.add(key)
                hidden = f"the rule of {plan.rule} hides it in a gradient"
                reason = hidden if plan.rule else miss.reason
                missed.append(_missed(miss.name, miss.value, reason))
    derivative = next((p.derivative for p in plans if p.derivative is not None), None)
    if derivative is not None:
        reason = _PUT_GRAD_AROUND + _would_replace(function, report)
        missed.insert(0, _missed("derivative", derivative, reason))
        if not replaced:
            warnings.warn(f"autofuse: nothing is replaced: {reason}", stacklevel=4)
    return FuseReport(tuple(replaced), tuple(missed))


def _reasons(plan: Plan, rewrite: Rewrite) -> Iterator[str]:
    """Why a match is replaced."""
    yield rewrite.note
    verdict = plan.verdicts.get(rewrite)
    if verdict is not None:
        yield verdict.reason
    if verdict is None or None in verdict.chosen:  # the table decides on a phase
        yield why(rewrite.call)
    if plan.why_not_tuned:
        yield f"not measured: {plan.why_not_tuned}"


def _would_replace(function: Callable, report: Callable[[Callable], FuseReport]) -> str:
    """What would be replaced in the function that, for example, ``jax.grad`` differentiates."""
    inner = inspect.unwrap(function)
    if inner is function:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = report(inner)
    except Exception:  # whatever the function raises: it may take other arguments
        return ""
    counts = Counter(r.pattern for r in found.replaced)
    names = ", ".join(_times(name, n) for name, n in counts.items())
    return f". This would replace {names}" if counts else ""


def _missed(name: str, value: Value, reason: str) -> Missed:
    if value.node is NO_EQUATION:
        return Missed(name, "", "", reason)
    equation = value.node.equation
    operands = ", ".join(v.aval.str_short() for v in equation.invars)
    return Missed(name, value.line, f"{equation.primitive.name}({operands})", reason)
