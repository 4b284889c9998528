"""Which anchors exist now: runs of them per episode, never a list of all steps.

An `Index` is a cumulative count per run, 36 bytes an episode (with `filter_fields`, per surviving run).
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
from memmap_buffer.items.shared_arrays import SharedArrays
from memmap_buffer.items.streams import Streams, followed
from memmap_buffer.views.anchors import Anchors, BoolArray, Runs
from memmap_buffer.views.folders import Folders

MANY = 2048  # 16,384 anchors among 2000 runs: 0.14 ms by buckets, 1.0 by binary search; but 256 take 13 µs and 7


class FolderTable(NamedTuple):
    """The episode table of one folder from which an index was made.

    Attributes:
        number: of the folder.
        id: of its buffer; "" of a folder that is not there.
        table: the episode table.
    """

    number: int
    id: str
    table: EpisodeTable


class AnchorRuns:
    """Anchors as runs: run r has those with t = min(first + i * stride, last), i < starts[r + 1] - starts[r].

    Attributes:
        slot, serial, first: (R,) int64.
        starts: (R + 1,) how many anchors the runs before have, in all, counted from any number.
        stride: of every run.
        folder: (R,) the number of each run's folder, or None for a single folder; ascending.
        last: (R,) or None.
        streams: of each folder by its number, which episode follows which, where items run on; else None.
        changes: the change counter of the one folder at which all of these anchors were shown; None: nobody knows.
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
        number *= self.starts.item(-1) - self.starts.item(0)  # below it for any number below 1
        return self.locate(number.astype(np.int64))

    def locate(self, i: IntArray) -> Anchors:
        """The anchors number `i`, (B,) int64 in [0, len)."""
        starts = self.starts
        i = i + starts.item(0)
        run = starts.searchsorted(i, "right") - 1 if i.size < MANY else self._run_of_each(i)
        i -= starts.take(run)
        if self.stride != 1:
            i *= self.stride
        i += self.first.take(run)
        if self.last is not None:
            np.minimum(i, self.last.take(run), out=i)
        folder = None if self.folder is None else self.folder.take(run)
        anchors = Anchors(folder, self.slot.take(run), self.serial.take(run), i)
        return anchors if self.streams is None else followed(self.streams, anchors)

    def _run_of_each(self, i: IntArray) -> IntArray:
        """The run of each of many anchors."""
        return self.starts.searchsorted(i, "right") - 1


@dataclass(frozen=True, eq=False)
class Index(AnchorRuns):
    """The anchors of one moment, of any folders.

    Attributes:
        slot, serial, first, starts, stride, folder, last, streams: see `AnchorRuns`; `starts` begin at 0.
        weight_sums: (R + 1,) the weight that the runs before have, in all; None where every anchor counts the same.
        tables: of each folder, by ascending numbers, what it was made of; () where that is not known.
    """

    slot: IntArray
    serial: IntArray
    first: IntArray
    starts: IntArray
    stride: int = 1
    folder: IntArray | None = None
    last: IntArray | None = None
    weight_sums: FloatArray | None = None
    tables: tuple[FolderTable, ...] = ()
    streams: Mapping[int, Streams] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: the runs, which it maps if it is just being started, and not what they were made of."""
        return _index, (self._shared, self.stride, self.streams)

    @cached_property
    def _shared(self) -> SharedArrays:
        return SharedArrays((self.slot, self.serial, self.first, self.starts, self.folder, self.last, self.weight_sums))

    def bounds(self, numbers: IntArray) -> IntArray:
        """The positions at which the anchors of folders begin; they end where those of the next number begin."""
        return self.starts[self.cuts(numbers)]

    def cuts(self, numbers: IntArray) -> IntArray:
        """The runs at which those of folders begin, likewise."""
        if self.folder is None:
            return np.minimum(numbers, 1) * len(self.slot)
        return np.searchsorted(self.folder, numbers)

    def by_folder(self) -> list[tuple[FolderTable, Runs]]:
        """The table and the runs of each folder."""
        runs = Runs(self.slot, self.serial, self.first, np.diff(self.starts), self.last)
        if self.folder is None:
            return [(table, runs) for table in self.tables]
        numbers = np.array([table.number for table in self.tables])
        cuts = map(slice, self.cuts(numbers).tolist(), self.cuts(numbers + 1).tolist())
        return list(zip(self.tables, map(runs.where, cuts), strict=True))

    def living(self, folders: Folders) -> Index:
        """The index without episodes that the tables, as last read, do not show."""
        number_of = np.zeros(len(self.slot), np.int64) if self.folder is None else self.folder
        keep = np.zeros(len(self.slot), np.bool_)
        for number, _, table in folders.by_number(folders.tables):
            mine = number_of == number
            keep[mine] = table.shows(self.slot[mine], self.serial[mine])
        return self._changed(lambda name, values: values[keep])

    def with_run(self, at: int, *, serial: int, count: int, folder: int) -> Index:
        """The index with one more run before run `at`, of an episode that is gone: its items are found to be stale."""
        run = {"slot": 0, "serial": serial, "first": 0, "starts": count, "folder": folder}
        run["last"] = np.iinfo(np.int64).max
        # It weighs nothing as long as other runs are left: draws by weight are from these.
        run["weight_sums"] = int(self.weight_sums is not None and not self.weight_sums[-1])
        return self._changed(lambda name, values: np.insert(values, at, run[name]))

    def _changed(self, change: Callable[[str, Any], Any]) -> Index:
        """The index with each column of its runs changed, of sums what each run adds to them."""
        columns: dict[str, Any] = {}
        for name in ("slot", "serial", "first", "folder", "last", "starts", "weight_sums"):
            values, is_sums = getattr(self, name), name in ("starts", "weight_sums")
            if values is not None:
                changed = change(name, np.diff(values) if is_sums else values)
                columns[name] = sums(changed) if is_sums else changed
        return replace(self, **columns)

    def pick(self, u: FloatArray, low: IntArray | int = 0, high: IntArray | int | None = None) -> IntArray:
        """The positions of the anchors that numbers fall on when [0, 1) is divided among anchors, by weight if any.

        Args:
            u: (B,) in [0, 1).
            low, high: the anchors low … high - 1, whole runs of them; default all.
        """
        high = int(self.starts[-1]) if high is None else high
        if self.weight_sums is None:
            high = np.asarray(high)
            return np.asarray(np.minimum(low + (u * (high - low)).astype(np.int64), high - 1))
        start, stop = (self.weight_sums[np.searchsorted(self.starts, bound)] for bound in (low, high))
        at = start + u * (stop - start)
        run = np.clip(np.searchsorted(self.weight_sums, at, side="right") - 1, 0, len(self.slot) - 1)
        count = self.starts[run + 1] - self.starts[run]
        within = (at - self.weight_sums[run]) / (self.weight_sums[run + 1] - self.weight_sums[run]) * count
        return np.asarray(self.starts[run] + np.clip(within.astype(np.int64), 0, count - 1))

    def draw(self, count: int, rng: np.random.Generator) -> Anchors:
        """`count` anchors drawn with replacement: by weight if they have one, else uniformly."""
        return super().draw(count, rng) if self.weight_sums is None else self.locate(self.pick(rng.random(count)))

    def draw_like(self, anchors: Anchors, rng: np.random.Generator) -> Anchors:
        """As many anchors from each folder as before; from any folder for one that has none left."""
        if anchors.folder is None:
            return self.draw(anchors.size, rng)
        low, high = self.bounds(anchors.folder), self.bounds(anchors.folder + 1)
        low, high = np.where(low < high, low, 0), np.where(low < high, high, len(self))
        return self.locate(self.pick(rng.random(anchors.size), low, high))

    @property
    def digest(self) -> int:
        """A number that differs for other anchors or weights; the same in every process."""
        arrays = (self.serial, self.first, self.starts, *(() if self.weight_sums is None else (self.weight_sums,)))
        return reduce(lambda digest, array: crc32(np.ascontiguousarray(array), digest), arrays, 0)

    def followed(self, anchors: Anchors) -> Anchors:
        """Anchors of it, with the episodes that their items run on into, if they do."""
        return anchors if self.streams is None else followed(self.streams, anchors)

    def find(self, folder: IntArray | None, serial: IntArray, t: IntArray) -> tuple[Anchors, BoolArray]:
        """(the anchors at timesteps of episodes, whether each is one); there must be runs.

        Args:
            folder: (B,) the number of each folder; None for a single folder.
            serial, t: (B,) int64.
        """
        if folder is None:
            run = np.searchsorted(self.serial, serial, side="right") - 1
        else:
            run = _first(self.serial, serial + 1, self.cuts(folder), self.cuts(folder + 1)) - 1
        run = np.maximum(run, 0)
        since = t - self.first.take(run)
        if since.min() < 0 and run.any():  # perhaps of an earlier run of the episode: filters leave several
            low = np.searchsorted(self.serial, serial) if folder is None else self.cuts(folder)
            low = low if folder is None else _first(self.serial, serial, low, self.cuts(folder + 1))
            run = np.clip(_first(self.first, t + 1, low, run + 1) - 1, 0, None)
            since = t - self.first.take(run)
        number = since if self.stride == 1 else -(-since // self.stride)
        there = (since >= 0) & (number < self.starts.take(run + 1) - self.starts.take(run))
        there &= self.serial.take(run) == serial
        if self.stride != 1 or self.last is not None:
            last = t if self.last is None else self.last.take(run)
            there &= (t <= last) & ((number * self.stride == since) | ((t == last) & (self.last is not None)))
        if folder is not None:
            there &= self.folder.take(run) == folder  # type: ignore[union-attr]
        return Anchors(folder, self.slot.take(run), serial, t), there

    def _run_of_each(self, i: IntArray) -> IntArray:
        """The run of each of many anchors: a few steps on from the first of its bucket."""
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


def _index(shared: SharedArrays, stride: int, streams: Mapping[int, Streams] | None) -> Index:
    slot, serial, first, starts, folder, last, weight_sums = shared.arrays
    return Index(slot, serial, first, starts, stride, folder, last, weight_sums, (), streams)  # type: ignore[arg-type]


def _first(values: IntArray, wanted: IntArray, low: IntArray, high: IntArray) -> IntArray:
    """The first places (B,) in low … high - 1 where ascending values are not below those wanted; else high."""
    while (low < high).any():
        middle = (low + high) >> 1
        below = (values.take(middle, mode="clip") < wanted) & (low < high)
        low, high = np.where(below, middle + 1, low), np.where(below, high, middle)
    return low


def sums(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(n + 1,) the sums of n values up to each, from 0 to the sum of all."""
    out = np.empty(len(values) + 1, values.dtype)
    out[0] = 0
    np.cumsum(values, out=out[1:])
    return out
