"""A folder with the face of LeRobot's data set: its items after the definition, and LeRobot's own where it is."""

import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lerobot_peer
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from memmap_buffer import NotEnoughDataError, ReplayBuffer, SchemaError
from memmap_buffer.interop.lerobot import export_lerobot, import_lerobot
from memmap_buffer.interop.lerobot_dataset import DiskLeRobotDataset

LENGTHS = (5, 2, 9)
TASKS = ("pick", "place", "pick")
FPS = 10
FIELDS = {
    "observation": {"state": ("float64", 3), "images": {"top": ("uint8", (4, 5, 3))}},
    "action": ("float32", 2),
    "reward": ("float32", 1),
    "done": "bool",
    "count": "int16",
    "note": "U4",
}
DELTAS = {
    "observation.state": [-0.2, 0],
    "action": [0, 0.1, 0.2],
    "observation.images.top": [0.1],
    "next.reward": [-0.1],
}


def episodes() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "observation": {
                "state": rng.normal(size=(n, 3)),
                "images": {"top": rng.integers(256, size=(n, 4, 5, 3), dtype=np.uint8)},
            },
            "action": rng.normal(size=(n, 2)).astype(np.float32),
            "reward": rng.normal(size=(n, 1)).astype(np.float32),
            "done": np.arange(n) == n - 1,
            "count": np.arange(n),
            "note": [f"n{t}" for t in range(n)],
        }
        for n in LENGTHS
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with ReplayBuffer(tmp_path / "b", 5, 9, FIELDS, {"task": "U5"}) as buffer:
        for episode, task in zip(episodes(), TASKS, strict=True):
            buffer.store_episode(**episode, task=task)
    return tmp_path / "b"


def columns(episode: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The features of an episode over time, as LeRobot's `hf_transform_to_torch` makes them."""
    images = torch.tensor(episode["observation"]["images"]["top"]).permute(0, 3, 1, 2)
    return {
        "observation.state": torch.tensor(episode["observation"]["state"]).float(),
        "observation.images.top": images.contiguous().to(torch.float32).div(255),
        "action": torch.tensor(episode["action"]),
        "next.reward": torch.tensor(episode["reward"][:, 0]),
        "next.done": torch.tensor(episode["done"]),
        "count": torch.tensor(episode["count"]),
    }


def expected(number: int, t: int, deltas: dict[str, list[float]]) -> dict[str, Any]:
    """The item of a frame, after `LeRobotDataset._get_query_indices`."""
    length, found = LENGTHS[number], columns(episodes()[number])
    item: dict[str, Any] = {name: column[t] for name, column in found.items()}
    for name, seconds in deltas.items():
        wanted = [t + round(s * FPS) for s in seconds]
        item[name] = torch.stack([found[name][max(0, min(length - 1, k))] for k in wanted])
        item[f"{name}_is_pad"] = torch.tensor([k < 0 or k >= length for k in wanted])
    texts = list(dict.fromkeys(TASKS))
    counters = {"index": sum(LENGTHS[:number]) + t, "frame_index": t, "episode_index": number}
    item |= {name: torch.tensor(value) for name, value in counters.items()}
    item["timestamp"] = torch.tensor(t, dtype=torch.float32) / FPS
    return item | {"task": TASKS[number], "task_index": torch.tensor(texts.index(TASKS[number])), "note": f"n{t}"}


def assert_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name


FRAMES = [(number, t) for number, length in enumerate(LENGTHS) for t in range(length)]


@pytest.mark.parametrize("deltas", [{}, DELTAS], ids=["frames", "over time"])
def test_an_item_is_what_lerobot_makes_of_the_frame(folder: Path, deltas: Any) -> None:
    dataset = DiskLeRobotDataset("some/name", folder, delta_timestamps=deltas, fps=FPS)
    assert len(dataset) == dataset.num_frames == sum(LENGTHS)
    for i, (number, t) in enumerate(FRAMES):
        assert_equal(dataset[i], expected(number, t, deltas))


@pytest.mark.parametrize("transforms", [None, torch.flipud], ids=["", "image_transforms"])
def test_a_loader_gives_what_it_would_collate(folder: Path, transforms: Any) -> None:
    dataset = DiskLeRobotDataset("some/name", folder, image_transforms=transforms, delta_timestamps=DELTAS, fps=FPS)
    dataset = pickle.loads(pickle.dumps(dataset))
    batches = list(DataLoader(dataset, 6, collate_fn=default_collate))
    for i, batch in enumerate(batches):
        frames = [expected(*where, DELTAS) for where in FRAMES[6 * i : 6 * i + 6]]
        if transforms:
            frames = [x | {"observation.images.top": transforms(x["observation.images.top"])} for x in frames]
        assert_equal(batch, default_collate(frames))


def test_wanted_episodes_alone_are_given_in_their_order(folder: Path) -> None:
    dataset = DiskLeRobotDataset("some/name", folder, [2, 0], fps=FPS)
    assert (dataset.num_episodes, dataset.num_frames, dataset.meta.total_frames) == (2, 14, 16)
    wanted = [(2, t) for t in range(9)] + [(0, t) for t in range(5)]
    for i, where in enumerate(wanted):
        assert_equal(dataset[i], expected(*where, {}))
    assert "selected samples: '14'" in repr(dataset)


def test_steps_that_are_not_valid_keep_the_tasks_of_their_episodes(folder: Path) -> None:
    with ReplayBuffer.from_folder(folder) as buffer:
        serial = int(buffer.serials[0])
        buffer.set_valid([[serial, 1], [serial, 2]])
    dataset = DiskLeRobotDataset("x", folder, fps=FPS)
    tasks = [task for task, length in zip(TASKS, LENGTHS, strict=True) for _ in range(length)]
    assert [item["task"] for item in dataset.__getitems__(range(len(tasks)))] == tasks


def test_metadata_is_that_of_an_export(folder: Path, tmp_path: Path) -> None:
    meta = DiskLeRobotDataset("some/name", folder, fps=FPS).meta
    with ReplayBuffer.from_folder(folder) as buffer:
        export_lerobot(buffer, tmp_path / "m", fps=FPS)
    info = json.loads((tmp_path / "m/meta/info.json").read_text())
    assert {name: {**about, "shape": list(about["shape"])} for name, about in meta.features.items()} == info["features"]
    assert (meta.fps, meta.total_frames, meta.total_episodes) == (FPS, 16, 3)
    stats = json.loads((tmp_path / "m/meta/stats.json").read_text())
    assert {name: {w: v.tolist() for w, v in of.items()} for name, of in meta.stats.items()} == stats
    assert meta.camera_keys == meta.image_keys == ["observation.images.top"]
    assert meta.shapes["observation.images.top"] == (4, 5, 3)
    assert meta.tasks.loc["place"].task_index == 1
    assert (meta.episodes["dataset_from_index"], meta.episodes["dataset_to_index"]) == ([0, 5, 7], [5, 7, 16])
    assert meta.episodes[1] == {"episode_index": 1, "length": 2, "dataset_from_index": 5, "dataset_to_index": 7}
    with import_lerobot(tmp_path / "m", tmp_path / "c", max_episodes=5) as buffer:
        imported = DiskLeRobotDataset("some/name", buffer)
        assert imported.features == meta.features
        assert json.dumps({n: {w: v.tolist() for w, v in of.items()} for n, of in imported.meta.stats.items()}) == (
            json.dumps(stats)
        )
        before = imported.meta.stats["action"]["max"]
        buffer.store_episode(**{**buffer.episode(0), "action": np.full((5, 2), 9)})
        assert (DiskLeRobotDataset("some/name", buffer).meta.stats["action"]["max"] == 9).all()
        assert (before < 9).all()


def test_what_cannot_be_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="fps"):
        DiskLeRobotDataset("some/name", folder)
    with pytest.raises(ValueError, match=r"multiples of 1/10"):
        DiskLeRobotDataset("some/name", folder, delta_timestamps={"action": [0.05]}, fps=FPS)
    with pytest.raises(SchemaError, match=r"'acton', expected one of .*action"):
        DiskLeRobotDataset("some/name", folder, delta_timestamps={"acton": [0.0]}, fps=FPS)
    with ReplayBuffer(tmp_path / "lists", 2, 3, {"ids": ("int", (None,))}) as buffer:
        buffer.store_episode(ids=[[1], []])
        with pytest.raises(SchemaError, match=r"field 'ids': got .* LeRobot has no lists"):
            DiskLeRobotDataset("some/name", buffer, fps=FPS)
    with ReplayBuffer(tmp_path / "c", max_timesteps=9, fields={"a": "int"}, capacity=9) as buffer:
        with pytest.raises(NotEnoughDataError, match="no episodes"):
            DiskLeRobotDataset("some/name", buffer, fps=FPS)
        for _ in range(2):
            buffer.store_episode(a=range(5))
        with pytest.raises(SchemaError, match="snapshot"):
            DiskLeRobotDataset("some/name", buffer, fps=FPS)


@pytest.mark.skipif(
    importlib.util.find_spec("lerobot") is None, reason="lerobot is not installed; it has torch and numpy of its own"
)
def test_items_and_metadata_are_lerobots_own(tmp_path: Path) -> None:
    for command in (["write", tmp_path / "l"], ["compare", tmp_path / "l", tmp_path / "b"]):
        subprocess.run([sys.executable, lerobot_peer.__file__, *map(str, command)], check=True, timeout=200)
