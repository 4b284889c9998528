"""Which fields end an episode: declared once, kept in the folder, obeyed by all that writes and reads."""

import json

import numpy as np
import pytest

from memmap_buffer import (
    ConcatBuffer,
    Field,
    NStep,
    ReplayBuffer,
    Schema,
    SchemaError,
    SchemaMismatchError,
    pack,
    repair,
    unpack,
)
from memmap_buffer.store.records import TERMINATED

FIELDS = {"observation": Field("float", final=True), "reward": "float", "done": "bool", "timeout": ("bool", (), False)}
ENDS = {"terminated": "done", "truncated": "timeout"}


def make(folder, **options):
    return ReplayBuffer(folder, 20, 50, **{"fields": FIELDS, **ENDS, **options})


def steps(*lengths, first=0.0, end="done"):
    """Episodes behind one another, as code that stores a stream has them; rewards tell the step."""
    ends = np.zeros(sum(lengths), bool)
    ends[np.cumsum(lengths) - 1] = True
    count = first + np.arange(sum(lengths))
    return {
        "observation": count,
        "reward": count + 100,
        "done": ends & (end == "done"),
        "timeout": ends & (end != "done"),
    }


def flags(buffer):
    table = buffer._storage.refresh()
    return table.flags[table.visible]


def schema_of(folder):
    return json.loads((folder / "schema.json").read_text())


# Declaring


def test_the_declared_ends_are_kept_in_the_folder_and_go_wherever_it_is_copied(tmp_path):
    with make(tmp_path / "a") as buffer:
        buffer.store_episode(**steps(3))
        buffer.snapshot(tmp_path / "snapshot")
    pack(tmp_path / "a", tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "unpacked")
    for name in ("a", "snapshot", "packed", "unpacked"):
        assert schema_of(tmp_path / name)["ends"] == ENDS
        reader = ReplayBuffer.from_folder(tmp_path / name, read_only=True)
        assert (reader.schema.terminated, reader.schema.truncated) == ("done", "timeout")
        assert reader.batch(n_steps=1, gamma=0.5)["_discount"].tolist() == [0.5, 0.5, 0]
        assert flags(reader)[0] & TERMINATED
    assert make(tmp_path / "a", read_only=True).schema.ends == ("done", "timeout")


def test_a_schema_may_say_it_and_the_constructor_wins(tmp_path):
    schema = Schema(FIELDS, **ENDS)
    assert ReplayBuffer(tmp_path / "a", 1, 1, schema).schema.ends == ("done", "timeout")
    assert ReplayBuffer(tmp_path / "b", 1, 1, schema, truncated=None).schema.ends == ("done",)


def test_a_folder_that_says_nothing_ends_at_terminated_and_truncated(tmp_path):
    for number, fields in enumerate(
        ({"terminated": "bool"}, {"x": "int"}, {"terminated": ("float", 2), "truncated": "bool"})
    ):
        with ReplayBuffer(tmp_path / str(number), 1, 1, fields) as buffer:
            assert "ends" not in schema_of(tmp_path / str(number))
            assert buffer.schema.ends == tuple(name for name, spec in fields.items() if spec == "bool")


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ({"terminated": "dones"}, "terminated: got 'dones', which was not declared here; did you mean 'done'"),
        ({"truncated": "task"}, "truncated: got 'task'.*meta field"),
        (
            {"terminated": "observation"},
            r"terminated: field 'observation' is float32 \(2,\), expected one number or bool",
        ),
        ({"terminated": "text"}, "field 'text' is U3"),
    ],
)
def test_what_cannot_end_an_episode_is_refused(tmp_path, ends, text):
    fields = {"observation": ("float", 2), "done": "bool", "text": "U3"}
    with pytest.raises(SchemaError, match=text):
        ReplayBuffer(tmp_path / "a", 1, 1, fields, {"task": "int"}, **ends)
    assert not (tmp_path / "a").exists()


def test_opening_with_other_ends_lists_them(tmp_path):
    make(tmp_path).close()
    with pytest.raises(SchemaMismatchError, match="terminated: stored 'done', given None"):
        make(tmp_path, terminated=None)
    with pytest.raises(SchemaMismatchError, match="truncated: stored 'timeout', given 'truncated'"):
        ReplayBuffer(tmp_path, 20, 50, FIELDS, terminated="done")


@pytest.mark.parametrize(
    "ends", [[], {"terminated": "done"}, {"terminated": 1, "truncated": None}, {**ENDS, "x": None}]
)
def test_ends_that_a_stranger_wrote_are_looked_at(tmp_path, ends):
    make(tmp_path).close()
    (tmp_path / "schema.json").write_text(json.dumps({**schema_of(tmp_path), "ends": ends}))
    with pytest.raises(SchemaError, match="ends: got"):
        ReplayBuffer.from_folder(tmp_path)


def test_folders_that_end_otherwise_are_not_read_as_one(tmp_path):
    buffers = [make(tmp_path / "a"), make(tmp_path / "b", terminated=None)]
    with pytest.raises(SchemaMismatchError, match="terminated: stored 'done', given None"):
        ConcatBuffer(buffers)


def test_ends_follow_a_field_that_is_renamed_and_go_with_one_that_is_dropped(tmp_path):
    with make(tmp_path) as buffer:
        buffer.store_episode(**steps(2))
        buffer.rename_field("done", "over")
        assert buffer.schema.ends == ("over", "timeout")
        assert buffer.batch(n_steps=1, gamma=0.5)["_discount"].tolist() == [0.5, 0]
        buffer.add_field("x", ("int", (), 0))
        assert buffer.schema.ends == ("over", "timeout")
        buffer.drop_field("over")
        assert buffer.schema.ends == ("timeout",)
        for name in ("terminated", "truncated"):
            if name in buffer.schema.declared_ends.values():
                with pytest.raises(SchemaError, match=f"add_field: '{name}' is also kept in the record"):
                    buffer.add_field(name, ("bool", (), False))
    assert ReplayBuffer.from_folder(tmp_path).schema.ends == ("timeout",)


def test_a_repaired_folder_keeps_its_ends(tmp_path):
    with make(tmp_path) as buffer:
        buffer.store_episode(**steps(2))
    (tmp_path / "data" / "reward.npy").unlink()
    repair(tmp_path)
    assert ReplayBuffer.from_folder(tmp_path).schema.ends == ("done", "timeout")


# Writing


@pytest.mark.parametrize("how", [{}, {"publish": "step"}, {"stage": "disk"}], ids=str)
def test_add_ends_episodes_at_the_field_that_was_declared(tmp_path, how):
    with make(tmp_path, **how) as buffer:
        buffer.extend(**steps(3, 2))
        buffer.extend(**steps(4, end="timeout"))
        assert buffer.episode_lens.tolist() == [3, 2, 4]
        assert (flags(buffer) & TERMINATED != 0).tolist() == [True, True, False]


def test_store_after_a_declared_end_raises(tmp_path):
    with make(tmp_path) as buffer, buffer.one_episode() as episode:
        episode.store(observation=0, reward=0, done=True)
        with pytest.raises(RuntimeError, match="timestep 1: the episode ended at timestep 0 by `done`"):
            episode.store(observation=0, reward=0, done=False)


def test_an_updated_end_changes_how_the_episode_ended(tmp_path):
    with make(tmp_path) as buffer:
        buffer.store_episode(**steps(3))
        buffer.update(0, done=[False, False, False])
        assert not flags(buffer)[0] & TERMINATED
        assert buffer.batch(n_steps=1, gamma=0.5)["_discount"].tolist() == [0.5, 0.5]


# Reading


def test_returns_without_a_declared_end_name_the_remedy(tmp_path):
    """The last reward and the end would be lost in silence."""
    with ReplayBuffer(tmp_path, 2, 9, FIELDS) as buffer:
        buffer.store_episode(**steps(3))
        for given in ({"n_steps": 2, "gamma": 0.5}, {"view": NStep(2, gamma=0.5)}):
            with pytest.raises(SchemaError, match=r"terminated='done'.*terminated=None"):
                buffer.batch(**given)
        assert buffer.batch(n_steps=2)["n_step_lens"].tolist() == [2, 1]
        assert buffer.batch(n_steps=2, gamma=0.5, terminated=None)["_discount"].tolist() == [0.25, 0.5]
        assert buffer.batch(n_steps=2, gamma=0.5, terminated="done")["_discount"].tolist() == [0.25, 0, 0]


def test_none_that_was_declared_is_a_remedy_too(tmp_path):
    with make(tmp_path, terminated=None) as buffer:
        buffer.store_episode(**steps(3))
        assert buffer.batch(n_steps=2, gamma=0.5)["_discount"].tolist() == [0.25, 0.5]
        assert buffer.batch(n_steps=2, gamma=0.5, terminated="done")["_discount"].tolist() == [0.25, 0, 0]


def test_the_option_wins_over_what_was_declared(tmp_path):
    with make(tmp_path) as buffer:
        buffer.store_episode(**steps(3))
        assert buffer.batch(n_steps=1, gamma=0.5, terminated=None)["_discount"].tolist() == [0.5, 0.5]
        assert buffer.batch(n_steps=1, gamma=0.5, terminated="timeout")["_discount"].tolist() == [0.5, 0.5]
        with pytest.raises(SchemaError, match=r"terminated: got 'dons'.*did you mean 'done'"):
            buffer.batch(n_steps=1, gamma=0.5, terminated="dons")
