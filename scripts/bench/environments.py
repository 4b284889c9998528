"""Steps of many environments at once: `add` against assignments of the same arrays, in microseconds an environment."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.data import Arrays, Run
from bench.measure import Goal, Row, finish
from memmap_buffer import NotEnoughDataError, ReplayBuffer

NUMBERS, MEAN_LENGTHS, PUBLISH = (1, 64, 1024, 4096), (50, 300), ("step", "episode")
FIELDS = {"observation": ("float", 48), "reward": "float", "terminated": "bool"}
LONGEST = 2000  # timesteps of an episode
SHOWN = 200  # timesteps of each environment that the ring shows
AT_MOST = 2.0  # microseconds an environment, from 64 of them on
FROM = 64
SECONDS = 0.5  # for which a figure is measured at least, at the default number of repeats


def many(run: Run) -> Iterator[Row]:
    """A row for each number of environments, mean length, way to publish, and with or without a reader beside it."""
    for num_envs in NUMBERS:
        for mean_length in MEAN_LENGTHS:
            steps = [step(num_envs, mean_length, t) for t in range(32)]
            for publish in PUBLISH:
                for read in (False, True):
                    seconds, bound = measured(run, num_envs, publish, steps, read=read)
                    what = f"add {num_envs}, ends at {mean_length}, {publish}{', read' if read else ''}"
                    goal = Goal(AT_MOST if num_envs >= FROM else None, at_most=True)
                    ours = 1e6 * seconds / num_envs
                    yield finish(what, "us/env", ours, 1e6 * bound / num_envs, ours, goal)


def step(num_envs: int, mean_length: int, t: int) -> Arrays:
    rng = np.random.default_rng((num_envs, mean_length, t))
    return {
        "observation": rng.standard_normal((num_envs, 48), np.float32),
        "reward": np.full(num_envs, t, np.float32),
        "terminated": rng.random(num_envs) < 1 / mean_length,
    }


def measured(run: Run, num_envs: int, publish: str, steps: list[Arrays], *, read: bool) -> tuple[float, float]:
    """Seconds of an `add` to a full ring, and of the assignments: medians of the means of bursts."""
    folder, burst = run.folder("many"), len(steps)
    rows = {name: np.empty((burst, *values.shape), values.dtype) for name, values in steps[0].items()}
    ours, bound = [], []
    capacity = SHOWN * num_envs
    # Enough episodes for the capacity: as the steps come again and again, some environments' are far shorter.
    sizes = (folder, max(1000, 4 * capacity // min(MEAN_LENGTHS)), LONGEST, FIELDS)
    with ReplayBuffer(*sizes, capacity=capacity, spare_slots=2 * num_envs, publish=publish) as buffer:
        for t in range(min(run.repeats, 2 * SHOWN)):
            buffer.add(**steps[t % burst])
        with reader(folder) if read else beside_nobody():
            end = time.perf_counter() + SECONDS * min(1, run.repeats / 2000)
            while not ours or time.perf_counter() < end:
                start = time.perf_counter()
                for one_step in steps:
                    buffer.add(**one_step)
                middle = time.perf_counter()
                for t, one_step in enumerate(steps):
                    for name, values in one_step.items():
                        rows[name][t] = values
                ours.append((middle - start) / burst)
                bound.append((time.perf_counter() - middle) / burst)
    return statistics.median(ours), statistics.median(bound)


@contextmanager
def beside_nobody() -> Iterator[None]:
    yield


@contextmanager
def reader(folder: Path) -> Iterator[None]:
    """Another process that draws batches from the folder meanwhile."""
    ready = multiprocessing.get_context("spawn").Event()
    process = multiprocessing.get_context("spawn").Process(target=draw, args=(folder, ready), daemon=True)
    process.start()
    try:
        ready.wait(60)
        yield
    finally:
        process.kill()
        process.join()


def draw(folder: Path, ready: multiprocessing.synchronize.Event) -> None:
    """Draw batches for ever."""
    with ReplayBuffer.from_folder(folder, read_only=True) as buffer:
        while True:
            try:
                buffer.sample(256, timestep_level=True)
            except NotEnoughDataError:  # no episode ended yet
                time.sleep(0.01)
            ready.set()
