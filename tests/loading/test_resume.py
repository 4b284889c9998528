"""A loader that was stopped goes on elsewhere: the same rest of the epoch, or an error that says why not."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import assert_same
from hypothesis import given
from hypothesis import strategies as st
from inside import leave_out_serials, ranges_told
from profiles import examples

from memmap_buffer import ConcatBuffer, ReplayBuffer, SchemaError, StaleEpisodeError, Window

LENGTHS = (7, 1, 12, 5, 9, 3, 11, 4)
VIEWS = {
    "trajectory": {"return_indices": True},
    "timestep": {"timestep_level": True, "return_indices": True},
    "n-step": {"n_steps": 3, "gamma": 0.5, "return_indices": True},
    "crop": {"window_length": 2, "return_indices": True},
    "window": {"view": Window(4, stride=2), "return_indices": True},
    "filtered": {"timestep_level": True, "filter_fields": {"t": (1, 8)}, "return_indices": True},
    "best": {"timestep_level": True, "top_k": ("score", 3), "return_indices": True},
}
STEPS = VIEWS["timestep"]
ORDERS = {
    "in order": {"shuffle": False},
    "shuffled": {"shuffle": True},
    "in blocks": {"shuffle": "block", "shuffle_window": 130},
    "in small blocks": {"shuffle": "block", "shuffle_window": 5},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def record(buffer, *lengths):
    for length in lengths:
        x = np.arange(length)
        reward, end = x + 1.0, x == length - 1
        buffer.store_episode(t=x, reward=reward, terminated=end, score=buffer.num_episodes % 5)


def make(folder, lengths=LENGTHS, **how):
    fields = {"t": "int", "reward": "float", "terminated": "bool"}
    how = {"max_episodes": len(LENGTHS), "max_timesteps": 12, "circular": True, **how}
    buffer = ReplayBuffer(folder, fields=fields, meta_fields={"score": "float"}, **how)
    record(buffer, *lengths)
    return buffer


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A buffer that no test changes."""
    with make(tmp_path_factory.mktemp("recorded")) as buffer:
        yield buffer


def items(batches):
    """Every item's index, in order."""
    key = "_indices"
    return [tuple(np.ravel(i)) for batch in batches for i in batch[key if key in batch else "_index"].tolist()]


def stopped(loader, batches):
    """The state after so many batches, as a checkpoint keeps it, and the batches that would have followed."""
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return json.loads(json.dumps(loader.state_dict())), list(iterator)


def resumed(loader, state, **how):
    loader.load_state_dict(state, **how)
    return list(loader)


def assert_same_batches(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


# The same rest


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("view", VIEWS)
def test_stopped_anywhere_the_rest_is_the_same_to_the_bit(recorded, view, order):
    options = {**VIEWS[view], **ORDERS[order]}
    for batch_size, drop_last in ((4, False), (5, True)):
        loader = recorded.dataloader(batch_size, seed=7, drop_last=drop_last, **options)
        for stop in range(len(loader) + 1):
            loader.batch_sampler.set_epoch(4)
            state, rest = stopped(loader, stop)
            again = recorded.dataloader(batch_size, drop_last=drop_last, **options)
            assert_same_batches(resumed(again, state), rest)
            assert_same_batches(again, loader)  # and so is the next epoch


@pytest.mark.parametrize("options", [{"weight_by": "score"}, {}], ids=["by weight", "plain"])
def test_mixtures_go_on_with_the_same_shares(recorded, tmp_path, options):
    with make(tmp_path, (2, 3)) as other:
        both = ConcatBuffer([recorded, other], weights=[2, 3])
        for stop in range(8):
            state, rest = stopped(both.dataloader(7, shuffle=True, seed=1, **STEPS, **options), stop)
            again = both.dataloader(7, shuffle=True, **STEPS, **options)
            assert_same_batches(resumed(again, state), rest)


def test_it_goes_on_in_another_process(recorded):
    options = {"batch_size": 4, "shuffle": True, **STEPS}
    state, rest = stopped(recorded.dataloader(seed=5, **options), 3)
    code = f"""
from memmap_buffer import ReplayBuffer
loader = ReplayBuffer.from_folder({str(recorded.folder)!r}, read_only=True).dataloader(**{options!r})
loader.load_state_dict({state!r})
print([batch["_indices"].tolist() for batch in loader])"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == str([batch["_indices"].tolist() for batch in rest])


@pytest.mark.parametrize(
    "ahead",
    [
        {"num_workers": 2, "prefetch_factor": 4},
        {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
        {"num_workers": 1, "prefetch": 2},
        {"prefetch": 5},
    ],
    ids=["workers", "persistent workers", "worker and thread", "thread"],
)
def test_batches_that_are_made_ahead_do_not_count_before_they_are_handed_out(recorded, ahead):
    loader = recorded.dataloader(4, shuffle=True, seed=5, **STEPS, **ahead)
    list(loader)
    state, rest = stopped(loader, 3)
    assert (state["epoch"], state["delivered"]) == (1, 12)
    assert_same_batches(resumed(recorded.dataloader(4, shuffle=True, **STEPS), state), rest)
    assert_same_batches(resumed(loader, state), rest)


def test_a_state_from_before_the_first_batch_begins_the_epoch(recorded):
    loader = recorded.dataloader(4, shuffle=True, seed=5, **STEPS)
    loader.batch_sampler.set_epoch(3)
    state = loader.state_dict()
    assert (state["epoch"], state["delivered"], state["folders"]) == (3, 0, None)
    again = recorded.dataloader(4, shuffle=True, **STEPS)
    again.load_state_dict(state)
    assert_same_batches(again, loader)


@pytest.mark.parametrize("order", [{"shuffle": True}, {"shuffle": "block"}])
def test_ranks_take_their_seed_from_the_state(recorded, order):
    """Also one between two epochs, in which nothing was handed out."""
    options = {**order, **STEPS, "rank": 1, "world_size": 2}
    loader = recorded.dataloader(4, seed=5, **options)
    for state, rest in ((loader.state_dict(), list(loader)), stopped(loader, 2)):
        again = recorded.dataloader(4, **options)
        assert_same_batches(resumed(again, state), rest)
        assert again.state_dict()["seed"] == 5


def test_after_the_last_batch_the_next_epoch_is_next(recorded):
    loader = recorded.dataloader(4, shuffle=True, seed=5, **STEPS)
    states = [loader.state_dict() for _ in loader]
    assert [state["delivered"] for state in states] == [*range(4, 52, 4), 52]
    again = recorded.dataloader(4, shuffle=True, **STEPS)
    assert resumed(again, states[-1]) == []  # handed out, and perhaps not yet used: the epoch's loop ends here
    assert again.state_dict() == loader.state_dict()
    assert_same_batches(again, loader)


def test_a_resumed_epoch_can_be_stopped_again_and_told_how_long_it_is(recorded):
    loader = recorded.dataloader(4, shuffle=True, seed=5, **STEPS)
    state, rest = stopped(loader, 3)
    again = recorded.dataloader(4, shuffle=True, **STEPS)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert (len(again), len(loader)) == (13, 13)
    state, left = stopped(again, 2)
    assert state["delivered"] == 20
    assert_same_batches(left, rest[2:])
    assert_same_batches(resumed(loader, state), left)


def test_set_epoch_goes_on_with_the_same_epoch_and_drops_another(recorded):
    loader = recorded.dataloader(4, shuffle=True, seed=5, **STEPS)
    first = list(loader)
    state, rest = stopped(loader, 3)
    for epoch, expected in ((1, rest), (0, first)):
        again = recorded.dataloader(4, shuffle=True, **STEPS)
        again.load_state_dict(state)
        again.batch_sampler.set_epoch(epoch)
        assert_same_batches(again, expected)


@examples(60)
@given(
    world=st.integers(1, 4),
    other=st.integers(1, 4),
    batch_size=st.integers(1, 6),
    stop=st.integers(0, 60),
    order=st.sampled_from(sorted(ORDERS)),
)
def test_for_another_number_of_ranks_the_rest_is_the_same_items(recorded, world, other, batch_size, stop, order):
    options = {**ORDERS[order], **STEPS, "seed": 3}
    loaders = [recorded.dataloader(batch_size, rank=r, world_size=world, **options) for r in range(world)]
    iterators, before = [iter(loader) for loader in loaders], []
    for _ in range(min(stop, len(loaders[0]))):
        before += items(next(iterator) for iterator in iterators)
    states = [loader.state_dict() for loader in loaders]
    assert states == states[:1] * world
    after = []
    for rank in range(other):
        loader = recorded.dataloader(batch_size, rank=rank, world_size=other, **options)
        after += items(resumed(loader, states[0]))
    everything = set(items(recorded.dataloader(99, **STEPS)))
    assert set(before) | set(after) == everything
    assert len(before) + len(after) - len(everything) < max(world, other)
    rest = {item for iterator in iterators for item in items(iterator)}
    assert len(set(after) ^ rest) < max(world, other)  # but for the padding


# What is published, deleted or overwritten meanwhile


@pytest.mark.parametrize("order", ORDERS)
def test_episodes_published_since_are_no_part_of_the_epoch(tmp_path, order):
    buffer = make(tmp_path, max_episodes=20)
    loader = buffer.dataloader(4, seed=1, **STEPS, **ORDERS[order])
    state, rest = stopped(loader, 3)
    record(buffer, 5, 6)
    again = buffer.dataloader(4, **STEPS, **ORDERS[order])
    assert_same_batches(resumed(again, state), rest)
    assert len(items(again)) == 52 + 11


def test_an_episode_that_is_appended_to_has_the_steps_that_it_had(tmp_path):
    buffer = make(tmp_path, publish="step", max_episodes=20)
    episode = buffer.begin_episode()
    for t in range(9):
        if t == 5:
            state, rest = stopped(buffer.dataloader(4, shuffle=True, seed=1, **STEPS), 3)
        episode.store(t=t, reward=0, terminated=False)
    assert state["folders"][0]["partial"][0][:3] == [8, 0, 5]
    again = buffer.dataloader(4, shuffle=True, **STEPS)
    assert_same_batches(resumed(again, state), rest)
    assert len(items(again)) == 52 + 9
    episode.publish()
    assert_same_batches(resumed(again, state), rest)


@pytest.mark.parametrize("order", ORDERS)
def test_an_epoch_whose_oldest_episodes_are_gone_raises_or_draws_others_in_their_place(tmp_path, order):
    buffer = make(tmp_path)
    options = {**STEPS, **ORDERS[order]}
    state, rest = stopped(buffer.dataloader(4, seed=1, **options), 3)
    rest = items(rest)
    record(buffer, 6, 7, 8)
    again = buffer.dataloader(4, **options)
    with pytest.raises(
        StaleEpisodeError, match=r"3 episodes of the epoch, \[0, 1, 2\] first, were overwritten"
    ) as caught:
        again.load_state_dict(state)
    assert caught.value.serials == [0, 1, 2]
    got = items(resumed(again, state, on_stale="redraw"))
    assert len(got) == len(rest)
    assert {serial for serial, _ in got} <= set(range(3, 11))
    for mine, theirs in zip(got, rest, strict=True):
        assert mine == theirs or theirs[0] < 3


def test_what_is_redrawn_can_be_stopped_and_resumed_too(tmp_path):
    buffer = make(tmp_path)
    loader = buffer.dataloader(4, shuffle=True, seed=1, **STEPS)
    state, rest = stopped(loader, 3)
    record(buffer, 6)
    loader.load_state_dict(state, on_stale="redraw")
    state, left = stopped(loader, 2)
    assert state["delivered"] == 20
    record(buffer, 6)
    got = items(resumed(loader, state, on_stale="redraw"))
    for first, second, third in zip(items(rest)[8:], items(left), got, strict=True):
        assert first == second or first[0] == 0
        assert first == third or first[0] in (0, 1)


def test_a_loader_that_shall_raise_does_so_in_the_rest_of_an_epoch_too(tmp_path):
    buffer = make(tmp_path)
    loader = buffer.dataloader(4, shuffle=True, seed=1, **STEPS, on_stale="raise")
    state, _ = stopped(loader, 3)
    record(buffer, 6)
    loader.load_state_dict(state, on_stale="redraw")
    with pytest.raises(StaleEpisodeError, match=r"episodes \[0\] were overwritten or cleared"):
        list(loader)


def test_episodes_deleted_before_are_not_missed_and_those_deleted_since_are(tmp_path):
    buffer = make(tmp_path)
    buffer.delete([1, 4])
    state, rest = stopped(buffer.dataloader(4, shuffle=True, seed=1, **STEPS), 3)
    assert state["folders"][0]["episodes"] == [[0, 0], [2, 3], [5, 7]]
    again = buffer.dataloader(4, shuffle=True, **STEPS)
    assert_same_batches(resumed(again, state), rest)
    buffer.delete([2])  # serial 3
    with pytest.raises(StaleEpisodeError, match="1 episodes of the epoch") as caught:
        again.load_state_dict(state)
    assert caught.value.serials == [3]
    got = items(resumed(again, state, on_stale="redraw"))
    for mine, theirs in zip(got, items(rest), strict=True):
        assert mine == theirs or (theirs[0] == 3 and mine[0] != 3)


def test_a_state_with_many_gaps_is_small_and_goes_through_json(tmp_path):
    buffer = ReplayBuffer(tmp_path, 9000, 2, {"x": "int"})
    for value in range(9000):
        buffer.store_episode(x=[value])
        if value == 4000:
            leave_out_serials(buffer, 10**9)
    gone = np.random.default_rng(0).random(9000) < 0.4
    buffer.delete(np.flatnonzero(gone))
    state, rest = stopped(buffer.dataloader(64, shuffle=True, seed=1, **STEPS), 3)
    told = state["folders"][0]["episodes"]
    assert np.diff(np.flatnonzero(~gone)).max() > 1
    assert len(told) < 9000, "a byte an episode"
    again = resumed(buffer.dataloader(64, shuffle=True, **STEPS), json.loads(json.dumps(state)))
    for mine, theirs in zip(again, rest, strict=True):
        assert mine["x"].tolist() == theirs["x"].tolist()
    ranges = ranges_told(told)
    serials = buffer.serials
    assert ranges[0, 0] == serials[0]
    assert ranges[-1, 1] == serials[-1] > 10**9
    assert np.diff(ranges).sum() + len(ranges) == len(serials)
    for wrong in (told[:-8], told[: len(told) // 2], "2:AAAA", "x", told.replace(":", ":A", 1), 5 * told):
        state["folders"][0]["episodes"] = wrong
        with pytest.raises(SchemaError, match="expected what state_dict gave"):
            buffer.dataloader(64, shuffle=True, **STEPS).load_state_dict(state)


def test_where_two_gaps_hide_which_items_are_gone_it_raises_even_so(tmp_path):
    buffer = make(tmp_path)
    loader = buffer.dataloader(4, shuffle=True, seed=1, **STEPS)
    state, _ = stopped(loader, 3)
    buffer.delete([2, 5])
    with pytest.raises(StaleEpisodeError, match="cannot be told any more; begin a new epoch"):
        loader.load_state_dict(state, on_stale="redraw")
    short = buffer.dataloader(4, shuffle=True, seed=1, **STEPS, top_k=("score", 4))
    state, _ = stopped(short, 1)
    buffer.delete([3])
    with pytest.raises(StaleEpisodeError, match="1 episodes of the epoch"):
        short.load_state_dict(state, on_stale="redraw")


def test_an_episode_that_had_no_items_may_go(tmp_path):
    buffer = make(tmp_path)
    options = {**STEPS, "min_episode_len": 4}
    state, rest = stopped(buffer.dataloader(4, shuffle=True, seed=1, **options), 3)
    buffer.delete([1, 5])
    assert_same_batches(resumed(buffer.dataloader(4, shuffle=True, **options), state, on_stale="redraw"), rest)


def test_several_rings_lose_their_oldest_each(tmp_path):
    buffers = [make(tmp_path / name) for name in "ab"]
    both = ConcatBuffer(buffers)
    loader = both.dataloader(4, shuffle=True, seed=1, **STEPS)
    state, rest = stopped(loader, 5)
    record(buffers[0], 3)
    record(buffers[1], 3, 3)
    for mine, theirs in zip(items(resumed(loader, state, on_stale="redraw")), items(rest), strict=True):
        assert mine == theirs or theirs[:2] in ((0, 0), (1, 0), (1, 1))


def test_other_options_are_told_by_the_folders_that_lost_nothing(tmp_path):
    buffers = [make(tmp_path / name) for name in "ab"]
    both = ConcatBuffer(buffers)
    state, _ = stopped(both.dataloader(4, shuffle=True, seed=1, **STEPS), 5)
    record(buffers[0], 3)
    loader = both.dataloader(4, shuffle=True, **STEPS, filter_fields={"t": (0, 5)})
    with pytest.raises(SchemaError, match="items, of other episodes or timesteps than"):
        loader.load_state_dict(state, on_stale="redraw")


@pytest.mark.parametrize("options", [STEPS, {**STEPS, "weight_by": "score"}], ids=["plain", "by weight"])
def test_an_epoch_of_which_nothing_is_left_is_redrawn_whole(tmp_path, options):
    buffer = make(tmp_path)
    state, rest = stopped(buffer.dataloader(4, shuffle=True, seed=1, **options), 3)
    record(buffer, *LENGTHS)
    got = items(resumed(buffer.dataloader(4, shuffle=True, **options), state, on_stale="redraw"))
    assert len(got) == len(items(rest))
    assert {serial for serial, _ in got} <= set(range(8, 16))


# What it is, and what it is not


def test_a_state_is_a_few_numbers_however_many_episodes(tmp_path):
    sizes = []
    for name, episodes in (("few", 10), ("many", 1000)):
        with make(tmp_path / name, (), max_episodes=episodes) as buffer:
            record(buffer, *[3] * episodes)
            state, _ = stopped(buffer.dataloader(4, shuffle=True, seed=1, **STEPS), 2)
        sizes.append(len(json.dumps(state)))
    assert max(sizes) < 250
    assert sizes[1] - sizes[0] < 10


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"seed": 1},
        {"delivered": -1},
        {"seed": 1.5},
        {"epoch": "1"},
        {"window": None},
        {"folders": [3]},
        {"folders": [{"episodes": [[1]], "open": [], "items": 3}]},
        {"digest": "x"},
    ],
    ids=str,
)
def test_what_is_no_state_is_refused(recorded, wrong):
    loader = recorded.dataloader(4, shuffle=True, seed=1, **STEPS)
    state, _ = stopped(loader, 1)
    with pytest.raises(SchemaError, match=r"load_state_dict: got .* expected what state_dict gave"):
        loader.load_state_dict({**state, **wrong} if len(wrong) == 1 and wrong != {"seed": 1} else wrong)
    with pytest.raises(SchemaError, match="on_stale: got 'skip'"):
        loader.load_state_dict(state, on_stale="skip")


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"shuffle": False}, "the epoch has shuffle=True, this loader False"),
        ({"min_episode_len": 5}, "the epoch had 52 items, of other episodes or timesteps than the 44"),
        ({"filter_fields": {"t": (1, None)}}, "the epoch had 52 items"),
        ({"weight_by": "episode_lens"}, "the epoch had 52 items"),
    ],
    ids=str,
)
def test_a_state_of_other_options_is_refused(recorded, other, text):
    state, _ = stopped(recorded.dataloader(4, shuffle=True, seed=1, **STEPS), 1)
    loader = recorded.dataloader(4, **{"shuffle": True, **STEPS, **other})
    with pytest.raises(SchemaError, match=text):
        loader.load_state_dict(state)


def test_a_state_of_another_number_of_folders_is_refused(recorded, tmp_path):
    state, _ = stopped(recorded.dataloader(4, seed=1, **STEPS), 1)
    with make(tmp_path) as other:
        loader = ConcatBuffer([recorded, other]).dataloader(4, **STEPS)
        with pytest.raises(SchemaError, match="the epoch is of 1 folders, this reads 2"):
            loader.load_state_dict(state)


def test_a_value_changed_by_which_a_filter_chooses_is_noticed(tmp_path):
    buffer = make(tmp_path)
    options = {**STEPS, "filter_meta": {"score": {1, 2, 3}}}
    loader = buffer.dataloader(4, shuffle=True, seed=1, **options)
    state, _ = stopped(loader, 1)
    buffer.update(0, score=1)
    with pytest.raises(SchemaError, match="of other episodes or timesteps"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("ahead", [{}, {"prefetch": 2}], ids=["at once", "ahead"])
def test_a_batch_that_failed_had_its_turn(recorded, ahead):
    class Fails:
        times = 0

        def __call__(self, batch):
            self.times += 1
            if self.times == 3:
                raise ValueError("the third")
            return batch

    loader = recorded.dataloader(4, transform=Fails(), **STEPS, **ahead)
    expected = [items([batch]) for batch in recorded.dataloader(4, **STEPS)]
    batches = iter(loader)
    assert [items([next(batches)]) for _ in range(2)] == expected[:2]
    with pytest.raises(ValueError, match="the third"):
        next(batches)
    assert loader.state_dict()["delivered"] == 12
    assert [items([batch]) for batch in batches] == expected[3:]
    assert loader.state_dict()["epoch"] == 1
