"""`BatchReader`: anchors in, a batch of arrays out; items whose episode changed meanwhile are read or drawn again.

Samplers draw anchors from its `index` and call its `read`. Each process has a copy: it pickles without callables.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError, NotEnoughDataError, StaleEpisodeError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.syscalls import process_id
from memmap_buffer.items.index import AnchorRuns, Index
from memmap_buffer.items.marked import Watch
from memmap_buffer.items.selection import Selection
from memmap_buffer.loading.options import Output, parse, selection_of
from memmap_buffer.loading.read_ahead import ANSWER_SECONDS, Disk
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.schema import LENGTHS
from memmap_buffer.views.anchors import Anchors, BoolArray
from memmap_buffer.views.batch_builder import BatchBuilder, find_following, placed
from memmap_buffer.views.folders import Folders, Found
from memmap_buffer.views.gather import BFloat16Bits, Columns
from memmap_buffer.views.hindsight import HindsightBuilder
from memmap_buffer.views.view import described

PATIENCE = 30.0  # seconds of tries without any item read, until an error: no writer is fast enough to cause this
MAX_PAUSE = 0.05  # seconds


class Patience:
    """Pauses between the tries of a reader that a writer overtakes: they grow, and `PATIENCE` bounds tries in vain."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew, as some item was read."""
        self._pause, self._since = 0.0, time.monotonic()

    def wait(self) -> bool:
        """Pause before the next try, at first for 0 s; returns whether there shall be one."""
        time.sleep(self._pause)  # even sleep(0) lets the writer run
        self._pause = min(2 * self._pause + 0.001, MAX_PAUSE)
        return time.monotonic() - self._since < PATIENCE


class ArraySpec(NamedTuple):
    """The shape and dtype of one key of a batch: None for lengths that differ between batches, "str" for text."""

    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of(cls, ragged: bool, batch_size: int | None, array: Array) -> ArraySpec:
        """The spec of a key, from its array in a batch of no items.

        Args:
            ragged: whether the length of axis 1 differs between batches.
            batch_size: the length of axis 0; None where it is not known.
            array: (0, …); an axis that is as long as the longest item or list has length 0.
        """
        steps = [None if ragged or not n else n for n in array.shape[1:2]]
        rest = [n or None for n in array.shape[2:]]  # 0: the members of lists
        dtype = (
            "bfloat16" if isinstance(array, BFloat16Bits) else "str" if array.dtype.kind == "U" else array.dtype.name
        )
        return cls((batch_size, *steps, *rest), dtype)

    @property
    def of_arrays(self) -> ArraySpec:
        """The spec of the same key for format="numpy"."""
        return self._replace(dtype="float32") if self.dtype == "bfloat16" else self


class BatchReader:
    """Reads the batches that one set of options describes.

    Args:
        folders: the folders that are read.
        options: see `Options`; they stay in this process.

    Attributes: frozen: whether `index` is never made anew, as in a worker that counts positions in it.

    Raises:
        SchemaError: the options contradict each other or the schema.
    """

    def __init__(self, folders: Folders, options: Mapping[str, Any]) -> None:
        parsed = parse(options)
        self.options, self.folders = options, folders
        self.selection: Selection = selection_of(parsed, folders.schema, folders.max_timesteps)
        self.output = Output.of(parsed, self.selection.view, folders.schema)
        self.on_stale = parsed["on_stale"]
        self.hindsight = parsed.get("hindsight")
        self.prioritized = Prioritized.parse(parsed.get("prioritized"), folders.schema)
        self._has_text = any(field.storage.kind == "U" for field in folders.schema.all.values())
        self._is_plain = not self._has_text and not self.output.widened
        self._plan = self.selection.view.plan(folders.schema)
        self._ends = self.selection.view.ends(folders.schema)
        if self.hindsight is not None:  # a goal may be any step between two ends of episodes
            self._ends = self._ends._replace(before=folders.max_timesteps, after=folders.max_timesteps)
        self._watch = None if self.selection.mark is None else Watch(self.selection.mark)
        # The index, and the tables and marks that it was made of: replaced together, as threads share a reader.
        self._made: tuple[Index, tuple[EpisodeTable, ...], tuple[Any, ...]] | None = None
        self._living: tuple[tuple[EpisodeTable, ...], Index] | None = None
        self.frozen = self._by_anchors = False
        self._process = process_id()

    def __getstate__(self) -> dict[str, Any]:
        """The state for a worker: without callables, and with the index only if it gets positions in that."""
        frozen = self.frozen or self.selection.has_callables
        made = (self.index(), (), ()) if frozen or not self._by_anchors else None
        state = self.__dict__ | {"selection": self.selection.without_callables(), "frozen": frozen}
        state |= {"_made": made, "_living": None}
        return {name: value for name, value in state.items() if name not in ("options", "_disk")}

    def by_anchors(self) -> BatchReader:
        """A copy for workers that get anchors, not positions, and so pickles without the index."""
        other = copy.copy(self)
        other._by_anchors = True
        return other

    def __repr__(self) -> str:
        """The folders, and the options that are not their defaults."""
        selection, output = self.selection, self.output
        texts = [f"{name}={described(value)}" for name, value in (("hindsight", self.hindsight),) if value is not None]
        texts += [f"prioritized={described(self.prioritized)}"] if self.prioritized is not None else []
        texts += [f"min_episode_len={selection.min_episode_len}"] if selection.min_episode_len > 1 else []
        texts += [f"transform={getattr(each, '__name__', type(each).__name__)}" for each, _ in output.transforms]
        texts += [f"format={output.format!r}"] if output.format != "torch" else []
        return ", ".join([str(self.folders), described(selection.view), *selection.narrowed, *texts])

    def index(self, refresh: bool = False) -> Index:
        """The anchors of the last refresh; with `refresh` those of now, unless it is frozen."""
        made = self._made
        if made is None or (refresh and not self.frozen):
            tables = self.folders.refresh()
            marks = () if self._watch is None else self._watch.stamp(self.folders.storages)
            if made is None or (tables, marks) != made[1:]:
                before = made[0] if made is not None and marks == made[2] else None
                made = self._made = self.selection.index(self.folders, tables, before), tables, marks
        return made[0]

    @property
    def reads_together(self) -> bool:
        """Whether several batches may be read as one: not if an item depends on the others of its batch, nor if
        checksums are compared at every read."""
        selection = self.selection
        if selection.random or selection.mixes or selection.view.pads_to_longest or self.output.lists:
            return False
        return all(storage.verify != "read" for storage in self.folders.storages)

    def require(self, index: AnchorRuns) -> None:
        """Raise NotEnoughDataError where an index has no items."""
        if not len(index):
            raise self.nothing_to_read()

    def nothing_to_read(self) -> NotEnoughDataError:
        """The error for an index without items, with the number and the greatest length of the episodes."""
        episodes = sum(len(table) for table in self.folders.tables)
        longest = max(int((table.length - table.start)[table.visible].max(initial=0)) for table in self.folders.tables)
        finding = f"none of {episodes} episodes has an item for {self.selection.describe()}"
        why = f"{finding}; the longest has {longest} timesteps" if episodes else "it is empty"
        text = f"{self.folders.storages[0].path}: nothing to read from this replay buffer: {why}"
        return NotEnoughDataError(text, episodes=episodes)

    def crop(self, anchors: Anchors, rng: Callable[[], np.random.Generator]) -> Anchors:
        """The anchors with a random number each, if the items need one; a random view's are moved by it.

        Args: anchors: (B,). rng: makes the generator, and is called only if it is needed.
        """
        if not self.selection.random:
            return anchors
        # Each item takes one number of the sequence, so that an item is the same in a part of an epoch as in the whole.
        anchors = anchors._replace(chance=rng().integers(0, 2**64, anchors.size, np.uint64))
        view = self.selection.view
        if not view.random:
            return anchors
        length = self.folders.find(anchors, trusted=False).anchors.length
        return anchors._replace(t=view.crop(length, anchors.uniform(0)))

    def read(self, drawn: Anchors | Found) -> Columns:
        """Read the batch at some anchors.

        Args:
            drawn: (B,) anchors, or `Found`: anchors with the records of their episodes.

        Returns:
            key -> (B, …), new arrays of the stored dtypes.

        Raises:
            StaleEpisodeError: an episode was overwritten meanwhile, and cannot or must not be drawn again.
        """
        builder, columns, fresh = self._try(drawn)
        if fresh is not None and not fresh.all():
            columns = self._completed(builder, columns, fresh)
        output = self.output
        if output.rename:
            columns = {output.rename.get(key, key): values for key, values in columns.items()}
        return columns if self._is_plain else self._finished(columns)

    def _try(self, drawn: Anchors | Found) -> tuple[BatchBuilder, Columns, BoolArray | None]:
        """(builder, copied columns, (B,) whether each item's episode stayed as it was looked up; None: all did)."""
        disk, begun = self._disk, perf_counter()
        builder = self.build(drawn)
        if disk.watches:
            disk.watch()
            if disk.slow:
                disk.ask(builder)
        columns, seconds = builder.gather.copy(builder.batch), perf_counter() - begun
        if disk.watches or seconds > ANSWER_SECONDS:
            disk.took(seconds)
        return builder, columns, builder.fresh()

    def _completed(self, builder: BatchBuilder, columns: Columns, fresh: BoolArray) -> Columns:
        """A copied batch, completed: items that are not `fresh` (B,) are read or drawn again until all are.

        Fresh items are kept. If a writer overtakes more than half of the items of a try, the next try has half as many,
        so that less time passes between the look-up of an episode and its check.
        """
        anchors, pending, size = builder.anchors, np.arange(builder.anchors.size), builder.anchors.size
        parts, patience, damaged = [], Patience(), self._num_damaged()
        tried, fitted = pending, self.selection.view.pads_to_longest
        while True:
            if self.selection.mixes:  # items depend on each other: all of them are fresh, or none is
                fresh = np.full_like(fresh, fresh.all())
            if fresh.any():
                parts.append((tried[fresh], builder.kept(columns, fresh, fitted)))
                patience.renew()
            pending = np.concatenate([tried[~fresh], pending[len(tried) :]])
            if not pending.size:
                return placed(parts, anchors.size)
            before, damaged = damaged, self._num_damaged()  # an episode that is found damaged is hidden: no pause
            if damaged == before and not patience.wait():
                raise self.gone(anchors.serial[pending])
            tried = pending if self.selection.mixes else pending[:size]
            anchors = anchors.replaced(tried, self._again(anchors.where(tried)))
            builder, columns, checked = self._try(anchors.where(tried))
            fresh = np.ones(len(tried), np.bool_) if checked is None else checked
            size = max(1, size // 2) if 2 * np.count_nonzero(fresh) < len(fresh) else 2 * size

    def build(self, drawn: Anchors | Found) -> BatchBuilder:
        """The builder of a batch at anchors (B,): most of its columns only tell yet which rows to copy."""
        view, output = self.selection.view, self.output
        records = self.folders.find(drawn) if isinstance(drawn, Anchors) else drawn
        if self.hindsight is None:
            builder = BatchBuilder(self.folders, records, self._ends, self._plan)
        else:
            builder = HindsightBuilder(self.folders, records, self._ends, self.hindsight, view.reach, self._plan)
        view.cut(builder)
        if output.meta:
            builder.put_meta(output.meta)
        if output.indices or output.weights or records.anchors.weight is not None:
            builder.batch |= self._anchor_columns(builder.anchors)
        return builder

    @cached_property
    def _disk(self) -> Disk:
        return Disk()

    def batch_spec(self, batch_size: int | None) -> dict[str, ArraySpec]:
        """Key -> its spec in a batch, found by reading a batch of no items."""
        empty = np.empty(0, np.int64)
        folder = None if self.folders.single else empty
        chance = empty.astype(np.uint64) if self.selection.random else None
        anchors = Anchors(folder, empty, empty, empty, chance=chance)
        if self.prioritized is not None:
            anchors = anchors._replace(weight=empty.astype(np.float32), probability=empty.astype(np.float64))
        batch, ragged_keys = self.read(anchors), {*self.output.ragged}
        if self.selection.view.pads_to_longest:  # with `final`, one entry more than steps, so axis 1 is 1, not 0, here
            names = [self.output.rename.get(name, name) for name in self.folders.schema.fields]
            ragged_keys |= {*names, *(LENGTHS + name for name in names)}
        return {key: ArraySpec.of(key in ragged_keys, batch_size, array) for key, array in batch.items()}

    def _num_damaged(self) -> int:
        return sum(storage.num_damaged for storage in self.folders.storages)

    def _require_text(self, batch: Mapping[str, Array]) -> None:
        """Raise CorruptBufferError for code points beyond Unicode, of which numpy would make an invalid `str`."""
        for key, values in batch.items() if self._has_text else ():
            if values.dtype.kind == "U" and values.size:
                highest = int(np.ascontiguousarray(values).reshape(-1).view(np.uint32).max())
                if highest > sys.maxunicode:
                    path = self.folders.storages[0].path
                    raise CorruptBufferError(
                        f"{path}: {key!r} holds what is no text (character {highest:#x})", path=path
                    )

    def _again(self, anchors: Anchors) -> Anchors:
        """The anchors (B,) to try next: the same where the episode is there, else others that are drawn now."""
        self.folders.refresh()
        gone = self._gone(anchors)
        if gone.size and self.folders.catch_up(anchors.where(gone)):
            gone = self._gone(anchors)
        if not gone.size:
            return anchors
        if self.on_stale == "raise":
            raise self.gone(anchors.serial[gone])
        index = self._index_now()
        self.require(index)
        rng = np.random.default_rng()
        return anchors.replaced(gone, self.crop(index.draw_like(anchors.where(gone), rng), lambda: rng))

    def _gone(self, anchors: Anchors) -> IntArray:
        """The positions of the anchors (B,) that are not there now, or run on into an episode that is not."""
        now = self.folders.find(anchors, trusted=False).anchors
        is_gone = (now.length == 0) | (now.t >= now.length)  # `t` is beyond the end: a shard was made anew
        item, following = find_following(self.folders, anchors)
        is_gone[item[following.anchors.length == 0]] = True
        return np.flatnonzero(is_gone)

    def _index_now(self) -> Index:
        """The anchors of now. `index` is left as it is: positions of a dataset count in it until its `refresh`."""
        tables = self.folders.tables
        if self._living is None or tables != self._living[0]:
            # A callable filter is not called in a worker: anchors of episodes that are gone leave the old index.
            thinned = self.frozen or (self.selection.has_callables and process_id() != self._process)
            self._living = tables, self.index().living(self.folders) if thinned else self.selection.index(self.folders)
        return self._living[1]

    def gone(self, serials: IntArray) -> StaleEpisodeError:
        """The error for episodes, by serial, that cannot be read any more."""
        gone = np.unique(serials).tolist()
        return StaleEpisodeError(
            f"{self.folders.storages[0].path}: episodes {gone[:5]} were overwritten or cleared before they were read; "
            "make the ring larger, begin a new epoch more often, or give on_stale='redraw', for others in their place",
            serials=gone,
        )

    def _anchor_columns(self, anchors: Anchors) -> dict[str, Array]:
        """The columns of a batch that follow from its anchors: indices, weights, probabilities."""
        named_columns: dict[str, Array] = {}
        if self.output.indices:
            columns = [anchors.serial] if self.output.indices == "_index" else [anchors.serial, anchors.t]
            columns = columns if anchors.folder is None else [anchors.folder, *columns]
            # Side by side, as rows of C order: in a third of the time of `np.stack`.
            side_by_side = columns[0].copy() if len(columns) == 1 else np.array(columns, order="F").T
            named_columns[self.output.indices] = side_by_side
        if anchors.weight is not None and anchors.probability is not None:
            named_columns |= {"_weights": anchors.weight.copy(), "_probabilities": anchors.probability.copy()}
        elif self.output.weights:
            named_columns["_weights"] = np.ones(anchors.size, np.float32)
        return named_columns

    def _finished(self, columns: Columns) -> Columns:
        """The columns with their text checked, and with the last axis that `expand_scalars` adds."""
        self._require_text(columns)
        return {**columns, **{key: columns[key][..., None] for key in columns.keys() & self.output.widened}}
