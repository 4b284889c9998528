"""Which blocks of a mirror are there: a counter a block, shared by all processes of a host; and who fetches one.

The counter is odd while the block is absent. A reader takes the counters before it copies and compares them behind, so
that no block that was given back meanwhile is taken for data. Whoever fetches a block, or gives it back, holds its
lock: a byte of the lock file by `lockf`, which other processes see, and its place in `_busy`, for threads of this one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memmap_buffer.format.folder import Folder
from memmap_buffer.format.host import boot_id
from memmap_buffer.format.syscalls import RangeLocks, npy_header, process_id

IntArray = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
COUNTER, USED, LOCAL = range(3)  # the counter; the second of its last use; 1 where its bytes may be on the disk
NAME, LOCKS = "mirror/blocks.npy", "mirror/locks"
_BOOT = 4  # words behind those of the blocks


class Blocks:
    """The blocks of one mirror, as this process sees them.

    Args:
        path: the folder of the mirror.
        count: how many blocks there are.
    """

    _known: dict[Path, Blocks] = {}  # noqa: RUF012  closing the lock file twice would drop the locks of the other
    _making = threading.Lock()

    def __init__(self, path: Path, count: int) -> None:
        folder = Folder(path)
        fd, mapped = folder.map_to_change(NAME, header(count), len(header(count)) + 4 * words(count), shared=True)
        self._fd = fd
        whole = np.frombuffer(mapped, np.uint32, words(count), len(header(count)))
        self.words: Words = whole[:-_BOOT].reshape(-1, 3)
        self._boot: Words = whole[-_BOOT:]
        self._locks = RangeLocks(str(path / LOCKS))
        self._busy: set[int] = set()
        self._changed = threading.Condition()
        self._process = process_id()
        self._begin_boot()

    @classmethod
    def of(cls, path: Path, count: int) -> Blocks:
        """The blocks of a mirror; the same object for the same one."""
        with cls._making:
            found = cls._known.get(path)
            if found is None:
                found = cls._known[path] = cls(path, count)
            return found

    @property
    def fd(self) -> int:
        """Of the file of the counters."""
        return self._fd

    def _begin_boot(self) -> None:
        """After another boot of the machine what was written may not have reached the disk: it is checked again."""
        now = np.frombuffer(boot_id(), np.uint32)
        if not np.array_equal(self._boot, now):
            with self.taken(range(len(self.words))):
                if not np.array_equal(self._boot, now):
                    self.words[:, COUNTER] |= np.uint32(1)
                    self._boot[:] = now

    def absent(self, blocks: IntArray) -> IntArray:
        """Those of some blocks that are not there."""
        absent: IntArray = blocks[self.words[blocks, COUNTER] & np.uint32(1) == 1]
        return absent

    def counters(self, blocks: IntArray) -> Words:
        """Their counters now."""
        found: Words = self.words[blocks, COUNTER].copy()
        return found

    def touch(self, blocks: IntArray, second: int) -> None:
        """Note that they are used now."""
        self.words[blocks, USED] = second

    def change(self, block: int) -> None:
        """One that was absent is there, or the other way round; its lock is held."""
        self.words[block, COUNTER] += np.uint32(1)

    @contextmanager
    def taken(self, blocks: Sequence[int]) -> Iterator[None]:
        """Hold the locks of some blocks, ascending; waits for others that hold one."""
        self._wait_for(blocks)
        held: list[tuple[int, int]] = []
        try:
            for first, stop in runs(blocks):
                self._locks.take(first, stop - first)
                held.append((first, stop))
            yield
        finally:
            for first, stop in held:
                self._locks.give(first, stop - first)
            self._done_with(blocks)

    @contextmanager
    def try_taken(self, block: int) -> Iterator[bool]:
        """Hold the lock of a block if nobody else does; whether that is so."""
        with self._changed:
            self._own_process()
            if block in self._busy:
                yield False
                return
            self._busy.add(block)
        locked = False
        try:
            locked = self._locks.try_take(block)
            yield locked
        finally:
            if locked:
                self._locks.give(block, 1)
            self._done_with([block])

    def _wait_for(self, blocks: Sequence[int]) -> None:
        with self._changed:
            self._own_process()
            while not self._busy.isdisjoint(blocks):
                self._changed.wait()
            self._busy.update(blocks)

    def _done_with(self, blocks: Sequence[int]) -> None:
        with self._changed:
            self._busy.difference_update(blocks)
            self._changed.notify_all()

    def _own_process(self) -> None:
        if self._process != process_id():  # a fork: the threads that were at work are the parent's
            self._busy, self._process = set(), process_id()


def words(count: int) -> int:
    """How many words the file of so many blocks has."""
    return 3 * count + _BOOT


def header(count: int) -> bytes:
    """The header of the file of so many blocks."""
    return npy_header("'<u4'", (words(count),))


def new_words(count: int) -> bytes:
    """The content of the file of so many blocks, none of which is there."""
    content = np.zeros(words(count), np.uint32)
    content[: 3 * count : 3] = 1
    content[-_BOOT:] = np.frombuffer(boot_id(), np.uint32)
    return header(count) + content.tobytes()


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges (first, stop) of those that follow one another."""
    array = np.asarray(numbers)
    if not array.size:
        return []
    apart = np.flatnonzero(np.diff(array) != 1)
    first = array[np.append(0, apart + 1)]
    stop = array[np.append(apart, len(array) - 1)] + 1
    return list(zip(first.tolist(), stop.tolist(), strict=True))
