"""Checks of `jax.export`: a program is serialized, deserialized, and called."""

import collections
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import numpy as np
from jax.sharding import AxisType, NamedSharding

import jax_fastops as fo
from harness.case import Case, Check, draw, implementation, of, outputs, take
from harness.compat import x64
from harness.sharding import Layout, assert_collectives, layout_program, mesh_for, unsharded
from harness.transforms import Expected, kept, oracle

PLATFORMS = ("cpu", "cuda")


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


def expected(case: Case, values, count: int, dtype: Any) -> Expected:
    """The results of the reference, and of the oracle if the op is not exact."""
    reference = kept(program, case.reference, case, count)
    exact = None if case.exact else oracle(reference, *values, case=case, name=count)
    return Expected(reference, values, dtype == np.float64, exact)


def run_export(platforms: tuple[str, ...] | None, case: Case, mode: str | None, dtype: Any) -> None:
    args, cotangents = draw(case, dtype, "export")
    values, count = (*args, *cotangents), len(args)
    with x64(dtype == np.float64):
        with implementation(mode):
            exported = jax.export.export(
                jax.jit(program(case.fn, case, count)),
                platforms=platforms,
                disabled_checks=fo.export_checks(),
            )(*values)
        assert exported.platforms == (platforms or (jax.default_backend().replace("gpu", "cuda"),))
        if case.kernels and mode == "native":
            assert_named(exported, case.kernels)
        got = reexport(exported).call(*values)
    expected(case, values, count, dtype).check(got, case.tolerance)


def assert_named(exported: jax.export.Exported, kernels: tuple[str, ...]) -> None:
    """The program calls the kernels of each of its platforms that was built."""
    modules = fo.info()["modules"]
    built = sum(bool(modules[platform]) for platform in exported.platforms)
    found = collections.Counter(re.findall(r"@jax_fastops\.(\w+?)\.v", exported.mlir_module()))
    assert found == {name: built * count for name, count in collections.Counter(kernels).items()}


def run_other_platform(case: Case, mode: str | None, dtype: Any) -> None:
    """A platform without kernels takes the reference."""
    args, cotangents = draw(case, dtype, "export")
    run = jax.jit(program(case.fn, case, len(args)))
    with x64(dtype == np.float64), implementation(mode):
        exported = jax.export.export(run, platforms=["tpu"], disabled_checks=fo.export_checks())(
            *args, *cotangents
        )
    assert "custom_call @jax_fastops" not in exported.mlir_module()


def run_export_with_gradient(case: Case, mode: str | None, dtype: Any) -> None:
    """Only the forward is exported, with its pullback. It is differentiated after it is loaded."""
    args, cotangents = draw(case, dtype, "export")
    values, count = (*args, *cotangents), len(args)
    with x64(dtype == np.float64):
        with implementation(mode):
            exported = jax.export.export(jax.jit(case.fn), disabled_checks=fo.export_checks())(
                *args
            )
            back = reexport(exported, vjp_order=1)
        got = jax.jit(program(back.call, case, count))(*values)
    expected(case, values, count, dtype).check(got, case.tolerance)


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
                jax.jit(program(case.fn, case, count)), disabled_checks=fo.export_checks()
            )(*symbols, *outs)
        back = reexport(exported)
        ones = dict.fromkeys(case.letters, 1)
        for sizes in (None, ones, *case.sizes):
            args, cotangents = draw(case, dtype, "export", sizes)
            values = (*args, *cotangents)
            want = expected(case, values, count, dtype)
            want.check(back.call(*values), case.tolerance, f"result of {sizes}")


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
                jax.jit(forward.make(case.fn)), disabled_checks=fo.export_checks()
            )(*placed)
        compiled = jax.jit(reexport(exported).call).lower(*placed).compile()
        got = compiled(*placed)
    want = unsharded(case, forward, (layout.name, False), not case.exact)
    want.check(got, case.tolerance)
    assert_collectives(compiled.as_text(), layout.all_reduces(False))


def checks(case: Case) -> Iterator[Check]:
    check = functools.partial(Check, jax="first")
    yield check("export", functools.partial(run_export, None))
    yield check("export/platforms", functools.partial(run_export, PLATFORMS))
    yield check("export/other_platform", run_other_platform, every_dtype=False, every_mode=False)
    if case.diff:
        yield check("export/vjp", run_export_with_gradient)
    if case.symbolic:
        yield Check("export/symbolic", run_symbolic, jax="every")
    if case.shardings:
        yield check("export/sharded", run_sharded)
