"""Paths as users write them. Touches no file."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from memmap_buffer.errors import SchemaError

AnyPath: TypeAlias = str | PathLike[str]
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[a-z]+::")


def is_url(given: object) -> bool:
    """Whether a text names something in an object store, or on another machine."""
    return isinstance(given, str) and _URL.match(given) is not None


def path_of(given: AnyPath) -> Path:
    """A path in which `~` and `~user` are home folders; "./~" is a name like any other.

    Raises:
        SchemaError: there is no such user.
    """
    text = given if isinstance(given, str) else str(Path(given))
    if is_url(text):
        raise SchemaError(
            f"{text}: got a URL, expected a path: episodes are recorded and changed on a disk; `publish` the folder, "
            "and read it by ReplayBuffer.from_folder(url) or ConcatBuffer.from_root(url)"
        )
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
