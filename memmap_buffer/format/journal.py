"""The account of the visible episodes of one folder: all records are read once, then only the records that change.

Each open folder has one `Journal`, and nothing else decides what is visible in it. A follower (whatever keeps something
that depends on the episodes) holds a mark and asks for the changes since that mark. Callers that do not follow get an
`EpisodeTable`, which is of one moment. To follow one appended step costs the same for any number of slots and episodes;
to make an `EpisodeTable` after each step does not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import all_of, any_of
from memmap_buffer.format.episode_table import EpisodeTable, IntArray, visible_slots
from memmap_buffer.format.folder import UPDATE
from memmap_buffer.format.records import (
    CHECK,
    DELETED,
    GENERATION,
    INNER_END,
    OPEN,
    SHOWN,
    START,
    STATE_WORD,
    STOP,
    Columns,
    changed_records,
    columns_of,
)
from memmap_buffer.format.syscalls import renew_after_fork

if TYPE_CHECKING:
    from memmap_buffer.format.storage import Storage

log = logging.getLogger("memmap_buffer")
TWICE = "%s: serials %s stand in two slots each and are not served; see `verify`"
NO_SLOTS: IntArray = np.empty(0, np.int64)
_NO_ORDER: IntArray = np.empty((2, 0), np.int64)
FEW = 16  # up to so many slots are read one by one: a call of numpy takes as long as ten plain numbers
FEWER = 12  # the same bound for `_show_few`, which reads more numbers of each slot
REMEMBERED = 1024  # the changes that are kept: a follower further behind must read everything anew
UPDATE_SECONDS = 1.0  # the longest wait for an episode that is being updated: its writer may be stopped, or dead
LOW = 2**32 - 1
_ODD = np.uint64(1)
CHANGES, BASE = STATE_WORD["changes"], STATE_WORD["base"]
_STEPS = ("start", "length")
Moved: TypeAlias = tuple[list[int], list[int], list[int]] | tuple[IntArray, IntArray, IntArray]


class Change(NamedTuple):
    """The changes since a mark.

    Attributes:
        mark: the mark of now, to be handed in at the next call.
        slots: the slots whose record or visibility may have changed, each once; None where any slot may have changed.
        moved: (slots, how far the `start` of each rose, how far its `stop` rose) of episodes that show other steps, and
            in which nothing else changed; lists where the slots are few.
        others: the slots in which more may have changed; None where any slot may have changed.
    """

    mark: int
    slots: IntArray | None
    moved: Moved
    others: IntArray | None


NOTHING: Moved = [], [], []


@dataclass(frozen=True)
class Positions:
    """The episodes by position, oldest first, without a list of them.

    Args:
        slots: (n,) the slots of these episodes and of others, oldest first.
        others: (k,) where others stand in `slots`, ascending.
        serial: by slot, the serial of its episode.
    """

    slots: IntArray
    others: IntArray
    serial: IntArray

    def __len__(self) -> int:
        return len(self.slots) - len(self.others)

    def slots_at(self, positions: IntArray) -> IntArray:
        """The slots of the episodes at some positions, each 0 … len - 1."""
        before = np.searchsorted(self.others - np.arange(len(self.others)), positions, side="right")
        return self.slots.take(positions + before)


class Journal:
    """The visible episodes of one folder. A thread that reads `table`, `shown` or `order` holds `lock` since `follow`.

    Attributes:
        lock: held by the one thread that follows or reads.
        mark: a counter, raised each time that changes are taken in.
        table: the records by slot, changed in place. Read its columns only: `visible`, `changes` and `base` are not
            kept up to date.
        shown: (slots,) whether a slot holds a visible episode.
        num_steps: visible timesteps.
        version: the folder's change counter up to which changes were taken in; None while some are being taken in.
        order: (2, n) serials and slots, by ascending serials: entries `head` … `tail` - 1 are the visible episodes,
            and some that are gone. New episodes are added at `tail`, and `head` moves past old ones. A new array
            replaces it when all records are read anew.
    """

    table: EpisodeTable
    shown: npt.NDArray[np.bool_]
    num_steps = 0

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version: int | None = None
        self.mark = 0
        self._num_damaged = 0
        self._num_episodes = 0
        self.order: IntArray = _NO_ORDER
        self.head = self.tail = 0
        self._gone = NO_SLOTS  # the entries of `order` whose episodes are gone, ascending; of those before `head` some
        self._moved = NOTHING  # `Change.moved` of the changes that are being taken in
        self._hidden = 0  # episodes with lower serials are not shown any more
        self._moment: tuple[int, EpisodeTable] | None = None  # the last one handed out, and before it its mark
        self._shared: frozenset[str] = frozenset()  # columns of `table` that `_moment` shares: copied before a change
        self._twice = self._untold = NO_SLOTS  # serials that stand in two slots; those that the log does not name yet
        self._visible: IntArray | None = None  # visible slots, by ascending serials; None where not counted yet
        self._base = 0  # the folder's base, as last taken in
        self._is_spoilt = False  # whether every change makes it read all records anew
        self._followed = False  # whether the parts that only followers need are there: see `_begin_to_follow`
        renew_after_fork(self)

    def renew(self) -> None:
        """In a forked child: begin anew, as another thread of the parent may have been in the middle of `follow`."""
        self.lock, self.version = threading.RLock(), None

    def is_current(self, storage: Storage, mark: int) -> bool:
        """Whether nothing has changed since `mark`. Needs no lock.

        `mark` is compared last: a thread that takes changes in sets `version` to None before it raises `mark`.
        """
        same = storage.maps.state.item(CHANGES) == self.version and storage.num_damaged == self._num_damaged
        return same and mark == self.mark

    def follow(self, storage: Storage, mark: int) -> Change:
        """Take in the changes of the folder; returns those since `mark` (0: the caller begins to follow).

        The caller holds `lock`, and keeps it until it has taken in the changes itself.
        """
        self._catch_up(storage)
        if not self._followed:
            self._begin_to_follow(storage)
        behind = self.mark - mark
        if not behind:
            return Change(mark, NO_SLOTS, NOTHING, NO_SLOTS)
        if behind > len(self._changes):
            return Change(self.mark, None, NOTHING, None)
        if behind == 1:
            return self._changes[-1]
        later = islice(self._changes, len(self._changes) - behind, None)
        several: list[IntArray] = [change.slots for change in later]  # type: ignore[misc]  # kept changes name them
        slots = np.unique(np.concatenate(several))
        return Change(self.mark, slots, NOTHING, slots)

    def at_once(self, storage: Storage, *, anew: bool = False) -> EpisodeTable:
        """The episode table of this moment; the same object as long as nothing has changed.

        Args: anew: read all records, without a look at the change counter or the schema.
        """
        with self.lock:
            if anew:
                self.version = None
            self._catch_up(storage, anew=anew)
            untold, self._untold = self._untold, NO_SLOTS
            moment = self._moment
            if moment is None or moment[0] != self.mark:
                if self._visible is None:
                    self._visible = np.delete(self.order[1, self.head : self.tail], self._gone_since_head)
                version: int = self.version  # type: ignore[assignment]
                table = replace(self.table, changes=version, base=self._base, visible=self._visible)
                self._shared = frozenset(Columns._fields)
                moment = self._moment = self.mark, table
        if len(untold):  # without the lock: a log handler may wait for a thread that needs it
            log.warning(TWICE, storage.path, untold)
        return moment[1]

    def whole(self, storage: Storage) -> Positions:
        """The episodes of now that show every step, oldest first. The caller holds `lock` while it reads them."""
        self._catch_up(storage)
        if self._followed:
            table, slots, others = self.table, self.order[1, self.head : self.tail], self._gone_since_head
        else:
            table = self._moment[1]  # type: ignore[index]
            slots, others = table.visible, NO_SLOTS
        if storage.layout.capacity is not None:
            others = np.union1d(others, np.flatnonzero(table.start.take(slots)))
        return Positions(slots, others, table.serial)

    @property
    def _gone_since_head(self) -> IntArray:
        return self._gone[np.searchsorted(self._gone, self.head) :] - self.head

    def doubt(self) -> None:
        """Have the next call read all records anew: an episode was found damaged, and must not be shown any more."""
        with self.lock:
            self.version = None

    def shows(self, storage: Storage, slots: IntArray, serials: IntArray) -> npt.NDArray[np.bool_]:
        """(B,) whether each slot now holds the visible episode of the serial beside it."""
        with self.lock:
            self._catch_up(storage)
            if not self._followed:
                return self._moment[1].shows(slots, serials)  # type: ignore[index]
            return np.asarray(self.shown.take(slots) & (self.table.serial.take(slots) == serials))

    def has_inner_end(self, slots: IntArray) -> bool:
        """Whether a visible episode in slots (B,) may have an end of an episode marked before its last step."""
        table = self.table
        flags = table.of(table.flags, slots) * table.of(self.shown, slots)
        return bool(np.bitwise_or.reduce(flags, initial=0) & INNER_END)

    def pairs(self, slots: IntArray) -> list[tuple[int, int]] | IntArray:
        """(n, 2): the serial + 1 of each slot, and its shown steps as start | stop << 32; zeros where it shows none.

        A list where the slots are few.
        """
        table, shown = self.table, self.shown
        serial, start, stop = table.serial, table.start, table.length
        if len(slots) <= FEW:
            return [
                (serial.item(slot) + 1, start.item(slot) | stop.item(slot) << 32) if shown.item(slot) else (0, 0)
                for slot in slots.tolist()
            ]
        out = np.empty((len(slots), 2), np.int64)
        out[:, 0], out[:, 1] = serial.take(slots) + 1, start.take(slots) | stop.take(slots) << 32
        out *= shown.take(slots)[:, None]
        return out

    # Reading

    def _catch_up(self, storage: Storage, *, anew: bool = False, again: bool = False) -> None:
        """Take in the changes of the folder; `again`: right after it was far behind, so that it is no endless chase.

        Raises SchemaMismatchError: the change counter does not tell which slots changed, and the schema was changed so
        that `Storage.require_schema` refuses it.
        """
        changes, before = storage.maps.state.item(CHANGES), self.version
        if changes == before and storage.num_damaged == self._num_damaged:
            return
        spoilt = self._is_spoilt or storage.num_damaged
        may_be_followed = before is not None and not spoilt
        slots = storage.changed_since(before) if may_be_followed else None  # type: ignore[arg-type]
        if slots is None and not anew:
            storage.require_schema()
        self.version = None  # until all is done: an interruption leaves None, and all is read anew
        others, is_far_behind = None, slots is None
        if may_be_followed:
            if not self._followed:
                self._begin_to_follow(storage)
            if slots is None:
                slots = changed_records(storage.maps.words, self.table.columns)
            others = self._take_in(storage, slots)
        if others is None:
            self.mark += 1
            changes = self._read(storage)
        else:
            if len(others):
                slots = np.array(sorted({*slots.tolist(), *others.tolist()}))  # type: ignore[union-attr]
            self._changes.append(Change(self.mark + 1, slots, self._moved, others))
            self.mark += 1
        self.version = changes
        # A record may have changed after `changed_records` had passed it, while a newer episode was taken in.
        if is_far_behind and others is not None and not again:
            self._catch_up(storage, again=True)

    def _read(self, storage: Storage) -> int:
        """Read all records into an episode table; returns the change counter before they were read."""
        before = None
        if self._followed:
            before = self.shown, self.table.serial
        elif self._moment is not None:
            before = self._moment[1].shown, self._moment[1].serial
        deadline = time.monotonic() + UPDATE_SECONDS
        while True:
            changes, base, self._num_damaged = storage.changes, storage.state("base"), storage.num_damaged
            columns = storage.columns()
            # During an `update` a visible episode has an odd generation; after the writer's death it stays odd.
            if not _being_updated(storage, columns, base, before) or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        visible, self._twice = visible_slots(columns, base, storage.layout)
        self._base, self._untold = base, self._twice
        # In packed folders nothing changes. In doubt, or with a serial in two slots, the changed records do not tell
        # what is visible.
        self._is_spoilt = storage.layout.rows is not None or storage.in_doubt or len(self._twice) > 0
        self._moment = self.mark, EpisodeTable(changes, base, *columns, visible)
        self._followed = False
        return changes

    def _begin_to_follow(self, storage: Storage) -> None:
        """Make the parts that only followers need, from the episode table that was read last."""
        table: EpisodeTable = self._moment[1]  # type: ignore[index]
        self.shown, self.num_steps, self._visible = table.shown.copy(), table.steps, table.visible
        self.head, self.tail, self._num_episodes = 0, len(table), len(table)
        self.order = np.empty((2, len(table) + max(64, len(table.serial))), np.int64)
        self.order[0, : self.tail] = table.of(table.serial, table.visible)
        self.order[1, : self.tail] = table.visible
        self._gone = NO_SLOTS
        full = len(table) >= storage.layout.max_episodes
        self._hidden = self.order.item(0, 0) if full else table.base
        self.table, self._shared = replace(table, visible=NO_SLOTS), frozenset(Columns._fields)
        self._most = _most_of(table.flags, table.length, self.shown, storage)
        self._changes = deque[Change](maxlen=REMEMBERED)  # the newest since all was read; the last led to `mark`
        self._followed = True

    def _own(self, names: Iterable[str]) -> None:
        """Copy the columns `names` that an episode table shares with `table`, before they are changed in place."""
        shared = self._shared.intersection(names)
        if shared:
            self.table = replace(self.table, **{name: getattr(self.table, name).copy() for name in shared})
            self._shared -= shared

    def _take_in(self, storage: Storage, slots: IntArray) -> IntArray | None:
        """Take in the records of `slots`, which changed.

        Returns: the slots in which other things than shown steps changed, retired ones included; None where these
            records do not tell what is visible.
        """
        base = storage.maps.state.item(BASE)
        if base < self._base:  # a repair lowered it
            return None
        self._moved = NOTHING
        if base <= self._hidden:
            slots = (self._show_few if len(slots) <= FEWER else self._show)(storage, slots)
            if not len(slots):
                return slots
        table = self.table
        self._base = base
        now = columns_of(storage.maps.words[slots], storage.layout.max_timesteps, None, slots)
        self._hidden = max(self._hidden, base)
        has_steps = now.start < now.length
        shown = now.valid & has_steps & (now.flags & DELETED == 0) & (now.serial >= self._hidden)
        was_shown = self.shown.take(slots)
        is_same = was_shown & (now.serial == table.serial.take(slots))
        if any_of(is_same & has_steps & ~now.valid):  # an `update` rewrites the episode, and will show it again
            return None
        new = (shown > is_same).nonzero()[0]
        if len(new) and not self._append(now.serial[new], slots[new]):
            return None
        steps_before = (table.length.take(slots) - table.start.take(slots)) * was_shown
        self.num_steps += int(np.add.reduce((now.length - now.start) * shown - steps_before))
        self._num_episodes += int(np.count_nonzero(shown)) - int(np.count_nonzero(was_shown))
        if self._num_episodes < storage.layout.max_episodes and self._hidden > base:
            return None  # an older episode, which only `max_episodes` hid, may be visible again
        leaving = was_shown > (shown & is_same)
        if any_of(leaving):
            entries = self.order[0, : self.tail].searchsorted(table.serial.take(slots[leaving]))
            since_head = self._gone[np.searchsorted(self._gone, self.head) :]  # so a ring does not remember all of them
            self._gone = np.sort(np.concatenate([since_head, entries]), kind="stable")
        self._own(Columns._fields)
        columns: tuple[Any, ...] = self.table.columns
        for column, values in zip(columns, now, strict=True):
            column[slots] = values
        self.shown[slots], self._visible = shown, None
        self._most[slots] = _most_of(now.flags, now.length, shown, storage)
        gone = self._retire(storage.layout.max_episodes)
        return np.array(sorted({*slots.tolist(), *gone})) if gone else slots

    def _show(self, storage: Storage, slots: IntArray) -> IntArray:
        """Take in slots of which only the shown steps changed; returns the others, of which nothing was taken in.

        Whatever else a writer changes in a record, it changes the check or the generation with it.
        """
        table, words, rest = self.table, storage.maps.words.take(slots, axis=0), NO_SLOTS
        halves: npt.NDArray[np.uint32] = words.view(np.uint32)
        start, stop = halves[:, START].astype(np.int64), halves[:, STOP].astype(np.int64)
        dropped, added = start - table.start.take(slots), stop - table.length.take(slots)
        right = words[:, CHECK] == table.check.take(slots)
        right &= words[:, GENERATION] == table.generation.take(slots)
        right &= stop <= self._most.take(slots)
        right &= start < stop
        right &= added >= 0
        if not all_of(right):
            rest = slots[~right]
            slots, start, stop, dropped, added = (each[right] for each in (slots, start, stop, dropped, added))
        self.num_steps += sum((added - dropped).tolist())
        trimmed = np.count_nonzero(dropped) > 0
        if not self._shared.isdisjoint(_STEPS):
            self._own(_STEPS if trimmed else ("length",))
        if trimmed:
            self.table.start[slots] = start
        self.table.length[slots] = stop
        self._moved = slots, dropped, added
        return rest

    def _show_few(self, storage: Storage, slots: IntArray) -> IntArray:
        """Take in a few slots one by one, as `_show` does."""
        words, rest = storage.maps.words, []
        moved, dropped, added = [], [], []
        if not self._shared.isdisjoint(_STEPS):
            self._own(_STEPS)
        table = self.table
        for slot in slots.tolist():
            word = words.item(slot, SHOWN)  # read before check and generation, which prove whose it is
            same = words.item(slot, CHECK) == table.check.item(slot)
            start, stop, before = word & LOW, word >> 32, table.length.item(slot)
            same = same and words.item(slot, GENERATION) == table.generation.item(slot)
            if not (same and start < stop and before <= stop <= self._most.item(slot)):
                rest.append(slot)
                continue
            moved.append(slot)
            dropped.append(start - table.start.item(slot))
            added.append(stop - before)
            table.start[slot], table.length[slot] = start, stop
        self.num_steps += sum(added) - sum(dropped)
        self._moved = moved, dropped, added
        return np.array(rest, np.int64) if rest else NO_SLOTS

    def _append(self, serials: IntArray, slots: IntArray) -> bool:
        """Add new episodes to `order`; False where it has no room, or an episode is not newer than all before."""
        stop = self.tail + len(serials)
        last = self.order.item(0, self.tail - 1) if self.tail > self.head else -1
        if len(serials) > 1:
            order = np.argsort(serials)
            serials, slots = serials[order], slots[order]
        if stop > self.order.shape[1] or serials[0] <= last or any_of(serials[1:] == serials[:-1]):
            return False
        self.order[:, self.tail : stop] = serials, slots
        self.tail = stop
        return True

    def _retire(self, max_episodes: int) -> list[int]:
        """Hide the oldest episodes, those that are too many or below the base; returns their slots."""
        gone = []
        while self.head < self.tail:
            serial, slot = self.order[:, self.head].tolist()
            if self.shown[slot] and self.table.serial.item(slot) == serial:
                if serial >= self._hidden and self._num_episodes <= max_episodes:
                    break
                self.shown[slot], self._most[slot] = False, 0
                self.num_steps -= self.table.length.item(slot) - self.table.start.item(slot)
                self._num_episodes -= 1
                self._hidden = max(self._hidden, serial + 1)
                gone.append(slot)
            self.head += 1
        return gone


def _most_of(flags: npt.NDArray[np.uint32], stop: IntArray, shown: npt.NDArray[np.bool_], storage: Storage) -> IntArray:
    """(n,) the highest `stop` that n slots may get while check and generation of their records stay.

    An open episode may grow to `max_timesteps`, another one keeps its length, and a slot that shows nothing gets 0.

    Args: flags, stop, shown: (n,) of their records, and whether the slot shows an episode.
    """
    return np.where(flags & OPEN != 0, storage.layout.max_timesteps, stop) * shown


def _being_updated(
    storage: Storage, now: Columns, base: int, before: tuple[npt.NDArray[np.bool_], IntArray] | None
) -> bool:
    """Whether an `update` hides an episode: its record was copied with an odd generation, or changed during the copy.

    Args:
        base: the folder's base. An episode below it is none that an update hides: it may be one that a ring retired
            while it is open, and that its writer goes on with, with an odd generation.
        before: (slots,) which slots were shown when the records were last read, and the serials of then. None at the
            first reading: then any episode may be the one, but only if the file of an update was made just now.
    """
    gone = np.flatnonzero(~now.valid & (now.start < now.length))
    gone = gone[now.serial.take(gone) >= base]
    if not len(gone):
        return False
    if before is None:
        made = storage.folder.marks(UPDATE)[1]
        gone = gone if time.time_ns() - made < UPDATE_SECONDS * 1e9 else gone[:0]
    else:
        shown, serials = before
        gone = gone[shown[gone] & (now.serial[gone] == serials[gone])]
    generation = now.generation[gone]  # as copied, not as it is by now: the update may be over, the copy lacks it still
    moved = storage.maps.words[gone, GENERATION] != generation
    return bool((moved | (generation & _ODD == 1)).any())
