"""`Index.find`: the anchors that `_indices` of a batch name; and batches that are cut again by them."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_same
from inside import batch_reader_of

from memmap_buffer import (
    ConcatBuffer,
    Hindsight,
    NotEnoughDataError,
    NStep,
    Offsets,
    SchemaError,
    StaleEpisodeError,
    Window,
)

VIEWS = {
    "timesteps": {"timestep_level": True},
    "transitions": {"n_steps": 3, "gamma": 0.5},
    "filtered": {"timestep_level": True, "filter_fields": {"reward": {1, 2, 4, 5}}},
    "windows": {"view": Window(3, stride=2)},
    "padded in front": {"view": Window(3, pad_before=2)},
    "shifted": {"view": Window(4, stride=3, boundary="shift")},
    "shifted, filtered": {"view": Window(2, stride=2, boundary="shift"), "filter_fields": {"t": [0, 4, 5]}},
    "repeated": {"view": Window(4, boundary="repeat")},
    "run on": {"view": Window(4, boundary="continue")},
    "offsets": {"view": Offsets(t=(-1, 0), boundary="drop")},
    "a split": {"timestep_level": True, "split": {"a": 0.5, "b": 0.5}, "part": "a"},
}
each_view = pytest.mark.parametrize("how", VIEWS.values(), ids=VIEWS)


@pytest.fixture
def sources(recorded):
    """One buffer, in which an episode was deleted, and two read as one."""
    buffer = recorded((3, 4, 7, 5, 6, 1))
    buffer.delete([1])
    return buffer, ConcatBuffer([recorded((2, 6), name="other"), buffer])


@each_view
def test_at_every_timestep_an_anchor_is_found_if_there_is_one(sources, how):
    for source in sources:
        reader = batch_reader_of(source, how)
        index = reader.index(refresh=True)
        anchors = index.locate(np.arange(len(index)))
        folders = np.zeros(len(index), int) if anchors.folder is None else anchors.folder
        known = set(zip(folders.tolist(), anchors.serial.tolist(), anchors.t.tolist(), strict=True))
        slots = {(f, n): slot for f, n, slot in zip(folders, anchors.serial, anchors.slot, strict=True)}
        grid = np.stack(np.meshgrid(range(3), range(-1, 8), range(-4, 10), indexing="ij"), -1).reshape(-1, 3)
        grid = grid[grid[:, 0] == 0] if anchors.folder is None else grid
        for rows in (grid, *grid[:, None]):
            folder, serial, t = rows.T
            found, there = index.find(None if anchors.folder is None else folder, serial, t)
            assert there.tolist() == [key in known for key in map(tuple, rows.tolist())]
            wanted = [slots[f, n] for f, n, _ in rows[there]]
            assert found.where(there).slot.tolist() == wanted


@each_view
def test_a_batch_is_cut_again_by_its_indices(sources, how):
    for source in sources:
        batch = source.sample(40, seed=1, return_indices=True, **how)
        assert_same(source.batch(batch["_indices"], return_indices=True, **how), batch)
        again = source.dataset(return_indices=True, **how).at(batch["_indices"].numpy()).whole
        assert_same(again, batch)


def test_whole_episodes_are_named_by_one_column_less(sources):
    buffer, both = sources
    batch = buffer.sample(9, return_indices=True)
    assert_same(buffer.batch(batch["_index"][:, None], return_indices=True), batch)
    batch = both.sample(9, return_indices=True)
    assert batch["_index"].shape == (9, 2)
    assert_same(both.batch(batch["_index"], return_indices=True), batch)


def test_other_options_cut_something_else_at_the_same_timesteps(sources):
    buffer, _ = sources
    drawn = buffer.sample(30, timestep_level=True, prioritized=True)
    windows = buffer.batch(drawn["_indices"], view=Window(3))
    assert windows["t"][:, 0].tolist() == drawn["t"].tolist()
    goals = Hindsight(lambda achieved, goal, info: -1.0 * (achieved != goal), "number", "t")
    assert buffer.batch(drawn["_indices"], timestep_level=True, hindsight=goals)["_goal"].shape == (30, 2)


@pytest.mark.parametrize(
    ("indices", "how", "match"),
    [
        ([[0, 3]], {"timestep_level": True}, "timestep 3 of episode 0, of 3 timesteps, is no item for view Timestep"),
        (
            [[0, 3]],
            {"view": Window(2)},
            "a final observation, if there is one, is `next_` of timestep 2 with n_steps=1",
        ),
        ([[0, 4]], {"timestep_level": True}, "timestep 4 of episode 0.*; give the options by which it was drawn"),
        ([[0, -1]], {"timestep_level": True}, "timestep -1 of episode 0"),
        ([[3, 1]], {"view": Window(2, stride=2)}, "timestep 1 of episode 3, of 5 timesteps, is no item for view Wind"),
        ([[3, 4]], {"view": NStep(1, terminated=None)}, "timestep 4 of episode 3"),
        ([[0, 0, 0]], {"timestep_level": True}, r"got indices of shape \(1, 3\), expected .* serial, timestep"),
        ([[0, 0]], {}, r"got indices of shape \(1, 2\), expected positions \(B,\), or \(B, 1\): serial, as `_index`"),
        ([[0, 0]], {"timestep_level": True, "prioritized": True}, "prioritized=.* says which items are drawn"),
        ([[0.0, 0.0]], {"timestep_level": True}, "expected positions"),
    ],
)
def test_what_is_no_item_is_refused(sources, indices, how, match):
    with pytest.raises(SchemaError, match=match):
        sources[0].batch(indices, **how)


def test_a_folder_that_there_is_not_is_refused(sources):
    with pytest.raises(SchemaError, match=r"folder 2: there is none of that number; the folders are \[0, 1\]"):
        sources[1].batch([[2, 0, 0]], timestep_level=True)


@pytest.mark.parametrize("serial", [1, 99, -1])
def test_an_episode_that_is_gone_raises_or_is_drawn_again(sources, serial):
    for source, folder in zip(sources, ([], [1]), strict=True):
        indices = [[*folder, 0, 1], [*folder, serial, 1], [*folder, 2, 6]]
        with pytest.raises(StaleEpisodeError, match=rf"episodes \[{serial}\] were overwritten"):
            source.batch(indices, timestep_level=True)
        batch = source.batch(indices, timestep_level=True, return_indices=True, on_stale="redraw")
        assert batch["_indices"][[0, 2]].tolist() == [indices[0], indices[2]]
        assert batch["_indices"][1, -2] not in (1, 99, -1)


def test_steps_that_a_ring_has_forgotten_are_gone(recorded):
    buffer = recorded((5, 4), capacity=6, max_episodes=None, circular=None, name="ring")
    assert buffer.batch([[0, 3], [1, 0]], timestep_level=True)["t"].tolist() == [3, 0]
    with pytest.raises(StaleEpisodeError, match=r"episodes \[0\] were overwritten"):
        buffer.batch([[0, 2], [1, 0]], timestep_level=True)


def test_of_an_emptied_buffer_nothing_is_cut(recorded):
    buffer = recorded()
    buffer.clear()
    with pytest.raises(NotEnoughDataError, match="it is empty"):
        buffer.batch([[0, 0]], timestep_level=True)


def test_an_episode_that_is_overwritten_during_the_copy_is_not_replaced(recorded, record, in_the_middle):
    buffer = recorded(max_episodes=4, circular=True, spare_slots=1)

    def overwrite():
        for _ in range(3):
            record(buffer, 9, 1)

    in_the_middle(overwrite)
    with pytest.raises(StaleEpisodeError, match=r"episodes \[0\] were overwritten"):
        buffer.batch([[0, 0], [3, 0]], timestep_level=True)
