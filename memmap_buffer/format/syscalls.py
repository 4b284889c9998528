"""The system calls of the package, but for those in `folder`. Only these two modules use `os`, `mmap` and `filelock`.

Tests replace `system`, to let a call fail, write less, be recorded, or kill the process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array

try:
    import fcntl
    import resource
except ImportError as error:
    raise ImportError(
        "memmap_buffer runs on Linux and macOS: this system has no fcntl, and so no locks and no folders that are held "
        "open. Windows is not supported but by its Subsystem for Linux; docs/platforms.md says why"
    ) from error

NEVER_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FULL_FSYNC = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone leaves the data in the drive's cache (fsync(2))
_fdatasync = getattr(os, "fdatasync", os.fsync)  # macOS has none
CAN_RESERVE = hasattr(os, "posix_fallocate")
CAN_SHARE = hasattr(os, "memfd_create")
# A multiple of every file system's block. To punch less is not worth the call: 105 us on ext4, where writing takes 15.
BLOCK = 1 << 16
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # modes of fallocate(2), which Python's `os` lacks
_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)  # None: macOS
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_mmap, _MAP_FAILED = getattr(_libc, "mmap64", None) or _libc.mmap, ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10  # on Linux and macOS; Python's `mmap` lacks it, as it lacks PROT_NONE, 0
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_LOWEST, _HIGHEST = 1 << 12, 1 << 48  # addresses: no system maps the first page
_every_byte: Any = (ctypes.c_ubyte * (_HIGHEST - _LOWEST)).from_address(_LOWEST)  # this reads no byte
MOST_AT = 1 << 14  # the most bytes of a piece: numpy allows an array less than 2**63 bytes
POLL_SECONDS = 0.001  # between attempts to take a lock that others nearly always hold for less than that
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CAN_FORGET = hasattr(os, "posix_fadvise")


class System:
    """The system calls that change files, one method each, so that a test can replace any of them."""

    pwrite: Callable[[int, Any, int], int] = staticmethod(os.pwrite)

    def barrier(self, fd: int) -> None:
        if not _empty_cache(fd):
            _fdatasync(fd)

    def create(self, name: str, directory: int) -> int:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | NEVER_FOLLOW, 0o666, dir_fd=directory)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        if not CAN_RESERVE:  # macOS
            raise OSError(errno.EOPNOTSUPP, "this system cannot reserve disk space; leave reserve=False")
        os.posix_fallocate(fd, offset, size)

    def punch(self, fd: int, offset: int, size: int) -> None:
        if _fallocate is None:
            raise OSError(errno.ENOSYS, "no fallocate")
        if _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def copy_range(self, source: int, target: int, offset: int, size: int) -> int:
        if not hasattr(os, "copy_file_range"):  # macOS
            raise OSError(errno.ENOSYS, "no copy_file_range")
        return os.copy_file_range(source, target, size, offset, offset)

    def rename(self, old: str, new: str, directory: int) -> None:
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def link(self, old: str, new: str, directory: int) -> None:
        os.link(old, new, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)

    def unlink(self, name: str, directory: int) -> None:
        os.unlink(name, dir_fd=directory)

    def mkdir(self, name: str, directory: int) -> None:
        os.mkdir(name, dir_fd=directory)

    def sync_folder(self, directory: int) -> None:
        if not _empty_cache(directory):
            os.fsync(directory)


system = System()


def _empty_cache(fd: int) -> bool:
    """Wait until a file, and what the drive holds in its cache, is on the disk; False where no call can do that."""
    if _FULL_FSYNC is None:
        return False
    try:
        fcntl.fcntl(fd, _FULL_FSYNC)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY):
            raise
        return False  # a file system that is not on a local disk, but by SMB for example: fcntl(2)
    return True


def npy_header(descr: str, shape: tuple[int, ...]) -> bytes:
    """The exact bytes of an array file's header. Args: descr: the dtype's `descr`, as `repr` writes it."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape!r}, }}".encode("latin1")
    padding = -(10 + len(text) + 1) % 64
    return b"\x93NUMPY\x01\x00" + (len(text) + padding + 1).to_bytes(2, "little") + text + b" " * padding + b"\n"


def disk_reads() -> int:
    """A counter that grows when this thread makes the disk read; always 0 where the system does not count."""
    if not hasattr(resource, "RUSAGE_THREAD"):  # macOS
        return 0
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


@contextmanager
def naming(path: os.PathLike[str] | str) -> Iterator[None]:
    """Have an error of the system that the block raises name a file, see `name_in`."""
    try:
        yield
    except OSError as error:
        name_in(error, path)
        raise


def name_in(error: BaseException, path: os.PathLike[str] | str) -> None:
    """Name a file in an error of the system, as a call by descriptor names none."""
    if isinstance(error, OSError) and error.filename is None and error.strerror == os.strerror(error.errno or 0):
        error.filename = str(path)  # else it names one, or has a text of ours


def write_all(fd: int, data: Array | bytes, offset: int) -> None:
    """Write every byte of a C-contiguous array at `offset`, going on after a short write.

    Raises: OSError: ENOSPC on a full disk, EFBIG, EIO.
    """
    size = data.nbytes if isinstance(data, np.ndarray) else len(data)
    written = system.pwrite(fd, data, offset)  # nearly always all of it
    if written == size:
        return
    rest = memoryview(data.reshape(-1).view(np.uint8).data if isinstance(data, np.ndarray) else data)
    while written < size:
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        rest, offset, size = rest[written:], offset + written, size - written
        written = system.pwrite(fd, rest, offset)


def write_word(fd: int, value: int, offset: int) -> None:
    """Write one aligned 8-byte word in one call: no reader ever sees half of it."""
    data = value.to_bytes(8, "little")
    if system.pwrite(fd, data, offset) != 8:
        write_all(fd, data, offset)


def copy_range(source: int, target: int, offset: int, size: int) -> None:
    """Copy bytes between files at the same offset, sharing blocks where the file system can (copy_file_range(2))."""
    end = offset + size
    while offset < end:
        try:
            copied = system.copy_range(source, target, offset, end - offset)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            data = os.pread(source, min(end - offset, 1 << 22), offset)
            write_all(target, data, offset)
            copied = len(data)
        if copied == 0:
            raise OSError(errno.EIO, "the source is shorter than its header says")
        offset += copied


def read_at(fd: int, size: int, offset: int) -> bytes:
    """The `size` bytes at an offset, zeros for a hole; fewer only at the end of the file.

    Nothing is mapped, so a hole takes no block and raises no signal. Linux reads at most 0x7FFFF000 bytes a call
    (read(2)).
    """
    data = os.pread(fd, size, offset)  # nearly always all of it
    if len(data) == size:
        return data
    parts, got = [data], len(data)
    while data and got < size:
        data = os.pread(fd, size - got, offset + got)
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def memory_file(parts: Sequence[Array]) -> int:
    """The descriptor of a new file in memory that holds the arrays `parts`, one after the other. Raises OSError."""
    fd = os.memfd_create("memmap_buffer")
    try:
        end = 0
        for part in parts:
            write_all(fd, np.ascontiguousarray(part), end)
            end += part.nbytes
    except BaseException:
        os.close(fd)
        raise
    return fd


def memory() -> Array:
    """All memory of this process, as bytes; a caller that reads a part holds the array that lies there."""
    return np.frombuffer(_every_byte, np.uint8)


def address_of(array: Array) -> int:
    """The index in `memory` of an array's first byte."""
    address: int = array.__array_interface__["data"][0] - _LOWEST
    assert 0 <= address < _HIGHEST - _LOWEST, "no such address is ever mapped"
    return address


def bytes_at(addresses: npt.NDArray[np.int64], width: int) -> Array:
    """Copy pieces of `memory` into an array of the shape of `addresses`, whose items are `width` bytes each.

    Args:
        addresses: where the pieces begin (see `address_of`). The caller holds the arrays that they are in.
        width: 1 … `MOST_AT`.
    """
    pieces: Array = _pieces(width)[addresses]
    return pieces


@lru_cache(maxsize=256)
def _pieces(width: int) -> Array:
    """All memory as an array whose item i is the `width` bytes that begin at byte i."""
    return np.ndarray(_HIGHEST - _LOWEST - width, np.dtype((np.void, width)), _every_byte, strides=(1,))


class Mapped:
    """Mapped memory, as bytes for `np.asarray`. It is unmapped once nothing refers to it or to such an array.

    Not by Python's `mmap`, which before 3.13 (`trackfd`) keeps a descriptor for each map: 300 folders have thousands.
    """

    def __init__(self, begin: int, size: int, protection: int) -> None:
        self._unmap_later(begin, size)
        self._place = begin, size
        read_only = not protection & mmap.PROT_WRITE
        self.__array_interface__ = {"data": (begin, read_only), "shape": (size,), "typestr": "|u1", "version": 3}

    def _unmap_later(self, begin: int, size: int) -> None:
        self._finalizer = weakref.finalize(self, _libc.munmap, begin, size)
        self._finalizer.atexit = False

    def leave_out(self, begin: int, size: int) -> None:
        """Never unmap this part of it, which may be of others by now. Called once at most."""
        first, whole = self._place
        self._finalizer.detach()
        for start, stop in ((first, begin), (begin + size, first + whole)):
            if start < stop:
                self._unmap_later(start, stop - start)


class FileMaps:
    """Read-only maps of several files, side by side, which are unmapped together: of small ones, as that is quicker.

    Args: size: the bytes of all files together, each rounded up to whole pages (`in_pages`); at least one page.

    Attributes: memory: (size,) uint8.

    Raises: OSError: ENOMEM: there are too many maps.
    """

    def __init__(self, size: int) -> None:
        self._end = self._begin = _mapped(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._mapped = Mapped(self._begin, size, mmap.PROT_READ)
        self.memory = np.asarray(self._mapped)

    def add(self, fd: int, size: int) -> int:
        """Map the first bytes of a file; returns where they begin in `memory`.

        Raises: OSError: as above; ENODEV, say: its file system maps no files. After an error nothing may be added.
        """
        start = self._end - self._begin
        assert start + in_pages(size) <= len(self.memory), "it would be mapped over other memory"
        try:
            _mapped(self._end, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError as error:
            # Linux asks a file system only after it took away what was mapped there (so it does for a file of /sys):
            # another thread's memory may take the place. With too many maps it takes nothing away.
            if error.errno != errno.ENOMEM:
                self._mapped.leave_out(self._end, in_pages(size))
            raise
        self._end += in_pages(size)
        return start


def in_pages(size: int) -> int:
    """A number of bytes, rounded up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def map_file(fd: int, size: int, protection: int = mmap.PROT_READ) -> Array:
    """A map of a file's first bytes, (size,) uint8, which lasts as long as anything refers to it.

    Args: protection: whether stores into the map are allowed, which reach the file: `mmap.PROT_READ` or more.

    Raises: OSError: ENOMEM: there are too many maps.
    """
    return np.asarray(Mapped(_mapped(None, size, protection, mmap.MAP_SHARED, fd), size, protection))


def _mapped(address: int | None, size: int, protection: int, kind: int, fd: int) -> int:
    begin: int = _mmap(address, size, protection, kind, fd, 0)
    if begin == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return begin


def will_need(address: int, size: int) -> None:
    """Ask the system to read mapped pages into memory, without waiting."""
    if hasattr(mmap, "MADV_WILLNEED"):
        _libc.madvise(address, size, mmap.MADV_WILLNEED)


def in_memory(address: int, size: int) -> bool:
    """Whether mapped pages are in the cache; `address` is the begin of a page. True for another user's files
    (mincore(2)).
    """
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    return bool(_libc.mincore(address, size, pages)) or all(page & 1 for page in pages)


def forget(fd: int, start: int, size: int) -> None:
    """Drop pages of a file from the cache, but not those that a process has mapped or that are not on the disk yet."""
    os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)


def has_hole(fd: int, start: int, stop: int) -> bool:
    """Whether some block between two offsets is not written yet; True where the file system cannot tell."""
    try:
        return not hasattr(os, "SEEK_HOLE") or os.lseek(fd, start, os.SEEK_HOLE) < stop
    except OSError:
        return True


def is_hole(fd: int, start: int, stop: int) -> bool:
    """Whether no block between two offsets is written yet; False where the file system cannot tell."""
    try:
        return hasattr(os, "SEEK_DATA") and os.lseek(fd, start, os.SEEK_DATA) >= stop
    except OSError as error:
        return error.errno == errno.ENXIO  # no data up to the end of the file, either


def punch(fd: int, start: int, stop: int, unit: int = 0) -> None:
    """Give back the blocks that lie whole between two offsets, where the system can: readers see zeros there then.

    Args: unit: the bytes of a block, if not `BLOCK`.
    """
    unit = unit or BLOCK
    start, stop = -(-start // unit) * unit, stop // unit * unit
    if start < stop:
        with suppress(OSError):  # a failure costs nothing but space
            system.punch(fd, start, stop - start)


def allocate(fd: int, offset: int, size: int) -> None:
    """Allocate the blocks of all pages that hold some bytes of a file, so that a store into a map there needs none.

    Whole pages, because at a store the file system makes room for the whole page, even if its blocks are smaller
    (`mkfs -b 1024`). The file does not grow.

    Raises:
        OSError: the disk is full, or the system cannot allocate.
    """
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    stop = min(in_pages(offset + size), os.fstat(fd).st_size)
    system.allocate(fd, start, stop - start)


def barrier(fd: int) -> None:
    """Wait until what was written to `fd` is on the disk. Raises OSError, after which the data may be gone."""
    system.barrier(fd)


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def yield_to_others() -> None:
    """Keep this thread from interrupting others when it is woken: sched(7), SCHED_BATCH.

    On busy cores, 9 of 10 calls of `store` that wake such a thread (two frames of 480 x 640) take 0.4 ms, without this
    2 ms.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a sandbox may refuse it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def keep_scheduling() -> Iterator[None]:
    """Leave this thread, and the threads that the block begins, with the scheduling that this thread has now.

    SVT-AV1 makes them threads of real time where the process is the superuser's, as in most containers: while such a
    thread computes, no other gets that processor. Who opens it would stay one, and so would all processes that it
    starts later.
    """
    if not hasattr(os, "sched_setscheduler"):
        yield
        return
    scheduling, before = (os.sched_getscheduler(0), os.sched_getparam(0)), threads()
    try:
        yield
    finally:
        for thread in {0} | (threads() - before):
            with suppress(OSError):  # it has ended, or a sandbox refuses it
                os.sched_setscheduler(thread, *scheduling)


def threads() -> set[int]:
    """The threads of this process, as the system numbers them; none where it does not list them."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


def machine_names() -> tuple[str, str]:
    """The name of this machine, and the kind of its processor."""
    names = os.uname()
    return names.nodename, names.machine


process_id = os.getpid
random_bytes = os.urandom  # as good as `secrets`, without the modules that it imports


def close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def identity(status: os.stat_result) -> tuple[int, int]:
    """(device, inode): no other existing file or folder has the same."""
    return status.st_dev, status.st_ino


class Descriptor:
    """The descriptor of a folder. It is closed only when nobody refers to this object: another thread may still use it.

    Attributes:
        fd: the descriptor.
        key: the `identity` of the folder, which no other folder can have as long as this one is open.
    """

    def __init__(self, path: os.PathLike[str]) -> None:
        self.fd = os.open(path, FOLDER)
        weakref.finalize(self, os.close, self.fd).atexit = False
        self.key = identity(os.fstat(self.fd))


class FileLock:
    """A lock on a file, by `filelock`: held until `release`, until nobody refers to it, or until the process ends.

    A forked child has no part in it: it cannot free its parent's lock, and does not keep it after the parent's end.
    """

    def __init__(self, fd: int) -> None:
        from filelock import unlock_descriptor

        self._fd, self._unlock_descriptor = {"": fd}, unlock_descriptor  # kept: at the interpreter's end imports fail
        weakref.finalize(self, _unlock, self._fd, unlock_descriptor).atexit = False
        renew_after_fork(self)

    @classmethod
    def take(cls, name: str, directory: int) -> FileLock | None:
        """Take the lock of a file; None where another has it. Raises OSError: ELOOP, EISDIR, ENXIO: no plain file."""
        from filelock import lock_descriptor  # it takes 20 to 110 ms to load, and readers need no lock

        while True:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | NEVER_FOLLOW, 0o600, dir_fd=directory)
            lock = cls(fd)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), name)
                if not lock_descriptor(fd, blocking=False):
                    lock.release()
                    return None
                with suppress(FileNotFoundError):
                    if identity(os.stat(name, dir_fd=directory, follow_symlinks=False)) == identity(status):
                        return lock
            except BaseException:  # an interruption, too: its traceback would keep the lock
                lock.release()
                raise
            lock.release()  # the locked file was removed or replaced in between: lock the one that has its name now

    def release(self) -> None:
        """Let go of the lock; twice is fine."""
        _unlock(self._fd, self._unlock_descriptor)

    def renew(self) -> None:
        """In a forked child: close the descriptor, without unlocking, as the lock is the parent's."""
        close_all(self._fd)


class RangeLocks:
    """Locks of single bytes of a file (lockf) against other processes; they end with the process.

    Threads of one process do not exclude each other. A process opens the file once and never closes it, as closing any
    descriptor of the file would drop all of the process's locks.
    """

    _by_file: ClassVar[dict[tuple[int, int], RangeLocks]] = {}
    _opening = threading.Lock()

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def of(cls, path: str) -> RangeLocks:
        """The locks of a file, which is created if it is missing."""
        with cls._opening:
            with suppress(FileNotFoundError):
                locks = cls._by_file.get(identity(os.stat(path)))
                if locks is not None:
                    return locks
            fd = os.open(path, os.O_RDWR | os.O_CREAT | NEVER_FOLLOW, 0o600)
            return cls._by_file.setdefault(identity(os.fstat(fd)), cls(fd))

    def take(self, first: int, count: int) -> None:
        """Wait for the locks of `count` bytes from `first` on, and take them.

        A thread takes its locks in ascending order, so no circle of threads waits for each other. The system knows
        processes only: where it reports such a circle (EDEADLK), other threads hold the locks, and will let go.
        """
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX, count, first)
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:
                    raise
                time.sleep(0.01)

    def try_take(self, first: int, count: int) -> bool:
        """Take the locks of some bytes, if no other process has any of them; returns whether they are taken."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def give(self, first: int, count: int) -> None:
        """Let go of the locks of some bytes."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, count, first)


def _fresh_range_locks() -> None:
    RangeLocks._opening = threading.Lock()  # another thread of the parent may have held it during the fork


def after_fork(work: Callable[[], None]) -> None:
    """Have `work` called in each process that is forked from this one, before anything else."""
    os.register_at_fork(after_in_child=work)


after_fork(_fresh_range_locks)


def no_fork_during(lock: Any) -> None:
    """Have forks of this process wait until nobody holds a re-entrant lock, which is free in the child."""
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Renewed(Protocol):
    """An object with locks that another thread may hold when this process is forked."""

    def renew(self) -> None:
        """Make new locks, which nobody holds, and drop what another thread may have left half done."""


_renewed: weakref.WeakSet[Renewed] = weakref.WeakSet()


def renew_after_fork(owner: Renewed) -> None:
    """Have `owner` renewed in each process that is forked from this one, as long as it lives."""
    _renewed.add(owner)


def _renew() -> None:
    for owner in list(_renewed):
        owner.renew()


after_fork(_renew)


@contextmanager
def locked(path: str) -> Iterator[int]:
    """A descriptor of a file that is locked in the block: against other processes, and against other threads."""
    from filelock import lock_descriptor, unlock_descriptor

    fd = os.open(path, os.O_RDWR | os.O_CREAT | NEVER_FOLLOW, 0o600)
    try:
        lock_descriptor(fd, poll_interval=POLL_SECONDS)
        with naming(path):
            yield fd
    finally:
        _unlock({"": fd}, unlock_descriptor)


def _unlock(descriptor: dict[str, int], unlock: Callable[[int], None]) -> None:
    for fd in descriptor.values():
        with suppress(OSError):  # closing unlocks, too, unless a child that was just forked has the descriptor as well
            unlock(fd)
    close_all(descriptor)
