"""Draws by priority without replacement: one item after another, each with its share of what is left."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memmap_buffer import ConcatBuffer, NotEnoughDataError, Prioritized, ReplayBuffer, SchemaError, SumTree, Trajectory
from memmap_buffer.priority.sum_tree import distinct

HOW = Prioritized(alpha=1, epsilon=0, replacement=False, stratified=False)
DRAWS = 4000


def tree_of(priorities: Any) -> SumTree:
    tree = SumTree.empty(len(priorities))
    tree.set(np.arange(len(priorities)), np.asarray(priorities, np.float64))
    return tree


def chance_of(order: tuple[int, ...], priorities: list[float]) -> float:
    """Of drawing these in this order: the product of p_i / (Σ p - Σ of those before it)."""
    left, chance = sum(priorities), 1.0
    for i in order:
        chance *= priorities[i] / left
        left -= priorities[i]
    return chance


@pytest.mark.parametrize(
    "parts", [[slice(None)], [slice(0, 2), slice(2, None)], [slice(0, 1), slice(1, 4), slice(4, 6)]]
)
def test_the_order_of_a_batch_has_the_chances_of_the_definition(parts: list[slice]) -> None:
    priorities, rng = [5.0, 3.0, 0.0, 1.0, 1.0, 0.1], np.random.default_rng(0)
    trees, firsts = [tree_of(priorities[part]) for part in parts], np.array([part.start or 0 for part in parts])
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(DRAWS):
        of, values = distinct(trees, 3, rng)
        items = [int(firsts[i] + trees[i].find(np.array([value]))[0][0]) for i, value in zip(of, values, strict=True)]
        counts[tuple(items)] = counts.get(tuple(items), 0) + 1
    chances = {order: chance_of(order, priorities) for order in permutations(range(6), 3) if 2 not in order}
    assert counts.keys() <= chances.keys() and sum(chances.values()) == pytest.approx(1)
    chi2 = sum((counts.get(order, 0) - DRAWS * chance) ** 2 / (DRAWS * chance) for order, chance in chances.items())
    assert chi2 < len(chances) + 5 * (2 * len(chances)) ** 0.5


@pytest.mark.parametrize("size", [1, 2, 7, 1024, 5000, 70_000])
def test_all_items_are_drawn_once_however_unlike_their_priorities_are(size: int) -> None:
    rng = np.random.default_rng(size)
    tree = tree_of(10.0 ** rng.uniform(-4, 0, size))
    leaves, priorities = np.arange(size), tree.get(np.arange(size))
    assert tree.before(leaves) == pytest.approx(np.cumsum(priorities) - priorities, abs=1e-9 * tree.total)
    count = min(size, 1000)
    found, _ = tree.find(distinct([tree], count, rng)[1])
    assert len({*found.tolist()}) == count


def test_one_item_that_has_nearly_all_of_the_sum_is_drawn_first_and_once() -> None:
    tree = tree_of([1e-6] * 20 + [1.0] + [1e-6] * 20)
    for seed in range(20):
        found, _ = tree.find(distinct([tree], 30, np.random.default_rng(seed))[1])
        assert found[0] == 20 and len({*found.tolist()}) == 30


def make(folder: Path, lengths: tuple[int, ...]) -> ReplayBuffer:
    buffer = ReplayBuffer(folder, 8, 9, {"t": "int"})
    for length in lengths:
        buffer.store_episode(t=np.arange(length))
    return buffer


@pytest.mark.parametrize("weights", [None, [3, 1]])
def test_no_item_stands_twice_in_a_batch_and_weights_are_by_the_whole_sum(tmp_path: Path, weights: Any) -> None:
    with make(tmp_path / "a", (9, 8, 9)) as first, make(tmp_path / "b", (4, 5)) as second:
        buffer: Any = ConcatBuffer([first, second], weights) if weights else first
        rng = np.random.default_rng(0)
        given = buffer.sample(64, timestep_level=True, prioritized=HOW.like("memorax"), return_indices=True)
        buffer.update_priorities(given["_indices"], rng.uniform(0.1, 1, 64))
        for seed in range(20):
            batch = buffer.sample(20, timestep_level=True, prioritized=HOW, seed=seed, return_indices=True)
            assert len({*map(tuple, batch["_indices"].tolist())}) == 20
            ratios = batch["_weights"] * (batch["_probabilities"] ** HOW.beta).float()
            assert np.allclose(ratios, ratios[0], rtol=1e-5)
            if weights is None:
                total = sum(
                    buffer.priorities([[serial, t]])[0] for serial in range(3) for t in range((9, 8, 9)[serial])
                )
                p = buffer.priorities(batch["_indices"])
                assert np.allclose(batch["_probabilities"], np.asarray(p) / total)
            else:
                assert batch["_indices"][:, 0].tolist().count(1) == 5
        episodes = buffer.sample(3, view=Trajectory(), prioritized=HOW, return_indices=True)
        assert len({*map(str, np.asarray(episodes["_index"]).tolist())}) == 3
        for batch in buffer.dataloader(9, timestep_level=True, prioritized=HOW, return_indices=True, seed=1):
            assert len({*map(tuple, batch["_indices"].tolist())}) == len(batch["t"])


def test_a_batch_of_more_items_than_there_are_is_refused_and_so_is_stratified(tmp_path: Path) -> None:
    with make(tmp_path, (3, 4)) as buffer:
        batch = buffer.sample(7, timestep_level=True, prioritized=HOW, return_indices=True)
        assert len({*map(tuple, batch["_indices"].tolist())}) == 7
        with pytest.raises(
            NotEnoughDataError, match=r"7 items have all but a billionth of the priorities, 8 are wanted"
        ):
            buffer.sample(8, timestep_level=True, prioritized=HOW)
        both = buffer.sample(7, timestep_level=True, prioritized=HOW, replacement=False, return_indices=True)
        assert len({*map(tuple, both["_indices"].tolist())}) == 7
        with pytest.raises(SchemaError, match=r"replacement=False, stratified=False"):
            buffer.sample(2, timestep_level=True, prioritized=True, replacement=False)
    with pytest.raises(SchemaError, match="give stratified=False with it"):
        Prioritized(replacement=False)
