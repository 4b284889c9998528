"""Making a damaged folder whole again: what is intact stays, what is not goes to `lost+found/`. Never deletes.

Killed anywhere, it can be run again. So the order is: copy away, take episodes out of the table, then repair the files
that their rows are missing in, so that at no moment zeros stand where a record says that rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from os import PathLike

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError, MemmapBufferError
from memmap_buffer.format import syscalls
from memmap_buffer.format.blobs import end_of, fault, lengths_of
from memmap_buffer.format.checksums import checksum_row, digest_of
from memmap_buffer.format.creation import LEFT_BEHIND, RESERVED
from memmap_buffer.format.folder import UPDATE, Folder
from memmap_buffer.format.layout import BLOBS, MAX_SCHEMA_BYTES, ArrayFile, Layout
from memmap_buffer.format.lock import WriterLock
from memmap_buffer.format.records import CHECKED, CUT, FINAL, GENERATION, MAX_SERIAL, OPEN, RECORD, seal
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import CAN_RESERVE, is_hole, read_at, write_all
from memmap_buffer.maintenance.snapshot import write_counters
from memmap_buffer.maintenance.verification import Finding, Survey
from memmap_buffer.paths import path_of
from memmap_buffer.writing import redo
from memmap_buffer.writing.commit import WriteHandles
from memmap_buffer.writing.recovery import take_over

LOST = "lost+found"
CHUNK = 1 << 16


def repair(folder: str | PathLike[str]) -> list[Finding]:
    """Make a folder whole again.

    A file that is cut short, too long or of another header gets its size and header back, and keeps what is intact of
    it; a record of which one byte changed gets it back. What cannot be read any more is taken out: an episode whose
    record, or some rows, are damaged leaves the table; a field whose file is lost, or damaged in every episode, leaves
    the schema. Whatever is taken out or replaced is copied or moved to `lost+found/` first.

    If state.npy is lost, every episode that still has a record is shown again, cleared ones too.

    Args:
        folder: where it is; no writer may hold it, readers may go on.

    Returns:
        What was found, and is repaired now.

    Raises:
        CorruptBufferError: `schema.json` or `episodes.npy` is lost, or no field is left, without which nothing can be
            told apart; or a file is whole in itself, but not what the schema says. Nothing was changed then.
        BufferLockedError: a writer holds it.
        NotABufferError: there is no buffer.
    """
    place = Folder(path_of(folder))
    place.require()
    _require_repairable(Survey(place.path))
    if not Survey(place.path).lockable:
        _keep_schema(place)
        _move(place, ".lock")
    lock = WriterLock(place)
    lock.acquire()
    try:
        survey = Survey(place.path)
        _require_repairable(survey)
        findings = survey.findings()
        if findings:
            _repair(place, survey, findings)
            _take_over(place, lock)
        return findings
    finally:
        lock.release()


def _repair(place: Folder, survey: Survey, findings: Sequence[Finding]) -> None:
    lost = _lost_fields(survey, findings)
    stay = survey.layout.schema.all.keys() - lost
    _keep_schema(place)
    _move_leftovers(place, survey)
    for key in survey.layout.arrays:
        _unlink_twin(place, survey, key)
    for key in ("/episodes", "/state"):
        _repair_file(place, survey, key)
    _repair_state(place, survey)
    _repair_records(place, Survey(place.path))
    damage = [f for f in findings if f.lost and f.file != "checksums.npy" and f.field not in lost]
    slots = {f.slot for f in damage if f.slot is not None} - survey.spoilt.keys()
    _take_out(place, slots | Survey(place.path).cut_slots(stay))
    _repair_checksums(place, survey, findings, lost)
    for key in (key for name in sorted(stay) for key in survey.layout.keys_of(name)):
        _repair_file(place, survey, key)
    _drop_fields(place, survey.layout, lost)


def _require_repairable(survey: Survey) -> None:
    """Raise CorruptBufferError where nothing can be told apart, or OSError where a file cannot be opened at all."""
    try:
        layout = survey.layout
    except MemmapBufferError as error:
        raise CorruptBufferError(f"{error}; without a schema nothing can be repaired") from error
    if survey.strangers:
        others = ", ".join(layout.arrays[key].name for key in survey.strangers)
        raise CorruptBufferError(
            f"{survey.path}: {others} and schema.json say different things, each whole in itself; restore the one that "
            "is wrong from a copy, or move it away and repair again"
        )
    for reason in survey.broken.values():
        if not isinstance(reason, CorruptBufferError):
            raise reason
    if survey.nothing_of("/episodes"):
        raise CorruptBufferError(
            f"{survey.path}/episodes.npy is lost, and it alone says what the episodes are; restore a copy"
        )
    if len(survey.repaired.table) and all(survey.is_lost(name) for name in layout.schema.fields):
        raise CorruptBufferError(f"{survey.path}: nothing is left of any field; restore data/ from a copy")
    if survey.folder.exists(LOST) and not _is_folder(survey.folder, LOST):
        raise CorruptBufferError(f"{survey.path / LOST} is a link or no folder; move it away", path=survey.path / LOST)


def _lost_fields(survey: Survey, findings: Iterable[Finding]) -> set[str]:
    """The fields that leave the schema: nothing is there, or all episodes are damaged in it, which is no chance."""
    slots, names = survey.repaired.table.visible, survey.layout.schema.all
    nothing = {name for name in names if survey.is_lost(name)} if len(slots) else set()
    rows = [f.field for f in findings if f.slot is not None and f.file != "checksums.npy"]
    bad = {name: rows.count(name) for name in names}
    every = {name for name, n in bad.items() if n and n == len(slots) and (n > 1 or survey.is_broken(name))}
    return nothing | every if survey.layout.schema.fields.keys() - nothing - every else nothing


# Files that are no arrays


def _keep_schema(place: Folder) -> None:
    """Copy the schema to `lost+found/`: what lies there can only be read by the schema of its time."""
    place.copy_file("schema.json", place, _free(place, "schema.json"))


def _move_leftovers(place: Folder, survey: Survey) -> None:
    """An addition that was never finished goes away; an update that still can be is kept, and carried out later."""
    for name in filter(place.exists, LEFT_BEHIND):
        with suppress(MemmapBufferError, OSError):
            planned = Layout.from_json(place.read(name, MAX_SCHEMA_BYTES), name).arrays
            for array in planned.values():
                if array.name not in {kept.name for kept in survey.layout.arrays.values()}:
                    _move(place, array.name) if place.alone(array.name) else place.unlink(array.name)
        _move(place, name)
    if survey.pending:
        place.copy_file(UPDATE, place, _free(place, "redo"))
    else:
        _move(place, UPDATE)
    _move(place, redo.BAD)


def _move(place: Folder, name: str) -> None:
    """Move a file, or what else stands there, into `lost+found/`; if its folder is none, that."""
    sub = name.rpartition("/")[0]
    real = not sub or _is_folder(place, sub)
    name = name if real else sub
    if place.exists(name):
        place.rename(name, _free(place, name))
        place.sync_folders(LOST, *[sub for sub in (sub,) if sub and real])


def _is_folder(place: Folder, sub: str) -> bool:
    """Whether a subfolder is one, and no link, or is missing."""
    try:
        place.list(sub)
    except OSError:
        return False
    return True


def _free(place: Folder, name: str, suffix: str = "") -> str:
    """A name in `lost+found/` with which, and the suffix, nothing lies there yet: `name` with a number behind it."""
    flat = f"{LOST}/{name.strip('.').replace('/', '.')}"
    return next(f"{flat}.{n}" for n in count() if not place.exists(f"{flat}.{n}{suffix}"))


def _copy(
    place: Folder, name: str, new: str, first: int, size: int, header: bytes = b"", *, reserve: bool = False
) -> None:
    """Copy some bytes of a file behind a header into a new file; what is a hole stays one, unless all is reserved.

    Nothing is read through a map: on a full tmpfs, to look at a hole kills.
    """
    place.create_array(new, header, len(header) + size, reserve)
    with place.reading(name) as (source, _), place.writing(new, header, len(header) + size) as target:
        for at in range(first, first + size, CHUNK):
            count = min(CHUNK, first + size - at)
            if not is_hole(source, at, at + count):
                write_all(target, read_at(source, count, at), len(header) + at - first)
    place.sync_folders(LOST)


# The files


def _unlink_twin(place: Folder, survey: Survey, key: str) -> None:
    """Put a copy in the place of a file that has a second name, under which it stays as it is."""
    if survey.linked(key):
        array = survey.layout.arrays[key]
        size = survey.size_of(key) if key in survey.broken else array.size
        own = _free(place, array.name)
        _copy(place, array.name, own, 0, size, reserve=_is_reserved(survey, key))
        place.rename(own, array.name)


def _is_reserved(survey: Survey, key: str) -> bool:
    """Whether the whole space of a file is taken, as when it was created."""
    return CAN_RESERVE and (key in RESERVED or bool(survey.state("reserved")))


def _repair_file(place: Folder, survey: Survey, key: str) -> None:
    """Give a broken file the header and the size that it should have; what is replaced or cut off is copied away."""
    if key not in survey.broken:
        return
    array, size, reserve = survey.layout.arrays[key], survey.size_of(key), _is_reserved(survey, key)
    if not size:
        _move(place, array.name)
        place.create_array(array.name, array.header, array.size, reserve)
        return
    with place.reading(array.name) as (fd, _):
        head = read_at(fd, len(array.header), 0)
    if head != array.header:
        _copy(place, array.name, _free(place, f"{array.name}.header"), 0, len(head))
    if size > array.size:
        _copy(place, array.name, _free(place, f"{array.name}.tail"), array.size, size - array.size)
    with place.writing(array.name, b"", size) as fd:
        if reserve:  # before it has its size: a file of the right size and header is taken for whole
            syscalls.system.reserve(fd, array.size)
        syscalls.system.truncate(fd, array.size)
        write_all(fd, array.header, 0)


def _drop_fields(place: Folder, layout: Layout, lost: set[str]) -> None:
    """Move the files of lost fields away, then take them out of the schema."""
    if not lost:
        return
    for name in sorted(lost):
        for key in layout.keys_of(name):
            _move(place, layout.arrays[key].name)
    place.write_new("schema.json.new", layout.without(lost).to_json(), sync=True)
    place.rename("schema.json.new", "schema.json")


def _repair_state(place: Folder, survey: Survey) -> None:
    """Counters that follow from the records, where they are lost or cannot be."""
    words = {name: value for name, value in survey.least.items() if survey.state(name) < value}
    _write_state(place, survey.layout, {**words, **survey.state_faults(), "clean": 0})


def _write_state(place: Folder, layout: Layout, words: dict[str, int]) -> None:
    array = layout.arrays["/state"]
    with place.writing(array.name, array.header, array.size) as fd:
        write_counters(fd, layout, words)


def _repair_checksums(place: Folder, survey: Survey, findings: Iterable[Finding], lost: set[str]) -> None:
    """Write the checksums that are lost, of what stands there now; the digests in the records tell if it is right.

    Not where a field is lost: then the digest, which covers it, is written anew, and open episodes are ended.
    """
    layout, intact = survey.layout, len(survey.maps.checksums)
    now, array = Survey(place.path), layout.arrays["/checksums"]
    slots = [int(slot) for slot in now.table.visible if now.table.flags[slot] & CHECKED]
    rows = {slot: _checksums(now, slot) for slot in slots if slot >= intact}
    is_open = {slot for slot in slots if lost and now.table.flags[slot] & OPEN}
    with _records(place, layout) as put:
        for slot in rows.keys() - is_open if lost else ():
            put(slot, _digested(now, slot, rows[slot]))
    if "/checksums" in survey.broken:
        whole = np.zeros(array.shape, array.dtype)
        whole[:intact] = survey.maps.checksums
        for slot, row in rows.items():
            whole[slot] = np.frombuffer(row, array.dtype)
        _exchange(place, survey, "/checksums", whole)
    spoilt = {finding.slot for finding in findings if finding.file == array.name}
    with place.writing(array.name, array.header, array.size) as fd, _records(place, layout) as put:
        for slot in [slot for slot in slots if slot in spoilt | is_open]:
            row = _checksums(now, slot)
            write_all(fd, row, array.offset(slot))
            if slot in is_open:
                put(slot, _digested(now, slot, row, **_ended(now, slot)))


def _digested(survey: Survey, slot: int, row: bytes, **changes: int) -> bytes:
    """A slot's record with the digest of another row of checksums, and other changes."""
    values = survey.record(slot) | changes
    return seal(**values | {"digest": digest_of(row, values["columns"])})


def _ended(survey: Survey, slot: int) -> dict[str, int]:
    """The values in the record of an open episode when it ends with the step that is shown last."""
    steps, flags = int(survey.table.length[slot]), int(survey.table.flags[slot])
    last = (survey.record(slot)["round"] + steps - 1) % 2**32
    return {"flags": flags & ~OPEN | CUT, "length": steps, "stop": steps, "round": last}


def _checksums(survey: Survey, slot: int) -> bytes:
    """A visible slot's row of checksums.npy, of what stands there; zeros for what does not."""
    checksums = survey.checksums_of(slot, int(survey.table.length[slot]), bool(survey.table.flags[slot] & FINAL))
    return checksum_row(survey.layout, checksums)


def _exchange(place: Folder, survey: Survey, key: str, data: Array) -> None:
    """Put a whole new file in the place of a broken one, which is copied or moved away."""
    array, size = survey.layout.arrays[key], survey.size_of(key)
    new = _free(place, f"{array.name}.new")
    place.write_new(new, array.header, data.tobytes(), sync=True)
    if size:
        _copy(place, array.name, _free(place, array.name), 0, size)
    else:
        _move(place, array.name)
    place.rename(new, array.name)


# The table


@contextmanager
def _records(place: Folder, layout: Layout) -> Iterator[Callable[[int, bytes], None]]:
    """`put(slot, record)`, each in one write."""
    array = layout.arrays["/episodes"]
    with place.writing(array.name, array.header, array.size) as fd:
        yield lambda slot, record: write_all(fd, record, array.offset(slot))


def _repair_records(place: Folder, survey: Survey) -> None:
    """Put spoilt records right, or take them out."""
    repaired, out = survey.repaired, set()
    with _records(place, survey.layout) as put:
        for slot, word in survey.spoilt.items():
            odd = bool(word[GENERATION] & np.uint64(1))
            if odd and slot in survey.pending:
                continue
            if _is_whole(repaired, slot) if odd else repaired.table.valid[slot]:
                put(slot, repaired.maps.words[slot].tobytes())
            else:
                out.add(slot)
    _take_out(place, out)


def _is_whole(repaired: Survey, slot: int) -> bool:
    """Whether a visible episode whose rows were being overwritten is whole all the same: its checksums tell."""
    checked = slot in repaired.table.visible and repaired.table.flags[slot] & CHECKED
    return bool(checked) and not [*repaired.episode(slot)]


def _take_out(place: Folder, slots: set[int]) -> None:
    """Take slots out of the table, after copying away what was an episode."""
    if not slots:
        return
    survey = Survey(place.path)
    table = survey.repaired.table
    if len(table):  # what was retired would be shown again in the place of what is taken out
        _write_state(place, survey.layout, {"base": int(table.serial[table.visible[0]])})
    with _records(place, survey.layout) as put:
        for slot in sorted(slots):
            word = survey.maps.words[slot]
            if not word[GENERATION] & np.uint64(1) or survey.repaired.table.valid[slot]:
                _copy_away(place, survey, slot)
            put(slot, _emptied(word))


def _emptied(word: Array) -> bytes:
    """The record of a slot that holds nothing, its generation moved on, so that no reader takes it for the old one."""
    generation = int(word[GENERATION])
    following = (generation | 1) + 3 if generation < MAX_SERIAL else 2
    return following.to_bytes(8, "little") + bytes(RECORD.itemsize - 8)


def _copy_away(place: Folder, survey: Survey, slot: int) -> None:
    """The slot's record and rows as `.npy` files of their own; all its rows, where the record does not tell.

    Of compressed fields all blobs of the slot, or of a packed folder's episode; their index is as it was, so that it
    counts from the first byte of the slot, or from the first blob.
    """
    table, layout = survey.repaired.table, survey.layout
    is_valid = bool(table.valid[slot])
    length = int(table.length[slot]) if is_valid else layout.max_timesteps if layout.rows is None else 0
    has_final = not is_valid or bool(table.flags[slot] & FINAL)
    parts = {"record": ("/episodes", layout.arrays["/episodes"].offset(slot), survey.maps.words[slot].view(RECORD))}
    for name, rows in survey.maps.rows.items():
        final = layout.schema.fields[name].final
        first = int(survey.repaired.first_row(np.array([slot]), final)[0])
        parts[name] = name, layout.row_offset(name, first), rows[first : first + length + (final and has_final)]
        if name in layout.coded:
            region, data = _region(survey, name, slot, parts[name][2]), survey.maps.coded[name].data
            begin = layout.arrays[name + BLOBS].offset(0) + region.start
            parts[f"{name}.blobs"] = name + BLOBS, begin, data[region.start : region.stop]
    for name, values in survey.maps.meta.items():
        parts[name] = name, layout.arrays[name].offset(slot), values[slot : slot + 1]
    base = _free(place, f"slot-{slot}", ".record.npy")
    for name, (key, offset, part) in parts.items():
        header = ArrayFile(name, part.dtype, part.shape).header
        _copy(place, layout.arrays[key].name, f"{base}.{name}.npy", offset, part.nbytes, header)


def _region(survey: Survey, name: str, slot: int, index: Array) -> range:
    """The bytes of a slot's blobs; in a packed folder from the first to the last that the index has, if it is right."""
    if survey.layout.rows is None:
        return survey.layout.region(name, slot)
    index = index[lengths_of(index) > 0]
    right = len(index) and not fault(survey.maps.coded[name], index, None)
    return range(int(index[0, 0]), end_of(index[-1])) if right else range(0)


def _take_over(place: Folder, lock: WriterLock) -> None:
    """Finish what a dead writer left, take out what fails its checksums then, and leave the folder clean."""
    opened = WriteHandles(Storage(place.path, verify="never"), lock, power=False, checksum=True)
    try:
        take_over(opened)
        survey = Survey(place.path)
        _take_out(place, {f.slot for f in survey.findings() if f.lost and f.slot is not None})
        opened.write_state("suspect", 0)
        opened.changed()
        opened.sync()
        place.sync_folders("", *{array.name.rpartition("/")[0] for array in opened.layout.arrays.values()})
        opened.write_state("clean", 1)
        opened.sync("/state")
    finally:
        opened.close()
