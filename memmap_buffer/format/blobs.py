"""Compressed timesteps: the index of a field's blobs, their bytes, and the way back to rows.

`format` specifies them under "Blobs". A row of the index is two numbers: where the blob begins, and its length with the
number of its dictionary above. Blobs are copied before they are decoded, as another process may be writing to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import current_process
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array
from memmap_buffer.format.checksums import EMPTY, Sums, add_rows, crc32
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.syscalls import process_id, processors
from memmap_buffer.schema import DEFAULT_BLOB, Field

MAX_THREADS = 4
PART = 1 << 20  # bytes of rows that a thread decodes or encodes at once; fewer are done at once, by one
SUMMED = 4 << 20  # bytes of blobs that are looked at together
BoolArray = npt.NDArray[np.bool_]
_LENGTH = np.uint64(2**32 - 1)


class Threads:
    """A few threads that encode and decode, made when they are first needed, anew in a forked process."""

    def __init__(self) -> None:
        self._made: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def count(self) -> int:
        """How many there are: one a processor, up to four; one in a worker process, as workers share these."""
        return 1 if current_process().daemon else min(MAX_THREADS, processors())

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have one of them do some work."""
        made = self._made
        if made is None or made[0] != process_id():
            made = self._made = process_id(), ThreadPoolExecutor(self.count, "memmap_buffer-codec")
        return made[1].submit(work, *args)


threads = Threads()


class Dictionary(NamedTuple):
    """What blobs of a field were compressed with besides themselves.

    Attributes:
        content: its bytes (n,).
        number: of it in the index, the CRC-32 of its bytes, never 0.
    """

    content: Array
    number: int

    @classmethod
    def of(cls, content: Array) -> Dictionary:
        """The dictionary of these bytes."""
        return cls(content, crc32(content) or 1)


class CodedRows(NamedTuple):
    """A field's file of blobs, mapped.

    Attributes:
        field: the field.
        data: (n,) u1, all blobs.
        dictionary: of its blobs, or None.
    """

    field: Field
    data: Array
    dictionary: Dictionary | None

    def blobs(self, index: Array) -> list[bytes | None]:
        """Copies of the blobs of rows of the index (N, 2); None of one that lies beyond the file."""
        begin, length = index[:, 0], index[:, 1] & _LENGTH
        size, data = len(self.data), memoryview(self.data)  # type: ignore[arg-type]
        most = size if self.field.is_list else min(size, self.field.itemsize)
        there = (length <= most) & (begin <= size - np.minimum(length, size).astype(np.uint64))
        length = np.where(there, length, 0)
        begin = np.where(there, begin, 0)
        found: list[bytes | None] = [
            data[a:b].tobytes() for a, b in zip(begin.tolist(), (begin + length).tolist(), strict=True)
        ]
        for i in np.flatnonzero(~there).tolist():
            found[i] = None
        return found

    def decode(self, index: Array) -> Array:
        """Stored values (N, *cell) of rows of the index (N, 2). Raises ValueError: one of them is none."""
        if self.field.is_list:
            members, counts, bad = self.lists(index)
            if bad.any():
                raise ValueError(f"{np.count_nonzero(bad)} of {len(index)} timesteps have no list")
            out = np.empty(len(index), object)
            stops = np.cumsum(counts)
            for i, (a, b) in enumerate(zip((stops - counts).tolist(), stops.tolist(), strict=True)):
                out[i] = members[a:b].copy()
            return out
        out = np.empty((len(index), *self.field.shape), self.field.storage)
        broken = self.decode_into(index, out, np.arange(len(index)))
        if len(broken):
            raise ValueError(f"{len(broken)} of {len(index)} timesteps cannot be decoded")
        return out

    def lists(self, index: Array) -> tuple[Array, IntArray, BoolArray]:
        """The lists of rows of the index (N, 2).

        Returns:
            (members of all lists, one behind the other; (N,) how many each has; (N,) whether one is none).
        """
        size, word = self.field.itemsize, index[:, 1] & _LENGTH
        default = word == DEFAULT_BLOB
        begin, length = index[:, 0].copy(), np.where(default, np.uint64(0), word)
        bad = (length > len(self.data)) | (begin > len(self.data) - np.minimum(length, len(self.data)))
        bad |= (length % size != 0) | (index[:, 1] >> np.uint64(32) != 0)
        length[bad], begin[bad] = 0, 0
        blobs = [
            memoryview(self.data)[a:b].tobytes()  # type: ignore[arg-type]
            for a, b in zip(begin.tolist(), (begin + length).tolist(), strict=True)
        ]
        for i in np.flatnonzero(default).tolist():
            blobs[i] = self.field.fill.item().tobytes()
        counts = np.fromiter(map(len, blobs), np.int64, len(blobs)) // size
        members = np.frombuffer(b"".join(blobs), self.field.entries).reshape(-1, *self.field.shape[1:])
        return members, counts, bad

    def decode_into(self, index: Array, out: Array, places: IntArray) -> IntArray:
        """Decode rows, each blob once.

        Args:
            index: rows of the index (N, 2).
            out: (M, *field), C-contiguous.
            places: (N,) where each of them goes in `out`.

        Returns:
            Which of them cannot be decoded; their rows are zeros.
        """
        length = index[:, 1] & _LENGTH
        absent = (length == 0) | (length == DEFAULT_BLOB)
        if absent.any():
            out[places[length == 0]] = 0
            out[places[length == DEFAULT_BLOB]] = self.field.fill
            there = np.flatnonzero(~absent)
            if not there.size:
                return there
            return there[self.decode_into(index[there], out, places[there])]
        _, first, same = np.unique(index[:, 0], return_index=True, return_inverse=True)
        of = first[same]  # the row that has the blob of each
        of = np.where(index[of, 1] == index[:, 1], of, np.arange(len(of)))
        own = np.flatnonzero(of == np.arange(len(of)))
        bad = self._decode_each(index[own], out, places[own])
        out[places[own[bad]]] = 0
        if len(own) < len(of):
            copies = np.flatnonzero(of != np.arange(len(of)))
            out[places[copies]] = out[places[of[copies]]]
        return np.flatnonzero(np.isin(of, own[bad])) if bad else np.empty(0, np.int64)

    def _decode_each(self, index: Array, out: Array, places: IntArray) -> list[int]:
        """Decode blobs, some at a time in threads where they are many; which cannot be decoded."""
        size, flat = self.field.itemsize, memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        blobs = self.blobs(index)
        numbers = (index[:, 1] >> np.uint64(32)).astype(np.int64)
        known = 0 if self.dictionary is None else self.dictionary.number
        bad = [i for i, blob in enumerate(blobs) if blob is None]
        bad += np.flatnonzero((numbers != 0) & (numbers != known)).tolist()
        begins = (places * size).tolist()
        jobs: list[tuple[list[int], Array | None]] = []
        for number in {0, known}:
            chosen = [i for i in np.flatnonzero(numbers == number).tolist() if blobs[i] is not None]
            raw = [i for i in chosen if len(blobs[i]) == size]  # type: ignore[arg-type]
            for i in raw:
                flat[begins[i] : begins[i] + size] = blobs[i]  # type: ignore[assignment]
            if raw:
                chosen = [i for i in chosen if len(blobs[i]) < size]  # type: ignore[arg-type]
            if chosen:
                jobs.append((chosen, None if number == 0 else self.dictionary.content))  # type: ignore[union-attr]

        def work(chosen: Sequence[int], dictionary: Array | None) -> list[int]:
            return self._decode_some(
                [(i, blobs[i]) for i in chosen],  # type: ignore[misc]
                [flat[begins[i] : begins[i] + size] for i in chosen],
                dictionary,
            )

        count = min(threads.count, max(1, len(blobs) * size // PART))
        if count == 1:
            return bad + [i for chosen, dictionary in jobs for i in work(chosen, dictionary)]
        parts = [(chosen[k::count], dictionary) for chosen, dictionary in jobs for k in range(count)]
        waiting = [threads.submit(work, *part) for part in parts[1:] if part[0]]
        bad += work(*parts[0])
        return bad + [i for future in waiting for i in future.result()]

    def _decode_some(
        self, blobs: Sequence[tuple[int, bytes]], places: Sequence[memoryview], dictionary: Array | None
    ) -> list[int]:
        """Decode blobs; the numbers of those that cannot be."""
        decode_into, shape = self.field.codec.decode_into, self.field.shape
        try:
            decode_into([blob for _, blob in blobs], places, shape, dictionary)
        except ValueError:
            if len(blobs) == 1:
                return [blobs[0][0]]
            each = zip(blobs, places, strict=True)
            return [i for one, place in each for i in self._decode_some([one], [place], dictionary)]
        return []

    def contents(self, index: Array) -> Iterator[Array]:
        """The bytes that the checksum of rows of the index (N, 2) is of, some at a time: see `contents_of`."""
        if not len(index):
            return
        most = np.uint64(SUMMED if self.field.is_list else self.field.itemsize)
        ends = np.cumsum(np.minimum(index[:, 1] & _LENGTH, most) + np.uint64(8))
        parts = np.searchsorted(ends, np.arange(0, int(ends[-1]), SUMMED) + SUMMED, side="right") + 1
        begin = 0
        for stop in np.minimum(parts, len(index)).tolist():
            if stop > begin:
                some = index[begin:stop]
                yield contents_of(some, [blob or b"" for blob in self.blobs(some)])
                begin = stop


def contents_of(index: Array, blobs: Sequence[bytes]) -> Array:
    """The bytes (n,) that the checksum of compressed timesteps is of: the second word of each row, then its blob."""
    words = np.ascontiguousarray(index[:, 1]).tobytes()
    pieces = [b""] * (2 * len(blobs))
    pieces[::2] = [words[8 * i : 8 * i + 8] for i in range(len(blobs))]
    pieces[1::2] = blobs
    return np.frombuffer(b"".join(pieces), np.uint8)


def encode(field: Field, rows: Array, dictionary: Dictionary | None = None) -> list[bytes]:
    """The blobs of rows (N, *field); a row that does not become smaller is its own, and so is a list."""
    if field.is_list:
        return [row.tobytes() for row in rows]
    size = field.itemsize
    content = None if dictionary is None else dictionary.content
    blobs: list[bytes] = field.codec.encode(rows, content)
    return [blob if len(blob) < size else rows[i].tobytes() for i, blob in enumerate(blobs)]


def decoded(field: Field, blobs: Sequence[bytes]) -> Array:
    """Rows (N, *field) of their blobs. Raises ValueError: one of them is none."""
    return CodedRows(field, np.frombuffer(b"".join(blobs), np.uint8), None).decode(index_of(field, blobs, 0))


def encode_many(field: Field, rows: Array, dictionary: Dictionary | None = None) -> list[bytes]:
    """The same, in threads where they are many."""
    most = max(1, PART // field.itemsize)
    if field.is_list or len(rows) <= most or threads.count == 1:
        return encode(field, rows, dictionary)
    parts = [rows[i : i + most] for i in range(0, len(rows), most)]
    waiting = [threads.submit(encode, field, part, dictionary) for part in parts]
    return [blob for future in waiting for blob in future.result()]


def index_of(field: Field, blobs: Sequence[bytes], begin: int, dictionary: Dictionary | None = None) -> Array:
    """The rows of the index (N, 2) of blobs that lie one behind the other from `begin` on."""
    lengths = np.fromiter(map(len, blobs), np.uint64, len(blobs))
    index = np.empty((len(blobs), 2), np.uint64)
    index[:, 0] = np.uint64(begin) + np.cumsum(lengths) - lengths
    index[:, 1] = lengths
    if dictionary is not None:
        index[:, 1] |= np.where(lengths < field.itemsize, np.uint64(dictionary.number << 32), np.uint64(0))
    return index


def end_of(entry: Array) -> int:
    """Where the blob of a row of the index (2,) ends; 0 where there is none."""
    begin, length = map(int, entry)
    length &= 2**32 - 1
    return begin + length if length not in (0, DEFAULT_BLOB) else begin


def sums_of(contents: Iterator[Array], sums: Sums = EMPTY) -> Sums:
    """The sums of what was before, and of these bytes."""
    for part in contents:
        sums = add_rows(sums, part)
    return sums


def lengths_of(index: Array) -> Array:
    """The bytes (N,) of the blobs of rows of the index (N, 2); 0 where there is none."""
    length = index[:, 1] & _LENGTH
    return np.where(length == DEFAULT_BLOB, np.uint64(0), length)


def beyond(coded: CodedRows, index: Array) -> Array:
    """Whether rows of the index (N, 2) have a blob that is not all in the file, or larger than a timestep."""
    size, begin, length = np.uint64(len(coded.data)), index[:, 0], lengths_of(index)
    missing = (length > coded.field.itemsize) | (length > size - np.minimum(begin, size))
    return np.asarray(missing & (length > 0))


def stored_blobs(coded: CodedRows, index: Array) -> list[bytes] | None:
    """Copies of the blobs of rows of the index (N, 2), b"" where a row has none; None where one is not in the file."""
    if beyond(coded, index).any():
        return None
    data, length = memoryview(coded.data), lengths_of(index)  # type: ignore[arg-type]
    begin = np.where(length == 0, np.uint64(0), index[:, 0])
    return [bytes(data[a:b]) for a, b in zip(begin.tolist(), (begin + length).tolist(), strict=True)]


def fault(coded: CodedRows, index: Array, region: range | None) -> str:
    """What is wrong with the rows of an episode in the index (N, 2); "" for nothing. Nothing is decoded.

    Args:
        coded: the field.
        index: see above.
        region: the bytes of its slot, from the first of which on its blobs lie; None: they may lie anywhere.
    """
    index = index[lengths_of(index) > 0]
    begin, length, number = index[:, 0], lengths_of(index), index[:, 1] >> np.uint64(32)
    if not len(index):
        return ""
    if beyond(coded, index).any():
        return "has a blob beyond the file, or longer than a timestep"
    if (begin[1:] != begin[:-1] + length[:-1]).any():
        return "has blobs that do not follow one another"
    if region is not None and (int(begin[0]) != region.start or int(begin[-1] + length[-1]) > region.stop):
        return "has blobs that lie in the place of another episode"
    known = 0 if coded.dictionary is None else coded.dictionary.number
    if ((number != 0) & (number != known)).any():
        return "has a blob of a dictionary that is not there"
    return ""
