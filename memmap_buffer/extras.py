"""The one-line error for a neighbour that is not installed. Imports nothing by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around the imports of what the extra `name` installs.

    Raises: ImportError: one of them failed; the text is the command that installs it.
    """
    try:
        yield
    except ImportError as error:
        missing = error.name or "a package"
        raise ImportError(
            f"{missing} cannot be imported; install it by: pip install 'memmap-buffer[{name}]'", name=error.name
        ) from error
