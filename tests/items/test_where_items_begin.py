"""Where a sample may begin (S1-07 to S1-09), and which steps `valid` excludes (S3-09), for every view and sampler."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from damage import another_buffer
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_view, few, recorded, recordings

from memmap_buffer import (
    ConcatBuffer,
    NotEnoughDataError,
    NStep,
    Offsets,
    Prioritized,
    RandomCrop,
    ReplayBuffer,
    SchemaError,
    Timestep,
    Trajectory,
    Window,
)
from memmap_buffer.compat import set_valid

FIELDS = {"x": "int", "prev_done": "bool", "reward": ("float", (), 0.0), "valid": ("bool", (), True)}
VIEWS = (Timestep(("x",)), NStep(2, ("x",), ("x",)), Window(3, fields=("x",)), Offsets(x=(-1, 0, 1)))


@pytest.fixture
def buffer(tmp_path):
    """Three episodes of 4, 5 and 6 steps; x is 10 * episode + t, and `prev_done` marks their first steps."""
    buffer = ReplayBuffer(tmp_path, max_episodes=5, max_timesteps=8, fields=FIELDS)
    for number, length in enumerate((4, 5, 6)):
        t = np.arange(length)
        buffer.store_episode(x=10 * number + t, prev_done=t == 0)
    return buffer


def starts(buffer, view, **options):
    """The (episode, t) at which items begin, in order."""
    (batch,) = buffer.dataloader(999, view=view, return_indices=True, **options)
    return [tuple(pair) for pair in batch["_indices"].tolist()]


def exclude(buffer, *steps):
    """Make steps (episode, t) invalid, and all others valid."""
    for i, length in enumerate(buffer.episode_lens.tolist()):
        buffer.update(i, valid=[(i, t) not in steps for t in range(length)])


class TestStarts:
    @pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
    def test_only_the_first_step_of_each_episode_by_its_number_a_field_or_a_callable(self, buffer, view):
        first = [(0, 0), (1, 0), (2, 0)]
        assert starts(buffer, view, filter_fields={"_start": 0}) == first
        assert starts(buffer, view, filter_fields={"prev_done": True}) == first
        assert starts(buffer, view, filter_fields={"x": lambda x: x % 10 == 0}) == first
        assert starts(buffer, view, filter_fields={"_start": lambda t: t < 1}) == first

    @few
    @given(
        recordings(),
        st.one_of(
            st.integers(-2, 6),
            st.tuples(st.one_of(st.none(), st.integers(-3, 5)), st.one_of(st.none(), st.integers(-3, 9))),
            st.sets(st.integers(-2, 6)),
            st.integers(0, 6).map(lambda n: lambda t: t % 3 < n % 3),
        ),
        st.sampled_from([{}, {"pad_before": 2}, {"boundary": "shift"}, {"boundary": "drop"}]),
        st.integers(1, 3),
        st.sampled_from([{}, {"truncated": False}]),
    )
    def test_conditions_on_the_start_are_those_of_the_slow_definition(self, recording, starts, how, stride, more):
        with recorded(recording) as (buffer, reference):
            choice, how = {"filter_fields": {"_start": starts, **more}}, {"stride": stride, **how}
            items = reference.items(lambda episode: reference.windows(episode, 3, ("reward",), **how), **choice)
            assert_view(buffer, items, view=Window(3, fields=("reward",), **how), **choice)

    def test_a_condition_on_the_start_counts_beside_those_on_fields(self, buffer):
        chosen = starts(buffer, Timestep(), filter_fields={"_start": (1, 3), "x": (11, None)})
        assert chosen == [(1, 1), (1, 2), (2, 1), (2, 2)]

    def test_nothing_that_may_begin_is_an_error_with_counts_and_never_zeros(self, buffer):
        with pytest.raises(NotEnoughDataError, match=r"none of 3 episodes has an item for .*'_start': 8") as caught:
            buffer.sample(4, view=Window(2), filter_fields={"_start": 8})
        assert caught.value.episodes == 3

    def test_an_unknown_name_of_a_start_is_refused(self, buffer):
        with pytest.raises(SchemaError, match=r"filter_fields: got 'start', .*did you mean '_start'"):
            buffer.sample(4, timestep_level=True, filter_fields={"start": 0})

    def test_whole_episodes_have_no_start_to_choose(self, buffer):
        with pytest.raises(SchemaError, match="filter_fields needs a view of timesteps"):
            buffer.sample(4, filter_fields={"_start": 0})


class TestValidity:
    @pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
    def test_no_item_begins_at_an_excluded_step_until_it_is_valid_again(self, buffer, view):
        every = starts(buffer, view)
        exclude(buffer, (0, 1), (2, 0), (2, 3))
        assert starts(buffer, view) == [pair for pair in every if pair not in [(0, 1), (2, 0), (2, 3)]]
        exclude(buffer)
        assert starts(buffer, view) == every

    def test_every_sampler_honours_it(self, buffer, tmp_path):
        kept = (1, 2)
        exclude(buffer, *[(i, t) for i, length in enumerate((4, 5, 6)) for t in range(length) if (i, t) != kept])
        how = {"timestep_level": True, "return_indices": True}
        other = another_buffer(shutil.copytree(buffer.folder, tmp_path / "other"))
        both = ConcatBuffer([buffer.folder, other], weights=[1, 1])
        batches = [
            buffer.sample(8, **how),
            buffer.sample(8, prioritized=True, **how),
            buffer.sample(8, prioritized=Prioritized(variant="rank"), **how),
            *buffer.dataloader(8, shuffle=True, **how),
            *buffer.dataloader(8, shuffle="block", **how),
            *buffer.dataloader(8, prioritized=True, **how),
        ]
        for batch in batches:
            assert {tuple(pair) for pair in batch["_indices"].tolist()} == {kept}
        assert both.sample(4, **how)["_indices"].tolist() == [[0, 1, 2], [1, 1, 2]] * 2

    def test_what_lies_behind_the_first_step_is_given_as_it_is_with_the_field_to_mask_by(self, buffer):
        exclude(buffer, (0, 1), (1, 4))
        (batch,) = buffer.dataloader(99, view=Window(3, boundary="drop"), filter_fields={"_start": (0, 3)})
        assert batch["x"][:3].tolist() == [[0, 1, 2], [10, 11, 12], [11, 12, 13]]
        assert batch["valid"][:1].tolist() == [[True, False, True]]
        (batch,) = buffer.dataloader(99, n_steps=2, sequence_fields=["x"], filter_fields={"x": 0})
        assert batch["seq_x"].tolist() == [[0, 1]]

    def test_a_window_that_begins_before_its_episode_is_valid_as_the_first_step_is(self, buffer):
        exclude(buffer, (1, 0))
        view = Window(3, pad_before=2)
        assert [pair for pair in starts(buffer, view) if pair[1] < 0] == [(0, -2), (0, -1), (2, -2), (2, -1)]

    def test_whole_episodes_and_crops_are_served_if_any_step_is_valid(self, buffer):
        exclude(buffer, *[(0, t) for t in range(4)], (1, 0))
        for view in (Trajectory(), RandomCrop(3)):
            (batch,) = buffer.dataloader(9, view=view, return_indices=True)
            assert batch["_index"].tolist() == [1, 2]
        exclude(buffer, *[(i, t) for i in range(3) for t in range(6)])
        with pytest.raises(NotEnoughDataError, match=r"none of 3 episodes has an item for .*'valid': True"):
            buffer.sample(1)

    def test_a_condition_of_ones_own_on_it_replaces_that_it_be_true(self, buffer):
        exclude(buffer, (0, 1))
        assert len(starts(buffer, Timestep(), filter_fields={"valid": {True, False}})) == 15
        assert starts(buffer, Timestep(), filter_fields={"valid": False}) == [(0, 1)]
        assert buffer.num_steps == 15

    @pytest.mark.parametrize("spec", ["float", ("bool", 2), "uint8"])
    def test_a_field_of_that_name_that_is_no_bool_says_nothing(self, tmp_path, spec):
        with ReplayBuffer(tmp_path, 2, 4, {"valid": spec, "x": "int"}) as buffer:
            buffer.store_episode(valid=np.zeros((3, *buffer.schema.fields["valid"].shape)), x=np.arange(3))
            assert starts(buffer, Timestep()) == [(0, 0), (0, 1), (0, 2)]

    def test_steps_excluded_by_set_valid_are_excluded_at_the_next_sample_and_by_other_readers(self, tmp_path):
        """The first time it adds the field, so what was opened before must see that too."""
        with ReplayBuffer(tmp_path, 3, 6, {"x": "int"}) as buffer:
            buffer.store_episode(x=np.arange(5))
            view = {"timestep_level": True, "return_indices": True}
            assert len(set(buffer.sample(200, **view)["x"].tolist())) == 5
            set_valid(buffer, [(0, 1), (0, 3)], False)
            assert set(buffer.sample(200, **view)["x"].tolist()) == {0, 2, 4}
            set_valid(buffer, [(0, 3)], True)
            assert set(buffer.sample(200, **view)["x"].tolist()) == {0, 2, 3, 4}
            other = ReplayBuffer.from_folder(tmp_path, read_only=True)
            assert set(other.sample(200, **view)["x"].tolist()) == {0, 2, 3, 4}
            set_valid(buffer, [0], False)
            with pytest.raises(NotEnoughDataError, match="'valid': True"):
                buffer.sample(1, **view)
