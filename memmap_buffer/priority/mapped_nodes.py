"""The array under a tree on the disk: mapped so that the disk may be full, and no store ever kills.

Shared: stores go to the file, and survive the process. Before the first one into a chunk of 2 MiB, the chunk and all
that lies above it in the tree are written by `pwrite`, which raises where the disk is full; a later store into a
written block allocates nothing, where the file system overwrites in place (`IN_PLACE`). Elsewhere the map is private:
what was stored is in memory, and written by `pwrite` at `checkpoint`.

Chunks lie in the file at multiples of 2 MiB, and one that was a hole, as all but the first one are, is written by one
call: then Linux keeps it in one large page, where it can (ext4 from 6.16 on), and an update of a large tree waits for
fewer addresses.
"""

from __future__ import annotations

import weakref

import numpy as np

from memmap_buffer.format.folder import Folder
from memmap_buffer.format.host import file_system
from memmap_buffer.format.layout import ArrayFile
from memmap_buffer.format.syscalls import barrier, close_all, has_hole, is_hole, read_at, write_all
from memmap_buffer.priority.sum_tree import STEP, FloatArray, IntArray, capacity_of, num_nodes

IN_PLACE = ("ext2", "ext3", "ext4", "tmpfs")
CHUNK_BITS, PAGE_BITS = 18, 9  # words in 2 MiB, and in 4 KiB


def nodes_file(name: str, leaves: int) -> ArrayFile:
    """The file of a tree's nodes."""
    return ArrayFile(name, np.dtype("<f8"), (num_nodes(leaves),))


class Nodes:
    """The nodes of one tree, mapped from an existing file whose lock is held.

    Args:
        folder, file: the existing file.
        leaves: of the tree.
        minima: whether the heap of minima is stored to, too.

    Attributes:
        array: (num_nodes(leaves),) float64.
        shared: whether stores reach the file at once.
    """

    def __init__(self, folder: Folder, file: ArrayFile, leaves: int, *, minima: bool) -> None:
        self.shared = file_system(folder.path) in IN_PLACE
        self.minima = minima
        self._file = file
        self._first = capacity_of(leaves)
        self._bits = CHUNK_BITS if self.shared else PAGE_BITS
        self._lead = file.offset(0) // 8  # words before node 0
        fd, mapped = folder.map_to_change(file.name, file.header, file.size, shared=self.shared)
        self._fd = {"": fd}
        self._finalizer = weakref.finalize(self, close_all, self._fd)
        self._finalizer.atexit = False
        self.array: FloatArray = np.frombuffer(mapped, np.float64, file.shape[0], len(file.header))
        blocks = ((file.shape[0] + self._lead) >> self._bits) + 1
        self._marked = np.zeros(blocks, np.bool_)  # leaves: shared, they may be stored to; private, they were
        self._written = np.zeros(blocks, np.bool_)
        low, high = self._block(self._first + np.array([0, leaves - 1])).tolist()
        self._of_leaves = slice(low, high + 1)
        self._ready = False  # whether all blocks of leaves may be stored to

    def prepare(self, leaves: IntArray) -> None:
        """Have room on the disk for stores to leaves and the nodes above. Raises OSError: the disk is full."""
        if self._ready:
            return
        blocks = self._block(leaves + self._first)
        if not self.shared:
            self._marked[blocks] = True
        elif not self._marked.take(blocks).all():
            new = np.unique(blocks)
            self._fill(self._with_above(new))
            self._marked[new] = True
            self._ready = bool(self._marked[self._of_leaves].all())

    def watch_minima(self) -> None:
        """From now on the heap of minima is stored to."""
        self.minima = True
        if self.shared:
            self._marked[:] = self._ready = False

    def checkpoint(self) -> None:
        """Bring all stores to the disk. Raises OSError; then the same stores are tried again the next time."""
        if not self.shared:
            changed = self._with_above(np.flatnonzero(self._marked))
            for run in np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1):
                start, stop = int(self._nodes(run[:1])[0][0]), int(self._nodes(run[-1:])[1][0]) + 1
                write_all(self._fd[""], self.array[start:stop], self._file.offset(start))
        barrier(self._fd[""])
        if not self.shared:
            self._marked[:] = False

    def close(self) -> None:
        """Close the descriptor; twice is fine. The map goes with the last array over it."""
        self._finalizer()

    def _block(self, nodes: IntArray) -> IntArray:
        """In which block of the file nodes lie."""
        return (nodes + self._lead) >> self._bits

    def _nodes(self, blocks: IntArray) -> tuple[IntArray, IntArray]:
        """The first and the last node that lies in blocks."""
        first = (blocks << self._bits) - self._lead
        return np.maximum(first, 0), np.minimum(first + (1 << self._bits), len(self.array)) - 1

    def _with_above(self, blocks: IntArray) -> IntArray:
        """Blocks of leaves, and of the nodes kept above them, each of which has an eighth of the number."""
        found, level = [np.zeros(1, np.int64), blocks], blocks
        while len(level) and level[-1] > 0:
            first, last = (nodes >> STEP for nodes in self._nodes(level))
            level = np.unique(self._block(np.concatenate([first, last])))
            found.append(level)
            if self.minima:
                found += self._keys(first, last)
        if self.minima:
            found += self._keys(np.zeros(1, np.int64), np.array([1 << self._bits]))
        return np.unique(np.concatenate(found))

    def _keys(self, first: IntArray, last: IntArray) -> list[IntArray]:
        """The blocks of the second heap that the keys of nodes first … last, at most a block of each, lie in."""
        ends = (np.minimum(nodes + 2 * self._first, len(self.array) - 1) for nodes in (first, last))
        return [self._block(nodes) for nodes in ends]

    def _fill(self, blocks: IntArray) -> None:
        fd, size = self._fd[""], 8 << self._bits
        for block in blocks[~self._written[blocks]].tolist():
            start, stop = max(self._file.offset(0), block * size), min(self._file.size, (block + 1) * size)
            if stop > start and has_hole(fd, start, stop):
                zeros = is_hole(fd, start, stop)  # to read them would put small pages in the place of the large one
                write_all(fd, bytes(stop - start) if zeros else read_at(fd, stop - start, start), start)
            self._written[block] = True
