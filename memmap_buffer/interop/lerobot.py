"""LeRobot data sets, version 3.0, import and export: features in Parquet, images and videos, and the tasks of episodes.

A feature keeps its dotted name; parts that are no identifiers are changed into such. `next.reward`, `next.done` and
`next.success` become `reward`, `done` and `success`. The text of an episode's task is its meta field `task`. LeRobot's
counters (`index`, `frame_index`, `episode_index`) are not stored; `task_index` is, as the frames of an episode may have
several tasks. The frames of videos are found by their times, as in LeRobot; they become uint8 (height, width, 3).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer import CorruptBufferError, Field, NotABufferError, ReplayBuffer, RunningStatistics, SchemaError
from memmap_buffer.adapters import AnyPath, IfExists, Names, extra, frames_of, path_of
from memmap_buffer.interop.columns import dtype_of
from memmap_buffer.interop.episodes import (
    ExportedEpisodes,
    episode_bounds,
    exported_episodes,
    import_episodes,
    put_when_whole,
    read_extra,
    read_names,
    require_places,
)
from memmap_buffer.interop.target import Target
from memmap_buffer.interop.video import FilmReader, FilmWriter

with extra("lerobot"):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from PIL import Image

    from memmap_buffer.interop.parquet import TableWriter, column_of, require_tables

VERSION = "v3.0"
COUNTERS = ("index", "frame_index", "episode_index")
RENAMED = {"next.reward": "reward", "next.done": "done", "next.success": "success"}
DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TASKS = "meta/tasks.parquet"
VIDEO = "videos/{}/chunk-{:03d}/file-{:03d}.mp4"
CHUNK = 1000  # files
VIDEO_MB = 200  # a video file of this size gets no further episode
ENCODERS = {
    "libsvtav1": {"preset": "12"},
    "h264": {},
    "hevc": {"x265-params": "log-level=error:bframes=0"},  # with B-frames LeRobot 0.4.4 gives one frame too late
}
TOLERANCE = 1e-4  # seconds
AT_ONCE = 64 << 20  # bytes of frames that are decoded at once
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
GROUP = 256  # episodes
BLOCK_BYTES = 1 << 22  # bytes of values whose statistics are computed at once
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
MAX_AXES = 5  # of a feature: LeRobot has no type for more


def import_lerobot(
    path: AnyPath,
    folder: AnyPath,
    *,
    if_exists: IfExists = "error",
    videos: str = "decode",
    codec: Any = "jpeg",
    tolerance_s: float = 1e-4,
    **options: Any,
) -> ReplayBuffer:
    """Copy a LeRobot data set into a folder.

    Args:
        path: the root of the data set, with `meta/`, `data/` and, if it has cameras, `videos/`.
        folder: where the buffer is made; see `ReplayBuffer`.
        if_exists: what to do if something is in the folder: "error" raises; "resume" goes on with an import of this
            source that was interrupted; "overwrite" replaces it when the import is whole.
        videos: "decode", or "skip" to import the other features alone.
        codec: of the fields that videos become, as for `Field`. "jpeg", of quality 95, adds a smaller error than the
            video already has; "zstd" and None keep the decoded frames to the bit, at several times the size.
        tolerance_s: how far a frame may be from its timestamp, in seconds.
        options: of `ReplayBuffer`; by default `max_episodes` and `max_timesteps` are as many as the episodes need.

    Returns:
        The buffer, open for writing.

    Raises:
        NotABufferError: the path is no such data set.
        CorruptBufferError: a file lacks a feature that `meta/info.json` names, or a video the frame at a timestamp.
        ImportError: there are videos, and the extra `video`, or the codec's extra, is not installed.
    """
    target = Target.checked(folder, if_exists, options)
    if videos not in ("decode", "skip"):
        raise SchemaError(f"videos: got {videos!r}, expected 'decode' or 'skip'")
    source = _Source(path_of(path), decodes=videos == "decode")
    ends = {options.get(end, end) for end in ("terminated", "truncated")}
    with closing(_Cameras(source.root, source.cameras, tolerance_s)) as cameras:
        pictures = {source.ours[name]: Field("uint8", (*size, 3), codec=codec) for name, size in cameras.sizes.items()}
        return import_episodes(
            target,
            source.episodes(cameras, ends),
            source.fields() | pictures,
            {"task": f"U{max([1, *map(len, source.tasks.values())])}"},
            lengths=source.lengths,
            source=source.root,
            asked={"videos": videos, "codec": codec, "tolerance_s": tolerance_s},
            names=source.names,
            extra={"lerobot": source.facts()},
        )


def export_lerobot(
    buffer: ReplayBuffer,
    path: AnyPath,
    *,
    fps: float | None = None,
    videos: bool | Sequence[str] | None = None,
    vcodec: str = "libsvtav1",
    crf: int = 30,
) -> None:
    """Copy a buffer into a new LeRobot data set. LeRobot has no place for final observations and most meta fields.

    Images, uint8 of shape (H, W, 1 or 3), become PNG in the tables, or videos, which are lossy. Statistics are written
    for the whole and for each episode; they cover all frames and all pixels, as they were before a video's encoder. The
    meta field `task` is an episode's task; in a buffer that was imported from LeRobot, `task_index` is the task of
    each frame.

    Args:
        buffer: the buffer to copy; a field `observation` that is not nested becomes `observation.state`.
        path: the root of the new data set.
        fps: steps a second; default: as in the imported data set. If there is no field `timestamp`, `fps` gives the
            timestamps.
        videos: whether images become videos, or the names of the features that do; default: the features that were
            videos in the imported data set.
        vcodec: of the videos, as in LeRobot: "libsvtav1", which prints about itself unless the environment has
            SVT_LOG=1, or "h264" or "hevc", which take even sizes only.
        crf: of the videos, as in LeRobot: 0 … 51, for "libsvtav1" up to 63; a lower value is larger and closer to the
            images.

    Raises:
        SchemaError: no `fps` is known, there is a data set already, there are no episodes, a field is of complex
            numbers or lists, has more than five axes or the name of a counter of LeRobot, a `task_index` is the number
            of no task, a feature of `videos` is no image, the codec takes no frames of that size, or there are videos
            and timestamps that do not fit `fps`.
        ImportError: there are videos, and the extra `video` is not installed.
    """
    root, form = path_of(path), Form(buffer, fps)
    _require_exportable(buffer, root, vcodec)
    features = form.entries(videos)
    stored, rows = exported_episodes(buffer), list[dict[str, Any]]()
    statistics = FeatureStatistics(stored.num_steps)
    with put_when_whole(*(root / name for name in ("data", "videos", "meta"))) as new:
        with ExitStack() as files:
            data, episodes = (files.enter_context(closing(TableWriter(new / name))) for name in (DATA, EPISODES))
            films = {
                name: files.enter_context(closing(_Film(new, name, form.rate, vcodec, crf)))
                for name, about in features.items()
                if about["dtype"] == "video"
            }
            for row, columns in form.episodes(stored):
                columns |= {name: frames_of(columns[name], name) for name in films}
                data.add(pa.table({name: _arrow(column) for name, column in columns.items() if name not in films}))
                for film in films.values():
                    row |= film.write(columns)
                rows.append(row | statistics.add(columns))
                if len(rows) == GROUP or row["episode_index"] == len(stored) - 1:
                    episodes.add(pa.Table.from_pylist(rows))  # for each alone it would take milliseconds
                    rows.clear()
        features |= {name: {**features[name], "info": film.info} for name, film in films.items()}
        counts = {"total_episodes": len(stored), "total_frames": stored.num_steps, "total_tasks": len(form.texts)}
        facts = {"stats": statistics.whole(), "info": form.info(counts, features)}
        for name, fact in facts.items():
            (new / f"meta/{name}.json").write_text(json.dumps(fact, indent=4), encoding="utf-8")
        pq.write_table(form.task_table(), new / TASKS)


def _require_exportable(buffer: ReplayBuffer, root: Path, vcodec: str) -> None:
    """Raise SchemaError unless the buffer, the folder and the codec are as an export needs them."""
    if (root / "meta").exists():
        raise SchemaError(f"{root}: there is a data set already; give a folder of its own")
    if vcodec not in ENCODERS:
        raise SchemaError(f"vcodec: got {vcodec!r}, expected one of {', '.join(ENCODERS)}")
    require_tables(buffer, buffer.schema.fields, "LeRobot")
    for name, field in buffer.schema.fields.items():
        if len(field.shape) > MAX_AXES:
            raise SchemaError(f"field {name!r}: got {field.shape}, LeRobot has {MAX_AXES} axes at most; export a copy")


class _Source:
    """A data set to import.

    Attributes:
        root: of the data set.
        cameras: feature -> its entry in `meta/info.json`, for the videos to import.
        lengths: of the episodes, in frames.
        tasks: number -> text.
        names: the changed names.
        ours: feature -> name of its field.

    Args:
        root: of the data set.
        decodes: whether to import videos.
    """

    def __init__(self, root: Path, *, decodes: bool) -> None:
        self.root, self._info = root, _info(root)
        videos = {name for name, about in self._info["features"].items() if about["dtype"] == "video"}
        unwanted = {*COUNTERS} if decodes else {*COUNTERS, *videos}
        features = {name: about for name, about in self._info["features"].items() if name not in unwanted}
        self.cameras = {name: about for name, about in features.items() if name in videos}
        self._tables = {name: about for name, about in features.items() if name not in videos}
        self._bounds = {file: _bounds(file) for file in sorted((root / "data").glob("chunk-*/file-*.parquet"))}
        self.lengths = [stop - start for bounds in self._bounds.values() for start, stop in bounds]
        if not self.lengths:
            raise NotABufferError(f"{root}: it has no episodes in data/", path=root)
        self.tasks, self.names = _tasks(root), Names()
        self.ours = {name: RENAMED.get(name) or self.names.named(name.split(".")) for name in features}
        self._read: tuple[Path, dict[str, Any]] = root, {}

    def fields(self) -> dict[str, Field]:
        """The fields of the features in tables; texts are as wide as the longest of all files."""
        columns = {**self._columns(next(iter(self._bounds)))}
        for name in [name for name, column in columns.items() if column.dtype.kind == "U"]:
            texts = (_column(f, pq.read_table(f, columns=[name]), name, self._tables[name]) for f in self._bounds)
            columns[name] = max(texts, key=lambda column: column.dtype.itemsize)
        return {self.ours[name]: Field(columns[name].dtype, columns[name].shape[1:]) for name in self._tables}

    def facts(self) -> dict[str, Any]:
        """The content of `extra/lerobot.json`, for exports."""
        facts = {key: self._info.get(key) for key in ("fps", "robot_type", "features")}
        texts = [self.tasks[i] for i in range(len(self.tasks)) if i in self.tasks]  # LeRobot finds by row
        whole = texts if len(texts) == len(self.tasks) else None
        return facts | {"stats": _statistics(self.root, self.lengths), "tasks": whole}

    def episodes(self, cameras: _Cameras, ends: set[str | None]) -> Iterator[Iterator[dict[str, Any]]]:
        """The parts of each episode; nothing of a part is read before it is asked for.

        Args:
            cameras: of the data set.
            ends: the fields that end episodes.
        """
        for file, bounds in self._bounds.items():
            for start, stop in bounds:
                yield self._parts(cameras, ends, file, slice(start, stop))

    def _parts(self, cameras: _Cameras, ends: set[str | None], file: Path, rows: slice) -> Iterator[dict[str, Any]]:
        stored = {name: column[rows] for name, column in self._columns(file).items()}
        columns = {self.ours[name]: stored[name] for name in self._tables}
        episode, task = (int(stored[name][0]) if name in stored else -1 for name in ("episode_index", "task_index"))
        if cameras.sizes and "timestamp" not in stored:
            raise CorruptBufferError(f"{file}: it has no column 'timestamp', by which frames are found")
        length = rows.stop - rows.start
        ends_within = any(np.count_nonzero(columns[name][:-1]) for name in columns.keys() & ends)
        size = length if ends_within else cameras.frames_at_once  # `extend` takes an end at its last step alone
        for at in range(0, length, size):
            part = slice(at, at + size)
            images = cameras.read(episode, stored["timestamp"][part]) if cameras.sizes else {}
            yield {
                **{name: column[part] for name, column in columns.items()},
                **{self.ours[name]: image for name, image in images.items()},
                "task": self.tasks.get(task, ""),
            }

    def _columns(self, file: Path) -> dict[str, Any]:
        """(rows, *shape) of each feature in tables and of the counters; those of the last file are kept."""
        if self._read[0] != file:
            self._read = self.root, {}  # gives its memory back before more is read
            table = pq.read_table(file)
            counters = {name: {"dtype": "int64"} for name in ("episode_index", "task_index")}
            there = {name: about for name, about in counters.items() if name in table.column_names}
            self._read = (
                file,
                {name: _column(file, table, name, about) for name, about in (there | self._tables).items()},
            )
        return self._read[1]


def _bounds(file: Path) -> list[tuple[int, int]]:
    """(first row, row after the last) of each episode in a file of `data/`."""
    numbers = pq.read_table(file, columns=["episode_index"])["episode_index"].to_numpy()
    return episode_bounds(np.append(numbers[1:] != numbers[:-1], True)[: len(numbers)])


class _Cameras:
    """The videos of a data set. While frames are asked for in their order, a video is read once, without jumps.

    Attributes:
        sizes: feature -> height and width.
        frames_at_once: how many frames are decoded at once.

    Args:
        root: of the data set.
        features: feature that is a video -> its entry in `meta/info.json`.
        tolerance: how far a frame may be from its timestamp, in seconds.

    Raises:
        CorruptBufferError: `meta/episodes` does not say where the frames of an episode are.
    """

    def __init__(self, root: Path, features: Mapping[str, Any], tolerance: float) -> None:
        self._root, self._tolerance = root, tolerance
        self.sizes = {name: _size(root, name, about) for name, about in features.items()}
        self.frames_at_once = max(
            1, AT_ONCE // max(1, sum(3 * height * width for height, width in self.sizes.values()))
        )
        self._places = {name: _places(root, name) for name in features}
        self._open: dict[str, FilmReader] = {}

    def read(self, episode: int, timestamps: Any) -> dict[str, Any]:
        """Feature -> (rows, height, width, 3) uint8, the frames of an episode by their timestamps, (rows, …)."""
        times = timestamps.reshape(-1).astype(np.float64)
        return {name: self._frames(name, episode, times) for name in self.sizes}

    def _frames(self, name: str, episode: int, times: Any) -> Any:
        if episode not in self._places[name]:
            raise CorruptBufferError(f"{self._root}/meta/episodes: it has no video of {name!r} of episode {episode}")
        chunk, number, start = self._places[name][episode]
        place = self._root / VIDEO.format(name, chunk, number)
        if name in self._open and self._open[name].place != place:
            self._open.pop(name).close()
        if name not in self._open:
            self._open[name] = FilmReader(place, self.sizes[name])
        slack = np.spacing(np.float32(start + times.max()))  # timestamps are float32
        return self._open[name].read(start + times, self._tolerance + float(slack))

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def _size(root: Path, name: str, about: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width of a video."""
    shape, names = about["shape"], about.get("names") or [""]
    if len(shape) != 3:
        raise CorruptBufferError(f"{root}/meta/info.json: {name!r} is a video of shape {shape}, expected three axes")
    first = "channel" in str(names[0]) or shape[-1] not in (1, 3)
    height, width = shape[1:] if first else shape[:2]
    return int(height), int(width)


def _places(root: Path, name: str) -> dict[int, tuple[int, int, float]]:
    """Episode -> (number of the chunk of its video, number of the file, time of its first frame in the file)."""
    wanted = ["episode_index", *(f"videos/{name}/{x}" for x in ("chunk_index", "file_index", "from_timestamp"))]
    places: dict[int, tuple[int, int, float]] = {}
    for file in sorted((root / "meta/episodes").glob("chunk-*/file-*.parquet")):
        table = pq.ParquetFile(file).read(columns=wanted)
        missing = set(wanted) - set(table.column_names)
        if missing:
            raise CorruptBufferError(f"{file}: it has no column {min(missing)!r}, where the frames are", path=file)
        rows = zip(*(table[column].to_pylist() for column in wanted), strict=True)
        places |= {episode: place for episode, *place in rows}
    return places


class Form:
    """A buffer in LeRobot's form: the names and shapes of its features, its tasks, and the content of its `meta/`.

    Args:
        buffer: the buffer.
        fps: frames a second; default: as in the imported data set.

    Attributes:
        imported: the content of `extra/lerobot.json`; {} if the buffer was not imported.
        rate: frames a second, an int if it is a whole number.
        features: field -> the name of its feature.
        by_frame: whether the frames of an episode have tasks of their own, as in the imported data set.
        texts: the texts of the tasks by their numbers: as in the imported data set if `by_frame`, else new.

    Raises:
        SchemaError: no `fps` is known, or LeRobot has something else of the name of a field.
    """

    def __init__(self, buffer: ReplayBuffer, fps: float | None = None) -> None:
        self._buffer, self.imported = buffer, read_extra(buffer, "lerobot") or {}
        rate = fps or self.imported.get("fps")
        if rate is None:
            raise SchemaError(f"{buffer.folder}: it does not say how many steps a second has; pass fps=…")
        self.rate = int(rate) if float(rate).is_integer() else float(rate)
        self._imported_features: Mapping[str, Any] = self.imported.get("features") or {}
        names, theirs = read_names(buffer), {ours: theirs for theirs, ours in RENAMED.items()}
        theirs["observation"] = "observation.state"
        self.features = {name: theirs.get(name) or names.key(name) for name in buffer.fieldnames}
        require_places(self.features, "LeRobot", COUNTERS if self.imported else (*COUNTERS, "task_index"))
        self.by_frame = bool(self.imported.get("tasks")) and "task_index" in buffer.fieldnames
        self.texts: list[str] = list(self.imported["tasks"]) if self.by_frame else []
        self._numbers: dict[str, int] = {}

    def episodes(self, stored: ExportedEpisodes) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(row of `meta/episodes`, feature -> (length, *shape), images with their channels last) of each episode."""
        for i, (rows, episode) in enumerate(stored):
            columns = self._columns(i, rows, episode, self._tasks_of(episode, len(rows)))
            row = {
                "episode_index": i,
                "tasks": [self.texts[number] for number in dict.fromkeys(columns["task_index"].tolist())],
                "length": len(rows),
                "data/chunk_index": 0,
                "data/file_index": 0,
                "dataset_from_index": rows.start,
                "dataset_to_index": rows.stop,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
            yield row, columns

    def _columns(self, number: int, rows: range, episode: Mapping[str, Any], tasks: Any) -> dict[str, Any]:
        length = len(rows)
        columns = {
            feature: _shaped(episode[name][:length], self._imported_features.get(feature))
            for name, feature in self.features.items()
        }
        columns.setdefault("timestamp", np.arange(length, dtype=np.float32) / np.float32(self.rate))
        counters = (np.arange(rows.start, rows.stop), np.arange(length), np.full(length, number))
        return columns | {"task_index": tasks, **dict(zip(COUNTERS, counters, strict=True))}

    def number_of(self, text: str) -> int:
        """The number of an episode's task, a new one for a text that has none."""
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]

    def _tasks_of(self, episode: Mapping[str, Any], length: int) -> Any:
        """(length,) int64, the number of each frame's task."""
        if not self.by_frame:
            return np.full(length, self.number_of(str(episode.get("task", ""))))
        numbers = episode["task_index"][:length].astype(np.int64)
        if numbers.min() < 0 or numbers.max() >= len(self.texts):
            raise SchemaError(
                f"field 'task_index': got {numbers.min()} to {numbers.max()}, expected 0 to {len(self.texts) - 1}, the "
                "tasks of the imported data set; drop the field to export the tasks of the meta field `task`"
            )
        return numbers

    def task_table(self) -> Any:
        """The table as pandas writes it, with the texts as its index: LeRobot finds a task by its row and its text."""
        kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
            for name, (kind, dtype) in kinds.items()
        ]
        metadata = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
        table = pa.table({"task_index": pa.array(range(len(self.texts)), pa.int64()), "task": self.texts})
        return table.replace_schema_metadata({"pandas": json.dumps(metadata)})

    def entries(self, videos: bool | Sequence[str] | None = None) -> dict[str, Mapping[str, Any]]:
        """The entry of each feature in `meta/info.json`; `videos` as for `export_lerobot`.

        Raises:
            SchemaError: a feature of `videos` is no image.
        """
        schema, imported = self._buffer.schema, self._imported_features
        frame = {name: np.zeros((1, *field.shape), dtype_of(field)) for name, field in schema.fields.items()}
        columns = self._columns(0, range(1), frame, np.zeros(1, np.int64))
        images = [name for name, column in columns.items() if is_image(column)]
        if videos is None:
            videos = [name for name in images if imported.get(name, {}).get("dtype") == "video"]
        films = images if videos is True else list(videos or ())
        for name in films:
            if name not in images:
                raise SchemaError(
                    f"videos: got {name!r}, expected features of uint8 images, (height, width, 1 or 3): "
                    f"{', '.join(images) or 'there are none'}"
                )
        return {name: _entry(column, imported.get(name), video=name in films) for name, column in columns.items()}

    def info(self, counts: Mapping[str, int], features: Mapping[str, Any]) -> dict[str, Any]:
        """The content of `meta/info.json`."""
        films = any(about["dtype"] == "video" for about in features.values())
        return {
            "codebase_version": VERSION,
            "robot_type": self.imported.get("robot_type"),
            **counts,
            "chunks_size": CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": VIDEO_MB,
            "fps": self.rate,
            "splits": {"train": f"0:{counts['total_episodes']}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4" if films else None,
            "features": features,
        }


def _shaped(column: Any, feature: Mapping[str, Any] | None) -> Any:
    """A feature in LeRobot's shape: (frames,) if it has one number a frame, channels last if it is an image."""
    if column.shape[1:] == (1,):
        return column[:, 0]
    if feature and feature["dtype"] == "image" and not is_image(column) and column.ndim == 4:
        return column.transpose(0, 2, 3, 1)
    return column


class _Film:
    """The videos of a feature: each file has many episodes, up to `VIDEO_MB`.

    Attributes:
        info: the facts about the videos in LeRobot's `meta/info.json`, when one is begun.
    """

    def __init__(self, root: Path, name: str, rate: float, vcodec: str, crf: int) -> None:
        self._root, self._name, self._rate, self._vcodec = root, name, rate, vcodec
        self._options = {"g": "2", "crf": str(crf), **ENCODERS[vcodec]}
        self._number, self._frames = -1, 0
        self._writer: FilmWriter | None = None

    def write(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Add the frames of an episode. Returns their place, for `meta/episodes`."""
        frames, times = columns[self._name], columns["timestamp"]
        expected = np.arange(len(frames)) / self._rate
        if not (abs(times - expected) <= TOLERANCE + np.spacing(np.float32(expected[-1]))).all():
            raise SchemaError(
                f"field 'timestamp': LeRobot finds frame t of a video at t / {self._rate:g} s ± {TOLERANCE} s, and "
                f"those of an episode are up to {abs(times - expected).max():g} s away; give their fps=, drop the "
                "field, or export images by videos=False"
            )
        if self._writer is None or self._writer.size >= VIDEO_MB << 20:
            self.close()
            self._number, self._frames = self._number + 1, 0
            path = self._root / VIDEO.format(self._name, *divmod(self._number, CHUNK))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = FilmWriter(path, frames.shape[1:3], self._rate, self._vcodec, self._options)
            self.info = {f"video.{which}": fact for which, fact in self._writer.info.items()} | {"has_audio": False}
        self._writer.write(frames)
        start, self._frames = self._frames, self._frames + len(frames)
        chunk, file = divmod(self._number, CHUNK)
        place: dict[str, Any] = {"chunk_index": chunk, "file_index": file}
        place |= {"from_timestamp": start / self._rate, "to_timestamp": self._frames / self._rate}
        return {f"videos/{self._name}/{which}": value for which, value in place.items()}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class FeatureStatistics:
    """The statistics in `meta/stats.json` and `meta/episodes`; text has none.

    As in LeRobot there is one value for each channel of images, which are scaled to 0 … 1, and for each entry of the
    last axis of other features.
    """

    def __init__(self, frames: int) -> None:
        self._frames = frames
        self._rng = np.random.default_rng(0)
        self._features: dict[str, tuple[RunningStatistics, Any]] = {}  # with one frame

    def add(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Add the columns of an episode. Returns its statistics: `stats/<feature>/<which>` -> value."""
        row: dict[str, Any] = {}
        for name, column in columns.items():
            if column.dtype.kind == "U" or not column[0].size:
                continue
            if name not in self._features:
                self._features[name] = self._running(column, self._frames), column[:1]
            episode = self._running(column, len(column))
            for values in _blocks(column):
                self._features[name][0].add(values)
                episode.add(values)
            row |= {f"stats/{name}/{which}": value for which, value in _stats(episode, column, len(column)).items()}
        return row

    def whole(self) -> dict[str, dict[str, Any]]:
        """Feature -> the statistics of all episodes that were added."""
        return {name: _stats(running, frame, self._frames) for name, (running, frame) in self._features.items()}

    def _running(self, column: Any, frames: int) -> RunningStatistics:
        channels = column.shape[-1] if column.ndim > 1 else 1
        return RunningStatistics((channels,), frames * column[0].size // channels, QUANTILES, seed=self._rng)


def _blocks(column: Any) -> Iterator[Any]:
    """The values of a feature, (n, channels) float64, at most `BLOCK_BYTES` at a time."""
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
    elif column.dtype.kind in "biu" and column.dtype != np.uint64:  # uint64 does not fit Arrow's int64
        values |= {which: values[which].astype(column.dtype) for which in ("min", "max")}
    return {which: value.tolist() for which, value in values.items()} | {"count": [frames]}


def is_image(column: Any) -> bool:
    """Whether a feature, (frames, *shape), holds images with their channels last."""
    return bool(column.dtype == np.uint8 and column.ndim == 4 and column.shape[-1] in (1, 3))


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
    """The statistics in `meta/stats.json`, and `of` how many episodes and frames; None if there is no such file."""
    path = root / "meta" / "stats.json"
    if not path.exists():
        return None
    return {"of": [len(lengths), sum(lengths)], "features": json.loads(path.read_text(encoding="utf-8"))}


def _tasks(root: Path) -> dict[int, str]:
    """Number -> text of each task. The column of texts may have any name, as pandas writes its index."""
    if not (root / TASKS).exists():
        return {}
    table = pq.read_table(root / TASKS)
    texts = next(name for name in table.column_names if name != "task_index")
    return dict(zip(table["task_index"].to_pylist(), table[texts].to_pylist(), strict=True))


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


def _arrow(column: Any) -> Any:
    """A column as an Arrow array: images as PNG, vectors as lists of a fixed length."""
    if is_image(column):
        return pa.array([{"bytes": _png(image), "path": None} for image in column], IMAGE)
    return column_of(column)


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, format="PNG")
    return file.getvalue()


def _entry(column: Any, imported: Mapping[str, Any] | None, *, video: bool) -> Mapping[str, Any]:
    """The entry of a feature in `meta/info.json`: as in the imported data set if that still fits, else a new one."""
    shape, kind, names = list(column.shape[1:]) or [1], column.dtype.name, None
    if is_image(column):
        kind, names = "video" if video else "image", ["height", "width", "channels"]
    elif column.dtype.kind == "U":
        kind = "string"
    if imported and (imported["dtype"], sorted(imported["shape"])) == (kind, sorted(shape)):
        return imported
    return {"dtype": kind, "shape": shape, "names": names}
