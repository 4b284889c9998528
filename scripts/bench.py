"""Measure this library against the lower bound that plain numpy and the system set, in one run; prints ratios.

    python scripts/bench.py [--case NAME ...] [--repeats N] [--json]

A case is two functions over the same data: ours, and the bound, which does the same work without any of our checks.
They are interleaved, the median of each is taken, and what they read or wrote is compared outside the timed part.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from memmap_buffer import ReplayBuffer
from memmap_buffer.reading.order import draw
from memmap_buffer.reading.reader import Reader
from memmap_buffer.reading.sources import Sources

STEPS = 500
FIELDS = {
    "observation": ("float", 17),
    "action": ("float", 6),
    "reward": "float",
    "terminated": "bool",
    "truncated": "bool",
    "info": ("float", 6),
}  # 122 bytes a step: 61 KB an episode in 6 fields


@dataclass(frozen=True)
class Row:
    """One line of the table: medians in microseconds, ours over the bound as `ratio`, and the most that is allowed."""

    case: str
    ours_us: float
    bound_us: float
    ratio: float
    limit: str


def publish(folder: Path, repeats: int, durability: str) -> Row:
    """Publishing a staged episode of 61 KB, over `pwrite` of the same bytes (power: with a barrier on each file)."""
    episodes = 1000  # 61 MB: the pages written are not those that are in the processor's cache
    with ReplayBuffer(folder, episodes, STEPS, FIELDS, circular=True, durability=durability) as buffer:
        arrays = episode(0)
        bound = PlainFiles(folder.parent, arrays, episodes + 1, sync=durability == "power")
        for i in range(episodes + 1):  # every page exists before anything is timed
            buffer.store_episode(**arrays)
            bound.write(i, arrays)
        ours, plain = [], []
        for i in range(repeats):
            staged = buffer.begin_episode()
            arrays = episode(i)
            staged.fill(arrays, STEPS)
            ours.append(seconds(staged.publish))
            plain.append(seconds(lambda slot=i % episodes, data=arrays: bound.write(slot, data)))
        stored = buffer.episode(-1)
        assert all(np.array_equal(stored[name], arrays[name]) for name in FIELDS), "what was stored differs"
        bound.close()
    limit = "2.5" if durability == "process" else "1.3"
    return row(f"publish, {durability}", ours, plain, limit)


class PlainFiles:
    """The bound of `publish`: the bytes that it writes, to as many files, by `pwrite` (and the barriers) alone."""

    def __init__(self, folder: Path, arrays: dict[str, np.ndarray], slots: int, *, sync: bool) -> None:
        self._sync = sync
        names = [*arrays, "checksums", "records", "state"]
        self._fds = {name: os.open(folder / f"plain.{name}", os.O_RDWR | os.O_CREAT, 0o600) for name in names}
        for name, fd in self._fds.items():
            os.ftruncate(fd, slots * (arrays[name].nbytes if name in arrays else 128))

    def write(self, slot: int, arrays: dict[str, np.ndarray]) -> None:
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


def generation_check(folder: Path, repeats: int) -> Row:
    """What reading the generations again adds to a batch of 256, over the batch itself."""
    with ReplayBuffer(folder, 200, STEPS, FIELDS) as buffer:
        for i in range(200):
            buffer.store_episode(**episode(i))
        reader = Reader(Sources([buffer._storage]), {"timestep_level": True})
        index, rng = reader.index(refresh=True), np.random.default_rng(0)
        check, batch = [], []
        for _ in range(repeats):
            anchors = draw(reader.selection, reader.sources, index, 256, rng)
            generation = reader.sources.episodes(anchors).generation
            check.append(seconds(lambda a=anchors, g=generation: reader.sources.unchanged(a, g)))
            batch.append(seconds(lambda a=anchors: reader.read(a)))
    return row("generation check of 256", check, batch, "10 us")


def episode(i: int) -> dict[str, np.ndarray]:
    """An episode whose content tells its number."""
    out = {}
    for name, spec in FIELDS.items():
        kind, shape = (spec, ()) if isinstance(spec, str) else (spec[0], (spec[1],))
        out[name] = np.full((STEPS, *shape), i % 2 if kind == "bool" else i, np.bool_ if kind == "bool" else np.float32)
    out["terminated"][:-1] = out["truncated"][:-1] = False
    return out


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def row(case: str, ours: list[float], bound: list[float], limit: str) -> Row:
    a, b = statistics.median(ours) * 1e6, statistics.median(bound) * 1e6
    return Row(case, round(a, 1), round(b, 1), round(a / b, 2), limit)


CASES: dict[str, Callable[[Path, int], Row]] = {
    "publish-process": lambda folder, repeats: publish(folder, repeats, "process"),
    "publish-power": lambda folder, repeats: publish(folder, max(20, repeats // 10), "power"),
    "generation-check": generation_check,
}


@contextmanager
def workplace() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="memmap-bench-", dir="."))
    try:
        yield root / "buffer"
    finally:
        shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = parser.parse_args()
    if not given.json:
        sys.stdout.write(f"{'case':28} {'ours us':>10} {'bound us':>10} {'ratio':>7}  to reach\n")
    for name in given.case:
        with workplace() as folder:
            line = CASES[name](folder, given.repeats)
        if given.json:
            sys.stdout.write(json.dumps(asdict(line)) + "\n")
        else:
            sys.stdout.write(f"{line.case:28} {line.ours_us:10} {line.bound_us:10} {line.ratio:7}  {line.limit}\n")


if __name__ == "__main__":
    main()
