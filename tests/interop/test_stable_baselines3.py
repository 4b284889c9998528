"""Replay buffers for Stable-Baselines3 give what its own give, and a run goes on from their folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import open_episodes, transitions_of

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
import torch
from fault_injection import in_child
from gymnasium import spaces
from stable_baselines3 import DDPG, DQN, SAC, TD3
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer as TheirBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import VecNormalize

from memmap_buffer import NotEnoughDataError, ReplayBuffer, SchemaMismatchError, verify
from memmap_buffer.interop.stable_baselines3 import DiskHerReplayBuffer, DiskReplayBuffer

BOX = spaces.Box(-(2**20), 2**20, (2,), np.float32)
ACTIONS = spaces.Box(-1, 1, (3,), np.float32)
PAIR = spaces.Dict(
    {"bottom burner": BOX, "image": spaces.Box(0, 255, (1, 4, 4), np.uint8), "state": spaces.Discrete(9)}
)


def small() -> dict[str, Any]:
    """Arguments of a model; they change the dict in it."""
    return {"learning_starts": 40, "policy_kwargs": {"net_arch": [8]}, "batch_size": 16, "seed": 0}


def transitions(seed: int, count: int, num_envs: int, space: Any) -> list[tuple[Any, ...]]:
    """What an algorithm adds: every observation has a number of its own, and stands behind the step before."""
    rng, number = np.random.default_rng(seed), iter(range(10**6))

    def observed() -> Any:
        tags = np.array([next(number) for _ in range(num_envs)])
        if space is BOX:
            return np.stack([tags, -tags], axis=1).astype(np.float32)
        image = np.broadcast_to((tags % 251).astype(np.uint8)[:, None, None, None], (num_envs, 1, 4, 4)).copy()
        return {"bottom burner": np.stack([tags, -tags], 1).astype(np.float32), "image": image, "state": tags % 9}

    def chosen(done: Any, one: Any, other: Any) -> Any:
        if isinstance(one, dict):
            return {key: chosen(done, one[key], other[key]) for key in one}
        return np.where(done.reshape(-1, *[1] * (one.ndim - 1)), one, other)

    out, obs = [], observed()
    for _ in range(count):
        following, ends = observed(), rng.random(num_envs)
        done, late = ends < 0.2, ends < 0.1
        infos = [{"TimeLimit.truncated": bool(flag)} for flag in late]
        action, reward = rng.uniform(-1, 1, (num_envs, 3)), rng.standard_normal(num_envs)
        out.append((obs, following, action, reward, done, infos))
        obs = chosen(done, observed(), following)
    return out


def rows(samples: Any) -> set[tuple[float, ...]]:
    """A batch as a set of transitions."""
    columns = []
    for part in samples:
        for values in part.values() if isinstance(part, dict) else [] if part is None else [part]:
            columns.append(np.asarray(values, np.float64).reshape(len(values), -1))
    return {tuple(row) for row in np.concatenate(columns, axis=1).round(5).tolist()}


def every(buffer: TheirBuffer, num_envs: int, monkeypatch: pytest.MonkeyPatch, env: Any = None) -> Any:
    """All transitions that one of their buffers holds."""
    count = buffer.size()
    out = []
    for i in range(num_envs):
        monkeypatch.setattr(np.random, "randint", lambda *_, size, i=i, **__: np.full(size, i))
        out.append(rows(buffer._get_samples(np.arange(count), env=env)))
    monkeypatch.undo()
    return set().union(*out)


def ours(buffer: DiskReplayBuffer, env: Any = None) -> set[tuple[float, ...]]:
    return rows(transitions_of(buffer, env))


@pytest.mark.parametrize("capacity", [30, 10**4])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    ("kind", "space", "options"),
    [(TheirBuffer, BOX, {}), (DictReplayBuffer, PAIR, {}), (NStepReplayBuffer, BOX, {"n_steps": 3, "gamma": 0.9})],
    ids=["box", "dict", "n-step"],
)
def test_the_transitions_are_those_of_their_own_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, space: Any, options: Any, num_envs: int, capacity: int
) -> None:
    theirs = kind(capacity, space, ACTIONS, device="cpu", n_envs=num_envs, **options)
    buffer = DiskReplayBuffer(capacity, space, ACTIONS, "cpu", num_envs, folder=tmp_path, max_timesteps=7, **options)
    for i, transition in enumerate(transitions(1, 60, num_envs, space)):
        theirs.add(*transition)
        buffer.add(*transition)
        assert (buffer.size(), buffer.pos, buffer.full) == (theirs.size(), theirs.pos, theirs.full)
        if i % 20 == 10 and not options:
            assert ours(buffer) <= every(theirs, num_envs, monkeypatch)
    buffer.disk.end_episodes()
    found, expected = ours(buffer), every(theirs, num_envs, monkeypatch)
    if options:  # an episode that is stored in parts gives fewer steps at the end of each
        assert found & expected and len(found) == len(expected)
    else:
        assert found == expected
    assert verify(tmp_path) == []


def test_images_alone_are_compressed_and_come_back_as_they_were(tmp_path: Path) -> None:
    space = spaces.Dict({"image": spaces.Box(0, 255, (1, 9, 9), np.uint8), "state": spaces.Box(0, 255, (3,), np.uint8)})
    buffer = DiskReplayBuffer(64, space, spaces.Discrete(2), "cpu", folder=tmp_path / "disk", codec="zstd")
    fields = buffer.disk.schema.fields
    assert [name for name, field in fields.items() if field.codec is not None] == ["observation.image"]
    images = np.random.default_rng(0).integers(0, 3, (21, 1, 1, 9, 9), dtype=np.uint8)
    now = [{"image": image, "state": np.full((1, 3), t, np.uint8)} for t, image in enumerate(images)]
    for t in range(20):
        buffer.add(now[t], now[t + 1], np.zeros(1, int), np.zeros(1), np.array([t == 19]), [{}])  # type: ignore[arg-type]
    batch: Any = buffer.sample(16)
    steps = batch.observations["state"][:, 0].long().numpy()
    np.testing.assert_array_equal(batch.observations["image"], images[steps, 0])
    np.testing.assert_array_equal(batch.next_observations["image"], images[steps + 1, 0])


@pytest.mark.parametrize("num_envs", [1, 2])
def test_returns_of_several_steps_are_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_envs: int) -> None:
    options = {"n_steps": 4, "gamma": 0.9}
    theirs = NStepReplayBuffer(50 * num_envs, BOX, ACTIONS, device="cpu", n_envs=num_envs, **options)
    buffer = DiskReplayBuffer(50 * num_envs, BOX, ACTIONS, "cpu", num_envs, folder=tmp_path, **options)
    for transition in transitions(2, 130, num_envs, BOX):
        theirs.add(*transition)
        buffer.add(*transition)
    buffer.disk.end_episodes()
    assert ours(buffer) == every(theirs, num_envs, monkeypatch)


@pytest.mark.parametrize("options", [{}, {"n_steps": 3}])
def test_batches_are_normalised_as_theirs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    env = VecNormalize(make_vec_env("Pendulum-v1", 1, seed=0), clip_reward=0.7)
    env.reset()
    kind = NStepReplayBuffer if options else TheirBuffer
    theirs = kind(500, env.observation_space, env.action_space, device="cpu", **options)
    buffer = DiskReplayBuffer(500, env.observation_space, env.action_space, "cpu", folder=tmp_path, **options)
    before = env.get_original_obs()
    for _ in range(100):
        action = np.array([env.action_space.sample()])
        _, _, done, infos = env.step(action)
        transition = before, env.get_original_obs(), action, env.get_original_reward(), done, infos
        before = env.get_original_obs()
        theirs.add(*transition)
        buffer.add(*transition)
    buffer.disk.end_episodes()
    assert ours(buffer, env) == every(theirs, 1, monkeypatch, env)


def test_a_transition_that_follows_from_nowhere_begins_another_episode(tmp_path: Path) -> None:
    buffer = DiskReplayBuffer(100, BOX, ACTIONS, "cpu", folder=tmp_path)
    for number in (1, 5, 6, 9):
        here, there = (np.full((1, 2), n, np.float32) for n in (number, number + 1))
        buffer.add(here, there, np.zeros((1, 3)), np.zeros(1), np.zeros(1), [{}])
    buffer.disk.end_episodes()
    pairs = {(row[0], row[5]) for row in ours(buffer)}
    assert pairs == {(1.0, 2.0), (5.0, 6.0), (6.0, 7.0), (9.0, 10.0)}
    assert buffer.disk.episode_lens.tolist() == [1, 2, 1]


def test_observations_that_are_no_numbers_go_on_and_zeros_keep_their_sign(tmp_path: Path) -> None:
    buffer = DiskReplayBuffer(100, BOX, ACTIONS, "cpu", folder=tmp_path)
    for here, there in ((1, np.nan), (np.nan, 2), (2, -0.0), (0.0, 3)):
        pair = (np.full((1, 2), value, np.float32) for value in (here, there))
        buffer.add(*pair, np.zeros((1, 3)), np.zeros(1), np.zeros(1), [{}])
    buffer.disk.end_episodes()
    assert buffer.disk.episode_lens.tolist() == [3, 1]
    ends = transitions_of(buffer).next_observations[:, 0]
    assert ends.isnan().tolist() == [True, False, False, False] and ends.signbit().tolist()[2]


def test_the_first_transition_can_be_drawn_at_once(tmp_path: Path) -> None:
    buffer = DiskReplayBuffer(100, BOX, ACTIONS, "cpu", folder=tmp_path)
    with pytest.raises(NotEnoughDataError, match="nothing to read"):
        buffer.sample(4)
    buffer.add(*transitions(0, 1, 1, BOX)[0])
    samples = buffer.sample(4)
    assert samples.observations.shape == samples.next_observations.shape == (4, 2)
    assert samples.rewards.shape == samples.dones.shape == (4, 1) and samples.dones.dtype == torch.float32


@pytest.mark.parametrize(
    ("algorithm", "task"),
    [(SAC, "Pendulum-v1"), (TD3, "Pendulum-v1"), (DDPG, "Pendulum-v1"), (DQN, "CartPole-v1")],
)
def test_algorithms_learn_from_a_folder_and_go_on_from_it(tmp_path: Path, algorithm: Any, task: str) -> None:
    where = {"replay_buffer_class": DiskReplayBuffer, "replay_buffer_kwargs": {"folder": tmp_path / "run"}}

    def learn(tell: Any = None) -> Any:
        torch.set_num_threads(1)
        model = algorithm("MlpPolicy", task, buffer_size=80, **where, **small())
        model.learn(
            60,
            callback=None
            if tell is None
            else lambda given, _: os._exit(7) if given["self"].num_timesteps == 50 else True,
        )
        return model

    assert in_child(learn).status == 7
    there = ReplayBuffer.from_folder(tmp_path / "run", read_only=True)
    before = there.num_steps
    assert 48 <= before <= 50
    model = learn()
    assert model.replay_buffer.full and there.num_steps == 80
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    other = algorithm(
        "MlpPolicy",
        task,
        buffer_size=80,
        replay_buffer_class=DiskReplayBuffer,
        replay_buffer_kwargs={"folder": tmp_path / "other"},
        **small(),
    )
    other.load_replay_buffer(tmp_path / "buffer.pkl")
    assert other.replay_buffer.disk.folder == tmp_path / "run" and other.replay_buffer.size() == 80
    other.learn(10)
    assert verify(tmp_path / "run") == []


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_are_achieved_later_in_the_same_episode(tmp_path: Path, strategy: str) -> None:
    torch.set_num_threads(1)
    env = make_vec_env(lambda: BitFlippingEnv(n_bits=4, continuous=False, max_steps=4), 2)
    how = {"folder": tmp_path, "n_sampled_goal": 4, "goal_selection_strategy": strategy}
    model = DQN("MultiInputPolicy", env, replay_buffer_class=DiskHerReplayBuffer, replay_buffer_kwargs=how, **small())
    model.learn(120)
    buffer = model.replay_buffer
    drawn = buffer.sample(256)
    achieved, goal = drawn.next_observations["achieved_goal"], drawn.next_observations["desired_goal"]
    assert torch.equal(drawn.observations["desired_goal"], goal)
    assert torch.equal(drawn.rewards[:, 0], (achieved == goal).all(1).float() - 1)
    other = (goal != buffer.disk.batch()["observation"]["desired_goal"][0, 0]).any(1)
    assert 0.4 < other.float().mean() < 1
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.load_replay_buffer(tmp_path / "buffer.pkl", truncate_last_traj=True)
    model.learn(20)
    model.learn(3, reset_num_timesteps=False)
    before = model.replay_buffer.size()
    model.replay_buffer.truncate_last_trajectory()  # what is open ends, and can be drawn
    assert model.replay_buffer.size() >= before and not open_episodes(model.replay_buffer.disk)


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="optimize_memory_usage"):
        DiskReplayBuffer(9, BOX, ACTIONS, optimize_memory_usage=True, folder=tmp_path)
    env = make_vec_env(lambda: BitFlippingEnv(n_bits=4), 1)
    with pytest.raises(ValueError, match="copy_info_dict"):
        DiskHerReplayBuffer(9, env.observation_space, env.action_space, env, copy_info_dict=True, folder=tmp_path)
    DiskReplayBuffer(9, BOX, ACTIONS, folder=tmp_path).disk.close()
    with pytest.raises(SchemaMismatchError, match="capacity"):
        DiskReplayBuffer(10, BOX, ACTIONS, folder=tmp_path)


def test_reset_forgets_every_transition(tmp_path: Path) -> None:
    buffer = DiskReplayBuffer(100, BOX, ACTIONS, "cpu", folder=tmp_path)
    for transition in transitions(0, 9, 1, BOX):
        buffer.add(*transition)
    buffer.reset()
    assert (buffer.size(), buffer.pos, buffer.full) == (0, 0, False)
    buffer.add(*transitions(5, 1, 1, BOX)[0])
    assert buffer.size() == 1


def test_no_step_is_left_out_whoever_made_the_folder(tmp_path: Path) -> None:
    """A folder may keep that steps after an end are resets; the trainer gives none of these."""
    DiskReplayBuffer(100, BOX, ACTIONS, folder=tmp_path / "b", n_envs=2, skips_resets=True).disk.close()
    buffer = DiskReplayBuffer(100, BOX, ACTIONS, folder=tmp_path / "b", n_envs=2)
    for step in transitions(0, 30, 2, BOX):
        buffer.add(*step)
    assert buffer.disk.num_steps == 60


@pytest.mark.parametrize(("name", "task"), [("QRDQN", "CartPole-v1"), ("TQC", "Pendulum-v1")])
def test_algorithms_of_sb3_contrib_learn_from_a_folder(tmp_path: Path, name: str, task: str) -> None:
    contrib = pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")
    how = {"replay_buffer_class": DiskReplayBuffer, "replay_buffer_kwargs": {"folder": tmp_path}, "buffer_size": 1000}
    model = getattr(contrib, name)("MlpPolicy", task, **how, **small())
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(120)
    assert model.replay_buffer.size() == 120
    assert any(not torch.equal(a, b) for a, b in zip(before, model.policy.parameters(), strict=True))
