"""The timesteps of a compressed field that are staged: encoded, some at a time, in a thread beside the rollout."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.format.blobs import decoded, encode, threads
from memmap_buffer.schema import Field

if TYPE_CHECKING:
    from concurrent.futures import Future

PART_BYTES = 1 << 18  # of timesteps that are encoded together
MAX_WAITING = 128 << 20  # bytes of timesteps that wait for a thread; then storing waits, too


class BlobColumn:
    """Rows (N, *field) that are assigned to as to an array, from the first to the last, and read as blobs.

    Attributes:
        capacity: how many rows it has.

    Args:
        field: how the rows are compressed.
        capacity: see above.

    Raises:
        ImportError: the package of the codec is not installed.
    """

    def __init__(self, field: Field, capacity: int) -> None:
        field.codec.load()
        self.field, self.capacity = field, capacity
        self._size = max(1, PART_BYTES // field.itemsize)
        self._spare: list[Array] = []
        self.clear()

    def clear(self) -> None:
        """Forget all rows; the memory is kept."""
        self._waiting: deque[tuple[Future[list[bytes]], Array]] = deque()
        self._parts: list[Future[list[bytes]] | list[bytes]] = []
        self._current = 0, self._fresh()  # the number of the part that is being filled, and its rows
        self._done: dict[int, bytes] = {}  # the blobs of these rows that were asked for already

    def __len__(self) -> int:
        return self.capacity

    @property
    def nbytes(self) -> int:
        """The memory that it keeps."""
        return self._size * self.field.itemsize * (1 + len(self._spare))

    def __setitem__(self, rows: int | slice, values: Any) -> None:
        if isinstance(rows, slice):
            for row, value in zip(range(self.capacity)[rows], values, strict=True):
                self[row] = value
            return
        number, place = divmod(rows, self._size)
        if number > self._current[0]:
            self._encode_current()
            self._current = number, self._fresh()
        if number == self._current[0]:
            self._done.pop(place, None)
            self._current[1][place] = values
        else:  # one that was encoded already
            anew = np.empty((1, *self.field.shape), self.field.storage)
            anew[0] = values
            self._part(number)[place] = encode(self.field, anew)[0]

    def __getitem__(self, rows: slice) -> Array:
        """Rows as they will be read: (N, *field)."""
        return decoded(self.field, self.blobs(rows))

    def blobs(self, rows: slice) -> list[bytes]:
        """The blobs of some rows; waits for those that are being encoded."""
        blobs: list[bytes] = []
        row, stop, _ = rows.indices(self.capacity)
        while row < stop:
            number, place = divmod(row, self._size)
            end = min(self._size, place + stop - row)
            if number < len(self._parts):
                blobs += self._part(number)[place:end]
            else:
                blobs += self._blobs_of_current(place, end)
            row += end - place
        return blobs

    def _blobs_of_current(self, place: int, end: int) -> list[bytes]:
        done, rows = self._done, self._current[1]
        missing = [i for i in range(place, end) if i not in done]
        if missing:
            done.update(zip(missing, encode(self.field, rows[missing]), strict=True))
        return [done[i] for i in range(place, end)]

    def _part(self, number: int) -> list[bytes]:
        part = self._parts[number]
        if not isinstance(part, list):
            part = self._parts[number] = part.result()
        return part

    def _encode_current(self) -> None:
        """Have the part that is full encoded, unless each of its blobs is there already."""
        number, rows = self._current
        if len(self._parts) > number:
            return
        if len(self._done) == self._size:
            self._parts.append([self._done[i] for i in range(self._size)])
            return
        future = threads.submit(encode, self.field, rows)
        self._parts.append(future)
        self._waiting.append((future, rows))  # after that: interrupted in between, its memory is not used again
        if len(self._waiting) * rows.nbytes > MAX_WAITING:
            self._waiting[0][0].result()

    def _fresh(self) -> Array:
        """Memory for a part: that of one which is encoded, if there is any."""
        while self._waiting and self._waiting[0][0].done():
            self._spare.append(self._waiting.popleft()[1])
        if self._spare:
            return self._spare.pop()
        return np.empty((self._size, *self.field.shape), self.field.storage)
