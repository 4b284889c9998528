"""The array under a tree on the disk: mapped so that the disk may be full, and no store ever kills.

Shared: stores go to the file, and survive the process. Before the first one into a chunk of 2 MiB, the chunk and all
that lies above it in the tree are written by `pwrite`, which raises where the disk is full; a later store into a
written block allocates nothing, where the file system overwrites in place (`IN_PLACE`). Elsewhere the map is private:
what was stored is in memory, and written by `pwrite` at `checkpoint`.
"""

from __future__ import annotations

import weakref

import numpy as np

from memmap_buffer.store.files import barrier, close_all, has_hole, read_at, write_all
from memmap_buffer.store.folder import Folder
from memmap_buffer.store.host import file_system
from memmap_buffer.store.layout import ArrayFile
from memmap_buffer.store.tree import STEP, FloatArray, IntArray, capacity_of, num_nodes

IN_PLACE = ("ext2", "ext3", "ext4", "tmpfs")
CHUNK_BITS, PAGE_BITS = 18, 9  # nodes in 2 MiB, and in 4 KiB


def nodes_file(name: str, leaves: int) -> ArrayFile:
    """The file of a tree's nodes."""
    return ArrayFile(name, np.dtype("<f8"), (num_nodes(leaves),))


class Nodes:
    """The nodes of one tree, mapped from an existing file whose lock is held.

    Args: folder, file: where. leaves: of the tree. minima: whether the heap of minima is stored to, too.

    Attributes: array: (num_nodes(leaves),) float64. shared: whether stores reach the file at once.
    """

    def __init__(self, folder: Folder, file: ArrayFile, leaves: int, *, minima: bool) -> None:
        self.shared = file_system(folder.path) in IN_PLACE
        self.minima = minima
        self._file = file
        self._first = capacity_of(leaves)
        self._bits = CHUNK_BITS if self.shared else PAGE_BITS
        fd, mapped = folder.map_to_change(file.name, file.header, file.size, shared=self.shared)
        self._fd = {"": fd}
        self._finalizer = weakref.finalize(self, close_all, self._fd)
        self._finalizer.atexit = False
        self.array: FloatArray = np.frombuffer(mapped, np.float64, file.shape[0], len(file.header))
        blocks = (file.shape[0] >> self._bits) + 1
        self._marked = np.zeros(blocks, np.bool_)  # leaves: shared, they may be stored to; private, they were
        self._written = np.zeros(blocks, np.bool_)
        self._last = (self._first + leaves - 1) >> self._bits
        self._ready = False  # whether all blocks of leaves may be stored to

    def prepare(self, leaves: IntArray) -> None:
        """To be called before leaves, and what lies above them, are stored to. Raises OSError: the disk is full."""
        if self._ready:
            return
        blocks = (leaves + self._first) >> self._bits
        if not self.shared:
            self._marked[blocks] = True
        elif not self._marked.take(blocks).all():
            new = np.unique(blocks)
            self._fill(self._with_above(new))
            self._marked[new] = True
            self._ready = bool(self._marked[self._first >> self._bits : self._last + 1].all())

    def watch_minima(self) -> None:
        """From now on the heap of minima is stored to."""
        self.minima = True
        if self.shared:
            self._marked[:] = self._ready = False

    def checkpoint(self) -> None:
        """Bring what was stored to the disk. Raises OSError; then the same is tried again the next time."""
        if not self.shared:
            changed = self._with_above(np.flatnonzero(self._marked))
            for run in np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1):
                start, stop = int(run[0]) << self._bits, (int(run[-1]) + 1) << self._bits
                write_all(self._fd[""], self.array[start:stop], self._file.offset(start))
        barrier(self._fd[""])
        if not self.shared:
            self._marked[:] = False

    def close(self) -> None:
        """Close the descriptor; twice is fine. The map goes with the last array over it."""
        self._finalizer()

    def _with_above(self, blocks: IntArray) -> IntArray:
        """Blocks of leaves and of the nodes kept above them, each of an eighth of the number, as its block is."""
        found, level = [np.zeros(1, np.int64), blocks], blocks
        while len(level) and level[-1] > 0:
            level = np.unique(level >> STEP)
            found.append(level)
            if self.minima:
                last = len(self.array) - 1
                keys = (level << self._bits) + 2 * self._first
                found += [np.minimum(keys, last) >> self._bits]
                found += [np.minimum(keys + (1 << self._bits) - 1, last) >> self._bits]
        if self.minima:
            found.append(np.array([2 * self._first, min(3 * self._first, 2 * self._first + (1 << self._bits)) - 1]))
            found[-1] >>= self._bits
        return np.unique(np.concatenate(found))

    def _fill(self, blocks: IntArray) -> None:
        fd = self._fd[""]
        for block in blocks[~self._written[blocks]].tolist():
            start = self._file.offset(block << self._bits)
            stop = min(self._file.size, self._file.offset((block + 1) << self._bits))
            if stop > start and has_hole(fd, start, stop):
                write_all(fd, read_at(fd, stop - start, start), start)
            self._written[block] = True
