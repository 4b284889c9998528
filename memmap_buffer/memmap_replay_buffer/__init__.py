"""The names of memmap-replay-buffer, so that code written for that package runs after a change of one import.

    from memmap_replay_buffer import …   becomes   from memmap_buffer.memmap_replay_buffer import …

`ReplayBuffer` here is the library's own with the habits of that package. docs/migration.md lists what differs all the
same, and why. The dataset classes need torch, so they are imported on first use.

    buffer       ReplayBuffer, ConcatReplayBuffer: episodes that open by themselves
    columns      `data` and `meta_data`: arrays on the disk
    collector    EpisodeCollector
    datasets     ReplayDataset and its kinds
    films        trajectory_to_video, frames_to_sheet
"""

from typing import TYPE_CHECKING, Any

from memmap_buffer.memmap_replay_buffer.buffer import (
    ConcatReadOnlyError,
    ConcatReplayBuffer,
    FolderMissingError,
    ReplayBuffer,
)
from memmap_buffer.memmap_replay_buffer.collector import EpisodeCollector
from memmap_buffer.memmap_replay_buffer.columns import Column, EpisodeIndex, Part
from memmap_buffer.memmap_replay_buffer.films import frames_to_sheet, trajectory_to_video

if TYPE_CHECKING:
    from memmap_buffer.memmap_replay_buffer.datasets import (
        ReplayDataset,
        ReplayDatasetNStep,
        ReplayDatasetTimestep,
        ReplayDatasetTimeWindow,
        ReplayDatasetTrajectory,
    )

__all__ = [
    "Column",
    "ConcatReadOnlyError",
    "ConcatReplayBuffer",
    "EpisodeCollector",
    "EpisodeIndex",
    "FolderMissingError",
    "Part",
    "ReplayBuffer",
    "ReplayDataset",
    "ReplayDatasetNStep",
    "ReplayDatasetTimeWindow",
    "ReplayDatasetTimestep",
    "ReplayDatasetTrajectory",
    "frames_to_sheet",
    "trajectory_to_video",
]


def __getattr__(name: str) -> Any:
    if name.startswith("ReplayDataset"):
        from memmap_buffer.memmap_replay_buffer import datasets

        return getattr(datasets, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
