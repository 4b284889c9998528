"""A root of shards: `shard-00000` and on, each a buffer with a writer of its own. What is there, and which is free.

Nothing stands in the root but the shards, so nothing has to be kept in step with them: a folder is a shard from the
moment that its `schema.json` is there until it is removed, and free as long as nobody holds its lock.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from memmap_buffer.choices import OnDamaged, check_choice
from memmap_buffer.errors import BufferLockedError, CorruptBufferError, MemmapBufferError, NotABufferError
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.layout import MAX_SCHEMA_BYTES, Layout
from memmap_buffer.format.lock import WriterLock
from memmap_buffer.format.storage import Storage
from memmap_buffer.paths import path_of

MAX_SHARDS = 100_000
SETTLED_NS = 100_000_000  # two changes of a folder within a tick of the clock bear the same time
log = logging.getLogger("memmap_buffer")
JOINED = "joined-"  # and the id of a shard that others were joined into
_NAME = re.compile(r"shard-([0-9]{5})")
_JOINED_NAME = re.compile(rf"{JOINED}[0-9a-f]{{32}}")


def shard_name(number: int) -> str:
    """The name of a shard's folder."""
    return f"shard-{number:05}"


class Unread(NamedTuple):
    """A shard that is not read, and the file that is to blame.

    Args:
        why: what is wrong with it. file: its name in the shard. marks: what it was like.
        size: how many bytes of it make another look worth while; None: any change does.
    """

    why: str
    file: str
    marks: tuple[int, int, int]
    size: int | None = None

    def changed(self, folder: Folder) -> bool:
        """Whether it may be read by now."""
        now = folder.marks(self.file)
        return now != self.marks if self.size is None else now[0] >= self.size


BEING_MADE = Unread("", "schema.json", (-1, -1, -1), size=1)  # or removed


class Shards:
    """The shards of a root, opened for reading as they are found.

    A shard that lacks a file, or a part of one, is being copied to the root or was cut short: nobody can tell. It is
    passed over until it is whole, and the log says so.

    Args:
        root: the folder that they are in.
        on_damaged: what to do about a shard that can never be read as it is: "raise", or "skip" it as well.

    Attributes:
        storages: by their numbers, in the order in which they were found, which stays. In the place of a shard that is
            not there any more stands a storage of which nothing is shown.

    Raises: SchemaError: `on_damaged` is neither.
    """

    def __init__(self, root: str | PathLike[str], on_damaged: str = "raise") -> None:
        check_choice("on_damaged", on_damaged, OnDamaged)
        self.root, self.on_damaged = path_of(root), on_damaged
        self.storages: dict[int, Storage] = {}
        self._first: Storage | None = None  # what is vacant is shaped as it is, whatever stood there
        self._unread: dict[int, Unread] = {}
        self._logged_numbers: set[int] = set()
        self._marks: tuple[int, int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state that a worker needs, which does not say again what was said."""
        return {"root": self.root, "on_damaged": self.on_damaged, "told": self._logged_numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["root"], state["on_damaged"])  # type: ignore[misc]
        self._logged_numbers = state["told"]

    def look(self) -> dict[int, Storage]:
        """The storages as they are now: one look at the root's time, and only where it moved at what is in it.

        Raises: NotABufferError: there is no shard, and never was. CorruptBufferError, SchemaError: one is damaged.
        """
        waiting = (unread.changed(self._folder(number)) for number, unread in self._unread.items())
        if self._marks is None or self._marks != Folder(self.root).marks(".") or any(waiting):
            self._look_again()
        return self.storages

    def forget(self) -> None:
        """Have the next look be at all that is there."""
        self._marks = None

    def reach(self, numbers: Iterable[int]) -> dict[int, Storage]:
        """The storages with something in the place of each of these numbers, if it is one that a shard may have."""
        numbers = [number for number in numbers if 0 <= number < MAX_SHARDS]
        if any(number not in self.storages for number in numbers):
            self.forget()
            self.look()
        missing = {number: self._vacant(number) for number in numbers if number not in self.storages}
        if missing:
            self.storages = self.storages | missing
        return self.storages

    def _folder(self, number: int) -> Folder:
        return Folder(self.root / shard_name(number))

    def _look_again(self) -> None:
        marks = Folder(self.root).marks(".")  # also of one that is removed, as its shards are
        shards = {number: self._opened(number) for number in shard_numbers(self.root)}
        opened = {number: shard for number, shard in shards.items() if isinstance(shard, Storage)}
        unread = {number: shard for number, shard in shards.items() if isinstance(shard, Unread)}
        self._tell(unread)
        if not opened and not self.storages:
            why = "".join(
                f"\n  {self._folder(number).path}: {shard.why}" for number, shard in unread.items() if shard.why
            )
            text = f"no subfolder holds a buffer that is whole:{why}" if why else "no subfolder holds a buffer"
            raise NotABufferError(f"{self.root}: {text}", path=self.root)
        self._first = self._first or opened[min(opened)]
        withdrawn = {n: self._vacant(n) for n, old in self.storages.items() if not (n in opened or old.withdrawn)}
        self.storages = self.storages | opened | withdrawn
        self._unread = unread
        self._marks = marks if time.time_ns() - marks[1] > SETTLED_NS else None

    def _opened(self, number: int) -> Storage | Unread:
        """The storage of a shard, or why there is none."""
        folder, old = self._folder(number), self.storages.get(number)
        marks = folder.marks("schema.json")
        if marks[0] < 0:
            return BEING_MADE
        if old is not None and old.is_of(folder):
            return old
        try:
            return Storage.open(folder, read_only=True)
        except (MemmapBufferError, FileNotFoundError) as error:
            if not folder.exists("schema.json"):
                return BEING_MADE
            if isinstance(error, FileNotFoundError):
                raise
            return self._refused(folder, marks, error)

    def _refused(self, folder: Folder, marks: tuple[int, int, int], error: MemmapBufferError) -> Unread:
        """The report on a shard that could not be opened. Raises the error where it is damaged, unless to skip it."""
        size, expected = (error.named.get(key, 0) for key in ("size", "expected"))
        name = Path(error.named.get("path", folder.path)).relative_to(folder.path).as_posix()
        if size < expected:
            has = f"has {size} of {expected} bytes" if size else "is missing"
            return Unread(f"{name} {has}", name, marks, size=expected)
        if name in (".", "schema.json"):
            name = "schema.json"
            if _is_cut(folder):
                return Unread(f"{name} is cut short", name, marks)
        else:
            marks = folder.marks(name)
        if self.on_damaged == "skip":
            return Unread(str(error), name, marks)
        text = f"{error}; from_root(…, on_damaged='skip') reads the other shards"
        raise type(error)(text, **error.named) from error

    def _tell(self, unread: Mapping[int, Unread]) -> None:
        """Say of each shard that is passed over why, once as long as it is."""
        for number, shard in unread.items():
            if shard.why and number not in self._logged_numbers:
                log.warning("%s is passed over until it is whole: %s", self._folder(number).path, shard.why)
                self._logged_numbers.add(number)
        self._logged_numbers.intersection_update(unread)

    def _vacant(self, number: int) -> Storage:
        assert self._first is not None
        return self._first.withdraw(self._folder(number).path)


def opened(path: Path, on_damaged: str) -> Storage | None:
    """A folder, open for reading; None for one that cannot be opened, if such are skipped, and the log says why."""
    try:
        return Storage.open(path, read_only=True)
    except (MemmapBufferError, FileNotFoundError) as error:
        if on_damaged != "skip":
            raise
        log.warning("%s is passed over: %s", path, error)
        return None


def _is_cut(folder: Folder) -> bool:
    """Whether `schema.json` may be the beginning of one."""
    data = folder.read("schema.json", MAX_SCHEMA_BYTES)
    return Layout.may_be_torn(data) and (not data.strip(b"\0") or data.count(b"{") > data.count(b"}"))


def tell_readers(folder: Folder) -> None:
    """Have those that read a root look again, as a folder was made anew: they look at what the root's time tells."""
    if _NAME.fullmatch(folder.path.name):
        with suppress(OSError):  # of another user's root; they see it with the next change of that
            Folder(folder.path.parent).touch()


def shard_numbers(root: Path) -> Iterator[int]:
    """The numbers of a root's shards, finished or not, ascending."""
    matches = map(_NAME.fullmatch, _names_in(root))
    yield from sorted(int(match[1]) for match in matches if match is not None)


def _names_in(root: Path) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError):  # also where it is removed meanwhile
        return [path.name for path in root.iterdir()]
    return []


def is_joined_name(name: str) -> bool:
    """Whether it is the name of a shard that others were joined into."""
    return _JOINED_NAME.fullmatch(name) is not None


def is_read_by_number(root: Path) -> bool:
    """Whether a root is read by the numbers of its shards: it has some, and none that others were joined into."""
    has_joined = any(map(is_joined_name, _names_in(root)))
    return not has_joined and next(shard_numbers(root), None) is not None


def require_new_place(folder: Folder) -> None:
    """Raise NotABufferError where a buffer would stand among the shards of a root, or what was published."""
    folder.require_not_published()
    names = [shard_name(number) for number in shard_numbers(folder.path)]
    if names:
        raise NotABufferError(
            f"{folder.path}: no buffer can be made here, as it is a root of shards ({names[0]} stands in it); give "
            "shard='auto' to record another shard, ConcatBuffer.from_root to read them, or another folder",
            path=folder.path,
        )


def take_free(root: str | PathLike[str], layout: Layout) -> tuple[Folder, WriterLock]:
    """The first shard that nobody writes to, of this layout and with room, else the next; its lock is held.

    No lock but those of the shards is needed: whoever holds one has it, and who comes second goes on to the next.

    Raises: CorruptBufferError: there are as many shards as there can be. OSError.
    """
    place = path_of(root)
    there = list(shard_numbers(place))
    for number in _in_turn(there):
        folder = Folder(place / shard_name(number))
        if number not in there:
            folder.create()
        lock = WriterLock(folder)
        try:
            if lock.in_use:
                continue
            lock.acquire()
        except (BufferLockedError, CorruptBufferError, NotADirectoryError):
            continue
        except (PermissionError, FileNotFoundError):
            if number in there:
                continue  # another user's, or it was removed
            raise
        if _is_free(folder, layout):
            return folder, lock
        lock.release()
    raise CorruptBufferError(f"{place} holds {MAX_SHARDS} shards; remove some, or begin another root", path=place)


def _in_turn(numbers: list[int]) -> Iterator[int]:
    """The numbers of the shards that there are, then those behind the last one, then those that are left."""
    yield from numbers
    yield from range(max(numbers, default=-1) + 1, MAX_SHARDS)
    there = set(numbers)
    yield from (number for number in range(max(numbers, default=0)) if number not in there)


def _is_free(folder: Folder, layout: Layout) -> bool:
    """Whether a locked shard is not created yet, or of this layout and with room for an episode."""
    try:
        if not folder.exists("schema.json"):
            return _is_empty(folder)
        storage = Storage.open(folder.path, read_only=True)
    except (MemmapBufferError, PermissionError):
        return False  # `verify` tells what is wrong with it; nothing is written to it
    stored = storage.layout
    full = not stored.circular and len(storage.table) >= stored.max_episodes
    return stored.writable and not stored.differences(layout) and not full


def _is_empty(folder: Folder) -> bool:
    """Whether a folder that is no buffer may become one; else it is being copied there, its schema not yet."""
    files = (name for sub in ("", "data", "meta") for name in folder.list(sub))
    return folder.exists("schema.json.new") or not any(name.endswith(".npy") for name in files)
