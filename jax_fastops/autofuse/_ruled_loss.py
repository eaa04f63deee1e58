"""Losses by one-hot arrays in a ``custom_vjp``, whose own rule runs in a gradient.

Libraries write such a function of logits, targets and the factor of a z-loss, because its rule
keeps less than JAX would. The op may replace it only if the gradient is that of the rule. So this
module compares the results of the function, and the results and the gradient of its rule, with
formulas, for any targets and any factor. Where the targets add up to 1, the rule is the gradient of
``cross_entropy``, with two exceptions: it ignores the cotangent of the z-loss, and it adds up the
targets to 1 where a label is no class. The call that replaces the function does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fastops import _compat, _patched
from jax_fastops.autofuse._graph import Graph, opened
from jax_fastops.autofuse._losses import padding, wide
from jax_fastops.autofuse._match import Matcher, State
from jax_fastops.autofuse._one_hot import NAME, OneHot
from jax_fastops.autofuse._pattern import MAX_RANK, Pattern, formulas
from jax_fastops.autofuse._rule import Rewrite, Rule, read_of
from jax_fastops.autofuse._value import Node, Value, View
from jax_fastops.cross_entropy import cross_entropy, cross_entropy_of_one_hot

# ---- what the function and its rule compute ------------------------------------------------------

# Any factor of the z-loss: the function has it as an argument, of which it computes only products.
_Z = 0.375


def _shifted(x):
    top = jnp.max(x, -1, keepdims=True)
    e = jnp.exp(x - top)
    total = jnp.sum(e, -1, keepdims=True)
    return e / total, jnp.log(total) + top


def _by_logsumexp(x):
    return jax.nn.softmax(x), jax.nn.logsumexp(x, -1, keepdims=True)


def _loss(statistics: Callable, x, up, axis):
    _, log_sum = statistics(x)
    return _Z * log_sum[..., 0] ** 2 - jnp.sum(up * (x - log_sum), -1)


def _z_loss(statistics: Callable, x, up, axis):
    return _Z * statistics(x)[1][..., 0] ** 2


def _gradient(out: bool, x, up, tokens, axis):
    softmax, log_sum = _shifted(x)
    if out:  # multiplied out
        return tokens[..., None] * (softmax + 2 * _Z * log_sum * softmax - up)
    return tokens[..., None] * ((1 + 2 * _Z * log_sum) * softmax - up)


def _patterns(function: Callable, variants: Sequence[Any], leaves: str) -> list[Pattern]:
    names = tuple(leaves.split())
    return [Pattern("", functools.partial(function, v), names, cross_entropy) for v in variants]


_STATISTICS = _by_logsumexp, _shifted
_RESULTS = [_patterns(f, _STATISTICS, "x up") for f in (_loss, _z_loss)]
_GRADIENTS = _patterns(_gradient, (False, True), "x up tokens")


def _is_known(node: Node) -> bool:
    """Whether a function and its rule compute a loss, for any targets and factor of a z-loss."""
    primitive, params = node.equation.primitive, node.params

    def plain(*args):
        body, constants = opened(params["call_jaxpr"])
        return jax.core.eval_jaxpr(body, constants, *args)

    def by_rule(*args):
        bound = primitive.get_bind_params(params)
        functions, rest = bound if isinstance(bound, tuple) else ((), bound)
        return tuple(primitive.bind(*functions, *args, **rest))

    def differentiated(args, cotangents):
        results, pull = jax.vjp(by_rule, *args)
        return *results, pull(cotangents)[0]

    operands = [_compat.struct_of(v.aval) for v in node.inputs]
    cotangents = tuple(_compat.struct_of(v.aval) for v in node.outputs)
    try:
        with _patched.off():
            traced = jax.make_jaxpr(plain)(*operands)
            rule = jax.make_jaxpr(differentiated)(tuple(operands), cotangents)
            factors = [Graph(t.jaxpr, t.consts).operands[2] for t in (traced, rule)]
            graphs = [_with_factor(t) for t in (traced, rule)]
    except Exception:  # whatever the rule raises, it is not this one
        return False
    if not all(map(_is_factor, factors)):
        return False
    count = len(node.outputs)
    return _computes(graphs[0], _RESULTS[:count]) and _computes(
        graphs[1], [*_RESULTS[:count], _GRADIENTS]
    )


def _is_factor(z: Value) -> bool:
    """Whether all that is computed from a number, up to the first array, are products with it."""
    left = [z]
    while left:
        value = left.pop()
        if value.is_result:
            return False
        for node in value.users:
            if node.name in ("convert_element_type", "broadcast_in_dim", "reshape", "copy"):
                left += node.outputs
            elif node.name != "mul":
                return False
            elif any(v.number is not None for v in node.inputs):
                left += node.outputs
    return True


def _with_factor(traced: Any) -> Graph:
    """The graph of a traced function of which the third operand is ``_Z``."""
    x, y, z, *rest = (_compat.struct_of(v.aval) for v in traced.jaxpr.invars)

    def with_number(x, y, *rest):
        number = np.asarray(_Z, z.dtype)
        return jax.core.eval_jaxpr(traced.jaxpr, traced.consts, x, y, number, *rest)

    numbered = jax.make_jaxpr(with_number)(x, y, *rest)
    return Graph(numbered.jaxpr, numbered.consts)


def _computes(graph: Graph, expected: Sequence[Sequence[Pattern]]) -> bool:
    """Whether each result is that of one of its patterns."""
    leaves = {i: v.seen for i, v in enumerate(graph.operands[:3])}
    x = graph.operands[0]
    rank = len(x.long)

    def is_one_of(patterns, value):
        for pattern in patterns:
            (formula,) = formulas(pattern, x.dtype, rank, rank - 1)
            if Matcher()(formula, value, State(leaves, {}, ())) is not None:
                return True
        return False

    return all(map(is_one_of, expected, graph.results))


class RuledLossRule(Rule):
    """``cross_entropy``, of losses by a one-hot array in a function with such a rule."""

    def match(self, value: Value) -> Rewrite | None:
        node = value.node
        counts = len(node.inputs) == 3 and len(node.outputs) in (1, 2)
        if node.name != "custom_vjp_call" or not counts:
            return None
        x, y, z = node.inputs
        shapes = {v.shape for v in node.outputs}
        usual = x.is_plain and x.shape == y.shape and shapes == {x.shape[:-1]}
        dtypes = {v.dtype for v in (x, y, *node.outputs)}
        if not usual or len(dtypes) > 1 or not x.is_floating or 0 in x.shape or x.shape[-1] == 1:
            return None
        if (
            node.params.get("symbolic_zeros")
            or z.shape
            or len(x.long) > MAX_RANK
            or not _is_known(node)
        ):
            return None
        one_hot = OneHot([y.seen], y.sizes)
        two, labels = one_hot.two(y.seen), one_hot.labels
        if labels is None or two is None or labels.axis != len(y.sizes) - 1:
            return self.miss(NAME, value, "the targets are no one_hot of integer labels")
        if z.number is None:
            return self.miss(NAME, value, "the factor of the z-loss is not known")
        elsewhere, at_label = map(float, two)
        if abs(at_label + (x.shape[-1] - 1) * elsewhere - 1) > 1e-5:
            return self.miss(NAME, value, "the targets of a token do not add up to 1")
        source = x.source()
        reads = {
            "x": read_of(source),
            "labels": read_of(View(labels.view.value, labels.view.map[:-1])),
        }
        options = {
            "smooth": elsewhere * x.shape[-1],
            "z": float(z.number),
            "count": len(node.outputs),
        }
        return self.rewrite(NAME, ruled_losses, node.outputs, reads, **options)


# ---- the call ------------------------------------------------------------------------------------


def ruled_losses(x, labels, *, smooth: float, z: float, count: int):
    """The losses, and with ``count=2`` the z-losses."""
    classes = x.shape[-1]
    labels = padding(wide(jnp.broadcast_to(labels, x.shape[:-1])), classes)
    labels = jnp.where(labels < 0, classes, labels)
    results: Any = _ruled(x, labels, smooth, z)
    return results[:count]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _ruled(x, labels, smooth: float, z: float) -> Any:
    return _forward(x, labels, smooth, z)[0]


def _forward(x, labels, smooth: float, z: float):
    options: dict[str, Any] = dict(label_smoothing=smooth, z_loss=z)
    # The gradient of the rule has no logit at a label that is no class, as this one.
    losses, pullback = jax.vjp(lambda x: cross_entropy(x, labels, **options), x)
    losses = lax.cond(
        jnp.all(labels < x.shape[-1]),
        lambda x, labels, losses: losses,
        lambda x, labels, losses: cross_entropy_of_one_hot(x, labels, **options),
        *(x, labels, losses),
    )
    if not smooth:  # a row with +inf gives NaN, as with label smoothing
        at_label = jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
        is_right = jnp.isfinite(losses) | (at_label == -jnp.inf)
        losses = jnp.where(is_right, losses, jnp.nan)
    return (losses, z * jax.nn.logsumexp(x.astype(losses.dtype), -1) ** 2), pullback


def _backward(smooth: float, z: float, pullback, cotangents):
    return *pullback(cotangents[0]), None


_ruled.defvjp(_forward, _backward)
