"""Marks of episodes, set and read through a buffer, beside its writer and through several folders."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import get_inside, set_inside

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    Mark,
    ReadOnlyError,
    ReplayBuffer,
    SchemaError,
    pack,
    publish,
)


def filled(folder: Path, count: int = 6, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(folder, 6, 10, {"x": "float", "reward": "float"}, circular=True, **options)
    for number in range(count):
        buffer.store_episode(x=np.full(number + 1, number), reward=np.ones(number + 1))
    return buffer


def test_marks_are_set_beside_a_writer_and_seen_by_every_object_of_the_folder(tmp_path: Path) -> None:
    with filled(tmp_path) as writer:
        other = ReplayBuffer.from_folder(tmp_path)
        with writer.one_episode():
            writer.store(x=0, reward=0)
            assert other.mark([1, 4], add=["bad", "slip"], note="cable") == 0
            assert writer.mark(4, add=["seen"], remove=["slip"]) == 0
        assert writer.marks() == {1: Mark(("bad", "slip"), "cable"), 4: Mark(("bad", "seen"), "cable")}


def test_episodes_that_are_gone_are_counted_and_have_no_marks(tmp_path: Path) -> None:
    with filled(tmp_path) as buffer:
        buffer.mark([0, 5], add=["good"])
        buffer.store_episode(x=[1], reward=[1])  # the ring forgets number 0
        assert buffer.marks() == {5: Mark(("good",))}
        assert buffer.mark(np.array([0, 77, 6]), add=["good"]) == 2
        assert buffer.mark([], add=["good"]) == 0
        assert buffer.marks() == {5: Mark(("good",)), 6: Mark(("good",))}


def test_no_mark_of_an_episode_that_one_does_not_see_yet_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path, 3) as writer:
        late, change = ReplayBuffer.from_folder(tmp_path), get_inside("change_marks")

        def changed(self: Any, *given: Any) -> Any:
            set_inside(monkeypatch, change_marks=change)
            writer.store_episode(x=[1], reward=[1])  # after the other one's look, before it has the lock
            writer.mark([3], add=["good"])
            return self.change(*given)

        set_inside(monkeypatch, change_marks=changed)
        assert late.mark([1], add=["bad"]) == 0
        assert writer.marks() == {1: Mark(("bad",)), 3: Mark(("good",))}


def test_a_packed_folder_and_a_root_of_one_have_marks_of_their_own(tmp_path: Path) -> None:
    filled(tmp_path / "data").close()
    pack(tmp_path / "data", tmp_path / "root" / "packed")
    ReplayBuffer.from_folder(tmp_path / "root" / "packed").mark([2], add=["good"])
    joined = ConcatBuffer.from_root(tmp_path / "root")
    joined.mark([3], add=["good"])
    assert {*joined.marks()} == {2, 3}
    assert chosen(joined, mark="good") == [2, 3]


def test_a_file_of_marks_that_is_not_there_is_told(tmp_path: Path) -> None:
    with filled(tmp_path / "data") as buffer:
        for read in (lambda: buffer.episodes(mark="!bad", marks=tmp_path / "x.json"), lambda: buffer.marks("x.json")):
            with pytest.raises(SchemaError, match=r"there is no file .*x\.json; check the path"):
                read()
        with pytest.raises(SchemaError, match=r"there is no folder .*nowhere; make it first"):
            buffer.mark([0], add=["bad"], file=tmp_path / "nowhere" / "x.json")


def test_marks_that_stay_are_not_read_again_for_each_publication(
    marked: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    time.sleep(0.2)  # marks that were changed this moment are read each time
    reads, parsed = list[int](), get_inside("parse_marks")

    def counted(*given: Any) -> Any:
        reads.append(1)
        return parsed(*given)

    set_inside(monkeypatch, parse_marks=counted)
    for number in range(2):  # so that some that are marked stay
        marked.store_episode(x=[number], reward=[1])
        marked.sample(4, mark="good", format="numpy", timestep_level=True)
    assert len(reads) <= 1


def test_a_folder_that_is_overwritten_has_no_marks_of_what_was_there(tmp_path: Path) -> None:
    with filled(tmp_path) as buffer:
        buffer.mark([0], add=["good"])
    with filled(tmp_path, overwrite=True) as buffer:
        assert buffer.marks() == {}


def test_several_folders_have_marks_by_number_and_serial(tmp_path: Path) -> None:
    for name in ("a", "b"):
        filled(tmp_path / name, 3).close()
    joined = ConcatBuffer.from_root(tmp_path)
    whole = joined.batch(return_indices=True, format="numpy")
    assert joined.mark(whole["_index"][[1, 5]], add=["bad"]) == 0
    assert joined.mark([1, 9], add=["bad"]) == 1
    assert joined.marks() == {(0, 1): Mark(("bad",)), (1, 2): Mark(("bad",))}
    assert ReplayBuffer.from_folder(tmp_path / "b").marks() == {2: Mark(("bad",))}


def test_what_may_not_be_written_to_has_its_marks_in_a_file(tmp_path: Path) -> None:
    filled(tmp_path / "data").close()
    buffer, file = ReplayBuffer.from_folder(tmp_path / "data", read_only=True), tmp_path / "marks.json"
    with pytest.raises(ReadOnlyError, match="give a file for them"):
        buffer.mark([1], add=["good"])
    assert buffer.mark([1], add=["good"], file=file) == 0
    assert (buffer.marks(), buffer.marks(file)) == ({}, {1: Mark(("good",))})


@pytest.mark.parametrize(
    ("indices", "options", "complaint"),
    [
        ([[0, 1]], {"add": ["a"]}, r"got indices of int64 and shape \(1, 2\), expected \(n,\) serials"),
        ([0.5], {"add": ["a"]}, "got indices of float64"),
        ([0], {"add": "good"}, r"got add='good', expected several labels, as in add=\['bad'\]"),
        ([0], {"add": ["a" * 99]}, "got the label"),
        ([0], {"add": [1, "good"]}, r"got add=\[1, 'good'\]"),
        ([0], {"note": 5}, "got the note 5, expected text"),
    ],
)
def test_what_is_no_mark_is_refused(tmp_path: Path, indices: Any, options: dict[str, Any], complaint: str) -> None:
    with filled(tmp_path) as buffer:
        with pytest.raises(SchemaError, match=complaint):
            buffer.mark(indices, **options)
        assert buffer.marks() == {}


def chosen(buffer: ReplayBuffer | ConcatBuffer, **options: Any) -> list[Any]:
    index = buffer.episodes(return_indices=True, **options)["_index"]
    return index.tolist() if index.ndim == 1 else [*map(tuple, index.tolist())]


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[ReplayBuffer]:
    with filled(tmp_path / "data") as buffer:
        buffer.mark([1, 2, 4], add=["good"])
        buffer.mark([2, 3], add=["slip"])
        yield buffer


@pytest.mark.parametrize(
    ("mark", "serials"),
    [
        ("good", [1, 2, 4]),
        ("!good", [0, 3, 5]),
        ("", [0, 5]),
        (["good", "!slip"], [1, 4]),
        (["good", "slip"], [1, 2, 3, 4]),
        (["", "slip"], [0, 2, 3, 5]),
        ({"!good", "!slip"}, [0, 5]),
    ],
)
def test_episodes_are_chosen_by_their_marks(marked: ReplayBuffer, mark: Any, serials: list[int]) -> None:
    assert chosen(marked, mark=mark) == serials
    batch = marked.sample(200, seed=0, mark=mark, timestep_level=True, return_indices=True, format="numpy")
    assert {*batch["_indices"][:, 0].tolist()} == {*serials}


@pytest.mark.parametrize("options", [{}, {"prioritized": True}, {"n_steps": 1}], ids=str)
def test_new_marks_are_seen_by_the_next_batch(
    marked: ReplayBuffer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_inside(monkeypatch, marks_look_seconds=0)

    def drawn() -> set[int]:
        given: dict[str, Any] = {"timestep_level": True, **options}
        given.pop("timestep_level" if "n_steps" in options else "", None)
        batch = marked.sample(300, mark="good", return_indices=True, format="numpy", **given)
        return {*batch["_indices"][:, 0].tolist()}

    assert drawn() == {1, 2, 4}
    marked.mark([1, 4], remove=["good"])
    marked.mark([5], add=["good"])
    assert drawn() == {2, 5}
    marked.store_episode(x=np.zeros(9), reward=np.zeros(9))
    assert drawn() == {2, 5}
    marked.mark([6], add=["good"])
    assert drawn() == {2, 5, 6}


def test_a_loader_sees_new_marks_with_its_next_epoch_also_in_workers(
    marked: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_inside(monkeypatch, marks_look_seconds=0)
    for workers in (0, 1):
        loader = marked.dataloader(4, mark="good", split={"a": 1.0}, part="a", return_indices=True, num_workers=workers)
        assert sorted(i for batch in loader for i in batch["_index"].tolist()) == [1, 2, 4]
        marked.mark([5], add=["good"])
        assert sorted(i for batch in loader for i in batch["_index"].tolist()) == [1, 2, 4, 5]
        marked.mark([5], remove=["good"])


def test_episodes_of_several_folders_are_chosen_by_the_marks_of_each(tmp_path: Path) -> None:
    for name in ("a", "b"):
        filled(tmp_path / name, 3).close()
    joined = ConcatBuffer.from_root(tmp_path)
    joined.mark([[0, 1], [1, 2]], add=["good"])
    assert chosen(joined, mark="good") == [(0, 1), (1, 2)]
    file = tmp_path / "marks.json"
    joined.mark([[1, 0]], add=["good"], file=file)
    assert chosen(joined, mark="good", marks=file) == [(1, 0)]


@pytest.mark.parametrize("copied", ["snapshot", "pack", "part", "publish"])
def test_a_copy_has_the_marks(marked: ReplayBuffer, tmp_path: Path, copied: str) -> None:
    if copied == "snapshot":
        marked.snapshot(tmp_path / "copy")
    elif copied == "publish":
        publish(marked.folder, str(tmp_path / "root"))
    else:
        pack(marked.folder, tmp_path / "copy", episodes=[1, 2, 3] if copied == "part" else None)
    copy = ReplayBuffer.from_folder(
        f"file://{tmp_path}/root/data" if copied == "publish" else tmp_path / "copy", cache=tmp_path / "cache"
    )
    assert chosen(copy, mark="good") == ([1, 2] if copied == "part" else [1, 2, 4])
    wanted = {serial: mark for serial, mark in marked.marks().items() if serial in copy.serials}
    assert copy.marks() == wanted


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mark": []}, r"got \[\], expected a label"),
        ({"mark": 3}, "got 3, expected a label"),
        ({"mark": ["a", 3]}, "expected a label"),
        ({"mark": "!"}, "expected a label behind '!'"),
        ({"marks": "x.json"}, "marks names the file of what mark chooses by"),
    ],
)
def test_options_that_name_no_marks_are_refused(marked: ReplayBuffer, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SchemaError, match=complaint):
        marked.episodes(**options)


def test_a_damaged_file_of_marks_is_told_and_episodes_are_read_without(marked: ReplayBuffer) -> None:
    (marked.folder / "extra" / "marks.json").write_text("{")
    with pytest.raises(CorruptBufferError, match="move it away to go on without"):
        marked.episodes(mark="good")
    assert chosen(marked) == [0, 1, 2, 3, 4, 5]
