"""`merge`, `split` and `delete`: what they make, what they leave as it was, and that they ask."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
from cli_cases import SLOW, Case, main, make, run
from damage import flip, header_size
from fault_injection import listing, shown
from inside import get_inside, slot_of

from memmap_buffer import ReplayBuffer, verify


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make(tmp_path / "buffer")


def episodes_of(folder: Path) -> list[dict[str, Any]]:
    with ReplayBuffer.from_folder(folder, read_only=True) as buffer:
        return [buffer.schema.flatten(buffer.episode(i)) for i in range(len(buffer))]


def assert_equal(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])


def numbered(folder: Path) -> dict[int, Any]:
    return dict(shown(folder))


# merge


def test_merge_has_every_episode_of_every_folder_in_order(case: Case, tmp_path: Path) -> None:
    other = make(tmp_path / "other", range(20, 23), max_timesteps=50)
    before = listing(case.folder), listing(other.folder)
    assert main("merge", tmp_path / "all", case.folder, other.folder) == 0
    assert_equal(episodes_of(tmp_path / "all"), episodes_of(case.folder) + episodes_of(other.folder))
    assert (listing(case.folder), listing(other.folder)) == before
    with ReplayBuffer.from_folder(tmp_path / "all") as buffer:
        assert (buffer.max_episodes, buffer.max_timesteps) == (11, 50)
        assert buffer.serials.tolist() == list(range(11))
    assert verify(tmp_path / "all") == []


def test_merge_keeps_the_marks(case: Case, tmp_path: Path) -> None:
    other = make(tmp_path / "other", range(20, 23))
    with ReplayBuffer.from_folder(case.folder) as buffer:
        buffer.mark(buffer.serials[[1, 3]], add=["bad"])
    with ReplayBuffer.from_folder(other.folder) as buffer:
        buffer.mark(buffer.serials[-1:], add=["bad"], note="slip")
    assert main("merge", tmp_path / "all", case.folder, other.folder) == 0
    marks = ReplayBuffer.from_folder(tmp_path / "all").marks()
    assert {serial: (mark.labels, mark.note) for serial, mark in marks.items()} == {
        1: (("bad",), ""),
        3: (("bad",), ""),
        10: (("bad",), "slip"),
    }


def test_merge_keeps_that_the_step_after_an_end_is_a_reset(tmp_path: Path) -> None:
    fields = {"x": "int", "terminated": "bool"}
    for name in ("first", "second"):
        with ReplayBuffer(tmp_path / name, 4, 5, fields, skips_resets=True) as buffer:
            buffer.store_episode(x=[0, 1], terminated=[False, True])
    assert main("merge", tmp_path / "all", tmp_path / "first", tmp_path / "second", "--max-episodes", "9") == 0
    with ReplayBuffer.from_folder(tmp_path / "all") as buffer:
        for x, terminated in ((5, True), (99, False), (6, True)):  # 99: the action that an environment ignores
            buffer.add(x=x, terminated=terminated)
        assert [buffer.episode(i)["x"].tolist() for i in (2, 3)] == [[5], [6]]


def test_delete_removes_those_with_a_mark(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    with ReplayBuffer.from_folder(case.folder) as buffer:
        buffer.mark([3, 5, 6], add=["bad"])
        buffer.mark([5], add=["keep"])
    capsys.readouterr()
    assert main("delete", case.folder, "--mark", "bad", "--where", "mark!=keep", "--yes") == 0
    assert ReplayBuffer.from_folder(case.folder).serials.tolist() == [2, 4, 5, 7, 8, 9]
    assert main("delete", case.folder, "--mark", "nothing", "--yes") == 2
    assert main("delete", case.folder, "--yes") == 2
    assert "choose them by --where or --mark" in capsys.readouterr().err


def test_merge_keeps_every_dtype(tmp_path: Path) -> None:
    folder = damage.copy_of_example(tmp_path / "example")
    assert main("merge", tmp_path / "all", folder, damage.other_example(), "--max-episodes", 20) == 0
    assert_equal(episodes_of(tmp_path / "all"), episodes_of(folder) * 2)
    with ReplayBuffer.from_folder(tmp_path / "all", read_only=True) as buffer:
        assert (buffer.max_episodes, buffer.schema.fields["half"].dtype) == (20, "bfloat16")


def test_merge_names_what_is_damaged_and_ends_with_1(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = case.folder / "data/reward.npy"
    flip(path, header_size(path) + slot_of(case.folder, 4) * 40 * 4)
    assert main("merge", tmp_path / "all", case.folder) == 1
    assert capsys.readouterr().out == (
        f"{tmp_path / 'all'}: 7 episodes, {sum(case.lengths.values()) - case.lengths[4]} steps\n"
        f"{case.folder}: episode 4 is damaged, or was overwritten meanwhile, and is left out\n"
    )
    expected = episodes_of(case.folder)
    assert_equal(episodes_of(tmp_path / "all"), expected[:2] + expected[3:])


def test_merge_refuses_other_fields_and_names_them(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ReplayBuffer(tmp_path / "other", 3, 4, {"x": "float"}).close()
    assert main("merge", tmp_path / "all", case.folder, tmp_path / "other") == 2
    assert "action" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


# split


def test_split_gives_each_episode_to_the_part_that_a_loader_would(case: Case, tmp_path: Path) -> None:
    before = listing(case.folder)
    assert main("split", case.folder, tmp_path / "parts", "--part", "a=0.5", "--part", "b=0.5", "--seed", 3) == 0
    assert listing(case.folder) == before
    there = numbered(case.folder)
    with ReplayBuffer.from_folder(case.folder, read_only=True) as buffer:
        for part in ("a", "b"):
            options = {"split": {"a": 0.5, "b": 0.5}, "part": part, "split_seed": 3, "return_indices": True}
            wanted = sorted(int(item["_index"]) for item in buffer.dataset(**options))
            assert numbered(tmp_path / "parts" / part) == {n: e for n, e in there.items() if n in wanted}
            assert sorted(numbered(tmp_path / "parts" / part)) == wanted


def test_split_leaves_nothing_behind_where_a_part_would_be_empty(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("split", case.folder, tmp_path / "parts", "--part", "a=0.99", "--part", "b=0.001") == 2
    assert "no episode falls into b" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["buffer"]


@pytest.mark.parametrize("part", ["a", "a=x", "=0.5", "../a=0.5", "a=0", "a=2", "a=nan"])
def test_a_part_that_cannot_be_meant_ends_with_2(
    case: Case, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("split", case.folder, tmp_path / "parts", "--part", part) == 2
    assert "as in train=0.8" in capsys.readouterr().err
    assert main("split", case.folder, tmp_path / "parts", "--part", "a=0.5", "--part", "a=0.2") == 2
    assert "there is a part 'a' already" in capsys.readouterr().err
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("command", ["merge", "split"])
@pytest.mark.parametrize("there", ["file", "folder", "link"])
def test_nothing_that_is_there_is_replaced(
    case: Case, tmp_path: Path, command: str, there: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    if there == "file":
        target.write_text("mine")
    elif there == "folder":
        target.mkdir()
        (target / "mine").touch()
    else:
        target.symlink_to(case.folder)
    before = listing(tmp_path)
    assert main(command, *((target, case.folder) if command == "merge" else (case.folder, target))) == 2
    assert "there is something already" in capsys.readouterr().err
    assert listing(tmp_path) == before


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match="now"), get_inside("new_folder")(tmp_path / "deep" / "new") as place:
        (place / "half").touch()
        assert not (tmp_path / "deep" / "new").exists()
        raise KeyboardInterrupt("now")
    assert list(tmp_path.iterdir()) == []


# delete


def test_delete_removes_what_was_named_and_nothing_else(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    before = numbered(case.folder)
    assert main("delete", case.folder, "3", "5-7", "last", "--yes") == 0
    assert numbered(case.folder) == {n: e for n, e in before.items() if n in (2, 4, 8)}
    assert capsys.readouterr().out.startswith("deleted 5 episodes, ")


def test_delete_by_condition_and_number_removes_what_is_both(case: Case) -> None:
    assert main("delete", case.folder, "2-6", "--where", "task_id=0", "--yes") == 0
    assert sorted(numbered(case.folder)) == [2, 4, 5, 7, 8, 9]


@pytest.mark.parametrize("text", ["", "\n", "n\n", "perhaps\n"])
def test_delete_changes_no_episode_after_anything_but_a_yes(case: Case, text: str) -> None:
    before = numbered(case.folder)
    done = run("delete", case.folder, "3", given=text)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("Delete 1 of 8 episodes, ")
    assert done.stdout.endswith("for ever? [y/N] nothing was changed\n")
    assert numbered(case.folder) == before


def test_delete_goes_on_after_a_yes(case: Case) -> None:
    assert run("delete", case.folder, "3", given="y\n").returncode == 0
    assert sorted(numbered(case.folder)) == [2, 4, 5, 6, 7, 8, 9]


def test_delete_beside_a_writer_ends_with_2_and_names_it(case: Case) -> None:
    with ReplayBuffer.from_folder(case.folder) as buffer:
        buffer.begin_episode()
        done = run("delete", case.folder, "3", "--yes")
    assert done.returncode == 2
    assert "has another writer" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "name the episodes, or choose them by --where"),
        (["77"], "the buffer does not show it"),
        (["--where", "length>9999"], "no episode is like that"),
    ],
    ids=str,
)
def test_delete_of_nothing_ends_with_2(
    case: Case, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("delete", case.folder, *arguments, "--yes") == 2
    assert complaint in capsys.readouterr().err
    assert len(numbered(case.folder)) == 8


# add-field


@pytest.mark.parametrize(
    ("options", "dtype", "shape", "value"),
    [
        (["--default", "0.5"], "float32", (), 0.5),
        (["--default", "3", "--dtype", "int", "--shape", "2,4"], "int64", (2, 4), 3),
        (["--default", "[1, 2]", "--dtype", "uint8", "--shape", "2"], "uint8", (2,), [1, 2]),
        (["--default", "true", "--dtype", "bool"], "bool", (), True),
        (["--default", "a b", "--dtype", "U5"], "U5", (), "a b"),
    ],
    ids=str,
)
@pytest.mark.parametrize("meta", [False, True], ids=["field", "meta field"])
def test_add_field_gives_its_value_to_every_episode(
    case: Case, options: list[str], dtype: str, shape: tuple[int, ...], value: Any, meta: bool
) -> None:
    before = episodes_of(case.folder)
    assert main("add-field", case.folder, "group.new", *options, *["--meta"] * meta) == 0
    after = episodes_of(case.folder)
    for episode in after:
        got = np.asarray(episode.pop("group.new"))
        assert got.shape == (shape if meta else (len(episode["reward"]), *shape))
        assert (got == value).all()
    assert_equal(after, before)
    with ReplayBuffer.from_folder(case.folder, read_only=True) as buffer:
        fields = buffer.schema.meta_fields if meta else buffer.schema.fields
        assert (fields["group.new"].dtype, fields["group.new"].shape) == (dtype, shape)
    assert verify(case.folder) == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["new", "--default", "x"], "expected JSON"),
        (["new", "--default", "1", "--shape", "2x3"], "expected whole numbers with commas"),
        (["new", "--default", "1", "--dtype", "number"], "dtype: got 'number'"),
        (["reward", "--default", "1"], "reward"),
        (["new"], "--default"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_added_changes_nothing(
    case: Case, options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = shown(case.folder)
    assert main("add-field", case.folder, *options) == 2
    assert complaint in capsys.readouterr().err
    assert shown(case.folder) == before


# Interrupted


@pytest.mark.parametrize("command", ["pack", "unpack", "merge", "split"])
def test_ctrl_c_while_copying_leaves_nothing_half(tmp_path: Path, command: str) -> None:
    case = make(tmp_path / "buffer", range(60), max_episodes=60)
    before, target = listing(case.folder), tmp_path / "target"
    arguments = [target, case.folder] if command == "merge" else [case.folder, target]
    code = f"{SLOW}\nimport sys; from memmap_buffer.cli.command import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, command, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not any(tmp_path.rglob("*/data/reward.npy")) or len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "memmap-buffer: interrupted; nothing half is left\n")
    assert not (target / "schema.json").exists()
    assert [path for path in tmp_path.rglob("*") if path.suffix == ".npy" and case.folder not in path.parents] == []
    assert listing(case.folder) == before
    assert main(command, *arguments) == 0
    found = [folder.parent for folder in tmp_path.rglob("schema.json") if folder.parent != case.folder]
    assert sum(len(numbered(folder)) for folder in found) == 60
