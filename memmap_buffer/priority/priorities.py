"""Priorities that live on the disk with the data, under a name: one process owns them, the learner.

They follow the episodes by themselves: the steps of an episode that appears get the maximum priority so far in
any folder of the buffer, the steps of one that goes are drawn no more. `tree_file` tells of the bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from operator import attrgetter, methodcaller
from typing import Any, TypeAlias, TypeVar

import numpy as np

from memmap_buffer.dtypes import FloatArray, all_of, any_of
from memmap_buffer.errors import NotEnoughDataError, SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.journal import Journal
from memmap_buffer.format.lock import Turn
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import address_of, bytes_at, memory, process_id, renew_after_fork
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.priority.sum_tree import MAX_PRIORITY, WIDTH, SumTree, SumTrees, with_zeros
from memmap_buffer.priority.tree_file import TreeFile, steps_in

REMEMBERED = 4096  # changes that a tree of anchors may be behind

# Within a process all objects share one tree of a name: a second lock on its file would wait for the first for ever.
_open: weakref.WeakValueDictionary[tuple[tuple[int, int], str, int], Priorities] = weakref.WeakValueDictionary()
_opening = Turn()  # of all of them: two threads that draw for the first time share a tree
_numbers = count()
_NUMBER, _LOCK, _RELEASE = attrgetter("number"), attrgetter("lock"), methodcaller("release")
_SCALE = attrgetter("_file.alpha", "_file.epsilon")

T = TypeVar("T")

# Of one folder: the tree; numbers, some of which say where arrays lie; these arrays, which are to be held meanwhile.
Row: TypeAlias = tuple[SumTree, tuple[int, ...], tuple[IntArray, ...]]


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
        changes: (slots, t, or None for all their steps) of the last of `num_changes`, after `keep_changes`.
        number: of this object in the process; whoever takes several of the locks does so in this order.
        stamp: another one whenever the arrays may be others, or have others' steps.
        followed_to: the change counter of the folder to which they were followed; None in the middle of it.
        num_steps: steps that can be drawn.
    """

    def __init__(self, file: TreeFile) -> None:
        self._file = file
        self.lock = threading.RLock()
        self.changes: deque[tuple[IntArray, IntArray | None]] = deque(maxlen=0)
        self.num_changes = self.stamp = 0
        self.number = next(_numbers)
        renew_after_fork(self)
        self._users = 0
        self._highest: weakref.WeakSet[Highest] = weakref.WeakSet()
        self._journal: Journal | None = None  # of the storage, once they were followed
        self._mark = 0  # likewise
        self._order: IntArray = np.empty((2, 0), np.int64)  # (2, n) serials, ascending, and slots; some may be gone
        self.followed_to: int | None = None
        self.num_steps = 0
        self._unfinished = True  # whether some slots may still have leaves as they were before

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
                    highest.rise_to(priorities._file.maximum)
            return priorities

    @classmethod
    def _shared(cls, storage: Storage, name: str, alpha: float | None, epsilon: float | None) -> Priorities:
        file = TreeFile(storage, name, alpha=Prioritized.alpha, epsilon=Prioritized.epsilon)
        file.require_place()
        key = storage.folder.lock_key(), name, process_id()
        priorities = _open.get(key)
        if priorities is not None and not priorities.storage.is_of(storage.folder):  # the buffer was overwritten
            priorities._file.close()
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
            priorities._file.storage = storage
        priorities._users += 1
        priorities.use(alpha=alpha, epsilon=epsilon)
        return priorities

    def use(self, *, alpha: float | None, epsilon: float | None) -> None:
        """Go on with another α or ε; None for what it is.

        With another α all leaves are rescaled, one pass over all steps. Another ε is that of errors from now on.

        Raises:
            OSError: the disk is full.
            SchemaError: α is too large for the highest priority so far.
        """
        file = self._file
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
        self._file.own()
        try:
            self._load()
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
    def plain(self) -> bool:
        """Whether the tree can be one of `SumTrees`, and every slot has as many leaves."""
        return self.storage.layout.rows is None and self.tree.leaves >= WIDTH and not self.tree.minima

    @property
    def pair_words(self) -> IntArray:
        """(2 * slots,) of each slot the serial + 1, 0 for none, and which steps have a leaf: start | stop << 32."""
        return self._file.pair_words

    def serials_of(self, slots: IntArray) -> IntArray:
        """(B,) of the episodes in slots (B,), -1 for none."""
        serials: IntArray = self._file.pair_words.take(2 * slots)
        serials -= 1
        return serials

    def steps_of(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """(start, stop) (B,): the steps start … stop - 1 of slots (B,) have a leaf."""
        return self._file.steps_of(slots)

    def leaves(self, slots: IntArray, t: IntArray) -> IntArray:
        """The leaves of steps (B,)."""
        return self._file.storage.first_row(slots, False) + t

    def find(self, values: FloatArray) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
        """(slots, serials, t, priorities) of the steps (B,) at values of the cumulative sum; made anew if damaged.

        Raises:
            NotEnoughDataError: every priority is 0.
        """
        with self.lock:
            drawn = self._at(values)
            if drawn is None:
                self._load("its sums are damaged")
                self.follow()
                if not self.tree.total:
                    text = f"{self.storage.path}: nothing to draw: every item has priority 0"
                    raise NotEnoughDataError(text, episodes=0)
                drawn = self._at(np.minimum(values, self.tree.total))
            assert drawn is not None
            return drawn

    def _at(self, values: FloatArray) -> tuple[IntArray, IntArray, IntArray, FloatArray] | None:
        """None where a value leads to a leaf that is no step, as the sums are damaged."""
        file = self._file
        layout, tree = file.storage.layout, file.tree
        leaves, priorities = tree.find(values)
        if tree.loops is not None and layout.rows is None:
            slots, serials, t = np.empty((3, len(leaves)), np.int64)
            there = tree.loops.locate(leaves, layout.max_timesteps, file.pair_words, slots, serials, t)
        else:
            inside = np.minimum(leaves, file.leaves - 1)
            slots, t = self._steps(inside)
            (start, stop), serials = file.steps_of(slots), self.serials_of(slots)
            there = all_of((t >= start) & (t < stop) & (inside == leaves))
        return (slots, serials, t, priorities) if there and all_of(priorities > 0) else None

    def _steps(self, leaves: IntArray) -> tuple[IntArray, IntArray]:
        storage = self._file.storage
        if storage.layout.rows is None:
            slots = leaves // storage.layout.max_timesteps
            return slots, leaves - slots * storage.layout.max_timesteps
        visible = storage.table.visible
        first = storage.first_row(visible, False)
        order = np.argsort(first, kind="stable")
        slots = visible[order][np.maximum(np.searchsorted(first[order], leaves, side="right") - 1, 0)]
        return slots, leaves - storage.first_row(slots, False)

    # Changing

    @property
    def settled(self) -> bool:
        """Whether `follow` has nothing to do unless the folder changes."""
        return self._file.whole and not self._unfinished

    def follow(self) -> None:
        """Take in the episodes that were published or retired since; without any, one look at the change counter.

        Raises:
            WriterLostError: in a forked child.
            OSError: the disk is full.
        """
        storage = self._file.storage
        journal = storage.journal
        same = journal is self._journal and journal.is_current(storage, self._mark)
        if not same or self._unfinished or not self._file.whole:
            with self.lock:
                self.stamp += 1  # before anything is another, as it may be interrupted
                if not self._file.whole:
                    self._load()
                every, self._unfinished, self.followed_to = self._unfinished, True, None
                with journal.lock:
                    change = journal.follow(storage, self._mark if journal is self._journal else 0)
                    every |= change.slots is None
                    slots = np.arange(len(self._file.pairs)) if every else change.slots
                    pairs = journal.pairs(slots)  # type: ignore[arg-type]
                    self._order = journal.order[:, journal.head : journal.tail]
                    version, self.num_steps = journal.version, journal.num_steps
                self._enter(slots, pairs)  # type: ignore[arg-type]
                self._journal, self._mark, self.followed_to = journal, change.mark, version
                self._unfinished = False

    def update(self, serials: IntArray, t: IntArray, td_errors: FloatArray) -> int:
        """Give steps the priorities of their errors.

        Args:
            serials, t: (B,) int64; t below 0, where a window began before its episode, is step 0.
            td_errors: (B,) δ; of a step that stands twice the last counts.

        Returns:
            how many were dropped because their episode is gone, or this step of it.

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
        """(the leaves of the steps that are there; (B,) whether each is, None for all). Raises SchemaError."""
        file = self._file
        layout, loops = file.storage.layout, file.tree.loops
        if loops is not None and layout.rows is None and self._gapless:
            leaves = np.empty(len(serials), np.int64)
            shown, visible = self._order
            pairs, oldest = file.pair_words, shown.item(0)
            if loops.leaves(serials, t, oldest, visible, pairs, layout.max_timesteps, leaves):
                return leaves, None
        slots, here = self._places(serials)
        start, stop = file.steps_of(slots)
        t = np.maximum(t, 0)
        outside = here & (t >= stop)
        if any_of(outside):
            raise _no_step(serials, t, stop, outside)
        here &= t >= start
        if not all_of(here):
            slots, t = slots[here], t[here]
        return self.leaves(slots, t), here

    @property
    def _gapless(self) -> bool:
        """Whether the serials of `_order` follow one another."""
        shown = self._order[0]
        return len(shown) > 0 and shown.item(-1) - shown.item(0) == len(shown) - 1

    def _places(self, serials: IntArray) -> tuple[IntArray, Any]:
        """(slots, whether each episode (B,) has leaves there)."""
        shown, slots = self._order
        if not len(shown):
            return np.zeros_like(serials), np.zeros(len(serials), np.bool_)
        place = serials - shown.item(0) if self._gapless else np.searchsorted(shown, serials)
        chosen = slots.take(place, mode="clip")
        return chosen, self.serials_of(chosen) == serials

    def lengths_of(self, serials: IntArray) -> tuple[IntArray, Any]:
        """(the length of each episode (B,), 0 where it is gone; whether it is there)."""
        with self.lock:
            self.follow()
            slots, here = self._places(serials)
            return np.where(here, self._file.steps_of(slots)[1], 0), here

    def get(self, serials: IntArray, t: IntArray) -> FloatArray:
        """The priorities of steps (B,), 0 where one is gone. Raises SchemaError: an episode has no such step."""
        with self.lock:
            self.follow()
            leaves, here = self._leaves_of(serials, t)
            out = np.zeros(len(serials))
            out[... if here is None else here] = self.tree.get(leaves) + 0.0  # which makes 0.0 of -0.0
            return out

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
                self._file.keep_minima()

    def checkpoint(self) -> None:
        """Wait until the priorities are on the disk. Raises OSError."""
        with self.lock:
            self.follow()
            self._file.checkpoint()

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
        if not file.ready:
            file.prepare(leaves)
        powers = raw**file.alpha
        file.begin()
        file.tree.put(leaves, powers if file.epsilon > 0 else with_zeros(powers))
        if highest > file.maximum:
            self._raise(highest)
        if self.changes.maxlen:  # before the end: of what is interrupted later nobody would be told
            self._changed(*self._steps(leaves))
        file.end()

    def _raise(self, highest: float) -> None:
        self._file.raise_maximum(highest)
        for each in self._highest:
            each.rise_to(highest)

    def _priority_of_new(self) -> float:
        """The priority of steps that enter now."""
        for each in self._highest:
            self._file.raise_maximum(each.value)
        return self._file.default

    def row(self) -> Row | None:
        """For `Places`: where the pairs, the known serials and their slots lie, each as a number of eight bytes; the
        first of these serials, how many there are; the leaves of a slot."""
        shown, slots = self._order
        if not self.plain or not len(shown):
            return None
        arrays = self._file.pair_words, shown, slots
        at = (address_of(array) >> 3 for array in arrays)
        return self.tree, (*at, shown.item(0), len(shown), self.storage.layout.max_timesteps), arrays

    def _enter(self, slots: IntArray, shown: list[tuple[int, int]] | IntArray) -> None:
        """Give leaves to the steps that slots show, and to no others of theirs; shown: `Journal.pairs`."""
        if not len(slots) or (isinstance(shown, list) and self._enter_few(slots, shown)):
            return
        file, pairs = self._file, np.asarray(shown)
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
                self._changed(slots[whole], None)
            for leaves in file.blocks(slots[~whole], last[~whole], stop[~whole]):
                self._changed(*self._steps(leaves))

    def _enter_few(self, slots: IntArray, pairs: list[tuple[int, int]]) -> bool:
        """`_enter` of slots that show a few steps more or fewer of the episodes that they had; False for others."""
        file = self._file
        words, per_slot = file.pair_words, self.storage.layout.max_timesteps
        gone: list[int] = []
        come: list[int] = []
        for slot, (number, steps) in zip(slots.tolist(), pairs, strict=True):
            old, start, stop = words.item(2 * slot + 1), steps & 0xFFFFFFFF, steps >> 32
            was, had, first = old & 0xFFFFFFFF, old >> 32 & 0xFFFFFFFF, slot * per_slot
            if not number or words.item(2 * slot) != number or not was <= start <= had <= stop:
                return False
            gone += range(first + was, first + start)
            come += range(first + had, first + stop)
        if not gone and not come:
            return True
        leaves = np.array(gone + come)
        file.prepare(leaves)
        file.begin()
        self.tree.put(leaves, np.repeat([0.0, self._priority_of_new()], [len(gone), len(come)]))
        file.pairs[slots] = pairs
        file.put_pairs(slots)
        file.end()
        if self.changes.maxlen and come:
            self._changed(*self._steps(leaves[len(gone) :]))
        return True

    def _replace(self, gone: Any, come: Any, slots: IntArray, pairs: IntArray) -> None:
        file = self._file
        for steps in (gone, come):  # a full disk is met before anything has changed
            for leaves in file.blocks(*steps):
                file.prepare(leaves)
        file.begin()
        for steps, priority in ((gone, 0.0), (come, self._priority_of_new())):
            for leaves in file.blocks(*steps):
                self.tree.put(leaves, np.full(len(leaves), priority))
        file.pairs[slots] = pairs
        file.put_pairs(slots)
        file.end()

    def _load(self, distrust: str = "") -> None:
        self.stamp += 1
        self._file.load(distrust)
        self._all_changed()

    def _all_changed(self) -> None:
        """The tree was made anew."""
        self._unfinished = True
        self._changed(np.arange(len(self._file.pairs)), None)

    def _changed(self, slots: IntArray, t: IntArray | None) -> None:
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


class Places:
    """Where the arrays of several folders lie, so that one call reads from all.

    Each folder's has a `row`, None where it is not plain; and a `stamp`, another one where that may be another. Whoever
    reads holds the lock of what is read. The arrays are held, so that no address ever leads to what they are not.

    Attributes:
        rows: (F, N) the numbers of the folders' rows.
        index: (F,) which of `trees` is that of each folder; -1 where it has no row.
        trees: None where no folder has a row.
    """

    def __init__(self) -> None:
        self._seen: tuple[Sequence[Any], list[int]] = (), []  # the folders' and their stamps
        self._rows: list[Row | None] = []
        self.rows: IntArray = np.zeros((0, 0), np.int64)
        self.index: IntArray = np.zeros(0, np.int64)
        self.trees: SumTrees | None = None

    def follow(self, each: Sequence[Any], locked: Iterable[int] | None = None) -> None:
        """Look at those again that changed.

        Args:
            each: of the folders; None for one that is not there.
            locked: which of them may be looked at, as this thread holds their locks; None for all.
        """
        looked = range(len(each)) if locked is None else list(locked)
        stamps = [0 if (folder := each[i]) is None else folder.stamp for i in looked]
        before, seen = self._seen
        same = each is before or each == before
        if same and stamps == (seen if locked is None else [seen[i] for i in looked]):
            return
        self._seen = (), []  # until all is done
        if len(before) != len(each):
            before, seen, self._rows = [None] * len(each), [0] * len(each), [None] * len(each)
        for i, folder in enumerate(each):
            if folder is not before[i]:
                self._rows[i], seen[i] = None, -1
        for i, stamp in zip(looked, stamps, strict=True):
            if stamp != seen[i]:
                folder = each[i]
                self._rows[i], seen[i] = None if folder is None else folder.row(), stamp
        plain = [i for i, row in enumerate(self._rows) if row is not None]
        rows = [row for row in self._rows if row is not None]
        trees = tuple(tree for tree, *_ in rows)
        if self.trees is None or self.trees.trees != trees:
            self.trees = SumTrees(trees) if trees else None
        width = len(rows[0][1]) if rows else 0
        self.rows = np.array([(0,) * width if row is None else row[1] for row in self._rows], np.int64)
        self.index = np.full(len(each), -1)
        self.index[plain] = np.arange(len(plain))
        self._seen = each, seen


class SeveralPriorities:
    """The priorities of several folders, given errors by one call: a call for each would outweigh a batch.

    All leaves are stored together. So of a process that is killed meanwhile all these trees are made anew of their
    leaves, and not one.
    """

    def __init__(self) -> None:
        self._places = Places()
        self._memory = memory().view(np.int64)
        self._turn = Turn()

    def update(
        self, each: Sequence[Priorities | None], of: IntArray, serials: IntArray, t: IntArray, td_errors: FloatArray
    ) -> int | None:
        """`Priorities.update` of steps in several folders; where it raises, nothing was changed in any.

        Args:
            each: of the folders; None for one that is not open.
            of: (B,) in which of them each step is.

        Returns:
            how many were dropped; None where it has to be done folder by folder, as not all of these are plain.
        """
        touched = np.flatnonzero(np.bincount(of)).tolist()
        mine = {i: priorities for i in touched if (priorities := each[i]) is not None}
        if not mine or len(mine) < len(touched):
            return None
        work = partial(self._update, each, mine, of, serials, t, td_errors)
        with self._turn.lock:
            return while_locked(in_turn(mine.values()), work)

    def _update(
        self,
        each: Sequence[Priorities | None],
        mine: Mapping[int, Priorities],
        of: IntArray,
        serials: IntArray,
        t: IntArray,
        td_errors: FloatArray,
    ) -> int | None:
        """`update` of folders whose locks are held."""
        for priorities in mine.values():
            priorities.follow()
        self._places.follow(each, mine)
        index, alike = self._places.index.take(of), set(map(_SCALE, mine.values()))
        if not all_of(index >= 0) or len(alike) > 1:
            return None
        leaves, here = self._leaves_of(of, serials, np.maximum(t, 0))
        raw, _ = next(iter(mine.values()))._raw(td_errors)
        if not all_of(here):
            of, index, leaves, raw = of[here], index[here], leaves[here], raw[here]
        if len(leaves):
            self._set(mine, of, index, leaves, raw)
        return len(serials) - len(leaves)

    def _leaves_of(self, of: IntArray, serials: IntArray, t: IntArray) -> tuple[IntArray, Any]:
        """(the leaves (B,), whether each step is there). Raises SchemaError: an episode has no such step."""
        pairs, shown, order, oldest, number, per_slot = self._places.rows.take(of, axis=0).T
        place = np.minimum(np.maximum(serials - oldest, 0), number - 1)  # there, where they follow one another
        if not all_of(self._memory.take(shown + place) == serials):
            place = self._last_up_to(serials, shown, number)
        slots = self._memory.take(order + place)
        pair = bytes_at(8 * pairs + 16 * slots, 16).view(np.int64).reshape(-1, 2)
        here, (start, stop) = pair[:, 0] == serials + 1, steps_in(pair[:, 1])
        outside = here & (t >= stop)
        if any_of(outside):
            raise _no_step(serials, t, stop, outside)
        return slots * per_slot + t, here & (t >= start)

    def _last_up_to(self, values: IntArray, begin: IntArray, number: IntArray) -> IntArray:
        """The place of the last of `number` ascending integers from `begin` on that is at most a value (B,); else 0."""
        place = np.zeros_like(values)
        step = 1 << int(number.max()).bit_length()
        while step := step >> 1:
            further = np.minimum(place + step, number - 1)
            place = np.where(self._memory.take(begin + further) <= values, further, place)
        return place

    def _set(
        self, mine: Mapping[int, Priorities], of: IntArray, index: IntArray, leaves: IntArray, raw: FloatArray
    ) -> None:
        trees, maxima = self._places.trees, np.zeros(len(self._places.index))
        assert trees is not None
        for i, priorities in mine.items():
            if not priorities._file.ready:
                priorities._file.prepare(leaves[of == i])
            maxima[i] = priorities._file.maximum
        file = next(iter(mine.values()))._file
        powers = raw**file.alpha
        for priorities in mine.values():  # those that do not end are made anew
            priorities._file.begin()
        trees.put(index, leaves, powers if file.epsilon > 0 else with_zeros(powers))
        for i in np.unique(of[raw > maxima.take(of)]).tolist():
            mine[i]._raise(float(raw[of == i].max()))
        if any(priorities.changes.maxlen for priorities in mine.values()):
            order = np.argsort(of, kind="stable")
            slots, t = np.divmod(leaves, self._places.rows[:, -1].take(of))
            slots, t, ends = slots[order], t[order], np.bincount(of, minlength=len(maxima)).cumsum().tolist()
            for i, priorities in mine.items():
                if priorities.changes.maxlen:
                    part = slice(ends[i - 1] if i else 0, ends[i])
                    priorities._changed(slots[part], t[part])
        for priorities in mine.values():
            priorities._file.end()


def _no_step(serials: IntArray, t: IntArray, stop: IntArray, outside: Any) -> SchemaError:
    i = np.flatnonzero(outside)[0]
    return SchemaError(f"update_priorities: episode {serials[i]} has steps 0 … {stop[i] - 1}, got {t[i]}")
