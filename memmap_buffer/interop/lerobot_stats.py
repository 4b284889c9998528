"""The statistics of a LeRobot data set: of each feature's values, by episode and for all of them. Writes no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from memmap_buffer.maintenance.statistics import RunningStatistics

BLOCK_BYTES = 1 << 22
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


class FeatureStatistics:
    """The statistics in `meta/stats.json` and `meta/episodes`; those of text are left out.

    As in LeRobot, they are by channel for images, whose values are scaled to 0 … 1, and by the last axis for others.
    """

    def __init__(self, frames: int) -> None:
        self._frames = frames
        self._rng = np.random.default_rng(0)
        self._features: dict[str, RunningStatistics] = {}
        self._columns: dict[str, Any] = {}

    def add(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The statistics of an episode, by `stats/<feature>/<which>`."""
        self._columns = {name: x for name, x in columns.items() if x.dtype.kind != "U" and x[0].size}
        row: dict[str, Any] = {}
        for name, column in self._columns.items():
            if name not in self._features:
                self._features[name] = self._running(column, self._frames)
            episode = self._running(column, len(column))
            for values in _blocks(column):
                self._features[name].add(values)
                episode.add(values)
            for which, value in _stats(episode, column, len(column)).items():
                row[f"stats/{name}/{which}"] = value
        return row

    def whole(self) -> dict[str, dict[str, Any]]:
        """The statistics of all episodes, by feature."""
        return {name: _stats(self._features[name], column, self._frames) for name, column in self._columns.items()}

    def _running(self, column: Any, frames: int) -> RunningStatistics:
        channels = column.shape[-1] if column.ndim > 1 else 1
        return RunningStatistics((channels,), frames * column[0].size // channels, QUANTILES, seed=self._rng)


def _blocks(column: Any) -> Iterator[Any]:
    """The values of a feature, (n, channels) float64, a few megabytes at a time."""
    step = max(1, BLOCK_BYTES // (8 * max(1, column[0].size)))
    for start in range(0, len(column), step):
        block = column[start : start + step].astype(np.float64)
        yield block.reshape(-1, block.shape[-1] if block.ndim > 1 else 1) / (255 if is_image(column) else 1)


def _stats(running: RunningStatistics, column: Any, frames: int) -> dict[str, Any]:
    result = running.result()
    assert result is not None, "an episode has one frame at least"
    values = {"mean": result.mean, "std": result.std}
    values |= {f"q{round(100 * q):02d}": value for q, value in result.quantiles.items()}
    values |= {"min": result.min, "max": result.max}
    if is_image(column):  # LeRobot writes three channels for every image
        values = {which: np.broadcast_to(value, 3).reshape(3, 1, 1) for which, value in values.items()}
    elif column.dtype.kind in "biu":
        values |= {which: values[which].astype(column.dtype) for which in ("min", "max")}
    return {which: value.tolist() for which, value in values.items()} | {"count": [frames]}


def is_image(column: Any) -> bool:
    """Whether a feature, (frames, *shape), is of images with their channels last."""
    return bool(column.dtype == np.uint8 and column.ndim == 4 and column.shape[-1] in (1, 3))
