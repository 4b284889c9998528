"""Who may write: one process, one object in it, nobody's child; and readers that leave no trace."""

import errno
import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import filelock
import numpy as np
import pytest
from fault_injection import fork, in_child, listing, shown, system
from inside import forgotten_lock_of, set_inside

from memmap_buffer import BufferLockedError, ReadOnlyError, ReplayBuffer, WriterLostError

FIELDS = {"x": ("float", 3), "reward": "float"}


def make(folder, **options):
    return ReplayBuffer(folder, 4, 5, FIELDS, {"task": "int"}, circular=True, **options)


def whole(value):
    return {"x": np.full((2, 3), value), "reward": [value, value]}


def rewards(source):
    return [episode["reward"] for _, episode in shown(source)]


def refused(folder):
    """What a second process is told when it wants to write: (text, pid, host, since), or the rewards it then saw."""

    def work(tell):
        try:
            with ReplayBuffer.from_folder(folder) as second:
                second.store_episode(**whole(99))
                tell(rewards(second))
        except BufferLockedError as error:
            tell([str(error), error.pid, error.host, error.since])

    child = in_child(work)
    assert child.status == 0, child.told
    return child.told[-1]


# Other processes


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path):
    begin = time.time_ns()
    with make(tmp_path) as writer:
        writer.store_episode(**whole(1))
        text, pid, host, since = refused(tmp_path)
        assert (pid, host) == (os.getpid(), socket.gethostname()) and begin <= since <= time.time_ns()
        assert f"process {pid} on {host}, since 20" in text and str(tmp_path) in text
        writer.store_episode(**whole(2))
    assert rewards(tmp_path) == [[1, 1], [2, 2]]


def test_creating_and_overwriting_take_the_lock_and_opening_does_not(tmp_path):
    with make(tmp_path):
        assert refused(tmp_path)[1] is not None
    with make(tmp_path, overwrite=True):
        assert "another writer" in refused(tmp_path)[0]
    with ReplayBuffer.from_folder(tmp_path), make(tmp_path):
        assert refused(tmp_path) == [[99, 99]]


def test_a_second_process_may_not_overwrite_what_another_one_writes(tmp_path):
    def work(tell):
        with pytest.raises(BufferLockedError, match="another writer"):
            make(tmp_path, overwrite=True)

    with make(tmp_path) as writer:
        writer.store_episode(**whole(1))
        assert in_child(work).status == 0
        assert rewards(writer) == rewards(tmp_path) == [[1, 1]]


def test_an_object_opened_after_another_was_closed_holds_the_lock_itself(tmp_path):
    """The closed object is still alive, as in a notebook; what it no longer has cannot be taken over."""
    closed = make(tmp_path)
    closed.close()
    with ReplayBuffer.from_folder(tmp_path) as writer:
        writer.store_episode(**whole(1))
        assert "another writer" in refused(tmp_path)[0]
    with make(tmp_path, overwrite=True):
        assert "another writer" in refused(tmp_path)[0]


def test_the_lock_is_filelocks(tmp_path):
    """What else takes `.lock` by filelock is refused, and refuses."""
    other = filelock.FileLock(tmp_path / ".lock", timeout=0, mode=0o600)
    with make(tmp_path) as writer:
        writer.store_episode(**whole(1))
        with pytest.raises(filelock.Timeout, match="could not be acquired"):
            other.acquire()
    with other, pytest.raises(BufferLockedError, match=f"another writer: process {os.getpid()} on"):
        ReplayBuffer.from_folder(tmp_path).clear()
    assert refused(tmp_path) == [[1, 1], [99, 99]]


# Other objects of the process


def test_a_newer_object_takes_over_when_no_episode_is_open_and_the_older_one_is_told(tmp_path):
    older = make(tmp_path)
    older.store_episode(**whole(1))
    newer = ReplayBuffer.from_folder(tmp_path)
    newer.store_episode(**whole(2))
    for write in (lambda: older.store_episode(**whole(3)), older.begin_episode, older.clear, older.flush):
        with pytest.raises(WriterLostError, match="a newer object of this process writes") as caught:
            write()
        assert caught.value.reason == "taken over"
    assert rewards(older) == [[1, 1], [2, 2]]
    older.close()  # frees nothing that is not its own
    assert "another writer" in refused(tmp_path)[0]
    newer.store_episode(**whole(4))
    newer.close()
    assert refused(tmp_path) == [[1, 1], [2, 2], [4, 4], [99, 99]]


def test_an_open_episode_keeps_the_folder_from_a_newer_object(tmp_path):
    older = make(tmp_path)
    with older.one_episode(task=1):
        older.store(x=[1, 1, 1], reward=1)
        newer = ReplayBuffer.from_folder(tmp_path)
        with pytest.raises(BufferLockedError, match="has an episode open") as caught:
            newer.store_episode(**whole(2))
        assert caught.value.pid == os.getpid()
        with pytest.raises(BufferLockedError, match="has an episode open"):
            make(tmp_path, overwrite=True)
    newer.store_episode(**whole(2))
    assert rewards(newer) == [[1], [2, 2]]
    newer.close()


def test_the_same_folder_by_another_path_is_the_same_lock(tmp_path, monkeypatch):
    older = make(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    for path in ("a", tmp_path / "b", Path("b") / ".." / "a"):
        with ReplayBuffer.from_folder(path) as newer:
            newer.store_episode(**whole(1))
    with pytest.raises(WriterLostError, match="a newer object"):
        older.store_episode(**whole(2))


def test_an_object_that_was_dropped_without_being_closed_holds_nothing(tmp_path):
    writer = make(tmp_path)
    writer.begin_episode().store(x=[1, 1, 1], reward=1)
    before = listing(tmp_path)
    with system() as seen:
        del writer
        gc.collect()
    assert seen.done == [] and listing(tmp_path) == before
    assert refused(tmp_path) == [[99, 99]]


# Forks


def test_an_object_that_another_thread_is_collecting_does_not_keep_the_folder_from_a_newer_one(tmp_path):
    """Its weak references are gone at once, its lock a moment later."""
    older = make(tmp_path)
    older.store_episode(**whole(1))
    lock = forgotten_lock_of(older)
    later = threading.Timer(0.01, lock.release)
    later.start()
    newer = ReplayBuffer.from_folder(tmp_path)
    newer.store_episode(**whole(2))
    later.join()
    assert rewards(newer) == [[1, 1], [2, 2]]


def test_a_forked_child_may_read_and_nothing_it_does_touches_the_parents_lock_or_files(tmp_path):
    """Fault 35: it commits, clears, closes, and exits; each time the parent writes on as if nothing had been."""
    writer = make(tmp_path)
    writer.store_episode(**whole(1))
    episode = writer.begin_episode(task=7)
    episode.store(x=[5, 5, 5], reward=5)
    before = listing(tmp_path)

    def work(tell):
        tell(rewards(writer))
        whole_episode, meta = partial(writer.store_episode, **whole(2)), partial(writer.update, 0, task=3)
        for write in (whole_episode, meta, writer.clear, writer.flush, episode.publish, writer.begin_episode):
            with pytest.raises(WriterLostError, match="forked child may read") as caught:
                write()
            tell(caught.value.reason)
        writer.close()

    child = in_child(work)
    assert child.status == 0, child.told
    assert child.told == [[[1, 1]], *["forked"] * 6]
    assert listing(tmp_path) == before and "another writer" in refused(tmp_path)[0]
    episode.store(x=[6, 6, 6], reward=6)
    episode.publish()
    assert rewards(tmp_path) == [[1, 1], [5, 6]]
    writer.close()


@pytest.mark.parametrize("publish", ["episode", "step"])
def test_a_forked_child_that_ends_the_open_episode_changes_nothing(tmp_path, publish):
    """Fault 35: with `publish="step"` an abort in the child would delete what the parent shows."""
    writer = make(tmp_path, publish=publish)
    writer.store_episode(**whole(1))
    episode = writer.begin_episode()
    episode.store(x=[2, 2, 2], reward=2)
    before, visible = listing(tmp_path), rewards(tmp_path)

    def work(tell):
        error = KeyboardInterrupt()
        leave = partial(episode.__exit__, type(error), error, None)
        for end in (partial(episode.store, x=[3, 3, 3], reward=3), episode.publish, leave, episode.abort, writer.close):
            with suppress(WriterLostError):
                end()

    for _ in range(2):
        assert in_child(work).status == 0
        assert listing(tmp_path) == before and rewards(tmp_path) == visible
    episode.store(x=[4, 4, 4], reward=4)
    episode.publish()
    assert rewards(tmp_path) == [[1, 1], [2, 4]]
    writer.close()


def test_a_child_may_write_to_a_folder_of_which_its_parent_holds_nothing(tmp_path):
    make(tmp_path).close()
    reader = ReplayBuffer.from_folder(tmp_path)

    def work(tell):
        reader.store_episode(**whole(1))
        reader.close()

    assert in_child(work).status == 0
    reader.store_episode(**whole(2))
    assert rewards(reader) == [[1, 1], [2, 2]]
    reader.close()


def test_the_lock_outlives_a_child_that_was_forked_while_it_was_held(tmp_path):
    """Fault 36, the other way round: a child that lives on keeps the lock from nobody."""
    reading, writing = os.pipe()
    with make(tmp_path) as writer:
        writer.store_episode(**whole(1))
        pid = fork()
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        assert refused(tmp_path) == [[1, 1], [99, 99]]
    finally:
        os.close(writing), os.close(reading)
        os.waitpid(pid, 0)


# A lock that does not hold, and a disk that does not answer


def test_a_writer_whose_lock_does_not_hold_is_fenced_by_the_next_ones_term(tmp_path, monkeypatch):
    """Fault 33: `nolock` mounts. The older writer stops at its next publication; both are read exactly."""
    writer = make(tmp_path)
    writer.store_episode(**whole(1))
    episode = writer.begin_episode()
    episode.store(x=[2, 2, 2], reward=2)

    def work(tell):
        class NoLock:
            @classmethod
            def take(cls, name, directory):
                return cls()

            def release(self): ...

        set_inside(pytest.MonkeyPatch(), file_lock=NoLock)
        second = ReplayBuffer.from_folder(tmp_path)
        second.store_episode(**whole(3))
        tell(rewards(second))

    assert in_child(work).told == [[[1, 1], [3, 3]]]
    for write in (episode.publish, lambda: writer.store_episode(**whole(4)), writer.clear, writer.begin_episode):
        with pytest.raises(WriterLostError, match="another process took the folder over") as caught:
            write()
        assert caught.value.reason == "fenced"
    assert rewards(writer) == rewards(tmp_path) == [[1, 1], [3, 3]]
    before = listing(tmp_path)
    writer.close()
    assert listing(tmp_path) == before
    with ReplayBuffer.from_folder(tmp_path) as third:
        third.store_episode(**whole(5))
        assert rewards(third) == [[1, 1], [3, 3], [5, 5]]


def test_after_a_failed_barrier_nothing_more_is_written_until_the_folder_is_opened_anew(tmp_path):
    """Fault 22: the second fsync, which succeeds, is never believed."""
    writer = make(tmp_path, durability="power")
    writer.store_episode(**whole(1))
    with system(2, error=errno.EIO, only=("barrier",)), pytest.raises(OSError, match="Input/output error"):
        writer.store_episode(**whole(2))
    before = listing(tmp_path)
    for write in (lambda: writer.store_episode(**whole(3)), writer.flush, writer.clear, writer.begin_episode):
        with pytest.raises(WriterLostError, match="a barrier failed") as caught:
            write()
        assert caught.value.reason == "poisoned"
    writer.close()
    assert listing(tmp_path) == before
    with ReplayBuffer.from_folder(tmp_path) as again:
        again.store_episode(**whole(4))
        assert rewards(again)[0] == [1, 1] and rewards(again)[-1] == [4, 4]


def test_an_episode_that_a_failed_barrier_left_open_does_not_stand_in_the_way_of_a_new_object(tmp_path):
    writer = make(tmp_path, durability="power")
    writer.store_episode(**whole(1))
    left = writer.begin_episode()
    with system(1, error=errno.EIO, only=("barrier",)), pytest.raises(OSError, match="Input/output error"):
        writer.flush()
    with ReplayBuffer.from_folder(tmp_path) as again:
        again.store_episode(**whole(2))
        assert rewards(again) == [[1, 1], [2, 2]]
    with pytest.raises(WriterLostError, match="newer object"):
        left.store(**{name: rows[0] for name, rows in whole(3).items()})
        left.publish()


# Readers


@pytest.mark.parametrize("alive", [False, True], ids=["no writer", "beside a writer"])
def test_readers_need_no_lock_and_change_no_file(tmp_path, alive):
    """Every byte and time is as before, whichever way it was opened and read."""
    writer = make(tmp_path)
    for i in range(6):
        writer.store_episode(**whole(i))
    if not alive:
        writer.close()
        (tmp_path / ".lock").unlink(missing_ok=True)
    before = listing(tmp_path)
    with system() as seen:
        for reader in (ReplayBuffer.from_folder(tmp_path), ReplayBuffer.from_folder(tmp_path, read_only=True)):
            assert rewards(reader) == [[i, i] for i in range(2, 6)]
            assert len(list(reader.dataloader(batch_size=3, timestep_level=True, shuffle=True))) == 3
            reader.sample(4, n_steps=2)
            reader.get_all_data()
            reader.refresh()
            reader.flush()
            reader.close()
            reader.close()
            del reader
            gc.collect()
    assert seen.done == [] and listing(tmp_path) == before


def test_a_folder_without_write_permission_can_be_read(tmp_path):
    """Fault 40; root, whom no permission stops, becomes nobody for it."""
    with make(tmp_path / "buffer") as writer:
        writer.store_episode(**whole(1))
    public = Path(tempfile.mkdtemp())
    try:
        folder = shutil.copytree(tmp_path / "buffer", public / "buffer")
        (folder / ".lock").unlink()
        for path in (public, folder, *folder.rglob("*")):
            if os.geteuid() == 0:
                os.chown(path, 65534, 65534)
            path.chmod(0o500 if path.is_dir() else 0o400)
        before = listing(folder)

        def work(tell):
            if os.geteuid() == 0:
                os.setegid(65534), os.seteuid(65534)
            reader = ReplayBuffer.from_folder(folder)
            tell(rewards(reader))
            with pytest.raises(ReadOnlyError, match=rf"{folder}/\.lock: Permission denied: .* with read_only=True"):
                reader.store_episode(**whole(2))
            tell(rewards(reader))

        child = in_child(work)
        assert child == (0, [[[1, 1]]] * 2), child.told
        assert listing(folder) == before
    finally:
        for path in (public, *public.glob("**/")):
            path.chmod(0o700)
        shutil.rmtree(public)


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_the_end_of_the_program_writes_nothing_of_an_open_episode(tmp_path):
    """Fault 7: the interpreter exits, with an episode open and the buffer not closed."""
    program = f"""
import pathlib
from memmap_buffer import ReplayBuffer
buffer = ReplayBuffer({str(tmp_path)!r}, 4, 5, {FIELDS!r}, {{"task": "int"}}, circular=True)
buffer.store_episode(x=[[1, 1, 1]], reward=[1])
episode = buffer.begin_episode()
episode.store(x=[2, 2, 2], reward=2)
for path in sorted(pathlib.Path({str(tmp_path)!r}).rglob("*.npy")):
    print(path.stat().st_mtime_ns)
"""
    told = run(program)
    assert told == [str(path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*.npy"))]
    assert rewards(tmp_path) == [[1]]


def test_a_buffer_may_be_closed_by_a_finaliser_at_the_end_of_the_program(tmp_path):
    program = f"""
from memmap_buffer import ReplayBuffer
class Recorder:
    def __init__(self):
        self.buffer = ReplayBuffer({str(tmp_path)!r}, 4, 5, {FIELDS!r}, {{"task": "int"}}, circular=True)
        self.buffer.store_episode(x=[[1, 1, 1]], reward=[1])
    def __del__(self):
        self.buffer.close()
        print("closed")
import builtins
builtins.recorder = Recorder()
"""
    assert run(program) == ["closed"]
    assert rewards(tmp_path) == [[1]]


def test_a_forked_child_that_exits_like_any_program_leaves_the_lock_held(tmp_path):
    """Fault 35: exit handlers and finalizers of everything that it inherited run in the child."""
    program = f"""
import fcntl, os, sys, warnings; warnings.simplefilter("ignore")
from memmap_buffer import ReplayBuffer
buffer = ReplayBuffer({str(tmp_path)!r}, 4, 5, {FIELDS!r}, {{"task": "int"}}, circular=True)
episode = buffer.begin_episode()
episode.store(x=[1, 1, 1], reward=1)
pid = os.fork()
if pid == 0:
    sys.exit()
os.waitpid(pid, 0)
try:
    fcntl.flock(os.open({str(tmp_path / ".lock")!r}, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("held")
episode.publish()
"""
    assert run(program) == ["held"] and rewards(tmp_path) == [[1]]
