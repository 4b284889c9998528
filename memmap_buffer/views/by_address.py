"""Reading from many folders by address: a call of numpy for each folder takes longer than the rows that it gives.

Why it reads no memory but that of maps that are there:

- *Held.* An address is told by an array that `Held` refers to, for as long as anybody has the `Reach`, and a batch has
  its own until it is checked. So nothing is unmapped before. Mirrors let go of the maps of their rows, so none of
  these is read so.
- *Compared.* Before a read, each row, slot and record number is compared with the length of the array that it is of:
  records may be forged, and a shard that was made anew may be smaller.
- *Fork.* A child has the same maps at the same addresses, and its own objects that refer to them.
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

WIDE = 1 << 10  # bytes of a row: wider ones are copied folder by folder, into memory that is used again


class Held(NamedTuple):
    """Arrays of one kind, one a folder, which stay mapped as long as this is referred to.

    Attributes:
        begin: (F,) where each lies in memory.
        length: (F,) how many items each has.
        arrays: them.
    """

    begin: IntArray
    length: IntArray
    arrays: Sequence[Array]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Held:
        """Hold C-contiguous arrays."""
        return cls(np.array([address_of(array) for array in arrays]), np.array([*map(len, arrays)]), arrays)

    def replaced(self, places: Sequence[int], arrays: Sequence[Array]) -> Held:
        """Other arrays in the place of some, the rest as it is."""
        if not places:
            return self
        begin, length, every = self.begin.copy(), self.length.copy(), [*self.arrays]
        for place, array in zip(places, arrays, strict=True):
            begin[place], length[place], every[place] = address_of(array), len(array), array
        return Held(begin, length, every)

    def at(self, of: IntArray, low: IntArray, high: IntArray) -> IntArray | None:
        """(B,) where the arrays of some places begin; None where an item low … high - 1, (B, …), does not exist."""
        length = self.length.take(of).reshape(-1, *(1,) * (low.ndim - 1))
        return self.begin.take(of) if ((low >= 0) & (low <= high) & (high <= length)).all() else None


class Reach:
    """Where the arrays of many folders lie in memory, so that one call reads from all.

    The folders and the tables stay as they are; where one is another, another `Reach` takes its place.

    Args:
        storages: the folders.
        tables: their episode tables.
        before: that of earlier tables, or None.

    Attributes:
        usable: whether records may be read so: every folder is trusted, and none cuts its episodes back.
        changes: (F,) the change counters of the tables.
    """

    def __init__(self, storages: tuple[Storage, ...], tables: tuple[EpisodeTable, ...], before: Reach | None) -> None:
        self.storages, self.tables = storages, tables
        before = before if before is not None and before.storages is storages else None
        self._arrays: dict[str, Held] = {} if before is None else before._arrays
        self._mirrored: bool
        if before is None:
            self._mirrored = any(storage.mirror is not None for storage in storages)
            self.changes = np.array([table.changes for table in tables], np.uint64)
            trusted = all(storage.trusted and not storage.in_doubt for storage in storages)
            self.usable = trusted and not self._mirrored
        else:
            again = [i for i, (now, then) in enumerate(zip(tables, before.tables, strict=True)) if now is not then]
            self.changes = before.changes.copy()
            self.changes[again] = [tables[i].changes for i in again]
            if "_served" in vars(before):
                self._served = before._served.replaced(again, [tables[i].served for i in again])
            self._mirrored, self.usable = before._mirrored, before.usable  # each folder says it of itself once
        self._records = self._hold("/episodes", lambda storage: storage.maps.words)
        self._state = self._hold("/state", lambda storage: storage.maps.state)

    @cached_property
    def _served(self) -> Held:
        """The checks of the records that are shown; held, as another thread may put equal ones in their place."""
        return Held.of([table.served for table in self.tables])

    @cached_property
    def _last_slot(self) -> IntArray:
        return np.minimum(self._served.length, self._records.length) - 1

    def _hold(self, name: str, array_of: Callable[[Storage], Array]) -> Held:
        """The arrays of a name, those that were first asked for: what another thread was told stays held."""
        arrays = self._arrays.get(name)
        return self._arrays.setdefault(name, Held.of([*map(array_of, self.storages)])) if arrays is None else arrays

    def rows(self, name: str, of: IntArray, rows: IntArray) -> Array | None:
        """Rows (B, …) of a field in the folders at some places, (B, …, *field) as stored.

        None where they cannot be read so, or a call for each folder is less than the bytes.
        """
        field = self.storages[0].layout.schema.fields[name]
        begin, width = self._rows_begin(name, of, rows, rows + 1), field.itemsize
        if begin is None or not 0 < width <= WIDE or rows.size * width >= LARGE:
            return None
        values = bytes_at(begin.reshape(-1, *(1,) * (rows.ndim - 1)) + width * rows, width)
        return values.view(field.storage).reshape(*rows.shape, *field.shape)

    def ranges(self, name: str, of: IntArray, ranges: RowRanges, pool: Pool) -> Array | None:
        """Likewise ranges of rows, an item each: (B, K, *field)."""
        field = self.storages[0].layout.schema.fields[name]
        begin, size = self._rows_begin(name, of, *ranges.rows()), ranges.steps * field.itemsize
        if begin is None or not 0 < size <= MOST_AT:
            return None
        there = ranges.moved(begin, field.itemsize)
        at_once = there.cut is not None and len(of) * size < LARGE
        pieces = bytes_at(there.cut[0], size) if at_once else None  # type: ignore[index]
        return there.copied(Source(memory(), 1, pieces), field, pool)

    def _rows_begin(self, name: str, of: IntArray, low: IntArray, high: IntArray) -> IntArray | None:
        """(B,) where the rows of a field begin, if rows low … high - 1, as many an item, can be read so."""
        if self._mirrored:
            return None
        arrays = self._hold(name, lambda storage: storage.maps.rows[name])
        return arrays.at(of, low.reshape(len(of), -1), high.reshape(len(of), -1))

    def meta(self, name: str, of: IntArray, slot: IntArray) -> Array | None:
        """Slots (B,) of a meta field in the folders at some places, as stored; None where they cannot be read so."""
        field = self.storages[0].layout.schema.meta_fields[name]
        width = field.itemsize
        if self._mirrored or not 0 < width <= MOST_AT:
            return None
        begin = self._hold(f"/{name}/", lambda storage: storage.maps.meta[name]).at(of, slot, slot + 1)
        if begin is None:
            return None
        return bytes_at(begin + width * slot, width).view(field.storage).reshape(len(slot), *field.shape)

    def slots_there(self, of: IntArray, slot: IntArray) -> IntArray:
        """(B,) the slots, or others where the folders at some places lack them: a shard made anew may be smaller."""
        return np.asarray(np.maximum(np.minimum(slot, self._last_slot.take(of)), 0))

    def look_up(self, of: IntArray, anchors: Anchors) -> tuple[Anchors, BoolArray]:
        """`Storage.look_up` in many folders: the anchors with their records; whether each is that of its episode.

        Args:
            of: (B,) the place of each anchor's folder.
            anchors: of a batch.
        """
        slot = self.slots_there(of, anchors.slot)
        words = bytes_at(self._records.begin.take(of) + RECORD.itemsize * slot, RECORD.itemsize)
        words = words.view(np.uint64).reshape(-1, WORDS)
        differs = words[:, CHECK] ^ bytes_at(self._served.begin.take(of) + 8 * slot, 8).view(np.uint64)
        differs |= words[:, SERIAL] ^ anchors.serial.view(np.uint64)
        differs |= words[:, GENERATION] & np.uint64(1)
        return Anchors(anchors.folder, slot, *anchors[2:-1], words), differs == 0

    def unchanged(self, of: IntArray) -> bool:
        """Whether in the folders at some places nothing has changed since the tables were read."""
        return bool((self._changes_at(self._state.begin.take(of)) == self.changes.take(of)).all())

    def changed(self) -> list[int]:
        """The places of the folders in which something has changed since the tables were read."""
        places: list[int] = np.flatnonzero(self._changes_at(self._state.begin) != self.changes).tolist()
        return places

    @staticmethod
    def _changes_at(begin: IntArray) -> Words:
        return bytes_at(begin + 8 * STATE_WORD["changes"], 8).view(np.uint64)
