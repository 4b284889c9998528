"""What every command shares: how folders and options are spelt, and how text, tables and bars reach the terminal."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from memmap_buffer.errors import MemmapBufferError

FolderArgument = Annotated[Path, typer.Argument(help="A folder of episodes.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Reward = Annotated[str, typer.Option("--reward", help="The field whose sum is an episode's return.")]
WIDE = 100_000  # columns of a pipe: whoever reads it wants whole lines
POLL = 0.2  # seconds between two looks at how far a copy is


class Problem(MemmapBufferError):
    """A command that cannot be carried out as it was given: its text is the one line that the user sees."""


def say(text: str = "") -> None:
    """One line on stdout, as it is: no markup in it, and nothing that steers the terminal."""
    sys.stdout.write(f"{clean(text)}\n")


def say_json(value: Any) -> None:
    """A value as JSON that every reader takes: arrays as lists, what is no number as null."""
    in_ascii = (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")
    say(json.dumps(_plain(value), indent=2, ensure_ascii=in_ascii))


def clean(text: str) -> str:
    """Text without control characters: a stranger's folder has names and text fields, and a terminal obeys them."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def show_table(title: str, columns: Mapping[str, Sequence[Any]]) -> None:
    """A table of columns of equal length; numbers are aligned to the right.

    What is wider than the terminal is shown as several tables below each other, each with the first column.
    """
    console = _console(sys.stdout)
    cells = {clean(name): [clean(cell_of(v)).replace("\n", " ") for v in values] for name, values in columns.items()}
    right = [
        all(value is None or isinstance(value, (int, float, np.number, np.bool_)) for value in v)
        for v in columns.values()
    ]
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


def _that_fit(cells: Mapping[str, Sequence[str]], width: int) -> Iterator[list[int]]:
    """The columns of each of the tables that columns are shown as, by their positions."""
    wide = [max(map(cell_len, [name, *column])) + 2 for name, column in cells.items()]  # 2: the space between columns
    shown, used = [0], wide[0]
    for i in range(1, len(wide)):
        if used + wide[i] - 2 > width and len(shown) > 1:
            yield shown
            shown, used = [0], wide[0]
        shown.append(i)
        used += wide[i]
    yield shown


def cell_of(value: Any) -> str:
    """A value as a table shows it."""
    if value is None or (isinstance(value, (float, np.floating)) and np.isnan(value)):
        return "-"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, (float, np.floating)) else str(value)


def bytes_of(count: float) -> str:
    """A number of bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def agreed(question: str, yes: bool) -> bool:
    """Whether the user agrees; an end of the input is a no: a script has nobody to ask."""
    if yes:
        return True
    sys.stdout.write(f"{clean(question)} [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def temporary(target: Path) -> Path:
    """A new folder beside `target`, to fill before it takes its place."""
    try:
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise Problem(f"{target}: {error.strerror}") from error


@contextmanager
def named_as(target: Path, *places: Path) -> Iterator[None]:
    """Errors of the block name `target`, where they would name the temporary places in which it is made."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (MemmapBufferError, OSError) as error:
        text = str(error)
        for place in places:
            text = text.replace(str(place), str(target))
        if text == str(error):
            raise
        raise Problem(text) from error


def end(code: int) -> None:
    """End the command with an exit code; 0 goes on."""
    if code:
        raise typer.Exit(code)


# Progress goes to stderr, and only where that is a terminal


@contextmanager
def progress(what: str, total: float | None, *, in_bytes: bool = False) -> Iterator[Callable[[float], None]]:
    """A bar for the time of the block; call what it gives with how much is done. `total` None: of nobody knows what."""
    if not _watched():
        yield lambda done: None
        return
    count = DownloadColumn(binary_units=True) if in_bytes else TextColumn("{task.completed:.0f}/{task.total:.0f}")
    columns = [TimeElapsedColumn()] if total is None else [count, TimeRemainingColumn()]
    console = _console(sys.stderr)
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True) as bar:
        task = bar.add_task(clean(what), total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def watching(what: str, folder: Path, total: float) -> Iterator[None]:
    """A bar for the time of a call that fills a folder: what the folder takes on disk, of `total` bytes."""
    over = threading.Event()

    def look(tell: Callable[[float], None]) -> None:
        while not over.wait(POLL):
            with suppress(OSError):  # a file was taken away between being listed and looked at
                tell(disk_use(folder)[0])

    with progress(what, total, in_bytes=True) as tell:
        watcher = threading.Thread(target=look, args=(tell,), daemon=True)
        if _watched():
            watcher.start()
        try:
            yield
        finally:
            over.set()
            if watcher.ident is not None:
                watcher.join()


def disk_use(folder: Path) -> tuple[int, int]:
    """(bytes that the files of a folder take on disk, bytes that they have in all, holes included)."""
    found = [path.lstat() for path in list(folder.rglob("*")) if not path.is_symlink() and path.is_file()]
    return sum(status.st_blocks * 512 for status in found), sum(status.st_size for status in found)


def _console(stream: Any) -> Any:
    return Console(file=stream, width=None if stream.isatty() else WIDE, markup=False, highlight=False, emoji=False)


def _watched() -> bool:
    return sys.stderr.isatty()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    return None if isinstance(value, float) and not np.isfinite(value) else value
