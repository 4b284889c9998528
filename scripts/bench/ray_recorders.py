"""Measure how many episodes recorders publish, beside how many Ray itself carries; print ratios.

    python scripts/bench.py ray [--steps N ...] [--messages N] [--batch N] [--bursts N] [--json]

Two rollout actors send episodes (17 floats and their last, 6 floats, a float, a bool a step) to two actors. `take`
actors only receive them. `copy` actors also copy them into their own memory, since a transfer that nobody reads is only
mapped. `publish` actors are recorders. Bursts of the three alternate in one run, and the lowest fifth of the seconds of
each counts. The last column is one process that writes directly, without Ray.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from memmap_buffer import Field, ReplayBuffer
from memmap_buffer.interop.ray import ID, Outbox, start_recorders

FIELDS = {
    "observation": Field("float", (17,), final=True),
    "action": ("float", 6),
    "reward": "float",
    "terminated": "bool",
}


def episode(steps: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "observation": rng.random((steps + 1, 17), dtype=np.float32),
        "action": rng.random((steps, 6), dtype=np.float32),
        "reward": rng.random(steps, dtype=np.float32),
        "terminated": np.zeros(steps, np.bool_),
    }


@ray.remote(num_cpus=0)
class Taker:
    """Answers as a recorder, and keeps nothing."""

    def __init__(self, copies: bool) -> None:
        self.copies = copies

    def record_all(self, episodes: list[dict[str, Any]]) -> int:
        if self.copies:
            for columns in episodes:
                for column in columns.values():
                    np.array(column)
        return len(episodes)


@ray.remote(num_cpus=0)
class Rollout:
    """Sends the same episode again and again, under another id each time."""

    def __init__(self, steps: int) -> None:
        self.episode = episode(steps)

    def send(self, receiver: Any, messages: int, batch: int) -> None:
        outbox = Outbox(receiver)
        for _ in range(messages):
            outbox.send(*[self.episode] * batch)
        outbox.flush()


def measure(folder: Path, steps: int, options: argparse.Namespace) -> dict[str, float]:
    """Episodes a second, for each kind of receiver and for one process that writes directly."""
    rollouts = [Rollout.remote(steps) for _ in range(2)]
    ring = {"max_episodes": 256, "max_timesteps": steps, "fields": FIELDS, "circular": True}
    receivers = {
        "take": [Taker.remote(False) for _ in range(2)],
        "copy": [Taker.remote(True) for _ in range(2)],
        "publish": start_recorders(folder, 2, **ring),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in receivers}
    for burst in range(options.bursts + 1):
        for kind, pair in receivers.items():
            begun = time.perf_counter()
            sent = zip(rollouts, pair, strict=True)
            ray.get([rollout.send.remote(one, options.messages, options.batch) for rollout, one in sent])
            if burst:  # the first one warms up
                seconds[kind].append(time.perf_counter() - begun)
    count = 2 * options.messages * options.batch
    rates = {kind: count / float(np.quantile(taken, 0.2)) for kind, taken in seconds.items()}
    for actor in (*rollouts, *(one for pair in receivers.values() for one in pair)):
        ray.kill(actor)
    return rates | {"direct": directly(folder / "direct", ring, options)}


def directly(folder: Path, ring: dict[str, Any], options: argparse.Namespace) -> float:
    columns, taken = episode(ring["max_timesteps"]), []
    with ReplayBuffer(folder, meta_fields={ID: "U32"}, **ring) as buffer:
        for _ in range(options.bursts):
            begun = time.perf_counter()
            for number in range(options.messages):
                buffer.store_episode(**columns, **{ID: str(number)})
            taken.append(time.perf_counter() - begun)
    return options.messages / float(np.quantile(taken, 0.2))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("bench.py ray", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 1000, 10_000], help="of an episode")
    parser.add_argument("--messages", type=int, default=100, help="of each rollout in a burst")
    parser.add_argument("--batch", type=int, default=1, help="episodes in a message")
    parser.add_argument("--bursts", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    folder, results = Path(tempfile.mkdtemp(prefix="bench_ray_")), {}
    try:
        for steps in options.steps:
            results[steps] = measure(folder / str(steps), steps, options)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(results) if options.json else table(results))


def table(results: dict[int, dict[str, float]]) -> str:
    lines = [
        f"{'steps':>6} {'take':>8} {'copy':>8} {'publish':>8} {'direct':>8}  publish/take  publish/copy   (episodes/s)"
    ]
    for steps, rate in results.items():
        numbers = " ".join(f"{rate[kind]:8.0f}" for kind in ("take", "copy", "publish", "direct"))
        ratios = rate["publish"] / rate["take"], rate["publish"] / rate["copy"]
        lines.append(f"{steps:6} {numbers}  {ratios[0]:12.2f}  {ratios[1]:12.2f}")
    return "\n".join(lines)
