"""Decoders and BERT on packed rows: losses and gradients are those of rows with one sequence."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import make_mesh
from harness.numerics import assert_close_in_norm
from harness.programs import assert_strict
from harness.sharding import KINDS, device_count
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_bert import CONFIG as BERT_CONFIG
from test_bert import start as start_bert
from test_decoder import CONFIG as DECODER
from test_decoder import start as start_decoder

from jax_fastops.models import bert, decoder, packing

pytestmark = pytest.mark.usefixtures("exact_products", "looped_rounds")

# Positions of the longest sequence. Rows are longer.
BERT = dataclasses.replace(BERT_CONFIG, positions=8)
LENGTH, SEGMENTS = 16, 4


def start(config: decoder.Config | bert.Config) -> dict:
    return start_decoder(config) if isinstance(config, decoder.Config) else start_bert(config)


SEQUENCES = [
    np.random.default_rng(n).integers(0, 40, n, np.int32) for n in (3, 8, 1, 5, 7, 2, 4, 6, 2)
]
PACKED = packing.pack(SEQUENCES, LENGTH, rows=4, max_segments=SEGMENTS, padding=77)
EACH = packing.pack(SEQUENCES, 8, max_segments=1, padding=77)  # one sequence in a row


def decoder_step(config, ops, packed: packing.Packed, segments: bool):
    """Loss and gradients by parameters and labels; ``None`` for those of the next tokens."""
    given: dict[str, Any] = dict(mask=packed.segment_ids > 0)
    if segments:
        given = dict(segment_ids=packed.segment_ids, max_segments=SEGMENTS)

    def loss(params, labels):
        return decoder.loss(params, packed.tokens, config, labels=labels, ops=ops, **given)

    return jax.jit(jax.value_and_grad(loss))


DECODERS: dict[str, Any] = {
    "ours": {},
    "plain": {},
    "variant": dict(attention="xla", scan=True, remat=True, sliding_window=3, qk_norm=True),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoder(native, name):
    config = dataclasses.replace(DECODER, **DECODERS[name])
    ops = decoder.PLAIN if name == "plain" else decoder.FASTOPS
    params = start(config)
    together, apart = (
        decoder_step(config, ops, packed, segments)
        for packed, segments in ((PACKED, True), (EACH, False))
    )
    assert_close_in_norm(together(params, None), apart(params, None), 2e-5)
    following = [np.append(each[1:], -1) for each in SEQUENCES]
    for index in (0, 1, 4) if name == "ours" else ():
        one = [each if at == index else np.full_like(each, -1) for at, each in enumerate(following)]
        labels = (packing.place(packed, one, -1) for packed in (PACKED, EACH))
        found, wanted = together(params, next(labels)), apart(params, next(labels))
        assert found[0] > 0
        assert_close_in_norm(found, wanted, 2e-5)


def bert_step(config, ops, packed: packing.Packed, segments: bool):
    """A loss of the masked-word head and the pooler, and gradients, for labels and weights."""
    types = packing.place(packed, [np.arange(len(each)) % 2 for each in SEQUENCES], 7)
    given: dict[str, Any] = dict(mask=packed.segment_ids > 0)
    if segments:
        given = dict(segment_ids=packed.segment_ids, max_segments=SEGMENTS)

    def loss(params, labels, weights):
        hidden, pooled = bert.apply(
            params, packed.tokens, config, token_types=types, ops=ops, **given
        )
        assert pooled is not None
        if segments:
            assert pooled.shape == (len(packed.tokens), SEGMENTS, config.hidden_size)
            pooled = pooled[packed.rows, packed.segments - 1]
        else:
            pooled = pooled[packed.rows]
        return bert.masked_lm_loss(params, hidden, labels, config, ops=ops) + jnp.vdot(
            weights, pooled
        )

    return jax.jit(jax.value_and_grad(loss))


BERTS: dict[str, Any] = {
    "ours": {},
    "plain": {},
    "variant": dict(attention="xla", scan=True, remat=True),
}


@pytest.mark.parametrize("name", BERTS)
def test_bert(native, name):
    config = dataclasses.replace(BERT, **BERTS[name])
    ops = bert.PLAIN if name == "plain" else bert.FASTOPS
    params = start(config)
    steps = [
        (packed, bert_step(config, ops, packed, segments))
        for packed, segments in ((PACKED, True), (EACH, False))
    ]
    weights = np.random.default_rng(5).standard_normal((len(SEQUENCES), config.hidden_size))
    chosen = [range(len(SEQUENCES)), *([0], [3], [5])] if name == "ours" else [[0, 3, 5, 8]]
    for counted in chosen:
        counts = np.isin(np.arange(len(SEQUENCES)), counted)
        labels = [
            each if own else np.full_like(each, -1)
            for each, own in zip(SEQUENCES, counts, strict=True)
        ]
        own = np.where(counts[:, None], weights, 0).astype(np.float32)
        found, wanted = (
            step(params, packing.place(packed, labels, -1), own) for packed, step in steps
        )
        assert_close_in_norm(found, wanted, 2e-5)


def hidden_of(config: Any, tokens, **options):
    if isinstance(config, decoder.Config):
        return decoder.apply(start(config), tokens, config, **options)
    return bert.apply(start(config), tokens, config, **options)[0]


@pytest.mark.parametrize("name", ["decoder", "bert"])
def test_other_segments_are_not_seen(native, name):
    """Not a bit of the result depends on them, with dropout in BERT."""
    ids = PACKED.segment_ids
    dropped = dataclasses.replace(BERT, dropout=0.3, attention_dropout=0.3)
    more = dict(key=jax.random.key(3, impl="rbg")) if name == "bert" else {}
    config = dropped if name == "bert" else DECODER
    run = jax.jit(functools.partial(hidden_of, config, segment_ids=ids, **more))
    other = np.where(ids == 2, PACKED.tokens, (PACKED.tokens + 3) % 40)
    found, wanted = (np.asarray(run(tokens)) for tokens in (other, PACKED.tokens))
    assert (found[ids == 2] == wanted[ids == 2]).all() and np.isfinite(found).all()
    assert (found[ids == 1] != wanted[ids == 1]).any()


def test_arguments():
    """A mask excludes tokens; positions may be given; ids may be narrow."""
    ids, tokens = PACKED.segment_ids, PACKED.tokens
    run = jax.jit(functools.partial(hidden_of, BERT))
    wanted = run(tokens, segment_ids=ids)
    given = run(tokens, segment_ids=ids.astype(np.int8), positions=PACKED.positions)
    assert_close_in_norm(given, wanted, 1e-6)
    masked = run(tokens, segment_ids=ids, mask=ids != 2)
    assert_close_in_norm(masked, run(tokens, segment_ids=np.where(ids == 2, 0, ids)), 1e-6)
    empty = jax.eval_shape(
        functools.partial(hidden_of, DECODER), tokens[:, :0], segment_ids=ids[:, :0]
    )
    assert empty.shape == (4, 0, 32)


def test_pooled_outputs():
    """Zero for segments that a row does not have."""
    ids = PACKED.segment_ids
    run = jax.jit(functools.partial(bert.apply, start(BERT), config=BERT, max_segments=6))
    _, pooled = run(tokens=PACKED.tokens, segment_ids=ids)
    exists = (ids[:, None] == np.arange(1, 7)[:, None]).any(-1)
    assert ((np.asarray(pooled) != 0).any(-1) == exists).all() and not exists.all()
    without = jax.eval_shape(lambda: bert.apply(start(BERT), PACKED.tokens, BERT, segment_ids=ids))
    assert without[1] is None


def test_strict_settings(native):
    more: dict[str, Any] = dict(max_segments=SEGMENTS)
    key = jax.random.key(3, impl="rbg")

    def run(tokens, ids):
        pooled = bert.apply(start(BERT), tokens, BERT, key=key, segment_ids=ids, **more)
        return decoder.loss(start(DECODER), tokens, DECODER, segment_ids=ids, **more), pooled

    assert_strict(run, PACKED.tokens, PACKED.segment_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_mesh(native, kind):
    """Over a sharded batch and a sharded sequence."""
    if device_count() < 4:
        pytest.skip("needs four devices")
    params = start(DECODER), start(BERT)

    def run(params, tokens, ids):
        more: dict[str, Any] = dict(segment_ids=ids, max_segments=SEGMENTS)
        hidden, pooled = bert.apply(params[1], tokens, BERT, **more)
        return decoder.loss(params[0], tokens, DECODER, **more), hidden, pooled

    wanted = jax.jit(run)(params, PACKED.tokens, PACKED.segment_ids)
    mesh = make_mesh({"data": 2, "sequence": 2}, KINDS[kind])
    dealt = NamedSharding(mesh, P("data", "sequence"))
    given = jax.device_put((PACKED.tokens, PACKED.segment_ids), dealt)
    with jax.set_mesh(mesh):
        found = jax.jit(run)(jax.device_put(params, NamedSharding(mesh, P())), *given)
    assert_close_in_norm(found, wanted, 2e-5)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(segment_ids=PACKED.tokens * 1.0), TypeError, "segment_ids is of float64"),
        (dict(segment_ids=PACKED.tokens[1:]), ValueError, r"segment_ids has shape \(3, 16\)"),
        (dict(max_segments=2), ValueError, "max_segments is 2, but segment_ids is None"),
        (
            dict(segment_ids=PACKED.tokens, max_segments=0),
            ValueError,
            "max_segments is 0; it must be 1 or more",
        ),
        (
            dict(segment_ids=PACKED.tokens, cache=decoder.init_cache(DECODER, 4, 16)),
            ValueError,
            "segment_ids and cache are given",
        ),
    ],
)
def test_errors(options, error, message):
    for config in (DECODER, BERT) if "cache" not in options else (DECODER,):
        with pytest.raises(error, match=message):
            hidden_of(config, PACKED.tokens, **options)
