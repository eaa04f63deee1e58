"""Every difference between the supported JAX versions (0.8 to the newest) that matters here."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref

import jax
import jax.core
from jax.extend import source_info_util
from jax.sharding import PartitionSpec

from jax_fastops import _places

try:
    from jax.experimental import jet
except ImportError:  # experimental
    jet = None

try:
    from jax.extend.core import take_current_trace as _take_current_trace
except ImportError:  # jax < 0.10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        _take_current_trace = jax.core.take_current_trace

# Raised if a symbolic size cannot be compared.
InconclusiveDimensionOperation = (
    getattr(jax.errors, "InconclusiveDimensionOperation", None)
    or jax.core.InconclusiveDimensionOperation  # jax < 0.10
)

# The ``inline`` of ``jax.jit`` with which a function becomes a part of the program that calls it.
INLINE = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # jax < 0.12


def varying_axes(x) -> frozenset:
    """The manual mesh axes over which ``x`` varies inside ``jax.shard_map``."""
    return varying_axes_of(jax.typeof(x))


def varying_axes_of(aval) -> frozenset:
    """The manual mesh axes over which a value of such a type varies inside ``jax.shard_map``."""
    if hasattr(aval, "vma"):
        return frozenset(aval.vma)
    return frozenset(aval.manual_axis_type.varying)  # jax >= 0.11


def as_varying(x, axes: frozenset):
    """``x`` with ``axes`` added to its varying axes; its transpose is a ``psum`` over them."""
    missing = tuple(sorted(axes - varying_axes(x), key=str))
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)  # jax < 0.9


def has_partial_sums(x) -> bool:
    """Whether ``x`` is, or its gradient becomes, a partial sum over devices, by its type."""
    spec = getattr(jax.typeof(x).sharding, "spec", None)
    return bool(getattr(spec, "unreduced", None) or getattr(spec, "reduced", None))


def set_global(context, value) -> None:
    """Set the value that ``context`` (from ``jax.make_user_context``) has in every thread."""
    context._obj.set_global(value)


def get_global(context):
    return context._obj.get_global()


def partitions(ctx) -> int:
    """The number of devices over which XLA may partition what a lowering rule emits."""
    axes = ctx.module_context.axis_context
    if hasattr(axes, "num_devices"):
        return axes.num_devices or 1
    sizes = dict(axes.mesh.shape)
    return math.prod(n for name, n in sizes.items() if name not in axes.manual_axes)


def set_jet_rule(primitive, function_of) -> None:
    """Gives a primitive a rule of ``jax.experimental.jet``, that of ``function_of(params)``."""

    def rule(primals, series, **params):
        # Inside of rules, no term has the factor of its order.
        return jet.jet(function_of(params), primals, series, factorial_scaled=False)

    if jet is not None:
        jet.jet_rules[primitive] = rule


def as_one_primitive(function, name: str):
    """``function``, marked as the evaluation of one primitive.

    Under ``jax_debug_nans``, JAX evaluates a jitted function again, primitive by primitive, to find
    the one that makes a NaN. Without the mark it would evaluate this function again, too.
    """
    function.__name__ = function.__qualname__ = name
    function._apply_primitive = True
    return function


def source_line(*equations) -> str:
    """The user's file and line that made an equation, or an empty text.

    Others are of the calls that lead to it, the innermost first.
    """
    frames: list[str] = []
    for equation in equations:
        with contextlib.suppress(ImportError, AttributeError, TypeError):
            text = source_info_util.summarize(equation.source_info, num_frames=10**6)
            frames += reversed(text.split("\n"))
    return _places.of_program(frames).split(" (")[0]


def context_of(equation) -> tuple:
    """Where an equation is computed (``compute_on``), its metadata for XLA, and its mesh.

    Mostly nothing: no place, no metadata, and the mesh of the current context.
    """
    context, mesh = equation.ctx, equation.ctx.cur_abstract_mesh
    other = () if mesh == jax.sharding.get_abstract_mesh() else (mesh,)
    if context.compute_type is None and not context.xla_metadata and not other:
        return ()
    return context.compute_type, *other, *sorted((context.xla_metadata or {}).items())


def bind_params(primitive, params: dict) -> tuple:
    """The functions and the parameters with which ``bind`` is called for an equation."""
    bound = primitive.get_bind_params(params)
    return bound if isinstance(bound, tuple) else ((), bound)  # jax < 0.10 gives both


def recorder():
    """The current trace, if it records equations as they are, or ``None``."""
    with _take_current_trace() as trace:
        pass
    records = all(hasattr(trace, name) for name in ("emit_eqn", "new_const", "frame"))
    return trace if records and not getattr(trace, "requires_low", False) else None


def is_recorded(trace, variables, args) -> bool:
    """Whether arrays are of a trace, and have just the types of variables of a program."""
    return all(
        getattr(x, "_trace", None) is trace and (x.aval is v.aval or x.aval == v.aval)
        for v, x in zip(variables, args, strict=True)
        if not hasattr(v, "val")
    )


def record(trace, equation, args, source) -> list:
    """The results of an equation that a trace records, whose types are not evaluated again."""
    operands = [
        trace.new_const(v.val, source, aval=v.aval) if hasattr(v, "val") else x
        for v, x in zip(equation.invars, args, strict=True)
    ]
    types = [v.aval for v in equation.outvars]
    primitive, params, effects = equation.primitive, equation.params, equation.effects
    return trace.emit_eqn(operands, types, primitive, params, effects, source, equation.ctx)


def x64_is_on() -> bool:
    """Whether there are 64-bit types now."""
    return bool(jax.config.jax_enable_x64)  # of this thread


def sharded_spec(aval) -> PartitionSpec | None:
    """How a type says that dimensions are spread over devices, or ``None``."""
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    return spec if any(axis is not None for axis in spec) else None


def struct_of(aval) -> jax.ShapeDtypeStruct:
    """What stands for an argument of this type in a trace."""
    more = {"weak_type": aval.weak_type}
    if getattr(aval, "vma", None):
        more["vma"] = aval.vma
    elif getattr(aval, "manual_axis_type", None):
        more["manual_axis_type"] = aval.manual_axis_type
    varies = len(more) > 1  # over axes of the mesh that the sharding has
    sharding = getattr(aval, "sharding", None)
    if sharding is not None and (varies or sharded_spec(aval) is not None):
        more["sharding"] = sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **more)


# The transformations of a rule that its own arguments describe, without the tag of their trace.
_STEPS = {"_flatten_jvp", "_get_result_paths_thunk", "batch_custom_jvp_subtrace"}


def derivative_rule(equation) -> tuple | None:
    """What tells the rule of a ``custom_jvp`` from others, or ``None`` if jax does not show it."""
    try:
        thunk = next(filter(callable, _nonlocals(equation.params["jvp_jaxpr_fun"].f).values()))
        rule = _nonlocals(thunk)["jvp"]
        key: tuple = (rule.f,)
        for step, given in rule.transforms:
            if step.__name__ not in _STEPS:
                return None
            key += tuple(x for x in given if type(x).__name__ not in ("TraceTag", "function"))
        hash(key)
        weakref.ref(rule.f)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
        return None
    return key


def _nonlocals(f) -> dict:
    cells = zip(f.__code__.co_freevars, f.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}
