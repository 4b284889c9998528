"""The bytes that a window of `shuffle="block"` takes in the cache of a URL; smaller windows for a smaller cache.

A window holds items from many places of the data. Each block of a file is fetched once only if all blocks of the window
stay in the cache until its last item is read. So a window that does not fit is made smaller: fewer places, each of a
few blocks. `CacheUse` computes this; `epochs.OrderedSampler` asks it when an epoch begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.format.source import BLOCK, WINDOWS, Source, Traffic
from memmap_buffer.items.index import Index
from memmap_buffer.items.shuffle import BLOCKS, Shuffle
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.loading.read_ahead import read_fields
from memmap_buffer.views.folders import Folders

LONGEST = 5  # the most blocks of each file in one place of a window that was made smaller; one block is lost to edges


def steps_of(index: Index) -> int:
    """The number of timesteps of the episodes that an index has anchors in."""
    return sum(int(made_of.table.length[np.unique(runs.slot)].sum()) for made_of, runs in index.by_folder())


def smallest_bound(folders: Folders) -> int | None:
    """The bound, in bytes, of the smallest cache that rows are read from; None where no cache has a bound."""
    return min((source.limit for source in sources_of(folders) if source.limit is not None), default=None)


def sources_of(folders: Folders) -> list[Source]:
    """The sources of the folders whose rows are fetched from a URL."""
    return [storage.mirror for storage in folders.storages if storage.mirror is not None]


def traffic_of(folders: Folders) -> Traffic | None:
    """The traffic from now on into the caches that have a bound; None where none has."""
    bounded = [each for each in folders.storages if each.mirror is not None and each.mirror.limit is not None]
    return bounded[0].mirror.traffic(bounded) if bounded else None  # type: ignore[union-attr]


@dataclass(frozen=True)
class CacheUse:
    """The room that the items of an epoch take in a cache.

    Args:
        items: the number of items.
        total: the bytes of all files that the items are read from.
        each: the bytes of one item.
        edges: the bytes that a place takes besides its items: on average one block of each file, or the whole file
            where it is smaller.
        orders: how many windows are read at the same time: one for each folder that has a share of its own.
        limit: the bytes that the cache may hold.
    """

    items: int
    total: int
    each: float
    edges: int
    orders: int
    limit: int

    @classmethod
    def of(cls, reader: BatchReader, index: Index, orders: int, limit: int) -> CacheUse:
        """The use by an index, estimated from the sizes of the files: compressed rows are taken to be equally large."""
        sources = sources_of(reader.folders)
        fields = read_fields(reader.selection.view, reader.folders.schema)
        sizes = [source.sizes_of(fields) for source in sources]
        total, rows = sum(map(sum, sizes)), sum(source.num_rows for source in sources)
        each = total / max(1, rows) * steps_of(index) / max(1, len(index))
        edges = sum(min(BLOCK, max(of_file)) for of_file in zip(*sizes, strict=True))
        return cls(len(index), total, each, edges, orders, limit)

    def window(self, shuffle: Shuffle) -> int:
        """The bytes of a window, of all `orders` together."""
        count = min(shuffle.window, self.items)
        return self.orders * int(count * self.each + -(-count // shuffle.block) * self.edges)

    def stays(self, shuffle: Shuffle, windows: int) -> bool:
        """Whether the cache holds `windows` windows at a time, or all files."""
        return self.total <= self.limit or windows * self.window(shuffle) <= self.limit

    def fitted(self, asked: Shuffle) -> Shuffle:
        """The shuffle that was asked for; or one with windows of which `WINDOWS` fit. Raises as `require`."""
        if self.stays(asked, WINDOWS):
            return asked
        room = self.limit // WINDOWS // self.orders
        blocks = min(max(isqrt(room // max(1, self.edges)), 2), LONGEST)
        block = min(max(1, int((blocks - 1) * self.edges / max(1.0, self.each))), asked.window)
        place = int(block * self.each) + self.edges
        count = max(1, min(room // place, asked.window // block, BLOCKS))
        smaller = Shuffle("block", block * count, count)
        self.require(smaller, "it can have no smaller windows")
        return smaller

    def require(self, shuffle: Shuffle, why: str) -> None:
        """Raise SchemaError where the cache holds less than two windows, so that blocks would be fetched repeatedly."""
        if not self.stays(shuffle, 2):
            least = min(self.total, 2 * self.window(shuffle))
            raise SchemaError(
                f"cache_bytes: got {self.limit:,}, expected at least {least:,} for shuffle='block', by windows of "
                f"{shuffle.window:,} items from {shuffle.blocks} places: {why}; give more, or read fewer fields"
            )
