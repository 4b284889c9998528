"""Which part of an epoch each rank gives, by the definition: a batch each in turn, then what is left in equal parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from memmap_buffer import NotEnoughDataError, ReplayBuffer, SchemaError
from memmap_buffer.items.rank_partition import RankPartition, Ranks


def slow(items, begin, batch_size, world, drop_last, tail):
    """Every rank's batches, as lists of numbers."""
    out, at = [[] for _ in range(world)], begin
    while items - at >= batch_size * world:
        for rank in range(world):
            out[rank].append(list(range(at, at + batch_size)))
            at += batch_size
    left = max(0, items - at)
    if tail == "uneven":
        for rank, part in enumerate(np.array_split(np.arange(at, at + left), world)):
            out[rank] += [part.tolist()] if len(part) and not (drop_last and len(part) < batch_size) else []
        return out
    size = left // world + (tail == "pad" and left % world > 0)
    for rank in range(world if size and (size == batch_size or not drop_last) else 0):
        out[rank].append(list(range(at + rank * size, at + (rank + 1) * size)))
    return out


sizes = {
    "items": st.integers(0, 200),
    "begin": st.integers(0, 210),
    "batch_size": st.integers(1, 20),
    "world": st.integers(1, 6),
    "drop_last": st.booleans(),
    "tail": st.sampled_from(["pad", "drop", "uneven"]),
}


def splits(world, items, begin, batch_size, drop_last, tail):
    return [RankPartition(items, begin, batch_size, Ranks(rank, world), drop_last, tail) for rank in range(world)]


@examples(300)
@given(chunk=st.integers(1, 100), **sizes)
def test_each_rank_gives_the_batches_of_the_definition(chunk, world, **how):
    got = [[batch.tolist() for part in split.chunks(chunk) for batch in part] for split in splits(world, **how)]
    assert got == slow(world=world, **how)
    assert [len(split) for split in splits(world, **how)] == [len(batches) for batches in got]


@examples(300)
@given(**sizes)
def test_what_all_ranks_have_given_is_the_beginning_of_the_epoch(world, **how):
    ranks = splits(world, **how)
    parts = [[batch for part in split.chunks(50) for batch in part.tolist()] for split in ranks]
    for number in range(ranks[0].full):
        turn = [i for part in parts for i in part[number]]
        for split in ranks:
            assert turn == list(range(split.num_given(number), split.num_given(number + 1)))
    for split in ranks:
        assert not split.last or split.num_given(len(split)) == how["items"]


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (0.0, 1), (True, 2), ("0", 1)])
def test_a_rank_that_cannot_be_is_refused(rank, world_size):
    with pytest.raises(SchemaError, match="rank, world_size: got"):
        Ranks(rank, world_size)


@pytest.fixture
def buffer(tmp_path):
    with ReplayBuffer(tmp_path, 5, 10, {"x": "int"}) as buffer:
        buffer.store_episode(x=range(10))
        yield buffer


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 0, "seed": 1}, "rank, world_size: got 0, None; give both"),
        ({"rank": 3, "world_size": 2, "seed": 1}, "0 ≤ rank < world_size"),
        ({"tail": "keep"}, "tail: got 'keep', expected one of 'pad', 'drop', 'uneven'"),
        ({"shuffle": "blocks"}, "shuffle: got 'blocks', expected one of False, True, 'block'"),
        ({"shuffle_window": 3}, "shuffle_window: got 3 with shuffle=False"),
        ({"shuffle": "block", "shuffle_window": 0}, "shuffle_window: got 0"),
        ({"tial": "pad"}, "did you mean 'tail'"),
    ],
    ids=str,
)
def test_options_of_the_order_that_cannot_be_are_refused(buffer, options, text):
    with pytest.raises(SchemaError, match=text):
        buffer.dataloader(2, **{"timestep_level": "window_length" not in options, **options})


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": "block"}, {"window_length": 2}], ids=str)
def test_ranks_that_would_each_draw_a_seed_of_their_own_begin_no_epoch_without_one(buffer, options):
    loader = buffer.dataloader(2, timestep_level="window_length" not in options, rank=0, world_size=2, **options)
    for begin in (loader.__iter__, lambda: next(iter(loader.batch_sampler))):
        with pytest.raises(
            SchemaError, match=r"seed: got None, and the ranks .* cannot agree on one; give .*, or load"
        ):
            begin()
    in_order = buffer.dataloader(2, timestep_level=True, rank=0, world_size=2)
    assert sum(len(batch["x"]) for batch in in_order) == 5


def test_ranks_without_a_batch_each_are_told_so(buffer):
    with pytest.raises(NotEnoughDataError, match="batch_size=5 for 3 ranks give no batch of 10 items"):
        buffer.dataloader(5, timestep_level=True, drop_last=True, rank=0, world_size=3)
    with pytest.raises(NotEnoughDataError, match="tail='drop' and batch_size=4 for 11 ranks"):
        buffer.dataloader(4, timestep_level=True, tail="drop", rank=0, world_size=11)


@pytest.mark.parametrize("shuffle", [False, True, "block"])
@pytest.mark.parametrize(("tail", "counts"), [("pad", [4, 4, 4]), ("drop", [3, 3, 3]), ("uneven", [4, 3, 3])])
def test_ranks_do_not_overlap_but_for_the_padding(buffer, shuffle, tail, counts):
    options = {"timestep_level": True, "shuffle": shuffle, "seed": 2, "tail": tail, "world_size": 3}
    loaders = [buffer.dataloader(2, rank=rank, **options) for rank in range(3)]
    for _ in range(3):
        seen = [[x for batch in loader for x in batch["x"].tolist()] for loader in loaders]
        assert [len(part) for part in seen] == counts
        assert len({x for part in seen for x in part}) == min(10, sum(counts))
