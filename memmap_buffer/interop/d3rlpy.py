"""d3rlpy: a data set over a folder, which its algorithms train from without a copy.

    CQLConfig().create().fit(DiskDataset("data"), n_steps=100_000)

Batches are equal to those of d3rlpy's `MDPDataset` of the same episodes and random numbers. Rows are read when a batch
is drawn; only the bounds of the episodes are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from memmap_buffer import ConcatBuffer, NotEnoughDataError, ReplayBuffer, Schema, StaleEpisodeError
from memmap_buffer.adapters import AnyPath, Array, extra, flatten, to_numpy
from memmap_buffer.interop.episodes import opened, require_kinds, with_excluded

with extra("d3rlpy"):
    from d3rlpy import constants
    from d3rlpy.dataset import (
        BasicTrajectorySlicer,
        BasicTransitionPicker,
        Episode,
        FrameStackTrajectorySlicer,
        FrameStackTransitionPicker,
        MultiStepTransitionPicker,
        SparseRewardTransitionPicker,
        TrajectoryMiniBatch,
        Transition,
        TransitionMiniBatch,
    )
    from d3rlpy.dataset import ReplayBuffer as MemoryReplayBuffer

T = TypeVar("T")
PICKERS = (BasicTransitionPicker, FrameStackTransitionPicker, MultiStepTransitionPicker, SparseRewardTransitionPicker)
SLICERS = (BasicTrajectorySlicer, FrameStackTrajectorySlicer)
SCANNED = 1 << 20  # for so many timesteps at once it is looked up which episodes they belong to


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("DiskDataset is only read; record by memmap_buffer.ReplayBuffer, then refresh()")


class DiskDataset(MemoryReplayBuffer):  # type: ignore[misc]
    """A data set for `fit` whose episodes lie in a folder; it takes the place of `MDPDataset`.

    It has the episodes that were visible when it was made, or at the last `refresh`. An item of `episodes` reads a
    whole episode: scalers and evaluators use these, and transition pickers and trajectory slicers that are not
    d3rlpy's own.

    Args:
        folder: the folder of the buffer; or an open buffer, such as a `ConcatBuffer` over several folders.
        observation: the field of observations; several become a tuple observation.
        action: the field of actions; whole numbers without a shape are discrete actions.
        reward: the field of rewards.
        terminated: the field that is true where an episode terminated; default: the field that the schema declares. If
            there is none, no episode terminated.
        transition_picker: as for `MDPDataset`.
        trajectory_slicer: as for `MDPDataset`.
        action_space: as for `MDPDataset`; default: discrete if all actions of the first episode are whole numbers.
        action_size: as for `MDPDataset`; default: the length of an action; for discrete actions one more than the
            largest action, for which all actions are read.

    Attributes:
        disk: the `memmap_buffer.ReplayBuffer` or `ConcatBuffer`.

    Raises:
        NotABufferError: there is no buffer in the folder.
        NotEnoughDataError: there is no transition.
        SchemaError: a field is unknown.
    """

    def __init__(
        self,
        folder: AnyPath | ReplayBuffer | ConcatBuffer,
        *,
        observation: str | Sequence[str] = "observation",
        action: str = "action",
        reward: str = "reward",
        terminated: str | None = None,
        transition_picker: Any = None,
        trajectory_slicer: Any = None,
        action_space: constants.ActionSpace | None = None,
        action_size: int | None = None,
    ) -> None:
        self.disk: Any = opened(folder)
        schema: Schema = self.disk.schema
        named = {*([observation] if isinstance(observation, str) else observation), action, reward}
        require_kinds({name: schema.fields[name] for name in named & schema.fields.keys()}, "d3rlpy", "U")
        self._rows = _Rows(
            self.disk,
            (observation,) if isinstance(observation, str) else tuple(observation),
            action,
            reward,
            schema.terminated if terminated is None else terminated,
        )
        episode = self._rows.episodes[0]
        space = action_space or _action_space(episode.actions)
        if action_size is None:
            discrete = space == constants.ActionSpace.DISCRETE
            largest = self.disk.statistics([action])[action].max if discrete else None
            action_size = int(np.asarray(largest).max()) + 1 if discrete else episode.actions.shape[1]
        super().__init__(
            self._rows,
            transition_picker=transition_picker,
            trajectory_slicer=trajectory_slicer,
            observation_signature=episode.observation_signature,
            action_signature=episode.action_signature,
            reward_signature=episode.reward_signature,
            action_space=space,
            action_size=action_size,
            cache_size=1,
        )

    def refresh(self) -> None:
        """Take in the episodes that are visible now: new ones are added, and those that are gone left out."""
        self._rows.refresh()

    def sample_transition_batch(self, batch_size: int) -> TransitionMiniBatch:
        """Transitions drawn uniformly, by numpy's global random numbers.

        Args:
            batch_size: B.

        Returns:
            Arrays of float32: observations and next observations (B, *shape), actions and next actions (B, *shape),
            rewards, terminals and intervals (B, 1).
        """
        if type(self.transition_picker) not in PICKERS:
            return self._again(super().sample_transition_batch, batch_size)
        return self._again(self._transitions, batch_size)

    def sample_trajectory_batch(self, batch_size: int, length: int) -> TrajectoryMiniBatch:
        """Parts of episodes that end at timesteps drawn uniformly, by numpy's global random numbers.

        Args:
            batch_size: B.
            length: L; shorter parts are padded with zeros in front.

        Returns:
            Arrays of float32: observations and actions (B, L, *shape), rewards, returns to go and terminals (B, L, 1),
            timesteps from 1 and masks (B, L).
        """
        if type(self.trajectory_slicer) not in SLICERS:
            return self._again(super().sample_trajectory_batch, batch_size, length)
        return self._again(self._trajectories, batch_size, length)

    def _again(self, draw: Callable[..., T], *args: Any) -> T:
        """A batch. If an episode that was drawn has been overwritten, `refresh` and draw once more."""
        try:
            return draw(*args)
        except StaleEpisodeError:
            self.refresh()
            return draw(*args)

    def _transitions(self, batch_size: int) -> TransitionMiniBatch:
        picker, rows = self.transition_picker, self._rows
        at = rows.located(np.random.randint(rows.transition_count, size=batch_size))
        several = type(picker) is MultiStepTransitionPicker
        interval = np.minimum(picker._n_steps if several else 1, at.rest - ~at.terminated)
        terminal = interval == at.rest
        before = np.arange(1 - _frames(picker, FrameStackTransitionPicker), 1)
        now, following = at.t[:, None] + before, (at.t + interval)[:, None] + before
        exists = np.stack([now >= 0, (following >= 0) & ~terminal[:, None]])
        place = at.start[:, None] + np.maximum([now, np.minimum(following, at.length[:, None] - 1)], 0)
        observations, actions = rows.steps(place, exists)
        observations = [_stacked(x) for x in observations]
        actions = actions[:, :, -1]
        rewards = rows.rewards(at.start + at.t, interval)
        rewards = _returns(rewards, interval, picker._gamma) if several else rewards[:, 0]
        now_observed, next_observed = (_observation([_float(x[i]) for x in observations]) for i in range(2))
        return TransitionMiniBatch(
            observations=now_observed,
            actions=_float(actions[0]),
            rewards=_float(rewards),
            next_observations=next_observed,
            next_actions=_float(actions[1]),
            terminals=_float(terminal[:, None]),
            intervals=_float(interval[:, None]),
            transitions=_Transitions(picker, rows, at, observations, actions, rewards, terminal, interval),
        )

    def _trajectories(self, batch_size: int, length: int) -> TrajectoryMiniBatch:
        rows, frames = self._rows, _frames(self.trajectory_slicer, FrameStackTrajectorySlicer)
        at = rows.located(np.random.randint(rows.transition_count, size=batch_size))
        t = at.t[:, None] + np.arange(2 - length - frames, 1)
        observations, actions = rows.steps(at.start[:, None] + np.maximum(t, 0), t >= 0)
        if frames > 1:
            windows = [np.moveaxis(sliding_window_view(x, frames, axis=1), -1, 2) for x in observations]
            observations = [_stacked(x) for x in windows]
        t = t[:, frames - 1 :]
        begin = t[:, 0].clip(0)
        rewards = rows.rewards(at.start + begin, at.length - begin)
        scores, to_go = (np.zeros((batch_size, length, *rewards.shape[2:]), rewards.dtype) for _ in range(2))
        for i, (n, rest) in enumerate(zip((at.t + 1 - begin).tolist(), (at.length - begin).tolist(), strict=True)):
            own = rewards[i, :rest]
            scores[i, length - n :] = own[:n]
            to_go[i, length - n :] = (np.sum(own) - np.cumsum(own, axis=0) + own)[:n]  # d3rlpy's order of sums
        terminals = np.zeros((batch_size, length, 1))
        terminals[:, -1, 0] = at.terminated & (at.rest == 1)
        return TrajectoryMiniBatch(
            observations=_observation([_float(x) for x in observations]),
            actions=_float(actions[:, frames - 1 :]),
            rewards=_float(scores),
            returns_to_go=_float(to_go),
            terminals=_float(terminals),
            timesteps=_float((t + 1).clip(0)),
            masks=_float(t >= 0),
            length=length,
        )

    append = append_episode = clip_episode = _refuse


@dataclass(frozen=True)
class _Located:
    """Places of timesteps, arrays (B,).

    Attributes:
        start: the first row of the timestep's episode.
        length: of the episode.
        terminated: whether the episode terminated.
        t: the timestep within the episode.
    """

    start: Array
    length: Array
    terminated: Array
    t: Array

    @property
    def rest(self) -> Array:
        """(B,) how many timesteps the episode has from each of these on."""
        return self.length - self.t


class _Rows:
    """A folder as d3rlpy's `BufferProtocol`: the timesteps of all episodes one after another, read by row number."""

    def __init__(
        self, disk: Any, observation: tuple[str, ...], action: str, reward: str, terminated: str | None
    ) -> None:
        self._disk = disk
        self._keys = [f"{i}" for i in range(len(observation))]
        self._named = {**dict(zip(observation, self._keys, strict=True)), action: "action"}
        self._reward, self._terminated = reward, terminated
        self.refresh()

    def refresh(self) -> None:
        """Look up the bounds and ends of the episodes that are visible now."""
        ends = [self._reward] if self._terminated is None else [self._reward, self._terminated]
        while True:  # until no episode comes or goes during a turn
            serials = self._disk.serials
            self._steps, self._rewards = self._timesteps([*self._named]), self._timesteps([self._reward])
            last = self._timesteps(ends, return_indices=True)
            lengths = self._disk.episode_lens
            same = len(self._steps) == len(self._rewards) == len(last)
            if same and np.array_equal(serials, self._disk.serials):
                break
        self.lengths = lengths if lengths.sum() == len(last) else _lengths_of(last)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.terminated = np.zeros(len(self.lengths), np.bool_)
        if self._terminated is not None:
            flags = last.at(self.starts + self.lengths - 1).data
            self.terminated = (
                flatten(flags)[self._terminated].numpy().reshape(len(self.lengths), -1)[:, 0].astype(np.bool_)
            )
        self._stops = np.cumsum(self.lengths - ~self.terminated)
        if not self.transition_count:
            raise NotEnoughDataError("there are episodes, but no transition: each has one timestep and is truncated")

    def _timesteps(self, fields: list[str], **options: Any) -> Any:
        return self._disk.dataset(
            timestep_level=True,
            fields=fields,
            filter_fields=with_excluded(self._disk),
            include_metadata=False,
            on_stale="raise",
            fieldname_map={name: key for name, key in self._named.items() if name in fields},
            **options,
        )

    # Rows

    def located(self, index: Array) -> _Located:
        """The places of the transitions with these numbers (B,)."""
        i = np.searchsorted(self._stops, index, side="right")
        before = np.where(i > 0, self._stops[i - 1], 0)
        return _Located(self.starts[i], self.lengths[i], self.terminated[i], index - before)

    def steps(self, place: Array, exists: Array) -> tuple[list[Array], Array]:
        """The observations, one array for each field, and the actions of timesteps.

        Args:
            place: the rows of the timesteps, in any shape.
            exists: whether each exists, of the same shape; where it does not, values are zero.

        Returns:
            Arrays (*place.shape, *shape).
        """
        batch = self._steps.at(place.reshape(-1)).data
        missing = ~exists.reshape(-1)

        def column(key: str) -> Array:
            values = _at_least_2d(to_numpy(batch[key]))
            values[missing] = 0
            return values.reshape(*place.shape, *values.shape[1:])

        return [column(key) for key in self._keys], column("action")

    def rewards(self, place: Array, count: Array) -> Array:
        """Rewards (B, max(count), *shape) from each row of `place` (B,) on; only the first `count` (B,) are meant."""
        places = np.minimum(place[:, None] + np.arange(count.max()), len(self._rewards) - 1)
        rewards = _at_least_2d(to_numpy(flatten(self._rewards.at(places.reshape(-1)).data)[self._reward]))
        return rewards.reshape(*places.shape, *rewards.shape[1:])

    # BufferProtocol

    append = _refuse

    @property
    def episodes(self) -> _Episodes:
        return _Episodes(self)

    @property
    def transition_count(self) -> int:
        return int(self._stops[-1])

    def __len__(self) -> int:
        return self.transition_count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at = self.located(np.array([index % len(self)]))
        return self.episodes[int(np.searchsorted(self.starts, at.start[0]))], int(at.t[0])


class _Episodes(Sequence[Any]):
    """The episodes of a folder, each read when its item is asked for."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows.starts)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        rows, i = self._rows, range(len(self))[i]
        place, length = rows.starts[i] + np.arange(rows.lengths[i]), rows.lengths[i : i + 1]
        observations, actions = rows.steps(place, np.ones_like(place, np.bool_))
        rewards = rows.rewards(place[:1], length)[0]
        return Episode(_observation(observations), actions, rewards, bool(rows.terminated[i]))


@dataclass(frozen=True)
class _Transitions(Sequence[Any]):
    """The transitions of a batch as d3rlpy's objects, each made when its item is asked for."""

    picker: Any
    rows: _Rows
    at: _Located
    observations: list[Array]
    actions: Array
    rewards: Array
    terminal: Array
    interval: Array

    def __len__(self) -> int:
        return len(self.interval)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        at, picker = self.at, self.picker
        to_go = self.rows.rewards((at.start + at.t)[i : i + 1], at.rest[i : i + 1])[0]
        if type(picker) is SparseRewardTransitionPicker and np.all(to_go == picker._step_reward):
            to_go = np.array([[picker._failure_return]], np.float32)
        return Transition(
            observation=_observation([x[0, i] for x in self.observations]),
            action=self.actions[0, i],
            reward=self.rewards[i],
            next_observation=_observation([x[1, i] for x in self.observations]),
            next_action=self.actions[1, i],
            terminal=float(self.terminal[i]),
            interval=int(self.interval[i]),
            rewards_to_go=to_go,
        )


def _action_space(actions: Array) -> constants.ActionSpace:
    whole = bool(np.all(actions.astype(np.int32) == actions))
    return constants.ActionSpace.DISCRETE if whole else constants.ActionSpace.CONTINUOUS


def _lengths_of(timesteps: Any) -> Array:
    """How many of the timesteps each episode has. Unlike `episode_lens` this counts trimmed episodes, too."""
    parts = range(0, len(timesteps), SCANNED)
    owners = [
        timesteps.at(np.arange(at, min(at + SCANNED, len(timesteps)))).data["_indices"][:, :-1].numpy() for at in parts
    ]
    owner = np.concatenate(owners)
    begins = np.flatnonzero(np.r_[True, (owner[1:] != owner[:-1]).any(axis=1)])
    return np.diff(np.r_[begins, len(owner)])


def _returns(rewards: Array, interval: Array, gamma: float) -> Array:
    """Discounted sums (B, *shape) float64 of the first `interval` rewards; those of equal interval at once."""
    out = np.zeros((len(rewards), *rewards.shape[2:]))
    for n in np.unique(interval).tolist():
        own = rewards[interval == n, :n]
        discounts = (gamma ** np.arange(n)).reshape(n, *[1] * (rewards.ndim - 2))
        out[interval == n] = np.sum(own * discounts, axis=1)
    return out


def _at_least_2d(values: Array) -> Array:
    return values[:, None] if values.ndim == 1 else values


def _frames(how: Any, kind: Any) -> int:
    """How many frames a picker or slicer of class `kind` stacks into one observation; 1 for any other class."""
    return int(how._n_frames) if type(how) is kind else 1


def _stacked(x: Array) -> Array:
    """(A, B, frames, channels, …) as (A, B, frames · channels, …)."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def _float(values: Array) -> Array:
    return values.astype(np.float32)


def _observation(values: list[Array]) -> Any:
    return values[0] if len(values) == 1 else values
