"""New values of steps that are published: checked, encoded, and sorted by the slots that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array, encode, to_numpy
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.schema import Field, Schema
from memmap_buffer.writing.redo import Steps

BoolArray = npt.NDArray[np.bool_]


class Places(NamedTuple):
    """Where the values of some indices stand.

    Attributes:
        slots, t: (n,) int64 of each value that has a place.
        kept: (N,) which of the values these are.
        num_gone: of how many indices, not counting those of negative serials, the step is gone.
    """

    slots: IntArray
    t: IntArray
    kept: BoolArray
    num_gone: int

    @property
    def changed(self) -> IntArray:
        """The slots, each once."""
        return np.unique(self.slots)

    def steps(self, values: Mapping[str, Array]) -> dict[str, list[Steps]]:
        """The new values of each field, (N, *field), in each of the slots."""
        by_slot = {name: Steps.by_slot(self.slots, self.t, each[self.kept]) for name, each in values.items()}
        return {name: [*each.values()] for name, each in by_slot.items()}


def places_and_values(
    storage: Storage, indices: Any, data: Mapping[str, Any], where: str
) -> tuple[Places, dict[str, Array]]:
    """The places of some indices, and the values of each field as stored, (N, *field); see `steps_and_values`.

    Raises:
        SchemaError: there is no such field or timestep, or a value does not fit.
    """
    steps, values = steps_and_values(storage.layout.schema, indices, data, where)
    return _places(storage.refresh(), steps, where), values


def steps_and_values(
    schema: Schema, indices: Any, data: Mapping[str, Any], where: str, *, folders: bool = False
) -> tuple[IntArray, dict[str, Array]]:
    """(N, 2) of (serial, timestep), or (N, 3) with the number of a folder first, and values as stored, (N, *field).

    Args:
        schema: of the folder.
        indices: (B, 2) or (B, L, 2), or with 3 in the place of 2.
        data: field -> (B, *field) or (B, L, *field); a number stands for all.
        where: the method, for errors.
        folders: whether the number of a folder is first.

    Raises:
        SchemaError: there is no such field, or indices or values do not fit.
    """
    steps, width = to_numpy(indices), 2 + folders
    if not data:
        raise SchemaError(f"{where}: no data was given; pass field=values")
    if steps.dtype.kind not in "iu" or steps.ndim not in (2, 3) or steps.shape[-1] != width:
        what = "(folder, serial, timestep)" if folders else "(serial, timestep)"
        raise SchemaError(
            f"{where}: got indices of {steps.dtype} and shape {steps.shape}, expected (n, {width}) of {what}, as "
            f"`_indices` of a batch{', or (n,) serials' * (where == 'set_valid')}"
        )
    flat = schema.flatten(data)
    schema.require(flat, where, schema.fields)
    values = {name: _encoded(schema, name, value, steps.shape[:-1], where) for name, value in flat.items()}
    return steps.reshape(-1, width).astype(np.int64), values


def _encoded(schema: Schema, name: str, value: Any, shape: tuple[int, ...], where: str) -> Array:
    """Values (*shape, *field) as stored, by one axis before the field's."""
    field = schema.fields[name]
    if not field.is_list and np.ndim(value) == 0:
        value = np.broadcast_to(to_numpy(value), (*shape, *field.shape))
    values = schema.encode(name, value, len(shape), f", {where}")
    if values.shape[: len(shape)] != shape:
        raise SchemaError(
            f"{where}: got {name!r} of shape {values.shape}, expected {(*shape, *field.shape)}", field=name
        )
    return values.reshape(-1, *values.shape[len(shape) :])


def _places(table: EpisodeTable, pairs: IntArray, where: str) -> Places:
    """The places of (serial, timestep), those of negative serials left out."""
    serials, t = pairs[:, 0], pairs[:, 1]
    slots, there = _slots_at(table, serials)
    wrong = np.flatnonzero(there & ((t < 0) | (t >= table.length[slots])))
    if len(wrong):
        serial, length = int(serials[wrong[0]]), table.length[slots[wrong[0]]]
        raise SchemaError(f"{where}: timestep {t[wrong[0]]} of episode {serial}, which has {length}", serial=serial)
    kept = there & (t >= table.start[slots])
    return Places(slots[kept], t[kept], kept, int(np.count_nonzero((serials >= 0) & ~kept)))


def _slots_at(table: EpisodeTable, serials: IntArray) -> tuple[IntArray, BoolArray]:
    """(the slot of each serial, whether it is visible)."""
    visible = table.visible
    if not len(visible):
        return np.zeros(len(serials), np.int64), np.zeros(len(serials), np.bool_)
    of_visible = table.of(table.serial, visible)
    at = np.minimum(of_visible.searchsorted(serials), len(visible) - 1)
    return visible[at], of_visible[at] == serials


def steps_of_episodes(table: EpisodeTable, indices: Any, flag: Any) -> tuple[Array, Any, int]:
    """(serial, timestep) of all steps of episodes (n,), a flag for each, and how many of these are gone.

    Indices of another shape are given back as they are, as is their flag.
    """
    serials = to_numpy(indices)
    if serials.ndim != 1 or serials.dtype.kind not in "iu":
        return serials, flag, 0
    slots, there = _slots_at(table, serials)
    flags = np.broadcast_to(encode(flag, "bool", (len(serials),) if to_numpy(flag).ndim else ()), len(serials))
    start, count = table.start[slots[there]], (table.length - table.start)[slots[there]]
    t = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - start, count)
    pairs = np.stack([np.repeat(serials[there], count), t], axis=1)
    return pairs, np.repeat(flags[there], count), int(np.count_nonzero(~there))


def steps_at(storage: Storage, slot: int, t: Any, name: str, value: Any) -> Steps:
    """New values of a field at a timestep of an episode, or at several, as `store_datapoint` takes them."""
    schema, length, steps = storage.layout.schema, int(storage.refresh().length[slot]), to_numpy(t)
    schema.require([name], "store_datapoint", schema.fields)
    if steps.ndim > 1 or steps.dtype.kind not in "iu" or not steps.size:
        raise SchemaError(f"store_datapoint: got timesteps {t!r}, expected a whole number, or (n,) of them")
    if steps.min() < 0 or steps.max() >= length:
        raise SchemaError(f"store_datapoint: timestep {t}, the episode has {length}")
    values = schema.encode(name, value, steps.ndim, ", store_datapoint")
    if not steps.ndim:
        steps, values = steps[None], values[None]
    if len(values) != len(steps):
        raise SchemaError(f"store_datapoint: got {len(values)} values of {name!r} for {len(steps)} timesteps")
    return Steps.by_slot(np.full(len(steps), slot), steps.astype(np.int64), values)[slot]


def values_of(
    storage: Storage, slots: IntArray, single: bool, data: Mapping[str, Any]
) -> tuple[dict[str, list[Steps]], dict[str, list[Array]]]:
    """New values of published episodes as `update` takes them: name -> one for each slot, of fields and meta fields.

    Entries beyond an episode's length are left out. A scalar stands for all values; of a field, for the first timestep.
    """
    schema, length = storage.layout.schema, storage.refresh().length[slots]
    flat = schema.flatten(data)
    schema.require(flat, "update")
    rows: dict[str, list[Steps]] = {}
    meta_values: dict[str, list[Array]] = {}
    for name, value in flat.items():
        field, meta = schema.all[name], name in schema.meta_fields
        values = _expand(name, field, value, single, (len(slots),) if meta else (len(slots), -1))
        if not meta and len(slots) and values.shape[1] > length.max():
            raise SchemaError(
                f"update, field {name!r}: got {values.shape[1]} timesteps, "
                f"the longest of these episodes has {length.max()}; max_timesteps is {storage.layout.max_timesteps}"
            )
        ends = [None] * len(slots) if meta else length.tolist()
        dtype = values.dtype  # that of a text by itself is as long as the text
        each = [np.ascontiguousarray(v if n is None else v[:n], dtype) for v, n in zip(values, ends, strict=True)]
        if meta:
            meta_values[name] = each
        else:
            rows[name] = [Steps.from_first(first) for first in each]
    return rows, meta_values


def _expand(name: str, field: Field, value: Any, single: bool, lead: tuple[int, ...]) -> Array:
    """`value` encoded and broadcast to (*lead, *field); -1 in `lead` takes the value's own size."""
    if field.is_list:
        try:
            return field.encode([value] if single else value, lead=2)
        except (SchemaError, ValueError) as error:
            raise SchemaError(f"update, field {name!r}: {error}; expected (episodes, time) lists") from None
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
        axes = ", ".join(map(str, (*("episodes", "time")[:n], *field.shape)))
        raise SchemaError(f"update, field {name!r}: {error}; expected ({axes})") from None
