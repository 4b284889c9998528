"""Episodes as they are recorded: what `store` takes and refuses, how they end, and that nothing else is ever seen."""

import errno
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_injection import flags_of, shown, system
from inside import most_open_episodes, set_inside
from specification import CUT, FINAL, TERMINATED

from memmap_buffer import BufferFullError, EpisodeStateError, Field, ReplayBuffer, SchemaError, verify

FIELDS = {
    "obs": Field("float", 2, final=True),
    "action": ("int", (), 7),
    "reward": "float",
    "pixels": ("uint8", (), 0),
    "terminated": ("bool", (), False),
    "truncated": ("bool", (), False),
}
META = {"task": "int", "success": ("bool", (), True), "score": "float"}
EXCEPTIONS = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, type("OwnBaseException", (BaseException,), {})]


@pytest.fixture
def buffer(tmp_path):
    with ReplayBuffer(tmp_path / "buffer", 4, 5, FIELDS, META) as made:
        yield made


def step(value, **more):
    return {"obs": [value, -value], "reward": value, **more}


def rewards(buffer):
    return [episode["reward"] for _, episode in shown(buffer)]


# Recording


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list], ids=["tensor", "array", "list"])
def test_a_published_episode_holds_exactly_what_was_stored(buffer, kind):
    with buffer.one_episode(task=3, score=0.5) as episode:
        buffer.store(obs=kind([1.0, 2.0]), action=1, reward=0.25, pixels=255)
        episode.store(obs=kind([3.0, 4.0]), action=np.int32(2), reward=torch.tensor(0.5, requires_grad=True))
    columns = {"obs": [[1, 2], [3, 4]], "action": [1, 2], "reward": [0.25, 0.5], "pixels": [255, 0]}
    flags = {"terminated": [False, False], "truncated": [False, False]}
    assert shown(buffer) == [(0, {**columns, **flags, "task": 3, "success": True, "score": 0.5})]


def test_store_returns_the_step_with_its_defaults_in_the_order_of_the_schema(buffer):
    with buffer.one_episode():
        stored = buffer.store(reward=1.5, obs=(0, 1))
    assert stored._fields == tuple(FIELDS)
    assert (stored.reward, stored.action, stored.obs) == (1.5, 7, (0, 1))
    with pytest.raises(ValueError, match="read-only"):
        stored.action[...] = 8  # else it were every later step's default


def test_what_was_stored_is_a_copy(buffer):
    obs = np.ones(2, np.float32)
    with buffer.one_episode():
        buffer.store(obs=obs, reward=0)
        obs[:] = 9
    assert shown(buffer)[0][1]["obs"] == [[1, 1]]


def test_nothing_is_visible_before_the_block_ends(buffer):
    with buffer.one_episode(task=1):
        buffer.store(**step(1))
        assert shown(buffer) == shown(buffer.folder) == []
    assert len(shown(buffer)) == 1


def test_meta_may_be_known_late_and_takes_its_default_or_zero_if_it_never_is(buffer):
    with buffer.one_episode(task=1) as episode:
        buffer.store(**step(1))
        episode["score"] = torch.tensor(2.5)
        episode["task"] = 9
    with buffer.one_episode():
        buffer.store(**step(2))
    metas = [{name: episode[name] for name in META} for _, episode in shown(buffer)]
    assert metas == [{"task": 9, "success": True, "score": 2.5}, {"task": 0, "success": True, "score": 0}]


def test_nested_fields_are_stored_from_nested_dicts_and_read_back_nested(tmp_path):
    with ReplayBuffer(tmp_path, 2, 3, {"camera": {"left": ("uint8", 2)}, "pair": {"item0": "int"}}) as nested:
        with nested.one_episode():
            nested.store(camera={"left": [1, 2]}, pair=(5,))
            nested.store(**{"camera.left": [3, 4], "pair.item0": 6})
        assert shown(nested) == [(0, {"camera": {"left": [[1, 2], [3, 4]]}, "pair": {"item0": [5, 6]}})]


# Ending without being published


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_an_exception_leaves_nothing_visible_and_passes_through(buffer, kind):
    """Fault 5: the next episode starts at step 0, with meta of its own, also after reopening."""
    with buffer.one_episode(task=1):
        buffer.store(**step(1))
    before = shown(buffer)
    with pytest.raises(kind, match="boom"), buffer.one_episode(task=66, success=False, score=6) as episode:
        buffer.store(**step(2))
        buffer.store(**step(3))
        raise kind("boom")
    assert episode.state == "aborted" and shown(buffer) == before
    buffer.close()
    with ReplayBuffer.from_folder(buffer.folder) as reopened, reopened.one_episode():
        assert shown(reopened) == before
        reopened.store(**step(4))
    assert shown(buffer.folder)[0] == before[0] and len(shown(buffer.folder)) == 2
    found = shown(buffer.folder)[1][1]
    assert (found["reward"], found["task"], found["success"], found["score"]) == ([4], 0, True, 0)


def test_a_generator_closed_in_the_middle_of_an_episode_leaves_nothing_visible(buffer):
    def rollout():
        with buffer.one_episode():
            while True:
                yield buffer.store(**step(1))

    steps = rollout()
    next(steps), next(steps)
    steps.close()
    assert len(buffer) == 0
    with buffer.one_episode():
        buffer.store(**step(2))
    assert rewards(buffer) == [[2]]


@pytest.mark.parametrize("circular", [False, True])
def test_aborted_episodes_cost_no_published_one_of_a_full_buffer(tmp_path, circular):
    with ReplayBuffer(tmp_path, 3, 5, FIELDS, META, circular=circular) as full:
        for i in range(2):
            full.store_episode(**whole(i))
        for _ in range(5):
            full.begin_episode(task=9).abort()
            with full.begin_episode(task=9) as episode:
                episode.store(**step(5))
                episode.abort()
        full.store_episode(**whole(2))
        assert rewards(full) == [[0], [1], [2]] and full.serials.tolist() == [0, 1, 2]


def test_aborting_twice_or_after_publication_does_nothing(buffer):
    episode = buffer.begin_episode()
    episode.store(**step(1))
    episode.publish()
    episode.abort()
    episode.abort()
    assert rewards(buffer) == [[1]] and episode.state == "published"


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_keep_partial_publishes_what_was_stored_flagged_as_cut(buffer, kind):
    with pytest.raises(kind, match="boom"), buffer.one_episode(keep_partial=True, task=4):
        buffer.store(**step(1))
        buffer.store(**step(2))
        raise kind("boom")
    assert rewards(buffer) == [[1, 2]] and shown(buffer)[0][1]["task"] == 4
    assert flags_of(buffer.folder)[0] & CUT


def test_keep_partial_flags_no_episode_that_ended_well_and_publishes_none_without_steps(buffer):
    with buffer.one_episode(keep_partial=True):
        buffer.store(**step(1))
    with pytest.raises(KeyboardInterrupt, match="boom"), buffer.one_episode(keep_partial=True):
        raise KeyboardInterrupt("boom")
    assert rewards(buffer) == [[1]] and not flags_of(buffer.folder)[0] & CUT


def test_an_episode_without_steps_is_a_no_op(buffer):
    with buffer.one_episode(task=1):
        pass
    with buffer.batched_episode(2):
        pass
    buffer.begin_episode(task=2).publish()
    assert len(buffer) == 0 and flags_of(buffer.folder) == {}
    buffer.store_episode(**whole(1))
    assert buffer.serials.tolist() == [0]


# Several at once


def test_several_open_episodes_are_written_side_by_side_and_numbered_as_they_are_published(buffer):
    first, second, third = (buffer.begin_episode(task=i) for i in range(3))
    for t in range(3):
        for i, episode in enumerate((first, second, third)):
            episode.store(**step(10 * i + t))
    third.publish()
    second.abort()
    first.store(**step(3))
    first.publish()
    assert [(s, e["task"], e["reward"]) for s, e in shown(buffer)] == [(0, 2, [20, 21, 22]), (1, 0, [0, 1, 2, 3])]


def test_store_belongs_to_the_one_episode_that_is_open_and_says_so_otherwise(buffer):
    with pytest.raises(EpisodeStateError, match=r"no episode is open.*one_episode"):
        buffer.store(**step(1))
    first = buffer.begin_episode()
    buffer.store(**step(1))
    second = buffer.begin_episode()
    with pytest.raises(EpisodeStateError, match=r"2 episodes are open.*episode.store"):
        buffer.store(**step(2))
    first.publish()
    buffer.store(**step(3))
    second.publish()
    assert rewards(buffer) == [[1], [3]]


def test_nested_episodes_raise_and_the_outer_one_goes_on(buffer):
    with buffer.one_episode(task=1):
        buffer.store(**step(1))
        with pytest.raises(EpisodeStateError, match="open already"), buffer.one_episode():
            pass
        with pytest.raises(EpisodeStateError, match="open already"), buffer.batched_episode(2):
            pass
        with pytest.raises(EpisodeStateError, match="store_batch: no batch is open"):
            buffer.store_batch(obs=[[2, 2]], reward=[2])
        buffer.store(**step(3))
    assert rewards(buffer) == [[1, 3]]


def test_episodes_that_ended_are_not_kept_in_memory(buffer):
    """A loop over `begin_episode` must not gather every episode it ever wrote."""
    buffer.store_episode(**whole(0))
    episodes = [buffer.begin_episode() for _ in range(3)]
    for episode in episodes:
        episode.store(**step(1))
        episode.publish()
    known = [weakref.ref(episode) for episode in episodes]
    del episodes, episode
    buffer.clear()
    buffer.begin_episode().abort()
    gc.collect()
    assert [ref() for ref in known] == [None] * 3


def test_episodes_that_were_begun_and_dropped_are_not_counted_for_ever(tmp_path):
    buffer = ReplayBuffer(tmp_path, 4, 5, {"x": "int"}, circular=True)
    for _ in range(30):
        buffer.begin_episode()
    assert most_open_episodes(buffer) < 4


def test_advance_episode_publishes_and_opens_the_next(buffer):
    buffer.begin_episode()
    for value in (1, 2):
        buffer.store(**step(value))
        buffer.advance_episode()
        buffer.advance_episode()
    assert rewards(buffer) == [[1], [2]]


def test_advancing_past_the_last_episode_of_a_full_buffer_publishes_it(tmp_path):
    with ReplayBuffer(tmp_path, 1, 5, FIELDS) as small:
        small.begin_episode()
        small.store(**step(1))
        small.advance_episode()
        assert rewards(small) == [[1]]


# What is refused; after each, the episode goes on as it was


def whole(value, length=1, **more):
    return {"obs": np.full((length, 2), value), "reward": np.full(length, value), **more}


BAD_STEPS = {
    "unknown field": (step(1, reward_=2), SchemaError, "'reward_'.*did you mean 'reward'"),
    "missing field": ({"obs": [1, 2]}, SchemaError, "'reward'.*timestep 1.*missing.*no default"),
    "wrong shape": (step(1, obs=[1, 2, 3]), SchemaError, r"'obs'.*timestep 1.*\(3,\).*declared \(2,\)"),
    "a batch": (step(1, obs=np.zeros((4, 2))), SchemaError, "store one entry, not a batch"),
    "fraction": (step(1, action=2.9), SchemaError, "'action'.*2.9.*not a whole number"),
    "overflow": (step(1, pixels=300), SchemaError, "'pixels'.*300.*out of range 0 … 255"),
    "negative": (step(1, pixels=np.int64(-1)), SchemaError, "'pixels'.*-1.*out of range"),
    "nan": (step(1, action=float("nan")), SchemaError, "'action'.*nan.*not a whole number"),
    "not a bool": (step(1, terminated=2), SchemaError, "'terminated'.*out of range 0 … 1"),
    "infinite": (step(1, reward=1e300), SchemaError, "'reward'.*would become infinite"),
    "rounded": (step(1, reward=2**24 + 1), SchemaError, "'reward'.*would be rounded"),
    "complex": (step(1, reward=1j), SchemaError, "'reward'.*imaginary part would be lost"),
    "text": (step(1, reward="much"), SchemaError, "'reward'.*only numbers and bools"),
    "ragged": (step(1, obs=[[1], [1, 2]]), SchemaError, "'obs'.*no rectangular array"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_step_that_is_refused_leaves_the_episode_as_it_was(buffer, name):
    bad, kind, text = BAD_STEPS[name]
    with buffer.one_episode() as episode:
        buffer.store(**step(1, action=5))
        with pytest.raises(kind, match=text):
            buffer.store(**bad)
        assert episode.length == 1
        buffer.store(**step(2))
    assert rewards(buffer) == [[1, 2]] and shown(buffer)[0][1]["action"] == [5, 7]


def test_an_object_that_fails_to_become_an_array_is_refused_before_anything_is_stored(buffer):
    """Fault 6."""

    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("no array today")

    with buffer.one_episode():
        buffer.store(**step(1))
        with pytest.raises(RuntimeError, match="no array today"):
            buffer.store(**step(2, obs=Broken()))
    assert rewards(buffer) == [[1]]


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_a_step_after_the_episode_ended_is_refused(buffer, flag):
    with buffer.one_episode() as episode:
        buffer.store(**step(1, **{flag: True}))
        with pytest.raises(EpisodeStateError, match=f"ended at timestep 0 by `{flag}`.*begin a new one"):
            buffer.store(**step(2))
        episode.final(obs=[1, 2])
    assert rewards(buffer) == [[1]]
    assert bool(flags_of(buffer.folder)[0] & TERMINATED) == (flag == "terminated")


def test_final_is_given_once_whole_and_after_the_last_step(buffer):
    with buffer.one_episode() as episode:
        with pytest.raises(EpisodeStateError, match="before the first step"):
            episode.final(obs=[1, 2])
        buffer.store(**step(1))
        with pytest.raises(SchemaError, match="'obs' missing"):
            episode.final()
        with pytest.raises(SchemaError, match=r"final=True.*'reward'"):
            episode.final(obs=[1, 2], reward=1)
        with pytest.raises(SchemaError, match=r"'obs'.*declared \(2,\)"):
            episode.final(obs=[1, 2, 3])
        episode.final(obs=[1, 2])
        with pytest.raises(EpisodeStateError, match="called twice"):
            episode.final(obs=[1, 2])
        with pytest.raises(EpisodeStateError, match="has its final observation"):
            buffer.store(**step(2))
    assert shown(buffer)[0][1]["obs"] == [[1, -1], [1, 2]] and rewards(buffer) == [[1]]
    assert flags_of(buffer.folder)[0] & (FINAL | CUT | TERMINATED) == FINAL


def test_an_episode_longer_than_max_timesteps_is_refused_and_publishes_what_fits(buffer):
    with buffer.one_episode():
        for t in range(5):
            buffer.store(**step(t))
        with pytest.raises(EpisodeStateError, match=r"timestep 5.*longer than max_timesteps \(5\)"):
            buffer.store(**step(5))
    assert rewards(buffer) == [[0, 1, 2, 3, 4]]


def test_meta_that_is_refused_leaves_the_episode_as_it_was(buffer):
    with pytest.raises(SchemaError, match=r"'tusk'.*did you mean 'task'"), buffer.one_episode(tusk=1):
        pass
    with buffer.one_episode(task=1) as episode:
        buffer.store(**step(1))
        with pytest.raises(SchemaError, match=r"meta field 'task'.*2.5.*not a whole number"):
            episode["task"] = 2.5
        with pytest.raises(SchemaError, match=r"meta field 'score'.*shape \(2,\)"):
            episode.update({"score": [1, 2]})
    assert shown(buffer)[0][1]["task"] == 1


def test_an_episode_that_is_over_takes_nothing_more(buffer):
    published, aborted, dropped = (buffer.begin_episode() for _ in range(3))
    published.store(**step(1))
    published.publish()
    aborted.abort()
    buffer.close()
    for episode, state in ((published, "published"), (aborted, "aborted"), (dropped, "aborted")):
        calls = [lambda e=episode: e.store(**step(1)), episode.publish, lambda e=episode: e.update({"task": 1})]
        for call in calls:
            with pytest.raises(EpisodeStateError, match=f"was {state}; begin a new one"):
                call()
    with pytest.raises(EpisodeStateError, match="the buffer was closed; reopen it"):
        buffer.begin_episode()
    assert rewards(buffer) == [[1]]


@pytest.mark.parametrize("options", [{}, {"stage": "disk", "spare_slots": 2}], ids=str)
def test_a_full_buffer_refuses_to_begin_what_it_could_not_publish(tmp_path, monkeypatch, options):
    set_inside(monkeypatch, staged_bytes=1)  # a slot is taken as soon as there is a second step
    with ReplayBuffer(tmp_path, 2, 5, FIELDS, **options) as full:
        full.store_episode(**whole(0))
        waiting = full.begin_episode()
        waiting.store(**step(1)), waiting.store(**step(1))
        with pytest.raises(BufferFullError, match=r"is full: 1 of .*1 more are open.*circular=True"):
            full.begin_episode()
        waiting.store(**step(1))
        waiting.publish()
        for begin in (full.one_episode, lambda: full.batched_episode(1)):
            with pytest.raises(BufferFullError, match="is full: 2 of "), begin():
                pass
        with pytest.raises(BufferFullError, match="is full: 2 of "):
            full.store_episode(**whole(2))
        full.clear()
        full.store_episode(**whole(3))
        assert rewards(full) == [[3]] and full.serials.tolist() == [2]


@pytest.mark.parametrize("options", [{}, {"publish": "step"}, {"stage": "disk"}, {"publish": "step", "capacity": 9}])
def test_timesteps_that_are_appended_together_are_those_that_are_stored_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    set_inside(monkeypatch, staged_bytes=60)  # several chunks
    fields = {"x": Field("int", (2,), final=True), "done": "bool"}
    found = []
    for way in ("together", "one by one"):
        sizes = {"max_episodes": 5, "max_timesteps": 30, "circular": True, "terminated": "done"}
        with ReplayBuffer(
            tmp_path / way, fields=fields, meta_fields={"m": ("int", (), 0)}, **sizes, **options
        ) as buffer:
            episode, at = buffer.begin_episode(), 0
            for count in (1, 7, 3, 12):
                x, done = np.arange(2 * at, 2 * (at + count)).reshape(-1, 2), np.zeros(count, np.bool_)
                if way == "together":
                    episode.extend(x=x, done=done, m=at)
                else:
                    for t in range(count):
                        episode.store(x=x[t], done=done[t])
                    episode["m"] = at
                at += count
                if options.get("publish"):
                    assert buffer.num_steps == min(at, options.get("capacity", 99))
            last = np.arange(2 * at, 2 * at + 4).reshape(2, 2)
            if way == "together":
                episode.extend(x=last, done=[True])
            else:
                episode.store(x=last[0], done=True)
                episode.final(x=last[1])
            episode.publish()
            steps = buffer.batch(n_steps=1, return_indices=True)
        assert verify(tmp_path / way) == []
        found.append({key: values.tolist() for key, values in steps.items()})
    assert found[0] == found[1]


def test_an_end_before_the_last_of_the_timesteps_that_are_appended_is_refused(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, 2, 9, {"x": "int", "terminated": "bool"}) as buffer:
        episode = buffer.begin_episode()
        episode.extend(x=[1, 2], terminated=[False, False])
        with pytest.raises(EpisodeStateError, match="`terminated` is true before the last timestep"):
            episode.extend(x=[3, 4], terminated=[True, False])
        with pytest.raises(EpisodeStateError, match="longer than max_timesteps"):
            episode.extend(x=range(8), terminated=[False] * 8)
        with pytest.raises(SchemaError, match="field 'terminated', extend: missing"):
            episode.extend(x=[1])
        assert episode.length == 2
        episode.publish()


def test_of_timesteps_that_are_appended_on_a_full_disk_those_that_are_visible_stay(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, 2, 90, {"x": "int"}, publish="step") as buffer:
        episode = buffer.begin_episode()
        episode.extend(x=range(5))
        with system(1, error=errno.ENOSPC), pytest.raises(OSError, match="No space"):
            episode.extend(x=range(5, 9))
        assert episode.length == buffer.num_steps == 5
        episode.extend(x=range(5, 9))
        assert buffer.batch(timestep_level=True)["x"].tolist() == list(range(9))
