"""Things that go wrong, on purpose: a faulty `System`, processes that are killed; what a folder shows, and should show.

`Faulty` stands at `memmap_buffer.format.syscalls.system`; it counts the operations that change files, and fails,
shortens or kills at one of them. `in_child` forks, so a kill costs milliseconds and not a new interpreter.
"""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from specification import CUT, OPEN

from memmap_buffer import ReplayBuffer, StaleEpisodeError
from memmap_buffer.format import syscalls
from memmap_buffer.writing.commit import WriteHandles

System = syscalls.System
KILLED = 137
OPERATIONS = tuple(
    name for name, value in vars(syscalls.System).items() if callable(value) and not name.startswith("_")
)


class Faulty(syscalls.System):
    """The real system calls, counted, and one of them failing.

    Args:
        at: the number of the operation that goes wrong, counted from 1; 0 for none.
        error: it raises OSError of this errno, or this exception.
        kill: the process ends there, without another instruction.
        half: before that, half of the bytes of a write arrive; not of one of at most 64 bytes, which lies in one page.
        short: every write takes at most this many bytes.
        only: which operations count and fail.
        lasting: all operations from `at` on fail, not it alone.
        before: called before each operation.

    Attributes: done: (operation, bytes written) of each, in order; the failed one is not among them.
    """

    def __init__(
        self,
        at: int = 0,
        *,
        error: int | type[BaseException] = 0,
        kill: bool = False,
        half: bool = False,
        short: int = 0,
        only: tuple[str, ...] = OPERATIONS,
        lasting: bool = False,
        before: Callable[[], Any] = lambda: None,
    ) -> None:
        self.at, self.error, self.kill, self.half, self.short = at, error, kill, half, short
        self.only, self.lasting, self.before = only, lasting, before
        self.count = 0
        self.done: list[tuple[str, int]] = []

    @property
    def written(self) -> int:
        """Bytes written."""
        return sum(size for _, size in self.done)

    def _do(self, name: str, *arguments: Any) -> Any:
        self.before()
        self.count += name in self.only
        if name in self.only and (self.count == self.at or (self.lasting and 0 < self.at < self.count)):
            self._fail(name, arguments)
        if name == "pwrite" and self.short:
            fd, data, offset = arguments
            arguments = (fd, _bytes(data)[: self.short], offset)
        result = getattr(super(), name)(*arguments)
        self.done.append((name, result if name == "pwrite" else 0))
        return result

    def _fail(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.half and name == "pwrite" and len(_bytes(arguments[1])) > 64:
            fd, data, offset = arguments
            os.pwrite(fd, _bytes(data)[: len(_bytes(data)) // 2], offset)
        if self.kill:
            os._exit(KILLED)
        raise (
            OSError(self.error, os.strerror(self.error)) if isinstance(self.error, int) else self.error("in the middle")
        )


def _bytes(data: Any) -> bytes:
    return data.tobytes() if isinstance(data, np.ndarray) else bytes(data)


def _watched(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._do(name, *arguments)


for _name in OPERATIONS:
    setattr(Faulty, _name, _watched(_name))


@contextmanager
def system(*arguments: Any, **options: Any) -> Iterator[Faulty]:
    """A `Faulty` in the place of the real system; arguments as for it."""
    real, syscalls.system = syscalls.system, Faulty(*arguments, **options)
    try:
        with counters_written():
            yield syscalls.system
    finally:
        syscalls.system = real


@contextmanager
def counters_written() -> Iterator[None]:
    """The words of `state.npy` are written, not stored into a map: each is an operation, as where maps do not serve."""
    with pytest.MonkeyPatch.context() as patch:
        keep: Callable[[Any, Any], None] = lambda files, counters: files.__dict__.update(_counters=counters)  # noqa: E731
        patch.setattr(WriteHandles, "_counters", property(lambda _: None, keep), raising=False)
        yield


def without_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Barriers are counted and cost nothing: for tests that are not about a crash of the machine."""
    for name in ("barrier", "sync_folder"):
        monkeypatch.setattr(syscalls.System, name, lambda *_: None)


def fork() -> int:
    """`os.fork`, without the warning that threads of torch's run: the children here start none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class Child(NamedTuple):
    """How a child ended, and what it told."""

    status: int
    told: list[Any]


def in_child(work: Callable[[Callable[[Any], None]], Any]) -> Child:
    """Run `work(tell)` in a forked child; `tell(x)` sends something that JSON knows, and survives a kill after it.

    Returns: status 0, 1 after an exception (its text is the last thing told), or `KILLED`.
    """
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(reading)
        os._exit(_child(work, writing))
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = [json.loads(line) for line in pipe]
    return Child(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told)


def _child(work: Callable[[Callable[[Any], None]], Any], writing: int) -> int:
    def tell(message: Any) -> None:
        os.write(writing, json.dumps(message).encode() + b"\n")

    try:
        work(tell)
    except BaseException:
        tell(traceback.format_exc())
        return 1
    return 0


def operations_of(work: Callable[[], Any]) -> list[tuple[str, int]]:
    """The operations that change files which `work` needs, run in a child so that nothing here changes."""

    def counted(tell: Callable[[Any], None]) -> None:
        with system() as seen:
            work()
        tell(seen.done)

    child = in_child(counted)
    assert child.status == 0, child.told
    return [(name, size) for name, size in child.told[-1]]


# What a folder shows


def shown(source: ReplayBuffer | Path) -> list[tuple[int, dict[str, Any]]]:
    """(serial, everything of it as lists) of each episode that can be read, oldest first; a path is opened for it."""
    buffer = source if isinstance(source, ReplayBuffer) else ReplayBuffer.from_folder(source, read_only=True)
    found = []
    for i, serial in enumerate(buffer.serials.tolist()):
        with suppress(StaleEpisodeError):  # it is being changed at this moment, or by a call that failed
            found.append((serial, _plain(buffer.episode(i))))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def flags_of(folder: Path) -> dict[int, int]:
    """serial -> flags of every record on the disk that was ever written, read without the library."""
    records = np.load(folder / "episodes.npy")
    return {int(record["serial"]): int(record["flags"]) for record in records if record["generation"]}


def listing(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below a folder: its size, its time of change, its bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (
            status.st_size,
            status.st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
    return found


def state_of(folder: Path, **options: Any) -> list[tuple[int, dict[str, Any], bool]]:
    """(serial, everything of it, whether it counts as cut short) of what a folder shows when it is opened."""
    found = shown(ReplayBuffer.from_folder(folder, **options))
    flags = flags_of(folder)
    return [(serial, episode, bool(flags[serial] & (CUT | OPEN))) for serial, episode in found]


# Calls that can be made again after they failed


class Play:
    """A buffer that holds its lock, and what is open in it."""

    def __init__(self, folder, **options):
        self.buffer = ReplayBuffer.from_folder(folder, **options)
        self.buffer.begin_episode().abort()
        self.open = None

    def publish(self, value):
        """Stage an episode and publish it; the same one again, where that failed."""
        if self.open is None or self.open.state != "open":
            self.open = self.buffer.begin_episode(task=value)
        while self.open.length < 2:
            t = self.open.length
            self.open.store(x=[value, t], y=value + t)
        if not self.open.finals:
            self.open.final(x=[value, 9])
        self.open.update({"label": value / 2})
        self.open.publish()

    def step(self, t):
        """A step that is visible at once; where that failed it is stored again, unless it is visible all the same."""
        self.open = self.open or self.buffer.begin_episode(task=1)
        if self.open.length == t:
            self.open.store(x=[t, t], y=70 + t)

    def end(self):
        self.open.update({"task": 5, "label": 6})
        if not self.open.finals:
            self.open.final(x=[9, 9])
        self.open.publish()

    def batch(self):
        if self.open is None:
            with self.buffer.batched_episode(2, task=[1, 2]) as self.open:
                self.buffer.store_batch(x=np.zeros((2, 2)), y=[1, 2])
        else:
            self.open.publish()

    def half_batch(self, i):
        self.buffer.store_episode(x=[[0, 0]], y=[i], task=i)


def perform(play: Play, calls: list[Any], done: Callable[[], Any] = lambda: None) -> None:
    """Make calls; one that is a tuple is its first member, the others say which changes it makes."""
    for call in calls:
        (call[0] if isinstance(call, tuple) else call)(play)
        done()


# What should be shown


@dataclass(eq=False)
class Told:
    """An episode as it was told to the buffer: `stored` so far, and of that `steps`, `task`, `final` as shown."""

    handle: Any
    keep: bool
    late: int
    stored: list[dict[str, Any]] = field(default_factory=list)
    last: list[float] | None = None
    serial: int | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    task: int | None = None
    final: list[float] | None = None
    cut: bool = False
    first: int = 0


class Model:
    """A ring of episodes as lists: `live` are shown from their `first` step on, `open` are being written.

    `published` has the episode of each timestep that is shown, in the order of their publication.
    """

    def __init__(self, circular: bool, max_episodes: int, capacity: int | None) -> None:
        self.circular, self.max_episodes, self.capacity = circular, max_episodes, capacity or 10**6
        self.live: list[Told] = []
        self.open: list[Told] = []
        self.published: list[Told] = []
        self.next = 0

    @property
    def num_steps(self) -> int:
        return sum(len(one.steps) - one.first for one in self.live)

    @property
    def whole(self) -> list[Told]:
        """The episodes of which all steps are shown."""
        return [one for one in self.live if not one.first]

    def refuses(self, episodes: int, steps: int) -> bool:
        """Whether so many more do not fit."""
        over = len(self.live) + episodes > self.max_episodes or self.num_steps + steps > self.capacity
        return over and not self.circular

    def show(self, one: Told) -> None:
        """Show what is stored of it; it gets its number if it has none, and the oldest that do not fit go."""
        if one.serial is None:
            one.serial, one.task, self.next = self.next, one.late, self.next + 1
            self.live.append(one)
        if one in self.live:
            self.published += [one] * (len(one.stored) - len(one.steps))
        one.steps = list(one.stored)
        self.leave(*self.live[: -self.max_episodes])
        for old in self.published[: max(0, len(self.published) - self.capacity)]:
            old.first += 1
        self.published = self.published[-self.capacity :]
        self.leave_if_empty()

    def leave(self, *gone: Told) -> None:
        """These are shown no more."""
        self.live = [one for one in self.live if one not in gone]
        self.published = [one for one in self.published if one not in gone]

    def leave_if_empty(self) -> None:
        self.leave(*(one for one in self.live if one.first == len(one.steps) and one not in self.open))

    def end(self, one: Told, cut: bool = False) -> None:
        """It is over: all of it is shown, if there is anything."""
        if one.stored:
            self.show(one)
            one.task, one.final, one.cut = one.late, one.last, cut
        if one in self.open:
            self.open.remove(one)
        self.leave_if_empty()
