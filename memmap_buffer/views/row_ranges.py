"""Copying ranges of consecutive rows, one for each item of a batch: windows, sequences, whole episodes."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import Array
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.schema import Field
from memmap_buffer.views.memory_pool import Pool

LARGE = 1 << 20  # bytes from which memory that is used again outweighs a call for each item
Item: TypeAlias = tuple[int, int, int, int]  # number, row, lead, stop


class Source(NamedTuple):
    """Where rows are copied from.

    Attributes:
        origin: bytes.
        scale: row r begins at byte r * scale of it.
        pieces: (B, K) rows that were copied by one index, as bytes, those of `RowRanges.cut` wrong; or None.
    """

    origin: Array
    scale: int
    pieces: Array | None


class Further(NamedTuple):
    """Ranges that items have besides their first: (P,) the number of the item, and what a range is, see `RowRanges`."""

    item: IntArray
    row: IntArray
    lead: IntArray
    stop: IntArray

    def among(self, chosen: Any, count: int) -> Further:
        """The ranges of some of `count` items, by their new numbers."""
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

    @property
    def shape(self) -> tuple[int, int]:
        """(B, K), as of rows by number."""
        return len(self.row), self.steps

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
        there = steps < self.stop.astype(np.int32)[:, None]
        if self.lead.any():
            there &= steps >= self.lead.astype(np.int32)[:, None]
        return np.asarray(there)

    def copy(self, storage: Storage, name: str, pool: Pool) -> Array:
        """Copy them out of a field's rows: (B, K, *field)."""
        rows, field = storage.maps.rows[name], storage.layout.schema.fields[name].in_file
        width, cut = field.itemsize, self.cut
        pieces = None
        if cut is not None and len(self.row) * self.steps * width < LARGE:
            pieces = storage.slices_of(name, self.steps)[cut[0]]
            if not cut[1] and self.further is None:
                return pieces.view(field.storage).reshape(len(self.row), self.steps, *field.shape)
        return self.copied(Source(rows.reshape(-1).view(np.uint8), width, pieces), field, pool)

    def moved(self, begin: IntArray, width: int) -> RowRanges:
        """The ranges by the bytes at which they lie, where rows of `width` bytes lie from `begin` (B,) on."""
        further = self.further
        if further is not None:
            further = further._replace(row=begin[further.item] + width * further.row)
        return RowRanges(begin + width * self.row, self.lead, self.stop, self.steps, self.padding, further)

    def copied(self, source: Source, field: Field, pool: Pool) -> Array:
        """The rows out of anywhere: (B, K, *field)."""
        width, shape = field.itemsize, (len(self.row), self.steps, *field.shape)
        if source.pieces is None:
            out, items = pool.empty(shape, field.storage), self._each
        else:
            out, items = source.pieces.view(field.storage).reshape(shape), self.cut[1]  # type: ignore[index]
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
    def _each(self) -> list[Item]:
        return list(zip(range(len(self.row)), self.row.tolist(), self.lead.tolist(), self.stop.tolist(), strict=True))

    @cached_property
    def cut(self) -> tuple[IntArray, list[Item]] | None:
        """(the first row of each item; those of which some row does not exist), to copy all by one index.

        The latter, which are copied anew, have the first row of another one there. None where they are most.
        """
        whole = self.stop - self.lead == self.steps
        cut = np.flatnonzero(~whole)
        if 2 * len(cut) > len(whole) or not len(whole):
            return None
        if not len(cut):
            return self.row, []
        begin = np.where(whole, self.row, self.row[whole.argmax()])
        items = zip(cut.tolist(), self.row[cut].tolist(), self.lead[cut].tolist(), self.stop[cut].tolist(), strict=True)
        return begin, list(items)
