"""Priorities that live on the disk with the data, under a name: one process owns them, the learner.

They follow the episodes by themselves: the steps of an episode that appears get the maximum priority so far in
any folder of the buffer, the steps of one that goes are drawn no more. `tree_file` tells of the bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, TypeVar

import numpy as np

from memmap_buffer.dtypes import FloatArray, all_of, any_of
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.journal import Journal
from memmap_buffer.format.lock import Turn
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import process_id, renew_after_fork
from memmap_buffer.priority.leaves import NO_EPISODES, Leaves, Packed, Row
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.priority.sum_tree import MAX_PRIORITY, SumTree, by_tree, with_zeros
from memmap_buffer.priority.tree_file import TreeFile, steps_in

REMEMBERED = 4096  # changes that a tree of anchors may be behind

# Within a process all objects share one tree of a name: a second lock on its file would wait for the first for ever.
_open: weakref.WeakValueDictionary[tuple[tuple[int, int], str, int], Priorities] = weakref.WeakValueDictionary()
_opening = Turn()  # of all of them: two threads that draw for the first time share a tree
_numbers = count()
_NUMBER, _LOCK, _RELEASE = attrgetter("number"), attrgetter("lock"), methodcaller("release")
SCALE = attrgetter("file.alpha", "file.epsilon")  # (α, ε) of priorities, without a call

T = TypeVar("T")


class Highest:
    """The highest |δ| + ε so far in all folders of a buffer, with which new steps enter each of them."""

    def __init__(self) -> None:
        self.value = 0.0
        self._turn = Turn()

    def rise_to(self, value: float) -> None:
        """It is at least this from now on."""
        with self._turn.lock:
            self.value = max(self.value, value)


class Priorities:
    """The priorities of every step of one folder, under one name; made by `open`.

    Attributes:
        file: where they are kept.
        changes: (slots, t, or None for all their steps) of the last of `num_changes`, after `keep_changes`.
        number: of this object in the process; whoever takes several of the locks does so in this order.
        stamp: another one whenever the arrays may be others, or their length.
        at: the journal to which they were followed, its mark and its version; None where some slots may still have
            leaves as they were before.
        num_steps: steps that can be drawn.
    """

    def __init__(self, file: TreeFile) -> None:
        self.file = file
        self.lock = threading.RLock()
        self.changes: deque[tuple[IntArray, IntArray | None]] = deque(maxlen=0)
        self.num_changes = self.stamp = 0
        self.number = next(_numbers)
        renew_after_fork(self)
        self._users = 0
        self._highest: weakref.WeakSet[Highest] = weakref.WeakSet()
        self._order = self._journal_order = NO_EPISODES  # (2, n) serials, ascending, and slots; some may be gone
        self._listed: tuple[Any, ...] = ()  # which part of the journal's order that is
        self.at: tuple[Journal, int, int | None] | None = None
        self.num_steps = 0

    def renew(self) -> None:
        """In a forked child: another thread may have been drawing, or updating."""
        self.lock = threading.RLock()

    @classmethod
    def open(
        cls,
        storage: Storage,
        name: str,
        *,
        alpha: float | None = None,
        epsilon: float | None = None,
        highest: Highest | None = None,
    ) -> Priorities:
        """The priorities of that name, without new steps until `follow`; closed as often as they were opened.

        Args:
            storage: the folder.
            name: of the tree.
            alpha, epsilon: the priority of a step is (|δ| + ε)^α; None for those of the tree, of a new one the defaults
                of `Prioritized`. See `use`.
            highest: of the folders that are drawn from with this one.

        Raises:
            BufferLockedError: another process owns them.
            SchemaError: the name is no identifier.
            CorruptBufferError: something in `priority/` is not ours.
            OSError: the disk is full.
        """
        if not (name.isidentifier() and name.isascii() and len(name) <= 64) or name.startswith("_"):
            raise SchemaError(f"priorities: {name!r} cannot name a file; give an identifier of at most 64 characters")
        with _opening.lock:
            priorities = cls._shared(storage, name, alpha, epsilon)
            if highest is not None:
                with priorities.lock:
                    priorities._highest.add(highest)
                    highest.rise_to(priorities.file.maximum)
            return priorities

    @classmethod
    def _shared(cls, storage: Storage, name: str, alpha: float | None, epsilon: float | None) -> Priorities:
        file = TreeFile(storage, name, alpha=Prioritized.alpha, epsilon=Prioritized.epsilon)
        file.require_place()
        key = storage.folder.lock_key(), name, process_id()
        priorities = _open.get(key)
        if priorities is not None and not priorities.storage.is_of(storage.folder):  # the buffer was overwritten
            priorities.file.close()
            priorities = None
        if priorities is None or not priorities._users:
            stored = file.stored()
            file.alpha, file.epsilon = (
                next(value for value in values if value is not None)
                for values in zip((alpha, epsilon), stored, (file.alpha, file.epsilon), strict=True)
            )
            priorities = cls(file)
            priorities._begin()
            _open[key] = priorities
        elif priorities.storage.schema_replaced and not storage.schema_replaced:
            priorities.file.storage = storage
        priorities.use(alpha=alpha, epsilon=epsilon)
        priorities._users += 1
        return priorities

    def use(self, *, alpha: float | None, epsilon: float | None) -> None:
        """Go on with another α or ε; None for what it is.

        With another α all leaves are rescaled, one pass over all steps. Another ε is that of errors from now on.

        Raises:
            OSError: the disk is full.
            SchemaError: α is too large for the highest priority so far.
        """
        file = self.file
        if alpha in (None, file.alpha) and epsilon in (None, file.epsilon):
            return
        with self.lock:
            if epsilon is not None:
                file.take_epsilon(epsilon)
            if alpha is not None and alpha != file.alpha:
                if not file.whole:
                    self._load()
                file.checkpoint()
                self.stamp += 1
                file.rescale(alpha)
                self._all_changed()

    def _begin(self) -> None:
        self.file.own()
        try:
            self._load()
        except BaseException:
            self.file.close()
            raise

    def close(self) -> None:
        """Bring everything to the disk and let go, at the last call of as many as there were of `open`."""
        with _opening.lock, self.lock:
            self._users = max(0, self._users - 1)
            if not self._users:
                self.file.close()

    @property
    def storage(self) -> Storage:
        """The folder; opened again where its columns were changed."""
        return self.file.storage

    @property
    def tree(self) -> SumTree:
        """The sums over `leaves`; to be read after `follow`."""
        return self.file.tree

    def serials_of(self, slots: IntArray) -> IntArray:
        """(B,) of the episodes in slots (B,), -1 for none."""
        serials: IntArray = self.file.pair_words.take(2 * slots)
        serials -= 1
        return serials

    def mend(self) -> None:
        """Make the tree anew of its leaves, as a draw has met sums that are damaged."""
        with self.lock:
            self._load("its sums are damaged")
            self.follow()

    # Changing

    @property
    def settled(self) -> bool:
        """Whether `follow` has nothing to do unless the folder changes."""
        return self.file.whole and self.at is not None

    def follow(self) -> None:
        """Take in the episodes that were published or retired since; without any, one look at the change counter.

        Raises:
            WriterLostError: in a forked child.
            OSError: the disk is full.
        """
        storage = self.file.storage
        journal, at = storage.journal, self.at
        if at is not None and at[0] is journal and self.file.whole and journal.is_current(storage, at[1]):
            return
        with self.lock:
            if not self.file.whole:
                self._load()
            at, self.at = self.at, None
            with journal.lock:
                change = journal.follow(storage, at[1] if at is not None and at[0] is journal else 0)
                slots = np.arange(len(self.file.pairs)) if change.slots is None else change.slots
                pairs = journal.pairs(slots)
                self._list(journal)
                followed, self.num_steps = (journal, change.mark, journal.version), journal.num_steps
            self._enter(slots, pairs)
            self.at = followed

    def _list(self, journal: Journal) -> None:
        """Know the serials of the episodes, and their slots, as of now."""
        listed = id(journal.order), journal.head, journal.tail, journal.num_steps > 0
        if listed != self._listed:
            self.stamp += 1  # before anything is another, as it may be interrupted
            self._journal_order = journal.order  # held, so that no other one ever lies there
            self._order = journal.order[:, journal.head : journal.tail] if journal.num_steps else NO_EPISODES
            self._listed = listed

    def keep_changes(self) -> None:
        """From now on keep `changes`: up to 16 MB of memory, and a page fault an update."""
        with self.lock:
            self.changes = deque(self.changes, REMEMBERED)

    def keep_minima(self) -> None:
        """From now on `tree.minimum` is kept; the first time this looks at every step."""
        with self.lock:
            self.follow()
            if not self.tree.minima:
                self.stamp += 1
                self.file.keep_minima()

    def checkpoint(self) -> None:
        """Wait until the priorities are on the disk. Raises OSError."""
        with self.lock:
            self.follow()
            self.file.checkpoint()

    def rise_to(self, highest: float) -> None:
        """The highest |δ| + ε so far is at least this from now on, here and in the other folders."""
        self.file.raise_maximum(highest)
        for each in self._highest:
            each.rise_to(highest)

    def _priority_of_new(self) -> float:
        """The priority of steps that enter now."""
        for each in self._highest:
            self.file.raise_maximum(each.value)
        return self.file.default

    def row(self) -> Row:
        """Where the leaves lie, and the serials of the episodes that have some."""
        storage = self.storage
        packed = None if storage.layout.rows is None else Packed(storage, 0)
        serials, order = self._order
        return Row(self.tree, storage.layout.max_timesteps, 0, self.file.pair_words, serials, order, packed)

    def _enter(self, slots: IntArray, shown: list[tuple[int, int]] | IntArray) -> None:
        """Give leaves to the steps that slots show, and to no others of theirs; shown: `Journal.pairs`."""
        if not len(slots) or (isinstance(shown, list) and self._enter_few(slots, shown)):
            return
        file, pairs = self.file, np.asarray(shown)
        old = file.pair_words.reshape(-1, 2)[slots]
        differ = (old != pairs).any(axis=1)
        if not differ.any():
            return
        if len(slots) > 1:
            slots, old, pairs = slots[differ], old[differ], pairs[differ]
        other = pairs[:, 0] != old[:, 0]
        (start, stop), (was, had) = steps_in(pairs[:, 1]), steps_in(old[:, 1])
        twice = np.concatenate([slots, slots])
        # What lies before and what lies behind the steps of the other; of another episode all of them.
        first, last = np.where(other, had, start), np.where(other, had, stop)
        gone = twice, *np.concatenate([[was, np.minimum(first, had)], [np.maximum(last, was), had]], axis=1)
        first, last = np.where(other, stop, was), np.where(other, stop, had)
        come = twice, *np.concatenate([[start, np.minimum(first, stop)], [np.maximum(last, start), stop]], axis=1)
        self._replace(gone, come, slots, pairs)
        if self.changes.maxlen:
            whole = other | (stop < had)
            if whole.any():
                self.tell(slots[whole], None)
            for steps in file.blocks(slots[~whole], last[~whole], stop[~whole]):
                self.tell(*steps)

    def _enter_few(self, slots: IntArray, pairs: list[tuple[int, int]]) -> bool:
        """`_enter` of slots that show a few steps more or fewer of the episodes that they had; False for others."""
        file = self.file
        words = file.pair_words
        gone: list[tuple[int, int]] = []
        come: list[tuple[int, int]] = []
        for slot, (number, steps) in zip(slots.tolist(), pairs, strict=True):
            old, start, stop = words.item(2 * slot + 1), steps & 0xFFFFFFFF, steps >> 32
            was, had = old & 0xFFFFFFFF, old >> 32 & 0xFFFFFFFF
            if not number or words.item(2 * slot) != number or not was <= start <= had <= stop:
                return False
            gone += [(slot, t) for t in range(was, start)]
            come += [(slot, t) for t in range(had, stop)]
        if not gone and not come:
            return True
        at, t = np.array(gone + come).T
        leaves = file.leaves_of(at, t)
        file.prepare(leaves)
        file.begin()
        self.tree.put(leaves, np.repeat([0.0, self._priority_of_new()], [len(gone), len(come)]))
        file.put_pairs(slots, pairs)
        file.end()
        if self.changes.maxlen and come:
            self.tell(at[len(gone) :], t[len(gone) :])
        return True

    def _replace(self, gone: Any, come: Any, slots: IntArray, pairs: IntArray) -> None:
        file = self.file
        for steps in (gone, come):  # a full disk is met before anything has changed
            for block in file.blocks(*steps):
                file.prepare(file.leaves_of(*block))
        file.begin()
        for steps, priority in ((gone, 0.0), (come, self._priority_of_new())):
            for block in file.blocks(*steps):
                leaves = file.leaves_of(*block)
                self.tree.put(leaves, np.full(len(leaves), priority))
        file.put_pairs(slots, pairs)
        file.end()

    def _load(self, distrust: str = "") -> None:
        self.stamp += 1
        self.file.load(distrust)
        self._all_changed()

    def _all_changed(self) -> None:
        """The tree was made anew."""
        self.at = None
        self.tell(np.arange(len(self.file.pairs)), None)

    def tell(self, slots: IntArray, t: IntArray | None) -> None:
        """Keep for others that steps have other priorities."""
        self.changes.append((slots, t))
        self.num_changes += 1


def in_turn(each: Iterable[Priorities]) -> list[Priorities]:
    """Each once, in the order in which `while_locked` takes them."""
    return sorted(set(each), key=_NUMBER)


def while_locked(each: Sequence[Priorities], work: Callable[[], T]) -> T:
    """Do something while the locks of some of them, `in_turn`, are held, so that two threads never wait for each other.

    This thread must not hold one of them already. It is no context manager, as an `__exit__` of ours may be interrupted
    before its first line: the locks are held then as long as somebody keeps the traceback.
    """
    taken: list[Any] = []
    release = map(_RELEASE, taken)
    try:
        for lock in map(_LOCK, each):
            taken.append(lock)
            lock.acquire()
        return work()
    finally:
        # One call, in which no signal is heard, so that an interruption leaves none of them locked. It raises where the
        # last one was not taken before one. Within `suppress` a signal is heard.
        try:  # noqa: SIM105
            deque(release, 0)
        except RuntimeError:
            pass


class Steps(NamedTuple):
    """Steps (K,) that are there: in which folder, slot, t, leaf; and a value of each, such as an error."""

    of: IntArray | None
    slots: IntArray
    t: IntArray
    leaves: IntArray
    values: Any


class StepLeaves(Leaves):
    """The leaves of the steps of folders, whose priorities are read, and changed by errors.

    Everywhere `each` are the priorities of the folders, None for one that is not there; `of` (B,) says in which of them
    an item is (None: in the only one), and `serials` (B,) of which episode; it begins at step `t` (B,), or is a whole
    episode where that is None.
    """

    def __init__(self, single: bool) -> None:
        super().__init__(single)
        self._turn = Turn()

    def over(self, each: Sequence[Any], of: IntArray | None, work: Callable[[dict[int, Priorities]], T]) -> T:
        """Do something with the priorities of the folders of items, by their numbers: these are locked and followed."""
        if of is None:
            with self._turn.lock, each[0].lock:
                each[0].follow()
                self.look(each)
                return work({0: each[0]})
        chosen = np.flatnonzero(np.bincount(of)).tolist()
        mine = {i: priorities for i in chosen if (priorities := each[i]) is not None}
        with self._turn.lock:
            return while_locked(in_turn(mine.values()), partial(self._over, each, mine, work))

    def _over(self, each: Sequence[Any], mine: dict[int, Priorities], work: Callable[[dict[int, Priorities]], T]) -> T:
        for priorities in mine.values():
            priorities.follow()
        self.look(each, mine if len(mine) < len(each) else None)
        return work(mine)

    def get(self, of: IntArray | None, serials: IntArray, t: IntArray, mine: dict[int, Priorities]) -> FloatArray:
        """The priorities of steps (B,), 0 where one is gone; in `over`.

        Raises:
            SchemaError: an episode has no such step.
        """
        del mine
        out = np.zeros(len(serials))
        steps, _ = self._steps(of, serials, t, np.arange(len(serials)))
        out[steps.values] = self.tree.get(steps.leaves, steps.of) + 0.0  # which makes 0.0 of -0.0
        return out

    def update(
        self,
        of: IntArray | None,
        serials: IntArray,
        t: IntArray | None,
        td_errors: FloatArray,
        mine: dict[int, Priorities],
    ) -> int:
        """Give steps the priorities of their errors, in `over`; where it raises, nothing was changed in any folder.

        All leaves are stored together. So of a process that is killed meanwhile all these trees are made anew of their
        leaves, and not one.

        Args:
            of, serials, t: the steps.
            td_errors: (B,) δ; or (B, L) of as many steps, of which those beyond the episode are ignored. Of a step that
                stands twice the last counts.
            mine: the priorities of the folders, as `over` gives them.

        Returns:
            how many items were dropped because their episode is gone, or of a step it.

        Raises:
            SchemaError: an error is NaN, infinite or too large, or an episode has no such step.
        """
        steps, dropped = self._steps(of, serials, t, td_errors)
        if not len(steps.leaves):
            return dropped
        scales = {*map(SCALE, mine.values())}
        alpha, epsilon = max(scales)  # of all folders, or (B,) each
        limit = MAX_PRIORITY ** (1 / max(1.0, alpha))
        if len(scales) > 1:
            of_folders = [SCALE(mine[i]) if i in mine else (alpha, epsilon) for i in range(max(mine) + 1)]
            alpha, epsilon = np.array(of_folders)[steps.of].T
        raw: FloatArray = np.abs(steps.values)
        raw += epsilon
        highest = float(np.maximum.reduce(raw))
        if not highest <= limit:  # true for NaN, too
            numbers = np.arange(td_errors.size).reshape(td_errors.shape)
            number = self._steps(of, serials, t, numbers)[0].values[~(raw <= limit)][0]
            text = f"td_errors{[*map(int, np.unravel_index(number, td_errors.shape))]}: got {td_errors.flat[number]}"
            raise SchemaError(f"{text}, expected a finite number below {limit:.3g}")
        self._set(mine, steps, raw, raw**alpha, highest)
        return dropped

    def _steps(self, of: IntArray | None, serials: IntArray, t: IntArray | None, values: Any) -> tuple[Steps, int]:
        """The steps of items that are there; how many items are not. Raises SchemaError: an episode has no such step.

        Args: values: (B,) of each item, or (B, L) of as many steps from its first one on.
        """
        if t is None or values.ndim == 2:
            return self._steps_of_items(of, serials, t, values)
        loops = SumTree.loops
        if loops is not None and not self._packed:
            slots, leaves = np.empty((2, len(serials)), np.int64)
            folders = np.zeros_like(slots) if of is None else np.ascontiguousarray(of)
            if loops.leaves(self._memory, self._places, folders, serials, t, slots, leaves):
                return Steps(of, slots, t, leaves, values), 0
        t = np.maximum(t, 0)  # below 0, where a window began before its episode
        slots, start, stop, here = self.look_up(of, serials)
        there, dropped = here & (t >= start) & (t < stop), 0
        if not all_of(there):
            if any_of(outside := here & (t >= stop)):
                i = np.flatnonzero(outside)[0]
                raise SchemaError(f"update_priorities: episode {serials[i]} has steps 0 … {stop[i] - 1}, got {t[i]}")
            of, slots, t, values = of if of is None else of[there], slots[there], t[there], values[there]
            dropped = len(there) - len(t)
        return Steps(of, slots, t, self.leaves(of, slots, t), values), dropped

    def _steps_of_items(
        self, of: IntArray | None, serials: IntArray, t: IntArray | None, values: Any
    ) -> tuple[Steps, int]:
        """`_steps` of items of several."""
        slots, start, stop, here = self.look_up(of, serials)
        dropped = len(here) - int(np.count_nonzero(here))
        item, t, values = _each_step(np.where(here, stop, 0), t, values)
        there = np.flatnonzero(t >= start[item])
        item, t = item[there], t[there]
        of, slots = of if of is None else of[item], slots[item]
        return Steps(of, slots, t, self.leaves(of, slots, t), values[there]), dropped

    def _set(
        self, mine: dict[int, Priorities], steps: Steps, raw: FloatArray, powers: FloatArray, highest: float
    ) -> None:
        """Give steps of folders that are held their priorities.

        Args:
            raw, powers: (K,) |δ| + ε of the steps, and their priorities.
            highest: of `raw`.
        """
        of, slots, t, leaves, _ = steps
        maxima, listening = [0.0] * (max(mine) + 1), False
        for i, priorities in mine.items():
            file = priorities.file
            if not file.ready:
                file.prepare(leaves if of is None else leaves[of == i])
            maxima[i] = file.maximum
            listening |= priorities.changes.maxlen != 0
        for priorities in mine.values():  # those that do not end are made anew
            priorities.file.begin()
        self.tree.put(leaves, powers if np.minimum.reduce(powers) > 0 else with_zeros(powers), of)
        if highest > maxima[-1] or of is not None:
            for i in [0] if of is None else np.unique(of[raw > np.take(maxima, of)]).tolist():
                mine[i].rise_to(highest if of is None else float(raw[of == i].max()))
        if listening:  # before the end: of what is interrupted later nobody would be told
            for i, changed in by_tree(of, slots, t):
                mine[i].tell(*changed)
        for priorities in mine.values():
            priorities.file.end()


def _each_step(lengths: IntArray, t: IntArray | None, errors: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """(K,) of which item each step is that has an error, its t, the error. See `StepLeaves.update`."""
    if errors.ndim == 1:
        item = np.repeat(np.arange(len(lengths)), lengths)
        return item, np.arange(len(item)) - np.repeat(np.cumsum(lengths) - lengths, lengths), errors[item]
    first = np.zeros_like(lengths) if t is None else t
    steps = first[:, None] + np.arange(errors.shape[1])
    item, place = np.nonzero((steps >= 0) & (steps < lengths[:, None]))
    return item, steps[item, place], errors[item, place]
