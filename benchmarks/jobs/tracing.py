"""How long does a trace of a program take with ``autofuse``?

Processor time of the thread that traces, in a process of its own for each row. The programs are
those of ``benchmarks/others``. Nothing is compiled, and no array of a program is on the device.

``plain``      as it is
``autofuse``   with ``autofuse`` around the forward, or around the loss of the step
``new``        as ``autofuse``, after a trace of the same program at tiny sizes, which has built the
               patterns

``first_forward_ms`` is the first trace of the process, ``first_step_ms`` the next one;
``forward_ms`` and ``step_ms`` are the least of later traces, each of a new function.
"""

import gc
import time

import jax.numpy as jnp

from benchmarks.cases import fo
from benchmarks.jobs import others

PROGRAMS = ["BERT layers", "Llama layers", "residual blocks", "flax lm1b", "haiku ResNet-50"]
CONTENDERS = ["plain", "autofuse", "new"]


def options(add) -> None:
    add("--programs", nargs="+", choices=others.NAMES, default=PROGRAMS, metavar="NAME")
    add("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    add("--traces", type=int, default=7, metavar="N", help="later traces")
    add("--implementation", default="auto", help="of our ops: auto, native or xla")


def facts(options) -> dict:
    return {"implementation": options.implementation}


def rows(options) -> list[dict]:
    names = filter(others.installed, options.programs)
    return [{"program": name, "contender": who} for name in names for who in options.contenders]


def measure(options, program: str, contender: str) -> dict:
    fo.set_implementation(options.implementation)
    model = others.built(program, options.small, jnp.bfloat16)
    fuse = (lambda fn: fn) if contender == "plain" else fo.autofuse
    if contender == "new":
        tiny = others.built(program, True, jnp.bfloat16)
        for phase in others.PHASES:
            _trace(tiny, fuse, phase)
    found = {f"first_{phase}_ms": _trace(model, fuse, phase) for phase in others.PHASES}
    for phase in others.PHASES:
        found[f"{phase}_ms"] = min(_trace(model, fuse, phase) for _ in range(options.traces))
    return found


def _trace(model, fuse, phase: str) -> float:
    """The milliseconds of a fresh trace."""
    trace = others.tracer(model, fuse, phase)
    gc.collect()
    begin = time.thread_time()
    trace()
    return (time.thread_time() - begin) * 1e3
