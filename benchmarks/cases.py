"""The cases that are measured: one entry of ``OPS`` per op.

The families are those of the package. Plain forms are those of the models' ``PLAIN``.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks import installed

fo = installed("jax_fastops")
_plain = installed("jax_fastops.models._plain")
_resnet = installed("jax_fastops.models.resnet")

Shape = tuple[int, ...]
DTYPES = ("float32", "bfloat16", "float16", "float64")
HALVES = ("bfloat16", "float16")
MOVED = ("float32", "bfloat16", "int8")  # one dtype of each width that people transpose
PHASES = ("forward", "forward_saving", "backward", "step")


@dataclass(frozen=True)
class Layout:
    """A named size: the main operand's shape on a GPU and on a CPU, dtypes, options of the call."""

    label: str
    gpu: Shape
    cpu: Shape
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    options: Mapping = field(default_factory=dict)
    without: int = 0  # trailing operands that are left out
    # The shapes of all operands from that of the main one, if the op's text does not have them.
    operands: Callable[[Shape], tuple[Shape, ...]] | None = None


@dataclass(frozen=True)
class Op:
    """One op: how to call it and its equivalents, and its sizes."""

    name: str
    ours: Callable  # takes arrays, and the options of a layout by keyword
    reference: Callable  # the same in jax.nn or jax.numpy
    # The operands: the shape ``x`` of the main one, its last dimension ``n``, its others ``...``,
    # or a length. With the dtype if that is not the one of the case: "x, n:float32".
    operands: str
    layouts: tuple[Layout, ...]
    torch: Callable | None = None  # the same for PyTorch's tensors
    valid: Callable = lambda *operands: operands  # operands that the op takes, from random ones
    data: tuple[int, ...] = ()  # positions of floats that get no gradient
    phases: tuple[str, ...] = PHASES  # only forward if the derivative is the op itself
    exact: bool = False  # only moves elements: results must be equal
    # The difference in norm that rounding may cause. It is more than a few epsilons for long sums
    # that cancel, and for a ReLU of values near 0, where its gradient jumps.
    slack: float = 0.0
    fuses: bool = False  # XLA fuses a forward into its neighbors, so `auto` leaves it to XLA
    # What a forward must gain for `auto` to take the kernel, because XLA may fuse the forward.
    lone_gain: float = 0.0
    kernel_of: str = ""  # the public op that this one calls, if its name differs
    composed: Callable | None = None  # what `auto` runs in place of the kernel, if it calls ops
    fitted: bool = True  # `auto` decides by entries of this op, and not by those of several ops
    # How often the main operand, and in the backward all that is kept, is read: statistics must be
    # known before normalization starts.
    passes: int = 1
    unread: float = 0.0  # the part of the residuals that the backward need not read

    @property
    def family(self) -> str:
        """The module of the op, and a part of the name of the file of results."""
        known = fo._registry.families().items()
        of = {name: family for family, calls in known for name in calls}
        return of.get(self.name) or of[self.kernel_of]


@dataclass(frozen=True)
class Case:
    """One op in one layout and dtype, at one scale ("gpu" or "cpu")."""

    op: Op
    layout: Layout
    scale: str
    dtype: str

    @property
    def shapes(self) -> tuple[Shape, ...]:
        shape = getattr(self.layout, self.scale)
        parts = {"x": shape, "n": shape[-1:], "...": shape[:-1], "2": (2,)}
        texts = [text.split(":")[0] for text in self.op.operands.split(", ")]
        of_main = self.layout.operands
        everything = of_main(shape) if of_main else tuple(parts[text] for text in texts)
        return everything[: len(everything) - self.layout.without]

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """The dtype of every operand."""
        texts = [text.partition(":")[2] for text in self.op.operands.split(", ")]
        return tuple(texts[i] or self.dtype for i in range(len(self.shapes)))

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(self.shapes, self.operand_dtypes, strict=True)
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in pairs]

    @property
    def differentiated(self) -> tuple[int, ...]:
        """The positions of the operands that get a gradient."""
        dtypes = enumerate(self.operand_dtypes)
        floats = (i for i, dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact))
        return tuple(i for i in floats if i not in self.op.data)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of the op; integers have no gradient, and so only the forward."""
        return self.op.phases if jnp.issubdtype(self.dtype, jnp.inexact) else ("forward",)

    @property
    def name(self) -> str:
        return f"{self.op.name} {self.layout.label} {self.dtype}"


def of_channels(parameters: int, axis: int, residual: bool = False) -> Callable:
    """An array, parameters along its channel axis, and an optional residual."""
    return lambda shape: (shape, *((shape[axis],),) * parameters, *(shape,) * residual)


def mask_of_keys(shape: Shape) -> tuple[Shape, ...]:
    """Attention scores, and a mask of the keys: (B, 1, 1, L)."""
    return shape, (shape[0], 1, 1, shape[-1])


def mask_and_key(shape: Shape) -> tuple[Shape, ...]:
    return *mask_of_keys(shape), (2,)


def mask_of_pairs(shape: Shape) -> tuple[Shape, ...]:
    """Attention scores, and a mask of queries and keys, the same for all heads: (B, 1, L, L)."""
    return shape, (shape[0], 1, *shape[-2:])


def functional():
    """The functions of PyTorch, which is imported when one is called."""
    return importlib.import_module("torch.nn.functional")


def torch_transpose(x, axes):
    return x.permute(axes).contiguous()


def torch_merge_heads(x):
    return x.transpose(1, 2).flatten(2)


def plain_lerp(start, end, weight):
    return start + weight * (end - start)


def torch_lerp(start, end, weight):
    return start.lerp(end, weight)


def ours_softmax(x, where=None, key=None, *, function=fo.softmax, **options):
    if key is not None:
        options |= dict(dropout_key=key, dropout_rate=DROP_RATE)
    return function(x, where=where, **options)


def plain_softmax(x, where=None, key=None, *, function=jax.nn.softmax, scale=1.0, axis=-1):
    y = function(x if scale == 1.0 else scale * x, axis, where=where)
    return y if key is None else plain_dropout(y, key)


ours_log_softmax = partial(ours_softmax, function=fo.log_softmax)
plain_log_softmax = partial(plain_softmax, function=jax.nn.log_softmax)


def torch_log_softmax(x, axis=-1):
    return x.log_softmax(axis)


def torch_softmax(x, where=None, *, scale=1.0, axis=-1):
    x = x if scale == 1.0 else x * scale
    x = x if where is None else x.masked_fill(~where, float("-inf"))
    return x.softmax(axis)


def torch_layer_norm(x, scale, bias):
    scale, bias = scale.to(x.dtype), bias.to(x.dtype)
    return functional().layer_norm(x, x.shape[-1:], scale, bias, 1e-6)


def ours_residual_layer_norm(x, residual, input_bias, scale, bias, key=None):
    drop = dict(dropout_key=key, dropout_rate=DROP_RATE if key is not None else 0.0)
    return fo.residual_layer_norm(x, residual, scale, bias, input_bias=input_bias, **drop)


def plain_residual_layer_norm(x, residual, input_bias, scale, bias, key=None):
    x = x + input_bias.astype(x.dtype)
    x = x if key is None else plain_dropout(x, key)
    return _plain.layer_norm(x + residual, scale, bias)


def torch_residual_layer_norm(x, residual, input_bias, scale, bias):
    return torch_layer_norm(x + input_bias.to(x.dtype) + residual, scale, bias)


def plain_residual_rms_norm(x, residual, scale):
    return _plain.residual_rms_norm(x, residual, scale, eps=1e-6, return_sum=False)


def torch_residual_rms_norm(x, residual, scale):
    return torch_rms_norm(x + residual, scale)


def torch_rms_norm(x, scale):
    return functional().rms_norm(x, x.shape[-1:], scale.to(x.dtype), 1e-6)


def ours_batch_norm(x, scale, bias, residual=None, **options):
    """Only the normalized array: the batch statistics get no gradient."""
    return fo.batch_norm(x, scale, bias, residual=residual, **options)[0]


def plain_batch_norm(x, scale, bias, residual=None, **options):
    return _resnet.plain_batch_norm(x, scale, bias, residual=residual, **options)[0]


def torch_batch_norm(x, scale, bias, residual=None, *, axis, activation=None):
    """PyTorch's channels are axis 1; with ``axis=-1`` its array is in channels_last format."""
    given = (x.movedim(axis, 1), None, None, scale, bias)
    y = functional().batch_norm(*given, training=True, eps=1e-5).movedim(1, axis)
    y = y if residual is None else y + residual
    return getattr(functional(), activation)(y) if activation else y


def plain_group_norm(x, scale, bias, residual=None, *, num_groups, axis=-1, activation=None):
    """As Flax computes it: one pass for the mean and the mean square, then one for the result."""
    x = x if residual is None else x + residual
    at = axis % x.ndim
    y = x.reshape(*x.shape[:at], num_groups, -1, *x.shape[at + 1 :])
    y = y.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes = tuple(i for i in range(1, y.ndim) if i != at)
    mean = y.mean(axes, keepdims=True)
    variance = jnp.maximum(0, jnp.square(y).mean(axes, keepdims=True) - jnp.square(mean))
    shape = (num_groups, -1, *(1,) * (x.ndim - at - 1))
    factor = jax.lax.rsqrt(variance + 1e-6) * scale.astype(y.dtype).reshape(shape)
    y = (y - mean) * factor + bias.astype(y.dtype).reshape(shape)
    y = y if activation is None else getattr(jax.nn, activation)(y)
    return y.reshape(x.shape).astype(x.dtype)


def ours_group_norm(x, scale, bias, residual=None, **options):
    return fo.group_norm(x, scale, bias, residual=residual, **options)


def torch_group_norm(x, scale, bias, residual=None, *, num_groups, axis=-1, activation=None):
    x = x if residual is None else x + residual
    scale, bias = scale.to(x.dtype), bias.to(x.dtype)
    y = functional().group_norm(x.movedim(axis, 1), num_groups, scale, bias, 1e-6)
    y = y.movedim(1, axis)
    return y if activation is None else torch_activation(activation)(y)


@jax.custom_vjp
def relu_keeping_result(x):
    """ReLU as in frameworks without bitmasks: the gradient is masked by the result, ``y > 0``."""
    return jax.nn.relu(x)


relu_keeping_result.defvjp(
    lambda x: (jax.nn.relu(x),) * 2, lambda y, dy: (jnp.where(y > 0, dy, jnp.zeros_like(dy)),)
)


def torch_activation(name: str) -> Callable:
    if name.startswith("gelu"):
        return partial(functional().gelu, approximate="tanh" if name == "gelu" else "none")
    return getattr(functional(), name)


def torch_bias_act(x, bias, activation):
    return torch_activation(activation)(x + bias)


def composed_dense_act(x, kernel, bias, activation):
    return fo.bias_act(x @ kernel, bias, activation=activation)


def torch_dense_act(x, kernel, bias, activation):
    return torch_activation(activation)(functional().linear(x, kernel.t(), bias))


def torch_gated_act(gate, up=None, activation="silu"):
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return torch_activation(activation)(gate) * up


def plain_cross_entropy(logits, labels):
    """The formula of optax, in the accumulator dtype."""
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    x = x - jax.lax.stop_gradient(x.max(-1, keepdims=True))
    at_label = jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
    return jnp.log(jnp.exp(x).sum(-1)) - at_label


def torch_cross_entropy(logits, labels):
    flat = logits.reshape(-1, logits.shape[-1]).float()
    loss = functional().cross_entropy(flat, labels.flatten().long(), reduction="none")
    return loss.reshape(labels.shape)


DROP_RATE = 0.1


def ours_dropout(x, key):
    return fo.dropout(x, key, DROP_RATE)


def plain_dropout(x, key):
    keep = jax.random.bernoulli(key, 1 - DROP_RATE, x.shape)
    return jnp.where(keep, x / (1 - DROP_RATE), jnp.zeros((), x.dtype))


def plain_window_sum(x, radius, axis=-1, padding="VALID"):
    """Window sum in float32, as users write it in JAX."""
    window = [2 * radius + 1 if d == axis % x.ndim else 1 for d in range(x.ndim)]
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    zero = wide.dtype.type(0)
    sums = jax.lax.reduce_window(wide, zero, jax.lax.add, window, (1,) * x.ndim, padding)
    return sums.astype(x.dtype)


def torch_window_sum(x, radius, axis=-1, padding="VALID"):
    """Window sum by average pooling, which divides by the length of the window."""
    lines = x.movedim(axis, -1)
    pad = radius if padding == "SAME" else 0
    flat = lines.reshape(-1, 1, lines.shape[-1])
    means = functional().avg_pool1d(flat, 2 * radius + 1, 1, pad)
    sums = means.mul(2 * radius + 1).reshape(*lines.shape[:-1], -1)
    return sums.movedim(-1, axis).contiguous()


def plain_split_heads(x, bias=None, *, num_heads: int):
    """Features into heads, with the bias."""
    b, s, _ = x.shape
    x = x if bias is None else x + bias
    return jnp.swapaxes(x.reshape(b, s, num_heads, -1), 1, 2)


def with_angles(function: Callable) -> Callable:
    """Grouped heads with rotary embedding, and with norms if there are scales."""

    def split(qkv, cos, sin, q_scale=None, k_scale=None, **options):
        scales = dict(q_scale=q_scale, k_scale=k_scale)
        options |= dict(layout="sequence_first", eps=1e-6)
        return function(qkv, rotary=(cos, sin), **scales, **options)

    return split


def with_rotary(heads: int) -> Callable[[Shape], tuple[Shape, ...]]:
    """Features of so many heads, cosines and sines of half a head, and scales of a head."""

    def operands(shape: Shape) -> tuple[Shape, ...]:
        size = shape[-1] // heads
        return shape, (shape[1], size // 2), (shape[1], size // 2), (size,), (size,)

    return operands


def torch_split_qkv_heads(qkv, bias=None, *, num_heads: int):
    """One copy; q, k and v are views of it."""
    qkv = qkv if bias is None else qkv + bias
    parts = qkv.view(*qkv.shape[:2], 3, num_heads, -1)
    return parts.permute(2, 0, 3, 1, 4).contiguous().unbind(0)


def torch_split_heads(x, bias=None, *, num_heads: int):
    x = x if bias is None else x + bias
    return x.view(*x.shape[:2], num_heads, -1).transpose(1, 2).contiguous()


def segments_of(x) -> int:
    """As many nodes as a graph with these edges may have."""
    return max(1, x.shape[0] // 20)


def ours_segment_sum(x, ids, **options):
    return fo.segment_sum(x, ids, segments_of(x), **options)


def plain_segment_sum(x, ids, **options):
    return jax.ops.segment_sum(x, ids, segments_of(x), **options)


def plain_take(table, ids):
    return jnp.take(table, ids, axis=0)


EDGES = ((2_000_000, 64), (100_000, 64))


def words(count: int) -> Callable:
    """A table, and the indices of so many words."""
    return lambda shape: (shape, (count,))


ELEMENTWISE = (
    Layout("large", (64, 1024, 1024), (4, 1024, 1024), DTYPES),
    Layout("conv NHWC", (128, 56, 56, 64), (16, 56, 56, 64)),
    Layout("odd rows", (65536, 1001), (4096, 1001)),
    Layout("small", (32, 1024), (32, 1024)),
)


TRANSPOSES = (
    Layout("matrix", (8192, 8192), (2048, 2048), MOVED, {"axes": (1, 0)}),
    Layout("matrices", (64, 1024, 1024), (4, 1024, 1024), MOVED, {"axes": (0, 2, 1)}),
    Layout("short rows", (1024, 1024, 64), (256, 256, 64), MOVED, {"axes": (1, 0, 2)}),
    Layout("heads", (32, 512, 16, 64), (2, 512, 16, 64), MOVED, {"axes": (0, 2, 1, 3)}),
    Layout("NHWC to NCHW", (64, 56, 56, 128), (4, 56, 56, 128), MOVED, {"axes": (0, 3, 1, 2)}),
    Layout("NCHW to NHWC", (64, 128, 56, 56), (4, 128, 56, 56), MOVED, {"axes": (0, 2, 3, 1)}),
    Layout("reversed", (96, 97, 98, 99), (48, 49, 50, 51), MOVED, {"axes": (3, 2, 1, 0)}),
    Layout("odd", (33, 1000, 1001), (33, 250, 251), MOVED, {"axes": (2, 0, 1)}),
    Layout("thin middle", (4096, 3, 4096), (1024, 3, 1024), MOVED, {"axes": (2, 1, 0)}),
    Layout("thin", (524288, 3, 32), (32768, 3, 32), MOVED, {"axes": (0, 2, 1)}),
    Layout(
        "rank 8",
        (8, 4, 6, 8, 4, 6, 8, 32),
        (4, 4, 6, 4, 4, 6, 4, 16),
        MOVED,
        {"axes": (5, 2, 7, 0, 4, 1, 6, 3)},
    ),
    Layout("2^31 + 1", (3, 715827883), (3, 44739243), ("int8",), {"axes": (1, 0)}),
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


def _alternating(shape: Shape) -> tuple[Shape, ...]:
    """Start has every even dimension, end every odd one; the others have size 1."""
    even = tuple(size if d % 2 == 0 else 1 for d, size in enumerate(shape))
    odd = tuple(size if d % 2 else 1 for d, size in enumerate(shape))
    return even, odd, shape


SCALAR = {"operands": lambda shape: (shape, shape, (1,))}
START = {"operands": lambda shape: ((shape[0], *(1 for _ in shape[1:])), shape, (1,))}
PLANES = {"operands": lambda s: ((s[0], 1, s[2]), (1, *s[1:]), (*s[:2], 1))}
CROSSED = {"operands": lambda shape: (shape[-1:], shape, (*shape[:-1], 1))}
IMAGES = (16, 3, 1024, 1024), (16, 3, 256, 256)
LERPS = (
    Layout("all alike", *IMAGES),
    Layout("weight (1,)", *IMAGES, **SCALAR),
    Layout("start (16, 1, 1, 1), weight (1,)", *IMAGES, **START),
    Layout("three planes", (1024, 64, 1024), (256, 64, 256), **PLANES),
    Layout("row, all, column", (16384, 4096), (4096, 1024), **CROSSED),
    Layout("rank 7", (8, 16, 8, 16, 8, 16, 64), (4, 8, 4, 8, 4, 8, 128), operands=_alternating),
    Layout("odd row, all, column", (30000, 1001), (4000, 1001), **CROSSED),
)


GATES = (
    Layout("two operands", (16384, 5632), (2048, 1408)),
    Layout("halves", (16384, 11264), (2048, 2816), without=1),
    Layout("halves, gelu", (16384, 8192), (2048, 2048), ("bfloat16",), {"activation": "gelu"}, 1),
    Layout("two operands, odd", (30000, 1001), (4000, 1001)),
    Layout("halves, odd", (30000, 2002), (4000, 2002), without=1),
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
SMOOTH = tuple(name for name in fo._activations.ACTIVATIONS if name != "relu")


def _activations(names: tuple[str, ...]) -> tuple[Layout, ...]:
    return tuple(
        Layout(f"{name}{label}", gpu, cpu, options={"activation": name})
        for name in names
        for label, gpu, cpu in (
            ("", (32768, 4096), (4096, 1024)),
            (", odd", (30000, 1001), (4000, 1001)),
        )
    )


def into(columns: int) -> Callable:
    """Rows, a kernel of so many columns, and a bias."""
    return lambda shape: (shape, (shape[-1], columns), (columns,))


def _dense(rows: int, width: int, columns: int, activation: str = "gelu_exact") -> Layout:
    """On a CPU a sixteenth of the rows."""
    label = f"{rows} x {width} x {columns}"
    label += f", {activation}" if activation != "gelu_exact" else ""
    shapes = (rows, width), (max(1, rows // 16), width)
    options = {"activation": activation}
    return Layout(label, *shapes, ("bfloat16",), options, operands=into(columns))


# The feed-forward of BERT-base, also of a list of tokens, that of BERT-large, and odd rows.
DENSE = (
    *(_dense(rows, 768, 3072) for rows in (32, 128, 1024, 13312, 16384)),
    *(_dense(16384, 768, 3072, name) for name in ("gelu", "silu", "relu")),
    _dense(16384, 1024, 4096),
    _dense(5000, 520, 776),
)


def _windows(padding: str, *kinds: tuple[str, int, Shape, Shape]) -> tuple[Layout, ...]:
    """Over the last axis; and over the first one, with the axes of the arrays exchanged."""
    before = "VALID, " * (padding == "VALID")
    return tuple(
        Layout(
            f"{before}{'axis 0, ' * (axis == 0)}{odd}radius {radius}",
            gpu if axis else gpu[::-1],
            cpu if axis else cpu[::-1],
            options={"radius": radius, "axis": axis, "padding": padding},
        )
        for axis in (-1, 0)
        for odd, radius, gpu, cpu in kinds
    )


LINES = (4096, 16384), (256, 16384)
WINDOWS = _windows(
    "SAME",
    ("", 2, *LINES),
    ("", 16, *LINES),
    ("", 256, (4096, 16384), (128, 16384)),
    ("odd, ", 16, (4097, 16381), (257, 16381)),
)
# The ends that the result lacks are a thousandth of the array.
VALID_WINDOWS = _windows("VALID", ("", 16, *LINES))


def _batches(name: str, gpu: Shape, cpu: Shape, residual: bool = False) -> tuple[Layout, ...]:
    """Images of (n, h, w, c) with channels last, and the same with channels first."""

    def layout(order: str, axis: int, gpu: Shape, cpu: Shape) -> Layout:
        operands = of_channels(2, axis, residual)
        return Layout(f"{order} {name}", gpu, cpu, options={"axis": axis}, operands=operands)

    if len(gpu) == 2:
        return (
            Layout(name, gpu, cpu, options={"axis": -1}, operands=of_channels(2, -1, residual)),
        )
    first = ((n, c, h, w) for n, h, w, c in (gpu, cpu))
    return layout("NHWC", -1, gpu, cpu), layout("NCHW", 1, *first)


# Shapes of ResNet, of the op's source (112x112x32), and odd numbers of channels.
BATCHES = (
    ("56x56x64", (128, 56, 56, 64), (16, 56, 56, 64)),
    ("28x28x128", (128, 28, 28, 128), (32, 28, 28, 128)),
    ("7x7x2048", (128, 7, 7, 2048), (32, 7, 7, 2048)),
    ("112x112x32", (16, 112, 112, 32), (4, 112, 112, 32)),
    *((f"56x56x{c}", (128, 56, 56, c), (16, 56, 56, c)) for c in (3, 17, 63)),
    ("rows", (65536, 1024), (4096, 1024)),
)


def _grouped(name: str, gpu: Shape, cpu: Shape, groups: int = 32, **more) -> tuple[Layout, ...]:
    """Images with channels last and first, normalized in groups, with silu."""
    options = {"num_groups": groups, "activation": "silu"} | more
    residual = options.pop("residual", False)
    return tuple(
        dataclasses.replace(layout, options=options | layout.options)
        for layout in _batches(name, gpu, cpu, residual)
    )


# Shapes of a diffusion model and of its decoder, and instance norm.
GROUPED_IMAGES = (
    *_grouped("64x64x320", (16, 64, 64, 320), (2, 64, 64, 320)),
    *_grouped("32x32x640", (16, 32, 32, 640), (2, 32, 32, 640)),
    *_grouped("128x128x128", (8, 128, 128, 128), (1, 128, 128, 128)),
    *_grouped("16x16x1280", (16, 16, 16, 1280), (2, 16, 16, 1280)),
    *_grouped("one 256x256x256", (1, 256, 256, 256), (1, 64, 64, 256)),
    *_grouped("one 1024x1024x128", (1, 1024, 1024, 128), (1, 128, 128, 128)),
    *_grouped("instances 56x56x64", (64, 56, 56, 64), (4, 56, 56, 64), 64, activation="relu"),
    *_grouped("odd 33x33x60", (32, 33, 33, 60), (4, 33, 33, 60), 4),
)
# Variances are drawn like all operands, so some are negative. This epsilon makes all sums positive.
INFERENCE = {"axis": -1, "activation": "relu", "eps": 9.0}


BERT = (32, 512, 768), (2, 512, 768)  # BERT-base's activations, on a GPU and on a CPU
TWELVE = {"num_heads": 12}
# A decoder: 32 heads of queries and 8 of keys.
GROUPED = {"num_heads": 32, "num_kv_heads": 8}


def _decoder_heads(size: int) -> tuple[Shape, Shape]:
    return (8, 2048, 48 * size), (1, 512, 48 * size)


ROTARY = {"operands": with_rotary(48)}


MAY_FUSE = {"lone_gain": 0.15}
OTHER_MASKS = {"fitted": False, "slack": math.inf}
MOVE = {"phases": ("forward",), "exact": True}
AFFINE = "n:float32, n:float32"
DROPPED = tuple(
    dataclasses.replace(layout, operands=mask_and_key)
    for layout in SOFTMAXES
    if layout.operands is mask_of_keys
)
VOCABULARY = ("rows", "vocabulary")
CONV = Layout("conv", (16, 112, 112, 32), (4, 112, 112, 32), ("float32", *HALVES))
BIASED = Layout("bias", *BERT, options=TWELVE)
QKV = {"gpu": (32, 512, 3 * 768), "cpu": (2, 512, 3 * 768), "options": TWELVE}


def op(name: str, operands: str, layouts: tuple[Layout, ...], calls: str = "", **more) -> Op:
    """An op and its equivalents, which this module has under the names of the op, or of ``calls``.

    They are ``ours_<name>``, or the public function, ``plain_<name>``, and ``torch_<name>``.
    """
    known = globals()
    for side, prefix in (("ours", "ours"), ("reference", "plain"), ("torch", "torch")):
        found = [known.get(f"{prefix}_{n}") for n in (name, calls)]
        found += [getattr(fo, n, None) for n in (calls, name) if side == "ours"]
        more.setdefault(side, next(filter(None, found), None))
    return Op(name=name, operands=operands, layouts=layouts, **more)


OPS = (
    op("relu", "x", ELEMENTWISE, reference=jax.nn.relu, fuses=True),
    op("add_relu", "x, x", ELEMENTWISE, reference=lambda x, y: jax.nn.relu(x + y), fuses=True),
    # What a bitmask gains over a mask from the result.
    op("relu_from_result", "x", (CONV,), "relu", reference=relu_keeping_result, kernel_of="relu"),
    op("transpose", "x", TRANSPOSES, reference=jnp.transpose, **MOVE),
    op("split_heads", "x, n", (BIASED,)),
    op(
        "split_qkv_heads",
        "x, n",
        (Layout("bias", **QKV), Layout("no bias", **QKV, without=1)),
        reference=_plain.split_qkv_heads,
    ),
    op(
        "split_qkv_heads_rotary",
        "x" + 4 * ", n:float32",
        tuple(
            Layout(f"{norms}heads of {size}", *_decoder_heads(size), options=GROUPED, **more)
            for norms, more in (("norms, ", ROTARY), ("", ROTARY | {"without": 2}))
            for size in (64, 128)
        ),
        ours=with_angles(fo.split_qkv_heads),
        reference=with_angles(_plain.split_grouped_heads),
        kernel_of="split_qkv_heads",
        data=(1, 2),
        unread=1 / 6,  # the features of values
    ),
    op(
        "merge_heads",
        "x",
        (Layout("BERT", (32, 12, 512, 64), (2, 12, 512, 64), MOVED),),
        reference=_plain.merge_heads,
        kernel_of="transpose",
        **MOVE,
    ),
    op("softmax", "x, n:bool", SOFTMAXES),
    op("softmax_dropout", "x, n:bool, 2:uint32", DROPPED, "softmax", torch=None, **OTHER_MASKS),
    op("log_softmax", "x, n:bool", tuple(x for x in SOFTMAXES if x.label in VOCABULARY)),
    op("layer_norm", f"x, {AFFINE}", NORMS, reference=_plain.layer_norm),
    op("residual_layer_norm", f"x, x, n:float32, {AFFINE}", NORMS),
    op(
        "residual_layer_norm_dropout",
        f"x, x, n:float32, {AFFINE}, 2:uint32",
        NORMS,
        ours=ours_residual_layer_norm,
        reference=plain_residual_layer_norm,
        torch=None,
        **OTHER_MASKS,
    ),
    op("rms_norm", "x, n:float32", NORMS, reference=partial(_plain.rms_norm, eps=1e-6)),
    op("residual_rms_norm", "x, x, n:float32", (NORMS[2],)),
    *(
        op(
            name,
            f"x, {AFFINE}, x",
            tuple(layout for b in BATCHES for layout in _batches(*b, residual)),
            ours=partial(ours_batch_norm, activation=activation),
            reference=partial(plain_batch_norm, activation=activation),
            torch=partial(torch_batch_norm, activation=activation),
            kernel_of="batch_norm",
            slack=1e-3 if activation else 5e-5,
            passes=2,
        )
        for name, activation, residual in (
            ("batch_norm", None, False),
            ("batch_norm_relu", "relu", False),
            ("batch_norm_add_relu", "relu", True),
        )
    ),
    op(
        "batch_norm_inference",
        f"x, {AFFINE}, {AFFINE}",
        (Layout("NHWC 56x56x64", *BATCHES[0][1:], options=INFERENCE),),
        reference=_resnet.plain_batch_norm_inference,
        data=(1, 2),
        slack=1e-3,
        fuses=True,
    ),
    op("group_norm", f"x, {AFFINE}, x", GROUPED_IMAGES, slack=1e-4),
    op("lerp", "x, x, x", LERPS, **MAY_FUSE),
    op("bias_act", "x, n", _activations(SMOOTH), reference=_plain.bias_act, **MAY_FUSE),
    op(
        "bias_relu",
        "x, n",
        _activations(("relu",)),
        "bias_act",
        reference=_plain.bias_act,
        **MAY_FUSE,
    ),
    *(
        op(
            name,
            "x, x, x",
            DENSE,
            reference=_plain.dense_act,
            torch=torch_dense_act,
            kernel_of="dense_act",
            phases=("forward",),
            fitted=fitted,
            **more,
        )
        for name, fitted, more in (
            ("dense_act", True, {"composed": composed_dense_act}),
            ("dense_act_composed", False, {"ours": composed_dense_act}),
        )
    ),
    op("gated_act", "x, x", GATES, reference=_plain.gated_act, **MAY_FUSE),
    op(
        "cross_entropy",
        "x, ...:int32",
        CLASSES,
        valid=lambda logits, labels: (logits, labels % logits.shape[-1]),
        **MAY_FUSE,
    ),
    op("dropout", "x, 2:uint32", DROPOUTS, **MAY_FUSE),
    op(
        "segment_sum",
        "x, ...:int32",
        (Layout("edges", *EDGES),),
        valid=lambda x, ids: (x, ids % segments_of(x)),
        phases=("forward",),
    ),
    op(
        "segment_sum_sorted",
        "x, ...:int32",
        (Layout("edges", *EDGES, options={"indices_are_sorted": True}),),
        "segment_sum",
        valid=lambda x, ids: (x, jnp.sort(ids % segments_of(x))),
        kernel_of="segment_sum",
        phases=("forward",),
    ),
    op(
        "take",
        "x, ...:int32",
        (Layout("words", (50257, 768), (50257, 128), operands=words(16384)),),
        valid=lambda table, ids: (table, ids % table.shape[0]),
        phases=("forward", "backward"),
        **MAY_FUSE,
    ),
    op("window_sum", "x", WINDOWS, phases=("forward",)),
    op(
        "window_sum_valid",
        "x",
        VALID_WINDOWS,
        "window_sum",
        kernel_of="window_sum",
        phases=("forward", "backward"),
    ),
)


def select_ops(names: list[str] | None = None) -> tuple[Op, ...]:
    """The ops with these names or in these families (``None``: all)."""
    known = dict.fromkeys(name for op in OPS for name in (op.name, op.family))
    if unknown := set(names or ()) - known.keys():
        raise ValueError(f"no such op: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return tuple(op for op in OPS if not names or {op.name, op.family} & set(names))


def cases(scale: str, ops=OPS, dtypes: list[str] | None = None, pattern="") -> Iterator[Case]:
    """Every case at ``scale`` ("gpu" or "cpu") whose name contains ``pattern``."""
    for op in ops:
        for layout in op.layouts:
            for dtype in layout.dtypes:
                case = Case(op, layout, scale, dtype)
                if (not dtypes or dtype in dtypes) and pattern in case.name:
                    yield case
