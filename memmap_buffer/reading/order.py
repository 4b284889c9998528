"""Chance: a shuffle that holds no list, uniform draws, crops, and exact shares of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memmap_buffer.reading.index import Index, Selection
from memmap_buffer.reading.sources import Anchors, Sources
from memmap_buffer.store.storage import IntArray

ROUNDS = 6
U64 = np.uint64


class Permutation:
    """A pseudorandom bijection on [0, n), computed position by position; it holds no list.

    A Feistel network over the smallest even number of bits that holds n, walked along its cycle until the value is
    below n (at most 4 steps on average).

    Args: n: how many. seed: whole numbers that choose it.

    Source: Luby and Rackoff 1988, "How to construct pseudorandom permutations"; Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains" (cycle walking).
    """

    def __init__(self, n: int, *seed: int) -> None:
        self._n = n
        self._half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
        self._keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)

    def __call__(self, i: npt.NDArray[np.integer]) -> IntArray:
        """Where positions `i` (B,) in [0, n) go."""
        value = self._encrypt(i.astype(U64))
        outside = np.flatnonzero(value >= U64(self._n))
        while outside.size:
            value[outside] = self._encrypt(value[outside])
            outside = outside[value[outside] >= U64(self._n)]
        return np.asarray(value, np.int64)

    def _encrypt(self, value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, mask = U64(self._half), U64((1 << self._half) - 1)
        left, right = value >> half, value & mask
        for key in self._keys:
            mixed = (right ^ key) * U64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> U64(29))) * U64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> U64(32)) & mask)
        return np.asarray((left << half) | right)


def crop(selection: Selection, sources: Sources, anchors: Anchors, rng: np.random.Generator) -> Anchors:
    """Let chance move the anchors, where the view gives it a say."""
    if not selection.view.random:
        return anchors
    return anchors._replace(t=selection.view.crop(sources.look_up(anchors).length, rng))


def draw(selection: Selection, sources: Sources, index: Index, count: int, rng: np.random.Generator) -> Anchors:
    """`count` anchors, uniformly and with replacement."""
    return crop(selection, sources, index.locate(rng.integers(0, len(index), count)), rng)


def draw_like(
    selection: Selection, sources: Sources, index: Index, anchors: Anchors, rng: np.random.Generator
) -> Anchors:
    """As many anchors from each source as before; from anywhere for a source that has none left."""
    if anchors.source is None:
        return draw(selection, sources, index, anchors.size, rng)
    bounds = np.array(index.bounds(len(sources.storages)))
    low, high = bounds[anchors.source], bounds[anchors.source + 1]
    low, high = np.where(low < high, low, 0), np.where(low < high, high, len(index))
    return crop(selection, sources, index.locate(rng.integers(low, high)), rng)


class Quota:
    """Exact shares of each batch by weight: the largest remainders get the odd items, what is left is carried over.

    Args: weights: (S,) positive; they need not sum to 1.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = np.asarray(weights, np.float64)
        self._shares = total / total.sum()
        self._owed = np.zeros(len(total))

    def next(self, batch_size: int) -> IntArray:
        """How many items of the next batch each source gives, (S,), in all `batch_size`."""
        wanted = self._shares * batch_size + self._owed
        # Who got more than its share before may owe now, so that the others are due more than there is.
        due = np.maximum(wanted, 0)
        due *= batch_size / due.sum()
        counts: IntArray = np.floor(due).astype(np.int64)
        short = batch_size - int(counts.sum())
        counts[np.argsort(counts - due, kind="stable")[:short]] += 1
        self._owed = wanted - counts
        return counts
