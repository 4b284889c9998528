"""Every view against the slow definition: what it serves, in which order, value by value (S4-19 to S4-22)."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import HOW, META, assert_indexed, assert_view, choices, few, fields_of, recorded, recordings

from memmap_buffer import (
    Field,
    Hindsight,
    NStep,
    Offsets,
    RandomCrop,
    ReplayBuffer,
    SchemaError,
    Timestep,
    Trajectory,
    Window,
)

SOME = ("observation.pixels", "reward", "note", "half")
KEPT = [how for how in HOW if how != "open"]  # an episode that nobody holds any more is cut
ALL = (*SOME, "observation.state", "action", "truncated", "terminated")


def buffer_of(folder, *episodes, fields=None, **how):
    """A buffer of whole episodes."""
    fields = fields or {"reward": "float", "terminated": ("bool", (), False), "truncated": ("bool", (), False)}
    buffer = ReplayBuffer(folder, max_episodes=10, max_timesteps=20, fields=fields, **how)
    for episode in episodes:
        buffer.store_episode(**episode)
    return buffer


def ended(by, length=3, **more):
    """An episode whose last step has the flag `by`."""
    last = np.arange(length) == length - 1
    return {"reward": np.arange(1.0, length + 1), **{name: last for name in by}, **more}


class TestAgainstTheSlowDefinition:
    @few
    @given(recordings(), choices(), st.sampled_from([1, 3, 8]))
    def test_whole_episodes_are_served_padded_to_the_longest_of_the_batch(self, recording, choice, batch_size):
        """S4-19, S4-24"""
        with recorded(recording) as (buffer, reference):
            items = reference.items(lambda episode: reference.trajectory(episode, ALL), whole=True, **choice)
            how = {"zeros": reference.zeros, "batch_size": batch_size}
            assert_view(buffer, items, fields=ALL, return_mask=True, **how, **choice)
            without = {key: {name: item[name] for name in SOME} for key, item in items.items()}
            assert_view(
                buffer, without, view=Trajectory(SOME, return_lens=False), include_metadata=False, **how, **choice
            )

    @few
    @given(recordings(), choices())
    def test_final_observations_are_one_more_entry_where_they_are_asked_for(self, recording, choice):
        with recorded(recording) as (buffer, reference):

            def cut(episode):
                steps = range(episode.length + 1)
                pixels, _ = reference.around(episode, "observation.pixels", steps, final=True)
                item = reference.trajectory(episode, ("reward",))[0] | {"observation.pixels": pixels}
                item["_has_final"] = bool(episode.final)
                return {0: {name: value for name, value in item.items() if name != "_mask"}}

            view = Trajectory(("observation.pixels", "reward"), final_observation=True)
            items = reference.items(cut, whole=True, **choice)
            assert_view(buffer, items, zeros=reference.zeros, view=view, **choice)

    @few
    @given(recordings(), choices(by_step=True), st.sampled_from([1, 4, 64]))
    def test_every_visible_timestep_is_served_once(self, recording, choice, batch_size):
        """S4-20, S4-24"""
        with recorded(recording) as (buffer, reference):
            items = reference.items(lambda episode: reference.timesteps(episode, ALL), **choice)
            assert_view(buffer, items, batch_size, timestep_level=True, **choice)
            assert_view(buffer, items, batch_size, view=Timestep(ALL), **choice)

    @few
    @given(
        st.sampled_from(["terminated", "done"]).flatmap(lambda end: recordings(end=end)),
        choices(by_step=True),
        st.integers(1, 4),
        st.sampled_from([None, 0.0, 0.5, 1.0]),
    )
    def test_transitions_reach_their_successor_or_the_terminal_step(self, recording, choice, n, gamma):
        """S4-21; every value of gamma has exact powers"""
        end = recording[-1]
        names = ("observation.pixels", "half", end)
        with recorded(recording) as (buffer, reference):

            def cut(episode):
                return reference.transitions(episode, n, names, ("reward", "note"), gamma, terminated=end)

            options = {"current_fields": names, "next_fields": names, "sequence_fields": ("reward", "note")}
            items = reference.items(cut, **choice)
            assert_view(buffer, items, n_steps=n, gamma=gamma, terminated=end, **options, **choice)
            view = NStep(n, names, names, ("reward", "note"), gamma, terminated=end)
            assert_view(buffer, items, view=view, **choice)

    @few
    @given(
        recordings(),
        choices(by_step=True),
        st.integers(1, 10),
        st.integers(1, 4),
        st.sampled_from(["pad", "shift", "drop"]),
        st.sampled_from(["zero", "edge", "default"]),
        st.integers(0, 3),
        st.none() | st.integers(0, 3),
        st.booleans(),
    )
    def test_windows_stay_within_their_episode(
        self, recording, choice, length, stride, boundary, padding, before, after, front
    ):
        how = {"stride": stride, "boundary": boundary, "padding": padding}
        if boundary == "pad":
            how |= {"pad_before": 0 if front else min(before, length - 1)}
            how |= {"pad_after": after if after is None else min(after, length - 1)}
        front = front and boundary == "pad"
        with recorded(recording) as (buffer, reference):

            def cut(episode):
                return reference.windows(episode, length, ALL, **how, front=front)

            view = Window(length, fields=ALL, **how, pad_in_front=front)
            assert_view(buffer, reference.items(cut, **choice), view=view, **choice)

    @few
    @given(
        recordings(),
        choices(by_step=True),
        st.integers(1, 6),
        st.sampled_from(["pad", "shift", "drop"]),
        st.sampled_from(["zero", "edge", "default"]),
        st.integers(0, 3),
    )
    def test_windows_show_the_observation_after_their_last_step(
        self, recording, choice, length, boundary, padding, before
    ):
        how = {"boundary": boundary, "padding": padding}
        how |= {"pad_before": min(before, length - 1)} if boundary == "pad" else {}
        with recorded(recording) as (buffer, reference):

            def cut(episode):
                items = reference.windows(episode, length, ALL, **how)
                for start, item in items.items():
                    for name in buffer.schema.final_names:
                        steps = range(start, start + length + 1)
                        rows, mask = reference.around(episode, name, steps, padding, final=True)
                        item |= {name: rows, f"_mask_{name}": mask}
                return items

            view = Window(length, fields=ALL, final_observation=True, **how)
            assert_view(buffer, reference.items(cut, **choice), view=view, **choice)

    @few
    @given(recordings(how=KEPT), choices(by_step=True), st.integers(1, 10), st.sampled_from([None, "task_id", "label"]))
    def test_continued_windows_go_on_in_the_next_episode_of_their_stream(self, recording, choice, length, stream):
        with recorded(recording) as (buffer, reference):
            items = reference.continued(length, ALL, stream, **choice)
            view = Window(length, fields=ALL, boundary="continue", stream=stream)
            assert_view(buffer, items, view=view, **choice)

    @few
    @given(
        recordings(),
        choices(by_step=True),
        st.dictionaries(
            st.sampled_from(["observation.state", "observation.pixels", "action", "note", "half"]),
            st.lists(st.integers(-4, 4), min_size=1, max_size=4).map(tuple),
            min_size=1,
        ),
        st.integers(1, 3),
        st.sampled_from(["pad", "shift", "drop"]),
        st.sampled_from(["zero", "edge", "default"]),
    )
    def test_offsets_reach_no_other_episode(self, recording, choice, offsets, stride, boundary, padding):
        how = {"stride": stride, "boundary": boundary, "padding": padding}
        with recorded(recording) as (buffer, reference):
            items = reference.items(lambda episode: reference.offsets(episode, offsets, **how), **choice)
            assert_view(buffer, items, view=Offsets(offsets, **how), **choice)

    @few
    @given(recordings(), choices(), st.integers(1, 10))
    def test_a_crop_is_a_window_at_a_start_that_chance_gives(self, recording, choice, length):
        """S4-22: one crop per episode and epoch, at any start at which it fits"""
        with recorded(recording) as (buffer, reference):
            chosen = {episode.serial: episode for episode in reference.chosen(whole=True, **choice)}
            if not chosen:
                return
            options = {"window_length": length, "fields": ALL, "return_indices": True, **choice}
            batches = list(buffer.dataloader(2, shuffle=True, seed=3, **options))
            assert sorted(serial for batch in batches for serial in batch["_index"].tolist()) == sorted(chosen)
            for batch in [*batches, buffer.sample(4, seed=4, **options)]:
                pairs = list(zip(batch["_index"].tolist(), batch["_start"].tolist(), strict=True))
                for serial, start in pairs:
                    assert 0 <= start <= max(chosen[serial].length - length, 0)
                items = {(s, 0): reference.crop(chosen[s], t, length, ALL) | chosen[s].meta for s, t in pairs}
                if len(items) == len(pairs):  # else an episode was drawn twice, perhaps at two places
                    assert_indexed(batch, items)


class TestTransitions:
    def test_the_last_step_is_served_when_the_episode_terminated(self, tmp_path):
        """Defect (E): with a reward on the terminal step alone, the rewards of a pass sum to it"""
        reward = np.array([0, 0, 0, 1.0])
        buffer = buffer_of(tmp_path, ended(["terminated"], 4, reward=reward))
        (batch,) = buffer.dataloader(10, n_steps=1, sequence_fields=["reward"])
        assert batch["seq_reward"].sum() == 1
        assert batch["n_step_lens"].tolist() == [1, 1, 1, 1]

    def test_the_last_step_is_served_when_the_final_observation_is_there(self, tmp_path):
        fields = {"observation": Field("float", final=True), "reward": "float", "truncated": "bool"}
        episode = ended(["truncated"], 3, observation=[10.0, 11, 12, 13])
        batch = next(iter(buffer_of(tmp_path, episode, fields=fields).dataloader(9, n_steps=2)))
        assert batch["next_observation"].tolist() == [12, 13, 13]
        assert batch["n_step_lens"].tolist() == [2, 2, 1]

    def test_the_last_step_is_not_served_when_nothing_is_known_of_what_follows(self, tmp_path):
        batch = next(iter(buffer_of(tmp_path, ended(["truncated"])).dataloader(9, n_steps=2, return_indices=True)))
        assert batch["_indices"].tolist() == [[0, 0], [0, 1]]

    def test_an_episode_of_one_step_that_was_cut_has_no_transition(self, tmp_path):
        with pytest.raises(RuntimeError, match="none of 1 episodes has an item"):
            buffer_of(tmp_path, ended([], 1)).dataset(n_steps=1)

    @pytest.mark.parametrize(
        ("by", "discount"),
        [(["terminated"], 0), (["truncated"], 0.25), (["truncated", "terminated"], 0), ([], 0.25)],
    )
    def test_the_discount_is_zero_when_terminated_not_when_truncated(self, tmp_path, by, discount):
        fields = {
            "observation": Field("float", final=True),
            "reward": "float",
            **{name: ("bool", (), False) for name in ("terminated", "truncated")},
        }
        buffer = buffer_of(tmp_path, ended(by, 3, observation=np.arange(4.0)), fields=fields)
        batch = next(iter(buffer.dataloader(9, n_steps=2, gamma=0.5)))
        assert batch["_return"].tolist() == [1 + 0.5 * 2, 2 + 0.5 * 3, 3]
        assert batch["_discount"].tolist() == [0.25, discount, 2 * discount]

    @pytest.mark.parametrize("spec", [("bool", 1), "uint8", "float", ("float", 1), "int"])
    def test_terminated_may_be_declared_by_any_number(self, tmp_path, spec):
        buffer = buffer_of(tmp_path, ended(["terminated"]), fields={"reward": "float", "terminated": spec})
        assert len(buffer.dataset(n_steps=1)) == 3

    def test_the_field_that_says_terminated_may_have_another_name(self, tmp_path):
        episode = {"gain": [1.0, 2], "info": {"done": [[0], [1]]}}
        buffer = buffer_of(tmp_path, episode, fields={"gain": "float", "info": {"done": ("int", 1)}})
        assert len(buffer.dataset(n_steps=1)) == 1
        options = {"n_steps": 1, "terminated": "info.done", "reward": "gain", "gamma": 0.5}
        batch = next(iter(buffer.dataloader(9, **options)))
        assert batch["_return"].tolist() == [1, 2]
        assert batch["_discount"].tolist() == [0.5, 0]

    def test_a_name_for_terminated_that_was_not_declared_is_refused(self, tmp_path):
        """S4-25"""
        with pytest.raises(SchemaError, match=r"'terminate'.*did you mean 'terminated'"):
            buffer_of(tmp_path, ended([])).dataset(n_steps=1, terminated="terminate")

    def test_rewards_of_several_parts_have_a_return_each(self, tmp_path):
        rewards = np.array([[1.0, 10], [2, 20], [3, 30]])
        buffer = buffer_of(tmp_path, {"reward": rewards}, fields={"reward": ("float", 2)})
        batch = next(iter(buffer.dataloader(9, n_steps=2, gamma=0.5, terminated=None)))
        assert batch["_return"].tolist() == [[2, 20], [2, 20]]
        assert batch["_discount"].tolist() == [[0.25], [0.5]]

    @pytest.mark.parametrize("dtype", ["float", "float64", "int"])
    @pytest.mark.parametrize("expand_scalars", [False, True])
    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_returns_and_discounts_have_the_shape_of_the_rewards(self, tmp_path, shape, expand_scalars, dtype):
        fields = {"reward": (dtype, shape), "terminated": "bool"}
        rewards = np.array([1, 2, 3, 4]).reshape(4, *shape)
        buffer = buffer_of(tmp_path, {"reward": rewards, "terminated": [0, 0, 0, 1]}, fields=fields)
        batch = buffer.batch(n_steps=2, gamma=0.5, expand_scalars=expand_scalars)
        assert batch["_return"].shape == batch["_discount"].shape == batch["reward"].shape
        assert batch["_return"].flatten().tolist() == [2, 3.5, 5, 4]
        assert batch["_discount"].flatten().tolist() == [0.25, 0.25, 0, 0]
        value = torch.ones_like(batch["reward"], dtype=torch.float32)
        assert (batch["_return"] + batch["_discount"] * value).shape == batch["reward"].shape
        spec = buffer.batch_spec(4, n_steps=2, gamma=0.5, expand_scalars=expand_scalars)
        assert spec["_discount"].shape == spec["_return"].shape == batch["reward"].shape

    def test_a_successor_that_was_not_stored_is_zeros(self, tmp_path):
        fields = {"observation": Field("float", final=True), "action": ("int", (), -7), "terminated": "bool"}
        buffer = buffer_of(tmp_path, fields=fields)
        with buffer.one_episode() as episode:
            episode.store(observation=5.0, action=3, terminated=True)
        with buffer.one_episode() as episode:
            episode.store(observation=6.0, action=4, terminated=False)
            episode.final(observation=7.0)
        batch = next(iter(buffer.dataloader(9, n_steps=1)))
        assert batch["next_observation"].tolist() == [0, 7]
        assert batch["next_action"].tolist() == [0, 0]

    def test_an_update_of_the_last_step_changes_where_the_episode_ends(self, tmp_path):
        buffer = buffer_of(tmp_path, ended([]))
        buffer.update(0, terminated=[False, False, True])
        assert len(buffer.dataset(n_steps=1)) == 3
        buffer.update(0, terminated=[False, False, False])
        assert len(buffer.dataset(n_steps=1)) == 2


class TestWindowsAndOffsets:
    @pytest.mark.parametrize(
        ("how", "starts"),
        [
            ({}, [0, 1, 2, 3, 4]),
            ({"stride": 3}, [0, 3]),
            ({"pad_before": 2, "stride": 2}, [-2, 0, 2, 4]),
            ({"boundary": "drop"}, [0, 1, 2]),
            ({"boundary": "drop", "stride": 2}, [0, 2]),
            ({"boundary": "shift", "stride": 3}, [0, 2]),
            ({"boundary": "shift", "stride": 2}, [0, 2]),
        ],
    )
    def test_windows_of_three_in_an_episode_of_five_begin_at(self, tmp_path, how, starts):
        buffer = buffer_of(tmp_path, ended([], 5), ended([], 2))
        batch = next(iter(buffer.dataloader(99, view=Window(3, **how), return_indices=True)))
        first = batch["_indices"][:, 0] == 0
        assert batch["_start"][first].tolist() == starts
        assert batch["_reaches_episode_end"][first].tolist() == [start + 3 >= 5 for start in starts]

    def test_an_episode_shorter_than_the_window_is_padded_or_dropped(self, tmp_path):
        buffer = buffer_of(tmp_path, ended([], 2))
        (batch,) = buffer.dataloader(9, view=Window(4, boundary="shift", padding="edge", fields=("reward",)))
        assert batch["reward"].tolist() == [[1, 2, 2, 2]]
        assert batch["_mask"].tolist() == [[True, True, False, False]]
        with pytest.raises(RuntimeError, match="none of 1 episodes has an item"):
            buffer.dataset(view=Window(4, boundary="drop"))

    def test_the_observation_after_the_last_step_comes_with_padding_in_front_returns_and_without_padding(
        self, tmp_path
    ):
        fields = {"observation": Field("int", final=True), "reward": "float", "terminated": "bool"}
        buffer = buffer_of(tmp_path, ended(["terminated"], 3, observation=[10, 11, 12, 13]), fields=fields)
        how = {"final_observation": True}
        batch = buffer.batch(view=Window(2, pad_in_front=True, **how))
        assert batch["observation"].tolist() == [[10, 11, 12], [11, 12, 13], [0, 12, 13]]
        assert batch["_mask_observation"].tolist() == [[True] * 3, [True] * 3, [False, True, True]]
        assert batch["reward"].shape == (3, 2)
        batch = buffer.batch(view=Window(2, n_steps=1, gamma=0.5, **how))
        assert batch["observation"].tolist() == [[10, 11, 12], [11, 12, 13], [12, 13, 0]]
        assert batch["_mask_observation"][2].tolist() == [True, True, False] and batch["_return"].shape == (3, 2)
        batch = buffer.batch(view=Window(2, **how), ragged=True)
        assert batch["observation"].shape == (3, 3) and [len(part) for part in batch["reward"].unbind()] == [2, 2, 1]
        assert buffer.batch_spec(5, view=Window(2, **how))["observation"].shape == (5, 3)
        with pytest.raises(SchemaError, match="final_observation is of one episode"):
            Window(2, boundary="continue", **how)

    def test_behind_an_end_in_the_middle_of_an_episode_there_is_no_observation_to_show(self, tmp_path):
        fields = {"observation": Field("int", final=True), "reward": "float", "terminated": "bool"}
        episode = {"observation": np.arange(5), "reward": np.ones(4), "terminated": [False, True, False, True]}
        batch = buffer_of(tmp_path, episode, fields=fields).batch(
            view=Window(2, boundary="drop", final_observation=True)
        )
        assert batch["observation"].tolist() == [[0, 1, 0], [2, 3, 4]]
        assert batch["_mask_observation"].tolist() == [[True, True, False], [True] * 3]

    def test_a_frame_stack_and_an_action_chunk_are_cut_around_one_step(self, tmp_path):
        fields = {"camera": {"left": ("float", (), 9.0)}, "action": "int"}
        buffer = buffer_of(tmp_path, {"camera": {"left": [1.0, 2, 3]}, "action": [4, 5, 6]}, fields=fields)
        view = Offsets({"camera": (-2, -1, 0)}, action=range(2), padding="edge")
        (batch,) = buffer.dataloader(9, view=view)
        assert batch["camera"]["left"].tolist() == [[1, 1, 1], [1, 1, 2], [1, 2, 3]]
        assert batch["action"].tolist() == [[4, 5], [5, 6], [6, 6]]
        assert batch["_mask_action"].tolist() == [[True, True], [True, True], [True, False]]
        assert batch["_mask_camera"]["left"].tolist() == [[False, False, True], [False, True, True], [True] * 3]

    def test_items_reach_as_far_behind_the_episode_as_they_may(self, tmp_path):
        """As the sequences of Diffusion Policy: a horizon of 6, two observations, three actions that are executed."""
        buffer = buffer_of(tmp_path, ended([], 9), ended([], 2), ended([], 4), capacity=20)
        items = buffer.batch(view=Offsets(reward=range(-1, 5), pad_after=2, padding="edge"), return_indices=True)
        windows = buffer.batch(view=Window(6, pad_before=1, pad_after=2, padding="edge"))
        assert items["reward"].tolist() == windows["reward"].tolist()
        assert items["_indices"].tolist() == [*[[0, t] for t in range(7)], [2, 0], [2, 1]]
        for pad_after, steps in ((0, 5), (4, 9), (9, 9)):
            view = Offsets(reward=range(-1, 5), pad_after=pad_after)
            indices = buffer.batch(view=view, return_indices=True)["_indices"]
            assert (indices[:, 0] == 0).sum() == steps
        assert Offsets(reward=[1], pad_after=0) != Offsets(reward=[1]) == Offsets(reward=[1])
        view = Offsets(reward=range(5), pad_after=2, drop_last=3)
        assert (buffer.batch(view=view, return_indices=True)["_indices"][:, 0] == 0).sum() == 6
        for wrong, error in (
            ({"boundary": "drop", "pad_after": 1}, "pad_after pads, and"),
            ({"pad_after": -1}, "got -1"),
        ):
            with pytest.raises(SchemaError, match=error):
                Offsets(reward=[0, 1], **wrong)

    def test_the_anchor_of_an_episode_too_short_for_its_offsets_lies_within_it(self, tmp_path):
        """So that `_indices` names a step, and a filter looks at one."""
        buffer = buffer_of(tmp_path, ended([], 8), ended([], 2), capacity=20)
        view = Offsets(reward=(-3, 0), boundary="shift")
        indices = next(iter(buffer.dataloader(99, view=view, return_indices=True)))["_indices"]
        assert indices.tolist() == [[0, t] for t in range(3, 8)] + [[1, 1]]

    def test_a_final_observation_is_an_offset_that_exists(self, tmp_path):
        """The last step is no padded item, so it is not dropped either."""
        fields = {"observation": Field("float", final=True), "action": "int"}
        buffer = buffer_of(tmp_path, {"observation": [1.0, 2, 3], "action": [7, 8]}, fields=fields)
        offsets = {"observation": (0, 1), "action": (0,)}
        (padded,) = buffer.dataloader(9, view=Offsets(offsets))
        assert padded["_mask_observation"].all()
        (kept,) = buffer.dataloader(9, view=Offsets(offsets, boundary="drop"))
        assert kept["observation"].tolist() == padded["observation"].tolist() == [[1, 2], [2, 3]]

    def test_text_is_padded_by_empty_text(self, tmp_path):
        fields = {"note": ("U4", (), "none")}
        buffer = buffer_of(tmp_path, {"note": ["a"]}, {"note": ["b", "c"]}, fields=fields)
        (batch,) = buffer.dataloader(2, view=Window(3, boundary="shift"))
        assert batch["note"] == [["a", "", ""], ["b", "c", ""]]
        assert next(iter(buffer.dataloader(2)))["note"] == [["a", ""], ["b", "c"]]
        view = Window(3, boundary="shift", padding="default")
        assert next(iter(buffer.dataloader(2, view=view)))["note"] == [["a", "none", "none"], ["b", "c", "none"]]


class TestTrajectories:
    def test_without_slicing_episodes_are_padded_to_max_timesteps(self, tmp_path):
        """S4-19"""
        batch = buffer_of(tmp_path, ended([], 3)).sample(2, slice_by_episode_len=False, return_mask=True)
        assert batch["reward"].shape == (2, 20)
        assert batch["_mask"].sum(dim=1).tolist() == batch["_lens"].tolist() == [3, 3]

    def test_lens_and_meta_can_be_left_out(self, tmp_path):
        """S4-19"""
        how = {"fields": {"reward": "float"}, "meta_fields": {"task": "int"}}
        buffer = buffer_of(tmp_path, {"reward": [1.0], "task": 4}, **how)
        assert buffer.sample(1, return_episode_lens=False).keys() == {"reward", "task"}
        assert buffer.sample(1, include_metadata=False).keys() == {"reward", "_lens"}

    @pytest.mark.parametrize("length", [0, -1, 2.5, True])
    def test_a_length_to_pad_to_is_a_whole_number(self, length):
        with pytest.raises(SchemaError, match=r"to_length: got .*, expected a whole number"):
            Trajectory(to_length=length)

    def test_an_episode_is_never_cut_off_by_the_length_to_pad_to(self, tmp_path):
        with pytest.raises(SchemaError, match="to_length"):
            buffer_of(tmp_path, ended([], 3)).sample(1, view=Trajectory(to_length=2))


class TestEveryView:
    VIEWS = (
        Trajectory(("reward",)),
        Timestep(("reward",)),
        NStep(2, ("reward",), gamma=0.9),
        Window(3),
        RandomCrop(3),
        Offsets(reward=(0, 1)),
    )

    @pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
    def test_a_view_is_a_value(self, view):
        copy = pickle.loads(pickle.dumps(view))
        assert copy == view
        assert hash(copy) == hash(view)
        assert all(view != other for other in self.VIEWS if other is not view)

    @pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
    def test_what_is_handed_out_is_a_fresh_writable_copy(self, tmp_path, view):
        buffer = buffer_of(tmp_path, ended([], 6))
        batch = buffer.sample(4, view=view)
        for tensor in batch.values():
            tensor.zero_()
        assert buffer.episode(0)["reward"].tolist() == [1, 2, 3, 4, 5, 6]
        assert buffer.get_all_data()["reward"].tolist() == [[1, 2, 3, 4, 5, 6]]

    def test_the_name_of_a_group_stands_for_all_its_fields(self, tmp_path):
        buffer = buffer_of(
            tmp_path, {"a": {"b": [1], "c": [2]}, "d": [3]}, fields={"a": {"b": "int", "c": "int"}, "d": "int"}
        )
        assert buffer.sample(1, fields="a").keys() == {"a", "_lens"}
        assert buffer.sample(1, timestep_level=True, fields=["a.c"]) == {"a": {"c": torch.tensor([2])}}
        assert buffer.sample(1, view=Offsets(a=(0,)))["_mask_a"].keys() == {"b", "c"}

    def test_dtypes_come_back_as_they_were_declared(self, tmp_path):
        fields, names = fields_of(), ["half", "note", "action", "truncated"]
        with ReplayBuffer(tmp_path, 2, 4, fields, META) as buffer:
            observation = {"pixels": np.ones((1, 2, 3), np.uint8), "state": torch.zeros(1, 2)}
            buffer.store_episode(observation=observation, reward=[0], terminated=[True], truncated=[False])
            batch = buffer.sample(2, timestep_level=True)
        kinds = [getattr(batch[name], "dtype", type(batch[name])) for name in names]
        assert kinds == [torch.bfloat16, list, torch.int64, torch.bool]
        assert batch["observation"]["pixels"].dtype == torch.uint8
        assert batch["half"].tolist() == [[1.5, 1.5]] * 2

    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda: NStep(0), "n_steps: got 0, expected a whole number from 1"),
            (lambda: NStep(True), "n_steps: got True"),
            (lambda: NStep(1, gamma=1.1), "gamma: got 1.1, expected a number from 0 to 1"),
            (lambda: Window(0), "length: got 0"),
            (lambda: Window(2.0), "length: got 2.0"),
            (lambda: Window(2, stride=0), "stride: got 0"),
            (lambda: Window(2, boundary="wrap"), "boundary: got 'wrap', expected one of 'pad', 'shift', 'drop'"),
            (lambda: Window(2, padding="mean"), "padding: got 'mean', expected one of 'zero', 'edge', 'default'"),
            (lambda: Window(2, pad_before=2), "pad_before: got 2, expected 0 … length - 1"),
            (lambda: Window(3, pad_before=1, boundary="drop"), "pad_before"),
            (lambda: RandomCrop(-1), "window_length: got -1"),
            (lambda: Offsets(), "offsets: got {}, expected at least one"),
            (lambda: Offsets(x=()), "offsets: got .*, expected at least one"),
            (lambda: Offsets(x=(0, 0.5)), "offsets: .*0.5"),
            (lambda: Offsets(x=(0,), boundary="wrap"), "boundary: got 'wrap'"),
        ],
    )
    def test_a_view_that_cannot_be_meant_is_refused(self, make, match):
        with pytest.raises(SchemaError, match=match):
            make()


class TestPaddingInFront:
    @pytest.mark.parametrize("length", [3, 8])
    def test_goals_and_rewards_are_those_of_windows_padded_behind(self, tmp_path, length):
        place = Field("float", 2, final=True)
        fields = {"observation": {"achieved_goal": place, "desired_goal": place}, "reward": "float"}
        with ReplayBuffer(tmp_path, 10, 20, fields) as buffer:
            for n in (2, 5, 9):
                walk = np.random.default_rng(n).random((n + 1, 2))
                buffer.store_episode(observation={"achieved_goal": walk, "desired_goal": walk + 9}, reward=-np.ones(n))
            how = {"hindsight": Hindsight(distance, prob=0.9), "seed": 3, "return_indices": True}
            behind = buffer.sample(64, view=Window(length), **how)
            front = buffer.sample(64, view=Window(length, pad_in_front=True), **how)
            assert torch.equal(front["_goal"], behind["_goal"]) and (front["_goal"][:, 0] >= 0).any()
            assert torch.equal(front["_indices"], behind["_indices"])
            assert torch.equal(front["_start"] + length - front["_lens"], behind["_start"])
            for key in ("reward", "_mask"):
                for i, n in enumerate(behind["_lens"].tolist()):
                    assert torch.equal(front[key][i], behind[key][i].roll(length - n)), key

    def test_goals_and_windows_that_run_on_exclude_each_other(self, tmp_path):
        place = Field("float", 2, final=True)
        fields = {"observation": {"achieved_goal": place, "desired_goal": place}, "reward": "float"}
        buffer = buffer_of(tmp_path, fields=fields)
        with pytest.raises(SchemaError, match="goals are of one episode"):
            buffer.dataset(view=Window(3, boundary="continue"), hindsight=Hindsight(distance))
        buffer.close()


def distance(achieved, goal, info):
    return -np.abs(achieved - goal).sum(axis=1)


def test_an_epoch_of_windows_that_run_on_is_resumed_though_more_was_published(tmp_path):
    with ReplayBuffer(tmp_path, 10, 20, {"x": "int"}) as buffer:
        for first in (0, 5, 10):
            buffer.store_episode(x=np.arange(first, first + 5))
        options = {"view": Window(7, boundary="continue"), "shuffle": True, "seed": 4}
        loader = buffer.dataloader(2, **options)
        want = [batch["x"].tolist() for batch in loader]
        assert sorted(row[0] for batch in want for row in batch) == list(range(9))
        loader = buffer.dataloader(2, **options)
        next(iter(loader))
        state = loader.state_dict()
        buffer.store_episode(x=np.arange(15, 20))
        rest = buffer.dataloader(2, **options)
        rest.load_state_dict(state)
        assert [batch["x"].tolist() for batch in rest] == want[1:]
        assert len(list(rest)) == 7  # the next one has the windows that the new episode makes whole


def test_a_ring_that_turns_shows_no_window_of_what_is_gone(tmp_path):
    with ReplayBuffer(tmp_path, 20, 20, {"x": "int", "terminated": "bool"}, capacity=12) as buffer:
        view = Window(5, boundary="continue")
        for x in range(60):
            buffer.add(x=x, terminated=x % 4 == 3)
            if x > 10:
                seen = buffer.sample(64, view=view)["x"]
                assert (seen.diff(dim=1) == 1).all()
                low, high = int(seen.min()), int(seen.max())
                newest = 4 * (x // 4) + 3 if x % 4 == 3 else 4 * (x // 4) - 1
                assert newest - 12 < low and high <= newest
