"""Packing: `packing` itself; packed rows give what each sequence gives by itself."""

import functools
import itertools
import json

import numpy as np
import pytest

from jax_fastops.models import packing


def sequences(n: int, longest: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 40, size, np.int32) for size in rng.integers(1, longest + 1, n)]


@pytest.mark.parametrize("max_segments", [None, 2])
@pytest.mark.parametrize("rows", [None, 4, 60])
def test_rows(rows, max_segments):
    given = sequences(50, 12)
    packed = packing.pack(given, 16, rows=rows, max_segments=max_segments, padding=99)
    again = packing.pack(given, 16, rows=rows, max_segments=max_segments, padding=99)
    for one, other in zip(packed, again, strict=True):
        assert one.dtype == np.int32 and (one == other).all()
    placed = packed.rows >= 0
    assert placed.all() or rows == 4
    assert rows is None or len(packed.tokens) == rows
    if max_segments is not None:
        assert packed.segment_ids.max() == max_segments
    assert packed.fill == packed.lengths[placed].sum() / packed.tokens.size
    padding = packed.segment_ids == 0
    assert (packed.tokens[padding] == 99).all() and (packed.positions[padding] == 0).all()
    for index, each in enumerate(given):
        if not placed[index]:
            assert packed.segments[index] == 0 and packed.starts[index] == -1
            continue
        start = packed.starts[index]
        part = packed.rows[index], slice(start, start + len(each))
        assert (packed.tokens[part] == each).all()
        assert (packed.segment_ids[part] == packed.segments[index]).all()
        assert (packed.positions[part] == np.arange(len(each))).all()
    for ids in packed.segment_ids:  # 1, 2, ..., then padding
        assert [key for key, _ in itertools.groupby(ids) if key] == list(range(1, ids.max() + 1))
        assert (np.diff(np.flatnonzero(ids)) == 1).all()


def test_first_fit_decreasing():
    packed = packing.pack([np.ones(n, int) for n in (2, 5, 4, 3, 1, 5)], 8)
    # 5 and 5 open two rows, 4 the third; 3 fits in the first, 2 in the second, 1 there too.
    assert packed.rows.tolist() == [1, 0, 2, 0, 1, 1]
    assert packed.starts.tolist() == [5, 0, 0, 5, 7, 0]


def test_unpack():
    given = sequences(9, 7)
    packed = packing.pack(given, 8, rows=3)
    features = [np.stack([each * 0.5, each * 2.0], -1) for each in given]
    outputs = packing.place(packed, features, padding=np.nan)
    assert outputs.shape == (3, 8, 2) and np.isnan(outputs[packed.segment_ids == 0]).all()
    parts = packing.unpack(packed, outputs)
    assert any(part is None for part in parts)
    for part, row, feature in zip(parts, packed.rows, features, strict=True):
        assert (part is None) == (row < 0)
        assert part is None or (part == feature).all()


def test_no_sequences():
    packed = packing.pack([], 8)
    assert packed.tokens.shape == (0, 8) and packed.fill == 0
    assert packing.unpack(packed, packed.tokens) == []
    assert packing.pack([], 8, rows=2).tokens.tolist() == [[0] * 8] * 2
    assert list(packing.batches([], 8, 2)) == []


@pytest.mark.parametrize("max_segments", [None, 2])
def test_batches(max_segments):
    """Every sequence is in one batch. All batches have one shape, and most are full."""
    given = sequences(300, 12)
    found = list(packing.batches(iter(given), 16, 4, max_segments=max_segments))
    assert {batch.tokens.shape for batch in found} == {(4, 16)}
    parts = [part for batch in found for part in packing.unpack(batch, batch.tokens)]
    assert sorted(map(str, parts)) == sorted(map(str, given))
    if max_segments is None:
        assert np.mean([batch.fill for batch in found[:-4]]) > 0.97
    else:
        assert max(batch.segment_ids.max() for batch in found) == max_segments


class Source:
    """An iterator of sequences with a state, as those of Grain."""

    def __init__(self, count: int):
        self.given, self.place = sequences(count, 12), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(self.given):
            raise StopIteration
        self.place += 1
        return self.given[self.place - 1]

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


def test_state():
    """A state of any batch, through JSON, continues with the same batches."""
    whole, states = [], []
    stream = packing.batches(Source(100), 16, 4, max_segments=3)
    for batch in stream:
        whole.append(batch)
        states.append(json.dumps(stream.get_state()))
    for done in (1, len(whole) - 2):
        other = packing.batches(Source(100), 16, 4, max_segments=3)
        other.set_state(json.loads(states[done - 1]))
        for one, expected in zip(other, whole[done:], strict=True):
            assert all((a == b).all() for a, b in zip(one, expected, strict=True))
    with pytest.raises(TypeError, match="of type list_iterator; it must have get_state"):
        packing.batches([[1]], 4, 1).get_state()


def test_short_sequences_do_not_wait_forever():
    stream = itertools.chain([[1]], itertools.repeat([2] * 8))
    first = next(packing.batches(stream, 8, 2))
    assert 1 in first.tokens


def test_function_of_a_batch():
    """`pack` as the `batch_fn` of a dataset: elements to one batch."""
    batch = functools.partial(packing.pack, length=8, rows=4, max_segments=2)
    assert batch([[1, 2], [3]]).tokens.shape == (4, 8)


ONE = packing.pack([[1]], 4)


@pytest.mark.parametrize(
    "function, args, options, error, message",
    [
        (packing.pack, ([[1], []], 4), {}, ValueError, r"sequence 1 has shape \(0,\)"),
        (packing.pack, ([[1] * 5], 4), {}, ValueError, "of 1 to 4 tokens"),
        (packing.pack, ([[[1]]], 4), {}, ValueError, r"sequence 0 has shape \(1, 1\)"),
        (packing.pack, ([[1.0]], 4), {}, TypeError, "sequence 0 is of float64"),
        (packing.pack, ([], 0), {}, ValueError, "length is 0; it must be 1 or more"),
        (packing.pack, ([], 4), dict(rows=0), ValueError, "rows is 0"),
        (packing.pack, ([], 4), dict(max_segments=1.5), TypeError, "max_segments is 1.5"),
        (packing.pack, ([], 4), dict(padding=0.5), TypeError, "padding is 0.5"),
        (packing.batches, ([], 4, None), {}, TypeError, "rows is None"),
        (packing.place, (ONE, []), {}, ValueError, "there are 0 values, for 1 sequences"),
        (packing.place, (ONE, [[1, 2]]), {}, ValueError, r"values\[0\] has shape \(2,\)"),
        (packing.unpack, (ONE, np.ones((1, 3))), {}, ValueError, r"must begin with \(1, 4\)"),
    ],
)
def test_errors(function, args, options, error, message):
    with pytest.raises(error, match=message):
        function(*args, **options)


def test_errors_of_a_stream():
    stream = packing.batches([[1.0]], 4, 1)
    with pytest.raises(TypeError, match="sequence 0 is of float64"):
        next(stream)
