"""Priorities on the disk: they follow the episodes, outlive processes, and are never trusted when they may be torn."""

import errno
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path

import inside
import mounts
import numpy as np
import pytest
from fault_injection import KILLED, fork, in_child, operations_of, system, without_barriers
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from inside import (
    anchor_priorities_of,
    before_priorities_are_opened,
    before_weighing,
    each_opened,
    forget_places,
    map_anew,
    nodes_of,
    priorities_named,
    priorities_of,
    samplers_of,
    storage_of,
    store_leaves_alone,
    words_of,
)
from mounts import fill, on_ext4, on_tmpfs
from profiles import examples

from memmap_buffer import (
    BufferLockedError,
    ConcatBuffer,
    CorruptBufferError,
    EpisodeStateError,
    Prioritized,
    ReplayBuffer,
    SchemaError,
    SumTree,
    Window,
    WriterLostError,
)
from memmap_buffer.format import host
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import has_hole
from memmap_buffer.priority.leaves import NO_EPISODES, Leaves, Row
from memmap_buffer.priority.priorities import Priorities, StepLeaves, in_turn, while_locked
from memmap_buffer.priority.sum_tree import num_nodes
from memmap_buffer.priority.tree_file import TreeFile

ALPHA, EPSILON = 0.5, 1e-3
HOW = {"alpha": ALPHA, "epsilon": EPSILON}
SIZES = {"max_episodes": 4, "max_timesteps": 6, "circular": True}


def make(folder, *lengths, **options):
    buffer = ReplayBuffer(folder, fields={"x": "int"}, **(SIZES | options))
    for length in lengths:
        publish(buffer, length)
    return buffer


def publish(buffer, length):
    buffer.store_episode(x=np.arange(length))


def opened(folder, name="td", read_only=False, **how):
    priorities = Priorities.open(Storage.open(folder, read_only=read_only), name, **(HOW | how))
    priorities.follow()
    return priorities


def content(priorities):
    """(serial, t) -> priority of everything that can be drawn."""
    priorities.follow()
    found = {}
    slots = np.arange(priorities.storage.layout.slots)
    (starts, stops), serials = priorities.file.steps_of(slots), priorities.serials_of(slots)
    for slot in np.flatnonzero(stops):
        t = np.arange(starts[slot], stops[slot])
        values = priorities.tree.get(priorities.file.leaves_of(np.full(len(t), slot), t))
        found |= {(int(serials[slot]), i): value for i, value in zip(t.tolist(), values.tolist(), strict=True)}
    assert priorities.tree.total == pytest.approx(math.fsum(found.values()), rel=1e-12)
    return found


def consistent(priorities):
    """The same; and to the last bit the sums of each level are those that a new tree of these leaves has."""
    found, tree = content(priorities), priorities.tree
    new = SumTree(np.zeros(3 * tree.capacity), tree.leaves)
    new.set(np.arange(tree.leaves), tree.get(np.arange(tree.leaves)))
    assert tree.total == new.total
    for one in (tree, new):
        one.sum_up()
    for kept, wanted in zip(tree.levels, new.levels, strict=True):
        np.testing.assert_array_equal(kept, wanted)
    return found


def update(priorities, steps, errors):
    serials, t = np.array(steps).T
    leaves = StepLeaves(True)
    return leaves.over([priorities], None, partial(leaves.update, None, serials, t, np.asarray(errors, np.float64)))


def find(priorities, values):
    """The t of the steps at values of the cumulative sum."""
    leaves = StepLeaves(True)
    leaves.look([priorities])
    found = leaves.find(None, values)
    if found is None:  # it was made anew
        found = leaves.find(None, np.minimum(values, leaves.tree.total))
    return found[2]


def powered(errors):
    return ((np.abs(errors) + EPSILON) ** ALPHA).tolist()


@pytest.fixture(params=["shared", "private"])
def kind(request, monkeypatch):
    """Where the file system overwrites in place, and where it does not."""
    if request.param == "private":
        monkeypatch.setattr(host, "IN_PLACE", ())
    return request.param


# Following the episodes


@pytest.mark.usefixtures("both_ways")
def test_new_steps_have_the_highest_priority_so_far_which_begins_at_one(tmp_path, kind):
    buffer = make(tmp_path, 2, 3)
    priorities = opened(tmp_path)
    assert content(priorities) == {(0, 0): 1, (0, 1): 1, (1, 0): 1, (1, 1): 1, (1, 2): 1}
    assert update(priorities, [(0, 1), (1, 0), (1, 0)], [-8.0, 0.25, 0.5]) == 0
    publish(buffer, 1)
    high, low = powered([8, 0.5])
    assert content(priorities) == {(0, 0): 1, (0, 1): high, (1, 0): low, (1, 1): 1, (1, 2): 1, (2, 0): high}


@pytest.mark.usefixtures("both_ways")
def test_retired_steps_leave_and_an_update_of_them_is_dropped_and_counted(tmp_path, kind):
    buffer = make(tmp_path, 2, 2, 2, 2)
    priorities = opened(tmp_path)
    publish(buffer, 3)  # retires 0
    publish(buffer, 3)  # retires 1 and takes the slot of 0
    assert update(priorities, [(0, 1), (2, 1), (1, 0), (77, 0)], [9, 4, 9, 9]) == 3
    expected = {(s, t): 1.0 for s, n in {2: 2, 3: 2, 4: 3, 5: 3}.items() for t in range(n)}
    assert content(priorities) == expected | {(2, 1): powered([4])[0]}
    buffer.delete(0)
    assert min(content(priorities)) == (3, 0)
    buffer.clear()
    assert content(priorities) == {}
    assert priorities.tree.total == 0


@pytest.mark.usefixtures("both_ways")
def test_a_growing_episode_keeps_the_priorities_of_its_first_steps(tmp_path):
    buffer = make(tmp_path, publish="step")
    priorities = opened(tmp_path)
    episode = buffer.begin_episode()
    for t in range(4):
        episode.store(x=t)
        update(priorities, [(0, t)], [t + 2])
    assert list(content(priorities).values()) == powered([2, 3, 4, 5])


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("error", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_an_error_that_is_no_finite_number_is_refused_by_its_place(tmp_path, error):
    make(tmp_path, 3)
    priorities = opened(tmp_path)
    with pytest.raises(SchemaError, match=r"td_errors\[1\]: got -?(nan|inf|1e\+300), expected a finite number below"):
        update(priorities, [(0, 0), (0, 1)], [3, error])
    with pytest.raises(SchemaError, match="update_priorities: episode 0 has steps 0 … 2, got 3"):
        update(priorities, [(0, 3)], [1])
    assert set(content(priorities).values()) == {1.0}


class Life(RuleBasedStateMachine):
    """Priorities beside a ring, against a dictionary."""

    lengths = st.integers(1, 6)

    @initialize(private=st.booleans())
    def begin(self, private):
        self.before, host.IN_PLACE = host.IN_PLACE, () if private else host.IN_PLACE
        self.folder = Path(tempfile.mkdtemp())
        self.buffer, self.priorities = make(self.folder), opened(self.folder)
        self.want, self.highest, self.next, self.alpha = {}, 1.0, 0, ALPHA

    @rule(length=lengths)
    def publish(self, length):
        publish(self.buffer, length)
        self.want |= {(self.next, t): self.highest for t in range(length)}
        self.next += 1
        alive = sorted({serial for serial, _ in self.want})[-4:]
        self._retire(lambda serial: serial < alive[0])

    @rule(i=st.integers(0, 3))
    def delete(self, i):
        if i < len(self.buffer):
            serial = self.buffer.serials[i]
            self.buffer.delete(i)
            self._retire(lambda other: other == serial)

    def _retire(self, gone):
        self.priorities.follow()  # it need not, but the maximum of now is what new ones get
        self.want = {step: value for step, value in self.want.items() if not gone(step[0])}

    @rule(data=st.data())
    def update(self, data):
        steps = data.draw(st.lists(st.tuples(st.integers(0, self.next + 1), st.integers(0, 0)), min_size=1, max_size=9))
        errors = data.draw(st.lists(st.floats(-9, 9), min_size=len(steps), max_size=len(steps)))
        dropped = update(self.priorities, steps, errors)
        assert dropped == sum(step not in self.want for step in steps)
        for step, error in zip(steps, errors, strict=True):
            if step in self.want:
                self.want[step] = abs(error) + EPSILON
                self.highest = max(self.highest, self.want[step])

    @rule(loops=st.booleans())
    def go_by(self, loops):
        SumTree.loops = inside.loops() if loops else None

    @rule(alpha=st.sampled_from([0.25, ALPHA, 1.0]))
    def use(self, alpha):
        self.priorities.use(alpha=alpha, epsilon=None)
        self.alpha = alpha

    @rule(alpha=st.sampled_from([0.25, 1.0]))
    def open_elsewhere(self, alpha):
        """By another object of the process, whose table may be older or newer."""
        opened(self.folder, alpha=alpha).close()
        self.alpha = alpha

    @rule(alpha=st.sampled_from([None, 0.25, 1.0]))
    def reopen(self, alpha):
        self.priorities.close()
        self.alpha = alpha or self.alpha
        self.priorities = opened(self.folder, alpha=self.alpha)

    @invariant()
    def holds_what_it_was_told(self):
        if hasattr(self, "want"):
            got = consistent(self.priorities)
            assert got.keys() == self.want.keys()
            for step, value in self.want.items():
                np.testing.assert_allclose(got[step], value**self.alpha, rtol=1e-12)

    def teardown(self):
        if hasattr(self, "before"):
            host.IN_PLACE, SumTree.loops = self.before, None
            self.priorities.close()
            shutil.rmtree(self.folder)


Life.TestCase.settings = examples(25, stateful_step_count=15)
TestLife = Life.TestCase


@pytest.mark.usefixtures("both_ways")
def test_steps_that_a_ring_forgot_leave_and_errors_of_them_are_dropped_and_counted(tmp_path, kind):
    buffer = make(tmp_path, 6, capacity=8)
    priorities = opened(tmp_path)
    assert update(priorities, [(0, 0), (0, 4)], [4, 9]) == 0
    publish(buffer, 5)  # of episode 0 the last three are left
    nine = powered([9])[0]
    assert content(priorities) == {(0, 3): 1, (0, 4): nine, (0, 5): 1} | {(1, t): nine for t in range(5)}
    assert update(priorities, [(0, 0), (0, 2), (0, 3), (0, -1)], [7, 7, 0.5, 7]) == 3
    with pytest.raises(SchemaError, match="episode 0 has steps 0 … 5, got 6"):
        update(priorities, [(0, 6)], [1])
    leaves = StepLeaves(True)
    got = leaves.over([priorities], None, partial(leaves.get, None, np.array([0, 0, 7]), np.array([2, 3, 0])))
    assert got.tolist() == [0, powered([0.5])[0], 0]
    priorities.checkpoint()
    pairs = np.load(tmp_path / "priority" / "td.head.npy")[16:].reshape(-1, 2).tolist()
    assert [1, 3 | 6 << 32] in pairs and [2, 5 << 32] in pairs
    expected = content(priorities)
    priorities.close()
    set_head(tmp_path, 0, 5)  # so that all is made anew of the leaves
    assert consistent(opened(tmp_path)) == expected


@pytest.mark.parametrize("count", [3, 700])
def test_whoever_is_far_behind_sees_the_same(tmp_path, count):
    """As the journal has no room for so many changes."""
    buffer = make(tmp_path, 3, capacity=9, max_episodes=7)
    priorities = opened(tmp_path)
    update(priorities, [(0, t) for t in range(3)], [0.5] * 3)
    for _ in range(count):
        publish(buffer, 2)
    if count == 3:
        expected = {(0, t): powered([0.5])[0] for t in range(3)} | {(s, t): 1 for s in (1, 2, 3) for t in range(2)}
    else:
        expected = {(count - s, t): 1 for s in range(4) for t in range(2)} | {(count - 4, 1): 1}
    assert consistent(priorities) == expected


def test_priorities_of_zero_stay_zero_when_a_tree_is_made_anew(tmp_path, kind):
    make(tmp_path, 3)
    priorities = opened(tmp_path, epsilon=0)
    update(priorities, [(0, 0), (0, 1)], [0, 4])
    priorities.close()
    set_head(tmp_path, 0, 5)
    assert content(opened(tmp_path, epsilon=0, alpha=1.0)) == {(0, 0): 0, (0, 1): pytest.approx(4), (0, 2): 1}


def test_another_alpha_loses_nothing_where_the_files_were_removed(tmp_path, kind):
    make(tmp_path, 3)
    priorities = opened(tmp_path)
    update(priorities, [(0, 0), (0, 1)], [0.75, 4])
    shutil.rmtree(tmp_path / "priority")
    (tmp_path / "priority").mkdir()
    priorities.use(alpha=2.0, epsilon=None)
    np.testing.assert_allclose([*consistent(priorities).values()], [(0.75 + EPSILON) ** 2, (4 + EPSILON) ** 2, 1])


@pytest.mark.parametrize("read_only", [False, True])
def test_an_alpha_that_is_too_large_for_the_highest_error_is_refused_and_changes_nothing(tmp_path, read_only):
    make(tmp_path, 3)
    priorities = opened(tmp_path, read_only=read_only)
    update(priorities, [(0, 0)], [1e6])
    before = content(priorities)
    match = r"alpha: got 100, and the highest .* so far, 1e\+06, would be a priority above 1e\+250; give a lower alpha"
    with pytest.raises(SchemaError, match=match):
        priorities.use(alpha=100, epsilon=None)
    assert content(priorities) == before
    priorities.close()
    if not read_only:
        with pytest.raises(SchemaError, match=match):
            opened(tmp_path, alpha=100)
        assert content(opened(tmp_path)) == before


def test_a_folder_that_is_only_read_takes_another_alpha_in_memory(tmp_path):
    make(tmp_path, 3)
    priorities = opened(tmp_path, read_only=True)
    update(priorities, [(0, 0), (0, 1)], [0.75, 4])
    priorities.use(alpha=2.0, epsilon=None)
    np.testing.assert_allclose([*consistent(priorities).values()], [(0.75 + EPSILON) ** 2, (4 + EPSILON) ** 2, 1])
    assert not (tmp_path / "priority").exists()


class Ring(RuleBasedStateMachine):
    """Priorities of a ring of steps that two environments write, against what the records show and a dictionary."""

    @initialize(loops=st.booleans())
    def begin(self, loops):
        SumTree.loops = inside.loops() if loops else None
        self.folder = Path(tempfile.mkdtemp())
        sizes = {"max_episodes": 9, "capacity": 10, "publish": "step", "spare_slots": 3}
        self.buffer = make(self.folder, **sizes)
        self.priorities, self.open, self.want = opened(self.folder), [None, None], {}

    @rule(env=st.integers(0, 1), count=st.integers(1, 3), ends=st.booleans())
    def store(self, env, count, ends):
        for _ in range(count):
            episode = self.open[env]
            if episode is None or episode.state != "open" or episode.length == 6:
                self.end(env)
                episode = self.open[env] = self.buffer.begin_episode()
            episode.store(x=0)
        if ends:
            self.end(env)

    @rule(env=st.integers(0, 1))
    def end(self, env):
        if self.open[env] is not None:
            self.open[env].publish()
            self.open[env] = None

    @rule(length=st.integers(1, 6))
    def publish(self, length):
        publish(self.buffer, length)

    @rule(i=st.integers(0, 5))
    def delete(self, i):
        if i < len(self.buffer) and not any(self.open):
            self.buffer.delete(i)

    @rule(data=st.data(), error=st.floats(0, 0.9))
    def update(self, data, error):
        steps = self.shown()
        if steps:
            step = data.draw(st.sampled_from(sorted(steps)))
            assert update(self.priorities, [step], [error]) == 0
            self.want[step] = powered([error])[0]

    @rule(anew=st.booleans())
    def look(self, anew):
        if anew:
            self.priorities.close()
            self.priorities = opened(self.folder)
        steps = self.shown()
        self.want = {step: value for step, value in self.want.items() if step in steps}
        got = consistent(self.priorities)
        assert got == {step: self.want.get(step, 1.0) for step in steps}
        assert self.priorities.num_steps == len(steps)

    def shown(self):
        table = Storage.open(self.folder, read_only=True).table
        return {(int(table.serial[s]), t) for s in table.visible for t in range(table.start[s], table.length[s])}

    def teardown(self):
        if hasattr(self, "priorities"):
            SumTree.loops = None
            self.priorities.close()
            self.buffer.close()
            shutil.rmtree(self.folder)


Ring.TestCase.settings = examples(40, stateful_step_count=25)
TestRing = Ring.TestCase


def test_changes_are_kept_only_once_somebody_asked_for_them(tmp_path):
    make(tmp_path, 3)
    priorities = opened(tmp_path)
    update(priorities, [(0, 1)], [3])
    assert not priorities.changes
    priorities.keep_changes()
    update(priorities, [(0, 2)], [3])
    ((slots, t),) = priorities.changes
    assert (slots.tolist(), t.tolist()) == ([0], [2])


# Opening again


def test_priorities_and_their_maximum_outlive_the_process_that_set_them(tmp_path, kind):
    buffer = make(tmp_path, 2, 3)

    def learn(_):
        priorities = opened(tmp_path)
        update(priorities, [(0, 1), (1, 2)], [5, 2])
        if kind == "private":
            priorities.checkpoint()
        os._exit(KILLED)

    assert in_child(learn).status == KILLED
    publish(buffer, 1)
    five, two = powered([5, 2])
    got = content(opened(tmp_path))
    assert got == {(0, 0): 1, (0, 1): five, (1, 0): 1, (1, 1): 1, (1, 2): two, (2, 0): five}


@pytest.mark.usefixtures("both_ways")
def test_what_was_reused_while_nobody_looked_has_the_default_priority(tmp_path, kind):
    buffer = make(tmp_path, 6, 6, 6, 6)
    priorities = opened(tmp_path)
    update(priorities, [(s, t) for s in range(4) for t in range(6)], np.full(24, 0.25))
    priorities.close()
    for _ in range(3):
        publish(buffer, 2)
    got = content(opened(tmp_path))
    assert [got[4, 0], got[5, 1], got[6, 1], got[3, 5]] == [1, 1, 1, powered([0.25])[0]]
    assert len(got) == 6 + 3 * 2


def test_another_alpha_makes_the_leaves_anew_and_says_so(tmp_path, kind, caplog):
    make(tmp_path, 3)
    priorities = opened(tmp_path)
    update(priorities, [(0, 0), (0, 1)], [4, 0.5])
    priorities.close()
    again = opened(tmp_path, alpha=2.0)
    np.testing.assert_allclose(list(content(again).values()), [(4 + EPSILON) ** 2, (0.5 + EPSILON) ** 2, 1])
    assert "are made anew of their leaves: alpha was 0.5 and is 2.0" in caplog.text
    again.close()
    opened(tmp_path, alpha=0.0).close()  # which forgets
    assert set(content(opened(tmp_path)).values()) == {(4 + EPSILON) ** ALPHA}


def test_several_names_are_several_trees(tmp_path):
    make(tmp_path, 2)
    first, second = opened(tmp_path, "td"), opened(tmp_path, "novelty", alpha=1.0)
    update(first, [(0, 0)], [3])
    update(second, [(0, 0)], [9])
    assert (content(first)[0, 0], content(second)[0, 0]) == (powered([3])[0], 9 + EPSILON)


@pytest.mark.parametrize("name", ["", "a/b", "..", "_x", "1a", "ä", "a" * 65])
def test_a_name_that_is_no_identifier_is_refused(tmp_path, name):
    make(tmp_path, 2)
    with pytest.raises(SchemaError, match="cannot name a file; give an identifier of at most 64 characters"):
        opened(tmp_path, name)


def test_within_a_process_all_share_a_tree_and_the_last_lets_go(tmp_path):
    make(tmp_path, 2)
    first, second = opened(tmp_path), opened(tmp_path)
    assert first is second
    first.close()
    update(second, [(0, 0)], [3])
    second.close()
    with pytest.raises(EpisodeStateError, match="the buffer was closed; reopen it with from_folder"):
        update(second, [(0, 0)], [3])
    assert in_child(lambda _: opened(tmp_path)).status == 0


def test_who_was_refused_by_its_alpha_does_not_keep_the_files_open(tmp_path):
    make(tmp_path, 3)
    priorities = opened(tmp_path)
    update(priorities, [(0, 0)], [1e9])
    with pytest.raises(SchemaError, match=r"alpha: got 100.0, and the highest"):
        opened(tmp_path, alpha=100.0)
    priorities.close()
    with pytest.raises(EpisodeStateError, match="the buffer was closed"):
        update(priorities, [(0, 0)], [1.0])


def test_after_an_interrupted_change_of_the_columns_they_are_still_closed_with_the_buffer(tmp_path, monkeypatch):
    buffer, interruptions = make(tmp_path, 2), [KeyboardInterrupt("now")]
    buffer.update_priorities([[0, 0]], [3.0])
    priorities = priorities_of(buffer)

    def interrupt():
        if interruptions:
            raise interruptions.pop()

    before_priorities_are_opened(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt, match="now"):
        buffer.add_field("more", ("int", (), 7))
    assert buffer.priorities([[0, 0]]) > 1
    buffer.close()
    with pytest.raises(EpisodeStateError, match="the buffer was closed"):
        update(priorities, [(0, 0)], [1.0])


def test_one_process_owns_a_tree_while_another_records(tmp_path):
    buffer = make(tmp_path, 2)  # this one records

    def learn(tell):
        priorities = opened(tmp_path)
        update(priorities, [(0, 0)], [3])

    assert in_child(learn).status == 0
    priorities = opened(tmp_path)

    def beside(tell):
        with pytest.raises(BufferLockedError, match="another process owns the priorities 'td'; stop it, give these"):
            opened_anew()
        opened(tmp_path, "other").close()
        with pytest.raises(WriterLostError, match="a forked child does not own the priorities 'td'"):
            update(priorities, [(0, 0)], [1])

    def opened_anew():
        return Priorities.open(Storage.open(tmp_path), "td", **HOW)

    child = in_child(beside)
    assert child.status == 0, child.told
    publish(buffer, 1)
    assert content(priorities)[0, 0] == powered([3])[0]


def test_a_folder_that_is_only_read_gets_priorities_of_its_own_and_nothing_is_written(tmp_path):
    make(tmp_path, 2)
    owner = opened(tmp_path)
    update(owner, [(0, 1)], [3])

    def read(tell):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        priorities = opened(tmp_path, read_only=True)
        tell([*content(priorities).values()])
        update(priorities, [(0, 0)], [8])
        priorities.checkpoint()
        tell([*content(priorities).values()])
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    child = in_child(read)
    assert child.status == 0, child.told
    three, eight = powered([3, 8])
    assert child.told == [[1, three], [eight, three]]


def test_a_buffer_that_was_overwritten_does_not_get_the_priorities_of_the_old_one(tmp_path):
    make(tmp_path, 2)
    old = opened(tmp_path)
    update(old, [(0, 0), (0, 1)], [3, 3])
    make(tmp_path, 2, overwrite=True)
    assert content(opened(tmp_path)) == {(0, 0): 1, (0, 1): 1}


# What may be torn is not trusted


def spoil_nodes(folder):
    """Leaves stay, one is no number; inner nodes are nonsense."""
    path = folder / "priority" / "td.npy"
    array = np.load(path, mmap_mode="r+")
    array[2 : len(array) // 3] = 7
    leaf = len(array) // 3
    array[leaf] = np.nan
    array.flush()


def set_head(folder, word, value):
    array = np.load(folder / "priority" / "td.head.npy", mmap_mode="r+")
    array[word] = value
    array.flush()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: set_head(folder, 0, 5), "an update did not end"),
        (lambda folder: (set_head(folder, 4, 0), set_head(folder, 5, 99)), "the machine went down while it was in use"),
        (lambda folder: set_head(folder, 7, 1), "it is a copy"),
        (lambda folder: set_head(folder, 8, 0), "its sums were arranged otherwise"),
    ],
)
def test_a_tree_that_may_be_torn_is_made_anew_of_its_leaves(tmp_path, caplog, spoil, why):
    make(tmp_path, 2, 2)
    priorities = opened(tmp_path)
    update(priorities, [(0, 1), (1, 1)], [3, 4])
    priorities.close()
    spoil_nodes(tmp_path)
    spoil(tmp_path)
    got = content(opened(tmp_path))
    four, three = powered([4, 3])
    assert got == {(0, 0): four, (0, 1): three, (1, 0): 1, (1, 1): four}
    assert why in caplog.text
    assert "are made anew of their leaves" in caplog.text


@pytest.mark.parametrize("size", [0, 100, 256])
@pytest.mark.parametrize("name", ["td.npy", "td.head.npy"])
def test_a_file_that_is_missing_or_cut_short_is_made_anew(tmp_path, caplog, name, size):
    make(tmp_path, 2)
    priorities = opened(tmp_path)
    update(priorities, [(0, 1)], [3])
    priorities.close()
    path = tmp_path / "priority" / name
    os.truncate(path, size)
    assert set(content(opened(tmp_path)).values()) <= {1.0, powered([3])[0]}
    assert "the schema says" in caplog.text


@pytest.mark.parametrize("name", ["td.npy", "td.head.npy"])
def test_a_link_in_the_place_of_a_file_is_refused_and_left_alone(tmp_path, name):
    make(tmp_path / "a", 2)
    opened(tmp_path / "a").close()
    path = tmp_path / "a" / "priority" / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    with pytest.raises(CorruptBufferError, match="is a link or no plain file"):
        opened(tmp_path / "a")
    assert path.is_symlink()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("leaf", [17, 5003], ids=["of no step", "behind the last slot"])
def test_sums_that_are_nonsense_are_found_when_a_draw_meets_them(tmp_path, caplog, leaf):
    make(tmp_path, 6, 6, 6, 6, max_timesteps=1000)
    priorities = opened(tmp_path)
    update(priorities, [(0, 1)], [3])
    assert priorities.tree.leaves == 5000
    nodes_of(priorities.tree)[priorities.tree.capacity + leaf] = 5.0
    priorities.tree.refresh(np.array([leaf]))
    t = find(priorities, np.linspace(0, priorities.tree.total, 200))
    assert (t < 6).all()
    assert "its sums are damaged" in caplog.text
    assert content(priorities)[0, 1] == powered([3])[0]


SMALL, LARGE = [6, 6], [300] * 70
NO_SUMS = [-3.0, math.nan, math.inf]
DAMAGES = [  # of a small tree a leaf; of a large one a leaf, the node above it, and that of the top level
    *((SMALL, 32 + 2, value) for value in NO_SUMS),
    *((LARGE, (1 << 15) + 2, value) for value in [*NO_SUMS, 0.0]),
    (LARGE, (1 << 15) + 7, math.inf),  # the last of eight
    *((LARGE, 4096, value) for value in [*NO_SUMS, 0.0, 9.0]),
    *((LARGE, 512, value) for value in [*NO_SUMS, 0.0, 9.0, 99.0]),
]
MEANWHILE = [  # too small a node of the top level is seen when the file is opened
    (
        3,
        [
            (lengths, node, value)
            for lengths, node, value in DAMAGES
            if node in (32 + 2, (1 << 15) + 2, (1 << 15) + 7) and value != 0
        ],
    ),
    (
        298,
        [
            (LARGE, node, value)
            for lengths, node, value in DAMAGES
            if node > 4095 or (node == 512 and value not in (0, 9))
        ],
    ),
]
EVERY_STEP = {"prioritized": Prioritized(**HOW), "timestep_level": True, "format": "numpy"}


def damage(folder, node, value):
    np.load(folder / "priority" / "td.npy", mmap_mode="r+")[node] = value


def assert_drawn_by_sound_sums(buffer, lengths, caplog):
    """Of steps of the same priority, as many as there are: each of them."""
    batch = buffer.sample(sum(lengths), **EVERY_STEP)
    assert "its sums are damaged" in caplog.text
    assert (batch["_probabilities"] == 1 / sum(lengths)).all()
    every = [(serial, t) for serial, length in enumerate(lengths) for t in range(length)]
    assert sorted(map(tuple, batch["_indices"].tolist())) == every


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(("lengths", "node", "value"), DAMAGES)
def test_no_batch_is_drawn_by_sums_that_were_damaged_before(tmp_path, caplog, lengths, node, value):
    with make(tmp_path, *lengths, max_episodes=len(lengths), max_timesteps=lengths[0]) as buffer:
        buffer.sample(1, **EVERY_STEP)
    damage(tmp_path, node, value)
    with ReplayBuffer.from_folder(tmp_path) as buffer:
        assert_drawn_by_sound_sums(buffer, lengths, caplog)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(("t", "damages"), MEANWHILE)
def test_no_batch_is_drawn_by_sums_that_were_damaged_meanwhile(tmp_path, caplog, t, damages):
    """Beside a leaf that is updated, or elsewhere: above it an update has mended all."""
    for number, (lengths, node, value) in enumerate(damages):
        caplog.clear()
        sizes = {"max_episodes": len(lengths), "max_timesteps": lengths[0]}
        with make(tmp_path / str(number), *lengths, **sizes) as buffer:
            buffer.sample(1, **EVERY_STEP)
            damage(tmp_path / str(number), node, value)
            buffer.update_priorities(np.array([[0, t]]), np.array([1 - EPSILON]))  # what it has already
            assert_drawn_by_sound_sums(buffer, lengths, caplog)


DISTINCT = {"stratified": False, "replacement": False}


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("weights", [None, [1, 1]], ids=["alike", "shares"])
@pytest.mark.parametrize("how", [{}, DISTINCT], ids=["strata", "distinct"])
@pytest.mark.parametrize(
    "damages",
    [
        [("a", 4096 + 2, -3.0), ("b", 4096 + 2, math.nan)],
        [("a", 512 + 9, -3.0)],
        [("a", 512 + 9, math.inf), ("b", 4096 + 2, 0.0)],
        [("a", 4096 + 2999, math.inf)],
        [("b", 512 + 9, math.nan), ("a", 4096 + 1500, math.inf)],
    ],
)
def test_of_several_folders_no_batch_is_drawn_by_damaged_sums(tmp_path, caplog, weights, how, damages):
    sizes = {"max_episodes": 10, "max_timesteps": 300}
    buffers = [make(tmp_path / name, *[300] * 10, **sizes) for name in "ab"]
    options = EVERY_STEP | {"prioritized": Prioritized(**HOW, **how)}
    buffer = ConcatBuffer(buffers, weights=weights)
    buffer.sample(1, **options)
    for name, node, value in damages:
        damage(tmp_path / name, node, value)
    for number, _ in enumerate(buffers):  # elsewhere, by what it has already
        buffer.update_priorities(np.array([[number, 7, 0]]), np.array([1 - EPSILON]))
    batch = buffer.sample(5900, **options, seed=3)  # of another seed, a leaf may be none of the 5,900 of 6,000
    assert caplog.text.count("its sums are damaged") == len(damages)
    np.testing.assert_allclose(batch["_probabilities"], 1 / 6000, rtol=1e-12)
    assert len({*map(tuple, batch["_indices"].tolist())}) == 5900 or not how


def test_a_leaf_that_became_infinite_is_not_drawn_by_from_a_tree_in_memory_either(tmp_path, caplog):
    buffer = make(tmp_path, *LARGE, max_episodes=70, max_timesteps=300)
    buffer.sample(1, **EVERY_STEP)
    damage(tmp_path, (1 << 15) + 2, math.inf)
    batch = buffer.sample(300, prioritized=EVERY_STEP["prioritized"], view=Window(3, boundary="drop"), format="numpy")
    assert "its sums are damaged" in caplog.text
    assert (batch["_probabilities"] == 1 / (298 * 70)).all()


def test_a_tree_that_could_not_be_made_anew_is_made_anew_by_the_next_call(tmp_path, kind, monkeypatch):
    make(tmp_path, 3)
    priorities = opened(tmp_path)
    update(priorities, [(0, 1)], [3])
    priorities.checkpoint()
    forget_places(monkeypatch)
    with system(1, error=errno.ENOSPC), pytest.raises(OSError, match="No space left"):
        find(priorities, np.zeros(1))
    assert update(priorities, [(0, 2)], [8]) == 0
    three, eight = powered([3, 8])
    assert consistent(priorities) == {(0, 0): 1, (0, 1): three, (0, 2): eight}


def test_minima_for_which_there_was_no_room_are_found_later(tmp_path):
    buffer = make(tmp_path, 2, max_episodes=40, max_timesteps=6000)
    priorities = opened(tmp_path)
    update(priorities, [(0, 0)], [0.25])
    with system(1, error=errno.ENOSPC), pytest.raises(OSError, match="No space left"):
        priorities.keep_minima()
    publish(buffer, 3)
    priorities.keep_minima()
    assert priorities.tree.minimum == powered([0.25])[0]


def test_arrays_whose_places_are_told_stay_until_others_are(tmp_path):
    make(tmp_path, 6, max_timesteps=9)
    priorities, places = opened(tmp_path), StepLeaves(True)
    with priorities.lock:
        places.look([priorities])
        pairs, tree = weakref.ref(words_of(priorities).base), weakref.ref(priorities.tree)
        map_anew(priorities)
        assert pairs() is not None and tree() is not None
        assert pairs() is not words_of(priorities).base and tree() is not priorities.tree
        priorities.follow()
        places.look([priorities])
        assert pairs() is None and tree() is None


def test_another_folder_in_the_place_of_one_is_looked_at(tmp_path):
    for name in "ab":
        make(tmp_path / name, 6)
    each, leaves = [opened(tmp_path / name) for name in "ab"], StepLeaves(True)
    assert each[0].stamp == each[1].stamp
    for priorities in each:
        with priorities.lock:
            leaves.look([priorities])
            assert leaves.tree is priorities.tree


@pytest.mark.usefixtures("both_ways")
def test_a_leaf_beyond_the_last_slot_is_no_step_whatever_lies_behind_the_slots_in_memory():
    words, nodes = np.array([[8, 5 << 32], [9, 5 << 32], [10, 5 << 32]]), np.zeros(num_nodes(10))
    nodes[16 + 12] = 1.0  # as in a damaged file: a leaf of a third slot, where there are two

    class Folder:
        stamp = 0

        def row(self):
            return Row(SumTree(nodes, 10), 5, 0, words[:2].reshape(-1), *NO_EPISODES)

        def mend(self):
            nodes[16 + 12], nodes[16 + 6] = 0.0, 1.0
            self.stamp += 1

    leaves = Leaves(True)
    leaves.look([Folder()])
    assert leaves.find(None, np.array([0.5])) is None
    assert [column.item() for column in leaves.find(None, np.array([0.5]))] == [1, 8, 1, 1.0]


def test_a_forked_child_never_makes_the_tree_of_its_parent_anew(tmp_path, kind, monkeypatch):
    make(tmp_path, 3)
    priorities = opened(tmp_path)
    update(priorities, [(0, 1)], [3])
    priorities.checkpoint()
    before = os.stat(tmp_path / "priority" / "td.npy").st_ino

    def work(_):
        forget_places(monkeypatch)
        with pytest.raises(WriterLostError, match="a forked child does not own the priorities 'td'"):
            find(priorities, np.zeros(1))

    child = in_child(work)
    assert child.status == 0, child.told
    assert os.stat(tmp_path / "priority" / "td.npy").st_ino == before
    update(priorities, [(0, 2)], [8])
    priorities.close()
    three, eight = powered([3, 8])
    assert consistent(opened(tmp_path)) == {(0, 0): 1, (0, 1): three, (0, 2): eight}


def test_a_child_that_is_forked_while_a_thread_draws_waits_for_nobody(tmp_path):
    buffers = [make(tmp_path / name, 6, 5, max_timesteps=9) for name in "ab"]
    for buffer in (buffers[0], ConcatBuffer(buffers)):
        draw = partial(buffer.sample, 4, prioritized=True, timestep_level=True, format="numpy")
        draw()
        (draws,) = samplers_of(buffer)
        inside, done = threading.Event(), threading.Event()
        each = in_turn(one.steps for one in anchor_priorities_of(draws))

        def wait(inside=inside, done=done, each=each):
            def stay():
                inside.set()
                assert done.wait(60)

            while_locked(each, stay)

        go_on = before_weighing(draws, wait)
        thread = threading.Thread(target=draw)
        thread.start()
        assert inside.wait(60)

        def work(tell, draw=draw, go_on=go_on):
            signal.alarm(20)  # which ends it
            go_on()
            tell(len(draw()["x"]))

        child = in_child(work)
        done.set()
        thread.join()
        assert (child.status, child.told) == (0, [4])


INTERRUPTED = """
    import random, signal, sys
    from memmap_buffer.format.storage import Storage
    from memmap_buffer.priority.priorities import Priorities, in_turn, while_locked

    each = in_turn(Priorities.open(Storage.open(path), "td") for path in sys.argv[1:])
    rng, hits = random.Random(0), 0
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    while hits < 3000:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 2e-4))
            while True:
                while_locked(each, int)
        except KeyboardInterrupt as error:  # with its frames, as a notebook keeps them
            signal.setitimer(signal.ITIMER_REAL, 0)
            hits += 1
            assert not any(one.lock._is_owned() for one in each), (hits, error.__traceback__.tb_next.tb_lasti)
"""


def test_locks_of_several_are_let_go_of_whenever_an_interruption_comes(tmp_path):
    """Also as long as somebody keeps the traceback."""
    for name in "abc":
        make(tmp_path / name, 5).close()
    code = textwrap.dedent(INTERRUPTED)
    subprocess.run([sys.executable, "-c", code, *(tmp_path / name for name in "abc")], check=True)


def test_a_copy_of_the_folder_keeps_the_priorities_under_another_inode(tmp_path):
    buffer = make(tmp_path / "a", 2)
    update(opened(tmp_path / "a"), [(0, 1)], [3])
    buffer.snapshot(tmp_path / "b")
    assert content(opened(tmp_path / "b")) == content(opened(tmp_path / "a")) == {(0, 0): 1, (0, 1): powered([3])[0]}


def test_the_head_of_a_sparse_copy_has_no_hole_that_a_store_may_find_no_room_for(tmp_path):
    make(tmp_path, 2, max_episodes=4000).close()
    opened(tmp_path).close()
    head = tmp_path / "priority" / "td.head.npy"
    size = head.stat().st_size
    with head.open("r+b") as file:
        file.truncate(512)  # behind are zeros only
        file.truncate(size)
        if not host.overwrites_in_place(tmp_path) or not has_hole(file.fileno(), 0, size):
            pytest.skip("this file system has no holes, or does not overwrite in place")
        priorities = opened(tmp_path)
        assert content(priorities) == {(0, 0): 1, (0, 1): 1}
        assert not has_hole(file.fileno(), 0, size)


# Kills, faults, full disks


def act(folder, reach=lambda *_: None):
    """A life of a tree, told step by step: opened, updated, followed, checkpointed, of another α."""
    buffer = ReplayBuffer.from_folder(folder)
    priorities = opened(folder)
    update(priorities, [(0, 0), (1, 1)], [4, 9])
    priorities.checkpoint()
    reach("updated")
    publish(buffer, 2)
    publish(buffer, 2)
    publish(buffer, 2)  # retires 0
    priorities.follow()
    update(priorities, [(4, 1)], [16])
    priorities.checkpoint()
    reach("again")
    priorities.close()
    opened(folder, alpha=1.0).close()


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 5], ids=["each", "every fifth"])
@pytest.mark.parametrize("half", [False, True])
def test_a_kill_at_any_call_leaves_a_buffer_that_opens_with_a_consistent_tree(
    tmp_path, kind, half, stride, monkeypatch
):
    """Every leaf is one that was set, or the default; the sums are those of the leaves; no episode is missing."""
    without_barriers(monkeypatch)
    make(tmp_path / "origin", 2, 2).close()
    shutil.copytree(tmp_path / "origin", tmp_path / "count")
    count = len(operations_of(lambda: act(tmp_path / "count")))
    assert count > 60
    for at in range(1 + half % stride, count + 1, stride):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "origin", folder)

        def work(tell, at=at, folder=folder):
            with system(at, kill=True, half=half):
                act(folder, tell)

        child = in_child(work)
        assert child.status == KILLED, child.told
        check_after_kill(folder, child.told)
        shutil.rmtree(folder)


def check_after_kill(folder, reached):
    serials = ReplayBuffer.from_folder(folder, read_only=True).serials.tolist()
    priorities = opened(folder)
    got = consistent(priorities)
    assert set(got) == {(serial, t) for serial in serials for t in range(2)}
    allowed = [1.0, *powered([4, 9, 16])]
    assert all(min(abs(value - one) for one in allowed) < 1e-9 for value in got.values()), got
    if "updated" in reached:
        assert got[1, 1] == pytest.approx(powered([9])[0])
    if "again" in reached:
        assert got[4, 1] == pytest.approx(powered([16])[0])
    priorities.close()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("place", "call", "stored"),
    [
        pytest.param(SumTree, "put", False, id="after the generation became odd"),
        pytest.param(SumTree, "refresh", True, id="between leaves and sums"),
        pytest.param(TreeFile, "raise_maximum", True, id="before the maximum"),
        pytest.param(Priorities, "tell", True, id="before the generation became even"),
    ],
)
def test_a_kill_between_two_stores_is_seen_and_mended(tmp_path, kind, monkeypatch, place, call, stored):
    make(tmp_path, 2, 2).close()

    def work(_):
        priorities = opened(tmp_path)
        priorities.keep_changes()
        update(priorities, [(0, 1)], [3])
        priorities.checkpoint()
        monkeypatch.setattr(place, call, lambda *_: os._exit(KILLED))
        if place is SumTree:
            monkeypatch.setattr(SumTree, "loops", None)  # as one loop does both
        update(priorities, [(0, 0), (1, 1)], [8, 8])

    assert in_child(work).status == KILLED
    three, eight = powered([3, 8])
    got = consistent(opened(tmp_path))
    expected = {(0, 0): 1, (0, 1): three, (1, 0): 1, (1, 1): 1}
    assert got == (expected | {(0, 0): eight, (1, 1): eight} if stored and kind == "shared" else expected)


FOLDERS = "abcd"


def begun(root):
    """Folders whose priorities are open, as one."""
    both = ConcatBuffer([ReplayBuffer.from_folder(root / name) for name in FOLDERS])
    both.sample(1, prioritized=Prioritized(**HOW), timestep_level=True, format="numpy")
    return both


def shown_by(buffer):
    """(serial, t) of every step."""
    table = storage_of(buffer).refresh()
    return {(int(table.serial[s]), t) for s in table.visible for t in range(table.start[s], table.length[s])}


def record(root):
    """Publish and delete episodes for a while."""
    rng, writers = np.random.default_rng(5), [ReplayBuffer.from_folder(root / name) for name in FOLDERS]
    for _ in range(150):
        writer = writers[rng.integers(len(writers))]
        publish(writer, int(rng.integers(1, 7)))
        if rng.random() < 0.3 and len(writer) > 3:
            writer.delete(int(rng.integers(0, len(writer) - 1)))
        time.sleep(0.002)


@pytest.mark.usefixtures("both_ways")
def test_errors_of_folders_whose_last_one_has_lost_the_episode_count_for_the_others(tmp_path):
    each = [make(tmp_path / "a", 4), make(tmp_path / "b", 4, 4)]
    both = ConcatBuffer(each)
    both.sample(8, n_steps=2, prioritized=Prioritized(**HOW))  # of anchors, which hear of changed steps
    each[1].delete(0)
    assert both.update_priorities([[0, 0, 1], [1, 0, 1]], [3, 8]) == 1
    np.testing.assert_allclose(both.priorities([[0, 0, 1], [0, 0, 2]]), [*powered([3]), 1])
    batch = both.sample(300, n_steps=2, prioritized=Prioritized(**HOW))
    items = map(tuple, batch["_indices"].tolist())
    probability = dict(zip(items, batch["_probabilities"].tolist(), strict=True))
    assert probability[0, 0, 1] / probability[0, 0, 0] == pytest.approx(powered([3])[0])


def half_stored(tree, leaves, priorities, of):
    """The first half of an update's leaves."""
    half = len(of) // 2
    store_leaves_alone(tree, leaves[:half], priorities[:half], of[:half])


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("place", "call", "number", "stored"),
    [
        pytest.param(TreeFile, "begin", 3, "", id="before the third generation became odd"),
        pytest.param(SumTree, "put", 1, "", id="after the generations became odd"),
        pytest.param(SumTree, "put", half_stored, "ab", id="between the leaves"),
        pytest.param(SumTree, "_eight", 1, "abcd", id="between leaves and sums"),
        pytest.param(SumTree, "_eight", 2, "abcd", id="between two levels of sums"),
        pytest.param(TreeFile, "raise_maximum", 2, "abcd", id="before the second maximum"),
        pytest.param(TreeFile, "end", 3, "abcd", id="before the third generation became even"),
        pytest.param(TreeFile, "end", 4, "abcd", id="before the last generation became even"),
    ],
)
def test_a_kill_between_two_stores_to_several_trees_is_seen_and_mended_in_each(
    tmp_path, kind, monkeypatch, place, call, number, stored
):
    for name in FOLDERS:
        make(tmp_path / name, 2, 2, max_episodes=40, max_timesteps=900).close()

    def work(_):
        both = begun(tmp_path)
        opened_here = priorities_named(both)
        for one in each_opened(opened_here):
            one.keep_changes()
        both.update_priorities([[i, 0, 1] for i in range(4)], [3] * 4)
        opened_here.checkpoint()
        real, calls = getattr(place, call), []

        def killed(*arguments):
            calls.append(call)
            if number == len(calls):
                os._exit(KILLED)
            if callable(number):
                number(*arguments)
                os._exit(KILLED)
            return real(*arguments)

        monkeypatch.setattr(place, call, killed)
        if call == "_eight":
            monkeypatch.setattr(SumTree, "loops", None)  # as one loop does all
        both.update_priorities([[i, serial, serial] for i in range(4) for serial in (0, 1)], [8] * 8)

    child = in_child(work)
    assert child.status == KILLED, child.told
    three, eight = powered([3, 8])
    for name in FOLDERS:
        expected = {(0, 0): 1, (0, 1): three, (1, 0): 1, (1, 1): 1}
        if name in stored and kind == "shared":
            expected |= {(0, 0): eight, (1, 1): eight}
        priorities = opened(tmp_path / name)
        assert consistent(priorities) == expected
        update(priorities, [(0, 0)], [3])
        assert consistent(priorities) == expected | {(0, 0): three}


@pytest.mark.usefixtures("both_ways")
def test_a_learner_of_several_folders_that_is_killed_at_any_moment_leaves_trees_that_add_up(tmp_path):
    """Draws and updates go on beside a recorder; each leaf that is found later is one that was stored, or new."""
    errors = [0.25, 4.0, 9.0]
    writers = [make(tmp_path / name, 6, 5, capacity=60, max_episodes=12) for name in FOLDERS]
    for turn in range(8):
        reading, writing = os.pipe()
        pid = fork()
        if pid == 0:
            try:
                both, rng = begun(tmp_path), np.random.default_rng(turn)
                os.write(writing, b".")
                while True:
                    batch = both.sample(32, prioritized=Prioritized(**HOW), timestep_level=True, format="numpy")
                    both.update_priorities(batch["_indices"], rng.choice(errors, 32))
            finally:
                os._exit(1)
        os.close(writing)
        try:
            assert os.read(reading, 1) == b"."
            for _ in range(4):
                publish(writers[turn % len(writers)], 1 + turn % 6)
                time.sleep(0.003 * turn)
        finally:
            os.kill(pid, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            os.close(reading)
        for name, writer in zip(FOLDERS, writers, strict=True):
            priorities = opened(tmp_path / name)
            got = consistent(priorities)
            assert got.keys() == shown_by(writer)
            assert set(got.values()) <= {1.0, *powered(errors)}
            priorities.close()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, KeyboardInterrupt])
def test_after_an_error_at_any_call_of_an_update_of_several_folders_all_go_on(tmp_path, kind, error, monkeypatch):
    without_barriers(monkeypatch)

    def act(root):
        both = begun(root)
        for turn in range(3):
            for name in FOLDERS[:turn]:
                publish(ReplayBuffer.from_folder(root / name), 2)
            both.update_priorities([[i, 0, turn % 2] for i in range(4)], [4 + 5 * (turn % 2)] * 4)
        return both

    for name in FOLDERS:
        make(tmp_path / "origin" / name, 2, 2).close()
    shutil.copytree(tmp_path / "origin", tmp_path / "count")
    count = len(operations_of(lambda: act(tmp_path / "count")))
    for at in range(1, count + 1, 11):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "origin", root)

        def work(_, at=at, root=root):
            both = begun(root)
            with system(at, error=error), suppress(OSError, KeyboardInterrupt):
                act(root)
            assert both.update_priorities([[i, 0, 0] for i in range(4)], [9] * 4) == 0
            for name in FOLDERS:
                assert consistent(opened(root / name))[0, 0] == powered([9])[0]

        child = in_child(work)
        assert child.status == 0, (at, child.told)
        shutil.rmtree(root)


@pytest.mark.usefixtures("both_ways")
def test_two_threads_update_folders_that_another_process_records_and_the_sums_of_each_level_are_right(tmp_path):
    """Rings, deletions, steps that are shown at once; the threads take the folders in opposite orders."""
    for name in FOLDERS:
        make(tmp_path / name, 6, 5, capacity=40, max_episodes=12, publish="step").close()
    pid = fork()  # before there are threads
    if pid == 0:
        try:
            record(tmp_path)
            os._exit(0)
        finally:
            os._exit(1)
    each, failed, turns = [ReplayBuffer.from_folder(tmp_path / name, read_only=False) for name in FOLDERS], [], []
    views, ended = [ConcatBuffer(each), ConcatBuffer(each[::-1])], threading.Event()

    def work(view, seed):
        rng, known = np.random.default_rng(seed), np.zeros((0, 3), np.int64)
        try:
            while not (ended.is_set() and len(turns) > 100):
                options = {"n_steps": 2} if rng.random() < 0.3 else {"timestep_level": True}
                batch = view.sample(24, prioritized=Prioritized(**HOW), format="numpy", **options)
                known = np.concatenate([known, batch["_indices"]])[-400:]
                chosen = known[rng.integers(0, len(known), 40)]
                view.update_priorities(chosen, rng.choice([0.25, 4, 9], 40))
                turns.append(seed)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=[view, seed], daemon=True) for seed, view in enumerate(views)]
    for thread in threads:
        thread.start()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended.set()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert (failed, status) == ([], 0)
    for buffer in each:
        got = consistent(priorities_of(views[0], buffer))
        assert got.keys() == shown_by(buffer) and set(got.values()) <= {1.0, *powered([0.25, 4, 9])}


def test_a_ring_that_is_replaced_whole_between_two_looks_is_drawn_from(tmp_path, monkeypatch):
    """The priorities of steps are looked at first, then the anchors, which all are of other episodes by then."""
    writer = make(tmp_path, 6, 6, 6, 6)
    reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
    options = {"prioritized": Prioritized(**HOW, reduce="mean"), "view": Window(2), "format": "numpy"}
    reader.sample(8, **options)
    replaced, priorities = [], priorities_of(reader)
    follow = priorities.follow

    def follow_and_replace():
        follow()
        if not replaced:
            replaced.extend(publish(writer, 6) for _ in range(4))

    monkeypatch.setattr(priorities, "follow", follow_and_replace)
    publish(writer, 6)
    assert (reader.sample(8, **options)["_indices"][:, 0] >= 5).all()
    assert replaced


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, KeyboardInterrupt])
def test_after_an_error_at_any_call_the_tree_goes_on_consistently(tmp_path, kind, error, monkeypatch):
    without_barriers(monkeypatch)
    make(tmp_path / "origin", 2, 2).close()
    shutil.copytree(tmp_path / "origin", tmp_path / "count")
    count = len(operations_of(lambda: act(tmp_path / "count")))
    for at in range(1, count + 1, 5):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "origin", folder)

        def work(_, at=at, folder=folder):
            reached = []
            with system(at, error=error), pytest.raises((OSError, KeyboardInterrupt), match=r"left|error|middle"):
                act(folder, reached.append)
            check_after_kill(folder, [])

        child = in_child(work)
        assert child.status == 0, child.told
        shutil.rmtree(folder)


@pytest.mark.parametrize("disk", [on_ext4, on_tmpfs])
def test_on_a_full_disk_an_exception_is_raised_and_never_a_signal(tmp_path, disk, monkeypatch):
    """Filled to the last block, beside a reader that has mapped the tree plainly; what was written can be changed."""
    monkeypatch.setattr(mounts, "DISK", 24 << 20)
    steps = 100_000

    def work(tell):
        folder = tmp_path / "disk" / "buffer"
        buffer = make(folder, max_episodes=3, max_timesteps=steps)
        priorities = opened(folder)
        publish(buffer, 100)
        priorities.follow()
        plain = np.load(folder / "priority" / "td.npy", mmap_mode="r")
        fill(tmp_path / "disk" / "ballast")
        rng = np.random.default_rng(0)
        for _ in range(50):
            t = rng.integers(0, 100, 64)
            update(priorities, np.stack([np.zeros(64, np.int64), t], axis=1), rng.random(64))
        tell(bool(plain[len(plain) // 3 :][:100].sum() == math.fsum(content(priorities).values())))
        (tmp_path / "disk" / "ballast").unlink()
        for _ in range(2):
            publish(buffer, steps)
        fill(tmp_path / "disk" / "ballast")
        try:
            priorities.follow()
            tell("all of it was there")
        except OSError as error:
            tell(errno.errorcode[error.errno])
        (tmp_path / "disk" / "ballast").unlink()
        tell(len(content(priorities)))

    assert disk(tmp_path / "disk", work) == [True, "ENOSPC", 100 + 2 * steps]


def test_the_kind_of_file_system_decides_and_is_told_once(tmp_path, kind, caplog):
    caplog.set_level(logging.INFO)
    make(tmp_path, 2)
    opened(tmp_path)
    told = [record for record in caplog.records if "stay in memory until checkpoint()" in record.getMessage()]
    assert len(told) == (kind == "private")
    assert host.file_system(tmp_path) not in ("", "proc")


def test_a_tree_takes_disk_space_only_where_steps_are(tmp_path):
    buffer = make(tmp_path, max_episodes=100, max_timesteps=1_000_000)
    priorities = opened(tmp_path)
    publish(buffer, 10)
    priorities.follow()
    status = os.stat(tmp_path / "priority" / "td.npy")
    assert status.st_size > 2**31
    assert status.st_blocks * 512 < 2**27


@pytest.mark.usefixtures("both_ways")
def test_the_minimum_is_kept_once_it_was_asked_for(tmp_path, kind):
    buffer = make(tmp_path, 2, 2, max_episodes=40, max_timesteps=6000)
    priorities = opened(tmp_path)
    update(priorities, [(0, 0)], [0.25])
    priorities.keep_minima()
    assert priorities.tree.minimum == powered([0.25])[0]
    update(priorities, [(1, 1), (0, 0)], [0.125, 3])
    assert priorities.tree.minimum == powered([0.125])[0]
    priorities.close()
    again = opened(tmp_path)
    assert again.tree.minima
    buffer.delete(1)
    again.follow()
    assert again.tree.minimum == 1.0


def test_of_many_folders_addresses_are_asked_of_those_that_changed(monkeypatch):
    class Folder:
        stamp = 0

        def __init__(self, per_slot):
            self.per_slot = per_slot

        def row(self):
            return Row(SumTree.empty(8), self.per_slot, 0, np.zeros(2, np.int64), *NO_EPISODES)

    asked, place = [], Row.place.func
    counted = type(vars(Row)["place"])(lambda row: asked.append(row.per_slot) or place(row))
    counted.__set_name__(Row, "place")
    monkeypatch.setattr(Row, "place", counted)
    leaves, each = Leaves(False), [Folder(1), Folder(2), Folder(3)]
    leaves.look(each)
    each[1].stamp += 1
    leaves.look(each)
    assert asked == [1, 2, 3, 2]
