"""Copies that are cut off: `snapshot`, `pack` and `unpack` under kills, power cuts and disks that fail.

And those that other programs make beside a writer.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import damage
import pytest
from fault_injection import KILLED, in_child, listing, shown, system
from power import Disk, recording
from strategies import MEMORY

from memmap_buffer import NotABufferError, NotEnoughDataError, ReplayBuffer, pack, unpack, verify

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
            disk.cut(number, rng).write(place / "copy of it")
            found.add(assert_absent_or_complete(place / "copy of it", whole))
            shutil.rmtree(place / "copy of it")
    for _ in range(20):
        disk.cut(number, rng).write(place / "copy of it")
        assert assert_absent_or_complete(place / "copy of it", whole)
        shutil.rmtree(place / "copy of it")
    shutil.rmtree(place)
    assert found == {True, False}


# Copies by other tools, beside a writer

FILES = ("schema.json", "episodes.npy", "state.npy", "checksums.npy", "data/a.npy", "data/b.npy", "meta/m.npy")


def ring_of_steps(folder: Path) -> ReplayBuffer:
    """Steps that are shown one by one; every field of a step has its number, and the meta field that of the episode."""
    sizes = {"max_episodes": 4, "max_timesteps": 6, "spare_slots": 2, "circular": True}
    return ReplayBuffer(folder, fields={"a": "int", "b": "int"}, meta_fields={"m": "int"}, publish="step", **sizes)


def write_steps(buffer: ReplayBuffer, episodes: range) -> Any:
    """Whole episodes of these numbers, but the last one stays open."""
    for number in episodes:
        episode = buffer.begin_episode(m=number)
        for t in range(3 + number % 3):
            episode.store(a=10 * number + t, b=10 * number + t)
        if number != episodes[-1]:
            episode.publish()
    return episode


def copy_files(source: Path, target: Path, names: Collection[str]) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name)


def steps_served(folder: Path, **options: Any) -> set[int]:
    """The numbers of the steps that are read by default; none is mixed with a field or a meta field of another."""
    with ReplayBuffer.from_folder(folder, **options) as buffer, suppress(NotEnoughDataError):
        form: dict[str, Any] = {"timestep_level": True, "format": "numpy"}
        batches = [buffer.sample(64, **form), *(buffer.batch(**form) for _ in range(2))]
        rows = [row for batch in batches for row in zip(*(batch[name].tolist() for name in "abm"), strict=True)]
        assert [(a, b, m) for a, b, m in rows if a != b or a // 10 != m] == []
        return {a for a, _, _ in rows}
    return set()


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("name", FILES[1:])
def test_a_copy_that_was_made_beside_a_writer_of_steps_serves_no_mixed_row(
    tmp_path: Path, name: str, others: bool
) -> None:
    """Whichever file, or all but it, is older than the rest: by default, in the same boot, for readers and writers."""
    with ring_of_steps(tmp_path / "buffer") as buffer:
        source, copy = tmp_path / "buffer", tmp_path / "copy"
        early = {file for file in FILES if (file == name) != others}
        still_open = [write_steps(buffer, range(1, 7))]
        copy_files(source, copy, early)
        still_open += [write_steps(buffer, range(7, 12))]
        copy_files(source, copy, {*FILES} - early)
        before = steps_served(copy, read_only=True)
        with ReplayBuffer.from_folder(copy, publish="step") as writer:
            last = write_steps(writer, range(20, 22))
            assert last.state == "open"
        after = steps_served(copy)
        assert {step for step in after if step < 200} <= before
        assert {200, 201, 202, 203, 204, 210} <= after
        assert {one.state for one in still_open} == {"open"}
        assert steps_served(source, read_only=True) >= {90, 91, 92, 100, 110, 111, 112, 113, 114}


def test_of_a_copy_that_holds_nothing_yet_every_step_of_the_first_episode_is_shown_at_once(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "buffer", 9, 5, {"x": "int"}, publish="step"):
        shutil.copytree(tmp_path / "buffer", tmp_path / "copy")
    with ReplayBuffer.from_folder(tmp_path / "copy", publish="step") as buffer:
        episode = buffer.begin_episode()
        for t in range(3):
            episode.store(x=t)
        assert [one["x"] for _, one in shown(tmp_path / "copy")] == [[0, 1, 2]]
        assert [one["x"] for _, one in shown(buffer)] == [[0, 1, 2]]
