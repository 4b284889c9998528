"""In which order a loader draws: sequential, shuffled, or in fixed shares of several sources.

An epoch is fixed by (seed, epoch) and the episodes that exist when it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from memmap_buffer.errors import NotEnoughDataError
from memmap_buffer.reading.gather import Gather
from memmap_buffer.reading.index import Index
from memmap_buffer.reading.order import Permutation, Quota, draw
from memmap_buffer.reading.reader import Reader
from memmap_buffer.reading.sources import Anchors
from memmap_buffer.store.storage import IntArray
from memmap_buffer.values import Array

BLOCK = 1 << 14  # positions that are permuted together: numpy's cost per call vanishes in it
AHEAD, AHEAD_BYTES = 16, 1 << 20  # the most batches that are planned together, and what that may take


class EpochSampler:
    """A PyTorch batch sampler whose batches are `Anchors`; each epoch sees the episodes published since.

    Args:
        reader: what is drawn from.
        batch_size: items a batch. shuffle: without replacement, in an order of (seed, epoch). drop_last: leave out an
            incomplete last batch.
        seed: fixes every epoch.
        weights: one per source: each batch has exactly these shares, every source going round in an order of its own;
            an epoch has as many items as without.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.reader = reader
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.weights = weights
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch; without it epochs count up by themselves."""
        self.epoch = epoch

    def __len__(self) -> int:
        full, rest = divmod(len(self.reader.index(refresh=True)), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Anchors]:
        index, epoch = self.reader.index(refresh=True), self.epoch
        self.epoch += 1
        rng = np.random.default_rng((self.seed, epoch))
        batches = self._batches(0, len(index), epoch) if self.weights is None else self._mixed(index, epoch)
        for positions in batches:
            yield self.reader.crop(index.locate(positions), lambda: rng)

    def _batches(self, start: int, n: int, *key: int) -> Iterator[IntArray]:
        """Positions start … start + n - 1 in order or shuffled, a batch at a time."""
        for block in self._blocks(start, n, max(1, BLOCK // self.batch_size) * self.batch_size, *key):
            for at in range(0, len(block), self.batch_size):
                batch = block[at : at + self.batch_size]
                if len(batch) == self.batch_size or not self.drop_last:
                    yield batch

    def _blocks(self, start: int, n: int, size: int, *key: int) -> Iterator[IntArray]:
        permutation = Permutation(n, self.seed, *key) if self.shuffle else None
        for at in range(0, n, size):
            block = np.arange(at, min(at + size, n))
            yield start + (block if permutation is None else permutation(block))

    def _mixed(self, index: Index, epoch: int) -> Iterator[IntArray]:
        quota, rounds = Quota(self.weights or ()), _Rounds(self, index, epoch)
        full, rest = divmod(len(index), self.batch_size)
        for size in [self.batch_size] * full + [rest] * (rest > 0 and not self.drop_last):
            yield np.concatenate([rounds.take(source, int(n)) for source, n in enumerate(quota.next(size))])


class _Rounds:
    """Each source's positions, round after round, in an order of its own."""

    def __init__(self, sampler: EpochSampler, index: Index, epoch: int) -> None:
        self._sampler, self._epoch = sampler, epoch
        self._bounds = source_bounds(sampler.reader, index, len(sampler.weights or ()))
        self._streams = [self._stream(source) for source in range(len(self._bounds) - 1)]
        self._left = [np.empty(0, np.int64) for _ in self._streams]

    def take(self, source: int, n: int) -> IntArray:
        while len(self._left[source]) < n:
            self._left[source] = np.concatenate([self._left[source], next(self._streams[source])])
        taken, self._left[source] = self._left[source][:n], self._left[source][n:]
        return taken

    def _stream(self, source: int) -> Iterator[IntArray]:
        start, stop = self._bounds[source], self._bounds[source + 1]
        turn = 0
        while True:
            yield from self._sampler._blocks(start, stop - start, BLOCK, self._epoch, source, turn)
            turn += 1


class Draws:
    """Batches drawn uniformly with replacement, as `sample` gives them; the shares of weighted sources are exact.

    Batches are drawn in advance, one, then two, four, … up to `AHEAD`, as long as the episodes stay the same.
    """

    def __init__(self, reader: Reader, weights: Sequence[float] | None = None) -> None:
        self.reader = reader
        self._weights = weights
        self._quota = None if weights is None else Quota(weights)
        self._of: tuple[Index, int] | None = None
        self._plan: Gather | None = None
        self._given = self._drawn = 0

    def next(self, batch_size: int, rng: np.random.Generator, alone: bool = False) -> Anchors:
        """The anchors of one batch; `alone`: it owes nothing to those before. Raises NotEnoughDataError."""
        reader = self.reader
        index = reader.index(refresh=True)
        reader.require(index)
        if self._quota is None:
            return draw(reader.selection, reader.sources, index, batch_size, rng)
        counts = (Quota(self._weights or ()) if alone else self._quota).next(batch_size)
        bounds = source_bounds(reader, index, len(counts))
        parts = [rng.integers(bounds[s], bounds[s + 1], n) for s, n in enumerate(counts) if n]
        return reader.crop(index.locate(np.concatenate(parts)), lambda: rng)

    def read(self, batch_size: int, rng: np.random.Generator, alone: bool = False) -> dict[str, Array]:
        """One batch; see `next`."""
        reader = self.reader
        if alone or self._quota is not None or reader.selection.view.by_batch:
            return reader.read(self.next(batch_size, rng, alone))
        index = reader.index(refresh=True)
        if self._of != (index, batch_size):
            self._of, self._plan, self._drawn = (index, batch_size), None, 0
        if self._plan is None or self._given == self._drawn:
            self._drawn = self._ahead()
            self._plan, self._given = reader.plan(self.next(self._drawn * batch_size, rng)), 0
        at = self._given * batch_size
        self._given += 1
        return reader.read_part(self._plan, slice(at, at + batch_size))

    def _ahead(self) -> int:
        """How many batches to draw now: twice as many as before, in not too much memory."""
        if self._plan is None:
            return 1
        each = self._plan.nbytes // self._drawn
        return max(1, min(2 * self._drawn, AHEAD, AHEAD_BYTES // each))


def source_bounds(reader: Reader, index: Index, sources: int) -> list[int]:
    """Where each source's positions begin in an index; it lists them source by source.

    Raises: NotEnoughDataError: a source has none, so it cannot give its share.
    """
    bounds = index.bounds(sources)
    for number in range(sources if index.source is not None and len(index) else 0):
        if bounds[number] == bounds[number + 1]:
            path = reader.sources.storages[number].path
            raise NotEnoughDataError(f"{path}: source {number} has nothing to give its share of a batch", source=number)
    return bounds
