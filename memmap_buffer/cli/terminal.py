"""Input and output of the commands: the arguments that several share, and JSON and tables on the terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memmap_buffer import MemmapBufferError
from memmap_buffer.cli.minimal import clean, say

WIDE = 100_000  # characters a line in a pipe, where lines are not wrapped
NAME, TEXT = 24, 36  # the most characters of a name and of a text in a table that is wider than the terminal
GAP = 2  # characters between two columns of a table

FolderArgument = Annotated[Path, typer.Argument(help="A folder of episodes.", show_default=False)]
Place = Annotated[
    str,
    typer.Argument(metavar="FOLDER|URL", help="A folder of episodes, or where one was published.", show_default=False),
]
Target = Annotated[Path, typer.Argument(help="A new folder.", show_default=False)]
Episode = Annotated[str, typer.Argument(help="The episode's number, or first or last.", show_default=False)]


def separate(names: list[str] | None) -> list[str] | None:
    """The names in a list of words, of which each may hold several with commas between."""
    return names and [part for name in names for part in name.split(",")]


Episodes = Annotated[
    list[str] | None, typer.Argument(callback=separate, help="Numbers, ranges such as 3-7, first, last.")
]
Fields = Annotated[
    list[str] | None, typer.Option("--field", callback=separate, help="Only this field; may be repeated, or a,b.")
]
Where = Annotated[
    list[str] | None, typer.Option("--where", help="Only these, as in length>=20 or task_id=1; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Reward = Annotated[str, typer.Option("--reward", help="The field whose sum is an episode's return.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


class Problem(MemmapBufferError):
    """A command cannot be carried out; the user sees the text as one line."""


def say_json(value: Any) -> None:
    """Print a value as JSON that every parser accepts: arrays as lists, NaN and infinities as null."""
    in_ascii = (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")
    say(json.dumps(_jsonable(value), indent=2, ensure_ascii=in_ascii))


def show_table(title: str, columns: Mapping[str, Sequence[Any]]) -> None:
    """Print a table of columns of equal length; numbers are aligned to the right.

    If the table is wider than the terminal, names are folded and long texts cut. If it is still wider, it is printed as
    several tables one below the other, each with the first column.
    """
    width = None if sys.stdout.isatty() else WIDE
    console = Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
    cells = {clean(name): [clean(cell_of(v)).replace("\n", " ") for v in values] for name, values in columns.items()}
    right = [
        all(value is None or isinstance(value, (int, float, np.number, np.bool_)) for value in v)
        for v in columns.values()
    ]
    if sum(_widths(cells)) - GAP > console.width:
        cells = _narrowed(cells, console.width)
    for number, shown in enumerate(_that_fit(cells, console.width)):
        heading = Text(clean(title)) if title and not number else None
        table = Table(title=heading, title_justify="left", box=None, pad_edge=False)
        for i in shown:
            table.add_column(Text(list(cells)[i]), justify="right" if right[i] else "left", overflow="fold")
        for row in zip(*(list(cells.values())[i] for i in shown), strict=True):
            table.add_row(*map(Text, row))
        if number:
            say()
        console.print(table)


def _widths(cells: Mapping[str, Sequence[str]]) -> list[int]:
    """The width of each column in characters, with the gap behind it."""
    lines = ([line for cell in (name, *column) for line in cell.split("\n")] for name, column in cells.items())
    return [max(map(cell_len, column)) + GAP for column in lines]


def _narrowed(cells: Mapping[str, Sequence[str]], width: int) -> dict[str, list[str]]:
    """The cells with names, those of the heads and the first column, folded into lines, and long texts cut."""
    most = max(TEXT, width // 3)
    cut = [[f"{cell[: most - 1]}…" if len(cell) > most else cell for cell in column] for column in cells.values()]
    cut[0] = [_folded(cell) for cell in next(iter(cells.values()))]
    return dict(zip(map(_folded, cells), cut, strict=True))


def _folded(name: str) -> str:
    """A name folded into several lines: a line for each part of a dotted name; a long part is broken between words."""
    lines = [""]
    for group in re.split(r"(?<=\.)(?=\D)", name):
        for part in [group] if len(group) < NAME else re.split(r"(?<=[_ ])", group):
            if lines[-1].strip() and len(lines[-1]) + len(part) > NAME:
                lines.append(" ")
            lines[-1] += part
    return "\n".join(lines)


def _that_fit(cells: Mapping[str, Sequence[str]], width: int) -> Iterator[list[int]]:
    """For each table to print, the positions of its columns: the first one, and as many others as fit into `width`."""
    wide = _widths(cells)
    shown, used = [0], wide[0]
    for i in range(1, len(wide)):
        if used + wide[i] - GAP > width and len(shown) > 1:
            yield shown
            shown, used = [0], wide[0]
        shown.append(i)
        used += wide[i]
    yield shown


def cell_of(value: Any) -> str:
    """A value as text for a table."""
    if value is None or (isinstance(value, (float, np.floating)) and np.isnan(value)):
        return "-"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return number_of(float(value)) if isinstance(value, (float, np.floating)) else str(value)


def number_of(value: float) -> str:
    """A float for people: four significant digits, or six from 1000 on; `--json` has all."""
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.6g}"


def bytes_of(count: float) -> str:
    """A number of bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def end(code: int) -> None:
    """End the command with an exit code; does nothing for 0."""
    if code:
        raise typer.Exit(code)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _jsonable(value.tolist())
    if isinstance(value, complex):
        return [_jsonable(value.real), _jsonable(value.imag)]
    return None if isinstance(value, float) and not np.isfinite(value) else value
