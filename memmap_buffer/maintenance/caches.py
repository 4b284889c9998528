"""The cache of what was read by URLs: what is in it, whether it is as it was published, how it is emptied.

All of it beside readers, who fetch again what they lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from memmap_buffer.errors import NotABufferError
from memmap_buffer.paths import path_of
from memmap_buffer.remote.cache import BOUND, Cache
from memmap_buffer.remote.layout import ROOT, SHARD
from memmap_buffer.remote.shards import CACHE


@dataclass(frozen=True)
class CacheContents:
    """The contents of a cache.

    Attributes:
        path: where it is.
        bound: the `cache_bytes` that it was last opened with; None: none.
        shards: `<id>-<version>` of a shard -> (the bytes of it that are there, those that there are).
        num_bytes: of all shards that are there.
        head_bytes: of their heads, which do not count for the bound.
    """

    path: Path
    bound: int | None
    shards: Mapping[str, tuple[int, int]]
    num_bytes: int
    head_bytes: int


def cache_contents(cache: str | PathLike[str] | None = None) -> CacheContents:
    """The contents of a cache.

    Args:
        cache: as for reading by a URL.

    Raises:
        NotABufferError: there is none.
    """
    there = _cache(cache)
    shards = there.contents()
    num_bytes = sum(size for size, _ in shards.values())
    return CacheContents(there.path, there.bound, shards, num_bytes, sum(there.heads().values()))


def check_cache(cache: str | PathLike[str] | None = None) -> dict[str, int]:
    """Compare a cache with the digests that were published; what differs is fetched again when it is read.

    Args:
        cache: as for reading by a URL.

    Returns:
        `<id>-<version>` of each shard, and path of each object with heads, of which something differed -> its bytes.

    Raises:
        NotABufferError: there is none.
    """
    return _cache(cache).check()


def clear_cache(cache: str | PathLike[str] | None = None) -> int:
    """Empty a cache, beside readers.

    Args:
        cache: as for reading by a URL.

    Returns:
        The bytes of shards and heads that it had.

    Raises:
        NotABufferError: there is none.
    """
    contents = cache_contents(cache)
    _cache(cache).clear()
    return contents.num_bytes + contents.head_bytes


def _cache(path: str | PathLike[str] | None) -> Cache:
    """The cache at a path, which has the file that readers make first, and is no folder of anything else."""
    place = path_of(CACHE if path is None else path)
    others = [name for name in (ROOT, SHARD, "schema.json") if (place / name).exists()]
    try:
        is_cache = (place / BOUND).read_bytes()[:32].isdigit() and not others
    except OSError:
        is_cache = False
    if not is_cache:
        raise NotABufferError(f"{place}: there is no cache of what was read by URLs; give the `cache` of readers")
    return Cache(place, keep_bound=True)
