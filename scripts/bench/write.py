"""Writing: steps into an open episode, whole episodes, and publication alone, against plain arrays and `pwrite`."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.data import SCHEMAS, Arrays, Run, episode
from bench.measure import BOUND, OURS, Call, Row, medians, throughput
from bench.peers import contenders
from memmap_buffer import ReplayBuffer
from memmap_buffer.writing.episode import Episode

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
    """One `store()` a step into an open episode, against assignments to plain views of memory that is used again.

    An open episode uses the memory of the one before, so the bound's memory is made once. The cost of new pages, for
    episodes with memory of their own, stands beside it.
    """
    length, fields = LENGTHS[kind], SCHEMAS[kind]
    data = episode(fields, length, np.random.default_rng(0))
    steps = [{name: values[t] for name, values in data.items()} for t in range(length)]
    with ReplayBuffer(run.folder("store"), 2, length, fields, circular=True) as buffer:
        views = {name: np.empty_like(values) for name, values in data.items()}
        check_steps(buffer, steps, data, views)
        calls: dict[str, Call] = {
            OURS: lambda: store_all(buffer, steps),
            BOUND: lambda: assign_all(views, steps),
            "new pages": lambda: assign_all(in_new_pages(data), steps),
        }
        calls |= contenders(run, kind, "store", steps)
        seconds = medians(calls, max(10, run.repeats // 40), burst=2)
    yield throughput(f"store() a step, {kind}", seconds, goal, per_call=length, unit="steps/s")


def store_all(buffer: ReplayBuffer, steps: list[Arrays]) -> None:
    with buffer.one_episode() as staged:
        for step in steps:
            buffer.store(**step)
        staged.abort()


def assign_all(views: Arrays, steps: list[Arrays]) -> None:
    for t, step in enumerate(steps):
        for name, value in step.items():
            views[name][t] = value


def in_new_pages(data: Arrays) -> Arrays:
    """Arrays like these in new pages of the system; malloc may return used ones."""
    return {n: np.frombuffer(mmap.mmap(-1, v.nbytes), v.dtype).reshape(v.shape) for n, v in data.items()}


def check_steps(buffer: ReplayBuffer, steps: list[Arrays], data: Arrays, views: Arrays) -> None:
    with buffer.one_episode():
        for step in steps:
            buffer.store(**step)
    stored = buffer.episode(0)
    assign_all(views, steps)
    for name, values in data.items():
        assert np.array_equal(stored[name], values) and np.array_equal(views[name], values), f"{name} differs"


def store_episodes(run: Run, kind: str, checksum: str | None, goal: float) -> Iterator[Row]:
    """`store_episode` against `pwrite` of the same bytes: into new files, then into existing pages.

    A write into a new file allocates its pages, for us and for the bound; the second lap of a ring finds them there.
    """
    datas = [episode(SCHEMAS[kind], LENGTHS[kind], np.random.default_rng(i)) for i in range(8)]
    others = contenders(run, kind, "store_episode", datas)
    how = f"{'without' if checksum is None else 'with'} checksum, {kind}"
    for what, fresh in (("", True), (" again", False)):
        ours = OurRing(run.folder("ours"), kind, datas, checksum)
        plain = PlainRing(run.folder("plain"), datas, RING[kind])
        rings = (ours, plain)
        for ring in rings:
            for _ in range(0 if fresh else RING[kind] + 1):
                ring.write()
        calls: dict[str, Call] = {OURS: ours.write, BOUND: plain.write, **(others if fresh else {})}
        before = (lambda rings=rings: [ring.renew() for ring in rings]) if fresh else None
        seconds = medians(calls, max(20, run.repeats // (1 if kind == "low-dim" else 10)), before=before)
        for ring in rings:
            ring.check()
            ring.close()
        reach = goal if fresh else None
        yield throughput(f"store_episode{what} {how}", seconds, reach, per_call=LENGTHS[kind], unit="steps/s")


class OurRing:
    """A circular buffer, written an episode at a time."""

    def __init__(self, folder: Path, kind: str, datas: list[Arrays], checksum: str | None) -> None:
        self._data, self._next = datas, 0
        self._sizes = (folder, RING[kind], LENGTHS[kind], SCHEMAS[kind])
        self._options: dict[str, Any] = {"circular": True, "checksum": checksum}
        self._buffer = ReplayBuffer(*self._sizes, **self._options)

    def write(self) -> None:
        data = self._data[self._next % len(self._data)]
        self._next += 1
        self._buffer.store_episode(**data)

    def renew(self) -> None:
        """Start again with empty files, before an episode would be written to an existing page."""
        if len(self._buffer) == self._sizes[1]:
            self.check()
            self.close()
            self._buffer = ReplayBuffer(*self._sizes, **self._options, overwrite=True)

    def check(self) -> None:
        expected = self._data[(self._next - 1) % len(self._data)]
        stored = self._buffer.episode(-1) if len(self._buffer) else expected
        assert all(np.array_equal(stored[name], expected[name]) for name in expected), "what was stored differs"

    def close(self) -> None:
        self._buffer.close()


class PlainRing:
    """One file a field, written an episode at a time by `pwrite` alone."""

    def __init__(self, folder: Path, datas: list[Arrays], slots: int) -> None:
        self._data, self._slots, self._next, self._blank = datas, slots, 0, True
        flags = os.O_RDWR | os.O_CREAT
        folder.mkdir()
        self._fds = {name: os.open(folder / name, flags, 0o600) for name in datas[0]}
        self._truncate()

    def _truncate(self) -> None:
        for name, fd in self._fds.items():
            os.ftruncate(fd, 0)
            os.ftruncate(fd, self._slots * self._data[0][name].nbytes)
        self._blank = True

    def write(self) -> None:
        slot, data = self._next % self._slots, self._data[self._next % len(self._data)]
        self._next, self._blank = self._next + 1, False
        for name, values in data.items():
            os.pwrite(self._fds[name], values.data, slot * values.nbytes)

    def renew(self) -> None:
        """Start again with empty files, before an episode would be written to an existing page."""
        if self._next % self._slots == 0 and not self._blank:
            self.check()
            self._truncate()

    def check(self) -> None:
        last = self._next - 1
        for name, values in ({} if self._blank else self._data[last % len(self._data)]).items():
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
        plain = PlainPublication(folder, datas, slots + 1, sync=durability == "power")
        for i in range(slots + 1):  # every page exists before anything is timed
            buffer.store_episode(**datas[i % 8])
            plain.write()
        numbers = itertools.count()
        staged: list[Episode] = []

        def stage() -> None:
            if not staged or staged[0].state != "open":
                staged[:] = [buffer.begin_episode()]
                staged[0].extend(**datas[next(numbers) % 8])

        calls: dict[str, Call] = {OURS: lambda: staged[0].publish(), BOUND: plain.write}
        repeats = run.repeats if durability == "process" else max(20, run.repeats // 10)
        seconds = medians(calls, repeats, before=stage)
        plain.close()
    yield throughput(f"publish, {durability}", seconds, goal, unit="episodes/s")


class PlainPublication:
    """The bound of `publish`: the same bytes to as many files, by `pwrite` and the barriers alone.

    Slots and episodes are taken in turn, as ours are.
    """

    def __init__(self, folder: Path, datas: list[Arrays], slots: int, *, sync: bool) -> None:
        self._datas, self._slots, self._next, self._sync = datas, slots, 0, sync
        arrays = datas[0]
        names = [*arrays, "checksums", "records", "state"]
        flags = os.O_RDWR | os.O_CREAT
        self._fds = {name: os.open(folder.parent / f"{folder.name}.{name}", flags, 0o600) for name in names}
        for name, fd in self._fds.items():
            os.ftruncate(fd, slots * (arrays[name].nbytes if name in arrays else 128))

    def write(self) -> None:
        fds, slot, arrays = self._fds, self._next % self._slots, self._datas[self._next % len(self._datas)]
        self._next += 1
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
