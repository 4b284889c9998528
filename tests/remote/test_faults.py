"""A store that fails, a disk that is full, readers that are killed, strangers: never a wrong row, never a hang."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from fault_injection import system
from inside import before_asking_again, folders_of, keep_blocks, locks_of, mirrors_of, retry
from range_server import RangeServer

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    Field,
    RemoteError,
    ReplayBuffer,
    SchemaError,
    cache_contents,
    pack,
    publish,
)
from memmap_buffer.format.source import BLOCK, Rows
from memmap_buffer.remote import objects
from memmap_buffer.remote.blocks import COUNTER, LOCAL, USED, Blocks, RemovedError
from memmap_buffer.remote.layout import LEAST_BLOCK
from memmap_buffer.remote.mirror import Taken, bring_later, fetch

FIELDS = {
    "state": Field("float32", (512,), final=True),
    "frame": Field("uint8", (64, 64), codec="zstd"),
    "number": "int",
}
OPTIONS = {"timestep_level": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three shards of about 5 MiB."""
    place, rng = tmp_path_factory.mktemp("root"), np.random.default_rng(0)
    for shard in range(3):
        with ReplayBuffer(place / f"grid{shard}", 8, 200, FIELDS) as buffer:
            for _ in range(8):
                buffer.store_episode(
                    state=rng.normal(size=(201, 512)).astype(np.float32),
                    frame=rng.integers(0, 255, (200, 64, 64), np.uint8) & 15,
                    number=np.arange(200),
                )
        pack(place / f"grid{shard}", place / "local" / f"shard-0000{shard}")
        publish(place / "local" / f"shard-0000{shard}", f"file://{place}/far")
    return place


MANY = 20  # tries: however busy the machine is, one of them is answered in time


@pytest.fixture
def quick(monkeypatch):
    """A store that does not answer is asked again within a second."""
    defaults = objects.Objects.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "timeout", 0.5)
    monkeypatch.setitem(defaults, "tries", MANY)
    monkeypatch.setattr(objects, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(objects, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(objects, "SLOWEST", 1 << 26)


def equal(one, other):
    assert one.keys() == other.keys()
    for key, values in one.items():
        assert torch.equal(values, other[key]), key


def compare(root, far, seeds=range(3), size=16):
    near = ConcatBuffer.from_root(root / "local")
    for seed in seeds:
        equal(near.sample(size, seed=seed, **OPTIONS), far.sample(size, seed=seed, **OPTIONS))


def local_bytes(far):
    blocks = [mirror.blocks for mirror in mirrors_of(far)]
    return sum(int(one.sizes[one.words[:, LOCAL] != 0].sum()) for one in blocks)


@pytest.mark.parametrize("fault", ["500", "reset", "short", "cut", "wrong", "hang"])
def test_a_fault_that_passes_is_not_seen(root, tmp_path, quick, fault):
    with RangeServer(root / "far") as server:
        server.fail(fault, 2, match="heads" if fault in ("short", "wrong") else "")  # root.json has no digest
        far = ConcatBuffer.from_root(server.url, cache=tmp_path)
        server.fail(fault, 2, match="blocks.npy")
        server.fail(fault, 2, match="/data/")
        compare(root, far)
        assert not server.faults


@pytest.mark.parametrize("fault", ["500", "reset", "short", "wrong", "hang", "403"])
def test_a_store_that_fails_is_an_error_and_training_goes_on_when_it_is_back(root, tmp_path, quick, fault):
    with RangeServer(root / "far") as server:
        far = ConcatBuffer.from_root(server.url, cache=tmp_path)
        retry(far, 3)
        server.fail(fault, 1000, match="/data/")
        with pytest.raises(RemoteError, match=r"http://127.*/data/.*bytes \d+ to \d+") as caught:
            far.sample(16, **OPTIONS)
        assert caught.value.tries == (1 if fault == "403" else 3)
        server.heal()
        retry(far, MANY)
        compare(root, far)


def test_shards_that_were_opened_before_the_store_failed_are_there_when_it_is_back(tmp_path, quick, monkeypatch):
    monkeypatch.setattr("memmap_buffer.remote.shards.LOOK_SECONDS", -1.0)
    url, keys = f"file://{tmp_path}/far", []
    with RangeServer(tmp_path / "far") as server:
        for name in "abc":  # the head of the last one is an object of its own
            with ReplayBuffer(tmp_path / name, 1, 2, {"x": "int"}) as buffer:
                buffer.store_episode(x=[0])
            publish(tmp_path / name, url)
            keys.append(json.loads((tmp_path / "far" / "root.json").read_bytes())["shards"][name]["head"][0])
            if name == "a":
                far = ConcatBuffer.from_root(server.url, cache=tmp_path / "cache")
            elif name == "b":
                assert len(ConcatBuffer.from_root(server.url, cache=tmp_path / "cache")) == 2  # which keeps the head
        server.fail("403", match=keys[-1])
        with pytest.raises(RemoteError, match="403"):
            far.refresh()
        server.heal()
        far.refresh()
        assert len(far) == 3


def test_a_server_that_is_gone_for_a_moment(root, tmp_path, monkeypatch):
    """It is back when the first request has failed."""
    server = RangeServer(root / "far")
    with server:
        far = ConcatBuffer.from_root(server.url, cache=tmp_path)
    started = []
    with ExitStack() as running:

        def back():
            if not started:
                started.append(running.enter_context(RangeServer(root / "far", port=server.port)))

        before_asking_again(monkeypatch, back)
        compare(root, far)
        assert started


def test_an_epoch_goes_on_through_faults(root, tmp_path, quick):
    with RangeServer(root / "far") as server:
        near = ConcatBuffer.from_root(root / "local")
        far = ConcatBuffer.from_root(server.url, cache=tmp_path, cache_bytes=128 * BLOCK)
        for fault in ("500", "wrong", "cut"):
            server.fail(fault, 2, match="/data/")
        options = {**OPTIONS, "shuffle": "block", "shuffle_window": 512, "seed": 1}
        for one, other in zip(near.dataloader(64, **options), far.dataloader(64, **options), strict=True):
            equal(one, other)
        assert local_bytes(far) <= 128 * BLOCK


def test_a_full_disk_is_an_error_and_nothing_is_wrong_when_it_has_room_again(root, tmp_path):
    far = ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path)
    far.sample(1, seed=5, **OPTIONS)  # the mirrors are made
    for mirror in mirrors_of(far):
        _ = mirror.digests
    for half in (False, True):
        full = system(1, error=errno.ENOSPC, only=("pwrite",), half=half, lasting=True)
        with full, pytest.raises(OSError, match=r"disk is full|No space"):
            far.sample(16, seed=1, **OPTIONS)
    for mirror in mirrors_of(far):
        words = mirror.blocks.words
        assert not ((words[:, COUNTER] & 1 == 0) & (words[:, LOCAL] == 0)).any()
    compare(root, far)


def read_all(url, cache, failed):
    try:
        far = ConcatBuffer.from_root(url, cache=cache)
        for _ in far.dataloader(32, shuffle="block", shuffle_window=512, seed=os.getpid(), **OPTIONS):
            pass
    except BaseException as error:
        failed.put(repr(error))
        raise


def test_two_processes_fetch_each_block_once(root, tmp_path):
    with RangeServer(root / "far", latency=0.005) as server:
        context = multiprocessing.get_context("fork")
        failed = context.Queue()
        readers = [context.Process(target=read_all, args=(server.url, tmp_path, failed)) for _ in range(2)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert [reader.exitcode for reader in readers] == [0, 0], failed.get()
        asked = Counter()
        for request in server.requests:
            if "/data/" in request.path:
                for block in range(request.range[0] // LEAST_BLOCK, -(-request.range[1] // LEAST_BLOCK)):
                    asked[request.path, block] += 1
        assert sum(asked.values()) < 1.2 * len(asked)  # small gaps are asked for with the blocks around them
        before, far = len(server.requests), ConcatBuffer.from_root(server.url, cache=tmp_path)
        compare(root, far)
        assert all((mirror.blocks.words[:, COUNTER] <= 2).all() for mirror in mirrors_of(far))
        assert all("/data/" not in request.path for request in server.requests[before:])


def hold(mirror, block, told, until):
    with mirror.blocks.taken([block]) as mine:
        told.put(mine.tolist())
        until.wait(60)


@pytest.mark.parametrize("other", ["thread", "process"])
def test_blocks_that_another_fetches_keep_nobody_from_the_rest(root, tmp_path, other):
    mirror = mirrors_of(ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path))[0]
    context = multiprocessing.get_context("fork")
    told, until, chosen = context.Queue(), context.Event(), np.arange(4)
    run = threading.Thread if other == "thread" else context.Process
    holder, reader = (
        run(target=hold, args=(mirror, 1, told, until)),
        threading.Thread(target=fetch, args=({mirror: chosen},)),
    )
    holder.start()
    assert told.get(timeout=60) == [1]
    reader.start()
    wait_for(lambda: mirror.blocks.absent(chosen).tolist() == [1])
    assert reader.is_alive()
    until.set()
    reader.join(60)
    holder.join(60)
    assert not len(mirror.blocks.absent(chosen))


@pytest.mark.parametrize("at", ["try_take", "give"])
def test_an_interruption_at_a_lock_leaves_it_to_others(root, tmp_path, monkeypatch, at):
    """As Ctrl-C comes when the system call is done."""
    mirror = mirrors_of(ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path))[0]
    locks = mirror.cache.locks
    done = getattr(locks, at)

    def interrupted(first, count):
        monkeypatch.undo()
        found = done(first, count)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(locks, at, interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        fetch({mirror: np.arange(4)})
    for run in (multiprocessing.get_context("fork").Process, threading.Thread):
        other = run(target=mirror.blocks.wait_for, args=(2,), daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive()


def test_who_knows_a_mirror_that_was_made_anew_meanwhile_leaves_the_new_one_alone(root, tmp_path):
    url = f"file://{root}/far"
    mirror = mirrors_of(ConcatBuffer.from_root(url, cache=tmp_path))[0]
    every = np.arange(mirror.files.count)
    fetch({mirror: every})
    before = mirror.blocks
    shutil.rmtree(mirror.path)
    far = ConcatBuffer.from_root(url, cache=tmp_path)
    fetch({mirrors_of(far)[0]: every})
    with pytest.raises(RemovedError, match=r"^$"):
        before.write([0], bytes(before.sizes[0]))
    assert before.give_back(every) == 0
    assert cache_contents(tmp_path).shards[mirror.path.name][0] == before.sizes.sum()
    compare(root, far)


def test_blocks_that_are_in_use_go_on_where_the_cache_was_moved_to(root, tmp_path):
    url = f"file://{root}/far"
    mirror = mirrors_of(ConcatBuffer.from_root(url, cache=tmp_path / "cache"))[0]
    fetch({mirror: np.arange(4)})
    (tmp_path / "cache").rename(tmp_path / "moved")
    far = ConcatBuffer.from_root(url, cache=tmp_path / "moved")
    compare(root, far)
    assert mirrors_of(far)[0].blocks is mirror.blocks
    assert mirror.blocks.give_back(np.arange(4)) == mirror.blocks.sizes[:4].sum()


def first_groups(mirror, count):
    """The blocks of the first groups."""
    return np.arange(mirror.files.groups[count])


def wait_for(done):
    while not done():
        time.sleep(0.01)


def rows_of(buffer, shard):
    """All rows of two fields of a shard, as a read-ahead asks for them."""
    storage = folders_of(buffer).storages[shard]
    ends = {name: np.array([len(storage.maps.rows[name])]) for name in ("number", "state")}
    return [(storage, [Rows(name, np.zeros(1, np.int64), end) for name, end in ends.items()])]


def absent(buffer, shard):
    """How many of their blocks are not there."""
    ((storage, rows),) = rows_of(buffer, shard)
    return sum(len(storage.mirror.blocks.absent(storage.mirror.blocks_of_rows(one))) for one in rows)


def test_the_next_window_comes_while_a_request_of_the_one_before_is_not_answered(root, tmp_path):
    with RangeServer(root / "far") as server:
        far = ConcatBuffer.from_root(server.url, cache=tmp_path)
        server.fail("hang", match="shard-00000/.*data/state")
        bring_later(rows_of(far, 0))
        bring_later(rows_of(far, 1))
        wait_for(lambda: not absent(far, 1))
        assert absent(far, 0)


def test_windows_are_asked_for_in_their_order(root, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "BYTES_IN_FLIGHT", BLOCK)  # one request after another
    with RangeServer(root / "far") as server:
        far = ConcatBuffer.from_root(server.url, cache=tmp_path)
        for shard in range(3):
            bring_later(rows_of(far, shard))
        wait_for(lambda: not any(absent(far, shard) for shard in range(3)))
        asked = [request.path[:11] for request in server.requests if "/data/" in request.path]
        assert asked == sorted(asked)
        assert len(set(asked)) == 3


def test_a_window_for_which_the_bound_has_no_room_beside_what_is_read_is_not_fetched_ahead(root, tmp_path):
    """It would be given back, or have what is read given back, before anybody reads it."""
    url = f"file://{root}/far"
    ((storage, rows),) = rows_of(ConcatBuffer.from_root(url, cache=tmp_path / "all"), 0)
    blocks = storage.mirror.blocks
    size = sum(int(blocks.sizes[np.unique(storage.mirror.blocks_of_rows(each))].sum()) for each in rows)
    for place, limit, is_fetched in (("less", 5 * size - 1, False), ("enough", 5 * size, True)):
        far = ConcatBuffer.from_root(url, cache=tmp_path / place, cache_bytes=limit)
        before = [absent(far, shard) for shard in (0, 1)]
        bring_later(rows_of(far, 0))
        bring_later([(folders_of(far).storages[1], [Rows("state", np.zeros(1, np.int64), np.ones(1, np.int64))])])
        wait_for(lambda: absent(far, 1) < before[1])  # noqa: B023
        assert (absent(far, 0) < before[0]) == is_fetched


ENDS = """
    import sys, time
    import numpy as np
    from memmap_buffer import ConcatBuffer
    from memmap_buffer.format.source import Rows
    from memmap_buffer.remote.mirror import bring_later

    for storage in ConcatBuffer.from_root(sys.argv[1], cache=sys.argv[2])._folders.storages:
        bring_later([(storage, [Rows("state", np.zeros(1, int), np.array([200]))])])
    sys.stdin.readline()
"""


@pytest.mark.parametrize("fault", ["hang", ""])
def test_a_program_ends_while_a_window_is_fetched(root, tmp_path, fault):
    """Without a word, and without waiting for the store."""
    with RangeServer(root / "far", bandwidth=None if fault else 1e5) as server:
        server.fail(fault or "hang", 1000 if fault else 0, match="/data/")
        program = [sys.executable, "-c", textwrap.dedent(ENDS), server.url, str(tmp_path)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(program, **pipes) as running:
            try:
                wait_for(lambda: any("/data/" in request.path for request in server.requests))
                assert running.communicate(timeout=60) == (b"", b"")
                assert running.returncode == 0
            finally:
                running.kill()


def test_a_cache_that_others_fill_is_waited_for(root, tmp_path):
    """Two with a bound of their own in one cache, which is less than both want at a time."""
    near, url = ConcatBuffer.from_root(root / "local"), f"file://{root}/far"
    buffers = [ConcatBuffer.from_root(url, cache=tmp_path, cache_bytes=16 * BLOCK) for _ in range(2)]
    failed = []

    def read(far, first):
        try:
            for seed in range(first, first + 8):
                options = {"timestep_level": True, "fields": ["state"], "seed": seed}
                equal(near.sample(400, **options), far.sample(400, **options))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(far, 100 * i)) for i, far in enumerate(buffers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert local_bytes(buffers[0]) <= 16 * BLOCK


def test_no_room_is_given_where_every_block_is_in_use(root, tmp_path, monkeypatch):
    monkeypatch.setattr("memmap_buffer.remote.mirror.PATIENCE", 0.1)
    far = ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path, cache_bytes=16 * BLOCK)
    keep_blocks(monkeypatch)
    with pytest.raises(SchemaError, match="cache_bytes"):
        for seed in range(30):
            far.sample(64, seed=seed, **OPTIONS)
    assert local_bytes(far) <= 16 * BLOCK
    monkeypatch.undo()
    compare(root, far, size=4)


def test_a_fetch_gives_back_no_block_of_its_own_batch(root, tmp_path, monkeypatch):
    """Those that it found there were not used for longest; those that it asks for next are kept for it, too."""
    far = ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path, cache_bytes=16 * BLOCK)
    monkeypatch.setattr(Blocks, "touch", lambda self, blocks, second: None)  # as if all within a second
    (mirror, *others) = mirrors_of(far)
    for other in others:  # the cache is full of what nobody asks for
        fetch({other: first_groups(other, 8)})
    both, half = first_groups(mirror, 8), first_groups(mirror, 4)
    fetch({mirror: half})
    assert local_bytes(far) + mirror.blocks.sizes[both].sum() > 16 * BLOCK
    mirror.blocks.words[half, USED], others[0].blocks.words[:, USED] = 1, 9
    others[1].blocks.words[:, USED] = 9
    taken = Taken(fetch({mirror: both}))
    assert taken.unchanged()
    assert not len(mirror.blocks.absent(both))
    assert local_bytes(far) <= 16 * BLOCK


def test_what_does_not_fit_is_neither_counted_nor_fetched(root, tmp_path):
    url = f"file://{root}/far"
    mirrors = mirrors_of(ConcatBuffer.from_root(url, cache=tmp_path / "other"))
    limit = sum(int(mirror.blocks.sizes.sum()) for mirror in mirrors[:2]) + BLOCK
    far = ConcatBuffer.from_root(url, cache=tmp_path / "cache", cache_bytes=limit)
    one, other, third = mirrors_of(far)
    kept = [(mirror.blocks, np.arange(mirror.files.count)) for mirror in (one, other)]
    for mirror, (_, every) in zip((one, other), kept, strict=True):
        fetch({mirror: every})
    wanted = [(third.blocks, first_groups(third, 4))]
    before = local_bytes(far)
    assert before <= limit < before + third.blocks.sizes[wanted[0][1]].sum()
    assert not one.cache.reserve(wanted, kept)
    assert local_bytes(far) == before
    assert int.from_bytes((tmp_path / "cache" / "usage").read_bytes(), "little") == before
    assert one.cache.reserve(wanted, kept[1:])
    assert local_bytes(far) <= limit


def test_a_kill_at_each_write_leaves_nothing_wrong(root, tmp_path):
    """Of a reader whose bound is less than the data, so that blocks are given back, too."""
    url, killed = f"file://{root}/far", 0

    def read(at):
        with system(at, kill=True, half=True, only=("pwrite", "punch", "create", "rename")):
            far = ConcatBuffer.from_root(url, cache=tmp_path, cache_bytes=16 * BLOCK)
            for seed in range(8):
                far.sample(64, seed=seed, **OPTIONS)

    for at in (1, 3, 6, 12, 20, 28, 33, 40, 55):
        child = os.fork()
        if child == 0:
            try:
                read(at)
            finally:
                os._exit(0)
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        far = ConcatBuffer.from_root(url, cache=tmp_path, cache_bytes=16 * BLOCK)
        compare(root, far, seeds=range(2), size=4)
        assert local_bytes(far) <= 16 * BLOCK
        if at % 2:
            shutil.rmtree(tmp_path)
    assert killed > 4


def test_a_reader_that_dies_while_it_fetches_leaves_its_blocks_to_others(root, tmp_path):
    with RangeServer(root / "far") as server:
        server.fail("hang", 100, match="/data/")
        context = multiprocessing.get_context("fork")
        victim = context.Process(target=read_all, args=(server.url, tmp_path, context.Queue()))
        victim.start()
        while not any("/data/" in request.path for request in server.requests):
            time.sleep(0.01)
        server.heal()
        waits = threading.Timer(0.2, os.kill, (victim.pid, signal.SIGKILL))
        waits.start()
        compare(root, ConcatBuffer.from_root(server.url, cache=tmp_path))
        victim.join()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_while_its_parent_fetches_reads(root, tmp_path):
    with RangeServer(root / "far", latency=0.2) as server:
        far = ConcatBuffer.from_root(server.url, cache=tmp_path)
        thread = threading.Thread(target=far.sample, args=(64,), kwargs=OPTIONS)
        thread.start()
        while not any("/data/" in request.path for request in server.requests):
            time.sleep(0.005)
        for lock in locks_of(far):  # as if a thread were at it in this moment
            lock.acquire()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(200)
            try:
                torch.set_num_threads(1)  # as workers do: of a process that has used OpenMP no child may
                far.refresh()
                compare(root, far)
                os._exit(0)
            finally:
                os._exit(1)
        for lock in locks_of(far):
            lock.release()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def mirror_of(cache):
    return sorted(path for path in cache.iterdir() if (path / "mirror").is_dir())[0]


STRANGERS = {
    "all": lambda cache: shutil.rmtree(cache),
    "mirror": lambda cache: shutil.rmtree(mirror_of(cache)),
    "file": lambda cache: (mirror_of(cache) / "data" / "state.npy").unlink(),
    "counters": lambda cache: (mirror_of(cache) / "mirror" / "blocks.npy").unlink(),
    "cut": lambda cache: os.truncate(mirror_of(cache) / "data" / "state.npy", 5000),
    "head": lambda cache: os.truncate(next((cache / "heads").iterdir()), 100),
    "heads": lambda cache: next((cache / "heads").iterdir()).write_bytes(
        bytes(next((cache / "heads").iterdir()).stat().st_size)
    ),
    "digests": lambda cache: os.truncate(mirror_of(cache) / "mirror" / "digests", 9),
    "other": lambda cache: (shutil.rmtree(mirror_of(cache) / "data"), (mirror_of(cache) / "data").write_bytes(b"")),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_mirror_that_a_stranger_cut_or_removed_is_made_anew(root, tmp_path, what):
    cache = tmp_path / "cache"
    url = f"file://{root}/far"
    compare(root, ConcatBuffer.from_root(url, cache=cache))
    STRANGERS[what](cache)
    compare(root, ConcatBuffer.from_root(url, cache=cache))


@pytest.mark.parametrize("what", ["all", "mirror", "file", "counters", "other"])
def test_a_mirror_that_is_removed_while_it_is_read_gives_no_wrong_row(root, tmp_path, what):
    cache = tmp_path / "cache"
    url = f"file://{root}/far"
    far = ConcatBuffer.from_root(url, cache=cache)
    far.sample(4, seed=0, **OPTIONS)
    STRANGERS[what](cache)
    other = ConcatBuffer.from_root(url, cache=cache)
    other.sample(2, seed=1, **OPTIONS)  # it may make another in its place
    compare(root, far, size=64)
    compare(root, other, size=64)


# What a store claims


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("root.json", "root.json: read: it has more than 67108864 bytes"),
        ("heads", "heads of .* bytes, expected at most"),
    ],
)
def test_no_memory_is_taken_for_a_list_or_a_head_of_any_size(root, tmp_path, name, error):
    """A sparse file of a tebibyte in the place of the list of shards, or of the heads that it says are so large."""
    shutil.copytree(root / "far", tmp_path / "far", ignore=shutil.ignore_patterns("data"))
    listed = tmp_path / "far" / "root.json"
    if name == "root.json":
        os.truncate(listed, 1 << 40)
    else:
        document = json.loads(listed.read_bytes())
        document["heads"] = dict.fromkeys(document["heads"], 1 << 40)
        listed.write_text(json.dumps(document))
        for head in (tmp_path / "far" / "heads").iterdir():
            os.truncate(head, 1 << 40)
    with pytest.raises((RemoteError, CorruptBufferError), match=error):
        ConcatBuffer.from_root(f"file://{tmp_path}/far", cache=tmp_path / "cache")
