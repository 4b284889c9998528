"""Stable-Baselines3: replay buffers on disk for its off-policy algorithms, by `replay_buffer_class=`.

    SAC("MlpPolicy", env, replay_buffer_class=DiskReplayBuffer, replay_buffer_kwargs={"folder": "runs/sac"})

Called again with the same folder, a run goes on with every transition that was stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.environments import image_codec
from memmap_buffer.extras import extra
from memmap_buffer.interop.columns import Array, equal_rows
from memmap_buffer.interop.episodes import SPARE_SLOTS, sample_newest
from memmap_buffer.names import Names
from memmap_buffer.paths import AnyPath
from memmap_buffer.schema import Field
from memmap_buffer.views.hindsight import Hindsight

with extra("stable-baselines3"):
    from gymnasium import spaces
    from stable_baselines3.common.buffers import BaseBuffer
    from stable_baselines3.common.buffers import ReplayBuffer as MemoryReplayBuffer
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize
    from stable_baselines3.her import GoalSelectionStrategy, HerReplayBuffer

OBSERVATION = "observation"


class DiskReplayBuffer(MemoryReplayBuffer):
    """A replay buffer for SAC, TD3, DDPG and DQN that lives in a folder, in the place of theirs.

    It stands for their `ReplayBuffer`, `DictReplayBuffer` and `NStepReplayBuffer`. An observation is stored once, also
    as the one that follows the step before. A transition is drawn from the next `add` of its environment on. Arrays
    such as `observations` or `dones` are not there: `disk` has the data. Pickled, as by `save_replay_buffer`, it is the
    folder's name; so what is loaded is what the folder holds then.

    Args:
        buffer_size: transitions, of all environments together, shared among these evenly.
        observation_space: of one environment.
        action_space: of one environment.
        device: where batches go.
        n_envs: how many environments step together.
        optimize_memory_usage: must be false: an observation is stored once anyway.
        handle_timeout_termination: an episode that a time limit ended did not terminate.
        folder: where it is; made if it is missing.
        n_steps: the most steps of a transition.
        gamma: γ of their returns.
        max_timesteps: longer episodes are stored in parts; no transition of one step is lost where they are cut.
        codec: of observations that are images, as for `Field`: "zstd", say.
        options: others of `memmap_buffer.ReplayBuffer`, such as `durability`.

    Attributes:
        disk: the `memmap_buffer.ReplayBuffer`.

    Raises:
        SchemaMismatchError: the folder holds the transitions of other spaces, or another `buffer_size`.
        ValueError: `optimize_memory_usage`.
    """

    publish: Literal["episode", "step"] = "step"

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        folder: AnyPath,
        n_steps: int = 1,
        gamma: float = 0.99,
        max_timesteps: int = 1000,
        codec: Any = None,
        **options: Any,
    ) -> None:
        if optimize_memory_usage:
            raise ValueError("optimize_memory_usage: got True; leave it out, as an observation is stored once anyway")
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage, self.handle_timeout_termination = False, handle_timeout_termination
        self.n_steps, self.gamma = n_steps, gamma
        shapes = self.obs_shape if isinstance(self.obs_shape, dict) else {"": self.obs_shape}
        of = {key: observation_space[key] if key else observation_space for key in shapes}  # type: ignore[index]
        self._observed = {
            key: Field(of[key].dtype, shape, final=True, codec=image_codec(of[key].dtype, shape, codec))
            for key, shape in shapes.items()
        }
        self._parts = {key: part for part, key in Names().ours({key or OBSERVATION: key for key in shapes}).items()}
        self._action = Field(self._maybe_cast_dtype(action_space.dtype), (self.action_dim,))
        self.disk = ReplayBuffer(
            folder,
            max_timesteps=max_timesteps,
            capacity=self.buffer_size * n_envs,
            spare_slots=max(SPARE_SLOTS, n_envs),
            publish=self.publish,
            fields={
                **self._nested(OBSERVATION, self._observed),
                "action": self._action,
                "reward": "float",
                "terminated": "bool",
                "truncated": "bool",
            },
            **{"skips_resets": False, **options},  # the trainer gives none, whoever made the folder
        )
        self._following: dict[str, Array] = {}
        self._over = np.ones(n_envs, np.bool_)
        self._options = self._draws()
        self._count()

    def _draws(self) -> dict[str, Any]:
        """The options of `disk.sample`."""
        if self.n_steps == 1:
            return {"n_steps": 1, "next_fields": (OBSERVATION,)}
        names = {"current_fields": (OBSERVATION, "action"), "next_fields": (OBSERVATION,)}
        return {"n_steps": self.n_steps, "sequence_fields": ("reward", "terminated"), **names}

    def _count(self) -> None:
        """Say how much there is in the words of Stable-Baselines3."""
        stored = self.disk.num_steps // self.n_envs
        self.full, self.pos = stored >= self.buffer_size, stored % self.buffer_size

    def size(self) -> int:
        """Transitions of each environment."""
        return self.disk.num_steps // self.n_envs

    def reset(self) -> None:
        """Forget every transition."""
        self.disk.end_episodes()
        self.disk.clear()
        self._over[:] = True
        self._count()

    # Writing

    def add(
        self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: list[dict[str, Any]]
    ) -> None:
        """Store one transition of each environment.

        Args:
            obs: (n_envs, *shape), or a dict of such arrays.
            next_obs: likewise; where an episode ended its last observation, not the first of the next one.
            action: (n_envs, *action).
            reward: (n_envs,).
            done: (n_envs,).
            infos: of each environment.
        """
        now, following = self._arrays(obs), self._arrays(next_obs)
        if not (self._over | equal_rows(self._following, now)).all():  # some environment was reset, and nobody said so
            self.disk.end_episodes()
        done = np.asarray(done, np.bool_).reshape(self.n_envs)
        late = np.zeros_like(done)
        if self.handle_timeout_termination:
            late[:] = [info.get("TimeLimit.truncated", False) for info in infos]
        self.disk.add(
            **self._nested(OBSERVATION, now),
            **self._nested(f"next_{OBSERVATION}", following),
            action=np.asarray(action, self._action.dtype).reshape(self.n_envs, self.action_dim),
            reward=np.asarray(reward, np.float32).reshape(self.n_envs),
            terminated=done & ~late,
            truncated=late,
        )
        self._following, self._over = following, done | late
        self.pos = (self.pos + 1) % self.buffer_size
        self.full = self.full or self.pos == 0

    def _arrays(self, obs: Any) -> dict[str, Array]:
        """Observations by their keys, of the stored shape and dtype."""
        observations, fields = obs if isinstance(obs, Mapping) else {"": obs}, self._observed.items()
        return {
            key: np.array(observations[key], field.dtype).reshape(self.n_envs, *field.shape) for key, field in fields
        }

    def _nested(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The value of a single observation; of a dict of them a group by the names of fields."""
        return {name: values[""] if "" in values else {self._parts[key]: value for key, value in values.items()}}

    # Reading

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """A batch drawn uniformly.

        Args:
            batch_size: transitions.
            env: normalises observations and rewards.

        Returns:
            `ReplayBufferSamples` or `DictReplayBufferSamples`.

        Raises:
            NotEnoughDataError: there is no transition.
        """
        device = None if env is not None or self.device.type == "cpu" else self.device
        batch = sample_newest(self.disk, self.disk.end_episodes, batch_size, device=device, **self._options)
        return self._samples(batch, env)

    def _samples(self, batch: Mapping[str, Any], env: VecNormalize | None) -> Any:
        """A batch of `disk` as the trainer has it."""
        observations, following = (self._normal(self._observations(batch, prefix), env) for prefix in ("", "next_"))
        rewards, dones, discounts = self._returns(batch, env)
        samples = DictReplayBufferSamples if isinstance(observations, dict) else ReplayBufferSamples
        return samples(observations, batch["action"].to(self.device), following, dones, rewards, discounts)

    def _observations(self, batch: Mapping[str, Any], prefix: str) -> Any:
        """The observations of a batch as the environment gives them."""
        values = batch[prefix + OBSERVATION]
        return values if "" in self._parts else {key: values[part] for key, part in self._parts.items()}

    def _normal(self, observations: Any, env: VecNormalize | None) -> Any:
        if env is None:
            return observations
        several = isinstance(observations, dict)
        arrays = {key: values.numpy() for key, values in observations.items()} if several else observations.numpy()
        normal: Any = env.normalize_obs(arrays)
        return {key: self.to_torch(values) for key, values in normal.items()} if several else self.to_torch(normal)

    def _returns(self, batch: Mapping[str, Any], env: VecNormalize | None) -> tuple[Any, Any, Any]:
        """Rewards and dones (B, 1), and for several steps the discounts (B, 1) of what follows."""
        name = "reward" if self.n_steps == 1 else "seq_reward"
        rewards = batch[name]
        if env is not None:
            rewards = self.to_torch(env.normalize_reward(rewards.numpy()).astype(np.float32))
        if self.n_steps == 1:
            return rewards.reshape(-1, 1), batch["terminated"].float().reshape(-1, 1), None
        count = batch["n_step_lens"].to(rewards.device)[:, None]
        steps = count.new_tensor(range(self.n_steps))
        returns = (rewards * self.gamma ** steps.float() * (steps < count)).sum(1, keepdim=True)
        dones = batch["seq_terminated"].to(rewards.device).any(1, keepdim=True).float()
        return returns, dones, self.gamma ** count.float()

    # Pickling

    def __getstate__(self) -> dict[str, Any]:
        """The folder's name in the place of what it holds, which is on the disk then."""
        self.disk.end_episodes()
        self.disk.flush()
        self._over[:] = True
        state = self.__dict__.copy()
        return {**state, "env": None} if "env" in state else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._count()


class DiskHerReplayBuffer(DiskReplayBuffer, HerReplayBuffer):
    """A `HerReplayBuffer` in a folder: hindsight experience replay of episodes that ended.

    An episode is there when it ended, as with theirs. Of a batch each transition is given another goal with the
    probability n / (n + 1); theirs gives it to exactly that part of the batch.

    Args:
        buffer_size: see `DiskReplayBuffer`.
        observation_space: a Dict with `observation`, `achieved_goal` and `desired_goal`.
        action_space: see `DiskReplayBuffer`.
        env: its `compute_reward` gives the rewards of goals.
        device: see `DiskReplayBuffer`.
        n_envs: see `DiskReplayBuffer`.
        optimize_memory_usage: see `DiskReplayBuffer`.
        handle_timeout_termination: see `DiskReplayBuffer`.
        n_sampled_goal: n, other goals for each one of its own.
        goal_selection_strategy: "future", "final" or "episode".
        copy_info_dict: must be false: infos are not stored, and `compute_reward` gets empty ones.
        folder: see `DiskReplayBuffer`.
        options: see `DiskReplayBuffer`.

    Raises:
        ValueError: `copy_info_dict`, or a strategy that there is not.
    """

    publish: Literal["episode", "step"] = "episode"

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv,
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        *,
        folder: AnyPath,
        **options: Any,
    ) -> None:
        if copy_info_dict:
            raise ValueError("copy_info_dict: got True, and infos are not stored; leave it out")
        name = getattr(goal_selection_strategy, "name", str(goal_selection_strategy)).upper()
        self.goal_selection_strategy = GoalSelectionStrategy[name]
        self.n_sampled_goal, self.copy_info_dict = n_sampled_goal, False
        self.her_ratio = 1 - 1.0 / (n_sampled_goal + 1)
        self.env = env
        how = (device, n_envs, optimize_memory_usage, handle_timeout_termination)
        super().__init__(buffer_size, observation_space, action_space, *how, folder=folder, **options)

    def _draws(self) -> dict[str, Any]:
        strategy: Any = self.goal_selection_strategy.name.lower()
        return {**super()._draws(), "hindsight": Hindsight(self._rewards, strategy=strategy, prob=self.her_ratio)}

    def _rewards(self, achieved: Array, goals: Array, _: Any) -> Array:
        assert self.env is not None, "set_env gives it, as load_replay_buffer does"
        infos: list[dict[str, Any]] = [{} for _ in achieved]
        (rewards,) = self.env.env_method("compute_reward", achieved, goals, infos, indices=[0])
        return np.asarray(rewards, np.float32)

    def set_env(self, env: VecEnv) -> None:
        """Set the environment that gives rewards, as after unpickling."""
        if self.env is not None:
            raise ValueError("Trying to set env of already initialized environment.")
        self.env = env

    def truncate_last_trajectory(self) -> None:
        """End the episodes that are open, as if a time limit had."""
        self.disk.end_episodes()
        self._over[:] = True
