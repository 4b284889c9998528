"""Priorities that live on the disk with the data, under a name: one process owns them, the learner.

They follow the episodes by themselves: the steps of an episode that appears get the maximum priority so far, the steps
of one that goes are drawn no more. `tree_file` tells of the bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from memmap_buffer.dtypes import all_of, any_of
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.lock import Turn
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import process_id
from memmap_buffer.priority.sum_tree import MAX_PRIORITY, FloatArray, SumTree
from memmap_buffer.priority.tree_file import TreeFile

REMEMBERED = 4096  # changes that a tree of anchors may be behind

# Within a process all objects share one tree of a name: a second lock on its file would wait for the first for ever.
_open: weakref.WeakValueDictionary[tuple[tuple[int, int], str, int], Priorities] = weakref.WeakValueDictionary()
_opening = Turn()  # of all of them: two threads that draw for the first time share a tree


class Priorities:
    """The priorities of every step of one folder, under one name; made by `open`.

    Attributes:
        changes: (slots, t, or None for all their steps) of the last of `num_changes`, after `keep_changes`.
    """

    def __init__(self, file: TreeFile) -> None:
        self._file = file
        self.lock = threading.RLock()
        self.changes: deque[tuple[IntArray, IntArray | None]] = deque(maxlen=0)
        self.num_changes = 0
        self._users = 0
        self._table: EpisodeTable | None = None
        self._known: IntArray = np.zeros(0, np.int64)  # the visible serials, oldest first
        self._gapless = False  # whether they follow one another, so that none need be searched for

    @classmethod
    def open(cls, storage: Storage, name: str, *, alpha: float, epsilon: float) -> Priorities:
        """The priorities of that name; they are closed as often as they were opened.

        Args:
            storage: the folder.
            name: of the tree.
            alpha, epsilon: the priority of a step is (|δ| + ε)^α.

        Raises:
            BufferLockedError: another process owns them.
            SchemaError: the name is no identifier, or they are in use with another α or ε.
            CorruptBufferError: something in `priority/` is not ours.
            OSError: the disk is full.
        """
        if not (name.isidentifier() and name.isascii() and len(name) <= 64) or name.startswith("_"):
            raise SchemaError(f"priorities: {name!r} cannot name a file; give an identifier of at most 64 characters")
        with _opening.lock:
            return cls._found(storage, name, alpha, epsilon)

    @classmethod
    def _found(cls, storage: Storage, name: str, alpha: float, epsilon: float) -> Priorities:
        file = TreeFile(storage, name, alpha=alpha, epsilon=epsilon)
        file.require_place()
        key = storage.folder.lock_key(), name, process_id()
        found = _open.get(key)
        if found is not None and not found.storage.is_of(storage.folder):  # the buffer was overwritten
            found._file.close()
            found = None
        if found is None or not found._users:
            found = cls(file)
            found._begin()
            _open[key] = found
        elif found.storage.schema_replaced and not storage.schema_replaced:
            found._file.storage = storage
        found.require(alpha=alpha, epsilon=epsilon)
        found._users += 1
        return found

    def require(self, *, alpha: float, epsilon: float) -> None:
        """Raise SchemaError where α or ε are not these."""
        file = self._file
        if (file.alpha, file.epsilon) != (alpha, epsilon):
            raise SchemaError(
                f"priorities {file.name!r} are in use with alpha={file.alpha} and epsilon={file.epsilon}, not {alpha} "
                f"and {epsilon}; give the others another name"
            )

    def _begin(self) -> None:
        self._file.own()
        try:
            self.follow()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Bring everything to the disk and let go, at the last call of as many as there were of `open`."""
        with _opening.lock, self.lock:
            self._users = max(0, self._users - 1)
            if not self._users:
                self._file.close()

    @property
    def storage(self) -> Storage:
        """The folder; opened again where its columns were changed."""
        return self._file.storage

    @property
    def tree(self) -> SumTree:
        """The sums over `leaves`; to be read after `follow`."""
        return self._file.tree

    @property
    def serials(self) -> IntArray:
        """(slots,) of each slot's episode, -1 for none."""
        return self.serials_of(np.arange(len(self._file.pairs)))

    def serials_of(self, slots: IntArray) -> IntArray:
        """(B,) of the episodes in slots (B,), -1 for none."""
        serials: IntArray = self._file.pairs.reshape(-1).take(2 * slots).view(np.int64)
        serials -= 1
        return serials

    @property
    def lengths(self) -> IntArray:
        """(slots,) steps that have a leaf."""
        return self._file.pairs[:, 1].view(np.int64)

    @property
    def num_steps(self) -> int:
        """Steps that can be drawn."""
        return 0 if self._table is None else self._table.steps

    def leaves(self, slots: IntArray, t: IntArray) -> IntArray:
        """The leaves of steps (B,)."""
        return self.storage.first_row(slots, False) + t

    def find(self, values: FloatArray) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
        """(slots, serials, t, priorities) of the steps (B,) at values of the cumulative sum; made anew if damaged."""
        with self.lock:
            found = self._at(values)
            if found is None:
                self._load("its sums are damaged")
                self.follow()
                found = self._at(values * 0 if not self.tree.total else np.minimum(values, self.tree.total))
            assert found is not None
            return found

    def _at(self, values: FloatArray) -> tuple[IntArray, IntArray, IntArray, FloatArray] | None:
        """None where a value leads to a leaf that is no step, as the sums are damaged."""
        table, layout, tree = self._table, self.storage.layout, self.tree
        assert table is not None
        leaves, priorities = tree.find(values)
        if tree.loops is not None and layout.rows is None:
            slots, serials, t = np.empty((3, len(leaves)), np.int64)
            there = tree.loops.locate(leaves, layout.max_timesteps, table.length, table.serial, slots, serials, t)
        else:
            inside = np.minimum(leaves, self._file.leaves - 1)
            slots, t = self._steps(inside)
            there, serials = all_of((t < table.length.take(slots)) & (inside == leaves)), table.serial.take(slots)
        return (slots, serials, t, priorities) if there and all_of(priorities > 0) else None

    def _steps(self, leaves: IntArray) -> tuple[IntArray, IntArray]:
        if self.storage.layout.rows is None:
            slots = leaves // self.storage.layout.max_timesteps
        else:
            visible = self.storage.table.visible
            first = self.storage.first_row(visible, False)
            order = np.argsort(first, kind="stable")
            slots = visible[order][np.maximum(np.searchsorted(first[order], leaves, side="right") - 1, 0)]
        return slots, leaves - self.storage.first_row(slots, False)

    # Changing

    def follow(self) -> None:
        """Take in the episodes that were published or retired since; without any, one look at the change counter.

        Raises:
            WriterLostError: in a forked child.
            OSError: the disk is full.
        """
        if self.storage.refresh() is not self._table or not self._file.whole:
            with self.lock:
                if not self._file.whole:
                    self._load()
                self._enter(self.storage.refresh())

    def update(self, serials: IntArray, t: IntArray, td_errors: FloatArray) -> int:
        """Give steps the priorities of their errors.

        Args:
            serials, t: (B,) int64; t below 0, where a window began before its episode, is step 0.
            td_errors: (B,) δ; of a step that stands twice the last counts.

        Returns:
            how many were dropped because their episode is gone.

        Raises:
            SchemaError: an error is NaN, infinite or too large, or an episode has no such step.
        """
        raw, highest = self._raw(td_errors)
        with self.lock:
            self.follow()
            leaves, here = self._leaves_of(serials, t)
            if here is not None:
                raw = raw[here]
                highest = float(raw.max(initial=0))
            if len(leaves):
                self._set(leaves, raw, highest)
            return len(serials) - len(leaves)

    def _leaves_of(self, serials: IntArray, t: IntArray) -> tuple[IntArray, Any]:
        """(the leaves of the steps whose episode is there; (B,) whether it is, None for all). Raises SchemaError."""
        table, layout, loops = self._table, self.storage.layout, self.tree.loops
        assert table is not None
        if loops is not None and self._gapless and layout.rows is None:
            leaves, oldest = np.empty(len(serials), np.int64), self._known.item(0)
            if loops.leaves(serials, t, oldest, table.visible, table.length, layout.max_timesteps, leaves):
                return leaves, None
        slots, here = self._slots(serials)
        if not all_of(here):
            slots, t = slots[here], t[here]
        t, lengths = np.maximum(t, 0), table.length.take(slots)
        outside = t >= lengths
        if any_of(outside):
            i = np.flatnonzero(outside)[0]
            raise SchemaError(
                f"update_priorities: episode {self.serials_of(slots)[i]} has steps 0 … {lengths[i] - 1}, got {t[i]}"
            )
        return self.leaves(slots, t), here

    def lengths_of(self, serials: IntArray) -> tuple[IntArray, Any]:
        """(steps of each episode (B,), 0 where it is gone; whether it is there)."""
        with self.lock:
            self.follow()
            slots, here = self._slots(serials)
            return np.where(here, self.lengths[slots * here], 0), here

    def keep_changes(self) -> None:
        """From now on keep `changes`: up to 16 MB of memory, and a page fault an update."""
        with self.lock:
            self.changes = deque(self.changes, REMEMBERED)

    def keep_minima(self) -> None:
        """From now on `tree.minimum` is kept; the first time this looks at every step."""
        with self.lock:
            self.follow()
            if not self.tree.minima:
                self._file.keep_minima()

    def checkpoint(self) -> None:
        """Wait until the priorities are on the disk. Raises OSError."""
        with self.lock:
            self.follow()
            self._file.checkpoint()

    def _slots(self, serials: IntArray) -> tuple[IntArray, Any]:
        """(slots, whether each episode is still there)."""
        assert self._table is not None
        visible, known = self._table.visible, self._known
        if not len(visible):
            return serials, np.zeros(len(serials), np.bool_)
        if self._gapless:
            place = serials - known[0]
            here = place.view(np.uint64) < len(known)  # as unsigned, one below 0 is beyond any length
            return visible.take(place, mode="clip"), here
        place = np.minimum(np.searchsorted(known, serials), len(known) - 1)
        return visible[place], known[place] == serials

    def _raw(self, td_errors: FloatArray) -> tuple[FloatArray, float]:
        """(|δ| + ε, the highest of them)."""
        raw: FloatArray = np.abs(td_errors)
        raw += self._file.epsilon
        highest = float(np.maximum.reduce(raw)) if len(raw) else 0.0
        limit = MAX_PRIORITY ** (1 / max(1.0, self._file.alpha))
        if not highest <= limit:  # true for NaN, too
            i = np.flatnonzero(~(raw <= limit))[0]
            raise SchemaError(f"td_errors[{i}]: got {td_errors[i]}, expected a finite number below {limit:.3g}")
        return raw, highest

    def _set(self, leaves: IntArray, raw: FloatArray, highest: float) -> None:
        file = self._file
        file.prepare(leaves)
        with file.storing:
            file.tree.put(leaves, raw**file.alpha)
            file.raise_maximum(highest)
        if self.changes.maxlen:
            self._changed(*self._steps(leaves))

    def _enter(self, table: EpisodeTable) -> None:
        """Give leaves to the steps of a table's visible episodes, and to no others."""
        serial, length = np.full(len(table.serial), -1), np.zeros(len(table.serial), np.int64)
        serial[table.visible], length[table.visible] = table.serial[table.visible], table.length[table.visible]
        other = self.serials != serial
        changed = np.flatnonzero(other | (self.lengths != length))
        if len(changed):
            had = self.lengths[changed]
            start = np.where(other[changed], 0, had)
            gone = changed, np.where(other[changed], 0, length[changed]), had
            come = changed, start, length[changed]
            self._replace(gone, come, np.stack([serial[changed] + 1, length[changed]], axis=1))
            self._changed(changed, None)
        self._table, self._known = table, table.serial[table.visible]
        self._gapless = len(table) > 0 and bool(self._known[-1] - self._known[0] == len(table) - 1)

    def _replace(self, gone: Any, come: Any, pairs: IntArray) -> None:
        file, slots = self._file, gone[0]
        for steps in (gone, come):  # a full disk is met before anything has changed
            for leaves in file.blocks(*steps):
                file.prepare(leaves)
        with file.storing:
            for steps, priority in ((gone, 0.0), (come, file.default)):
                for leaves in file.blocks(*steps):
                    self.tree.put(leaves, np.full(len(leaves), priority))
            file.pairs[slots] = pairs
            file.put_pairs(slots)

    def _load(self, distrust: str = "") -> None:
        self._file.load(distrust)
        self._table = None
        self._changed(np.arange(len(self.lengths)), None)

    def _changed(self, slots: IntArray, t: IntArray | None) -> None:
        self.changes.append((slots, t))
        self.num_changes += 1
