"""`SharedArrays`: arrays, such as the runs of an `Index`, of which a starting worker maps one shared copy.

Any other pickle contains the arrays as they are.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.format.syscalls import CAN_SHARE, close_all, map_file, memory_file

LEAST = 1 << 20  # bytes: smaller arrays are pickled as they are


class SharedArrays:
    """Arrays that never change and may be pickled many times: one copy in shared memory serves all processes.

    Args:
        arrays: the arrays, of 8-byte items; None stays None.
    """

    def __init__(self, arrays: tuple[Array | None, ...]) -> None:
        self.arrays = arrays
        self._fd: dict[str, int] = {}
        self._finalizer = weakref.finalize(self, close_all, self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.context import get_spawning_popen
        from multiprocessing.reduction import DupFd

        size = sum(array.nbytes for array in self.arrays if array is not None)
        if size < LEAST or get_spawning_popen() is None or not CAN_SHARE:
            return SharedArrays, (self.arrays,)
        if not self._fd:
            parts = [array for array in self.arrays if array is not None]
            assert all(part.itemsize == 8 for part in parts)  # so that all are aligned
            self._fd[""] = memory_file(parts)
        kinds = [None if array is None else (array.dtype.str, array.shape) for array in self.arrays]
        return _mapped, (DupFd(self._fd[""]), size, kinds)


def _mapped(shared: Any, size: int, kinds: list[tuple[str, tuple[int, ...]] | None]) -> SharedArrays:
    """The arrays in the new process, out of `size` bytes of shared memory. Args: kinds: (dtype, shape) of each."""
    fd = {"": shared.detach()}
    try:
        memory = map_file(fd[""], size)
    finally:
        close_all(fd)
    arrays: list[Array | None] = []
    offset = 0
    for kind in kinds:
        array = None if kind is None else np.ndarray(kind[1], kind[0], memory, offset)
        offset += 0 if array is None else array.nbytes
        arrays.append(array)
    return SharedArrays(tuple(arrays))
