"""`Streams`: which episode follows which, for items that run on; the episodes of one environment, oldest first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.views.anchors import Anchors, Runs


class Stream(NamedTuple):
    """The streams of one folder, one behind the other: (E,) arrays in that order, but for `place`.

    Attributes:
        place: (slots,) where each slot's episode stands, 0 for a slot that has none.
        slot, serial: the episodes.
        first: the number of each one's step 0, if the steps that are shown are counted through all streams.
        begin: the number of its first step that is shown.
        end: the number behind the last step of its stream.
    """

    place: IntArray
    slot: IntArray
    serial: IntArray
    first: IntArray
    begin: IntArray
    end: IntArray

    @classmethod
    def of(cls, table: EpisodeTable, slots: IntArray, names: Array | None) -> Stream:
        """The streams of some slots, oldest first; `names` (E, …) tells their environments apart."""
        number = np.zeros(len(slots), np.int64)
        if names is not None:
            rows = names.reshape(len(slots), math.prod(names.shape[1:]))
            number = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        order = np.argsort(number, kind="stable")
        slots, number = slots[order], number[order]
        place = np.zeros(len(table.serial), np.int64)
        place[slots] = np.arange(len(slots))
        stop = np.cumsum(table.length[slots] - table.start[slots])
        begin = np.append(0, stop[:-1]) if len(slots) else stop
        end = stop[np.searchsorted(number, number, side="right") - 1]
        return cls(place, slots, table.serial[slots], begin - table.start[slots], begin, end)

    def most(self, length: int) -> int:
        """The most episodes that an item of so many steps runs on into."""
        last_start = np.append(self.begin[1:], self.end[-1:]) - 1
        last = np.searchsorted(self.begin, np.minimum(last_start + length, self.end)) - 1
        return int((last - np.arange(len(last))).max(initial=0))


class Streams:
    """The streams of all folders; an item stays in its own.

    Args:
        length: the timesteps of an item.
        folders: (number, streams) of each folder.
    """

    def __init__(self, length: int, folders: Sequence[tuple[int, Stream]]) -> None:
        self._length, self._by_number = length, dict(folders)
        self._most = max((stream.most(length) for stream in self._by_number.values()), default=0)

    def fitting(self, number: int, runs: Runs, stride: int) -> Runs:
        """The anchors of a folder from which there are as many steps as an item has."""
        stream = self._by_number[number]
        place = stream.place[runs.slot]
        last = stream.end[place] - self._length - stream.first[place]
        count = np.minimum(runs.count, np.maximum((last - runs.first) // stride + 1, 0))
        return runs.replaced(count=count).where(np.flatnonzero(count))

    def followed(self, anchors: Anchors) -> Anchors:
        """Anchors with the episodes that their items run on into."""
        following = np.full((anchors.size, self._most, 2), -1)
        if anchors.folder is None:
            following[:] = self._of(0, anchors.slot, anchors.t)
        else:
            for number in np.unique(anchors.folder).tolist():
                mine = anchors.folder == number
                following[mine] = self._of(number, anchors.slot[mine], anchors.t[mine])
        return anchors._replace(following=following)

    def _of(self, number: int, slot: IntArray, t: IntArray) -> IntArray:
        """(B, M, 2) the slots and serials of those episodes, -1 where an item needs none."""
        stream = self._by_number.get(number)
        if stream is None or not len(stream.slot):
            return np.full((len(slot), self._most, 2), -1)
        place = stream.place[np.minimum(slot, len(stream.place) - 1)]  # of a shard that was made anew
        stop = np.minimum(stream.first[place] + t + self._length, stream.end[place])
        after = place[:, None] + np.arange(1, self._most + 1)
        each = np.minimum(after, len(stream.slot) - 1)
        needed = (after == each) & (stream.begin[each] < stop[:, None])
        return np.where(needed[..., None], np.stack([stream.slot[each], stream.serial[each]], axis=-1), -1)
