"""Changing a published episode in place, atomically: first all new bytes into `.redo`, then the files.

The file is `MBREDO1\\n`, two u8 (the bytes of the head, and of the whole file), two u4 (the CRC-32 of the head, and of
what follows it), then the head, and the pieces' bytes one after another. The head is JSON, a list of {slot, serial,
generation, record, pieces: [[file, offset, size], …]}, one for each episode; `generation` is the even one before the
change, `record` the new record in hexadecimal.

What a writer left is carried through by the next. A file that is shorter than it says was not finished, so that nothing
has changed yet, and one that is of no episode here, or was carried out, is not needed: both are dropped. One that is
longer than it says, or than a change can be, or fails a check, is put aside as `.redo.bad`, of which the last one is
kept. It is read piece by piece, and not at all before its head is known to be right.
"""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError
from memmap_buffer.format.blobs import contents_of, encode, encode_many, end_of, index_of
from memmap_buffer.format.checksums import EMPTY, Sums, add_rows, checksum, checksum_of, crc32, digest_of
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.folder import UPDATE
from memmap_buffer.format.layout import BLOBS, Layout
from memmap_buffer.format.records import (
    CHECK,
    CHECKED,
    FINAL,
    GENERATION,
    INNER_END,
    OPEN,
    RECORD,
    TERMINATED,
    check_of,
    seal,
)
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import read_at, write_all
from memmap_buffer.writing.commit import SlotWriter, WriteHandles, require_room

log = logging.getLogger("memmap_buffer")

BAD = f"{UPDATE}.bad"
MAGIC = b"MBREDO1\n"
START = struct.Struct("<8sQQII")
MAX_HEAD = 4 << 20
PART = 1 << 20  # bytes that are read, or written, at once
MAX_SLOTS = 64  # that are changed together: readers wait for them
MAX_PIECES = 32  # of a field: each costs a write, and 40 bytes of the head


@dataclass(frozen=True)
class Region:
    """Some bytes of an open file."""

    fd: int
    first: int
    size: int

    def __len__(self) -> int:
        return self.size

    def parts(self) -> Iterator[bytes]:
        """The bytes, some at a time. Raises CorruptBufferError: the file ends before."""
        for at in range(0, self.size, PART):
            data = read_at(self.fd, min(PART, self.size - at), self.first + at)
            if len(data) < min(PART, self.size - at):
                raise CorruptBufferError(f"{UPDATE} was cut while it was read; another program changed it, open again")
            yield data


Piece: TypeAlias = "tuple[str, int, bytes | Region]"


@dataclass(frozen=True)
class Rewrite:
    """New bytes for one slot: `pieces` are (file key, offset, bytes), `record` is the whole new record."""

    slot: int
    serial: int
    generation: int
    record: bytes
    pieces: Sequence[Piece]

    @property
    def head(self) -> dict[str, Any]:
        """The rewrite as the head of `.redo` has it."""
        values = {"slot": self.slot, "serial": self.serial, "generation": self.generation, "record": self.record.hex()}
        return {**values, "pieces": [[key, at, len(data)] for key, at, data in self.pieces]}

    @property
    def size(self) -> int:
        """Bytes of all pieces, and about those of the head."""
        return sum(len(data) + 64 + 6 * len(key) for key, _, data in self.pieces)  # JSON takes 6 bytes for some letters


def to_parts(rewrites: Sequence[Rewrite]) -> Iterator[bytes]:
    """The bytes of `.redo`; in one piece where they are few."""
    head = json.dumps([rewrite.head for rewrite in rewrites]).encode()
    crc, size = 0, START.size + len(head)
    for part in _data(rewrites):
        crc, size = crc32(part, crc), size + len(part)
    start = START.pack(MAGIC, len(head), size, crc32(head), crc) + head
    if size <= PART:
        yield b"".join([start, *_data(rewrites)])
        return
    yield start
    yield from _data(rewrites)


def _data(rewrites: Sequence[Rewrite]) -> Iterator[bytes]:
    """The bytes of all pieces of some rewrites."""
    return (part for rewrite in rewrites for _, _, data in rewrite.pieces for part in _parts(data))


def _parts(data: bytes | Region) -> Iterable[bytes]:
    return (data,) if isinstance(data, bytes) else data.parts()


class Steps(NamedTuple):
    """New values of some rows of a field in one slot.

    Attributes:
        t: (n,) int64 the timesteps, ascending; the one behind the last is the final observation's.
        values: (n, *field) as stored.
    """

    t: IntArray
    values: Array

    @classmethod
    def from_first(cls, values: Array) -> Steps:
        """The first timesteps."""
        return cls(np.arange(len(values)), values)

    @classmethod
    def by_slot(cls, slots: IntArray, t: IntArray, values: Array) -> dict[int, Steps]:
        """New values by slot, of timesteps (N,) in any order; the last values of a timestep that comes twice."""
        order = np.lexsort((t, slots))
        slots, t = slots[order], t[order]
        is_last = np.ones(len(t), np.bool_)
        is_last[:-1] = (slots[1:] != slots[:-1]) | (t[1:] != t[:-1])
        slots, t, values = slots[is_last], t[is_last], values[order[is_last]]
        each, begins = np.unique(slots, return_index=True)
        parts = zip(each.tolist(), np.split(t, begins[1:]), np.split(values, begins[1:]), strict=False)  # of none, one
        return {slot: cls(*steps) for slot, *steps in parts}

    def within(self, column: Array) -> Array:
        """A copy of a column from timestep 0 on, with these values; they themselves where they are all of it."""
        if len(self.t) == len(column):
            return self.values
        changed = column.copy()
        changed[self.t] = self.values
        return changed

    def pieces(self, key: str, layout: Layout, first: int, column: Array) -> list[Piece]:
        """The bytes to write to a column, which lies from row `first` on: each run, or one piece where they are many.

        Args:
            key: of the file.
            layout: of the folder.
            first: see there.
            column: as it is to be.
        """
        t = self.t
        begins, stops = t[:1], t[-1:] + 1
        if stops[0] - begins[0] > len(t):
            cuts = np.flatnonzero(np.diff(t) != 1) + 1
            if len(cuts) < MAX_PIECES:
                begins, stops = t[[0, *cuts]], t[[*cuts - 1, -1]] + 1
        runs = zip(begins.tolist(), stops.tolist(), strict=True)
        return [(key, layout.row_offset(key, first + begin), column[begin:stop].tobytes()) for begin, stop in runs]


class Unfinished(NamedTuple):
    """The rewrites of `.redo` that are due, or why it is put aside; neither, where it may be dropped."""

    rewrites: tuple[Rewrite, ...] = ()
    why: str = ""


@contextmanager
def unfinished(storage: Storage) -> Iterator[Unfinished]:
    """The rewrites that a writer did not finish, or is at; their pieces may be read within the block.

    Raises: FileNotFoundError: nothing. CorruptBufferError: it is a link or no plain file.
    """
    with storage.folder.reading(UPDATE) as (fd, size):
        yield _unfinished(storage, fd, size)


def _unfinished(storage: Storage, fd: int, size: int) -> Unfinished:
    start = read_at(fd, START.size, 0)
    if not MAGIC.startswith(start[: len(MAGIC)]):
        return Unfinished(why="is none that a writer makes")
    if len(start) < START.size:
        return Unfinished()
    _, head_size, stated, head_crc, crc = START.unpack(start)
    most = START.size + MAX_HEAD + PART + sum(array.row_bytes for array in storage.layout.arrays.values())
    if size > stated or stated > most or head_size > min(stated, MAX_HEAD):
        return Unfinished(why=f"has {size} bytes, and says {stated} of {most} that are possible")
    if size < stated:
        return Unfinished()
    head = read_at(fd, head_size, START.size)
    rewrites = _parsed(head, fd, size) if crc32(head) == head_crc else None
    if rewrites is None:
        return Unfinished(why="fails the check of its head")
    due = tuple(rewrite for rewrite in rewrites if _applies(storage, rewrite))
    got = 0
    for part in _data(rewrites) if due else ():
        got = crc32(part, got)
    return Unfinished(why="fails its check") if due and got != crc else Unfinished(due)


def _parsed(text: bytes, fd: int, size: int) -> list[Rewrite] | None:
    """The rewrites of a head, or None where it is none that `to_parts` makes."""
    rewrites, at = [], START.size + len(text)
    try:
        for head in json.loads(text):
            pieces = []
            for key, offset, length in head["pieces"]:
                pieces.append((str(key), _whole(offset), Region(fd, at, _whole(length))))
                at += length
            slot, serial, generation = (_whole(head[key]) for key in ("slot", "serial", "generation"))
            record = bytes.fromhex(head["record"])
            if len(record) != RECORD.itemsize:
                return None
            rewrites.append(Rewrite(slot, serial, generation, record, pieces))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return rewrites if at == size else None


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise TypeError(f"got {value!r}, expected a whole number")
    return value


def _applies(storage: Storage, rewrite: Rewrite) -> bool:
    """Whether the slot holds the episode as it was before the change or within it, and every piece is of its rows."""
    layout, words = storage.layout, storage.maps.words
    if not layout.writable or rewrite.slot >= len(words):
        return False
    now, new = words[rewrite.slot], np.frombuffer(rewrite.record, np.uint64)
    old, record = now.view(RECORD)[0], new.view(RECORD)[0]
    steps = int(now[GENERATION]) - rewrite.generation
    same = all(old[name] == record[name] for name in ("serial", "start", "stop", "first_row"))
    same = same and bool(record["length"] == record["stop"] or record["flags"] & OPEN)
    sealed = new[CHECK] == check_of(new[None])[0] and int(record["generation"]) == rewrite.generation + 2
    return bool(
        (same and sealed and old["serial"] == rewrite.serial and 0 <= steps < 2)
        and all(_inside(layout, rewrite.slot, key, offset, len(data)) for key, offset, data in rewrite.pieces)
    )


def _inside(layout: Layout, slot: int, key: str, offset: int, size: int) -> bool:
    """Whether a piece lies within the bytes of a slot: `.redo` may come from a stranger."""
    if key not in layout.keys_of_episodes and key != "/checksums":
        return False
    array = layout.arrays[key]
    return array.offset(slot) <= offset <= array.offset(slot + 1) - size


def plan_update(
    files: WriteHandles,
    slot: int,
    rows: Mapping[str, Steps],
    meta: Mapping[str, Array],
    finals: Mapping[str, Array] | None = None,
) -> Rewrite:
    """The rewrite that replaces some timesteps of some fields, and some meta fields, of a visible episode.

    Args:
        files: the open files.
        slot: where the episode is.
        rows: name -> the new values of timesteps that it has.
        meta: name -> one stored value; of an episode that is closed.
        finals: the final observation, for an episode that has none.
    """
    storage, layout = files.storage, files.layout
    record = storage.record(slot)
    length, flags = record["length"], record["flags"]  # of an open episode the steps that its checksums are of
    row, sums = None, dict[str, Sums]()
    # Where none are kept, no row was ever written, and looking at a hole through a map kills on a full tmpfs.
    if flags & CHECKED and files.checksum:
        row = _open_checksums(storage, slot, length) if flags & OPEN else storage.maps.checksums[slot].tolist()
    if not rows.keys().isdisjoint(layout.schema.ends):
        record["flags"] = flags & ~(TERMINATED | INNER_END) | ending(storage, slot, length, rows)
    pieces: list[Piece] = []
    for name, new in rows.items():
        first, has_final = storage.start_of(name, slot), layout.schema.fields[name].final and bool(flags & FINAL)
        column = storage.maps.rows[name][first : first + record["stop"] + has_final]
        if name in layout.coded:
            written, contents = _blob_pieces(files, name, slot, new, column, length + has_final)
        else:
            changed = new.within(column)
            written, contents = new.pieces(name, layout, first, changed), changed[: length + has_final]
        pieces += written
        if row is not None:
            sums[name] = add_rows(EMPTY, contents)
    for name in finals or {}:
        if row is not None:  # of the steps alone: an earlier call may have written the final observation already
            first = storage.start_of(name, slot)
            sums[name] = storage.sums_of_rows(name, first, first + length)
    return _planned(files, slot, record, pieces, row, sums, finals or {}, meta)


def _blob_pieces(
    files: WriteHandles, name: str, slot: int, new: Steps, column: Array, summed: int
) -> tuple[list[Piece], Array]:
    """The pieces that lay all timesteps of a compressed field out anew, and what its checksum is of.

    Args:
        files: the open files.
        name: the field.
        slot: where the episode is.
        new: the timesteps that are encoded.
        column: (n, 2) the index of all; the blobs of the others are taken as they are.
        summed: the first rows of which the checksum is.
    """
    layout, coded = files.layout, files.storage.maps.coded[name]
    kept = np.ones(len(column), np.bool_)
    kept[new.t] = False
    blobs = [b""] * len(column)
    for t, blob in zip(new.t.tolist(), encode_many(coded.field, new.values, coded.dictionary), strict=True):
        blobs[t] = blob
    for t, before in zip(np.flatnonzero(kept).tolist(), coded.blobs(column[kept]), strict=True):
        if before is None:
            raise files.storage.damaged_blob(name, f"timestep {t} of slot {slot} has no blob")
        blobs[t] = before
    index = index_of(coded.field, blobs, layout.region(name, slot).start, coded.dictionary)
    index[kept, 1] = column[kept, 1]
    if len(index):
        require_room(layout, name, slot, end_of(index[-1]))
    row = layout.row_offset(name, files.storage.start_of(name, slot))
    begin = layout.arrays[name + BLOBS].offset(slot)
    pieces: list[Piece] = [(name, row, index.tobytes()), (name + BLOBS, begin, b"".join(blobs))]
    return pieces, contents_of(index[:summed], blobs[:summed])


def plan_end(
    files: WriteHandles, written: SlotWriter, flags: int, finals: Mapping[str, Array], meta: Mapping[str, Array]
) -> Rewrite:
    """The rewrite that ends an episode whose steps are published, with meta fields that were set after the first one.

    Args:
        files: the open files.
        written: what the steps were written by.
        flags: of the record.
        finals: the final observation, or nothing.
        meta: all meta fields.
    """
    written.give_back()
    record = files.storage.record(written.slot)
    record |= {"flags": flags, "length": record["stop"], "time": int(time.time()), "round": written.round % 2**32}
    row, sums = None, {}
    if files.checksum:
        record |= {"flags": flags | CHECKED, "columns": files.layout.used_columns}
        written.sum_up()
        row, sums = [0] * files.layout.columns, written.sums.copy()
    return _planned(files, written.slot, record, [], row, sums, finals, meta)


def _planned(
    files: WriteHandles,
    slot: int,
    record: dict[str, int],
    pieces: list[Piece],
    row: list[int] | None,
    sums: dict[str, Sums],
    finals: Mapping[str, Array],
    meta: Mapping[str, Array],
) -> Rewrite:
    """The rewrite of these pieces, a final observation, meta fields, and the checksums of all, where there are some."""
    layout, generation = files.layout, record["generation"]
    for name, value in finals.items():
        behind, record["flags"] = slot * (layout.max_timesteps + 1) + record["length"], record["flags"] | FINAL
        if name in layout.coded:
            coded, data = files.storage.maps.coded[name], layout.arrays[name + BLOBS].offset(0)
            blobs = encode(coded.field, value[None], coded.dictionary)
            index = index_of(coded.field, blobs, files.end_of_blobs(name, slot, record["length"]), coded.dictionary)
            require_room(layout, name, slot, end_of(index[0]))
            pieces.append((name + BLOBS, data + int(index[0, 0]), blobs[0]))
            value, content = index, contents_of(index, blobs)
        else:
            content = value
        pieces.append((name, layout.row_offset(name, behind), value.tobytes()))
        if row is not None:
            sums[name] = add_rows(sums[name], content)
    for name, value in meta.items():
        pieces.append((name, layout.arrays[name].offset(slot), value.tobytes()))
        if row is not None:
            row[layout.column_of[name]] = checksum(value)
    if row is not None:
        for name, of in sums.items():
            row[layout.column_of[name]] = checksum_of(of)
        packed = struct.pack(layout.checksum_format, *row)
        if not record["flags"] & OPEN:
            pieces.append(("/checksums", layout.arrays["/checksums"].offset(slot), packed))
        record["digest"] = digest_of(packed, record["columns"])
    else:
        record |= {"flags": record["flags"] & ~CHECKED, "columns": 0, "digest": 0}
    record["generation"] = generation + 2
    return Rewrite(slot, record["serial"], generation, seal(**record), pieces)


def _open_checksums(storage: Storage, slot: int, length: int) -> list[int]:
    """The row of checksums.npy that the digest of an open episode is of: of its first `length` timesteps."""
    row, column_of = [0] * storage.layout.columns, storage.layout.column_of
    for name, value in storage.checksums_of(slot, length, False).items():
        row[column_of[name]] = value
    return row


def ending(storage: Storage, slot: int, length: int, rows: Mapping[str, Steps]) -> int:
    """The flags that say how an episode ends, once some timesteps of some fields are replaced."""
    schema, flags = storage.layout.schema, 0
    for name in schema.ends:
        first = storage.start_of(name, slot)
        column = storage.maps.rows[name][first : first + length]
        column = rows[name].within(column) if name in rows else column
        flags |= INNER_END * bool(column[:-1].any())
        flags |= TERMINATED * (name == schema.terminated and bool(column[-1].any()))
    return flags


def carry_out(files: WriteHandles, rewrites: Iterable[Rewrite]) -> None:
    """Carry out rewrites, some together: with one redo file, and one barrier per file for all.

    Args:
        files: the open files.
        rewrites: each is asked for when those before it are carried out, or are to be with it; of a slot that comes
            twice together the last counts, and has what the first has.

    Raises: OSError: before the redo file was whole nothing changed; after it, the next holder of the lock finishes.
    """
    group: dict[int, Rewrite] = {}
    size = 0
    for rewrite in rewrites:
        group[rewrite.slot] = rewrite
        size += rewrite.size
        if size > PART or len(group) == MAX_SLOTS:
            _carry_out_together(files, [*group.values()])
            group, size = {}, 0
    if group:
        _carry_out_together(files, [*group.values()])


def _carry_out_together(files: WriteHandles, rewrites: Sequence[Rewrite]) -> None:
    files.storage.folder.write_new(UPDATE, *to_parts(rewrites), sync=files.power)
    _apply(files, rewrites, power=files.power)


def finish(files: WriteHandles) -> bool:
    """Carry a redo file that a dead writer left through to its end; drop it, or put it aside, where that cannot be.

    Returns: whether episodes that were hidden by it are back.
    """
    folder = files.storage.folder
    if not folder.exists(UPDATE):
        return False
    with unfinished(files.storage) as update:
        if update.rewrites:
            serials = [rewrite.serial for rewrite in update.rewrites]
            log.warning("%s: finishing an update of episodes %s, interrupted before", folder.path, serials)
            # With barriers whatever the durability of this writer: that of the dead one may have been "power".
            _apply(files, update.rewrites, power=True)
            return True
    files.changed()  # it may have been carried out, but for this
    if not update.why:
        folder.unlink(UPDATE)
        return False
    text = "%s: %s, which an update left, %s; it is put aside as %s, and an episode that it was to change may be lost"
    log.warning(text, folder.path, UPDATE, update.why, BAD)
    folder.rename(UPDATE, BAD)
    return False


def _apply(files: WriteHandles, rewrites: Sequence[Rewrite], *, power: bool) -> None:
    """Carry rewrites out: one by one, so that one episode is hidden at a time, or with barriers for all together."""
    for group in [rewrites] if power else [[rewrite] for rewrite in rewrites]:
        _change(files, group, files.sync if power else lambda *_: None)
    files.storage.folder.unlink(UPDATE)


def _change(files: WriteHandles, rewrites: Sequence[Rewrite], wait: Callable[..., None]) -> None:
    slots = [rewrite.slot for rewrite in rewrites]
    for rewrite in rewrites:
        files.write_generation(rewrite.slot, rewrite.generation | 1)
    files.changed(slots)  # before a row changes: what was read until the counter rose is of the old ones
    wait("/episodes")  # else the disk may have some new rows under an even generation, which whoever reads first trusts
    pieces = [piece for rewrite in rewrites for piece in rewrite.pieces]
    for key, offset, data in pieces:
        for part in _parts(data):
            write_all(files.fd[key], part, offset)
            offset += len(part)
    wait(*dict.fromkeys(key for key, _, _ in pieces))
    for rewrite in rewrites:
        files.write_record(rewrite.slot, rewrite.record)
    wait("/episodes")
    files.changed(slots)
