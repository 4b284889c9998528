"""A timestep of several environments at once, by stores into maps: as if each had been written alone."""

from __future__ import annotations

import errno
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import in_child
from inside import changes_of, get_inside, open_episodes, round_of, set_inside, storage_of
from interruptions import interrupted
from ways import way_of

from memmap_buffer import Field, ReplayBuffer, WriterLostError, verify

FIELDS = {
    "observation": Field("float32", (3,), final=True),
    "frame": Field("uint8", (40, 40)),
    "picture": Field("uint8", (70, 70), final=True),  # wide enough to be written
    "reward": "float32",
    "terminated": "bool",
    "truncated": "bool",
}


def created(folder: Path, num_envs: int, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        folder, 20, 30, FIELDS, circular=True, publish="step", spare_slots=num_envs + 1, **{"capacity": 120, **options}
    )


def timestep(call: int, num_envs: int, rng: Any, dtype: str = "float32") -> dict[str, Any]:
    observation = np.full((num_envs, 3), call, dtype) + np.arange(num_envs, dtype=dtype)[:, None] / 8
    return {
        "observation": observation,
        "frame": np.full((num_envs, 40, 40), call % 256, np.uint8),
        "reward": np.full(num_envs, call, dtype),
        "terminated": rng.random(num_envs) < 0.04,
        "truncated": rng.random(num_envs) < 0.04,
        "next_observation": observation + 1,
        "picture": np.full((num_envs, 70, 70), call % 256, np.uint8),
        "next_picture": np.full((num_envs, 70, 70), (call + 1) % 256, np.uint8),
    }


def contents(folder: Path) -> list[Any]:
    """Every visible timestep, and every whole episode, as a reader of its own sees them."""
    with ReplayBuffer.from_folder(folder, read_only=True) as reader:
        steps = reader.batch(timestep_level=True, return_indices=True) if reader.num_steps else {}
        found = [{key: value.numpy().tolist() for key, value in steps.items()}]
        for i in range(reader.num_episodes):
            found.append({key: np.asarray(value).tolist() for key, value in reader.episode(i).items()})
        return found


where_maps_are_stored_to = pytest.mark.skipif(
    not get_inside("stores_are_writes")(Path(tempfile.gettempdir())),
    reason="stores into maps are no writes on this file system or processor",
)


@pytest.fixture
def never_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    set_inside(monkeypatch, stores_are_writes=lambda path: False)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_what_is_stored_at_once_is_what_is_written_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_envs: int, dtype: str
) -> None:
    if not get_inside("stores_are_writes")(tmp_path):
        pytest.skip("stores into maps are no writes on this file system or processor")
    together = 0
    for name in ("mapped", "written"):
        if name == "written":
            set_inside(monkeypatch, stores_are_writes=lambda path: False)
        rng = np.random.default_rng(3)
        with created(tmp_path / name, num_envs) as buffer:
            for call in range(150):
                step = timestep(call, num_envs, rng, dtype)
                if num_envs == 1 and call % 3 == 0:  # without an axis of environments
                    step = {key: value[0] for key, value in step.items()}
                buffer.add(**step)
                joint = round_of(buffer)
                together += joint is not None and joint.is_whole
            assert verify(tmp_path / name) == []
    assert 30 < together <= 150
    assert contents(tmp_path / "mapped") == contents(tmp_path / "written")


@where_maps_are_stored_to
@pytest.mark.parametrize(
    ("block", "stored"), [(1600, 4), (get_inside("round_block"), 0)], ids=["step by step", "slots together"]
)
def test_on_a_full_disk_no_environment_has_the_timestep_and_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, stored: int
) -> None:
    set_inside(monkeypatch, round_block=block)
    set_inside(monkeypatch, round_ahead=1600)  # a frame
    rng = np.random.default_rng(0)
    buffer = created(tmp_path, 2)
    steps = [
        {**timestep(call, 2, rng), "terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)} for call in range(9)
    ]
    for step in steps[:stored]:
        buffer.add(**step)
    before = contents(tmp_path)

    def full(*where: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        set_inside(patch, allocate_for_rounds=full)
        buffer.add(**steps[stored])
    assert contents(tmp_path) == before
    for step in steps[stored:]:
        buffer.add(**step)
    buffer.close()
    assert verify(tmp_path) == []
    with ReplayBuffer.from_folder(tmp_path) as again:
        rewards = again.batch(timestep_level=True, format="numpy")["reward"].tolist()
        assert sorted(rewards) == [call for call in range(9) for _ in range(2)]


@where_maps_are_stored_to
@pytest.mark.parametrize("size", [1, 2])
def test_a_timestep_that_is_interrupted_at_any_line_is_stored_or_not(tmp_path: Path, size: int) -> None:
    seen = set()
    for at in range(0, 400, size):
        folder, rng = tmp_path / str(at), np.random.default_rng(0)
        buffer = created(folder, size, capacity=3 * size)
        plain = {"terminated": np.zeros(size, bool), "truncated": np.zeros(size, bool)}
        for call in range(5):
            buffer.add(**{**timestep(call, size, rng), **plain})
        error = interrupted(partial(buffer.add, **{**timestep(5, size, rng), **plain}), at)
        rewards = contents(folder)[0]["reward"]
        assert rewards in ([2, 3, 4] * size, [3, 4, 5] * size), at
        seen.add(len(set(rewards)) * (5 in rewards))
        following = 6 if 5 in rewards else 5
        buffer.add(**{**timestep(following, size, rng), **plain})
        # Where it was interrupted other episodes begin.
        assert sorted(contents(folder)[0]["reward"]) == sorted([following - 2, following - 1, following] * size)
        buffer.close()
        assert verify(folder) == []
        if error is None:
            break
    assert {0, 3} <= seen
    assert at > 30


@where_maps_are_stored_to
def test_a_timestep_of_which_a_wide_row_cannot_be_written_is_of_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    buffer = created(tmp_path, 3)
    steps = [
        {**timestep(call, 3, rng), "terminated": np.zeros(3, bool), "truncated": np.zeros(3, bool)} for call in range(9)
    ]
    for step in steps[:4]:
        buffer.add(**step)
    before, written, left = contents(tmp_path), get_inside("write_of_rounds"), [None]

    def fails(*what: Any) -> None:
        if not left:
            raise OSError(errno.EIO, "no such sector")
        left.pop()
        written(*what)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no such sector"):
        set_inside(patch, write_of_rounds=fails)
        buffer.add(**steps[4])
    assert not left
    assert contents(tmp_path) == before
    for step in steps[4:]:
        buffer.add(**step)
    assert buffer.num_steps == 27
    buffer.close()
    assert verify(tmp_path) == []


@where_maps_are_stored_to
def test_the_journal_names_the_slots_of_every_timestep(tmp_path: Path) -> None:
    with created(tmp_path, 2) as buffer:
        step = timestep(0, 2, np.random.default_rng(0))
        for _ in range(2):
            buffer.add(**{**step, "terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)})
        joint, storage = round_of(buffer), storage_of(buffer)
        for count in (1, 2, 5, 7, 120) * 40:  # round the journal several times, and across its end
            before, slots = storage.changes, np.random.default_rng(count).permutation(20)[:count]
            joint.files.changed(slots)
            assert storage.changed_since(before).tolist() == sorted(slots.tolist())


@pytest.mark.parametrize("why", ["no blocks", "no map", "another file system"])
def test_counters_that_cannot_be_stored_to_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Of a copy `state.npy` may have holes: a store to one could end the process."""

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOMEM if why == "no map" else errno.EOPNOTSUPP, "cannot be done")

    if why == "another file system":
        set_inside(monkeypatch, stores_are_writes=lambda path: False)
    elif why == "no blocks":
        set_inside(monkeypatch, allocate_for_commit=fails)
    else:
        set_inside(monkeypatch, map_for_writing=fails)
    words: list[int] = []
    written = get_inside("write_word")
    set_inside(monkeypatch, write_word=lambda fd, value, at: words.append(value) or written(fd, value, at))
    rng, reader = np.random.default_rng(0), None
    with created(tmp_path, 2) as buffer:
        for call in range(6):
            before = changes_of(tmp_path)
            buffer.add(**timestep(call, 2, rng))
            reader = reader or ReplayBuffer.from_folder(tmp_path, read_only=True)
            assert changes_of(tmp_path) > before
            assert changes_of(tmp_path) in words
            assert reader.num_steps == buffer.num_steps == 2 * (call + 1)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Where counters find no room neither stores nor writes would get them there."""

    def fails(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    created(tmp_path, 2).close()
    with ReplayBuffer.from_folder(tmp_path) as buffer, monkeypatch.context() as full:
        set_inside(full, allocate_for_commit=fails)
        with pytest.raises(OSError, match=os.strerror(error)):
            buffer.add(**timestep(0, 2, np.random.default_rng(0)))
    with ReplayBuffer.from_folder(tmp_path) as buffer:
        assert buffer.num_steps == 0
        buffer.add(**timestep(0, 2, np.random.default_rng(0)))
    assert buffer.num_steps == 2


def test_who_may_not_write_any_more_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_inside(monkeypatch, path_look_seconds=0.0)
    rng, plain = np.random.default_rng(0), {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
    buffer = created(tmp_path / "a", 2)
    for call in range(4):
        buffer.add(**{**timestep(call, 2, rng), **plain})

    def forked(tell: Any) -> None:
        with pytest.raises(WriterLostError, match="fork") as raised:
            buffer.add(**{**timestep(4, 2, rng), **plain})
        tell(raised.value.reason)

    assert in_child(forked) == (0, ["forked"])
    before = contents(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(WriterLostError, match="another") as raised:
        buffer.add(**{**timestep(4, 2, rng), **plain})
    assert raised.value.reason == "moved"
    assert contents(tmp_path / "b") == before


def test_where_stores_into_maps_are_no_writes_timesteps_are_written(tmp_path: Path, never_mapped: None) -> None:
    rng, plain = np.random.default_rng(0), {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
    buffer = created(tmp_path, 2)
    for call in range(4):
        buffer.add(**{**timestep(call, 2, rng), **plain})
    assert open_episodes(buffer)
    assert round_of(buffer) is None
    assert contents(tmp_path)[0]["reward"] == [0, 1, 2, 3] * 2


def test_space_is_given_back_only_after_readers_were_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, told, seen = np.random.default_rng(0), [], []
    give_back = get_inside("give_back")

    def watched(files: Any, slot: int, start: int, stop: int) -> None:
        if start == 0:  # all of an episode that left; else rows beyond those that a new one has
            told.append(files.storage.changes > seen[-1])
        give_back(files, slot, start, stop)

    set_inside(monkeypatch, give_back=watched)
    with created(tmp_path, 2, capacity=30) as buffer:
        for call in range(120):
            seen.append(changes_of(tmp_path))
            buffer.add(**timestep(call, 2, rng))
    assert len(told) > 5
    assert all(told)


@pytest.mark.parametrize("publish", ["step", "episode"])
def test_an_end_of_one_environment_takes_as_many_calls_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: str
) -> None:
    """Beside what the steps take by themselves; those of the first end are not counted, which come once."""
    set_inside(monkeypatch, path_look_seconds=1e9)  # what is counted is done within the time between two looks
    calls = []
    for num_envs in (4, 32):
        rng, plain = np.random.default_rng(0), np.zeros(num_envs, bool)
        with ReplayBuffer(
            tmp_path / str(num_envs), 99, 30, FIELDS, circular=True, publish=publish, spare_slots=num_envs + 1
        ) as buffer:
            steps = [{**timestep(t, num_envs, rng), "terminated": plain, "truncated": plain} for t in range(3)]
            an_end = [{**steps[0], "terminated": np.arange(num_envs) == 0}, *steps[1:]]
            for step in [*steps, *an_end]:
                buffer.add(**step)
            counts = [
                len(way_of(lambda some=some: [buffer.add(**step) for step in some]).functions)
                for some in (steps, an_end)
            ]
        calls.append(counts[1] - counts[0])
    assert calls[1] <= calls[0] + 4


@pytest.mark.parametrize("num_envs", [1, 2])
def test_an_episode_that_terminates_with_its_first_timestep_is_known_to_at_once_and_after_a_kill(
    tmp_path: Path, num_envs: int
) -> None:
    fields = {"x": Field("int", final=True), "terminated": "bool"}

    def record(tell: Any) -> None:
        buffer = ReplayBuffer(tmp_path / "buffer", 9, 5, fields, publish="step")
        group = buffer.begin_batch(num_envs)
        group.store(x=np.arange(num_envs), terminated=np.arange(num_envs) == 0)
        tell(buffer.batch(n_steps=1, format="numpy")["x"].tolist())
        os._exit(9)

    assert in_child(record).told == [[0]]
    with ReplayBuffer.from_folder(tmp_path / "buffer", publish="step") as buffer:
        buffer.begin_episode().abort()
        assert buffer.batch(n_steps=1)["x"].tolist() == [0]


@pytest.mark.parametrize("num_envs", [1, 2])
def test_an_episode_that_terminated_right_before_a_kill_is_drawn_to_its_end(tmp_path: Path, num_envs: int) -> None:
    fields = {"x": Field("int", final=True), "terminated": "bool"}

    def record(tell: Any) -> None:
        group = ReplayBuffer(tmp_path / "buffer", 9, 5, fields, publish="step").begin_batch(num_envs)
        for t in range(3):
            group.store(x=np.arange(num_envs) * 10 + t, terminated=np.arange(num_envs) == t - 2)
        os._exit(9)

    in_child(record)
    with ReplayBuffer.from_folder(tmp_path / "buffer", publish="step") as buffer:
        buffer.begin_episode().abort()
        assert sorted(buffer.batch(n_steps=1)["x"].tolist()) == [0, 1, 2, 10, 11][: 2 * num_envs + 1]


def test_an_episode_shows_the_meta_fields_that_were_given_last_whichever_steps_had_them(tmp_path: Path) -> None:
    given = [{"task": 1, "other": 0}, {"task": 2}, {"other": 0}, {"other": 0}]
    meta_fields = {"task": "int", "other": "int"}
    with ReplayBuffer(tmp_path, 9, 9, {"terminated": "bool"}, meta_fields, publish="step", spare_slots=2) as buffer:
        for t, meta in enumerate(given):
            values = {name: np.full(2, value) for name, value in meta.items()}
            buffer.add(terminated=np.full(2, t == len(given) - 1), **values)
        assert [(buffer.episode(i)["task"], buffer.episode(i)["other"]) for i in range(2)] == [(2, 0)] * 2


@where_maps_are_stored_to
def test_where_its_meta_fields_stay_as_they_are_an_episode_ends_with_its_last_step(tmp_path: Path) -> None:
    fields = {"x": Field("int", final=True), "terminated": "bool"}
    step = {"x": np.arange(2), "terminated": np.zeros(2, np.bool_), "next_x": np.arange(2) + 5, "task": np.arange(2)}
    with ReplayBuffer(tmp_path, 9, 9, fields, {"task": "int"}, publish="step", spare_slots=2) as buffer:
        buffer.add(**step)
        before = changes_of(tmp_path)
        buffer.add(**step | {"terminated": ~step["terminated"]})
        assert changes_of(tmp_path) == before + 2  # readers are told of each slot once
        assert [buffer.episode(i)["x"].tolist() for i in range(2)] == [[0, 0, 5], [1, 1, 6]]
    assert verify(tmp_path) == []
