"""Measure draws by priority (draw, gather, update) at growing sizes, beside installed peers; print ratios.

    python scripts/bench.py priority [--leaves N ...] [--batch B] [--repeats N] [--bare] [--peers FOLDER] [--json]

A batch of transitions (17 + 17 next + 6 floats, a float, a bool) is drawn by priority, gathered, and its priorities are
updated. The bound is plain numpy, which gathers rows that are known beforehand. `--peers` adds a folder to the
import path, so that torchrl, tianshou or cpprb need not be installed beside this library; missing ones are left out.
`--bare` measures the tree alone, over steps of one byte.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer import Field, Prioritized, ReplayBuffer, compute_importance_weights
from memmap_buffer.priority.priorities import StepLeaves

STEPS = 1000
BURST = 20  # turns of one contender before the next one's
HOW = Prioritized(alpha=0.6, beta=0.4)
FIELDS = {
    "observation": Field("float", (17,), final=True),
    "action": ("float", 6),
    "reward": "float",
    "terminated": "bool",
}
NEXT = ("observation",)  # what the peers keep of the next step
Turn = Callable[[], tuple[float, float]]  # seconds to draw and gather a batch, and to update its priorities


def episode(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "observation": rng.random((STEPS + 1, 17), dtype=np.float32),
        "action": rng.random((STEPS, 6), dtype=np.float32),
        "reward": rng.random(STEPS, dtype=np.float32),
        "terminated": np.zeros(STEPS, np.bool_),
    }


def fill(folder: Path, leaves: int, bare: bool) -> dict[str, float]:
    """Record, draw once, give every step a priority; return the seconds of the first draw, which builds the tree."""
    rng, episodes = np.random.default_rng(0), leaves // STEPS
    fields, arrays = ({"x": "uint8"}, {"x": np.zeros(STEPS, np.uint8)}) if bare else (FIELDS, episode(rng))
    with ReplayBuffer(folder, episodes, STEPS, fields) as buffer:
        for _ in range(episodes):
            buffer.store_episode(**arrays)
        first = seconds(lambda: buffer.sample(1, timestep_level=True, prioritized=HOW))
        for at in range(0, episodes, 100):
            serials = np.repeat(np.arange(at, min(at + 100, episodes)), STEPS)
            steps = np.tile(np.arange(STEPS), len(serials) // STEPS)
            buffer.update_priorities(np.stack([serials, steps], axis=1), rng.random(len(serials)))
    return {"build_s": first}


def reopen(folder: Path) -> float:
    """Seconds to open the folder and draw the first batch; torch is loaded already."""

    def work() -> None:
        buffer = ReplayBuffer.from_folder(folder)
        buffer.sample(256, timestep_level=True, prioritized=HOW)
        opened.append(buffer)

    opened: list[ReplayBuffer] = []
    took = seconds(work)
    opened[0].close()
    return took


@contextmanager
def ours(folder: Path, leaves: int, batch: int) -> Iterator[Turn]:
    del leaves
    with ReplayBuffer.from_folder(folder) as buffer:
        errors = np.random.default_rng(1).random(batch)

        def turn() -> tuple[float, float]:
            begin = time.perf_counter()
            data = buffer.sample(batch, n_steps=1, next_fields=NEXT, prioritized=HOW)
            middle = time.perf_counter()
            buffer.update_priorities(data["_indices"], errors)
            return middle - begin, time.perf_counter() - middle

        yield turn


@contextmanager
def tree_alone(folder: Path, leaves: int, batch: int) -> Iterator[Turn]:
    """The tree on the disk without gather, views and tensors."""
    del leaves
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.sample(batch, timestep_level=True, prioritized=HOW)
        priorities = buffer._priorities[HOW.name].of(buffer._storage)
        rng, leaves_of = np.random.default_rng(1), StepLeaves(single=True)
        errors = rng.random(batch)

        def turn() -> tuple[float, float]:
            begin = time.perf_counter()
            priorities.follow()
            leaves_of.look([priorities])
            values = rng.random(batch) * priorities.tree.total
            _, serials, t, _ = leaves_of.find(None, values)
            middle = time.perf_counter()
            leaves_of.over([priorities], None, partial(leaves_of.update, None, serials, t, errors))
            return middle - begin, time.perf_counter() - middle

        yield turn


@contextmanager
def plain_gather(folder: Path, leaves: int, batch: int) -> Iterator[Turn]:
    """The bound: numpy takes rows that are known beforehand from the same files."""
    arrays = {name: np.load(folder / "data" / f"{name}.npy", mmap_mode="r") for name in FIELDS}
    flat = {name: np.asarray(a).reshape(-1, *a.shape[2:]) for name, a in arrays.items()}
    rng = np.random.default_rng(1)

    def turn() -> tuple[float, float]:
        rows = rng.integers(0, leaves, batch)
        begin = time.perf_counter()
        for name, array in flat.items():
            array.take(rows, axis=0, mode="clip")
            if name == "observation":
                array.take(rows + 1, axis=0, mode="clip")
        return time.perf_counter() - begin, 0.0

    yield turn


@contextmanager
def cpprb(folder: Path, leaves: int, batch: int) -> Iterator[Turn]:
    from cpprb import PrioritizedReplayBuffer

    del folder
    shapes: dict[str, Any] = {"obs": {"shape": 17}, "act": {"shape": 6}, "rew": {}, "next_obs": {"shape": 17}}
    buffer = PrioritizedReplayBuffer(leaves, {**shapes, "done": {"dtype": np.bool_}}, alpha=HOW.alpha, eps=HOW.epsilon)
    rng = np.random.default_rng(0)
    for _ in range(leaves // STEPS):
        data = episode(rng)
        moved = {"obs": data["observation"][:-1], "next_obs": data["observation"][1:]}
        buffer.add(**moved, act=data["action"], rew=data["reward"], done=data["terminated"])
    errors, every = rng.random(batch), rng.random(leaves)
    buffer.update_priorities(np.arange(leaves), every)
    require_same_weights(buffer.sample(batch, HOW.beta), every)

    def turn() -> tuple[float, float]:
        begin = time.perf_counter()
        drawn = buffer.sample(batch, HOW.beta)
        middle = time.perf_counter()
        buffer.update_priorities(drawn["indexes"], errors)
        return middle - begin, time.perf_counter() - middle

    yield turn


def require_same_weights(drawn: dict[str, Any], errors: np.ndarray) -> None:
    """Check a peer's weights: those of the paper, over the highest of the buffer, in single precision."""
    mass = (errors + HOW.epsilon) ** HOW.alpha
    weights = compute_importance_weights(mass / mass.sum(), len(mass), HOW.beta)
    wanted = weights[drawn["indexes"]] / weights.max()
    np.testing.assert_allclose(drawn["weights"], wanted, rtol=1e-3)


@contextmanager
def torchrl(folder: Path, leaves: int, batch: int) -> Iterator[Turn]:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, PrioritizedSampler, TensorDictReplayBuffer

    sampler = PrioritizedSampler(leaves, HOW.alpha, HOW.beta, HOW.epsilon)
    storage = LazyMemmapStorage(leaves, scratch_dir=folder.parent / "torchrl")
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch)
    rng = np.random.default_rng(0)
    for _ in range(leaves // STEPS):
        data = {name: torch.from_numpy(array) for name, array in episode(rng).items()}
        observation = data.pop("observation")
        buffer.extend(TensorDict({**data, "obs": observation[:-1], "next_obs": observation[1:]}, [STEPS]))
    errors = torch.rand(batch)

    def turn() -> tuple[float, float]:
        begin = time.perf_counter()
        drawn = buffer.sample()
        middle = time.perf_counter()
        buffer.update_priority(drawn["index"], errors)
        return middle - begin, time.perf_counter() - middle

    yield turn


@contextmanager
def tianshou(folder: Path, leaves: int, batch: int) -> Iterator[Turn]:
    from tianshou.data import Batch, PrioritizedReplayBuffer

    del folder
    buffer = PrioritizedReplayBuffer(leaves, alpha=HOW.alpha, beta=HOW.beta)
    rng = np.random.default_rng(0)
    data = episode(rng)
    rows = {"obs": data["observation"][:-1], "obs_next": data["observation"][1:], "act": data["action"]}
    for i in range(leaves):
        k = i % STEPS
        step = {name: array[k] for name, array in rows.items()}
        buffer.add(Batch(**step, rew=float(data["reward"][k]), terminated=False, truncated=k == STEPS - 1, info={}))
    errors = rng.random(batch)

    def turn() -> tuple[float, float]:
        begin = time.perf_counter()
        _, indices = buffer.sample(batch)
        middle = time.perf_counter()
        buffer.update_weight(indices, errors)
        return middle - begin, time.perf_counter() - middle

    yield turn


PEERS = {"cpprb": cpprb, "torchrl": torchrl, "tianshou": tianshou}


def measure(folder: Path, leaves: int, batch: int, repeats: int, cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Take turns; lowest quintiles in microseconds, as the machine is shared, and each sum over that of the first."""
    # At 10⁸ leaves two of them do not fit in memory.
    groups = [cases] if leaves <= 10**7 else [{name: case} for name, case in cases.items()]
    times: dict[str, list[tuple[float, float]]] = {}
    for group in groups:
        with ExitStack() as opened:
            turns = {name: turn for name, case in group.items() if (turn := begun(opened, case, folder, leaves, batch))}
            for _ in range(1 + max(1, repeats // BURST)):
                for name, turn in turns.items():
                    times.setdefault(name, []).extend([turn() for _ in range(BURST + BURST // 4)][BURST // 4 :])
    rows: list[dict[str, Any]] = []
    for name, found in times.items():
        draw, update = np.quantile(np.array(found[BURST:]) * 1e6, 0.2, axis=0).tolist()  # the first burst warms up
        rows.append({"leaves": leaves, "case": name, "draw_us": round(draw, 1), "update_us": round(update, 1)})
    own = rows[0]["draw_us"] + rows[0]["update_us"]
    return [{**row, "over_first": round((row["draw_us"] + row["update_us"]) / own, 2)} for row in rows]


def begun(opened: ExitStack, case: Any, folder: Path, leaves: int, batch: int) -> Turn | None:
    """A contender, or None for a peer that does not run here."""
    try:
        turn: Turn = opened.enter_context(case(folder, leaves, batch))
        return turn
    except (ImportError, RuntimeError) as error:
        sys.stderr.write(f"{case.__name__}: left out, as it does not run here: {error}\n")
        return None


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "bench.py priority", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--leaves", type=int, nargs="*", default=[10**5, 10**6])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--bare", action="store_true", help="the tree alone")
    parser.add_argument("--peers", type=Path, help="a folder with packages to compare with")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = parser.parse_args(arguments)
    if given.peers is not None:
        sys.path.append(str(given.peers))
    cases: dict[str, Any] = {"tree alone": tree_alone}
    if not given.bare:
        cases = {"ours": ours, **cases, "plain gather": plain_gather}
        cases |= {name: case for name, case in PEERS.items() if importlib.util.find_spec(name) is not None}
    for leaves in given.leaves:
        root = Path(tempfile.mkdtemp(prefix="memmap-bench-", dir="."))
        try:
            told: dict[str, Any] = fill(root / "buffer", leaves, given.bare)
            lines = measure(root / "buffer", leaves, given.batch, given.repeats, cases)
            told |= {"leaves": leaves, "reopen_ms": round(reopen(root / "buffer") * 1e3, 1)}
        finally:
            shutil.rmtree(root)
        for line in [*lines, told]:
            text = "  ".join(f"{key} {value}" for key, value in line.items())
            sys.stdout.write((json.dumps(line) if given.json else text) + "\n")
