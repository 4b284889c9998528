"""How text, tables and bars reach the terminal: nothing that steers it, a bar only where someone watches."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cli_cases import RUN, SLOW, make, read_json, run

import memmap_buffer
from memmap_buffer.cli import folders, minimal, terminal


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**40, "1.0 TiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_are_in_powers_of_1024(count: float, text: str) -> None:
    assert terminal.bytes_of(count) == text


def test_text_is_printed_without_what_steers_a_terminal() -> None:
    assert minimal.clean("a\x1b[31m\x07\u202eb\n\tc é 日本") == "a\ufffd[31m\ufffd\ufffdb\n\tc é 日本"


def test_json_has_only_what_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say_json({"a": np.float32(0.5), "b": [np.nan, np.inf, 1], "c": np.arange(3), 4: (True, None), "d": 1 + 2j})
    assert read_json(capsys.readouterr().out) == {
        "a": 0.5,
        "b": [None, None, 1],
        "c": [0, 1, 2],
        "4": [True, None],
        "d": [1.0, 2.0],
    }


def test_a_table_in_a_pipe_has_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_table("", {"text": ["x" * 500, "[red]y"], "number": [1, None], "flag": [True, False]})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["text", "number", "flag"],
        ["x" * 500, "1", "yes"],
        ["[red]y", "-", "no"],
    ]


def test_disk_use_counts_files_and_no_links(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(b"x" * 5000)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 24)
    (tmp_path / "link").symlink_to("/proc/kcore")
    on_disk, apparent = folders.disk_use(tmp_path)
    assert apparent == 5000 + (1 << 24)
    assert on_disk < 1 << 20


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("pack OLD NEW", "copying"),
        ("split OLD NEW", "copying"),
        ("merge NEW OLD", "merging"),
        ("verify OLD", "checking"),
        ("episodes OLD", "reading"),
        ("bench OLD --seconds 0.1", "measuring"),
        ("export parquet OLD NEW", "episodes"),
    ],
)
def test_a_bar_is_shown_to_who_watches_and_only_to_them(tmp_path: Path, command: str, word: str) -> None:
    folder = make(tmp_path / "buffer", range(40), max_episodes=40).folder
    arguments = command.replace("OLD", str(folder)).replace("NEW", str(tmp_path / "new")).split()
    watched, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    line = [sys.executable, "-c", f"{SLOW}\n{RUN}", *arguments]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    shown = b""
    while chunk := read(watched):
        shown += chunk
    os.close(watched)
    assert process.wait() == 0
    assert word.encode() in shown
    assert b"None" not in shown
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    piped = run(*arguments)
    assert (piped.returncode, piped.stderr) == (0, "")


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # EIO: the other side is closed, and all is read (pty(7))
        return b""


# Terminals of all kinds

PLAIN = {"COLUMNS": "80", "LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("command", ["info", "show", "head", "stats", "episodes", "plot", "pack", "video"])
def test_a_terminal_that_is_not_utf_8_gets_signs_that_it_has(tmp_path: Path, command: str) -> None:
    folder, odd = tmp_path / "bùffer…", tmp_path / "nëu"
    make(folder)
    more = {"show": ["last"], "plot": ["--out", str(odd)], "video": ["last", "--out", str(odd)], "pack": [str(odd)]}
    done = in_terminal("memmap_buffer", command, str(folder), *more.get(command, []), **PLAIN)
    assert "Traceback" not in done.output
    assert done.output.isascii()
    assert done.code == (2 if command in ("plot", "video") else 0)


def test_json_keeps_every_sign_where_the_terminal_is_not_utf_8(tmp_path: Path) -> None:
    make(tmp_path / "bùffer")
    line = [sys.executable, "-m", "memmap_buffer", "info", str(tmp_path / "bùffer"), "--json"]
    given = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}  # so that the folder's name itself is read
    done = subprocess.run(line, capture_output=True, env=os.environ | given)
    assert read_json(done.stdout.decode("ascii"))["folder"].endswith("bùffer")


@pytest.mark.parametrize("without", ["", "typer"])
def test_the_version_is_told_also_without_extras_and_by_python_m(without: str) -> None:
    before = f"import sys; sys.modules[{without!r}] = None" if without else ""
    done = run("--version", before=before)
    assert (done.returncode, done.stdout) == (0, f"memmap-buffer {memmap_buffer.__version__}\n")
    again = subprocess.run([sys.executable, "-m", "memmap_buffer", "--version"], capture_output=True, text=True)
    assert again.stdout == done.stdout


@pytest.mark.parametrize("command", ["stats", "show", "head", "info", "episodes"])
def test_tables_are_whole_cells_in_lines_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("b"))
    arguments = [command, "b", *["last"] * (command in ("show", "head"))]
    shown = in_terminal("memmap_buffer", *arguments, COLUMNS="80").output
    assert max(map(len, shown[shown.rfind("\r") + 1 :].splitlines())) <= 80
    wide, narrow = (words_of(text) for text in (run(*arguments).stdout, shown.replace("\r", "\n")))
    assert narrow & wide == wide


def words_of(text: str) -> set[str]:
    """The words of a table, a name in the parts that it may be folded between."""
    return {word for word in re.split(r"\s+|(?<=[a-z][._])", text) if word}


def test_in_a_table_that_is_too_wide_names_are_folded_and_long_texts_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["observation.images.wrist_left_camera_depth", "reward"]
    columns = {"field": names, "observation.a_name_that_is_longer_than_a_group": [1, 2], "text": ["word " * 20, "x"]}
    monkeypatch.setattr(terminal, "WIDE", 90)
    terminal.show_table("", columns)
    assert capsys.readouterr().out.rstrip().splitlines() == [
        "                          observation.a_name_that_                                      ",
        "field                       is_longer_than_a_group  text                                ",
        "observation.images.                              1  word word word word word word word …",
        " wrist_left_camera_depth                                                                ",
        "reward                                           2  x",
    ]
    monkeypatch.setattr(terminal, "WIDE", 400)
    terminal.show_table("", columns)
    header, first, _ = capsys.readouterr().out.splitlines()
    assert header.split() == list(columns) and first.split() == [names[0], "1", *["word"] * 20]


@pytest.mark.parametrize(
    ("value", "text"), [(0.77613636, "0.7761"), (-999.94, "-999.9"), (1234.56, "1234.56"), (7.0, "7"), (np.inf, "inf")]
)
def test_a_number_has_the_digits_that_people_read(value: float, text: str) -> None:
    assert terminal.cell_of(value) == terminal.cell_of(np.float64(value)) == text


def test_a_table_that_is_too_wide_goes_on_below_with_its_first_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "WIDE", 12)
    terminal.show_table("title", {"name": ["a", "b"], "one": [1, 2], "two": [3.25, None], "many": ["x" * 20, "y"]})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:9] == [
        *(["title"], ["name", "one"], ["a", "1"], ["b", "2"], []),
        *(["name", "two"], ["a", "3.25"], ["b", "-"], []),
    ]
    assert lines[9] == ["name", "many"]  # wider than the terminal: folded, with nothing beside it but the first


@dataclass
class Done:
    """What a command wrote to its terminal, and its exit code."""

    output: str
    code: int


def in_terminal(*arguments: str, **environment: str) -> Done:
    """A module's command, run in a terminal."""
    watched, slave = pty.openpty()
    line = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(line, stdin=slave, stdout=slave, stderr=slave, env=os.environ | environment)
    os.close(slave)
    shown = b""
    while chunk := read(watched):
        shown += chunk
    os.close(watched)
    return Done(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n"), process.wait())
