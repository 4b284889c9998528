"""Published folders read by their URL: the same batches as from the folders, block by block, within a bound."""

import multiprocessing
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import torch
from inside import folders_of, get_inside, give_back, look_at_the_boot, mirror_of, mirrors_of, storage_of

from memmap_buffer import (
    ConcatBuffer,
    Field,
    NotABufferError,
    RemoteError,
    ReplayBuffer,
    SchemaError,
    pack,
    publish,
    repair,
    verify,
)
from memmap_buffer.format.source import BLOCK
from memmap_buffer.remote import shards
from memmap_buffer.remote.blocks import COUNTER, LOCAL
from memmap_buffer.remote.mirror import Taken, bring
from memmap_buffer.remote.published import read_root

WIDE = 3000  # numbers, so that three shards have more blocks than the bounds below
FIELDS = {
    "state": Field("float32", (WIDE,), final=True),
    "frame": Field("uint8", (32, 32), codec="zstd"),
    "ids": ("int64", (None,)),
    "reward": "float",
    "terminated": "bool",
}
VIEWS = [
    {"timestep_level": True},
    {"n_steps": 3, "gamma": 0.9},
    {"window_length": 8},
    {},
    {"timestep_level": True, "prioritized": True},
    {"timestep_level": True, "filter_fields": {"reward": (3, 50)}},
]


def record(folder, episodes=6, seed=0, fields=FIELDS):
    """A finished grid of some MiB."""
    rng = np.random.default_rng(seed)
    with ReplayBuffer(folder, episodes, 200, fields, {"task": "int"}) as buffer:
        for serial in range(episodes):
            count = int(rng.integers(100, 200))
            steps = {
                "state": rng.normal(size=(count + 1, WIDE)).astype(np.float32),
                "frame": np.full((count, 32, 32), serial, np.uint8) + rng.integers(0, 9, (count, 1, 1), np.uint8),
                "ids": [np.arange(t % 4) for t in range(count)],
                "reward": np.arange(count),
                "terminated": np.arange(count) == count - 1,
            }
            buffer.store_episode(**{name: steps[name] for name in fields}, task=serial % 2)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three shards beside each other, packed, and what was published of them."""
    place = tmp_path_factory.mktemp("root")
    for i in range(3):
        pack(record(place / f"grid{i}", seed=i), place / "local" / f"shard-0000{i}")
        publish(place / "local" / f"shard-0000{i}", f"file://{place}/far")
    return place


def equal(one, other):
    assert one.keys() == other.keys()
    for key, values in one.items():
        assert torch.equal(values, other[key]), key


@pytest.mark.parametrize("options", VIEWS, ids=str)
def test_the_same_seed_gives_the_same_batch_from_a_folder_and_its_mirror(root, tmp_path, options):
    near = ConcatBuffer.from_root(root / "local")
    far = ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path)
    for seed in range(3):
        equal(near.sample(32, seed=seed, **options), far.sample(32, seed=seed, **options))
    one = ReplayBuffer.from_folder(f"file://{root}/far/shard-00001", cache=tmp_path)
    equal(one.sample(32, seed=1, **options), ReplayBuffer.from_folder(root / "grid1").sample(32, seed=1, **options))


def test_what_is_told_of_a_store_is_that_of_the_folders(root, tmp_path):
    near = ConcatBuffer.from_root(root / "local")
    far = ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path)
    assert (far.num_episodes, far.num_steps, far.shards) == (near.num_episodes, near.num_steps, near.shards)
    ours, theirs = far.statistics(["state", "frame"]), near.statistics(["state", "frame"])
    assert np.array_equal(ours["state"].mean, theirs["state"].mean)
    assert np.array_equal(ours["frame"].max, theirs["frame"].max)
    equal(far.batch(filter_meta={"task": 1}), near.batch(filter_meta={"task": 1}))
    last = far[-1]
    equal(last, near[-1])


def test_a_folder_of_the_cache_is_read_by_its_url_alone(root, tmp_path):
    """Of all that was not read yet it has zeros."""
    url = f"file://{root}/far/shard-00000"
    one = ReplayBuffer.from_folder(url, cache=tmp_path)
    assert one.episode(0)["reward"].any()
    with pytest.raises(SchemaError, match=rf"got {url}, expected a folder on a disk; `pull\("):
        one.snapshot(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    for work in (ReplayBuffer.from_folder, verify, repair, lambda path: pack(path, tmp_path / "copy")):
        with pytest.raises(NotABufferError, match=r"is a cache of a folder at a URL.*read it by its URL"):
            work(mirror_of(one).path)


def test_only_what_is_read_is_fetched_and_only_once(root, tmp_path):
    one = ReplayBuffer.from_folder(f"file://{root}/far/shard-00000", cache=tmp_path)
    blocks = mirror_of(one).blocks
    assert not blocks.words[:, LOCAL].any()
    one.batch([0], timestep_level=True, fields=["reward"])
    assert blocks.words[:, LOCAL].sum() == 1
    one.batch([0], timestep_level=True, fields=["state"])
    assert blocks.words[:, LOCAL].sum() == 2
    mirror_of(one).objects = None  # nothing is asked for again
    one.batch([0], timestep_level=True, fields=["state", "reward"])


def test_the_blocks_of_a_batch_are_looked_for_once(root, tmp_path, monkeypatch):
    far, looked = ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path), []
    monkeypatch.setattr("memmap_buffer.remote.mirror.bring", lambda wanted: looked.append(len(wanted)) or bring(wanted))
    far.sample(64, timestep_level=True, fields=["state", "reward", "terminated"], seed=1)
    assert looked == [3]
    far.batch(timestep_level=True)
    looked.clear()
    far.sample(64, timestep_level=True, seed=2)
    assert not looked  # everything is there


def test_two_windows_are_asked_for_ahead_of_the_one_that_is_read_once_the_first_batch_is_there(
    root, tmp_path, monkeypatch
):
    far, asked = ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path), []
    monkeypatch.setattr("memmap_buffer.remote.mirror.bring_later", asked.append)
    batches = iter(far.dataloader(8, timestep_level=True, shuffle="block", shuffle_window=64, seed=1))
    for number in range(20):
        next(batches)
        assert len(asked) == (number * 8 // 64 + 3 if number else 0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_the_mirror(root, tmp_path, method):
    near = ConcatBuffer.from_root(root / "local")
    far = ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path)
    options = {"timestep_level": True, "shuffle": "block", "seed": 3, "fields": ["state", "frame", "reward"]}
    loaders = [
        near.dataloader(64, **options),
        far.dataloader(64, num_workers=2, multiprocessing_context=method, **options),
    ]
    for one, other in zip(*loaders, strict=True):
        equal(one, other)


def test_a_bound_is_kept_and_no_hole_is_ever_seen(root, tmp_path):
    near = ConcatBuffer.from_root(root / "local")
    far = ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path, cache_bytes=24 * BLOCK)
    failed = []

    def read(first):
        try:
            for seed in range(first, first + 15):
                options = {"timestep_level": True, "fields": ["state", "reward"], "seed": seed}
                equal(near.sample(32, **options), far.sample(32, **options))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    blocks = [mirror.blocks for mirror in mirrors_of(far)]
    words, sizes = (np.concatenate(each) for each in zip(*((one.words, one.sizes) for one in blocks), strict=True))
    assert 0 < sizes[words[:, LOCAL] != 0].sum() <= 24 * BLOCK < sizes.sum()
    assert sizes[words[:, COUNTER] > 1].sum() > 24 * BLOCK  # more was fetched than there is room for
    on_disk = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("data/*.npy"))
    assert on_disk <= 25 * BLOCK


def test_rows_whose_block_is_given_back_before_they_are_copied_are_read_again(root, tmp_path, monkeypatch):
    far = ReplayBuffer.from_folder(f"file://{root}/far/shard-00000", cache=tmp_path)
    mirror, taken = mirror_of(far), []
    bring = mirror.bring

    def bring_and_lose(wanted):
        brought = bring(wanted)
        if len(taken) < 2:
            local = np.flatnonzero(mirror.blocks.words[:, LOCAL])
            taken.append([give_back(mirror, block) for block in local.tolist()])
        return brought

    monkeypatch.setattr(mirror, "bring", bring_and_lose)
    options = {"timestep_level": True, "fields": ["state"], "seed": 3}
    near = ReplayBuffer.from_folder(root / "grid0").sample(16, **options)
    equal(near, far.sample(16, **options))
    assert all(any(given) for given in taken)
    assert len(taken) == 2


def test_a_filter_reads_rows_again_whose_block_is_given_back_before_they_are_copied(root, tmp_path, monkeypatch):
    far, unchanged, asked = (
        ReplayBuffer.from_folder(f"file://{root}/far/shard-00000", cache=tmp_path),
        Taken.unchanged,
        [],
    )
    monkeypatch.setattr(Taken, "unchanged", lambda taken: asked.append(0) or (len(asked) > 2 and unchanged(taken)))
    options = {"timestep_level": True, "fields": ["reward"], "filter_fields": {"reward": (3, 50)}, "seed": 3}
    equal(ReplayBuffer.from_folder(root / "grid0").sample(16, **options), far.sample(16, **options))
    assert len(asked) > 2


def test_checksums_are_of_rows_that_stayed_while_they_were_summed(root, tmp_path, monkeypatch):
    """What is given back before it is read is zeros, and no damage."""
    far, lost = ReplayBuffer.from_folder(f"file://{root}/far/shard-00000", cache=tmp_path), []

    def bring_and_lose(wanted):
        taken, mirror = bring(wanted), mirror_of(far)
        if len(lost) < 2:
            local = np.flatnonzero(mirror.blocks.words[:, LOCAL])
            lost.append([give_back(mirror, block) for block in local.tolist()])
        return taken

    monkeypatch.setattr("memmap_buffer.remote.mirror.bring", bring_and_lose)
    storage = storage_of(far)
    assert storage.check(storage.table.visible) == []
    assert len(lost) == 2
    assert all(any(given) for given in lost)


def test_a_batch_that_the_bound_cannot_hold_is_an_error(root, tmp_path):
    far = ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path, cache_bytes=16 * BLOCK)
    with pytest.raises(SchemaError, match="cache_bytes: 4,194,304 are less than"):
        far.batch(timestep_level=True)
    with pytest.raises(SchemaError, match="cache_bytes: got 5"):
        ConcatBuffer.from_root(f"file://{root}/far", cache=tmp_path, cache_bytes=5)


def test_a_bound_counts_the_bytes_of_small_files(tmp_path):
    """Of more shards than a bound has room for blocks of a MiB; what is given back of their files leaves the disk."""
    fields, url = {"state": ("float32", (400,)), "reward": "float"}, f"file://{tmp_path}/far"
    for number in range(9):
        with ReplayBuffer(tmp_path / "near" / f"shard-{number:05}", 1, 20, fields) as buffer:
            buffer.store_episode(state=np.full((20, 400), number, np.float32), reward=np.arange(20))
        publish(tmp_path / "near" / f"shard-{number:05}", url)
    cache = tmp_path / "cache"
    far = ConcatBuffer.from_root(url, cache=cache, cache_bytes=16 * BLOCK)
    equal(ConcatBuffer.from_root(tmp_path / "near").batch(timestep_level=True), far.batch(timestep_level=True))
    mirrors = mirrors_of(far)
    assert all(mirror.blocks.words[:, LOCAL].all() for mirror in mirrors)
    files = list(cache.rglob("data/*.npy"))
    assert int.from_bytes((cache / "usage").read_bytes(), "little") == sum(path.stat().st_size for path in files)
    assert sum(int(mirror.blocks.sizes.sum()) for mirror in mirrors) == sum(path.stat().st_size for path in files)
    state = mirrors[0].path / "data" / "state.npy"
    used = state.stat().st_blocks
    assert give_back(mirrors[0], mirrors[0].files.first["data/state.npy"])
    assert state.stat().st_blocks < used / 2
    equal(ConcatBuffer.from_root(tmp_path / "near").batch(timestep_level=True), far.batch(timestep_level=True))


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["shard-00003", "arm", "shard-00004", "shard-00000", "leg"], [3, 4, 5, 0, 6]),
        (["arm", "shard-00000", "shard-00001", "leg"], [0, 1, 2, 3]),
        (["arm", "leg", "shard-00007"], [0, 1, 7]),
    ],
    ids=["numbered first", "named first", "apart"],
)
def test_all_readers_number_the_shards_of_a_root_alike_whenever_they_were_opened(tmp_path, monkeypatch, names, numbers):
    """Those that were opened before a shard was listed keep each folder in its place, too."""
    monkeypatch.setattr(shards, "LOOK_SECONDS", -1.0)
    url, readers, fields = f"file://{tmp_path}/far", [], {"reward": "float"}
    for i, name in enumerate(names):
        with ReplayBuffer(tmp_path / name, 1, 2, fields) as buffer:
            buffer.store_episode(reward=[i, i])
        publish(tmp_path / name, url)
        readers.append(ConcatBuffer.from_root(url, cache=tmp_path / "cache"))
        for reader in readers:
            before = folders_of(reader).storages
            found = reader.batch(timestep_level=True, return_indices=True)
            assert {int(r): int(n) for r, n in zip(found["reward"], found["_indices"][:, 0], strict=True)} == dict(
                enumerate(numbers[: i + 1])
            )
            assert folders_of(reader).storages[: len(before)] == before
            assert pickle.loads(pickle.dumps(folders_of(reader))).numbers.tolist() == sorted(numbers[: i + 1])


def test_weights_of_a_root_are_in_the_order_of_the_names(tmp_path):
    url = f"file://{tmp_path}/far"
    for i, name in enumerate(["b", "a", "c"]):
        with ReplayBuffer(tmp_path / "near" / name, 1, 2, {"reward": "float"}) as buffer:
            buffer.store_episode(reward=[i, i])
        publish(tmp_path / "near" / name, url)
    near = ConcatBuffer.from_root(tmp_path / "near", [1, 2, 1])
    far = ConcatBuffer.from_root(url, [1, 2, 1], cache=tmp_path / "cache")
    for seed in range(3):
        equal(near.sample(8, timestep_level=True, seed=seed), far.sample(8, timestep_level=True, seed=seed))


def test_after_another_boot_blocks_are_compared_with_their_digests(root, tmp_path, monkeypatch):
    url = f"file://{root}/far/shard-00000"
    one = ReplayBuffer.from_folder(url, cache=tmp_path)
    expected = one.batch(timestep_level=True, fields=["state"])
    mirror = mirror_of(one)
    name, _, _ = mirror.files.place(int(mirror.blocks_of("data/state.npy", np.zeros(1, int), np.ones(1, int))[0]))
    with open(mirror.path / name, "r+b") as file:  # the cut lost what was written
        file.seek(5000)
        file.write(bytes(5000))
    monkeypatch.setattr("memmap_buffer.remote.blocks.boot_id", lambda: bytes(range(16)))
    look_at_the_boot(mirror)
    assert (mirror.blocks.words[:, COUNTER] & 1).all()
    equal(one.batch(timestep_level=True, fields=["state"]), expected)


def read_for_ever(url, cache):
    far = ReplayBuffer.from_folder(url, cache=cache, cache_bytes=16 * BLOCK)
    seed = 0
    while True:
        far.sample(16, seed=seed, timestep_level=True, fields=["state", "frame"])
        seed += 1


def test_readers_that_are_killed_leave_nothing_that_is_not_whole(root, tmp_path):
    url = f"file://{root}/far/shard-00002"
    near = ReplayBuffer.from_folder(root / "local" / "shard-00002")
    context = multiprocessing.get_context("spawn")
    for wait in (0.0, 0.05, 0.2):
        victim = context.Process(target=read_for_ever, args=(url, tmp_path))
        victim.start()
        while not list(tmp_path.glob("*-*/schema.json")):
            time.sleep(0.02)
        time.sleep(wait)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        far = ReplayBuffer.from_folder(url, cache=tmp_path, cache_bytes=24 * BLOCK)
        for seed in range(5):
            options = {"timestep_level": True, "fields": ["state", "frame"], "seed": seed}
            equal(near.sample(16, **options), far.sample(16, **options))


def test_what_was_published_anew_is_seen_and_what_is_open_is_read_on(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/far"
    publish(record(tmp_path / "shard-00000", 3), url)
    far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
    before = far.sample(8, timestep_level=True, seed=0)
    old = ReplayBuffer.from_folder(f"{url}/shard-00000", cache=tmp_path / "cache2")
    publish(record(tmp_path / "shard-00001", 2, seed=5), url)
    with ReplayBuffer.from_folder(tmp_path / "shard-00000") as buffer:
        buffer.delete(0)
    publish(tmp_path / "shard-00000", url)
    monkeypatch.setattr(shards, "LOOK_SECONDS", -1.0)
    far.refresh()
    assert far.num_episodes == 4
    assert far.sample(8, timestep_level=True).keys() == before.keys()
    assert old.batch(timestep_level=True)["reward"].shape[0] == old.num_steps


def test_a_loader_that_lives_on_goes_by_the_marks_of_what_was_published_again(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "LOOK_SECONDS", -1.0)
    url = f"file://{tmp_path}/far"
    with ReplayBuffer(tmp_path / "shard-00000", 3, 2, {"reward": "float"}) as buffer:
        for number in range(3):
            buffer.store_episode(reward=[number, number])
        publish(buffer.folder, url)
        far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
        loader = far.dataloader(9, timestep_level=True, mark="!bad")
        for marked in range(3):
            (batch,) = loader
            assert set(batch["reward"].tolist()) == {*range(marked, 3)}
            assert b"MirrorStorage" not in pickle.dumps(loader.dataset), "a worker opens the folders itself"
            buffer.mark([marked], add=["bad"])
            publish(buffer.folder, url)


def test_a_worker_that_lives_on_finds_what_came_when_a_shard_was_published_again(tmp_path, monkeypatch):
    """It looks at the list now and then, at other moments than the process that draws the items."""
    url, numbers = f"file://{tmp_path}/far", [1, 2]
    with ReplayBuffer(tmp_path / "shard-00000", 3, 9, {"reward": "float"}, publish="step") as buffer:
        buffer.store_episode(reward=numbers)
        publish(buffer.folder, url)
        far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
        workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        loader = far.dataloader(2, timestep_level=True, **workers)
        list(loader)  # the worker has begun, and has just looked
        monkeypatch.setattr(shards, "LOOK_SECONDS", -1.0)
        with buffer.one_episode() as episode:
            for number in range(3, 9):
                episode.store(reward=number)
                publish(buffer.folder, url)
                numbers.append(number)
                assert [n for batch in loader for n in batch["reward"].tolist()] == numbers


def test_what_a_store_that_failed_did_not_tell_is_looked_for_in_the_next_version(tmp_path, monkeypatch):
    def fails(objects):
        raise RemoteError("the store is away")

    url = f"file://{tmp_path}/far"
    with ReplayBuffer(tmp_path / "shard-00000", 3, 9, {"reward": "float"}, publish="step") as buffer:
        buffer.store_episode(reward=[0])
        publish(buffer.folder, url)
        folders = folders_of(ConcatBuffer.from_root(url, cache=tmp_path / "cache"))
        zero = np.zeros(1, np.int64)
        wanted = get_inside("new_anchors")(zero, zero + 1, zero + 1, zero)
        with buffer.one_episode() as episode:
            episode.store(reward=1)
            publish(buffer.folder, url)
            with monkeypatch.context() as patch:
                patch.setattr(shards, "read_root", fails)
                assert folders.catch_up(wanted)
            assert not folders.catch_up(wanted), "until there is another version"
            folders.look_anew()
            folders.refresh()
            assert folders.find(wanted).anchors.length.tolist() == [1]
            assert folders.catch_up(wanted._replace(t=zero + 1)), "the episode may have grown"


def test_an_epoch_goes_on_in_a_version_that_lacks_the_first_episodes(tmp_path, monkeypatch):
    """The others stand in other slots there."""
    url = f"file://{tmp_path}/far"
    with ReplayBuffer(tmp_path / "shard-00000", 6, 4, {"reward": "float"}, circular=True) as buffer:
        for number in range(6):
            buffer.store_episode(reward=[number] * 4)
        publish(buffer.folder, url)
        far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
        batches = iter(far.dataloader(4, timestep_level=True))
        for number in (6, 7):
            buffer.store_episode(reward=[number] * 4)
        publish(buffer.folder, url)
        monkeypatch.setattr(shards, "LOOK_SECONDS", -1.0)
        far.refresh()
        rewards = [set(batch["reward"].tolist()) for batch in batches]
    assert rewards[2:] == [{2}, {3}, {4}, {5}]
    assert rewards[0] | rewards[1] <= {*range(2, 8)}


def test_an_episode_that_is_gone_is_looked_for_once(tmp_path, monkeypatch):
    url, looks = f"file://{tmp_path}/far", []
    with ReplayBuffer(tmp_path / "shard-00000", 3, 9, {"reward": "float"}) as buffer:
        for number in range(3):
            buffer.store_episode(reward=[number] * 9)
        publish(buffer.folder, url)
        far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
        batches = iter(far.dataloader(3, timestep_level=True))
        buffer.delete([2])
        publish(buffer.folder, url)
        monkeypatch.setattr(shards, "read_root", lambda objects: looks.append(objects) or read_root(objects))
        folders_of(far).look_anew()
        far.refresh()
        rewards = [set(batch["reward"].tolist()) for batch in batches]
    assert rewards[:6] == [{0}] * 3 + [{1}] * 3 and set().union(*rewards[6:]) <= {0, 1}
    assert len(looks) == 2, "that of `refresh`, and one for the three batches of items that are gone"


def test_what_is_there_can_be_read_without_the_store(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/far"
    publish(record(tmp_path / "shard-00000", 2), url)
    far = ConcatBuffer.from_root(url, cache=tmp_path / "cache")
    before = far.batch(timestep_level=True)
    (tmp_path / "far").rename(tmp_path / "gone")
    monkeypatch.setattr(shards, "LOOK_SECONDS", -1.0)
    far.refresh()
    equal(far.batch(timestep_level=True), before)


def test_a_mirror_pickles_without_its_blocks(root, tmp_path):
    far = ReplayBuffer.from_folder(f"file://{root}/far/shard-00000", cache=tmp_path)
    storage = pickle.loads(pickle.dumps(storage_of(far)))
    assert storage.mirror.path == mirror_of(far).path


def test_nothing_there_and_nothing_to_write_to_are_told(root, tmp_path):
    for call in (
        lambda: ConcatBuffer.from_root(f"file://{tmp_path}/none", cache=tmp_path),
        lambda: ReplayBuffer.from_folder(f"file://{tmp_path}/none", cache=tmp_path),
    ):
        with pytest.raises(NotABufferError, match="published"):
            call()
    with pytest.raises(SchemaError, match="publish"):
        ReplayBuffer("s3://lab/run7", 5, 5, {"x": "float"})
    with pytest.raises(SchemaError, match="publish"):
        verify("s3://lab/run7")
