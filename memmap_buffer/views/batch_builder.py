"""The one engine under every view: rows = first row + t + offsets, clipped into the episode, taken, padded, masked.

Where the rows lie is worked out for many batches together, as numpy's cost is calls. What is small is copied for
several of them together, too, and each is handed its slice; what is large is copied batch by batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array, all_of, any_of, decode
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.records import FINAL, FIRST_ROW, GENERATION, INNER_END, TERMINATED, Words
from memmap_buffer.priority import kernels
from memmap_buffer.views.ends import Ends
from memmap_buffer.views.folders import Anchors, BoolArray, Folders
from memmap_buffer.views.row_ranges import RowRanges

MAX_BATCH_BYTES = 16 << 30  # a length that a stranger wrote must not take all memory
INDEX_BYTES = 32  # what finding one row takes
BLOCK_BYTES = 3 << 19  # what is copied together, so that it lies in the second cache until it is asked for
LOOK = 256  # timesteps that are looked at together for the end of an episode
EVERY = slice(None)
PADDINGS = ("zero", "edge", "default")


class BFloat16Bits(np.ndarray[Any, np.dtype[np.uint16]]):
    """uint16 that are the bits of bfloat16 numbers, so that the PyTorch layer knows."""


class RowGather(NamedTuple):
    """A field's rows that are still to be copied; `missing` (B,) or (B, K) of them do not exist, and get `padding`."""

    name: str
    rows: IntArray | RowRanges
    missing: BoolArray | None = None
    padding: str = "zero"


Column: TypeAlias = (
    Array | RowGather | RowRanges
)  # an array as it is; what is to be copied; a mask of the rows that exist
Columns: TypeAlias = dict[str, Array]
Splitter: TypeAlias = Callable[
    [Columns, int], list[dict[str, Any]]
]  # columns (N, …), cut into batches of so many items
Copied: TypeAlias = tuple[dict[str, Any], int | None]  # of a part, and the change counter at which it was all fresh


def pieces(values: Array, size: int) -> list[Array]:
    """An array (N, …) cut into views of `size` items each, the last one of what is left."""
    if len(values) <= size:
        return [values]
    whole = len(values) - len(values) % size
    out = list(values[:whole].reshape(-1, size, *values.shape[1:]))  # half of what a slice for each would take
    return [*out, values[whole:]] if whole < len(values) else out


def is_one(columns: Columns, size: int) -> bool:
    """Whether columns are those of one batch of at most `size` items."""
    return not columns or len(next(iter(columns.values()))) <= size


def cut(columns: Columns, size: int) -> list[Columns]:
    """Batches of `size` items each, the last one of what is left; views of the columns."""
    if is_one(columns, size):
        return [columns]
    parts = (pieces(values, size) for values in columns.values())
    return [dict(zip(columns, batch, strict=True)) for batch in zip(*parts, strict=True)]


def placed(parts: list[tuple[IntArray, Columns]], count: int) -> Columns:
    """One batch of `count` items out of parts, each with the places of its items; zeros behind what is shorter."""
    out: Columns = {}
    for key, first in parts[0][1].items():
        shape = np.maximum.reduce([columns[key].shape[1:] for _, columns in parts]).astype(int).tolist()
        whole: Array = np.zeros((count, *shape), first.dtype).view(type(first))
        for places, columns in parts:
            values = columns[key]
            within: tuple[Any, ...] = (places, *map(slice, values.shape[1:]))
            whole[within] = values
        out[key] = whole
    return out


class PlannedBatch(NamedTuple):
    """Some of the items of a `BatchBuilder`, a slice of them: a batch that is worked out, as far as it can be."""

    gather: BatchBuilder
    chosen: slice

    @property
    def anchors(self) -> Anchors:
        """Where they are cut."""
        return self.gather.anchors.where(self.chosen)

    @property
    def size(self) -> int:
        """How many."""
        start, stop, _ = self.chosen.indices(self.gather.anchors.size)
        return stop - start


class BatchBuilder:
    """Items being cut: what a batch of them, or of some of them, holds.

    Args:
        sources: the folders. anchors: (B,) where to cut. ends: of their episodes. size: as many are read together at
            most; default all.

    Attributes:
        batch: key -> (B, …), or what is to be copied for it; filled by the `put` methods.
        t, length: (B,) int64 of each anchor and its episode, or of the part of it between two ends.
        begin: (B,) the timestep at which that part begins; 0 where there is none.
    """

    def __init__(self, sources: Folders, anchors: Anchors, ends: Ends, size: int | None = None) -> None:
        self.schema = sources.schema
        self._ends, self._parted = ends, False
        self._since = sources.seen
        self.sources, anchors = sources.find(anchors)
        self.anchors = anchors
        self._words: Words = anchors.words  # type: ignore[assignment]
        self.t, self.length = anchors.t, anchors.length
        self._size = anchors.size if size is None else min(size, anchors.size)
        self._first = self._words.view(np.int64)[:, FIRST_ROW]
        self._first_of_final: IntArray | None = None
        self._there = self.t < self.length
        self._all_there = all_of(self._there)
        if not self._all_there:
            self._set_aside(~self._there)
        self.begin: IntArray | int = 0
        if ends.names and ends.after and (not ends.marked or any_of(anchors.has(INNER_END))):
            self._keep_between_ends()
        self.batch: dict[str, Column] = {}
        self._ahead: dict[tuple[int, int], Copied] = {}  # of parts, what is not yet read

    def _set_aside(self, gone: BoolArray) -> None:
        """Cut what is not there from the first row of its slot, which always exists; it is drawn again afterwards."""
        self.t, self.length = np.where(gone, 0, self.t), np.where(gone, 1, self.length)
        self._first = np.where(gone, self.sources.first_rows(self.anchors), self._first)

    def _keep_between_ends(self) -> None:
        """Take the steps between two ends for the episode, as far as items reach: what is beyond does not exist."""
        ends, whole = self._ends, self.length
        begin, stop = np.full_like(whole, -1), whole.copy()
        for start in range(0, ends.after, LOOK):
            steps = range(start, min(start + LOOK, ends.after))
            found = self._is_end(steps)
            here = found.any(axis=1) & (stop == whole)
            stop = np.where(here, self.t + start + found.argmax(axis=1) + 1, stop)
            if not any_of((stop == whole) & (self.t + steps.stop < whole)):
                break
        for start in range(0, ends.before, LOOK):
            steps = range(-min(start + LOOK, ends.before), -start)
            found = self._is_end(steps)[:, ::-1]
            here = found.any(axis=1) & (begin < 0)
            begin = np.where(here, self.t - start - found.argmax(axis=1), begin)
            if not any_of((begin < 0) & (self.t + steps.start > 0)):
                break
        self.begin = np.maximum(begin, 0)
        self.has_final = self.anchors.has(FINAL) & (stop == whole)
        self._first, self._first_of_final = self._first + self.begin, None
        self.t, self.length = self.t - self.begin, stop - self.begin
        self._parted = True

    def _is_end(self, steps: range) -> BoolArray:
        """(B, K) whether a field that ends episodes is true at `t + steps`."""
        out = np.zeros((len(self.t), len(steps)), np.bool_)
        for name in self._ends.names:
            self._require_size(name, len(steps))
            values = self._copy(self._take_of(name, steps, self.length, "zero"), EVERY)
            out |= values.any(axis=tuple(range(2, values.ndim)))
        return out

    @cached_property
    def has_final(self) -> BoolArray:
        """(B,) whether each anchor's episode has its final observation."""
        return self.anchors.has(FINAL)

    @cached_property
    def terminated(self) -> BoolArray:
        """(B,) whether each anchor's episode terminated."""
        ends = self._ends
        if ends.recorded and not self._parted:
            return self.anchors.has(TERMINATED)
        if ends.terminated is None:
            return np.zeros(len(self.t), np.bool_)
        last = self.look_at(ends.terminated, self.length - 1)
        return np.asarray(last.any(axis=tuple(range(1, last.ndim))))

    @cached_property
    def goes_on(self) -> BoolArray:
        """(B,) whether something is known to follow the last step: an observation, or that nothing does."""
        told = self._ends.recorded and not self._parted
        return self.anchors.has(FINAL | TERMINATED) if told else self.has_final | self.terminated

    def read(self, part: slice = EVERY, make: Splitter = cut) -> dict[str, Any]:
        """Copy some of the items: key -> what `make` makes of (b, …), which shares memory with no other part."""
        return self._read(part, make)[0]

    def read_fresh(self, part: slice, make: Splitter) -> dict[str, Any] | None:
        """The same, or None where not all of them are `fresh`: known if they were and nothing changed since."""
        batch, since = self._read(part, make)
        same = since is not None and since == self.sources.changes
        return batch if same or all_of(self.fresh(part)) else None

    def kept(self, columns: Columns, chosen: BoolArray) -> Columns:
        """Those of some items out of the columns of all, no longer than these items need."""
        out = {key: values[chosen] for key, values in columns.items()}
        for key, what in self.batch.items():
            if _is_fitted(what):
                out[key] = out[key][:, : _rows_of(what).steps_of(chosen)]
        return out

    def _read(self, part: slice, make: Splitter) -> Copied:
        start, stop, _ = part.indices(len(self.t))
        copied = self._ahead.pop((start, stop), None)
        if copied is not None and len(copied[0]) == len(self.batch):
            return copied
        begun = perf_counter()
        if copied is None:
            copied = self._copy_small(start, stop, make) if stop - start < len(self.t) else ({}, None)
        small, since = copied
        if len(small) < len(self.batch):
            rest = {key: what for key, what in self.batch.items() if key not in small} if small else self.batch
            self._ask(rest, part)
            large = make({key: self._copy(what, part) for key, what in rest.items()}, stop - start)[0]
            small = {key: small[key] if key in small else large[key] for key in self.batch} if small else large
        self.sources.disk.took(perf_counter() - begun)
        return small, since

    def _ask(self, keys: Iterable[str], part: slice) -> None:
        """Have the system read the rows of some items, all at a time, if rows come from the disk."""
        if not self.sources.disk.slow or not len(self.t):
            return
        wanted: dict[str, list[tuple[IntArray, ...]]] = {}
        for take in map(self.batch.__getitem__, keys):
            if isinstance(take, RowGather):
                some = _stretches(take.rows[part])
                if self.anchors.source is not None:
                    source = self.anchors.source[part]
                    some = (*some, np.repeat(source, len(some[0]) // len(source)))
                wanted.setdefault(take.name, []).append(some)
        for name, each in wanted.items():
            self.sources.will_need(name, *map(np.concatenate, zip(*each, strict=True)))

    def _copy_small(self, start: int, stop: int, make: Splitter) -> Copied:
        """What takes little memory of some items, and of as many parts behind them as lie in a cache together."""
        size, number = stop - start, len(self.t)
        small, parts = self._small
        if not small:
            return {}, None
        block = slice(start, min(start + parts * size, number))
        self._ask(small, block)
        first, *others = make({key: self._copy(self.batch[key], block) for key in small}, size)
        since = self.sources.changes if others and len(small) == len(self.batch) else None
        if since is not None and not all_of(self.fresh(block)):
            since = None
        for at, other in zip(range(stop, block.stop, max(1, size)), others, strict=True):
            self._ahead[at, min(at + size, number)] = other, since
        return first, since

    @cached_property
    def _small(self) -> tuple[list[str], int]:
        """The keys of what takes little memory of a part, and of how many parts that lies in a cache together."""
        nbytes = {key: self._nbytes_of(what, self._size) for key, what in self.batch.items()}
        small = [key for key, of in nbytes.items() if of <= BLOCK_BYTES // 4 and not _is_fitted(self.batch[key])]
        return small, max(1, BLOCK_BYTES // max(1, sum(nbytes[key] for key in small)))

    def _nbytes_of(self, what: Column, items: int) -> int:
        if isinstance(what, RowGather):
            return items * math.prod(what.rows.shape[1:]) * self.schema.fields[what.name].itemsize
        return items * (what.steps if isinstance(what, RowRanges) else what.nbytes // max(1, len(what)))

    def fresh(self, part: slice = EVERY) -> BoolArray:
        """(b,) whether what was copied is what the anchors of a part meant. To be asked after all copying."""
        anchors = self.anchors if part is EVERY else self.anchors.where(part)
        same = self.sources.unchanged(anchors, self._words[part, GENERATION], self._since)
        return same if self._all_there else same & self._there[part]

    @property
    def nbytes(self) -> int:
        """About how much memory it takes to know where the rows lie."""
        return sum(what.nbytes if isinstance(what, np.ndarray) else 32 * len(self.t) for what in self.batch.values())

    def put_at(self, names: Iterable[str], t: IntArray, *, prefix: str = "") -> None:
        """Gather fields at one timestep an item into the batch, zero where it does not exist.

        Args: names: per-timestep fields, put under `prefix` + name.  t: (B,).
        """
        plans: dict[bool, tuple[IntArray, BoolArray | None]] = {}
        fields, large = self.schema.fields, self._size * max(self.schema.largest, INDEX_BYTES) > MAX_BATCH_BYTES
        for name in names:
            if large:
                self._require_size(name, 1)
            final = fields[name].final
            if final not in plans:
                plans[final] = self._plan(t, final)
            self.batch[prefix + name] = RowGather(name, *plans[final])

    def put(
        self,
        names: Iterable[str],
        offsets: IntArray | range,
        *,
        prefix: str = "",
        limit: IntArray | None = None,
        padding: str = "zero",
        needed: IntArray | None = None,
    ) -> None:
        """Gather fields at `t + offsets` into the batch.

        Args:
            names: per-timestep fields, put under `prefix` + name.
            offsets: (K,) int64, or (B, K) of each item's own; a range where they follow one another.
            limit: (B,) the timesteps that exist are below it; default: the episode's, with its final observation.
            padding: what stands where none exists: "zero", "edge" (the nearest existing) or "default".
            needed: (B,) how many of the offsets, a range, each item needs; a batch gets what its longest item does.
        """
        plans: dict[bool, RowGather] = {}
        for name in names:
            final = self.schema.fields[name].final
            self._require_size(name, len(offsets) if isinstance(offsets, range) else offsets.shape[-1])
            if final not in plans:
                plans[final] = self._take_of(name, offsets, limit, padding, needed)
            self.batch[prefix + name] = plans[final]._replace(name=name)

    def put_mask(self, key: str, offsets: range, needed: IntArray | None = None) -> None:
        """Put (B, K) whether timestep `t + offsets` exists, final observations not counted. needed: see `put`."""
        self._require_mask(offsets)
        self.batch[key] = self._slices(offsets, False, self.length, "zero", needed)

    def look(self, name: str, offsets: range, limit: IntArray | None = None) -> Array:
        """A field at `t + offsets` as numpy can compute with it, (B, K, *field), zero where it does not exist."""
        self._require_size(name, len(offsets))
        values = self._copy(self._take_of(name, offsets, limit, "zero"), EVERY)
        return decode(values, self.schema.fields[name].dtype)

    def look_at(self, name: str, t: IntArray) -> Array:
        """A field at one timestep an item, (B, *field), that is known to exist."""
        field = self.schema.fields[name]
        return decode(self.sources.take(name, self.anchors.source, self._rows(t, field.final)), field.dtype)

    def exists(self, offsets: IntArray | range, limit: IntArray | None = None) -> BoolArray:
        """(B, K) whether timestep `t + offsets` exists, the final observation not counted unless in `limit`."""
        self._require_mask(offsets)
        steps = np.arange(offsets.start, offsets.stop) if isinstance(offsets, range) else offsets
        found = steps < ((self.length if limit is None else limit) - self.t)[:, None]
        if int(steps.min(initial=0)) + int(self.t.min(initial=0)) < 0:
            found &= steps >= -self.t[:, None]
        return np.asarray(found)

    def put_meta(self, names: Iterable[str]) -> None:
        """Gather meta fields, one entry an item."""
        for name in names:
            self.batch[name] = self._marked(name, self.sources.take_meta(name, self.anchors))

    def limit(self, final: bool) -> IntArray:
        """(B,) how many entries each anchor's episode has of fields with or without `final`."""
        return self.length + self.has_final if final else self.length

    def first(self, final: bool) -> IntArray:
        """(B,) the row of step 0 of each anchor's episode, of fields with or without `final`."""
        if not final:
            return self._first
        if self._first_of_final is None:
            self._first_of_final = self._first + self.anchors.slot
        return self._first_of_final

    def _rows(self, t: IntArray, final: bool) -> IntArray:
        first = self.first(final)
        return (first if t.ndim == 1 else first[:, None]) + t

    def _plan(self, wanted: IntArray, final: bool, limit: IntArray | None = None) -> tuple[IntArray, BoolArray | None]:
        """The rows of the nearest timesteps that exist, and which are not those that were wanted, if any."""
        if wanted is self.t:
            return self._rows(wanted, final), None
        limit, compiled = self.limit(final) if limit is None else limit, kernels.now
        if compiled is not None and wanted.ndim == 1:
            rows, missing = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.bool_)
            some = compiled.nearest(self.first(final), wanted, limit, rows, missing)
            return rows, missing if some else None
        clipped = np.minimum(np.maximum(wanted, 0), limit - 1)
        missing = wanted != clipped
        return self._rows(clipped, final), missing if any_of(missing) else None

    def _take_of(
        self,
        name: str,
        offsets: IntArray | range,
        limit: IntArray | None,
        padding: str,
        needed: IntArray | None = None,
    ) -> RowGather:
        final = self.schema.fields[name].final
        limit = self.limit(final) if limit is None else limit
        if isinstance(offsets, range):
            return RowGather(name, self._slices(offsets, final, limit, padding, needed))
        return RowGather(name, *self._plan(self.t[:, None] + offsets, final, limit[:, None]), padding)

    def _copy(self, what: Column, part: slice) -> Array:
        """Copy some of the items."""
        if not isinstance(what, RowGather):
            if isinstance(what, RowRanges):
                return what[part].exist()
            return what if part is EVERY else what[part].copy()
        source, name = self.anchors.source, what.name
        rows = what.rows if part is EVERY else what.rows[part]
        values = self.sources.take(name, source if source is None else source[part], rows)
        if what.missing is not None and what.padding != "edge":
            missing = what.missing[part]
            if missing.any():
                fill = values.dtype.type() if what.padding == "zero" else self.schema.fields[name].fill
                values[missing] = fill
        return self._marked(name, values)

    def _slices(
        self, offsets: range, final: bool, limit: IntArray, padding: str, needed: IntArray | None = None
    ) -> RowRanges:
        """Where the steps `t + offsets` lie."""
        begin, steps = self.t + offsets.start, len(offsets)
        lead = np.minimum(np.maximum(-begin, 0), steps)
        stop = np.maximum(np.minimum(limit - begin, steps), 0)
        nearest = np.minimum(np.maximum(begin, 0), limit - 1)
        return RowRanges(self._rows(nearest, final), lead, stop, steps if needed is None else needed, padding)

    def _require_size(self, name: str, steps: int) -> None:
        size = self._size * steps * max(self.schema.fields[name].itemsize, INDEX_BYTES)
        if size > MAX_BATCH_BYTES:
            self._refuse_size(f"field {name!r}", size)

    def _require_mask(self, offsets: IntArray | range) -> None:
        size = self._size * len(offsets) * INDEX_BYTES
        if size > MAX_BATCH_BYTES:
            self._refuse_size("the mask", size)

    def _refuse_size(self, what: str, size: int) -> None:
        raise SchemaError(
            f"{what}: a batch of {self._size} items takes {size / 2**30:.1f} GiB, more than "
            f"{MAX_BATCH_BYTES >> 30}; lower batch_size, leave it out, or cut windows"
        )

    def _marked(self, name: str, values: Array) -> Array:
        return values.view(BFloat16Bits) if self.schema.all[name].dtype == "bfloat16" else values


def _is_fitted(what: Column) -> bool:
    """Whether its shape depends on the items that are read together."""
    rows = _rows_of(what)
    return isinstance(rows, RowRanges) and rows.is_fitted


def _rows_of(what: Column) -> Any:
    return what.rows if isinstance(what, RowGather) else what


def _stretches(rows: IntArray | RowRanges) -> tuple[IntArray, ...]:
    """(first, stop) of rows that are copied, as many for each item."""
    if isinstance(rows, RowRanges):
        return rows.row, rows.row + np.maximum(rows.stop - rows.lead, 1)
    return rows.ravel(), rows.ravel() + 1


def check_padding(padding: str) -> None:
    """Raise SchemaError unless `padding` is one of `PADDINGS`."""
    if padding not in PADDINGS:
        raise SchemaError(f"padding: got {padding!r}, expected one of {', '.join(map(repr, PADDINGS))}")
