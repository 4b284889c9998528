"""`snapshot`: a consistent copy beside a writer that goes on, complete or absent, the source untouched."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
from damage import flip, header_size, killed, packed, rewrite_state, rows_of
from fault_injection import KILLED, listing, shown
from inside import after_each_copied_slot, before_the_rest_is_asked_for, set_inside

from memmap_buffer import ReplayBuffer, SchemaMismatchError, StaleEpisodeError, verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return damage.copy_of_example(tmp_path / "buffer")


def copy(source: Path, target: Path) -> None:
    ReplayBuffer.from_folder(source, read_only=True).snapshot(target)


# What is copied


@pytest.mark.parametrize(
    "options",
    [{}, {"checksum": None}, {"capacity": 7}, {"publish": "step"}, {"stage": "disk"}, {"durability": "power"}],
    ids=str,
)
def test_a_copy_shows_what_the_source_shows(tmp_path: Path, options: dict[str, Any]) -> None:
    with damage.make(tmp_path / "buffer", **options) as buffer:
        for number in range(9):
            damage.record(buffer, number, 1 + number % 4)
        buffer.update(0, number=[7])
        buffer.delete([1])
        buffer.snapshot(tmp_path / "copy")
        assert shown(tmp_path / "copy") == shown(buffer)
    assert verify(tmp_path / "copy") == []
    with ReplayBuffer.from_folder(tmp_path / "copy", verify="always") as again:
        damage.record(again, 9, 2)
        assert again.serials[-1] == 9
        assert shown(again)[:-1] == shown(tmp_path / "buffer")[-len(again) + 1 :]


def test_of_a_buffer_in_whose_place_another_came_there_is_no_copy(tmp_path: Path) -> None:
    with damage.make(tmp_path / "buffer") as buffer:
        damage.record(buffer, 0, 2)
    reader = ReplayBuffer.from_folder(tmp_path / "buffer", read_only=True)
    with damage.make(tmp_path / "buffer", overwrite=True) as buffer:
        damage.record(buffer, 5, 2)
    with pytest.raises(SchemaMismatchError, match="another buffer took its place; open it again with from_folder"):
        reader.snapshot(tmp_path / "copy")
    assert not (tmp_path / "copy" / "schema.json").exists()
    copy(tmp_path / "buffer", tmp_path / "copy")
    assert shown(tmp_path / "copy") == shown(tmp_path / "buffer")


def test_an_open_episode_is_copied_as_far_as_it_was_published(tmp_path: Path) -> None:
    buffer = damage.make(tmp_path / "buffer", publish="step")
    episode = buffer.begin_episode(task=1)
    step = {"observation": [0, 0, 0], "camera": {"left": np.zeros((2, 2))}, "half": 0, "text": ""}
    for t in range(3):
        episode.store(number=t, **step)
        buffer.snapshot(tmp_path / f"copy{t}")
    buffer.close()
    for t in range(3):
        assert [e["number"] for _, e in shown(tmp_path / f"copy{t}")] == [list(range(t + 1))]
        assert verify(tmp_path / f"copy{t}") == []


def test_a_copy_of_a_cleared_buffer_is_empty_and_goes_on_counting(tmp_path: Path, folder: Path) -> None:
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.clear()
        buffer.snapshot(tmp_path / "copy")
    with ReplayBuffer.from_folder(tmp_path / "copy") as again:
        assert len(again) == 0
        damage.record(again, 0, 2)
        assert again.serials.tolist() == [6]


def test_a_packed_folder_is_copied_too(tmp_path: Path, folder: Path) -> None:
    path = packed(folder)
    copy(path, tmp_path / "copy")
    assert shown(tmp_path / "copy") == shown(path)
    assert verify(tmp_path / "copy") == []


def test_what_lies_in_priority_and_extra_is_copied_by_its_bytes(tmp_path: Path, folder: Path) -> None:
    for sub, name in (("priority", "tree.npy"), ("priority", "tree.head.npy"), ("extra", "splits.json")):
        (folder / sub).mkdir(exist_ok=True)
        (folder / sub / name).write_bytes(os.urandom(1000))
    (folder / "extra" / "link").symlink_to("/etc/hostname")
    copy(folder, tmp_path / "copy")
    for sub in ("priority", "extra"):
        files = {path.name: path.read_bytes() for path in (folder / sub).iterdir() if not path.is_symlink()}
        assert {path.name: path.read_bytes() for path in (tmp_path / "copy" / sub).iterdir()} == files


def test_the_source_is_untouched(tmp_path: Path, folder: Path) -> None:
    before = listing(folder)
    copy(folder, tmp_path / "copy")
    assert listing(folder) == before


def test_a_copy_takes_the_space_of_what_is_stored_and_not_of_what_could_be(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "buffer", 1000, 10_000, {"x": ("float64", 100), "i": "int"}) as buffer:
        for i in range(5):
            buffer.store_episode(x=np.full((3, 100), i), i=np.full(3, i))
        buffer.snapshot(tmp_path / "copy")
    files = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) > 7 * 2**30
    assert sum(path.stat().st_blocks * 512 for path in files) < 2**20
    assert shown(tmp_path / "copy") == shown(tmp_path / "buffer")


def test_what_a_crash_may_have_spoilt_is_in_doubt_in_the_copy_too(tmp_path: Path, folder: Path) -> None:
    """Fault 12: a copy must not make trusted what nobody has looked at."""
    rewrite_state(folder, clean=0, boot=[1, 2])
    flip(folder / "data/number.npy", header_size(folder / "data/number.npy") + rows_of("number", 4)[0])
    copy(folder, tmp_path / "copy")
    served = ReplayBuffer.from_folder(tmp_path / "copy", read_only=True).get_all_data(["number"])["number"]
    assert 4 not in served[:, 0] // 100
    got = ReplayBuffer.from_folder(tmp_path / "copy", verify="always")
    assert got.serials.tolist() == [2, 3, 5]


# Where it refuses


@pytest.mark.parametrize("where", ["another", "itself"])
def test_a_folder_that_holds_a_buffer_is_refused_and_left_alone(tmp_path: Path, folder: Path, where: str) -> None:
    other = folder if where == "itself" else damage.copy_of_example(tmp_path / "other")
    (other / ".lock").unlink()
    before = listing(other)
    with pytest.raises(SchemaMismatchError, match="holds a buffer already"):
        copy(folder, other)
    assert listing(other) == before


def test_a_folder_with_files_of_others_is_refused_and_left_alone(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "other" / "data").mkdir(parents=True)
    (tmp_path / "other" / "data" / "text.npy").write_text("mine")
    before = listing(tmp_path / "other" / "data")
    with pytest.raises(OSError, match="is in the way and is not ours"):
        copy(folder, tmp_path / "other")
    assert listing(tmp_path / "other" / "data") == before
    (folder / "extra").mkdir()
    (folder / "extra" / "mine.json").write_text("the source's")
    (tmp_path / "third" / "extra").mkdir(parents=True)
    (tmp_path / "third" / "extra" / "mine.json").write_text("mine")
    with pytest.raises(OSError, match="is in the way and is not ours"):
        copy(folder, tmp_path / "third")
    assert (tmp_path / "third" / "extra" / "mine.json").read_text() == "mine"


# Beside a writer, interleaved on purpose


def assert_one_moment(target: Path, newest: int, oldest: int) -> list[int]:
    """The serials of a copy: exact, without a gap, and none missing that was visible before the call and still is."""
    serials = damage.serials_of_exact(target)
    assert serials[-1] >= newest
    assert serials[0] <= oldest or serials[-1] < oldest
    return serials


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("for_how_long", [1, 3, 20])
def test_episodes_published_meanwhile_leave_a_copy_of_one_moment(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, every: int, for_how_long: int
) -> None:
    with ReplayBuffer.from_folder(folder) as buffer:

        def publish(n: int) -> None:
            if n < for_how_long and n % every == 0:
                damage.record(buffer, int(buffer.serials[-1]) + 1, 1 + n % 4)

        with after_each_copied_slot(monkeypatch, publish):
            copy(folder, tmp_path / "copy")
        assert_one_moment(tmp_path / "copy", 5, int(buffer.serials[0]))


@pytest.mark.parametrize("position", range(4))
def test_an_episode_that_is_updated_meanwhile_is_copied_whole_before_or_after(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    with ReplayBuffer.from_folder(folder) as buffer:
        serial, length = int(buffer.serials[position]), int(buffer.episode_lens[position])

        def update(n: int) -> None:
            if n < 7:
                buffer.update(position, number=10**6 * (n + 1) + 100 * serial + np.arange(length))

        with after_each_copied_slot(monkeypatch, update):
            copy(folder, tmp_path / "copy")
    assert assert_one_moment(tmp_path / "copy", 5, 2) == [2, 3, 4, 5]


@pytest.mark.parametrize("position", range(1, 4))
def test_an_episode_that_is_updated_meanwhile_and_then_retires_is_not_missing_among_older_ones(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """The ring turns between the look at what was copied and the question whether the rest has retired."""
    set_inside(monkeypatch, snapshot_rounds=8)  # so that three of four are enough in some round with an update
    with ReplayBuffer.from_folder(folder) as buffer:
        serial, length = int(buffer.serials[position]), int(buffer.episode_lens[position])

        def update(n: int) -> None:
            if 3 <= n < 10:
                buffer.update(position, number=10**6 * (n + 1) + 100 * serial + np.arange(length))

        def late() -> None:
            for number in range(6, 12):
                damage.record(buffer, number, 1)

        before_the_rest_is_asked_for(monkeypatch, late)
        with after_each_copied_slot(monkeypatch, update):
            copy(folder, tmp_path / "copy")
    assert damage.serials_of_exact(tmp_path / "copy") == [2, 3, 4, 5]


def test_episodes_deleted_or_cleared_meanwhile_leave_what_was_there(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ReplayBuffer.from_folder(folder) as buffer:
        with after_each_copied_slot(monkeypatch, lambda n: buffer.delete([1]) if n == 1 else None):
            copy(folder, tmp_path / "copy")
        assert dict(shown(tmp_path / "copy")).keys() in ({2, 3, 4, 5}, {2, 4, 5})
        with after_each_copied_slot(monkeypatch, lambda n: buffer.clear() if n == 1 else None):
            copy(folder, tmp_path / "again")
        assert dict(shown(tmp_path / "again")).keys() in ({2, 4, 5}, set())


def test_a_ring_that_turns_faster_than_it_is_copied_is_an_error_and_leaves_no_copy(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 30, for snapshots."""
    set_inside(monkeypatch, snapshot_rounds=5)
    with ReplayBuffer.from_folder(folder) as buffer:

        def publish(n: int) -> None:
            for i in range(8):
                damage.record(buffer, 8 * n + i + 6, 1)

        with (
            after_each_copied_slot(monkeypatch, publish),
            pytest.raises(StaleEpisodeError, match="turns faster than it can be copied"),
        ):
            copy(folder, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").rglob("*") if path.is_file()] == [".lock"]


def test_an_update_that_a_dead_writer_left_is_not_waited_for_for_ever(tmp_path: Path, folder: Path) -> None:
    """Fault 31: its episode is not visible before the next writer finishes it; the others are copied."""
    assert killed(folder, 5, "update") == KILLED
    assert np.load(folder / "episodes.npy")[3]["generation"] % 2
    before = listing(folder)
    copy(folder, tmp_path / "copy")
    assert dict(shown(tmp_path / "copy")).keys() - {1} == {2, 4, 5}
    assert listing(folder) == before


# Beside a writer in another process


@pytest.mark.parametrize("seconds", [1.5, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("publish", "updates"), [("episode", False), ("episode", True), ("step", True)])
def test_a_copy_beside_a_fast_writer_is_exact_and_of_one_moment(
    tmp_path: Path, folder: Path, publish: str, updates: bool, seconds: float
) -> None:
    reader = ReplayBuffer.from_folder(folder, read_only=True)
    copies, sizes = 0, []
    with damage.writer(folder, publish, updates=updates):
        stop = time.monotonic() + seconds
        while time.monotonic() < stop or copies < 3:
            target = tmp_path / f"copy{copies}"
            newest = int(reader.serials[-1])
            reader.snapshot(target)
            sizes.append(len(assert_one_moment(target, newest, int(reader.serials[0]))))
            shutil.rmtree(target)
            copies += 1
    assert max(sizes) <= 4
    assert [serial for serial, _ in shown(folder)]
