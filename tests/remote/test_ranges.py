"""Shards are chosen by their list before they are opened: none that has an episode that passes is left out."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import around, folders_of
from range_server import RangeServer

from memmap_buffer import ConcatBuffer, NotABufferError, ReplayBuffer, SchemaError, publish
from memmap_buffer.adapters import matches
from memmap_buffer.remote import ranges
from memmap_buffer.remote.layout import Shard
from memmap_buffer.remote.ranges import MAX_TEXT, may_match, ranges_of

DTYPES = ["?", "u1", "i4", "i8", "u8", "f2", "f4", "f8"]
NUMBERS = st.one_of(st.integers(-300, 300), st.floats(-300, 300), st.sampled_from([0.1, 2**53 + 1, np.inf, -np.inf]))
CONDITIONS = st.one_of(
    NUMBERS, st.lists(NUMBERS, max_size=3), st.frozensets(NUMBERS, max_size=3), st.just(np.nan),
    st.tuples(st.none() | NUMBERS, st.none() | NUMBERS),
)  # fmt: skip
META = {"task": "int", "score": "float32", "name": "U4", "goal": ("float32", (2,)), "done": "bool"}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(NUMBERS, min_size=1, max_size=4), CONDITIONS)
def test_a_shard_in_which_a_value_passes_is_always_chosen(dtype: str, values: list[Any], condition: Any) -> None:
    with np.errstate(all="ignore"):
        column = np.array([v if dtype[0] == "f" else int(np.clip(v, 0, 200)) for v in values]).astype(dtype)
        text = ranges_of({"x": column})
        assert json.loads(json.dumps(text)) == text
        assert "," not in text
        passes = matches(column, condition, "x").any()
        assert may_match(text, {"x": condition}) or not passes
        if len(values) == 1 and not isinstance(condition, tuple):
            assert may_match(text, {"x": condition}) == passes  # nor any other


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["f2", "f4", "f8"]), st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_a_member_is_found_as_its_column_rounds_it(dtype: str, member: float, other: float) -> None:
    with np.errstate(all="ignore"):
        column = np.array([member, other]).astype(dtype)
    for condition in ([member], {member, np.nan}, [other, np.float64(member)], member):
        for part in (column[:1], column):
            assert may_match(ranges_of({"x": part}), {"x": condition})


def test_members_that_are_out_of_the_range_take_no_scan_each(monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[Any] = []
    around(monkeypatch, ranges, "matches", lambda: scans.append(1))
    text = ranges_of({"x": np.arange(1000, 1100), "y": np.arange(0.5, 1)})
    for members in (range(1000), set(range(1100, 2000)), np.arange(999.0), [10**30, -1, np.nan]):
        assert not may_match(text, {"x": members})
    assert not scans
    assert may_match(text, {"x": range(3000), "y": np.arange(3000) / 2})
    assert len(scans) < 10


@pytest.mark.parametrize("members", [["a"], [1, "a"], {1, None}, [5, [1]], {"a": 1}, "a"])
def test_members_that_are_no_numbers_are_refused(members: Any) -> None:
    with pytest.raises(SchemaError, match="filter 'x'"):
        may_match(ranges_of({"x": np.arange(9)}), {"x": members})


def test_what_has_no_order_is_not_told_and_such_shards_are_opened() -> None:
    columns = {
        "nan": np.array([1.0, np.nan]),
        "text": np.array(["a"]),
        "pair": np.zeros((1, 2)),
        "none": np.zeros(0),
        "z": np.zeros(1, complex),
    }
    assert ranges_of(columns) == ""
    assert may_match("", {"nan": 5})
    for spoilt in ("x <f8 a b", "x <i8 1.5 2", "x <i8 9999999999999999999999 1", "x O 1 2", "x <i8 1", ";;", "\0"):
        assert may_match(spoilt, {"x": 5})
    many = ranges_of({f"field{i}": np.arange(9) for i in range(1000)})
    assert MAX_TEXT - 100 < len(many) <= MAX_TEXT
    assert not may_match(many, {"field0": 9})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards of a task each, the number of which their lengths and scores follow."""
    place = tmp_path_factory.mktemp("place")
    for task in range(6):
        with ReplayBuffer(place / f"shard-0000{task}", 3, 40, {"x": "int"}, META) as buffer:
            for i in range(3):
                meta = {"task": task, "score": task / 10 + i / 100, "name": f"t{task}", "done": task > 3}
                buffer.store_episode(x=np.full(5 * task + 1 + i, task), goal=[0, task], **meta)
        publish(place / f"shard-0000{task}", f"file://{place}/far")
    return place


CHOICES: list[tuple[dict[str, Any], list[int]]] = [
    ({"task": 3}, [3]),
    ({"task": {1, 4, 9}}, [1, 4]),
    ({"task": (2, None), "episode_lens": (None, 16)}, [2]),
    ({"episode_lens": (17, 25)}, [3, 4]),
    ({"score": 0.1}, [1]),
    ({"score": (0.215, 0.305)}, [2, 3]),
    ({"done": True}, [4, 5]),
    ({"name": "t1", "task": (0, 2)}, [0, 1]),  # text is not told
    ({}, [0, 1, 2, 3, 4, 5]),
]


@pytest.mark.parametrize("number", range(len(CHOICES)))
def test_only_shards_that_can_match_are_opened(place: Path, tmp_path: Path, number: int) -> None:
    conditions, expected = CHOICES[number]
    url = f"file://{place}/far"
    some = ConcatBuffer.from_root(url, cache=tmp_path, filter_shards=conditions)
    assert list(some.shards) == expected
    every = ConcatBuffer.from_root(url, cache=tmp_path)
    for options in ({"filter_meta": conditions}, {"filter_meta": conditions, "timestep_level": True}):
        one, other = (buffer.batch(return_indices=True, **options) for buffer in (some, every))
        assert all(np.array_equal(one[key], other[key]) for key in other)
    assert list(pickle.loads(pickle.dumps(folders_of(some))).numbers) == expected
    assert len(ConcatBuffer.from_root(url, [1] * len(expected), cache=tmp_path, filter_shards=conditions)) == len(some)


def test_heads_of_other_shards_are_not_fetched_and_new_shards_are_chosen_likewise(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memmap_buffer.remote.shards.LOOK_SECONDS", -1.0)
    for task in (0, 1, 2):
        publish(place / f"shard-0000{task}", f"file://{tmp_path}/far")
    with RangeServer(tmp_path / "far") as server:
        far = ConcatBuffer.from_root(server.url, cache=tmp_path / "cache", filter_shards={"task": (2, 4)})
        assert list(far.shards) == [2]
        assert sum("heads/" in request.path for request in server.requests) == 1
        for task in (3, 4):
            publish(place / f"shard-0000{task}", f"file://{tmp_path}/far")
            far.refresh()
            assert list(far.shards) == [2, 3]


def test_a_shard_that_is_open_is_followed_though_nothing_in_it_can_match_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memmap_buffer.remote.shards.LOOK_SECONDS", -1.0)
    with ReplayBuffer(tmp_path / "one", 3, 40, {"x": "int"}) as buffer:
        buffer.store_episode(x=[0])
        publish(tmp_path / "one", url := f"file://{tmp_path}/far")
        far = ConcatBuffer.from_root(url, cache=tmp_path / "cache", filter_shards={"episode_lens": 1})
        buffer.store_episode(x=[0, 1])
        buffer.delete(0)
    publish(tmp_path / "one", url)
    far.refresh()
    assert far.num_steps == 2
    with pytest.raises(NotABufferError, match="by its list, none of 1 shards"):
        ConcatBuffer.from_root(url, cache=tmp_path / "cache", filter_shards={"episode_lens": 1})


def test_lists_of_before_are_read_and_all_of_them_opened(place: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/far"
    for task in (0, 1):
        publish(place / f"shard-0000{task}", url)
    listed = json.loads((tmp_path / "far" / "root.json").read_bytes())
    for shard in listed["shards"].values():
        assert Shard(**{**shard, "head": tuple(shard["head"])}).ranges == shard.pop("ranges") != ""
    (tmp_path / "far" / "root.json").write_text(json.dumps(listed))
    shard = tmp_path / "far" / "shard-00000" / "shard.json"
    of_one = json.loads(shard.read_bytes())
    del of_one["shard"]["ranges"]
    shard.write_text(json.dumps(of_one))
    far = ConcatBuffer.from_root(url, cache=tmp_path / "cache", filter_shards={"task": 1})
    assert list(far.shards) == [0, 1]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "far").rglob("*/data/*")}
    publish(place / "shard-00000", url)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "far").rglob("*/data/*")} == before


def test_what_cannot_be_chosen_by_says_why(place: Path, tmp_path: Path) -> None:
    url = f"file://{place}/far"

    def opened(**conditions: Any) -> ConcatBuffer:
        return ConcatBuffer.from_root(url, cache=tmp_path, filter_shards=conditions)

    with pytest.raises(NotABufferError, match="by its list, none of 6 shards has an episode of such task, done"):
        opened(task=2, done=True)
    with pytest.raises(SchemaError, match="filter_shards: got a callable for 'task'"):
        opened(task=lambda column: column > 2)
    with pytest.raises(SchemaError, match=r"filter_shards.*'tsk'"):
        opened(tsk=2)
    with pytest.raises(SchemaError, match="filter 'task': got 'two', but it holds numbers"):
        opened(task="two")
    with pytest.raises(SchemaError, match=r"filter_shards: got .*, expected a URL"):
        ConcatBuffer.from_root(place, filter_shards={"task": 2})
