"""scikit-learn's handwritten digits: 1797 real images of 8 x 8 pixels, shipped with the library."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

FEATURES, CLASSES = 64, 10
BATCH = 128


@dataclass(frozen=True)
class Digits:
    """Images as standardised float32 rows, labels as int32."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train_x) // BATCH

    def batches(self, epochs: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Full batches, in an order that depends on the seed alone."""
        rng = np.random.default_rng(seed)
        for _ in range(epochs):
            order = rng.permutation(len(self.train_x))
            for step in range(self.steps_per_epoch):
                rows = order[step * BATCH : (step + 1) * BATCH]
                yield self.train_x[rows], self.train_y[rows]


def load() -> Digits:
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
