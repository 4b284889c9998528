"""Read-ahead: rows that will be read soon are requested from the system, in whole ranges, without waiting for them.

`Disk` requests the rows of one batch, as long as batches come from the disk (`BatchReader` has one). `Readahead`
requests the next window of a block shuffle, from the disk or from a remote store (`epochs.OrderedSampler` makes one).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np

from memmap_buffer.format.blobs import lengths_of
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.folder import will_need
from memmap_buffer.format.source import Rows
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import disk_reads
from memmap_buffer.items.index import Index
from memmap_buffer.items.selection import Selection
from memmap_buffer.items.shuffle import BlockShuffle
from memmap_buffer.schema import Schema
from memmap_buffer.views.batch_builder import BatchBuilder
from memmap_buffer.views.folders import Folders
from memmap_buffer.views.view import View

ANSWER_SECONDS = 2e-4  # a batch that took less did not wait for several rows: no disk answers that much sooner
ROW_GAP = 16 << 10  # rows of a batch at most so many bytes apart are one request: two would take a disk longer
GAP_BYTES = 128 << 10  # rows of a window, and blobs, at most so many bytes apart are one request


class Disk(threading.local):
    """Whether this thread's batches come from the disk, or from memory as most do.

    A copy waits for each row that is not in memory, one after another. If all are requested before, the disk reads many
    at a time. But each range costs a system call, so rows are requested only if the last batch came from the disk.

    Attributes:
        slow: whether the disk was read for the last batch that was watched; True before the first.
        watches: whether disk reads are counted for the next batch: after one that was slow, or took long.
    """

    def __init__(self) -> None:
        self.slow = self.watches = True
        self._reads = 0

    def watch(self) -> None:
        """Note the count of disk reads before a batch: earlier reads, as by writes of this thread, do not count."""
        self._reads = disk_reads()

    def ask(self, builder: BatchBuilder) -> None:
        """Request all rows of a batch from the system, before they are copied."""
        if not len(builder.t):
            return
        if builder.folders.mirrored:  # rows of a remote store are fetched by their `Source`
            return
        coded = list[tuple[Storage, str, IntArray, IntArray]]()
        for storage, chosen, *_ in builder.records.groups:
            wanted: dict[str, list[Rows]] = {}
            for rows in builder.gather.rows_of(builder.batch.values(), chosen):
                wanted.setdefault(rows.name, []).append(rows)
            for name, ranges in wanted.items():
                gap = ROW_GAP // max(1, builder.schema.fields[name].in_file.itemsize)
                low, high = (np.concatenate(part) for part in [*zip(*ranges, strict=True)][1:])
                will_need(storage.maps.rows[name], joined(low, high, gap))
                if name in storage.maps.coded:
                    coded.append((storage, name, low, high))
        for blobs in coded:  # after the rows of every index, which are waited for here, were requested
            ask_for_blobs(*blobs, GAP_BYTES)

    def took(self, seconds: float) -> None:
        """Note how many seconds it took to request and copy a batch."""
        if self.watches:
            self.slow = disk_reads() != self._reads
        self.watches = self.slow or seconds > ANSWER_SECONDS


class Readahead:
    """Requests the rows of each window of a block shuffle while the window before it is read.

    Args:
        selection, folders, index: the items that are read.
        shuffle: the order of the items.
    """

    def __init__(self, selection: Selection, folders: Folders, index: Index, shuffle: BlockShuffle) -> None:
        self._view, self._folders, self._index, self._shuffle = selection.view, folders, index, shuffle
        self._fields = read_fields(self._view, folders.schema)
        # From a remote store two windows are requested ahead. With one, nothing would be transferred from the arrival
        # of its last bytes until it is begun, as the rest of it is still checked and written then.
        self._asked, self._windows = -1, 2 if folders.mirrored else 1
        self._is_first = folders.mirrored
        self._waiting: dict[int, list[tuple[Storage, list[Rows]]]] = {}

    def asked(self, chunks: Iterable[IntArray]) -> Iterator[IntArray]:
        """The chunks of item numbers, (batches, batch size), cut where a window begins; windows are requested there."""
        for numbers in chunks:
            window = numbers[:, -1] // self._shuffle.window
            for part in np.split(numbers, np.flatnonzero(np.diff(window)) + 1):
                self.before(int(part[0, 0]), int(part[-1, -1]))
                yield part

    def before(self, first: int, last: int) -> None:
        """Request the windows of the items first … last of the order, and the next ones, unless they were requested.

        The first call requests nothing from a remote store: the first batch, which is waited for, comes sooner alone.
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
        for window in [passed for passed in self._waiting if passed < first // self._shuffle.window]:
            self._waiting.pop(window).clear()  # passed: what a slow store has not sent of it is not needed any more

    def _ask(self, low: int, high: int, wanted: dict[Storage, list[Rows]]) -> None:
        """Request the rows of the items low … high - 1 of the index, roughly: others are read when they are needed."""
        index = self._index
        start, stop = np.searchsorted(index.starts, [low, high - 1], side="right")
        runs = np.arange(start - 1, stop)
        first = index.locate(np.maximum(index.starts[runs], low)).t
        last = index.locate(np.minimum(index.starts[runs + 1], high) - 1).t
        for number in [0] if index.folder is None else np.unique(index.folder[runs]).tolist():
            of_folder = slice(None) if index.folder is None else index.folder[runs] == number
            storage = self._folders.numbered(number)
            assert storage is not None
            self._ask_folder(storage, index.slot[runs][of_folder], first[of_folder], last[of_folder], wanted)

    def _ask_folder(
        self, storage: Storage, slot: IntArray, first: IntArray, last: IntArray, wanted: dict[Storage, list[Rows]]
    ) -> None:
        """Request rows from the disk; or add them to `wanted`, where they are fetched.

        Args: slot, first, last: (R,) the slots of episodes, and the first and the last timestep of each.
        """
        slot = np.minimum(slot, len(storage.table.length) - 1)  # a smaller shard may have taken the place of this one
        length = storage.table.length[slot]
        if self._view.per_episode:
            first, last = np.zeros_like(first), length
        for name in self._fields:
            field = self._folders.schema.fields[name]
            begin = storage.first_row(slot, field.final)
            stop = np.minimum(last + 2, length + field.final)  # the successor of `last` is read, too
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
    """Request the blobs of rows low … high - 1 (B,) of a field's index; the rows of the index are read at once.

    The blobs of one range lie end to end. Ranges that are at most `gap` bytes apart are one request.
    """
    index, coded = storage.maps.rows[name], storage.maps.coded[name]
    has_rows = high > low
    low, high = low[has_rows], high[has_rows]
    last = index[high - 1]
    begin, stop = (
        np.minimum(offset, len(coded.data)).astype(np.int64)
        for offset in (index[low, 0], last[:, 0] + lengths_of(last))
    )
    # Other ranges have no blob, or their index is damaged.
    is_right = (begin < stop) & (stop - begin <= (high - low) * coded.field.itemsize)
    if is_right.any():
        will_need(coded.data, joined(begin[is_right], stop[is_right], gap))


def joined(low: IntArray, high: IntArray, gap: int) -> list[tuple[int, int]]:
    """Ascending (begin, stop) of the ranges low … high - 1 (B,) of rows; those at most `gap` rows apart become one."""
    order = np.argsort(low)
    low, high = low[order], np.maximum.accumulate(high[order])
    apart = low[1:] - high[:-1] > gap
    begins, ends = np.concatenate([[True], apart]), np.concatenate([apart, [True]])
    return list(zip(low[begins].tolist(), high[ends].tolist(), strict=True))
