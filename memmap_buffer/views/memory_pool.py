"""Memory for batches: given out as arrays, and given out again once nothing refers to one any more.

Fresh memory costs a page fault for every 4 KB that is written first; an image batch of 6 MB pays more for that than for
its copy. What is lent is known by its death alone: every view of an array (numpy's, and tensors' by way of those) keeps
the memoryview alive that the array is over; when that is gone, the memory comes back.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array

SMALL = 1 << 15  # below it malloc keeps its pages by itself
KEEP = 32 << 20
ALIGN = 64
Buffer = npt.NDArray[np.uint8]


def array_over(memory: Buffer, dtype: npt.DTypeLike, count: int) -> Array:
    """An array (count,) over memory of somebody's; its `base` dies with the last view of it, and not before.

    Numpy cuts a chain of views short at an array, but not at a buffer of another kind, to which the array that it makes
    of one refers by a memoryview of its own.

    Args:
        memory: (n,) and aligned, n bytes at least those of the array.
    """
    return np.frombuffer(memoryview(memory), dtype, count)  # type: ignore[arg-type]  # see `checksums.crc32`


class Pool:
    """Arrays over memory that is used again.

    What lies unused is at most as much as is in use, or `keep` bytes if that is more: a loop that drops each batch for
    the next one finds its memory again, and what was hoarded once is given back.

    It may be called from any thread. Where two meet, one of them gets fresh memory instead of waiting: so neither a
    garbage collection in the middle nor a fork can lock it.

    Args:
        keep: bytes that may lie unused in any case.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._loans: dict[int, tuple[weakref.ref[Any], Buffer]] = {}
        self._free: list[Buffer] = []  # the longest unused first
        self._deaths: deque[weakref.ref[Any]] = deque()  # of what has come back, and is not yet counted
        self._lent = self._unused = 0

    @property
    def lent(self) -> int:
        """Bytes of the arrays in use."""
        self._settle()
        return self._lent

    @property
    def unused(self) -> int:
        """Bytes that lie ready to be used again."""
        self._settle()
        return self._unused

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array of any content, writable and contiguous, that shares memory with nothing that is in use.

        Args:
            shape: its shape.
            dtype: its dtype.
        """
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL or not self._lock.acquire(blocking=False):
            return np.empty(shape, dtype)
        try:
            self._count_dead()
            buffer = self._take(_rounded(nbytes))
        finally:
            self._lock.release()
        array = array_over(buffer, dtype, nbytes // dtype.itemsize)
        # No line of Python runs at a death, in which Ctrl-C would be lost, unless much memory must be given back then.
        death = weakref.ref(array.base, self._deaths.append if self._lent <= self._keep else self._come_back)
        self._loans[id(death)] = death, buffer
        return array.reshape(shape)

    def _take(self, nbytes: int) -> Buffer:
        """The latest that came back (it is the likeliest to be in a cache) of this size or little more, or fresh."""
        for i in reversed(range(len(self._free))):
            if nbytes <= self._free[i].nbytes <= 1.25 * nbytes:
                buffer = self._free.pop(i)
                self._unused -= buffer.nbytes
                break
        else:
            buffer = _aligned(nbytes)
        self._lent += buffer.nbytes
        return buffer

    def _come_back(self, death: weakref.ref[Any]) -> None:
        self._deaths.append(death)
        self._settle()

    def _settle(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._count_dead()
            finally:
                self._lock.release()

    def _count_dead(self) -> None:
        while self._deaths:
            _, buffer = self._loans.pop(id(self._deaths.popleft()), (None, None))
            if buffer is None:  # it was interrupted before it was lent
                continue
            self._free.append(buffer)
            self._lent -= buffer.nbytes
            self._unused += buffer.nbytes
            while self._unused > max(self._keep, self._lent):
                self._unused -= self._free.pop(0).nbytes


def _rounded(nbytes: int) -> int:
    """A size at most an eighth larger, so that batches of nearly equal length share."""
    step = 1 << max(nbytes.bit_length() - 4, 6)
    return -(-nbytes // step) * step


def _aligned(nbytes: int) -> Buffer:
    memory = np.empty(nbytes + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + nbytes]
