"""`for_env` with a capacity: a loop of online learning draws what it added, as from a plain list of transitions."""

import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import Autoreset, vector

from memmap_buffer import Field, ReplayBuffer, SchemaError, SchemaMismatchError, pack, unpack

GAMMA = 0.9


class Walk(gymnasium.Env):
    """It observes its number and a count that never repeats; its episodes are 1 to 5 steps, ended in either way."""

    observation_space = Box(-1e6, 1e6, (2,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, number):
        self.number, self.count, self.episode = number, -1, -1

    def observe(self):
        self.count += 1
        return np.array([self.number, self.count], np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        over = self.t == 1 + (self.number + 3 * self.episode) % 5
        terminated = over and self.episode % 3 > 0
        return self.observe(), float(self.t), terminated, over and not terminated, {}


def walks(count, mode=AutoresetMode.NEXT_STEP, kind=SyncVectorEnv):
    return kind([lambda i=i: Walk(i) for i in range(count)], autoreset_mode=mode)


def play(envs, buffer, steps):
    """Step and add, as a program of one file does; after each step all transitions, a list for each step."""
    mode, plain = envs.metadata["autoreset_mode"], []
    observations, _ = envs.reset()
    over = np.zeros(envs.num_envs, bool)
    for t in range(steps):
        actions = np.full((envs.num_envs, 1), t / steps, np.float32)
        following, rewards, terminated, truncated, infos = envs.step(actions)
        ended, last = terminated | truncated, following.copy()
        if mode is AutoresetMode.SAME_STEP and ended.any():
            last[ended] = np.stack(infos["final_obs"][ended])
        step = {"observation": observations, "action": actions, "reward": rewards}
        step |= {"terminated": terminated, "truncated": truncated, "next_observation": last}
        buffer.add(**step)
        resets = over if mode is AutoresetMode.NEXT_STEP else np.zeros(envs.num_envs, bool)
        plain.append([row(step, i) for i in np.flatnonzero(~resets)])
        observations, over = following, ended
        if mode is AutoresetMode.DISABLED and ended.any():
            observations, _ = envs.reset(options={"reset_mask": ended})
        yield plain


def row(step, i):
    """A transition as a tuple: its observation, action, reward, ends, the next observation."""
    names = ("observation", "action", "reward", "terminated", "truncated", "next_observation")
    return tuple(float(value) for name in names for value in np.ravel(step[name][i]))


def rows(batch):
    return [row(batch, i) for i in range(len(batch["reward"]))]


def check(buffer, plain, capacity, *, open_ones=True):
    """What can be drawn is the newest `capacity` transitions; of the vector's step that is left in part, any.

    Those whose next observation comes with the next step cannot be drawn yet.
    """
    every = [one for rounds in plain for one in rounds]
    latest = {one[0]: one for one in every}
    goes_on = {one for one in latest.values() if open_ones and not (one[4] or one[5])}
    count, whole, part = 0, set(), set()
    while plain and count < capacity:
        *plain, part = plain
        count += len(part)
        whole |= set(part) if count <= capacity else set()
    found = rows(buffer.batch(n_steps=1))
    assert buffer.num_steps == min(capacity, len(every))
    assert len(set(found)) == len(found)
    assert whole - goes_on <= set(found) <= (whole | set(part)) - goes_on
    if not open_ones:
        assert len(found) == buffer.num_steps
    return set(found)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_ring_holds_the_newest_transitions_that_a_plain_list_holds(tmp_path, mode, count):
    envs = walks(count, mode)
    with ReplayBuffer.for_env(envs, tmp_path, capacity=20) as buffer:
        for t, plain in enumerate(play(envs, buffer, 60 // count + 20)):
            if t > 2:
                found = check(buffer, plain, 20)
                assert set(rows(buffer.sample(16, n_steps=1, gamma=GAMMA))) <= found
        buffer.end_episodes()
        check(buffer, plain, 20, open_ones=False)
    with ReplayBuffer.for_env(envs, tmp_path, capacity=20) as again:
        check(again, plain, 20, open_ones=False)


@pytest.mark.parametrize("publish", ["step", "episode"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_episodes_longer_than_max_timesteps_are_cut_and_lose_no_transition(tmp_path, mode, publish):
    envs = walks(4, mode)
    with ReplayBuffer.for_env(envs, tmp_path, capacity=1000, max_timesteps=2, publish=publish) as buffer:
        *_, plain = play(envs, buffer, 40)
        buffer.end_episodes()
        check(buffer, plain, 1000, open_ones=False)


def test_environments_in_other_processes_are_as_good(tmp_path):
    envs = walks(2, AutoresetMode.SAME_STEP, AsyncVectorEnv)
    with ReplayBuffer.for_env(envs, tmp_path, capacity=15) as buffer:
        *_, plain = play(envs, buffer, 20)
        check(buffer, plain, 15)
    envs.close()


def test_a_wrapped_vector_tells_its_autoreset_mode_too(tmp_path):
    envs = vector.RecordEpisodeStatistics(walks(2))
    with ReplayBuffer.for_env(envs, tmp_path, capacity=15) as buffer:
        *_, plain = play(envs, buffer, 20)
        check(buffer, plain, 15)


def test_returns_and_discounts_are_those_of_the_loss(tmp_path):
    envs = walks(3)
    with ReplayBuffer.for_env(envs, tmp_path, capacity=500) as buffer:
        *_, _ = play(envs, buffer, 50)
        batch = buffer.sample(256, n_steps=1, gamma=GAMMA)
        assert torch.equal(batch["_return"], batch["reward"])
        torch.testing.assert_close(batch["_discount"], GAMMA * (1 - batch["terminated"].float()))
        assert batch["terminated"].any() and batch["truncated"].any()


@pytest.mark.parametrize("resets", [True, False])
def test_a_single_environment_needs_no_axis(tmp_path, resets):
    env, plain, over = Autoreset(Walk(0)) if resets else Walk(0), [], False
    with ReplayBuffer.for_env(env, tmp_path, capacity=12) as buffer:
        observation, _ = env.reset()
        for _ in range(30):
            following, reward, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
            step = {"observation": observation, "action": np.zeros(1, np.float32), "reward": reward}
            step |= {"terminated": terminated, "truncated": truncated, "next_observation": following}
            buffer.add(**step)
            if not (over and resets):
                plain.append([row({name: [value] for name, value in step.items()}, 0)])
            over, observation = terminated or truncated, following
            if over and not resets:
                observation, _ = env.reset()
        check(buffer, plain, 12)


# Sizes


def test_a_ring_of_fewer_steps_than_environments_is_one(tmp_path):
    envs = walks(7)
    with ReplayBuffer.for_env(envs, tmp_path, capacity=3) as buffer:
        *_, plain = play(envs, buffer, 30)
        buffer.end_episodes()
        check(buffer, plain, 3, open_ones=False)


def test_a_capacity_is_the_only_size_to_be_given(tmp_path):
    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")])
    with ReplayBuffer.for_env(envs, tmp_path, capacity=50_000) as buffer:
        assert (buffer.capacity, buffer.max_timesteps, buffer.circular) == (50_000, 500, True)
        assert (buffer.max_episodes, buffer.spare_slots) == (5_000, 500)
        observations, _ = envs.reset(seed=0)
        following, *_ = envs.step(np.array([1]))
        step = {"observation": observations, "action": [1], "reward": [1.0], "terminated": [False]}
        buffer.add(**step, truncated=[False], next_observation=following)
        assert buffer.num_steps == 1  # visible at once


def test_without_a_time_limit_episodes_are_cut_and_go_on(tmp_path):
    with ReplayBuffer.for_env(Walk(0), tmp_path / "a", capacity=5) as buffer:
        assert buffer.max_timesteps == 1000
    with pytest.raises(SchemaError, match="max_timesteps: got None, and the environment has no time limit"):
        ReplayBuffer.for_env(Walk(0), tmp_path / "b", max_episodes=5)


def test_there_is_a_slot_for_each_environment_of_a_large_vector(tmp_path):
    envs = walks(70)
    with ReplayBuffer.for_env(envs, tmp_path / "a", capacity=100) as buffer:
        assert buffer.spare_slots == 70
        for plain in play(envs, buffer, 12):
            check(buffer, plain, 100)
    ring = {"max_episodes": 9, "max_timesteps": 9, "publish": "step", "circular": True}
    with ReplayBuffer.for_env(walks(3), tmp_path / "b", **ring) as buffer:
        assert (buffer.spare_slots, buffer.capacity) == (3, None)
    with pytest.raises(SchemaMismatchError, match="spare_slots: stored 3, given 4"):
        ReplayBuffer.for_env(walks(4), tmp_path / "b", **ring)


class Precise(Walk):
    """Its observations and actions are float64, as those of MuJoCo, and no float32."""

    observation_space = Box(-1e6, 1e6, (2,), np.float64)
    action_space = Box(-1, 1, (1,), np.float64)

    def observe(self):
        return super().observe().astype(np.float64) + 0.1


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_observations_and_actions_of_float64_are_stored_as_the_dtype_that_is_asked_for(tmp_path, mode):
    envs = SyncVectorEnv([lambda i=i: Precise(i) for i in range(3)], autoreset_mode=mode)
    with ReplayBuffer.for_env(envs, tmp_path, capacity=60, dtype="float32") as buffer:
        *_, plain = play(envs, buffer, 15)
        batch = buffer.batch(n_steps=1, format="numpy")
        assert batch["observation"].dtype == batch["next_observation"].dtype == batch["action"].dtype == np.float32
        rounded = {tuple(np.float32(one).tolist()) for steps in plain for one in steps}
        assert len({*rows(batch)}) == len(rows(batch)) > 25 and {*rows(batch)} <= rounded


def test_fields_may_be_others_in_the_place_of_these(tmp_path):
    halves = Field("float16", (2,), final=True)
    with ReplayBuffer.for_env(Walk(0), tmp_path, capacity=5, fields={"observation": halves, "value": "float"}) as made:
        assert made.schema.fields["observation"] == halves
        assert made.fieldnames[-1] == "value"


OPENERS = {
    "from_folder": lambda folder, buffer: ReplayBuffer.from_folder(folder),
    "constructor": lambda folder, buffer: ReplayBuffer(
        folder, capacity=1000, max_timesteps=buffer.max_timesteps, fields=buffer.schema
    ),
}


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_whoever_opens_the_folder_leaves_out_resets_as_who_created_it(tmp_path, mode, opener):
    envs = walks(3, mode)
    with ReplayBuffer.for_env(envs, tmp_path, capacity=1000, max_timesteps=9) as buffer:
        *_, first = play(envs, buffer, 20)
    with OPENERS[opener](tmp_path, buffer) as again:
        *_, plain = play(envs, again, 30)
        again.end_episodes()
        assert again.num_steps == sum(map(len, first + plain))
        check(again, first + plain, 1000, open_ones=False)
        again.add_field("more", ("int", (), 0))  # opens its files anew
        *_, last = play(envs, again, 30)
        again.end_episodes()
        assert again.num_steps == sum(map(len, first + plain + last))


def test_an_environment_of_another_mode_goes_by_its_own_and_the_folder_keeps_the_first(tmp_path):
    modes = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
    for ours, other in (modes, modes[::-1]):
        folder, plains = tmp_path / ours.name, []
        for mode in (ours, other, None):
            envs = walks(3, mode or ours)
            made = ReplayBuffer.from_folder(folder) if mode is None else None
            with made or ReplayBuffer.for_env(envs, folder, capacity=1000, max_timesteps=9) as buffer:
                *_, plain = play(envs, buffer, 20)
            plains.append(plain)
        assert buffer.num_steps == sum(len(one) for plain in plains for one in plain)


def test_copies_keep_whether_resets_are_left_out_and_older_folders_say_nothing(tmp_path):
    envs = walks(2)
    with ReplayBuffer.for_env(envs, tmp_path / "a", capacity=1000, max_timesteps=9) as buffer:
        *_, first = play(envs, buffer, 20)
        buffer.end_episodes()
        buffer.snapshot(tmp_path / "snapshot")
        pack(tmp_path / "a", tmp_path / "packed")
        unpack(tmp_path / "packed", tmp_path / "unpacked", max_episodes=100)
    for name in ("a", "snapshot", "packed", "unpacked"):
        assert json.loads((tmp_path / name / "schema.json").read_text())["skips_resets"] is True
    for name in ("a", "snapshot", "unpacked"):
        with ReplayBuffer.from_folder(tmp_path / name) as copied:
            *_, plain = play(envs, copied, 20)
            copied.end_episodes()
            assert copied.num_steps == sum(map(len, first + plain))
    with ReplayBuffer.for_env(walks(2, AutoresetMode.SAME_STEP), tmp_path / "b", capacity=9, max_timesteps=9):
        assert "skips_resets" not in json.loads((tmp_path / "b" / "schema.json").read_text())


@pytest.mark.parametrize("value", [1, None, "true", []])
def test_a_rule_of_resets_that_a_stranger_wrote_is_looked_at(tmp_path, value):
    ReplayBuffer(tmp_path, 1, 1, {"x": "int"}).close()
    schema = json.loads((tmp_path / "schema.json").read_text())
    (tmp_path / "schema.json").write_text(json.dumps({**schema, "skips_resets": value}))
    with pytest.raises(SchemaError, match=r"skips_resets: got .*, expected bool"):
        ReplayBuffer.from_folder(tmp_path)
