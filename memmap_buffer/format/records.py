"""The 64-byte record of a slot: its words, its flags, its check. No I/O; `format`, "episodes.npy", specifies it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

RECORD = np.dtype(
    [
        *((name, "<u8") for name in ("generation", "serial")),
        ("length", "<u4"),
        *((name, "<u2") for name in ("flags", "columns")),
        ("first_row", "<u8"),
        *((name, "<u4") for name in ("time", "round", "term", "digest", "start", "stop")),
        ("check", "<u8"),
    ]
)
JOURNAL = 1024  # entries of the journal in state.npy: each names the slot of one change
STATE = np.dtype(
    [
        *((name, "<u8") for name in ("base", "next", "synced", "changes", "term", "pid", "time", "clean", "suspect")),
        ("boot", "<u8", (2,)),
        ("host", "S64"),
        ("reserved", "<u8"),
        ("nonce", "<u8"),
        ("unused", "<u8", (11,)),
        ("journal", "<u8", (JOURNAL,)),
    ]
)
WORDS = RECORD.itemsize // 8
# Positions of 8-byte words. The low and the high half of EXTENT hold the length, and the flags and `columns`; those of
# DIGEST the term and the digest; those of SHOWN `start` and `stop`.
GENERATION, SERIAL, EXTENT, FIRST_ROW, DIGEST, SHOWN, CHECK = 0, 1, 2, 3, 5, 6, 7
FLAGS, TIME, START, STOP = 5, 8, 12, 13  # positions of 4-byte halves; that of FLAGS has `columns` in its upper 16 bits
STATE_WORD = {name: STATE.fields[name][1] // 8 for name in STATE.names or () if STATE.fields}
# Names for words that the file's header calls unused: so older folders, which never wrote them, have the same header.
STATE_WORD |= {name: STATE_WORD["unused"] + i for i, name in enumerate(("inode", "device"))}

FINAL, CUT, DELETED, OPEN, TERMINATED, CHECKED, INNER_END = 1, 2, 4, 8, 16, 32, 64
ALL_FLAGS = FINAL | CUT | DELETED | OPEN | TERMINATED | CHECKED | INNER_END
MAX_SERIAL = 2**62

_PACKED = struct.Struct("<QQIHHQIIIIIIQ")
EVERY_SLOT = 2**64 - 1  # an entry of the journal: any slot may have changed

_SEED = 0x6D656D6D61706275
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_LOW, _HALF, _FLAGS = np.uint64(2**32 - 1), np.uint64(32), np.uint64(2**16 - 1)
_OTHER_FLAGS = np.uint64((2**16 - 1 & ~ALL_FLAGS) << 32)
_OPEN = np.uint64(OPEN << 32)
MAX_TERM = 2**32 - 2
FEW = 8  # up to so many records are read one by one, as plain numbers
KINDS = ("u8", "i8", "i8", "i8", "u8", "u4", "?")  # the dtypes of `Columns`
_WORD = 2**32 - 1
PART = 8192  # records that are read together: they fit the processor's cache, and outweigh the cost of numpy's calls


def check_of(words: Words) -> Words:
    """The check of each record.

    Args: words: (n, 8) uint64.
    Returns: (n,) uint64.
    """
    columns = np.array(words.T, order="C")
    return _fold(columns, *np.empty_like(columns[:2]))


def _fold(columns: Words, fold: Words, spare: Words) -> Words:
    """Compute the checks of records (8, n) into `fold`, word by word; `spare` (n,) is overwritten."""
    fold[:] = _SEED
    for column in columns[:SHOWN]:
        fold ^= column
        fold *= np.uint64(_MULTIPLIER)
        fold ^= np.right_shift(fold, np.uint64(29), out=spare)
    return fold


def seal(
    *,
    generation: int,
    serial: int,
    length: int,
    flags: int,
    first_row: int,
    time: int,
    term: int,
    round: int = 0,
    digest: int = 0,
    columns: int = 0,
    start: int = 0,
    stop: int | None = None,
    check: int = 0,
) -> bytes:
    """The 64 bytes of a record. `stop` None means the length; `check` is ignored, the right one is computed."""
    words = (
        generation,
        serial,
        length | flags << 32 | columns << 48,
        first_row,
        time | round << 32,
        term | digest << 32,
    )
    stop, check = length if stop is None else stop, fold_of(words)
    return _PACKED.pack(
        generation, serial, length, flags, columns, first_row, time, round, term, digest, start, stop, check
    )


class Columns(NamedTuple):
    """A table of records by column, each (n,).

    Attributes:
        start, length: the steps start … length - 1 are shown. `length` is the record's word `stop`: for an open episode
            it may be more than the record's `length`.
        valid: whether the record is valid by itself (`format`, "episodes.npy"), so that it holds an episode.
    """

    generation: Words
    serial: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    check: Words
    flags: npt.NDArray[np.uint32]
    valid: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls, n: int) -> Columns:
        """Columns with any content, in one piece of memory: most of it comes in large pages, which cost few faults."""
        kinds = [np.dtype(kind) for kind in KINDS]
        ends = [n * size for size in accumulate(kind.itemsize for kind in kinds)]
        memory = np.empty(ends[-1], np.uint8)
        return cls(*(memory[end - n * kind.itemsize : end].view(kind) for kind, end in zip(kinds, ends, strict=True)))


def columns_of(
    words: Words, max_timesteps: int, rows: int | None, slots: npt.NDArray[np.int64] | None = None
) -> Columns:
    """Copy records and say which are valid by themselves: by check, generation and bounds, and in a packed folder by
    rows that no other record has.

    Each record is copied once, and only the copy is looked at. The copying goes by parts that stay in the processor's
    cache: 10⁶ records take 25 ms. Within a part, word 0 of all records is copied first, then word 1, and so on: beside
    a writer that goes on, every copy of a part may be half old, half new.

    Args:
        words: (n, 8) uint64: all records, or some records of a grid.
        max_timesteps: the longest episode allowed.
        rows: None for a grid, else the number of rows of a packed folder.
        slots: (n,) the slots of the records, which in a grid determine their first rows; None: `words` are all.
    """
    if len(words) <= FEW:
        return _few_columns_of(words, max_timesteps, rows, slots)
    n, size = len(words), min(len(words), PART)
    out, first_row = Columns.empty(n), np.empty(0 if rows is None else n, np.uint64)
    expected = (np.arange(size) if slots is None else slots).astype(np.uint64) * np.uint64(max_timesteps)
    space = np.empty((WORDS + 2, size), np.uint64)  # once: what the loop allocates, the system would clear each time
    for start in range(0, n, PART):
        here, count = slice(start, start + PART), min(PART, n - start)
        part, spare = space[:WORDS, :count], space[WORDS:, :count]
        part[...] = words[here].T
        _put(out, here, part, spare)
        if rows is not None:
            first_row[here] = part[FIRST_ROW]
        row = part[FIRST_ROW] if rows is not None else expected[:count] if slots is None else expected[here]
        _limit(out, here, part, spare, row, max_timesteps)
        if slots is None:
            expected += np.uint64(size * max_timesteps)
    if rows is not None:
        _keep_apart(out, first_row, rows)
    return out


def _few_columns_of(words: Words, max_timesteps: int, rows: int | None, slots: npt.NDArray[np.int64] | None) -> Columns:
    """The columns of a few records, by plain numbers: for two records in a fifth of the time."""
    records = words.tolist()
    first_rows = [record[FIRST_ROW] for record in records]
    expected = first_rows
    if rows is None:
        expected = [slot * max_timesteps for slot in (range(len(records)) if slots is None else slots.tolist())]
    table = [_row_of(record, row, max_timesteps) for record, row in zip(records, expected, strict=True)]
    columns = zip(*table, strict=True) if table else [()] * len(KINDS)
    out = Columns(*(np.array(column, kind) for column, kind in zip(columns, KINDS, strict=True)))
    if rows is not None:
        _keep_apart(out, np.array(first_rows, np.uint64), rows)
    return out


def _row_of(words: list[int], first_row: int, max_timesteps: int) -> tuple[int, ...]:
    generation, serial, extent, row, _, _, shown, check = words
    length, flags, start, stop = extent & _WORD, extent >> 32 & 0xFFFF, shown & _WORD, shown >> 32
    valid = 0 < generation < MAX_SERIAL and not generation & 1 and serial < MAX_SERIAL and not flags & ~ALL_FLAGS
    valid = valid and row == first_row and 0 < length <= stop and start <= stop <= max_timesteps
    valid = valid and (stop == length or bool(flags & OPEN)) and check == fold_of(words[:SHOWN])
    signed = serial if serial < 1 << 63 else serial - (1 << 64)
    return generation, signed, start, stop, check, flags, valid


def fold_of(words: Sequence[int]) -> int:
    """The check of one record, computed from its first six words."""
    fold = _SEED
    for word in words:
        fold = ((fold ^ word) * _MULTIPLIER) & _MASK
        fold ^= fold >> 29
    return fold


def changed_records(words: Words, before: Columns) -> npt.NDArray[np.int64]:
    """The slots of a grid whose records may differ from `before`, the columns that were last read.

    They have another check, another generation or other shown steps: no writer changes a record and leaves all three.
    A slot that was written but not valid in `before` is taken, too: its copy may have been torn, with the check and
    the generation of the new record and other words of the old one.
    """
    halves = words.view(np.uint32)
    changed = words[:, CHECK] != before.check
    changed |= words[:, GENERATION] != before.generation
    changed |= (halves[:, START] != before.start) | (halves[:, STOP] != before.length)
    changed |= (before.generation != 0) & ~before.valid
    return np.flatnonzero(changed)


def _put(out: Columns, here: slice, part: Words, spare: Words) -> None:
    """Put records (8, n) into the columns; `valid` becomes whether the check is right."""
    for column, word in ((out.generation, GENERATION), (out.serial, SERIAL), (out.check, CHECK)):
        column[here] = part[word].view(column.dtype)
    np.bitwise_and(part[SHOWN], _LOW, out=out.start[here].view(np.uint64))
    np.right_shift(part[SHOWN], _HALF, out=out.length[here].view(np.uint64))
    out.flags[here] = np.bitwise_and(np.right_shift(part[EXTENT], _HALF, out=spare[0]), _FLAGS, out=spare[0])
    np.equal(part[CHECK], _fold(part, *spare), out=out.valid[here])


def _limit(out: Columns, here: slice, part: Words, spare: Words, first_row: Words, max_timesteps: int) -> None:
    """Void records out of bounds: a bit that may not be set, or a generation, length, first row or shown steps."""
    generation, good, (bits, more) = part[GENERATION], out.valid[here], spare
    np.bitwise_or(generation, part[SERIAL], out=bits)
    bits >>= np.uint64(MAX_SERIAL.bit_length() - 1)
    bits |= np.bitwise_and(generation, np.uint64(1), out=more)
    bits |= np.bitwise_and(part[EXTENT], _OTHER_FLAGS, out=more)
    bits |= np.bitwise_xor(part[FIRST_ROW], first_row, out=more)
    good &= bits == 0
    good &= generation != 0
    start, stop = out.start[here].view(np.uint64), out.length[here].view(np.uint64)
    length = np.bitwise_and(part[EXTENT], _LOW, out=bits)
    good &= length > 0
    good &= stop <= max_timesteps
    good &= start <= stop
    good &= stop >= length
    good &= (stop == length) | (np.bitwise_and(part[EXTENT], _OPEN, out=more) != 0)


def _keep_apart(out: Columns, first_row: Words, rows: int) -> None:
    """Void records of a packed folder whose rows lie behind the last row, or belong to another record, too."""
    length = out.length.astype(np.uint64)
    out.valid[:] &= (first_row <= rows) & (first_row + length <= rows)
    chosen = np.flatnonzero(out.valid)
    out.valid[chosen] = _disjoint(first_row[chosen], length[chosen])


def _disjoint(first: Words, length: Words) -> npt.NDArray[np.bool_]:
    """(n,) whether the rows of a record are its own alone; where two share rows, nobody can tell whose they are."""
    order = np.argsort(first)
    start, stop = first[order], (first + length)[order]
    apart = np.ones(len(order), np.bool_)
    apart[1:] &= start[1:] >= np.maximum.accumulate(stop)[:-1]
    apart[:-1] &= start[1:] >= stop[:-1]
    out = np.empty_like(apart)
    out[order] = apart
    return out
