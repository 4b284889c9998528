"""The notebooks of docs/tutorials/ run, and print what they show, but for the digits of their numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from notebooks import code_of, printed_in

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
NEEDED = {"atari-prioritised": "ale_py", "offline-rl": "minari", "robot-imitation": "mujoco"}
MOST_CELLS = 12
every_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def without_digits(text: str) -> str:
    """Another processor trains another network: which numbers are good enough, the notebooks assert themselves."""
    return re.sub(r"\d+(\.\d*)?", "0", re.sub(r" +", " ", text))


@every_notebook
@pytest.mark.slow
def test_a_tutorial_runs_and_prints_what_it_shows(notebook: Path, tmp_path: Path) -> None:
    if find_spec(NEEDED[notebook.stem]) is None:
        pytest.skip(f"{NEEDED[notebook.stem]}: not installed")
    command = [sys.executable, "-W", "error", ROOT / "tests" / "support" / "notebooks.py", notebook]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(map(without_digits, found)) == list(map(without_digits, printed_in(notebook)))


@every_notebook
def test_a_tutorial_is_short_and_was_run(notebook: Path) -> None:
    cells, printed = code_of(notebook), printed_in(notebook)
    assert len(cells) <= MOST_CELLS
    assert sum("assert " in cell for cell in cells) >= 1
    for cell, text in zip(cells, printed, strict=True):
        assert bool(text) == ("print(" in cell), cell
