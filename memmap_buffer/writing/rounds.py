"""A timestep of several environments at once: one store per field into the mapped files, one word per episode.

A store into a map kills the process where a block of its page is not there and the disk is full. So the blocks of some
timesteps to come are allocated first, which raises where there is no room; then stores go where they can only succeed,
on file systems that overwrite in place. Rows of a page and more are written. Elsewhere, and under durability "power",
timesteps are written one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.records import SHOWN, WORDS
from memmap_buffer.format.syscalls import BLOCK, allocate, write_all
from memmap_buffer.schema import Field
from memmap_buffer.writing.commit import SlotWriter, WriteHandles
from memmap_buffer.writing.episode import Episode

WIDE = 1 << 12  # bytes of a row from which a write costs half of the page faults that a store meets in fresh pages
AHEAD = 1 << 18  # bytes of a field that are allocated at a time
STEP = 1 << 32
ONE_STEP = np.uint64(STEP)
# A field: its name; its rows, one behind the other; the dtype of a row where it is taken for bytes; its `final`.
Rows: TypeAlias = tuple[str, Array, np.dtype[Any] | None, bool]


class MappedFiles:
    """The files of timesteps and the records, mapped so that stores reach them.

    Args:
        files: the open files.
    """

    def __init__(self, files: WriteHandles) -> None:
        self._files = files
        layout = files.layout
        arrays = layout.arrays
        self.shown = files.map("/episodes").view(np.uint64).reshape(-1, WORDS)[:, SHOWN]
        self.rows = {name: files.map(name) for name in layout.schema.fields}
        fields = layout.schema.fields.items()
        narrow = [(name, field) for name, field in fields if field.itemsize < WIDE]
        self._single, self._several = ([self._rows_of(*each, many) for each in narrow] for many in (False, True))
        # Of wide fields: the name, the descriptor, the bytes of the header and of a row, `final`.
        self.wide = [
            (name, files.fd[name], len(arrays[name].header), field.itemsize, field.final)
            for name, field in fields
            if field.itemsize >= WIDE
        ]
        self._large: list[tuple[int, int, int, int]] = []  # descriptor, header, rows a slot, bytes a row
        self._small: list[tuple[int, int, int, int]] = []
        for name, field in layout.schema.fields.items():
            size = (files.fd[name], len(arrays[name].header), layout.max_timesteps + field.final, field.itemsize)
            (self._large if size[2] * size[3] >= BLOCK else self._small).append(size)
        # Of small fields, whose space is never given back, several slots are allocated by one call.
        self._together = BLOCK // max([1, *(stride * itemsize for *_, stride, itemsize in self._small)])
        self._allocated: set[int] = set()  # so many slots of small fields each

    @classmethod
    def of(cls, files: WriteHandles) -> MappedFiles | None:
        """The files mapped for stores; None where these are not as good as writes, as blobs may be of any length."""
        try:
            return cls(files) if files.stores and not files.layout.coded else None
        except (OSError, ValueError, CorruptBufferError):  # no memory for so many maps, say
            return None

    def fields_of(self, num_rows: int) -> list[Rows]:
        """What so many rows are stored to at a time; those of wide fields are written."""
        return self._single if num_rows == 1 else self._several

    def _rows_of(self, name: str, field: Field, several: bool) -> Rows:
        rows = self.rows[name].reshape(-1, *field.shape)
        if not several or not field.shape:
            return name, rows, None, field.final
        # Rows are copied as bytes: numpy stores those of a list in half the time that it takes for as short arrays.
        whole = np.dtype((np.void, field.itemsize))
        return name, rows.reshape(-1).view(whole), whole, field.final

    def prepare(self, slot: int, t: int) -> int:
        """Have room on the disk for timesteps of a slot from `t` on; up to which one. Raises OSError: it is full."""
        layout = self._files.layout
        stop = layout.max_timesteps
        for *_, itemsize in self._large:
            stop = min(stop, t + max(1, AHEAD // itemsize))
        for fd, header, stride, itemsize in self._large:
            allocate(fd, header + (slot * stride + t) * itemsize, (stop - t) * itemsize)
        part = slot // self._together
        if part not in self._allocated:
            first, last = part * self._together, min((part + 1) * self._together, layout.slots)
            for fd, header, stride, itemsize in self._small:
                allocate(fd, header + first * stride * itemsize, (last - first) * stride * itemsize)
            self._allocated.add(part)
        return stop


class Round:
    """Several episodes of which every timestep is shown at once, appended to together.

    Args:
        files: the open files.
        maps: the same, mapped.
        episodes: published ones, still open.
        slot_writers: of each.

    Attributes: left: timesteps up to the longest episode. room: how many there is room for on the disk.
    """

    def __init__(
        self, files: WriteHandles, maps: MappedFiles, episodes: Sequence[Episode], slot_writers: Sequence[SlotWriter]
    ) -> None:
        self.files, self.maps = files, maps
        self._pairs = list(zip(episodes, slot_writers, strict=True))
        self.slots: IntArray = np.array([one.slot for one in slot_writers])
        self.room = 0
        self._fields = maps.fields_of(len(self._pairs))
        self._go_on()

    def _go_on(self) -> None:
        """Count from what is published."""
        t: IntArray = np.array([one.length for one in self.slot_writers])
        self.left = self.files.layout.max_timesteps - int(t.max())
        first = self.slots * self.files.layout.max_timesteps + t
        # The row that is next, in files without and with `final`. One alone is a plain number, in a third of the time.
        self._next: list[Any] = [first, first + self.slots]
        if len(self._pairs) == 1:
            self._next = [at.item() for at in self._next]

    @property
    def episodes(self) -> list[Episode]:
        """Those that are appended to."""
        return [one for one, _ in self._pairs]

    @property
    def slot_writers(self) -> list[SlotWriter]:
        """Those of the episodes."""
        return [one for _, one in self._pairs]

    def prepare(self) -> None:
        """Have room for the next timestep of each. Raises OSError: the disk is full; nothing has changed."""
        for one in self.slot_writers:
            if one.room <= one.length:
                one.room = self.maps.prepare(one.slot, one.length)
        self.room = min(one.room - one.length for one in self.slot_writers)

    def write(self, columns: Mapping[str, Array]) -> None:
        """Write the next timestep of each, field -> (B, *field).

        Raises OSError: a wide row could not be written.
        """
        following = self._next
        for name, fd, header, size, final in self.maps.wide:
            rows, column = np.atleast_1d(following[final]).tolist(), np.ascontiguousarray(columns[name])
            for row, values in zip(rows, column, strict=True):
                write_all(fd, values, header + row * size)
        if len(self._pairs) == 1:
            for name, rows, _, final in self._fields:
                rows[following[final]] = columns[name][0]
        else:
            for name, rows, whole, final in self._fields:
                column = columns[name]
                rows[following[final]] = column if whole is None else bytes_of(column, whole)

    def show(self) -> None:
        """Show what was written, by one store for all. Readers are still to be told."""
        following, shown = self._next, self.maps.shown
        if len(self._pairs) == 1:
            slot = self.slots.item()
            shown[slot] = shown.item(slot) + STEP
        else:
            shown[self.slots] += ONE_STEP
        following[0] += 1
        following[1] += 1
        self.room -= 1
        self.left -= 1
        for episode, slot_writer in self._pairs:
            slot_writer.length = episode.base = episode.length = episode.length + 1

    def settle(self) -> None:
        """Whatever went wrong: go on from what is shown."""
        self.room = 0
        self._go_on()

    def show_others(self, slots: Any, words: Any) -> None:
        """Show other steps of some slots: of each the first, and above it the end."""
        self.maps.shown[slots] = words


def bytes_of(column: Array, whole: np.dtype[Any]) -> Array:
    """A column (B, *field) as (B,) items of bytes."""
    return np.ndarray(len(column), whole, np.ascontiguousarray(column))
