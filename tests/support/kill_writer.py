"""A program that writes until it is killed and tells what it was promised, and the oracle of what must be there then.

    python kill_writer.py

reads jobs from its standard input, one JSON object a line: {"work": a name in WORK, "folder": …, and options of the
buffer}. It imports the package once and forks for each job, so a kill costs milliseconds. It writes one JSON value a
line: the child's process id, what the child tells, and when that is gone {"ended": its exit status}.

Whatever stands in an episode follows from its serial and the version that an update gave it (`content`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fault_injection import in_child
from inside import shows_steps

from memmap_buffer import BufferLockedError, Field, ReplayBuffer
from memmap_buffer.writing import episode as staging

LONGEST = 24
RING = {"max_episodes": 8, "max_timesteps": LONGEST, "circular": True, "spare_slots": 3}
FIELDS = {
    "serial": "int",
    "t": "int",
    "image": ("uint8", (64, 64)),
    "state": Field("float32", 8, final=True),
    "note": "float32",
}
CODED = {
    **FIELDS,
    "image": Field("uint8", (64, 64), codec="zstd"),
    "state": Field("float32", 8, final=True, codec="zstd"),
    "note": Field("float32", codec="zstd"),
}
META_FIELDS = {"version": "int", "task": "U8"}

Tell = Callable[[Any], None]


def content(serial: int, version: int = 0) -> dict[str, Any]:
    """Everything in an episode: fields (T, *field), `state` (T + 1, 8), and meta fields."""
    rng = np.random.default_rng(serial)
    length = int(rng.integers(1, LONGEST + 1))
    return {
        "serial": np.full(length, serial),
        "t": np.arange(length),
        "image": rng.integers(0, 256, (length, 64, 64), np.uint8),
        "state": rng.standard_normal((length + 1, 8), np.float32),
        "note": np.arange(length, dtype=np.float32) + 100 * version + serial,
        "version": version,
        "task": f"task {serial % 7}",
    }


def steps(serial: int) -> Iterator[dict[str, Any]]:
    """The timesteps of an episode, one at a time."""
    whole = content(serial)
    for t in range(len(whole["t"])):
        yield {name: whole[name][t] for name in FIELDS}


def same(got: dict[str, Any], serial: int, version: int = 0, length: int | None = None) -> bool:
    """Whether an episode is what it must be, bit for bit; or its first `length` steps, without the final state."""
    whole = content(serial, version)
    wanted = {name: values if length is None else values[:length] for name, values in whole.items() if name in FIELDS}
    meta_same = all(got[name] == whole[name] for name in META_FIELDS)
    return meta_same and all(
        got[name].shape == rows.shape and bool((got[name] == rows).all()) for name, rows in wanted.items()
    )


def ended_at(got: dict[str, Any], serial: int) -> int | None:
    """The steps of an episode that was cut short, None of one that was ended."""
    return None if len(got["state"]) == len(content(serial)["state"]) else len(got["t"])


def following(buffer: ReplayBuffer) -> int:
    """The serial after the newest visible one."""
    return int(buffer.serials[-1]) + 1 if len(buffer) else 0


# Buffers of such episodes


def make(folder: Path, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(folder, meta_fields=META_FIELDS, **{"fields": FIELDS, **RING, **options})


def staged(buffer: ReplayBuffer, serial: int) -> Any:
    """An episode with all its steps, not yet published."""
    episode = buffer.begin_episode(task=content(serial)["task"])
    for step in steps(serial):
        episode.store(**step)
    episode.final(state=content(serial)["state"][-1])
    return episode


def exact(source: ReplayBuffer | Path, still_open: int = -1) -> list[int]:
    """The visible serials; each episode is bit for bit what was stored under its own, or the first steps of it."""
    buffer = source if isinstance(source, ReplayBuffer) else ReplayBuffer.from_folder(source, read_only=True)
    serials: list[int] = buffer.serials.tolist()
    for i, serial in enumerate(serials):
        got = buffer.episode(i)
        assert same(got, serial, length=ended_at(got, serial) if serial == still_open else None), serial
    return serials


# Children of a test


def told_by(work: Callable[[Tell], Any]) -> list[Any]:
    """What a forked child tells; it must end well."""
    child = in_child(work)
    assert child.status == 0, child.told
    return child.told


def try_to_write(folder: Path) -> dict[str, Any]:
    """What a second writer gets, told as JSON knows it."""
    start = time.monotonic()
    try:
        with ReplayBuffer.from_folder(folder) as buffer:
            buffer.store_episode(**content(following(buffer)))
    except BufferLockedError as error:
        took = time.monotonic() - start
        return {"pid": error.pid, "host": error.host, "since": error.since, "text": str(error), "took": took}
    return {"written": following(ReplayBuffer.from_folder(folder)) - 1}


# What a child may do; each acknowledged thing is told as [serial, length or None for all of it, version]


def whole(buffer: ReplayBuffer, tell: Tell) -> None:
    """Publish episode after episode. With `sync_every` some become visible together, and are told then."""
    told = serial = following(buffer)
    while True:
        buffer.store_episode(**content(serial))
        serial += 1
        while told < following(buffer):
            tell([told, None, 0])
            told += 1


def stepwise(buffer: ReplayBuffer, tell: Tell) -> None:
    """Store step by step; with publish="step" each step is a promise of its own."""
    each_step = shows_steps(buffer)
    staging.CHUNK_BYTES = 3 * 4300  # with stage="disk" three steps a chunk, so that there are several
    while True:
        serial = following(buffer)
        with buffer.one_episode(task=f"task {serial % 7}") as episode:
            for step in steps(serial):
                episode.store(**step)
                if each_step:
                    tell([serial, episode.length, 0])
            episode.final(state=content(serial)["state"][-1])
        tell([serial, None, 0])


def update(buffer: ReplayBuffer, tell: Tell) -> None:
    """Raise the version of episodes in turn, a new episode now and then."""
    for turn in range(10**9):
        if turn % 4 == 0:
            serial = following(buffer)
            buffer.store_episode(**content(serial))
            tell([serial, None, 0])
        i = turn * 5 % len(buffer)
        serial, old = int(buffer.serials[i]), buffer.episode(i)
        version, length = int(old["version"]) + 1, len(old["note"])
        buffer.update(i, note=content(serial, version)["note"][:length], version=version)
        tell([serial, ended_at(old, serial), version])


def create(folder: Path, tell: Tell, **options: Any) -> None:
    """Create a buffer, and hold it until the kill."""
    buffer = make(folder, **options)
    tell(len(buffer))
    signal.pause()


def hold(buffer: ReplayBuffer, tell: Tell) -> None:
    """Write, fork a child that lives until the standard input is closed, and wait."""
    buffer.store_episode(**content(following(buffer)))
    child = os.fork()
    if child:
        tell({"child": child})
    sys.stdin.read()


def end(buffer: ReplayBuffer, tell: Tell, leave: str) -> None:
    """End the interpreter with an episode open, in one of several ways, or that of a forked child."""
    buffer.store_episode(**content(0))
    episode = buffer.begin_episode(task="open")
    for step in steps(1):
        episode.store(**step)
    tell("stored")
    sys.stdin.readline()
    if leave == "fork":
        child = os.fork()
        if child:
            tell(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            sys.stdin.readline()
            os._exit(0)
    if leave == "raise":
        raise SystemExit(3)
    if leave == "collect":
        import gc

        del buffer, episode
        gc.collect()


def record_and_publish(folder: Path, tell: Tell, begin: int, url: str, **options: Any) -> None:
    """Record episode after episode into shards that are published; their numbers go on from `begin`."""
    buffer = make(folder, circular=False, shard="auto", publish_to=url, **options)
    tell(None)
    for number in range(begin, 10**9):
        buffer.store_episode(**content(number))
        tell(number)


WORK: dict[str, Callable[..., None]] = {
    "whole": whole,
    "stepwise": stepwise,
    "update": update,
    "hold": hold,
    "end": end,
}


def do(job: dict[str, Any], tell: Tell) -> None:
    work, folder, leave = job.pop("work"), Path(job.pop("folder")), job.pop("leave", None)
    if work == "create":
        create(folder, tell, **job)
    elif work == "publish":
        record_and_publish(folder, tell, **job)
    else:
        WORK[work](ReplayBuffer.from_folder(folder, **job), tell, *([] if leave is None else [leave]))


def tell(message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")  # one write below PIPE_BUF: whole or not at all


def serve() -> None:
    """Fork for each job; wait until the child is gone."""
    while line := sys.stdin.buffer.raw.readline():  # type: ignore[union-attr]
        child = os.fork()
        if child == 0:
            tell(os.getpid())
            do(json.loads(line), tell)
            return
        _, status = os.waitpid(child, 0)
        tell({"ended": os.waitstatus_to_exitcode(status)})


class Writers:
    """This program, running, and whoever kills its jobs."""

    def __init__(self) -> None:
        self._program = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._program.stdin and self._program.stdout
        self._jobs, self._told = self._program.stdin, self._program.stdout

    def begin(self, **job: Any) -> int:
        """Start a job; its process id."""
        self.go_on(json.dumps(job))
        child = self.tell()
        assert isinstance(child, int)
        return child

    def tell(self) -> Any:
        """The next thing told."""
        return json.loads(self._told.readline())

    def go_on(self, line: str = "") -> None:
        self._jobs.write(line.encode() + b"\n")
        self._jobs.flush()

    def ended(self) -> tuple[list[Any], int]:
        """What was told until the job's process was gone, and its exit status."""
        told = []
        while not (isinstance(message := self.tell(), dict) and "ended" in message):
            told.append(message)
        return told, message["ended"]

    def killed(self, delay: float, after: int = 0, **job: Any) -> list[Any]:
        """What a job told before it was killed, some seconds after its start or after so many things that it told."""
        child, first = self.begin(**job), list[Any]()
        while len(first) < after:
            first.append(self.tell())
            assert not isinstance(first[-1], dict), first  # it has ended
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        told, status = self.ended()
        assert status == -signal.SIGKILL, told
        return first + told

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: Any) -> None:
        self._jobs.close()
        self._program.wait(60)
        self._told.close()


if __name__ == "__main__":
    serve()
