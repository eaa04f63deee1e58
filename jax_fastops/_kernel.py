"""Calls of native kernels: one primitive whose every rule follows from the kernel's signature.

A :class:`Kernel` has no derivative; it is what the functions of an :class:`~jax_fastops._op.Op`
call. Its rules:

* result shapes, dtypes, shardings and varying axes: from the operands, through the signature;
* ``vmap``: fold the mapped axis into ``...`` where the signature allows it, else one call per
  example;
* partitioning: the leading dimensions that belong to ``...`` are batch dimensions, over which XLA
  runs the call on local shapes; every other dimension is replicated first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from jax_fastops import _compat, _native
from jax_fastops._signature import Signature, Slot


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A native kernel.

    ``name`` is the target's name without the ABI suffix, the same on every platform; ``signature``
    says what the buffers are. Calling it emits the custom call; keyword arguments are attributes,
    which must have the C type that the handler decodes (``np.float32(2)``, not ``2.0``).
    """

    name: str
    signature: Signature

    @classmethod
    def declare(cls, name: str, signature: str) -> Kernel:
        parsed = Signature.parse(signature)
        if not any(slot.dims for slot in parsed.operands + parsed.results):
            # Seen with jax 0.8 to 0.11: XLA gathers the operands of a call that has batch
            # dimensions alone, and partitions it as soon as one buffer has another dimension.
            raise ValueError(f"{name}: '{signature}' needs a dimension behind '...' somewhere")
        return cls(f"jax_fastops.{name}", parsed)

    def __call__(self, *operands, **attributes) -> list[jax.Array]:
        return kernel_call_p.bind(
            *match_varying(operands),
            kernel=self.name,
            signature=self.signature,
            attributes=tuple(sorted(attributes.items())),
        )


def match_varying(operands):
    """Operands that all vary over the same manual mesh axes (those of any of them)."""
    axes = [_compat.varying_axes(x) for x in operands]
    union = frozenset().union(*axes)
    if all(a == union for a in axes):
        return list(operands)
    return [_compat.as_varying(x, union) for x in operands]


def infer_avals(signature: Signature, avals) -> list:
    """Result avals, derived from operand avals so that shardings and varying axes carry over."""
    results = signature.infer([a.shape for a in avals], [a.dtype for a in avals])
    batch_spec = _batch_spec(signature, avals)
    weak = all(a.weak_type for a in avals)
    out = []
    for slot, (shape, dtype) in zip(signature.results, results, strict=True):
        spec = (batch_spec if slot.batched else ()) + (None,) * len(slot.dims)
        sharding = avals[0].sharding.update(spec=PartitionSpec(*spec))
        out.append(avals[0].update(shape=shape, dtype=dtype, weak_type=weak, sharding=sharding))
    return out


def _batch_spec(signature: Signature, avals) -> tuple:
    """The sharding of ``...``, merged over the operands as ``jnp.add`` merges its operands'."""
    merged: tuple | None = None
    for slot, aval in zip(signature.operands, avals, strict=True):
        if not slot.batched:
            continue
        spec = split_spec(slot, aval)[0]
        if merged is None:
            merged = spec
        clash = [(a, b) for a, b in zip(merged, spec, strict=True) if None not in (a, b) and a != b]
        if clash:
            raise ValueError(
                f"operands of '{signature}' are sharded differently along a leading dimension: "
                f"{clash[0][0]!r} and {clash[0][1]!r}; use jax.sharding.reshard on one of them"
            )
        merged = tuple(b if a is None else a for a, b in zip(merged, spec, strict=True))
    return merged or ()


def split_spec(slot: Slot, aval) -> tuple[tuple, tuple]:
    """An aval's partition spec, as (batch dimensions', own dimensions')."""
    spec = tuple(aval.sharding.spec)
    spec += (None,) * (aval.ndim - len(spec))
    n_batch = aval.ndim - len(slot.dims)
    return spec[:n_batch], spec[n_batch:]


def fold(signature: Signature, operands, dims, before: Sequence[int] | None = None) -> list:
    """Operands with the mapped axis as their first batch dimension.

    For use where :meth:`Signature.folds`. A ``...`` operand that is not mapped is broadcast, since
    all of them must have the same leading dimensions. ``before`` counts dimensions of each operand
    that stay in front of the mapped one.
    """
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    folded = []
    for slot, x, d, at in zip(
        signature.operands, operands, dims, before or [0] * len(operands), strict=True
    ):
        if d is not None:
            x = jnp.moveaxis(x, d, at)
        elif slot.batched:
            x = jnp.expand_dims(x, at)
            x = jnp.broadcast_to(x, (*x.shape[:at], size, *x.shape[at + 1 :]))
        folded.append(x)
    return folded


def compiled(primitive: Primitive, params: dict):
    """The jitted call of a primitive, for evaluation outside of ``jax.jit``."""
    return _compiled(primitive, tuple(sorted(params.items(), key=lambda item: item[0])))


@functools.cache
def _compiled(primitive: Primitive, params: tuple):
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


kernel_call_p = Primitive("fastops_kernel_call")
kernel_call_p.multiple_results = True
kernel_call_p.def_impl(lambda *operands, **params: compiled(kernel_call_p, params)(*operands))


@kernel_call_p.def_abstract_eval
def _abstract_eval(*avals, kernel, signature, attributes):
    del kernel, attributes
    return infer_avals(signature, avals)


def _batch(operands, dims, *, kernel, signature, attributes):
    params = dict(kernel=kernel, signature=signature, attributes=attributes)
    mapped = [d is not None for d in dims]
    if signature.folds(mapped):
        outs = kernel_call_p.bind(*match_varying(fold(signature, operands, dims)), **params)
    else:
        fronts = [
            jnp.moveaxis(x, d, 0) for x, d, m in zip(operands, dims, mapped, strict=True) if m
        ]

        def one(examples):
            rest = iter(examples)
            args = [next(rest) if m else x for x, m in zip(operands, mapped, strict=True)]
            return kernel_call_p.bind(*match_varying(args), **params)

        outs = jax.lax.map(one, fronts)
    return outs, [0] * len(outs)


batching.primitive_batchers[kernel_call_p] = _batch


def _lower(platform: str):
    def rule(ctx, *operands, kernel, signature, attributes):
        lowering = jax.ffi.ffi_lowering(_native.target_name(kernel, platform))
        results = lowering(ctx, *operands, **dict(attributes))
        bound = signature.bind([a.shape for a in ctx.avals_in])
        # The partitioner needs sizes: with symbolic ones (jax.export) the call is left replicated.
        if all(isinstance(d, int) for a in (*ctx.avals_in, *ctx.avals_out) for d in a.shape):
            attrs = results[0].owner.attributes
            attrs["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get(
                {"num_batch_dims": mlir.ir.StringAttr.get(str(len(bound.batch)))}
            )
            rule_text = sharding_rule(signature, ctx.avals_in, ctx.avals_out, len(bound.batch))
            attrs["sdy.sharding_rule"] = mlir.ir.Attribute.parse(rule_text)
        return results

    return rule


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(kernel_call_p, _lower(_platform), platform=_platform)


def sharding_rule(signature: Signature, avals_in, avals_out, n_batch: int) -> str:
    """The Shardy rule of a call: batch dimensions are shared factors, all others need replication.

    Factors are lettered i, j, k, ... in order of appearance, as the attribute's parser demands.
    """
    factors: dict[Any, int] = {}  # what a dimension stands for -> its size
    sides = []
    for slots, avals in ((signature.operands, avals_in), (signature.results, avals_out)):
        side = []
        for slot, aval in zip(slots, avals, strict=True):
            batch = range(n_batch) if slot.batched else ()
            keys = [("batch", d) for d in batch] + [("own", str(d)) for d in slot.dims]
            for key, size in zip(keys, aval.shape, strict=True):
                factors.setdefault(key, size)
            side.append(keys)
        sides.append(side)
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
    """Number of elements, or a large number where the shape is symbolic."""
    shape = np.shape(x)
    return math.prod(shape) if all(isinstance(d, int) for d in shape) else 1 << 40
