"""`BatchReader`: anchors in, a batch of arrays out; items whose episode moved meanwhile are read or drawn again."""

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

PATIENCE = 30.0  # seconds in which nothing at all was read: no writer is so quick, so something else is wrong
MAX_PAUSE = 0.05  # seconds


class Patience:
    """Pauses between the tries of a reader that a writer overtakes; they grow, and end where no try reads anything."""

    def __init__(self) -> None:
        self._pause, self._since = 0.0, time.monotonic()

    def renew(self) -> None:
        """Something was read."""
        self._pause, self._since = 0.0, time.monotonic()

    def wait(self) -> bool:
        """Wait before the next try, for none at first; whether there shall be one."""
        time.sleep(self._pause)  # even a pause of 0 leaves the processor to the writer
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
        rest = [n or None for n in array.shape[2:]]  # of lists
        dtype = (
            "bfloat16" if isinstance(array, BFloat16Bits) else "str" if array.dtype.kind == "U" else array.dtype.name
        )
        return cls((batch_size, *steps, *rest), dtype)

    @property
    def of_arrays(self) -> ArraySpec:
        """The key as it is for format="numpy"."""
        return self._replace(dtype="float32") if self.dtype == "bfloat16" else self


class BatchReader:
    """Reads batches of one kind.

    Args:
        folders: the folders that are read.
        options: as `Options` names them; they stay in this process.

    Attributes: frozen: whether its index stays as it is, as in a worker.

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
        if self.hindsight is not None:  # a goal may be from anywhere between two ends
            self._ends = self._ends._replace(before=folders.max_timesteps, after=folders.max_timesteps)
        self._index: Index | None = None
        self._watch = None if self.selection.mark is None else Watch(self.selection.mark)
        self._made_of: tuple[tuple[EpisodeTable, ...], tuple[Any, ...]] = (), ()
        self._living: tuple[tuple[EpisodeTable, ...], Index] | None = None
        self.frozen = self._by_anchors = False
        self._process = process_id()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a worker's reader: paths, options, and the index if positions count in it; no callables."""
        frozen = self.frozen or self.selection.has_callables
        index = self.index() if frozen or not self._by_anchors else None
        state = self.__dict__ | {"selection": self.selection.without_callables(), "frozen": frozen, "_index": index}
        state |= {"_made_of": ((), ()), "_living": None}
        return {name: value for name, value in state.items() if name not in ("options", "_disk")}

    def by_anchors(self) -> BatchReader:
        """A copy for processes that are given anchors and no positions, and so need no index before one is gone."""
        other = copy.copy(self)
        other._by_anchors = True
        return other

    def __repr__(self) -> str:
        """Where it reads, and what."""
        selection, output = self.selection, self.output
        texts = [f"{name}={described(value)}" for name, value in (("hindsight", self.hindsight),) if value is not None]
        texts += [f"prioritized={described(self.prioritized)}"] if self.prioritized is not None else []
        texts += [f"min_episode_len={selection.min_episode_len}"] if selection.min_episode_len > 1 else []
        texts += [f"transform={getattr(each, '__name__', type(each).__name__)}" for each, _ in output.transforms]
        texts += [f"format={output.format!r}"] if output.format != "torch" else []
        return ", ".join([str(self.folders), described(selection.view), *selection.narrowed, *texts])

    def index(self, refresh: bool = False) -> Index:
        """The anchors as of the last refresh; `refresh` looks for new episodes first."""
        if self._index is None or (refresh and not self.frozen):
            tables = self.folders.refresh()
            marks = () if self._watch is None else self._watch.stamp(self.folders.storages)
            if self._index is None or (tables, marks) != self._made_of:
                before = self._index if marks == self._made_of[1] else None
                self._index = self.selection.index(self.folders, tables, before)
                self._made_of = tables, marks
        return self._index

    @property
    def reads_together(self) -> bool:
        """Whether several batches may be read as one: not if an item depends on the others of its batch, nor where
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
        """The error for an index without items, with the counts."""
        episodes = sum(len(table) for table in self.folders.tables)
        longest = max(int((table.length - table.start)[table.visible].max(initial=0)) for table in self.folders.tables)
        what = f"none of {episodes} episodes has an item for {self.selection.describe()}"
        why = f"{what}; the longest has {longest} timesteps" if episodes else "it is empty"
        text = f"{self.folders.storages[0].path}: nothing to read from this replay buffer: {why}"
        return NotEnoughDataError(text, episodes=episodes)

    def crop(self, anchors: Anchors, rng: Callable[[], np.random.Generator]) -> Anchors:
        """Give each item its chance, if there is a use for it, and move the anchors of a view that is random."""
        if not self.selection.random:
            return anchors
        # Each item takes one number of the sequence, so that a part of an epoch is as in the whole of it.
        anchors = anchors._replace(chance=rng().integers(0, 2**64, anchors.size, np.uint64))
        view = self.selection.view
        if not view.random:
            return anchors
        length = self.folders.find(anchors, trusted=False).anchors.length
        return anchors._replace(t=view.crop(length, anchors.uniform(0)))

    def read(self, drawn: Anchors | Found) -> Columns:
        """The batch at some anchors.

        Args:
            drawn: (B,), perhaps with the records of their episodes.

        Returns:
            key -> (B, …), fresh arrays of the stored dtypes.

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
        """(the builder of a batch; its columns; (B,) whether each item was copied as its anchor meant; None: all)."""
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
        """A batch that was copied, with those of its items anew that were not `fresh`.

        Items that were copied and checked stay. The more of the rest a writer overtakes, the fewer are tried together:
        so the time between looking one up and checking it grows short.
        """
        anchors, rest, size = builder.anchors, np.arange(builder.anchors.size), builder.anchors.size
        parts, patience, damaged = [], Patience(), self._num_damaged()
        chosen, fitted = rest, self.selection.view.pads_to_longest
        while True:
            if self.selection.mixes:  # no item is right without the others
                fresh = np.full_like(fresh, fresh.all())
            if fresh.any():
                parts.append((chosen[fresh], builder.kept(columns, fresh, fitted)))
                patience.renew()
            rest = np.concatenate([chosen[~fresh], rest[len(chosen) :]])
            if not rest.size:
                return placed(parts, anchors.size)
            before, damaged = damaged, self._num_damaged()  # an episode that is found damaged is not drawn again
            if damaged == before and not patience.wait():
                raise self.gone(anchors.serial[rest])
            chosen = rest if self.selection.mixes else rest[:size]
            anchors = anchors.replaced(chosen, self._again(anchors.where(chosen)))
            builder, columns, again = self._try(anchors.where(chosen))
            fresh = np.ones(len(chosen), np.bool_) if again is None else again
            size = max(1, size // 2) if 2 * np.count_nonzero(fresh) < len(fresh) else 2 * size

    def build(self, drawn: Anchors | Found) -> BatchBuilder:
        """The builder of a batch at these anchors, with all columns put, and few of them copied."""
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
        """The arrays of a batch, found by cutting one of no items."""
        none = np.empty(0, np.int64)
        folder = None if self.folders.single else none
        chance = none.astype(np.uint64) if self.selection.random else None
        anchors = Anchors(folder, none, none, none, chance=chance)
        if self.prioritized is not None:
            anchors = anchors._replace(weight=none.astype(np.float32), probability=none.astype(np.float64))
        batch, of_any_length = self.read(anchors), {*self.output.ragged}
        if self.selection.view.pads_to_longest:  # fields with `final` have an entry more than none
            names = [self.output.rename.get(name, name) for name in self.folders.schema.fields]
            of_any_length |= {*names, *(LENGTHS + name for name in names)}
        return {key: ArraySpec.of(key in of_any_length, batch_size, array) for key, array in batch.items()}

    def _num_damaged(self) -> int:
        return sum(storage.num_damaged for storage in self.folders.storages)

    def _require_text(self, batch: Mapping[str, Array]) -> None:
        """Raise CorruptBufferError for text that no `str` may hold: numpy would make one of it all the same."""
        for key, values in batch.items() if self._has_text else ():
            if values.dtype.kind == "U" and values.size:
                highest = int(np.ascontiguousarray(values).reshape(-1).view(np.uint32).max())
                if highest > sys.maxunicode:
                    path = self.folders.storages[0].path
                    raise CorruptBufferError(
                        f"{path}: {key!r} holds what is no text (character {highest:#x})", path=path
                    )

    def _again(self, anchors: Anchors) -> Anchors:
        """The anchors to try next: an episode that was updated is read again, one that is gone is replaced."""
        self.folders.refresh()
        now = self.folders.find(anchors, trusted=False).anchors
        lost = (now.length == 0) | (now.t >= now.length)  # the second: of a shard that was made anew
        item, following = find_following(self.folders, anchors)
        lost[item[following.anchors.length == 0]] = True
        gone = np.flatnonzero(lost)
        if not gone.size:
            return anchors
        if self.on_stale == "raise":
            raise self.gone(anchors.serial[gone])
        index = self._index_now()
        self.require(index)
        rng = np.random.default_rng()
        return anchors.replaced(gone, self.crop(index.draw_like(anchors.where(gone), rng), lambda: rng))

    def _index_now(self) -> Index:
        """The anchors that exist now; `index` stays, as positions of a dataset count in it until it is refreshed."""
        tables = self.folders.tables
        if self._living is None or tables != self._living[0]:
            # A callable filter is never called in a worker: there, the anchors that it chose are only thinned out.
            thinned = self.frozen or (self.selection.has_callables and process_id() != self._process)
            self._living = tables, self.index().living(self.folders) if thinned else self.selection.index(self.folders)
        return self._living[1]

    def gone(self, serials: IntArray) -> StaleEpisodeError:
        """The error for episodes that cannot be read any more."""
        gone = np.unique(serials).tolist()
        return StaleEpisodeError(
            f"{self.folders.storages[0].path}: episodes {gone[:5]} were overwritten or cleared before they were read; "
            "make the ring larger, begin a new epoch more often, or give on_stale='redraw', for others in their place",
            serials=gone,
        )

    def _anchor_columns(self, anchors: Anchors) -> dict[str, Array]:
        """The columns of a batch that tell of its anchors."""
        out: dict[str, Array] = {}
        if self.output.indices:
            columns = [anchors.serial] if self.output.indices == "_index" else [anchors.serial, anchors.t]
            columns = columns if anchors.folder is None else [anchors.folder, *columns]
            out[self.output.indices] = columns[0].copy() if len(columns) == 1 else _side_by_side(columns)
        if anchors.weight is not None and anchors.probability is not None:
            out |= {"_weights": anchors.weight.copy(), "_probabilities": anchors.probability.copy()}
        elif self.output.weights:
            out["_weights"] = np.ones(anchors.size, np.float32)
        return out

    def _finished(self, columns: Columns) -> Columns:
        """The columns with their text checked, and the axis that numbers were asked to have."""
        self._require_text(columns)
        return {**columns, **{key: columns[key][..., None] for key in columns.keys() & self.output.widened}}


def _side_by_side(columns: list[IntArray]) -> IntArray:
    """Columns (B,) as one array (B, …), in a third of the time that `stack` takes."""
    out = np.empty((len(columns[0]), len(columns)), np.int64)
    for i, column in enumerate(columns):
        out[:, i] = column
    return out
