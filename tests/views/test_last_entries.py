"""`Window(L, only={field: k})`: the last k entries of what the window without it gives."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memmap_buffer import Field, ReplayBuffer, SchemaError, Window

LENGTH = 5
FIELDS = {
    "cameras": {"left": ("uint8", (2, 2)), "right": ("uint8", 3, 7)},
    "note": "U4",
    "x": Field("int", final=True),
    "reward": "float",
    "terminated": "bool",
}
HOW = {
    "pad": {},
    "edge": {"padding": "edge"},
    "default": {"padding": "default", "pad_before": 2, "pad_after": 2},
    "shift": {"boundary": "shift", "stride": 2},
    "drop": {"boundary": "drop", "final_observation": True},
    "in front": {"pad_in_front": True, "final_observation": True},
    "returns": {"n_steps": 2, "gamma": 0.9},
    "continue": {"boundary": "continue", "return_steps": True},
}


@pytest.fixture
def buffer(tmp_path: Path) -> Any:
    with ReplayBuffer(tmp_path, 20, 12, FIELDS, circular=True, capacity=40) as buffer:
        for number, length in enumerate((1, 3, 4, 9, 2, 1, 1, 12, 8, 7)):
            t = 20 * number + np.arange(length)
            cameras = {"cameras.left": np.tile(t[:, None, None], (2, 2)), "cameras.right": np.tile(t[:, None], 3)}
            ends = {"reward": t, "terminated": t == t[-1] * (number % 2)}
            buffer.store_episode(**cameras, **ends, note=[f"{i:04}" for i in t], x=[*t, *[-1] * (number % 3 == 1)])
        yield buffer


def flat(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch by dotted names."""
    groups = {key: values for key, values in batch.items() if isinstance(values, dict)}
    members = {f"{key}.{name}": values for key, group in groups.items() for name, values in group.items()}
    return {name: np.asarray(values) for name, values in {**batch, **members}.items() if name not in groups}


@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
@pytest.mark.parametrize("only", [{"cameras": 2, "note": 5, "x": 1}, {"cameras.left": 1, "x": 3, "note": 4}])
def test_a_field_has_the_last_entries_of_the_window_and_others_have_all(
    buffer: ReplayBuffer, how: dict[str, Any], only: dict[str, int]
) -> None:
    whole = flat(buffer.batch(view=Window(LENGTH, **how), format="numpy"))
    batch = flat(buffer.batch(view=Window(LENGTH, only=only, **how), format="numpy"))
    fields = {
        name: only[group]
        for group in only
        for name in (*FIELDS, "cameras.left", "cameras.right")
        if name in whole and (name == group or name.startswith(f"{group}."))
    }
    masks = {f"_mask_{name}": steps for name, steps in fields.items()}
    told = [mask for mask, steps in masks.items() if steps < LENGTH]
    whole = {**dict.fromkeys(told, whole["_mask"]), **whole}  # masks with a final observation are in `whole`
    last = fields | masks
    assert batch.keys() == whole.keys() and len(whole["_start"]) > 10
    for name, values in whole.items():
        expected = values[:, LENGTH - last[name] :] if name in last else values
        assert np.array_equal(batch[name], expected), name


@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
def test_padding_stays_zero_where_the_last_entries_are_normalized(buffer: ReplayBuffer, how: dict[str, Any]) -> None:
    only = {"reward": 2, "x": 3, "cameras": 1}
    normalize = buffer.statistics().normalize(keep_padding=True)
    whole = flat(buffer.batch(view=Window(LENGTH, **how), format="numpy", transform=normalize))
    batch = flat(buffer.batch(view=Window(LENGTH, only=only, **how), format="numpy", transform=normalize))
    for name, steps in {"reward": 2, "x": 3, "cameras.left": 1, "cameras.right": 1}.items():
        assert np.array_equal(batch[name], whole[name][:, LENGTH - steps :]), name


def test_windows_that_name_some_entries_are_values_and_say_what_they_are() -> None:
    view = Window(LENGTH, only={"note": 2})
    assert view == Window(LENGTH, only={"note": 2}) != Window(LENGTH, only={"note": 3})
    assert hash(view) == hash(pickle.loads(pickle.dumps(view)))


def test_ragged_windows_cut_only_fields_that_have_all_entries(buffer: ReplayBuffer) -> None:
    batch = buffer.batch(view=Window(LENGTH, only={"note": 2, "cameras": 2}), ragged=True)
    assert {len(part) for part in batch["reward"].unbind()} == {*range(1, LENGTH + 1)}
    assert batch["cameras"]["left"].shape[1:] == (2, 2, 2)


@pytest.mark.parametrize("only", ["note", ["note"], ("no",), [("note", 2)], {"note"}, None, 2], ids=repr)
def test_what_names_no_steps_is_refused(only: Any) -> None:
    with pytest.raises(SchemaError, match=r"^only: got .*, expected \{field: steps\}"):
        Window(LENGTH, only=only)


@pytest.mark.parametrize(
    ("only", "match"),
    [
        ({"note": 6}, r"only: got 6 steps of 'note', expected 1 … length=5"),
        ({"note": 0}, r"only\['note'\]: got 0"),
        ({"nope": 1}, r"only: got 'nope', which was not declared"),
        ({"x": 1}, r"only: got 'x'"),
    ],
)
def test_what_cannot_be_is_refused(buffer: ReplayBuffer, only: dict[str, int], match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        buffer.batch(view=Window(LENGTH, fields=["note", "reward"], only=only))
