"""The 64-byte record of a slot: its words, its flags, its check. Pure; the format is in `files`."""

from __future__ import annotations

import struct

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

_PACKED, _FOLDED = struct.Struct("<QQIIQQQII"), struct.Struct("<7Q")

_SEED = 0x6D656D6D61706275
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def check_of(words: Words) -> Words:
    """The check of each record.

    Args: words: (n, 8) uint64.
    Returns: (n,) uint64.
    """
    fold = np.full(len(words), _SEED, np.uint64)
    for column in range(CHECK):
        fold ^= words[:, column]
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
    raw = _PACKED.pack(generation, serial, length, flags, first_row, time, epoch, digest, columns)
    fold = _SEED
    for word in _FOLDED.unpack(raw):
        fold = ((fold ^ word) * _MULTIPLIER) & _MASK
        fold ^= fold >> 29
    return raw + fold.to_bytes(8, "little")


def valid(words: Words, max_timesteps: int, rows: int | None) -> npt.NDArray[np.bool_]:
    """Which records hold an episode, by themselves: check, generation, bounds; in a packed folder, rows of its own.

    Args:
        words: (n, 8) uint64, the whole table (a grid's first rows follow from the slot).
        max_timesteps: the longest episode allowed.
        rows: None for a grid, else the rows of a packed folder.

    Returns: (n,) bool.
    """
    generation = words[:, GENERATION]
    good = (words[:, CHECK] == check_of(words)) & (generation != 0) & (generation & np.uint64(1) == 0)
    record = words.view(RECORD)[:, 0]
    length, flags = record["length"], record["flags"]
    good &= (length > 0) & (length <= max_timesteps) & (flags & ~np.uint32(ALL_FLAGS) == 0)
    good &= (record["serial"] < MAX_SERIAL) & (generation < MAX_SERIAL)
    if rows is None:
        good &= record["first_row"] == np.arange(len(words), dtype=np.uint64) * np.uint64(max_timesteps)
    else:
        good &= (record["first_row"] <= rows) & (record["first_row"] + length <= rows)
        chosen = np.flatnonzero(good)
        good[chosen] = _disjoint(record["first_row"][chosen], length[chosen])
    return np.asarray(good)


def _disjoint(first: Words, length: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Which stretches of rows share none with another; of two that do, nobody could tell whose the rows are."""
    order = np.argsort(first)
    start, stop = first[order], (first + length)[order]
    apart = np.ones(len(order), np.bool_)
    apart[1:] &= start[1:] >= np.maximum.accumulate(stop)[:-1]
    apart[:-1] &= start[1:] >= stop[:-1]
    out = np.empty_like(apart)
    out[order] = apart
    return out
