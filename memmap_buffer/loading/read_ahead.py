"""Read-ahead: the system is asked for rows that will be read soon, in whole ranges, without waiting for them.

`Disk` does so for the rows of one batch, as long as batches come from the disk; `Readahead` for the next window of a
block shuffle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np

from memmap_buffer.format.blobs import lengths_of
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.folder import disk_reads, will_need
from memmap_buffer.format.source import Rows
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.index import Index
from memmap_buffer.items.selection import Selection
from memmap_buffer.items.shuffle import BlockShuffle
from memmap_buffer.schema import Schema
from memmap_buffer.views.batch_builder import BatchBuilder
from memmap_buffer.views.folders import Folders
from memmap_buffer.views.view import View

ANSWER_SECONDS = 2e-4  # a batch that waited for several rows took longer, as no disk answers much sooner
ROW_GAP = 16 << 10  # rows of a batch so near to each other are one request: it costs a disk as much as these bytes
GAP_BYTES = 128 << 10  # rows of a window so near to each other are read in one go


class Disk(threading.local):
    """Whether this thread's batches come from the disk, or from memory as most do.

    Rows that the system has to read first stop a copy one by one. Asked for all together before, the disk reads many at
    a time; but that is a system call for each range, so rows that are in memory are not asked for.

    Attributes:
        slow: whether the disk was read for the last batch; True before the first.
        watches: whether it is to be found out for the next batch: after one that was slow, or took long.
    """

    def __init__(self) -> None:
        self.slow = self.watches = True
        self._reads = 0

    def watch(self) -> None:
        """Take in what was read before a batch, as by steps that this thread wrote to fresh pages."""
        self._reads = disk_reads()

    def ask(self, builder: BatchBuilder) -> None:
        """Have the system read all rows of a batch, many at a time."""
        if not len(builder.t):
            return
        if builder.folders.mirrored:  # their rows are fetched
            return
        coded = list[tuple[Storage, str, IntArray, IntArray]]()
        for storage, chosen, *_ in builder.records.groups:
            wanted: dict[str, list[Rows]] = {}
            for rows in builder.gather.rows_of(builder.batch.values(), chosen):
                wanted.setdefault(rows.name, []).append(rows)
            for name, each in wanted.items():
                gap = ROW_GAP // max(1, builder.schema.fields[name].in_file.itemsize)
                low, high = (np.concatenate(part) for part in [*zip(*each, strict=True)][1:])
                will_need(storage.maps.rows[name], joined(low, high, gap))
                if name in storage.maps.coded:
                    coded.append((storage, name, low, high))
        for place in coded:  # all indexes were asked for by now
            ask_for_blobs(*place, GAP_BYTES)

    def took(self, seconds: float) -> None:
        """Take in how long a batch took to be asked for and copied."""
        if self.watches:
            self.slow = disk_reads() != self._reads
        self.watches = self.slow or seconds > ANSWER_SECONDS


class Readahead:
    """Asks for each window of a block shuffle while the one before it is read.

    Args:
        selection, folders, index: the items that are read.
        shuffle: their order.
    """

    def __init__(self, selection: Selection, folders: Folders, index: Index, shuffle: BlockShuffle) -> None:
        self._view, self._folders, self._index, self._shuffle = selection.view, folders, index, shuffle
        self._fields = read_fields(self._view, folders.schema)
        # Of a store two windows are asked for: with one, its line has nothing to do from when that is there until it is
        # read, as the rest of a window is still checked and written when its last bytes have come.
        self._asked, self._windows = -1, 2 if folders.mirrored else 1
        self._is_first = folders.mirrored
        self._waiting: dict[int, list[tuple[Storage, list[Rows]]]] = {}

    def asked(self, chunks: Iterable[IntArray]) -> Iterator[IntArray]:
        """The numbers of items (batches, items of a batch), cut where a window begins, which is asked for there."""
        for numbers in chunks:
            window = numbers[:, -1] // self._shuffle.window
            for part in np.split(numbers, np.flatnonzero(np.diff(window)) + 1):
                self.before(int(part[0, 0]), int(part[-1, -1]))
                yield part

    def before(self, first: int, last: int) -> None:
        """Ask for the windows of the items first … last of the order, and those behind, if they are not asked for.

        The first call asks a store for nothing: the first batch, which somebody waits for, has its line for itself.
        """
        if self._is_first:
            self._is_first = False
            return
        begin = max(self._asked + 1, first // self._shuffle.window)
        self._asked = last // self._shuffle.window + self._windows
        for window in range(begin, self._asked + 1):
            wanted: dict[Storage, list[Rows]] = {}
            for low, high in self._shuffle.places(window):
                self._ask(low, high, wanted)
            if wanted:
                self._waiting[window] = list(wanted.items())
                source = next(iter(wanted)).mirror
                assert source is not None
                source.bring_later(self._waiting[window])
        for window in [each for each in self._waiting if each < first // self._shuffle.window]:
            self._waiting.pop(window).clear()  # of a slow store: what was read by now would be fetched again

    def _ask(self, low: int, high: int, wanted: dict[Storage, list[Rows]]) -> None:
        """The rows of the anchors low … high - 1; where the guess is wrong they are read when they are needed."""
        index = self._index
        start, stop = np.searchsorted(index.starts, [low, high - 1], side="right")
        run = np.arange(start - 1, stop)
        first = index.locate(np.maximum(index.starts[run], low)).t
        last = index.locate(np.minimum(index.starts[run + 1], high) - 1).t
        for number in [0] if index.folder is None else np.unique(index.folder[run]).tolist():
            mine = slice(None) if index.folder is None else index.folder[run] == number
            storage = self._folders.numbered(number)
            assert storage is not None
            self._ask_folder(storage, index.slot[run][mine], first[mine], last[mine], wanted)

    def _ask_folder(
        self, storage: Storage, slot: IntArray, first: IntArray, last: IntArray, wanted: dict[Storage, list[Rows]]
    ) -> None:
        """Ask for rows, or add them to those that are fetched together."""
        slot = np.minimum(slot, len(storage.table.length) - 1)  # a shard may be another, smaller one by now
        length = storage.table.length[slot]
        if self._view.per_episode:
            first, last = np.zeros_like(first), length
        for name in self._fields:
            field = self._folders.schema.fields[name]
            begin = storage.first_row(slot, field.final)
            stop = np.minimum(last + 2, length + field.final)  # a successor is read with it
            low, high = begin + np.clip(first, 0, stop), begin + stop
            if storage.mirror is not None:
                wanted.setdefault(storage, []).append(Rows(name, low, high))
                continue
            will_need(storage.maps.rows[name], joined(low, high, GAP_BYTES // max(1, field.in_file.itemsize)))
            if name in storage.maps.coded:
                ask_for_blobs(storage, name, low, high, GAP_BYTES)


def read_fields(view: View, schema: Schema) -> list[str]:
    """The fields that a view reads rows of."""
    keys = set(view.keys(schema))
    return [name for name in schema.fields if keys & {name, f"next_{name}", f"seq_{name}"}]


def ask_for_blobs(storage: Storage, name: str, low: IntArray, high: IntArray, gap: int) -> None:
    """Have the system read the blobs of rows low … high - 1 (B,) of an index; those rows are waited for.

    They lie one behind the other; ranges that are at most `gap` bytes apart are read in one go.
    """
    index, coded = storage.maps.rows[name], storage.maps.coded[name]
    some = high > low
    low, high = low[some], high[some]
    last = index[high - 1]
    begin, stop = (
        np.minimum(at, len(coded.data)).astype(np.int64) for at in (index[low, 0], last[:, 0] + lengths_of(last))
    )
    # else a row has no blob, or its index is wrong
    right = (begin < stop) & (stop - begin <= (high - low) * coded.field.itemsize)
    if right.any():
        will_need(coded.data, joined(begin[right], stop[right], gap))


def joined(low: IntArray, high: IntArray, gap: int) -> list[tuple[int, int]]:
    """Ranges of rows low … high - 1 (B,), in their order; ranges that are at most `gap` rows apart become one."""
    order = np.argsort(low)
    low, high = low[order], np.maximum.accumulate(high[order])
    apart = low[1:] - high[:-1] > gap
    begins, ends = np.concatenate([[True], apart]), np.concatenate([apart, [True]])
    return list(zip(low[begins].tolist(), high[ends].tolist(), strict=True))
