"""Paths as users write them. Touches no file."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from memmap_buffer.errors import SchemaError

AnyPath: TypeAlias = str | PathLike[str]
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[a-z]+::")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_RELATIVE = re.compile(r"(?:^|::)((?:file|local)://)(?![/~])")


def is_url(place: object) -> bool:
    """Whether a place is a URL: of an object store, or of another machine.

    Args:
        place: a text; anything else is no URL.
    """
    return isinstance(place, str) and _URL.match(place) is not None


def url_of(place: str) -> str:
    """`place` as text: the URL of an object store, or the absolute path of a folder used as one, as `path_of` gives it.

    Raises:
        SchemaError: a slash is missing, so the place would be a folder below the one in which the program was started.
    """
    _require_slashes(str(place))
    if match := _RELATIVE.search(str(place)):
        raise SchemaError(f"{place}: got no absolute path behind '{match[1]}', expected one, as in file:///data/run7")
    return str(place) if is_url(str(place)) else str(path_of(place))


def _require_slashes(place: str) -> None:
    if match := _ONE_SLASH.match(place):
        scheme = match[1]
        like = "file:///data/run7" if scheme == "file" else f"{scheme}://…"
        raise SchemaError(
            f"got a URL that begins with '{scheme}:/', expected two slashes, as in {like}; give it as text, as a Path "
            "keeps only one"
        )


def path_of(place: AnyPath) -> Path:
    """An absolute path, as the process may change its folder later; `~` and `~user` are replaced by home folders.

    Args:
        place: as a user writes it; "./~" is a name like any other.

    Raises:
        SchemaError: there is no such user, or the place is a URL, perhaps one that lost a slash.
    """
    text = place if isinstance(place, str) else str(Path(place))
    _require_slashes(text)
    if is_url(text):
        raise SchemaError(
            f"{text}: got a URL, expected a path: episodes are recorded and changed on a disk; `publish` the folder, "
            "and read it by ReplayBuffer.from_folder(url) or ConcatBuffer.from_root(url)"
        )
    path = Path(text)
    if not text.startswith("~"):
        return path.absolute()
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise SchemaError(
            f"{text}: there is no home folder {path.parts[0]!r}; for one of that name give './{text}'"
        ) from None
