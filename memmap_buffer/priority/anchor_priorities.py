"""The priorities of the anchors of a view in one folder: the tree on the disk, or a tree of their own.

Where every step is an anchor and has the priority of its leaf, batches are drawn from the tree on the disk
(`StepPriorities`). Else `AnchorPriorities` keeps a tree in memory with a leaf for each (slot, t) that may be an anchor.
The leaf of a step that is none is 0: it cannot be drawn, and takes no memory. That tree follows the index and the
priorities, slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from memmap_buffer.dtypes import FloatArray, all_of
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.visible_episodes import FEW, NO_SLOTS, VisibleEpisodes
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.priority.priorities import Priorities
from memmap_buffer.priority.sum_tree import SumTree, with_zeros
from memmap_buffer.priority.tree_file import require_memory
from memmap_buffer.views.anchors import Runs
from memmap_buffer.views.view import View

FirstAndCount: TypeAlias = tuple[IntArray, IntArray]  # of one run a slot: the first timestep, how many anchors
BLOCK = 1 << 20  # leaves that are looked at together


Drawn: TypeAlias = tuple[IntArray, IntArray, IntArray, FloatArray]  # (B,) slots, serials, t, priorities


Cut: TypeAlias = Callable[[EpisodeTable, IntArray], Runs]  # the runs of anchors of some visible slots


class SlotAnchors:
    """Which anchors each slot of a folder has, followed change by change.

    Args:
        storage: the folder.
        stride: of its runs.
        cut: gives the runs of slots; None where an episode's anchors follow from others, too, and all are given.
        by_steps: a step more or less of an episode that goes on is an anchor more or less, see `Selection`.
        by_content: anchors of an episode whose generation is another are others.

    Attributes:
        serial: (slots,) of the episode that the anchors are of, -1 for none.
        count: of all anchors.
    """

    def __init__(
        self, storage: Storage, stride: int, cut: Cut | None, *, by_steps: bool = False, by_content: bool = False
    ) -> None:
        self._storage, self._stride, self._cut, self._by_content = storage, stride, cut, by_content
        self._by_steps = by_steps and stride == 1 and not by_content
        self._episodes = VisibleEpisodes()
        self._given: Runs | None = None
        self.clear()

    def clear(self) -> None:
        """Begin anew without any; the next `follow` tells of all."""
        slots = self._storage.layout.slots
        self.serial = np.full(slots, -1)
        self._first, self._count, self._generation = np.zeros((3, slots), np.int64)  # where a slot has one plain run
        self._many: dict[int, Runs] = {}  # the others
        self.count = 0
        self._unfinished = True

    @property
    def num_steps(self) -> int:
        """Visible timesteps, where anchors are cut."""
        return self._episodes.num_steps

    def follow(self, given: Runs | None) -> tuple[Runs, Runs] | None:
        """Take in what changed; returns the anchors that went and those that came, None where nothing did."""
        if self._unfinished:
            self.clear()
        every, self._unfinished = self._unfinished, True
        slots: IntArray | None
        if self._cut is None:
            assert given is not None
            slots, runs, table = NO_SLOTS if given is self._given else None, given, self._storage.table
            self._given = given
        else:
            slots, table = self._episodes.follow(self._storage), self._episodes.table
        if every or slots is None:
            slots = np.arange(len(self.serial))
        elif self._cut is not None and self._by_steps and not self._many and len(slots):
            changed = self._take_steps()
            if changed is not None:
                self._unfinished = False
                return changed
        if self._cut is not None and len(slots):
            runs = self._cut(table, slots[self._episodes.shown.take(slots)])
        changed = self._take_few(slots, runs) if 0 < len(slots) <= FEW else None
        if changed is None and len(slots):
            changed = self._take(slots, runs, table.generation.take(slots).view(np.int64))
        self._unfinished = False
        return changed

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

    def _take_steps(self) -> tuple[Runs, Runs] | None:
        """Take in steps that came or left, each of which is an anchor; None where more may have changed."""
        moved, serials = self._episodes.moved, self._episodes.table.serial
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
    """

    def __init__(self, priorities: Priorities, anchors: SlotAnchors | None = None) -> None:
        self._priorities, self._anchors = priorities, anchors

    def follow(self, runs: Runs | None) -> bool:
        """See the episodes that exist; returns whether every step is an anchor still."""
        self._priorities.follow()
        if self._anchors is None:
            return True
        self._anchors.follow(runs)
        return self._anchors.count == self._anchors.num_steps

    @property
    def count(self) -> int:
        return self._priorities.num_steps

    @property
    def total(self) -> float:
        with self._priorities.lock:  # others update them
            return self._priorities.tree.total

    def minimum(self) -> float:
        """The smallest priority of an anchor."""
        with self._priorities.lock:
            self._priorities.keep_minima()
            return self._priorities.tree.minimum

    def find(self, values: FloatArray) -> Drawn:
        """The anchors at values of the cumulative sum."""
        return self._priorities.find(values)


class AnchorPriorities:
    """The priorities of any anchors, in a tree in memory.

    Args:
        storage: the folder.
        priorities: of its steps; None where batches are drawn by a meta field.
        how: the options of the draws.
        view: the view whose anchors these are.
        cut, by_steps: see `SlotAnchors`.
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
        self._storage, self._priorities, self._how, self._view = storage, priorities, how, view
        self._reduce = how.reduce or ("mean" if view.per_episode else "first")
        self._before = int(getattr(view, "pad_before", 0))
        self._length = 0 if view.per_episode else int(getattr(view, "length", 1))
        by_content = how.weight_field is not None
        self._anchors = SlotAnchors(storage, view.stride, cut, by_steps=by_steps, by_content=by_content)
        layout = storage.layout
        self._leaves_needed = (layout.rows or layout.slots * layout.max_timesteps) + layout.slots * self._before
        require_memory(storage, self._leaves_needed, "the tree of items that are drawn by priority,")
        self._tree = self._new_tree()
        self._unfinished = False
        self._seen = 0
        if priorities is not None:
            priorities.keep_changes()
            self._seen = priorities.num_changes
        self._sorted: FloatArray | None = None
        self._unsorted = 0

    def _new_tree(self) -> SumTree:
        return SumTree.empty(self._leaves_needed, minima=self._how.normalize == "buffer")

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
        return slots, self._anchors.serial[slots], leaves - self._leaves(slots, 0), priorities

    def follow(self, runs: Runs | None) -> bool:
        """Take in the changes of this folder's anchors, and of the priorities; returns True."""
        if self._unfinished:  # it was interrupted in the middle of it
            self._anchors.clear()
            self._tree = self._new_tree()
            self._unfinished = False
        if self._priorities is not None:
            self._priorities.follow()
        self._unfinished = True
        changed = self._anchors.follow(runs)
        if changed is not None:
            self._enter(*changed)
        if self._priorities is not None:
            self._follow_priorities(self._priorities)
        if self._how.variant == "rank":
            self._sort()
        self._unfinished = False
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

    def _each(self, runs: Runs) -> Iterator[tuple[IntArray, IntArray]]:
        """(slot, t) of the anchors of runs, some 10⁶ at a time."""
        if len(runs.slot) <= FEW and runs.last is None:
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
            t = runs.first[place] + (i - ends[place] + runs.count[place]) * self._view.stride
            if runs.last is not None:
                t = np.minimum(t, runs.last[place])
            yield runs.slot[place], t

    # Following

    def _enter(self, gone: Runs, come: Runs) -> None:
        for slots, t in self._each(gone):
            self._tree.put(self._leaves(slots, t), np.zeros(len(slots)))
            self._unsorted += len(slots)
        for slots, t in self._each(come):
            self._put(slots, t)

    def _follow_priorities(self, priorities: Priorities) -> None:
        if priorities.num_changes == self._seen:
            return
        with priorities.lock:  # others update them
            behind, seen = priorities.num_changes - self._seen, priorities.num_changes
            changes = list(priorities.changes)
        whole: list[IntArray] = []
        if behind > len(changes):
            whole = [np.arange(len(self._anchors.serial))]
            behind = 0
        for slots, t in changes[len(changes) - behind :]:
            if t is None:
                whole.append(slots)
            else:
                self._update(slots, t)
        if whole:
            for slots, t in self._each(self._anchors.runs(np.unique(np.concatenate(whole)))):
                self._put(slots, t)
        self._seen = seen

    def _update(self, slots: IntArray, t: IntArray) -> None:
        """Give the anchors that some steps belong to their priorities again."""
        if self._view.per_episode:
            slots = np.unique(slots)
            t = np.zeros_like(slots)
        elif self._reduce != "first" or self._before:
            reach = self._length - 1 if self._reduce != "first" else self._before
            t = (t[:, None] + np.arange(-reach, 1)).reshape(-1)
            slots = np.repeat(slots, reach + 1)
            slots, t = slots[t >= -self._before], t[t >= -self._before]
        leaves = self._leaves(slots, t)
        held = self._tree.get(leaves)
        served = (held > 0) | np.signbit(held)
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
        """The priorities of anchors (B,); 0 where another episode is in the slot by now."""
        if self._priorities is None:
            return self._by_weight_field(slots)
        start = np.maximum(t, 0)
        if self._reduce == "first":
            found = self._priorities.tree.get(self._priorities.leaves(slots, start))
        else:
            length = self._priorities.steps_of(slots)[1]
            stop = length if self._view.per_episode else np.minimum(t + self._length, length)
            found = self._reduced(slots, start, np.maximum(stop, start + 1))
        return np.where(self._priorities.serials_of(slots) == self._anchors.serial[slots], found, 0.0)

    def _reduced(self, slots: IntArray, start: IntArray, stop: IntArray) -> FloatArray:
        """The maximum or mean over steps start … stop - 1."""
        assert self._priorities is not None
        out, first, count = np.empty(len(slots)), self._priorities.leaves(slots, start), stop - start
        cuts = np.flatnonzero(np.diff(np.cumsum(count) // BLOCK, prepend=0))
        for part in np.split(np.arange(len(slots)), cuts):
            if len(part):
                begins = np.cumsum(count[part]) - count[part]
                leaves = np.repeat(first[part] - begins, count[part]) + np.arange(int(count[part].sum()))
                values = self._priorities.tree.get(leaves)
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
        self._sorted = np.sort(np.concatenate(parts)) if parts else np.zeros(0)
        for (slots, t), priorities in zip(self._each(runs), parts, strict=True):
            self._tree.put(self._leaves(slots, t), with_zeros(self._by_rank(priorities)))
        self._unsorted = 0


AnyPriorities: TypeAlias = StepPriorities | AnchorPriorities
