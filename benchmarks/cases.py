"""What is measured: one row of ``OPS`` per op. A new family adds rows here and nothing else."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from benchmarks import installed

fo = installed("jax_fastops")

Shape = tuple[int, ...]
DTYPES = ("float32", "bfloat16", "float16", "float64")
MOVED = ("float32", "bfloat16", "int8")  # one of each width that people transpose
WIDTHS = ("int8", "bfloat16", "float32", "float64", "complex128")  # rows of the `auto` table
PHASES = ("forward", "forward_saving", "backward", "step")


@dataclass(frozen=True)
class Traffic:
    """The fewest bytes that must cross the memory bus; together with a copy's speed, the floor."""

    forward: int  # not differentiated: operands in, result out
    forward_saving: int = 0  # the same and what the backward needs beside the operands
    backward: int = 0  # cotangents and saved values in, each distinct gradient out once

    @property
    def step(self) -> int:
        """Bytes of one forward and one backward with a barrier between."""
        return self.forward_saving + self.backward


@dataclass(frozen=True)
class Layout:
    """A named size: the main operand's shape on a GPU and on a CPU, the dtypes it runs in, and
    what goes with a shape: options of the call, and how many trailing operands are left out.
    """

    label: str
    gpu: Shape
    cpu: Shape
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    options: Mapping = field(default_factory=dict)
    without: int = 0

    def shape(self, scale: str) -> Shape:
        return self.gpu if scale == "gpu" else self.cpu


def _rows_of_1024(elements: int) -> tuple[Layout, ...]:
    shape = (elements // 1024, 1024)
    return (Layout(f"{elements}", shape, shape, DTYPES),)


@dataclass(frozen=True)
class Op:
    """One op: how to call it and its equivalents, over which sizes, and what it must move."""

    name: str
    family: str  # names the module of the op, and the file that its results go to
    ours: Callable  # of arrays, and a layout's options by keyword
    reference: Callable  # the same in jax.nn or jax.numpy
    operands: Callable[[Shape], tuple[Shape, ...]]  # every operand's shape from the main one's
    traffic: Callable[[tuple[Shape, ...], int], Traffic]  # from shapes and bytes per element
    layouts: tuple[Layout, ...]
    torch: Callable | None = None  # the same of PyTorch's tensors, which it needs no import for
    differentiated: tuple[int, ...] = (0,)  # positions of the operands that get a gradient
    phases: tuple[str, ...] = PHASES  # forward alone where the derivative is the op itself
    exact: bool = False  # moves bits: anything but equality is a mistake
    fuses: bool = False  # XLA fuses a lone forward into its neighbours, so `auto` leaves it alone
    kernel_of: str = ""  # the op of the package that this one is made of, where it is none itself
    # What stands for a number of elements in the `auto` table: `auto` takes the kernel where it
    # gains on one of these layouts and loses on none.
    of_size: Callable[[int], tuple[Layout, ...]] = _rows_of_1024
    table_row: Callable[[Layout], str] | None = None  # in the `auto` table; default: the name


@dataclass(frozen=True)
class Case:
    """One op in one layout and dtype, at one scale ("gpu" or "cpu")."""

    op: Op
    layout: Layout
    scale: str
    dtype: str

    @property
    def shapes(self) -> tuple[Shape, ...]:
        everything = self.op.operands(self.layout.shape(self.scale))
        return everything[: len(everything) - self.layout.without]

    @property
    def differentiated(self) -> tuple[int, ...]:
        return tuple(p for p in self.op.differentiated if p < len(self.shapes))

    @property
    def phases(self) -> tuple[str, ...]:
        """Integers have no gradient."""
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
    """Traffic of an elementwise op that saves one bit per element and has one distinct gradient."""

    def traffic(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
        array = math.prod(shapes[0]) * itemsize
        mask = -(-math.prod(shapes[0]) // 8)
        forward = (operands + 1) * array
        return Traffic(forward, forward + mask, 2 * array + mask)

    return traffic


def moved(shapes: tuple[Shape, ...], itemsize: int) -> Traffic:
    """Traffic of an op that moves its first operand, and adds the others on the way, if any.

    The backward moves the cotangents back and writes a gradient for every operand; partial sums of
    the small ones are no part of the floor.
    """
    array, *others = (math.prod(shape) * itemsize for shape in shapes)
    total = 2 * array + sum(others)
    return Traffic(total, total, total)


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
    """The same three times."""
    b, s, _ = qkv.shape
    qkv = qkv if bias is None else qkv + bias
    parts = qkv.reshape(b, s, 3, num_heads, -1)
    return tuple(jnp.swapaxes(parts[:, :, i], 1, 2) for i in range(3))


def torch_split_qkv(qkv, bias=None, *, num_heads: int):
    """One copy, of which q, k and v are views."""
    b, s, _ = qkv.shape
    qkv = qkv if bias is None else qkv + bias
    return qkv.view(b, s, 3, num_heads, -1).permute(2, 0, 3, 1, 4).contiguous().unbind(0)


def torch_split(x, bias=None, *, num_heads: int):
    b, s, _ = x.shape
    x = x if bias is None else x + bias
    return x.view(b, s, num_heads, -1).transpose(1, 2).contiguous()


def _transposes_of_size(elements: int) -> tuple[Layout, ...]:
    """A matrix, small matrices of a batch, a reversal, and rows that stay whole."""
    side = 2 ** (elements.bit_length() // 2)
    channels = 64 if elements >= 2**16 else 16
    heads = (16, 64) if elements >= 2**16 else (4, 16)  # how many, and their size
    length = min(512, elements // math.prod(heads))
    shapes = {
        (1, 0): (elements // side, side),
        (0, 2, 1): (
            max(1, elements // (channels * 4096)),
            min(4096, elements // channels),
            channels,
        ),
        (2, 1, 0): (elements // (channels * 64), channels, 64),
        (0, 2, 1, 3): (elements // (length * math.prod(heads)), length, *heads),
    }
    return tuple(
        Layout(f"{axes} {elements}", shape, shape, WIDTHS, {"axes": axes})
        for axes, shape in shapes.items()
    )


def _row_of(axes: tuple[int, ...]) -> str:
    """Rows that stay whole have a row of their own in the `auto` table."""
    return "transpose_rows" if axes[-1] == len(axes) - 1 else "transpose"


def _splits_of_size(parts: int) -> Callable[[int], tuple[Layout, ...]]:
    """With a bias; and without, where that is not a transposition, which has its own rows.

    The shapes have 3/4 (with one part, all) of the elements they stand for: 3 is no power of 2.
    """

    def layouts(elements: int) -> tuple[Layout, ...]:
        heads, size = (16, 64) if elements >= 2**16 else (4, 16)
        rows = elements // (heads * size * (4 if parts == 3 else 1)) or 1
        length = min(512, rows)
        shape = (rows // length, length, parts * heads * size)
        options = {"num_heads": heads}
        floating = tuple(dtype for dtype in WIDTHS if jnp.issubdtype(dtype, jnp.floating))
        biased = Layout(f"bias {elements}", shape, shape, floating, options)
        plain = Layout(f"no bias {elements}", shape, shape, WIDTHS, options, without=1)
        return (biased, plain) if parts == 3 else (biased,)

    return layouts


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

BERT = (32, 512, 768), (2, 512, 768)  # BERT-base's activations, on a GPU and on a CPU
BERT_QKV = (32, 512, 3 * 768), (2, 512, 3 * 768)
BERT_HEADS = (32, 12, 512, 64), (2, 12, 512, 64)
TWELVE = {"num_heads": 12}

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
        of_size=_transposes_of_size,
        table_row=lambda layout: _row_of(layout.options["axes"]),
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
        of_size=_splits_of_size(1),
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
        of_size=_splits_of_size(3),
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
)


def select_ops(names: list[str] | None = None) -> tuple[Op, ...]:
    """The ops of these names or families (``None``: all)."""
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
