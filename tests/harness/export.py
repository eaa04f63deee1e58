"""Checks of `jax.export`: a program is serialized, deserialized, and called."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import numpy as np
from jax.sharding import AxisType, NamedSharding

from harness.case import Case, Check, implementation, like_outputs, of, outputs, take
from harness.compat import x64
from harness.numerics import assert_matches
from harness.sharding import Layout, assert_collectives, layout_program, mesh_for, unsharded
from harness.transforms import kept, oracle

PLATFORMS = ("cpu", "cuda")


def disabled_checks() -> list[Any]:
    try:
        import jax_fastops as fo
    except ImportError:  # the harness' own tests use ops that need none
        return []
    return fo.export_checks()


def program(fn, case: Case, count: int):
    """Outputs and gradients in one program."""

    def run(*values):
        args, cotangents = values[:count], values[count:]
        if not case.diff:
            return outputs(fn(*args))
        out, pullback = jax.vjp(of(fn, args, case.diff), *take(args, case.diff))
        return out, pullback(cotangents)

    return run


def reexport(exported: jax.export.Exported, **kwargs: Any) -> jax.export.Exported:
    return jax.export.deserialize(exported.serialize(**kwargs))


def expected(case: Case, values, count: int):
    """The results of the reference, and of the oracle if the op is not exact."""
    reference = kept(program, case.reference, case, count)
    return jax.jit(reference)(*values), None if case.exact else oracle(reference, *values)


def draw(case: Case, dtype: Any, name: str):
    rng = case.rng(name)
    args = case.make_args(rng, dtype)
    return args, like_outputs(case, rng, args)


def run_export(platforms: tuple[str, ...] | None, case: Case, mode: str | None, dtype: Any) -> None:
    args, cotangents = draw(case, dtype, "export")
    values, count = (*args, *cotangents), len(args)
    with x64(dtype == np.float64):
        with implementation(mode):
            exported = jax.export.export(
                jax.jit(program(case.fn, case, count)),
                platforms=platforms,
                disabled_checks=disabled_checks(),
            )(*values)
        assert exported.platforms == (platforms or (jax.default_backend().replace("gpu", "cuda"),))
        got = reexport(exported).call(*values)
        want, exact = expected(case, values, count)
    assert_matches(got, want, exact, case.tolerance)


def run_export_with_gradient(case: Case, mode: str | None, dtype: Any) -> None:
    """Only the forward is exported, with its pullback. It is differentiated after it is loaded."""
    args, cotangents = draw(case, dtype, "export")
    values, count = (*args, *cotangents), len(args)
    with x64(dtype == np.float64):
        with implementation(mode):
            exported = jax.export.export(jax.jit(case.fn), disabled_checks=disabled_checks())(*args)
            back = reexport(exported, vjp_order=1)
        got = jax.jit(program(back.call, case, count))(*values)
        want, exact = expected(case, values, count)
    assert_matches(got, want, exact, case.tolerance)


def run_symbolic(case: Case, mode: str | None, dtype: Any) -> None:
    """One export serves every size of the symbolic dimensions."""
    args, cotangents = draw(case, dtype, "export")
    values, count = (*args, *cotangents), len(args)
    scope = jax.export.SymbolicScope()
    symbols = tuple(
        jax.ShapeDtypeStruct(
            jax.export.symbolic_shape(shape, scope=scope, like=arg.shape), arg.dtype
        )
        for shape, arg in zip(case.symbolic, args, strict=True)
    )
    with x64(dtype == np.float64):
        outs = jax.eval_shape(lambda *a: of(case.reference, a, ())(), *symbols)
        with implementation(mode):
            exported = jax.export.export(
                jax.jit(program(case.fn, case, count)), disabled_checks=disabled_checks()
            )(*symbols, *outs)
        got = reexport(exported).call(*values)
        want, exact = expected(case, values, count)
    assert_matches(got, want, exact, case.tolerance)


def run_sharded(case: Case, mode: str | None, dtype: Any) -> None:
    """A program exported for a mesh is still sharded, with no collective, when it is called."""
    layout = Layout(case.shardings[:1])
    mesh = mesh_for(AxisType.Auto)
    forward = layout_program(layout, False, case, dtype)
    with x64(dtype == np.float64):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip(forward.args, forward.specs, strict=True)
        ]
        with implementation(mode):
            exported = jax.export.export(
                jax.jit(forward.make(case.fn)), disabled_checks=disabled_checks()
            )(*placed)
        compiled = jax.jit(reexport(exported).call).lower(*placed).compile()
        got = compiled(*placed)
    want, exact = unsharded(case, forward, (layout.name, False), not case.exact)
    assert_matches(got, want, exact, case.tolerance)
    assert_collectives(compiled.as_text(), layout.all_reduces(False))


def checks(case: Case) -> Iterator[Check]:
    yield Check("export", functools.partial(run_export, None))
    yield Check("export/platforms", functools.partial(run_export, PLATFORMS))
    if case.diff:
        yield Check("export/vjp", run_export_with_gradient)
    if case.symbolic:
        yield Check("export/symbolic", run_symbolic)
    if case.shardings:
        yield Check("export/sharded", run_sharded)
