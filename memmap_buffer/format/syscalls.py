"""Every system call of the package, but those of `folder`: the seam at which tests fail, shorten, record or kill.

`system` is what tests replace. With `folder` this is the only user of `os`, `mmap` and `filelock`.
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
BLOCK = 1 << 16  # a multiple of every file system's; less is not worth the call: 105 us on ext4, where writing takes 15
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2), which Python's os does not have with its modes
_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)  # None: macOS
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_mmap, _MAP_FAILED = getattr(_libc, "mmap64", None) or _libc.mmap, ctypes.c_void_p(-1).value
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_LOWEST, _HIGHEST = 1 << 12, 1 << 48  # addresses: no system maps the first page
_every_byte: Any = (ctypes.c_ubyte * (_HIGHEST - _LOWEST)).from_address(_LOWEST)  # no byte is read here
MOST_AT = 1 << 14  # bytes of a piece: numpy's arrays have less than 2**63
POLL_SECONDS = 0.001  # between attempts to take a lock that is held for less than that, nearly always
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CAN_FORGET = hasattr(os, "posix_fadvise")


class System:
    """The system calls that change files, one method each, so that a test can stand between."""

    pwrite: Callable[[int, Any, int], int] = staticmethod(os.pwrite)

    def barrier(self, fd: int) -> None:
        if not _empty_cache(fd):
            _fdatasync(fd)

    def create(self, name: str, directory: int) -> int:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | NEVER_FOLLOW, 0o666, dir_fd=directory)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def reserve(self, fd: int, size: int) -> None:
        if not CAN_RESERVE:  # macOS
            raise OSError(errno.EOPNOTSUPP, "this system cannot reserve disk space; leave reserve=False")
        os.posix_fallocate(fd, 0, size)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        if not CAN_RESERVE:  # macOS
            raise OSError(errno.EOPNOTSUPP, "this system cannot reserve disk space")
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
    """Wait until a file and the cache of its drive are on the disk; False where that cannot be asked for."""
    if _FULL_FSYNC is None:
        return False
    try:
        fcntl.fcntl(fd, _FULL_FSYNC)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY):
            raise
        return False  # a file system that is not a disk's, by SMB say: fcntl(2)
    return True


def npy_header(descr: str, shape: tuple[int, ...]) -> bytes:
    """The header of an array file, to the byte; `descr` as `repr` writes it."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape!r}, }}".encode("latin1")
    padding = -(10 + len(text) + 1) % 64
    return b"\x93NUMPY\x01\x00" + (len(text) + padding + 1).to_bytes(2, "little") + text + b" " * padding + b"\n"


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
    """Write one aligned 8-byte word: the unit that a reader never sees half of."""
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
    """The bytes there, zeros for a hole, fewer only at the end of the file.

    Nothing is mapped, so a hole costs no block and no signal. Linux reads at most 0x7FFFF000 bytes a call (read(2)).
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
    """The descriptor of a file in memory that holds some arrays, one behind the other. Raises OSError."""
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
    """All memory of this process, as bytes; whoever reads some of it holds the array that it is of."""
    return np.frombuffer(_every_byte, np.uint8)


def address_of(array: Array) -> int:
    """Where an array lies in `memory`."""
    address: int = array.__array_interface__["data"][0] - _LOWEST
    assert 0 <= address < _HIGHEST - _LOWEST, "no such address is ever mapped"
    return address


def bytes_at(addresses: npt.NDArray[np.int64], width: int) -> Array:
    """Copy pieces of `memory`: an array of the shape of `addresses`, whose items are `width` bytes each.

    Args:
        addresses: where the pieces begin, all in arrays that somebody holds.
        width: 1 … `MOST_AT`.
    """
    pieces: Array = _pieces(width)[addresses]
    return pieces


@lru_cache(maxsize=256)
def _pieces(width: int) -> Array:
    """All memory as an array whose item i is the `width` bytes from the i-th on."""
    return np.ndarray(_HIGHEST - _LOWEST - width, np.dtype((np.void, width)), _every_byte, strides=(1,))


def map_to_read(fd: int, size: int) -> memoryview:
    """A read-only map of a file's first bytes, for as long as anything looks at it.

    Raises: OSError: ENOMEM: there are too many maps.
    """
    return _mapped(fd, size, mmap.PROT_READ).toreadonly()


def map_to_change(fd: int, size: int) -> memoryview:
    """A map as `map_to_read` makes it, and stores reach the file. Raises OSError."""
    return _mapped(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)


def _mapped(fd: int, size: int, protection: int) -> memoryview:
    """A map of a file's first bytes.

    Python's own before 3.13 (`trackfd`) keeps a descriptor for each map, and 300 folders have thousands of maps.
    """
    address = _mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mapped = (ctypes.c_char * size).from_address(address)
    weakref.finalize(mapped, _libc.munmap, address, size).atexit = False
    return memoryview(mapped)


def will_need(address: int, size: int) -> None:
    """Ask the system to read mapped pages into memory, without waiting."""
    if hasattr(mmap, "MADV_WILLNEED"):
        _libc.madvise(address, size, mmap.MADV_WILLNEED)


def in_memory(address: int, size: int) -> bool:
    """Whether mapped pages, from the begin of one, are in the cache; True of another user's files (mincore(2))."""
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    return bool(_libc.mincore(address, size, pages)) or all(page & 1 for page in pages)


def forget(fd: int, start: int, size: int) -> None:
    """Drop pages from the cache, but for those that any process has mapped, and those not written to the disk yet."""
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
        return error.errno == errno.ENXIO  # there is nothing behind it, either


def punch(fd: int, start: int, stop: int, unit: int = 0) -> None:
    """Give the whole blocks, or units, between two offsets back, where the system can: zeros are read there then."""
    unit = unit or BLOCK
    start, stop = -(-start // unit) * unit, stop // unit * unit
    if start < stop:
        with suppress(OSError):  # nothing is lost but space
            system.punch(fd, start, stop - start)


def allocate(fd: int, offset: int, size: int) -> None:
    """Have blocks under all pages of some bytes of a file, so that a store into a map of them needs none.

    The whole page is what the file system makes room for at a store, though its blocks may be smaller (`mkfs -b 1024`).
    A file grows by none of this.

    Raises:
        OSError: the disk is full, or the system cannot do that.
    """
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    stop = min(-(-(offset + size) // mmap.PAGESIZE) * mmap.PAGESIZE, os.fstat(fd).st_size)
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
    """Have this thread interrupt no other when it is woken: sched(7), SCHED_BATCH.

    Of the calls of `store` that wake one, of two frames of 480 x 640, 9 of 10 take 0.4 ms, not 2 ms, on busy cores.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a sandbox refuses it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def machine_names() -> tuple[str, str]:
    """The name of this machine, and the kind of its processor."""
    names = os.uname()
    return names.nodename, names.machine


process_id = os.getpid
random_bytes = os.urandom  # what `secrets` gives, without what it imports


def close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def identity(status: os.stat_result) -> tuple[int, int]:
    """The numbers that tell a file or folder from every other that there is."""
    return status.st_dev, status.st_ino


class Descriptor:
    """A folder, open until nobody refers to this any more: another thread may be at work in it.

    Attributes: fd; key: its `identity`, which no other has as long as it is open.
    """

    def __init__(self, path: os.PathLike[str]) -> None:
        self.fd = os.open(path, FOLDER)
        weakref.finalize(self, os.close, self.fd).atexit = False
        self.key = identity(os.fstat(self.fd))


class FileLock:
    """The lock of a file by `filelock`, until `release`, or nobody refers to it, or the process ends.

    A forked child has no part in it: neither could it free its parent's, nor would it keep it after the parent's end.
    """

    def __init__(self, fd: int) -> None:
        from filelock import unlock_descriptor

        self._fd, self._unlock_descriptor = {"": fd}, unlock_descriptor  # no import at the end of the interpreter
        weakref.finalize(self, _unlock, self._fd, unlock_descriptor).atexit = False
        _locks.add(self)

    @classmethod
    def take(cls, name: str, directory: int) -> FileLock | None:
        """None where another process has it. Raises OSError: ELOOP, EISDIR, ENXIO: it is no plain file."""
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
            lock.release()  # its name is another file's by now

    def release(self) -> None:
        """Let go; twice is fine."""
        _unlock(self._fd, self._unlock_descriptor)

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        close_all(self._fd)


class RangeLocks:
    """Locks of single bytes of a file (lockf), against other processes; they go with the process.

    Threads of one process do not see each other's. The file is opened once a process and never closed, as closing any
    descriptor of it would drop all of them.
    """

    _by_file: ClassVar[dict[tuple[int, int], RangeLocks]] = {}
    _opening = threading.Lock()

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def of(cls, path: str) -> RangeLocks:
        """The locks of a file, which is made where it is missing."""
        with cls._opening:
            with suppress(FileNotFoundError):
                locks = cls._by_file.get(identity(os.stat(path)))
                if locks is not None:
                    return locks
            fd = os.open(path, os.O_RDWR | os.O_CREAT | NEVER_FOLLOW, 0o600)
            return cls._by_file.setdefault(identity(os.fstat(fd)), cls(fd))

    def take(self, first: int, count: int) -> None:
        """Wait for the locks of some bytes, and hold them.

        Whoever takes several takes them in ascending order. So where the system sees a circle of processes that wait
        for each other, it is other threads of theirs that hold what is waited for.
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
        """Hold the locks of some bytes, if no other process has any of them."""
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
    RangeLocks._opening = threading.Lock()  # another thread may have held it when this process was forked


def after_fork(work: Callable[[], None]) -> None:
    """Have a function called in each process that is forked from this one, before anything else."""
    os.register_at_fork(after_in_child=work)


after_fork(_fresh_range_locks)


class Renewed(Protocol):
    """An object with locks that another thread may hold when this process is forked."""

    def renew(self) -> None:
        """Have locks that nobody holds, and begin anew what may have been in the middle."""


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
    """A descriptor of a file, which nobody else holds in such a block, another thread neither."""
    from filelock import lock_descriptor, unlock_descriptor

    fd = os.open(path, os.O_RDWR | os.O_CREAT | NEVER_FOLLOW, 0o600)
    try:
        lock_descriptor(fd, poll_interval=POLL_SECONDS)
        yield fd
    finally:
        _unlock({"": fd}, unlock_descriptor)


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _unlock(descriptor: dict[str, int], unlock: Callable[[int], None]) -> None:
    for fd in descriptor.values():
        with suppress(OSError):  # closing it does so, too, unless a child that was forked meanwhile has it
            unlock(fd)
    close_all(descriptor)


def _forget_locks() -> None:
    for lock in list(_locks):
        lock.forget()


after_fork(_forget_locks)
