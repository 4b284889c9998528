"""What a program can ask of a folder, its disk and a URL before it copies or reads: by public names alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memmap_buffer import (
    Field,
    NotABufferError,
    ReplayBuffer,
    Zstd,
    bytes_to_copy,
    compression_of,
    disk_of,
    fetched_of,
    measure_disk_speed,
    measure_store,
    pack,
    publish,
    repair,
    shards_at,
)
from memmap_buffer.adapters import LOST

STEPS = (5, 3)
FRAME = (16, 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fields = {"frame": Field("uint8", FRAME, codec=Zstd(3)), "raw": Field("float32", 2, final=True)}
    with ReplayBuffer(tmp_path / "buffer", 3, 8, fields, {"task": "int"}) as buffer:
        for length in (4, *STEPS):
            raw = np.ones((length + 1, 2))
            buffer.store_episode(frame=np.zeros((length, *FRAME), np.uint8), raw=raw, task=1)
        buffer.delete([0])
    return tmp_path / "buffer"


def test_compression_is_told_of_each_field_that_has_a_codec_and_counts_visible_timesteps(folder: Path) -> None:
    saved = compression_of(str(folder))
    assert list(saved) == ["frame"]
    codec, stored, raw = saved["frame"]
    assert codec is not None and codec["name"] == "zstd" and codec["level"] == 3
    assert raw == sum(STEPS) * FRAME[0] * FRAME[1]
    assert 0 < stored < raw / 4


def test_the_bytes_of_a_copy_are_those_that_it_takes(folder: Path, tmp_path: Path) -> None:
    expected = compression_of(folder)["frame"].stored + 8 * (sum(STEPS) + len(STEPS)) + 8 * len(STEPS)
    assert bytes_to_copy(folder) == expected
    pack(folder, tmp_path / "packed")
    assert bytes_to_copy(tmp_path / "packed") == expected
    files = [path.stat().st_size for part in ("data", "meta") for path in (tmp_path / "packed" / part).rglob("*.npy")]
    assert expected <= sum(files) <= expected + 4096 * len(files)


def test_the_bytes_of_a_copy_count_steps_that_a_ring_has_trimmed_as_they_are_copied_too(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "ring", 4, 100, {"x": "float64"}, capacity=100) as buffer:
        for length in (60, 60):
            buffer.store_episode(x=np.zeros(length))
        assert len(buffer.dataset(timestep_level=True)) == 100
    pack(tmp_path / "ring", tmp_path / "packed")
    assert bytes_to_copy(tmp_path / "ring") == bytes_to_copy(tmp_path / "packed") == 8 * 120


def test_the_disk_of_a_folder_has_room_and_is_no_network_s(folder: Path) -> None:
    disk = disk_of(str(folder))
    assert disk.network == ""
    assert disk.free_bytes > 0


@pytest.mark.parametrize(
    "ask", [compression_of, bytes_to_copy, lambda folder: measure_disk_speed(folder, 0.1, larger=True)]
)
def test_what_is_no_buffer_is_refused(ask: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(NotABufferError, match="no such folder"):
        ask(tmp_path / "none")


def test_a_url_tells_its_shards_its_speed_and_what_was_fetched(folder: Path, tmp_path: Path) -> None:
    url, cache = f"file://{tmp_path}/published", tmp_path / "cache"
    publish(folder, url)
    shard = shards_at(url)["buffer"]
    assert (shard.episodes, shard.steps) == (len(STEPS), sum(STEPS))
    store = measure_store(url, 0.01)
    assert (store.shards, store.episodes, store.steps, store.ranges) == (1, len(STEPS), sum(STEPS), True)
    assert store.at_once > 1 and max((store.block_bytes or {}).values()) < store.read_ahead
    assert fetched_of([shard], cache) == (0, 0)
    with ReplayBuffer.from_folder(f"{url}/buffer", cache=cache) as buffer:
        buffer.batch()
    fetched, needed = fetched_of([shard], cache)
    assert fetched >= needed > 0


def test_what_a_repair_takes_out_lies_where_adapters_know(folder: Path) -> None:
    (folder / "data" / "raw.npy").write_bytes(b"")
    repair(folder)
    assert any((folder / LOST).iterdir())
