"""`Pool`: memory for batches that is used again once nothing refers to the earlier batch any more.

Fresh memory costs a page fault for every 4 KB that is written first: for an image batch of 6 MB that takes longer than
the copy itself. A user never gives an array back. Each array that `Pool.empty` returns lies over a memoryview of its
own, which all views of the array (and tensors over them) keep alive; a weak reference tells when it has died.
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

SMALL = 1 << 15  # bytes: smaller arrays are fresh ones, as malloc keeps their pages by itself
KEEP = 32 << 20  # bytes
ALIGN = 64  # bytes: a line of the CPU's cache
Buffer = npt.NDArray[np.uint8]


def array_over(memory: Buffer, dtype: npt.DTypeLike, count: int) -> Array:
    """An array (count,) over memory of the caller; its `base` lives exactly as long as the array and its views.

    The `base` of a view is the array that owns the memory, so a view between these two may die early. The `base` of an
    array over a memoryview is a memoryview, which all views of the array share.

    Args:
        memory: (n,) bytes, aligned, at least as many as the array has.
    """
    return np.frombuffer(memoryview(memory), dtype, count)  # type: ignore[arg-type]  # see `checksums.crc32`


class Pool:
    """Arrays over memory that is used again.

    The unused memory is at most as much as the memory in use, or `keep` bytes if that is more: a loop that drops each
    batch for the next one gets the same memory again, and after a peak the memory goes back to the system.

    Any thread may call it. No thread waits for the lock: if another one holds it, `empty` returns fresh memory. So
    neither a garbage collection in the middle of a call nor a fork can lead to a deadlock.

    Args:
        keep: bytes that may lie unused in any case.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._loans: dict[int, tuple[weakref.ref[Any], Buffer]] = {}  # by the id of the weak reference
        self._free: list[Buffer] = []  # the longest unused first
        self._deaths: deque[weakref.ref[Any]] = deque()  # dead loans that `_count_dead` has not seen yet
        self._lent = self._unused = 0  # bytes

    @property
    def lent(self) -> int:
        """Bytes of the arrays in use."""
        self._settle()
        return self._lent

    @property
    def unused(self) -> int:
        """Bytes that are free to be used again."""
        self._settle()
        return self._unused

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array of arbitrary content, writable and C-contiguous, that shares memory with no array in use."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL or dtype.hasobject or not self._lock.acquire(blocking=False):
            return np.empty(shape, dtype)
        try:
            self._count_dead()
            buffer = self._take(_rounded(nbytes))
        finally:
            self._lock.release()
        array = array_over(buffer, dtype, nbytes // dtype.itemsize)
        # The callback of a weak reference swallows a KeyboardInterrupt. So it is `deque.append`, which runs no line of
        # Python, unless so much memory is in use that it must be given back at once.
        death = weakref.ref(array.base, self._deaths.append if self._lent <= self._keep else self._come_back)
        self._loans[id(death)] = death, buffer
        return array.reshape(shape)

    def _take(self, nbytes: int) -> Buffer:
        """A free buffer of this size or up to a quarter more, else a fresh one.

        The one that was used last comes first: it is the likeliest to be in the CPU's cache.
        """
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
        """Take the memory of a dead array back at once, see `empty`."""
        self._deaths.append(death)
        self._settle()

    def _settle(self) -> None:
        """Count the dead loans, unless another thread holds the lock: it may not be waited for."""
        if self._lock.acquire(blocking=False):
            try:
                self._count_dead()
            finally:
                self._lock.release()

    def _count_dead(self) -> None:
        """Move the buffers of dead arrays to the free ones, and drop those that are too many; with the lock."""
        while self._deaths:
            _, buffer = self._loans.pop(id(self._deaths.popleft()), (None, None))
            if buffer is None:  # an interruption of `empty` came before it noted the loan
                continue
            self._free.append(buffer)
            self._lent -= buffer.nbytes
            self._unused += buffer.nbytes
            while self._unused > max(self._keep, self._lent):
                self._unused -= self._free.pop(0).nbytes


def _rounded(nbytes: int) -> int:
    """`nbytes` rounded up by at most an eighth, so that batches of nearly equal size use the same buffers."""
    step = 1 << max(nbytes.bit_length() - 4, 6)
    return -(-nbytes // step) * step


def _aligned(nbytes: int) -> Buffer:
    """Fresh memory (nbytes,) at a multiple of `ALIGN`."""
    memory = np.empty(nbytes + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + nbytes]
