"""Rows of arrays that lie anywhere in memory, such as the maps of a thousand files, taken together by one index.

numpy takes rows of one array. A batch of 256 from a thousand folders would be 230 calls for each field; but an address
is a whole number, and memory is an array with an item at each of them, of which only those may be looked at that some
array holds. `Span` is the one place that does so. No row leads out of its arrays, whoever wrote the number of the row:

- *Which array* is an index that numpy checks. *Which row* is clipped between 0 and the last one of that array before it
  becomes an address; as rows are of one size, and lie one behind another, all bytes of it are that array's. What
  arrays must be for that is checked of each when it is put in, at run time, with `python -O` too.
- *How long.* A span holds its arrays, an array its map or its memory; and a span is never changed. Who takes rows holds
  the span, so another thread may close, refresh and remove folders meanwhile: it makes other spans.
- *Reads only.* The array of everything is read-only, and no item of it is handed out, but copies.

A file that somebody cuts short while it is mapped kills who reads it (SIGBUS), as with any other map.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array
from memmap_buffer.format.episode_table import IntArray

LARGEST = 1 << 10  # bytes of a row: a batch of larger ones is copied into memory that is used again, folder by folder
_LOWEST, _HIGHEST = 1 << 12, 1 << 52  # addresses of user space; x86 has them below 2^47, arm64 below 2^48 or 2^52


class Span:
    """Arrays of one dtype whose rows have one shape; how many rows each has may differ. It never changes.

    Args: arrays: at least one, none empty, in C order; they are held.
    Raises: ValueError: they are not so, which no schema allows: a caller's bug.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        first = arrays[0]
        self._dtype, self._shape = first.dtype, first.shape[1:]
        self._size = first.itemsize * math.prod(self._shape)
        self._arrays = list(arrays)
        self._address, self._last = np.zeros(len(arrays), np.int64), np.zeros(len(arrays), np.int64)
        for number, array in enumerate(arrays):
            self._put(number, array)

    @staticmethod
    def fits(array: Array) -> bool:
        """Whether rows of such an array can be taken so."""
        return 0 < array.nbytes // max(1, len(array)) <= LARGEST

    def replaced(self, others: Mapping[int, Array]) -> Span:
        """The same with other arrays in the place of some, by their numbers."""
        span = copy(self)
        span._arrays, span._address, span._last = self._arrays.copy(), self._address.copy(), self._last.copy()
        for number, array in others.items():
            span._put(number, array)
        return span

    def _put(self, number: int, array: Array) -> None:
        alike = array.dtype == self._dtype and array.shape[1:] == self._shape
        if not (alike and array.flags.c_contiguous and len(array)):
            raise ValueError(
                f"array {number} of a span has {array.dtype} and shape {array.shape}, expected {self._dtype} and rows "
                f"of {self._shape}, at least one, in C order"
            )
        self._arrays[number] = array
        self._address[number], self._last[number] = array.__array_interface__["data"][0] - _LOWEST, len(array) - 1

    def take(self, number: IntArray, rows: IntArray) -> Array:
        """Copy row `rows` (B, …) of array `number` (B,), the nearest that there is: (B, …, *shape)."""
        lead = (len(number),) + (1,) * (rows.ndim - 1)
        address = np.minimum(rows, self._last.take(number).reshape(lead), order="C")
        np.maximum(address, 0, out=address)
        address *= self._size
        address += self._address.take(number).reshape(lead)
        return self._at(address)

    def first(self, number: IntArray) -> Array:
        """Copy the first row of array `number` (B,): (B, *shape)."""
        return self._at(self._address.take(number))

    def _at(self, address: IntArray) -> Array:
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
