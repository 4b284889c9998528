"""`Index`: the anchors that exist at one moment, as runs of each episode, never as a list of all timesteps.

`Selection.index` makes one; the samplers of `loading` draw from it. It takes 36 bytes for each run: an episode has one
run, with `filter_fields` perhaps several. `live_index` has the index of a folder that is written to; both are
`AnchorRuns`, whose `locate` (number of an anchor -> the anchor) is the place to begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import FloatArray
from memmap_buffer.format.checksums import crc32
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.items.new_items import Changed
from memmap_buffer.items.shared_arrays import SharedArrays
from memmap_buffer.items.streams import Streams, followed
from memmap_buffer.views.anchors import Anchors, BoolArray, Runs
from memmap_buffer.views.folders import Folders

MANY = 2048  # anchors: from here on buckets are faster. 16,384 of 2000 runs: 0.14 ms, binary search 1.0; 256: 13 µs, 7


class FolderTable(NamedTuple):
    """The episode table of one folder from which an index was made.

    Attributes:
        number: the number of the folder.
        id: the id of its buffer; "" for a folder that is gone.
        table: the episode table.
    """

    number: int
    id: str
    table: EpisodeTable


@dataclass(eq=False)
class AnchorRuns:
    """Anchors as runs: anchor i of run r has t = min(first[r] + i * stride, last[r]), i < starts[r + 1] - starts[r].

    Attributes:
        slot, serial, first: (R,) int64.
        starts: (R + 1,) int64 cumulative numbers of anchors; starts[0] may be any number.
        stride: the stride of every run.
        folder: (R,) int64 the number of each run's folder, ascending; None for a single folder.
        last: (R,) int64 the highest t of each run; None if no run has a bound.
        streams: number of a folder -> which episode follows which, if items run on; else None.
        changes: a change counter of the single folder at which it showed all of these anchors; None if none is known.
    """

    slot: IntArray
    serial: IntArray
    first: IntArray
    starts: IntArray
    stride: int = 1
    folder: IntArray | None = None
    last: IntArray | None = None
    streams: Mapping[int, Streams] | None = None
    changes: int | None = None

    def __len__(self) -> int:
        return self.starts.item(-1) - self.starts.item(0)

    def draw(self, count: int, rng: np.random.Generator) -> Anchors:
        """`count` anchors drawn uniformly, with replacement."""
        number = rng.random(count)
        number *= self.starts.item(-1) - self.starts.item(0)  # stays below it, as the random number is below 1
        return self.locate(number.astype(np.int64))

    def locate(self, i: IntArray) -> Anchors:
        """The anchors with the numbers `i` (B,), int64 in [0, len)."""
        starts = self.starts
        i = i + starts.item(0)
        run = starts[1:].searchsorted(i, "right") if i.size < MANY else self._run_of_each(i)
        i -= starts.take(run)
        if self.stride != 1:
            i *= self.stride
        i += self.first.take(run)
        if self.last is not None:
            np.minimum(i, self.last.take(run), out=i)
        folder = None if self.folder is None else self.folder.take(run)
        anchors = Anchors(folder, self.slot.take(run), self.serial.take(run), i)
        return anchors if self.streams is None else followed(self.streams, anchors)

    def followed(self, anchors: Anchors) -> Anchors:
        """Anchors of these, with the episodes that their items run on into, if they do."""
        return anchors if self.streams is None else followed(self.streams, anchors)

    def left_of(self, anchors: Anchors) -> Anchors:
        """The anchors that are among these, of some that were once."""
        raise NotImplementedError

    def _run_of_each(self, i: IntArray) -> IntArray:
        """(B,) the run of each anchor number, for many of them."""
        return self.starts[1:].searchsorted(i, "right")


@dataclass(eq=False)
class Index(AnchorRuns):
    """The anchors of one moment, of one folder or many. It never changes; its starts[0] is 0.

    Attributes: those of `AnchorRuns`, and
        weight_sums: (R + 1,) float64 cumulative weights of the runs; None if every anchor has the same weight.
        tables: the tables that it was made from, by ascending numbers of their folders; () after pickling.
    """

    weight_sums: FloatArray | None = None
    tables: tuple[FolderTable, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """The runs without `tables`, for another process; a process that is being started maps them."""
        return _index, (self._shared, self.stride, self.streams)

    @cached_property
    def _shared(self) -> SharedArrays:
        """The arrays of the runs, kept so that several workers share one copy."""
        return SharedArrays((self.slot, self.serial, self.first, self.starts, self.folder, self.last, self.weight_sums))

    def bounds(self, numbers: IntArray) -> IntArray:
        """The number of the first anchor of each folder; its anchors end where those of the next number begin.

        Args: numbers: (N,) of folders.
        """
        return self.starts[self.cuts(numbers)]

    def cuts(self, numbers: IntArray) -> IntArray:
        """The first run of each folder, as `bounds` gives the first anchor."""
        if self.folder is None:
            return np.minimum(numbers, 1) * len(self.slot)
        return np.searchsorted(self.folder, numbers)

    def by_folder(self) -> list[tuple[FolderTable, Runs]]:
        """(table, runs) of each folder in `tables`."""
        runs = Runs(self.slot, self.serial, self.first, np.diff(self.starts), self.last)
        if self.folder is None:
            return [(table, runs) for table in self.tables]
        numbers = np.array([table.number for table in self.tables])
        cuts = map(slice, self.cuts(numbers).tolist(), self.cuts(numbers + 1).tolist())
        return list(zip(self.tables, map(runs.where, cuts), strict=True))

    def living(self, folders: Folders) -> Index:
        """The index without the episodes that the folders, by their tables as last read, do not show any more."""
        number_of = np.zeros(len(self.slot), np.int64) if self.folder is None else self.folder
        keep = np.zeros(len(self.slot), np.bool_)
        for number, _, table in folders.by_number(folders.tables):
            runs = number_of == number
            keep[runs] = table.shows(self.slot[runs], self.serial[runs])
        return self._changed(lambda name, values: values[keep])

    def with_run(self, position: int, *, serial: int, count: int, folder: int) -> Index:
        """The index with one more run at a position, of an episode that is gone: its `count` anchors are stale."""
        run = {"slot": 0, "serial": serial, "first": 0, "starts": count, "folder": folder}
        run["last"] = np.iinfo(np.int64).max
        # Its weight is 0 as long as another run has a weight, so that draws by weight choose these.
        run["weight_sums"] = int(self.weight_sums is not None and not self.weight_sums[-1])
        return self._changed(lambda name, values: np.insert(values, position, run[name]))

    def _changed(self, change: Callable[[str, Any], Any]) -> Index:
        """The index with other columns. `change` gets the name and the values of each column, sums as single values."""
        columns: dict[str, Any] = {}
        for name in ("slot", "serial", "first", "folder", "last", "starts", "weight_sums"):
            values, is_sums = getattr(self, name), name in ("starts", "weight_sums")
            if values is not None:
                changed = change(name, np.diff(values) if is_sums else values)
                columns[name] = sums(changed) if is_sums else changed
        return replace(self, **columns)

    def pick(self, u: FloatArray, low: IntArray | int = 0, high: IntArray | int | None = None) -> IntArray:
        """The numbers (B,) of the anchors that `u` chooses, if each anchor owns a part of [0, 1): equal, or its weight.

        Args:
            u: (B,) float64 in [0, 1).
            low, high: choose among the anchors low … high - 1, which are whole runs; default: all.
        """
        high = int(self.starts[-1]) if high is None else high
        if self.weight_sums is None:
            high = np.asarray(high)
            return np.asarray(np.minimum(low + (u * (high - low)).astype(np.int64), high - 1))
        start, stop = (self.weight_sums[np.searchsorted(self.starts, bound)] for bound in (low, high))
        target = start + u * (stop - start)
        run = np.clip(np.searchsorted(self.weight_sums, target, side="right") - 1, 0, len(self.slot) - 1)
        count = self.starts[run + 1] - self.starts[run]
        within = (target - self.weight_sums[run]) / (self.weight_sums[run + 1] - self.weight_sums[run]) * count
        return np.asarray(self.starts[run] + np.clip(within.astype(np.int64), 0, count - 1))

    def draw(self, count: int, rng: np.random.Generator) -> Anchors:
        """`count` anchors drawn with replacement: by weight if they have one, else uniformly."""
        return super().draw(count, rng) if self.weight_sums is None else self.locate(self.pick(rng.random(count)))

    def draw_like(self, anchors: Anchors, rng: np.random.Generator) -> Anchors:
        """Draw one anchor for each given one, from the same folder; from any folder if that one has no anchors left."""
        if anchors.folder is None:
            return self.draw(anchors.size, rng)
        low, high = self.bounds(anchors.folder), self.bounds(anchors.folder + 1)
        low, high = np.where(low < high, low, 0), np.where(low < high, high, len(self))
        return self.locate(self.pick(rng.random(anchors.size), low, high))

    @property
    def digest(self) -> int:
        """A checksum of the anchors and weights, the same in every process."""
        arrays = (self.serial, self.first, self.starts, *(() if self.weight_sums is None else (self.weight_sums,)))
        return reduce(lambda digest, array: crc32(np.ascontiguousarray(array), digest), arrays, 0)

    def changed(self, before: Mapping[int, EpisodeTable]) -> list[Changed]:
        """The runs of the folders whose tables are others than before, by the numbers of the folders."""
        single, streams = self.folder is None, self.streams or {}
        return [
            (*((None, "") if single else (each.number, each.id)), runs, streams.get(each.number))
            for each, runs in self.by_folder()
            if before.get(each.number) is not each.table
        ]

    def left_of(self, anchors: Anchors) -> Anchors:
        """The anchors, of some, that are anchors of it."""
        if not len(self.slot):
            return anchors.where(slice(0))
        anchors, there = self.find(anchors.folder, anchors.serial, anchors.t)
        return anchors.where(there)

    def find(self, folder: IntArray | None, serial: IntArray, t: IntArray) -> tuple[Anchors, BoolArray]:
        """(the anchors at these timesteps, (B,) whether each is an anchor of the index), which must have a run.

        Args:
            folder: (B,) int64 the number of each folder; None for a single folder.
            serial, t: (B,) int64 the episodes and timesteps.
        """
        if folder is None:
            run = np.searchsorted(self.serial, serial, side="right") - 1
        else:
            run = _first(self.serial, serial + 1, self.cuts(folder), self.cuts(folder + 1)) - 1
        run = np.maximum(run, 0)
        steps = t - self.first.take(run)
        if steps.min() < 0 and run.any():  # t may be in an earlier run of the episode: with filters it has several
            low = np.searchsorted(self.serial, serial) if folder is None else self.cuts(folder)
            low = low if folder is None else _first(self.serial, serial, low, self.cuts(folder + 1))
            run = np.clip(_first(self.first, t + 1, low, run + 1) - 1, 0, None)
            steps = t - self.first.take(run)
        number = steps if self.stride == 1 else -(-steps // self.stride)
        is_anchor = (steps >= 0) & (number < self.starts.take(run + 1) - self.starts.take(run))
        is_anchor &= self.serial.take(run) == serial
        if self.stride != 1 or self.last is not None:
            last = t if self.last is None else self.last.take(run)
            is_anchor &= (t <= last) & ((number * self.stride == steps) | ((t == last) & (self.last is not None)))
        if folder is not None:
            is_anchor &= self.folder.take(run) == folder  # type: ignore[union-attr]
        return Anchors(folder, self.slot.take(run), serial, t), is_anchor

    def _run_of_each(self, i: IntArray) -> IntArray:
        """(B,) the run of each anchor number: at most a few runs behind the first one of its bucket."""
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
        """(s, first): bucket b is the 2^s anchors from number b * 2^s on, first[b] the run of the first of them.

        2^s is more than the average number of anchors of a run, and at most twice that.
        """
        shift = (len(self) // max(1, len(self.slot))).bit_length()
        before = np.bincount(-(-self.starts[1:-1] >> shift), minlength=(len(self) >> shift) + 1)
        return shift, np.cumsum(before, dtype=np.int32)


def _index(shared: SharedArrays, stride: int, streams: Mapping[int, Streams] | None) -> Index:
    """The index that another process pickled."""
    slot, serial, first, starts, folder, last, weight_sums = shared.arrays
    return Index(slot, serial, first, starts, stride, folder, last, streams, weight_sums=weight_sums)  # type: ignore[arg-type]


def _first(values: IntArray, wanted: IntArray, low: IntArray, high: IntArray) -> IntArray:
    """(B,) the first position in low … high - 1 at which the ascending `values` are not below `wanted`; else high."""
    while (low < high).any():
        middle = (low + high) >> 1
        below = (values.take(middle, mode="clip") < wanted) & (low < high)
        low, high = np.where(below, middle + 1, low), np.where(below, high, middle)
    return low


def sums(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(n + 1,) the cumulative sums of `values` (n,), from 0 to the sum of all."""
    out = np.empty(len(values) + 1, values.dtype)
    out[0] = 0
    np.cumsum(values, out=out[1:])
    return out
