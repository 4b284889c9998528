"""Paths as users write them. Touches no file."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TypeAlias

from memmap_buffer.errors import SchemaError

AnyPath: TypeAlias = str | PathLike[str]


def path_of(given: AnyPath) -> Path:
    """A path in which `~` and `~user` are home folders; "./~" is a name like any other.

    Raises:
        SchemaError: there is no such user.
    """
    text = given if isinstance(given, str) else str(Path(given))
    path = Path(text)
    if not path.parts or not path.parts[0].startswith("~"):
        return path
    if not text.startswith("~"):
        return Path.cwd() / path  # `Path` has dropped the "./" by which it is no home
    try:
        return path.expanduser()
    except RuntimeError:
        raise SchemaError(
            f"{text}: there is no home folder {path.parts[0]!r}; for one of that name give './{text}'"
        ) from None
