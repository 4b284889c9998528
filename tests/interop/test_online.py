"""`OnlineBatches`: recording and training by turns, against the plain loop that it stands for."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from conftest import assert_same
from gymnasium.wrappers import Autoreset

from memmap_buffer import Prioritized, ReplayBuffer, SchemaError
from memmap_buffer.interop.online import OnlineBatches


class Counting(gymnasium.Env):
    """Episode k has k + 2 steps; observations are (episode, timestep)."""

    observation_space = gymnasium.spaces.Box(0, 100, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self):
        self.episode, self.t, self.seeds = -1, 0, []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.episode, self.t = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        return self._observe(), float(action), self.t == self.episode + 2, False, {}

    def _observe(self):
        return np.array([self.episode, self.t], np.float32)


def policy(observation):
    return int(observation.sum()) % 3, {"log_prob": -float(observation[1])}


@pytest.fixture
def make(tmp_path):
    made = []

    def buffer(name="buffer", **options):
        how = {"max_episodes": 20, "max_timesteps": 10, "publish": "step", "fields": {"log_prob": "float"}, **options}
        made.append(ReplayBuffer.for_env(Counting(), tmp_path / name, **how))
        return made[-1]

    yield buffer
    for each in made:
        each.close()


def test_S3_22_it_is_the_loop_that_steps_stores_and_samples(make):
    ended = []
    options = {"timestep_level": True, "return_indices": True}
    buffer, env = make(), Counting()
    online = OnlineBatches(
        *(buffer, env, policy, 4),
        **{"training_frequency": 3, "num_episodes": 3, "seed": 7, "after_episode": lambda *told: ended.append(told)},
        **options,
    )
    torch.manual_seed(0)
    batches = list(online)
    torch.manual_seed(0)
    wanted, steps = [], 0
    plain, other = make("plain"), Counting()
    for _ in range(3):
        observation, over = other.reset()[0], False
        while not over:
            action, more = policy(observation)
            following, reward, over, _, _ = other.step(action)
            last = {"next_observation": following} if over else {}
            step = {"observation": observation, "action": action, "reward": reward, **more, **last}
            plain.add(**step, terminated=over, truncated=False)
            observation, steps = following, steps + 1
            if steps % 3 == 0 and plain.num_steps >= 4:
                wanted.append(plain.sample(4, **options))
    assert len(batches) == len(wanted) == 2
    for got, want in zip(batches, wanted, strict=True):
        assert_same(got, want)
    for i in range(3):
        got, want = buffer.episode(i), plain.episode(i)
        assert all(np.array_equal(got[name], want[name]) for name in want)
    assert env.seeds == [7, None, None]
    assert ended == [(i, plain.episode(i)["reward"].sum()) for i in range(3)]
    assert "9 steps played" in repr(online)


def test_priorities_may_be_given_between_batches(make):
    buffer = make(publish="episode")
    online = OnlineBatches(buffer, Counting(), policy, 2, num_episodes=4, n_steps=1, prioritized=Prioritized(epsilon=0))
    gone = [buffer.update_priorities(batch["_indices"], np.ones(2)) for batch in online]
    assert len(gone) > 5
    assert not any(gone)


def test_an_episode_is_truncated_after_max_steps_and_cut_short_where_the_loop_is_left(make):
    buffer = make()
    online = OnlineBatches(buffer, Counting(), policy, 1, max_steps=2, num_episodes=4, timestep_level=True)
    list(online)
    assert buffer.episode_lens.tolist() == [2, 2, 2, 2]
    assert [bool(buffer.episode(i)["truncated"][-1]) for i in range(4)] == [True] * 4
    assert len(buffer.episode(3)["observation"]) == 3  # the final one too
    batches = iter(online)
    next(batches)
    batches.close()
    assert buffer.episode_lens.tolist() == [2, 2, 2, 2, 1]
    assert not buffer.episode(4)["truncated"].any()
    next(iter(online))
    assert buffer.num_episodes == 6


def test_of_an_environment_that_could_reset_itself_the_first_steps_are_stored_too(tmp_path):
    env = Autoreset(Counting())
    with ReplayBuffer.for_env(env, tmp_path / "data", max_episodes=9, max_timesteps=9) as buffer:
        assert list(OnlineBatches(buffer, env, lambda _: 0, 1, num_episodes=3, warm_up=99)) == []
        assert buffer.episode_lens.tolist() == [2, 3, 4]
        assert buffer.episode(2)["observation"].tolist() == [[2, t] for t in range(5)]


def test_what_it_cannot_play_is_refused(make):
    with pytest.raises(SchemaError, match="env: got a vector, expected one environment"):
        OnlineBatches(make(), gymnasium.make_vec("CartPole-v1", 2), policy, 4)
    with pytest.raises(SchemaError, match="max_steps: got 0"):
        OnlineBatches(make(), Counting(), policy, 4, max_steps=0)


@pytest.mark.parametrize(
    "how",
    [
        {"capacity": 2},
        {"publish": "episode", "durability": "power", "sync_every": 3, "spare_slots": 4},
    ],
    ids=["a ring of fewer steps", "episodes that wait for others"],
)
def test_the_serial_of_each_episode_is_told_whatever_is_seen_of_it(make, how):
    told = []
    after = {"num_episodes": 3, "after_episode": lambda serial, _: told.append(serial)}
    assert list(OnlineBatches(make(**how), Counting(), policy, 4, warm_up=99, **after, timestep_level=True)) == []
    assert told == [0, 1, 2]
