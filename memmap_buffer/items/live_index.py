"""The anchors of one folder that is written to, followed step by step.

An `Index` is made anew where something changed, at a cost that grows with the episodes that there are. Here only the
slots that changed are looked at, and only the ends of the list of runs are counted again: a ring grows at its newest
episodes and forgets at its oldest.
"""

from __future__ import annotations

import numpy as np

from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.journal import Change
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.index import AnchorRuns
from memmap_buffer.items.selection import Selection
from memmap_buffer.items.streams import Streams
from memmap_buffer.views.folders import Folders


class LiveIndex(AnchorRuns):
    """The anchors of the episodes that a folder shows, one run each: run r is of entry r of the journal's `order`.

    Args:
        selection: the anchors that are wanted, of which `follows` is true.
        folders: the one folder.

    Attributes:
        slot, serial, first, starts, stride, streams: see `AnchorRuns`; as of the last `follow`.
        changes: the change counter to which it was followed, -1 in the middle of it.
        num_anchors: how many there are.
        storage: the folder.
        made: how often it was made anew.
        mark: of the journal, up to which it was followed.
    """

    changes: int = -1
    num_anchors = 0

    def __init__(self, selection: Selection, folders: Folders) -> None:
        self.storage: Storage = folders.storages[0]
        self.stride = selection.view.stride
        self.made = 0
        self._selection = selection
        self._journal, self.mark = self.storage.journal, 0
        self._by_steps = selection.by_steps(folders.schema)
        self._streams: Streams | None = None
        self._whole = False
        self._low = self._high = 0  # the entries of the journal's `order` that count

    @staticmethod
    def follows(selection: Selection, folders: Folders) -> bool:
        """Whether anchors of this kind can be followed: an episode's are one run, whatever most others are."""
        if not (selection.by_episode or selection.in_streams) or selection.filter_fields or selection.mixes:
            return False
        storage = folders.storages[0]
        return folders.single and storage.layout.writable and not folders.mirrored

    def follow(self) -> bool:
        """Take in what changed; False where only an `Index` can tell."""
        if self.changes >= 0 and self._journal.is_current(self.storage, self.mark):
            return self._whole
        whole, self._whole, self.changes = self._whole, False, -1  # whatever interrupts it, it is made anew then
        with self._journal.lock:
            change = self._journal.follow(self.storage, self.mark)
            followed = whole and change.slots is not None
            followed = followed and (self._take_in_steps(change) or self._take_in(change.slots))  # type: ignore[arg-type]
            self._whole = followed or self._begin()
            low, high, starts = self._low, self._high, self._starts
            self.serial, self.slot = self._journal.order[:, low:high]
            self.first, self.starts = self._first[low:high], starts[low : high + 1]
            self.num_anchors = starts.item(high) - starts.item(low)
            self.mark, self.changes = change.mark, self._journal.version  # type: ignore[assignment]
        return self._whole

    def _begin(self) -> bool:
        """Make it of all visible episodes."""
        episodes = self._journal
        room = episodes.order.shape[1]
        self._first, self._count, self._starts = (np.zeros(size, np.int64) for size in (room, room, room + 1))
        self._run_of = np.full(len(episodes.table.serial), -1)
        self._low = self._high = episodes.head
        self._streams = self._selection.no_streams(episodes.table) if self._selection.in_streams else None
        self.streams = None if self._streams is None else {0: self._streams}
        self.made += 1
        return self._take_in(np.flatnonzero(episodes.shown))

    def _take_in_steps(self, change: Change) -> bool:
        """Take in steps that came or left, where each is an anchor; False where more may have changed."""
        moved = change.moved
        if not self._by_steps or moved is None:
            return False
        first, count, starts = self._first, self._count, self._starts
        if isinstance(moved[0], np.ndarray):
            runs = self._run_of.take(moved[0])
            count[runs] += np.subtract(moved[2], moved[1])
            first[runs] += moved[1]
            self._count_again(*self._ends_of(runs))
            return True
        low, last = self._low, self._high - 1
        middle, new, old = (low + last) // 2, last + 1, -1
        for slot, fewer, more in zip(*moved, strict=True):
            run = self._run_of.item(slot)
            count[run] = counted = count.item(run) + more - fewer
            if fewer:
                first[run] = first.item(run) + fewer
            if run == last:
                starts[run + 1] = starts.item(run) + counted
            elif run == low:
                starts[run] = starts.item(run + 1) - counted
            elif run > middle:
                new = run if run < new else new
            else:
                old = run if run > old else old
        if new <= last or old >= 0:
            self._count_again(new, old)
        return True

    def _take_in(self, slots: IntArray) -> bool:
        """Take in the slots that changed; False where an episode has more than one run."""
        episodes = self._journal
        if not len(slots):
            return True
        changed = self._run_of.take(slots)
        new = episodes.order[1, self._high : episodes.tail]
        self._starts[self._high + 1 : episodes.tail + 1] = self._starts[self._high]
        self._run_of[new] = np.arange(self._high, episodes.tail)
        self._high = episodes.tail
        shown, streams = slots[episodes.table.of(episodes.shown, slots)], self._streams
        if streams is not None:
            others = self._selection.follow(streams, self.storage, episodes.table, slots, shown)
            if others is None:
                return False
            shown = np.union1d(shown, others)
        shown_runs = self._selection.runs_of(0, self.storage, episodes.table, shown)
        if streams is not None:
            shown_runs = streams.fitting(shown_runs, self.stride)
        if shown_runs.last is not None or episodes.has_inner_end(slots):
            return False
        runs, theirs = self._run_of.take(shown_runs.slot), self._run_of.take(shown)
        changed = np.concatenate([changed[changed >= self._low], theirs])
        self._count[changed], self._first[theirs] = 0, episodes.table.start.take(shown)
        self._first[runs], self._count[runs] = shown_runs.first, shown_runs.count
        self._count_again(*self._ends_of(changed))
        return True

    def _ends_of(self, runs: IntArray) -> tuple[int, int]:
        """(the oldest in the newer half of the list, the newest in the older half) of some runs that changed."""
        newer = runs > (self._low + self._high - 1) // 2
        return int(runs.min(initial=self._high, where=newer)), int(runs.max(initial=-1, where=~newer))

    def _count_again(self, new: int, old: int) -> None:
        """Count the anchors again from a run on, and up to a run: towards the nearer end of the list."""
        low, high, starts = self._low, self._high, self._starts
        if new < high:
            starts[new + 1 : high + 1] = starts[new] + self._count[new:high].cumsum()
        if old >= low:
            starts[low : old + 1] = starts[old + 1] - self._count[low : old + 1][::-1].cumsum()[::-1]
        self._low = max(low, self._journal.head)  # what has left before it counts nothing
