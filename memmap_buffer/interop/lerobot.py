"""LeRobot data sets, version 3.0, in and out: features in Parquet, images among them, and the tasks of episodes.

A feature keeps its dotted name; `next.reward`, `next.done` and `next.success` become `reward`, `done` and `success`.
The text of an episode's task is its meta field `task`. What LeRobot counts by itself (`index`, `frame_index`,
`episode_index`) is not stored. Features that are videos are left out, as only a decoder could read them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer.buffer import ReplayBuffer
from memmap_buffer.errors import CorruptBufferError, NotABufferError, SchemaError
from memmap_buffer.interop.beside import read_beside, write_beside
from memmap_buffer.interop.extras import extra
from memmap_buffer.interop.survey import flat
from memmap_buffer.schema import Field

with extra("lerobot"):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from PIL import Image

    from memmap_buffer.interop.parquet import column_of

VERSION = "v3.0"
COUNTED = ("index", "frame_index", "episode_index")
RENAMED = {"next.reward": "reward", "next.done": "done", "next.success": "success"}
DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TASKS = "meta/tasks.parquet"


def import_lerobot(
    path: str | PathLike[str], folder: str | PathLike[str], *, videos: str = "raise", **options: Any
) -> ReplayBuffer:
    """Copy a LeRobot data set into a folder.

    Args:
        path: its root, with `meta/` and `data/`. folder: where; see `ReplayBuffer`.
        videos: "raise" where a feature is a video, or "skip": import the others.
        options: of `ReplayBuffer`; `max_episodes` and `max_timesteps` are as many as needed.

    Returns: the buffer, open to be written.
    Raises: NotABufferError: it is no such data set. SchemaError: a feature is a video. CorruptBufferError: a file lacks
        what `meta/info.json` says.
    """
    root = Path(path)
    info = _info(root)
    features = {name: about for name, about in info["features"].items() if name not in COUNTED}
    pictured = [name for name, about in features.items() if about["dtype"] == "video"]
    if pictured and videos != "skip":
        raise SchemaError(f"{root}: {', '.join(pictured)} are videos; pass videos='skip' to import the other features")
    features = {name: about for name, about in features.items() if name not in pictured}
    files = sorted((root / "data").glob("chunk-*/file-*.parquet"))
    lengths = [len(rows) for file in files for rows in _episodes(pq.read_table(file, columns=["episode_index"]))]
    if not lengths:
        raise NotABufferError(f"{root}: it has no episodes in data/", path=root)
    tasks = _tasks(root)
    buffer = None
    for file in files:
        table = pq.read_table(file)
        columns = {name: _column(file, table, name, about) for name, about in features.items()}
        if buffer is None:
            fields = {RENAMED.get(name, name): _field(column) for name, column in columns.items()}
            meta = {"task": f"U{max([1, *map(len, tasks.values())])}"}
            sizes = {"max_episodes": len(lengths), "max_timesteps": max(lengths)}
            buffer = ReplayBuffer(folder, fields=fields, meta_fields=meta, **(sizes | options))
        for rows in _episodes(table):
            episode = {RENAMED.get(name, name): column[rows.start : rows.stop] for name, column in columns.items()}
            first = int(table["task_index"][rows.start].as_py()) if "task_index" in table.column_names else -1
            buffer.store_episode(**episode, task=tasks.get(first, ""))
    assert buffer is not None
    write_beside(buffer, "lerobot", {key: info.get(key) for key in ("fps", "robot_type", "features")})
    return buffer


def export_lerobot(buffer: ReplayBuffer, path: str | PathLike[str], *, fps: float | None = None) -> None:
    """Copy a buffer into a new LeRobot data set, but for final observations, for which it has no place.

    Images, uint8 of shape (H, W, 1 or 3), become PNG.

    Args:
        buffer: a field `observation` that is not nested becomes `observation.state`.
        path: the new root.
        fps: steps a second; default: what the imported data set said. Timestamps are made of it, if there are none.

    Raises: SchemaError: no `fps` is known, or there is a data set already.
    """
    root, kept = Path(path), read_beside(buffer, "lerobot") or {}
    rate = fps or kept.get("fps")
    if rate is None:
        raise SchemaError(f"{buffer.folder}: it does not say how many steps a second has; pass fps=…")
    if (root / "meta").exists():
        raise SchemaError(f"{root}: there is a data set already; give a folder of its own")
    names = {name: _feature_name(name) for name in buffer.fieldnames}
    texts = [str(buffer.episode(i).get("task", "")) for i in range(len(buffer))]
    tasks = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    writer, first, rows = None, 0, []
    for i, length in enumerate(buffer.episode_lens.tolist()):
        columns = {names[name]: column[:length] for name, column in _of_steps(buffer, i).items()}
        columns |= (
            {} if "timestamp" in columns else {"timestamp": np.arange(length, dtype=np.float32) / np.float32(rate)}
        )
        columns |= {} if "task_index" in columns else {"task_index": np.full(length, tasks[texts[i]])}
        counted = (np.arange(first, first + length), np.arange(length), np.full(length, i))
        table = pa.table(
            {name: _arrow(column) for name, column in (columns | dict(zip(COUNTED, counted, strict=True))).items()}
        )
        if writer is None:
            (root / DATA).parent.mkdir(parents=True)
            writer = pq.ParquetWriter(root / DATA, table.schema)
        writer.write_table(table)
        rows.append(
            {
                "episode_index": i,
                "tasks": [texts[i]],
                "length": length,
                "data/chunk_index": 0,
                "data/file_index": 0,
                "dataset_from_index": first,
                "dataset_to_index": first + length,
            }
        )
        first += length
    if writer is None:
        raise SchemaError(f"{buffer.folder}: it has no episodes; record one first")
    writer.close()
    _write_meta(root, rows, tasks, table, float(rate), kept)


def _write_meta(
    root: Path, rows: list[dict[str, Any]], tasks: Mapping[str, int], table: Any, rate: float, kept: Mapping[str, Any]
) -> None:
    (root / EPISODES).parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), root / EPISODES)
    pq.write_table(pa.table({"task_index": list(tasks.values()), "task": list(tasks)}), root / TASKS)
    known: Mapping[str, Any] = kept.get("features") or {}
    features = {name: known.get(name) or _about(table[name]) for name in table.column_names}
    info = {
        "codebase_version": VERSION,
        "robot_type": kept.get("robot_type"),
        "total_episodes": len(rows),
        "total_frames": rows[-1]["dataset_to_index"],
        "total_tasks": len(tasks),
        "chunks_size": 1000,
        "fps": int(rate) if rate.is_integer() else rate,
        "splits": {"train": f"0:{len(rows)}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": features,
    }
    (root / "meta/info.json").write_text(json.dumps(info, indent=4), encoding="utf-8")


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


def _tasks(root: Path) -> dict[int, str]:
    """Number -> text; the texts are a column of any name, as pandas writes its index."""
    if not (root / TASKS).exists():
        return {}
    table = pq.read_table(root / TASKS)
    texts = next(name for name in table.column_names if name != "task_index")
    return dict(zip(table["task_index"].to_pylist(), table[texts].to_pylist(), strict=True))


def _episodes(table: Any) -> Iterator[range]:
    """The rows of each episode."""
    numbers = table["episode_index"].to_numpy()
    stops = [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), *([len(numbers)] if len(numbers) else [])]
    yield from (range(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True))


def _column(file: Path, table: Any, name: str, about: Mapping[str, Any]) -> Any:
    """(rows, *shape) of a feature."""
    if name not in table.column_names:
        raise CorruptBufferError(f"{file}: it has no column {name!r}, which meta/info.json names", path=file)
    column = table[name].combine_chunks()
    if about["dtype"] == "image":
        return np.stack([_picture(entry["bytes"], about["shape"]) for entry in column.to_pylist()])
    shape: tuple[int, ...] = ()
    while isinstance(column, pa.ExtensionArray) or pa.types.is_nested(column.type):
        shape = tuple(about["shape"])
        column = column.storage if isinstance(column, pa.ExtensionArray) else pc.list_flatten(column)
    values = column.to_numpy(zero_copy_only=False)
    return np.asarray(values.tolist() if values.dtype == object else values).reshape(len(table), *shape)


def _picture(data: bytes, shape: Any) -> Any:
    picture = np.asarray(Image.open(io.BytesIO(data)))
    if picture.ndim == 2:
        picture = picture[..., None]
    return picture if list(picture.shape) == list(shape) else picture.transpose(2, 0, 1)


def _field(column: Any) -> Field:
    dtype: Any = f"U{max(1, column.dtype.itemsize // 4)}" if column.dtype.kind == "U" else column.dtype
    return Field(dtype, column.shape[1:])


def _of_steps(buffer: ReplayBuffer, i: int) -> dict[str, Any]:
    episode = flat(buffer.episode(i))
    return {name: episode[name] for name in buffer.fieldnames}


def _feature_name(name: str) -> str:
    return {**{ours: theirs for theirs, ours in RENAMED.items()}, "observation": "observation.state"}.get(name, name)


def _arrow(column: Any) -> Any:
    """A column as Arrow has it: images as PNG, vectors as lists of a fixed length."""
    if column.dtype == np.uint8 and column.ndim == 4 and column.shape[-1] in (1, 3):
        return pa.array([{"bytes": _png(picture), "path": None} for picture in column])
    return column_of(column)


def _png(picture: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(file, format="PNG")
    return file.getvalue()


def _about(column: Any) -> dict[str, Any]:
    """What `meta/info.json` says of a feature."""
    kind, shape = column.type, []
    if pa.types.is_struct(kind):
        first = np.asarray(Image.open(io.BytesIO(column[0].as_py()["bytes"])))
        return {
            "dtype": "image",
            "shape": [*first.shape[:2], 3 if first.ndim == 3 else 1],
            "names": ["height", "width", "channels"],
        }
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    dtype = {"double": "float64", "float": "float32"}.get(str(kind), str(kind))
    return {"dtype": dtype, "shape": shape or [1], "names": None}
