"""`Streams`: which episode follows which, for items that run on into the next episode.

A stream is the episodes of one environment, oldest first. `Selection` and `LiveIndex` take in changed slots by
`Streams.take_in`, and `AnchorRuns` asks for the episodes that the items of a batch run on into by `followed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from memmap_buffer.dtypes import Array, all_of, any_of
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.journal import NO_SLOTS
from memmap_buffer.views.anchors import Anchors, Runs


class Streams:
    """The streams of one folder: each a doubly linked list of slots.

    An item needs `length` steps from its anchor on. They can lack only near the end of a stream: there alone `_behind`
    is counted.

    Args:
        length: the timesteps of an item.
        slots: the number of slots of the folder. All arrays have one more entry, which belongs to no slot.
    """

    def __init__(self, length: int, slots: int) -> None:
        self._length = length
        self._before, self._after = np.full((2, slots + 1), -1)  # the slots of its neighbours in the stream; -1: none
        self._serial, self._number = np.full((2, slots + 1), -1)  # its serial, the number of its stream; -1: none
        self._start, self._stop = np.zeros((2, slots + 1), np.int64)  # it shows the steps start … stop - 1
        self._check = np.zeros(slots + 1, np.uint64)  # the check of its record
        self._behind = np.full(slots + 1, length)  # the steps of all episodes behind it, at most `length`
        self._last = np.empty(0, np.int64)  # the slot of each stream's newest episode
        self._numbers: dict[bytes, int] = {}  # the bytes of a stream's name -> its number

    def unknown(self, table: EpisodeTable, slots: IntArray) -> IntArray:
        """The slots, among these (B,), of whose episodes `take_in` needs the stream's name."""
        is_known = self._check[slots] == table.check[slots]
        is_known &= self._serial[slots] == table.serial[slots]
        return NO_SLOTS if all_of(is_known) else slots[~is_known]

    def take_in(
        self, table: EpisodeTable, hidden: IntArray, shown: IntArray, unknown: IntArray, names: Array | None
    ) -> IntArray | None:
        """Take in changed slots.

        Args:
            table: the episodes as of now.
            hidden, shown: the changed slots, ascending: those that show no episode any more, and those that show one.
                New episodes are newer than all others of their streams.
            unknown: those of `shown` that were `unknown`.
            names: (N, …) the stream's name of each of `unknown`; None if all are in one stream.

        Returns:
            The slots whose episodes may have more or fewer items that fit now, besides `shown`; None: an episode moved
            to another stream, and the streams must be made anew.
        """
        gone, touched = hidden[self._serial[hidden] >= 0], [self._number[shown]]
        if len(unknown):
            numbers = self._numbered(len(unknown), names)
            is_known = self._serial[unknown] == table.serial[unknown]
            if (numbers[is_known] != self._number[unknown[is_known]]).any():
                return None
            gone = np.concatenate([gone, unknown[~is_known & (self._serial[unknown] >= 0)]])
            touched.append(numbers)
        touched.append(self._number[gone])
        for slot in gone.tolist():
            self._unlink(slot)
        if len(unknown):
            self._append(unknown[~is_known], numbers[~is_known], table)
            self._check[unknown] = table.check[unknown]
        self._start[shown], self._stop[shown] = table.start[shown], table.length[shown]
        is_touched = np.zeros(len(self._last) + 1, np.bool_)  # one more, for the number -1
        is_touched[np.concatenate(touched)] = True
        return self._settle(is_touched[:-1].nonzero()[0])

    def _numbered(self, count: int, names: Array | None) -> IntArray:
        """(N,) the numbers of the streams with these names; a new name gets the next number."""
        if names is None:
            unique, place = [b""], np.zeros(count, np.int64)
        else:
            rows = np.ascontiguousarray(names + 0.0 if names.dtype.kind == "f" else names)  # -0.0 is 0.0
            rows = rows.reshape(count, math.prod(rows.shape[1:]))
            keys = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).reshape(-1)
            values, place = np.unique(keys, return_inverse=True)
            unique = [key.tobytes() for key in values]
        numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in unique]
        more = np.full(len(self._numbers) - len(self._last), -1)
        self._last = np.concatenate([self._last, more])
        return np.array(numbers, np.int64)[place]

    def _unlink(self, slot: int) -> None:
        """Take an episode out of its stream."""
        before, after = self._before.item(slot), self._after.item(slot)
        if before >= 0:
            self._after[before] = after
        if after >= 0:
            self._before[after] = before
        else:
            self._last[self._number.item(slot)] = before
        self._before[slot] = self._after[slot] = self._serial[slot] = self._number[slot] = -1
        self._start[slot] = self._stop[slot] = 0

    def _append(self, slots: IntArray, numbers: IntArray, table: EpisodeTable) -> None:
        """Append episodes to their streams; they are newer than all others of these."""
        if not len(slots):
            return
        order = np.lexsort((table.serial[slots], numbers))
        slots, numbers = slots[order], numbers[order]
        is_first = np.append(True, numbers[1:] != numbers[:-1])
        before = np.where(is_first, self._last[numbers], np.append(-1, slots[:-1]))
        self._before[slots], self._after[slots] = before, -1
        has_before = before >= 0
        self._after[before[has_before]] = slots[has_before]
        self._last[numbers] = slots  # numpy keeps the last of equal numbers: the newest episode
        self._serial[slots], self._number[slots], self._behind[slots] = table.serial[slots], numbers, -1

    def _settle(self, numbers: IntArray) -> IntArray:
        """Count `_behind` again, from the ends of these streams on; returns the slots whose count changed."""
        slots = self._last[numbers]
        behind, differ = np.zeros(len(slots), np.int64), [NO_SLOTS]
        while True:
            was = self._behind[slots]
            unsettled = (slots >= 0) & (np.minimum(behind, was) < self._length)
            if not all_of(unsettled):
                slots, behind, was = slots[unsettled], behind[unsettled], was[unsettled]
            if not len(slots):
                return np.concatenate(differ) if len(differ) > 1 else NO_SLOTS
            differs = was != behind
            if any_of(differs):
                differ.append(slots[differs])
                self._behind[slots] = behind
            behind = np.minimum(behind + self._stop[slots] - self._start[slots], self._length)
            slots = self._before[slots]

    def runs(self, slots: IntArray, stride: int) -> Runs:
        """The runs of whole episodes: an item at every `stride` steps from the first that is shown on, if it fits."""
        start = self._start[slots]
        return self.fitting(Runs(slots, self._serial[slots], start, -(-(self._stop[slots] - start) // stride)), stride)

    def fitting(self, runs: Runs, stride: int) -> Runs:
        """The runs without the anchors that fewer than `length` steps follow; some may have none left."""
        last = self._stop[runs.slot] + self._behind[runs.slot] - self._length
        return runs.replaced(count=np.minimum(runs.count, np.maximum((last - runs.first) // stride + 1, 0)))

    def before(self, slots: IntArray) -> tuple[list[int], list[int], list[int]]:
        """(B,) the slot of the episode before each in its stream, -1 for none; its serial; where it stops."""
        before = self._before[slots]
        return before.tolist(), self._serial[before].tolist(), self._stop[before].tolist()

    def following(self, slots: IntArray, t: IntArray) -> IntArray:
        """`Anchors.following` (B, M, 2) of items with anchors in `slots` (B,) at t (B,); -1 where there are fewer."""
        current = np.minimum(slots, len(self._stop) - 1)  # a slot beyond is of a shard that was made anew
        missing, columns = t + self._length - self._stop[current], list[IntArray]()
        while True:
            current = np.where(missing > 0, self._after[current], -1)
            if all_of(current < 0):
                break
            columns += [current, self._serial[current]]
            missing = missing - (self._stop[current] - self._start[current])
        following = np.empty((len(t), len(columns)), np.int64)
        for i, column in enumerate(columns):
            following[:, i] = column
        return following.reshape(len(t), len(columns) // 2, 2)


def followed(streams: Mapping[int, Streams], anchors: Anchors) -> Anchors:
    """The anchors with `following` filled in.

    Args:
        streams: number of a folder -> its streams.
        anchors: anchors of these folders.
    """
    if anchors.folder is None:
        return anchors._replace(following=streams[0].following(anchors.slot, anchors.t))
    parts = []
    for number in np.unique(anchors.folder).tolist():
        items = np.flatnonzero(anchors.folder == number)
        if number in streams:
            parts.append((items, streams[number].following(anchors.slot[items], anchors.t[items])))
    width = max((part.shape[1] for _, part in parts), default=0)
    following = np.full((anchors.size, width, 2), -1)
    for items, part in parts:
        following[items, : part.shape[1]] = part
    return anchors._replace(following=following)
