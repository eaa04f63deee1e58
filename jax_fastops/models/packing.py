"""Packing: several short sequences in one row of a batch, so that less of it is padding.

``pack`` puts sequences into rows on the host, in NumPy. ``models.decoder`` and ``models.bert`` take
its ``segment_ids``, so that no token sees another sequence. ``unpack`` gives the outputs of each
sequence::

    packed = packing.pack(sequences, 512)
    hidden = decoder.apply(params, packed.tokens, config, segment_ids=packed.segment_ids)
    outputs = packing.unpack(packed, hidden)

A sequence goes to the first row with enough room. Longer sequences are placed before shorter ones
(first-fit decreasing), and sequences of the same length in the order of the input. The result
depends on nothing else.

An argument of another type or dtype raises ``TypeError``, another shape or value ``ValueError``.
The examples need ``from jax_fastops.models import packing``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jax_fastops.models._checks import Checks

__all__ = ["Batches", "Packed", "batches", "pack", "place", "unpack"]

_CHECK = Checks("packing")

# More sequences to choose from give fuller rows. Above 4 batches of them, little is gained.
_BATCHES_READ_AHEAD = 4


class Packed(NamedTuple):
    """Rows of packed sequences, and where each sequence is. All arrays are int32.

    Attributes:
      tokens: ``[rows, length]``.
      segment_ids: ``[rows, length]``: 1 for the tokens of the first sequence of a row, 2 for the
        second one, and so on. 0 is padding.
      positions: ``[rows, length]``: counted from 0 in each sequence. 0 for padding.
      rows: ``[n]``: the row of each sequence, or -1 if it was not placed.
      starts: ``[n]``: where in the row it starts, or -1.
      segments: ``[n]``: its segment id, or 0.
      lengths: ``[n]``: how many tokens it has.

    Example:
      >>> packed = packing.pack([[7, 8], [1, 2, 3], [9]], 4)
      >>> packed.tokens.tolist(), packed.rows.tolist(), packed.fill
      ([[1, 2, 3, 9], [7, 8, 0, 0]], [1, 0, 0], 0.75)
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    segments: np.ndarray
    lengths: np.ndarray

    @property
    def fill(self) -> float:
        """The fraction of ``tokens`` that is not padding. 0 without rows."""
        return float((self.segment_ids > 0).sum() / max(self.segment_ids.size, 1))


def pack(
    sequences: Iterable[ArrayLike],
    length: int,
    *,
    rows: int | None = None,
    max_segments: int | None = None,
    padding: int = 0,
) -> Packed:
    """Packs sequences into rows, by first-fit decreasing.

    With Grain, it is the function of a batch:
    ``dataset.batch(40, batch_fn=functools.partial(packing.pack, length=512, rows=24))``. Sequences
    that are not placed are lost there, so there must be enough rows. :func:`batches` loses none.

    Args:
      sequences: one-dimensional integers each, from 1 to ``length`` of them.
      length: the length of a row.
      rows: the number of rows. A sequence for which they have no room is not placed. ``None``: as
        many rows as are needed.
      max_segments: the largest number of sequences in a row. ``None``: any number.
      padding: the token after the last sequence of a row.

    Returns:
      A :class:`Packed`. Its ``rows`` are -1 for the sequences that were not placed.

    Raises:
      TypeError: a sequence has no integers, or another argument is not an integer.
      ValueError: a sequence has another number of dimensions than 1, no token, or more than
        ``length``; or ``length``, ``rows`` or ``max_segments`` is less than 1.

    Example:
      >>> packed = packing.pack([[1, 2], [3, 4, 5], [6]], 3, rows=1)
      >>> packed.tokens.tolist(), packed.rows.tolist()
      ([[3, 4, 5]], [-1, 0, -1])
    """
    length, rows, max_segments = _checked(length, rows, max_segments, padding)
    given = [_sequence(each, length, index) for index, each in enumerate(sequences)]
    lengths = _lengths(given)
    row_of = _first_fit(lengths, _decreasing(lengths), length, rows, max_segments)
    return _packed(given, row_of, length, rows, padding)


def batches(
    sequences: Iterable[ArrayLike],
    length: int,
    rows: int,
    *,
    max_segments: int | None = None,
    padding: int = 0,
) -> Batches:
    """Packs a stream of sequences into batches of the same shape, and leaves no sequence out.

    It reads ahead by a few batches, packs what it has read by first-fit decreasing, and keeps the
    sequences that did not fit for the next batch. The one that has waited longest is placed first.

    With Grain, ``dataset.to_iter_dataset().pipe(packing.batches, 512, 16)`` packs the elements of a
    dataset.

    Args:
      sequences: as in :func:`pack`. May be endless.
      length: the length of a row.
      rows: the number of rows of each batch.
      max_segments, padding: as in :func:`pack`.

    Returns:
      An iterator of :class:`Packed`, whose ``rows``, ``starts``, ``segments`` and ``lengths`` are
      of the sequences in this batch, in the order in which they were read. :class:`Batches` says
      how a training continues in the middle of it.

    Raises:
      TypeError, ValueError: as :func:`pack`. For a sequence, when it is read.

    Example:
      >>> stream = ([token] * 3 for token in range(4))
      >>> [batch.tokens.tolist() for batch in packing.batches(stream, length=6, rows=1)]
      [[[0, 0, 0, 1, 1, 1]], [[2, 2, 2, 3, 3, 3]]]
    """
    rows = _CHECK.integer("rows", rows, 1)
    length, _, max_segments = _checked(length, rows, max_segments, padding)
    return Batches(iter(sequences), length, rows, max_segments, padding)


class Batches(Iterator[Packed]):
    """The iterator that :func:`batches` returns, with a state as Grain's iterators have it.

    The state has that of the iterator of the sequences, and the sequences that were read and are in
    no batch yet. After ``set_state``, the batches are those after ``get_state``.

    Example:
      >>> class Source:
      ...     def __init__(self):
      ...         self.count = 0
      ...     def __next__(self):
      ...         self.count += 1
      ...         return [self.count] * 3
      ...     def __iter__(self):
      ...         return self
      ...     def get_state(self):
      ...         return {"count": self.count}
      ...     def set_state(self, state):
      ...         self.count = state["count"]
      >>> stream, other = (packing.batches(Source(), length=7, rows=1) for _ in range(2))
      >>> before = next(stream)
      >>> other.set_state(stream.get_state())
      >>> bool((next(other).tokens == next(stream).tokens).all())
      True
    """

    def __init__(
        self,
        source: Iterator[ArrayLike],
        length: int,
        rows: int,
        max_segments: int | None,
        padding: int,
    ) -> None:
        self._source: Any = source
        self._length, self._rows = length, rows
        self._max_segments, self._padding = max_segments, padding
        self._waiting: list[np.ndarray] = []
        self._read = 0

    def get_state(self) -> dict[str, Any]:
        """What :meth:`set_state` takes: a dictionary for JSON, if the state of the sequences is.

        Raises:
          TypeError: the iterator of the sequences has no ``get_state``.
        """
        if not hasattr(self._source, "get_state"):
            kind = type(self._source).__name__
            raise TypeError(
                f"packing: the iterator of sequences is of type {kind}; it must have get_state and "
                "set_state, as those of Grain have"
            )
        waiting = [each.tolist() for each in self._waiting]
        return {"sequences": self._source.get_state(), "waiting": waiting, "read": self._read}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the batch after which :meth:`get_state` gave this state."""
        self._source.set_state(state["sequences"])
        self._waiting = [np.array(each, np.int32) for each in state["waiting"]]
        self._read = state["read"]

    def __next__(self) -> Packed:
        tokens = sum(each.size for each in self._waiting)
        while tokens < _BATCHES_READ_AHEAD * self._rows * self._length:
            try:
                value = next(self._source)
            except StopIteration:
                break
            self._read += 1
            self._waiting.append(_sequence(value, self._length, self._read - 1))
            tokens += self._waiting[-1].size
        if not self._waiting:
            raise StopIteration
        lengths = _lengths(self._waiting)
        order = _decreasing(lengths)
        order = np.concatenate([[0], order[order != 0]])  # the first has waited longest
        row_of = _first_fit(lengths, order, self._length, self._rows, self._max_segments)
        pairs = list(zip(self._waiting, row_of, strict=True))
        self._waiting = [each for each, row in pairs if row < 0]
        chosen = [each for each, row in pairs if row >= 0]
        return _packed(chosen, row_of[row_of >= 0], self._length, self._rows, self._padding)


def place(packed: Packed, values: Sequence[Any], padding: Any = 0) -> np.ndarray:
    """Puts other data of each token where its token is: labels, token types, features.

    Args:
      packed: the result of :func:`pack` for the same sequences.
      values: for each sequence an array ``[tokens, ...]``, all with the same trailing shape.
      padding: the value elsewhere.

    Returns:
      An array ``[rows, length, ...]`` with the dtype of the values.

    Raises:
      ValueError: there is another number of values than of sequences, or a shape does not fit.

    Example:
      >>> packed = packing.pack([[7, 8], [1, 2, 3]], 5)
      >>> packing.place(packed, [[0.5, 1.5], [2.0, 3.0, 4.0]], padding=-1.0).tolist()
      [[2.0, 3.0, 4.0, 0.5, 1.5]]
    """
    arrays = [np.asarray(each) for each in values]
    if len(arrays) != len(packed.lengths):
        raise ValueError(
            f"packing: there are {len(arrays)} values, for {len(packed.lengths)} sequences"
        )
    trailing = arrays[0].shape[1:] if arrays else ()
    for index, (each, count) in enumerate(zip(arrays, packed.lengths, strict=True)):
        _CHECK.shape(f"values[{index}]", each, "its sequence", (int(count), *trailing))
    dtype = np.result_type(*arrays) if arrays else np.asarray(padding).dtype
    result = np.full((*packed.tokens.shape, *trailing), padding, dtype)
    for where, each in zip(_places(packed), arrays, strict=True):
        if where is not None:
            result[where] = each
    return result


def unpack(packed: Packed, outputs: Any) -> list[np.ndarray | None]:
    """The part of each sequence of what was computed from rows: the inverse of :func:`place`.

    Outputs by segment, such as BERT's pooled ones, are ``pooled[packed.rows, packed.segments - 1]``
    if all sequences are placed.

    Args:
      packed: the result of :func:`pack`.
      outputs: an array ``[rows, length, ...]`` of NumPy or JAX.

    Returns:
      For each sequence an array ``[tokens, ...]``, or ``None`` if it was not placed.

    Raises:
      ValueError: the first two dimensions of ``outputs`` are not those of ``packed.tokens``.

    Example:
      >>> packed = packing.pack([[7, 8], [1, 2, 3]], 5)
      >>> [part.tolist() for part in packing.unpack(packed, packed.tokens * 10)]
      [[70, 80], [10, 20, 30]]
    """
    outputs = np.asarray(outputs)
    if outputs.shape[:2] != packed.tokens.shape:
        raise ValueError(
            f"packing: outputs has shape {outputs.shape}; it must begin with {packed.tokens.shape}"
        )
    return [None if where is None else outputs[where] for where in _places(packed)]


def _checked(length, rows, max_segments, padding) -> tuple[int, Any, int | None]:
    if _CHECK.integer("padding", padding, -(2**31)) >= 2**31:
        raise ValueError(f"packing: padding is {padding}; it must fit into int32")
    length = _CHECK.integer("length", length, 1)
    rows = None if rows is None else _CHECK.integer("rows", rows, 1)
    if max_segments is not None:
        max_segments = _CHECK.integer("max_segments", max_segments, 1)
    return length, rows, max_segments


def _sequence(value, length: int, index: int) -> np.ndarray:
    """The sequence as an int32 array of at most ``length`` tokens."""
    array = np.asarray(value)
    if array.ndim != 1 or not 1 <= array.size <= length:
        raise ValueError(
            f"packing: sequence {index} has shape {array.shape}; it must have one dimension, of 1 "
            f"to {length} tokens"
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"packing: sequence {index} is of {array.dtype}; it must be of integers")
    if array.dtype.itemsize >= 4 and not (array.astype(np.int32) == array).all():
        raise ValueError(f"packing: sequence {index} has tokens that do not fit into int32")
    return array.astype(np.int32)


def _lengths(sequences: list[np.ndarray]) -> np.ndarray:
    return np.array([each.size for each in sequences], np.int32)


def _decreasing(lengths: np.ndarray) -> np.ndarray:
    """The indices of the sequences, longer ones first. Equal ones keep their order."""
    return np.argsort(-lengths, kind="stable")


def _first_fit(lengths, order, length: int, rows: int | None, max_segments: int | None):
    """The row of each sequence, or -1. They are placed in the given order."""
    count = len(lengths) if rows is None else min(rows, len(lengths))
    free = np.full(count, length)
    segments = np.zeros(count, int)
    row_of = np.full(len(lengths), -1, np.int32)
    used = 0
    for index in order:
        fits = free[: used + 1] >= lengths[index]
        row = int(fits.argmax())
        if not fits[row]:
            continue
        used = max(used, row + 1)
        row_of[index] = row
        free[row] -= lengths[index]
        segments[row] += 1
        if segments[row] == max_segments:
            free[row] = 0
    return row_of


def _packed(sequences: list[np.ndarray], row_of, length: int, rows, padding) -> Packed:
    """The rows with these sequences. Within a row, longer ones come first."""
    lengths = _lengths(sequences)
    count = int(row_of.max(initial=-1)) + 1 if rows is None else rows
    ends, segments = np.zeros(count, np.int32), np.zeros(count, np.int32)
    starts, ids = np.full_like(lengths, -1), np.zeros_like(lengths)
    for index in _decreasing(lengths):
        if (row := row_of[index]) >= 0:
            segments[row] += 1
            starts[index], ids[index] = ends[row], segments[row]
            ends[row] += lengths[index]
    # `place` reads only the shape of the tokens.
    empty = np.zeros((count, length), np.int32)
    packed = Packed(empty, empty, empty, row_of, starts, ids, lengths)
    if not sequences:
        return packed._replace(tokens=empty + np.int32(padding))
    return packed._replace(
        tokens=place(packed, sequences, padding),
        segment_ids=place(packed, list(map(np.full_like, sequences, ids))),
        positions=place(packed, [np.arange(n, dtype=np.int32) for n in lengths]),
    )


def _places(packed: Packed) -> list[tuple[int, slice] | None]:
    """Where each sequence is, as an index into the rows."""
    each = zip(packed.rows.tolist(), packed.starts.tolist(), packed.lengths.tolist(), strict=True)
    return [None if row < 0 else (row, slice(start, start + n)) for row, start, n in each]
