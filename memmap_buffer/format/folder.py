"""Access to the files of one folder: each is opened by its name relative to the folder, never through a link, and an
array file only if it has exactly the header and size that the schema says.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import groupby
from pathlib import Path

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
from memmap_buffer.format.layout import ArrayFile
from memmap_buffer.format.syscalls import (
    FOLDER,
    NEVER_FOLLOW,
    Descriptor,
    FileLock,
    FileMaps,
    barrier,
    copy_range,
    identity,
    in_pages,
    map_file,
    naming,
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
PUBLISHED = "published"  # the folder in a root to which a recorder moves shards that it has published to a store
PUBLISHED_HINT = (
    "it was published, and moved to {}; read the root by the URL that its recorder publishes to: "
    "ConcatBuffer.from_root(url)"
)
UPDATE = ".redo"  # the file that is there while an update is being carried out, see `writing.redo`
MIRROR = "mirror/blocks.npy"  # marks a mirror: it tells which blocks are there, see `remote.blocks`
# Files of a folder that `publish` wrote to (see `remote.layout`) -> the function that reads such a folder.
_PUBLISHED_HERE = {"root.json": "ConcatBuffer.from_root", "shard.json": "ReplayBuffer.from_folder"}
LARGE = 2 << 20  # bytes from which on Linux puts a map where large pages fit: reading 10⁷ records costs half the faults
LOCK_PAUSE = 0.01  # seconds between two attempts to take a lock that is waited for
ASKED_BYTES = 128 << 10  # Linux's default readahead window: it reads no more than that for one MADV_WILLNEED


class Closing:
    """A block at whose end a descriptor is closed. No generator, as that takes longer, and each map needs one."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class Folder:
    """The files of one folder, opened by name relative to it, never through a link.

    A reader looks the path up at each call. A writer holds the folder: all calls then go through one descriptor, so
    they never reach another folder that was put in its place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: Descriptor | None = None

    def hold(self) -> None:
        """Keep to the folder that stands at the path now, until `let_go`; twice is fine. Raises FileNotFoundError."""
        self._descriptor = self._descriptor or Descriptor(self.path)

    def let_go(self) -> None:
        """Look the path up at each call again, whatever stands there."""
        self._descriptor = None

    @contextmanager
    def kept_open(self) -> Iterator[Folder]:
        """A `Folder` of the same path that is held until the end of the block."""
        folder = Folder(self.path)
        folder._descriptor = self._descriptor or Descriptor(self.path)
        try:
            yield folder
        finally:
            folder.let_go()

    @property
    def in_place(self) -> bool:
        """Whether the folder that is held still stands at its path; True where none is held."""
        descriptor = self._descriptor
        try:
            return descriptor is None or descriptor.key == identity(os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _require_in_place(self) -> None:
        if not self.in_place:
            raise WriterLostError(
                f"{self.path}: the folder that was written to was moved or removed; open it where it is", reason="moved"
            )

    @contextmanager
    def _directory(self, sub: str, *, change: bool = False, create: bool = False) -> Iterator[int]:
        """A descriptor of a subfolder; "" is the folder itself.

        Args:
            change: changes will be made in it. Raises WriterLostError: see `in_place`.
            create: likewise, and it is made where it is missing.
        """
        if change or create:
            self._require_in_place()
        descriptor = self._descriptor  # this reference keeps it open, should another thread let go of the folder
        with Closing(os.open(self.path, FOLDER) if descriptor is None else os.dup(descriptor.fd)) as root:
            if not sub:
                yield root
                return
            if create:
                with suppress(FileExistsError):
                    syscalls.system.mkdir(sub, root)
            try:
                directory = os.open(sub, FOLDER | NEVER_FOLLOW, dir_fd=root)
            except OSError as error:
                raise self._refusal(error, sub, "is a link or no folder") from None
            with Closing(directory):
                yield directory

    def _open(self, name: str, flags: int, directory: int | None = None) -> tuple[int, os.stat_result]:
        """(descriptor, status) of a file; `directory`: the descriptor of its subfolder, where it is open already."""
        sub, _, base = name.rpartition("/")
        try:
            with self._directory(sub) if directory is None else nullcontext(directory) as place:
                fd = os.open(base, flags | NEVER_FOLLOW, dir_fd=place)
        except OSError as error:
            raise self._refusal(error, name) from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or (flags & os.O_RDWR and status.st_nlink != 1):
            os.close(fd)
            raise self._corrupt(name)
        return fd, status

    def _corrupt(self, name: str, what: str = "is a link or no plain file", **sizes: int) -> CorruptBufferError:
        """The error for a file, or a subfolder, that is not as it must be."""
        text = f"{self.path / name} {what}; restore it from a copy, or look at the folder with `verify`"
        return CorruptBufferError(text, path=self.path / name, **sizes)

    def _refusal(self, error: OSError, name: str, what: str = "is a link or no plain file") -> OSError:
        """The error to raise where the system refuses to open `name`: its own, unless no plain file is there."""
        return self._corrupt(name, what) if error.errno in NO_FILE else error

    def _checked(self, file: ArrayFile, flags: int, directory: int | None = None) -> int:
        """Open an array file. Raises CorruptBufferError: it is missing, or has another size or header than it must."""
        try:
            fd, status = self._open(file.name, flags, directory)
        except FileNotFoundError:
            raise self._corrupt(file.name, "is missing", size=0, expected=file.size) from None
        got, size = status.st_size, file.size
        if got == size and read_at(fd, len(file.header), 0) == file.header:
            return fd
        os.close(fd)
        what = f"has {got} bytes, the schema says {size}" if got != size else "has another header than the schema says"
        raise self._corrupt(file.name, what, size=got, expected=size)

    def map(self, file: ArrayFile) -> Array:
        """The array of a file, mapped read-only, as a plain ndarray."""
        return self.map_all([file])[0]

    def map_all(self, files: Sequence[ArrayFile]) -> list[Array]:
        """The arrays of some files, see `map`. Those of small files are unmapped together."""
        arrays: list[Array] = []
        try:
            small = sum(in_pages(file.size) for file in files if file.size < LARGE)
            maps = FileMaps(small) if small else None
            for sub, group in groupby(files, lambda file: file.name.rpartition("/")[0]):
                with self._directory(sub) as directory:
                    for file in group:
                        with Closing(self._checked(file, os.O_RDONLY, directory)) as fd:
                            if maps is None or file.size >= LARGE:
                                memory, start = map_file(fd, file.size), 0
                            else:
                                memory, start = maps.memory, maps.add(fd, file.size)
                        arrays.append(np.ndarray(file.shape, file.dtype, memory, start + len(file.header)))
        except OSError as error:
            file, remedy = files[len(arrays)], _TOO_MANY.get(error.errno or 0)
            if isinstance(error, FileNotFoundError):  # of the subfolder
                raise self._corrupt(file.name, "is missing", size=0, expected=file.size) from None
            if remedy is None:
                raise
            raise OSError(error.errno, f"{self.path / file.name}: {remedy}, or read fewer folders at once") from None
        return arrays

    def map_to_change(self, file: ArrayFile, *, shared: bool) -> tuple[int, Array]:
        """A descriptor, which the caller closes, and a file's mapped array; stores reach the file only if `shared`.

        A store into a shared map kills the process (SIGBUS) if its block is not allocated and the disk is full.
        """
        fd = self._checked(file, os.O_RDWR)
        try:
            mapped = mmap.mmap(fd, file.size, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY)
            if hasattr(mmap, "MADV_RANDOM"):
                mapped.madvise(mmap.MADV_RANDOM)
        except BaseException:
            os.close(fd)
            raise
        return fd, np.ndarray(file.shape, file.dtype, mapped, len(file.header))

    def map_shared(self, file: ArrayFile) -> Array:
        """An array in a shared map, without a descriptor; stores may kill the process, see `map_to_change`."""
        with Closing(self._checked(file, os.O_RDWR)) as fd:
            mapped = map_file(fd, file.size, mmap.PROT_READ | mmap.PROT_WRITE)
            return np.ndarray(file.shape, file.dtype, mapped, len(file.header))

    def open_to_read(self, file: ArrayFile) -> int:
        """A descriptor to copy from; the caller closes it."""
        return self._checked(file, os.O_RDONLY)

    def forget(self, file: ArrayFile, ranges: Iterable[tuple[int, int]]) -> None:
        """Drop the pages of byte ranges (first, stop) from the system's cache, unless somebody uses them."""
        with Closing(self._checked(file, os.O_RDONLY)) as fd:
            for first, stop in ranges:
                syscalls.forget(fd, *_pages(first, stop))

    @contextmanager
    def changing(self, name: str, size: int | None = None) -> Iterator[int]:
        """A descriptor for `write_all` of an existing file, closed at the end of the block.

        Raises: CorruptBufferError: the file has another size than `size`.
        """
        fd, status = self._open(name, os.O_RDWR)
        with Closing(fd), naming(self.path / name):
            if size is not None and status.st_size != size:
                raise self._corrupt(name, f"has not {size} bytes any more")
            yield fd

    def punch(self, name: str, start: int, stop: int) -> None:
        """Give back the space of an array file from `start` to `stop`, but never its first page, with the header."""
        with self.changing(name) as fd:
            start, stop = max(start, mmap.PAGESIZE), in_pages(stop)
            syscalls.punch(fd, start, stop, mmap.PAGESIZE)  # by pages: also files smaller than `BLOCK` give space back

    @contextmanager
    def writing(self, file: ArrayFile) -> Iterator[int]:
        """A descriptor for `write_all`; at the end of the block all is on the disk, and the descriptor closed."""
        with Closing(self.open_to_write(file)) as fd, naming(self.path / file.name):
            yield fd
            barrier(fd)

    def open_to_write(self, file: ArrayFile) -> int:
        """A descriptor for `write_all`; the caller closes it."""
        self._require_in_place()
        return self._checked(file, os.O_RDWR)

    def create_array(self, file: ArrayFile, reserve: bool = False) -> None:
        """Create an array file of zeros, sparse unless its space is reserved; after an error there is no such file.

        Raises: SchemaError: the file system cannot hold it. OSError (ENOSPC): `reserve` finds no space.
        """
        path = self.path / file.name
        with self._making(file.name) as (fd, _):
            try:
                syscalls.system.truncate(fd, file.size)
                if reserve:
                    syscalls.system.allocate(fd, 0, file.size)
                write_all(fd, file.header, 0)
            except OSError as error:
                if error.errno in (errno.EFBIG, errno.EINVAL, errno.EOVERFLOW):
                    raise SchemaError(
                        f"{path}: a file of {file.size / 2**40:.1f} TiB is more than this file system allows; "
                        "lower max_episodes or max_timesteps, or split the buffer into several folders",
                        path=path,
                    ) from error
                raise

    @contextmanager
    def _making(self, name: str) -> Iterator[tuple[int, int]]:
        """Create a file; (its descriptor, its folder's), both open in the block. After an error there is no file."""
        sub, _, base = name.rpartition("/")
        with self._directory(sub, create=True) as directory:
            try:
                fd = syscalls.system.create(base, directory)
            except FileExistsError:
                raise self._in_the_way(name) from None
            with Closing(fd), naming(self.path / name):
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
        """The content of a small file. Raises FileNotFoundError; CorruptBufferError: it has more than `limit` bytes."""
        return self.read_with_stamp(name, limit)[0]

    def read_with_stamp(self, name: str, limit: int) -> tuple[bytes, tuple[int, int]]:
        """The content of a small file, see `read`, and its `stamp`."""
        fd, status = self._open(name, os.O_RDONLY)
        with Closing(fd):
            if status.st_size > limit:
                raise self._corrupt(name, f"has {status.st_size} bytes, more than {limit}")
            return read_at(fd, status.st_size, 0), _stamp(status)

    @contextmanager
    def reading(self, name: str) -> Iterator[tuple[int, int]]:
        """A descriptor for `read_at`, closed at the end of the block, and the size of the file."""
        fd, status = self._open(name, os.O_RDONLY)
        with Closing(fd):
            yield fd, status.st_size

    def write_new(self, name: str, *parts: bytes, sync: bool) -> None:
        """Write `parts` to a new file; with `sync` it is on the disk at return. After an error there is no file."""
        with self._making(name) as (fd, directory):
            offset = 0
            for data in parts:
                write_all(fd, data, offset)
                offset += len(data)
            if sync:
                barrier(fd)
                syscalls.system.sync_folder(directory)

    def replace_file(self, name: str, *parts: bytes) -> None:
        """Put a file of `parts` in the place of another; killed at any point, one of the two is there, whole."""
        new = f"{name}.new"
        self.unlink(new, missing_ok=True)  # left by a process that was killed
        self.write_new(new, *parts, sync=True)
        self.rename(new, name)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing one of the new name; on the disk at return, if both names are in one subfolder."""
        (sub, _, base), (other, _, new_base) = old.rpartition("/"), new.rpartition("/")
        sub, names = (sub, (base, new_base)) if sub == other else ("", (old, new))
        with self._directory(sub, change=True) as directory:
            try:
                syscalls.system.rename(*names, directory)
            except IsADirectoryError:
                raise self._in_the_way(new) from None
            syscalls.system.sync_folder(directory)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name in the same subfolder; on the disk when this returns."""
        sub, _, base = old.rpartition("/")
        with self._directory(sub, change=True) as directory:
            try:
                syscalls.system.link(base, new.rpartition("/")[2], directory)
            except FileExistsError:
                raise self._in_the_way(new) from None
            syscalls.system.sync_folder(directory)

    def sync_folders(self, *subs: str) -> None:
        for sub in subs:
            with self._directory(sub) as directory:
                syscalls.system.sync_folder(directory)

    def unlink(self, *names: str, missing_ok: bool = False) -> None:
        for name in names:
            sub, _, base = name.rpartition("/")
            try:
                with self._directory(sub, change=True) as directory:
                    syscalls.system.unlink(base, directory)
            except (FileNotFoundError, IsADirectoryError, CorruptBufferError):  # no such file, or none that we made
                if not missing_ok:
                    raise

    def free_bytes(self) -> int:
        """The bytes that this user can still write to the file system."""
        with self._directory("") as directory:
            status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize

    def list(self, sub: str) -> list[str]:
        """The plain files of a subfolder, sorted by name, without unfinished ones (`.new`); [] without the folder."""
        try:
            with self._directory(sub) as directory:
                files = [entry.name for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)]
                return sorted(name for name in files if not name.endswith(".new"))
        except FileNotFoundError:
            return []

    def copy_file(self, name: str, target: Folder, new: str = "") -> None:
        """Copy the bytes of a file into `target`, where it must not exist yet; after an error there is no copy."""
        with self.reading(name) as (source, size), target._making(new or name) as (fd, _):
            syscalls.system.truncate(fd, size)
            copy_range(source, fd, 0, size)
            barrier(fd)

    def _lstat(self, name: str) -> os.stat_result:
        descriptor = self._descriptor  # without one by a path, which takes as long to make as the look
        return os.lstat(f"{self.path}/{name}") if descriptor is None else os.lstat(name, dir_fd=descriptor.fd)

    def exists(self, name: str) -> bool:
        with suppress(OSError, ValueError):
            self._lstat(name)
            return True
        return False

    def alone(self, name: str) -> bool:
        """Whether there is no file of this name, or one that has no other name (hard link)."""
        return not self.exists(name) or self._lstat(name).st_nlink == 1

    def require_free(self, names: Iterable[str]) -> None:
        """Raise CorruptBufferError if a file of one of these names exists."""
        for name in names:
            if self.exists(name):
                raise self._in_the_way(name)

    def create(self) -> None:
        """Make the folder, and those above it. Raises NotABufferError: a file stands in the place of one of them."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            there = next(path for path in (self.path, *self.path.parents) if os.path.lexists(path))
            if not there.is_file():  # a link that leads nowhere, or a folder by now
                raise
            raise NotABufferError(f"{there}{Folder(there)._why_no_folder()}", path=there) from None

    def require(self) -> None:
        if not self.exists("schema.json"):
            why = f" is not a buffer: {self._what_it_is()}" if self.path.is_dir() else self._why_no_folder()
            raise NotABufferError(f"{self.path}{why}", path=self.path)
        if self.exists(MIRROR):
            raise NotABufferError(
                f"{self.path} is a cache of a folder at a URL, and has only what was read of that; read it by its URL, "
                "or `pull` that into a folder",
                path=self.path,
            )

    def _why_no_folder(self) -> str:
        """The end of an error text about a path that is no folder: what stands there, and what to do."""
        if self.path.exists():
            remedy = f"give {self.path.parent}" if self.path.name == "schema.json" else "check the path"
            return f" is a file, and a buffer is a folder; {remedy}"
        moved = self.path.parent / PUBLISHED / self.path.name
        return f": there is no such folder; {PUBLISHED_HINT.format(moved) if moved.is_dir() else 'check the path'}"

    def _what_it_is(self) -> str:
        """The end of an error text about a folder that holds no buffer: what it is, and what to do."""
        if self.exists("schema.json.new"):
            return "its creation did not finish; create one with ReplayBuffer(...)"
        if folders := folders_in(self.path):
            reader = f"ConcatBuffer.from_root({str(self.path)!r})"
            return f"it is a root of {len(folders)} folders, as {folders[0].name}; {reader} reads them all"
        return self.published() or "there is no schema.json; create one with ReplayBuffer(...)"

    def published(self) -> str:
        """A text that says what was published to this folder, or from it as a root, and how to read it; else ""."""
        moved = folders_in(self.path / PUBLISHED)
        return self._published_here() or (PUBLISHED_HINT.format(self.path / PUBLISHED / moved[0].name) if moved else "")

    def _published_here(self) -> str:
        for name, reader in _PUBLISHED_HERE.items():
            with suppress(FileNotFoundError, CorruptBufferError), self.reading(name) as (fd, size):
                if b'"memmap-buffer-' in read_at(fd, min(size, 64), 0):
                    return f"a folder was published to it ({name}); {reader}('file://{self.path}') reads that"
        return ""

    def require_not_published(self) -> None:
        """Raise NotABufferError if something was published to this folder: its files must not be mixed with ours."""
        if what := self._published_here():
            raise NotABufferError(
                f"{self.path}: no buffer can be made here, as {what}; give another folder", path=self.path
            )

    def stamp(self, name: str) -> tuple[int, int]:
        """(inode, time) of a file, which change when it is replaced. Raises NotABufferError: this is no buffer now."""
        try:
            status = self._lstat(name)
        except FileNotFoundError:
            self.require()
            raise
        return _stamp(status)

    def marks(self, name: str) -> tuple[int, int, int]:
        """(bytes, time, inode) of a file, which change when it is written to or replaced; each -1 without the file."""
        try:
            status = self._lstat(name)
        except (FileNotFoundError, NotADirectoryError):
            return -1, -1, -1
        return status.st_size, status.st_mtime_ns, status.st_ino

    def file_key(self, name: str) -> tuple[int, int]:
        """(device, inode) of a file. As long as the file is open, no other file under its name has the same."""
        return identity(self._lstat(name))

    def touch(self) -> None:
        """Set the folder's time to now, as if a file in it had been added or removed."""
        os.utime(self.path)

    def lock_key(self) -> tuple[int, int]:
        """(device, inode) of the folder: a key for its lock within this process that does not depend on the path."""
        descriptor = self._descriptor
        return identity(os.stat(self.path)) if descriptor is None else descriptor.key

    def lock(self, name: str = ".lock") -> FileLock:
        """Take the writer's lock, or the lock `name`, without waiting.

        Raises:
            BufferLockedError: another process holds it.
            ReadOnlyError: this user may not write to the folder.
            CorruptBufferError: a link, or another thing than a plain file, stands under the name.
        """
        sub, _, base = name.rpartition("/")
        lock: FileLock | None = None
        try:
            with self._directory(sub, create=True) as directory:
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
            raise self._refusal(error, name) from None
        except BaseException:  # an interruption: its traceback would keep the lock
            if lock is not None:
                lock.release()
            raise

    @contextmanager
    def locked(self, name: str = ".lock", seconds: float = 0.0) -> Iterator[None]:
        """Hold the lock `name` in the block; another process that has it is waited for, for so long. See `lock`."""
        until, lock = time.monotonic() + seconds, None
        while lock is None:
            try:
                lock = self.lock(name)
            except BufferLockedError:
                if time.monotonic() >= until:
                    raise
                time.sleep(LOCK_PAUSE)
        try:
            yield
        finally:
            try:
                lock.release()
            except BaseException:  # an interruption: its traceback would keep the lock
                lock.release()
                raise


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def will_need(array: Array, ranges: Iterable[tuple[int, int]]) -> None:
    """Ask the system to read rows of an array of `Folder.map` into memory, without waiting.

    Args:
        array: all rows of a field.
        ranges: (first, stop) of each range of rows.
    """
    start, row = int(array.__array_interface__["data"][0]), array.nbytes // max(1, len(array))
    for first, stop in ranges:
        end = start + min(stop * row, array.nbytes)
        for begin in range((start + max(first, 0) * row) // mmap.PAGESIZE * mmap.PAGESIZE, end, ASKED_BYTES):
            syscalls.will_need(begin, min(ASKED_BYTES, end - begin))


def in_memory(array: Array, ranges: Iterable[tuple[int, int]]) -> list[bool]:
    """For each range of rows (first, stop) of an array of `Folder.map`: whether all of it is in memory."""
    start, width = int(array.__array_interface__["data"][0]), array.nbytes // max(1, len(array))
    return [syscalls.in_memory(*_pages(start + first * width, start + stop * width)) for first, stop in ranges]


def _pages(first: int, stop: int) -> tuple[int, int]:
    """(begin, size) of the whole pages that hold bytes first … stop - 1."""
    begin = first // mmap.PAGESIZE * mmap.PAGESIZE
    return begin, max(mmap.PAGESIZE, in_pages(stop) - begin)


def folders_in(root: Path) -> list[Path]:
    """The direct subfolders that hold a `schema.json`, sorted by name."""
    return sorted(path.parent for path in root.glob("*/schema.json"))
