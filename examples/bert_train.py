"""Trains a BERT on text, on all devices of one or several processes, and resumes after a kill.

    pip install '.[train]'
    python examples/bert_train.py --checkpoint /tmp/bert

The model reads bytes, some of them hidden, and learns to predict the hidden ones
(``masked_text.py``). Texts that are shorter than ``--length`` share rows, and none sees another
one. ``training.py`` has the loop, and describes devices, processes and checkpoints.
"""

import argparse
import dataclasses
import sys

import jax
from jax_fastops.models import bert, pipeline

import loop
import masked_text
import training

CONFIGS = {"small": bert.SMALL, "base": bert.BASE, "large": bert.LARGE}


def add_options(add) -> None:
    add("--dropout", type=loop.share, default=0.1, metavar="P", help="(default: 0.1)")


def config(size: bert.Config, options: argparse.Namespace) -> bert.Config:
    # jax.nn.dot_product_attention has no dropout of attention weights.
    in_attention = options.dropout if options.attention == "softmax" else 0.0
    return dataclasses.replace(
        size,
        vocab_size=masked_text.VOCABULARY,
        dtype=options.dtype,
        attention=options.attention,
        dropout=options.dropout,
        attention_dropout=in_attention,
    )


def init(key: jax.Array, config: bert.Config) -> dict:
    params = bert.init(key, config, mlm=True)
    del params["pooler"]  # the loss does not use it
    return params


def loss(
    params, batch: masked_text.Batch, key, config: bert.Config, ops: bert.Ops, **staged
) -> jax.Array:
    apply, head = bert.apply, bert.masked_lm_loss
    if staged:
        apply, head = pipeline.bert_apply, pipeline.bert_masked_lm_loss
    given = dict(segment_ids=batch.segment_ids, key=key, ops=ops, **staged)
    hidden, _ = apply(params, batch.tokens, config, **given)
    return head(params, hidden, batch.targets, config, where=batch.chosen, ops=ops)


EXAMPLE = training.Example(
    name="BERT",
    about=__doc__,
    loss_name="masked language model's loss",
    configs=CONFIGS,
    rates={"small": 1e-3, "base": 1e-4, "large": 1e-4},
    ops={"fastops": bert.FASTOPS, "plain": bert.PLAIN},
    config=config,
    init=init,
    batch=masked_text.batch,
    loss=loss,
    heads={"mlm": True},
    add_options=add_options,
    fixed=("dropout", "attention"),  # only softmax has dropout of attention weights
)

if __name__ == "__main__":
    sys.exit(training.main(EXAMPLE))
