"""Several environments whose episodes are appended to together: what is known of them, and the ways to show each step.

Of `MappedRound` a timestep is one store per field into the mapped files, and one word per episode. A store kills the
process where a block of its page is not there and the disk is full. So the blocks of some timesteps to come are
allocated first, which raises where there is no room; then stores go where they can only succeed, on file systems that
overwrite in place. Rows of a page and more are written. Elsewhere, and under durability "power", the steps of each
episode are written (`WrittenRound`). Those that are not shown yet stay in memory (`staged_round`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.records import SHOWN, WORDS, Words
from memmap_buffer.format.syscalls import BLOCK, allocate, write_all
from memmap_buffer.schema import Field
from memmap_buffer.writing.commit import SlotWriter, WriteHandles
from memmap_buffer.writing.episode import End, Episode

if TYPE_CHECKING:
    from memmap_buffer.writing.writer import Writer

WIDE = 1 << 12  # bytes of a row from which a write costs half of the page faults that a store meets in fresh pages
AHEAD = 1 << 18  # bytes of a field that are allocated at a time, at most: as many as the episode has
STEP = 1 << 32
ONE_STEP = np.uint64(STEP)
NONE: IntArray = np.empty(0, np.int64)
# A field: its name; its rows, one behind the other; the dtype of a row where it is taken for bytes; its `final`.
Rows: TypeAlias = tuple[str, Array, np.dtype[Any] | None, bool]


class Round:
    """Several environments, the episodes of which are appended to together: all of them get a timestep, or none.

    It is prepared for a timestep, takes it, and shows it; the kinds differ in where the rows go. `look` follows once
    for several that join or leave.

    Args:
        writer: of the episodes.
        size: how many environments there are.

    Attributes:
        members: (B,) the environments whose episodes are appended to, ascending.
        is_whole: whether these are all environments.
        lengths: (environments,) of the episodes, which share it.
        remaining: timesteps up to the longest episode.
        room: how many there is room for.
        most: how many it takes together.
        shows: whether each is shown at once. Then an episode joins with its first one.
    """

    most, shows = 1, True

    def __init__(self, writer: Writer, size: int) -> None:
        self._writer, self._size, self._longest = writer, size, writer.max_timesteps
        self._episodes: dict[int, Episode] = {}
        self._is_member = np.zeros(size, np.bool_)
        # By environment, how long its episode is, and the timestep before which there is room.
        self.lengths, self._until = np.zeros((2, size), np.int64)
        self.look()

    def join(self, episodes: Mapping[int, Episode]) -> None:
        """Append to the open episodes of some environments from now on."""
        for i in episodes:
            self.leave(i)  # all of them first: what stands here of one that others appended to is old
        self._take_in(episodes)
        for i, episode in episodes.items():
            self._episodes[i] = episode
            self._is_member[i] = True
            episode.share_length(self.lengths, i)  # last: interrupted before it, the episode joins once more
        self.look()

    def _take_in(self, episodes: Mapping[int, Episode]) -> None:
        """Know the lengths of some open episodes, and up to which timestep there is room."""
        raise NotImplementedError

    def without(self, environments: IntArray) -> IntArray:
        """The environments of these that are no members."""
        return NONE if self.is_whole else environments[~self._is_member[environments]]

    def leave(self, i: int) -> None:
        """The episode of an environment is appended to no longer, once `look` was called."""
        episode = self._episodes.get(i)
        if episode is not None and episode.lengths is self.lengths:
            episode.own_length()
        self._is_member[i] = self.is_whole = False
        self._episodes.pop(i, None)

    def look(self) -> None:
        """See which environments are members now."""
        self.members = members = self._is_member.nonzero()[0]
        self.is_whole = len(members) == self._size
        lengths = self.lengths[members]
        self.remaining = self._longest - int(lengths.max(initial=0))
        self.room = int((self._until[members] - lengths).min(initial=self._longest))

    def append(self, columns: Mapping[str, Array]) -> None:
        """Append one timestep to each episode: field -> (environments, *field).

        Raises OSError: it could not be written; none has it.
        """
        raise NotImplementedError

    def extend(self, columns: Mapping[str, Array], rows: range, chosen: IntArray, ends: Sequence[End]) -> None:
        """Append some of the timesteps (T, environments, *field) of each field.

        Args:
            columns: field -> these.
            rows: which of them, `most` at most.
            chosen: the environments that they are of; if they are shown, all `members`.
            ends: of the episodes that may be published with the last of them; those that stay open are still to be.
        """
        self.append({name: column[rows.start] for name, column in columns.items()})


class WrittenRound(Round):
    """Several environments, whose steps are written to the slot of each episode, and shown at once."""

    def _take_in(self, episodes: Mapping[int, Episode]) -> None:
        for i, episode in episodes.items():
            self.lengths[i], self._until[i] = episode.length, self._longest

    def append(self, columns: Mapping[str, Array]) -> None:
        """See `Round`."""
        fields, appended = self._writer.schema.fields, []
        for i in self.members.tolist():
            appended.append(self._episodes[i].to_append({name: columns[name][i : i + 1] for name in fields}))
        self._writer.append(appended)
        self.look()


class MappedFiles:
    """The files of narrow fields and the records, mapped so that stores reach them.

    Args:
        files: the open files.
    """

    def __init__(self, files: WriteHandles) -> None:
        self._files = files
        layout = files.layout
        arrays = layout.arrays
        self.shown = files.map("/episodes").view(np.uint64).reshape(-1, WORDS)[:, SHOWN]
        fields = layout.schema.fields
        narrow = {name: field for name, field in fields.items() if field.itemsize < WIDE}
        files.mapped = {name: files.map(name).reshape(layout.rows_shape(name)) for name in narrow}
        self._single: list[Rows] = [(name, files.mapped[name], None, field.final) for name, field in narrow.items()]
        self._several = [self._rows_of(name, field) for name, field in narrow.items()]
        # Of wide fields: the name, the descriptor, the bytes of the header and of a row, `final`.
        self.wide = [
            (name, files.fd[name], len(arrays[name].header), field.itemsize, field.final)
            for name, field in fields.items()
            if name not in narrow
        ]
        self._large: list[tuple[int, int, int, int]] = []  # descriptor, header, rows a slot, bytes a row
        self._small: list[tuple[int, int, int, int]] = []
        for name, field in fields.items():
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
        """The arrays that so many rows are stored to at a time; rows of wide fields are written."""
        return self._single if num_rows == 1 else self._several

    def _rows_of(self, name: str, field: Field) -> Rows:
        """The array that rows of several environments are stored to at a time."""
        rows = self._files.mapped[name]
        if not field.shape:
            return name, rows, None, field.final
        # Rows are copied as bytes: numpy stores those of a list in half the time that it takes for as short arrays.
        whole = np.dtype((np.void, field.itemsize))
        return name, rows.reshape(-1).view(whole), whole, field.final

    def prepare(self, slot: int, t: int) -> int:
        """Have room on the disk for timesteps of a slot from `t` on; up to which one. Raises OSError: it is full."""
        layout = self._files.layout
        stop = layout.max_timesteps
        for _, header, stride, itemsize in self._large:
            start = header + (slot * stride + t) * itemsize
            end = start + max(itemsize, min(AHEAD, t * itemsize))
            stop = min(stop, t + (-(-end // BLOCK) * BLOCK - start) // itemsize)  # up to the end of a block
        for fd, header, stride, itemsize in self._large:
            allocate(fd, header + (slot * stride + t) * itemsize, (stop - t) * itemsize)
        part = slot // self._together
        if part not in self._allocated:
            first, last = part * self._together, min((part + 1) * self._together, layout.slots)
            for fd, header, stride, itemsize in self._small:
                allocate(fd, header + first * stride * itemsize, (last - first) * stride * itemsize)
            self._allocated.add(part)
        return stop


class MappedRound(Round):
    """Several environments, whose steps are stored into mapped files, and shown at once.

    Args:
        writer: of the episodes.
        size: how many environments there are.
        files: the open files.
        maps: the same, mapped.

    Attributes:
        slots: (B,) of the episodes of `members`.
        new: the environments, ascending, of whose episodes nothing is shown yet, and these.
        room: timesteps for which there is room on the disk.
    """

    def __init__(self, writer: Writer, size: int, files: WriteHandles, maps: MappedFiles) -> None:
        self.files, self.maps = files, maps
        self._slot_writers: dict[int, SlotWriter] = {}  # by environment
        self._fields = maps.fields_of(size)
        self._all: Words | None = None  # of each slot, what is shown of it once its step is, while that is under way
        self._slot = np.zeros(size, np.int64)
        super().__init__(writer, size)

    def _take_in(self, episodes: Mapping[int, Episode]) -> None:
        self._slot_writers |= self._writer.slot_writers_of(episodes, self.files)
        self._look_at(episodes)
        self._allocate(episodes)

    def _look_at(self, environments: Iterable[int]) -> None:
        for i in environments:
            each = self._slot_writers[i]
            self._slot[i], self.lengths[i], self._until[i] = each.slot, each.num_published, each.room

    def look(self) -> None:
        """See which environments are members now."""
        super().look()
        members, longest = self.members, self._longest
        self.slots, t = self._slot[members], self.lengths[members]
        self._is_new = t == 0
        self.new = [(i, self._episodes[i], self._slot_writers[i]) for i in members[self._is_new].tolist()]
        first = self.slots * longest + t
        # The row that is next, in files without and with `final`. One alone is a plain number, in a third of the time.
        self._next: list[Any] = [first, first + self.slots]
        if self._size == 1 and len(members):
            self._next = [at.item() for at in self._next]

    def prepare(self) -> None:
        """Have room for the next timestep of each. Raises OSError: the disk is full; nothing has changed."""
        self._allocate(self.members[self._until[self.members] <= self.lengths[self.members]].tolist())
        self.look()

    def _allocate(self, environments: Iterable[int]) -> None:
        for i in environments:
            length, slot_writer = self.lengths.item(i), self._slot_writers[i]
            if slot_writer.room <= length:
                slot_writer.room = self.maps.prepare(slot_writer.slot, length)
                self._until[i] = slot_writer.room

    def append(self, columns: Mapping[str, Array]) -> None:
        """See `Round`: the writer has it prepared, written and shown, and tells the readers."""
        self._writer.append_round(self, columns)

    def extend(self, columns: Mapping[str, Array], rows: range, chosen: IntArray, ends: Sequence[End]) -> None:
        """See `Round`: the ends are published with the timestep."""
        self._writer.append_round(self, {name: column[rows.start] for name, column in columns.items()}, ends)

    def member(self, i: int) -> tuple[Episode, SlotWriter]:
        """The episode of an environment that is a member, and what writes to its slot."""
        return self._episodes[i], self._slot_writers[i]

    def write(self, columns: Mapping[str, Array]) -> None:
        """Write the next timestep of each, field -> (environments, *field).

        Raises OSError: a wide row could not be written.
        """
        following, members = self._next, None if self.is_whole else self.members
        for name, fd, header, size, final in self.maps.wide:
            column = columns[name] if members is None else columns[name][members]
            rows = np.atleast_1d(following[final]).tolist()
            for row, values in zip(rows, np.ascontiguousarray(column), strict=True):
                write_all(fd, values, header + row * size)
        if self._size == 1:
            for name, rows, _, final in self._fields:
                rows[following[final]] = columns[name][0]
        else:
            for name, rows, whole, final in self._fields:
                column = columns[name] if members is None else columns[name][members]
                if whole is not None:
                    column = np.ndarray(len(column), whole, np.ascontiguousarray(column))
                rows[following[final]] = column

    def begin_to_show(self) -> None:
        """The records of new episodes are shown first: should only some be, `show_all` makes up for it."""
        shown = self.maps.shown[self.slots]
        if self.new:
            shown[self._is_new] = 0  # it was of the episode that the slot had before
        self._all = shown + ONE_STEP

    def show_all(self) -> None:
        """Show what was written where it was begun; twice is fine."""
        if self._all is not None:
            self.maps.shown[self.slots] = self._all

    def show(self) -> None:
        """Show what was written, by one store for all. Readers are still to be told."""
        following, shown = self._next, self.maps.shown
        if self._all is not None:
            self.show_all()
            self.new = []
        elif self._size == 1:
            slot = self.slots.item()
            shown[slot] = shown.item(slot) + STEP
        else:
            shown[self.slots] += ONE_STEP
        self._all = None
        following[0] += 1
        following[1] += 1
        if self._size == 1:
            self.lengths[0] = self.lengths.item(0) + 1
        else:
            self.lengths += 1
        self.room -= 1
        self.remaining -= 1

    def settle(self) -> None:
        """Whatever went wrong: go on from what is shown."""
        self._all = None
        self._look_at([i for i, episode in self._episodes.items() if episode.state == "open"])
        self.look()
