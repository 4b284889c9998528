"""The writer's own account of its slots: which are visible, which are being written, which may be written. No I/O."""

from __future__ import annotations

import math
from collections import OrderedDict, deque

import numpy as np

from memmap_buffer.errors import BufferFullError
from memmap_buffer.format.episode_table import EpisodeTable
from memmap_buffer.format.layout import Layout


class SlotAllocator:
    """The slots of one folder, as its only writer sees them.

    Args:
        layout: the sizes.
        table: the episodes at the start.
        following: the next serial.

    Attributes:
        next: the serial that the next episode gets.
        steps: visible timesteps.
    """

    def __init__(self, layout: Layout, table: EpisodeTable, following: int) -> None:
        self._layout = layout
        self._max_episodes, self._capacity = layout.max_episodes, layout.capacity or math.inf
        self.next = following
        self.steps = table.steps
        # Oldest first. An OrderedDict: a dict that loses its first entries looks at all of them to find the next.
        self._live = OrderedDict((int(table.serial[s]), (int(s), int(table.length[s]))) for s in table.visible)
        empty = np.setdiff1d(np.arange(layout.slots), table.visible)
        # Those without an episode first, from slot 0, then the longest retired: while it is being overwritten, no older
        # one stands anywhere that would be within `capacity` again for the want of it.
        order = np.lexsort((empty, np.where(table.valid[empty], table.serial[empty], -1)))
        self._free: deque[int] = deque(empty[order].tolist())

    def __len__(self) -> int:
        return len(self._live)

    @property
    def oldest(self) -> int:
        """The oldest visible serial, or the next one where nothing is visible."""
        return next(iter(self._live), self.next)

    def take(self, busy: set[int]) -> int | None:
        """A slot to write to, neither visible nor `busy`, or None. It is not kept: an interruption leaks none."""
        for slot in self._free:
            if slot not in busy:
                return slot
        return None

    def require_room(self, path: object, episodes: int, steps: int) -> None:
        """Raise BufferFullError unless so many more fit; a circular buffer always has room."""
        limit = self._layout.capacity
        if self._layout.circular:
            return
        if len(self) + episodes > self._layout.max_episodes:
            what = f"{len(self)} of max_episodes={self._layout.max_episodes} episodes are published"
            what += f", {episodes - 1} more are open" if episodes > 1 else ""
        elif limit is not None and self.steps + steps > limit:
            what = f"{self.steps} timesteps are published, {steps} more would pass capacity={limit}"
        else:
            return
        raise BufferFullError(
            f"{path} is full: {what}; create it with circular=True to overwrite the oldest, or larger, or clear() it"
        )

    def show(self, serial: int, slot: int, length: int) -> None:
        """An episode became visible, or longer; the oldest ones that do not fit any more leave.

        One that has left already does not come back, however long it grows.
        """
        _, before = self._live.get(serial, (slot, 0))
        if not before:
            if serial < self.next:
                return
            self._free.remove(slot)
            self.next = serial + 1
        self._live[serial] = (slot, length)
        self.steps += length - before
        while len(self._live) > self._max_episodes or self.steps > self._capacity:
            self.hide(self.oldest)

    def hide(self, serial: int) -> None:
        """An episode is not visible any more; its slot may be written again."""
        slot, length = self._live.pop(serial, (-1, 0))
        if length:
            self._free.append(slot)
            self.steps -= length

    def clear(self) -> None:
        """No episode is visible any more."""
        while self._live:
            self.hide(self.oldest)
