"""The timesteps around which views cut items: `Anchors`, those of one batch, and `Runs`, those of a whole folder.

Read `Anchors` first. The package `items` lists the anchors that exist as `Runs`, the samplers of `loading` draw a batch
of them, `Folders.find` adds the records of their episodes, and a view cuts the items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.records import STOP, Words

BoolArray = npt.NDArray[np.bool_]
GOLDEN = 0x9E3779B97F4A7C15


class Anchors(NamedTuple):
    """The anchors of a batch, one an item: (B,) arrays.

    Attributes:
        folder: the number of each anchor's folder; None if there is a single folder.
        slot, serial: the slot and the serial of its episode.
        t: its timestep in that episode; negative for items that begin with padding.
        weight, probability: by which a draw by priority chose it; None for other draws.
        chance: uint64 random numbers, from which all draws within an item are made; None if there are none.
        following: (B, M, 2) the slot and the serial of each episode that an item runs on into, -1 where there are fewer
            than M; None if every item stays in its own episode.
        words: (B, 8) the records of the episodes as they were looked up, all zeros where an episode is gone; None if
            they were not looked up.
    """

    folder: IntArray | None
    slot: IntArray
    serial: IntArray
    t: IntArray
    weight: npt.NDArray[np.float32] | None = None
    probability: npt.NDArray[np.float64] | None = None
    chance: npt.NDArray[np.uint64] | None = None
    following: IntArray | None = None
    words: Words | None = None

    @property
    def size(self) -> int:
        """The number of items B; `len` of a named tuple counts its fields."""
        return len(self.slot)

    def where(self, chosen: Any) -> Anchors:
        """The anchors that an index array, a mask or a slice chooses."""
        return Anchors._make([None if column is None else column[chosen] for column in self])

    @staticmethod
    def joined(parts: Sequence[Anchors]) -> Anchors:
        """Several batches of anchors as one; all have the same columns."""
        return Anchors._make(_end_to_end(_alike(parts)))

    def replaced(self, chosen: IntArray, others: Anchors) -> Anchors:
        """A copy with `others` at the positions `chosen`; a column that `others` lacks, such as `weight`, is 0 there.

        The copy has no `words`: its records must be looked up again.
        """
        own, others = _alike([self, others])
        out = Anchors(*(None if column is None else column.copy() for column in own[:8]))  # type: ignore[arg-type]
        for column, new in zip(out[:8], others[:8], strict=True):
            if column is not None:
                column[chosen] = 0 if new is None else new
        return out

    @property
    def length(self) -> IntArray:
        """(B,) int64 the number of timesteps of each episode, by its record, which must have been looked up."""
        return self.words.view(np.uint32)[:, STOP].astype(np.int64)  # type: ignore[union-attr]

    def uniform(self, i: int) -> npt.NDArray[np.float64]:
        """(B,) float64 in [0, 1): the `i`-th random number of each item, computed from its `chance`."""
        assert self.chance is not None
        words = self.chance if i == 0 else splitmix(self.chance + np.uint64(i * GOLDEN % 2**64))
        return np.asarray((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


@dataclass(frozen=True)
class MixedAnchors:
    """The anchors of a batch of a mixture: of each source (buffer) its own anchors.

    Attributes:
        source: (B,) the number of the source of each item.
        parts: the anchors of each source, in the order of its items in the batch.
    """

    source: IntArray
    parts: tuple[Anchors, ...]

    @property
    def size(self) -> int:
        """The number of items B."""
        return len(self.source)

    @cached_property
    def _place(self) -> IntArray:
        """(B,) the position of each item in the part of its source."""
        place = np.empty(self.size, np.int64)
        for number, part in enumerate(self.parts):
            place[self.source == number] = np.arange(part.size)
        return place

    def where(self, chosen: Any) -> MixedAnchors:
        """The anchors that an index array or a slice chooses."""
        source, place = self.source[chosen], self._place[chosen]
        return MixedAnchors(source, tuple(part.where(place[source == i]) for i, part in enumerate(self.parts)))

    @staticmethod
    def joined(batches: Sequence[MixedAnchors]) -> MixedAnchors:
        """Several batches of anchors as one."""
        parts = zip(*(batch.parts for batch in batches), strict=True)
        return MixedAnchors(np.concatenate([batch.source for batch in batches]), tuple(map(Anchors.joined, parts)))


class Runs(NamedTuple):
    """Runs of anchors of one folder: run r has the timesteps t = min(first + i * stride, last) for i = 0 … count - 1.

    The stride is that of the view: the same for all runs.

    Attributes:
        slot, serial, first, count: (R,) int64.
        last: (R,) int64 the highest t of each run; None if no run has a bound.
    """

    slot: IntArray
    serial: IntArray
    first: IntArray
    count: IntArray  # type: ignore[assignment]  # in the place of a method of tuples
    last: IntArray | None = None

    def replaced(self, **columns: IntArray) -> Runs:
        """A copy with other columns: other anchors of the same episodes."""
        return self._replace(**columns)

    def where(self, chosen: IntArray | slice) -> Runs:
        """The runs that an index array or a slice chooses."""
        return Runs._make([None if column is None else column[chosen] for column in self])

    @staticmethod
    def joined(parts: Sequence[Runs]) -> Runs:
        """The runs of several parts, in their order; either all parts have `last`, or none has."""
        parts = [part for part in parts if len(part.slot)] or parts[:1]
        return parts[0] if len(parts) == 1 else Runs._make(_end_to_end(parts))


def _end_to_end(parts: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The columns of several parts, each joined; None where the parts have none."""
    return [None if column[0] is None else np.concatenate(column) for column in zip(*parts, strict=True)]


def _alike(parts: Sequence[Anchors]) -> Sequence[Anchors]:
    """The batches with `following` padded by -1 to the same number of episodes M."""
    width = max((0 if part.following is None else part.following.shape[1] for part in parts), default=0)
    if not width:
        return parts
    padding = ((0, 0), (0, width), (0, 0))
    padded = [
        part.following if part.following is None else np.pad(part.following, padding, constant_values=-1)[:, :width]
        for part in parts
    ]
    return [part._replace(following=following) for part, following in zip(parts, padded, strict=True)]


def splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash whole numbers (n,) to uint64 that are spread evenly over all 64 bits.

    Source: the finaliser of Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(x ^ (x >> np.uint64(31)))
