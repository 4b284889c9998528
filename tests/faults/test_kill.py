"""Processes that die: whatever was acknowledged is there, whole and bit for bit, and nothing else is."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import in_child, listing, without_barriers
from kill_writer import CODED, FIELDS, RING, Writers, content, ended_at, exact, following, make, same, staged, steps

from memmap_buffer import ConcatBuffer, NotABufferError, ReplayBuffer, verify

MODES: dict[str, dict[str, Any]] = {
    "whole": {"work": "whole"},
    "group": {"work": "whole", "durability": "power", "sync_every": 3},
    "step": {"work": "stepwise", "publish": "step"},
    "disk": {"work": "stepwise", "stage": "disk"},
    "update": {"work": "update"},
}
LEAVES = ("return", "raise", "collect")


@pytest.fixture
def writers() -> Iterator[Writers]:
    with Writers() as program:
        yield program


class Promises:
    """What must be in a folder: for each serial (steps, or None when it was ended; version)."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[int | None, int]] = {}

    def add(self, told: list[Any]) -> None:
        for serial, length, version in told:
            self.made[serial] = (length, version)

    def check(self, buffer: ReplayBuffer, more: int) -> None:
        """Compare every visible episode; at most `more` things may be there that were not acknowledged."""
        serials = buffer.serials.tolist()
        newest, promised = serials[-1] if serials else -1, max(self.made, default=-1)
        assert newest >= promised, "an acknowledged episode is lost"
        assert serials == list(range(max(0, newest - RING["max_episodes"] + 1), newest + 1))
        seen = {serial: self._seen(buffer.episode(i), serial) for i, serial in enumerate(serials)}
        beyond = [serial for serial, what in seen.items() if self.made.get(serial) != what]
        assert len(beyond) <= more
        for serial in beyond:
            self._check_next(serial, *seen[serial])
        self.made |= seen

    def _seen(self, got: dict[str, Any], serial: int) -> tuple[int | None, int]:
        length, version = ended_at(got, serial), int(got["version"])
        assert same(got, serial, version, length), f"episode {serial} is not what was stored"
        return length, version

    def _check_next(self, serial: int, length: int | None, version: int) -> None:
        """What was not acknowledged is the one thing after what was."""
        if serial not in self.made:
            assert version == 0
            assert length in (None, 1)
            return
        last, last_version = self.made[serial]
        if version != last_version:
            assert (length, version) == (last, last_version + 1)
        else:
            assert last is not None
            assert length == last + 1 or (length is None and last == len(content(serial)["t"]))


def kill_often(writers: Writers, folder: Path, times: int, seed: int, **made: Any) -> None:
    """Kill a writer again and again on one buffer; what was acknowledged is there each time.

    Each mode in turn is killed while it opens the buffer, or takes it over; then twice after some acknowledgements.
    """
    make(folder, **made).close()
    chance, promises, more = random.Random(seed), Promises(), 0
    for kill in range(times):
        turn, mode = divmod(kill, len(MODES))
        job = {"durability": chance.choice(["process", "power"]), **list(MODES.values())[mode]}
        acknowledged = turn % 3 and 1 + kill % 7
        promises.add(writers.killed(chance.uniform(0, 0.03), acknowledged, folder=str(folder), **job))
        more += job.get("sync_every", 1)
        if (folder / ".redo").exists() and chance.random() < 0.5:
            continue  # the next writer finishes the update; until then its episode is out of sight
        with ReplayBuffer.from_folder(folder, read_only=not (folder / ".redo").exists()) as buffer:
            promises.check(buffer, more)
        more = 0
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.store_episode(**content(following(buffer)))
        assert same(buffer.episode(-1), following(buffer) - 1)
    assert not [finding for finding in verify(folder) if finding.lost]


def test_acknowledged_episodes_steps_and_updates_survive_kills_at_random_times(writers, tmp_path):
    """Faults 1 and 8: every mode and both durabilities take turns on one wrapped grid."""
    kill_often(writers, tmp_path / "buffer", times=20, seed=1)


def test_compressed_fields_survive_kills_at_random_times(writers, tmp_path):
    """Faults 1 and 8, as above."""
    kill_often(writers, tmp_path / "buffer", times=10, seed=3, fields=CODED)


def publish_and_kill(writers: Writers, place: Path, times: int, seed: int) -> None:
    """Kill a recorder that publishes again and again; then every episode is at the URL once, and none is lost."""
    url, chance, told = f"file://{place}/url", random.Random(seed), dict[int, int]()
    for kill in range(times):
        begin, after, delay = 10_000 * kill, 1 + chance.randrange(8), chance.uniform(0, 0.2) * chance.random()
        options = {"publish_every": chance.choice([1, 2, 5]), "keep_published": chance.choice([0, 1, None])}
        job = {"folder": str(place / "root"), "begin": begin, "url": url, **options}
        told[begin] = len(writers.killed(delay, after, work="publish", **job)) - 1
    make(place / "root", circular=False, shard="auto", publish_to=url).close()
    data = ConcatBuffer.from_root(url, cache=place / "cache")
    numbers = Counter(int(data.episode(i)["serial"][0]) for i in range(len(data)))
    assert max(numbers.values()) == 1
    for begin, count in told.items():  # one more may have been stored, and not be told
        there = sorted(number for number in numbers if begin <= number < begin + 10_000)
        assert there == list(range(begin, begin + len(there)))
        assert len(there) in (count, count + 1)
    assert all(same(data.episode(i), int(data.episode(i)["serial"][0])) for i in range(len(data)))


def test_a_recorder_that_publishes_and_is_killed_loses_no_episode_and_doubles_none(writers, tmp_path):
    pytest.importorskip("fsspec")
    publish_and_kill(writers, tmp_path, times=6, seed=4)


@pytest.mark.slow
def test_eighty_kills_of_a_recorder_that_publishes_lose_no_episode_and_double_none(writers, tmp_path):
    pytest.importorskip("fsspec")
    publish_and_kill(writers, tmp_path, times=80, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [FIELDS, CODED], ids=["raw", "compressed"])
def test_acknowledged_episodes_steps_and_updates_survive_500_kills(writers, tmp_path, fields):
    """Faults 1 and 8, at the length that the issue asks for."""
    kill_often(writers, tmp_path / "buffer", times=500, seed=2, fields=fields)


# Creation


def prepare(folder: Path, overwrite: bool = False) -> None:
    """An older buffer, where one is to be overwritten."""
    if overwrite:
        with make(folder, max_episodes=3) as old:
            old.store_episode(**content(0))


def creation_takes(writers: Writers, folder: Path, **options: Any) -> float:
    """Seconds from the start of a job to the end of a creation."""
    prepare(folder, **options)
    child, start = writers.begin(work="create", folder=str(folder), **options), time.perf_counter()
    assert writers.tell() == 0
    seconds = time.perf_counter() - start
    os.kill(child, signal.SIGKILL)
    writers.ended()
    return seconds


def kill_creations(writers: Writers, root: Path, times: int, **options: Any) -> Counter[str]:
    """Kill creations at random times; how many left what. The folder must be usable again every time."""
    left, chance = Counter[str](), random.Random(3)
    longest = max(creation_takes(writers, root / f"timed{i}", **options) for i in range(3))
    for i in range(times):
        folder = root / str(i)
        prepare(folder, **options)
        writers.killed(chance.uniform(0, 1.2 * longest), work="create", folder=str(folder), **options)
        try:
            with ReplayBuffer.from_folder(folder, read_only=True) as buffer:
                old_one = buffer.max_episodes == 3
                assert buffer.serials.tolist() == [0] * old_one
                assert not old_one or same(buffer.episode(0), 0)
                left["old" if old_one else "complete"] += 1
        except NotABufferError:
            left["absent"] += 1
        with make(folder, **options) as buffer:
            buffer.store_episode(**content(0))
            assert same(buffer.episode(-1), 0)
        assert verify(folder) == []
    return left


def test_a_creation_that_is_killed_leaves_no_buffer_or_a_whole_one(writers, tmp_path):
    """Fault 3: and the folder can be used again without help."""
    assert kill_creations(writers, tmp_path, times=15).total() == 15


@pytest.mark.slow
def test_a_creation_that_is_killed_leaves_no_buffer_or_a_whole_one_150_times(writers, tmp_path):
    """Fault 3, at the length of the catalogue: both ends of it are met."""
    left = kill_creations(writers, tmp_path, times=150)
    assert min(left["absent"], left["complete"]) > 0


def test_an_overwrite_that_is_killed_leaves_the_old_buffer_none_or_the_new_one(writers, tmp_path):
    """Fault 3 for `overwrite=True`: whatever is left, the same call works afterwards."""
    assert kill_creations(writers, tmp_path, times=15, overwrite=True).total() == 15


# Ends without a kill


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("options", [{}, {"stage": "disk"}, {"durability": "power"}], ids=["ram", "disk", "power"])
def test_the_end_of_the_interpreter_writes_nothing(writers, tmp_path, leave, options):
    """Fault 7: an open episode is gone, and no byte or time of any file changed since it was stored."""
    folder = tmp_path / "buffer"
    make(folder).close()
    writers.begin(work="end", folder=str(folder), leave=leave, **options)
    assert writers.tell() == "stored"
    before = listing(folder)
    writers.go_on()
    assert writers.ended() == ([], 3 if leave == "raise" else 0)
    assert listing(folder) == before
    with ReplayBuffer.from_folder(folder) as buffer:
        assert buffer.serials.tolist() == [0]
        buffer.store_episode(**content(1))
        assert [same(buffer.episode(i), i) for i in (0, 1)] == [True, True]


def test_the_end_of_a_forked_child_writes_nothing_and_frees_no_lock(writers, tmp_path):
    """Faults 7 and 35: the child leaves by the ordinary end of an interpreter, with its parent's episode open."""
    folder = tmp_path / "buffer"
    make(folder).close()
    writers.begin(work="end", folder=str(folder), leave="fork")
    assert writers.tell() == "stored"
    before = listing(folder)
    writers.go_on()
    assert writers.tell() == 0
    assert listing(folder) == before
    with ReplayBuffer.from_folder(folder) as other, pytest.raises(TimeoutError, match="has another writer"):
        other.store_episode(**content(1))
    writers.go_on()
    writers.ended()


def test_forgetting_a_buffer_writes_nothing_and_frees_its_lock(tmp_path):
    """Fault 7: `del` and the garbage collector, with an episode open; also in a forked child."""
    folder = tmp_path / "buffer"
    buffer = make(folder)
    buffer.store_episode(**content(0))
    episode = buffer.begin_episode()
    for step in steps(1):
        episode.store(**step)
    before = listing(folder)
    held = {"buffer": buffer, "episode": episode}

    def forget(_: Any) -> None:
        held.clear()
        gc.collect()

    del buffer, episode
    assert in_child(forget).status == 0
    assert listing(folder) == before
    forget(None)
    assert listing(folder) == before

    def write(_: Any) -> None:
        with ReplayBuffer.from_folder(folder) as other:
            other.store_episode(**content(1))

    child = in_child(write)
    assert child.status == 0, child.told


# Interruptions


class AlarmError(Exception):
    pass


def interrupt_publishing(folder: Path, count: int, **options: Any) -> dict[str, Any]:
    """Publish episodes while alarms go off; each is published again until it has worked. What was then there."""

    armed = False

    def alarm(*_: Any) -> None:
        if armed:  # a signal may be under way when its timer is stopped
            raise AlarmError

    signal.signal(signal.SIGALRM, alarm)
    chance, interrupted, wrong, took = random.Random(4), 0, [], 1.0
    buffer = make(folder, **options)
    for serial in range(count):
        episode, start = staged(buffer, serial), time.perf_counter()
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 1.2 * took))
            episode.publish()
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            took = min(took, time.perf_counter() - start)
        except AlarmError:
            armed = False
            interrupted += 1
            if episode.state == "open":
                episode.publish()
        wanted = list(range(max(0, serial + 1 - RING["max_episodes"]), serial + 1))
        if buffer.serials.tolist() != wanted or not same(buffer.episode(-1), serial):
            wrong.append((serial, buffer.serials.tolist()))
            break
    buffer.close()
    return {"interrupted": interrupted, "wrong": wrong}


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_handler_that_raises_within_publish_leaves_an_episode_that_can_be_published(tmp_path, durability):
    """Fault 9: SIGALRM at random moments; after the second try each episode is there once, bit for bit."""
    folder = tmp_path / "buffer"
    child = in_child(lambda tell: tell(interrupt_publishing(folder, 150, durability=durability)))
    assert child.status == 0, child.told
    assert child.told[0]["wrong"] == []
    assert child.told[0]["interrupted"] > 15
    assert verify(folder) == []
    assert exact(folder) == list(range(150 - RING["max_episodes"], 150))


def test_signals_that_only_interrupt_change_nothing(tmp_path):
    """Fault 19: EINTR in any system call; each is called again."""
    folder = tmp_path / "buffer"

    def write(tell: Any) -> None:
        rung = []
        signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
        signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
        with make(folder, durability="power") as buffer:
            for serial in range(100):
                buffer.store_episode(**content(serial))
        signal.setitimer(signal.ITIMER_REAL, 0)
        tell(len(rung))

    child = in_child(write)
    assert child.status == 0, child.told
    assert child.told[0] > 100
    assert verify(folder) == []
    assert exact(folder) == list(range(100 - RING["max_episodes"], 100))


@pytest.mark.parametrize("fields", [FIELDS, pytest.param(CODED, marks=pytest.mark.slow)], ids=["raw", "compressed"])
@pytest.mark.parametrize("mode", ["whole", "group", "step", "disk"])
def test_a_handler_that_raises_at_any_line_of_publish_leaves_an_episode_that_can_be_published(tmp_path, mode, fields):
    """Fault 9, without chance: the error comes at the N-th line that publishing executes, for each N."""
    options = {"fields": fields} | {name: value for name, value in MODES[mode].items() if name != "work"}
    child = in_child(lambda tell: tell(raise_at_every_line(tmp_path / "buffer", **options)))
    assert child.status == 0, child.told
    assert child.told[0]["wrong"] == []
    assert child.told[0]["lines"] > 100
    assert not [finding for finding in verify(tmp_path / "buffer") if finding.lost]


def raise_at_every_line(folder: Path, **options: Any) -> dict[str, Any]:
    """Publish with an error at line 0, 1, …, and again; the lines after which something else was there."""
    without_barriers(pytest.MonkeyPatch())  # in a process of its own, where nothing is cut off
    buffer, wrong, lines = make(folder, **options), [], Lines(0)
    while lines.where or lines.at == 0:
        for number in range(options.get("sync_every", 1) - 1):
            staged(buffer, following(buffer) + number).publish()
        serial = following(buffer) + options.get("sync_every", 1) - 1
        episode, lines = staged(buffer, serial), Lines(lines.at + 1)
        try:
            sys.settrace(lines)
            episode.publish()
        except AlarmError:
            sys.settrace(None)
            if episode.state == "open":
                episode.publish()
        finally:
            sys.settrace(None)
        if "sync_every" in options:
            buffer.flush()  # those of the group that became visible before the error do not count to the next one
        seen = ReplayBuffer.from_folder(folder, read_only=True)
        if not following(seen) == following(buffer) == serial + 1 or not same(seen.episode(-1), serial):
            wrong.append((lines.where, seen.serials.tolist(), buffer.serials.tolist()))
    return {"lines": lines.at, "wrong": wrong}


class Lines:
    """A trace function that raises at one line of the package; `where` it did."""

    def __init__(self, at: int) -> None:
        self.at, self._left, self.where = at, at, ""

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not re.search("memmap_buffer/(format|writing)/", frame.f_code.co_filename):
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0 and not self.where:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise AlarmError
        return self


def test_the_oracle_sees_a_row_of_another_episode():
    """The guard is guarded: one changed element of any field is noticed."""
    for name in FIELDS:
        spoilt = content(5)
        spoilt[name] = spoilt[name].copy()
        spoilt[name][0] = content(6)[name][0] if name in ("serial", "image") else spoilt[name][0] + 1
        assert same(content(5), 5)
        assert not same(spoilt, 5)
    assert not same(content(5), 6)
    assert not np.array_equal(content(5)["image"][:1], content(6)["image"][:1])
