"""The shards that were published to a URL, opened as mirrors; and one published folder by its own URL."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from memmap_buffer.errors import MemmapBufferError, NotABufferError, RemoteError, StaleEpisodeError
from memmap_buffer.format.storage import Storage
from memmap_buffer.paths import path_of, url_of
from memmap_buffer.remote.cache import Cache
from memmap_buffer.remote.layout import ROOT, SHARD, Root, Shard, digest, head_object
from memmap_buffer.remote.mirror import Mirror
from memmap_buffer.remote.objects import Objects
from memmap_buffer.remote.published import nothing_at, read_root, read_shard
from memmap_buffer.remote.ranges import may_match

log = logging.getLogger("memmap_buffer")
LOOK_SECONDS = 10.0  # `root.json` is read again after so many seconds, for more shards
CACHE = "~/.cache/memmap_buffer"
_NUMBERED = re.compile(r"shard-([0-9]{5})")


def cache_of(path: str | PathLike[str] | None, limit: int | None) -> Cache:
    """The cache at a path; None: at the default path `CACHE`."""
    return Cache(path_of(CACHE if path is None else path), limit)


def open_url(url: str, options: Mapping[str, Any] | None, cache: Cache) -> Mirror:
    """The mirror of a folder that was published.

    Raises:
        NotABufferError: nothing was published there.
        RemoteError: the store fails.
    """
    objects = Objects(url_of(url), options)
    shard = read_shard(objects)
    if shard is None:
        raise nothing_at(objects, SHARD)
    return Mirror(objects, shard, "", cache)


class RemoteShards:
    """The shards of a root at a URL; it is used like `format.shards.Shards`.

    Args:
        url: the URL of the root.
        options: for fsspec.
        cache: the cache in which mirrors lie.
        root: the content of `root.json` when it was last read.
        numbers: name of a shard -> the number that it got.
        conditions: shards in which nothing can pass these, as far as the list tells, are not opened.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None,
        cache: Cache,
        root: Root | None = None,
        numbers: Mapping[str, int] | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> None:
        self.url, self._options, self._cache = url, options, cache
        self._objects = Objects(url_of(url), options)
        self._root, self._read_at = root or Root(), time.monotonic()
        self.storages: dict[int, Storage] = {}
        self._versions: dict[str, str] = {}
        self._known_numbers, self._conditions = dict(numbers or {}), dict(conditions or {})

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = self.url, self._options, self._cache, self._root, self._known_numbers, self._conditions
        return RemoteShards, arguments

    @property
    def root(self) -> Path:
        """The URL of the root as a path, to be shown in texts only."""
        return Path(self._objects.name_of(""))

    def look(self) -> dict[int, Storage]:
        """Number -> storage, with shards that were published since the last look; the same dict if there are none.

        Raises:
            NotABufferError: nothing was published there, or nothing that can pass the conditions.
            RemoteError: the store fails, and nothing was read of it before.
        """
        if not self._root.shards or time.monotonic() - self._read_at > LOOK_SECONDS:
            try:
                self._root = self._read_root()
            except (MemmapBufferError, OSError) as error:
                if not self._root.shards:
                    raise
                log.warning("%s; its shards are those that were known before", error)  # which can still be read
            self._read_at = time.monotonic()
        if self._unopened():
            try:
                self._open_new()
            except RemoteError as error:
                if not error.missing:
                    raise
                self._root = self._read_root()  # which names the objects that have the heads by now
                self._open_new(one_by_one=True)
            self._read_at = time.monotonic()  # counted from now, however long the opening took
        if not self.storages:
            count, asked = len(self._root.shards), ", ".join(self._conditions)
            raise NotABufferError(
                f"{self._objects}: by its list, none of {count} shards has an episode of such {asked}"
            )
        return self.storages

    def _unopened(self) -> dict[str, Shard]:
        """The shards, by name, of which another version is listed than is open."""
        return {name: shard for name, shard in self._root.shards.items() if self._versions.get(name) != shard.version}

    def _open_new(self, one_by_one: bool = False) -> None:
        """Open the versions that are not open yet.

        Args:
            one_by_one: each version's own head takes the place of an object that had many of them and is gone.
        """
        new, storages = self._unopened(), dict[int, Storage]()
        numbers = number_shards(self._root.order, self._known_numbers)
        names = dict[str, list[str]]()
        for name, shard in new.items():
            if numbers[name] in self.storages or may_match(shard.ranges, self._conditions):
                names.setdefault(shard.head[0], []).append(name)
        for key in names if one_by_one else self._fetch_heads(names):
            for name in names[key]:
                mirror = Mirror(self._objects, new[name], name, self._cache, self._root.heads.get(key))
                storages[numbers[name]] = mirror.storage()
        self.storages = self.storages | dict(sorted(storages.items()))  # each stays in the place that it has
        self._versions |= {name: shard.version for name, shard in new.items()}

    def forget(self) -> None:
        """Have the next look read the list, however long ago it was read."""
        self._read_at = -LOOK_SECONDS

    def reach(self, numbers: Iterable[int]) -> dict[int, Storage]:
        """The storages as `look` returns them, read anew if one of `numbers` is missing; it may still be missing.

        Raises: StaleEpisodeError: the shard of a number was joined with others before this root was opened.
        """
        numbers = {number for number in numbers if number not in self.storages}
        if not numbers:
            return self.storages
        self.forget()
        storages = self.look()
        for name, number in self._known_numbers.items():
            if number in numbers and number not in storages and name in self._root.joined:
                raise StaleEpisodeError(
                    f"{self._objects.name_of(name)}: its episodes were joined with others into "
                    f"{self._root.holder(name)}, under other numbers; begin a new epoch, or draw anew"
                )
        return storages

    def by_name(self) -> list[Storage]:
        """The storages in the order of the shards' names."""
        storages, numbers = self.look(), self._known_numbers
        return [storages[numbers[name]] for name in sorted(numbers) if numbers[name] in storages]

    def _read_root(self) -> Root:
        root = read_root(self._objects)
        if not root.shards:
            raise nothing_at(self._objects, ROOT)
        return root.as_held(self._root, lambda name: read_shard(self._objects, f"{name}/{SHARD}"))

    def _fetch_heads(self, names: Iterable[str]) -> Iterator[str]:
        """Fetch the objects with heads that the cache lacks, all together; gives each name once its object is there."""
        heads = self._root.heads  # it does not name that of a shard which was joined with others before it was read
        lacking = [name for name in names if name in heads and self._cache.head(name, heads[name]) is None]
        yield from (name for name in names if name not in lacking)
        ranges = [(head_object(name), 0, heads[name]) for name in lacking]
        for i, data in self._objects.stream(ranges, lambda i, data: digest(data) == lacking[i]):
            self._cache.keep_head(lacking[i], data)
            yield lacking[i]


def number_shards(names: Iterable[str], numbers: dict[str, int]) -> dict[str, int]:
    """Add the numbers of more shards to those by name: the number in its name, unless a shard before it in the list has
    it; else the highest number so far + 1. The list only grows at its end, so all readers give the same numbers.
    """
    used = set(numbers.values())
    highest = max(used, default=-1)
    for name in names:
        if name not in numbers:
            match = _NUMBERED.fullmatch(name)
            wanted = int(match[1]) if match else highest + 1
            numbers[name] = highest + 1 if wanted in used else wanted
            used.add(numbers[name])
            highest = max(highest, numbers[name])
    return numbers
