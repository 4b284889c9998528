"""Which episodes an epoch covers, in a few numbers: from them another process builds the same index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias

import numpy as np

from memmap_buffer.errors import SchemaError, StaleEpisodeError
from memmap_buffer.reading.index import Index
from memmap_buffer.reading.selection import Selection
from memmap_buffer.reading.sources import Sources
from memmap_buffer.store.records import OPEN
from memmap_buffer.store.table import EpisodeTable, IntArray


@dataclass(frozen=True)
class Stretch:
    """What an epoch covers of one folder.

    Args:
        id: of the buffer; "" where there is none under its number.
        episodes: (first, last) serials, ascending; more than one pair where episodes were deleted in between.
        open: (serial, timesteps, flags) of those that were still being appended to.
        items: how many they have.
    """

    id: str
    episodes: tuple[tuple[int, int], ...]
    open: tuple[tuple[int, int, int], ...]
    items: int

    @classmethod
    def of(cls, id: str, table: EpisodeTable, items: int) -> Stretch:
        """What a table shows."""
        serial = table.serial[table.visible]
        cuts = np.flatnonzero(np.diff(serial) > 1) + 1
        ranges = [(int(part[0]), int(part[-1])) for part in np.split(serial, cuts) if part.size]
        slots = table.visible[table.flags[table.visible] & OPEN != 0]
        growing = zip(
            table.serial[slots].tolist(), table.length[slots].tolist(), table.flags[slots].tolist(), strict=True
        )
        return cls(id, tuple(ranges), tuple(growing), items)

    def of_later(self, id: str, table: EpisodeTable) -> EpisodeTable:
        """What is left of it in a later table; episodes that grew since have the length that they had.

        Args: id: of the buffer that the table is of; in the place of a shard another may stand.
        """
        if id != self.id:
            return replace(table, visible=table.visible[:0])
        bounds = np.array(self.episodes, np.int64).reshape(-1, 2)
        bounds[:, 1] += 1
        inside = np.searchsorted(bounds.ravel(), table.serial[table.visible], side="right") % 2 == 1
        visible = table.visible[inside]
        length, flags = table.length.copy(), table.flags.copy()
        for serial, steps, bits in self.open:
            slot = visible[table.serial[visible] == serial]
            length[slot], flags[slot] = steps, bits
        return replace(table, visible=visible, length=length, flags=flags)

    def gone(self, left: EpisodeTable) -> IntArray:
        """The serials that it had and `left` has not."""
        if sum(last - first + 1 for first, last in self.episodes) == len(left):
            return np.empty(0, np.int64)
        every = [np.arange(first, last + 1) for first, last in self.episodes]
        return np.setdiff1d(np.concatenate(every), left.serial[left.visible], assume_unique=True)


@dataclass(frozen=True)
class Extent:
    """What an epoch covers: a `Stretch` of each folder, and the digest of the index that came of it."""

    stretches: tuple[Stretch, ...]
    digest: int

    @classmethod
    def of(cls, ids: Sequence[str], tables: Sequence[EpisodeTable], index: Index) -> Extent:
        """What an index of these tables covers; `ids` are those of the buffers that they are of."""
        bounds = index.bounds(len(tables))
        items = [stop - start for start, stop in pairwise(bounds)]
        return cls(tuple(map(Stretch.of, ids, tables, items)), index.digest)

    @property
    def items(self) -> int:
        return sum(stretch.items for stretch in self.stretches)

    def state(self) -> dict[str, Any]:
        """It as lists and whole numbers."""
        sources = []
        for one in self.stretches:
            episodes, growing = [list(pair) for pair in one.episodes], [list(each) for each in one.open]
            sources.append({"id": one.id, "episodes": episodes, "open": growing, "items": one.items})
        return {"sources": sources, "digest": self.digest}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Extent:
        """What `state` gave. Raises TypeError, ValueError or KeyError for anything else."""
        return cls(tuple(map(_stretch, state["sources"])), int(state["digest"]))

    def index(self, selection: Selection, sources: Sources, on_stale: str) -> Index:
        """The index as it was, of the tables as they are.

        Args: on_stale: with "redraw", episodes that are gone have runs in it that nobody can read, so that they are
            drawn again when it is their turn.

        Raises:
            StaleEpisodeError: episodes are gone, and `on_stale` is "raise" or cannot tell where their items were.
            SchemaError: other options or folders, or values changed by which items are chosen.
        """
        sources.refresh()
        sources.reach(len(self.stretches))
        now, ids = sources.tables, sources.ids
        if len(self.stretches) != len(now) and sources.shards is None:
            raise SchemaError(f"the epoch is of {len(self.stretches)} folders, this reads {len(now)}")
        for number, (stretch, id) in enumerate(zip(self.stretches, ids, strict=False)):
            if stretch.id != id and sources.shards is None:
                raise SchemaError(
                    f"{sources.storages[number].path}: this buffer has the id {id}, the epoch is of {stretch.id}; read "
                    "the folder that it was begun on, or a copy of it, or begin a new epoch"
                )
        later = (Stretch("", (), (), 0),) * (len(now) - len(self.stretches))  # shards that appeared since
        stretches = (*self.stretches, *later)
        tables = [stretch.of_later(id, table) for stretch, id, table in zip(stretches, ids, now, strict=True)]
        index = selection.index(sources, tables)
        gone = [stretch.gone(table) for stretch, table in zip(stretches, tables, strict=True)]
        if any(serials.size for serials in gone):
            for number, serials in enumerate(gone):
                if serials.size and (on_stale == "raise" or selection.top_k is not None):
                    _refuse(sources, number, serials, "load it with on_stale='redraw', or begin a new epoch")
                index = self._with_gone(index, sources, number, serials)
        elif index.digest != self.digest:
            raise SchemaError(
                f"{sources.storages[0].path}: the epoch had {self.items} items, of other episodes or timesteps than "
                f"the {len(index)} that these options choose now; give the options of then, or begin a new epoch"
            )
        return index

    def _with_gone(self, index: Index, sources: Sources, number: int, serials: IntArray) -> Index:
        """The index with a run for the items of a folder's episodes that are gone, if they were side by side."""
        bounds = index.bounds(len(self.stretches))
        missing = self.stretches[number].items - (bounds[number + 1] - bounds[number])
        if not missing:
            return index
        start, stop = (int(np.searchsorted(index.starts, bound)) for bound in bounds[number : number + 2])
        at, end = start + np.searchsorted(index.serial[start:stop], serials[[0, -1]])
        if missing < 0 or at != end:
            _refuse(sources, number, serials, "which items they had cannot be told any more; begin a new epoch")
        return index.with_run(int(at), serial=int(serials[0]), count=missing, source=number)


Standing: TypeAlias = dict[int, tuple[str, str, int, int, int]]


def standing(sources: Sources) -> Standing:
    """Of each folder as it is now, by its number: (path, id, epoch, nonce, changes).

    The same writer only ever raises the last; whoever takes the lock raises `epoch`, and draws another nonce.
    """
    sources.refresh()
    present = [(number, storage) for number, storage in enumerate(sources.storages) if not storage.withdrawn]
    return {
        number: (str(s.path), s.layout.id, s.state("epoch"), s.state("nonce"), s.state("changes"))
        for number, s in present
    }


def require_same(told: Sequence[tuple[str, Standing]], sources: Sources) -> None:
    """Raise SchemaError where a rank reads other data: its folders were not, before, what they are here now, or less.

    Args: told: of each rank, its host and how its folders stood.
    """
    now = standing(sources)
    for rank, (host, theirs) in enumerate(told):
        for number, (path, id, epoch, nonce, changes) in theirs.items():
            mine = now.get(number)
            if mine is None:
                why = f"of which nothing stands in {sources.storages[0].path.parent}"
            elif mine[1] != id:
                why = f"and {mine[0]} is another buffer: their ids are {id} and {mine[1]}"
            elif mine[2] < epoch or mine[4] < changes or (mine[2] == epoch and mine[3] != nonce):
                why = f"and {mine[0]} is an older copy of that, or each was written to since it was copied"
            else:
                continue
            raise SchemaError(
                f"rank {rank} reads {path} on {host}, {why}; let all ranks read one folder, or equal copies; a rank "
                "with data of its own gives rank=0, world_size=1"
            )


def _refuse(sources: Sources, number: int, serials: IntArray, remedy: str) -> NoReturn:
    raise StaleEpisodeError(
        f"{sources.storages[number].path}: {len(serials)} episodes of the epoch, {serials[:5].tolist()} first, were "
        f"overwritten or removed since; {remedy}",
        serials=serials.tolist(),
    )


def _stretch(state: Mapping[str, Any]) -> Stretch:
    episodes = tuple((int(first), int(last)) for first, last in state["episodes"])
    growing = tuple((int(serial), int(steps), int(flags)) for serial, steps, flags in state["open"])
    return Stretch(str(state["id"]), episodes, growing, int(state["items"]))
