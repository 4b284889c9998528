"""Folders of old versions open for ever, and every folder can be read with numpy and a JSON parser alone."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import listing
from inside import schema_written_again

from memmap_buffer import Field, ReplayBuffer, pack, verify

V1 = Path(__file__).parent / "golden" / "v1"
PACKED = V1.with_name("v1-packed")  # the same episodes

# What the folder holds, as formulas; `golden/make_v1.py` has its own copy of them.

LENGTHS = {4: 3, 6: 4, 7: 2}  # serial -> timesteps; 0 and 1 were cleared, 2 retired, 5 deleted
TRIMMED = {3: (1, 3)}  # serial -> the steps that are left of it
WITH_FINAL, TERMINATED, CUT_SHORT = {3, 4}, 6, 7


def expected(serial: int) -> dict[str, Any]:
    steps = range(*TRIMMED[serial]) if serial in TRIMMED else range(LENGTHS[serial])
    observed = range(steps.start, steps.stop + (serial in WITH_FINAL))
    fields = {
        "observation.image": [[[serial, t], [serial + t, 255 - t]] for t in observed],
        "observation.state": [[serial + t / 2, -t, np.float32(1 / (t + 1))] for t in observed],
        "action": [[10 * serial + t, -(2**40) - t] for t in steps],
        "reward": [-1.5 if t == 0 else t / 3 for t in steps],
        "terminated": [serial == TERMINATED and t == LENGTHS[serial] - 1 for t in steps],
        "numbers.half": [serial + t / 8 for t in steps],
        "numbers.brain": [serial + t / 4 for t in steps],
        "numbers.wave": [complex(t, -serial) for t in steps],
        "numbers.tiny": [-100 - t for t in steps],
        "numbers.count": [2**64 - 1 - t for t in steps],
        "more.short": [-30000 - t for t in steps],
        "more.long": [-(2**31) + t for t in steps],
        "more.unsigned": [65535 - t for t in steps],
        "word": ["é" * t for t in steps],
    }
    whole = serial != CUT_SHORT
    meta = {
        "task": f"task {serial}" if whole else "none",
        "success": serial == 4,  # 6 had it too, until it was updated in place
        "weight": [serial + 1j, -serial * 1j] if whole else [0.5, math.inf],
        "seed": [2**32 - 1 - serial],
    }
    return fields | meta


def assert_episode(got: dict[str, Any], serial: int) -> None:
    wanted = expected(serial)
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        if isinstance(values, list) and isinstance(values[0], int):
            assert got[name].tolist() == values, name  # uint64 beyond what a float compares
        np.testing.assert_array_equal(got[name], np.array(values), err_msg=name)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


# Through the library


@pytest.mark.parametrize("folder", [V1, PACKED], ids=["grid", "packed"])
def test_a_golden_folder_opens_and_every_episode_is_what_was_written(folder: Path) -> None:
    before = listing(folder)
    with ReplayBuffer.from_folder(folder, read_only=True, verify="always") as buffer:
        assert buffer.serials.tolist() == list(LENGTHS)
        assert buffer.episode_lens.tolist() == list(LENGTHS.values())
        for i, serial in enumerate(LENGTHS):
            assert_episode(flat(buffer.episode(i)), serial)
        steps = buffer.batch(timestep_level=True, fields=["action"])["action"].tolist()
        assert steps == [action for serial in (*TRIMMED, *LENGTHS) for action in expected(serial)["action"]]
    assert listing(folder) == before


@pytest.mark.parametrize("folder", [V1, PACKED], ids=["grid", "packed"])
def test_a_golden_folder_has_nothing_to_report(folder: Path) -> None:
    assert verify(folder) == []


@pytest.mark.parametrize("folder", [V1, PACKED], ids=["grid", "packed"])
def test_a_golden_schema_parsed_and_written_again_is_the_same_to_the_byte(folder: Path) -> None:
    text = (folder / "schema.json").read_bytes()
    assert schema_written_again(text) == text


@pytest.mark.parametrize("folder", [V1, PACKED], ids=["grid", "packed"])
def test_a_golden_folder_is_packed_to_the_bytes_of_the_golden_one(tmp_path: Path, folder: Path) -> None:
    pack(folder, tmp_path / "packed")
    got, wanted = ({n: content for n, (_, _, content) in listing(f).items()} for f in (tmp_path / "packed", PACKED))
    assert got == {".lock": b"", **wanted}


def test_the_golden_folder_is_written_on_where_it_stopped(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(V1, tmp_path / "buffer"))
    steps = {name: np.array(values) for name, values in expected(6).items() if name not in ("task", "weight", "seed")}
    del steps["success"]
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.store_episode(**{**steps, "numbers.count": steps["numbers.count"].astype("uint64")}, seed=9)
        assert buffer.serials.tolist() == [6, 7, 8] and buffer.num_steps == 11
        assert_episode(flat(buffer.episode(0)), 6)
        assert flat(buffer.episode(2))["action"].tolist() == expected(6)["action"]
    assert verify(folder) == []


def test_the_golden_folder_tells_nothing_of_the_machine_that_made_it() -> None:
    state = np.load(V1 / "state.npy")[0]
    for name in ("pid", "time", "boot", "host", "nonce", "unused"):
        assert not np.any(state[name] != np.zeros_like(state[name])), name
    assert sorted(np.load(V1 / "episodes.npy")["time"].tolist()) == [3, 4, 5, 6, 7]
    assert not (V1 / ".lock").exists()


# Without the library: numpy, json and the text of the format. Nothing below calls `memmap_buffer` to read.


def by_hand(folder: Path) -> dict[int, dict[str, Any]]:
    """serial -> field -> values, of every visible episode, oldest first."""
    schema = json.loads((folder / "schema.json").read_text())
    assert (schema["format"], schema["version"]) == ("memmap-buffer", 1)
    assert (schema["layout"] == "grid") == (schema["rows"] is None)
    records = np.load(folder / "episodes.npy", mmap_mode="r")
    base = np.load(folder / "state.npy", mmap_mode="r")[0]["base"]
    held = {slot: record for slot, record in enumerate(records) if holds_an_episode(slot, record, schema)}
    serials = [int(record["serial"]) for record in held.values()]
    shown = {
        int(record["serial"]): slot
        for slot, record in held.items()
        if not record["flags"] & 4 and record["serial"] >= base and serials.count(int(record["serial"])) == 1
    }
    newest = sorted(shown, reverse=True)[: schema["max_episodes"]]
    return {serial: episode_by_hand(folder, schema, shown[serial], held[shown[serial]]) for serial in reversed(newest)}


def holds_an_episode(slot: int, record: Any, schema: dict[str, Any]) -> bool:
    words = struct.unpack("<8Q", record.tobytes())
    h = 0x6D656D6D61706275
    for word in words[:6]:
        h = ((h ^ word) * 0x9E3779B97F4A7C15) % 2**64
        h ^= h >> 29
    even = words[0] != 0 and words[0] % 2 == 0
    bounds = 1 <= record["length"] <= record["stop"] <= schema["max_timesteps"] and record["flags"] < 128
    bounds &= record["start"] < record["stop"] and (record["length"] == record["stop"] or bool(record["flags"] & 8))
    if schema["rows"] is None:
        return h == words[7] and even and bounds and words[3] == slot * schema["max_timesteps"]
    return h == words[7] and even and bounds and words[3] + record["length"] <= schema["rows"]


def episode_by_hand(folder: Path, schema: dict[str, Any], slot: int, record: Any) -> dict[str, Any]:
    out = {}
    for name, field in schema["fields"].items():
        count = int(record["stop"]) + (field["final"] and bool(record["flags"] & 1))
        rows, first = numbers(folder / "data" / f"{name}.npy", field), 0
        if schema["rows"] is None:
            rows = rows[slot]
        else:
            first = int(record["first_row"]) + slot * field["final"]
        out[name] = rows[first + int(record["start"]) : first + count]
    for name, field in schema["meta_fields"].items():
        out[name] = numbers(folder / "meta" / f"{name}.npy", field)[slot]
    return out


def numbers(path: Path, field: dict[str, Any]) -> np.ndarray:
    stored = np.load(path, mmap_mode="r")
    if field["dtype"] == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    assert stored.dtype == np.dtype(field["dtype"])
    return stored


@pytest.mark.parametrize("folder", [V1, PACKED], ids=["grid", "packed"])
def test_a_golden_folder_can_be_read_with_numpy_alone(folder: Path) -> None:
    episodes = by_hand(folder)
    assert list(episodes) == [*TRIMMED, *LENGTHS]
    for serial, got in episodes.items():
        assert_episode(got, serial)


@pytest.mark.parametrize("publish", ["episode", "step"])
def test_any_folder_can_be_read_with_numpy_alone(tmp_path: Path, publish: str) -> None:
    """Also while its writer is at it: what numpy shows is what the library shows."""
    fields = {"camera": {"left": Field("uint8", (2, 3), final=True)}, "x": "bfloat16", "text": ("U4", (), "none")}
    options: dict[str, Any] = {"circular": True, "capacity": 9, "spare_slots": 2, "publish": publish}
    with ReplayBuffer(tmp_path, 3, 4, fields, {"task": {"id": "int"}}, **options) as buffer:
        for number in range(7):
            with buffer.one_episode(task={"id": number}) as episode:
                for t in range(1 + number % 4):
                    episode.store(camera={"left": np.full((2, 3), 10 * number + t)}, x=number + t / 2)
                if number % 2:
                    episode.final(camera={"left": np.full((2, 3), 10 * number + 9)})
            if number == 3:
                buffer.update(0, x=-1.0)
            shown = {int(s): flat(buffer.episode(i)) for i, s in enumerate(buffer.serials)}
            assert_same(by_hand(tmp_path), shown)
        assert len(shown) > 1
        open_episode = buffer.begin_episode(task={"id": 99})
        open_episode.store(camera={"left": np.zeros((2, 3))}, x=0)
        assert_same(by_hand(tmp_path), {int(s): flat(buffer.episode(i)) for i, s in enumerate(buffer.serials)})
        assert (7 in by_hand(tmp_path)) == (publish == "step")
        buffer.delete(0)
        assert_same(by_hand(tmp_path), {int(s): flat(buffer.episode(i)) for i, s in enumerate(buffer.serials)})
        open_episode.abort()
        buffer.clear()
        assert by_hand(tmp_path) == {}


def assert_same(got: dict[int, dict[str, Any]], wanted: dict[int, dict[str, Any]]) -> None:
    assert list(got) == list(wanted)
    for serial, episode in wanted.items():
        assert got[serial].keys() == episode.keys()
        for name, values in episode.items():
            np.testing.assert_array_equal(got[serial][name], values, err_msg=f"episode {serial}, {name}")


def test_every_file_of_a_folder_is_opened_by_numpy(tmp_path: Path) -> None:
    for folder in (V1, PACKED, tmp_path):
        if folder is tmp_path:
            ReplayBuffer(tmp_path, 2, 3, {"a": "int", "b": {"c": "bfloat16"}}, {"m": "U3"}).close()
        arrays = sorted(folder.rglob("*.npy"))
        assert len(arrays) >= 6
        for path in arrays:
            loaded = np.load(path, mmap_mode="r")
            assert loaded.flags.c_contiguous and loaded.offset % 64 == 0
            assert path.stat().st_size == loaded.offset + loaded.nbytes
            assert loaded.dtype.names or loaded.dtype.byteorder in "<|="
