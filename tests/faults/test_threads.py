"""Threads of one process beside each other: they write, change, read, draw by priority; nobody sees another's half."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fault_injection import fork, shown, without_barriers
from inside import around, before_priorities_are_opened, get_inside, place_of, set_inside, storage_of, turn_of
from interruptions import PACKAGE

from memmap_buffer import (
    BufferLockedError,
    EpisodeStateError,
    NotEnoughDataError,
    Prioritized,
    ReplayBuffer,
    SchemaMismatchError,
    StaleEpisodeError,
    Trajectory,
    verify,
)

STEP = {"timestep_level": True, "return_indices": True}


@pytest.fixture(autouse=True)
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], Any]) -> list[BaseException]:
    """Run each in a thread of its own, all begun at once; what they raised."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        begin.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def make(folder: Path, **options: Any) -> ReplayBuffer:
    """Every row of `x` says (who wrote it, its episode's number there, t), and `task` the first two."""
    fields = {"x": ("int", 3), "terminated": "bool"}
    return ReplayBuffer(folder, 12, 9, fields, {"task": ("int", 2)}, circular=True, spare_slots=8, **options)


def rows_of(who: int, number: int) -> list[list[int]]:
    return [[who, number, t] for t in range(1 + (who + number) % 9)]


def store_whole(buffer: ReplayBuffer, who: int, number: int) -> None:
    rows = rows_of(who, number)
    buffer.store_episode(x=rows, terminated=[False] * len(rows), task=(who, number))


def record(buffer: ReplayBuffer, who: int, count: int) -> None:
    """By every way to record, in turns."""
    for number in range(count):
        rows, task = rows_of(who, number), (who, number)
        if number % 3 == 0:
            with buffer.one_episode(task=task):
                for row in rows:
                    buffer.store(x=row, terminated=row is rows[-1])
        elif number % 3 == 1:
            store_whole(buffer, who, number)
        else:
            episode = buffer.begin_episode(task=task)
            for row in rows:
                buffer.store(x=row, terminated=row is rows[-1])
            episode.publish()


def require_whole(episode: dict[str, Any]) -> None:
    who, number = episode["task"]
    assert np.asarray(episode["x"]).tolist() == rows_of(int(who), int(number))


MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "step": {"publish": "step"},
    "disk": {"stage": "disk"},
    "group": {"durability": "power", "sync_every": 3},
}
counts = pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.slow)])


@counts
@pytest.mark.parametrize("mode", MODES)
def test_threads_that_record_with_one_object_never_mix_their_episodes(tmp_path, mode, count):
    with make(tmp_path, **MODES[mode]) as buffer:
        assert together(*(partial(record, buffer, who, count) for who in range(4))) == []
        assert buffer.serials[-1] == 4 * count - 1 or mode == "group"
    reader = ReplayBuffer.from_folder(tmp_path, verify="always")
    assert reader.serials.tolist() == list(range(4 * count - 12, 4 * count))
    for _, episode in shown(reader):
        require_whole(episode)
    assert verify(tmp_path) == []


class Soak:
    """What threads do beside each other; `succeeded` says how often each did."""

    def __init__(self, buffer: ReplayBuffer, count: int) -> None:
        self.buffer, self.count, self.done = buffer, count, threading.Event()
        self.succeeded: dict[str, int] = {}

    def write(self, who: int) -> None:
        try:
            record(self.buffer, who, self.count)
        finally:
            self.done.set()

    def repeat(self, name: str, work: Callable[[np.random.Generator], Any]) -> None:
        rng = np.random.default_rng(len(name))
        while not self.done.is_set() or name not in self.succeeded:
            with suppress(StaleEpisodeError, NotEnoughDataError, IndexError):  # it went between the look and the change
                work(rng)
                self.succeeded[name] = self.succeeded.get(name, 0) + 1

    def run(self) -> list[BaseException]:
        works = (self.sample, self.sample_whole, self.by_priority, self.by_priority, self.iterate, self.read)
        works += (self.update, self.delete)
        others = [partial(self.repeat, f"{work.__name__} {i}", work) for i, work in enumerate(works)]
        return together(*(partial(self.write, who) for who in range(3)), *others)

    def check(self, batch: dict[str, Any]) -> None:
        who, number, t = batch["x"].numpy().T
        assert (batch["task"].numpy() == np.stack([who, number], axis=1)).all()
        assert (batch["_indices"][:, 1].numpy() == t).all()

    def sample(self, _: np.random.Generator) -> None:
        self.check(self.buffer.sample(32, **STEP))

    def sample_whole(self, _: np.random.Generator) -> None:
        batch = self.buffer.sample(4, view=Trajectory())
        for x, task, length in zip(batch["x"], batch["task"], batch["_lens"], strict=True):
            require_whole({"x": x[:length].numpy(), "task": task.tolist()})

    def by_priority(self, rng: np.random.Generator) -> None:
        batch = self.buffer.sample(32, prioritized=True, **STEP)
        self.check(batch)
        self.buffer.update_priorities(batch["_indices"], rng.random(32))

    def iterate(self, _: np.random.Generator) -> None:
        for batch in self.buffer.dataloader(16, shuffle=True, **STEP):
            self.check(batch)

    def read(self, _: np.random.Generator) -> None:
        require_whole(self.buffer.episode(-1))
        assert len(self.buffer) <= 12

    def update(self, rng: np.random.Generator) -> None:
        self.buffer.update([int(rng.integers(0, 6))], terminated=np.zeros((1, 1), np.bool_))

    def delete(self, rng: np.random.Generator) -> None:
        if len(self.buffer) > 8:
            self.buffer.delete(int(rng.integers(0, 3)))


@counts
def test_all_that_threads_may_do_goes_on_beside_the_others(tmp_path, count, caplog):
    buffer = make(tmp_path)
    record(buffer, 9, 12)
    soak = Soak(buffer, count)
    assert soak.run() == []
    assert len(soak.succeeded) == 8
    buffer.close()
    for _, episode in shown(tmp_path):
        require_whole(episode)
    assert verify(tmp_path) == [] and caplog.text == ""


def test_columns_are_changed_beside_threads_that_store_whole_episodes(tmp_path):
    buffer = make(tmp_path)

    def change() -> None:
        for number in range(6):
            buffer.add_field("more", ("int", (), number))
            buffer.rename_field("more", "other")
            buffer.drop_field("other")

    def write(who: int) -> None:
        for number in range(40):
            store_whole(buffer, who, number)

    assert together(change, *(partial(write, who) for who in range(3))) == []
    assert buffer.serials[-1] == 119
    buffer.close()
    for _, episode in shown(tmp_path):
        require_whole(episode)
    assert verify(tmp_path) == []


def test_columns_are_changed_beside_threads_that_draw_by_priority(tmp_path):
    buffer, done = make(tmp_path), threading.Event()
    record(buffer, 0, 5)

    def change() -> None:
        try:
            for _ in range(6):
                buffer.add_field("more", ("int", (), 1))
                buffer.rename_field("more", "other")
                buffer.drop_field("other")
                store_whole(buffer, 0, 1)
        finally:
            done.set()

    def draw() -> None:
        while not done.is_set():
            batch = buffer.sample(8, prioritized=True, **STEP)
            buffer.update_priorities(batch["_indices"], np.ones(8))

    assert together(change, draw, draw) == []
    buffer.close()
    with ReplayBuffer.from_folder(tmp_path) as other:  # the tree was let go of
        assert other.sample(8, prioritized=Prioritized(alpha=0.5), **STEP)["x"].shape == (8, 3)


class Meanwhile:
    """Does something in another thread before the `at`-th line of the package that this one runs, and waits for it."""

    def __init__(self, at: int, work: Callable[[], None]) -> None:
        self._left, self._work, self.done = at, work, False

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or self.done:
            return None
        self._left -= event == "line"
        if self._left < 0:
            self.done = True
            assert together(self._work) == []
        return self


def meanwhile(at: int, work: Callable[[], None], read: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether there is such a line, and what is read."""
    traced, before = Meanwhile(at, work), sys.gettrace()
    sys.settrace(traced)
    try:
        found = read()
        return traced.done, found
    finally:
        sys.settrace(before)


READ: dict[str, Callable[[ReplayBuffer], Any]] = {
    "len": len,
    "num_steps": lambda buffer: buffer.num_steps,
    "serials": lambda buffer: buffer.serials.tolist(),
    "max_timesteps": lambda buffer: buffer.max_timesteps,
    "refresh": lambda buffer: buffer.refresh(),
    "episode": lambda buffer: buffer.episode(1)["x"].tolist(),
    "episodes": lambda buffer: buffer.episodes()["x"].tolist(),
    "[]": lambda buffer: buffer[1]["x"].tolist(),
    "get_all_data": lambda buffer: buffer.get_all_data()["x"].tolist(),
    "sample": lambda buffer: buffer.sample(4, seed=0, format="numpy", timestep_level=True)["x"].tolist(),
    "batch": lambda buffer: buffer.batch(format="numpy", n_steps=2)["x"].tolist(),
    "batch_spec": lambda buffer: buffer.batch_spec(format="numpy", n_steps=2)["x"],
    "dataset": lambda buffer: len(buffer.dataset(format="numpy")),
    "dataloader": lambda buffer: buffer.dataloader(2).batch_size,
}


@pytest.mark.parametrize("door", READ)
def test_whatever_is_read_is_read_again_where_another_thread_changes_the_columns_meanwhile(tmp_path, monkeypatch, door):
    """At any of 8 moments of the call: one of the lines that it runs, from the first to the last."""
    if door in ("[]", "get_all_data", "dataloader"):
        pytest.importorskip("torch")
    without_barriers(monkeypatch)
    buffer, read = make(tmp_path), READ[door]
    for number in range(3):
        record(buffer, 0, number)
    ways = cycle(
        [
            lambda: buffer.add_field("more", ("int", (), 1)),
            lambda: buffer.rename_field("more", "other"),
            lambda: buffer.drop_field("other"),
        ]
    )
    wanted, lines = read(buffer), 0
    while meanwhile(lines, lambda: None, lambda: read(buffer))[0]:
        lines += max(1, lines // 4)
    for at in {part * lines // 8 for part in range(8)}:
        for way in islice(ways, 3):
            done, found = meanwhile(at, way, lambda: read(buffer))
            assert found == wanted
            if not done:  # the call had fewer lines this time
                way()


def test_a_field_that_is_added_beside_a_thread_that_reads_is_known_at_once(tmp_path, monkeypatch):
    buffer, add = make(tmp_path), get_inside("add_field")

    def added(*given: Any, **how: Any) -> None:
        add(*given, **how)
        storage_of(buffer).require_schema()  # as a draw of another thread does

    set_inside(monkeypatch, add_field=added)
    buffer.add_field("more", ("int", (), 1))
    assert "more" in buffer.fieldnames


def test_who_has_read_since_another_added_a_field_may_still_not_write(tmp_path):
    make(tmp_path).close()
    reader, writer = ReplayBuffer.from_folder(tmp_path), ReplayBuffer.from_folder(tmp_path)
    writer.add_field("more", ("int", (), 7))
    record(writer, 0, 1)
    writer.close()
    assert len(reader) == 1
    with pytest.raises(SchemaMismatchError, match="stored None, given Field"):
        record(reader, 0, 1)


def test_the_first_draws_by_priority_of_several_threads_share_one_tree(tmp_path, monkeypatch):
    opened: list[None] = []
    before_priorities_are_opened(monkeypatch, lambda: opened.append(time.sleep(0.01)))
    for i in range(20):
        with make(tmp_path / f"{i}") as buffer:
            record(buffer, 0, 5)
            draw = partial(buffer.sample, 4, prioritized=Prioritized(), **STEP)
            opened.clear()
            assert together(*[draw] * 4) == []
            assert len(opened) == 1
            buffer.update_priorities([[4, 2]], [1e15])  # so that nothing else is drawn any more
            assert draw()["_indices"].tolist() == [[4, 2]] * 4
            other = ReplayBuffer.from_folder(tmp_path / f"{i}")
            assert together(*[partial(other.sample, 4, prioritized=Prioritized(), **STEP)] * 3) == []
            other.close()
            assert draw()["x"].shape == (4, 3)


def test_who_counts_waits_for_no_thread_that_is_writing(tmp_path, monkeypatch):
    buffer = ReplayBuffer(tmp_path, 9, 9, {"x": "int"}, publish="step", spare_slots=2)
    counted = []

    def count():
        thread = threading.Thread(target=lambda: counted.append((buffer.num_steps, len(buffer))), daemon=True)
        thread.start()
        thread.join(20)

    around(monkeypatch, *place_of("tell_readers"), before=count)
    for _ in range(2):
        buffer.add(x=np.arange(2))
    assert len(counted) == 2


def test_objects_that_several_threads_make_of_a_folder_take_it_over_in_turn(tmp_path):
    make(tmp_path).close()

    def work(who: int) -> None:
        for number in range(10):
            try:
                buffer = ReplayBuffer.from_folder(tmp_path)
                store_whole(buffer, who, number)
            except (BufferLockedError, RuntimeError) as error:  # by one that was newer still
                assert "this process" in str(error), error

    assert together(*(partial(work, who) for who in range(4))) == []
    with ReplayBuffer.from_folder(tmp_path) as buffer:
        store_whole(buffer, 5, 5)
    assert verify(tmp_path) == []


def test_each_thread_stores_to_the_episode_that_it_opened_and_else_to_the_only_one(tmp_path):
    buffer, opened, end = make(tmp_path), threading.Event(), threading.Event()

    def other() -> None:
        with buffer.one_episode(task=(1, 0)):
            buffer.store(x=[1, 0, 0], terminated=False)
            opened.set()
            end.wait()
            buffer.store(x=[1, 0, 1], terminated=False)

    thread = threading.Thread(target=other)
    thread.start()
    opened.wait()
    with buffer.one_episode(task=(0, 0)):
        buffer.store(x=[0, 0, 0], terminated=False)
        with pytest.raises(EpisodeStateError, match="an episode is open already"), buffer.one_episode():
            pass
    with pytest.raises(EpisodeStateError, match="no batch is open"):
        buffer.store_batch(x=[[0, 0, 0]])
    buffer.store(x=[1, 0, 2], terminated=False)  # handed over: nobody else has one open
    end.set()
    thread.join()
    assert [episode["x"] for _, episode in shown(buffer)] == [[[0, 0, 0]], [[1, 0, 0], [1, 0, 2], [1, 0, 1]]]


def test_another_threads_block_that_is_about_to_end_is_not_taken_for_one_that_was_left(tmp_path):
    """Nor while its end runs, whatever this thread writes meanwhile."""
    buffer, inside, go = make(tmp_path), threading.Event(), threading.Event()
    original = type(buffer.begin_episode()).leave

    def slow(episode: Any, *arguments: Any) -> None:
        inside.set()
        go.wait()
        original(episode, *arguments)

    def work() -> None:
        with buffer.one_episode(task=(0, 3)):
            for row in rows_of(0, 3):
                buffer.store(x=row, terminated=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(buffer.begin_episode()), "leave", slow)
        thread = threading.Thread(target=work)
        thread.start()
        inside.wait()
        buffer.flush()
        store_whole(buffer, 1, 1)
        go.set()
        thread.join()
    assert [episode["task"] for _, episode in shown(buffer)] == [[1, 1], [0, 3]]


def test_a_child_that_is_forked_in_another_threads_turn_is_told_that_it_may_not_write(tmp_path):
    buffer, taken, end = make(tmp_path), threading.Event(), threading.Event()

    def hold() -> None:
        with turn_of(buffer):
            taken.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    pid = fork()
    if pid == 0:
        try:
            buffer.store_episode(x=rows_of(0, 0), terminated=[False])
        except RuntimeError as error:
            os._exit(0 if "forked child" in str(error) else 1)
        os._exit(2)
    status = os.waitpid(pid, 0)[1]
    end.set()
    thread.join()
    assert status == 0


def test_memory_that_two_threads_ask_for_is_given_to_one():
    staging, taken = get_inside("staging")(), []
    for n in range(200):
        staging.keep({"x": np.empty(n + 1)})

    def take() -> None:
        taken.extend(staging.take(1) for _ in range(100))

    assert together(*[take] * 4) == []
    given = [id(columns["x"]) for columns in taken if columns]
    assert len(given) == len(set(given)) == 200


def test_a_lock_is_one_to_all_threads_and_another_in_a_forked_child():
    turn = get_inside("turn")()
    assert turn.lock is turn.lock
    found: list[Any] = []
    assert together(*[lambda: found.append(turn.lock)] * 4) == []
    assert all(lock is turn.lock for lock in found)


@pytest.mark.parametrize("kind", ["half imported", "none"])
def test_values_are_stored_while_another_thread_imports_torch(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch") if kind == "half imported" else None)
    with make(tmp_path) as buffer:
        with buffer.one_episode(task=[0, 0]):
            buffer.store(x=[0, 0, 0], terminated=False)
        assert [episode["x"] for _, episode in shown(buffer)] == [[[0, 0, 0]]]
