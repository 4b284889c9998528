"""Images on the disk: random batches and whole epochs, with the page cache dropped before each."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.data import LONGEST, SCHEMAS, TRANSITIONS, Array, Run, Store, episode
from bench.measure import BOUND, OURS, Call, Row, medians, throughput
from bench.read import check_transitions, endless
from memmap_buffer import ReplayBuffer

LIBC = ctypes.CDLL(None)
THREADS = 16
IMAGE_BYTES = 3 * 64 * 64


def cold_batches(run: Run) -> Iterator[Row]:
    """256 random images and their successors, with no page of the store in memory."""
    store = run.once(("cold",), lambda: fill(run))
    check_transitions(store)
    bounds = Rows(store)
    options: dict[str, Any] = TRANSITIONS
    loader = endless(store.buffer.dataloader(256, shuffle=True, **options))
    calls: dict[str, Call] = {
        "sample": lambda: store.buffer.sample(256, **options),
        "loader": lambda: next(loader),
        f"{BOUND} preadv by 16 threads": bounds.read,
        f"{BOUND} WILLNEED, then gather": bounds.gather_advised,
        f"{BOUND} gather": bounds.gather,
    }
    seconds = medians(calls, max(5, run.repeats // 100), burst=1, before=lambda: drop(store, bounds.mapped))
    bounds.close()
    ways = {how: seconds.pop(how) for how in ("sample", "loader")}
    for how, taken in ways.items():
        yield throughput(f"cold {how}(256), image", {OURS: taken, **seconds}, 0.7, unit="batches/s")


def cold_stream(run: Run) -> Iterator[Row]:
    """An epoch with `shuffle="block"`, with no page of the store in memory, over reading its files in order."""
    store = run.once(("cold",), lambda: fill(run))
    paths = [store.buffer.folder / "data" / f"{name}.npy" for name in store.fields]
    steps, total = int(store.records["length"].sum()), sum(path.stat().st_blocks for path in paths) * 512
    loader = store.buffer.dataloader(256, timestep_level=True, shuffle="block", seed=0)
    calls: dict[str, Call] = {OURS: lambda: consume(loader, steps), f"{BOUND} in order": lambda: read_whole(paths)}
    seconds = medians(calls, max(3, run.repeats // 400), burst=1, before=lambda: drop(store))
    yield throughput("cold epoch, shuffle='block', image", seconds, 0.7, per_call=total // 10**6, unit="MB/s")


def consume(loader: Iterable[Any], steps: int) -> None:
    assert sum(len(batch["reward"]) for batch in loader) == steps, "an epoch was not whole"


def read_whole(paths: list[Path]) -> None:
    """Every file, 8 MB at a time, into the same memory."""
    piece = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(piece):
                pass


def fill(run: Run) -> Store:
    """Episodes of the greatest length: eight different ones, stored again and again."""
    count = max(2, run.cold // (IMAGE_BYTES * LONGEST))
    buffer = ReplayBuffer(run.folder("cold"), count, LONGEST, SCHEMAS["image"])
    datas = [episode(SCHEMAS["image"], LONGEST, np.random.default_rng(i)) for i in range(8)]
    for i in range(count):
        buffer.store_episode(**datas[i % 8])
    buffer.flush()
    return Store(buffer, SCHEMAS["image"])


def drop(store: Store, *others: Array) -> None:
    """Drop the data files from the page cache, after the maps let go of their pages (posix_fadvise(2))."""
    for array in (*store.buffer._storage.maps.rows.values(), *store.plain.values(), *others):
        forget(array)
    for name in store.fields:
        fd = os.open(store.buffer.folder / "data" / f"{name}.npy", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def forget(array: Array) -> None:
    """Release the pages that a mapped array holds in this process."""
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - start
    assert LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED) == 0, "madvise failed"


class Rows:
    """Plain ways to copy 256 images, their successors and the small fields into a given output."""

    def __init__(self, store: Store) -> None:
        self._small = [store.plain[name] for name in store.fields if name != "observation"]
        self._images = store.plain["observation"]
        self._picks = store.picks(256, ahead=1)
        self._out = np.empty((512, *self._images.shape[1:]), np.uint8)
        path = store.buffer.folder / "data" / "observation.npy"
        self._fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._header = path.stat().st_size - self._images.nbytes
        self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        self.mapped = np.frombuffer(self._map, np.uint8, offset=self._header).reshape(self._images.shape)
        self._threads = ThreadPoolExecutor(THREADS)
        self._check()

    def _rows(self) -> Array:
        rows = next(self._picks).numpy()
        for values in self._small:
            values.take(rows, axis=0)
        return np.sort(np.concatenate([rows, rows + 1]))

    def read(self) -> Array:
        rows = self._rows()
        parts = np.array_split(np.arange(512), THREADS)
        list(self._threads.map(lambda part: self._read_part(rows, part), parts))
        return rows

    def _read_part(self, rows: Array, part: Array) -> None:
        for i in part.tolist():
            os.preadv(self._fd, [self._out[i].data], self._header + int(rows[i]) * IMAGE_BYTES)

    def gather_advised(self) -> Array:
        rows = self._rows()
        for row in rows.tolist():
            start = self._header + row * IMAGE_BYTES
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, page, start + IMAGE_BYTES - page)
        self.mapped.take(rows, axis=0, out=self._out, mode="clip")
        return rows

    def gather(self) -> Array:
        rows = self._rows()
        self._images.take(rows, axis=0, out=self._out, mode="clip")
        return rows

    def _check(self) -> None:
        for way in (self.read, self.gather_advised, self.gather):
            rows = way()
            assert np.array_equal(self._out, self._images[rows]), "a bound read something else"

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)
