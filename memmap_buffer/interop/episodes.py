"""Whole episodes into a new buffer and out of one: the part that all importers and exporters share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from os import PathLike
from typing import Any

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.errors import SchemaError
from memmap_buffer.interop.columns import flatten
from memmap_buffer.interop.extra_json import write_extra, write_names
from memmap_buffer.names import Names
from memmap_buffer.schema import Schema


def import_episodes(
    folder: str | PathLike[str],
    episodes: Iterable[Mapping[str, Any]],
    fields: Mapping[str, Any] | Schema,
    meta_fields: Mapping[str, Any] | None = None,
    *,
    lengths: Sequence[int],
    options: Mapping[str, Any],
    names: Names | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ReplayBuffer:
    """Store episodes in a new buffer, which is closed if that fails.

    Args:
        folder: where; see `ReplayBuffer`.
        episodes: each as for `ReplayBuffer.store_episode`.
        fields: as for `ReplayBuffer`.
        meta_fields: as for `ReplayBuffer`.
        lengths: of the episodes; the buffer is as large as they need.
        options: of `ReplayBuffer`, also other sizes.
        names: the changed keys, to be stored for exports.
        extra: name -> JSON value, to be stored in the folder's `extra/`.

    Returns:
        The buffer, open for writing.
    """
    sizes = {"max_episodes": len(lengths), "max_timesteps": max([1, *lengths])}
    buffer = ReplayBuffer(folder, fields=fields, meta_fields=meta_fields, **{**sizes, **options})
    try:
        for episode in episodes:
            buffer.store_episode(**episode)
        if names is not None:
            write_names(buffer, names)
        for name, value in (extra or {}).items():
            write_extra(buffer, name, value)
    except BaseException:
        buffer.close()
        raise
    return buffer


def exported_episodes(buffer: ReplayBuffer) -> Iterator[tuple[range, dict[str, Any]]]:
    """(rows among the timesteps of all episodes, columns by dotted names) of each episode, the oldest first."""
    bounds = pairwise(accumulate(buffer.episode_lens.tolist(), initial=0))
    for i, (start, stop) in enumerate(bounds):
        yield range(start, stop), flatten(buffer.episode(i))


def require_fields(buffer: ReplayBuffer, names: Iterable[str], format_name: str) -> None:
    """Raise SchemaError unless the buffer has these fields, without fields within them."""
    for name in names:
        if name not in buffer.schema.fields:
            raise SchemaError(
                f"{buffer.folder}: it has no field {name!r}, which {format_name} needs flat; flatten or rename it"
            )


def episode_bounds(ends: Any) -> list[tuple[int, int]]:
    """(first row, row after the last) of each episode in flat arrays.

    Args:
        ends: (rows,) bool, true at the last row of an episode; the last row of all ends one in any case.
    """
    stops = np.union1d(np.flatnonzero(ends) + 1, len(ends)).tolist()
    return list(pairwise([0, *stops])) if len(ends) else []
