"""The writer's own account of its slots: which are visible, which are being written, which may be written. No I/O.

With a `capacity` the steps are forgotten in the order in which they were published: this writer has an entry for each
of them, which tells whose it is. The records keep that order for the next writer, by rounds: a step of all environments
is one round, and so is a step that is published alone. Of an episode whose last step was published in round r, step t
counts as published in round r - (length - 1 - t); of the same round, the episode with the lower serial comes first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import filterfalse, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import FALSE
from memmap_buffer.errors import BufferFullError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.layout import Layout

NONE: IntArray = np.empty(0, np.int64)
LOOK = 1 << 14  # slots that are looked at together for a free one
_LOW = 2**32 - 1
log = logging.getLogger("memmap_buffer")


class SlotAllocator:
    """The slots of one folder, as its only writer sees them.

    Args:
        layout: the sizes.
        table: the episodes at the start.
        following: the next serial.
        rounds: (slots,) in which the last step of each was published.
        path: of the folder, for errors and the log.

    Attributes:
        circular: whether there is always room.
        next: the serial that the next episode gets.
        steps: visible timesteps.
        round: of what is published next.
        serial: (slots,) the episode of each visible slot.
        start: (slots,) the first of its steps that is shown.
        stop: (slots,) its steps before this one are shown.
        retired: with a `capacity`, slots of episodes that left as there were more than `max_episodes`, for the writer
            to take from here.
        find: so many slots to write to, neither visible nor busy, or less. It keeps none: an interruption leaks none.
        hides: whether there may be episodes that only `max_episodes` hides. With a `capacity` they must be retired for
            good, as newer ones may leave before older ones.
    """

    def __init__(self, layout: Layout, table: EpisodeTable, following: int, rounds: IntArray, path: object) -> None:
        self._path, self._warned, self.circular = path, False, layout.circular
        self._max_episodes, self._capacity = layout.max_episodes, layout.capacity
        self.next = following
        self.steps = table.steps
        self.serial, self.start, self.stop = table.serial.copy(), table.start.copy(), table.length.copy()
        self._last = rounds
        self.retired: list[int] = []
        self.hides = layout.capacity is not None
        self.round = int(rounds[table.visible].max(initial=-1)) + 1
        # Entries `_head` to `_tail` are of the visible steps, oldest first: a slot, above it the serial's lower bits.
        # Some may be of steps that are not visible any more, and are passed over: theirs is not `_entry` of their slot.
        self._entry = np.full(layout.slots, -1)
        self._entry[table.visible] = _entry_of(table.visible, table.serial[table.visible])
        self._entries, self._head, self._tail = NONE, 0, 0
        if self._capacity is not None:
            self._entries = self._by_rounds(table.visible)
            self._tail = len(self._entries)
        # Likewise entries `_begin` to `_end` are of the visible episodes, by ascending serials.
        self._order, self._begin, self._end = self._entry[table.visible], 0, len(table)
        self._count = len(table)
        self._free: _Lowest | _LongestFree = _LongestFree(_retired_last(table))
        if layout.capacity is not None:
            self._free = _Lowest(~table.shown)
        self.find = self._free.find

    def __len__(self) -> int:
        return self._count

    @property
    def oldest(self) -> int:
        """The oldest visible serial, or the next one where nothing is visible."""
        slot = self._oldest_slot
        return self.next if slot < 0 else self.serial.item(slot)

    @property
    def _oldest_slot(self) -> int:
        """The slot of the oldest visible episode, -1 where there is none."""
        while self._begin < self._end:
            entry = self._order.item(self._begin)
            slot: int = entry & _LOW
            if self._entry.item(slot) == entry:
                return slot
            self._begin += 1
        return -1

    @property
    def surplus(self) -> int:
        """How many visible timesteps are more than `capacity`."""
        return 0 if self._capacity is None else max(0, self.steps - self._capacity)

    def has_room(self, episodes: int, steps: int) -> bool:
        """Whether so many more fit; in a circular buffer they always do."""
        limit = self._capacity
        return self.circular or (
            self._count + episodes <= self._max_episodes and (limit is None or self.steps + steps <= limit)
        )

    def require_room(self, episodes: int, steps: int) -> None:
        """Raise BufferFullError unless so many more fit."""
        if self.has_room(episodes, steps):
            return
        if self._count + episodes > self._max_episodes:
            what = f"{self._count} of max_episodes={self._max_episodes} episodes are published"
            what += f", {episodes - 1} more are open" if episodes > 1 else ""
        else:
            what = f"{self.steps} timesteps are published, {steps} more would pass capacity={self._capacity}"
        raise BufferFullError(
            f"{self._path} is full: {what}; create it with circular=True to overwrite the oldest, or larger, or "
            "clear() it"
        )

    def show(self, serial: int, slot: int, length: int, *, alone: bool = True) -> None:
        """An episode became visible, or longer; the oldest ones beyond `max_episodes` leave.

        One that has left already does not come back, however long it grows.

        Args: alone: each step is a round; otherwise the last one is of a round that goes on.
        """
        if self._entry.item(slot) == -1 or self.serial.item(slot) != serial:
            if serial < self.next:
                return
            self._is_newest(serial, slot)
        added = length - self.stop.item(slot)
        if added:
            self.steps += added
            self.stop[slot] = length
            self.round += added - (not alone)
            self._last[slot] = self.round - alone
            if self._capacity is not None:
                self._published(np.full(added, self._entry[slot]))
        while self._count > self._max_episodes:
            slot = self._oldest_slot
            self.hide(slot)
            if self._capacity is not None:
                self.retired.append(slot)
                self.hides = True
                self._tell_of_short_episodes(self._capacity)

    def _tell_of_short_episodes(self, capacity: int) -> None:
        """Log once that `max_episodes` is too low for the capacity ever to be reached."""
        if not self._warned and self.steps < capacity:
            self._warned = True
            text = (
                "%s: %d steps are visible, not capacity=%d: more than max_episodes=%d episodes would be needed for that"
            )
            log.warning(
                text + "; create it with a higher max_episodes",
                self._path,
                self.steps,
                capacity,
                self._max_episodes,
            )

    def show_round(self, slots: IntArray) -> None:
        """Episodes, each in its slot, became longer by one timestep, which ends the round.

        Those that have left already do not come back.
        """
        if len(slots) == 1:  # by plain numbers, in a third of the time
            slot = slots.item()
            if self._entry.item(slot) != -1:
                self.stop[slot] = self.stop.item(slot) + 1
                self._last[slot] = self.round
                self.steps += 1
                if self._capacity is not None:
                    if self._tail == len(self._entries):
                        self._make_room(1)
                    self._entries[self._tail] = self._entry[slot]
                    self._tail += 1
            self.round += 1
            return
        entries = self._entry.take(slots)
        is_there = entries != -1
        if FALSE in is_there.tobytes():
            slots, entries = slots[is_there], entries[is_there]
        self.stop[slots] += 1
        self._last[slots] = self.round
        self.steps += len(slots)
        self.round += 1
        if self._capacity is not None:
            self._published(entries)

    def hide(self, slot: int) -> None:
        """The episode of a slot is not visible any more; its slot may be written again."""
        if self._entry.item(slot) != -1:
            self._free.extend([slot])
            self._count -= 1
            self.steps -= self.stop.item(slot) - self.start.item(slot)
            self.start[slot], self._entry[slot] = self.stop[slot], -1

    def hide_all(self, slots: IntArray) -> None:
        """`hide` of many slots, each once."""
        if len(slots) == 1:  # by plain numbers, in a third of the time
            self.hide(slots.item())
            return
        slots = slots[self._entry.take(slots) != -1]
        self._free.extend(slots.tolist())
        self._count -= len(slots)
        self.steps -= int(self.stop.take(slots).sum() - self.start.take(slots).sum())
        self.start[slots], self._entry[slots] = self.stop.take(slots), -1

    def clear(self) -> None:
        """No episode is visible any more."""
        entries = self._order[self._begin : self._end]
        self.hide_all(entries[self._entry.take(entries & _LOW) == entries] & _LOW)

    def _is_newest(self, serial: int, slot: int) -> None:
        """Take note of an episode that became visible."""
        self._free.remove(slot)
        self.next = serial + 1
        self.serial[slot], self._entry[slot] = serial, _entry_of(slot, serial)
        self.start[slot] = self.stop[slot] = 0
        if self._end == len(self._order):
            entries = self._order[self._begin :]
            entries = entries[self._entry.take(entries & _LOW) == entries]
            self._order = np.concatenate([entries, np.empty(len(entries) + 64, np.int64)])
            self._begin, self._end = 0, len(entries)
        self._order[self._end] = self._entry[slot]
        self._end += 1
        self._count += 1

    # Steps that leave

    def last_round(self, slot: int) -> int:
        """The round in which the last step of a visible slot was published."""
        return self._last.item(slot)

    def forget(self, count: int) -> IntArray:
        """Let the `count` steps that were published first leave.

        Returns: the slots that they were in, whose `start` moved.
        """
        while count == 1 and self._head < self._tail:  # by plain numbers, in a third of the time
            entry = self._entries.item(self._head)
            self._head += 1
            slot = entry & _LOW
            if self._entry.item(slot) == entry:
                self.steps -= 1
                self.start[slot] = self.start.item(slot) + 1
                return np.array([slot])
        moved = NONE
        while count > 0 and self._head < self._tail:
            entries = self._entries[self._head : min(self._head + count, self._tail)]
            self._head += len(entries)
            slots = entries & _LOW
            slots = slots[self._entry.take(slots) == entries]
            moved = np.concatenate([moved, slots]) if len(moved) else slots
            self.steps -= len(slots)
            count -= len(slots)
        np.add.at(self.start, moved, 1)
        distinct = {*moved.tolist()}
        return moved if len(distinct) == len(moved) else np.array([*distinct])

    def _published(self, entries: IntArray) -> None:
        """Take note of steps that were published, each by the entry of its slot."""
        if self._tail + len(entries) > len(self._entries):
            self._make_room(len(entries))
        start, self._tail = self._tail, self._tail + len(entries)
        self._entries[start : self._tail] = entries

    def _make_room(self, count: int) -> None:
        """Drop the entries that were passed over or will be; have room for as many as are left, and `count`."""
        entries = self._entries[self._head : self._tail]
        entries = entries[self._entry[entries & _LOW] == entries]
        self._entries = np.empty(2 * (len(entries) + count) + 64, np.int64)
        self._entries[: len(entries)] = entries
        self._head, self._tail = 0, len(entries)

    def _by_rounds(self, visible: IntArray) -> IntArray:
        """The entries of visible slots as the records know their order."""
        counts = self.stop[visible] - self.start[visible]
        slots = np.repeat(visible, counts)
        back = np.arange(len(slots)) - np.repeat(np.cumsum(counts), counts) + 1  # 0 at the last step of each
        order = np.lexsort((self.serial[slots], self._last[slots] + back))
        return self._entry[slots[order]]


def _entry_of(slot: Any, serial: Any) -> Any:
    return slot | (serial & _LOW >> 1) << 32  # never negative


class _LongestFree(deque[int]):
    """Free slots, of which the one that was freed first is taken.

    One that is removed is near the front: only slots that are being written lie before it.
    """

    def find(self, is_busy: Callable[[int], bool], count: int) -> list[int]:
        """The first that are not busy; they stay."""
        return [*islice(filterfalse(is_busy, self), count)]


class _Lowest:
    """Free slots, of which the lowest is taken."""

    def __init__(self, free: npt.NDArray[np.bool_]) -> None:
        self._free, self._lowest = free, 0  # none below is free

    def find(self, is_busy: Callable[[int], bool], count: int) -> list[int]:
        """The first that are not busy; they stay."""
        self._lowest = slot = self._next(self._lowest)
        slots: list[int] = []
        while slot < len(self._free) and len(slots) < count:
            if not is_busy(slot):
                slots.append(slot)
            slot = self._next(slot + 1)
        return slots

    def _next(self, slot: int) -> int:
        """The first free slot from this one on, or the number of all slots."""
        while slot < len(self._free):
            part = self._free[slot : slot + LOOK]
            i = int(part.argmax())
            if part[i]:
                return slot + i
            slot += LOOK
        return len(self._free)

    def remove(self, slot: int) -> None:
        """Take one."""
        self._free[slot] = False

    def extend(self, slots: list[int]) -> None:
        """Some became free."""
        self._free[slots] = True
        self._lowest = min([self._lowest, *slots])


def _retired_last(table: EpisodeTable) -> list[int]:
    """The slots that show no episode: those without one first, from slot 0, then the longest retired.

    While that is being overwritten, no older one stands anywhere that would be shown again for the want of it.
    """
    empty = np.flatnonzero(~table.shown)
    retired = table.valid.take(empty)
    last = empty[retired]
    return [*empty[~retired].tolist(), *last[np.argsort(table.serial.take(last), kind="stable")].tolist()]
