"""Transitions of stacked fields and as a timeline, against the slow definition; test_views has the plain ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inside import get_inside
from strategies import assert_view, choices, few, recorded, recordings

from memmap_buffer import Field, NStep, ReplayBuffer, SchemaError, Window

NAMES = ("observation.pixels", "action", "half")


@few
@given(
    recordings(),
    choices(by_step=True),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["zero", "edge", "default"]),
)
def test_stacks_end_at_t_and_at_the_successor_and_reach_no_other_episode(recording, choice, n, size, padding):
    """S3-16, S5-09: single entries are stored, stacks are built at read"""
    with recorded(recording) as (buffer, reference):

        def cut(episode):
            items = reference.transitions(episode, n, NAMES, ("reward",))
            for t, item in items.items():
                for name in ("observation.pixels", "action"):
                    for prefix, last in (("", t), ("next_", t + int(item["n_step_lens"]))):
                        steps = range(last - size + 1, last + 1)
                        item[prefix + name] = reference.around(episode, name, steps, padding, final=True)[0]
            return items

        stack = {"observation.pixels": size, "action": size}
        options = {"current_fields": NAMES, "next_fields": NAMES, "sequence_fields": "reward"}
        items = reference.items(cut, **choice)
        assert_view(buffer, items, n_steps=n, stack=stack, padding=padding, **options, **choice)


@few
@given(recordings(), choices(by_step=True), st.integers(1, 4))
def test_a_timeline_has_all_that_comes_until_the_successor(recording, choice, n):
    """S3-18"""
    with recorded(recording) as (buffer, reference):

        def cut(episode):
            items = reference.transitions(episode, n, NAMES)
            for t, item in items.items():
                k = int(item["n_step_lens"])
                for name in NAMES:
                    rows = [reference.at(episode, name, t + i, final=True)[0] for i in range(1, k + 1)]
                    item[f"next_{name}"] = np.array(rows + [reference.zeros[name]] * (n - k))
            return items

        options = {"current_fields": NAMES, "next_fields": NAMES, "timeline": True}
        assert_view(buffer, reference.items(cut, **choice), n_steps=n, **options, **choice)


@few
@given(recordings(), choices(by_step=True), st.integers(1, 4))
def test_dropped_are_the_items_of_which_not_every_step_lies_in_the_episode(recording, choice, n):
    with recorded(recording) as (buffer, reference):

        def cut(episode):
            items = reference.transitions(episode, n, NAMES, ("reward",))
            return {t: item for t, item in items.items() if item["n_step_lens"] == n}

        options = {"current_fields": NAMES, "next_fields": NAMES, "sequence_fields": "reward", "boundary": "drop"}
        assert_view(buffer, reference.items(cut, **choice), n_steps=n, **options, **choice)


def test_of_an_episode_that_a_time_limit_cut_short_items_reach_as_far_as_a_successor_exists(tmp_path):
    fields = {"observation": Field("int", final=True), "terminated": "bool", "truncated": "bool"}
    with ReplayBuffer(tmp_path, 4, 9, fields) as buffer:
        steps, last = np.arange(6), np.arange(6) == 5
        buffer.store_episode(observation=steps, terminated=last, truncated=False & last)
        buffer.store_episode(observation=steps, terminated=False & last, truncated=last)
        buffer.store_episode(observation=np.arange(7), terminated=False & last, truncated=last)
        buffer.store_episode(observation=[0, 1], terminated=[False, True], truncated=[False] * 2)
        how = {"return_indices": True, "format": "numpy"}
        batch = buffer.batch(n_steps=3, boundary="drop", **how)
        assert batch["_indices"].tolist() == [[e, t] for e, n in ((0, 4), (1, 3), (2, 4)) for t in range(n)]
        assert batch["n_step_lens"].tolist() == [3] * 11
        assert batch["next_observation"].tolist() == [3, 4, 5, 0, 3, 4, 5, 3, 4, 5, 6]
        assert np.array_equal(buffer.batch(view=NStep(3, boundary="drop"), **how)["_indices"], batch["_indices"])
        assert len(buffer.dataset(n_steps=5, boundary="drop", filter_fields={"observation": (0, 9)})) == 2 + 1 + 2
        assert len(buffer.dataset(n_steps=3, boundary="pad")) == len(buffer.dataset(n_steps=3)) == 19


def test_an_episode_shorter_than_the_span_has_no_anchor_and_never_fewer():
    zeros, no = np.zeros(4, np.int64), np.zeros(4, np.bool_)
    runs = get_inside("runs")(zeros, zeros, zeros, np.array([1, 2, 3, 5]))
    counts = [NStep(3, boundary="drop").anchors(None, runs, has_final, no).count.tolist() for has_final in (no, ~no)]
    assert counts == [[0, 0, 0, 2], [0, 0, 1, 3]]


@pytest.fixture
def buffer(tmp_path):
    fields = {"camera": {"left": Field("uint8", 1, final=True), "right": Field("uint8", 1, final=True)}, "a": "int"}
    with ReplayBuffer(tmp_path, 3, 6, fields) as buffer:
        frames = np.arange(1, 6)[:, None]
        buffer.store_episode(camera={"left": frames, "right": 10 * frames}, a=np.arange(4))
        yield buffer


def test_the_name_of_a_group_stacks_all_its_fields_and_no_other(buffer):
    (batch,) = buffer.dataloader(9, n_steps=2, stack={"camera": 3}, padding="edge")
    assert batch["camera"]["right"][:, :, 0].tolist() == [[10, 10, 10], [10, 10, 20], [10, 20, 30], [20, 30, 40]]
    assert batch["next_camera"]["left"][:, :, 0].tolist() == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [3, 4, 5]]
    assert batch["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"discount": "a"}, "discount goes with gamma; give gamma=1.0"),
        ({"discount": "d", "gamma": 1.0, "reward": "a"}, "discount: got 'd', which was not declared here"),
        ({"n_steps": None, "timestep_level": True, "discount": "a"}, "go with n_steps"),
        ({"stack": {"camera": 0}}, "stack of 'camera': got 0, expected a whole number from 1"),
        ({"stack": {"cameras": 2}}, "stack: got 'cameras', .*did you mean"),
        ({"stack": {"camera": 2}, "padding": "first"}, "padding: got 'first', expected one of 'zero', 'edge'"),
        ({"boundary": "shift"}, "boundary: got 'shift', expected one of 'pad', 'drop'"),
        ({"n_steps": None, "boundary": "drop"}, "go with n_steps"),
        ({"stack": {"camera": 2}, "timeline": True}, "stack and timeline exclude each other"),
        (
            {"n_steps": None, "timestep_level": True, "stack": {"camera": 2}},
            "timeline, reward, terminated go with n_steps",
        ),
        ({"n_steps": None, "timeline": True}, "go with n_steps"),
    ],
)
def test_what_cannot_be_meant_is_refused(buffer, how, match):
    with pytest.raises(SchemaError, match=match):
        buffer.dataset(**{"n_steps": 1, **how})


def test_the_view_and_the_options_give_the_same(buffer):
    view = NStep(2, ("a",), ("camera",), stack={"camera": 2}, padding="edge")
    (one,) = buffer.dataloader(9, view=view)
    (two,) = buffer.dataloader(
        9, n_steps=2, current_fields="a", next_fields="camera", stack={"camera": 2}, padding="edge"
    )
    assert one["next_camera"]["left"].tolist() == two["next_camera"]["left"].tolist()


@pytest.mark.parametrize("each", [("bool", 2), {"a": "bool", "b": "bool"}])
def test_an_end_for_each_agent_is_not_taken_for_the_end_of_the_episode(tmp_path, each):
    fields = {"observation": Field("float", (2, 3), final=True), "reward": ("float", 2), "terminated": each}
    with ReplayBuffer(tmp_path, 2, 5, {**fields, "over": "bool"}) as buffer:
        ended = np.arange(4)[:, None] >= [1, 3]
        ends = ended if isinstance(each, tuple) else {"a": ended[:, 0], "b": ended[:, 1]}
        steps = {"observation": np.zeros((5, 2, 3)), "reward": np.ones((4, 2)), "terminated": ends}
        buffer.store_episode(**steps, over=ended.all(axis=1))
        with pytest.raises(
            SchemaError, match=r"there is terminated.* of shape .*; store a field of one bool, such as all"
        ):
            buffer.batch(n_steps=2, gamma=0.5)
        batch = buffer.batch(n_steps=2, gamma=0.5, terminated="over")
    assert batch["_return"].tolist() == [[1.5, 1.5]] * 3 + [[1, 1]]
    assert batch["_discount"].tolist() == [[0.25], [0.25], [0], [0]]


PARTS = [((), ()), ((), (1,)), ((1,), ()), ((2,), ()), ((2,), (1,)), ((2,), (2,))]


@pytest.mark.parametrize(("reward", "discount"), PARTS, ids=str)
@pytest.mark.parametrize("n", [1, 3])
def test_returns_by_a_stored_discount_are_those_of_a_loop_in_transitions_and_windows(tmp_path, reward, discount, n):
    """Two episodes as of dm_env: one ends by a discount of 0, the other by a limit; no field tells what terminated."""
    fields = {"observation": Field("int", final=True), "reward": ("float", reward), "d": ("float", discount)}
    rng, gamma = np.random.default_rng(0), 0.5
    with ReplayBuffer(tmp_path, 2, 9, fields) as buffer:
        for last in (0.0, 1.0):
            d = rng.choice([0.5, 1.0], (5, *discount))
            d[-1] = last
            buffer.store_episode(observation=np.arange(6), reward=rng.integers(1, 9, (5, *reward)), d=d)
        how = {"gamma": gamma, "discount": "d"}
        batch = buffer.batch(n_steps=n, return_indices=True, format="numpy", **how)
        window = buffer.batch(view=Window(5, boundary="drop", n_steps=n, **how), format="numpy")
        assert len(batch["d"]) == 10 and len(window["d"]) == 2
        for row, (serial, t) in enumerate(batch["_indices"].tolist()):
            episode, returns, following = buffer.episode(serial), 0, 1
            for i in range(batch["n_step_lens"][row]):
                step = episode["d"][t + i].reshape((1,) * len(reward) if np.size(episode["d"][0]) == 1 else reward)
                returns = returns + following * episode["reward"][t + i]
                following = following * gamma * step
            assert np.array_equal(batch["_return"][row], returns) and np.array_equal(batch["_discount"][row], following)
            assert np.array_equal(window["_return"][serial, t], batch["_return"][row])
            assert np.array_equal(window["_discount"][serial, t], batch["_discount"][row])
    assert (batch["_discount"][:5] == 0).any() and (batch["_discount"][5:] > 0).all()
    assert (batch["_return"] * batch["_discount"]).shape == batch["_return"].shape


def test_a_discount_that_is_0_where_an_episode_terminated_does_what_that_field_does(tmp_path):
    fields = {"observation": Field("int", final=True), "reward": "float", "d": "float", "terminated": "bool"}
    with ReplayBuffer(tmp_path, 4, 9, fields) as buffer:
        for length, terminates in ((5, True), (4, False), (1, True), (3, True)):
            terminated = (np.arange(length) == length - 1) & terminates
            steps = {"observation": np.arange(length + 1), "reward": np.arange(length), "d": ~terminated}
            buffer.store_episode(**steps, terminated=terminated)
        for n in (1, 2, 4):
            one = buffer.batch(n_steps=n, gamma=0.9, format="numpy")
            for terminated in (None, "terminated"):
                two = buffer.batch(n_steps=n, gamma=0.9, discount="d", terminated=terminated, format="numpy")
                np.testing.assert_allclose(two["_return"], one["_return"], rtol=1e-6)
                np.testing.assert_allclose(two["_discount"], one["_discount"], rtol=1e-6)


@pytest.mark.parametrize("field", ["U3", ("float", 3), ("int", (None,))])
def test_a_discount_of_another_shape_or_of_text_is_refused(tmp_path, field):
    with ReplayBuffer(tmp_path, 2, 9, {"reward": ("float", 2), "d": field, "terminated": "bool"}) as buffer:
        with pytest.raises(SchemaError, match="discount goes with n_steps and gamma"):
            Window(2, discount="d")
        for how in ({"n_steps": 2}, {"view": Window(2, n_steps=2, gamma=0.5, discount="d")}):
            more = {} if "view" in how else {"gamma": 0.5, "discount": "d"}
            with pytest.raises(
                SchemaError, match=r"discount: field 'd' is .*expected one number, or those of 'reward'"
            ):
                buffer.batch_spec(**how, **more)
