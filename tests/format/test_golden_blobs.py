"""Folders of old versions with compressed fields open for ever, and can be read by numpy and the codecs alone."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import listing
from inside import schema_written_again
from test_golden import by_hand, flat

from memmap_buffer import ReplayBuffer, pack, unpack, verify

GRID = Path(__file__).parent / "golden" / "v1-blobs"
PACKED = GRID.with_name("v1-blobs-packed")  # the same episodes
BOTH = pytest.mark.parametrize("folder", [GRID, PACKED], ids=["grid", "packed"])

# What the folders hold, as formulas; `golden/make_v1_blobs.py` has its own copy of them.

LENGTHS = {0: 40, 1: 33, 2: 5}
OF_A_DICTIONARY, WITH_FINAL = {0, 1}, {0, 2}
TEXTURE = [(i**3 * 40503 >> 7) % 256 for i in range(256)]


def assert_episode(got: dict[str, Any], serial: int) -> None:
    steps = range(LENGTHS[serial])
    frames = np.array([TEXTURE] * (len(steps) + (serial in WITH_FINAL)), np.uint8)
    for t, frame in enumerate(frames):
        frame[16 * serial + t % 16] ^= 255
    assert got["frame"].reshape(len(frames), -1).tolist() == frames.tolist()
    assert got["noise"].tolist() == [2**30 + 1001 * t for t in steps]
    assert got["reward"].tolist() == [t / 4 for t in steps]
    for t in steps:  # these lost something
        assert np.abs(got["camera.left"][t].astype(int) - [10 * t % 250, 100, 200]).max() < 4
        assert np.abs(got["camera.grey"][t].astype(int) - 5 * t).max() < 2


@BOTH
def test_every_episode_is_what_was_written(folder: Path) -> None:
    before = listing(folder)
    with ReplayBuffer.from_folder(folder, read_only=True, verify="always") as buffer:
        assert dict(zip(buffer.serials.tolist(), buffer.episode_lens.tolist(), strict=True)) == LENGTHS
        for i, serial in enumerate(LENGTHS):
            assert_episode(flat(buffer.episode(i)), serial)
    assert verify(folder) == []
    text = (folder / "schema.json").read_bytes()
    assert schema_written_again(text) == text
    assert listing(folder) == before


def test_a_copy_has_the_bytes_of_the_golden_one(tmp_path: Path) -> None:
    unpack(PACKED, tmp_path / "grid")
    for source in (GRID, PACKED, tmp_path / "grid"):
        pack(source, tmp_path / source.name / "packed")
        got = {name: content for name, (_, _, content) in listing(tmp_path / source.name / "packed").items()}
        assert got == {".lock": b"", **{name: content for name, (_, _, content) in listing(PACKED).items()}}


@BOTH
def test_it_can_be_read_without_the_library(folder: Path) -> None:
    schema = json.loads((folder / "schema.json").read_text())
    assert {name: field.get("codec", {}).get("name") for name, field in schema["fields"].items()} == {
        "frame": "zstd",
        "camera.left": "jpeg",
        "camera.grey": "jpeg",
        "noise": "zstd",
        "reward": None,
    }
    records, episodes = np.load(folder / "episodes.npy"), by_hand_with_indexes(folder)
    for slot, (serial, episode) in enumerate(episodes.items()):
        assert records[slot]["serial"] == serial
        decoded = {name: decode(folder, name, schema["fields"][name], rows) for name, rows in episode.items()}
        assert_episode(decoded, serial)
        numbers = {int(word) >> 32 for word in episode["frame"][:, 1]}
        assert numbers == ({number_of(folder)} if serial in OF_A_DICTIONARY else {0})


def by_hand_with_indexes(folder: Path) -> dict[int, dict[str, Any]]:
    """serial -> field -> its rows, of a compressed one those of its index."""
    import test_golden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_golden, "numbers", lambda path, field: np.load(path))
        return by_hand(folder)


def decode(folder: Path, name: str, field: dict[str, Any], rows: np.ndarray) -> np.ndarray:
    if "codec" not in field:
        return rows
    import simplejpeg
    import zstandard

    data = np.load(folder / "data" / f"{name}.blobs.npy").reshape(-1).tobytes()
    out = np.empty((len(rows), *field["shape"]), field["dtype"])
    begin = int(rows[0, 0])
    for i, (offset, word) in enumerate(rows.tolist()):
        length, number = word & 0xFFFFFFFF, word >> 32
        assert offset == begin
        blob, begin = data[offset : offset + length], offset + length
        if length == out[i].nbytes:
            out[i] = np.frombuffer(blob, out.dtype).reshape(out[i].shape)
        elif field["codec"]["name"] == "zstd":
            content = np.load(folder / "data" / f"{name}.dictionary.npy").tobytes() if number else b""
            options = {"dict_data": zstandard.ZstdCompressionDict(content)} if number else {}
            raw = zstandard.ZstdDecompressor(**options).decompress(blob)
            out[i] = np.frombuffer(raw, out.dtype).reshape(out[i].shape)
        else:
            colours = "RGB" if out.ndim == 4 else "GRAY"
            out[i] = simplejpeg.decode_jpeg(blob, colours).reshape(out[i].shape)
    return out


def number_of(folder: Path) -> int:
    return zlib.crc32(np.load(folder / "data/frame.dictionary.npy").tobytes()) or 1
