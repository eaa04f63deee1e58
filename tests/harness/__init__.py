"""Applies every transformation of JAX to an op, and compares the results with its reference's.

A test file declares one `Case` per op and passes its cases to `checks`. Each check is a separate,
named test:

    RELU = Case(name="relu", fn=fo.relu, reference=jax.nn.relu, make_args=..., exact=True, ...)

    @checks(RELU)
    def test_harness(check):
        check()

`pytest -k "relu and vmap"` then runs the vmap checks of that op. The files here:

    case.py        `Case`, `Sharding`, and `checks`, which turns cases into parametrized tests
    numerics.py    bitwise equality, errors against the float64 oracle, random and special values
    transforms.py  jit, jvp, vjp, second and third order, vmap, remat, control flow, donation,
                   linearize, x64
    sharding.py    meshes in Auto and Explicit mode, shard_map, collectives in the compiled program
    export.py      jax.export
    kernels.py     the kernels that run, what a backward pass keeps, special values, and bits
    recordings.py  models of other libraries in tests/data; test files import it by itself, because
                   it needs safetensors
    process.py     Python code in a new process
    programs.py    programs with gradients; the kernels that a program calls; its jaxpr
    masks.py       the mask of dropout, in NumPy
    properties.py  hypothesis: any shape, special values
    compat.py      differences between JAX versions
"""

from harness.case import Case, Check, Sharding, checks, implementation
from harness.numerics import Tolerance, assert_bitwise_equal, assert_matches, errors

__all__ = [
    "Case",
    "Check",
    "Sharding",
    "Tolerance",
    "assert_bitwise_equal",
    "assert_matches",
    "checks",
    "errors",
    "implementation",
]
