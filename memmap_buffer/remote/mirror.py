"""`Mirror`: a sparse local copy of a packed folder at a URL, whose blocks are fetched when rows of them are read.

The copy is a folder of the same files, made when the first row of it is read; until then its head is enough. Before
rows are copied `bring` has their blocks fetched; `Taken` tells afterwards whether all of them stayed while they were
copied. A copy that a stranger cut or removed is made anew.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError, SchemaError
from memmap_buffer.format.blobs import CodedRows, Dictionary, lengths_of
from memmap_buffer.format.checksums import EMPTY, Sums
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.layout import BLOBS, DICTIONARY, Layout
from memmap_buffer.format.records import WORDS
from memmap_buffer.format.source import BLOCK, Rows, Traffic, Wanted
from memmap_buffer.format.storage import Maps, Storage, slices_of
from memmap_buffer.format.syscalls import process_id, random_bytes, read_at, write_all
from memmap_buffer.remote.blocks import COUNTER, LOCAL, NAME, Blocks, IntArray, Words, new_words, now
from memmap_buffer.remote.cache import Cache, CacheTraffic
from memmap_buffer.remote.layout import DATA, HEAD, Shard, digest, head_object, num_blocks
from memmap_buffer.remote.published import Published, require_digests

if TYPE_CHECKING:
    from memmap_buffer.remote.objects import Objects

T = TypeVar("T")
TOGETHER = 2048  # blocks that are fetched at a time, so that others wait for their locks
WHOLE = 16384  # blocks of a mirror that are looked at all together
DIGESTS = "mirror/digests"
PATIENCE = 60.0  # seconds in which no room was found, or no rows stayed until they were copied
OPENINGS = 5
_NOT_WHOLE = (FileNotFoundError, NotADirectoryError, CorruptBufferError)  # what opening a local copy raises
_ahead: tuple[int, SimpleQueue[Wanted]] | None = None  # of which process; what its threads are to fetch


class Local:
    """The local copy of a shard as this process has it mapped.

    Args:
        folder: it, held.
        blocks: which of its blocks are there.
        layout: of the shard.

    Attributes:
        arrays: its data files, by their keys in the layout.
        coded: what was made of them to decode fields.
    """

    def __init__(self, folder: Folder, blocks: Blocks, layout: Layout) -> None:
        self.blocks = blocks
        self.arrays = {
            key: folder.map(a.name, a.header, a.dtype, a.shape)
            for key, a in layout.arrays.items()
            if a.name.startswith(DATA)
        }
        self.coded: dict[str, CodedRows] = {}


class Mirror(Published):
    """A packed folder at a URL, and what is there of it.

    Args:
        objects: the store.
        shard: what is known of it.
        name: of the shard, where the URL is that of its root.
        cache: where its local copy lies.
        heads: the bytes of the object in the root that its head is in, too; None: its head is one of its version.
    """

    def __init__(self, objects: Objects, shard: Shard, name: str, cache: Cache, heads: int | None = None) -> None:
        super().__init__(objects, shard, name)
        self.cache, self._heads = cache, heads
        self.path = cache.path / shard.mirror
        self._local: Local | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Mirror, (self.objects, self.shard, self.name, self.cache, self._heads)

    # What is known without a local copy

    def read_head(self) -> bytes:
        name, first, size = self.shard.head
        path, total = (self.prefix + HEAD, size) if self._heads is None else (head_object(name), self._heads)

        def fetch() -> bytes:
            return self.objects.read_ranges([(path, 0, total)], lambda i, data: digest(data) == name)[0]

        for anew in (False, True):
            part = bytes(self.cache.head(name, total, fetch, anew)[first : first + size])
            if self.shard.is_head(part):
                return part
        where = self.objects.name_of(path)
        raise CorruptBufferError(f"{where}: the bytes are not those that were published; publish the shard again")

    def kept_digests(self) -> bytes:
        with suppress(OSError, CorruptBufferError):
            return Folder(self.path).read(DIGESTS, 8 * self.files.count)
        return b""

    def keep_digests(self, content: bytes) -> None:
        with suppress(OSError):
            Folder(self.path).write_new(DIGESTS, content, sync=False)

    def sizes_of(self, fields: Sequence[str]) -> list[int]:
        """The bytes of each file that rows of fields are read from."""
        keys = (key for name in fields for key in (name, name + BLOBS))
        return [self.layout.arrays[key].size for key in keys if key in self.layout.arrays]

    # What readers ask it, see `Source`

    @property
    def limit(self) -> int | None:
        """The bytes that the cache keeps at most."""
        return self.cache.limit

    @property
    def num_rows(self) -> int:
        """How many timesteps the folder has."""
        return self.layout.rows or 0

    def whole(self) -> Taken | None:
        """All blocks, where all are there; else None."""
        taken = Taken()
        return taken if taken.add_whole(self) else None

    def bring(self, wanted: Wanted) -> Taken:
        """Have the blocks of rows there."""
        return bring(wanted)

    def bring_later(self, wanted: Wanted) -> None:
        """Have the blocks of rows fetched in a thread; what fails is told when they are read."""
        bring_later(wanted)

    def traffic(self, storages: Sequence[Storage]) -> Traffic:
        """The traffic from now on into the caches of some folders."""
        names: dict[Cache, list[str]] = {}
        for storage in storages:
            mirror = mirror_of(storage)
            names.setdefault(mirror.cache, []).append(mirror.path.name)
        return CacheTraffic(storages[0].where, names)

    # The local copy

    @property
    def local(self) -> Local:
        """The local copy, made or made anew where it is not whole."""
        local = self._local
        if local is None:
            local = self._local = self._opened()
        return local

    @property
    def blocks(self) -> Blocks:
        """The state of its blocks."""
        return self.local.blocks

    def unmap(self) -> None:
        """Map it again when it is used again."""
        self._local = None

    def _opened(self) -> Local:
        for _ in range(OPENINGS - 1):
            with suppress(*_NOT_WHOLE):
                return self._mapped()
            self._make()
        return self._mapped()

    def _mapped(self) -> Local:
        with Folder(self.path).held() as folder:
            return Local(folder, self.cache.blocks_of(folder, self.files), self.layout)

    def _make(self) -> None:
        """Make a local copy of which no block is there, whole; one that another process made meanwhile may go again."""
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
            _remove(new)

    def _discard(self) -> None:
        """Remove the local copy, unless it can be opened: another process may just have made it."""
        with suppress(*_NOT_WHOLE):
            self._mapped()
            return
        gone = self.path.with_name(f"{self.path.name}.new-{random_bytes(8).hex()}")
        with suppress(FileNotFoundError):
            self.path.rename(gone)
        _remove(gone)

    # Blocks

    def blocks_of(self, name: str, begin: IntArray, end: IntArray) -> IntArray:
        """The blocks that hold some ranges of bytes of a file, ascending."""
        first, size = self.files.first[name], self.files.sizes[name]
        begin, end = np.clip(begin, 0, size - 1), np.minimum(end, size)  # an index that was forged may say anything
        low, high = begin // BLOCK, np.maximum(end - 1, begin) // BLOCK
        mask = np.zeros(num_blocks(size), np.bool_)
        mask[low] = mask[high] = True
        wide = np.flatnonzero(high > low + 1)
        if wide.size:
            mask[_expanded(low[wide], high[wide])] = True
        return first + np.flatnonzero(mask)

    def blocks_of_rows(self, rows: Rows) -> IntArray:
        """The blocks that hold rows of a field, of one that is compressed those of its index."""
        layout = self.layout
        file, width = layout.arrays[rows.name], layout.schema.fields[rows.name].in_file.itemsize
        return self.blocks_of(file.name, len(file.header) + rows.low * width, len(file.header) + rows.high * width)

    def blocks_of_blobs(self, rows: Rows) -> IntArray:
        """The blocks that hold the blobs of rows, whose index is there."""
        index, file = self.local.arrays[rows.name], self.layout.arrays[rows.name + BLOBS]
        row = _expanded(rows.low, rows.high)
        begin, length = index[row, 0].astype(np.int64), lengths_of(index[row]).astype(np.int64)
        offset = len(file.header) + begin[length > 0]
        return self.blocks_of(file.name, offset, offset + length[length > 0]) if offset.size else offset

    def write(self, blocks: Blocks, piece: range, data: bytes) -> None:
        """Have neighbouring blocks there, whose locks are held."""
        name, start, _ = self.files.place(piece[0])
        with self._held_folder(blocks) as folder, folder.changing(name, self.files.sizes[name]) as fd:
            try:
                write_all(fd, data, start)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                text = f"{self.path}: the disk is full; give a cache on another one, or a smaller cache_bytes"
                raise OSError(error.errno, text) from None
        for block in piece:
            if blocks.words[block, COUNTER] & np.uint32(1):
                blocks.change(block)

    def look_at(self, blocks: Blocks, chosen: IntArray) -> None:
        """Find those of some absent blocks that were written before another boot, or a kill, and are whole."""
        chosen = chosen[blocks.words[chosen, LOCAL] != 0]
        if not chosen.size:
            return
        with self._held_folder(blocks) as folder:
            for block in chosen.tolist():
                name, start, stop = self.files.place(block)
                with folder.reading(name) as (fd, _):
                    if self.is_right(range(block, block + 1), read_at(fd, stop - start, start)):
                        blocks.change(block)

    @contextmanager
    def _held_folder(self, blocks: Blocks) -> Iterator[Folder]:
        """The folder whose blocks these are. Raises _RemovedError where it stands there no more."""
        try:
            with Folder(self.path).held() as folder:
                if folder.file_key(NAME) != blocks.key:
                    raise _RemovedError
                yield folder
        except _NOT_WHOLE:
            raise _RemovedError from None

    # Rows

    def storage(self, verify: str = "auto") -> MirrorStorage:
        """The folder, open for reading; rows of it are fetched when they are read."""
        storage = MirrorStorage(self, verify)
        storage.refresh()
        storage.check_always()
        return storage

    def rows(self, name: str) -> Array:
        """The rows of a field, or the index of its blobs, as they are mapped."""
        return self.local.arrays[name]

    def coded(self, name: str) -> CodedRows:
        """The blobs and the dictionary that it takes to decode a field."""
        local, key = self.local, name + DICTIONARY
        coded_rows = local.coded.get(name)
        if coded_rows is None:
            dictionary = Dictionary.of(self._all_of(key)) if key in local.arrays else None
            coded_rows = CodedRows(self.layout.coded[name], local.arrays[name + BLOBS].reshape(-1), dictionary)
            local.coded[name] = coded_rows
        return coded_rows

    def _all_of(self, key: str) -> Array:
        """All of a data file."""
        file = self.layout.arrays[key]
        blocks = self.blocks_of(file.name, np.zeros(1, np.int64), np.array([file.size]))
        return self.copied(lambda: fetch({self: blocks}), lambda: self.local.arrays[key].copy())

    def copied(self, bring: Callable[[], Taken], copy: Callable[[], T]) -> T:
        """A copy of what is brought, made until all of it stayed meanwhile."""
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
    """Values that are looked up when they are used: the copy that they come from may be another one each time."""

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
    """A shard open for reading; what it shows is in its head, and its rows are mapped when they are read."""

    def __init__(self, mirror: Mirror, verify: str = "auto") -> None:
        self.mirror: Mirror = mirror
        super().__init__(Folder(mirror.path), read_only=True, verify=verify)
        self.mirror = mirror

    @property
    def folder(self) -> Folder:
        """The local copy, for what else is kept in it, as priorities."""
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
        wanted = [(self, [Rows(name, low, high)])]
        return self.mirror.copied(lambda: bring(wanted), lambda: read(name, rows, slots, serials).copy())

    def sums_of_rows(self, name: str, first: int, stop: int, sums: Sums = EMPTY) -> Sums:
        read = super().sums_of_rows
        if stop <= first:
            return read(name, first, stop, sums)
        wanted = [(self, [Rows(name, np.array([first]), np.array([stop]))])]
        return self.mirror.copied(lambda: bring(wanted), lambda: read(name, first, stop, sums))

    def slices_of(self, name: str, steps: int) -> Array:
        return slices_of(self.maps.rows[name], steps)  # not kept: it would keep a map that is not used any more


# Several mirrors together


def mirror_of(storage: Storage) -> Mirror:
    """The mirror of a folder that has one."""
    assert isinstance(storage.mirror, Mirror)
    return storage.mirror


def bring(wanted: Wanted) -> Taken:
    """Have the blocks of rows there."""
    taken = Taken()
    parts = [(storage, rows) for storage, rows in wanted if not taken.add_whole(mirror_of(storage))]
    chosen = _blocks_of(parts)
    taken += fetch(chosen)
    if blobs := _blocks_of(parts, blobs=True):
        both = {m: np.union1d(these, blobs.get(m, these)) for m, these in chosen.items()}
        taken += fetch(both)  # none for another
    return taken


def _blocks_of(wanted: Wanted, *, blobs: bool = False) -> Chosen:
    """The blocks of rows, ascending, or those of their blobs, whose index is there."""
    blocks: dict[Mirror, list[IntArray]] = {}
    for storage, rows in wanted:
        mirror = mirror_of(storage)
        if blobs:
            rows = [each for each in rows if each.name in storage.layout.coded]
        find = mirror.blocks_of_blobs if blobs else mirror.blocks_of_rows
        blocks.setdefault(mirror, []).extend(map(find, rows))
    return {mirror: np.unique(np.concatenate(each)) for mirror, each in blocks.items() if each}


def _remove(folder: Path) -> None:
    from shutil import rmtree

    rmtree(folder, ignore_errors=True)


def bring_later(wanted: Wanted) -> None:
    """Have the blocks of rows fetched in a thread; what fails is told when they are read."""
    global _ahead
    if _ahead is None or _ahead[0] != process_id():
        _ahead = process_id(), SimpleQueue()
        arguments = _ahead[1], threading.Lock()
        for _ in range(2):  # of no executor: a program that ends waits for its threads
            threading.Thread(target=_bring_each, args=arguments, name="memmap_buffer fetch", daemon=True).start()
    _ahead[1].put(wanted)


def _bring_each(asked: SimpleQueue[Wanted], turn: threading.Lock) -> None:
    """Of two threads the second asks once the first has, so that the line is busy while that one writes."""
    while True:
        with ExitStack() as locks:
            locks.enter_context(turn)
            _bring_quietly(asked.get(), locks.close)


def _bring_quietly(wanted: Wanted, begun: Callable[[], None]) -> None:
    with suppress(Exception):
        chosen = _blocks_of(wanted)
        size = sum(int(mirror.blocks.sizes[these].sum()) for mirror, these in chosen.items())
        if chosen and all(mirror.cache.has_room_beside(size) for mirror in chosen):
            fetch(chosen, begun)
            begun()
            bring([(s, rows) for s, rows in wanted if any(each.name in s.layout.coded for each in rows)])  # their blobs


class Taken(list[tuple[Mirror, Blocks, IntArray, Words]]):
    """Blocks that were there when rows of them were about to be copied, and their counters then."""

    def add_whole(self, mirror: Mirror) -> bool:
        """Whether all blocks of a mirror are there, which are noted then: no need to find those that are read."""
        blocks = mirror.local.blocks
        mirror.cache.use(mirror, len(mirror.files.sizes) + 1)
        if mirror.cache.limit is not None or len(blocks.words) > WHOLE:
            return False
        every = np.arange(len(blocks.words))
        counters = blocks.counters(every)
        if (counters & np.uint32(1)).any():
            return False
        self.append((mirror, blocks, every, counters))
        return True

    def unchanged(self) -> bool:
        """Whether all of them were there all the time, in the copy that is read."""
        return all(
            mirror.local.blocks is blocks
            and not (counters & np.uint32(1)).any()
            and np.array_equal(blocks.counters(chosen), counters)
            for mirror, blocks, chosen, counters in self
        )


Chosen = dict[Mirror, IntArray]


def _nothing() -> None:
    """For who has nothing to do then."""


def fetch(chosen: Chosen, begun: Callable[[], None] = _nothing) -> Taken:
    """Have blocks, ascending, of mirrors there; with their counters.

    Args:
        chosen: the blocks.
        begun: called, more than once, when all that nobody else fetches is asked for, and the first of it has come.

    Raises:
        RemoteError: the store fails.
        SchemaError: they are more than the bound of the cache.
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
        blocks[mirror].touch(these, now())
    for cache, num_bytes in caches.items():
        cache.require_room(num_bytes)
    size = TOGETHER
    for cache in caches:
        size = size if cache.limit is None else min(size, max(1, cache.limit // (4 * BLOCK)))
    absent = [(m, block) for m in chosen for block in blocks[m].absent(chosen[m]).tolist()]
    if absent:
        _uninterrupted(lambda: _fetch_absent(absent, size, chosen, blocks, begun))


def _uninterrupted(work: Callable[[], None]) -> None:
    """Do what takes locks in another thread than the main one, which alone Ctrl-C interrupts, also as it gives them."""
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
    absent: list[tuple[Mirror, int]],
    size: int,
    chosen: Chosen,
    blocks: Mapping[Mirror, Blocks],
    begun: Callable[[], None],
) -> None:
    """Fetch blocks, so many at a time; those that others fetch are waited for at the end."""
    until = time.monotonic() + PATIENCE
    while absent:
        part = _by_mirror(absent[:size])
        with ExitStack() as locks:
            taken = {m: locks.enter_context(blocks[m].taken(these.tolist())) for m, these in part.items()}
            mine = {m: these for m, these in taken.items() if these.size}
            fits = _fetch_held(mine, blocks, [(blocks[m], these) for m, these in chosen.items()], begun)
        if fits:
            others = {m: np.setdiff1d(these, taken[m], True) for m, these in part.items()}
            still_absent = [(m, block) for m, these in others.items() for block in blocks[m].absent(these).tolist()]
            if still_absent and not mine:
                blocks[still_absent[0][0]].wait_for(still_absent[0][1])
            absent, until = absent[size:] + still_absent, time.monotonic() + PATIENCE
        elif time.monotonic() > until:
            raise SchemaError(
                f"cache_bytes: {next(iter(chosen)).cache.limit:,} are too few for all that read from this cache at a "
                "time; give more, or read smaller batches"
            )
        else:
            size = max(1, size // 2)
            time.sleep(0.01)


def _fetch_held(
    part: Chosen,
    blocks: Mapping[Mirror, Blocks],
    keep: Sequence[tuple[Blocks, IntArray]],
    begun: Callable[[], None],
) -> bool:
    """Fetch blocks whose locks are held; False where the cache has no room for them beside those that are kept."""
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
    """Fetch blocks of one store. They are compared and written in the threads that got them, while others come."""
    mine = [(mirror, piece) for mirror, these in part.items() for piece in mirror.files.pieces(these.tolist())]
    writing = _Writing(mine, blocks)
    ranges = [mirror.range_of(piece) for mirror, piece in mine]
    try:
        for _ in objects.stream(ranges, writing.take):
            begun()
            writing.require()
    finally:
        writing.end()


class _Writing:
    """The pieces of blocks that are fetched, each written by the thread that got it."""

    def __init__(self, pieces: Sequence[tuple[Mirror, range]], blocks: Mapping[Mirror, Blocks]) -> None:
        self._pieces, self._blocks = pieces, blocks
        self._at_work, self._ended = 0, False
        self._changed = threading.Condition()
        self._failed: Exception | None = None

    def take(self, i: int, data: bytes) -> bool:
        """Write a piece if it is right; whether it is."""
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
            self._failed = error  # it is not the store that failed, so it is not asked again
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()
        return True

    def require(self) -> None:
        """Raise what a write did."""
        if self._failed is not None:
            raise self._failed

    def end(self) -> None:
        """Nothing is written any more when this returns, so that the locks may go."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._at_work)


def _by_mirror(absent: Sequence[tuple[Mirror, int]]) -> Chosen:
    blocks: dict[Mirror, list[int]] = {}
    for mirror, block in absent:
        blocks.setdefault(mirror, []).append(block)
    return {mirror: np.array(these, np.int64) for mirror, these in blocks.items()}


def _expanded(low: IntArray, high: IntArray) -> IntArray:
    """The rows of ranges."""
    counts = high - low
    rows: IntArray = np.repeat(low, counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows
