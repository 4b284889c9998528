"""Reads from many folders by one numpy call, by memory address: a call for each folder takes longer than its few rows.

`Reach` knows where the arrays of all folders lie in memory. `Folders` looks records up by it, and `Gather` copies rows
by it. It reads mapped memory only, because:

- *Held.* `Held` refers to each array whose address it tells, and a batch refers to its `Reach` until the batch is
  checked, so nothing is unmapped before. Mirrors unmap their rows at any time: rows of a mirror are never read so.
- *Compared.* Before a read, each row, slot and record number is compared with the length of its array: records may be
  forged, and a shard that was made anew may be smaller.
- *Fork.* A child process has the same maps at the same addresses, and its own objects that refer to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import Array
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.records import CHECK, GENERATION, RECORD, SERIAL, STATE_WORD, WORDS, Words
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import MOST_AT, address_of, bytes_at, memory
from memmap_buffer.views.anchors import Anchors, BoolArray
from memmap_buffer.views.memory_pool import Pool
from memmap_buffer.views.row_ranges import LARGE, RowRanges, Source

WIDE = 1 << 10  # bytes: wider rows are copied folder by folder, into memory of the pool


class Held(NamedTuple):
    """Arrays of one kind, one of each folder, which stay mapped as long as this object lives.

    Attributes:
        begin: (F,) int64 the address of each array.
        length: (F,) int64 the number of its items.
        arrays: the F arrays.
    """

    begin: IntArray
    length: IntArray
    arrays: Sequence[Array]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Held:
        """Hold C-contiguous arrays."""
        return cls(np.array([address_of(array) for array in arrays]), np.array([*map(len, arrays)]), arrays)

    def replaced(self, places: Sequence[int], arrays: Sequence[Array]) -> Held:
        """A copy with other arrays for the folders at `places`."""
        if not places:
            return self
        begin, length, all_arrays = self.begin.copy(), self.length.copy(), [*self.arrays]
        for place, array in zip(places, arrays, strict=True):
            begin[place], length[place], all_arrays[place] = address_of(array), len(array), array
        return Held(begin, length, all_arrays)

    def at(self, places: IntArray, low: IntArray, high: IntArray) -> IntArray | None:
        """(B,) the addresses of the arrays of folders; None if an item low … high - 1 of one does not exist.

        Args:
            places: (B,) which folder.
            low, high: (B, …) items of its array.
        """
        length = self.length.take(places).reshape(-1, *(1,) * (low.ndim - 1))
        return self.begin.take(places) if ((low >= 0) & (low <= high) & (high <= length)).all() else None


class Reach:
    """The memory addresses of the arrays of F folders, by which one call reads from all of them.

    In all methods `places` (B,) int64 are positions in `storages`: the folder of each item. The folders and the tables
    of a `Reach` stay the same; when one of them changes, another `Reach` is made.

    Args:
        storages: the folders.
        tables: their episode tables.
        before: the `Reach` of earlier tables, whose addresses are taken over; or None.

    Attributes:
        usable: whether `look_up` is right: no folder has episodes to check before they are read, or cuts them back.
        changes: (F,) uint64 the change counters of the tables.
    """

    def __init__(self, storages: tuple[Storage, ...], tables: tuple[EpisodeTable, ...], before: Reach | None) -> None:
        self.storages, self.tables = storages, tables
        before = before if before is not None and before.storages is storages else None
        self._arrays: dict[str, Held] = {} if before is None else before._arrays
        self._mirrored: bool
        if before is None:
            self._mirrored = any(storage.mirror is not None for storage in storages)
            self.changes = np.array([table.changes for table in tables], np.uint64)
            trusted = all(storage.verify != "read" and not storage.in_doubt for storage in storages)
            self.usable = trusted and not self._mirrored
        else:
            again = [i for i, (now, then) in enumerate(zip(tables, before.tables, strict=True)) if now is not then]
            self.changes = before.changes.copy()
            self.changes[again] = [tables[i].changes for i in again]
            if "_served" in vars(before):
                self._served = before._served.replaced(again, [tables[i].served for i in again])
            self._mirrored, self.usable = before._mirrored, before.usable  # constant for a folder that is open
        self._records = self._hold("/episodes", lambda storage: storage.maps.words)
        self._state = self._hold("/state", lambda storage: storage.maps.state)

    @cached_property
    def _served(self) -> Held:
        """`EpisodeTable.served` of each table; held, as another thread may replace the array by an equal one."""
        return Held.of([table.served for table in self.tables])

    @cached_property
    def _last_slot(self) -> IntArray:
        """(F,) the last slot that both the table and the records of a folder have."""
        return np.minimum(self._served.length, self._records.length) - 1

    def _hold(self, name: str, array_of: Callable[[Storage], Array]) -> Held:
        """The arrays held under a name. The first that any thread made stay: another one may be reading by them."""
        arrays = self._arrays.get(name)
        return self._arrays.setdefault(name, Held.of([*map(array_of, self.storages)])) if arrays is None else arrays

    def rows(self, name: str, places: IntArray, rows: IntArray) -> Array | None:
        """Rows (B, …) of a field, or slots (B,) of a meta field, (B, …, *field) as stored.

        None: they cannot be read so, or have so many bytes that a call for each folder costs little beside the copy.
        """
        field = self.storages[0].layout.schema.all[name]
        begin, width = self._rows_begin(name, places, rows, rows + 1), field.itemsize
        if begin is None or not 0 < width <= WIDE or rows.size * width >= LARGE:
            return None
        values = bytes_at(begin.reshape(-1, *(1,) * (rows.ndim - 1)) + width * rows, width)
        return values.view(field.storage).reshape(*rows.shape, *field.shape)

    def ranges(self, name: str, places: IntArray, ranges: RowRanges, pool: Pool) -> Array | None:
        """Ranges of rows of a field, one of each item, (B, K, *field) as stored; None: they cannot be read so."""
        field = self.storages[0].layout.schema.fields[name]
        begin, size = self._rows_begin(name, places, *ranges.rows()), ranges.steps * field.itemsize
        if begin is None or not 0 < size <= MOST_AT:
            return None
        row = begin + field.itemsize * ranges.row
        by_bytes = RowRanges(row, ranges.lead, ranges.stop, ranges.steps, ranges.padding)
        at_once = by_bytes.cut is not None and len(places) * size < LARGE
        pieces = bytes_at(by_bytes.cut[0], size) if at_once else None  # type: ignore[index]
        return by_bytes.copied(Source(memory(), 1, pieces), field, pool)

    def _rows_begin(self, name: str, places: IntArray, low: IntArray, high: IntArray) -> IntArray | None:
        """(B,) the addresses of a field's rows; None if rows low … high - 1 (B, …) cannot be read so."""
        if self._mirrored:
            return None
        return self._hold(name, lambda storage: stored_rows(storage, name)).at(places, low, high)

    def slots_there(self, places: IntArray, slot: IntArray) -> IntArray:
        """(B,) the slots, clipped to those that each folder has: a shard that was made anew may be smaller."""
        return np.asarray(np.maximum(np.minimum(slot, self._last_slot.take(places)), 0))

    def look_up(self, places: IntArray, anchors: Anchors) -> tuple[Anchors, BoolArray]:
        """`Storage.look_up` in many folders.

        Returns: the anchors with their records; (B,) whether the slot still holds the visible episode of that serial.
        """
        slot = self.slots_there(places, anchors.slot)
        words = bytes_at(self._records.begin.take(places) + RECORD.itemsize * slot, RECORD.itemsize)
        words = words.view(np.uint64).reshape(-1, WORDS)
        differs = words[:, CHECK] ^ bytes_at(self._served.begin.take(places) + 8 * slot, 8).view(np.uint64)
        differs |= words[:, SERIAL] ^ anchors.serial.view(np.uint64)
        differs |= words[:, GENERATION] & np.uint64(1)
        return Anchors(anchors.folder, slot, *anchors[2:-1], words), differs == 0

    def unchanged(self, places: IntArray) -> bool:
        """Whether nothing has changed in these folders since the tables were read."""
        return bool((self._changes_at(self._state.begin.take(places)) == self.changes.take(places)).all())

    def changed(self) -> list[int]:
        """The positions of the folders in which something has changed since the tables were read."""
        places: list[int] = np.flatnonzero(self._changes_at(self._state.begin) != self.changes).tolist()
        return places

    @staticmethod
    def _changes_at(begin: IntArray) -> Words:
        """The change counters in `state.npy` files that lie at these addresses."""
        return bytes_at(begin + 8 * STATE_WORD["changes"], 8).view(np.uint64)


def stored_rows(storage: Storage, name: str) -> Array:
    """The rows of a field, or the slots of a meta field, as mapped."""
    return (storage.maps.rows if name in storage.layout.schema.fields else storage.maps.meta)[name]
