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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError, RemoteError, SchemaError
from memmap_buffer.format.blobs import CodedRows, Dictionary, lengths_of
from memmap_buffer.format.checksums import EMPTY, Sums
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.layout import BLOBS, DICTIONARY, Layout
from memmap_buffer.format.records import WORDS
from memmap_buffer.format.source import Rows, Traffic, Wanted
from memmap_buffer.format.storage import Maps, Storage, slices_of
from memmap_buffer.format.syscalls import process_id, random_bytes
from memmap_buffer.remote.blocks import COUNTER, NAME, NOT_WHOLE, Blocks, IntArray, RemovedError, new_words, now
from memmap_buffer.remote.cache import DIGESTS, Cache, CacheTraffic, keep_file, kept_digests, remove_mirror
from memmap_buffer.remote.layout import HEAD, Shard, digest, expanded, head_object, is_data
from memmap_buffer.remote.published import Published, require_digests

if TYPE_CHECKING:
    from memmap_buffer.remote.objects import Objects

log = logging.getLogger("memmap_buffer")
T = TypeVar("T")
TOGETHER = 512 << 20  # the most bytes that are fetched under locks at a time, as others wait for these locks
PATIENCE = 60.0  # seconds to go on trying if there is no room, or if blocks go before their rows are copied
OPENINGS = 5  # attempts to open a local copy that others remove
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
        files = {key: file for key, file in layout.arrays.items() if is_data(file)}
        maps = folder.map_all([*files.values()])
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
        for content in (self.cache.head(name, total), None):  # fetched anew where what was kept is not right
            if content is None:
                try:
                    (data,) = self.objects.read_ranges([(path, 0, total)], lambda i, data: digest(data) == name)
                except RemoteError as error:
                    if not error.missing or self._heads is None:
                        raise
                    return super().read_head()  # the object was removed, as newer lists have the heads in others
                content = self.cache.keep_head(name, data)
            part = bytes(content[first : first + size])
            if self.shard.is_head(part):
                return part
        where = self.objects.name_of(path)
        raise CorruptBufferError(f"{where}: the bytes are not those that were published; publish the shard again")

    def has_digests(self) -> bool:
        loaded = super().has_digests()
        if loaded and not Folder(self.path).exists(DIGESTS):  # a copy that was made anew lacks them
            self.keep_digests(self.digests.tobytes())
        return loaded

    def kept_digests(self) -> bytes:
        return kept_digests(self.path, self.files)

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
            with suppress(*NOT_WHOLE):
                return self._mapped()
            self._make()
        return self._mapped()

    def _mapped(self) -> Local:
        with Folder(self.path).kept_open() as folder:
            return Local(folder, Blocks.of(folder, self.files, self.cache.locks), self.layout)

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
                if is_data(array):
                    folder.create_array(array)
            folder.write_new(NAME, new_words(self.files.count), sync=False)
            try:
                new.rename(self.path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                with suppress(*NOT_WHOLE):
                    self._mapped()  # another process may just have made it
                    return
                remove_mirror(self.path)
        finally:
            remove_mirror(new)

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
        local, every = self.local, np.unique(np.concatenate(chosen))

        def give_back() -> tuple[int, IntArray]:
            num_bytes = local.blocks.give_back(every, self.digests)
            with local.blocks.taken(every.tolist()) as mine:
                others = np.setdiff1d(every, mine, True)
            for block in others.tolist():
                local.blocks.wait_for(block)
            return num_bytes, others

        num_bytes, others = _uninterrupted(give_back)
        kept = local.coded.get(rows.name)
        is_old = bool(kept and kept.dictionary and not np.array_equal(kept.dictionary.content, local.arrays[key]))
        local.coded.clear()
        if num_bytes and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: %d bytes that were kept in %s are not those that were published, and are fetched again; "
                "`memmap-buffer cache %s --check` compares all",
                *(self.where, num_bytes, self.path, self.cache.path),
            )
        return bool(num_bytes or others.size or is_old)

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
        super().__init__(Folder(mirror.path), read_only=True, verify=verify)
        self.mirror: Mirror = mirror

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
        head, layout = self.mirror.head(), self.mirror.layout

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
        was_mended = True
        while names := super().damaged(slot):
            is_mended = any([self.mend(name, slot) for name in names if name in self.maps.rows])
            if not is_mended and not was_mended:  # once more, as another process may have mended first
                break
            was_mended = is_mended
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


class Taken(list[tuple[Mirror, Blocks, Callable[[], bool]]]):
    """Blocks that were there before their rows were copied: whose they are, and whether they have been there since."""

    def add_whole(self, mirror: Mirror) -> bool:
        """Add all blocks of a mirror, if all are there; returns whether they are.

        Then the blocks of the rows that are read need not be found. It is not tried with a bounded cache.
        """
        blocks = mirror.local.blocks
        mirror.cache.use(mirror, len(mirror.files.sizes) + 1)
        removal = blocks.whole() if mirror.cache.limit is None else None
        if removal is not None:
            self.append((mirror, blocks, lambda: blocks.removal == removal))
        return removal is not None

    def unchanged(self) -> bool:
        """Whether all of these blocks have been there ever since, in the local copy that is mapped now."""
        return all(mirror.local.blocks is blocks and are_there() for mirror, blocks, are_there in self)


Chosen = dict[Mirror, IntArray]


def fetch(chosen: Chosen, begun: Callable[[], None] = lambda: None) -> Taken:
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
        try:
            return _Fetch(chosen, begun).run()
        except RemovedError:
            for mirror in chosen:
                mirror.unmap()
    path = next(iter(chosen)).cache.path
    raise CorruptBufferError(f"{path}: its folders are removed all the time; give another cache")


class _Fetch:
    """An attempt of `fetch`, into the local copies that are mapped when it begins."""

    def __init__(self, chosen: Chosen, begun: Callable[[], None]) -> None:
        self._chosen, self._begun = chosen, begun
        self._blocks = {mirror: mirror.local.blocks for mirror in chosen}

    def run(self) -> Taken:
        """Fetch what is absent. Raises RemovedError: a local copy was removed meanwhile."""
        num_bytes = dict.fromkeys((mirror.cache for mirror in self._chosen), 0)
        for mirror, these in self._chosen.items():
            blocks = self._blocks[mirror]
            num_bytes[mirror.cache] += int(blocks.sizes[these].sum())
            if mirror.cache.limit is not None:  # rows of a window that are still to be read must not go first
                these = mirror.files.in_groups(these)
            blocks.touch(these, now())
        for cache, wanted in num_bytes.items():
            cache.require_room(wanted)
        keeps = all(cache.keeps_all([m for m in self._chosen if m.cache is cache]) for cache in num_bytes)
        absent = _some({mirror: _absent(self._blocks[mirror], these, keeps) for mirror, these in self._chosen.items()})
        if absent:
            size = min([TOGETHER, *(cache.limit // 4 for cache in num_bytes if cache.limit is not None)])
            _uninterrupted(lambda: self._fetch_absent(absent, size))
        of = self._blocks
        return Taken((mirror, of[mirror], of[mirror].watched(these)) for mirror, these in self._chosen.items())

    def _fetch_absent(self, absent: Chosen, size: int) -> None:
        """Fetch absent blocks, `size` bytes at a time; at the end, wait for those that others fetch."""
        until = time.monotonic() + PATIENCE
        while absent:
            part, rest = self._divided(absent, size)
            with ExitStack() as locks:
                taken = {m: locks.enter_context(self._blocks[m].taken(these.tolist())) for m, these in part.items()}
                fits = self._fetch_held(taken)
            if fits:
                others = self._absent_of({m: np.setdiff1d(these, taken[m], True) for m, these in part.items()})
                if others and not _some(taken):
                    mirror, these = next(iter(others.items()))
                    self._blocks[mirror].wait_for(int(these[0]))
                absent, until = _together(rest, others), time.monotonic() + PATIENCE
            elif time.monotonic() > until:
                raise SchemaError(
                    f"cache_bytes: {next(iter(self._chosen)).cache.limit:,} are too few for all that read from this "
                    "cache at a time; give more, or read smaller batches"
                )
            else:
                size = max(1, size // 2)
                time.sleep(0.01)

    def _divided(self, absent: Chosen, size: int) -> tuple[Chosen, Chosen]:
        """(the first blocks, of `size` bytes but at least one block, all others)."""
        part, rest = Chosen(), Chosen()
        for mirror, these in absent.items():
            ends = np.cumsum(self._blocks[mirror].sizes[these])
            count = max(int(np.searchsorted(ends, size, side="right")), 0 if part else 1)
            part |= {mirror: these[:count]} if count else {}
            rest |= {mirror: these[count:]} if count < len(these) else {}
            size = size - int(ends[count - 1]) if count == len(these) else 0
        return part, rest

    def _absent_of(self, chosen: Chosen) -> Chosen:
        """The blocks that are not there, of the mirrors that lack some."""
        return _some({mirror: self._blocks[mirror].absent(these) for mirror, these in chosen.items()})

    def _fetch_held(self, taken: Chosen) -> bool:
        """Fetch blocks whose locks are held; False if the cache has no room for them beside the chosen ones."""
        part = self._absent_of(taken)
        require_digests(list(part))
        for mirror, these in part.items():
            self._blocks[mirror].look_at(these, mirror.digests)
        part, keep = self._absent_of(part), [(self._blocks[m], these) for m, these in self._chosen.items()]
        for cache in {mirror.cache for mirror in part}:
            if not cache.reserve([(self._blocks[m], these) for m, these in part.items() if m.cache is cache], keep):
                return False
        for objects in {mirror.objects for mirror in part}:
            mine = [(m, piece) for m in part if m.objects is objects for piece in m.files.pieces(part[m])]
            _Writing(mine, self._blocks).fetch(objects, self._begun)
        return True


def _absent(blocks: Blocks, chosen: IntArray, keeps: bool) -> IntArray:
    """The blocks of `chosen` that are not there, ascending, and others of their groups.

    If some of a group are there, or half of it is wanted, all of it is fetched: so a batch of single rows takes few
    bytes, and an epoch of such batches few requests. Not where `keeps` is False: the cache cannot keep all.
    """
    absent = blocks.absent(chosen)
    if not absent.size or not keeps:
        return absent
    first, stop, counts = blocks.files.groups_of(absent)
    every, sizes = expanded(first, stop), stop - first
    is_there = blocks.words[every, COUNTER] & np.uint32(1) == 0
    is_whole = np.logical_or.reduceat(is_there, np.cumsum(sizes) - sizes) | (2 * counts >= sizes)
    return np.union1d(absent, every[np.repeat(is_whole, sizes) & ~is_there])


def _uninterrupted(work: Callable[[], T]) -> T:
    """The result of work that takes locks, which is not done in the main thread: only that can be interrupted by
    Ctrl-C, which might come while it gives a lock back.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    from concurrent.futures import Future

    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="memmap_buffer fetch", daemon=True).start()
    return done.result()


def _some(chosen: Chosen) -> Chosen:
    """The mirrors, and their blocks, of which there are some."""
    return {mirror: these for mirror, these in chosen.items() if these.size}


def _together(some: Chosen, others: Chosen) -> Chosen:
    both = {mirror: np.union1d(these, others[mirror]) for mirror, these in some.items() if mirror in others}
    return some | others | both


class _Writing:
    """The writing of pieces (neighbouring blocks) of one store, each by the thread that received it, and checked it,
    while others still come.
    """

    def __init__(self, pieces: Sequence[tuple[Mirror, Sequence[int]]], blocks: Mapping[Mirror, Blocks]) -> None:
        self._pieces, self._blocks = pieces, blocks
        self._at_work, self._ended = 0, False
        self._changed = threading.Condition()
        self._failed: Exception | None = None

    def fetch(self, objects: Objects, begun: Callable[[], None]) -> None:
        """Fetch and write the pieces. When this returns, nothing is written any more, so their locks may be given back.

        Raises: RemoteError, or what a write failed by.
        """
        try:
            for _ in objects.stream([mirror.range_of(piece) for mirror, piece in self._pieces], self._take):
                begun()
                if self._failed is not None:
                    raise self._failed
        finally:
            with self._changed:
                self._ended = True
                self._changed.wait_for(lambda: not self._at_work)

    def _take(self, i: int, data: bytes) -> bool:
        """Write piece `i` if its bytes are right; returns whether they are."""
        mirror, piece = self._pieces[i]
        if not mirror.is_right(piece, data):
            return False
        with self._changed:
            if self._ended:
                return True
            self._at_work += 1
        try:
            self._blocks[mirror].write(piece, data)
        except (OSError, RemovedError) as error:
            self._failed = error  # returns True all the same: the store did not fail, so it must not be asked again
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()
        return True
