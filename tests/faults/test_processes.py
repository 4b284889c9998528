"""Several processes on one folder: one writer, any number of readers, forks, and folders that change under a reader."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import another_buffer
from fault_injection import System, listing
from inside import set_inside, storage_of
from kill_writer import Writers, content, exact, make, staged, told_by, try_to_write
from mounts import MS_BIND, MS_RDONLY, MS_REMOUNT, in_namespace, mount

from memmap_buffer import (
    BufferLockedError,
    ConcatBuffer,
    MemmapBufferError,
    ReplayBuffer,
    StaleEpisodeError,
    WriterLostError,
)


@pytest.fixture
def writers() -> Iterator[Writers]:
    with Writers() as program:
        yield program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed buffer of three episodes."""
    with make(tmp_path / "buffer") as buffer:
        for serial in range(3):
            buffer.store_episode(**content(serial))
    return tmp_path / "buffer"


# Two writers


@pytest.mark.parametrize("begin", ["create", "write"])
def test_a_second_writer_is_refused_soon_and_told_who_holds_the_folder(tmp_path, begin):
    """Fault 32: pid, host and since when; whether the first one has only created the folder or written to it."""
    before, folder = time.time_ns(), tmp_path / "buffer"
    holder = make(folder)
    if begin == "write":
        holder.store_episode(**content(0))
    (got,) = told_by(lambda tell: tell(try_to_write(folder)))
    assert got["took"] < 10  # seconds: ten times what is promised
    assert (got["pid"], got["host"]) == (os.getpid(), socket.gethostname())
    assert before <= got["since"] <= time.time_ns()
    assert f"process {os.getpid()} on {socket.gethostname()}, since 20" in got["text"]
    holder.close()
    assert told_by(lambda tell: tell(try_to_write(folder))) == [{"written": int(begin == "write")}]


def test_overwriting_is_refused_while_another_process_writes(tmp_path):
    """Fault 32: also the call that takes the lock before anything is written; the folder stays as it is."""
    folder, pid = tmp_path / "buffer", os.getpid()
    with make(folder) as holder:
        holder.store_episode(**content(0))
        before = listing(folder)

        def overwrite(_: Callable[[Any], None]) -> None:
            with pytest.raises(BufferLockedError, match=f"process {pid} on"):
                make(folder, overwrite=True)

        told_by(overwrite)
        assert listing(folder) == before
        holder.store_episode(**content(1))
    assert exact(folder) == [0, 1]


def test_the_lock_of_a_killed_holder_is_free_while_its_forked_child_lives(writers: Writers, folder):
    """Fault 36: the child inherited the lock's descriptor, yet the next writer need not wait for its end."""
    holder = writers.begin(work="hold", folder=str(folder))
    child = writers.tell()["child"]
    assert try_to_write(folder)["pid"] == holder
    os.kill(holder, signal.SIGKILL)
    assert writers.ended() == ([], -signal.SIGKILL)
    os.kill(child, 0)  # it lives
    assert try_to_write(folder) == {"written": 4}
    assert exact(folder) == list(range(5))


# Forks


def test_a_forked_child_reads_and_may_not_write(tmp_path):
    """Fault 35: every way to write raises in the child; its `close` and its end change nothing for the parent."""
    folder = tmp_path / "buffer"
    buffer = make(folder)
    buffer.store_episode(**content(0))
    episode = staged(buffer, 1)
    before = listing(folder)

    def child(tell: Callable[[Any], None]) -> None:
        assert exact(buffer) == [0]
        writes: list[Callable[[], Any]] = [
            episode.publish,
            lambda: buffer.store_episode(**content(1)),
            lambda: buffer.begin_episode(),
            lambda: buffer.update(0, version=1),
            lambda: buffer.delete(0),
            buffer.clear,
            buffer.flush,
        ]
        for write in writes:
            with pytest.raises(WriterLostError, match="a forked child may read, not write") as caught:
                write()
            assert caught.value.reason == "forked"
        buffer.close()
        buffer.close()
        gc.collect()
        tell(try_to_write(folder))

    (got,) = told_by(child)
    assert got["pid"] == os.getpid()
    assert listing(folder) == before
    assert told_by(lambda tell: tell(try_to_write(folder)))[0]["pid"] == os.getpid()
    episode.publish()
    assert exact(folder) == [0, 1]
    buffer.close()


def test_a_child_forked_before_the_first_write_may_take_the_lock_itself(folder):
    """Fault 35: nobody held it; the parent is then the second writer, until the child has gone."""
    buffer = ReplayBuffer.from_folder(folder)

    def child(tell: Callable[[Any], None]) -> None:
        buffer.store_episode(**content(3))
        (got,) = told_by(lambda tell: tell(try_to_write(folder)))
        assert got["pid"] == os.getpid()
        tell(exact(folder))

    assert told_by(child) == [[0, 1, 2, 3]]
    buffer.store_episode(**content(4))
    assert exact(folder) == [0, 1, 2, 3, 4]
    buffer.close()


# Readers


def check(item: dict[str, Any]) -> int:
    """Its serial, if it is the timestep that it says it is."""
    serial, t = item["_indices"].reshape(-1).tolist()
    assert item["serial"].item() == serial
    assert torch.equal(item["image"].reshape(64, 64), torch.from_numpy(content(serial)["image"][t]))
    return serial


def test_a_reader_many_laps_behind_gets_a_stale_error_or_rows_of_a_living_episode(folder):
    """Fault 30: its index is of episodes that were overwritten long ago."""
    reader = ReplayBuffer.from_folder(folder, read_only=True)
    strict = reader.dataset(timestep_level=True, return_indices=True, on_stale="raise")
    lenient = reader.dataset(timestep_level=True, return_indices=True)
    items = range(len(lenient))

    def write(_: Callable[[Any], None]) -> None:
        with ReplayBuffer.from_folder(folder) as buffer:
            for serial in range(3, 40):
                buffer.store_episode(**content(serial))

    told_by(write)
    with pytest.raises(StaleEpisodeError, match="were overwritten or cleared before they were read"):
        [strict[i] for i in items]
    assert {check(lenient[i]) for i in items} <= set(range(32, 40))


class Holes(System):
    """Large writes leave a hole where zeros would stand, so a large buffer takes no disk."""

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return len(data) if len(data) >= 1 << 20 else super().pwrite(fd, data, offset)


def private_memory() -> int:
    """Bytes of this process that are neither a file's nor shared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory by /proc")
@pytest.mark.parametrize("episodes", [16, pytest.param(64, marks=pytest.mark.slow)], ids=["256 MiB", "1 GiB"])
def test_reading_much_takes_no_private_memory(tmp_path, monkeypatch, episodes):
    """Fault 37: what is read is the page cache's; a process keeps its batch and little else."""
    set_inside(monkeypatch, system=Holes())
    options = {"max_episodes": episodes, "max_timesteps": 16, "checksum": None}
    with ReplayBuffer(tmp_path / "buffer", fields={"x": ("uint8", (1 << 20,))}, **options) as buffer:
        for _ in range(episodes):
            buffer.store_episode(x=np.zeros((16, 1 << 20), np.uint8))

    def read(tell: Callable[[Any], None]) -> None:
        reader = ReplayBuffer.from_folder(tmp_path / "buffer", read_only=True)
        reader.sample(8, timestep_level=True)
        before, total = private_memory(), 0
        for batch in reader.dataloader(8, timestep_level=True):
            total += batch["x"].numel()
        tell([total, private_memory() - before])

    ((total, more),) = told_by(read)
    assert total == episodes << 24
    assert more < 50 << 20


def test_what_is_handed_out_may_be_changed_without_touching_the_file(folder):
    """Fault 38: in place, through every door; a read-only map behind a tensor would end the process here."""
    before = listing(folder)

    def change(_: Callable[[Any], None]) -> None:
        torch.set_num_threads(1)  # a forked child has none of the threads that torch may have started before
        buffer = ReplayBuffer.from_folder(folder, read_only=True)
        doors = [
            buffer.sample(8, timestep_level=True, return_indices=True),
            buffer.sample(8, n_steps=2),
            buffer.get_all_data(),
            buffer[0],
            buffer.dataset(timestep_level=True)[3],
            next(iter(buffer.dataloader(2))),
            {name: torch.as_tensor(value) for name, value in buffer.episode(0).items() if name != "task"},
        ]
        for given in doors:
            for value in given.values():
                if isinstance(value, torch.Tensor):
                    value.mul_(2).add_(1)
        buffer.serials[:] = 7
        buffer.episode_lens[:] = 7
        assert exact(buffer) == [0, 1, 2]

    told_by(change)
    assert listing(folder) == before


# A folder that changes under its readers


def overwrite(folder: Path) -> None:
    make(folder, overwrite=True, max_episodes=2, max_timesteps=5).close()


def overwrite_with_other_fields(folder: Path) -> None:
    ReplayBuffer(folder, 3, 4, {"other": "int"}, overwrite=True).close()


def clear(folder: Path) -> None:
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.clear()


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    make(folder).close()


CHANGES: dict[Callable[[Path], None], set[str]] = {
    overwrite: set(),
    overwrite_with_other_fields: set(),
    clear: {
        f"{what}: {error}Error" for what in ("items", "loader", "sample") for error in ("StaleEpisode", "NotEnoughData")
    },
    shutil.rmtree: {"reopen: NotABufferError"},
    rename: set(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_reader_whose_folder_changes_keeps_the_old_data_or_gets_a_clean_error(folder, change):
    """Fault 39: never a signal, never a row of something else; another process changes the folder."""

    def read(tell: Callable[[Any], None]) -> None:
        reader = ReplayBuffer.from_folder(folder, read_only=True)
        data = reader.dataset(timestep_level=True, return_indices=True)
        loader = iter(reader.dataloader(2, timestep_level=True))
        next(loader)
        told_by(lambda _: change(folder))
        reads: dict[str, Callable[[], Any]] = {
            "items": lambda: [check(data[i]) for i in range(len(data))],
            "loader": lambda: list(loader),
            "sample": lambda: check(reader.sample(1, timestep_level=True, return_indices=True)),
            "episodes": lambda: exact(reader),
            "all": lambda: reader.get_all_data(),
            "reopen": lambda: exact(folder),
        }
        for name, read_again in reads.items():
            try:
                read_again()
            except MemmapBufferError as error:
                tell(f"{name}: {type(error).__name__}")

    assert set(told_by(read)) <= CHANGES[change]


def test_a_mapped_view_outlives_its_buffer(folder):
    """Fault 42: after `close` and the garbage collector it still shows what it showed."""

    def keep(_: Callable[[Any], None]) -> None:
        buffer = ReplayBuffer.from_folder(folder)
        view = storage_of(buffer).maps.rows["image"]
        first = view[: len(content(0)["t"])].copy()
        buffer.close()
        assert exact(buffer) == [0, 1, 2]  # closing ends writing, not reading
        del buffer
        gc.collect()
        shutil.rmtree(folder)
        assert (view[: len(first)] == content(0)["image"]).all()

    told_by(keep)


# Folders that cannot be written


def drop_privileges() -> None:
    """Root may write everywhere; without its capabilities it is an owner like any other."""
    if os.geteuid() == 0:
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None, use_errno=True).capset(header, none) == 0


def train(folder: Path) -> None:
    """Everything that a training job does; writing is refused, reading is not."""
    for read_only in (True, False):
        buffer = ReplayBuffer.from_folder(folder, read_only=read_only)
        assert exact(buffer) == [0, 1, 2]
        for _ in range(2):
            for batch in buffer.dataloader(4, timestep_level=True, shuffle=True):
                assert len(batch["t"]) <= 4
        buffer.sample(4, n_steps=2)
        with pytest.raises(OSError, match="read_only=True" if read_only else "denied|Read-only"):
            buffer.store_episode(**content(3))
        buffer.close()


def test_a_folder_without_write_permission_is_read_and_trained_on(folder):
    """Fault 40: nothing is created, no time of change moves."""
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = listing(folder)

    def read(_: Callable[[Any], None]) -> None:
        drop_privileges()
        train(folder)

    told_by(read)
    assert listing(folder) == before


def test_a_folder_on_a_read_only_mount_is_read_and_trained_on(folder):
    """Fault 40: the same for a mount that nobody can write to."""
    before = listing(folder)

    def prepare() -> None:
        mount(str(folder), folder, flags=MS_BIND)
        mount(str(folder), folder, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)

    in_namespace(prepare, lambda _: train(folder))
    assert listing(folder) == before


# Many folders


def test_300_folders_are_read_as_one_by_a_process_that_may_open_256_files(tmp_path):
    """Fault 41: of ten arrays each; a map needs no open file."""
    with make(tmp_path / "shard0") as buffer:
        buffer.store_episode(**content(0))
    for i in range(1, 300):
        another_buffer(shutil.copytree(tmp_path / "shard0", tmp_path / f"shard{i}"))

    def read(tell: Callable[[Any], None]) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        batch = ConcatBuffer.from_root(tmp_path).sample(6000, timestep_level=True, return_indices=True)
        tell(len(batch["_indices"][:, 0].unique()))

    assert all(count > 290 for count in told_by(read))


@pytest.mark.parametrize(("code", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.ENOMEM, "vm.max_map_count")])
def test_a_map_that_cannot_be_made_names_the_limit_to_raise(tmp_path, monkeypatch, code, remedy):
    with make(tmp_path) as buffer:
        buffer.store_episode(**content(0))

    def fails(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    set_inside(monkeypatch, add_map=fails)
    with pytest.raises(OSError, match=f"{remedy}.*read fewer folders") as caught:
        ReplayBuffer.from_folder(tmp_path)
    assert caught.value.errno == code
