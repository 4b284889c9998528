"""Several folders at a time: what is asked of each episode, read of all of them by one index."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.records import CHECK, DELETED, FLAGS, GENERATION, SERIAL, STATE_WORD, Words
from memmap_buffer.format.storage import Storage
from memmap_buffer.views.spans import Span

BoolArray = npt.NDArray[np.bool_]
_table_of = attrgetter("table")


class Seen(NamedTuple):
    """The tables of one moment: `changes` (folders,) of each, and the `served` of all."""

    tables: tuple[EpisodeTable, ...]
    changes: Words
    served: Span

    @classmethod
    def of(cls, tables: tuple[EpisodeTable, ...]) -> Seen:
        changes = np.array([table.changes for table in tables], np.uint64)
        return cls(tables, changes, Span([table.served for table in tables]))

    def followed(self, tables: tuple[EpisodeTable, ...]) -> Seen:
        """The same of other tables; a folder that is read in another thread keeps what it began with."""
        both = enumerate(zip(tables, self.tables, strict=True))
        others = {number: table for number, (table, before) in both if table is not before}
        changes = self.changes.copy()
        changes[list(others)] = [table.changes for table in others.values()]
        return Seen(tables, changes, self.served.replaced({n: table.served for n, table in others.items()}))


class Together:
    """The maps and tables of several folders, always the same; every answer is that of the folder's `Storage`.

    Args: storages: by their numbers. own: whether nobody else reads their tables again, as a writer may.
    Attributes: trusted: whether nothing is left to check in any of them.
    """

    def __init__(self, storages: tuple[Storage, ...], own: bool) -> None:
        self.storages, self._own = storages, own
        self._every = np.arange(len(storages))
        self._seen = Seen.of(tuple(storage.refresh() for storage in storages))
        self._words = Span([storage.maps.words for storage in storages])
        self._changes, self._base = (
            Span([storage.maps.state[word : word + 1] for storage in storages])
            for word in (STATE_WORD["changes"], STATE_WORD["base"])
        )
        self._last = np.array([len(storage.maps.words) - 1 for storage in storages])
        self._fields: dict[tuple[str, str], Span | None] = {}
        self.trusted = all(storage.trusted for storage in storages)

    def refresh(self, *, again: bool = False) -> tuple[EpisodeTable, ...]:
        """The tables as they are now.

        Args: again: look at all of them, as some were read again though nothing changed on the disk.
        """
        seen = self._seen
        moved = np.flatnonzero(self._changes.first(self._every) != seen.changes).tolist()
        for number in moved:
            self.storages[number].refresh()
        if not moved and self._own and not again:  # to look at a thousand objects costs as much as a batch
            return seen.tables
        tables: tuple[EpisodeTable, ...] = tuple(map(_table_of, self.storages))
        if tables != seen.tables:
            self._seen = seen.followed(tables)
        return tables

    def slots(self, source: IntArray, slots: IntArray) -> IntArray:
        """The slots, the last for those that the folder of that number has not."""
        return np.asarray(np.minimum(slots, self._last.take(source)))

    def look_up(self, source: IntArray, slots: IntArray, serials: IntArray) -> tuple[Words, BoolArray]:
        """As `Storage.look_up`."""
        words = self._words.take(source, slots)
        differs = words[:, CHECK] ^ self._seen.served.take(source, slots)
        differs = differs | (words[:, SERIAL] ^ serials.view(np.uint64)) | (words[:, GENERATION] & np.uint64(1))
        return words, np.equal(differs, 0)

    def unmoved(self, source: IntArray, slots: IntArray, serials: IntArray, generations: Words) -> BoolArray:
        """As `Storage.unmoved`."""
        words = self._words.take(source, slots)
        same = np.equal(words[:, GENERATION], generations) & (words.view(np.uint32)[:, FLAGS] & np.uint32(DELETED) == 0)
        return np.asarray(same & (serials.view(np.uint64) >= self._base.first(source)))

    def rows(self, name: str) -> Span | None:
        """The rows of a field, or None where they are too large to be taken so."""
        return self._field("rows", name)

    def meta(self, name: str) -> Span | None:
        """A meta field, likewise."""
        return self._field("meta", name)

    def _field(self, group: str, name: str) -> Span | None:
        if (group, name) not in self._fields:
            arrays = [getattr(storage.maps, group)[name] for storage in self.storages]
            self._fields[group, name] = Span(arrays) if Span.fits(arrays[0]) else None
        return self._fields[group, name]
