"""The harness finds faults: ops with deliberate bugs fail the right checks."""

import dataclasses

import hypothesis
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    Case,
    Sharding,
    Tolerance,
    assert_bitwise_equal,
    assert_matches,
    checks,
    errors,
    kernels,
    properties,
)
from harness.case import find
from harness.compat import make_mesh
from harness.numerics import assert_accurate, normal, specials, sprinkled
from harness.properties import same_shapes
from harness.sharding import collectives, device_count
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_fastops as fo


@pytest.fixture(autouse=True)
def no_smaller_failures(monkeypatch):
    """Failures are expected, so none is shrunk."""
    monkeypatch.setattr(properties, "PHASES", (hypothesis.Phase.generate,))


needs_devices = pytest.mark.skipif(device_count() < 2, reason="needs two devices")
SPREAD = (Sharding("batch", (0,), (0,)), Sharding("features", (1,), (1,)))


def relu_case(fn, **changes):
    case = Case(
        name="planted",
        fn=fn,
        reference=jax.nn.relu,
        make_args=lambda rng, dtype: (normal(rng, (8, 64), dtype),),
        exact=True,
        shardings=SPREAD,
        shapes=same_shapes(1),
        modes=(None,),
    )
    return dataclasses.replace(case, **changes)


def scaled(x, scale):
    return x * jax.lax.expand_dims(scale, range(x.ndim - 1))


def scaled_case(fn, **changes):
    """Rows times a parameter, whose gradient is a sum over the rows."""
    case = Case(
        name="planted",
        fn=fn,
        reference=scaled,
        make_args=lambda rng, dtype: (normal(rng, (8, 16), dtype), normal(rng, (16,), dtype)),
        shardings=(Sharding("batch", (0, None), (0,), gradient_all_reduces=1),),
        modes=(None,),
    )
    return dataclasses.replace(case, **changes)


def caught(case, *names, match=None, error=AssertionError, dtype=None):
    """Every named check fails."""
    for name in names:
        with pytest.raises(error, match=match):
            find(case, name, case.modes[0], dtype)()


def passes(case, *names):
    for name in names:
        find(case, name, case.modes[0])()


def on_the_host(fn):
    """An op that XLA cannot partition: every device computes the whole result."""

    @jax.custom_jvp
    def op(*args):
        shape = jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)
        return jax.pure_callback(
            lambda *a: fn(*map(np.asarray, a)), shape, *args, vmap_method="sequential"
        )

    op.defjvp(lambda primals, tangents: (op(*primals), jax.jvp(jax.nn.relu, primals, tangents)[1]))
    return op


# Derivatives


def with_summed_gradient(rule):
    """``x * scale``, whose gradient of ``scale`` is batched by ``rule(size, total over all)``."""

    @jax.custom_batching.custom_vmap
    def scale_gradient(ct, x):
        return jnp.sum(ct * x, 0)

    @scale_gradient.def_vmap
    def batched(size, mapped, ct, x):
        return rule(size, jnp.sum(ct * x, tuple(range(ct.ndim - 1))))

    @jax.custom_vjp
    def op(x, scale):
        return x * scale

    op.defvjp(
        lambda x, s: (x * s, (x, s)), lambda kept, ct: (ct * kept[1], scale_gradient(ct, kept[0]))
    )
    return op


def test_gradient_summed_over_the_examples():
    """A batching rule that adds up the per-example gradients of an unmapped parameter."""

    def rule(size, total):
        return jnp.broadcast_to(total, (size, *total.shape)), True

    case = scaled_case(with_summed_gradient(rule))
    passes(case, "value", "vjp", "grad", "vjp/x1")
    caught(case, "vmap_of_vjp/all", "vmap_of_vjp/x0", "vmap_of_grad/x0", match="relative error")


def test_gradient_summed_once_for_the_stack():
    """A batching rule that gives the sum as the unbatched gradient of a parameter."""
    op = with_summed_gradient(lambda size, total: (total, False))
    caught(scaled_case(op), "vmap_of_vjp/x0", "vmap_of_grad/x0")


def test_no_forward_mode():
    """`custom_vjp` has only reverse mode."""

    @jax.custom_vjp
    def op(x):
        return jax.nn.relu(x)

    op.defvjp(lambda x: (jax.nn.relu(x), x > 0), lambda mask, ct: (jnp.where(mask, ct, 0),))
    case = relu_case(op)
    passes(case, "value", "vjp", "jacrev")
    forward = ["jvp", "jacfwd", "linearize", "hvp/reverse_over_forward", "while/jvp", "scan/jvp"]
    caught(case, *forward, error=TypeError, match="forward-mode")


def test_gradient_multiplied_instead_of_selected():
    """0 times Inf is NaN. (XLA turns a product with a converted boolean into a selection.)"""

    @jax.custom_jvp
    def op(x):
        return jax.nn.relu(x)

    op.defjvp(lambda p, t: (op(*p), t[0] * jnp.sign(jax.nn.relu(p[0]))))
    passes(relu_case(op), "value")
    caught(relu_case(op), "properties/special_values", match="bits")


def test_second_derivative_lost():
    """A derivative that forgets that it depends on the argument."""

    @jax.custom_jvp
    def op(x):
        return jnp.sin(x)

    op.defjvp(lambda p, t: (jnp.sin(p[0]), jax.lax.stop_gradient(jnp.cos(p[0])) * t[0]))
    case = relu_case(op, reference=jnp.sin, exact=False)
    passes(case, "value", "jvp", "vjp", "grad")
    orders = ("forward_over_reverse", "reverse_over_forward", "reverse_over_reverse")
    caught(case, *(f"hvp/{order}" for order in orders), "hessian", match="relative error")


def test_third_derivative_lost():
    @jax.custom_jvp
    def cos(x):
        return jnp.cos(x)

    cos.defjvp(lambda p, t: (jnp.cos(p[0]), jax.lax.stop_gradient(-jnp.sin(p[0])) * t[0]))

    @jax.custom_jvp
    def op(x):
        return jnp.sin(x)

    op.defjvp(lambda p, t: (jnp.sin(p[0]), cos(p[0]) * t[0]))
    case = relu_case(op, reference=jnp.sin, exact=False)
    passes(case, "hvp/forward_over_reverse")
    caught(case, "third/reverse_over_forward_over_reverse", match="relative error")


def test_gradients_of_two_arguments_exchanged():
    @jax.custom_vjp
    def op(x, y):
        return 2 * x + y

    op.defvjp(lambda x, y: (2 * x + y, None), lambda _, ct: (ct, 2 * ct))
    case = relu_case(
        op,
        reference=lambda x, y: 2 * x + y,
        make_args=lambda rng, dtype: (normal(rng, (3, 8), dtype), normal(rng, (3, 8), dtype)),
        shardings=(),
        shapes=None,
    )
    caught(case, "vjp", "vjp/x0", "vjp/x1", match="bits")


def test_wrong_mapped_axis():
    """A batching rule that treats the mapped axis as the first dimension of an example."""

    def op(x):
        return x * jnp.arange(x.shape[0], dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))

    wrong = jax.custom_batching.custom_vmap(op)
    wrong.def_vmap(lambda size, mapped, x: (jax.vmap(op)(x) if x.shape[0] != 3 else op(x), True))
    case = relu_case(
        wrong, reference=op, make_args=lambda rng, dtype: (normal(rng, (5, 8), dtype),)
    )
    caught(case, "vmap/all/first", "vmap/all/last", match="bits")


def test_dtype_of_the_result():
    case = relu_case(lambda x: jax.nn.relu(x.astype(jnp.float32)))
    passes(case, "value", "types")
    caught(case, "value", "types", dtype="bfloat16")
    caught(case, "value", dtype="float64")


# Bits and accuracy


def test_sign_of_zero():
    """`x if x >= 0 else 0` keeps -0.0."""
    case = relu_case(lambda x: jnp.where((x >= 0) | jnp.isnan(x), x, jnp.zeros_like(x)))
    passes(case, "value")
    caught(case, "properties/special_values", match="bits")


def test_lost_nan():
    caught(relu_case(lambda x: jnp.where(x > 0, x, 0)), "properties/special_values", match="bits")


def test_flushed_subnormals_or_kept_ones():
    """A difference is found even if it is the smallest subnormal number."""
    x = np.asarray([1.0, np.finfo(np.float32).smallest_subnormal], np.float32)
    with pytest.raises(AssertionError, match="bits"):
        assert_bitwise_equal(x, np.asarray([1.0, 0.0], np.float32))


def softmax_case(fn, **changes):
    return relu_case(fn, reference=jax.nn.softmax, exact=False, shardings=SPREAD[:1], **changes)


def test_another_formula_passes():
    def op(x):
        e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
        return e * (1 / jnp.sum(e, -1, keepdims=True))

    passes(softmax_case(op, tolerance=Tolerance(small=0.0)), "value")


def test_wider_arithmetic_passes():
    case = softmax_case(lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype))
    for name in ("value", "jvp", "vjp", "vmap_of_vjp/all", "hvp/forward_over_reverse"):
        find(case, name, dtype="bfloat16")()


def test_lower_precision_inside():
    """A sum in bfloat16, an error in one element, a scale with a relative error of 1e-6."""

    def coarse(x):
        e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
        # Not a cast to bfloat16 and back, which XLA may leave out.
        total = jax.lax.reduce_precision(jnp.sum(e, -1, keepdims=True), 8, 7)
        return (e / total).astype(x.dtype)

    caught(softmax_case(coarse), "value", "vjp", match="relative error")
    caught(
        softmax_case(lambda x: jax.nn.softmax(x).at[2, 3].multiply(1.0001)),
        "value",
        match=r"\(2, 3\)",
    )
    caught(
        softmax_case(lambda x: jax.nn.softmax(x) * np.float32(1 + 1e-6)),
        "value",
        match="relative error",
    )


def test_errors():
    exact = np.asarray([1.0, -2.0, np.nan, 4.0])
    found = errors(np.asarray([1.0, -2.0, 5.0, 4.4]), exact, small=0.0)
    assert found.index == (3,) and np.isclose(found.worst, 0.1)
    assert np.isclose(found.norm, 0.4 / np.sqrt(21))
    assert errors(np.zeros((0, 3)), np.zeros((0, 3))).worst == 0
    assert errors(np.asarray([1e-3]), np.asarray([0.0])).worst == 1e-3
    one = (np.asarray([1.25]), np.asarray([1.0]))
    assert errors(*one, lone=4.0).worst == errors(*one, lone=4.0).norm == 0.0625
    assert errors(*one, lone=0.5) == errors(*one)


def test_special_values_in_the_wrong_place():
    one, nan, inf = (np.asarray([v], np.float32) for v in (1.0, np.nan, np.inf))
    for got, want in ((nan, inf), (inf, -inf), (nan, one), (one, nan), (inf, one)):
        with pytest.raises(AssertionError, match="NaN and Inf"):
            assert_accurate(got, want, one)
    assert_accurate(nan, nan, one)


def test_structure_shape_and_dtype():
    x = np.zeros((2, 3), np.float32)
    for other in ((x,), x[0], x.astype(np.float16), x[None]):
        with pytest.raises(AssertionError):
            assert_matches(other, x)
    assert_matches({"a": x}, {"a": x.copy()})


def test_special_values_are_drawn():
    for name in ("float32", "bfloat16", "float16", "float64"):
        dtype = jnp.dtype(name)
        values = specials(dtype)
        assert values.dtype == dtype
        assert np.isnan(values).any() and np.isinf(values).sum() == 2
        assert np.signbit(values[values == 0]).any() and not np.signbit(values[values == 0]).all()
        small = np.abs(values[np.isfinite(values)]).astype(np.float64)
        assert ((small > 0) & (small < float(jnp.finfo(dtype).smallest_normal))).sum() == 4
        drawn = sprinkled(np.random.default_rng(0), (4, 100), dtype)
        assert drawn.shape == (4, 100) and drawn.dtype == dtype and np.isnan(drawn).any()


# Sharding


def over_all_devices(*spec):
    mesh = make_mesh({"a": device_count()}, AxisType.Auto)
    return NamedSharding(mesh, PartitionSpec(*spec))


@needs_devices
def test_no_sharding_rule():
    """A call that XLA cannot partition."""
    case = relu_case(on_the_host(lambda x: np.maximum(x, 0)))
    passes(case, "value")
    for name in ("batch", "features"):
        caught(case, f"sharded/auto/{name}/value")
        caught(case, f"sharded/explicit/{name}/value", error=Exception)


@needs_devices
def test_result_gathered():
    """The right value, but whole on every device."""

    def gathered(x):
        whole = jax.lax.with_sharding_constraint(jax.nn.relu(x), over_all_devices())
        # On GPUs, XLA cancels a gather against the slice after it. Without the barrier, the
        # gradient's program does not communicate.
        whole = jax.lax.optimization_barrier(whole)
        return jax.lax.with_sharding_constraint(whole, over_all_devices())

    case = relu_case(gathered)
    caught(case, "sharded/auto/batch/value", match="laid out")
    caught(case, "sharded/auto/features/vjp", match="communicates")


@needs_devices
def test_needless_communication():
    """The right value with the right sharding, but through another sharding."""

    def restless(x):
        there = jax.lax.with_sharding_constraint(jax.nn.relu(x), over_all_devices(None, "a"))
        return jax.lax.with_sharding_constraint(there, over_all_devices("a", None))

    caught(relu_case(restless), "sharded/auto/batch/value", match="communicates")


@needs_devices
def test_more_sums_than_declared():
    case = scaled_case(scaled)
    passes(case, "sharded/auto/batch/vjp", "shard_map/batch/vjp_inside", "shard_map/varying/x0/vjp")
    none = (Sharding("batch", (0, None), (0,), gradient_all_reduces=0),)
    caught(scaled_case(scaled, shardings=none), "sharded/auto/batch/vjp", match="communicates")


ROW = (Sharding("row", (1,), (1,), whole=True),)


@needs_devices
def test_a_whole_dimension():
    """The reference sums over explicit shards. A gather, or another result, is found."""
    case = dataclasses.replace(softmax_case(jax.nn.softmax), shardings=ROW)
    passes(case, "sharded/explicit/row/whole", "sharded/auto/row/whole")

    def gathered(x):
        whole = jax.lax.with_sharding_constraint(x, over_all_devices())
        return jax.nn.softmax(whole)

    case = dataclasses.replace(case, fn=gathered)
    caught(case, "sharded/explicit/row/whole", error=Exception)


@needs_devices
def test_uneven_shards_that_are_cut_off():
    """An op that is right only if the devices divide the rows."""

    def op(x):
        there = jax.lax.with_sharding_constraint(x, over_all_devices("a"))
        return jax.nn.relu(there) * (x.shape[0] % device_count() == 0)

    case = relu_case(op, make_args=lambda rng, dtype: (normal(rng, (3, 5), dtype),))
    caught(case, "sharded/auto/uneven")


@needs_devices
def test_lost_varying_axes():
    """If the result's type does not say that it varies, a wrong `out_specs` is accepted."""
    case = relu_case(on_the_host(lambda x: np.maximum(x, 0)))
    wrong = "shard_map/batch/wrong_specs"
    passes(relu_case(jax.nn.relu), wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError, TypeError)):
        find(case, wrong)()


@needs_devices
def test_missing_sum_over_the_mesh():
    """In `shard_map`, the gradient of a replicated parameter must be summed over the devices."""

    @jax.custom_vjp
    def op(x, scale):
        return x * scale

    def backward(kept, ct):
        x, scale = kept
        total = jnp.sum(ct * x, 0)
        try:
            total = jax.lax.psum(total, "a") / device_count()
        except NameError:  # not inside shard_map
            pass
        return ct * scale, total

    op.defvjp(lambda x, s: (x * s, (x, s)), backward)
    case = scaled_case(op)
    passes(case, "vjp", "sharded/auto/batch/vjp")
    caught(case, "shard_map/batch/vjp_inside", error=(AssertionError, TypeError, ValueError))


def test_collectives_are_counted():
    text = """
      %all-gather.1 = f32[8]{0} all-gather(%p), dimensions={0}
      %r = (f32[8]{0}, f32[4]{0}) all-reduce-start(%a, %b), to_apply=%add
      %d = (f32[8]{0}, f32[4]{0}) all-reduce-done(%r)
      %c = f32[8]{0} collective-permute(%p), metadata={op_name="all-to-all"}
    """
    assert collectives(text) == {"all-gather": 1, "all-reduce": 1, "collective-permute": 1}


# Control flow, donation, export, the cache


def test_stale_constant():
    """An op that always computes with the first array that it was called with."""
    seen = []

    def op(x):
        seen.append(x)
        return jax.nn.relu(seen[0])

    caught(relu_case(op), "repeated", error=jax.errors.UnexpectedTracerError)


def test_export_needs_every_check_named():
    case = relu_case(on_the_host(lambda x: np.maximum(x, 0)))
    caught(case, "export", error=Exception)


def test_symbolic_size_taken_for_a_number():
    def op(x):
        return jax.nn.relu(x.reshape(int(x.shape[0]), -1))

    case = relu_case(
        op, make_args=lambda rng, dtype: (normal(rng, (3, 16), dtype),), symbolic=("b, 16",)
    )
    passes(case, "export")
    caught(case, "export/symbolic", error=Exception)


# Kernels, and what a backward keeps


def kernel_case(fn, **changes):
    """An op that is said to be `fo.relu`."""
    options = dict(
        kernels=("relu", "relu_bwd"),
        only_kernels=True,
        maps=((0,),),
        kept=lambda x: [(np.uint8, x.size // 8)],
        symbolic=("b, n",),
        sizes=({"b": 3, "n": 40},),
        modes=("native",),
        shapes=None,
    )
    return relu_case(fn, **(options | changes))


KERNEL_CHECKS = ("kernels", "kernels/nothing_else", "kernels/vmap/x0", "kept", "views", "empty")
KERNEL_CHECKS += ("modes", "repeated_runs", "linear_pullback", "no_leaks", "examples", "special")
KERNEL_CHECKS += ("strict_settings", "operands")
EXPORTS = ("export/platforms", "export/other_platform")


def test_a_kernel_passes():
    passes(kernel_case(fo.relu), *KERNEL_CHECKS, *EXPORTS)


def test_the_reference_in_place_of_the_kernel():
    case = kernel_case(jax.nn.relu)
    caught(case, "kernels", "kernels/vmap/x0", "export/platforms")
    caught(kernel_case(jax.nn.relu, kernels=("relu",)), "sharded/auto/batch/value", match="run")


def test_the_kernel_whatever_is_set():
    def op(x):
        with fo.use_implementation("native"):
            return fo.relu(x)

    caught(kernel_case(op), "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.export, "export", exported_for_this_platform)
        caught(kernel_case(op), "export/other_platform")


EXPORT = jax.export.export


def exported_for_this_platform(fn, platforms=None, **options):
    return EXPORT(fn, **options)


def test_an_operation_beside_the_kernel():
    caught(kernel_case(lambda x: fo.relu(x * 2)), "kernels/nothing_else", match="XLA runs")


def test_a_map_that_is_a_loop():
    def op(x):
        return jax.custom_batching.sequential_vmap(fo.relu)(x)

    @jax.custom_vjp
    def looped(x):
        return op(x)

    looped.defvjp(lambda x: (op(x), x), lambda x, ct: jax.vjp(fo.relu, x)[1](ct))
    caught(kernel_case(looped), "kernels/vmap/x0")


def test_too_much_is_kept():
    """The operand in place of a mask."""

    @jax.custom_vjp
    def op(x):
        return jax.nn.relu(x)

    op.defvjp(lambda x: (jax.nn.relu(x), x), lambda x, ct: (jnp.where(x > 0, ct, 0),))
    caught(kernel_case(op), "kept")


def test_another_result_at_another_address():
    """A kernel that reads its operand from the start of the buffer that a slice is in."""
    seen = []

    def op(x):
        seen.append(x)
        return jax.nn.relu(x + (len(seen) > 2))

    caught(kernel_case(op), "views", match="bits")


def test_a_copy_of_the_result_is_kept():
    """The derivative of exp needs its result, which need not be an array of its own."""

    @jax.custom_vjp
    def op(x):
        return jnp.exp(x)

    op.defvjp(lambda x: (jnp.exp(x), jnp.copy(jnp.exp(x))), lambda y, ct: (ct * y,))
    caught(kernel_case(op, kept=lambda x: [(x.dtype, x.size)]), "kept", match="a copy")


def test_a_result_reaches_beyond_its_array():
    """The elements after a result change, too, if it is written into the middle of an array."""
    case = kernel_case(lambda x: jax.nn.relu(x))

    def beyond(x, start):
        larger = AMID(x, start)
        return larger.at[-1:].add(1) if larger.ndim else larger

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "amid", beyond)
        caught(case, "views", match="dynamic slice")


AMID = kernels.amid


def test_examples_of_a_map_touch_each_other():
    @jax.custom_batching.custom_vmap
    def op(x):
        return jax.nn.relu(x)

    op.def_vmap(lambda size, mapped, x: (jax.nn.relu(x) + 0 * x.sum(), True))

    @jax.custom_vjp
    def outer(x):
        return op(x)

    outer.defvjp(lambda x: (op(x), x), lambda x, ct: (jnp.where(x > 0, ct, 0),))
    case = kernel_case(outer)
    passes(case, "vmap/all/first")
    caught(case, "examples", match="beside NaN")


def test_nan_lost_in_one_of_two_operands():
    def op(x, y):
        return jnp.maximum(jnp.nan_to_num(x), 0) * y

    case = kernel_case(
        op,
        reference=lambda x, y: jax.nn.relu(x) * y,
        make_args=lambda rng, dtype: (normal(rng, (3, 8), dtype), normal(rng, (3, 8), dtype)),
        symbolic=("b, n", "b, n"),
        exact=False,
        shardings=(),
    )
    caught(case, "special", match="array 0")


def test_an_implicit_promotion():
    case = kernel_case(lambda x: jax.nn.relu(x) * jnp.ones(x.shape[-1:], x.dtype))
    caught(case, "strict_settings", match="rank_promotion", error=ValueError)


def test_a_weak_type_decides():
    def op(x):
        return jax.nn.relu(x) + jnp.asarray(getattr(x, "weak_type", False), x.dtype)

    caught(kernel_case(op), "operands", match="bits")


def test_two_runs_differ():
    calls = []

    def count(x):
        calls.append(x)
        return np.maximum(x, 0) + np.float32(len(calls) > 1)

    case = kernel_case(on_the_host(count), differentiable=())
    caught(case, "repeated_runs", match="bits")


def test_a_reference_that_differs_from_plain_jax():
    def op(x):
        with fo.use_implementation("native"):
            native = fo.relu(x)
        return jnp.where("fastops" in str(jax.make_jaxpr(fo.relu)(x)), native, native + 1)

    passes(kernel_case(op), "value")
    caught(kernel_case(op), "modes", match="bits")


def test_no_elements_have_another_dtype():
    case = kernel_case(lambda x: jax.nn.relu(x) if x.size else jnp.zeros(x.shape, int))
    caught(case, "empty", error=ValueError)


def test_a_pullback_that_is_not_linear():
    @jax.custom_vjp
    def op(x):
        return jax.nn.relu(x)

    op.defvjp(lambda x: (jax.nn.relu(x), None), lambda _, ct: (ct * ct,))
    caught(kernel_case(op), "linear_pullback")


def test_a_derivative_of_twice_the_size():
    @jax.custom_jvp
    def op(x):
        return jnp.sin(x)

    op.defjvp(lambda p, t: (op(*p), 2 * jnp.cos(p[0]) * t[0]))
    passes(relu_case(jnp.sin), "differences")
    caught(relu_case(op), "differences")


def test_a_tracer_that_outlives_its_trace():
    seen = []

    def op(x):
        seen.append(x)
        return jax.nn.relu(x)

    caught(kernel_case(op), "no_leaks", error=Exception, match="[Ll]eaked")


def test_an_export_whose_kernels_need_the_size_of_the_example():
    """A size that is right only for the example."""

    def op(x):
        return jax.nn.relu(x) + jnp.asarray(x.shape[0] // 2 - 4, x.dtype)

    case = kernel_case(op, kernels=())
    passes(case, "value", "export")
    caught(case, "export/symbolic", match="result of")


def test_second_derivative_of_examples_lost():
    @jax.custom_jvp
    def op(x, scale):
        return x * scale * scale

    def rule(primals, tangents):
        (x, s), (dx, ds) = primals, tangents
        return op(x, s), dx * s * s + 2 * ds * jax.lax.stop_gradient(x * s)

    op.defjvp(rule)
    case = scaled_case(op, reference=lambda x, s: x * s * s)
    passes(case, "vmap_of_grad/x0", "vmap_of_vjp/x0/one")
    caught(case, "grad_of_vmap_of_grad/x0", "grad_of_vmap_of_grad/all", match="relative error")


def test_maps_of_linear_functions():
    """Batching and transposition rules that are right without each other."""
    case = scaled_case(with_summed_gradient(lambda size, total: (total, False)))
    names = ("vmap_of_vjp/x0/one", "vmap_of_vmap_of_grad/first", "vmap_of_vmap_of_grad/others")
    caught(case, *names, error=(AssertionError, ValueError))


# A correct op passes


PLAIN = relu_case(jax.nn.relu, symbolic=("8*b, 64",), name="plain")
SCALED = scaled_case(scaled, name="scaled", dtypes=("float32", "bfloat16"))


@checks(PLAIN, SCALED)
def test_plain_ops_pass(check):
    check()
