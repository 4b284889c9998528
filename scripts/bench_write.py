"""Writing: steps into a staged episode, whole episodes, and publishing alone, against plain views and `pwrite`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench_data import SCHEMAS, Arrays, Run, episode
from bench_measure import BOUND, OURS, Call, Row, medians, throughput
from bench_peers import contenders
from memmap_buffer import ReplayBuffer
from memmap_buffer.store.episode import Episode

LENGTHS = {"low-dim": 1000, "image": 200}  # steps of an episode that is stored
RING = {"low-dim": 400, "image": 40}  # episodes, so that what is written is in no processor's cache
PUBLISHED = {
    "observation": ("float", 17),
    "action": ("float", 6),
    "reward": "float",
    "terminated": "bool",
    "truncated": "bool",
    "info": ("float", 6),
}  # 122 bytes a step, 61 KB an episode of 500 in 6 fields


def store_steps(run: Run, kind: str, goal: float) -> Iterator[Row]:
    """One `store()` a step into an open episode, against assignments to plain views of memory as fresh as ours."""
    length, fields = LENGTHS[kind], SCHEMAS[kind]
    data = episode(fields, length, np.random.default_rng(0))
    steps = [{name: values[t] for name, values in data.items()} for t in range(length)]
    with ReplayBuffer(run.folder("store"), 2, length, fields, circular=True) as buffer:
        check_steps(buffer, steps, data)
        calls: dict[str, Call] = {OURS: lambda: store_all(buffer, steps), BOUND: lambda: assign_all(data, steps)}
        calls |= contenders(run, kind, "store", steps)
        seconds = medians(calls, max(10, run.repeats // 40), burst=2)
    yield throughput(f"store() a step, {kind}", seconds, goal, per_call=length, unit="steps/s")


def store_all(buffer: ReplayBuffer, steps: list[Arrays]) -> None:
    with buffer.one_episode() as staged:
        for step in steps:
            buffer.store(**step)
        staged.abort()


def assign_all(data: Arrays, steps: list[Arrays]) -> Arrays:
    views = {name: np.empty_like(values) for name, values in data.items()}
    for t, step in enumerate(steps):
        for name, value in step.items():
            views[name][t] = value
    return views


def check_steps(buffer: ReplayBuffer, steps: list[Arrays], data: Arrays) -> None:
    with buffer.one_episode():
        for step in steps:
            buffer.store(**step)
    stored, plain = buffer.episode(0), assign_all(data, steps)
    for name, values in data.items():
        assert np.array_equal(stored[name], values) and np.array_equal(plain[name], values), f"{name} differs"


def store_episodes(run: Run, kind: str, checksum: str | None, goal: float) -> Iterator[Row]:
    """`store_episode`, round and round a ring, against `pwrite` of the same bytes to as many places."""
    length, fields, ring = LENGTHS[kind], SCHEMAS[kind], RING[kind]
    datas = [episode(fields, length, np.random.default_rng(i)) for i in range(8)]
    folder, ours = run.folder("episodes"), itertools.cycle(datas)
    plain = PlainRing(folder, datas, ring)
    with ReplayBuffer(folder, ring, length, fields, circular=True, checksum=checksum) as buffer:
        for _ in range(ring + 1):  # every page exists before anything is timed
            buffer.store_episode(**next(ours))
            plain.write()
        calls: dict[str, Call] = {OURS: lambda: buffer.store_episode(**next(ours)), BOUND: plain.write}
        calls |= contenders(run, kind, "store_episode", datas)
        seconds = medians(calls, max(20, run.repeats // (1 if kind == "low-dim" else 10)))
        stored, expected = buffer.episode(-1), next(itertools.islice(ours, 7, None))
    assert all(np.array_equal(stored[name], expected[name]) for name in fields), "what was stored differs"
    plain.check()
    plain.close()
    how = "without" if checksum is None else "with"
    yield throughput(f"store_episode {how} checksum, {kind}", seconds, goal, per_call=length, unit="steps/s")


class PlainRing:
    """One file a field, written an episode at a time by `pwrite` alone."""

    def __init__(self, folder: Path, datas: list[Arrays], slots: int) -> None:
        self._data, self._slots, self._next = datas, slots, 0
        flags = os.O_RDWR | os.O_CREAT
        self._fds = {name: os.open(folder.parent / f"{folder.name}.{name}", flags, 0o600) for name in datas[0]}
        for name, fd in self._fds.items():
            os.ftruncate(fd, slots * datas[0][name].nbytes)

    def write(self) -> None:
        slot, data = self._next % self._slots, self._data[self._next % len(self._data)]
        self._next += 1
        for name, values in data.items():
            os.pwrite(self._fds[name], values.data, slot * values.nbytes)

    def check(self) -> None:
        last = self._next - 1
        for name, values in self._data[last % len(self._data)].items():
            found = os.pread(self._fds[name], values.nbytes, last % self._slots * values.nbytes)
            assert found == values.tobytes(), "what the bound wrote differs"

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


def publish(run: Run, durability: str, goal: float) -> Iterator[Row]:
    """Publishing a staged episode of 61 KB, over `pwrite` of the same bytes (power: with a barrier on each file)."""
    slots, length, folder = 1000, 500, run.folder("publish")  # 61 MB: more than the processor's own cache
    datas = [episode(PUBLISHED, length, np.random.default_rng(i)) for i in range(8)]
    with ReplayBuffer(folder, slots, length, PUBLISHED, circular=True, durability=durability) as buffer:
        plain = PlainPublication(folder, datas[0], slots + 1, sync=durability == "power")
        for i in range(slots + 1):  # every page exists before anything is timed
            buffer.store_episode(**datas[0])
            plain.write(i, datas[0])
        numbers = itertools.count()
        staged: list[Episode] = []

        def stage() -> None:
            if not staged or staged[0].state != "open":
                data = datas[next(numbers) % 8]
                staged[:] = [buffer.begin_episode()]
                staged[0].fill(data, length)

        calls: dict[str, Call] = {
            OURS: lambda: staged[0].publish(),
            BOUND: lambda: plain.write(next(numbers) % slots, datas[0]),
        }
        repeats = run.repeats if durability == "process" else max(20, run.repeats // 10)
        seconds = medians(calls, repeats, before=stage)
        plain.close()
    yield throughput(f"publish, {durability}", seconds, goal, unit="episodes/s")


class PlainPublication:
    """The bound of `publish`: the bytes that it writes, to as many files, by `pwrite` (and the barriers) alone."""

    def __init__(self, folder: Path, arrays: Arrays, slots: int, *, sync: bool) -> None:
        self._sync = sync
        names = [*arrays, "checksums", "records", "state"]
        flags = os.O_RDWR | os.O_CREAT
        self._fds = {name: os.open(folder.parent / f"{folder.name}.{name}", flags, 0o600) for name in names}
        for name, fd in self._fds.items():
            os.ftruncate(fd, slots * (arrays[name].nbytes if name in arrays else 128))

    def write(self, slot: int, arrays: Arrays) -> None:
        fds = self._fds
        os.pwrite(fds["records"], bytes(8), slot * 64)
        for name, array in arrays.items():
            os.pwrite(fds[name], array.data, slot * array.nbytes)
        os.pwrite(fds["checksums"], bytes(4 * (len(arrays) + 16)), slot * 128)
        if self._sync:
            for name in (*arrays, "checksums"):
                os.fdatasync(fds[name])
        os.pwrite(fds["records"], bytes(64), slot * 64)
        if self._sync:
            os.fdatasync(fds["records"])
        os.pwrite(fds["state"], bytes(8), 0)
        os.pwrite(fds["state"], bytes(8), 8)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
