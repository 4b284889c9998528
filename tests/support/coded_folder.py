"""A small folder with compressed fields, made once, and what its files say, computed from the format alone."""

from __future__ import annotations

import shutil
import zlib
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from memmap_buffer import Field, ReplayBuffer, pack, unpack
from memmap_buffer.codecs import Jpeg
from memmap_buffer.format import syscalls

FIELDS: dict[str, Any] = {
    "frame": Field("uint8", (32, 32), final=True, codec="zstd"),
    "camera": {"left": Field("uint8", (16, 24, 3), codec=Jpeg(quality=90))},
    "noise": Field("uint8", (9,), codec="zstd"),  # it never becomes smaller
    "depth": Field("uint16", (8, 8)),
    "number": "int",
}
LENGTHS = (30, 41, 1, 50)
MAX_TIMESTEPS, SLOTS = 50, 6
ROW_BYTES = {"frame": 1024, "camera.left": 1152, "noise": 9}


def frame(episode: int, t: int) -> np.ndarray:
    """The same texture each time, which one dictionary holds, and a point that moves."""
    out = np.random.default_rng(7).integers(0, 256, (32, 32), np.uint8)
    out[t % 32, episode] ^= 255
    return out


def make(folder: Path, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> ReplayBuffer:
    sizes = {"max_episodes": SLOTS - 1, "max_timesteps": MAX_TIMESTEPS, **options}
    buffer = ReplayBuffer(folder, fields=FIELDS, meta_fields={"task": "int"}, **sizes)
    for number, length in enumerate(lengths):
        record(buffer, number, length)
    return buffer


def record(buffer: ReplayBuffer, number: int, length: int) -> None:
    noise, ramp = np.random.default_rng(number), np.linspace(0, 255, 16 * 24 * 3).reshape(16, 24, 3)
    with buffer.one_episode(task=number) as episode:
        for t in range(length):
            row = {"depth": np.full((8, 8), 100 * number + t), "number": 100 * number + t}
            camera = np.roll(ramp, t, axis=1).astype(np.uint8)
            noisy = noise.integers(0, 256, 9, np.uint8)
            episode.store(frame=frame(number, t), camera={"left": camera}, noise=noisy, **row)
        if number % 2 == 0:
            episode.final(frame=frame(number, length))


def example(kind: str = "grid") -> Path:
    """A folder that is not to be changed.

    Args: kind: "grid"; "packed", of the same blobs; "dense", packed with a dictionary for frames, and "spread", that
        in a grid again.
    """
    return _example(kind)


@pytest.fixture(autouse=True)
def no_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut in these tests, and the disk takes milliseconds for each barrier."""
    monkeypatch.setattr(syscalls.System, "barrier", lambda self, fd: None)
    monkeypatch.setattr(syscalls.System, "sync_folder", lambda self, directory: None)


@cache
def _example(kind: str) -> Path:
    folder = Path(mkdtemp()) / kind
    if kind == "grid":
        make(folder).close()
    elif kind == "packed":
        pack(example(), folder)
    elif kind == "dense":
        pack(example(), folder, codec={"frame": "zstd"})
    else:
        unpack(example("dense"), folder, SLOTS - 1)
    return folder


def copy_of(kind: str, folder: Path) -> Path:
    return Path(shutil.copytree(example(kind), folder))


def episodes(folder: Path) -> dict[int, dict[str, Any]]:
    """serial -> the values of every field, of an episode that passes its checksums."""
    with ReplayBuffer.from_folder(folder, read_only=True, verify="always") as buffer:
        return {int(serial): flat(buffer.episode(i)) for i, serial in enumerate(buffer.serials)}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value.tolist()}
    return out


def first_row(folder: Path, name: str, slot: int) -> int:
    final = name == "frame"
    record = np.load(folder / "episodes.npy")[slot]
    return int(record["first_row"]) + slot * final


def open_index(folder: Path, name: str) -> np.ndarray:
    """All rows of the index of a field, to be changed: (rows, 2)."""
    return np.lib.format.open_memmap(folder / "data" / f"{name}.npy", mode="r+").reshape(-1, 2)


def open_blobs(folder: Path, name: str) -> np.ndarray:
    """All bytes of a file of blobs, to be changed."""
    return np.lib.format.open_memmap(folder / "data" / f"{name}.blobs.npy", mode="r+").reshape(-1)


def number_of(folder: Path, name: str) -> int:
    """The number of a field's dictionary in the index."""
    return zlib.crc32(np.load(folder / "data" / f"{name}.dictionary.npy").tobytes()) or 1
