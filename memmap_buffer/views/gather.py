"""Copying the rows of a batch: of one folder or of many, fetched where they are elsewhere, decoded where compressed.

A `BatchBuilder` tells which rows these are. A `Gather` copies them for one batch, and remembers what went wrong: blocks
that a cache gave back meanwhile, rows that cannot be decoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.source import Fetched, Rows
from memmap_buffer.format.storage import Storage
from memmap_buffer.schema import LENGTHS, Field
from memmap_buffer.views.anchors import BoolArray
from memmap_buffer.views.folders import EVERY, FieldGroup, Folders, Found
from memmap_buffer.views.memory_pool import SMALL
from memmap_buffer.views.row_ranges import RowRanges

MAX_BATCH_BYTES = 16 << 30  # a length that a stranger wrote must not take all memory


class BFloat16Bits(np.ndarray[Any, np.dtype[np.uint16]]):
    """uint16 that are the bits of bfloat16 numbers, so that the PyTorch layer knows."""


class RaggedRows(list[Array]):
    """Sequences of their own lengths, one array an item; a list that a transform makes may hold whole columns."""


class RowGather(NamedTuple):
    """Rows to be copied of fields that all have them at the same places.

    Attributes:
        group: the fields.
        rows: (B,), (B, K), or ranges.
        missing: those that do not exist, and get `padding`, as a mask of the same shape, or by number; None for none.
        padding: see `BatchBuilder.put`.
    """

    group: FieldGroup
    rows: IntArray | RowRanges
    missing: BoolArray | IntArray | None = None
    padding: str = "zero"

    @property
    def mask(self) -> BoolArray | None:
        """The missing ones as a mask."""
        if self.missing is None or self.missing.dtype == np.bool_:
            return self.missing  # type: ignore[return-value]
        mask = np.zeros(len(self.rows), np.bool_)  # type: ignore[arg-type]
        mask[self.missing] = True
        return mask


Column: TypeAlias = Array | RowGather | RowRanges  # as it is; rows to copy, by the first key; the mask of what exists
Columns: TypeAlias = dict[str, Array]


class Gather:
    """The copy of a batch's rows.

    Args:
        folders: the folders that are read.
        records: of the episodes of the items (B,).

    Attributes:
        fetched: what was fetched for it, block by block.
        broken: a field that cannot be decoded: its folder, its name, (B,) of which items; or None.
    """

    def __init__(self, folders: Folders, records: Found) -> None:
        self.folders, self.records, self._pool = folders, records, folders.pool
        self._size = len(records.anchors.slot)
        self.fetched: list[Fetched] = []
        self.broken: tuple[Storage, str, BoolArray] | None = None

    def copy(self, batch: Mapping[str, Column]) -> Columns:
        """Copy all columns of a batch: key -> (B, …), as stored."""
        out: Columns = {}
        only = self.records.only
        if self.folders.mirrored:
            self._bring(batch.values())
        stored = {} if only is None or self.folders.coded else only.maps.rows
        later: dict[str, dict[str, RowGather]] = {}  # name of a compressed field -> key -> rows of it
        for first, column in batch.items():
            if type(column) is not RowGather:
                out[first] = column.exist() if type(column) is RowRanges else column  # type: ignore[assignment]
                continue
            group, rows, missing, _ = column
            if stored and isinstance(rows, np.ndarray) and rows.size * group.largest < SMALL:
                for key, name in zip(group.keys, group.names):  # noqa: B905  # twice the time
                    out[key] = stored[name].take(rows, 0, None, "clip")
            else:
                self._copy_fields(out, column, later)
            if missing is not None or not group.plain:
                self._mark_missing(out, column)
        if later:
            self._put_coded(out, later)
        return out

    def _copy_fields(self, out: Columns, gather: RowGather, later: dict[str, dict[str, RowGather]]) -> None:
        """Copy the rows of several fields, but for compressed ones, which are noted for later."""
        rows, only = gather.rows, self.records.only
        for key, name in zip(gather.group.keys, gather.group.names, strict=True):
            if name in self.folders.coded:
                later.setdefault(name, {})[key] = gather
                out[key] = rows  # type: ignore[assignment]  # in its place
            elif only is not None and isinstance(rows, RowRanges):
                out[key] = rows.copy(only, name, self._pool)
            else:
                out[key] = self.copied(name, rows, brought=True)

    def _mark_missing(self, out: Columns, gather: RowGather) -> None:
        """Fill what does not exist of rows that were copied: the nearest ones, which "edge" asks for."""
        group, _, missing, padding = gather
        for key, name in zip(group.keys, group.names, strict=True):
            if name in self.folders.coded:
                continue
            values, field = out[key], self.folders.schema.fields[name]
            if missing is not None and padding != "edge":
                values[missing] = values.dtype.type() if padding == "zero" else field.fill
            if not group.plain:
                out[key] = marked(field, values)

    def _put_coded(self, out: Columns, wanted: Mapping[str, Mapping[str, RowGather]]) -> None:
        """Decode the rows of compressed fields, by name and key."""
        for name, gathers in wanted.items():
            if self.folders.schema.fields[name].is_list:
                for key, gather in gathers.items():
                    out[key], out[LENGTHS + key] = self._padded_lists(name, gather)
            else:
                out |= zip(gathers, self._decoded(name, list(gathers.values())), strict=True)

    def _padded_lists(self, name: str, gather: RowGather) -> tuple[Array, IntArray]:
        """The lists of some rows (B, …, L, *members), zeros behind the end of each; (B, …) how long they are."""
        _, rows, *_ = gather
        field, count, lead = self.folders.schema.fields[name], self._size, rows.shape
        length = np.zeros(lead, np.int64)
        groups = []
        for storage, chosen, *_ in self.records.groups:
            members, counts, bad = storage.maps.coded[name].lists(self._rows_in_file(storage, name, chosen, gather))
            length[chosen] = counts.reshape(length[chosen].shape)
            if bad.any():
                items = np.zeros(count, np.bool_) if self.broken is None else self.broken[2]
                items[chosen] |= bad.reshape(length[chosen].shape).reshape(len(items[chosen]), -1).any(axis=1)
                self.broken = storage, name, items
            groups.append((chosen, members))
        longest = int(length.max(initial=0))
        if length.size * longest * field.itemsize > MAX_BATCH_BYTES:
            refuse_size(self._size, f"field {name!r}", length.size * longest * field.itemsize)
        out: Array = np.zeros((*lead, longest, *field.shape[1:]), field.entries)
        there = np.arange(longest) < length[..., None]
        for chosen, members in groups:
            if chosen is EVERY:
                out[there] = members
            else:
                part = out[chosen]
                part[there[chosen]] = members
                out[chosen] = part
        return out, length

    def _decoded(self, name: str, wanted: Sequence[RowGather]) -> list[Array]:
        """Rows of a compressed field, each (B, …, *field): a blob that is wanted several times is decoded once."""
        field, count = self.folders.schema.fields[name], self._size
        leads = [gather.rows.shape for gather in wanted]
        stops = np.cumsum([0, *map(math.prod, leads)])
        out = self._pool.empty((int(stops[-1]), *field.shape), field.storage)
        for storage, chosen, *_ in self.records.groups:
            of = np.concatenate([self._rows_in_file(storage, name, chosen, gather) for gather in wanted])
            place = np.arange(len(out))
            if self.records.order is not None:
                parts = [place[start:stop].reshape(count, -1) for start, stop in pairwise(stops.tolist())]
                place = np.concatenate([part[chosen].ravel() for part in parts])
            if name not in storage.maps.coded:
                out[place] = of
                continue
            bad = storage.maps.coded[name].decode_into(of, out, place)
            if len(bad):
                starts = stops[np.searchsorted(stops, place[bad], side="right") - 1]
                per_item = np.diff(stops)[np.searchsorted(stops, place[bad], side="right") - 1] // count
                items = np.zeros(count, np.bool_) if self.broken is None else self.broken[2]
                items[(place[bad] - starts) // per_item] = True
                self.broken = storage, name, items
        parts = [out[start:stop] for start, stop in pairwise(stops.tolist())]
        return [marked(field, part.reshape(*lead, *field.shape)) for lead, part in zip(leads, parts, strict=True)]

    def _rows_in_file(self, storage: Storage, name: str, chosen: Any, gather: RowGather) -> Array:
        """The rows of some items (n, …) in the file of a field of one folder, with its padding, one behind the other.

        Of a compressed field they are its index.
        """
        rows, missing, padding = gather.rows, gather.mask, gather.padding
        field = storage.layout.schema.fields[name].in_file
        if isinstance(rows, RowRanges):
            return rows[chosen].copy(storage, name, self._pool).reshape(-1, *field.shape)
        values: Array = storage.maps.rows[name].take(rows[chosen], 0, None, "clip")
        if missing is not None and padding != "edge":
            values[missing[chosen]] = values.dtype.type() if padding == "zero" else field.fill
        return values.reshape(-1, *field.shape)

    def _bring(self, columns: Iterable[Column]) -> None:
        """Have rows fetched that are about to be copied; a folder that is there whole is asked for none."""
        wanted: list[tuple[Storage, list[Rows]]] = []
        for storage, chosen, *_ in self.records.groups:
            if storage.mirror is None:
                continue
            whole = storage.mirror.whole()
            if whole is not None:
                self.fetched.append(whole)
                continue
            wanted.append((storage, self.rows_of(columns, chosen)))
            source = storage.mirror
        if wanted:
            self.fetched.append(source.bring(wanted))

    def copied(self, name: str, rows: IntArray | RowRanges, *, brought: bool = False) -> Array:
        """Rows of a field: (B, …, *field).

        Args: brought: they were fetched, where they are elsewhere.
        """
        if self.folders.mirrored and not brought:
            self._bring([RowGather(self.folders.groups["", name][0], rows)])
        if name in self.folders.coded:
            return self._decoded(name, [RowGather(self.folders.groups["", name][0], rows)])[0]
        only = self.records.only
        if only is None:
            values = self._copied_by_address(name, rows)
            if values is not None:
                return values
            if self.records.order is not None or name in self.folders.uneven:
                return self._copied_by_folder(name, rows)
            only = self.records.groups[0].storage
        if isinstance(rows, RowRanges):
            return rows.copy(only, name, self._pool)
        stored = only.maps.rows[name]
        small = rows.size * stored.strides[0] < SMALL
        out = None if small else self._pool.empty((*rows.shape, *stored.shape[1:]), stored.dtype)
        return stored.take(rows, 0, out, "clip")

    def _copied_by_address(self, name: str, rows: IntArray | RowRanges) -> Array | None:
        """Rows of a field of many folders by one call; None where that cannot be."""
        reach, of = self.records.reach, self.records.of
        if reach is None or of is None or name in self.folders.uneven:
            return None
        return reach.ranges(name, of, rows, self._pool) if isinstance(rows, RowRanges) else reach.rows(name, of, rows)

    def _copied_by_folder(self, name: str, rows: IntArray | RowRanges) -> Array:
        order, field = self.records.order, self.folders.schema.fields[name]
        rows = rows if order is None else rows[order]
        by_folder = self._pool.empty((*rows.shape, *field.shape), field.storage)
        for storage, _, part, _ in self.records.groups:
            if isinstance(rows, RowRanges):
                by_folder[part] = rows[part].copy(storage, name, self._pool)
            elif name in self.folders.uneven:
                by_folder[part] = storage.maps.rows[name].take(rows[part], 0, None, "clip")
            else:
                storage.maps.rows[name].take(rows[part], 0, by_folder[part], "clip")
        if order is None:
            return by_folder
        out = self._pool.empty(by_folder.shape, by_folder.dtype)
        return by_folder.take(self.records.place, 0, out, "clip")

    def meta(self, name: str) -> Array:
        """A meta field of each item's episode, as stored: (B, *field)."""
        slot, field = self.records.anchors.slot, self.folders.schema.meta_fields[name]
        reach, of = self.records.reach, self.records.of
        values = None
        if reach is not None and of is not None and name not in self.folders.uneven:
            values = reach.meta(name, of, slot)
        if values is not None:
            return marked(field, values)
        groups = self.records.groups
        out = np.empty((len(slot), *field.shape), field.storage)
        for storage, chosen, *_ in groups:
            out[chosen] = storage.maps.meta[name].take(slot[chosen], 0, None, "clip")
        return marked(field, out)

    def rows_of(self, columns: Iterable[Column], chosen: Any) -> list[Rows]:
        """The rows that `copy` reads of columns for some items, item by item."""
        out = []
        for column in columns:
            if type(column) is RowGather:
                rows = column.rows
                low, high = rows.rows() if isinstance(rows, RowRanges) else (rows.ravel(), rows.ravel() + 1)
                if chosen is not EVERY:
                    low, high = (part.reshape(self._size, -1)[chosen].ravel() for part in (low, high))
                out += [Rows(name, low, high) for name in column.group.names]
        return out

    def require(self, same: BoolArray) -> None:
        """Take from `same` (B,), whether the episodes of items are as they were, what was copied wrongly all the same.

        Raises:
            CorruptBufferError: an episode that is as it was cannot be decoded.
        """
        if not self._stayed():
            same[:] = False  # a block was given back before its rows were copied
        if self.broken is not None:  # while it was copied it may have been overwritten
            storage, name, items = self.broken
            slots = self.records.anchors.slot[items]
            if (same & items).any() and (storage.mend(name, slots) or not self._stayed()):
                same[items] = False  # this process mended them, or another one did
            if (same & items).any():
                serial = int(self.records.anchors.serial[same & items][0])
                raise storage.damaged_blob(name, f"episode {serial} has a timestep that cannot be decoded")

    def _stayed(self) -> bool:
        """Whether all blocks that were fetched have been there ever since."""
        return all(rows.unchanged() for rows in self.fetched)


def marked(field: Field, values: Array) -> Array:
    """The values of a field, marked as bfloat16 where they are."""
    return values.view(BFloat16Bits) if field.dtype == "bfloat16" else values


def refuse_size(items: int, what: str, size: int) -> NoReturn:
    """Raise SchemaError: something takes too many bytes in a batch."""
    raise SchemaError(
        f"{what}: a batch of {items} items takes {size / 2**30:.1f} GiB, more than {MAX_BATCH_BYTES >> 30}; lower "
        "batch_size, leave it out, or cut windows"
    )
