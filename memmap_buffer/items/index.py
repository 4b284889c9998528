"""Which anchors exist now: runs of them per episode, never a list of all steps.

An `Index` is a cumulative count per run, 36 bytes an episode (with `filter_fields`, per surviving run).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.storage import crc32
from memmap_buffer.items.runs import Runs
from memmap_buffer.views.folders import Anchors, Folders

FloatArray = npt.NDArray[np.float64]
MANY = 2048  # 16,384 anchors among 2000 runs: 0.14 ms by buckets, 1.0 by binary search; but 256 take 13 µs and 7


@dataclass(frozen=True, eq=False)
class Index:
    """The anchors of one moment: run r has those with t = min(first + i * stride, last), i < count.

    Attributes:
        slot, serial, first: (R,).  starts: (R + 1,) how many anchors the runs before have, in all.
        source: (R,) or None for one folder.  last: (R,) or None.
        mass: (R + 1,) the weight that the runs before have, in all; None where every anchor counts the same.
    """

    slot: IntArray
    serial: IntArray
    first: IntArray
    starts: IntArray
    stride: int = 1
    source: IntArray | None = None
    last: IntArray | None = None
    mass: FloatArray | None = None

    def __len__(self) -> int:
        return int(self.starts[-1])

    def bounds(self, sources: IntArray) -> IntArray:
        """Where the anchors of sources begin, by their numbers; they end where those of the next number begin."""
        return self.starts[self.cuts(sources)]

    def cuts(self, sources: IntArray) -> IntArray:
        """Where the runs of sources begin, likewise; they are listed source by source, ascending."""
        if self.source is None:
            return np.minimum(sources, 1) * len(self.slot)
        return np.searchsorted(self.source, sources)

    def parts(self, sources: IntArray) -> list[Runs]:
        """The runs of each of these sources."""
        runs = Runs(self.slot, self.serial, self.first, np.diff(self.starts), self.last)
        if self.source is None:
            return [runs]
        return [runs.where(slice(*cut)) for cut in self.ranges(sources)]

    def ranges(self, sources: IntArray) -> list[tuple[int, int]]:
        """(first, stop) of the runs of each of these sources."""
        return list(zip(self.cuts(sources).tolist(), self.cuts(sources + 1).tolist(), strict=True))

    def living(self, sources: Folders) -> Index:
        """What is left of it in the tables as last read."""
        source = np.zeros(len(self.slot), np.int64) if self.source is None else self.source
        keep = np.zeros(len(self.slot), np.bool_)
        for number, _, table in sources.by_number(sources.tables):
            mine = source == number
            keep[mine] = table.shows(self.slot[mine], self.serial[mine])
        return replace(
            self,
            slot=self.slot[keep],
            serial=self.serial[keep],
            first=self.first[keep],
            starts=sums(np.diff(self.starts)[keep]),
            source=None if self.source is None else self.source[keep],
            last=None if self.last is None else self.last[keep],
            mass=None if self.mass is None else sums(np.diff(self.mass)[keep]),
        )

    def with_run(self, at: int, *, serial: int, count: int, source: int) -> Index:
        """It with one more run before run `at`: of an episode that is gone, so whoever reads it finds it stale."""

        def put(values: Any, value: int) -> Any:
            return None if values is None else np.insert(values, at, value)

        return replace(
            self,
            slot=put(self.slot, 0),
            serial=put(self.serial, serial),
            first=put(self.first, 0),
            starts=sums(put(np.diff(self.starts), count)),
            source=put(self.source, source),
            last=put(self.last, np.iinfo(np.int64).max),
            # It weighs nothing beside what is left of the others: who draws by weight draws from these.
            mass=None if self.mass is None else sums(put(np.diff(self.mass), int(not self.mass[-1]))),
        )

    def pick(self, u: FloatArray, low: IntArray | int = 0, high: IntArray | int | None = None) -> IntArray:
        """Which anchor each number falls on when [0, 1) is divided among some of them, by weight if they have one.

        Args: u: (B,) in [0, 1). low, high: the anchors low … high - 1, whole runs of them; default all.
        """
        high = len(self) if high is None else high
        if self.mass is None:
            high = np.asarray(high)
            return np.asarray(np.minimum(low + (u * (high - low)).astype(np.int64), high - 1))
        start, stop = (self.mass[np.searchsorted(self.starts, bound)] for bound in (low, high))
        at = start + u * (stop - start)
        run = np.clip(np.searchsorted(self.mass, at, side="right") - 1, 0, len(self.slot) - 1)
        count = self.starts[run + 1] - self.starts[run]
        within = (at - self.mass[run]) / (self.mass[run + 1] - self.mass[run]) * count
        return np.asarray(self.starts[run] + np.clip(within.astype(np.int64), 0, count - 1))

    @property
    def digest(self) -> int:
        """A number that differs for other anchors or weights; the same in every process."""
        arrays = (self.serial, self.first, self.starts, *(() if self.mass is None else (self.mass,)))
        return reduce(lambda digest, array: crc32(np.ascontiguousarray(array), digest), arrays, 0)

    def locate(self, i: IntArray) -> Anchors:
        """The anchors number `i`, (B,) int64 in [0, len)."""
        run = self._runs(i)
        t = i - self.starts.take(run)
        t = self.first.take(run) + (t if self.stride == 1 else t * self.stride)
        if self.last is not None:
            t = np.minimum(t, self.last.take(run))
        source = None if self.source is None else self.source.take(run)
        return Anchors(source, self.slot.take(run), self.serial.take(run), t)

    def _runs(self, i: IntArray) -> IntArray:
        """The run of each anchor: for many of them, a few steps on from the first of its bucket."""
        if i.size < MANY:
            return np.searchsorted(self.starts, i, side="right") - 1
        shift, first = self._buckets
        run, ends = first.take(i >> shift).astype(np.int64), self.starts[1:]
        for _ in range(3):
            further = ends.take(run) <= i
            if not further.any():
                return run
            run += further
        rest = np.flatnonzero(ends.take(run) <= i)
        run[rest] = np.searchsorted(self.starts, i[rest], side="right") - 1
        return run

    @cached_property
    def _buckets(self) -> tuple[int, npt.NDArray[np.int32]]:
        """(s, first): the run in which every 2^s-th anchor lies, where a bucket is 1 to 2 runs long on average."""
        shift = (len(self) // max(1, len(self.slot))).bit_length()
        before = np.bincount(-(-self.starts[1:-1] >> shift), minlength=(len(self) >> shift) + 1)
        return shift, np.cumsum(before, dtype=np.int32)


def sums(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(n + 1,) the sum of those before each of n values, and of all."""
    out = np.empty(len(values) + 1, values.dtype)
    out[0] = 0
    np.cumsum(values, out=out[1:])
    return out
