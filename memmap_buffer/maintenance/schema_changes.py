"""Changes of the schema: add a field, drop fields, rename fields. Only the files of these fields are touched.

`api.editing` calls `add`, `drop` and `rename` while it holds the lock. The rename of `schema.json` commits a change: a
kill at any point leaves the old state or the new one (`format`, "Creating").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.blobs import contents_of, encode_many, end_of, index_of
from memmap_buffer.format.checksums import checksum
from memmap_buffer.format.creation import creating, replace
from memmap_buffer.format.layout import BLOBS, Layout
from memmap_buffer.format.records import CHECKED, RECORD
from memmap_buffer.format.syscalls import write_all
from memmap_buffer.progress import progress
from memmap_buffer.schema import Field, Schema
from memmap_buffer.writing.commit import WriteHandles, require_room


def add(files: WriteHandles, name: str, field: Field, *, meta: bool, rows_of: Callable[[int], Array] | None) -> None:
    """Add a field, and fill it for every episode that exists.

    Args:
        files: the open files of the folder.
        name: the name of the field.
        field: its declaration.
        meta: whether it is a meta field.
        rows_of: slot of a visible episode -> its rows (T, *field), (T + 1, *field) for a field with `final` where the
            episode has its final observation; for a meta field its value (*field). None: the field's default.

    Raises:
        SchemaError: the name is taken, or checksums.npy has no free column.
        EpisodeStateError: the lists of an episode have more members than there is room for; nothing was added.
        OSError: the disk is full, say; nothing was added.
    """
    layout = files.layout
    _refuse(layout.schema, name, "add_field")
    new = _with(layout, name, field, meta, _free_column(files))
    column, keys, folder = new.column_of[name], new.keys_of(name), files.storage.folder
    table = files.storage.refresh()
    visible = set(table.visible.tolist())
    sums = layout.arrays["/checksums"]
    fill_bytes = field.fill.item().tobytes() if field.is_list else field.fill.tobytes()
    zeros = not fill_bytes.strip(b"\0") and not (field.is_list and fill_bytes)  # what a hole reads as
    fill = np.zeros_like(field.in_file.fill) if zeros else field.in_file.fill
    with creating(folder, new, bool(files.storage.state("reserved")), only=keys):
        with ExitStack() as opened:
            fd = {key: opened.enter_context(folder.writing(new.arrays[key])) for key in keys}
            for slot in progress(np.flatnonzero(table.valid).tolist(), f"add_field {name}"):
                if rows_of is not None and slot in visible:
                    written, content = _in_files(new, name, field, slot, rows_of(slot))
                else:
                    place = files.storage.rows_of(slot, field.final)
                    count = 1 if meta else place.stop - place.start
                    rows = np.ascontiguousarray(np.broadcast_to(fill, (count, *fill.shape)))
                    written = {} if zeros and files.holes_are_harmless else {name: rows}
                    content = contents_of(rows, [b""] * count) if field.is_coded else rows
                for key, data in written.items():
                    write_all(fd[key], data, new.arrays[key].offset(slot))
                if table.flags[slot] & CHECKED:
                    value = np.uint32(checksum(content)).tobytes()
                    write_all(files.fd["/checksums"], value, sums.offset(slot) + 4 * column)
        files.sync("/checksums")
    files.changed()


def _in_files(layout: Layout, name: str, field: Field, slot: int, rows: Array) -> tuple[dict[str, Any], Array]:
    """(key -> bytes or rows to write at a slot for some rows of a field, the content that their checksum covers)."""
    if not field.is_coded:
        return {name: rows}, rows
    blobs = encode_many(field, rows)
    index = index_of(field, blobs, layout.region(name, slot).start)
    if len(index):
        require_room(layout, name, slot, end_of(index[-1]))
    return {name: index, name + BLOBS: b"".join(blobs)}, contents_of(index, blobs)


def drop(files: WriteHandles, names: tuple[str, ...]) -> None:
    """Remove fields and their files."""
    replace(files.storage.folder, files.layout, files.layout.without(names))
    files.changed()


def rename(files: WriteHandles, names: Mapping[str, str]) -> None:
    """Rename fields; their files keep every byte. Raises OSError on a file system without hard links."""
    layout = files.layout
    for name in names.values():
        _refuse(layout.schema, name, "rename_field")
    fields, meta = ({names.get(n, n): f for n, f in group.items()} for group in _groups(layout.schema))
    if (len(fields), len(meta)) != tuple(map(len, _groups(layout.schema))):
        raise SchemaError(f"rename_field: {', '.join(names.values())} would stand twice; choose another name")
    new = layout.with_fields(
        layout.schema.with_fields(fields, meta, names),
        {names.get(n, n): column for n, column in layout.column_of.items()},
        {names.get(n, n): size for n, size in layout.dictionaries.items()},
    )
    links = {
        layout.arrays[key].name: new.arrays[name + key.removeprefix(old)].name
        for old, name in names.items()
        for key in layout.keys_of(old)
    }
    replace(files.storage.folder, layout, new, links)
    files.changed()


def _groups(schema: Schema) -> tuple[dict[str, Field], dict[str, Field]]:
    return schema.fields, schema.meta_fields


def _with(layout: Layout, name: str, field: Field, meta: bool, column: int) -> Layout:
    fields, meta_fields = _groups(layout.schema)
    if name in layout.schema.all:
        raise SchemaError(f"add_field {name!r}: there is one already; drop_field it, or recompute it", field=name)
    new = {name: field}
    schema = layout.schema.with_fields({**fields, **({} if meta else new)}, {**meta_fields, **(new if meta else {})})
    return layout.with_fields(schema, {**layout.column_of, name: column})


def _free_column(files: WriteHandles) -> int:
    """The number of a column of checksums.npy that no field uses, and that no record counts in its digest."""
    layout, storage = files.layout, files.storage
    valid = storage.refresh().valid
    counted = storage.maps.words.view(RECORD)["columns"].reshape(-1)[valid].max(initial=0)
    column = max(layout.used_columns, int(counted))
    if column >= layout.columns:
        raise SchemaError(
            f"{storage.path}: there is room for the checksums of {layout.columns} fields, those that were dropped "
            "included; `pack` and `unpack` the buffer into another folder, which has room again"
        )
    return column


def _refuse(schema: Schema, name: str, what: str) -> None:
    """Raise SchemaError for a field that ends episodes: the records of older episodes do not tell whether it did."""
    if name in schema.declared_ends.values():
        raise SchemaError(
            f"{what}: {name!r} is also kept in the record of every episode; declare it when the buffer is created, and "
            "copy the episodes into that one",
            field=name,
        )
