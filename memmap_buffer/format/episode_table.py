"""The episode table: what all records said at one moment, and which of them are shown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.format.records import Columns, Words

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EpisodeTable:
    """The records at one moment, by slot, and the visible slots in the order of their serials.

    Attributes: changes, base: these words of the state before the records were read; generation, serial, length,
        check, flags, and valid (whether the slot holds an episode, visible or not): (slots,); visible: (episodes,)
        slots, oldest first.
    """

    changes: int
    base: int
    generation: Words
    serial: IntArray
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
        """A column at some slots; no copy where these are all the visible ones and lie side by side."""
        if slots is self.visible and self._side_by_side:
            return column[slots[0] : slots[-1] + 1]
        return column.take(slots)

    @cached_property
    def _side_by_side(self) -> bool:
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
        """What the records said, by slot."""
        return Columns(self.generation, self.serial, self.length, self.check, self.flags, self.valid)

    @cached_property
    def steps(self) -> int:
        """Visible timesteps."""
        return int(self.of(self.length, self.visible).sum())
