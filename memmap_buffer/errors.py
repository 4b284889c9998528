"""The errors of this package: one tree of classes, all picklable, with the things that a message names as attributes.

A message says where, what was got, what was expected, and the remedy. Code that caught memmap-replay-buffer's
`ValueError`s keeps working: an error that is a ValueError in that package is one here, too.
"""

from __future__ import annotations

from typing import Any


class MemmapBufferError(Exception):
    """Base of every error of this package.

    Args:
        message: the whole text for a person.
        named: the things that the message names (`field=`, `path=`, `slot=` …), which become attributes of the error.
    """

    def __init__(self, message: str = "", **named: Any) -> None:
        super().__init__(message)
        self.named = named

    def __getattr__(self, name: str) -> Any:
        named = self.__dict__.get("named", {})
        if name in named:
            return named[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.named, getattr(self, "__notes__", []))


class SchemaError(MemmapBufferError, ValueError):
    """A declaration or a value does not fit the schema."""


class SchemaMismatchError(SchemaError):
    """The folder holds a buffer of another schema; `differences` lists them."""


class NotABufferError(SchemaError):
    """The folder holds no buffer: there is no `schema.json`, or it is not ours."""


class CorruptBufferError(MemmapBufferError, OSError):
    """A file of the buffer is not what the schema says: `path` names it."""


class BufferFullError(MemmapBufferError, ValueError):
    """A buffer that is not circular has no room for another episode."""


class BufferLockedError(MemmapBufferError, TimeoutError):
    """Another writer holds the folder's lock: its `pid` and `host`, and `since` when."""


class ReadOnlyError(MemmapBufferError, PermissionError, ValueError):
    """The buffer cannot be written: it was opened for reading, its layout is packed, or the system forbids it."""


class EpisodeStateError(MemmapBufferError, RuntimeError, ValueError):
    """The call does not fit the state of the episode: none is open, it is over, or it is too long."""


class EpisodeIndexError(MemmapBufferError, IndexError, ValueError):
    """There is no episode at that position."""


class WriterLostError(MemmapBufferError, RuntimeError):
    """This object must not write any more: `reason` is "forked", "fenced", "taken over", "poisoned" or "moved"."""


class StaleEpisodeError(MemmapBufferError, RuntimeError, ValueError):
    """An episode was overwritten or cleared before its rows were read."""


class RemoteError(MemmapBufferError, OSError):
    """A request to an object store failed.

    Attributes:
        url: of the object.
        asked: the request.
        came: the answer of the store, or the error.
        tries: how many times it was sent.
        missing: whether the store has no such object.
    """


class NotEnoughDataError(MemmapBufferError, RuntimeError, ValueError):
    """There are no items to draw from, or fewer than were asked for."""


def _rebuild(kind: type[MemmapBufferError], message: str, named: dict[str, Any], notes: list[str]) -> MemmapBufferError:
    error = kind(message, **named)
    if notes:
        error.__notes__ = list(notes)
    return error
