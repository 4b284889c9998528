"""`publish_to`: what a recorder leaves behind is at the URL, each episode once, whoever dies and whatever fails."""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import in_child
from fsspec.implementations.local import LocalFileSystem
from inside import folders_of, get_inside, let_go, lock_folder, place_of, publish_now, set_inside, turn_of
from range_server import RangeServer

from memmap_buffer import (
    BufferFullError,
    BufferLockedError,
    ConcatBuffer,
    EpisodeStateError,
    Field,
    MemmapBufferError,
    NotABufferError,
    RemoteError,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    pack,
    publish,
    shards_at,
    verify,
)

pytest.importorskip("fsspec")

PUBLISHED = "published"  # the folder of shards that are in the store
SIZES: dict[str, Any] = {"max_episodes": 20, "max_timesteps": 8}
FIELDS = {"number": "int", "x": Field("float32", 2, final=True), "terminated": ("bool", (), False)}


def recorder(place: Path, **options: Any) -> ReplayBuffer:
    given = {**SIZES, "fields": FIELDS, "shard": "auto", "publish_to": f"file://{place}/url", **options}
    return ReplayBuffer(place / "root", **given)


def columns(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    length = 1 + number % 8
    return {"number": np.full(length, number), "x": rng.random((length + 1, 2), np.float32)}


def record(buffer: ReplayBuffer, numbers: range) -> None:
    for number in numbers:
        buffer.store_episode(**columns(number))


def published(place: Path) -> list[int]:
    """The numbers of the episodes at the URL, each as it was recorded."""
    data = ConcatBuffer.from_root(f"file://{place}/url", cache=place / "cache")
    found = [data.episode(i) for i in range(len(data))]
    for episode in found:
        wanted = columns(int(episode["number"][0]))
        assert all(np.array_equal(episode[name], rows) for name, rows in wanted.items())
    return [int(episode["number"][0]) for episode in found]


def sizes(place: Path) -> list[int]:
    return [shard.episodes for shard in shards_at(f"file://{place}/url").values()]


def left(place: Path) -> list[Path]:
    return get_inside("shards_in")(place / "root")


def kept(place: Path) -> list[Path]:
    return get_inside("shards_in")(place / "root" / PUBLISHED)


def names(place: Path) -> list[str]:
    """All that is in the root."""
    return sorted(path.name for path in (place / "root").iterdir())


def wait_for_publishing() -> None:
    """Until the threads of recorders have done what there was."""
    for thread in threading.enumerate():
        if thread.name == "memmap-buffer publish":
            thread.join()


def idle_recorder(place: Path, **options: Any) -> ReplayBuffer:
    """One whose thread has looked at what was there before it."""
    buffer = recorder(place, **options)
    wait_for_publishing()
    return buffer


class Offline:
    """A store that fails as long as this lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self.asked = monkeypatch, 0

    def __enter__(self) -> Offline:
        def failing(objects: Any, path: str, *_: Any) -> None:
            self.asked += 1
            url = objects.name_of(path)
            raise RemoteError(f"{url}: gone", url=url, asked="write", came="gone", tries=1, missing=False)

        self._context = self._patch.context()
        set_inside(self._context.__enter__(), write_object=failing)
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def test_every_n_episodes_are_a_shard_and_the_rest_is_published_at_the_end(tmp_path: Path) -> None:
    with recorder(tmp_path, publish_every=4) as buffer:
        record(buffer, range(10))
        assert len(buffer) == 2  # it shows the shard that is being recorded
    assert published(tmp_path) == list(range(10))
    assert sizes(tmp_path) == [4, 4, 2]
    assert left(tmp_path) == []
    assert [verify(path) for path in kept(tmp_path)] == [[], [], []]
    there = [*shards_at(f"file://{tmp_path}/url")]
    assert there == [path.name for path in kept(tmp_path)]
    assert len({name.rpartition("-")[0] for name in there}) == 1


def test_a_relative_path_is_that_of_the_moment_when_recording_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with ReplayBuffer("root", **SIZES, fields=FIELDS, shard="auto", publish_to=f"file://{tmp_path}/url") as buffer:
        monkeypatch.chdir("there")
        record(buffer, range(30))
    assert published(tmp_path) == [*range(30)]
    assert not any((tmp_path / "there").iterdir())


def test_a_relative_folder_to_publish_to_is_that_of_the_moment_when_recording_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with ReplayBuffer("root", **SIZES, fields=FIELDS, shard="auto", publish_to="url") as buffer:
        monkeypatch.chdir("there")
        record(buffer, range(30))
    assert published(tmp_path) == [*range(30)]
    assert not any((tmp_path / "there").iterdir())


def test_shards_of_a_recorder_are_published_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with idle_recorder(tmp_path, publish_every=2) as buffer:
        with monkeypatch.context() as patch:
            set_inside(patch, begin_publishing=lambda _: None)
            record(buffer, range(5))
            buffer.flush()
        before, lock = left(tmp_path), lock_folder(left(tmp_path)[0])
        publish_now(buffer)
        wait_for_publishing()
        assert left(tmp_path) == before  # as the first of three is in use
        lock.release()
    assert published(tmp_path) == list(range(5))


def test_recorders_that_share_nothing_name_their_shards_apart(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/url"
    for host in range(2):
        with recorder(tmp_path / str(host), publish_to=url, publish_every=2) as buffer:
            record(buffer, range(3 * host, 3 * host + 3))
    assert sorted(published(tmp_path)) == list(range(6))
    assert len(shards_at(url)) == 4


def test_two_recorders_of_one_root_leave_each_others_shard_alone(tmp_path: Path) -> None:
    with recorder(tmp_path, publish_every=2) as one, recorder(tmp_path, publish_every=2) as two:
        for number in range(8):
            record((one, two)[number % 2], range(number, number + 1))
    assert sorted(published(tmp_path)) == list(range(8))
    assert sizes(tmp_path) == [2] * 4


def test_a_shard_is_published_beside_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode is recorded while a shard is being sent, which waits for it."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*given: Any, **options: Any) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        return publish(*given, **options)

    set_inside(monkeypatch, publish=slow)
    with recorder(tmp_path, publish_every=2) as buffer:
        record(buffer, range(2))
        assert begun.wait(60)
        record(buffer, range(2, 7))
        assert not (tmp_path / "url" / "root.json").exists()
        go_on.set()
    assert sorted(published(tmp_path)) == list(range(7))


def test_after_some_time_what_is_finished_is_published_and_open_episodes_go_on(tmp_path: Path) -> None:
    with recorder(tmp_path, publish_every=datetime.timedelta(seconds=0.05)) as buffer:
        begun = buffer.begin_episode()
        begun.store(number=1, x=columns(1)["x"][0])
        first = buffer.folder
        record(buffer, range(3))
        while buffer.folder == first:
            os.sched_yield()
        while not (tmp_path / "url" / "root.json").exists():
            os.sched_yield()
        assert sizes(tmp_path)[0] <= 3
        begun.store(number=1, x=columns(1)["x"][1])
        begun.final(x=columns(1)["x"][2])
        begun.publish()
    assert sorted(published(tmp_path)) == [0, 1, 1, 2]


def test_open_episodes_go_on_in_the_next_shard(tmp_path: Path) -> None:
    """By a handle, in a block, in a batch, dropped, and by a thread that waits for its turn."""
    with recorder(tmp_path, publish_every=2) as buffer:
        handle, dropped = buffer.begin_episode(), buffer.begin_episode()
        rows = columns(3)
        for t in range(2):
            handle.store(number=3, x=rows["x"][t])
            dropped.store(number=3, x=rows["x"][t])
        first = buffer.folder
        record(buffer, range(2))
        assert buffer.folder != first
        for t in range(2, 4):
            handle.store(number=3, x=rows["x"][t])
        handle.final(x=rows["x"][4])
        before = buffer.folder
        with turn_of(buffer):  # a publication waits while the shard is handed on
            thread = threading.Thread(target=handle.publish)
            thread.start()
            record(buffer, range(18, 20))
        thread.join()
        assert buffer.folder != before
        assert handle.state == "published"
        dropped.abort()
        with buffer.batched_episode(2) as group:
            group.store(number=[8, 8], x=np.zeros((2, 2)))
            record(buffer, range(4, 7))
            group.episodes[0].abort()
            group.episodes[1].abort()
        rows, folders = [columns(number) for number in (9, 17)], []
        with buffer.batched_episode(2) as group:
            for t in range(2):
                group.store(number=[9, 17], x=[each["x"][t] for each in rows])
                folders.append(buffer.folder)
                if t == 0:
                    record(buffer, range(11, 13))
            group.final(x=[each["x"][2] for each in rows])
        assert folders[0] != folders[1]
    assert sorted(published(tmp_path)) == [0, 1, 3, 4, 5, 6, 9, 11, 12, 17, 18, 19]


@pytest.mark.parametrize("every", [3, 7])
def test_environments_that_run_on_lose_no_step_and_no_final_observation(tmp_path: Path, every: int) -> None:
    """Episodes that end, and those that are cut as they are too long, whose final observation comes a step later."""
    chance, steps, alone = np.random.default_rng(0), 24, tmp_path / "alone"
    with (
        recorder(tmp_path, publish_every=every) as buffer,
        ReplayBuffer(alone, 200, 8, FIELDS) as plain,
    ):
        for t in range(steps):
            step: dict[str, Any] = {
                "number": np.arange(3) * 1000 + t,
                "x": np.stack([np.full(2, env * 1000 + t, np.float32) for env in range(3)]),
                "terminated": chance.random(3) < 0.1,
            }
            buffer.add(**step)
            plain.add(**step)
        plain.end_episodes()
        expected = [plain.episode(i) for i in range(len(plain))]
    data = ConcatBuffer.from_root(f"file://{tmp_path}/url", cache=tmp_path / "cache")
    got = {int(episode["number"][0]): episode for episode in (data.episode(i) for i in range(len(data)))}
    assert len(got) == len(data) == len(expected)
    for episode in expected:
        for name, rows in episode.items():
            np.testing.assert_array_equal(got[int(episode["number"][0])][name], rows, err_msg=name)
    assert max(sizes(tmp_path)) < every + 3


def test_a_shard_that_has_no_room_is_followed_by_another(tmp_path: Path) -> None:
    with recorder(tmp_path, max_episodes=3) as buffer:
        record(buffer, range(8))
        episodes = [buffer.begin_episode() for _ in range(3)]
        with pytest.raises(BufferFullError, match="3"):
            buffer.begin_episode()
        del episodes
    assert published(tmp_path) == list(range(8))
    assert max(sizes(tmp_path)) == 3


def test_errors_of_steps_are_given_to_the_shard_that_they_are_in(tmp_path: Path) -> None:
    with recorder(tmp_path, publish_every=2) as buffer:
        for number in range(5):
            buffer.store_episode(**columns(number), priority=np.full(1 + number % 8, number + 1.0))
        given = buffer.priorities(np.array([[0, 0]]))
        assert len(buffer) == 1
        buffer.update_priorities(np.array([[0, 0]]), np.array([5.0]))
        assert buffer.priorities(np.array([[0, 0]])) == given


def test_a_shard_is_published_in_time_though_an_episode_is_cut_at_every_step(tmp_path: Path) -> None:
    """Whose final observation is still to come whenever it is looked."""
    every = datetime.timedelta(seconds=0.001)
    with recorder(tmp_path, publish_every=every, max_timesteps=1, max_episodes=50_000) as buffer:
        first, t = buffer.folder, 0
        while buffer.folder == first:
            buffer.add(number=[t], x=np.full((1, 2), t))
            t += 1
            assert t < 20_000
    data = ConcatBuffer.from_root(f"file://{tmp_path}/url", cache=tmp_path / "cache")
    episodes = [data.episode(i) for i in range(len(data))]
    assert [int(episode["number"][0]) for episode in episodes] == list(range(t))
    assert all(episode["x"][-1, 0] == episode["number"][0] + 1 for episode in episodes[:-1])


def test_the_space_of_every_shard_is_reserved(tmp_path: Path) -> None:
    with recorder(tmp_path, publish_every=2, reserve=True) as buffer:
        for number in range(5):
            record(buffer, range(number, number + 1))
            assert np.load(buffer.folder / "state.npy")["reserved"] == 1


def test_the_errors_of_an_episode_are_given_to_it_though_its_publication_failed_in_the_shard_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it had a number as long as it was tried; another one has it in the next shard."""
    with recorder(tmp_path, publish_every=2) as buffer:
        episode = buffer.begin_episode()
        episode.store(number=0, x=columns(0)["x"][0])
        episode.final(x=columns(0)["x"][1])
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            set_inside(patch, commit=raising(OSError(28, "No space left on device")))
            episode.publish()
        assert episode.serial == -1
        record(buffer, range(1, 3))
        episode.publish()
        assert episode.serial == 0 and len(buffer) == 1
    assert sorted(published(tmp_path)) == [0, 1, 2]


# A shard that cannot be finished, or followed by another


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


class Failing:
    """What a thread's `start` does: its first calls fail."""

    def __init__(self, error: BaseException, times: int) -> None:
        self._error, self._left, self._start = error, times, threading.Thread.start

    def __call__(self, thread: threading.Thread) -> None:
        self._left -= 1
        if self._left >= 0:
            raise self._error
        self._start(thread)


@pytest.mark.parametrize("every", [2, datetime.timedelta(microseconds=1)])
def test_where_no_thread_can_be_started_recording_goes_on_and_the_next_shard_or_close_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(RuntimeError("can't start new thread"), 3)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: failing(thread))
    buffer = recorder(tmp_path, publish_every=every)
    record(buffer, range(8))
    wait_for_publishing()
    assert sorted(published(tmp_path))[:2] == [0, 1]
    assert "can't start new thread" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("none left")))
        record(buffer, range(8, 11))
        buffer.close()
    assert sorted(published(tmp_path)) == list(range(11))


def test_an_interruption_while_a_thread_is_started_ends_no_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = idle_recorder(tmp_path, publish_every=2)
    failing = Failing(KeyboardInterrupt("here"), 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="here"):
        patch.setattr(threading.Thread, "start", lambda thread: failing(thread))
        record(buffer, range(2))
    record(buffer, range(2, 4))
    wait_for_publishing()
    assert sorted(published(tmp_path)) == list(range(4))
    buffer.close()


def test_an_error_while_a_shard_is_finished_strands_no_open_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with recorder(tmp_path, publish_every=2) as buffer:
        rows, handle = columns(4), buffer.begin_episode()
        for t in range(5):
            handle.store(number=4, x=rows["x"][t])
        handle.final(x=rows["x"][5])
        with monkeypatch.context() as patch:
            set_inside(patch, commit_pending=raising(OSError(28, "No space left on device")))
            record(buffer, range(2))
        assert "no shard can be begun after it yet" in caplog.text
        record(buffer, range(2, 4))
        handle.publish()
    assert sorted(published(tmp_path)) == list(range(5))
    assert names(tmp_path) == [PUBLISHED]


@pytest.mark.parametrize("name", ["create_buffer", "take_over"])
def test_a_shard_that_could_not_be_begun_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    buffer = idle_recorder(tmp_path, publish_every=2)
    begun = names(tmp_path)
    with monkeypatch.context() as patch:
        set_inside(patch, **{name: raising(OSError(28, "No space left"))})
        record(buffer, range(5))  # there is room
        assert names(tmp_path) == begun
        with pytest.raises(OSError, match="No space left"):
            recorder(tmp_path)
        assert names(tmp_path) == begun
    record(buffer, range(5, 7))
    buffer.close()
    assert published(tmp_path) == list(range(7))
    assert sizes(tmp_path) == [5, 2]


def test_a_shard_that_could_not_be_begun_leaves_no_folder_though_a_thread_takes_its_lock_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmdir, taken = os.rmdir, []

    def beside(path: Any, *args: Any, **kwargs: Any) -> None:
        if not taken:  # of the folder: the files are gone
            (entry,) = (tmp_path / "root").iterdir()
            taken.append(lock_folder(entry))
        rmdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "rmdir", beside)
    set_inside(monkeypatch, begin_writing=raising(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        recorder(tmp_path)
    taken[0].release()
    assert names(tmp_path) == []


def test_who_may_not_write_any_more_begins_no_shard(tmp_path: Path) -> None:
    """A forked child, and whoever closed the buffer."""
    buffer = idle_recorder(tmp_path, max_episodes=2)
    record(buffer, range(2))
    begun = names(tmp_path)

    def store(tell: Callable[[Any], None]) -> None:
        try:
            record(buffer, range(2, 3))
        except MemmapBufferError as error:
            tell(str(error))

    assert "a forked child may read, not write" in in_child(store).told[0]
    assert names(tmp_path) == begun
    buffer.close()
    with pytest.raises(EpisodeStateError, match="the buffer was closed"):
        buffer.begin_episode()
    assert names(tmp_path) == [PUBLISHED]


# Learners


def test_a_learner_looks_by_one_request_and_sees_new_shards_by_one_more_for_each_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    set_inside(monkeypatch, root_look_seconds=-1.0)
    with recorder(tmp_path, publish_every=2) as buffer, RangeServer(tmp_path / "url") as server:
        record(buffer, range(2))
        wait_for_publishing()
        data = ConcatBuffer.from_root(server.url, cache=tmp_path / "cache")
        server.requests.clear()
        assert len(data) == 2
        assert [request.path.rpartition("/")[2] for request in server.requests] == ["root.json"]
        for number in range(2, 14, 2):
            record(buffer, range(number, number + 2))
            wait_for_publishing()
            server.requests.clear()
            assert len(data) == number + 2
            assert len(server.requests) == 2  # root.json, and the heads of what is new
        record(buffer, range(14, 20))
        wait_for_publishing()
        server.requests.clear()
        assert sorted(int(data.episode(i)["number"][0]) for i in range(len(data))) == list(range(20))
        asked = [request.path for request in server.requests if "/data/" not in request.path]
        assert len([path for path in asked if "/heads/" in path]) <= 3


def test_shards_with_numbers_and_without_keep_their_numbers_in_one_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was published by hand, as shard-00001, and then those of recorders; a worker has the same numbers."""
    set_inside(monkeypatch, root_look_seconds=-1.0)
    url = f"file://{tmp_path}/url"
    with ReplayBuffer(tmp_path / "shard-00001", **SIZES, fields=FIELDS) as alone:
        record(alone, range(2))
    publish(alone.folder, url)
    data = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
    assert (len(data), data.shards) == (2, (1,))
    with recorder(tmp_path, publish_every=2) as buffer:
        record(buffer, range(2, 8))
    assert sorted(int(data.episode(i)["number"][0]) for i in range(len(data))) == list(range(8))
    assert len(set(data.shards)) == 4 and data.shards[0] == 1
    copied = pickle.loads(pickle.dumps(folders_of(data)))
    assert copied.numbers.tolist() == folders_of(data).numbers.tolist()
    assert [each.layout.id for each in copied.storages] == [each.layout.id for each in folders_of(data).storages]


# Who reads the folder of a recorder


@pytest.mark.parametrize("keep", [None, 0])
def test_a_reader_of_a_shard_that_was_moved_or_removed_since_reads_on_what_is_in_it(
    tmp_path: Path, keep: int | None
) -> None:
    with recorder(tmp_path, publish_every=4, keep_published=keep) as buffer:
        record(buffer, range(1))
        (path,) = left(tmp_path)
        readers = [ConcatBuffer.from_root(tmp_path / "root"), ReplayBuffer.from_folder(path)]
        loaders = [reader.dataloader(4, timestep_level=True) for reader in readers]
        record(buffer, range(1, 7))  # of which readers have not seen anything
        wait_for_publishing()
        assert not path.exists()
        for reader, loader in zip(readers, loaders, strict=True):
            assert len(reader) == 4
            for i in range(4):
                episode = reader.episode(i)
                assert all(np.array_equal(episode[name], rows) for name, rows in columns(i).items())
            assert set(reader.sample(64, timestep_level=True, seed=0)["number"].tolist()) == set(range(4))
            assert {number for batch in loader for number in batch["number"].tolist()} == set(range(4))


def test_what_was_published_is_not_there_and_the_error_says_where_it_is(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with recorder(tmp_path) as buffer:
        record(buffer, range(2))
        (path,) = left(tmp_path)
    moved = re.escape(str(root / PUBLISHED / path.name))
    with pytest.raises(NotABufferError, match=f"{path.name}: .*published, and moved to {moved}; read .* by the URL"):
        ReplayBuffer.from_folder(path)
    with pytest.raises(NotABufferError, match=f"{root}: no subfolder .*published, and moved to {moved}; read .* URL"):
        ConcatBuffer.from_root(root)


def test_a_root_is_looked_at_again_where_a_shard_was_moved_before_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, real = list[list[Path]](), get_inside("folders_in")
    with recorder(tmp_path, publish_every=2) as buffer:
        record(buffer, range(1))

        def late(root: Path) -> list[Path]:
            listed.append(real(root))
            if len(listed) == 1:
                record(buffer, range(1, 3))
                wait_for_publishing()
            return listed[-1]

        set_inside(monkeypatch, folders_in=late)
        data = ConcatBuffer.from_root(tmp_path / "root")
        assert [int(data.episode(i)["number"][0]) for i in range(len(data))] == [2]
        assert listed[0] != listed[1] == listed[2]


# A store that fails


def test_a_store_that_fails_is_told_at_the_end_and_what_it_lacks_is_sent_by_the_next_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = recorder(tmp_path, publish_every=2)
    with Offline(monkeypatch):
        record(buffer, range(5))
        with pytest.raises(
            RemoteError, match=r"3 shards are not published to file.*; they are whole there.*gone"
        ) as told:
            buffer.close()
    assert all(path.name in str(told.value) for path in left(tmp_path))
    assert len(left(tmp_path)) == 3
    assert [record.levelno for record in caplog.records if "is not published to" in record.message][:1] == [
        logging.WARNING
    ]
    with recorder(tmp_path, publish_every=2) as buffer:
        record(buffer, range(5, 6))
    assert sorted(published(tmp_path)) == list(range(6))
    assert left(tmp_path) == []


def test_what_failed_is_tried_again_with_the_next_shard_and_by_closing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = recorder(tmp_path, publish_every=2)
    with Offline(monkeypatch) as store:
        record(buffer, range(2))
        wait_for_publishing()
        assert store.asked
    record(buffer, range(2, 4))
    wait_for_publishing()
    assert sorted(published(tmp_path)) == list(range(4))
    record(buffer, range(4, 5))
    with Offline(monkeypatch), pytest.raises(RemoteError, match="1 shards are not published"):
        buffer.close()
    buffer.close()
    buffer.close()
    assert sorted(published(tmp_path)) == list(range(5))


def test_a_recorder_whose_credentials_are_refused_says_so_once_and_then_how_many_shards_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether what is refused is all, or to write alone; and again once it worked meanwhile."""

    def refused(_: Any, path: str, *__: Any, **___: Any) -> Any:
        raise PermissionError(13, "Access Denied", path)

    buffer = idle_recorder(tmp_path, publish_every=1)
    for life, kinds in enumerate([("put_file", "pipe_file"), ("cat_file", "info", "ls", "put_file", "pipe_file")]):
        with monkeypatch.context() as patch:
            for name in kinds:
                patch.setattr(LocalFileSystem, name, refused)
            caplog.clear()
            for number in range(3 * life, 3 * life + 3):
                record(buffer, range(number, number + 1))
                wait_for_publishing()
            said = [entry.message for entry in caplog.records if entry.levelno >= logging.WARNING]
            assert ["Access Denied" in line for line in said] == [True, False, False]
            assert [line.partition(" shards are not published to ")[0][-1] for line in said[1:]] == [*"23"]
            publish_now(buffer)
            wait_for_publishing()
            assert len(caplog.records) == len(said)  # as many as before wait
        publish_now(buffer)
        wait_for_publishing()
        assert published(tmp_path) == list(range(3 * life + 3))
    buffer.close()


def record_unpublished(buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch, numbers: range) -> None:
    """Record shards that `close` has to publish."""
    with monkeypatch.context() as patch:
        set_inside(patch, begin_publishing=lambda _: None)
        record(buffer, numbers)


def test_a_store_that_cannot_be_reached_is_tried_by_one_shard_and_asked_once_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_inside(monkeypatch, first_pause=0.001, longest_pause=0.001)
    caplog.set_level(logging.INFO, "memmap_buffer")
    buffer = idle_recorder(tmp_path, publish_every=1)
    record_unpublished(buffer, monkeypatch, range(5))
    asked = []

    def gone(store: Any, path: str, *_: Any, **__: Any) -> Any:
        asked.append(path)
        raise ConnectionError("no way there")

    with monkeypatch.context() as patch:
        for name in ("cat_file", "info", "ls", "put_file", "pipe_file"):
            patch.setattr(LocalFileSystem, name, gone)
        for tries in (get_inside("tries") + 1, 1):
            caplog.clear()
            with pytest.raises(RemoteError, match=r"5 shards are not published to .*no way there"):
                buffer.close()
            assert len(asked) == tries
            asked.clear()
            first = caplog.records[0].message
            assert "closing: 5 shards are left to be published to" in first
            assert ("which did not answer" in first) == (tries == 1)
            assert (f"5 shards are not published to file://{tmp_path}/url yet" in caplog.text) == (tries > 1)
    buffer.close()
    assert published(tmp_path) == list(range(5))
    assert left(tmp_path) == []


def test_a_shard_that_fails_alone_keeps_no_other_from_being_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = idle_recorder(tmp_path, publish_every=1)
    record_unpublished(buffer, monkeypatch, range(4))
    spoilt, write = left(tmp_path)[0].name, get_inside("write_object")

    def writing(store: Any, path: str, data: Any) -> None:
        if path.startswith(spoilt):
            raise RemoteError("spoilt", url=path, asked="write", came="", tries=6, missing=False)
        write(store, path, data)

    with monkeypatch.context() as patch:
        set_inside(patch, write_object=writing)
        with pytest.raises(RemoteError, match=f"1 shards are not published to .*: {spoilt};"):
            buffer.close()
    assert published(tmp_path) == [1, 2, 3]
    buffer.close()
    assert sorted(published(tmp_path)) == [0, 1, 2, 3]


def test_an_error_of_another_kind_stops_no_rollout_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> list[int]:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        set_inside(patch, publish=full)
        buffer = recorder(tmp_path, publish_every=1)
        record(buffer, range(3))
        with pytest.raises(MemmapBufferError, match=r"3 shards are not published .* No space left"):
            buffer.close()
    with recorder(tmp_path):
        pass
    assert sorted(published(tmp_path)) == list(range(3))


def test_shards_whose_last_writes_fail_are_published_as_they_are_by_one_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several that wait for it, as nothing was published meanwhile."""
    buffer = idle_recorder(tmp_path, publish_every=2)
    with monkeypatch.context() as patch:
        set_inside(patch, begin_publishing=lambda _: None)
        record(buffer, range(7))
    flush, failed = get_inside("flush"), []

    def full(writer: Any) -> None:
        if writer.storage.path != buffer.folder:
            failed.append(writer)
            raise OSError(28, "No space left on device")
        flush(writer)

    set_inside(monkeypatch, flush=full)
    buffer.close()
    assert len(failed) == 3
    assert sorted(published(tmp_path)) == list(range(7))
    assert left(tmp_path) == []


def test_close_waits_for_another_recorder_that_is_publishing_a_shard_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = idle_recorder(tmp_path)
    record(buffer, range(2))
    let_go(buffer)
    lock = lock_folder(buffer.folder)
    waited = []

    def end_of_the_other(seconds: float) -> None:
        waited.append(left(tmp_path))
        lock.release()

    set_inside(monkeypatch, publisher_sleep=end_of_the_other)
    buffer.close()
    monkeypatch.undo()
    assert waited == [[buffer.folder]] and left(tmp_path) == []
    assert published(tmp_path) == [0, 1]


def test_close_says_which_shard_of_this_recorder_another_one_holds_for_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_inside(monkeypatch, publisher_wait_seconds=0.0)
    buffer = idle_recorder(tmp_path)
    record(buffer, range(2))
    let_go(buffer)
    lock = lock_folder(buffer.folder)
    with pytest.raises(BufferLockedError, match=f"1 shards are not published.*{buffer.folder.name}.*another writer"):
        buffer.close()
    lock.release()
    buffer.close()
    assert published(tmp_path) == [0, 1]


AT_EXIT = """
    import atexit, sys
    from memmap_buffer import RemoteError, ReplayBuffer

    def close():
        try:
            buffer.close()
        except RemoteError as error:
            print(error)

    place = sys.argv[1]
    buffer = ReplayBuffer(place + "/root", 20, 8, {"x": "int"}, shard="auto", publish_to="file://" + place + "/url")
    buffer.store_episode(x=[1, 2])
    atexit.register(close)
"""


def test_publishing_while_the_program_ends_is_refused_at_once_and_what_to_do_is_told(tmp_path: Path) -> None:
    program = [sys.executable, "-c", textwrap.dedent(AT_EXIT), str(tmp_path)]
    told = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert "tries: 1" in told and "while the program ends; close() what needs it earlier" in told
    with recorder(tmp_path, fields={"x": "int"}):
        pass
    assert sizes(tmp_path) == [1]


# What stays on the disk


@pytest.mark.parametrize("keep", [0, 1, None])
def test_so_many_published_shards_are_kept_and_no_others(tmp_path: Path, keep: int | None) -> None:
    for life in range(2):
        with recorder(tmp_path, publish_every=2, keep_published=keep) as buffer:
            record(buffer, range(4 * life, 4 * life + 4))
            wait_for_publishing()
            assert len(kept(tmp_path)) == (2 * life + 2 if keep is None else keep)
    newest = [int(ReplayBuffer.from_folder(path).episode(0)["number"][0]) for path in kept(tmp_path)]
    assert sorted(newest) == [0, 2, 4, 6][4 - len(newest) :]
    assert sorted(published(tmp_path)) == list(range(8))
    assert names(tmp_path) == [PUBLISHED]


def test_a_shard_without_episodes_is_removed_and_other_folders_are_not_touched(tmp_path: Path) -> None:
    ReplayBuffer(tmp_path / "root" / "shard-00000", **SIZES, fields=FIELDS).close()
    (tmp_path / "root" / "vm-0123456789ab-00000").mkdir()  # another recorder makes one
    recorder(tmp_path).close()
    assert not (tmp_path / "url").exists()
    assert names(tmp_path) == [PUBLISHED, "shard-00000", "vm-0123456789ab-00000"]
    assert kept(tmp_path) == []


def test_a_damaged_episode_is_left_out_and_the_log_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer = recorder(tmp_path)
    record(buffer, range(3))
    data = buffer.folder / "data" / "number.npy"
    let_go(buffer)
    with data.open("r+b") as file:
        file.seek(-8 * 8 * 20, 2)
        file.write(b"\xff" * 8)
    buffer.close()
    assert published(tmp_path) == [0, 2]
    assert "published without the damaged episodes [1]" in caplog.text


# Kills


EVENTS: list[tuple[Any, str]] = [
    place_of("write_object"),
    place_of("create_array"),
    (Path, "rename"),
    (Path, "unlink"),
    (shutil, "rmtree"),
]


def die_at(fatal: int) -> None:
    """End this process before one of the events."""
    left = itertools.count(-fatal)

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            if next(left) == 0:
                os._exit(9)
            return call(*given, **options)

        return counted

    for owner, name in EVENTS:
        setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 17])
def test_a_recorder_that_dies_at_any_event_has_lost_no_episode_and_doubles_none(tmp_path: Path, step: int) -> None:
    for fatal in itertools.count(0, step):
        place = tmp_path / str(fatal)

        def life(tell: Callable[[Any], None], place: Path = place, fatal: int = fatal) -> None:
            die_at(fatal)
            with recorder(place, publish_every=2, keep_published=1) as buffer:
                for number in range(5):
                    record(buffer, range(number, number + 1))
                    tell(number)

        child = in_child(life)
        with recorder(place, publish_every=2, keep_published=1):
            pass
        there = sorted(published(place)) if (place / "url" / "root.json").exists() else []
        assert there == list(range(len(there)))  # each once
        assert len(there) >= len(child.told)
        assert left(place) == []
        assert len(kept(place)) <= 1
        if child.status == 0:
            break
    assert fatal > 30


MAKING = [("create_buffer", 0), ("create_buffer", 1), ("create_array", 0), ("create_array", 3), ("rename_file", 0)]


@pytest.mark.parametrize(("name", "calls"), MAKING)
def test_the_folder_of_a_recorder_that_was_killed_while_it_made_a_shard_is_removed_by_the_next(
    tmp_path: Path, name: str, calls: int
) -> None:
    before, call = itertools.count(-calls), get_inside(name)

    def dying(*given: Any, **options: Any) -> Any:
        if next(before) == 0:
            os._exit(9)
        return call(*given, **options)

    def life(_: Callable[[Any], None]) -> None:
        set_inside(pytest.MonkeyPatch(), **{name: dying})
        with recorder(tmp_path, publish_every=1) as buffer:
            record(buffer, range(4))

    assert in_child(life).status != 0
    recorder(tmp_path).close()
    assert [each for each in names(tmp_path) if each != PUBLISHED] == []


def test_a_folder_that_may_be_anothers_is_not_removed(tmp_path: Path) -> None:
    """One that is being made, or copied or pulled to the root, has another name, or something that nobody knows."""
    with ReplayBuffer(tmp_path / "plain", **SIZES, fields=FIELDS) as buffer:
        record(buffer, range(1))
    pack(tmp_path / "plain", tmp_path / "packed")
    plain, packed = ((tmp_path / name / "schema.json").read_bytes() for name in ("plain", "packed"))
    root, file = tmp_path / "root", "data/number.npy"
    gone, held = "vm-0123456789ab-00000", "vm-0123456789ab-00001"
    kept: dict[str, dict[str, bytes]] = {
        held: {"schema.json.new": plain, file: b""},
        "mine": {"schema.json.new": plain, file: b""},
        "vm-0123456789ab-00002": {"schema.json.new": plain, file: b"", "notes.txt": b"mine"},
        "vm-0123456789ab-00003": {"schema.json.new": plain, file: b"", "data/notes.txt": b"mine"},
        "vm-0123456789ab-00004": {file: b""},  # its schema is still to be copied
        "vm-0123456789ab-00005": {"schema.json.new": packed, file: b""},
        "vm-0123456789ab-00006": {"schema.json.new": b"{}"},
    }
    for name, files in {gone: {"schema.json.new": plain, file: b""}, **kept}.items():
        for path, content in {**files, ".lock": b""}.items():
            (root / name / path).parent.mkdir(parents=True, exist_ok=True)
            (root / name / path).write_bytes(content)
    lock = lock_folder(root / held)
    recorder(tmp_path).close()
    assert names(tmp_path) == sorted([*kept, PUBLISHED])
    assert all(
        {*files} <= {p.relative_to(root / n).as_posix() for p in (root / n).rglob("*")} for n, files in kept.items()
    )
    lock.release()
    recorder(tmp_path).close()
    assert names(tmp_path) == sorted({*kept, PUBLISHED} - {held})


def test_a_recorder_whose_new_folder_another_one_looks_at_takes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, locks = get_inside("create_folder"), []

    def looked_at(folder: Any) -> None:
        create(folder)
        if not locks:
            locks.append(lock_folder(folder.path))

    set_inside(monkeypatch, create_folder=looked_at)
    buffer = recorder(tmp_path)
    locks[0].release()
    record(buffer, range(2))
    buffer.close()
    assert published(tmp_path) == [0, 1]
    assert names(tmp_path) == [PUBLISHED]


# What is refused


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"shard": None}, "publish_to publishes the shards of a root; give shard='auto'"),
        ({"circular": True}, "by which episodes could leave before they are published"),
        ({"capacity": 100, "max_episodes": None}, "got circular=True or a capacity"),
        ({"publish": "step"}, "got publish='step' or stage='disk'"),
        ({"stage": "disk"}, "got publish='step' or stage='disk'"),
        ({"publish_every": 0}, "publish_every: got 0, expected"),
        ({"publish_every": 1.5}, "publish_every: got 1.5, expected"),
        ({"publish_every": datetime.timedelta(0)}, "publish_every: got .*, expected more than no time"),
        ({"keep_published": -1}, "keep_published: got -1, expected"),
        ({"publish_to": None, "publish_every": 3}, "belong to publish_to; give that, too"),
        ({"read_only": True}, "leave out overwrite and read_only"),
    ],
)
def test_what_cannot_be_published_is_refused_at_once(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    with pytest.raises(SchemaError, match=error):
        recorder(tmp_path, **options)
    assert not (tmp_path / "root").exists()


def test_a_store_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(SchemaError, match=r"nothing can be written to http://host/root; give the URL of the store"):
        recorder(tmp_path, publish_to="http://user:secret@host/root")
    with pytest.raises(SchemaError, match=r"is in the root .* of the recorder; give a folder elsewhere"):
        recorder(tmp_path, publish_to=f"file://{tmp_path}/root/url")


def test_other_fields_than_those_of_the_root_in_the_store_are_refused_at_once(tmp_path: Path) -> None:
    with recorder(tmp_path) as buffer:
        record(buffer, range(1))
    url = f"file://{tmp_path}/url"
    (name,) = shards_at(url)
    with pytest.raises(SchemaMismatchError, match=f"{url}/{name} has other fields than what is recorded to ") as told:
        recorder(tmp_path / "new", publish_to=url, fields={**FIELDS, "y": "int"})
    assert told.value.differences == ["fields 'y': stored None, given Field('int64', ())"]
    assert not (tmp_path / "new").exists()


def test_a_store_that_does_not_answer_or_has_a_spoilt_list_keeps_no_recorder_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise OSError(5, "gone")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "cat_file", gone)
        buffer = recorder(tmp_path)
        assert "recording begins, and is published later" in caplog.text
        record(buffer, range(2))
        wait_for_publishing()
    buffer.close()
    assert published(tmp_path) == [0, 1]
    caplog.clear()
    listed = (tmp_path / "url" / "root.json").read_bytes()
    (tmp_path / "url" / "root.json").write_bytes(b"?")
    buffer = recorder(tmp_path)
    assert "is no JSON" in caplog.text
    record(buffer, range(2, 3))
    (tmp_path / "url" / "root.json").write_bytes(listed)
    buffer.close()
    assert published(tmp_path) == [0, 1, 2]


def test_a_shard_that_is_recorded_is_left_alone_also_in_the_middle_of_an_update(tmp_path: Path) -> None:
    with recorder(tmp_path) as buffer:
        record(buffer, range(2))
        (buffer.folder / ".redo").write_bytes(b"")  # as while the recorder changes an episode in place
        publish_now(buffer)
        wait_for_publishing()
        assert left(tmp_path) == [buffer.folder]
        (buffer.folder / ".redo").unlink()
        record(buffer, range(2, 4))
    assert sorted(published(tmp_path)) == [0, 1, 2, 3]
