"""LeRobot data sets in and out: written here by pyarrow alone after the published layout, and read back by it.

Where LeRobot is installed, it reads what is exported, goes on recording there, and writes what is imported.
"""

import importlib.util
import io
import json
import subprocess
import sys

import lerobot_peer
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inside import set_inside
from PIL import Image

from memmap_buffer import CorruptBufferError, NotABufferError, ReplayBuffer, SchemaError
from memmap_buffer.interop.lerobot import export_lerobot, import_lerobot

LENGTHS = (4, 2, 5)
TASKS = ("pick", "place it down")
OF_EPISODES = (1, 0, 1)
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": [6], "names": ["a", "b", "c", "d", "e", "f"]},
    "observation.images.top": {"dtype": "image", "shape": [4, 5, 3], "names": ["height", "width", "channels"]},
    "observation.rot-mat": {"dtype": "float64", "shape": [2, 3], "names": None},
    "action": {"dtype": "float32", "shape": [2], "names": None},
    "next.reward": {"dtype": "float32", "shape": [1], "names": None},
    "next.done": {"dtype": "bool", "shape": [1], "names": None},
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
    **{name: {"dtype": "int64", "shape": [1], "names": None} for name in ("index", "frame_index", "episode_index")},
}


needs_lerobot = pytest.mark.skipif(
    importlib.util.find_spec("lerobot") is None, reason="lerobot is not installed; it has torch and numpy of its own"
)


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
            "observation.rot-mat": rng.normal(size=(length, 2, 3)),
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
                got = got[part.replace("-", "_")]
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


def test_a_text_is_imported_whole_whichever_file_has_the_longest(tmp_path):
    texts = ["a", "a longer one"]
    with ReplayBuffer(tmp_path / "data", 2, 3, {"action": "float", "says": "U20"}) as buffer:
        for text in texts:
            buffer.store_episode(action=[0, 0], says=[text] * 2)
        export_lerobot(buffer, tmp_path / "set", fps=10)
    first = tmp_path / "set/data/chunk-000/file-000.parquet"
    rows = pq.read_table(first)
    for file, part in ((first, rows.slice(0, 2)), (first.with_name("file-001.parquet"), rows.slice(2))):
        pq.write_table(part, file)
    with import_lerobot(tmp_path / "set", tmp_path / "copy") as copy:
        assert [copy.episode(i)["says"].tolist() for i in range(2)] == [[text] * 2 for text in texts]


def test_videos_can_be_skipped(tmp_path):
    written = write(tmp_path / "l", video=True)
    assert_imported(import_lerobot(tmp_path / "l", tmp_path / "b", videos="skip"), written)
    with pytest.raises(SchemaError, match="videos: got 'raise', expected 'decode' or 'skip'"):
        import_lerobot(tmp_path / "l", tmp_path / "c", videos="raise")


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


def column(tree, name):
    for part in name.split("."):
        tree = tree[part]
    return tree


def expected_statistics(values, frames):
    """The slow definition of a feature's statistics, of (n, channels)."""
    values = np.asarray(values, np.float64).reshape(-1, np.shape(values)[-1])
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    found |= {f"q{q:02d}": np.quantile(values, q / 100, axis=0) for q in (1, 10, 50, 90, 99)}
    return found | {"count": np.array([frames])}


def assert_statistics(got, values, frames, *, image=False):
    expected = expected_statistics(values, frames)
    assert got.keys() == expected.keys()
    for which, value in expected.items():
        shaped = value.reshape(3, 1, 1) / 255 if image and which != "count" else value
        np.testing.assert_allclose(got[which], shaped, rtol=1e-9, atol=1e-12, err_msg=which)
        assert np.shape(got[which]) == shaped.shape


@pytest.fixture
def grey(tmp_path):
    """A buffer with every kind of feature, and a data set made of it."""
    rng, fields = np.random.default_rng(4), {"image": ("uint8", (4, 5, 1)), "one": ("float", 1), "half": "float16"}
    with ReplayBuffer(tmp_path / "b", 3, 90, fields | {"n": "int8", "note": "U3"}, {"task": "U9"}) as buffer:
        for i, length in enumerate((90, 1, 7)):
            image = rng.integers(256, size=(length, 4, 5, 1), dtype=np.uint8)
            numbers = {
                "one": rng.normal(size=(length, 1)),
                "half": rng.normal(size=length),
                "n": rng.integers(9, size=length),
            }
            buffer.store_episode(image=image, note=["abc"] * length, task=f"task {i % 2}", **numbers)
        export_lerobot(buffer, tmp_path / "m", fps=30)
        yield buffer, tmp_path / "m"


def test_statistics_are_those_of_all_frames_and_pixels(tmp_path, monkeypatch):
    set_inside(monkeypatch, lerobot_group=2)
    written = write(tmp_path / "l")
    with import_lerobot(tmp_path / "l", tmp_path / "b") as buffer:
        export_lerobot(buffer, tmp_path / "m")
    stats = json.loads((tmp_path / "m/meta/stats.json").read_text())
    rows = pq.read_table(tmp_path / "m/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert stats.keys() == FEATURES.keys()
    for name in FEATURES:
        arrays = [arrays[name] if arrays[name].ndim > 1 else arrays[name][:, None] for arrays in written]
        assert_statistics(stats[name], np.concatenate(arrays), sum(LENGTHS), image="images" in name)
        for row, array in zip(rows, arrays, strict=True):
            found = {key.rpartition("/")[2]: row[key] for key in row if key.startswith(f"stats/{name}/")}
            assert_statistics(found, array, len(array), image="images" in name)


def test_grey_images_have_the_statistics_of_three_channels_and_text_has_none(grey):
    buffer, root = grey
    stats = json.loads((root / "meta/stats.json").read_text())
    pixels = np.concatenate([buffer.episode(i)["image"] for i in range(3)])
    assert_statistics(stats["image"], np.repeat(pixels, 3, axis=-1), 98, image=True)
    assert "note" not in stats
    assert [type(stats["n"][which][0]) for which in ("min", "max", "mean")] == [int, int, float]


def test_a_single_number_has_no_axis_and_every_dtype_is_one_that_lerobot_knows(grey):
    _, root = grey
    features = json.loads((root / "meta/info.json").read_text())["features"]
    assert {name: features[name]["dtype"] for name in ("image", "one", "half", "n", "note")} == {
        "image": "image", "one": "float32", "half": "float16", "n": "int8", "note": "string",
    }  # fmt: skip
    assert pq.read_schema(root / "data/chunk-000/file-000.parquet").field("one").type == pa.float32()


def test_the_tasks_of_frames_go_out_as_they_came(tmp_path):
    write(tmp_path / "l")
    path = tmp_path / "l/data/chunk-000/file-001.parquet"
    table = pq.read_table(path)
    place = table.column_names.index("task_index")
    pq.write_table(table.set_column(place, "task_index", pa.array([1, 0, 0, 1, 0])), path)
    with import_lerobot(tmp_path / "l", tmp_path / "b") as buffer:
        export_lerobot(buffer, tmp_path / "m")
        tasks = pq.read_table(tmp_path / "m/meta/tasks.parquet").to_pandas()
        assert (tasks.index.tolist(), tasks["task_index"].tolist()) == (list(TASKS), [0, 1])
        rows = pq.read_table(tmp_path / "m/meta/episodes/chunk-000/file-000.parquet").to_pydict()
        assert rows["tasks"] == [[TASKS[1]], [TASKS[0]], [TASKS[1], TASKS[0]]]
        data = pq.read_table(tmp_path / "m/data/chunk-000/file-000.parquet")
        assert data["task_index"].to_pylist() == [1] * 4 + [0] * 2 + [1, 0, 0, 1, 0]
        buffer.update(0, task_index=np.full(4, 2))
        with pytest.raises(SchemaError, match="field 'task_index': got 2 to 2, expected 0 to 1"):
            export_lerobot(buffer, tmp_path / "n")


def test_tasks_with_gaps_in_their_numbers_are_counted_anew(tmp_path):
    write(tmp_path / "l")
    for path in (tmp_path / "l/data/chunk-000").iterdir():
        table = pq.read_table(path)
        numbers = pa.array([7 * number for number in table["task_index"].to_pylist()])
        pq.write_table(table.set_column(table.column_names.index("task_index"), "task_index", numbers), path)
    pq.write_table(pa.table({"task_index": [0, 7], "task": list(TASKS)}), tmp_path / "l/meta/tasks.parquet")
    with import_lerobot(tmp_path / "l", tmp_path / "b") as buffer:
        export_lerobot(buffer, tmp_path / "m")
    with import_lerobot(tmp_path / "m", tmp_path / "c") as buffer:
        assert [str(buffer.episode(i)["task"]) for i in range(3)] == [TASKS[number] for number in OF_EPISODES]
        assert [int(buffer.episode(i)["task_index"][0]) for i in range(3)] == [0, 1, 0]


def test_what_lerobot_has_no_type_for_is_refused(tmp_path):
    for name, field, message in (("z", "complex64", "no complex"), ("w", ("int8", (1,) * 6), "5 axes at most")):
        with ReplayBuffer(tmp_path / name, 3, 5, {name: field}) as buffer:
            buffer.store_episode(**{name: np.ones((2, *buffer.schema.fields[name].shape))})
            with pytest.raises(SchemaError, match=message):
                export_lerobot(buffer, tmp_path / "m", fps=3)
    assert not (tmp_path / "m").exists()


def lerobot(*arguments):
    """What LeRobot does, in an interpreter of its own."""
    done = subprocess.run([sys.executable, lerobot_peer.__file__, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def read(root):
    lerobot("read", root, root / "found.npz")
    with np.load(root / "found.npz") as found:
        return dict(found)


def assert_read(found, arrays, tasks):
    """Every frame that LeRobot gives is the one that was stored; images are channels first, between 0 and 1."""
    for name, array in arrays.items():
        if name == "observation.images.top":
            array = array.transpose(0, 3, 1, 2)
        got = found[f"frames/{name}"]
        expected = (array[:, 0] if array.shape[1:] == (1,) else array).astype(got.dtype)  # float64 comes out as float32
        assert np.array_equal(np.rint(got * 255), array) if "images" in name else np.array_equal(got, expected), name
    assert found["frames/task"].tolist() == tasks


@needs_lerobot
def test_what_lerobot_writes_is_imported_equal_to_the_bit(tmp_path):
    lerobot("write", tmp_path / "l")
    buffer = import_lerobot(tmp_path / "l", tmp_path / "b")
    assert buffer.episode_lens.tolist() == list(lerobot_peer.LENGTHS)
    ours = {"next.reward": "reward", "next.done": "done"}
    for i, (arrays, tasks) in enumerate(lerobot_peer.episodes()):
        episode = buffer.episode(i)
        assert str(episode["task"]) == tasks[0]
        for name, array in arrays.items():
            got = column(episode, ours.get(name, name))
            expected = array[:, 0] if array.shape[1:] == (1,) else array
            assert (got.dtype.kind, got.shape, got.tolist()) == (expected.dtype.kind, expected.shape, expected.tolist())
    buffer.close()


@needs_lerobot
def test_what_is_exported_is_read_by_lerobot_and_it_can_go_on_there(tmp_path):
    lerobot("write", tmp_path / "l")
    with import_lerobot(tmp_path / "l", tmp_path / "b") as buffer:
        export_lerobot(buffer, tmp_path / "m")
    episodes = list(lerobot_peer.episodes())
    arrays = {name: np.concatenate([arrays[name] for arrays, _ in episodes]) for name in lerobot_peer.FEATURES}
    tasks = [task for _, tasks in episodes for task in tasks]
    found, theirs = read(tmp_path / "m"), read(tmp_path / "l")
    assert_read(found, arrays, tasks)
    for key in found.keys() - {key for key in found if key.startswith("stats/")}:
        assert np.array_equal(found[key], theirs[key]), key
    assert found.keys() == theirs.keys()
    for key in (key for key in found if key.startswith("stats/")):
        assert found[key].shape == theirs[key].shape, key  # LeRobot 0.4.4 squares images in uint8 for their deviation
        if key.endswith(("min", "max", "mean", "count")) or (key.endswith("std") and "images" not in key):
            np.testing.assert_allclose(found[key], theirs[key], rtol=1e-5, atol=1e-6, err_msg=key)
    lerobot("append", tmp_path / "m")
    first, first_tasks = episodes[0]
    again = {name: np.concatenate([array, first[name]]) for name, array in arrays.items()}
    assert_read(read(tmp_path / "m"), again, [*tasks, *first_tasks])
    with import_lerobot(tmp_path / "m", tmp_path / "c") as buffer:
        assert buffer.episode_lens.tolist() == [*lerobot_peer.LENGTHS, len(first_tasks)]


@needs_lerobot
def test_lerobot_reads_grey_images_single_numbers_and_half_floats(grey):
    buffer, root = grey
    found = read(root)
    stored = [buffer.episode(i) for i in range(len(buffer))]
    assert np.array_equal(
        np.rint(found["frames/image"][:, 0] * 255), np.concatenate([e["image"][..., 0] for e in stored])
    )
    for name in ("one", "half", "n", "note"):
        assert np.array_equal(found[f"frames/{name}"], np.concatenate([e[name].reshape(-1) for e in stored])), name
    assert set(found["tasks"]) == {"task 0", "task 1"}
