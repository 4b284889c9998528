"""What is visible in one folder: read of the records, then followed change by change.

There is one `Journal` a folder that is open, and it is the only reader of the table of records. Whoever keeps something
of the episodes follows it with a mark of its own, by which it is told what changed since; `EpisodeTable` is what it
says of one moment. What one appended step costs depends on no count, as long as nobody asks for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import any_of
from memmap_buffer.format.episode_table import EpisodeTable, IntArray, visible_slots
from memmap_buffer.format.folder import UPDATE
from memmap_buffer.format.records import (
    CHECK,
    DELETED,
    GENERATION,
    INNER_END,
    OPEN,
    SHOWN,
    STATE_WORD,
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
FEW = 16  # slots: up to so many are looked at one by one, as a call of numpy takes as long as ten numbers
FEWER = 8  # of which little more is looked at
REMEMBERED = 1024  # changes that whoever follows may be behind before it has to read all anew
UPDATE_SECONDS = 1.0  # that an episode which is being updated is waited for: its writer may stand still meanwhile
OPENING_SECONDS = 0.1  # likewise by who opens a folder, and cannot know whether that writer is alive
LOW = 2**32 - 1
_LOW, _HALF, _ODD = np.uint64(LOW), np.uint64(32), np.uint64(1)
CHANGES, BASE = STATE_WORD["changes"], STATE_WORD["base"]
_STEPS = ("start", "length")
Moved: TypeAlias = tuple[list[int], list[int], list[int]] | tuple[IntArray, IntArray, IntArray]


class Change(NamedTuple):
    """The changes since a mark.

    Attributes:
        mark: of now.
        slots: whose record or visibility may have changed, each once; None where that may be any.
        moved: where it is nothing but that episodes show other steps: (slots, by how many the `start` of each is
            higher, by how many its `stop` is), lists where they are few; else None.
    """

    mark: int
    slots: IntArray | None
    moved: Moved | None


NOTHING: Moved = [], [], []


class Journal:
    """The visible episodes of one folder; whoever reads its tables holds `lock` from `follow` on.

    Attributes:
        lock: of a thread that follows it.
        mark: the number of changes that were taken in; another one whenever anything is another.
        table: what the records said by slot, changed in place; only columns are to be read.
        shown: (slots,) whether a slot holds a visible episode.
        num_steps: visible timesteps.
        version: the change counter of the folder to which they were followed; None in the middle of it.
        order: (2, n) the serials and slots from `head` to `tail` are those of the episodes, by ascending serials, with
            some that are gone. Entries behind them are added, and others taken off the front; another array takes its
            place when all is read anew.
    """

    table: EpisodeTable
    shown: npt.NDArray[np.bool_]
    num_steps = 0

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version: int | None = None
        self.mark = 0
        self._changes: deque[Change] = deque(maxlen=REMEMBERED)  # up to `mark`
        self._num_damaged = 0
        self._num_episodes = 0
        self.order: IntArray = np.empty((2, 0), np.int64)
        self.head = self.tail = 0
        self._moved: Moved | None = None  # by what is being taken in
        self._hidden = 0  # episodes of lower serials are not shown any more
        self._moment: tuple[int, EpisodeTable] | None = None  # the mark of a table of one moment, and that
        self._lent: frozenset[str] = frozenset()  # columns that such a table shares
        self._twice = self._untold = NO_SLOTS  # serials that stand in two slots; those of which the log does not tell
        self._visible: IntArray | None = None  # slots, by ascending serials; None where that is another
        self._base = 0  # of the folder, as of then
        self._is_spoilt = False  # whether it is read anew whatever changed
        self._followed = False  # whether what only followers need is there
        renew_after_fork(self)

    def renew(self) -> None:
        """In a forked child: another thread may have been following."""
        self.lock, self.version = threading.RLock(), None

    def is_current(self, storage: Storage, mark: int) -> bool:
        """Whether nothing has changed since `mark`, which is compared last: the version is another before it is."""
        same = storage.maps.state.item(CHANGES) == self.version and storage.num_damaged == self._num_damaged
        return same and mark == self.mark

    def follow(self, storage: Storage, mark: int) -> Change:
        """Take in what changed in the folder, and tell what did since `mark`, 0 for who begins.

        Who calls it holds `lock`, and goes on to hold it while it takes that in.
        """
        self._catch_up(storage)
        if not self._followed:
            self._begin_to_follow(storage)
        behind = self.mark - mark
        if not behind:
            return Change(mark, NO_SLOTS, NOTHING)
        if behind > len(self._changes):
            return Change(self.mark, None, None)
        if behind == 1:
            return self._changes[-1]
        later = islice(self._changes, len(self._changes) - behind, None)
        slots: list[IntArray] = [change.slots for change in later]  # type: ignore[misc]  # of a kept one they are known
        return Change(self.mark, np.unique(np.concatenate(slots)), None)

    def at_once(self, storage: Storage, *, anew: bool = False) -> EpisodeTable:
        """The table of this moment; the same one as long as nothing has changed.

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
                    serials, slots = self.order[:, self.head : self.tail]
                    self._visible = slots[self.shown.take(slots) & (self.table.serial.take(slots) == serials)]
                version: int = self.version  # type: ignore[assignment]
                table = replace(self.table, changes=version, base=self._base, visible=self._visible)
                self._lent = frozenset(Columns._fields)
                moment = self._moment = self.mark, table
        if len(untold):  # without the lock, as a handler may wait for somebody who shows a buffer
            log.warning(TWICE, storage.path, untold)
        return moment[1]

    def doubt(self) -> None:
        """Have all be read anew by the next call, as an episode is not to be shown any more."""
        with self.lock:
            self.version = None

    def has_inner_end(self, slots: IntArray) -> bool:
        """Whether one of the visible episodes in slots (B,) may have a marked end before its last step."""
        shown = slots[self.shown.take(slots)]
        return bool(np.bitwise_or.reduce(self.table.flags.take(shown), initial=0) & INNER_END)

    def pairs(self, slots: IntArray) -> list[tuple[int, int]] | IntArray:
        """(n, 2) of each slot the serial + 1 and which steps it shows, start | stop << 32; zeros where it shows none.

        A list where they are few.
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

    def _catch_up(self, storage: Storage, *, anew: bool = False) -> None:
        """Take in what changed in the folder. Raises SchemaMismatchError where that may be the schema, as it was."""
        changes, before = storage.maps.state.item(CHANGES), self.version
        if changes == before and storage.num_damaged == self._num_damaged:
            return
        spoilt = self._is_spoilt or storage.num_damaged
        may_be_followed = before is not None and not spoilt
        slots = storage.changed_since(before) if may_be_followed else None  # type: ignore[arg-type]
        if slots is None and not anew:
            storage.require_schema()
        self.version = self._moved = None  # until all is done
        changed, is_far_behind = None, slots is None
        if may_be_followed:
            if not self._followed:
                self._begin_to_follow(storage)
            if slots is None:
                slots = changed_records(storage.maps.words, self.table.columns)
            changed = self._take_in(storage, slots)
        if changed is None:
            self._changes.clear()  # nobody can follow to what is read anew
            self.mark += 1
            changes = self._read(storage)
        else:
            self._changes.append(Change(self.mark + 1, changed, self._moved))
            self.mark += 1
        self.version = changes
        if is_far_behind and changed is not None:  # meanwhile one record may have changed, and a newer one was taken in
            self._catch_up(storage)

    def _read(self, storage: Storage) -> int:
        """All records; returns the change counter before they were read."""
        before = None
        if self._followed:
            before = self.shown, self.table.serial
        elif self._moment is not None:
            before = self._moment[1].shown, self._moment[1].serial
        deadline = time.monotonic() + (OPENING_SECONDS if before is None else UPDATE_SECONDS)
        while True:
            changes, base, self._num_damaged = storage.changes, storage.state("base"), storage.num_damaged
            columns = storage.columns()
            # A visible episode may be under an odd generation for the moment of an `update`; a dead writer's stays odd.
            if not _being_updated(storage, columns, before) or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        visible, self._twice = visible_slots(columns, base, storage.layout)
        self._base, self._untold = base, self._twice
        # In packed folders nothing changes; and not all that is visible follows from the records that changed.
        self._is_spoilt = storage.layout.rows is not None or storage.in_doubt or len(self._twice) > 0
        self._moment = self.mark, EpisodeTable(changes, base, *columns, visible)
        self._followed = False
        return changes

    def _begin_to_follow(self, storage: Storage) -> None:
        """Make what is kept for followers alone of the table that was read."""
        table: EpisodeTable = self._moment[1]  # type: ignore[index]
        self.shown, self.num_steps, self._visible = table.shown.copy(), table.steps, table.visible
        self.head, self.tail, self._num_episodes = 0, len(table), len(table)
        self.order = np.empty((2, len(table) + max(64, len(table.serial))), np.int64)
        self.order[:, : self.tail] = table.serial[table.visible], table.visible
        full = len(table) >= storage.layout.max_episodes
        self._hidden = self.order.item(0, 0) if full else table.base
        self.table, self._lent = replace(table, visible=NO_SLOTS), frozenset(Columns._fields)
        self._most = np.zeros(len(self.shown), np.int64)
        self._limit(slice(None), storage)
        self._followed = True

    def _own(self, names: Iterable[str]) -> None:
        """Have columns of its own that are to be changed."""
        lent = self._lent.intersection(names)
        if lent:
            self.table = replace(self.table, **{name: getattr(self.table, name).copy() for name in lent})
            self._lent -= lent

    def _take_in(self, storage: Storage, slots: IntArray) -> IntArray | None:
        """Look at the records of some slots again; None where these do not tell what is visible."""
        table, base = self.table, storage.maps.state.item(BASE)
        if base < self._base:  # by a repair
            return None
        show_others = self._few_show_others if len(slots) <= FEWER else self._show_others
        if base <= self._hidden and show_others(storage, slots):
            return slots
        self._base = base
        now = columns_of(storage.maps.words[slots], storage.layout.max_timesteps, None, slots)
        self._hidden = max(self._hidden, base)
        some = now.start < now.length
        shown = now.valid & some & (now.flags & DELETED == 0) & (now.serial >= self._hidden)
        was = self.shown.take(slots)
        same = was & (now.serial == table.serial.take(slots))
        if any_of(same & some & ~now.valid):  # it is being rewritten, and will come back
            return None
        fresh = np.flatnonzero(shown & ~same)
        if len(fresh) and not self._append(now.serial[fresh], slots[fresh]):
            return None
        before = (table.length.take(slots) - table.start.take(slots)) * was
        self.num_steps += int(np.add.reduce((now.length - now.start) * shown - before))
        self._num_episodes += int(np.count_nonzero(shown)) - int(np.count_nonzero(was))
        if self._num_episodes < storage.layout.max_episodes and self._hidden > base:
            return None  # an older one may come back
        each = now._asdict()
        others = {name: values for name, values in each.items() if any_of(values != getattr(table, name)[slots])}
        self._own(others)
        for name, values in others.items():
            getattr(self.table, name)[slots] = values
        self.shown[slots], self._visible = shown, None
        self._limit(slots, storage)
        gone = self._retire(storage.layout.max_episodes)
        return np.array(sorted({*slots.tolist(), *gone})) if gone else slots

    def _limit(self, slots: IntArray | slice, storage: Storage) -> None:
        """Up to which step slots may come to show theirs: an open episode grows, another stays, none shows nothing."""
        table = self.table
        most = np.where(table.flags[slots] & OPEN != 0, storage.layout.max_timesteps, table.length[slots])
        self._most[slots] = most * self.shown[slots]

    def _show_others(self, storage: Storage, slots: IntArray) -> bool:
        """Where all are as they were but for the steps that they show, take these; False where they are not.

        No writer changes what a record says and leaves its check and its generation.
        """
        table, words = self.table, storage.maps.words.take(slots, axis=0)
        start, stop = (words[:, SHOWN] & _LOW).view(np.int64), (words[:, SHOWN] >> _HALF).view(np.int64)
        dropped, added = start - table.start.take(slots), stop - table.length.take(slots)
        other = words[:, CHECK] ^ table.check.take(slots)
        other |= words[:, GENERATION] ^ table.generation.take(slots)
        wrong = stop - start - 1  # below 0 where it shows no step, more than it may, or fewer than before
        wrong |= self._most.take(slots) - stop
        wrong |= added
        if np.count_nonzero(other) or any_of(wrong < 0):
            return False
        self.num_steps += int(np.add.reduce(added - dropped))
        trimmed = np.count_nonzero(dropped) > 0
        self._own(_STEPS if trimmed else ("length",))
        if trimmed:
            self.table.start[slots] = start
        self.table.length[slots] = stop
        self._moved = slots, dropped, added
        return True

    def _few_show_others(self, storage: Storage, slots: IntArray) -> bool:
        """Slots taken in as by `_show_others`, one by one."""
        table, words, limit = self.table, storage.maps.words, storage.layout.max_timesteps
        slot_numbers = slots.tolist()
        shown, dropped, added = [], [], []
        for slot in slot_numbers:
            word = words.item(slot, SHOWN)  # before these, so that it is of the same episode
            same = words.item(slot, CHECK) == table.check.item(slot)
            if not (same and words.item(slot, GENERATION) == table.generation.item(slot) and self.shown.item(slot)):
                return False
            start, stop, before = word & LOW, word >> 32, table.length.item(slot)
            if not start < stop <= limit or (stop != before and (stop < before or not table.flags.item(slot) & OPEN)):
                return False
            shown.append((slot, start, stop))
            dropped.append(start - table.start.item(slot))
            added.append(stop - before)
        trimmed = any(dropped)
        if self._lent:
            self._own(_STEPS if trimmed else ("length",))
        table = self.table
        for slot, start, stop in shown:
            table.length[slot] = stop
            if trimmed:
                table.start[slot] = start
        self.num_steps += sum(added) - sum(dropped)
        self._moved = slot_numbers, dropped, added
        return True

    def _append(self, serials: IntArray, slots: IntArray) -> bool:
        """Take in episodes that appeared; False where there is no room, or one is not newer than all the others."""
        stop, order = self.tail + len(serials), np.argsort(serials)
        last = self.order.item(0, self.tail - 1) if self.tail > self.head else -1
        serials, slots = serials[order], slots[order]
        if stop > self.order.shape[1] or serials[0] <= last or (serials[1:] == serials[:-1]).any():
            return False
        self.order[:, self.tail : stop] = serials, slots
        self.tail = stop
        return True

    def _retire(self, max_episodes: int) -> list[int]:
        """The oldest episodes leave where there are too many; returns their slots."""
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


def _being_updated(storage: Storage, now: Columns, before: tuple[npt.NDArray[np.bool_], IntArray] | None) -> bool:
    """Whether an episode was under an odd generation when its record was copied, or was half copied, by an `update`.

    Args: before: (slots,) whether each showed an episode when all was read before, and the serials of then; None at the
        first time, when any episode may be meant as long as an update is going on.
    """
    gone = np.flatnonzero(~now.valid & (now.start < now.length))  # else a ring gave it up
    if before is None:
        gone = gone if len(gone) and storage.folder.exists(UPDATE) else gone[:0]
    else:
        shown, serials = before
        gone = gone[shown[gone] & (now.serial[gone] == serials[gone])]
    generation = now.generation[gone]  # not that of now: the update may be over, and the copy still lacks the episode
    moved = storage.maps.words[gone, GENERATION] != generation
    return bool((moved | (generation & _ODD == 1)).any())
