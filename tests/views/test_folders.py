"""Folders read as one while they are replaced, changed and removed: no row but those of the episode that was looked up.

In every buffer here x tells the shard, which life of it, the serial and the timestep; y is x + 1; and `wide` is x in a
row too large to be taken by its address.
"""

from __future__ import annotations

import gc
import pickle
import shutil
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from inside import folders_of
from profiles import examples
from specification import DELETED, EXTENT, FIRST_ROW, SERIAL, SHOWN

from memmap_buffer import (
    ConcatBuffer,
    Field,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    StaleEpisodeError,
    Window,
    pack,
)
from memmap_buffer.format.records import WORDS
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import write_word
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.views import by_address
from memmap_buffer.views.batch_builder import BatchBuilder

LIFE, SHARD, SERIAL_STEP = 10**6, 10**4, 100
FIELDS = {"x": Field("int", final=True), "wide": ("int", (200,)), "y": "int"}
META = {"task": "int"}
OPTIONS: dict[str, dict[str, Any]] = {
    "timesteps": {"timestep_level": True},
    "transitions": {"n_steps": 2},
    "episodes": {},
    "windows": {"window_length": 2},
}


def put(buffer, number, life, lengths):
    """Episodes whose every value tells where it belongs."""
    for length in lengths:
        serial = int(buffer.serials[-1]) + 1 if len(buffer) else 0
        x = life * LIFE + number * SHARD + serial * SERIAL_STEP + np.arange(length + 1)
        buffer.store_episode(x=x, y=x[:-1] + 1, wide=np.repeat(x[:-1, None], 200, 1), task=x[0])


def shard(root, number, lengths=(3, 4, 5), *, life=0, max_episodes=6, max_timesteps=9, **options):
    path = root / f"shard-{number:05}"
    with ReplayBuffer(path, max_episodes, max_timesteps, FIELDS, META, **options) as buffer:
        put(buffer, number, life, lengths)
    return path


def replaced(root, number, *args, **options):
    """A shard made anew under its old number, as whoever removes it and begins again does."""
    shutil.rmtree(root / f"shard-{number:05}")
    return shard(root, number, *args, **options)


@pytest.fixture
def root(tmp_path):
    for number in range(3):
        shard(tmp_path, number)
    return tmp_path


def check(batch, lives=None):
    """Every value of a batch is of the same life of its shard, its serial and its timesteps; returns the lives."""
    index = (batch["_indices"] if "_indices" in batch else batch["_index"]).tolist()
    lens = batch["_lens"].tolist() if "_lens" in batch else [1] * len(index)
    seen = set()
    for b, (number, serial, *t) in enumerate(index):
        x = np.atleast_1d(np.asarray(batch["x"][b]))[: lens[b]]
        life = int(x[0]) // LIFE
        seen.add(life)
        first = life * LIFE + number * SHARD + serial * SERIAL_STEP
        start = t[0] if t else int(x[0]) - first  # a random window tells its start by its values alone
        assert x.tolist() == list(range(first + start, first + start + len(x)))
        assert np.atleast_1d(np.asarray(batch["y"][b]))[: lens[b]].tolist() == (x + 1).tolist()
        assert (np.asarray(batch["wide"][b]).reshape(-1, 200)[: lens[b]] == x[:, None]).all()
        assert int(batch["task"][b]) == first
    assert lives is None or seen <= lives
    return seen


def copied(builder):
    return builder.gather.copy(builder.batch)


def batches(buffer, how):
    return buffer.dataloader(4, return_indices=True, **OPTIONS[how])


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("smaller", [False, True])
def test_what_was_planned_is_read_from_the_shard_that_it_was_looked_up_in(root, how, smaller):
    folders = folders_of(ConcatBuffer.from_root(root))
    reader = BatchReader(folders, {"return_indices": True, **OPTIONS[how]})
    index = reader.index()
    anchors = reader.crop(index.locate(np.arange(len(index))), lambda: np.random.default_rng(0))
    builder = reader.build(anchors)
    sizes = {"max_episodes": 1, "max_timesteps": 2, "lengths": (2,)} if smaller else {}
    for number in (0, 2):
        replaced(root, number, life=1, **sizes)
    folders.refresh()
    batch = copied(builder)
    assert check(batch) == {0}
    assert builder.fresh().all()
    assert 1 in check(ConcatBuffer.from_root(root).sample(200, return_indices=True, **OPTIONS["timesteps"]))


@pytest.mark.parametrize("how", OPTIONS)
def test_a_shard_that_is_replaced_in_the_middle_of_a_batch_gives_no_row_of_both(root, how, in_the_middle):
    buffer, life = ConcatBuffer.from_root(root), iter(range(1, 99))

    def replace():
        now = next(life)
        for number in range(3):
            replaced(root, number, life=now)
        buffer.refresh()

    for _ in range(3):
        in_the_middle(replace)
        check(buffer.sample(64, return_indices=True, **OPTIONS[how]))


@pytest.mark.parametrize("how", OPTIONS)
def test_loaders_go_on_when_shards_become_smaller_ones(root, how):
    buffer = ConcatBuffer.from_root(root)
    seen = iter(batches(buffer, how))
    check(next(seen))
    for number in range(3):
        replaced(root, number, (2,), life=1, max_episodes=1, max_timesteps=2)
    buffer.refresh()
    for batch in seen:
        check(batch)
    assert all(check(batch) == {1} for batch in batches(buffer, how))


def test_what_a_filter_chose_of_a_shard_that_became_smaller_is_not_looked_for_in_it(root):
    buffer = ConcatBuffer.from_root(root)
    reader = BatchReader(folders_of(buffer), {**OPTIONS["timesteps"], "filter_meta": {"task": lambda task: task >= 0}})
    there = pickle.loads(pickle.dumps(reader))  # as in a worker, which cannot call it
    assert len(there.index()) == 36
    for number in range(3):
        replaced(root, number, (2,), life=1, max_episodes=1)
    there.folders.refresh()
    assert there.index().living(there.folders).slot.tolist() == [0, 0, 0]  # of serial 0 each; others are not there


@pytest.mark.parametrize("options", [{"shuffle": "block"}, {"shuffle": True}])
def test_reading_ahead_of_a_shard_that_became_smaller_goes_on(root, options):
    buffer = ConcatBuffer.from_root(root)
    loader = buffer.dataloader(4, return_indices=True, **OPTIONS["timesteps"], **options)
    seen = iter(loader)
    next(seen)
    for number in range(3):
        replaced(root, number, (2,), life=1, max_episodes=1, max_timesteps=2)
    buffer.refresh()
    for batch in seen:
        check(batch)


def test_a_shard_that_is_overwritten_is_another_to_who_reads_the_root(root):
    buffer = ConcatBuffer.from_root(root)
    assert check(buffer.sample(100, return_indices=True, **OPTIONS["timesteps"])) == {0}
    for life in (1, 2):
        for number in range(3):
            shard(root, number, (2, 2), life=life, overwrite=True)
        assert check(buffer.sample(100, return_indices=True, **OPTIONS["timesteps"])) == {life}


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_that_go_on_read_the_shard_that_took_the_place_of_another(root, context):
    loader = ConcatBuffer.from_root(root).dataloader(
        4,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=context,
        return_indices=True,
        **OPTIONS["timesteps"],
    )
    for life in range(3):
        assert [check(batch) for batch in loader] == [{life}] * 9
        for number in range(3):
            replaced(root, number, life=life + 1)


def test_a_shard_of_other_fields_is_refused_until_it_is_removed(root):
    buffer = ConcatBuffer.from_root(root)
    check(buffer.sample(9, return_indices=True, **OPTIONS["timesteps"]))
    for number in (3, 0):  # one that was not there, and the one that told the fields
        path = root / f"shard-{number:05}"
        shutil.rmtree(path, ignore_errors=True)
        ReplayBuffer(path, 2, 4, {"x": "float32", "y": ("int8", (3,))}).close()
        for _ in range(2):
            with pytest.raises(SchemaMismatchError, match=r"(?s)have different fields.*'x'.*'wide'.*'y'.*'task'.*join"):
                buffer.sample(9, **OPTIONS["timesteps"])
        shutil.rmtree(path)
        batch = buffer.sample(99, return_indices=True, **OPTIONS["timesteps"])
        assert check(batch) == {0}
        assert set(batch["_indices"][:, 0].tolist()) == ({0, 1, 2} if number == 3 else {1, 2})


def test_shards_of_other_sizes_and_packed_ones_are_read_beside_each_other(root, tmp_path_factory):
    shard(root, 3, (9, 1, 30), max_episodes=4, max_timesteps=30)
    apart = tmp_path_factory.mktemp("apart")
    shard(apart, 4, (1, 7, 2))
    pack(apart / "shard-00004", root / "shard-00004")
    buffer = ConcatBuffer.from_root(root)
    for how in OPTIONS:
        got = [batch for batch in batches(buffer, how)]
        for batch in got:
            check(batch)
        numbers = {row[0] for batch in got for row in batch["_index" if "_index" in batch else "_indices"].tolist()}
        assert numbers == set(range(5))


def test_a_field_that_one_shard_adds_is_not_missed_and_one_that_it_drops_is_told(root):
    buffer = ConcatBuffer.from_root(root)
    check(buffer.sample(9, return_indices=True, **OPTIONS["timesteps"]))
    with ReplayBuffer.from_folder(root / "shard-00001") as writer:
        writer.add_field("more", Field("float32", default=1))
        writer.store_episode(x=[LIFE], y=[2], wide=[np.zeros(200, int)], task=3)
    batch = buffer.sample(99, return_indices=True, **OPTIONS["timesteps"], filter_meta={"task": (10, None)})
    assert check(batch) == {0}
    with ReplayBuffer.from_folder(root / "shard-00001") as writer:
        writer.drop_field("y")
        writer.add_field("y", Field("float32", default=1))
    for _ in range(2):
        with pytest.raises(SchemaMismatchError, match="its schema was changed since it was opened"):
            buffer.sample(9, **OPTIONS["timesteps"])


@example(word=EXTENT, value=DELETED << 32 | 1, slot=0, how="timesteps")
@examples(25)
@given(
    word=st.sampled_from([SERIAL, EXTENT, FIRST_ROW, SHOWN]),
    value=st.integers(0, 2**64 - 1) | st.integers(0, 60),
    slot=st.integers(0, 6),
    how=st.sampled_from(sorted(OPTIONS)),
)
def test_a_record_that_is_forged_while_it_is_mapped_leads_to_no_row_of_another_shard(
    tmp_path_factory, word, value, slot, how
):
    """Its check stays that of the record that it was, so that it passes for that; only bounds can hold it."""
    place = tmp_path_factory.mktemp("root")
    for number in range(1, 4):
        shard(place, number)
    buffer = ConcatBuffer.from_root(place)
    loader = iter(batches(buffer, how))
    with (place / "shard-00002" / "episodes.npy").open("r+b", buffering=0) as file:
        size = file.seek(0, 2)
        offset = size - (7 - slot) * 8 * WORDS + 8 * word
        write_word(file.fileno(), value, offset)
    try:
        for batch in loader:
            index = batch["_indices"] if "_indices" in batch else batch["_index"]
            for number, x in zip(index[:, 0].tolist(), batch["x"].reshape(len(index), -1), strict=True):
                # 0 is padding, or a row of this shard that was not written yet
                assert all(value == 0 or value // SHARD == number for value in x.tolist())
    except StaleEpisodeError:
        pass  # it is refused: it says that it is deleted, or chance drew it again each time
    except (SchemaError, ValueError, IndexError) as error:  # of slices that lie nowhere, or a batch of 2^32 steps
        assert how != "timesteps", error
    finally:
        shutil.rmtree(place)


def test_maps_live_as_long_as_a_plan_and_no_longer(root):
    buffer = ConcatBuffer.from_root(root)
    reader = BatchReader(folders_of(buffer), {"return_indices": True, **OPTIONS["timesteps"]})
    builder = reader.build(reader.index().locate(np.arange(36)))
    maps = [weakref.ref(storage.maps.rows["y"].base) for storage in folders_of(buffer).storages[1:]]
    for number in (1, 2):
        shutil.rmtree(root / f"shard-{number:05}")
    buffer.refresh()
    buffer.refresh()
    gc.collect()
    assert all(map() is not None for map in maps)
    assert check(copied(builder)) == {0}
    del builder
    reader.index(refresh=True)
    gc.collect()
    assert [map() for map in maps] == [None, None]  # so the disk gets back what was removed


def test_what_a_batch_reads_by_address_is_held_though_another_thread_put_it_in_the_place_of_its_own(root):
    """From Python 3.12 on two threads may each compute what is kept from then on, and one is thrown away."""
    folders = folders_of(ConcatBuffer.from_root(root))
    reader = BatchReader(folders, {"return_indices": True, **OPTIONS["timesteps"]})
    index = reader.index()
    builder = reader.build(index.locate(np.arange(len(index))))
    served = [weakref.ref(table.__dict__.pop("served")) for table in folders.tables]
    gc.collect()
    assert all(array() is not None for array in served)
    assert check(copied(builder)) == {0}


def test_maps_that_two_threads_made_at_a_time_are_held_as_long_as_either_is_read(root, monkeypatch):
    folders = folders_of(ConcatBuffer(sorted(root.iterdir())))
    reader = BatchReader(folders, {"return_indices": True, **OPTIONS["timesteps"]})
    anchors = reader.index().locate(np.arange(36))
    one, address_of = folders.storages[1], by_address.address_of
    theirs, mine = one.maps, Storage.open(one.path, read_only=True).maps
    rows, builders, others = weakref.ref(theirs.rows["y"].base), [], [theirs]

    def told(array):
        if array is mine.rows["y"] and others:  # the first thread is about to keep what it has told
            one.__dict__["maps"] = others.pop()
            builders.append(reader.build(anchors))
            check(copied(builders[0]))
            one.__dict__["maps"] = mine
        return address_of(array)

    monkeypatch.setattr(by_address, "address_of", told)
    one.__dict__["maps"] = mine
    check(copied(reader.build(anchors)))
    del theirs
    gc.collect()
    assert rows() is not None
    assert check(copied(builders[0])) == {0}


@pytest.mark.parametrize("how", OPTIONS)
def test_a_record_that_was_looked_up_before_another_thread_read_newer_tables_is_not_taken_for_one_of_these(
    tmp_path, monkeypatch, how
):
    sources = [shard(tmp_path, number, circular=True, max_episodes=3) for number in range(3)]
    writers = [ReplayBuffer.from_folder(source) for source in sources]
    buffer = ConcatBuffer([ReplayBuffer.from_folder(source, verify="read") for source in sources])
    look_up, lives = Storage.look_up, iter(range(1, 3))

    def meanwhile(self, *args):
        found = look_up(self, *args)
        life = next(lives, None) if self.path == sources[2] else None
        if life is not None:
            for writer, number in zip(writers, range(3), strict=True):
                put(writer, number, life, (6, 2, 5, 3))
            buffer.refresh()
        return found

    monkeypatch.setattr(Storage, "look_up", meanwhile)
    for _ in range(3):
        assert check(buffer.sample(64, return_indices=True, **OPTIONS[how])) <= {1, 2}
    assert next(lives, None) is None
    for writer in writers:
        writer.close()


def test_a_window_does_not_run_on_into_an_episode_of_the_shard_that_took_the_place_of_its_own(root, monkeypatch):
    buffer = ConcatBuffer.from_root(root)
    run_on, lives = BatchBuilder.run_on, iter(range(1, 3))

    def meanwhile(self, steps):
        life = next(lives, None)
        if life is not None:
            replaced(root, 1, (3, 6, 2), life=life)
            buffer.refresh()
        return run_on(self, steps)

    monkeypatch.setattr(BatchBuilder, "run_on", meanwhile)
    for _ in range(4):
        batch = buffer.sample(64, return_indices=True, view=Window(6, boundary="continue"))
        for (number, serial, t), x in zip(batch["_indices"].tolist(), batch["x"].numpy(), strict=True):
            begin = int(x[0]) // LIFE * LIFE + number * SHARD
            lengths = (3, 4, 5) if begin < LIFE else (3, 6, 2)
            whole = [begin + i * SERIAL_STEP + step for i, length in enumerate(lengths) for step in range(length)]
            first = whole.index(begin + serial * SERIAL_STEP + t)
            assert x.tolist() == [*whole[first : first + 6], *[0] * 6][:6]
    assert next(lives, None) is None


@pytest.mark.parametrize("how", OPTIONS)
def test_a_slot_whose_record_is_damaged_in_the_shard_that_took_the_place_of_another_is_drawn_again(
    root, tmp_path_factory, how
):
    buffer = ConcatBuffer.from_root(root)
    reader = BatchReader(folders_of(buffer), {"return_indices": True, **OPTIONS[how]})
    index = reader.index()
    anchors = reader.crop(index.locate(np.arange(len(index))), lambda: np.random.default_rng(0))
    apart = shard(tmp_path_factory.mktemp("apart"), 1, life=1)
    shutil.rmtree(root / "shard-00001")
    pack(apart, root / "shard-00001")
    with (root / "shard-00001" / "episodes.npy").open("r+b", buffering=0) as file:
        write_word(file.fileno(), 2**63 + 7, file.seek(0, 2) - 8 * WORDS + 8 * FIRST_ROW)
    buffer.refresh()
    assert check(reader.read(anchors)) == {0, 1}


def test_threads_that_read_while_shards_grow_and_are_replaced_see_whole_episodes(root):
    buffer, errors, done = ConcatBuffer.from_root(root), [], threading.Event()

    def read(seed):
        try:
            while not done.is_set():
                for how in OPTIONS:
                    check(buffer.sample(32, return_indices=True, **OPTIONS[how]))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng(0)
    for life in range(1, 25):
        number = int(rng.integers(3))
        if rng.random() < 0.5:
            replaced(root, number, (2,) * int(rng.integers(1, 5)), life=life, max_timesteps=int(rng.integers(2, 20)))
        else:
            shard(root, 3 + life, (1, 2), life=life)
        buffer.refresh()
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
