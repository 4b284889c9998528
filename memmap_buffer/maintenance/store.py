"""What stands at a URL and how fast the store gives it, measured with a few requests; what reading it will cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from memmap_buffer.errors import RemoteError
from memmap_buffer.format.source import BLOCK, WINDOWS
from memmap_buffer.loading.epochs import WINDOW_BYTES
from memmap_buffer.maintenance.pull import shards_of
from memmap_buffer.paths import url_of
from memmap_buffer.remote.layout import PIECE
from memmap_buffer.remote.objects import IN_FLIGHT, NO_RANGES, Objects, Range
from memmap_buffer.remote.published import Published
from memmap_buffer.remote.shards import CACHE

LOOKS = 5  # small requests, one after another
SMALL = 2 * IN_FLIGHT  # small requests together
FIRST_BYTES = 8 << 20  # that are fetched to measure the bandwidth; twice as many until it took long enough


@dataclass(frozen=True)
class Store:
    """A root, or a shard, at a URL.

    Attributes:
        shards: how many. episodes, steps: of all. num_bytes: likewise.
        ranges: whether the store sends parts of objects, without which nothing can be read; else the rest is 0.
        round_trip: seconds of a small request.
        requests: small ones a second, many at a time.
        bandwidth: bytes a second, of many requests at a time.
        files: bytes of the data files of each kind, of all shards: those of the largest, as many times as it has steps.
        at_once: requests that readers make at a time.
        block_bytes: of the blocks that they fetch.
        cache_place: the folder in which they keep these, where they are told no other.
        read_ahead: bytes that they read ahead; a smaller cache mixes less with `shuffle="block"`.
    """

    at_once: ClassVar[int] = IN_FLIGHT
    block_bytes: ClassVar[int] = BLOCK
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

    def seconds(self, trips: int, num_bytes: float, requests: float) -> float:
        """Seconds in which so much is fetched, of which some has to be known before the rest is asked for.

        Args:
            trips: how many requests wait for the one before.
            num_bytes: of all requests together.
            requests: how many others there are.
        """
        return trips * self.round_trip + max(num_bytes / self.bandwidth, requests / self.requests)

    @property
    def data_bytes(self) -> float:
        """Bytes of all data files."""
        return sum((self.files or {}).values())

    def epoch(self) -> float:
        """Seconds of an epoch of `shuffle="block"`, nothing being in the cache: digests, then blocks by the piece."""
        return self.seconds(2, self.data_bytes, self.data_bytes / (PIECE * BLOCK))

    def first_batch(self) -> float:
        """Seconds until its first batch."""
        size = min(WINDOW_BYTES, self.data_bytes)
        return self.seconds(2, size, size / (PIECE * BLOCK))

    def blocks_of(self, items: int) -> float:
        """The number of blocks that hold random timesteps, of each file those that are expected to differ.

        Args:
            items: how many timesteps.
        """
        blocks = [max(1.0, size / BLOCK) for size in (self.files or {}).values()]
        return sum(count * (1 - (1 - 1 / count) ** items) for count in blocks)

    def sample(self, items: int) -> float:
        """Seconds of a batch of random timesteps, none of which is in the cache.

        Args:
            items: how many timesteps.
        """
        blocks = self.blocks_of(items)
        return self.seconds(2, blocks * BLOCK, blocks)


def measure_store(url: str, seconds: float, *, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Measure how fast what was published at a URL can be read.

    Args:
        url: of a root, or of a shard.
        seconds: how long the bandwidth is measured, about.
        storage_options: for the file system of fsspec.

    Returns:
        The figures of the store; without `ranges` only how much stands there.

    Raises:
        NotABufferError: nothing was published there.
        CorruptBufferError: what was published is damaged.
        RemoteError: the store fails.
    """
    objects = Objects(url_of(url), storage_options)
    shards = shards_of(objects)
    steps = sum(shard.steps for shard in shards.values())
    what = Store(
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
        return what
    file, size = max(sizes.items(), key=lambda item: item[1])
    path = largest.prefix + file
    times = steps / max(1, shard.steps)
    return replace(
        what,
        ranges=True,
        round_trip=statistics.median(_took(objects, [(path, 0, 1)]) for _ in range(LOOKS)),
        requests=SMALL / _took(objects, [(path, i % size, i % size + 1) for i in range(SMALL)]),
        bandwidth=_bandwidth(objects, path, size, seconds),
        files={file: its * times for file, its in sizes.items()},
    )


def _took(objects: Objects, ranges: Sequence[Range]) -> float:
    begin = time.perf_counter()
    objects.read_ranges(ranges)
    return time.perf_counter() - begin


def _bandwidth(objects: Objects, path: str, size: int, seconds: float) -> float:
    """Of a file from its beginning, in requests as large as those that are made for blocks."""
    wanted = FIRST_BYTES
    while True:
        stop, step = min(wanted, size), PIECE * BLOCK
        took = _took(objects, [(path, at, min(at + step, stop)) for at in range(0, stop, step)])
        if took > seconds / 2 or stop == size:
            return stop / took
        wanted *= 2
