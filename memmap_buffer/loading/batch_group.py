"""Several batches that are copied and checked as one, and handed out in turn. Nothing else is read ahead."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from memmap_buffer.errors import MemmapBufferError
from memmap_buffer.loading.batch_reader import BatchReader, Splitter
from memmap_buffer.views.anchors import Anchors

MOST = 32  # batches that are read as one: numpy's cost is calls, and there are as many for one batch as for all
MOST_BYTES = 3 << 19  # and their memory, so that they lie in the second cache until they are asked for


class BatchGroup:
    """Batches that are read as one when the first of them is asked for.

    Each is what a read of its own would give at that moment, and still is when it is handed out: where any episode was
    published, changed or removed since, those that are left are read again.

    Args:
        reader: reads them.
        anchors: of all batches, one behind the other.
        size: items a batch; the last may have less.
    """

    def __init__(self, reader: BatchReader, anchors: Anchors, size: int) -> None:
        self.anchors, self.size = anchors, size
        self._reader = reader
        self._ready: dict[int, dict[str, Any]] = {}
        self._changes: list[int] = []
        self._nbytes = 0
        self._lock = threading.Lock()

    def batches(self) -> list[PlannedBatch]:
        """Each of them, to be read in any order."""
        return [PlannedBatch(self, number) for number in range(-(-self.anchors.size // self.size))]

    def anchors_of(self, number: int) -> Anchors:
        """The anchors of one batch."""
        return self.anchors.where(slice(number * self.size, (number + 1) * self.size))

    def read(self, number: int, make: Splitter) -> dict[str, Any]:
        """One of the batches; see `BatchReader.read`."""
        with self._lock:
            if number not in self._ready or self._changes != self._reader.folders.changes:
                self._read_from(number, make)
            return self._ready.pop(number)

    def _read_from(self, number: int, make: Splitter) -> None:
        self._changes = self._reader.folders.changes  # as of before the copy
        try:
            columns = self._reader.columns(self.anchors.where(slice(number * self.size, None)))
        except MemmapBufferError:  # perhaps of another of the batches: that one raises it in its turn
            self._ready = {number: self._reader.read(self.anchors_of(number), make)}
            return
        batches = make(columns, self.size)
        self._nbytes = max(1, sum(values.nbytes for values in columns.values()) // len(batches))
        self._ready = dict(enumerate(batches, number))

    @property
    def next_count(self) -> int:
        """How many batches the group after this one should have: twice as many, as long as that takes little memory."""
        if not self._nbytes:
            return 1
        return max(1, min(2 * len(self.batches()), MOST, MOST_BYTES // self._nbytes))


class PlannedBatch:
    """One of the batches of a group, which is read together with the others."""

    def __init__(self, group: BatchGroup, number: int) -> None:
        self._group, self._number = group, number

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process, which does not have the group, gets the anchors alone."""
        return Anchors._make, (tuple(self.anchors),)

    @property
    def anchors(self) -> Anchors:
        """Where its items are cut."""
        return self._group.anchors_of(self._number)

    @property
    def size(self) -> int:
        """How many items it has."""
        return min(self._group.size, self._group.anchors.size - self._number * self._group.size)

    def read(self, make: Splitter) -> dict[str, Any]:
        """The batch that `make` makes of its columns; see `BatchReader.read`."""
        return self._group.read(self._number, make)


class CurrentBatch(NamedTuple):
    """A batch of what the one folder showed at a value of its change counter.

    Attributes:
        reader: reads it.
        anchors: where its items are cut.
        changes: the change counter.
    """

    reader: BatchReader
    anchors: Anchors
    changes: int

    def read(self, make: Splitter) -> dict[str, Any]:
        """The batch that `make` makes of its columns; see `BatchReader.read`."""
        return self.reader.read(self.anchors, make, self.changes)
