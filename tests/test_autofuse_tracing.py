"""`autofuse`: what patterns declare so that few are traced, derivatives and refused calls that are
traced once, norms that are nearly ours or of a sum that nothing else needs, and the steps of long
programs."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fastops as fo
from jax_fastops import _compat
from jax_fastops.autofuse import PATTERNS, _evaluate, _pattern, _rule
from jax_fastops.autofuse._meaning import REDUCTIONS


@pytest.mark.parametrize("rank", [2, 4])
def test_patterns_have_what_they_say_that_they_need(rank):
    for pattern in PATTERNS:
        for axis in range(rank) if pattern.axes == "each" else [rank - 1]:
            (formula,) = _pattern.compiled(pattern, rank, axis)
            assert pattern.needs <= formula.needs
            assert pattern.needs & REDUCTIONS == formula.needs & REDUCTIONS
            traced = _pattern._traced(
                pattern.function, pattern.leaves, rank, axis, jnp.float32, False
            )
            found = {
                (n.name, n.meaning)
                for n in traced.nodes
                if n.name in REDUCTIONS and n.outputs[0].users
            }
            assert found >= pattern.reductions(rank, axis)
            if not pattern.fixed:
                assert found == pattern.reductions(rank, axis)


def steps(f, *args):
    """The Python functions that a report calls, and a trace of the program."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and "autofuse" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        fo.autofuse.report(f)(*args)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "step",
    [
        lambda x, i: x * (1.5 + i),
        lambda x, i: (x / (1.5 + i)).astype(jnp.bfloat16).astype(jnp.float32),
    ],
)
def test_steps_grow_with_the_length_of_a_program(step):
    def chain(count):
        def f(x):
            for i in range(count):
                x = step(x, i)
            return x

        return f

    x = jnp.ones((4, 8))
    steps(chain(10), x)  # patterns are traced once
    assert steps(chain(160), x) < 2.6 * steps(chain(80), x)


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)


def test_the_sum_before_a_norm_is_a_result_only_if_it_is_needed():
    x = jnp.ones((4, 64))
    with fo.use_implementation("native"):
        for f, count in (
            (lambda a, b: layer_norm(a + b), 1),
            (lambda a, b: (layer_norm(a + b), a + b), 1),  # another sum
            (lambda a, b: (lambda total: (layer_norm(total), total))(a + b), 2),
        ):
            program = jax.make_jaxpr(fo.autofuse(f))(x, x)
            (call,) = (e for e in program.eqns if e.primitive.name.startswith("fastops"))
            assert call.primitive.name == "fastops_residual_layer_norm"
            assert len(call.outvars) == count


def counted(monkeypatch, owner, name):
    """A list that grows with each call of a function."""
    calls, call = [], getattr(owner, name)

    def count(*args, **kwargs):
        calls.append(args)
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, count)
    return calls


def test_a_refused_call_is_traced_once(monkeypatch):
    calls, x = counted(monkeypatch, _rule.Call, "__call__"), jnp.ones((3, 77))
    counts = []
    for implementation in ("xla", "xla", "native"):
        with fo.use_implementation(implementation):
            report = fo.autofuse.report(jax.nn.softmax)(x)
        counts.append(len(calls))
        if implementation == "xla":
            assert [m.reason for m in report.missed] == ["the implementation is 'xla'"]
    assert 0 < counts[0] == counts[1] < counts[2] and len(report.replaced) == 1


def test_functions_without_work_are_not_searched(monkeypatch):
    graphs = counted(monkeypatch, _evaluate, "Graph")
    twice = jax.custom_jvp(jax.jit(lambda x: x * 2))
    twice.defjvp(lambda x, t: (2 * x[0], 2 * t[0]))
    counts = []
    for f in (jax.nn.relu, twice):
        jax.make_jaxpr(fo.autofuse(f))(jnp.ones((3, 77)))
        counts.append(len(graphs))
    assert counts == [1, 3]


def primitives(f, *args):
    return [equation.primitive.name for equation in jax.make_jaxpr(fo.autofuse(f))(*args).eqns]


def test_an_equal_program_is_searched_once(monkeypatch):
    finds, x = counted(monkeypatch, _rule.Search, "find"), jnp.ones((3, 79))

    def program(eps):
        return lambda x: (
            jnp.tanh(x) * jax.lax.rsqrt(jnp.mean(jnp.tanh(x) ** 2, -1, keepdims=True) + eps)
        )

    counts, found = [], []
    for implementation, eps in (
        ("native", 1e-6),
        ("native", 1e-6),
        ("native", 1e-5),
        ("xla", 1e-6),
    ):
        with fo.use_implementation(implementation):
            found.append(primitives(program(eps), x))
        counts.append(len(finds))
    assert 0 < counts[0] == counts[1] < counts[2] < counts[3]
    assert found[0] == found[1] == found[2] == ["tanh", "fastops_rms_norm"] != found[3]
    with fo.use_implementation("native"):  # under a derivative, of a batch, and in a loop
        f, g = program(1e-6), fo.autofuse(program(1e-6))
        for change in (
            lambda h: jax.grad(lambda x: jnp.sin(h(x)).sum())(x),
            lambda h: jax.vmap(h)(jnp.stack([x, 2 * x])),
            lambda h: jax.lax.scan(lambda c, _: (c + h(c) * h(x), h(x)), x, None, length=2),
        ):
            want, have = (jax.jit(change, static_argnums=0)(h) for h in (f, g))
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), want, have
            )


def test_a_mask_that_is_known_is_read_in_each_trace():
    x, whole = jnp.arange(16.0).reshape(4, 4), np.tril(np.ones((4, 4), bool))
    with fo.use_implementation("native"):
        for mask in (whole, whole & (np.arange(4) > 0)):  # the second one has an empty row
            f = functools.partial(lambda mask, x: jax.nn.softmax(jnp.where(mask, x, -1e9)), mask)
            for _ in range(2):
                np.testing.assert_allclose(jax.jit(fo.autofuse(f))(x), f(x), rtol=1e-6)


def test_equations_keep_scopes_and_lines():
    def f(x):
        with jax.named_scope("one"):
            y = jnp.sin(x)
        with jax.named_scope("two"):
            return jax.nn.softmax(y)

    def in_all(x):
        with jax.named_scope("all"):
            return fo.autofuse(f)(x)

    with fo.use_implementation("native"):
        sin, op = jax.make_jaxpr(in_all)(jnp.ones((3, 80))).eqns
    for equation, scope in ((sin, "all/one"), (op, "all/two")):
        assert str(equation.source_info.name_stack).startswith(scope)
        assert "test_autofuse_tracing.py" in _compat.source_line(equation)


def l2(x):
    return (x * x).sum(-1, keepdims=True)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * jax.lax.rsqrt(l2(x)),
        lambda x: x * jax.lax.rsqrt(l2(x) + 1e-6),
        lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
        lambda x: x / jnp.maximum(jnp.sqrt(l2(x)), 1e-6),
    ],
)
def test_an_l2_norm_is_not_nearly_an_rms_norm(f):
    with fo.use_implementation("native"):
        report = fo.autofuse.report(f)(jnp.ones((4, 64)))
        assert not report.replaced and not report.missed
        nearly = fo.autofuse.report(lambda x: x * jax.lax.rsqrt(l2(x) / 63))(jnp.ones((4, 64)))
    assert [m.pattern for m in nearly.missed] == ["rms_norm"]
