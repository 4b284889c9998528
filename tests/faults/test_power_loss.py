"""Power cuts at random moments of everything that a writer does, in every state that a disk may then be in.

`durability="power"`: the folder is as it was before or after what was being done, and all that was done is there.
`durability="process"`: whatever is served was once published like that; what was flushed is there.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fault_injection
import numpy as np
import pytest
from inside import get_inside, set_inside, take_lock
from power import Disk, Operation, Recorder, boot, cuts, recording
from power_life import EPISODES, PROTOCOLS, Episode, Life
from power_survey import Cut, Mutation, broken, cut_off, left, live_again, look, new, survey
from races import FIELDS, META_FIELDS

from memmap_buffer import MemmapBufferError, NotABufferError, ReplayBuffer, repair

QUICK, MANY, PARTS = 120, 2_000, 2  # cuts


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Some steps fill a chunk, so that `stage="disk"` writes before the end."""
    set_inside(monkeypatch, staged_bytes=300)


@pytest.fixture(autouse=True)
def _every_byte_is_given_back(monkeypatch):
    """What an episode leaves behind a shorter one, however little it is, and wherever the folder lies."""
    set_inside(monkeypatch, punched_bytes=1, given_back_bytes=1, in_memory_systems=())


@pytest.fixture
def place(tmp_path):
    """In memory, where the system has such a place: folders are made and removed by the thousand."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


# The promises


@pytest.mark.parametrize("name", PROTOCOLS)
def test_no_power_cut_breaks_a_promise(place, name):
    """Faults 10, 12: some hundred of the states of the long test below."""
    protocol = PROTOCOLS[name]
    assert not broken(survey(protocol, QUICK // 3 if protocol.codec else QUICK, place))


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute, on a core of its own
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", PROTOCOLS)
def test_no_power_cut_of_many_breaks_a_promise(place, name, part):
    """Faults 10, 12: each kind of state that thousands of cuts of many writers leave, in parts side by side."""
    found = survey(PROTOCOLS[name], MANY, place, runs=20, seed=part + 1)
    assert found["states"] > MANY / 4
    assert not broken(found)


# The guard is guarded: what these protocols leave out is missed


def without(kind: str, *names: str, creating: bool = False) -> Mutation:
    """Leave an operation on some files out, or on "data", all with episodes; `creating`: while a buffer is made."""

    def mutate(log: list[Operation]) -> list[Operation]:
        out = []
        for operation, name, created in _named(log):
            meant = name in names or ("data" in names and _is_data(name))
            if not (meant and operation.kind == kind and created is not creating):
                out.append(operation)
        return out

    return mutate


def record_first(log: list[Operation]) -> list[Operation]:
    """The data and their barriers only behind the barrier of the record."""
    out: list[Operation] = []
    held: list[Operation] = []
    for operation, name, created in _named(log):
        if created and _is_data(name):
            held.append(operation)
            continue
        out.append(operation)
        if operation.kind == "barrier" and name == "episodes.npy":
            out, held = out + held, []
    return out + held


def without_a_barrier_behind_odd_generations(log: list[Operation]) -> list[Operation]:
    """Rows are changed in place, and nobody knows whether the disk has heard of it."""
    out: list[Operation] = []
    written = 0
    for operation, name, _ in _named(log):
        if name == "episodes.npy":
            if operation.kind == "barrier" and written == 8:
                continue
            written = len(operation.data)
        out.append(operation)
    return out


def _named(log: list[Operation]) -> Iterator[tuple[Operation, str, bool]]:
    """Each operation, the name of its file, and whether no buffer is being made."""
    names, created = {operation.other: operation.name for operation in log if operation.kind == "create"}, False
    for operation in log:
        created = {("create", "schema.json.new"): False, ("rename", "schema.json.new"): True}.get(
            (operation.kind, operation.name), created
        )
        yield operation, names.get(operation.target, ""), created


def _is_data(name: str) -> bool:
    return name.endswith(".npy") and name not in ("episodes.npy", "state.npy")


MUTATIONS = {
    "the record before the data": (record_first, "wrong"),
    "no barrier before the record": (without("barrier", "data"), "wrong"),
    "no barrier behind the record": (without("barrier", "episodes.npy"), "lost"),
    "no barrier behind what is cleared": (without("barrier", "state.npy"), "between"),
    "no barrier before schema.json is renamed": (without("barrier", "schema.json.new", creating=True), "lost"),
    "no fsync of the folders": (without("sync", "", creating=True), "lost"),
    "no barrier behind .redo": (without("barrier", ".redo"), "lost"),
    "no barrier before rows are changed in place": (without_a_barrier_behind_odd_generations, "wrong"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_power_protocol_without_one_of_its_steps_is_found_out(place, name):
    """Faults 13, 14."""
    mutate, broken = MUTATIONS[name]
    seeds = (survey(PROTOCOLS["power"], 100, place / str(n), runs=1, seed=n, mutate=mutate) for n in range(30))
    assert any(found[broken] for found in seeds)


@pytest.mark.parametrize("name", ["power", "power, by step"])
def test_space_given_back_from_a_row_too_early_is_found_out(place, name, monkeypatch):
    """Fault 13."""
    give_back = get_inside("give_back")
    set_inside(monkeypatch, give_back=lambda self, slot, start, stop: give_back(self, slot, start - 1, stop))
    seeds = (survey(PROTOCOLS[name], 100, place / str(n), runs=1, seed=n) for n in range(30))
    assert any(found["wrong"] for found in seeds)


@pytest.mark.parametrize("what", ["compare", "doubt"])
def test_what_a_crash_spoilt_would_be_served_without_checks(place, what, monkeypatch):
    """Fault 14: no checksum is compared; or the next writer takes for its own what it found."""
    if what == "compare":
        set_inside(monkeypatch, damaged=lambda *_: [])
    else:
        write = get_inside("write_state")

        def trusting(files, name, value, *where, **how):
            write(files, name, 0 if name == "suspect" else value, *where, **how)

        set_inside(monkeypatch, write_state=trusting)
    seeds = (survey(PROTOCOLS["process"], 100, place / str(n), runs=1, seed=n) for n in range(30))
    assert any(found["wrong"] for found in seeds)


# One crash at a time


def crashed(place: Path) -> tuple[Path, dict[int, Episode]]:
    """A folder of 4 equally long episodes, as a writer leaves it that the power cut stops, and what they are."""
    with boot(1), recording() as recorder:
        life = Life(place / "closed", PROTOCOLS["process, fixed lengths"], recorder, random.Random(0))
        for _ in range(EPISODES):
            life.publish()
        shutil.copytree(life.folder, place / "crashed")
        life.buffer.close()
    return place / "crashed", life.now


def spoil(folder: Path, name: str, slot: int) -> None:
    """Zeros in the middle of what a slot holds of a field, as from a sector that the disk did not get to."""
    array = np.load(folder / "data" / f"{name}.npy", mmap_mode="r+")
    array[slot, 2:4] = 0
    array.flush()


def test_damage_of_a_crash_is_dropped_and_reported_and_the_rest_exact(place, caplog):
    """Fault 12."""
    folder, episodes = crashed(place)
    spoil(folder, "value", 1)
    spoil(folder, "observation", 3)
    with boot(2), ReplayBuffer.from_folder(folder) as buffer:
        assert buffer.serials.tolist() == [0, 1, 2, 3]  # opening reads no data
        shown = {int(s) for batch in buffer.dataloader(4, return_indices=True) for s in batch["_index"]}
        assert shown == {0, 2}
        assert buffer.serials.tolist() == [0, 2]
        assert [Episode(buffer.episode(i)) for i in range(2)] == [episodes[0], episodes[2]]
    assert "episode 1 fails the checksum of 'value'" in caplog.text
    assert "episode 3 fails the checksum of 'observation'" in caplog.text


def test_a_damaged_episode_is_never_answered_with_another(place):
    """Fault 12: asked for by its position."""
    folder, episodes = crashed(place)
    spoil(folder, "value", 1)
    with boot(2), ReplayBuffer.from_folder(folder, read_only=True) as buffer:
        serials = buffer.serials.tolist()
        data = buffer.episode(1)
        assert buffer.serials.tolist() == [0, 2, 3] != serials
        assert Episode(data) == episodes[2]  # what stands at that position now
        assert buffer.get_all_data()["serial"].tolist() == [0, 2, 3]


def test_damage_of_many_episodes_does_not_stop_a_loader(place):
    """Fault 12: what is drawn in the place of a damaged episode may be damaged as well, again and again."""
    with boot(1), recording():
        buffer = ReplayBuffer(place / "closed", 300, 4, {"x": "int"})
        for number in range(300):
            buffer.store_episode(x=np.full(4, number))
        shutil.copytree(place / "closed", place / "crashed")
        buffer.close()
    rows = np.load(place / "crashed" / "data" / "x.npy", mmap_mode="r+")
    rows[:270] = -1
    rows.flush()
    with boot(2), ReplayBuffer.from_folder(place / "crashed", read_only=True) as reader:
        for batch in reader.dataloader(8, timestep_level=True, shuffle=True, seed=0):
            assert batch["x"].min() >= 270


@pytest.mark.parametrize("what", [{"value": 7}, {"version": 7}], ids=["rows", "meta"])
def test_an_update_does_not_make_damage_look_sound(place, what):
    """Fault 12: rows that an update leaves as they are get no checksum of what a crash made of them."""
    folder, episodes = crashed(place)
    spoil(folder, "value", 1)
    with boot(2):
        with ReplayBuffer.from_folder(folder) as buffer, suppress(MemmapBufferError):
            buffer.update(1, **what)
        state, _ = look(folder, random.Random(0))
    assert state is not None
    assert {serial: state[serial] for serial in (0, 2, 3)} == {serial: episodes[serial] for serial in (0, 2, 3)}
    assert 1 not in state


@pytest.mark.parametrize("verify", ["auto", "always", "read"])
def test_an_update_that_is_finished_after_a_crash_is_checked_like_the_rest(place, verify):
    """Fault 12: even of the newest episode, and where the next serial did not reach the disk."""
    folder, episodes = crashed(place)

    def die(tell):
        buffer = ReplayBuffer.from_folder(folder)
        take_lock(buffer)
        with fault_injection.system(kill=True, at=3, only=("pwrite",)):  # .redo, the odd generation, then the rows
            buffer.update(3, value=7)

    with boot(1):
        assert fault_injection.in_child(die).status == fault_injection.KILLED
    assert (folder / ".redo").exists()
    spoil(folder, "observation", 3)
    state = np.load(folder / "state.npy", mmap_mode="r+")
    state["next"] = 3
    state.flush()
    with boot(2):
        shown, _ = look(folder, random.Random(0), verify=verify)
        assert shown == {serial: episodes[serial] for serial in range(3)}


def at_the_end(life: Life, recorder: Recorder, operations: int) -> Iterator[tuple[Disk, int]]:
    """The disk and the folder at each of the last operations of a life."""
    log, folder, disk = list(recorder.log), recorder.folder(life.folder), Disk()
    life.buffer.close()
    for at, operation in enumerate(log):
        disk.play(operation)
        if at >= len(log) - operations:
            yield disk, folder


def test_a_group_reaches_the_disk_in_the_order_of_its_serials(place):
    """Fault 10: no gap, wherever the records of its slots lie."""
    found, seen, rng = Counter[str](), set[Any](), random.Random(0)
    with boot(1), recording() as recorder:
        life = Life(place / "ring", PROTOCOLS["power, groups of 3"], recorder, rng)
        for _ in range(9):  # the last three go to slots at the end and at the beginning of the table
            life.publish()
    for disk, folder in at_the_end(life, recorder, 20):
        for _ in range(20):
            if new(cut := Cut(disk, folder, rng), seen):
                found.update(cut_off(cut, life, place / "cut", rng))
    assert not broken(found)


@pytest.mark.parametrize(
    "seeds",
    [[3], *(pytest.param(range(first, first + 10), marks=pytest.mark.slow) for first in (1000, 1010, 1020, 1030))],
)
@pytest.mark.parametrize("last", ["open_steps", "update"])
def test_a_writer_without_barriers_that_takes_over_loses_nothing_that_was_on_the_disk(place, last, seeds):
    """Fault 10: what it closes or finishes for a dead writer was there, and stays; from each kind of state."""
    found, seen = Counter[str](), set[Any]()
    for seed in seeds:
        rng = random.Random(seed)
        with boot(1), recording() as recorder:
            life = Life(place / f"ring{seed}", PROTOCOLS["power, by step"], recorder, rng)
            life.by_step()
            getattr(life, last)()
        for disk, folder in at_the_end(life, recorder, 15):
            for _ in range(8):
                if new(cut := Cut(disk, folder, rng), seen):
                    live_again(cut, life, place / "again", rng, found, same=False)
    assert found["lives"]
    assert not broken(found)


def test_a_repair_does_not_make_damage_look_sound(place):
    """Fault 12: nor what comes back to sight when it takes something out."""
    found = Counter[str]()
    for number in range(30):
        rng = random.Random(number)
        with boot(1), recording() as recorder:
            life = Life(place / str(number), PROTOCOLS["process"], recorder, rng)
            life.live(12)
            log, folder = list(recorder.log), recorder.folder(life.folder)
            life.buffer.close()
        for disk in cuts(log, 4, rng):
            with left(disk.cut(folder, rng), place / "cut"), suppress(NotABufferError):
                repair(place / "cut")
                schema = ReplayBuffer.from_folder(place / "cut", read_only=True).schema
                if {*FIELDS, *META_FIELDS} == set(schema.all):  # else one was lost
                    state, differs = look(place / "cut", rng)
                    found.update(differs + Counter(wrong=life.strangers(state)))
    assert not +found


def test_after_a_clean_close_nothing_is_verified(place, monkeypatch):
    """Fault 15: and after a crash each episode once, when it is first read."""
    folder, episodes = crashed(place)
    checked = []
    damaged = get_inside("damaged")
    set_inside(monkeypatch, damaged=lambda self, slot: checked.append(slot) or damaged(self, slot))
    for closed, expected in ((place / "closed", []), (folder, [0, 1, 2, 3])):
        with boot(2), ReplayBuffer.from_folder(closed, read_only=True) as buffer:
            for _ in range(2):
                assert [Episode(buffer.episode(i)) for i in range(EPISODES)] == list(episodes.values())
        assert sorted(checked) == expected


# The model


def outcomes(place: Path, work: Callable[[Recorder, int], Any]) -> list[dict[str, bytes]]:
    """What may be left of a folder, of many cuts behind some work."""
    path, disk, found = place / "model", Disk(), []
    path.mkdir()
    with recording() as recorder:
        directory = os.open(path, os.O_RDONLY)
        work(recorder, directory)
        os.close(directory)
        for operation in recorder.log:
            disk.play(operation)
        for seed in range(200):
            disk.cut(recorder.folder(path), random.Random(seed)).write(place / "cut")
            found.append({file.name: file.read_bytes() for file in (place / "cut").iterdir()})
            shutil.rmtree(place / "cut")
    return found


def put(system: Recorder, directory: int, name: str, *pieces: tuple[int, bytes]) -> int:
    fd = system.create(name, directory)
    for offset, data in pieces:
        system.pwrite(fd, data, offset)
    return fd


def test_the_model_loses_only_what_is_behind_a_barrier_sector_by_sector(place):
    def work(system: Recorder, directory: int) -> None:
        fd = put(system, directory, "a", (0, b"1" * 600))
        system.barrier(fd)
        system.sync_folder(directory)
        system.pwrite(fd, b"2" * 600, 0)
        system.pwrite(fd, b"3" * 8, 504)
        os.close(fd)

    sectors = {(left["a"][:512], left["a"][512:]) for left in outcomes(place, work)}
    first = {b"1" * 512, b"2" * 512, b"2" * 504 + b"3" * 8}
    assert sectors == {(a, b * 88) for a in first for b in (b"1", b"2")}


def test_the_model_empties_a_renamed_file_that_had_no_barrier_and_keeps_the_order_of_names(place):
    def work(system: Recorder, directory: int) -> None:
        os.close(put(system, directory, "a", (0, b"new")))
        os.close(put(system, directory, "b"))
        system.rename("a", "c", directory)
        system.unlink("b", directory)

    names = {tuple(sorted(left)) for left in outcomes(place, work)}
    assert names == {(), ("a",), ("a", "b"), ("b", "c"), ("c",)}
    shutil.rmtree(place / "model")
    assert {left["c"] for left in outcomes(place, work) if "c" in left} >= {b"", b"new"}
