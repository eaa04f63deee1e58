"""The one decision for a call, its reasons, and `explain`."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fastops as fo
from jax_fastops import _dispatch, _explain, _native
from jax_fastops._op import ops

X = jax.ShapeDtypeStruct((1024, 64), np.dtype("float32"))


def only(fn, *args):
    """The one call that a function makes."""
    (call,) = fo.explain(fn)(*args).calls
    return call


def gradient(fn):
    return jax.grad(lambda *xs: jnp.sum(fn(*xs)).astype(jnp.float32))


@pytest.fixture
def measured(monkeypatch):
    """Sets the thresholds of a class."""

    def set_to(shape_class, forward, grad, dtype="float32"):
        row = {_dispatch.lowering_platform(): {dtype: {"forward": forward, "grad": grad}}}
        monkeypatch.setattr(_dispatch, "thresholds", lambda: {shape_class: row})

    return set_to


# ---- every reason, and the condition that flips it -----------------------------------------------


@pytest.mark.parametrize(
    "size, forward, grad",
    [(X.size - 1, False, False), (X.size, True, False), (2 * X.size, True, True)],
)
def test_the_size_decides(size, forward, grad, measured):
    measured("relu", X.size, 2 * X.size)
    x = jax.ShapeDtypeStruct((size,), X.dtype)
    call = only(fo.relu, x)
    assert call.kernel is forward
    assert call.reason == (
        f"{size:,} elements; the kernel is faster from {X.size:,} (relu, float32)"
    )
    assert only(gradient(fo.relu), x).kernel is grad


def test_a_class_that_never_gains(measured):
    measured("relu", None, 0)
    call = only(fo.relu, X)
    assert (call.kernel, call.reason) == (
        False,
        "XLA is as fast at every measured size (relu, float32)",
    )
    measured("relu", 0, 0)
    assert only(fo.relu, X).kernel


def test_a_class_that_was_not_measured(measured):
    measured("another", 0, 0)
    call = only(fo.relu, X)
    assert not call.kernel and "not measured (relu, float32)" in call.reason
    assert only(gradient(fo.relu), X).kernel


@pytest.mark.parametrize("name, kernel", [("native", True), ("xla", False)])
def test_the_implementation_decides(name, kernel, measured):
    measured("relu", *((None, None) if kernel else (0, 0)))
    with fo.use_implementation(name):
        call = only(fo.relu, X)
    assert (call.kernel, call.reason) == (kernel, f"the implementation is '{name}'")


def test_kernels_that_were_not_built(native, monkeypatch):
    assert only(fo.relu, X).kernel
    monkeypatch.setattr(_native, "kernels", lambda platform: frozenset({"add_relu"}))
    platform = _dispatch.lowering_platform()
    assert only(fo.relu, X).reason == f"no kernel was built for {platform}"


def test_kernels_that_cannot_run_here(native, monkeypatch):
    monkeypatch.setattr(_native, "runs_here", lambda platform: False)
    call = only(fo.relu, X)
    assert not call.kernel and "other devices" in call.reason


def of_shape(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


RANK = _native.limit("broadcast_rank")
LIMITS = {
    "empty": (fo.softmax, of_shape(4, 0), of_shape(4, 8), "there is nothing to sum"),
    "apart": (
        functools.partial(fo.softmax, axis=(0, 2)),
        of_shape(4, 8, 2),
        None,
        "the axes are not adjacent",
    ),
    "adjacent": (functools.partial(fo.softmax, axis=(1, 2)), None, of_shape(4, 8, 2), ""),
    "in place": (
        functools.partial(fo.transpose, axes=(1, 0)),
        of_shape(1, 8),
        of_shape(2, 8),
        "no element changes its place",
    ),
    "dtype of heads": (
        lambda x: fo.split_heads(x, jnp.zeros(8, x.dtype), num_heads=2),
        of_shape(2, 8, dtype=np.int32),
        of_shape(2, 8),
        "the kernel does not take the dtype int32",
    ),
    "rank": (
        lambda x: fo.lerp(x, jnp.zeros(1), jnp.zeros(x.shape[-1])),
        of_shape(*(2,) * (RANK + 1)),
        of_shape(*(2,) * RANK),
        f"the result has more than {RANK} dimensions",
    ),
    "one element": (
        lambda x: fo.batch_norm(x, None, None)[0],
        of_shape(1, 8),
        of_shape(2, 8),
        "there is nothing to sum",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_of_the_kernel(name, native):
    fn, refused, taken, reason = LIMITS[name]
    if refused is not None:
        call = only(fn, refused)
        assert (call.kernel, call.reason) == (False, reason)
    if taken is not None:
        assert only(fn, taken).kernel


def test_what_xla_fuses_under_auto(measured):
    measured("add_relu", 0, 0)
    row = of_shape(64)
    call = only(fo.add_relu, X, row)
    assert not call.kernel and "broadcast" in call.reason
    assert only(fo.add_relu, X, X).kernel
    with fo.use_implementation("native"):
        assert only(fo.add_relu, X, row).kernel


@pytest.mark.parametrize(
    "axes, words", [((1, 0), "matrix product"), ((1, 0, 2), "rows"), ((2, 1, 0), None)]
)
def test_transpositions_that_xla_avoids(axes, words, measured):
    measured("transpose_rows" if axes[-1] == len(axes) - 1 else "transpose", 0, 0, "bfloat16")
    x = of_shape(*(32,) * len(axes), dtype=jnp.bfloat16)
    call = only(functools.partial(fo.transpose, axes=axes), x)
    assert call.kernel is (words is None)
    assert words is None or words in call.reason


def test_what_is_explained_is_what_is_lowered(measured):
    """Forward and gradient on either side of their thresholds, for every platform's default."""
    measured("softmax", 1024, 4096)
    for size in (512, 1024, 4096):
        x = of_shape(size // 64, 64)
        for fn in (fo.softmax, gradient(lambda x: fo.softmax(x)[:, 0])):
            text = jax.jit(fn).lower(x).as_text()
            assert only(fn, x).kernel == ("jax_fastops.softmax" in text)


def test_a_mapped_axis_counts(measured):
    """A call whose gradient takes the kernel decides on its forward by the size of all examples."""
    measured("softmax", 64 * 64, 64)
    x = of_shape(64, 64)
    assert "jax_fastops.softmax" in jax.jit(jax.vmap(fo.softmax)).lower(x).as_text()
    assert "jax_fastops.softmax" not in jax.jit(fo.softmax).lower(of_shape(64)).as_text()


# ---- explain -------------------------------------------------------------------------------------


def example(x):
    @jax.jit
    def layer(x):
        return fo.layer_norm(fo.relu(x), jnp.ones(64), None)

    x = layer(layer(x))
    x, _ = jax.lax.scan(lambda x, _: (fo.softmax(x), None), x, length=5)
    x = jax.checkpoint(lambda x: fo.rms_norm(x))(x)
    return x.sum() + fo.log_softmax(jax.lax.stop_gradient(x)).sum()


def test_a_program(native):
    found = fo.explain(jax.jit(jax.value_and_grad(example)))(X)
    size, row = X.size * 4, X.shape[0] * 4
    assert [(c.op, c.calls, c.differentiated, c.kept) for c in found.calls] == [
        ("relu", 2, True, X.size // 8),
        ("layer_norm", 2, True, size + 2 * row + 64 * 4),
        ("softmax", 5, True, size),
        ("rms_norm", 1, True, 0),
        ("log_softmax", 1, False, 0),
    ]
    assert found.kept == sum(c.calls * c.kept for c in found.calls)
    assert all(c.kernel for c in found.calls)
    first = example.__code__.co_firstlineno
    name = pathlib.Path(__file__).name
    for call, line in zip(found.calls, (3, 3, 6, 7, 8), strict=True):
        assert call.where.endswith(f"{name}:{first + line}")


def test_what_the_reference_keeps():
    with fo.use_implementation("xla"):
        call = only(gradient(fo.softmax), X)
    kept = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(jax.nn.softmax, x)[1], X))
    assert call.kept == sum(x.size * x.dtype.itemsize for x in kept) > 0


def test_forward_mode_and_vmap_are_derivatives_of_what_they_call(native):
    assert only(lambda x: jax.jvp(fo.relu, (x,), (x,)), X).differentiated
    assert only(jax.vmap(gradient(fo.relu)), X).differentiated
    assert not only(jax.vmap(fo.relu), X).differentiated


def test_arguments_that_are_no_arrays(native):
    fn = jax.jit(lambda x, axis: fo.softmax(x, axis=axis), static_argnames="axis")
    assert only(fn, jnp.ones((4, 8)), 0).operands == ("float32[4,8]",)
    assert fo.explain(fn)(jnp.ones((4, 8)), axis=1).calls[0].kernel


def test_explaining_leaves_no_trace_behind(native):
    fn = jax.jit(fo.relu)
    before = str(jax.make_jaxpr(fn)(X))
    for _ in range(2):
        assert only(fn, X).calls == 1
    assert str(jax.make_jaxpr(fn)(X)) == before
    assert not _explain._sessions
    with pytest.raises(TypeError):
        fo.explain(fo.relu)(of_shape(3, dtype=np.int32))
    assert not _explain._sessions


def test_shards(native):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        fo.relu, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=True
    )
    assert only(mapped, X).kernel


def test_the_text_is_a_table(native):
    text = str(fo.explain(jax.grad(lambda x: fo.relu(x).sum()))(X))
    head, row, summary = text.splitlines()
    assert head.split() == ["op", "operands", "runs", "calls", "kept", "where", "why"]
    assert row.split()[:6] == ["relu", "float32[1024,64]", "kernel", "1", "8.19", "kB"]
    assert row.endswith("the implementation is 'native'")
    assert summary == "1 calls, 1 by kernel; 8.19 kB kept for the backward"


def test_a_terminal_gets_colors(native, monkeypatch):
    pytest.importorskip("rich")
    found = fo.explain(fo.relu)(X)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "━" in str(found) or "─" in str(found)


def test_the_log():
    code = (
        "import jax, jax.numpy as jnp, jax_fastops as fo\n"
        "jax.jit(jax.grad(lambda x: fo.softmax(x)[0]))(jnp.ones(8))\n"
    )
    environment = {**os.environ, "JAX_FASTOPS_LOG": "dispatch", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("jax_fastops"))
    assert line.startswith("jax_fastops.dispatch: softmax(float32[8]) at <string>:2: reference: ")


def test_every_op_declares_its_kernels():
    for op in ops().values():
        assert op.kernels, f"{op.name} can never take a kernel"
