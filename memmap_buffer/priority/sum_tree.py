"""The sum tree: priorities as the leaves of a heap over one array, mapped or in memory. It opens no file.

Node 1 would be the root, nodes 2n and 2n + 1 are the children of n, leaf i is node `capacity` + i. Of the levels only
every third from the leaves up is kept: a step goes from n to one of 8n … 8n + 7, which lie in one cache line and one
page, and these are the cost of a large tree. A node is recomputed from those eight, pair by pair, and never
incremented, so nothing drifts. The at most 2048 nodes of the top level are taken as one cumulative sum, and no levels
above them are kept. Behind the heap lies a second one for the minimum over positive leaves, which is written
only where it is asked for.

Trees that are `joined` are gone through at once, where a call for each would outweigh a batch. These need the levels
above the top level, too: they are kept in memory (`levels`), and made anew once a tree was stored to by itself.

A leaf of -0.0 is one that has the priority 0, where one of 0.0 is no item at all: both are never drawn, and add
nothing. Where numba is installed, `load_loops` has all trees go by the loops of `kernels`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import FloatArray, all_of, check_count
from memmap_buffer.errors import NotEnoughDataError, SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.syscalls import address_of, bytes_at, memory, no_fork_during
from memmap_buffer.priority import kernels
from memmap_buffer.priority.kernels import Kernels

TOP = 11  # at most 2**TOP nodes are summed up at once
STEP = 3  # levels that are gone at once
WIDTH = 1 << STEP
KIND = 1  # the number of this arrangement; another TOP or STEP is another one
MANY = 4096  # from here on it pays to visit a node above two changed ones only once
LEAST = 1e-9  # of a sum: what is left of it by subtraction is rounded
MAX_PRIORITY = 1e250  # 2**60 of them still have a finite sum
_INFINITY = np.uint64(0x7FF0000000000000)
_TOTAL = attrgetter("total")
_NO_SUMS: FloatArray = np.zeros(0)
_loading = threading.RLock()  # two threads that load the loops at the same time may end the process
no_fork_during(_loading)  # a child forked in the middle of an import waits for ever when it imports the same


def capacity_of(leaves: int) -> int:
    """The smallest power of two that holds so many leaves."""
    return 1 << max(1, (leaves - 1).bit_length())


def num_nodes(leaves: int) -> int:
    """How many float64 a tree of so many leaves needs."""
    return 3 * capacity_of(leaves)


class DamagedSumsError(Exception):
    """The sums of a tree, the argument, do not add up, so nothing can be drawn by them."""


class SumTree:
    """Priorities with their sums; zero means that a leaf is never drawn.

    It is a tree by itself, or several trees that are `joined`: of these `of` (B,) says in which each leaf is, and the
    methods without it are not for them.

    Args:
        nodes: (num_nodes(leaves),) float64, zeros for a new tree, or the nodes of an earlier one.
        leaves: the number of leaves.
        minima: keep the minimum over positive leaves up to date; `refresh` the leaves of an array that has none yet.

    Attributes:
        loops: the compiled loops that it goes by, None as long as numpy does it all.
        trees: those that are joined; they are held, so their nodes stay where they are.
    """

    loops: Kernels | None = None
    trees: tuple[SumTree, ...] = ()
    _apart = False

    def __init__(self, nodes: FloatArray, leaves: int, *, minima: bool = False) -> None:
        self.leaves = leaves
        self.minima = minima
        self.capacity = self._first = capacity_of(leaves)
        assert nodes.shape == (3 * self.capacity,)
        depth = self.capacity.bit_length() - 1
        self._steps = self._full = max(0, -((TOP - depth) // STEP))
        self._top = self.capacity >> STEP * self._steps
        self._words: FloatArray = nodes[: 2 * self.capacity]
        self._below: FloatArray = self._words[: 2 * self.capacity // WIDTH * WIDTH].reshape(-1, WIDTH)
        self._offsets: IntArray = np.zeros((self._steps + 1, 1), np.int64)
        self._keys = nodes[2 * self.capacity :].view(np.uint64)
        self._keys_below = self._keys[: self.capacity // WIDTH * WIDTH].reshape(-1, WIDTH)
        self._sums: FloatArray | None = None
        sizes = [self._top >> STEP * i for i in range(1, TOP) if self._top >> STEP * (i - 1) > 1]
        self._above: list[FloatArray] = [np.zeros(max(size, WIDTH)) for size in sizes]
        self._summed_up = False

    @classmethod
    def empty(cls, leaves: int, *, minima: bool = False) -> SumTree:
        """A tree of so many leaves in memory, all 0.

        Raises:
            SchemaError: it is no whole number from 1, or there is not so much memory.
        """
        check_count("leaves", leaves)
        count = num_nodes(leaves)
        try:
            return cls(np.zeros(count), leaves, minima=minima)
        except MemoryError:
            raise SchemaError(
                f"priorities of {leaves} steps take {count >> 27} GiB, more than there is memory; open it to write, "
                "where those of TD errors are in a file, or record into a folder of a lower max_timesteps"
            ) from None

    def __repr__(self) -> str:
        return f"<SumTree of {self.leaves} leaves, total {self.total}>"

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(np.add.reduce(self.totals()) if self.trees else self._cumulative()[-1])

    def totals(self) -> FloatArray:
        """(T,) the sum of each of the trees that are joined, or of the only one; NaN may be one that is damaged."""
        if not self.trees:
            return self._cumulative()[-1:]
        if self._apart:
            return np.array([*map(_TOTAL, self.trees)])
        for tree in self.trees:
            tree.sum_up()
        sums: FloatArray = self._words.take(self._offsets[-1] + 1)
        return sums

    @property
    def sound(self) -> bool:
        """Whether the top level adds up, to a total that can be; `find` tells of damage below."""
        top, below = self._words[self._top : 2 * self._top], self._words[WIDTH * self._top : 2 * WIDTH * self._top]
        return bool(0 <= self.total < np.inf and (not self._steps or (_sums_of_eight(below) == top).all()))

    @property
    def minimum(self) -> float:
        """The smallest positive priority, 0 where there is none; only with `minima`, and of a tree by itself."""
        assert self.minima
        if not self._steps:
            leaves = self._words[self.capacity :]
            return float(leaves.min(initial=np.inf, where=leaves > 0)) if leaves.any() else 0.0
        best = self._keys[self._top : 2 * self._top].max()
        return float((_INFINITY - best).view(np.float64)) if best else 0.0

    def get(self, leaves: IntArray, of: IntArray | None = None) -> FloatArray:
        """The priorities of leaves (B,)."""
        if not self._apart:
            nodes = leaves + self._first
            return self._words.take(nodes if of is None else self._offsets[0].take(of) + nodes)
        assert of is not None
        out = np.empty(len(leaves))
        for i, (mine, part) in by_tree(of, np.arange(len(leaves)), leaves):
            out[mine] = self.trees[i].get(part)
        return out

    def set(self, leaves: IntArray, priorities: FloatArray) -> None:
        """Give leaves (B,) their priorities (B,); of a leaf that stands twice the last counts.

        Raises:
            SchemaError: a priority is negative, NaN or infinite, or there is no such leaf; nothing was set.
        """
        self._check(leaves, priorities)
        self.put(leaves, priorities)

    def put(self, leaves: IntArray, priorities: FloatArray, of: IntArray | None = None) -> None:
        """`set` of priorities that are known to be right."""
        if self._apart and of is not None:
            for i, parts in by_tree(of, leaves, priorities):
                self.trees[i].put(*parts)
            return
        stored = [self]
        if of is not None:  # only these: the others may be another thread's just now
            stored = [self.trees[i] for i in np.flatnonzero(np.bincount(of)).tolist()]
            for tree in stored:
                tree.sum_up()
        if self.loops is None or self.minima:
            nodes = leaves + self._first  # numpy: of a repeated index the last value is assigned
            self._words[nodes if of is None else self._offsets[0].take(of) + nodes] = priorities
            self.refresh(leaves, of)
        else:
            which = np.zeros(len(leaves), np.int64) if of is None else np.ascontiguousarray(of)
            leaves, priorities = np.ascontiguousarray(leaves), np.ascontiguousarray(priorities)
            self.loops.put(self._words, self._offsets, self._first, which, leaves, priorities)
        for tree in stored:
            tree._sums, tree._summed_up = None, of is not None

    def add(self, leaves: IntArray, amounts: FloatArray) -> None:
        """Add amounts (B,) to leaves (B,); of a leaf that stands twice both count. Raises SchemaError, as `set`."""
        unique, place = np.unique(leaves, return_inverse=True)
        self._check(unique, np.zeros(len(unique)))
        self.set(unique, self.get(unique) + np.bincount(place, amounts, len(unique)))

    def refresh(self, leaves: IntArray, of: IntArray | None = None) -> None:
        """Recompute the nodes above leaves."""
        nodes = leaves + self._first
        many = of is None and len(nodes) >= MANY
        if many:
            nodes.sort(kind="stable")  # nearly nothing where they are sorted; numpy's `unique` takes 20 times as long
        for level in range(1, len(self._offsets)):
            nodes >>= STEP
            if many:
                nodes = nodes[np.concatenate([[True], nodes[1:] != nodes[:-1]])]
            eight = self._eight(level - 1, nodes, of)
            self._words[nodes if of is None else self._offsets[level].take(of) + nodes] = _sums_of_eight(eight)
            if self.minima:
                keys = _keys_of(eight.reshape(-1, WIDTH)) if level == 1 else self._keys_below.take(nodes, axis=0)
                self._keys[nodes] = keys.max(axis=1)
        self._sums, self._summed_up = None, False

    @property
    def levels(self) -> list[FloatArray]:
        """The nodes of all levels, from the leaves up to the sum of all; see `sum_up`. Not of under 8 leaves."""
        kept = [self.capacity >> STEP * i for i in range(self._steps + 1)]
        return [self._words[first : 2 * first] for first in kept] + self._above

    def sum_up(self) -> None:
        """Have the levels above the top level, too; these end with zeros where there are fewer than eight nodes."""
        if not self._summed_up:
            nodes = self._words[self._top : 2 * self._top]
            for above in self._above:
                sums = _sums_of_eight(nodes)
                above[: len(sums)] = sums
                nodes = above
            self._summed_up = True

    def find(self, values: FloatArray, of: IntArray | None = None) -> tuple[IntArray, FloatArray]:
        """The leaves (B,) at values (B,) in [0, total] of the cumulative sum, and their priorities.

        A priority of 0 tells of damaged sums: the value lies behind its leaf, which is above the sum that it is part
        of, or beside a negative one. The tree must not be empty. Of trees that are joined, after `totals`, an empty one
        has a leaf of 0.
        """
        if self._apart and of is not None:
            leaves, priorities = np.empty_like(of), np.empty_like(values)
            for i, (mine, part) in by_tree(of, np.arange(len(of)), values):
                leaves[mine], priorities[mine] = self.trees[i].find(part)
            return leaves, priorities
        sums = _NO_SUMS if of is not None else self._sums if self._sums is not None else self._cumulative()
        if self.loops is not None:
            leaves, priorities = np.empty(len(values), np.int64), np.empty(len(values))
            which = np.zeros_like(leaves) if of is None else np.ascontiguousarray(of)
            values = np.ascontiguousarray(values)
            self.loops.find(self._words, self._offsets, self._first, sums, which, values, leaves, priorities)
            return leaves, priorities
        if of is None:
            nodes = sums.searchsorted(values, "right")
            nodes -= 1
            if not all_of(values < sums[-1]):  # what rounding brought to the end is of the last that adds something
                np.minimum(nodes, sums.searchsorted(sums[-1]) - 1, out=nodes)
            left_over = values - sums.take(nodes)
            nodes += self._top
        else:
            nodes, left_over = np.ones_like(of), values
        with np.errstate(invalid="ignore"):  # an infinite node is a damaged one
            leaves, priorities, rest, above, eight = self._descend(nodes, left_over, of, careful=False)
            least = eight.item(eight.argmin()) if len(eight) else 0  # in half the time of `min`; NaN if there is one
            if all_of((rest < priorities) & (priorities <= above)) and least >= 0:
                return leaves, priorities
            # Rounding may have left a value at the end of a node, by some billionth of it.
            leaves, priorities, rest, above, eight = self._descend(nodes, left_over, of, careful=True)
            sound = (rest - priorities <= LEAST * values) & (priorities > 0) & (priorities <= above)
            if len(eight):
                sound &= eight.reshape(len(nodes), -1).min(axis=1) >= 0
            priorities[~sound] = 0
        return leaves, priorities

    def _descend(
        self, nodes: IntArray, left_over: FloatArray, of: IntArray | None, *, careful: bool
    ) -> tuple[IntArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """`find` below nodes: the leaves and their priorities; what tells whether these are sound.

        Args:
            careful: where rounding left a value at the end of a node, take the last leaf that adds something.

        Returns: (..., what is left of each value before its leaf, the sum of the eight that the leaf is one of, and
            these, (8 * B,)); of a tree without levels below the top one, the priority again, and none.
        """
        left_over, first, above, eight = left_over.copy(), np.arange(len(nodes)), nodes, _NO_SUMS
        for level in range(self._steps - 1, -1, -1):
            eight, above = self._eight(level, nodes, of), nodes
            into = careful or level >= self._full  # behind the last level of a low tree are zeros, which are no nodes
            nodes = WIDTH * (nodes - first) + _chosen(eight, left_over, first, into)
        priorities = self._words.take(nodes if of is None else self._offsets[0].take(of) + nodes)
        if not self._steps:
            return nodes - self._first, priorities, left_over, priorities, eight
        sums = self._words.take(above if of is None else self._offsets[1].take(of) + above)
        return nodes - self._first, priorities, left_over, sums, eight

    def _eight(self, level: int, nodes: IntArray, of: IntArray | None) -> FloatArray:
        """(8 * B,) the nodes of a level that lie below nodes."""
        if of is None:
            return self._below.take(nodes, axis=0).reshape(-1)
        return bytes_at(8 * (self._offsets[level].take(of) + WIDTH * nodes), 8 * WIDTH).view(np.float64)

    def before(self, leaves: IntArray) -> FloatArray:
        """The cumulative sum before leaves (B,) of a tree by itself."""
        nodes, sums = leaves + self.capacity, np.zeros(len(leaves))
        for _ in range(self._steps):
            eight = self._below.take(nodes >> STEP, axis=0)
            sums += np.where(np.arange(WIDTH) < (nodes % WIDTH)[:, None], eight, 0.0).sum(axis=1)
            nodes >>= STEP
        return sums + self._cumulative().take(nodes - self._top)

    def query(self, values: FloatArray) -> tuple[IntArray, FloatArray]:
        """`find` of values that are checked.

        Args:
            values: (B,) from 0 to `total`.

        Raises:
            NotEnoughDataError: every priority is 0.
            SchemaError: a value is beyond the total, or none.
        """
        values, total = np.asarray(values, np.float64), self._require_total()
        if values.ndim != 1 or not ((values >= 0) & (values <= total)).all():
            raise SchemaError(f"values: got {values}, expected (B,) numbers from 0 to the total, {total}")
        return self.find(values)

    def draw(self, count: int, rng: np.random.Generator, *, stratified: bool = True) -> IntArray:
        """Leaves (count,) drawn with replacement, each in proportion to its priority; see `spread`.

        Raises:
            NotEnoughDataError: every priority is 0.
        """
        return self.find(spread(count, self._require_total(), rng, stratified=stratified))[0]

    def _require_total(self) -> float:
        total = self.total
        if not total > 0:
            raise NotEnoughDataError("nothing to draw: every priority of the tree is 0", episodes=0)
        return total

    def _cumulative(self) -> FloatArray:
        """0, then the sums of the top level's nodes up to each; NaN at the end where a damaged one is negative."""
        if self._sums is None:
            sums, nodes = np.empty(self._top + 1), self._words[self._top : 2 * self._top]
            if self.loops is not None:
                self.loops.accumulate(nodes, sums)
            else:
                sums[0] = 0
                np.add.accumulate(nodes, out=sums[1:])
                if np.minimum.reduce(nodes) < 0:
                    sums[-1] = np.nan
            self._sums = sums  # when they are whole: an interrupt may come in between
        return self._sums

    def _check(self, leaves: IntArray, priorities: FloatArray) -> None:
        if not len(leaves):
            return
        if leaves.min() < 0 or leaves.max() >= self.leaves:
            wrong = leaves[(leaves < 0) | (leaves >= self.leaves)][0]
            raise SchemaError(f"leaf {wrong}: the tree has {self.leaves}, counted from 0")
        if not 0 <= priorities.min() <= priorities.max() <= MAX_PRIORITY:  # false for NaN, too
            wrong = np.flatnonzero(~((priorities >= 0) & (priorities <= MAX_PRIORITY)))[0]
            raise SchemaError(
                f"priority of leaf {leaves[wrong]}: got {priorities[wrong]}, expected a number from 0 to {MAX_PRIORITY}"
            )


def joined(trees: Sequence[SumTree], *, apart: bool = False) -> SumTree:
    """Several trees as one: one call finds, reads or stores leaves of all, as a call for each outweighs a batch.

    Args:
        trees: at least one. They stay what they are, and may be stored to by themselves.
        apart: go through each by itself, as is done where one has under eight leaves, or keeps minima.
    """
    several = SumTree.__new__(SumTree)
    several.trees, several.leaves = tuple(trees), sum(tree.leaves for tree in trees)
    several.minima = any(tree.minima for tree in trees)
    several._apart = apart or several.minima or any(tree.leaves < WIDTH for tree in trees)
    if several._apart:
        return several
    levels = [tree.levels for tree in trees]
    heights = [len(each) - 1 for each in levels]
    several._steps, several._full = max(heights), min(heights) - 1
    several._first = WIDTH**several._steps
    several._words = memory().view(np.float64)
    # (levels, trees) what the places of nodes are beyond their numbers; a low tree has its sum on several levels.
    begins = [[each[min(i, len(each) - 1)] for each in levels] for i in range(several._steps + 1)]
    several._offsets = np.array([[address_of(nodes) >> 3 for nodes in level] for level in begins])
    several._offsets -= several._first >> STEP * np.arange(several._steps + 1)[:, None]
    return several


def by_tree(of: IntArray | None, *columns: Any) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Of each tree, or folder, that items (B,) are in: its number, and its items' part of some columns (B,)."""
    if of is None:
        yield 0, columns
        return
    order = np.argsort(of, kind="stable")
    count, columns, end = np.bincount(of), tuple(column[order] for column in columns), 0
    for i in np.flatnonzero(count).tolist():
        start, end = end, end + count.item(i)
        yield i, tuple(column[start:end] for column in columns)


def distinct(trees: Sequence[SumTree], count: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
    """(count,) in which tree, and at which value of its sum, different leaves are, drawn one after another.

    Each is drawn in proportion to its priority among those that are left: a value of what is left of the sum is found
    behind the leaves that lie before it and were drawn. One that is found twice at once is passed over the second time,
    which leaves the chances of the others as they are to each other.

    Raises:
        DamagedSumsError: those of a tree do not add up.
        NotEnoughDataError: less than `LEAST` of the sum is left for the next one.
    """
    totals = np.array([*map(_TOTAL, trees)])
    for i in np.flatnonzero(~((totals >= 0) & (totals < np.inf))).tolist():
        raise DamagedSumsError(trees[i])
    ends, total, most = totals.cumsum(), float(totals.sum()), max(tree.leaves for tree in trees)
    of, leaves = np.zeros((2, 0), np.int64)
    begins, sizes = np.zeros((2, 0))
    while len(of) < count:
        order = np.argsort(begins)
        taken = np.append(0, sizes[order].cumsum())
        remaining = total - taken.item(-1)
        if remaining <= LEAST * total:
            raise NotEnoughDataError(
                f"replacement=False: {len(of)} items have all but a billionth of the priorities, {count} are wanted; "
                "lower batch_size, or the highest priorities, by alpha or error_clip"
            )
        values = rng.random(count - len(of)) * remaining
        values += taken.take(np.searchsorted(begins[order] - taken[:-1], values, side="right"))
        which = np.minimum(ends.searchsorted(values, "right"), totals.nonzero()[0][-1])
        within = np.clip(values - (ends - totals).take(which), 0, totals.take(which))
        chosen, size, begin = np.zeros_like(which), np.zeros_like(within), np.zeros_like(within)
        for i, (mine, part) in by_tree(which, np.arange(len(which)), within):
            chosen[mine], size[mine] = trees[i].find(part)
            if not all_of(size[mine] > 0):
                raise DamagedSumsError(trees[i])
            begin[mine] = (ends[i] - totals[i]) + trees[i].before(chosen[mine])
        of, leaves = np.append(of, which), np.append(leaves, chosen)
        begins, sizes = np.append(begins, begin), np.append(sizes, size)
        kept = np.sort(np.unique(of * most + leaves, return_index=True)[1])
        of, leaves, begins, sizes = of[kept], leaves[kept], begins[kept], sizes[kept]
    return of, begins - (ends - totals).take(of) + sizes / 2


def load_loops() -> None:
    """Have all trees go by the compiled loops; the first time this may take some seconds."""
    with _loading:
        if SumTree.loops is None:
            SumTree.loops = kernels.compiled()


def with_zeros(priorities: FloatArray) -> FloatArray:
    """Priorities as leaves of items: 0 as -0.0."""
    return np.asarray(np.where(priorities > 0, priorities, -0.0))


def _sums_of_eight(nodes: FloatArray) -> FloatArray:
    """Nodes (8 * K,) as the sums (K,) of each eight, pair by pair."""
    for _ in range(STEP):
        nodes = nodes[::2] + nodes[1::2]
    return nodes


def _chosen(eight: FloatArray, left_over: FloatArray, first: IntArray, careful: bool) -> IntArray:
    """The place, among all of them, of that of eight nodes (8 * B,) which holds each value.

    Args:
        left_over: (B,) the values; what lies before the nodes is taken off.
        first: 0 … B - 1.
        careful: see `SumTree._descend`.
    """
    four, at = eight[::2] + eight[1::2], first  # flat, as numpy takes a loop for each row of a few columns
    for sums in (four[::2] + four[1::2], four, eight):
        at = at + at
        lower = sums.take(at)
        right = left_over >= lower
        if careful:
            right &= sums.take(at + 1) > 0
        lower *= right
        left_over -= lower
        at += right
    return at


def _keys_of(priorities: FloatArray) -> npt.NDArray[np.uint64]:
    """(B, K) keys of leaves: larger for smaller ones, 0 for none, so that holes are empty.

    The bits of positive floats are ordered as they are.
    """
    bits = priorities.view(np.uint64)
    return np.asarray(np.where(priorities > 0, _INFINITY - bits, np.uint64(0)))


def spread(count: int, total: float, rng: np.random.Generator, *, stratified: bool) -> FloatArray:
    """Values (count,) in [0, total): uniform, or one in each of `count` segments of equal length.

    Source: Schaul et al. 2016, appendix B.2.1.
    """
    values = rng.random(count)
    if stratified:
        values += np.arange(count)
        values *= total / max(count, 1)
    else:
        values *= total
    if total < 1e-290:  # of so small numbers products are rounded beyond it
        np.minimum(values, total, out=values)
    return values
