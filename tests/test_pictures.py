"""The pictures in docs/ show what the views really cut, curves the numbers beside them, terminals what is printed."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
DRAWN = {
    "trajectory": ["0 1 2 3 4 5 6 7 8 9 10", "0 1 2 3 4 5 6 7 8 9", "0 1 2 3 4 5 6 7 8 9"],
    "timestep": ["3", "3", "3"],
    "n-step": ["2", "2", "2 3 4 5", "6"],
    "n-step-end": ["8", "8", "8 9 -0 -0", "10"],
    "window": ["3 4 5 6", "3 4 5 6", "3 4 5 6"],
    "window-end": ["8 9 -0 -0", "8 9 -0 -0", "8 9 -0 -0"],
    "offsets": ["-0 -0 0 1", "1 2 3 4 5"],
}
CURVES = ("sac",)
TERMINALS = tuple(f"terminal-{name}" for name in ("info", "episodes", "show", "head", "stats"))
SVG = "{http://www.w3.org/2000/svg}"


def cells_of(path: Path) -> list[str]:
    """The cells of a picture, a row a line, those with a dashed border behind a minus."""
    rows: dict[float, list[str]] = {}
    parts = list(ElementTree.parse(path).getroot())
    for box, label in pairwise(parts):
        if box.tag.endswith("rect") and box.get("x"):
            sign = "-" if box.get("stroke-dasharray") else ""
            rows.setdefault(float(box.get("y", "nan")), []).append(f"{sign}{label.text}")
    return [" ".join(rows[y]) for y in sorted(rows)]


def test_the_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "pictures.py", tmp_path], check=True)
    kept = {path.stem: path for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    drawn = {path.stem: path for path in tmp_path.iterdir()}
    assert set(drawn) == set(kept) == {*DRAWN, *CURVES, *TERMINALS}
    for name, path in drawn.items():
        content = words_of if name in TERMINALS else Path.read_text
        assert content(path) == content(kept[name]), name


def words_of(terminal: Path) -> list[str]:
    """The lines of a terminal, but for the bytes on the disk, which another file system counts otherwise."""
    texts = ["".join(text.itertext()).split() for text in ElementTree.parse(terminal).getroot().iter(f"{SVG}text")]
    assert len(texts) > 5
    return [" ".join(words) for words in texts if words[:2] != ["on", "disk"]]


@pytest.mark.parametrize("name", TERMINALS)
def test_a_terminal_asks_no_other_machine_for_a_font(name: str) -> None:
    assert "@font-face" not in (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_has_a_point_for_each_number(name: str) -> None:
    rows = (ROOT / "docs" / "pictures" / f"{name}.csv").read_text().splitlines()[1:]
    lines = ElementTree.parse(ROOT / "docs" / "pictures" / f"{name}.svg").getroot().iter(f"{SVG}polyline")
    points = [len(line.get("points", "").split()) for line in lines if line.get("stroke-width") == "1"]
    assert sum(points) == len(rows)


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_shows_the_steps_of_its_view(name: str) -> None:
    rows = cells_of(ROOT / "docs" / "pictures" / f"{name}.svg")
    assert rows[:3] == [" ".join(map(str, range(count))) for count in (11, 10, 10)]
    assert rows[3:] == DRAWN[name]


@pytest.mark.parametrize("name", [*DRAWN, *CURVES, *TERMINALS])
def test_every_picture_is_on_a_page(name: str) -> None:
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    assert any(f"pictures/{name}.svg)" in page for page in pages)
