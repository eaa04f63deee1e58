"""Slots with `~...`: batch dimensions of an operand that may be broadcast."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compat
from harness.sharding import device_count
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fastops._kernel import (
    fold,
    infer_avals,
    lowering_for,
    partitions,
    shape_of_copies,
    sharding_rule,
    with_copies,
)
from jax_fastops._op import Op
from jax_fastops._signature import Signature

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("native_in_float64")]

F32, BOOL = jnp.dtype("float32"), jnp.dtype("bool")
MASKED = "... n, ~... m -> ... n"
INNER = "... n *i, ~... m *i -> ... n *i"


def infer(text, *shapes):
    return Signature.parse(text).infer(shapes, [F32, BOOL, F32][: len(shapes)])


# The grammar --------------------------------------------------------------------------------------


def test_it_is_read_and_written():
    signature = Signature.parse(MASKED)
    x, mask = signature.operands
    assert mask.broadcast and mask.batched and not x.broadcast and x.batched
    assert [d.name for d in mask.dims] == ["m"]
    assert not signature.results[0].broadcast
    for text in (MASKED, INNER, "... n, ~... ceil(n/8) :uint8 -> ... n"):
        parsed = Signature.parse(text)
        assert str(parsed) == text
        assert Signature.parse(str(parsed)) == parsed
    assert Signature.parse(MASKED) != Signature.parse(MASKED.replace("~", ""))


@pytest.mark.parametrize("text", ["... n -> ~... n", "... n, ~... m -> ... n, ~... m"])
def test_a_result_has_no_sizes_of_its_own(text):
    with pytest.raises(ValueError, match=r"a result of .* has '~\.\.\.'"):
        Signature.parse(text)


def test_it_has_the_names_with_a_star_of_the_others():
    with pytest.raises(ValueError, match="different names with a star"):
        Signature.parse("... n *i, ~... m -> ... n *i")
    with pytest.raises(ValueError, match="different names with a star"):
        Signature.parse("... n, ~... m *i -> ... n")


@pytest.mark.parametrize(
    "mask", [(2, 3, 5), (1, 3, 5), (2, 1, 5), (1, 1, 5), (2, 3, 1), (1, 1, 1)], ids=str
)
def test_its_sizes_do_not_matter_for_the_results(mask):
    assert infer(MASKED, (2, 3, 5), mask) == [((2, 3, 5), F32)]


@pytest.mark.parametrize("mask", [(2, 5, 4), (1, 1, 4), (2, 5, 1), (2, 1, 1)], ids=str)
def test_dimensions_with_a_star_may_differ(mask):
    assert infer(INNER, (2, 5, 4), mask) == [((2, 5, 4), F32)]


def test_it_may_come_first():
    """The other operands determine the batch shape."""
    assert infer("~... m, ... n -> ... n", (1, 1, 5), (2, 3, 7)) == [((2, 3, 7), F32)]
    bound = Signature.parse("~... m, ... n -> ... n").bind([(1, 1, 5), (2, 3, 7)])
    assert bound.batch == (2, 3) and bound.sizes == {"m": 5, "n": 7}


@pytest.mark.parametrize(
    "text, shapes, message",
    [
        (MASKED, [(2, 3, 5), (3, 5)], r"shape \(3, 5\) does not have the rank of '\.\.\.'"),
        (MASKED, [(2, 3, 5), (1, 2, 3, 5)], "does not have the rank of"),
        (MASKED, [(2, 3, 5), ()], r"shape \(\) does not fit '~\.\.\. m'"),
        ("... n, ~... n -> ... n", [(2, 5), (1, 4)], "dimension 'n' .* is both 5 and 4"),
        ("... n, ~... ceil(n/8) -> ... n", [(2, 9), (1, 3)], "cannot be 3"),
        ("... n, ~... 4 -> ... n", [(2, 9), (1, 3)], "cannot be 3"),
        ("... n, ~... m, ... n -> ... n", [(2, 5), (1, 5), (3, 5)], "leading dimensions"),
        ("... n, ~... m -> ... n", [(2, 5)], "takes 2 operands, got 1"),
    ],
)
def test_what_does_not_fit_is_said(text, shapes, message):
    with pytest.raises(ValueError, match=message):
        Signature.parse(text).infer(shapes, [F32] * len(shapes))


@pytest.mark.parametrize(
    "text, mapped, folds",
    [
        (MASKED, [True, False], True),
        (MASKED, [False, True], True),
        (MASKED, [True, True], True),
        (INNER, [True, False], True),
        ("... n, ~... m, n -> ... n", [True, True, False], True),
        ("... n, ~... m, n -> ... n", [False, False, True], False),
        ("... n, ~... m -> ... n, n", [True, False], False),
    ],
)
def test_a_mapped_axis_folds(text, mapped, folds):
    assert Signature.parse(text).folds(mapped) is folds


# Folding, shardings and copies --------------------------------------------------------------------


@pytest.mark.parametrize(
    "dims, shapes",
    [
        # (mapped axes of x and mask), their shapes after folding. An unmapped mask is not expanded.
        ((0, None), [(7, 2, 5), (1, 1, 5)]),
        ((1, None), [(2, 7, 5), (1, 1, 5)]),
        ((None, 0), [(7, 2, 5), (7, 1, 5)]),
        ((None, 2), [(7, 2, 5), (7, 1, 5)]),
        ((0, 1), [(7, 2, 5), (7, 1, 5)]),
    ],
)
def test_folding_expands_everything_else(dims, shapes):
    x, mask = np.zeros((2, 5)), np.zeros((1, 5), bool)
    operands = [
        a if d is None else np.stack([a] * 7, d) for a, d in zip((x, mask), dims, strict=True)
    ]
    operands = [jnp.asarray(a) for a in operands]
    folded = fold(Signature.parse(MASKED), operands, dims)
    expected = [(7, 2, 5), shapes[1]]
    assert [a.shape for a in folded] == expected


def test_the_mask_says_nothing_about_shards():
    mesh = compat.make_mesh({"a": 1, "b": 1}, AxisType.Explicit)
    with jax.set_mesh(mesh):
        put = lambda a, spec: jax.typeof(jax.device_put(a, NamedSharding(mesh, spec)))  # noqa: E731
        x = put(np.ones((2, 3, 4), np.float32), P("a", None, None))
        for spec in (P(None, None, None), P("b", None, None), P("b", "a", None)):
            mask = put(np.ones((2, 3, 4), bool), spec)
            (out,) = infer_avals(Signature.parse(MASKED), [x, mask])
            assert out.sharding.spec == P("a", None, None)
        inner = Signature.parse(INNER)
        x = put(np.ones((2, 3, 4), np.float32), P(None, None, "a"))
        (out,) = infer_avals(inner, [x, put(np.ones((1, 3, 4), bool), P(None, None, "b"))])
        assert out.sharding.spec == P(None, None, "a")


def shapes_of(*shapes):
    return [jax.ShapeDtypeStruct(s, np.float32) for s in shapes]


@pytest.mark.parametrize(
    "mask, rule",
    [
        ((2, 3, 16), "([i, j, k], [i, j, l])->([i, j, k]) {i=2, j=3, k=16, l=16}"),
        ((2, 3, 1), "([i, j, k], [i, j, l])->([i, j, k]) {i=2, j=3, k=16, l=1}"),
        ((1, 3, 16), "([i, j, k], [l, j, m])->([i, j, k]) {i=2, j=3, k=16, l=1, m=16}"),
        ((8, 3, 16), "([i, j, k], [l, j, m])->([i, j, k]) {i=2, j=3, k=16, l=8, m=16}"),
        ((1, 1, 1), "([i, j, k], [l, m, n])->([i, j, k]) {i=2, j=3, k=16, l=1, m=1, n=1}"),
    ],
    ids=str,
)
def test_sharding_rule_has_a_factor_for_each_size_that_differs(mask, rule):
    signature = Signature.parse(MASKED)
    found = sharding_rule(signature, shapes_of((2, 3, 16), mask), shapes_of((2, 3, 16)), 2)
    last = rule.split("])->")[0][-1]  # of the mask's row
    assert found == f"#sdy.op_sharding_rule<{rule} need_replication={{k, {last}}}, custom>"


def test_copies_are_made_for_every_device_where_nothing_tells_the_shards():
    signature = Signature.parse(MASKED)
    x = jnp.zeros((16, 6, 5))
    for mask, expected in (
        ((1, 1, 5), (8, 8, 5)),
        ((16, 1, 5), (16, 8, 5)),
        ((1, 6, 1), (8, 6, 1)),
        ((16, 6, 5), (16, 6, 5)),
    ):
        where = jnp.arange(np.prod(mask)).reshape(mask)
        shape, spec = shape_of_copies(signature, [x, where], 1, 8)
        assert shape == expected and spec is None
        first, second = with_copies(signature, [x, where], 8)
        assert first is x and second.shape == expected
        np.testing.assert_array_equal(second, np.broadcast_to(where, expected))


def test_copies_along_dimensions_with_a_star():
    signature = Signature.parse(INNER)
    x = jnp.zeros((16, 5, 6))
    shape, spec = shape_of_copies(signature, [x, jnp.zeros((1, 5, 1), bool)], 1, 8)
    assert shape == (8, 5, 8) and spec is None
    # Rows are not partitioned, so there are no copies along them.
    assert shape_of_copies(signature, [x, jnp.zeros((16, 1, 6), bool)], 1, 8)[0] == (16, 1, 6)


def test_copies_are_as_many_as_the_shards_that_the_type_tells():
    count = device_count()
    if count < 4:
        pytest.skip("needs four devices")
    mesh = compat.make_mesh({"a": 2, "b": count // 2}, AxisType.Explicit)
    signature = Signature.parse(MASKED)
    with jax.set_mesh(mesh):
        put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
        x = put(jnp.zeros((16, 24, 5)), P("a", "b", None))
        mask = put(jnp.zeros((1, 1, 5), bool), P(None, None, None))
        shape, spec = shape_of_copies(signature, [x, mask], 1, count)
        assert shape == (2, count // 2, 5) and spec == ("a", "b", None)
        mask = put(jnp.zeros((16, 1, 5), bool), P("a", None, None))
        shape, spec = shape_of_copies(signature, [x, mask], 1, count)
        assert shape == (16, count // 2, 5) and spec == ("a", "b", None)
        x = put(jnp.zeros((16, 24, 5)), P(None, None, None))
        mask = put(jnp.zeros((1, 1, 5), bool), P(None, None, None))
        assert shape_of_copies(signature, [x, mask], 1, count)[0] == (1, 1, 5)


def test_the_number_of_devices_is_told_inside_of_a_block_alone():
    assert partitions() == 1
    with lowering_for(8):
        assert partitions() == 8
        with lowering_for(2):
            assert partitions() == 2
        assert partitions() == 8
    assert partitions() == 1
    with pytest.raises(ZeroDivisionError), lowering_for(8):
        raise ZeroDivisionError
    assert partitions() == 1


# An op with one such operand ----------------------------------------------------------------------


def _masked(x, where):
    y = jnp.where(where, jnp.sin(x), 0)
    return y / (1 + jnp.sum(y * y, axis=-1, keepdims=True))


masked_unit = Op("toy_masked_unit", MASKED, _masked)

X = np.random.default_rng(0).normal(size=(4, 3, 5))
WHERE = np.random.default_rng(1).random((4, 1, 5)) < 0.7
gained = Op("toy_gained", "... n, ~... n -> ... n", lambda x, gain: jnp.sin(x) * gain)


def stack(a):
    return jnp.stack([a, a[..., ::-1], a])


TRANSFORMS = {
    "value": lambda f: f,
    "gradient": lambda f: jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w)))),
    "x mapped": lambda f: lambda x, w: jax.vmap(f, (0, None))(stack(x), w),
    "mask mapped": lambda f: lambda x, w: jax.vmap(f, (None, 0))(x, stack(w)),
    "both mapped": lambda f: lambda x, w: jax.vmap(f, (0, 0), 1)(stack(x), stack(w)),
    "nested": lambda f: (
        lambda x, w: jax.vmap(jax.vmap(f, (None, 0)), (0, None))(stack(x), stack(w))
    ),
    "gradients per example": lambda f: (
        lambda x, w: jax.vmap(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w)))), (0, None))(
            stack(x), w
        )
    ),
    "gradients per mask": lambda f: (
        lambda x, w: jax.vmap(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w)))), (None, 0))(
            x, stack(w)
        )
    ),
    "jvp": lambda f: lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (jnp.cos(x),)),
    "hessian": lambda f: jax.hessian(lambda x, w: jnp.sum(jnp.sin(f(x, w)))),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("where", [WHERE, WHERE[:1, :, :1]], ids=np.shape)
def test_an_op_with_a_mask(transform, where):
    got, want = (jax.jit(transform(f))(X, where) for f in (masked_unit, masked_unit.reference))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_mask_without_a_leading_dimension_of_its_own_rank_is_refused():
    with pytest.raises(ValueError, match="does not have the rank"):
        masked_unit(X, WHERE[0])


def test_the_op_is_one_equation_under_vmap():
    """There is no level: a mapped axis becomes a leading dimension, of x or of both operands."""
    for axes, args in (((0, None), (stack(X), WHERE)), ((None, 0), (X, stack(WHERE)))):
        jaxpr = jax.jit(jax.vmap(masked_unit, axes)).trace(*args).jaxpr
        (op,) = [e for e in jaxpr.eqns if "toy_masked_unit" in str(e.primitive)]
        assert op.params["levels"] == ()
        assert op.invars[0].aval.shape == (3, 4, 3, 5)
        assert op.invars[1].aval.size == args[1].size


# All operands have `~...` -------------------------------------------------------------------------

BOTH = "~... *n, ~... *n -> ... *n"


@pytest.mark.parametrize(
    "shapes, result",
    [
        ([(2, 1, 5), (1, 3, 5)], (2, 3, 5)),
        ([(1, 1, 1), (2, 3, 5)], (2, 3, 5)),
        ([(2, 3, 1), (1, 1, 5)], (2, 3, 5)),
        ([(1,), (1,)], (1,)),
        ([(0, 5), (1, 1)], (0, 5)),
    ],
    ids=str,
)
def test_the_result_is_what_they_broadcast_to(shapes, result):
    assert infer(BOTH, *shapes) == [(result, F32)]
    bound = Signature.parse(BOTH).bind(shapes)
    assert (*bound.batch, bound.sizes["n"]) == result


def test_names_of_their_own_are_no_part_of_that():
    assert infer("~... n, ~... m -> ... n", (2, 1, 5), (1, 3, 1)) == [((2, 3, 5), F32)]


@pytest.mark.parametrize(
    "shapes, message",
    [
        ([(2, 3, 5), (4, 3, 5)], r"\(2, 3, 5\) and \(4, 3, 5\) do not broadcast"),
        ([(2, 3, 5), (2, 3, 4)], "do not broadcast"),
        ([(2, 3, 5), (3, 5)], "leading dimensions"),
    ],
)
def test_shapes_that_do_not_broadcast(shapes, message):
    with pytest.raises(ValueError, match=message):
        infer(BOTH, *shapes)


def test_the_batch_shape_can_be_told():
    """The sizes of operands with copies do not broadcast, so the batch shape is given."""
    signature = Signature.parse(BOTH)
    told = dataclasses.replace(signature, batch=(16, 24))
    shapes = [(16, 8, 1), (8, 24, 1)]
    assert told.bind(shapes).batch == (16, 24)
    with pytest.raises(ValueError, match="do not broadcast"):
        signature.bind(shapes)


def test_they_get_copies_of_each_others_dimensions():
    signature = Signature.parse(BOTH)
    x, y = jnp.arange(16.0)[:, None], jnp.arange(24.0)[None]
    first, second = with_copies(signature, [x, y], 8)
    assert first.shape == (16, 8) and second.shape == (8, 24)
    np.testing.assert_array_equal(first, np.broadcast_to(x, (16, 8)))
    np.testing.assert_array_equal(second, np.broadcast_to(y, (8, 24)))


@pytest.mark.parametrize(
    "x, y, rule",
    [
        ((16, 24), (16, 24), "([i, j], [i, j])->([i, j]) {i=16, j=24}"),
        ((8, 24), (16, 24), "([i, j], [k, j])->([k, j]) {i=8, j=24, k=16}"),
        ((8, 24), (16, 8), "([i, j], [k, l])->([k, j]) {i=8, j=24, k=16, l=8}"),
        ((1, 1), (16, 24), "([i, j], [k, l])->([k, l]) {i=1, j=1, k=16, l=24}"),
    ],
)
def test_sharding_rule_takes_whole_sizes_from_the_result(x, y, rule):
    signature = Signature.parse("~..., ~... -> ...")
    found = sharding_rule(signature, shapes_of(x, y), shapes_of((16, 24)), 2)
    assert found == f"#sdy.op_sharding_rule<{rule}, custom>"


def test_those_of_full_size_say_how_it_is_sharded():
    mesh = compat.make_mesh({"a": 1, "b": 1}, AxisType.Explicit)
    signature = Signature.parse(BOTH)
    with jax.set_mesh(mesh):
        put = lambda shape, spec: jax.typeof(  # noqa: E731
            jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))
        )
        for x, y, expected in (
            (put((4, 1), P("a", None)), put((1, 6), P(None, "b")), P("a", "b")),
            (put((4, 6), P(None, None)), put((4, 6), P("a", "b")), P("a", "b")),
            (put((4, 6), P("a", None)), put((1, 1), P(None, None)), P("a", None)),
        ):
            (out,) = infer_avals(signature, [x, y])
            assert out.shape == (4, 6) and out.sharding.spec == expected
        with pytest.raises(ValueError, match="sharded differently"):
            infer_avals(signature, [put((4, 6), P("a", None)), put((4, 6), P("b", None))])


# Gradients ----------------------------------------------------------------------------------------


def test_a_result_can_be_like_an_operand():
    signature = Signature.parse("~... n, ... n -> ... n")
    like = dataclasses.replace(signature.results[0], like=0)
    signature = dataclasses.replace(signature, results=(like,))
    assert signature.infer([(1, 3, 5), (2, 3, 5)], [F32, F32]) == [((1, 3, 5), F32)]
    # Otherwise the result would be the sum over the mapped axis, not one result per index.
    gain, x = jnp.zeros((1, 5)), jnp.zeros((7, 2, 5))
    assert [a.shape for a in fold(signature, [gain, x], (None, 0))] == [(7, 1, 5), (7, 2, 5)]


GAIN = np.random.default_rng(3).normal(size=(1, 1, 5))
both_spread = Op("toy_both_spread", BOTH, lambda x, y: jnp.sin(x) * jnp.cos(y))
no_gain = Op(
    "toy_no_gain",
    "... n, ~... n -> ... n",
    jnp.add,
    residuals=lambda args, outs, saved: (args[0],),
    pullback=lambda kept, cts: (cts[0], cts[0]),
    pushforward=lambda kept, tangents: sum(t for t in tangents if t is not None),
)


def scalar(f):
    return lambda x, g: jnp.sum(jnp.sin(f(x, g)))


def stack_first(a):
    return jnp.stack([a, 2 * a, -a])


GRADIENTS = {
    "gradients": lambda f: jax.grad(scalar(f), (0, 1)),
    "the gain's": lambda f: jax.grad(scalar(f), 1),
    "per x": lambda f: (
        lambda x, g: jax.vmap(jax.grad(scalar(f), (0, 1)), (0, None))(stack_first(x), g)
    ),
    "per gain": lambda f: (
        lambda x, g: jax.vmap(jax.grad(scalar(f), (0, 1)), (None, 0))(x, stack_first(g))
    ),
    "of a map": lambda f: jax.grad(
        lambda x, g: jax.vmap(scalar(f), (0, None))(stack_first(x), g).sum(), (0, 1)
    ),
    "jvp": lambda f: lambda x, g: jax.jvp(f, (x, g), (jnp.cos(x), jnp.sin(g))),
    "jvp along the gain": lambda f: lambda x, g: jax.jvp(lambda g: f(x, g), (g,), (jnp.sin(g),)),
    "tangents of a map": lambda f: (
        lambda x, g: jax.vmap(jax.linearize(f, x, g)[1], (None, 0))(x, stack_first(g))
    ),
    "hvp": lambda f: lambda x, g: jax.jvp(jax.grad(scalar(f), (0, 1)), (x, g), (x, g)),
    "hessian": lambda f: jax.hessian(scalar(f), (0, 1)),
    "reverse over reverse": lambda f: jax.grad(
        lambda x, g: sum(jnp.sum(jnp.cos(d)) for d in jax.grad(scalar(f), (0, 1))(x, g)), (0, 1)
    ),
}


@pytest.mark.parametrize("transform", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("op", [gained, both_spread], ids=lambda op: op.name)
def test_it_has_a_gradient_of_its_own_shape(transform, op):
    got, want = (jax.jit(transform(f))(X, GAIN) for f in (op, op.reference))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-11)


def test_it_has_none_if_it_is_not_kept():
    with pytest.raises(ValueError, match=r"a result of .* has '~\.\.\.'"):
        jax.grad(scalar(no_gain), 1)(X, GAIN)
