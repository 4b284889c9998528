"""What will be read soon: asks the system for its rows in whole stretches, without waiting for them."""

from __future__ import annotations

import numpy as np

from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.folder import will_need
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.index import Index
from memmap_buffer.items.selection import Selection
from memmap_buffer.items.shuffle import BlockShuffle
from memmap_buffer.views.folders import Folders
from memmap_buffer.views.row_ranges import joined

GAP_BYTES = 128 << 10  # rows so near to each other are read in one go


class Readahead:
    """Asks for each window of a block shuffle while the one before it is read.

    Args: selection, sources, index: what is read. shuffle: in which order.
    """

    def __init__(self, selection: Selection, sources: Folders, index: Index, shuffle: BlockShuffle) -> None:
        self._view, self._sources, self._index, self._shuffle = selection.view, sources, index, shuffle
        keys, fields = set(self._view.keys(sources.schema)), sources.schema.fields
        self._fields = [name for name in fields if keys & {name, f"next_{name}", f"seq_{name}"}]
        self._asked = -1

    def before(self, first: int, last: int) -> None:
        """To be called before the items first … last of the order are read."""
        begin = max(self._asked + 1, first // self._shuffle.window)
        self._asked = last // self._shuffle.window + 1
        for window in range(begin, self._asked + 1):
            for low, high in self._shuffle.places(window):
                self._ask(low, high)

    def _ask(self, low: int, high: int) -> None:
        """The rows of the anchors low … high - 1; where the guess is wrong they are read when they are needed."""
        index = self._index
        start, stop = np.searchsorted(index.starts, [low, high - 1], side="right")
        run = np.arange(start - 1, stop)
        first = index.locate(np.maximum(index.starts[run], low)).t
        last = index.locate(np.minimum(index.starts[run + 1], high) - 1).t
        for number in [0] if index.source is None else np.unique(index.source[run]).tolist():
            mine = slice(None) if index.source is None else index.source[run] == number
            storage = self._sources.numbered(number)
            assert storage is not None
            self._ask_folder(storage, index.slot[run][mine], first[mine], last[mine])

    def _ask_folder(self, storage: Storage, slot: IntArray, first: IntArray, last: IntArray) -> None:
        slot = np.minimum(slot, len(storage.table.length) - 1)  # a shard may be another, smaller one by now
        length = storage.table.length[slot]
        if self._view.per_episode:
            first, last = np.zeros_like(first), length
        for name in self._fields:
            field, rows = self._sources.schema.fields[name], storage.maps.rows[name]
            begin = storage.first_row(slot, field.final)
            stop = np.minimum(last + 2, length + field.final)  # a successor is read with it
            low, high = begin + np.clip(first, 0, stop), begin + stop
            will_need(rows, joined(low, high, GAP_BYTES // max(1, field.itemsize)))
