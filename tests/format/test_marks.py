"""Marks in their file: none is lost, whoever else sets some; a file of strangers is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from inside import get_inside

from memmap_buffer import BufferLockedError, CorruptBufferError, Mark, SchemaError
from memmap_buffer.format import marks as module
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.marks import FILE, LOCK, Marks, renamed, text_of

GOOD = Mark(("good",))


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    return Marks(Folder(tmp_path))


def test_labels_and_notes_are_kept_by_folder_and_serial(marks: Marks) -> None:
    assert marks.of("a") == {}
    marks.change("a", [3, 5], lambda mark: mark.changed(add=["slip", "bad"]), 0)
    marks.change("a", [5], lambda mark: mark.changed(remove=["bad"], note="half\nway"), 0)
    marks.change("b", [3], lambda mark: mark.changed(add=["good"]), 0)
    assert marks.of("a") == {3: Mark(("bad", "slip")), 5: Mark(("slip",), "half\nway")}
    assert marks.of("b") == {3: GOOD}
    assert Marks.in_file(marks.folder.path / FILE).of("b") == {3: GOOD}


def test_a_mark_without_labels_and_note_is_none(marks: Marks) -> None:
    marks.change("a", [3], lambda mark: mark.changed(add=["good"], note="x"), 0)
    assert marks.change("a", [3], lambda mark: mark.changed(remove=["good"], note=""), 0) == {}
    assert json.loads((marks.folder.path / FILE).read_text())["folders"] == {}


def test_marks_of_older_episodes_are_dropped_and_those_of_newer_ones_kept(marks: Marks) -> None:
    marks.change("a", [3, 5, 800], lambda _: GOOD, 0)
    assert marks.change("a", [5], lambda mark: mark, 4) == {5: GOOD, 800: GOOD}


def test_the_stamp_is_another_one_after_each_change(marks: Marks) -> None:
    stamps = [marks.stamp]
    for serial in range(5):
        marks.change("a", [serial], lambda _: GOOD, 0)
        stamps.append(marks.stamp)
    assert len({*stamps}) == 6


@pytest.mark.parametrize(
    ("mark", "complaint"),
    [
        (Mark(("",)), "label ''"),
        (Mark(("x" * 65,)), "1 to 64 characters"),
        (Mark(("a\nb",)), "can be printed"),
        (Mark(("!bad",)), "does not begin with '!'"),
        (Mark((3,)), "label 3"),  # type: ignore[arg-type]
        (Mark((), "x" * 10_001), "at most 10000 are kept"),
        (Mark((), "caf\udce9"), r"note 'caf\\udce9', expected text"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(marks: Marks, mark: Mark, complaint: str) -> None:
    marks.change("a", [1], lambda _: GOOD, 0)
    before = (marks.folder.path / FILE).read_bytes()
    with pytest.raises(SchemaError, match=complaint):
        marks.change("a", [1, 2], lambda _: mark, 0)
    assert (marks.folder.path / FILE).read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"format": "memmap-buffer-marks", "version": 2, "folders": {}}',
        b'{"format": "memmap-buffer-marks", "version": 1, "folders": []}',
        b'{"format": "memmap-buffer-marks", "version": 1, "folders": {"a": {"x": {"labels": [], "note": ""}}}}',
        b'{"format": "memmap-buffer-marks", "version": 1, "folders": {"a": {"1": {"labels": 3, "note": ""}}}}',
        b'{"format": "memmap-buffer-marks", "version": 1, "folders": {"a": {"1": {"labels": [3], "note": ""}}}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_refused_and_left_as_it_is(marks: Marks, content: bytes) -> None:
    place = marks.folder.path / FILE
    place.parent.mkdir()
    place.write_bytes(content)
    with pytest.raises(CorruptBufferError, match=r"marks\.json: no marks that can be read"):
        marks.of("a")
    with pytest.raises(CorruptBufferError, match="move it away"):
        marks.change("a", [1], lambda _: GOOD, 0)
    assert place.read_bytes() == content


def test_a_link_in_the_place_of_the_file_is_not_followed(marks: Marks, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(text_of({"a": {1: GOOD}}))
    (tmp_path / "extra").mkdir()
    (tmp_path / FILE).symlink_to(other)
    with pytest.raises((OSError, CorruptBufferError)):
        marks.of("a")
    assert json.loads(other.read_text())["folders"] == {"a": {"1": {"labels": ["good"], "note": ""}}}


def test_marks_that_nobody_would_read_are_not_written(marks: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    marks.change("a", [1], lambda _: GOOD, 0)
    monkeypatch.setattr(module, "MAX_BYTES", 500)
    with pytest.raises(SchemaError, match="bytes of marks, expected at most 500; shorten notes"):
        marks.change("a", [2], lambda _: Mark((), "x" * 500), 0)
    assert marks.of("a") == {1: GOOD}


def test_who_waits_too_long_for_the_lock_is_told(marks: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    lock = marks.folder.lock(LOCK)
    try:
        with pytest.raises(BufferLockedError, match=r"\.marks\.lock"):
            marks.change("a", [1], lambda _: GOOD, 0)
    finally:
        lock.release()
    assert marks.change("a", [1], lambda _: GOOD, 0) == {1: GOOD}


def test_a_lock_whose_release_is_interrupted_is_free(marks: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as long as the traceback is there, as in a notebook."""
    release, left = get_inside("file_lock").release, [1]

    def interrupted(lock: Any) -> None:
        if left:
            raise KeyboardInterrupt(left.pop())
        release(lock)

    monkeypatch.setattr(get_inside("file_lock"), "release", interrupted)
    with pytest.raises(KeyboardInterrupt, match="1") as caught:
        marks.change("a", [1], lambda _: GOOD, 0)
    assert caught.tb is not None
    marks.folder.lock(LOCK).release()


def test_a_copy_with_another_id_keeps_the_marks() -> None:
    data = text_of({"a": {1: GOOD}, "b": {2: GOOD}})
    assert json.loads(renamed(data, "a", "c"))["folders"].keys() == {"c", "b"}


def test_marks_that_several_threads_set_at_once_are_all_there(marks: Marks, tmp_path: Path) -> None:
    def work(first: int) -> None:
        own = Marks(Folder(tmp_path))
        for serial in range(first, first + 20):
            own.change("a", [serial], lambda _: GOOD, 0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(0, 400, 100)))
    assert {*marks.of("a")} == {100 * i + k for i in range(4) for k in range(20)}


WRITER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.marks import Marks
marks, first = Marks(Folder(Path(sys.argv[1]))), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for serial in range(first, first + 40):
    marks.change("a", [serial, 1000], lambda mark: mark.changed(add=[f"by{first}"]), 0)
    print(serial, flush=True)
"""


def writers(tmp_path: Path, *firsts: int) -> list[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(n)], **pipes) for n in firsts]  # type: ignore[call-overload]
    for each in started:
        assert each.stdout.readline() == "ready\n"
    for each in started:
        each.stdin.write("go\n")
        each.stdin.flush()
    return started


def test_marks_that_several_processes_set_at_once_are_all_there(marks: Marks, tmp_path: Path) -> None:
    started = writers(tmp_path, 0, 100, 200)
    for each in started:
        assert each.communicate()[0].count("\n") == 40
    there = marks.of("a")
    assert {*there} == {*range(40), *range(100, 140), *range(200, 240), 1000}
    assert there[1000].labels == ("by0", "by100", "by200")


def test_a_kill_loses_no_mark_that_was_acknowledged_and_leaves_no_lock(marks: Marks, tmp_path: Path) -> None:
    for attempt in range(6):
        (process,) = writers(tmp_path, 100 * attempt)
        told = [int(process.stdout.readline()) for _ in range(1 + 5 * attempt)]  # type: ignore[union-attr]
        process.kill()
        told += [int(line) for line in process.communicate()[0].split()]
        assert {*told} <= {*marks.of("a")}
        assert marks.change("a", [1999], lambda _: GOOD, 0)[1999] == GOOD
