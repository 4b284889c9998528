"""Chance: the shuffle is a bijection and looks like one, shares are exact, epochs are fixed by (seed, epoch)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from memmap_buffer import NotEnoughDataError, RandomCrop, ReplayBuffer
from memmap_buffer.items.shuffle import HEADS, BlockShuffle, Permutation, Quota, uniform
from memmap_buffer.loading import epochs


def order(n, *seed):
    return Permutation(n, *seed)(np.arange(n))


def buffer_of(folder, *lengths, **how):
    """Episodes whose value is 100 * position + t."""
    how = {"max_episodes": 20, "max_timesteps": 60, "circular": True, **how}
    buffer = ReplayBuffer(folder, fields={"x": "int"}, **how)
    for i, length in enumerate(lengths):
        buffer.store_episode(x=100 * i + np.arange(length))
    return buffer


def values(loader):
    return [value for batch in loader for value in batch["x"].tolist()]


def assert_uniform(counts):
    """Counts are as of equally likely outcomes: χ² to 5 σ of its mean."""
    expected, degrees = counts.mean(), len(counts) - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 5 * np.sqrt(2 * degrees)


def test_epochs_of_a_few_items_come_in_every_order_equally_often(tmp_path):
    loader = buffer_of(tmp_path, 4).dataloader(4, timestep_level=True, shuffle=True, seed=1)
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for _ in range(1200):
        counts[tuple(values(loader))] += 1
    assert_uniform(np.array([*counts.values()]))


class TestPermutation:
    def test_it_is_a_bijection_for_every_size_up_to_two_thousand(self):
        for n in range(1, 2001):
            assert (np.sort(order(n, 7, n)) == np.arange(n)).all(), n

    @pytest.mark.parametrize("n", [2**16, 2**16 + 1, 2**20 - 1, 10**6 + 3])
    def test_it_is_a_bijection_for_a_large_size(self, n):
        assert (np.bincount(order(n, 3), minlength=n) == 1).all()

    @examples(30)
    @given(st.integers(10**7, 2**62), st.integers(0, 2**63 - 1), st.integers(0, 99))
    def test_no_two_positions_of_a_huge_size_meet(self, n, seed, epoch):
        positions = np.unique(np.linspace(0, n - 1, 5000).astype(np.int64).clip(0, n - 1))
        near = np.arange(5000)
        went = Permutation(n, seed, epoch)(np.union1d(positions, near))
        assert len(np.unique(went)) == len(went)
        assert 0 <= went.min() <= went.max() < n

    def test_a_position_goes_where_it_goes_whatever_is_asked_with_it(self):
        permutation = Permutation(1000, 5)
        alone = [int(permutation(np.array([i]))[0]) for i in range(1000)]
        assert alone == order(1000, 5).tolist()

    def test_nothing_of_no_positions(self):
        assert order(0, 1).tolist() == []

    @pytest.mark.parametrize("n", [64, 1000, 4096, 5000])
    def test_its_output_shows_no_order(self, n):
        """Correlation, ascents and mean step are as a uniform shuffle's: over 200 seeds, to 5 σ of the mean."""
        scores = []
        for seed in range(200):
            p = order(n, seed).astype(np.float64)
            correlation = np.corrcoef(np.arange(n), p)[0, 1] * np.sqrt(n - 1)
            lagged = np.corrcoef(p[1:], p[:-1])[0, 1] * np.sqrt(n - 1)
            ascents = ((np.diff(p) > 0).sum() - (n - 1) / 2) / np.sqrt((n + 1) / 12)
            # |p[i+1] - p[i]| of a uniform shuffle has mean (n + 1) / 3 and, nearly, variance n² / 18
            steps = (np.abs(np.diff(p)).mean() - (n + 1) / 3) / (n / np.sqrt(18)) * np.sqrt(n - 1)
            scores.append([correlation, lagged, ascents, steps])
        assert np.abs(np.mean(scores, axis=0)).max() < 5 / np.sqrt(200)
        assert np.abs(scores).max() < 6

    @pytest.mark.parametrize("n", [2, 3, 4, 5])
    def test_every_order_of_a_few_is_equally_likely(self, n):
        every = list(itertools.permutations(range(n)))
        counts = dict.fromkeys(every, 0)
        for seed in range(100 * len(every)):
            counts[tuple(order(n, seed).tolist())] += 1
        assert_uniform(np.array([*counts.values()]))

    @pytest.mark.parametrize("n", [8, 12, 20, 64, 511, 512, 513])
    def test_every_position_goes_everywhere_equally_often(self, n):
        counts = np.zeros((n, n))
        for seed in range(2000):
            counts[np.arange(n), order(n, seed)] += 1
        expected, degrees = 2000 / n, (n - 1) ** 2
        assert ((counts - expected) ** 2 / expected).sum() < degrees + 5 * np.sqrt(2 * degrees)

    @pytest.mark.parametrize("n", [16, 64, pytest.param(256, marks=pytest.mark.slow)])
    def test_half_of_the_orders_take_an_odd_number_of_exchanges(self, n):
        """A Feistel network of a power of 4 gives even permutations alone."""
        odd = sum(np.linalg.det(np.eye(n)[order(n, seed)]) < 0 for seed in range(400))
        assert_uniform(np.array([odd, 400 - odd]))

    def test_every_position_is_equally_often_first(self):
        n, draws = 37, 3700
        first = [int(Permutation(n, 1, seed)(np.zeros(1, np.int64))[0]) for seed in range(draws)]
        assert_uniform(np.bincount(first, minlength=n))

    def test_seed_and_epoch_each_give_another_order(self):
        seen = {tuple(order(50, *key).tolist()) for key in [(0, 0), (0, 1), (1, 0), (1, 1), (0,), (2, 0), (0, 2)]}
        assert len(seen) == 6  # a trailing zero is no other seed
        assert (order(50, 4, 2) == order(50, 4, 2)).all()


def block_order(n, block, window, *seed):
    return BlockShuffle(n, block, window, *seed)(np.arange(n))


class TestBlockShuffle:
    @examples(200)
    @given(st.integers(1, 700), st.integers(1, 40), st.integers(1, 20), st.integers(0, 99))
    def test_it_is_a_bijection_for_every_size(self, n, block, blocks, seed):
        assert (np.sort(block_order(n, block, block * blocks, seed)) == np.arange(n)).all()

    @examples(200)
    @given(st.integers(1, 700), st.integers(1, 40), st.integers(1, 20), st.integers(0, 99))
    def test_a_window_comes_from_so_many_blocks_of_neighbours(self, n, block, blocks, seed):
        window = block * blocks
        order = block_order(n, block, window, seed)
        for at in range(0, n, window):
            part = np.sort(order[at : at + window])
            gaps = np.flatnonzero(np.diff(part) > 1)
            at_the_end = bool(part[0] == 0 and part[-1] == n - 1)  # a block that begins there goes on at position 0
            assert len(gaps) + 1 <= blocks + at_the_end

    @examples(100)
    @given(st.integers(1, 700), st.integers(1, 40), st.integers(1, 20), st.integers(0, 99))
    def test_the_places_of_a_window_are_those_of_its_items(self, n, block, blocks, seed):
        shuffle = BlockShuffle(n, block, block * blocks, seed)
        for number in range(-(-n // (block * blocks))):
            items = shuffle(np.arange(number * block * blocks, min(n, (number + 1) * block * blocks)))
            places = [i for low, high in shuffle.places(number) for i in range(low, high)]
            assert sorted(places) == sorted(items.tolist())

    @examples(200)
    @given(st.integers(1, 700), st.integers(1, 40), st.integers(1, 20), st.integers(0, 99))
    def test_the_first_window_begins_with_the_head_of_each_of_its_blocks(self, n, block, blocks, seed):
        shuffle = BlockShuffle(n, block, block * blocks, seed)
        order, head = shuffle(np.arange(min(n, block * blocks))), block // HEADS
        whole = (len(order) // block) * head
        expected = [(low + i) % n for low, high in shuffle.places(0) for i in range(head) if high - low >= block]
        assert whole - len(expected) in (0, head)  # the block that runs over the end is two places
        assert set(expected) <= set(order[:whole].tolist())
        if whole > 50:
            assert (np.diff(order[:whole]) != 1).mean() > 0.5  # they are mixed

    def test_a_position_goes_where_it_goes_whatever_is_asked_with_it(self):
        shuffle = BlockShuffle(1000, 7, 70, 5)
        alone = [int(shuffle(np.array([i]))[0]) for i in range(1000)]
        assert alone == block_order(1000, 7, 70, 5).tolist()

    def test_every_item_is_equally_often_anywhere(self):
        """First, in the first window, and beside its neighbour: to 5 σ, over 2000 seeds."""
        n, draws = 60, 2000
        orders = np.array([block_order(n, 4, 12, 9, seed) for seed in range(draws)])
        for counts, share in (
            (np.bincount(orders[:, 0], minlength=n), 1 / n),
            (np.bincount(orders[:, -1], minlength=n), 1 / n),
            (np.bincount(orders[:, :12].ravel(), minlength=n), 12 / n),
        ):
            sigma = np.sqrt(draws * share * (1 - share))
            assert np.abs(counts - draws * share).max() < 5 * sigma

    def test_a_window_of_everything_shows_no_order(self):
        n, scores = 1000, []
        for seed in range(200):
            p = block_order(n, 10, 1000, seed).astype(np.float64)
            correlation = np.corrcoef(np.arange(n), p)[0, 1] * np.sqrt(n - 1)
            lagged = np.corrcoef(p[1:], p[:-1])[0, 1] * np.sqrt(n - 1)
            scores.append([correlation, lagged])
        assert np.abs(np.mean(scores, axis=0)).max() < 5 / np.sqrt(200)

    def test_seed_and_epoch_each_give_another_order(self):
        keys = [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert len({tuple(block_order(50, 3, 9, *key).tolist()) for key in keys}) == 4

    def test_a_loader_gives_every_item_once_from_few_places_at_a_time(self, tmp_path):
        buffer = buffer_of(tmp_path, *[50] * 20)
        loader = buffer.dataloader(16, timestep_level=True, shuffle="block", shuffle_window=128, seed=5)
        epochs = [values(loader) for _ in range(3)]
        everything = values(buffer.dataloader(9, timestep_level=True))
        assert all(sorted(epoch) == everything for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3
        positions = [(x // 100) * 50 + x % 100 for x in epochs[0]]
        for at in range(0, 1000, 128):
            assert (np.diff(np.sort(positions[at : at + 128])) > 1).sum() <= 64

    def test_the_window_is_what_takes_so_many_bytes_unless_given(self, tmp_path, monkeypatch):
        buffer = buffer_of(tmp_path, *[50] * 20)  # 8 bytes a step
        loader = buffer.dataloader(16, timestep_level=True, shuffle="block", seed=5)
        for size, window in ((8 * 100, 100), (8 * 5000, 5000)):
            monkeypatch.setattr(epochs, "WINDOW_BYTES", size)
            iter(loader)
            assert loader.state_dict()["window"] == window
        whole = buffer.dataloader(2, shuffle="block", seed=5)
        monkeypatch.setattr(epochs, "WINDOW_BYTES", 8 * 50 * 3)
        iter(whole)
        assert whole.state_dict()["window"] == 3


class TestUniform:
    def test_each_number_is_that_of_its_position_and_of_the_seed(self):
        numbers = uniform(np.arange(1000), 3, 1)
        assert (uniform(np.arange(1000)[::-1], 3, 1)[::-1] == numbers).all()
        assert not np.isin(uniform(np.arange(1000), 3, 2), numbers).any()

    def test_they_spread_over_the_unit_interval_without_a_pattern(self):
        """Mean, variance and lag of 200 sequences to 5 σ, and every 100th of the interval equally often."""
        n, scores, counts = 2000, [], np.zeros(100)
        for seed in range(200):
            u = uniform(np.arange(n) + 10**9, seed)
            assert 0 <= u.min() <= u.max() < 1
            counts += np.bincount((u * 100).astype(int), minlength=100)
            lagged = np.corrcoef(u[1:], u[:-1])[0, 1]
            scores.append(
                [(u.mean() - 0.5) * np.sqrt(12 * n), (u.var() - 1 / 12) * np.sqrt(180 * n), lagged * np.sqrt(n)]
            )
        assert np.abs(np.mean(scores, axis=0)).max() < 5 / np.sqrt(200)
        expected = counts.sum() / 100
        assert ((counts - expected) ** 2 / expected).sum() < 99 + 5 * np.sqrt(198)


class TestQuota:
    @examples(100)
    @given(
        st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=12),
        st.lists(st.integers(1, 40), min_size=1, max_size=60),
    )
    def test_every_batch_is_full_and_the_shares_never_drift(self, weights, batch_sizes):
        quota, total = Quota(weights), np.zeros(len(weights))
        shares, begin = np.array(weights) / sum(weights), 0
        for batch_size in batch_sizes:
            counts = quota.num_given(begin + batch_size) - quota.num_given(begin)
            assert counts.min() >= 0
            assert counts.sum() == batch_size
            total, begin = total + counts, begin + batch_size
            assert np.abs(total - shares * total.sum()).max() < 2

    @examples(100)
    @given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 10**12), st.integers(1, 200))
    def test_every_item_is_of_one_source_and_has_its_number_there(self, weights, begin, count):
        quota = Quota(weights)
        source, within = quota.turns(np.arange(begin, begin + count))
        seen = quota.num_given(begin).tolist()
        for i, (number, turn) in enumerate(zip(source.tolist(), within.tolist(), strict=True)):
            assert turn == seen[number]
            seen[number] += 1
            assert seen == quota.num_given(begin + i + 1).tolist()

    @pytest.mark.parametrize(
        ("weights", "batch_size", "counts"),
        [([3, 1], 8, [6, 2]), ([1, 1, 2], 4, [1, 1, 2]), ([0.7, 0.3], 10, [7, 3]), ([0.1] * 10, 20, [2] * 10)],
    )
    def test_shares_that_divide_a_batch_are_exact_in_each(self, weights, batch_size, counts):
        quota = Quota(weights)
        for begin in [*range(0, 50 * batch_size, batch_size), 10**9 * batch_size]:
            assert (quota.num_given(begin + batch_size) - quota.num_given(begin)).tolist() == counts

    def test_what_does_not_divide_is_carried_over(self):
        given = Quota([1, 1, 1]).num_given
        counts = np.array([given(begin + 4) - given(begin) for begin in (0, 4, 8)])
        assert counts.sum(axis=0).tolist() == [4, 4, 4]
        assert counts.max() == 2


class TestEpochs:
    def test_unshuffled_is_oldest_first_after_a_ring_has_wrapped(self, tmp_path):
        buffer = buffer_of(tmp_path, 3, 2, 2, 1, 2, max_episodes=3)
        assert values(buffer.dataloader(2, timestep_level=True)) == [200, 201, 300, 400, 401]

    @pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
    @pytest.mark.parametrize("chunk", [1, 10, 1 << 14])
    def test_every_epoch_has_every_item_once_in_another_order(self, tmp_path, monkeypatch, batch_size, chunk):
        monkeypatch.setattr("memmap_buffer.loading.epochs.CHUNK", chunk)
        buffer = buffer_of(tmp_path, 40, 1, 60, 17)
        loader = buffer.dataloader(batch_size, timestep_level=True, shuffle=True, seed=5)
        epochs = [values(loader) for _ in range(3)]
        assert len(loader) == -(-118 // batch_size)
        everything = values(buffer.dataloader(9, timestep_level=True))
        assert all(sorted(epoch) == everything for epoch in epochs)
        assert len({tuple(epoch) for epoch in [*epochs, everything]}) == 4

    def test_the_order_does_not_depend_on_the_batch_size(self, tmp_path):
        buffer = buffer_of(tmp_path, 40, 30)
        one, other = (values(buffer.dataloader(n, timestep_level=True, shuffle=True, seed=5)) for n in (4, 9))
        assert one == other

    def test_drop_last_leaves_out_the_incomplete_batch_alone(self, tmp_path):
        buffer = buffer_of(tmp_path, 10)
        loader = buffer.dataloader(4, timestep_level=True, drop_last=True)
        assert len(loader) == len(list(loader)) == 2
        assert values(loader) == list(range(8))

    def test_set_epoch_repeats_an_epoch(self, tmp_path):
        buffer = buffer_of(tmp_path, 50)
        loader = buffer.dataloader(8, timestep_level=True, shuffle=True, seed=5)
        epochs = [values(loader) for _ in range(3)]
        loader.batch_sampler.set_epoch(1)
        assert values(loader) == epochs[1]
        assert values(loader) == epochs[2]

    def test_the_same_seed_gives_the_same_epochs_and_torch_gives_the_seed(self, tmp_path):
        buffer = buffer_of(tmp_path, 50)

        def epochs(seed):
            loader = buffer.dataloader(8, timestep_level=True, shuffle=True, seed=seed)
            return values(loader), values(loader)

        assert epochs(3) == epochs(3) != epochs(4)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            first, second = epochs(None), epochs(None)
            torch.manual_seed(1)
            assert first == epochs(None) != second

    def test_a_new_epoch_sees_what_was_published_since(self, tmp_path):
        buffer = buffer_of(tmp_path, 2)
        loader = buffer.dataloader(2, timestep_level=True, seed=0)
        assert values(loader) == [0, 1]
        batches = iter(loader)
        next(batches)
        buffer.store_episode(x=[7])
        assert len(loader) == 2
        assert values(batches) == []  # an epoch ends as it began
        assert values(loader) == [0, 1, 7]


class TestDraws:
    def test_a_sample_is_uniform_over_steps_not_over_episodes(self, tmp_path):
        buffer, draws = buffer_of(tmp_path, 1, 9, 30), 40_000
        counts = np.unique(buffer.sample(draws, timestep_level=True, seed=1)["x"].numpy(), return_counts=True)[1]
        assert len(counts) == 40
        chi_square = ((counts - draws / 40) ** 2 / (draws / 40)).sum()
        assert chi_square < 39 + 5 * np.sqrt(2 * 39)

    def test_a_sample_is_fixed_by_its_seed_and_differs_without(self, tmp_path):
        buffer = buffer_of(tmp_path, 60, 60)
        seeds = (1, 1, 2, None, None)
        one, same, *others = (buffer.sample(8, timestep_level=True, seed=seed)["x"].tolist() for seed in seeds)
        assert one == same
        assert len({tuple(batch) for batch in [one, *others]}) == 4

    def test_a_sample_may_be_larger_than_what_there_is(self, tmp_path):
        assert buffer_of(tmp_path, 2).sample(100, timestep_level=True)["x"].shape == (100,)

    def test_an_empty_buffer_has_nothing_to_draw_from(self, tmp_path):
        """S4-18"""
        buffer = buffer_of(tmp_path)
        for read in (buffer.dataset, lambda: buffer.dataloader(2), lambda: buffer.sample(2)):
            with pytest.raises(NotEnoughDataError, match=r"replay buffer.*empty"):
                read()

    def test_a_batch_size_is_a_whole_number(self, tmp_path):
        buffer = buffer_of(tmp_path, 2)
        for batch_size in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match="batch_size: got"):
                buffer.dataloader(batch_size)
            with pytest.raises(ValueError, match="batch_size: got"):
                buffer.sample(batch_size)

    def test_a_crop_begins_anywhere_at_which_it_fits_equally_often(self, tmp_path):
        """S4-22"""
        buffer, draws = buffer_of(tmp_path, 12), 9000
        starts = buffer.sample(draws, view=RandomCrop(4), seed=1)["_start"].numpy()
        counts = np.bincount(starts, minlength=9)
        assert len(counts) == 9
        assert ((counts - draws / 9) ** 2 / (draws / 9)).sum() < 8 + 5 * np.sqrt(16)

    def test_every_epoch_crops_elsewhere(self, tmp_path):
        """S4-22"""
        loader = buffer_of(tmp_path, *[50] * 20).dataloader(20, window_length=2, seed=1)
        first, second = (next(iter(loader))["_start"].tolist() for _ in range(2))
        assert first != second
