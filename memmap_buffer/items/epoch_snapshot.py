"""Which episodes an epoch covers, in a few numbers: from them another process builds the same index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias

import numpy as np

from memmap_buffer.errors import SchemaError, StaleEpisodeError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.records import OPEN
from memmap_buffer.format.shards import MAX_SHARDS
from memmap_buffer.items.index import Index
from memmap_buffer.items.selection import Selection
from memmap_buffer.views.folders import Folders


@dataclass(frozen=True)
class FolderSnapshot:
    """What an epoch covers of one folder.

    Args:
        number: the folder's.
        id: of the buffer; "" where there is none under its number.
        episodes: (first, last) serials, ascending; more than one pair where episodes were deleted in between.
        open: (serial, timesteps, flags) of those that were still being appended to.
        items: how many they have.
    """

    number: int
    id: str
    episodes: tuple[tuple[int, int], ...]
    open: tuple[tuple[int, int, int], ...]
    items: int

    @classmethod
    def of(cls, number: int, id: str, table: EpisodeTable, items: int) -> FolderSnapshot:
        """What a table shows."""
        serial = table.serial[table.visible]
        cuts = np.flatnonzero(np.diff(serial) > 1) + 1
        ranges = [(int(part[0]), int(part[-1])) for part in np.split(serial, cuts) if part.size]
        slots = table.visible[table.flags[table.visible] & OPEN != 0]
        growing = zip(
            table.serial[slots].tolist(), table.length[slots].tolist(), table.flags[slots].tolist(), strict=True
        )
        return cls(number, id, tuple(ranges), tuple(growing), items)

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
class EpochSnapshot:
    """What an epoch covers: a `FolderSnapshot` of each folder, and the digest of the index that came of it."""

    stretches: tuple[FolderSnapshot, ...]
    digest: int

    @classmethod
    def of(cls, ids: Sequence[str], tables: Mapping[int, EpisodeTable], index: Index) -> EpochSnapshot:
        """What an index of these tables, by their numbers, covers; `ids` are those of the buffers that they are of."""
        numbers = np.fromiter(tables, np.int64, len(tables))
        items = (index.bounds(numbers + 1) - index.bounds(numbers)).tolist()
        return cls(tuple(map(FolderSnapshot.of, tables, ids, tables.values(), items)), index.digest)

    @property
    def items(self) -> int:
        return sum(stretch.items for stretch in self.stretches)

    def state(self) -> dict[str, Any]:
        """It as lists and whole numbers."""
        sources = [
            {
                "number": s.number,
                "id": s.id,
                "episodes": [list(pair) for pair in s.episodes],
                "open": [list(one) for one in s.open],
                "items": s.items,
            }
            for s in self.stretches
        ]
        return {"sources": sources, "digest": self.digest}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EpochSnapshot:
        """What `state` gave. Raises TypeError, ValueError or KeyError for anything else."""
        return cls(tuple(map(_stretch, state["sources"])), int(state["digest"]))

    def index(self, selection: Selection, sources: Folders, on_stale: str) -> Index:
        """The index as it was, of the tables as they are.

        Args: on_stale: with "redraw", episodes that are gone have runs in it that nobody can read, so that they are
            drawn again when it is their turn.

        Raises:
            StaleEpisodeError: episodes are gone, and `on_stale` is "raise" or cannot tell where their items were.
            SchemaError: other options or folders, or values changed by which items are chosen.
        """
        sources.refresh()
        known = {stretch.number: stretch for stretch in self.stretches}
        sources.reach(np.fromiter(known, np.int64, len(known)))
        now, ids = sources.tables, sources.ids
        numbers = sources.numbers[: len(now)].tolist()
        if sources.shards is None and list(known) != numbers:
            raise SchemaError(f"the epoch is of {len(known)} folders, this reads {len(now)}")
        for stretch, id in zip(self.stretches, ids, strict=False) if sources.shards is None else ():
            if stretch.id != id:
                raise SchemaError(
                    f"{sources.storages[stretch.number].path}: this buffer has the id {id}, the epoch is of "
                    f"{stretch.id}; read the folder that it was begun on, or a copy of it, or begin a new epoch"
                )
        # What is not in it appeared since.
        stretches = [known.get(number) or FolderSnapshot(number, "", (), (), 0) for number in numbers]
        tables = [stretch.of_later(id, table) for stretch, id, table in zip(stretches, ids, now, strict=True)]
        index = selection.index(sources, tables)
        gone = [(stretch, stretch.gone(table)) for stretch, table in zip(stretches, tables, strict=True)]
        if any(serials.size for _, serials in gone):
            for stretch, serials in gone:
                if serials.size and (on_stale == "raise" or selection.top_k is not None):
                    _refuse(sources, stretch.number, serials, "load it with on_stale='redraw', or begin a new epoch")
                index = _with_gone(index, sources, stretch, serials)
        elif index.digest != self.digest:
            raise SchemaError(
                f"{sources.storages[0].path}: the epoch had {self.items} items, of other episodes or timesteps than "
                f"the {len(index)} that these options choose now; give the options of then, or begin a new epoch"
            )
        return index


def _with_gone(index: Index, sources: Folders, stretch: FolderSnapshot, serials: IntArray) -> Index:
    """The index with a run for the items of a folder's episodes that are gone, if they were side by side."""
    ends = np.array([stretch.number, stretch.number + 1])
    first, last = index.bounds(ends).tolist()
    missing = stretch.items - (last - first)
    if not missing:
        return index
    start, stop = index.cuts(ends).tolist()
    at, end = start + np.searchsorted(index.serial[start:stop], serials[[0, -1]])
    if missing < 0 or at != end:
        _refuse(sources, stretch.number, serials, "which items they had cannot be told any more; begin a new epoch")
    return index.with_run(int(at), serial=int(serials[0]), count=missing, source=stretch.number)


Standing: TypeAlias = dict[int, tuple[str, str, int, int, int]]


def standing(sources: Folders) -> Standing:
    """Of each folder as it is now, by its number: (path, id, epoch, nonce, changes).

    The same writer only ever raises the last; whoever takes the lock raises `epoch`, and draws another nonce.
    """
    sources.refresh()
    present = [(n, s) for n, s, _ in sources.by_number(sources.tables) if not s.withdrawn]
    return {n: (str(s.path), s.layout.id, s.state("epoch"), s.state("nonce"), s.state("changes")) for n, s in present}


def require_same(told: Sequence[tuple[str, Standing]], sources: Folders) -> None:
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


def _refuse(sources: Folders, number: int, serials: IntArray, remedy: str) -> NoReturn:
    storage = sources.numbered(number)
    assert storage is not None
    raise StaleEpisodeError(
        f"{storage.path}: {len(serials)} episodes of the epoch, {serials[:5].tolist()} first, were "
        f"overwritten or removed since; {remedy}",
        serials=serials.tolist(),
    )


def _stretch(state: Mapping[str, Any]) -> FolderSnapshot:
    episodes = tuple((int(first), int(last)) for first, last in state["episodes"])
    growing = tuple((int(serial), int(steps), int(flags)) for serial, steps, flags in state["open"])
    number = int(state["number"])
    if not 0 <= number < MAX_SHARDS:
        raise ValueError(f"number: got {number}, expected 0 to {MAX_SHARDS - 1}")
    return FolderSnapshot(number, str(state["id"]), episodes, growing, int(state["items"]))
