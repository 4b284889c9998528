"""Every line of the five systems that is about reading, by its number; docs/five-systems.md is the table.

S1 memorax, S2 the functional JAX buffer, S3 ReAgent, S4 memmap-replay-buffer, S5 nnabla-rl. Values are compared with
loops over the definitions; where something more general meets a line, the test's docstring says what.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import assert_same
from damage import another_buffer

from memmap_buffer import (
    ConcatBuffer,
    ConcatReplayBuffer,
    Field,
    Hindsight,
    NotEnoughDataError,
    Offsets,
    Prioritized,
    RandomCrop,
    ReplayBuffer,
    Scale,
    Timestep,
    Window,
    compute_importance_weights,
)
from memmap_buffer.compat import set_valid

LENGTHS = (4, 7, 5)
FIELDS = {
    "observation": Field("float", 2, final=True),
    "action": "int",
    "reward": "float",
    "terminated": "bool",
    "prev_done": "bool",
    "valid": ("bool", (), True),
}
ALL = [(i, t) for i, length in enumerate(LENGTHS) for t in range(length)]


def record(buffer, number, length, *, final=True):
    """Episode `number`: observation (number, t), reward number + t; odd ones end by `terminated`."""
    t = np.arange(length + final)
    buffer.store_episode(
        observation=np.stack([np.full(length + final, number), t], axis=1),
        action=(number + t[:length]) % 3,
        reward=number + t[:length],
        terminated=(t[:length] == length - 1) & (number % 2 == 1),
        prev_done=t[:length] == 0,
        task=number % 2,
    )


@pytest.fixture
def buffer(tmp_path):
    with ReplayBuffer(tmp_path, 4, 9, FIELDS, {"task": "int"}, circular=True) as buffer:
        for number, length in enumerate(LENGTHS):
            record(buffer, number, length)
        yield buffer


def starts_of(batch):
    return [tuple(pair) for pair in batch["_indices"].tolist()]


def counted(buffer, size=6000, **options):
    """(serial, t) -> how often it was drawn."""
    return Counter(starts_of(buffer.sample(size, return_indices=True, seed=0, **options)))


def assert_alike(counts, places):
    """Draws that are uniform over places, by a chi-squared test far beyond what chance gives."""
    assert set(counts) == set(places)
    mean = counts.total() / len(places)
    assert sum((n - mean) ** 2 / mean for n in counts.values()) < 3 * len(places) + 20


# S1: memorax


def test_S1_07_a_callable_says_where_a_sample_may_start(buffer):
    """By a callable in filter_fields; a result of the wrong shape is refused."""
    view = {"view": Window(2)}
    got = buffer.batch(return_indices=True, filter_fields={"reward": lambda reward: reward % 2 == 0}, **view)
    assert starts_of(got) == [(i, t) for i, t in ALL if (i + t) % 2 == 0]
    with pytest.raises(ValueError, match=r"the callable gave bool \(1,\), expected bool \(16,\)"):
        buffer.sample(1, filter_fields={"reward": lambda reward: np.ones(1, bool)}, **view)


def test_S1_08_a_step_after_a_done_one_is_a_start(buffer):
    """By a bool field, or without one by {"_start": 0}, as episodes are what is stored."""
    by_flag = buffer.batch(view=Window(3), filter_fields={"prev_done": True}, return_indices=True)
    assert starts_of(by_flag) == [(0, 0), (1, 0), (2, 0)]
    assert_same(buffer.batch(view=Window(3), filter_fields={"_start": 0}, return_indices=True), by_flag)


def test_S1_09_every_step_is_a_start_unless_told_otherwise(buffer):
    assert starts_of(buffer.batch(view=Window(3), return_indices=True)) == ALL


def test_S1_10_starts_are_drawn_alike_and_windows_stay_in_their_episode(buffer):
    """Where the original runs on into the next episode, ours is padded, and says so by a mask."""
    assert_alike(counted(buffer, view=Window(3)), ALL)
    batch = buffer.sample(300, view=Window(3), seed=1)
    for observation, mask in zip(batch["observation"], batch["_mask"], strict=True):
        assert len(set(observation[mask][:, 0].tolist())) == 1
        assert not observation[~mask].any()


def test_S1_11_no_legal_start_is_an_error_with_counts(buffer):
    with pytest.raises(NotEnoughDataError, match="none of 3 episodes has an item") as caught:
        buffer.sample(2, view=Window(3), filter_fields={"_start": 99})
    assert caught.value.episodes == 3


def test_S1_13_alpha_0_draws_alike_and_1_in_proportion_and_others_are_refused(buffer):
    """`set_priorities` is update_priorities; an α above 1 is allowed, as the rank variant may want it."""
    for alpha, powers in ((0.0, [1, 1, 1]), (1.0, [1, 2, 3])):
        how = Prioritized(alpha=alpha, name=f"a{int(alpha)}", epsilon=1e-9)
        batch = buffer.sample(200, timestep_level=True, prioritized=how, seed=0)
        buffer.update_priorities(batch["_indices"], batch["_indices"][:, 0] + 1.0, name=how.name)
        batch = buffer.sample(64, timestep_level=True, prioritized=how, seed=0)
        weights = np.repeat(powers, LENGTHS)
        want = np.array(powers)[batch["_indices"][:, 0].numpy()] / weights.sum()
        np.testing.assert_allclose(batch["_probabilities"], want, rtol=1e-6)
    with pytest.raises(ValueError, match=r"alpha: got -0\.1"):
        Prioritized(alpha=-0.1)


def test_S1_14_a_sequence_is_addressed_by_its_first_step(buffer):
    how = {"view": Window(3, boundary="drop"), "prioritized": Prioritized(alpha=1.0)}
    batch = buffer.sample(64, seed=0, **how)
    assert batch["_indices"][:, 1].tolist() == batch["_start"].tolist()
    buffer.update_priorities(batch["_indices"], torch.where(batch["_start"] == 1, 1.0, 0.0))
    assert set(buffer.sample(64, seed=1, **how)["_start"].tolist()) == {1}


def test_S1_15_new_items_get_the_largest_priority_so_far(buffer):
    how = {"timestep_level": True, "prioritized": Prioritized(alpha=1.0)}
    batch = buffer.sample(64, seed=0, **how)
    buffer.update_priorities(batch["_indices"], np.full(64, 5.0))
    record(buffer, 3, 3)
    batch = buffer.sample(300, seed=0, **how)
    new = batch["_indices"][:, 0] == 3
    assert new.any()
    assert batch["_probabilities"][new].max() == batch["_probabilities"].max()


def test_S1_16_the_probability_of_a_start_is_its_share_of_the_legal_ones(buffer):
    how = {"view": Window(2), "prioritized": Prioritized(alpha=1.0), "filter_fields": {"reward": (None, 3)}}
    batch = buffer.sample(200, seed=0, **how)
    buffer.update_priorities(batch["_indices"], batch["_indices"][:, 1] + 1.0)
    legal = {(i, t): t + 1 + 1e-6 for i, t in ALL if i + t < 3}
    batch = buffer.sample(200, seed=1, **how)
    want = [legal[pair] / sum(legal.values()) for pair in starts_of(batch)]
    np.testing.assert_allclose(batch["_probabilities"], want, rtol=1e-6)


def test_S1_17_a_sample_has_its_experience_indices_and_probabilities(buffer):
    """A batch is a dict: keys, values, items; `to_named_tuple` gives the tuple, with `_replace` for an update."""
    batch = buffer.sample(4, timestep_level=True, prioritized=True)
    assert {"observation", "_indices", "_probabilities"} <= set(batch.keys())
    named = buffer.sample(4, timestep_level=True, to_named_tuple=("action", "reward"))
    assert named._replace(action=None) == (None, named.reward)


def test_S1_18_priorities_are_stored_to_the_power_of_alpha(buffer):
    how = Prioritized(alpha=0.5, epsilon=1e-6)
    batch = buffer.sample(100, timestep_level=True, prioritized=how, seed=0)
    buffer.update_priorities(batch["_indices"], batch["_indices"][:, 1] * 4.0)
    stored = {(i, t): (4 * t + 1e-6) ** 0.5 for i, t in ALL}
    batch = buffer.sample(100, timestep_level=True, prioritized=how, seed=1)
    want = [stored[pair] / sum(stored.values()) for pair in starts_of(batch)]
    np.testing.assert_allclose(batch["_probabilities"], want, rtol=1e-6)


def test_S1_19_importance_weights_are_divided_by_the_highest_of_the_batch(buffer):
    batch = buffer.sample(32, timestep_level=True, prioritized=Prioritized(beta=0.4), seed=0)
    weights = compute_importance_weights(probabilities=batch["_probabilities"].numpy(), buffer_size=len(ALL))
    np.testing.assert_allclose(batch["_weights"], weights, rtol=1e-5)
    assert weights.max() == 1


# S2: the functional JAX buffer


def test_S2_07_the_same_state_and_seed_give_the_same_batch(buffer):
    how = {"n_steps": 2, "seed": 5, "return_indices": True}
    again = ReplayBuffer.from_folder(buffer.folder, read_only=True)
    assert_same(buffer.sample(8, **how), again.sample(8, **how))


# S3: ReAgent


def test_S3_09_an_item_is_excluded_and_included_again(buffer):
    """By `set_valid`, whose field every view and sampler honours; test_where_items_begin.py has them all."""
    set_valid(buffer, [(0, 1), (2, 0)], False)
    assert starts_of(buffer.batch(n_steps=1, return_indices=True)) == [p for p in ALL if p not in [(0, 1), (2, 0)]]
    set_valid(buffer, [(0, 1), (2, 0)], True)
    assert starts_of(buffer.batch(n_steps=1, return_indices=True)) == ALL


def test_S3_10_a_step_is_served_once_its_successor_exists_and_all_when_terminated(tmp_path):
    """Nothing stands for blanks: stacks are padded at read. An unfinished episode shows steps with a successor."""
    fields = {"x": "int", "terminated": "bool"}
    with ReplayBuffer(tmp_path, 3, 9, fields, publish="step") as buffer:
        episode = buffer.begin_episode()
        for t in range(4):
            episode.store(x=t, terminated=False)
        assert buffer.batch(n_steps=3)["x"].tolist() == [0, 1, 2]
        episode.store(x=4, terminated=True)
        episode.publish()
        batch = buffer.batch(n_steps=3)
        assert batch["x"].tolist() == [0, 1, 2, 3, 4]
        assert batch["n_step_lens"].tolist() == [3, 3, 3, 2, 1]


def test_S3_11_a_batch_of_indices_alone(buffer):
    """By a view without fields."""
    batch = buffer.sample(50, view=Timestep(()), include_metadata=False, return_indices=True)
    assert batch.keys() == {"_indices"}
    assert set(starts_of(batch)) <= set(ALL)


def test_S3_11_without_a_valid_index_it_is_a_runtime_error(buffer):
    set_valid(buffer, ALL, False)
    with pytest.raises(RuntimeError, match="none of 3 episodes has an item"):
        buffer.sample(1, timestep_level=True)


def test_S3_12_the_whole_valid_content_is_one_batch(buffer):
    set_valid(buffer, [(1, 3)], False)
    batch = buffer.batch(n_steps=2, return_indices=True)
    assert starts_of(batch) == [pair for pair in ALL if pair != (1, 3)]


def test_S3_13_a_transition_batch_is_a_named_tuple_and_may_be_of_given_indices(buffer):
    """`to_named_tuple` has the names in any order; `batch` takes indices."""
    names = ("observation", "action", "reward", "next_observation", "next_action", "next_reward", "terminated")
    how = {"n_steps": 1, "to_named_tuple": (*names, "_indices", "n_step_lens"), "return_indices": True}
    batch = buffer.batch([0, 5, 15], **how)
    assert batch._fields == (*names, "indices", "n_step_lens")
    assert batch.indices.tolist() == [[0, 0], [1, 1], [2, 4]]
    assert batch.observation.tolist() == [[0, 0], [1, 1], [2, 4]]
    assert batch.next_observation.tolist() == [[0, 1], [1, 2], [2, 5]]
    assert batch.next_reward.tolist() == [1, 3, 0]
    assert batch.n_step_lens.tolist() == [1, 1, 1]


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_S3_14_n_step_stops_at_terminal(buffer, n):
    gamma = 0.5
    batch = buffer.batch(n_steps=n, gamma=gamma, return_indices=True)
    for b, (i, t) in enumerate(starts_of(batch)):
        steps = min(n, LENGTHS[i] - t)
        assert batch["n_step_lens"][b] == steps
        assert batch["_return"][b] == sum(gamma**k * (i + t + k) for k in range(steps))
        assert batch["next_observation"][b].tolist() == [i, t + steps]
        terminal = i % 2 == 1 and t + steps == LENGTHS[i]
        assert batch["_discount"][b] == (0 if terminal else gamma**steps)


def test_S3_15_scalars_come_back_with_an_axis_of_their_own_and_stacks_with_one_of_time(buffer):
    """By `expand_scalars`; the axis of time is before those of the field, as torch's convolutions want it."""
    batch = buffer.batch(n_steps=2, gamma=0.9, expand_scalars=True, stack={"observation": 3})
    shapes = {key: tuple(value.shape[1:]) for key, value in batch.items()}
    assert shapes["reward"] == shapes["action"] == shapes["_return"] == shapes["n_step_lens"] == (1,)
    assert shapes["observation"] == shapes["next_observation"] == (3, 2)


def test_S3_16_stacks_are_built_from_single_entries_with_zeros_before_the_start(buffer):
    batch = buffer.batch(n_steps=2, stack={"observation": 3}, return_indices=True)
    for (i, t), k, now, then in zip(
        starts_of(batch), batch["n_step_lens"].tolist(), batch["observation"], batch["next_observation"], strict=True
    ):
        assert now.tolist() == [[i, s] if s >= 0 else [0, 0] for s in (t - 2, t - 1, t)]
        assert then.tolist() == [[i, s] if s >= 0 else [0, 0] for s in (t + k - 2, t + k - 1, t + k)]


def test_S3_17_everything_as_a_stack(buffer):
    """By the same offsets for every field; the rewards are as they were stored."""
    view = Offsets(dict.fromkeys(buffer.fieldnames, range(-2, 1)))
    batch = buffer.batch(view=view, return_indices=True)
    for b, (i, t) in enumerate(starts_of(batch)):
        assert batch["reward"][b].tolist() == [i + s if s >= 0 else 0 for s in (t - 2, t - 1, t)]
        assert batch["action"][b].tolist() == [(i + s) % 3 if s >= 0 else 0 for s in (t - 2, t - 1, t)]


def test_S3_18_the_timeline_gives_each_sample_as_many_entries_as_it_has_steps(buffer):
    batch = buffer.batch(n_steps=3, timeline=True, sequence_fields=["reward"], ragged=True, return_indices=True)
    rows = zip(
        starts_of(batch), batch["next_observation"].unbind(), batch["seq_reward"].unbind(), strict=True
    )  # `unbind` is a list
    for (i, t), following, rewards in rows:
        steps = min(3, LENGTHS[i] - t)
        assert following.tolist() == [[i, t + k] for k in range(1, steps + 1)]
        assert rewards.tolist() == [i + t + k for k in range(steps)]


def test_S3_19_what_a_batch_holds_is_told_without_reading_one(buffer):
    """`schema` says what is stored and what `store` takes, `batch_spec` what a batch of any view holds."""
    how = {"n_steps": 2, "gamma": 0.9, "return_indices": True}
    spec, batch = buffer.batch_spec(8, **how), buffer.sample(8, **how)
    assert {key: shape for key, (shape, _) in spec.items()} == {k: tuple(v.shape) for k, v in batch.items()}
    assert {key: dtype for key, (_, dtype) in spec.items()} == {
        key: str(value.dtype).removeprefix("torch.") for key, value in batch.items()
    }
    with pytest.raises(ValueError, match="current_fields: got 'log_prob'"):
        buffer.batch_spec(n_steps=1, current_fields=["log_prob"])


def test_S3_23_stratified_draws_by_priority_tell_their_probabilities_and_skip_what_is_not_valid(buffer):
    """Invalid items have no mass, so nothing is drawn again; a step without weight is one that is not `valid`."""
    set_valid(buffer, [(0, 0), (1, 6)], False)
    how = {"timestep_level": True, "prioritized": Prioritized(alpha=1.0, epsilon=1e-9)}
    batch = buffer.sample(400, seed=0, **how)
    buffer.update_priorities(batch["_indices"], batch["_indices"][:, 1] + 1.0)
    mass = {(i, t): t + 1 for i, t in ALL if (i, t) not in [(0, 0), (1, 6)]}
    batch = buffer.sample(1000, seed=1, **how)
    counts = Counter(starts_of(batch))
    assert set(counts) == set(mass)
    for pair, share in mass.items():
        assert abs(counts[pair] - 1000 * share / sum(mass.values())) <= 2  # one draw in each segment
    np.testing.assert_allclose(
        batch["_probabilities"], [mass[pair] / sum(mass.values()) for pair in starts_of(batch)], rtol=1e-6
    )


# S4: memmap-replay-buffer; test_memmap_replay_buffer.py compares with the package itself


def test_S4_14_all_data_is_one_dict_of_padded_tensors(buffer):
    data = buffer.get_all_data(fields=["reward"], meta_fields=["task"])
    assert data.keys() == {"reward", "task"}
    for i, length in enumerate(LENGTHS):
        assert data["reward"][i].tolist() == [i + t for t in range(length)] + [0] * (max(LENGTHS) - length)


def test_S4_16_folders_of_the_same_fields_are_read_as_one(buffer, tmp_path):
    with ReplayBuffer(tmp_path / "more", 4, 9, FIELDS, {"task": "int"}) as more:
        record(more, 7, 2)
        both = ConcatReplayBuffer([buffer.folder, more])
        assert both.num_episodes == 4
        assert len(both.dataset(timestep_level=True)) == len(ALL) + 2
        assert both.get_all_data()["reward"].shape == (4, 7)


def test_S4_18_datasets_and_loaders_take_what_torch_takes_and_an_empty_buffer_is_refused(buffer):
    loader = buffer.dataloader(5, timestep_level=True, shuffle=True, drop_last=True, num_workers=0, device="cpu")
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert [len(batch["reward"]) for batch in loader] == [5, 5, 5]
    assert len(buffer.dataset()) == 3
    buffer.clear()
    with pytest.raises(ValueError, match="nothing to read from this replay buffer"):
        buffer.dataset()


def test_S4_19_trajectories_are_padded_to_the_longest_of_the_batch(buffer):
    batch = buffer.batch(fields=["reward"], return_mask=True, min_episode_len=5, return_indices=True)
    assert batch["_index"].tolist() == [1, 2]
    assert batch["_lens"].tolist() == [7, 5]
    assert batch["_mask"].sum(dim=1).tolist() == [7, 5]
    assert batch["reward"][1].tolist() == [2, 3, 4, 5, 6, 0, 0]


def test_S4_20_each_timestep_is_an_item_with_its_meta_fields(buffer):
    batch = buffer.batch(timestep_level=True, filter_meta={"task": 0}, filter_fields={"action": 2}, return_indices=True)
    want = [(i, t) for i, t in ALL if i % 2 == 0 and (i + t) % 3 == 2]
    assert starts_of(batch) == want
    assert batch["task"].tolist() == [0] * len(want)


def test_S4_21_sequences_of_n_steps_are_zero_behind_the_end(buffer):
    batch = buffer.batch(n_steps=3, sequence_fields=["reward"], return_indices=True)
    for (i, t), rewards in zip(starts_of(batch), batch["seq_reward"].tolist(), strict=True):
        assert rewards == [i + t + k if t + k < LENGTHS[i] else 0 for k in range(3)]


def test_S4_22_a_window_is_one_random_crop_of_each_episode(buffer):
    batch = next(iter(buffer.dataloader(3, window_length=5, shuffle=True, seed=0, return_indices=True)))
    assert sorted(batch["_index"].tolist()) == [0, 1, 2]
    for i, start, n, end in zip(
        *(batch[k].tolist() for k in ("_index", "_start", "_lens", "_reaches_episode_end")), strict=True
    ):
        assert 0 <= start <= max(LENGTHS[i] - 5, 0)
        assert (n, end) == (min(5, LENGTHS[i]), start + 5 >= LENGTHS[i])


def test_S4_23_keys_are_renamed_and_batches_are_named_tuples(buffer):
    batch = buffer.sample(2, fieldname_map={"reward": "rewards"}, to_named_tuple=("rewards", "_lens"))
    assert batch._fields == ("rewards", "lens")


@pytest.mark.parametrize(
    "how", [{}, {"timestep_level": True}, {"n_steps": 2}, {"window_length": 3}, {"view": Window(2)}]
)
def test_S4_24_meta_fields_filter_on_all_levels(buffer, how):
    key = "_indices" if set(how) - {"window_length"} else "_index"
    batch = buffer.batch(filter_meta={"task": 1}, return_indices=True, **how)
    assert set(batch[key].reshape(len(batch[key]), -1)[:, 0].tolist()) == {1}


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"fields": ["reward"], "to_named_tuple": ["reward"]}, "fields and to_named_tuple exclude each other"),
        ({"timestep_level": True, "return_mask": True}, "return_mask is for whole episodes"),
        ({"n_steps": 2, "return_mask": True}, "return_mask is for whole episodes"),
        ({"n_steps": 2, "timestep_level": True}, "exclude each other"),
        ({"filter_fields": {"action": 1}}, "filter_fields needs a view of timesteps"),
        ({"slice_by_episode_len": False, "return_episode_lens": False}, "needs return_episode_lens"),
        ({"fields": ["rewards"]}, "got 'rewards'"),
    ],
)
def test_S4_25_options_that_contradict_each_other_are_refused(buffer, how, match):
    with pytest.raises(ValueError, match=match):
        buffer.dataset(**how)


# S5: nnabla-rl


def test_S5_03_a_sample_without_replacement_has_no_item_twice(buffer):
    """`replacement=False`; several steps are `n_steps` with sequence_fields, (B, n, …)."""
    batch = buffer.sample(len(ALL), timestep_level=True, replacement=False, return_indices=True)
    assert sorted(starts_of(batch)) == ALL
    with pytest.raises(ValueError, match="got batch_size 17, there are 16 items"):
        buffer.sample(17, timestep_level=True, replacement=False)
    with pytest.raises(ValueError, match="n_steps: got 0"):
        buffer.sample(1, n_steps=0)


def test_S5_04_explicit_indices_and_several_steps_that_never_cross_an_episode(buffer):
    batch = buffer.batch([3, 0], n_steps=2, sequence_fields=["reward"])
    assert batch["seq_reward"].tolist() == [[3, 0], [0, 1]]
    with pytest.raises(ValueError, match="expected positions"):
        buffer.batch([], n_steps=2)


def test_S5_05_epochs_with_and_without_a_shuffle_and_draws_with_replacement(buffer):
    """`BufferIterator` is `dataloader`, which begins anew as often as it is iterated."""
    loader = buffer.dataloader(5, timestep_level=True, shuffle=True, return_indices=True)
    for _ in range(2):
        assert sorted(pair for batch in loader for pair in starts_of(batch)) == ALL
    assert len(buffer.sample(99, timestep_level=True)["reward"]) == 99


def flip(batch, rng):
    """An augmentation: some observations mirrored."""
    which = torch.from_numpy(rng.random(len(batch["observation"])) < 0.5)
    return batch | {"observation": torch.where(which[:, None], batch["observation"].flip(1), batch["observation"])}


def test_S5_06_batches_are_decorated_as_they_are_read_and_the_data_stays(buffer):
    """By `transform`, on whole batches; `rng` makes a random one repeatable."""
    plain = buffer.sample(32, timestep_level=True, seed=3)["observation"]
    first, again = (buffer.sample(32, timestep_level=True, seed=3, transform=flip)["observation"] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)
    assert torch.equal(torch.where(first == plain, first, first.flip(1)), plain)
    assert torch.equal(buffer.sample(32, timestep_level=True, seed=3)["observation"], plain)


def minus_distance(achieved, goal, info):
    return -np.abs(achieved - goal).sum(axis=1)


@pytest.fixture
def goals(tmp_path):
    fields = {"state": Field("float", 2, final=True), "goal": Field("float", 2, final=True), "reward": "float"}
    with ReplayBuffer(tmp_path / "goals", 4, 9, {**fields, "terminated": "bool"}) as buffer:
        for number, length in enumerate(LENGTHS):
            steps = np.arange(length + 1)
            states = np.stack([np.full(length + 1, number), steps], axis=1)
            ends = steps[:-1] == length - 1
            buffer.store_episode(state=states, goal=np.full_like(states, 50), reward=np.ones(length), terminated=ends)
        yield buffer


def test_S5_07_hindsight_is_for_fields_that_are_there(goals):
    """The observation is no tuple of three, its parts are fields, checked when the options are given."""
    with pytest.raises(ValueError, match="hindsight, goal: got 'desired'"):
        goals.sample(1, n_steps=1, hindsight=Hindsight(minus_distance, "desired", "state"))


def test_S5_08_a_goal_of_the_future_replaces_the_desired_one_with_its_reward(goals):
    """The goal is what was achieved after any step from this one on; test_hindsight.py has every view and strategy."""
    how = Hindsight(minus_distance, "goal", "state", prob=0.8)
    batch = goals.sample(2000, n_steps=1, gamma=0.9, hindsight=how, seed=0, return_indices=True)
    relabelled = 0
    for b, ((i, t), (serial, at)) in enumerate(zip(starts_of(batch), batch["_goal"].tolist(), strict=True)):
        if serial < 0:
            assert (batch["goal"][b].tolist(), batch["reward"][b]) == ([50, 50], 1)
            continue
        relabelled += 1
        assert serial == i
        assert t < at <= LENGTHS[i]
        assert batch["goal"][b].tolist() == batch["next_goal"][b].tolist() == [i, at]
        assert batch["reward"][b] == batch["_return"][b] == -(at - (t + 1))
        assert batch["_discount"][b] == (0 if t + 1 == LENGTHS[i] else np.float32(0.9))
    assert abs(relabelled / 2000 - 0.8) < 0.05


SIDE, FRAMES = 84, 1_000_000


def test_S5_09_a_million_atari_transitions_take_about_seven_gigabytes(tmp_path):
    """Single uint8 frames are stored, each once: the next observation is the frame after, stacks are built at read."""
    fields = {"observation": Field("uint8", (SIDE, SIDE), final=True), "action": "uint8", "reward": "float"}
    with ReplayBuffer(tmp_path, 1000, 1000, {**fields, "terminated": "bool"}) as buffer:
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 256, (13, SIDE, SIDE), np.uint8)
        before = used(tmp_path)
        buffer.store_episode(observation=frames, action=np.arange(12), reward=np.ones(12), terminated=np.zeros(12))
        assert used(tmp_path) - before < 13 * SIDE**2 + 64 * 1024
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.npy")) < 7.2e9
        assert buffer.max_episodes * buffer.max_timesteps == FRAMES
        how = {"n_steps": 2, "gamma": 0.99, "stack": {"observation": 4}, "padding": "edge", "return_indices": True}
        batch = buffer.batch(transform=Scale(["observation", "next_observation"]), **how)
    for b, (_, t) in enumerate(starts_of(batch)):
        k = min(2, 12 - t)
        for key, last in (("observation", t), ("next_observation", t + k)):
            want = frames[np.clip(np.arange(last - 3, last + 1), 0, 12)].astype(np.float32) / 255
            np.testing.assert_array_equal(batch[key][b], want)


def used(folder):
    """Bytes on the disk, holes left out."""
    return sum(os.stat(file).st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def test_S5_10_trajectories_of_images_keep_each_frame_once_too(tmp_path):
    """The same buffer; whole episodes and crops of stacks are views of it."""
    with ReplayBuffer(tmp_path, 3, 9, {"observation": Field("uint8", (2, 2), final=True), "action": "int"}) as buffer:
        frames = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
        buffer.store_episode(observation=frames, action=np.arange(5))
        np.testing.assert_array_equal(buffer.episode(0)["observation"], frames)
        stacks = buffer.batch(view=Offsets(observation=range(-3, 1), padding="edge"))["observation"]
        for t in range(5):
            np.testing.assert_array_equal(stacks[t], frames[np.clip(np.arange(t - 3, t + 1), 0, 5)])


def test_S5_11_the_defaults_of_a_system_are_a_preset():
    how = Prioritized.like("nnabla-rl", variant="rank")
    assert (how.alpha, how.beta, how.beta_steps, how.epsilon) == (0.6, 0.4, 10_000, 1e-8)
    assert (how.error_clip, how.normalize, how.sort_interval, how.variant) == ((-1, 1), "buffer", 1_000_000, "rank")
    assert (Prioritized.like("memorax").epsilon, Prioritized.like("reagent").alpha) == (0, 1)
    with pytest.raises(ValueError, match="like: got 'nnabla', expected one of 'memorax', 'reagent', 'nnabla-rl'"):
        Prioritized.like("nnabla")


def test_S3_23_priorities_are_drawn_by_as_they_are_and_weigh_nothing(buffer):
    """As `Prioritized.like("reagent")`."""
    how = {"timestep_level": True, "prioritized": Prioritized.like("reagent")}
    first = buffer.sample(300, seed=0, **how)
    buffer.update_priorities(first["_indices"], first["_indices"][:, 1])
    batch = buffer.sample(300, seed=1, **how)
    total = sum(t for _, t in ALL)
    assert batch["_probabilities"].tolist() == pytest.approx([t / total for _, t in starts_of(batch)])
    assert set(batch["_weights"].tolist()) == {1.0}


def test_S3_23_a_step_comes_with_its_priority_which_is_read_and_set(tmp_path):
    """`set_priority` is `update_priorities`, `get_priority` `priorities`: 0 where the step is gone."""
    how = {"timestep_level": True, "prioritized": Prioritized.like("reagent")}
    with ReplayBuffer(tmp_path, None, 9, {"reward": "float"}, capacity=4, publish="step") as buffer:
        buffer.add(reward=0.0)
        buffer.sample(1, **how)
        for t in range(1, 5):
            buffer.add(reward=t, priority=float(t))
        steps = [(0, t) for t in range(5)]
        assert buffer.priorities(steps).tolist() == [0, 1, 2, 3, 4]  # the ring forgot the first
        buffer.update_priorities(steps[2:4], [8.0, 0.0])
        assert buffer.priorities(steps).tolist() == [0, 1, 8, 0, 4]
        batch = buffer.sample(200, seed=0, **how)
        assert set(batch["reward"].tolist()) == {1, 2, 4}
        shares = {1: 1 / 13, 2: 8 / 13, 4: 4 / 13}
        assert batch["_probabilities"].tolist() == pytest.approx([shares[t] for t in batch["reward"].tolist()])


def test_S5_11_an_unknown_variant_is_refused(buffer):
    """Capacity is the buffer's own."""
    with pytest.raises(ValueError, match="variant: got 'rank_based', expected one of 'proportional', 'rank'"):
        Prioritized(variant="rank_based")


def test_S5_12_beta_rises_with_every_sample(buffer):
    how = Prioritized(beta=0.4, beta_steps=10)
    assert [how.beta_at(n) for n in (0, 5, 10, 99)] == pytest.approx([0.4, 0.7, 1.0, 1.0])


def test_S5_13_errors_may_be_clipped_before_they_are_given_and_any_batch_may_be_updated_at_any_time(buffer):
    """Indices name their steps for good, so draws and updates need not alternate."""
    how = {"timestep_level": True, "prioritized": Prioritized(alpha=1.0, epsilon=1e-9)}
    first, second = (buffer.sample(200, seed=seed, **how) for seed in (0, 1))
    buffer.update_priorities(second["_indices"], torch.full((200,), 1.0))
    errors = torch.where(first["_indices"][:, 1] == 0, -7.0, 0.25).clamp(-1, 1)
    buffer.update_priorities(first["_indices"], errors)
    batch = buffer.sample(200, seed=2, **how)
    ratio = batch["_probabilities"].max() / batch["_probabilities"].min()
    assert ratio == pytest.approx(4.0, rel=1e-6)


def test_S5_13_errors_are_clipped_and_then_their_absolute_value_is_taken(buffer):
    """nnabla's rule: |clip(δ, -1, 0.5)|."""
    how = {"timestep_level": True, "prioritized": Prioritized(alpha=1.0, epsilon=0, error_clip=(-1, 0.5))}
    batch = buffer.sample(300, seed=0, **how)
    errors = torch.linspace(-3, 3, 300)
    buffer.update_priorities(batch["_indices"], errors)
    last = {pair: error for pair, error in zip(starts_of(batch), errors.tolist(), strict=True)}
    want = [abs(min(max(last[pair], -1), 0.5)) for pair in starts_of(batch)]
    assert buffer.priorities(batch["_indices"]).tolist() == pytest.approx(want)
    with pytest.raises(ValueError, match=r"error_clip: got \(1, -1\), expected \(low, high\)"):
        Prioritized(error_clip=(1, -1))


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
def test_S5_14_weights_are_relative_to_the_smallest_priority_of_the_batch_or_the_buffer(buffer, normalize):
    how = Prioritized(alpha=0.5, beta=0.5, epsilon=1e-8, normalize=normalize)
    first = buffer.sample(300, timestep_level=True, prioritized=how, seed=0)
    buffer.update_priorities(first["_indices"], first["_indices"][:, 1] + 1.0)
    priority = {(i, t): (t + 1 + 1e-8) ** 0.5 for i, t in ALL}
    batch = buffer.sample(4, timestep_level=True, prioritized=how, seed=1)
    drawn = np.array([priority[pair] for pair in starts_of(batch)])
    lowest = drawn.min() if normalize == "batch" else min(priority.values())
    np.testing.assert_allclose(batch["_weights"], (drawn / lowest) ** -0.5, rtol=1e-5)


def test_S5_15_the_probability_of_a_rank_is_a_power_of_its_inverse(buffer):
    """New items come in with the highest priority so far, so they are drawn soon, and equal ones share a rank."""
    how = {"timestep_level": True, "prioritized": Prioritized(variant="rank", alpha=0.7, sort_interval=1)}
    batch = buffer.sample(400, seed=0, **how)
    values = {pair: 100.0 - number for number, pair in enumerate(ALL)}
    buffer.update_priorities(batch["_indices"], [values[pair] for pair in starts_of(batch)])
    shares = {pair: (number + 1.0) ** -0.7 for number, pair in enumerate(ALL)}
    batch = buffer.sample(400, seed=1, **how)
    want = [shares[pair] / sum(shares.values()) for pair in starts_of(batch)]
    np.testing.assert_allclose(batch["_probabilities"], want, rtol=1e-6)


def test_S5_15_equal_priorities_may_have_ranks_of_their_own_by_age(buffer):
    """As in a heap to which all came with the same priority; `ALL` is in the order in which they came."""
    ranks = Prioritized(variant="rank", alpha=0.7, sort_interval=1, ties="own")
    how = {"timestep_level": True, "prioritized": ranks}
    orders = [ALL, [ALL[5], ALL[2], *(pair for i, pair in enumerate(ALL) if i not in (2, 5))]]
    for order in orders:
        shares = {pair: (number + 1.0) ** -0.7 for number, pair in enumerate(order)}
        batch = buffer.sample(400, seed=0, **how)
        want = [shares[pair] / sum(shares.values()) for pair in starts_of(batch)]
        np.testing.assert_allclose(batch["_probabilities"], want, rtol=1e-6)
        buffer.update_priorities([ALL[2], ALL[5]], [7.0, 8.0])
    with pytest.raises(ValueError, match="ties: got 'none', expected one of 'shared', 'own'"):
        Prioritized(ties="none")


def test_S5_16_each_draw_comes_from_a_segment_of_equal_mass(buffer):
    """Segments follow from the tree at every draw, so there are no intervals to set."""
    how = {"timestep_level": True, "prioritized": Prioritized(variant="rank", alpha=0.7, sort_interval=1)}
    batch = buffer.sample(400, seed=0, **how)
    values = {pair: 100.0 - number for number, pair in enumerate(ALL)}
    buffer.update_priorities(batch["_indices"], [values[pair] for pair in starts_of(batch)])
    shares = np.array([(number + 1.0) ** -0.7 for number in range(len(ALL))])
    counts = Counter(starts_of(buffer.sample(1000, seed=1, **how)))
    for pair, share in zip(ALL, shares / shares.sum(), strict=True):
        assert abs(counts[pair] - 1000 * share) <= 2


def test_S5_17_a_trajectory_is_stored_and_given_back_whole(buffer):
    """`store_episode`, `episode(i)`, `num_episodes`, `num_steps`; whole episodes are what a ring retires."""
    assert (buffer.num_episodes, buffer.num_steps) == (3, len(ALL))
    assert buffer.episode(1)["reward"].tolist() == [1 + t for t in range(7)]
    for number in (3, 4):
        record(buffer, number, 2)
    assert buffer.episode_lens.tolist() == [7, 5, 2, 2]


def test_S5_18_trajectories_are_drawn_without_replacement_or_by_index(buffer):
    batch = buffer.sample(3, replacement=False, return_indices=True)
    assert sorted(batch["_index"].tolist()) == [0, 1, 2]
    with pytest.raises(ValueError, match="got batch_size 4, there are 3 items"):
        buffer.sample(4, replacement=False)
    assert buffer.batch([2, 0])["_lens"].tolist() == [5, 4]


def test_S5_19_a_portion_is_drawn_in_proportion_to_length_and_starts_anywhere_that_it_fits(buffer):
    """A crop of each episode drawn by weight_by="episode_lens"; without it episodes are drawn alike. Episodes that
    are too short are left out by min_episode_len, and none at all is an error."""
    how = {"window_length": 4, "min_episode_len": 4, "return_indices": True, "seed": 0}
    batch = buffer.sample(8000, weight_by="episode_lens", **how)
    counts = Counter(zip(batch["_index"].tolist(), batch["_start"].tolist(), strict=True))
    for i, length in enumerate(LENGTHS):
        places = length - 4 + 1
        for start in range(places):
            assert abs(counts[i, start] - 8000 * length / len(ALL) / places) < 200
    assert counts.total() == sum(counts[i, s] for i, length in enumerate(LENGTHS) for s in range(length - 3))
    alike = Counter(buffer.sample(6000, **how)["_index"].tolist())
    assert all(abs(n - 2000) < 200 for n in alike.values())
    assert buffer.sample(3, replacement=False, view=RandomCrop(4), return_indices=True)["_index"].sort()[
        0
    ].tolist() == [
        0,
        1,
        2,
    ]
    with pytest.raises(RuntimeError, match="none of 3 episodes has an item"):
        buffer.sample(1, window_length=8, min_episode_len=8)


@pytest.mark.parametrize("length", [1, 3, 4])
def test_S5_20_a_portion_at_a_global_step_is_shifted_back_to_end_with_its_episode(buffer, length):
    """Item i of Window(…, boundary="repeat") is the portion from step i of all on."""
    view = Window(length, boundary="repeat", fields=("observation",))
    batch = buffer.batch(view=view, return_indices=True)
    assert len(buffer.dataset(view=view)) == len(ALL)
    for (i, t), observation in zip(ALL, batch["observation"], strict=True):
        start = min(t, LENGTHS[i] - length)
        assert observation.tolist() == [[i, start + k] for k in range(length)]
    assert starts_of(batch) == [(i, min(t, LENGTHS[i] - length)) for i, t in ALL]
    with pytest.raises(ValueError, match="length: got 0"):
        Window(0, boundary="repeat")
    with pytest.raises(ValueError, match="expected positions"):
        buffer.batch([], view=view)
    with pytest.raises(RuntimeError, match=r"timesteps, fewer than the \d+ that were asked for"):
        buffer.sample(1, view=Window(max(LENGTHS) + 1, boundary="repeat", allow_short=False))


def test_S5_21_weights_and_the_future_index_come_with_each_sample(goals):
    """Draws by priority have `_weights`, hindsight has `_goal`; a uniform draw has weights of 1 on request."""
    batch = goals.sample(8, n_steps=1, prioritized=True, hindsight=Hindsight(minus_distance, "goal", "state"))
    assert batch["_weights"].shape == (8,)
    assert batch["_goal"].shape == (8, 2)
    assert "_weights" not in goals.sample(8, n_steps=1)
    for how in (
        {"n_steps": 1},
        {"n_steps": 1, "format": "numpy"},
        {},
        {"n_steps": 1, "fieldname_map": {"_weights": "w"}},
    ):
        weights = goals.sample(3, return_weights=True, **how)["w" if "fieldname_map" in how else "_weights"]
        assert (weights.tolist(), str(weights.dtype).removeprefix("torch.")) == ([1.0] * 3, "float32")
    assert goals.batch_spec(4, n_steps=1, return_weights=True)["_weights"] == ((4,), "float32")
    weighted = goals.sample(8, n_steps=1, return_weights=True, prioritized=Prioritized(beta=1), expand_scalars=True)
    assert weighted["_weights"].shape == (8, 1)


def test_several_folders_are_read_like_one(buffer, tmp_path):
    """Every line above holds of a ConcatBuffer too, as it has the same readers."""
    both = ConcatBuffer([buffer.folder, another_buffer(shutil.copytree(buffer.folder, tmp_path / "other"))])
    batch = both.batch(view=Window(2), filter_fields={"_start": 0}, return_indices=True)
    assert batch["_indices"].tolist() == [[s, i, 0] for s in range(2) for i in range(3)]
