"""The priorities of the anchors of a view in one folder: the tree on the disk, or a tree of their own.

Where every step is an anchor and has the priority of its leaf, batches are drawn from the tree on the disk. Else
`AnchorPriorities` keeps a tree in memory with a leaf for each (slot, t) that may be an anchor. The leaf of a step that
is none is 0: it cannot be drawn, and takes no memory. That tree follows the index and the priorities, slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from memmap_buffer.dtypes import FloatArray, all_of, any_of
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.journal import NO_SLOTS, Change, Journal
from memmap_buffer.format.records import INNER_END
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.selection import Selection
from memmap_buffer.priority.leaves import NO_EPISODES, Leaves, Packed, Row
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.priority.priorities import Priorities, in_turn, while_locked
from memmap_buffer.priority.sum_tree import MAX_PRIORITY, SumTree, with_zeros
from memmap_buffer.priority.tree_file import in_blocks, require_memory
from memmap_buffer.views.anchors import Runs

FirstAndCount: TypeAlias = tuple[IntArray, IntArray]  # of one run a slot: the first timestep, how many anchors
BLOCK = 1 << 20  # leaves that are looked at together
EVERY_STEP: IntArray = np.array([0, (1 << 32) - 1 << 32], np.uint64).view(np.int64)  # of no episode

T = TypeVar("T")
Cut: TypeAlias = Callable[[EpisodeTable, IntArray], Runs]  # the runs of anchors of some visible slots


class SlotAnchors:
    """The anchors that each slot of a folder has, followed change by change.

    Args:
        storage: the folder.
        selection: of the anchors.
        by_slot: whether they are found slot by slot; else an episode's anchors follow from others, too, and all are
            given.
        by_content: anchors of an episode whose generation is another are others.

    Attributes:
        pairs: (slots, 2) words, as those of `leaves.Place`: the serial + 1 of the episode that the anchors are of, 0
            for none; and that any step of it may be one.
        count: of all anchors.
        num_steps: visible timesteps, where anchors are cut.
        num_cleared: how often it began with new arrays.
        at: the journal to which they were followed, its mark and its version, None where these are not asked; None in
            the middle of it, and before `follow` is to tell of all.
        inner_end: whether one may be in an episode with a marked end before its last step.
    """

    def __init__(self, storage: Storage, selection: Selection, *, by_slot: bool, by_content: bool) -> None:
        self._storage, self._stride, self._by_content = storage, selection.view.stride, by_content
        self._cut: Cut | None = partial(selection.runs_of, 0, storage) if by_slot else None
        # Whether a step more or less of an episode that goes on is an anchor more or less.
        self._by_steps = self._stride == 1 and not by_content and selection.by_steps(storage.layout.schema)
        self.num_steps = 0
        self._runs_given: Runs | None = None
        self.inner_end = False
        self.count = self.num_cleared = 0
        self.at: tuple[Journal, int, int | None] | None = None

    def _clear(self) -> None:
        slots = self._storage.layout.slots
        self.pairs: IntArray = np.full((slots, 2), EVERY_STEP)
        self._serial = self.pairs[:, 0]  # + 1
        self._first, self._count, self._generation = np.zeros((3, slots), np.int64)  # where a slot has one plain run
        self._many: dict[int, Runs] = {}  # the others
        self.count = 0
        self.num_cleared += 1

    def follow(self, runs: Runs | None) -> tuple[Runs, Runs] | None:
        """Take in what changed; returns the anchors that went and those that came, None where nothing did."""
        storage, journal, at = self._storage, self._storage.journal, self.at
        if self._cut is not None and at is not None and journal.is_current(storage, at[1]):
            return None
        if at is None:
            self._clear()
        self.at = None
        if self._cut is None:
            assert runs is not None
            slots = np.arange(len(self._serial)) if at is None or runs is not self._runs_given else NO_SLOTS
            self._runs_given = runs
            changed = self._take(slots, runs, storage.table) if len(slots) else None
            self.at = journal, 0, None
            return changed
        with journal.lock:
            change = journal.follow(storage, 0 if at is None else at[1])
            changed = self._take_change(change, journal, self._cut)
            followed, self.num_steps = (journal, change.mark, journal.version), journal.num_steps
        self.at = followed
        return changed

    def _take_change(self, change: Change, journal: Journal, cut: Cut) -> tuple[Runs, Runs] | None:
        every = change.slots is None
        slots = np.arange(len(self._serial)) if change.slots is None else change.slots
        if change.others is None or len(change.others):
            self.inner_end = journal.has_inner_end(slots) or (self.inner_end and not every)
        if not len(slots):
            return None
        if not every and self._by_steps and not self._many:
            changed = self._take_steps(change, journal.table)
            if changed is not None:
                return changed
        return self._take(slots, cut(journal.table, slots[journal.shown.take(slots)]), journal.table)

    def serials_of(self, slots: IntArray) -> IntArray:
        """(B,) of the episodes in slots (B,), -1 for none."""
        return self._serial[slots] - 1

    def runs(self, slots: IntArray | None = None) -> Runs:
        """The runs of some slots, or of all."""
        chosen = np.flatnonzero(self._count) if slots is None else slots[self._count.take(slots) > 0]
        plain = Runs(chosen, self.serials_of(chosen), self._first[chosen], self._count[chosen])
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
        if len(change.others) or isinstance(moved[0], np.ndarray):  # type: ignore[arg-type]  # it names its slots
            return None
        gone, come = [], []
        for slot, fewer, more in zip(*moved, strict=True):
            serial, first, count = serials.item(slot), self._first.item(slot), self._count.item(slot)
            if self._serial.item(slot) != serial + 1:  # it had no anchor until now
                return None
            stop, begin = first + count, first + fewer
            gone.append((slot, serial, first, min(fewer, count)))
            come.append((slot, serial, max(stop, begin), stop + more - max(stop, begin)))
        for slot, fewer, more in zip(*moved, strict=True):
            self._first[slot], self._count[slot] = self._first[slot] + fewer, self._count[slot] + more - fewer
            self.count += more - fewer
        return _runs_of(gone), _runs_of(come)

    def _take(self, slots: IntArray, runs: Runs, table: EpisodeTable) -> tuple[Runs, Runs]:
        generation = table.generation.take(slots).view(np.int64)
        place = np.searchsorted(slots, runs.slot)
        number = np.bincount(place, minlength=len(slots))
        plain = number.take(place) == 1
        if runs.last is not None:
            plain &= runs.last >= runs.first + (runs.count - 1) * self._stride
        serial, first, count = np.full(len(slots), -1), np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
        serial[place], first[place[plain]], count[place[plain]] = runs.serial, runs.first[plain], runs.count[plain]
        was_first, was_count, was_serial = self._first[slots], self._count[slots], self.serials_of(slots)
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
        self._serial[slots], self._generation[slots] = serial + 1, generation
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


class AnchorPriorities:
    """The priorities of any anchors: those of the steps, as long as each step is one, else in a tree in memory.

    Args:
        storage: the folder.
        priorities: of its steps; None where batches are drawn by a meta field.
        how: the options of the draws.
        selection, by_slot: see `SlotAnchors`.

    Attributes:
        steps: `priorities`.
        like_steps: whether the leaf of an anchor, in a tree in memory, is that of its step.
        seen: how many changes of the steps are taken in.
    """

    def __init__(
        self,
        storage: Storage,
        priorities: Priorities | None,
        how: Prioritized,
        selection: Selection,
        *,
        by_slot: bool,
    ) -> None:
        view = selection.view
        self.storage, self.steps, self._how, self._view = storage, priorities, how, view
        self._reduce = how.reduce or ("mean" if view.per_episode else "first")
        self._before = int(getattr(view, "pad_before", 0))
        self._length = 0 if view.per_episode else int(getattr(view, "length", 1))
        self._anchors = SlotAnchors(storage, selection, by_slot=by_slot, by_content=how.weight_field is not None)
        self.like_steps = (
            priorities is not None
            and not (view.per_episode or self._before or view.repeats)
            and (self._reduce, how.variant) == ("first", "proportional")
        )
        self._own: SumTree | None = None
        self.times: Any = None  # of each leaf the timestep of its anchor, where several items have the same one
        self.unfinished = False
        self.seen = 0
        self._sorted: FloatArray | None = None
        self._unsorted = 0

    def _begin(self) -> None:
        """From now on they are in a tree in memory; to make it takes one look at every step."""
        layout = self.storage.layout
        self._leaves_needed = (layout.rows or layout.slots * layout.max_timesteps) + layout.slots * self._before
        require_memory(self.storage, self._leaves_needed, "the tree of items that are drawn by priority,")
        if self._view.repeats:
            self.times = np.zeros(self._leaves_needed, np.int32)
        if self.steps is not None:
            self.steps.keep_changes()
            self.seen = self.steps.num_changes
        self.unfinished = True
        self._own = self._new_tree()

    def _new_tree(self) -> SumTree:
        return SumTree.empty(self._leaves_needed, minima=self._how.normalize == "buffer")

    @property
    def tree(self) -> SumTree:
        """The sums; of the steps to be read while these are locked."""
        return self._own if self._own is not None else self.steps.tree  # type: ignore[union-attr]

    @property
    def stamp(self) -> int:
        return self.steps.stamp if self._own is None else -self._anchors.num_cleared  # type: ignore[union-attr]

    @property
    def shown_at(self) -> int | None:
        """The change counter at which all of them were shown, each in an episode without a marked end before its last
        step; None where that is not known. It holds as long as the steps are locked."""
        at = self._anchors.at
        of_leaves = at if self._own is not None else self.steps.at  # type: ignore[union-attr]
        if self._anchors.inner_end or at is None or of_leaves is None or at[2] != of_leaves[2]:
            return None
        return at[2]

    def row(self) -> Row:
        """Where the leaves lie; they are found, but not looked up by serials."""
        if self._own is None:
            return self.steps.row()  # type: ignore[union-attr]
        layout = self.storage.layout
        packed = None if layout.rows is None else Packed(self.storage, self._before)
        pairs, per_slot = self._anchors.pairs.reshape(-1), layout.max_timesteps + self._before
        serials, order = NO_EPISODES
        return Row(self._own, per_slot, self._before, pairs, serials, order, packed, self.times)

    @property
    def settled(self) -> bool:
        """Whether `follow`, but for what is left for later, has nothing to do unless the folder changes."""
        waits = self.unfinished or self._how.variant == "rank" or (self.behind and not self.like_steps)
        if self._own is not None and waits:
            return False
        return self.steps is None or self.steps.settled

    @property
    def behind(self) -> bool:
        """Whether steps have other priorities since these were taken in."""
        return self._own is not None and self.steps is not None and self.steps.num_changes != self.seen

    @property
    def count(self) -> int:
        return self._anchors.count if self._own is not None else self.steps.num_steps  # type: ignore[union-attr]

    def minimum(self) -> float:
        """The smallest priority of an anchor."""
        if self._own is not None:
            return self._own.minimum
        steps: Priorities = self.steps  # type: ignore[assignment]
        with steps.lock:
            steps.keep_minima()
            return steps.tree.minimum

    def mend(self) -> None:
        """Make sums of steps that are damaged anew, and those that follow from them."""
        assert self.steps is not None  # those of a meta field are in memory, and of numbers that were looked at
        self.steps.mend()
        if self._own is not None:
            self.catch_up()

    def follow(self, runs: Runs | None, every_step: bool, *, later: bool) -> None:
        """Take in the changes of this folder's anchors, and of the priorities.

        Args:
            runs: of all anchors, where they are not found slot by slot.
            every_step: each step is an anchor, where runs are given.
            later: leave the priorities of steps to `SeveralAnchors` where it can take them in.
        """
        anchors, steps = self._anchors, self.steps
        if steps is not None:
            steps.follow()
        if self._own is None:
            if runs is None and self.like_steps:
                if anchors.at != steps.at:  # type: ignore[union-attr]
                    anchors.follow(runs)
                every_step = anchors.count == anchors.num_steps
            if every_step and self.like_steps:
                return
            self._begin()
        if self.unfinished:  # it has just begun, or was interrupted in the middle of it
            anchors.at = None
            self._own = self._new_tree()
        self.unfinished = True
        changed = anchors.follow(runs)
        if changed is not None:
            self._enter(*changed)
        if self.behind and not (later and self.like_steps):
            self.catch_up()
        if self._how.variant == "rank":
            self._sort()
        self.unfinished = False

    # Where a leaf lies

    def _leaves(self, slots: IntArray, t: Any) -> IntArray:
        """The leaves of anchors; t counts from `-pad_before`."""
        return np.asarray(self.storage.first_row(slots, False) + (slots + 1) * self._before + t)

    def _each(self, runs: Runs) -> Iterator[tuple[IntArray, IntArray]]:
        """(slot, t) of the leaves of the anchors of runs, some 10⁶ at a time.

        These lie at their anchors; of several with the same anchor, as a run has them at its end, one behind another.
        """
        for place, number in in_blocks(runs.count, BLOCK):
            slot = runs.slot[place]
            t = runs.first[place] + number * self._view.stride
            if runs.last is not None:
                t = np.minimum(t, runs.last[place])
            if self.times is not None:
                last = runs.first + (runs.count - 1) * self._view.stride if runs.last is None else runs.last
                behind = np.maximum(number + (last - runs.first)[place] // -self._view.stride, 0)
                self.times[self._leaves(slot, t + behind)] = t
                t += behind
            yield slot, t

    # Following

    def _enter(self, gone: Runs, come: Runs) -> None:
        for slots, t in self._each(gone):
            self.tree.put(self._leaves(slots, t), np.zeros(len(slots)))
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
        whole = [np.arange(len(self._anchors.pairs))] if changes is None else []
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
        elif self._reduce != "first" or self._before or self.times is not None:
            reach = self._length - 1 if self._reduce != "first" else self._before
            after = self._length - 1 if self.times is not None else 0
            t = (t[:, None] + np.arange(-reach, 1 + after)).reshape(-1)
            slots = np.repeat(slots, reach + 1 + after)
            inside = t >= -self._before
            if self.times is not None and self.steps is not None:
                inside &= t < self.steps.file.steps_of(slots)[1]
            slots, t = slots[inside], t[inside]
        leaves = self._leaves(slots, t)
        values = self.tree.get(leaves)
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
        self.tree.put(self._leaves(slots, t), with_zeros(priorities))

    def _priority(self, slots: IntArray, t: IntArray) -> FloatArray:
        """The priorities of anchors (B,) by their leaves; 0 where another episode is in the slot by now."""
        if self.steps is None:
            return self._by_weight_field(slots)
        if self.times is not None:
            t = self.times[self._leaves(slots, t)].astype(np.int64)
        start = np.maximum(t, 0)
        if self._reduce == "first":
            values = self.steps.tree.get(self.steps.file.leaves_of(slots, start))
        else:
            length = self.steps.file.steps_of(slots)[1]
            stop = length if self._view.per_episode else np.minimum(t + self._length, length)
            values = self._reduced(slots, start, np.maximum(stop, start + 1))
        return np.where(self.steps.serials_of(slots) == self._anchors.serials_of(slots), values, 0.0)

    def _reduced(self, slots: IntArray, start: IntArray, stop: IntArray) -> FloatArray:
        """The maximum or mean over steps start … stop - 1."""
        assert self.steps is not None
        out, first, count = np.empty(len(slots)), self.steps.file.leaves_of(slots, start), stop - start
        means, tree = self._reduce == "mean", self.steps.tree
        cuts = np.flatnonzero(np.diff(np.cumsum(count) // BLOCK, prepend=0))
        for part in np.split(np.arange(len(slots)), cuts):
            if len(part):
                begins = np.cumsum(count[part]) - count[part]
                leaves = np.repeat(first[part] - begins, count[part]) + np.arange(int(count[part].sum()))
                values = tree.get(leaves)
                if means:  # of what lies above the first step: equal values have exactly that mean, and one rank
                    values -= np.repeat(values[begins], count[part])
                behind = self._behind_ends(slots[part], leaves, begins, count[part])
                if behind is not None:
                    values[behind] = 0.0
                    count[part] -= np.add.reduceat(behind, begins, dtype=np.int64)
                out[part] = (np.add if means else np.maximum).reduceat(values, begins)
        return out / count + tree.get(first) if means else out

    def _behind_ends(self, slots: IntArray, leaves: IntArray, begins: IntArray, count: IntArray) -> Any:
        """(K,) which steps lie behind an end within their item, so that it has them not; None where none does.

        Args:
            slots, begins, count: (B,) of each item: its slot, and which of the steps are its.
            leaves: (K,) of the steps.
        """
        storage = self.storage
        ends, table = self._view.ends(storage.layout.schema), storage.table
        inner = (table.flags.take(slots) & INNER_END != 0) | (not ends.marked)
        if self._view.per_episode or not (ends.names and ends.after) or not any_of(inner):
            return None
        chosen, is_end = np.flatnonzero(np.repeat(inner, count)), np.zeros(len(leaves), np.int64)
        slot = np.repeat(slots, count)[chosen]
        t = leaves[chosen] - storage.first_row(slot, False)
        for name in ends.names:
            rows = storage.first_row(slot, storage.layout.schema.fields[name].final) + t
            values = storage.read_rows(name, rows, slot, table.serial.take(slot))
            is_end[chosen] |= values.reshape(len(rows), -1).any(axis=1)
        before = np.cumsum(is_end) - is_end
        return before > np.repeat(before[begins], count)

    def _by_weight_field(self, slots: IntArray) -> FloatArray:
        name = self._how.weight_field or ""
        values = self.storage.maps.meta[name][slots].reshape(-1).astype(np.float64)
        highest = MAX_PRIORITY ** (1 / max(1.0, self._how.alpha))
        if not all_of(good := (values >= 0) & (values <= highest)):
            raise SchemaError(
                f"{self.storage.path}: meta field {name!r} is {values[~good][0]} in an episode, and a weight is a "
                f"number from 0 to {highest:.3g}; shift it, or store a field of weights"
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
            self.tree.put(self._leaves(slots, t), with_zeros(ranked))
            at = stop
        self._unsorted = 0

    def _by_own_rank(self, runs: Runs, priorities: FloatArray) -> FloatArray:
        """Priorities by ranks of which no two anchors of the runs share one: of equal ones the oldest has the best."""
        slots, t = (np.concatenate(columns) for columns in zip(*self._each(runs), strict=True))
        ranked = np.empty(len(priorities))
        order = np.lexsort((t, self._anchors.serials_of(slots), -priorities))
        ranked[order] = np.arange(1.0, len(priorities) + 1) ** -self._how.alpha
        return np.where(priorities > 0, ranked, 0.0)


class SeveralAnchors(Leaves):
    """The priorities of the anchors of one folder or of many, drawn from by one call."""

    def __init__(self, single: bool) -> None:
        super().__init__(single)
        self._locked: tuple[Sequence[AnchorPriorities], list[Priorities]] = (), []
        self._steps = Leaves(single)

    def over(self, each: Sequence[AnchorPriorities], work: Callable[[], T]) -> T:
        """Do something with the priorities in some folders, which were followed; meanwhile nobody stores to them."""
        if each is not self._locked[0]:
            steps = (priorities.steps for priorities in each if priorities.steps is not None)
            self._locked = each, in_turn(steps)
        return while_locked(self._locked[1], partial(self._over, each, work))

    def _over(self, each: Sequence[AnchorPriorities], work: Callable[[], T]) -> T:
        self.look(each)
        # What another thread stored since `follow`, of the priorities of others, is for their next one.
        behind = {i: priorities for i, priorities in enumerate(each) if priorities.behind and priorities.like_steps}
        if behind:
            self._catch_up(each, behind)
        return work()

    def _catch_up(self, each: Sequence[AnchorPriorities], behind: Mapping[int, AnchorPriorities]) -> None:
        """Have anchors, each of which has the priority of its step, take in those that are others, in all folders."""
        self._steps.look([priorities.steps for priorities in each])
        seen: list[tuple[AnchorPriorities, int]] = []
        changed: list[tuple[int, IntArray, Any]] = []
        for i, priorities in behind.items():
            changes, upto = priorities.changes()
            if changes is None or any(t is None for _, t in changes):  # of whole episodes
                priorities.catch_up()
                continue
            seen.append((priorities, upto))
            changed += [(i, slots, t) for slots, t in changes]
        if not seen:
            return
        for priorities, _ in seen:
            priorities.unfinished = True
        of, slots, t = zip(*changed, strict=True)
        self._put(np.repeat(of, [*map(len, slots)]), np.concatenate(slots), np.concatenate(t))
        for priorities, priorities.seen in seen:
            priorities.unfinished = False

    def _put(self, of: IntArray, slots: IntArray, t: IntArray) -> None:
        """Give the anchors (B,) that are served the priorities of their steps."""
        leaves = self.leaves(of, slots, t)
        before = self.tree.get(leaves, of)
        served = (before > 0) | np.signbit(before)
        if not all_of(served):
            of, slots, leaves = of[served], slots[served], leaves[served]
        if len(of):
            words = 2 * slots
            same = self._memory.take(self.place(of).pairs + words) == self._memory.take(
                self._steps.place(of).pairs + words
            )
            values = self._steps.tree.get(leaves, of)
            self.tree.put(leaves, with_zeros(np.where(same, values, 0.0)), of)
