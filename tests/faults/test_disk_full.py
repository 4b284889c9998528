"""Disks that are full, end, or fail: an exception, never a signal; earlier episodes exact; the episode can go again."""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import in_child, system
from inside import get_inside, set_inside
from kill_writer import CODED, RING, content, exact, following, make, staged, steps
from mounts import fill, on_ext4, on_tmpfs

from memmap_buffer import ReplayBuffer, pack, publish, pull, verify

SIZES = {"max_episodes": 1000, "circular": False}  # 100 MB, sparse
MODES: dict[str, dict[str, Any]] = {
    "process": {},
    "power": {"durability": "power"},
    "disk": {"stage": "disk"},
    "step": {"publish": "step"},
    "compressed": {"fields": CODED},
    "compressed, disk": {"fields": CODED, "stage": "disk"},
}


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextmanager
def sampling(folder: Path) -> Iterator[None]:
    """A process beside this one that samples and compares all the time; it must end well, not by a signal."""
    stop, go_on = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go_on)
        status = 1
        try:
            while not select.select([stop], [], [], 0)[0]:
                compare_samples(ReplayBuffer.from_folder(folder, read_only=True))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(stop)
    try:
        yield
    finally:
        os.close(go_on)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def compare_samples(buffer: ReplayBuffer) -> None:
    """Batches of several views, every row compared with the episode that it says it is of."""
    for options in ({"timestep_level": True}, {"n_steps": 3}, {"window_length": 4}):
        batch = buffer.sample(16, **options)
        serial, t, image = (np.atleast_2d(np.asarray(batch[name]).T).T for name in ("serial", "t", "image"))
        for i in range(16):
            lens = int(batch["_lens"][i]) if "_lens" in batch else 1
            for k in range(lens):
                wanted = content(int(serial[i, k]))["image"][int(t[i, k])]
                got = image[i].reshape(-1, 64, 64)[k]
                assert (got == wanted).all()


# A disk that is full


def run_full(tell: Callable[[Any], None], disk: Path, **options: Any) -> None:
    """Fill a disk while storing and sampling; free it; publish the same episode."""
    folder, ballast = disk / "buffer", disk / "ballast"
    buffer = make(folder, **SIZES, **options)
    for serial in range(20):
        buffer.store_episode(**content(serial))
    fill(ballast, leave=300_000)
    with sampling(folder):
        failed = 0
        while not failed:
            episode = staged(buffer, following(buffer))
            try:
                episode.publish()
            except OSError as error:
                failed = error.errno
        assert failed == errno.ENOSPC
        before = exact(buffer)
        assert exact(folder) == before == list(range(len(before)))
        os.unlink(ballast)
        episode.publish()
        assert exact(folder) == [*before, len(before)]
        buffer.store_episode(**content(following(buffer)))
    buffer.close()
    assert not [finding for finding in verify(folder) if finding.lost]
    tell(len(before))


@pytest.mark.parametrize(
    ("disk", "mode"),
    [(on_tmpfs, "process"), (on_tmpfs, "power"), (on_tmpfs, "compressed"), (on_ext4, "process"), (on_ext4, "power")],
)
def test_a_full_disk_raises_and_the_same_episode_is_published_once_there_is_space(tmp_path, disk, mode):
    """Faults 16 and 27: beside a process that samples from the full disk all the time."""
    pytest.importorskip("torch")  # for that process
    (count,) = disk(tmp_path / "disk", lambda tell: run_full(tell, tmp_path / "disk", **MODES[mode]))
    assert count >= 20


def run_full_in_place(tell: Callable[[Any], None], disk: Path, **options: Any) -> None:
    """Fill a disk while an episode is open that is written as it grows; it goes on when there is space."""
    set_inside(pytest.MonkeyPatch(), staged_bytes=3 * 4300)  # in a process of its own
    folder, ballast = disk / "buffer", disk / "ballast"
    buffer = make(folder, **SIZES, **options)
    for serial in range(3):
        buffer.store_episode(**content(serial))
    serial = next(serial for serial in range(3, 99) if len(content(serial)["t"]) > 20)
    while following(buffer) < serial:
        buffer.store_episode(**content(following(buffer)))
    fill(ballast)
    episode, failures = buffer.begin_episode(task=content(serial)["task"]), 0
    for t, step in enumerate(steps(serial)):
        while episode.length == t:
            try:
                episode.store(**step)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failures += 1
                assert exact(folder)[:serial] == list(range(serial))
                ballast.unlink(missing_ok=True)
    episode.final(state=content(serial)["state"][-1])
    episode.publish()
    buffer.close()
    assert exact(folder) == list(range(serial + 1))
    assert not [finding for finding in verify(folder) if finding.lost]
    tell(failures)


@pytest.mark.parametrize("mode", ["disk", "step", "compressed, disk"])
def test_an_episode_that_is_written_as_it_grows_goes_on_once_there_is_space(tmp_path, mode):
    """Fault 16 for stage="disk" and publish="step": no step is lost and none is there twice."""
    (failures,) = on_tmpfs(tmp_path / "disk", lambda tell: run_full_in_place(tell, tmp_path / "disk", **MODES[mode]))
    assert failures == 1


def run_full_beside_adds(tell: Callable[[Any], None], disk: Path) -> None:
    """Fill a disk right after room was made for timesteps to come, whose last page they share with others; go on."""
    size, count = 40, 4
    fields = {"x": ("float64", (16,)), "number": "int"}
    buffer = ReplayBuffer(disk / "buffer", 200, size, fields, spare_slots=count, circular=False, publish="step")

    def add(number: int) -> None:
        buffer.add(x=np.full((count, 16), number), number=np.full(count, number))

    add(0)
    add(1)  # which makes room
    fill(disk / "ballast")
    added, failed = 2, 0
    while not failed:
        try:
            add(added)
            added += 1
            if not added % size:
                buffer.end_episodes()
        except OSError as error:
            failed = error.errno
    os.unlink(disk / "ballast")
    add(added)
    steps = buffer.batch(timestep_level=True, format="numpy")
    assert sorted(steps["number"].tolist()) == sorted([*range(added + 1)] * count)
    assert (steps["x"] == steps["number"][:, None]).all()
    buffer.close()
    assert verify(disk / "buffer") == []
    tell([added > size, failed])


@pytest.mark.parametrize("block", [1024, 4096])
def test_steps_of_several_environments_on_a_full_disk_raise_whatever_its_blocks_are(tmp_path, block):
    """publish="step": a store into a map needs all blocks of its page, which may be of several episodes."""
    disk = tmp_path / "disk"
    assert on_ext4(disk, lambda tell: run_full_beside_adds(tell, disk), block) == [[True, errno.ENOSPC]]


def run_full_beside_what_left(tell: Callable[[Any], None], disk: Path) -> None:
    """An episode that goes on after a ring gave it up, as others are newer, on a disk that was filled since."""
    rows = {"x": ("float64", (16,)), "terminated": "bool"}
    buffer = ReplayBuffer(
        disk / "buffer", 4, 4096, rows, capacity=100_000, circular=True, spare_slots=4, publish="step"
    )
    for number in range(620):
        buffer.add(x=np.full((2, 16), number), terminated=[False, number >= 600])
    until_full(tell, disk, lambda: buffer.add(x=np.zeros((2, 16)), terminated=np.zeros(2, bool)))


def run_full_behind_a_failed_end(tell: Callable[[Any], None], disk: Path) -> None:
    """Episodes whose end failed, and which go on, on a disk that was filled since."""
    buffer = ReplayBuffer(disk / "buffer", 4, 4096, {"x": ("float64", (64,))}, publish="step")
    batch = buffer.begin_batch(1)
    for number in range(600):
        batch.store(x=np.full((1, 64), number))
    with system(at=1, error=errno.EIO, only=("pwrite",)), pytest.raises(OSError, match="Input/output"):
        batch.publish()
    until_full(tell, disk, lambda: batch.store(x=np.zeros((1, 64))))


def until_full(tell: Callable[[Any], None], disk: Path, add: Callable[[], None]) -> None:
    """Fill the disk, what is freed meanwhile included, and add steps until that is told."""
    for name in ("ballast", "more", "most"):
        fill(disk / name)
    try:
        for _ in range(2000):
            add()
    except OSError as error:
        tell(error.errno)


@pytest.mark.parametrize("run", [run_full_beside_what_left, run_full_behind_a_failed_end])
def test_steps_that_go_on_where_space_was_given_back_raise_on_a_full_disk(tmp_path, run):
    """publish="step": a store into a map that finds no block would kill the process."""
    disk = tmp_path / "disk"
    assert on_ext4(disk, lambda tell: run(tell, disk)) == [errno.ENOSPC]


def test_creating_and_opening_on_an_almost_full_tmpfs_gives_an_error_and_no_signal(tmp_path):
    """Faults 16 and 27: a reader that touched a hole of a full tmpfs would die of SIGBUS."""
    disk = tmp_path / "disk"

    def work(tell: Callable[[Any], None]) -> None:
        for pages in range(0, 60, 2):
            fill(disk / "ballast", leave=4096 * pages)
            tell(pages)
            try:
                with make(disk / "buffer", **SIZES) as buffer:
                    assert len(buffer) == 0
            except OSError as error:
                assert error.errno == errno.ENOSPC
            shutil.rmtree(disk / "buffer", ignore_errors=True)
            (disk / "ballast").unlink()

    on_tmpfs(disk, work)


def test_reading_takes_no_space_of_a_tmpfs(tmp_path):
    """Fault 27: holes are never touched, neither of rows nor of the table."""
    disk = tmp_path / "disk"

    def work(tell: Callable[[Any], None]) -> None:
        with make(disk / "buffer", **SIZES) as buffer:
            for serial in range(5):
                buffer.store_episode(**content(serial))
        before = free(disk)
        for verification in ("auto", "always", "read", "never"):
            buffer = ReplayBuffer.from_folder(disk / "buffer", read_only=True, verify=verification)
            assert exact(buffer) == list(range(5))
            compare_samples(buffer)
            buffer.get_all_data()
        tell(before - free(disk))

    assert on_tmpfs(disk, work) == [0]


def changed(disk: Path, tell: Callable[[Any], None], checksum: str | None) -> None:
    """Change published episodes on a tmpfs that is full, or nearly; a slot's row of any file is in pages of its own."""
    folder, ballast, leave = disk / "buffer", disk / "ballast", 0
    buffer = ReplayBuffer(folder, 1000, 2, {"x": ("float64", 512)}, {"version": "int"}, checksum=checksum)
    for serial in range(150):
        buffer.store_episode(x=np.full((2, 512), serial), version=0)
    buffer.add_field("zero", ("float64", 512, 0.0))
    buffer.add_field("none", ("int", (), 0), meta=True)
    while leave is not None:
        fill(ballast, leave)
        failed = 0
        for i, change in enumerate(
            (
                lambda: buffer.update(149, version=7),
                lambda: buffer.update(148, x=np.zeros((1, 512))),
                lambda: buffer.update(147, zero=np.ones((1, 512))),
                lambda: buffer.update(146, none=1),
                lambda: buffer.store_datapoint(145, 1, "zero", np.ones(512)),
                lambda: buffer.get_all_data(),
            )
        ):
            try:
                change()
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failed += i < 5
        tell(failed)
        ballast.unlink()
        leave = (leave * 2 or 4096) if failed else None
    buffer.close()
    assert verify(folder) == []


@pytest.mark.parametrize("checksum", ["crc32", None])
def test_a_change_on_a_full_tmpfs_gives_an_error_and_no_signal(tmp_path, checksum):
    """Nobody looks through a map at what was never written: no checksums, or a field of zeros that was added."""
    disk = tmp_path / "disk"
    told = on_tmpfs(disk, lambda tell: changed(disk, tell, checksum))
    assert told[0] > 0 == told[-1]


# A limit, or an error of any kind, at any write


@pytest.mark.parametrize("mode", ["process", "disk"])
def test_a_limit_on_file_sizes_raises_efbig_and_no_signal(tmp_path, mode):
    """Fault 20: mapped stores would pass this limit unseen, so it also shows that there are none."""
    folder = tmp_path / "buffer"

    def work(tell: Callable[[Any], None]) -> None:
        buffer = make(folder, **MODES[mode])
        for serial in range(3):
            buffer.store_episode(**content(serial))
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        rows = np.load(folder / "data" / "image.npy", mmap_mode="r")
        start = rows.offset + 3 * rows.strides[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (start + 100, hard))
        episode = staged(buffer, 3)
        with pytest.raises(OSError, match="File too large") as caught:
            episode.publish()
        assert caught.value.errno == errno.EFBIG
        assert exact(buffer) == exact(folder) == [0, 1, 2]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        episode.publish()
        tell(exact(folder))

    child = in_child(work)
    assert (child.status, child.told) == (0, [[0, 1, 2, 3]])


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (mode, name)
        for mode in MODES
        for name in ("ENOSPC", "EDQUOT", "EROFS", "ENXIO", "EAGAIN")
        if name == "ENOSPC" or "compressed" not in mode
    ],
)
def test_an_error_at_any_write_of_a_publication_leaves_what_was_there(tmp_path, mode, name):
    """Faults 17, 19 and 21: the error is passed on, and the same episode is published at the second try."""
    folder, number = tmp_path / "buffer", getattr(errno, name)
    with make(folder, **MODES[mode]) as buffer:
        for serial in range(RING["max_episodes"] + 2):
            buffer.store_episode(**content(serial))
        for at in range(1, 99):
            before, serial = exact(buffer), following(buffer)
            episode = staged(buffer, serial)
            with system(at=at, error=number, only=("pwrite",)) as faulty:
                try:
                    episode.publish()
                except OSError as error:
                    assert error.errno == number
            if faulty.count < at:
                break
            if episode.state == "published":  # what failed came after the commit, and is made up for
                buffer.flush()
                assert exact(buffer) == exact(folder) == [*before[1:], serial]
                continue
            assert set(before[1:]) <= set(exact(folder, still_open=serial)) <= {*before, serial}
            if at % 2 == 0 and following(ReplayBuffer.from_folder(folder)) == serial:
                episode.abort()  # never tried again: the next one takes its place
                episode = staged(buffer, serial)
            episode.publish()
            assert exact(buffer) == exact(folder) == [*before[1:], serial]
        assert at > 3
    assert not [finding for finding in verify(folder) if finding.lost]


# Space taken or missed at creation


def test_reserve_takes_the_space_at_creation_so_that_no_episode_meets_a_full_disk(tmp_path):
    """Fault 25: the rest of the disk is taken by somebody else, and the whole ring is filled all the same."""
    disk = tmp_path / "disk"

    def work(tell: Callable[[Any], None]) -> None:
        before = free(disk)
        buffer = make(disk / "buffer", reserve=True)
        size = sum(path.stat().st_size for path in (disk / "buffer").rglob("*.npy"))
        assert before - free(disk) >= size > 1 << 20
        fill(disk / "ballast")
        for serial in range(20):
            buffer.store_episode(**content(serial))
        tell(exact(disk / "buffer"))

    assert on_tmpfs(disk, work) == [list(range(20 - RING["max_episodes"], 20))]


@pytest.mark.parametrize("mode", ["process", "power"])
def test_reserve_without_the_space_fails_and_leaves_nothing_behind(tmp_path, mode):
    """Fault 25: all of the space is there again, and a smaller buffer can be made in the same folder."""
    disk = tmp_path / "disk"

    def work(tell: Callable[[Any], None]) -> None:
        (disk / "buffer").mkdir()
        before = free(disk)
        with pytest.raises(OSError, match="No space left") as caught:
            make(disk / "buffer", reserve=True, **SIZES, **MODES[mode])
        assert caught.value.errno == errno.ENOSPC
        assert [path.name for path in (disk / "buffer").rglob("*") if path.is_file()] in ([], [".lock"])
        assert before - free(disk) <= 4 * 4096  # two folders and the lock
        with make(disk / "buffer", reserve=True, **MODES[mode]) as buffer:
            buffer.store_episode(**content(0))
            tell(exact(buffer))

    assert on_tmpfs(disk, work) == [[0]]


@pytest.mark.parametrize("operation", ["create", "truncate", "allocate", "pwrite", "barrier", "rename", "sync_folder"])
def test_an_error_at_any_operation_of_a_creation_leaves_nothing_behind(tmp_path, operation):
    """Faults 25 and 26, without a disk of our own: no file is left, and the same call works afterwards."""
    folder = tmp_path / "buffer"
    for at in range(1, 99):
        with system(at=at, error=errno.ENOSPC, only=(operation,)) as faulty:
            try:
                make(folder, reserve=True).close()
                break
            except OSError as error:
                assert error.errno == errno.ENOSPC
        left = {path.name for path in folder.rglob("*") if path.is_file()}
        if "schema.json" in left:  # what failed came after the last step
            assert exact(folder) == []
            shutil.rmtree(folder)
        else:
            assert left <= {".lock"}
    assert faulty.count >= 1
    assert exact(folder) == []


@pytest.mark.parametrize(
    ("place", "most"),
    [("new/schema.json.new", 0), ("packed", 4000), ("back/data/x.npy", 4000), ("cache/.*/state.npy", 4000)],
)
def test_a_full_disk_is_told_with_the_file_that_finds_no_room(tmp_path, monkeypatch, place, most):
    with ReplayBuffer(tmp_path / "one", 1, 9, {"x": ("uint8", (1000,))}, {"y": ("uint8", (5000,))}) as buffer:
        buffer.store_episode(x=np.ones((9, 1000)), y=np.ones(5000))
    publish(tmp_path / "one", f"file://{tmp_path}/url")
    url, calls = f"file://{tmp_path}/url/one", get_inside("system")
    write = calls.pwrite

    def refuse(fd: int, data: Any, offset: int) -> int:
        if memoryview(data).nbytes > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, offset)

    monkeypatch.setattr(calls, "pwrite", refuse)
    work = {
        "new": lambda: ReplayBuffer(tmp_path / "new", 1, 1, {"x": "int"}),
        "packed": lambda: pack(tmp_path / "one", tmp_path / "packed"),
        "back": lambda: pull(url, tmp_path / "back"),
        "cache": lambda: ReplayBuffer.from_folder(url, cache=tmp_path / "cache").episode(0),
    }
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/{place}'"):
        work[place.partition("/")[0]]()


@pytest.mark.parametrize("options", [{}, {"publish": "step"}, {"stage": "disk"}], ids=str)
def test_a_full_disk_is_told_with_the_folder_that_finds_no_room_for_an_episode(tmp_path, monkeypatch, options):
    set_inside(monkeypatch, staged_bytes=1)
    buffer = ReplayBuffer(tmp_path / "one", 1, 9, {"x": ("uint8", (5000,))}, spare_slots=2, **options)
    calls = get_inside("system")
    write = calls.pwrite

    def refuse(fd: int, data: Any, offset: int) -> int:
        if memoryview(data).nbytes >= 5000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "pwrite", refuse)
        for store in (lambda: buffer.store_episode(x=np.ones((9, 5000))), lambda: one_by_one(buffer)):
            with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/one'"):
                store()
    buffer.close()


def one_by_one(buffer: ReplayBuffer) -> None:
    with buffer.one_episode() as episode:
        for _ in range(9):
            episode.store(x=np.ones(5000))


def test_a_buffer_larger_than_the_free_space_is_created_with_a_warning(tmp_path, caplog):
    """Fault 25: sparse files may be larger than the disk; the log says by how much."""
    with caplog.at_level(logging.WARNING, "memmap_buffer"):
        make(tmp_path / "small").close()
        assert caplog.messages == []
        make(tmp_path / "large", max_timesteps=free(tmp_path) // (RING["max_episodes"] * 4096) + 1).close()
    assert len(caplog.messages) == 1
    assert "may grow to" in caplog.messages[0]
    assert "are free here" in caplog.messages[0]
