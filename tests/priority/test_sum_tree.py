"""The sum tree against an array of priorities: sums, minima, draws, refusals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from inside import COMPILED, LOOPS, keys_of, nodes_below_top, nodes_of
from profiles import examples

from memmap_buffer import NotEnoughDataError, SchemaError, SumTree
from memmap_buffer.priority.sum_tree import MANY, joined, num_nodes, spread, with_zeros

SIZES = (1, 2, 3, 7, 1000, 1024, 1025, 5000, 70_000)


def tree_of(leaves, priorities=None, minima=True):
    tree = SumTree(np.zeros(num_nodes(leaves)), leaves, minima=minima)
    if priorities is not None:
        tree.set(np.arange(leaves), np.asarray(priorities, np.float64))
    return tree


def plainly(priorities, value):
    """The first leaf whose cumulative sum passes a value."""
    return int(np.searchsorted(np.cumsum(priorities), value, side="right"))


class Tree(RuleBasedStateMachine):
    """Any calls leave the tree that setting all leaves of a new one at once would make, to the last bit."""

    @initialize(leaves=st.sampled_from(SIZES), seed=st.integers(0, 2**32))
    def begin(self, leaves, seed):
        self.rng, self.want, self.tree = np.random.default_rng(seed), np.zeros(leaves), tree_of(leaves)

    def _leaves(self, count):
        return self.rng.integers(0, len(self.want), count)

    @rule(count=st.sampled_from((0, 1, 5, 300, 2 * MANY)), zeros=st.booleans(), scale=st.integers(-200, 200))
    def set(self, count, zeros, scale):
        leaves, values = self._leaves(count), self.rng.random(count) * 2.0**scale
        values[self.rng.random(count) < 0.5 * zeros] = 0
        self.tree.set(leaves, values)
        for leaf, value in zip(leaves.tolist(), values.tolist(), strict=True):
            self.want[leaf] = value

    @rule(count=st.integers(0, 40))
    def add(self, count):
        leaves, values = self._leaves(count), self.rng.integers(0, 9, count) / 8
        self.tree.add(leaves, values)
        unique = np.unique(leaves)
        self.want[unique] += [sum(values[leaves == leaf]) for leaf in unique]

    @rule(value=st.sampled_from((-1.0, math.nan, math.inf, -1e-300)), at=st.integers(0, 4))
    def refuse(self, value, at):
        values = np.ones(5)
        values[at] = value
        with pytest.raises(SchemaError, match=r"priority of leaf \d+: got -?(1|nan|inf).*, expected a number from 0"):
            self.tree.set(self._leaves(5), values)

    @rule(count=st.integers(1, 300), stratified=st.booleans())
    def draw(self, count, stratified):
        if self.tree.total > 0:
            leaves = self.tree.draw(count, self.rng, stratified=stratified)
            assert (self.tree.get(leaves) > 0).all()

    @invariant()
    def is_what_a_new_one_would_be(self):
        if not hasattr(self, "want"):
            return
        np.testing.assert_array_equal(self.tree.get(np.arange(len(self.want))), self.want)
        new = tree_of(len(self.want), self.want)
        assert self.tree.total == new.total
        assert self.tree.total == pytest.approx(math.fsum(self.want), rel=1e-13)
        positive = self.want[self.want > 0]
        assert self.tree.minimum == new.minimum == (positive.min() if len(positive) else 0)


Tree.TestCase.settings = examples(60, stateful_step_count=12)
TestStates = Tree.TestCase


@examples(80)
@given(st.sampled_from(SIZES), st.integers(0, 2**32))
def test_a_value_finds_the_leaf_that_a_linear_search_finds(leaves, seed):
    rng = np.random.default_rng(seed)
    priorities = rng.integers(0, 5, leaves).astype(float)  # their sums are exact
    priorities[rng.integers(leaves)] = 1
    values = rng.integers(0, int(priorities.sum()), 200) + 0.5
    found = tree_of(leaves, priorities).find(values)[0]
    assert found.tolist() == [plainly(priorities, value) for value in values]


@pytest.mark.parametrize("leaves", SIZES)
def test_values_at_the_edges_never_find_a_leaf_of_priority_zero(leaves):
    """Rounding may bring a value to the end of the sum, or between two leaves."""
    rng = np.random.default_rng(leaves)
    for _ in range(20):
        priorities = np.where(rng.random(leaves) < 0.8, 0, rng.random(leaves) * 10.0 ** rng.integers(-30, 30, leaves))
        priorities[rng.integers(leaves)] = 1e-300
        tree = tree_of(leaves, priorities)
        edges = np.cumsum(priorities)
        values = np.concatenate([[0, tree.total], edges, np.nextafter(edges, 0), np.nextafter(edges, np.inf)])
        assert (tree.get(tree.find(np.clip(values, 0, tree.total))[0]) > 0).all()


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("leaves", [5, 3000])
def test_leaves_are_drawn_in_proportion_to_their_priorities(leaves, stratified):
    """Chi-square: (Σ (o - e)² / e - d) / √(2 d) is about normal; five standard deviations are allowed."""
    rng = np.random.default_rng(7)
    priorities = np.where(np.arange(leaves) % 3 == 0, 0, rng.random(leaves) + 0.1)
    tree = tree_of(leaves, priorities)
    draws = np.concatenate([tree.draw(250, rng, stratified=stratified) for _ in range(1200)])
    seen = np.bincount(draws, minlength=leaves)
    expected = priorities / priorities.sum() * len(draws)
    assert not seen[priorities == 0].any()
    positive = expected > 0
    freedom = positive.sum() - 1
    chi = (((seen - expected) ** 2)[positive] / expected[positive]).sum()
    assert (chi - freedom) / math.sqrt(2 * freedom) < 5


def test_stratified_values_lie_one_in_each_segment():
    rng = np.random.default_rng(0)
    assert (spread(8, 16.0, rng, stratified=True) // 2).tolist() == list(range(8))
    free = spread(1000, 16.0, rng, stratified=False)
    assert 0 <= free.min() < 1 < 15 < free.max() < 16


def test_the_sum_does_not_drift_over_many_updates():
    rng, tree = np.random.default_rng(0), tree_of(3000, np.full(3000, 1e9))
    for _ in range(2000):
        tree.set(rng.integers(0, 3000, 64), rng.random(64) * 1e12)
    tree.set(np.arange(3000), np.full(3000, 0.125))
    assert tree.total == 375.0


def test_a_tree_goes_on_from_the_array_that_another_left():
    nodes = np.zeros(num_nodes(5000))
    SumTree(nodes, 5000).set(np.array([3, 4999]), np.array([2.0, 1.0]))
    tree = SumTree(nodes, 5000, minima=True)
    tree.refresh(np.array([3, 4999]))
    assert (tree.total, tree.minimum) == (3.0, 1.0)
    assert tree.find(np.array([0.0, 1.9, 2.0, 2.9]))[0].tolist() == [3, 3, 4999, 4999]


@pytest.mark.parametrize("leaf", [-1, 5, 10**9])
def test_a_leaf_that_does_not_exist_is_refused_by_its_number(leaf):
    tree = tree_of(5, np.ones(5))
    for change in (tree.set, tree.add):
        with pytest.raises(SchemaError, match=f"leaf {leaf}: the tree has 5, counted from 0"):
            change(np.array([0, leaf]), np.array([7.0, 1.0]))
    assert tree.total == 5


def test_an_amount_that_would_make_a_priority_negative_is_refused():
    tree = tree_of(3, [1, 2, 3])
    with pytest.raises(SchemaError, match=r"priority of leaf 1: got -0\.5"):
        tree.add(np.array([1, 0, 1]), np.array([-2.0, 1.0, -0.5]))
    assert tree.get(np.arange(3)).tolist() == [1, 2, 3]


def test_S3_24_a_tree_by_its_public_name():
    tree = SumTree.empty(10)
    with pytest.raises(NotEnoughDataError, match="every priority of the tree is 0"):
        tree.draw(3, np.random.default_rng(0))
    with pytest.raises(RuntimeError, match="every priority of the tree is 0"):
        tree.query(np.zeros(1))
    tree.set(np.array([2, 7]), np.array([1.0, 3.0]))
    assert repr(tree) == "<SumTree of 10 leaves, total 4.0>"
    leaves, priorities = tree.query(np.array([0.0, 0.99, 1.0, 4.0]))
    assert (leaves.tolist(), priorities.tolist()) == ([2, 2, 7, 7], [1, 1, 3, 3])
    assert sorted(tree.draw(4, np.random.default_rng(0)).tolist()) == [2, 7, 7, 7]  # a draw in each of four segments
    for value in (-1e-9, 4.0001, math.nan):
        with pytest.raises(ValueError, match=r"expected .* numbers from 0 to the total, 4.0"):
            tree.query(np.array([0.5, value]))
    with pytest.raises(SchemaError, match="leaves: got 0"):
        SumTree.empty(0)


@pytest.fixture(params=["numpy", "python", "compiled"])
def ways(request, monkeypatch, no_loops):
    found = {"numpy": None, "python": LOOPS, "compiled": None}[request.param]
    if request.param == "compiled":
        found = COMPILED() or pytest.skip("numba is not installed")
    monkeypatch.setattr(SumTree, "loops", found)


@pytest.mark.parametrize(
    "leaves", [(20,), (300,) * 5, (8, 9, 16, 17, 64, 65, 100, 512, 1024), (70_000, 8, 5000, 2048, 2049)], ids=str
)
def test_several_trees_are_to_the_last_bit_what_each_is_by_itself(leaves, ways):
    rng = np.random.default_rng(len(leaves))
    alone = [tree_of(count, rng.integers(0, 5, count) + (np.arange(count) == 3), minima=False) for count in leaves]
    trees = [SumTree(np.concatenate([nodes_of(one), keys_of(one)]), one.leaves) for one in alone]
    several = joined(trees)
    for turn in range(6):
        totals = several.totals()
        assert totals.tolist() == [one.total for one in alone]  # whole numbers, so that sums are exact
        of = rng.integers(0, len(leaves), 80)
        values = rng.integers(0, totals.astype(np.int64)[of]) + 0.5
        values[:4], values[4:8] = totals[of[:4]], totals[of[4:8]] + turn  # rounding may lead to the end, and beyond
        found, priorities = several.find(values, of)
        for i, value, leaf, priority in zip(of.tolist(), values.tolist(), found.tolist(), priorities, strict=True):
            by_itself = alone[i].find(np.array([value]))
            assert (leaf, priority) == (by_itself[0].item(), by_itself[1].item())
        chosen = rng.integers(0, np.array(leaves)[of])  # some twice, of which the last counts
        chosen[1::9] = chosen[::9][: len(chosen[1::9])] % np.array(leaves)[of[1::9]]
        priorities = rng.integers(0, 9, 80) * 1.0
        several.put(chosen, np.where(priorities > 0, priorities, -0.0), of)
        for i, one in enumerate(alone):
            one.put(chosen[of == i], with_zeros(priorities[of == i]))
        np.testing.assert_array_equal(
            several.get(chosen, of), [alone[i].get(np.array([k]))[0] for i, k in zip(of, chosen, strict=True)]
        )
        if turn % 2:  # one of them changes by itself
            for tree in (trees[-1], alone[-1]):
                tree.put(np.array([turn]), np.array([7.0]))
        for tree, one in zip(trees, alone, strict=True):
            np.testing.assert_array_equal(nodes_below_top(tree), nodes_below_top(one))


def test_of_a_tree_without_priorities_a_leaf_of_zero_is_found_and_no_other_memory_is_read(ways):
    trees = [SumTree.empty(9), SumTree.empty(3000)]
    trees[1].set(np.array([2999]), np.array([2.0]))
    several = joined(trees)
    assert several.totals().tolist() == [0.0, 2.0]
    leaves, priorities = several.find(np.array([0.0, 5.0, 0.0, 2.0]), np.array([0, 0, 1, 1]))
    assert (leaves.tolist(), priorities.tolist()) == ([0, 0, 2999, 2999], [0, 0, 2, 2])


@pytest.mark.parametrize("stratified", [False, True])
def test_values_lie_within_a_sum_of_which_products_are_rounded(stratified, ways):
    tree = tree_of(6, np.full(6, 1e-323), minima=False)
    rng = np.random.default_rng(0)
    for _ in range(100):
        values = spread(7, tree.total, rng, stratified=stratified)
        assert values.max() <= tree.total
        assert (tree.find(values)[1] == 1e-323).all()
