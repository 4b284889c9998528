"""The visible episodes of one folder, followed change by change: what one appended step costs depends on no count.

`EpisodeTable` says the same of one moment, and is asked where the journal of changes does not tell enough.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import any_of
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.records import (
    CHECK,
    DELETED,
    GENERATION,
    INNER_END,
    OPEN,
    SHOWN,
    Columns,
    columns_of,
)
from memmap_buffer.format.storage import Storage

NO_SLOTS: IntArray = np.empty(0, np.int64)
FEW = 16  # slots: up to so many are looked at one by one, as a call of numpy takes as long as ten numbers
FEWER = 8  # of which little more is looked at
LOW = 2**32 - 1
_LOW, _HALF = np.uint64(LOW), np.uint64(32)
Moved: TypeAlias = tuple[list[int], list[int], list[int]] | tuple[IntArray, IntArray, IntArray]


class VisibleEpisodes:
    """The visible episodes of one folder.

    Attributes:
        table: what the records said by slot, in arrays of its own, changed in place; only columns are to be read.
        shown: (slots,) whether a slot holds a visible episode.
        num_steps: visible timesteps.
        changes: the change counter of the folder to which they were followed; None in the middle of it.
        order: (2, n) the serials and slots from `head` to `tail` are those of the episodes, by ascending serials, with
            some that are gone. Entries behind them are added, and others taken off the front, until all is read anew.
        moved: where the last `follow` found nothing but that episodes show other steps: (slots, by how many the `start`
            of each is higher, by how many its `stop` is), lists where they are few; else None.
    """

    table: EpisodeTable
    shown: npt.NDArray[np.bool_]
    num_steps = 0

    def __init__(self) -> None:
        self.changes: int | None = None
        self._num_damaged = 0
        self._num_episodes = 0
        self.order: IntArray = np.empty((2, 0), np.int64)
        self.head = self.tail = 0
        self.moved: Moved | None = None
        self._hidden = 0  # episodes of lower serials are not shown any more

    def is_current(self, storage: Storage) -> bool:
        """Whether nothing has changed since `follow`."""
        return storage.changes == self.changes and storage.num_damaged == self._num_damaged

    def follow(self, storage: Storage) -> IntArray | None:
        """Take in what changed in the folder.

        Returns:
            the slots whose record or visibility may have changed, each once; None where that may be any.
        """
        changes, before = storage.changes, self.changes
        if changes == before and storage.num_damaged == self._num_damaged:
            self.moved = [], [], []
            return NO_SLOTS
        self.changes = self.moved = None  # until all is done
        slots = None if before is None or not self._may_be_followed(storage) else storage.changed_since(before)
        changed = None if slots is None else self._take_in(storage, slots)
        if changed is None:
            changes = self._read(storage)
        self.changes = changes
        return changed

    def places(self, serials: IntArray) -> tuple[IntArray, Any]:
        """(slots, whether each episode (B,) is visible)."""
        known, slots = self.order[:, self.head : self.tail]
        if not len(known):
            return np.zeros_like(serials), np.zeros(len(serials), np.bool_)
        if self.gapless:
            found = slots.take(serials - known[0], mode="clip")
        else:
            found = slots.take(np.searchsorted(known, serials), mode="clip")
        return found, (self.table.serial.take(found) == serials) & self.shown.take(found)

    def has_inner_end(self, slots: IntArray) -> bool:
        """Whether one of the visible episodes in slots (B,) may have a marked end before its last step."""
        shown = slots[self.shown.take(slots)]
        return bool(np.bitwise_or.reduce(self.table.flags.take(shown), initial=0) & INNER_END)

    @property
    def gapless(self) -> bool:
        """Whether the serials of `order` follow one another."""
        last = self.tail - 1
        return last >= self.head and self.order.item(0, last) - self.order.item(0, self.head) == last - self.head

    def _may_be_followed(self, storage: Storage) -> bool:
        return storage.layout.rows is None and not storage.in_doubt and not storage.num_damaged

    def _read(self, storage: Storage) -> int:
        """Everything anew from the table; returns the change counter at which it was read."""
        table, self._num_damaged = storage.refresh(), storage.num_damaged
        self.shown, self.num_steps = table.shown.copy(), table.steps
        self.head, self.tail, self._num_episodes = 0, len(table), len(table)
        self.order = np.empty((2, len(table) + max(64, len(table.serial))), np.int64)
        self.order[:, : self.tail] = table.serial[table.visible], table.visible
        full = len(table) >= storage.layout.max_episodes
        self._hidden = self.order.item(0, 0) if full else table.base
        columns = Columns._make([column.copy() for column in table.columns])
        self.table = replace(table, visible=NO_SLOTS, **columns._asdict())
        self._most = np.zeros(len(self.shown), np.int64)
        self._limit(np.flatnonzero(self.shown), storage)
        return table.changes

    def _take_in(self, storage: Storage, slots: IntArray) -> IntArray | None:
        """Look at the records of some slots again; None where these do not tell what is visible."""
        show_others = self._few_show_others if len(slots) <= FEWER else self._show_others
        if storage.state("base") <= self._hidden and show_others(storage, slots):
            return slots
        table, base = self.table, storage.state("base")
        now = columns_of(storage.maps.words[slots], storage.layout.max_timesteps, None, slots)
        self._hidden = max(self._hidden, base)
        some = now.start < now.length
        shown = now.valid & some & (now.flags & DELETED == 0) & (now.serial >= self._hidden)
        was = self.shown[slots]
        same = was & (now.serial == table.serial[slots])
        if (same & some & ~now.valid).any():  # it is being rewritten, and will come back
            return None
        fresh = np.flatnonzero(shown & ~same)
        if len(fresh) and not self._append(now.serial[fresh], slots[fresh]):
            return None
        self.num_steps -= int((table.length[slots] - table.start[slots])[was].sum())
        self.num_steps += int((now.length - now.start)[shown].sum())
        self._num_episodes += int(shown.sum()) - int(was.sum())
        if self._num_episodes < storage.layout.max_episodes and self._hidden > base:
            return None  # an older one may come back
        columns: Any = zip(table.columns, now, strict=True)
        for column, values in columns:
            column[slots] = values
        self.shown[slots] = shown
        self._limit(slots, storage)
        gone = self._retire(storage.layout.max_episodes)
        return np.unique(np.concatenate([slots, gone])) if gone else slots

    def _limit(self, slots: IntArray, storage: Storage) -> None:
        """Up to which step slots may come to show theirs: an open episode grows, another stays, none shows nothing."""
        table = self.table
        most = np.where(table.flags[slots] & OPEN != 0, storage.layout.max_timesteps, table.length[slots])
        self._most[slots] = most * self.shown[slots]

    def _show_others(self, storage: Storage, slots: IntArray) -> bool:
        """Where all are as they were but for the steps that they show, take these; False where they are not.

        No writer changes what a record says and leaves its check and its generation.
        """
        table, words = self.table, storage.maps.words.take(slots, axis=0)
        start, stop = (words[:, SHOWN] & _LOW).view(np.int64), (words[:, SHOWN] >> _HALF).view(np.int64)
        left, added = start - table.start.take(slots), stop - table.length.take(slots)
        other = words[:, CHECK] ^ table.check.take(slots)
        other |= words[:, GENERATION] ^ table.generation.take(slots)
        wrong = stop - start - 1  # below 0 where it shows no step, more than it may, or fewer than before
        wrong |= self._most.take(slots) - stop
        wrong |= added
        if np.count_nonzero(other) or any_of(wrong < 0):
            return False
        self.num_steps += int(np.add.reduce(added - left))
        table.start[slots], table.length[slots] = start, stop
        self.moved = slots, left, added
        return True

    def _few_show_others(self, storage: Storage, slots: IntArray) -> bool:
        """The same, one by one."""
        table, words, limit = self.table, storage.maps.words, storage.layout.max_timesteps
        found = slots.tolist()
        shown, left, added = [], [], []
        for slot in found:
            word = words.item(slot, SHOWN)  # before these, so that it is of the same episode
            same = words.item(slot, CHECK) == table.check.item(slot)
            if not (same and words.item(slot, GENERATION) == table.generation.item(slot) and self.shown.item(slot)):
                return False
            start, stop, before = word & LOW, word >> 32, table.length.item(slot)
            if not start < stop <= limit or (stop != before and (stop < before or not table.flags.item(slot) & OPEN)):
                return False
            shown.append((slot, start, stop))
            left.append(start - table.start.item(slot))
            added.append(stop - before)
        for slot, start, stop in shown:
            table.start[slot], table.length[slot] = start, stop
        self.num_steps += sum(added) - sum(left)
        self.moved = found, left, added
        return True

    def _append(self, serials: IntArray, slots: IntArray) -> bool:
        """Take in episodes that appeared; False where there is no room, or one is not newer than all the others."""
        stop, order = self.tail + len(serials), np.argsort(serials)
        last = self.order.item(0, self.tail - 1) if self.tail > self.head else -1
        serials, slots = serials[order], slots[order]
        if stop > self.order.shape[1] or serials[0] <= last or (serials[1:] == serials[:-1]).any():
            return False
        self.order[:, self.tail : stop] = serials, slots
        self.tail = stop
        return True

    def _retire(self, max_episodes: int) -> list[int]:
        """The oldest episodes leave where there are too many; returns their slots."""
        gone = []
        while self.head < self.tail:
            serial, slot = self.order[:, self.head].tolist()
            if self.shown[slot] and self.table.serial.item(slot) == serial:
                if serial >= self._hidden and self._num_episodes <= max_episodes:
                    break
                self.shown[slot], self._most[slot] = False, 0
                self.num_steps -= self.table.length.item(slot) - self.table.start.item(slot)
                self._num_episodes -= 1
                self._hidden = max(self._hidden, serial + 1)
                gone.append(slot)
            self.head += 1
        return gone
