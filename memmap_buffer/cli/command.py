"""The entry point of `memmap-buffer`: all commands with the extra `cli`; without it the four of `minimal`."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Sequence

from memmap_buffer.cli import minimal

NEEDED = ("typer", "rich")
IN_ASCII = dict(
    zip("▁▂▃▄▅▆▇█…–×→≤≥αγ", "._-=+*%#~-x><>ag", strict=True)
)  # each as wide as the original, because tables are laid out before


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: the words behind the program's name; None: those of this process.

    Returns:
        0: all is well, 1: a problem was found, 2: the command failed, or was misspelt, 130: interrupted.
    """
    _replace_what_the_terminal_lacks()
    try:
        from memmap_buffer.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        return minimal.main(arguments)
    return app.main(arguments)


def _replace_what_the_terminal_lacks() -> None:
    """Let the output print ASCII for characters that its encoding lacks, instead of ending the command by an error."""
    codecs.register_error("memmap_buffer.cli", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="memmap_buffer.cli")


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError), "only output streams have this handler"
    return "".join(IN_ASCII.get(char, "?") for char in error.object[error.start : error.end]), error.end
