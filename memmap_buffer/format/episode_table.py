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


@dataclass(frozen=True, eq=False)
class EpisodeTable:
    """The records at one moment, by slot, and the visible slots in the order of their serials.

    Attributes:
        changes: this word of the state before the records were read.
        base: likewise.
        generation: (slots,) of the records, as serial, check and flags.
        start: (slots,) the first step that is shown: a ring has forgotten those before it.
        length: (slots,) the steps up to this one are shown.
        valid: (slots,) whether the slot holds an episode, visible or not.
        visible: (episodes,) slots, oldest first.
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
        """Whether each slot holds the visible episode of that serial."""
        there = slots < len(self.serial)  # it may be the table of a smaller folder than that which they were found in
        slots = np.where(there, slots, 0)
        return np.asarray(there & (self.serial[slots] == serials) & self.shown[slots])

    def of(self, column: npt.NDArray[Any], slots: IntArray) -> npt.NDArray[Any]:
        """A column at some slots; no copy where these are all the visible ones, and successive."""
        if slots is self.visible and self._successive:
            return column[slots[0] : slots[-1] + 1]
        return column.take(slots)

    @cached_property
    def _successive(self) -> bool:
        slots = self.visible
        return bool(len(slots) and slots[-1] - slots[0] == len(slots) - 1 and (slots[1:] > slots[:-1]).all())

    @cached_property
    def shown(self) -> npt.NDArray[np.bool_]:
        """(slots,) whether a slot holds a visible episode."""
        shown = np.zeros(len(self.serial), np.bool_)
        shown[self.visible] = True
        return shown

    @cached_property
    def served(self) -> Words:
        """(slots,) the check that the record of a visible episode has; for other slots one that theirs has not."""
        return np.where(self.shown, self.check, ~self.check)

    @property
    def columns(self) -> Columns:
        """The values that the records had, by slot."""
        return Columns(self.generation, self.serial, self.start, self.length, self.check, self.flags, self.valid)

    @cached_property
    def whole(self) -> IntArray:
        """The visible slots of which every step is shown, oldest first."""
        trimmed = self.of(self.start, self.visible) > 0
        return self.visible[~trimmed] if trimmed.any() else self.visible

    def locate(self, slots: IntArray, steps: IntArray) -> tuple[IntArray, IntArray]:
        """(the slot, the timestep) of each step, counted through the episodes of some slots from their step 0 on."""
        stops = np.cumsum(self.length[slots], dtype=np.int64)
        episode = np.searchsorted(stops, steps, side="right")
        return slots[episode], steps - (stops - self.length[slots])[episode]

    @cached_property
    def steps(self) -> int:
        """Visible timesteps."""
        return int(self.of(self.length, self.visible).sum() - self.of(self.start, self.visible).sum())


def visible_slots(columns: Columns, base: int, layout: Layout) -> tuple[IntArray, IntArray]:
    """(the slots of the episodes that are visible, oldest first; serials that stand in two slots, which are not).

    See `format`, "episodes.npy".
    """
    serial, flags, valid = columns.serial, columns.flags, columns.valid
    shown = valid & (columns.start < columns.length)
    slots, twice = _by_serial(np.flatnonzero(shown & (serial >= base) if base else shown), serial)
    if np.bitwise_or.reduce(flags) & DELETED:
        slots = slots[flags.take(slots) & DELETED == 0]
    return slots[-layout.max_episodes :], twice


def _by_serial(slots: IntArray, serial: IntArray) -> tuple[IntArray, IntArray]:
    """Ascending slots in the order of their serials, without those whose serial stands in two slots; these serials."""
    successive = len(slots) and slots[-1] - slots[0] == len(slots) - 1
    serials = serial[slots[0] : slots[-1] + 1] if successive else serial.take(slots)
    if (serials[1:] > serials[:-1]).all():  # as long as no slot was written twice
        return slots, slots[:0]
    order = np.argsort(serials, kind="stable")
    slots, serials = slots.take(order), serials.take(order)
    twice = np.unique(serials[1:][serials[1:] == serials[:-1]])
    return slots[~np.isin(serials, twice)] if len(twice) else slots, twice
