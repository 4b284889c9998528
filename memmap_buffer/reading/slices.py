"""Copying slices of consecutive rows, one for each item of a batch: windows, sequences, whole episodes."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.store.storage import IntArray, Storage
from memmap_buffer.values import Array


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

    def copy(self, storage: Storage, name: str) -> Array:
        """Copy them out of a field's rows: (B, K, *field)."""
        rows = storage.maps.rows[name]
        fill = storage.layout.schema.fields[name].fill if self.padding == "default" else rows.dtype.type()
        if self._is_whole:
            return storage.slices_of(name, self.steps)[self.row].reshape(len(self.row), self.steps, *rows.shape[1:])
        if self._singly is not self._all:
            out = storage.slices_of(name, self.steps)[self._at].reshape(len(self.row), self.steps, *rows.shape[1:])
        else:
            out = np.empty((len(self.row), self.steps, *rows.shape[1:]), rows.dtype)
        for b, row, lead, stop in self._items:
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
    def _singly(self) -> IntArray:
        """The items that are copied one by one: those that are not whole, and where these are many, all."""
        cut = np.flatnonzero(~self._whole)
        return self._all if 2 * len(cut) > len(self.row) else cut

    @cached_property
    def _all(self) -> IntArray:
        return np.arange(len(self.row))

    @cached_property
    def _items(self) -> list[tuple[int, int, int, int]]:
        chosen = self._singly
        columns = (chosen, self.row[chosen], self.lead[chosen], self.stop[chosen])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @cached_property
    def _at(self) -> IntArray:
        """The first row of each item; of one that is not whole, which is copied anew, that of another one."""
        return np.where(self._whole, self.row, self.row[self._whole.argmax()])
