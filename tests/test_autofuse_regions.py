"""`autofuse`: the regions of matches, the model of bytes, timing, and the cache of decisions."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import make_mesh
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops import _implementation
from jax_fastops._implementation import Chosen
from jax_fastops.autofuse import _cost, _decisions, _tune
from jax_fastops.autofuse._evaluate import Plan, Settings
from jax_fastops.autofuse._graph import Graph
from jax_fastops.autofuse._regions import regions
from jax_fastops.autofuse._tune import Times

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="the table of a GPU takes no arrays of these sizes"
)
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def rms_norm(x, scale, eps=1e-6):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def batch_norm(x, scale, bias):
    mean = x.mean((0, 1, 2))
    variance = ((x - mean) ** 2).mean((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()


def conv(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def shapes(*sizes, dtype=F32):
    return [jax.ShapeDtypeStruct(s, dtype) for s in sizes]


def found(f, *args):
    """The regions of a function, with every match that has a kernel."""
    with fo.use_implementation("native"):
        program = jax.make_jaxpr(f)(*args)
        graph = Graph(program.jaxpr, program.consts)
        plan = Plan(graph, Settings())
        return regions(graph, plan.rewrites)


# ---- regions and keys ----------------------------------------------------------------------------


def layer(p, x):
    h = layer_norm(x, p["scale"], p["bias"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in "qkv")
    x = x + attention(q, k, v).reshape(x.shape) @ p["o"]
    h = layer_norm(x, p["scale"], p["bias"])
    return x + jax.nn.gelu(h @ p["up"] + p["shift"]) @ p["down"]


def model(layers, x, labels, head):
    for p in layers:
        x = layer(p, x)
    return cross_entropy(x @ head, labels)


def model_args(count, make=shapes):
    batch, length, width, heads, classes = 2, 8, 16, 2, 32

    def one(*sizes):
        return make(sizes)[0]

    size = width // heads
    names = dict.fromkeys("qkv", (width, heads, size))
    names |= dict(scale=(width,), bias=(width,), o=(width, width), shift=(4 * width,))
    names |= dict(up=(width, 4 * width), down=(4 * width, width))
    layers = [{k: one(*s) for k, s in names.items()} for _ in range(count)]
    labels = np.arange(batch * length, dtype=np.int32).reshape(batch, length) % classes
    return layers, one(batch, length, width), labels, one(width, classes)


def arrays(*sizes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s) * 0.3, F32) for s in sizes]


def test_equal_layers_are_equal_regions():
    by_key: dict[str, list] = {}
    for region in found(model, *model_args(4)):
        by_key.setdefault(region.key, []).append(str(region))
    assert sorted((group[0], len(group)) for group in by_key.values()) == [
        ("add + layer_norm", 7),  # after attention, and after the layer
        ("attention", 4),
        ("bias + gelu", 4),
        ("layer_norm", 1),
        ("linear_cross_entropy", 1),
    ]


def test_a_region_ends_at_walls():
    def f(x, w, scale, bias, y):
        h = x @ w + jnp.cumsum(y, 0).astype(x.dtype)  # sums of parts are a wall, a cast is not
        h = rms_norm(h, 1 + scale)
        return jnp.tanh(h * 2) @ w, jnp.sin(bias)

    args = shapes((8, 16), (16, 16), (16,), (16,), (8, 16))
    (region,) = found(f, *args)
    outside = [n.name for n in region.nodes if n not in region.inner]
    assert "dot_general" not in outside and "cumsum" not in outside and "sin" not in outside
    assert {"add", "mul", "tanh"} <= set(outside)
    assert sorted(v.shape for v in region.inputs) == [(8, 16), (8, 16), (16,)]
    assert [v.node.name for v in region.outputs] == ["tanh"]


def test_matches_without_a_wall_between_them_are_one_region():
    def f(x, scale, up):
        return jax.nn.silu(rms_norm(x, scale)) * up

    def g(x, scale, w):
        h = rms_norm(x, scale)
        return rms_norm(h @ w, scale)

    x, scale, w = shapes((8, 16), (16,), (16, 16))
    assert [str(r) for r in found(f, x, scale, x)] == ["rms_norm + silu * up"]
    assert [str(r) for r in found(g, x, scale, w)] == ["rms_norm"] * 2


def test_a_residual_stream_is_no_region():
    """What depends on a wall after the match is another region, or no function would compute it."""

    def f(x, scale, w):
        for _ in range(3):
            x = x + rms_norm(x, scale) @ w
        return rms_norm(x, scale)

    found_here = found(f, *shapes((8, 16), (16,), (16, 16)))
    assert len(found_here) == 4 and len({r.key for r in found_here}) == 3


def keys_of(f, *args):
    (region,) = found(f, *args)
    return region.key, region.structure


def test_keys_depend_on_what_is_computed():
    x, scale = shapes((8, 16), (16,))
    keys = keys_of(rms_norm, x, scale)
    assert keys == keys_of(lambda a, b: jax.jit(rms_norm)(a, b), x, scale)
    others = [
        keys_of(rms_norm, *shapes((9, 16), (16,))),
        keys_of(rms_norm, *shapes((8, 16), (16,), dtype=BF16)),
        keys_of(lambda x, s: rms_norm(x, s) * 2, x, scale),
        keys_of(lambda x, s: rms_norm(x, s) * 3, x, scale),
        keys_of(lambda x, s: rms_norm(x, jax.lax.stop_gradient(s)), x, scale),
        keys_of(
            lambda x, s: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * s, x, scale
        ),
    ]
    for of_all in zip(keys, *others, strict=True):
        assert len(set(of_all)) == len(of_all)


def program_of(region):
    from jax_fastops.autofuse._rule import _trace

    def program(rewrite):
        types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in rewrite.reads]
        with _implementation.use_chosen(Chosen("cpu", True, True)):
            return _trace(rewrite.call, tuple(types), False)

    return program


def test_both_forms_of_a_region_compute_the_same():
    regions_by_key = {r.key: r for r in found(model, *model_args(2))}
    rng = np.random.default_rng(0)
    for region in regions_by_key.values():
        inputs = _tune._inputs(region, "step", rng)
        plain, fused = (
            jax.jit(_tune._step(region, region.function(program), program is not None))(*inputs)
            for program in (None, program_of(region))
        )
        for a, b in zip(*map(jax.tree.leaves, (plain, fused)), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(a).max()))


def test_the_loop_of_a_call_with_products_stays_whole():
    """Two parts of it would exchange an array of the table's size for each chunk."""
    args = shapes((16384, 64), (64, 50257)) + shapes((16384,), dtype=I32)
    (region,) = found(lambda x, table, labels: cross_entropy(x @ table, labels), *args)
    step = _tune._step(region, region.function(program_of(region)), True)
    assert str(jax.make_jaxpr(step)(*_tune._types(region, "step"))).count("scan[") == 1


def test_a_gpu_repeats_small_regions(monkeypatch):
    """Its host takes longer to call a program than they run."""
    small, large = (found(rms_norm, *shapes(s, s[1:]))[0] for s in ((8, 16), (1 << 18, 1024)))
    assert _tune._counts(small, "step")[1] == 1
    monkeypatch.setattr(_tune, "lowering_platform", lambda: "cuda")
    assert _tune._counts(small, "step") == (8, 16)
    assert _tune._counts(large, "step") == (1, 1)

    run = _tune._chained(lambda x, key: [jnp.tanh(x), key])
    lists = [(x, jax.random.key(0)) for x in arrays((8, 16), (8, 16))]
    compiled = jax.jit(_tune._repeated(run, 3)).lower(lists).compile()
    for (x, _), (y, _) in zip(lists, compiled(lists), strict=True):
        np.testing.assert_allclose(y, jnp.tanh(x), rtol=1e-5)
    text = compiled.as_text()
    assert " while(" in text and "tanh" not in text[text.index("\nENTRY") :]


def test_channels_of_convolutions_are_last_in_memory(monkeypatch):
    """A kernel for channels before other dimensions is timed with the transpositions it takes."""
    layout = "NCHW", "OIHW", "NCHW"

    def f(x, w, scale, bias):
        scale, bias = scale[:, None, None], bias[:, None, None]
        for _ in range(2):
            x = jax.nn.relu(x * scale + bias)
            x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)
        return jax.nn.softmax(x, 1)

    args = shapes((2, 8, 6, 4), (8, 8, 3, 3), (8,), (8,))
    region = found(f, *args)[-1]
    plain, inputs = region.function(None), arrays(*(v.shape for v in region.inputs))
    want = plain(*inputs)
    monkeypatch.setattr(_tune, "lowering_platform", lambda: "cuda")
    types = [t.shape for t in _tune._types(region, "forward")]
    assert [v.shape for v in region.inputs] == [(2, 8, 6, 4)] and types == [(2, 6, 4, 8)]
    got = _tune._in_memory(region, plain)(inputs[0].transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(got[0], want[0])  # no convolution reads the result
    other = found(lambda x: jax.nn.softmax(x, 1), args[0])[0]
    assert other.key != region.key and other.structure == region.structure


# ---- the model -----------------------------------------------------------------------------------

ROWS, WIDTH = (8192, 1024), (1024,)
SQUARE = (1024, 1024)
IMAGES = (32, 56, 56, 64)
HEADS = (8, 512, 12, 64)

# What one H100 showed: a function, its operands, and whether a call of an op gains in a forward and
# in a step. ``None``: the table decides.
FACTS = {
    "conv, activation, batch norm": (  # 0.85 as fast
        lambda x, w, s, b: conv(batch_norm(jax.nn.silu(conv(x, w)), s, b), w),
        shapes(IMAGES, (3, 3, 64, 64), (64,), (64,)), False, False),
    "RMS norm, mean": (  # 0.89
        lambda x, w, s: rms_norm(x @ w, s).mean(0), shapes(ROWS, SQUARE, WIDTH), False, False),
    "RMS norm, sum of rows": (
        lambda x, w, s: rms_norm(x @ w, s).sum(-1), shapes(ROWS, SQUARE, WIDTH), False, False),
    "bias + relu without a gradient": (  # 0.94
        lambda x, w, b: jax.nn.relu(x @ w + b) @ w,
        shapes(ROWS, SQUARE, WIDTH, dtype=BF16), False, None),
    "layer norm, sum, cast": (  # 0.86
        lambda x, w, s, b: layer_norm(x @ w, s, b).sum(-1).astype(BF16),
        shapes(ROWS, SQUARE, WIDTH, WIDTH), False, None),
    "layer norm + x, cast": (
        lambda x, w, s, b: (layer_norm(x @ w, s, b) + x).astype(BF16),
        shapes(ROWS, SQUARE, WIDTH, WIDTH), False, None),
    "layer norm between products": (
        lambda x, w, s, b: layer_norm(x @ w, s, b) @ w,
        shapes(ROWS, SQUARE, WIDTH, WIDTH), True, True),
    "RMS norm between products, in float32": (
        lambda x, w, s: rms_norm((x @ w).astype(F32), s.astype(F32)).astype(BF16) @ w,
        shapes(ROWS, SQUARE, WIDTH, dtype=BF16), True, True),
    "bias + gelu between products": (
        lambda x, w, b: jax.nn.gelu(x @ w + b) @ w,
        shapes(ROWS, SQUARE, WIDTH, dtype=BF16), None, True),
    "bias + gelu of erf between products": (
        lambda x, w, b: jax.nn.gelu(x @ w + b, approximate=False) @ w,
        shapes(ROWS, SQUARE, WIDTH, dtype=BF16), None, True),
    "cross entropy": (
        cross_entropy, shapes((8192, 50257)) + shapes((8192,), dtype=I32), True, True),
    "attention": (attention, shapes(HEADS, HEADS, HEADS), True, True),
    "rows of words before a product": (  # one H200: 1.38
        lambda table, ids, w: table[ids] @ w,
        shapes((50257, 768), dtype=BF16) + shapes((16384,), dtype=I32)
        + shapes((768, 768), dtype=BF16), None, True),
    "sums of messages before a product": (  # one H200: 6.7
        lambda x, ids, w: jax.ops.segment_sum(x, ids, 100_000) @ w,
        shapes((2_000_000, 64), dtype=BF16) + shapes((2_000_000,), dtype=I32)
        + shapes((64, 64), dtype=BF16), True, True),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_the_model_gives_what_was_measured(name):
    f, args, forward, step = FACTS[name]
    (region,) = found(f, *args)
    for is_step, expected in ((False, forward), (True, step)):
        if expected is not None:
            assert (_cost.more_bytes(region, is_step) is None) is expected


def test_the_model_vetoes_what_the_table_takes(monkeypatch):
    """On a GPU, what the table takes and the model does not stays as the user wrote it."""
    f, args, *_ = FACTS["RMS norm, mean"]
    verdicts = verdicts_on_cuda(monkeypatch, f, *args)
    ((chosen, reason),) = verdicts.values()
    assert chosen == Chosen("cuda", False, False) and "MB by kernel" in reason
    f, args, *_ = FACTS["layer norm between products"]
    assert verdicts_on_cuda(monkeypatch, f, *args) == {}


def verdicts_on_cuda(monkeypatch, f, *args):
    monkeypatch.setattr(_decisions, "lowering_platform", lambda: "cuda")
    with fo.use_implementation("native"):
        program = jax.make_jaxpr(f)(*args)
        graph = Graph(program.jaxpr, program.consts)
        plan = Plan(graph, Settings())
    return _decisions.verdicts(graph, plan.rewrites, None, False)


# ---- decisions -----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of a process with one device."""
    monkeypatch.setenv("JAX_FASTOPS_CACHE", str(tmp_path))
    monkeypatch.setattr(_tune, "why_not", lambda: "")
    _decisions.clear()
    with fo.use_implementation("auto"):
        yield tmp_path
    _decisions.clear()


@pytest.fixture
def times(monkeypatch):
    """Times in place of measured ones, by phase, and the regions that were timed."""
    given = {phase: Times(1.0, 0.5) for phase in _tune.PHASES}
    timed: list[str] = []

    def measure(regions, program):
        timed.extend(map(str, regions))
        return [{phase: given[phase] for phase in _tune.PHASES} for _ in regions]

    monkeypatch.setattr(_tune, "measure", measure)
    given["timed"] = timed
    return given


def block(x, w, scale, bias):
    return layer_norm(x @ w, scale, bias) @ w


BLOCK = arrays((8, 16, 32), (32, 32), (32,), (32,))


def loss_of(f):
    return lambda *args: jnp.sum(jnp.sin(f(*args)))


def calls(f, *args):
    """The kernels of a program, before it is compiled."""
    return jax.jit(f).lower(*args).as_text().count("custom_call @jax_fastops")


def test_a_folder_that_cannot_be_read(cache, monkeypatch):
    monkeypatch.setenv("JAX_FASTOPS_CACHE", "/" + "a" * 5000)
    assert calls(fo.autofuse(jax.nn.softmax), jnp.ones((64, 128))) >= 0


def test_a_folder_that_appears_changes_nothing(cache, times, monkeypatch):
    monkeypatch.setenv("JAX_FASTOPS_CACHE", str(cache / "new"))
    times["forward"] = Times(1.0, 2.0)
    for _ in range(2):
        assert calls(fo.autofuse(block), *BLOCK) == 1
        assert calls(fo.autofuse(block, tune=True), *BLOCK) == 0
    assert (cache / "new").is_dir() and times["timed"] == ["layer_norm"]


@pytest.mark.parametrize("plain", [1.0, 1e-5])
def test_equal_times_decide_nothing(cache, times, plain):
    by_table = calls(fo.autofuse(block), *BLOCK), calls(fo.autofuse(loss_of(block)), *BLOCK)
    times["forward"] = times["step"] = Times(plain, 1.01 if plain == 1 else plain + 9e-7)
    tuned = fo.autofuse(block, tune=True), fo.autofuse(loss_of(block), tune=True)
    assert tuple(calls(f, *BLOCK) for f in tuned) == by_table


def test_a_call_with_products_that_loses_in_a_step_stays_in_the_forward(cache, times):
    def loss(x, table, labels):
        log_p = jax.nn.log_softmax((x @ table).astype(jnp.float32))
        return -jnp.take_along_axis(log_p, labels[:, None], -1).mean()

    args = (*arrays((64, 16), (16, 128)), jnp.arange(64))
    times["forward"], times["step"] = Times(1.0, 0.5), Times(1.0, 1.5)
    tuned = fo.autofuse(loss, tune=True)
    assert str(jax.make_jaxpr(tuned)(*args)) == str(jax.make_jaxpr(loss)(*args))
    assert times["timed"] == ["linear_cross_entropy"]
    _decisions.clear()
    times["step"] = Times(1.0, 0.5)
    (cache / next(iter(os.listdir(cache)))).unlink()
    assert calls(fo.autofuse(loss, tune=True), *args) == 1


GB = 10**9


@pytest.mark.parametrize(
    "kernel, plain_bytes, kernel_bytes, taken",
    [
        (1.09, 4 * GB, GB, True),
        (1.09, 4 * GB, 2 * GB, True),
        (1.09, 4 * GB, 2.1 * GB, False),  # more than half is left
        (1.09, 0.26 * GB, 0, True),
        (1.09, 0.24 * GB, 0, False),  # less than 250 MB
        (1.11, 4 * GB, 0, False),  # more than 10% slower
        (1.01, 4 * GB, GB, True),  # times that decide nothing
        (0.95, 0, 4 * GB, True),  # only the memory that the kernel saves counts
    ],
)
def test_memory_is_worth_some_time(cache, times, kernel, plain_bytes, kernel_bytes, taken):
    times["forward"] = Times(1.0, kernel, plain_bytes, kernel_bytes)
    assert calls(fo.autofuse(block, tune=True), *BLOCK) == taken
    _decisions.clear()
    for tune in (True, False):  # likewise from the cache
        assert calls(fo.autofuse(block, tune=tune), *BLOCK) == taken
    assert times["timed"] == ["layer_norm"]


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("step", [True, False])
def test_a_region_is_decided_for_each_phase(cache, times, forward, step):
    for phase, taken in (("forward", forward), ("step", step)):
        times[phase] = Times(1.0, 0.97 if taken else 1.03)
    tuned = fo.autofuse(block, tune=True)
    assert calls(tuned, *BLOCK) == forward
    gradient = jax.grad(loss_of(tuned), (0, 1, 2, 3))
    assert calls(gradient, *BLOCK) == 2 * step
    if not (forward or step):
        assert str(jax.make_jaxpr(tuned)(*BLOCK)) == str(jax.make_jaxpr(block)(*BLOCK))
    assert times["timed"] == ["layer_norm"]
    report = fo.autofuse.report(tuned)(*BLOCK)
    text = [r.why for r in report.replaced] or [m.reason for m in report.missed]
    assert "region layer_norm, measured: forward" in text[0]
    assert "s (0 B) by kernel, 1e+03 ms (0 B) plain" in text[0]
    want = jax.grad(loss_of(block), (0, 1, 2, 3))(*BLOCK)
    for f in (gradient, jax.jit(gradient), jax.grad(jax.checkpoint(loss_of(tuned)), (0, 1, 2, 3))):
        for a, b in zip(f(*BLOCK), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=3e-5 * max(1, np.abs(b).max()))
    tangents = [jax.jvp(f, BLOCK, BLOCK)[1] for f in (tuned, block)]
    np.testing.assert_allclose(*tangents, rtol=0, atol=1e-4)


def test_a_choice_does_not_hold_for_mapped_calls_or_other_platforms(cache, times):
    times["forward"] = Times(1.0, 2.0)
    with _implementation.use_chosen(Chosen("cuda", False, False)):
        assert calls(lambda x: fo.layer_norm(x, None, None), BLOCK[0]) == 1  # by the table
    with _implementation.use_chosen(Chosen("cpu", False, True)):
        f = functools.partial(fo.layer_norm, scale=None, bias=None)
        assert calls(lambda x: f(x), BLOCK[0]) == 0
        assert calls(jax.vmap(f), BLOCK[0]) == 1


def test_export(cache, times):
    """A region with a symbolic size is not timed. A program for another platform is."""

    def exported(x, *platforms):
        tuned = jax.jit(fo.autofuse(block, tune=True))
        export = jax.export.export(tuned, platforms=platforms, disabled_checks=fo.export_checks())
        return export(x, *BLOCK[1:])

    (size,) = jax.export.symbolic_shape("n")
    programs = [exported(jax.ShapeDtypeStruct((size, 16, 32), F32), "cpu")]
    assert not times["timed"]
    programs += exported(BLOCK[0], "cpu", "cuda"), exported(BLOCK[0], "cpu")
    assert times["timed"] == ["layer_norm"]
    for program in programs:
        np.testing.assert_allclose(program.call(*BLOCK), block(*BLOCK), rtol=0, atol=1e-4)


def test_regions_of_bodies_are_decided(cache, times):
    def f(x, w, scale, bias):
        def body(x, _):
            return jax.checkpoint(block)(x, w, scale, bias), None

        return jax.lax.scan(body, x, length=3)[0]

    times["forward"] = Times(1.0, 2.0)
    tuned = fo.autofuse(f, tune=True)
    assert calls(tuned, *BLOCK) == 0
    assert calls(jax.grad(loss_of(tuned)), *BLOCK) > 0
    assert times["timed"] == ["layer_norm"]


def test_equal_regions_are_timed_once(cache, times):
    args = model_args(3, make=arrays)
    jax.make_jaxpr(fo.autofuse(model, tune=True))(*args)
    names = ["add + layer_norm", "bias + gelu", "layer_norm", "linear_cross_entropy"]
    assert sorted(times["timed"]) == names and len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("processes, devices", [(2, 1), (1, 2)])
def test_nothing_is_tuned_where_programs_must_be_equal(
    tmp_path, monkeypatch, times, processes, devices
):
    """Also the cache is not read: processes may have other ones."""
    monkeypatch.setenv("JAX_FASTOPS_CACHE", str(tmp_path))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "local_device_count", lambda: devices)
    monkeypatch.setattr(_decisions, "_read", lambda key: pytest.fail("the cache is read"))
    with fo.use_implementation("auto"):
        tuned = fo.autofuse(block, tune=True)
        assert calls(tuned, *BLOCK) == 1
        assert "not measured: " in fo.autofuse.report(tuned)(*BLOCK).replaced[0].why
    assert not times["timed"]


def test_shards_are_timed(tmp_path, monkeypatch, times):
    """Inside of ``shard_map`` the program has the shapes of one device."""
    if jax.local_device_count() < 2:
        pytest.skip("needs 2 devices")
    monkeypatch.setenv("JAX_FASTOPS_CACHE", str(tmp_path))
    _decisions.clear()
    times["forward"] = Times(1.0, 2.0)
    mesh = make_mesh({"data": 2}, AxisType.Auto)
    spec = P("data"), P(), P(), P()
    for f, inside in ((block, True), (lambda *args: 2 * block(*args), False)):
        mapped = jax.shard_map(
            fo.autofuse(f, tune=True) if inside else f,
            mesh=mesh, in_specs=spec, out_specs=P("data"),
        )  # fmt: skip
        mapped = mapped if inside else fo.autofuse(mapped, tune=True)
        with fo.use_implementation("auto"), jax.set_mesh(mesh):
            assert calls(mapped, *BLOCK) == 0
            gradients = jax.jit(jax.grad(loss_of(mapped)))(*BLOCK)
        want = jax.grad(loss_of(f))(*BLOCK)
        np.testing.assert_allclose(gradients, want, rtol=0, atol=1e-3)
    assert times["timed"] == ["layer_norm"]  # both have the same region
    _decisions.clear()


def test_implementations_are_stronger_than_regions(cache, times):
    times["forward"] = times["step"] = Times(1.0, 2.0)
    tuned = fo.autofuse(block, tune=True)
    with fo.use_implementation("native"):
        assert calls(tuned, *BLOCK) == 1
    with fo.use_implementation("xla"):
        assert calls(tuned, *BLOCK) == 0
    assert not times["timed"]


# ---- the cache -----------------------------------------------------------------------------------


def test_a_process_reads_what_another_one_measured(cache, times, monkeypatch):
    times["forward"] = Times(1.0, 2.0)
    assert calls(fo.autofuse(block, tune=True), *BLOCK) == 0
    _decisions.clear()
    monkeypatch.setattr(_tune, "measure", lambda *_: pytest.fail("it is in the cache"))
    for tune in (True, False):  # also without ``tune``
        f = fo.autofuse(block, tune=tune)
        assert calls(f, *BLOCK) == 0
        assert "cached: forward 2e+03 ms (0 B) by" in fo.autofuse.report(f)(*BLOCK).replaced[0].why


def test_a_process_keeps_its_decisions(cache, times):
    """A file that appears changes no program of the process."""
    assert calls(fo.autofuse(block), *BLOCK) == 1
    times["forward"] = Times(1.0, 2.0)
    assert calls(fo.autofuse(block, tune=True), *BLOCK) == 0
    assert calls(fo.autofuse(block), *BLOCK) == 1
    for file in cache.iterdir():
        file.unlink()
    assert calls(fo.autofuse(block, tune=True), *BLOCK) == 0


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"forward": 1}', '{"forward": [1, -1]}', '{"forward": [1, "x"]}',
     '{"forward": [NaN, 1]}', '{"forward": [1, 1, Infinity, 0]}', '{"step": [1]}', "\udcff"],
)  # fmt: skip
def test_a_file_that_is_no_decision_is_ignored(cache, times, text):
    calls(fo.autofuse(block, tune=True), *BLOCK)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(text.encode(errors="surrogateescape"))
    _decisions.clear()
    calls(fo.autofuse(block, tune=True), *BLOCK)
    assert times["timed"] == ["layer_norm"] * 2 and file.read_bytes() == whole


@pytest.mark.parametrize("where", ["file/folder", "file"])
def test_a_folder_that_cannot_be_written_is_no_error(cache, times, monkeypatch, where):
    (cache / "file").write_text("")
    monkeypatch.setenv("JAX_FASTOPS_CACHE", str(cache / where))
    for _ in range(2):
        assert calls(fo.autofuse(block, tune=True), *BLOCK) == 1
    assert times["timed"] == ["layer_norm"]


def test_the_folder_of_the_cache(monkeypatch):
    monkeypatch.delenv("JAX_FASTOPS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert _decisions.directory() == Path("/x/jax_fastops")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _decisions.directory() == Path("~/.cache/jax_fastops").expanduser()
    monkeypatch.setenv("JAX_FASTOPS_CACHE", "/y")
    assert _decisions.directory() == Path("/y")


# ---- timing --------------------------------------------------------------------------------------


def test_timing_runs_wherever_a_program_is_traced(cache):
    """The process has other threads, and the caller is inside of a transformation."""
    x, *rest = BLOCK
    sizes = iter(range(1, 9))

    def mapped(tuned):
        return jax.vmap(tuned, (0, None, None, None))(x, *rest)

    def scanned(tuned):
        return jax.lax.scan(lambda c, _: (tuned(c, *rest), None), x, length=2)[0]

    ways = {
        "eager": lambda tuned: tuned(x, *rest),
        "jit": lambda tuned: jax.jit(tuned)(x, *rest),
        "grad": lambda tuned: jax.jit(jax.grad(loss_of(tuned)))(x, *rest),
        "vmap": mapped,
        "scan": lambda tuned: jax.jit(lambda: scanned(tuned))(),
        "remat": lambda tuned: jax.grad(jax.checkpoint(loss_of(tuned)))(x, *rest),
    }
    for name, way in ways.items():
        factor = 1.0 + next(sizes)  # another region each time

        def scaled(x, w, scale, bias, factor=factor):
            return layer_norm(x @ w, scale, bias) * factor

        count = len(list(cache.iterdir()))
        np.testing.assert_allclose(
            way(fo.autofuse(scaled, tune=True)), way(scaled), rtol=0, atol=2e-3, err_msg=name
        )
        new = len(list(cache.iterdir())) - count
        assert new == 1, f"{name}: {new} regions were timed"
    data = [json.loads(file.read_text()) for file in cache.iterdir()]
    assert all(set(one) == {"region", "forward", "step"} for one in data)


def test_all_regions_of_a_model_run(cache):
    args = model_args(1, make=arrays)
    tuned = fo.autofuse(model, tune=True)
    np.testing.assert_allclose(tuned(*args), model(*args), rtol=1e-4)
    data = [json.loads(file.read_text()) for file in cache.iterdir()]
    assert len(data) == 4 and all({"forward", "step"} <= set(one) for one in data)
    assert any(Times(*one["step"]).plain_bytes > 0 for one in data)


def test_inputs_are_what_programs_have():
    rng = np.random.default_rng(0)
    labels = _tune._random((4, 8), np.dtype(np.int32), (4, 8, 100), rng)
    assert labels.min() >= 50 and labels.max() < 100
    mask = np.asarray(_tune._random((2, 8), np.dtype(bool), (), rng))
    assert mask.tolist() == [[True] * 6 + [False] * 2] * 2
    key = _tune._random((3,), jax.random.key(0).dtype, (), rng)
    assert key.dtype == jax.random.key(0).dtype and key.shape == (3,)
    x = _tune._random((1000, 200), np.dtype(BF16), (), rng)
    assert x.dtype == BF16 and 0.9 < x.astype(F32).std() < 1.1


def test_two_processes_share_the_cache(cache):
    first = child()
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    command = [sys.executable, __file__]
    process = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    second = json.loads(process.stdout.splitlines()[-1])
    assert "measured" in first["why"] and first["timed"] == 1
    assert second == {"timed": 0, "why": first["why"].replace("measured", "cached")}


def child() -> dict:
    """What a process measures and decides."""
    measure, timed = _tune.measure, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tune, "measure", lambda *args: timed.extend(args[0]) or measure(*args))
        report = fo.autofuse.report(fo.autofuse(block, tune=True))(*BLOCK)
    why = [r.why for r in report.replaced] or [m.reason for m in report.missed]
    return {"timed": len(timed), "why": why[0]}


if __name__ == "__main__":
    print(json.dumps(child()))
