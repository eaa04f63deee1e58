"""Signatures: shapes, dtypes, folding of mapped axes, and the sharding rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compat
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fastops._kernel import infer_avals, sharding_rule
from jax_fastops._signature import Signature

F32, BF16, F64 = (jnp.dtype(d) for d in ("float32", "bfloat16", "float64"))


def infer(text, *operands):
    return Signature.parse(text).infer([s for s, _ in operands], [d for _, d in operands])


def test_shapes_and_dtypes_follow_from_the_string():
    found = infer(
        "... n, n -> ... n, ... ceil(n/8) :uint8, n :1, ... :acc, 3", ((2, 5, 9), BF16), ((9,), F32)
    )
    assert found == [
        ((2, 5, 9), BF16),
        ((2, 5, 2), jnp.dtype("uint8")),
        ((9,), F32),
        ((2, 5), F32),
        ((3,), BF16),
    ]


def test_a_size_may_differ_by_a_number_from_another():
    assert infer("... n *i -> ... n-4 *i, ... n+2 *i", ((2, 9, 3), F32)) == [
        ((2, 5, 3), F32),
        ((2, 11, 3), F32),
    ]


def test_a_size_may_derive_from_a_product():
    text = "... o c i -> ... o, ... ceil(o*c*i/8) :uint8"
    assert infer(text, ((2, 3, 5, 7), F32)) == [((2, 3), F32), ((2, 14), jnp.dtype("uint8"))]
    assert str(Signature.parse(text)) == text
    with_sizes = Signature.parse("... o, ... ceil(o*c/8) -> ... o, ... ceil(o*c/8)")
    fixed = with_sizes.with_sizes({"o": 3, "c": 11})
    assert fixed.infer([(2, 3), (2, 5)], [F32, F32])[1] == ((2, 5), F32)
    with pytest.raises(ValueError, match="cannot be 13"):
        infer("... o c, ... ceil(o*c/8) -> ... o", ((2, 8, 14), F32), ((2, 13), F32))


@pytest.mark.parametrize("dtype, kept", [(F64, F64), (F32, F32), (BF16, F32)])
def test_accumulators_are_at_least_float32(dtype, kept):
    assert infer("... n -> ... :acc", ((4, 3), dtype)) == [((4,), kept)]


def test_no_batch_dimensions_is_a_batch_of_rank_zero():
    assert infer("... n -> ... n, ...", ((7,), F32)) == [((7,), F32), ((), F32)]


@pytest.mark.parametrize(
    "text, shapes, message",
    [
        ("... n, n -> ... n", [(2, 3), (4,)], "dimension 'n'"),
        ("... n, ... n -> ... n", [(2, 3), (5, 3)], "leading dimensions"),
        ("a b -> b a", [(2, 3, 4)], "does not fit"),
        ("... n, ... ceil(n/8) -> ... n", [(2, 9), (2, 3)], "cannot be 3"),
        ("... n -> ... n", [(2, 3), (3,)], "takes 1 operands, got 2"),
        ("... n -> ... m", [(2, 3)], "no operand of"),
        ("... n+1 -> ... n", [(2, 3)], "no operand of"),
        ("... n, ... n-2 -> ... n", [(2, 9), (2, 8)], "cannot be 8"),
        ("... n*2 -> ... n", [(2, 3)], "cannot read dimension"),
        ("... n", [(2, 3)], "no '->'"),
        ("... *s n -> ... n", [(2, 3, 4)], "different names with a star"),
        ("... *s, ... *t -> ... *s", [(2, 3), (2, 3)], "different names with a star"),
        ("... *s, *s -> ... *s", [(2, 3), (3,)], "no '...'"),
        ("*s -> *s", [(3,)], "no '...'"),
        ("... *s n, ... n *s -> ... *s", [(2, 3, 4), (2, 4, 5)], "dimension 's'"),
        ("... *ceil(n/8) -> ... n", [(2, 3)], "cannot read dimension"),
    ],
)
def test_what_does_not_fit_is_said(text, shapes, message):
    with pytest.raises(ValueError, match=message):
        Signature.parse(text).infer(shapes, [F32] * len(shapes))


@pytest.mark.parametrize(
    "text, mapped, folds",
    [
        ("... n -> ... n", [True], True),
        ("... n, n -> ... n", [True, False], True),
        ("... n, n -> ... n", [True, True], False),
        ("... n, n -> ... n", [False, True], False),
        ("... n, ... n -> ... n", [True, False], True),
        ("... n -> n", [True], False),
        ("a b -> b a", [True], False),
        ("... *a *b -> ... *b *a", [True], True),
        ("... *s n, n -> ... *s n", [True, False], True),
        ("... *s n, n -> ... *s n", [True, True], False),
    ],
)
def test_a_mapped_axis_folds_only_where_examples_are_independent(text, mapped, folds):
    assert Signature.parse(text).folds(mapped) is folds


def test_names_with_a_star_stand_anywhere():
    found = infer("... *a n *b -> ... *b *a, ... n *b *a :acc", ((2, 3, 4, 5), BF16))
    assert found == [((2, 5, 3), BF16), ((2, 4, 5, 3), F32)]
    signature = Signature.parse("... *a n *b -> ... *b *a")
    assert signature.free == ("b", "a") and signature.operands[0].free == ("a", "b")
    assert [d.name for d in signature.operands[0].own] == ["n"]


def test_a_signature_is_written_as_it_is_read():
    text = "... *s n, n -> ... n *s :uint8, ... *s ceil(n/8), n :acc"
    assert str(Signature.parse(text)) != str(Signature.parse(text.replace("*s", "s")))
    assert Signature.parse(str(Signature.parse(text))) == Signature.parse(text)


def test_the_shards_of_a_dimension_follow_its_star():
    mesh = compat.make_mesh({"a": 1, "b": 1}, AxisType.Explicit)
    with jax.set_mesh(mesh):
        avals = [
            jax.typeof(jax.device_put(np.ones((2, 3, 4), np.float32), NamedSharding(mesh, spec)))
            for spec in (P("a", "b", None), P(None, None, None), P(None, None, "a"))
        ]
        both = Signature.parse("... *s n, ... *s n -> ... n *s, ... *s, n")
        found = infer_avals(both, [avals[1], avals[0]])
        assert [a.sharding.spec for a in found] == [P("a", None, "b"), P("a", "b"), P(None)]
        swap = Signature.parse("... *s *t, ... *t *s -> ... *s *t")
        turned = jax.typeof(
            jax.device_put(np.ones((2, 4, 3), np.float32), NamedSharding(mesh, P(None, "b", "a")))
        )
        # The second operand shards t over b and s over a; the first s over b.
        with pytest.raises(
            ValueError, match="sharded differently along one dimension: 'b' and 'a'"
        ):
            infer_avals(swap, [avals[0], turned])


def test_names_that_no_operand_fixes_are_replaced_by_sizes():
    signature = Signature.parse("... ceil(n/8) -> ... n").with_sizes({"n": 13})
    assert signature.infer([(4, 2)], [F32]) == [((4, 13), F32)]


def test_a_star_needs_an_operand_that_has_it():
    with pytest.raises(ValueError, match=r"no operand has the dimension '\*s'"):
        Signature.parse("n -> ... *s n").with_sizes({"s": 3, "n": 4})


def test_sharding_rule_shares_batch_factors_and_replicates_the_rest():
    signature = Signature.parse("... n, n -> ... n, ... ceil(n/8) :uint8, n")
    avals = [jax.ShapeDtypeStruct(s, np.float32) for s in [(2, 3, 16), (16,)]]
    outs = [jax.ShapeDtypeStruct(s, np.float32) for s in [(2, 3, 16), (2, 3, 2), (16,)]]
    assert sharding_rule(signature, avals, outs, 2) == (
        "#sdy.op_sharding_rule<([i, j, k], [k])->([i, j, k], [i, j, l], [k]) "
        "{i=2, j=3, k=16, l=2} need_replication={k, l}, custom>"
    )


def test_sharding_rule_has_a_factor_for_each_mere_size():
    """Two dimensions of the same fixed size are different factors."""
    signature = Signature.parse("... 4 -> ... 4, ... 1")
    avals = [jax.ShapeDtypeStruct(s, np.float32) for s in [(2, 4), (2, 4), (2, 1)]]
    assert sharding_rule(signature, avals[:1], avals[1:], 1) == (
        "#sdy.op_sharding_rule<([i, j])->([i, k], [i, l]) "
        "{i=2, j=4, k=4, l=1} need_replication={j, k, l}, custom>"
    )
