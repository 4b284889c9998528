"""Copying slices of consecutive rows, one for each item of a batch: windows, sequences, whole episodes."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.reading.memory import Pool
from memmap_buffer.store.storage import IntArray, Storage
from memmap_buffer.values import Array

LARGE = 1 << 20  # bytes from which memory that is used again outweighs a call for each item
Item: TypeAlias = tuple[int, int, int, int]  # number, row, lead, stop


class Slices:
    """What to copy: item b has K rows; those from `lead[b]` until `stop[b]` exist, and lie from row `row[b]` on.

    Args:
        row, lead, stop: (B,) int64, 0 ≤ lead ≤ stop ≤ K; where none exists, `row` is the nearest that does.
        steps: K. padding: what stands where no row exists: "zero", "edge" (the nearest that does) or "default".
    """

    def __init__(self, row: IntArray, lead: IntArray, stop: IntArray, steps: int, padding: str) -> None:
        self.row, self.lead, self.stop, self.steps, self.padding = row, lead, stop, steps, padding

    def __getitem__(self, chosen: Any) -> Slices:
        """The slices at an index array, a mask or a slice."""
        part = Slices(self.row[chosen], self.lead[chosen], self.stop[chosen], self.steps, self.padding)
        if self._is_whole:
            part._is_whole = True
        return part

    def copy(self, storage: Storage, name: str, pool: Pool) -> Array:
        """Copy them out of a field's rows: (B, K, *field)."""
        rows = storage.maps.rows[name]
        fill = storage.layout.schema.fields[name].fill if self.padding == "default" else rows.dtype.type()
        shape = len(self.row), self.steps, *rows.shape[1:]
        if math.prod(shape) * rows.itemsize >= LARGE or 2 * len(self._cut) > len(self.row):
            out, items = pool.empty(shape, rows.dtype), self._each
        else:  # one index for all; those of which some row does not exist are copied anew
            out, items = storage.slices_of(name, self.steps)[self._at].reshape(shape), self._cut
        for b, row, lead, stop in items:
            item, count = out[b], stop - lead
            item[lead:stop] = rows[row : row + count]
            if lead:
                item[:lead] = rows[row] if self.padding == "edge" else fill
            if stop < self.steps:
                item[stop:] = rows[row + max(count - 1, 0)] if self.padding == "edge" else fill
        return out

    @cached_property
    def _whole(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.stop - self.lead == self.steps)

    @cached_property
    def _is_whole(self) -> bool:
        """Whether every row exists."""
        return bool(self._whole.all())

    @cached_property
    def _each(self) -> list[Item]:
        return self._listed(np.arange(len(self.row)))

    @cached_property
    def _cut(self) -> list[Item]:
        """The items of which some row does not exist."""
        return [] if self._is_whole else self._listed(np.flatnonzero(~self._whole))

    def _listed(self, chosen: IntArray) -> list[Item]:
        columns = (chosen, self.row[chosen], self.lead[chosen], self.stop[chosen])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @cached_property
    def _at(self) -> IntArray:
        """The first row of each item; of one that is not whole, which is copied anew, that of another one."""
        return self.row if self._is_whole else np.where(self._whole, self.row, self.row[self._whole.argmax()])


def joined(low: IntArray, high: IntArray, gap: int) -> list[tuple[int, int]]:
    """Stretches of rows low … high - 1 (B,), in their order; those that are at most `gap` rows apart are one."""
    order = np.argsort(low)
    low, high = low[order], np.maximum.accumulate(high[order])
    apart = low[1:] - high[:-1] > gap
    begins, ends = np.concatenate([[True], apart]), np.concatenate([apart, [True]])
    return list(zip(low[begins].tolist(), high[ends].tolist(), strict=True))
