"""Making a damaged folder whole again: what is intact stays, what is not is moved into `lost+found/`. Never deletes."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer.errors import CorruptBufferError, SchemaError
from memmap_buffer.schema import Schema
from memmap_buffer.store.checkup import Finding, verify
from memmap_buffer.store.files import write_all, write_word
from memmap_buffer.store.folder import Folder
from memmap_buffer.store.layout import MAX_SCHEMA_BYTES, ArrayFile, Layout
from memmap_buffer.store.lock import WriterLock
from memmap_buffer.store.records import FINAL, RECORD, STATE_WORD, Words
from memmap_buffer.store.storage import Storage, discard_unfinished
from memmap_buffer.store.writer import Durability, Writer

LOST = "lost+found"


def repair(folder: str | PathLike[str]) -> list[Finding]:
    """Make a folder readable again.

    A file that is cut short, too long or missing is made anew with what is intact of it; a field of which nothing is
    intact leaves the schema; episodes and records that fail their checksums leave the table. Whatever is taken out is
    moved or copied to `lost+found/` first.

    Args: folder: no writer may hold it.
    Returns: what was found, and is mended.
    Raises: CorruptBufferError: `schema.json` or `episodes.npy` is lost, without which nothing can be told apart.
        BufferLockedError: a writer holds it.
    """
    path = Path(folder)
    place = Folder(path)
    place.require()
    lock = WriterLock(place)
    lock.acquire()
    try:
        return _mend(place, lock)
    finally:
        lock.release()


def _mend(place: Folder, lock: WriterLock) -> list[Finding]:
    found = verify(place.path)
    discard_unfinished(place)
    where = str(place.path / "schema.json")
    try:
        layout = Layout.from_json(place.read("schema.json", MAX_SCHEMA_BYTES), where)
    except SchemaError as error:
        raise CorruptBufferError(
            f"{error}; without a schema nothing can be repaired: restore it from a copy"
        ) from error
    broken = [finding.file for finding in found if finding.file.endswith(".npy") and finding.slot is None]
    for key, array in layout.arrays.items():
        if array.name in broken:
            layout = _mend_file(place, layout, key, array)
    writer = Writer(Storage(place.path, verify="never"), lock, Durability())
    writer.begin()  # finishes or drops an interrupted update
    _mend_slots(place, writer)
    writer.close()
    return found


def _mend_file(place: Folder, layout: Layout, key: str, array: ArrayFile) -> Layout:
    """Put a new file in the place of a damaged one, with what is intact of it; the layout, should it lose the field."""
    kept = place.rescue(array.name, f"{LOST}/{_free_name(place, array.name)}", array.header, array.size)
    if key == "/episodes" and not kept:
        path = place.path / array.name
        raise CorruptBufferError(f"{path} is lost, and it alone says what the episodes are; restore a copy", path=path)
    if key == "/state":
        _write_state(place, layout)
    if key == "/checksums":
        _write_checksums(place, layout, kept // (4 * layout.columns))
    return layout if kept or key.startswith("/") else _without(place, layout, key)


def _without(place: Folder, layout: Layout, name: str) -> Layout:
    """A field of which no byte is left leaves the schema, so that the others can be read."""
    fields = {key: field for key, field in layout.schema.fields.items() if key != name}
    meta = {key: field for key, field in layout.schema.meta_fields.items() if key != name}
    if not fields:
        raise CorruptBufferError(
            f"{place.path}: {name!r} is the only field, and nothing of it is left", path=place.path
        )
    columns = {key: column for key, column in layout.column_of.items() if key != name}
    smaller = replace(layout, schema=Schema(fields, meta), column_of=columns)
    place.copy_file("schema.json", place, f"{LOST}/{_free_name(place, 'schema.json')}")
    place.write_new("schema.json.new", smaller.to_json(), sync=True)
    place.rename("schema.json.new", "schema.json")
    place.unlink(layout.arrays[name].name)  # the new, empty one
    return smaller


def _write_state(place: Folder, layout: Layout) -> None:
    """Counters that follow from the records: every valid episode is shown, and the next serial is a new one."""
    array = layout.arrays["/state"]
    storage = Storage(place.path, verify="never")
    table = storage.refresh()
    epoch = int(storage.maps.words.view(RECORD)["epoch"].max(initial=0)) + 1
    words = {"next": int(table.serial[table.valid].max(initial=-1)) + 1, "epoch": epoch, "changes": 1}
    with place.writing(array.name, array.header, array.size) as fd:
        for name, value in words.items():
            write_word(fd, value, array.offset(0) + 8 * STATE_WORD[name])


def _write_checksums(place: Folder, layout: Layout, intact: int) -> None:
    """Checksums of the slots from `intact` on, of what stands there now: those that were lost told of nothing else."""
    array = layout.arrays["/checksums"]
    storage = Storage(place.path, verify="never")
    table = storage.refresh()
    with place.writing(array.name, array.header, array.size) as fd:
        for slot in table.visible[table.visible >= intact].tolist():
            row = np.zeros(layout.columns, "<u4")
            for name, crc in storage.column_crcs(slot, int(table.length[slot]), bool(table.flags[slot] & FINAL)):
                row[layout.column_of[name]] = crc
            write_all(fd, row, array.offset(slot))


def _mend_slots(place: Folder, writer: Writer) -> None:
    """Take the slots that fail their check or checksums out of the table, after copying them away."""
    storage, files = writer.storage, writer.begin()
    for finding in verify(place.path):
        if finding.slot is None or not finding.lost:
            continue
        _copy_away(place, storage, finding.slot)
        offset = files.layout.arrays["/episodes"].offset(finding.slot)
        write_all(files.fd["/episodes"], bytes(RECORD.itemsize), offset)
    files.write_state("suspect", 0)
    files.changed()
    storage.refresh()


def _copy_away(place: Folder, storage: Storage, slot: int) -> None:
    """The slot's record and rows as `.npy` files of their own."""
    word: Words = storage.maps.words[slot].copy()
    record = word.view(RECORD)[0]
    length = min(int(record["length"]), storage.layout.max_timesteps)
    parts: dict[str, Any] = {"record": word.view(RECORD)}
    for name, rows in storage.maps.rows.items():
        final = storage.layout.schema.fields[name].final
        first = int(storage.first_row(np.array([slot]), final)[0])
        parts[name] = rows[first : first + length + (final and bool(int(record["flags"]) & FINAL))]
    parts |= {name: values[slot : slot + 1] for name, values in storage.maps.meta.items()}
    base = _free_name(place, f"slot-{slot}")
    for name, values in parts.items():
        array = ArrayFile(f"{LOST}/{base}.{name}.npy", values.dtype, values.shape)
        place.create_array(array.name, array.header, array.size)
        with place.writing(array.name, array.header, array.size) as fd:
            write_all(fd, np.ascontiguousarray(values), len(array.header))


def _free_name(place: Folder, name: str) -> str:
    """`name` with a number behind it under which nothing lies in `lost+found/` yet."""
    flat, taken = name.replace("/", "."), place.list(LOST)
    return next(f"{flat}.{n}" for n in range(len(taken) + 1) if not any(t.startswith(f"{flat}.{n}") for t in taken))
