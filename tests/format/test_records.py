"""The record of an episode: its check against a fold written from the format's text, and every way to be void."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import specification
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from specification import fold, sealed

from memmap_buffer import ReplayBuffer, verify
from memmap_buffer.format.records import (
    CHECK,
    RECORD,
    SHOWN,
    STATE,
    STATE_WORD,
    changed_records,
    check_of,
    columns_of,
    seal,
)
from memmap_buffer.format.storage import Storage

VECTORS = json.loads((Path(__file__).parent / "golden" / "v1" / "records.json").read_text())
MAX_TIMESTEPS, SLOTS = 5, 5
HALF, QUARTER = st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)
WORD = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**63, 2**64 - 1]))


# The bytes


def test_a_record_is_64_bytes_and_the_state_256_and_a_journal_with_every_word_aligned() -> None:
    assert (RECORD.itemsize, STATE.itemsize) == (64, specification.STATE_BYTES) == (64, 256 + 8 * 1024)
    assert RECORD == specification.RECORD
    assert [RECORD.fields[name][1] for name in RECORD.names] == [0, 8, 16, 20, 22, 24, 32, 36, 40, 44, 48, 52, 56]
    assert {name: offset // 8 for name, (_, offset) in STATE.fields.items()}.items() <= STATE_WORD.items()
    assert STATE_WORD == specification.STATE_WORD


@given(words=st.lists(st.lists(WORD, min_size=8, max_size=8), min_size=1, max_size=5))
def test_the_check_is_the_fold_that_the_format_describes(words: list[list[int]]) -> None:
    table = np.array(words, np.uint64)
    assert check_of(table).tolist() == [fold(row[:SHOWN]) for row in words]
    assert table.tolist() == words


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_the_check_of_the_stored_vectors_never_changes(vector: dict[str, Any]) -> None:
    words = np.frombuffer(bytes.fromhex(vector["bytes"]), "<u8")[None]
    assert words.view(RECORD)[0, 0].tolist() == tuple(vector["record"].values())
    assert int(words[0, CHECK]) == fold(words[0, :SHOWN].tolist()) == check_of(words)[0] == vector["record"]["check"]
    assert seal(**vector["record"]) == sealed(**{k: v for k, v in vector["record"].items() if k != "check"})


@given(
    generation=WORD, serial=WORD, length=HALF, flags=QUARTER, columns=QUARTER, first_row=WORD, time=HALF, round=HALF,
    term=HALF, digest=HALF, start=HALF, stop=HALF,
)  # fmt: skip
def test_a_sealed_record_has_the_bytes_that_the_format_describes(**values: int) -> None:
    assert seal(**values) == sealed(**values)


@given(record=st.binary(min_size=56, max_size=56), bit=st.integers(0, 511))
def test_any_flipped_bit_but_of_the_steps_that_are_shown_fails_the_check(record: bytes, bit: int) -> None:
    whole = bytearray(record + struct.pack("<Q", fold(list(struct.unpack("<6Q", record[:48])))))
    whole[bit // 8] ^= 1 << bit % 8
    words = np.frombuffer(bytes(whole), "<u8")[None]
    assert (check_of(words)[0] == words[0, CHECK]) == (48 <= bit // 8 < 56)


# Which records hold an episode


def is_valid(slot: int = 0, rows: int | None = None, **values: int) -> bool:
    table = np.zeros((SLOTS, 8), np.uint64)
    table[slot] = np.frombuffer(sealed(**values), "<u8")
    got = columns_of(table, MAX_TIMESTEPS, rows).valid
    assert not np.delete(got, slot).any()
    return bool(got[slot])


GOOD = {"generation": 2, "serial": 7, "length": 5, "flags": 0}


@pytest.mark.parametrize(
    "values",
    [
        {}, {"generation": 2**32}, {"serial": 0}, {"serial": 2**62 - 1}, {"length": 1}, {"flags": 63},
        {"time": 2**32 - 1, "round": 2**32 - 1, "term": 2**32 - 1, "digest": 2**32 - 1, "columns": 2**16 - 1},
        {"start": 4}, {"start": 5}, {"length": 2, "stop": 2, "start": 2}, {"length": 2, "stop": 5, "flags": 8},
    ],
    ids=repr,
)  # fmt: skip
def test_a_record_within_bounds_is_valid(values: dict[str, int]) -> None:
    assert is_valid(**{**GOOD, **values})
    assert is_valid(3, **{**GOOD, **values, "first_row": 3 * MAX_TIMESTEPS})


@pytest.mark.parametrize(
    "values",
    [
        *({"generation": g} for g in (0, 1, 3, 2**63, 2**64 - 2, 2**64 - 1)),
        *({"length": n} for n in (0, MAX_TIMESTEPS + 1, 2**31, 2**32 - 1, 0x7FC00000)),
        *({"flags": f} for f in (128, 256, 2**15, 2**16 - 1)),
        *({"serial": s} for s in (2**62, 2**63, 2**64 - 1)),
        *({"length": n, "stop": s} for n, s in ((5, 4), (4, 5), (2, 0), (5, 6), (5, 2**32 - 1))),
        *({"length": n, "stop": s, "flags": 8} for n, s in ((5, 4), (2, 0), (5, 6), (0, 3), (5, 2**32 - 1))),
        *({"start": s} for s in (6, 2**31, 2**32 - 1)),
        {"length": 2, "stop": 3, "start": 4, "flags": 8},
        *({"first_row": r} for r in (1, MAX_TIMESTEPS, 2**63, 2**64 - MAX_TIMESTEPS, 2**64 - 1)),
    ],
    ids=repr,
)
def test_a_record_out_of_bounds_is_void_though_its_check_is_right(values: dict[str, int]) -> None:
    """Fault 45: length 0, -1, T + 1, 2**31, the bits of a NaN; odd or zero generations; unknown flags; wrong rows."""
    assert not is_valid(**{**GOOD, **values})


@pytest.mark.parametrize(
    ("first_row", "length", "good"),
    [(0, 5, True), (12, 5, True), (13, 5, False), (17, 1, False), (2**64 - 3, 5, False), (2**64 - 5, 5, False)],
)
def test_the_rows_of_a_packed_record_lie_within_the_file(first_row: int, length: int, good: bool) -> None:
    """Fault 45: also where first row + length wraps around 2**64."""
    assert is_valid(1, 17, **{**GOOD, "first_row": first_row, "length": length}) == good


@given(stretches=st.lists(st.tuples(st.integers(0, 18), st.integers(0, 6)), max_size=8))
def test_packed_records_that_share_a_row_are_all_void(stretches: list[tuple[int, int]]) -> None:
    """Against the sets of rows; those that are void by themselves take no other's."""
    rows = [range(first, first + length) for first, length in stretches]
    alone = [0 < len(mine) <= MAX_TIMESTEPS and mine.stop <= 17 for mine in rows]
    good = [
        fine and not any({*mine} & {*other} for k, other in enumerate(rows) if k != i and alone[k])
        for i, (mine, fine) in enumerate(zip(rows, alone, strict=True))
    ]
    records = [sealed(**{**GOOD, "first_row": first, "length": length}) for first, length in stretches]
    words = np.frombuffer(b"".join(records), "<u8").reshape(-1, 8)
    assert columns_of(words, MAX_TIMESTEPS, 17).valid.tolist() == good


# In a folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four episodes of 2, 3, 4 and 5 steps in slots 0 to 3."""
    path = tmp_path_factory.mktemp("made") / "buffer"
    with ReplayBuffer(path, 4, MAX_TIMESTEPS, {"a": "int"}) as buffer:
        for number in range(4):
            buffer.store_episode(a=[10 * number + t for t in range(number + 2)])
    return path


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "buffer"))


def shown(folder: Path) -> dict[int, list[int]]:
    """serial -> its values, of everything that is served."""
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    return {serial: buffer.episode(i)["a"].tolist() for i, serial in enumerate(buffer.serials.tolist())}


def write_record(folder: Path, slot: int, record: bytes) -> None:
    with (folder / "episodes.npy").open("r+b") as file:
        file.seek(-(SLOTS - slot) * RECORD.itemsize, 2)
        file.write(record)


def read_record(folder: Path, slot: int) -> dict[str, int]:
    record = np.load(folder / "episodes.npy")[slot]
    return {name: int(record[name]) for name in RECORD.names if name != "check"}


EPISODES = {number: [10 * number + t for t in range(number + 2)] for number in range(4)}


def test_a_record_rewritten_as_it_was_changes_nothing(folder: Path) -> None:
    for slot in range(4):
        write_record(folder, slot, sealed(**read_record(folder, slot)))
    assert shown(folder) == EPISODES


def test_each_flipped_byte_of_a_record_voids_or_trims_exactly_that_episode(folder: Path) -> None:
    """Fault 44: exhaustive over the 64 bytes of one record."""
    file = folder / "episodes.npy"
    whole = file.read_bytes()
    start = len(whole) - (SLOTS - 2) * RECORD.itemsize
    for i in range(RECORD.itemsize):
        for flip in (0x01, 0x80, 0xFF):
            spoilt = bytearray(whole)
            spoilt[start + i] ^= flip
            file.write_bytes(spoilt)
            trimmed = (i, flip) == (48, 0x01)  # of this word no check is made: its first step was forgotten
            assert shown(folder) == {k: v for k, v in EPISODES.items() if k != 2}, (i, flip)
            assert ReplayBuffer.from_folder(folder, read_only=True).num_steps == 10 + 3 * trimmed, (i, flip)
    file.write_bytes(whole)
    assert shown(folder) == EPISODES


@pytest.mark.parametrize(
    "values",
    [
        {"length": 0},
        {"length": 6},
        {"length": 2**31},
        {"length": 2**32 - 1},
        {"flags": 128},
        {"stop": 3},
        {"start": 5},
        {"first_row": 5},
        {"serial": 2**63},
        {"generation": 3},
    ],
    ids=repr,
)
def test_a_crafted_record_voids_exactly_that_episode_and_is_reported(folder: Path, values: dict[str, int]) -> None:
    """Fault 45: a right check on wrong words."""
    write_record(folder, 2, sealed(**{**read_record(folder, 2), **values}))
    assert shown(folder) == {k: v for k, v in EPISODES.items() if k != 2}
    assert [finding.slot for finding in verify(folder)] == [2]


@pytest.mark.parametrize("flags", [0, 4], ids=["both shown", "one deleted"])
def test_two_records_of_one_serial_void_both_and_are_reported(
    folder: Path, caplog: pytest.LogCaptureFixture, flags: int
) -> None:
    """Fault 45: duplicates; a deleted twin makes the other no more trustworthy."""
    record = read_record(folder, 3)
    write_record(folder, 3, sealed(**{**record, "serial": 1, "flags": record["flags"] | flags}))
    assert shown(folder) == {0: EPISODES[0], 2: EPISODES[2]}
    assert "serials [1] stand in two slots each and are not served" in caplog.text
    assert {(finding.serial, finding.lost) for finding in verify(folder)} == {(1, True)}


def test_a_duplicate_of_a_cleared_serial_brings_nothing_back(folder: Path) -> None:
    """Fault 45: what lies below `base` stays invisible, once or twice."""
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.clear()
    write_record(folder, 3, sealed(**{**read_record(folder, 3), "serial": 1}))
    assert shown(folder) == {}


def test_the_next_serial_lies_above_every_valid_record(folder: Path) -> None:
    """Fault 45: a void record with an absurd serial does not count; a valid one with a high serial does."""
    write_record(folder, 3, sealed(**{**read_record(folder, 3), "serial": 2**63 - 1}))
    write_record(folder, 2, sealed(**{**read_record(folder, 2), "serial": 41}))
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.store_episode(a=[1])
    assert list(shown(folder)) == [0, 1, 41, 42]
    assert Storage.open(folder).state("next") == 43


@pytest.mark.parametrize("generation", [2**63, 2**64 - 2, 2**64 - 1])
def test_a_generation_that_no_writer_can_reach_is_void_and_its_slot_is_written_again(
    folder: Path, generation: int
) -> None:
    """Fault 45: a generation near 2**64, from which counting on would give 0, the mark of an unused slot."""
    write_record(folder, 0, sealed(**{**read_record(folder, 0), "generation": generation}))
    assert shown(folder) == {k: v for k, v in EPISODES.items() if k != 0}
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.clear()
        for number in range(4):
            buffer.store_episode(a=[number])
    assert shown(folder) == {4 + number: [number] for number in range(4)}
    assert read_record(folder, 0)["generation"] < 2**62


# The table against its definition


def visible(slots: list[dict[str, Any]], base: int) -> list[int]:
    """The visible slots, oldest first, from the text of the format."""
    held = {
        slot: record["serial"]
        for slot, record in enumerate(slots)
        if record["sound"]
        and record["generation"] in (2, 4)
        and 1 <= record["length"] <= record["stop"] <= 4
        and record["flags"] < 128
        and record["start"] <= record["stop"]
        and (record["length"] == record["stop"] or record["flags"] & 8)
    }
    held = {slot: serial for slot, serial in held.items() if slots[slot]["start"] < slots[slot]["stop"]}
    single = {slot: serial for slot, serial in held.items() if list(held.values()).count(serial) == 1}
    shown = [slot for slot, serial in single.items() if not slots[slot]["flags"] & 4 and serial >= base]
    return sorted(shown, key=lambda slot: slots[slot]["serial"])[-3:]


records = st.fixed_dictionaries(
    {
        "generation": st.sampled_from([0, 1, 2, 2, 2, 2, 3, 4]),
        "serial": st.integers(0, 7),
        "length": st.sampled_from([0, 1, 1, 2, 3, 4, 4, 5]),
        "flags": st.sampled_from([0, 0, 0, 1, 2, 4, 8, 8, 16, 32, 63, 64]),
        "start": st.sampled_from([0, 0, 0, 0, 1, 2, 4, 5]),
        "more": st.sampled_from([0, 0, 0, 0, 1, 2, -1]),  # steps that are shown beyond the length
        "sound": st.sampled_from([True, True, True, True, False]),
    }
).map(lambda record: {**record, "stop": max(0, record["length"] + record["more"])})


def packed_at(slot: int, record: dict[str, Any], **more: int) -> bytes:
    """The bytes of one of them."""
    names = ("generation", "serial", "length", "flags", "start", "stop")
    return sealed(**{name: record[name] for name in names}, first_row=4 * slot, **more)


@given(slots=st.lists(records, min_size=5, max_size=5), base=st.integers(0, 7))
@examples(400)
def test_what_is_visible_is_what_the_format_says(tmp_path_factory: Any, slots: Any, base: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "table"
    if not folder.exists():
        ReplayBuffer(folder, 3, 4, {"a": "int"}, spare_slots=2, circular=True, capacity=7).close()
    for slot, record in enumerate(slots):
        raw = bytearray(packed_at(slot, record))
        raw[-1] ^= not record["sound"]
        write_record(folder, slot, bytes(raw))
    with (folder / "state.npy").open("r+b") as file:
        file.seek(8 * STATE_WORD["base"] - STATE.itemsize, 2)
        file.write(base.to_bytes(8, "little"))
    assert Storage.open(folder, verify="never").table.visible.tolist() == visible(slots, base)


@given(
    slots=st.lists(records, min_size=5, max_size=5),
    word=st.tuples(st.integers(0, 4), st.integers(0, 7), st.integers(0, 2**64 - 1)),
    spoilt=st.booleans(),
)
@examples(300)
def test_records_that_are_looked_at_one_by_one_say_what_a_table_of_them_says(
    slots: Any, word: tuple[int, int, int], spoilt: bool
) -> None:
    raw = [packed_at(i, record) for i, record in enumerate(slots)]
    words = np.frombuffer(bytearray(b"".join(raw)), np.uint64).reshape(-1, 8)
    if spoilt:
        words[word[:2]] = word[2]
        words[:, 7] = check_of(words)
    words[:, 7] ^= [not record["sound"] for record in slots]
    table, some = columns_of(words, 4, None), np.array([4, 0, 2])
    for name, column in columns_of(words[some], 4, None, some)._asdict().items():
        assert column.dtype == getattr(table, name).dtype
        assert np.array_equal(column, getattr(table, name)[some]), name


@given(
    slots=st.lists(records, min_size=5, max_size=5),
    older=st.lists(records, min_size=5, max_size=5),
    halves=st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=5, max_size=5),
)
@examples(300)
def test_what_changed_since_is_found_whatever_half_of_a_record_was_read_before(
    slots: Any, older: Any, halves: Any
) -> None:
    """A record that was copied while it was written is made of words of two: the next look finds it whole."""

    def table(given: Any, time: int) -> Any:
        raw = [packed_at(i, record, time=time) for i, record in enumerate(given)]
        return np.frombuffer(b"".join(raw), np.uint64).reshape(-1, 8)

    new = table(slots, 2)
    torn = np.where(np.array(halves), new, table(older, 1))
    before, whole = columns_of(torn, 4, None), columns_of(new, 4, None)
    slots = changed_records(new, before)
    fresh = columns_of(new[slots], 4, None, slots)
    for name, column in whole._asdict().items():
        found = getattr(before, name)
        found[slots] = getattr(fresh, name)
        some = ... if name == "valid" else whole.valid
        assert np.array_equal(found[some], column[some]), name
