"""`repair`: make a damaged folder whole again. Intact data stays, damaged data goes to `lost+found/`; none is deleted.

The findings come from `verification.Survey`. After a kill at any point, `repair` can be run again: damaged data is
copied first, then damaged episodes leave the table of records, and only then are their files repaired. So no record
ever names rows that a repair filled with zeros.
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
from memmap_buffer.format.layout import BLOBS, MAX_SCHEMA_BYTES, ArrayFile, Layout, PlainFile
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
CHUNK = 1 << 16  # bytes that are copied at a time


def repair(folder: str | PathLike[str]) -> list[Finding]:
    """Make a folder whole again.

    A file that is cut short, too long or has another header gets its size and header back, and its intact rows stay. A
    record with one wrong byte is corrected. Data that cannot be read any more is taken out: an episode with a damaged
    record, or damaged rows, leaves the table; a field whose file is lost, or damaged in every episode, leaves the
    schema. Whatever is taken out or replaced is copied or moved to `lost+found/` first.

    If state.npy is lost, every episode that still has a record is shown again, cleared ones too.

    Args:
        folder: its path. No writer may hold it; readers may go on.

    Returns:
        The findings of `verify`, which are repaired now.

    Raises:
        CorruptBufferError: `schema.json` or `episodes.npy` is lost, or no field is left, so that nothing can be
            repaired; or a file is whole in itself, but not as the schema says. Nothing was changed then.
        BufferLockedError: a writer holds the folder.
        NotABufferError: there is no buffer.
    """
    place = Folder(path_of(folder))
    place.require()
    _require_repairable(survey := Survey(place.path))
    if not survey.lockable:
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
    """Raise CorruptBufferError where nothing can be repaired, or OSError where a file cannot be opened at all."""
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
    """The fields that leave the schema: none of their rows is left, or all episodes are damaged in them."""
    slots, names = survey.repaired.table.visible, survey.layout.schema.all
    nothing = {name for name in names if survey.is_lost(name)} if len(slots) else set()
    damaged = [f.field for f in findings if f.slot is not None and f.file != "checksums.npy"]
    num_damaged = {name: damaged.count(name) for name in names}
    in_all = {name for name, n in num_damaged.items() if n and n == len(slots) and (n > 1 or survey.is_broken(name))}
    return nothing | in_all if survey.layout.schema.fields.keys() - nothing - in_all else nothing


# Files that are no arrays


def _keep_schema(place: Folder) -> None:
    """Copy the schema to `lost+found/`: the rows there can only be read by the schema of when they were copied."""
    place.copy_file("schema.json", place, _free(place, "schema.json"))


def _move_leftovers(place: Folder, survey: Survey) -> None:
    """Move away the files of an unfinished change of the schema, and an unfinished update that cannot be finished."""
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
    """Move what has this name into `lost+found/`; if its folder is a link or no folder, move that."""
    sub = name.rpartition("/")[0]
    real = not sub or _is_folder(place, sub)
    name = name if real else sub
    if place.exists(name):
        place.rename(name, _free(place, name))
        place.sync_folders(LOST, *[sub for sub in (sub,) if sub and real])


def _is_folder(place: Folder, sub: str) -> bool:
    """Whether a subfolder is a real folder, not a link, or is missing."""
    try:
        place.list(sub)
    except OSError:
        return False
    return True


def _free(place: Folder, name: str, suffix: str = "") -> str:
    """A free path in `lost+found/`: `name` and a number, such that nothing with `suffix` appended is there either."""
    path = f"{LOST}/{name.strip('.').replace('/', '.')}"
    return next(f"{path}.{n}" for n in count() if not place.exists(f"{path}.{n}{suffix}"))


def _copy(place: Folder, name: str, new: ArrayFile, first: int, *, reserve: bool = False) -> None:
    """Fill a new file with the bytes of another, from offset `first` on. Holes stay, unless `reserve`.

    No byte is read through a map: on a full tmpfs, a read of a hole kills the process.
    """
    place.create_array(new, reserve)
    start, stop = new.offset(0), first + new.size - new.offset(0)
    with place.reading(name) as (source, _), place.writing(new) as target:
        for at in range(first, stop, CHUNK):
            count = min(CHUNK, stop - at)
            if not is_hole(source, at, at + count):
                write_all(target, read_at(source, count, at), start + at - first)
    place.sync_folders(LOST)


# The files


def _unlink_twin(place: Folder, survey: Survey, key: str) -> None:
    """Replace a file that has a second name (a hard link) by a copy; the file under the other name is not changed."""
    if survey.linked(key):
        array = survey.layout.arrays[key]
        size = survey.size_of(key) if key in survey.broken else array.size
        copy = PlainFile(_free(place, array.name), size)
        _copy(place, array.name, copy, 0, reserve=_is_reserved(survey, key))
        place.rename(copy.name, array.name)


def _is_reserved(survey: Survey, key: str) -> bool:
    """Whether all space of a file is to be reserved on the disk, as at its creation."""
    return CAN_RESERVE and (key in RESERVED or bool(survey.state("reserved")))


def _repair_file(place: Folder, survey: Survey, key: str) -> None:
    """Give a broken file its right header and size; a wrong header, or bytes beyond the size, are copied away first."""
    if key not in survey.broken:
        return
    array, size, reserve = survey.layout.arrays[key], survey.size_of(key), _is_reserved(survey, key)
    if not size:
        _move(place, array.name)
        place.create_array(array, reserve)
        return
    with place.reading(array.name) as (fd, _):
        head = read_at(fd, len(array.header), 0)
    if head != array.header:
        _copy(place, array.name, PlainFile(_free(place, f"{array.name}.header"), len(head)), 0)
    if size > array.size:
        tail = PlainFile(_free(place, f"{array.name}.tail"), size - array.size)
        _copy(place, array.name, tail, array.size)
    with place.writing(PlainFile(array.name, size)) as fd:
        if reserve:  # before the size is set: a file of the right size and header counts as whole
            syscalls.system.allocate(fd, 0, array.size)
        syscalls.system.truncate(fd, array.size)
        write_all(fd, array.header, 0)


def _drop_fields(place: Folder, layout: Layout, lost: set[str]) -> None:
    """Move the files of lost fields away, then take them out of the schema."""
    if not lost:
        return
    for name in sorted(lost):
        for key in layout.keys_of(name):
            _move(place, layout.arrays[key].name)
    place.replace_file("schema.json", layout.without(lost).to_json())


def _repair_state(place: Folder, survey: Survey) -> None:
    """Set counters that are lost or impossible to values that follow from the records."""
    words = {name: value for name, value in survey.least.items() if survey.state(name) < value}
    _write_state(place, survey.layout, {**words, **survey.state_faults(), "clean": 0})


def _write_state(place: Folder, layout: Layout, words: dict[str, int]) -> None:
    with place.writing(layout.arrays["/state"]) as fd:
        write_counters(fd, layout, words)


def _repair_checksums(place: Folder, survey: Survey, findings: Iterable[Finding], lost: set[str]) -> None:
    """Write lost or wrong checksums anew, from the rows as they are; the digest in the record tells if these are right.

    Where a field is lost that does not work, as the digest covers it: then the digest is written anew, too, and open
    episodes are ended.
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
        checksums = np.zeros(array.shape, array.dtype)
        checksums[:intact] = survey.maps.checksums
        for slot, row in rows.items():
            checksums[slot] = np.frombuffer(row, array.dtype)
        _exchange(place, survey, "/checksums", checksums)
    spoilt = {finding.slot for finding in findings if finding.file == array.name}
    with place.writing(array) as fd, _records(place, layout) as put:
        for slot in [slot for slot in slots if slot in spoilt | is_open]:
            row = _checksums(now, slot)
            write_all(fd, row, array.offset(slot))
            if slot in is_open:
                put(slot, _digested(now, slot, row, **_ended(now, slot)))


def _digested(survey: Survey, slot: int, row: bytes, **changes: int) -> bytes:
    """A slot's record, as bytes, with the digest of the checksums `row`, and with other values changed."""
    values = survey.record(slot) | changes
    return seal(**values | {"digest": digest_of(row, values["columns"])})


def _ended(survey: Survey, slot: int) -> dict[str, int]:
    """The values that change in the record of an open episode if it ends with the last shown step."""
    steps, flags = int(survey.table.length[slot]), int(survey.table.flags[slot])
    last = (survey.record(slot)["round"] + steps - 1) % 2**32
    return {"flags": flags & ~OPEN | CUT, "length": steps, "stop": steps, "round": last}


def _checksums(survey: Survey, slot: int) -> bytes:
    """A visible slot's row of checksums.npy, computed from its rows as they are; zeros for fields that are gone."""
    checksums = survey.checksums_of(slot, int(survey.table.length[slot]), bool(survey.table.flags[slot] & FINAL))
    return checksum_row(survey.layout, checksums)


def _exchange(place: Folder, survey: Survey, key: str, data: Array) -> None:
    """Replace a broken file by a new one with this content; the broken file is copied or moved away first."""
    array, size = survey.layout.arrays[key], survey.size_of(key)
    new = _free(place, f"{array.name}.new")
    place.write_new(new, array.header, data.tobytes(), sync=True)
    if size:
        _copy(place, array.name, PlainFile(_free(place, array.name), size), 0)
    else:
        _move(place, array.name)
    place.rename(new, array.name)


# The table


@contextmanager
def _records(place: Folder, layout: Layout) -> Iterator[Callable[[int, bytes], None]]:
    """A function (slot, record) that writes one record, by one system call, within the block."""
    array = layout.arrays["/episodes"]
    with place.writing(array) as fd:
        yield lambda slot, record: write_all(fd, record, array.offset(slot))


def _repair_records(place: Folder, survey: Survey) -> None:
    """Write the mended record for each spoilt one; take slots out that cannot be mended."""
    repaired, lost_slots = survey.repaired, set()
    with _records(place, survey.layout) as put:
        for slot, word in survey.spoilt.items():
            odd = bool(word[GENERATION] & np.uint64(1))
            if odd and slot in survey.pending:
                continue
            if _is_whole(repaired, slot) if odd else repaired.table.valid[slot]:
                put(slot, repaired.maps.words[slot].tobytes())
            else:
                lost_slots.add(slot)
    _take_out(place, lost_slots)


def _is_whole(repaired: Survey, slot: int) -> bool:
    """Whether an episode whose slot was about to be overwritten is whole all the same: its checksums tell."""
    checked = slot in repaired.table.visible and repaired.table.flags[slot] & CHECKED
    return bool(checked) and not [*repaired.episode(slot)]


def _take_out(place: Folder, slots: set[int]) -> None:
    """Empty the records of slots, after copying their episodes, if they had one, to `lost+found/`."""
    if not slots:
        return
    survey = Survey(place.path)
    table = survey.repaired.table
    if len(table):  # else retired episodes would be shown again in the place of those that are taken out
        _write_state(place, survey.layout, {"base": int(table.serial[table.visible[0]])})
    with _records(place, survey.layout) as put:
        for slot in sorted(slots):
            word = survey.maps.words[slot]
            if not word[GENERATION] & np.uint64(1) or survey.repaired.table.valid[slot]:
                _copy_away(place, survey, slot)
            put(slot, _emptied(word))


def _emptied(word: Array) -> bytes:
    """The record of an empty slot, as bytes, with a higher generation, so that readers see the change."""
    generation = int(word[GENERATION])
    next_generation = (generation | 1) + 3 if generation < MAX_SERIAL else 2
    return next_generation.to_bytes(8, "little") + bytes(RECORD.itemsize - 8)


def _copy_away(place: Folder, survey: Survey, slot: int) -> None:
    """Copy a slot's record and rows to `.npy` files in `lost+found/`: all rows of the slot, if its record is damaged.

    Of compressed fields, the index and all blobs of the slot are copied, or those of the episode in a packed folder.
    The index is not changed: from its offsets the slot's first byte is to be subtracted, or that of the first blob.
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
        copy = ArrayFile(f"{base}.{name}.npy", part.dtype, part.shape)
        _copy(place, layout.arrays[key].name, copy, offset)


def _region(survey: Survey, name: str, slot: int, index: Array) -> range:
    """The bytes of a slot's blobs; in a packed folder those that its index names, or none if that is damaged."""
    if survey.layout.rows is None:
        return survey.layout.region(name, slot)
    index = index[lengths_of(index) > 0]
    is_right = len(index) and not fault(survey.maps.coded[name], index, None)
    return range(int(index[0, 0]), end_of(index[-1])) if is_right else range(0)


def _take_over(place: Folder, lock: WriterLock) -> None:
    """Finish what a dead writer left, take out episodes that fail their checksums then, and mark the folder clean."""
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
