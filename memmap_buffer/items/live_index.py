"""`LiveIndex`: the anchors of a single folder that is written to, followed change by change.

To make an `Index` anew costs more the more episodes there are. A `LiveIndex` looks at the changed slots alone, and
counts again only the ends of its list of runs: a ring grows at its newest episodes and drops its oldest. Samplers call
`follow` before they draw; where that returns False, they take an `Index`.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.journal import NO_SLOTS, Moved
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.index import AnchorRuns
from memmap_buffer.items.new_items import Changed
from memmap_buffer.items.selection import Selection
from memmap_buffer.items.streams import Streams
from memmap_buffer.views.anchors import Anchors, Runs
from memmap_buffer.views.folders import Folders

MOST_TOUCHED = 1 << 16  # changed slots that are remembered, about
SHORT = 1024  # runs, all of which are counted again in 1 us: in less time than it takes to find those that must be


class LiveIndex(AnchorRuns):
    """The anchors of the episodes that a folder shows, one run for each entry of the journal's `order`.

    `_first`, `_count` and `_starts` are as long as `order`, and entry r is of the episode in entry r of `order`. The
    entries `_low` … `_high` - 1 are in use: an episode that is gone has the count 0, until `_low` passes it.

    Args:
        selection: the anchors that are wanted; `follows` is true for it.
        folders: the single folder.

    Attributes:
        slot, serial, first, starts, stride, streams: see `AnchorRuns`; as of the last `follow`.
        changes: the folder's change counter up to which changes were taken in; -1 while some are being taken in.
        num_anchors: the number of anchors.
        storage: the folder.
        made: how often it was made anew from all episodes.
        mark: the mark of the journal up to which changes were taken in.
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
        self._whole = False  # whether each episode has one run at most, so that it can be followed
        self._low = self._high = 0
        self._touched: list[IntArray] | None = None  # slots whose anchors changed since `changed`; None: any slot

    @staticmethod
    def follows(selection: Selection, folders: Folders) -> bool:
        """Whether anchors of this kind can be followed: they depend on their episode and its stream alone."""
        if not (selection.by_episode or selection.in_streams) or selection.filter_fields or selection.mixes:
            return False
        storage = folders.storages[0]
        return folders.single and storage.layout.writable and not folders.mirrored

    def follow(self) -> bool:
        """Take in the changes of the folder; returns False if the anchors must be read from an `Index` now."""
        if self.changes >= 0 and self._journal.is_current(self.storage, self.mark):
            return self._whole
        whole, self._whole, self.changes = self._whole, False, -1  # after an interruption it is made anew
        with self._journal.lock:
            change = self._journal.follow(self.storage, self.mark)
            others = change.others if self._by_steps else change.slots
            if whole and others is not None:
                if self._touched is not None:
                    self._touch(change.slots)  # type: ignore[arg-type]
                if self._by_steps and len(change.moved[0]):
                    self._take_in_steps(change.moved)
                whole = not len(others) or self._take_in(others)
            whole = (whole and others is not None) or self._begin()
            low, high, starts = self._low, self._high, self._starts
            order = self._journal.order
            self.serial, self.slot = order[0, low:high], order[1, low:high]
            self.first, self.starts = self._first[low:high], starts[low : high + 1]
            self.num_anchors = starts.item(high) - starts.item(low)
            self.mark = change.mark  # before `_whole`: no change may be taken in twice
            self._whole, self.changes = whole, self._journal.version  # type: ignore[assignment]
        return whole

    def changed(self, *, anew: bool) -> list[Changed]:
        """The runs in which there may be other anchors than at the last call; all runs if `anew`."""
        touched, self._touched = self._touched, []
        slots = np.arange(len(self._run_of)) if anew or touched is None else np.concatenate([NO_SLOTS, *touched])
        runs = np.unique(self._run_of.take(slots)) - self._low
        runs = runs[runs >= 0]
        runs = runs[self._count.take(runs + self._low) > 0]
        count = self._count.take(runs + self._low)
        changed = Runs(self.slot.take(runs), self.serial.take(runs), self.first.take(runs), count)
        return [(None, "", changed, self._streams)]

    def left_of(self, anchors: Anchors) -> Anchors:
        """The anchors that exist still, of some that it had."""
        run = self._run_of.take(anchors.slot)
        since = anchors.t - self._first.take(run)
        exists = (run >= self._low) & (self.serial.take(run - self._low, mode="clip") == anchors.serial)
        exists &= (since >= 0) & (since < self._count.take(run) * self.stride)
        return anchors.where(exists)

    def _begin(self) -> bool:
        """Make it anew from all visible episodes; returns False if one of them has several runs."""
        journal = self._journal
        size = journal.order.shape[1]
        self._first, self._count, self._starts = (np.zeros(length, np.int64) for length in (size, size, size + 1))
        self._run_of = np.full(len(journal.table.serial), -1)
        self._low = self._high = journal.head
        self._streams = self._selection.no_streams(journal.table) if self._selection.in_streams else None
        self.streams = None if self._streams is None else {0: self._streams}
        self.made, self._touched = self.made + 1, None
        return self._take_in(np.flatnonzero(journal.shown))

    def _take_in_steps(self, moved: Moved) -> None:
        """Take in steps that were appended or dropped, each of which is an anchor."""
        first, count, starts = self._first, self._count, self._starts
        if isinstance(moved[0], np.ndarray):
            runs = self._run_of.take(moved[0])
            count[runs] += np.subtract(moved[2], moved[1])
            first[runs] += moved[1]
            self._count_again(runs)
            return
        low, last, others = self._low, self._high - 1, []
        for slot, dropped, added in zip(*moved, strict=True):
            run = self._run_of.item(slot)
            count[run] = counted = count.item(run) + added - dropped
            if dropped:
                first[run] = first.item(run) + dropped
            if run == last:
                starts[run + 1] = starts.item(run) + counted
            elif run == low:
                starts[run] = starts.item(run + 1) - counted
            else:
                others.append(run)
        if others:
            self._count_again(others)

    def _take_in(self, slots: IntArray) -> bool:
        """Take in changed slots; False: an episode has more than one run, or its stream cannot be followed."""
        journal = self._journal
        if not len(slots):
            return True
        of = journal.table.of
        changed = of(self._run_of, slots)
        changed = changed[changed >= self._low]
        self._count[changed] = 0
        new = journal.order[1, self._high : journal.tail]
        self._starts[self._high + 1 : journal.tail + 1] = self._starts[self._high]
        self._run_of[new] = np.arange(self._high, journal.tail)
        self._high = journal.tail
        is_shown, streams = of(journal.shown, slots), self._streams
        shown = slots[is_shown]
        if streams is None:
            shown_runs = self._selection.runs_of(0, self.storage, journal.table, shown)
        else:
            others = self._selection.follow(streams, self.storage, journal.table, slots[~is_shown], shown)
            if others is None:
                return False
            if len(others):
                shown = np.union1d(shown, others)
                self._touch(others)
            shown_runs = streams.runs(shown, self.stride)
        if shown_runs.last is not None or journal.has_inner_end(slots):
            return False
        runs_of_shown = of(self._run_of, shown)
        self._count[runs_of_shown], self._first[runs_of_shown] = 0, of(journal.table.start, shown)
        runs = runs_of_shown if shown_runs.slot is shown else of(self._run_of, shown_runs.slot)
        self._first[runs], self._count[runs] = shown_runs.first, shown_runs.count
        self._count_again(np.concatenate([changed, runs_of_shown]))
        return True

    def _touch(self, slots: IntArray) -> None:
        """Remember for `changed` slots whose anchors may have changed; where they are too many, any slot counts."""
        if self._touched is not None:
            self._touched.append(slots)
            if len(self._touched) * len(slots) > MOST_TOUCHED:
                self._touched = None

    def _count_again(self, runs: IntArray | list[int]) -> None:
        """Set `_starts` again, after `runs` got other counts: in each half of the list from there to the nearer end.

        So changes near one end leave the other end as it is: that is why `starts` may begin at any number.
        """
        low, high, starts = self._low, self._high, self._starts
        new, old = low, -1  # counted again are the runs from `new` on, and those up to `old`
        if len(runs) <= SHORT < high - low:
            runs = sorted(np.asarray(runs).tolist())
            newer = bisect_right(runs, (low + high - 1) // 2)
            new, old = runs[newer] if newer < len(runs) else high, runs[newer - 1] if newer else -1
        if new < high:
            after = starts[new + 1 : high + 1]
            np.add.accumulate(self._count[new:high], out=after)
            after += starts.item(new)
        if old >= low:
            starts[low : old + 1] = starts[old + 1] - self._count[low : old + 1][::-1].cumsum()[::-1]
        self._low = max(low, self._journal.head)  # the runs before `head` are of episodes that are gone
