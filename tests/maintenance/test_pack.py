"""`pack` and `unpack`: the same episodes in another layout, beside a writer that goes on, complete or absent."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
from damage import another_buffer, flip, header_size, rewrite_record, rewrite_state, rows_of
from fault_injection import flags_of, listing, shown
from hypothesis import given
from inside import after_each_packed_episode, get_inside, set_inside
from profiles import examples
from specification import CUT, OPEN
from strategies import MEMORY, assert_view, choices, flat, items_of, joined, recorded, recordings

from memmap_buffer import (
    ConcatBuffer,
    Field,
    NotEnoughDataError,
    NStep,
    Offsets,
    ReadOnlyError,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    StaleEpisodeError,
    Trajectory,
    Window,
    pack,
    unpack,
    verify,
)

CUT_OR_OPEN = CUT | OPEN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return damage.copy_of_example(tmp_path / "buffer")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (_, _, content) in listing(folder).items() if name != ".lock"}


# What is copied


@pytest.mark.parametrize("way", [pack, unpack])
@pytest.mark.parametrize(
    "options",
    [{}, {"checksum": None}, {"capacity": 7}, {"publish": "step"}, {"stage": "disk"}, {"durability": "power"}],
    ids=str,
)
def test_a_copy_shows_what_the_source_shows(tmp_path: Path, options: dict[str, Any], way: Any) -> None:
    with damage.make(tmp_path / "buffer", **options) as buffer:
        for number in range(9):
            damage.record(buffer, number, 1 + number % 4)
        buffer.update(0, number=[7])
        buffer.delete([1])
        assert way(tmp_path / "buffer", tmp_path / "copy") == []
        assert shown(tmp_path / "copy") == shown(buffer)
    assert verify(tmp_path / "copy") == []
    assert shown(ReplayBuffer.from_folder(tmp_path / "copy", verify="always")) == shown(tmp_path / "buffer")


def test_a_packed_folder_has_no_holes_and_no_row_too_many(tmp_path: Path) -> None:
    fields = {"image": Field("uint8", (64, 64), final=True), "reward": "float64"}
    with ReplayBuffer(tmp_path / "buffer", 1000, 10_000, fields, {"name": "U4"}) as buffer:
        for length in (30, 1, 7):
            buffer.store_episode(image=np.zeros((length, 64, 64)), reward=np.zeros(length))
    pack(tmp_path / "buffer", tmp_path / "packed")
    arrays = {path.name: np.load(path) for path in (tmp_path / "packed").rglob("*.npy")}
    assert {name: array.shape for name, array in arrays.items() if name != "state.npy"} == {
        "image.npy": (38 + 3, 64, 64),
        "reward.npy": (38,),
        "name.npy": (3,),
        "episodes.npy": (3,),
        "checksums.npy": (3, 3),
    }
    for path in (tmp_path / "packed").rglob("*.npy"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # blocks are counted when they are written
        assert path.stat().st_blocks * 512 >= path.stat().st_size
    assert arrays["episodes.npy"]["first_row"].tolist() == [0, 30, 31]


def test_the_same_episodes_give_the_same_bytes_whatever_they_are_copied_from(tmp_path: Path, folder: Path) -> None:
    """So a packed folder can be compared, and its files be summed."""
    ReplayBuffer.from_folder(folder, read_only=True).snapshot(tmp_path / "snapshot")
    pack(folder, tmp_path / "packed")
    pack(tmp_path / "snapshot", tmp_path / "of a snapshot")
    pack(tmp_path / "packed", tmp_path / "again")
    unpack(tmp_path / "packed", tmp_path / "unpacked", 40, 50)
    pack(tmp_path / "unpacked", tmp_path / "back", episodes=slice(None))
    ReplayBuffer.from_folder(tmp_path / "packed").snapshot(tmp_path / "snapshot of it")
    expected = bytes_of(tmp_path / "packed")
    for name in ("of a snapshot", "again", "snapshot of it"):
        assert bytes_of(tmp_path / name) == expected, name
    longer = bytes_of(tmp_path / "back")
    assert longer.pop("schema.json") != expected.pop("schema.json")  # it has a larger max_timesteps
    assert longer == expected


def test_the_source_is_untouched(tmp_path: Path, folder: Path) -> None:
    before = listing(folder)
    pack(folder, tmp_path / "packed")
    assert listing(folder) == before


def test_a_packed_folder_is_to_read_and_says_how_to_write(tmp_path: Path, folder: Path) -> None:
    pack(folder, tmp_path / "packed")
    before = listing(tmp_path / "packed")
    with ReplayBuffer.from_folder(tmp_path / "packed") as buffer:
        assert buffer.read_only
        for write in (partial(damage.record, buffer, 9, 2), buffer.clear, partial(buffer.update, 0, number=[1])):
            with pytest.raises(ReadOnlyError, match=r"is packed, .*; `unpack` it into another folder"):
                write()
    assert listing(tmp_path / "packed") == before


def test_an_open_episode_ends_where_it_was(tmp_path: Path) -> None:
    buffer = damage.make(tmp_path / "buffer", publish="step")
    damage.record(buffer, 0, 2)
    episode = buffer.begin_episode(task=1)
    step = {"observation": [0, 0, 0], "camera": {"left": np.zeros((2, 2))}, "half": 0, "text": ""}
    for t in range(3):
        episode.store(number=t, **step)
        pack(tmp_path / "buffer", tmp_path / f"packed{t}")
    episode.final(observation=[1, 1, 1])
    episode.publish()
    buffer.close()
    for t in range(3):
        assert shown(tmp_path / f"packed{t}")[1][1]["number"] == list(range(t + 1))
        assert verify(tmp_path / f"packed{t}") == []
        flags = flags_of(tmp_path / f"packed{t}")
        assert (flags[0] & CUT_OR_OPEN, flags[1] & CUT_OR_OPEN) == (0, CUT)


@pytest.mark.parametrize(
    ("episodes", "serials"),
    [(0, [2]), (-1, [5]), ([3, 0, 0], [2, 5]), (slice(1, 3), [3, 4]), (np.array([2]), [4]), (None, [2, 3, 4, 5])],
    ids=str,
)
def test_chosen_episodes_keep_their_serials(tmp_path: Path, folder: Path, episodes: Any, serials: list[int]) -> None:
    pack(folder, tmp_path / "packed", episodes=episodes)
    unpack(folder, tmp_path / "unpacked", episodes=episodes)
    for name in ("packed", "unpacked"):
        assert shown(tmp_path / name) == [one for one in shown(folder) if one[0] in serials]
        assert verify(tmp_path / name) == []


def test_an_episode_that_is_not_there_is_an_index_error(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(IndexError, match="episode 4: the buffer has 4"):
        pack(folder, tmp_path / "packed", episodes=[4])
    assert not (tmp_path / "packed").exists()


def test_what_lies_in_extra_is_copied_and_priorities_by_slot_are_not(tmp_path: Path, folder: Path) -> None:
    for sub in ("priority", "extra"):
        (folder / sub).mkdir()
        (folder / sub / "a").write_bytes(b"splits")
    pack(folder, tmp_path / "packed")
    assert (tmp_path / "packed" / "extra" / "a").read_bytes() == b"splits"
    assert not (tmp_path / "packed" / "priority").exists()


def test_a_field_of_any_size_takes_little_memory(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "buffer", 4, 40, {"x": ("uint8", (1 << 20,)), "y": "int"}) as buffer:
        for i in range(3):
            buffer.store_episode(x=np.full((40, 1 << 20), i), y=np.full(40, i))
    tracemalloc.start()
    pack(tmp_path / "buffer", tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "unpacked")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * get_inside("recoded_bytes")
    assert (np.load(tmp_path / "packed" / "data" / "x.npy", mmap_mode="r")[:, -1] == np.arange(3).repeat(40)).all()


# The way back


def test_an_unpacked_folder_goes_on_counting(tmp_path: Path, folder: Path) -> None:
    pack(folder, tmp_path / "packed", episodes=[0, 1])
    unpack(tmp_path / "packed", tmp_path / "ring", 3, circular=True, spare_slots=2, capacity=14)
    with ReplayBuffer.from_folder(tmp_path / "ring") as buffer:
        assert buffer.max_timesteps == damage.MAX_TIMESTEPS
        for number in (6, 7):
            damage.record(buffer, number, 4)
        assert buffer.serials.tolist() == [3, 6, 7]
        assert buffer.episode_lens.tolist() == [2, 4, 4]
    assert verify(tmp_path / "ring") == []
    assert shown(tmp_path / "ring")[0] == shown(folder)[1]


def test_a_grid_is_made_larger_by_unpacking_it(tmp_path: Path, folder: Path) -> None:
    unpack(folder, tmp_path / "larger", max_episodes=9, max_timesteps=70)
    with ReplayBuffer.from_folder(tmp_path / "larger") as buffer:
        damage.record(buffer, 6, 70)
        assert shown(buffer)[:-1] == shown(folder)
        assert buffer.episode_lens.tolist() == [5, 2, 3, 4, 70]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"max_episodes": 3}, "max_episodes: got 3, the episodes need 4"),
        ({"max_timesteps": 4}, "max_timesteps: got 4, the episodes need 5"),
        ({"capacity": 13}, "capacity: got 13, the episodes need 14"),
        ({"max_episodes": 0}, "max_episodes: got 0, expected a whole number"),
        ({"max_episodes": -1}, "max_episodes: got -1, expected a whole number"),
        ({"spare_slots": 0}, "spare_slots: got 0, expected a whole number"),
    ],
)
def test_sizes_too_small_are_refused_by_name(tmp_path: Path, folder: Path, sizes: dict[str, int], text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        unpack(folder, tmp_path / "unpacked", **sizes)
    assert not (tmp_path / "unpacked").exists()


# What is damaged


def spoil(folder: Path, serial: int) -> None:
    flip(folder / "data/number.npy", header_size(folder / "data/number.npy") + rows_of("number", serial)[0])


@pytest.mark.parametrize("hit", [[2], [4], [3, 5], [2, 3, 4]], ids=str)
def test_what_fails_its_checksums_is_left_out_with_a_warning(
    tmp_path: Path, folder: Path, hit: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    for serial in hit:
        spoil(folder, serial)
    assert pack(folder, tmp_path / "packed") == hit
    assert dict(shown(tmp_path / "packed")).keys() == {2, 3, 4, 5} - {*hit}
    assert verify(tmp_path / "packed") == []
    for serial in hit:
        assert caplog.text.count(f"episode {serial} fails the checksum of 'number'") == 1


def test_a_copy_is_never_made_to_look_sound(tmp_path: Path, folder: Path) -> None:
    """Fault 12: neither rows nor meta, nor a row of checksums that is another episode's."""
    flip(folder / "meta/task.npy", header_size(folder / "meta/task.npy") + rows_of("task", 3)[0])
    rewrite_record(folder, 4, digest=7)
    rewrite_state(folder, clean=0, boot=[1, 2])
    spoil(folder, 5)
    assert pack(folder, tmp_path / "packed") == [3, 4, 5]
    assert shown(tmp_path / "packed") == shown(damage.example())[:1]


def test_where_nothing_is_left_there_is_no_copy(tmp_path: Path, folder: Path) -> None:
    for serial in (2, 3, 4, 5):
        spoil(folder, serial)
    with ReplayBuffer.from_folder(damage.copy_of_example(tmp_path / "empty")) as buffer:
        buffer.clear()
    for source in (folder, tmp_path / "empty"):
        with pytest.raises(NotEnoughDataError, match="no episode is left to be copied; record some"):
            pack(source, tmp_path / "packed")
        assert [path.name for path in (tmp_path / "packed").rglob("*") if path.is_file()] in ([], [".lock"])


def test_a_folder_that_holds_a_buffer_is_refused_and_left_alone(tmp_path: Path, folder: Path) -> None:
    before = listing(folder)
    for way in (pack, unpack):
        with pytest.raises(SchemaMismatchError, match="holds a buffer already"):
            way(damage.example(), folder)
    assert listing(folder) == before


# Every view

ALL = ("observation.pixels", "half", "note", "reward")


@examples(30)
@given(recordings(min_size=2), choices(by_step=True))
def test_every_view_of_a_packed_folder_is_that_of_the_grid(drawn: Any, choice: Any) -> None:
    """Batch for batch; also read beside its grid as one, which is growing."""
    whole = {name: value for name, value in choice.items() if name != "filter_fields"}
    with recorded(drawn) as (buffer, reference), tempfile.TemporaryDirectory(dir=MEMORY) as place:
        if not len(buffer):
            return
        pack(buffer.folder, f"{place}/packed")
        other = another_buffer(shutil.copytree(f"{place}/packed", f"{place}/other"))
        both, twice = ConcatBuffer([other, buffer]), joined([reference, reference])
        one = ReplayBuffer.from_folder(f"{place}/packed", read_only=True)
        offsets = {"observation.state": (-2, 1), "note": (0, 3)}
        cuts: list[tuple[dict[str, Any], Callable[[Any], Any], Any]] = [
            ({"fields": ALL, "return_mask": True}, lambda e: reference.trajectory(e, ALL), whole),
            ({"timestep_level": True, "fields": ALL}, lambda e: reference.timesteps(e, ALL), choice),
            ({"view": NStep(2, ALL, ALL, ("note",))}, lambda e: reference.transitions(e, 2, ALL, ("note",)), choice),
            ({"view": Window(3, 2, ALL, "shift", "edge")}, partial(windows, reference), choice),
            ({"view": Offsets(offsets)}, lambda e: reference.offsets(e, offsets), choice),
        ]
        for options, cut, chosen in cuts:
            known = {**chosen, "whole": "return_mask" in options}  # of which a ring forgot nothing
            assert_view(one, reference.items(cut, **known), zeros=reference.zeros, **options, **chosen)
            if "top_k" not in chosen:
                assert_view(both, items_of(twice, cut, **known), zeros=reference.zeros, **options, **chosen)
        same_batches(buffer, one)


def windows(reference: Any, episode: Any) -> Any:
    return reference.windows(episode, 3, ALL, stride=2, boundary="shift", padding="edge")


def same_batches(grid: ReplayBuffer, packed: ReplayBuffer) -> None:
    views: list[dict[str, Any]] = [
        {"view": Trajectory(final_observation=True)},
        {"slice_by_episode_len": False, "return_mask": True},
        {"window_length": 3},
        {"timestep_level": True, "shuffle": True},
    ]
    for options in views:
        pairs = zip(grid.dataloader(2, seed=1, **options), packed.dataloader(2, seed=1, **options), strict=True)
        for ours, theirs in pairs:
            for (name, values), other in zip(flat(ours).items(), flat(theirs).values(), strict=True):
                np.testing.assert_array_equal(values, other, err_msg=name)


# Beside a writer


def assert_exact(target: Path, newest: int) -> list[int]:
    """The serials of a copy: exact, without a gap, up to the newest that was there when the call began."""
    serials = damage.serials_of_exact(target)
    assert serials[-1] == newest
    return serials


@pytest.mark.parametrize("every", [1, 2])
def test_a_ring_that_is_not_faster_overwrites_nothing_that_is_still_to_be_copied(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The oldest go first, and the ring overwrites those that were copied."""
    with ReplayBuffer.from_folder(folder) as buffer:

        def publish(n: int) -> None:
            if n % every == 0:
                damage.record(buffer, int(buffer.serials[-1]) + 1, 1 + n % 4)

        with after_each_packed_episode(monkeypatch, publish):
            assert pack(folder, tmp_path / "packed") == []
    assert assert_exact(tmp_path / "packed", 5) == [2, 3, 4, 5]


def publish_a_burst(folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch, burst: int) -> list[int]:
    """What a copy leaves out while so many episodes are published at once, after the rows of the first were copied."""
    with ReplayBuffer.from_folder(folder) as buffer:

        def publish(n: int) -> None:
            for _ in range(burst if n == 0 else 0):
                damage.record(buffer, int(buffer.serials[-1]) + 1, 2)

        with after_each_packed_episode(monkeypatch, publish):
            return pack(folder, target)


@pytest.mark.parametrize(("burst", "left"), [(1, []), (2, []), (3, [2, 3, 4])])
def test_episodes_that_a_faster_ring_overwrites_are_left_out_and_told(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, burst: int, left: list[int]
) -> None:
    """Two spare slots take two; the third overwrites the episode that is being copied."""
    assert publish_a_burst(folder, tmp_path / "packed", monkeypatch, burst) == left
    assert sorted([*left, *assert_exact(tmp_path / "packed", 5)]) == [2, 3, 4, 5]


def test_a_ring_that_overwrote_all_that_was_there_is_an_error_and_leaves_no_copy(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 30."""
    with pytest.raises(NotEnoughDataError, match="a ring that turns faster than it can be read"):
        publish_a_burst(folder, tmp_path / "packed", monkeypatch, 4)
    assert [path.name for path in (tmp_path / "packed").rglob("*") if path.is_file()] == [".lock"]


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("times", [1, 3])
def test_an_episode_that_is_updated_meanwhile_is_copied_as_it_is_then(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, position: int, times: int
) -> None:
    with ReplayBuffer.from_folder(folder) as buffer:
        serial, length = int(buffer.serials[position]), int(buffer.episode_lens[position])

        def update(n: int) -> None:
            if n < times:
                buffer.update(position, number=10**6 * (n + 1) + 100 * serial + np.arange(length))

        with after_each_packed_episode(monkeypatch, update):
            pack(folder, tmp_path / "packed")
        assert assert_exact(tmp_path / "packed", 5) == [2, 3, 4, 5]
        assert shown(tmp_path / "packed") == shown(buffer)


def test_an_episode_that_never_stands_still_is_not_waited_for_for_ever(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_inside(monkeypatch, pack_rounds=4)
    with ReplayBuffer.from_folder(folder) as buffer:

        def update(n: int) -> None:
            for i in range(4):
                buffer.update(i, number=[n])

        with (
            after_each_packed_episode(monkeypatch, update),
            pytest.raises((StaleEpisodeError, NotEnoughDataError), match="pause the writer"),
        ):
            pack(folder, tmp_path / "packed")
    assert [path.name for path in (tmp_path / "packed").rglob("*") if path.is_file()] == [".lock"]


@pytest.mark.parametrize("what", ["delete", "clear"])
def test_episodes_deleted_meanwhile_are_there_as_when_the_call_began(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    whole = shown(folder)
    with ReplayBuffer.from_folder(folder) as buffer:
        work = buffer.clear if what == "clear" else partial(buffer.delete, [0, 3])
        with after_each_packed_episode(monkeypatch, lambda n: work() if n == 1 else None):
            pack(folder, tmp_path / "packed")
    assert shown(tmp_path / "packed") == whole


def test_steps_appended_meanwhile_belong_to_the_next_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = damage.make(tmp_path / "buffer", publish="step")
    damage.record(buffer, 0, 2)
    episode = buffer.begin_episode(task=1)
    step = {"observation": [0, 0, 0], "camera": {"left": np.zeros((2, 2))}, "half": 0, "text": ""}
    episode.store(number=0, **step)

    def go_on(n: int) -> None:
        if n == 2:
            episode.update({"task": 7})
            episode.final(observation=[1, 1, 1])
            episode.publish()
        elif n < 2:
            episode.store(number=n + 1, **step)

    with after_each_packed_episode(monkeypatch, go_on):
        pack(tmp_path / "buffer", tmp_path / "packed")
        pack(tmp_path / "buffer", tmp_path / "later")
    buffer.close()
    assert [len(e["number"]) for _, e in shown(tmp_path / "packed")] == [2, 1]
    assert [len(e["number"]) for _, e in shown(tmp_path / "later")] == [2, 3]
    assert verify(tmp_path / "packed") == verify(tmp_path / "later") == []


@pytest.mark.parametrize("seconds", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("publish", "updates"), [("episode", False), ("episode", True), ("step", True)])
def test_a_copy_beside_a_fast_writer_is_exact(tmp_path: Path, publish: str, updates: bool, seconds: float) -> None:
    """In another process, as fast as it can: what is copied is right, and what is not is told."""
    with damage.make(tmp_path / "ring", max_episodes=300) as buffer:
        for number in range(6):
            damage.record(buffer, number, 3)
    reader, copies = ReplayBuffer.from_folder(tmp_path / "ring", read_only=True), 0
    with damage.writer(tmp_path / "ring", publish, updates=updates):
        stop = time.monotonic() + seconds
        while time.monotonic() < stop or not copies:
            newest = int(reader.serials[-1])
            with suppress(NotEnoughDataError, StaleEpisodeError):
                left = pack(tmp_path / "ring", tmp_path / "copy")
                kept = assert_exact(tmp_path / "copy", max(dict(shown(tmp_path / "copy"))))
                assert kept[-1] >= newest
                assert left == [*range(kept[0] - len(left), kept[0])]
                copies += 1
            shutil.rmtree(tmp_path / "copy")
