"""`NewItems`: items that came since it began and were not given yet, as in the online queue of DreamerV3."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.items.streams import Streams
from memmap_buffer.views.anchors import Anchors, Runs

# The number of a folder, None for a single one; runs of its anchors, oldest first; its streams, where items run on.
Changed: TypeAlias = tuple[int | None, Runs, Streams | None]
_SERIAL, _STOP, _PLACE = range(3)


class NewItems:
    """Items that wait to be given, each once, in the order in which they came.

    Args:
        every: timesteps of an episode, or of a stream where items run on, of which the first item is given.

    Attributes: every: as given.
    """

    def __init__(self, every: int) -> None:
        self.every, self._begun = every, False
        self._waiting: deque[Anchors] = deque()
        # By folder, (3, slots): the episode that was seen, the timestep behind its last anchor that was, and how many
        # timesteps its stream had before it.
        self._seen: dict[int | None, IntArray] = {}

    def take_in(self, changed: Iterable[Changed], stride: int) -> None:
        """Take in the anchors that came, in runs that may have others; those of the first call count as given.

        Args:
            changed: runs of each folder in which there may be new anchors.
            stride: of every run.
        """
        for number, runs, streams in changed:
            new = self._new(number, runs, streams, stride)
            if self._begun and new.size:
                self._waiting.append(new)
        self._begun = True

    def take(self, count: int, left_of: Callable[[Anchors], Anchors]) -> Anchors | None:
        """Up to `count` of those that wait, which were never given before; None where none is left.

        Those that are gone are let go of: as the oldest leave first, as many wait as there are items, and few more.

        Args: left_of: those of some anchors that there still are.
        """
        parts: list[Anchors] = []
        while count and self._waiting:
            block = self._waiting.popleft()
            part = left_of(block.where(slice(count)))
            if block.size > count:
                self._waiting.appendleft(block.where(slice(count, None)))
            count -= part.size
            parts.append(part)
        parts = [part for part in parts if part.size]
        return Anchors.joined(parts) if parts else None

    def _new(self, number: int | None, runs: Runs, streams: Streams | None, stride: int) -> Anchors:
        """The anchors of runs that were not seen before, one of `every` timesteps."""
        slot, first = runs.slot, runs.first
        seen = self._seen_of(number, int(slot.max(initial=-1)) + 1)
        is_known = seen[_SERIAL, slot] == runs.serial
        low = np.where(is_known, seen[_STOP, slot], first)
        seen[_STOP, slot[~is_known]] = first[~is_known]
        seen[_PLACE, slot[~is_known]] = np.maximum(-first[~is_known], 0)  # padding in front counts
        if streams is not None and self._begun:
            self._place(seen, np.flatnonzero(~is_known), runs, streams)
        seen[_SERIAL, slot] = runs.serial
        last = first + (runs.count - 1) * stride
        last = last if runs.last is None else np.minimum(last, runs.last)
        seen[_STOP, slot] = np.maximum(low, last + 1)  # of several runs of an episode that of the last
        before = np.clip(-((first - low) // stride), 0, runs.count)  # anchors of each run that were seen
        count = runs.count - before
        run = np.repeat(np.arange(len(slot)), count)
        i = np.arange(len(run)) - (np.cumsum(count) - count - before).take(run)
        t = np.minimum(first.take(run) + i * stride, last.take(run))
        place, seen_last = seen[_PLACE, slot.take(run)], np.maximum(t - stride, low.take(run) - 1)
        is_first = (place + t) // self.every != (place + seen_last) // self.every
        run, t = run[is_first], t[is_first]
        folder = None if number is None else np.full(len(run), number)
        return Anchors(folder, slot.take(run), runs.serial.take(run), t)

    def _seen_of(self, number: int | None, size: int) -> IntArray:
        seen = self._seen.get(number)
        if seen is None or seen.shape[1] < size:
            before, seen = seen, np.full((3, 2 * size), -1)
            if before is not None:
                seen[:, : before.shape[1]] = before
            self._seen[number] = seen
        return seen

    @staticmethod
    def _place(seen: IntArray, chosen: IntArray, runs: Runs, streams: Streams) -> None:
        """Find how many timesteps the streams of some runs had before these, one behind the other."""
        for slot, serial, before, its_serial, its_stop in zip(
            runs.slot[chosen].tolist(), runs.serial[chosen].tolist(), *streams.before(runs.slot[chosen]), strict=True
        ):
            if before < seen.shape[1] and seen.item(_SERIAL, before) == its_serial >= 0:
                seen[_PLACE, slot] = seen.item(_PLACE, before) + its_stop
            seen[_SERIAL, slot] = serial
