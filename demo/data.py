"""Real data that scikit-learn ships: 1797 handwritten digits of 8 x 8 pixels, and 43 kB of text."""

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

# masked_text.py, which the example uses, too.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import masked_text

FEATURES, CLASSES = 64, 10
BATCH = 128
WINDOWS, LENGTH = 64, 16  # a batch of text
TEST_WINDOWS = 1024


@dataclass(frozen=True)
class Digits:
    """Images as standardized float32 rows, labels as int32."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train_x) // BATCH

    @property
    def first(self) -> tuple[np.ndarray, np.ndarray]:
        """The first batch, for its shapes."""
        return self.train_x[:BATCH], self.train_y[:BATCH]

    def batches(self, epochs: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Full batches, in an order that depends only on the seed."""
        rng = np.random.default_rng(seed)
        for _ in range(epochs):
            order = rng.permutation(len(self.train_x))
            for step in range(self.steps_per_epoch):
                rows = order[step * BATCH : (step + 1) * BATCH]
                yield self.train_x[rows], self.train_y[rows]


@functools.cache
def digits() -> Digits:
    """The digits in a fixed split: four fifths to train on, one fifth to test on."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    mean, deviation = train_x.mean(), train_x.std()  # of all pixels: some are always blank

    def standardised(x):
        return ((x - mean) / deviation).astype(np.float32)

    return Digits(
        standardised(train_x),
        train_y.astype(np.int32),
        standardised(test_x),
        test_y.astype(np.int32),
    )


@dataclass(frozen=True)
class Text:
    """Texts as bytes. Batches are ``(tokens, ids), (targets, chosen)`` of ``masked_text``."""

    train: list[np.ndarray]
    test_x: tuple[np.ndarray, np.ndarray]
    test_y: tuple[np.ndarray, np.ndarray]

    @property
    def steps_per_epoch(self) -> int:
        return sum(map(len, self.train)) // (WINDOWS * LENGTH)

    @property
    def first(self) -> tuple[tuple, tuple]:
        return next(self.batches(1, 0))

    def batches(self, epochs: int, seed: int) -> Iterator[tuple[tuple, tuple]]:
        """Random windows with as many bytes per epoch as the text; they depend only on the seed."""
        rng = np.random.default_rng(seed)
        for _ in range(epochs * self.steps_per_epoch):
            yield _windows(self.train, WINDOWS, rng)


def text() -> Text:
    """The descriptions of scikit-learn's data sets. The last tenth of each is for the test."""
    texts = masked_text.documents()
    held_out = [text[len(text) - len(text) // 10 :] for text in texts]
    test = _windows(held_out, TEST_WINDOWS, np.random.default_rng(0))
    return Text([text[: len(text) - len(text) // 10] for text in texts], *test)


def _windows(texts, size: int, rng) -> tuple[tuple, tuple]:
    made = masked_text.batch(texts, size, LENGTH, rng)
    return (made.tokens, made.segment_ids), (made.targets, made.chosen)
