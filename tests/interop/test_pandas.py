"""Tables of items against loops over the episodes; run where pandas is installed, as with the extra `test`."""

from __future__ import annotations

import numpy as np
import pytest

pandas = pytest.importorskip("pandas")

from memmap_buffer import ConcatBuffer, ReplayBuffer, SchemaError, Window  # noqa: E402
from memmap_buffer.interop.pandas import to_dataframe, to_pre_timeline  # noqa: E402


def test_each_timestep_is_a_row_with_its_episode_and_meta_fields(recorded):
    buffer = recorded()
    table = to_dataframe(buffer)
    rows = [(i, t) for i, length in enumerate(buffer.episode_lens.tolist()) for t in range(length)]
    assert list(zip(table["_episode"], table["_t"], strict=True)) == rows
    for (i, t), (_, row) in zip(rows, table.iterrows(), strict=True):
        episode = buffer.episode(i)
        for name in ("number", "text", "reward", "terminated", "half"):
            assert row[name] == episode[name][t]
        np.testing.assert_array_equal(row["observation"], episode["observation"][t])
        np.testing.assert_array_equal(row["camera.left"], episode["camera"]["left"][t])
        assert (row["task_id"], row["name"]) == (episode["task_id"], episode["name"])


def test_numbers_keep_their_dtype(recorded):
    table = to_dataframe(recorded())
    kinds = {name: str(table[name].dtype) for name in ("number", "reward", "half", "terminated", "success")}
    assert kinds == {"number": "int64", "reward": "float32", "half": "float32", "terminated": "bool", "success": "bool"}


def test_any_view_some_positions_and_every_other_option_may_be_asked_for(recorded):
    buffer = recorded()
    table = to_dataframe(buffer, [1, 3], view=Window(2, fields=("t",)), include_metadata=False)
    assert table.columns.tolist() == ["_episode", "_t", "t", "_lens", "_mask", "_start", "_reaches_episode_end"]
    assert [row.tolist() for row in table["t"]] == [[1, 2], [0, 1]]
    whole = to_dataframe(buffer, n_steps=1, filter_meta={"task_id": 1})
    assert set(whole["_episode"]) == {1, 3}
    assert whole["next_t"].tolist() == [1, 2, 3, 0, 1, 2, 3, 4, 5, 0]


def test_sequences_are_arrays_of_their_own_length_if_ragged(recorded):
    buffer = recorded()
    table = to_dataframe(buffer, view=Window(4, fields=("reward",)), ragged=True)
    assert [len(row) for row in table["reward"]] == table["_lens"].tolist()


def test_rows_of_several_folders_name_their_source(recorded):
    both = ConcatBuffer([recorded((2,), name="a"), recorded((3,), name="b")])
    table = to_dataframe(both)
    assert list(zip(table["_source"], table["_episode"], table["_t"], strict=True)) == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 0, 2),
    ]


@pytest.fixture
def rollouts(tmp_path):
    """`rollouts(action)`: two episodes of 3 and 2 steps, the second terminated."""

    def make(action):
        fields = {"observation": ("float", 2), "action": action, "reward": "float", "terminated": "bool"}
        buffer = ReplayBuffer(tmp_path, 4, 5, {**fields, "log_prob": "float"})
        for number, length in enumerate((3, 2)):
            shape = (length, *buffer.schema.fields["action"].shape)
            buffer.store_episode(
                observation=np.arange(2 * length).reshape(length, 2) + 10 * number,
                action=np.arange(np.prod(shape)).reshape(shape) + number,
                reward=np.arange(length) + 0.5,
                terminated=(np.arange(length) == length - 1) & (number == 1),
                log_prob=-np.arange(length, dtype=float),
            )
        return buffer

    return make


@pytest.mark.parametrize("action", ["int", ("float", 2)], ids=["discrete", "vector"])
def test_S3_21_a_pre_timeline_table_has_the_columns_of_reagent(rollouts, action):
    """S3-21: as replay_buffer_to_pre_timeline_df gives them"""
    discrete = action == "int"
    table = to_pre_timeline(rollouts(action), discrete=discrete)
    buffer = rollouts(action)
    want = []
    for number, length in enumerate((3, 2)):
        episode = buffer.episode(number)
        for t in range(length):
            value, reward = episode["action"][t], float(episode["reward"][t])
            row = {"ds": "2019-01-01", "mdp_id": str(number), "sequence_number": t}
            row["state_features"] = dict(enumerate(episode["observation"][t].tolist()))
            row["action"] = str(value) if discrete else dict(enumerate(value.tolist()))
            row |= {"action_probability": float(np.exp(-t)), "reward": reward, "metrics": {"reward": reward}}
            if discrete:
                end = bool(episode["terminated"][t])
                row["possible_actions_mask"] = [] if end else [1, 1, 1]
                row["possible_actions"] = [] if end else ["0", "1", "2"]
            want.append(row)
    assert table.columns.tolist() == list(want[0])
    assert table.to_dict("records") == want


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"discrete": False}, r"'action' has shape \(\), expected 1 dimensions"),
        ({"discrete": True, "observation": "reward"}, r"'reward' has shape \(\), expected 1 dimensions"),
        ({"discrete": True, "log_prob": "probability"}, "to_pre_timeline: got 'probability'"),
    ],
)
def test_fields_that_do_not_fit_are_refused(rollouts, how, match):
    with pytest.raises(SchemaError, match=match):
        to_pre_timeline(rollouts("int"), **how)
