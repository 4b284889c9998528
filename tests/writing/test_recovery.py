"""Taking over from a writer that died: which serials are given, and what the counters say."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import rewrite_state
from fault_injection import KILLED, in_child, system
from inside import opened, place_of_row, set_inside, take_lock
from kill_writer import content, following, make, staged, steps
from power import recording

from memmap_buffer import CorruptBufferError, ReplayBuffer, StaleEpisodeError, repair, verify


def died(folder: Path, **options: Any) -> None:
    """A writer that published two episodes, and a third step by step, which it left open."""

    def write(_: Any) -> None:
        buffer = make(folder, publish="step", **options)
        for serial in range(2):
            staged(buffer, serial).publish()
        episode = buffer.begin_episode(task=content(2)["task"])
        episode.store(**next(steps(2)))

    assert in_child(write).status == 0


def damage_newest(folder: Path) -> None:
    """Some bytes of the newest episode's first image are others."""
    slot = int(opened(folder, verify="never").table.visible[-1])
    path, offset = place_of_row(folder, "image", slot)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"another row, of before the cut")


def test_the_serial_of_an_episode_that_fails_its_checksums_is_not_given_again(tmp_path):
    """Two slots of one serial would void both; `next` was not on the disk when the power went."""
    folder = tmp_path / "buffer"
    died(folder)
    damage_newest(folder)
    rewrite_state(folder, next=2, boot=(1, 2))
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.store_episode(**content(3))
        assert following(buffer) - 1 == 3
    assert ReplayBuffer.from_folder(folder, verify="always").serials.tolist() == [0, 1, 3]


def with_damage_and_a_retired_one(folder: Path) -> None:
    """Serials 1 and 2 are shown; the second fails its checksums, so that serial 0 comes back in front."""

    def write(_: Any) -> None:
        buffer = make(folder, publish="step", max_episodes=2, spare_slots=1, circular=True)
        for serial in range(2):
            staged(buffer, serial).publish()
        buffer.begin_episode(task=content(2)["task"]).store(**next(steps(2)))

    assert in_child(write).status == 0
    damage_newest(folder)
    rewrite_state(folder, boot=(1, 2))


def test_conditions_of_delete_are_asked_of_the_episodes_that_the_first_write_finds(tmp_path):
    folder = tmp_path / "buffer"
    with_damage_and_a_retired_one(folder)
    with ReplayBuffer.from_folder(folder) as buffer:
        assert buffer.serials.tolist() == [1, 2]
        buffer.delete(filter_meta={"episode_lens": (1, None)})
        assert not len(buffer)


@pytest.mark.parametrize("change", ["update", "delete", "store_datapoint"])
def test_a_position_is_that_before_the_first_write_finds_damage(tmp_path, change):
    """The newest episode fails its checksums, so that a retired one comes back in front of the others."""
    folder = tmp_path / "buffer"
    with_damage_and_a_retired_one(folder)
    with ReplayBuffer.from_folder(folder) as buffer:
        assert buffer.serials.tolist() == [1, 2]
        if change == "update":
            buffer.update(0, note=[77.0])
        elif change == "delete":
            buffer.delete(0)
        else:
            buffer.store_datapoint(0, 0, "note", 77.0)
        first = {int(serial): buffer.episode(i)["note"][0] for i, serial in enumerate(buffer.serials)}
    kept = {0: content(0)["note"][0]}
    assert first == (kept if change == "delete" else {**kept, 1: 77.0})


def test_what_is_damaged_itself_is_refused(tmp_path):
    folder = tmp_path / "buffer"
    died(folder)
    damage_newest(folder)
    rewrite_state(folder, boot=(1, 2))
    with (
        ReplayBuffer.from_folder(folder) as buffer,
        pytest.raises(StaleEpisodeError, match=r"\[2\] fail their checksums"),
    ):
        buffer.update(-1, version=1)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_next_serial_is_on_record_before_anything_is_cleared(tmp_path, lost):
    """`base` is never beyond `next`, should the records be gone that alone told how far the serials went."""
    folder = tmp_path / "buffer"
    died(folder)
    rewrite_state(folder, next=lost)
    with ReplayBuffer.from_folder(folder) as buffer:
        take_lock(buffer)
        assert np.load(folder / "state.npy")["next"].item() == 3
        buffer.clear()
        assert np.load(folder / "state.npy")["base"].item() == 3


def cut_off(folder: Path) -> None:
    """A buffer of one episode, whose writer died in an update of it, with half of the new rows in place."""
    make(folder).close()

    def write(_: Any) -> None:
        with ReplayBuffer.from_folder(folder) as buffer:
            buffer.store_episode(**content(0))
            with system(kill=True, half=True, at=3, only=("pwrite",)):  # .redo, the odd generation, then the rows
                buffer.update(0, image=content(0, 1)["image"], version=1)

    assert in_child(write).status == KILLED
    assert (folder / ".redo").exists()


@pytest.mark.parametrize("door", ["open", "repair"])
def test_an_update_is_finished_though_the_system_reads_less_than_it_is_asked_for(tmp_path, monkeypatch, door):
    """As Linux does beyond 0x7FFFF000 bytes: a redo file of 2 GiB was dropped as torn, and its episode with it."""
    folder, pread = tmp_path / "buffer", os.pread
    cut_off(folder)
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 1000), offset))
    set_inside(monkeypatch, redo_bytes=2**12)
    if door == "repair":
        repair(folder)
    with ReplayBuffer.from_folder(folder) as buffer:
        assert buffer.episode(0)["version"] == 1
        assert (buffer.episode(0)["image"] == content(0, 1)["image"]).all()
    assert verify(folder) == []


@pytest.mark.parametrize("at", [0, 12, 20, 25, 30, 40, -1])
def test_an_update_that_fails_its_check_is_put_aside_and_told_of_and_writing_goes_on(tmp_path, caplog, at):
    folder = tmp_path / "buffer"
    for number in range(2):  # the last one is kept
        shutil.rmtree(folder, ignore_errors=True)
        cut_off(folder)
        raw = bytearray((folder / ".redo").read_bytes())
        raw[at] ^= 64 >> number
        (folder / ".redo").write_bytes(raw)
        if number:
            (folder / ".redo.bad").write_bytes(b"an older one")
        with ReplayBuffer.from_folder(folder) as buffer:
            assert len(buffer) == 0  # half of its rows are new ones
            buffer.store_episode(**content(1))
            assert buffer.serials.tolist() == [1]
        assert "it is put aside as .redo.bad" in caplog.text
        assert (folder / ".redo.bad").read_bytes() == raw
        assert [(f.file, f.lost) for f in verify(folder)] == [(".redo.bad", False)]
    repair(folder)
    assert verify(folder) == []
    assert [path.read_bytes() for path in (folder / "lost+found").glob("redo.bad*")] == [raw]


def test_an_update_beside_a_redo_file_that_is_not_its_own_leaves_that_alone(tmp_path):
    """What stands there when it begins is another writer's, to be finished."""
    folder = tmp_path / "buffer"
    with make(folder) as buffer:
        buffer.store_episode(**content(0))
        (folder / ".redo").write_bytes(b"of another")
        with pytest.raises(CorruptBufferError, match="redo is in the way"):
            buffer.update(0, version=1)
        assert (folder / ".redo.bad").read_bytes() == b"of another"
        buffer.update(0, version=1)
        assert buffer.episode(0)["version"] == 1
        assert (folder / ".redo.bad").read_bytes() == b"of another"


def test_an_update_that_is_finished_for_a_dead_writer_reaches_the_disk_before_its_record(tmp_path):
    """That one may have been of durability "power", whatever this one is: its episode was on the disk."""
    folder = tmp_path / "buffer"
    make(folder, durability="power").close()

    def write(_: Any) -> None:
        with ReplayBuffer.from_folder(folder, durability="power") as buffer:
            buffer.store_episode(**content(0))
            with system(kill=True, at=3, only=("pwrite",)):  # .redo, the odd generation, then the rows
                buffer.update(0, note=content(0, 1)["note"], version=1)

    assert in_child(write).status == KILLED
    with recording(folder) as recorder:
        before = len(recorder.log)
        take_lock(ReplayBuffer.from_folder(folder, durability="process"))
        log = recorder.log[before:]
    record = max(i for i, done in enumerate(log) if done.kind == "write" and len(done.data) == 64)
    rows = {done.target: i for i, done in enumerate(log[:record]) if done.kind == "write" and done.target > 0}
    safe = {done.target: i for i, done in enumerate(log[:record]) if done.kind == "barrier"}
    state = recorder.folder(folder / "state.npy")  # tells the readers twice
    changed = {target for target, i in rows.items() if target not in (log[record].target, state)}
    assert len(changed) >= 3  # two fields and the checksums
    assert all(safe.get(target, -1) > rows[target] for target in changed)
    assert any(done.kind == "barrier" and done.target == log[record].target for done in log[record:])
    with ReplayBuffer.from_folder(folder, read_only=True) as buffer:
        assert buffer.episode(0)["version"] == 1
