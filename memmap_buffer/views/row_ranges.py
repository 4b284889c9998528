"""Copying slices of consecutive rows, one for each item of a batch: windows, sequences, whole episodes."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.views.memory_pool import Pool

LARGE = 1 << 20  # bytes from which memory that is used again outweighs a call for each item
Item: TypeAlias = tuple[int, int, int, int]  # number, row, lead, stop


class RowRanges:
    """What to copy: item b has K rows; those from `lead[b]` until `stop[b]` exist, and lie from row `row[b]` on.

    Args:
        row, lead, stop: (B,) int64, 0 ≤ lead ≤ stop ≤ K; where none exists, `row` is the nearest that does.
        steps: K; or (B,) how many each item needs: K is the most that any does, so a part of the items may have less.
        padding: what stands where no row exists: "zero", "edge" (the nearest that does) or "default".
    """

    def __init__(self, row: IntArray, lead: IntArray, stop: IntArray, steps: int | IntArray, padding: str) -> None:
        self.row, self.lead, self.stop, self.padding = row, lead, stop, padding
        self._needed = steps
        self._latest: tuple[slice, RowRanges] | None = None

    def __getitem__(self, chosen: Any) -> RowRanges:
        """A batch of the items, at a slice, which is kept as fields share it; or some of one, at an index array."""
        if not isinstance(chosen, slice):
            return self._at(chosen, self.steps)
        latest = self._latest
        if latest is None or latest[0] != chosen:
            needed = self._needed if isinstance(self._needed, int) else self._needed[chosen]
            latest = self._latest = chosen, self._at(chosen, needed)
        return latest[1]

    def _at(self, chosen: Any, steps: int | IntArray) -> RowRanges:
        part = RowRanges(self.row[chosen], self.lead[chosen], self.stop[chosen], steps, self.padding)
        if not self.is_fitted and self._is_whole:
            part._is_whole = True
        return part

    @property
    def is_fitted(self) -> bool:
        """Whether K is another for a part of the items."""
        return not isinstance(self._needed, int)

    @cached_property
    def steps(self) -> int:
        """K."""
        return self._needed if isinstance(self._needed, int) else int(self._needed.max(initial=0))

    def steps_of(self, chosen: npt.NDArray[np.bool_]) -> int:
        """K of some of the items."""
        return self._needed if isinstance(self._needed, int) else int(self._needed[chosen].max(initial=0))

    @property
    def shape(self) -> tuple[int, int]:
        """(B, K)."""
        return len(self.row), self.steps

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
        shape = len(self.row), self.steps, *rows.shape[1:]
        large = math.prod(shape) * rows.itemsize >= LARGE
        if self.is_fitted or large or 2 * self._num_whole < max(1, len(self.row)):
            out, items = pool.empty(shape, rows.dtype), self._each
        else:  # one index for all; those of which some row does not exist are copied anew
            out = storage.slices_of(name, self.steps)[self._begin].view(rows.dtype).reshape(shape)
            items = self._cut
        self._copy_each(rows, out, items)
        if self.padding != "zero":
            self._pad(rows, out, items, storage.layout.schema.fields[name].fill)
        return out

    def _copy_each(self, rows: Array, out: Array, items: list[Item]) -> None:
        """Some items, as bytes: numpy copies and zeroes these with the least to think about."""
        width, zero = rows.itemsize * math.prod(rows.shape[1:]), self.padding == "zero"
        source, target, size = rows.reshape(-1).view(np.uint8), out.reshape(-1).view(np.uint8), self.steps * width
        for b, row, lead, stop in items:
            at = b * size
            begin, end = at + lead * width, at + stop * width
            target[begin:end] = source[row * width : (row + stop - lead) * width]
            if zero and lead:
                target[at:begin] = 0
            if zero and stop < self.steps:
                target[end : at + size] = 0

    def _pad(self, rows: Array, out: Array, items: list[Item], fill: Any) -> None:
        """Fill what does not exist of some items."""
        edge = self.padding == "edge"
        for b, row, lead, stop in items:
            if lead:
                out[b, :lead] = rows[row] if edge else fill
            if stop < self.steps:
                out[b, stop:] = rows[row + max(stop - lead - 1, 0)] if edge else fill

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


def joined(low: IntArray, high: IntArray, gap: int) -> list[tuple[int, int]]:
    """Stretches of rows low … high - 1 (B,), in their order; those that are at most `gap` rows apart are one."""
    order = np.argsort(low)
    low, high = low[order], np.maximum.accumulate(high[order])
    apart = low[1:] - high[:-1] > gap
    begins, ends = np.concatenate([[True], apart]), np.concatenate([apart, [True]])
    return list(zip(low[begins].tolist(), high[ends].tolist(), strict=True))
