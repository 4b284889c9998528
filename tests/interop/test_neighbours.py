"""Neighbours that scripts/neighbour installs have tests, an extra or packages of their own, and a row of versions."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "neighbour"


def neighbours() -> list[str]:
    return re.search(r"^neighbours=\((.*)\)$", SCRIPT.read_text(), re.MULTILINE)[1].split()  # type: ignore[index]


def test_each_has_tests_and_an_extra_or_packages_of_its_own() -> None:
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    own = re.findall(r"^    (\w+)\) packages=", SCRIPT.read_text(), re.MULTILINE)
    for name in neighbours():
        assert [*(ROOT / "tests" / "interop").glob(f"test_{name}*.py")]
        assert name in own or name in extras


def test_the_page_says_with_which_versions_each_was_last_seen_to_work() -> None:
    page = (ROOT / "docs" / "trainers.md").read_text().partition("## Versions")[2]
    rows = dict(re.findall(r"^\| ([\w-]+) \| (\d.*) \|$", page, re.MULTILINE))
    others = {"lightning", "minari", "rerun-sdk", "skrl", "stable-baselines3", "torchrl"}
    assert {*neighbours(), *others} == rows.keys()


def test_an_unknown_one_is_refused_before_anything_is_installed() -> None:
    for arguments in (["nobody"], []):
        done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and f"expected one of {' '.join(neighbours())}" in done.stderr
