"""The op layer: one declaration gives four primitives with every transformation.

An :class:`Op` declares a signature, a reference in ``jax.numpy``, kernels, and the residuals for
the backward. Each op has four primitives:

* the op itself, for programs that are not differentiated. It keeps nothing;
* ``_fwd``, which also returns the values to keep. Differentiating the op emits it;
* ``_lin``, the tangent map, linear in the tangents. Its transpose emits ``_vjp``;
* ``_vjp``, the backward, linear in the cotangents. Its transpose emits ``_lin``.

``_lin`` and ``_vjp`` take the declared residuals and nothing else of the forward, so only the
residuals live between forward and backward. Their derivatives with respect to the residuals are
those of the reference, so derivatives of every order are exact. A gradient program holds only
``_fwd`` and ``_vjp``. Where ``auto`` takes the reference for a differentiated call, JAX
differentiates that instead.

Under ``vmap``, a mapped axis becomes one more batch dimension if the signature says that the op
treats examples independently. Otherwise the primitive records the axis as a *level*: its meaning is
``jax.vmap`` of the unmapped primitive, and every result has the level's axis first. So no rule has
to guess an output's batch dimension, and per-example gradients are never summed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jax_fastops import _compat, _dispatch, _explain, _implementation, _native
from jax_fastops._arguments import placed, selected
from jax_fastops._kernel import (
    Kernel,
    compiled,
    fold,
    infer_avals,
    lowering_for,
    match_varying,
    split_spec,
)
from jax_fastops._registry import Example, register
from jax_fastops._settings import own_code
from jax_fastops._signature import Signature, Slot, parse_slots
from jax_fastops._views import broadcast_to, broadcast_type

_OPS: dict[str, Op] = {}


def ops() -> dict[str, Op]:
    """All declared ops by name."""
    return dict(_OPS)


@dataclasses.dataclass(frozen=True)
class Call:
    """One use of an op, as its primitives carry it: slots with concrete dtypes, and options.

    ``args`` are the slots of all operands. ``present`` marks the operands that were given; the
    others are optional and were ``None``. ``sizes`` are the named dimensions. ``request`` decides
    between kernel and reference.
    """

    args: tuple[Slot, ...]
    outs: tuple[Slot, ...]
    saved: tuple[Slot, ...]
    present: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...]
    sizes: tuple[tuple[str, Any], ...]
    request: _dispatch.Request

    def __repr__(self) -> str:
        """All that decides what the call computes: ``autofuse`` compares calls by this text."""
        args = [
            str(x) if given else "None" for x, given in zip(self.args, self.present, strict=True)
        ]
        sides = (", ".join(map(str, side)) for side in (args, self.outs, self.saved))
        options = "".join(f" {name}={value}" for name, value in self.options)
        return "'{} -> {} | {}' {}{}".format(*sides, self.request.implementation, options)

    def without_record(self) -> Call:
        return dataclasses.replace(self, request=dataclasses.replace(self.request, record=None))

    def by_operand(self, given: Sequence) -> list:
        """One entry per operand: ``None`` for an absent one."""
        return placed(given, self.present)

    def given(self, everything: Sequence) -> list:
        """The entries of ``everything`` (one per operand) whose operand was given."""
        return selected(everything, self.present)


@dataclasses.dataclass(eq=False, repr=False)
class Op:
    """Declares an op. Functions take arrays in the signature's order, then options by keyword.

    Args:
      name: the name in jaxprs, and the default one in the ``auto`` table.
      signature: ``"operands -> results | saved"`` (see :mod:`jax_fastops._signature`), where the
        forward kernel saves the last ones in addition to its results. A call may give its own.
      reference: the op in ``jax.numpy``. Returns one array or a tuple.
      forward: the op by kernel, without saved values. Returns the same results.
      save: the saved values in ``jax.numpy``, as a tuple, from the operands.
      forward_saving: results and saved values by kernel, in one flat tuple. Default: ``forward``.
      residuals: ``(args, results, saved) -> tuple``: selects what the backward keeps. It is also
        applied to slots, so it may only select. Default: the operands. To have a gradient, an
        operand with ``~...`` must be among the residuals: its gradient has its shape.
      pullback: ``(residuals, cotangents) -> tuple`` of gradients in ``jax.numpy``, one per operand.
        Default: the pullback of the reference. The residuals must then begin with all operands.
      pushforward: ``(residuals, tangents) -> tuple`` of result tangents in ``jax.numpy``, with
        ``None`` for an operand that has no tangent. Given together with ``pullback``.
      backward: the pullback by kernels, ``(residuals, cotangents, needs_grad) -> tuple``, one
        gradient per operand. An entry whose ``needs_grad`` is False is ignored. Partial sums of
        parameter gradients are summed here. They may have the accumulator dtype; the op casts them.
      tangent: the pushforward by kernels. Default: that of the reference.
      batch: for an op of one operand and one result that keeps nothing: how it takes a mapped axis
        at any position, so that ``vmap`` moves no data. ``batch(call, operand=i)`` is the call that
        takes the axis at ``i`` of the operand and gives it first, ``batch(call, result=i)`` the one
        that takes it first and gives it at ``i`` of the result.
      independent: whether the op treats every index of ``...`` independently. If not, a mapped axis
        never becomes one more batch dimension.
      data: the places of operands that are seldom differentiated. A derivative along one of them
        is that of the reference.
      shared: the names and places of operands that all rows share. A call takes the reference if
        ``vmap`` maps one of them: the kernel would need one call per example.
      dtype_class: the name of a dtype in the ``auto`` table, for ops to which only its width
        matters.
      kernels: every kernel that the above use. A platform that lacks one takes the reference.
      family: the name of the module that has the op. Default: the name of the op.
      example: a call for the registry of families (:mod:`jax_fastops._registry`).
    """

    name: str
    signature: str
    reference: Callable[..., Any]
    _: dataclasses.KW_ONLY
    kernels: Sequence[Kernel] = ()
    forward: Callable | None = None
    save: Callable = lambda *args, **options: ()
    forward_saving: Callable | None = None
    residuals: Callable = lambda args, outs, saved: args
    pullback: Callable | None = None
    pushforward: Callable | None = None
    backward: Callable | None = None
    tangent: Callable | None = None
    batch: Callable | None = None
    independent: bool = True
    data: Sequence[int] = ()
    shared: dict[str, int] = dataclasses.field(default_factory=dict)
    dtype_class: Callable = str
    family: str | None = None
    example: Example | None = None

    def __post_init__(self):
        if (self.pullback is None) != (self.pushforward is None):
            raise ValueError(f"{self.name}: 'pullback' and 'pushforward' are given together or not")
        self.forward_saving = self.forward_saving or self.forward
        operands = parse_slots(self.signature.partition("->")[0])
        batched = [slot for slot in operands if slot.batched]
        self._broadcasts = bool(batched) and all(slot.broadcast for slot in batched)
        self._needs = frozenset(k.name for k in self.kernels)
        stages = [_Stage(self, kind) for kind in ("", "_fwd", "_lin", "_vjp")]
        self._plain, self._fwd, self._lin, self._vjp = stages
        ad.primitive_jvps[self._plain.primitive] = self._plain_jvp
        ad.primitive_jvps[self._fwd.primitive] = self._fwd_jvp
        ad.primitive_jvps[self._lin.primitive] = self._lin_jvp
        ad.primitive_jvps[self._vjp.primitive] = self._vjp_jvp
        ad.primitive_transposes[self._plain.primitive] = self._plain_transpose
        ad.primitive_transposes[self._lin.primitive] = self._lin_transpose
        ad.primitive_transposes[self._vjp.primitive] = self._vjp_transpose
        _OPS[self.name] = self
        if self.example:
            register(self.family or self.name, self.name, self.example)

    # -- calling ---------------------------------------------------------------------------------

    def __call__(
        self,
        *args: Any,
        signature: str | None = None,
        entry: str | None = None,
        features: dict[str, int] | None = None,
        limit: str | None = None,
        fused: str | None = None,
        native: Callable | None = None,
        otherwise: Callable | None = None,
        composed: bool = False,
        **options: Any,
    ) -> Any:
        """Runs the op on arrays. ``None`` stands for an optional operand that is absent.

        Args:
          args: the operands.
          signature: that of this call, if it depends on shapes or options.
          entry: the name in the ``auto`` table. Default: the op's name.
          features: what its decision trees may ask for in addition to ``bytes``.
          limit: why the kernel cannot take this call, if it cannot.
          fused: why XLA needs no pass over memory for this call, so that ``auto`` takes the
            reference.
          native: ``native(request, *args)`` calls :meth:`bind` with the operands in the kernel's
            view of them, or raises :class:`Refused`. Default: as they are.
          otherwise: what runs in place of the kernel. Default: the reference.
          composed: whether that calls ops, which may take kernels of their own.
          options: those of the op's functions.
        """
        given = [x for x in args if x is not None]
        if limit is None and any(map(_compat.has_partial_sums, given)):
            limit = "an operand is a partial sum over devices"
        request = _dispatch.Request(
            implementation=_implementation.current(),
            entry=entry or self.name,
            dtype=self.dtype_class(given[0].dtype),
            features=tuple({"bytes": self._bytes(given), **(features or {})}.items()),
            limit=limit,
            fused=fused,
        )

        @own_code()
        def kernel(*args):
            if native is not None:
                return native(request, *args)
            return self.bind(request, *args, signature=signature, **options)

        @own_code()
        def reference(*args):
            return (otherwise or functools.partial(self.reference, **options))(*args)

        platform = _dispatch.lowering_platform()
        decision = self.decide(request, platform)
        # Under "native" the program may be lowered for another platform, which has kernels.
        elsewhere = request.implementation == "native" and limit is None
        if composed and not self.supports(platform) and not elsewhere:
            return reference(*args)  # whose calls decide
        args, record, decided = _explain.observe(self.name, args)
        request = dataclasses.replace(request, record=record)
        if decision.kernel or elsewhere:
            try:
                result = kernel(*args)
                decided(decision, kernel)
                return result
            except _dispatch.Refused as refusal:
                decision = _dispatch.refused(str(refusal))
        decided(decision, None if composed else reference)
        if _dispatch.kernels_only.value and not composed:
            raise _dispatch.Refused(decision.gradient.reason)
        return reference(*args)

    def bind(
        self, request: _dispatch.Request, *args: Any, signature: str | None = None, **options: Any
    ) -> Any:
        """Emits the op's primitive, for a call that may take the kernel, or raises ``Refused``."""
        call, own_dims_sharded = self._describe(args, signature or self.signature, options, request)
        if own_dims_sharded:  # XLA can keep them sharded
            raise _dispatch.Refused("an explicit mesh axis shards a dimension that must be whole")
        outs = self._plain.bind([x for x in args if x is not None], call)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def supports(self, platform: str) -> bool:
        """Whether every kernel of this op exists for a lowering platform."""
        return bool(self._needs) and self._needs <= _native.kernels(platform)

    def decide(self, request: _dispatch.Request, platform: str) -> _dispatch.Decision:
        """The decision for a request on a lowering platform."""
        return _dispatch.decide(self._needs, request, platform)

    def _bytes(self, arrays) -> int:
        """The bytes of the largest array: the result, if operands are broadcast."""
        if self._broadcasts and len(arrays) > 1:
            shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
            return _dispatch.size_in_bytes(shape, arrays[0].dtype)
        return max(_dispatch.size_in_bytes(x.shape, x.dtype) for x in arrays)

    def _describe(self, args, text: str, options: dict, request) -> tuple[Call, bool]:
        left, _, right = text.partition("->")
        results, saved = map(parse_slots, right.partition("|")[::2])
        slots, present = parse_slots(left), tuple(x is not None for x in args)
        avals = [jax.typeof(x) for x in args if x is not None]
        shapes, dtypes = [a.shape for a in avals], [a.dtype for a in avals]
        given = selected(slots, present)
        both = Signature(tuple(given), results + saved)
        concrete = [
            dataclasses.replace(s, dtype=str(d))
            for s, (_, d) in zip(both.results, both.infer(shapes, dtypes), strict=True)
        ]
        call = Call(
            args=tuple(
                dataclasses.replace(s, dtype=str(d) if d is not None else None)
                for s, d in zip(slots, placed(dtypes, present), strict=True)
            ),
            outs=tuple(concrete[: len(results)]),
            saved=tuple(concrete[len(results) :]),
            present=present,
            options=tuple(sorted(options.items())),
            sizes=tuple(sorted(both.bind(shapes).sizes.items())),
            request=request,
        )
        sharded = any(
            axis is not None and not dim.free
            for s, a in zip(given, avals, strict=True)
            for dim, axis in zip(s.dims, split_spec(s, a)[1], strict=True)
        )
        return call, sharded

    def _residuals_of(self, call: Call, args, outs, saved) -> list:
        """The residuals among values, places or flags, without absent operands."""
        every = self.residuals(tuple(call.by_operand(args)), tuple(outs), tuple(saved))
        return [x for x in every if x is not None]

    def _residual_slots(self, call: Call) -> list[Slot | None]:
        args = call.by_operand(call.given(call.args))
        return list(self.residuals(tuple(args), call.outs, call.saved))

    def _n_residuals(self, call: Call) -> int:
        return sum(s is not None for s in self._residual_slots(call))

    def _split(self, call: Call, operands) -> tuple[list, list]:
        n = self._n_residuals(call)
        return list(operands[:n]), list(operands[n:])

    def _with_absent(self, call: Call, residuals) -> list:
        """The residuals, with ``None`` for an absent operand."""
        return placed(residuals, [s is not None for s in self._residual_slots(call)])

    # -- derivatives -----------------------------------------------------------------------------

    def _plain_jvp(self, primals, tangents, *, call, levels, which):
        del which
        decision = self.decide(call.request, _dispatch.lowering_platform())
        if call.request.implementation != "native" and not decision.gradient.kernel:
            # JAX differentiates the reference, as in a call whose forward takes it. XLA may compile
            # the op's own pullback to slower code.
            reference = _vmapped(self._function("", call, (), native=False), levels)
            return jvp_of(reference, primals, tangents)
        outs, _, tangents_out = self._differentiate(primals, tangents, call, levels)
        return outs, tangents_out

    def _fwd_jvp(self, primals, tangents, *, call, levels, which):
        del which
        outs, saved, tangents_out = self._differentiate(primals, tangents, call, levels)
        saved_dots = [_zero_tangent(s) for s in saved]
        floats = [jnp.issubdtype(s.dtype, jnp.inexact) for s in saved]
        # The reference's pullback reads only operands, so tangents of saved values have no effect.
        if self.pullback is not None and any(floats):

            def save(*args):
                return list(self.save(*call.by_operand(args), **dict(call.options)))

            _, dots = jvp_of(_vmapped(save, levels), primals, tangents)
            saved_dots = [d if f else z for d, z, f in zip(dots, saved_dots, floats, strict=True)]
        return outs + saved, tangents_out + saved_dots

    def _differentiate(self, primals, tangents, call, levels):
        results = self._fwd.bind(primals, call, levels)
        outs, saved = results[: len(call.outs)], results[len(call.outs) :]
        nonzero = [not _is_zero(t) for t in tangents]
        if not any(nonzero):
            return outs, saved, [_zero_tangent(y) for y in outs]
        moving = call.by_operand(nonzero)
        by_reference = any(moving[i] for i in self.data)
        if by_reference or not self._determines_results(call, nonzero):
            reference = _vmapped(self._function("", call, (), native=False), levels)
            return outs, saved, jvp_of(reference, primals, tangents)[1]
        residuals = self._residuals_of(call, primals, outs, saved)
        results = [True] * len(outs), [True] * len(saved)
        lin_levels = tuple(
            (*self._residuals_of(call, flags, *results), *selected(flags, nonzero))
            for flags in levels
        )
        operands = [*residuals, *selected(tangents, nonzero)]
        return outs, saved, self._lin.bind(operands, call, lin_levels, tuple(map(bool, moving)))

    def _determines_results(self, call: Call, moving) -> bool:
        """Whether the residuals and the tangents of those operands determine the results' shapes.

        The tangent of a bias does not. The derivative along a bias is that of the reference.
        """
        operands = [s for s in self._residual_slots(call) if s is not None]
        args = call.given(call.args)
        operands += selected(args, moving)
        known = any(s.batched and not s.broadcast for s in operands)
        if all(s.broadcast for s in args if s.batched):  # together they determine it
            residuals = self._residual_places(call)
            known = known or all(p in residuals for p, s in enumerate(call.args) if s.broadcast)
        return known or not any(s.batched for s in call.outs)

    def _residual_places(self, call: Call) -> dict[int, int]:
        """The operands that are kept, and their places among the residuals."""
        positions = call.given(range(len(call.args)))
        others = ["result"] * len(call.outs), ["saved"] * len(call.saved)
        residuals = self._residuals_of(call, positions, *others)
        return {p: i for i, p in enumerate(residuals) if isinstance(p, int)}

    def _lin_jvp(self, primals, tangents, *, call, levels, which):
        out = self._lin.bind(primals, call, levels, which)
        n = self._n_residuals(call)
        tangents = self._determining(call, which, tangents, n)
        moving = [not _is_zero(t) for t in tangents[n:]]
        terms = []
        if any(moving):
            # Without the tangents that are zero, which `_lin` would read.
            operands = [*primals[:n], *selected(tangents[n:], moving)]
            fewer = tuple(tuple(selected(f, [True] * n + moving)) for f in levels)
            terms.append(self._lin.bind(operands, call, fewer, tuple(placed(moving, which, which))))
        terms += self._residual_term("_lin", primals, tangents, call, levels, which)
        return out, _add(terms, out)

    def _determining(self, call: Call, which, tangents, n: int) -> list:
        """The tangents of a linear map's operands after the first ``n``.

        Instantiates symbolic zeros if the others do not determine the results' shapes.
        """
        tangents = list(tangents)
        moving = call.given(placed([not _is_zero(t) for t in tangents[n:]], which, which))
        if any(moving) and not self._determines_results(call, moving):
            tangents[n:] = [ad.instantiate_zeros(t) for t in tangents[n:]]
        return tangents

    def _vjp_jvp(self, primals, tangents, *, call, levels, which):
        out = self._vjp.bind(primals, call, levels, which)
        n = self._n_residuals(call)
        terms = []
        if not all(_is_zero(t) for t in tangents[n:]):
            dots = [ad.instantiate_zeros(t) for t in tangents[n:]]
            terms.append(self._vjp.bind([*primals[:n], *dots], call, levels, which))
        terms += self._residual_term("_vjp", primals, tangents, call, levels, which)
        return out, _add(terms, out)

    def _residual_term(self, kind, primals, tangents, call, levels, which) -> list:
        """The derivative of ``_lin`` or ``_vjp`` through its residuals, by the reference."""
        n = self._n_residuals(call)
        if all(_is_zero(t) for t in tangents[:n]):
            return []
        function = _vmapped(self._function(kind, call, which, native=False), levels)
        fixed = primals[n:]
        return [jvp_of(lambda *xs: function(*xs, *fixed), primals[:n], tangents[:n])[1]]

    def _plain_transpose(self, cts, *operands, call, levels, which):
        """The rule for ``jax.linear_transpose``.

        An op is linear in the operands that its backward does not need, if that needs no results.
        """
        del which
        undefined = [ad.is_undefined_primal(x) for x in operands]
        given = [i for i, p in enumerate(call.present) if p]
        places = [given.index(p) for p in self._residual_places(call)]
        if len(places) < self._n_residuals(call) or any(undefined[i] for i in places):
            raise NotImplementedError(f"{self.name} is not linear, and cannot be transposed")
        cts = [ad.instantiate_zeros(ct) for ct in cts]
        needs_grad = tuple(bool(u) for u in call.by_operand(undefined))
        vjp_levels = tuple(tuple(flags[i] for i in places) + (True,) * len(cts) for flags in levels)
        residuals = [operands[i] for i in places]
        grads = self._vjp.bind([*residuals, *cts], call, vjp_levels, needs_grad)
        return _in_shapes_of(operands, placed(grads, undefined), levels)

    def _lin_transpose(self, cts, *operands, call, levels, which):
        residuals, tangents = self._split(call, operands)
        undefined = [ad.is_undefined_primal(t) for t in tangents]
        needs_grad = tuple(placed(undefined, which, which))
        residuals = self._as_large_as_tangents(call, residuals, tangents, which)
        cts = [ad.instantiate_zeros(ct) for ct in cts]
        vjp_levels = tuple(flags[: len(residuals)] + (True,) * len(cts) for flags in levels)
        grads = self._vjp.bind([*residuals, *cts], call, vjp_levels, needs_grad)
        grads = [None] * len(residuals) + placed(grads, undefined)
        return _in_shapes_of(operands, grads, levels)

    def _as_large_as_tangents(self, call: Call, residuals, tangents, which) -> list:
        """Expands residuals whose gradients have their shape to the shape of the tangents.

        If ``vmap`` folded a mapped axis into ``...``, a tangent may have it and its operand not.
        """
        residuals, places = list(residuals), self._residual_places(call)
        for p, (slot, tangent) in enumerate(zip(call.args, placed(tangents, which), strict=True)):
            if slot.broadcast and p in places and ad.is_undefined_primal(tangent):
                x, aval = residuals[places[p]], tangent.aval
                n = min(x.ndim, aval.ndim)  # the ranks differ if there are levels
                shape = (
                    *x.shape[: x.ndim - n],
                    *jnp.broadcast_shapes(x.shape[x.ndim - n :], aval.shape[aval.ndim - n :]),
                )
                if shape == aval.shape:
                    residuals[places[p]] = _fit(x, aval)
                elif shape != x.shape:
                    residuals[places[p]] = jnp.broadcast_to(x, shape)
        return residuals

    def _vjp_transpose(self, cts, *operands, call, levels, which):
        residuals, _ = self._split(call, operands)
        cts = self._determining(call, which, cts, 0)
        moving = [not _is_zero(ct) for ct in cts]
        tangents = selected(cts, moving)
        lin_levels = tuple(flags[: len(residuals)] + (True,) * len(tangents) for flags in levels)
        which = tuple(placed(moving, which, which))
        outs = self._lin.bind([*residuals, *tangents], call, lin_levels, which)
        return _in_shapes_of(operands, [None] * len(residuals) + list(outs), levels)

    # -- evaluation ------------------------------------------------------------------------------

    def stage_signature(self, kind: str, call: Call, which: tuple[bool, ...]) -> Signature:
        """The signature of one of the four primitives."""
        args = tuple(call.given(call.args))
        residuals = tuple(s for s in self._residual_slots(call) if s is not None)
        chosen = [p for p, w in enumerate(which or call.present) if w]

        def gradients() -> tuple[Slot, ...]:
            places = self._residual_places(call)
            return tuple(
                dataclasses.replace(call.args[p], broadcast=False, like=places[p])
                if call.args[p].broadcast and p in places
                else call.args[p]
                for p in chosen
            )

        if kind == "_vjp":
            signature = Signature(residuals + call.outs, gradients())
        elif kind == "_lin":
            signature = Signature(residuals + tuple(call.args[p] for p in chosen), call.outs)
        else:
            signature = Signature(args, call.outs + call.saved * (kind == "_fwd"))
        return signature.with_sizes(dict(call.sizes))

    def _function(self, kind: str, call: Call, which, native: bool) -> Callable:
        """The function that a primitive computes, from flat operands to a list, without levels."""
        options = dict(call.options)

        def plain(*args):
            function = self.forward if native else self.reference
            return _as_list(function(*call.by_operand(args), **options))

        def fwd(*args):
            args = call.by_operand(args)
            if native:
                return _as_list(self.forward_saving(*args, **options))
            return _as_list(self.reference(*args, **options)) + list(self.save(*args, **options))

        def lin(*operands):
            residuals, tangents = self._split(call, operands)
            residuals, tangents = self._with_absent(call, residuals), placed(tangents, which)
            function = self.tangent if native else (self.pushforward or self._reference_jvp)
            return _as_list(function(residuals, tangents, **options))

        def vjp(*operands):
            residuals, cts = self._split(call, operands)
            residuals = self._with_absent(call, residuals)
            if native:
                grads = self.backward(residuals, cts, which, **options)
            elif self.pullback is not None:
                grads = self.pullback(residuals, cts, **options)
            else:
                grads = self._reference_vjp(residuals, cts, which, **options)
            return [
                g.astype(slot.dtype)  # sums have the accumulator dtype
                for g, slot, w in zip(grads, call.args, which, strict=True)
                if w
            ]

        return own_code()({"": plain, "_fwd": fwd, "_lin": lin, "_vjp": vjp}[kind])

    def _reference_of(self, residuals, which, options):
        """The reference as a function of the operands marked in ``which``, and these operands."""
        args = residuals[: len(which)]

        def function(*chosen):
            return _as_list(self.reference(*placed(chosen, which, args), **options))

        return function, selected(args, which)

    def _reference_jvp(self, residuals, tangents, **options):
        which = [t is not None for t in tangents]
        function, chosen = self._reference_of(residuals, which, options)
        moving = selected(tangents, which)
        for i, pair in enumerate(zip(chosen, moving, strict=True)):
            if pair[0].shape != pair[1].shape:  # only one of them has a mapped axis
                whole = broadcast_type(pair)
                chosen[i], moving[i] = (broadcast_to(x, whole) for x in pair)
        return jax.jvp(function, chosen, moving)[1]

    def _reference_vjp(self, residuals, cts, which, **options):
        function, chosen = self._reference_of(residuals, which, options)
        return placed(jax.vjp(function, *chosen)[1](list(cts)), which)

    def choose(self, kind: str, call: Call, levels, which, platform: str) -> _dispatch.Choice:
        """Kernel or reference for a primitive, unless the kernel refuses the operands."""
        functions = {
            "": self.forward,
            "_fwd": self.forward_saving,
            "_lin": self.tangent,
            "_vjp": self.backward,
        }
        decision = self.decide(call.request, platform)
        choice = decision.gradient if kind else decision.forward
        if not choice.kernel:
            return choice
        if functions[kind] is None:
            return _dispatch.Choice(False, "no kernel computes this derivative")
        places = self._places(kind, call, which)
        mapped = {p for flags in levels for p, f in zip(places, flags, strict=False) if f}
        for name, place in self.shared.items():
            if place in mapped:
                return _dispatch.Choice(False, f"each mapped example has its own {name}")
        return choice

    def _places(self, kind: str, call: Call, which) -> list[int | None]:
        """Which operand of the op each operand of a primitive is, or is the tangent of."""
        if kind in ("", "_fwd"):
            return call.given(range(len(call.args)))
        residuals = {i: place for place, i in self._residual_places(call).items()}
        places = [residuals.get(i) for i in range(self._n_residuals(call))]
        return places + [p for p, w in enumerate(which) if w and kind == "_lin"]


class _Stage:
    """One of an op's four primitives, with the rules that they share."""

    def __init__(self, op: Op, kind: str):
        self.op, self.kind = op, kind
        self.primitive = primitive = Primitive(f"fastops_{op.name}{kind}")
        primitive.multiple_results = True
        primitive.def_impl(lambda *xs, **params: compiled(primitive, params)(*xs))
        primitive.def_abstract_eval(self._abstract_eval)
        batching.primitive_batchers[primitive] = self._batch
        _explain.stages[primitive] = self
        _compat.set_jet_rule(primitive, lambda params: self._function(native=False, **params))
        mlir.register_lowering(primitive, self._lowering(None))
        for platform in ("cpu", "cuda"):
            mlir.register_lowering(primitive, self._lowering(platform), platform=platform)

    def bind(self, operands, call: Call, levels=(), which=()) -> list:
        operands = match_varying(operands)
        return self.primitive.bind(*operands, call=call, levels=levels, which=which)

    def _abstract_eval(self, *avals, call, levels, which):
        inner = [
            _strip(a, sum(flags))
            for a, flags in zip(avals, _per_operand(levels, avals), strict=True)
        ]
        results = infer_avals(self.op.stage_signature(self.kind, call, which), inner)
        sizes, specs = _level_axes(levels, avals)
        return [_prepend(r, sizes, specs) for r in results]

    def _batch(self, operands, dims, *, call, levels, which):
        n = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        call = dataclasses.replace(call, request=call.request.mapped(n))
        if self.op.batch is not None:
            (at,) = dims
            where = {"result": at} if self.kind == "_vjp" else {"operand": at}
            outs = self.bind(operands, self.op.batch(call, **where), levels, which)
            return outs, [0] * len(outs)
        mapped = [d is not None for d in dims]
        signature = self.op.stage_signature(self.kind, call, which)
        if self.op.independent and signature.folds(mapped):
            before = [sum(flags) for flags in _per_operand(levels, operands)]
            outs = self.bind(fold(signature, operands, dims, before), call, levels, which)
            return outs, [len(levels)] * len(outs)
        fronts = [
            x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)
        ]
        outs = self.bind(fronts, call, (tuple(mapped), *levels), which)
        return outs, [0] * len(outs)

    def _function(self, *, native: bool, call, levels, which):
        return _vmapped(self.op._function(self.kind, call, which, native), levels)

    def _lowering(self, platform: str | None):
        def rule(ctx, *operands, **params):
            def lowered(function):
                return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)

            with lowering_for(_compat.partitions(ctx), self.primitive.name):
                result, choice = self.decided(lowered, platform, **params)
            if platform and choice not in self.op.decide(params["call"].request, platform):
                _explain.log_refusal(self.primitive.name, choice)
            return result

        return rule

    def explained(self, avals, platform: str, devices: int, **params) -> _dispatch.Choice:
        """The choice for operands of these types, in a program for this number of devices."""
        with lowering_for(devices):
            return self.decided(lambda f: jax.eval_shape(f, *avals), platform, **params)[1]

    def decided(
        self, evaluate: Callable, platform: str | None, *, call, levels, which
    ) -> tuple[Any, _dispatch.Choice]:
        """``evaluate`` of the function that the primitive takes, and the choice of this function.

        A kernel refuses operands when it is traced. What it refuses depends on the number of
        devices, which :func:`lowering_for` says.
        """
        function = functools.partial(self._function, call=call, levels=levels, which=which)
        choice = self.op.choose(self.kind, call, levels, which, platform or "")
        if choice.kernel:
            try:
                return evaluate(function(native=True)), choice
            except _dispatch.Refused as refusal:
                choice = _dispatch.Choice(False, str(refusal))
        return evaluate(function(native=False)), choice


def _as_list(outs) -> list:
    return list(outs) if isinstance(outs, (tuple, list)) else [outs]


def _zero_tangent(primal) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _is_zero(tangent) -> bool:
    symbolic = isinstance(tangent, (ad.Zero, jax.custom_derivatives.SymbolicZero))
    return symbolic or getattr(tangent, "dtype", None) == jax.dtypes.float0


def _vmapped(function: Callable, levels) -> Callable:
    """``function`` under one ``jax.vmap`` per level, the first level outermost."""
    for flags in reversed(levels):
        function = jax.vmap(function, in_axes=tuple(0 if f else None for f in flags))
    return function


def jvp_of(function: Callable, primals, tangents) -> tuple[list, list]:
    """Results of ``function``, and their tangents along the nonzero ``tangents``."""
    moving = [not _is_zero(t) for t in tangents]

    def partial(*chosen):
        return function(*placed(chosen, moving, primals))

    outs, dots = jax.jvp(partial, selected(primals, moving), selected(tangents, moving))
    return list(outs), list(dots)


def _add(terms: list[list], like: list) -> list:
    if not terms:
        return [_zero_tangent(y) for y in like]
    total = terms[0]
    for term in terms[1:]:
        total = [a + b for a, b in zip(total, term, strict=True)]
    return [_fit(t, jax.typeof(y)) for t, y in zip(total, like, strict=True)]


def _fit(x, aval):
    """Sums or broadcasts the (co)tangent of an operand with ``~...`` to the expected shape.

    An operand without a mapped axis has a dimension of size 1 in its place.
    """
    if x.shape == aval.shape:
        return x
    pairs = enumerate(zip(x.shape, aval.shape, strict=True))
    summed = tuple(i for i, (mine, due) in pairs if due == 1 and mine != 1)
    return broadcast_to(x.sum(summed, keepdims=True) if summed else x, aval)


def _in_shapes_of(operands, values, levels) -> list:
    """The (co)tangents of undefined operands, summed to their shapes, and ``None`` for others."""

    def fit(i, x, value):
        # Levels that the operand does not have lead in the value.
        axes = tuple(level for level, flags in enumerate(levels) if not flags[i])
        return _fit(value.sum(axes) if axes else value, x.aval)

    pairs = enumerate(zip(operands, values, strict=True))
    return [fit(i, x, v) if ad.is_undefined_primal(x) else None for i, (x, v) in pairs]


def _per_operand(levels, operands) -> list[tuple[bool, ...]]:
    return [tuple(flags[i] for flags in levels) for i in range(len(operands))]


def _level_axes(levels, avals) -> tuple[list, list]:
    """Size and sharding of each level's axis, from the first operand that has it."""
    sizes, specs = [], []
    for at, flags in enumerate(levels):
        i = flags.index(True)
        axis = sum(level[i] for level in levels[:at])
        spec = tuple(avals[i].sharding.spec)
        sizes.append(avals[i].shape[axis])
        specs.append(spec[axis] if axis < len(spec) else None)
    return sizes, specs


def _strip(aval, n: int):
    """``aval`` without its first ``n`` dimensions."""
    spec = PartitionSpec(*tuple(aval.sharding.spec)[n:])
    return aval.update(shape=aval.shape[n:], sharding=aval.sharding.update(spec=spec))


def _prepend(aval, sizes, specs):
    spec = PartitionSpec(*specs, *aval.sharding.spec)
    shape = (*sizes, *aval.shape)
    return aval.update(shape=shape, sharding=aval.sharding.update(spec=spec))
