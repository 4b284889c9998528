"""Which anchors exist: filters, top-k, splits, the options that contradict each other, and what the index costs."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inside import storage_of
from profiles import examples
from reference import Episode, Reference
from strategies import MEMORY, Churn, assert_view, choices, churns, few, recorded, recordings

from memmap_buffer import (
    ConcatBuffer,
    Field,
    NotEnoughDataError,
    NStep,
    Options,
    ReplayBuffer,
    SchemaError,
    Timestep,
    Trajectory,
    Window,
)
from memmap_buffer.format.storage import Storage
from memmap_buffer.items import filters
from memmap_buffer.items import selection as selection_module
from memmap_buffer.items.index import MANY, Index
from memmap_buffer.items.selection import Selection
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.views.folders import Folders

FIELDS = {
    "x": "int",
    "y": ("float", 1),
    "z": "bfloat16",
    "text": "U4",
    "flag": "bool",
    "vector": ("float", 2),
    "group": {"small": "uint8"},
}
META = {"task": "int", "score": ("float", 1), "name": "U6", "good": "bool", "pair": ("int", 2), "env": {"kind": "int"}}


@pytest.fixture
def buffer(tmp_path):
    """Six episodes of 2 … 7 steps; x counts all steps, score 0, 0.1, 0.2 … falls and rises."""
    buffer = ReplayBuffer(tmp_path, max_episodes=10, max_timesteps=10, fields=FIELDS, meta_fields=META)
    start = 0
    for i, length in enumerate(range(2, 8)):
        x = start + np.arange(length)
        steps = {"x": x, "y": x / 10, "z": x % 8, "text": [f"t{t}" for t in range(length)], "flag": x % 2 == 1}
        steps |= {"vector": np.stack([x, -x], axis=1), "group": {"small": x}}
        meta = {"task": i % 3, "score": abs(i - 2) / 10, "name": "abcabc"[i], "good": i > 2, "pair": [i, i]}
        buffer.store_episode(**steps, **meta, env={"kind": i})
        start += length
    return buffer


def episodes(buffer, **options):
    """The serials that are served as whole episodes, in order."""
    try:
        return next(iter(buffer.dataloader(9999, return_indices=True, **options)))["_index"].tolist()
    except NotEnoughDataError:
        return []


def steps(buffer, **options):
    """The values of x that are served as timesteps, in order."""
    try:
        return next(iter(buffer.dataloader(99, timestep_level=True, **options)))["x"].tolist()
    except NotEnoughDataError:
        return []


LATER = (
    {"timestep_level": True},
    {"n_steps": 2, "min_episode_len": 3},
    {"view": Window(3, boundary="shift"), "filter_meta": {"task": {0, 2}}},
    {"timestep_level": True, "filter_fields": {"x": (2, 50)}},
    {"split": {"a": 0.5, "b": 0.5}, "part": "a"},
    {"timestep_level": True, "weight_by": "task"},
    {"top_k": ("task", 2)},
    {"filter_meta": {"task": lambda column: column >= column.max(initial=1)}},
)


class TestFilters:
    @pytest.mark.parametrize(
        ("conditions", "served"),
        [
            ({"task": 1}, [1, 4]),
            ({"task": np.int64(1)}, [1, 4]),
            ({"task": torch.tensor(1)}, [1, 4]),
            ({"task": {0, 2}}, [0, 2, 3, 5]),
            ({"task": [0]}, [0, 3]),
            ({"task": frozenset({7})}, []),
            ({"task": set()}, []),
            ({"task": range(1, 3)}, [1, 2, 4, 5]),
            ({"task": np.array([2, 1])}, [1, 2, 4, 5]),
            ({"task": (1, None)}, [1, 2, 4, 5]),
            ({"task": (None, 1)}, [0, 3]),
            ({"task": (0, 1)}, [0, 3]),
            ({"task": (None, None)}, [0, 1, 2, 3, 4, 5]),
            ({"task": 2**40}, []),
            ({"task": {2**40, 1}}, [1, 4]),
            ({"score": 0.1}, [1, 3]),
            ({"score": {0.1, 0.3}}, [1, 3, 5]),
            ({"score": [0.1]}, [1, 3]),
            ({"score": (0.1, 0.2)}, [1, 3]),
            ({"name": "a"}, [0, 3]),
            ({"name": {"a", "c", "longer than declared"}}, [0, 2, 3, 5]),
            ({"name": ("b", None)}, [1, 2, 4, 5]),
            ({"name": set()}, []),
            ({"score": [0, 1e300]}, [2]),
            ({"good": True}, [3, 4, 5]),
            ({"good": {False}}, [0, 1, 2]),
            ({"env": {"kind": 4}}, [4]),
            ({"env.kind": (4, None)}, [4, 5]),
            ({"episode_lens": (3, 5)}, [1, 2]),
            ({"pair": lambda column: column.sum(axis=1) > 6}, [4, 5]),
            ({"task": lambda column: column == 0, "good": True}, [3]),
            ({"task": 1, "good": False, "name": "b"}, [1]),
        ],
    )
    def test_meta_conditions_hold_together(self, buffer, conditions, served):
        """S4-24"""
        assert episodes(buffer, filter_meta=conditions) == served
        length = {serial: serial + 2 for serial in range(6)}
        assert len(steps(buffer, filter_meta=conditions)) == sum(length[serial] for serial in served)

    def test_a_meta_field_called_as_the_time_of_publication_is_meant_by_its_name(self, tmp_path):
        buffer = ReplayBuffer(tmp_path, 9, 3, {"x": "int"}, {"episode_time": "int"})
        for number in range(4):
            buffer.store_episode(x=[number], episode_time=number)
        assert steps(buffer, filter_meta={"episode_time": 2}) == [2]
        assert steps(buffer, top_k=("episode_time", 1)) == [3]
        drawn = buffer.sample(99, timestep_level=True, weight_by=lambda columns: columns["episode_time"] == 1)
        assert {*drawn["x"].tolist()} == {1}

    @pytest.mark.parametrize(
        ("conditions", "served"),
        [
            ({"x": 5}, [5]),
            ({"x": (3, 7)}, [3, 4, 5, 6]),
            ({"x": {1, 26, 99}}, [1, 26]),
            ({"y": 0.3}, [3]),
            ({"y": {0.3, 0.7}}, [3, 7]),
            ({"y": (None, 0.3)}, [0, 1, 2]),
            ({"z": 3}, [3, 11, 19]),
            ({"z": (6.5, None)}, [7, 15, 23]),
            ({"text": "t6"}, [26]),
            ({"flag": True, "x": (None, 6)}, [1, 3, 5]),
            ({"group": {"small": 300}}, []),
            ({"group.small": {300, 4}}, [4]),
            ({"x": lambda column: column % 13 == 0}, [0, 13, 26]),
        ],
    )
    def test_field_conditions_choose_timesteps(self, buffer, conditions, served):
        """S4-20"""
        assert steps(buffer, filter_fields=conditions) == served

    def test_fields_and_meta_and_length_hold_together(self, buffer):
        options = {"filter_fields": {"flag": True}, "filter_meta": {"good": True}, "min_episode_len": 6}
        assert steps(buffer, **options) == [15, 17, 19, 21, 23, 25]

    def test_a_condition_looks_at_the_step_of_the_anchor(self, buffer):
        """A window that begins before its episode has none there."""
        view = Window(3, pad_before=2, fields=("x",))
        batch = next(iter(buffer.dataloader(99, view=view, filter_fields={"x": (0, 4)})))
        assert batch["_start"].tolist() == [0, 1, 0, 1]
        assert batch["x"].tolist() == [[0, 1, 0], [1, 0, 0], [2, 3, 4], [3, 4, 0]]

    def test_a_field_with_final_observations_is_looked_up_at_its_own_rows(self, tmp_path):
        buffer = ReplayBuffer(
            tmp_path, max_episodes=9, max_timesteps=3, fields={"x": Field("int", final=True), "y": "int"}
        )
        for start in range(0, 36, 4):
            buffer.store_episode(x=range(start, start + 4), y=[0, 0, 0])
        assert steps(buffer, filter_fields={"x": {1, 3, 10, 11, 20, 33}}) == [1, 10, 20, 33]

    @pytest.mark.parametrize("conditions", [{"task": 1}, {"task": {1}}, {"task": (1, 2)}, {"task": lambda c: c == 1}])
    def test_an_empty_buffer_is_empty_under_any_filter(self, tmp_path, conditions):
        """S4-18"""
        empty = ReplayBuffer(tmp_path / "empty", max_episodes=2, max_timesteps=4, fields=FIELDS, meta_fields=META)
        for options in ({}, {"n_steps": 2, "terminated": "flag"}, {"top_k": ("score", 1)}):
            with pytest.raises(NotEnoughDataError, match="empty"):
                empty.dataset(filter_meta=conditions, **options)

    def test_a_field_filter_over_no_anchors_leaves_none(self, buffer):
        with pytest.raises(NotEnoughDataError, match="none of 6 episodes"):
            buffer.dataset(view=Window(9, boundary="drop"), filter_fields={"x": 1})

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"filter_meta": {"tsk": 1}}, r"filter_meta: got 'tsk', which was not declared.*; did you mean 'task'"),
            ({"filter_meta": {"x": 1}}, "filter_meta: got 'x'"),
            ({"filter_meta": {"pair": 1}}, r"'pair'.*shape \(2,\); give a callable"),
            ({"filter_meta": {"task": (1, 2, 3)}}, r"'task': got \(1, 2, 3\); a tuple is \(low, high\)"),
            ({"filter_meta": {"task": len}}, "'task': the callable gave int64 .*, expected bool"),
            ({"filter_meta": {"task": lambda c: c[:1] == 0}}, r"callable gave bool \(1,\), expected bool \(6,\)"),
            ({"filter_fields": {"z": 1}}, "filter_fields needs a view of timesteps"),
            ({"timestep_level": True, "filter_fields": {"task": 1}}, "filter_fields: got 'task'"),
            ({"timestep_level": True, "filter_fields": {"vector": 1}}, r"'vector' has shape \(2,\)"),
            ({"filter_meta": {"task": "a"}}, r"'task': got 'a', but it holds numbers \(int64\)"),
            ({"filter_meta": {"task": [0, "a"]}}, r"'task': got \[0, 'a'\], but it holds numbers"),
            ({"filter_meta": {"task": ("a", None)}}, r"'task': got \('a', None\), but it holds numbers"),
            ({"filter_meta": {"task": None}}, "'task': got None, but it holds numbers"),
            ({"filter_meta": {"task": [0, [1]]}}, "'task': got .*, but it holds numbers"),
            ({"filter_meta": {"name": (1, 2)}}, r"'name': got \(1, 2\), but it holds text"),
            ({"filter_meta": {"name": 1}}, "'name': got 1, but it holds text"),
            ({"filter_meta": ["task"]}, r"filter: got \['task'\], expected a dict"),
            ({"timestep_level": True, "filter_fields": {"_start": ("a", 3)}}, "'_start': got .*, but it holds numbers"),
            ({"min_episode_len": "3"}, "min_episode_len: got '3', expected a whole number from 0"),
            ({"min_episode_len": 2.5}, "min_episode_len: got 2.5"),
            ({"split": {"a": 1.0}, "part": "a", "split_seed": "x"}, "split_seed: got 'x', expected a whole number"),
            ({"weight_by": "name"}, "weight_by: 'name' holds text; give a field of one number"),
            ({"weight_by": ["score", abs]}, r"weight_by: got \['score', <.*>\], expected a meta field, or"),
            ({"weight_by": ("score", 3)}, r"weight_by: got \('score', 3\), expected a meta field, or"),
            ({"weight_by": ("score", lambda column: column[:1])}, r"the function of 'score' gave shape \(1,\)"),
            ({"top_k": ("scor", 1)}, r"top_k: got 'scor', which was not declared.*; did you mean 'score'"),
            ({"top_k": ("pair", 1)}, r"top_k: 'pair' has shape \(2,\)"),
            ({"top_k": ("score", 0)}, "top_k: got .*0"),
            ({"top_k": ("score", 1.5)}, "top_k: got .*1.5"),
            ({"top_k": "score"}, "top_k: got 'score', expected"),
            ({"part": "train"}, "part: got 'train' without split"),
            ({"split": {"train": 0.9, "val": 0.1}}, "split: got .* part=None"),
            ({"split": {"train": 0.9}, "part": "val"}, "part='val'"),
            ({"split": {"train": 0.9, "val": 0.2}, "part": "val"}, "fractions of at most 1"),
            ({"split": {"train": 1.1, "val": -0.1}, "part": "val"}, "fractions of at most 1"),
        ],
    )
    def test_a_condition_that_cannot_be_meant_is_refused(self, buffer, options, match):
        """S4-25"""
        with pytest.raises(SchemaError, match=match):
            buffer.dataset(**options)

    @pytest.mark.parametrize("as_one", [np.array, torch.tensor], ids=["numpy", "torch"])
    def test_conditions_may_be_arrays_and_tensors(self, buffer, as_one):
        assert episodes(buffer, filter_meta={"task": as_one([1, 2])}) == [1, 2, 4, 5]
        assert episodes(buffer, filter_meta={"task": as_one(1)}) == [1, 4]
        assert episodes(buffer, filter_meta={"task": (as_one(1), as_one(2))}) == [1, 4]
        assert episodes(buffer, filter_meta={"task": [as_one(0), as_one(2)]}) == [0, 2, 3, 5]

    @pytest.mark.parametrize(("condition", "served"), [((0, 1e300), range(6)), (1e300, ()), ([1e300], ())])
    def test_a_number_beyond_the_dtype_of_a_field_is_larger_than_all_in_it(self, buffer, condition, served):
        assert episodes(buffer, filter_meta={"score": condition}) == list(served)

    def test_samples_under_arrays_of_the_same_bytes_are_not_confused(self, buffer):
        long, short = np.array([1, 2], np.int64), np.array([1, 0, 2, 0], np.int32)
        drawn = [set(buffer.sample(99, filter_meta={"task": members})["task"].tolist()) for members in (long, short)]
        assert drawn == [{1, 2}, {0, 1, 2}]

    def test_a_new_epoch_asks_a_callable_again(self, buffer):
        loader = buffer.dataloader(99, filter_meta={"task": lambda column: column == 2}, return_indices=True)
        buffer.store_episode(x=[1], y=[1], z=[1], text=["t"], flag=[0], vector=[[0, 0]], group={"small": [1]}, task=2)
        assert next(iter(loader))["_index"].tolist() == [2, 5, 6]


class TestTopK:
    def test_the_highest_are_served_oldest_first_and_of_equals_the_newer(self, buffer):
        """score is 0.2, 0.1, 0, 0.1, 0.2, 0.3 in a field of shape (1,)"""
        assert [episodes(buffer, top_k=("score", k)) for k in (1, 2, 3, 4)] == [[5], [4, 5], [0, 4, 5], [0, 3, 4, 5]]
        assert episodes(buffer, top_k=("score", 99)) == [0, 1, 2, 3, 4, 5]

    def test_a_value_that_is_no_number_is_lower_than_all(self, buffer):
        steps = {"x": [1], "y": [1], "z": [1], "text": ["t"], "flag": [0], "vector": [[0, 0]], "group": {"small": [1]}}
        buffer.store_episode(**steps, score=np.nan)
        assert [episodes(buffer, top_k=("score", k)) for k in (1, 6, 7)] == [[5], [0, 1, 2, 3, 4, 5], [*range(7)]]

    def test_they_are_chosen_among_those_that_pass_the_filters(self, buffer):
        assert episodes(buffer, top_k=("score", 1), filter_meta={"good": False}) == [0]
        assert episodes(buffer, top_k=("episode_lens", 2), filter_meta={"task": {0, 1}}) == [3, 4]


class TestSplit:
    SPLIT = {"train": 0.7, "val": 0.2, "test": 0.1}  # noqa: RUF012

    def parts(self, buffer, **options):
        return {name: episodes(buffer, split=self.SPLIT, part=name, **options) for name in self.SPLIT}

    def fill(self, folder, count, **how):
        how = {"max_episodes": 2000, "max_timesteps": 2, "circular": True, **how}
        buffer = ReplayBuffer(folder, fields={"x": "int"}, checksum=None, **how)
        for i in range(count):
            buffer.store_episode(x=[i])
        return buffer

    def test_the_parts_are_disjoint_complete_and_of_their_size(self, tmp_path):
        buffer = self.fill(tmp_path, 1000)
        parts = self.parts(buffer)
        assert sorted(serial for part in parts.values() for serial in part) == list(range(1000))
        assert {name: len(part) for name, part in parts.items()} == {"train": 700, "val": 200, "test": 100}
        gaps = np.diff([0, *parts["test"], 1000])  # one of each ten, and within them anywhere
        assert gaps.max() < 20
        places = np.bincount(np.array(parts["test"]) % 10, minlength=10)
        assert ((places - 10) ** 2 / 10).sum() < 28  # chi², 9 degrees of freedom: 1 in 1000

    def test_an_episode_never_changes_its_part(self, tmp_path):
        """Neither as others arrive, nor in another process, nor by a larger ring, nor by a filter."""
        buffer = self.fill(tmp_path / "a", 40, max_episodes=30)
        before = self.parts(buffer)
        part_of = {serial: name for name, serials in before.items() for serial in serials}
        assert sorted(part_of) == list(range(10, 40))
        for i in range(20):
            buffer.store_episode(x=[i])
        after = self.parts(ReplayBuffer.from_folder(tmp_path / "a", read_only=True), timestep_level=False)
        assert all(part_of.get(serial, name) == name for name, serials in after.items() for serial in serials)
        assert self.parts(self.fill(tmp_path / "b", 40))["train"][-len(before["train"]) :] == before["train"]

    def test_a_seed_gives_another_split_and_shares_below_one_leave_some_out(self, tmp_path):
        buffer = self.fill(tmp_path, 80)
        half = [episodes(buffer, split={"a": 0.5}, part="a", split_seed=seed) for seed in (0, 0, 1)]
        assert half[0] == half[1] != half[2]
        assert len(half[0]) == 40
        assert episodes(buffer, split={"a": 1.0}, part="a") == list(range(80))

    @pytest.mark.parametrize("split", [{"a": 0.9, "b": 0.1}, {"a": 1 / 3, "b": 0.64}, {"a": 0.995, "b": 0.005}])
    def test_no_part_is_empty_by_chance(self, tmp_path, split):
        count = 10 if "a" in split and split["a"] == 0.9 else 500
        buffer = self.fill(tmp_path, count)
        for seed in range(20):
            parts = [episodes(buffer, split=split, part=name, split_seed=seed) for name in split]
            assert all(parts)
            assert not set(parts[0]) & set(parts[1])

    def test_whole_numbers_are_counts_of_the_oldest_episodes(self, tmp_path):
        buffer, split = self.fill(tmp_path, 10), {"train": 7, "val": 2, "none": 0}
        seen = Counter()
        for seed in range(60):
            train, val = (episodes(buffer, split=split, part=name, split_seed=seed) for name in ("train", "val"))
            assert (len(train), len(val), sorted(train + val)) == (7, 2, list(range(9)))
            seen.update(val)
        assert min(seen[serial] for serial in range(9)) > 3
        for _ in range(5):  # later ones are in no part, and those of before stay
            buffer.store_episode(x=[0])
        assert episodes(buffer, split=split, part="val", split_seed=59) == val
        how = {"timestep_level": True, "split": split, "part": "val", "split_seed": 59, "return_indices": True}
        for more in ({}, {"prioritized": True}):
            assert set(buffer.sample(50, **how, **more)["_indices"][:, 0].tolist()) == set(val)
        assert episodes(buffer, split=split, part="val", split_seed=59, top_k=("episode_lens", 1)) == val[-1:]
        buffer.delete([12])
        assert buffer.sample(50, **how)["x"].shape == (50,)

    def test_counts_are_before_other_filters_so_parts_never_share_an_episode(self, tmp_path):
        buffer = ReplayBuffer(tmp_path, 20, 2, {"x": "int"}, meta_fields={"odd": "int"})
        for i in range(20):
            buffer.store_episode(x=[i], odd=i % 2)
        split = {"train": 16, "val": 4}
        odd = {name: episodes(buffer, split=split, part=name, filter_meta={"odd": 1}) for name in split}
        every = {name: episodes(buffer, split=split, part=name) for name in split}
        assert odd == {name: [serial for serial in part if serial % 2] for name, part in every.items()}

    def test_counts_are_over_all_folders(self, tmp_path):
        both = ConcatBuffer([self.fill(tmp_path / "a", 3), self.fill(tmp_path / "b", 5)])
        parts = []
        for name, count in (split := {"train": 6, "val": 2}).items():
            index = both.batch(split=split, part=name, return_indices=True)["_index"].tolist()
            assert len(index) == count
            parts += map(tuple, index)
        assert sorted(parts) == [(0, 0), (0, 1), (0, 2), *((1, i) for i in range(5))]

    def test_more_than_there_are_is_refused_with_the_numbers(self, tmp_path):
        with pytest.raises(NotEnoughDataError, match=r"takes 10 episodes, there are 4; give lower numbers"):
            self.fill(tmp_path, 4).dataset(split={"train": 8, "val": 2}, part="val")

    @pytest.mark.parametrize("split", [{"train": 1}, {"train": 1, "val": 0}])
    def test_a_whole_1_is_refused_as_it_may_mean_all_or_one(self, tmp_path, split):
        with pytest.raises(SchemaError, match=r"may mean one episode, or all: .* write 1\.0"):
            self.fill(tmp_path, 4).dataset(split=split, part="train")

    def test_a_meta_field_may_name_the_parts(self, tmp_path):
        buffer = ReplayBuffer(tmp_path, 20, 2, {"x": "int"}, meta_fields={"subset": "U8", "fold": "int"})
        for i in range(6):
            buffer.store_episode(x=[i], subset="val" if i in (1, 4) else "train", fold=i % 3)
        assert episodes(buffer, split="subset", part="val") == [1, 4]
        assert episodes(buffer, split="fold", part=0, filter_meta={"subset": "train"}) == [0, 3]
        with pytest.raises(SchemaError, match=r"split: got 'subsets', .*did you mean 'subset'"):
            buffer.dataset(split="subsets", part="val")
        with pytest.raises(SchemaError, match="split: got the meta field 'subset' and no value of it as part"):
            buffer.dataset(split="subset")
        with pytest.raises(SchemaError, match="split: got the meta field 'fold' and a filter_meta of it too"):
            buffer.dataset(split="fold", part=1, filter_meta={"fold": 1})
        with pytest.raises(NotEnoughDataError, match=r"none of 6 episodes has an item for .*'test'"):
            buffer.dataset(split="subset", part="test")

    def test_the_split_is_of_episodes_in_every_view(self, tmp_path):
        buffer = ReplayBuffer(tmp_path, max_episodes=50, max_timesteps=5, fields={"x": "int"})
        for i in range(40):
            buffer.store_episode(x=[i] * 5)
        whole = self.parts(buffer)["val"]
        for how in ({"timestep_level": True}, {"n_steps": 2}, {"view": Window(2)}):
            batch = next(iter(buffer.dataloader(999, split=self.SPLIT, part="val", return_indices=True, **how)))
            assert sorted(set(batch["_indices"][:, 0].tolist())) == whole


class TestOptions:
    """S4-25 and the spelling of memmap-replay-buffer's options."""

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"fields": ["x"], "to_named_tuple": ["x"]}, "fields and to_named_tuple exclude each other"),
            ({"return_mask": True, "timestep_level": True}, "return_mask is for whole episodes"),
            ({"return_mask": True, "n_steps": 2}, "return_mask is for whole episodes"),
            ({"return_mask": True, "window_length": 2}, "return_mask is for whole episodes"),
            ({"n_steps": 2, "timestep_level": True}, "n_steps and timestep_level exclude each other"),
            ({"window_length": 2, "timestep_level": True}, "exclude each other"),
            ({"view": Timestep(), "n_steps": 1}, "view and n_steps exclude each other"),
            ({"view": Timestep(), "fields": ["x"]}, "fields says nothing to a view object"),
            ({"view": NStep(1), "reward": "x"}, "reward says nothing to a view object; give reward=… to the view"),
            ({"view": NStep(1), "terminated": "x"}, "terminated says nothing to a view object"),
            ({"view": Window(2), "terminated": None}, "terminated says nothing to a view object"),
            ({"view": Window(2), "stack": {"x": 2}}, "stack says nothing to a view object; Window has none"),
            ({"view": Trajectory(), "slice_by_episode_len": False}, "give to_length=… to the view"),
            ({"view": Trajectory(), "return_episode_lens": False}, "give return_lens=… to the view"),
            ({"view": Trajectory(), "return_mask": True}, "give return_mask=… to the view"),
            ({"view": Window(2), "return_mask": True}, "return_mask is for whole episodes"),
            ({"timestep_level": True, "terminated": "x"}, "go with n_steps"),
            ({"n_steps": 1, "fields": ["x"]}, "use current_fields, next_fields and sequence_fields"),
            ({"filter_fields": {"x": 1}}, "filter_fields needs a view of timesteps"),
            ({"window_length": 2, "filter_fields": {"x": 1}}, "filter_fields needs a view of timesteps"),
            ({"slice_by_episode_len": False, "return_episode_lens": False}, "slice_by_episode_len=False needs"),
            ({"fields": ["xx"]}, r"fields: got 'xx', which was not declared.*; did you mean 'x'"),
            ({"n_steps": 1, "next_fields": ["q"]}, "next_fields: got 'q'"),
            ({"n_steps": 1, "sequence_fields": ["vektor"]}, "did you mean 'vector'"),
            ({"n_steps": 1, "gamma": 0.9}, "reward: got 'reward'"),
            ({"n_steps": 0}, "n_steps: got 0"),
            ({"window_length": 0}, "window_length: got 0"),
            ({"current_fields": ["x"]}, "go with n_steps"),
            ({"timestep_level": True, "gamma": 0.9}, "go with n_steps"),
            ({"to_named_tuple": ["x", "nothing"]}, "to_named_tuple: got 'nothing'"),
            ({"fieldname_map": {"nothing": "x"}}, "fieldname_map: got 'nothing'"),
            ({"fieldname_map": {"x": "y"}}, "two keys of the batch would be 'y'"),
            ({"on_stale": "ignore"}, "on_stale: got 'ignore', expected one of 'redraw', 'raise'"),
            ({"time_step_level": True}, "'time_step_level' is unknown; did you mean 'timestep_level'"),
        ],
    )
    def test_options_that_exclude_each_other_or_name_nothing_are_refused(self, buffer, options, match):
        for read in (buffer.dataset, lambda **o: buffer.dataloader(2, **o), lambda **o: buffer.sample(2, **o)):
            with pytest.raises(ValueError, match=match):
                read(**options)

    def test_a_field_named_like_a_successor_is_left_out_and_where_it_is_asked_for_refused(self, tmp_path):
        buffer = ReplayBuffer(tmp_path, max_episodes=2, max_timesteps=4, fields={"x": "int", "next_x": "int"})
        buffer.store_episode(x=[1, 2], next_x=[20, 30])
        with pytest.raises(SchemaError, match="two keys of the batch would be 'next_x'"):
            buffer.dataset(n_steps=1, current_fields=["x", "next_x"])
        assert buffer.sample(1, n_steps=1, next_fields=[])["next_x"].tolist() == [20]
        for names in (None, ["x"]):
            assert buffer.sample(1, n_steps=1, next_fields=names)["next_x"].tolist() == [2]

    def test_the_options_of_memmap_replay_buffer_keep_their_names(self):
        theirs = "n_steps timestep_level window_length fields current_fields next_fields sequence_fields filter_meta "
        theirs += "filter_fields fieldname_map return_mask return_indices to_named_tuple include_metadata "
        theirs += "min_episode_len slice_by_episode_len return_episode_lens"
        assert set(theirs.split()) <= Options.__annotations__.keys()


class TestCost:
    def test_the_index_costs_memory_per_episode_not_per_step(self, tmp_path):
        buffer = ReplayBuffer(tmp_path, max_episodes=50, max_timesteps=2000, fields={"x": "int"})
        for _ in range(50):
            buffer.store_episode(x=np.arange(2000))
        cost = {"all": {}, "some": {"x": (5, 1500)}}
        for name, conditions in cost.items():
            selection = Selection(Timestep(), filter_fields=conditions)
            found = selection.index(Folders([storage_of(buffer)]))
            cost[name] = sum(part.nbytes for part in vars(found).values() if isinstance(part, np.ndarray))
        assert cost["some"] == cost["all"] <= 32 * 50 + 8

    @few
    @given(recordings(how=("block", "whole")), choices(by_step=True), st.integers(1, 9), st.integers(1, 3))
    def test_a_column_scanned_in_chunks_of_any_size_gives_the_same(self, recording, choice, chunk, stride):
        conditions = choice.pop("filter_fields", {"action": (17, 40)})
        with recorded(recording) as (buffer, reference), pytest.MonkeyPatch.context() as patch:
            patch.setattr(filters, "CHUNK_STEPS", chunk)
            how = {"stride": stride, "boundary": "shift"}
            items = reference.items(
                lambda episode: reference.windows(episode, 3, ("action",), **how), filter_fields=conditions, **choice
            )
            view = Window(3, fields=("action",), **how)
            assert_view(buffer, items, view=view, filter_fields=conditions, **choice)

    @examples(50)
    @given(
        st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10**12)), min_size=1, max_size=40),
        st.integers(0, 2**32 - 1),
    )
    def test_many_anchors_are_located_like_few(self, counts, seed):
        starts = np.concatenate([[0], np.cumsum(counts)])
        if not starts[-1]:
            return
        runs = np.arange(len(counts))
        index = Index(runs, runs + 100, runs * 10, starts)
        i = np.random.default_rng(seed).integers(0, starts[-1], MANY)
        i[: 2 * len(counts)] = np.clip(np.concatenate([starts[:-1], starts[1:] - 1]), 0, starts[-1] - 1)
        many = index.locate(i)
        few = [index.locate(part) for part in np.split(i, 8)]
        for column in ("slot", "serial", "t"):
            assert (getattr(many, column) == np.concatenate([getattr(part, column) for part in few])).all()

    @examples(50)
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
    def test_locate_finds_the_run_of_every_anchor(self, counts):
        starts = np.concatenate([[0], np.cumsum(counts)])
        runs = np.arange(len(counts))
        found = Index(runs, runs + 100, runs * 10, starts).locate(np.arange(starts[-1]))
        want = [(run, 100 + run, 10 * run + t) for run, count in enumerate(counts) for t in range(count)]
        assert list(zip(found.slot, found.serial, found.t, strict=True)) == want

    @few
    @given(churns, st.sampled_from(LATER), st.booleans())
    def test_an_index_that_follows_its_folders_is_the_one_that_is_made_anew(self, operations, options, two):
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            churns = [Churn(Path(folder) / str(number)) for number in range(1 + two)]
            storages = [Storage.open(churn.folder, verify="never") for churn in churns]
            reader = BatchReader(Folders(storages), options)
            for number, (name, value) in enumerate(operations):
                churns[number % len(churns)].run(name, value)
                found, anew = reader.index(refresh=True), reader.selection.index(reader.folders)
                for column in ("slot", "serial", "first", "starts", "folder", "last", "weight_sums"):
                    mine, theirs = getattr(found, column), getattr(anew, column)
                    assert (mine is None) == (theirs is None)
                    assert mine is None or mine.tolist() == theirs.tolist()
            for churn in churns:
                churn.buffer.close()

    def test_only_episodes_that_changed_are_looked_at_again(self, buffer, monkeypatch):
        reader = BatchReader(Folders([storage_of(buffer)]), {"timestep_level": True, "filter_fields": {"x": (3, 20)}})
        reader.index()
        seen = []
        filtered = selection_module.filtered
        monkeypatch.setattr(
            selection_module, "filtered", lambda runs, *rest: seen.extend(runs.serial.tolist()) or filtered(runs, *rest)
        )
        buffer.update(3, y=np.zeros((5, 1)))
        buffer.delete(0)
        assert reader.index(refresh=True).locate(np.arange(1)).serial.tolist() == [1]
        assert seen == [3]

    def test_whole_episodes_are_anchors_too(self, buffer):
        assert len(buffer.dataset(view=Trajectory())) == 6


class TestWeights:
    """Scores of the six episodes: 0.2, 0.1, 0, 0.1, 0.2, 0.3; they have 2 … 7 steps."""

    @staticmethod
    def expected(buffer, name):
        """x -> its share, from the definition."""
        score = [float(np.ravel(buffer.episode(i).get(name, 0))[0]) for i in range(len(buffer))]
        shares = np.concatenate([np.full(n, w) for n, w in zip(buffer.episode_lens, score, strict=True)])
        return shares / shares.sum()

    @staticmethod
    def assert_shares(seen, shares):
        """Counts are as shares say, to 5 σ of a chi-square, and what has none is never drawn."""
        counts = np.bincount(seen, minlength=len(shares))
        assert counts[shares == 0].sum() == 0
        expected, counts = shares[shares > 0] * counts.sum(), counts[shares > 0]
        degrees = len(expected) - 1
        assert ((counts - expected) ** 2 / expected).sum() < degrees + 5 * np.sqrt(2 * degrees)

    def test_items_are_sampled_in_proportion_to_the_weight_of_their_episode(self, buffer):
        seen = buffer.sample(40_000, timestep_level=True, weight_by="score", seed=1)["x"].numpy()
        self.assert_shares(seen, self.expected(buffer, "score"))

    def test_whole_episodes_are_sampled_in_proportion_to_their_length(self, buffer):
        seen = buffer.sample(40_000, weight_by="episode_lens", return_indices=True, fields=["x"], seed=1)["_index"]
        self.assert_shares(seen.numpy(), np.arange(2, 8) / 27)

    def test_a_loader_draws_by_weight_as_many_items_as_there_are_of_any_weight(self, buffer):
        loader = buffer.dataloader(4, timestep_level=True, weight_by="score", shuffle=True, seed=3)
        epochs = [[x for batch in loader for x in batch["x"].tolist()] for _ in range(400)]
        assert {len(epoch) for epoch in epochs} == {23}
        assert len({tuple(epoch) for epoch in epochs}) == 400
        self.assert_shares(np.concatenate(epochs), self.expected(buffer, "score"))
        again = buffer.dataloader(23, timestep_level=True, weight_by="score", shuffle=True, seed=3)
        assert next(iter(again))["x"].tolist() == epochs[0]

    def test_filters_and_weights_hold_together(self, buffer):
        kept = {"weight_by": "score", "filter_meta": {"task": 0}, "filter_fields": {"x": (1, 16)}}
        shares = self.expected(buffer, "score") * np.isin(np.arange(27), [1, *range(9, 14)])
        seen = buffer.sample(9000, timestep_level=True, seed=1, **kept)["x"].numpy()
        self.assert_shares(seen, shares / shares.sum())

    def test_each_source_of_a_mixture_is_drawn_from_by_weight(self, buffer, tmp_path):
        with ReplayBuffer(tmp_path / "other", 2, 5, buffer.schema) as other:
            for weight in (1, 3):
                steps = {name: np.zeros((5, *field.shape)) for name, field in buffer.schema.fields.items()}
                meta = {"task": 0, "score": weight, "name": "", "good": True, "pair": [0, 0], "env": {"kind": weight}}
                other.store_episode(**{**steps, "x": np.arange(5), "text": ["a"] * 5}, **meta)
        both = ConcatBuffer([buffer, tmp_path / "other"], weights=[1, 1])
        kept = {"timestep_level": True, "weight_by": "score", "return_indices": True}
        loader = both.dataloader(8, shuffle=True, seed=1, **kept)
        batches = [batch for _ in range(500) for batch in loader] + [both.sample(8, **kept) for _ in range(500)]
        indices = np.concatenate([batch["_indices"].numpy() for batch in batches])
        assert all(
            (batch["_indices"][:, 0] == 0).sum() == len(batch["x"]) / 2 for batch in batches if len(batch["x"]) == 8
        )
        self.assert_shares(indices[indices[:, 0] == 1, 1], np.array([0.25, 0.75]))
        first = indices[indices[:, 0] == 0]
        begins = np.cumsum([0, *buffer.episode_lens])
        self.assert_shares(begins[first[:, 1]] + first[:, 2], self.expected(buffer, "score"))

    def test_a_function_of_a_column_tells_how_much_an_older_item_counts(self, buffer, tmp_path):
        """Staleness in updates: 1 / (1 + age), and none of those that are older than asked."""
        newest = len(buffer) - 1
        buffer.update(score=np.arange(6.0))
        by_age = ("score", lambda version: 1 / (1 + version.max() - version))
        shares = np.repeat(1 / (1 + newest - np.arange(6)), buffer.episode_lens)
        kept = {"timestep_level": True, "weight_by": by_age}
        self.assert_shares(buffer.sample(40_000, seed=1, **kept)["x"].numpy(), shares / shares.sum())
        shares[np.repeat(np.arange(6), buffer.episode_lens) < 3] = 0
        young = {**kept, "filter_meta": {"score": (newest - 2, None)}}
        self.assert_shares(buffer.sample(9000, seed=1, **young)["x"].numpy(), shares / shares.sum())
        alone = buffer.dataloader(5, shuffle=True, seed=2, **kept)
        workers = buffer.dataloader(5, shuffle=True, seed=2, num_workers=1, **kept)
        assert [b["x"].tolist() for b in workers] == [b["x"].tolist() for b in alone]

    def test_the_time_of_publication_is_a_column_too(self, buffer):
        """Staleness in seconds."""
        now = int(time.time())
        kept = {"timestep_level": True, "weight_by": ("episode_time", lambda published: 1 + 0 * published)}
        for low, high, count in ((now - 3600, now + 60, 27), (now + 60, None, 0), (None, now - 3600, 0)):
            kept["filter_meta"] = {"episode_time": (low, high)}
            if not count:
                with pytest.raises(NotEnoughDataError, match="episode_time"):
                    buffer.dataset(**kept)
            else:
                assert len(buffer.dataset(**kept)) == count

    @pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
    def test_a_weight_that_is_none_names_the_episode(self, buffer, wrong):
        buffer.update(3, score=wrong)
        with pytest.raises(SchemaError, match="weight_by: 'score' of episode 3 is") as caught:
            buffer.sample(2, weight_by="score")
        assert caught.value.serial == 3
        assert len(buffer.sample(2, weight_by="score", filter_meta={"task": {1, 2}})["x"]) == 2

    def test_weights_that_are_all_zero_leave_nothing_to_draw(self, buffer):
        buffer.update(score=np.zeros(6))
        with pytest.raises(NotEnoughDataError, match="weight_by='score'"):
            buffer.sample(2, weight_by="score")

    @pytest.mark.parametrize(("name", "text"), [("scoer", "score"), ("pair", r"'pair' has shape \(2,\)")])
    def test_a_weight_is_a_declared_meta_field_of_one_number(self, buffer, name, text):
        with pytest.raises(SchemaError, match=text):
            buffer.sample(2, weight_by=name)

    @pytest.mark.parametrize("shuffle", [False, "block"])
    def test_a_loader_that_does_not_draw_at_random_refuses_weights(self, buffer, shuffle):
        with pytest.raises(SchemaError, match="weight_by='score' draws at random"):
            buffer.dataloader(2, weight_by="score", shuffle=shuffle)

    @examples(100)
    @given(
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=9),
        st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
    )
    def test_a_number_falls_on_the_anchor_whose_share_of_one_it_lies_in(self, runs, numbers):
        counts, weights = np.array(runs).T
        starts, mass = (np.concatenate([[0], np.cumsum(part)]) for part in (counts, counts * weights))
        z = np.zeros(len(runs), np.int64)
        found = Index(z, z, z, starts, weight_sums=mass.astype(np.float64)).pick(np.array(numbers))
        edges = np.cumsum([weight for count, weight in runs for _ in range(count)]) / mass[-1]
        for number, got in zip(numbers, found, strict=True):
            want = sum(number >= edge for edge in edges)
            assert got == want or min(abs(number - edge) for edge in edges) < 1e-12


def test_the_slow_definition_forgets_the_oldest():
    """The oracle itself: a ring of two episodes and of four steps."""
    reference = Reference({}, {}, max_episodes=2, capacity=4)
    for length in (1, 2, 1, 3):
        reference.publish(Episode({"x": list(range(length))}, {}, {}))
    assert [(episode.serial, episode.length) for episode in reference.episodes] == [(2, 1), (3, 3)]
    reference.publish(Episode({"x": [7, 8]}, {}, {}))
    assert [(one.serial, one.forgotten, one.steps["x"]) for one in reference.episodes] == [
        (3, 1, [1, 2]),
        (4, 0, [7, 8]),
    ]


def test_runs_that_leave_or_are_added_keep_the_weights_of_the_others() -> None:
    slots, weights = np.arange(3), np.array([0.0, 2.0, 3.0, 7.0])
    index = Index(slots, slots + 100, slots * 10, np.array([0, 5, 10, 15]), weight_sums=weights)
    u = np.linspace(0, 1, 200, endpoint=False)
    added = index.with_run(1, serial=100, count=4, folder=0)
    assert (len(added), added.serial.tolist()) == (19, [100, 100, 101, 102])
    shares = [int(np.count_nonzero(added.locate(added.pick(u)).t // 10 == place)) for place in range(3)]
    assert np.allclose(np.diff(added.weight_sums), [2, 0, 1, 4])  # nothing, as long as others are left
    assert np.allclose(shares, np.diff(weights) / 7 * 200, atol=1)
    alone = replace(index, weight_sums=np.zeros(4)).with_run(3, serial=103, count=4, folder=0)
    assert set(alone.locate(alone.pick(u)).serial.tolist()) == {103}
    table = SimpleNamespace(shows=lambda slot, serial: serial != 101)
    left = index.living(SimpleNamespace(tables=(), by_number=lambda tables: [(0, None, table)]))  # type: ignore[arg-type]
    assert (len(left), left.serial.tolist(), np.diff(left.weight_sums).tolist()) == (10, [100, 102], [2, 4])
