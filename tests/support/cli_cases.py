"""A folder for the tests of the command line, what is in it, and ways to run the command on it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer import Field, ReplayBuffer

FIELDS = {
    "observation": {"state": Field("float32", (3,), final=True), "pixels": Field("uint8", (8, 10, 3), final=True)},
    "action": "int",
    "reward": "float",
    "terminated": "bool",
    "truncated": "bool",
}
META_FIELDS = {"task_id": "int", "success": "bool", "name": "U8"}
RUN = "import sys; from memmap_buffer.cli.command import main; sys.exit(main())"

SLOW = """
import time
from memmap_buffer.format import syscalls
class Slow(syscalls.System):
    def pwrite(self, fd, data, offset):
        time.sleep(0.002)
        return os.pwrite(fd, data, offset)
import os
syscalls.system = Slow()
"""


@dataclass
class Case:
    """A ring of eight episodes, in which the episodes 2 … 9 are visible, and how long and rewarding each is."""

    folder: Path
    lengths: dict[int, int] = field(default_factory=dict)
    returns: dict[int, float] = field(default_factory=dict)


def episode_of(number: int, length: int) -> dict[str, Any]:
    """The arrays of episode `number`: odd ones end by `terminated`, even ones by `truncated`, number 5 by nothing."""
    rng, last = np.random.default_rng(number), np.arange(length) == length - 1
    return {
        "observation": {
            "state": rng.normal(size=(length + 1, 3)).astype("float32"),
            "pixels": rng.integers(0, 256, (length + 1, 8, 10, 3), dtype="uint8"),
        },
        "action": rng.integers(0, 4, length),
        "reward": rng.normal(size=length).astype("float32"),
        "terminated": last & (number % 2 == 1 and number != 5),
        "truncated": last & (number % 2 == 0),
        "task_id": number % 3,
        "success": number % 4 == 0,
        "name": f"e{number}",
    }


def make(folder: Path, numbers: range = range(10), **options: Any) -> Case:
    """Record a case; with other numbers it has other episodes."""
    case = Case(folder)
    sizes = {"max_episodes": 8, "max_timesteps": 40, "circular": True} | options
    with ReplayBuffer(folder, fields=FIELDS, meta_fields=META_FIELDS, **sizes) as buffer:
        for number in numbers:
            arrays = episode_of(number, 7 + 3 * number % 20)
            buffer.store_episode(**arrays)
            case.lengths[number] = len(arrays["reward"])
            case.returns[number] = float(arrays["reward"].sum(dtype=np.float64))
        for number in list(case.lengths)[: -sizes["max_episodes"]]:
            del case.lengths[number], case.returns[number]
    return case


def main(*arguments: Any) -> int:
    """The command in this process, and the number that it ends with."""
    from memmap_buffer.cli import app

    return app.main([str(argument) for argument in arguments])


def run(*arguments: Any, given: str = "", before: str = "") -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own, not in a terminal; `before` is code to run first."""
    command = [sys.executable, "-c", f"{before}\n{RUN}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, input=given)


def read_json(text: str) -> Any:
    """JSON as other readers have it: with no NaN or Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)
