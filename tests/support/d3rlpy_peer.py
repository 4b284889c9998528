"""The part of d3rlpy 2.8 that a data set is made of, restated: what tests compare with where d3rlpy is not installed.

Its pins (gymnasium==1.0.0) exclude those of the tests. `install` puts this in its place.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from types import ModuleType
from typing import Any

import numpy as np


class ActionSpace(enum.Enum):
    CONTINUOUS = 1
    DISCRETE = 2


@dataclasses.dataclass(frozen=True)
class Signature:
    dtype: Any
    shape: Any


@dataclasses.dataclass(frozen=True)
class Transition:
    observation: Any
    action: Any
    reward: Any
    next_observation: Any
    next_action: Any
    terminal: float
    interval: int
    rewards_to_go: Any


@dataclasses.dataclass(frozen=True)
class TransitionMiniBatch:
    observations: Any
    actions: Any
    rewards: Any
    next_observations: Any
    next_actions: Any
    terminals: Any
    intervals: Any
    transitions: Any


@dataclasses.dataclass(frozen=True)
class TrajectoryMiniBatch:
    observations: Any
    actions: Any
    rewards: Any
    returns_to_go: Any
    terminals: Any
    timesteps: Any
    masks: Any
    length: int


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    observation_signature: Any
    action_signature: Any
    reward_signature: Any
    action_space: Any
    action_size: Any


def signature(values: Any) -> Signature:
    return Signature([x.dtype for x in several(values)], [x.shape[1:] for x in several(values)])


def several(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def each(function: Any, values: Any) -> Any:
    return [function(x) for x in values] if isinstance(values, list) else function(values)


@dataclasses.dataclass(frozen=True)
class Episode:
    observations: Any
    actions: Any
    rewards: Any
    terminated: bool

    observation_signature = property(lambda self: signature(self.observations))
    action_signature = property(lambda self: signature(self.actions))
    reward_signature = property(lambda self: signature(self.rewards))
    transition_count = property(lambda self: len(self.actions) - (not self.terminated))

    def size(self) -> int:
        return len(self.actions)


class MultiStepTransitionPicker:
    _n_frames = 1

    def __init__(self, n_steps: int, gamma: float) -> None:
        self._n_steps, self._gamma = n_steps, gamma

    def __call__(self, episode: Any, index: int) -> Transition:
        last = episode.size() if episode.terminated else episode.size() - 1
        following = min(index + self._n_steps, last)
        terminal = following == episode.size()
        observation = each(lambda x: self._seen(x, index), episode.observations)
        next_observation = each(lambda x: self._seen(x, index if terminal else following), episode.observations)
        discounts = np.expand_dims(self._gamma ** np.arange(following - index), axis=1)
        return Transition(
            observation=observation,
            action=episode.actions[index],
            reward=self._reward(episode.rewards[index:following], discounts),
            next_observation=each(np.zeros_like, next_observation) if terminal else next_observation,
            next_action=np.zeros_like(episode.actions[0]) if terminal else episode.actions[following],
            terminal=float(terminal),
            interval=following - index,
            rewards_to_go=self._to_go(episode.rewards[index:]),
        )

    def _reward(self, rewards: Any, discounts: Any) -> Any:
        return np.sum(rewards * discounts, axis=0)

    def _to_go(self, rewards: Any) -> Any:
        return rewards

    def _seen(self, x: Any, t: int) -> Any:
        if self._n_frames == 1:
            return x[t]
        frames = [x[k] if k >= 0 else np.zeros_like(x[0]) for k in range(t - self._n_frames + 1, t + 1)]
        return np.concatenate(frames)


class BasicTransitionPicker(MultiStepTransitionPicker):
    def __init__(self) -> None:
        super().__init__(1, 1.0)

    def _reward(self, rewards: Any, discounts: Any) -> Any:
        return rewards[0]


class FrameStackTransitionPicker(BasicTransitionPicker):
    def __init__(self, n_frames: int) -> None:
        super().__init__()
        self._n_frames = n_frames


class SparseRewardTransitionPicker(BasicTransitionPicker):
    def __init__(self, failure_return: float, step_reward: float = 0.0) -> None:
        super().__init__()
        self._failure_return, self._step_reward = failure_return, step_reward

    def _to_go(self, rewards: Any) -> Any:
        return np.array([[self._failure_return]], np.float32) if np.all(rewards == self._step_reward) else rewards


class FrameStackTrajectorySlicer:
    def __init__(self, n_frames: int) -> None:
        self._n_frames = n_frames

    def __call__(self, episode: Any, end_index: int, size: int) -> dict[str, Any]:
        end, start = end_index + 1, max(end_index + 1 - size, 0)
        seen = FrameStackTransitionPicker(self._n_frames)._seen
        rewards = episode.rewards[start:]
        to_go = np.sum(rewards) - np.cumsum(rewards, axis=0) + rewards
        terminals = np.zeros((end - start, 1), np.float32)
        terminals[-1] = episode.terminated and end == episode.size()
        parts = {
            "observations": each(lambda x: np.stack([seen(x, t) for t in range(start, end)]), episode.observations),
            "actions": episode.actions[start:end],
            "rewards": rewards[: end - start],
            "returns_to_go": to_go[: end - start].reshape(-1, 1),
            "terminals": terminals,
            "timesteps": np.arange(start, end) + 1,
            "masks": np.ones(end - start),
        }

        def padded(x: Any) -> Any:
            return np.concatenate([np.zeros((size - len(x), *x.shape[1:]), x.dtype), x])

        return {name: each(padded, value) for name, value in parts.items()}


class BasicTrajectorySlicer(FrameStackTrajectorySlicer):
    def __init__(self) -> None:
        super().__init__(1)


class ReplayBuffer:
    def __init__(
        self,
        buffer: Any,
        transition_picker: Any = None,
        trajectory_slicer: Any = None,
        observation_signature: Any = None,
        action_signature: Any = None,
        reward_signature: Any = None,
        action_space: Any = None,
        action_size: Any = None,
        cache_size: int = 10000,
    ) -> None:
        self.buffer = buffer
        self.transition_picker = transition_picker or BasicTransitionPicker()
        self.trajectory_slicer = trajectory_slicer or BasicTrajectorySlicer()
        signatures = (observation_signature, action_signature, reward_signature)
        self.dataset_info = DatasetInfo(*signatures, action_space, action_size)

    episodes = property(lambda self: self.buffer.episodes)
    transition_count = property(lambda self: self.buffer.transition_count)

    def size(self) -> int:
        return len(self.buffer.episodes)

    def sample_transition(self) -> Transition:
        return self.transition_picker(*self.buffer[np.random.randint(self.transition_count)])

    def sample_transition_batch(self, batch_size: int) -> TransitionMiniBatch:
        found = [self.sample_transition() for _ in range(batch_size)]
        columns = {
            "observations": joined([x.observation for x in found]),
            "actions": joined([x.action for x in found]),
            "rewards": joined([x.reward for x in found]),
            "next_observations": joined([x.next_observation for x in found]),
            "next_actions": joined([x.next_action for x in found]),
            "terminals": joined([np.array([x.terminal]) for x in found]),
            "intervals": joined([np.array([x.interval]) for x in found]),
        }
        return TransitionMiniBatch(**columns, transitions=found)

    def sample_trajectory_batch(self, batch_size: int, length: int) -> TrajectoryMiniBatch:
        drawn = [self.buffer[np.random.randint(self.transition_count)] for _ in range(batch_size)]
        found = [self.trajectory_slicer(*where, length) for where in drawn]
        return TrajectoryMiniBatch(**{name: joined([x[name] for x in found]) for name in found[0]}, length=length)


def joined(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [joined(list(part)) for part in zip(*values, strict=True)]
    return np.stack(values).astype(np.float32)


class InfiniteBuffer:
    def __init__(self, episodes: Any) -> None:
        self.episodes = episodes
        self._transitions = [(episode, i) for episode in episodes for i in range(episode.transition_count)]
        self.transition_count = len(self._transitions)

    def __getitem__(self, index: int) -> Any:
        return self._transitions[index]


class MDPDataset(ReplayBuffer):
    def __init__(
        self, observations: Any, actions: Any, rewards: Any, terminals: Any, timeouts: Any, **options: Any
    ) -> None:
        columns = (x.reshape(len(x), -1) if x.ndim == 1 else x for x in (actions, rewards))
        actions, rewards = columns
        stops = np.flatnonzero(terminals + timeouts) + 1
        episodes = [
            Episode(each(lambda x: x[a:b], observations), actions[a:b], rewards[a:b], bool(terminals[b - 1]))  # noqa: B023
            for a, b in zip([0, *stops[:-1]], stops, strict=True)
        ]
        first = episodes[0]
        signatures = (first.observation_signature, first.action_signature, first.reward_signature)
        names = ("observation_signature", "action_signature", "reward_signature")
        discrete = bool(np.all(first.actions.astype(np.int32) == first.actions))
        super().__init__(
            InfiniteBuffer(episodes),
            action_space=ActionSpace.DISCRETE if discrete else ActionSpace.CONTINUOUS,
            action_size=int(actions.max()) + 1 if discrete else actions.shape[1],
            **dict(zip(names, signatures, strict=True)),
            **options,
        )


def install() -> None:
    """Put this in the place of d3rlpy, where it is not installed."""
    package, constants = ModuleType("d3rlpy"), ModuleType("d3rlpy.constants")
    package.constants = constants  # type: ignore[attr-defined]
    constants.ActionSpace = ActionSpace  # type: ignore[attr-defined]
    sys.modules |= {"d3rlpy": package, "d3rlpy.constants": constants, "d3rlpy.dataset": sys.modules[__name__]}
