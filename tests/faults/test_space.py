"""Disk space that a ring gives back: what an episode leaves behind a shorter one, and never a byte of anything else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import count_of
from fault_injection import KILLED, System, in_child, shown, system
from hypothesis import example, given
from hypothesis import strategies as st
from inside import get_inside, open_episodes, set_inside, without_fallocate
from profiles import examples
from strategies import Plan, assert_view, recorded, recordings

from memmap_buffer import Field, ReplayBuffer, StaleEpisodeError, verify

ROW = 8192  # bytes of an image: eight take a block
IMAGES = {"image": Field("uint8", (ROW,), final=True), "number": "int"}
T = 64
BLOCK = get_inside("punched_bytes")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every byte is given back, wherever the folder lies."""
    with every_byte(monkeypatch):
        yield


def every_byte(monkeypatch: pytest.MonkeyPatch) -> Any:
    set_inside(monkeypatch, punched_bytes=1, given_back_bytes=1, in_memory_systems=())
    return monkeypatch.context()


class Watched(System):
    """Every punch, and what `look` finds at that moment."""

    def __init__(self, look: Callable[[], Any] = lambda: None) -> None:
        self.look, self.punched = look, list[tuple[int, int, int]]()
        self.found: list[Any] = []

    def punch(self, fd: int, offset: int, size: int) -> None:
        self.punched.append((os.fstat(fd).st_ino, offset, size))
        self.found.append(self.look())
        super().punch(fd, offset, size)


def ring(folder: Path, **options: Any) -> ReplayBuffer:
    sizes = {"max_episodes": 3, "max_timesteps": T, "circular": True, "fields": IMAGES}
    return ReplayBuffer(folder, **{**sizes, **options})


def record(buffer: ReplayBuffer, number: int, length: int, final: bool = False) -> None:
    images = np.full((length + final, ROW), number % 255 + 1, np.uint8)
    buffer.store_episode(image=images, number=np.full(length, number))


def blocks(folder: Path) -> int:
    """The bytes that the images take on the disk."""
    path = folder / "data" / "image.npy"
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_blocks * 512


def inode_of_images(folder: Path) -> int:
    return (folder / "data" / "image.npy").stat().st_ino


def can_punch(place: Path) -> bool:
    """Whether this file system gives blocks back."""
    path = place / "probe"
    path.write_bytes(b"x" * 4 * BLOCK)
    with path.open("r+b") as file:
        try:
            System().punch(file.fileno(), 0, BLOCK)
        except OSError:
            return False
    return get_inside("file_system")(place) not in get_inside("in_memory_systems")


# One file


@pytest.mark.parametrize(
    ("start", "stop", "zeros"),
    [
        (0, 4 * BLOCK, (0, 4)),
        (1, 4 * BLOCK - 1, (1, 3)),
        (BLOCK, 2 * BLOCK, (1, 2)),
        (BLOCK + 1, 3 * BLOCK - 1, (2, 2)),
        (BLOCK - 1, 2 * BLOCK + 1, (1, 2)),
        (3 * BLOCK, 3 * BLOCK, (3, 3)),
        (3 * BLOCK, BLOCK, (3, 3)),
    ],
)
def test_only_whole_blocks_between_two_offsets_are_given_back(
    tmp_path: Path, start: int, stop: int, zeros: tuple[int, int]
) -> None:
    path, whole = tmp_path / "file", np.ones(4 * BLOCK, np.uint8)
    path.write_bytes(whole.tobytes())
    with path.open("r+b") as file:
        get_inside("punch")(file.fileno(), start, stop)
    if can_punch(tmp_path):
        whole[zeros[0] * BLOCK : zeros[1] * BLOCK] = 0
    assert path.read_bytes() == whole.tobytes()


def test_where_the_system_cannot_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 2 * BLOCK)
    with path.open("rb") as file:  # EBADF: it is open to read only
        get_inside("punch")(file.fileno(), 0, 2 * BLOCK)
    without_fallocate(monkeypatch)
    with path.open("r+b") as file:
        with pytest.raises(OSError, match="no fallocate"):
            System().punch(file.fileno(), 0, BLOCK)
        get_inside("punch")(file.fileno(), 0, 2 * BLOCK)
    assert path.read_bytes() == b"x" * 2 * BLOCK


# What it is for


@pytest.mark.parametrize("options", [{}, {"publish": "step"}, {"stage": "disk"}, {"durability": "power"}], ids=str)
@pytest.mark.parametrize("between", ["nothing", "clear", "delete", "reopen"])
def test_the_space_of_a_ring_follows_its_contents(tmp_path: Path, options: dict[str, Any], between: str) -> None:
    buffer = ring(tmp_path / "ring", **options)
    for number in range(4):
        record(buffer, number, T)
    long = blocks(tmp_path / "ring")
    assert long >= 4 * T * ROW
    if between == "clear":
        buffer.clear()
    elif between == "delete":
        buffer.delete(slice(None))
    elif between == "reopen":
        buffer.close()
        buffer = ReplayBuffer.from_folder(tmp_path / "ring", **options)
    for number in range(4):
        record(buffer, number, 1, final=True)
    short = blocks(tmp_path / "ring")
    assert short <= 4 * (2 * ROW + 2 * BLOCK) if can_punch(tmp_path) else short >= long
    for number in range(4):
        record(buffer, number, T)
    assert blocks(tmp_path / "ring") >= long
    assert [episode["number"] for _, episode in shown(buffer)] == [[n] * T for n in (1, 2, 3)]
    buffer.close()
    assert verify(tmp_path / "ring") == []


@pytest.mark.parametrize("reopened", [False, True])
def test_space_that_was_reserved_is_kept(tmp_path: Path, reopened: bool, small: None) -> None:
    buffer = ring(tmp_path / "ring", reserve=True)
    if reopened:
        buffer.close()
        buffer = ReplayBuffer.from_folder(tmp_path / "ring")
    with pytest.MonkeyPatch.context() as patch:
        set_inside(patch, system=(watched := Watched()))
        for length in (T, T, T, T, 1, 1, 1, 1):
            record(buffer, 0, length)
    assert watched.punched == []
    assert verify(tmp_path / "ring") == []
    buffer.close()


def test_in_memory_nothing_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 27: on a full tmpfs, a reader that is late would be killed by looking at a hole."""
    set_inside(monkeypatch, file_system=lambda path: "tmpfs", system=(watched := Watched()))
    with ring(tmp_path / "ring") as buffer:
        for length in (T, T, T, T, 1, 1, 1, 1):
            record(buffer, 0, length)
    assert watched.punched == []


def test_nothing_is_asked_of_the_system_unless_an_episode_is_shorter_by_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_inside(monkeypatch, system=(watched := Watched()))
    with ring(tmp_path / "ring") as buffer:
        for length in (1, 1, 1, 1, 5, 5, 5, 5, 40, 40, 40, 40, 37, 37, 37, 37, 64, 64, 64, 64):
            record(buffer, 0, length)
        assert watched.punched == []
        record(buffer, 0, 40)
        assert [file for file, _, _ in watched.punched] == [inode_of_images(tmp_path / "ring")]


# What it leaves alone


@pytest.mark.parametrize("options", [{}, {"stage": "disk"}, {"durability": "power", "sync_every": 3}], ids=str)
def test_only_rows_of_a_slot_that_no_record_speaks_of_are_given_back(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At that moment the slot's generation is odd, so that a reader that copied them knows."""
    generations = partial(np.load, tmp_path / "ring" / "episodes.npy")
    set_inside(monkeypatch, system=(watched := Watched(lambda: generations()["generation"].copy())))
    rng = np.random.default_rng(0)
    with ring(tmp_path / "ring", spare_slots=3, **options) as buffer:
        for number in range(40):
            record(buffer, number, int(rng.integers(1, T + 1)), final=bool(number % 2))
    stride, header = (T + 1) * ROW, np.load(tmp_path / "ring" / "data" / "image.npy", mmap_mode="r").offset
    assert len(watched.punched) > 10
    for (file, offset, size), found in zip(watched.punched, watched.found, strict=True):
        slot = (offset - header) // stride
        assert file == inode_of_images(tmp_path / "ring")
        assert slot == (offset + size - 1 - header) // stride
        assert found[slot] % 2 == 1
    assert verify(tmp_path / "ring") == []


LEAVES = {"max_episodes": 2, "capacity": 2, "publish": "step", "stage": "ram"}  # an open episode leaves
OPEN, CLOSED = Plan(2, how="open"), Plan(1)


@examples(40)
@example(([CLOSED, CLOSED, OPEN, *[CLOSED] * 4, Plan(1, how="abort")], {**LEAVES, "codec": None}, "terminated"), False)
@example(([CLOSED, Plan(1, how="abort"), OPEN, *[CLOSED] * 4], {**LEAVES, "codec": "zstd"}, "terminated"), False)
@given(recordings(how=("block", "whole", "side", "open", "abort", "partial", "clear"), min_size=4), st.booleans())
def test_what_is_shown_is_what_was_stored(recording: Any, reopen: bool) -> None:
    """Whatever was in the slots before, byte for byte: final observations, neighbours, open and partial episodes."""
    with pytest.MonkeyPatch.context() as patch, every_byte(patch), recorded(recording) as (buffer, reference):
        names = ("observation.pixels", "observation.state", "note", "half", "reward")
        items = reference.items(lambda episode: reference.trajectory(episode, names))
        assert_view(buffer, items, zeros=reference.zeros, fields=names, return_mask=True)
        steps = reference.items(lambda episode: reference.transitions(episode, 3, names))
        assert_view(buffer, steps, n_steps=3, current_fields=names, next_fields=names)
        assert not [finding for finding in verify(buffer.folder) if finding.lost]
        if reopen and not open_episodes(buffer):
            buffer.close()
            assert verify(buffer.folder) == []


def test_steps_published_one_by_one_are_shown_while_the_space_behind_them_is_given_back(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ring(tmp_path / "ring", publish="step", max_timesteps=9) as buffer:
        for number in range(4):
            record(buffer, number, 9, final=True)
        reader = ReplayBuffer.from_folder(tmp_path / "ring", read_only=True)
        set_inside(monkeypatch, system=(watched := Watched(lambda: shown(reader)[-1][1]["number"])))
        for number in range(4, 12):
            episode = buffer.begin_episode()
            for _ in range(12 - number):
                episode.store(image=np.full(ROW, number, np.uint8), number=number)
            episode.final(image=np.full(ROW, number, np.uint8))
            episode.publish()
            assert watched.found
            assert all(found == [number] * (12 - number) for found in watched.found)
            watched.found.clear()
    assert verify(tmp_path / "ring") == []


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 4], ids=["each", "every fourth"])
@pytest.mark.parametrize("lengths", [(T, 3), (9, 8), (T, T - 1)])
def test_killed_at_any_operation_the_ring_is_as_before_or_behind_it(
    tmp_path: Path, small: None, lengths: tuple[int, int], stride: int
) -> None:
    """Fault 4: also the next episode, which knows nothing of how far the dead writer got, leaves the others alone."""

    def begin(folder: Path) -> None:
        with ring(folder) as buffer:
            for number in range(4):
                record(buffer, number, lengths[0])

    def go_on(folder: Path) -> None:
        with ReplayBuffer.from_folder(folder) as buffer:
            record(buffer, 4, lengths[1])

    begin(tmp_path / "seen")
    before, found = shown(tmp_path / "seen"), set()
    total = count_of(partial(go_on, tmp_path / "seen"))
    after = shown(tmp_path / "seen")
    for at in range(1 + lengths[1] % stride, total + 1, stride):
        folder = tmp_path / f"{at}"
        begin(folder)

        def cut_off(tell: Callable[[Any], None], at: int = at, folder: Path = folder) -> None:
            with system(at, kill=True, half=True):
                go_on(folder)

        assert in_child(cut_off).status == KILLED
        state = shown(folder)
        assert state in (before, after)
        found.add(state == after)
        with ReplayBuffer.from_folder(folder) as buffer:
            record(buffer, 7, 1)
            assert shown(buffer)[:-1] == state[1:]
        assert [finding for finding in verify(folder) if finding.lost] == []
    assert found == {True, False}


def test_a_reader_that_is_late_is_told(tmp_path: Path) -> None:
    with ring(tmp_path / "ring") as buffer:
        for number in range(3):
            record(buffer, number, T)
        reader = ReplayBuffer.from_folder(tmp_path / "ring", read_only=True)
        dataset = reader.dataset(fields=("image",), on_stale="raise")
        assert (dataset[0]["image"] == 1).all()
        for number in range(3, 7):
            record(buffer, number, 1)
        with pytest.raises(StaleEpisodeError, match=r"overwritten|cleared"):
            dataset[0]


# Steps that are shown one by one

LONGEST, WIDTHS = 4000, {"state": 50, "action": 12}


def add_episodes(buffer: ReplayBuffer, *lengths: int, num_envs: int) -> None:
    for length in lengths:
        for t in range(length):
            step = {name: np.ones((num_envs, width), np.float32) for name, width in WIDTHS.items()}
            buffer.add(**step, terminated=np.full(num_envs, t == length - 1))


def ring_of_steps(folder: Path) -> ReplayBuffer:
    """A ring that shows fewer steps than its episodes have."""
    fields = {**{name: ("float", width) for name, width in WIDTHS.items()}, "terminated": "bool"}
    return ReplayBuffer(folder, 41, LONGEST, fields, capacity=40, publish="step", spare_slots=41)


def test_episodes_that_are_shorter_than_a_block_give_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing, and a file system that is asked waits for its disk."""
    set_inside(monkeypatch, system=(watched := Watched()))
    with ring_of_steps(tmp_path / "ring") as buffer:
        add_episodes(buffer, *[20] * 40, num_envs=1)
    assert len(watched.punched) <= 6  # of those that lie on a boundary of blocks


@pytest.mark.parametrize("length", [20, 400, 1500])
def test_of_steps_that_left_no_block_is_kept_but_those_that_others_share(tmp_path: Path, length: int) -> None:
    if not can_punch(tmp_path):
        pytest.skip("no space is given back here")
    with ring_of_steps(tmp_path / "ring") as buffer:
        add_episodes(buffer, length, num_envs=40)
        buffer.end_episodes()
        add_episodes(buffer, 40, num_envs=1)
    for name, width in WIDTHS.items():
        path, size = tmp_path / "ring" / "data" / f"{name}.npy", 4 * width * LONGEST
        with path.open("rb") as file:
            os.fsync(file.fileno())
        starts = [path.stat().st_size - slot * size for slot in range(82, 0, -1)]
        shared = sum(-start % BLOCK for start in starts[:42])
        assert path.stat().st_blocks * 512 <= shared + 42 * 8192  # pages at the begin and the end
