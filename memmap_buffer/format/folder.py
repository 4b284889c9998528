"""The files of one folder: opened by name relative to it, never through a link, and exactly as the schema says."""

from __future__ import annotations

import errno
import math
import mmap
import os
import resource
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import (
    BufferLockedError,
    CorruptBufferError,
    NotABufferError,
    ReadOnlyError,
    SchemaError,
    WriterLostError,
)
from memmap_buffer.format import syscalls
from memmap_buffer.format.syscalls import (
    FOLDER,
    NEVER_FOLLOW,
    Descriptor,
    FileLock,
    barrier,
    copy_range,
    identity,
    read_at,
    write_all,
)

_TOO_MANY = {
    errno.EMFILE: "too many open files; raise the limit on open files (ulimit -n)",
    errno.ENFILE: "too many open files on this machine; raise fs.file-max",
    errno.ENOMEM: "too many maps, as each array has one; raise the limit on maps (sysctl vm.max_map_count)",
}
MAY_NOT = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK, errno.ENXIO, errno.EISDIR)
PUBLISHED = "published"  # the folder in a root that a recorder moves shards to which are in a store
PUBLISHED_HINT = (
    "it was published, and moved to {}; read the root by the URL that its recorder publishes to: "
    "ConcatBuffer.from_root(url)"
)
UPDATE = ".redo"  # there as long as an update is being carried out, see `writing.redo`
MIRROR = "mirror/blocks.npy"  # which blocks of a folder at a URL are in its local copy, see `remote.blocks`
# What `publish` leaves in a folder, see `remote.layout`, and what reads that.
_PUBLISHED_HERE = {"root.json": "ConcatBuffer.from_root", "shard.json": "ReplayBuffer.from_folder"}
ASKED_BYTES = 128 << 10  # Linux reads no more for one MADV_WILLNEED than its readahead window, and this by default


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """A descriptor, closed at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


class Folder:
    """The files of one folder, opened by name relative to it, never through a link.

    Who only reads looks the path up each time. Who writes holds the folder: all its work then goes through one
    descriptor, so that it never reaches what another put in the folder's place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = path if path.is_absolute() else Path.cwd() / path  # the process may change its own meanwhile
        self._descriptor: Descriptor | None = None

    def hold(self) -> None:
        """From now on be the folder that stands at the path now; twice is fine. Raises FileNotFoundError."""
        self._descriptor = self._descriptor or Descriptor(self._place)

    def let_go(self) -> None:
        """Be what stands at the path again, whatever that is."""
        self._descriptor = None

    @contextmanager
    def held(self) -> Iterator[Folder]:
        """A folder that stays one and the same for all that is done in the block."""
        folder = Folder(self.path)
        folder._place, folder._descriptor = self._place, self._descriptor
        folder.hold()
        try:
            yield folder
        finally:
            folder.let_go()

    @property
    def in_place(self) -> bool:
        """Whether the folder that is held, if one is, stands at its path still."""
        descriptor = self._descriptor
        try:
            return descriptor is None or descriptor.key == identity(os.stat(self._place))
        except (FileNotFoundError, NotADirectoryError):
            return False

    @contextmanager
    def _changing(self, sub: str, create: bool = False) -> Iterator[int]:
        """As `_directory`, to change what is in it. Raises WriterLostError."""
        self._require_in_place()
        with self._directory(sub, create) as directory:
            yield directory

    def _require_in_place(self) -> None:
        if not self.in_place:
            raise WriterLostError(
                f"{self.path}: the folder that was written to was moved or removed; open it where it is", reason="moved"
            )

    @contextmanager
    def _directory(self, sub: str, create: bool = False) -> Iterator[int]:
        descriptor = self._descriptor  # open for as long as somebody refers to it
        root = os.open(self._place, FOLDER) if descriptor is None else descriptor.fd
        try:
            if not sub:
                yield root
                return
            if create:
                with suppress(FileExistsError):
                    syscalls.system.mkdir(sub, root)
            try:
                directory = os.open(sub, os.O_RDONLY | os.O_DIRECTORY | NEVER_FOLLOW, dir_fd=root)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
                    raise CorruptBufferError(self._text(sub, "is a link or no folder"), path=self.path / sub) from None
                raise
            try:
                yield directory
            finally:
                os.close(directory)
        finally:
            if descriptor is None:
                os.close(root)

    def _open(self, name: str, flags: int) -> int:
        sub, _, base = name.rpartition("/")
        try:
            with self._directory(sub) as directory:
                fd = os.open(base, flags | NEVER_FOLLOW, dir_fd=directory)
        except OSError as error:
            if error.errno in NO_FILE:
                raise CorruptBufferError(
                    self._text(name, "is a link or no plain file"), path=self.path / name
                ) from None
            raise
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or (flags & os.O_RDWR and status.st_nlink != 1):
            os.close(fd)
            raise CorruptBufferError(self._text(name, "is a link or no plain file"), path=self.path / name)
        return fd

    def _text(self, name: str, what: str) -> str:
        return f"{self.path / name} {what}; restore it from a copy, or look at the folder with `verify`"

    def _checked(self, name: str, flags: int, header: bytes, size: int) -> int:
        """Open an array file whose size and header are exactly what the schema says."""
        try:
            fd = self._open(name, flags)
        except FileNotFoundError:
            missing = self._text(name, "is missing")
            raise CorruptBufferError(missing, path=self.path / name, size=0, expected=size) from None
        got = os.fstat(fd).st_size
        if got == size and read_at(fd, len(header), 0) == header:
            return fd
        os.close(fd)
        what = f"has {got} bytes, the schema says {size}" if got != size else "has another header than the schema says"
        raise CorruptBufferError(self._text(name, what), path=self.path / name, size=got, expected=size)

    def map(self, name: str, header: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """The array of a file, mapped read-only, as a plain ndarray."""
        count = math.prod(shape)
        size = len(header) + count * dtype.itemsize
        try:
            with closing(self._checked(name, os.O_RDONLY, header, size)) as fd:
                mapped = syscalls.map_to_read(fd, size)
        except OSError as error:
            remedy = _TOO_MANY.get(error.errno or 0)
            if remedy is None:
                raise
            raise OSError(error.errno, f"{self.path / name}: {remedy}, or read fewer folders at once") from None
        return np.frombuffer(mapped, dtype, count, len(header)).reshape(shape)

    def map_to_change(self, name: str, header: bytes, size: int, *, shared: bool) -> tuple[int, mmap.mmap]:
        """A descriptor, which the caller closes, and a map of a whole file; stores reach it only where `shared`.

        A store into a shared map kills where the block under it is not allocated and the disk is full (SIGBUS).
        """
        fd = self._checked(name, os.O_RDWR, header, size)
        try:
            mapped = mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY)
            if hasattr(mmap, "MADV_RANDOM"):
                mapped.madvise(mmap.MADV_RANDOM)
        except BaseException:
            os.close(fd)
            raise
        return fd, mapped

    def map_shared(self, name: str, header: bytes, size: int) -> memoryview:
        """A map of a whole file, without a descriptor, whose stores reach it; as `map_to_change` they may kill."""
        with closing(self._checked(name, os.O_RDWR, header, size)) as fd:
            return syscalls.map_to_change(fd, size)

    def open_to_read(self, name: str, header: bytes, size: int) -> int:
        """A descriptor to copy from; the caller closes it."""
        return self._checked(name, os.O_RDONLY, header, size)

    def forget(self, name: str, header: bytes, size: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Drop the pages of bytes (first, stop) from the system's cache, where nobody uses them."""
        with closing(self._checked(name, os.O_RDONLY, header, size)) as fd:
            for first, stop in ranges:
                syscalls.forget(fd, *_pages(first, stop))

    @contextmanager
    def changing(self, name: str, size: int | None = None) -> Iterator[int]:
        """A descriptor for `write_all` of a file that is there, closed at the end of the block.

        Raises: CorruptBufferError: it has another size than this.
        """
        with closing(self._open(name, os.O_RDWR)) as fd:
            if size is not None and os.fstat(fd).st_size != size:
                raise CorruptBufferError(self._text(name, f"has not {size} bytes any more"), path=self.path / name)
            yield fd

    def punch(self, name: str, start: int, stop: int) -> None:
        """Give the space of some bytes of an array file back, but for that of its header."""
        with self.changing(name) as fd:
            start, stop = max(start, mmap.PAGESIZE), -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE
            syscalls.punch(fd, start, stop, mmap.PAGESIZE)  # so that files of less than a block are given back, too

    @contextmanager
    def writing(self, name: str, header: bytes, size: int) -> Iterator[int]:
        """A descriptor for `write_all`, on the disk and closed at the end of the block."""
        with closing(self.open_to_write(name, header, size)) as fd:
            yield fd
            barrier(fd)

    def open_to_write(self, name: str, header: bytes, size: int) -> int:
        """A descriptor for `write_all`; the caller closes it."""
        self._require_in_place()
        return self._checked(name, os.O_RDWR, header, size)

    def create_array(self, name: str, header: bytes, size: int, reserve: bool = False) -> None:
        """A new file of zeros behind its header, sparse unless its space is reserved; where that fails there is none.

        Raises: SchemaError where the file system cannot hold it; OSError (ENOSPC) where `reserve` finds no space.
        """
        with self._making(name) as (fd, _):
            try:
                syscalls.system.truncate(fd, size)
                if reserve:
                    syscalls.system.reserve(fd, size)
                write_all(fd, header, 0)
            except OSError as error:
                if error.errno in (errno.EFBIG, errno.EINVAL, errno.EOVERFLOW):
                    raise SchemaError(
                        f"{self.path / name}: a file of {size / 2**40:.1f} TiB is more than this file system allows; "
                        "lower max_episodes or max_timesteps, or split the buffer into several folders",
                        path=self.path / name,
                    ) from error
                raise

    @contextmanager
    def _making(self, name: str) -> Iterator[tuple[int, int]]:
        """A new file and the folder that it is in, open in the block; where that fails there is no such file."""
        sub, _, base = name.rpartition("/")
        with self._changing(sub, create=True) as directory:
            try:
                fd = syscalls.system.create(base, directory)
            except FileExistsError:
                raise self._in_the_way(name) from None
            with closing(fd):
                try:
                    yield fd, directory
                except BaseException:
                    with suppress(OSError):
                        syscalls.system.unlink(base, directory)
                    raise

    def _in_the_way(self, name: str) -> CorruptBufferError:
        path = self.path / name
        return CorruptBufferError(f"{path} is in the way and is not ours to replace; move it away", path=path)

    def sync_array(self, name: str) -> None:
        with self.reading(name) as (fd, _):
            barrier(fd)

    def read(self, name: str, limit: int) -> bytes:
        """A small file whole. Raises FileNotFoundError, or CorruptBufferError beyond `limit` bytes."""
        with self.reading(name) as (fd, size):
            if size > limit:
                raise CorruptBufferError(
                    self._text(name, f"has {size} bytes, more than {limit}"), path=self.path / name
                )
            return read_at(fd, size, 0)

    @contextmanager
    def reading(self, name: str) -> Iterator[tuple[int, int]]:
        """A descriptor for `read_at`, closed at the end of the block, and the size of the file."""
        with closing(self._open(name, os.O_RDONLY)) as fd:
            yield fd, os.fstat(fd).st_size

    def write_new(self, name: str, *parts: bytes, sync: bool) -> None:
        """A new file of these bytes, whole and, with `sync`, on the disk; where that fails there is none."""
        with self._making(name) as (fd, directory):
            offset = 0
            for data in parts:
                write_all(fd, data, offset)
                offset += len(data)
            if sync:
                barrier(fd)
                syscalls.system.sync_folder(directory)

    def rename(self, old: str, new: str) -> None:
        """Replace `new` by `old`; on the disk when this returns, where both are in the same folder."""
        sub = old.rpartition("/")[0]
        one_folder = sub == new.rpartition("/")[0]
        skip = len(sub) + 1 if one_folder and sub else 0
        with self._changing(sub if one_folder else "") as directory:
            try:
                syscalls.system.rename(old[skip:], new[skip:], directory)
            except IsADirectoryError:
                raise self._in_the_way(new) from None
            syscalls.system.sync_folder(directory)

    def link(self, old: str, new: str) -> None:
        """A second name for a file, in the same subfolder; on the disk when this returns."""
        sub, _, base = old.rpartition("/")
        with self._changing(sub) as directory:
            try:
                syscalls.system.link(base, new.rpartition("/")[2], directory)
            except FileExistsError:
                raise self._in_the_way(new) from None
            syscalls.system.sync_folder(directory)

    def sync_folders(self, *subs: str) -> None:
        for sub in subs:
            with self._directory(sub) as directory:
                syscalls.system.sync_folder(directory)

    def unlink(self, name: str, missing_ok: bool = False) -> None:
        sub, _, base = name.rpartition("/")
        try:
            with self._changing(sub) as directory:
                syscalls.system.unlink(base, directory)
        except (FileNotFoundError, IsADirectoryError, CorruptBufferError):  # no such file, or what we did not make
            if not missing_ok:
                raise

    def free_bytes(self) -> int:
        """The bytes that the file system still has for this user."""
        descriptor = self._descriptor
        status = os.statvfs(self._place if descriptor is None else descriptor.fd)
        return status.f_bavail * status.f_frsize

    def list(self, sub: str) -> list[str]:
        """The plain files of a subfolder, by name, but for what is not finished yet; none where there is no folder."""
        try:
            with self._directory(sub) as directory:
                files = [entry.name for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)]
                return sorted(name for name in files if not name.endswith(".new"))
        except FileNotFoundError:
            return []

    def copy_file(self, name: str, target: Folder, new: str = "") -> None:
        """Copy a file by its bytes into a folder where no such file exists yet; where that fails there is none."""
        with self.reading(name) as (source, size), target._making(new or name) as (fd, _):
            syscalls.system.truncate(fd, size)
            copy_range(source, fd, 0, size)
            barrier(fd)

    def _lstat(self, name: str) -> os.stat_result:
        descriptor = self._descriptor
        if descriptor is None:
            return os.lstat(f"{self._place}/{name}")  # a path takes as long to make as the look
        return os.stat(name, dir_fd=descriptor.fd, follow_symlinks=False)

    def exists(self, name: str) -> bool:
        try:
            self._lstat(name)
        except (OSError, ValueError):
            return False
        return True

    def alone(self, name: str) -> bool:
        """Whether nothing stands under a name, or a file that has no other."""
        return not self.exists(name) or self._lstat(name).st_nlink == 1

    def require_free(self, names: Iterable[str]) -> None:
        """Raise CorruptBufferError where something stands under one of these names."""
        for name in names:
            if self.exists(name):
                raise self._in_the_way(name)

    def create(self) -> None:
        self._place.mkdir(parents=True, exist_ok=True)

    def require(self) -> None:
        if not self.exists("schema.json"):
            if not self._place.is_dir():
                raise NotABufferError(f"{self.path}{self._why_no_folder()}", path=self.path)
            raise NotABufferError(f"{self.path} is not a buffer: {self._what_it_is()}", path=self.path)
        if self.exists(MIRROR):
            raise NotABufferError(
                f"{self.path} is a cache of a folder at a URL, and has only what was read of that; read it by its URL, "
                "or `pull` that into a folder",
                path=self.path,
            )

    def _why_no_folder(self) -> str:
        """The text of an error about a path that is no folder: what stands there, and what to do."""
        if self._place.exists():
            remedy = f"give {self.path.parent}" if self.path.name == "schema.json" else "check the path"
            return f" is a file, and a buffer is a folder; {remedy}"
        moved = self.path.parent / PUBLISHED / self.path.name
        return f": there is no such folder; {PUBLISHED_HINT.format(moved) if moved.is_dir() else 'check the path'}"

    def _what_it_is(self) -> str:
        """The text of an error about a folder that holds no buffer: what it is, and what to do."""
        if self.exists("schema.json.new"):
            return "its creation did not finish; create one with ReplayBuffer(...)"
        if folders := folders_in(self._place):
            reader = f"ConcatBuffer.from_root({str(self.path)!r})"
            return f"it is a root of {len(folders)} folders, as {folders[0].name}; {reader} reads them all"
        return self.published() or "there is no schema.json; create one with ReplayBuffer(...)"

    def published(self) -> str:
        """A text about what was published from this root, or to this folder, and how it is read; "" for nothing."""
        moved = folders_in(self._place / PUBLISHED)
        return self._published_here() or (PUBLISHED_HINT.format(self.path / PUBLISHED / moved[0].name) if moved else "")

    def _published_here(self) -> str:
        for name, reader in _PUBLISHED_HERE.items():
            with suppress(FileNotFoundError, CorruptBufferError), self.reading(name) as (fd, size):
                if b'"memmap-buffer-' in read_at(fd, min(size, 64), 0):
                    return f"a folder was published to it ({name}); {reader}('file://{self._place}') reads that"
        return ""

    def require_not_published(self) -> None:
        """Raise NotABufferError where a folder was published to this one, whose files are not to be mixed with ours."""
        if what := self._published_here():
            raise NotABufferError(
                f"{self.path}: no buffer can be made here, as {what}; give another folder", path=self.path
            )

    def stamp(self, name: str) -> tuple[int, int]:
        """(inode, time) of a file: others once it is replaced. Raises NotABufferError: the folder is none any more."""
        try:
            status = self._lstat(name)
        except FileNotFoundError:
            self.require()
            raise
        return status.st_ino, status.st_mtime_ns

    def marks(self, name: str) -> tuple[int, int, int]:
        """(bytes, time, inode) of a file, which tell whether it was written to or replaced; -1 where there is none."""
        try:
            status = self._lstat(name)
        except (FileNotFoundError, NotADirectoryError):
            return -1, -1, -1
        return status.st_size, status.st_mtime_ns, status.st_ino

    def file_key(self, name: str) -> tuple[int, int]:
        """The key that tells a file from another that took its name, as long as it is open."""
        return identity(self._lstat(name))

    def touch(self) -> None:
        """Have the folder bear the time of now, as if something in it had changed."""
        os.utime(self._place)

    def lock_key(self) -> tuple[int, int]:
        """The key that names this folder's lock within the process, whatever path led to it."""
        descriptor = self._descriptor
        return identity(os.stat(self._place)) if descriptor is None else descriptor.key

    def lock(self, name: str = ".lock") -> FileLock:
        """Take the writer's lock, or another.

        Raises:
            BufferLockedError: at once, where another process holds it.
            ReadOnlyError: the system lets nothing be written here.
        """
        sub, _, base = name.rpartition("/")
        lock: FileLock | None = None
        try:
            with self._changing(sub, create=True) as directory:
                lock = FileLock.take(base, directory)
            if lock is None:
                raise BufferLockedError(f"{self.path} has another writer", path=self.path)
            return lock
        except OSError as error:
            if error.errno in MAY_NOT:
                raise ReadOnlyError(
                    f"{self.path / name}: {error.strerror}: nothing may be written to this folder; only read it, with "
                    "read_only=True, change its permissions, or work with a copy",
                    path=self.path / name,
                ) from None
            if error.errno not in NO_FILE:
                raise
            raise CorruptBufferError(self._text(name, "is a link or no plain file"), path=self.path / name) from None
        except BaseException:  # an interruption, whose traceback would keep it
            if lock is not None:
                lock.release()
            raise


def will_need(array: Array, ranges: Iterable[tuple[int, int]]) -> None:
    """Ask the system to read rows of an array of `Folder.map` into memory, without waiting.

    Args:
        array: all rows of a field.
        ranges: (first, stop) rows of each.
    """
    start, row = int(array.__array_interface__["data"][0]), array.nbytes // max(1, len(array))
    for first, stop in ranges:
        end = start + min(stop * row, array.nbytes)
        for begin in range((start + max(first, 0) * row) // mmap.PAGESIZE * mmap.PAGESIZE, end, ASKED_BYTES):
            syscalls.will_need(begin, min(ASKED_BYTES, end - begin))


def in_memory(array: Array, ranges: Iterable[tuple[int, int]]) -> list[bool]:
    """Whether each of some ranges of rows, (first, stop), of an array of `Folder.map` is in memory, whole."""
    start, width = int(array.__array_interface__["data"][0]), array.nbytes // max(1, len(array))
    return [syscalls.in_memory(*_pages(start + first * width, start + stop * width)) for first, stop in ranges]


def _pages(first: int, stop: int) -> tuple[int, int]:
    """The whole pages that hold some bytes: where they begin, and their size."""
    begin, end = first // mmap.PAGESIZE, -(-stop // mmap.PAGESIZE)
    return begin * mmap.PAGESIZE, max(1, end - begin) * mmap.PAGESIZE


def disk_reads() -> int:
    """A number that grows as this thread has the disk read something; always 0 where the system does not tell."""
    if not hasattr(resource, "RUSAGE_THREAD"):  # macOS
        return 0
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


def folders_in(root: Path) -> list[Path]:
    """The buffers that are direct subfolders, by name."""
    return sorted(path.parent for path in root.glob("*/schema.json"))
