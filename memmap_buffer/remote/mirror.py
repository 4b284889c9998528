"""`Mirror`: a sparse local copy of a packed folder at a URL, whose blocks are fetched when rows in them are read.

The copy is a folder with the same files, made when the first row is read; until then the head is enough. Before rows
are copied, `bring` fetches their blocks; afterwards `Taken` tells whether all of these blocks stayed during the
copying. A copy that a stranger cut or removed is made anew.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError, RemoteError, SchemaError
from memmap_buffer.format.blobs import CodedRows, Dictionary, lengths_of
from memmap_buffer.format.checksums import EMPTY, Sums
from memmap_buffer.format.folder import Folder, ToMap
from memmap_buffer.format.layout import BLOBS, DICTIONARY, Layout
from memmap_buffer.format.records import WORDS
from memmap_buffer.format.source import Rows, Traffic, Wanted
from memmap_buffer.format.storage import Maps, Storage, slices_of
from memmap_buffer.format.syscalls import process_id, random_bytes, write_all
from memmap_buffer.remote.blocks import COUNTER, LOCAL, NAME, Blocks, IntArray, Words, new_words, now
from memmap_buffer.remote.cache import (
    DIGESTS,
    Cache,
    CacheTraffic,
    give_back_damaged,
    is_as_published,
    keep_file,
    remove_mirror,
)
from memmap_buffer.remote.layout import DATA, HEAD, DataFiles, Shard, digest, expanded, head_object, runs
from memmap_buffer.remote.published import Published, require_digests

if TYPE_CHECKING:
    from memmap_buffer.remote.objects import Objects

log = logging.getLogger("memmap_buffer")
T = TypeVar("T")
TOGETHER = 512 << 20  # the most bytes that are fetched under locks at a time, as others wait for these locks
PATIENCE = 60.0  # seconds to go on trying if there is no room, or if blocks go before their rows are copied
OPENINGS = 5  # attempts to open a local copy that others remove
_NOT_WHOLE = (FileNotFoundError, NotADirectoryError, CorruptBufferError)  # opening a local copy that is not whole
_ahead: tuple[int, SimpleQueue[Wanted]] | None = None  # a process, the queue of what its threads fetch ahead


class Local:
    """The local copy of a shard, as this process has mapped it.

    Args:
        folder: its folder, held.
        blocks: which of its blocks are there.
        layout: the layout of the shard.

    Attributes:
        arrays: its data files, by their keys in the layout.
        coded: compressed field -> its blobs and dictionary, for the fields that were decoded so far.
    """

    def __init__(self, folder: Folder, blocks: Blocks, layout: Layout) -> None:
        self.blocks = blocks
        files = {key: file for key, file in layout.arrays.items() if file.name.startswith(DATA)}
        maps = folder.map_all([ToMap.of(f.name, f.header, f.dtype, f.shape) for f in files.values()])
        self.arrays = dict(zip(files, maps, strict=True))
        self.coded: dict[str, CodedRows] = {}


class Mirror(Published):
    """A packed folder at a URL, and its local copy.

    Args:
        objects: the store.
        shard: the facts about it.
        name: the name of the shard, if the URL is that of its root; else "".
        cache: where its local copy lies.
        heads: the number of bytes of the object in the root that contains its head; None: read the `head.bin` of its
            version.
    """

    def __init__(self, objects: Objects, shard: Shard, name: str, cache: Cache, heads: int | None = None) -> None:
        super().__init__(objects, shard, name)
        self.cache, self._heads = cache, heads
        self.path = cache.path / shard.mirror
        self._local: Local | None = None
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Mirror, (self.objects, self.shard, self.name, self.cache, self._heads)

    # What is known without a local copy

    def read_head(self) -> bytes:
        name, first, size = self.shard.head
        path, total = (self.prefix + HEAD, size) if self._heads is None else (head_object(name), self._heads)

        def fetch() -> bytes:
            return self.objects.read_ranges([(path, 0, total)], lambda i, data: digest(data) == name)[0]

        for anew in (False, True):
            try:
                part = bytes(self.cache.head(name, total, fetch, anew)[first : first + size])
            except RemoteError as error:
                if not error.missing or self._heads is None:
                    raise
                return super().read_head()  # the object was removed, as newer lists have the heads in others
            if self.shard.is_head(part):
                return part
        where = self.objects.name_of(path)
        raise CorruptBufferError(f"{where}: the bytes are not those that were published; publish the shard again")

    def kept_digests(self) -> bytes:
        with suppress(OSError, CorruptBufferError):
            return Folder(self.path).read(DIGESTS, 8 * self.files.num_digests)
        return b""

    def keep_digests(self, content: bytes) -> None:
        keep_file(Folder(self.path), DIGESTS, content)  # also where those that were kept are rotten

    def sizes_of(self, fields: Sequence[str]) -> list[int]:
        """The size in bytes of each file of these fields."""
        keys = (key for name in fields for key in (name, name + BLOBS))
        return [self.layout.arrays[key].size for key in keys if key in self.layout.arrays]

    # What readers ask for, see `Source`

    @property
    def limit(self) -> int | None:
        """The bytes that the cache keeps at most."""
        return self.cache.limit

    @property
    def num_bytes(self) -> int:
        """The bytes of all data files."""
        return sum(self.files.sizes.values())

    @property
    def num_rows(self) -> int:
        """The number of timesteps in the folder."""
        return self.layout.rows or 0

    def whole(self) -> Taken | None:
        """All blocks, if all are there; else None."""
        taken = Taken()
        return taken if taken.add_whole(self) else None

    def bring(self, wanted: Wanted) -> Taken:
        """Fetch the blocks of rows that are not there yet, and wait for them."""
        return bring(wanted)

    def bring_later(self, wanted: Wanted) -> None:
        """Fetch the blocks of rows in another thread; an error is raised only when they are read."""
        bring_later(wanted)

    def traffic(self, storages: Sequence[Storage]) -> Traffic:
        """The traffic from now on into the caches of these folders."""
        names: dict[Cache, list[str]] = {}
        for storage in storages:
            mirror = mirror_of(storage)
            names.setdefault(mirror.cache, []).append(mirror.path.name)
        return CacheTraffic(storages[0].where, names)

    # The local copy

    @property
    def local(self) -> Local:
        """The local copy as it is mapped; it is made, or made anew, if it is not there or not whole."""
        local = self._local
        if local is None:
            local = self._local = self._opened()
        return local

    @property
    def blocks(self) -> Blocks:
        """The blocks of the local copy."""
        return self.local.blocks

    def unmap(self) -> None:
        """Let go of the maps of the local copy; the next use maps it again."""
        self._local = None

    def _opened(self) -> Local:
        for _ in range(OPENINGS - 1):
            with suppress(*_NOT_WHOLE):
                return self._mapped()
            self._make()
        return self._mapped()

    def _mapped(self) -> Local:
        with Folder(self.path).kept_open() as folder:
            return Local(folder, self.cache.blocks_of(folder, self.files), self.layout)

    def _make(self) -> None:
        """Make a local copy without any block, which appears whole by a rename.

        If something stands in its place, it is dropped, and the other is removed unless it can be opened: the caller
        tries again.
        """
        new = self.path.with_name(f"{self.path.name}.new-{random_bytes(8).hex()}")
        folder = Folder(new)
        folder.create()
        try:
            for name, data in self.head().items():
                folder.write_new(name, data, sync=False)
            for array in self.layout.arrays.values():
                if array.name.startswith(DATA):
                    folder.create_array(array.name, array.header, array.size)
            folder.write_new(NAME, new_words(self.files.count), sync=False)
            try:
                new.rename(self.path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                self._discard()
        finally:
            remove_mirror(new)

    def _discard(self) -> None:
        """Remove the local copy, unless it can be opened: another process may just have made it."""
        with suppress(*_NOT_WHOLE):
            self._mapped()
            return
        remove_mirror(self.path)

    # Blocks

    def blocks_of(self, name: str, begin: IntArray, end: IntArray) -> IntArray:
        """The blocks that hold ranges (N,) of bytes of a file, in any order, perhaps twice."""
        first, size, block = self.files.first[name], self.files.sizes[name], self.files.block[name]
        begin, end = np.minimum(np.maximum(begin, 0), size - 1), np.minimum(end, size)  # a forged index tells anything
        low, high = first + begin // block, first + np.maximum(end - 1, begin) // block
        wide = np.flatnonzero(high > low + 1)
        if not wide.size:
            return np.concatenate([low, high])
        wide = wide[np.argsort(low[wide], kind="stable")]
        stop = np.maximum.accumulate(high[wide])  # each block once, however many ranges hold it
        begin = np.maximum(low[wide] + 1, np.append(0, stop[:-1]))
        return np.concatenate([low, high, expanded(begin, stop)])

    def blocks_of_rows(self, rows: Rows) -> IntArray:
        """The blocks that hold rows of a field; for a compressed field, rows of its index."""
        layout = self.layout
        file, width = layout.arrays[rows.name], layout.schema.fields[rows.name].in_file.itemsize
        return self.blocks_of(file.name, len(file.header) + rows.low * width, len(file.header) + rows.high * width)

    def blocks_of_blobs(self, rows: Rows) -> IntArray:
        """The blocks that hold the blobs of rows. The blocks of their index must be there."""
        index, file = self.local.arrays[rows.name], self.layout.arrays[rows.name + BLOBS]
        row = expanded(rows.low, rows.high)
        begin, length = index[row, 0].astype(np.int64), lengths_of(index[row]).astype(np.int64)
        offset = len(file.header) + begin[length > 0]
        return self.blocks_of(file.name, offset, offset + length[length > 0]) if offset.size else offset

    def write(self, blocks: Blocks, piece: Sequence[int], data: bytes) -> None:
        """Write blocks of a file, whose locks are held, and note that they are there.

        Args: piece: the blocks. data: their bytes, and those of other blocks between them, which are not written.
        """
        name, start, _ = self.files.place(piece[0])
        with self._held_folder(blocks) as folder, folder.changing(name, self.files.sizes[name]) as fd:
            try:
                for first, stop in runs(piece):
                    _, low, high = self.files.range_of([first, stop - 1])
                    write_all(fd, data[low - start : high - start], low)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                text = f"{self.path}: the disk is full; give a cache on another one, or a smaller cache_bytes"
                raise OSError(error.errno, text) from None
        blocks.add(np.asarray(piece))

    def look_at(self, blocks: Blocks, chosen: IntArray) -> None:
        """Note absent blocks as there whose bytes on the disk are right: after a boot of the machine, or a kill."""
        chosen = chosen[blocks.words[chosen, LOCAL] != 0]
        if not chosen.size:
            return
        with self._held_folder(blocks) as folder:
            is_right = [is_as_published(folder, self.files, block, self.digests) for block in chosen.tolist()]
            blocks.add(chosen[is_right])

    def mend(self, rows: Rows) -> bool:
        """Give back blocks that rows lie in and that are not as they were published, so that they are fetched again.

        Returns: whether there were some, or others were at work on them, or the dictionary has changed since it was
            kept. False also where others gave them back before: who read them meanwhile must read once more.
        """
        require_digests([self])
        chosen = [self.blocks_of_rows(rows)]
        if rows.name in self.layout.coded:
            chosen.append(self.blocks_of_blobs(rows))  # of those that an index tells that may be wrong itself
        if (key := rows.name + DICTIONARY) in self.layout.arrays:
            chosen.append(self._blocks_of_all(key))
        local, every, sizes, others = self.local, np.unique(np.concatenate(chosen)), list[int](), list[int]()

        def give_back() -> None:
            sizes.append(give_back_damaged(Folder(self.path), local.blocks, self.files, self.digests, every))
            with local.blocks.taken(every.tolist()) as mine:
                others.extend(np.setdiff1d(every, mine, True).tolist())
            for block in others:
                local.blocks.wait_for(block)

        _uninterrupted(give_back)
        kept = local.coded.get(rows.name)
        is_old = bool(kept and kept.dictionary and not np.array_equal(kept.dictionary.content, local.arrays[key]))
        local.coded.clear()
        if any(sizes) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: %d bytes that were kept in %s are not those that were published, and are fetched again; "
                "`memmap-buffer cache %s --check` compares all",
                *(self.where, sizes[0], self.path, self.cache.path),
            )
        return any(sizes) or bool(others) or is_old

    @contextmanager
    def _held_folder(self, blocks: Blocks) -> Iterator[Folder]:
        """The folder of the local copy, held. Raises _RemovedError: it is gone, or `blocks` are of another copy."""
        try:
            with Folder(self.path).kept_open() as folder:
                if folder.file_key(NAME) != blocks.key:
                    raise _RemovedError
                yield folder
        except _NOT_WHOLE:
            raise _RemovedError from None

    # Rows

    def storage(self, verify: str = "auto") -> MirrorStorage:
        """The folder, open for reading; its rows are fetched when they are read."""
        storage = MirrorStorage(self, verify)
        storage.refresh()
        storage.check_always()
        return storage

    def rows(self, name: str) -> Array:
        """The mapped rows of a field; for a compressed field, its index."""
        return self.local.arrays[name]

    def coded(self, name: str) -> CodedRows:
        """The mapped blobs of a compressed field, and its dictionary."""
        local, key = self.local, name + DICTIONARY
        coded_rows = local.coded.get(name)
        if coded_rows is None:
            dictionary = Dictionary.of(self._all_of(key)) if key in local.arrays else None
            coded_rows = CodedRows(self.layout.coded[name], local.arrays[name + BLOBS].reshape(-1), dictionary)
            local.coded[name] = coded_rows
        return coded_rows

    def _all_of(self, key: str) -> Array:
        """A copy of a whole data file, whose blocks are fetched for it."""
        blocks = self._blocks_of_all(key)
        return self.copied(lambda: fetch({self: blocks}), lambda: self.local.arrays[key].copy())

    def _blocks_of_all(self, key: str) -> IntArray:
        file = self.layout.arrays[key]
        return np.sort(self.blocks_of(file.name, np.zeros(1, np.int64), np.array([file.size])))

    def copied(self, bring: Callable[[], Taken], copy: Callable[[], T]) -> T:
        """The result of `copy`, repeated until all blocks that `bring` fetched stayed there during the copying.

        Raises: SchemaError: they did not within `PATIENCE`, as the cache is too small for its readers.
        """
        until = time.monotonic() + PATIENCE
        while True:
            taken = bring()
            result = copy()
            if taken.unchanged():
                return result
            if time.monotonic() > until:
                raise SchemaError(
                    f"cache_bytes: {self.limit} are too few for all that read from this cache at a time: what one "
                    "fetches is given back for another before it is read; give more"
                )


class _RemovedError(Exception):
    """The local copy was removed, or another one was made in its place."""


class _ByName(Mapping[str, T]):
    """Values that are looked up at each use: the local copy that they come from may be another one by then."""

    def __init__(self, names: Mapping[str, Any], find: Callable[[str], T]) -> None:
        self._names, self._find = names, find

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._find(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class MirrorStorage(Storage):
    """A shard open for reading: records and meta fields come from its head, and rows are mapped when they are read."""

    def __init__(self, mirror: Mirror, verify: str = "auto") -> None:
        self.mirror: Mirror = mirror
        super().__init__(Folder(mirror.path), read_only=True, verify=verify)
        self.mirror = mirror

    @property
    def folder(self) -> Folder:
        """The folder of the local copy, made if it is missing: other things are kept in it, too, such as priorities."""
        _ = self.mirror.local
        return self._folder

    @folder.setter
    def folder(self, folder: Folder) -> None:
        self._folder = folder

    def __getstate__(self) -> dict[str, Any]:
        return {"mirror": self.mirror, "verify": self.verify}

    @cached_property
    def layout(self) -> Layout:
        layout: Layout = self.mirror.layout
        return layout

    @cached_property
    def maps(self) -> Maps:
        layout, head = self.mirror.open()

        def array(key: str) -> Array:
            file = layout.arrays[key]
            flat = np.frombuffer(head[file.name], file.dtype, -1, len(file.header)).reshape(file.shape)
            return flat if flat.flags.aligned else flat.copy()

        return Maps(
            array("/episodes").view(np.uint64).reshape(-1, WORDS),
            array("/state").view(np.uint64).reshape(-1),
            array("/checksums"),
            _ByName(layout.schema.fields, self.mirror.rows),
            {name: array(name) for name in layout.schema.meta_fields},
            _ByName(layout.coded, self.mirror.coded),
        )

    @property
    def where(self) -> str:
        return self.mirror.where

    @property
    def schema_replaced(self) -> bool:
        return False

    @property
    def in_place(self) -> bool:
        return True

    def is_of(self, folder: Folder) -> bool:
        return folder.path == self.path

    def require_schema(self, *, to_write: bool = False) -> None:
        """A published folder never changes."""

    def read_rows(self, name: str, rows: IntArray | slice, slots: Any, serials: Any) -> Array:
        low = np.array([rows.start]) if isinstance(rows, slice) else rows.ravel()
        high = np.array([rows.stop]) if isinstance(rows, slice) else low + 1
        read = super().read_rows
        wanted, is_mended = [(self, [Rows(name, low, high)])], True
        while True:
            try:
                return self.mirror.copied(lambda: bring(wanted), lambda: read(name, rows, slots, serials).copy())
            except CorruptBufferError:
                was_mended, is_mended = is_mended, self.mend(name, slots)
                if not is_mended and not was_mended:  # once more, as another process may have mended first
                    raise

    def mend(self, name: str, slots: Any) -> bool:
        table, slots = self.table, np.unique(slots)
        slots = slots[slots < len(table.valid)]
        low = np.array([self.start_of(name, slot) for slot in slots.tolist()], np.int64)
        return self.mirror.mend(Rows(name, low, low + table.length[slots] + self.layout.schema.fields[name].final))

    def damaged(self, slot: int) -> list[str]:
        names, is_mended = super().damaged(slot), True
        while names:
            was_mended = is_mended
            is_mended = any([self.mend(name, slot) for name in names if name in self.maps.rows])
            if not is_mended and not was_mended:  # once more, as another process may have mended first
                break
            names = super().damaged(slot)
        return names

    def sums_of_rows(self, name: str, first: int, stop: int, sums: Sums = EMPTY) -> Sums:
        read = super().sums_of_rows
        if stop <= first:
            return read(name, first, stop, sums)
        wanted = [(self, [Rows(name, np.array([first]), np.array([stop]))])]
        return self.mirror.copied(lambda: bring(wanted), lambda: read(name, first, stop, sums))

    def slices_of(self, name: str, steps: int) -> Array:
        return slices_of(self.maps.rows[name], steps)  # not kept: it would keep the map of a copy that was unmapped


# Several mirrors together


def mirror_of(storage: Storage) -> Mirror:
    """The mirror of a storage that has one."""
    assert isinstance(storage.mirror, Mirror)
    return storage.mirror


def bring(wanted: Wanted, in_groups: bool = False) -> Taken:
    """Fetch the blocks of rows, and of their blobs, that are not there yet, and wait for them.

    Args: in_groups: all blocks of the groups that they are in.
    """
    taken = Taken()
    parts = [(storage, rows) for storage, rows in wanted if not taken.add_whole(mirror_of(storage))]
    chosen = _blocks_of(parts, in_groups)
    taken += fetch(chosen)
    if blobs := _blocks_of(parts, in_groups, blobs=True):
        both = {m: np.union1d(these, blobs.get(m, these)) for m, these in chosen.items()}
        taken += fetch(both)  # together, so that no block is given back for another of them
    return taken


def _blocks_of(wanted: Wanted, in_groups: bool, *, blobs: bool = False) -> Chosen:
    """Mirror -> the blocks of the rows, ascending; with `blobs` those of their blobs, whose index must be there."""
    blocks: dict[Mirror, list[IntArray]] = {}
    for storage, rows in wanted:
        mirror = mirror_of(storage)
        if blobs:
            rows = [each for each in rows if each.name in storage.layout.coded]
        find = mirror.blocks_of_blobs if blobs else mirror.blocks_of_rows
        blocks.setdefault(mirror, []).extend(map(find, rows))
    chosen = {mirror: np.unique(np.concatenate(each)) for mirror, each in blocks.items() if each}
    return {mirror: mirror.files.in_groups(these) for mirror, these in chosen.items()} if in_groups else chosen


def bring_later(wanted: Wanted) -> None:
    """Fetch the blocks of rows in another thread; an error is raised only when they are read."""
    global _ahead
    if _ahead is None or _ahead[0] != process_id():
        _ahead = process_id(), SimpleQueue()
        arguments = _ahead[1], threading.Lock()
        for _ in range(2):  # daemon threads, not an executor's: the end of the program would wait for those
            threading.Thread(target=_bring_each, args=arguments, name="memmap_buffer fetch", daemon=True).start()
    _ahead[1].put(wanted)


def _bring_each(asked: SimpleQueue[Wanted], turn: threading.Lock) -> None:
    """The work of each of two threads. `turn` lets one request at a time: once its blocks begin to come, the other may
    request the next ones, so that the line is busy while the first one writes.
    """
    while True:
        with ExitStack() as locks:
            locks.enter_context(turn)
            _bring_quietly(asked.get(), locks.close)


def _bring_quietly(wanted: Wanted, begun: Callable[[], None]) -> None:
    with suppress(Exception):
        chosen = _blocks_of(wanted, in_groups=True)
        size = sum(int(mirror.blocks.sizes[these].sum()) for mirror, these in chosen.items())
        if chosen and all(mirror.cache.has_room_beside(size) for mirror in chosen):
            fetch(chosen, begun)
            begun()
            blobs = [(s, rows) for s, rows in wanted if any(each.name in s.layout.coded for each in rows)]
            bring(blobs, in_groups=True)


class Taken(list[tuple[Mirror, Blocks, IntArray, Words]]):
    """Blocks that were there before their rows were copied, and their counters at that moment."""

    def __init__(self, of_blocks: Iterable[tuple[Mirror, Blocks, IntArray, Words]] = ()) -> None:
        super().__init__(of_blocks)
        self._whole: list[tuple[Mirror, Blocks, bytes]] = []

    def add_whole(self, mirror: Mirror) -> bool:
        """Add all blocks of a mirror, if all are there; returns whether they are.

        Then the blocks of the rows that are read need not be found. It is not tried with a bounded cache.
        """
        blocks = mirror.local.blocks
        mirror.cache.use(mirror, len(mirror.files.sizes) + 1)
        removal = blocks.whole() if mirror.cache.limit is None else None
        if removal is None:
            return False
        self._whole.append((mirror, blocks, removal))
        return True

    def unchanged(self) -> bool:
        """Whether all of these blocks have been there ever since, in the local copy that is mapped now."""
        return all(
            mirror.local.blocks is blocks and blocks.removal == removal for mirror, blocks, removal in self._whole
        ) and all(
            mirror.local.blocks is blocks
            and not (counters & np.uint32(1)).any()
            and np.array_equal(blocks.counters(chosen), counters)
            for mirror, blocks, chosen, counters in self
        )


Chosen = dict[Mirror, IntArray]


def _nothing() -> None:
    """Do nothing: for callers of `fetch` that need no `begun`."""


def fetch(chosen: Chosen, begun: Callable[[], None] = _nothing) -> Taken:
    """Fetch the blocks of mirrors that are absent; returns all of `chosen`, with their counters.

    Args:
        chosen: mirror -> blocks, ascending.
        begun: called, perhaps more than once, when all blocks that nobody else fetches are requested, and the first of
            them has come.

    Raises:
        RemoteError: the store fails.
        SchemaError: the blocks are more than the bound of the cache.
        OSError: the disk is full.
    """
    for _ in range(OPENINGS):
        blocks = {mirror: mirror.local.blocks for mirror in chosen}
        try:
            _fetch(chosen, blocks, begun)
        except _RemovedError:
            for mirror in chosen:
                mirror.unmap()
        else:
            return Taken((m, blocks[m], these, blocks[m].counters(these)) for m, these in chosen.items())
    path = next(iter(chosen)).cache.path
    raise CorruptBufferError(f"{path}: its folders are removed all the time; give another cache")


def _fetch(chosen: Chosen, blocks: Mapping[Mirror, Blocks], begun: Callable[[], None]) -> None:
    caches = {mirror.cache: 0 for mirror in chosen}
    for mirror, these in chosen.items():
        caches[mirror.cache] += int(blocks[mirror].sizes[these].sum())
        bounded = mirror.cache.limit is not None  # then rows of a window that are still to be read must not go first
        blocks[mirror].touch(mirror.files.in_groups(these) if bounded else these, now())
    for cache, num_bytes in caches.items():
        cache.require_room(num_bytes)
    size = min([TOGETHER, *(cache.limit // 4 for cache in caches if cache.limit is not None)])
    keeps = all(cache.keeps_all([mirror for mirror in chosen if mirror.cache is cache]) for cache in caches)
    every = {mirror: _absent(blocks[mirror], mirror.files, these, keeps) for mirror, these in chosen.items()}
    absent = {mirror: these for mirror, these in every.items() if these.size}
    if absent:
        _uninterrupted(lambda: _fetch_absent(absent, size, chosen, blocks, begun))


def _absent(blocks: Blocks, files: DataFiles, chosen: IntArray, keeps: bool) -> IntArray:
    """The blocks of `chosen` that are not there, ascending, and others of their groups.

    If some of a group are there, or half of it is wanted, all of it is fetched: so a batch of single rows takes few
    bytes, and an epoch of such batches few requests. Not where `keeps` is False: the cache cannot keep all.
    """
    absent = blocks.absent(chosen)
    if not absent.size or not keeps:
        return absent
    first, stop, counts = files.groups_of(absent)
    every, sizes = expanded(first, stop), stop - first
    is_there = blocks.words[every, COUNTER] & np.uint32(1) == 0
    is_whole = np.logical_or.reduceat(is_there, np.cumsum(sizes) - sizes) | (2 * counts >= sizes)
    return np.union1d(absent, every[np.repeat(is_whole, sizes) & ~is_there])


def _uninterrupted(work: Callable[[], None]) -> None:
    """Do work that takes locks, but not in the main thread: only that can be interrupted by Ctrl-C, which might come
    while it gives a lock back.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    from concurrent.futures import Future

    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="memmap_buffer fetch", daemon=True).start()
    done.result()


def _fetch_absent(
    absent: Chosen,
    size: int,
    chosen: Chosen,
    blocks: Mapping[Mirror, Blocks],
    begun: Callable[[], None],
) -> None:
    """Fetch absent blocks, `size` bytes at a time; at the end, wait for those that others fetch."""
    until = time.monotonic() + PATIENCE
    while absent:
        part, rest = _divided(absent, size, blocks)
        with ExitStack() as locks:
            taken = {m: locks.enter_context(blocks[m].taken(these.tolist())) for m, these in part.items()}
            mine = {m: these for m, these in taken.items() if these.size}
            fits = _fetch_held(mine, blocks, [(blocks[m], these) for m, these in chosen.items()], begun)
        if fits:
            others = {m: blocks[m].absent(np.setdiff1d(these, taken[m], True)) for m, these in part.items()}
            others = {m: these for m, these in others.items() if these.size}
            if others and not mine:
                mirror, these = next(iter(others.items()))
                blocks[mirror].wait_for(int(these[0]))
            absent, until = _together(rest, others), time.monotonic() + PATIENCE
        elif time.monotonic() > until:
            raise SchemaError(
                f"cache_bytes: {next(iter(chosen)).cache.limit:,} are too few for all that read from this cache at a "
                "time; give more, or read smaller batches"
            )
        else:
            size = max(1, size // 2)
            time.sleep(0.01)


def _divided(absent: Chosen, size: int, blocks: Mapping[Mirror, Blocks]) -> tuple[Chosen, Chosen]:
    """(the first blocks, of `size` bytes but at least one block, all others)."""
    part, rest = Chosen(), Chosen()
    for mirror, these in absent.items():
        ends = np.cumsum(blocks[mirror].sizes[these])
        count = max(int(np.searchsorted(ends, size, side="right")), 0 if part else 1)
        part |= {mirror: these[:count]} if count else {}
        rest |= {mirror: these[count:]} if count < len(these) else {}
        size = size - int(ends[count - 1]) if count == len(these) else 0
    return part, rest


def _together(some: Chosen, others: Chosen) -> Chosen:
    both = {mirror: np.union1d(these, others[mirror]) for mirror, these in some.items() if mirror in others}
    return some | others | both


def _fetch_held(
    part: Chosen,
    blocks: Mapping[Mirror, Blocks],
    keep: Sequence[tuple[Blocks, IntArray]],
    begun: Callable[[], None],
) -> bool:
    """Fetch blocks whose locks are held; False if the cache has no room for them beside the blocks `keep`."""
    part = {mirror: blocks[mirror].absent(these) for mirror, these in part.items()}
    require_digests([mirror for mirror, these in part.items() if these.size])
    for mirror, these in part.items():
        mirror.look_at(blocks[mirror], these)
    part = {mirror: absent for mirror, these in part.items() if (absent := blocks[mirror].absent(these)).size}
    for cache in {mirror.cache for mirror in part}:
        wanted = [(blocks[mirror], these) for mirror, these in part.items() if mirror.cache is cache]
        if not cache.reserve(wanted, keep):
            return False
    for objects in {mirror.objects for mirror in part}:
        _stream(objects, {mirror: these for mirror, these in part.items() if mirror.objects is objects}, blocks, begun)
    return True


def _stream(objects: Objects, part: Chosen, blocks: Mapping[Mirror, Blocks], begun: Callable[[], None]) -> None:
    """Fetch blocks of one store. The thread that receives a piece checks and writes it, while others still come."""
    mine = [(mirror, piece) for mirror, these in part.items() for piece in mirror.files.pieces(these)]
    writing = _Writing(mine, blocks)
    ranges = [mirror.range_of(piece) for mirror, piece in mine]
    try:
        for _ in objects.stream(ranges, writing.take):
            begun()
            writing.require()
    finally:
        writing.end()


class _Writing:
    """The writing of pieces (neighbouring blocks) that are fetched, each by the thread that received it."""

    def __init__(self, pieces: Sequence[tuple[Mirror, Sequence[int]]], blocks: Mapping[Mirror, Blocks]) -> None:
        self._pieces, self._blocks = pieces, blocks
        self._at_work, self._ended = 0, False
        self._changed = threading.Condition()
        self._failed: Exception | None = None

    def take(self, i: int, data: bytes) -> bool:
        """Write piece `i` if its bytes are right; returns whether they are."""
        mirror, piece = self._pieces[i]
        if not mirror.is_right(piece, data):
            return False
        with self._changed:
            if self._ended:
                return True
            self._at_work += 1
        try:
            mirror.write(self._blocks[mirror], piece, data)
        except (OSError, _RemovedError) as error:
            self._failed = error  # returns True all the same: the store did not fail, so it must not be asked again
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()
        return True

    def require(self) -> None:
        """Raise the error of a write that failed."""
        if self._failed is not None:
            raise self._failed

    def end(self) -> None:
        """End the writing: when this returns, nothing is written any more, so the locks may be given back."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._at_work)
