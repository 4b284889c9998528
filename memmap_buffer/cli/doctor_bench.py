"""`doctor`: whether machine and folder fit each other; `bench`: how fast this folder gives batches. Reads only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from memmap_buffer import (
    DiskSpeed,
    NotEnoughDataError,
    ReplayBuffer,
    Store,
    Window,
    available_memory,
    disk_of,
    measure_disk_speed,
    measure_store,
)
from memmap_buffer.adapters import flatten, is_url, path_of, progress
from memmap_buffer.cli.folders import disk_use, opened
from memmap_buffer.cli.minimal import FOUND, clean, say
from memmap_buffer.cli.remote import StorageOptions, parsed
from memmap_buffer.cli.terminal import Json, Place, bytes_of, end, say_json, show_table

BATCH = 256
BURST = 0.02  # seconds: so short that other programs do not disturb some of the bursts
COPY = 32 << 20
SLOW_SAMPLE = 1.0  # seconds for a random batch: longer than a step of training takes
LEVELS: dict[str, tuple[int, dict[str, Any]]] = {  # how many items a batch has, and its options
    "timesteps": (BATCH, {"timestep_level": True}),
    "5-step transitions": (BATCH, {"n_steps": 5}),
    "windows of 16": (32, {"view": Window(16)}),
    "whole episodes": (8, {}),
}

Seconds = Annotated[float, typer.Option("--seconds", min=0.1, max=600, help="How long to measure.")]


@dataclass(frozen=True)
class Remark:
    """A result of `doctor`.

    Attributes:
        what: the thing that was checked.
        found: the result, as a sentence.
        advice: what to do; "": nothing need be done.
        bad: whether a promise of the library does not hold here.
    """

    what: str
    found: str
    advice: str = ""
    bad: bool = False


def doctor(place: Place, seconds: Seconds = 2.0, as_json: Json = False, options: StorageOptions = None) -> None:
    """Look whether this machine and this folder fit each other: memory, disk, file system, speed; with advice.

    For a URL: how fast its store gives the published data, from a few requests, and what reading it will cost.

    If the data is not in memory, or is larger than memory, the speed of the disk is measured as well, which takes a
    quarter of the time more: a few thousand random timesteps are dropped from the system's cache and read again.

    Ends with 1 if a promise of the library cannot hold here.
    """
    remarks = list(_of_url(place, seconds, options)) if is_url(place) else _of_folder(Path(place), seconds)
    if as_json:
        say_json([asdict(remark) for remark in remarks])
    for remark in [] if as_json else remarks:
        mark = "BAD " if remark.bad else "note" if remark.advice else "ok  "
        say(f"{mark}  {remark.what}: {remark.found}" + (f"; {remark.advice}" if remark.advice else ""))
    end(FOUND if any(remark.bad for remark in remarks) else 0)


def _of_folder(folder: Path, seconds: float) -> list[Remark]:
    with opened(folder) as buffer:
        (on_disk, apparent), available = disk_use(folder), available_memory()
        larger = available is not None and on_disk > available
        # before `_speed`, which reads the rows into memory
        disk_speed = measure_disk_speed(buffer.folder, seconds / 4, larger=larger)
        remarks = [*_disk(buffer, apparent - on_disk), _memory(on_disk, available), _speed(buffer, seconds)]
        return remarks + ([_speed_from_disk(disk_speed)] if disk_speed else [])


def _of_url(url: str, seconds: float, options: str | None) -> Iterator[Remark]:
    store = measure_store(url, seconds, storage_options=parsed(options))
    number, size = "1 shard" if store.shards == 1 else f"{store.shards:,} shards", bytes_of(store.num_bytes)
    yield Remark("published", f"{number}, {store.episodes:,} episodes, {store.steps:,} steps, {size}")
    if not store.ranges:
        advice = "nothing can be read from it; take another server, or `pull` from the store behind it"
        yield Remark("ranges", "the server sends whole objects only", advice, bad=True)
        return
    yield Remark("ranges", "the server sends parts of objects")
    yield Remark("round trip", f"{1e3 * store.round_trip:.1f} ms")
    yield Remark("requests", f"{store.requests:,.0f} small ones a second, {store.at_once} at a time")
    yield Remark("bandwidth", f"{bytes_of(store.bandwidth)}/s")
    yield Remark("first batch", f"{_duration(store.first_batch())} with shuffle='block'")
    yield Remark("epoch", f"{_duration(store.epoch())} with shuffle='block', the first time; then as from a folder")
    sample, blocks = store.sample(BATCH), store.blocks_of(BATCH)
    slow = "until the cache has most of the data; use shuffle='block' for the first epochs, or `pull` it"
    result = (
        f"{_duration(sample)}, {bytes_of(sum(size * count for size, count in blocks.items()))} for {BATCH} timesteps"
    )
    yield Remark("random sample", result, slow if sample > SLOW_SAMPLE else "")
    yield _cache(store)


def _cache(store: Store) -> Remark:
    place = path_of(store.cache_place)
    free = disk_of(next(path for path in (place, *place.parents) if path.exists())).free_bytes
    result = f"{bytes_of(store.data_bytes)} when all of it was read; {bytes_of(free)} are free for {store.cache_place}"
    least = bytes_of(store.read_ahead)
    short = f"give a `cache` on a larger disk, or a `cache_bytes`; below {least} shuffle='block' mixes less"
    return Remark("cache", result, short if store.data_bytes > free else "")


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds / 60:,.0f} minutes"


def bench(folder: Place, seconds: Seconds = 8.0, as_json: Json = False) -> None:
    """Measure how fast this folder gives batches of each kind, and how fast memory copies as many bytes.

    The kinds take turns in short bursts; the mean of the fastest fifth of a kind's bursts counts.
    """
    with opened(folder) as buffer:
        kinds = {name: partial(buffer.sample, count, **options) for name, (count, options) in LEVELS.items()}
        sizes = {name: size for name, draw in kinds.items() if (size := _size_of(draw))}
        if not sizes:
            raise NotEnoughDataError(f"{folder}: there is nothing to read; record some episodes first")
        contenders: dict[str, Callable[[], Any]] = {name: kinds[name] for name in sizes}
        source, target = np.ones((2, COPY), np.uint8)
        contenders["copying memory"] = lambda: np.copyto(target, source)
        took = _bursts(contenders, seconds)
    copying = COPY / took.pop("copying memory")
    rows = [
        {
            "batches": name,
            "items": items,
            "us_per_batch": took[name] * 1e6,
            "items_per_second": items / took[name],
            "bytes_per_second": size / took[name],
            "times_memory": took[name] * copying / size,
        }
        for name, (items, size) in sizes.items()
    ]
    if as_json:
        say_json({"batches": rows, "memory_bytes_per_second": copying})
        return
    columns = {key.replace("_", " "): [row[key] for row in rows] for key in rows[0]}
    show_table("", columns | {"bytes per second": [f"{bytes_of(size / took[n])}/s" for n, (_, size) in sizes.items()]})
    say(f"the memory copies {bytes_of(copying)}/s; `times memory` is a batch's time as a multiple of that copy's")


def _disk(buffer: ReplayBuffer, holes: int) -> Iterator[Remark]:
    folder = buffer.folder
    disk = disk_of(folder)
    kind = disk.network
    advice = f"nothing is promised on {kind}; copy the folder to a local disk, by `pack` or `buffer.snapshot`"
    yield Remark("file system", kind or "local", advice if kind else "", bad=bool(kind))
    if disk.anyone_may_rename:
        what = "any user of this machine may replace the folder"
        yield Remark("permissions", what, f"take the write permission for others from {clean(str(folder.parent))}")
    free = disk.free_bytes
    grows = json.loads((folder / "schema.json").read_text())["layout"] == "grid"
    missing = max(0, holes) if grows else 0
    result = f"{bytes_of(free)} are free, at most {bytes_of(missing)} may still be written"
    short = (
        "the disk may fill up: writing then raises OSError and loses nothing; lower max_episodes, or free some space"
    )
    yield Remark("space", result, short if missing > free else "")


def _memory(on_disk: int, available: int | None) -> Remark:
    if available is None:
        return Remark("memory", f"{bytes_of(on_disk)} on disk; this system does not say how much memory is free")
    result = f"{bytes_of(on_disk)} on disk, {bytes_of(available)} of memory are free to hold them"
    large = "most batches will be read from disk: use shuffle='block', prefetch=2, and a local SSD"
    return Remark("memory", result, large if on_disk > available else "")


def _speed(buffer: ReplayBuffer, seconds: float) -> Remark:
    draw = partial(buffer.sample, BATCH, timestep_level=True)
    size = _size_of(draw)
    if size is None:
        return Remark("speed", "there is nothing to read yet")
    took = _bursts({"timesteps": draw}, seconds)["timesteps"]
    result = f"{BATCH / took:,.0f} random timesteps a second, {bytes_of(size[1] / took)}/s, in batches of {BATCH}"
    slow = "this is the speed of a disk, not of memory; run it again, as the second time finds more in memory"
    return Remark("speed", result, slow if took > BATCH * 1e-4 else "")  # 100 us a row: a disk's access


def _speed_from_disk(disk: DiskSpeed) -> Remark:
    seen = f"{disk.cached:.0%} of a random sample were in memory"
    if not disk.rate:
        return Remark("speed from disk", f"{seen}, and could not be dropped from it: others use them, or write them")
    rate = f"{disk.rate:,.0f} random timesteps a second, {bytes_of(disk.rate * disk.timestep_bytes)}/s"
    return Remark("speed from disk", f"{rate}, {disk.batch} asked for at once; {seen}")


def _size_of(draw: Callable[[], Any]) -> tuple[int, int] | None:
    """(items, bytes) of a batch; None if there is nothing to draw."""
    try:
        leaves = list(flatten(draw()).values())
    except NotEnoughDataError:
        return None
    return len(leaves[0]), sum(getattr(leaf, "nbytes", 0) for leaf in leaves)


def _bursts(contenders: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Name -> seconds that a call takes: the mean of the fastest fifth of its bursts."""
    bursts: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in progress(_rounds(seconds), "measuring"):
        for name, call in contenders.items():
            bursts[name].append(_burst(call))
    return {name: float(np.mean(sorted(took)[: max(1, len(took) // 5)])) for name, took in bursts.items()}


def _rounds(seconds: float) -> Iterator[None]:
    """A first round, and others until the time is over."""
    end_time = time.perf_counter() + seconds
    yield
    while time.perf_counter() < end_time:
        yield


def _burst(call: Callable[[], Any]) -> float:
    begin, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < BURST or not calls:
        call()
        calls += 1
    return elapsed / calls
