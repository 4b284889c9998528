"""Chance: shuffles that hold no list, and exact shares; each number is computed without those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.items.index import Index
from memmap_buffer.views.anchors import GOLDEN, splitmix

ROUNDS = 6
FEW = 512  # items: the network favours some orders of so few, and to sort them takes no longer
BLOCKS = 64  # in a window: so many places are mixed, each read in one go
HEADS = 8  # of each place of the first window such a part is given before the rest: who waits for it waits for less
U64 = np.uint64


class Permutation:
    """A pseudorandom bijection on [0, n), computed position by position; it holds no list of more than `FEW`.

    A Feistel network over the smallest even number of bits that holds n, walked along its cycle until the value is
    below n (at most 4 steps on average). Few items are sorted by a random number each, so that every order is equally
    likely.

    Args:
        n: how many.
        seed: whole numbers that choose it.

    Source: Luby and Rackoff 1988, "How to construct pseudorandom permutations"; Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains" (cycle walking).
    """

    def __init__(self, n: int, *seed: int) -> None:
        self._n = n
        self._order = np.argsort(uniform(np.arange(n), *seed), kind="stable") if n <= FEW else None
        self._half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
        self._keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)

    def __call__(self, i: npt.NDArray[np.integer]) -> IntArray:
        """Where positions `i` (B,) in [0, n) go."""
        if self._order is not None:
            return np.asarray(self._order[i], np.int64)
        value = self._encrypt(i.astype(U64))
        outside = np.flatnonzero(value >= U64(self._n))
        while outside.size:
            value[outside] = self._encrypt(value[outside])
            outside = outside[value[outside] >= U64(self._n)]
        return np.asarray(value, np.int64)

    def _encrypt(self, value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, mask = U64(self._half), U64((1 << self._half) - 1)
        high, low = value >> half, value & mask
        for key in self._keys:
            mixed = (low ^ key) * U64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> U64(29))) * U64(0xBF58476D1CE4E5B9)
            high, low = low, high ^ ((mixed >> U64(32)) & mask)
        return np.asarray((high << half) | low)


class BlockShuffle:
    """A pseudorandom bijection on [0, n) whose any run of neighbours comes from a few places; it holds no list.

    Blocks of neighbouring positions are taken in a random order, so many together, and shuffled within that window. The
    blocks begin at another position for every seed, so that their borders are no one's fate. The first window begins
    with the first part of each of its blocks: as many places, for an eighth of the bytes.

    Args:
        n: how many.
        block, window: positions; the window is a multiple of the block.
        seed: choose it.
    """

    def __init__(self, n: int, block: int, window: int, *seed: int) -> None:
        self._n, self._block, self.window, self._seed = n, block, window, seed
        self._begin = int(Permutation(n, *seed, 1)(np.zeros(1, np.int64))[0])
        self._whole = n // block  # what is left over is one more block, and the last
        self._places = Permutation(self._whole, *seed, 2)

    def __call__(self, i: IntArray) -> IntArray:
        """Where positions `i` (B,) in [0, n) go."""
        number, within = np.divmod(i, self.window)
        for window, mine in _groups(number):
            size = min(self.window, self._n - window * self.window)
            within[mine] = self._mixed(window, size, within[mine])
        block, offset = np.divmod(number * self.window + within, self._block)
        whole = np.flatnonzero(block < self._whole)
        block[whole] = self._places(block[whole])
        return np.asarray((self._begin + block * self._block + offset) % self._n)

    def _mixed(self, window: int, size: int, i: IntArray) -> IntArray:
        """Where positions `i` (B,) of a window of so many go in it."""
        count, head = size // self._block, 0 if window else self._block // HEADS
        first = count * head
        if not first:
            return Permutation(size, *self._seed, 3, window)(i)
        is_first = i < first
        place, offset = np.divmod(Permutation(first, *self._seed, 3)(i[is_first]), head)
        rest = Permutation(size - first, *self._seed, 4)(i[~is_first] - first)
        later, behind = np.divmod(rest, self._block - head)
        out = np.empty_like(i)
        out[is_first] = place * self._block + offset
        out[~is_first] = np.where(
            later < count, later * self._block + head + behind, rest + first
        )  # a cut block is whole
        return out

    def places(self, window: int) -> list[tuple[int, int]]:
        """The positions, from and to, of the blocks of a window; a block that runs over the end is two."""
        count = self.window // self._block
        block = np.arange(window * count, min((window + 1) * count, -(-self._n // self._block)))
        sizes = np.minimum(self._block, self._n - block * self._block)
        whole = block < self._whole
        block[whole] = self._places(block[whole])
        low = (self._begin + block * self._block) % self._n
        places = list(zip(low.tolist(), (low + sizes).tolist(), strict=True))
        over = [(0, high - self._n) for _, high in places if high > self._n]
        return [(low, min(high, self._n)) for low, high in places] + over


def uniform(i: IntArray, *seed: int) -> npt.NDArray[np.float64]:
    """Numbers (B,) in [0, 1), the `i`-th of the sequence that the seed chooses."""
    key = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return np.asarray((splitmix(i.astype(U64) * U64(GOLDEN) + key) >> U64(11)).astype(np.float64) * 2.0**-53)


class Quota:
    """The folder that gives each item of a stream, so that every part of it has the shares of the weights.

    The folders are halved again and again, and of the first n items of a half its first half gives its share, rounded:
    so the counts of any part follow without those before it, and what does not divide is carried over.

    Args:
        weights: (S,) positive; they need not sum to 1.

    Attributes:
        folders: S.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights, self.folders = np.asarray(weights, np.float64), len(weights)

    def num_given(self, n: IntArray | int) -> IntArray:
        """How many of the first `n` (…) items each folder gives, (S, …)."""
        return np.stack(_halved(np.asarray(n, np.int64), self._weights))

    def turns(self, i: IntArray) -> tuple[IntArray, IntArray]:
        """The folder of each item number (B,), and which of that folder's items it is."""
        before = self.num_given(i)
        folder = np.argmax(self.num_given(i + 1) - before, axis=0)
        return folder, np.take_along_axis(before, folder[None], 0)[0]


def _halved(n: IntArray, weights: npt.NDArray[np.float64]) -> list[IntArray]:
    if len(weights) == 1:
        return [n]
    half = len(weights) // 2
    first = np.floor(n * (weights[:half].sum() / weights.sum()) + 0.5).astype(np.int64)
    return [*_halved(first, weights[:half]), *_halved(n - first, weights[half:])]


@dataclass(frozen=True)
class Shuffle:
    """How an epoch is shuffled.

    Args:
        kind: False, True or "block".
        window: with "block", how many items are shuffled together.
        blocks: of how many places.
    """

    kind: bool | str
    window: int = 0
    blocks: int = BLOCKS

    @property
    def block(self) -> int:
        """How many neighbouring items each place has."""
        return max(1, self.window // self.blocks)

    def state(self) -> dict[str, Any]:
        """The shuffle as a state has it."""
        return {"shuffle": self.kind, "window": self.window, "blocks": self.blocks}

    def turn(self, n: int, *seed: int) -> Callable[[IntArray], IntArray] | None:
        """The bijection on [0, n) that a seed chooses; None leaves them in order."""
        if not self.kind:
            return None
        if self.kind is True:
            return Permutation(n, *seed)
        return BlockShuffle(n, self.block, self.window // self.block * self.block, *seed)


class Order:
    """The order of one epoch: the position in the index of any of its items, by the item's number.

    Args:
        index: the items.
        bounds: where each folder begins in the index, and its end.
        shuffle: their order; a weighted index is drawn from with replacement instead.
        quota: the shares of the folders, each of which goes round in an order of its own; None: all are one.
        seed: whole numbers that choose it.
    """

    def __init__(self, index: Index, bounds: Sequence[int], shuffle: Shuffle, quota: Quota | None, *seed: int) -> None:
        self._index, self._bounds, self._shuffle, self._quota, self._seed = index, bounds, shuffle, quota, seed

    def positions(self, i: IntArray) -> IntArray:
        """The positions (B,) of items number `i` (B,); beyond the last item it begins anew, in another order."""
        if self._quota is None:
            return self._rounds(0, len(self._index), i, *self._seed)
        folder, i = self._quota.turns(i)
        out = np.empty_like(i)
        for number, (start, stop) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            mine = np.flatnonzero(folder == number)
            out[mine] = self._rounds(start, stop, i[mine], *self._seed, number)
        return out

    def _rounds(self, start: int, stop: int, i: IntArray, *seed: int) -> IntArray:
        """Positions start … stop - 1, round after round."""
        if self._index.weight_sums is not None:
            return self._index.pick(uniform(i, *seed), start, stop)
        number = i // (stop - start)
        within = i - number * (stop - start)
        for turn, mine in _groups(number):
            bijection = self._shuffle.turn(stop - start, *seed, turn)
            if bijection is not None:
                within[mine] = bijection(within[mine])
        return start + within


def _groups(number: IntArray) -> Iterator[tuple[int, IntArray | slice]]:
    """Each number, and where it stands; mostly there is but one."""
    if number.size and (number == number[0]).all():
        yield int(number[0]), slice(None)
        return
    for each in np.unique(number).tolist():
        yield each, np.flatnonzero(number == each)
