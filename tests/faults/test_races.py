"""Readers beside a writer that turns a ring of 8 slots as fast as it can: no row is ever another's."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any

import fault_injection
import numpy as np
import pytest
import torch
from inside import changes_of, get_inside, set_inside, take_lock
from races import CODED, FIELDS, LONGEST, RING, VIEWS, Beside, Truth, after, create, race, read, turn, wrong

from memmap_buffer import ReplayBuffer, StaleEpisodeError, Window, verify

# name -> (what is written, how, how the buffer is made)
RACES: dict[str, tuple[Truth, dict[str, Any], dict[str, Any]]] = {
    "fixed lengths": (Truth(), {}, {}),
    "varied lengths": (Truth(varied=True), {}, {}),
    "limited steps": (Truth(varied=True), {}, {"capacity": 5 * LONGEST}),
    "by step": (Truth(varied=True, finals=False, growing=True), {"publish": "step"}, {}),
    "compressed": (Truth(varied=True), {}, {"fields": CODED}),
    "compressed, by step": (Truth(varied=True, finals=False, growing=True), {"publish": "step"}, {"fields": CODED}),
}
ONE = Truth(varied=True)


def run(place, name: str, seconds: float) -> Counter[str]:
    truth, how, made = RACES[name]
    create(place / "ring", **made)
    readers = 2 if "fields" in made else 4  # who decodes takes the processors from the writer
    counts = race(place / "ring", truth, seconds, readers=readers, updates=True, **how)
    assert all(counts[view] for view in (*VIEWS, "episode")), counts
    return counts


@pytest.fixture
def ring(tmp_path, request):
    """A full ring; of compressed fields where the test asks for it."""
    create(tmp_path / "ring", fields=getattr(request, "param", FIELDS))
    turn(tmp_path / "ring", ONE, after(RING))
    return tmp_path / "ring"


def laps(ring, count: int = 3 * RING) -> None:
    turn(ring, ONE, after(count))


def unchecked(monkeypatch) -> None:
    """Readers believe what they copied."""
    set_inside(monkeypatch, unchanged=lambda self: np.ones(self.anchors.size, bool))


# In processes of their own


@pytest.mark.parametrize("name", [name for name in RACES if name != "compressed, by step"])
def test_no_reader_sees_a_row_of_another_episode(tmp_path, name):
    """Faults 28, 29: a second of the long test below."""
    counts = run(tmp_path, name, 0.7)
    assert not counts["wrong"]
    assert not counts["went back"]
    assert not counts["StaleEpisodeError"] and not counts["NotEnoughDataError"], counts


@pytest.mark.slow
@pytest.mark.parametrize("name", RACES)
def test_no_reader_sees_a_row_of_another_episode_for_long(tmp_path, name, record_property):
    """Faults 28, 29: 20 s each; of two idle processors in all more than a million rows."""
    counts = run(tmp_path, name, 20)
    record_property("counts", dict(counts))
    assert not counts["wrong"]
    assert not counts["went back"]
    assert not counts["StaleEpisodeError"] and not counts["NotEnoughDataError"], counts


def test_without_the_check_readers_see_rows_of_other_episodes(tmp_path, monkeypatch):
    """Fault 28: the guard is guarded."""
    unchecked(monkeypatch)
    for attempt in range(10):
        (tmp_path / str(attempt)).mkdir()
        if run(tmp_path / str(attempt), "fixed lengths", 0.7)["wrong"]:
            return
    pytest.fail("no wrong row in 10 races")


@pytest.mark.parametrize("name", ["varied lengths", "compressed"])
def test_a_copy_beside_a_writer_is_exact(tmp_path, name):
    """Fault 28: each field's rows and blobs are of one episode, also where it was updated meanwhile."""
    truth, how, made = RACES[name]
    create(tmp_path / "ring", **made)
    turn(tmp_path / "ring", truth, after(RING))
    writer = Beside(lambda: turn(tmp_path / "ring", truth, (tmp_path / "over").exists, updates=True, **how))
    source, copies = ReplayBuffer.from_folder(tmp_path / "ring", read_only=True), []
    for number in itertools.count():
        with suppress(StaleEpisodeError):  # it turns faster than it is copied
            source.snapshot(tmp_path / str(number))
            copies.append(tmp_path / str(number))
        if copies and number >= 4:
            break
    (tmp_path / "over").touch()
    writer.result()
    for copy in copies:
        assert verify(copy) == [] and not read(copy, truth, after(1))["wrong"]


# At the worst moment


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_what_is_overwritten_while_it_is_copied_is_drawn_again(ring, monkeypatch, in_the_middle, view, checked):
    """Faults 28, 30: the ring turns between two fields of a batch. Without the check the batch is a mix."""
    if not checked:
        unchecked(monkeypatch)
    reader = ReplayBuffer.from_folder(ring, read_only=True)
    in_the_middle(lambda: laps(ring))
    batch = reader.sample(64, view=VIEWS[view], return_indices=True, seed=1)
    assert wrong(batch, ONE).any() != checked
    serial = batch["_index"] if "_index" in batch else batch["_indices"][:, 0]
    assert (serial.min() >= 3 * RING) == checked


@pytest.mark.parametrize("lookup", [1, 2], ids=["of the first episode", "of those that follow"])
def test_a_window_that_would_run_on_from_an_episode_that_left_is_drawn_again(tmp_path, monkeypatch, lookup):
    """Faults 28, 30: the slot holds a shorter episode by the time its record is taken, which ends before the anchor."""
    with ReplayBuffer(tmp_path / "ring", 3, 40, {"n": "int"}, circular=True) as buffer:
        for serial in range(3):
            buffer.store_episode(n=100 * serial + np.arange(40))
        at, lookups = get_inside("folder_at"), itertools.count(1)

        def overtaken(*arguments):
            for serial in range(3, 7) if next(lookups) == lookup else ():
                buffer.store_episode(n=[100 * serial])
            return at(*arguments)

        set_inside(monkeypatch, folder_at=overtaken)
        batch = buffer.sample(64, view=Window(3, boundary="continue", return_steps=True), seed=1)
    assert (batch["n"] == batch["_steps"] @ torch.tensor([100, 1])).all() and batch["_is_last"].all()
    assert batch["_steps"][:, 0, 0].tolist() == [4] * 64


def test_a_window_does_not_run_on_into_an_episode_that_is_deleted_meanwhile(tmp_path, monkeypatch):
    """Fault 30: its own episode stays, so that only the record of the one that follows tells."""
    with ReplayBuffer(tmp_path / "buffer", 3, 4, {"n": "int"}) as buffer:
        for serial in range(3):
            buffer.store_episode(n=100 * serial + np.arange(4))
        at, lookups = get_inside("folder_at"), itertools.count(1)

        def overtaken(*arguments):
            if next(lookups) == 2:
                buffer.delete([1])
            return at(*arguments)

        set_inside(monkeypatch, folder_at=overtaken)
        batch = buffer.sample(64, view=Window(3, boundary="continue", return_steps=True), seed=1)
    assert (batch["n"] == batch["_steps"] @ torch.tensor([100, 1])).all()
    assert {*batch["_steps"][..., 0].flatten().tolist()} == {0, 2}


@pytest.mark.parametrize("ring", [CODED], indirect=True, ids=["compressed"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_blob_that_is_overwritten_while_it_is_copied_is_drawn_again(ring, in_the_middle, view):
    """Faults 28, 30: bytes that cannot be decoded are no error where their episode is gone."""
    reader = ReplayBuffer.from_folder(ring, read_only=True)
    in_the_middle(lambda: laps(ring))
    batch = reader.sample(64, view=VIEWS[view], return_indices=True, seed=1)
    assert not wrong(batch, ONE).any()
    assert (batch["_index"] if "_index" in batch else batch["_indices"][:, 0]).min() >= 3 * RING


@pytest.mark.parametrize("view", VIEWS)
def test_a_reader_many_laps_behind_draws_again(ring, view):
    """Fault 30: its index is of episodes that are long gone."""
    dataset = ReplayBuffer.from_folder(ring, read_only=True).dataset(view=VIEWS[view], return_indices=True)
    laps(ring)
    batch = dataset.__getitems__(list(range(len(dataset)))).data
    assert not wrong(batch, ONE).any()
    assert (batch["serial"] >= 3 * RING).all()


def test_a_reader_many_laps_behind_is_told_if_it_asks(ring):
    """Fault 30."""
    reader = ReplayBuffer.from_folder(ring, read_only=True)
    dataset = reader.dataset(timestep_level=True, on_stale="raise")
    epoch = iter(reader.dataloader(4, timestep_level=True, on_stale="raise"))
    next(epoch)
    laps(ring)
    with pytest.raises(StaleEpisodeError, match="overwritten"):
        dataset[0]
    with pytest.raises(StaleEpisodeError, match="overwritten"):
        for _ in epoch:
            pass


def test_an_update_that_ends_while_the_records_are_looked_at_hides_nothing(ring, monkeypatch):
    """Fault 28: that it is over by then does not bring back what the copy of the records lacks."""
    reader, writer = ReplayBuffer.from_folder(ring, read_only=True), ReplayBuffer.from_folder(ring)
    before, stands, goes_on, columns = reader.serials.tolist(), Event(), Event(), get_inside("columns")
    generations = np.load(ring / "episodes.npy", mmap_mode="r")["generation"]
    writer.update(-1, version=0)
    told = changes_of(ring)

    def stand_still():
        if (generations % 2).any() and changes_of(ring) > told and not stands.is_set():
            stands.set()
            goes_on.wait(10)

    def update():
        with fault_injection.system(before=stand_still):
            writer.update(-1, value=ONE.episode(before[-1], 5)["value"], version=5)

    def then_it_ends(storage):
        copied = columns(storage)
        if stands.is_set() and storage.read_only:
            goes_on.set()
            updated.result(10)
        return copied

    with ThreadPoolExecutor(1) as thread:
        updated = thread.submit(update)
        assert stands.wait(10)
        set_inside(monkeypatch, columns=then_it_ends)
        assert reader.serials.tolist() == before
        assert updated.done()
    writer.close()


@pytest.mark.parametrize("ring", [FIELDS, CODED], indirect=True, ids=["raw", "compressed"])
def test_an_update_while_it_is_copied_gives_the_old_or_the_new(ring, in_the_middle):
    """Fault 28: never some fields of one and some of the other."""
    reader, writer = ReplayBuffer.from_folder(ring, read_only=True), ReplayBuffer.from_folder(ring)

    def change():
        for i, serial in enumerate(writer.serials.tolist()):
            writer.update(i, value=ONE.episode(serial, 5)["value"], version=5)

    in_the_middle(change)
    batch = reader.sample(64, timestep_level=True, return_indices=True)
    assert not wrong(batch, ONE).any()
    assert (batch["version"] == 5).all()
    writer.close()


def test_an_episode_stays_visible_while_its_update_stands_still(ring):
    """Fault 28: a writer that gets no processor for a while hides nothing that it had published."""
    reader, writer = ReplayBuffer.from_folder(ring, read_only=True), ReplayBuffer.from_folder(ring)
    before, seen = reader.serials.tolist(), []
    generations = np.load(ring / "episodes.npy", mmap_mode="r")["generation"]

    def update():
        with fault_injection.system(before=lambda: time.sleep(0.1 * (generations % 2).any())):
            writer.update(-1, value=ONE.episode(before[-1], 5)["value"], version=5)

    with ThreadPoolExecutor(1) as thread:
        updated = thread.submit(update)
        while not updated.done():
            seen.append(reader.serials.tolist())
            time.sleep(0.001)  # for the writer's thread
    updated.result()
    assert len(seen) > 1 and all(serials == before for serials in seen)
    writer.close()


def test_who_opens_a_folder_in_the_middle_of_an_update_sees_the_episode(ring):
    """Fault 28: the records alone do not tell of it then."""
    before = ReplayBuffer.from_folder(ring, read_only=True).serials.tolist()
    writer, opened = ReplayBuffer.from_folder(ring), []
    generations = np.load(ring / "episodes.npy", mmap_mode="r")["generation"]

    def serials():
        return ReplayBuffer.from_folder(ring, read_only=True).serials.tolist()

    def open_once():
        if (generations % 2).any() and not opened:
            opened.append(threads.submit(serials))
            time.sleep(0.05)  # in which it meets the episode under an odd generation

    with ThreadPoolExecutor(1) as threads, fault_injection.system(before=open_once):
        writer.update(-1, value=ONE.episode(before[-1], 5)["value"], version=5)
    assert [seen.result() for seen in opened] == [before]
    writer.close()


def test_an_episode_that_changes_after_it_was_read_keeps_its_final_observation(ring, monkeypatch):
    """Fault 28: nothing about it is asked later."""
    reader, take = ReplayBuffer.from_folder(ring, read_only=True), get_inside("read_batch")

    def late(self, anchors):
        batch = take(self, anchors)
        laps(ring)
        return batch

    set_inside(monkeypatch, read_batch=late)
    serials = set()
    for i in (-2, -1):
        episode = reader.episode(i)
        serials.add(int(episode["serial"]))
        expected = ONE.episode(int(episode["serial"]))
        np.testing.assert_array_equal(episode["observation"], expected["observation"])
    assert {ONE.has_final(serial) for serial in serials} == {True, False}


def test_a_slot_whose_writer_died_is_skipped_by_readers_and_used_by_the_next_writer(ring):
    """Fault 31: its generation stays odd for ever."""
    reader = ReplayBuffer.from_folder(ring, read_only=True)
    before = reader.serials.tolist()

    def die(tell):
        with ReplayBuffer.from_folder(ring) as buffer:
            buffer.flush()
            take_lock(buffer)
            with fault_injection.system(kill=True, at=3, only=("pwrite",)):
                buffer.store_episode(**ONE.episode(RING))

    assert fault_injection.in_child(die).status == fault_injection.KILLED
    generations = np.load(ring / "episodes.npy")["generation"]
    assert (generations % 2).sum() == 1
    counts = read(ring, ONE, after(2))
    assert counts["rows"]
    assert not counts["wrong"]
    assert reader.serials.tolist() == before
    laps(ring, 1)
    generations = np.load(ring / "episodes.npy")["generation"]
    assert not (generations % 2).any()
    assert reader.serials.tolist() == [*before[1:], RING]
    assert not wrong(reader.sample(64, timestep_level=True, return_indices=True), ONE).any()
