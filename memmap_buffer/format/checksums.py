"""The checksum of a field's rows: a CRC-32 of the sums of their blocks, as `format` specifies it under checksums.npy.

CRC-32 alone runs at 6 GiB/s, more than half of the time that it takes to store or verify images; sums run at 40.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.format.layout import Layout

BLOCK = 4096
Sums = tuple[int, bytes]  # of the rows so far: the CRC-32 of the sums of whole blocks, the bytes behind the last one
EMPTY: Sums = (0, b"")

crc32: Callable[..., int] = zlib.crc32  # takes any buffer; mypy does not know that numpy's arrays are buffers


def add_rows(sums: Sums, rows: Array) -> Sums:
    """The sums of earlier rows, continued by `rows`.

    Args:
        sums: the sums of the earlier rows.
        rows: C-contiguous, of any shape and dtype.
    """
    crc, rest = sums
    if len(rest) + rows.nbytes < BLOCK:  # at once, as a call of numpy takes longer than the rows of a few steps
        return crc, rest + rows.tobytes()
    data = rows.reshape(-1).view(np.uint8)
    parts = [data]
    if rest:
        lacking = BLOCK - len(rest)
        parts = [np.frombuffer(rest + data[:lacking].tobytes(), np.uint8), data[lacking:]]
    for data in parts:
        whole = data.nbytes // BLOCK * BLOCK
        if whole:
            crc = crc32(np.add.reduce(data[:whole].view("<u8").reshape(-1, BLOCK // 8), axis=1), crc)
        rest = data[whole:].tobytes()
    return crc, rest


def checksum_of(sums: Sums) -> int:
    """The checksum of the rows that were summed."""
    crc, rest = sums
    return crc32(rest, crc)


def checksum(rows: Array) -> int:
    """The checksum of C-contiguous rows."""
    return checksum_of(add_rows(EMPTY, rows))


def checksum_row(layout: Layout, checksums: Mapping[str, int]) -> bytes:
    """A slot's row of checksums.npy: each name's checksum in its column, zeros in the spare ones."""
    row, column_of = [0] * layout.columns, layout.column_of
    for name, value in checksums.items():
        row[column_of[name]] = value
    return struct.pack(layout.checksum_format, *row)


def digest_of(row: bytes, columns: int) -> int:
    """The digest that the record carries of its row of checksums.npy: the CRC-32 of the first `columns` entries."""
    return crc32(row[: 4 * columns])
