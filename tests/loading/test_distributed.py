"""Two processes of torch.distributed over gloo: they agree on each epoch, share it, and resume it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import socket
import time
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from inside import get_inside, set_inside
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from memmap_buffer import ConcatBuffer, MemmapBufferError, Prioritized, ReplayBuffer, SchemaError, pack, publish, unpack

WORLD = 2
STEPS = {"timestep_level": True, "return_indices": True}
LENGTHS = (7, 1, 12, 5, 9)


def record(buffer, *lengths):
    for length in lengths:
        buffer.store_episode(t=np.arange(length))


def items(batches):
    return [tuple(item) for batch in batches for item in batch["_indices"].tolist()]


def everything(*serials):
    return {(serial, t) for serial in serials for t in range(LENGTHS[serial])}


# What each rank does


def epochs(rank, folder, _):
    """Two epochs of loaders whose seeds would differ, and of as many batches."""
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    torch.manual_seed(rank)
    loader = buffer.dataloader(4, shuffle=True, **STEPS)
    return [[items([batch]) for batch in loader] for _ in range(2)], loader.state_dict()


def later(rank, folder, signal):
    """Rank 1 begins the epoch when an episode was published since rank 0 began it."""
    if rank == 0:
        agree = get_inside("agree")

        def signalled(self, value):
            signal.touch()
            return agree(self, value)

        set_inside(pytest.MonkeyPatch(), agree=signalled)  # in a process of its own
    buffer = ReplayBuffer.from_folder(folder, read_only=rank == 0)
    loader = buffer.dataloader(4, shuffle=True, seed=rank, **STEPS)
    while rank == 1 and not signal.exists():
        time.sleep(0.01)
    if rank == 1:
        record(buffer, 6)
    return items(loader), loader.state_dict()


def stop(rank, folder, _):
    """Three batches, the state, and the rest."""
    loader = ReplayBuffer.from_folder(folder, read_only=True).dataloader(3, shuffle="block", seed=4, **STEPS)
    batches = iter(loader)
    head = items(next(batches) for _ in range(3))
    return head, loader.state_dict(), items(batches)


def resume(rank, folder, signal):
    """Rank 0 alone has the state."""
    loader = ReplayBuffer.from_folder(folder, read_only=True).dataloader(3, shuffle="block", seed=rank, **STEPS)
    state = stop(rank, folder, signal)[1]
    if rank == 0:
        loader.load_state_dict(state)
    return items(loader)


def alone(rank, folder, _):
    """A loader that only rank 1 uses."""
    if rank == 0:
        return []
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    return items(buffer.dataloader(4, rank=0, world_size=1, **STEPS))


def given(rank, folder, _):
    """The same ranks, given: they agree as if they had not been."""
    torch.manual_seed(rank)
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    return items(buffer.dataloader(4, shuffle=True, rank=rank, world_size=WORLD, **STEPS))


def workers(rank, folder, _):
    """The same epoch with a worker and without."""
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    return [items(buffer.dataloader(4, shuffle=True, seed=3, num_workers=n, **STEPS)) for n in (0, 1)]


def uneven(rank, folder, _):
    """Two epochs in which nothing is repeated."""
    loader = ReplayBuffer.from_folder(folder, read_only=True).dataloader(
        4, seed=1, shuffle=True, tail="uneven", **STEPS
    )
    return [items([batch]) for _ in range(2) for batch in loader]


def taken_apart(rank, folder, _):
    """What another DataLoader gives of a batch sampler whose seed would differ."""
    torch.manual_seed(rank)
    loader = ReplayBuffer.from_folder(folder, read_only=True).dataloader(4, shuffle=True, **STEPS)
    other = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    return [items(other) for _ in range(2)], len(other), len(loader)


def refused(batches):
    """What they raise."""
    try:
        return items(batches)
    except MemmapBufferError as error:
        return f"{type(error).__name__}: {error}"


def of_its_own(name, of=lambda rank: rank):
    """Each rank reads a folder of its own, or a root."""

    def act(rank, folder, _):
        place = folder.parent / f"{name} {of(rank)}"
        if (place / "schema.json").exists():
            return refused(ReplayBuffer.from_folder(place, read_only=True).dataloader(4, shuffle=True, seed=1, **STEPS))
        return refused(ConcatBuffer.from_root(place).dataloader(4, shuffle=True, seed=1, **STEPS))

    return act


OWN = {
    name: of_its_own(name) for name in ("own", "behind", "diverged", "copies", "lacking", "packed", "packs", "unpacked")
}
OWN |= {f"{name} turned": of_its_own(name, lambda rank: 1 - rank) for name in ("behind", "lacking", "packed")}


def own_part(rank, folder, _):
    """The remedy for ranks with data of their own."""
    buffer = ReplayBuffer.from_folder(folder.parent / f"own {rank}", read_only=True)
    return items(buffer.dataloader(4, rank=0, world_size=1, **STEPS))


def prioritized(rank, folder, _):
    """Both ranks draw by priority and give their errors; rank 0 owns the file, rank 1 has a tree in memory."""
    torch.manual_seed(rank)
    buffer = ReplayBuffer.from_folder(folder.parent / "priorities", read_only=rank == 1)
    loader = buffer.dataloader(4, prioritized=Prioritized(alpha=1.0), **STEPS)
    drawn, every = [], sorted(everything(*range(len(LENGTHS))))
    for batch in loader:
        drawn.append(items([batch]))
        errors = [0.01 + 10 * (serial == 2) + rank + t for serial, t in drawn[-1]]
        buffer.update_priorities(batch["_indices"], torch.tensor(errors))
    now = buffer.priorities(np.array(every)).tolist()
    dist.barrier()
    try:
        buffer.update_priorities(batch["_indices"], torch.full((4,), np.nan if rank == 1 else 1.0))
    except SchemaError as error:
        text = str(error)
    same = buffer.priorities(np.array(every)).tolist() == now
    buffer.close()
    return drawn, len(loader), now, text, same, loader.state_dict()


def broken(rank, folder, _):
    """A shard appears under rank 1's eyes that cannot be read: the others do not wait for it."""
    root = folder.parent / f"broken {rank}"
    shutil.copytree(folder.parent / "lacking 0", root)
    loader = ConcatBuffer.from_root(root).dataloader(4, seed=1, **STEPS)
    if rank == 1:
        (root / "shard-00001" / "schema.json").write_text("{}")
        (root / "shard-00001").rename(root / "shard-00004")
    return refused(loader)


def unreadable(rank, folder, _):
    """The disk of rank 1 fails when the epoch begins, and the next epoch is as if nothing had been."""
    loader = ReplayBuffer.from_folder(folder, read_only=True).dataloader(4, seed=1, **STEPS)

    def fail(self):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            set_inside(patch, refresh_folders=fail)
        try:
            told = items(loader)
        except (SchemaError, OSError) as error:
            told = f"{type(error).__name__}: {error}"
    return told, items(loader)


def unequal(rank, folder, _):
    """Rank 1 was given another batch size."""
    return refused(ReplayBuffer.from_folder(folder, read_only=True).dataloader(4 - rank, seed=1, **STEPS))


def sharded(rank, folder, _):
    """A root of shards, one of which rank 1 has not looked for before rank 0 begins the epoch with it."""
    root = ConcatBuffer.from_root(folder.parent / "root")
    loader = root.dataloader(4, shuffle=True, seed=rank, **STEPS)
    dist.barrier()
    if rank == 0:
        with ReplayBuffer(folder.parent / "root" / "shard-00003", 9, 12, {"t": "int"}) as buffer:
            record(buffer, 8)
    dist.barrier()
    batches = iter(loader)
    head = items(next(batches) for _ in range(2))
    return head, loader.state_dict(), items(batches)


def published(early, change):
    """A root at a URL, to which rank 0 publishes when one rank has read the list and the other has not.

    Args:
        early: the rank that has.
        change: what is published: another shard; the first one again with an episode more, or with one marked as bad.
    """

    def act(rank, folder, _):
        near, url = folder.parent / f"near {early} {change}", f"file://{folder.parent}/far {early} {change}"
        if rank == 0:
            publish(near / "shard-00000", url)
        dist.barrier()
        root = ConcatBuffer.from_root(url, cache=f"{near} {rank}") if rank == early else None
        dist.barrier()
        if rank == 0:
            with ReplayBuffer.from_folder(near / "shard-00000") as buffer:
                if change == "episode":
                    record(buffer, 8)
                if change == "mark":
                    buffer.mark([0], add=["bad"])
            publish(near / ("shard-00001" if change == "shard" else "shard-00000"), url)
        dist.barrier()
        root = root or ConcatBuffer.from_root(url, cache=f"{near} {rank}")
        return refused(root.dataloader(4, seed=1, mark="!bad" if change == "mark" else None, **STEPS))

    return act


CHANGES = ("shard", "episode", "mark")
PUBLISHED = {f"published {early} {change}": published(early, change) for early in range(WORLD) for change in CHANGES}
ALL = (epochs, later, stop, resume, alone, given, workers, uneven, taken_apart, unequal, sharded, own_part, prioritized)
ACTS = {act.__name__: act for act in (*ALL, broken, unreadable)} | OWN | PUBLISHED


def rank_main(rank, folder, results):
    """One rank: everything above, each beginning when all are there."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    out = {}
    for name in (name for name in ACTS if name != "later"):
        out[name] = ACTS[name](rank, folder / "full", folder / name)
    for name in ("full", "room"):  # each changes its folder
        dist.barrier()
        out[name] = later(rank, folder / name, folder / f"signal {name}")
    dist.barrier()
    dist.destroy_process_group()
    results.put((rank, out))


class Both(UserDict):
    """What each act gave in each rank, and where."""

    def __init__(self, given, folder):
        super().__init__(given)
        self.folder = folder


def prepare(folder):
    """What the acts of `OWN` read: a folder or root for each rank."""
    for name in ("behind", "diverged", "copies"):
        for rank in range(WORLD):
            shutil.copytree(folder / "full", folder / f"{name} {rank}")
    for rank in range(WORLD):
        with ReplayBuffer(folder / f"own {rank}", len(LENGTHS), 12, {"t": "int"}) as buffer:
            record(buffer, *LENGTHS)
        with ReplayBuffer.from_folder(folder / f"diverged {rank}") as buffer:
            buffer.update(0, t=rank)
    with ReplayBuffer.from_folder(folder / "behind 1") as buffer:
        buffer.delete([3, 1])
    for rank in range(WORLD):
        pack(folder / f"behind {rank}", folder / f"packed {rank}")
        pack(folder / "full", folder / f"packs {rank}")
    unpack(folder / "packs 0", folder / "unpacked 0")
    shutil.copytree(folder / "packs 0", folder / "unpacked 1")
    for number in range(3):
        with ReplayBuffer(folder / "lacking 0" / f"shard-{number:05}", 9, 12, {"t": "int"}) as buffer:
            record(buffer, *LENGTHS)
    for name in PUBLISHED:
        shutil.copytree(folder / "lacking 0", folder / name.replace("published", "near"))
    shutil.copytree(folder / "lacking 0", folder / "lacking 1")
    shutil.rmtree(folder / "lacking 1" / "shard-00001")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each act gave in each rank."""
    folder = tmp_path_factory.mktemp("distributed")
    for name, max_episodes in (("full", len(LENGTHS)), ("room", 20)):
        with ReplayBuffer(folder / name, max_episodes, 12, {"t": "int"}, circular=True) as buffer:
            record(buffer, *LENGTHS)
    shutil.copytree(folder / "full", folder / "as begun")
    shutil.copytree(folder / "full", folder / "priorities")
    prepare(folder)
    for number in (0, 2):
        with ReplayBuffer(folder / "root" / f"shard-{number:05}", 9, 12, {"t": "int"}) as buffer:
            record(buffer, *LENGTHS[number:])
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=rank_main, args=(rank, folder, results)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    try:
        out = dict(results.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return Both({name: [out[rank][name] for rank in range(WORLD)] for name in out[0]}, folder)


def test_ranks_draw_their_part_of_an_epoch_by_the_same_priorities(both):
    """Each gives the errors of its batches, and all ranks take in those of all."""
    (first, count, now, text, same, state), (second, *others) = both["prioritized"]
    assert others == [count, now, text, same, state], "each other's errors count on both"
    assert len(first) == len(second) == count == 5, "34 items, 4 a batch, two ranks"
    assert first != second
    assert same
    assert "rank 1: td_errors: got a number that is not finite" in text
    expected = dict.fromkeys(sorted(everything(0, 1, 2, 3, 4)), None)
    for mine, theirs in zip(first, second, strict=True):
        for rank, batch in enumerate((mine, theirs)):
            expected |= {(serial, t): 0.01 + 10 * (serial == 2) + rank + t + 1e-6 for serial, t in batch}
    for (item, want), got in zip(expected.items(), now, strict=True):
        assert want is None or abs(got - want) < 1e-5, item
    with ReplayBuffer.from_folder(both.folder / "priorities") as buffer:
        assert buffer.priorities(np.array(list(expected))).tolist() == now, "rank 0 left them on the disk"


def test_ranks_of_different_seeds_share_every_epoch(both):
    (first, state), (second, same) = both["epochs"]
    assert state == same
    assert state["epoch"] == 2
    for mine, theirs in zip(first, second, strict=True):
        assert [len(batch) for batch in mine] == [len(batch) for batch in theirs] == [4, 4, 4, 4, 1]
        assert {item for batch in mine + theirs for item in batch} == everything(0, 1, 2, 3, 4)
        assert sum(len(batch) for batch in mine + theirs) == 34
    assert first[0] != first[1]


@pytest.mark.parametrize("early", range(WORLD))
def test_a_shard_that_is_published_while_ranks_begin_is_no_other_data(both, early):
    """They read the list again once in 10 seconds, each at another moment. The epoch is that of rank 0."""
    first, second = both[f"published {early} shard"]
    folders = range(1 if early == 0 else 2)
    assert {*first, *second} == {(number, *item) for number in folders for item in everything(0, 1, 2, 3, 4)}


@pytest.mark.parametrize("early", range(WORLD))
@pytest.mark.parametrize("change", ["episode", "mark"])
def test_a_shard_that_is_published_again_while_ranks_begin_is_read_as_it_is_then(both, early, change):
    """Where the versions of the ranks differ, all read the list anew."""
    first, second = both[f"published {early} {change}"]
    serials = range(change == "mark", 5)
    expected = {*everything(*serials), *((5, t) for t in range(8) if change == "episode")}
    assert {*first, *second} == {(0, *item) for item in expected}


def test_a_rank_that_begins_later_gives_the_episodes_that_rank_0_saw(both):
    (first, state), (second, same) = both["room"]
    assert state == same
    assert len(first) == len(second) == 17
    assert {*first, *second} == everything(0, 1, 2, 3, 4)


def test_what_a_later_rank_cannot_read_any_more_it_draws_again(both):
    """The episode published in between took the place of the oldest."""
    (first, _), (second, _) = both["full"]
    assert len(first) == len(second) == 17
    assert {*first, *second} >= everything(1, 2, 3, 4)
    assert {serial for serial, _ in second} <= {1, 2, 3, 4, 5}


def test_ranks_tell_the_same_state_and_one_process_goes_on_with_what_is_left(both, tmp_path):
    (first, state, first_rest), (second, same, second_rest) = both["stop"]
    assert state == same
    assert state["delivered"] == 18
    assert {*first, *second, *first_rest, *second_rest} == everything(0, 1, 2, 3, 4)
    shutil.copytree(both.folder / "as begun", tmp_path / "copy")
    with ReplayBuffer.from_folder(tmp_path / "copy") as buffer:
        loader = buffer.dataloader(3, shuffle="block", **STEPS)
        loader.load_state_dict(state)
        assert sorted(items(loader)) == sorted(everything(0, 1, 2, 3, 4) - {*first, *second})


def test_a_state_that_rank_0_loads_is_resumed_by_all(both):
    assert both["resume"] == [rest for _, _, rest in both["stop"]]


def test_a_loader_of_one_rank_waits_for_no_other(both):
    assert set(both["alone"][1]) == everything(0, 1, 2, 3, 4)


def test_ranks_given_as_they_are_agree_all_the_same(both):
    first, second = both["given"]
    assert {*first, *second} == everything(0, 1, 2, 3, 4)
    assert len(first) == len(second) == 17


def test_uneven_ranks_give_every_item_once(both):
    first, second = both["uneven"]
    assert [len(batch) for batch in first] == [len(batch) for batch in second] == 2 * [4, 4, 4, 4, 1]
    assert sorted(item for batch in first[:5] + second[:5] for item in batch) == sorted(everything(0, 1, 2, 3, 4))


def test_ranks_agree_on_the_whole_epochs_that_a_batch_sampler_gives(both):
    (first, *lengths), same = both["taken_apart"]
    assert (first, *lengths) == same
    assert lengths == [9, 5]
    assert [sorted(epoch) for epoch in first] == 2 * [sorted(everything(0, 1, 2, 3, 4))]
    assert first[0] != first[1]


@pytest.fixture
def recorded(tmp_path):
    with ReplayBuffer(tmp_path, len(LENGTHS), 12, {"t": "int"}, circular=True) as buffer:
        record(buffer, *LENGTHS)
        yield buffer


HOW = [{"shuffle": True}, {"num_workers": 1}, {"shuffle": True, "window_length": 3}, {"prioritized": Prioritized()}]


@pytest.mark.parametrize("options", HOW, ids=str)
def test_batches_may_be_split_and_joined_and_are_the_same_items(recorded, options):
    level = {} if "window_length" in options else {"timestep_level": True}
    loader = recorded.dataloader(4, seed=1, return_indices=True, **level, **options)

    def read(batch):
        return loader.collate_fn(loader.dataset.__getitems__(batch))

    batches = list(loader.batch_sampler)
    whole = [read(batch) for batch in batches]
    for batch, expected in zip(batches, whole, strict=True):
        assert len(batch) == len(expected["t"])
        for part, rows in ((batch[1:3], slice(1, 3)), ([*batch[:1]], slice(1)), ([batch[-1]], slice(-1, None))):
            for key, values in read(part).items():
                assert torch.equal(values, expected[key][rows]), key
    joined = read(batches[0] + batches[1])
    first, second = (batch["_indices" if level else "_index"] for batch in whole[:2])
    assert torch.equal(joined["_indices" if level else "_index"], torch.cat([first, second]))


def test_a_sampler_gives_the_items_of_its_batches(recorded):
    loader = recorded.dataloader(4, seed=1, shuffle=True, **STEPS)
    assert isinstance(loader.sampler, DistributedSampler)
    assert len(loader.sampler) == 34
    loader.sampler.set_epoch(3)
    one_by_one = items([loader.dataset.__getitems__([item]).data for item in loader.sampler])
    loader.sampler.set_epoch(3)
    assert one_by_one == items(loader)


def test_another_sampler_in_the_place_of_ours_is_refused(recorded):
    loader = recorded.dataloader(4, **STEPS)
    with pytest.raises(SchemaError, match=r"sampler: got a RandomSampler, expected the loader's own"):
        type(loader.batch_sampler)(RandomSampler(loader.dataset), batch_size=4, drop_last=False)


def test_workers_of_a_rank_change_nothing(both):
    for without, with_worker in both["workers"]:
        assert without == with_worker


def test_where_one_rank_cannot_give_its_part_all_of_them_raise(both):
    first, second = both["broken"]
    assert first.startswith("SchemaError: an epoch that not every rank can give: rank 1: ")
    assert "does not describe a memmap-buffer" in first
    assert second.startswith("NotABufferError: ") and second.removeprefix("NotABufferError: ") in first


def test_a_rank_whose_disk_fails_when_an_epoch_begins_lets_no_other_wait(both):
    (first, first_later), (second, second_later) = both["unreadable"]
    assert first.startswith("SchemaError: an epoch that not every rank can give: rank 1: [Errno 5]")
    assert second == "OSError: [Errno 5] Input/output error"
    assert {*first_later, *second_later} == everything(0, 1, 2, 3, 4)


REASONS = {
    "own": "is another buffer: their ids are",
    "behind": "is an older copy of that",
    "behind turned": "is an older copy of that",
    "diverged": "or each was written to or recoded since it was copied",
    "packed": "or each was written to or recoded since it was copied",
    "packed turned": "or each was written to or recoded since it was copied",
    "lacking": "of which nothing stands in",
    "lacking turned": "of which nothing stands in",
}


@pytest.mark.parametrize("name", REASONS)
def test_ranks_that_read_different_data_all_raise_and_are_told_where_and_what_to_do(both, name):
    for rank, text in enumerate(both[name]):
        assert isinstance(text, str), f"rank {rank} was given {text}"
        assert text.startswith("SchemaError: ")
        assert REASONS[name] in text
        assert f" on {socket.gethostname()}, " in text and str(both.folder / name.removesuffix(" turned")) in text
        assert "a rank with data of its own gives rank=0, world_size=1" in text


@pytest.mark.parametrize("name", ["copies", "packs", "unpacked"])
def test_ranks_may_read_equal_copies(both, name):
    first, second = both[name]
    assert {*first, *second} == everything(0, 1, 2, 3, 4)


def test_ranks_with_data_of_their_own_read_all_of_it_where_they_say_so(both):
    assert [set(given) for given in both["own_part"]] == 2 * [everything(0, 1, 2, 3, 4)]


def test_epochs_of_unequal_length_are_refused_on_every_rank(both):
    first, second = both["unequal"]
    assert first == second
    assert first.startswith(
        "SchemaError: an epoch of unequal length: the ranks have [5, 6] batches; give each the same"
    )


def test_the_shards_of_a_root_are_shared_without_overlap_and_the_rest_is_resumed_by_one_process(both, tmp_path):
    expected = {(number, s, t) for number in (0, 2) for s, n in enumerate(LENGTHS[number:]) for t in range(n)}
    expected |= {(3, 0, t) for t in range(8)}
    (first, state, rest), (second, same, other_rest) = both["sharded"]
    assert state == same
    every = [*first, *second, *rest, *other_rest]
    assert set(every) == expected
    assert len(every) == len(expected)
    loader = ConcatBuffer.from_root(shutil.copytree(both.folder / "root", tmp_path / "root")).dataloader(
        5, shuffle=True, **STEPS
    )
    loader.load_state_dict(state)
    assert set(items(loader)) == expected - {*first, *second}
