"""Kernels called by name, and the checks of their handlers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compat
from harness.sharding import device_count
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops import _dispatch, _native
from jax_fastops._kernel import Kernel

MASK = "... ceil(n/8) :uint8"
RELU = Kernel.declare("relu", f"x: ... n -> y: ... n, mask?: {MASK}")
SELECT = Kernel.declare("relu_bwd", f"dy: ... n, mask: {MASK} -> dx: ... n")
NORM = Kernel.declare(
    "norm",
    "x: ... n, scale?: n :acc? -> y: ... n, rstd?: ... :acc",
    rms=np.bool_,
    eps=np.float64,
)
SPLIT = Kernel.declare("split_heads", "x: ... *s f -> q: ... h *s d")
X = np.arange(-12.0, 12.0, dtype=np.float32).reshape(2, 12)


# Declarations and calls ---------------------------------------------------------------------------


def test_results_have_names():
    assert RELU(X).mask is None
    found = jax.jit(lambda x: RELU(x=x, mask=True))(X)
    np.testing.assert_array_equal(found.y, np.maximum(X, 0))
    assert found.mask.shape == (2, 2) and found.mask.dtype == np.uint8
    np.testing.assert_array_equal(SELECT(mask=found.mask, dy=X).dx, np.maximum(X, 0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_operands_may_be_absent(dtype):
    x = jnp.asarray(X, "bfloat16")
    for scale in (None, jnp.full(12, 2, dtype)):
        found = NORM(x, scale=scale, rstd=True, rms=True, eps=1e-6)
        with fo.use_implementation("xla"):
            expected = fo.rms_norm(x, scale)
        np.testing.assert_array_equal(found.y, expected)
        assert found.rstd.shape == (2,) and found.rstd.dtype == np.float32


def test_a_size_may_be_given():
    q = SPLIT(X.reshape(1, 2, 12), h=3, d=4).q
    np.testing.assert_array_equal(q, X.reshape(1, 2, 3, 4).swapaxes(1, 2))


def test_the_handler_gets_the_buffers_that_are_present():
    given = dict(x=X.reshape(1, 2, 12), h=3, d=4)
    assert dict(SPLIT.of(**given).attributes) == {"buffers": "x: ... *s f -> q: ... h=3 *s d=4"}
    call = NORM.of(X, rms=False, eps=1)
    assert dict(call.attributes) == {"buffers": "x: ... n -> y: ... n", "rms": False, "eps": 1.0}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: RELU(), "'x' of .* is needed"),
        (lambda: SELECT(dy=X), "'mask' of .* is needed"),
        (lambda: RELU(X, masks=True), "relu has no masks"),
        (lambda: RELU(X, n=12, m=3), "relu has no m"),
        (lambda: SELECT(X, X), "'mask: .* has dtype float32"),
        (
            lambda: NORM(jnp.ones((2, 3), "float16"), jnp.ones(3, "bfloat16"), rms=True, eps=1),
            "'scale: n :acc.' has dtype bfloat16",
        ),
    ],
)
def test_a_wrong_call_is_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    "signature, message",
    [
        ("... n -> y: ... n", "a different name for each buffer"),
        ("x: ... n -> x: ... n", "a different name for each buffer"),
        ("x: ... n -> n: ... n", "a different name for each buffer"),
        ("x: ... -> y: ...", "needs a dimension"),
    ],
)
def test_a_wrong_declaration_is_refused(signature, message):
    with pytest.raises(ValueError, match=message):
        Kernel.declare("relu", signature)


# Handlers -----------------------------------------------------------------------------------------

F32, U8 = np.float32, np.uint8


def run(kernel, results, *operands, **attributes):
    """Calls a handler, as a program might that was not made by this package."""
    types = [jax.ShapeDtypeStruct(*result) for result in results]
    name = _native.target_name(f"jax_fastops.{kernel}", _dispatch.lowering_platform())
    return jax.block_until_ready(jax.ffi.ffi_call(name, types)(*operands, **attributes))


NAMED = "x: ... n -> y: ... n"


@pytest.mark.parametrize(
    "kernel, results, operands, buffers, message",
    [
        ("relu", [((2, 11), F32)], [X], NAMED, r"y f32\[2,11\] and x f32\[2,12\] do not fit"),
        ("relu", [((3, 12), F32)], [X], NAMED, r"y f32\[3,12\] and x f32\[2,12\] do not fit"),
        ("relu", [((12,), F32)], [X], NAMED, r"y f32\[12\] and x f32\[2,12\] do not fit"),
        ("relu", [((2, 12), U8)], [X], NAMED, r"y u8\[2,12\] and x f32\[2,12\] do not fit"),
        ("relu", [((2, 12), np.int32)], [X.astype("i4")], NAMED, r"x s32\[2,12\] must be f32"),
        ("relu", [((2, 12), F32)], [X, X], NAMED, "more buffers than in"),
        ("relu", [((2, 12), F32)], [X], f"{NAMED}, mask: {MASK}", "fewer buffers than in"),
        (
            "relu",
            [((2, 12), F32), ((2, 3), U8)],
            [X],
            f"{NAMED}, mask: {MASK}",
            r"mask u8\[2,3\] and x f32\[2,12\] do not fit",
        ),
        ("relu", [((2, 12), F32)] * 2, [X], f"{NAMED}, z: ... n", r"not know the buffer z f32\[2,"),
        ("relu", [((2, 12), F32)], [X], "x: ... n -> z: ... n", "no buffer 'y'"),
        ("add_relu", [((2, 12), F32)], [X], "x: ... n -> z: ... n", "no buffer 'y'"),
        ("relu", [((2, 12), F32)], [X], "x: ... n: -> y: ... n", "fewer buffers|cannot read"),
        ("relu", [((2, 12), F32)], [X], "x: ... 2n -> y: ... n", "cannot read '2n'"),
        ("relu", [((2, 12), F32)], [X], "... n -> ... n", "cannot read"),
        ("relu", [((2, 12), F32)], [X], "", "more buffers than in"),
        ("relu", [((2, 12), F32)], [X], "x: ... n=11 -> y: ... n", "do not fit"),
        ("relu", [((2, 12), F32)], [X], "x: ... n :acc? -> y: ... n :float16", "do not fit"),
        ("split_heads", [((2, 3, 4), F32)], [X], "x: *s f -> q: h=3 *s d=4", "do not fit"),
    ],
)
def test_a_handler_checks_buffers(kernel, results, operands, buffers, message):
    with pytest.raises(Exception, match=rf"(?i)jax_fastops\.{kernel}: .*(?:{message})"):
        run(kernel, results, *operands, buffers=buffers)


def test_a_handler_needs_and_knows_its_attributes():
    result = [((2, 12), F32)]
    with pytest.raises(Exception, match="the attribute 'buffers' is needed"):
        run("relu", result, X)
    with pytest.raises(Exception, match="the attribute 'rms' is needed"):
        run("norm", result, X, buffers=NAMED)
    with pytest.raises(Exception, match="relu: knows 1 of the call's 2 attributes"):
        run("relu", result, X, buffers=NAMED, negative_slope=0.1)


def test_a_long_row_needs_a_workspace():
    n = _native.limit("norm_workspace") + 1
    x = np.ones((1, n), F32)
    with pytest.raises(Exception, match="needs a workspace"):
        run("norm", [((1, n), F32)], x, buffers=NAMED, rms=True, eps=np.float64(0))


@pytest.mark.parametrize(
    "shape, stars",
    [((2, 3, 4), "*a *b *c"), ((2, 3, 4), "... *b *c"), ((2, 1, 3, 4, 5), "... *a *b *c")],
)
def test_names_give_a_permutation(shape, stars):
    x = np.arange(np.prod(shape), dtype=F32).reshape(shape)
    last = len(stars.split()) - stars.count("...")
    names = stars.split()[-last:]
    axes = (*range(x.ndim - last), *reversed(range(x.ndim - last, x.ndim)))
    y = np.transpose(x, axes)
    result = f"{'... ' * ('...' in stars)}{' '.join(reversed(names))}"
    (found,) = run("transpose", [(y.shape, F32)], x, buffers=f"x: {stars} -> y: {result}")
    np.testing.assert_array_equal(found, y)


def test_batch_first_is_undone():
    """Dimensions with a star come after the batch dimensions in the order of the result."""
    x = np.arange(24.0, dtype=F32).reshape(2, 3, 4)  # ... *s f
    # x is [..., s, f], q[..., h, s, d] comes as [..., s, h, d]; memory is unchanged.
    name = _native.target_name("jax_fastops.split_heads", _dispatch.lowering_platform())
    (found,) = jax.ffi.ffi_call(
        name,
        [jax.ShapeDtypeStruct((2, 3, 2, 2), F32)],
        output_layouts=[(0, 2, 1, 3)],
    )(x, buffers="x: ... *s f -> q: ... h=2 *s d=2", batch_first=True)
    np.testing.assert_array_equal(found, x.reshape(2, 3, 2, 2))


@pytest.mark.parametrize(
    "buffers",
    [
        "x: ... *s f -> q: ... h=2 *t d=2",
        "x: ... *s *f -> q: ... h=2 *s d=2",
        "x: *s f -> q: h *s d",
    ],
)
def test_batch_first_needs_the_same_stars_everywhere(buffers):
    with pytest.raises(Exception, match="do not fit"):
        results = [((2, 3, 2, 2), F32)]
        run("split_heads", results, np.zeros((2, 3, 4), F32), buffers=buffers, batch_first=True)


def test_limits_come_from_the_module():
    limits = fo.info()["modules"]["cpu"]["limits"]
    assert limits["broadcast_rank"] == _native.limit("broadcast_rank") == 16
    assert _native.workspace("batch_norm", 1024, 64, 1) > 0
    assert _native.workspace("batch_norm", -1, 64, 1) >= _native.workspace("batch_norm", 99, 64, 1)
    with pytest.raises(ValueError, match="no workspace of lerp"):
        _native.workspace("lerp", 1, 1, 1)


@pytest.mark.jax
def test_kernels_map_and_partition_like_before():
    with compat.x64(False):
        per_row = jax.vmap(lambda x: RELU(x, mask=True))(X)
    np.testing.assert_array_equal(per_row.y, np.maximum(X, 0))


def test_latency_for_the_scheduler():
    """On a GPU, the time of a call by the bytes that each device moves."""
    x = jax.ShapeDtypeStruct((1 << 10, 1 << 14), jnp.bfloat16)

    def text(platform, devices=1):
        mesh = compat.make_mesh(dict(a=devices), AxisType.Auto)
        given = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("a")))
        call = jax.jit(lambda x: RELU(x, mask=True).y)
        return call.trace(given).lower(lowering_platforms=(platform,)).as_text()

    def nanoseconds(devices):
        (found,) = re.findall(r'latency_metadata = "(\d+)"', text("cuda", devices))
        return int(found)

    moved = 2 * x.size * (2 + 1 / 16)  # x, y, and a bit for each element
    assert nanoseconds(1) == pytest.approx(1e9 * moved / _dispatch.bandwidth("cuda"), rel=1e-3)
    if device_count() > 1:
        assert nanoseconds(device_count()) == pytest.approx(
            nanoseconds(1) / device_count(), rel=1e-3
        )
    assert "latency_metadata" not in text("cpu")
