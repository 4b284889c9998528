"""`repair`: what is intact stays, to the bit; what is not leaves, and lies in `lost+found/`; nothing is deleted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
from damage import Damage, flip, header_size, killed, packed, retired, rewrite_record, rewrite_state, rows_of
from fault_injection import KILLED, in_child, listing, shown, system, without_barriers
from inside import place_of_row, take_lock
from mounts import fill, on_tmpfs

from memmap_buffer import (
    BufferLockedError,
    CorruptBufferError,
    Field,
    NotABufferError,
    ReplayBuffer,
    pack,
    repair,
    verify,
)

LOST = "lost+found"


@pytest.fixture(autouse=True)
def _no_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, and the disk takes milliseconds for each barrier."""
    without_barriers(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return damage.copy_of_example(tmp_path / "buffer")


def right(case: Damage) -> dict[int, dict[str, Any]]:
    """What must be there after the repair: the episodes that are intact, of the fields that are."""
    kept = {serial: episode for serial, episode in shown(damage.example()) if serial not in case.episodes}
    for episode in kept.values():
        for name in case.fields:
            episode.pop(name.partition(".")[0])
    return kept


def assert_mended(folder: Path, case: Damage) -> None:
    """Nothing is wrong any more; what is intact is there, to the bit; a second repair changes nothing."""
    assert verify(folder) == []
    got, kept = dict(shown(folder)), right(case)
    old = {serial: episode for serial, episode in got.items() if serial < 2}
    assert {serial: episode for serial, episode in got.items() if serial >= 2} == kept
    assert all(retired()[serial] == episode for serial, episode in old.items())
    before = listing(folder)
    assert repair(folder) == []
    assert listing(folder) == before


def assert_usable(folder: Path, fields: set[str]) -> None:
    """The buffer opens, takes episodes until the ring is wrapped, and gives them back."""
    before = dict(shown(folder))
    with ReplayBuffer.from_folder(folder, verify="always") as buffer:
        assert {*buffer.fieldnames, *buffer.meta_fieldnames} == fields
        rows = {name: np.ones((2, *field.shape), field.storage) for name, field in buffer.schema.all.items()}
        names, meta = buffer.fieldnames, {name: rows[name][0] for name in buffer.meta_fieldnames}
        for i in range(6):
            buffer.store_episode(**{name: rows[name] for name in names}, **meta)
            assert buffer.serials[-1] >= 6 + i
        assert [len(next(iter(buffer.episode(i).values()))) for i in range(4)] == [2] * 4 or "camera" in names[0]
        assert not {*buffer.serials.tolist()} & before.keys()
    assert verify(folder) == []


def mend(folder: Path, case: Damage) -> None:
    """Do the damage, repair it, and check all that is promised."""
    case.do(folder)
    outside = listing(folder.parent)
    with system() as seen:
        found = repair(folder)
    assert case.file in {finding.file for finding in found}
    assert "unlink" not in {name for name, _ in seen.done}
    assert_mended(folder, case)
    after = listing(folder.parent)
    assert {k: v for k, v in after.items() if not k.startswith("buffer")} == {
        k: v for k, v in outside.items() if not k.startswith("buffer")
    }
    assert_taken_out(folder, case)


def assert_taken_out(folder: Path, case: Damage) -> None:
    """The rows of every episode that was taken out lie in `lost+found/`, but for those that were gone before."""
    everything = dict(shown(damage.example()))
    for serial in case.episodes:
        assert (folder / LOST / f"slot-{serial}.0.record.npy").exists()
        for name in {*damage.FIELDS, "camera.left"} - {"camera", "half", case.field}:
            rows = np.load(folder / LOST / f"slot-{serial}.0.{name}.npy")
            value = everything[serial]["camera"]["left"] if name == "camera.left" else everything[serial][name]
            assert rows[: len(value)].tolist() == value
    for name in case.fields:
        kind = "meta" if name in damage.META_FIELDS else "data"
        moved = folder / LOST / f"{kind}.{name}.npy.0"
        assert os.path.lexists(moved) or "missing" in case.name


ALL_FIELDS = {*damage.FIELDS, *damage.META_FIELDS, "camera.left"} - {"camera"}
CASES = [case for case in damage.every() if case.name not in damage.HOPELESS and "episodes.npy cut" not in case.name]
QUICK = [case for i, case in enumerate(CASES) if i % 3 == 0 or case.file == "episodes.npy"]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_damage_is_mended_and_everything_intact_is_kept(folder: Path, case: Damage) -> None:
    """Faults 43 to 46, 50 and 51."""
    mend(folder, case)
    assert_usable(folder, ALL_FIELDS - case.fields)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=str)
def test_every_other_damage_is_mended_too(folder: Path, case: Damage) -> None:
    """Faults 43 to 46, 50 and 51."""
    mend(folder, case)
    assert_usable(folder, ALL_FIELDS - case.fields)


@pytest.mark.slow
@pytest.mark.parametrize("byte", range(64))
def test_each_byte_of_a_record_is_put_right(folder: Path, byte: int) -> None:
    """Fault 44."""
    for mask in (1, 16, 0x80, 0xFF):
        flip(folder / "episodes.npy", header_size(folder / "episodes.npy") + 64 * 5 + byte, mask)
        repair(folder)
        if (byte, mask) == (48, 1):  # a ring may have forgotten the first step: no check is of that
            flip(folder / "episodes.npy", header_size(folder / "episodes.npy") + 64 * 5 + byte, mask)
        assert dict(shown(folder)) == dict(shown(damage.example()))


def test_the_records_that_are_left_of_a_cut_table_are_kept(folder: Path) -> None:
    """Fault 43: without its record an episode is lost, and what was retired is shown in its place."""
    os.truncate(folder / "episodes.npy", header_size(folder / "episodes.npy") + 64 * 4 + 9)
    repair(folder)
    assert verify(folder) == []
    assert dict(shown(folder)) == {**retired(), **{s: e for s, e in shown(damage.example()) if s in (2, 3)}}
    assert_usable(folder, ALL_FIELDS)


def test_damages_that_come_together_are_mended_together(folder: Path) -> None:
    both = header_size(folder / "data/number.npy") + rows_of("number", 3)[0]
    os.truncate(folder / "data/number.npy", both)  # 3, 4 and 5 are cut off
    (folder / "meta/task.npy").unlink()
    flip(folder / "data/text.npy", header_size(folder / "data/text.npy") + rows_of("text", 4)[0])
    flip(folder / "episodes.npy", header_size(folder / "episodes.npy") + 64 * 2 + 30)
    os.truncate(folder / "checksums.npy", header_size(folder / "checksums.npy") + 5)
    (folder / "state.npy").unlink()
    (folder / "schema.json.new").write_text("{")
    (folder / ".redo").write_bytes(b"nonsense")
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to("elsewhere")
    repair(folder)
    case = Damage("all", print, "", frozenset({3, 4, 5}), frozenset({"task"}))
    assert_mended(folder, case)
    assert_usable(folder, ALL_FIELDS - {"task"})


def test_where_the_checksums_are_lost_the_digests_still_tell_what_is_damaged(folder: Path) -> None:
    flip(folder / "data/text.npy", header_size(folder / "data/text.npy") + rows_of("text", 4)[0])
    (folder / "checksums.npy").unlink()
    repair(folder)
    assert_mended(folder, Damage("both", print, "", frozenset({4})))
    assert verify(folder) == []


def test_where_checksums_and_a_field_are_lost_the_episodes_stay_without_the_field(folder: Path) -> None:
    os.truncate(folder / "checksums.npy", header_size(folder / "checksums.npy") + 300)
    (folder / "data/half.npy").unlink()
    repair(folder)
    assert_mended(folder, Damage("both", print, "", fields=frozenset({"half"})))


def test_a_field_that_is_damaged_in_every_episode_leaves_and_the_episodes_stay(folder: Path) -> None:
    """As when a file was overwritten, or `schema.json` names another column of checksums for it."""
    with (folder / "data/half.npy").open("r+b") as file:
        file.seek(header_size(folder / "data/half.npy"))
        file.write(b"\x01" * (6 * damage.MAX_TIMESTEPS * 2))
    repair(folder)
    assert_mended(folder, Damage("half", print, "", fields=frozenset({"half"})))
    assert (folder / LOST / "data.half.npy.0").exists()


def test_where_nothing_is_checksummed_a_cut_file_still_costs_the_episodes_whose_rows_are_gone(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"
    with damage.make(folder, checksum=None) as buffer:
        for number, length in enumerate(damage.LENGTHS):
            damage.record(buffer, number, length)
    os.truncate(folder / "data/text.npy", header_size(folder / "data/text.npy") + rows_of("text", 4)[1] - 1)
    repair(folder)
    assert_mended(folder, Damage("cut", print, "", frozenset({4, 5})))


@pytest.mark.parametrize("file", ["data/number.npy", "meta/task.npy", "checksums.npy"])
def test_a_file_that_is_lost_where_nothing_is_stored_is_made_anew(tmp_path: Path, file: str) -> None:
    damage.make(tmp_path / "buffer").close()
    (tmp_path / "buffer" / file).unlink()
    repair(tmp_path / "buffer")
    assert verify(tmp_path / "buffer") == []
    with ReplayBuffer.from_folder(tmp_path / "buffer") as buffer:
        damage.record(buffer, 0, 3)
        assert buffer.episode(0)["number"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("sub", ["data", "meta"])
def test_a_subfolder_that_is_a_link_is_moved_away_and_what_it_points_to_is_untouched(folder: Path, sub: str) -> None:
    """Fault 50."""
    elsewhere = folder.parent / "elsewhere"
    shutil.move(folder / sub, elsewhere)
    (folder / sub).symlink_to(elsewhere)
    before = listing(elsewhere)
    if sub == "data":
        with pytest.raises(CorruptBufferError, match="nothing is left of any field"):
            repair(folder)
        assert (folder / sub).is_symlink()
    else:
        repair(folder)
        assert_mended(folder, Damage("meta", print, "", fields=frozenset(damage.META_FIELDS)))
        assert (folder / LOST / "meta.0").is_symlink()
    assert listing(elsewhere) == before


def test_what_was_cut_off_or_overwritten_lies_in_lost_and_found(folder: Path) -> None:
    header = (folder / "data/number.npy").read_bytes()[:128]
    with (folder / "data/number.npy").open("r+b") as file:
        file.write(b"garbage!")
        file.seek(0, os.SEEK_END)
        file.write(b"a tail")
    repair(folder)
    lost = {path.name: path.read_bytes() for path in (folder / LOST).iterdir()}
    assert lost.keys() == {"schema.json.0", "data.number.npy.header.0", "data.number.npy.tail.0"}
    assert lost["data.number.npy.tail.0"] == b"a tail"
    assert lost["data.number.npy.header.0"] == b"garbage!" + header[8:]
    assert lost["schema.json.0"] == (folder / "schema.json").read_bytes()


def test_what_lies_in_lost_and_found_is_never_overwritten(folder: Path) -> None:
    for i in range(3):
        flip(folder / "data/text.npy", header_size(folder / "data/text.npy") + rows_of("text", 3 + i)[0])
        before = {p.name: p.read_bytes() for p in (folder / LOST).iterdir()} if i else {}
        repair(folder)
        after = {p.name: p.read_bytes() for p in (folder / LOST).iterdir()}
        assert after.items() > before.items()


def test_a_large_hole_is_not_filled(tmp_path: Path) -> None:
    """A grid is sparse; neither the copy of a slot nor a mended file may take the space of what was never written."""
    folder = tmp_path / "buffer"
    with ReplayBuffer(folder, 4, 2**20, {"x": ("float64", 16), "y": "float"}) as buffer:
        for i in range(4):
            buffer.store_episode(x=np.full((2, 16), i), y=np.full(2, i))
    size = (folder / "data/x.npy").stat().st_size
    with (folder / "data/x.npy").open("ab") as file:
        file.truncate(size + 2**26)
    flip(folder / "data/y.npy", header_size(folder / "data/y.npy"))
    rewrite_record_of_nonsense(folder, 1)
    repair(folder)
    assert verify(folder) == []
    blocks = sum(path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
    assert blocks * 512 < 2**20
    assert (folder / LOST / "data.x.npy.tail.0").stat().st_size == 2**26
    assert ReplayBuffer.from_folder(folder).serials.tolist() == [2, 3]


@pytest.mark.parametrize("file", ["episodes.npy", "state.npy", "data/x.npy"])
@pytest.mark.parametrize("damage", ["cut", "lost", "linked"])
def test_no_hole_that_anyone_looks_at_is_left_on_a_tmpfs_that_is_full_or_nearly(
    tmp_path: Path, file: str, damage: str
) -> None:
    """To look through a map at a hole of a full tmpfs kills; rows of zeros may become no hole, either."""
    disk, serials = tmp_path / "disk", list(range(3))

    def work(tell: Callable[[Any], None]) -> None:
        for pages in range(0, 32, 4):
            tell(seen_after_repair(disk / f"buffer{pages}", disk / "ballast", file, damage, 4096 * pages))
            shutil.rmtree(disk / f"buffer{pages}")

    assert on_tmpfs(disk, work) == [serials] * 8


def seen_after_repair(folder: Path, ballast: Path, file: str, damage: str, leave: int) -> list[int]:
    """The serials that are read on a full disk, after a repair for which so many bytes were free at first."""
    with ReplayBuffer(folder, 1000, 1024, {"x": ("float64", 16), "y": "float"}) as buffer:
        for _ in range(3):
            buffer.store_episode(x=np.zeros((1024, 16)), y=np.zeros(1024))
    path = folder / file
    if damage == "linked":
        os.link(path, folder / "other")
    elif damage == "cut":
        os.truncate(path, header_size(path) + 8 * 64)
    elif file != "episodes.npy":  # without it nothing can be repaired
        path.unlink()
    fill(ballast, leave)
    try:
        repair(folder)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        ballast.unlink()
        repair(folder)
    fill(ballast)
    with ReplayBuffer.from_folder(folder, read_only=True, verify="always") as buffer:
        for i in range(len(buffer)):
            assert not any(column.any() for column in buffer.episode(i).values())
        serials: list[int] = buffer.serials.tolist()
    ballast.unlink()
    return serials


def rewrite_record_of_nonsense(folder: Path, slot: int) -> None:
    with (folder / "episodes.npy").open("r+b") as file:
        file.seek(header_size(folder / "episodes.npy") + 64 * slot)
        file.write(bytes(range(64)))


# Counters


def test_lost_counters_follow_from_the_records(folder: Path) -> None:
    (folder / "state.npy").unlink()
    repair(folder)
    state = np.load(folder / "state.npy")[0]
    assert (state["base"], state["next"], state["clean"]) == (0, 6, 1)
    assert state["term"] > 1


def test_a_cut_state_keeps_the_counters_that_are_left(tmp_path: Path) -> None:
    """Cleared episodes stay cleared, as long as the word that says so is there."""
    folder = damage.copy_of_example(tmp_path / "buffer")
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.clear()
        damage.record(buffer, 6, 2)
    os.truncate(folder / "state.npy", header_size(folder / "state.npy") + 20)
    repair(folder)
    assert dict(shown(folder)).keys() == {6}
    with ReplayBuffer.from_folder(folder) as buffer:
        damage.record(buffer, 7, 2)
        assert buffer.serials.tolist() == [6, 7]


def test_a_serial_is_never_used_twice_though_the_newest_episode_is_taken_out(folder: Path) -> None:
    flip(folder / "data/number.npy", header_size(folder / "data/number.npy") + rows_of("number", 5)[0])
    (folder / "state.npy").unlink()
    repair(folder)
    with ReplayBuffer.from_folder(folder) as buffer:
        damage.record(buffer, 6, 2)
        assert buffer.serials.tolist() == [2, 3, 4, 6]


def test_what_is_taken_out_does_not_bring_back_what_was_retired(folder: Path) -> None:
    flip(folder / "data/number.npy", header_size(folder / "data/number.npy") + rows_of("number", 3)[0])
    repair(folder)
    assert dict(shown(folder)).keys() == {2, 4, 5}


def test_a_reader_takes_no_slot_that_was_emptied_for_the_episode_that_it_knew(folder: Path) -> None:
    reader = ReplayBuffer.from_folder(folder, read_only=True, verify="never")
    loader = reader.dataloader(4, fields=["number"], return_indices=True)
    before = next(iter(loader))
    flip(folder / "data/text.npy", header_size(folder / "data/text.npy") + rows_of("text", 3)[0])
    generation = np.load(folder / "episodes.npy")[3]["generation"]
    repair(folder)
    assert np.load(folder / "episodes.npy")[3]["generation"] > generation
    with ReplayBuffer.from_folder(folder) as buffer:
        damage.record(buffer, 6, 4)
    assert np.load(folder / "episodes.npy")[3]["generation"] > generation + 2
    assert before["_index"].tolist() == [2, 3, 4, 5]
    assert reader.serials.tolist() == [2, 4, 5, 6]
    assert [int(values[0]) // 100 for values in next(iter(loader))["number"]] == [2, 4, 5, 6]


# What was cut off


@pytest.mark.parametrize("work", ["update", "publish"])
def test_what_a_killed_writer_left_is_finished_or_dropped(tmp_path: Path, work: str) -> None:
    at, states = 1, []
    before = dict(shown(damage.example()))
    while True:
        path = damage.copy_of_example(tmp_path / str(at))
        if killed(path, at, work) != KILLED:
            break
        repair(path)
        assert verify(path) == []
        got = dict(shown(path))
        states.append(got)
        if work == "update":
            assert got.keys() == before.keys()
            changed = {**before[3], "number": [0, 7]}
            assert {**got, 3: before[3]} == before
            assert got[3] in (before[3], changed)
        else:
            assert [serial for serial in got if serial < 6] in ([2, 3, 4, 5], [3, 4, 5])
            assert all(before[serial] == episode for serial, episode in got.items() if serial < 6)
        at += 1
    assert states[0] == before
    assert states[-1] != before


@pytest.mark.parametrize("drop_redo", [False, True])
def test_published_steps_survive_a_kill_and_a_repair(tmp_path: Path, drop_redo: bool) -> None:
    """Whatever was cut off: the steps up to some one are there, exact, and no older episode is worse for it."""
    before, lengths = dict(shown(damage.example())), set()
    at = 1
    while True:
        folder = damage.copy_of_example(tmp_path / str(at))

        def record(tell: Callable[[Any], None], at: int = at, folder: Path = folder) -> None:
            buffer = ReplayBuffer.from_folder(folder, publish="step")
            take_lock(buffer)
            with system(at, kill=True, half=True):
                damage.record(buffer, 6, 4)

        if in_child(record).status != KILLED:
            break
        if drop_redo:
            (folder / ".redo").unlink(missing_ok=True)
        repair(folder)
        assert verify(folder) == []
        got = dict(shown(folder))
        new = got.pop(6, {"number": []})
        assert new["number"] == [600 + t for t in range(len(new["number"]))]
        lengths.add(len(new["number"]))
        assert [serial for serial in got if serial > 1] in ([2, 3, 4, 5], [3, 4, 5])
        assert all(before[serial] == episode for serial, episode in got.items() if serial > 1)
        at += 1
    assert lengths == {0, 1, 2, 3, 4}


def test_an_update_whose_redo_file_is_lost_costs_the_episode_unless_it_is_whole(tmp_path: Path) -> None:
    at, seen = 1, set()
    before = dict(shown(damage.example()))
    while True:
        path = damage.copy_of_example(tmp_path / str(at))
        if killed(path, at, "update") != KILLED:
            break
        (path / ".redo").unlink(missing_ok=True)
        repair(path)
        assert verify(path) == []
        got = dict(shown(path))
        seen.add(3 in got)
        assert got.get(3, before[3]) in (before[3], {**before[3], "number": [0, 7]})
        assert {**got, 3: before[3]} == before
        at += 1
    assert seen == {True, False}


def test_an_update_that_is_to_be_finished_is_kept_in_lost_and_found(folder: Path) -> None:
    assert killed(folder, 4, "update") == KILLED
    redo = (folder / ".redo").read_bytes()
    repair(folder)
    assert (folder / LOST / "redo.0").read_bytes() == redo
    assert not (folder / ".redo").exists()
    assert dict(shown(folder))[3]["number"] == [0, 7]


def test_an_open_episode_that_is_damaged_is_not_given_a_checksum_that_says_it_is_right(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"

    def record(tell: Callable[[Any], None]) -> None:
        buffer = damage.make(folder, publish="step")
        damage.record(buffer, 0, 3)
        for _ in range(2):
            episode = buffer.begin_episode(task=1)
            for t in range(3):
                episode.store(number=t, observation=[0, 0, 0], camera={"left": np.zeros((2, 2))}, half=0, text="")
            buffer.flush()  # from here on there are checksums of these steps
        os._exit(KILLED)

    assert in_child(record).status == KILLED
    flip(folder / "data/number.npy", header_size(folder / "data/number.npy") + rows_of("number", 2)[0] + 8)
    (finding,) = verify(folder)
    assert (finding.slot, finding.serial, finding.lost) == (2, 2, True)
    repair(folder)
    assert verify(folder) == []
    assert dict(shown(folder)).keys() == {0, 1}


def test_open_episodes_survive_the_loss_of_a_field(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"

    def record(tell: Callable[[Any], None]) -> None:
        buffer = damage.make(folder, publish="step")
        damage.record(buffer, 0, 3)
        episode = buffer.begin_episode(task=1)
        for t in range(3):
            episode.store(number=t, observation=[0, 0, 0], camera={"left": np.zeros((2, 2))}, half=0, text="")
        os._exit(KILLED)

    assert in_child(record).status == KILLED
    (folder / "data/half.npy").unlink()
    repair(folder)
    assert verify(folder) == []
    assert [(serial, episode["number"]) for serial, episode in shown(folder)] == [(0, [0, 1, 2]), (1, [0, 1, 2])]


def test_what_only_an_unfinished_schema_names_is_moved_away(folder: Path) -> None:
    document = json.loads((folder / "schema.json").read_text())
    document["fields"]["more"] = {**document["fields"]["number"], "column": 8}
    (folder / "schema.json.new").write_text(json.dumps(document))
    (folder / "data/more.npy").write_bytes(b"new")
    (folder / "data/other.npy").write_bytes(b"not ours")
    repair(folder)
    assert verify(folder) == []
    assert (folder / LOST / "data.more.npy.0").read_bytes() == b"new"
    assert (folder / LOST / "schema.json.new.0").exists()
    assert (folder / "data/other.npy").read_bytes() == b"not ours"
    assert dict(shown(folder)) == dict(shown(damage.example()))


def test_a_packed_folder_is_repaired_too(folder: Path) -> None:
    path = packed(folder)
    flip(path / "data/number.npy", -1)
    repair(path)
    assert verify(path) == []
    assert shown(path) == shown(folder)[:3]


@pytest.mark.parametrize("change", [-1, 1, -70, 0], ids=["cut by one", "extended", "cut", "missing"])
@pytest.mark.parametrize("file", damage.FILES)
def test_a_packed_folder_keeps_what_is_left_of_a_file_of_another_size(folder: Path, file: str, change: int) -> None:
    path, whole = packed(folder), dict(shown(folder))
    if change:
        os.truncate(path / file, (path / file).stat().st_size + change)
    else:
        (path / file).unlink()
    assert verify(path)[0].file == file
    if file == "episodes.npy" and change == 0:
        with pytest.raises(CorruptBufferError, match="it alone says what the episodes are"):
            repair(path)
        return
    repair(path)
    assert verify(path) == []
    kept = dict(shown(path))
    name = damage.FILES[file]
    for serial, episode in kept.items():
        known = {**whole[serial]}
        assert episode == {key: value for key, value in known.items() if key in episode}
        assert known.keys() - episode.keys() <= {name.partition(".")[0]}
    assert len(kept) >= (1 if change == -70 else 3)  # nine numbers, the last of three episodes
    assert not pack(path, path.parent / "again")
    assert shown(path.parent / "again") == shown(path)


# What it refuses


def refuses(folder: Path, text: str) -> None:
    before = listing(folder.parent)
    with pytest.raises(CorruptBufferError, match=text):
        repair(folder)
    assert listing(folder.parent) == before


@pytest.mark.parametrize("case", [c for c in damage.every() if c.name in damage.HOPELESS], ids=str)
def test_without_a_table_it_refuses_and_changes_nothing(folder: Path, case: Damage) -> None:
    case.do(folder)
    refuses(folder, "it alone says what the episodes are")


@pytest.mark.parametrize("text", ["", "{}", '{"format": "memmap-buffer"}'])
def test_without_a_schema_it_refuses_and_changes_nothing(folder: Path, text: str) -> None:
    (folder / "schema.json").write_text(text)
    refuses(folder, "without a schema nothing can be repaired")


def test_without_any_field_it_refuses_and_changes_nothing(folder: Path) -> None:
    shutil.rmtree(folder / "data")
    refuses(folder, "nothing is left of any field")


def test_without_the_blobs_of_the_only_field_it_refuses_and_changes_nothing(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "folder", 2, 3, {"ids": Field("int64", (None,))}) as buffer:
        buffer.store_episode(ids=[[1, 2], [3]])
    (tmp_path / "folder/data/ids.blobs.npy").unlink()
    refuses(tmp_path / "folder", "nothing is left of any field")


@pytest.mark.parametrize("key", ["max_episodes", "max_timesteps"])
def test_where_schema_and_files_contradict_it_refuses_and_changes_nothing(folder: Path, key: str) -> None:
    """A digit of the schema may have changed: then every file is right, and it alone is wrong."""
    document = json.loads((folder / "schema.json").read_text())
    document[key] += 1
    (folder / "schema.json").write_text(json.dumps(document))
    refuses(folder, "schema.json say different things")


def test_a_file_of_another_buffer_can_be_moved_away_and_then_costs_its_field(folder: Path) -> None:
    np.save(folder / "data/text.npy", np.zeros((3, 4), "<U4"))
    refuses(folder, "schema.json say different things")
    shutil.move(folder / "data/text.npy", folder.parent)
    repair(folder)
    assert_mended(folder, Damage("moved", print, "", fields=frozenset({"text"})))


@pytest.mark.parametrize("what", ["link", "file"])
def test_where_lost_and_found_is_no_folder_it_refuses_and_changes_nothing(folder: Path, what: str) -> None:
    """Fault 50: nothing is written through a link."""
    (folder.parent / "victim").mkdir()
    if what == "link":
        (folder / LOST).symlink_to(folder.parent / "victim")
    else:
        (folder / LOST).write_text("x")
    flip(folder / "data/text.npy", 3)
    refuses(folder, "is a link or no folder")


def test_beside_a_writer_it_refuses(folder: Path) -> None:
    flip(folder / "data/text.npy", header_size(folder / "data/text.npy") + rows_of("text", 3)[0])

    def hold(tell: Callable[[Any], None]) -> None:
        buffer = ReplayBuffer.from_folder(folder)
        take_lock(buffer)
        before = listing(folder)

        def other(tell: Callable[[Any], None]) -> None:
            with pytest.raises(BufferLockedError, match="has another writer"):
                repair(folder)

        tell([in_child(other), listing(folder) == before])

    child = in_child(hold)
    assert child.status == 0, child.told
    assert child.told[0] == [[0, []], True]


def test_what_is_no_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotABufferError, match=r"there is no schema\.json"):
        repair(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which file a descriptor is of")
def test_a_disk_that_cannot_be_read_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 23: what cannot be read now may be readable tomorrow; it is not moved away."""
    before, read = listing(folder), os.pread

    def fail(fd: int, size: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("text.npy"):
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, size, offset)

    monkeypatch.setattr(os, "pread", fail)
    assert [(f.file, f.lost) for f in verify(folder)] == [("data/text.npy", True)]
    with pytest.raises(OSError, match="Input/output error"):
        repair(folder)
    assert listing(folder) == before


# Killed, and run again


def several(folder: Path) -> None:
    """A file cut, a field lost, a bit rotten, a record spoilt, counters gone, leftovers."""
    os.truncate(folder / "data/number.npy", header_size(folder / "data/number.npy") + rows_of("number", 5)[0])
    (folder / "meta/task.npy").unlink()
    (folder / "meta/task.npy").mkdir()
    flip(folder / "data/text.npy", header_size(folder / "data/text.npy") + rows_of("text", 4)[0])
    flip(folder / "episodes.npy", header_size(folder / "episodes.npy") + 64 * 2 + 30)
    with (folder / "data/half.npy").open("ab") as file:
        file.write(b"tail")
    flip(folder / "state.npy", 20)
    (folder / "schema.json.new").write_text("{")


KILLS: dict[str, tuple[Callable[[Path], Any], Damage]] = {
    "several": (several, Damage("", print, "", frozenset({4, 5}), frozenset({"task"}))),
    "a cut file": (
        lambda folder: os.truncate(
            folder / "data/text.npy", header_size(folder / "data/text.npy") + rows_of("text", 3)[1]
        ),
        Damage("", print, "", frozenset({4, 5})),
    ),
    "a link": (lambda folder: os.link(folder / "data/half.npy", folder.parent / "other"), Damage("", print, "")),
    "an update": (lambda folder: killed(folder, 4, "update"), Damage("", print, "")),
    "lost counters": (lambda folder: (folder / "state.npy").unlink(), Damage("", print, "")),
    "lost checksums and a field": (
        lambda folder: ((folder / "checksums.npy").unlink(), (folder / "data/half.npy").unlink()),
        Damage("", print, "", fields=frozenset({"half"})),
    ),
    "lost checksums": (lambda folder: (folder / "checksums.npy").unlink(), Damage("", print, "")),
}


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", KILLS)
def test_killed_at_any_operation_it_can_be_run_again(tmp_path: Path, what: str, stride: int) -> None:
    """Fault 4, for repair: nothing more is lost than without the kill."""
    do, case = KILLS[what]
    do(damage.copy_of_example(tmp_path / "count" / "buffer"))
    total = damage.count_of(partial(repair, tmp_path / "count" / "buffer"))
    assert total > 5
    for at in range(1, total + 1, stride):
        path = damage.copy_of_example(tmp_path / str(at) / "buffer")
        do(path)

        def cut_off(tell: Callable[[Any], None], at: int = at, path: Path = path) -> None:
            with system(at, kill=True, half=True):
                repair(path)

        assert in_child(cut_off).status == KILLED
        repair(path)
        assert verify(path) == []
        got, kept = dict(shown(path)), right(case)
        if what == "an update":
            kept[3]["number"] = [0, 7]
        assert {serial: episode for serial, episode in got.items() if serial >= 2} == kept, at
        assert all(retired()[serial] == {**episode, "task": serial} for serial, episode in got.items() if serial < 2)
        shutil.rmtree(path.parent)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_is_raised_and_it_can_be_run_again(tmp_path: Path, error: int, stride: int) -> None:
    """Fault 17, for repair."""
    do, case = KILLS["several"]
    do(damage.copy_of_example(tmp_path / "count"))
    total = damage.count_of(partial(repair, tmp_path / "count"))
    for at in range(1, total + 1, stride):
        path = damage.copy_of_example(tmp_path / str(at))
        do(path)
        with system(at, error=error, half=True), pytest.raises(OSError, match=os.strerror(error)):
            repair(path)
        repair(path)
        assert verify(path) == []
        assert {serial: e for serial, e in shown(path) if serial >= 2} == right(case), at
        shutil.rmtree(path)


def test_layouts_of_the_example_are_as_assumed(folder: Path) -> None:
    """What `damage` computes by itself is what the library does."""
    for name in ALL_FIELDS - damage.META_FIELDS.keys():
        path, start = place_of_row(folder, name, 3)
        assert rows_of(name, 3)[0] + header_size(path) == start
    rewrite_record(folder, 3)
    rewrite_state(folder)
    assert dict(shown(folder)) == dict(shown(damage.example()))
