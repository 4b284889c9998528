"""Several folders at a time: what is asked of each episode, read of all of them by one index."""

from __future__ import annotations

from operator import attrgetter

import numpy as np
import numpy.typing as npt

from memmap_buffer.reading.spans import Span
from memmap_buffer.store.records import CHECK, DELETED, FLAGS, GENERATION, SERIAL, STATE_WORD, Words
from memmap_buffer.store.storage import Storage
from memmap_buffer.store.table import EpisodeTable, IntArray
from memmap_buffer.values import Array

BoolArray = npt.NDArray[np.bool_]
_table_of = attrgetter("table")


class Together:
    """The maps and tables of several folders; every answer is that of the folder's `Storage`.

    Args: storages: by their numbers. own: whether nobody else reads their tables again, as a writer may.
    Attributes: trusted: whether nothing is left to check in any of them.
    """

    def __init__(self, storages: tuple[Storage, ...], own: bool) -> None:
        self._storages, self._own = storages, own
        self._every = np.arange(len(storages))
        self._tables = tuple(storage.refresh() for storage in storages)
        self._changes = np.array([table.changes for table in self._tables], np.uint64)
        self._check = Span([table.check for table in self._tables])
        self._shown = Span([table.shown for table in self._tables])
        self._words = Span([storage.maps.words for storage in storages])
        self._states = Span([storage.maps.state for storage in storages])
        self._last = np.array([len(table.check) - 1 for table in self._tables])
        self._fields: dict[tuple[str, str], Span | None] = {}
        self.trusted = all(storage.trusted for storage in storages)

    def refresh(self, *, again: bool = False) -> tuple[EpisodeTable, ...]:
        """The tables as they are now.

        Args: again: look at all of them, as some were read again though nothing changed on the disk.
        """
        moved = np.flatnonzero(self._state("changes", self._every) != self._changes).tolist()
        for number in moved:
            self._storages[number].refresh()
        if not moved and self._own and not again:  # to look at a thousand objects costs as much as a batch
            return self._tables
        tables: tuple[EpisodeTable, ...] = tuple(map(_table_of, self._storages))
        if tables != self._tables:
            for number, (table, before) in enumerate(zip(tables, self._tables, strict=True)):
                if table is not before:
                    self._follow(number, table)
            self._tables = tables
        return tables

    def _follow(self, number: int, table: EpisodeTable) -> None:
        self._check.put(number, table.check)
        self._shown.put(number, table.shown)
        self._changes[number] = table.changes

    def _state(self, name: str, source: IntArray) -> Array:
        return self._states.take(source, np.array([STATE_WORD[name]]))

    def slots(self, source: IntArray, slots: IntArray) -> IntArray:
        """The slots, 0 for those that the folder of that number has not."""
        return np.where(slots <= self._last.take(source), slots, 0)

    def look_up(self, source: IntArray, slots: IntArray, serials: IntArray) -> tuple[Words, BoolArray]:
        """As `Storage.look_up`."""
        words = self._words.take(source, slots)
        differs = words[:, CHECK] ^ self._check.take(source, slots)
        differs |= words[:, SERIAL] ^ serials.view(np.uint64)
        differs = differs | (words[:, GENERATION] & np.uint64(1))
        return words, np.equal(differs, 0) & self._shown.take(source, slots)

    def unmoved(self, source: IntArray, slots: IntArray, serials: IntArray, generations: Words) -> BoolArray:
        """As `Storage.unmoved`."""
        words = self._words.take(source, slots)
        same = np.equal(words[:, GENERATION], generations) & (words.view(np.uint32)[:, FLAGS] & np.uint32(DELETED) == 0)
        return np.asarray(same & (serials.view(np.uint64) >= self._state("base", source)))

    def rows(self, name: str) -> Span | None:
        """The rows of a field, or None where they are too large to be taken so."""
        return self._field("rows", name)

    def meta(self, name: str) -> Span | None:
        """A meta field, likewise."""
        return self._field("meta", name)

    def _field(self, group: str, name: str) -> Span | None:
        if (group, name) not in self._fields:
            arrays = [getattr(storage.maps, group)[name] for storage in self._storages]
            self._fields[group, name] = Span(arrays) if Span.fits(arrays[0]) else None
        return self._fields[group, name]
