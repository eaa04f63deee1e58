"""Calls of native kernels: one primitive whose every rule follows from the kernel's signature.

A :class:`Kernel` has no derivative. The functions of an :class:`~jax_fastops._op.Op` call it. Its
rules:

* result shapes, dtypes, shardings and varying axes follow from the operands, by the signature;
* ``vmap`` folds the mapped axis into ``...`` if the signature allows it, otherwise there is one
  call per example;
* partitioning: the leading dimensions of ``...`` are batch dimensions, over which XLA runs the call
  on local shapes. So are dimensions with a star in the signature. XLA gathers every other dimension
  before the call.

XLA partitions a custom call over leading dimensions only. In a program for several devices, a call
with stars is therefore emitted in its *batch-first form*: a transposition of the logical shape
moves the dimensions with a star after ``...``, and the layouts of the call's buffers keep every
dimension in its place in memory. XLA turns these transpositions into bitcasts on a GPU, but may
copy on a CPU. The attribute ``batch_first`` tells a handler which form it gets.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, PartitionSpec

from jax_fastops import _compat, _native
from jax_fastops._arguments import placed
from jax_fastops._dispatch import Refused, bandwidth
from jax_fastops._signature import Bound, Dim, Signature, Slot
from jax_fastops._views import broadcast, explicit_spec, parts_of, spec_of


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A native kernel: its name without the ABI suffix, and its buffers and attributes by name.

    The handler gets the signature of each call as text, without the absent buffers, and checks the
    buffers against it. So only this declaration lists them.

    Calling the kernel emits the custom call. Every keyword is a name in the declaration:

    * an operand, or ``None`` if it is absent. The first operands may be positional;
    * an optional result, with whether it is wanted;
    * an attribute, which is converted to the declared type, such as ``np.float32``;
    * a dimension, with its size. Needed if no operand determines it.

    The results come as a named tuple of all declared results, with ``None`` for the absent ones.
    """

    name: str
    signature: Signature
    attributes: tuple[tuple[str, Callable], ...] = ()

    @classmethod
    def declare(cls, name: str, signature: str, **attributes: Callable) -> Kernel:
        parsed = Signature.parse(signature)
        slots = parsed.operands + parsed.results
        if not any(slot.dims for slot in slots):
            # See _batch_first: XLA would gather a call that has only batch dimensions.
            raise ValueError(f"{name}: '{signature}' needs a dimension after '...' somewhere")
        kernel = cls(f"jax_fastops.{name}", parsed, tuple(attributes.items()))
        names = [*(slot.name for slot in slots), *attributes, *kernel.sizes]
        if None in names or len(set(names)) != len(names):
            raise ValueError(f"{name}: '{signature}' needs a different name for each buffer")
        return kernel

    def with_dimensions(self, **slots: str) -> Kernel:
        """The kernel with just these buffers, and with these dimensions (and dtypes) for them."""

        def chosen(side):
            for slot in side:
                if slot.name in slots:
                    own = Slot.parse(slots[slot.name])
                    dtype = slot.dtype if own.dtype is None else own.dtype
                    yield dataclasses.replace(own, name=slot.name, dtype=dtype)

        both = (tuple(chosen(s)) for s in (self.signature.operands, self.signature.results))
        return dataclasses.replace(self, signature=Signature(*both))

    def of(self, *arrays, **given) -> KernelCall:
        """The call with these arguments, which is not emitted yet."""
        given |= zip((slot.name for slot in self.signature.operands), arrays, strict=False)
        operands = {slot.name: given.pop(slot.name, None) for slot in self.signature.operands}
        requested = {s.name: given.pop(s.name, not s.optional) for s in self.signature.results}
        attributes = {name: convert(given.pop(name)) for name, convert in self.attributes}
        if unknown := given.keys() - self.sizes:
            raise TypeError(f"{self.name} has no {', '.join(sorted(unknown))}")
        present = {name for name, x in operands.items() if x is not None}
        signature = self.signature.of(present | {name for name, x in requested.items() if x}, given)
        chosen = tuple(operands[slot.name] for slot in signature.operands)
        for slot, x in zip(signature.operands, chosen, strict=True):
            if not slot.accepts(x.dtype, chosen[0].dtype):
                raise TypeError(f"{self.name}: '{slot}' has dtype {x.dtype} in '{signature}'")
        attributes["buffers"] = str(signature)
        return KernelCall(self, signature, chosen, tuple(sorted(attributes.items())))

    def __call__(self, *arrays, **given):
        return self.of(*arrays, **given)()

    @functools.cached_property
    def sizes(self) -> set[str]:
        """The names of all dimensions."""
        slots = self.signature.operands + self.signature.results
        return {name for slot in slots for dim in slot.dims for name in dim.names}

    @functools.cached_property
    def results(self) -> type:
        names = [slot.name for slot in self.signature.results]
        return collections.namedtuple(self.name.rpartition(".")[2], names)


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A call of a kernel. ``signature`` has only the buffers that are present."""

    kernel: Kernel
    signature: Signature
    operands: tuple
    attributes: tuple[tuple[str, Any], ...]

    def __call__(self):
        found = _call_primitive(_context.name or self.kernel.name).bind(
            *match_varying(self.operands),
            kernel=self.kernel.name,
            signature=self.signature,
            attributes=self.attributes,
            layouts=None,
        )
        names = (slot.name for slot in self.signature.results)
        results = dict.fromkeys(self.kernel.results._fields) | dict(zip(names, found, strict=True))
        return self.kernel.results(**results)


def match_varying(operands):
    """The operands, all varying over the union of their manual mesh axes."""
    axes = [_compat.varying_axes(x) for x in operands]
    union = frozenset().union(*axes)
    if all(a == union for a in axes):
        return list(operands)
    return [_compat.as_varying(x, union) for x in operands]


def infer_avals(signature: Signature, avals) -> list:
    """The results' avals, with shardings and varying axes derived from the operands' avals."""
    results = signature.infer([a.shape for a in avals], [a.dtype for a in avals])
    batch_spec, free = _shardings(signature, avals)
    weak = all(a.weak_type for a in avals)
    kind = kind_of(avals)
    out = []
    for slot, (shape, dtype) in zip(signature.results, results, strict=True):
        if slot.like is None:
            own = tuple(free[d.name] if d.free else None for d in slot.dims)
            spec = (batch_spec if slot.batched else ()) + own
        else:
            spec = tuple(avals[slot.like].sharding.spec)
        sharding = kind.update(spec=PartitionSpec(*spec))
        out.append(avals[0].update(shape=shape, dtype=dtype, weak_type=weak, sharding=sharding))
    return out


def kind_of(avals):
    """A sharding on the mesh of the operands. A number may have no mesh."""
    shardings = [aval.sharding for aval in avals]
    return next((s for s in shardings if not s.mesh.empty), shardings[0])


def _shardings(signature: Signature, avals) -> tuple[tuple, dict[str, Any]]:
    """The mesh axes of ``...`` and of each dimension with a star, as ``jnp.add`` merges them.

    An operand with ``~...`` does not count, unless all operands have ``~...``. Then only those of
    its dimensions count that are not broadcast.
    """
    bound, only = signature.bind([a.shape for a in avals]), signature.only_broadcast
    batch: list[list] = [[] for _ in bound.batch]
    free: dict[str, list] = {name: [] for name in signature.free}
    for slot, aval in zip(signature.operands, avals, strict=True):
        if slot.batched and (only or not slot.broadcast):
            n_batch, (lead, own) = len(bound.batch), split_spec(slot, aval)
            for axes, axis, size, whole in zip(batch, lead, aval.shape, bound.batch, strict=False):
                axes += [axis] * (size == whole)
            for dim, axis, size in zip(slot.dims, own, aval.shape[n_batch:], strict=True):
                if dim.free and size == bound.sizes[dim.name]:
                    free[dim.name].append(axis)
    merged = {name: _merged(signature, axes) for name, axes in free.items()}
    return tuple(_merged(signature, axes) for axes in batch), merged


def _merged(signature: Signature, axes):
    """The mesh axis (or tuple of axes) of a dimension, from its shardings in all operands."""
    found = list(dict.fromkeys(axis for axis in axes if axis is not None))
    if len(found) > 1:
        raise ValueError(
            f"operands of '{signature}' are sharded differently along one dimension: "
            f"{found[0]!r} and {found[1]!r}; use jax.sharding.reshard on one of them"
        )
    return found[0] if found else None


def split_spec(slot: Slot, aval) -> tuple[tuple, tuple]:
    """An aval's partition spec, as (batch dimensions', own dimensions')."""
    spec = tuple(aval.sharding.spec)
    spec += (None,) * (aval.ndim - len(spec))
    n_batch = aval.ndim - len(slot.dims)
    return spec[:n_batch], spec[n_batch:]


def fold(signature: Signature, operands, dims, before: Sequence[int] | None = None) -> list:
    """Operands with the mapped axis as their first batch dimension, if :meth:`Signature.folds`.

    An unmapped operand with ``...`` is broadcast. One with ``~...`` is broadcast only if a result
    has its shape: otherwise that result would be a sum over the mapped axis, instead of one per
    index. ``before`` is the number of dimensions of each operand that stay before the mapped one.
    """
    size, axis, kind = mapped_axis(operands, dims)
    shaping = {slot.like for slot in signature.results}
    folded = []
    for i, (slot, x, d, at) in enumerate(
        zip(signature.operands, operands, dims, before or [0] * len(operands), strict=True)
    ):
        if d is not None:
            x = jnp.moveaxis(x, d, at)
        elif slot.broadcast and i not in shaping:
            x = jnp.expand_dims(x, at)
        elif slot.batched:
            x = jnp.expand_dims(x, at)
            shape, spec = (*x.shape[:at], size, *x.shape[at + 1 :]), None
            if axis is not None:  # sharded like the mapped operands, as its gradient will be
                own = spec_of(x) or (None,) * x.ndim
                spec = (*own[:at], axis, *own[at + 1 :])
            x = broadcast(x, shape, kind, spec)
        folded.append(x)
    return folded


class _Context(threading.local):
    """For how many devices this thread lowers a program, and the name of the kernels' calls."""

    devices = 1
    name = ""


_context = _Context()


@contextlib.contextmanager
def lowering_for(devices: int, name: str = ""):
    """A context for what is lowered inside.

    XLA may partition it over this number of devices. Its calls of kernels have this name.
    """
    before = _context.devices, _context.name
    _context.devices, _context.name = devices, name
    try:
        yield
    finally:
        _context.devices, _context.name = before


def partitions() -> int:
    """The number of devices over which XLA may partition the call that is being lowered."""
    return _context.devices


def mapped_axis(operands, dims) -> tuple[Any, Any, Any]:
    """The size of a mapped axis; its mesh axis and a sharding if that is part of the type."""
    pairs = [(x, d) for x, d in zip(operands, dims, strict=True) if d is not None]
    for x, d in pairs:
        spec = spec_of(x)
        if spec is not None and spec[d] is not None:
            return x.shape[d], spec[d], jax.typeof(x).sharding
    x, d = pairs[0]
    return x.shape[d], None, None


def _with_leading_axis(x, axis, kind):
    """``x`` with its first dimension sharded over a mesh axis, or over none."""
    own = spec_of(x) or (None,) * x.ndim
    return jax.sharding.reshard(x, kind.update(spec=PartitionSpec(axis, *own[1:])))


def compiled(primitive: Primitive, params: dict):
    """The jitted call of a primitive, for evaluation outside of ``jax.jit``."""
    call = _compiled(primitive, tuple(sorted(params.items(), key=lambda item: item[0])))

    def run(*operands):
        with jax.disable_jit(False):  # only XLA can run a kernel
            return call(*operands)

    return run


@functools.cache
def _compiled(primitive: Primitive, params: tuple):
    def call(*operands):
        return primitive.bind(*operands, **dict(params))

    return jax.jit(_compat.as_one_primitive(call, primitive.name))


@functools.cache
def _call_primitive(name: str) -> Primitive:
    """The primitive of the kernels' calls of this name. XLA and profilers show the name."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, **params: compiled(primitive, params)(*operands))
    primitive.def_abstract_eval(lambda *avals, signature, **_: infer_avals(signature, avals))
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, _lower(primitive, platform), platform=platform)
    return primitive


def _batch(primitive, operands, dims, *, kernel, signature, attributes, layouts):
    assert layouts is None, "the batch-first form exists only in lowering rules"
    params = dict(kernel=kernel, signature=signature, attributes=attributes, layouts=None)
    mapped = [d is not None for d in dims]
    if signature.folds(mapped):
        outs = primitive.bind(*match_varying(fold(signature, operands, dims)), **params)
    else:
        fronts = [
            jnp.moveaxis(x, d, 0) for x, d, m in zip(operands, dims, mapped, strict=True) if m
        ]

        def one(examples):
            args = placed(examples, mapped, operands)
            return primitive.bind(*match_varying(args), **params)

        _, axis, kind = mapped_axis(operands, dims)
        if axis is None:
            outs = jax.lax.map(one, fronts)
        else:  # a loop runs only over whole axes
            outs = jax.lax.map(one, [_with_leading_axis(x, None, kind) for x in fronts])
            outs = [_with_leading_axis(y, axis, kind) for y in outs]
    return outs, [0] * len(outs)


def _lower(primitive: Primitive, platform: str):
    def rule(ctx, *operands, kernel, signature, attributes, layouts):
        devices = _compat.partitions(ctx)
        unshared = any(slot.broadcast or not slot.batched for slot in signature.operands)
        if (signature.free or unshared) and devices > 1 and layouts is None:

            def form(*operands):
                bound = signature.bind([x.shape for x in operands])
                operands = with_copies(signature, operands, devices)
                params = dict(kernel=kernel, signature=signature, attributes=attributes)
                return _batch_first(primitive, *operands, **params, bound=bound)

            return mlir.lower_fun(form, multiple_results=True)(ctx, *operands)
        if signature.free:
            attributes = (*attributes, ("batch_first", np.bool_(False)))
        into, out_of = layouts or (None, None)
        lowering = jax.ffi.ffi_lowering(
            _native.target_name(kernel, platform), operand_layouts=into, result_layouts=out_of
        )
        results = lowering(ctx, *operands, **dict(attributes))
        bound = signature.bind([a.shape for a in ctx.avals_in])
        # The partitioner needs sizes that fit 32 bits. With larger ones, and with symbolic ones
        # (jax.export), the call stays replicated. So does one with an operand that shards do not
        # divide, in a program that is exported for one device and runs on several.
        sizes = [d for a in (*ctx.avals_in, *ctx.avals_out) for d in a.shape]
        known = all(isinstance(d, int) for d in sizes)
        shared = (devices > 1 or not unshared) and known and all(d < 1 << 31 for d in sizes)
        attrs, frontend = results[0].owner.attributes, {}
        if shared:
            frontend["num_batch_dims"] = len(bound.batch)
            rule_text = sharding_rule(signature, ctx.avals_in, ctx.avals_out, len(bound.batch))
            attrs["sdy.sharding_rule"] = mlir.ir.Attribute.parse(rule_text)
        if platform == "cuda" and known:
            # XLA's scheduler, which hides collectives, takes any custom call for 10 us otherwise.
            avals = (*ctx.avals_in, *ctx.avals_out)
            frontend["latency_metadata"] = _nanoseconds(avals, devices if shared else 1)
        if frontend:
            attrs["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get(
                {name: mlir.ir.StringAttr.get(str(value)) for name, value in frontend.items()}
            )
        return results

    return rule


def _nanoseconds(avals, devices: int) -> int:
    """The time in which one of the devices moves its part of the buffers, by its bandwidth."""
    size = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
    return max(1, round(1e9 * size / devices / bandwidth("cuda")))


def with_copies(signature: Signature, operands, devices: int) -> list[jax.Array]:
    """Operands with one copy per shard along the dimensions in which they are broadcast.

    XLA partitions all operands of a call in the same way, and would pad a dimension of size 1 with
    zeros. If the number of shards is not part of the type, there is a copy for every device.
    """
    spread = list(operands)
    kind = kind_of([jax.typeof(x) for x in operands])
    for i, slot in enumerate(signature.operands):
        if slot.broadcast:
            shape, spec = shape_of_copies(signature, operands, i, devices)
            if spec is None or shape != operands[i].shape:
                spread[i] = broadcast(operands[i], shape, kind, spec)
    return spread


def shape_of_copies(signature: Signature, operands, index: int, devices: int):
    """The shape of an operand with ``~...`` in a program for ``devices`` devices.

    Also returns its partition spec, or ``None`` if that is not part of the type.
    """
    slot, aval = signature.operands[index], jax.typeof(operands[index])
    avals = [jax.typeof(x) for x in operands]
    bound = signature.bind([a.shape for a in avals])
    batch_axes, free_axes = _shardings(signature, avals)
    n_batch = len(bound.batch)
    kind = kind_of(avals)
    own_spec = explicit_spec(aval.sharding, aval.ndim)
    known = own_spec is not None and AxisType.Auto not in kind.mesh.axis_types
    shape, spec = [], []
    for d, size in enumerate(aval.shape):
        dim = slot.dims[d - n_batch] if d >= n_batch else None
        whole = size if dim and not dim.free else bound.sizes[dim.name] if dim else bound.batch[d]
        axis = own_spec[d] if own_spec else None
        if size != whole:
            found = free_axes[dim.name] if dim else batch_axes[d]
            axis = found if own_spec else None
            size = parts_of(found, kind) if known else devices
        shape.append(size)
        spec.append(axis)
    return tuple(shape), None if own_spec is None else tuple(spec)


def without_large_copies(call: KernelCall) -> KernelCall:
    """The call. Refuses it if an operand's copies take more than half of the largest buffer's size.

    In a program for several devices with auto mesh axes, an operand has a copy for each device
    along every dimension in which it is broadcast (see ``with_copies``). The reference needs none.
    """
    devices, signature, operands = partitions(), call.signature, call.operands
    if devices == 1 or not any(slot.broadcast for slot in signature.operands):
        return call
    shapes = [x.shape for x in operands]
    if not all(isinstance(d, int) for shape in shapes for d in shape):
        raise Refused("several devices may need copies of an operand of symbolic size")
    buffers = signature.infer(shapes, [x.dtype for x in operands])
    buffers += [(x.shape, x.dtype) for x in operands]
    largest = max(math.prod(shape) * dtype.itemsize for shape, dtype in buffers)
    for i, (slot, x) in enumerate(zip(signature.operands, operands, strict=True)):
        if slot.broadcast:
            shape, _ = shape_of_copies(signature, operands, i, devices)
            if shape != x.shape and 2 * math.prod(shape) * x.dtype.itemsize > largest:
                raise Refused(f"{devices} devices would need large copies of an operand")
    return call


def _batch_first(primitive, *operands, kernel, signature: Signature, attributes, bound: Bound):
    """The call in its batch-first form, with the transpositions before and after it.

    ``bound`` is the signature bound to the shapes that operands had before they got copies.
    """
    n_batch = len(bound.batch)

    def order(slot: Slot) -> tuple[int, ...]:
        """The positions in the slot of the dimensions of the form."""
        at = {d.name: n_batch + i for i, d in enumerate(slot.dims) if d.free}
        own = [n_batch * slot.batched + i for i, d in enumerate(slot.dims) if not d.free]
        free = [at[name] for name in signature.free] if slot.batched else []
        return (*range(n_batch * slot.batched), *free, *own)

    # Observed with jax 0.8 to 0.11: XLA gathers operands that have only batch dimensions. It does
    # not gather them if they have one more dimension.
    slots = signature.operands + signature.results
    padded = not any(slot.own for slot in slots)
    pad = (Dim(None, size=1),) * padded
    inner = [dataclasses.replace(slot, dims=slot.own + pad) for slot in slots]
    orders = [order(slot) for slot in slots]
    layouts = [(*([len(o)] * padded), *_minor_to_major(o)) for o in orders]
    count = len(operands)

    # XLA also partitions the leading dimensions of a parameter, unless the call has more batch
    # dimensions than the parameter has dimensions. So batch dimensions of size 1 are added.
    n_lead = n_batch + len(signature.free)
    ranks = [len(slot.dims) for slot in signature.operands if not slot.batched]
    ones = max([0, *(rank + 1 - n_lead for rank in ranks)]) if n_lead else 0
    more = tuple(range(ones))
    layouts = [
        (*(d + ones for d in layout), *reversed(more)) if slot.batched else layout
        for layout, slot in zip(layouts, slots, strict=True)
    ]

    def enter(x, o, slot):
        x = jax.lax.transpose(x, o)
        x = jax.lax.expand_dims(x, (x.ndim,)) if padded else x
        return jax.lax.expand_dims(x, more) if ones and slot.batched else x

    def leave(y, o, slot):
        y = jax.lax.squeeze(y, more) if ones and slot.batched else y
        return jax.lax.transpose(jax.lax.squeeze(y, (y.ndim - 1,)) if padded else y, _inverse(o))

    whole = None
    if signature.only_broadcast:
        whole = (1,) * ones + bound.batch + tuple(bound.sizes[name] for name in signature.free)
    results = primitive.bind(
        *map(enter, operands, orders[:count], slots[:count]),
        kernel=kernel,
        signature=Signature(tuple(inner[:count]), tuple(inner[count:]), whole),
        attributes=(*attributes, *[("batch_first", np.bool_(True))] * bool(signature.free)),
        layouts=(tuple(layouts[:count]), tuple(layouts[count:])),
    )
    return list(map(leave, results, orders[count:], slots[count:]))


def _minor_to_major(order: Sequence[int]) -> tuple[int, ...]:
    """The layout that keeps the elements of an array in place when ``order`` transposes it."""
    return tuple(reversed(_inverse(order)))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argsort(order))


def sharding_rule(signature: Signature, avals_in, avals_out, n_batch: int) -> str:
    """The Shardy rule of a call: batch dimensions are shared factors, all others need replication.

    Factors are named i, j, k, ... in order of appearance, as the attribute's parser requires.
    """
    avals = (avals_in, avals_out)
    sides = []
    for slots in (signature.operands, signature.results):
        side = []
        for slot in slots:
            batch = range(n_batch) if slot.batched else ()
            # A name is the same factor everywhere. A fixed size is a separate factor.
            own = [
                str(d) if d.name else (len(sides), len(side), i) for i, d in enumerate(slot.dims)
            ]
            side.append([("batch", d) for d in batch] + [("own", key) for key in own])
        sides.append(side)
    # Factor -> size. Operands with copies do not determine the size of another dimension.
    known: dict[Any, int] = {}
    for slots, side, types in zip(
        (signature.operands, signature.results), sides, avals, strict=True
    ):
        for slot, keys, aval in zip(slots, side, types, strict=True):
            if not slot.broadcast:
                known.update(zip(keys, aval.shape, strict=True))
    factors: dict[Any, int] = {}
    for side, types in zip(sides, avals, strict=True):
        for at, aval in enumerate(types):
            side[at] = [
                key if known.setdefault(key, size) == size else ("copies", i, key, size)
                for i, (key, size) in enumerate(zip(side[at], aval.shape, strict=True))
            ]
            for key, size in zip(side[at], aval.shape, strict=True):
                factors.setdefault(key, size)
    letters = {key: _factor_name(i) for i, key in enumerate(factors)}
    left, right = (
        ", ".join("[" + ", ".join(letters[k] for k in keys) + "]" for keys in side)
        for side in sides
    )
    sizes = ", ".join(f"{letters[key]}={size}" for key, size in factors.items())
    fixed = [letters[key] for key in factors if key[0] == "own"]
    need = f" need_replication={{{', '.join(fixed)}}}" if fixed else ""
    return f"#sdy.op_sharding_rule<({left})->({right}) {{{sizes}}}{need}, custom>"


def _factor_name(index: int) -> str:
    # Shardy names factors i..z, then z_1, z_2, ...
    return chr(ord("i") + index) if index < 18 else f"z_{index - 17}"


def size_of(x) -> int:
    """The number of elements, or a large number if the shape is symbolic."""
    shape = np.shape(x)
    return math.prod(shape) if all(isinstance(d, int) for d in shape) else 1 << 40
