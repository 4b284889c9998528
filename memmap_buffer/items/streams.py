"""`Streams`: which episode follows which, for items that run on; the episodes of one environment, oldest first."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.journal import NO_SLOTS
from memmap_buffer.views.anchors import Anchors, BoolArray, Runs


class Streams:
    """The streams of one folder, slot by slot; the last entry of each array is of no slot.

    Only the ends of streams are looked at: before them there is room for every item.

    Args:
        length: the timesteps of an item.
        slots: of the folder.
    """

    def __init__(self, length: int, slots: int) -> None:
        self._length = length
        self._before, self._after = np.full((2, slots + 1), -1)  # the slots of the episodes next to each
        self._serial, self._number = np.full((2, slots + 1), -1)  # of the episode, and of its stream; -1 for none
        self._start, self._stop = np.zeros((2, slots + 1), np.int64)
        self._check = np.zeros(slots + 1, np.uint64)
        self._behind = np.full(slots + 1, length)  # the steps of the episodes behind each, at most `length`
        self._last = np.empty(0, np.int64)  # the slot of each stream's newest episode
        self._numbers: dict[bytes, int] = {}  # of the streams, by what they are called

    def unknown(self, table: EpisodeTable, slots: IntArray) -> BoolArray:
        """(B,) whether it is to be told of what stream the episodes in slots (B,) are."""
        return np.asarray((self._serial[slots] != table.serial[slots]) | (self._check[slots] != table.check[slots]))

    def take_in(self, table: EpisodeTable, slots: IntArray, shown: IntArray, names: Array | None) -> IntArray | None:
        """Take in what changed.

        Args:
            table: the episodes.
            slots: that changed, ascending.
            shown: those of them with an episode that is visible, and no longer older than others of its stream.
            names: (N, …) what the streams are called of those that were `unknown`; None where there is one stream.

        Returns:
            The slots before whose end there is room for other items than before; None where it must be made anew.
        """
        fresh = shown[self.unknown(table, shown)]
        numbers = self._numbered(len(fresh), names)
        is_known = self._serial[fresh] == table.serial[fresh]
        if (numbers[is_known] != self._number[fresh[is_known]]).any():
            return None
        gone = np.setdiff1d(slots, shown, assume_unique=True)
        gone = np.concatenate([gone[self._serial[gone] >= 0], fresh[~is_known & (self._serial[fresh] >= 0)]])
        touched = np.concatenate([self._number[gone], numbers, self._number[shown]])
        for slot in gone.tolist():
            self._unlink(slot)
        self._append(fresh[~is_known], numbers[~is_known], table)
        self._check[fresh] = table.check[fresh]
        self._start[shown], self._stop[shown] = table.start[shown], table.length[shown]
        return self._settle(np.unique(touched[touched >= 0]))

    def _numbered(self, count: int, names: Array | None) -> IntArray:
        """(N,) the numbers of streams by what they are called."""
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
        """Take in episodes that are newer than all others of their streams."""
        if not len(slots):
            return
        order = np.lexsort((table.serial[slots], numbers))
        slots, numbers = slots[order], numbers[order]
        is_first = np.append(True, numbers[1:] != numbers[:-1])
        before = np.where(is_first, self._last[numbers], np.append(-1, slots[:-1]))
        self._before[slots], self._after[slots] = before, -1
        some = before >= 0
        self._after[before[some]] = slots[some]
        self._last[numbers] = slots  # of a number that stands several times the last counts
        self._serial[slots], self._number[slots], self._behind[slots] = table.serial[slots], numbers, -1

    def _settle(self, numbers: IntArray) -> IntArray:
        """Count the steps behind episodes again, from the ends of streams on; returns the slots where they differ."""
        at = self._last[numbers]
        behind, differ = np.zeros(len(at), np.int64), [NO_SLOTS]
        while True:
            goes_on = (at >= 0) & ((behind < self._length) | (self._behind[at] < self._length))
            at, behind = at[goes_on], behind[goes_on]
            if not len(at):
                return np.concatenate(differ)
            differ.append(at[self._behind[at] != behind])
            self._behind[at] = behind
            behind = np.minimum(behind + self._stop[at] - self._start[at], self._length)
            at = self._before[at]

    def fitting(self, runs: Runs, stride: int) -> Runs:
        """The anchors from which there are as many steps as an item has."""
        slots = runs.slot
        last = self._stop[slots] + self._behind[slots] - self._length
        count = np.minimum(runs.count, np.maximum((last - runs.first) // stride + 1, 0))
        return runs.replaced(count=count).where(np.flatnonzero(count))

    def following(self, slots: IntArray, t: IntArray) -> IntArray:
        """(B, M, 2) the slot and the serial of each episode that items at steps t (B,) run on into; -1 for none."""
        at = np.minimum(slots, len(self._stop) - 1)  # of a shard that was made anew
        missing, following = t + self._length - self._stop[at], [np.empty((len(t), 0, 2), np.int64)]
        while True:
            at = np.where(missing > 0, self._after[at], -1)
            if (at < 0).all():
                return np.concatenate(following, axis=1)
            following.append(np.stack([at, self._serial[at]], axis=1)[:, None])
            missing = missing - (self._stop[at] - self._start[at])


def followed(streams: Mapping[int, Streams], anchors: Anchors) -> Anchors:
    """Anchors with the episodes that their items run on into.

    Args:
        streams: of each folder, by its number.
        anchors: of any of them.
    """
    if anchors.folder is None:
        return anchors._replace(following=streams[0].following(anchors.slot, anchors.t))
    each = []
    for number in np.unique(anchors.folder).tolist():
        mine = np.flatnonzero(anchors.folder == number)
        if number in streams:
            each.append((mine, streams[number].following(anchors.slot[mine], anchors.t[mine])))
    most = max((part.shape[1] for _, part in each), default=0)
    following = np.full((anchors.size, most, 2), -1)
    for mine, part in each:
        following[mine, : part.shape[1]] = part
    return anchors._replace(following=following)
