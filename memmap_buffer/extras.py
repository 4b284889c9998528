"""The one-line error for an optional package that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """A block that imports the packages of an extra.

    Args:
        name: of the extra.

    Raises:
        ImportError: one of them cannot be imported; the text has the command that installs it.
    """
    try:
        yield
    except ImportError as error:
        missing = f"{error.name or 'a package'} cannot be imported; install it by"
        if not isinstance(error, ModuleNotFoundError):
            missing = f"{error}; install a version that can be used by"
        raise ImportError(f"{missing}: pip install 'memmap-buffer[{name}]'", name=error.name) from error
