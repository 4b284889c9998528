"""Where `memmap-buffer` begins: with the extra `cli` all commands, without it the four that mend and copy."""

from __future__ import annotations

from collections.abc import Sequence

from memmap_buffer.cli import plain

NEEDED = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args: arguments: without the program's name; None for those of this process.
    Returns: 0: all is well, 1: a problem was found, 2: it could not be done, or was misspelt, 130: interrupted.
    """
    try:
        from memmap_buffer.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        return plain.main(arguments)
    return app.main(arguments)
