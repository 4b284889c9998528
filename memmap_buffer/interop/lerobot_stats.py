"""The statistics that a LeRobot data set has of its features' values, made by our own; its files are `lerobot`'s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from memmap_buffer.maintenance.statistics import RunningStatistics

PART_BYTES = 1 << 22
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class Described:
    """What `meta/stats.json` and `meta/episodes` say of the features' values, text left out.

    As LeRobot does, images are described by channel, between 0 and 1, and other features by their last axis.
    """

    def __init__(self, frames: int) -> None:
        self._frames = frames
        self._rng = np.random.default_rng(0)
        self._features: dict[str, RunningStatistics] = {}
        self._columns: dict[str, Any] = {}

    def add(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The statistics of an episode, by `stats/<feature>/<which>`."""
        self._columns = {name: x for name, x in columns.items() if x.dtype.kind != "U" and x[0].size}
        found: dict[str, Any] = {}
        for name, column in self._columns.items():
            if name not in self._features:
                self._features[name] = self._running(column, self._frames)
            episode = self._running(column, len(column))
            for part in _parts(column):
                self._features[name].add(part)
                episode.add(part)
            told = _stats(episode, column, len(column))
            found |= {f"stats/{name}/{which}": value for which, value in told.items()}
        return found

    def whole(self) -> dict[str, dict[str, Any]]:
        """The statistics of all that was added, by feature."""
        return {name: _stats(self._features[name], column, self._frames) for name, column in self._columns.items()}

    def _running(self, column: Any, frames: int) -> RunningStatistics:
        channels = column.shape[-1] if column.ndim > 1 else 1
        return RunningStatistics((channels,), frames * column[0].size // channels, QUANTILES, seed=self._rng)


def _parts(column: Any) -> Iterator[Any]:
    """The values of a feature, (n, channels) float64, a few megabytes at a time."""
    step = max(1, PART_BYTES // (8 * max(1, column[0].size)))
    for start in range(0, len(column), step):
        part = column[start : start + step].astype(np.float64)
        yield part.reshape(-1, part.shape[-1] if part.ndim > 1 else 1) / (255 if is_picture(column) else 1)


def _stats(running: RunningStatistics, column: Any, frames: int) -> dict[str, Any]:
    found = running.found()
    assert found is not None, "an episode has one frame at least"
    values = {"mean": found.mean, "std": found.std}
    values |= {f"q{round(100 * q):02d}": value for q, value in found.quantiles.items()}
    values |= {"min": found.min, "max": found.max}
    if is_picture(column):  # LeRobot has three channels of all
        values = {which: np.broadcast_to(value, 3).reshape(3, 1, 1) for which, value in values.items()}
    elif column.dtype.kind in "biu":
        values |= {which: values[which].astype(column.dtype) for which in ("min", "max")}
    return {which: value.tolist() for which, value in values.items()} | {"count": [frames]}


def is_picture(column: Any) -> bool:
    """Whether a feature, (frames, *shape), is of images with their channels last."""
    return bool(column.dtype == np.uint8 and column.ndim == 4 and column.shape[-1] in (1, 3))
