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

DTYPES = (jnp.float32, jnp.bfloat16)
# The largest error of an array, relative to its largest element.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.5e-2}
RUNS, IN_FLIGHT = 5, 8
# A GPU is timed with so many times the rows: else the time is that of the host.
MORE_ROWS = {"cpu": 1, "gpu": 64}
ROWS = ((256, 1024), (7, 129))
VECTORS = ((1024,), (129,))


class Call(NamedTuple):
    """One op: its function of arrays, and the operands' shapes, aligned and odd."""

    op: str
    function: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]


def _labels(x: Any) -> Any:
    return jnp.arange(x.shape[0], dtype=jnp.int32) % x.shape[-1]


def _unknown(constant: Any) -> Any:
    """A constant that XLA does not compute with while it compiles."""
    return jax.lax.optimization_barrier(jnp.asarray(constant))


def _key() -> Any:
    return jax.random.wrap_key_data(_unknown(np.array([0, 1], np.uint32)))


def _calls() -> list[Call]:
    one = tuple((r,) for r in ROWS)
    two = tuple((r, r) for r in ROWS)
    with_vector = tuple(zip(ROWS, VECTORS, strict=True))
    affine = tuple((r, v, v) for r, v in zip(ROWS, VECTORS, strict=True))
    residual = tuple((r, r, v) for r, v in zip(ROWS, VECTORS, strict=True))
    biased = tuple((r, r, v, v) for r, v in zip(ROWS, VECTORS, strict=True))

    def positive(f):
        return lambda x, mean, var, *rest: f(x, mean, jnp.abs(var) + 0.5, *rest)

    return [
        Call("relu", fo.relu, one),
        Call("add_relu", fo.add_relu, two),
        Call("transpose", fo.transpose, one),
        Call("split_heads", lambda x, b: fo.split_heads(x, b, num_heads=3), _heads(1)),
        Call("split_qkv_heads", lambda x, b: fo.split_qkv_heads(x, b, num_heads=3), _heads(3)),
        Call(
            "split_qkv_heads_rotary",
            lambda x, scale: fo.split_qkv_heads(
                x,
                num_heads=4,
                num_kv_heads=2,
                rotary=jnp.outer(jnp.arange(x.shape[-2], dtype=jnp.float32), jnp.ones(2)),
                q_scale=scale,
                k_scale=scale,
            ),
            (((2, 64, 512), (64,)), ((1, 7, 40), (5,))),
        ),
        Call("merge_heads", fo.merge_heads, (((2, 3, 64, 64),), ((1, 3, 7, 5),))),
        Call("softmax", fo.softmax, one),
        Call(
            "softmax_dropout",
            lambda x: fo.softmax(x, dropout_key=_key(), dropout_rate=0.25),
            one,
        ),
        Call("log_softmax", fo.log_softmax, one),
        Call("layer_norm", fo.layer_norm, affine),
        Call("residual_layer_norm", fo.residual_layer_norm, biased),
        Call(
            "residual_layer_norm_dropout",
            lambda *xs: fo.residual_layer_norm(*xs, dropout_key=_key(), dropout_rate=0.25),
            biased,
        ),
        Call(
            "residual_rms_norm_dropout",
            lambda *xs: fo.residual_rms_norm(*xs, dropout_key=_key(), dropout_rate=0.25),
            residual,
        ),
        Call("rms_norm", fo.rms_norm, with_vector),
        Call("residual_rms_norm", fo.residual_rms_norm, residual),
        Call("batch_norm", fo.batch_norm, affine),
        Call("batch_norm_statistics", fo.batch_norm_statistics, one),
        Call(
            "batch_norm_inference",
            positive(fo.batch_norm_inference),
            tuple((r, v, v, v, v) for r, v in zip(ROWS, VECTORS, strict=True)),
        ),
        Call("lerp", lambda a, b: fo.lerp(a, b, 0.25), two),
        Call("bias_act", fo.bias_act, with_vector),
        Call("bias_relu", lambda x, b: fo.bias_act(x, b, activation="relu"), with_vector),
        Call("gated_act", fo.gated_act, two),
        Call("gated_act_halves", fo.gated_act, (((256, 1024),), ((7, 130),))),
        Call("cross_entropy", lambda x: fo.cross_entropy(x, _labels(x)), one),
        Call(
            "linear_cross_entropy",
            lambda x, table: fo.linear_cross_entropy(x, table, jnp.arange(x.shape[0]) % 7),
            (((64, 128), (512, 128)), ((7, 33), (65, 33))),
        ),
        Call("dropout", lambda x: fo.dropout(x, _key(), 0.25), one),
        Call("window_sum", lambda x: fo.window_sum(x, 2), one),
    ]


def _heads(parts: int):
    return (
        ((2, 64, parts * 192), (parts * 192,)),
        ((1, 7, parts * 15), (parts * 15,)),
    )


def _step(function: Callable[..., Any]) -> Callable[..., Any]:
    """The result and the gradients, for cotangents that bfloat16 holds exactly.

    They are constants: XLA may leave out a traced rounding in one program and keep it in another.
    """

    def cotangent(y):
        values = np.cos(np.arange(y.size)).astype(jnp.bfloat16)
        return _unknown(values.reshape(y.shape).astype(y.dtype))

    def step(*args):
        out, pull = jax.vjp(function, *args)
        return out, pull(jax.tree.map(cotangent, out))

    return step


def _timed_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with the results as cotangents."""

    def step(*args):
        out, pull = jax.vjp(function, *args)
        return out, pull(out)

    return step


def _operands(shapes: Iterable[tuple[int, ...]], device: Any) -> list[Any]:
    """Operands that bfloat16 holds exactly."""
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(s).astype(jnp.bfloat16).astype(np.float32) for s in shapes]
    return [jax.device_put(x, device) for x in made]


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


def _compiled(
    implementation: str, step: Callable[..., Any], args: list[Any]
) -> tuple[Callable[..., Any], bool]:
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


def check(call: Call, device: Any) -> Checked | Exception:
    """Compares kernel and reference, and compiles what is timed."""
    try:
        return _check(call, device)
    except Exception as error:
        return error


def _check(call: Call, device: Any) -> Checked:
    errors = {jnp.dtype(d).name: 0.0 for d in DTYPES}
    kernels, step = True, _step(call.function)
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
    timed = [_compiled(name, _timed_step(call.function), types)[0] for name in ("native", "xla")]
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
    for device in devices:
        rows = (MORE_ROWS[device.platform] * ROWS[0][0], ROWS[0][1])
        print(f"{device.device_kind} ({device.platform}); times: float32, {rows}, with gradient")
        print(f"{'op':<27} {'float32':>8} {'bfloat16':>8}  {'':9} {'kernel':>9} {'JAX':>9} speedup")
        calls = _calls()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # compilation takes long
            found = list(pool.map(lambda call: check(call, device), calls))  # noqa: B023
        for call, checked in zip(calls, found, strict=True):
            if isinstance(checked, Exception):
                failed += 1
                line = next(iter(str(checked).splitlines()), "")
                print(f"{call.op:<27} FAILED: {type(checked).__name__}: {line}")
                continue
            args = _operands(checked.shapes, device)
            kernel, plain = (_time(compiled, args) for compiled in checked.timed)
            ok = all(error <= TOLERANCE[name] for name, error in checked.errors.items())
            ok &= checked.kernels or device.platform != "cpu"  # every package has CPU kernels
            failed += not ok
            word = "FAILED" if not ok else "ok" if checked.kernels else "reference"
            figures = " ".join(f"{e:8.1e}" for e in checked.errors.values())
            print(
                f"{call.op:<27} {figures}  {word:9} "
                f"{kernel * 1e6:6.0f} us {plain * 1e6:6.0f} us {plain / kernel:6.2f}x",
                flush=True,
            )
    print(f"{failed or 'no'} failures, {time.perf_counter() - start:.0f} s")
    return int(failed > 0)
