"""One epoch: its order, the episodes that it covers, and how much of it was handed out.

`EpochSnapshot` tells in a few numbers which episodes an epoch covers; from them another process builds the same index.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from memmap_buffer.errors import SchemaError, StaleEpisodeError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.records import OPEN
from memmap_buffer.format.shards import MAX_SHARDS
from memmap_buffer.format.source import Traffic
from memmap_buffer.items.index import FolderTable, Index
from memmap_buffer.items.rank_partition import RankPartition
from memmap_buffer.items.selection import Selection
from memmap_buffer.items.shuffle import Shuffle
from memmap_buffer.views.folders import Folders

_NUMBER = attrgetter("number")
NONE: IntArray = np.empty((0, 2), np.int64)
MANY_RANGES = 1000  # from here on they are told packed
MANY_FOLDERS = 16  # of one range each: more are told packed
ID_BYTES = 8  # of the id of each of these: enough to tell it from any other
OTHER = 255  # in the place of a number that is not less


class Handing:
    """How far an epoch is handed out.

    Args:
        number: of the epoch.
        begun: how many of its items were handed out before, by another process.
        items: how many it has.

    Attributes:
        partition: the items that this process hands out.
        batches: how many batches it has handed out.
        over: whether that was the last.
    """

    def __init__(self, number: int, begun: int, items: int) -> None:
        self.number, self.begun, self.items = number, begun, items
        self.partition: RankPartition | None = None
        self.batches = 0
        self.over = False

    @property
    def delivered(self) -> int:
        """How many of its items were handed out, over all ranks, which are taken to be equally far."""
        return self.begun if self.partition is None else self.partition.num_given(self.batches)

    def end(self) -> None:
        """The last batch was handed out."""
        self.over = True

    def delivering(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, counted as they are handed out."""
        return _Delivery(self, batches)


class Epoch(Handing):
    """An epoch whose items are fixed, while its batches are handed out.

    Args:
        seed, number, shuffle: its order.
        index: its items.
        snapshot: the episodes that it covers, where they are known already.
        begun: how many of its items were handed out before, by another process.

    Attributes:
        traffic: what is fetched for it into caches that have a bound.
    """

    def __init__(
        self,
        seed: int,
        number: int,
        shuffle: Shuffle,
        index: Index,
        *,
        snapshot: EpochSnapshot | None = None,
        begun: int = 0,
    ) -> None:
        super().__init__(number, begun, len(index))
        self.seed, self.shuffle, self.index = seed, shuffle, index
        self._snapshot = snapshot
        self.traffic: Traffic | None = None

    def end(self) -> None:
        """The last batch was handed out; the log says what was fetched."""
        super().end()
        if self.traffic is not None:
            self.traffic.tell(f"epoch {self.number}")

    def state(self) -> dict[str, Any]:
        """Where it stands, in numbers, strings and lists."""
        if self._snapshot is None:  # made when a state is asked for, as it looks at every episode
            self._snapshot = EpochSnapshot.of(self.index)
        position = {"seed": self.seed, "epoch": self.number, "delivered": self.delivered}
        return {**position, **self.shuffle.state(), **self._snapshot.state()}

    def generator(self, first: int) -> np.random.Generator:
        """A generator for the items from number `first` on, which take one number each."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, self.number))).advance(first))


class _Delivery:
    """Counts the batches of an epoch. No generator, as that would end with the first batch that fails."""

    def __init__(self, epoch: Handing, batches: Iterator[Any]) -> None:
        self._epoch, self._batches = epoch, batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._epoch.end()
            raise
        except Exception:
            self._epoch.batches += 1  # it had its turn, and the next call gives the one after it
            raise
        self._epoch.batches += 1
        return batch


@dataclass(frozen=True, eq=False)
class FolderSnapshot:
    """The episodes of one folder that an epoch covers.

    Args:
        number: of the folder.
        id: of the buffer, or the begin of it; "" where there is none under its number.
        episodes: (n, 2) first and last serials, ascending; more than one pair where episodes were deleted in between.
        partial: (serial, first step, stop, flags) of episodes that were still being appended to, or that a ring had
            trimmed.
        items: how many items the episodes have.
    """

    number: int
    id: str
    episodes: IntArray
    partial: tuple[tuple[int, int, int, int], ...]
    items: int

    @classmethod
    def of(cls, made_of: FolderTable, items: int) -> FolderSnapshot:
        """The episodes that a table shows."""
        number, id, table = made_of
        serial = table.serial[table.visible]
        cuts = np.flatnonzero(np.diff(serial) > 1)
        ranges = (
            np.stack([serial[np.append(0, cuts + 1)], serial[np.append(cuts, -1)]], axis=1) if len(serial) else NONE
        )
        slots = table.visible
        slots = slots[(table.flags[slots] & OPEN != 0) | (table.start[slots] > 0)]
        columns = [column[slots].tolist() for column in (table.serial, table.start, table.length, table.flags)]
        return cls(number, id, ranges, tuple(zip(*columns, strict=True)), items)

    def state(self) -> dict[str, Any]:
        """The snapshot as lists, whole numbers and text."""
        return {**vars(self), "episodes": _state_of(self.episodes), "partial": [*map(list, self.partial)]}

    @property
    def is_plain(self) -> bool:
        """Whether it is one range of whole episodes."""
        return len(self.id) >= 2 * ID_BYTES and len(self.episodes) == 1 and not self.partial

    def is_of(self, id: str) -> bool:
        """Whether it is of the buffer of this id."""
        return id.startswith(self.id) and bool(id) == bool(self.id)

    def of_later(self, id: str, table: EpisodeTable) -> EpisodeTable:
        """A later table of the folder with these episodes alone, and the steps that they had.

        Args:
            id: of the buffer that the table is of; in the place of a shard another may stand.
        """
        if not self.is_of(id):
            return replace(table, visible=table.visible[:0])
        bounds = np.add(self.episodes, (0, 1)).ravel()
        inside = np.searchsorted(bounds, table.serial[table.visible], side="right") % 2 == 1
        visible = table.visible[inside]
        # The rows of steps that a ring has forgotten since stand as long as their episode is visible.
        start, length, flags = np.zeros_like(table.start), table.length.copy(), table.flags.copy()
        for serial, first, stop, bits in self.partial:
            slot = visible[table.serial[visible] == serial]
            start[slot], length[slot], flags[slot] = first, stop, bits
        return replace(table, visible=visible, start=start, length=length, flags=flags)

    def gone(self, table: EpisodeTable) -> IntArray:
        """The serials of its episodes that a table does not show."""
        first, count = self.episodes[:, 0], np.diff(self.episodes)[:, 0] + 1
        if count.sum() == len(table):
            return np.empty(0, np.int64)
        every = np.arange(int(count.sum())) + np.repeat(first - np.cumsum(count) + count, count)
        return np.setdiff1d(every, table.serial[table.visible], assume_unique=True)


@dataclass(frozen=True, eq=False)
class EpochSnapshot:
    """The episodes that an epoch covers, folder by folder, and the digest of their index."""

    folders: tuple[FolderSnapshot, ...]
    digest: int

    @classmethod
    def of(cls, index: Index) -> EpochSnapshot:
        """The episodes of the tables that an index was made of."""
        each = [FolderSnapshot.of(made_of, int(runs.count.sum())) for made_of, runs in index.by_folder()]
        return cls(tuple(each), index.digest)

    @property
    def items(self) -> int:
        return sum(folder.items for folder in self.folders)

    def state(self) -> dict[str, Any]:
        """The snapshot as lists and whole numbers, as JSON and a checkpoint of torch hold them."""
        plain = [folder for folder in self.folders if folder.is_plain]
        if len(plain) <= MANY_FOLDERS:
            return {"folders": [folder.state() for folder in self.folders], "digest": self.digest}
        others = [folder.state() for folder in self.folders if not folder.is_plain]
        return {"folders": others, "plain": _state_of_plain(plain), "digest": self.digest}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EpochSnapshot:
        """The snapshot that `state` told of. Raises TypeError, ValueError or KeyError for anything else."""
        folders = [*map(_folder_snapshot, state["folders"]), *_plain_folders(state.get("plain", ""))]
        return cls(tuple(sorted(folders, key=_NUMBER)), int(state["digest"]))

    def index(self, selection: Selection, folders: Folders, on_stale: str) -> Index:
        """The index of the epoch, made again of the tables as they are now.

        Args:
            selection: the anchors that are wanted.
            folders: the folders; they are refreshed.
            on_stale: with "redraw", an episode that is gone keeps its run, which nobody can read, so that its items
                are drawn again in their turn.

        Raises:
            StaleEpisodeError: episodes are gone, and `on_stale` is "raise", or where their items were is not known.
            SchemaError: other options or folders, or values changed by which items are chosen.
        """
        folders.refresh()
        by_number = {snapshot.number: snapshot for snapshot in self.folders}
        folders.reach(np.fromiter(by_number, np.int64, len(by_number)))
        now, ids = folders.tables, folders.ids
        numbers = folders.numbers[: len(now)].tolist()
        if folders.shards is None and list(by_number) != numbers:
            raise SchemaError(f"the epoch is of {len(by_number)} folders, this reads {len(now)}")
        for snapshot, id in zip(self.folders, ids, strict=False) if folders.shards is None else ():
            if not snapshot.is_of(id):
                raise SchemaError(
                    f"{folders.storages[snapshot.number].path}: this buffer has the id {id}, the epoch is of "
                    f"{snapshot.id}; read the folder that it was begun on, or a copy of it, or begin a new epoch"
                )
        # Folders that are not in it appeared since.
        snapshots = [by_number.get(number) or FolderSnapshot(number, "", NONE, (), 0) for number in numbers]
        tables = [snapshot.of_later(id, table) for snapshot, id, table in zip(snapshots, ids, now, strict=True)]
        index = selection.index(folders, tables)
        gone = [(snapshot, snapshot.gone(table)) for snapshot, table in zip(snapshots, tables, strict=True)]
        if any(serials.size for _, serials in gone):
            for snapshot, serials in gone:
                if serials.size and (on_stale == "raise" or selection.top_k is not None):
                    _refuse(folders, snapshot.number, serials, "load it with on_stale='redraw', or begin a new epoch")
                index = _with_gone(index, folders, snapshot, serials)
        elif index.digest != self.digest:
            raise SchemaError(
                f"{folders.storages[0].path}: the epoch had {self.items} items, of other episodes or timesteps than "
                f"the {len(index)} that these options choose now; give the options of then, or begin a new epoch"
            )
        return index


def _with_gone(index: Index, folders: Folders, snapshot: FolderSnapshot, serials: IntArray) -> Index:
    """The index with a run for the items of a folder's episodes that are gone, if they were side by side."""
    ends = np.array([snapshot.number, snapshot.number + 1])
    first, last = index.bounds(ends).tolist()
    missing = snapshot.items - (last - first)
    if not missing:
        return index
    start, stop = index.cuts(ends).tolist()
    at, end = start + np.searchsorted(index.serial[start:stop], serials[[0, -1]])
    if missing < 0 or at != end:
        _refuse(folders, snapshot.number, serials, "which items they had cannot be told any more; begin a new epoch")
    return index.with_run(int(at), serial=int(serials[0]), count=missing, folder=snapshot.number)


class FolderState(NamedTuple):
    """A folder as a rank reads it.

    Args:
        path: where it is.
        id: of its buffer.
        term: raised by whoever takes the lock, who draws another nonce, too.
        nonce: of its writer.
        changes: the change counter, which the same writer only raises.
    """

    path: str
    id: str
    term: int
    nonce: int
    changes: int

    def follows(self, other: FolderState) -> bool:
        """Whether this is the other state of the same folder, or a later one."""
        same_writer = self.term == other.term and self.nonce == other.nonce
        return self.changes >= other.changes and (same_writer or self.term > other.term)


def folder_states(folders: Folders) -> dict[int, FolderState]:
    """Each folder as it is now, by its number."""
    folders.refresh()
    present = [(number, s) for number, s, _ in folders.by_number(folders.tables) if not s.withdrawn]
    words = ("term", "nonce", "changes")
    return {number: FolderState(str(s.path), s.layout.id, *map(s.state, words)) for number, s in present}


def require_same(ranks: Sequence[tuple[str, dict[int, FolderState]]], folders: Folders) -> None:
    """Raise SchemaError where a rank reads other data: its folders were not, before, what they are here now, or less.

    Args:
        ranks: of each rank, its host and the state of its folders.
    """
    now = folder_states(folders)
    for rank, (host, states) in enumerate(ranks):
        for number, theirs in states.items():
            mine = now.get(number)
            if mine is None:
                why = f"of which nothing stands in {folders.storages[0].path.parent}"
            elif mine.id != theirs.id:
                why = f"and {mine.path} is another buffer: their ids are {theirs.id} and {mine.id}"
            elif not mine.follows(theirs):
                why = f"and {mine.path} is an older copy of that, or each was written to since it was copied"
            else:
                continue
            raise SchemaError(
                f"rank {rank} reads {theirs.path} on {host}, {why}; let all ranks read one folder, or equal copies; a "
                "rank with data of its own gives rank=0, world_size=1"
            )


def _refuse(folders: Folders, number: int, serials: IntArray, remedy: str) -> NoReturn:
    storage = folders.numbered(number)
    assert storage is not None
    raise StaleEpisodeError(
        f"{storage.path}: {len(serials)} episodes of the epoch, {serials[:5].tolist()} first, were "
        f"overwritten or removed since; {remedy}",
        serials=serials.tolist(),
    )


def _folder_snapshot(state: Mapping[str, Any]) -> FolderSnapshot:
    episodes = _ranges(state["episodes"])
    partial = tuple((int(serial), int(first), int(stop), int(flags)) for serial, first, stop, flags in state["partial"])
    number = int(state["number"])
    if not 0 <= number < MAX_SHARDS:
        raise ValueError(f"number: got {number}, expected 0 to {MAX_SHARDS - 1}")
    id = str(state["id"])
    if id.strip("0123456789abcdef"):
        raise ValueError(f"id: got {id!r}, expected hexadecimal digits")
    return FolderSnapshot(number, id, episodes, partial, int(state["items"]))


def _state_of_plain(folders: Sequence[FolderSnapshot]) -> str:
    """Many folders of one range each as text: what they have in common takes nothing, the rest 12 bytes each."""
    columns = np.array([(folder.number, *folder.episodes[0], folder.items) for folder in folders], "<i8").T.copy()
    columns[0] = np.diff(columns[0], prepend=0)
    columns[2] -= columns[1]
    ids = bytes.fromhex("".join(folder.id[: 2 * ID_BYTES] for folder in folders))
    return _packed(len(folders), columns.tobytes() + ids)


def _plain_folders(text: str) -> list[FolderSnapshot]:
    """The folders that `_state_of_plain` told of. Raises TypeError or ValueError for anything else."""
    if not text:
        return []
    count, data = _unpacked(text, 4 * 8 + ID_BYTES)
    if len(data) != count * (4 * 8 + ID_BYTES):
        raise ValueError(f"plain: got {text[:40]!r}…, which is cut short")
    columns, ids = np.frombuffer(data[: 4 * 8 * count], "<i8").reshape(4, count).copy(), data[4 * 8 * count :].hex()
    columns[0], columns[2] = np.cumsum(columns[0]), columns[2] + columns[1]
    size = 2 * ID_BYTES
    return [
        _folder_snapshot(
            {"number": number, "id": ids[size * i : size * (i + 1)], "episodes": [[first, last]], "partial": ()}
            | {"items": items}
        )
        for i, (number, first, last, items) in enumerate(columns.T.tolist())
    ]


def _state_of(episodes: IntArray) -> list[list[int]] | str:
    """Ranges of serials as a list of pairs, or many as text: how far apart their ends are, packed.

    An episode that was deleted takes a pair of 20 bytes in a list; in the text less than a byte.
    """
    if len(episodes) <= MANY_RANGES:
        listed: list[list[int]] = episodes.tolist()
        return listed
    apart = np.diff(episodes.ravel(), prepend=0)
    small = np.minimum(apart, OTHER)
    large = apart[small == OTHER]  # the rest, so that a long one makes the others no longer
    return _packed(len(episodes), small.astype(np.uint8).tobytes() + large.astype("<i8").tobytes())


def _packed(count: int, data: bytes) -> str:
    """The bytes of so many things as text."""
    return f"{count}:{base64.b64encode(zlib.compress(data, 6)).decode()}"


def _unpacked(text: str, most: int) -> tuple[int, bytes]:
    """How many things `_packed` gave, and their bytes, at most so many of each. Raises ValueError for anything else."""
    count, packed = text.split(":")
    unpacked = zlib.decompressobj()
    try:
        data = unpacked.decompress(base64.b64decode(packed, validate=True), max(1, most * int(count)))
    except zlib.error as error:
        raise ValueError(f"got {text[:40]!r}…, which is not packed as a state packs it") from error
    if not unpacked.eof:
        raise ValueError(f"got {text[:40]!r}…, which is cut short")
    return int(count), data


def _ranges(state: Any) -> IntArray:
    """The ranges that `_state_of` gave. Raises TypeError or ValueError for anything else."""
    if not isinstance(state, str):
        pairs = np.array([(int(first), int(last)) for first, last in state], np.int64).reshape(-1, 2)
    else:
        count, data = _unpacked(state, 18)
        small = np.frombuffer(data[: 2 * count], np.uint8).astype(np.int64)
        large = np.frombuffer(data[2 * count :], "<i8")
        if len(small) != 2 * count or np.count_nonzero(small == OTHER) != len(large):
            raise ValueError(f"episodes: got {state[:40]!r}…, which is cut short")
        small[small == OTHER] = large
        pairs = np.cumsum(small).reshape(-1, 2)
    if len(pairs) and not (pairs[0, 0] >= 0 and (pairs[:, 0] <= pairs[:, 1]).all() and _apart(pairs)):
        raise ValueError(f"episodes: got {str(state)[:40]}…, expected ascending ranges of serials")
    return pairs


def _apart(pairs: IntArray) -> bool:
    return bool((pairs[1:, 0] > pairs[:-1, 1]).all())
