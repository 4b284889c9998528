"""JSON documents in the folder's `extra/`, which `pack` and `snapshot` copy: facts of a data set that are no field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.errors import CorruptBufferError
from memmap_buffer.names import Names

NAMES = "names"


def write_extra(buffer: ReplayBuffer, name: str, value: Any) -> None:
    """Store a value that JSON can hold as `extra/<name>.json`, which is replaced at once or not at all."""
    path = _path(buffer, name)
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".json.new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(path)


def read_extra(buffer: ReplayBuffer, name: str) -> Any:
    """The value of `extra/<name>.json`; None: there is no such file.

    Raises:
        CorruptBufferError: the file holds no JSON.
    """
    path = _path(buffer, name)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptBufferError(f"{path}: {error}; remove it to go on without", path=path) from error


def read_names(buffer: ReplayBuffer, fixed: Mapping[str, Any] | None = None) -> Names:
    """The stored keys that importers changed into names of fields; `fixed` as for `Names`."""
    return Names(read_extra(buffer, NAMES), fixed)


def write_names(buffer: ReplayBuffer, names: Names) -> None:
    """Store the changed keys, so that every export restores them."""
    if names.changed != (read_extra(buffer, NAMES) or {}):
        write_extra(buffer, NAMES, names.changed)


def _path(buffer: ReplayBuffer, name: str) -> Path:
    return buffer.folder / "extra" / f"{name}.json"
