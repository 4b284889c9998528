"""Rows of arrays that lie anywhere in memory, such as the maps of a thousand files, taken together by one index.

numpy takes rows of one array. A batch of 256 from a thousand folders would be 230 calls for each field; but an address
is a whole number, and memory is an array with an item at each of them, of which only those may be looked at that some
array holds. `Span` is the one place that does so: it holds the arrays, and no row leads out of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.store.table import IntArray
from memmap_buffer.values import Array

LARGEST = 1 << 10  # bytes of a row: a batch of larger ones is copied into memory that is used again, folder by folder
_LOWEST, _HIGHEST = 1 << 12, 1 << 47  # addresses of user space


class Span:
    """Arrays of one dtype whose rows have one shape; how many rows each has may differ.

    Args: arrays: at least one, in C order; they are held.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        first = arrays[0]
        self._dtype, self._shape = first.dtype, first.shape[1:]
        self._size = first.itemsize * math.prod(self._shape)
        self._arrays = list(arrays)
        self._address, self._last = np.zeros(len(arrays), np.int64), np.zeros(len(arrays), np.int64)
        for number, array in enumerate(arrays):
            self.put(number, array)

    @staticmethod
    def fits(array: Array) -> bool:
        """Whether rows of such an array can be taken so."""
        return 0 < array.nbytes // max(1, len(array)) <= LARGEST

    def put(self, number: int, array: Array) -> None:
        """Another array in the place of one."""
        assert array.dtype == self._dtype and array.shape[1:] == self._shape and array.flags.c_contiguous and len(array)
        self._arrays[number] = array
        self._address[number], self._last[number] = array.__array_interface__["data"][0] - _LOWEST, len(array) - 1

    def take(self, number: IntArray, rows: IntArray) -> Array:
        """Copy row `rows` (B, …) of array `number` (B,), the nearest that there is: (B, …, *shape)."""
        lead = (len(number),) + (1,) * (rows.ndim - 1)
        address = np.minimum(rows, self._last.take(number).reshape(lead))
        np.maximum(address, 0, out=address)
        address *= self._size
        address += self._address.take(number).reshape(lead)
        return _memory(self._size)[address].view(self._dtype).reshape(*address.shape, *self._shape)


class _Everywhere:
    """What numpy makes the array of."""

    def __init__(self, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": (_HIGHEST - _LOWEST - size,),
            "strides": (1,),
            "data": (_LOWEST, True),
        }


@lru_cache(maxsize=256)
def _memory(size: int) -> npt.NDArray[Any]:
    """Items of so many bytes at every address from `_LOWEST` on."""
    return np.asarray(_Everywhere(size))
