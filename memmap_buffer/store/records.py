"""The 64-byte record of a slot: its words, its flags, its check. Pure; the format is in `files`."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

RECORD = np.dtype(
    [
        *((name, "<u8") for name in ("generation", "serial")),
        *((name, "<u4") for name in ("length", "flags")),
        *((name, "<u8") for name in ("first_row", "time", "epoch")),
        *((name, "<u4") for name in ("digest", "columns")),
        ("check", "<u8"),
    ]
)
STATE = np.dtype(
    [
        *((name, "<u8") for name in ("base", "next", "synced", "changes", "epoch", "pid", "time", "clean", "suspect")),
        ("boot", "<u8", (2,)),
        ("host", "S64"),
        ("reserved", "<u8", (13,)),
    ]
)
WORDS = RECORD.itemsize // 8
GENERATION, SERIAL, EXTENT, FIRST_ROW, CHECK = 0, 1, 2, 3, 7  # words; EXTENT: the length, the flags above it
LENGTH, FLAGS = 4, 5  # half words
STATE_WORD = {name: STATE.fields[name][1] // 8 for name in STATE.names or () if STATE.fields}

FINAL, CUT, DELETED, OPEN, TERMINATED, CHECKED = 1, 2, 4, 8, 16, 32
ALL_FLAGS = FINAL | CUT | DELETED | OPEN | TERMINATED | CHECKED
MAX_SERIAL = 2**62

_PACKED = struct.Struct("<QQIIQQQIIQ")

_SEED = 0x6D656D6D61706275
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_LOW = np.uint64(2**32 - 1)
PART = 4096  # records that are looked at together


def check_of(words: Words) -> Words:
    """The check of each record.

    Args: words: (n, 8) uint64.
    Returns: (n,) uint64.
    """
    return _fold(np.array(words.T, order="C"))


def _fold(columns: Words) -> Words:
    """The same of records (8, n), word by word."""
    fold = np.full(columns.shape[1], _SEED, np.uint64)
    for column in columns[:CHECK]:
        fold ^= column
        fold *= np.uint64(_MULTIPLIER)
        fold ^= fold >> np.uint64(29)
    return fold


def seal(
    *,
    generation: int,
    serial: int,
    length: int,
    flags: int,
    first_row: int,
    time: int,
    epoch: int,
    digest: int = 0,
    columns: int = 0,
    check: int = 0,
) -> bytes:
    """A record as bytes, its check filled in."""
    fold = _SEED
    for word in (generation, serial, length | flags << 32, first_row, time, epoch, digest | columns << 32):
        fold = ((fold ^ word) * _MULTIPLIER) & _MASK
        fold ^= fold >> 29
    return _PACKED.pack(generation, serial, length, flags, first_row, time, epoch, digest, columns, fold)


class Columns(NamedTuple):
    """A table of records by column, all (n,); `valid` says which hold an episode (`files`)."""

    valid: npt.NDArray[np.bool_]
    generation: Words
    serial: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    flags: npt.NDArray[np.uint32]
    first_row: Words
    check: Words


def columns_of(words: Words, max_timesteps: int, rows: int | None) -> Columns:
    """Copy a table and say which records hold an episode, by themselves: check, generation, bounds; in a packed
    folder, rows of its own.

    A record is looked at as it was copied, once. In parts that stay in the processor's cache: 10⁶ records take 30 ms.

    Args:
        words: (n, 8) uint64, the whole table (a grid's first rows follow from the slot).
        max_timesteps: the longest episode allowed.
        rows: None for a grid, else the rows of a packed folder.
    """
    n = len(words)
    kinds: tuple[Any, ...] = (np.bool_, np.uint64, np.int64, np.int64, np.uint32, np.uint64, np.uint64)
    arrays: list[Any] = [np.empty(n, kind) for kind in kinds]
    out = Columns(*arrays)
    for start in range(0, n, PART):
        part = np.array(words[start : start + PART].T, order="C")
        good = _sound(part, max_timesteps, rows)
        if rows is None:
            good &= part[FIRST_ROW] == np.arange(start, start + len(good), dtype=np.uint64) * np.uint64(max_timesteps)
        extent = part[EXTENT]
        values = (good, part[GENERATION], part[SERIAL], extent & _LOW, extent >> np.uint64(32), part[FIRST_ROW])
        for column, value in zip(arrays, (*values, part[CHECK]), strict=True):
            column[start : start + PART] = value
    if rows is not None:
        chosen = np.flatnonzero(out.valid)
        out.valid[chosen] = _disjoint(out.first_row[chosen], out.length[chosen].astype(np.uint64))
    return out


def valid(words: Words, max_timesteps: int, rows: int | None) -> npt.NDArray[np.bool_]:
    """Which records hold an episode, (n,); see `columns_of`."""
    return columns_of(words, max_timesteps, rows).valid


def _sound(part: Words, max_timesteps: int, rows: int | None) -> npt.NDArray[np.bool_]:
    """Which records (8, n) are whole and within bounds."""
    generation, extent, first_row = part[GENERATION], part[EXTENT], part[FIRST_ROW]
    length = extent & _LOW
    good = (part[CHECK] == _fold(part)) & (generation != 0) & (generation & np.uint64(1) == 0)
    good &= (length > 0) & (length <= max_timesteps) & (extent >> np.uint64(32) & ~np.uint64(ALL_FLAGS) == 0)
    good &= (part[SERIAL] < MAX_SERIAL) & (generation < MAX_SERIAL)
    if rows is not None:
        good &= (first_row <= rows) & (first_row + length <= rows)
    return np.asarray(good)


def _disjoint(first: Words, length: Words) -> npt.NDArray[np.bool_]:
    """Which stretches of rows share none with another; of two that do, nobody could tell whose the rows are."""
    order = np.argsort(first)
    start, stop = first[order], (first + length)[order]
    apart = np.ones(len(order), np.bool_)
    apart[1:] &= start[1:] >= np.maximum.accumulate(stop)[:-1]
    apart[:-1] &= start[1:] >= stop[:-1]
    out = np.empty_like(apart)
    out[order] = apart
    return out
