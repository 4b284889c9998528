"""Costs that must not grow with the store: opening, drawing, and the check of the generations."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memmap_buffer
from bench.data import TRANSITIONS, Run, forge
from bench.measure import BOUND, OURS, Call, Goal, Row, finish, medians
from bench.read import endless, windowed
from memmap_buffer import ReplayBuffer, Window
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.views.folders import Folders

STEPS = 1000  # of every episode, so that 10^9 steps are 10^6 episodes
LEAST = 5  # the scale begins at 10^5 steps
ONE_BYTE = {"x": "uint8"}  # 10^9 steps are 1 GB of page cache, all of it present before a draw is timed
VIEWS: dict[str, tuple[dict[str, Any], int]] = {
    "steps": ({"timestep_level": True}, 1),
    "windows of 64": ({"view": Window(64, boundary="drop")}, 64),
    "5-step items": ({"n_steps": 5}, 1),
}
OPENING = """
import json, sys, time
import torch, torch.utils.data, memmap_buffer, memmap_buffer.loading.datasets
start = time.perf_counter()
buffer = memmap_buffer.ReplayBuffer.from_folder(sys.argv[1], read_only=True)
batch = next(iter(buffer.dataloader(256, timestep_level=True, shuffle=True)))
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "episodes": len(buffer), "rows": len(batch["x"])}))
"""


def opening(run: Run) -> Iterator[Row]:
    """A new process opens a folder of 10^6 episodes and takes one shuffled batch; the imports are not counted."""
    episodes, times = 10**run.top // STEPS, max(2, min(7, run.repeats // 100))
    folders = {steps: forge(run.folder("open"), episodes, steps, ONE_BYTE) for steps in (1, STEPS)}
    ms = {}
    for steps, folder in folders.items():
        said = [json.loads(_python(OPENING, str(folder))) for _ in range(times)]
        expected = {"episodes": episodes, "rows": min(256, episodes * steps)}
        assert all(expected.items() <= one.items() for one in said), "not what was forged"
        ms[steps] = 1e3 * statistics.median(one["seconds"] for one in said)
    of_one, of_many = ms.values()
    name, limit = f"open 10^{run.top - 3} episodes, first batch", Goal(50, at_most=True, unit=" ms")
    yield finish(name, "ms", of_many, None, of_many, limit)
    yield finish(f"  {STEPS} steps each, over 1", "ms", of_many, of_one, of_many / of_one, Goal(1.3, at_most=True))


def _python(code: str, *arguments: str) -> str:
    """The output of a new interpreter that imports the measured package."""
    command, package = [sys.executable, "-c", code, *arguments], Path(memmap_buffer.__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": str(package)}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout


def growth(run: Run) -> Iterator[Row]:
    """Draws of 256 items from 10^5 to 10^9 steps: our growth over the growth of copying as many rows."""
    sizes = {n: Sparse(forge(run.folder("scale"), 10**n // STEPS, STEPS, ONE_BYTE)) for n in range(LEAST, run.top + 1)}
    for name, (options, length) in VIEWS.items():
        for how, ours in (("sample", Sparse.sample), ("shuffled", Sparse.shuffled)):
            calls: dict[str, Call] = {}
            for n, sparse in sizes.items():
                calls |= {f"{OURS} {n}": ours(sparse, options), f"{BOUND} {n}": sparse.gather(length)}
            seconds = medians(calls, run.repeats)
            yield from grown(f"{how} {name}", list(sizes), seconds)


def grown(case: str, sizes: list[int], seconds: dict[str, float]) -> Iterator[Row]:
    """The figure is a ratio of two factors; the growth of each since 10^5, in us, stands beside it."""
    us = {name: [1e6 * seconds[f"{name} {n}"] for n in sizes] for name in (OURS, BOUND)}
    for n, ours, bound in zip(sizes, us[OURS], us[BOUND], strict=True):
        figure = ours / us[OURS][0] / (bound / us[BOUND][0])
        more = {"more": ours - us[OURS][0], "bound more": bound - us[BOUND][0]} if n > LEAST else {}
        goal = Goal(1.3 if more else None, at_most=True)
        yield finish(f"{case}, 10^{n} steps", "us", ours, bound, figure, goal, more)


class Sparse:
    """A sparse folder with all pages present, in our map and in a plain one."""

    def __init__(self, folder: Path) -> None:
        self.buffer = ReplayBuffer.from_folder(folder, read_only=True)
        self.x = torch.from_numpy(np.load(folder / "data" / "x.npy", mmap_mode="c").view(np.ndarray)).flatten()
        ours = self.buffer._storage.maps.rows["x"]
        assert not ours[::4096].any() and not self.x[::4096].any(), "what was forged is not zero"

    def sample(self, options: dict[str, Any]) -> Call:
        return lambda: self.buffer.sample(256, **options)

    def shuffled(self, options: dict[str, Any]) -> Call:
        stream = endless(self.buffer.dataloader(256, shuffle=True, **options))
        return lambda: next(stream)

    def gather(self, length: int) -> Call:
        """256 windows of as many steps, into a given output."""
        rows, out = windowed(self.x, length), torch.empty(256, length, dtype=torch.uint8)
        rng = np.random.default_rng(0)
        picks = iter(lambda: torch.from_numpy(rng.integers(0, len(rows), (4096, 256))), None)
        batches = (batch for many in picks for batch in many)
        prepared = [next(batches) for _ in range(4096)]
        turn = endless(prepared)
        return lambda: torch.index_select(rows, 0, next(turn), out=out)


def generation_check(run: Run) -> Iterator[Row]:
    """The time to compare the generations of a batch of 256 whole steps, beside the batch itself."""
    reader = BatchReader(Folders([run.store("low-dim").buffer._storage]), TRANSITIONS)
    index, rng = reader.index(refresh=True), np.random.default_rng(0)
    drawn = [index.draw(256, rng) for _ in range(64)]
    built, reads = endless([reader.build(anchors) for anchors in drawn]), endless(drawn)

    def check() -> object:
        return next(built).fresh()

    calls: dict[str, Callable[[], object]] = {
        OURS: check,
        BOUND: lambda: reader.read(next(reads)),
    }
    ours, batch = (1e6 * value for value in medians(calls, run.repeats).values())
    yield finish(
        "generation check of 256, beside the batch", "us", ours, batch, ours, Goal(10, at_most=True, unit=" us")
    )
