"""The priorities of the anchors of a view in one folder: the tree on the disk, or a tree of their own.

Where every step is an anchor and has the priority of its leaf, batches are drawn from the tree on the disk
(`StepPriorities`). Else `AnchorPriorities` keeps a tree in memory with a leaf for each (slot, t) that may be an anchor.
The leaf of a step that is none is 0: it cannot be drawn, and takes no memory. That tree follows the index and the
priorities, slot by slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.priority.priorities import Priorities
from memmap_buffer.priority.sum_tree import FloatArray, SumTree, new_nodes
from memmap_buffer.views.anchors import Runs
from memmap_buffer.views.view import View

BLOCK = 1 << 20  # leaves that are looked at together
_U64 = np.uint64


Drawn: TypeAlias = tuple[IntArray, IntArray, IntArray, FloatArray]  # (B,) slots, serials, t, priorities


class StepPriorities:
    """The priorities where every step is an anchor: the leaves of the tree on the disk."""

    def __init__(self, priorities: Priorities) -> None:
        self._priorities = priorities

    def follow(self, runs: Runs) -> None:
        """See the episodes that exist."""
        self._priorities.follow()

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
    """

    def __init__(self, storage: Storage, priorities: Priorities | None, how: Prioritized, view: View) -> None:
        self._storage, self._priorities, self._how, self._view = storage, priorities, how, view
        self._reduce = how.reduce or ("mean" if view.per_episode else "first")
        self._before = int(getattr(view, "pad_before", 0))
        self._length = 0 if view.per_episode else int(getattr(view, "length", 1))
        layout = storage.layout
        leaves = (layout.rows or layout.slots * layout.max_timesteps) + layout.slots * self._before
        self._tree = SumTree(new_nodes(leaves), leaves, minima=how.normalize == "buffer")
        self._runs: Runs | None = None
        self._signature = np.zeros(layout.slots, _U64)
        self._serial = np.full(layout.slots, -1)
        self._outdated = np.ones(layout.slots, np.bool_)  # slots whose anchors are given their priorities again
        self._seen = 0
        if priorities is not None:
            priorities.keep_changes()
        self._sorted: FloatArray | None = None
        self._unsorted = 0

    @property
    def count(self) -> int:
        return 0 if self._runs is None else int(self._runs.count.sum())

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
        return slots, self._serial[slots], leaves - self._leaves(slots, 0), priorities

    def follow(self, runs: Runs) -> None:
        """Take in the changes of this folder's anchors, and of the priorities."""
        if self._priorities is not None:
            self._priorities.tree.loops = self._tree.loops or self._priorities.tree.loops
            self._priorities.follow()
            self._follow_priorities(self._priorities)
        if runs is not self._runs or self._outdated.any():
            self._follow_runs(runs)
        if self._how.variant == "rank":
            self._sort(runs)

    # Where a leaf lies

    def _leaves(self, slots: IntArray, t: Any) -> IntArray:
        """The leaves of anchors; t counts from `-pad_before`."""
        return np.asarray(self._storage.first_row(slots, False) + (slots + 1) * self._before + t)

    def _slots_of(self, leaves: IntArray) -> IntArray:
        layout = self._storage.layout
        if layout.rows is None:
            return np.asarray(leaves // (layout.max_timesteps + self._before))
        slots = np.arange(layout.slots)[self._serial >= 0]
        first = self._leaves(slots, -self._before)
        order = np.argsort(first, kind="stable")
        return np.asarray(slots[order][np.searchsorted(first[order], leaves, side="right") - 1])

    def _anchors(self, runs: Runs, chosen: npt.NDArray[np.bool_] | None) -> Iterator[tuple[IntArray, IntArray]]:
        """(slot, t) of the anchors of runs, of some slots or all, some 10⁶ at a time."""
        if chosen is not None:
            runs = runs.where(np.flatnonzero(chosen[runs.slot]))
        ends = np.cumsum(runs.count)
        for at in range(0, int(runs.count.sum()), BLOCK):
            i = np.arange(at, min(at + BLOCK, int(ends[-1])))
            place = np.searchsorted(ends, i, side="right")
            t = runs.first[place] + (i - ends[place] + runs.count[place]) * self._view.stride
            if runs.last is not None:
                t = np.minimum(t, runs.last[place])
            yield runs.slot[place], t

    # Following

    def _follow_priorities(self, priorities: Priorities) -> None:
        with priorities.lock:  # others update them
            behind, self._seen = priorities.num_changes - self._seen, priorities.num_changes
            changes = list(priorities.changes)
        if behind > len(changes):
            self._outdated[:] = True
            return
        for slots, t in changes[len(changes) - behind :]:
            if t is None:
                self._outdated[slots] = True
            else:
                self._update(slots, t)

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
        served = (self._tree.get(leaves) > 0) & ~self._outdated[slots]
        self._put(slots[served], t[served])

    def _follow_runs(self, runs: Runs) -> None:
        signature = self._sign(runs)
        changed = self._outdated | (signature != self._signature)
        self._outdated = changed  # until all is done
        if self._runs is not None:
            for slots, t in self._anchors(self._runs, changed):
                self._tree.put(self._leaves(slots, t), np.zeros(len(slots)))
                self._unsorted += len(slots)
        self._signature, self._runs = signature, runs
        self._serial[changed] = -1
        mine = changed[runs.slot]
        self._serial[runs.slot[mine]] = runs.serial[mine]
        for slots, t in self._anchors(runs, changed):
            self._put(slots, t)
        self._outdated = np.zeros(len(changed), np.bool_)

    def _sign(self, runs: Runs) -> npt.NDArray[np.uint64]:
        """(slots,) a hash of the anchors that each slot has."""
        columns = [runs.serial, runs.first, runs.count] + ([] if runs.last is None else [runs.last])
        if self._how.weight_field is not None:
            columns.append(self._storage.table.generation[runs.slot].astype(np.int64))
        mixed = np.full(len(runs.slot), 0x6D656D6D61706275, _U64)
        for column in columns:
            mixed = (mixed ^ column.astype(_U64)) * _U64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> _U64(29)
        signature = np.zeros(len(self._serial), _U64)
        np.add.at(signature, runs.slot, mixed)
        return signature

    # What the leaves hold

    def _put(self, slots: IntArray, t: IntArray) -> None:
        priorities = self._priority(slots, t)
        if self._how.variant == "rank":
            self._unsorted += len(slots)
            priorities = self._by_rank(priorities)
        self._tree.put(self._leaves(slots, t), priorities)

    def _priority(self, slots: IntArray, t: IntArray) -> FloatArray:
        """The priorities of anchors (B,); 0 where another episode is in the slot by now."""
        if self._priorities is None:
            return self._by_weight_field(slots)
        start = np.maximum(t, 0)
        if self._reduce == "first":
            found = self._priorities.tree.get(self._priorities.leaves(slots, start))
        else:
            length = self._priorities.lengths[slots]
            stop = length if self._view.per_episode else np.minimum(t + self._length, length)
            found = self._reduced(slots, start, np.maximum(stop, start + 1))
        return np.where(self._priorities.serials_of(slots) == self._serial[slots], found, 0.0)

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

    def _sort(self, runs: Runs) -> None:
        """Where enough has changed, sort the order in which ranks are found, and put all priorities by it."""
        if self._sorted is not None and self._unsorted < (self._how.sort_interval or max(self.count, 1)):
            return
        parts = [self._priority(slots, t) for slots, t in self._anchors(runs, None)]
        self._sorted = np.sort(np.concatenate(parts)) if parts else np.zeros(0)
        for (slots, t), priorities in zip(self._anchors(runs, None), parts, strict=True):
            self._tree.put(self._leaves(slots, t), self._by_rank(priorities))
        self._unsorted = 0


AnyPriorities: TypeAlias = StepPriorities | AnchorPriorities
