"""docs/five-systems.md has every line of the five systems once, in order, and tests of its number."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
FILES = {path.name: path for path in TESTS.rglob("test_*.py")}
NUM_LINES = {"S1": 19, "S2": 7, "S3": 24, "S4": 27, "S5": 21}
ELSEWHERE = {"S3-22", "S3-24", "S4-17", "S4-26", "S4-27"}  # an example, the sum tree, an import and two commands


def rows() -> list[list[str]]:
    page = TESTS.parent / "docs" / "five-systems.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith("| S")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_line_is_in_the_table_once_and_in_order() -> None:
    expected = [f"{system}-{i:02d}" for system, count in NUM_LINES.items() for i in range(1, count + 1)]
    assert [row[0] for row in rows()] == expected


def test_every_line_says_what_is_there_and_what_is_here() -> None:
    assert [row for row in rows() if len(row) != 4 or not row[1] or not row[2]] == []


def test_every_line_has_a_test_of_its_number() -> None:
    for number, _, _, others in rows():
        names = [name for name in others.split(", ") if name]
        assert FILES.keys() >= set(names), number
        files = [FILES[name] for name in names]
        name = re.compile(rf"^def test_\w*{number.replace('-', '_')}(?!\d)", re.MULTILINE)
        sources = [*files, *(TESTS / "requirements").glob("test_five_systems_*.py")]
        assert files if number in ELSEWHERE else any(name.search(file.read_text()) for file in sources), number
