"""Stable-Baselines3: replay buffers on disk for its off-policy algorithms, given as `replay_buffer_class=`.

    SAC("MlpPolicy", env, replay_buffer_class=DiskReplayBuffer, replay_buffer_kwargs={"folder": "runs/sac"})

Called again with the same folder, a run goes on with every transition that is stored there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memmap_buffer import Field, Hindsight, SchemaError
from memmap_buffer.adapters import AnyPath, Array, Names, extra, flatten, image_codec
from memmap_buffer.interop.trainer_memory import NEXT, TERMINATED, TRUNCATED, TrainerMemory

with extra("stable-baselines3"):
    from gymnasium import spaces
    from stable_baselines3.common import buffers
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize
    from stable_baselines3.her import GoalSelectionStrategy, HerReplayBuffer

OBSERVATION = "observation"


class DiskReplayBuffer(buffers.ReplayBuffer):
    """A replay buffer in a folder for SAC, TD3, DDPG and DQN.

    It takes the place of Stable-Baselines3's `ReplayBuffer`, `DictReplayBuffer` and `NStepReplayBuffer`. An observation
    is stored once, although it is also the one that follows the step before. A transition can be drawn from the next
    `add` on. Arrays such as `observations` or `dones` do not exist: `disk` has the data. A pickle, as of
    `save_replay_buffer`, holds only the folder's name: loading it gives the transitions that the folder has then.

    Args:
        buffer_size: transitions of all environments together; each has an equal share.
        observation_space: of one environment.
        action_space: of one environment.
        device: where batches go.
        n_envs: how many environments step together.
        optimize_memory_usage: must be False: an observation is stored once anyway.
        handle_timeout_termination: whether an episode that a time limit ended counts as truncated, not terminated.
        folder: where the transitions are; made if it is missing.
        n_steps: the most steps of a transition.
        gamma: γ of the returns of transitions of several steps.
        codec: of observations that are images, as for `Field`, such as "zstd".
        options: others of `memmap_buffer.ReplayBuffer`, such as `durability`. Episodes longer than `max_timesteps`
            (default 1,000) are stored in parts; no transition of one step is lost where they are cut.

    Attributes:
        disk: the `memmap_buffer.ReplayBuffer`.

    Raises:
        SchemaMismatchError: the folder holds transitions of other spaces, or has another `buffer_size`.
        ValueError: `optimize_memory_usage` is True.
    """

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
        codec: Any = None,
        **options: Any,
    ) -> None:
        if optimize_memory_usage:
            raise ValueError("optimize_memory_usage: got True; leave it out, as an observation is stored once anyway")
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage, self.handle_timeout_termination = False, handle_timeout_termination
        self.n_steps, self.gamma = n_steps, gamma
        shapes = self.obs_shape if isinstance(self.obs_shape, dict) else {"": self.obs_shape}
        of = {key: observation_space[key] if key else observation_space for key in shapes}  # type: ignore[index]
        tree = {key: key for key in shapes} if "" not in shapes else ""
        self._keys: dict[str, str] = flatten(Names().ours({OBSERVATION: tree}))  # field -> key, "" of no Dict
        fields: dict[str, Any] = {
            name: Field(of[key].dtype, shapes[key], final=True, codec=image_codec(of[key].dtype, shapes[key], codec))
            for name, key in self._keys.items()
        }
        self._layout = [(name, key, fields[name].storage, (n_envs, *shapes[key])) for name, key in self._keys.items()]
        fields["action"] = Field(self._maybe_cast_dtype(action_space.dtype), (self.action_dim,))
        self._action_dtype = fields["action"].storage
        self.memory = TrainerMemory(folder, self.buffer_size * n_envs, n_envs, **options)
        self.disk = self.memory.open({**fields, "reward": "float", TERMINATED: "bool", TRUNCATED: "bool"})
        self._options = self.draws()
        self._count()

    def draws(self) -> dict[str, Any]:
        """The options of `disk.sample`."""
        draws: dict[str, Any] = {"n_steps": self.n_steps, "next_fields": (OBSERVATION,)}
        several = {"current_fields": (OBSERVATION, "action"), "sequence_fields": ("reward", TERMINATED)}
        return draws if self.n_steps == 1 else {**draws, **several}

    def _count(self) -> None:
        """Set `pos` and `full`, by which Stable-Baselines3 says how many transitions there are."""
        turns, self.pos = divmod(self.memory.num_added, self.buffer_size)
        self.full = turns > 0

    def size(self) -> int:
        """Transitions of each environment."""
        return len(self.memory) // self.n_envs

    def reset(self) -> None:
        """Forget every transition."""
        self.memory.clear()
        self._count()

    # Writing

    def add(
        self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: list[dict[str, Any]]
    ) -> None:
        """Store one transition of each environment.

        Args:
            obs: (n_envs, *shape), or a dict of such arrays.
            next_obs: as `obs`; if an episode ended, its last observation, not the first one of the next episode.
            action: (n_envs, *action).
            reward: (n_envs,).
            done: (n_envs,) whether each episode ended.
            infos: the info of each environment.
        """
        late, done = np.zeros(self.n_envs, np.bool_), np.asarray(done, np.bool_).reshape(self.n_envs)
        if self.handle_timeout_termination:
            late[:] = [info.get("TimeLimit.truncated", False) for info in infos]
        action = np.asarray(action, self._action_dtype).reshape(self.n_envs, self.action_dim)
        reward = np.asarray(reward, np.float32).reshape(self.n_envs)
        step = {"action": action, "reward": reward, TERMINATED: done & ~late, TRUNCATED: late}
        self.memory.add({**self._arrays(obs), **step}, self._arrays(next_obs))
        self._count()

    def _arrays(self, obs: Any) -> dict[str, Array]:
        """Field -> observations (n_envs, *field) of the stored shape and dtype."""
        arrays = obs if isinstance(obs, dict) else {"": obs}
        return {name: np.array(arrays[key], dtype).reshape(shape) for name, key, dtype, shape in self._layout}

    # Reading

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """A batch drawn uniformly.

        Args:
            batch_size: how many transitions.
            env: normalises observations and rewards; None: they stay as they are.

        Returns:
            `ReplayBufferSamples`, or `DictReplayBufferSamples` for a dict of observations.

        Raises:
            NotEnoughDataError: there is no transition.
        """
        device = None if env is not None or self.device.type == "cpu" else self.device
        return self._samples(self.memory.sample(batch_size, device=device, **self._options), env)

    def _samples(self, batch: Mapping[str, Any], env: VecNormalize | None) -> Any:
        """A batch of `disk` in the form of Stable-Baselines3."""
        flat = flatten(batch)
        pair = ({key: flat[prefix + name] for name, key in self._keys.items()} for prefix in ("", NEXT))
        now, following = (self._normal(values, env) for values in pair)
        rewards, dones, discounts = self._returns(batch, env)
        kind = ReplayBufferSamples if "" in self._keys.values() else DictReplayBufferSamples
        return kind(now, batch["action"].to(self.device), following, dones, rewards, discounts)

    def _normal(self, values: dict[str, Any], env: VecNormalize | None) -> Any:
        """The observations as a tensor or a dict of tensors, normalised by `env` if there is one."""
        if env is not None:
            arrays = {key: rows.numpy() for key, rows in values.items()}
            normal: Any = env.normalize_obs(arrays.get("", arrays))
            values = {k: self.to_torch(v) for k, v in (normal if isinstance(normal, dict) else {"": normal}).items()}
        return values.get("", values)

    def _returns(self, batch: Mapping[str, Any], env: VecNormalize | None) -> tuple[Any, Any, Any]:
        """Returns and dones (B, 1); for transitions of several steps also the discounts γ^k (B, 1), else None."""
        rewards = batch["reward" if self.n_steps == 1 else "seq_reward"]
        if env is not None:
            rewards = self.to_torch(env.normalize_reward(rewards.numpy()).astype(np.float32))
        if self.n_steps == 1:
            return rewards.reshape(-1, 1), batch["terminated"].float().reshape(-1, 1), None
        count = batch["n_step_lens"].to(rewards.device)[:, None]
        steps = count.new_tensor(range(self.n_steps))
        returns = (rewards * self.gamma ** steps.float() * (steps < count)).sum(1, keepdim=True)
        dones = batch["seq_terminated"].to(rewards.device).any(1, keepdim=True).float()
        return returns, dones, self.gamma ** count.float()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_layout" not in state:
            raise SchemaError("DiskReplayBuffer: it was pickled by another version; make it anew with its folder=…")
        self.__dict__.update(state)
        self._count()


class DiskHerReplayBuffer(DiskReplayBuffer, HerReplayBuffer):
    """A `HerReplayBuffer` in a folder: hindsight experience replay of episodes that ended.

    An episode can be drawn when it has ended, as in `HerReplayBuffer`. Each transition of a batch gets another goal
    with the probability n / (n + 1); `HerReplayBuffer` gives it to exactly that share of a batch.

    Args:
        buffer_size: see `DiskReplayBuffer`.
        observation_space: a Dict with `observation`, `achieved_goal` and `desired_goal`.
        action_space: see `DiskReplayBuffer`.
        env: its `compute_reward` gives the rewards of goals.
        device: see `DiskReplayBuffer`.
        n_envs: see `DiskReplayBuffer`.
        optimize_memory_usage: see `DiskReplayBuffer`.
        handle_timeout_termination: see `DiskReplayBuffer`.
        n_sampled_goal: n, how many other goals there are for each original goal.
        goal_selection_strategy: "future", "final" or "episode".
        copy_info_dict: must be False: infos are not stored, and `compute_reward` gets empty ones.
        folder: see `DiskReplayBuffer`.
        options: those of `DiskReplayBuffer` but `publish`, which is "episode".

    Raises:
        ValueError: `copy_info_dict` is True.
        KeyError: there is no such strategy.
    """

    env: VecEnv | None = None  # None after unpickling, until `set_env`

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
        strategy = getattr(goal_selection_strategy, "name", str(goal_selection_strategy)).upper()
        self.goal_selection_strategy = GoalSelectionStrategy[strategy]
        self.n_sampled_goal, self.copy_info_dict = n_sampled_goal, False
        self.her_ratio = 1 - 1.0 / (n_sampled_goal + 1)
        self.env = env
        how = (device, n_envs, optimize_memory_usage, handle_timeout_termination)
        super().__init__(
            buffer_size, observation_space, action_space, *how, folder=folder, publish="episode", **options
        )

    def draws(self) -> dict[str, Any]:
        how: dict[str, Any] = {"strategy": self.goal_selection_strategy.name.lower(), "prob": self.her_ratio}
        return {**super().draws(), "hindsight": Hindsight(self._rewards, **how)}

    def _rewards(self, achieved: Array, goals: Array, _: Any) -> Array:
        assert self.env is not None, "set_env gives it, as load_replay_buffer does"
        (rewards,) = self.env.env_method("compute_reward", achieved, goals, [{} for _ in achieved], indices=[0])
        return np.asarray(rewards, np.float32)

    def truncate_last_trajectory(self) -> None:
        """End the open episodes as cut short, as a time limit does."""
        self.memory.end_episodes()
