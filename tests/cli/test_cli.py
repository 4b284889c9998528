"""`memmap-buffer verify | repair | pack | unpack`, with the extra and without it: what it says, asks, and ends with."""

from __future__ import annotations

import importlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coded_folder
import damage
import pytest
from damage import flip, header_size, rows_of
from fault_injection import in_child, listing, shown, system

from memmap_buffer import ConcatBuffer, Jpeg, ReplayBuffer, Zstd, verify
from memmap_buffer.cli import app, command, minimal

Main = Callable[[list[str]], int]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return damage.copy_of_example(tmp_path / "buffer")


@pytest.fixture
def damaged(folder: Path) -> Path:
    flip(folder / "data/number.npy", header_size(folder / "data/number.npy") + rows_of("number", 4)[0])
    return folder


@pytest.fixture(params=[app.main, minimal.main], ids=["typer", "argparse"])
def main(request: pytest.FixtureRequest) -> Main:
    chosen: Main = request.param
    return chosen


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
NAMED = "data/number.npy: 'number' fails its checksum (episode 4, slot 4)\n"


def test_verify_ends_with_0_where_all_is_well(main: Main, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr() == ("all is well\n", "")


@pytest.mark.parametrize("at", [1, 6, 18])
def test_a_shard_whose_recorder_was_killed_while_it_made_it_is_passed_over_and_named(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    def make(max_episodes: int) -> ReplayBuffer:
        return ReplayBuffer(tmp_path, max_episodes, 3, {"x": "float"}, shard="auto")

    with make(4) as buffer:
        buffer.store_episode(x=[1])

    def killed(_: Callable[[Any], None]) -> None:
        with system(at, kill=True):
            make(5)

    in_child(killed)
    assert not (tmp_path / "shard-00001" / "schema.json").exists()
    assert ConcatBuffer.from_root(tmp_path).num_episodes == 1
    for command_line in (["verify", str(tmp_path)], ["repair", str(tmp_path)]):
        assert main(command_line) == 0
        out, err = capsys.readouterr()
        assert re.fullmatch("shard-00001: it is no buffer: its creation, .* did not finish.*; else remove it\n", out)
        assert not err
    if main is app.main:
        assert main(["doctor", str(tmp_path)]) == 2
        assert "shard-00001: it is no buffer" in capsys.readouterr().err
    with make(5) as buffer:  # the next recorder goes on with it
        buffer.store_episode(x=[2])
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("all is well\n", "")


def test_verify_names_each_damage_and_ends_with_1(
    main: Main, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(damaged)
    assert main(["verify", str(damaged)]) == 1
    assert capsys.readouterr() == (NAMED, "")
    assert listing(damaged) == before


def test_verify_ends_with_0_where_something_is_unfinished_and_nothing_lost(
    main: Main, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "schema.json.new").write_text("{")
    assert main(["verify", str(folder)]) == 0
    assert "schema.json.new: a change of the schema that was not finished" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["verify"], ["repair"], ["repair", "--yes"]], ids=" ".join)
def test_what_is_no_buffer_ends_with_2_and_says_so(
    main: Main, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path / "nowhere")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"memmap-buffer: {tmp_path / 'nowhere'}: there is no such folder; check the path\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["mend"], ["verify"], ["repair", "a", "b"], ["verify", "--yes", "a"], ["pack", "a"], ["pack", "a", "b", "c"]],
    ids=str,
)
def test_a_misspelt_command_ends_with_2(main: Main, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert "memmap-buffer" in out + err


@pytest.mark.parametrize("text", ["y\n", "Y\n", "yes\n", " YES \n"])
def test_repair_asks_and_goes_on_after_a_yes(
    main: Main, damaged: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, text)
    assert main(["repair", str(damaged)]) == 0
    out = capsys.readouterr().out
    assert out == f"{NAMED}Repair it? [y/N] repaired; what was taken out lies in lost+found/\n"
    assert verify(damaged) == []
    assert dict(shown(damaged)).keys() == {2, 3, 5}


@pytest.mark.parametrize("text", ["", "\n", "n\n", "no\n", "perhaps\n"])
def test_repair_changes_nothing_after_anything_else(
    main: Main, damaged: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An end of the input is a no: a script has nobody to ask."""
    before = listing(damaged)
    answer(monkeypatch, text)
    assert main(["repair", str(damaged)]) == 1
    assert capsys.readouterr().out.endswith("nothing was changed\n")
    assert listing(damaged) == before


def test_repair_does_not_ask_with_yes(
    main: Main, damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "")
    assert main(["repair", "--yes", str(damaged)]) == 0
    assert capsys.readouterr().out == f"{NAMED}repaired; what was taken out lies in lost+found/\n"
    assert verify(damaged) == []


def test_repair_leaves_a_folder_alone_where_all_is_well(
    main: Main, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(folder)
    assert main(["repair", str(folder)]) == 0
    assert capsys.readouterr().out == "all is well\n"
    assert listing(folder) == before


def test_repair_says_why_it_cannot_and_ends_with_2(
    main: Main, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "episodes.npy").unlink()
    before = listing(folder)
    assert main(["repair", "--yes", str(folder)]) == 2
    assert "it alone says what the episodes are" in capsys.readouterr().err
    assert listing(folder) == before


def test_repair_beside_a_writer_ends_with_2_and_names_the_writer(damaged: Path) -> None:
    with ReplayBuffer.from_folder(damaged, verify="never") as buffer:
        buffer.begin_episode()
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from memmap_buffer.cli.command import main; sys.exit(main())",
                "repair",
                "--yes",
                damaged,
            ],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2
    assert "has another writer: process" in done.stderr


def test_the_command_is_installed_and_loads_no_torch(damaged: Path) -> None:
    code = "import sys; from memmap_buffer.cli.command import main; sys.exit(main() + 10 * ('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, "verify", damaged], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, NAMED, "")
    script = re.search(r'^memmap-buffer = "(.+):(.+)"$', PYPROJECT.read_text(), re.MULTILINE)
    assert script is not None
    assert getattr(importlib.import_module(script[1]), script[2]) is command.main


def test_without_typer_the_four_commands_work_and_the_others_name_the_extra(damaged: Path) -> None:
    code = (
        "import sys; sys.modules |= {'typer': None, 'zstandard': None}; "
        "from memmap_buffer.cli.command import main; sys.exit(main())"
    )
    no_zstd = "zstandard cannot be imported; install it by: pip install 'memmap-buffer[zstd]'"
    for arguments, expected in {
        ("verify", str(damaged)): (1, NAMED, ""),
        ("info", str(damaged)): (2, "", f"memmap-buffer: {minimal.EXTRA}\n"),
        ("pack", str(damaged), f"{damaged}-copy", "--codec", "number=zstd"): (2, "", f"memmap-buffer: {no_zstd}\n"),
    }.items():
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == expected


def test_pack_and_unpack_say_what_they_made_and_end_with_0(
    main: Main, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(folder), str(tmp_path / "packed")]) == 0
    assert main(["unpack", str(tmp_path / "packed"), str(tmp_path / "same")]) == 0
    sizes = ["--max-episodes", "9", "--max-timesteps", "7"]
    assert main(["unpack", str(tmp_path / "packed"), str(tmp_path / "larger"), *sizes]) == 0
    names = ("packed", "same", "larger")
    assert capsys.readouterr() == ("".join(f"{tmp_path / name}: 4 episodes, 14 steps\n" for name in names), "")
    for name in names:
        assert shown(tmp_path / name) == shown(folder)
    larger = ReplayBuffer.from_folder(tmp_path / "larger", read_only=True)
    assert (larger.max_episodes, larger.max_timesteps) == (9, 7)


def test_pack_names_what_it_leaves_out_and_ends_with_1(
    main: Main, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(damaged), str(tmp_path / "packed")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'packed'}: 3 episodes, 11 steps",
        "episode 4 is damaged, or was overwritten meanwhile, and is left out",
    ]
    assert dict(shown(tmp_path / "packed")).keys() == {2, 3, 5}


@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_pack_says_why_it_cannot_and_ends_with_2(
    main: Main, folder: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "nowhere"), str(tmp_path / "packed")]) == 2
    assert main([command, str(folder), str(folder)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "there is no such folder; check the path" in first
    assert "holds a buffer already; give a folder without one" in second


# Compressed fields


def test_pack_compresses_the_fields_that_are_named(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    source, packed, back = (str(folder) for folder in (coded_folder.example(), tmp_path / "packed", tmp_path / "back"))
    assert main(["pack", source, packed, "--codec", "frame=zstd:9", "--codec", "camera=jpeg:50"]) == 0
    assert main(["unpack", packed, back, "--codec", "frame=none", "--codec", "depth=zstd"]) == 0
    assert codecs_in(packed) == {
        "frame": Zstd(9),
        "camera.left": Jpeg(50),
        "noise": Zstd(3),
        "depth": None,
        "number": None,
    }
    assert codecs_in(back) | {"camera.left": None} == dict.fromkeys(codecs_in(packed)) | {
        "noise": Zstd(),
        "depth": Zstd(),
    }
    assert capsys.readouterr().out.splitlines() == [f"{folder}: 4 episodes, 122 steps" for folder in (packed, back)]


def codecs_in(folder: str) -> dict[str, Any]:
    with ReplayBuffer.from_folder(folder, read_only=True) as buffer:
        return {name: field.codec for name, field in buffer.schema.fields.items()}


@pytest.mark.parametrize("given", ["frame", "frame=zip", "frame=zip:3", "frame=zstd:x", "frame=zstd:99", "task=zstd"])
def test_a_codec_that_is_none_is_told(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    assert main(["pack", str(coded_folder.example()), str(tmp_path / "packed"), "--codec", given]) == 2
    assert not (tmp_path / "packed").exists()
    assert re.search("codec|level", capsys.readouterr().err)
