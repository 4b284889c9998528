"""The episode table: what all records said at one moment, and which of their episodes are visible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.format.layout import Layout
from memmap_buffer.format.records import DELETED, Columns, Words

IntArray = npt.NDArray[np.int64]
MANY = 1024  # slots: to see whether they follow one another takes a third of the time of the copy that it may save


@dataclass(frozen=True, eq=False)
class EpisodeTable:
    """The records at one moment, by slot, and the visible slots in the order of their serials.

    Attributes:
        changes, base: these words of state.npy, as they were before the records were read.
        generation, serial, check, flags: (slots,) these words of the records.
        start: (slots,) the first step that is shown: a ring has forgotten the steps before it.
        length: (slots,) the word `stop` of the records: the steps start … length - 1 are shown.
        valid: (slots,) whether the slot holds an episode, visible or not.
        visible: (episodes,) the slots of the visible episodes, oldest first.
    """

    changes: int
    base: int
    generation: Words
    serial: IntArray
    start: IntArray
    length: IntArray
    check: Words
    flags: npt.NDArray[np.uint32]
    valid: npt.NDArray[np.bool_]
    visible: IntArray

    def __len__(self) -> int:
        return len(self.visible)

    def shows(self, slots: IntArray, serials: IntArray) -> npt.NDArray[np.bool_]:
        """Whether each slot holds the visible episode of the serial beside it."""
        there = slots < len(self.serial)  # the slots may be of a larger folder than this table
        slots = np.where(there, slots, 0)
        return np.asarray(there & (self.serial[slots] == serials) & self.shown[slots])

    def of(self, column: npt.NDArray[Any], slots: IntArray) -> npt.NDArray[Any]:
        """The values of a column at `slots`; a view, no copy, if these are many and follow one another."""
        successive = self._successive if slots is self.visible else len(slots) >= MANY and _follow_each_other(slots)
        return column[slots[0] : slots[-1] + 1] if successive else column.take(slots)

    @cached_property
    def _successive(self) -> bool:
        return _follow_each_other(self.visible)

    @cached_property
    def shown(self) -> npt.NDArray[np.bool_]:
        """(slots,) whether a slot holds a visible episode."""
        shown = np.zeros(len(self.serial), np.bool_)
        shown[self.visible] = True
        return shown

    @cached_property
    def served(self) -> Words:
        """(slots,) the check of each visible episode's record; for other slots a value that their check is not."""
        return np.where(self.shown, self.check, ~self.check)

    @property
    def columns(self) -> Columns:
        """The columns of the records, by slot."""
        return Columns(self.generation, self.serial, self.start, self.length, self.check, self.flags, self.valid)

    @cached_property
    def whole(self) -> IntArray:
        """The visible slots whose episodes show every step, oldest first."""
        trimmed = self.of(self.start, self.visible) > 0
        return self.visible[~trimmed] if trimmed.any() else self.visible

    def locate(self, slots: IntArray, steps: IntArray) -> tuple[IntArray, IntArray]:
        """(slot, timestep) of each of `steps`: numbers that count through the episodes of `slots`, each from step 0."""
        stops = np.cumsum(self.length[slots], dtype=np.int64)
        episode = np.searchsorted(stops, steps, side="right")
        return slots[episode], steps - (stops - self.length[slots])[episode]

    @cached_property
    def steps(self) -> int:
        """The number of visible timesteps."""
        return int(self.of(self.length, self.visible).sum() - self.of(self.start, self.visible).sum())


def _follow_each_other(slots: IntArray) -> bool:
    """Whether each slot is the one behind the slot before it."""
    return bool(len(slots) and slots[-1] - slots[0] == len(slots) - 1 and (slots[1:] > slots[:-1]).all())


def visible_slots(columns: Columns, base: int, layout: Layout) -> tuple[IntArray, IntArray]:
    """(slots of the visible episodes, oldest first; serials that stand in two slots, whose episodes are not visible).

    See `format`, "episodes.npy".
    """
    serial, flags, valid = columns.serial, columns.flags, columns.valid
    shown = valid & (columns.start < columns.length)
    slots, twice = _by_serial(np.flatnonzero(shown & (serial >= base) if base else shown), serial)
    if np.bitwise_or.reduce(flags) & DELETED:
        slots = slots[flags.take(slots) & DELETED == 0]
    return slots[-layout.max_episodes :], twice


def _by_serial(slots: IntArray, serial: IntArray) -> tuple[IntArray, IntArray]:
    """(the ascending `slots` sorted by serial, without those whose serial stands in two slots; those serials)."""
    successive = len(slots) and slots[-1] - slots[0] == len(slots) - 1  # they ascend
    serials = serial[slots[0] : slots[-1] + 1] if successive else serial.take(slots)
    if (serials[1:] > serials[:-1]).all():  # so it is until a slot is used again
        return slots, slots[:0]
    order = np.argsort(serials, kind="stable")
    slots, serials = slots.take(order), serials.take(order)
    twice = np.unique(serials[1:][serials[1:] == serials[:-1]])
    return slots[~np.isin(serials, twice)] if len(twice) else slots, twice
