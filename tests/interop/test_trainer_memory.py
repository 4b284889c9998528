"""The memory under the trainers' buffers keeps every transition that it was given, whoever tells where episodes end."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interruptions import interrupted

from memmap_buffer import Field, NotEnoughDataError, ReplayBuffer, SchemaMismatchError, verify
from memmap_buffer.interop.trainer_memory import TrainerMemory

FIELDS = {"x": Field("int", final=True), "terminated": "bool", "truncated": "bool"}
DRAW: dict[str, Any] = {"n_steps": 1, "next_fields": ("x",), "format": "numpy"}


def opened(folder: Path, num_envs: int = 1, capacity: int = 1000, **options: Any) -> TrainerMemory:
    memory = TrainerMemory(folder, capacity, num_envs, **options)
    memory.open(FIELDS)
    return memory


def steps(seed: int, count: int, num_envs: int) -> Iterator[tuple[dict[str, Any], dict[str, Any], Any]]:
    """(step, what followed it, which environments were reset after it though nobody said so)."""
    rng, numbers = np.random.default_rng(seed), iter(range(10**6))

    def seen() -> Any:
        return np.array([next(numbers) for _ in range(num_envs)])

    now = seen()
    for _ in range(count):
        following, chance = seen(), rng.random((3, num_envs))
        terminated, truncated, unseen = chance[0] < 0.1, (chance[1] < 0.1) & (chance[0] >= 0.1), chance[2] < 0.1
        yield {"x": now, "terminated": terminated, "truncated": truncated}, {"x": following}, unseen
        now = np.where(terminated | truncated | unseen, seen(), following)


def pairs(memory: TrainerMemory) -> list[tuple[int, ...]]:
    batch = memory.disk.batch(**DRAW)
    return sorted(zip(*(batch[name].tolist() for name in ("x", "next_x", "terminated")), strict=True))


@pytest.mark.parametrize("told", [True, False], ids=["ends are told", "the next step tells"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("max_timesteps", [4, 100])
def test_every_transition_is_kept_and_none_leads_across_a_reset(
    tmp_path: Path, told: bool, num_envs: int, max_timesteps: int
) -> None:
    memory, expected = opened(tmp_path, num_envs, max_timesteps=max_timesteps), []
    for count, (step, following, _) in enumerate(steps(0, 120, num_envs), 1):
        expected += zip(*(a.tolist() for a in (step["x"], following["x"], step["terminated"])), strict=True)
        memory.add(step if told else {k: v for k, v in step.items() if k != "truncated"}, following)
        waiting = 0 if told else num_envs
        assert len(memory) == count * num_envs - waiting and memory.num_added * num_envs == len(memory)
        if count % 40 == 0:
            memory.end_episodes()
            assert pairs(memory) == sorted(expected)
    assert verify(tmp_path) == []


@pytest.mark.parametrize("told", [True, False], ids=["ends are told", "the next step tells"])
def test_only_the_episode_that_was_reset_ends_where_the_next_step_tells(tmp_path: Path, told: bool) -> None:
    memory = opened(tmp_path, 2)
    for now, following in (([0, 10], [1, 11]), ([1, 11], [2, 12]), ([5, 12], [6, 13]), ([6, 13], [7, 14])):
        step = {"x": np.array(now), "terminated": np.zeros(2, bool)}
        memory.add({**step, "truncated": np.zeros(2, bool)} if told else step, {"x": np.array(following)})
    memory.end_episodes()
    assert sorted(memory.disk.episode_lens.tolist()) == [2, 2, 4]
    assert pairs(memory) == sorted((x, x + 1, False) for x in (0, 1, 5, 6, 10, 11, 12, 13))
    truncated = memory.disk.get_all_data()["truncated"]
    assert int(truncated.sum()) == (0 if told else 3)  # two at the end


def test_the_end_of_an_episode_that_is_told_cuts_no_other(tmp_path: Path) -> None:
    memory = opened(tmp_path, 2)
    for now, following, ends in (([0, 10], [1, 11], [True, False]), ([5, 11], [6, 12], [False, False])):
        step = {"x": np.array(now), "terminated": np.array(ends), "truncated": np.zeros(2, bool)}
        memory.add(step, {"x": np.array(following)})
    memory.end_episodes()
    assert sorted(memory.disk.episode_lens.tolist()) == [1, 1, 2]


def test_a_step_that_terminates_is_not_truncated_too(tmp_path: Path) -> None:
    memory = opened(tmp_path)
    memory.add({"x": np.array([0]), "terminated": np.array([True])}, {"x": np.array([1])})
    memory.add({"x": np.array([7]), "terminated": np.array([False])}, {"x": np.array([8])})
    memory.end_episodes()
    batch = memory.disk.batch(timestep_level=True, format="numpy")
    assert batch["terminated"].tolist() == [True, False] and batch["truncated"].tolist() == [False, True]


def test_the_newest_step_is_drawn_where_there_is_no_other(tmp_path: Path) -> None:
    memory = TrainerMemory(tmp_path, 10)
    for use in (lambda: memory.sample(1), lambda: memory.disk):
        with pytest.raises(NotEnoughDataError, match="nothing was stored yet; store a step first"):
            use()
    memory.open(FIELDS)
    memory.add(*next(steps(0, 1, 1))[:2])
    assert memory.sample(3, **DRAW)["next_x"].tolist() == [1, 1, 1]


def test_it_goes_on_from_its_folder_and_is_pickled_as_its_name(tmp_path: Path) -> None:
    memory = opened(tmp_path, 2, capacity=40)
    for step, following, _ in steps(0, 10, 2):
        memory.add({k: v for k, v in step.items() if k != "truncated"}, following)
    saved = pickle.dumps(memory)
    assert len(memory) == 20 and memory.over.all()
    for step, following, _ in steps(1, 5, 2):
        memory.add(step, following)
    loaded = pickle.loads(saved)
    assert (len(loaded), loaded.num_added) == (30, 15)
    memory.close()
    again = opened(tmp_path, 2, capacity=40)
    assert (len(again), again.num_added) == (30, 15) and again.over.all()
    for step, following, _ in steps(2, 20, 2):
        again.add(step, following)
    assert (len(again), again.num_added) == (40, 35)
    again.clear()
    assert (len(again), again.num_added) == (0, 0)
    with pytest.raises(SchemaMismatchError, match="capacity"):
        opened(tmp_path, 2, capacity=41)


class Interrupted(dict[str, Any]):
    """A step at which Ctrl-C comes, as soon as the one before it is stored."""

    def __contains__(self, name: object) -> bool:
        raise KeyboardInterrupt("here")


def test_no_transition_leads_across_a_step_that_was_interrupted(tmp_path: Path) -> None:
    memory = opened(tmp_path)
    for number in range(4):
        step = {"x": np.array([number]), "terminated": np.array([False])}
        if number == 2:
            with pytest.raises(KeyboardInterrupt, match="here"):
                memory.add(Interrupted(step), {"x": np.array([number + 1])})
        else:
            memory.add(step, {"x": np.array([number + 1])})
    memory.end_episodes()
    assert pairs(memory) == [(0, 1, False), (1, 2, False), (3, 4, False)]


@pytest.mark.parametrize("told", [True, False], ids=["ends are told", "the next step tells"])
def test_interrupted_at_any_line_no_step_is_there_twice_or_leads_to_another(tmp_path: Path, told: bool) -> None:
    at, more = 0, True
    while more:
        memory = opened(tmp_path / str(at))
        for number in range(6):
            ends = {"truncated": np.array([False])} if told else {}
            step = {"x": np.array([number]), "terminated": np.array([False]), **ends}
            work = partial(memory.add, step, {"x": np.array([number + 1])})
            if number == 3:
                more = interrupted(work, at) is not None
            else:
                work()
        memory.end_episodes()
        there = [pair[:2] for pair in pairs(memory)]
        assert [following - x for x, following in there] == [1] * len(there), (at, there)
        assert len({*there}) == len(there) >= 3, (at, there)
        memory.disk.close()
        at += 1
    assert at > 100


def test_what_waits_is_forgotten_by_clear_and_stored_by_close(tmp_path: Path) -> None:
    memory = opened(tmp_path)
    memory.add({"x": np.array([0]), "terminated": np.array([False])}, {"x": np.array([1])})
    memory.clear()
    memory.add({"x": np.array([5]), "terminated": np.array([False])}, {"x": np.array([6])})
    memory.close()
    there = ReplayBuffer.from_folder(tmp_path, read_only=True)
    assert there.batch(**DRAW)["x"].tolist() == [5]
