"""Power cuts on paper: what the disk may hold after one, from the log of everything that was done to it.

`Recorder` stands at `memmap_buffer.format.syscalls.system` and logs. `Disk` replays a log up to a point and says what
may be there when the machine comes back:

- A file has what was written before its last barrier. Of the writes after it each 512-byte sector has some prefix, each
  sector another one; a sector is never torn. Its size is that of some moment since the barrier: a file that never had
  one may be empty, whatever its name.
- A folder has the names that it had at its last fsync, and some prefix of what was created, renamed and removed since.
  Ext4 and xfs keep the order of these operations, in one journal for the whole file system; here each folder has a
  journal of its own, and a barrier on a file saves no name, which is more than either would lose.
- A file that lost its name is gone; a rename shows the old file or the new one.

What is not modelled: a drive that lies about its barriers, or tears a sector.
"""

from __future__ import annotations

import os
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fault_injection import counters_written
from specification import STATE_BYTES, STATE_WORD

from memmap_buffer.format import storage, syscalls
from memmap_buffer.writing import recovery

SECTOR = 512


class Operation(NamedTuple):
    """One entry of a log: what was done, to which file or folder (by a number that is never used twice), and how."""

    kind: str
    target: int
    name: str = ""
    other: Any = None  # a file or folder, a new name, a size, an offset
    data: bytes = b""


class Recorder(syscalls.System):
    """The real system calls, but for the barriers, which cost time and change nothing here, and a log of all.

    Attributes: log: what was done, and the marks of whoever does it.
    """

    def __init__(self) -> None:
        self.log: list[Operation] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._count = 0

    def add(self, path: Path) -> None:
        """Take note of a folder that is there already, and of what is in it, all of it on the disk."""
        self.folder(path)
        self._add(path)

    def folder(self, path: Path) -> int:
        """The number of a folder."""
        return self._number(os.stat(path))

    def mark(self, what: Any) -> None:
        """Note what has been promised from here on."""
        self.log.append(Operation("mark", 0, other=what))

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        written = super().pwrite(fd, data, offset)
        raw = data.tobytes() if hasattr(data, "tobytes") else bytes(data)
        self.log.append(Operation("write", self._number(os.fstat(fd)), other=offset, data=raw[:written]))
        return written

    def barrier(self, fd: int) -> None:
        self.log.append(Operation("barrier", self._number(os.fstat(fd))))

    def create(self, name: str, directory: int) -> int:
        fd = super().create(name, directory)
        number = self._number(os.fstat(fd), new=True)
        self.log.append(Operation("create", self._number(os.fstat(directory)), name, number))
        return fd

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self.log.append(Operation("size", self._number(os.fstat(fd)), other=size))

    def copy_range(self, source: int, target: int, offset: int, size: int) -> int:
        copied = super().copy_range(source, target, offset, size)
        data = os.pread(target, copied, offset)
        self.log.append(Operation("write", self._number(os.fstat(target)), other=offset, data=data))
        return copied

    def punch(self, fd: int, offset: int, size: int) -> None:
        super().punch(fd, offset, size)
        self.log.append(Operation("write", self._number(os.fstat(fd)), other=offset, data=bytes(size)))

    def rename(self, old: str, new: str, directory: int) -> None:
        super().rename(old, new, directory)
        self.log.append(Operation("rename", self._number(os.fstat(directory)), old, new))

    def link(self, old: str, new: str, directory: int) -> None:
        super().link(old, new, directory)
        number = self._number(os.stat(new, dir_fd=directory, follow_symlinks=False))
        self.log.append(Operation("create", self._number(os.fstat(directory)), new, number))

    def unlink(self, name: str, directory: int) -> None:
        super().unlink(name, directory)
        self.log.append(Operation("unlink", self._number(os.fstat(directory)), name))

    def mkdir(self, name: str, directory: int) -> None:
        super().mkdir(name, directory)
        number = self._number(os.stat(name, dir_fd=directory), new=True)
        self.log.append(Operation("create", self._number(os.fstat(directory)), name, -number))

    def sync_folder(self, directory: int) -> None:
        self.log.append(Operation("sync", self._number(os.fstat(directory))))

    def _number(self, status: os.stat_result, new: bool = False) -> int:
        """An inode is used again after its file is gone; then it is another file."""
        inode = status.st_dev, status.st_ino
        if new or inode not in self._numbers:
            self._count += 1
            self._numbers[inode] = self._count
        return self._numbers[inode]

    def _add(self, path: Path) -> None:
        folder = self.folder(path)
        for entry in sorted(path.iterdir()):
            number = self._number(entry.stat())
            is_folder = entry.is_dir()
            self.log.append(Operation("create", folder, entry.name, -number if is_folder else number))
            if is_folder:
                self._add(entry)
            else:
                self.log.append(Operation("write", number, other=0, data=entry.read_bytes()))
                self.log.append(Operation("barrier", number))
        self.log.append(Operation("sync", folder))


class _File:
    """The bytes of a file that are safe, and what was done since."""

    def __init__(self) -> None:
        self.safe = b""
        self.now = bytearray()
        self.sizes = [0]
        self.pieces: dict[int, list[tuple[int, bytes]]] = {}  # sector -> what was written to it since, in order

    def write(self, offset: int, data: bytes) -> None:
        if offset + len(data) > len(self.now):
            self.resize(offset + len(data))
        self.now[offset : offset + len(data)] = data
        start = 0
        while start < len(data):
            sector, inside = divmod(offset + start, SECTOR)
            piece = data[start : start + SECTOR - inside]
            self.pieces.setdefault(sector, []).append((offset + start, piece))
            start += len(piece)

    def resize(self, size: int) -> None:
        if size < len(self.now):
            raise NotImplementedError("a file that was made shorter")
        self.now.extend(bytes(size - len(self.now)))
        self.sizes.append(size)

    def barrier(self) -> None:
        self.safe, self.sizes, self.pieces = bytes(self.now), [len(self.now)], {}

    def after_cut(self, rng: random.Random) -> tuple[bytes, str]:
        """What is left, and how much that is of what was done since the barrier: "all", "none" or "some"."""
        if len(self.sizes) == 1 and not self.pieces:
            return self.safe, "all"
        part = _part(rng)
        size = self.sizes[part(len(self.sizes) - 1)]
        content = bytearray(len(self.now))
        content[: len(self.safe)] = self.safe
        for written in self.pieces.values():
            for offset, piece in written[: part(len(written))]:
                content[offset : offset + len(piece)] = piece
        left = bytes(content[:size])
        return left, "all" if left == self.now else "none" if left == self.safe else "some"


class _Folder:
    """The names of a folder that are safe, and what was done since."""

    def __init__(self) -> None:
        self.safe: dict[str, int] = {}
        self.since: list[Operation] = []

    def sync(self) -> None:
        for operation in self.since:
            _rename(self.safe, operation)
        self.since = []

    def after_cut(self, rng: random.Random) -> tuple[dict[str, int], str]:
        """The names that are left, and how much that is of what was done to them since."""
        names, kept = dict(self.safe), _part(rng)(len(self.since))
        for operation in self.since[:kept]:
            _rename(names, operation)
        return names, "all" if kept == len(self.since) else "some" if kept else "none"


def _rename(names: dict[str, int], operation: Operation) -> None:
    if operation.kind == "create":
        names[operation.name] = operation.other
    else:
        number = names.pop(operation.name)
        if operation.kind == "rename":
            names[operation.other] = number


def _part(rng: random.Random) -> Callable[[int], int]:
    """How many of n writes the disk got to: none, all, or any number, the same way for all sectors of a file."""
    kind = rng.randrange(4)
    if kind < 2:
        return lambda n: n * kind
    return lambda n: rng.choice((0, n, rng.randint(0, n)))


class Disk:
    """Files and folders as they are written, a log played into them operation by operation.

    Attributes:
        marked: the last mark.
        last: what was done last behind it, and to which file, or folder of files; nothing right behind it.
    """

    def __init__(self) -> None:
        self.marked: Any = None
        self.last: tuple[str, ...] = ()
        self._names: dict[int, str] = {}  # of files and folders as they were made; in a folder's folder, of that
        self._files: dict[int, _File] = {}
        self._folders: dict[int, _Folder] = {}

    def play(self, operation: Operation) -> None:
        name = self._names.get(operation.target) or operation.name
        self.last = (operation.kind, name)
        if operation.kind == "create":
            self._names[abs(operation.other)] = name
        if operation.kind == "mark":
            self.marked, self.last = operation.other, ()
        elif operation.kind in ("write", "size", "barrier"):
            file = self._files.setdefault(operation.target, _File())
            if operation.kind == "write":
                file.write(operation.other, operation.data)
            elif operation.kind == "size":
                file.resize(operation.other)
            else:
                file.barrier()
        else:
            folder = self._folders.setdefault(operation.target, _Folder())
            if operation.kind == "sync":
                folder.sync()
            else:
                folder.since.append(operation)

    def cut(self, folder: int, rng: random.Random) -> Left:
        """What may be left of a folder."""
        content: dict[str, bytes | Left] = {}
        names, how = self._folders.get(folder, _Folder()).after_cut(rng)
        kept = {"": how}
        for name, number in names.items():
            if number < 0:
                content[name] = inside = self.cut(-number, rng)
                each = {*inside.kept.values()}
                kept[name] = each.pop() if len(each) == 1 else "some"
            else:
                content[name], kept[name] = self._files.get(number, _File()).after_cut(rng)
        return Left(content, kept)


class Left(NamedTuple):
    """What a cut left of a folder.

    Attributes:
        content: name -> the bytes of a file, or what was left of a folder.
        kept: name -> how much that is of what was done since the last barrier, of a folder to all that is in it; "" is
            for the names.
    """

    content: dict[str, Any]
    kept: dict[str, str]

    def write(self, path: Path) -> None:
        """Write it to `path`, which is made."""
        path.mkdir()
        for name, content in self.content.items():
            if isinstance(content, Left):
                content.write(path / name)
            else:
                (path / name).write_bytes(content)
                if name == "state.npy":
                    _keep_inode(path / name)


def _keep_inode(file: Path) -> None:
    """What a power cut leaves is no copy: where `state.npy` tells its inode, that stays right."""
    with file.open("r+b") as opened:
        offset = file.stat().st_size - STATE_BYTES + 8 * STATE_WORD["inode"]
        opened.seek(max(offset, 0))
        if offset > 0 and any(opened.read(8)):
            opened.seek(offset)
            opened.write(file.stat().st_ino.to_bytes(8, "little"))


def cuts(log: list[Operation], count: int, rng: random.Random) -> Iterator[Disk]:
    """The disk at `count` random moments of a log behind its first mark, in the order of time."""
    first = next(at for at, operation in enumerate(log) if operation.kind == "mark") + 1
    moments = sorted(rng.randint(first, len(log)) for _ in range(count))
    disk = Disk()
    for at in range(len(log) + 1):
        for _ in range(bisect_right(moments, at) - bisect_right(moments, at - 1)):
            yield disk
        if at < len(log):
            disk.play(log[at])


@contextmanager
def recording(*folders: Path) -> Iterator[Recorder]:
    """A `Recorder` in the place of the real system; `folders` are there already."""
    recorder = Recorder()
    for folder in folders:
        recorder.add(folder)
    real, syscalls.system = syscalls.system, recorder
    try:
        with counters_written():
            yield recorder
    finally:
        syscalls.system = real


@contextmanager
def boot(number: int) -> Iterator[None]:
    """Another start of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (recovery, storage):
            patch.setattr(module, "boot_id", lambda: number.to_bytes(16, "little"))
        yield
