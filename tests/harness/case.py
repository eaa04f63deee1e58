"""Describes an op to the harness, and turns the description into tests."""

import contextlib
import dataclasses
import functools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.compat import strict, x64
from harness.numerics import DEFAULT_TOLERANCE, Tolerance, is_float, normal

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")

Arrays = tuple[np.ndarray, ...]


SLOW = pytest.mark.slow

# Patterns for `Case.quick`: what depends on the kernels of a case, and derivatives and maps, too.
VARIANT = (
    r"kernels|kept|modes|empty|examples|special|repeated_runs|views|linear_pullback|no_leaks"
    r"|export/symbolic"
    r"|sharded/\w+/\w+/[vw]|shard_map/\w+/vjp_inside"
)
# Also first and second derivatives, and maps of gradients: for another form of the same function.
OTHER_FORM = rf"{VARIANT}|value$|types|jvp$|vjp$|vmap_of_vjp/all|hvp/forward_over_reverse"
NESTED_VARIANT = (
    rf"{VARIANT}|differences|grad_of_vmap|vmap_of_.*/one|vmap_of_vmap|linearize/vmap/|vjp/transpose"
    r"|third/|checkpoint/scan"
)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """One way to shard the arguments over a mesh axis.

    Attributes:
      name: the sharded dimension: "batch", "features", ...
      inputs: for each argument the sharded dimension, or None for a replicated argument.
      outputs: the same for each output.
      forward_all_reduces: how many all-reduces the forward needs. Every other collective is an
        error.
      gradient_all_reduces: how many more the gradients need (one per summed parameter).
      shard_map: whether the op computes the same on a shard as on the whole array. Only then is it
        compared in `shard_map`.
      whole: the op needs the whole dimension, so its kernel cannot have it sharded.
    """

    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    forward_all_reduces: int = 0
    gradient_all_reduces: int = 0
    shard_map: bool = True
    whole: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """An op, its reference, and the inputs to test it with.

    Attributes:
      name: appears in the test's name.
      fn: the op, as a function of its array arguments only.
      reference: the function in `jax.numpy` that `fn` must equal.
      make_args: draws the arguments as NumPy arrays, from a random generator and a dtype. They must
        be small, because Hessians are computed.
      make_sharded_args: likewise, but every dimension that `shardings` names divides into 8 shards
        that the op accepts. Default: `make_args`.
      dtypes: the op's dtypes. Quick tests take the first one, and basic checks take all.
      differentiable: the arguments that have gradients. Default: those of a floating dtype.
      linear: the arguments in which the op is jointly linear, for `jax.linear_transpose`.
      exact: value, tangents and gradients have the reference's bits.
      tolerance: the error that an op may have if it is not exact.
      shardings: the dimensions over which the op shards, and the number of all-reduces.
      shards_under_vmap: a mapped axis can be sharded with no collective, whichever arguments it
        maps. False if that does not hold for mapped parameters and for their per-example gradients,
        where there is one call for each example.
      symbolic: for each argument the symbolic shape for `jax.export`, or None if the op takes fixed
        sizes only. Arrays without elements also have these shapes.
      empty: the letters of `symbolic` that may be 0. Default: all.
      sizes: sizes of the letters of `symbolic`. An exported program is called with arrays of these
        sizes, and repeated calls have the same bits.
      kernels: the kernels of a program with the values and all gradients. The first one runs
        without gradients, too.
      kernels_in_shards: they run on every device, whatever is sharded.
      only_kernels: the gradients need nothing but the kernels.
      sums_by_address: sums have another order if arrays begin elsewhere, so bits may differ.
      maps: sets of arguments. A map over those of a set has the same calls.
      one_user: the function whose first result is the first two results of `fn`, for two users.
      kept: takes the arguments, and returns the dtype and the size of each array that a backward
        pass keeps.
      shapes: a hypothesis strategy that draws one shape per argument (see properties.py).
      modes: the implementations under test. In the quick tests, the first one runs every check and
        the others run the basic checks. None does not set the implementation.
      thorough: the quick tests leave out no detail (see `Check`). Takes about a minute on one core.
      basic_only: only the basic checks run, and those of the kernels, for a case that differs from
        another one only in shapes or dtypes.
      quick: a pattern of the names of the checks that are quick tests, in place of the above.
      versions: other versions of JAX run all transforms, and all checks of shards and exports.
    """

    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    make_args: Callable[[np.random.Generator, Any], Arrays]
    make_sharded_args: Callable[[np.random.Generator, Any], Arrays] | None = None
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    differentiable: tuple[int, ...] | None = None
    linear: tuple[int, ...] = ()
    exact: bool = False
    tolerance: Tolerance = DEFAULT_TOLERANCE
    shardings: tuple[Sharding, ...] = ()
    shards_under_vmap: bool = True
    symbolic: tuple[str, ...] | None = None
    empty: str | None = None
    sizes: tuple[dict[str, int], ...] = ()
    kernels: tuple[str, ...] = ()
    kernels_in_shards: bool = True
    only_kernels: bool = False
    sums_by_address: bool = False
    maps: tuple[tuple[int, ...], ...] = ()
    one_user: Callable[..., Any] | None = None
    kept: Callable[..., Iterable[tuple[Any, int]]] | None = None
    shapes: Any = None
    modes: tuple[str | None, ...] = ("native", "auto")
    thorough: bool = False
    basic_only: bool = False
    quick: str = ""
    versions: bool = False

    def __repr__(self) -> str:
        return f"Case({self.name})"

    def rng(self, name: str) -> np.random.Generator:
        """A generator that depends only on the case and the check, to repeat a failure."""
        return np.random.default_rng(zlib.crc32(f"{self.name}/{name}".encode()))

    @property
    def example(self) -> Arrays:
        return self.make_args(self.rng("example"), jnp.dtype(self.dtypes[0]))

    @property
    def diff(self) -> tuple[int, ...]:
        """The indices of the differentiable arguments."""
        if self.differentiable is not None:
            return self.differentiable
        return tuple(i for i, arg in enumerate(self.example) if is_float(arg.dtype))

    @property
    def letters(self) -> list[str]:
        """The letters of the symbolic shapes, in the order in which they occur."""
        return list(dict.fromkeys(re.findall("[a-z]+", " ".join(self.symbolic or ()))))

    def sized(self, rng: np.random.Generator, dtype: Any, sizes: dict[str, int]) -> Arrays:
        """Arguments with these sizes of the letters of `symbolic`, and values of the example's."""
        shapes = [eval(f"({shape},)", {}, sizes) if shape else () for shape in self.symbolic]
        examples = self.make_args(rng, dtype)
        return tuple(resized(rng, *pair) for pair in zip(shapes, examples, strict=True))

    def subsets(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Named sets of arguments: each one, then all."""
        count = len(self.example)
        if count > 1:
            yield from ((f"x{i}", (i,)) for i in range(count))
        yield "all", tuple(range(count))


@dataclasses.dataclass(frozen=True)
class Check:
    """A named check of one case.

    Attributes:
      name: unique among the checks of a case.
      run: takes the case, the implementation mode and the dtype, and raises on failure.
      basic: a quick test in every dtype and in every mode. Other checks are quick tests only in the
        first dtype and mode.
      every_dtype: it also runs in the other dtypes, not only in the first one.
      every_mode: it also runs in the other modes, not only in the first one.
      detail: it differs from another check only in a detail. It is a quick test only if the case is
        `thorough`.
      nested: it nests transformations that other checks apply by themselves. It is a quick test
        only for the first case of a test.
      mapped: it maps examples, in the same way for every dtype. If it is basic, it is a quick test
        in every mode, but only in the first dtype.
      slow: it is never a quick test.
      runs_kernels: False if it only traces and compiles, runs references, or calls kernels with
        arrays as other checks do: it shows nothing new to the sanitizers.
      jax: the cases that it runs for on other versions of JAX: "every", the "first" of each test,
        or those with `versions`.
      module: the file that it is from.
    """

    name: str
    run: Callable[[Case, str | None, Any], None]
    basic: bool = False
    every_dtype: bool = True
    every_mode: bool = True
    detail: bool = False
    nested: bool = False
    mapped: bool = False
    slow: bool = False
    runs_kernels: bool = True
    jax: str = ""
    module: str = ""


@contextlib.contextmanager
def implementation(mode: str | None) -> Iterator[None]:
    """`fo.use_implementation(mode)`; nothing for None. With JAX_FASTOPS_TEST_SETTINGS=strict, also
    under JAX's strict settings."""
    import jax_fastops as fo

    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(fo.use_implementation(mode))
        if os.environ.get("JAX_FASTOPS_TEST_SETTINGS") == "strict":
            stack.enter_context(strict())
        yield


def resized(rng: np.random.Generator, shape: tuple[int, ...], example: np.ndarray) -> np.ndarray:
    """Values of the example, in another shape."""
    return rng.choice(example.reshape(-1), size=shape).astype(example.dtype)


def outputs(result: Any) -> tuple[Any, ...]:
    """An op's outputs as a flat tuple."""
    return tuple(jax.tree.leaves(result))


def float_outputs(result: Any) -> tuple[Any, ...]:
    """The outputs that have gradients."""
    return tuple(out for out in outputs(result) if is_float(out.dtype))


def of(
    fn: Callable[..., Any], args: Iterable[Any], indices: Iterable[int]
) -> Callable[..., tuple[Any, ...]]:
    """`fn` as a function of only the chosen arguments, returning its differentiable outputs."""
    args, indices = tuple(args), tuple(indices)
    return lambda *chosen: float_outputs(fn(*put(args, indices, chosen)))


def put(args: Iterable[Any], indices: Iterable[int], values: Iterable[Any]) -> tuple[Any, ...]:
    """`args` with some of them replaced."""
    full = list(args)
    for i, value in zip(indices, values, strict=True):
        full[i] = value
    return tuple(full)


def take(values: Iterable[Any], indices: Iterable[int]) -> tuple[Any, ...]:
    values = tuple(values)
    return tuple(values[i] for i in indices)


def like_outputs(case: Case, rng: np.random.Generator, args: Arrays) -> Arrays:
    """Random cotangents for the differentiable outputs."""
    with x64(any(arg.dtype == np.float64 for arg in args)):
        shapes = jax.eval_shape(lambda *a: float_outputs(case.reference(*a)), *args)
    return tuple(normal(rng, s.shape, s.dtype) for s in shapes)


def like(rng: np.random.Generator, args: Iterable[Any]) -> Arrays:
    """Random tangents for arguments."""
    return tuple(normal(rng, arg.shape, arg.dtype) for arg in args)


def draw(case: Case, dtype: Any, name: str, sizes: dict[str, int] | None = None):
    """Arguments, with these sizes if given, and cotangents."""
    rng = case.rng(name)
    args = case.make_args(rng, dtype) if sizes is None else case.sized(rng, dtype, sizes)
    return args, like_outputs(case, rng, args)


def all_checks(case: Case) -> list[Check]:
    """Every check that applies to a case."""
    from harness import export, kernels, properties, sharding, transforms

    found = [
        dataclasses.replace(check, module=module.__name__.removeprefix("harness."))
        for module in (transforms, sharding, export, properties, kernels)
        for check in module.checks(case)
    ]
    names = [check.name for check in found]
    assert len(set(names)) == len(names), f"{case}: two checks have one name"
    return [c for c in found if c.basic or c.module == "kernels" or not case.basic_only]


def find(
    case: Case, name: str, mode: str | None = None, dtype: str | None = None
) -> Callable[[], None]:
    """One check of a case by its name, ready to run."""
    (check,) = (check for check in all_checks(case) if check.name == name)
    return lambda: check.run(case, mode, jnp.dtype(dtype or case.dtypes[0]))


def runs(
    case: Case, check: Check, leads: bool
) -> Iterator[tuple[str | None, str, list[pytest.MarkDecorator]]]:
    """The modes and dtypes in which a check runs, and its marks there.

    Every mode occurs with the first dtype, and every dtype with the first mode. A case ``leads`` if
    it is the first one of its test. Checks of the kernels in float16 are slow if there is bfloat16,
    which has elements of the same size.
    """
    modes = case.modes if check.every_mode else case.modes[:1]
    dtypes = case.dtypes if check.every_dtype else case.dtypes[:1]
    quick = not check.slow and (case.thorough or not check.detail) and (leads or not check.nested)
    versions = check.jax == "every" or (check.jax == "first" and leads)
    if case.versions and check.module in ("transforms", "sharding", "export"):
        versions = True
    if case.quick:
        quick = re.match(case.quick, check.name) is not None
    for mode in modes:
        for dtype in dtypes:
            firsts = (mode == modes[0]) + (dtype == dtypes[0])
            if not firsts:
                continue
            basic = check.basic and (not check.mapped or dtype == dtypes[0])
            if check.module == "kernels" and dtype == "float16" and "bfloat16" in dtypes:
                basic = False
            marks = []
            if not (quick and (firsts == 2 or basic)):
                marks.append(SLOW)
            if check.module not in ("properties", "kernels") or not check.runs_kernels:
                marks.append(pytest.mark.transform)
            if firsts == 2 and versions:
                marks.append(pytest.mark.jax)
            yield mode, dtype, marks


WITHOUT_SLOW = False  # `checks` leaves out slow tests
DECLARED: list[Case] = []  # the cases of all test files that are imported


def checks(*cases: Case) -> pytest.MarkDecorator:
    """Parametrizes a test over every check of the cases; the test calls its argument `check`."""
    DECLARED.extend(cases)
    found = []
    for case in cases:
        for check in all_checks(case):
            for mode, dtype, marks in runs(case, check, leads=case is cases[0]):
                if WITHOUT_SLOW and SLOW in marks:
                    continue
                found.append(
                    pytest.param(
                        functools.partial(check.run, case, mode, jnp.dtype(dtype)),
                        id="-".join(filter(None, (case.name, mode, dtype, check.name))),
                        marks=marks,
                    )
                )
    return pytest.mark.parametrize("check", found)
