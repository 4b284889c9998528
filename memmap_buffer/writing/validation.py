"""Whole episodes as users pass them, checked and encoded; positions of episodes. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer.dtypes import Array, of_mask, to_numpy
from memmap_buffer.errors import EpisodeIndexError, SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import Field, Schema


class Whole(NamedTuple):
    """A whole episode as it is stored.

    Attributes:
        columns: field -> (T, *field), and one row more for the final observation where it has one.
        length: T.
        has_final: whether it has a final observation.
        meta: meta field -> (*field), those that were given.
    """

    columns: dict[str, Array]
    length: int
    has_final: bool
    meta: dict[str, Array]


def whole_episode(schema: Schema, arrays: Mapping[str, Any], where: str = "store_episode") -> Whole:
    """A whole episode, checked and encoded.

    Args: arrays: field -> (T, *field), or (T + 1, *field) for fields with `final`; meta field -> value.
        where: the method, for errors.
    Raises: SchemaError: an unknown field, one missing, or lengths that differ.
    """
    flat = schema.flatten(arrays)
    if not flat.keys() <= schema.all.keys():
        schema.require(flat, where)
    columns = schema.encode_all(schema.fields, flat, 1, hint="; the first axis is time")
    if not columns:
        raise SchemaError(f"{where}: no per-timestep field was given; give (T, *field) arrays")
    length = min(map(len, columns.values()))
    longer = {name: len(column) for name, column in columns.items() if len(column) != length}
    if longer and longer != dict.fromkeys(schema.final_names, length + 1):
        lengths = ", ".join(f"{name}: {len(column)}" for name, column in columns.items())
        raise SchemaError(
            f"{where}: the lengths differ ({lengths}); only fields with final=True "
            "may have one entry more, and then all of them"
        )
    if length < 1:
        raise SchemaError(f"{where}: got arrays of length 0, expected at least one timestep")
    if len(columns) < len(schema.fields):
        add_defaults(schema, columns, (length,), where)
    meta = copied(schema, schema.encode_all(schema.meta_fields, flat, 0)) if schema.meta_fields else {}
    return Whole(columns, length, bool(longer), meta)


def copied(schema: Schema, stored: Mapping[str, Array]) -> dict[str, Array]:
    """Copies of entries that are encoded already; one of no axes may be a scalar."""
    return {name: np.array(value, schema.all[name].entries, order="C") for name, value in stored.items()}


def whole_final(schema: Schema, observation: Mapping[str, Any]) -> dict[str, Any]:
    """A final observation by dotted names. Raises SchemaError unless it is of every field with `final`."""
    flat, names = schema.flatten(observation), schema.final_names
    schema.require_fields(flat, "final (fields declared with final=True)", names)
    missing = sorted(names - flat.keys())
    if missing:
        raise SchemaError(f"final: {', '.join(map(repr, missing))} missing; all fields with final=True belong together")
    return flat


def add_defaults(schema: Schema, columns: dict[str, Array], axes: tuple[int, ...], where: str) -> None:
    """Add the fields that were left out of some timesteps, (*axes, *field). Raises SchemaError: one has no default."""
    for name, field in schema.fields.items():
        if name not in columns:
            columns[name] = np.broadcast_to(require_default(field, name, where), (*axes, *field.cell))


def require_default(field: Field, name: str, where: str) -> Array:
    """The default of a field that was left out. Raises SchemaError where it has none."""
    if field.default is None:
        raise SchemaError(
            f"field {name!r}, {where}: missing, and it has no default; store it, or declare one: "
            f"({field.dtype!r}, {field.shape}, default)",
            field=name,
        )
    return field.fill


def positions_of(indices: Any, count: int) -> tuple[IntArray, bool]:
    """Episode positions from an int, list, array, slice or None (all), and whether it was a single one.

    Raises: IndexError: no such episode.
    """
    if indices is None:
        return np.arange(count), False
    if isinstance(indices, slice):
        return np.arange(*indices.indices(count)), False
    array = to_numpy(indices)
    if array.ndim > 1 or (array.dtype.kind not in "iu" and array.size):
        got = f"got {array.dtype} {array.shape}"
        raise SchemaError(f"episodes: {got}, expected whole numbers, a slice or None{of_mask(array)}")
    positions = np.atleast_1d(array).astype(np.int64)
    outside = (positions < -count) | (positions >= count)
    if outside.any():
        raise EpisodeIndexError(
            f"episode {positions[outside][0]}: the buffer has {count}", position=int(positions[outside][0])
        )
    return positions % max(count, 1), array.ndim == 0
