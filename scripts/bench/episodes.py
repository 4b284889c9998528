"""What follows the number of episodes: the lock, a sample after a publication, deleting, a loader's state, its workers.

    python scripts/bench.py episodes --counts 4 6 7 --folder /data/tmp

The folders are sparse, of two timesteps of a byte an episode. The figures are CPU time of the process.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.data import forge
from bench.measure import HEAD, Goal, finish
from memmap_buffer import ReplayBuffer

FIELDS = {"x": "uint8"}
STEPS = 2
ROOM = 100  # episodes that are published besides
VIEWS: dict[str, dict[str, Any]] = {
    "timesteps": {"timestep_level": True},
    "windows": {"window_length": 2},
    "whole episodes": {},
}


def with_room(place: Path, count: int) -> Path:
    """A folder of `count` forged episodes, and room for some more."""
    forged = np.load(forge(place / "forged", count, STEPS, FIELDS) / "episodes.npy", mmap_mode="r")
    folder = place / "folder"
    ReplayBuffer(folder, count + ROOM, STEPS, FIELDS).close()
    records = np.load(folder / "episodes.npy", mmap_mode="r+")
    records[:count] = forged[:count]
    state = np.load(folder / "state.npy", mmap_mode="r+")
    state["next"] = count
    state["changes"] += np.uint64(1)
    return folder


def timed(name: str, work: Callable[[], Any]) -> Any:
    """What `work` gives, its time told."""
    start = time.process_time()
    result = work()
    tell(name, "ms", 1e3 * (time.process_time() - start))
    return result


def tell(name: str, unit: str, value: float) -> None:
    print(finish(name, unit, value, None, value, Goal(None)).text(), flush=True)


def measure(place: Path, count: int) -> None:
    """Everything at one number of episodes."""
    folder, label = with_room(place, count), f"{count:.0e} episodes"
    buffer = timed(f"{label}: open", lambda: ReplayBuffer.from_folder(folder))
    timed("  take the lock", buffer._writer.begin)
    for name, options in VIEWS.items():
        buffer.sample(256, **options)
        for which in ("first", "second"):
            buffer.store_episode(x=[1, 2])
            timed(f"  sample of {name}, {which} publication", lambda options=options: buffer.sample(256, **options))
    loader = buffer.dataloader(256, shuffle=True, num_workers=1, timestep_level=True)
    tell("  pickled for a worker", "kB", len(pickle.dumps(loader._processes.dataset)) / 1e3)
    rng = np.random.default_rng(0)
    for name, gone in (
        ("every third", np.arange(0, count, 3)),
        ("a third, at random", rng.random(count // 3 * 2) < 0.3),
    ):
        chosen = gone if gone.dtype != bool else np.flatnonzero(gone)
        timed(f"  delete {name}", lambda chosen=chosen: buffer.delete(chosen))
        loader = buffer.dataloader(256, shuffle=True, timestep_level=True)
        next(iter(loader))
        state = timed("  state_dict after that", loader.state_dict)
        tell("  its size", "kB", len(pickle.dumps(state)) / 1e3)
        timed("  load_state_dict", lambda loader=loader, state=state: loader.load_state_dict(state))
    buffer.close()


def main(given: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("bench.py episodes", description="Measure what follows the number of episodes.")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the folders are made; default: a temporary one"
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[4, 6], help="powers of ten")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    print(HEAD)
    for power in arguments.counts:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            measure(Path(name), 10**power)
