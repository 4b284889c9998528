"""Batches as `sample` gives them: drawn with replacement, or no item twice, or new items first.

`api.reading` keeps one `UniformSampler` for each set of options that `sample` was called with.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from memmap_buffer.errors import MemmapBufferError, NotEnoughDataError, SchemaError
from memmap_buffer.format.episode_table import EpisodeTable
from memmap_buffer.format.syscalls import renew_after_fork
from memmap_buffer.items.index import AnchorRuns, Index
from memmap_buffer.items.live_index import LiveIndex
from memmap_buffer.items.new_items import Changed, NewItems
from memmap_buffer.items.shuffle import Quota
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.views.anchors import Anchors
from memmap_buffer.views.folders import Found
from memmap_buffer.views.gather import Columns

MOST = 32  # the most batches that are read as one: numpy's calls are the cost, as many for all batches as for one
MOST_BYTES = 3 << 19  # the most bytes of these batches, so that they stay in the processor's L2 cache until handed out


@dataclass
class Block:
    """Several batches that were read as one, and are handed out in turn.

    Attributes:
        of: (the index that they were drawn from, or the journal's mark; the batch size). Another one: draw anew.
        columns: the columns of all batches, freed with the last batch.
        size: the number of items of all batches; 0 until they are read. As it is set last, that needs no lock.
        at: the number of items that were handed out.
        first: the number of its first item among all that were drawn, by which shares are counted.
        unread: the anchors of all batches, if reading them as one failed: each batch is then read in its turn.
    """

    of: tuple[object, int] | None = None
    columns: Columns = field(default_factory=dict)
    size: int = 0
    at: int = 0
    first: int = 0
    unread: Anchors | None = None

    def next(self, batch_size: int) -> Columns:
        """The next batch, as views of the columns."""
        first, self.at, columns = self.at, self.at + batch_size, self.columns
        if self.at == self.size:
            self.columns = {}
        return {key: values[first : self.at] for key, values in columns.items()}


class UniformSampler:
    """Batches drawn with replacement, as `sample` gives them; the shares of weighted folders are exact.

    As long as the folders do not change, several batches are drawn and read as one, and handed out in turn. Each is
    as if it were read only then.

    Args:
        reader: reads the batches.
        weights: the shares of the folders; None: every item alike, or by the `weight_by` of the reader.
    """

    def __init__(self, reader: BatchReader, weights: Sequence[float] | None = None) -> None:
        self.reader = reader
        self._quota = None if weights is None else Quota(weights)
        may_follow = weights is None and not reader.frozen
        self._may_follow = may_follow and LiveIndex.follows(reader.selection, reader.folders)
        self._one_by_one = not reader.reads_together
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """Reset what threads share; in a forked child, as another thread of the parent may have been in the middle."""
        self._turn = threading.RLock()
        self._live: LiveIndex | None = None
        self._block = Block()
        self._item_bytes = 0  # of an item, once one was read
        self._new: NewItems | None = None
        self._looked_at: AnchorRuns | None = None  # the index whose new items were taken in last
        self._looked: dict[int, EpisodeTable] = {}  # by folder, its tables

    def next(
        self,
        batch_size: int,
        rng: np.random.Generator,
        alone: bool = False,
        distinct: bool = False,
        new_every: int | None = None,
    ) -> Columns:
        """The next batch.

        Args:
            batch_size: the number of items.
            rng: draws them.
            alone: the batch does not depend on those before: it is none that was read ahead.
            distinct: no item is drawn twice; only with `alone`.
            new_every: the batch begins with the items that came since the first such batch, each once, as long as some
                wait; see `NewItems`.

        Raises:
            NotEnoughDataError: there is nothing to draw, or `distinct`: fewer items than `batch_size`.
            SchemaError: `new_every`, or `distinct`: items are weighted.
            StaleEpisodeError: see `BatchReader.read`.
        """
        source: AnchorRuns
        of: tuple[object, int]
        with self._turn:
            live = self._live
            if live is None and self._may_follow:
                live = self._begin_to_follow()
            if live is not None and live.follow() and live.num_anchors:
                source, of = live, (live.mark, batch_size)
            else:
                source = self.reader.index(refresh=True)
                of = source, batch_size
            block, count = self._block, 1
            kept: Block | None = None  # the block that the batch begins
            queue = None if new_every is None else self._queue(source, new_every)
            new = None if queue is None else queue.take(batch_size, source.left_of)
            if new is not None:
                anchors = self._with_others(source, new, batch_size, rng)
            elif distinct:
                anchors = self._draw_distinct(source, batch_size, rng)
            elif alone:
                anchors = self._draw(source, batch_size, rng, 0)
            elif block.of == of and block.at < block.size:
                if block.unread is None:
                    return block.next(batch_size)
                first, block.at = block.at, block.at + batch_size
                anchors = block.unread.where(slice(first, block.at))
            else:
                count = 1 if block.of != of or self._one_by_one else self._next_count(block, batch_size)
                position = block.first + block.at  # batches that are dropped do not count for the shares
                kept = self._block = Block(of, first=position)
                anchors = self._draw(source, count * batch_size, rng, position)
            records = self._with_records(source, anchors, rng)
            if self._quota is not None:  # while the lock is held, so that shares are exact over all threads
                return self._read(kept, records, count, batch_size)
        if queue is not None and new is not None:
            return self._read_new(queue, new, records, batch_size)
        return self._read(kept, records, count, batch_size)

    def _read(self, kept: Block | None, records: Found, count: int, batch_size: int) -> Columns:
        """Read `count` batches as one and return the first; `kept` takes the others, for the next calls."""
        size = count * batch_size
        try:
            columns = self.reader.read(records)
        except MemmapBufferError:  # a later batch may be the cause: then that one raises it, in its turn
            if kept is None or count == 1:
                raise
            kept.unread, kept.at, kept.size = records.anchors, batch_size, size
            return self.reader.read(records.anchors.where(slice(batch_size)))
        if kept is not None:
            if not self._item_bytes:
                self._item_bytes = sum([values.nbytes for values in columns.values()]) // size
            if count > 1:
                kept.columns = columns
            kept.at, kept.size = batch_size, size
        return columns if count == 1 else {key: values[:batch_size] for key, values in columns.items()}

    def _next_count(self, block: Block, batch_size: int) -> int:
        """The number of batches of the block after one: twice as many, within `MOST` and `MOST_BYTES`."""
        most = MOST_BYTES // max(1, self._item_bytes * batch_size)
        return max(1, min(2 * block.size // batch_size, MOST, most))

    def _draw(self, source: AnchorRuns, count: int, rng: np.random.Generator, position: int) -> Anchors:
        """Draw `count` anchors; `position` is the number of the first of them among all that were drawn."""
        if source.changes is None:  # that a `LiveIndex` has items was checked by `next`
            self.reader.require(source)
        if self._quota is None:
            return source.draw(count, rng)
        assert isinstance(source, Index)
        folder, _ = self._quota.turns(np.arange(position, position + count))
        chosen = np.empty(count, np.int64)
        for number, (low, high) in enumerate(pairwise(folder_bounds(self.reader, source, self._quota.folders))):
            of_folder = np.flatnonzero(folder == number)
            chosen[of_folder] = source.pick(rng.random(len(of_folder)), low, high)
        return source.locate(chosen)

    def _with_records(self, source: AnchorRuns, anchors: Anchors, rng: np.random.Generator) -> Found:
        """Anchors that were drawn, with the records of their episodes."""
        reader, changes = self.reader, source.changes
        if reader.selection.random:
            anchors = reader.crop(anchors, lambda: rng)
        return reader.folders.find(anchors) if changes is None else reader.folders.at(anchors, changes)

    def _begin_to_follow(self) -> LiveIndex | None:
        """Make the `LiveIndex` of the one folder; None while some episodes are unchecked or damaged."""
        folders = self.reader.folders
        folders.refresh()  # `tells_by_counter` depends on the episodes that are shown now
        if folders.storages[0].tells_by_counter:
            self._live = LiveIndex(self.reader.selection, folders)
        return self._live

    def _queue(self, source: AnchorRuns, every: int) -> NewItems:
        """The queue of new items, after those that came since the last call were taken in."""
        self._require_alike(source, "new_every gives")
        queue, selection = self._new, self.reader.selection
        begins = queue is None or queue.every != every
        if queue is None or begins:
            queue, self._looked_at, self._looked = NewItems(every), None, {}
        changed: list[Changed] = []
        if isinstance(source, LiveIndex):
            changed = source.changed(anew=begins)
        elif source is not self._looked_at:
            assert isinstance(source, Index)
            own = selection.by_episode or selection.view.continues  # else another folder, or a mark, may change them
            changed = source.changed(self._looked if own else {})
        queue.take_in(changed, selection.view.stride)
        if isinstance(source, Index):
            self._looked_at, self._looked = source, {each.number: each.table for each in source.tables}
        self._new = queue
        return queue

    def _read_new(self, queue: NewItems, new: Anchors, records: Found, batch_size: int) -> Columns:
        """The batch that begins with new items; if it cannot be read, they wait again."""
        try:
            return self._read(None, records, 1, batch_size)
        except BaseException:
            with self._turn:  # another thread may be taking from the queue
                queue.give_back(new)
            raise

    def _with_others(self, source: AnchorRuns, new: Anchors, count: int, rng: np.random.Generator) -> Anchors:
        """New items, and as many others as are missing from the batch, drawn with replacement."""
        anchors = source.followed(new)
        if new.size < count:
            anchors = Anchors.joined([anchors, source.draw(count - new.size, rng)])
        return anchors

    def _require_alike(self, source: AnchorRuns, what: str) -> None:
        """Raise SchemaError where items are weighted."""
        if self._quota is not None or (isinstance(source, Index) and source.weight_sums is not None):
            raise SchemaError(f"{what} every item alike; leave out weights and weight_by")

    def _draw_distinct(self, source: AnchorRuns, count: int, rng: np.random.Generator) -> Anchors:
        items = len(source)
        if not items:
            raise self.reader.nothing_to_read()
        self._require_alike(source, "replacement=False draws")
        if count > items:
            path = self.reader.folders.storages[0].path
            text = f"{path}: replacement=False: got batch_size {count}, there are {items} items; lower it"
            raise NotEnoughDataError(text, items=items)
        return source.locate(rng.choice(items, count, replace=False))


def folder_bounds(reader: BatchReader, index: Index, num_folders: int) -> list[int]:
    """The positions in an index at which the items of each folder begin, and the end: `num_folders` + 1 numbers.

    Raises:
        NotEnoughDataError: a folder has no items, so it cannot give its share.
    """
    bounds: list[int] = index.bounds(np.arange(num_folders + 1)).tolist()
    for number in range(num_folders if index.folder is not None and len(index) else 0):
        if bounds[number] == bounds[number + 1]:
            path = reader.folders.storages[number].path
            raise NotEnoughDataError(f"{path}: folder {number} has nothing to give its share of a batch", folder=number)
    return bounds
