"""Checks over a mesh: values equal the unsharded ones, results stay sharded, and the program has no
collective that is not needed.

Forward and backward are compiled separately. The backward takes its cotangents as arguments,
sharded like the outputs. Collectives are counted in the whole compiled program. The checks need two
devices, and use up to eight.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from harness.case import (
    SLOW,
    Case,
    Check,
    Sharding,
    float_outputs,
    implementation,
    like_outputs,
    of,
    outputs,
    take,
)
from harness.compat import make_mesh, x64
from harness.programs import targets
from harness.transforms import Expected, oracle

COLLECTIVE = re.compile(
    r"\s(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?\("
)

# A layout is a list of shardings, each over the mesh axis of the same position.
AXES = ("a", "b")


# Kinds of mesh axes; meshes of eight devices for the models.
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
over_kinds = pytest.mark.parametrize("axis_type", KINDS.values(), ids=KINDS)
MESHES = {
    "data": {"data": 8},
    "tensor": {"data": 4, "tensor": 2},
    "sequence": {"data": 4, "sequence": 2},
    "all": {"data": 2, "tensor": 2, "sequence": 2},
}


def over_meshes(networks: Iterable[str], meshes: Iterable[str] = MESHES):
    """Parametrizes a test by ``over``, ``kind`` and ``name``, a mesh, its axes and a network.

    Quick are the first network over all axes, of both kinds, and every other mesh and every other
    network once. Other versions of JAX run the first network over all axes, and the last one.
    """
    first, *_, last = networks
    others = [(over, first) for over in meshes if over != "all"]
    others += [("all", name) for name in networks if name != first]
    quick = [("all", kind, first) for kind in KINDS]
    quick += [
        (over, kind, name)
        for (over, name), kind in zip(others, itertools.cycle(KINDS), strict=False)
    ]

    def marks(over, kind, name):
        if (over, kind, name) not in quick:
            return SLOW
        return pytest.mark.jax if over == "all" and name in (first, last) else ()

    cases = itertools.product(meshes, KINDS, networks)
    return pytest.mark.parametrize(
        ("over", "kind", "name"),
        [pytest.param(*case, marks=marks(*case)) for case in cases],
    )


def device_count() -> int:
    return min(8, 1 << (len(jax.devices()).bit_length() - 1))


def mesh_for(axis_type: AxisType, axes: int = 1, name: str = "a") -> Mesh:
    """All devices, as one axis (with that name) or as two."""
    count = device_count()
    if count < 2:
        pytest.skip("needs two devices")
    return make_mesh({name: count} if axes == 1 else {"a": 2, "b": count // 2}, axis_type)


def collectives(compiled: str) -> dict[str, int]:
    """How many collective operations of each kind a compiled program has."""
    return dict(collections.Counter(COLLECTIVE.findall(compiled)))


def assert_collectives(compiled: str, all_reduces: int, axes: int = 1) -> None:
    """No collectives; or only all-reduces, 1 to `all_reduces` per axis, as XLA may combine them."""
    found = collectives(compiled)
    if all_reduces == 0:
        assert not found, f"the program communicates: {found}"
    else:
        count = found.pop("all-reduce", 0)
        assert not found, f"the program communicates otherwise than by all-reduces: {found}"
        assert 1 <= count <= all_reduces * axes, (
            f"{count} all-reduces; {all_reduces} sums are needed"
        )


def over_mesh(mesh: Mesh, fn: Callable[..., Any], values: Any, specs: Any) -> tuple[Any, str]:
    """The results of `fn(*values)` over a mesh, and the text of the compiled program.

    Args:
      mesh: the devices.
      fn: the function.
      values: its arguments.
      specs: their shardings, a pytree that is a prefix of `values`.
    """
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P)
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put(values, shardings)
        program = jax.jit(fn).lower(*placed).compile()
        return program(*placed), program.as_text()


def spec(ndim: int, dims: Sequence[int | None]) -> P:
    """A spec in which `dims[k]` is sharded over mesh axis k. Two axes may shard one dimension."""
    parts: list[Any] = [()] * ndim
    for axis, dim in zip(AXES, dims, strict=False):
        if dim is not None:
            parts[dim] = (*parts[dim], axis)
    return P(*(part[0] if len(part) == 1 else part or None for part in parts))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shardings over the axes of a mesh, one or two of them."""

    shardings: tuple[Sharding, ...]

    @property
    def name(self) -> str:
        return "+".join(sharding.name for sharding in self.shardings)

    def inputs(self, args: Sequence[Any]) -> tuple[P, ...]:
        return tuple(
            spec(arg.ndim, [s.inputs[i] for s in self.shardings]) for i, arg in enumerate(args)
        )

    def outputs(self, outs: Sequence[Any]) -> tuple[P, ...]:
        return tuple(
            spec(out.ndim, [s.outputs[i] for s in self.shardings]) for i, out in enumerate(outs)
        )

    def all_reduces(self, backward: bool, linear: bool = False) -> int:
        """The gradients of a linear op need no forward."""
        forward = sum(s.forward_all_reduces for s in self.shardings) * (not (backward and linear))
        return forward + backward * sum(s.gradient_all_reduces for s in self.shardings)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to run over a mesh: `make(fn)` takes flat arguments, sharded like `specs`."""

    make: Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]
    args: tuple[Any, ...]
    specs: tuple[P, ...]
    results: tuple[P, ...]


def forward_program(args, in_specs, out_specs) -> Program:
    return Program(
        lambda fn: lambda *args: outputs(fn(*args)), tuple(args), tuple(in_specs), tuple(out_specs)
    )


def backward_program(case: Case, args, cotangents, in_specs, out_specs) -> Program:
    """The gradients of all differentiable arguments."""
    count = len(args)

    def make(fn):
        def gradients(*values):
            args, cotangents = values[:count], values[count:]
            pullback = jax.vjp(of(fn, args, case.diff), *take(args, case.diff))[1]
            return pullback(cotangents)

        return gradients

    return Program(make, (*args, *cotangents), (*in_specs, *out_specs), take(in_specs, case.diff))


def unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def shard_map(mesh: Mesh, program: Program) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`jax.shard_map`, with the specs of a program."""
    return functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=program.specs,
        out_specs=program.results,
        check_vma=True,
    )


def unsharded(case: Case, program: Program, key: Any, with_oracle: bool) -> Expected:
    """The results of the reference on one device, and of the oracle. Many checks share them."""
    name, key = key, (case, program.args[0].dtype, with_oracle, key)
    if key not in _unsharded:
        fn, exact = program.make(case.reference), None
        if with_oracle:
            exact = oracle(fn, *program.args, case=case, name=name)
        wide = program.args[0].dtype == np.float64
        _unsharded[key] = Expected(fn, program.args, wide, exact)
    return _unsharded[key]


_unsharded: dict[Any, Expected] = {}


def compare(
    case: Case,
    mode: str | None,
    mesh: Mesh,
    program: Program,
    key: Any,
    all_reduces: int,
    *,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = unwrapped,
    plain: Program | None = None,
    compiled: bool = True,
    context: bool = True,
    kernels: Iterable[str] = (),
) -> None:
    """Runs a program over the mesh and compares it with the unsharded reference.

    Args:
      case, mode: the op and its implementation.
      mesh: the devices.
      program: applies the op.
      key: identifies inputs and program among all programs of the case.
      all_reduces: how many all-reduces the program needs.
      wrap: is applied to the program, for example `jax.shard_map`.
      plain: the program for the unsharded reference. Default: the same.
      compiled: under `jax.jit`, where collectives are counted; otherwise operation by operation.
      context: the mesh is set as the current one, which Auto mode does not need.
      kernels: run on each device.
    """
    expected = unsharded(case, plain or program, key, not case.exact or all_reduces > 0)
    types: list[Any] = []

    def watched(*args):
        results = wrap(program.make(case.fn))(*args)
        types[:] = [jax.typeof(r).sharding.spec for r in results]
        return results

    current = jax.set_mesh(mesh) if context else contextlib.nullcontext()
    with x64(program.args[0].dtype == np.float64), current, implementation(mode):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip(program.args, program.specs, strict=True)
        ]
        if compiled:
            executable = jax.jit(watched).lower(*placed).compile()
            got = executable(*placed)
        else:
            got = watched(*placed)
    for k, (result, where) in enumerate(zip(got, program.results, strict=True)):
        if any(where):
            assert_layout(f"result {k}", result, NamedSharding(mesh, where))
            if AxisType.Explicit in mesh.axis_types:
                full = P(*(*where, *[None] * result.ndim)[: result.ndim])
                assert P(*types[k]) == full, f"result {k} has the type {types[k]}, not {full}"
    tolerance = case.tolerance
    if expected.exact is not None:  # shards add up sums in another order than one device does
        tolerance = dataclasses.replace(tolerance, ulps=max(tolerance.ulps, 8.0))
    expected.check(got, tolerance)
    if compiled:
        text = executable.as_text()
        assert_collectives(text, all_reduces, len(mesh.axis_names))
        assert set(kernels) <= set(targets(text)), f"{kernels} do not run"


def assert_layout(name: str, result: jax.Array, sharding: NamedSharding) -> None:
    assert result.sharding.is_equivalent_to(sharding, result.ndim), (
        f"{name} is laid out as {result.sharding}, not as {sharding}"
    )
    # The sharding is only a label. The data on each device must have the size of a shard, too.
    shape = sharding.shard_shape(result.shape)
    assert all(shard.data.shape == shape for shard in result.addressable_shards)


def sharded_inputs(case: Case, name: str, dtype: Any):
    rng = case.rng(name)
    args = (case.make_sharded_args or case.make_args)(rng, dtype)
    return args, like_outputs(case, rng, args)


def output_types(case: Case, args: Sequence[Any]) -> tuple[Any, ...]:
    with x64(any(arg.dtype == np.float64 for arg in args)):
        return outputs(jax.eval_shape(case.reference, *args))


def layout_program(layout: Layout, backward: bool, case: Case, dtype: Any) -> Program:
    args, cotangents = sharded_inputs(case, layout.name, dtype)
    outs = output_types(case, args)
    in_specs = layout.inputs(args)
    if backward:
        cotangent_specs = layout.outputs(float_outputs(outs))
        return backward_program(case, args, cotangents, in_specs, cotangent_specs)
    return forward_program(args, in_specs, layout.outputs(outs))


def kernels_of(case: Case, mode: str | None, layout: Layout, backward: bool) -> tuple[str, ...]:
    """The kernels that run on each device; not known where the forward sums over devices."""
    if mode != "native" or not case.kernels_in_shards or layout.all_reduces(backward=False):
        return ()
    return case.kernels[1:] if backward and case.diff else case.kernels[:1]


def run_jit(layout, axis_type, backward, case, mode, dtype, compiled=True) -> None:
    """The op with arguments that are sharded over the mesh."""
    axes = len(layout.shardings)
    mesh = mesh_for(axis_type, axes)
    program = layout_program(layout, backward, case, dtype)
    compare(
        case,
        mode,
        mesh,
        program,
        (layout.name, backward),
        layout.all_reduces(backward, set(case.diff) <= set(case.linear)),
        compiled=compiled,
        context=axis_type == AxisType.Explicit or axes == 2,
        kernels=kernels_of(case, mode, layout, backward),
    )


def run_shard_map(layout, direction, case, mode, dtype) -> None:
    """The op inside `jax.shard_map`, differentiated inside, from outside, or not at all."""
    mesh = mesh_for(AxisType.Auto, len(layout.shardings))
    forward = layout_program(layout, False, case, dtype)
    backward = layout_program(layout, True, case, dtype) if case.diff else forward
    over_mesh = functools.partial(shard_map, mesh)
    if direction == "wrong_specs":
        for program in (forward, backward):
            wrong_specs(case, mode, program, over_mesh)
        return
    program, wrap = (forward if direction == "value" else backward), None
    if direction == "vjp_outside":
        mapped = over_mesh(forward)
        outside = lambda fn: backward.make(mapped(forward.make(fn)))  # noqa: E731
        program, wrap = dataclasses.replace(backward, make=outside), unwrapped
    compare(
        case,
        mode,
        mesh,
        program,
        (layout.name, direction != "value"),
        layout.all_reduces(direction != "value"),
        wrap=wrap or over_mesh(program),
        plain=forward if direction == "value" else backward,
        kernels=kernels_of(case, mode, layout, direction != "value"),
    )


def run_whole(sharding, axis_type, case, mode, dtype) -> None:
    """The op needs a whole dimension. Over auto axes it is gathered. Over explicit ones, the
    reference computes what is sharded, and sums over the devices."""
    mesh = mesh_for(axis_type)
    layout = Layout((sharding,))
    program = layout_program(layout, bool(case.diff), case, dtype)
    expected = unsharded(case, program, (layout.name, bool(case.diff)), with_oracle=True)
    with x64(dtype == np.float64), implementation(mode):
        got, text = over_mesh(mesh, program.make(case.fn), program.args, program.specs)
    expected.check(got, case.tolerance)
    if axis_type == AxisType.Explicit:
        for k, (result, where) in enumerate(zip(got, program.results, strict=True)):
            assert_layout(f"result {k}", result, NamedSharding(mesh, where))
        assert set(collectives(text)) <= {"all-reduce"} and not targets(text)
    elif case.kernels and mode == "native":
        assert targets(text) == sorted(case.kernels)


def run_uneven(case, mode, dtype) -> None:
    """The devices of an auto axis do not divide the first operand's dimensions."""
    mesh = mesh_for(AxisType.Auto)
    args = case.make_args(case.rng("uneven"), dtype)
    cotangents = like_outputs(case, case.rng("uneven"), args)
    ranks = [a.ndim for a in (*args, *cotangents)]
    program = backward_program(case, args, cotangents, ranks, ranks)

    def everywhere(*values):
        x, *rest = values
        places = [NamedSharding(mesh, spec(x.ndim, [dim])) for dim in range(x.ndim)]
        run = program.make(case.fn)
        return [run(jax.lax.with_sharding_constraint(x, place), *rest) for place in places]

    expected = unsharded(case, program, "uneven", with_oracle=True)
    with x64(dtype == np.float64), implementation(mode):
        found = jax.jit(everywhere)(*program.args)
    for got in found:
        expected.check(got, case.tolerance)


def wrong_specs(case, mode, program, over_mesh) -> None:
    """A result that varies over the mesh must not be accepted as one that does not."""
    with x64(program.args[0].dtype == np.float64), implementation(mode):
        for k, result in enumerate(program.results):
            if not any(result):
                continue
            results = [P() if i == k else r for i, r in enumerate(program.results)]
            wrong = over_mesh(dataclasses.replace(program, results=tuple(results)))
            with pytest.raises(ValueError, match="out_specs"):
                jax.eval_shape(wrong(program.make(case.fn)), *program.args)


def example_program(
    case: Case, subset: tuple[int, ...], count: int, backward: bool, dtype: Any
) -> Program:
    """A program for `count` examples, in which the arguments of `subset` are stacks.

    The stacks and the cotangents are sharded over the mesh. The other arguments are replicated.
    """
    rng = case.rng(f"examples{subset}{count}")
    draws = [case.make_args(rng, dtype) for _ in range(count)]
    args = tuple(
        np.stack([draw[i] for draw in draws]) if i in subset else single
        for i, single in enumerate(draws[0])
    )
    specs = [P("a") if i in subset else P() for i in range(len(args))]
    if not backward:
        return forward_program(args, specs, [P("a")] * len(output_types(case, draws[0])))
    cotangents = [like_outputs(case, rng, draws[0]) for _ in range(count)]
    stacks = [np.stack(c) for c in zip(*cotangents, strict=True)]
    return backward_program(case, args, stacks, specs, [P("a")] * len(stacks))


def run_mixed(subset, backward, case, mode, dtype) -> None:
    """In `shard_map`, some arguments differ between devices; the others are replicated."""
    mesh = mesh_for(AxisType.Auto)
    program = example_program(case, subset, device_count(), backward, dtype)

    def of_one(fn):
        """The op of one example, as a function of stacks of one."""

        def one(*args):
            picked = (arg[0] if i in subset else arg for i, arg in enumerate(args))
            return tuple(out[None] for out in outputs(fn(*picked)))

        return one

    def of_each(fn):
        axes = tuple(0 if i in subset else None for i in range(len(case.example)))
        return lambda *args: outputs(jax.vmap(fn, axes)(*args))

    compare(
        case,
        mode,
        mesh,
        dataclasses.replace(program, make=lambda fn: program.make(of_one(fn))),
        ("varying", subset, backward),
        sum(i not in subset for i in case.diff) if backward else 0,
        wrap=shard_map(mesh, program),
        plain=dataclasses.replace(program, make=lambda fn: program.make(of_each(fn))),
    )


def run_vmap(subset, kind, backward, case, mode, dtype) -> None:
    """A mapped axis is sharded: neither examples nor per-example gradients move."""
    mesh = mesh_for(AxisType.Explicit if kind == "explicit" else AxisType.Auto, 1)
    single = example_program(case, subset, 2 * device_count(), backward, dtype)
    axes = tuple(0 if any(s) else None for s in single.specs)
    results = (P("a"),) * len(single.results)

    def program(spmd_axis_name):
        def make(fn):
            return jax.vmap(single.make(fn), axes, spmd_axis_name=spmd_axis_name)

        return dataclasses.replace(single, make=make, results=results)

    mapped = program("a" if kind == "auto" else None)
    compare(
        case,
        mode,
        mesh,
        mapped,
        ("vmap", subset, backward),
        0,
        wrap=shard_map(mesh, mapped) if kind == "shard_map" else unwrapped,
        plain=program(None),
    )


def layouts(case: Case) -> Iterator[Layout]:
    """Each sharding on one mesh axis, each pair on two, and each single one on two."""
    free = [sharding for sharding in case.shardings if not sharding.whole]
    for sharding in free:
        yield Layout((sharding,))
    for pair in itertools.combinations(free, 2):
        yield Layout(pair)
    for sharding in free:
        yield Layout((sharding, sharding))


# An op's sharding does not depend on its dtype.
check = functools.partial(Check, every_dtype=False)


def layout_checks(case: Case, layout: Layout) -> Iterator[Check]:
    partial = functools.partial
    two = len(layout.shardings) == 2
    # One dimension over two mesh axes is a similar check for every dimension.
    slow = two and layout.shardings[0] == layout.shardings[1] != case.shardings[0]
    # On other versions of JAX: the first dimension of every case, and the others of first cases.
    first = layout.shardings == case.shardings[:1]
    versions = "every" if first else "first"
    for kind, axis_type in KINDS.items():
        name = f"sharded/{kind}/{layout.name}"
        value = partial(run_jit, layout, axis_type, False)
        yield check(f"{name}/value", value, detail=two, slow=slow, jax=versions)
        if case.diff:
            vjp = partial(run_jit, layout, axis_type, True)
            yield check(f"{name}/vjp", vjp, slow=slow, jax=versions)
        if first:
            eager = partial(run_jit, layout, axis_type, bool(case.diff), compiled=False)
            yield check(f"{name}/eager", eager, detail=True)
    if all(sharding.shard_map for sharding in layout.shardings):
        for kind in ("value", "vjp_inside", "vjp_outside", "wrong_specs"):
            if case.diff or not kind.startswith("vjp"):
                run = partial(run_shard_map, layout, kind)
                detail = two or kind == "value"
                name = f"shard_map/{layout.name}/{kind}"
                yield check(name, run, detail=detail, slow=slow, jax="first" if first else "")


def checks(case: Case) -> Iterator[Check]:
    partial = functools.partial
    for layout in layouts(case):
        yield from layout_checks(case, layout)
    for sharding in case.shardings:
        if sharding.whole:
            for kind, axis_type in KINDS.items():
                run = partial(run_whole, sharding, axis_type)
                yield check(f"sharded/{kind}/{sharding.name}/whole", run, jax="every")
    if case.shardings and case.diff:
        yield check("sharded/auto/uneven", run_uneven, jax="first")
    for name, subset in case.subsets():
        everything = len(subset) == len(case.example)
        for backward in (False, True) if case.diff else (False,):
            what = f"{name}/{'vjp' if backward else 'value'}"
            if not everything:
                yield check(f"shard_map/varying/{what}", partial(run_mixed, subset, backward))
            if not (everything or case.shards_under_vmap):
                continue
            # In shard_map JAX sums the gradients of a replicated argument over the devices. It has
            # no per-example gradients, so in shard_map every argument is a stack.
            for kind in ("auto", "explicit", *(["shard_map"] if everything else [])):
                run = partial(run_vmap, subset, kind, backward)
                detail = not (backward and everything)
                yield check(f"sharded_vmap/{kind}/{what}", run, detail=detail, jax="first")
