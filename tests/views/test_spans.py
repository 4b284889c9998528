"""Rows of many arrays taken by their addresses, against each array's own `take`; and that no address leads out."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memmap_buffer.views import spans
from memmap_buffer.views.spans import LARGEST, Span

DTYPES = ["u1", "?", "<f2", "<i4", "<f8", "<c16", "<U3", "S5"]
ANY = st.integers(-(2**63), 2**63 - 1)  # as a record may be whoever's


@st.composite
def taken(draw):
    """(arrays, number (B,), rows (B,) or (B, K)), the rows near the arrays or anywhere, in any order of memory."""
    dtype, shape = np.dtype(draw(st.sampled_from(DTYPES))), tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    arrays = []
    for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)):
        values = rng.integers(0, 256, (length, *shape, dtype.itemsize), np.uint8)
        arrays.append((values % 2 if dtype.kind in "bU" else values).view(dtype)[..., 0])
    count = draw(st.integers(0, 6))
    number = draw(st.lists(st.integers(0, len(arrays) - 1), min_size=count, max_size=count))
    lead = draw(st.sampled_from([(count,), (count, 1), (count, 4), (count, 0)]))
    size = int(np.prod(lead))
    flat = draw(st.lists(st.integers(-2, 10) | ANY, min_size=size, max_size=size))
    rows = np.array(flat, np.int64).reshape(lead)
    return arrays, np.array(number, np.int64), np.asfortranarray(rows) if draw(st.booleans()) else rows


def nearest(arrays, number, rows):
    """The slow definition."""
    out = np.empty((*rows.shape, *arrays[0].shape[1:]), arrays[0].dtype)
    for b, array in enumerate(arrays[n] for n in number):
        out[b] = array[np.clip(rows[b], 0, len(array) - 1)]
    return out


@given(taken())
def test_rows_are_those_of_their_arrays_and_the_nearest_where_there_is_none(example):
    arrays, number, rows = example
    got, expected = Span(arrays).take(number, rows), nearest(arrays, number, rows)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()
    assert got.flags.c_contiguous
    first = Span(arrays).first(number)
    assert first.tobytes() == nearest(arrays, number, np.zeros(len(number), np.int64)).tobytes()
    assert not any(np.shares_memory(got, array) for array in arrays)


class Watched:
    """Memory, of which is noted what is looked at."""

    def __init__(self, memory):
        self.memory, self.looked = memory, []

    def __getitem__(self, address):
        self.looked.append(address + spans._LOWEST)
        return self.memory[address]


@given(taken())
def test_every_byte_that_is_looked_at_is_of_the_array_that_was_named(example):
    arrays, number, rows = example
    span, size = Span(arrays), arrays[0].itemsize * int(np.prod(arrays[0].shape[1:]))
    watched = Watched(spans._memory(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "_memory", lambda _: watched)
        span.take(number, rows)
        span.first(number)
    assert (watched.looked[1] == [arrays[n].ctypes.data for n in number]).all()
    for n, looked in zip(number, watched.looked[0], strict=True):
        start = arrays[n].ctypes.data
        assert ((looked >= start) & (looked + size <= start + arrays[n].nbytes)).all()


@given(taken(), st.data())
def test_a_span_with_others_in_the_place_of_some_is_another_and_itself_stays(example, data):
    arrays, number, rows = example
    span = Span(arrays)
    places = data.draw(st.lists(st.integers(0, len(arrays) - 1), unique=True))
    others = {place: np.concatenate([arrays[place][::-1]] * 2) for place in places}
    other = span.replaced(others)
    now = [others.get(n, array) for n, array in enumerate(arrays)]
    assert other.take(number, rows).tobytes() == nearest(now, number, rows).tobytes()
    assert span.take(number, rows).tobytes() == nearest(arrays, number, rows).tobytes()


def test_arrays_live_as_long_as_the_last_span_that_has_them():
    array = np.arange(1 << 20)
    death, span = weakref.ref(array), Span([array, np.zeros(1, np.int64)])
    both = span, span.replaced({1: np.ones(1, np.int64)})
    del array, span
    gc.collect()
    assert both[1].take(np.array([0, 1]), np.array([77, 5])).tolist() == [77, 1]
    both = both[0].replaced({0: np.ones(1, np.int64)})
    assert death() is None
    assert both.take(np.array([0]), np.array([77])).tolist() == [1]


@pytest.mark.parametrize(
    "other",
    [np.zeros((2, 3), "<i4"), np.zeros((2, 4), "<f4"), np.zeros((0, 3), "<f4"), np.zeros((2, 6), "<f4")[:, ::2]],
    ids=["dtype", "row", "empty", "order"],
)
def test_an_array_that_is_not_like_the_others_is_refused_at_run_time(other):
    alike = np.zeros((5, 3), "<f4")
    with pytest.raises(ValueError, match=r"array 1 of a span has .* expected float32 and rows of"):
        Span([alike, other])
    with pytest.raises(ValueError, match=r"array 0 of a span has .* expected float32 and rows of"):
        Span([alike]).replaced({0: other})


def test_a_number_that_no_array_has_is_refused():
    with pytest.raises(IndexError, match="out of bounds"):
        Span([np.zeros(3)]).take(np.array([1]), np.array([0]))


def test_every_address_of_a_64_bit_system_is_covered_and_none_can_be_written_to():
    for size in (1, 7, LARGEST):
        memory = spans._memory(size)
        assert len(memory) > 2**51  # arm64 gives a program addresses below 2^48, or 2^52
        assert not memory.flags.writeable


@pytest.mark.parametrize(("row", "fits"), [(0, False), (1, True), (LARGEST, True), (LARGEST + 1, False)])
def test_small_rows_are_taken_so(row, fits):
    assert Span.fits(np.empty((3, row), np.uint8)) == fits
