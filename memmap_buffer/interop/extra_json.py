"""What a neighbour keeps beside the episodes: JSON in the folder's `extra/`, which `pack` and `snapshot` copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.errors import CorruptBufferError
from memmap_buffer.names import Names

NAMES = "names"


def write_beside(buffer: ReplayBuffer, name: str, value: Any) -> None:
    """Keep `value`, which JSON can hold, under `name`; what was there is replaced at once or not at all."""
    path = _path(buffer, name)
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".json.new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(path)


def read_beside(buffer: ReplayBuffer, name: str) -> Any:
    """What was kept under `name`, or None. Raises CorruptBufferError: the file holds no JSON."""
    path = _path(buffer, name)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptBufferError(f"{path}: {error}; remove it to go on without", path=path) from error


def read_names(buffer: ReplayBuffer, fixed: Mapping[str, Any] | None = None) -> Names:
    """The keys that the fields were named after, as far as they are others; `fixed` as for `Names`."""
    return Names(read_beside(buffer, NAMES), fixed)


def write_names(buffer: ReplayBuffer, names: Names) -> None:
    """Keep the keys that were changed, so that every export gives them back."""
    if names.changed != (read_beside(buffer, NAMES) or {}):
        write_beside(buffer, NAMES, names.changed)


def _path(buffer: ReplayBuffer, name: str) -> Path:
    return buffer.folder / "extra" / f"{name}.json"
