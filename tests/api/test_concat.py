"""Several folders read as one, at every level, against the slow definition; and their shares of a batch."""

from __future__ import annotations

import os
import pickle
from contextlib import ExitStack

import numpy as np
import pytest
from fault_injection import fork
from hypothesis import example, given
from hypothesis import strategies as st
from profiles import examples
from strategies import Plan, assert_view, choices, items_of, joined, recorded, recordings

from memmap_buffer import (
    ConcatBuffer,
    ConcatReplayBuffer,
    NotABufferError,
    NotEnoughDataError,
    NStep,
    Offsets,
    ReadOnlyError,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    Window,
)

ALL = ("observation.pixels", "note", "half", "reward", "action")
HOW = ("block", "whole", "open", "clear")
LIKE = {"max_episodes": 2, "publish": "episode", "stage": "ram"}
TRIMMED = [  # the best episode is one that its ring has trimmed
    ([Plan(1, "", False, "block", 0)], {**LIKE, "capacity": None}, "terminated"),
    ([Plan(2, "", False, "block", 0)], {**LIKE, "capacity": 1}, "terminated"),
]


def shards(root, *counts, **how):
    """Folders a, b, c, … of that many episodes of one step; x is 100 * source + position."""
    buffers = []
    for source, count in enumerate(counts):
        fields, meta = {"x": "int", "kind": "int"}, {"task": ("int", (), 0)}
        how = {"max_episodes": 200, "max_timesteps": 4, **how}
        buffer = ReplayBuffer(root / "abcdefgh"[source], fields=fields, meta_fields=meta, **how)
        for i in range(count):
            buffer.store_episode(x=[100 * source + i], kind=[source], task=i)
        buffers.append(buffer)
    return buffers


@examples(20)
@given(st.lists(recordings(how=HOW), min_size=1, max_size=3), choices(by_step=True))
@example(TRIMMED, {"top_k": ("task_id", 1)})
def test_every_view_reads_the_folders_one_after_another(drawn, choice):
    """S4-16; the folders' rings, open episodes and emptiness are their own"""
    with ExitStack() as stack:
        pairs = [stack.enter_context(recorded(recording)) for recording in drawn]
        buffer = ConcatBuffer([folder for folder, _ in pairs])
        reference = joined([reference for _, reference in pairs])
        single = len(pairs) == 1
        whole = {name: value for name, value in choice.items() if name != "filter_fields"}
        cuts = [
            ({"fields": ALL, "return_mask": True}, lambda episode: reference.trajectory(episode, ALL), whole),
            ({"timestep_level": True, "fields": ALL}, lambda episode: reference.timesteps(episode, ALL), choice),
            (
                {"view": NStep(2, ALL, ALL, ("note",), gamma=0.5)},
                lambda episode: reference.transitions(episode, 2, ALL, ("note",), 0.5),
                choice,
            ),
            (
                {"view": Window(3, 2, ALL, "shift", "edge")},
                lambda episode: reference.windows(episode, 3, ALL, 2, "shift", "edge"),
                choice,
            ),
            (
                {"view": Offsets(note=(-1, 0), action=(2,), padding="default")},
                lambda episode: reference.offsets(episode, {"note": (-1, 0), "action": (2,)}, padding="default"),
                choice,
            ),
        ]
        for options, cut, chosen in cuts:
            items = items_of(reference, cut, **chosen, whole="return_mask" in options)  # of which a ring forgot nothing
            if single:  # one folder is read as a buffer is, without the number of the source
                items = {key[1:]: item for key, item in items.items()}
            assert_view(buffer, items, batch_size=4, zeros=reference.zeros, **options, **chosen)


class TestContents:
    def test_episodes_are_counted_and_listed_source_by_source(self, tmp_path):
        a, _, c = shards(tmp_path, 2, 0, 3)
        both = ConcatBuffer([a, tmp_path / "b", c])
        assert (len(both), both.num_episodes, both.num_steps, both.max_episodes) == (5, 5, 5, 600)
        assert both.serials.tolist() == [0, 1, 0, 1, 2]
        assert both.episode_lens.tolist() == [1] * 5
        assert [both.episode(i)["x"].tolist() for i in (0, 2, -1)] == [[0], [200], [202]]
        assert [both[i]["x"].tolist() for i in range(5)] == [[0], [1], [200], [201], [202]]
        assert both.get_all_data()["x"].tolist() == [[0], [1], [200], [201], [202]]
        assert both.folders == (tmp_path / "a", tmp_path / "b", tmp_path / "c")
        with pytest.raises(IndexError, match="episode 5: the buffer has 5"):
            both.episode(5)

    def test_the_indices_name_the_source_first(self, tmp_path):
        both = ConcatBuffer(shards(tmp_path, 1, 2))
        (batch,) = both.dataloader(9, timestep_level=True, return_indices=True)
        assert batch["_indices"].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
        (batch,) = both.dataloader(9, return_indices=True)
        assert batch["_index"].tolist() == [[0, 0], [1, 0], [1, 1]]

    def test_a_new_epoch_sees_what_any_source_published(self, tmp_path):
        a, b = shards(tmp_path, 1, 1)
        loader = ConcatBuffer([tmp_path / "a", tmp_path / "b"]).dataloader(9, timestep_level=True)
        assert next(iter(loader))["x"].tolist() == [0, 100]
        a.store_episode(x=[7], kind=[0])
        b.store_episode(x=[8], kind=[1])
        assert next(iter(loader))["x"].tolist() == [0, 7, 100, 8]

    def test_a_folder_is_found_under_its_root_by_name(self, tmp_path):
        shards(tmp_path, 1, 2, 1)
        (tmp_path / "no buffer").mkdir()
        both = ConcatBuffer.from_root(tmp_path)
        assert [folder.name for folder in both.folders] == ["a", "b", "c"]
        with pytest.raises(NotABufferError, match="no subfolder holds a buffer"):
            ConcatBuffer.from_root(tmp_path / "no buffer")
        with pytest.raises(NotABufferError, match=r"this is a buffer.*open it by ReplayBuffer\.from_folder"):
            ConcatBuffer.from_root(tmp_path / "a")

    def test_without_slicing_the_longest_source_gives_the_length(self, tmp_path):
        """S4-19"""
        (a,) = shards(tmp_path, 1)
        (b,) = shards(tmp_path / "more", 1, max_timesteps=9)
        b.store_episode(x=range(9), kind=[1] * 9)
        for order in ([a, b], [b, a]):
            batch = next(iter(ConcatBuffer(order).dataloader(9, slice_by_episode_len=False)))
            assert batch["x"].shape == (3, 9)
            assert sorted(batch["_lens"].tolist()) == [1, 1, 9]

    def test_a_split_is_disjoint_and_complete_over_all_sources(self, tmp_path):
        both = ConcatBuffer(shards(tmp_path, 60, 60))
        split, parts = {"train": 0.6, "val": 0.4}, {}
        for part in split:
            (batch,) = both.dataloader(999, split=split, part=part)
            parts[part] = batch["x"][:, 0].tolist()
        assert sorted(parts["train"] + parts["val"]) == [*range(60), *range(100, 160)]
        assert {x for x in parts["train"] if x < 100} != {x - 100 for x in parts["train"] if x >= 100}

    def test_the_datasets_pickle_as_paths(self, tmp_path):
        dataset = ConcatBuffer(shards(tmp_path, 2, 3)).dataset(timestep_level=True)
        copy = pickle.loads(pickle.dumps(dataset))
        assert [copy[i]["x"].item() for i in range(5)] == [0, 1, 100, 101, 102]


class TestRefusals:
    def test_nothing_is_written_through_it(self, tmp_path):
        """S4-16"""
        both = ConcatBuffer(shards(tmp_path, 1, 1))
        assert both.read_only
        for name in (
            "one_episode",
            "begin_episode",
            "begin_batch",
            "publish_steps",
            "batched_episode",
            "store",
            "store_batch",
            "store_meta_batch",
        ):
            with pytest.raises(ReadOnlyError, match="only reads; write to one of its sources"):
                getattr(both, name)()
        for name in ("store_episode", "store_datapoint", "advance_episode", "update", "clear", "reset_", "set_valid"):
            with pytest.raises(ValueError, match="only reads; write to one of its sources"):
                getattr(both, name)(x=1)
        both.flush()

    def test_folders_of_different_fields_are_refused_and_the_differences_listed(self, tmp_path):
        (a,) = shards(tmp_path, 1)
        b = ReplayBuffer(tmp_path / "z", max_episodes=2, max_timesteps=4, fields={"x": "float", "kind": "int"})
        with pytest.raises(SchemaMismatchError, match=r"(?s)different fields.*int64.*float32"):
            ConcatBuffer([a, b])

    @pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, float("nan")], [1, float("inf")], [1, 2, 3]])
    def test_weights_are_one_positive_number_a_source(self, tmp_path, weights):
        with pytest.raises(SchemaError, match=r"weights: got .*, expected one positive number for each of 2"):
            ConcatBuffer(shards(tmp_path, 1, 1), weights)

    def test_no_source_is_refused(self):
        with pytest.raises(SchemaError, match="got no source, expected at least one"):
            ConcatBuffer([])

    def test_a_folder_or_buffer_that_is_no_list_is_refused(self, tmp_path):
        (a,) = shards(tmp_path, 2)
        for alone in (str(tmp_path / "a"), tmp_path / "a", a):
            with pytest.raises(SchemaError, match=r"got .* alone, expected a list.*write ConcatBuffer\(\[…\]\)"):
                ConcatBuffer(alone)

    def test_empty_sources_have_nothing_to_read(self, tmp_path):
        both = ConcatBuffer(shards(tmp_path, 0, 0))
        with pytest.raises(NotEnoughDataError, match="empty"):
            both.dataset()
        assert both.get_all_data() == {}
        assert ConcatReplayBuffer is ConcatBuffer


class TestWeights:
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_every_batch_has_exactly_the_shares(self, tmp_path, shuffle):
        both = ConcatBuffer(shards(tmp_path, 40, 4, 20), weights=[1, 2, 1])
        loader = both.dataloader(8, timestep_level=True, shuffle=shuffle, seed=1)
        batches = [batch["kind"].bincount(minlength=3).tolist() for batch in loader]
        assert batches == [[2, 4, 2]] * 8
        assert len(loader) == 8
        samples = [both.sample(8, timestep_level=True)["kind"].bincount(minlength=3).tolist() for _ in range(5)]
        assert samples == [[2, 4, 2]] * 5

    def test_every_source_goes_round_in_an_order_of_its_own(self, tmp_path):
        both = ConcatBuffer(shards(tmp_path, 30, 3), weights=[1, 1])
        loader = both.dataloader(6, timestep_level=True, shuffle=True, seed=1)
        epochs = [[x for batch in loader for x in batch["x"].tolist()] for _ in range(2)]
        assert epochs[0] != epochs[1]
        for drawn in epochs:
            few, many = [x for x in drawn if x >= 100], [x for x in drawn if x < 100]
            assert len(drawn) == 33
            assert len(set(many)) == len(many)
            rounds = [few[i : i + 3] for i in range(0, 15, 3)]
            assert all(sorted(turn) == [100, 101, 102] for turn in rounds)
            assert any(turn != rounds[0] for turn in rounds)

    def test_an_incomplete_batch_keeps_the_shares_as_near_as_it_can_or_is_dropped(self, tmp_path):
        both = ConcatBuffer(shards(tmp_path, 7, 3), weights=[3, 1])
        counts = [batch["kind"].bincount(minlength=2).tolist() for batch in both.dataloader(4, timestep_level=True)]
        assert counts[:2] == [[3, 1]] * 2
        assert sum(counts[2]) == 2
        assert len(list(both.dataloader(4, timestep_level=True, drop_last=True))) == 2

    @pytest.mark.timeout(20)
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_a_source_that_has_nothing_cannot_give_its_share(self, tmp_path, shuffle):
        both = ConcatBuffer(shards(tmp_path, 5, 0, 5), weights=[1, 1, 1])
        with pytest.raises(NotEnoughDataError, match="folder 1"):
            both.sample(4, timestep_level=True)
        with pytest.raises(NotEnoughDataError, match="folder 1"):
            list(both.dataloader(4, timestep_level=True, shuffle=shuffle))

    def test_without_weights_every_item_counts_the_same(self, tmp_path):
        both = ConcatBuffer(shards(tmp_path, 90, 10))
        share = both.sample(20_000, timestep_level=True, seed=1)["kind"].float().mean().item()
        assert abs(share - 0.1) < 5 * np.sqrt(0.09 / 20_000)

    def test_one_weighted_folder_is_read_as_without(self, tmp_path):
        both = ConcatBuffer(shards(tmp_path, 5), weights=[3])
        assert [x for batch in both.dataloader(2, timestep_level=True) for x in batch["x"].tolist()] == [0, 1, 2, 3, 4]
        assert len(both.sample(4, timestep_level=True)["x"]) == 4


def test_two_writers_in_two_folders_and_a_reader_of_both(tmp_path):
    """Fault 34: several writers are several folders; nothing is lost, and every row is of the right one."""
    count, fields = 300, {"x": "int", "kind": "int"}
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        ReplayBuffer(path, count, 4, fields).close()

    def writer(source):
        child = fork()
        if child == 0:
            try:
                write(source)
                os._exit(0)
            finally:
                os._exit(1)
        return child

    def write(source):
        with ReplayBuffer.from_folder(paths[source]) as buffer:
            for i in range(count):
                buffer.store_episode(x=[100_000 * source + i] * (1 + i % 4), kind=[source] * (1 + i % 4))

    writers = [writer(0), writer(1)]
    both, seen = ConcatBuffer([ReplayBuffer.from_folder(path, read_only=True) for path in paths]), 0
    while seen < 2 * count:
        both.refresh()
        if seen := len(both):
            batch = both.sample(64, seed=seen)
            assert (batch["x"] // 100_000 == batch["kind"]).all()
    assert [os.waitpid(child, 0)[1] for child in writers] == [0, 0]
    got = both.get_all_data()
    assert sorted(got["x"][:, 0].tolist()) == [100_000 * s + i for s in range(2) for i in range(count)]
    assert both.episode_lens.tolist() == 2 * [1 + i % 4 for i in range(count)]
