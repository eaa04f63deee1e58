"""Pipelines: loss and gradients equal those of one device, with the least communication."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import make_mesh
from harness.numerics import assert_close_in_norm
from harness.sharding import collectives, device_count
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fastops.models import bert, decoder, pipeline

pytestmark = pytest.mark.usefixtures("exact_products", "looped_rounds")

BATCH, LENGTH = 8, 32
DECODER = dataclasses.replace(
    decoder.SMALL, vocab_size=40, hidden_size=32, intermediate_size=48, layers=4, head_dim=8
)
BERT = dataclasses.replace(
    bert.SMALL, vocab_size=40, hidden_size=32, intermediate_size=48, layers=3, activation="gelu"
)
CASES = {
    "decoder": (DECODER, dict(stage=2)),
    "decoder-all": (
        dataclasses.replace(
            DECODER, scan=True, tied=True, sliding_window=9, local_theta=1e3, scaled_embeddings=True
        ),
        dict(data=2, stage=2, tensor=2),
    ),
    "decoder-positions": (
        dataclasses.replace(DECODER, scan=True, positions=LENGTH, norms="post", qk_norm=True),
        dict(stage=2),
    ),
    "bert-uneven": (BERT, dict(data=2, stage=4)),
    "bert-all": (
        dataclasses.replace(BERT, scan=True, remat=True, embedding_size=16),
        dict(data=2, stage=2, tensor=2),
    ),
}


def batch() -> tuple[np.ndarray, ...]:
    """Tokens, packed rows of two segments, and labels."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 40, (BATCH, LENGTH), np.int32)
    place, cuts = np.arange(LENGTH), np.sort(rng.integers(1, LENGTH, (BATCH, 2)), axis=1)
    ids = 1 + (place >= cuts[:, :1])
    ids = np.where(place < cuts[:, 1:], ids, 0)
    return tokens, ids.astype(np.int32), rng.integers(-20, 40, (BATCH, LENGTH), np.int32)


def start(config) -> dict:
    config = dataclasses.replace(config, init_range=0.2)
    if isinstance(config, decoder.Config):
        return decoder.init(jax.random.key(0), config)
    params = bert.init(jax.random.key(0), config, mlm=True)
    return bert.stack_layers(params) if config.scan else params


def loss(params, tokens, ids, labels, config, **options):
    """The loss on one device, or with ``micro_batches`` in stages."""
    more = dict(segment_ids=ids, max_segments=2, **options)
    if isinstance(config, decoder.Config):
        whole = pipeline.decoder_loss if options else decoder.loss
        return whole(params, tokens, config, labels=labels, **more)
    apply, head = bert.apply, bert.masked_lm_loss
    if options:
        apply, head = pipeline.bert_apply, pipeline.bert_masked_lm_loss
    hidden, pooled = apply(params, tokens, config, **more)
    return head(params, hidden, labels, config) + jnp.mean(jnp.square(pooled))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.jax] * (n in ("decoder-all", "bert-uneven")))
        for n in CASES
    ],
)
def test_gradients(native, name):
    config, sizes = CASES[name]
    if device_count() < 8:
        pytest.skip("needs eight devices")
    config = dataclasses.replace(config, tensor_parallel="tensor" in sizes)
    params, given, stages = start(config), batch(), sizes["stage"]
    step = jax.value_and_grad(functools.partial(loss, config=config))
    wanted = jax.jit(step)(params, *given)

    mesh = make_mesh(sizes, AxisType.Auto)
    heads = {} if isinstance(config, decoder.Config) else dict(mlm=True)
    specs = pipeline.partition_specs(config, **heads)
    places = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    stacked = jax.device_put(pipeline.stack_layers(params, stages), places)
    given = jax.device_put(given, NamedSharding(mesh, P("data" if "data" in sizes else None)))
    step = jax.value_and_grad(functools.partial(loss, config=config, micro_batches=4))
    with jax.set_mesh(mesh):
        program = jax.jit(step, out_shardings=(None, places)).lower(stacked, *given).compile()
        value, grads = program(stacked, *given)
    assert grads["layers"]["up"]["kernel"].sharding.spec[0] == "stage"
    assert_close_in_norm((value, pipeline.unstack_layers(grads, config)), wanted, 2e-5)

    counts = collectives(program.as_text())
    # A stage sends in all ticks but the last, forward and backward; a scan has one tick.
    assert counts.pop("collective-permute") == 2 * (1 if config.scan else 4 + stages - 2)
    assert set(counts) == {"all-reduce"}
    if name == "decoder":
        # The rows of the embeddings, hidden states, sums of the loss (see the guide of the
        # models), and the gradients of inputs, hidden states and the last norm.
        assert counts["all-reduce"] <= 8


def test_dropout():
    """Each micro-batch and each shard of the batch has masks of its own."""
    if device_count() < 4:
        pytest.skip("needs four devices")
    config = dataclasses.replace(BERT, layers=2, attention_dropout=0.5)
    params = pipeline.stack_layers(start(config), 2)
    tokens = np.tile(batch()[0][:1], (BATCH, 1))
    run = functools.partial(pipeline.bert_apply, config=config, micro_batches=2)
    with jax.set_mesh(make_mesh(dict(data=2, stage=2), AxisType.Auto)):
        hidden, _ = jax.jit(run)(params, tokens, key=jax.random.key(3, impl="rbg"))
    assert len(np.unique(np.asarray(hidden[:, 0]), axis=0)) == BATCH


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(stage="x"), ValueError, r"stage is 'x'; it must be an axis of the mesh"),
        (dict(data="stage"), ValueError, "data is 'stage', which is also the axis of the stages"),
        (dict(micro_batches=3), ValueError, "tokens has a batch of 8; it must be a multiple of 3"),
        (dict(micro_batches=0), ValueError, "micro_batches is 0; it must be 1 or more"),
        (
            dict(config=3),
            TypeError,
            "config is of type int; it must be a Config of bert or decoder",
        ),
        (
            dict(config=dataclasses.replace(DECODER, unrotated_layers=(1,))),
            ValueError,
            r"unrotated_layers is \(1,\); the layers of a pipeline are alike",
        ),
        (dict(kind=AxisType.Explicit), ValueError, "all must be Auto"),
        (dict(stages=3), ValueError, "params.*must be"),
    ],
)
def test_errors(changes, error, message):
    given = dict(config=DECODER, micro_batches=4, stage="stage") | changes
    kind, stages = given.pop("kind", AxisType.Auto), given.pop("stages", 1)
    params = pipeline.stack_layers(start(DECODER), stages)
    with (
        jax.set_mesh(make_mesh(dict(stage=1), kind)),
        pytest.raises(error, match=message),
    ):
        pipeline.decoder_loss(params, batch()[0], **given)
