"""How text, tables and bars reach the terminal: nothing that steers it, a bar only where someone watches."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_cases import RUN, make, read_json, run
from test_cli_change import SLOW

from memmap_buffer.cli import terminal


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
    assert terminal.clean("a\x1b[31m\x07\u202eb\n\tc é 日本") == "a\ufffd[31m\ufffd\ufffdb\n\tc é 日本"


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
    on_disk, apparent = terminal.disk_use(tmp_path)
    assert apparent == 5000 + (1 << 24)
    assert on_disk < 1 << 20


@pytest.mark.parametrize(
    ("command", "word"), [("pack", "packing"), ("split", "splitting"), ("verify", "checking"), ("episodes", "episodes")]
)
def test_a_bar_is_shown_to_who_watches_and_only_to_them(tmp_path: Path, command: str, word: str) -> None:
    folder = make(tmp_path / "buffer", range(40), max_episodes=40).folder
    arguments = [command, str(folder), *[str(tmp_path / "new")] * (command in ("pack", "split"))]
    watched, slave = pty.openpty()
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
