"""Numbers of the format, written anew from its text (`memmap_buffer/format/__init__.py`): nothing of it is imported."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

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
# The first of its words of 8 bytes; that of the extent is length, flags and `columns`.
GENERATION, SERIAL, EXTENT, FIRST_ROW, SHOWN = 0, 1, 2, 3, 6
FINAL, CUT, DELETED, OPEN, TERMINATED, CHECKED, INNER_END = 1, 2, 4, 8, 16, 32, 64  # bits of its `flags`

JOURNAL = 1024  # entries, each the slot of a change
EVERY_SLOT = 2**64 - 1  # an entry: any slot may have changed
STATE_WORD = {  # the first of each one's words of 8 bytes
    **{"base": 0, "next": 1, "synced": 2, "changes": 3, "term": 4, "pid": 5, "time": 6, "clean": 7, "suspect": 8},
    **{"boot": 9, "host": 11, "reserved": 19, "nonce": 20, "unused": 21, "inode": 21, "device": 22, "journal": 32},
}
REDO_START = struct.Struct("<8sQQII")  # of .redo: a magic word, the bytes of its head, all bytes, CRC-32 of both parts
STATE_BYTES = 8 * (STATE_WORD["journal"] + JOURNAL)

NUMERIC = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
)


def fold(words: Iterable[int]) -> int:
    """The check of a record's first six words."""
    h = 0x6D656D6D61706275
    for word in words:
        h = ((h ^ word) * 0x9E3779B97F4A7C15) % 2**64
        h ^= h >> 29
    return h


def check_of(record: bytes) -> int:
    """The check that a record should have."""
    return fold(struct.unpack("<6Q", record[:48]))


def sealed(**given: int) -> bytes:
    """A record with a right check; words that are not given are 0, and all its steps are shown."""
    words = dict.fromkeys(RECORD.names[:-1], 0) | {"stop": given.get("length", 0)} | given
    body = struct.pack("<QQIHHQIIIIII", *(words[name] for name in RECORD.names[:-1]))
    return body + struct.pack("<Q", check_of(body))
