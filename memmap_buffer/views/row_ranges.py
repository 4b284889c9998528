"""`RowRanges`: ranges of consecutive rows, one for each item of a batch, and their copy: windows, sequences, episodes.

`BatchBuilder` makes them, `Gather` and `Reach` copy them, in one of two ways: by one index for the whole batch, if it
is small and most items have no padding; else item by item, as slices of bytes.
"""

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

LARGE = 1 << 20  # bytes from which memory of the pool is worth a call for each item
Item: TypeAlias = tuple[int, int, int, int]  # the number of an item, its row, lead and stop, see `RowRanges`


class Source(NamedTuple):
    """The memory that rows are copied from.

    Attributes:
        origin: uint8 array; row r begins at byte r * scale of it.
        scale: the width of a row in bytes, or 1 where rows are given by their bytes.
        pieces: the ranges as copied by one index, (B,) items of all bytes of K rows, wrong for the items that
            `RowRanges.cut` lists; None: none are copied yet.
    """

    origin: Array
    scale: int
    pieces: Array | None


class RowRanges:
    """Rows to copy: item b has K entries. Entries lead[b] … stop[b] - 1 exist: rows row[b], row[b] + 1, …

    Args:
        row, lead, stop: (B,) int64, 0 ≤ lead ≤ stop ≤ K; if an item has no entry, `row` is the nearest row that exists.
        steps: K.
        padding: the value of entries that do not exist: "zero", "edge" (the nearest one) or "default".
    """

    def __init__(self, row: IntArray, lead: IntArray, stop: IntArray, steps: int, padding: str) -> None:
        self.row, self.lead, self.stop, self.steps, self.padding = row, lead, stop, steps, padding

    @property
    def shape(self) -> tuple[int, int]:
        """(B, K), the shape of the same rows as an index array."""
        return len(self.row), self.steps

    def __getitem__(self, chosen: Any) -> RowRanges:
        """The ranges of the `chosen` items."""
        return RowRanges(self.row[chosen], self.lead[chosen], self.stop[chosen], self.steps, self.padding)

    def rows(self) -> tuple[IntArray, IntArray]:
        """(first rows, ends) of the ranges."""
        return self.row, self.row + np.maximum(self.stop - self.lead, 1)

    def exist(self) -> npt.NDArray[np.bool_]:
        """(B, K) which entries exist."""
        steps = np.arange(self.steps, dtype=np.int32)  # enough for any batch, and compared twice as fast as int64
        mask = steps < self.stop.astype(np.int32)[:, None]
        if self.lead.any():
            mask &= steps >= self.lead.astype(np.int32)[:, None]
        return np.asarray(mask)

    def copy(self, storage: Storage, name: str, pool: Pool) -> Array:
        """Copy the rows of a field of one folder: (B, K, *field)."""
        rows, field = storage.maps.rows[name], storage.layout.schema.fields[name].in_file
        width, cut = field.itemsize, self.cut
        pieces = None
        if cut is not None and len(self.row) * self.steps * width < LARGE:
            pieces = storage.slices_of(name, self.steps)[cut[0]]
            if not cut[1]:
                return pieces.view(field.storage).reshape(len(self.row), self.steps, *field.shape)
        return self.copied(Source(rows.reshape(-1).view(np.uint8), width, pieces), field, pool)

    def copied(self, source: Source, field: Field, pool: Pool) -> Array:
        """Copy the rows out of any memory: (B, K, *field)."""
        width, shape = field.itemsize, (len(self.row), self.steps, *field.shape)
        if source.pieces is None:
            out, items = pool.empty(shape, field.storage), self._items
        else:
            out, items = source.pieces.view(field.storage).reshape(shape), self.cut[1]  # type: ignore[index]
        target = out.reshape(-1).view(np.uint8)
        self._copy_each(source, target, width, items)
        if self.padding != "zero":
            self._pad(source, target.reshape(len(out), self.steps, width), items, field.fill)
        return out

    def _copy_each(self, source: Source, target: Array, width: int, items: list[Item]) -> None:
        """Copy items one by one, as slices of bytes: the fastest copy that numpy has."""
        (origin, scale, _), size, zero = source, self.steps * width, self.padding == "zero"
        for b, row, lead, stop in items:
            item_begin, first = b * size, row * scale
            begin, end = item_begin + lead * width, item_begin + stop * width
            target[begin:end] = origin[first : first + (stop - lead) * width]
            if zero and lead:
                target[item_begin:begin] = 0
            if zero and stop < self.steps:
                target[end : item_begin + size] = 0

    def _pad(self, source: Source, cells: Array, items: list[Item], fill: Array) -> None:
        """Fill the entries that do not exist. Args: cells: (B, K, width) bytes; fill: the value for "default"."""
        before = after = np.frombuffer(fill.tobytes(), np.uint8)
        for b, row, lead, stop in items:
            if self.padding == "edge":
                first, width = row * source.scale, cells.shape[2]
                last = first + max(stop - lead - 1, 0) * width
                before, after = source.origin[first : first + width], source.origin[last : last + width]
            if lead:
                cells[b, :lead] = before
            if stop < self.steps:
                cells[b, stop:] = after

    @cached_property
    def _items(self) -> list[Item]:
        """All items, as tuples."""
        return list(zip(range(len(self.row)), self.row.tolist(), self.lead.tolist(), self.stop.tolist(), strict=True))

    @cached_property
    def cut(self) -> tuple[IntArray, list[Item]] | None:
        """How to copy all ranges by one index; None if most items have an entry that does not exist.

        Returns: (the first row of each item (B,), the items with an entry that does not exist). The latter have the
            first row of another item, as theirs may be too near the end of the file; they are copied again one by one.
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
