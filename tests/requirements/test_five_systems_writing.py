"""Every line of the five systems that is about writing, by its number; docs/five-systems.md is the table.

S1 memorax, S2 the functional JAX buffer, S3 ReAgent, S4 memmap-replay-buffer, S5 nnabla-rl. Values are compared with
lists and loops, or with memmap-replay-buffer itself; where something more general meets a line, the docstring says so.
"""

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from conftest import assert_same
from fault_injection import shown

from memmap_buffer import (
    BufferFullError,
    ConcatBuffer,
    CorruptBufferError,
    Field,
    NotABufferError,
    NotEnoughDataError,
    Offsets,
    ReadOnlyError,
    ReplayBuffer,
    Schema,
    SchemaError,
    SchemaMismatchError,
    Window,
)
from memmap_buffer.compat import (
    DeclaringBuffer,
    add_and_sample,
    add_count,
    can_sample,
    cursor,
    episode_count,
    is_empty,
    is_full,
    set_valid,
    step_spec,
    storage_spec,
)

FIELDS = {"observation": Field("float", 2, final=True), "action": "int", "reward": "float", "terminated": "bool"}


def make(folder, max_episodes=20, max_timesteps=10, fields=FIELDS, **options):
    return ReplayBuffer(folder, max_episodes, max_timesteps, fields, **{"circular": True, **options})


def step(number, envs=2, ends=()):
    """A timestep of several environments; every number of it tells which and where."""
    column = number * 10.0 + np.arange(envs)
    ended = np.isin(np.arange(envs), ends)
    return {"observation": np.stack([column, -column], -1), "action": column, "reward": column, "terminated": ended}


def rewards(buffer):
    return [episode["reward"] for _, episode in shown(buffer)]


@pytest.fixture
def buffer(tmp_path):
    with make(tmp_path / "buffer") as made:
        yield made


# S1: memorax


def test_S1_01_a_capacity_of_timesteps_over_all_environments(tmp_path):
    """`max_length` is `capacity`, `min_length` is `can_sample(min_steps=)`, the batch size is `sample`'s."""
    with make(tmp_path, max_timesteps=4, capacity=12) as buffer:
        ready = []
        for t in range(20):
            buffer.add(**step(t))
            ready.append(can_sample(buffer, min_steps=8))
        assert buffer.num_steps <= 12 and ready == [t >= 3 for t in range(20)]
        batch = buffer.sample(5, view=Window(3))
        assert batch["reward"].shape == (5, 3)


def test_S1_02_each_environment_is_a_row_of_its_own(buffer):
    """An episode at a time; the ring turns by whole episodes, so no window ever runs over its cursor."""
    for t in range(6):
        buffer.add(**step(t, envs=3, ends=(1,) if t == 2 else ()))
    buffer.end_episodes()
    assert rewards(buffer) == [[1, 11, 21], [0, 10, 20, 30, 40, 50], [31, 41, 51], [2, 12, 22, 32, 42, 52]]


def test_S1_03_timesteps_come_with_and_without_axes_for_time_and_environments(tmp_path):
    times = [step(t, envs=1, ends=(0,) if t == 3 else ()) for t in range(4)]
    block = {name: np.stack([one[name] for one in times]) for name in times[0]}
    given = {
        "batch": lambda b: [b.add(**one) for one in times],
        "none": lambda b: [b.add(**{name: value[0] for name, value in one.items()}) for one in times],
        "time and batch": lambda b: b.extend(**block),
        "time": lambda b: b.extend(**{name: value[:, 0] for name, value in block.items()}),
    }
    for name, call in given.items():
        with make(tmp_path / name) as buffer:
            call(buffer)
            assert rewards(buffer) == [[0, 10, 20, 30]], name


def test_S1_04_and_S1_12_sampling_waits_for_a_minimum(buffer):
    assert not can_sample(buffer)
    for t in range(10):
        buffer.add(**step(t))  # two environments, published together when they are as long as they may be
        assert can_sample(buffer, min_steps=max(8, 2 * 3), min_episodes=2) == (t == 9)


@pytest.mark.parametrize("sizes", [{"max_episodes": 2}, {"max_episodes": 9, "capacity": 4}], ids=str)
def test_S1_12_a_full_ring_can_be_sampled_whatever_the_minimum(tmp_path, sizes):
    with ReplayBuffer(tmp_path, max_timesteps=2, fields={"x": "int"}, circular=True, **sizes) as ring:
        for number in range(3):
            assert can_sample(ring, min_steps=100, min_episodes=100) == (number == 2)
            ring.store_episode(x=[number] * 2)


def test_S1_05_sizes_that_cannot_be_are_refused_when_it_is_made(tmp_path):
    bad = [{"max_timesteps": 0}, {"max_episodes": 0}, {"capacity": 0}]
    for options in bad:
        with pytest.raises(SchemaError, match="|".join(options)):
            make(tmp_path, **options)
    with make(tmp_path) as buffer:
        buffer.store_episode(observation=np.zeros((3, 2)), action=[0] * 3, reward=[0] * 3, terminated=[0] * 3)
        with pytest.raises(NotEnoughDataError, match="none of 1 episodes has an item"):
            buffer.sample(2, view=Window(4, boundary="drop"))


def test_S1_06_and_S2_02_the_fields_follow_from_an_example(tmp_path):
    """Python's numbers too; arrays are made of zeros."""
    example = {
        "observation": {"image": np.zeros((4, 4), np.uint8), "pair": (1.5, torch.zeros(2))},
        "reward": 0.0,
        "n": 3,
    }
    schema = Schema.from_example({**example, "terminated": False})
    assert {name: (field.dtype, field.shape) for name, field in schema.fields.items()} == {
        "observation.image": ("uint8", (4, 4)),
        "observation.pair.item0": ("float32", ()),
        "observation.pair.item1": ("float32", (2,)),
        "reward": ("float32", ()),
        "n": ("int64", ()),
        "terminated": ("bool", ()),
    }
    with make(tmp_path, fields=schema) as buffer:
        stored = storage_spec(buffer)["observation.image"]
        assert stored.shape[2:] == (4, 4) and not np.load(stored.path, mmap_mode="r").any()
        buffer.add(**{**example, "terminated": True})
        assert shown(buffer)[0][1]["observation"]["pair"] == {"item0": [1.5], "item1": [[0, 0]]}


# S2: the functional JAX buffer


def test_S2_01_what_is_drawn_next_is_a_state_that_can_be_kept(buffer):
    """The state of the store is the folder, and that of the draws is `state_dict` of the loader."""
    for t in range(6):
        buffer.add(**step(t, ends=(0, 1) if t == 5 else ()))
    loader = buffer.dataloader(4, timestep_level=True, shuffle=True, seed=1)
    first = iter(loader)
    next(first)
    state = loader.state_dict()
    rest = list(first)
    again = ReplayBuffer.from_folder(buffer.folder, read_only=True).dataloader(
        4, timestep_level=True, shuffle=True, seed=1
    )
    again.load_state_dict(state)
    for one, other in zip(rest, again, strict=True):
        assert_same(one, other)


def test_S2_03_one_step_of_every_environment_a_call_and_the_oldest_go(tmp_path):
    with make(tmp_path, 3, 2) as buffer:
        for t in range(6):
            buffer.add(**step(t))
        assert rewards(buffer) == [[21, 31], [40, 50], [41, 51]] and buffer.num_steps == 6


def test_S2_04_no_fields_or_fields_that_differ_are_refused_and_too_many_keep_the_newest(tmp_path):
    with make(tmp_path, 3, 1) as buffer:
        with pytest.raises(SchemaError, match="no field was given"):
            buffer.add()
        with pytest.raises(SchemaError, match="the same number for every field"):
            buffer.add(**{**step(0), "reward": [1.0]})
        buffer.add(**step(0, envs=5))
        assert rewards(buffer) == [[2], [3], [4]]


def test_S2_05_draws_are_uniform_with_replacement_and_of_nothing_an_error(buffer):
    with pytest.raises(NotEnoughDataError, match="it is empty") as caught:
        buffer.sample(3, timestep_level=True)
    assert caught.value.episodes == 0
    for t in range(3):
        buffer.add(**step(t, ends=(0, 1) if t == 2 else ()))
    drawn = buffer.sample(6000, timestep_level=True, seed=0)["reward"]
    values, counts = torch.unique(drawn, return_counts=True)
    assert values.tolist() == [0, 1, 10, 11, 20, 21] and ((counts - 1000) ** 2).sum() / 1000 < 40


def test_S2_06_and_S2_07_a_step_and_a_batch_in_one_call_the_same_for_the_same_seed(tmp_path):
    batches = []
    for name in "ab":
        with make(tmp_path / name, max_timesteps=2) as buffer:
            buffer.add(**step(0))
            batches.append(add_and_sample(buffer, step(1), 50, seed=3, timestep_level=True))
            assert set(batches[-1]["reward"].tolist()) == {0, 1, 10, 11}  # what was added is drawn from
    assert_same(*batches)


@pytest.mark.parametrize("publish", ["episode", "step"])
def test_S2_06_the_step_that_a_call_adds_is_drawn_from_in_the_middle_of_an_episode(tmp_path, publish):
    with make(tmp_path, publish=publish, spare_slots=2) as buffer:
        for t in range(4):
            batch = add_and_sample(buffer, step(t), 100, seed=t, timestep_level=True)
            assert set(batch["reward"].tolist()) == {10 * k + i for k in range(t + 1) for i in range(2)}


# S3: ReAgent


def test_S3_01_shapes_dtypes_capacity_and_options_each_have_a_place(tmp_path):
    """Fields say what is stored; stack_size, update_horizon and gamma are options of reading, not of the store."""
    fields = {"observation": ("uint8", (4, 4)), "action": "int32", "reward": "float32", "terminated": "uint8"}
    with make(tmp_path, fields=fields, capacity=100) as buffer:
        for t in range(4):
            buffer.add(observation=np.full((4, 4), t), action=t, reward=t, terminated=t == 3)
        stack = next(iter(buffer.dataloader(4, view=Offsets({"observation": range(-3, 1)}))))
        frames = stack["observation"][:, :, 0, 0].tolist()
        assert frames == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3]]
        nstep = next(iter(buffer.dataloader(4, n_steps=3, gamma=0.5)))
        assert nstep["_return"].tolist() == [0 + 0.5 + 0.5, 1 + 1 + 0.75, 2 + 1.5, 3]


def test_S3_02_any_capacity_serves_any_horizon(tmp_path):
    """Episodes are never cut by the ring, and what lies beyond one is padded, so there is nothing to refuse."""
    with make(tmp_path, 1, 2) as buffer:
        buffer.extend(**{name: np.stack([step(t, 1)[name] for t in range(4)]) for name in FIELDS})
        assert len(buffer.dataset(n_steps=5)) == 1 and len(buffer.dataset(view=Window(7))) == 2


def test_S3_03_and_S3_04_more_fields_are_checked_like_the_others_and_no_next_observation_is_passed(tmp_path):
    with make(tmp_path, 2, 3, fields={**FIELDS, "log_prob": "float", "mdp_id": "int"}) as buffer:
        good = {"observation": [1, 2], "action": 1, "reward": 0.5, "terminated": False, "log_prob": -1.0, "mdp_id": 7}
        bad = [
            {**good, "observation": [1, 2, 3]},
            {**good, "action": 0.5},
            {**good, "more": 1},
            {name: value for name, value in good.items() if name != "log_prob"},
        ]
        for wrong in bad:
            with pytest.raises(ValueError, match=r"shape|axes|not a whole number|not declared|missing"):
                buffer.add(**wrong)
        for t in range(9):
            buffer.add(**{**good, "observation": [t, t]})
        assert [e["observation"] for _, e in shown(buffer)] == [
            [[t, t] for t in part] for part in ((3, 4, 5, 6), (6, 7, 8))
        ]
        batch = next(iter(buffer.dataloader(10, n_steps=1)))
        assert batch["next_observation"].tolist() == [[t + 1, t + 1] for t in (3, 4, 5, 6, 7)]


def test_S3_05_the_first_step_may_declare_the_fields_and_lists_of_ids_have_scores(tmp_path):
    """Offsets are the sums of the lengths; narrowing from float64 is declared, never silent."""
    ids = [[3, 4], [], [5, 6, 7]]
    first = Schema.from_example({"observation": np.zeros(2, np.float64), "terminal": False})
    fields = {**first.fields, "ids": ("int64", (None,)), "scores": ("float32", (None,))}
    with make(tmp_path, fields=fields) as buffer:
        assert buffer.schema.fields["observation"].dtype == "float64"
        scores = [[0.5] * len(some) for some in ids]
        buffer.store_episode(observation=np.zeros((3, 2)), ids=ids, scores=scores, terminal=[0, 0, 1])
        batch = buffer.batch(timestep_level=True, ragged=True)
        assert batch["ids"].offsets().tolist() == [0, 2, 2, 5]
        assert batch["ids"].values().tolist() == [3, 4, 5, 6, 7]
        assert batch["scores"].offsets().tolist() == [0, 2, 2, 5]
        assert (batch["scores"].values() == 0.5).all()


def test_S3_05_the_first_add_declares_the_fields(tmp_path):
    """Ids, and ids with scores, are lists in a dict; the second of a step may have none."""
    ids = [[3, 4], [], [5, 6, 7]]
    with DeclaringBuffer(tmp_path, capacity=100, max_timesteps=9, publish="step") as memory:
        assert memory.buffer is None
        with pytest.raises(
            SchemaError, match="the first step lacks action, terminal; give observation, action, reward"
        ):
            memory.add(observation=1.0, reward=0.5)
        for t, some in enumerate(ids):
            memory.add(
                observation=np.full(2, t, np.float64),
                action=t,
                reward=t / 2,
                terminal=np.uint8(t == 2),
                seen={"pages": some, "clicks": (some, [0.5] * len(some)), "dense": np.zeros(3, np.float16)},
                log_prob=np.float64(-1.5),
            )
        assert {name: (field.dtype, field.shape) for name, field in memory.buffer.schema.fields.items()} == {
            "observation": ("float32", (2,)),
            "action": ("int64", ()),
            "reward": ("float32", ()),
            "terminal": ("uint8", ()),
            "seen.pages": ("int64", (None,)),
            "seen.clicks.item0": ("int64", (None,)),
            "seen.clicks.item1": ("float32", (None,)),
            "seen.dense": ("float16", (3,)),
            "log_prob": ("float32", ()),
        }
        batch = memory.buffer.batch(timestep_level=True, ragged=True)
        for lists in (batch["seen"]["pages"], batch["seen"]["clicks"]["item0"]):
            assert lists.offsets().tolist() == [0, 2, 2, 5] and lists.values().tolist() == [3, 4, 5, 6, 7]
        assert batch["seen"]["clicks"]["item1"].values().tolist() == [0.5] * 5
        memory.add(
            observation=[9, 9],
            action=1,
            reward=0,
            terminal=False,
            log_prob=0,
            seen={"pages": [], "clicks": ([], []), "dense": [1, 2, 3]},
        )
        assert memory.buffer.episode_lens.tolist() == [3, 1]  # `terminal` ended the first
    with DeclaringBuffer(tmp_path, capacity=100, max_timesteps=9) as again:
        with pytest.raises(SchemaMismatchError, match="observation"):
            again.add(observation=np.zeros(5), action=0, reward=0.0, terminal=False)
        assert again.buffer is None


def test_S3_06_no_blank_steps_are_stored(buffer):
    """What stands before an episode's first step is padded when it is read."""
    for t in range(4):
        buffer.add(**step(t, envs=1, ends=(0,) if t % 2 else ()))
    assert buffer.num_steps == 4
    batch = next(iter(buffer.dataloader(4, view=Offsets({"reward": [-1, 0]}))))
    assert batch["reward"].tolist() == [[0, 0], [0, 10], [0, 20], [20, 30]]
    assert batch["_mask_reward"].tolist() == [[False, True], [True, True]] * 2


def test_S3_07_how_much_there_is_and_ever_was(tmp_path):
    with make(tmp_path, 3, 2) as buffer:
        assert (is_empty(buffer), is_full(buffer), add_count(buffer), episode_count(buffer)) == (True, False, 0, 0)
        for t in range(10):
            buffer.add(**step(t, envs=1))
            assert add_count(buffer) == t + 1
        assert (is_empty(buffer), is_full(buffer), episode_count(buffer)) == (False, True, 5)
        assert buffer.num_steps == 6 and buffer.serials.tolist() == [2, 3, 4]
        assert (is_empty(ConcatBuffer([buffer])), episode_count(ConcatBuffer([buffer]))) == (False, 5)
        buffer.clear()
        assert (is_empty(buffer), is_full(buffer), add_count(buffer), episode_count(buffer)) == (True, False, 10, 5)
        with pytest.raises(SchemaError, match=r"cursor: the buffer has no capacity.*capacity="):
            cursor(buffer)
    with make(tmp_path / "steps", None, 9, capacity=6, circular=None) as buffer:
        for number in range(4):
            buffer.store_episode(**step(number))  # of two timesteps
            assert is_full(buffer) == (number >= 2)
    with make(tmp_path / "trimmed", 3, 9, capacity=5, circular=None) as buffer:
        for number in range(3):
            buffer.store_episode(**step(number))
        buffer.delete([-1])
        assert (buffer.num_steps, buffer.num_episodes, is_full(buffer)) == (3, 1, False)
        buffer.add(**step(3, envs=1))
        buffer.end_episodes()
        assert (buffer.num_steps, buffer.num_episodes, is_full(buffer)) == (4, 2, True)  # with the trimmed one


@pytest.mark.parametrize("publish", ["episode", "step"])
def test_S3_07_each_step_that_is_added_counts_and_the_cursor_goes_round(tmp_path, publish):
    """A reset that is left out is none; what was refused is none either."""
    with make(tmp_path, None, 9, capacity=7, publish=publish, skips_resets=True) as buffer:
        added = 0
        for t in range(8):
            buffer.add(**step(t, envs=3, ends=(1,) if t == 3 else ()))
            added += 2 if t == 4 else 3
            assert (add_count(buffer), cursor(buffer)) == (added, added % 7)
        with pytest.raises(SchemaError, match=r"missing|lacks"):
            buffer.add(reward=[1, 2, 3])
        assert add_count(buffer) == added
        buffer.end_episodes()
        buffer.extend(**{name: np.stack([step(t)[name] for t in range(4)]) for name in FIELDS})
        assert add_count(buffer) == added + 8
        buffer.end_episodes()
        buffer.add_field("more", ("int", (), 0))
        buffer.add(**step(0), more=[1, 2])
        assert add_count(buffer) == added + 10
    with ReplayBuffer.from_folder(tmp_path) as again:
        assert add_count(again) == 0  # by this object


def test_S3_08_a_buffer_for_an_environment_and_its_log_probabilities(tmp_path):
    """mdp_id and sequence_number are `_indices`: the serial of the episode and the timestep."""
    env = gymnasium.make("CartPole-v1")
    with ReplayBuffer.for_env(env, tmp_path, max_episodes=3, fields={"log_prob": "float"}) as buffer:
        assert list(buffer.schema.fields) == [
            *("observation", "action", "reward", "terminated", "truncated", "log_prob"),
        ]
        observation, _ = env.reset(seed=0)
        seen, ended = [observation], False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(1)
            flags = {"terminated": terminated, "truncated": truncated}
            buffer.add(
                observation=seen[-1], action=1, reward=reward, log_prob=-0.5, **flags, next_observation=observation
            )
            seen.append(observation)
            ended = terminated or truncated
        np.testing.assert_array_equal(buffer.episode(0)["observation"], np.array(seen))
        batch = next(iter(buffer.dataloader(100, timestep_level=True, return_indices=True)))
        assert batch["_indices"].tolist() == [[0, t] for t in range(len(seen) - 1)]
    with pytest.raises(SchemaError, match="observation: got Sequence"):
        env.observation_space = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2))
        ReplayBuffer.for_env(env, tmp_path / "other", max_episodes=3)


def test_S3_09_steps_are_marked_invalid_and_valid_again(buffer):
    for t in range(3):
        buffer.add(**step(t, envs=1, ends=(0,) if t == 2 else ()))
    batch = buffer.sample(1, timestep_level=True, return_indices=True, seed=0)
    set_valid(buffer, batch["_indices"], False)
    t = int(batch["_indices"][0, 1])
    assert buffer.episode(0)["valid"].tolist() == [k != t for k in range(3)]
    set_valid(buffer, batch["_indices"], True)
    assert buffer.episode(0)["valid"].all()


def test_S3_19_what_to_pass_and_what_is_stored_is_told(buffer):
    """`step_spec` and `storage_spec`; what a batch holds is the reading half's."""
    wanted = step_spec(buffer)
    buffer.add(**{name: np.ones(one.shape) for name, one in wanted.items() if one.required})
    assert {name: np.load(one.path).shape for name, one in storage_spec(buffer).items()} == {
        name: (21, 10 + one.final, *one.shape) for name, one in wanted.items()
    }


def test_S3_20_a_copy_is_taken_beside_the_writer_and_a_damaged_one_is_refused_before_anything_is_read(buffer, tmp_path):
    """The folder is the checkpoint; `snapshot` copies it at one moment."""
    buffer.add(**step(0, ends=(0, 1)))
    buffer.snapshot(tmp_path / "copy")
    buffer.add(**step(1, ends=(0, 1)))
    copy = ReplayBuffer.from_folder(tmp_path / "copy", read_only=True)
    assert rewards(copy) == [[0], [1]] and rewards(buffer) == [[0], [1], [10], [11]]
    (tmp_path / "copy" / "data" / "reward.npy").unlink()
    with pytest.raises((CorruptBufferError, FileNotFoundError), match=r"reward\.npy"):
        ReplayBuffer.from_folder(tmp_path / "copy")
    with pytest.raises(NotABufferError, match="no such folder"):
        ReplayBuffer.from_folder(tmp_path / "never")


# S4: memmap-replay-buffer


def test_S4_01_the_constructor_takes_its_arguments_in_its_order(tmp_path):
    buffer = ReplayBuffer(tmp_path, 2, 3, {"x": "float"}, {"task": "int"}, True, False, False, 1)
    assert (buffer.max_episodes, buffer.max_timesteps, buffer.circular, buffer.read_only) == (2, 3, True, False)
    buffer.close()


def test_S4_02_every_spelling_of_a_field(tmp_path):
    """`int` is int64 here, as torch and numpy mean it; nothing wraps."""
    fields = {"a": "float", "b": ("float", 3), "c": ("int", (2, 2), 7), "d": "bool", "e": ("uint8", (), 1)}
    known = Schema(fields).fields
    assert [(f.dtype, f.shape, f.default) for f in known.values()] == [
        *(("float32", (), None), ("float32", (3,), None), ("int64", (2, 2), 7), ("bool", (), None), ("uint8", (), 1)),
    ]
    with pytest.raises(SchemaError, match="'a' is used twice"):
        ReplayBuffer(tmp_path, 1, 1, fields, {"a": "int"})


def test_S4_03_numpy_opens_every_file_and_json_the_configuration(tmp_path):
    """Without pickle; `episode_lens` is in the records."""
    with make(tmp_path) as buffer:
        buffer.add(**step(3, envs=1, ends=(0,)))
        record = np.load(tmp_path / "episodes.npy")[0]
        assert record["length"] == 1 and buffer.episode_lens.tolist() == [1]
        assert np.load(tmp_path / "data" / "reward.npy", mmap_mode="r")[0, 0] == 30


def test_S4_04_it_is_opened_again_by_its_folder_and_every_difference_is_listed(tmp_path):
    make(tmp_path).close()
    assert ReplayBuffer.from_folder(tmp_path).fieldnames == tuple(FIELDS)
    with pytest.raises(SchemaMismatchError, match=r"(?s)max_timesteps: stored 10, given 11.*'reward'") as caught:
        make(tmp_path, max_timesteps=11, fields={**FIELDS, "reward": "int"})
    assert len(caught.value.differences) == 2
    with pytest.raises(ValueError, match="is not a buffer"):
        ReplayBuffer.from_folder(tmp_path / "data")


def test_S4_05_read_only_creates_and_changes_nothing(tmp_path):
    with pytest.raises(NotABufferError, match="no such folder"):
        make(tmp_path / "new", read_only=True)
    assert not (tmp_path / "new").exists()
    make(tmp_path).close()
    reader = ReplayBuffer.from_folder(tmp_path, read_only=True)
    calls = [
        *(lambda: reader.add(**step(0)), lambda: reader.extend(**step(0)), lambda: reader.drop_field("reward")),
        *(lambda: set_valid(reader, [[0, 0]]), lambda: reader.add_field("x", ("int", (), 0)), reader.clear),
        *(lambda: reader.rename_field("reward", "r"), lambda: reader.recompute("reward", np.array)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="read_only=True"):
            call()
    with pytest.raises(ReadOnlyError, match="exclude each other"):
        make(tmp_path, read_only=True, overwrite=True)


def test_S4_06_a_full_buffer_forgets_the_oldest_or_refuses(tmp_path):
    for circular in (True, False):
        with make(tmp_path / f"{circular}", 2, circular=circular) as buffer:
            for number in range(2):
                buffer.add(**step(number, envs=1, ends=(0,)))
            if circular:
                buffer.add(**step(2, envs=1, ends=(0,)))
                assert rewards(buffer) == [[10], [20]]
            else:
                with pytest.raises(BufferFullError, match="is full"), buffer.one_episode():
                    pass


def test_S4_07_lengths_and_limits(buffer):
    buffer.add(**step(0, ends=(0, 1)))
    assert len(buffer) == buffer.num_episodes == 2 and buffer.episode_lens.tolist() == [1, 1]
    assert (buffer.max_episodes, buffer.max_timesteps) == (20, 10)


META = {"task": "int", "success": "bool"}


def test_S4_08_an_episode_is_a_scope_with_meta_known_at_both_ends(tmp_path):
    with make(tmp_path, meta_fields=META) as buffer:
        with buffer.one_episode(task=3) as episode:
            buffer.store(**{name: value[0] for name, value in step(1).items()})
            episode["success"] = True
        for kind in (ValueError, KeyboardInterrupt):
            with pytest.raises(kind, match="boom"), buffer.one_episode(task=9):
                buffer.store(**{name: value[0] for name, value in step(2).items()})
                raise kind("boom")
        buffer.store_episode(observation=[[0, 0]], action=[0], reward=[5], terminated=[0])
        assert [(e["task"], e["success"], e["reward"]) for _, e in shown(buffer)] == [(3, True, [10]), (0, False, [5])]


def test_S4_09_a_step_is_checked_and_given_back_as_a_named_tuple(tmp_path):
    """A field that was not declared raises, where the original drops it."""
    with make(tmp_path, max_timesteps=2, fields={"x": ("float", 2), "n": ("int", (), 4)}) as buffer:
        with buffer.one_episode() as episode:
            stored = episode.store(x=torch.ones(2))
            assert stored.x.tolist() == [1, 1] and stored.n == 4
            for bad, text in (({"x": [1]}, "shape"), ({"x": [1, 2], "y": 1}, "not declared")):
                with pytest.raises(ValueError, match=text):
                    episode.store(**bad)
            episode.store(x=[2, 2], n=np.int64(5))
            with pytest.raises(ValueError, match="max_timesteps"):
                episode.store(x=[3, 3])
        assert shown(buffer)[0][1] == {"x": [[1, 1], [2, 2]], "n": [4, 5]}


def test_S4_10_to_S4_14_are_what_memmap_replay_buffer_stores_too(tmp_path):
    """Whole episodes, groups, updates and datapoints by the same calls to both; `get_all_data` of both is equal."""
    peer = pytest.importorskip("memmap_replay_buffer")
    fields, meta = {"x": ("float", 2), "n": ("float", (), 0.0)}, {"score": ("float", ()), "pair": ("float", 2)}
    rng, results = np.random.default_rng(0), []
    x, n, batch = rng.random((3, 2)), rng.random(3), rng.random((4, 2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, folder in ((peer.ReplayBuffer, "theirs"), (ReplayBuffer, "ours")):
            buffer = kind(str(tmp_path / folder), 6, 5, fields, meta_fields=meta)
            buffer.store_episode(x=x.astype("f4"), n=n.astype("f4"), score=np.float32(1), pair=np.ones(2, "f4"))
            with buffer.batched_episode(2, score=torch.tensor([2.0, 3.0]), pair=torch.ones(2, 2)):
                for t in range(4):
                    buffer.store_batch(x=torch.tensor(batch[t]).float(), n=torch.tensor([t, 2.0 * t]))
            buffer.update([0, 1], score=torch.tensor([7.0, 8.0]))
            buffer.update(2, n=np.array([9.0, 9.0], "f4"))
            buffer.store_meta_datapoint(2, "score", 4.0)
            buffer.store_datapoint(0, 1, "n", 0.25)
            data = buffer.get_all_data()
            results.append({name: data[name].tolist() for name in ("x", "n", "score", "pair")})
            buffer.flush()
            buffer.clear()
            assert buffer.num_episodes == 0
    assert results[0] == results[1]


def test_S4_11_a_batch_that_does_not_fit_is_refused_whole(tmp_path):
    """Where the original cuts it silently to what is left."""
    with (
        make(tmp_path, 2, circular=False) as buffer,
        pytest.raises(BufferFullError, match="is full"),
        buffer.batched_episode(3),
    ):
        pass


@pytest.mark.parametrize(
    ("indices", "changed"),
    [(None, {0, 1, 2}), (1, {1}), ([0, 2], {0, 2}), (np.array([1]), {1}), (slice(1, None), {1, 2})],
)
def test_S4_12_episodes_are_updated_by_any_kind_of_index(buffer, indices, changed):
    buffer.add(**step(0, envs=3, ends=(0, 1, 2)))
    buffer.update(indices, action=7)
    assert [episode["action"] for _, episode in shown(buffer)] == [[7] if i in changed else [i] for i in range(3)]


def test_S4_13_episodes_advance_and_a_buffer_is_cleared_by_either_name(tmp_path):
    with make(tmp_path, meta_fields=META) as buffer:
        buffer.begin_episode()
        for number in range(3):
            buffer.store(**{name: value[0] for name, value in step(number).items()})
            buffer.advance_episode()
        assert rewards(buffer) == [[0], [10], [20]]
        buffer.store_meta_datapoint(1, "task", 5)
        buffer.store_datapoint(2, 0, "reward", 9)
        assert shown(buffer)[1][1]["task"] == 5 and rewards(buffer)[2] == [9]
        buffer.flush()
        for clear in (buffer.clear, buffer.reset_):
            clear()
            assert len(buffer) == 0
            buffer.store_episode(observation=[[0, 0]], action=[0], reward=[5], terminated=[0])


def test_S4_15_the_collector_publishes_each_group_as_an_episode(tmp_path):
    """As the original does, by `store_episode` of each group's steps and meta; the rest is in test_collector.py."""
    fields, meta = {"x": ("float", 2), "r": "float"}, {"score": "float"}
    rng = np.random.default_rng(0)
    steps = [{"x": rng.random((3, 2)), "r": rng.random(3)} for _ in range(4)]
    with (
        ReplayBuffer(tmp_path / "collected", 6, 5, fields, meta) as buffer,
        ReplayBuffer(tmp_path / "stored", 6, 5, fields, meta) as other,
    ):
        collector = buffer.create_collector(3)
        for one in steps:
            collector.append(**one)
        collector.store(score=[1.0, 2.0, 3.0])
        for i in range(3):
            other.store_episode(x=[one["x"][i] for one in steps], r=[one["r"][i] for one in steps], score=i + 1.0)
        assert shown(buffer) == shown(other) and len(buffer) == 3


def test_S4_16_several_folders_are_read_as_one_and_written_each_by_itself(tmp_path):
    for name in "ab":
        with make(tmp_path / name) as buffer:
            buffer.add(**step(ord(name), envs=1, ends=(0,)))
    both = ConcatBuffer.from_root(tmp_path)
    assert both.get_all_data()["reward"].tolist() == [[970], [980]]
    with pytest.raises(ReadOnlyError, match="only reads"):
        both.add(**step(0))


# S5: nnabla-rl


def test_S5_01_an_experience_is_an_item_whose_observation_may_be_a_tuple(tmp_path):
    """(s, a, r, non_terminal, s_next): an item with n_steps=1, non_terminal as `_discount`; info is more fields."""
    example = {"observation": (np.zeros(2, np.float32), np.zeros(3, np.float32)), "action": 0, "reward": 0.0}
    fields = Schema.from_example(example).fields
    fields = {name: Field(f.dtype, f.shape, final=name.startswith("observation")) for name, f in fields.items()}
    with make(tmp_path, fields={**fields, "terminated": "bool", "info": {"cost": "float"}}) as buffer:
        for t in range(3):
            pair, following = (np.full(2, t), np.full(3, t)), (np.full(2, t + 1), np.full(3, t + 1))
            given = {"action": t, "reward": t, "terminated": t == 2, "info": {"cost": t / 2}}
            buffer.add(observation=pair, **given, next_observation=following)
        batch = next(iter(buffer.dataloader(3, n_steps=1, gamma=1.0)))
        assert batch["observation"]["item1"][:, 0].tolist() == [0, 1, 2]
        assert batch["next_observation"]["item0"][:, 0].tolist() == [1, 2, 3]
        assert batch["_discount"].tolist() == [1, 1, 0] and batch["info"]["cost"].tolist() == [0, 0.5, 1]


def test_S5_02_one_by_one_or_many_and_addressed_from_the_oldest(tmp_path):
    """`append` is `add`, `append_all` is `extend`, `capacity` is `capacity`; an index counts timesteps of a dataset.

    Unbounded is a generous max_episodes: the files are sparse, and nothing is taken before it is written.
    """
    with make(tmp_path, 4, 3, capacity=6) as buffer:
        for t in range(4):
            buffer.add(**step(t, envs=1))
        buffer.extend(**{name: np.stack([step(t, 1)[name] for t in range(4, 9)]) for name in FIELDS})
        items = buffer.dataset(timestep_level=True)
        assert [item["reward"].item() for item in (items[i] for i in range(len(items)))] == [30, 40, 50, 60, 70, 80]
