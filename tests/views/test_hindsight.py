"""Hindsight relabelling against loops over its definition, for every view of timesteps and every strategy.

The goal that each item was given is named by `_goal`; from it the slow definition computes the goal and the rewards.
"""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from conftest import assert_same

from memmap_buffer import (
    ConcatBuffer,
    Field,
    Hindsight,
    NStep,
    Offsets,
    ReplayBuffer,
    SchemaError,
    StaleEpisodeError,
    Timestep,
    Window,
    pack,
)

STRATEGIES = get_args(get_type_hints(Hindsight)["strategy"])

GOAL, ACHIEVED = "observation.desired_goal", "observation.achieved_goal"


def minus_distance(achieved, goal, info):
    """As `compute_reward` of a goal environment: arrays in, arrays out."""
    assert achieved.shape == goal.shape == (len(achieved), 2)
    return -np.abs(achieved - goal).sum(axis=1)


def with_cost(achieved, goal, info):
    return minus_distance(achieved, goal, info) - info["cost"]


def fields_of(final=True):
    goal = Field("float", 2, final=final)
    return {
        "observation": {"observation": Field("int", final=final), "achieved_goal": goal, "desired_goal": goal},
        "cost": "float",
        "reward": "float",
        "terminated": "bool",
    }


def episode_of(number, length, entries, terminated):
    """The achieved goal of entry t is (number, t), the desired one (-number, -1)."""
    achieved = np.stack([np.full(entries, number), np.arange(entries)], axis=1)
    return {
        "observation": {
            "observation": 100 * number + np.arange(entries),
            "achieved_goal": achieved,
            "desired_goal": np.broadcast_to([-number, -1], (entries, 2)),
        },
        "cost": np.arange(length) / 4,
        "reward": np.full(length, 1000.0),
        "terminated": (np.arange(length) == length - 1) & terminated,
    }


def recorded(folder, final=True, lengths=(3, 5, 7), **how):
    """Episodes of these lengths; every other one ends by `terminated`."""
    buffer = ReplayBuffer(folder, max_episodes=6, max_timesteps=8, fields=fields_of(final), **how)
    for number, length in enumerate(lengths):
        buffer.store_episode(**episode_of(number, length, length + final, terminated=number % 2 == 1))
    return buffer


@pytest.fixture(params=[True, False], ids=["final", "no final"])
def buffer(request, tmp_path):
    with recorded(tmp_path, request.param) as buffer:
        yield buffer


def rows(buffer, name):
    """serial -> the rows of a field."""
    found = {}
    for i, serial in enumerate(buffer.serials.tolist()):
        value = buffer.episode(i)
        for part in name.split("."):
            value = value[part]
        found[serial] = value
    return found


def goals_of(buffer, batch):
    """The goal of each item: the one that was achieved at `_goal`, or None where it kept its own."""
    achieved = rows(buffer, ACHIEVED)
    return [None if serial < 0 else achieved[serial][t] for serial, t in batch["_goal"].tolist()]


def expected(buffer, name, serial, t, goal, reward_fn=minus_distance):
    """A field at step t of an item with this goal; zeros where there is no such step."""
    column = rows(buffer, name)[serial]
    if name == GOAL and goal is not None and t >= 0:
        return goal if t < len(column) else np.zeros(2)
    if not 0 <= t < len(column):
        return np.zeros_like(column[0])
    achieved = rows(buffer, ACHIEVED)[serial]
    if name == "reward" and goal is not None and t + 1 < len(achieved):
        info = {"cost": rows(buffer, "cost")[serial][t : t + 1]}
        return reward_fn(achieved[t + 1 : t + 2], goal[None], info)[0]
    return column[t]


def flat(batch, name):
    for part in name.split("."):
        batch = batch[part]
    return batch.numpy()


def every(buffer, **options):
    return next(iter(buffer.dataloader(999, return_indices=True, shuffle=True, seed=3, **options)))


class TestAgainstTheSlowDefinition:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("n", [1, 3])
    def test_transitions_have_the_goal_and_the_rewards_and_returns_that_follow_from_it(self, buffer, strategy, n):
        """S5-07, S5-08: the goal is replaced in both observations, and the reward is that of the achieved goal of the
        next one; here for n steps too."""
        how = Hindsight(minus_distance, strategy=strategy)
        batch = every(buffer, n_steps=n, gamma=0.5, sequence_fields=["reward"], hindsight=how)
        goals = goals_of(buffer, batch)
        assert any(goal is not None for goal in goals) and any(goal is None for goal in goals)
        for b, ((serial, t), k) in enumerate(
            zip(batch["_indices"].tolist(), batch["n_step_lens"].tolist(), strict=True)
        ):
            want = functools.partial(expected, buffer, goal=goals[b])
            rewards = [want("reward", serial, i) for i in range(t, t + k)]
            np.testing.assert_array_equal(flat(batch, "reward")[b], want("reward", serial, t))
            np.testing.assert_array_equal(flat(batch, "seq_reward")[b], rewards + [0] * (n - k))
            np.testing.assert_array_equal(flat(batch, "_return")[b], sum(0.5**i * r for i, r in enumerate(rewards)))
            np.testing.assert_array_equal(flat(batch, GOAL)[b], want(GOAL, serial, t))
            own = want(GOAL, serial, t + k) if goals[b] is None else goals[b]
            np.testing.assert_array_equal(flat(batch, f"next_{GOAL}")[b], own)
            for name in (ACHIEVED, "observation.observation", "terminated"):
                np.testing.assert_array_equal(flat(batch, name)[b], want(name, serial, t))
                np.testing.assert_array_equal(flat(batch, f"next_{name}")[b], want(name, serial, t + k))

    @pytest.mark.parametrize(
        ("view", "steps"),
        [
            (Timestep(), [0]),
            (Window(3), range(3)),
            (Window(4, pad_before=2), range(4)),
            (Offsets({name: (-2, 0, 1) for name in ("observation", "cost", "reward")}), (-2, 0, 1)),
        ],
        ids=lambda view: type(view).__name__,
    )
    def test_every_other_view_of_timesteps_is_relabelled_at_each_step_that_it_has(self, buffer, view, steps):
        how = Hindsight(with_cost, info="cost")
        for _ in range(3):
            batch = every(buffer, view=view, hindsight=how)
            goals = goals_of(buffer, batch)
            assert any(goal is not None for goal in goals)
            for b, (serial, t) in enumerate(batch["_indices"].tolist()):
                for name in (GOAL, "reward", ACHIEVED):
                    got = flat(batch, name)[b].reshape(len(steps), -1)
                    for row, k in zip(got, steps, strict=True):
                        beyond = isinstance(view, Window) and t + k >= buffer.episode_lens[serial]  # no final there
                        want = expected(buffer, name, serial, -1 if beyond else t + k, goals[b], with_cost)
                        np.testing.assert_array_equal(row, np.ravel(want), err_msg=f"{name} {serial} {t} {k}")

    @pytest.mark.parametrize("padding", ["zero", "edge"])
    def test_stacks_and_timelines_have_the_goal_at_every_step(self, buffer, padding):
        how = {"n_steps": 2, "hindsight": Hindsight(minus_distance), "next_fields": ["observation", "reward"]}
        stacked = every(buffer, stack={"observation": 3, "reward": 3}, padding=padding, **how)
        following = every(buffer, timeline=True, **how)
        assert_same(following["_goal"], stacked["_goal"])
        for b, (goal, (serial, t)) in enumerate(
            zip(goals_of(buffer, stacked), stacked["_indices"].tolist(), strict=True)
        ):
            k = int(stacked["n_step_lens"][b])
            for name in (GOAL, "reward"):
                column = rows(buffer, name)[serial]
                for prefix, last in (("", t), ("next_", t + k)):
                    near = [
                        min(max(s, 0), len(column) - 1) if padding == "edge" else s for s in range(last - 2, last + 1)
                    ]
                    want = [expected(buffer, name, serial, s, goal) for s in near]
                    np.testing.assert_array_equal(flat(stacked, prefix + name)[b], want)
                want = [expected(buffer, name, serial, s, goal) for s in range(t + 1, t + 3)]
                np.testing.assert_array_equal(flat(following, f"next_{name}")[b], want)

    def test_without_the_final_goal_no_item_is_relabelled_whose_last_reward_would_need_it(self, tmp_path):
        with recorded(tmp_path, final=False) as buffer:
            batch = every(buffer, n_steps=2, hindsight=Hindsight(minus_distance, prob=1.0))
        for (serial, t), goal in zip(batch["_indices"].tolist(), batch["_goal"][:, 0].tolist(), strict=True):
            assert (goal >= 0) == (t + 2 < (3, 5, 7)[serial])


class TestGoals:
    def drawn(self, folder, strategy, times=400, **how):
        """(serial, t) of each item -> how often each goal was drawn."""
        found = {}
        with recorded(folder, lengths=(3, 6)) as buffer:
            how = Hindsight(minus_distance, strategy=strategy, prob=1.0, **how)
            batch = buffer.sample(9 * times, n_steps=1, hindsight=how, seed=5, return_indices=True)
        for at, goal in zip(batch["_indices"].tolist(), batch["_goal"].tolist(), strict=True):
            found.setdefault(tuple(at), Counter())[tuple(goal)] += 1
        return found

    @pytest.mark.parametrize(
        ("strategy", "first", "last"), [("future", 1, None), ("final", None, None), ("episode", -99, None)]
    )
    def test_goals_are_drawn_alike_from_the_timesteps_of_the_same_episode(self, tmp_path, strategy, first, last):
        """As stable-baselines3 draws them: of step t the achieved goal of the next observation of t … T - 1 (future),
        T - 1 (final) or 0 … T - 1 (episode)."""
        for (serial, t), counts in self.drawn(tmp_path, strategy).items():
            length = (3, 6)[serial]
            low = length if first is None else max(1, t + first)
            assert set(counts) == {(serial, goal) for goal in range(low, length + 1)}
            mean, places = counts.total() / (length + 1 - low), length + 1 - low
            assert sum((n - mean) ** 2 / mean for n in counts.values()) < 10 + 4 * places

    def test_geometric_goals_are_as_likely_as_gamma_to_the_power_of_their_distance(self, tmp_path):
        """Until the end of the episode, so divided by the sum over what there is"""
        counts = self.drawn(tmp_path, "geometric", gamma=0.5)[1, 0]
        shares = 0.5 ** np.arange(6) / (0.5 ** np.arange(6)).sum()
        assert set(counts) <= {(1, goal) for goal in range(1, 7)}
        want = counts.total() * shares
        got = np.array([counts[1, goal] for goal in range(1, 7)])
        assert ((got - want) ** 2 / want).sum() < 30

    def test_random_goals_are_achieved_by_other_items_of_the_batch(self, tmp_path):
        with recorded(tmp_path) as buffer:
            batch = every(buffer, n_steps=1, hindsight=Hindsight(minus_distance, strategy="random", prob=1.0))
        after = {(serial, t + 1) for serial, t in batch["_indices"].tolist()}
        goals = [tuple(goal) for goal in batch["_goal"].tolist()]
        assert set(goals) <= after
        own = batch["_indices"].tolist()
        assert any(goal[0] != serial for goal, (serial, _) in zip(goals, own, strict=True))
        assert not any(goal == (serial, t + 1) for goal, (serial, t) in zip(goals, own, strict=True))

    def test_the_only_item_of_a_batch_keeps_its_goal_where_another_would_give_one(self, tmp_path):
        with recorded(tmp_path) as buffer:
            how = Hindsight(minus_distance, strategy="random", prob=1.0)
            assert buffer.sample(1, n_steps=1, hindsight=how)["_goal"].tolist() == [[-1, -1]]

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_what_stands_at_a_goal_is_the_successor_of_the_step_before(self, tmp_path, strategy):
        with recorded(tmp_path) as buffer:
            batch = every(buffer, n_steps=1, hindsight=Hindsight(minus_distance, strategy=strategy, prob=1.0))
            before = batch["_goal"] - torch.tensor([0, 1])
            there = buffer.batch(before, n_steps=1, next_fields=["observation"])["next_observation"]
        assert torch.equal(there["achieved_goal"], batch["observation"]["desired_goal"])

    def test_each_item_is_relabelled_with_the_probability_that_was_given(self, tmp_path):
        with recorded(tmp_path) as buffer:
            for prob in (0.0, 0.25, 1.0):
                how = Hindsight(minus_distance, prob=prob)
                goals = buffer.sample(4000, n_steps=1, hindsight=how, seed=1)["_goal"]
                assert abs((goals[:, 0] >= 0).float().mean() - prob) < 0.03

    def test_the_same_seed_gives_the_same_goals_with_any_number_of_workers(self, tmp_path):
        with recorded(tmp_path) as buffer:
            how = {"n_steps": 2, "hindsight": Hindsight(minus_distance), "shuffle": True, "seed": 8}
            alone = list(buffer.dataloader(4, **how))
            for more in ({"num_workers": 1}, {"prefetch": 2}):
                for got, want in zip(buffer.dataloader(4, **how, **more), alone, strict=True):
                    assert_same(got, want)
            again = [buffer.sample(9, n_steps=1, seed=2, hindsight=how["hindsight"]) for _ in range(2)]
            assert_same(*again)

    def test_a_resumed_epoch_has_the_goals_that_it_would_have_had(self, tmp_path):
        with recorded(tmp_path) as buffer:
            how = {"n_steps": 1, "hindsight": Hindsight(minus_distance), "shuffle": True}
            loader = buffer.dataloader(4, seed=8, **how)
            batches = iter(loader)
            next(batches)
            state = loader.state_dict()
            resumed = buffer.dataloader(4, **how)
            resumed.load_state_dict(state)
            for got, want in zip(resumed, batches, strict=True):
                assert_same(got, want)

    def test_items_drawn_by_priority_are_relabelled_too(self, tmp_path):
        with recorded(tmp_path) as buffer:
            batch = buffer.sample(64, n_steps=1, prioritized=True, hindsight=Hindsight(minus_distance, prob=1.0))
            goals = np.array(goals_of(buffer, batch))
            np.testing.assert_array_equal(flat(batch, GOAL), goals)


class TestFolders:
    def test_goals_of_several_folders_name_their_source(self, tmp_path):
        parts = [recorded(tmp_path / "a"), recorded(tmp_path / "b", lengths=(4,))]
        with parts[0], parts[1]:
            how = Hindsight(minus_distance, prob=1.0)
            batch = ConcatBuffer(parts).sample(64, n_steps=1, hindsight=how, return_indices=True)
            assert (batch["_goal"][:, :2] == batch["_indices"][:, :2]).all()
            goals = [rows(parts[s], ACHIEVED)[serial][t] for s, serial, t in batch["_goal"].tolist()]
        np.testing.assert_array_equal(flat(batch, GOAL), np.array(goals))

    def test_a_goal_may_be_a_meta_field(self, tmp_path):
        fields = {"position": Field("int", final=True), "reward": "float"}
        with ReplayBuffer(tmp_path, 3, 5, fields, {"target": "int"}) as buffer:
            buffer.store_episode(position=np.arange(5), reward=np.zeros(4), target=77)
            how = Hindsight(lambda got, goal, info: got - goal, goal="target", achieved="position")
            batch = buffer.sample(32, n_steps=1, hindsight=how, seed=0, return_indices=True)
            goals = [77 if t < 0 else t for t in batch["_goal"][:, 1].tolist()]
            assert batch["target"].tolist() == goals and 77 in goals
            own = zip(batch["_indices"][:, 1].tolist(), goals, batch["reward"].tolist(), strict=True)
            assert all(reward == (0 if goal == 77 else t + 1 - goal) for t, goal, reward in own)

    def test_what_is_stored_stays_as_it_is(self, tmp_path):
        with recorded(tmp_path) as buffer:
            before = buffer.get_all_data()
            every(buffer, n_steps=3, gamma=0.9, hindsight=Hindsight(minus_distance, prob=1.0))
            assert_same(buffer.get_all_data(), before)

    def test_an_episode_overwritten_while_it_is_read_gives_no_row_of_another(self, tmp_path, in_the_middle):
        """Its goals and rewards would be mixed; all of it is drawn again, or refused."""
        with recorded(tmp_path, lengths=(4, 4, 4), circular=True) as buffer:
            full = [episode_of(number, 4, 5, False) for number in range(3, 12)]

            def overwrite():
                for episode in full:
                    buffer.store_episode(**episode)

            how = {"n_steps": 1, "hindsight": Hindsight(minus_distance, prob=1.0), "return_indices": True}
            loader = iter(buffer.dataloader(12, on_stale="raise", **how))
            in_the_middle(overwrite)
            with pytest.raises(StaleEpisodeError, match="overwritten or cleared"):
                next(loader)
            in_the_middle(overwrite)
            batch = buffer.sample(32, **how)
            number = flat(batch, ACHIEVED)[:, 0]
            np.testing.assert_array_equal(flat(batch, GOAL)[:, 0], number)
            distance = np.abs(flat(batch, f"next_{ACHIEVED}") - flat(batch, GOAL)).sum(axis=1)
            np.testing.assert_array_equal(flat(batch, "reward"), -distance)

    def test_half_numbers_are_goals_too(self, tmp_path):
        fields = {"at": Field("bfloat16", 1, final=True), "goal": ("bfloat16", 1), "reward": ("bfloat16", 1)}
        with ReplayBuffer(tmp_path, 3, 5, fields) as buffer:
            buffer.store_episode(at=np.arange(5.0)[:, None], goal=np.full((4, 1), 64.0), reward=np.zeros((4, 1)))
            how = Hindsight(lambda got, goal, info: got - goal, "goal", "at", strategy="final", prob=1.0)
            (batch,) = buffer.dataloader(9, timestep_level=True, hindsight=how)
        assert batch["goal"].dtype == batch["reward"].dtype == torch.bfloat16
        assert batch["goal"].tolist() == [[4.0]] * 4
        assert batch["reward"].tolist() == [[-3.0], [-2.0], [-1.0], [0.0]]


class TestErrors:
    @pytest.mark.parametrize(
        ("how", "match"),
        [
            ({"reward_fn": 3}, "reward_fn: got 3, expected a function"),
            ({"strategy": "past"}, "strategy: got 'past', expected one of 'future', 'final'"),
            ({"prob": 1.5}, "prob: got 1.5, expected a number from 0 to 1"),
            ({"gamma": 1.0}, "gamma: got 1.0, expected a number between 0 and 1, and neither"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, how, match):
        with pytest.raises(SchemaError, match=match):
            Hindsight(**{"reward_fn": minus_distance, **how})

    @pytest.mark.parametrize(
        ("how", "match"),
        [
            ({"goal": "desired_goal"}, "hindsight, goal: got 'desired_goal'"),
            ({"achieved": "observation.goal"}, "hindsight, achieved: got 'observation.goal'"),
            ({"reward": "rewards"}, "hindsight, reward: got 'rewards'.*did you mean 'reward'"),
            ({"info": "costs"}, "hindsight, info: got 'costs'.*did you mean 'cost'"),
            ({"goal": "cost"}, r"'cost' is float32 \(\), '.*achieved_goal' is float32 \(2,\)"),
            (
                {"reward_fn": lambda *_: np.zeros(1)},
                r"gave shape \(1,\) for (\d+) goals of shape \(2,\), expected \(\1,\)",
            ),
            ({"reward_fn": lambda *_: 0.0}, r"gave shape \(\) for \d+ goals"),
            ({"reward_fn": lambda got, *_: got}, r"gave shape \((\d+), 2\) for \1 goals"),
        ],
    )
    def test_fields_and_rewards_that_do_not_fit_are_refused(self, tmp_path, how, match):
        with recorded(tmp_path) as buffer, pytest.raises(SchemaError, match=match):
            buffer.sample(32, n_steps=1, seed=0, hindsight=Hindsight(**{"reward_fn": minus_distance, **how}))

    def test_whole_episodes_have_no_one_goal(self, tmp_path):
        with recorded(tmp_path) as buffer, pytest.raises(SchemaError, match="hindsight needs a view of timesteps"):
            buffer.sample(2, hindsight=Hindsight(minus_distance))

    def test_it_is_a_value(self):
        assert Hindsight(minus_distance, info=["a"]) == Hindsight(minus_distance, info=("a",))
        assert hash(Hindsight(minus_distance)) != hash(Hindsight(minus_distance, prob=0.5))
        assert NStep(2, stack={"a": 2}) == NStep(2, stack=(("a", 2),))


class TestElsewhere:
    def test_a_packed_folder_gives_the_same_as_a_grid(self, buffer, tmp_path):
        pack(buffer.folder, tmp_path / "packed")
        packed = ReplayBuffer.from_folder(tmp_path / "packed", read_only=True)
        for strategy in STRATEGIES:
            how = {"n_steps": 2, "gamma": 0.5, "seed": 3, "hindsight": Hindsight(minus_distance, strategy=strategy)}
            assert_same(packed.sample(32, **how), buffer.sample(32, **how))

    def test_random_goals_are_of_the_same_batch_also_where_several_are_drawn_ahead(self, buffer):
        how = {"timestep_level": True, "hindsight": Hindsight(minus_distance, strategy="random", prob=1.0)}
        for _ in range(20):
            batch = buffer.sample(4, return_indices=True, **how)
            last = {serial: len(rows(buffer, ACHIEVED)[serial]) - 1 for serial in range(3)}
            after = {(serial, min(t + 1, last[serial])) for serial, t in batch["_indices"].tolist()}
            goals = {tuple(goal) for goal in batch["_goal"].tolist()} - {(-1, -1)}
            assert goals <= after

    def test_a_dataset_with_goals_pickles_for_workers_that_are_spawned(self, buffer):
        dataset = buffer.dataset(n_steps=1, hindsight=Hindsight(minus_distance))
        there = pickle.loads(pickle.dumps(dataset))
        items = []
        for one in (dataset, there):
            torch.manual_seed(0)
            items.append(one.__getitems__(range(8)).data)
        assert_same(*items)

    def test_windows_that_repeat_and_starts_that_are_chosen_are_relabelled_like_others(self, buffer):
        how = {"view": Window(3, boundary="repeat"), "filter_fields": {"_start": (0, 2)}}
        batch = every(buffer, hindsight=Hindsight(minus_distance, prob=1.0), **how)
        for b, goal in enumerate(goals_of(buffer, batch)):
            if goal is not None:
                assert (flat(batch, GOAL)[b] == goal).all()
