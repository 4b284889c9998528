"""Compressed timesteps: the index of a field's blobs, the blobs, and how they are encoded and decoded.

`format` specifies them under "Blobs". A row of the index is two words: where the blob begins; its length in the low
half, the number of its dictionary in the high half. A blob is copied before it is decoded, as another process may be
writing to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array
from memmap_buffer.format.checksums import crc32
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.syscalls import process_id, processors, yield_to_others
from memmap_buffer.schema import DEFAULT_BLOB, Field

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")
BoolArray: TypeAlias = npt.NDArray[np.bool_]

MAX_THREADS = 4
PART = 1 << 19  # bytes of rows that are worth waking a thread for: they take 0.1 ms or more
BLOBS_PART = 1 << 17  # likewise bytes of blobs: rows with very small blobs are decoded sooner than a thread wakes
PIECES = 4  # parts of a batch for each thread: the more, the less threads wait for the last one, but each costs 10 us
LARGEST = 1 << 26  # bytes of rows whose blobs are copied together
SUMMED = 4 << 20  # bytes of blobs that are summed together
_LENGTH = np.uint64(2**32 - 1)


class Threads:
    """A few threads that encode and decode; they start when they are first needed, and again in a forked process."""

    def __init__(self) -> None:
        self._made: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def count(self) -> int:
        """How many threads there are: one per processor, at most four. In a worker process one: workers share them."""
        from multiprocessing import current_process

        return 1 if current_process().daemon else min(MAX_THREADS, processors())

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have one of the threads do some work."""
        made = self._made
        if made is None or made[0] != process_id():
            from concurrent.futures import ThreadPoolExecutor

            pool = ThreadPoolExecutor(self.count, "memmap_buffer-codec", initializer=yield_to_others)
            made = self._made = process_id(), pool
        return made[1].submit(work, *args)

    def map(self, work: Callable[[Any], T], parts: Sequence[Any]) -> list[T]:
        """The results of `work` on each part. This thread and the others each take the next part that nobody has taken.

        So this thread never waits for a thread that got no processor.
        """
        results: list[Any] = [None] * len(parts)
        numbers = iter(range(len(parts)))

        def take_parts() -> None:
            for i in numbers:
                results[i] = work(parts[i])

        helpers = [self.submit(take_parts) for _ in range(min(self.count, len(parts)) - 1)]
        try:
            take_parts()
        finally:  # wait for them, also after an error: the memory that they write to may be used otherwise afterwards
            for helper in helpers:
                if not helper.cancel():
                    helper.result()
        return results


threads = Threads()


class Dictionary(NamedTuple):
    """A dictionary: bytes that help to compress, and are needed to decode, the blobs of a field.

    Attributes:
        content: its bytes (n,).
        number: its number in the index: the CRC-32 of its bytes, or 1 where that is 0.
    """

    content: Array
    number: int

    @classmethod
    def of(cls, content: Array) -> Dictionary:
        """The dictionary that consists of the bytes `content`."""
        return cls(content, crc32(content) or 1)


class CodedRows(NamedTuple):
    """A field's file of blobs, mapped.

    Attributes:
        field: the field.
        data: (n,) u1, all blobs.
        dictionary: the dictionary of its blobs, or None.
    """

    field: Field
    data: Array
    dictionary: Dictionary | None

    def blobs(self, index: Array) -> list[bytes | None]:
        """Copies of the blobs of rows of the index (N, 2): b"" where there is none, None where `beyond` finds fault."""
        bad = beyond(self, index)
        views = self._views(index, np.where(bad, 0, lengths_of(index).astype(np.int64)))
        return [None if wrong else view.tobytes() for view, wrong in zip(views, bad.tolist(), strict=True)]

    def _views(self, index: Array, length: IntArray) -> list[memoryview]:
        """Blobs in the file, not copied. Args: length: (N,) their lengths; any but an empty one must lie in it."""
        data, begins = memoryview(self.data), index[:, 0].astype(np.int64)  # type: ignore[arg-type]
        return [data[a:b] for a, b in zip(begins.tolist(), (begins + length).tolist(), strict=True)]

    def decode(self, index: Array) -> Array:
        """The stored values (N, *cell) of rows of the index (N, 2). Raises ValueError: a row cannot be decoded."""
        out = np.empty((len(index), *self.field.cell), self.field.storage)
        broken = self.decode_into(index, out, np.arange(len(index)))
        if len(broken):
            raise ValueError(f"{len(broken)} of {len(index)} timesteps cannot be decoded")
        return out

    def lists(self, index: Array) -> tuple[Array, IntArray, BoolArray]:
        """The lists of rows of the index (N, 2).

        Returns:
            (the members of all lists, one after the other; (N,) how many members each list has; (N,) whether a row
            cannot be decoded).
        """
        bad = beyond(self, index) | (index[:, 1] >> np.uint64(32) != 0)
        blobs = self._views(index, np.where(bad, 0, lengths_of(index).astype(np.int64)))
        for i in np.flatnonzero(index[:, 1] & _LENGTH == DEFAULT_BLOB).tolist():
            blobs[i] = memoryview(self.field.fill.item().tobytes())
        counts = np.fromiter(map(len, blobs), np.int64, len(blobs)) // self.field.itemsize
        members = np.frombuffer(b"".join(blobs), self.field.entries).reshape(-1, *self.field.shape[1:])
        return members, counts, bad

    def _lists_into(self, index: Array, out: Array, places: IntArray) -> IntArray:
        members, counts, bad = self.lists(index)
        stops = np.cumsum(counts)
        for place, a, b in zip(places.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True):
            out[place] = members[a:b].copy()
        return np.flatnonzero(bad)

    def decode_into(self, index: Array, out: Array, places: IntArray) -> IntArray:
        """Decode rows, each distinct blob only once.

        Args:
            index: rows of the index (N, 2).
            out: (M, *cell), C-contiguous.
            places: (N,) the row of `out` for each.

        Returns:
            The numbers of the rows of `index` that cannot be decoded; zeros stand in `out` for them.
        """
        if self.field.is_list:
            return self._lists_into(index, out, places)
        length = index[:, 1] & _LENGTH
        absent = (length == 0) | (length == DEFAULT_BLOB)
        if absent.any():
            out[places[length == 0]] = 0
            out[places[length == DEFAULT_BLOB]] = self.field.fill
            there = np.flatnonzero(~absent)
            return there[self.decode_into(index[there], out, places[there])] if len(there) else there
        first_of = _first_of_same(index)
        if first_of is None:
            bad = self._decode_each(index, out, places)
            out[places[bad]] = 0
            return bad
        is_first = first_of == np.arange(len(first_of))
        own, copies = np.flatnonzero(is_first), np.flatnonzero(~is_first)
        bad = own[self._decode_each(index[own], out, places[own])]
        out[places[bad]] = 0
        for copy, first in zip(places[copies].tolist(), places[first_of[copies]].tolist(), strict=True):
            out[copy] = out[first]
        return np.flatnonzero(np.isin(first_of, bad))

    def _decode_each(self, index: Array, out: Array, places: IntArray) -> IntArray:
        """Decode distinct blobs, in threads if they are many; returns the numbers of those that cannot be decoded."""
        size = self.field.itemsize
        length, good = lengths_of(index).astype(np.int64), ~beyond(self, index)
        numbers = index[:, 1] >> np.uint64(32)
        dictionary_number = np.uint64(0 if self.dictionary is None else self.dictionary.number)
        good &= (numbers == 0) | (numbers == dictionary_number)
        raw = good & (length == size)
        if raw.any():
            rows = np.frombuffer(b"".join(self._views(index[raw], length[raw])), self.field.storage)
            out[places[raw]] = rows.reshape(-1, *self.field.shape)
        parts: list[tuple[IntArray, Array | None]] = []
        for number in {0, int(dictionary_number)}:
            chosen = np.flatnonzero(good & ~raw & (numbers == number))
            count = min(threads.count * PIECES, int(length[chosen].sum()) // BLOBS_PART) if threads.count > 1 else 1
            count = max(count, len(chosen) * size // LARGEST, 1)
            content = self.dictionary.content if number and self.dictionary is not None else None
            parts += [(part, content) for part in np.array_split(chosen, count) if len(part)]

        bad = threads.map(lambda part: self._decode_some(index, length, out, places, *part), parts)
        return np.concatenate([np.flatnonzero(~good), *bad])

    def _decode_some(
        self, index: Array, length: IntArray, out: Array, places: IntArray, chosen: IntArray, dictionary: Array | None
    ) -> IntArray:
        """Decode the blobs `chosen`; returns those of them that cannot be decoded."""
        wanted = length[chosen]
        blobs = b"".join(self._views(index[chosen], wanted))
        try:
            self.field.codec.decode_into(blobs, np.cumsum(wanted), out, places[chosen], dictionary)
        except ValueError:
            if len(chosen) == 1:
                return chosen
            each = np.split(chosen, len(chosen))
            return np.concatenate([self._decode_some(index, length, out, places, part, dictionary) for part in each])
        return chosen[:0]

    def contents(self, index: Array) -> Iterator[Array]:
        """The bytes that the checksum of rows of the index (N, 2) covers, in parts: see `contents_of`."""
        most = np.uint64(SUMMED if self.field.is_list else self.field.itemsize)
        ends = np.cumsum(np.minimum(index[:, 1] & _LENGTH, most) + np.uint64(8))
        for rows in np.split(index, np.flatnonzero(np.diff(ends // np.uint64(SUMMED))) + 1):
            yield contents_of(rows, [blob or b"" for blob in self.blobs(rows)])


def _first_of_same(index: Array) -> IntArray | None:
    """(N,) for each row of the index (N, 2) the number of the first row that is equal; None where all differ."""
    order = index[:, 0].argsort(kind="stable")
    ordered = index[order]
    same = (ordered[1:] == ordered[:-1]).all(1)
    if not same.any():
        return None
    starts = np.concatenate([[True], ~same])
    first_of = np.empty(len(index), np.int64)
    first_of[order] = order[starts][np.cumsum(starts) - 1]
    return first_of


def contents_of(index: Array, blobs: Sequence[bytes]) -> Array:
    """The bytes (n,) that the checksum of compressed timesteps covers: for each, its row's second word and its blob."""
    words = np.ascontiguousarray(index[:, 1]).view("V8").tolist()
    return np.frombuffer(b"".join(chain.from_iterable(zip(words, blobs, strict=True))), np.uint8)


def encode(field: Field, rows: Array, dictionary: Dictionary | None = None) -> list[bytes]:
    """The blobs of rows (N, *field). A row that compressing does not make smaller is its own blob, and so is a list."""
    if field.is_list:
        return [row.tobytes() for row in rows]
    size = field.itemsize
    content = None if dictionary is None else dictionary.content
    blobs: list[bytes] = field.codec.encode(rows, content)
    return [blob if len(blob) < size else rows[i].tobytes() for i, blob in enumerate(blobs)]


def decoded(field: Field, blobs: Sequence[bytes]) -> Array:
    """The rows (N, *field) of blobs without a dictionary. Raises ValueError: a blob cannot be decoded."""
    return CodedRows(field, np.frombuffer(b"".join(blobs), np.uint8), None).decode(index_of(field, blobs, 0))


def encode_many(field: Field, rows: Array, dictionary: Dictionary | None = None) -> list[bytes]:
    """The blobs of rows as `encode` makes them, in threads if the rows are many."""
    most = max(1, PART // field.itemsize)
    parts = [rows[i : i + most] for i in range(0, len(rows), most)]
    return list(chain.from_iterable(threads.map(lambda part: encode(field, part, dictionary), parts)))


def index_of(field: Field, blobs: Sequence[bytes], begin: int, dictionary: Dictionary | None = None) -> Array:
    """The rows of the index (N, 2) for blobs that lie end to end from `begin` on."""
    lengths, number = [*map(len, blobs)], 0 if dictionary is None else dictionary.number << 32
    words = [length | number if length < field.itemsize else length for length in lengths]
    return np.array([*zip(accumulate(lengths, initial=begin), words, strict=False)], np.uint64).reshape(-1, 2)


def end_of(entry: Array) -> int:
    """Where the blob of a row of the index (2,) ends; without a blob, the row's first word: where it would begin."""
    begin, length = map(int, entry)
    length &= 2**32 - 1
    return begin + length if length not in (0, DEFAULT_BLOB) else begin


def lengths_of(index: Array) -> Array:
    """(N,) the length in bytes of the blob of each row of the index (N, 2); 0 where there is no blob."""
    length = index[:, 1] & _LENGTH
    return np.where(length == DEFAULT_BLOB, np.uint64(0), length)


def beyond(coded: CodedRows, index: Array) -> Array:
    """(N,) whether the blob of each row of the index (N, 2) lies partly outside the file, or has a length that no
    blob of the field may have.
    """
    size, begin, length = np.uint64(len(coded.data)), index[:, 0], lengths_of(index)
    member = np.uint64(coded.field.itemsize)
    wrong = length % member != 0 if coded.field.is_list else length > member
    missing = wrong | (length > size - np.minimum(begin, size))
    return np.asarray(missing & (length > 0))


def fault(coded: CodedRows, index: Array, region: range | None) -> str:
    """The fault of an episode's rows of the index (N, 2), as text; "" where there is none. Nothing is decoded.

    Args:
        coded: the field.
        index: the rows.
        region: the bytes of the episode's slot, where its blobs must begin at the first; None: they may lie anywhere.
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
    dictionary_number = 0 if coded.dictionary is None else coded.dictionary.number
    if ((number != 0) & (number != dictionary_number)).any():
        return "has a blob of a dictionary that is not there"
    return ""
