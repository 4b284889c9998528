"""The contents of a URL, the speed of its store, measured with a few requests, and estimates of reading times.

`memmap-buffer doctor` prints what `measure_store` returns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from memmap_buffer.errors import RemoteError
from memmap_buffer.format.source import WINDOWS
from memmap_buffer.loading.epochs import WINDOW_BYTES
from memmap_buffer.maintenance.pull import shards_of
from memmap_buffer.paths import url_of
from memmap_buffer.remote.layout import PIECE_BYTES
from memmap_buffer.remote.objects import IN_FLIGHT, NO_RANGES, Objects, Range
from memmap_buffer.remote.published import Published, read_root
from memmap_buffer.remote.shards import CACHE

LOOKS = 5  # small requests, one after another, that measure the round trip
SMALL = 2 * IN_FLIGHT  # small requests, many at a time, that measure the request rate
FIRST_BYTES = 8 << 20  # bytes that are fetched to measure the bandwidth; doubled until it takes long enough


@dataclass(frozen=True)
class Store:
    """A root, or a shard, at a URL: its size, and the measured speed of its store.

    Attributes:
        shards: the number of shards.
        episodes, steps, num_bytes: those of all shards together.
        ranges: whether the store sends ranges of objects. If not, nothing can be read, and the figures below are 0.
        round_trip: seconds of a small request.
        requests: small requests a second, many at a time.
        bandwidth: bytes a second, many requests at a time.
        files: data file -> its bytes, all shards together: estimated from the largest shard by the number of timesteps.
        at_once: the number of requests that readers make at a time.
        block_bytes: data file -> the bytes of its blocks, which readers fetch.
        cache_place: the default folder of the cache.
        read_ahead: the bytes that readers read ahead; with a smaller cache `shuffle="block"` mixes less.
    """

    at_once: ClassVar[int] = IN_FLIGHT
    cache_place: ClassVar[str] = CACHE
    read_ahead: ClassVar[int] = WINDOWS * WINDOW_BYTES

    shards: int
    episodes: int
    steps: int
    num_bytes: int
    ranges: bool
    round_trip: float = 0.0
    requests: float = 0.0
    bandwidth: float = 0.0
    files: Mapping[str, float] | None = None
    block_bytes: Mapping[str, int] | None = None

    def seconds(self, trips: int, num_bytes: float, requests: float) -> float:
        """The seconds that a fetch takes, if some requests must be answered before the others are made.

        Args:
            trips: the number of requests that are made one after another.
            num_bytes: the bytes of all requests together.
            requests: the number of the other requests, made many at a time.
        """
        return trips * self.round_trip + max(num_bytes / self.bandwidth, requests / self.requests)

    @property
    def data_bytes(self) -> float:
        """The bytes of all data files."""
        return sum((self.files or {}).values())

    def epoch(self) -> float:
        """The seconds of an epoch of `shuffle="block"` with an empty cache: digests, then pieces of `PIECE_BYTES`."""
        return self.seconds(2, self.data_bytes, self.data_bytes / PIECE_BYTES)

    def first_batch(self) -> float:
        """The seconds until the first batch of such an epoch."""
        size = min(WINDOW_BYTES, self.data_bytes)
        return self.seconds(2, size, size / PIECE_BYTES)

    def blocks_of(self, items: int) -> dict[int, float]:
        """Bytes of a block -> the expected number of different ones, over all files, that hold random timesteps.

        Args:
            items: the number of timesteps.
        """
        expected = dict[int, float]()
        for file, size in (self.files or {}).items():
            block = (self.block_bytes or {})[file]
            count = max(1.0, size / block)
            expected[block] = expected.get(block, 0.0) + count * (1 - (1 - 1 / count) ** items)
        return expected

    def sample(self, items: int) -> float:
        """The seconds of a batch of random timesteps, none of which is in the cache.

        Args:
            items: the number of timesteps.
        """
        blocks = self.blocks_of(items)
        return self.seconds(2, sum(size * count for size, count in blocks.items()), sum(blocks.values()))


def measure_store(url: str, seconds: float, *, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Measure how fast what was published at a URL can be read.

    Args:
        url: the URL of a root, or of a shard.
        seconds: how long the bandwidth is measured, about.
        storage_options: options for the file system of fsspec.

    Returns:
        The sizes and the speed; without `ranges` the sizes only.

    Raises:
        NotABufferError: nothing was published there.
        CorruptBufferError: what was published is damaged.
        RemoteError: the store fails.
    """
    objects = Objects(url_of(url), storage_options)
    shards = shards_of(objects, read_root(objects))
    steps = sum(shard.steps for shard in shards.values())
    store = Store(
        len(shards),
        sum(shard.episodes for shard in shards.values()),
        steps,
        sum(shard.num_bytes for shard in shards.values()),
        ranges=False,
    )
    name, shard = max(shards.items(), key=lambda item: item[1].num_bytes)
    largest = Published(objects, shard, name)
    try:
        sizes = largest.files.sizes
    except RemoteError as error:
        if error.named.get("came") != NO_RANGES:
            raise
        return store
    file, size = max(sizes.items(), key=lambda item: item[1])
    path = largest.prefix + file
    scale = steps / max(1, shard.steps)
    return replace(
        store,
        ranges=True,
        round_trip=statistics.median(_took(objects, [(path, 0, 1)]) for _ in range(LOOKS)),
        requests=SMALL / _took(objects, [(path, i % size, i % size + 1) for i in range(SMALL)]),
        bandwidth=_bandwidth(objects, path, size, seconds),
        files={file: num_bytes * scale for file, num_bytes in sizes.items()},
        block_bytes=largest.files.block,
    )


def _took(objects: Objects, ranges: Sequence[Range]) -> float:
    begin = time.perf_counter()
    objects.read_ranges(ranges)
    return time.perf_counter() - begin


def _bandwidth(objects: Objects, path: str, size: int, seconds: float) -> float:
    """Bytes a second of a file, read from its beginning in requests as large as readers make."""
    wanted = FIRST_BYTES
    while True:
        stop, step = min(wanted, size), PIECE_BYTES
        took = _took(objects, [(path, begin, min(begin + step, stop)) for begin in range(0, stop, step)])
        if took > seconds / 2 or stop == size:
            return stop / took
        wanted *= 2
