"""A writer that turns a small ring as fast as it can, readers beside it, and the check of every row that they get.

Every value of an episode follows from its serial, its version (which update wrote it), the field and the timestep, so
a row that is mixed, moved or half overwritten is seen. `wrong` is the check; it knows every view.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer import (
    Field,
    NotEnoughDataError,
    NStep,
    Offsets,
    RandomCrop,
    ReplayBuffer,
    StaleEpisodeError,
    Timestep,
    Trajectory,
    Window,
)

WIDTH = 48  # 64-bit numbers a row: a slot is some pages, so that overwriting it takes a while
FIELDS = {
    "number": "int",
    "step": "int",
    "value": ("int", (WIDTH,)),
    "observation": Field("float", (4,), final=True),
}
CODED = {
    "number": Field("int", codec="zstd"),  # too short to become shorter
    "step": "int",
    "value": Field("int", (WIDTH,), codec="zstd"),
    "observation": Field("float", (4,), final=True, codec="zstd"),
}
META_FIELDS = {"serial": "int", "version": "int", "end": "int"}
VIEWS = {
    "trajectory": Trajectory(return_mask=True),
    "final": Trajectory(final_observation=True),
    "timestep": Timestep(),
    "n-step": NStep(3, sequence_fields=("number", "value")),
    "window": Window(4, stride=2, pad_before=1),
    "shifted": Window(5, boundary="shift"),
    "crop": RandomCrop(4),
    "offsets": Offsets(number=(-2, 0), value=(-1, 0, 2), observation=(0, 1)),
}
RING, LONGEST = 8, 16
BATCH = 256
EPISODES = 32  # that are read whole, one by one, for every round of views


class Truth(NamedTuple):
    """What every episode holds, by its serial alone.

    Args:
        varied: the length follows from the serial, and is LONGEST otherwise. finals: every other one has its final
            observation.
        growing: an episode may be met before it is complete.
    """

    varied: bool = False
    finals: bool = True
    growing: bool = False

    def length(self, serial: Any) -> Any:
        return serial * 7 % LONGEST + 1 if self.varied else serial * 0 + LONGEST

    end = length  # what the meta field of that name says

    def has_final(self, serial: Any) -> Any:
        return (serial % 2 == 0) & self.finals

    def row(self, name: str, serial: Any, version: Any, t: Any) -> np.ndarray:
        """The values of a field: arrays of one shape in, the field's axes behind it out."""
        serial, version, t = np.broadcast_arrays(serial, version, t)
        if name in ("number", "step"):
            return serial if name == "number" else t
        if name == "observation":  # small whole numbers, exact in float32
            return np.stack([serial % 2**20, t, (serial + t) % 2**20, t - t], axis=-1).astype(np.float32)
        return (serial * 1_000_003 + t * 1_009 + version * 17)[..., None] + np.arange(WIDTH)

    def episode(self, serial: int, version: int = 0) -> dict[str, np.ndarray]:
        """A whole episode as `store_episode` takes it."""
        length = self.length(serial)
        t = np.arange(length + self.has_final(serial))
        columns = {name: self.row(name, serial, version, t) for name in FIELDS}
        data = {name: column if name == "observation" else column[:length] for name, column in columns.items()}
        return data | {"serial": serial, "version": version, "end": length}


# The check


class Cut(NamedTuple):
    """One key of a batch: its values (B, K, …), from which timesteps they are, and which of these exist: (B, K)."""

    name: str
    values: np.ndarray
    t: np.ndarray
    exists: np.ndarray


def wrong(batch: dict[str, Any], truth: Any) -> np.ndarray:
    """(B,) bool, which items of a batch hold anything but what their serial, version and timestep say.

    Args: batch: of a view in `VIEWS`, with meta fields and indices. truth: a `Truth`, or what has its methods.
    """
    data = {key: value.numpy() for key, value in batch.items()}
    serial, start = _anchors(data)
    bad = (data["serial"] != serial) | (data["end"] != truth.end(serial))
    if not truth.growing:
        bad |= _wrong_lengths(data, start, truth.length(serial), truth.has_final(serial))
    for name, got, t, exists in _cuts(data, start, truth.has_final(serial)):
        expected = truth.row(name, serial[:, None], data["version"][:, None], t)
        shaped = exists.reshape(exists.shape + (1,) * (got.ndim - 2))
        bad |= (got != np.where(shaped, expected, 0)).reshape(len(got), -1).any(axis=1)
    return bad


def _anchors(data: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The serial and the first timestep of each item."""
    if "_indices" in data:
        return data["_indices"][:, 0], data["_indices"][:, 1]
    return data["_index"], data.get("_start", np.zeros_like(data["_index"]))


def _wrong_lengths(
    data: dict[str, np.ndarray], start: np.ndarray, length: np.ndarray, has_final: np.ndarray
) -> np.ndarray:
    if "n_step_lens" in data:
        return data["n_step_lens"] != np.minimum(VIEWS["n-step"].n, length - start - ~has_final)
    if "_lens" not in data:
        return (start < 0) | (start >= length)
    if "_start" not in data:
        return data["_lens"] != length
    stop = start + data["number"].shape[1]
    inside = np.minimum(stop, length) - np.maximum(start, 0)
    return (data["_lens"] != inside) | (data["_reaches_episode_end"] != (stop >= length))


def _cuts(data: dict[str, np.ndarray], start: np.ndarray, has_final: np.ndarray) -> Iterator[Cut]:
    if "n_step_lens" in data:
        yield from _transitions(data, start, data["n_step_lens"])
    elif "_mask_number" in data:
        for name, offsets in VIEWS["offsets"].offsets.items():
            yield Cut(name, data[name], start[:, None] + np.array(offsets), data[f"_mask_{name}"])
    elif "_lens" in data:
        yield from _sequences(data, start, has_final)
    else:
        for name in FIELDS:
            yield Cut(name, data[name][:, None], start[:, None], np.ones((len(start), 1), bool))


def _sequences(data: dict[str, np.ndarray], start: np.ndarray, has_final: np.ndarray) -> Iterator[Cut]:
    stop = np.maximum(start, 0) + data["_lens"]  # a window may begin before its episode; its length counts what exists
    for name in FIELDS:
        longer = data[name].shape[1] > data["number"].shape[1]  # a view with `final_observation`
        t = start[:, None] + np.arange(data[name].shape[1])
        yield Cut(name, data[name], t, (t >= 0) & (t < (stop + (has_final & longer))[:, None]))


def _transitions(data: dict[str, np.ndarray], t: np.ndarray, k: np.ndarray) -> Iterator[Cut]:
    steps = np.arange(data["seq_number"].shape[1])
    for name in FIELDS:
        yield Cut(name, data[name][:, None], t[:, None], np.ones((len(t), 1), bool))
        behind = (t + k == data["end"]) & (name != "observation")  # only it has a row behind the last step
        yield Cut(name, data[f"next_{name}"][:, None], (t + k)[:, None], ~behind[:, None])
    for name in ("number", "value"):
        yield Cut(name, data[f"seq_{name}"], t[:, None] + steps, steps < k[:, None])


# The writer


def create(folder: Path, **options: Any) -> None:
    """An empty ring of 8."""
    ReplayBuffer(folder, RING, LONGEST, meta_fields=META_FIELDS, circular=True, **{"fields": FIELDS, **options}).close()


def turn(folder: Path, truth: Truth, until: Callable[[], bool], *, updates: bool = False, **how: Any) -> int:
    """Publish one episode after the other, some of them updated, until told to stop; how many."""
    buffer, done = ReplayBuffer.from_folder(folder, **how), 0
    serial = int(buffer.serials[-1]) + 1 if len(buffer) else 0
    while not until():
        if how.get("publish") == "step":
            _store_steps(buffer, truth.episode(serial + done))
        else:
            buffer.store_episode(**truth.episode(serial + done))
        done += 1
        if updates and done % 4 == 0:
            _update(buffer, truth, len(buffer) - 1 - done // 4 % len(buffer), version=done)
    return done


def _store_steps(buffer: ReplayBuffer, episode: dict[str, Any]) -> None:
    with buffer.one_episode(**{name: episode[name] for name in META_FIELDS}) as opened:
        for t in range(episode["end"]):
            opened.store(**{name: episode[name][t] for name in FIELDS})


def _update(buffer: ReplayBuffer, truth: Truth, position: int, version: int) -> None:
    serial = int(buffer.serials[position])
    buffer.update(position, value=truth.episode(serial, version)["value"], version=version)


# The readers


def read(folder: Path, truth: Truth, until: Callable[[], bool]) -> Counter[str]:
    """Read through every view, by `sample`, by loaders and one by one, until told to stop; counts of what came."""
    import torch

    torch.set_num_threads(1)
    buffer, seen, newest = ReplayBuffer.from_folder(folder, read_only=True), Counter[str](), 0
    while not until():
        for name, view in VIEWS.items():
            for batch in _batches(buffer, view, seen):
                bad = wrong(batch, truth)
                seen.update({"batches": 1, "rows": len(bad), name: len(bad), "wrong": int(bad.sum())})
        for _ in range(EPISODES):
            with _counted(seen):
                seen.update(rows=1, episode=1, wrong=not _is_right(buffer.episode(-1), truth))
            serials = buffer.serials
            seen["went back"] += len(serials) == 0 or int(serials[-1]) < newest
            newest = max([newest, *serials.tolist()])
    return seen


def _batches(buffer: ReplayBuffer, view: Any, seen: Counter[str]) -> Iterator[dict[str, Any]]:
    """Four samples and an epoch. A batch that cannot be drawn is counted; there should be none."""
    for _ in range(4):
        with _counted(seen):
            yield buffer.sample(BATCH, view=view, return_indices=True)
    with _counted(seen):
        yield from buffer.dataloader(BATCH, view=view, return_indices=True, shuffle=True, seed=seen["batches"])


def _is_right(episode: dict[str, Any], truth: Truth) -> bool:
    serial, length = int(episode["serial"]), len(episode["number"])
    expected = truth.episode(serial, int(episode["version"]))
    whole = length == truth.length(serial) or truth.growing
    stop = {name: length + (name == "observation" and bool(truth.has_final(serial))) for name in FIELDS}
    return whole and all(np.array_equal(episode[name], expected[name][:n]) for name, n in stop.items())


@contextmanager
def _counted(seen: Counter[str]) -> Iterator[None]:
    try:
        yield
    except (StaleEpisodeError, NotEnoughDataError) as error:
        seen[type(error).__name__] += 1


# Processes


class Beside:
    """A function running in a forked child; it returns what JSON knows."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._pipe, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside torch's threads: they hold no lock
            self._pid = os.fork()
        if self._pid == 0:
            os._exit(_child(work, writing))
        os.close(writing)

    def result(self) -> Any:
        """What it returned. Raises AssertionError with its traceback if it failed."""
        with os.fdopen(self._pipe) as pipe:
            text = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        assert status == 0, f"status {status}: {text}"
        return json.loads(text)


def _child(work: Callable[[], Any], writing: int) -> int:
    try:
        text, status = json.dumps(work()), 0
    except BaseException:
        text, status = traceback.format_exc(), 1
    os.write(writing, text.encode()[:60_000])
    return status


def race(
    folder: Path, truth: Truth, seconds: float, *, readers: int = 4, updates: bool = False, **how: Any
) -> Counter[str]:
    """One writer and some readers, each a process, for a time; what they counted, all together.

    They share two processors, where that can be said: so each is stopped in the middle of everything. However slow they
    are, the ring turns twice while each reader reads through every view. Raises AssertionError where it does not within
    two minutes more.
    """
    turn(folder, truth, after(RING), **how)  # the ring is full when the readers begin
    end, first = time.monotonic() + seconds, after(1)
    # The episodes that were written; whether the readers are done; whether the writer is, as it fails.
    shared = np.frombuffer(mmap.mmap(-1, 24), np.int64)

    def wrote() -> bool:
        shared[0] += 1
        return bool(shared[1])

    def has_read() -> bool:
        late = time.monotonic() - end  # seconds
        return bool(shared[2]) or late > 120 or (first() and late > 0 and bool(shared[0] > 2 * RING))

    def write() -> int:
        try:
            return turn(folder, truth, wrote, updates=updates, **how)
        finally:
            shared[2] = 1

    with _few_processors():
        writer = Beside(write)
        reading = [Beside(lambda: read(folder, truth, has_read)) for _ in range(readers)]
    try:
        counts = sum((Counter(reader.result()) for reader in reading), Counter())
    finally:
        shared[1] = 1
    counts["episodes"] = writer.result()
    assert shared[0] > 2 * RING, f"the writer had no more than {shared[0]} turns"
    return counts


@contextmanager
def _few_processors() -> Iterator[None]:
    """Children of this process run on two of its processors."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def after(episodes: int) -> Callable[[], bool]:
    """True when it was asked more often than that."""
    left = iter(range(episodes))
    return lambda: next(left, None) is None
