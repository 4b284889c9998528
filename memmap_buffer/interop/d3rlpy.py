"""d3rlpy: a data set over a folder, which its algorithms train from without a copy.

    CQLConfig().create().fit(DiskDataset("data"), n_steps=100_000)

Batches are equal to those of d3rlpy's `MDPDataset` of the same episodes and random numbers. Rows are read when a batch
is drawn; only the bounds of the episodes are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from memmap_buffer import ConcatBuffer, NotEnoughDataError, ReplayBuffer, Schema, StaleEpisodeError, Window
from memmap_buffer.adapters import AnyPath, Array, extra, flatten
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
        observations = (observation,) if isinstance(observation, str) else tuple(observation)
        terminated = schema.terminated if terminated is None else terminated
        named = (*observations, action, reward, *([] if terminated is None else [terminated]))
        schema.require_fields(named, "DiskDataset", schema.fields)
        require_kinds({name: schema.fields[name] for name in named}, "d3rlpy", "U")
        self._rows = _Rows(self.disk, (*observations, action), reward, terminated)
        episode = self._rows.episodes[0]
        if action_space is None:
            discrete = bool(np.all(episode.actions.astype(np.int32) == episode.actions))
            action_space = constants.ActionSpace.DISCRETE if discrete else constants.ActionSpace.CONTINUOUS
        if action_size is None:
            discrete = action_space == constants.ActionSpace.DISCRETE
            largest = self.disk.statistics([action])[action].max if discrete else None
            action_size = int(np.asarray(largest).max()) + 1 if discrete else episode.actions.shape[1]
        super().__init__(
            self._rows,
            transition_picker=transition_picker,
            trajectory_slicer=trajectory_slicer,
            observation_signature=episode.observation_signature,
            action_signature=episode.action_signature,
            reward_signature=episode.reward_signature,
            action_space=action_space,
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
        frames = at.t[:, None] + np.arange(1 - _frames(picker, FrameStackTransitionPicker), 1)
        following = np.where(terminal[:, None], -1, frames + interval[:, None])
        *observations, actions = rows.steps(at.start[:, None], np.stack([frames, following]))
        observations, actions = [_stacked(x) for x in observations], actions[:, :, -1]
        rewards = rows.rewards(at.start + at.t, interval)
        rewards = _returns(rewards, interval, picker._gamma) if several else rewards[:, 0]
        now_observed, next_observed = (_observation([_float(x[i]) for x in observations]) for i in range(2))
        columns = {"action": actions[0], "reward": rewards, "next_action": actions[1]}
        columns |= {"terminal": terminal.astype(float).tolist(), "interval": interval.tolist()}
        return TransitionMiniBatch(
            observations=now_observed,
            actions=_float(actions[0]),
            rewards=_float(rewards),
            next_observations=next_observed,
            next_actions=_float(actions[1]),
            terminals=_float(terminal[:, None]),
            intervals=_float(interval[:, None]),
            transitions=_OnDemand(batch_size, partial(_transition, picker, rows, at, observations, columns)),
        )

    def _trajectories(self, batch_size: int, length: int) -> TrajectoryMiniBatch:
        rows, frames = self._rows, _frames(self.trajectory_slicer, FrameStackTrajectorySlicer)
        at = rows.located(np.random.randint(rows.transition_count, size=batch_size))
        t = at.t[:, None] + np.arange(2 - length - frames, 1)
        *observations, actions = rows.steps(at.start[:, None], t)
        windows = [np.moveaxis(sliding_window_view(x, frames, axis=1), -1, 2) for x in observations]
        t = t[:, frames - 1 :]
        begin = t[:, 0].clip(0)
        to_end = at.t + at.rest - begin
        rewards = rows.rewards(at.start + begin, to_end)
        scores, to_go = (np.zeros((batch_size, length, *rewards.shape[2:]), rewards.dtype) for _ in range(2))
        for i, (n, rest) in enumerate(zip((at.t + 1 - begin).tolist(), to_end.tolist(), strict=True)):
            own = rewards[i, :rest]
            scores[i, length - n :] = own[:n]
            to_go[i, length - n :] = (np.sum(own) - np.cumsum(own, axis=0) + own)[:n]  # d3rlpy's order of sums
        terminals = np.zeros((batch_size, length, 1))
        terminals[:, -1, 0] = at.terminated & (at.rest == 1)
        return TrajectoryMiniBatch(
            observations=_observation([_float(_stacked(x)) for x in windows]),
            actions=_float(actions[:, frames - 1 :]),
            rewards=_float(scores),
            returns_to_go=_float(to_go),
            terminals=_float(terminals),
            timesteps=_float((t + 1).clip(0)),
            masks=_float(t >= 0),
            length=length,
        )

    append = append_episode = clip_episode = _refuse


class _Located(NamedTuple):
    """Places of timesteps, arrays (B,).

    Args:
        episode: the number of the timestep's episode.
        start: the first row of that episode.
        terminated: whether it terminated.
        t: the timestep within it.
        rest: how many timesteps it has from this one on.
    """

    episode: Array
    start: Array
    terminated: Array
    t: Array
    rest: Array


class _Rows:
    """A folder as d3rlpy's `BufferProtocol`: the timesteps of all episodes one after another, read by row number."""

    def __init__(self, disk: Any, names: tuple[str, ...], reward: str, terminated: str | None) -> None:
        self._disk, self._names, self._reward, self._terminated = disk, names, reward, terminated
        self.refresh()

    def refresh(self) -> None:
        """Look up the bounds and ends of the episodes that are visible now."""
        ends = [self._reward] if self._terminated is None else [self._reward, self._terminated]
        while True:  # until no episode comes or goes during a turn
            serials = self._disk.serials
            self._steps, self._rewards, last = map(self._timesteps, (self._names, [self._reward], ends))
            lengths = self._disk.episode_lens
            if lengths.sum() != len(last):  # a ring has forgotten the first timesteps of some
                longest = self._disk.max_timesteps
                view = Window(longest, stride=longest, fields=(), boundary="pad")  # one an episode, from the first left
                lengths = self._disk.batch(view=view, **self._how)["_lens"]
            same = len(self._steps) == len(self._rewards) == len(last) == lengths.sum()
            if same and np.array_equal(serials, self._disk.serials):
                break
        self.lengths = lengths
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.terminated = np.zeros(len(self.lengths), np.bool_)
        if self._terminated is not None:
            flags = _columns(last, self.starts + self.lengths - 1)[self._terminated]
            self.terminated = flags.reshape(len(self.lengths), -1)[:, 0].astype(np.bool_)
        self._stops = np.cumsum(self.lengths - ~self.terminated)
        if not self.transition_count:
            raise NotEnoughDataError("there are episodes, but no transition: each has one timestep and is truncated")

    @property
    def _how(self) -> dict[str, Any]:
        how = {"include_metadata": False, "on_stale": "raise", "format": "numpy"}
        return {"filter_fields": with_excluded(self._disk), **how}

    def _timesteps(self, fields: Sequence[str]) -> Any:
        return self._disk.dataset(timestep_level=True, fields=fields, **self._how)

    # Rows

    def located(self, index: Array) -> _Located:
        """The places of the transitions with these numbers (B,)."""
        i = np.searchsorted(self._stops, index, side="right")
        t = index - np.where(i > 0, self._stops[i - 1], 0)
        return _Located(i, self.starts[i], self.terminated[i], t, self.lengths[i] - t)

    def steps(self, start: Array, t: Array) -> list[Array]:
        """The observations, one array for each field, and the actions of timesteps, (*t.shape, *shape) each.

        Args:
            start: the first rows of their episodes, of a shape that broadcasts to that of `t`.
            t: the timesteps, in any shape; at negative ones values are zero.
        """
        batch, missing = _columns(self._steps, start + np.maximum(t, 0)), t < 0
        columns = [_at_least_1d(batch[name], t.ndim) for name in self._names]
        for column in columns:
            column[missing] = 0
        return columns

    def rewards(self, place: Array, count: Array) -> Array:
        """Rewards (B, max(count), *shape) from each row of `place` (B,) on; only the first `count` (B,) are meant."""
        places = np.minimum(place[:, None] + np.arange(count.max()), len(self._rewards) - 1)
        return _at_least_1d(_columns(self._rewards, places)[self._reward], 2)

    # BufferProtocol

    append = _refuse

    @property
    def episodes(self) -> _OnDemand:
        return _OnDemand(len(self.starts), self._episode)

    def _episode(self, i: int) -> Any:
        *observations, actions = self.steps(self.starts[i], np.arange(self.lengths[i]))
        rewards = self.rewards(self.starts[i : i + 1], self.lengths[i : i + 1])[0]
        return Episode(_observation(observations), actions, rewards, bool(self.terminated[i]))

    @property
    def transition_count(self) -> int:
        return int(self._stops[-1])

    def __len__(self) -> int:
        return self.transition_count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at = self.located(np.array([index % len(self)]))
        return self._episode(int(at.episode[0])), int(at.t[0])


class _OnDemand(Sequence[Any]):
    """A sequence of d3rlpy's objects, each made when its item is asked for."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self._items, self._make = range(length), make

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: Any) -> Any:
        items = self._items[i]
        return [self._make(k) for k in items] if isinstance(items, range) else self._make(items)


def _transition(
    picker: Any, rows: _Rows, at: _Located, observations: list[Array], columns: Mapping[str, Any], i: int
) -> Any:
    """Transition `i` of a batch, of which `observations` are (2, B, *shape) each, and `columns` (B, *shape)."""
    to_go = rows.rewards((at.start + at.t)[i : i + 1], at.rest[i : i + 1])[0]
    if type(picker) is SparseRewardTransitionPicker and np.all(to_go == picker._step_reward):
        to_go = np.array([[picker._failure_return]], np.float32)
    observation, following = (_observation([x[k, i] for x in observations]) for k in range(2))
    own = {name: column[i] for name, column in columns.items()}
    return Transition(observation=observation, next_observation=following, rewards_to_go=to_go, **own)


def _columns(timesteps: Any, place: Array) -> dict[str, Array]:
    """Field -> (*place.shape, *field) of the timesteps at these rows."""
    batch = flatten(timesteps.at(place.reshape(-1)).data)
    return {name: values.reshape(*place.shape, *values.shape[1:]) for name, values in batch.items()}


def _returns(rewards: Array, interval: Array, gamma: float) -> Array:
    """Discounted sums (B, *shape) float64 of the first `interval` rewards; those of equal interval at once."""
    out = np.zeros((len(rewards), *rewards.shape[2:]))
    for n in np.unique(interval).tolist():
        own = rewards[interval == n, :n]
        discounts = (gamma ** np.arange(n)).reshape(n, *[1] * (rewards.ndim - 2))
        out[interval == n] = np.sum(own * discounts, axis=1)
    return out


def _at_least_1d(values: Array, lead: int) -> Array:
    """Values without a shape of their own behind the `lead` axes as values of shape (1,)."""
    return values[..., None] if values.ndim == lead else values


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
