"""What can the loss of a vocabulary gain without a new product?

Forms of ``linear_cross_entropy``, as plain JAX around the package's kernels. Each is timed forward
and backward, with its temporary memory, next to the op, plain JAX, and the three bare products:

``chunks``    of how many tokens; all of them, so that no float32 sum is read again
``in place``  the gradient of the logits overwrites them: half the memory of a chunk
``unrolled``  no loop, so that the first product of the table's gradient adds to nothing
``one pass``  one kernel reads the logits and writes their gradient, where the op reads them twice.
              This is `softmax`, which reads and writes the same bytes. Its values are not those of
              the loss, so it only bounds what such a kernel gains

With ``--step``, the forms are timed in the training step of `benchmarks.jobs.decoder`.
"""

import argparse
import functools
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import RESULTS, installed, profile
from benchmarks.cases import fo, plain_cross_entropy
from benchmarks.environment import facts
from benchmarks.programs import temp_bytes
from benchmarks.report import Results

native = installed("jax_fastops._native")

BACKWARD = (
    "logits: ... v, labels: ... :int32, top: ... :acc, log_sum: ... :acc, dloss: ... :acc"
    " -> dlogits: ... v"
)
FORWARD = "logits: ... v, labels: ... :int32 -> loss: ... :acc, top: ... :acc, log_sum: ... :acc"


class Form(NamedTuple):
    chunk: int  # tokens; 0: all
    unrolled: bool = False
    in_place: bool = False
    one_pass: bool = False


FORMS = {
    "scan 2048": Form(2048),
    "scan 2048, in place": Form(2048, in_place=True),
    "scan 4096, in place": Form(4096, in_place=True),
    "scan 8192, in place": Form(8192, in_place=True),
    "unrolled 4096, in place": Form(4096, unrolled=True, in_place=True),
    "all": Form(0),
    "all, in place": Form(0, in_place=True),
    "scan 2048, one pass": Form(2048, one_pass=True),
    "scan 4096, one pass": Form(4096, in_place=True, one_pass=True),
    "scan 8192, one pass": Form(8192, in_place=True, one_pass=True),
    "all, one pass": Form(0, in_place=True, one_pass=True),
}


def call(kernel: str, buffers: str, results, aliases, *operands, **options):
    target = native.target_name(f"jax_fastops.{kernel}", "cuda")
    bound = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    return bound(*operands, buffers=buffers, **options)


def losses_and_gradient(logits, labels, form: Form):
    """The loss of each token, and the gradient of their sum for the logits."""
    like = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    aliases = {0: 0} if form.in_place else {}
    if form.one_pass:
        options = dict(log=np.bool_(False), scale=np.float64(1))
        dlogits = call("softmax", "x: ... n -> y: ... n", like, aliases, logits, **options)
        return dlogits[..., 0].astype(jnp.float32), dlogits
    row = jax.ShapeDtypeStruct(labels.shape, jnp.float32)
    options = {"label_smoothing": np.float64(0), "z_loss": np.float64(0)}
    found = call("cross_entropy", FORWARD, (row,) * 3, {}, logits, labels, **options)
    losses, top, log_sum = found
    operands = logits, labels, top, log_sum, jnp.ones_like(losses)
    return losses, call("cross_entropy_bwd", BACKWARD, like, aliases, *operands, **options)


def total_and_gradients(x, table, labels, form: Form, class_axis: int):
    """The sum of the losses, and its gradients for ``x`` and the table."""
    tokens = len(x)
    chunk = form.chunk or tokens

    def products(x, labels):
        logits = jax.lax.dot_general(x, table, (((1,), (1 - class_axis,)), ((), ())))
        losses, dlogits = losses_and_gradient(logits, labels, form)
        dx = jax.lax.dot_general(dlogits, table, (((1,), (class_axis,)), ((), ())))
        pair = (x, dlogits) if class_axis else (dlogits, x)
        dtable = jax.lax.dot_general(
            *pair, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return losses.sum(), dx, dtable

    if chunk >= tokens:
        return products(x, labels)
    parts = [a.reshape(-1, chunk, *a.shape[1:]) for a in (x, labels)]
    if form.unrolled:
        found = [products(*part) for part in zip(*parts, strict=True)]
        totals, dxs, dtables = zip(*found, strict=True)
        return sum(totals), jnp.concatenate(dxs), functools.reduce(jnp.add, dtables)

    def body(dtable, part):
        total, dx, more = products(*part)
        return dtable + more, (total, dx)

    dtable, (totals, dx) = jax.lax.scan(body, jnp.zeros(table.shape, jnp.float32), tuple(parts))
    return totals.sum(), dx.reshape(x.shape), dtable


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def total_of(x, table, labels, form: Form, class_axis: int):
    raise NotImplementedError("a trial is differentiated")


def total_forward(x, table, labels, form, class_axis):
    total, dx, dtable = total_and_gradients(x, table.astype(x.dtype), labels, form, class_axis)
    return total, (dx, dtable.astype(table.dtype))


def total_backward(form, class_axis, grads, g):
    return *((g * grad).astype(grad.dtype) for grad in grads), None


total_of.defvjp(total_forward, total_backward)


def mean_loss(x, table, labels, *, form: Form, class_axis: int = 0, **_):
    """:func:`jax_fastops.linear_cross_entropy`, of tokens that all count."""
    x, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1).astype(jnp.int32)
    return total_of(x, table, labels, form, class_axis) / len(labels)


# ---- times --------------------------------------------------------------------------------------


def interleaved(programs: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Milliseconds of each program that is waited for: medians of rounds in random order."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name in random.sample(list(programs), len(programs)):
            begin = time.perf_counter()
            jax.block_until_ready(programs[name]())
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def compiled(functions: dict[str, Callable], *args) -> dict[str, Any]:
    """Compiled programs. For one that fails, the error."""

    def attempt(call):
        try:
            return call()
        except Exception as error:  # out of memory: the other forms count
            return str(error).splitlines()[0][:200]

    def one(name):
        return attempt(lambda: jax.jit(functions[name]).lower(*args).compile())

    # One after the other: XLA times algorithms while it compiles.
    found = {name: one(name) for name in functions}
    for name, program in found.items():
        if not isinstance(program, str):
            failed = attempt(lambda run=program: jax.block_until_ready(run(*args)) and None)
            found[name] = failed or program
    return found


def of_size(size: str, class_axis: int, names: list[str], rounds: int, longest: int) -> list[dict]:
    tokens, features, classes = map(int, size.split("x"))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
    shape = (features, classes) if class_axis else (classes, features)
    table = 0.02 * jax.random.normal(keys[1], shape, jnp.bfloat16)
    labels = jax.random.randint(keys[2], (tokens,), 0, classes)
    options = dict(class_axis=class_axis)

    def plain(x, table):
        logits = x @ (table if class_axis else table.T)
        return plain_cross_entropy(logits, labels).mean()

    losses = {"op": lambda x, table: fo.linear_cross_entropy(x, table, labels, **options)}
    losses |= {"plain": plain}
    losses |= {
        name: functools.partial(mean_loss, labels=labels, form=FORMS[name], **options)
        for name in names
        if FORMS[name].chunk < tokens
    }
    programs = compiled({n: jax.value_and_grad(f, (0, 1)) for n, f in losses.items()}, x, table)
    running = {
        name: functools.partial(program, x, table)
        for name, program in programs.items()
        if not isinstance(program, str)
    }
    times = interleaved(running, rounds)
    flops = 6 * tokens * features * classes
    rows = []
    for name, program in programs.items():
        row = dict(size=size, class_axis=class_axis, form=name)
        if isinstance(program, str):
            rows.append(row | dict(error=program))
            continue
        row |= dict(
            ms=times[name], tflops=flops / times[name] * 1e-9, temp_gb=temp_bytes(program) / 1e9
        )
        loss, grads = running[name]()
        row |= dict(loss=float(loss), apart=float(apart(grads, running["op"]()[1])))
        if longest:
            result = [None]

            def again(run=running[name], result=result):
                result[0] = run()

            row |= profile.of_calls(again, lambda r=result: jax.block_until_ready(r[0]), longest)
        rows.append(row)
    del running, programs
    return rows + bare(x, table, size, class_axis, rounds)


@jax.jit
def apart(arrays, others):
    """The largest distance of two arrays, as a share of the second one's norm."""

    def share(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

    return functools.reduce(jnp.maximum, map(share, arrays, others))


def bare(x, table, size: str, class_axis: int, rounds: int) -> list[dict]:
    """The three products of all tokens, with the gradient of the loss as it is in a step."""
    tokens, features, classes = map(int, size.split("x"))
    dims = jax.lax.dot_general

    def logits(x, table, d):
        return dims(x, table, (((1,), (1 - class_axis,)), ((), ())))

    def dx(x, table, d):
        return dims(d, table, (((1,), (class_axis,)), ((), ())))

    def dtable(x, table, d):
        pair = (x, d) if class_axis else (d, x)
        return dims(*pair, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    with fo.use_implementation("native"):
        d = jax.jit(lambda: fo.softmax(logits(x, table, None)))()
    functions = {"logits": logits, "dx": dx, "dtable": dtable}
    programs = compiled(functions, x, table, d)
    times = interleaved({n: functools.partial(p, x, table, d) for n, p in programs.items()}, rounds)
    flops = 2 * tokens * features * classes
    return [
        dict(size=size, class_axis=class_axis, form=f"bare {n}", ms=ms, tflops=flops / ms * 1e-9)
        for n, ms in times.items()
    ]


def of_step(names: list[str], layers: int, calls: int) -> list[dict]:
    """Milliseconds of a decoder's step, in turns of ``calls`` steps."""
    job = installed("benchmarks.jobs.decoder")
    decoder = job.decoder
    config = decoder.Config(layers=layers, attention="cudnn")
    batch = job.data("8x2048", config.vocab_size)
    losses = {"op": decoder.FASTOPS.linear_cross_entropy}
    losses |= {name: functools.partial(mean_loss, form=FORMS[name]) for name in names}

    def one(loss_op):
        ops = decoder.FASTOPS._replace(linear_cross_entropy=loss_op)

        def loss(params, count, tokens, labels):
            return decoder.loss(params, tokens, config, labels=labels, ops=ops)

        begin, update = job.adamw(job.RATE, job.DECAY, loss)
        start = jax.jit(lambda: begin(decoder.init(jax.random.key(0), config)))
        shapes = jax.eval_shape(start)
        step = jax.jit(update, donate_argnums=0).lower(shapes, *batch).compile()
        return start, step

    programs = {name: one(loss) for name, loss in losses.items()}
    state = jax.block_until_ready(programs["op"][0]())
    times: dict[str, list[float]] = {name: [] for name in programs}
    values = {}
    for turn in range(4):
        for name, (_, step) in random.sample(list(programs.items()), len(programs)):
            state, _ = jax.block_until_ready(step(state, *batch))
            begin = time.perf_counter()
            for _ in range(calls):
                state, values[name] = step(state, *batch)
            jax.block_until_ready(state)
            if turn:
                times[name].append((time.perf_counter() - begin) / calls * 1e3)
    return [
        dict(
            step=f"8x2048, {layers} layers",
            form=name,
            ms=statistics.median(times[name]),
            all_ms=times[name],
            temp_gb=temp_bytes(step) / 1e9,
            loss=float(values[name]),
        )
        for name, (_, step) in programs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sizes", nargs="*", default=["16384x2048x128256", "8192x4096x131072"])
    add("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    add("--step-forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    add("--class-axis", type=int, default=1)
    add("--rounds", type=int, default=11)
    add("--profile", type=int, default=0, metavar="N", help="the N longest kernels")
    add("--step", type=int, default=0, metavar="LAYERS", help="of a decoder whose step is timed")
    add("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = Results(options.out, "linear_cross_entropy-trial", **facts("optax"))

    def keep(rows):
        for row in rows:
            results.add("rows", row)
            print(json.dumps(row), flush=True)

    for size in options.sizes:
        keep(of_size(size, options.class_axis, options.forms, options.rounds, options.profile))
    if options.step:
        keep(of_step(options.step_forms, options.step, 4))


if __name__ == "__main__":
    main()
