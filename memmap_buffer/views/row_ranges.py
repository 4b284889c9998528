"""Copying ranges of consecutive rows, one for each item of a batch: windows, sequences, whole episodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import Array
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import bytes_at, memory
from memmap_buffer.schema import Field
from memmap_buffer.views.memory_pool import Pool

LARGE = 1 << 20  # bytes from which memory that is used again outweighs a call for each item
Item: TypeAlias = tuple[int, int, int, int]  # number, row, lead, stop


class Source(NamedTuple):
    """Where rows are copied from.

    Attributes:
        origin: bytes.
        scale: row r begins at byte r * scale of it.
        pieces: copies as many rows as an item has from each of some on.
    """

    origin: Array
    scale: int
    pieces: Callable[[IntArray], Array]


class Further(NamedTuple):
    """Ranges that items have besides their first: (P,) the number of the item, and what a range is, see `RowRanges`."""

    item: IntArray
    row: IntArray
    lead: IntArray
    stop: IntArray

    def among(self, chosen: Any, count: int) -> Further:
        """Those of some of `count` items, by their new numbers."""
        place = np.full(count, -1)
        items = np.arange(count)[chosen]
        place[items] = np.arange(len(items))
        item = place[self.item]
        kept = item >= 0
        return Further(item[kept], self.row[kept], self.lead[kept], self.stop[kept])


class RowRanges:
    """Rows to copy: item b has K of them; those from `lead[b]` until `stop[b]` exist, and lie from row `row[b]` on.

    Args:
        row, lead, stop: (B,) int64, 0 ≤ lead ≤ stop ≤ K; where none exists, `row` is the nearest that does.
        steps: K.
        padding: what stands where no row exists: "zero", "edge" (the nearest that does) or "default".
        further: ranges that stand in the place of padding behind the first, or None.
    """

    def __init__(
        self, row: IntArray, lead: IntArray, stop: IntArray, steps: int, padding: str, further: Further | None = None
    ) -> None:
        self.row, self.lead, self.stop, self.steps, self.padding = row, lead, stop, steps, padding
        self.further = further

    def __getitem__(self, chosen: Any) -> RowRanges:
        """Some of the items."""
        further = None if self.further is None else self.further.among(chosen, len(self.row))
        return RowRanges(self.row[chosen], self.lead[chosen], self.stop[chosen], self.steps, self.padding, further)

    def rows(self) -> tuple[IntArray, IntArray]:
        """(first rows, ends) of the ranges, as many of each item; one of fewer has its first again."""
        row, stop = self.row, self.row + np.maximum(self.stop - self.lead, 1)
        if self.further is None or not len(self.further.item):
            return row, stop
        item, begin, lead, end = self.further
        place = 1 + np.arange(len(item)) - np.searchsorted(item, item)
        rows = np.repeat(np.stack([row, stop])[..., None], place.max() + 1, axis=2)
        rows[:, item, place] = begin, begin + end - lead
        return rows[0].ravel(), rows[1].ravel()

    def exist(self) -> npt.NDArray[np.bool_]:
        """(B, K) which rows exist."""
        steps = np.arange(self.steps, dtype=np.int32)  # no batch has more, and they compare at twice the speed
        found = steps < self.stop.astype(np.int32)[:, None]
        if self.lead.any():
            found &= steps >= self.lead.astype(np.int32)[:, None]
        return np.asarray(found)

    def copy(self, storage: Storage, name: str, pool: Pool) -> Array:
        """Copy them out of a field's rows: (B, K, *field)."""
        rows = storage.maps.rows[name]
        width = rows.itemsize * math.prod(rows.shape[1:])
        source = Source(rows.reshape(-1).view(np.uint8), width, partial(_slices, storage, name, self.steps))
        return self._copied(source, storage.layout.schema.fields[name].in_file, pool)

    def copy_from(self, begin: IntArray, field: Field, pool: Pool) -> Array:
        """The same where each item's rows of a field lie somewhere in memory, from `begin` (B,) on."""
        width = field.itemsize
        further = self.further
        if further is not None:
            further = further._replace(row=begin[further.item] + width * further.row)
        there = RowRanges(begin + width * self.row, self.lead, self.stop, self.steps, self.padding, further)
        return there._copied(Source(memory(), 1, partial(bytes_at, width=self.steps * width)), field, pool)

    def _copied(self, source: Source, field: Field, pool: Pool) -> Array:
        width, shape = field.itemsize, (len(self.row), self.steps, *field.shape)
        large = math.prod(shape) * field.storage.itemsize >= LARGE
        if large or 2 * self._num_whole < max(1, len(self.row)):
            out, items = pool.empty(shape, field.storage), self._each
        else:  # one index for all; those of which some row does not exist are copied anew
            out, items = source.pieces(self._begin).view(field.storage).reshape(shape), self._cut
        target = out.reshape(-1).view(np.uint8)
        self._copy_each(source, target, width, items, zero=self.padding == "zero")
        if self.padding != "zero":
            self._pad(source, target.reshape(len(out), self.steps, width), width, items, field.fill)
        if self.further is not None:
            columns = (column.tolist() for column in self.further)
            self._copy_each(source, target, width, list(zip(*columns, strict=True)), zero=False)
        return out

    def _copy_each(self, source: Source, target: Array, width: int, items: list[Item], zero: bool) -> None:
        """Some items, as bytes: numpy copies and zeroes these with the least to think about."""
        (origin, scale, _), size = source, self.steps * width
        for b, row, lead, stop in items:
            at, first = b * size, row * scale
            begin, end = at + lead * width, at + stop * width
            target[begin:end] = origin[first : first + (stop - lead) * width]
            if zero and lead:
                target[at:begin] = 0
            if zero and stop < self.steps:
                target[end : at + size] = 0

    def _pad(self, source: Source, cells: Array, width: int, items: list[Item], fill: Array) -> None:
        """Fill what does not exist of some items: (B, K, width) bytes."""
        filled = np.frombuffer(fill.tobytes(), np.uint8)
        before = after = filled
        for b, row, lead, stop in items:
            if self.padding == "edge":
                first = row * source.scale
                last = first + max(stop - lead - 1, 0) * width
                before, after = source.origin[first : first + width], source.origin[last : last + width]
            if lead:
                cells[b, :lead] = before
            if stop < self.steps:
                cells[b, stop:] = after

    @cached_property
    def _whole(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.stop - self.lead == self.steps)

    @cached_property
    def _num_whole(self) -> int:
        return len(self.row) if self._is_whole else int(np.count_nonzero(self._whole))

    @cached_property
    def _is_whole(self) -> bool:
        """Whether every row exists."""
        return bool(self._whole.all())

    @cached_property
    def _each(self) -> list[Item]:
        return list(zip(range(len(self.row)), self.row.tolist(), self.lead.tolist(), self.stop.tolist(), strict=True))

    @cached_property
    def _cut(self) -> list[Item]:
        """The items of which some row does not exist."""
        if self._is_whole:
            return []
        cut = np.flatnonzero(~self._whole)
        columns = (values.take(cut).tolist() for values in (self.row, self.lead, self.stop))
        return list(zip(cut.tolist(), *columns, strict=True))

    @cached_property
    def _begin(self) -> IntArray:
        """The first row of each item; of one that is not whole, which is copied anew, that of another one."""
        return self.row if self._is_whole else np.where(self._whole, self.row, self.row[self._whole.argmax()])


def _slices(storage: Storage, name: str, steps: int, begin: IntArray) -> Array:
    pieces: Array = storage.slices_of(name, steps)[begin]
    return pieces
