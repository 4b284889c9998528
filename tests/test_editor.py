"""What stands at the door of an editor: options that are checked and completed, and what objects say of themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ROOT / "tests" / "support" / "editor.py"


def test_a_type_checker_finds_wrong_options_and_no_others():
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", str(CODE)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found: dict[int, str] = {}
    for line, text in re.findall(rf"^[^:]*{CODE.name}:(\d+): error: (.*)$", out, re.MULTILINE):
        found[int(line)] = found.get(int(line), "") + text
    marked = {
        number: line.rsplit("# E: ", 1)[1]
        for number, line in enumerate(CODE.read_text().splitlines(), 1)
        if "  # E: " in line
    }
    assert found.keys() == marked.keys(), out
    unnamed = {number: found[number] for number, name in marked.items() if name not in found[number]}
    assert all("No overload variant" in text for text in unnamed.values()), unnamed
    assert len(unnamed) <= 3
