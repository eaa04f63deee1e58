"""What is measured: one row of ``OPS`` per op. A new family adds rows here and nothing else."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks import installed

fo = installed("jax_fastops")

Shape = tuple[int, ...]
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Traffic:
    """The fewest bytes that must cross the memory bus; together with a copy's speed, the floor."""

    forward: int  # not differentiated: operands in, result out
    forward_saving: int  # the same and what the backward needs beside the operands
    backward: int  # cotangent and saved values in, each distinct gradient out once

    @property
    def step(self) -> int:
        """Bytes of one forward and one backward with a barrier between."""
        return self.forward_saving + self.backward


@dataclass(frozen=True)
class Layout:
    """A named size: the main operand's shape on a GPU and on a CPU, and the dtypes it runs in."""

    label: str
    gpu: Shape
    cpu: Shape
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def shape(self, scale: str) -> Shape:
        return self.gpu if scale == "gpu" else self.cpu


@dataclass(frozen=True)
class Op:
    """One op: how to call it and jax.nn's equivalent, over which sizes, and what it must move."""

    name: str
    ours: Callable
    reference: Callable
    operands: Callable[[Shape], tuple[Shape, ...]]  # every operand's shape from the main one's
    traffic: Callable[[Shape, int], Traffic]  # from the main operand's shape and bytes per element
    layouts: tuple[Layout, ...]
    differentiated: tuple[int, ...] = (0,)  # positions of the operands that get a gradient
    fuses: bool = False  # XLA fuses a lone forward into its neighbours, so `auto` leaves it alone
    of_size: Callable[[int], Shape] = lambda elements: (elements // 1024, 1024)


@dataclass(frozen=True)
class Case:
    """One op at one shape and dtype."""

    op: Op
    label: str
    shape: Shape
    dtype: str

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.op.operands(self.shape)

    @property
    def traffic(self) -> Traffic:
        return self.op.traffic(self.shape, jnp.dtype(self.dtype).itemsize)

    @property
    def name(self) -> str:
        return f"{self.op.name} {self.label} {self.dtype}"


def same(count: int) -> Callable[[Shape], tuple[Shape, ...]]:
    """``count`` operands of the main shape."""
    return lambda shape: (shape,) * count


def masked_elementwise(operands: int) -> Callable[[Shape, int], Traffic]:
    """Traffic of an elementwise op that saves one bit per element and has one distinct gradient."""

    def traffic(shape: Shape, itemsize: int) -> Traffic:
        array = math.prod(shape) * itemsize
        mask = -(-math.prod(shape) // 8)
        forward = (operands + 1) * array
        return Traffic(forward, forward + mask, 2 * array + mask)

    return traffic


ELEMENTWISE = (
    Layout("large", (64, 1024, 1024), (4, 1024, 1024), DTYPES),
    Layout("conv NHWC", (128, 56, 56, 64), (16, 56, 56, 64)),
    Layout("odd rows", (65536, 1001), (4096, 1001)),
    Layout("small", (32, 1024), (32, 1024)),
)

OPS = (
    Op(
        name="relu",
        ours=fo.relu,
        reference=jax.nn.relu,
        operands=same(1),
        traffic=masked_elementwise(1),
        layouts=ELEMENTWISE,
        fuses=True,
    ),
    Op(
        name="add_relu",
        ours=fo.add_relu,
        reference=lambda x, y: jax.nn.relu(x + y),
        operands=same(2),
        traffic=masked_elementwise(2),
        layouts=ELEMENTWISE,
        differentiated=(0, 1),
        fuses=True,
    ),
)


def select_ops(names: list[str] | None = None) -> tuple[Op, ...]:
    """The ops of these names (``None``: all)."""
    known = [op.name for op in OPS]
    if unknown := set(names or ()) - set(known):
        raise ValueError(f"no such op: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return tuple(op for op in OPS if not names or op.name in names)


def cases(
    scale: str, ops: tuple[Op, ...] = OPS, dtypes: list[str] | None = None, pattern: str = ""
) -> Iterator[Case]:
    """Every case at ``scale`` ("gpu" or "cpu") whose name contains ``pattern``."""
    for op in ops:
        for layout in op.layouts:
            for dtype in layout.dtypes:
                case = Case(op, layout.label, layout.shape(scale), dtype)
                if (not dtypes or dtype in dtypes) and pattern in case.name:
                    yield case
