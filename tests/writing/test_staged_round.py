"""Environments whose episodes are in memory: whatever is staged, and however, the same episodes are published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fault_injection import system
from inside import get_inside, set_inside

from memmap_buffer import EpisodeStateError, Field, ReplayBuffer, verify

FIELDS = {
    "observation": Field("float32", (3,), final=True),
    "frame": Field("uint8", (4, 4), codec="zstd", final=True),
    "objects": ("int64", (None,)),
    "reward": "float32",
    "text": "U5",
    "terminated": "bool",
    "truncated": "bool",
}


def timestep(rng: np.random.Generator, num_envs: int) -> dict[str, Any]:
    objects = np.empty(num_envs, object)
    objects[:] = [rng.integers(0, 99, rng.integers(0, 4)) for _ in range(num_envs)]
    frames = rng.integers(0, 255, (2, num_envs, 4, 4), np.uint8)
    observation = rng.random((2, num_envs, 3), np.float32)
    return {
        "observation": observation[0],
        "frame": frames[0],
        "objects": objects,
        "reward": rng.random(num_envs, np.float32),
        "text": rng.choice(["a", "bcd", "efghi"], num_envs),
        "terminated": rng.random(num_envs) < 0.1,
        "truncated": rng.random(num_envs) < 0.1,
        "next_observation": observation[1],
        "next_frame": frames[1],
    }


def calls(seed: int, num_envs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Timesteps of all environments, some of which end; one by one, or several together."""
    rng = np.random.default_rng(seed)
    for _ in range(90):
        count = int(rng.integers(1, 6)) if rng.random() < 0.3 else 0
        steps = [timestep(rng, num_envs) for _ in range(count or 1)]
        if rng.random() < 0.6:  # none of them ends
            for step in steps:
                step["terminated"] = step["truncated"] = np.zeros(num_envs, np.bool_)
        yield (
            ("extend", {name: np.stack([step[name] for step in steps]) for name in steps[0]})
            if count
            else ("add", steps[0])
        )


def contents(buffer: ReplayBuffer) -> list[dict[str, Any]]:
    return [
        {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in buffer.episode(i).items()}
        for i in range(len(buffer))
    ]


WAYS = {
    "in memory": {},
    "in chunks": {"stage": "disk"},
    "shown at once": {"publish": "step"},
}


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_all_ways_to_stage_publish_the_same_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_envs: int, seed: int
) -> None:
    """Memory for few timesteps, so that it grows, or is written out, in the middle of episodes."""
    set_inside(monkeypatch, first_capacity=2, staged_bytes=300)
    found = {}
    for name, options in WAYS.items():
        with ReplayBuffer(
            tmp_path / name, 200, 11, FIELDS, circular=True, spare_slots=num_envs + 1, **options
        ) as buffer:
            for method, given in calls(seed, num_envs):
                getattr(buffer, method)(**given)
            buffer.end_episodes()
            found[name] = contents(buffer)
        assert verify(tmp_path / name) == []
    lengths = [len(each["reward"]) for each in found["in memory"]]
    assert max(lengths) == 11
    assert len({*lengths}) > 4
    for name in ("in chunks", "shown at once"):
        assert sorted(map(repr, found[name])) == sorted(map(repr, found["in memory"])), name


def test_episodes_in_memory_go_on_after_one_that_could_not_be_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was staged of the others is carried over to what appends to them then."""
    fields = {"x": "int64", "terminated": "bool"}
    with ReplayBuffer(tmp_path, 9, 30, fields, circular=True) as buffer:
        for t in range(3):
            buffer.add(x=[t, 10 + t], terminated=[False, False])
        with system(at=2, error=28, only=("pwrite",)), pytest.raises(OSError, match="No space left"):
            buffer.add(x=[3, 13], terminated=[True, False])
        for t in range(4, 6):
            buffer.add(x=[t, 10 + t], terminated=[False, t == 5])
        buffer.end_episodes()
        assert sorted(episode["x"].tolist() for episode in buffer) == [[0, 1, 2, 3], [4, 5], [10, 11, 12, 13, 14, 15]]


@pytest.mark.parametrize("publish", ["episode", "step"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_after_resets_that_are_left_out_an_episode_is_as_long_as_it_may_be(
    tmp_path: Path, publish: str, num_envs: int
) -> None:
    """All environments end at the same step, so that the step behind is recorded of none."""
    fields = {"x": Field("int64", (), final=True), "terminated": "bool"}
    with ReplayBuffer(
        tmp_path, 50, 6, fields, circular=True, skips_resets=True, publish=publish, spare_slots=num_envs + 1
    ) as buffer:
        t = 0
        for length in (3, 4, 15):
            for i in range(length + 1):  # with the reset
                ended = np.full(num_envs, i == length - 1)
                x = np.full(num_envs, t)
                buffer.add(x=x, terminated=ended, next_x=x + 1)
                t += 1
        buffer.end_episodes()
        lengths = [len(episode["terminated"]) for episode in buffer]
    assert lengths == [length for length in (3, 4, 6, 6, 3) for _ in range(num_envs)]


def test_after_lists_that_have_no_room_the_episodes_go_on(tmp_path: Path) -> None:
    """No environment got the step, so nothing is missing."""
    fields = {"x": "int64", "objects": ("int64", (None,)), "terminated": "bool"}
    ended = np.zeros(2, np.bool_)
    with ReplayBuffer(tmp_path, 9, 4, fields, circular=True) as buffer:
        for t in range(3):
            buffer.add(x=[t, 10 + t], objects=[[t], []], terminated=ended)
            if t == 1:
                with pytest.raises(EpisodeStateError, match="more members than there is room for"):
                    buffer.add(x=[7, 7], objects=[[], [0] * 5000], terminated=ended)
        buffer.end_episodes()
        assert [episode["x"].tolist() for episode in buffer] == [[0, 1, 2], [10, 11, 12]]


def test_an_episode_that_another_folder_took_is_none_of_the_first_any_more() -> None:
    """Also where that was interrupted before the first had let go of it."""
    mine, other = (SimpleNamespace(episodes=get_inside("open_episodes")()) for _ in range(2))

    class Moved:
        state, writer = "open", SimpleNamespace(lock=mine)

    moved = Moved()
    mine.episodes.add(moved, get_inside("ended_statement"))
    assert mine.episodes.every() == mine.episodes.abandoned() == [moved]
    moved.writer = SimpleNamespace(lock=other)
    assert mine.episodes.abandoned() == mine.episodes.every() == []
    assert len(mine.episodes) == 0


def test_an_episode_that_is_let_go_of_while_others_are_looked_at_is_collected_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", told.append)
    lock = SimpleNamespace(episodes=get_inside("open_episodes")())
    holders: list[Any] = []

    class Opened:
        state, writer = "open", SimpleNamespace(lock=lock)

    class Over(Opened):
        @property
        def state(self) -> str:  # type: ignore[override]
            holders.clear()  # from here on only who looks holds it
            return "published"

    holders.append(Over())
    still_open = Opened()
    for episode in (holders[0], still_open):
        lock.episodes.add(episode)
    del episode
    assert lock.episodes.every() == [still_open]
    assert len(lock.episodes) == 1 and holders == told == []
    del still_open
    assert lock.episodes.every() == []


@pytest.mark.parametrize("publish", ["episode", "step"])
def test_a_step_whose_final_observation_has_no_room_is_stored_of_none_and_may_be_given_again(
    tmp_path: Path, publish: str
) -> None:
    fields = {"x": "int64", "objects": Field("int64", (None,), final=True), "terminated": "bool"}
    with ReplayBuffer(tmp_path, 9, 4, fields, circular=True, publish=publish, spare_slots=2) as buffer:
        for t in range(2):
            buffer.add(x=[t, 10 + t], objects=[[t], []], terminated=[False] * 2, next_objects=[[t + 1], []])
        last = {"x": [2, 12], "objects": [[2], []], "terminated": [True, False]}
        with pytest.raises(EpisodeStateError, match="more members than there is room for"):
            buffer.add(**last, next_objects=[[0] * 6000, []])
        assert buffer.num_steps == (4 if publish == "step" else 0)
        buffer.add(**last, next_objects=[[3], []])
        buffer.end_episodes()
        assert [episode["x"].tolist() for episode in buffer] == [[0, 1, 2], [10, 11, 12]]
        assert buffer.episode(0)["objects"][-1].tolist() == [3]
