"""The package runs on the oldest Python and the oldest numpy that are promised, whichever ones run these tests.

A check of the sources needs no such Python, and sees what no smoke run reaches. The smoke run needs one with numpy and
filelock: `.venv-oldest`, which `scripts/install test` makes where that Python is there, or the one on the path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLDEST = re.findall(r'^requires-python = ">=(3\.\d+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
BACKPORTS = ("typing_extensions",)  # it comes with torch
SMOKE = """
import importlib, pkgutil, sys
import memmap_buffer
from memmap_buffer import ConcatBuffer, Field, ReplayBuffer, verify

folder, imported, without = sys.argv[1], 0, set()
for module in pkgutil.walk_packages(memmap_buffer.__path__, "memmap_buffer."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        without.add(error.name.split(".")[0])
    else:
        imported += 1
with ReplayBuffer(folder, 3, 5, {"x": Field("float32", (2,), final=True), "n": "int"}, circular=True) as buffer:
    for number in range(5):
        with buffer.one_episode() as episode:
            for t in range(4):
                buffer.store(x=[number, t], n=number)
            episode.final(x=[number, 4])
    buffer.update(2, n=[9] * 4)
    buffer.delete(1)
    assert buffer.serials.tolist() == [2, 4]
    assert buffer.episode(1)["n"].tolist() == [9] * 4
    assert buffer.statistics()["x"].count == 10
    assert buffer.update_priorities([[4, 1]], [2.0]) == 0
    if "torch" not in without:
        for options in ({}, {"n_steps": 2}, {"timestep_level": True, "prioritized": True}):
            assert len(buffer.sample(2, **options)["n"]) == 2
            assert sum(1 for _ in buffer.dataloader(2, shuffle=True, num_workers=1, **options))
        assert len(ConcatBuffer([folder]).batch(timestep_level=True)["n"]) == 8
assert verify(folder) == []
print(imported, *without)
"""


def newer_than_promised(*paths: Path) -> str:
    """What vermin has to say of files that need a newer Python; nothing where none does."""
    how = [f"-t={OLDEST}-", "--violations", "--quiet", "--eval-annotations", *[f"--backport={b}" for b in BACKPORTS]]
    code = "from vermin import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *how, *map(str, paths)], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout or not done.returncode, (
        done
    )  # of syntax that this Python does not know it says so, and returns 0
    return done.stdout


def test_no_source_needs_a_newer_python_than_is_promised() -> None:
    assert newer_than_promised(ROOT / "memmap_buffer", ROOT / "examples") == ""


@pytest.mark.parametrize(
    "source",
    [
        "from typing import Self",
        "import tomllib",
        "try:\n    pass\nexcept* ValueError:\n    pass",
        "from enum import StrEnum",
        "def f(a: Self): ...\nimport typing\nx: typing.Self = 1",
        "from datetime import UTC",
    ],
)
def test_the_check_finds_what_is_newer(tmp_path: Path, source: str) -> None:
    (tmp_path / "newer.py").write_text(source)
    assert "newer.py" in newer_than_promised(tmp_path)


def test_the_check_lets_the_oldest_and_its_backports_pass(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("from typing_extensions import Self\nmatch 1:\n    case int() | str(): ...\n")
    assert newer_than_promised(tmp_path) == ""


def oldest_python() -> str:
    """A Python of the promised version that has numpy and filelock; the test is skipped where there is none."""
    made = ROOT / ".venv-oldest" / "bin" / "python"
    for python in filter(None, [str(made) if made.exists() else None, shutil.which(f"python{OLDEST}")]):
        code = f"import sys, numpy, filelock; assert '%d.%d' % sys.version_info[:2] == {OLDEST!r}"
        if not subprocess.run([python, "-c", code], capture_output=True).returncode:
            return python
    return pytest.skip(f"there is no Python {OLDEST} with numpy and filelock; scripts/install test makes .venv-oldest")


def test_the_oldest_python_imports_records_and_reads(tmp_path: Path) -> None:
    command = [oldest_python(), "-W", "error", "-c", SMOKE, str(tmp_path / "buffer")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported, *without = done.stdout.split()
    assert int(imported) > 70
    ours = {"torch", "gymnasium", "h5py", "minari", "numba", "pandas", "pyarrow", "ray", "rich", "typer", "torchrl"}
    trainers = {"d3rlpy", "jax", "lightning", "skrl"}
    assert set(without) <= ours | trainers | {"av", "PIL", "matplotlib", "rerun", "tensordict", "tqdm"}
