"""The videos of LeRobot data sets: written here by PyAV after the published layout, and read back by it.

Where LeRobot and a decoder that it can use are installed, it reads what is exported, and writes what is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys

import av
import lerobot_peer
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from inside import get_inside, set_inside
from lerobot_peer import scene

from memmap_buffer import CorruptBufferError, Jpeg, ReplayBuffer, SchemaError
from memmap_buffer.adapters import flatten, keep_scheduling
from memmap_buffer.interop.lerobot import export_lerobot, import_lerobot
from memmap_buffer.interop.lerobot_dataset import DiskLeRobotDataset
from memmap_buffer.interop.video import FilmReader, FilmWriter

FPS = 20
LENGTHS = (9, 4, 7)
SIZES = {"observation.images.top": (48, 64), "observation.images.side": (64, 96)}
TOP, SIDE = SIZES
FILES = {TOP: ((0, 1), (2,)), SIDE: ((0, 1, 2),)}  # the episodes that each file has
NAMES = ["height", "width", "channels"]


def film(path, frames, *, codec="libsvtav1", g=5):
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=FPS, options={"g": str(g), "crf": "30"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        with keep_scheduling():
            stream.codec_context.open()
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.fixture(scope="module", autouse=True)
def quiet():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SVT_LOG", "1")
        yield


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A data set of two cameras, and camera -> what a decoder gives of each episode."""
    root = tmp_path_factory.mktemp("published")
    rows = [{"episode_index": i, "length": length} for i, length in enumerate(LENGTHS)]
    decoded = {name: [] for name in SIZES}
    for seed, (name, files) in enumerate(FILES.items()):
        for number, episodes in enumerate(files):
            frames = scene(sum(LENGTHS[i] for i in episodes), *SIZES[name], 10 * seed + number)
            got, start = film(root / f"videos/{name}/chunk-000/file-{number:03d}.mp4", frames), 0
            for i in episodes:
                decoded[name].append(got[start : start + LENGTHS[i]])
                place = {"chunk_index": 0, "file_index": number, "from_timestamp": start / FPS}
                rows[i] |= {f"videos/{name}/{key}": value for key, value in place.items()}
                start += LENGTHS[i]
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), root / "meta/episodes/chunk-000/file-000.parquet")
    times = np.concatenate([np.arange(length, dtype=np.float32) / FPS for length in LENGTHS])
    data = {"timestamp": times.astype(np.float32), "action": np.arange(len(times), dtype=np.float32)}
    data["episode_index"] = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    (root / "data/chunk-000").mkdir(parents=True)
    pq.write_table(pa.table(data), root / "data/chunk-000/file-000.parquet")
    features = {name: {"dtype": "video", "shape": [*size, 3], "names": NAMES} for name, size in SIZES.items()}
    features |= {name: {"dtype": "float32", "shape": [1], "names": None} for name in ("timestamp", "action")}
    info = {"codebase_version": "v3.0", "fps": FPS, "robot_type": None, "features": features}
    (root / "meta/info.json").write_text(json.dumps(info))
    return root, decoded


def frames_of(buffer, name):
    return [buffer.episode(i)["observation"]["images"][name.rpartition(".")[2]] for i in range(len(buffer))]


def psnr(got, expected):
    return 10 * np.log10(255**2 / np.mean((got.astype(float) - expected) ** 2))


@pytest.mark.parametrize("at_once", [1 << 30, 1 << 17])
def test_each_frame_is_the_one_of_its_time_to_the_bit(tmp_path, published, monkeypatch, at_once):
    set_inside(monkeypatch, frames_at_once=at_once)
    root, decoded = published
    with import_lerobot(root, tmp_path / "b", codec="zstd") as buffer:
        assert buffer.episode_lens.tolist() == list(LENGTHS)
        for name, episodes in decoded.items():
            for got, expected in zip(frames_of(buffer, name), episodes, strict=True):
                np.testing.assert_array_equal(got, expected)
        assert np.concatenate([buffer.episode(i)["action"] for i in range(3)]).tolist() == list(range(20))


def test_jpeg_adds_less_to_the_error_than_the_video_has(tmp_path, published):
    root, decoded = published
    with import_lerobot(root, tmp_path / "b") as buffer:
        assert buffer.schema.fields[TOP].codec == Jpeg(quality=95)
        got, expected = np.concatenate(frames_of(buffer, TOP)), np.concatenate(decoded[TOP])
    taken = np.concatenate([scene(13, 48, 64, 0), scene(7, 48, 64, 1)])
    by_jpeg, by_video = abs(got.astype(int) - expected).mean(), abs(expected.astype(int) - taken).mean()
    assert by_jpeg < 2 < by_video < 5
    assert psnr(got, expected) > 40 > psnr(expected, taken) > 33


def test_an_end_within_an_episode_stays_where_it_is(tmp_path, published, monkeypatch):
    set_inside(monkeypatch, frames_at_once=1)
    with import_lerobot(published[0], tmp_path / "b", codec="zstd", terminated="action", truncated=None) as buffer:
        assert buffer.episode_lens.tolist() == list(LENGTHS)
        np.testing.assert_array_equal(frames_of(buffer, SIDE)[1], published[1][SIDE][1])


KILLED = """
import os, sys
from memmap_buffer.interop import lerobot, video
read, count = video.FilmReader.read, [0]
def dying(*arguments):
    count[0] += 1
    if count[0] == 4:  # two cameras: in the second episode
        os._exit(9)
    return read(*arguments)
video.FilmReader.read = dying
lerobot.import_lerobot(sys.argv[1], sys.argv[2])
"""


def test_an_import_that_was_killed_goes_on_where_it_stood(tmp_path, published, monkeypatch):
    root, _ = published
    done = subprocess.run([sys.executable, "-c", KILLED, root, tmp_path / "b"], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    asked = []
    read = FilmReader.read
    monkeypatch.setattr(
        FilmReader, "read", lambda self, times, *rest: asked.append(len(times)) or read(self, times, *rest)
    )
    assert not (tmp_path / "b").exists()
    import_lerobot(root, tmp_path / "b", if_exists="resume").close()
    assert asked == [4, 4, 7, 7]  # nothing of the first episode
    import_lerobot(root, tmp_path / "c").close()
    assert asked[4:] == [9, 9, 4, 4, 7, 7]
    with (
        import_lerobot(root, tmp_path / "b", if_exists="resume") as again,
        ReplayBuffer.from_folder(tmp_path / "c") as whole,
    ):
        assert len(asked) == 10
        assert again.episode_lens.tolist() == whole.episode_lens.tolist() == list(LENGTHS)
        for i in range(len(LENGTHS)):
            for name, column in flatten(again.episode(i)).items():
                np.testing.assert_array_equal(column, flatten(whole.episode(i))[name], err_msg=name)


def test_frames_are_found_in_any_order(published):
    root, decoded = published
    reader = FilmReader(root / f"videos/{SIDE}/chunk-000/file-000.mp4", SIZES[SIDE])
    frames = np.concatenate(decoded[SIDE])
    order = np.random.default_rng(0).integers(len(frames), size=40)
    for at in (order[:20], order[20:21], order[21:], [19], [0]):
        np.testing.assert_array_equal(reader.read(np.asarray(at) / FPS, 1e-4), frames[at])
    with pytest.raises(
        CorruptBufferError, match=r"expected a frame at 0\.070000 s ± 0\.0001 s, got one at 0\.050000 s"
    ):
        reader.read(np.array([0.07]), 1e-4)
    with pytest.raises(CorruptBufferError, match=r"expected a frame at 9\.000000 s"):
        reader.read(np.array([9.0]), 1e-4)
    np.testing.assert_array_equal(reader.read(np.array([0.07]), 0.03), frames[1:2])
    reader.close()


def test_videos_that_are_not_what_the_data_set_says_are_refused(tmp_path, published):
    place = published[0] / f"videos/{TOP}/chunk-000/file-000.mp4"
    whole = place.read_bytes()
    for content, message in ((b"", "fetch the file again"), (whole[: len(whole) // 2], "fetch the file again")):
        (tmp_path / "cut.mp4").write_bytes(content)
        with pytest.raises(CorruptBufferError, match=message):
            FilmReader(tmp_path / "cut.mp4", (48, 64)).read(np.arange(13) / FPS, 1e-4)
    with pytest.raises(CorruptBufferError, match="got frames of 48 x 64, expected 64 x 48"):
        FilmReader(place, (64, 48))
    with pytest.raises(CorruptBufferError, match=r"none\.mp4: .*No such file"):
        FilmReader(tmp_path / "none.mp4", (64, 48))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A buffer of a camera, and of a grey one of odd size."""
    fields = {"image": ("uint8", (48, 64, 3)), "grey": ("uint8", (31, 33, 1)), "action": "float"}
    with ReplayBuffer(tmp_path_factory.mktemp("recorded") / "b", 3, 9, fields, {"task": "U4"}) as buffer:
        for i, length in enumerate(LENGTHS):
            grey = scene(length, 31, 33, i)[..., :1]
            buffer.store_episode(image=scene(length, 48, 64, i), grey=grey, action=np.arange(length), task=f"t{i}")
        yield buffer


def test_images_go_out_as_videos_within_the_error_of_the_codec(tmp_path, recorded, monkeypatch):
    export_lerobot(recorded, tmp_path / "m", fps=FPS, videos=True)
    info = json.loads((tmp_path / "m/meta/info.json").read_text())
    assert info["video_path"] == "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    about = info["features"]["image"]
    assert (about["dtype"], about["shape"], about["names"]) == ("video", [48, 64, 3], NAMES)
    assert about["info"] == {
        "video.height": 48, "video.width": 64, "video.codec": "av1", "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False, "video.fps": FPS, "video.channels": 3, "has_audio": False,
    }  # fmt: skip
    assert pq.read_schema(tmp_path / "m" / get_inside("lerobot_data")).names[:1] == ["action"]
    rows = pq.read_table(tmp_path / "m" / get_inside("lerobot_episodes")).to_pylist()
    assert [row["videos/grey/from_timestamp"] for row in rows] == [0, 0.45, 0.65]
    assert [row["videos/grey/to_timestamp"] for row in rows] == [0.45, 0.65, 1]
    assert np.shape(rows[0]["stats/grey/mean"]) == np.shape(rows[0]["stats/image/q01"]) == (3, 1, 1)
    with import_lerobot(tmp_path / "m", tmp_path / "c", codec="zstd") as buffer:
        assert buffer.schema.fields["grey"].shape == (31, 33, 3)
        for i in range(len(LENGTHS)):
            taken, found = recorded.episode(i), buffer.episode(i)
            assert str(found["task"]) == f"t{i}"
            assert psnr(found["image"], taken["image"]) > 33
            assert abs(found["image"].astype(int) - taken["image"]).mean() < 5
            assert psnr(found["grey"], taken["grey"]) > 30
        set_inside(monkeypatch, video_mb=0)  # a file an episode
        export_lerobot(buffer, tmp_path / "n", vcodec="hevc", videos=["image"])
    assert len(list((tmp_path / "n/videos").rglob("*.mp4"))) == 3
    features = json.loads((tmp_path / "n/meta/info.json").read_text())["features"]
    assert (features["grey"]["dtype"], features["image"]["info"]["video.codec"]) == ("image", "hevc")
    with import_lerobot(tmp_path / "n", tmp_path / "d", codec=None) as buffer:
        assert buffer.episode_lens.tolist() == list(LENGTHS)
        export_lerobot(buffer, tmp_path / "o", videos=False)  # those that were videos as images
        assert psnr(buffer.episode(2)["image"], recorded.episode(2)["image"]) > 30
    features = json.loads((tmp_path / "o/meta/info.json").read_text())["features"]
    assert features["image"] == {"dtype": "image", "shape": [48, 64, 3], "names": NAMES}


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="this system has no such call")
def test_the_encoder_takes_the_processors_from_nobody(tmp_path):
    """SVT-AV1 of a superuser makes threads of real time, also of the one that opens it; its children would be such."""
    film, before = FilmWriter(tmp_path / "a.mp4", (48, 64), FPS, "libsvtav1"), os.sched_getscheduler(0)
    film.write(scene(30, 48, 64))
    assert {os.sched_getscheduler(thread) for thread in map(int, os.listdir("/proc/self/task"))} == {before}
    film.close()
    assert os.sched_getscheduler(0) == before != os.SCHED_FIFO


def test_what_cannot_be_a_video_is_refused(tmp_path, recorded):
    with pytest.raises(SchemaError, match=r"videos: got 'action', expected features of uint8 images.*: image, grey"):
        export_lerobot(recorded, tmp_path / "m", fps=FPS, videos=["action"])
    with pytest.raises(SchemaError, match="vcodec: got 'vp9', expected one of libsvtav1, h264, hevc"):
        export_lerobot(recorded, tmp_path / "n", fps=FPS, videos=True, vcodec="vp9")
    with pytest.raises(
        SchemaError,
        match=r"/o/videos/grey/.*: h264 takes no frames of 31 x 33 .*; crop them to even sizes, or use another",
    ):
        export_lerobot(recorded, tmp_path / "o", fps=FPS, videos=["grey"], vcodec="h264")
    with ReplayBuffer(tmp_path / "b", 1, 3, {"image": ("uint8", (48, 64, 3)), "timestamp": "float"}) as buffer:
        buffer.store_episode(image=scene(3, 48, 64), timestamp=[0, 0.05, 0.11])
        with pytest.raises(SchemaError, match=r"are up to 0\.01 s away; give their fps="):
            export_lerobot(buffer, tmp_path / "p", fps=FPS, videos=True)


def test_the_data_set_of_a_folder_gives_frames_as_lerobot_decodes_them(tmp_path, published):
    root, decoded = published
    import_lerobot(root, tmp_path / "b", codec="zstd").close()
    dataset = DiskLeRobotDataset("some/name", tmp_path / "b", delta_timestamps={TOP: [-0.05, 0], SIDE: [0.05]})
    assert (dataset.meta.video_keys, dataset.meta.image_keys) == (list(SIZES), [])
    assert dataset.meta.camera_keys == dataset.meta.video_keys
    assert dataset.features[TOP] == {"dtype": "video", "shape": (48, 64, 3), "names": NAMES}
    item, top, side = dataset[10], decoded[TOP][1], decoded[SIDE][1]  # frame 1 of episode 1
    assert (item[TOP].dtype, item[TOP].shape) == (torch.float32, (2, 3, 48, 64))
    assert torch.equal(item[TOP], torch.tensor(top[:2]).movedim(-1, 1) / 255)
    assert torch.equal(
        item[SIDE], torch.tensor(side[2]).movedim(-1, 0) / 255
    )  # LeRobot gives one frame without an axis
    assert item[f"{SIDE}_is_pad"].tolist() == [False]


def lerobot_decodes():
    if importlib.util.find_spec("lerobot") is None:
        return False
    code = "import torchcodec.decoders"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


needs_lerobot = pytest.mark.skipif(not lerobot_decodes(), reason="lerobot is not installed, or its torchcodec fails")


def peer(*arguments):
    done = subprocess.run([sys.executable, lerobot_peer.__file__, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_lerobot
def test_items_are_lerobots_own_and_it_reads_and_continues_what_is_exported(tmp_path):
    peer("film", tmp_path / "l")
    peer("compare", tmp_path / "l", tmp_path / "b")
    with ReplayBuffer.from_folder(tmp_path / "b", read_only=True) as buffer:
        export_lerobot(buffer, tmp_path / "m")
        taken = [scene(length, 48, 64, 2 * i) for i, length in enumerate(lerobot_peer.LENGTHS)]
        for frames, once in zip(taken, frames_of(buffer, TOP), strict=True):
            assert psnr(once, frames) > 33
    theirs, ours = (json.loads((tmp_path / name / "meta/info.json").read_text()) for name in ("l", "m"))
    assert theirs == ours
    columns = [pq.read_schema(tmp_path / name / get_inside("lerobot_episodes")).names for name in ("l", "m")]
    assert set(columns[0]) == set(columns[1])
    peer("compare", tmp_path / "m", tmp_path / "c")
    peer("append", tmp_path / "m")
    with import_lerobot(tmp_path / "m", tmp_path / "d", codec="zstd") as buffer:
        assert buffer.episode_lens.tolist() == [*lerobot_peer.LENGTHS, 3]
        for frames, twice in zip(taken, frames_of(buffer, TOP), strict=False):
            assert psnr(twice, frames) > 32
