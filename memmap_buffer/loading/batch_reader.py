"""Anchors in, batch of arrays out: the view, the meta fields, the check afterwards, and what is drawn again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer.dtypes import Array, all_of
from memmap_buffer.errors import CorruptBufferError, NotEnoughDataError, StaleEpisodeError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.syscalls import process_id
from memmap_buffer.items.index import Index
from memmap_buffer.items.selection import Selection
from memmap_buffer.items.shuffle import crop, draw_like
from memmap_buffer.loading.options import Options, Output
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.views.batch_builder import BatchBuilder, BFloat16Bits, Columns, PlannedBatch, Splitter, cut, placed
from memmap_buffer.views.folders import Anchors, BoolArray, Folders
from memmap_buffer.views.relabelling import Relabelling

PATIENCE = 30.0  # seconds in which nothing at all was read: no writer is so quick, so something else is wrong
MAX_PAUSE = 0.05  # seconds


class Patience:
    """Of who reads beside a writer that overtakes it: pauses that grow, and an end to them only if all is in vain."""

    def __init__(self) -> None:
        self._pause, self._since = 0.0, time.monotonic()

    def renew(self) -> None:
        """Something was read."""
        self._pause, self._since = 0.0, time.monotonic()

    def wait(self) -> bool:
        """Wait before the next try, for none at first; whether there shall be one."""
        time.sleep(self._pause)  # even one of 0 leaves the processor to the writer, and what follows is in one go
        self._pause = min(2 * self._pause + 0.001, MAX_PAUSE)
        return time.monotonic() - self._since < PATIENCE


class ArraySpec(NamedTuple):
    """A key of a batch: its shape, None where a batch tells, and its dtype, "str" for text."""

    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of(cls, ragged: bool, batch_size: int | None, array: Array) -> ArraySpec:
        """From a batch of no items, in which the length of the longest is 0."""
        steps = [None if ragged or not n else n for n in array.shape[1:2]]
        dtype = (
            "bfloat16" if isinstance(array, BFloat16Bits) else "str" if array.dtype.kind == "U" else array.dtype.name
        )
        return cls((batch_size, *steps, *array.shape[2:]), dtype)


class Reader:
    """Reads batches of one kind.

    Args:
        sources: the folders. given: the options, as `Options` names them.

    Attributes: given: the options; they stay in this process.

    Raises: SchemaError: the options contradict each other or the schema.
    """

    def __init__(self, sources: Folders, given: Mapping[str, Any]) -> None:
        options = Options.parse(given)
        self.given = given
        self.sources = sources
        self.selection: Selection = options.select(sources.schema, sources.max_timesteps)
        self.output = Output.of(options, self.selection.view, sources.schema)
        self.on_stale = options.on_stale
        self.hindsight = options.hindsight
        self.prioritized = Prioritized.parse(options.prioritized, sources.schema)
        self._has_text = any(field.storage.kind == "U" for field in sources.schema.all.values())
        self._is_plain = not self._has_text and not self.output.widened
        self._ends = self.selection.view.ends(sources.schema)
        if options.hindsight is not None:  # a goal may be from anywhere between two ends
            self._ends = self._ends._replace(before=sources.max_timesteps, after=sources.max_timesteps)
        self._index: Index | None = None
        self._tables: tuple[EpisodeTable, ...] = ()
        self._living: tuple[tuple[EpisodeTable, ...], Index] | None = None
        self._frozen = False
        self._process = process_id()

    def __getstate__(self) -> dict[str, Any]:
        """What a worker needs: paths, options, and the index as arrays. Callables in filters stay behind."""
        selection = self.selection
        state = {"sources": self.sources, "selection": selection.without_callables(), "output": self.output}
        frozen = self._frozen or selection.has_callables
        state |= {
            "on_stale": self.on_stale,
            "hindsight": self.hindsight,
            "prioritized": self.prioritized,
            "_has_text": self._has_text,
            "_is_plain": self._is_plain,
            "_ends": self._ends,
            "_index": self.index(),
            "_tables": (),
            "_living": None,
        }
        return {**state, "_frozen": frozen, "_process": self._process}

    def index(self, refresh: bool = False) -> Index:
        """The anchors as of the last refresh; `refresh` looks for new episodes first."""
        if self._index is None or (refresh and not self._frozen):
            tables = self.sources.refresh()
            if self._index is None or tables != self._tables:
                before = (self._index, self._tables) if self._index is not None and self._tables else None
                self._index, self._tables = self.selection.index(self.sources, tables, before), tables
        return self._index

    @property
    def plans(self) -> bool:
        """Whether several batches may be planned together; not where checksums are compared as each is planned."""
        return all(storage.verify != "read" for storage in self.sources.storages)

    @property
    def tables(self) -> tuple[EpisodeTable, ...]:
        """What `index` was made of."""
        return self._tables or self.sources.tables

    @property
    def numbered_tables(self) -> dict[int, EpisodeTable]:
        """The same by the numbers of the sources, ascending."""
        return {number: table for number, _, table in self.sources.by_number(self.tables)}

    def require(self, index: Index) -> None:
        """Raise NotEnoughDataError, with the counts, where there is nothing to draw from."""
        if not len(index):
            episodes = sum(len(table) for table in self.sources.tables)
            why = (
                f"none of {episodes} episodes has an item for {self.selection.describe()}"
                if episodes
                else "it is empty"
            )
            text = f"{self.sources.storages[0].path}: nothing to read from this replay buffer: {why}"
            raise NotEnoughDataError(text, episodes=episodes)

    def crop(self, anchors: Anchors, rng: Callable[[], np.random.Generator]) -> Anchors:
        """Let chance move the anchors, where the view gives it a say; the generator is made only there."""
        return crop(self.selection, self.sources, anchors, rng()) if self.selection.random else anchors

    def read(self, anchors: Anchors | PlannedBatch, make: Splitter = cut) -> dict[str, Any]:
        """The batch at some anchors.

        Args: anchors: (B,), or a part of many that were planned together. make: what is made of the columns.
        Returns: key -> (B, …), fresh arrays of the stored dtypes.
        Raises: StaleEpisodeError: an episode was overwritten meanwhile, and cannot or must not be drawn again.
        """
        make = make if self._is_plain else partial(self._finished, make)
        if isinstance(anchors, PlannedBatch):
            try:
                batch = anchors.gather.read_fresh(anchors.chosen, make)
            except CorruptBufferError:  # it may be of what is gone, or of a batch that is copied with it
                batch = None
            if batch is not None:
                return batch
            anchors = anchors.anchors._replace(words=None)
        gather = self.plan(anchors)
        columns, fresh = gather.read(), gather.fresh()
        if not all_of(fresh):
            columns = self._completed(gather, columns, fresh)
        return make(columns, anchors.size)[0]

    def _completed(self, gather: BatchBuilder, columns: Columns, fresh: BoolArray) -> Columns:
        """A batch that was copied, with those of its items anew that were not `fresh`.

        What was copied and checked stays. Of the rest fewer are tried together, the more of them a writer overtakes: so
        the time grows short between looking one up and checking it.
        """
        anchors, rest, size = gather.anchors, np.arange(gather.anchors.size), gather.anchors.size
        parts, patience, damaged = [], Patience(), self._num_damaged()
        chosen = rest
        while True:
            if self.selection.mixes:  # no item is right without the others
                fresh = np.full_like(fresh, all_of(fresh))
            if fresh.any():
                parts.append((chosen[fresh], gather.kept(columns, fresh)))
                patience.renew()
            rest = np.concatenate([chosen[~fresh], rest[len(chosen) :]])
            if not rest.size:
                return placed(parts, anchors.size)
            before, damaged = damaged, self._num_damaged()  # what is found damaged is not drawn again
            if damaged == before and not patience.wait():
                raise self._gone(anchors.serial[rest])
            chosen = rest if self.selection.mixes else rest[:size]
            anchors = anchors.replaced(chosen, self._again(anchors.where(chosen)))
            gather = self.plan(anchors.where(chosen))
            columns, fresh = gather.read(), gather.fresh()
            size = max(1, size // 2) if 2 * np.count_nonzero(fresh) < len(fresh) else 2 * size

    def plan(self, anchors: Anchors, size: int | None = None) -> BatchBuilder:
        """What a batch of these anchors, or of `size` of them, holds; nothing that takes much memory is copied yet."""
        view = self.selection.view
        if self.hindsight is None:
            gather = BatchBuilder(self.sources, anchors, self._ends, size)
        else:
            gather = Relabelling(self.sources, anchors, self._ends, size, self.hindsight, view.reach)
        view.cut(gather)
        gather.put_meta(self.output.meta)
        gather.batch |= self._told(gather.anchors)
        rename = self.output.rename
        if rename:
            gather.batch = {rename.get(key, key): what for key, what in gather.batch.items()}
        return gather

    def elements(self, batch_size: int | None) -> dict[str, ArraySpec]:
        """What a batch holds, found by cutting one of no items."""
        none = np.empty(0, np.int64)
        source = None if self.sources.single else none
        chance = none.astype(np.uint64) if self.selection.random else None
        anchors = Anchors(source, none, none, none, chance=chance)
        if self.prioritized is not None:
            anchors = anchors._replace(weight=none.astype(np.float32), probability=none.astype(np.float64))
        batch = self.read(anchors)
        return {key: ArraySpec.of(key in self.output.ragged, batch_size, array) for key, array in batch.items()}

    def _num_damaged(self) -> int:
        return sum(storage.num_damaged for storage in self.sources.storages)

    def _require_text(self, batch: Mapping[str, Array]) -> None:
        """Raise CorruptBufferError for text that no `str` may hold: numpy would make one of it all the same."""
        for key, values in batch.items() if self._has_text else ():
            if values.dtype.kind == "U" and values.size:
                highest = int(np.ascontiguousarray(values).reshape(-1).view(np.uint32).max())
                if highest > sys.maxunicode:
                    path = self.sources.storages[0].path
                    raise CorruptBufferError(
                        f"{path}: {key!r} holds what is no text (character {highest:#x})", path=path
                    )

    def _again(self, anchors: Anchors) -> Anchors:
        """The anchors to try next: an episode that was updated is read again, one that is gone is replaced."""
        self.sources.refresh()
        now = self.sources.look_up(anchors)
        gone = np.flatnonzero((now.length == 0) | (now.t >= now.length))  # the second: of a shard that was made anew
        if not gone.size:
            return anchors
        if self.on_stale == "raise":
            raise self._gone(anchors.serial[gone])
        index = self._index_now()
        self.require(index)
        others = draw_like(self.selection, self.sources, index, anchors.where(gone), np.random.default_rng())
        return anchors.replaced(gone, others)

    def _index_now(self) -> Index:
        """What can be drawn now. `index` stays as it is: positions of a dataset count in it until it is refreshed."""
        tables = self.sources.tables
        if self._living is None or tables != self._living[0]:
            # A callable filter is never called in a worker: there, what it chose is only thinned out.
            thinned = self._frozen or (self.selection.has_callables and process_id() != self._process)
            self._living = tables, self.index().living(self.sources) if thinned else self.selection.index(self.sources)
        return self._living[1]

    def _gone(self, serials: IntArray) -> StaleEpisodeError:
        gone = np.unique(serials).tolist()
        return StaleEpisodeError(
            f"{self.sources.storages[0].path}: episodes {gone[:5]} were overwritten or cleared before they were read; "
            "make the ring larger, begin a new epoch more often, or leave on_stale='redraw'",
            serials=gone,
        )

    def _told(self, anchors: Anchors) -> dict[str, Array]:
        """What a batch tells of its anchors."""
        out: dict[str, Array] = {}
        if self.output.indices:
            columns = [anchors.serial] if self.output.indices == "_index" else [anchors.serial, anchors.t]
            columns = columns if anchors.source is None else [anchors.source, *columns]
            out[self.output.indices] = columns[0].copy() if len(columns) == 1 else _beside(columns)
        if anchors.weight is not None and anchors.probability is not None:
            out |= {"_weights": anchors.weight.copy(), "_probabilities": anchors.probability.copy()}
        return out

    def _finished(self, make: Splitter, columns: Columns, size: int) -> list[dict[str, Any]]:
        """What is made of columns whose text is checked, and numbers have the axis that was asked for."""
        self._require_text(columns)
        wide = {key: columns[key][..., None] for key in columns.keys() & self.output.widened}
        return make({**columns, **wide}, size)


def _beside(columns: list[IntArray]) -> IntArray:
    """Columns (B,) as one array (B, …), in a third of the time that `stack` takes."""
    out = np.empty((len(columns[0]), len(columns)), np.int64)
    for i, column in enumerate(columns):
        out[:, i] = column
    return out
