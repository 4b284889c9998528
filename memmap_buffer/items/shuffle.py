"""The order of an epoch: shuffles and shares of folders that are computed for any item number, without a list of items.

`loading.epochs` asks an `Order` for the positions in the index of the items of a batch. The `Order` uses a `Shuffle`
(`Permutation` or `BlockShuffle`), and a `Quota` where folders have weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.items.index import Index
from memmap_buffer.views.anchors import GOLDEN, splitmix

ROUNDS = 6  # of the Feistel network
FEW = 512  # items: up to so many are sorted, which is as fast; of so few the network favours some orders
BLOCKS = 64  # blocks in a window: so many places are mixed, and each is read in one go
# The first window begins with the first 1 / HEADS of each of its blocks: there is less to fetch before the first batch.
HEADS = 8
U64 = np.uint64


class Permutation:
    """A pseudorandom bijection on [0, n), computed position by position; it holds no list of more than `FEW` items.

    A Feistel network over the smallest even number of bits that holds n, applied again while the value is not below n
    (at most 4 times on average). Up to `FEW` items are sorted by a random number each instead, so that every order is
    equally likely.

    Args:
        n: the number of items.
        seed: whole numbers that choose the bijection.

    Source: Luby and Rackoff 1988, "How to construct pseudorandom permutations"; Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains" (cycle walking).
    """

    def __init__(self, n: int, *seed: int) -> None:
        self._n = n
        self._order = np.argsort(uniform(np.arange(n), *seed), kind="stable") if n <= FEW else None
        self._half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
        self._keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)

    def __call__(self, i: npt.NDArray[np.integer]) -> IntArray:
        """The images (B,) int64 of the positions `i` (B,) in [0, n)."""
        if self._order is not None:
            return np.asarray(self._order[i], np.int64)
        value = self._encrypt(i.astype(U64))
        outside = np.flatnonzero(value >= U64(self._n))
        while outside.size:
            value[outside] = self._encrypt(value[outside])
            outside = outside[value[outside] >= U64(self._n)]
        return np.asarray(value, np.int64)

    def _encrypt(self, value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The Feistel network, a bijection on [0, 4 ** half)."""
        half, mask = U64(self._half), U64((1 << self._half) - 1)
        high, low = value >> half, value & mask
        for key in self._keys:
            mixed = (low ^ key) * U64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> U64(29))) * U64(0xBF58476D1CE4E5B9)
            high, low = low, high ^ ((mixed >> U64(32)) & mask)
        return np.asarray((high << half) | low)


class BlockShuffle:
    """A pseudorandom bijection on [0, n) that mixes items within windows, each made of a few blocks of neighbours.

    [0, n) is cut into blocks of neighbouring positions. The blocks are taken in a random order; several together are a
    window, in which all items are shuffled. So a reader needs only the few places of one window at a time. The first
    block begins at another position for every seed, so that no two neighbours are always in different blocks. The first
    window begins with the first part of each of its blocks: as many places, for 1 / `HEADS` of the bytes.

    Args:
        n: the number of items.
        block, window: their numbers of positions; the window is a multiple of the block.
        seed: whole numbers that choose the bijection.
    """

    def __init__(self, n: int, block: int, window: int, *seed: int) -> None:
        self._n, self._block, self.window, self._seed = n, block, window, seed
        self._begin = int(Permutation(n, *seed, 1)(np.zeros(1, np.int64))[0])
        self._whole = n // block  # the number of whole blocks; the rest is a shorter block, always the last
        self._places = Permutation(self._whole, *seed, 2)

    def __call__(self, i: IntArray) -> IntArray:
        """The images (B,) int64 of the positions `i` (B,) in [0, n)."""
        number, within = np.divmod(i, self.window)
        for window, chosen in _groups(number):
            size = min(self.window, self._n - window * self.window)
            within[chosen] = self._mixed(window, size, within[chosen])
        block, offset = np.divmod(number * self.window + within, self._block)
        whole = np.flatnonzero(block < self._whole)
        block[whole] = self._places(block[whole])
        return np.asarray((self._begin + block * self._block + offset) % self._n)

    def _mixed(self, window: int, size: int, i: IntArray) -> IntArray:
        """The images (B,), within a window of `size` positions, of the positions `i` (B,) in it."""
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
        )  # the shorter last block has no head
        return out

    def places(self, window: int) -> list[tuple[int, int]]:
        """(first, stop) positions of each block of a window; a block that runs over n is given in two pieces."""
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
    """(B,) float64 in [0, 1): the `i`-th numbers of the random sequence that the seed chooses."""
    key = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return np.asarray((splitmix(i.astype(U64) * U64(GOLDEN) + key) >> U64(11)).astype(np.float64) * 2.0**-53)


class Quota:
    """The folder that gives each item of an endless sequence, so that every part of it has the shares of the weights.

    The folders are divided into two halves, these again, and so on. Of the first n items of any half, its own first
    half gives its share, rounded. So the counts are computed for any n directly, and roundings do not add up.

    Args:
        weights: (S,) positive; they need not sum to 1.

    Attributes:
        folders: the number of folders S.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights, self.folders = np.asarray(weights, np.float64), len(weights)

    def num_given(self, n: IntArray | int) -> IntArray:
        """(S, …) the number of items that each folder gives among the first `n` (…)."""
        return np.stack(_halved(np.asarray(n, np.int64), self._weights))

    def turns(self, i: IntArray) -> tuple[IntArray, IntArray]:
        """(the folder of each item number (B,), the number of the item among those of that folder (B,))."""
        before = self.num_given(i)
        folder = np.argmax(self.num_given(i + 1) - before, axis=0)
        return folder, np.take_along_axis(before, folder[None], 0)[0]


def _halved(n: IntArray, weights: npt.NDArray[np.float64]) -> list[IntArray]:
    """The number of items that each folder gives among the first `n` of all these folders."""
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
        window: with "block", the number of items that are shuffled together.
        blocks: the number of blocks that they come from.
    """

    kind: bool | str
    window: int = 0
    blocks: int = BLOCKS

    @property
    def block(self) -> int:
        """The number of neighbouring items in a block."""
        return max(1, self.window // self.blocks)

    def state(self) -> dict[str, Any]:
        """The shuffle as entries of an epoch's state."""
        return {"shuffle": self.kind, "window": self.window, "blocks": self.blocks}

    def turn(self, n: int, *seed: int) -> Callable[[IntArray], IntArray] | None:
        """The bijection on [0, n) that a seed chooses; None where items stay in order."""
        if not self.kind:
            return None
        if self.kind is True:
            return Permutation(n, *seed)
        return BlockShuffle(n, self.block, self.window // self.block * self.block, *seed)


class Order:
    """The order of one epoch: number of an item -> its position in the index.

    Args:
        index: the items.
        bounds: the position in the index at which each folder begins, and the end of the last one.
        shuffle: the order. Of an index with weights items are drawn, with replacement, instead.
        quota: the shares of the folders; each folder has an order of its own, and begins it anew at its end. None: one
            order for all items.
        seed: whole numbers that choose the order.
    """

    def __init__(self, index: Index, bounds: Sequence[int], shuffle: Shuffle, quota: Quota | None, *seed: int) -> None:
        self._index, self._bounds, self._shuffle, self._quota, self._seed = index, bounds, shuffle, quota, seed

    def positions(self, i: IntArray) -> IntArray:
        """The positions (B,) of the items number `i` (B,); behind the last item all come again, in another order."""
        if self._quota is None:
            return self._rounds(0, len(self._index), i, *self._seed)
        folder, i = self._quota.turns(i)
        out = np.empty_like(i)
        for number, (start, stop) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            chosen = np.flatnonzero(folder == number)
            out[chosen] = self._rounds(start, stop, i[chosen], *self._seed, number)
        return out

    def _rounds(self, start: int, stop: int, i: IntArray, *seed: int) -> IntArray:
        """The positions of the items number `i` (B,): start … stop - 1, again and again, each time in another order."""
        if self._index.weight_sums is not None:
            return self._index.pick(uniform(i, *seed), start, stop)
        round_numbers = i // (stop - start)
        within = i - round_numbers * (stop - start)
        for round_number, chosen in _groups(round_numbers):
            bijection = self._shuffle.turn(stop - start, *seed, round_number)
            if bijection is not None:
                within[chosen] = bijection(within[chosen])
        return start + within


def _groups(number: IntArray) -> Iterator[tuple[int, IntArray | slice]]:
    """Each distinct value of `number`, and the positions at which it stands. Usually there is one value: a slice."""
    if number.size and (number == number[0]).all():
        yield int(number[0]), slice(None)
        return
    for value in np.unique(number).tolist():
        yield value, np.flatnonzero(number == value)
