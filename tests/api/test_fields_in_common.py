"""Folders with fields in common, read as one: those that are named, and texts of different widths."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memmap_buffer import (
    ConcatBuffer,
    Field,
    NStep,
    Offsets,
    ReplayBuffer,
    SchemaError,
    SchemaMismatchError,
    Timestep,
    Trajectory,
    Window,
)

LENGTH = 6
ENDS = {"terminated": "bool", "truncated": "bool"}
SHARED = {"x": Field("float", 2, final=True), "note": "U3", "n": "int", **ENDS}
FIELDS = (
    {**SHARED, "image": ("uint8", 3), "action": ("float", 7), "only": "int"},
    {**SHARED, "note": "U11", "image": ("uint8", 5), "action": ("float", 7, [1.0] * 7)},
    {**SHARED, "note": "U1", "image": ("float", 3), "action": ("float64", 7)},
)
META = ({"task": "int", "name": "U2"}, {"task": "int", "name": "U9", "robot": "int"}, {"task": "int", "name": "U1"})
COMMON = ["x", "note", "n", "task", "name"]


def record(folder: Path, number: int, name: str = "") -> ReplayBuffer:
    """A buffer of two episodes; `n` tells the row, and the texts fill their widths."""
    fields, meta = FIELDS[number], META[number]
    buffer = ReplayBuffer(folder / (name or str(number)), 4, LENGTH, fields, meta_fields=meta)
    for episode in range(2):
        n = 100 * number + 10 * episode + np.arange(LENGTH)
        given: dict[str, Any] = {key: np.zeros((LENGTH, *field.shape)) for key, field in buffer.schema.fields.items()}
        width = buffer.schema.fields["note"].entries.itemsize // 4
        given |= {"x": np.stack([np.append(n, -1)] * 2, -1), "n": n, "note": [str(i).zfill(width)[-width:] for i in n]}
        given |= {"terminated": n == n[-1], "truncated": n < 0}
        buffer.store_episode(**given, task=number, name="abcdefghi"[: buffer.schema.meta_fields["name"].itemsize // 4])
    return buffer


@pytest.fixture(params=[False, True], ids=["open", "by path"])
def sources(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    buffers = [record(tmp_path, number) for number in range(3)]
    yield [tmp_path / str(number) for number in range(3)] if request.param else buffers
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize(
    "view",
    [
        Timestep(),
        Trajectory(),
        Window(4),
        NStep(2),
        Offsets({"x": [0, 1], "note": [-1, 0]}),
        Window(4, boundary="continue"),
    ],
    ids=["steps", "episodes", "windows", "n steps", "offsets", "on"],
)
def test_named_fields_are_read_as_of_each_folder_alone(sources: list[Any], view: Any) -> None:
    both = ConcatBuffer(sources, fields=COMMON)
    assert both.fieldnames == ("x", "note", "n", "terminated", "truncated")
    assert both.meta_fieldnames == ("task", "name")
    whole = pickle.loads(pickle.dumps(both.dataset(view=view)))
    alone = [ConcatBuffer([source], fields=COMMON).dataset(view=view) for source in sources]
    items = [each[i] for each in alone for i in range(len(each))]
    assert len(whole) == len(items) > 5
    got = whole.__getitems__([*range(len(whole))])
    for i, theirs in enumerate(items):
        mine = got[i]
        assert mine.keys() == theirs.keys() and {"note", "name"} <= mine.keys()
        for key in mine.keys() - {"_index", "_indices"}:
            assert np.array_equal(np.asarray(mine[key]), np.asarray(theirs[key])), key


def test_a_single_name_may_stand_alone(sources: list[Any], tmp_path: Path) -> None:
    for both in (ConcatBuffer(sources, fields="note"), ConcatBuffer.from_root(tmp_path, fields="note")):
        assert both.fieldnames == ("note", "terminated", "truncated")


def test_statistics_weights_and_filters_are_over_the_fields_in_common(sources: list[Any]) -> None:
    both = ConcatBuffer(sources, fields=COMMON)
    assert {*both.statistics().fields} == {"x", "n", "terminated", "truncated", "task"}
    batch = both.sample(30, timestep_level=True, filter_meta={"name": "abcdefghi"})
    assert {*batch["task"].tolist()} == {1} and {*map(len, batch["note"])} == {11}
    batch = both.sample(30, timestep_level=True, weight_by=lambda columns: columns["task"] == 0)
    assert {*batch["task"].tolist()} == {0}
    loader = both.dataloader(4, timestep_level=True, shuffle=True, seed=0, num_workers=1)
    lengths = [len(note) for batch in loader for note in batch["note"]]
    assert [lengths.count(width) for width in (1, 3, 11)] == [2 * LENGTH] * 3


def test_without_fields_what_differs_and_what_is_common_is_told(tmp_path: Path) -> None:
    with record(tmp_path, 0) as first, record(tmp_path, 1) as second, record(tmp_path, 2) as third:
        common = r"fields=\['x', 'note', 'n', 'task', 'name'\]\)$"
        with pytest.raises(SchemaMismatchError, match=rf"(?s)'image'.*'action'.*'only'.*'robot'.*{common}") as told:
            ConcatBuffer([first, second])
        assert len(told.value.differences) == 4
        with pytest.raises(SchemaMismatchError, match=r"(?s)'action'.*float64.*add_field$"):
            ConcatBuffer([first, third], fields=["action"])
        with pytest.raises(SchemaError, match="fields: got 'robot', which was not declared here"):
            ConcatBuffer([first, second], fields=["x", "robot"])
        other = ReplayBuffer(tmp_path / "endless", 2, LENGTH, {"x": Field("float", 2, final=True)})
        with other, pytest.raises(SchemaMismatchError, match=r"(?s)'terminated'.*'truncated'.*add_field$"):
            ConcatBuffer([first, other], fields=["x"])


def test_a_shard_that_appears_later_with_a_wider_text_is_refused_and_a_narrower_one_read(tmp_path: Path) -> None:
    record(tmp_path, 1, "shard-00000").close()
    every = ConcatBuffer.from_root(tmp_path, fields=COMMON)
    record(tmp_path, 0, "shard-00001").close()
    every.refresh()
    assert {*map(len, every.sample(50, timestep_level=True)["note"])} == {3, 11}
    narrow = ConcatBuffer([tmp_path / "shard-00001"], fields=COMMON)
    assert narrow.schema.fields["note"].dtype == "U3"
    (tmp_path / "later").mkdir()
    record(tmp_path / "later", 0, "shard-00000").close()
    late = ConcatBuffer.from_root(tmp_path / "later", fields=COMMON)
    record(tmp_path / "later", 1, "shard-00001").close()
    with pytest.raises(SchemaMismatchError, match="'note' is <U11, wider than <U3 of those that were read first"):
        late.refresh()
