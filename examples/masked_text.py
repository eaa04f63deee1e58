"""Real text as bytes, and batches of it in which some bytes are hidden: a masked language model's
data, for ``bert_train.py`` and for the demo.

Tokens are the bytes of UTF-8, which has no 0xFE and no 0xFF: these two are the padding and the
mask. So there is no vocabulary to build, and any text will do.
"""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256
PADDING, MASK = 0xFE, 0xFF
SUFFIXES = (".md", ".rst", ".txt")  # of the files that are read in a folder

# As in Devlin et al., "BERT": so many tokens are to be told; of these, so many are replaced by the
# mask, and so many by another token.
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1


class Batch(NamedTuple):
    """Windows of text, each array ``[batch, length]``.

    Attributes:
      tokens: int32, the model's input, with some tokens hidden.
      inside: bool, true for text, false for padding.
      targets: int32, the text itself.
      chosen: bool, true where the text is to be told.
    """

    tokens: np.ndarray
    inside: np.ndarray
    targets: np.ndarray
    chosen: np.ndarray


def documents(path: Path | None = None) -> list[np.ndarray]:
    """Texts as uint8 arrays, in the order of their names.

    Args:
      path: a file, or a folder whose ``.md``, ``.rst`` and ``.txt`` files are read, those in
        folders below included; None for the descriptions of scikit-learn's data sets, 43 kB of
        English.

    Raises:
      OSError: ``path`` cannot be read.
      ValueError: there is no text in it.
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
    # What is no UTF-8 becomes U+FFFD: the two special tokens cannot be in the text.
    texts = (f.read_text(encoding="utf-8", errors="replace").encode() for f in files)
    found = [np.frombuffer(text, np.uint8) for text in texts if text.strip()]
    if not found:
        raise ValueError(f"{path} has no text in it")
    return found


def batch(texts: Sequence[np.ndarray], size: int, length: int, rng: np.random.Generator) -> Batch:
    """``size`` random windows of ``length`` tokens, some of which are hidden.

    A window lies in one text; the end of a text that is shorter than a window is padded. All that
    is random comes from ``rng``: equal generators give equal batches.
    """
    sizes = np.array([len(text) for text in texts])
    targets = np.full((size, length), PADDING, np.int32)
    for row, index in zip(
        targets, rng.choice(len(texts), size, p=sizes / sizes.sum()), strict=True
    ):
        text = texts[index]
        start = rng.integers(max(len(text) - length, 0) + 1)
        window = text[start : start + length]
        row[: len(window)] = window
    inside = targets != PADDING
    chosen = inside & (rng.random(targets.shape) < CHOSEN)
    # Other tokens are as frequent as they are in the batch.
    others = rng.choice(targets[inside], targets.shape)
    fate = rng.random(targets.shape)
    hidden = np.where(fate < MASKED, MASK, np.where(fate < MASKED + REPLACED, others, targets))
    return Batch(np.where(chosen, hidden, targets).astype(np.int32), inside, targets, chosen)


def loss(logits, targets, chosen):
    """Mean cross-entropy of the chosen tokens: logits ``[..., vocabulary]``, a float32 scalar."""
    logits = logits.astype(jnp.float32)
    # A sum over a comparison and not an indexed read: its gradient is no scatter.
    at_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    each = jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(at_target, logits, 0), -1)
    return jnp.sum(jnp.where(chosen, each, 0)) / jnp.maximum(jnp.sum(chosen), 1)
