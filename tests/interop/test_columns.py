"""Batches become columns in which nothing is padded, and rows of steps become the episode that they were."""

import numpy as np
import pytest

from memmap_buffer import ConcatBuffer, Field, ReplayBuffer, Schema, Trajectory
from memmap_buffer.interop.columns import as_episode, columns_of


def test_indices_become_a_column_each(recorded):
    batch = recorded().sample(5, timestep_level=True, return_indices=True, seed=1)
    columns = columns_of({"_indices": batch["_indices"]})
    assert list(columns) == ["_serial", "_t"]
    np.testing.assert_array_equal(np.stack(list(columns.values()), 1), batch["_indices"])
    batch = recorded().sample(5, return_indices=True, seed=1)
    columns = columns_of({"_index": batch["_index"]})
    assert list(columns) == ["_serial"]
    np.testing.assert_array_equal(columns["_serial"], batch["_index"])
    both = ConcatBuffer([recorded((2,), name="a"), recorded((3,), name="b")])
    batch = both.sample(5, timestep_level=True, return_indices=True, seed=1)
    columns = columns_of({"_indices": batch["_indices"]})
    assert list(columns) == ["_source", "_serial", "_t"]
    np.testing.assert_array_equal(np.stack(list(columns.values()), 1), batch["_indices"])


def test_ragged_sequences_keep_their_own_lengths(recorded):
    batch = recorded().sample(5, ragged=True, fields=["t", "half", "text"], include_metadata=False, seed=1)
    columns = columns_of(batch)
    lens = batch["_lens"].tolist()
    assert all([len(row) for row in columns[name]] == lens for name in ("t", "half", "text"))
    assert all((row == np.arange(len(row))).all() for row in columns["t"])
    assert columns["half"][0].dtype == np.float32


def test_whole_episodes_lose_their_padding_whatever_their_keys_are_called(recorded):
    names = {"_lens": "length", "_has_final": "complete", "observation": "seen"}
    whole = Trajectory(("observation", "t"), final_observation=True)
    batch = recorded().sample(5, view=whole, fieldname_map=names, seed=1)
    columns = columns_of(batch, {"seen": True, "t": False}, lens="length", has_final="complete")
    assert [len(row) for row in columns["t"]] == columns["length"].tolist() == batch["length"].tolist()
    assert [len(row) for row in columns["seen"]] == (batch["length"] + batch["complete"].long()).tolist()
    assert "complete" not in columns


@pytest.mark.parametrize("with_next", [True, False])
def test_steps_in_any_order_become_the_episode_that_they_were(with_next):
    schema = Schema({"x": Field("float", 2, final=with_next), "note": "U4"}, {"task": "int"})
    rng = np.random.default_rng(0)
    x, shuffled = rng.random((7, 2)), rng.permutation(6)
    notes = np.array([f"n{t}" for t in range(6)], object)
    steps = {"x": x[:-1], "note": notes, "task": np.full(6, 3), "t": np.arange(6), "next_x": x[1:], "other": notes}
    episode = as_episode(schema, "t", {name: column[shuffled] for name, column in steps.items()})
    assert set(episode) == {"x", "note", "task"}
    np.testing.assert_array_equal(episode["x"][0], x if with_next else x[:-1])
    assert episode["note"][0] == notes.tolist()
    assert episode["task"].tolist() == [3]


def test_lists_keep_their_lengths_by_whole_episodes_and_by_steps(tmp_path):
    schema = Schema({"ids": Field("int16", (None,), final=True)}, {"n": "int"})
    buffer = ReplayBuffer(tmp_path, 2, 5, schema)
    given = [[[1], [], [2, 3], [4]], [[], [5, 6, 7]]]
    for n, ids in enumerate(given):
        buffer.store_episode(ids=ids, n=n)
    whole = columns_of(buffer.batch(view=Trajectory(final_observation=True)), {"ids": True})
    for ids, rows, counts in zip(given, whole["ids"], whole["_lens_ids"], strict=True):
        assert [row[:count].tolist() for row, count in zip(rows, counts, strict=True)] == ids
    steps = columns_of(buffer.batch(n_steps=1, next_fields=["ids"], return_indices=True))
    rows = {name: column[[2, 0, 1]] for name, column in steps.items()}
    episode = as_episode(schema, "_t", rows)
    assert [row.tolist() for row in episode["ids"][0]] == given[0]
