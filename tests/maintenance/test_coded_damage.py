"""What `verify` finds wrong with blobs, their index and their dictionary, and what `repair` keeps of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coded_folder
import numpy as np
import pytest
from coded_folder import copy_of, episodes, example, first_row, no_barriers, number_of, open_blobs, open_index
from damage import flip, header_size, rewrite_record
from inside import get_inside

from memmap_buffer import ReplayBuffer, repair, verify

__all__ = ["no_barriers"]  # a fixture
FRAME, BLOBS, DICTIONARY = "data/frame.npy", "data/frame.blobs.npy", "data/frame.dictionary.npy"
ALL = frozenset(range(4))


@dataclass(frozen=True)
class Damage:
    """One damage: what it does, what must be told, the episodes and the fields that are given up."""

    name: str
    do: Callable[[Path], object]
    text: str
    episodes: frozenset[int] = frozenset()
    fields: frozenset[str] = frozenset()
    kinds: tuple[str, ...] = ("spread", "dense")
    file: str = field(default=BLOBS)

    def __str__(self) -> str:
        return self.name


def row(folder: Path, slot: int, t: int) -> np.ndarray:
    """A row of the index of frames."""
    return open_index(folder, "frame")[first_row(folder, "frame", slot) + t]


def end_of(folder: Path, slot: int) -> int:
    """Where the blobs of an episode's frames end."""
    steps = coded_folder.LENGTHS[slot] + (slot % 2 == 0)
    begin, word = map(int, row(folder, slot, steps - 1))
    return begin + (word & 0xFFFFFFFF)


def changed(slot: int, t: int, begin: int = 0, length: int = 0, number: int = 0) -> Callable[[Path], None]:
    """Words of a row of the index are others by so much."""

    def do(folder: Path) -> None:
        words = row(folder, slot, t)
        words[0] = (int(words[0]) + begin) % 2**64
        words[1] = (int(words[1]) + length) ^ number << 32

    return do


def truncated(name: str, size: Callable[[Path], int]) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size(folder))


def size_less(name: str) -> Callable[[Path], int]:
    return lambda folder: (folder / name).stat().st_size - 1


def within(slot: int, less: int = 1) -> Callable[[Path], int]:
    """The size of a file of frames that ends in the last blob of an episode, or behind it."""
    return lambda folder: header_size(folder / BLOBS) + end_of(folder, slot) - less


def appended(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"x")


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def swap(folder: Path) -> None:
    """Two timesteps have each other's blob."""
    first, second = row(folder, 1, 3), row(folder, 1, 4)
    first[:], second[:] = second.copy(), first.copy()


def another_slot(folder: Path) -> None:
    """The blobs of episode 3 begin where those of episode 0 do."""
    shift = int(row(folder, 3, 0)[0]) - int(row(folder, 0, 0)[0])
    for t in range(50):
        row(folder, 3, t)[0] -= np.uint64(shift)


def rot(name: str, offset: Callable[[Path], int]) -> Callable[[Path], None]:
    return lambda folder: flip(folder / name, header_size(folder / name) + offset(folder))


ONE = frozenset({1})
DAMAGES = [
    Damage("a blob of another byte", rot(BLOBS, lambda f: int(row(f, 1, 5)[0])), "fails its checksum", ONE),
    Damage("the last byte of the last blob", rot(BLOBS, lambda f: end_of(f, 3) - 1), "checksum", frozenset({3})),
    Damage("an offset beyond the file", changed(1, 5, begin=2**40), "beyond the file", ONE, file=FRAME),
    Damage("an offset of 2**64 - 1", changed(1, 0, begin=-1 - 2**20), "beyond the file", ONE, file=FRAME),
    Damage("an offset one further", changed(1, 5, begin=1), "do not follow one another", ONE, file=FRAME),
    Damage("a length one less", changed(1, 5, length=-1), "do not follow one another", ONE, file=FRAME),
    Damage("a length beyond a timestep", changed(1, 40, length=2000), "longer than a timestep", ONE, file=FRAME),
    Damage("the last length", changed(1, 40, length=-1), "fails its checksum", ONE),
    Damage("another dictionary", changed(1, 5, number=77), "a dictionary that is not there", ONE, file=FRAME),
    Damage("no dictionary named", lambda f: changed(1, 5, number=number_of(f, "frame"))(f), "fails its checksum", ONE),
    Damage("blobs in another order", swap, "do not follow one another", ONE, file=FRAME),
    Damage("blobs of another", another_slot, "place of another", frozenset({3}), kinds=("spread",), file=FRAME),
    Damage("blobs cut in episode 3", truncated(BLOBS, within(3)), "'frame' is cut off", frozenset({3})),
    Damage("blobs cut in episode 1", truncated(BLOBS, within(1)), "'frame' is cut off", frozenset({1, 2, 3})),
    Damage("blobs cut behind all", truncated(BLOBS, within(3, 0)), "bytes, the schema says", kinds=("spread",)),
    Damage("the header of blobs", rot(BLOBS, lambda f: -50), "another header"),
    Damage("blobs one byte longer", appended(BLOBS), "bytes, the schema says"),
    Damage("no blobs", removed(BLOBS), "is missing", fields=frozenset({"frame"})),
    Damage("no index", removed(FRAME), "is missing", fields=frozenset({"frame"}), file=FRAME),
    Damage("the index cut", truncated(FRAME, size_less(FRAME)), "bytes, the schema", kinds=("spread",), file=FRAME),
    Damage("no dictionary file", removed(DICTIONARY), "is missing", fields=frozenset({"frame"}), file=DICTIONARY),
    Damage("another dictionary file", rot(DICTIONARY, lambda f: 300), "", fields=frozenset({"frame"}), file=FRAME),
    Damage("a longer dictionary file", appended(DICTIONARY), "bytes, the schema says", file=DICTIONARY),
]
CASES = [(damage, kind) for damage in DAMAGES for kind in damage.kinds]


@pytest.mark.parametrize(("damage", "kind"), CASES, ids=lambda part: str(part))
def test_damage_is_found_and_everything_else_is_kept(tmp_path: Path, damage: Damage, kind: str) -> None:
    folder, whole = copy_of(kind, tmp_path / "buffer"), episodes(example())
    damage.do(folder)
    found = verify(folder)
    told = [finding for finding in found if finding.lost]
    assert any(finding.file == damage.file and damage.text in finding.what for finding in told), found
    assert {finding.field for finding in told} == {"frame"}
    slots = {finding.slot for finding in told} - {None}
    assert slots == damage.episodes or damage.fields
    assert repair(folder) == found
    assert verify(folder) == []
    wanted = {
        serial: {name: value for name, value in episode.items() if name not in damage.fields}
        for serial, episode in whole.items()
        if serial not in damage.episodes
    }
    assert episodes(folder) == wanted
    for serial in damage.episodes:
        kept = folder / "lost+found" / f"slot-{serial}.0"
        assert np.load(f"{kept}.number.npy").tolist() == whole[serial]["number"]
        assert len(np.load(f"{kept}.frame.npy")) == len(whole[serial]["frame"])
        assert np.load(f"{kept}.camera.left.blobs.npy").dtype == np.uint8
    if kind == "spread":
        with ReplayBuffer.from_folder(folder) as buffer:
            if damage.fields:
                return
            coded_folder.record(buffer, 4, 20)
        assert verify(folder) == []
        assert len(episodes(folder)) == 5 - len(damage.episodes)


@pytest.mark.parametrize("kind", ["spread", "dense"])
def test_what_is_salvaged_can_be_read(tmp_path: Path, kind: str) -> None:
    """Its index counts from the first byte of the slot, or in a packed folder from its first blob."""
    folder = copy_of(kind, tmp_path / "buffer")
    flip(folder / "data/number.npy", header_size(folder / "data/number.npy") + 8 * (31 if kind == "dense" else 51))
    assert {finding.field for finding in repair(folder)} == {"number"}
    index, data = (np.load(folder / f"lost+found/slot-1.0.camera.left{end}.npy") for end in ("", ".blobs"))
    begin = int(index[0, 0])
    field = ReplayBuffer.from_folder(folder, read_only=True).schema.fields["camera.left"]
    index[:, 0] -= np.uint64(begin)
    assert get_inside("coded_rows")(field, data, None).decode(index).tolist() == episodes(example())[1]["camera.left"]


def test_a_record_that_is_lost_leaves_its_slot_whole(tmp_path: Path) -> None:
    folder = copy_of("spread", tmp_path / "buffer")
    rewrite_record(folder, 1, length=coded_folder.MAX_TIMESTEPS + 9)
    repair(folder)
    assert verify(folder) == []
    kept = np.load(folder / "lost+found/slot-1.0.frame.blobs.npy")
    begin, size = coded_folder.ROW_BYTES["frame"] * 51, coded_folder.ROW_BYTES["frame"] * 51
    assert kept.tobytes() == open_blobs(folder, "frame")[begin : begin + size].tobytes()
    assert not list(example().glob("lost+found"))


def test_nothing_is_reported_of_a_folder_that_is_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "ring"
    with coded_folder.make(folder, (), circular=True, max_episodes=3, publish="step") as buffer:
        for number in range(8):
            coded_folder.record(buffer, number, 3 + number)
            assert verify(folder) == []
        episode = buffer.begin_episode(task=9)
        for t in range(3):
            values: dict[str, Any] = {"depth": np.zeros((8, 8)), "number": t, "noise": np.zeros(9)}
            episode.store(frame=coded_folder.frame(0, t), camera={"left": np.zeros((16, 24, 3))}, **values)
            assert verify(folder) == []
    shutil.rmtree(folder)
