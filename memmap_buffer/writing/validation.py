"""What a user passes for whole episodes, and for changing published ones, checked and encoded. No I/O but reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array, decode, encode, to_numpy
from memmap_buffer.errors import EpisodeIndexError, SchemaError, StaleEpisodeError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.records import FINAL
from memmap_buffer.format.storage import Storage
from memmap_buffer.schema import Field, Schema, nest
from memmap_buffer.writing.episode import require_default


def whole_episode(
    schema: Schema, given: Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, Any], dict[str, Array], int]:
    """A whole episode's arrays.

    Args: given: field -> (T, *field), or (T + 1, *field) for fields with `final`; meta field -> value.
    Returns: (field -> (T, *field) as stored, meta as given, final observations, T).
    Raises: SchemaError: an unknown field, one missing, or lengths that differ.
    """
    flat = schema.flatten(given)
    schema.require(flat, "store_episode")
    columns = {name: _column(schema, name, flat[name]) for name in schema.fields if name in flat}
    if not columns:
        raise SchemaError("store_episode: no per-timestep field was given; give (T, *field) arrays")
    length = min(len(column) for column in columns.values())
    longer = {name for name, column in columns.items() if len(column) != length}
    finals = schema.final_names
    if longer and (longer != finals or any(len(columns[name]) != length + 1 for name in longer)):
        lengths = ", ".join(f"{name}: {len(column)}" for name, column in columns.items())
        raise SchemaError(
            f"store_episode: the lengths differ ({lengths}); only fields with final=True "
            "may have one entry more, and then all of them"
        )
    if length < 1:
        raise SchemaError("store_episode: got arrays of length 0, expected at least one timestep")
    for name, field in schema.fields.items():
        if name not in columns:
            columns[name] = np.broadcast_to(require_default(field, name, "store_episode"), (length, *field.shape))
    meta = {name: flat[name] for name in schema.meta_fields if name in flat}
    return (
        {name: _first(column, length) for name, column in columns.items()},
        meta,
        {name: np.array(columns[name][length], order="C") for name in longer},
        length,
    )


def _column(schema: Schema, name: str, values: Any) -> Array:
    try:
        return schema.fields[name].encode(values, lead=1)
    except SchemaError as error:
        raise SchemaError(f"field {name!r}: {error}; the first axis is time", field=name) from None


def _first(column: Array, length: int) -> Array:
    """The first rows, one behind the other in memory."""
    return column if len(column) == length and column.flags.c_contiguous else np.ascontiguousarray(column[:length])


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
        raise SchemaError(f"episodes: got {array.dtype} {array.shape}, expected whole numbers, a slice or None")
    positions = np.atleast_1d(array).astype(np.int64)
    outside = (positions < -count) | (positions >= count)
    if outside.any():
        raise EpisodeIndexError(
            f"episode {positions[outside][0]}: the buffer has {count}", position=int(positions[outside][0])
        )
    return positions % max(count, 1), array.ndim == 0


def changes(
    storage: Storage, slots: IntArray, single: bool, data: Mapping[str, Any]
) -> tuple[dict[str, list[Array]], dict[str, list[Array]]]:
    """New values for published episodes.

    Args:
        slots: (E,) the episodes. single: `data` has no leading episode axis.
        data: field -> (E, t, *field) for the first t timesteps, broadcast; meta field -> (E, *field); a scalar: for
            all of them (a field's scalar: its first timestep). What lies beyond an episode's length is ignored.

    Returns: (field -> E arrays (t, *field), meta field -> E values), as stored.
    Raises: SchemaError: an unknown field, a wrong shape, more timesteps than the longest of the episodes.
    """
    schema, length = storage.layout.schema, storage.table.length[slots]
    flat = schema.flatten(data)
    schema.require(flat, "update")
    rows, meta = {}, {}
    for name, value in flat.items():
        field = schema.all[name]
        if name in schema.meta_fields:
            values = _expand(name, field, value, single, (len(slots),))
            meta[name] = [np.ascontiguousarray(v) for v in values]
            continue
        values = _expand(name, field, value, single, (len(slots), -1))
        if len(slots) and values.shape[1] > length.max():
            raise SchemaError(
                f"update, field {name!r}: got {values.shape[1]} timesteps, "
                f"the longest of these episodes has {length.max()}"
            )
        rows[name] = [np.ascontiguousarray(v[:n]) for v, n in zip(values, length, strict=True)]
    return rows, meta


def one_step(storage: Storage, slots: IntArray, t: int, name: str, value: Any) -> dict[str, list[Array]]:
    """The new rows of a slot that replace timestep `t` of one field; those before it stay as they are."""
    schema = storage.layout.schema
    schema.require([name], "store_datapoint", schema.fields)
    length = int(storage.table.length[slots[0]])
    if not 0 <= t < length:
        raise SchemaError(f"store_datapoint: timestep {t}, the episode has {length}")
    field = schema.fields[name]
    first = int(storage.first_row(slots, field.final)[0])
    rows = storage.maps.rows[name][first : first + t + 1].copy()
    rows[t] = field.encode(value)
    return {name: [rows]}


def marked(storage: Storage, name: str, indices: Any, flag: Any) -> tuple[IntArray, list[Array], int]:
    """What marking timesteps in a bool field changes.

    Args: indices: (n, 2) of (serial, timestep), or (n,) serials for whole episodes. flag: a bool, or (n,) of them.
    Returns: (slots, the first rows of each, how many of the indices are of episodes that are gone).
    """
    pairs, table = to_numpy(indices), storage.refresh()
    whole = pairs.ndim == 1
    if pairs.dtype.kind not in "iu" or (not whole and (pairs.ndim != 2 or pairs.shape[1] != 2)):
        raise SchemaError(
            f"set_valid: got indices of {pairs.dtype} and shape {pairs.shape}, expected (n, 2) of (serial, timestep), "
            "as `_indices` of a batch, or (n,) serials"
        )
    serials = pairs if whole else pairs[:, 0]
    flags = np.broadcast_to(encode(flag, "bool", serials.shape if to_numpy(flag).ndim else ()), serials.shape)
    slot_of = dict(zip(table.serial[table.visible].tolist(), table.visible.tolist(), strict=True))
    rows: dict[int, Array] = {}
    for k, serial in enumerate(serials.tolist()):
        slot = slot_of.get(serial)
        if slot is None:
            continue
        if slot not in rows:
            rows[slot] = episode_of(storage, slot, [name])[name]
        t = slice(None) if whole else int(pairs[k, 1])
        if not isinstance(t, slice) and not 0 <= t < len(rows[slot]):
            raise SchemaError(
                f"set_valid: timestep {t} of episode {serial}, which has {len(rows[slot])}", serial=serial
            )
        rows[slot][t] = flags[k]
    gone = sum(serial not in slot_of for serial in serials.tolist())
    return np.array(list(rows), np.int64), list(rows.values()), gone


def episode_of(storage: Storage, slot: int, names: Iterable[str]) -> dict[str, Any]:
    """Some fields and meta fields of an episode, nested: fields (T, *field), with `final` (T + 1, *field) if it has it.

    Raises: StaleEpisodeError: it fails its checksums.
    """
    slots, schema = np.array([slot]), storage.layout.schema
    if not storage.trust(slots):
        raise StaleEpisodeError(f"{storage.path}: an episode fails its checksums; see `verify`")
    out = {}
    for name in names:
        field = schema.all[name]
        if name in schema.meta_fields:
            stored = storage.maps.meta[name][slot]
        else:
            first = int(storage.first_row(slots, field.final)[0])
            stored = storage.maps.rows[name][first : first + num_rows(storage, slot, field)]
        out[name] = decode(np.array(stored), field.dtype)
    return nest(out)


def num_rows(storage: Storage, slot: int, field: Field) -> int:
    """How many entries of a field an episode has."""
    table = storage.table
    return int(table.length[slot]) + (field.final and bool(table.flags[slot] & FINAL))


def computed(storage: Storage, slot: int, where: str, field: Field, meta: bool, value: Any) -> Array:
    """What a function gave for an episode, encoded: (entries, *field), or a meta field's value."""
    serial = int(storage.table.serial[slot])
    try:
        rows = field.encode(value, lead=0 if meta else 1)
    except SchemaError as error:
        raise SchemaError(f"{where}, episode {serial}: {error}", serial=serial) from None
    count = num_rows(storage, slot, field)
    if not meta and len(rows) != count:
        last = "; the last one is of the final observation" if field.final else ""
        raise SchemaError(
            f"{where}, episode {serial}: got {len(rows)} entries, expected {count}{last}; give one each", serial=serial
        )
    return np.ascontiguousarray(rows)


def _expand(name: str, field: Field, value: Any, single: bool, lead: tuple[int, ...]) -> Array:
    """`value` encoded and broadcast to (*lead, *field); -1 in `lead` takes the value's own size."""
    array, n = to_numpy(value), len(lead)
    if array.ndim == 0:
        array = array.reshape((1,) * (n + len(field.shape)))
    elif single:
        array = array[None]
    if {array.shape[n:], field.shape} == {(), (1,)}:
        array = array.reshape(array.shape[:n] + field.shape)
    own = tuple(size if wanted == -1 else wanted for wanted, size in zip(lead, array.shape, strict=False))
    try:
        if array.ndim != n + len(field.shape) or len(own) != n:
            raise SchemaError(f"got shape {array.shape}")
        return encode(np.broadcast_to(array, own + field.shape), field.dtype, field.shape, n)
    except (SchemaError, ValueError) as error:
        wanted_shape = ("episodes", "time")[:n]
        raise SchemaError(
            f"update, field {name!r}: {error}; expected ({', '.join(wanted_shape)}, *{field.shape})"
        ) from None
