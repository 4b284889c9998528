"""The blocks of a mirror: which of them are there, told by one counter a block that all processes of a host share, the
locks of those that are being fetched, and how their bytes come to the disk and go from it.

The counter is odd while the block is absent. A reader takes the counters before it copies and compares them afterwards,
so that it never takes the zeros of a block that was given back for data. Whoever fetches a block, or gives it back,
holds its lock: a byte of the cache's lock file (`lockf`) against other processes, and an entry of `_busy` against other
threads of this process.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError
from memmap_buffer.format.folder import MIRROR, Folder
from memmap_buffer.format.host import boot_id
from memmap_buffer.format.layout import ArrayFile
from memmap_buffer.format.lock import Turn
from memmap_buffer.format.syscalls import (
    RangeLocks,
    random_bytes,
    read_at,
    renew_after_fork,
    write_all,
)
from memmap_buffer.remote.layout import DataFiles, runs

IntArray = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
COUNTER, USED, LOCAL = range(3)  # words of a block: its counter; `now` at its last use; 1 if it may take disk space
TICKS = 256  # per second: windows of a small cache are read in less than a second
SLACK = 3600 * TICKS  # by so much the clocks of processes may differ
NAME = MIRROR
_BOOT, _REMOVAL = 4, 2  # words after those of the blocks: the id of the boot, and a random number of the last removal
_PART = 1 << 12  # blocks that are looked at together
_LOCK_BITS = 22  # a mirror has 2**22 bytes of the lock file: locks for 1 TiB of blocks
_AT_A_TIME = 1024  # blocks that are given back under locks at a time, as others wait for these locks
NOT_WHOLE = (FileNotFoundError, NotADirectoryError, CorruptBufferError)  # opening a mirror that is not whole


class RemovedError(Exception):
    """The mirror was removed, or another one was made in its place."""


class Blocks:
    """The blocks of one mirror, as this process sees them.

    Args:
        folder: the folder of the mirror, held.
        files: its data files.
        locks: the locks of the cache. The place of the mirror's locks in their file is told by 10 hexadecimal digits of
            its version, the end of its name. Two mirrors with the same digits only wait for each other's blocks in
            vain.

    Attributes:
        path: the path of the folder.
        files: its data files.
        sizes: (count,) the bytes of each block; the last block of a file is what is left of it.
        words: (count, 3) u4 that all processes store to, see `COUNTER`.
        key: the `Folder.file_key` of the file of these words: another file has another.
    """

    _by_key: ClassVar[WeakValueDictionary[tuple[int, int], Blocks]] = WeakValueDictionary()  # threads share `_busy`
    _making = Turn()

    def __init__(self, folder: Folder, files: DataFiles, locks: RangeLocks) -> None:
        self.path, self.files = folder.path, files
        self.sizes, count = files.block_sizes(), files.count
        whole: Words = folder.map_shared(words_file(count))
        self.key = folder.file_key(NAME)
        self.words: Words = whole[: 3 * count].reshape(-1, 3)
        self._boot: Words = whole[3 * count : 3 * count + _BOOT]
        self._removal: Words = whole[3 * count + _BOOT :]
        self._looked_at: tuple[bytes, int] = b"", 0  # (the last removal, the first block that was absent since)
        self._locks, self._first = locks, int(self.path.name.rpartition("-")[2][:10], 16) << _LOCK_BITS
        self.renew()
        renew_after_fork(self)
        self._begin_boot()

    def renew(self) -> None:
        """In a forked child: nothing is busy, as the threads that were at work are the parent's."""
        self._busy: set[int] = set()
        self._changed = threading.Condition()

    @classmethod
    def of(cls, folder: Folder, files: DataFiles, locks: RangeLocks) -> Blocks:
        """The blocks of a mirror; the same object for the same mirror.

        Raises:
            FileNotFoundError, CorruptBufferError: the file of the words is missing, or is not as it must be.
        """
        with cls._making.lock:
            blocks = cls._by_key.get(folder.file_key(NAME))
            if blocks is None:
                blocks = cls(folder, files, locks)
                cls._by_key[blocks.key] = blocks
            blocks.path = folder.path  # where it stands now
            return blocks

    def _begin_boot(self) -> None:
        """After another boot of the machine, count all blocks as absent: their bytes may not have reached the disk.

        They are checked before they are fetched again. Whoever holds this lock waits for nothing else, and nobody
        fetches before the new boot is noted.
        """
        now = np.frombuffer(boot_id(), np.uint32)
        if not np.array_equal(self._boot, now):
            self._locks.take(self._first + len(self.words), 1)
            try:
                if not np.array_equal(self._boot, now):
                    self.words[:, COUNTER] |= np.uint32(1)
                    self._boot[:] = now
            finally:
                self._locks.give(self._first + len(self.words), 1)

    def absent(self, blocks: IntArray) -> IntArray:
        """The blocks among `blocks` that are not there."""
        absent: IntArray = blocks[self.words[blocks, COUNTER] & np.uint32(1) == 1]
        return absent

    def touch(self, blocks: IntArray, tick: int) -> None:
        """Note that `blocks` are used at `tick`, see `now`."""
        self.words[blocks, USED] = tick

    def add(self, blocks: IntArray | slice) -> None:
        """Note that blocks are there. Their locks are held."""
        self.words[blocks, COUNTER] += self.words[blocks, COUNTER] & np.uint32(1)

    def remove(self, blocks: IntArray) -> None:
        """Note that blocks are absent, before their bytes go. Their locks are held."""
        self.words[blocks, COUNTER] |= np.uint32(1)
        self._removal[:] = np.frombuffer(random_bytes(4 * _REMOVAL), np.uint32)  # later: see `whole`

    @property
    def removal(self) -> bytes:
        """Bytes that are others after each removal of blocks."""
        return self._removal.tobytes()

    def whole(self) -> bytes | None:
        """`removal`, if all blocks are there until it changes; else None. Each block is looked at once between two."""
        removal, first = self.removal, 0
        if self._looked_at[0] == removal:
            first = self._looked_at[1]
        while first < len(self.words):
            absent = self.words[first : first + _PART, COUNTER] & np.uint32(1)
            if absent.any():
                first += int(absent.argmax())
                break
            first += len(absent)
        self._looked_at = removal, first
        return removal if first == len(self.words) else None

    @property
    def num_bytes(self) -> int:
        """The bytes of the blocks that may take disk space."""
        return int(self.sizes[self.words[:, LOCAL] != 0].sum())

    def watched(self, blocks: IntArray) -> Callable[[], bool]:
        """A function that tells whether `blocks` have been there ever since."""
        counters = self.words[blocks, COUNTER]
        is_there = not (counters & np.uint32(1)).any()
        return lambda: is_there and np.array_equal(self.words[blocks, COUNTER], counters)

    # The bytes of the blocks

    @contextmanager
    def held_folder(self) -> Iterator[Folder]:
        """The folder of the mirror, held. Raises RemovedError: it is gone, or another mirror was made in its place."""
        try:
            with Folder(self.path).kept_open() as folder:
                if folder.file_key(NAME) != self.key:
                    raise RemovedError
                yield folder
        except NOT_WHOLE:
            raise RemovedError from None

    def write(self, piece: Sequence[int], data: bytes) -> None:
        """Write blocks of a file, whose locks are held, and note that they are there.

        Args: piece: the blocks. data: their bytes, and those of other blocks between them, which are not written.
        """
        name, start, _ = self.files.place(piece[0])
        with self.held_folder() as folder, folder.changing(name, self.files.sizes[name]) as fd:
            try:
                for first, stop in runs(piece):
                    _, low, high = self.files.range_of([first, stop - 1])
                    write_all(fd, data[low - start : high - start], low)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                text = f"{self.path}: the disk is full; give a cache on another one, or a smaller cache_bytes"
                raise OSError(error.errno, text) from None
        self.add(np.asarray(piece))

    def look_at(self, blocks: IntArray, digests: Array) -> None:
        """Note absent blocks as there whose bytes on the disk are right: after a boot of the machine, or a kill."""
        blocks = blocks[self.words[blocks, LOCAL] != 0]
        if blocks.size:
            with self.held_folder() as folder:
                self.add(blocks[[self._is_right(folder, [block], digests) for block in blocks.tolist()]])

    def give_back(self, blocks: IntArray, digests: Array | None = None) -> int:
        """Give blocks back; returns the bytes of those that were.

        Not those whose locks somebody else holds, none if the mirror is gone, and where `digests` are given, only those
        that are there and not as they say.
        """
        if digests is not None:
            blocks = blocks[self.words[blocks, COUNTER] & np.uint32(1) == 0]
        num_bytes = 0
        if not blocks.size:
            return num_bytes
        with suppress(RemovedError), self.held_folder() as folder:
            for part in np.split(blocks, range(_AT_A_TIME, len(blocks), _AT_A_TIME)):
                with self.taken(part.tolist()) as mine:
                    if digests is not None:
                        mine = self._damaged(folder, mine, digests)
                    if not mine.size:
                        continue
                    self.remove(mine)
                    for first, stop in runs(mine.tolist()):
                        for piece in self.files.pieces(range(first, stop)):
                            folder.punch(*self.files.range_of(piece))
                    self.words[mine, LOCAL] = 0
                    num_bytes += int(self.sizes[mine].sum())
        return num_bytes

    def _damaged(self, folder: Folder, blocks: IntArray, digests: Array) -> IntArray:
        """The blocks on the disk that differ from their digests, but for those whose group is right: its digest is
        another only if what was published is wrong, and then they would come back the same.
        """
        wrong = blocks[[not self._is_right(folder, [block], digests) for block in blocks.tolist()]]
        groups = zip(*self.files.groups_of(wrong)[:2], strict=True)
        right = [np.arange(*group) for group in groups if self._is_right(folder, [group[0], group[1] - 1], digests)]
        return np.setdiff1d(wrong, np.concatenate([wrong[:0], *right]), True)

    def _is_right(self, folder: Folder, piece: Sequence[int], digests: Array) -> bool:
        """Whether the bytes on the disk of blocks, and of those between them, are those of their digests."""
        name, start, stop = self.files.range_of(piece)
        with folder.reading(name) as (fd, _):
            return self.files.are_right(read_at(fd, stop - start, start), piece, digests)

    # Their locks

    @contextmanager
    def taken(self, blocks: Sequence[int]) -> Iterator[IntArray]:
        """Hold the locks of those `blocks` that nobody else holds, until the `with` ends; gives them, ascending."""
        with self._changed:
            mine = sorted(set(blocks).difference(self._busy))
            self._busy.update(mine)
        locked_ranges: list[tuple[int, int]] = []
        try:
            for first, stop in runs(mine):
                if self._locks.try_take(self._first + first, stop - first):
                    locked_ranges.append((first, stop))
                else:
                    locked_ranges.extend(
                        (block, block + 1)
                        for block in range(first, stop)
                        if self._locks.try_take(self._first + block, 1)
                    )
            yield np.array([block for part in locked_ranges for block in range(*part)], np.int64)
        finally:
            for first, stop in locked_ranges:
                self._locks.give(self._first + first, stop - first)
            self._done_with(mine)

    def wait_for(self, block: int) -> None:
        """Wait until the holder of a block's lock lets go of it. The caller holds no lock: others may wait for that."""
        with self._changed:
            self._changed.wait_for(lambda: block not in self._busy)
            self._busy.add(block)
        try:
            self._locks.take(self._first + block, 1)
            self._locks.give(self._first + block, 1)
        finally:
            self._done_with([block])

    def _done_with(self, blocks: Sequence[int]) -> None:
        with self._changed:
            self._busy.difference_update(blocks)
            self._changed.notify_all()


def now() -> int:
    """The time in ticks, modulo 2**32: it begins at 0 again every half a year."""
    return int(time.time() * TICKS) & 0xFFFFFFFF


def by_last_use(used: Words) -> Words:
    """Numbers to sort blocks by: the later a block was used, the higher. Args: used: `now` at the last use of each."""
    later: Words = used - np.uint32(now() + SLACK & 0xFFFFFFFF)
    return later


def words_file(count: int) -> ArrayFile:
    """The file of the words of `count` blocks."""
    return ArrayFile(NAME, np.dtype("<u4"), (3 * count + _BOOT + _REMOVAL,))


def new_words(count: int) -> bytes:
    """The content of the file for `count` blocks, none of which is there yet."""
    file = words_file(count)
    content = np.zeros(file.shape, file.dtype)
    content[: 3 * count : 3] = 1
    content[3 * count : 3 * count + _BOOT] = np.frombuffer(boot_id(), np.uint32)
    return file.header + content.tobytes()
