"""A call that takes the reference has no larger a program than the same in `jax.nn`."""

import functools
import math
import pathlib
import random
import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import jax_fastops as fo
from jax_fastops import _dispatch
from jax_fastops.models import resnet

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
cases = pytest.importorskip("benchmarks.cases")
shapes = pytest.importorskip("benchmarks.shapes")

# XLA makes no kernel for these.
FREE = ("broadcast_in_dim", "constant", "reshape", "return")
# `cross_entropy` has a masked sum in place of a gather. `dropout` has other masks than JAX. `take`
# keeps its indices in int32, each out of bounds at one end.
DIFFERENT = ("cross_entropy", "dropout", "relu_from_result", "take")
COMPARED = [op for op in cases.OPS if op.fitted and op.name not in DIFFERENT]


def counts(function, *args, least=0) -> Counter:
    """How often each operation occurs in the lowered program, if its result has ``least`` elements.

    Sums count in any case.
    """
    text = jax.jit(function).lower(*args).as_text()
    text = text.replace("chlo.square", "stablehlo.multiply")
    found = Counter()
    for line in text.splitlines():
        for name in re.findall(r"stablehlo\.(\w+)", line):
            sizes = re.findall(r"tensor<((?:\d+x)*)\w+>", line)[-1:]
            size = math.prod(int(n) for dims in sizes for n in dims.split("x") if n)
            if name not in FREE and (size >= least or name == "reduce"):
                found[name] += 1
    return found


def batch_norm_in_two_passes(x, scale, bias, residual=None, *, axis, activation=None):
    """Plain JAX whose variance is as exact as that of ``fo.batch_norm`` where the mean is large."""
    axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    given = x, jnp.mean(x, axes), jnp.var(x, axes), scale, bias
    return resnet.plain_batch_norm_inference(
        *given, axis=axis, residual=residual, activation=activation
    )


def in_float32(function, x, *args, **options):
    return function(x.astype(jnp.float32), *args, **options).astype(x.dtype)


def plain_form(op, dtype) -> tuple:
    """What users write with the same numerics, and the sizes of the results that count.

    The batch norm of float32 computes a few more numbers for each channel, and reads x once less.
    """
    if op.family == "batch_norm" and dtype == "float32" and op.name != "batch_norm_inference":
        options = {"activation": "relu"} if "relu" in op.name else {}
        return functools.partial(batch_norm_in_two_passes, **options), True
    if op.family == "segment_sum":  # rounded once
        return functools.partial(in_float32, op.reference), False
    return op.reference, False


def backward(function, positions):
    """The gradients of the operands at ``positions``, from the cotangents and all operands."""

    def gradients(cts, *args):
        def of(*moving):
            given = dict(zip(positions, moving, strict=True))
            return function(*(given.get(i, x) for i, x in enumerate(args)))

        return jax.vjp(of, *(args[i] for i in positions))[1](cts)

    return gradients


over_dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.jax), "bfloat16"]
)


@over_dtypes
@pytest.mark.parametrize("op", COMPARED, ids=lambda op: op.name)
def test_a_reference_is_no_larger_than_plain_jax(op, dtype, monkeypatch):
    """Sums and casts are no more, and all operations together, with as many of each for `lerp`.

    The forward of `lerp` has steps that make it exact where the weight is 0 or 1.
    """
    # Models have squares, whose derivative has an addition less than that of a product.
    monkeypatch.setattr(jnp, "square", lambda x: x * x)
    rng = random.Random(op.name)
    form, whole = plain_form(op, dtype)
    for _ in range(3):
        layout = shapes.draw(rng, op, 2**12)
        case = cases.Case(op, layout, "cpu", dtype)
        given = zip(case.shapes, case.operand_dtypes, strict=True)
        args = [jax.ShapeDtypeStruct(*pair) for pair in given]

        def ours(*args, layout=layout):
            with fo.use_implementation("xla"):
                return op.ours(*args, **layout.options)

        plain = functools.partial(form, **layout.options)
        cts = jax.eval_shape(plain, *args)
        both = functools.partial(counts, least=args[0].size if whole else 0)
        for forward in (True, False):
            mine, theirs = (
                both(f, *args) if forward else both(backward(f, case.differentiated), cts, *args)
                for f in (ours, plain)
            )
            message = f"{layout.label}: {mine - theirs} in place of {theirs - mine}"
            assert mine["reduce"] <= theirs["reduce"], message
            if op.name == "lerp" and forward:
                continue
            assert mine["convert"] <= theirs["convert"], message
            assert mine.total() <= theirs.total(), message
            assert op.name != "lerp" or mine == theirs, message


@over_dtypes
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
