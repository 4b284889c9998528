"""In which order anchors are drawn: what an epoch covers, what a seed fixes, and what an index costs."""

import itertools
import pickle
import sys

import numpy as np
import pytest
import torch
from conftest import assert_same, record_episode
from inside import set_inside

from memmap_buffer import ConcatBuffer, NotEnoughDataError, Window

STEPS = [[serial, t] for serial, length in enumerate((3, 4, 5, 6)) for t in range(length)]
TIMESTEPS = {"timestep_level": True, "return_indices": True}


def order(loader, key="_indices"):
    """What one epoch gives, item by item."""
    return [item for batch in loader for item in batch[key].tolist()]


def large(recorded, num_episodes, length, name="large"):
    """Many steps, each told by its serial and its number."""
    options = {"max_episodes": num_episodes, "max_timesteps": length, "fields": {"t": "int32"}, "meta_fields": {}}
    buffer = recorded((), name=name, **options)
    for _ in range(num_episodes):
        buffer.store_episode(t=np.arange(length))
    return buffer


# What an epoch covers


@pytest.mark.parametrize("batch_size", [1, 4, 18, 100])
def test_shuffle_covers_every_item_exactly_once(recorded, batch_size):
    seen = order(recorded().dataloader(batch_size, shuffle=True, seed=1, **TIMESTEPS))
    assert sorted(seen) == STEPS
    assert seen != STEPS


def test_shuffled_trajectories_cover_every_episode_exactly_once(recorded):
    seen = order(recorded((2,) * 8).dataloader(3, shuffle=True, seed=4, return_indices=True), "_index")
    assert sorted(seen) == list(range(8))
    assert seen != list(range(8))


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [7, 7, 4]), (True, [7, 7])])
def test_drop_last_leaves_out_the_incomplete_batch_and_len_counts_it_so(recorded, drop_last, sizes):
    for shuffle in (False, True):
        loader = recorded(name=f"{shuffle}").dataloader(7, shuffle=shuffle, drop_last=drop_last, **TIMESTEPS)
        assert len(loader) == len(sizes)
        assert [len(batch["t"]) for batch in loader] == sizes


def test_drop_last_with_fewer_items_than_a_batch_raises_rather_than_give_none(recorded):
    with pytest.raises(NotEnoughDataError, match="give no batch of 18 items"):
        recorded().dataloader(19, timestep_level=True, drop_last=True)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_new_epoch_sees_the_episodes_published_since(recorded, record, shuffle):
    buffer = recorded((3, 4))
    loader = buffer.dataloader(4, shuffle=shuffle, **TIMESTEPS)
    assert sorted(order(loader)) == STEPS[:7]
    record(buffer, 2, 5)
    assert len(loader) == 3
    assert sorted(order(loader)) == STEPS[:12]


def test_an_epoch_over_episodes_that_were_all_cleared_is_empty(recorded):
    buffer = recorded((3, 4))
    loader = buffer.dataloader(4, **TIMESTEPS)
    buffer.clear()
    assert (len(loader), list(loader)) == (0, [])


# What a seed fixes


@pytest.mark.parametrize("options", [TIMESTEPS, {"window_length": 2, "return_indices": True}])
def test_the_same_seed_and_epoch_give_the_same_order(recorded, options):
    buffer = recorded((12,) * 8)
    first, second = (buffer.dataloader(5, shuffle=True, seed=3, **options) for _ in range(2))
    for _ in range(3):
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)


def test_the_order_depends_on_nothing_but_seed_epoch_and_number_of_items(recorded):
    options = {"shuffle": True, "seed": 3}
    a, b = recorded(name="a"), recorded((4, 3, 6, 5), name="b")
    orders = [
        [STEPS.index(item) for item in order(a.dataloader(4, **options, **TIMESTEPS))],
        [i for batch in b.dataloader(4, **options, timestep_level=True).batch_sampler for i in _positions(b, batch)],
    ]
    assert orders[0] == orders[1]


def _positions(buffer, anchors):
    begin = np.concatenate([[0], np.cumsum(buffer.episode_lens)])
    anchors = getattr(anchors, "anchors", anchors)
    return (begin[anchors.serial] + anchors.t).tolist()


def test_torch_manual_seed_fixes_a_loader_without_a_seed(recorded):
    buffer, orders = recorded((12,) * 8), []
    for _ in range(2):
        torch.manual_seed(11)
        loader = buffer.dataloader(5, shuffle=True, window_length=3)
        orders.append([(batch["number"].tolist(), batch["_start"].tolist()) for batch in loader])
    assert orders[0] == orders[1]
    assert [batch["number"].tolist() for batch in buffer.dataloader(5, shuffle=True)] != [a for a, _ in orders[0]]


def test_a_torch_generator_fixes_a_loader_without_a_seed(recorded):
    buffer = recorded()
    orders = [
        order(buffer.dataloader(4, shuffle=True, generator=torch.Generator().manual_seed(5), **TIMESTEPS))
        for _ in range(2)
    ]
    assert orders[0] == orders[1]


def test_crops_are_drawn_anew_in_every_epoch_and_from_everywhere(recorded):
    buffer = recorded((12,) * 8)
    loader = buffer.dataloader(8, window_length=3, seed=0)
    starts = [batch["_start"].tolist() for _ in range(30) for batch in loader]
    assert len({tuple(epoch) for epoch in starts}) == 30
    assert set(itertools.chain(*starts)) == set(range(10))


# Shares of several folders


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_batch_has_exactly_the_shares_of_its_weights(recorded, shuffle):
    small, big = recorded((2,), name="a"), recorded((12,) * 4, name="b")
    both = ConcatBuffer([small, big], weights=[1, 3])
    batches = list(both.dataloader(8, shuffle=shuffle, **TIMESTEPS))
    assert len(batches) == len(both.dataloader(8, **TIMESTEPS)) == 7
    for batch in batches[:-1]:
        assert (batch["_indices"][:, 0] == 0).sum() == 2
    sampled = both.sample(8, **TIMESTEPS)["_indices"]
    assert (sampled[:, 0] == 0).sum() == 2


@pytest.mark.parametrize("more", [{"prioritized": True}, {}, {"shuffle": True}])
def test_every_part_of_a_batch_has_the_shares_of_its_weights(recorded, more):
    """As what is learned from part by part, at several updates a step, needs it; of `sample` as of loaders"""
    both = ConcatBuffer([recorded((2,), name="a"), recorded((12,) * 4, name="b")], weights=[1, 3])
    batches = [next(iter(both.dataloader(32, **TIMESTEPS, **more)))]
    if "shuffle" not in more:
        batches.append(both.sample(32, seed=1, **TIMESTEPS, **more))
    for batch in batches:
        sources = batch["_indices"][:, 0].reshape(8, 4)
        assert ((sources == 0).sum(dim=1) == 1).all()


def test_shares_go_on_where_batches_that_were_drawn_ahead_are_thrown_away(recorded):
    sources = [recorded((12,) * 4, name="a", max_episodes=50), recorded((12,) * 4, name="b")]
    both, of_the_second = ConcatBuffer(sources, weights=[1, 2]), 0
    for batches in range(1, 61):
        of_the_second += int((both.sample(4, **TIMESTEPS)["_indices"][:, 0] == 1).sum())
        assert abs(of_the_second - 4 * batches * 2 / 3) < 1
        if batches % 5 == 0:
            record_episode(sources[0], batches, 12)


def test_a_batch_that_was_not_read_does_not_count_for_the_shares(recorded, monkeypatch):
    both, of_the_second = ConcatBuffer([recorded((12,), name="a"), recorded((12,), name="b")], weights=[1, 2]), 0

    def interrupted(*_):
        raise KeyboardInterrupt("now")

    for batches in range(1, 31):
        if batches < 5:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="now"):
                set_inside(patch, read_batch=interrupted)
                both.sample(1, **TIMESTEPS)
        of_the_second += int((both.sample(1, **TIMESTEPS)["_indices"][:, 0] == 1).sum())
        assert abs(of_the_second - batches * 2 / 3) < 1


def test_each_weighted_source_goes_round_without_repeating_before_all_were_seen(recorded):
    first, second = recorded((5,), name="a"), recorded((12,) * 4, name="b")
    both = ConcatBuffer([first, second], weights=[0.5, 0.5])
    seen = order(both.dataloader(10, shuffle=True, seed=0, **TIMESTEPS))
    of_first = [t for source, _, t in seen if source == 0]
    for begin in range(0, len(of_first) - 4, 5):
        assert sorted(of_first[begin : begin + 5]) == list(range(5))
    of_second = [(serial, t) for source, serial, t in seen if source == 1]
    assert len(of_second) == len(set(of_second))


# What an index costs


def index_of(buffer, **options):
    return buffer.dataset(**options).reader.index()


def nbytes(index):
    arrays = [value for value in vars(index).values() if isinstance(value, np.ndarray)]
    return sum(array.nbytes for array in arrays) + sys.getsizeof(index)


@pytest.mark.parametrize("options", [{}, {"timestep_level": True}, {"n_steps": 3}, {"view": Window(5)}])
def test_an_index_costs_memory_per_episode_and_not_per_step(recorded, options):
    """Defect (I) of memmap-replay-buffer: 16 bytes per timestep."""
    few, many = (
        index_of(large(recorded, 100, length, name=str(length)), **options) for length in (10, 1000)
    )  # 10³ and 10⁵ steps
    assert 100 * 24 <= nbytes(few) == nbytes(many) < 100 * 32 + 1000
    assert len(many) == (100 if not options else len(few) + 100 * 990)


def test_an_index_with_filter_fields_costs_memory_per_surviving_run(recorded):
    buffer = large(recorded, 100, 1000)
    one_run = index_of(buffer, timestep_level=True, filter_fields={"t": (100, 900)})
    assert len(one_run) == 80_000
    assert nbytes(one_run) < 100 * 32 + 1000
    two_runs = index_of(buffer, timestep_level=True, filter_fields={"t": lambda t: (t < 100) | (t >= 900)})
    assert len(two_runs) == 20_000
    assert nbytes(two_runs) < 200 * 32 + 1000


def test_a_sampler_holds_no_list_of_its_items(recorded):
    sampler = large(recorded, 100, 1000).dataloader(8, shuffle=True, timestep_level=True).batch_sampler
    next(iter(sampler))
    assert len(pickle.dumps(sampler)) < 2**14
