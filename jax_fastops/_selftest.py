"""``python -m jax_fastops --selftest``: every op's kernel against its reference, on each device.

An op is called on an aligned and on an odd shape, in float32 and bfloat16, forward and gradient.
The expected values come from the reference in float32, for the same rounded operands. Where no
kernel runs, the table says "reference". On the CPU that is a failure, because every package has
CPU kernels. The times are of forward and gradient in float32, on larger arrays on a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_fastops as fo
from jax_fastops._registry import Example, constant, families

DTYPES = (jnp.float32, jnp.bfloat16)
# The largest error of an array, relative to its largest element.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.5e-2}
RUNS, IN_FLIGHT = 5, 8
# A GPU is timed with so many times the rows: else the time is that of the host.
MORE_ROWS = {"cpu": 1, "gpu": 64}


def _step(function: Callable[..., Any], cotangent: Callable = lambda y: y) -> Callable[..., Any]:
    """The result and the gradients, for a cotangent that depends on the result."""

    def step(*args):
        out, pull = jax.vjp(function, *args)
        return out, pull(jax.tree.map(cotangent, out))

    return step


def _exact(y):
    """A cotangent that bfloat16 holds exactly.

    It is constant: XLA may leave out a traced rounding in one program and keep it in another.
    """
    values = np.cos(np.arange(y.size)).astype(jnp.bfloat16)
    return constant(values.reshape(y.shape).astype(y.dtype))


def _operands(shapes: Iterable[tuple[int, ...]], device: Any) -> list[Any]:
    """Operands that bfloat16 holds exactly."""
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(s).astype(jnp.bfloat16).astype(np.float32) for s in shapes]
    return [jax.device_put(x, device) for x in operands]


def error_of(got: Any, expected: Any) -> float:
    """The largest error, relative to each array's largest element. NaN if any element is NaN."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    errors = []
    for a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        errors.append(np.max(np.abs(a - b)) / max(1.0, np.max(np.abs(b))))
    return float(np.max(errors))


def _time(compiled: Callable[..., Any], args: list[Any]) -> float:
    """The least seconds of a call, of which several are in flight."""
    taken = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(IN_FLIGHT)])
        taken.append((time.perf_counter() - start) / IN_FLIGHT)
    return min(taken)


def _compiled(implementation: str, step: Callable[..., Any], args: list[Any]):
    """The compiled function, and whether a kernel is in it."""
    with fo.use_implementation(implementation):
        lowered = jax.jit(step).lower(*args)
    return lowered.compile(), "@jax_fastops." in lowered.as_text()


class Checked(NamedTuple):
    """What was found of a call: the largest error in each dtype, and whether kernels ran."""

    errors: dict[str, float]
    kernels: bool
    timed: list[Callable[..., Any]]  # kernel and reference
    shapes: list[tuple[int, ...]]  # of the operands that are timed


def check(call: Example, device: Any) -> Checked | Exception:
    """Compares kernel and reference, and compiles what is timed."""
    try:
        return _check(call, device)
    except Exception as error:
        return error


def _check(call: Example, device: Any) -> Checked:
    errors = {jnp.dtype(d).name: 0.0 for d in DTYPES}
    kernels, step = True, _step(call.function, _exact)
    for shapes in call.shapes:
        args = _operands(shapes, device)
        reference, _ = _compiled("xla", step, args)
        expected = reference(*args)
        for dtype in DTYPES:
            given = [x.astype(dtype) for x in args]
            kernel, present = _compiled("native", step, given)
            kernels &= present
            error = error_of(kernel(*given), expected)
            errors[jnp.dtype(dtype).name] = float(np.maximum(errors[jnp.dtype(dtype).name], error))
    more = MORE_ROWS[device.platform]
    shapes = [(more * s[0], *s[1:]) if len(s) > 1 else s for s in call.shapes[0]]
    place = jax.sharding.SingleDeviceSharding(device)
    types = [jax.ShapeDtypeStruct(shape, np.float32, sharding=place) for shape in shapes]
    timed = [_compiled(name, _step(call.function), types)[0] for name in ("native", "xla")]
    return Checked(errors, kernels, timed, shapes)


def _devices() -> list[Any]:
    found = []
    for platform in ("cpu", "cuda"):
        try:
            found.append(jax.local_devices(backend=platform)[0])
        except RuntimeError:
            continue
    return found


def main() -> int:
    """Prints the table. Returns the exit status: 1 if an op fails."""
    start, failed = time.perf_counter(), 0
    devices = _devices()
    if not devices:
        print("no CPU and no CUDA device: nothing was tested")
        return 1
    calls = {name: call for family in families().values() for name, call in family.items()}
    for device in devices:
        print(f"{device.device_kind} ({device.platform}); times: float32, with gradient")
        print(f"{'op':<27} {'float32':>8} {'bfloat16':>8}  {'':9} {'kernel':>9} {'JAX':>9} speedup")
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # compilation takes long
            found = list(pool.map(lambda call: check(call, device), calls.values()))  # noqa: B023
        for name, checked in zip(calls, found, strict=True):
            if isinstance(checked, Exception):
                failed += 1
                line = next(iter(str(checked).splitlines()), "")
                print(f"{name:<27} FAILED: {type(checked).__name__}: {line}")
                continue
            args = _operands(checked.shapes, device)
            kernel, plain = (_time(compiled, args) for compiled in checked.timed)
            ok = all(error <= TOLERANCE[dtype] for dtype, error in checked.errors.items())
            ok &= checked.kernels or device.platform != "cpu"  # every package has CPU kernels
            failed += not ok
            word = "FAILED" if not ok else "ok" if checked.kernels else "reference"
            figures = " ".join(f"{e:8.1e}" for e in checked.errors.values())
            print(
                f"{name:<27} {figures}  {word:9} "
                f"{kernel * 1e6:6.0f} us {plain * 1e6:6.0f} us {plain / kernel:6.2f}x",
                flush=True,
            )
    print(f"{failed or 'no'} failures, {time.perf_counter() - start:.0f} s")
    return int(failed > 0)
