"""Which slot is written next, as whoever opens the folder in the middle of it sees."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from inside import slot_of, storage_of
from specification import GENERATION

from memmap_buffer import BufferFullError, ReplayBuffer, Schema
from memmap_buffer.format.episode_table import EpisodeTable
from memmap_buffer.format.layout import Layout
from memmap_buffer.writing.commit import WriteHandles
from memmap_buffer.writing.slots import SlotAllocator


@pytest.mark.parametrize("spare_slots", [1, 3])
@pytest.mark.parametrize("capacity", [None, 16])
def test_while_a_slot_is_overwritten_no_retired_episode_comes_back(tmp_path, monkeypatch, capacity, spare_slots):
    """Also where a short one would be within `capacity` again, were a longer one overwritten before it."""
    seen: list[tuple[list[int], list[int]]] = []
    begin = WriteHandles.write_generation

    def watched(self: WriteHandles, *where: Any) -> None:
        before = ReplayBuffer.from_folder(tmp_path, read_only=True).serials.tolist()
        begin(self, *where)
        seen.append((before, ReplayBuffer.from_folder(tmp_path, read_only=True).serials.tolist()))

    monkeypatch.setattr(WriteHandles, "write_generation", watched)
    rng = np.random.default_rng(0)
    options = {"circular": True, "capacity": capacity, "spare_slots": spare_slots}
    for number in range(200):
        if number % 2 == 0:  # a new writer finds the slots as they are
            buffer = ReplayBuffer(tmp_path, 5, 6, {"x": "int"}, **options)
        if number % 7 == 3:
            buffer.begin_episode().abort()
        buffer.store_episode(x=np.arange(rng.integers(1, 7)))
    assert len(seen) == 200 if capacity is None else len(seen) > 200  # one that has no step left is given up
    assert [shown for _, shown in seen] == [before for before, _ in seen]
    assert all(before for before, _ in seen[10:])


def test_a_fresh_buffer_fills_from_slot_0_and_a_full_ring_goes_round(tmp_path):
    with ReplayBuffer(tmp_path, 3, 2, {"x": "int"}, circular=True) as buffer:
        slots = []
        for number in range(8):
            buffer.store_episode(x=[number])
            slots.append(slot_of(tmp_path, number))
    assert slots == [0, 1, 2, 3, 0, 1, 2, 3]


def test_slots_that_are_freed_together_are_each_taken_once_and_none_that_shows_an_episode(tmp_path):
    rng, shown, value = np.random.default_rng(0), [], 0
    for number in range(150):
        if number % 5 == 0:  # a new writer finds few that are free
            buffer = ReplayBuffer(tmp_path, 12, 2, {"x": "int"}, circular=True, spare_slots=2)
        for _ in range(rng.integers(1, 6)):
            buffer.store_episode(x=[value, value])
            shown, value = [*shown, value][-12:], value + 1
        if rng.random() < 0.1:
            buffer.clear()
            shown = []
        else:
            gone = rng.permutation(len(shown))[: rng.integers(0, 9)]
            buffer.delete(gone)
            shown = [each for i, each in enumerate(shown) if i not in gone]
        assert [buffer.episode(i)["x"].tolist() for i in range(len(buffer))] == [[each] * 2 for each in shown]


# Which steps leave


class Ring:
    """An allocator beside a list of what was published, as (slot, serial); a step is forgotten with the first entry."""

    def __init__(self, capacity: int, max_episodes: int) -> None:
        layout = Layout(Schema({"x": "int"}), max_episodes, 50, spare_slots=9, circular=True, capacity=capacity)
        words = [np.zeros(layout.slots, kind) for kind in ("u8", "i8", "i8", "i8", "u8", "u4", "?")]
        self.slots = SlotAllocator(
            layout, EpisodeTable(0, 0, *words, np.empty(0, np.int64)), 0, np.zeros(layout.slots, np.int64), ""
        )
        self.capacity, self.max_episodes = capacity, max_episodes
        self.published: list[tuple[int, int]] = []
        self.left: dict[tuple[int, int], range] = {}  # of each episode, the steps that are shown
        self.open: set[tuple[int, int]] = set()

    def begin(self, length: int, *, alone: bool = True) -> tuple[int, int]:
        [slot] = self.slots.find({slot for slot, _ in self.open}.__contains__, 1)
        one = slot, self.slots.next
        self.slots.show(one[1], slot, length, alone=alone)
        self.left[one] = range(0)
        self.longer(one, length)
        return one

    def longer(self, one: tuple[int, int], count: int = 1) -> None:
        if one in self.left:
            self.left[one] = range(self.left[one].start, self.left[one].stop + count)
            self.published += [one] * count
        for gone in sorted(self.left, key=lambda each: each[1])[: -self.max_episodes]:
            self.leave(gone)

    def leave(self, one: tuple[int, int]) -> None:
        self.left.pop(one, None)
        self.published = [other for other in self.published if other != one]

    def end(self, one: tuple[int, int]) -> None:
        self.open.discard(one)
        if one in self.left and not self.left[one]:
            self.slots.hide(one[0])
            self.leave(one)

    def trim(self) -> None:
        before, count = self.slots.start.copy(), self.slots.surplus
        moved = self.slots.forget(count)
        assert np.flatnonzero(self.slots.start != before).tolist() == sorted(moved.tolist())
        for one in self.published[:count]:
            self.left[one] = self.left[one][1:]
        self.published = self.published[count:]
        for one in [*self.left]:
            if one not in self.open:
                self.end(one)

    def check(self) -> None:
        assert self.slots.steps == len(self.published) <= self.capacity
        assert len(self.slots) == len(self.left)
        for slot, serial in self.left:
            assert self.slots.serial[slot] == serial
            shown = range(self.slots.start.item(slot), self.slots.stop.item(slot))
            assert shown == self.left[slot, serial]


@pytest.mark.parametrize("max_episodes", [6, 60])
@pytest.mark.parametrize("seed", range(40))
def test_the_steps_that_leave_are_those_that_were_published_first(seed: int, max_episodes: int) -> None:
    """Vectors of one to five environments, steps of one alone, whole episodes in between, some withdrawn."""
    draw = random.Random(seed)
    ring, size = Ring(draw.randint(1, 80), max_episodes), draw.randint(1, 5)
    running: list[tuple[int, int]] = []
    for _ in range(200):
        if draw.random() < 0.1:
            ring.begin(draw.randint(1, 10))
        elif running and draw.random() < 0.1:
            one = draw.choice(running)
            ring.slots.show(one[1], one[0], ring.left[one].stop + 1 if one in ring.left else 99)
            ring.longer(one)
        else:
            together = np.array([slot for slot, _ in running], np.int64)
            new = [ring.begin(1, alone=False) for _ in range(size - len(running))]
            ring.slots.show_round(together)
            for one in running:
                ring.longer(one)
            running += new
            ring.open |= {*new}
        ring.trim()
        ring.check()
        for one in [one for one in running if draw.random() < 0.2]:
            running.remove(one)
            if draw.random() < 0.2:
                ring.slots.hide(one[0])
                ring.open.discard(one)
                ring.leave(one)
            ring.end(one)
        if draw.random() < 0.1:
            for one in running:
                ring.end(one)
            running, size = [], draw.randint(1, 5)
        ring.check()


def test_an_allocator_of_what_is_on_the_disk_lets_the_same_steps_leave(tmp_path) -> None:
    """The records keep the order of rounds, of which those of a vector are successive."""
    fields = {"x": "int", "terminated": ("bool", (), False)}
    left = []
    for reopened in (False, True):
        folder = tmp_path / str(reopened)
        options = {"circular": True, "spare_slots": 3, "capacity": 21, "publish": "step"}
        buffer = ReplayBuffer(folder, 50, 30, fields, **options)
        for t in range(30):
            buffer.add(x=[3 * t, 3 * t + 1, 3 * t + 2], terminated=[t % 7 == 6, t % 5 == 4, False])
        buffer.end_episodes()
        if reopened:
            buffer.close()
            buffer = ReplayBuffer.from_folder(folder)
        for t in range(5):
            buffer.store_episode(x=[1000 + t, 1100 + t, 1200 + t])
            left.append(sorted(buffer.batch(timestep_level=True)["x"].tolist()))
        buffer.close()
    assert left[:5] == left[5:]


def test_an_episode_beyond_max_episodes_leaves_a_ring_of_steps_for_good(tmp_path):
    with ReplayBuffer(tmp_path, 2, 10, {"x": "int"}, circular=True, capacity=20, spare_slots=2) as buffer:
        for i in range(3):
            buffer.store_episode(x=[i] * 3)
        void = storage_of(buffer).maps.words[:, GENERATION] & 1
        assert np.count_nonzero(void) == 1
        assert [episode["x"].tolist() for episode in buffer] == [[1] * 3, [2] * 3]


@pytest.mark.parametrize("how", [{"publish": "step"}, {"stage": "disk"}])
def test_until_it_is_full_a_buffer_needs_no_spare_slots_for_episodes_in_place(tmp_path, how):
    with ReplayBuffer(tmp_path, 12, 5, {"x": "int"}, **how) as buffer:
        for number in range(3):
            buffer.store_episode(x=[number])
        buffer.delete(1)
        episodes = [buffer.begin_episode() for _ in range(10)]
        with pytest.raises(BufferFullError, match="max_episodes=12"):
            buffer.begin_episode()
        for t in range(2):
            for number, episode in enumerate(episodes):
                episode.store(x=10 * number + t)
        for episode in episodes:
            episode.publish()
        expected = [[0], [2], *([10 * number, 10 * number + 1] for number in range(10))]
        assert [buffer.episode(i)["x"].tolist() for i in range(12)] == expected
    assert [buffer.episode(i)["x"].tolist() for i in range(12)] == expected


def test_a_ring_of_steps_has_a_slot_for_each_environment_that_has_a_hundred_of_them(tmp_path):
    size = 600
    with ReplayBuffer(tmp_path, capacity=100 * size, max_timesteps=50, fields={"x": "int"}, publish="step") as buffer:
        for t in range(3):
            buffer.add(x=np.arange(size) + t)
        assert buffer.num_steps == 3 * size
