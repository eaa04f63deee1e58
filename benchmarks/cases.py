"""The cases that are measured: one entry of ``OPS`` per op. A new family adds entries only here."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks import installed

fo = installed("jax_fastops")

Shape = tuple[int, ...]
DTYPES = ("float32", "bfloat16", "float16", "float64")
HALVES = ("bfloat16", "float16")
MOVED = ("float32", "bfloat16", "int8")  # one dtype of each width that people transpose
PHASES = ("forward", "forward_saving", "backward", "step")


@dataclass(frozen=True)
class Traffic:
    """The fewest bytes that must cross the memory bus: the floor, if divided by a copy's speed."""

    forward: int  # not differentiated: operands in, result out
    forward_saving: int = 0  # the same, and the residuals that are not operands or results out
    backward: int = 0  # cotangents and residuals in, each distinct gradient out once

    @property
    def step(self) -> int:
        """Bytes of one forward and one backward with a barrier between them."""
        return self.forward_saving + self.backward


@dataclass(frozen=True)
class Layout:
    """A named size: the main operand's shape on a GPU and on a CPU, and the dtypes.

    It also has the options of the call, the number of trailing operands that are left out, and the
    shapes of the other operands.
    """

    label: str
    gpu: Shape
    cpu: Shape
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    options: Mapping = field(default_factory=dict)
    without: int = 0
    # The shapes of all operands from that of the main one, if they differ from the op's.
    operands: Callable[[Shape], tuple[Shape, ...]] | None = None

    def shape(self, scale: str) -> Shape:
        return self.gpu if scale == "gpu" else self.cpu


@dataclass(frozen=True)
class Op:
    """One op: how to call it and its equivalents, its sizes, and the bytes that it must move."""

    name: str
    family: str  # the op's module, and a part of the results file's name
    ours: Callable  # takes arrays, and the options of a layout by keyword
    reference: Callable  # the same in jax.nn or jax.numpy
    operands: Callable[[Shape], tuple[Shape, ...]]  # all shapes from that of the main operand
    traffic: Callable[[tuple[Shape, ...], int], Traffic]  # from shapes and bytes per element
    layouts: tuple[Layout, ...]
    torch: Callable | None = None  # the same for PyTorch's tensors
    # Dtypes of the operands that do not have the dtype of the case, by position.
    operand_dtypes: Mapping[int, str] = field(default_factory=dict)
    valid: Callable = lambda *operands: operands  # operands that the op takes, from random ones
    differentiated: tuple[int, ...] = (0,)  # positions of the operands that get a gradient
    phases: tuple[str, ...] = PHASES  # only forward if the derivative is the op itself
    exact: bool = False  # only moves elements: results must be equal
    # The difference in norm that rounding may cause. It is more than a few epsilons for long sums
    # that cancel, and for a ReLU of values near 0, where its gradient jumps.
    slack: float = 0.0
    fuses: bool = False  # XLA fuses a forward into its neighbors, so `auto` leaves it to XLA
    # What a forward must gain for `auto` to take the kernel, because XLA may fuse the forward.
    lone_gain: float = 0.0
    kernel_of: str = ""  # the public op that this one calls, if its name differs
    fitted: bool = True  # `auto` decides by entries of this op, and not by those of several ops


@dataclass(frozen=True)
class Case:
    """One op in one layout and dtype, at one scale ("gpu" or "cpu")."""

    op: Op
    layout: Layout
    scale: str
    dtype: str

    @property
    def shapes(self) -> tuple[Shape, ...]:
        of_main = self.layout.operands or self.op.operands
        everything = of_main(self.layout.shape(self.scale))
        return everything[: len(everything) - self.layout.without]

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """The dtype of every operand."""
        own = self.op.operand_dtypes
        return tuple(own.get(i, self.dtype) for i in range(len(self.shapes)))

    @property
    def differentiated(self) -> tuple[int, ...]:
        return tuple(p for p in self.op.differentiated if p < len(self.shapes))

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of the op; integers have no gradient, and so only the forward."""
        return self.op.phases if jnp.issubdtype(self.dtype, jnp.inexact) else ("forward",)

    @property
    def traffic(self) -> Traffic:
        return self.op.traffic(self.shapes, jnp.dtype(self.dtype).itemsize)

    @property
    def name(self) -> str:
        return f"{self.op.name} {self.layout.label} {self.dtype}"


def same(count: int) -> Callable[[Shape], tuple[Shape, ...]]:
    """``count`` operands of the main shape."""
    return lambda shape: (shape,) * count


def with_bias(shape: Shape) -> tuple[Shape, ...]:
    """The main operand and a bias for its last axis."""
    return shape, shape[-1:]


def masked_elementwise(operands: int) -> Callable[[tuple[Shape, ...], int], Traffic]:
    """Traffic of an elementwise op with one distinct gradient that keeps one bit per element."""

    def traffic(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
        array = math.prod(shapes[0]) * itemsize
        mask = -(-math.prod(shapes[0]) // 8)
        forward = (operands + 1) * array
        return Traffic(forward, forward + mask, 2 * array + mask)

    return traffic


def moved(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
    """Traffic of an op that moves its first operand and adds the others to it, if there are any.

    The backward moves the cotangents back and writes a gradient for every operand. Partial sums of
    the small gradients do not count.
    """
    array, *others = (math.prod(shape) * itemsize for shape in shapes)
    total = 2 * array + sum(others)
    return Traffic(total, total, total)


def rows_kept(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
    """Traffic of a softmax with a mask of bytes; its only residual is its result."""
    array = math.prod(shapes[0]) * itemsize
    masks = sum(math.prod(shape) for shape in shapes[1:])
    return Traffic(2 * array + masks, 2 * array + masks, 3 * array)


def normalised(arrays: int, statistics: int) -> Callable[[tuple[Shape, ...], int], Traffic]:
    """Traffic of a norm of the sum of ``arrays`` arrays; parameters and statistics are float32.

    With several arrays, the sum is written for the backward.
    """

    def traffic(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
        array = math.prod(shapes[0]) * itemsize
        kept = statistics * 4 * math.prod(shapes[0][:-1])
        parameters = sum(4 * math.prod(shape) for shape in shapes[arrays:])
        forward = (arrays + 1) * array + parameters
        saving = forward + kept + (array if arrays > 1 else 0)
        return Traffic(forward, saving, 3 * array + kept + 2 * parameters)

    return traffic


def dropped_and_normalised(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
    """As a norm of two arrays, each of which has a gradient of its own."""
    traffic = normalised(2, 2)(shapes[:-1], itemsize)
    array = math.prod(shapes[0]) * itemsize
    return dataclasses.replace(traffic, backward=traffic.backward + array)


def batch_normalised(relu: bool) -> Callable[[tuple[Shape, ...], int], Traffic]:
    """Traffic of a batch norm of an array, two parameters and an optional residual.

    Normalization starts after the whole array has been read, and the gradient after both sums are
    known. So there are two passes. Each reads the array, and each pass of the backward also reads
    the cotangent and the bits of the ReLU. The parts of the array that registers, shared memory and
    L2 still hold in the second pass are not deducted, so an array that mostly fits there may be
    faster than the floor. Values per channel are too few to count.
    """

    def traffic(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
        array = math.prod(shapes[0]) * itemsize
        mask = -(-math.prod(shapes[0]) // 8) if relu else 0
        residuals = (len(shapes) - 3) * array
        forward = 3 * array + residuals
        return Traffic(forward, forward + mask, 5 * array + residuals + 2 * mask)

    return traffic


def with_given_statistics(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
    """Traffic of a batch norm with ReLU at inference: one pass forward, one backward."""
    array, mask = math.prod(shapes[0]) * itemsize, -(-math.prod(shapes[0]) // 8)
    return Traffic(2 * array, 2 * array + mask, 3 * array + mask)


def broadcast_together(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
    """Traffic of an elementwise op with broadcasting.

    Each operand is read, and each gradient is written, in the shape of the operand.
    """
    array = math.prod(jnp.broadcast_shapes(*shapes)) * itemsize
    operands = sum(math.prod(shape) for shape in shapes) * itemsize
    return Traffic(operands + array, operands + array, array + 2 * operands)


def with_bias_and_mask(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
    """The same for ReLU with a bias, whose backward reads one bit per element and no operand."""
    array, bias = (math.prod(shape) * itemsize for shape in shapes)
    mask = math.prod(shapes[0][:-1]) * -(-shapes[0][-1] // 8)
    forward = 2 * array + bias
    return Traffic(forward, forward + mask, 2 * array + mask + bias)


def labelled(shape: Shape) -> tuple[Shape, ...]:
    """Logits, and a label for each of their rows."""
    return shape, shape[:-1]


def rows_to_losses(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
    """Traffic of a cross entropy that keeps its logits and labels, and 8 bytes per row."""
    array, rows = (math.prod(shape) for shape in shapes)
    forward = array * itemsize + 8 * rows
    return Traffic(forward, forward + 8 * rows, 2 * array * itemsize + 16 * rows)


def with_parameters(arrays: int, parameters: int) -> Callable[[Shape], tuple[Shape, ...]]:
    """Arrays of the main shape, and parameters along its last axis."""
    return lambda shape: (shape,) * arrays + (shape[-1:],) * parameters


def of_channels(parameters: int, axis: int, residual: bool = False) -> Callable:
    """An array, parameters along its channel axis, and an optional residual."""
    return lambda shape: (shape, *((shape[axis],),) * parameters, *(shape,) * residual)


def mask_of_keys(shape: Shape) -> tuple[Shape, ...]:
    """Attention scores, and a mask of the keys: (B, 1, 1, L)."""
    return shape, (shape[0], 1, 1, shape[-1])


def mask_of_pairs(shape: Shape) -> tuple[Shape, ...]:
    """Attention scores, and a mask of queries and keys, the same for all heads: (B, 1, L, L)."""
    return shape, (shape[0], 1, *shape[-2:])


def torch_softmax(x, where=None, *, scale=1.0, axis=-1):
    x = x if scale == 1.0 else x * scale
    x = x if where is None else x.masked_fill(~where, float("-inf"))
    return x.softmax(axis)


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def plain_layer_norm(x, scale, bias):
    """Layer norm in float32, as models write it."""
    wide = _wide(x)
    centred = wide - wide.mean(-1, keepdims=True)
    rstd = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)
    return (centred * rstd * scale + bias).astype(x.dtype)


def plain_rms_norm(x, scale):
    wide = _wide(x)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(
        x.dtype
    )


def torch_layer_norm(x, scale, bias):
    import torch

    return torch.nn.functional.layer_norm(
        x, x.shape[-1:], scale.to(x.dtype), bias.to(x.dtype), 1e-6
    )


def torch_rms_norm(x, scale):
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:], scale.to(x.dtype), 1e-6)


def batch_norm(x, scale, bias, residual=None, **options):
    """Only the normalized array: the batch statistics get no gradient."""
    return fo.batch_norm(x, scale, bias, residual=residual, **options)[0]


def plain_batch_norm(x, scale, bias, residual=None, *, axis, activation=None, two_passes=False):
    """Batch norm as in Flax by default, in float32. It is the fastest form for XLA.

    The variance is ``E[x^2] - E[x]^2``, clipped at 0, which takes one pass over ``x``. It loses
    digits where the mean is large relative to the deviation. The kernel does not: it is as exact as
    this function with ``two_passes``, with which XLA reads ``x`` once more.
    """
    wide, others = _wide(x), _other_axes(x, axis)
    mean = wide.mean(others)
    if two_passes:
        var = jnp.square(wide - jnp.expand_dims(mean, others)).mean(others)
    else:
        var = jnp.maximum(0, jnp.square(wide).mean(others) - jnp.square(mean))
    given = (wide, mean, var, scale, bias, residual)
    return plain_batch_norm_inference(*given, axis=axis, activation=activation).astype(x.dtype)


def plain_batch_norm_inference(
    x, mean, var, scale, bias, residual=None, *, axis, activation=None, eps=1e-5
):
    """Batch norm with given statistics, in float32, rounded once."""
    others = _other_axes(x, axis)
    mean, factor, bias = (
        jnp.expand_dims(values, others) for values in (mean, jax.lax.rsqrt(var + eps) * scale, bias)
    )
    y = (_wide(x) - mean) * factor + bias
    y = y if residual is None else y + residual
    return (_activation(activation)(y) if activation else y).astype(x.dtype)


def _other_axes(x, axis: int) -> tuple[int, ...]:
    return tuple(d for d in range(x.ndim) if d != axis % x.ndim)


def torch_batch_norm(x, scale, bias, residual=None, *, axis, activation=None):
    """PyTorch's channels are axis 1; with ``axis=-1`` its array is in channels_last format."""
    from torch.nn import functional

    given = (x.movedim(axis, 1), None, None, scale, bias)
    y = functional.batch_norm(*given, training=True, eps=1e-5).movedim(1, axis)
    y = y if residual is None else y + residual
    return getattr(functional, activation)(y) if activation else y


@jax.custom_vjp
def relu_keeping_result(x):
    """ReLU as in frameworks without bitmasks: the gradient is masked by the result, ``y > 0``."""
    return jax.nn.relu(x)


relu_keeping_result.defvjp(
    lambda x: (jax.nn.relu(x),) * 2, lambda y, dy: (jnp.where(y > 0, dy, jnp.zeros_like(dy)),)
)


def plain_lerp(start, end, weight):
    return start + weight * (end - start)


def torch_lerp(start, end, weight):
    return start.lerp(end, weight)


def _activation(name: str) -> Callable:
    """The function of jax.nn."""
    exact = {"gelu_exact": lambda x: jax.nn.gelu(x, approximate=False)}
    return exact.get(name) or getattr(jax.nn, name)


def plain_bias_act(x, bias, activation):
    return _activation(activation)(x + bias)


def torch_bias_act(x, bias, activation):
    from torch.nn import functional

    exact = {
        "gelu": lambda x: functional.gelu(x, approximate="tanh"),
        "gelu_exact": functional.gelu,
    }
    return (exact.get(activation) or getattr(functional, activation))(x + bias)


def plain_gated_act(gate, up=None, activation="silu"):
    gate, up = jnp.split(gate, 2, axis=-1) if up is None else (gate, up)
    return _activation(activation)(gate) * up


def plain_cross_entropy(logits, labels):
    """The formula of optax, in the accumulator dtype."""
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    x = x - jax.lax.stop_gradient(x.max(-1, keepdims=True))
    at_label = jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
    return jnp.log(jnp.exp(x).sum(-1)) - at_label


def torch_cross_entropy(logits, labels):
    import torch

    flat = logits.reshape(-1, logits.shape[-1]).float()
    labels = labels.long()
    loss = torch.nn.functional.cross_entropy(flat, labels.flatten(), reduction="none")
    return loss.reshape(labels.shape)


def in_range(logits, labels):
    """Logits, and random labels as classes."""
    return logits, labels % logits.shape[-1]


def torch_gated_act(gate, up=None, activation="silu"):
    from torch.nn import functional

    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    exact = {"gelu": lambda x: functional.gelu(x, approximate="tanh")}
    return (exact.get(activation) or getattr(functional, activation))(gate) * up


DROP_RATE = 0.1


def dropout(x, key):
    return fo.dropout(x, key, DROP_RATE)


def plain_dropout(x, key):
    keep = jax.random.bernoulli(key, 1 - DROP_RATE, x.shape)
    return jnp.where(keep, x / (1 - DROP_RATE), jnp.zeros((), x.dtype))


def plain_window_sum(x, radius, axis=-1, padding="VALID"):
    """Window sum in float32, as users write it in JAX."""
    window = [2 * radius + 1 if d == axis % x.ndim else 1 for d in range(x.ndim)]
    wide = _wide(x)
    zero = wide.dtype.type(0)
    sums = jax.lax.reduce_window(wide, zero, jax.lax.add, window, (1,) * x.ndim, padding)
    return sums.astype(x.dtype)


def torch_window_sum(x, radius, axis=-1, padding="VALID"):
    """Window sum by average pooling, which divides by the length of the window."""
    import torch

    lines = x.movedim(axis, -1)
    pad = radius if padding == "SAME" else 0
    flat = lines.reshape(-1, 1, lines.shape[-1])
    means = torch.nn.functional.avg_pool1d(flat, 2 * radius + 1, 1, pad)
    sums = means.mul(2 * radius + 1).reshape(*lines.shape[:-1], -1)
    return sums.movedim(-1, axis).contiguous()


def merge_by_reshape(x):
    """Heads back into features."""
    b, h, s, d = x.shape
    return jnp.swapaxes(x, 1, 2).reshape(b, s, h * d)


def split_by_reshape(x, bias=None, *, num_heads: int):
    """Features into heads, with the bias."""
    b, s, _ = x.shape
    x = x if bias is None else x + bias
    return jnp.swapaxes(x.reshape(b, s, num_heads, -1), 1, 2)


def split_qkv_by_reshape(qkv, bias=None, *, num_heads: int):
    """Features of q, k and v into heads, with the bias."""
    b, s, _ = qkv.shape
    qkv = qkv if bias is None else qkv + bias
    parts = qkv.reshape(b, s, 3, num_heads, -1)
    return tuple(jnp.swapaxes(parts[:, :, i], 1, 2) for i in range(3))


def split_qkv_rotary(qkv, cos, sin, q_scale=None, k_scale=None, **options):
    """Grouped heads with rotary embedding, and with norms if there are scales."""
    return fo.split_qkv_heads(
        qkv,
        rotary=(cos, sin),
        q_scale=q_scale,
        k_scale=k_scale,
        layout="sequence_first",
        **options,
    )


def plain_split_qkv_rotary(
    qkv, cos, sin, q_scale=None, k_scale=None, *, num_heads: int, num_kv_heads: int
):
    """The same in float32, rounded once."""
    size = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    heads = _wide(qkv).reshape(*qkv.shape[:-1], -1, size)
    parts = jnp.split(heads, (num_heads, num_heads + num_kv_heads), axis=-2)
    cos, sin = cos[:, None], sin[:, None]

    def rotated(x, scale):
        if scale is not None:
            x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    q, k = (rotated(x, scale) for x, scale in zip(parts, (q_scale, k_scale), strict=False))
    return tuple(part.astype(qkv.dtype) for part in (q, k, parts[2]))


def with_rotary(heads: int) -> Callable[[Shape], tuple[Shape, ...]]:
    """Features of so many heads, cosines and sines of half a head, and scales of a head."""

    def operands(shape: Shape) -> tuple[Shape, ...]:
        size = shape[-1] // heads
        return shape, (shape[1], size // 2), (shape[1], size // 2), (size,), (size,)

    return operands


def rotated(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
    """Traffic of grouped heads with rotary embedding and perhaps norms.

    There are four heads of queries for each head of keys. With norms, the backward also reads the
    features of queries and keys: 5 of 6.
    """
    array = math.prod(shapes[0]) * itemsize
    angles, parameters = (4 * sum(map(math.prod, part)) for part in (shapes[1:3], shapes[3:]))
    forward = 2 * array + angles + parameters
    kept = array * 5 // 6 if parameters else 0
    return Traffic(forward, forward, 2 * array + angles + kept + 2 * parameters)


def torch_split_qkv(qkv, bias=None, *, num_heads: int):
    """One copy; q, k and v are views of it."""
    b, s, _ = qkv.shape
    qkv = qkv if bias is None else qkv + bias
    return qkv.view(b, s, 3, num_heads, -1).permute(2, 0, 3, 1, 4).contiguous().unbind(0)


def torch_split(x, bias=None, *, num_heads: int):
    b, s, _ = x.shape
    x = x if bias is None else x + bias
    return x.view(b, s, num_heads, -1).transpose(1, 2).contiguous()


ELEMENTWISE = (
    Layout("large", (64, 1024, 1024), (4, 1024, 1024), DTYPES),
    Layout("conv NHWC", (128, 56, 56, 64), (16, 56, 56, 64)),
    Layout("odd rows", (65536, 1001), (4096, 1001)),
    Layout("small", (32, 1024), (32, 1024)),
)


def _axes(*axes: int) -> dict:
    return {"axes": axes}


TRANSPOSES = (
    Layout("matrix", (8192, 8192), (2048, 2048), MOVED, _axes(1, 0)),
    Layout("matrices", (64, 1024, 1024), (4, 1024, 1024), MOVED, _axes(0, 2, 1)),
    Layout("short rows", (1024, 1024, 64), (256, 256, 64), MOVED, _axes(1, 0, 2)),
    Layout("heads", (32, 512, 16, 64), (2, 512, 16, 64), MOVED, _axes(0, 2, 1, 3)),
    Layout("NHWC to NCHW", (64, 56, 56, 128), (4, 56, 56, 128), MOVED, _axes(0, 3, 1, 2)),
    Layout("NCHW to NHWC", (64, 128, 56, 56), (4, 128, 56, 56), MOVED, _axes(0, 2, 3, 1)),
    Layout("reversed", (96, 97, 98, 99), (48, 49, 50, 51), MOVED, _axes(3, 2, 1, 0)),
    Layout("odd", (33, 1000, 1001), (33, 250, 251), MOVED, _axes(2, 0, 1)),
    Layout("thin middle", (4096, 3, 4096), (1024, 3, 1024), MOVED, _axes(2, 1, 0)),
    Layout("thin", (524288, 3, 32), (32768, 3, 32), MOVED, _axes(0, 2, 1)),
    Layout(
        "rank 8",
        (8, 4, 6, 8, 4, 6, 8, 32),
        (4, 4, 6, 4, 4, 6, 4, 16),
        MOVED,
        _axes(5, 2, 7, 0, 4, 1, 6, 3),
    ),
    Layout("2^31 + 1", (3, 715827883), (3, 44739243), ("int8",), _axes(1, 0)),
)

MASKED = {"scale": 0.125}
SOFTMAXES = (
    *(
        Layout(f"{mask} {gpu[-1]}", gpu, cpu, options=MASKED, operands=operands)
        for gpu, cpu in (
            ((32, 12, 512, 512), (4, 12, 256, 256)),
            ((8, 16, 2048, 2048), (1, 2, 1024, 1024)),
            ((64, 12, 128, 128), (16, 12, 128, 128)),
        )
        for mask, operands in (("mask (B,1,1,L)", mask_of_keys), ("mask (B,1,L,L)", mask_of_pairs))
    ),
    Layout("rows", (65536, 1024), (4096, 1024), without=1),
    Layout("odd rows", (65536, 1001), (4096, 1001), without=1),
    Layout("vocabulary", (4096, 32768), (128, 32768), without=1),
    Layout("long rows", (512, 262144), (16, 262144), without=1),
    Layout("huge rows", (8, 4194304), (1, 4194304), without=1),
    Layout("axis 1", (64, 1000, 512), (8, 1000, 512), options={"axis": 1}, without=1),
)


NORMS = (
    Layout("BERT-base", (32768, 768), (4096, 768)),
    Layout("BERT-large", (32768, 1024), (4096, 1024)),
    Layout("wide", (16384, 4096), (1024, 4096)),
    Layout("wider", (4096, 16384), (256, 16384)),
    Layout("widest", (1024, 65536), (64, 65536)),
    Layout("odd", (30000, 1001), (4000, 1001)),
)


def _scalar_weight(shape: Shape) -> tuple[Shape, ...]:
    return shape, shape, (1,)


def _start_of_batch(shape: Shape) -> tuple[Shape, ...]:
    return (shape[0], *(1 for _ in shape[1:])), shape, (1,)


def _planes(shape: Shape) -> tuple[Shape, ...]:
    a, b, c = shape
    return (a, 1, c), (1, b, c), (a, b, 1)


def _row_all_column(shape: Shape) -> tuple[Shape, ...]:
    return shape[-1:], shape, (*shape[:-1], 1)


def _alternating(shape: Shape) -> tuple[Shape, ...]:
    """Start has every even dimension, end every odd one; the others have size 1."""
    even = tuple(size if d % 2 == 0 else 1 for d, size in enumerate(shape))
    odd = tuple(size if d % 2 else 1 for d, size in enumerate(shape))
    return even, odd, shape


IMAGES = (16, 3, 1024, 1024), (16, 3, 256, 256)
LERPS = (
    Layout("all alike", *IMAGES),
    Layout("weight (1,)", *IMAGES, operands=_scalar_weight),
    Layout("start (16, 1, 1, 1), weight (1,)", *IMAGES, operands=_start_of_batch),
    Layout("three planes", (1024, 64, 1024), (256, 64, 256), operands=_planes),
    Layout("row, all, column", (16384, 4096), (4096, 1024), operands=_row_all_column),
    Layout("rank 7", (8, 16, 8, 16, 8, 16, 64), (4, 8, 4, 8, 4, 8, 128), operands=_alternating),
    Layout("odd row, all, column", (30000, 1001), (4000, 1001), operands=_row_all_column),
)


def gated(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
    """Traffic of a gated activation, whose result is half as large as its operands together."""
    operands = sum(math.prod(shape) for shape in shapes) * itemsize
    return Traffic(3 * operands // 2, 3 * operands // 2, 5 * operands // 2)


GATES = (
    Layout("two operands", (16384, 5632), (2048, 1408)),
    Layout("halves", (16384, 11264), (2048, 2816), operands=same(1)),
    Layout("halves, gelu", (16384, 8192), (2048, 2048), ("bfloat16",), {"activation": "gelu"}, 1),
    Layout("two operands, odd", (30000, 1001), (4000, 1001)),
    Layout("halves, odd", (30000, 2002), (4000, 2002), operands=same(1)),
)
CLASSES = (
    Layout("GPT-2", (16384, 50257), (1024, 50257)),
    Layout("BERT", (16384, 30522), (2048, 30522)),
    Layout("Llama 3", (8192, 128256), (512, 128256)),
    Layout("ImageNet", (65536, 1000), (8192, 1000)),
)
DROPOUTS = (
    Layout("rows", (32768, 4096), (4096, 1024)),
    Layout("odd", (30000, 1001), (4000, 1001)),
    Layout("short rows", (2**20, 64), (65536, 16)),
)
SMOOTH = ("gelu", "gelu_exact", "silu")


def _activations(names: tuple[str, ...]) -> tuple[Layout, ...]:
    return tuple(
        Layout(f"{name}{label}", gpu, cpu, options={"activation": name})
        for name in names
        for label, gpu, cpu in (
            ("", (32768, 4096), (4096, 1024)),
            (", odd", (30000, 1001), (4000, 1001)),
        )
    )


def _window(radius: int, axis: int) -> dict:
    """Options of a window around each element, of which the derivative is the same sum."""
    return {"radius": radius, "axis": axis, "padding": "SAME"}


WINDOWS = (
    *(Layout(f"radius {r}", (4096, 16384), (256, 16384), options=_window(r, -1)) for r in (2, 16)),
    Layout("radius 256", (4096, 16384), (128, 16384), options=_window(256, -1)),
    *(
        Layout(f"axis 0, radius {r}", (16384, 4096), (16384, 256), options=_window(r, 0))
        for r in (2, 16)
    ),
    Layout("axis 0, radius 256", (16384, 4096), (4096, 256), options=_window(256, 0)),
    Layout("odd, radius 16", (4097, 16381), (257, 16381), options=_window(16, -1)),
    Layout("axis 0, odd, radius 16", (16381, 4097), (16381, 257), options=_window(16, 0)),
)

# The ends that the result lacks are a thousandth of the array. They are counted as if present.
VALID_WINDOWS = tuple(
    Layout(label, gpu, cpu, options={"radius": 16, "axis": axis, "padding": "VALID"})
    for label, gpu, cpu, axis in (
        ("VALID, radius 16", (4096, 16384), (256, 16384), -1),
        ("VALID, axis 0, radius 16", (16384, 4096), (16384, 256), 0),
    )
)


def _batches(name: str, gpu: Shape, cpu: Shape, residual: bool = False) -> tuple[Layout, ...]:
    """Images of (n, h, w, c) with channels last, and the same with channels first."""

    def layout(order: str, axis: int, gpu: Shape, cpu: Shape) -> Layout:
        operands = of_channels(2, axis, residual)
        return Layout(f"{order} {name}", gpu, cpu, options={"axis": axis}, operands=operands)

    first = ((n, c, h, w) for n, h, w, c in (gpu, cpu))
    return layout("NHWC", -1, gpu, cpu), layout("NCHW", 1, *first)


# Shapes of ResNet, of the op's source (112x112x32), and odd numbers of channels.
BATCHES = (
    ("56x56x64", (128, 56, 56, 64), (16, 56, 56, 64)),
    ("28x28x128", (128, 28, 28, 128), (32, 28, 28, 128)),
    ("7x7x2048", (128, 7, 7, 2048), (32, 7, 7, 2048)),
    ("112x112x32", (16, 112, 112, 32), (4, 112, 112, 32)),
    *((f"56x56x{c}", (128, 56, 56, c), (16, 56, 56, c)) for c in (3, 17, 63)),
)
ROWS = Layout("rows", (65536, 1024), (4096, 1024), options={"axis": -1})


# Variances are drawn like all operands, so some are negative. This epsilon makes all sums positive.
INFERENCE = {"axis": -1, "activation": "relu", "eps": 9.0}


BERT = (32, 512, 768), (2, 512, 768)  # BERT-base's activations, on a GPU and on a CPU
BERT_QKV = (32, 512, 3 * 768), (2, 512, 3 * 768)
BERT_HEADS = (32, 12, 512, 64), (2, 12, 512, 64)
TWELVE = {"num_heads": 12}
# A decoder: 32 heads of queries and 8 of keys.
HEADS_OF_64 = (8, 2048, 48 * 64), (1, 512, 48 * 64)
HEADS_OF_128 = (8, 2048, 48 * 128), (1, 512, 48 * 128)
GROUPED = {"num_heads": 32, "num_kv_heads": 8}

OPS = (
    Op(
        name="relu",
        family="relu",
        ours=fo.relu,
        reference=jax.nn.relu,
        operands=same(1),
        traffic=masked_elementwise(1),
        layouts=ELEMENTWISE,
        fuses=True,
    ),
    Op(
        name="add_relu",
        family="relu",
        ours=fo.add_relu,
        reference=lambda x, y: jax.nn.relu(x + y),
        operands=same(2),
        traffic=masked_elementwise(2),
        layouts=ELEMENTWISE,
        differentiated=(0, 1),
        fuses=True,
    ),
    Op(
        name="relu_from_result",  # what a bitmask gains over a mask from the result
        family="relu",
        kernel_of="relu",
        ours=fo.relu,
        reference=relu_keeping_result,
        operands=same(1),
        traffic=masked_elementwise(1),
        layouts=(Layout("conv", (16, 112, 112, 32), (4, 112, 112, 32), ("float32", *HALVES)),),
    ),
    Op(
        name="transpose",
        family="transpose",
        ours=fo.transpose,
        reference=jnp.transpose,
        torch=lambda x, axes: x.permute(axes).contiguous(),
        operands=same(1),
        traffic=moved,
        layouts=TRANSPOSES,
        phases=("forward",),
        exact=True,
    ),
    Op(
        name="split_heads",
        family="heads",
        ours=fo.split_heads,
        reference=split_by_reshape,
        torch=torch_split,
        operands=with_bias,
        traffic=moved,
        layouts=(Layout("bias", *BERT, options=TWELVE),),
        differentiated=(0, 1),
    ),
    Op(
        name="split_qkv_heads",
        family="heads",
        ours=fo.split_qkv_heads,
        reference=split_qkv_by_reshape,
        torch=torch_split_qkv,
        operands=with_bias,
        traffic=moved,
        layouts=(
            Layout("bias", *BERT_QKV, options=TWELVE),
            Layout("no bias", *BERT_QKV, options=TWELVE, without=1),
        ),
        differentiated=(0, 1),
    ),
    Op(
        name="split_qkv_heads_rotary",
        family="heads",
        kernel_of="split_qkv_heads",
        ours=split_qkv_rotary,
        reference=plain_split_qkv_rotary,
        operands=with_rotary(48),
        operand_dtypes=dict.fromkeys((1, 2, 3, 4), "float32"),
        traffic=rotated,
        layouts=(
            Layout("norms, heads of 64", *HEADS_OF_64, options=GROUPED),
            Layout("norms, heads of 128", *HEADS_OF_128, options=GROUPED),
            Layout("heads of 64", *HEADS_OF_64, options=GROUPED, without=2),
            Layout("heads of 128", *HEADS_OF_128, options=GROUPED, without=2),
        ),
        differentiated=(0, 3, 4),
    ),
    Op(
        name="merge_heads",
        family="heads",
        kernel_of="transpose",
        ours=fo.merge_heads,
        reference=merge_by_reshape,
        torch=lambda x: x.transpose(1, 2).flatten(2),
        operands=same(1),
        traffic=moved,
        layouts=(Layout("BERT", *BERT_HEADS, MOVED),),
        phases=("forward",),
        exact=True,
    ),
    Op(
        name="softmax",
        family="softmax",
        ours=lambda x, where=None, **options: fo.softmax(x, where=where, **options),
        reference=lambda x, where=None, scale=1.0, axis=-1: jax.nn.softmax(
            x if scale == 1.0 else scale * x, axis, where=where
        ),
        torch=torch_softmax,
        operands=mask_of_keys,
        operand_dtypes={1: "bool"},
        traffic=rows_kept,
        layouts=SOFTMAXES,
    ),
    Op(
        name="softmax_dropout",
        family="softmax",
        ours=lambda x, where, key, **options: fo.softmax(
            x, where=where, dropout_key=key, dropout_rate=DROP_RATE, **options
        ),
        reference=lambda x, where, key, scale=1.0: plain_dropout(
            jax.nn.softmax(scale * x, where=where), key
        ),
        fitted=False,
        slack=math.inf,  # other masks
        operands=lambda shape: (*mask_of_keys(shape), (2,)),
        operand_dtypes={1: "bool", 2: "uint32"},
        traffic=lambda shapes, itemsize: rows_kept(shapes[:2], itemsize),
        layouts=tuple(
            dataclasses.replace(layout, operands=None)
            for layout in SOFTMAXES
            if layout.operands is mask_of_keys
        ),
    ),
    Op(
        name="log_softmax",
        family="softmax",
        ours=lambda x, where=None, **options: fo.log_softmax(x, where=where, **options),
        reference=lambda x, where=None, scale=1.0, axis=-1: jax.nn.log_softmax(
            x if scale == 1.0 else scale * x, axis, where=where
        ),
        torch=lambda x, axis=-1: x.log_softmax(axis),
        operands=mask_of_keys,
        operand_dtypes={1: "bool"},
        traffic=rows_kept,
        layouts=(
            Layout("rows", (65536, 1024), (4096, 1024), without=1),
            Layout("vocabulary", (4096, 32768), (128, 32768), without=1),
        ),
    ),
    Op(
        name="layer_norm",
        family="norm",
        ours=fo.layer_norm,
        reference=plain_layer_norm,
        torch=torch_layer_norm,
        operands=with_parameters(1, 2),
        operand_dtypes={1: "float32", 2: "float32"},
        traffic=normalised(1, 2),
        layouts=NORMS,
        differentiated=(0, 1, 2),
    ),
    Op(
        name="residual_layer_norm",
        family="norm",
        ours=lambda x, residual, input_bias, scale, bias: fo.residual_layer_norm(
            x, residual, scale, bias, input_bias=input_bias
        ),
        reference=lambda x, residual, input_bias, scale, bias: plain_layer_norm(
            (x + input_bias + residual).astype(x.dtype), scale, bias
        ),
        torch=lambda x, residual, input_bias, scale, bias: torch_layer_norm(
            x + input_bias.to(x.dtype) + residual, scale, bias
        ),
        operands=with_parameters(2, 3),
        operand_dtypes={2: "float32", 3: "float32", 4: "float32"},
        traffic=normalised(2, 2),
        layouts=NORMS,
        differentiated=(0, 1, 2, 3, 4),
    ),
    Op(
        name="residual_layer_norm_dropout",
        family="norm",
        ours=lambda x, residual, input_bias, scale, bias, key: fo.residual_layer_norm(
            x,
            residual,
            scale,
            bias,
            input_bias=input_bias,
            dropout_key=key,
            dropout_rate=DROP_RATE,
        ),
        reference=lambda x, residual, input_bias, scale, bias, key: plain_layer_norm(
            plain_dropout(x + input_bias.astype(x.dtype), key) + residual, scale, bias
        ),
        fitted=False,
        slack=math.inf,  # other masks
        operands=lambda shape: (*with_parameters(2, 3)(shape), (2,)),
        operand_dtypes={2: "float32", 3: "float32", 4: "float32", 5: "uint32"},
        traffic=dropped_and_normalised,
        layouts=NORMS,
        differentiated=(0, 1, 2, 3, 4),
    ),
    Op(
        name="rms_norm",
        family="norm",
        ours=fo.rms_norm,
        reference=plain_rms_norm,
        torch=torch_rms_norm,
        operands=with_parameters(1, 1),
        operand_dtypes={1: "float32"},
        traffic=normalised(1, 1),
        layouts=NORMS,
        differentiated=(0, 1),
    ),
    Op(
        name="residual_rms_norm",
        family="norm",
        ours=lambda x, residual, scale: fo.residual_rms_norm(x, residual, scale),
        reference=lambda x, residual, scale: plain_rms_norm(x + residual, scale),
        torch=lambda x, residual, scale: torch_rms_norm(x + residual, scale),
        operands=with_parameters(2, 1),
        operand_dtypes={2: "float32"},
        traffic=normalised(2, 1),
        layouts=(NORMS[2],),
        differentiated=(0, 1, 2),
    ),
    *(
        Op(
            name=name,
            family="batch_norm",
            kernel_of=kernel_of,
            ours=partial(batch_norm, activation=activation),
            reference=partial(plain_batch_norm, activation=activation),
            torch=partial(torch_batch_norm, activation=activation),
            operands=of_channels(2, -1, residual),
            operand_dtypes={1: "float32", 2: "float32"},
            traffic=batch_normalised(relu=activation == "relu"),
            layouts=(*(found for b in BATCHES for found in _batches(*b, residual)), ROWS),
            differentiated=(0, 1, 2, 3),
            slack=1e-3 if activation else 5e-5,
        )
        for name, kernel_of, activation, residual in (
            ("batch_norm", "", None, False),
            ("batch_norm_relu", "batch_norm", "relu", False),
            ("batch_norm_add_relu", "batch_norm", "relu", True),
        )
    ),
    Op(
        name="batch_norm_inference",
        family="batch_norm",
        ours=fo.batch_norm_inference,
        reference=plain_batch_norm_inference,
        operands=of_channels(4, -1),
        operand_dtypes=dict.fromkeys((1, 2, 3, 4), "float32"),
        traffic=with_given_statistics,
        layouts=(Layout("NHWC 56x56x64", *BATCHES[0][1:], options=INFERENCE),),
        differentiated=(0, 3, 4),
        slack=1e-3,
        fuses=True,
    ),
    Op(
        name="lerp",
        family="lerp",
        ours=fo.lerp,
        reference=plain_lerp,
        torch=torch_lerp,
        operands=same(3),
        traffic=broadcast_together,
        layouts=LERPS,
        differentiated=(0, 1, 2),
        lone_gain=0.15,
    ),
    *(
        Op(
            name=name,
            family="bias_act",
            ours=fo.bias_act,
            reference=plain_bias_act,
            torch=torch_bias_act,
            operands=with_bias,
            traffic=traffic,
            layouts=_activations(activations),
            differentiated=(0, 1),
            lone_gain=0.15,
        )
        for name, activations, traffic in (
            ("bias_act", SMOOTH, broadcast_together),
            ("bias_relu", ("relu",), with_bias_and_mask),
        )
    ),
    Op(
        name="gated_act",
        family="gated_act",
        ours=fo.gated_act,
        reference=plain_gated_act,
        torch=torch_gated_act,
        operands=same(2),
        traffic=gated,
        layouts=GATES,
        differentiated=(0, 1),
        lone_gain=0.15,
    ),
    Op(
        name="cross_entropy",
        family="cross_entropy",
        ours=fo.cross_entropy,
        reference=plain_cross_entropy,
        torch=torch_cross_entropy,
        operands=labelled,
        valid=in_range,
        operand_dtypes={1: "int32"},
        traffic=rows_to_losses,
        layouts=CLASSES,
        lone_gain=0.15,
    ),
    Op(
        name="dropout",
        family="dropout",
        ours=dropout,
        reference=plain_dropout,
        operands=lambda shape: (shape, (2,)),
        operand_dtypes={1: "uint32"},
        traffic=lambda shapes, itemsize: moved(shapes[:1], itemsize),
        layouts=DROPOUTS,
        lone_gain=0.15,
    ),
    *(
        Op(
            name=name,
            family="window_sum",
            kernel_of=kernel_of,
            ours=fo.window_sum,
            reference=plain_window_sum,
            torch=torch_window_sum,
            operands=same(1),
            traffic=moved,
            layouts=layouts,
            phases=phases,
        )
        for name, kernel_of, layouts, phases in (
            ("window_sum", "", WINDOWS, ("forward",)),
            ("window_sum_valid", "window_sum", VALID_WINDOWS, ("forward", "backward")),
        )
    ),
)


def select_ops(names: list[str] | None = None) -> tuple[Op, ...]:
    """The ops with these names or in these families (``None``: all)."""
    known = [op.name for op in OPS]
    families = list(dict.fromkeys(op.family for op in OPS))
    if unknown := set(names or ()) - {*known, *families}:
        known = ", ".join(dict.fromkeys((*known, *families)))
        raise ValueError(f"no such op: {', '.join(sorted(unknown))}; known: {known}")
    return tuple(op for op in OPS if not names or {op.name, op.family} & set(names))


def cases(
    scale: str, ops: tuple[Op, ...] = OPS, dtypes: list[str] | None = None, pattern: str = ""
) -> Iterator[Case]:
    """Every case at ``scale`` ("gpu" or "cpu") whose name contains ``pattern``."""
    for op in ops:
        for layout in op.layouts:
            for dtype in layout.dtypes:
                case = Case(op, layout, scale, dtype)
                if (not dtypes or dtype in dtypes) and pattern in case.name:
                    yield case
