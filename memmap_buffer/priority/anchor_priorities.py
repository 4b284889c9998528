"""The priorities of the anchors of a view in one folder: the tree on the disk, or a tree of their own.

Where every step is an anchor and has the priority of its leaf, batches are drawn from the tree on the disk
(`StepPriorities`). Else `AnchorPriorities` keeps a tree in memory with a leaf for each (slot, t) that may be an anchor.
The leaf of a step that is none is 0: it cannot be drawn, and takes no memory. That tree follows the index and the
priorities, slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from memmap_buffer.dtypes import FloatArray, all_of
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.journal import FEW, NO_SLOTS, Change, Journal
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import address_of, memory
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.priority.priorities import Places, Priorities, Row, in_turn, while_locked
from memmap_buffer.priority.sum_tree import WIDTH, SumTree, SumTrees, with_zeros
from memmap_buffer.priority.tree_file import require_memory, steps_in
from memmap_buffer.views.anchors import Runs
from memmap_buffer.views.view import View

FirstAndCount: TypeAlias = tuple[IntArray, IntArray]  # of one run a slot: the first timestep, how many anchors
BLOCK = 1 << 20  # leaves that are looked at together
EVERY_STEP: IntArray = np.array([0, (1 << 32) - 1 << 32], np.uint64).view(np.int64)  # a pair that shows any


Drawn: TypeAlias = tuple[IntArray, IntArray, IntArray, FloatArray]  # (B,) slots, serials, t, priorities


T = TypeVar("T")
Cut: TypeAlias = Callable[[EpisodeTable, IntArray], Runs]  # the runs of anchors of some visible slots


class SlotAnchors:
    """The anchors that each slot of a folder has, followed change by change.

    Args:
        storage: the folder.
        stride: of its runs.
        cut: gives the runs of slots; None where an episode's anchors follow from others, too, and all are given.
        by_steps: a step more or less of an episode that goes on is an anchor more or less, see `Selection`.
        by_content: anchors of an episode whose generation is another are others.

    Attributes:
        serial: (slots,) of the episode that the anchors are of, -1 for none.
        count: of all anchors.
        num_steps: visible timesteps, where anchors are cut.
        num_cleared: how often `clear` made new arrays.
    """

    def __init__(
        self, storage: Storage, stride: int, cut: Cut | None, *, by_steps: bool = False, by_content: bool = False
    ) -> None:
        self._storage, self._stride, self._cut, self._by_content = storage, stride, cut, by_content
        self._by_steps = by_steps and stride == 1 and not by_content
        self._mark = 0  # of the journal
        self._version: int | None = None  # likewise
        self.num_steps = 0
        self._runs_given: Runs | None = None
        self._inner_end = False
        self.num_cleared = 0
        self.clear()

    def clear(self) -> None:
        """Begin anew without any; the next `follow` tells of all."""
        slots = self._storage.layout.slots
        self.serial = np.full(slots, -1)
        self._first, self._count, self._generation = np.zeros((3, slots), np.int64)  # where a slot has one plain run
        self._many: dict[int, Runs] = {}  # the others
        self.count = 0
        self._unfinished = True
        self.num_cleared += 1

    @property
    def shown_at(self) -> int | None:
        """The change counter at which all anchors were shown, each in an episode without a marked end before its last
        step; None where that is not known."""
        return None if self._cut is None or self._inner_end or self._unfinished else self._version

    def follow(self, runs: Runs | None) -> tuple[Runs, Runs] | None:
        """Take in what changed; returns the anchors that went and those that came, None where nothing did."""
        followed = self._cut is not None and not self._unfinished
        if followed and self._storage.journal.is_current(self._storage, self._mark):
            return None
        if self._unfinished:
            self.clear()
        every, self._unfinished = self._unfinished, True
        if self._cut is None:
            assert runs is not None
            slots = np.arange(len(self.serial)) if every or runs is not self._runs_given else NO_SLOTS
            self._runs_given = runs
            changed = self._take_in(slots, runs, self._storage.table) if len(slots) else None
        else:
            journal = self._storage.journal
            with journal.lock:
                change = journal.follow(self._storage, self._mark)
                every |= change.slots is None
                changed = self._take_change(change, journal, self._cut, every=every)
                self._mark, self._version, self.num_steps = change.mark, journal.version, journal.num_steps
        self._unfinished = False
        return changed

    def _take_change(self, change: Change, journal: Journal, cut: Cut, *, every: bool) -> tuple[Runs, Runs] | None:
        slots = np.arange(len(self.serial)) if every or change.slots is None else change.slots
        if every or change.moved is None:
            self._inner_end = journal.has_inner_end(slots) or (self._inner_end and not every)
        if not len(slots):
            return None
        if not every and self._by_steps and not self._many:
            changed = self._take_steps(change, journal.table)
            if changed is not None:
                return changed
        return self._take_in(slots, cut(journal.table, slots[journal.shown.take(slots)]), journal.table)

    def _take_in(self, slots: IntArray, runs: Runs, table: EpisodeTable) -> tuple[Runs, Runs]:
        changed = self._take_few(slots, runs) if len(slots) <= FEW else None
        return self._take(slots, runs, table.generation.take(slots).view(np.int64)) if changed is None else changed

    def runs(self, slots: IntArray | None = None) -> Runs:
        """The runs of some slots, or of all."""
        chosen = np.flatnonzero(self._count) if slots is None else slots[self._count.take(slots) > 0]
        plain = Runs(chosen, self.serial[chosen], self._first[chosen], self._count[chosen])
        return self._with_many(plain, list(self._many) if slots is None else slots.tolist())

    def _with_many(self, plain: Runs, slots: list[int]) -> Runs:
        parts = [self._many[slot] for slot in slots if slot in self._many] if self._many else []
        if any(part.last is not None for part in parts):
            parts = [
                part.replaced(last=part.first + (part.count - 1) * self._stride) if part.last is None else part
                for part in parts
            ]
            plain = plain.replaced(last=plain.first + (plain.count - 1) * self._stride)
        return Runs.joined([plain, *parts])

    def _take_steps(self, change: Change, table: EpisodeTable) -> tuple[Runs, Runs] | None:
        """Take in steps that came or left, each of which is an anchor; None where more may have changed."""
        moved, serials = change.moved, table.serial
        if moved is None or isinstance(moved[0], np.ndarray):
            return None
        gone, come = [], []
        for slot, fewer, more in zip(*moved, strict=True):
            serial, first, count = serials.item(slot), self._first.item(slot), self._count.item(slot)
            if self.serial.item(slot) != serial:  # it had no anchor until now
                return None
            stop, begin = first + count, first + fewer
            gone.append((slot, serial, first, min(fewer, count)))
            come.append((slot, serial, max(stop, begin), stop + more - max(stop, begin)))
        for slot, fewer, more in zip(*moved, strict=True):
            self._first[slot], self._count[slot] = self._first[slot] + fewer, self._count[slot] + more - fewer
            self.count += more - fewer
        return _runs_of(gone), _runs_of(come)

    def _take_few(self, slots: IntArray, runs: Runs) -> tuple[Runs, Runs] | None:
        """`_take` of slots whose only run became longer or shorter, by numbers; None where that is not all."""
        if runs.last is not None or self._by_content or self._many or len(runs.slot) != len(slots):
            return None
        gone, come, stride = [], [], self._stride
        rows = np.stack([runs.slot, runs.serial, runs.first, runs.count], axis=1).tolist()
        if sorted(row[0] for row in rows) != slots.tolist():
            return None
        for slot, serial, first, count in rows:
            was, had = self._first.item(slot), self._count.item(slot)
            skipped, rest = divmod(first - was, stride)
            if self.serial.item(slot) != serial or rest or not 0 <= skipped <= had <= skipped + count:
                return None
            gone.append((slot, serial, was, skipped))
            come.append((slot, serial, was + had * stride, skipped + count - had))
        for slot, _, first, count in rows:
            self.count += count - self._count.item(slot)
            self._first[slot], self._count[slot] = first, count
        return _runs_of(gone), _runs_of(come)

    def _take(self, slots: IntArray, runs: Runs, generation: IntArray) -> tuple[Runs, Runs]:
        place = np.searchsorted(slots, runs.slot)
        number = np.bincount(place, minlength=len(slots))
        plain = number.take(place) == 1
        if runs.last is not None:
            plain &= runs.last >= runs.first + (runs.count - 1) * self._stride
        serial, first, count = np.full(len(slots), -1), np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
        serial[place], first[place[plain]], count[place[plain]] = runs.serial, runs.first[plain], runs.count[plain]
        was_first, was_count, was_serial = self._first[slots], self._count[slots], self.serial[slots]
        stride = self._stride
        alike = (serial == was_serial) & (count > 0) & (was_count > 0) & ((first - was_first) % stride == 0)
        if self._by_content:
            alike &= generation == self._generation[slots]
        gone_many = [slot for slot in slots.tolist() if slot in self._many] if self._many else []
        others = runs.where(np.flatnonzero(~plain))
        now, before = (first, count), (was_first, was_count)
        gone = _without(slots, was_serial, before, now, alike, stride)
        come = _without(slots, serial, now, before, alike, stride)
        gone = self._with_many(gone, gone_many)
        self.count += int(come.count.sum()) + int(others.count.sum()) - int(gone.count.sum())
        for slot in gone_many:
            del self._many[slot]
        for slot in np.unique(others.slot).tolist():
            self._many[slot] = others.where(np.flatnonzero(others.slot == slot))
        self.serial[slots], self._generation[slots] = serial, generation
        self._first[slots], self._count[slots] = first, count
        return gone, self._with_many(come, np.unique(others.slot).tolist())


def _runs_of(rows: list[tuple[int, int, int, int]]) -> Runs:
    """Runs by their slots, serials, first timesteps and counts."""
    return Runs(*np.array([row for row in rows if row[-1]] or np.empty((0, 4)), np.int64).T)


def _without(
    slots: IntArray, serial: IntArray, own: FirstAndCount, other: FirstAndCount, alike: Any, stride: int
) -> Runs:
    """The anchors of own runs that the other ones do not have, where these are `alike`; else all of them."""
    (first, count), (other_first, other_count) = own, other
    before = np.where(alike, np.clip((other_first - first) // stride, 0, count), count)
    kept = np.where(alike, np.clip((other_first - first) // stride + other_count, before, count), count)
    columns = [[slots, slots], [serial, serial], [first, first + kept * stride], [before, count - kept]]
    slot, serial, first, count = (np.concatenate(pair) for pair in columns)
    some = np.flatnonzero(count)
    return Runs(slot[some], serial[some], first[some], count[some])


class StepPriorities:
    """The priorities where every step is an anchor: the leaves of the tree on the disk.

    Args:
        priorities: of the steps.
        anchors: which there are; None where they are known to be all steps.

    Attributes:
        steps: `priorities`.
        behind: see `AnchorPriorities`.
    """

    behind = False

    def __init__(self, priorities: Priorities, anchors: SlotAnchors | None = None) -> None:
        self.steps, self._anchors = priorities, anchors
        self.find = priorities.find  # the anchors at values of the cumulative sum

    def follow(self, runs: Runs | None) -> bool:
        """See the episodes that exist; returns whether every step is an anchor still."""
        self.steps.follow()
        if self._anchors is None:
            return True
        self._anchors.follow(runs)
        return self._anchors.count == self._anchors.num_steps

    @property
    def stamp(self) -> int:
        return self.steps.stamp

    def row(self) -> Row | None:
        """For `SeveralAnchors`: the leaves of a slot, how many lie before step 0, the number of slots; where the
        serials lie, how far from slot to slot, and what is added to them; where the pairs lie, and how far."""
        if not self.steps.plain:
            return None
        words = self.steps.pair_words
        at = address_of(words) >> 3
        return self.steps.tree, (self.steps.storage.layout.max_timesteps, 0, len(words) // 2, at, 2, 1, at, 2), (words,)

    @property
    def settled(self) -> bool:
        """Whether `follow` has nothing to do unless the folder changes."""
        return self.steps.settled

    @property
    def count(self) -> int:
        return self.steps.num_steps

    @property
    def shown_at(self) -> int | None:
        """See `SlotAnchors`; of the leaves as they are now, so it holds as long as `steps` are locked."""
        at = None if self._anchors is None else self._anchors.shown_at
        return at if at == self.steps.followed_to else None

    @property
    def total(self) -> float:
        with self.steps.lock:  # others update them
            return self.steps.tree.total

    def minimum(self) -> float:
        """The smallest priority of an anchor."""
        with self.steps.lock:
            self.steps.keep_minima()
            return self.steps.tree.minimum


class AnchorPriorities:
    """The priorities of any anchors, in a tree in memory.

    Args:
        storage: the folder.
        priorities: of its steps; None where batches are drawn by a meta field.
        how: the options of the draws.
        view: the view whose anchors these are.
        cut, by_steps: see `SlotAnchors`.

    Attributes:
        steps: `priorities`.
        like_steps: whether the leaf of an anchor is that of its step.
        seen: up to which change of the steps these are taken in.
    """

    def __init__(
        self,
        storage: Storage,
        priorities: Priorities | None,
        how: Prioritized,
        view: View,
        cut: Cut | None = None,
        *,
        by_steps: bool = False,
    ) -> None:
        self._storage, self.steps, self._how, self._view = storage, priorities, how, view
        self._reduce = how.reduce or ("mean" if view.per_episode else "first")
        self._before = int(getattr(view, "pad_before", 0))
        self._length = 0 if view.per_episode else int(getattr(view, "length", 1))
        by_content = how.weight_field is not None
        self._anchors = SlotAnchors(storage, view.stride, cut, by_steps=by_steps, by_content=by_content)
        layout = storage.layout
        self.like_steps = (
            priorities is not None
            and not (view.per_episode or self._before or view.repeats)
            and (self._reduce, how.variant) == ("first", "proportional")
        )
        self._leaves_needed = (layout.rows or layout.slots * layout.max_timesteps) + layout.slots * self._before
        require_memory(storage, self._leaves_needed, "the tree of items that are drawn by priority,")
        self._tree = self._new_tree()
        # Of each leaf the timestep of its anchor, where several items have the same one, and each has a leaf.
        self._t = np.zeros(self._leaves_needed, np.int32) if view.repeats else None
        self.unfinished = False
        self.seen = 0
        if priorities is not None:
            priorities.keep_changes()
            self.seen = priorities.num_changes
        self._sorted: FloatArray | None = None
        self._unsorted = 0

    def _new_tree(self) -> SumTree:
        return SumTree.empty(self._leaves_needed, minima=self._how.normalize == "buffer")

    @property
    def stamp(self) -> int:
        return self._anchors.num_cleared

    @property
    def shown_at(self) -> int | None:
        """See `SlotAnchors`."""
        return self._anchors.shown_at

    def row(self) -> Row | None:
        """As that of `StepPriorities`; the pairs are one that shows any step."""
        layout, serials = self._storage.layout, self._anchors.serial
        if layout.rows is not None or self._tree.leaves < WIDTH or self._tree.minima or self._t is not None:
            return None
        at = address_of(serials) >> 3, 1, 0, address_of(EVERY_STEP) >> 3, 0
        return self._tree, (layout.max_timesteps + self._before, self._before, len(serials), *at), (serials,)

    @property
    def settled(self) -> bool:
        """Whether `follow`, but for what is left for later, has nothing to do unless the folder changes."""
        if self.unfinished or self._how.variant == "rank" or (self.behind and not self.like_steps):
            return False
        return self.steps is None or self.steps.settled

    @property
    def behind(self) -> bool:
        """Whether steps have other priorities since these were taken in."""
        return self.steps is not None and self.steps.num_changes != self.seen

    @property
    def count(self) -> int:
        return self._anchors.count

    @property
    def total(self) -> float:
        return self._tree.total

    def minimum(self) -> float:
        """The smallest priority of an anchor."""
        return self._tree.minimum

    def find(self, values: FloatArray) -> Drawn:
        """The anchors at values of the cumulative sum."""
        leaves, priorities = self._tree.find(values)
        slots = self._slots_of(leaves)
        return slots, self._anchors.serial[slots], self._anchor(leaves, leaves - self._leaves(slots, 0)), priorities

    def follow(self, runs: Runs | None, *, later: bool = False) -> bool:
        """Take in the changes of this folder's anchors, and of the priorities; returns True.

        Args:
            runs: of all anchors, where they are not found slot by slot.
            later: leave the priorities of steps to `SeveralAnchors` where it can take them in.
        """
        if self.unfinished:  # it was interrupted in the middle of it
            self._anchors.clear()
            self._tree = self._new_tree()
            self.unfinished = False
        if self.steps is not None:
            self.steps.follow()
        self.unfinished = True
        changed = self._anchors.follow(runs)
        if changed is not None:
            self._enter(*changed)
        if self.behind and not (later and self.like_steps):
            self.catch_up()
        if self._how.variant == "rank":
            self._sort()
        self.unfinished = False
        return True

    # Where a leaf lies

    def _leaves(self, slots: IntArray, t: Any) -> IntArray:
        """The leaves of anchors; t counts from `-pad_before`."""
        return np.asarray(self._storage.first_row(slots, False) + (slots + 1) * self._before + t)

    def _slots_of(self, leaves: IntArray) -> IntArray:
        layout = self._storage.layout
        if layout.rows is None:
            return np.asarray(leaves // (layout.max_timesteps + self._before))
        slots = np.flatnonzero(self._anchors.serial >= 0)
        first = self._leaves(slots, -self._before)
        order = np.argsort(first, kind="stable")
        return np.asarray(slots[order][np.searchsorted(first[order], leaves, side="right") - 1])

    def _anchor(self, leaves: IntArray, t: IntArray) -> IntArray:
        """The timesteps of the anchors of leaves that lie at t."""
        return t if self._t is None else self._t[leaves].astype(np.int64)

    def _each(self, runs: Runs) -> Iterator[tuple[IntArray, IntArray]]:
        """(slot, t) of the leaves of the anchors of runs, some 10⁶ at a time.

        These lie at their anchors; of several with the same anchor, as a run has them at its end, one behind another.
        """
        if len(runs.slot) <= FEW and runs.last is None and self._t is None:
            rows = list(zip(runs.slot.tolist(), runs.first.tolist(), runs.count.tolist(), strict=True))
            if sum(count for *_, count in rows) <= FEW:  # by plain numbers, in a fifth of the time
                each = [(slot, first + i * self._view.stride) for slot, first, count in rows for i in range(count)]
                if each:
                    columns = np.array(each).T
                    yield columns[0], columns[1]
                return
        ends = np.cumsum(runs.count)
        for at in range(0, int(ends[-1]) if len(ends) else 0, BLOCK):
            i = np.arange(at, min(at + BLOCK, int(ends[-1])))
            place = np.searchsorted(ends, i, side="right")
            number, slot = i - ends[place] + runs.count[place], runs.slot[place]
            t = runs.first[place] + number * self._view.stride
            if runs.last is not None:
                t = np.minimum(t, runs.last[place])
            if self._t is not None:
                last = runs.first + (runs.count - 1) * self._view.stride if runs.last is None else runs.last
                behind = np.maximum(number + (last - runs.first)[place] // -self._view.stride, 0)
                self._t[self._leaves(slot, t + behind)] = t
                t += behind
            yield slot, t

    # Following

    def _enter(self, gone: Runs, come: Runs) -> None:
        for slots, t in self._each(gone):
            self._tree.put(self._leaves(slots, t), np.zeros(len(slots)))
            self._unsorted += len(slots)
        for slots, t in self._each(come):
            self._put(slots, t)

    def changes(self) -> tuple[list[tuple[IntArray, IntArray | None]] | None, int]:
        """(the changes of steps that are to be taken in, None where they are not known any more; up to which)."""
        assert self.steps is not None
        with self.steps.lock:  # others update them
            seen, changes = self.steps.num_changes, self.steps.changes
            behind = seen - self.seen
            return None if behind > len(changes) else [changes[i] for i in range(-behind, 0)], seen

    def catch_up(self) -> None:
        """Take in other priorities of steps."""
        changes, seen = self.changes()
        whole = [np.arange(len(self._anchors.serial))] if changes is None else []
        for slots, t in changes or ():
            if t is None:
                whole.append(slots)
            else:
                self._update(slots, t)
        if whole:
            for slots, t in self._each(self._anchors.runs(np.unique(np.concatenate(whole)))):
                self._put(slots, t)
        self.seen = seen

    def _update(self, slots: IntArray, t: IntArray) -> None:
        """Give the anchors that some steps belong to their priorities again."""
        if self._view.per_episode:
            slots = np.unique(slots)
            t = np.zeros_like(slots)
        elif self._reduce != "first" or self._before or self._t is not None:
            reach = self._length - 1 if self._reduce != "first" else self._before
            after = self._length - 1 if self._t is not None else 0
            t = (t[:, None] + np.arange(-reach, 1 + after)).reshape(-1)
            slots = np.repeat(slots, reach + 1 + after)
            inside = t >= -self._before
            if self._t is not None and self.steps is not None:
                inside &= t < self.steps.steps_of(slots)[1]
            slots, t = slots[inside], t[inside]
        leaves = self._leaves(slots, t)
        values = self._tree.get(leaves)
        served = (values > 0) | np.signbit(values)
        if not all_of(served):
            slots, t = slots[served], t[served]
        if len(slots):
            self._put(slots, t)

    # What the leaves hold

    def _put(self, slots: IntArray, t: IntArray) -> None:
        priorities = self._priority(slots, t)
        if self._how.variant == "rank":
            self._unsorted += len(slots)
            priorities = self._by_rank(priorities)
        self._tree.put(self._leaves(slots, t), with_zeros(priorities))

    def _priority(self, slots: IntArray, t: IntArray) -> FloatArray:
        """The priorities of anchors (B,) by their leaves; 0 where another episode is in the slot by now."""
        if self.steps is None:
            return self._by_weight_field(slots)
        if self._t is not None:
            t = self._anchor(self._leaves(slots, t), t)
        start = np.maximum(t, 0)
        if self._reduce == "first":
            values = self.steps.tree.get(self.steps.leaves(slots, start))
        else:
            length = self.steps.steps_of(slots)[1]
            stop = length if self._view.per_episode else np.minimum(t + self._length, length)
            values = self._reduced(slots, start, np.maximum(stop, start + 1))
        return np.where(self.steps.serials_of(slots) == self._anchors.serial[slots], values, 0.0)

    def _reduced(self, slots: IntArray, start: IntArray, stop: IntArray) -> FloatArray:
        """The maximum or mean over steps start … stop - 1."""
        assert self.steps is not None
        out, first, count = np.empty(len(slots)), self.steps.leaves(slots, start), stop - start
        cuts = np.flatnonzero(np.diff(np.cumsum(count) // BLOCK, prepend=0))
        for part in np.split(np.arange(len(slots)), cuts):
            if len(part):
                begins = np.cumsum(count[part]) - count[part]
                leaves = np.repeat(first[part] - begins, count[part]) + np.arange(int(count[part].sum()))
                values = self.steps.tree.get(leaves)
                reduce = np.maximum.reduceat if self._reduce == "max" else np.add.reduceat
                out[part] = reduce(values, begins)
        return out if self._reduce == "max" else out / count

    def _by_weight_field(self, slots: IntArray) -> FloatArray:
        name = self._how.weight_field or ""
        values = self._storage.maps.meta[name][slots].reshape(-1).astype(np.float64)
        if not (values >= 0).all() or not np.isfinite(values).all():
            bad = values[~((values >= 0) & np.isfinite(values))][0]
            raise SchemaError(
                f"{self._storage.path}: meta field {name!r} is {bad} in an episode, and a weight is a finite number "
                "from 0; shift it, or store a field of weights"
            )
        return np.asarray(np.where(values > 0, values**self._how.alpha, 0.0))

    # Ranks

    def _by_rank(self, priorities: FloatArray) -> FloatArray:
        if self._sorted is None:
            return np.asarray(priorities > 0, np.float64)  # until they are sorted, which follows
        above = len(self._sorted) - np.searchsorted(self._sorted, priorities, side="right")
        return np.where(priorities > 0, (1.0 + above) ** -self._how.alpha, 0.0)

    def _sort(self) -> None:
        """Where enough has changed, sort the order in which ranks are found, and put all priorities by it."""
        if self._sorted is not None and self._unsorted < (self._how.sort_interval or max(self.count, 1)):
            return
        runs = self._anchors.runs()
        parts = [self._priority(slots, t) for slots, t in self._each(runs)]
        values = np.concatenate(parts) if parts else np.zeros(0)
        self._sorted = np.sort(values)
        at, own = 0, self._by_own_rank(runs, values) if self._how.ties == "own" and parts else None
        for (slots, t), priorities in zip(self._each(runs), parts, strict=True):
            stop = at + len(slots)
            ranked = self._by_rank(priorities) if own is None else own[at:stop]
            self._tree.put(self._leaves(slots, t), with_zeros(ranked))
            at = stop
        self._unsorted = 0

    def _by_own_rank(self, runs: Runs, priorities: FloatArray) -> FloatArray:
        """Priorities by ranks of which no two anchors of the runs share one: of equal ones the oldest has the best."""
        slots, t = (np.concatenate(columns) for columns in zip(*self._each(runs), strict=True))
        ranked = np.empty(len(priorities))
        order = np.lexsort((t, self._anchors.serial[slots], -priorities))
        ranked[order] = np.arange(1.0, len(priorities) + 1) ** -self._how.alpha
        return np.where(priorities > 0, ranked, 0.0)


AnyPriorities: TypeAlias = StepPriorities | AnchorPriorities


class SeveralAnchors:
    """The priorities of the anchors of several folders, drawn from by one call: a call for each outweighs a batch."""

    def __init__(self) -> None:
        self._each: Sequence[AnyPriorities] = ()
        self._stored: list[Priorities] = []
        self._places, self._steps = Places(), Places()
        self._memory = memory().view(np.int64)

    def over(self, each: Sequence[AnyPriorities], work: Callable[[], T]) -> T:
        """Do something with the priorities in some folders, which were followed; meanwhile nobody stores to them."""
        if each is not self._each:
            self._each, self._stored = (
                each,
                in_turn(priorities.steps for priorities in each if priorities.steps is not None),
            )
        return while_locked(self._stored, partial(self._over, work))

    def _over(self, work: Callable[[], T]) -> T:
        self._places.follow(self._each)
        # What another thread stored since `follow`, of the priorities of others, is for their next one.
        behind = {
            i: priorities
            for i, priorities in enumerate(self._each)
            if isinstance(priorities, AnchorPriorities) and priorities.like_steps and priorities.behind
        }
        if behind:
            self._catch_up(behind)
        self._trees = None if (self._places.index < 0).any() else self._places.trees
        return work()

    def totals(self) -> FloatArray:
        """(F,) the sum of each folder."""
        return (
            np.array([priorities.total for priorities in self._each]) if self._trees is None else self._trees.totals()
        )

    def find(self, of: IntArray, values: FloatArray) -> Drawn:
        """The anchors in the folders `of` (B,) at values (B,) of their cumulative sums."""
        drawn = None if self._trees is None else self._at(self._trees, of, values)
        return _found_in_each(self._each, of, values) if drawn is None else drawn

    def _catch_up(self, behind: Mapping[int, AnchorPriorities]) -> None:
        """Have anchors, each of which has the priority of its step, take in those that are others, in all folders."""
        self._steps.follow([priorities.steps for priorities in self._each])
        of: list[int] = []
        slots: list[IntArray] = []
        t: list[IntArray] = []
        seen: dict[int, int] = {}
        for i, priorities in behind.items():
            changes, upto = priorities.changes()
            if min(self._places.index[i], self._steps.index[i]) < 0 or changes is None:
                changes = [(NO_SLOTS, None)]
            steps = [(some, at) for some, at in changes if at is not None]
            if len(steps) < len(changes):  # of whole episodes, or not plain
                priorities.catch_up()
                continue
            seen[i] = upto
            for some, at in steps:
                of.append(i)
                slots.append(some)
                t.append(at)
        if seen:
            for i in seen:
                behind[i].unfinished = True
            self._put(np.repeat(of, [len(some) for some in slots]), np.concatenate(slots), np.concatenate(t))
            for i, upto in seen.items():
                behind[i].seen = upto
                behind[i].unfinished = False

    def _put(self, of: IntArray, slots: IntArray, t: IntArray) -> None:
        """Give the anchors (B,) that are served the priorities of their steps."""
        trees, steps = self._places.trees, self._steps.trees
        assert trees is not None and steps is not None
        leaves, tree = slots * self._places.rows[:, 0].take(of) + t, self._places.index.take(of)
        before = trees.get(tree, leaves)
        served = (before > 0) | np.signbit(before)
        if not all_of(served):
            of, slots, leaves, tree = of[served], slots[served], leaves[served], tree[served]
        if len(of):
            serials = self._memory.take(self._places.rows[:, 3].take(of) + slots)
            same = self._memory.take(self._steps.rows[:, 0].take(of) + 2 * slots) == serials + 1
            values = steps.get(self._steps.index.take(of), leaves)
            trees.put(tree, leaves, with_zeros(np.where(same, values, 0.0)))

    def _at(self, trees: SumTrees, of: IntArray, values: FloatArray) -> Drawn | None:
        """None where a value leads to a leaf that is no step, as the sums of a tree are damaged."""
        per_slot, before, number, serials, unit, added, pairs, size = self._places.rows.take(of, axis=0).T
        leaves, priorities = trees.find(of, values)
        slots = leaves // per_slot
        if not all_of(slots < number):
            return None
        t = leaves - slots * per_slot - before
        start, stop = steps_in(self._memory.take(pairs + size * slots + 1))
        if not all_of((priorities > 0) & (np.maximum(t, 0) >= start) & (t < stop)):
            return None
        return slots, self._memory.take(serials + unit * slots) - added, t, priorities


def _found_in_each(each: Sequence[AnyPriorities], of: IntArray, values: FloatArray) -> Drawn:
    """The anchors at values of the cumulative sums, folder by folder."""
    order = np.argsort(of, kind="stable")
    chosen = np.flatnonzero(np.bincount(of))
    parts = np.split(values[order], np.searchsorted(of[order], chosen[1:]))
    drawn = [each[s].find(part) for s, part in zip(chosen.tolist(), parts, strict=True)]
    slot, serial, t, priority = (_placed(columns, order) for columns in zip(*drawn, strict=True))
    return slot, serial, t, priority


def _placed(columns: Sequence[Any], order: IntArray) -> Any:
    """Columns that were drawn folder by folder, in the order of the batch."""
    joined = np.concatenate(columns)
    out = np.empty_like(joined)
    out[order] = joined
    return out
