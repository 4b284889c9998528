"""What a call costs: the functions of the package that it passes through, its writes to files and its looks at them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import memmap_buffer

PACKAGE = str(Path(memmap_buffer.__file__).parent)
LOOKS = ("stat", "lstat", "fstat", "access", "open", "scandir", "listdir")


class Way(NamedTuple):
    """The way that a call took.

    Attributes: functions: (file, function) of each of the package's that was called, in order. system: how often which
        built-in function was called from there.
    """

    functions: list[tuple[str, str]]
    system: Counter[str]

    @property
    def writes(self) -> int:
        return self.system["pwrite"]

    @property
    def looks(self) -> int:
        """How often the file system was asked for what stands under a name."""
        return sum(self.system[name] for name in LOOKS)

    def __str__(self) -> str:
        lines = [f"  {file} {name}" for file, name in self.functions]
        return "\n".join([f"{len(lines)} calls, {self.writes} writes, {self.looks} looks", *lines])


def way_of(work: Callable[[], Any]) -> Way:
    """The way that some work takes through the package; what keeps a value, as `functools` does, is left out."""
    way = Way([], Counter())

    def profile(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.endswith("/cached.py"):
            if event == "call":
                way.functions.append((file.removeprefix(PACKAGE), frame.f_code.co_name))
            elif event == "c_call":
                way.system[argument.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return way
