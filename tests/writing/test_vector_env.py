"""`add`, `extend`, `add_and_sample`: steps of environments that run on, against a list for each environment."""

import errno
from itertools import count

import numpy as np
import pytest
import torch
from fault_injection import flags_of, shown, system
from hypothesis import given
from hypothesis import strategies as st
from inside import most_open_episodes
from interruptions import interrupted
from profiles import examples
from specification import CUT, FINAL, TERMINATED

from memmap_buffer import (
    BufferFullError,
    ConcatBuffer,
    EpisodeStateError,
    Field,
    NotEnoughDataError,
    ReadOnlyError,
    ReplayBuffer,
    SchemaError,
    Window,
)
from memmap_buffer.compat import add_and_sample, can_sample

FIELDS = {
    "observation": {"x": Field("float", 2, final=True), "y": Field("int", final=True)},
    "reward": "float",
    "terminated": "bool",
    "truncated": ("bool", (), False),
}
META = {"task": "int"}
LIMIT = 4


def make(folder, max_episodes=50, fields=FIELDS, **options):
    options = {"circular": True, "meta_fields": META, **options}
    return ReplayBuffer(folder, max_episodes, LIMIT, fields, **options)


def steps_of(ends, start=0):
    """(T, B) of 0, 1 (terminated), 2 (truncated) -> steps whose every number is of its own."""
    ends = np.asarray(ends)
    number = start + np.arange(ends.size).reshape(ends.shape)
    return {
        "observation": {"x": np.stack([number, -number], -1), "y": number},
        "reward": number / 4,
        "terminated": ends == 1,
        "truncated": ends == 2,
        "next_observation": {"x": np.stack([number, number], -1) + 0.5, "y": number + 1000},
        "task": number % 7,
    }


def at(steps, *where):
    return {key: at(value, *where) if isinstance(value, dict) else value[where] for key, value in steps.items()}


def slow(chunks, end=False):
    """The episodes as (reward, y, x, task, flags), in the order in which they end: one list for each environment."""
    done, running = [], {}

    def close(i, t, steps, flags):
        rows = running.pop(i)
        last = flags if steps is None else flags | FINAL
        y, x = ([], []) if steps is None else (steps["next_observation"][key][t, i].tolist() for key in "yx")
        ys = [row[1] for row in rows] + ([] if steps is None else [y])
        xs = [row[2] for row in rows] + ([] if steps is None else [x])
        done.append(([row[0] for row in rows], ys, xs, rows[-1][3], last))

    for steps in chunks:
        time, envs = steps["reward"].shape
        for t in range(time):
            for i in range(envs):
                row = [steps["reward"], *(steps["observation"][key] for key in "yx"), steps["task"]]
                running.setdefault(i, []).append([column[t, i].tolist() for column in row])
            for i in range(envs):
                ended = steps["terminated"][t, i] or steps["truncated"][t, i]
                if ended or len(running[i]) == LIMIT:
                    close(i, t, steps, TERMINATED * bool(steps["terminated"][t, i]) | CUT * (not ended))
    for i in sorted(running) if end else ():
        close(i, -1, chunks[-1], CUT)
    return done


def found(buffer):
    flags, out = flags_of(buffer.folder), []
    for serial, episode in shown(buffer):
        columns = [episode["reward"], episode["observation"]["y"], episode["observation"]["x"], episode["task"]]
        out.append((*columns, flags[serial] & (CUT | FINAL | TERMINATED)))
    return out


SOME = [[0, 0, 1], [2, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1], [1, 1, 0], [0, 0, 2], [0, 2, 0], [0, 0, 0]]
HOW = {"ram": {}, "disk": {"stage": "disk", "spare_slots": 3}, "step": {"publish": "step", "spare_slots": 3}}


@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
def test_added_steps_become_episodes_that_end_where_each_environment_says(tmp_path, how):
    steps = steps_of(SOME)
    with make(tmp_path / "added", **how) as added, make(tmp_path / "extended", **how) as extended:
        for t in range(len(SOME)):
            added.add(**at(steps, t))
        extended.extend(**steps)
        if "publish" not in how:
            assert found(added) == found(extended) == slow([steps])
        added.end_episodes(), extended.end_episodes()
        assert found(added) == found(extended)
        assert sorted(found(added)) == sorted(slow([steps], end=True))


@examples(40)
@given(
    chunks=st.integers(1, 3).flatmap(
        lambda envs: st.lists(
            st.integers(1, 9).flatmap(
                lambda time: st.lists(
                    st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=envs, max_size=envs),
                    min_size=time,
                    max_size=time,
                )
            ),
            min_size=1,
            max_size=4,
        )
    )
)
def test_chunks_of_any_length_give_what_a_list_for_each_environment_gives(tmp_path_factory, chunks):
    steps = [steps_of(ends, 100 * i) for i, ends in enumerate(chunks)]
    folder = tmp_path_factory.mktemp("buffer")
    with make(folder, 200) as buffer:
        for chunk in steps:
            buffer.extend(**chunk)
        assert found(buffer) == slow(steps)
    assert found(ReplayBuffer.from_folder(folder)) == slow(steps, end=True)  # `close` keeps what is open


@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
@pytest.mark.parametrize("told", [True, False], ids=["what follows is told", "it is not"])
def test_where_the_episodes_of_some_environments_are_ended_the_others_go_on(tmp_path, how, told):
    resets = np.random.default_rng(0).random((60, 3)) < 0.2
    steps, expected = steps_of(np.zeros((60, 3))), [[[]] for _ in range(3)]
    if not told:
        del steps["next_observation"]
    with make(tmp_path, 200, **how) as buffer:
        buffer.end_episodes([0, 1])  # none runs yet
        for t in range(60):
            for i in range(3):
                if len(expected[i][-1]) == LIMIT:
                    expected[i].append([])
                expected[i][-1].append(steps["reward"][t, i])
            buffer.add(**at(steps, t))
            buffer.end_episodes(resets[t] if t % 2 else np.flatnonzero(resets[t]))
            for i in np.flatnonzero(resets[t]):
                expected[i].append([])
        buffer.end_episodes()
        assert buffer.num_added == buffer.num_steps == 180
        stored = [episode for _, episode in shown(buffer)]
    assert sorted(episode["reward"] for episode in stored) == sorted(rows for own in expected for rows in own if rows)
    for episode in stored:
        numbers, final = [int(4 * reward) for reward in episode["reward"]], episode["observation"]["y"][-1]
        t, i = divmod(numbers[-1], 3)
        if told:
            assert final == numbers[-1] + 1000
        elif len(numbers) == LIMIT and t < 59 and not resets[t, i]:
            assert final == numbers[-1] + 3  # what the next step began with
        else:
            assert final == numbers[-1]  # it has none


@pytest.mark.parametrize(
    "environments", [3, -1, [0, 3], [0.0], [[0, 1]], [True, False], np.ones((3, 1), bool), "all"], ids=repr
)
def test_the_environments_whose_episodes_are_to_end_are_among_those_that_run(tmp_path, environments):
    with make(tmp_path) as buffer:
        buffer.add(**at(steps_of(np.zeros((1, 3))), 0))
        expected = r"end_episodes: got environments=.*, expected numbers from 0 to 2, or a mask of 3 bools"
        with pytest.raises(SchemaError, match=expected):
            buffer.end_episodes(environments)
        assert len(buffer) == 0
        buffer.end_episodes([])
        buffer.end_episodes(np.int64(1))
        assert len(buffer) == 1 and buffer.num_steps == 1


def test_an_environment_that_is_reset_by_hand_gives_a_step_where_resets_are_left_out(tmp_path):
    ends = np.zeros((3, 3), int)
    ends[0] = [1, 1, 0]
    steps = steps_of(ends)
    with make(tmp_path, skips_resets=True) as buffer:
        buffer.add(**at(steps, 0))
        buffer.end_episodes([0])  # and its reset is no step
        buffer.add(**at(steps, 1))
        buffer.add(**at(steps, 2))
        buffer.end_episodes()
        rewards = [(np.array(episode["reward"]) * 4).astype(int).tolist() for _, episode in shown(buffer)]
        assert sorted(rewards) == [[0], [1], [2, 5, 8], [3, 6], [7]]


@pytest.mark.parametrize("publish", ["step", "episode"])
@pytest.mark.parametrize("size", [None, 3])
def test_groups_and_fields_that_are_left_out_are_stored_step_by_step_as_all_at_once(tmp_path, size, publish):
    steps = steps_of(np.arange(24).reshape(8, 3) % 7 == 6)
    del steps["task"], steps["truncated"]
    steps = at(steps, slice(None), 0) if size is None else steps
    options = {"publish": publish, "spare_slots": 4}
    with make(tmp_path / "a", **options) as one_by_one, make(tmp_path / "b", **options) as at_once:
        for t in range(8):
            one_by_one.add(**at(steps, t))
        at_once.extend(**steps)
        for buffer in (one_by_one, at_once):
            buffer.end_episodes()
        assert one_by_one.num_steps == at_once.num_steps == 8 * (size or 1)
        for i in range(len(at_once)):
            found, expected = one_by_one.episode(i), at_once.episode(i)
            assert not expected["truncated"].any()
            np.testing.assert_equal(found, expected)


def test_a_step_without_any_field_is_refused_though_all_have_a_default(tmp_path):
    fields = {"x": Field("float", (), 0.0, final=True), "terminated": ("bool", (), False)}
    with ReplayBuffer(tmp_path, 10, LIMIT, fields) as buffer:
        for given in ({}, {"next_x": 1.0}):
            buffer.add(x=1.0)
            with pytest.raises(SchemaError, match="no field was given"):
                buffer.add(**given)
        assert buffer.num_added == 2


@pytest.mark.parametrize("publish", ["episode", "step"])
@pytest.mark.parametrize(
    "value",
    [np.array(2, np.uint8).view(np.bool_), *map(np.array, (np.float32("nan"), 1e-300, np.int64(-1), np.uint8(128)))],
    ids=["bool of another byte", "nan", "tiny", "negative", "high"],
)
def test_whatever_is_not_0_ends_an_episode(tmp_path, publish, value):
    """Of a bool, too: numpy takes each byte but 0 for true, such as in a view of flags of bytes."""
    fields = {"x": "int", "terminated": value.dtype}
    with ReplayBuffer(tmp_path, 20, 9, fields, circular=True, spare_slots=2, publish=publish) as buffer:
        for t in range(6):
            number = value.tobytes() if t == 3 else bytes(value.itemsize)
            buffer.add(x=[t, t], terminated=np.frombuffer(bytes(value.itemsize) + number, value.dtype))
        buffer.end_episodes()
        assert sorted(len(buffer[i]["x"]) for i in range(3)) == [2, 4, 6]


def test_without_the_next_observation_an_episode_has_no_final_one(tmp_path):
    steps = steps_of([[0], [1], [0]])
    del steps["next_observation"]
    with make(tmp_path) as buffer:
        buffer.extend(**steps)
        buffer.end_episodes()
        assert [(reward, flags) for reward, *_, flags in found(buffer)] == [([0, 0.25], TERMINATED), ([0.5], CUT)]


def test_final_observations_and_meta_fields_of_bfloat16_are_those_that_were_given(tmp_path):
    fields = {"x": Field("bfloat16", final=True), "terminated": "bool"}
    buffer = ReplayBuffer(tmp_path, 6, 4, fields, {"goal": "bfloat16", "name": "U3"})
    meta, step = {"goal": [1.0, 2.0], "name": ["a", "bcd"]}, {"x": [3.0, 4.0], "terminated": [True, True]}
    with buffer.batched_episode(2, **meta) as group:
        buffer.store_batch(**step)
        group.final(x=[5.0, 6.0])
    buffer.add(**step, **meta, next_x=[5.0, 6.0])
    with pytest.raises(SchemaError, match="'x' missing"), buffer.batched_episode(2) as group:
        group.final()
    for i, (first, last, goal, name) in enumerate([(3, 5, 1, "a"), (4, 6, 2, "bcd")] * 2):
        episode = buffer.episode(i)
        assert type(episode["x"]) is np.ndarray and episode["x"].tolist() == [first, last]
        assert (episode["goal"], episode["name"]) == (goal, name)


def test_one_environment_needs_no_axis_for_it_and_tensors_and_lists_are_taken(tmp_path):
    with make(tmp_path) as buffer:
        buffer.add(observation={"x": [1, 2], "y": 3}, reward=0.5, terminated=False)
        buffer.add(
            **{"observation.x": torch.tensor([3.0, 4.0]), "observation.y": 4}, reward=torch.tensor(1), terminated=1
        )
        time = {"observation": {"x": [[5, 6], [7, 8]], "y": [5, 6]}, "reward": [2, 3], "terminated": [False, True]}
        buffer.extend(**time, task=[8, 9])
        assert [(reward, y, task) for reward, y, _, task, _ in found(buffer)] == [
            ([0.5, 1], [3, 4], 0),
            ([2, 3], [5, 6], 9),
        ]


@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
def test_one_environment_needs_no_axis_for_it_where_there_are_lists_either(tmp_path, how):
    fields = {"ids": Field("int", (None,), final=True), "boxes": ("float", (None, 2)), "reward": "float"}
    lists = [[1, 2, 3], [], [5], np.array([7, 8])]
    with make(tmp_path, fields=fields | {"terminated": "bool"}, meta_fields={}, **how) as buffer:
        for t, ids in enumerate(lists):
            buffer.add(ids=ids, boxes=[[t, t]] * t, reward=t, terminated=t == 3, next_ids=[9])
        batch = buffer.batch(timestep_level=True, format="numpy")
    assert [row[:n].tolist() for row, n in zip(batch["ids"], batch["_lens_ids"], strict=True)] == [
        [1, 2, 3],
        [],
        [5],
        [7, 8],
    ]
    assert batch["_lens_boxes"].tolist() == [0, 1, 2, 3] and batch["boxes"][3].tolist() == [[3, 3]] * 3


def bad_steps():
    ok = at(steps_of([[0, 0]]), 0)
    return {
        "unknown": ({**ok, "reword": [1, 1]}, "'reword'.*did you mean 'reward'"),
        "missing": ({key: value for key, value in ok.items() if key != "reward"}, "'reward'.*missing"),
        "nothing": ({}, "no field was given"),
        "only next": ({"next_observation": ok["next_observation"]}, "no field was given"),
        "batch": ({**ok, "reward": [1, 2, 3]}, "reward: 1 × 3.*the same number for every field"),
        "axes": ({**ok, "reward": 1}, r"reward: 0.*\(\*field\) or \(B, \*field\)"),
        "time": ({**ok, "reward": [[1, 2]]}, r"reward: 2"),
        "no batch": (at(steps_of(np.zeros((1, 0)), 0), 0), "× 0.*from 1"),
        "others": (at(steps_of([[0, 0, 0]]), 0), "got 3 environments, expected the 2 that run; call end_episodes"),
        "another": (at(steps_of([[0]]), 0), "got 1 environment, expected the 2 that run"),
        "shape": (
            {**ok, "observation": {**ok["observation"], "x": np.zeros((2, 3))}},
            r"'observation.x': got shape \(2, 3\), expected \(\*, 2\); give that shape, or declare the other$",
        ),
        "lossy": ({**ok, "observation": {**ok["observation"], "y": [0.5, 1]}}, "'observation.y'.*not a whole number"),
        "next of what has none": (
            {**ok, "next_reward": [1, 2]},
            "`next_`.* got 'reward', which is a per-timestep field without final=True",
        ),
        "half a next": ({**ok, "next_observation": {"y": [1, 2]}}, "next_observation.x missing; all fields with final"),
        "next shape": ({**ok, "next_observation": {"x": np.zeros((2, 3)), "y": [1, 2]}}, r"'observation.x'.*\(2, 3\)"),
    }


@pytest.mark.parametrize("name", bad_steps())
def test_a_step_that_is_refused_is_stored_in_no_environment(tmp_path, name):
    given, text = bad_steps()[name]
    first, last = steps_of([[0, 0]]), steps_of([[1, 1]], 10)
    with make(tmp_path) as buffer:
        buffer.extend(**first)
        with pytest.raises(SchemaError, match=text):
            buffer.add(**given)
        buffer.extend(**last)
        assert found(buffer) == slow([first, last])


def test_a_full_buffer_refuses_the_step_that_begins_an_episode_for_all_environments(tmp_path):
    with make(tmp_path, 3, circular=False) as buffer:
        steps = steps_of([[0, 1], [1, 0], [0, 1]])
        with pytest.raises(BufferFullError, match="is full"):
            buffer.extend(**steps)
        assert found(buffer) == slow([at(steps, slice(2))]) and len(buffer) == 2
        with pytest.raises(BufferFullError, match="is full"):
            buffer.add(**at(steps, 2))
        buffer.clear()
        buffer.add(**at(steps, 2))
        assert [reward for reward, *_ in found(buffer)] == [[0.75, 1.25]]


def test_an_episode_that_a_full_disk_kept_back_is_published_by_the_next_call(tmp_path):
    steps, count = steps_of([[0, 0], [1, 1], [0, 0], [1, 2]]), 0
    for at_operation in range(1, 60):
        with make(tmp_path / f"{at_operation}") as buffer:
            buffer.extend(**at(steps, slice(1)))
            with system(at_operation, error=errno.ENOSPC, only=("pwrite",)) as seen:
                try:
                    buffer.add(**at(steps, 1))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    count += 1
            buffer.extend(**at(steps, slice(2, 4)))
            assert found(buffer) == slow([steps])
        if seen.count < at_operation:
            break
    assert count > 10


@pytest.mark.parametrize("how", list(HOW))
def test_episodes_that_end_together_take_one_commit(tmp_path, how):
    """Their barriers are those of one, but for that between two sectors of records."""
    fields, barriers = {"x": "float", "terminated": "bool"}, {}
    for size in (1, 8):
        options = {"durability": "power", **HOW[how], "spare_slots": 16}
        with make(tmp_path / str(size), fields=fields, meta_fields={}, **options) as buffer:
            step = {"x": np.arange(size), "terminated": np.zeros(size, np.bool_)}
            buffer.add(**step)
            buffer.add(**step)
            with system() as ends:
                buffer.add(**step | {"terminated": ~step["terminated"]})
            batch = buffer.begin_batch(size)
            batch.store(**step)
            with system() as published:
                batch.publish()
            buffer.add(**step)
            with system() as cut:
                buffer.end_episodes()
            assert buffer.num_episodes == 3 * size
        barriers[size] = [sum(name == "barrier" for name, _ in each.done) for each in (ends, published, cut)]
    assert all(0 < alone <= together <= alone + 2 for alone, together in zip(*barriers.values(), strict=True))


@pytest.mark.parametrize("spare_slots", [1, 3, 40])
def test_episodes_that_end_together_need_no_free_slots_for_all_of_them(tmp_path, spare_slots):
    steps = steps_of(np.tile([[0], [1]], (3, 11)))
    with make(tmp_path, 20, spare_slots=spare_slots) as buffer:
        buffer.extend(**steps)
        assert found(buffer) == slow([steps])[-20:]


def test_what_stops_one_of_the_episodes_that_end_together_keeps_no_other_back(tmp_path):
    """A write that fails once: each is visible when the error is raised, or all but the one that could not be."""
    steps, failed = steps_of([[0] * 5, [1] * 5]), 0
    for at_operation in range(1, 200):
        with make(tmp_path / f"{at_operation}", spare_slots=8) as buffer:
            buffer.add(**at(steps, 0))
            with system(at_operation, error=errno.ENOSPC, only=("pwrite",)) as seen:
                try:
                    buffer.add(**at(steps, 1))
                except OSError:
                    failed += 1
            assert found(buffer) == slow([steps])
        if seen.count < at_operation:
            break
    assert failed > 20


@pytest.mark.parametrize("call", ["add", "extend", "with errors"])
def test_after_a_full_disk_the_number_of_steps_tells_which_are_to_be_given_again(tmp_path, call):
    """Each is then stored once, in every environment; other episodes may have begun meanwhile."""
    steps, failed = steps_of([[0, 0], [1, 0], [0, 2], [0, 0]]), 0
    for at_operation in range(1, 200, 3):
        with make(tmp_path / f"{at_operation}", durability="power", **HOW["step"] | {"spare_slots": 4}) as buffer:
            with system(at_operation, error=errno.ENOSPC, only=("pwrite",)) as seen:
                while buffer.num_steps < 8:
                    assert buffer.num_steps % 2 == 0
                    t = buffer.num_steps // 2
                    given = at(steps, slice(t, 4 if call == "extend" and t else t + 1))
                    if call == "with errors":
                        given["priority"] = np.ones(given["reward"].shape)
                    try:
                        buffer.extend(**given) if call == "extend" else buffer.add(**at(given, 0))
                    except OSError as error:
                        assert error.errno == errno.ENOSPC
                        failed += 1
            buffer.end_episodes()
            assert sorted(reward for rewards, *_ in found(buffer) for reward in rewards) == [n / 4 for n in range(8)]
        if seen.count < at_operation:
            break
    assert failed > 5


def test_environments_in_place_need_a_spare_slot_each_and_a_read_only_buffer_none(tmp_path):
    with make(tmp_path, publish="step") as buffer:
        for _ in range(2):
            with pytest.raises(EpisodeStateError, match=r"spare_slots=5$"):
                buffer.add(**at(steps_of([[0, 0, 0, 0, 0]]), 0))
            assert buffer.num_steps == 0 and most_open_episodes(buffer) == 0
        begun = buffer.begin_episode()
        with pytest.raises(EpisodeStateError, match=r"spare_slots=8$"), buffer.batched_episode(7):
            pass
        begun.abort()
        with pytest.raises(ReadOnlyError, match="read_only=True"):
            ReplayBuffer.from_folder(tmp_path, read_only=True).add(**at(steps_of([[0]]), 0))


# Sampling beside it


def test_add_and_sample_gives_the_same_batch_for_the_same_seed(tmp_path):
    batches = []
    for name in "ab":
        with make(tmp_path / name) as buffer:
            steps = steps_of(SOME)
            buffer.extend(**at(steps, slice(5)))
            got = [
                add_and_sample(buffer, at(steps, t), 6, seed=t, n_steps=2, return_indices=True)
                for t in range(5, len(SOME))
            ]
            batches.append(got)
            fresh = buffer.sample(6, seed=8, n_steps=2, return_indices=True)
            assert torch.equal(got[-1]["_indices"], fresh["_indices"])
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one["_indices"], other["_indices"]) and torch.equal(one["reward"], other["reward"])


@pytest.mark.parametrize("publish", ["episode", "step"])
@pytest.mark.parametrize("spare_slots", [2, 7])
def test_add_and_sample_draws_from_what_was_just_added(tmp_path, publish, spare_slots):
    with make(tmp_path, publish=publish, spare_slots=spare_slots) as buffer:
        assert not can_sample(buffer)
        added = set()
        for t, ends in enumerate([[0, 0], [0, 1], [0, 0], [2, 0], [0, 0]]):
            step = at(steps_of([ends], 2 * t), 0)
            batch = add_and_sample(buffer, step, 200, timestep_level=True, seed=t)
            added |= set(step["reward"].tolist())
            assert set(batch["reward"].tolist()) == added
        lengths = {"episode": [1, 1, 1, 1, 3, 3], "step": [4, 2, 3, 1]}[publish]  # the first call cuts, no other does
        assert sorted(buffer.episode_lens.tolist()) == sorted(lengths)


@pytest.mark.parametrize("told", [True, False])
def test_the_cut_of_publish_steps_loses_no_transition(tmp_path, told):
    """What was seen next is given, or follows."""
    with make(tmp_path, spare_slots=2) as buffer:
        for t in range(3):
            step = at(steps_of([[0, 0]], 2 * t), 0)
            buffer.add(**{name: value for name, value in step.items() if told or name != "next_observation"})
            buffer.publish_steps()
        first = 1000 if told else 2
        batch = buffer.batch(n_steps=1)
        assert batch["next_observation"]["y"].tolist() == [first, first + 1, 4, 5]


def test_add_and_sample_with_too_few_spare_slots_ends_the_episodes_each_time_and_says_so(tmp_path, caplog):
    with make(tmp_path, spare_slots=1) as buffer:
        buffer.add(**at(steps_of([[0, 0]], 4), 0))
        for t in range(3):
            step = at(steps_of([[0, 0]], 6 + 2 * t), 0)
            batch = add_and_sample(buffer, step, 100, timestep_level=True, seed=t)
            assert set(step["reward"].tolist()) <= set(batch["reward"].tolist())
        assert buffer.episode_lens.tolist() == [2, 2, 1, 1, 1, 1]
    assert [record.getMessage() for record in caplog.records if "spare_slots=2" in record.getMessage()] != []
    assert len(caplog.records) == 1


def test_an_item_that_takes_more_steps_than_there_are_raises_and_the_step_is_kept(tmp_path):
    with make(tmp_path, spare_slots=2) as buffer:
        with pytest.raises(NotEnoughDataError, match="none of 2 episodes has an item"):
            add_and_sample(buffer, at(steps_of([[0, 0]]), 0), 4, view=Window(2, boundary="drop"))
        assert buffer.num_steps == 2


def test_steps_are_published_from_a_call_on_and_a_reset_that_follows_is_left_out(tmp_path):
    with make(tmp_path, skips_resets=True, spare_slots=2) as buffer:
        assert buffer.publish_steps() is None and buffer.num_steps == 0
        for t, ends in enumerate([[0, 1], [0, 0], [0, 0]]):
            buffer.add(**at(steps_of([ends], 2 * t), 0))
            if t == 0:
                buffer.publish_steps()
            assert buffer.num_steps == [2, 3, 5][t]
        assert buffer.episode_lens.tolist() == [1, 1, 2, 1]


def test_steps_are_not_published_one_by_one_beside_an_open_episode_or_behind_shared_barriers(tmp_path):
    for name, options in {"beside": {}, "barriers": {"durability": "power", "sync_every": 2}}.items():
        with make(tmp_path / name, spare_slots=3, **options) as buffer:
            episode = buffer.begin_episode() if name == "beside" else None
            for t in range(2):
                buffer.add(**at(steps_of([[0, 0]], 2 * t), 0))
                buffer.publish_steps()
                assert buffer.episode_lens.tolist() == [1, 1] * (t + 1)
            if episode is not None:
                episode.abort()


def test_an_interruption_of_publish_steps_loses_no_step_and_the_next_steps_have_episodes(tmp_path):
    for at_line in count(0, 13):
        with make(tmp_path / str(at_line), spare_slots=2) as buffer:
            buffer.add(**at(steps_of([[0, 0]]), 0))
            error = interrupted(buffer.publish_steps, at_line)
            buffer.add(**at(steps_of([[0, 0]], 2), 0))
            buffer.end_episodes()
            assert sorted(reward for _, episode in shown(buffer) for reward in episode["reward"]) == [
                0,
                0.25,
                0.5,
                0.75,
            ]
        if error is None:
            return
    with make(tmp_path / "step", publish="step", spare_slots=2) as buffer:  # where each step is visible at once
        assert add_and_sample(buffer, at(steps_of([[0, 0]]), 0), 4, timestep_level=True)["reward"].shape == (4,)


def test_can_sample_counts_timesteps_and_episodes_of_all_sources(tmp_path):
    buffers = [make(tmp_path / name) for name in "ab"]
    for buffer in buffers:
        buffer.extend(**steps_of([[0, 1], [0, 0], [1, 1]]))
        assert can_sample(buffer, min_steps=6, min_episodes=3)
        assert not can_sample(buffer, min_steps=7) and not can_sample(buffer, min_episodes=4)
    both = ConcatBuffer(buffers)
    assert can_sample(both, min_steps=12, min_episodes=6) and not can_sample(both, min_steps=13)
    for buffer in buffers:
        buffer.close()


NUMBERS = [1, -1, 0.5, 300, True, np.float64(1.5), np.float32(2), np.int64(7), np.uint8(9), np.bool_(True), 1e300]
NUMBERS += [float("nan"), 2**70, "x", None, torch.tensor(3.0), np.array(4), np.array([5.0]), [6.0], np.array([[1.0]])]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64", "bool", "bfloat16"])
def test_a_number_of_one_environment_is_stored_as_with_an_axis_or_refused_as_at_its_first_step(tmp_path, dtype, number):
    fields, observation = {"observation": ("float", 2), "number": dtype}, np.ones(2, "f4")
    results = []
    for before in (0, 1, 2):  # steps that were given like this
        with ReplayBuffer(tmp_path / str(before), 4, 9, fields, circular=True, publish="step") as buffer:
            for _ in range(before):
                buffer.add(observation=observation, number=1)
            try:
                buffer.add(observation=observation, number=number)
                results.append(buffer.episode(-1)["number"][-1:].tolist())
            except SchemaError as error:
                results.append(str(error))
            assert buffer.num_steps == before + (not isinstance(results[-1], str))
    assert repr(results[1:]) == repr(results[:1] * 2)


@pytest.mark.parametrize(
    "how", [list, lambda rows: [np.array(row) for row in rows], lambda rows: [*map(torch.tensor, rows)]]
)
def test_lists_of_several_environments_are_taken_at_every_step_and_a_bad_one_refused(tmp_path, how):
    fields = {"x": Field("float32", (None,)), "k": "int64"}
    with ReplayBuffer(tmp_path, 4, 9, fields, circular=True) as buffer:
        for t in range(4):
            buffer.add(x=[how([1.0, 2.0]), how([3.0])], k=np.array([t, -t]))
            with pytest.raises(SchemaError, match="rectangular"):
                buffer.add(x=[how([1.0, 2.0]), how([3.0])], k=[[1, 2], [3]])
        buffer.end_episodes()
        assert buffer.episode_lens.tolist() == [4, 4]


def test_tensors_are_given_as_they_are_and_each_is_copied_from_its_device_once(tmp_path, monkeypatch):
    """At the first call, at ends, and where the step after an end is left out, too."""
    real, copied = torch.Tensor.numpy, []
    monkeypatch.setattr(torch.Tensor, "numpy", lambda tensor, **how: copied.append(how) or real(tensor, **how))
    fields = {"state": Field("float32", (3,), final=True), "reward": "float32", "terminated": "bool"}
    for number, skips_resets in enumerate((False, True)):
        with ReplayBuffer(tmp_path / str(number), 99, 50, fields, skips_resets=skips_resets) as buffer:
            for t in range(12):
                state = torch.full((4, 3), float(t), requires_grad=True)
                step = {"state": state, "reward": torch.ones(4, dtype=torch.float64), "next_state": state + 1}
                copied.clear()
                buffer.add(**step, terminated=torch.arange(4) == t % 6)
                assert copied == [{"force": True}] * 4
            buffer.end_episodes()
            assert sum(len(episode["reward"]) for episode in buffer) == buffer.num_added


@pytest.mark.parametrize("options", [{}, {"publish": "step", "spare_slots": 4}, {"stage": "disk", "spare_slots": 4}])
@pytest.mark.parametrize("num_envs", [None, 1, 3])
def test_of_meta_fields_the_last_value_of_each_episode_counts(tmp_path, options, num_envs):
    """Given with all steps, some or none, in arrays that are used again; episodes end, or are cut."""
    rng, axes = np.random.default_rng(5), () if num_envs is None else (num_envs,)
    fields, meta_fields = {"x": "int", "terminated": "bool"}, {"a": ("int", (2,), 0), "b": ("float", (), -1.0)}
    sizes = {"max_episodes": 300, "max_timesteps": 6, "circular": True}
    expected, size, following = [], num_envs or 1, [{} for _ in range(num_envs or 1)]
    given = {"a": np.zeros((*axes, 2), np.int64), "b": np.zeros(axes, np.float32)}
    lengths = np.zeros(size, np.int64)
    with ReplayBuffer(tmp_path, **sizes, fields=fields, meta_fields=meta_fields, **options) as buffer:
        for t in range(120):
            chosen = {name: value for name, value in given.items() if rng.random() < 0.8}
            for value in chosen.values():
                value[...] = rng.integers(0, 100, value.shape)
            ended = rng.random(axes) < 0.1
            shown = {"b": float(chosen["b"])} if num_envs is None and "b" in chosen else {}
            buffer.add(x=np.full(axes, t), terminated=ended, **(chosen | shown))
            lengths += 1
            chosen = {name: value.copy() for name, value in chosen.items()}
            for value in given.values():
                value[...] = -7
            for i in range(size):
                following[i] |= {name: np.reshape(v, (size, -1))[i].tolist() for name, v in chosen.items()}
                if np.reshape(ended, -1)[i] or lengths[i] == 6:
                    expected.append((t, following[i]))
                    following[i], lengths[i] = {}, 0
        for i in range(size):
            expected += [(119, following[i])] if lengths[i] else []
        buffer.end_episodes()
        episodes = [buffer.episode(i) for i in range(len(buffer))]
    stored = [(int(each["x"][-1]), np.ravel(each["a"]).tolist(), [float(each["b"])]) for each in episodes]
    wanted = [(t, meta.get("a", [0, 0]), meta.get("b", [-1.0])) for t, meta in expected]
    assert sorted(stored) == sorted(wanted) and len(stored) > 15


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_step_that_there_is_no_room_for_may_be_given_again_once_there_is(tmp_path, durability):
    how = {"circular": False, "publish": "step", "durability": durability}
    with ReplayBuffer(
        tmp_path, 9, 9, {"x": Field("int64", (), final=True)}, capacity=8, spare_slots=2, **how
    ) as buffer:
        buffer.store_episode(x=[7, 7, 7])
        for t in range(2):
            buffer.add(x=[t, 10 + t], next_x=[t + 1, 11 + t])
        with pytest.raises(BufferFullError, match="2 more would pass"):
            buffer.add(x=[2, 12], next_x=[3, 13])
        buffer.delete([0])
        buffer.add(x=[2, 12], next_x=[3, 13])
        buffer.end_episodes()
        assert [buffer.episode(i)["x"].tolist() for i in range(2)] == [[0, 1, 2, 3], [10, 11, 12, 13]]
        assert buffer.num_added == buffer.num_steps == 6
