"""An index that follows a folder step by step is the one that would be made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import begin_anew, folders_of, storage_of
from interruptions import interrupted

from memmap_buffer import Field, NStep, Offsets, ReplayBuffer, Timestep, Trajectory, Window
from memmap_buffer.format.journal import FEWER
from memmap_buffer.items import live_index
from memmap_buffer.items.live_index import LiveIndex
from memmap_buffer.items.selection import Selection
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.views.folders import Folders

FIELDS = {
    "observation": Field("float32", (2,), final=True),
    "step": "int64",
    "terminated": "bool",
    "truncated": "bool",
}
META = {"env": "int64"}
VIEWS = [
    Timestep(),
    NStep(1),
    NStep(3, gamma=0.9),
    NStep(2, stack={"observation": 3}),
    NStep(3, boundary="drop"),
    Window(4),
    Window(3, boundary="pad"),
    Offsets({"observation": [-1, 0]}),
    Trajectory(),
    Window(4, boundary="continue"),
    Window(9, boundary="continue", stride=3),
    Window(12, boundary="continue", stream="env"),
    Window(5, boundary="continue", stream="env", stride=2),
]


STEP = {
    "observation": np.zeros((3, 2), np.float32),
    "step": np.zeros(3, np.int64),
    "terminated": np.zeros(3, np.bool_),
    "truncated": np.zeros(3, np.bool_),
}


def described(index: Any) -> list[Any]:
    anchors = index.locate(np.arange(len(index)))
    following = [] if anchors.following is None else anchors.following.tolist()
    return [*np.stack([anchors.slot, anchors.serial, anchors.t]).tolist(), following]


@pytest.mark.parametrize(
    "options", [{"capacity": 60}, {"capacity": 10**6}, {}], ids=["capacity", "endless", "episodes"]
)
@pytest.mark.parametrize("publish", ["step", "episode"])
def test_a_followed_index_has_the_anchors_of_one_made_anew(
    tmp_path: Path, options: Any, publish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_index, "SHORT", 0)
    rng = np.random.default_rng(7)
    buffer = ReplayBuffer(
        tmp_path, 12, 30, FIELDS, META, circular=True, publish=publish, spare_slots=6, durability="process", **options
    )
    beside = ReplayBuffer.from_folder(tmp_path, read_only=True)
    followed = []
    for reader in (buffer, beside):
        folders: Folders = folders_of(reader)
        halves = {"one": 0.5, "other": 0.5}
        kinds = [Selection(view, min_episode_len=2 if view is VIEWS[0] else 1) for view in VIEWS]
        for selection in [*kinds, Selection(NStep(1), split=halves, part="one"), Selection(Timestep())]:
            assert LiveIndex.follows(selection, folders)
            followed.append((LiveIndex(selection, folders), selection, folders))
    made_anew = 0
    for call in range(120):
        num_envs, told = 3, rng.random(3) < 0.1
        if call % 50 == 49:
            buffer.end_episodes()
            buffer.store_episode(
                observation=np.zeros((4, 2)), step=np.arange(4), terminated=np.zeros(4), truncated=np.zeros(4), env=1
            )
            if call == 99 and buffer.num_episodes > 2:
                buffer.delete(buffer.num_episodes - 2)
            continue
        buffer.add(
            observation=rng.random((num_envs, 2), dtype=np.float32),
            step=np.full(num_envs, call),
            terminated=told,
            truncated=rng.random(num_envs) < 0.05,
            env=np.arange(num_envs) // 2,
            **({"next_observation": rng.random((num_envs, 2), dtype=np.float32)} if call % 2 else {}),
        )
        for live, selection, folders in followed if call % 3 == 0 else ():
            before = live.made
            assert live.follow()
            made_anew += live.made > before
            folders.refresh()
            assert described(live) == described(selection.index(folders))
    assert made_anew < 120 * len(followed) / 20


@pytest.mark.parametrize("short", [0, live_index.SHORT])
@pytest.mark.parametrize("view", [Timestep(), NStep(1), Window(4)], ids=["timestep", "n-step", "window"])
def test_many_environments_that_step_together_are_followed_in_one_pass(
    tmp_path: Path, view: Any, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_index, "SHORT", short)
    size = 20
    assert size > FEWER
    rng = np.random.default_rng(3)
    buffer = ReplayBuffer(tmp_path, 80, 40, FIELDS, capacity=300, publish="step", spare_slots=size)
    prioritized = {"timestep_level": True, "prioritized": True, "return_indices": True}
    selection, folders, live = Selection(view), folders_of(buffer), LiveIndex(Selection(view), folders_of(buffer))
    for call in range(60):
        step = {"observation": rng.random((size, 2), dtype=np.float32), "step": np.full(size, call)}
        buffer.add(**step, terminated=rng.random(size) < 0.3 * (call % 6 == 0), truncated=np.zeros(size, np.bool_))
        made = live.made
        assert live.follow() and (call == 0 or live.made == made)
        folders.refresh()
        assert described(live) == described(selection.index(folders))
        assert storage_of(buffer).journal.num_steps == buffer.num_steps
        assert buffer.sample(8, **prioritized)["_indices"].shape == (8, 2)


def test_batches_drawn_while_steps_are_added_are_those_of_a_reader_that_looks_at_all(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, 8, 20, FIELDS, circular=True, publish="step", spare_slots=3, capacity=50)
    for call in range(120):
        done = np.array([call % 9 == 8, call % 13 == 12])
        buffer.add(
            observation=np.full((2, 2), call, np.float32),
            step=np.array([call, -call]),
            terminated=done,
            truncated=np.zeros(2, np.bool_),
            next_observation=np.full((2, 2), call + 1, np.float32),
        )
        if call < 3:
            continue
        beside = ReplayBuffer.from_folder(tmp_path, read_only=True)
        for one in (buffer, beside):
            begin_anew(one, call)
        drawn, expected = (
            one.sample(32, n_steps=2, gamma=0.5, reward="step", return_indices=True) for one in (buffer, beside)
        )
        assert drawn.keys() == expected.keys()
        for key in drawn:
            assert np.array_equal(drawn[key].numpy(), expected[key].numpy()), key


def test_of_what_only_an_index_can_tell_batches_are_drawn_of_one(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, 8, 20, FIELDS, circular=True, publish="step")
    for call in range(12):
        buffer.add(
            observation=np.zeros((1, 2), np.float32),
            step=np.array([call]),
            terminated=np.array([call % 5 == 4]),
            truncated=np.array([False]),
            next_observation=np.zeros((1, 2), np.float32),
        )
        if call:
            drawn = (
                buffer.sample(64, seed=call, timestep_level=True, filter_fields={"step": (3, None)})
                if call > 3
                else None
            )
            assert drawn is None or int(drawn["step"].min()) >= 3
    assert not LiveIndex.follows(
        BatchReader(folders_of(buffer), {"timestep_level": True, "filter_fields": {"step": 3}}).selection,
        folders_of(buffer),
    )


def test_an_index_that_was_interrupted_while_it_followed_is_made_anew(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, 40, 200, FIELDS, circular=True, publish="step", spare_slots=4)
    buffer.add(**STEP)
    selection, folders = Selection(Timestep()), folders_of(buffer)
    live = LiveIndex(selection, folders)
    assert live.follow()
    places: set[bool | str] = set()
    for at in range(180):
        buffer.add(**{**STEP, "truncated": np.array([at % 9 == 8, False, False])})
        error = interrupted(live.follow, at)
        places.add(error is None or str(error))
        assert live.follow()
        folders.refresh()
        assert described(live) == described(selection.index(folders)), error
    assert len(places) > 40
    assert True in places, "follow runs more lines than were tried"
