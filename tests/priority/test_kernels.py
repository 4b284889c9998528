"""The loops that numba compiles, run as the Python that they are, and compiled where numba is: numpy's bits."""

import importlib
import logging
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from conftest import assert_same
from fault_injection import in_child
from inside import COMPILED, LOOPS, compiled_by, nodes_of, priorities_of, top_of

from memmap_buffer import NStep, Prioritized, SumTree, Timestep, Window
from memmap_buffer.format.syscalls import memory
from memmap_buffer.priority import kernels
from memmap_buffer.priority.leaves import Row
from memmap_buffer.priority.sum_tree import load_loops, num_nodes, spread


@pytest.fixture(params=["python", "compiled"])
def loops(request):
    found = LOOPS if request.param == "python" else COMPILED()
    return found or pytest.skip("numba is not installed")


@contextmanager
def going_by(found):
    before, SumTree.loops = SumTree.loops, found
    try:
        yield
    finally:
        SumTree.loops = before


def two_trees(leaves, seed, zeros=0.3):
    """The same tree for numpy and for the loops."""
    rng = np.random.default_rng(seed)
    priorities = np.where(rng.random(leaves) < zeros, 0, rng.random(leaves) * 10.0 ** rng.integers(-9, 9, leaves))
    priorities[rng.integers(leaves)] = 1.0
    pair = [SumTree(np.zeros(num_nodes(leaves)), leaves) for _ in range(2)]
    for one in pair:
        one.set(np.arange(leaves), priorities)
    return *pair, rng


def assert_found_alike(plain, quick, loops, values):
    by_numpy = plain.find(values)
    with going_by(loops):
        assert quick.total == plain.total
        by_loops = quick.find(values)
    for one, other in zip(by_numpy, by_loops, strict=True):
        np.testing.assert_array_equal(one, other)
    leaves, priorities = by_numpy
    np.testing.assert_array_equal(priorities, plain.get(leaves))
    assert (priorities > 0).all()


@pytest.mark.parametrize("leaves", [1, 2, 5, 1000, 1025, 5000, 70_000])
def test_loops_store_and_find_what_numpy_does_to_the_last_bit(leaves, loops):
    plain, quick, rng = two_trees(leaves, leaves)
    for _ in range(5):
        chosen = rng.integers(0, leaves, 60)  # some twice
        values = rng.random(60) * (rng.random(60) < 0.8)
        plain.put(chosen, values)
        with going_by(loops):
            quick.put(chosen, values)
        np.testing.assert_array_equal(nodes_of(quick), nodes_of(plain))
        if plain.total > 0:
            assert_found_alike(plain, quick, loops, spread(100, plain.total, rng, stratified=True))


@pytest.mark.parametrize("leaves", [3, 1024, 9000])
def test_at_the_edges_loops_never_find_a_leaf_of_priority_zero(leaves, loops):
    plain, quick, _ = two_trees(leaves, 7, zeros=0.9)
    edges = np.cumsum(plain.get(np.arange(leaves)))[:: max(1, leaves // 200)]
    values = np.concatenate([[0, plain.total], edges, np.nextafter(edges, 0), np.nextafter(edges, np.inf)])
    assert_found_alike(plain, quick, loops, np.clip(values, 0, plain.total))


def test_with_minima_the_loops_leave_updates_to_numpy(loops):
    one = SumTree(np.zeros(num_nodes(5000)), 5000, minima=True)
    with going_by(loops):
        one.set(np.arange(5000), np.arange(5000) + 2.0)
        one.set(np.array([0, 17]), np.array([9.0, 1.5]))
        assert one.minimum == 1.5


def test_the_loops_are_loaded_before_the_first_draw_and_told_of_once(recorded, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    asked = []
    monkeypatch.setattr(kernels, "compiled", lambda: asked.append(1) or LOOPS)
    buffer = recorded([3, 4])
    buffer.sample(4)
    assert not asked and SumTree.loops is None
    buffer.dataloader(4, prioritized=True, timestep_level=True)
    assert SumTree.loops is LOOPS
    buffer.sample(4, prioritized=True, n_steps=1)
    assert len(asked) == 1
    pytest.importorskip("numba")
    COMPILED.__wrapped__()
    told = [record for record in caplog.records if "are loaded by numba" in record.getMessage()]
    assert len(told) == 1 and told[0].levelno == logging.INFO


def test_machine_code_that_can_be_kept_nowhere_is_compiled_for_this_process_alone(monkeypatch):
    class Numba:
        @staticmethod
        def njit(signature, **options):
            if options.get("cache"):
                raise RuntimeError("cannot cache function: no locator available")
            return lambda loop: ("compiled", loop)

    assert compiled_by(Numba, kernels.put) == ("compiled", kernels.put)


def test_the_loops_are_known_by_their_file_alone_as_the_kept_machine_code_is():
    names = {name for loop in LOOPS for name in loop.__code__.co_names}
    assert {name for name in names if hasattr(kernels, name)} <= {"np"}


FIRST_DRAWS = """
    import logging, sys, threading
    from memmap_buffer import ReplayBuffer

    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    buffers = [ReplayBuffer(path, 2, 4, {"x": "int"}) for path in sys.argv[1:]]
    together, sizes = threading.Barrier(len(buffers)), []

    def draw(buffer):
        buffer.store_episode(x=[0, 1, 2])
        together.wait()
        sizes.append(len(buffer.sample(8, prioritized=True, timestep_level=True, format="numpy")["x"]))

    threads = [threading.Thread(target=draw, args=[buffer]) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [8, 8]
"""


def test_two_threads_that_make_the_first_draw_of_a_process_load_the_loops_once(tmp_path):
    pytest.importorskip("numba")
    code = [sys.executable, "-c", textwrap.dedent(FIRST_DRAWS), tmp_path / "a", tmp_path / "b"]
    child = subprocess.run(code, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.count("are loaded by numba") == 1


def test_a_fork_waits_until_the_loops_are_loaded(monkeypatch):
    """Else a child imports numba where a thread that is not in it has begun to, and waits for it for ever."""
    begun, go_on, loaded = threading.Event(), threading.Event(), []

    def load():
        begun.set()
        assert go_on.wait(60)
        loaded.append(1)
        return LOOPS

    monkeypatch.setattr(kernels, "compiled", load)
    thread, later = threading.Thread(target=load_loops), threading.Timer(0.2, go_on.set)
    thread.start()
    assert begun.wait(60)
    later.start()
    child = in_child(lambda tell: tell(len(loaded)))
    thread.join()
    later.join()
    assert (child.status, child.told) == (0, [1])


def test_without_numba_there_are_none(monkeypatch):
    def refuse(name, *rest, **more):
        if name == "numba":
            raise ImportError(name)
        return load(name, *rest, **more)

    load = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", refuse)
    assert COMPILED.__wrapped__() is None  # which was not asked before


def test_an_interrupt_while_sums_are_taken_leaves_none_that_are_half_done():
    def interrupted(nodes, sums):
        raise KeyboardInterrupt("stopped")

    one = two_trees(3000, 2)[0]
    with going_by(LOOPS._replace(accumulate=interrupted)), pytest.raises(KeyboardInterrupt, match="stopped"):
        _ = one.total
    assert one.total == top_of(one).cumsum()[-1]


def test_sums_that_were_taken_while_another_thread_updated_are_not_kept(recorded):
    buffer = recorded([3, 4])
    buffer.sample(1, timestep_level=True, prioritized=Prioritized())
    buffer.update_priorities(np.array([[0, 0]]), np.array([3.0]))
    other = threading.Thread(target=buffer.update_priorities, args=(np.array([[1, 1]]), np.array([9.0])))

    def accumulate(nodes, sums):
        LOOPS.accumulate(nodes, sums)
        other.start()
        other.join(0.3)  # it waits for the sums

    with going_by(LOOPS._replace(accumulate=accumulate)):
        buffer.sample(1, timestep_level=True, prioritized=Prioritized())
        other.join()
    one = priorities_of(buffer).tree
    assert one.total == top_of(one).cumsum()[-1]


# Episodes


def test_what_is_read_only_is_taken_as_it_is(recorded, loops):
    buffer = recorded([3, 4, 5])
    with going_by(loops):
        indices = buffer.sample(8, seed=0, prioritized=Prioritized(), timestep_level=True)["_indices"].numpy()
        errors = np.linspace(0, 1, 8)
        indices.flags.writeable = errors.flags.writeable = False
        assert buffer.update_priorities(indices, errors) == 0
        assert buffer.update_priorities(np.broadcast_to(indices[:1], (8, 2)), errors) == 0


def placed(per_slot, before, pairs, serials=(0,), order=(0,)):
    """(words, places, what is to be held) of two folders: one that is empty, and one with these pairs."""
    row = Row(SumTree.empty(8), per_slot, before, *(np.array(each, np.int64) for each in (pairs, serials, order)))
    return memory().view(np.int64), np.array([[1, 0, 0, 0, 0, 0, 0, 0], row.place]).T.copy(), row


SECOND = np.ones(3, np.int64)  # all are of the second folder


@pytest.mark.parametrize("leaf", [-1, 2, 5, 10, 15, 2**40])
def test_a_leaf_that_is_no_step_is_located_nowhere(loops, leaf):
    words, places, _held = placed(5, 0, [8, 2 << 32, 9, 1 | 5 << 32, 0, 0])
    out = np.empty((3, 3), np.int64)
    assert loops.locate(words, places, SECOND, np.array([0, 1, 6]), *out)
    assert out.tolist() == [[0, 0, 1], [7, 7, 8], [0, 1, 1]]
    assert not loops.locate(words, places, SECOND, np.array([0, leaf, 6]), *out)
    assert not loops.locate(words, places, 0 * SECOND, np.array([0, 1, 6]), *out)


def test_a_leaf_before_step_0_is_of_the_slot_that_it_lies_in(loops):
    words, places, _held = placed(5, 2, [8, 3 << 32, 9, 3 << 32])
    out = np.empty((3, 3), np.int64)
    assert loops.locate(words, places, SECOND, np.array([0, 4, 6]), *out)
    assert out.tolist() == [[0, 0, 1], [7, 7, 8], [-2, 2, -1]]


@pytest.mark.parametrize(
    ("serial", "t"), [(6, 0), (9, 0), (9, 1), (7, -1), (7, 2), (8, 5), (8, 0), (-(2**63), 0), (2**63 - 1, 0)]
)
def test_a_step_that_is_none_has_no_leaf(loops, serial, t):
    pairs = [9, 1 | 5 << 32, 0, 0, 8, 2 << 32]  # 9 was in slot 1, and is gone
    words, places, _held = placed(10, 0, pairs, [7, 8, 9], [2, 0, 1])
    out = np.empty((2, 2), np.int64)
    assert loops.leaves(words, places, SECOND[:2], np.array([7, 8]), np.array([1, 4]), *out)
    assert out.tolist() == [[2, 0], [21, 4]]
    assert not loops.leaves(words, places, SECOND[:2], np.array([7, serial]), np.array([1, t]), *out)


def test_a_step_whose_serial_does_not_stand_where_it_would_without_gaps_is_left_to_numpy(loops):
    words, places, _held = placed(10, 0, [8, 2 << 32, 10, 5 << 32], [7, 9], [0, 1])
    assert not loops.leaves(words, places, SECOND[:1], np.array([8]), np.array([1]), *np.empty((2, 1), np.int64))


@pytest.mark.parametrize(
    "view", [Timestep(), NStep(1), NStep(3, gamma=0.9, reward="reward"), NStep(2, stack={"t": 3}), Window(4)], ids=repr
)
@pytest.mark.parametrize("how", [None, Prioritized()], ids=["uniform", "by priority"])
def test_a_batch_is_the_same(recorded, loops, view, how):
    def batches(name):
        buffer, out = recorded([3, 4, 5, 6, 7], name=name), []
        for seed in range(4):
            out.append(buffer.sample(32, seed=seed, view=view, prioritized=how, return_indices=True))
            if how is not None:
                buffer.update_priorities(out[-1]["_indices"], np.linspace(0, 1, 32))
        return out

    by_numpy = batches("one")
    with going_by(loops):
        by_loops = batches("other")
    for one, other in zip(by_numpy, by_loops, strict=True):
        assert_same(one, other)
