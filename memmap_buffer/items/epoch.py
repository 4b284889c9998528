"""One epoch as it is being given: what fixes it, and how much of it was handed out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from memmap_buffer.format.episode_table import EpisodeTable
from memmap_buffer.items.epoch_snapshot import EpochSnapshot
from memmap_buffer.items.index import Index
from memmap_buffer.items.rank_partition import RankPartition
from memmap_buffer.items.shuffle import Shuffle


class Epoch:
    """One epoch as it is being given.

    Args:
        seed, number, shuffle: fix its order. index: its items. tables, ids: what they were chosen from, of which
            buffers, by source. extent: what it covers, where that is known already. begun: how many items were given
            before.
    """

    def __init__(
        self,
        seed: int,
        number: int,
        shuffle: Shuffle,
        index: Index,
        *,
        tables: Mapping[int, EpisodeTable] | None = None,
        ids: Sequence[str] = (),
        extent: EpochSnapshot | None = None,
        begun: int = 0,
    ) -> None:
        self.seed, self.number, self.shuffle, self.index, self.begun = seed, number, shuffle, index, begun
        self.split: RankPartition | None = None
        self.batches = 0
        self.over = False
        self._tables, self._ids, self._extent = tables or {}, ids, extent

    def state(self) -> dict[str, Any]:
        if self._extent is None:  # not before it is asked for: it costs a look at every episode
            self._extent, self._tables = EpochSnapshot.of(self._ids, self._tables, self.index), {}
        delivered = self.begun if self.split is None else self.split.given(self.batches)
        order = {"shuffle": self.shuffle.kind, "window": self.shuffle.window}
        return {"seed": self.seed, "epoch": self.number, "delivered": delivered, **order, **self._extent.state()}

    def delivering(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches that were made of it, counted as they are handed out."""
        return _Delivery(self, batches)

    def generator(self, first: int) -> np.random.Generator:
        """Chance for the items from number `first` on, one number for each."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, self.number))).advance(first))


class _Delivery:
    """Counts the batches of an epoch. No generator, as that would end with the first batch that fails."""

    def __init__(self, epoch: Epoch, batches: Iterator[Any]) -> None:
        self._epoch, self._batches = epoch, batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._epoch.over = True
            raise
        except Exception:
            self._epoch.batches += 1  # it had its turn, and the next call gives the one after it
            raise
        self._epoch.batches += 1
        return batch
