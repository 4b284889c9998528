"""LeRobot data sets, version 3.0, in and out: features in Parquet, images among them, and the tasks of episodes.

A feature keeps its dotted name, with identifiers as its parts; `next.reward`, `next.done` and `next.success` become
`reward`, `done` and `success`. The text of an episode's task is its meta field `task`. LeRobot's counters (`index`,
`frame_index`, `episode_index`) are not stored; `task_index` is, as the frames of an episode may have several tasks.
Videos are left out, as only a decoder could read them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.errors import CorruptBufferError, NotABufferError, SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.interop.episodes import episode_bounds, exported_episodes, import_episodes, read_extra, read_names
from memmap_buffer.maintenance.statistics import RunningStatistics
from memmap_buffer.names import Names
from memmap_buffer.paths import AnyPath, path_of
from memmap_buffer.schema import Field

with extra("lerobot"):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from PIL import Image

    from memmap_buffer.interop.parquet import column_of, require_tables

VERSION = "v3.0"
COUNTERS = ("index", "frame_index", "episode_index")
RENAMED = {"next.reward": "reward", "next.done": "done", "next.success": "success"}
DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TASKS = "meta/tasks.parquet"
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
GROUP = 256  # episodes
BLOCK_BYTES = 1 << 22  # of values whose statistics are computed at once
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
MAX_AXES = 5  # of a feature: LeRobot has no type for more


def import_lerobot(path: AnyPath, folder: AnyPath, *, videos: str = "raise", **options: Any) -> ReplayBuffer:
    """Copy a LeRobot data set into a folder.

    Args:
        path: its root, with `meta/` and `data/`.
        folder: where; see `ReplayBuffer`.
        videos: "raise" where a feature is a video, or "skip": import the others.
        options: of `ReplayBuffer`; `max_episodes` and `max_timesteps` are as many as needed.

    Returns:
        The buffer, open for writing.

    Raises:
        NotABufferError: it is no such data set.
        SchemaError: a feature is a video.
        CorruptBufferError: a file lacks a feature that `meta/info.json` names.
    """
    root = path_of(path)
    info = _info(root)
    features = {name: about for name, about in info["features"].items() if name not in COUNTERS}
    films = [name for name, about in features.items() if about["dtype"] == "video"]
    if films and videos != "skip":
        raise SchemaError(f"{root}: {', '.join(films)} are videos; pass videos='skip' to import the other features")
    features = {name: about for name, about in features.items() if name not in films}
    files = sorted((root / "data").glob("chunk-*/file-*.parquet"))
    counters = (pq.read_table(file, columns=["episode_index"]) for file in files)
    lengths = [stop - start for table in counters for start, stop in _bounds(table)]
    if not lengths:
        raise NotABufferError(f"{root}: it has no episodes in data/", path=root)
    tasks, names = _tasks(root), Names()
    ours = {name: RENAMED.get(name) or names.named(name.split(".")) for name in features}
    tables = (_read(file, features) for file in files)
    first = next(tables)

    def episodes() -> Iterator[dict[str, Any]]:
        for table, columns in chain([first], tables):
            for start, stop in _bounds(table):
                number = int(table["task_index"][start].as_py()) if "task_index" in table.column_names else -1
                rows = {ours[name]: column[start:stop] for name, column in columns.items()}
                yield {**rows, "task": tasks.get(number, "")}

    texts = [tasks[number] for number in range(len(tasks)) if number in tasks]  # LeRobot finds a text by its place
    facts = {key: info.get(key) for key in ("fps", "robot_type", "features")} | {"stats": _statistics(root, lengths)}
    return import_episodes(
        folder,
        episodes(),
        {ours[name]: _field(column) for name, column in first[1].items()},
        {"task": f"U{max([1, *map(len, tasks.values())])}"},
        lengths=lengths,
        options=options,
        names=names,
        extra={"lerobot": facts | {"tasks": texts if len(texts) == len(tasks) else None}},
    )


def export_lerobot(buffer: ReplayBuffer, path: AnyPath, *, fps: float | None = None) -> None:
    """Copy a buffer into a new LeRobot data set, which has no place for final observations and most meta fields.

    Images, uint8 of shape (H, W, 1 or 3), become PNG. Statistics of all frames and all their pixels are written for
    the whole and for each episode. The meta field `task` is an episode's task; in a buffer that was imported from
    LeRobot, `task_index` is the task of each frame.

    Args:
        buffer: the source; a field `observation` that is not nested becomes `observation.state`.
        path: the new root.
        fps: steps a second; default: that of the imported data set. Timestamps are made of it, if there are none.

    Raises:
        SchemaError: no `fps` is known, there is a data set already, there are no episodes, a field is of complex
            numbers or has more than five axes, or a `task_index` is of no task.
    """
    root, imported = path_of(path), read_extra(buffer, "lerobot") or {}
    rate = rate_of(buffer, imported, fps)
    if (root / "meta").exists():
        raise SchemaError(f"{root}: there is a data set already; give a folder of its own")
    require_tables(buffer, buffer.schema.fields)
    for name, field in buffer.schema.fields.items():
        if len(field.shape) > MAX_AXES:
            raise SchemaError(f"field {name!r}: got {field.shape}, LeRobot has {MAX_AXES} axes at most; export a copy")
    known, tasks = imported.get("features") or {}, Tasks(buffer, imported)
    statistics = FeatureStatistics(buffer.num_steps)
    features: dict[str, Any] = {}
    with ExitStack() as files:
        data, episodes = (files.enter_context(closing(_Table(root / name))) for name in (DATA, EPISODES))
        for row, columns in exported(buffer, known, rate, tasks):
            data.write(pa.table({name: _arrow(column) for name, column in columns.items()}))
            episodes.add(row | statistics.add(columns))
            features = features or {name: feature_of(column, known.get(name)) for name, column in columns.items()}
    pq.write_table(tasks.table(), root / TASKS)
    counts = {"total_episodes": len(buffer), "total_frames": buffer.num_steps, "total_tasks": len(tasks.texts)}
    _write_json(root / "meta/stats.json", statistics.whole())
    _write_json(root / "meta/info.json", info_of(counts, rate, imported, features))


def exported(
    buffer: ReplayBuffer, known: Mapping[str, Any], rate: float, tasks: Tasks
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(row of `meta/episodes`, features of shape (length, *shape), of images the channels last) of each episode."""
    names = read_names(buffer)
    for i, (rows, episode) in enumerate(exported_episodes(buffer)):
        length = len(rows)
        columns = {feature_name(name, names): episode[name][:length] for name in buffer.fieldnames}
        columns = {name: shaped(column, known.get(name)) for name, column in columns.items()}
        columns.setdefault("timestamp", np.arange(length, dtype=np.float32) / np.float32(rate))
        columns["task_index"] = tasks.numbers(episode, length)
        columns |= zip(COUNTERS, (np.arange(rows.start, rows.stop), np.arange(length), np.full(length, i)), strict=True)
        numbers = dict.fromkeys(columns["task_index"].tolist())
        row = {
            "episode_index": i,
            "tasks": [tasks.texts[number] for number in numbers],
            "length": length,
            "data/chunk_index": 0,
            "data/file_index": 0,
            "dataset_from_index": rows.start,
            "dataset_to_index": rows.stop,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        yield row, columns


class Tasks:
    """The texts of tasks by their numbers; those of an imported data set, if the buffer has its `task_index`."""

    def __init__(self, buffer: ReplayBuffer, imported: Mapping[str, Any]) -> None:
        self._imported = bool(imported.get("tasks")) and "task_index" in buffer.fieldnames
        self.texts: list[str] = list(imported["tasks"]) if self._imported else []
        self._numbers: dict[str, int] = {}

    def numbers(self, episode: Mapping[str, Any], length: int) -> Any:
        """(length,) int64 the number of each frame's task."""
        if not self._imported:
            text = str(episode.get("task", ""))
            if text not in self._numbers:
                self._numbers[text] = len(self.texts)
                self.texts.append(text)
            return np.full(length, self._numbers[text])
        numbers = episode["task_index"][:length].astype(np.int64)
        if numbers.min() < 0 or numbers.max() >= len(self.texts):
            raise SchemaError(
                f"field 'task_index': got {numbers.min()} to {numbers.max()}, expected 0 to {len(self.texts) - 1}, the "
                "tasks of the imported data set; drop the field to export the tasks of the meta field `task`"
            )
        return numbers

    def table(self) -> Any:
        """The table as pandas writes it, the texts as its index: LeRobot finds a task by its place and its text."""
        kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
            for name, (kind, dtype) in kinds.items()
        ]
        metadata = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
        table = pa.table({"task_index": pa.array(range(len(self.texts)), pa.int64()), "task": self.texts})
        return table.replace_schema_metadata({"pandas": json.dumps(metadata)})


class _Table:
    """A Parquet file; the first table that is written to it determines its columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Write a row, with the rows of a whole group: a row group of its own would take milliseconds."""
        self._rows.append(row)
        if len(self._rows) == GROUP:
            self._flush()

    def write(self, table: Any) -> None:
        if self._writer is None:
            self._path.parent.mkdir(parents=True)
            self._writer = pq.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def _flush(self) -> None:
        if self._rows:
            self.write(pa.Table.from_pylist(self._rows))
            self._rows = []

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()


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


def rate_of(buffer: ReplayBuffer, imported: Mapping[str, Any], fps: float | None) -> float:
    """Frames a second, a whole number where it is one: as given, else those of the imported data set."""
    rate = fps or imported.get("fps")
    if rate is None:
        raise SchemaError(f"{buffer.folder}: it does not say how many steps a second has; pass fps=…")
    return int(rate) if float(rate).is_integer() else float(rate)


def info_of(
    counts: Mapping[str, int], rate: float, imported: Mapping[str, Any], features: Mapping[str, Any]
) -> dict[str, Any]:
    """The contents of `meta/info.json`."""
    return {
        "codebase_version": VERSION,
        "robot_type": imported.get("robot_type"),
        **counts,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": rate,
        "splits": {"train": f"0:{counts['total_episodes']}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": features,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=4), encoding="utf-8")


def _info(root: Path) -> dict[str, Any]:
    path = root / "meta" / "info.json"
    try:
        info: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise NotABufferError(f"{path}: {error}; it is no LeRobot data set", path=path) from error
    if not str(info.get("codebase_version", "")).startswith("v3."):
        raise NotABufferError(
            f"{path}: got version {info.get('codebase_version')!r}, expected {VERSION}; convert it by LeRobot's script",
            path=path,
        )
    return info


def _statistics(root: Path, lengths: Sequence[int]) -> dict[str, Any] | None:
    """Its `meta/stats.json`, and how many episodes and frames they are of; None where there are none."""
    path = root / "meta" / "stats.json"
    if not path.exists():
        return None
    return {"of": [len(lengths), sum(lengths)], "features": json.loads(path.read_text(encoding="utf-8"))}


def _tasks(root: Path) -> dict[int, str]:
    """Number -> text; the texts are a column of any name, as pandas writes its index."""
    if not (root / TASKS).exists():
        return {}
    table = pq.read_table(root / TASKS)
    texts = next(name for name in table.column_names if name != "task_index")
    return dict(zip(table["task_index"].to_pylist(), table[texts].to_pylist(), strict=True))


def _bounds(table: Any) -> list[tuple[int, int]]:
    numbers = table["episode_index"].to_numpy()
    return episode_bounds(np.append(numbers[1:] != numbers[:-1], True)[: len(numbers)])


def _read(file: Path, features: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The table of a file, and its features as arrays."""
    table = pq.read_table(file)
    return table, {name: _column(file, table, name, about) for name, about in features.items()}


def _column(file: Path, table: Any, name: str, about: Mapping[str, Any]) -> Any:
    """(rows, *shape) of a feature."""
    if name not in table.column_names:
        raise CorruptBufferError(f"{file}: it has no column {name!r}, which meta/info.json names", path=file)
    column = table[name].combine_chunks()
    if about["dtype"] == "image":
        return np.stack([_decoded_image(entry["bytes"], about["shape"]) for entry in column.to_pylist()])
    shape: tuple[int, ...] = ()
    while isinstance(column, pa.ExtensionArray) or pa.types.is_nested(column.type):
        shape = tuple(about["shape"])
        column = column.storage if isinstance(column, pa.ExtensionArray) else pc.list_flatten(column)
    values = column.to_numpy(zero_copy_only=False)
    return np.asarray(values.tolist() if values.dtype == object else values).reshape(len(table), *shape)


def _decoded_image(data: bytes, shape: Any) -> Any:
    image = np.asarray(Image.open(io.BytesIO(data)))
    if image.ndim == 2:
        image = image[..., None]
    return image if list(image.shape) == list(shape) else image.transpose(2, 0, 1)


def _field(column: Any) -> Field:
    dtype: Any = f"U{max(1, column.dtype.itemsize // 4)}" if column.dtype.kind == "U" else column.dtype
    return Field(dtype, column.shape[1:])


def feature_name(name: str, names: Names) -> str:
    known = {**{ours: theirs for theirs, ours in RENAMED.items()}, "observation": "observation.state"}
    return known.get(name) or names.key(name)


def shaped(column: Any, known: Mapping[str, Any] | None) -> Any:
    """A feature as LeRobot has it: one number a frame without an axis, the channels of images last."""
    if column.shape[1:] == (1,):
        return column[:, 0]
    if known and known["dtype"] == "image" and not is_image(column) and column.ndim == 4:
        return column.transpose(0, 2, 3, 1)
    return column


def _arrow(column: Any) -> Any:
    """A column as Arrow has it: images as PNG, vectors as lists of a fixed length."""
    if is_image(column):
        return pa.array([{"bytes": _png(image), "path": None} for image in column], IMAGE)
    return column_of(column)


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, format="PNG")
    return file.getvalue()


def feature_of(column: Any, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The entry of a feature in `meta/info.json`: that of the imported data set, as long as it still fits."""
    shape, kind, names = list(column.shape[1:]) or [1], column.dtype.name, None
    if is_image(column):
        kind, names = "image", ["height", "width", "channels"]
    elif column.dtype.kind == "U":
        kind = "string"
    if known and (known["dtype"], sorted(known["shape"])) == (kind, sorted(shape)):
        return known
    return {"dtype": kind, "shape": shape, "names": names}
