"""The anchors of one folder that is written to, followed step by step.

An `Index` is made anew where something changed, at a cost that grows with the episodes that there are. Here only the
slots that the folder's journal names are looked at, and only the ends of the list of runs are counted again: a ring
grows at its newest episodes and forgets at its oldest.
"""

from __future__ import annotations

import numpy as np

from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.records import (
    CHECK,
    DELETED,
    FLAGS,
    GENERATION,
    INNER_END,
    SHOWN,
    START,
    STOP,
    WORDS,
    Columns,
    Words,
    columns_of,
)
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.selection import Episodes, Selection
from memmap_buffer.views.anchors import Anchors, BoolArray
from memmap_buffer.views.folders import Folders

FEW = 16  # slots that are taken in one by one
SPARE = 1024  # runs that are added without a copy of those that are there


class LiveIndex:
    """The anchors of a folder, as of its change counter `changes`; one run an episode.

    Args:
        selection: the anchors that are wanted, of which `follows` is true.
        folders: the one folder.

    Attributes:
        storage: the folder.
        changes: the change counter to which it was followed; -1: to none.
    """

    def __init__(self, selection: Selection, folders: Folders) -> None:
        self._selection, self._folders = selection, folders
        self.storage: Storage = folders.storages[0]
        self._ends = selection.view.ends(folders.schema)
        known_ends = self._ends.recorded or self._ends.terminated is None
        self._by_steps = selection.view.one_per_step and known_ends and selection.min_episode_len <= 1
        self.changes = -1
        self._low = self._high = 0  # the runs that count
        self._num_episodes = 0
        self._words = self.storage.maps.words.reshape(-1)

    @staticmethod
    def follows(selection: Selection, folders: Folders) -> bool:
        """Whether anchors of this kind can be followed: each episode has one run, whatever the others have."""
        narrowed = selection.filter_fields or selection.top_k is not None or selection.weight_by is not None
        follows_from_others = selection.has_callables or selection.mixes or selection.view.continues
        if narrowed or follows_from_others or selection.random or not folders.single:
            return False
        storage = folders.storages[0]
        return storage.layout.writable and storage.trusted and not storage.num_damaged

    def __len__(self) -> int:
        return int(self._starts[self._high] - self._starts[self._low])

    def follow(self) -> bool:
        """Take in what changed; False where only an `Index` can tell."""
        storage = self.storage
        now = storage.changes
        if now == self.changes:
            return True
        before, self.changes = self.changes, -1  # until all is done: whatever interrupts it, it is made anew then
        slots = storage.changed_since(before) if before >= 0 else None
        if slots is None or not (self._take_in_steps(slots) or self._take_in(slots)):
            return self._begin()
        self.changes = now
        return True

    def draw(self, count: int, rng: np.random.Generator) -> Anchors:
        """`count` anchors drawn uniformly, with replacement: those that an `Index` would draw."""
        size = len(self)
        return self.locate(np.minimum((rng.random(count) * size).astype(np.int64), size - 1))

    def locate(self, i: IntArray) -> Anchors:
        """The anchors number `i`, (B,) int64 in [0, len)."""
        i = i + self._starts.item(self._low)
        run = self._starts[self._low : self._high + 1].searchsorted(i, side="right")
        run += self._low - 1
        t = i - self._starts.take(run)
        stride = self._selection.view.stride
        t = self._first.take(run) + (t if stride == 1 else t * stride)
        return Anchors(None, self._slot.take(run), self._serial.take(run), t)

    def _begin(self) -> bool:
        """Make it of the episode table."""
        self.changes = -1
        table = self._folders.refresh()[0]
        index = self._selection.index(self._folders, (table,))
        slots = table.visible
        if index.last is not None or len(np.unique(index.slot)) < len(index.slot):
            return False
        if np.bitwise_or.reduce(table.flags.take(slots)) & INNER_END:
            return False
        room = len(slots) + max(SPARE, len(slots) // 4)
        self._slot, self._serial, self._first, self._count, self._stop = np.zeros((5, room), np.int64)
        self._check = np.zeros(room, np.uint64)  # of each run's record
        self._there = np.zeros(room, np.bool_)  # whether its episode is visible
        self._starts = np.zeros(room + 1, np.int64)
        self._place = np.full(len(table.serial), -1)
        n = len(slots)
        self._low, self._high, self._num_episodes = 0, n, n
        self._slot[:n], self._serial[:n], self._stop[:n] = slots, table.serial.take(slots), table.length.take(slots)
        self._check[:n], self._there[:n] = table.check.take(slots), True
        self._place[slots] = np.arange(n)
        runs = self._place.take(index.slot)
        self._first[runs], self._count[runs] = index.first, np.diff(index.starts)
        np.cumsum(self._count[:n], out=self._starts[1 : n + 1])
        self.changes = table.changes
        return True

    def _take_in_steps(self, slots: IntArray) -> bool:
        """Take in few slots of which the first or the last step that is shown is another; False: it may be more."""
        if not self._by_steps or len(slots) > FEW:
            return False
        words, longest, found = self._words, self.storage.layout.max_timesteps, []
        for slot in slots.tolist():
            at, word = self._place.item(slot), WORDS * slot
            shown = words.item(word + SHOWN)
            start, stop = shown & 0xFFFFFFFF, shown >> 32
            same = at >= self._low and words.item(word + CHECK) == self._check.item(at)
            if not (same and self._there[at] and start < stop <= longest and not words.item(word + GENERATION) & 1):
                return False
            found.append((at, start, stop))
        first, count, starts, between = self._first, self._count, self._starts, list[int]()
        for at, start, stop in found:
            count[at] += (stop - self._stop.item(at)) - (start - first.item(at))
            first[at], self._stop[at] = start, stop
            if at == self._high - 1:
                starts[at + 1] = starts.item(at) + count.item(at)
            elif at == self._low:
                starts[at] = starts.item(at + 1) - count.item(at)
            else:
                between.append(at)
        if between:
            self._count_again(np.array(between))
        return True

    def _take_in(self, slots: IntArray) -> bool:
        """Take in the slots that changed; False where it must be made anew."""
        storage = self.storage
        if not len(slots):
            return True
        words = storage.maps.words.take(slots, axis=0)
        halves = words.view(np.uint32)
        place: IntArray = self._place.take(slots)
        flags = halves[:, FLAGS] & np.uint32(0xFFFF)
        # A record that was looked at before differs by the steps that it shows.
        known = (self._check.take(place) == words[:, CHECK]) & (place >= self._low)
        known &= words[:, GENERATION] & np.uint64(1) == 0
        if not known.all():
            found_at = self._take_in_records(slots, words, known, place)
            if found_at is None:
                return False
            there = found_at >= 0
            slots, halves, flags, place = slots[there], halves[there], flags[there], found_at[there]
        start, stop = halves[:, START].astype(np.int64), halves[:, STOP].astype(np.int64)
        if (stop > storage.layout.max_timesteps).any():
            return False
        serial = self._serial.take(place)
        found = self._selection.single_runs(storage, Episodes(slots, serial, start, stop, flags), self._ends)
        if found is None:
            return False
        first, count = found
        shown = start < stop
        if (self._there.take(place) != shown).any():  # the last step of an episode left, or an open one has another
            self._num_episodes += int(shown.sum()) - int(self._there.take(place).sum())
            self._there[place] = shown
        self._first[place], self._count[place], self._stop[place] = first, np.where(shown, count, 0), stop
        self._count_again(place)
        while self._num_episodes > storage.layout.max_episodes:  # now that all that are there again are counted
            if self._low == self._high:
                return False
            self._drop(self._low)
        return True

    def _take_in_records(self, slots: IntArray, words: Words, known: BoolArray, place: IntArray) -> IntArray | None:
        """The places of slots of which some have another record than before, -1 for those that hold no episode now."""
        storage, fresh = self.storage, np.flatnonzero(~known)
        columns: Columns = columns_of(words[fresh], storage.layout.max_timesteps, None, slots[fresh])
        shown = columns.valid & (columns.flags & DELETED == 0) & (columns.serial >= storage.state("base"))
        if (columns.flags[shown] & INNER_END).any():
            return None
        place = place.copy()
        for i in np.argsort(columns.serial).tolist():
            at, slot = fresh[i], slots.item(fresh[i])
            before = place.item(at)
            if before >= self._low and self._serial.item(before) == columns.serial.item(i) and shown[i]:
                self._check[before] = columns.check[i]
                continue
            if before >= self._low:
                self._drop(before)
            place[at] = -1
            if shown[i]:
                if not self._append(slot, columns.serial.item(i), columns.check[i]):
                    return None
                place[at] = self._high - 1
        return place

    def _drop(self, place: int) -> None:
        """An episode is not there any more."""
        self._num_episodes -= self._there.item(place)
        self._count[place], self._check[place], self._there[place] = 0, 0, False
        self._count_again(np.array([place]))

    def _append(self, slot: int, serial: int, check: int) -> bool:
        """A new episode, behind all others. False where there is no room."""
        at = self._high
        if at >= len(self._slot) or (at > self._low and serial <= self._serial.item(at - 1)):
            return False
        self._slot[at], self._serial[at], self._check[at] = slot, serial, check
        self._count[at], self._there[at] = 0, True
        self._place[slot] = at
        self._starts[at + 1] = self._starts[at]
        self._high, self._num_episodes = at + 1, self._num_episodes + 1
        return True

    def _count_again(self, places: IntArray) -> None:
        """Count the anchors again around runs that changed: towards the nearer end of the list."""
        low, high, starts = self._low, self._high, self._starts
        middle = (low + high) // 2
        old, new = places[places < middle], places[places >= middle]
        if len(new):
            at = int(new.min())
            starts[at + 1 : high + 1] = starts[at] + np.cumsum(self._count[at:high])
        if len(old):
            at = int(old.max())
            starts[low : at + 1] = starts[at + 1] - np.cumsum(self._count[low : at + 1][::-1])[::-1]
        while self._low < self._high and not self._check[self._low]:
            self._low += 1
