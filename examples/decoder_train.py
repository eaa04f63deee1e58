"""Trains a decoder on text, on all devices of one or several processes, and resumes after a kill.

    pip install '.[train]'
    python examples/decoder_train.py --checkpoint /tmp/decoder

The model, of Llama's type, reads bytes and learns to predict the next one. Texts that are shorter
than ``--length`` share rows, and none sees another one. Each evaluation prints a sample: the start
of a text, ``|``, and what the model writes after it. ``training.py`` has the loop, and describes
devices, processes and checkpoints.
"""

import argparse
import dataclasses
import sys

import jax
from jax_fastops.models import decoder, pipeline

import masked_text
import training

CONFIGS = {"small": decoder.SMALL, "1b": decoder.LLAMA_1B}


def config(size: decoder.Config, options: argparse.Namespace) -> decoder.Config:
    return dataclasses.replace(
        size,
        vocab_size=masked_text.VOCABULARY,
        dtype=options.dtype,
        attention=options.attention,
    )


def loss(
    params, rows: masked_text.Rows, key, config: decoder.Config, ops: decoder.Ops, **staged
) -> jax.Array:
    del key  # there is no dropout
    mean = pipeline.decoder_loss if staged else decoder.loss
    return mean(params, rows.tokens, config, segment_ids=rows.segment_ids, ops=ops, **staged)


def continued(params, tokens, key, config: decoder.Config, ops: decoder.Ops) -> jax.Array:
    sampling = dict(length=64, key=key, temperature=0.7)
    return decoder.generate(params, tokens, config, ops=ops, **sampling)[0]


EXAMPLE = training.Example(
    name="decoder",
    about=__doc__,
    loss_name="loss of the next byte",
    configs=CONFIGS,
    rates={"small": 1e-3, "1b": 3e-4},
    ops={"fastops": decoder.FASTOPS, "plain": decoder.PLAIN},
    config=config,
    init=decoder.init,
    batch=masked_text.packed,
    loss=loss,
    continued=continued,
)

if __name__ == "__main__":
    sys.exit(training.main(EXAMPLE))
