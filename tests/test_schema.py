"""What is stored: every spelling of a field, names, defaults, nesting, and the errors that name what was meant."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specification import NUMERIC

from memmap_buffer import Field, ReplayBuffer, Schema, SchemaError
from memmap_buffer.schema import MAX_FIELDS, nest

# Spellings of a field


@pytest.mark.parametrize(
    ("spec", "dtype", "shape", "default"),
    [
        ("float", "float32", (), None),
        ("int", "int64", (), None),
        ("bool", "bool", (), None),
        (("float",), "float32", (), None),
        (("float", (3, 16, 16)), "float32", (3, 16, 16), None),
        (("float", (3, 16, 16), 0.0), "float32", (3, 16, 16), 0.0),
        (["float", [3, 16], 0.0], "float32", (3, 16), 0.0),
        (("int", 2), "int64", (2,), None),
        (("int", np.int64(2)), "int64", (2,), None),
        (("int", ()), "int64", (), None),
        (np.uint8, "uint8", (), None),
        (np.dtype("<f8"), "float64", (), None),
        (("float16", 4), "float16", (4,), None),
        ((np.complex128, (1,)), "complex128", (1,), None),
        (torch.bfloat16, "bfloat16", (), None),
        ((torch.int32, (2, 2)), "int32", (2, 2), None),
        (float, "float32", (), None),
        (("U64", (), "no task"), "U64", (), "no task"),
        (Field("int", 2, default=[1, 2], final=True), "int64", (2,), [1, 2]),
    ],
)
def test_every_spelling_of_a_field_means_the_same_as_the_full_one(
    spec: Any, dtype: str, shape: Any, default: Any
) -> None:
    field = Field.parse(spec)
    assert (field.dtype, field.shape, field.default) == (dtype, shape, default)
    assert field == Field(dtype, shape, default, isinstance(spec, Field))
    assert Schema({"a": spec}).fields == {"a": field}
    assert Schema({"a": "int"}, {"b": Field(dtype, shape, default)}).meta_fields["b"].dtype == dtype


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ((), r"got \(\), expected a dtype, \(dtype, shape\) or \(dtype, shape, default\)"),
        (("float", 2, 0.0, True), "expected a dtype"),
        ("object", "dtype: got 'object', expected one of float, int, bool"),
        (object, "objects cannot be mapped"),
        (None, "dtype: got None"),
        (("float", "3"), "shape: got '3', expected an int or a tuple"),
        (("float", 2.0), r"shape: got 2\.0, expected an int or a tuple"),
        (("float", (2.0,)), r"shape: got \(2\.0,\), expected whole numbers from 1"),
        (("float", True), "shape: got True"),
        (("float", (True,)), r"shape: got \(True,\), expected whole numbers from 1"),
        (("float", 0), "shape: got 0, expected whole numbers from 1"),
        (("float", (3, -1)), r"shape: got \(3, -1\), expected whole numbers from 1"),
        (("float", (1,) * 17), "a tuple of at most 16 ints"),
        (("float", 2**62), "expected whole numbers from 1"),
        (("float", 2, [1.0]), r"default \[1\.0\]: got shape \(1,\), declared \(2,\)"),
        (("int", (), 0.5), r"default 0\.5: got 0\.5 .*not a whole number"),
        (("uint8", (), 300), "default 300: got 300 .*out of range 0 … 255"),
        (("U2", (), "three"), "default 'three': got a string of 5 characters"),
        (("int", (), "1"), "default '1': got .*, declared int64"),
    ],
)
def test_a_spelling_that_is_not_understood_is_refused_naming_the_field(spec: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=rf"^field 'arm': .*{text}") as caught:
        Schema({"arm": spec})
    assert caught.value.field == "arm"
    with pytest.raises(SchemaError, match=rf"^meta field 'arm\.left': .*{text}"):
        Schema({"a": "int"}, {"arm": {"left": spec}})


def test_a_field_is_a_value() -> None:
    field = Field("float", 2, default=0.5, final=True)
    assert field == Field(np.float32, (2,), 0.5, True)
    assert pickle.loads(pickle.dumps(field)) == copy.copy(field) == field
    with pytest.raises(AttributeError, match="cannot assign to field 'dtype'"):
        field.dtype = "int64"  # type: ignore[misc]


@pytest.mark.parametrize("name", [*NUMERIC, "U3"])
def test_the_size_of_an_entry_is_its_size_on_the_disk(name: str) -> None:
    field = Field(name, (2, 3))
    assert field.fill.dtype == field.storage
    assert field.itemsize == field.fill.nbytes == 6 * field.storage.itemsize


# Defaults


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (("float", (2, 2)), [[0, 0], [0, 0]]),
        (("float", (2, 2), 1.5), [[1.5, 1.5], [1.5, 1.5]]),
        (("float", 2, np.array([1, 2])), [1, 2]),
        (("float", 2, torch.tensor([1.0, 2.0])), [1, 2]),
        (("float", 1, 7), [7]),
        (("float", (), [7]), 7),
        (("bool", 3, True), [True] * 3),
        (("U3", 2, "abc"), ["abc", "abc"]),
        (("U3",), ""),
        (("complex64", (), 1 + 2j), 1 + 2j),
        (("uint64", 2, [2**64 - 1, 0]), [2**64 - 1, 0]),
        (("uint64", (), 2**64 - 1), 2**64 - 1),
        (("int64", (), -(2**63)), -(2**63)),
    ],
)
def test_a_missing_entry_is_the_default_or_zeros(spec: Any, expected: Any) -> None:
    field = Field.parse(spec)
    assert field.fill.shape == field.shape
    np.testing.assert_array_equal(field.fill, np.array(expected, field.storage))


def test_a_bfloat16_default_is_a_number_and_not_bits() -> None:
    field = Field("bfloat16", 2, 1.0)
    assert field.fill.tolist() == [0x3F80, 0x3F80]
    assert Field("bfloat16", (), 1.01).default == float(torch.tensor(1.01, dtype=torch.bfloat16))


def test_a_default_that_is_no_number_is_kept() -> None:
    assert math.isnan(Field("float", (), math.nan).default)
    assert Field("float16", (), -math.inf).fill == -np.inf


def test_a_default_is_given_to_steps_and_meta_that_leave_it_out(tmp_path: Path) -> None:
    fields = {"reward": ("float", (), 0.25), "arm": {"grip": ("int", 2, [3, 4])}, "action": "int"}
    with ReplayBuffer(tmp_path, 2, 4, fields, {"task": ("U8", (), "none"), "seed": "int"}) as buffer:
        with buffer.one_episode():
            buffer.store(action=1)
            buffer.store(action=2, reward=1.0)
        got = buffer.episode(0)
    assert got["reward"].tolist() == [0.25, 1.0]
    assert got["arm"]["grip"].tolist() == [[3, 4], [3, 4]]
    assert (str(got["task"]), int(got["seed"])) == ("none", 0)


# Names


@pytest.mark.parametrize("name", ["a", "A9_b", "x" * 64, "a.b", "a.b.c_", "index", "slot", "data"])
def test_dotted_identifiers_are_names(name: str) -> None:
    assert list(Schema({name: "int"}).fields) == [name]


NO_NAMES = [
    *("", "_a", "a._b", "9a", "a b", "a-b", "a/b", "a\\b", "../a", "/a", ".", "..", ".a", "a.", "a..b", "C:a"),
    *("a\0", "a\n", "é", "ａ", "\ud800", "x" * 65, "a" + ".b" * 40),
    *("episode_lens", "n_step_lens", "keep_partial"),
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_dotted_identifier_is_no_name(name: str) -> None:
    for schema in (lambda: Schema({name: "int"}), lambda: Schema({"ok": "int"}, {name: "int"})):
        with pytest.raises(SchemaError, match="expected dot-joined identifiers") as caught:
            schema()
        assert caught.value.field == name


def test_a_name_that_is_no_string_is_refused() -> None:
    with pytest.raises(SchemaError, match="name '1': expected dot-joined identifiers"):
        Schema({1: "int"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "fields", [{"obs": "int", "Obs": "int"}, {"a": {"b": "int"}, "a.b": "int"}, {"a.b": "int", "A": {"B": "int"}}]
)
def test_a_name_is_used_once_without_regard_to_case(fields: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"is used twice \(case does not count\); rename one"):
        Schema(fields)


def test_a_field_and_a_meta_field_do_not_share_a_name() -> None:
    with pytest.raises(SchemaError, match="name 'task' is used twice"):
        Schema({"task": "int"}, {"task": "int"})


@pytest.mark.parametrize(
    "fields", [{"a": "int", "a.b": "int"}, {"a.b": "int", "a": "int"}, {"A": "int", "a.b.c": "int"}]
)
def test_a_field_is_not_a_group_too(fields: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"name 'a\.b.*' lies inside the field 'a'; rename one"):
        Schema(fields)


def test_a_schema_has_at_least_one_field_and_at_most_the_limit() -> None:
    with pytest.raises(SchemaError, match="fields: got none, expected at least one"):
        Schema({}, {"m": "int"})
    with pytest.raises(SchemaError, match=f"got {MAX_FIELDS + 1} fields, at most {MAX_FIELDS} are possible"):
        Schema({f"f{i}": "int" for i in range(MAX_FIELDS)}, {"m": "int"})


@pytest.mark.parametrize("given", [["a"], "a", ("a", "float"), {"a"}, None, 3])
def test_fields_that_are_no_dict_are_refused(given: Any, tmp_path: Path) -> None:
    expected = r"got .*, expected a dict by name, such as \{'reward': 'float'\}"
    for make in (Schema, lambda fields: ReplayBuffer(tmp_path / "new", 1, 1, fields)):
        with pytest.raises(SchemaError, match=f"^fields: {expected}"):
            make(given)
    if given:
        with pytest.raises(SchemaError, match=f"^meta_fields: {expected}"):
            Schema({"a": "int"}, given)
        with pytest.raises(SchemaError, match=r"^meta: got"):
            Schema.from_example({"a": 1}, given)
    with pytest.raises(SchemaError, match=r"^step: got .*, expected a dict by name, such as \{'reward': 0.5\}"):
        Schema.from_example(given)
    assert not (tmp_path / "new").exists()


def test_a_meta_field_has_no_final_observation() -> None:
    with pytest.raises(SchemaError, match="meta field 'goal': `final` is for per-timestep fields; drop it"):
        Schema({"a": "int"}, {"goal": Field("int", final=True)})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("acton", "did you mean 'action'"),
        ("observation.pixel", r"did you mean 'observation\.pixels'"),
        ("zzz", "declared are action, observation.pixels, task_id"),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest_one(name: str, hint: str) -> None:
    schema = Schema({"action": "int", "observation": {"pixels": ("uint8", 2)}}, {"task_id": "int"})
    with pytest.raises(SchemaError, match=rf"here: got '{name}', which was not declared.*; {hint}") as caught:
        schema.require([name], "here")
    assert caught.value.field == name


def test_an_unknown_name_in_a_step_is_answered_with_the_closest_one(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, 2, 4, {"action": "int", "arm": {"grip": "int"}}, {"task_id": "int"}) as buffer:
        with (
            pytest.raises(SchemaError, match=r"'taskid', which was not declared.*; did you mean 'task_id'"),
            buffer.one_episode(taskid=1),
        ):
            pass
        with (
            pytest.raises(
                SchemaError, match=r"timestep 0: got 'acton', which was not declared.*; did you mean 'action'"
            ),
            buffer.one_episode(),
        ):
            buffer.store(acton=1)
        with (
            pytest.raises(SchemaError, match=r"got 'arm\.gripp', which was not declared.*; did you mean 'arm\.grip'"),
            buffer.one_episode(),
        ):
            buffer.store(action=1, arm={"gripp": 1})
        assert len(buffer) == 0


def test_a_group_is_given_as_a_dict_and_each_field_once(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, 2, 4, {"arm": {"grip": "int", "lift": "int"}})
    arm, episode = {"grip": 1, "lift": 2}, buffer.begin_episode()
    with pytest.raises(SchemaError, match=r"'arm', which is a group: give a dict.*: arm\.grip, arm\.lift"):
        episode.store(arm=[1, 2])
    with pytest.raises(SchemaError, match=r"field 'arm\.lift' is given twice") as caught:
        episode.store(arm=arm, **{"arm.lift": 3})
    assert caught.value.field == "arm.lift"
    episode.store(arm=arm)


def test_a_group_stands_for_its_fields() -> None:
    schema = Schema({"a": {"x": "int", "y": "int"}, "ab": "int"})
    assert schema.require(["a", "ab", "a.x"], "here") == ("a.x", "a.y", "ab")


# Nesting


def test_nested_declarations_are_stored_under_dotted_names() -> None:
    schema = Schema({"observation": {"pixels": ("uint8", (2, 2)), "arm": {"joints": ("float", 7)}}, "action": "int"})
    assert list(schema.fields) == ["observation.pixels", "observation.arm.joints", "action"]
    assert schema.fields["observation.arm.joints"].shape == (7,)


def test_nested_values_are_given_back_nested(tmp_path: Path) -> None:
    fields = {"observation": {"pixels": ("uint8", 2), "arm": {"joints": "float"}}, "action": "int"}
    with ReplayBuffer(tmp_path, 2, 4, fields, {"env": {"name": "U8", "seed": "int"}}) as buffer:
        with buffer.one_episode(env={"name": "reach", "seed": 3}):
            buffer.store(observation={"pixels": [1, 2], "arm": {"joints": 0.5}}, action=1)
            buffer.store(**{"observation.pixels": [3, 4], "observation.arm.joints": 1.5, "action": 2})
        got = buffer.episode(0)
    assert got["observation"]["pixels"].tolist() == [[1, 2], [3, 4]]
    assert got["observation"]["arm"]["joints"].tolist() == [0.5, 1.5]
    assert (str(got["env"]["name"]), int(got["env"]["seed"])) == ("reach", 3)


names = st.text("abc", min_size=1, max_size=2)
trees = st.recursive(st.integers(), lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3), max_leaves=8)


@given(tree=st.dictionaries(names, trees, min_size=1, max_size=3))
def test_nesting_undoes_flattening(tree: dict[str, Any]) -> None:
    assert nest(Schema({"unused": "int"}).flatten(tree)) == tree


def test_tuple_entries_are_named_by_their_place() -> None:
    schema = Schema.from_example({"observation": (np.zeros(2, np.float32), {"x": 1})})
    assert list(schema.fields) == ["observation.item0", "observation.item1.x"]
    assert schema.flatten({"observation": (1, {"x": 2})}) == {"observation.item0": 1, "observation.item1.x": 2}


def test_a_tuple_that_is_the_value_of_a_field_is_not_taken_apart() -> None:
    assert Schema({"action": ("int", 2)}).flatten({"action": (1, 2)}) == {"action": (1, 2)}


# From an example


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (1, "int64", ()),
        (1.0, "float32", ()),
        (True, "bool", ()),
        (1j, "complex128", ()),
        ("reach", "U5", ()),
        ("", "U1", ()),
        (np.float64(1), "float64", ()),
        (np.zeros((2, 3), np.uint8), "uint8", (2, 3)),
        (np.zeros(2, ">f4"), "float32", (2,)),
        (np.array(["a", "bcd"]), "U3", (2,)),
        ([1, 2], "int64", (2,)),
        ([[1.0], [2.0]], "float64", (2, 1)),
        (torch.zeros(3, dtype=torch.bfloat16), "bfloat16", (3,)),
        (torch.zeros(2, 2, dtype=torch.float16, requires_grad=True), "float16", (2, 2)),
        (torch.tensor(1), "int64", ()),
    ],
)
def test_a_schema_comes_from_an_example_step(value: Any, dtype: str, shape: tuple[int, ...]) -> None:
    schema = Schema.from_example({"a": value, "group": {"b": value}}, {"m": value})
    for field in schema.all.values():
        assert (field.dtype, field.shape, field.default, field.final) == (dtype, shape, None, False)
    assert (list(schema.fields), list(schema.meta_fields)) == (["a", "group.b"], ["m"])


def test_a_step_fits_the_schema_that_was_made_from_it(tmp_path: Path) -> None:
    step = {"observation": {"image": np.arange(4, dtype=np.uint8), "text": "ab"}, "reward": 0.5, "done": False}
    with ReplayBuffer(tmp_path, 2, 4, Schema.from_example(step)) as buffer:
        with buffer.one_episode():
            buffer.store(**step)
        got = buffer.episode(0)
    assert got["observation"]["image"].tolist() == [[0, 1, 2, 3]]
    assert (got["observation"]["text"].tolist(), got["reward"].tolist(), got["done"].tolist()) == (
        ["ab"],
        [0.5],
        [False],
    )


@pytest.mark.parametrize("value", [None, object(), b"bytes", np.datetime64("2020-01-01"), [None], [[1], [2, 3]]])
def test_an_example_that_cannot_be_stored_is_refused(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"dtype: got .*objects cannot be mapped|no rectangular array"):
        Schema.from_example({"a": value})
