"""A call that takes the reference has no larger a program than the same in `jax.nn`."""

import functools
import pathlib
import random
import re
import sys
from collections import Counter

import jax
import pytest

import jax_fastops as fo
from jax_fastops import _dispatch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
cases = pytest.importorskip("benchmarks.cases")
shapes = pytest.importorskip("benchmarks.shapes")

pytestmark = pytest.mark.jax

# XLA makes no kernel for these.
FREE = ("broadcast_in_dim", "constant", "reshape", "return")
# Ops in whose forwards only sums are counted. The result of `lerp` is exact where the weight is 0
# or 1, and the variance of `batch_norm` in float32 also where the mean is large.
MORE_EXACT = ("batch_norm", "batch_norm_relu", "batch_norm_add_relu", "lerp")
# The norms are compared with the plain forms of the models, which have squares, and fewer steps
# where the variance is clipped. XLA fuses these element-wise operations into the same passes. Newer
# releases of jax simplify the plain forms by an operation more.
FUSED = {"norm": 1.1, "batch_norm": 1.15}
# `cross_entropy` has a masked sum in place of a gather. `dropout` has other masks than JAX.
DIFFERENT = ("cross_entropy", "dropout", "relu_from_result")
COMPARED = [op for op in cases.OPS if op.fitted and op.name not in DIFFERENT]


def counts(function, *args) -> Counter:
    """How often each operation occurs in the lowered program."""
    text = jax.jit(function).lower(*args).as_text()
    text = text.replace("chlo.square", "stablehlo.multiply")
    return Counter(name for name in re.findall(r"stablehlo\.(\w+)", text) if name not in FREE)


def backward(function, positions):
    """The gradients of the operands at ``positions``, from the cotangents and all operands."""

    def gradients(cts, *args):
        def of(*moving):
            given = dict(zip(positions, moving, strict=True))
            return function(*(given.get(i, x) for i, x in enumerate(args)))

        return jax.vjp(of, *(args[i] for i in positions))[1](cts)

    return gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", COMPARED, ids=lambda op: op.name)
def test_a_reference_is_no_larger_than_plain_jax(op, dtype):
    rng = random.Random(op.name)
    for _ in range(3):
        layout = shapes.draw(rng, op, 2**12)
        case = cases.Case(op, layout, "cpu", dtype)
        given = zip(case.shapes, case.operand_dtypes, strict=True)
        args = [jax.ShapeDtypeStruct(*pair) for pair in given]

        def ours(*args, layout=layout):
            with fo.use_implementation("xla"):
                return op.ours(*args, **layout.options)

        def plain(*args, layout=layout):
            return op.reference(*args, **layout.options)

        cts = jax.eval_shape(plain, *args)
        more_exact = op.name in MORE_EXACT and (dtype != "bfloat16" or op.name == "lerp")
        for forward, mine, theirs in (
            (True, counts(ours, *args), counts(plain, *args)),
            (False, *(counts(backward(f, case.differentiated), cts, *args) for f in (ours, plain))),
        ):
            message = f"{layout.label}: {mine - theirs} in place of {theirs - mine}"
            assert mine["reduce"] <= theirs["reduce"], message
            assert more_exact or mine["convert"] <= theirs["convert"], message
            most = theirs.total() * FUSED.get(op.family, 1)
            assert (more_exact and forward) or mine.total() <= most, message
            assert op.name != "lerp" or forward or mine == theirs, message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", [op for op in cases.OPS if op.fitted], ids=lambda op: op.name)
def test_a_gradient_that_takes_the_reference_has_its_program(op, dtype, monkeypatch):
    """Also where a call that is not differentiated takes the kernel."""

    class Everything(dict):
        def get(self, key, default=None):
            return self if key != dtype else {"forward": True, "grad": False}

    monkeypatch.setattr(_dispatch, "trees", lambda platform: Everything())
    rng = random.Random(op.name)
    for _ in range(100):  # until there is a call that the kernel can take, and XLA cannot fuse
        layout = shapes.draw(rng, op, 2**12)
        case = cases.Case(op, layout, "cpu", dtype)
        given = zip(case.shapes, case.operand_dtypes, strict=True)
        args = [jax.ShapeDtypeStruct(*pair) for pair in given]
        ours = functools.partial(op.ours, **layout.options)
        with fo.use_implementation("auto"):
            (call,) = fo.explain(ours)(*args).calls
        if call.kernel:
            break
    else:
        pytest.fail("no call takes the kernel")
    cts = jax.eval_shape(functools.partial(op.reference, **layout.options), *args)

    def gradient(implementation):
        with fo.use_implementation(implementation):
            return counts(backward(ours, case.differentiated), cts, *args)

    more = gradient("auto") - gradient("xla")
    # The angles are one array.
    allowed = Counter(slice=2, concatenate=1) if "rotary" in op.name else Counter()
    assert more <= allowed, more


@pytest.mark.parametrize("tokens", [31, 32])
def test_the_bias_of_few_tokens(tokens):
    """Its gradient sums padded arrays, as in plain JAX, or a concatenation."""
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, tokens, 48), (48,))]
    ours = functools.partial(fo.split_qkv_heads, num_heads=2)
    with fo.use_implementation("xla"):
        found = counts(backward(ours, (0, 1)), jax.eval_shape(ours, *args), *args)
    assert (found["pad"], found["concatenate"]) == ((3, 0) if tokens < 32 else (0, 1))
