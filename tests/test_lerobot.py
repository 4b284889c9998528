"""LeRobot data sets in and out: written here by pyarrow alone after the published layout, and read back by it."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from memmap_buffer import CorruptBufferError, NotABufferError, ReplayBuffer, SchemaError
from memmap_buffer.interop.lerobot import export_lerobot, import_lerobot

LENGTHS = (4, 2, 5)
TASKS = ("pick", "place it down")
OF_EPISODES = (0, 1, 0)
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": [6], "names": ["a", "b", "c", "d", "e", "f"]},
    "observation.images.top": {"dtype": "image", "shape": [4, 5, 3], "names": ["height", "width", "channels"]},
    "observation.matrix": {"dtype": "float64", "shape": [2, 3], "names": None},
    "action": {"dtype": "float32", "shape": [2], "names": None},
    "next.reward": {"dtype": "float32", "shape": [1], "names": None},
    "next.done": {"dtype": "bool", "shape": [1], "names": None},
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
    **{name: {"dtype": "int64", "shape": [1], "names": None} for name in ("index", "frame_index", "episode_index")},
}


def png(picture):
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": "frame.png"}


def write(root, *, video=False, version="v3.0"):
    """Two files of data; the arrays of each episode."""
    rng, out, first = np.random.default_rng(1), [], 0
    for number, length in enumerate(LENGTHS):
        arrays = {
            "observation.state": rng.normal(size=(length, 6)).astype(np.float32),
            "observation.images.top": rng.integers(256, size=(length, 4, 5, 3), dtype=np.uint8),
            "observation.matrix": rng.normal(size=(length, 2, 3)),
            "action": rng.normal(size=(length, 2)).astype(np.float32),
            "next.reward": rng.normal(size=length).astype(np.float32),
            "next.done": np.arange(length) == length - 1,
            "timestamp": np.arange(length, dtype=np.float32) / 10,
            "task_index": np.full(length, OF_EPISODES[number]),
            "index": np.arange(first, first + length),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
        }
        out.append(arrays)
        first += length
    for i, episodes in enumerate((out[:2], out[2:])):
        path = root / f"data/chunk-000/file-{i:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.concat_tables([table(arrays) for arrays in episodes]), path)
    (root / "meta").mkdir()
    pq.write_table(pa.table({"task_index": [0, 1], "__index_level_0__": list(TASKS)}), root / "meta/tasks.parquet")
    features = FEATURES | ({"observation.images.side": {"dtype": "video", "shape": [4, 5, 3]}} if video else {})
    info = {"codebase_version": version, "fps": 10, "robot_type": "so100", "features": features}
    (root / "meta/info.json").write_text(json.dumps(info))
    return out


def table(arrays):
    columns = {}
    for name, array in arrays.items():
        if "images" in name:
            columns[name] = pa.array([png(picture) for picture in array])
        else:
            columns[name] = pa.array(array.tolist() if array.ndim > 1 else array)
            if array.ndim > 1:
                kind = pa.from_numpy_dtype(array.dtype)
                for _ in array.shape[1:]:
                    kind = pa.list_(kind)
                columns[name] = columns[name].cast(kind)
    return pa.table(columns)


def assert_imported(buffer, written):
    assert buffer.episode_lens.tolist() == list(LENGTHS)
    ours = {"next.reward": "reward", "next.done": "done"}
    for i, arrays in enumerate(written):
        episode = buffer.episode(i)
        assert str(episode["task"]) == TASKS[OF_EPISODES[i]]
        for name, array in arrays.items():
            if name in ("index", "frame_index", "episode_index"):
                continue
            got = episode
            for part in ours.get(name, name).split("."):
                got = got[part]
            assert (got.dtype, got.tobytes()) == (array.dtype, array.tobytes()), name
    buffer.close()


def test_each_episode_comes_in_with_its_images_and_its_task(tmp_path):
    written = write(tmp_path / "l")
    assert_imported(import_lerobot(tmp_path / "l", tmp_path / "b"), written)


def test_a_way_out_and_in_is_equal_to_the_bit(tmp_path):
    written = write(tmp_path / "l")
    with import_lerobot(tmp_path / "l", tmp_path / "b") as buffer:
        export_lerobot(buffer, tmp_path / "m")
    assert_imported(import_lerobot(tmp_path / "m", tmp_path / "c"), written)
    info = json.loads((tmp_path / "m/meta/info.json").read_text())
    assert info["features"] == FEATURES
    assert (info["fps"], info["robot_type"], info["total_episodes"], info["total_frames"]) == (10, "so100", 3, 11)


def test_what_is_exported_can_be_read_by_pyarrow_alone(tmp_path):
    with ReplayBuffer(tmp_path / "b", 3, 5, {"observation": ("float", 2), "action": "int", "note": "U5"}) as buffer:
        buffer.store_episode(observation=[[1, 2], [3, 4]], action=[5, 6], note=["a", "bcd"])
        buffer.store_episode(observation=[[7, 8]], action=[9], note=[""])
        export_lerobot(buffer, tmp_path / "m", fps=2)
    data = pq.read_table(tmp_path / "m/data/chunk-000/file-000.parquet").to_pydict()
    assert data["observation.state"] == [[1, 2], [3, 4], [7, 8]]
    assert (data["action"], data["note"]) == ([5, 6, 9], ["a", "bcd", ""])
    assert (data["episode_index"], data["frame_index"], data["index"]) == ([0, 0, 1], [0, 1, 0], [0, 1, 2])
    assert (data["timestamp"], data["task_index"]) == ([0, 0.5, 0], [0, 0, 0])
    episodes = pq.read_table(tmp_path / "m/meta/episodes/chunk-000/file-000.parquet").to_pydict()
    assert (episodes["dataset_from_index"], episodes["dataset_to_index"]) == ([0, 2], [2, 3])
    features = json.loads((tmp_path / "m/meta/info.json").read_text())["features"]
    assert features["observation.state"] == {"dtype": "float32", "shape": [2], "names": None}
    assert features["action"] == {"dtype": "int64", "shape": [1], "names": None}


def test_videos_are_refused_or_skipped(tmp_path):
    written = write(tmp_path / "l", video=True)
    with pytest.raises(SchemaError, match=r"observation\.images\.side are videos; pass videos='skip'"):
        import_lerobot(tmp_path / "l", tmp_path / "b")
    assert_imported(import_lerobot(tmp_path / "l", tmp_path / "b", videos="skip"), written)


def test_what_is_no_such_data_set_is_refused(tmp_path):
    with pytest.raises(NotABufferError, match="it is no LeRobot data set"):
        import_lerobot(tmp_path, tmp_path / "b")
    write(tmp_path / "l", version="v2.1")
    with pytest.raises(NotABufferError, match=r"got version 'v2\.1', expected v3\.0; convert it"):
        import_lerobot(tmp_path / "l", tmp_path / "b")
    write(tmp_path / "m")
    path = tmp_path / "m/data/chunk-000/file-001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["action"]), path)
    with pytest.raises(CorruptBufferError, match=r"it has no column 'action', which meta/info\.json names"):
        import_lerobot(tmp_path / "m", tmp_path / "b")


def test_what_cannot_be_exported_is_refused(tmp_path):
    with ReplayBuffer(tmp_path / "b", 3, 5, {"action": "int"}) as buffer:
        with pytest.raises(SchemaError, match=r"how many steps a second has; pass fps="):
            export_lerobot(buffer, tmp_path / "m")
        with pytest.raises(SchemaError, match="it has no episodes; record one first"):
            export_lerobot(buffer, tmp_path / "m", fps=3)
        buffer.store_episode(action=[1])
        export_lerobot(buffer, tmp_path / "m", fps=3)
        with pytest.raises(SchemaError, match="there is a data set already"):
            export_lerobot(buffer, tmp_path / "m", fps=3)
