"""`Mirror`: a sparse local copy of a packed folder at a URL, whose blocks are fetched when rows of them are read.

The folder has the same files, so it is opened as any other. Before rows are copied `bring` has their blocks fetched;
`Taken` tells afterwards whether all of them stayed while they were copied.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError, MemmapBufferError
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.layout import BLOBS, DICTIONARY, Layout
from memmap_buffer.format.objects import Objects
from memmap_buffer.format.remote_layout import BLOCK, BLOCKS_FILE, Shard, block_digest, data_files, digest, num_blocks
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import process_id, read_at, write_all
from memmap_buffer.remote.blocks import COUNTER, LOCAL, NAME, Blocks, IntArray, Words, new_words, runs
from memmap_buffer.remote.cache import Cache

T = TypeVar("T")
TOGETHER = 64  # blocks that are in memory at a time while they are fetched
PIECE = 8  # neighbouring blocks that are one request
AHEAD = 4  # shards of which a window is fetched ahead at a time
_LENGTH = np.uint64(2**32 - 1)
_ahead: tuple[int, ThreadPoolExecutor] | None = None  # of which process


class Mirror:
    """A packed folder at a URL, and what is there of it.

    Args:
        objects: the store.
        prefix: of the folder in it, "" or ending in a slash.
        shard: what is known of it.
        cache: where its local copy lies.
        path: of that.
    """

    def __init__(self, objects: Objects, prefix: str, shard: Shard, cache: Cache, path: Path) -> None:
        self.objects, self.prefix, self.shard, self.cache, self.path = objects, prefix, shard, cache, path

    def __reduce__(self) -> tuple[Any, ...]:
        return Mirror, (self.objects, self.prefix, self.shard, self.cache, self.path)

    @classmethod
    def open(
        cls, objects: Objects, prefix: str, shard: Shard, head: Callable[[], dict[str, bytes]], cache: Cache
    ) -> Mirror:
        """The mirror of a shard, made where there is none yet.

        Args:
            objects: the store.
            prefix: of the shard.
            shard: what is known of it.
            head: gives the files of its head.
            cache: where mirrors lie.
        """
        path = cache.path / f"{shard.id}-{shard.version}"  # what was published anew is another mirror
        if not Folder(path).exists("schema.json"):
            _make(path, shard, head())
        return cls(objects, prefix, shard, cache, path)

    def storage(self, verify: str = "auto") -> Storage:
        """The folder, open for reading; rows of it are fetched when they are read."""
        storage = Storage.open(self.path, read_only=True, verify=verify)
        storage.mirror = self
        return storage

    @cached_property
    def files(self) -> dict[str, tuple[int, int]]:
        """The files that are fetched block by block: name -> (its first block, its bytes)."""
        folder = Folder(self.path)
        layout = Layout.from_json(folder.read("schema.json", 1 << 20), str(self.path))
        found, first = {}, 0
        for name, size in data_files(layout).items():
            found[name] = first, size
            first += num_blocks(size)
        return found

    @cached_property
    def blocks(self) -> Blocks:
        """The state of its blocks."""
        return Blocks.of(self.path, sum(num_blocks(size) for _, size in self.files.values()))

    @cached_property
    def digests(self) -> Array:
        """(blocks,) u8, fetched when the first block is."""
        where = self.prefix + BLOCKS_FILE
        count = len(self.blocks.words)
        content = self.objects.read(where, 128 + 8 * count)[-8 * count :] if count else b""
        if digest(content) != self.shard.blocks:
            raise CorruptBufferError(
                f"{self.objects.name_of(where)}: the digests are not those of the shard; publish it again"
            )
        return np.frombuffer(content, np.uint64)

    def blocks_of(self, name: str, begin: IntArray, end: IntArray) -> IntArray:
        """The blocks that hold some ranges of bytes of a file, ascending."""
        first, size = self.files[name]
        begin, end = np.minimum(begin, size - 1), np.minimum(end, size)
        low, high = begin // BLOCK, np.maximum(end - 1, begin) // BLOCK
        wide = np.flatnonzero(high > low)
        found = np.unique(np.concatenate([low, high]))
        if wide.size and int((high - low).max()) > 1:
            steps = high[wide] - low[wide] + 1
            more = np.repeat(low[wide], steps) + np.arange(steps.sum()) - np.repeat(np.cumsum(steps) - steps, steps)
            found = np.unique(np.concatenate([found, more]))
        return first + found

    def fetch(self, blocks: IntArray) -> Words:
        """Have these blocks, ascending, there; their counters."""
        self.cache.require_room(len(blocks))
        self.blocks.touch(blocks, int(time.time()) & 0xFFFFFFFF)
        missing = self.blocks.absent(blocks)
        for start in range(0, len(missing), TOGETHER):
            part = missing[start : start + TOGETHER]
            with self.blocks.taken(part.tolist()):
                self._fetch(self.blocks.absent(part))
        return self.blocks.counters(blocks)

    def _fetch(self, missing: IntArray) -> None:
        """Fetch blocks whose locks are held."""
        missing = np.array([block for block in missing.tolist() if not self._is_on_disk(block)], np.int64)
        if not missing.size:
            return
        there = self.blocks.words[missing, LOCAL].astype(bool)
        self.cache.reserve(int(np.count_nonzero(~there)))
        ranges: list[tuple[str, int, int]] = []
        of: list[range] = []
        for first, stop in runs(missing.tolist()):
            for begin in range(first, stop, PIECE):
                for low, high in self._by_file(begin, min(begin + PIECE, stop)):
                    name, start, _ = self._place(low)
                    ranges.append((self.prefix + name, start, self._place(high - 1)[2]))
                    of.append(range(low, high))
        digests = self.digests

        def is_right(i: int, data: bytes) -> bool:
            return all(
                block_digest(part) == int(digests[block]) for block, part in zip(of[i], _parts(data), strict=True)
            )

        for i, data in self.objects.stream(ranges, is_right):
            for block, part in zip(of[i], _parts(data), strict=True):
                name, start, _ = self._place(block)
                self._write(name, part, start)
                self.blocks.words[block, LOCAL] = 1
                if self.blocks.words[block, COUNTER] & np.uint32(1):
                    self.blocks.change(block)

    def _is_on_disk(self, block: int) -> bool:
        """Whether a block was written before another boot, and is whole."""
        if not self.blocks.words[block, LOCAL]:
            return False
        name, start, stop = self._place(block)
        with Folder(self.path).reading(name) as (fd, _):
            whole = block_digest(read_at(fd, stop - start, start)) == int(self.digests[block])
        if whole:
            self.blocks.change(block)
        return whole

    def _write(self, name: str, data: memoryview, offset: int) -> None:
        with Folder(self.path).changing(name) as fd:
            write_all(fd, bytes(data), offset)

    def _place(self, block: int) -> tuple[str, int, int]:
        """(the file, first byte, the byte behind the last) of a block."""
        for name, (first, size) in self.files.items():
            if block < first + num_blocks(size):
                begin = (block - first) * BLOCK
                return name, begin, min(begin + BLOCK, size)
        raise IndexError(block)

    def _by_file(self, low: int, high: int) -> list[tuple[int, int]]:
        """Neighbouring blocks as ranges of blocks of one file each."""
        cuts = sorted({low, high, *(first for first, _ in self.files.values() if low < first < high)})
        return list(pairwise(cuts))

    # Rows

    def bring(self, storage: Storage, wanted: Sequence[Rows]) -> Taken:
        """Have the blocks of some rows there."""
        layout, taken = storage.layout, Taken()
        chosen = [self._blocks_of_rows(layout, rows.name, rows.low, rows.high) for rows in wanted]
        for rows in wanted:
            if rows.name + DICTIONARY in layout.arrays:
                name = layout.arrays[rows.name + DICTIONARY].name
                chosen.append(self.blocks_of(name, np.zeros(1, np.int64), np.array([self.files[name][1]])))
        taken.add(self, chosen)
        chosen = []
        for rows in wanted:
            if rows.name in layout.coded:
                index = storage.maps.rows[rows.name]
                row = _expanded(rows.low, rows.high)
                begin = index[row, 0].astype(np.int64)
                length = (index[row, 1] & _LENGTH).astype(np.int64)
                there = (length > 0) & (length < 2**32 - 1)
                file = layout.arrays[rows.name + BLOBS]
                offset = len(file.header) + begin[there]
                if offset.size:
                    chosen.append(self.blocks_of(file.name, offset, offset + length[there]))
        taken.add(self, chosen)
        return taken

    def bring_later(self, storage: Storage, wanted: Sequence[Rows]) -> None:
        """Have the blocks of some rows fetched in a thread; what fails is told when they are read."""
        global _ahead
        if _ahead is None or _ahead[0] != process_id():
            _ahead = process_id(), ThreadPoolExecutor(AHEAD, "memmap_buffer-fetch")
        _ahead[1].submit(self._bring_quietly, storage, wanted)

    def _bring_quietly(self, storage: Storage, wanted: Sequence[Rows]) -> None:
        with suppress(MemmapBufferError, OSError):
            self.bring(storage, wanted)

    def _blocks_of_rows(self, layout: Layout, name: str, low: IntArray, high: IntArray) -> IntArray:
        file, width = layout.arrays[name], layout.schema.fields[name].in_file.itemsize
        return self.blocks_of(file.name, len(file.header) + low * width, len(file.header) + high * width)

    def read(self, storage: Storage, name: str, low: IntArray, high: IntArray, copy: Callable[[], T]) -> T:
        """What a function copies of some rows, once all of them stayed meanwhile."""
        while True:
            taken = self.bring(storage, [Rows(name, low, high)])
            found = copy()
            if taken.unchanged():
                return found


class Rows(NamedTuple):
    """Rows of a field: (N,) ranges low … high - 1."""

    name: str
    low: IntArray
    high: IntArray


class Taken(list[tuple[Mirror, IntArray, Words]]):
    """Blocks that were there when rows of them were about to be copied, and their counters then."""

    def add(self, mirror: Mirror, blocks: Iterable[IntArray]) -> None:
        """Have blocks of a mirror there, and note them."""
        every = list(blocks)
        if every:
            chosen = np.unique(np.concatenate(every))
            self.append((mirror, chosen, mirror.fetch(chosen)))

    def unchanged(self) -> bool:
        """Whether all of them were there all the time."""
        return all(
            not (counters & np.uint32(1)).any() and np.array_equal(mirror.blocks.counters(blocks), counters)
            for mirror, blocks, counters in self
        )


def _parts(data: bytes) -> list[memoryview]:
    """The blocks that some bytes are."""
    view = memoryview(data)
    return [view[i : i + BLOCK] for i in range(0, len(data), BLOCK)]


def _expanded(low: IntArray, high: IntArray) -> IntArray:
    """The rows of ranges."""
    counts = high - low
    rows: IntArray = np.repeat(low, counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows


def _make(path: Path, shard: Shard, files: dict[str, bytes]) -> None:
    """Make a mirror of which no block is there; whole or not at all, also where another process does the same."""
    layout = Layout.from_json(files["schema.json"], str(path))
    if layout.id != shard.id or layout.rows is None:
        raise CorruptBufferError(f"{path}: the head is not of the shard that was asked for; publish it again")
    new = path.with_name(f"{path.name}.new-{secrets.token_hex(8)}")
    folder = Folder(new)
    folder.create()
    try:
        for name, data in files.items():
            if name != "schema.json":
                folder.write_new(name, data, sync=False)
        for array in layout.arrays.values():
            if array.name.startswith("data/"):
                folder.create_array(array.name, array.header, array.size)
        count = sum(map(num_blocks, data_files(layout).values()))
        folder.write_new(NAME, new_words(count), sync=False)
        folder.write_new("schema.json", files["schema.json"], sync=False)
        try:
            new.rename(path)
        except OSError:
            if not Folder(path).exists("schema.json"):
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
