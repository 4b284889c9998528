"""The dataset classes of memmap-replay-buffer, by its names: the library's dataset, with one class for each level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from memmap_buffer import ReplayBuffer
from memmap_buffer.adapters import AnyPath, EpisodeDataset


class ReplayDatasetTrajectory(EpisodeDataset):
    """Whole episodes.

    Args:
        replay_buffer: a buffer, or its folder.
        options: those of `Options`.

    Raises:
        SchemaError: options contradict each other or the schema.
        NotEnoughDataError: there is nothing to read.
    """

    level: ClassVar[dict[str, Any]] = {}

    def __init__(self, replay_buffer: ReplayBuffer | AnyPath, **options: Any) -> None:
        if not isinstance(replay_buffer, ReplayBuffer):
            replay_buffer = ReplayBuffer.from_folder(replay_buffer, read_only=True)
        super().__init__(ReplayBuffer.dataset(replay_buffer, **{**self.level, **options}).reader)


class ReplayDatasetTimestep(ReplayDatasetTrajectory):
    """Single timesteps; see `ReplayDatasetTrajectory`."""

    level: ClassVar[dict[str, Any]] = {"timestep_level": True}


class ReplayDatasetNStep(ReplayDatasetTrajectory):
    """Transitions over `n_steps` timesteps; see `ReplayDatasetTrajectory`."""


class ReplayDatasetTimeWindow(ReplayDatasetTrajectory):
    """A random crop of `window_length` timesteps of each episode; see `ReplayDatasetTrajectory`."""


ReplayDataset = ReplayDatasetTrajectory


def kind_of(options: Mapping[str, Any]) -> type[ReplayDatasetTrajectory]:
    """The class for the level that the options name; for a `view` it is `ReplayDatasetTrajectory`."""
    if options.get("n_steps") is not None:
        return ReplayDatasetNStep
    if options.get("window_length") is not None:
        return ReplayDatasetTimeWindow
    return ReplayDatasetTimestep if options.get("timestep_level") else ReplayDatasetTrajectory
