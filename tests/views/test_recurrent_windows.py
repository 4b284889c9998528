"""Windows with a burn-in: each step that can be learned from is, once, wherever its episode begins and ends."""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import Episode, Reference
from strategies import MEMORY, assert_batch, few

from memmap_buffer import Field, ReplayBuffer, Window, pack

FIELDS = {"id": "int", "x": Field("int", final=True), "reward": "float", "terminated": "bool", "truncated": "bool"}
ZEROS = {"id": np.int64(0)}
LIMIT = 16
KEYS = ("id", "_start", "_lens", "_mask", "_reaches_episode_end", "_loss_mask")

parts = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["terminated", "truncated"])), min_size=1, max_size=4)
episodes = st.lists(
    st.tuples(parts.filter(lambda parts: sum(length for length, _ in parts) <= LIMIT), st.booleans()),
    min_size=1,
    max_size=4,
)


def episode_of(number, parts, final):
    """The steps of an episode that ends in its middle, too; each has an id of its own."""
    length = sum(length for length, _ in parts)
    steps = {"id": [np.int64(100 * number + t) for t in range(length)]}
    for name in ("terminated", "truncated"):
        ends = dict(zip(np.cumsum([length for length, _ in parts]).tolist(), [end for _, end in parts], strict=True))
        steps[name] = [np.bool_(ends.get(t + 1) == name) for t in range(length)]
    return Episode(steps, {"x": 0} if final else {}, {})


@contextmanager
def recorded(plans, capacity, packed):
    """(buffer, reference) of episodes in a ring of `capacity` steps."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        sizes = {"max_episodes": 9, "max_timesteps": LIMIT, "circular": True, "capacity": capacity}
        buffer, reference = ReplayBuffer(f"{folder}/ring", fields=FIELDS, **sizes), Reference(ZEROS, ZEROS, 9, capacity)
        for number, (parts, final) in enumerate(plans):
            episode = episode_of(number, parts, final)
            x = np.zeros(episode.length + final, np.int64)
            buffer.store_episode(**episode.steps, x=x, reward=np.ones(episode.length))
            reference.publish(episode)
        if packed:
            buffer.close()
            pack(f"{folder}/ring", f"{folder}/packed")
            buffer = ReplayBuffer.from_folder(f"{folder}/packed")
        yield buffer, reference
        buffer.close()


def how_often(batch):
    """How often each step is learned from, by its id."""
    return Counter(batch["id"][batch["_loss_mask"]].tolist())


def learnable(reference, n_steps):
    """The steps that have a successor, or all of them where none is needed, by the slow definition."""
    for episode in reference.episodes:
        for part in reference.parts(episode):
            last = part.length - bool(n_steps and not reference.ended(part))
            yield from (int(step) for step in part.steps["id"][:last])


@few
@given(
    episodes,
    st.none() | st.integers(1, 40),
    st.booleans(),
    st.integers(0, 5),
    st.integers(1, 6),
    st.none() | st.integers(1, 4),
)
def test_by_the_recipe_of_r2d2_each_step_is_learned_from_in_exactly_one_window(
    plans, capacity, packed, burn_in, learned, n_steps
):
    """Also the first steps of what a ring has left of an episode, and those behind an end in its middle."""
    length = burn_in + learned + (n_steps or 0)
    view = Window(
        length,
        learned,
        pad_before=burn_in,
        pad_after=length - burn_in - 1,
        burn_in=burn_in,
        n_steps=n_steps,
        gamma=0.5 if n_steps else None,
    )
    with recorded(plans, capacity, packed) as (buffer, reference):
        batch = buffer.batch(view=view)
        if "_loss_mask" not in batch:
            batch["_loss_mask"] = batch["_mask"]
        assert how_often(batch) == Counter(learnable(reference, n_steps))


@few
@given(
    episodes,
    st.none() | st.integers(1, 40),
    st.booleans(),
    st.data(),
)
def test_windows_with_a_burn_in_are_those_of_the_slow_definition(plans, capacity, packed, data):
    length = data.draw(st.integers(2, 9))
    steps = st.integers(0, length - 1)
    n_steps = data.draw(st.none() | st.integers(1, 4))
    how = {"stride": data.draw(st.integers(1, 5)), "pad_before": data.draw(steps), "pad_after": data.draw(steps)}
    how |= {"burn_in": data.draw(st.integers(1, length - 1))}
    view = Window(length, **how, fields=["id"], n_steps=n_steps, gamma=0.5 if n_steps else None)
    with recorded(plans, capacity, packed) as (buffer, reference):

        def cut(part):
            return reference.windows(part, length, ["id"], **how, n_steps=n_steps or 0)

        items = reference.items(cut, parted=True)
        if not items:
            return
        batch = buffer.batch(view=view, return_indices=True)
        assert [tuple(row) for row in batch["_indices"].tolist()] == list(items)
        assert_batch({key: batch[key] for key in KEYS}, [{key: item[key] for key in KEYS} for item in items.values()])


def test_what_a_growing_ring_has_left_is_learned_from_whole_after_every_step(tmp_path):
    view = Window(5, 2, pad_before=2, pad_after=2, burn_in=2, n_steps=1, gamma=0.5)
    sizes = {"max_episodes": 9, "max_timesteps": LIMIT, "circular": True, "capacity": 10, "spare_slots": 2}
    with ReplayBuffer(tmp_path, fields=FIELDS, **sizes, publish="step") as buffer:
        for step in range(40):
            buffer.add(id=step, x=step, next_x=step + 1, reward=0.0, terminated=step % 7 == 6, truncated=False)
            if step:
                known = set(buffer.batch(n_steps=1)["id"].tolist())
                assert how_often(buffer.batch(view=view)) == Counter(known)
                drawn = how_often(buffer.sample(200, view=view, seed=step))
                assert {*drawn} == known


@pytest.mark.parametrize("burn_in", [0, 3])
def test_each_window_of_a_head_that_was_trimmed_has_a_name_of_its_own(tmp_path, burn_in):
    with ReplayBuffer(tmp_path, 9, LIMIT, {"id": "int"}, circular=True, capacity=12) as buffer:
        buffer.store_episode(id=range(8))
        buffer.store_episode(id=range(10, 18))
        view = Window(6, 2, pad_before=4, burn_in=burn_in)
        batch = buffer.batch(view=view, return_indices=True)
        assert batch["_indices"].tolist() == [[0, 4], [0, 6], *([1, t] for t in range(-4, 8, 2))]
        again = buffer.batch(batch["_indices"], view=view, return_indices=True)
        for key, values in batch.items():
            np.testing.assert_array_equal(again[key], values, err_msg=key)
