"""One epoch of a loader: its items, how many of them were delivered, and its state in a checkpoint.

`loading.epochs` makes an `Epoch` for each pass over the data. `Epoch.state` describes the episodes that it covers by an
`EpochSnapshot`, a few numbers for each folder; `EpochSnapshot.index` makes the same index again from them, in another
process or after a restart. The functions behind `FolderState` compare the folders that the ranks of a distributed
training read; the last ones pack long states as text.
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
from memmap_buffer.format.records import DIGEST, EXTENT, OPEN, SERIAL, SHOWN
from memmap_buffer.format.shards import MAX_SHARDS
from memmap_buffer.format.source import Traffic
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.index import FolderTable, Index
from memmap_buffer.items.rank_partition import RankPartition
from memmap_buffer.items.selection import Selection
from memmap_buffer.items.shuffle import Shuffle
from memmap_buffer.views.folders import Folders, id_of

_NUMBER = attrgetter("number")
NONE: IntArray = np.empty((0, 2), np.int64)
MANY_RANGES = 1000  # the most ranges of serials that a state lists; more are packed as text
MANY_FOLDERS = 16  # the most plain folders that a state lists; more are packed as text
ID_BYTES = 8  # of the id of each packed folder: enough to tell two apart


class Handing:
    """The progress of an epoch: how many of its items were delivered.

    Args:
        number: the number of the epoch.
        begun: the items that were delivered before, by the process whose state was loaded.
        items: the number of its items.

    Attributes:
        partition: the items that this process delivers; None before they are known.
        batches: the batches that this process has delivered.
        over: whether that was the last one.
    """

    def __init__(self, number: int, begun: int, items: int) -> None:
        self.number, self.begun, self.items = number, begun, items
        self.partition: RankPartition | None = None
        self.batches = 0
        self.over = False

    @property
    def delivered(self) -> int:
        """The number of delivered items, of all ranks together, which are taken to be equally far."""
        return self.begun if self.partition is None else self.partition.num_given(self.batches)

    def end(self) -> None:
        """Note that the last batch was delivered."""
        self.over = True

    def delivering(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count the batches as they are delivered; gives the same batches."""
        return _Delivery(self, batches)


class Epoch(Handing):
    """An epoch whose items are fixed from its begin on.

    Args:
        seed, number, shuffle: they choose its order.
        index: its items.
        snapshot: the episodes that it covers, if they are known already.
        begun: the items that were delivered before, see `Handing`.

    Attributes:
        traffic: the bytes that are fetched during the epoch into caches with a bound; None if there are none.
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
        """Note that the last batch was delivered, and log how much was fetched."""
        super().end()
        if self.traffic is not None:
            self.traffic.tell(f"epoch {self.number}")

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: numbers, strings and lists."""
        if self._snapshot is None:  # only now, as making it looks at every episode
            self._snapshot = EpochSnapshot.of(self.index)
        position = {"seed": self.seed, "epoch": self.number, "delivered": self.delivered}
        return {**position, **self.shuffle.state(), **self._snapshot.state()}

    def generator(self, first: int) -> np.random.Generator:
        """A generator for the items from number `first` on; each item draws one number from it."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, self.number))).advance(first))


class _Delivery:
    """An iterator that counts the batches of an epoch. A generator would end with the first batch that fails."""

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
            self._epoch.batches += 1  # a failed batch counts as delivered: the next call gives the one after it
            raise
        self._epoch.batches += 1
        return batch


@dataclass(frozen=True, eq=False)
class FolderSnapshot:
    """The episodes of one folder that an epoch covers.

    Args:
        number: the number of the folder.
        id: the id of the buffer, or its first digits; "" if no folder has the number.
        episodes: (n, 2) int64 ascending ranges of serials, first and last; several if episodes between were deleted.
        partial: (serial, first step, stop, flags) of each episode that was open, or that a ring had trimmed.
        items: the number of items of these episodes.
    """

    number: int
    id: str
    episodes: IntArray
    partial: tuple[tuple[int, int, int, int], ...]
    items: int

    @classmethod
    def of(cls, made_of: FolderTable, items: int) -> FolderSnapshot:
        """The snapshot of the episodes that a table shows, with `items` items."""
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
        """Whether it is one range of whole episodes, so that it can be packed."""
        return len(self.id) >= 2 * ID_BYTES and len(self.episodes) == 1 and not self.partial

    def is_of(self, id: str) -> bool:
        """Whether it is a snapshot of the buffer with this id."""
        return id.startswith(self.id) and bool(id) == bool(self.id)

    def of_later(self, id: str, table: EpisodeTable) -> EpisodeTable:
        """A later table of the folder, cut down to the episodes of the snapshot and the steps that they had.

        Args:
            id: the id of the buffer that the table is of: another shard may have taken the number.
            table: the later table.
        """
        if not self.is_of(id):
            return replace(table, visible=table.visible[:0])
        bounds = np.add(self.episodes, (0, 1)).ravel()
        inside = np.searchsorted(bounds, table.serial[table.visible], side="right") % 2 == 1
        visible = table.visible[inside]
        # A ring may have dropped some of these steps since. Their rows stay as long as their episode is visible.
        start, length, flags = np.zeros_like(table.start), table.length.copy(), table.flags.copy()
        for serial, first, stop, bits in self.partial:
            slot = visible[table.serial[visible] == serial]
            start[slot], length[slot], flags[slot] = first, stop, bits
        return replace(table, visible=visible, start=start, length=length, flags=flags)

    def gone(self, table: EpisodeTable) -> IntArray:
        """The serials of its episodes that a table (see `of_later`) does not show."""
        first, count = self.episodes[:, 0], np.diff(self.episodes)[:, 0] + 1
        if count.sum() == len(table):
            return np.empty(0, np.int64)
        serials = np.arange(int(count.sum())) + np.repeat(first - np.cumsum(count) + count, count)
        return np.setdiff1d(serials, table.serial[table.visible], assume_unique=True)


@dataclass(frozen=True, eq=False)
class EpochSnapshot:
    """The episodes that an epoch covers, folder by folder, and the digest of the epoch's index."""

    folders: tuple[FolderSnapshot, ...]
    digest: int

    @classmethod
    def of(cls, index: Index) -> EpochSnapshot:
        """The snapshot of the tables that an index was made from."""
        snapshots = [FolderSnapshot.of(made_of, int(runs.count.sum())) for made_of, runs in index.by_folder()]
        return cls(tuple(snapshots), index.digest)

    @property
    def items(self) -> int:
        """The number of items of the epoch."""
        return sum(folder.items for folder in self.folders)

    def state(self) -> dict[str, Any]:
        """The snapshot as lists, whole numbers and text, which fit into JSON and into a checkpoint of torch."""
        plain = [folder for folder in self.folders if folder.is_plain]
        if len(plain) <= MANY_FOLDERS:
            return {"folders": [folder.state() for folder in self.folders], "digest": self.digest}
        others = [folder.state() for folder in self.folders if not folder.is_plain]
        return {"folders": others, "plain": _state_of_plain(plain), "digest": self.digest}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EpochSnapshot:
        """The snapshot that `state` describes. Raises TypeError, ValueError or KeyError: it is not such a state."""
        folders = [*map(_folder_snapshot, state["folders"]), *_plain_folders(state.get("plain", ""))]
        return cls(tuple(sorted(folders, key=_NUMBER)), int(state["digest"]))

    def index(self, selection: Selection, folders: Folders, on_stale: str) -> Index:
        """The index of the epoch, made again from the tables as they are now.

        Args:
            selection: the anchors that are wanted.
            folders: the folders; they are refreshed.
            on_stale: with "redraw", episodes that are gone keep their place in the order: one run without readable
                anchors stands for them, and its items are drawn again when their turn comes.

        Raises:
            StaleEpisodeError: episodes are gone, and `on_stale` is "raise", or the place of their items is not known.
            SchemaError: the options or the folders are others, or values that choose items have changed.
        """
        folders.refresh()
        by_number = {snapshot.number: snapshot for snapshot in self.folders}
        folders.reach(np.fromiter(by_number, np.int64, len(by_number)))
        now, ids = folders.tables, [*map(id_of, folders.storages)]
        numbers = folders.numbers[: len(now)].tolist()
        if folders.shards is None and list(by_number) != numbers:
            raise SchemaError(f"the epoch is of {len(by_number)} folders, this reads {len(now)}")
        for snapshot, id in zip(self.folders, ids, strict=False) if folders.shards is None else ():
            if not snapshot.is_of(id):
                raise SchemaError(
                    f"{folders.storages[snapshot.number].path}: this buffer has the id {id}, the epoch is of "
                    f"{snapshot.id}; read the folder that it was begun on, or a copy of it, or begin a new epoch"
                )
        # A folder without a snapshot appeared after the epoch began: no episode of it counts.
        snapshots = [by_number.get(number) or FolderSnapshot(number, "", NONE, (), 0) for number in numbers]
        tables = [snapshot.of_later(id, table) for snapshot, id, table in zip(snapshots, ids, now, strict=True)]
        index = selection.index(folders, tables)
        gone = [(snapshot, snapshot.gone(table)) for snapshot, table in zip(snapshots, tables, strict=True)]
        gone = [(snapshot, serials) for snapshot, serials in gone if serials.size]
        for snapshot, serials in gone:
            if on_stale == "raise" or selection.top_k is not None:
                _refuse(folders, snapshot.number, serials, "load it with on_stale='redraw', or begin a new epoch")
            index = _with_gone(index, folders, snapshot, serials)
        # Of episodes that are gone no digest can be taken; the others must have as many items as then.
        if len(index) != self.items if gone else index.digest != self.digest:
            raise SchemaError(
                f"{folders.storages[0].path}: the epoch had {self.items} items, of other episodes or timesteps than "
                f"the {len(index)} that these options choose now; give the options of then, or begin a new epoch"
            )
        return index


def _with_gone(index: Index, folders: Folders, snapshot: FolderSnapshot, serials: IntArray) -> Index:
    """The index with a run for the items of a folder's episodes that are gone. They must have been side by side."""
    ends = np.array([snapshot.number, snapshot.number + 1])
    first, last = index.bounds(ends).tolist()
    missing = snapshot.items - (last - first)
    if not missing:
        return index
    start, stop = index.cuts(ends).tolist()
    position, end = start + np.searchsorted(index.serial[start:stop], serials[[0, -1]])
    if missing < 0 or position != end:
        _refuse(folders, snapshot.number, serials, "which items they had cannot be told any more; begin a new epoch")
    return index.with_run(int(position), serial=int(serials[0]), count=missing, folder=snapshot.number)


class FolderState(NamedTuple):
    """The state of a folder, by which ranks find out whether they read the same data.

    Args:
        path: the path of the folder.
        id: the id of its buffer.
        term: a counter: each writer raises it when it takes the lock.
        nonce: a random number that the writer drew then. A copy that had no writer yet has none, and the other numbers
            are those of any such copy: there it is a checksum of the episodes.
        changes: the change counter. One writer only raises it.
    """

    path: str
    id: str
    term: int
    nonce: int
    changes: int

    def follows(self, other: FolderState) -> bool:
        """Whether this is the same state as `other`, or a later one, of folders with the same id."""
        same_writer = self.term == other.term and self.nonce == other.nonce
        return self.changes >= other.changes and (same_writer or self.term > other.term)


def folder_states(folders: Folders) -> dict[int, FolderState]:
    """Number -> the state as of now, for each folder that is there."""
    folders.refresh()
    shown = folders.by_number(folders.tables)
    return {number: _state_now(storage, table) for number, storage, table in shown if not storage.withdrawn}


def _state_now(storage: Storage, table: EpisodeTable) -> FolderState:
    term, nonce, changes = map(storage.state, ("term", "nonce", "changes"))
    if not nonce:
        columns = storage.maps.words[table.visible][:, [SERIAL, EXTENT, DIGEST, SHOWN]]
        nonce = zlib.crc32(columns.tobytes())
    return FolderState(str(storage.path), storage.layout.id, term, nonce, changes)


def require_same(ranks: Sequence[tuple[str, dict[int, FolderState]]], folders: Folders) -> None:
    """Raise SchemaError: a rank reads other data. Its folders must be here, in the same state or a later one.

    Args:
        ranks: (host, the states of its folders) of each rank.
        folders: the folders of this process.

    Raises: StaleEpisodeError: a shard of another rank was joined with others before this one opened the root.
    """
    numbers = np.array([number for _, states in ranks for number in states], np.int64)
    folders.reach(numbers)  # the list at a URL is read again only after a while; another rank may have read it just now
    now = folder_states(folders)
    for rank, (host, states) in enumerate(ranks):
        for number, state in states.items():
            own = now.get(number)
            if own is None:
                why = f"of which nothing stands in {folders.storages[0].path.parent}"
            elif own.id != state.id:
                why = f"and {own.path} is another buffer: their ids are {state.id} and {own.id}"
            elif not own.follows(state):
                why = f"and {own.path} is an older copy of that, or each was written to or recoded since it was copied"
            else:
                continue
            raise SchemaError(
                f"rank {rank} reads {state.path} on {host}, {why}; let all ranks read one folder, or equal copies; a "
                "rank with data of its own gives rank=0, world_size=1"
            )


def _refuse(folders: Folders, number: int, serials: IntArray, remedy: str) -> NoReturn:
    """Raise StaleEpisodeError: these episodes of a folder are gone."""
    storage = folders.numbered(number)
    assert storage is not None
    raise StaleEpisodeError(
        f"{storage.path}: {len(serials)} episodes of the epoch, {serials[:5].tolist()} first, were "
        f"overwritten or removed since; {remedy}",
        serials=serials.tolist(),
    )


def _folder_snapshot(state: Mapping[str, Any]) -> FolderSnapshot:
    """The snapshot that `FolderSnapshot.state` describes. Raises TypeError, ValueError or KeyError: it is no state."""
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
    """Many plain folders packed as text: about 12 bytes for each, as common parts compress to almost nothing."""
    columns = np.array([(folder.number, *folder.episodes[0], folder.items) for folder in folders], "<i8").T.copy()
    columns[0] = np.diff(columns[0], prepend=0)
    columns[2] -= columns[1]
    ids = bytes.fromhex("".join(folder.id[: 2 * ID_BYTES] for folder in folders))
    return _packed(len(folders), columns.tobytes() + ids)


def _plain_folders(text: str) -> list[FolderSnapshot]:
    """The folders that `_state_of_plain` packed. Raises TypeError or ValueError: the text is not from there."""
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
    """Ranges of serials (n, 2) as a list of pairs; more than `MANY_RANGES` as text, the differences of the ends packed.

    A deleted episode adds a pair: 20 bytes in a list, less than one in the text.
    """
    if len(episodes) <= MANY_RANGES:
        listed: list[list[int]] = episodes.tolist()
        return listed
    apart = np.diff(episodes.ravel(), prepend=0).astype("<i8")
    # The lowest bytes of all numbers, then the next ones: those are zeros, and compress to nothing.
    return _packed(len(episodes), apart.view(np.uint8).reshape(-1, 8).T.tobytes())


def _packed(count: int, data: bytes) -> str:
    """The bytes of `count` entries as text: the count, and the compressed bytes."""
    return f"{count}:{base64.b64encode(zlib.compress(data, 6)).decode()}"


def _unpacked(text: str, most: int) -> tuple[int, bytes]:
    """(count, bytes) of a text by `_packed`, at most `most` bytes an entry. Raises ValueError: it is no such text."""
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
    """The ranges (n, 2) that `_state_of` gave. Raises TypeError or ValueError: `state` is not from there."""
    if not isinstance(state, str):
        pairs = np.array([(int(first), int(last)) for first, last in state], np.int64).reshape(-1, 2)
    else:
        count, data = _unpacked(state, 16)
        if len(data) != 16 * count:
            raise ValueError(f"episodes: got {state[:40]!r}…, which is cut short")
        apart = np.frombuffer(data, np.uint8).reshape(8, -1).T.copy().view("<i8")
        pairs = np.cumsum(apart, dtype=np.int64).reshape(-1, 2)
    first, last = pairs.T
    if len(pairs) and not (first[0] >= 0 and (first <= last).all() and (first[1:] > last[:-1]).all()):
        raise ValueError(f"episodes: got {str(state)[:40]}…, expected ascending ranges of serials")
    return pairs
