"""Copies that are cut off: `snapshot`, `pack` and `unpack` under kills, power cuts and disks that fail."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import damage
import pytest
from fault_injection import KILLED, in_child, listing, shown, system
from power import Disk, recording
from strategies import MEMORY

from memmap_buffer import NotABufferError, ReplayBuffer, pack, unpack, verify

Way = Callable[[Path, Path], object]


def snapshot(source: Path, target: Path) -> None:
    ReplayBuffer.from_folder(source, read_only=True).snapshot(target)


WAYS = pytest.mark.parametrize("way", [snapshot, pack, unpack])


@pytest.fixture
def full(tmp_path: Path) -> Path:
    folder = damage.copy_of_example(tmp_path / "buffer")
    (folder / "extra").mkdir()
    (folder / "extra" / "splits.json").write_bytes(b"{}")
    return folder


def assert_absent_or_complete(target: Path, whole: list[Any]) -> bool:
    """Whether there is a copy; if so, it is all there."""
    if not (target / "schema.json").exists():
        with pytest.raises(NotABufferError, match=r"copy"):
            ReplayBuffer.from_folder(target)
        return False
    assert shown(target) == whole
    assert verify(target) == []
    assert (target / "extra" / "splits.json").read_bytes() == b"{}"
    return True


@WAYS
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_operation_there_is_no_copy_or_all_of_it(
    tmp_path: Path, full: Path, stride: int, way: Way
) -> None:
    """Fault 4; and the next one into the same folder succeeds."""
    whole, before = shown(full), listing(full)
    total = damage.count_of(partial(way, full, tmp_path / "count"))
    found = set()
    for at in [*range(1, total + 1, stride), total]:
        target = tmp_path / f"copy{at}"

        def cut_off(tell: Callable[[Any], None], at: int = at, target: Path = target) -> None:
            with system(at, kill=True, half=True):
                way(full, target)

        assert in_child(cut_off).status == KILLED
        complete = assert_absent_or_complete(target, whole)
        found.add(complete)
        if not complete:
            way(full, target)
            assert assert_absent_or_complete(target, whole)
        shutil.rmtree(target)
    assert found == {True, False}
    assert listing(full) == before


@WAYS
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_an_error_of_the_disk_is_raised_and_leaves_nothing_half(
    tmp_path: Path, full: Path, error: int, stride: int, way: Way
) -> None:
    """Faults 17, 21, 22 and 26; with space again it succeeds."""
    whole = shown(full)
    total = damage.count_of(partial(way, full, tmp_path / "count"))
    for at in range(1, total + 1, stride):
        target = tmp_path / f"copy{at}"
        with system(at, error=error, half=True), pytest.raises(OSError, match=os.strerror(error)):
            way(full, target)
        if not assert_absent_or_complete(target, whole):
            assert [path.name for path in target.rglob("*") if path.is_file()] == [".lock"]
            way(full, target)
            assert assert_absent_or_complete(target, whole)
        shutil.rmtree(target)


@WAYS
@pytest.mark.parametrize("short", [1, 13])
def test_short_writes_are_completed(tmp_path: Path, full: Path, short: int, way: Way) -> None:
    """Fault 18."""
    with system(short=short):
        way(full, tmp_path / "copy")
    assert assert_absent_or_complete(tmp_path / "copy", shown(full))


@WAYS
@pytest.mark.parametrize("error", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_where_the_system_cannot_copy_ranges_bytes_are_read_and_written(
    tmp_path: Path, full: Path, error: int, way: Way
) -> None:
    with system(1, error=error, only=("copy_range",), lasting=True):
        way(full, tmp_path / "copy")
    assert assert_absent_or_complete(tmp_path / "copy", shown(full))


def test_a_power_cut_leaves_no_packed_copy_or_all_of_it(full: Path) -> None:
    """Fault 10: at every operation; and all of it once the call has returned."""
    whole, rng, found, disk = shown(full), random.Random(0), set(), Disk()
    place = Path(tempfile.mkdtemp(dir=MEMORY))
    (place / "copy").mkdir()
    with recording(place / "copy") as recorder:
        pack(full, place / "copy")
        number = recorder.folder(place / "copy")
    for at, operation in enumerate(recorder.log):
        disk.play(operation)
        for _ in range(20 if at == len(recorder.log) - 1 else 2):
            disk.cut(number, place / "copy of it", rng)
            found.add(assert_absent_or_complete(place / "copy of it", whole))
            shutil.rmtree(place / "copy of it")
    for _ in range(20):
        disk.cut(number, place / "copy of it", rng)
        assert assert_absent_or_complete(place / "copy of it", whole)
        shutil.rmtree(place / "copy of it")
    shutil.rmtree(place)
    assert found == {True, False}
