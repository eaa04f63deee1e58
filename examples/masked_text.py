"""Data for language models: batches of real text as bytes, some of them hidden if so wanted.

The examples that train a BERT and a decoder use it, and the demo.

Tokens are the bytes of UTF-8. The byte 0xFF does not occur in UTF-8; it stands for the mask. So any
text is accepted, and there is no vocabulary to build.
"""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax_fastops.models import packing

VOCABULARY = 256
MASK = 0xFF
SUFFIXES = (".md", ".rst", ".txt")  # of the files that are read from a folder

# As in Devlin et al., "BERT": the share of tokens to predict, and the shares of these that are
# replaced by the mask and by another token.
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1


class Batch(NamedTuple):
    """Rows of text without padding, each array ``[batch, length]``.

    Attributes:
      tokens: int32, the model's input, with some tokens hidden.
      segment_ids: as those of ``Rows``.
      targets: int32, the text itself.
      chosen: bool, true for the tokens to predict.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray | None
    targets: np.ndarray
    chosen: np.ndarray


class Rows(NamedTuple):
    """Rows of text without padding, int32 ``[batch, length]``.

    Attributes:
      tokens: the text.
      segment_ids: 1, 2, ... for the texts of a row, or None if each row is of one text.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray | None


def documents(path: Path | None = None) -> list[np.ndarray]:
    """Texts as uint8 arrays, in the order of their names.

    Args:
      path: a file, or a folder whose ``.md``, ``.rst`` and ``.txt`` files are read, including
        subfolders. None for the descriptions of scikit-learn's data sets, 43 kB of English.

    Raises:
      OSError: ``path`` cannot be read.
      ValueError: there is no text in ``path``.
    """
    if path is None:
        folder = resources.files("sklearn.datasets") / "descr"
        files = [f for f in folder.iterdir() if f.name.endswith(".rst")]
        files.sort(key=lambda f: f.name)
    elif path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        if not files:
            raise ValueError(f"{path} has no file that ends in {', '.join(SUFFIXES)}")
    else:
        files = [path]
    # Invalid UTF-8 becomes U+FFFD, so the mask cannot occur in the text.
    texts = (f.read_text(encoding="utf-8", errors="replace").encode() for f in files)
    found = [np.frombuffer(text, np.uint8) for text in texts if text.strip()]
    if not found:
        raise ValueError(f"{path} has no text in it")
    return found


def packed(texts: Sequence[np.ndarray], size: int, length: int, rng: np.random.Generator) -> Rows:
    """Random windows of texts, in ``size`` rows of ``length`` tokens.

    A window lies in one text. If a text is shorter than a row, further windows fill the rest of it.
    All randomness comes from ``rng``: equal generators give equal rows.
    """
    sizes = np.array([len(text) for text in texts])
    rows = []
    for _ in range(size):
        parts, free = [], length
        while free:
            text = texts[rng.choice(len(texts), p=sizes / sizes.sum())]
            start = rng.integers(max(len(text) - free, 0) + 1)
            parts.append(text[start : start + free])
            free -= len(parts[-1])
        rows.append(packing.pack(parts, length, rows=1))
    ids = None
    if sizes.min() < length:
        ids = np.concatenate([row.segment_ids for row in rows])
    return Rows(np.concatenate([row.tokens for row in rows]), ids)


def batch(texts: Sequence[np.ndarray], size: int, length: int, rng: np.random.Generator) -> Batch:
    """The same rows, with some tokens hidden."""
    targets, segment_ids = packed(texts, size, length, rng)
    chosen = rng.random(targets.shape) < CHOSEN
    # The replacements are drawn from the tokens of the batch.
    others = rng.choice(targets.ravel(), targets.shape)
    fate = rng.random(targets.shape)
    hidden = np.where(fate < MASKED, MASK, np.where(fate < MASKED + REPLACED, others, targets))
    return Batch(np.where(chosen, hidden, targets).astype(np.int32), segment_ids, targets, chosen)


def loss(logits, targets, chosen):
    """Mean cross entropy of the chosen tokens, a float32 scalar. Logits: ``[..., vocabulary]``."""
    logits = logits.astype(jnp.float32)
    # A masked sum instead of an indexed read, whose gradient would be a scatter.
    at_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    each = jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(at_target, logits, 0), -1)
    return jnp.sum(jnp.where(chosen, each, 0)) / jnp.maximum(jnp.sum(chosen), 1)
