"""The copy of the rows of a batch: from one folder or many, after fetching rows of a mirror, with decoding of blobs.

Each `BatchBuilder` has one `Gather`, and tells it which rows to copy. `Gather.copy` is the way of a whole batch,
`Gather.copied` that of one field. A `Gather` also remembers, for `require`, what went wrong: blocks that a cache gave
back during the copying, rows that cannot be decoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.source import Fetched, Rows
from memmap_buffer.format.storage import Storage
from memmap_buffer.schema import LENGTHS, Field
from memmap_buffer.views.anchors import BoolArray
from memmap_buffer.views.by_address import stored_rows
from memmap_buffer.views.folders import FieldGroup, Folders, Found
from memmap_buffer.views.memory_pool import SMALL
from memmap_buffer.views.row_ranges import RowRanges

MAX_BATCH_BYTES = 16 << 30  # bound of a field in a batch: a forged length must not take all memory


class BFloat16Bits(np.ndarray[Any, np.dtype[np.uint16]]):
    """uint16 array of the bits of bfloat16 numbers; `loading.tensors` knows them by this class."""


class RaggedRows(list[Array]):
    """A ragged column: one array for each item. Any other list, such as one of a transform, may hold anything."""


class RowGather(NamedTuple):
    """Rows that are to be copied, the same ones for all fields of a group.

    Attributes:
        group: the fields.
        rows: (B,) or (B, K) int64, or ranges.
        missing: a mask of the shape of `rows`, of those that do not exist and get `padding`; None for none, and for
            ranges, which know it themselves.
        padding: see `BatchBuilder.put`.
    """

    group: FieldGroup
    rows: IntArray | RowRanges
    missing: BoolArray | None = None
    padding: str = "zero"


# A finished column; rows to copy of a group of fields, under its first key; ranges that stand for a mask (B, K).
Column: TypeAlias = Array | RowGather | RowRanges
Columns: TypeAlias = dict[str, Array]


class Gather:
    """The copy of a batch's rows.

    Args:
        folders: the folders that are read.
        records: the anchors (B,) of the items, with the records of their episodes.

    Attributes:
        fetched: the rows that were fetched for this batch, one entry for each request.
        broken: (folder, name of a field, (B,) the items with a row of it that cannot be decoded); None if all could be.
    """

    def __init__(self, folders: Folders, records: Found) -> None:
        self.folders, self.records, self._pool = folders, records, folders.pool
        self._size = len(records.anchors.slot)
        self.fetched: list[Fetched] = []
        self.broken: tuple[Storage, str, BoolArray] | None = None

    def copy(self, batch: Mapping[str, Column]) -> Columns:
        """Copy all columns of a batch.

        Returns: key -> (B, …), values as stored.
        """
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
        """Copy the rows of a group; those of compressed fields are noted in `later`, to be decoded together."""
        rows, only = gather.rows, self.records.only
        for key, name in zip(gather.group.keys, gather.group.names, strict=True):
            if name in self.folders.coded:
                later.setdefault(name, {})[key] = gather
                out[key] = rows  # type: ignore[assignment]  # it keeps the place of the key
            elif only is not None and isinstance(rows, RowRanges):
                out[key] = rows.copy(only, name, self._pool)
            else:
                out[key] = self.copied(name, rows, brought=True)

    def _mark_missing(self, out: Columns, gather: RowGather) -> None:
        """Write the padding into copied rows, and mark bfloat16. With "edge" the copied rows are right: the nearest."""
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
        """Decode the rows of compressed fields. Args: wanted: name of the field -> key in the batch -> its rows."""
        for name, gathers in wanted.items():
            if self.folders.schema.fields[name].is_list:
                for key, gather in gathers.items():
                    out[key], out[LENGTHS + key] = self._padded_lists(name, gather)
            else:
                out |= zip(gathers, self._decoded(name, list(gathers.values())), strict=True)

    def _padded_lists(self, name: str, gather: RowGather) -> tuple[Array, IntArray]:
        """(the lists of a field, (B, …, L, *member), zeros behind the end of each; (B, …) int64 their lengths)."""
        field, lead = self.folders.schema.fields[name], gather.rows.shape
        item, length, groups = self._items_of([lead]), np.zeros(lead, np.int64), []
        for storage, chosen, _ in self.records.groups:
            place = self._places_of(chosen, item)
            members, counts, bad = storage.maps.coded[name].lists(self._rows_in_file(storage, name, chosen, gather))
            length.reshape(-1)[place] = counts
            self._note_broken(storage, name, item[place[bad]])
            groups.append((place, members))
        longest = int(length.max(initial=0))
        if length.size * longest * field.itemsize > MAX_BATCH_BYTES:
            refuse_size(self._size, f"field {name!r}", length.size * longest * field.itemsize)
        out: Array = np.zeros((length.size, longest, *field.shape[1:]), field.entries)
        exists = np.arange(longest) < length.reshape(-1, 1)
        for place, members in groups:
            if len(groups) == 1:
                out[exists] = members
            else:
                part = out[place]
                part[exists[place]] = members
                out[place] = part
        return out.reshape(*lead, *out.shape[1:]), length

    def _decoded(self, name: str, wanted: Sequence[RowGather]) -> list[Array]:
        """Rows of a compressed field, (B, …, *field) for each of `wanted`; a blob in several is decoded once."""
        field, leads = self.folders.schema.fields[name], [gather.rows.shape for gather in wanted]
        item = self._items_of(leads)
        out = self._pool.empty((len(item), *field.cell), field.storage)
        for storage, chosen, _ in self.records.groups:
            place = self._places_of(chosen, item)
            stored_rows = np.concatenate([self._rows_in_file(storage, name, chosen, gather) for gather in wanted])
            if name not in storage.maps.coded:
                out[place] = stored_rows
                continue
            bad = storage.maps.coded[name].decode_into(stored_rows, out, place)
            self._note_broken(storage, name, item[place[bad]])
        parts = np.split(out, np.cumsum([*map(math.prod, leads)])[:-1])
        return [marked(field, part.reshape(*lead, *field.cell)) for lead, part in zip(leads, parts, strict=True)]

    def _items_of(self, leads: Sequence[tuple[int, ...]]) -> IntArray:
        """(N,) the item of each row of arrays with these first axes (B, …), one array after the other."""
        return np.concatenate([np.arange(self._size).repeat(math.prod(lead[1:])) for lead in leads])

    def _places_of(self, chosen: Any, item: IntArray) -> IntArray:
        """The positions of the `chosen` items' rows among rows of `item` (N,)."""
        is_chosen = np.zeros(self._size, np.bool_)
        is_chosen[chosen] = True
        return np.flatnonzero(is_chosen[item])

    def _note_broken(self, storage: Storage, name: str, items: IntArray) -> None:
        """Note items that have a row that cannot be decoded."""
        if len(items):
            broken = np.zeros(self._size, np.bool_) if self.broken is None else self.broken[2]
            broken[items] = True
            self.broken = storage, name, broken

    def _rows_in_file(self, storage: Storage, name: str, chosen: Any, gather: RowGather) -> Array:
        """The rows of the `chosen` items, padded, as they stand in the file of a field of one folder: (N, *in_file).

        For a compressed field, rows of its index.
        """
        _, rows, missing, padding = gather
        field = storage.layout.schema.fields[name].in_file
        if isinstance(rows, RowRanges):
            return rows[chosen].copy(storage, name, self._pool).reshape(-1, *field.shape)
        values: Array = storage.maps.rows[name].take(rows[chosen], 0, None, "clip")
        if missing is not None and padding != "edge":
            values[missing[chosen]] = values.dtype.type() if padding == "zero" else field.fill
        return values.reshape(-1, *field.shape)

    def _bring(self, columns: Iterable[Column]) -> None:
        """Fetch the rows that are about to be copied, for folders of which not all rows are there."""
        wanted: list[tuple[Storage, list[Rows]]] = []
        for storage, chosen, _ in self.records.groups:
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
        """Copy rows of one field, or of a meta field: (B, …, *field).

        Args: brought: the rows were fetched already, if the folder is a mirror.
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
            groups = self.records.groups
            if len(groups) > 1 or name in self.folders.uneven:
                return self._copied_by_folder(name, rows)
            only = groups[0].storage
        if isinstance(rows, RowRanges):
            return rows.copy(only, name, self._pool)
        stored = (only.maps.rows if name in self.folders.schema.fields else only.maps.meta)[name]
        small = rows.size * stored.strides[0] < SMALL
        out = None if small else self._pool.empty((*rows.shape, *stored.shape[1:]), stored.dtype)
        return stored.take(rows, 0, out, "clip")

    def _copied_by_address(self, name: str, rows: IntArray | RowRanges) -> Array | None:
        """Rows of a field of many folders by one call; None if they cannot be read so, see `Reach`."""
        reach, places = self.records.reach, self.records.folder_places
        if reach is None or places is None or name in self.folders.uneven:
            return None
        return (
            reach.ranges(name, places, rows, self._pool)
            if isinstance(rows, RowRanges)
            else reach.rows(name, places, rows)
        )

    def _copied_by_folder(self, name: str, rows: IntArray | RowRanges) -> Array:
        """Rows of a field by a call for each folder."""
        field = self.folders.schema.all[name]
        out = self._pool.empty((*rows.shape, *field.shape), field.storage)
        for storage, chosen, _ in self.records.groups:
            part = rows[chosen]
            if isinstance(part, RowRanges):
                out[chosen] = part.copy(storage, name, self._pool)
            else:
                out[chosen] = stored_rows(storage, name).take(part, 0, None, "clip")
        return out

    def meta(self, name: str) -> Array:
        """A meta field of the episode of each item, as stored: (B, *field)."""
        return marked(self.folders.schema.all[name], self.copied(name, self.records.anchors.slot, brought=True))

    def rows_of(self, columns: Iterable[Column], chosen: Any) -> list[Rows]:
        """The rows that `copy` reads of these columns for the `chosen` items, as ranges low … high - 1."""
        out = []
        for column in columns:
            if type(column) is RowGather:
                rows = column.rows[chosen]
                low, high = rows.rows() if isinstance(rows, RowRanges) else (rows.ravel(), rows.ravel() + 1)
                out += [Rows(name, low, high) for name in column.group.names]
        return out

    def require(self, same: BoolArray) -> None:
        """Set `same` (B,), whether each item's episode is unchanged, to False for items that must be read again anyway.

        Raises:
            CorruptBufferError: an unchanged episode cannot be decoded, and fetching its rows again does not help.
        """
        if not self._stayed():
            same[:] = False  # a block was given back before its rows were copied
        if self.broken is not None:  # an error only if the episode is unchanged: else it was overwritten meanwhile
            storage, name, items = self.broken
            slots = self.records.anchors.slot[items]
            if (same & items).any() and (storage.mend(name, slots) or not self._stayed()):
                same[items] = False  # this process fetched the rows again, or another one did
            if (same & items).any():
                serial = int(self.records.anchors.serial[same & items][0])
                raise storage.damaged_blob(name, f"episode {serial} has a timestep that cannot be decoded")

    def _stayed(self) -> bool:
        """Whether all rows that were fetched have been there ever since."""
        return all(rows.unchanged() for rows in self.fetched)


def marked(field: Field, values: Array) -> Array:
    """The stored values of a field, as `BFloat16Bits` if it is bfloat16."""
    return values.view(BFloat16Bits) if field.dtype == "bfloat16" else values


def refuse_size(items: int, what: str, size: int) -> NoReturn:
    """Raise SchemaError: `what` takes too many bytes, `size`, in a batch of `items`."""
    raise SchemaError(
        f"{what}: a batch of {items} items takes {size / 2**30:.1f} GiB, more than {MAX_BATCH_BYTES >> 30}; lower "
        "batch_size, leave it out, or cut windows"
    )
