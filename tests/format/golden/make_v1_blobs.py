"""Makes the golden folders with compressed fields anew, grid and packed, with `tests/support` on the PYTHONPATH.

As with `make_v1`, only while the version is not released; another release of a codec's package makes other blobs of the
same timesteps, and these must be read for ever. Two episodes of the grid have a dictionary, one was recorded behind.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from inside import set_inside
from make_v1 import neutralise

from memmap_buffer import Field, Jpeg, ReplayBuffer, pack, unpack

FOLDER = Path(__file__).parent / "v1-blobs"
PACKED = FOLDER.with_name("v1-blobs-packed")
FIELDS = {
    "frame": Field("uint8", (16, 16), final=True, codec="zstd"),
    "camera": {
        "left": Field("uint8", (8, 16, 3), codec=Jpeg(quality=95)),
        "grey": Field("uint8", (8, 8), codec="jpeg"),
    },
    "noise": Field("int32", codec="zstd"),  # it never becomes smaller, so each blob is its row
    "reward": "float64",
}
LENGTHS = (40, 33, 5)


def record(buffer: ReplayBuffer, serial: int) -> None:
    with buffer.one_episode() as episode:
        for t in range(LENGTHS[serial]):
            camera = {"left": np.full((8, 16, 3), [10 * t % 250, 100, 200]), "grey": np.full((8, 8), 5 * t)}
            episode.store(frame=frame(serial, t), camera=camera, noise=2**30 + 1001 * t, reward=t / 4)
        if serial != 1:
            episode.final(frame=frame(serial, LENGTHS[serial]))


def frame(serial: int, t: int) -> np.ndarray:
    """A texture without any order, which a dictionary holds, and a point that moves."""
    out = (np.arange(256) ** 3 * 40503 >> 7).astype(np.uint8).reshape(16, 16)
    out[serial, t % 16] ^= 255
    return out


def make() -> None:
    set_inside(pytest.MonkeyPatch(), dictionary_samples_a_byte=10)  # a dictionary is made by fewer timesteps
    here = Path(mkdtemp())
    with ReplayBuffer(here / "plain", 3, 40, FIELDS) as buffer:
        for serial in (0, 1):
            record(buffer, serial)
    pack(here / "plain", here / "packed", codec={"frame": "zstd"})
    shutil.rmtree(FOLDER, ignore_errors=True)
    unpack(here / "packed", FOLDER, 3)
    with ReplayBuffer.from_folder(FOLDER) as buffer:
        record(buffer, 2)
    neutralise(FOLDER)
    shutil.rmtree(PACKED, ignore_errors=True)
    pack(FOLDER, PACKED)
    (PACKED / ".lock").unlink()
    shutil.rmtree(here)


if __name__ == "__main__":
    make()
