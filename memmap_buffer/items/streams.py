"""`Streams`: which episode follows which, for items that run on into the next episode.

A stream is the episodes of one environment, oldest first. `Selection` and `LiveIndex` take in changed slots by
`Streams.take_in`, and `AnchorRuns` asks for the episodes that the items of a batch run on into by `followed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.journal import NO_SLOTS
from memmap_buffer.views.anchors import Anchors, BoolArray, Runs


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

    def unknown(self, table: EpisodeTable, slots: IntArray) -> BoolArray:
        """(B,) whether `take_in` needs the stream's name of the episode in each of `slots` (B,)."""
        return np.asarray((self._serial[slots] != table.serial[slots]) | (self._check[slots] != table.check[slots]))

    def take_in(self, table: EpisodeTable, slots: IntArray, shown: IntArray, names: Array | None) -> IntArray | None:
        """Take in changed slots.

        Args:
            table: the episodes as of now.
            slots: the changed slots, ascending.
            shown: those among `slots` that show an episode. New episodes are newer than all others of their streams.
            names: (N, …) the stream's name of each of `shown` that was `unknown`; None if all are in one stream.

        Returns:
            The slots whose episodes may have more or fewer items that fit now; None: an episode moved to another
            stream, and the streams must be made anew.
        """
        unknown = shown[self.unknown(table, shown)]
        numbers = self._numbered(len(unknown), names)
        is_known = self._serial[unknown] == table.serial[unknown]
        if (numbers[is_known] != self._number[unknown[is_known]]).any():
            return None
        gone = np.setdiff1d(slots, shown, assume_unique=True)
        gone = np.concatenate([gone[self._serial[gone] >= 0], unknown[~is_known & (self._serial[unknown] >= 0)]])
        touched = np.concatenate([self._number[gone], numbers, self._number[shown]])
        for slot in gone.tolist():
            self._unlink(slot)
        self._append(unknown[~is_known], numbers[~is_known], table)
        self._check[unknown] = table.check[unknown]
        self._start[shown], self._stop[shown] = table.start[shown], table.length[shown]
        return self._settle(np.unique(touched[touched >= 0]))

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
            unsettled = (slots >= 0) & ((behind < self._length) | (self._behind[slots] < self._length))
            slots, behind = slots[unsettled], behind[unsettled]
            if not len(slots):
                return np.concatenate(differ)
            differ.append(slots[self._behind[slots] != behind])
            self._behind[slots] = behind
            behind = np.minimum(behind + self._stop[slots] - self._start[slots], self._length)
            slots = self._before[slots]

    def fitting(self, runs: Runs, stride: int) -> Runs:
        """The runs without the anchors that fewer than `length` steps follow."""
        slots = runs.slot
        last = self._stop[slots] + self._behind[slots] - self._length
        count = np.minimum(runs.count, np.maximum((last - runs.first) // stride + 1, 0))
        return runs.replaced(count=count).where(np.flatnonzero(count))

    def before(self, slots: IntArray) -> tuple[list[int], list[int], list[int]]:
        """(B,) the slot of the episode before each in its stream, -1 for none; its serial; where it stops."""
        before = self._before[slots]
        return before.tolist(), self._serial[before].tolist(), self._stop[before].tolist()

    def following(self, slots: IntArray, t: IntArray) -> IntArray:
        """`Anchors.following` (B, M, 2) of items with anchors in `slots` (B,) at t (B,); -1 where there are fewer."""
        current = np.minimum(slots, len(self._stop) - 1)  # a slot beyond is of a shard that was made anew
        missing, following = t + self._length - self._stop[current], [np.empty((len(t), 0, 2), np.int64)]
        while True:
            current = np.where(missing > 0, self._after[current], -1)
            if (current < 0).all():
                return np.concatenate(following, axis=1)
            following.append(np.stack([current, self._serial[current]], axis=1)[:, None])
            missing = missing - (self._stop[current] - self._start[current])


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
