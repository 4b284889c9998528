"""Files as such: headers that numpy reads, writes that are whole or raise, and nothing opened that is not ours."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import mmap
import os
import shutil
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import listing
from hypothesis import given
from hypothesis import strategies as st
from specification import NUMERIC, RECORD

from memmap_buffer import CorruptBufferError, Field, ReplayBuffer, Schema
from memmap_buffer.dtypes import storage_dtype
from memmap_buffer.format import syscalls
from memmap_buffer.format.layout import ArrayFile, Layout
from memmap_buffer.format.records import STATE
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import is_hole, locked, npy_header, write_all, write_word

FIELDS = {"a": "float", "b": Field("uint8", (2, 2), final=True)}
META_FIELDS = {"m": "U4"}
LAYOUT = Layout(Schema(FIELDS, META_FIELDS), 3, 4)
FILES = [array.name for array in LAYOUT.arrays.values()]
HEADERS = {array.name: array.header for array in LAYOUT.arrays.values()}


@pytest.mark.parametrize("place", [0, 1, 3])
def test_memory_that_takes_the_place_of_a_file_that_cannot_be_mapped_is_not_unmapped(
    tmp_path: Path, place: int
) -> None:
    page, (end, other_end) = mmap.PAGESIZE, os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    (tmp_path / "file").write_bytes(bytes(page))
    with (tmp_path / "file").open("rb") as file:
        maps = syscalls.FileMaps(4 * page)
        for _ in range(place):
            maps.add(file.fileno(), page)
    with pytest.raises(OSError, match="No such device"):  # no pipe can be mapped
        maps.add(end, page)
    os.close(end)
    os.close(other_end)
    first = maps.memory.__array_interface__["data"][0]
    del maps
    # With MS_ASYNC, 1: it fails where nothing is mapped.
    assert [libc.msync(first + i * page, page, 1) for i in range(4)] == [0 if i == place else -1 for i in range(4)]


# Headers

shapes = st.lists(st.integers(1, 2**62), max_size=16).map(tuple)
dtypes = st.sampled_from([*(storage_dtype(name) for name in (*NUMERIC, "U1", "U4096")), RECORD, STATE])


@given(dtype=dtypes, shape=shapes)
def test_a_header_is_read_by_numpy_and_is_a_multiple_of_64_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    header = ArrayFile("a.npy", dtype, shape).header
    assert len(header) % 64 == 0
    file = io.BytesIO(header)
    assert np.lib.format.read_magic(file) == (1, 0)
    assert np.lib.format.read_array_header_1_0(file) == (shape, False, dtype)
    assert file.tell() == len(header)


@pytest.mark.parametrize("dtype", [storage_dtype(name) for name in (*NUMERIC, "U7")], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_file_is_what_numpy_itself_would_save(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    saved = io.BytesIO()
    np.save(saved, array)
    header = npy_header(repr(dtype.str), shape)
    theirs = saved.getvalue()[: -array.nbytes]
    assert (header[:8], header[10:].split(b"}")[0]) == (theirs[:8], theirs[10:].split(b"}")[0])
    np.testing.assert_array_equal(np.load(io.BytesIO(header + array.tobytes()), allow_pickle=False), array)


# Writing


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    path = tmp_path / "file"
    path.write_bytes(b"." * 64)
    fd = os.open(path, os.O_RDWR)
    yield fd, path
    os.close(fd)


ARRAYS = {
    "floats": np.arange(5, dtype="<f4"),
    "images": np.arange(12, dtype="<u2").reshape(2, 3, 2),
    "complex": np.array([1 + 2j]),
    "bytes": b"0123456789",
    "a scalar": np.array(3.5),
    "bools": np.array([True, False, True]),
    "text": np.array(["ab", "é"]),
    "nothing": np.zeros((0, 3)),
    "read-only": np.frombuffer(b"12345678", "<u4"),
}


class Short(syscalls.System):
    """Every write takes at most `most` bytes; `calls` counts them."""

    def __init__(self, most: int) -> None:
        self.most, self.calls = most, 0

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        self.calls += 1
        return super().pwrite(fd, memoryview(memoryview(data).tobytes()[: self.most]), offset)


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("most", [1, 3, 64])
def test_all_bytes_of_an_array_are_written_in_c_order_and_no_others(
    file: tuple[int, Path], array: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 18: a write that takes one byte, or three, is gone on with."""
    fd, path = file
    monkeypatch.setattr(syscalls, "system", short := Short(most))
    write_all(fd, array, 8)
    raw = array if isinstance(array, bytes) else array.tobytes()
    assert path.read_bytes() == (b"." * 8 + raw).ljust(64, b".")
    assert short.calls == max(1, -(-len(raw) // most))


def test_an_array_that_is_not_contiguous_is_refused_before_a_byte_is_written(file: tuple[int, Path]) -> None:
    with pytest.raises(ValueError, match="not C-contiguous"):
        write_all(file[0], np.zeros((2, 3)).T, 0)
    assert file[1].read_bytes() == b"." * 64


def test_a_write_that_makes_no_progress_raises_and_does_not_hang(
    file: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syscalls, "system", Short(0))
    with pytest.raises(OSError, match="a write made no progress"):
        write_all(file[0], b"1234", 0)


def test_a_full_disk_is_the_os_error_that_it_is() -> None:
    """Fault 24: `write_all` to /dev/full."""
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        for write in (lambda: write_all(fd, np.ones(4), 0), lambda: write_word(fd, 1, 0)):
            with pytest.raises(OSError, match="No space left on device") as caught:
                write()
            assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(fd)


def test_an_error_behind_a_short_write_is_raised(file: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class ThenFull(Short):
        def pwrite(self, fd: int, data: Any, offset: int) -> int:
            if self.calls == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().pwrite(fd, data, offset)

    monkeypatch.setattr(syscalls, "system", ThenFull(4))
    with pytest.raises(OSError, match="No space left on device"):
        write_all(file[0], b"0123456789abcdef", 0)
    assert file[1].read_bytes()[:16] == b"01234567........"


@pytest.mark.parametrize("value", [0, 1, 2**62, 2**64 - 1])
@pytest.mark.parametrize("most", [3, 8, 64])
def test_a_word_is_written_little_endian_in_one_write(
    file: tuple[int, Path], value: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syscalls, "system", short := Short(most))
    write_word(file[0], value, 16)
    assert file[1].read_bytes() == b"." * 16 + struct.pack("<Q", value) + b"." * 40
    assert short.calls == 1 or most < 8


# Opening: only what is exactly as the schema says


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "buffer"
    with ReplayBuffer(path, 3, 4, FIELDS, META_FIELDS) as buffer:
        buffer.store_episode(a=[1.0, 2.0], b=np.ones((3, 2, 2)), m="text")
    return path


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "buffer"))


DOORS: dict[str, Callable[[Path], Any]] = {
    "storage": Storage.open,
    "read-only": lambda path: ReplayBuffer.from_folder(path, read_only=True),
    "from_folder": ReplayBuffer.from_folder,
    "constructor": lambda path: ReplayBuffer(path, 3, 4, FIELDS, META_FIELDS),
}


def refused(folder: Path, name: str) -> None:
    """No door opens it, the error names the file, and nothing was created or touched."""
    before = listing(folder.parent)
    for door in DOORS.values():
        with pytest.raises(CorruptBufferError, match=rf"{name}.*; restore it from a copy") as caught:
            door(folder)
        assert Path(caught.value.path) == folder / name
    assert listing(folder.parent) == before


def test_the_unspoilt_folder_opens_by_every_door(folder: Path) -> None:
    before = listing(folder)
    for door in DOORS.values():
        door(folder)
    assert listing(folder) == before


CUTS: dict[str, Callable[[int, int], int]] = {
    "to nothing": lambda size, header: 0,
    "to 10 bytes": lambda size, header: 10,
    "within the header": lambda size, header: header - 1,
    "to the header": lambda size, header: header,
    "in half": lambda size, header: size // 2,
    "by one": lambda size, header: size - 1,
    "extended": lambda size, header: size + 1,
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_or_extended_is_refused_and_keeps_its_size(folder: Path, name: str, cut: str) -> None:
    """Fault 43: numpy would extend it with zeros and open it."""
    path = folder / name
    wanted = CUTS[cut](path.stat().st_size, len(HEADERS[name]))
    os.truncate(path, wanted)
    refused(folder, name)
    assert path.stat().st_size == wanted


@pytest.mark.parametrize("size", [0, 10, 300])
def test_a_schema_cut_short_is_refused_and_keeps_its_size(folder: Path, size: int) -> None:
    """Fault 43: `schema.json`."""
    os.truncate(folder / "schema.json", size)
    refused(folder, "schema.json")


def test_a_file_cut_after_opening_is_not_extended_by_the_writer(folder: Path) -> None:
    """Fault 43: the writer looks again at what it opens to write."""
    with ReplayBuffer.from_folder(folder) as buffer:
        size = (folder / "data" / "a.npy").stat().st_size
        os.truncate(folder / "data" / "a.npy", size - 4)
        with pytest.raises(CorruptBufferError, match=rf"a\.npy has {size - 4} bytes, the schema says {size}"):
            buffer.store_episode(a=[1.0], b=np.ones((2, 2, 2)))
    assert (folder / "data" / "a.npy").stat().st_size == size - 4


def header_of(text: str, version: int = 1) -> bytes:
    """A header of the size of the right one for `data/a.npy`."""
    size, length = len(HEADERS["data/a.npy"]), 2 if version == 1 else 4
    start = b"\x93NUMPY" + bytes([version, 0]) + (size - 8 - length).to_bytes(length, "little")
    return start + text.ljust(size - 9 - length).encode() + b"\n"


RIGHT = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 4), }"
OTHER_HEADERS = {
    "another shape": header_of(RIGHT.replace("(4, 4)", "(2, 8)")),
    "a huge shape": header_of(RIGHT.replace("(4, 4)", "(4, 10**18)")),
    "an expression": header_of(RIGHT.replace("(4, 4)", "(2+2, 4)")),
    "another dtype": header_of(RIGHT.replace("<f4", "<i4")),
    "big-endian": header_of(RIGHT.replace("<f4", ">f4")),
    "objects": header_of(RIGHT.replace("'<f4'", "'|O'")),
    "Fortran order": header_of(RIGHT.replace("False", "True")),
    "other spaces": header_of(RIGHT.replace(", ", ",")),
    **{f"version {n}": header_of(RIGHT, n) for n in (2, 3, 9)},
    "another magic": b"\x94" + header_of(RIGHT)[1:],
    "zeros": bytes(len(HEADERS["data/a.npy"])),
}


def test_the_right_header_is_the_one_that_the_others_differ_from() -> None:
    assert header_of(RIGHT) == HEADERS["data/a.npy"]


@pytest.mark.parametrize("header", OTHER_HEADERS.values(), ids=OTHER_HEADERS)
def test_a_file_with_another_header_is_refused(folder: Path, header: bytes) -> None:
    """Fault 51: other shape, dtype, order, version; an expression in the header."""
    path = folder / "data" / "a.npy"
    path.write_bytes(header + path.read_bytes()[len(header) :])
    refused(folder, "data/a.npy")


def test_a_file_with_a_header_of_60_kb_is_refused(folder: Path) -> None:
    """Fault 51: 60 KB of header."""
    path = folder / "data" / "a.npy"
    np.lib.format.write_array_header_2_0(
        file := io.BytesIO(), {"descr": "<f4", "fortran_order": False, "shape": (4, 4)}
    )
    path.write_bytes(file.getvalue().replace(b"}", b"}" + b" " * 60_000))
    refused(folder, "data/a.npy")


# Not through links, pipes, devices


def link_to_a_copy(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard_link(path: Path, victim: Path) -> None:
    os.link(victim, path)


def unix_socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # the name of a socket is short
        server.bind(path.name)


def device(path: Path, _: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("making a device needs privileges")


KINDS: dict[str, Callable[[Path, Path], Any]] = {
    "a link": link_to_a_copy,
    "a dangling link": lambda path, victim: path.symlink_to(victim.with_name("nowhere")),
    "a FIFO": lambda path, _: os.mkfifo(path),
    "a directory": lambda path, _: path.mkdir(),
    "a socket": unix_socket,
    "a device": device,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["schema.json", "episodes.npy", "state.npy", "data/a.npy", "meta/m.npy"])
def test_what_is_no_plain_file_is_refused_without_following_or_waiting(
    folder: Path, name: str, kind: str, monkeypatch: Any
) -> None:
    """Fault 50: a symbolic link, even to the right bytes; a FIFO, a directory, a socket, a device."""
    monkeypatch.chdir(folder)
    victim = folder.parent / "victim"
    (folder / name).rename(victim)
    KINDS[kind](folder / name, victim)
    before = (victim.read_bytes(), sorted(os.listdir(folder.parent)))
    for door in DOORS.values():
        with pytest.raises(CorruptBufferError, match=rf"{name} is a link or no plain file") as caught:
            door(folder)
        assert Path(caught.value.path) == folder / name
    assert (victim.read_bytes(), sorted(os.listdir(folder.parent))) == before


def test_a_subfolder_that_is_a_link_is_refused(folder: Path) -> None:
    """Fault 50: `data` leads elsewhere, to the right files."""
    (folder / "data").rename(folder.parent / "elsewhere")
    (folder / "data").symlink_to(folder.parent / "elsewhere")
    for door in DOORS.values():
        with pytest.raises(CorruptBufferError, match=r"data.* is a link or no "):
            door(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_hard_link_is_read_and_never_written(folder: Path, name: str) -> None:
    """Fault 50: a file of the folder that is a victim's other name."""
    victim = folder.parent / "victim"
    os.link(folder / name, victim)
    before = victim.read_bytes()
    assert len(ReplayBuffer.from_folder(folder, read_only=True)) == 1
    with pytest.raises(CorruptBufferError, match=rf"{name} is a link or no plain file"):
        ReplayBuffer.from_folder(folder).store_episode(a=[1.0], b=np.ones((2, 2, 2)))
    assert victim.read_bytes() == before


@pytest.mark.parametrize("kind", [*KINDS, "a hard link"])
def test_a_lock_that_is_no_file_of_ours_is_refused_or_left_as_it_is(folder: Path, kind: str, monkeypatch: Any) -> None:
    """Fault 50: `.lock` is somebody's file; taking the lock must not empty it."""
    monkeypatch.chdir(folder)
    victim = folder.parent / "victim"
    victim.write_bytes(b"precious")
    (folder / ".lock").unlink(missing_ok=True)
    {**KINDS, "a hard link": hard_link}[kind](folder / ".lock", victim)
    if kind != "a hard link":
        with pytest.raises(CorruptBufferError, match=r"\.lock is a link or no plain file"):
            ReplayBuffer.from_folder(folder).store_episode(a=[1.0], b=np.ones((2, 2, 2)))
    else:
        with ReplayBuffer.from_folder(folder) as buffer:
            buffer.store_episode(a=[1.0], b=np.ones((2, 2, 2)))
    assert victim.read_bytes() == b"precious"


def test_the_folder_itself_may_be_reached_through_a_link(folder: Path) -> None:
    """Fault 50: only what lies in the folder is not followed."""
    (folder.parent / "link").symlink_to(folder)
    with ReplayBuffer.from_folder(folder.parent / "link") as buffer:
        buffer.store_episode(a=[1.0], b=np.ones((2, 2, 2)))
        assert len(buffer) == 2


@pytest.mark.parametrize(
    ("start", "stop", "first", "last"),
    [(64, 65, 0, 4096), (4095, 4097, 0, 8192), (4096, 8192, 4096, 8192), (9000, 12_300, 8192, 12_400)],
)
def test_room_is_made_for_whole_pages_and_not_beyond_the_end(
    tmp_path: Path, start: int, stop: int, first: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store into a map needs the blocks of all of its page, however small these are."""
    asked = []
    monkeypatch.setattr(syscalls.mmap, "PAGESIZE", 4096)
    monkeypatch.setattr(syscalls.System, "allocate", lambda _, fd, offset, size: asked.append((offset, offset + size)))
    with (tmp_path / "file").open("wb") as file:
        file.truncate(12_400)
        syscalls.allocate(file.fileno(), start, stop - start)
    assert asked == [(first, last)]


def test_a_hole_is_one_only_where_nothing_was_written(tmp_path):
    with (tmp_path / "x").open("w+b") as file:
        file.truncate(1 << 22)
        fd = file.fileno()
        if not is_hole(fd, 0, 1 << 22):
            pytest.skip("this file system does not tell of holes")
        file.seek(1 << 21)
        file.write(b"x")
        file.flush()
        assert is_hole(fd, 0, 1 << 21) and not is_hole(fd, 0, (1 << 21) + 1)
        assert is_hole(fd, (1 << 21) + (1 << 16), 1 << 22)
        assert not is_hole(fd, 1 << 20, 1 << 22)


def test_a_lock_is_waited_for(tmp_path):
    path, order = str(tmp_path / "lock"), []

    def wait():
        with locked(path):
            order.append("second")

    second = threading.Thread(target=wait)
    with locked(path):
        second.start()
        second.join(0.05)
        order.append("first")
    second.join()
    assert order == ["first", "second"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_lock_ends_with_its_block_though_a_child_was_forked_in_it(tmp_path):
    """A child that was forked by another thread has the same open file, and the lock is of that."""
    path, (here, there) = str(tmp_path / "lock"), os.pipe()
    with locked(path):
        child = os.fork()
        if child == 0:
            os.close(there)
            os.read(here, 1)  # until the parent goes
            os._exit(0)
    os.close(here)
    try:
        with open(path, "r+b") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(there)
        os.waitpid(child, 0)
