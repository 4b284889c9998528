"""Priorities of the folders of a buffer, by public names alone, against a slow definition: what enters, what stays."""

import gc
import shutil
import tempfile
from pathlib import Path

import inside
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from profiles import examples
from reference import SlowPriorities

from memmap_buffer import ConcatBuffer, Prioritized, ReplayBuffer, SumTree

ALPHAS = st.sampled_from([0.3, 0.6, 1.0])
FOLDERS = st.integers(0, 2)


def draw(buffer, count=16, alpha=1.0):
    return buffer.sample(count, prioritized=Prioritized(alpha=alpha), timestep_level=True, format="numpy")


def make(path, *lengths):
    buffer = ReplayBuffer(path, 4, 4, {"x": "int"}, circular=True)
    for length in lengths:
        buffer.store_episode(x=np.arange(length))
    return buffer


def shown_by(buffer):
    lengths = zip(buffer.serials.tolist(), buffer.episode_lens.tolist(), strict=True)
    return {(serial, t) for serial, length in lengths for t in range(length)}


class Learning(RuleBasedStateMachine):
    """Rings that are recorded to, drawn from by any α, given errors with their steps and later, and opened again."""

    @initialize(count=st.integers(1, 3), loops=st.booleans())
    def begin(self, count, loops):
        SumTree.loops = inside.loops() if loops else None
        self.root, self.slow, self.alpha = Path(tempfile.mkdtemp()), SlowPriorities(count), 0.6
        self.parts = [make(self.root / str(i)) for i in range(count)]
        self.join()

    def join(self):
        self.buffer = self.parts[0] if len(self.parts) == 1 else ConcatBuffer(self.parts)

    @rule(i=FOLDERS, length=st.integers(1, 4))
    def publish(self, i, length):
        self.parts[i % len(self.parts)].store_episode(x=np.arange(length))

    @rule(i=FOLDERS, errors=st.lists(st.floats(-20, 20), min_size=1, max_size=4))
    def publish_with_errors(self, i, errors):
        i %= len(self.parts)
        self.follow(i)  # an error could be refused, so they are owned before anything is stored
        self.parts[i].store_episode(x=np.arange(len(errors)), priority=errors)
        self.follow(i)
        serial = int(self.parts[i].serials[-1])
        self.slow.update(i, [(serial, t) for t in range(len(errors))], errors)

    @rule(i=FOLDERS)
    def delete(self, i):
        part = self.parts[i % len(self.parts)]
        if len(part):
            part.delete(0)

    @rule(data=st.data())
    def update(self, data):
        shown = sorted((i, *step) for i, part in enumerate(self.parts) for step in shown_by(part))
        if shown:
            chosen = data.draw(st.lists(st.sampled_from(shown), min_size=1, max_size=6))
            errors = data.draw(st.lists(st.floats(-90, 90), min_size=len(chosen), max_size=len(chosen)))
            self.slow.as_one = True
            self.slow.opened.update(range(len(self.parts)))
            for i in {i for i, *_ in chosen}:
                self.follow(i)
            assert self.buffer.update_priorities(self.indices(chosen), errors) == 0
            for (i, *step), error in zip(chosen, errors, strict=True):
                self.slow.update(i, [tuple(step)], [error])

    @rule(alpha=ALPHAS)
    def draw(self, alpha):
        if any(map(len, self.parts)):
            batch, self.alpha, self.slow.as_one = draw(self.buffer, alpha=alpha), alpha, True
            for i in range(len(self.parts)):
                self.follow(i)
            wanted = self.wanted()
            items = np.insert(batch["_indices"], 0, 0, axis=1) if len(self.parts) == 1 else batch["_indices"]
            expected = [wanted[item] / sum(wanted.values()) for item in map(tuple, items.tolist())]
            np.testing.assert_allclose(batch["_probabilities"], expected, rtol=1e-9)

    @rule()
    def look(self):
        if any(map(len, self.parts)):  # else nothing is asked for, and no priorities are opened
            self.slow.as_one = True
            for i in range(len(self.parts)):
                self.follow(i)
            wanted = self.wanted()
            got = self.buffer.priorities(self.indices([*wanted]))
            np.testing.assert_allclose(got, [*wanted.values()], rtol=1e-9)

    @rule()
    def reopen(self):
        self.buffer.flush()
        for i in self.slow.opened:  # which look once more when they are closed
            self.follow(i)
        for part in self.parts:
            part.close()
        del self.buffer
        gc.collect()  # a buffer of several folders has no `close`
        self.parts = [ReplayBuffer.from_folder(self.root / str(i)) for i in range(len(self.parts))]
        self.slow.as_one = False
        self.slow.opened.clear()
        self.join()

    def follow(self, i):
        self.slow.follow(i, shown_by(self.parts[i]))

    def wanted(self):
        return {(i, *step): raw**self.alpha for i, each in enumerate(self.slow.raw) for step, raw in each.items()}

    def indices(self, steps):
        return [step[1:] for step in steps] if len(self.parts) == 1 else steps

    def teardown(self):
        if hasattr(self, "buffer"):
            SumTree.loops = None
            for part in self.parts:
                part.close()
            shutil.rmtree(self.root)


Learning.TestCase.settings = examples(15, stateful_step_count=12)
TestLearning = Learning.TestCase


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("opened_again", [False, True])
def test_the_steps_of_a_new_folder_enter_with_the_highest_priority_of_all_folders(tmp_path, opened_again):
    parts = [make(tmp_path / "a", 4), make(tmp_path / "b")]
    both = ConcatBuffer(parts)
    draw(both)
    both.update_priorities([[0, 0, t] for t in range(4)], [50, 50, 50, 8])
    if opened_again:
        parts[1].store_episode(x=[0, 1])
        both.flush()
        del both, parts
        gc.collect()
        both = ConcatBuffer([ReplayBuffer.from_folder(tmp_path / name) for name in "ba"])  # the new one first
        np.testing.assert_allclose(both.priorities([[0, 0, 0], [0, 0, 1]]), 50, rtol=1e-6)
    else:
        parts[1].store_episode(x=[0, 1])
        np.testing.assert_allclose(both.priorities([[1, 0, 0], [1, 0, 1]]), 50, rtol=1e-6)


@pytest.mark.usefixtures("both_ways")
def test_steps_that_entered_before_a_higher_priority_keep_theirs(tmp_path):
    parts = [make(tmp_path / "a", 2), make(tmp_path / "b", 2)]
    both = ConcatBuffer(parts)
    draw(both)
    both.update_priorities([[0, 0, 0]], [50])
    parts[1].store_episode(x=[0])
    np.testing.assert_allclose(both.priorities([[0, 0, 1], [1, 0, 0], [1, 1, 0]]), [1, 1, 50], rtol=1e-6)


def test_a_shard_that_comes_later_enters_with_the_highest_priority_of_the_root(tmp_path):
    for number in range(2):
        make(tmp_path / f"shard-0000{number}", 4).close()
    root = ConcatBuffer.from_root(tmp_path)
    draw(root)
    root.update_priorities([[i, 0, t] for i in range(2) for t in range(4)], [50] * 8)
    make(tmp_path / "shard-00002", 4).close()
    np.testing.assert_allclose(draw(root, 64)["_probabilities"], 1 / 12, rtol=1e-6)


@pytest.mark.parametrize("before", [True, False], ids=["before the first look", "later"])
def test_errors_of_a_shard_that_was_removed_are_dropped_and_given_to_no_other(tmp_path, before):
    for number in range(3):
        make(tmp_path / f"shard-0000{number}", 4).close()
    if before:
        shutil.rmtree(tmp_path / "shard-00000")
    root = ConcatBuffer.from_root(tmp_path)
    draw(root)
    if not before:
        shutil.rmtree(tmp_path / "shard-00000")
        draw(root)
    assert root.update_priorities([[0, 0, 1], [1, 0, 1]], [80, 7]) == 1
    np.testing.assert_allclose(root.priorities([[0, 0, 1], [1, 0, 1], [2, 0, 1]]), [0, 7, 1], rtol=1e-6)
