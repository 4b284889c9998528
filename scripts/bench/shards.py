"""The cost of a root of many shards: opening, memory, draws, publications, and two ranks of a loader.

    python scripts/bench.py --case shards --folder /data/tmp

The folders are sparse, so 10^7 steps take page cache and no disk. Contenders take turns in one process. The figure is
the lowest fifth of the bursts, in CPU time of the thread, so that other users of the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.data import LOW, episode, forge
from bench.measure import HEAD, Goal, Row, finish
from memmap_buffer import ConcatBuffer, ReplayBuffer

STEPS = 1000  # of an episode, unless another number is given
FIELDS = {name: LOW[name] for name in ("observation", "action", "terminated")}  # 10,000 shards of more need more maps
VIEW: dict[str, Any] = {"timestep_level": True}
VIEWS: dict[str, dict[str, Any]] = {
    "timesteps": VIEW,
    "3-step items": {"n_steps": 3},
    "windows of 16": {"window_length": 16},
}
WORLD = 2


def low(contenders: Mapping[str, Callable[[], object]], bursts: int, calls: int) -> dict[str, float]:
    """Microseconds of one call of each contender."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(bursts):
        for name, call in contenders.items():
            call()
            start = time.thread_time()
            for _ in range(calls):
                call()
            taken[name].append((time.thread_time() - start) / calls)
    return {name: 1e6 * float(np.quantile(times, 0.2)) for name, times in taken.items()}


def root_of(folder: Path, shards: int, episodes: int, steps: int = STEPS) -> Path:
    """A root of `shards` shards with `episodes` episodes in all: a forged one, and copies with ids of their own."""
    first = forge(folder / "shard-00000", max(1, episodes // shards), steps, FIELDS)
    for number in range(1, shards):
        copied(first, folder / f"shard-{number:05}")
    return folder


def copied(source: Path, target: Path) -> None:
    """A copy of a forged folder as another buffer, of whose data only the headers take space."""
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.name == "data":
            with path.open("rb") as file:
                place.write_bytes(file.read(4096))
            os.truncate(place, path.stat().st_size)
        elif path.name == "schema.json":
            text = json.loads(path.read_text())
            place.write_text(path.read_text().replace(text["id"], secrets.token_hex(16)))
        else:
            shutil.copyfile(path, place)


def opening(root: Path, shards: int) -> Iterator[Row]:
    """Time, memory, and the file handles and maps that are added."""
    before = _handles_maps_and_bytes()
    start = time.thread_time()
    buffer = ConcatBuffer.from_root(root)
    buffer.refresh()
    ms = 1e3 * (time.thread_time() - start)
    handles, maps, size = (now - then for now, then in zip(_handles_maps_and_bytes(), before, strict=True))
    more = {"handles": handles, "maps": maps, "MB": size / 1e6}
    yield finish(f"open {shards} shards", "ms", ms, None, ms / shards, Goal(None), more)
    loader = buffer.dataloader(256, shuffle=True, **VIEW)
    next(iter(loader))
    size = len(json.dumps(loader.state_dict()))
    yield finish("  state_dict", "bytes", size, None, size / shards, Goal(None))


def _handles_maps_and_bytes() -> tuple[int, int, int]:
    self = Path("/proc/self")
    handles, maps = sum(1 for _ in (self / "fd").iterdir()), len((self / "maps").read_text().splitlines())
    return handles, maps, 4096 * int((self / "statm").read_text().split()[1])


def draws(root: Path, shards: int, one: Path, bursts: int) -> Iterator[Row]:
    """A sample of 256 items, over one buffer of as many."""
    buffers: dict[str, Any] = {"root": ConcatBuffer.from_root(root)}
    buffers["one"] = ReplayBuffer.from_folder(one, read_only=True)
    for buffer in buffers.values():
        touch(buffer)
    calls = 48 if shards <= 1000 else 12
    for what, view in VIEWS.items():
        us = low({name: partial(buffer.sample, 256, **view) for name, buffer in buffers.items()}, bursts, calls)
        ours, of_one = us["root"], us["one"]
        name, goal = f"sample of 256 {what}, {shards} shards", Goal(3, at_most=True, unit=" x")
        yield finish(name, "us", ours, of_one, ours / of_one, goal)
    ours = low({"": buffers["root"].refresh}, bursts, calls)[""]
    yield finish(f"  of it, to look for what is new, {shards} shards", "us", ours, None, ours, Goal(None))
    yield from by_priority(buffers, shards, bursts, calls)


def by_priority(buffers: dict[str, Any], shards: int, bursts: int, calls: int) -> Iterator[Row]:
    """A sample of 256 items by priority, alone and with the update of their priorities, over one buffer of as many."""
    errors = np.random.default_rng(0).random(256)
    buffers["one"].sample(256, prioritized=True, **VIEW)  # which loads what loops are compiled with
    start = time.thread_time()
    buffers["root"].sample(256, prioritized=True, **VIEW)
    ms = 1e3 * (time.thread_time() - start)
    yield finish(f"first draw by priority, {shards} shards", "ms", ms, None, ms / shards, Goal(None))
    for what, view in {"timesteps": VIEW, "3-step items": {"n_steps": 3}}.items():

        def sample(buffer: Any, view: dict[str, Any] = view) -> Any:
            return buffer.sample(256, prioritized=True, **view)["_indices"]

        def turn(buffer: Any, sample: Callable[[Any], Any] = sample) -> object:
            return buffer.update_priorities(sample(buffer), errors)

        for how, call in {"": sample, ", and update": turn}.items():
            us = low({name: partial(call, buffer) for name, buffer in buffers.items()}, bursts, calls)
            ours, of_one = us["root"], us["one"]
            name, goal = f"{what} by priority{how}, {shards} shards", Goal(None if how else 3, at_most=True, unit=" x")
            yield finish(name, "us", ours, of_one, ours / of_one, goal)


def touch(buffer: Any) -> None:
    """Map every page before a draw is timed."""
    for storage in buffer._folders.storages:
        for rows in storage.maps.rows.values():
            rows.reshape(-1).view(np.uint8)[::4096].max()


def memory(root: Path, episodes: int) -> Iterator[Row]:
    """Bytes an episode in the index, and in the episode tables."""
    buffer = ConcatBuffer.from_root(root)
    loader = buffer.dataloader(256, shuffle=True, **VIEW)
    next(iter(loader))
    reader = loader.dataset.reader  # type: ignore[attr-defined]
    index = reader.index()
    held = [index.slot, index.serial, index.first, index.starts, index.folder, index._buckets[1]]
    ours = sum(array.nbytes for array in held) / episodes
    tables = sum(
        array.nbytes
        for t in reader.folders.tables
        for array in (*t.columns, t.visible, t.shown)
        if isinstance(array, np.ndarray)
    )
    yield finish(
        "index of an episode",
        "bytes",
        ours,
        None,
        ours,
        Goal(64, at_most=True, unit=" B"),
        {"and its records": tables / episodes},
    )


def publication(root: Path, shards: int) -> Iterator[Row]:
    """The first sample after one shard published: its records are read, the index is built again."""
    path = root / "shard-00000"
    shutil.rmtree(path)
    with ReplayBuffer(path, 1000, STEPS, FIELDS) as writer:
        arrays = episode(FIELDS, 3, np.random.default_rng(0))
        buffer, taken = ConcatBuffer.from_root(root), []
        for _ in range(20):
            writer.store_episode(**arrays)
            start = time.thread_time()
            buffer.sample(256, **VIEW)
            taken.append(1e3 * (time.thread_time() - start))
    ms = float(np.quantile(taken[1:], 0.2))
    yield finish(f"first sample after a publication, {shards} shards", "ms", ms, None, ms, Goal(None))


def rank_main(rank: int, root: Path, bursts: int, results: Any) -> None:
    """One rank: batches of the shared loader and of a loader of its own, in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root.parent}/meet", rank=rank, world_size=WORLD)
    buffer = ConcatBuffer.from_root(root)
    touch(buffer)

    def endless(**options: Any) -> Iterator[object]:
        loader = buffer.dataloader(256, shuffle=True, seed=0, **VIEW, **options)
        while True:
            yield from loader

    shared, alone = endless(), endless(rank=0, world_size=1)
    us = low({"shared": lambda: next(shared), "alone": lambda: next(alone)}, bursts, 64)
    results.put((rank, us))
    dist.barrier()
    dist.destroy_process_group()


def ranks(root: Path, bursts: int) -> Iterator[Row]:
    """Batches of each of two ranks, over a loader of its own."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=rank_main, args=(rank, root, bursts, results)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for rank, us in sorted(results.get(timeout=300) for _ in processes):
        shared, alone = 1e6 / us["shared"], 1e6 / us["alone"]
        yield finish(f"loader of rank {rank} of {WORLD}", "batches/s", shared, alone, shared / alone, Goal(0.9))
    for process in processes:
        process.join()


def main(given: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("bench.py shards", description="Measure roots of shards.")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the folders are made; default: a temporary one"
    )
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 64, 1000, 10_000])
    parser.add_argument("--episodes", type=int, default=10_000, help="in all the shards together")
    parser.add_argument("--steps", type=int, default=STEPS, help="of an episode")
    parser.add_argument("--many", type=int, default=1_000_000, help="episodes of one step, for the index")
    parser.add_argument("--bursts", type=int, default=15)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    rows: list[Row] = []
    print(HEAD)

    def tell(some: Iterator[Row]) -> None:
        for row in some:
            print(row.text(), flush=True)
            rows.append(row)

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        place = Path(name)
        roots = {n: root_of(place / str(n), n, arguments.episodes, arguments.steps) for n in arguments.shards}
        one = forge(place / "one", arguments.episodes, arguments.steps, FIELDS)
        for n, root in roots.items():  # one after another: together they have more maps than a process may
            tell(opening(root, n))
            tell(draws(root, n, one, arguments.bursts))
        tell(memory(root_of(place / "many", 10, arguments.many, 1), arguments.many))
        last = max(roots)
        tell(ranks(roots[last], arguments.bursts))
        for n, root in roots.items():
            tell(publication(root, n))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([row.json() for row in rows], indent=1))
