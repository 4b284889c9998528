"""How fast rows come from the disk: when it is measured, what is dropped from the cache for it, and what is not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from fault_injection import listing
from inside import disk_sample_of, get_inside, opened, sampled_rows, set_inside

from memmap_buffer import DiskSpeed, Field, ReplayBuffer, measure_disk_speed, pack

pytestmark = pytest.mark.skipif(
    not get_inside("can_forget"), reason="this system does not drop pages from its cache when asked"
)
LENGTHS = (60, 1, 90, 49)
WIDTH = 8192
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """200 timesteps of two pages and more, written to the disk and dropped from memory."""
    if get_inside("file_system")(tmp_path) in get_inside("in_memory_systems"):
        pytest.skip(f"{tmp_path} is not on a disk")
    fields = {"image": ("uint8", WIDTH), "x": "float"}
    with ReplayBuffer(tmp_path / "buffer", 5, 100, fields, circular=True) as buffer:
        for length in (3, *LENGTHS[:2], 7, *LENGTHS[2:]):
            buffer.store_episode(image=np.ones((length, WIDTH)), x=np.arange(length))
        buffer.delete([2])
    drop(tmp_path / "buffer")
    return tmp_path / "buffer"


def drop(folder: Path) -> None:
    for path in folder.glob("data/*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read(folder: Path) -> None:
    """Into memory, page by page: pages that were read together can only be dropped together."""
    for path in folder.glob("data/*"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in range(0, path.stat().st_size, PAGE):
            os.pread(fd, PAGE, offset)
        os.close(fd)


def test_what_is_in_memory_is_measured_only_where_the_data_is_larger_than_memory(folder: Path) -> None:
    read(folder)
    assert measure_disk_speed(folder, 0.1, larger=False) is None
    found = measure_disk_speed(folder, 0.1, larger=True)
    assert found is not None
    assert (found.cached, found.timestep_bytes) == (1, WIDTH + 4)
    assert found.rate > 0
    assert found.batch in (8, 16, 32, 64, 128, 256)


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_in_memory_is_measured_and_nothing_in_the_folder_changes(folder: Path, packed: bool) -> None:
    if packed:
        pack(folder, folder.parent / "packed")
        folder = folder.parent / "packed"
        drop(folder)
    before = listing(folder)
    drop(folder)  # `listing` read it
    found = measure_disk_speed(folder, 0.1, larger=False)
    assert found is not None
    assert found.cached < get_inside("in_memory_share")
    assert found.rate > 0
    assert listing(folder) == before


def test_only_the_sample_is_dropped_and_all_of_it_is_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(folder)
    set_inside(monkeypatch, disk_sample=20)
    storage = opened(folder, read_only=True)
    sample = disk_sample_of(storage)
    assert (sample.size, len(sample.missing())) == (20, 0)
    sample.forget()
    assert len(sample.missing()) == 20
    rows = sampled_rows(sample, "image")
    far = [row for row in range(500) if np.abs(rows - row).min() > 1]  # the others share pages with them
    assert all(get_inside("in_memory")(storage.maps.rows["image"], zip(far, [row + 1 for row in far], strict=True)))
    sample.read(np.arange(20))
    assert len(sample.missing()) == 0


def test_the_sample_is_of_visible_timesteps(folder: Path) -> None:
    storage = opened(folder, read_only=True)
    sample = disk_sample_of(storage)
    assert sample.size == sum(LENGTHS)
    steps = storage.maps.rows["x"][sampled_rows(sample, "x")]
    assert sorted(steps.tolist()) == sorted(t for length in LENGTHS for t in range(length))


def test_of_a_compressed_field_the_blobs_are_dropped_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if get_inside("file_system")(tmp_path) in get_inside("in_memory_systems"):
        pytest.skip(f"{tmp_path} is not on a disk")
    image = np.random.default_rng(0).integers(0, 256, (60, 2 * PAGE), np.uint8)
    image[:, PAGE:] = 0  # so that a blob is of a page and some bytes
    with ReplayBuffer(tmp_path / "buffer", 1, 60, {"image": Field("uint8", (2 * PAGE,), codec="zstd")}) as buffer:
        buffer.store_episode(image=image)
    drop(tmp_path / "buffer")
    read(tmp_path / "buffer")
    set_inside(monkeypatch, disk_sample=10)
    sample = disk_sample_of(opened(tmp_path / "buffer", read_only=True))
    assert (sample.size, len(sample.missing())) == (10, 0)
    assert PAGE < sample.timestep_bytes < PAGE + 100
    sample.forget()
    assert len(sample.missing()) == 10
    sample.read(np.arange(10))
    assert len(sample.missing()) == 0


def test_what_others_have_mapped_is_not_dropped(folder: Path) -> None:
    read(folder)
    mapped = [np.load(path, mmap_mode="r") for path in folder.glob("data/*")]
    assert all(array.sum() > 0 for array in mapped)
    found = measure_disk_speed(folder, 0.1, larger=True)
    assert found == DiskSpeed(cached=1, batch=0, rate=0, timestep_bytes=WIDTH + 4)


def test_where_there_is_no_disk_or_nothing_to_read_nothing_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ReplayBuffer(tmp_path / "empty", 3, 4, {"x": "float"}).close()
    assert measure_disk_speed(tmp_path / "empty", 0.1, larger=True) is None
    set_inside(monkeypatch, disk_file_system=lambda path: "tmpfs")
    assert measure_disk_speed(folder, 0.1, larger=True) is None


def test_the_file_system_is_the_one_that_was_mounted_last_at_the_nearest_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd mounts a network file system over the place that waits for its first use."""
    (tmp_path / "my data" / "runs").mkdir(parents=True)
    place = str(tmp_path / "my data").replace(" ", "\\040")
    kinds = {"/": "ext4", f"{place} ": "autofs", place: "nfs4", f"{place}/runs/other": "tmpfs"}
    lines = [
        f"2{i} 1 0:2{i} / {at.strip()} rw,relatime shared:1 - {kind} from rw"
        for i, (at, kind) in enumerate(kinds.items())
    ]
    (tmp_path / "mounts").write_text("\n".join(lines))
    set_inside(monkeypatch, mounts=tmp_path / "mounts")
    kind_of = get_inside("file_system")
    assert kind_of(tmp_path / "my data" / "runs") == "nfs4"
    assert get_inside("network_file_system")(tmp_path / "my data") == "nfs4"
    assert kind_of(tmp_path) == "ext4"
