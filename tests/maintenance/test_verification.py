"""`verify`: every damage is found and named by file, slot and field; what is no damage is not; nothing is changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
from conftest import flat
from damage import Damage, flip, header_size, killed, packed, rewrite_record, rewrite_state, rows_of
from fault_injection import KILLED, listing, shown
from inside import get_inside, set_inside
from specification import RECORD, sealed

from memmap_buffer import Finding, MemmapBufferError, NotABufferError, ReplayBuffer, verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return damage.copy_of_example(tmp_path / "buffer")


def lost(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.lost]


def quietly(found: list[Finding]) -> set[str]:
    """The files of what is not lost; nothing is."""
    assert not lost(found), found
    return {finding.file for finding in found}


# What is no damage


def test_nothing_is_found_where_all_is_well(folder: Path) -> None:
    assert verify(folder) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"checksum": None}, {"durability": "power"}, {"publish": "step"}, {"stage": "disk"}, {"capacity": 5}],
    ids=str,
)
def test_nothing_is_found_after_a_full_life(tmp_path: Path, options: dict[str, object]) -> None:
    with damage.make(tmp_path / "buffer", **options) as buffer:
        for number in range(9):
            damage.record(buffer, number, 1 + number % 4)
        buffer.update(0, number=[7])
        buffer.delete([1])
        assert quietly(verify(tmp_path / "buffer")) <= {"episodes.npy"}
        buffer.clear()
        damage.record(buffer, 9, 2)
    assert verify(tmp_path / "buffer") == []


def test_an_open_episode_and_its_steps_are_no_damage(tmp_path: Path) -> None:
    buffer = damage.make(tmp_path / "buffer", publish="step")
    episode = buffer.begin_episode(task=1)
    for t in range(3):
        episode.store(number=t, observation=[0, 0, 0], camera={"left": np.zeros((2, 2))}, half=0, text="")
        assert verify(tmp_path / "buffer") == []
    buffer.close()


def test_an_episode_that_was_aborted_on_the_disk_is_unused_and_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "memmap_buffer.writing.episode.CHUNK_BYTES", 1
    )  # so that a timestep is written before the next one
    buffer = damage.make(tmp_path / "buffer", stage="disk")
    damage.record(buffer, 0, 3)
    with pytest.raises(KeyError, match="stop"), buffer.one_episode() as episode:
        for number in range(2):
            episode.store(number=number, observation=[0, 0, 0], camera={"left": np.zeros((2, 2))}, half=0, text="")
        raise KeyError("stop")
    assert quietly(verify(tmp_path / "buffer")) == {"episodes.npy"}
    buffer.close()


def test_bits_that_hold_nothing_are_no_damage(folder: Path) -> None:
    """Fault 46, its other half: a bit beyond an episode's rows, or of a retired one, is not looked at."""
    for file, name in damage.FILES.items():
        if name:
            head = header_size(folder / file)
            flip(folder / file, head + rows_of(name, 0)[0])
            if name not in damage.META_FIELDS:
                flip(folder / file, head + rows_of(name, 3)[1])
    assert verify(folder) == []


def test_a_packed_folder_is_checked_like_a_grid(folder: Path) -> None:
    path = packed(folder)
    assert verify(path) == []
    flip(path / "data/number.npy", -1)
    assert [(f.file, f.slot, f.serial, f.field) for f in verify(path)] == [("data/number.npy", 3, 5, "number")]
    flip(path / "data/number.npy", -1)
    rewrite_record(path, 2, first_row=2**40)
    assert [(f.file, f.slot, f.lost) for f in verify(path)] == [("episodes.npy", 2, True)]
    rewrite_record(path, 2, first_row=0)
    found = [(f.file, f.slot, f.lost, f.what) for f in verify(path)]
    what = "the record is out of bounds, or has rows of another (length {})".format
    assert found == [("episodes.npy", slot, True, what(length)) for slot, length in ((0, 5), (2, 3))]


# What is damage


def check(folder: Path, case: Damage) -> None:
    case.do(folder)
    before = listing(folder)
    found = verify(folder)
    assert listing(folder) == before  # no file extended, cut, made or touched
    mine = [finding for finding in found if finding.file == case.file]
    assert mine, found
    assert case.slots <= {finding.slot for finding in mine}
    assert {finding.serial for finding in mine} <= {None, *range(6)}
    if case.field:
        assert {finding.field for finding in mine} == {case.field}
    if case.episodes or case.fields:
        assert lost(mine)


@pytest.mark.parametrize("file", damage.FILES)
def test_a_file_that_is_not_of_its_length_is_found(folder: Path, file: str, tmp_path: Path) -> None:
    """Fault 43."""
    for case in damage.cuts(file):
        check(damage.copy_of_example(tmp_path / case.name.replace("/", "_")), case)


@pytest.mark.parametrize("file", damage.FILES)
def test_a_file_that_is_gone_or_something_else_is_found(file: str, tmp_path: Path) -> None:
    """Faults 43 and 50."""
    for i, case in enumerate(damage.replaced(file)):
        check(damage.copy_of_example(tmp_path / str(i) / "buffer"), case)


@pytest.mark.parametrize("file", damage.FILES)
def test_a_file_of_another_header_is_found(file: str, tmp_path: Path) -> None:
    """Faults 44 and 51."""
    for i, case in enumerate(damage.headers(file)):
        check(damage.copy_of_example(tmp_path / str(i)), case)


@pytest.mark.parametrize("file", damage.FILES)
def test_a_file_with_a_second_name_is_found_and_nothing_is_lost_by_it(folder: Path, file: str) -> None:
    """Fault 50: a hard link, which a writer would write through."""
    damage.linked(file).do(folder)
    assert quietly(verify(folder)) == {file}


@pytest.mark.parametrize("sub", ["data", "meta"])
@pytest.mark.parametrize("what", ["link", "file", "gone"])
def test_a_subfolder_that_is_none_is_found_by_each_of_its_files(folder: Path, sub: str, what: str) -> None:
    """Fault 50."""
    elsewhere = folder.parent / "elsewhere"
    shutil.move(folder / sub, elsewhere)
    if what == "link":
        (folder / sub).symlink_to(elsewhere)
    elif what == "file":
        (folder / sub).write_text("a file")
    assert {f.file for f in verify(folder)} == {file for file in damage.FILES if file.startswith(sub)}


@pytest.mark.parametrize("case", damage.rotten(), ids=str)
def test_a_flipped_bit_is_named_by_file_slot_and_field(folder: Path, case: Damage) -> None:
    """Fault 46."""
    check(folder, case)
    (finding,) = verify(folder)
    assert (finding.file, finding.slot, finding.serial, finding.field) == (
        *(case.file, *case.slots, *case.episodes, case.field),
    )
    assert (
        str(finding)
        == f"{case.file}: {case.field!r} fails its checksum (episode {finding.serial}, slot {finding.slot})"
    )


@pytest.mark.parametrize("case", [*damage.records(), *damage.states(), *damage.checksums()], ids=str)
def test_a_record_a_counter_or_a_checksum_that_is_wrong_is_named(folder: Path, case: Damage) -> None:
    """Faults 44 and 45."""
    check(folder, case)


@pytest.mark.parametrize(
    "mask", [1, pytest.param(0x80, marks=pytest.mark.slow), pytest.param(0xFF, marks=pytest.mark.slow)]
)
def test_each_byte_of_a_record_is_watched(folder: Path, mask: int) -> None:
    """Fault 44: the record's slot is named, its serial too as one byte can be put right, and no other."""
    head = header_size(folder / "episodes.npy")
    for byte in range(RECORD.itemsize):
        flip(folder / "episodes.npy", head + 64 * 4 + byte, mask)
        found = verify(folder)
        trimmed = (byte, mask) == (48, 1)  # a ring may have forgotten the first step: no check is of that
        assert [(f.file, f.slot, f.serial, f.lost) for f in found] == [("episodes.npy", 4, 4, True)][trimmed:], byte
        flip(folder / "episodes.npy", head + 64 * 4 + byte, mask)
    assert verify(folder) == []


def test_a_damaged_record_of_a_retired_episode_is_found_and_nothing_is_lost_by_it(folder: Path) -> None:
    flip(folder / "episodes.npy", header_size(folder / "episodes.npy") + 30)
    assert quietly(verify(folder)) == {"episodes.npy"}


def test_two_bytes_of_a_record_are_more_than_can_be_put_right(folder: Path) -> None:
    for byte in (9, 41):
        flip(folder / "episodes.npy", header_size(folder / "episodes.npy") + 64 * 4 + byte)
    (finding,) = verify(folder)
    assert (finding.slot, finding.serial, finding.lost) == (4, None, True)


@pytest.mark.parametrize("seed", range(3))
def test_any_one_byte_of_any_record_can_be_put_right(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        values = {
            "generation": 2 * draw.randrange(1, 2**40),
            "serial": draw.randrange(2**50),
            "length": draw.randrange(2**16),
        }
        record = sealed(
            **values, flags=draw.choice([0, 1, 33]), first_row=draw.randrange(2**60), time=draw.randrange(2**32), term=3
        )
        spoilt = bytearray(record)
        spoilt[draw.choice([*range(48), *range(50, 64)])] ^= draw.randrange(1, 256)  # what may be trimmed is no damage
        assert get_inside("repaired_record")(np.frombuffer(bytes(spoilt), np.uint64)).tobytes() == record
        spoilt = bytearray(draw.randbytes(64))
        assert get_inside("repaired_record")(np.frombuffer(bytes(spoilt), np.uint64)).tobytes() == bytes(spoilt)


def test_many_damaged_records_are_all_found_in_bounded_time(tmp_path: Path) -> None:
    """Of more than `MAX_TRIED`, the first are tried to be put right."""
    slots = get_inside("most_records_tried") + 500
    damage.make(tmp_path / "buffer", max_episodes=slots - 2).close()
    path = tmp_path / "buffer" / "episodes.npy"
    with path.open("r+b") as file:
        file.seek(header_size(path))
        file.write(random.Random(0).randbytes(64 * slots))
    started = time.process_time()
    assert {finding.slot for finding in verify(tmp_path / "buffer") if finding.file == "episodes.npy"} == set(
        range(slots)
    )
    assert time.process_time() - started < 30


def test_each_bit_of_the_state_is_harmless_or_found(folder: Path) -> None:
    """Fault 44: no counter, however wrong, makes a wrong row readable or stops the folder from being opened."""
    right = dict(shown(folder))
    everything = {0, 1, *right}
    path = folder / "state.npy"
    bits = [(byte, bit) for byte in range(256) for bit in range(8)]
    for byte, bit in random.Random(0).sample(bits, 200):
        flip(path, header_size(path) + byte, 1 << bit)
        got = dict(shown(folder))
        assert got.keys() <= everything
        assert all(right.get(serial, episode) == episode for serial, episode in got.items())
        if not got.keys() and byte >= 8:
            pytest.fail(f"bit {bit} of byte {byte} hides everything, and it is not `base`")
        verify(folder)
        flip(path, header_size(path) + byte, 1 << bit)


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_each_byte_of_the_schema_is_found_or_changes_no_row(folder: Path, stride: int) -> None:
    """Fault 47: another schema is refused, or the files contradict it, or only a default or a limit is another."""
    path, right = folder / "schema.json", [list(flat(episode).values()) for _, episode in shown(folder)]
    whole = path.read_bytes()
    for i in range(0, len(whole), stride):
        for mask in (1, 4, 16):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ mask]) + whole[i + 1 :])
            if lost(verify(folder)):
                with pytest.raises(MemmapBufferError, match=r"[a-z]"):
                    ReplayBuffer.from_folder(folder, read_only=True, verify="always")
                    raise NotABufferError("it opens, and leaves out what fails its checksums")
            else:
                assert [list(flat(episode).values()) for _, episode in shown(folder)] == right


@pytest.mark.parametrize("key", ["max_episodes", "max_timesteps"])
def test_a_schema_that_all_files_contradict_is_said_to_be_the_one_or_the_other(folder: Path, key: str) -> None:
    document = json.loads((folder / "schema.json").read_text())
    document[key] += 1
    (folder / "schema.json").write_text(json.dumps(document))
    found = verify(folder)
    assert len(found) >= 5
    assert all("one is of another buffer" in finding.what for finding in found)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": "memmap-buffer", "version": 2}'], ids=repr
)
def test_a_schema_that_cannot_be_read_is_a_finding(folder: Path, text: bytes) -> None:
    """Fault 47."""
    (folder / "schema.json").write_bytes(text)
    (finding,) = verify(folder)
    assert (finding.file, finding.lost) == ("schema.json", True)


@pytest.mark.parametrize("what", ["nowhere", "empty", "a file", "unfinished"])
def test_what_is_no_buffer_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "place"
    if what == "a file":
        path.write_text("x")
    elif what != "nowhere":
        path.mkdir()
        if what == "unfinished":
            (path / "schema.json.new").write_text("{}")
    with pytest.raises(NotABufferError, match="place"):
        verify(path)


def test_everything_that_is_wrong_is_found_at_once(folder: Path) -> None:
    """One broken file does not hide the others, nor the records, nor the rows."""
    half = (folder / "data/text.npy").stat().st_size * 3 // 4
    os.truncate(folder / "data/text.npy", half)
    (folder / "meta/task.npy").unlink()
    flip(folder / "data/number.npy", header_size(folder / "data/number.npy") + rows_of("number", 2)[0])
    flip(folder / "episodes.npy", header_size(folder / "episodes.npy") + 64 * 3 + 17)
    rewrite_state(folder, next=2**63)
    (folder / "schema.json.new").write_text("{")
    (folder / ".redo").write_bytes(b"MBREDO1\n")
    found = verify(folder)
    assert {f.file for f in found} == {
        *("data/text.npy", "meta/task.npy", "data/number.npy", "episodes.npy", "state.npy", "schema.json.new", ".redo")
    }
    assert [f.lost for f in found] == sorted((f.lost for f in found), reverse=True)


# What was cut off


@pytest.mark.parametrize("work", ["update", "publish"])
def test_what_a_killed_writer_left_is_found_and_nothing_is_lost_by_it(tmp_path: Path, work: str) -> None:
    at, seen = 1, set()
    while True:
        path = damage.copy_of_example(tmp_path / str(at))
        if killed(path, at, work) != KILLED:
            break
        seen |= quietly(verify(path))
        at += 1
    assert at > 8
    assert seen == ({".redo"} if work == "update" else {"episodes.npy"})


def test_an_update_that_was_cut_off_without_its_redo_file_has_lost_the_episode(folder: Path) -> None:
    at = 1
    while not (folder / ".redo").exists() or np.load(folder / "episodes.npy")[3]["generation"] % 2 == 0:
        shutil.rmtree(folder)
        damage.copy_of_example(folder)
        assert killed(folder, at, "update") == KILLED
        at += 1
    assert quietly(verify(folder)) == {".redo"}
    (folder / ".redo").unlink()
    (finding,) = verify(folder)
    assert (finding.file, finding.slot, finding.serial, finding.lost) == ("episodes.npy", 3, 3, True)


@pytest.mark.parametrize("cut", [0, 5, 8, 20, 24, 60, -1])
def test_a_torn_redo_file_is_found_and_nothing_is_lost_by_it(folder: Path, cut: int) -> None:
    assert killed(folder, 4, "update") == KILLED
    whole = (folder / ".redo").read_bytes()
    (folder / ".redo").write_bytes(whole[:cut])
    (finding,) = verify(folder)
    assert (finding.file, finding.lost) == (".redo", False)


@pytest.mark.parametrize("name", [".redo", ".lock"])
@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_redo_file_or_lock_that_is_no_plain_file_is_found(folder: Path, name: str, what: str) -> None:
    """Fault 50."""
    (folder / name).unlink(missing_ok=True)
    {"link": lambda path: path.symlink_to("/etc/hostname"), "pipe": os.mkfifo, "folder": os.mkdir}[what](folder / name)
    assert quietly(verify(folder)) == {name}


# Beside a writer


@pytest.mark.parametrize("publish", ["episode", "step"])
def test_a_folder_that_is_being_written_is_never_reported_damaged(folder: Path, publish: str) -> None:
    with damage.writer(folder, publish, updates=True):
        stop = time.monotonic() + 2
        while time.monotonic() < stop:
            assert lost(verify(folder)) == []
    assert lost(verify(folder)) == []
    assert shown(folder)


def test_a_writer_that_goes_on_between_two_words_of_the_state_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read, survey = get_inside("survey_state"), list[str](), get_inside("survey")
    with ReplayBuffer(tmp_path, 2, 3, {"x": "int"}, circular=True) as buffer:
        buffer.store_episode(x=[0])

        def state(self: Any, name: str) -> int:
            value = real(self, name)
            read.append(name)
            if name == "next" and read.count(name) == 2:
                for i in range(1, 5):
                    buffer.store_episode(x=[i])
                buffer.update(0, x=[9])  # raises `base` beyond what `next` was
            return value

        set_inside(monkeypatch, survey_state=state)
        assert survey(tmp_path).state_faults() == {} and read.count("next") == 2
        assert real(survey(tmp_path), "base") > 1
