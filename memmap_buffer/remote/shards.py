"""The shards that were published to a URL, opened as mirrors; and one published folder by its own URL."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from memmap_buffer.errors import NotABufferError, RemoteError
from memmap_buffer.format.objects import Objects
from memmap_buffer.format.remote_layout import (
    HEAD,
    HEADS,
    MAX_ROOT_BYTES,
    MAX_SHARD_BYTES,
    ROOT,
    SHARD,
    Root,
    Shard,
    digest,
    open_head,
)
from memmap_buffer.format.storage import Storage
from memmap_buffer.paths import path_of
from memmap_buffer.remote.cache import Cache
from memmap_buffer.remote.mirror import Mirror

LOOK_SECONDS = 10.0  # how often a root is asked whether it has more shards
CACHE = "~/.cache/memmap_buffer"
_NUMBERED = re.compile(r"shard-([0-9]{5})")


def cache_of(path: str | PathLike[str] | None, limit: int | None) -> Cache:
    """The cache at a path, or where it is where none is given."""
    return Cache(path_of(CACHE if path is None else path), limit)


def open_url(url: str, options: Mapping[str, Any] | None, cache: Cache) -> Mirror:
    """The mirror of a folder that was published.

    Raises:
        NotABufferError: nothing was published there.
        RemoteError: the store fails.
    """
    objects = Objects(url, options)
    where = objects.name_of(SHARD)
    try:
        shard = Shard.from_json(objects.read(SHARD, MAX_SHARD_BYTES), where)
    except RemoteError as error:
        if not error.missing:
            raise
        raise NotABufferError(
            f"{where}: no buffer was published here; check the URL, or `publish` one", path=where
        ) from None
    return Mirror.open(
        objects, "", shard, lambda: open_head(objects.read(HEAD, shard.head[2]), objects.name_of(HEAD)), cache
    )


class RemoteShards:
    """The shards of a root at a URL; the same face as `format.shards.Shards`.

    Args:
        url: of the root.
        options: for fsspec.
        cache: where mirrors lie.
        root: what `root.json` said when it was last read.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None, cache: Cache, root: Root | None = None) -> None:
        self.url, self._options, self._cache = url, options, cache
        self._objects = Objects(url, options)
        self._root, self._read_at = root, time.monotonic()
        self.storages: dict[int, Storage] = {}
        self._names: dict[str, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteShards, (self.url, self._options, self._cache, self._root)

    @property
    def root(self) -> Path:
        """For texts."""
        return Path(self._objects.name_of(""))

    def look(self) -> dict[int, Storage]:
        """The storages, those included that were published since; the same dict where there are none.

        Raises:
            NotABufferError: nothing was published there.
            RemoteError: the store fails, and nothing was read of it before.
        """
        now = time.monotonic()
        if self._root is None or now - self._read_at > LOOK_SECONDS:
            self._root, self._read_at = self._read_root(), now
        new = {name: shard for name, shard in self._root.shards.items() if name not in self._names}
        if new:
            heads = self._heads(new)
            found = dict(self.storages)
            for name, shard in new.items():
                number = self._number(name)
                self._names[name] = number
                mirror = Mirror.open(self._objects, f"{name}/", shard, partial(heads.__getitem__, name), self._cache)
                found[number] = mirror.storage()
            self.storages = dict(sorted(found.items()))
        return self.storages

    def reach(self, numbers: Iterable[int]) -> dict[int, Storage]:
        """The same; a number that there is none of stays unknown."""
        if any(number not in self.storages for number in numbers):
            self._read_at = -LOOK_SECONDS
            return self.look()
        return self.storages

    def _number(self, name: str) -> int:
        assert self._root is not None
        names = [*self._root.shards]
        numbered = [_NUMBERED.fullmatch(one) for one in names]
        if all(numbered):
            return int(name[-5:])
        return names.index(name)

    def _read_root(self) -> Root:
        where = self._objects.name_of(ROOT)
        try:
            root = Root.from_json(self._objects.read(ROOT, MAX_ROOT_BYTES), where)
        except RemoteError as error:
            if not error.missing:
                raise
            raise NotABufferError(
                f"{where}: nothing was published here; check the URL, or `publish` a folder", path=where
            ) from None
        if not root.shards:
            raise NotABufferError(f"{where}: no shard is listed; `publish` a folder", path=where)
        return root

    def _heads(self, shards: Mapping[str, Shard]) -> dict[str, dict[str, bytes]]:
        """The files of the heads of shards: an object that holds several is read whole if half of it is wanted."""
        assert self._root is not None
        wanted: dict[str, list[str]] = {}
        for name, shard in shards.items():
            wanted.setdefault(shard.head[0], []).append(name)
        found = {}
        ranges, of = [], []
        for head, names in wanted.items():
            where = f"{HEADS}/{head}.bin"
            if 2 * sum(shards[name].head[2] for name in names) >= self._root.heads[head]:
                ranges.append((where, 0, self._root.heads[head]))
                of.append((names, 0))
            else:
                for name in names:
                    first, size = shards[name].head[1:]
                    ranges.append((where, first, first + size))
                    of.append(([name], first))
        for (names, begin), (where, start, stop), data in zip(
            of, ranges, self._objects.read_ranges(ranges), strict=True
        ):
            if (
                start == 0
                and digest(data) != where[len(HEADS) + 1 : -4]
                and stop == self._root.heads[where[len(HEADS) + 1 : -4]]
            ):
                raise NotABufferError(f"{self._objects.name_of(where)}: the bytes are not those that were published")
            for name in names:
                first, size = shards[name].head[1:]
                found[name] = open_head(bytes(data[first - begin : first - begin + size]), self._objects.name_of(where))
        return found
