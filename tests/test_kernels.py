"""The loops that numba compiles, run as the Python that they are, and compiled where numba is: numpy's bits."""

import importlib

import numpy as np
import pytest

from memmap_buffer.store import kernels, tree
from memmap_buffer.store.kernels import Kernels, compiled
from memmap_buffer.store.tree import SumTree, num_nodes, spread

EVERY = [found for found in (Kernels(kernels.find, kernels.put), compiled()) if found is not None]


def two_trees(leaves, seed, zeros=0.3):
    """The same tree for numpy and for the kernels."""
    rng = np.random.default_rng(seed)
    priorities = np.where(rng.random(leaves) < zeros, 0, rng.random(leaves) * 10.0 ** rng.integers(-9, 9, leaves))
    priorities[rng.integers(leaves)] = 1.0
    pair = [SumTree(np.zeros(num_nodes(leaves)), leaves) for _ in range(2)]
    for one in pair:
        one.set(np.arange(leaves), priorities)
    return *pair, rng


@pytest.mark.parametrize("compiled", EVERY)
@pytest.mark.parametrize("leaves", [1, 2, 5, 1000, 1025, 5000, 70_000])
def test_kernels_store_and_find_what_numpy_does_to_the_last_bit(leaves, compiled):
    plain, quick, rng = two_trees(leaves, leaves)
    quick._kernels = compiled
    for _ in range(5):
        chosen = rng.integers(0, leaves, 60)  # some twice
        values = rng.random(60) * (rng.random(60) < 0.8)
        for one in (plain, quick):
            one.put(chosen, values)
        np.testing.assert_array_equal(quick._heap, plain._heap)
        if plain.total > 0:
            drawn = spread(100, plain.total, rng, stratified=True)
            np.testing.assert_array_equal(quick.find(drawn), plain.find(drawn))


@pytest.mark.parametrize("compiled", EVERY)
@pytest.mark.parametrize("leaves", [3, 1024, 9000])
def test_at_the_edges_kernels_never_find_a_leaf_of_priority_zero(leaves, compiled):
    plain, quick, _ = two_trees(leaves, 7, zeros=0.9)
    quick._kernels = compiled
    edges = np.cumsum(plain.get(np.arange(leaves)))[:: max(1, leaves // 200)]
    values = np.concatenate([[0, plain.total], edges, np.nextafter(edges, 0), np.nextafter(edges, np.inf)])
    found = quick.find(np.clip(values, 0, plain.total))
    assert (quick.get(found) > 0).all()
    np.testing.assert_array_equal(found, plain.find(np.clip(values, 0, plain.total)))


@pytest.mark.parametrize("compiled", EVERY)
def test_with_minima_the_kernels_leave_updates_to_numpy(compiled):
    one = SumTree(np.zeros(num_nodes(5000)), 5000, minima=True)
    one._kernels = compiled
    one.set(np.arange(5000), np.arange(5000) + 2.0)
    one.set(np.array([0, 17]), np.array([9.0, 1.5]))
    assert one.minimum == 1.5


def test_a_tree_goes_over_to_kernels_after_some_draws(monkeypatch):
    asked = []
    monkeypatch.setattr(tree, "compiled", lambda: asked.append(1) or EVERY[0])
    plain, quick, rng = two_trees(3000, 1)
    plain._num_found = -(10**9)  # never
    for number in range(1, tree.PATIENCE + 3):
        values = spread(8, plain.total, rng, stratified=False)
        np.testing.assert_array_equal(quick.find(values), plain.find(values))
        assert len(asked) == (number >= tree.PATIENCE)


def test_without_numba_there_are_no_kernels(monkeypatch):
    def refuse(name, *rest, **more):
        if name == "numba":
            raise ImportError(name)
        return load(name, *rest, **more)

    load = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", refuse)
    kernels.compiled.cache_clear()
    try:
        assert kernels.compiled() is None
    finally:
        monkeypatch.undo()
        kernels.compiled.cache_clear()
