"""`NewItems`: items that came since it began and were not given yet, as in the online queue of DreamerV3."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.items.streams import Streams
from memmap_buffer.views.anchors import Anchors, Runs

# The number of a folder and the id of its buffer, None and "" for a single one, whatever index the runs are from; runs
# of its anchors, oldest first; its streams, if items run on.
Changed: TypeAlias = tuple[int | None, str, Runs, Streams | None]
_SERIAL, _STOP, _PLACE = range(3)
_NO_BLOCK = np.iinfo(np.int64).min


class NewItems:
    """Items that wait to be given, each once, in the order in which they came.

    Args:
        every: timesteps of an episode, or of a stream where items run on, of which the first item is given.

    Attributes: every: as given.
    """

    def __init__(self, every: int) -> None:
        self.every, self._begun = every, False
        self._waiting: deque[Anchors] = deque()
        # By number and id of the folder, (3, slots): the serial of the episode that was seen, the timestep behind its
        # last anchor that was seen, and how many timesteps its stream had before it.
        self._seen: dict[tuple[int | None, str], IntArray] = {}

    def take_in(self, changed: Iterable[Changed], stride: int) -> None:
        """Take in the anchors that came, in runs that may have others; those of the first call count as given.

        Args:
            changed: runs of each folder in which there may be new anchors.
            stride: of every run.
        """
        for number, folder_id, runs, streams in changed:
            new = self._new(number, folder_id, runs, streams, stride)
            if self._begun and new.size:
                self._waiting.append(new)
        self._begun = True

    def take(self, count: int, left_of: Callable[[Anchors], Anchors]) -> Anchors | None:
        """Take up to `count` of the items that wait, oldest first; None if none is left. After an error all wait on.

        Waiting items that are gone are dropped. The oldest leave first, so hardly more wait than there are items.

        Args: left_of: returns the anchors that exist still, of some anchors.
        """
        parts: list[Anchors] = []
        used, rest = 0, None
        for block in self._waiting:
            rest, used = block, used + 1
            while rest.size and count:
                part, rest = rest.where(slice(count)), rest.where(slice(count, None))
                part = left_of(part)
                count -= part.size
                parts += [part] if part.size else []
            if not count:
                break
        taken = Anchors.joined(parts) if parts else None
        for _ in range(used):
            self._waiting.popleft()
        if rest is not None and rest.size:
            self._waiting.appendleft(rest)
        return taken

    def give_back(self, taken: Anchors) -> None:
        """Let items that could not be read wait again, before all others."""
        self._waiting.appendleft(taken)

    def _new(self, number: int | None, folder_id: str, runs: Runs, streams: Streams | None, stride: int) -> Anchors:
        """The anchors of runs that were not seen before: of every `every` timesteps the first one."""
        slot, first = runs.slot, runs.first
        seen = self._seen_of((number, folder_id), int(slot.max(initial=-1)) + 1)
        is_known = seen[_SERIAL, slot] == runs.serial
        low = np.where(is_known, seen[_STOP, slot], first)
        seen[_STOP, slot[~is_known]] = first[~is_known]
        seen[_PLACE, slot[~is_known]] = np.maximum(-first[~is_known], 0)  # padding in front counts
        if streams is not None and self._begun:
            _place(seen, runs.where(np.flatnonzero(~is_known)), streams)
        seen[_SERIAL, slot] = runs.serial
        last = first + (runs.count - 1) * stride
        last = last if runs.last is None else np.minimum(last, runs.last)
        seen[_STOP, slot] = np.maximum(low, last + 1)  # of several runs of an episode that of the last
        # The anchors of each run that were seen. At the first call all count as seen: then no anchor is listed.
        before = np.clip(-((first - low) // stride), 0, runs.count) if self._begun else runs.count
        count = runs.count - before
        run = np.repeat(np.arange(len(slot)), count)
        i = np.arange(len(run)) - (np.cumsum(count) - count - before).take(run)
        t = np.minimum(first.take(run) + i * stride, last.take(run))
        # The block of `every` timesteps that each anchor is in, and that of the anchor before it in its episode, or of
        # the step before it in its stream.
        place = seen[_PLACE, slot]
        seen_block = (place + np.where(is_known, low, 0) - 1) // self.every
        seen_block = np.where(is_known | (streams is not None), seen_block, _NO_BLOCK)
        block, slot_of = (place.take(run) + t) // self.every, slot.take(run)
        block_before, begins = np.roll(block, 1), slot_of != np.roll(slot_of, 1)
        begins[:1] = True
        block_before[begins] = seen_block.take(run[begins])
        is_first = block != block_before
        run, t = run[is_first], t[is_first]
        folder = None if number is None else np.full(len(run), number)
        return Anchors(folder, slot.take(run), runs.serial.take(run), t)

    def _seen_of(self, folder: tuple[int | None, str], size: int) -> IntArray:
        seen = self._seen.get(folder)
        if seen is None or seen.shape[1] < size:
            before, seen = seen, np.full((3, 2 * size), -1)
            if before is not None:
                seen[:, : before.shape[1]] = before
            self._seen[folder] = seen
        return seen


def _place(seen: IntArray, runs: Runs, streams: Streams) -> None:
    """Find how many timesteps the streams of some runs had before these, one behind the other."""
    places = zip(runs.slot.tolist(), runs.serial.tolist(), *streams.before(runs.slot), strict=True)
    for slot, serial, before, its_serial, its_stop in places:
        if before < seen.shape[1] and seen.item(_SERIAL, before) == its_serial >= 0:
            seen[_PLACE, slot] = seen.item(_PLACE, before) + its_stop
        seen[_SERIAL, slot] = serial
