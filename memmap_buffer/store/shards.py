"""A root of shards: `shard-00000` and on, each a buffer with a writer of its own. What is there, and which is free.

Nothing stands in the root but the shards, so nothing has to be kept in step with them: a folder is a shard from the
moment that its `schema.json` is there until it is removed, and free as long as nobody holds its lock.
"""

from __future__ import annotations

import heapq
import logging
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from memmap_buffer.errors import BufferLockedError, CorruptBufferError, MemmapBufferError, NotABufferError
from memmap_buffer.store.folder import Folder
from memmap_buffer.store.layout import Layout
from memmap_buffer.store.lock import WriterLock
from memmap_buffer.store.records import TIME
from memmap_buffer.store.storage import Storage
from memmap_buffer.store.table import EpisodeTable

MAX_SHARDS = 100_000
SETTLED_NS = 100_000_000  # two changes of a folder within a tick of the clock bear the same time
log = logging.getLogger("memmap_buffer")
_NAME = re.compile(r"shard-(\d{5})")
Key: TypeAlias = tuple[int, int, int]


def shard_name(number: int) -> str:
    """The name of a shard's folder."""
    return f"shard-{number:05}"


class Shards:
    """The shards of a root, opened for reading as they are found.

    Attributes:
        storages: by their numbers. In the place of a number that has no folder, or none any more, stands a storage of
            which nothing is shown.
    """

    def __init__(self, root: str | PathLike[str]) -> None:
        self.root = Path(root)
        self.storages: tuple[Storage, ...] = ()
        self._first: Storage | None = None  # what is vacant is shaped as it is, whatever stood there
        self._keys: dict[int, Key | None] = {}
        self._unfinished: list[int] = []
        self._stamp: tuple[int, int] | None = None

    def look(self) -> tuple[Storage, ...]:
        """The storages as they are now: one look at the root's time, and only where it moved at what is in it.

        Raises: NotABufferError: there is no shard, and never was. CorruptBufferError.
        """
        if self._stamp is None or self._stamp != self._now() or any(map(self._is_complete, self._unfinished)):
            self._look_again()
        return self.storages

    def reach(self, count: int) -> tuple[Storage, ...]:
        """At least so many storages."""
        if len(self.storages) < count:
            self._stamp = None
            self.look()
        self.storages += tuple(self._vacant(number) for number in range(len(self.storages), count))
        return self.storages

    def _now(self) -> tuple[int, int]:
        try:
            return Folder(self.root).stamp(".")
        except FileNotFoundError:
            return 0, 0

    def _is_complete(self, number: int) -> bool:
        return Folder(self.root / shard_name(number)).exists("schema.json")

    def _look_again(self) -> None:
        stamp = self._now()
        numbers = list(shard_numbers(self.root))
        complete = [number for number in numbers if self._is_complete(number)]
        keys = {number: _key(self.root / shard_name(number)) for number in complete}  # before it is opened, see `_key`
        opened = {number: storage for number in complete if (storage := self._opened(number, keys[number])) is not None}
        if not opened and not self.storages:
            raise NotABufferError(f"{self.root}: no subfolder holds a buffer", path=self.root)
        old = dict(enumerate(self.storages))
        self._first = self._first or opened[min(opened)]
        every = range(max([*opened, *old]) + 1)
        self.storages = tuple(opened[n] if n in opened else self._withdrawn(n, old.get(n)) for n in every)
        self._keys = {number: keys[number] for number in opened}
        self._unfinished = [number for number in numbers if number not in opened]
        self._stamp = stamp if time.time_ns() - stamp[1] > SETTLED_NS else None

    def _opened(self, number: int, key: Key | None) -> Storage | None:
        """The storage of a shard; None where it was removed meanwhile."""
        path = self.root / shard_name(number)
        try:
            if key is not None and self._keys.get(number) == key:
                return self.storages[number]
            return Storage.open(path, read_only=True)
        except (CorruptBufferError, NotABufferError, FileNotFoundError):
            if Folder(path).exists("schema.json"):
                raise
            return None

    def _withdrawn(self, number: int, old: Storage | None) -> Storage:
        return old if old is not None and old.withdrawn else self._vacant(number)

    def _vacant(self, number: int) -> Storage:
        assert self._first is not None
        return self._first.withdraw(self.root / shard_name(number))


class Capacity:
    """The bytes that all shards of a root may show together: of each the steps that are visible, by their fields.

    The oldest episodes of the root are to leave first, by the time of their publication. Each writer retires its own,
    when it publishes; so the sum is kept as far as the shards with the oldest episodes have a writer that publishes.
    What is of a shard that nobody writes to stays, and counts; and so does the newest episode of each shard.

    Args: own: the shard that is written to. max_bytes: of all together.
    """

    def __init__(self, own: Storage, max_bytes: int) -> None:
        self._own, self.max_bytes = own, max_bytes
        self._shards = Shards(own.path.parent)

    def first_kept(self) -> int:
        """The serial of the oldest of the own episodes that may stay; 0 where that cannot be told."""
        try:
            return self._first_kept()
        except (MemmapBufferError, OSError) as error:  # of another's shard: what was published here stays published
            log.warning("%s: max_bytes is not kept for now: %s", self._own.path, error)
            return 0

    def _first_kept(self) -> int:
        storages = [self._own if s.path == self._own.path else s for s in self._shards.look() if not s.withdrawn]
        tables = [(storage.refresh(), _step_bytes(storage), storage) for storage in storages]
        surplus = sum(table.steps * size for table, size, _ in tables) - self.max_bytes
        serial = 0
        if surplus <= 0:
            return serial
        for _, size, mine, number in heapq.merge(*(_oldest(*each, each[2] is self._own) for each in tables)):
            if surplus <= 0:
                break
            surplus -= size
            serial = number + 1 if mine else serial
        return min(serial, int(self._own.table.serial[self._own.table.visible[-1:]].max(initial=0)))


def _step_bytes(storage: Storage) -> int:
    return sum(field.itemsize for field in storage.layout.schema.fields.values())


def _oldest(table: EpisodeTable, size: int, storage: Storage, mine: bool) -> Iterator[tuple[int, int, bool, int]]:
    """(time of publication, bytes, `mine`, serial) of the visible episodes of a shard, oldest first."""
    times = storage.maps.words[:, TIME]
    for slot in table.visible:
        yield int(times[slot]), int(table.length[slot]) * size, mine, int(table.serial[slot])


def _key(path: Path) -> Key | None:
    """What tells a shard from another that took its place: its folder, and a file in it.

    The number of a folder may be that of the one that was removed; a file that is mapped keeps its own. Taken before
    the shard is opened: one that is replaced in between is opened again by the next look.
    """
    folder = Folder(path)
    with suppress(FileNotFoundError):
        return *folder.lock_key(), folder.file_key("state.npy")[1]
    return None


def tell_readers(folder: Folder) -> None:
    """Have those that read a root look again, as a folder was made anew: they look at what the root's time tells."""
    if _NAME.fullmatch(folder.path.name):
        with suppress(OSError):  # of another user's root; they see it with the next change of that
            Folder(folder.path.parent).touch()


def shard_numbers(root: Path) -> Iterator[int]:
    """The numbers of a root's shards, finished or not, ascending."""
    found = (_NAME.fullmatch(path.name) for path in root.iterdir()) if root.is_dir() else ()
    yield from sorted(int(name[1]) for name in found if name is not None)


def take_free(root: str | PathLike[str], layout: Layout) -> tuple[Folder, WriterLock]:
    """The first shard that nobody writes to, of this layout and with room, else the next; its lock is held.

    No lock but those of the shards is needed: whoever holds one has it, and who comes second goes on to the next.

    Raises: CorruptBufferError: there are as many shards as there can be. OSError.
    """
    place = Path(root)
    numbers = list(shard_numbers(place))
    for number in [*numbers, *range(max(numbers, default=-1) + 1, MAX_SHARDS)]:
        folder = Folder(place / shard_name(number))
        folder.create()
        lock = WriterLock(folder)
        try:
            if lock.in_use:
                continue
            lock.acquire()
        except BufferLockedError:
            continue
        if _is_free(folder, layout):
            return folder, lock
        lock.release()
    raise CorruptBufferError(f"{place} holds {MAX_SHARDS} shards; remove some, or begin another root", path=place)


def _is_free(folder: Folder, layout: Layout) -> bool:
    """Whether a locked shard is not created yet, or of this layout and with room for an episode."""
    if not folder.exists("schema.json"):
        return True
    try:
        storage = Storage.open(folder.path, read_only=True)
    except (CorruptBufferError, NotABufferError):
        return False  # `verify` tells what is wrong with it; nothing is written to it
    stored = storage.layout
    full = not stored.circular and len(storage.table) >= stored.max_episodes
    return stored.writable and not stored.differences(layout) and not full
