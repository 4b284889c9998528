"""What LeRobot itself writes and reads; run in an interpreter of its own, as it logs, warns and looks for its hub.

python lerobot_peer.py write ROOT | film ROOT | append ROOT | read ROOT OUT.npz | compare ROOT FOLDER

`film` writes two cameras as videos.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FPS = 20
LENGTHS = (90, 3, 40)  # of 2 frames at least, as of one it cannot write a matrix; of up to 100 it describes all images
TASKS = (("pick",), ("place", "pick"), ("look",))  # the frames of an episode take turns
FEATURES: dict[str, Any] = {
    "observation.state": {"dtype": "float32", "shape": (6,), "names": ["a", "b", "c", "d", "e", "f"]},
    "observation.images.top": {"dtype": "image", "shape": (4, 5, 3), "names": ["height", "width", "channels"]},
    "observation.images.side": {"dtype": "image", "shape": (3, 6, 5), "names": ["channels", "height", "width"]},
    "observation.matrix": {"dtype": "float64", "shape": (2, 3), "names": None},
    "action": {"dtype": "float32", "shape": (2,), "names": None},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    "note": {"dtype": "string", "shape": (1,), "names": None},
}


def episodes() -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The arrays of each episode, (length, *shape), and its tasks."""
    rng = np.random.default_rng(2)
    for length, tasks in zip(LENGTHS, TASKS, strict=True):
        arrays = {
            "observation.state": rng.normal(size=(length, 6)).astype(np.float32),
            "observation.images.top": rng.integers(256, size=(length, 4, 5, 3), dtype=np.uint8),
            "observation.images.side": rng.integers(256, size=(length, 3, 6, 5), dtype=np.uint8),
            "observation.matrix": rng.normal(size=(length, 2, 3)),
            "action": rng.normal(size=(length, 2)).astype(np.float32),
            "next.reward": rng.normal(size=(length, 1)).astype(np.float32),
            "next.done": (np.arange(length) == length - 1)[:, None],
            "note": np.array([f"step {t}" for t in range(length)]),
        }
        yield arrays, tuple(tasks[t % len(tasks)] for t in range(length))


def write(root: str) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset.create("some/name", fps=FPS, features=FEATURES, root=root, use_videos=False)
    for arrays, tasks in episodes():
        _record(dataset, arrays, tasks)
    dataset.finalize()


FILMED: dict[str, Any] = {
    "observation.images.top": {"dtype": "video", "shape": (48, 64, 3), "names": ["height", "width", "channels"]},
    "observation.images.side": {"dtype": "video", "shape": (3, 64, 80), "names": ["channels", "height", "width"]},
    "action": FEATURES["action"],
}


def film(root: str) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset.create("some/name", fps=FPS, features=FILMED, root=root, use_videos=True)
    for number, (length, tasks) in enumerate(zip(LENGTHS, TASKS, strict=True)):
        top, side = scene(length, 48, 64, 2 * number), scene(length, 64, 80, 2 * number + 1)
        arrays = {"observation.images.top": top, "observation.images.side": side.transpose(0, 3, 1, 2)}
        arrays["action"] = np.arange(2 * length, dtype=np.float32).reshape(length, 2)
        _record(dataset, arrays, tuple(tasks[t % len(tasks)] for t in range(length)))
    dataset.finalize()


def scene(length: int, height: int, width: int, seed: int = 0) -> Any:
    """(length, height, width, 3) uint8: a texture that moves past a camera whose sensor has noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    frames = np.empty((length, height, width, 3), np.uint8)
    for t in range(length):
        base = 128 + 60 * np.sin(x / 5 + t / 3 + seed)[..., None] * np.cos(y / 7)[..., None] + [40, 0, -40]
        frames[t] = np.clip(base + rng.normal(0, 4, (height, width, 1)), 0, 255)
    return frames


def append(root: str) -> None:
    """Record the first episode once more."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("some/name", root=root)
    if dataset.meta.video_keys:
        top, side = scene(3, 48, 64), scene(3, 64, 80).transpose(0, 3, 1, 2)
        arrays = {"observation.images.top": top, "observation.images.side": side}
        _record(dataset, arrays | {"action": np.ones((3, 2), np.float32)}, ("again",) * 3)
    else:
        _record(dataset, *next(episodes()))
    dataset.finalize()


def read(root: str, out: str) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("some/name", root=root)
    frames = [dataset[i] for i in range(len(dataset))]
    found = {f"frames/{name}": np.stack([np.asarray(frame[name]) for frame in frames]) for name in frames[0]}
    for name, stats in dataset.meta.stats.items():
        found |= {f"stats/{name}/{which}": value for which, value in stats.items()}
    found["lengths"] = np.array(dataset.meta.episodes["length"])
    found["tasks"] = np.array([",".join(sorted(tasks)) for tasks in dataset.meta.episodes["tasks"]])  # it writes a set
    np.savez(out, **found)


DELTAS = {
    "observation.state": [-0.1, 0],
    "observation.images.top": [-0.05, 0],
    "observation.images.side": [0, 0.5],
    "observation.matrix": [0.05],
    "action": [i / FPS for i in range(-3, 8)],
    "next.reward": [0, 0.05],
}


def compare(root: str, folder: str) -> None:
    """Import the data set, and hold its items and metadata beside LeRobot's."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from memmap_buffer.interop.lerobot import import_lerobot
    from memmap_buffer.interop.lerobot_dataset import DiskLeRobotDataset

    import_lerobot(root, folder, codec="zstd").close()
    known = LeRobotDataset("some/name", root=root).meta.features
    deltas = {name: at for name, at in DELTAS.items() if name in known}
    for options in ({}, {"delta_timestamps": deltas}, {"delta_timestamps": {"action": [0.0]}}, {"episodes": [0, 2]}):
        theirs, ours = LeRobotDataset("some/name", root=root, **options), DiskLeRobotDataset("n", folder, **options)
        assert (len(theirs), theirs.num_episodes) == (len(ours), ours.num_episodes)
        for i in range(len(theirs)):
            wanted, got = theirs[i], ours[i]
            assert wanted.keys() == got.keys()
            for name, value in wanted.items():
                same = torch.equal(value, got[name]) if isinstance(value, torch.Tensor) else value == got[name]
                assert same and getattr(value, "dtype", None) == getattr(got[name], "dtype", None), (i, name)
    for name in (
        "fps",
        "robot_type",
        "total_episodes",
        "total_frames",
        "total_tasks",
        "camera_keys",
        "video_keys",
        "features",
    ):
        assert getattr(theirs.meta, name) == getattr(ours.meta, name), name
    for name, stats in theirs.meta.stats.items():
        for which, value in stats.items():
            np.testing.assert_array_equal(ours.meta.stats[name][which], value)


def _record(dataset: Any, arrays: dict[str, Any], tasks: tuple[str, ...]) -> None:
    for t, task in enumerate(tasks):
        frame = {name: str(array[t]) if name == "note" else array[t] for name, array in arrays.items()}
        dataset.add_frame(frame | {"task": task})
    dataset.save_episode()


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path(sys.argv[2]).parent / "hub")}
    {"write": write, "film": film, "append": append, "read": read, "compare": compare}[sys.argv[1]](*sys.argv[2:])
