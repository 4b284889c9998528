"""Other systems: what Linux has and another lacks is taken away in a process, which then writes and reads the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from other_system import MISSING, TOGETHER

ROOT = Path(__file__).resolve().parent.parent
LIFE = ROOT / "tests" / "support" / "other_system.py"


def life(missing: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "error", str(LIFE), missing, str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    out: dict[str, Any] = json.loads(done.stdout)
    return out


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return life("nothing", tmp_path_factory.mktemp("here"))


def test_the_life_that_is_compared_wrote_what_it_says(here: dict[str, Any]) -> None:
    assert [episode["n"] for episode in here["power"][1:]] == [[-1, -2], [500, 501, 502]]
    assert [episode["n"] for episode in here["ring"][1:]] == [[-1, -2], [500, 501, 502], [7, 8]]
    assert here["packed"] == here["unpacked"] == here["ring"]
    assert here["steps"][-2:] == here["power"][-2:]  # and with `base`, which the cut took, what that had left out
    assert len(here["streams"][0]["n"]) == 30
    assert [episode["n"] for episode in here["reserved"][1:]] == [[1, 2, 3]]


@pytest.mark.parametrize("missing", [name for name in TOGETHER if name != "nothing"])
def test_folders_are_the_same_where_a_feature_is_missing(missing: str, here: dict[str, Any], tmp_path: Path) -> None:
    there = life(missing, tmp_path)
    can_reserve = "posix_fallocate" not in TOGETHER[missing]
    assert there.pop("reserved") == (here["reserved"] if can_reserve else ["ENOTSUP"])  # EOPNOTSUPP by its other name
    assert (there.pop("full syncs") > 20) == ("fsync that is enough" in TOGETHER[missing])
    assert there == {key: here[key] for key in there}


def test_every_feature_is_taken_away_somewhere() -> None:
    assert set().union(*TOGETHER.values()) == set(MISSING)


def test_a_system_without_posix_says_at_once_that_it_is_not_supported() -> None:
    """Windows has neither fcntl nor resource."""
    code = "import sys; sys.modules |= {'fcntl': None, 'resource': None}; import memmap_buffer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.stderr.splitlines()[-1].startswith("ImportError: memmap_buffer runs on Linux and macOS: this system ")
    assert (ROOT / "docs" / "platforms.md").exists()
