"""Frequencies of the rotary embedding, and their changes for long sequences."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_fastops.models._products import accumulator_dtype, of_rank


class RopeScaling(NamedTuple):
    """The change of rotary frequencies in Llama 3, for sequences longer than those of pretraining.

    Attributes:
      factor: by which low frequencies are divided.
      low_freq_factor: a frequency with fewer periods than this in ``original_positions`` is low.
      high_freq_factor: a frequency with more periods than this stays. Between the two, frequencies
        are interpolated.
      original_positions: the longest sequence of the pretraining.

    Example:
      >>> decoder.LLAMA_1B.rope_scaling.factor
      32.0
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def _changed(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Other frequencies in place of ``theta**-k``."""
        del theta
        periods = self.original_positions * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        same = np.clip((periods - low) / (high - low), 0, 1)
        return frequencies * (same + (1 - same) / self.factor)


class LinearScaling(NamedTuple):
    """Rotary frequencies that are all divided by a factor.

    Attributes:
      factor: the factor.

    Example:
      >>> decoder.Config(rope_scaling=decoder.LinearScaling(4.0)).rope_scaling.factor
      4.0
    """

    factor: float

    def _changed(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Other frequencies in place of ``theta**-k``."""
        del theta
        return frequencies / self.factor


class YarnScaling(NamedTuple):
    """The change of rotary frequencies of YaRN: low ones are divided, high ones stay.

    Between them, frequencies are interpolated by their index, and not by their value.

    Attributes:
      factor: by which low frequencies are divided.
      original_positions: the longest sequence of the pretraining.
      attention_factor: the factor of queries and of keys.
      beta_fast: a frequency with more periods than this in ``original_positions`` stays.
      beta_slow: a frequency with fewer periods than this is low.
      truncate: whether the two bounds are rounded outwards, to an index.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models".

    Example:
      >>> decoder.YarnScaling(4.0, 32768, 1.14).beta_fast
      32.0
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def _changed(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Other frequencies in place of ``theta**-k``."""
        size = 2 * len(frequencies)
        low, high = (
            size * math.log(self.original_positions / (periods * 2 * math.pi)) / 2 / math.log(theta)
            for periods in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high += 0.001 * (low == high)
        divided = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0, 1)
        return frequencies * (1 - divided + divided / self.factor)


Scaling = RopeScaling | LinearScaling | YarnScaling


def cos_sin(positions, head_dim: int, theta: float, scaling: Scaling | None, dtype) -> tuple:
    """Cosines and sines ``[..., sequence, head_dim / 2]`` of the rotary embedding."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling is not None:
        frequencies = scaling._changed(frequencies, theta)
    wide = accumulator_dtype(dtype)
    positions = positions[..., None].astype(wide)
    angles = positions * of_rank(jnp.asarray(frequencies, wide), positions.ndim)
    factor = getattr(scaling, "attention_factor", 1.0)
    pair = jnp.cos(angles), jnp.sin(angles)
    return pair if factor == 1 else tuple(factor * turn for turn in pair)
