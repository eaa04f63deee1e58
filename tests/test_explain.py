"""The one decision for a call, its reasons, and `explain`."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fastops as fo
from jax_fastops import _auto, _dispatch, _explain, _native, _op, _tables

X = jax.ShapeDtypeStruct((1024, 64), np.dtype("float32"))


def only(fn, *args):
    """The one call that a function makes."""
    (call,) = fo.explain(fn)(*args).calls
    return call


def gradient(fn):
    return jax.grad(lambda *xs: jnp.sum(fn(*xs)).astype(jnp.float32))


@pytest.fixture
def measured(monkeypatch):
    """Sets the decision trees of an entry."""

    def set_to(entry, forward, grad, dtype="float32"):
        found = {dtype: {"forward": forward, "grad": grad}}
        monkeypatch.setattr(_dispatch, "trees", lambda platform: {entry: found})

    return set_to


# ---- every reason, and the condition that flips it -----------------------------------------------


@pytest.mark.parametrize(
    "size, forward, grad, shown, limit",
    [
        (1023, False, False, "4.09 kB", "below 4.1 kB"),
        (1024, True, False, "4,096 B", "4,096 B or more"),  # else they would look the same
        (2048, True, True, "8.19 kB", "4.1 kB or more"),
    ],
)
def test_the_size_decides(size, forward, grad, shown, limit, measured):
    measured("relu", ["bytes", 4096, False, True], ["bytes", 8192, False, True])
    x = jax.ShapeDtypeStruct((size,), X.dtype)
    call = only(fo.relu, x)
    assert call.kernel is forward
    speed = "faster" if forward else "no faster"
    assert call.reason == f"the kernel was measured as {speed}: arrays of {shown} ({limit})"
    assert only(gradient(fo.relu), x).kernel is grad


def test_a_flag_decides(measured):
    measured("softmax", ["masked", 1, False, ["row_bytes", 512, True, False]], False)
    mask = of_shape(1024, 64, dtype=bool)
    call = only(lambda x, where: fo.softmax(x, where=where), X, mask)
    assert call.kernel
    assert call.reason == ("the kernel was measured as faster: a mask, rows of 256 B (below 512 B)")
    call = only(fo.softmax, X)
    assert not call.kernel
    assert call.reason == "the kernel was measured as no faster: no mask"


def test_an_entry_that_never_gains(measured):
    measured("relu", False, True)
    call = only(fo.relu, X)
    assert (call.kernel, call.reason) == (False, "the kernel was measured as no faster")
    measured("relu", True, True)
    assert only(fo.relu, X).kernel


def test_an_entry_that_was_not_measured(measured):
    measured("another", True, True)
    call = only(fo.relu, X)
    assert not call.kernel and "relu in float32 was not measured" in call.reason
    assert only(gradient(fo.relu), X).kernel


@pytest.mark.parametrize("name, kernel", [("native", True), ("xla", False)])
def test_the_implementation_decides(name, kernel, measured):
    measured("relu", not kernel, not kernel)
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
    "elements": (
        lambda x: fo.lerp(x, jnp.zeros(1), jnp.zeros(1)),
        of_shape(2, 2**31),
        of_shape(2, 2**31 - 1),
        "the result has 2**32 elements or more",
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
    measured("add_relu", True, True)
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
    measured("transpose", True, True, "bfloat16")
    x = of_shape(*(32,) * len(axes), dtype=jnp.bfloat16)
    call = only(functools.partial(fo.transpose, axes=axes), x)
    assert call.kernel is (words is None)
    assert words is None or words in call.reason


def test_what_is_explained_is_what_is_lowered(measured):
    """Forward and gradient on either side of their thresholds, for every platform's default."""
    measured("softmax", ["bytes", 4096, False, True], ["bytes", 16384, False, True])
    for size in (512, 1024, 4096):
        x = of_shape(size // 64, 64)
        for fn in (fo.softmax, gradient(lambda x: fo.softmax(x)[:, 0])):
            text = jax.jit(fn).lower(x).as_text()
            assert only(fn, x).kernel == ("jax_fastops.softmax" in text)


@pytest.mark.jax
def test_a_mapped_axis_counts(measured):
    """A call whose gradient takes the kernel decides on its forward by the size of all examples."""
    measured("softmax", ["bytes", 64 * 64 * 4, False, True], True)
    x = of_shape(64, 64)
    assert "jax_fastops.softmax" in jax.jit(jax.vmap(fo.softmax)).lower(x).as_text()
    assert "jax_fastops.softmax" not in jax.jit(fo.softmax).lower(of_shape(64)).as_text()


def known_features(tree):
    if isinstance(tree, bool):
        return set()
    name, bound, below, rest = tree
    assert isinstance(bound, int) and below != rest
    return {name} | known_features(below) | known_features(rest)


CALLS = {
    "relu": (fo.relu, [X]),
    "add_relu": (fo.add_relu, [X, X]),
    "softmax": (fo.softmax, [X]),
    "log_softmax": (fo.log_softmax, [X]),
    "layer_norm": (fo.layer_norm, [X]),
    "rms_norm": (fo.rms_norm, [X]),
    "residual_layer_norm": (fo.residual_layer_norm, [X, X]),
    "residual_rms_norm": (fo.residual_rms_norm, [X, X]),
    "batch_norm": (lambda x: fo.batch_norm(x, None, None)[0], [X]),
    "batch_norm_inference": (
        lambda x, mean: fo.batch_norm_inference(x, mean, mean, None, None),
        [X, X.update(shape=(64,))],
    ),
    "group_norm": (lambda x: fo.group_norm(x, num_groups=2), [X]),
    "transpose": (fo.transpose, [X]),
    "split_heads": (lambda x, b: fo.split_heads(x, b, num_heads=2), [X, X.update(shape=(64,))]),
    "split_qkv_heads": (
        lambda x: fo.split_qkv_heads(x, num_heads=2),
        [X.update(shape=(1024, 96))],
    ),
    "split_qkv_heads_rotary": (
        lambda x: fo.split_qkv_heads(x, num_heads=4, num_kv_heads=1),
        [X.update(shape=(1024, 96))],
    ),
    "lerp": (fo.lerp, [X, X, X.update(shape=(64,))]),
    "dropout": (lambda x: fo.dropout(x, jax.random.key(0), 0.1), [X]),
    "gated_act": (fo.gated_act, [X, X]),
    "gated_act_halves": (fo.gated_act, [X]),
    "window_sum": (lambda x: fo.window_sum(x, 2), [X]),
    "segment_sum": (
        lambda x, ids: fo.segment_sum(x, ids, 9),
        [X.update(shape=(1024, 64)), X.update(shape=(1024,), dtype=np.dtype("int32"))],
    ),
    "cross_entropy": (
        fo.cross_entropy,
        [X, X.update(shape=X.shape[:-1], dtype=np.dtype("int32"))],
    ),
} | {
    f"bias_{name}": (
        functools.partial(fo.bias_act, activation=name),
        [X, X.update(shape=(64,))],
    )
    for name in ("gelu", "gelu_exact", "silu", "relu")
}


def rows(n, *shape):
    return X.update(shape=(*shape, n))


# Calls that a kernel may refuse when they are transformed, and the reasons.
OWN = "each mapped example has its own"
COPIES = "8 devices would need large copies of an operand"
REFUSED = {
    "layer_norm": (fo.layer_norm, [X, rows(64), rows(64)], {f"{OWN} scale", f"{OWN} bias"}),
    "residual_layer_norm": (
        lambda x, r, b: fo.residual_layer_norm(x, r, input_bias=b, return_sum=True, fanout=True)[1],
        [X, X, rows(64)],
        {f"{OWN} input_bias"},
    ),
    "residual_rms_norm_dropout": (
        lambda x, scale: fo.residual_rms_norm(
            x, x, scale, dropout_key=jax.random.key(0), dropout_rate=0.5
        ),
        [rows(256, 32), rows(256)],
        {f"{OWN} scale"},
    ),
    "dropout": (
        lambda x, bias: fo.residual_rms_norm(
            x, x, input_bias=bias, dropout_key=jax.random.key(0), dropout_rate=0.5
        ),
        [X, rows(64)],
        {f"{OWN} bias"},
    ),
    "split_qkv_heads": (
        lambda x, bias: fo.split_qkv_heads(x, bias, num_heads=2)[0],
        [rows(96, 8), rows(96)],
        {f"{OWN} bias"},
    ),
    "split_qkv_heads_rotary": (
        lambda x, bias, scale: fo.split_qkv_heads(
            x, bias, num_heads=4, num_kv_heads=1, q_scale=scale, k_scale=scale
        )[0],
        [rows(96, 8, 2), rows(96), rows(16)],
        {f"{OWN} bias", f"{OWN} q_scale"}
        | {"gradients of parameters are sums over fewer than 3 positions"},
    ),
    "lerp": (fo.lerp, [rows(4096, 8), rows(4096, 8), rows(4096)], {COPIES}),
    "bias_act": (fo.bias_act, [rows(4096, 8), rows(4096)], {COPIES}),
    "bias_relu": (
        functools.partial(fo.bias_act, activation="relu"),
        [rows(4096, 8), rows(4096)],
        {COPIES},
    ),
    "softmax": (
        lambda x, y: fo.softmax(x * y, where=y > 0),
        [rows(4096, 8, 2), rows(4096)],
        {COPIES},
    ),
}


def transformed(fn, args):
    """The function and its operands under each transformation, by name."""
    floating = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def value(*xs):
        ys = jax.tree.leaves(fn(*xs))
        return sum(y.astype(jnp.float32).sum() for y in ys), ys

    step = jax.value_and_grad(value, floating, has_aux=True)
    yield "plain", fn, args
    yield "step", step, args
    yield "tangent", lambda *xs: jax.jvp(lambda x: fn(x, *xs[1:]), xs[:1], xs[:1]), args
    for mapped in dict.fromkeys([tuple(range(len(args))), *((i,) for i in floating)]):
        axes = [0 if i in mapped else None for i in range(len(args))]
        stacked = [
            x if a is None else x.update(shape=(3, *x.shape))
            for x, a in zip(args, axes, strict=True)
        ]
        yield f"plain, mapped {mapped}", jax.vmap(fn, axes), stacked
        yield f"step, mapped {mapped}", jax.vmap(step, axes), stacked
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.NamedSharding(mesh, jax.P())
    sharded = [args[0].update(sharding=jax.NamedSharding(mesh, jax.P("i")))]
    sharded += [x.update(sharding=whole) for x in args[1:]]
    yield "plain, sharded", fn, sharded
    yield "step, sharded", step, sharded


# The op layer explains and lowers all ops alike. Other versions of JAX run a few.
SOME = ("relu", "softmax", "layer_norm", "batch_norm", "layer_norm, refused")


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, marks=[pytest.mark.jax] * (call in SOME))
        for call in (*CALLS, *(f"{name}, refused" for name in REFUSED))
    ],
)
def test_every_explanation_is_what_is_lowered(call, native, monkeypatch):
    name, _, refused = call.partition(", ")
    fn, args, reasons = REFUSED[name] if refused else (*CALLS[name], None)
    noted = []
    decided = _op._Stage.decided

    def note(stage, *args, **params):
        found, choice = decided(stage, *args, **params)
        noted.append((stage.kind, choice))
        return found, choice

    monkeypatch.setattr(_op._Stage, "decided", note)
    seen = set()
    for how, function, operands in transformed(fn, args):
        noted.clear()
        calls = fo.explain(function)(*operands).calls
        explained = set(noted)
        noted.clear()
        text = jax.jit(function).lower(*operands).as_text()
        assert explained == set(noted), how
        kernels = [choice.kernel for _, choice in noted]
        assert any(kernels) == ("jax_fastops." in text), how
        assert all(kernels) == all(call.kernel for call in calls), how
        if how != "tangent":  # few ops have kernels for tangents
            seen |= {choice.reason for _, choice in noted if not choice.kernel}
    if refused and jax.device_count() == 8:
        assert seen == reasons


@pytest.mark.parametrize("entry", CALLS)
def test_calls_have_the_features_that_the_table_asks_for(entry, monkeypatch):
    asked = {"bytes"}
    for device in _auto.DEVICES:
        for uses in device["entries"].get(entry, {}).values():
            asked |= known_features(uses["forward"]) | known_features(uses["grad"])
    seen = []
    real = _dispatch.decide
    monkeypatch.setattr(_dispatch, "decide", lambda *args: seen.append(args[1]) or real(*args))
    fn, args = CALLS[entry]
    jax.eval_shape(fn, *args)
    (request,) = seen
    assert request.entry == entry
    assert asked <= request.known.keys()


def test_conditions():
    small, flag = _auto.size < 8, _auto.aligned
    for value in (7, 8):
        for aligned in (0, 1):
            features = {"bytes": value, "aligned": aligned}
            for condition, expected in [
                (small & flag, value < 8 and aligned),
                (small | flag, value < 8 or aligned),
                (~small, value >= 8),
                (flag.then(small, ~small), (value < 8) == bool(aligned)),
            ]:
                assert _dispatch._measured(condition.tree, features).kernel == bool(expected)
    assert ((small | flag) & ~small).comparisons == 3
    with pytest.raises(ValueError, match="relu: a condition has more than 3 comparisons"):
        _auto._entries([("relu", "all", _auto.NEVER, (small | flag) & (small | flag))])


def test_the_table_has_no_other_entries():
    for device in _auto.DEVICES:
        # Attention asks for three kernels, those of `dense_act` are for 16-bit dtypes, and the
        # forward of `take` is a gather of XLA.
        others = {"attention", "list_attention", "short_attention", "take"}
        others |= {f"dense_{name}" for name in ("gelu", "gelu_exact", "silu", "relu")}
        assert set(device["entries"]) <= {*CALLS, *others}


def test_an_unknown_device_takes_the_nearest(monkeypatch):
    def device(name, capability, bandwidth):
        return dict(name=name, compute_capability=capability, bandwidth=bandwidth, entries={})

    known = [device("A", 8.0, 2e12), device("B", 9.0, 3e12), device("C", 9.0, 5e12)]
    for here, nearest in [
        (("C", 9.0, 1e12), "C"),
        (("unknown", 8.6, 1e12), "B"),
        (("unknown", 8.0, 9e12), "A"),
        (("unknown", 9.0, 4.5e12), "C"),
        (("unknown", 12.0, 2e12), "B"),
    ]:
        monkeypatch.setattr(_native, "device", lambda platform, here=here: here)
        assert _dispatch.nearest(known, "cuda")["name"] == nearest


def test_kernel_or(measured):
    measured("softmax", True, True)
    calls = []

    def other(x):
        calls.append(x.shape)
        return jax.nn.softmax(x)

    fn = jax.jit(fo.kernel_or(fo.softmax, other))
    assert "jax_fastops.softmax" in fn.lower(X).as_text() and not calls
    assert "jax_fastops.softmax" not in fn.lower(of_shape(4, 0)).as_text()
    assert calls == [(4, 0)]
    with fo.use_implementation("xla"):
        assert "jax_fastops.softmax" not in fn.lower(X).as_text()
        assert only(fo.kernel_or(fo.softmax, jax.nn.softmax), X).reason.endswith("'xla'")
    assert calls == [(4, 0), X.shape]
    assert "jax_fastops.softmax" in jax.jit(gradient(fn)).lower(X).as_text()
    # The functions that it calls elsewhere take the reference as ever.
    x = jnp.ones((4, 8))
    with fo.use_implementation("xla"):
        np.testing.assert_array_equal(fo.kernel_or(fo.softmax, fo.softmax)(x), fo.softmax(x))


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


@pytest.mark.jax
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
        fo.explain(fo.relu)(of_shape(3, dtype=np.complex64))
    assert not _explain._sessions


@pytest.mark.jax
def test_shards(native):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        fo.relu, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=True
    )
    assert only(mapped, X).kernel


def test_every_bound_of_the_tables_has_words():
    def decided(tree):
        if not isinstance(tree, bool):
            yield tree[0], tree[1] == 1
            yield from (each for inner in tree[2:] for each in decided(inner))

    rules = [
        uses for d in _auto.DEVICES for entry in d["entries"].values() for uses in entry.values()
    ]
    for name, is_flag in {
        each for uses in rules for tree in uses.values() for each in decided(tree)
    }:
        assert name in (_auto.FLAGS if is_flag else _auto.WORDS)


def test_the_text_without_a_call():
    text = "is a function: call it with the arguments of relu"
    assert str(fo.explain(fo.relu)) == f"explain(relu) {text}"
    assert str(fo.autofuse.report(fo.relu)) == f"autofuse.report(relu) {text}"


def test_a_method():
    class Model:
        @fo.explain
        def apply(self, x):
            return fo.relu(x)

    assert [call.op for call in Model().apply(X).calls] == ["relu"]


def test_a_cell_of_a_notebook_has_no_path():
    rows = [("op", "where"), ("relu", "/tmp/ipykernel_5/12.py:3")]
    assert _tables.text(rows).split() == ["op", "where", "relu", "cell:3"]
    assert '<td style="text-align:left">cell:3</td>' in _tables.as_html(rows)
    assert "/ipykernel_5/12.py:3" in _tables.text([("op",), rows[1][1:]])


def test_the_text_is_a_table(native):
    text = str(fo.explain(jax.grad(lambda x: fo.relu(x).sum()))(X))
    head, row, summary = text.splitlines()
    assert head.split() == ["op", "operands", "runs", "calls", "kept", "where", "why"]
    assert row.split()[:6] == ["relu", "float32[1024,64]", "kernel", "1", "8.19", "kB"]
    assert row.endswith("the implementation is 'native'")
    assert summary == "1 call, 1 by kernel; 8.19 kB kept for the backward"


def test_the_markdown_of_an_explanation(native):
    head, rule, row, empty, summary = fo.explain(fo.relu)(X).to_markdown().splitlines()
    assert head == "| op | operands | runs | calls | kept | where | why |"
    assert rule == "| --- | --- | --- | --- | --- | --- | --- |"
    assert row.startswith("| relu | float32[1024,64] | kernel | 1 |  | ") and row.endswith(" |")
    assert (empty, summary) == ("", "1 call, 1 by kernel; 0 B kept for the backward")


def test_equal_calls_are_one_row(native):
    def layers(x):
        for _ in range(3):
            x = fo.softmax(x)
        return fo.softmax(x)

    found = fo.explain(layers)(X)
    _, three, one, summary = str(found).splitlines()
    assert three.split()[3] == "3" and one.split()[3] == "1" and summary.startswith("4 calls, 4 by")
    assert [call.calls for call in found.calls] == [1] * 4


def test_the_place_is_outside_of_installed_packages(native):
    library = {}
    code = "def apply(f, x):\n    return f(x)\n\ndef main(explain, x):\n    return explain(x)\n"
    exec(compile(code, "/env/lib/site-packages/library.py", "exec"), library)

    def program(f, x):
        return library["apply"](f, x)

    here = f"test_explain.py:{program.__code__.co_firstlineno + 1}"
    assert only(functools.partial(program, fo.softmax), X).where.endswith(here)
    report = fo.autofuse.report(functools.partial(program, jax.nn.softmax))(X)
    assert [here in found.where for found in report.replaced] == [True]
    with ThreadPoolExecutor() as pool:  # whose own frames are of Python
        (call,) = pool.submit(library["main"], fo.explain(fo.softmax), X).result().calls
    assert call.where.endswith("library.py:5")


def test_a_terminal_gets_colors(native, monkeypatch):
    pytest.importorskip("rich")
    found = fo.explain(fo.relu)(X)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "━" in str(found) or "─" in str(found)


def run_with_log(what: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "JAX_FASTOPS_LOG": what,
        "JAX_FASTOPS_IMPLEMENTATION": "xla",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_an_unknown_log_is_an_error():
    done = run_with_log("nonsense", "import jax_fastops")
    assert done.returncode != 0
    assert "JAX_FASTOPS_LOG: it is 'nonsense'; it must be 'dispatch' or empty" in done.stderr


def test_the_log():
    done = run_with_log(
        "dispatch",
        "import jax, jax.numpy as jnp, jax_fastops as fo\n"
        "jax.jit(jax.grad(lambda x: fo.softmax(x)[0]))(jnp.ones(8))\n",
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("jax_fastops"))
    call = "jax_fastops.dispatch: softmax(float32[8]) at <string>:2"
    assert line == f"{call}: reference: the implementation is 'xla'"


def test_the_log_has_what_the_lowering_refuses(native, caplog):
    _explain._log.setLevel("INFO")
    try:
        x = jnp.ones((2, 3, 8))
        jax.jit(jax.vmap(fo.layer_norm)).lower(x, x[:, 0])
        assert [r.message for r in caplog.records][1:] == [
            "fastops_layer_norm: reference: each mapped example has its own scale"
        ]
        caplog.clear()
        jax.jit(jax.vmap(fo.layer_norm, (0, None))).lower(x, x[0, 0])
        assert len(caplog.records) == 1
    finally:
        _explain._log.setLevel("WARNING")


@pytest.mark.jax
def test_bert_and_resnet(native):
    """Each layer's calls are listed, with the bytes that the whole gradient keeps for them."""
    from jax_fastops.models import bert, resnet

    params = jax.eval_shape(lambda: bert.init(jax.random.key(0), bert.SMALL))
    tokens = of_shape(2, 16, dtype=np.int32)
    found = fo.explain(gradient(lambda p, t: bert.apply(p, t, bert.SMALL)[0]))(params, tokens)
    layer = [
        "split_qkv_heads",
        "softmax",
        "transpose",
        "residual_layer_norm",
        "bias_act",
        "residual_layer_norm",
    ]
    assert [call.op for call in found.calls] == ["take", "layer_norm", *layer * bert.SMALL.layers]
    assert all(call.kernel and call.differentiated and call.calls == 1 for call in found.calls)
    scanned = dataclasses.replace(bert.SMALL, scan=True)
    again = fo.explain(gradient(lambda p, t: bert.apply(p, t, scanned)[0]))(params, tokens)
    assert [call.calls for call in again.calls] == [1, 1, *[bert.SMALL.layers] * len(layer)]
    assert again.kept == found.kept

    params, statistics = jax.eval_shape(lambda: resnet.init(jax.random.key(0), resnet.SMALL))
    images = of_shape(2, 32, 32, 1)

    def logits(params, statistics, images):
        return resnet.apply(params, statistics, images, resnet.SMALL, train=True)[0]

    found = fo.explain(gradient(logits))(params, statistics, images)
    assert {call.op for call in found.calls} == {"batch_norm"}
    assert all(call.kernel and call.differentiated for call in found.calls)
    size = 2 * 32 * 32 * 16
    assert found.calls[0].kept == size * 4 + size // 8 + 3 * 16 * 4  # x, a mask, three vectors
