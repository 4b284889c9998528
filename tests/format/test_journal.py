"""The one account of what is visible: who follows it is told of every change, whoever else does so in between."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from damage import record_of, rewrite_record, rewrite_state
from fault_injection import in_child
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inside import changes_of, files_of, num_remembered_as_gone, storage_of
from profiles import examples
from specification import DELETED

from memmap_buffer import ReplayBuffer, SchemaMismatchError, repair
from memmap_buffer.format import journal, records
from memmap_buffer.format.journal import REMEMBERED
from memmap_buffer.format.storage import Storage

LENGTH = 4


def make(folder: Path, count: int = 0, **options: Any) -> ReplayBuffer:
    options = {"max_episodes": 6, "max_timesteps": LENGTH, "circular": True, **options}
    buffer = ReplayBuffer(folder, fields={"x": "float"}, **options)
    for value in range(count):
        store(buffer, value)
    return buffer


def store(buffer: ReplayBuffer, value: float, length: int = LENGTH) -> None:
    buffer.store_episode(x=np.full(length, value))


def shown_by(storage: Storage) -> list[tuple[int, int, int]]:
    """(serial, start, stop) of what a folder shows."""
    table = storage.refresh()
    columns = (table.serial, table.start, table.length)
    return list(zip(*(column[table.visible].tolist() for column in columns), strict=True))


class Follower:
    """What keeps (serial + 1, steps) of each slot, by the changes that it is told of."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.mark = storage, 0
        self.pairs: dict[int, tuple[int, int]] = {}

    def follow(self) -> None:
        account = self.storage.journal
        with account.lock:
            change = account.follow(self.storage, self.mark)
            slots = np.arange(self.storage.layout.slots) if change.slots is None else change.slots
            told = np.asarray(account.pairs(slots)).reshape(-1, 2)
            if change.others is not None:
                assert {*np.asarray(change.moved[0]).tolist(), *change.others.tolist()} == {*slots.tolist()}
                for slot, left, added in zip(*change.moved, strict=True):
                    (serial, steps), i = self.pairs[slot], slots.tolist().index(slot)
                    start, stop = (steps & 0xFFFFFFFF) + left, (steps >> 32) + added
                    assert slot in change.others or (serial, start | stop << 32) == tuple(told[i].tolist())
            self.pairs.update(zip(slots.tolist(), map(tuple, told.tolist()), strict=True))
            self.mark, whole = change.mark, account.whole(self.storage)
            assert whole.slots_at(np.arange(len(whole))).tolist() == self.storage.refresh().whole.tolist()

    def shown(self) -> list[tuple[int, int, int]]:
        pairs = sorted(pair for pair in self.pairs.values() if pair[0])
        return [(serial - 1, steps & 0xFFFFFFFF, steps >> 32) for serial, steps in pairs]


class Life(RuleBasedStateMachine):
    """A folder that is changed in every way; followers, however far behind, come to know what a new reader reads.

    One object follows beside the writer, another one is of another reader.
    """

    @initialize(kind=st.sampled_from(["episodes", "steps", "few episodes"]), fewer=st.sampled_from([0, journal.FEWER]))
    def create(self, kind: str, fewer: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(journal, "FEWER", fewer)
        self.folder = Path(tempfile.mkdtemp()) / "buffer"
        sizes = {"capacity": 15} if kind == "steps" else {"max_episodes": 3} if kind == "few episodes" else {}
        self.buffer = make(self.folder, publish="step", spare_slots=4, **sizes)
        self.beside = Storage.open(self.folder, read_only=True)
        self.followers = [Follower(storage) for storage in (storage_of(self.buffer), self.beside) for _ in range(3)]
        self.value = self.num_envs = 0

    @rule(length=st.integers(1, LENGTH), again=st.sampled_from([1, 1, 2, 9]))
    def store(self, length: int, again: int) -> None:
        for _ in range(again):
            self.value += 1
            store(self.buffer, self.value, length)

    @rule(size=st.integers(1, 3), again=st.sampled_from([1, 2, 30]))
    def add(self, size: int, again: int) -> None:
        if self.num_envs != size:
            self.buffer.end_episodes()
        self.num_envs = size
        for _ in range(again):
            self.buffer.add(x=np.full(size, self.value))

    @rule(place=st.integers(0, 20))
    @precondition(lambda self: self.buffer.num_episodes > 0)
    def delete(self, place: int) -> None:
        self.buffer.end_episodes()
        if self.buffer.num_episodes:
            self.buffer.delete(place % self.buffer.num_episodes)

    @rule(place=st.integers(0, 20))
    @precondition(lambda self: self.buffer.num_episodes > 0)
    def update(self, place: int) -> None:
        self.buffer.end_episodes()
        if self.buffer.num_episodes:
            self.buffer.update(place % self.buffer.num_episodes, x=-1.0)

    @rule()
    def clear(self) -> None:
        self.buffer.end_episodes()
        self.buffer.clear()

    @rule()
    def many_changes(self) -> None:
        """More than the folder's journal names."""
        for _ in range(12):
            files_of(self.buffer).changed(np.zeros(100, np.int64))

    @rule(which=st.integers(0, 5))
    def follow(self, which: int) -> None:
        self.followers[which].follow()

    @rule()
    def find_damage(self) -> None:
        """Each object of its own: what one finds damaged the other shows."""
        table = self.beside.refresh()
        if len(table) > 1 and not self.beside.num_damaged:
            self.beside.void([(table.visible.item(0), "is taken for damaged")])

    @invariant()
    def all_know_the_same(self) -> None:
        if not hasattr(self, "buffer"):
            return
        expected = shown_by(Storage.open(self.folder, read_only=True))
        assert shown_by(storage_of(self.buffer)) == expected
        if not self.beside.num_damaged:
            assert shown_by(self.beside) == expected

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            for follower in self.followers:
                follower.follow()
                assert follower.shown() == shown_by(follower.storage)
            self.buffer.close()
            self.patch.undo()
            shutil.rmtree(self.folder.parent)


TestLife = Life.TestCase
TestLife.settings = examples(60)


def test_tables_that_others_hold_stay_as_they_were(tmp_path: Path) -> None:
    buffer = make(tmp_path, publish="step", spare_slots=2, capacity=9)
    tables: list[tuple[Any, list[Any]]] = []
    for step in range(60):
        buffer.add(x=np.full(2, step))
        if step % 3 == 0:
            table = storage_of(buffer).refresh()
            tables.append((table, [table.visible.tolist(), *(column.tolist() for column in table.columns)]))
        for table, before in tables[-5:]:
            assert [table.visible.tolist(), *(column.tolist() for column in table.columns)] == before


def test_who_is_many_steps_behind_follows_to_where_others_are(tmp_path: Path) -> None:
    buffer = make(tmp_path, publish="step", spare_slots=2, max_timesteps=5000)
    follower = Follower(storage_of(buffer))
    buffer.add(x=0.0)
    follower.follow()
    for step in range(REMEMBERED):
        buffer.add(x=float(step))
        assert buffer.num_steps == step + 2
    account = storage_of(buffer).journal
    with account.lock:
        assert account.follow(storage_of(buffer), follower.mark).slots is not None
    follower.follow()
    assert follower.shown() == [(0, 0, REMEMBERED + 1)]


def test_who_follows_a_ring_does_not_remember_each_episode_that_it_gave_up(tmp_path: Path) -> None:
    buffer = make(tmp_path, publish="step", capacity=40, max_episodes=40)
    follower = Follower(storage_of(buffer))
    for value in range(60):
        store(buffer, value)
        follower.follow()
        assert num_remembered_as_gone(buffer) <= 2
    assert storage_of(buffer).journal.head > 20


def test_nobody_waits_for_an_open_episode_that_a_ring_retired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer goes on with it, with an odd generation, as that of an episode is that an `update` hides a moment."""
    waits: list[float] = []
    rng, size = np.random.default_rng(0), 20
    sizes = {"max_episodes": size + 2, "max_timesteps": 99, "capacity": 10**4, "spare_slots": size + 2}
    buffer = make(tmp_path, publish="step", **sizes)
    followers = [Follower(storage) for storage in (storage_of(buffer), Storage.open(tmp_path, read_only=True))]
    monkeypatch.setattr(journal.time, "sleep", waits.append)
    monkeypatch.setattr(journal, "UPDATE_SECONDS", 0.01)
    for step in range(60):
        buffer.add(x=np.zeros(size))
        buffer.end_episodes(rng.random(size) < 0.1)
        for follower in followers if step % 3 == 0 else ():
            follower.follow()
            assert follower.shown() == shown_by(follower.storage)
    assert not waits


@pytest.mark.parametrize("change", ["drop_field", "rename_field"])
@pytest.mark.parametrize("options", [{}, {"prioritized": True}, {"n_steps": 1}], ids=str)
def test_a_reader_whose_schema_was_changed_is_told_and_gets_no_rows_of_others(
    tmp_path: Path, change: str, options: dict[str, Any]
) -> None:
    buffer = ReplayBuffer(tmp_path, 4, LENGTH, {"x": "float", "y": "float"}, circular=True)
    for value in range(4):
        buffer.store_episode(x=np.full(LENGTH, value), y=np.full(LENGTH, value))
    reader = ReplayBuffer.from_folder(tmp_path)
    draw: dict[str, Any] = {"timestep_level": True, **options} if "n_steps" not in options else options
    reader.sample(4, **draw)
    buffer.drop_field("y") if change == "drop_field" else buffer.rename_field("y", "z")
    for value in range(10, 14):
        given = {} if change == "drop_field" else {"z": np.full(LENGTH, value)}
        buffer.store_episode(x=np.full(LENGTH, value), **given)
        with pytest.raises(SchemaMismatchError, match="y"):
            reader.sample(4, **draw)


@pytest.mark.parametrize("fewer", [0, journal.FEWER])
@pytest.mark.parametrize(("start", "stop"), [(0, 3), (0, 1), (2, 2), (1, 2**32 - 1)])
def test_steps_that_an_episode_cannot_show_are_not_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, stop: int, fewer: int
) -> None:
    monkeypatch.setattr(journal, "FEWER", fewer)
    buffer = make(tmp_path)
    for value in range(3):
        store(buffer, value, length=2)
    reader = Storage.open(tmp_path, read_only=True)
    follower = Follower(reader)
    follower.follow()
    rewrite_record(tmp_path, 1, start=start, stop=stop, check=int(record_of(tmp_path, 1)["check"]))
    files_of(buffer).changed(np.array([1]))
    follower.follow()
    assert follower.shown() == shown_by(reader) == shown_by(Storage.open(tmp_path, read_only=True))
    assert follower.shown() == [(0, 0, 2), (2, 0, 2)]


def test_a_base_that_a_repair_lowers_is_taken_in(tmp_path: Path) -> None:
    make(tmp_path, 3).close()
    rewrite_state(tmp_path, base=10**6)
    reader = Storage.open(tmp_path, read_only=True)
    follower = Follower(reader)
    follower.follow()
    assert shown_by(reader) == follower.shown() == []
    repair(tmp_path)
    follower.follow()
    assert [serial for serial, *_ in shown_by(reader)] == [serial for serial, *_ in follower.shown()] == [0, 1, 2]


def test_an_episode_whose_serial_stood_in_two_slots_comes_back_when_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = make(tmp_path, 3)
    reader = Storage.open(tmp_path, read_only=True)
    follower = Follower(reader)
    files = files_of(buffer)
    for serial, expected in ((0, [1]), (7, [0, 1, 7])):
        rewrite_record(tmp_path, 2, serial=serial)
        files.changed([2])
        follower.follow()
        assert [serial for serial, *_ in follower.shown()] == expected
        assert [serial for serial, *_ in shown_by(reader)] == expected
    assert "serials [0] stand in two slots each" in caplog.text


def test_an_older_episode_that_comes_back_is_shown_again(tmp_path: Path) -> None:
    """No writer of ours lets one, as it raises the base before; another one may."""
    buffer = make(tmp_path, 7)
    reader = Storage.open(tmp_path, read_only=True)
    follower = Follower(reader)
    follower.follow()
    slot = int(reader.table.visible[-1])
    rewrite_record(tmp_path, slot, flags=reader.record(slot)["flags"] | DELETED)
    files_of(buffer).changed([slot])
    follower.follow()
    assert follower.shown() == shown_by(reader) == shown_by(Storage.open(tmp_path, read_only=True))
    assert [serial for serial, *_ in follower.shown()] == [0, 1, 2, 3, 4, 5]


def test_the_log_is_told_of_nothing_while_the_journal_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler may hold a lock of its own, and wait for who shows a buffer, which reads the journal."""
    buffer = make(tmp_path, 3)
    rewrite_record(tmp_path, 2, serial=0)
    files_of(buffer).changed([2])
    free: list[bool] = []

    def warning(*_: Any) -> None:
        other = threading.Thread(target=lambda: free.append(storage_of(buffer).journal.lock.acquire(timeout=5)))
        other.start()
        other.join()

    monkeypatch.setattr("memmap_buffer.format.journal.log.warning", warning)
    assert len(buffer) == 1
    assert free == [True]


def test_who_finds_nothing_new_had_seen_all_that_was_published_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another thread follows just while it looks."""
    buffer = make(tmp_path, 1)
    storage = storage_of(buffer)
    draw = {"timestep_level": True, "prioritized": True}
    buffer.sample(2, **draw)
    store(buffer, 1)
    seen: list[int] = []

    class FollowedMeanwhile(np.ndarray):
        def item(self, *at: Any) -> Any:
            if not seen:
                seen.append(0)
                other = threading.Thread(target=storage.refresh)
                other.start()
                other.join()
            return super().item(*at)

    monkeypatch.setattr(storage, "maps", replace(storage.maps, state=storage.maps.state.view(FollowedMeanwhile)))
    assert buffer.update_priorities([[1, 0]], [5.0]) == 0
    assert seen


class StandsStill(np.ndarray):
    """Records that a reader copies word by word, and a writer changes when it copied some of the words."""

    writes: list[Callable[[], None]]
    words: int

    @property
    def T(self) -> np.ndarray:  # type: ignore[override]
        before = np.array(self[:, : StandsStill.words])
        while StandsStill.writes:
            StandsStill.writes.pop()()
        return np.concatenate([before, self[:, StandsStill.words :]], axis=1).T

    def tolist(self) -> Any:
        return self.T.T.tolist()


@pytest.mark.parametrize("words", [records.GENERATION + 1, records.SHOWN, records.CHECK])
@pytest.mark.parametrize(("count", "few"), [(1, 0), (5, 0), (9, 0), (700, 0), (1, 7), (9, 7), (700, 7)])
def test_a_reader_that_stands_still_while_it_copies_all_records_misses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, few: int, words: int
) -> None:
    """The words are copied one after the other; meanwhile the writer goes round the ring, perhaps many times.

    Up to `few` records are copied as plain numbers.
    """
    monkeypatch.setattr(records, "FEW", few)
    writer = make(tmp_path / "ring", 3)
    storage = Storage.open(tmp_path / "ring", read_only=True)
    assert len(shown_by(storage)) == 3
    StandsStill.writes, StandsStill.words = [lambda: store(writer, 1)] * count, words
    storage.maps = replace(storage.maps, words=storage.maps.words.view(StandsStill))
    storage.journal.doubt()  # so that it reads all anew
    store(writer, 1)
    seen = [serial for serial, *_ in shown_by(storage)]
    assert not StandsStill.writes
    assert seen == [*range(4 + count)][-6:]
    writer.close()


def followed(folder: Path) -> tuple[ReplayBuffer, Storage]:
    """The writer of a ring of six, and a reader that follows it."""
    writer = make(folder, 6)
    storage = Storage.open(folder, read_only=True)
    assert len(shown_by(storage)) == 6
    store(writer, 1)
    assert len(shown_by(storage)) == 6
    return writer, storage


def test_a_reader_that_is_far_behind_and_stands_still_leaves_out_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for the records that changed, then the writer goes round the ring, and then it takes in these alone."""
    (writer, storage), changed = followed(tmp_path / "ring"), journal.changed_records

    def stand_still(*arguments: Any) -> Any:
        slots = changed(*arguments)
        for _ in range(6):
            store(writer, 1)
        return slots

    monkeypatch.setattr(journal, "changed_records", stand_still)
    for _ in range(600):
        writer.update(3, x=np.ones((LENGTH,)))
    assert [serial for serial, *_ in shown_by(storage)] == [*range(7, 13)]
    writer.close()


def test_a_reader_that_is_far_behind_again_at_each_look_does_not_chase_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (writer, storage), changed, looks = followed(tmp_path / "ring"), journal.changed_records, []

    def go_on(*arguments: Any) -> Any:
        slots = changed(*arguments)
        looks.append(slots)
        for _ in range(600):
            writer.update(3, x=np.ones((LENGTH,)))
        return slots

    for _ in range(600):
        writer.update(3, x=np.ones((LENGTH,)))
    monkeypatch.setattr(journal, "changed_records", go_on)
    assert len(shown_by(storage)) == 6
    assert len(looks) == 2
    writer.close()


def test_a_record_that_is_damaged_is_not_copied_for_ever(tmp_path: Path) -> None:
    make(tmp_path / "ring", 6).close()
    rewrite_record(tmp_path / "ring", 2, serial=77, check=7)
    reader = ReplayBuffer.from_folder(tmp_path / "ring", read_only=True)
    assert reader.serials.tolist() == [0, 1, 3, 4, 5]


def test_an_update_is_waited_for_by_who_only_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the steps of the episode would come anew, with the priority of new ones."""
    buffer = make(tmp_path, 1)
    reader = ReplayBuffer.from_folder(tmp_path)
    draw = {"timestep_level": True, "prioritized": True, "return_indices": True}
    reader.sample(2, **draw)
    store(buffer, 1)
    reader.sample(2, **draw)
    reader.update_priorities([[0, 0], [1, 0]], [0.5, 0.25])
    before = reader.priorities([[0, 0], [1, 0]])
    files = files_of(buffer)
    write_record, readers, waits, done = files.write_record, [], threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        done.wait(20)

    def in_the_middle(slot: int, record: bytes) -> None:
        readers.append(threading.Thread(target=lambda: reader.sample(2, **draw)))
        readers[0].start()
        assert waits.wait(20)
        write_record(slot, record)

    monkeypatch.setattr(journal, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    monkeypatch.setattr(files, "write_record", in_the_middle)
    buffer.update(1, x=np.ones(LENGTH))
    done.set()
    readers[0].join()
    assert np.array_equal(reader.priorities([[0, 0], [1, 0]]), before)


def test_a_full_buffer_that_refuses_an_episode_tells_nobody_of_a_change(tmp_path: Path) -> None:
    buffer = make(tmp_path, 6, circular=False)
    before = changes_of(tmp_path)
    with pytest.raises(ValueError, match="is full"):
        store(buffer, 7)
    assert changes_of(tmp_path) == before


def test_a_forked_child_follows_whatever_other_threads_were_doing(tmp_path: Path) -> None:
    buffer = make(tmp_path, 7)
    before, run = sys.getswitchinterval(), [True]

    def repeat(work: Callable[[], Any]) -> None:
        while run:
            work()

    def learn() -> None:
        buffer.sample(4, format="numpy", timestep_level=True, seed=1)  # numpy's generator has a lock of its own
        buffer.refresh()

    def forked(tell: Callable[[Any], None]) -> None:
        signal.alarm(20)  # of a lock that nobody gives back
        learn()
        tell(buffer.num_episodes)

    threads = [threading.Thread(target=repeat, args=(work,)) for work in (lambda: store(buffer, 1), learn, learn)]
    learn()  # what is imported at first use is, as a child would wait for another thread's import, too
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(20):
            child = in_child(forked)
            assert child == (0, [6]), child.told[-1]
    finally:
        run.clear()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
