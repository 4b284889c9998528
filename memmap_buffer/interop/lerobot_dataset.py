"""LeRobot: a folder in the form of its `LeRobotDataset`, from which its policies train without an export.

Features have the names and shapes that `export_lerobot` would give them: in an imported data set its own. Nothing of
LeRobot is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from memmap_buffer import Field, NotEnoughDataError, Offsets, ReplayBuffer, SchemaError
from memmap_buffer.adapters import AnyPath, Array, extra, flatten
from memmap_buffer.interop.episodes import exported_episodes, opened, require_kinds, with_excluded
from memmap_buffer.interop.lerobot import COUNTERS, FeatureStatistics, Form

CAMERAS = ("image", "video")


class DiskLeRobotDataset:
    """A `LeRobotDataset` whose frames lie in a folder.

    An item is a dict of tensors by the names of features: images float32 (C, H, W) between 0 and 1, other numbers
    float32 or int64, and `task`, a text. A feature in `delta_timestamps` has an axis of time in front; beyond the ends
    of the episode it repeats the nearest frame, and `<feature>_is_pad` is True there. The data set has the episodes
    that were visible when it was made. It pickles for the workers of a DataLoader, which reads each batch at once.

    Args:
        repo_id: a name for the data set.
        root: the folder; or an open buffer.
        episodes: the positions of the episodes to give; None: all.
        image_transforms: a function from images to images, called for each camera of each item.
        delta_timestamps: feature -> seconds from the frame's time, such as those of `resolve_delta_timestamps`.
        tolerance_s: how far these seconds may be from whole frames.
        fps: frames a second; default: as in the imported data set.

    Attributes:
        meta: the facts about the data set, see `DiskLeRobotMetadata`.
        episodes: the argument `episodes`.
        delta_indices: feature -> frames from the item's frame, or None.

    Raises:
        NotABufferError: there is no buffer in the folder.
        NotEnoughDataError: there are no episodes.
        SchemaError: no `fps` is known, a feature of `delta_timestamps` is not there, or a `capacity` has trimmed the
            oldest episode.
        ValueError: `delta_timestamps` are not at whole frames.
    """

    def __init__(
        self,
        repo_id: str,
        root: AnyPath | ReplayBuffer,
        episodes: Sequence[int] | None = None,
        image_transforms: Callable[[Any], Any] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        tolerance_s: float = 1e-4,
        *,
        fps: float | None = None,
    ) -> None:
        disk = opened(root)
        self.repo_id, self.root, self.episodes = repo_id, disk.folder, None if episodes is None else list(episodes)
        self.image_transforms, self.delta_timestamps, self.tolerance_s = image_transforms, delta_timestamps, tolerance_s
        self.meta = DiskLeRobotMetadata(repo_id, disk, fps)
        self.delta_indices = _frames_of(delta_timestamps, self.meta.fps, tolerance_s) if delta_timestamps else None
        for name in self.delta_indices or {}:
            if name not in self.meta.stored:
                raise SchemaError(f"delta_timestamps: got {name!r}, expected one of {', '.join(self.meta.stored)}")
        offsets = {ours: (self.delta_indices or {}).get(name, [0]) for name, ours in self.meta.stored.items()}
        self._frames: Any = disk.dataset(
            view=Offsets(offsets, padding="edge"),
            filter_fields=with_excluded(disk),
            include_metadata=False,
            return_indices=True,
            on_stale="raise",
            transform=_AsFrames(self.meta, disk.schema.fields, self.delta_indices or {}),
        )
        if len(self._frames) != self.meta.total_frames:
            raise SchemaError(
                f"{disk.folder}: got {len(self._frames)} frames, and {self.meta.total_frames} in whole episodes; a "
                "`capacity` or a writer has changed them meanwhile; make a snapshot"
            )
        chosen = [np.arange(*self.meta.bounds[i]) for i in self.episodes or ()]
        self._positions = None if self.episodes is None else np.concatenate([np.zeros(0, np.int64), *chosen])

    @property
    def num_frames(self) -> int:
        """How many frames the episodes of this data set have."""
        return self.meta.total_frames if self._positions is None else len(self._positions)

    @property
    def num_episodes(self) -> int:
        """How many episodes this data set gives."""
        return self.meta.total_episodes if self.episodes is None else len(self.episodes)

    @property
    def fps(self) -> float:
        """Frames a second."""
        return float(self.meta.info["fps"])

    @property
    def features(self) -> dict[str, Any]:
        """Name -> `dtype`, `shape` and `names` of each feature."""
        return self.meta.features

    def __len__(self) -> int:
        return self.num_frames

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """The item of one frame, by its position among all frames of this data set."""
        item: dict[str, Any] = self.__getitems__([idx])[0]
        return item

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The items of many frames, read at once."""
        batch = self._frames.__getitems__(indices if self._positions is None else self._positions[list(indices)])
        if self.image_transforms is not None:
            for item in batch:
                item.update({name: self.image_transforms(item[name]) for name in self.meta.camera_keys})
        return batch

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({{\n"
            f"    Repository ID: {self.repo_id!r},\n"
            f"    Number of selected episodes: '{self.num_episodes}',\n"
            f"    Number of selected samples: '{self.num_frames}',\n"
            f"    Features: '{list(self.features)}',\n"
            "})"
        )


class DiskLeRobotMetadata:
    """The metadata of a data set, with the names of LeRobot's `LeRobotDatasetMetadata`.

    Args:
        repo_id: a name for the data set.
        disk: the buffer.
        fps: frames a second; default: as in the imported data set.

    Attributes:
        stored: name of a feature -> the field that holds it.
        info: the content that `meta/info.json` would have.
        episodes: a table: rows by number, columns by name.
        bounds: (episodes, 2) int64, the first frame of each episode and the frame after its last.
        texts: the texts of the tasks.
        task_of: (episodes,) int64, the number of each episode's task; None: frames have numbers of their own.

    Raises:
        NotEnoughDataError: there are no episodes.
        SchemaError: no `fps` is known.
    """

    def __init__(self, repo_id: str, disk: ReplayBuffer, fps: float | None = None) -> None:
        self.repo_id, self.root, self._disk = repo_id, disk.folder, disk
        self._form = form = Form(disk, fps)
        require_kinds(disk.schema.fields, "LeRobot")
        if not disk.num_episodes:
            raise NotEnoughDataError(f"{disk.folder}: there are no episodes")
        self.serials, lengths = disk.serials, disk.episode_lens
        ends = np.cumsum(lengths)
        self.bounds = np.stack([ends - lengths, ends], axis=1)
        entries = {name: {**about, "shape": tuple(about["shape"])} for name, about in form.entries().items()}
        entries.pop(form.features.get("valid", ""), None)
        self.stored = {feature: field for field, feature in form.features.items() if field != "valid"}
        self.texts, self.task_of = form.texts, None
        if not form.by_frame:
            texts = disk.episodes(fields=())["task"] if "task" in disk.meta_fieldnames else [""] * len(lengths)
            self.task_of = np.array([form.number_of(str(text)) for text in texts])
        totals = {"total_episodes": len(lengths), "total_frames": int(ends[-1]), "total_tasks": len(self.texts)}
        self.info = form.info(totals, entries)
        columns = {
            "episode_index": np.arange(len(lengths)),
            "length": lengths,
            "dataset_from_index": self.bounds[:, 0],
            "dataset_to_index": self.bounds[:, 1],
        }
        self.episodes = _Table({name: column.tolist() for name, column in columns.items()})

    @property
    def features(self) -> dict[str, Any]:
        """Name -> `dtype`, `shape` and `names` of each feature."""
        features: dict[str, Any] = self.info["features"]
        return features

    @cached_property
    def stats(self) -> dict[str, dict[str, Array]]:
        """Statistics of each feature: of the imported data set if its numbers of episodes and frames are the same.

        Else they are computed, which reads every frame once. They may be replaced.
        """
        imported = self._form.imported.get("stats")
        if imported and imported["of"] == [self.total_episodes, self.total_frames]:
            return _arrays(imported["features"])
        return self.compute_stats()

    def compute_stats(self) -> dict[str, dict[str, Array]]:
        """Compute `stats` anew, as after values were changed; this reads every frame once."""
        episodes = exported_episodes(self._disk)
        statistics = FeatureStatistics(episodes.num_steps)
        for _, columns in self._form.episodes(episodes):
            statistics.add(columns)
        self.stats = _arrays(statistics.whole())
        return self.stats

    @property
    def tasks(self) -> Any:
        """A pandas table of the tasks: their texts are its index, `task_index` its column."""
        with extra("pandas"):
            import pandas

        return pandas.DataFrame({"task_index": range(len(self.texts))}, index=self.texts)

    fps = property(lambda self: self.info["fps"])
    robot_type = property(lambda self: self.info["robot_type"])
    total_episodes = property(lambda self: self.info["total_episodes"])
    total_frames = property(lambda self: self.info["total_frames"])
    total_tasks = property(lambda self: self.info["total_tasks"])
    image_keys = property(lambda self: [name for name, about in self.features.items() if about["dtype"] == "image"])
    video_keys = property(lambda self: [name for name, about in self.features.items() if about["dtype"] == "video"])
    camera_keys = property(lambda self: [name for name, about in self.features.items() if about["dtype"] in CAMERAS])
    names = property(lambda self: {name: about["names"] for name, about in self.features.items()})
    shapes = property(lambda self: {name: about["shape"] for name, about in self.features.items()})


class _Table:
    """A table with rows by number and columns by name, as a Hugging Face data set has them."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self._columns = dict(columns)
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        return {name: column[key] for name, column in self._columns.items()}


class _AsFrames:
    """A transform from a batch of offsets to the features of LeRobot's items. It pickles without the buffer."""

    def __init__(
        self, meta: DiskLeRobotMetadata, fields: Mapping[str, Field], deltas: Mapping[str, Sequence[int]]
    ) -> None:
        self._serials, self._starts = meta.serials, meta.bounds[:, 0]
        self._texts, self._task_of, self._fps = meta.texts, meta.task_of, meta.fps
        self._deltas = dict(deltas)
        over_time = {name for name, at in deltas.items() if len(at) > 1 or name not in meta.video_keys}
        self._features = {
            name: _Feature(ours, _layout(meta.features[name], fields[ours]), name in over_time)
            for name, ours in meta.stored.items()
        }

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        columns = flatten(batch)
        out: dict[str, Any] = {}
        for name, feature in self._features.items():
            out[name] = feature.of(columns[feature.field])
            if name in self._deltas:
                out[f"{name}_is_pad"] = ~columns[f"_mask_{feature.field}"]
        indices = columns["_indices"]
        episode = np.searchsorted(self._serials, indices[:, -2].numpy())
        counters = (indices[:, -1].numpy() + self._starts[episode], indices[:, -1].numpy(), episode)
        out |= {name: indices.new_tensor(x) for name, x in zip(COUNTERS, counters, strict=True)}
        if "timestamp" not in out:
            out["timestamp"] = out["frame_index"].float() / self._fps
        if self._task_of is not None:
            out["task_index"] = indices.new_tensor(self._task_of[episode])
        now = out["task_index"].reshape(len(indices), -1)[:, -1].tolist()
        out["task"] = [self._texts[number] for number in now]
        return out


@dataclass(frozen=True)
class _Feature:
    """The way from a field's rows to a feature: the field, its layout (`_layout`), whether it keeps its time axis."""

    field: str
    layout: str
    over_time: bool

    def of(self, rows: Any) -> Any:
        """Rows (B, K, *shape) as (B, K, *feature), or (B, *feature) if the feature has no time axis."""
        if isinstance(rows, list):
            return rows if self.over_time else [row[0] for row in rows]
        rows = rows if self.over_time else rows[:, 0]
        if self.layout == "scalar":
            rows = rows[..., 0]
        if self.layout == "last":
            rows = rows.movedim(-1, -3)
        if self.layout in ("first", "last"):
            floats = rows.new_empty(rows.shape, dtype=rows[:0].float().dtype)
            return floats.copy_(rows).div_(255)  # in place: allocating memory takes the time, so only once
        if rows.dtype.is_floating_point:
            return rows.float()
        return rows if str(rows.dtype) == "torch.bool" else rows.long()


def _layout(about: Mapping[str, Any], field: Field) -> str:
    """The axis of an image's channels, "first" or "last"; "scalar" for shape (1,), "" for other features."""
    if about["dtype"] in CAMERAS:
        declared_first = tuple(about["shape"]) == field.shape and "channel" in (about["names"] or [""])[0]
        return "first" if declared_first or field.shape[-1] not in (1, 3) else "last"
    return "scalar" if field.shape == (1,) else ""


def _frames_of(deltas: Mapping[str, Sequence[float]], fps: float, tolerance: float) -> dict[str, list[int]]:
    """Feature -> frames, from feature -> seconds.

    Raises:
        ValueError: some seconds are farther than the tolerance from a whole frame.
    """
    for name, seconds in deltas.items():
        off = [s for s in seconds if abs(s * fps - round(s * fps)) / fps > tolerance]
        if off:
            raise ValueError(f"delta_timestamps: got {off} for {name!r}, expected multiples of 1/{fps} ± {tolerance} s")
    return {name: [round(s * fps) for s in seconds] for name, seconds in deltas.items()}


def _arrays(stats: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Array]]:
    return {name: {which: np.array(value) for which, value in of.items()} for name, of in stats.items()}
