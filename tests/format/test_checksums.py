"""The checksum of rows is that of the specification, however they come, and tells of what happens to disks."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import without_barriers
from hypothesis import given
from hypothesis import strategies as st

from memmap_buffer import Field, ReplayBuffer, pack, verify
from memmap_buffer.format.checksums import EMPTY, add_rows, checksum, checksum_of

BLOCK = 4096


def specified(data: bytes) -> int:
    """The definition, a word at a time."""
    whole = len(data) // BLOCK * BLOCK
    crc = 0
    for at in range(0, whole, BLOCK):
        words = (int.from_bytes(data[i : i + 8], "little") for i in range(at, at + BLOCK, 8))
        crc = zlib.crc32((sum(words) % 2**64).to_bytes(8, "little"), crc)
    return zlib.crc32(data[whole:], crc)


def random_bytes(size: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def test_known_values() -> None:
    assert checksum(np.frombuffer(b"123456789", np.uint8)) == 0xCBF43926  # CRC-32's own check value
    assert checksum(np.arange(2048, dtype="<u4")) == 0xCEAA02DD
    assert checksum(np.empty((0, 3), np.float32)) == 0


@given(st.lists(st.integers(0, 3 * BLOCK), max_size=4), st.integers(0, 7))
def test_rows_in_pieces_of_any_size_at_any_address_have_the_checksum_of_the_specification(
    sizes: list[int], shift: int
) -> None:
    data = random_bytes(sum(sizes) + shift)[shift:]
    sums, at = EMPTY, 0
    for size in sizes:
        sums, at = add_rows(sums, data[at : at + size]), at + size
    assert checksum_of(sums) == checksum(data) == specified(data.tobytes())


@pytest.mark.parametrize("size", [100, BLOCK, 5 * BLOCK + 77])
def test_what_happens_to_disks_is_seen(size: int) -> None:
    data = random_bytes(size)
    others = []
    for bit in np.random.default_rng(1).integers(0, 8 * size, 300):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        others.append(flipped)
    for sector in range(0, size, 512):
        lost, exchanged = data.copy(), data.copy()
        lost[sector : sector + 512] = 0
        exchanged[sector : sector + 512] = random_bytes(512, 2)[: size - sector]
        others += [lost, exchanged]
    if size > 2 * BLOCK:
        others.append(np.concatenate([data[BLOCK : 2 * BLOCK], data[:BLOCK], data[2 * BLOCK :]]))
    assert all(checksum(other) != checksum(data) for other in others)


@pytest.mark.parametrize("how", ["whole", "step", "chunks", "update", "pack"])
def test_every_way_to_write_large_rows_stores_the_checksum_of_the_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    without_barriers(monkeypatch)
    if how == "chunks":
        monkeypatch.setattr("memmap_buffer.writing.episode.CHUNK_BYTES", 9000)
    images = random_bytes(41 * 1000).reshape(41, 1000)
    options = {"step": {"publish": "step"}, "chunks": {"stage": "disk"}}.get(how, {})
    fields = {"image": Field("uint8", (1000,), final=True), "x": "float"}
    with ReplayBuffer(tmp_path / "grid", 2, 40, fields, **options) as buffer:
        with buffer.one_episode() as episode:
            for t in range(40):
                episode.store(image=images[t], x=t)
                if how == "step" and t in (3, 17):
                    buffer.flush()
            episode.final(image=images[40])
        if how == "update":
            images[:7] = 9
            buffer.update(0, image=images[:40])
    folder = tmp_path / "grid"
    if how == "pack":
        folder = tmp_path / "packed"
        pack(tmp_path / "grid", folder)
    stored = np.load(folder / "checksums.npy")[0, :2]
    assert stored.tolist() == [specified(images.tobytes()), specified(np.arange(40, dtype="<f4").tobytes())]
    assert verify(folder) == []
