"""`Cache`: the folder in which mirrors lie, and its bound: the blocks that were unused for longest are given back."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError, SchemaError
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.host import file_system
from memmap_buffer.format.layout import MAX_SCHEMA_BYTES, Layout, PlainFile
from memmap_buffer.format.source import BLOCK, WINDOWS
from memmap_buffer.format.syscalls import RangeLocks, locked, random_bytes, read_at, renew_after_fork, write_word
from memmap_buffer.remote.blocks import COUNTER, LOCAL, NAME, USED, Blocks, IntArray, Words, by_last_use
from memmap_buffer.remote.layout import BLOCK_SIZES, HEADS, MAX_SIZES_BYTES, DataFiles, digest, head_object

USAGE, LOCKS, BOUND = "usage", "locks", "bound"
DIGESTS = "mirror/digests"  # of the blocks of a mirror, as bytes
AT_ONCE = 20  # 1/20 of the bound is given back beyond what is needed: so unused blocks are not searched too often
FEWEST = 16  # blocks that a bound must have room for
MOST_MAPS = 1 << 14  # of all mirrors together; Linux allows a process 65,530
MEMORY = ("tmpfs", "ramfs")
OFTEN = 2  # if a block is fetched more often in an epoch, on average, the log has a warning
AGAIN = "; give a larger cache_bytes, or shuffle='block'"
UNFINISHED = 86400.0  # seconds after which nobody makes a mirror any more that is not finished
_MIRROR = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")
_HEAD = re.compile(r"[0-9a-f]{32}\.bin")
log = logging.getLogger("memmap_buffer")


class Cache:
    """A folder of mirrors, shared by all processes of a host.

    Args:
        path: the folder; made if it is missing.
        limit: the most bytes of blocks that it keeps; None: no bound.
        keep_bound: do not note `limit` for others: nothing is read by this object.

    Raises:
        SchemaError: the limit is less than `FEWEST` blocks, or the folder lies in memory and there is a limit.
    """

    def __init__(self, path: Path, limit: int | None = None, *, keep_bound: bool = False) -> None:
        if limit is not None and (type(limit) is not int or limit < FEWEST * BLOCK):
            raise SchemaError(
                f"cache_bytes: got {limit!r}, expected a number of bytes from {FEWEST * BLOCK:,}, or None"
            )
        Folder(path).create()
        self.path, self.limit = path, limit
        self._files: dict[str, DataFiles] = {}  # by the folder name of a mirror; they never change
        self._heads: dict[str, Array] = {}
        self._mapped: OrderedDict[Any, int] = OrderedDict()
        self._num_maps, self._num_bytes = 0, 0  # of all mirrors in `_mapped`
        self.renew()
        renew_after_fork(self)
        if limit is not None and file_system(path) in MEMORY:
            raise SchemaError(
                f"cache: {path} lies in memory, where blocks cannot be given back safely; leave cache_bytes"
            )
        if not keep_bound and not (self.bound == limit and Folder(path).exists(BOUND)):
            keep_file(Folder(path), BOUND, str(limit or 0).encode())  # by which it is known to be a cache, too

    def renew(self) -> None:
        """In a forked child: begin with a free lock, as another thread of the parent may have held it."""
        self._turn = threading.Lock()

    def __reduce__(self) -> tuple[type[Cache], tuple[Path, int | None]]:
        return Cache, (self.path, self.limit)

    @property
    def locks(self) -> RangeLocks:
        """The locks of the blocks of all mirrors."""
        return RangeLocks.of(str(self.path / LOCKS))

    @property
    def bound(self) -> int | None:
        """The limit that it was last opened with, by any process; None also if nobody opened it."""
        with suppress(OSError, ValueError):
            return int(Folder(self.path).read(BOUND, 32)) or None
        return None

    # Heads

    def head(self, name: str, size: int) -> Array | None:
        """The bytes of an object with heads of shards that the cache kept; None where it has none.

        Args:
            name, size: its digest, and how many bytes it has. They are not checked here: whoever reads a head in it
                compares the head with the head's own digest.
        """
        content = self._heads.get(name)
        if content is None:
            with suppress(OSError, CorruptBufferError):
                content = self._heads[name] = Folder(self.path).map(PlainFile(head_object(name), size))
        return content

    def keep_head(self, name: str, data: bytes) -> Array:
        """Keep the bytes of an object with heads of shards, also in the place of others that are not right."""
        keep_file(Folder(self.path), head_object(name), data)
        self._heads.pop(name, None)
        content = self.head(name, len(data))  # a map, which takes no memory of this process
        return self._heads.setdefault(name, np.frombuffer(data, np.uint8)) if content is None else content

    # Mirrors that are mapped

    def use(self, mirror: Any, maps: int) -> None:
        """Note that a mirror is read now, which has `maps` maps; unmap mirrors that were not read for longest."""
        with self._turn:
            if mirror not in self._mapped:
                self._num_maps += maps
                self._num_bytes += mirror.num_bytes
            self._mapped[mirror] = maps
            self._mapped.move_to_end(mirror)
            self._unmap_oldest()

    def _unmap_oldest(self) -> None:
        while self._num_maps > MOST_MAPS and len(self._mapped) > 1:
            other, count = self._mapped.popitem(last=False)
            self._num_maps -= count
            self._num_bytes -= other.num_bytes
            other.unmap()

    def keeps_all(self, mirrors: Collection[Any]) -> bool:
        """Whether the bound has room for all that this process reads from it: these mirrors and those of before."""
        if self.limit is None:
            return True
        with self._turn:
            others = sum(int(each.num_bytes) for each in mirrors if each not in self._mapped)
            return self._num_bytes + others <= self.limit

    # What it has

    def contents(self) -> dict[str, tuple[int, int]]:
        """(the bytes of its blocks that are there, of all) of each mirror, by the name of its folder."""
        return {blocks.path.name: (blocks.num_bytes, int(blocks.sizes.sum())) for blocks in self._mirrors()}

    def heads(self) -> dict[str, int]:
        """The bytes of each object with the heads of shards that is kept, by its digest."""
        sizes = {}
        for name in filter(_HEAD.fullmatch, Folder(self.path).list(HEADS)):
            with suppress(FileNotFoundError):  # another process empties it
                sizes[Path(name).stem] = (self.path / HEADS / name).lstat().st_size
        return sizes

    def check(self) -> dict[str, int]:
        """Give back what is not as it was published; the bytes of that in each mirror, and of each head."""
        damaged = {}
        for blocks in self._mirrors():
            kept = kept_digests(blocks.path, blocks.files).ljust(8 * blocks.files.num_digests)
            digests = np.frombuffer(kept, np.uint64)  # what cannot be compared is not trusted
            damaged[blocks.path.name] = blocks.give_back(np.arange(blocks.files.count), digests)
        for name, size in self.heads().items():
            with suppress(FileNotFoundError, CorruptBufferError):  # another process empties it, or fetches it anew
                if digest(Folder(self.path).read(head_object(name), size)) != name:
                    Folder(self.path).unlink(head_object(name), missing_ok=True)
                    damaged[head_object(name)] = size
        return {name: size for name, size in damaged.items() if size}

    def clear(self) -> None:
        """Give back everything, the space of files that are mapped included; who reads makes mirrors anew."""
        for blocks in self._mirrors():
            blocks.give_back(np.flatnonzero(blocks.words[:, LOCAL]))
        for path in self.path.iterdir():
            name, new, _ = path.name.partition(".new-")
            with suppress(FileNotFoundError):  # another process removes it, or gives it its name
                if _MIRROR.fullmatch(name) and not (new and path.lstat().st_mtime > time.time() - UNFINISHED):
                    remove_mirror(path)
        for name in filter(_HEAD.match, Folder(self.path).list(HEADS)):  # also what a kill left of one
            Folder(self.path).unlink(f"{HEADS}/{name}", missing_ok=True)
        with locked(str(self.path / USAGE)) as fd:
            write_word(fd, self._count(), 0)

    # The bound

    def reserve(self, wanted: Sequence[tuple[Blocks, IntArray]], keep: Sequence[tuple[Blocks, IntArray]]) -> bool:
        """Make room for blocks that will be fetched, whose locks are held; if need be, give other blocks back.

        Args:
            wanted: the blocks.
            keep: blocks that must not be given back for them, as they are read together.

        Returns:
            Whether there is room: not if too many of the other blocks are being fetched themselves.
        """
        new = [(blocks, chosen[blocks.words[chosen, LOCAL] == 0]) for blocks, chosen in wanted]
        size = sum(int(blocks.sizes[chosen].sum()) for blocks, chosen in new)
        if not size:
            return True
        Folder(self.path).create()
        with locked(str(self.path / USAGE)) as fd:
            data = read_at(fd, 8, 0)
            used = int.from_bytes(data, "little") if len(data) == 8 else self._count()
            if self.limit is not None and used + size > self.limit:
                used = self._count()  # a kill may have left the number in the file wrong
                if used + size > self.limit:
                    used -= self._give_back(used + size - self.limit + self.limit // AT_ONCE, keep)
            fits = self.limit is None or used + size <= self.limit
            write_word(fd, used + size * fits, 0)
            for blocks, chosen in new if fits else ():  # under the lock: another process may count them next
                blocks.words[chosen, LOCAL] = 1
        return fits

    def require_room(self, size: int) -> None:
        """Raise SchemaError if `size` bytes of blocks, which are needed together, are more than the bound."""
        if self.limit is not None and size > self.limit:
            raise SchemaError(
                f"cache_bytes: {self.limit:,} are less than the {size:,} bytes of blocks that a batch is "
                "read from; give more, or read smaller batches"
            )

    def has_room_beside(self, size: int) -> bool:
        """Whether a window of `size` bytes of blocks may be fetched ahead of the window that is read now.

        While the second window ahead is fetched, the first one ahead has been unused for longest, longer than the two
        windows that were read last. A bound without room for all five windows would give that one back, unread.
        """
        return self.limit is None or (WINDOWS - 1) * size <= self.limit

    def counters(self, names: Iterable[str]) -> dict[str, tuple[IntArray, Words]]:
        """Folder name of a mirror -> (the bytes of each block, the counter of each block)."""
        each = self._mirrors(names)
        return {blocks.path.name: (blocks.sizes, blocks.words[:, COUNTER].copy()) for blocks in each}

    def _mirrors(self, names: Iterable[str] | None = None, *, remove: bool = False) -> Iterator[Blocks]:
        """The blocks of each mirror, or of those in `names`.

        Args: remove: remove what cannot be opened, as another release made it: its bytes would not count for the bound.
        """
        for path in sorted(self.path.iterdir()) if names is None else [self.path / name for name in names]:
            if ".new" in path.name or not Folder(path).exists(NAME):
                continue
            try:
                with Folder(path).kept_open() as folder:
                    files = self._files.get(path.name)
                    if files is None:
                        layout = Layout.from_json(folder.read("schema.json", MAX_SCHEMA_BYTES), str(path))
                        sizes = folder.read(BLOCK_SIZES, MAX_SIZES_BYTES) if folder.exists(BLOCK_SIZES) else None
                        files = self._files[path.name] = DataFiles(layout, sizes)
                    yield Blocks.of(folder, files, self.locks)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except CorruptBufferError:
                if remove and _MIRROR.fullmatch(path.name):
                    remove_mirror(path)

    def _count(self) -> int:
        """The bytes of the blocks that may be on the disk. Mirrors that cannot be opened are removed."""
        return sum(blocks.num_bytes for blocks in self._mirrors(remove=True))

    def _give_back(self, size: int, keep: Sequence[tuple[Blocks, IntArray]]) -> int:
        """Give back blocks that were unused for longest, of `size` bytes if there are so many; returns their bytes."""
        mirrors = list(self._mirrors())
        used = np.concatenate([blocks.words[:, USED] for blocks in mirrors])
        local = np.concatenate([_local_but(blocks, keep) for blocks in mirrors])
        starts = np.cumsum([0, *(len(blocks.words) for blocks in mirrors)])
        order = np.flatnonzero(local)
        order = order[np.argsort(by_last_use(used[order]), kind="stable")]
        sizes, freed, first = np.concatenate([blocks.sizes for blocks in mirrors])[order], 0, 0
        while freed < size and first < len(order):
            stop = first + int(np.searchsorted(np.cumsum(sizes[first:]), size - freed)) + 1
            chosen = np.sort(order[first:stop])
            for blocks, start in zip(mirrors, starts.tolist(), strict=False):
                low, high = np.searchsorted(chosen, [start, start + len(blocks.words)])
                freed += blocks.give_back(chosen[low:high] - start)
            first = stop
        return freed


class CacheTraffic:
    """The bytes that are fetched into mirrors from now on, by all processes that share their caches.

    Args:
        where: the URL of the mirrors, for the log.
        mirrors: cache -> the names of the folders of its mirrors.
    """

    def __init__(self, where: str, mirrors: Mapping[Cache, Sequence[str]]) -> None:
        self._where, self._mirrors = where, mirrors
        self._before = [cache.counters(names) for cache, names in mirrors.items()]

    def since(self) -> tuple[int, int]:
        """(the bytes that were fetched, the bytes of the blocks that were fetched: each block once)."""
        after = [cache.counters(names) for cache, names in self._mirrors.items()]
        each = [fetched(now, before) for now, before in zip(after, self._before, strict=True)]
        return sum(every for every, _ in each), sum(once for _, once in each)

    def tell(self, what: str) -> None:
        """Say in the log how much was fetched, as a warning if blocks were fetched again and again."""
        every, once = self.since()
        if once:
            level, remedy = (logging.WARNING, AGAIN) if every > OFTEN * once else (logging.INFO, "")
            text = "%s: %s: %.1f MB were fetched for %.1f MB, each block %.2f times%s"
            log.log(level, text, self._where, what, every / 1e6, once / 1e6, every / once, remedy)


def keep_file(folder: Folder, name: str, data: bytes) -> None:
    """Keep a file for the next time, in the place of one that is there, if there is room."""
    new = f"{name}.{random_bytes(8).hex()}"
    with suppress(OSError):
        folder.write_new(new, data, sync=False)
        folder.rename(new, name)


def kept_digests(path: Path, files: DataFiles) -> bytes:
    """The digests that are kept in a mirror; b"" where none can be read."""
    with suppress(OSError, CorruptBufferError):
        return Folder(path).read(DIGESTS, 8 * files.num_digests)
    return b""


Counters = Mapping[str, tuple[IntArray, Words]]


def fetched(now: Counters, before: Counters) -> tuple[int, int]:
    """(the bytes fetched between two moments, the bytes of the blocks that were fetched: each block once)."""
    every = once = 0
    for name, (sizes, counters) in now.items():
        times = counters.astype(np.int64) // 2  # a counter begins at 1, and each fetch and each removal adds 1
        times -= before[name][1] // 2 if name in before else 0
        times = np.maximum(times, 0)  # a mirror that was made anew has lower counters than before
        every, once = every + int(sizes @ times), once + int(sizes[times > 0].sum())
    return every, once


def _local_but(blocks: Blocks, keep: Sequence[tuple[Blocks, IntArray]]) -> IntArray:
    """(blocks,) not 0 for blocks that may be given back: those on the disk, but for those in `keep`."""
    local = blocks.words[:, LOCAL].astype(np.int64)
    for other, chosen in keep:
        if other is blocks:
            local[chosen] = 0
    return local


def remove_mirror(path: Path) -> None:
    """Remove a mirror, which nobody finds any more from the first moment on."""
    from shutil import rmtree

    gone = path.with_name(f"{path.name.partition('.')[0]}.new-{random_bytes(8).hex()}")
    with suppress(FileNotFoundError):
        path.rename(gone)
    rmtree(gone, ignore_errors=True)
