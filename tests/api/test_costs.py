"""What each way through the library costs at most: Python calls, writes, looks at the file system.

Of rings that are full, as they are for most of their time. The bounds are what was counted, and go down only. A call
takes 0.1 to 0.5 microseconds and what it does; a write and a look some 2 to 5.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inside import expect_no_slow_disk, set_inside
from ways import Way, way_of

from memmap_buffer import ConcatBuffer, Field, ReplayBuffer, Window

FIELDS = {
    "observation": Field("float32", (17,), final=True),
    "action": ("float32", 6),
    "reward": "float32",
    "terminated": "bool",
    "truncated": "bool",
}
LENGTH = 1000
TIMES = 16


def steps(*axes: int) -> dict[str, np.ndarray]:
    """Timesteps with these axes before those of each field."""
    plain = {"action": np.ones((*axes, 6), "f4"), "reward": np.ones(axes, "f4")}
    ends = {name: np.zeros(axes, np.bool_) for name in ("terminated", "truncated")}
    return {"observation": np.ones((*axes, 17), "f4"), **plain, **ends}


def episode() -> dict[str, np.ndarray]:
    return {**steps(LENGTH), "observation": np.ones((LENGTH + 1, 17), "f4")}


def one_step() -> dict[str, Any]:
    """As environments give it: arrays, and plain numbers."""
    return {**steps(), "reward": 1.0, "terminated": False, "truncated": False, "next_observation": np.ones(17, "f4")}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ReplayBuffer]]:
    torch.manual_seed(0)  # where batches have ends of episodes, there is more to do
    set_inside(monkeypatch, path_look_seconds=1e9)  # what is counted is done within the time between two looks
    set_inside(monkeypatch, answer_seconds=1e9)  # nor does anything wait for a disk
    made: list[ReplayBuffer] = []

    def make(**options: Any) -> ReplayBuffer:
        options = {"fields": FIELDS, "circular": True, **options}
        made.append(ReplayBuffer(tmp_path / str(len(made)), 8, LENGTH, **options))
        return made[-1]

    yield make
    for buffer in made:
        buffer.close()


def filled(buffer: ReplayBuffer) -> ReplayBuffer:
    for _ in range(10):
        buffer.store_episode(**episode())
    return buffer


def ring(buffer: ReplayBuffer, given: dict[str, Any]) -> ReplayBuffer:
    """A ring of steps that is full."""
    while buffer.num_steps < (buffer.capacity or 0):
        buffer.add(**given)
    return buffer


def require(buffer: ReplayBuffer, work: Callable[[], Any], calls: int, writes: int = 0) -> None:
    """Do it many times; the bounds are for the mean, as now and then there is more to do. No look is taken."""
    for _ in range(4):
        work()
    expect_no_slow_disk(buffer)
    ways = [way_of(work) for _ in range(TIMES)]
    mean = {
        "calls": np.mean([len(way.functions) for way in ways]),
        "writes": np.mean([way.writes for way in ways]),
        "looks": np.mean([way.looks for way in ways]),
    }
    typical: Way = sorted(ways, key=lambda way: len(way.functions))[TIMES // 2]
    assert mean["calls"] <= calls, str(typical)
    assert mean["writes"] <= writes, str(typical)
    assert mean["looks"] == 0, str(typical)


def test_a_whole_episode(make: Callable[..., ReplayBuffer]) -> None:
    buffer, given = filled(make()), episode()
    require(buffer, lambda: buffer.store_episode(**given), calls=54, writes=8)


def test_an_episode_of_one_step(make: Callable[..., ReplayBuffer]) -> None:
    buffer, given = filled(make()), steps()

    def record() -> None:
        with buffer.one_episode():
            buffer.store(**given)

    require(buffer, record, calls=75, writes=8)


@pytest.mark.parametrize(("num_envs", "calls"), [(None, 17), (1, 17), (8, 19)])
def test_a_step_of_environments_that_is_shown_at_once(
    make: Callable[..., ReplayBuffer], num_envs: int | None, calls: int
) -> None:
    given = one_step() if num_envs is None else {**steps(num_envs), "next_observation": np.ones((num_envs, 17), "f4")}
    buffer = ring(make(publish="step", capacity=400, spare_slots=8), given)
    require(buffer, lambda: buffer.add(**given), calls)


def test_a_step_with_a_group_and_without_what_has_a_default(make: Callable[..., ReplayBuffer]) -> None:
    given = {**steps(8), "next_observation": np.ones((8, 17), "f4")}
    grouped = {name: {"state": given.pop(name)} for name in ("observation", "next_observation")}
    fields = {**FIELDS, "observation": {"state": FIELDS["observation"]}, "label": ("int", (), 0)}
    buffer = make(publish="step", capacity=400, spare_slots=8, fields=fields)
    ring(buffer, given | grouped)
    require(buffer, lambda: buffer.add(**given, **grouped), calls=25)


@pytest.mark.parametrize(("publish", "calls"), [("step", 20), ("episode", 10)])
def test_a_step_with_a_meta_field(make: Callable[..., ReplayBuffer], publish: str, calls: int) -> None:
    given = {**steps(8), "next_observation": np.ones((8, 17), "f4"), "worker": np.arange(8)}
    buffer = make(publish=publish, capacity=400, spare_slots=8, meta_fields={"worker": "int"})
    require(buffer, lambda: buffer.add(**given), calls)


@pytest.mark.parametrize(("num_envs", "calls"), [(None, 8), (1, 8), (8, 8)])
def test_a_step_of_an_episode_in_memory(make: Callable[..., ReplayBuffer], num_envs: int | None, calls: int) -> None:
    buffer = make()
    given = one_step() if num_envs is None else {**steps(1), "next_observation": np.ones((1, 17), "f4")}
    require(buffer, lambda: buffer.add(**given), calls)


@pytest.mark.parametrize(
    ("calls", "options"),
    [pytest.param(53, {}, id="with replacement"), pytest.param(55, {"replacement": False}, id="without")],
)
def test_a_step_and_a_batch_of_transitions(
    make: Callable[..., ReplayBuffer], calls: int, options: dict[str, Any]
) -> None:
    given = {**steps(8), "next_observation": np.ones((8, 17), "f4")}
    buffer = ring(make(publish="step", capacity=400, spare_slots=8), given)

    def learn() -> None:
        buffer.add(**given)
        buffer.sample(256, n_steps=1, gamma=0.99, **options)

    require(buffer, learn, calls)


@pytest.mark.parametrize(
    ("size", "calls", "options"),
    [
        pytest.param(256, 16, {"timestep_level": True}, id="timesteps"),
        pytest.param(256, 20, {"n_steps": 1, "gamma": 0.99}, id="transitions"),
        pytest.param(256, 22, {"n_steps": 5, "gamma": 0.99}, id="5 steps"),
        pytest.param(32, 17, {"view": Window(64)}, id="windows"),
        pytest.param(16, 53, {}, id="whole episodes"),
    ],
)
def test_a_batch(make: Callable[..., ReplayBuffer], size: int, calls: int, options: dict[str, Any]) -> None:
    buffer = filled(make())
    require(buffer, lambda: buffer.sample(size, **options), calls)


def test_a_batch_by_priority_and_new_priorities(make: Callable[..., ReplayBuffer]) -> None:
    buffer = filled(make())

    def learn() -> None:
        batch = buffer.sample(256, n_steps=1, gamma=0.99, prioritized=True)
        buffer.update_priorities(batch["_indices"], np.ones(256))

    require(buffer, learn, calls=79.9)


@pytest.mark.parametrize(
    ("num_envs", "publish", "calls"), [(None, "episode", 20), (8, "episode", 20), (None, "step", 85), (8, "step", 114)]
)
def test_a_step_that_is_given_with_its_error(
    make: Callable[..., ReplayBuffer], num_envs: int | None, publish: str, calls: int
) -> None:
    given = one_step() if num_envs is None else {**steps(num_envs), "next_observation": np.ones((num_envs, 17), "f4")}
    options = {"capacity": 400, "spare_slots": 8} if publish == "step" else {}
    buffer, errors = make(publish=publish, **options), np.ones(num_envs or 1)
    for _ in range(400):
        buffer.add(**given, priority=errors)
    require(buffer, lambda: buffer.add(**given, priority=errors), calls)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[ConcatBuffer]:
    """Roots of 3 shards and of 30."""
    places = [tmp_path_factory.mktemp(str(count)) for count in (3, 30)]
    for count, place in zip((3, 30), places, strict=True):
        for number in range(count):
            with ReplayBuffer(place / f"shard-{number:05}", 2, 8, {"x": "float32"}) as buffer:
                buffer.store_episode(x=np.arange(8, dtype="f4"))
        os.utime(place, (0, 0))  # as long as its time is new, all that is in a root is looked at
    return [ConcatBuffer.from_root(place) for place in places]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"timestep_level": True}, id="timesteps"),
        pytest.param({"n_steps": 3}, id="3 steps"),
        pytest.param({"view": Window(4)}, id="windows"),
    ],
)
def test_a_batch_of_a_root_takes_as_many_calls_whatever_its_shards(
    roots: list[ConcatBuffer], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    set_inside(monkeypatch, answer_seconds=1e9)
    counts = []
    for root in roots:
        for _ in range(20):
            root.sample(64, **options)
        expect_no_slow_disk(root)
        counts.append(sum(len(way_of(lambda root=root: root.sample(64, **options)).functions) for _ in range(TIMES)))
    assert counts[0] == counts[1]


def test_who_learns_by_several_sets_of_options_keeps_one_account_of_what_is_visible(
    make: Callable[..., ReplayBuffer],
) -> None:
    objects = gc.get_objects()  # held, so that none of their ids is given again
    before = {id(each) for each in objects}
    buffer = make(publish="step", capacity=4 * LENGTH, spare_slots=8)
    given = {**steps(8), "next_observation": np.ones((8, 17), "f4")}
    learned = ({"timestep_level": True}, {"n_steps": 1}, {"n_steps": 5, "gamma": 0.99}, {"view": Window(16)})
    for _ in range(20):
        buffer.add(**given)
    for _ in range(8):
        buffer.add(**given)
        for options in learned:
            batch = buffer.sample(32, prioritized=True, return_indices=True, **options)
            buffer.update_priorities(batch["_indices"], np.ones(32))
            buffer.sample(32, **options)
    made = Counter(type(each).__name__ for each in gc.get_objects() if id(each) not in before)
    assert made["Journal"] == 1
    assert 0 < made["EpisodeTable"] <= 3
    assert 0 < made["SumTree"] <= 3
    assert made["LiveIndex"] == len(learned)
