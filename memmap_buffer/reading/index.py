"""Which anchors exist now: runs of them per episode, never a list of all steps; and which of them a filter keeps.

`Selection` says what is wanted: a view, filters, a split. `Index` is the answer for the episodes of one moment: a
cumulative count per run, 32 bytes an episode (with `filter_fields`, per surviving run).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.errors import SchemaError
from memmap_buffer.reading.sources import Anchors, Sources
from memmap_buffer.reading.views import View
from memmap_buffer.schema import Schema
from memmap_buffer.store.records import FINAL, TERMINATED
from memmap_buffer.store.storage import EpisodeTable, IntArray, Storage
from memmap_buffer.values import Array, decode

BoolArray = npt.NDArray[np.bool_]
MAX_GUIDE_STEPS = 3  # each costs about a quarter of numpy's searchsorted
CHUNK_STEPS = 1 << 20  # steps whose filter columns are looked at together


@dataclass(frozen=True, eq=False)
class Index:
    """The anchors of one moment: run r has those with t = min(first + i * stride, last), i < count.

    Attributes:
        slot, serial, first: (R,).  starts: (R + 1,) how many anchors the runs before have, in all.
        source: (R,) or None for one folder.  last: (R,) or None.
    """

    slot: IntArray
    serial: IntArray
    first: IntArray
    starts: IntArray
    stride: int = 1
    source: IntArray | None = None
    last: IntArray | None = None

    def __len__(self) -> int:
        return int(self.starts[-1])

    def bounds(self, sources: int) -> list[int]:
        """Where each source's anchors begin, and the end; they are listed source by source."""
        if self.source is None:
            return [0, len(self)]
        return [int(n) for n in self.starts[np.searchsorted(self.source, np.arange(sources + 1))]]

    def living(self, sources: Sources) -> Index:
        """What is left of it in the tables as last read."""
        source = np.zeros(len(self.slot), np.int64) if self.source is None else self.source
        keep = np.zeros(len(self.slot), np.bool_)
        for number, table in enumerate(sources.tables):
            mine = source == number
            keep[mine] = table.shows(self.slot[mine], self.serial[mine])
        return replace(
            self,
            slot=self.slot[keep],
            serial=self.serial[keep],
            first=self.first[keep],
            starts=np.concatenate([[0], np.cumsum(np.diff(self.starts)[keep])]),
            source=None if self.source is None else self.source[keep],
            last=None if self.last is None else self.last[keep],
        )

    def locate(self, i: IntArray) -> Anchors:
        """The anchors number `i`, (B,) int64 in [0, len)."""
        run = self._run_of(i)
        t = i - self.starts.take(run)
        t = self.first.take(run) + (t if self.stride == 1 else t * self.stride)
        if self.last is not None:
            t = np.minimum(t, self.last.take(run))
        source = None if self.source is None else self.source.take(run)
        return Anchors(source, self.slot.take(run), self.serial.take(run), t)

    def _run_of(self, i: IntArray) -> IntArray:
        """The run that holds each anchor: looked up in `_guide`, then at most some steps on."""
        shift, guide, steps = self._guide
        if steps > MAX_GUIDE_STEPS:
            return np.searchsorted(self.starts, i, side="right") - 1
        run = guide.take(i >> shift).astype(np.int64)
        for _ in range(steps):
            run += i >= self.starts.take(run + 1)
        return run

    @cached_property
    def _guide(self) -> tuple[int, npt.NDArray[np.int32], int]:
        """(shift, the run that holds anchor b << shift for each b, the most runs that begin within such a block).

        About as many blocks as runs, or up to four times as many: four bytes each.
        """
        shift = max((len(self) // max(len(self.slot), 1)).bit_length() - 2, 0)
        begins = -(-self.starts >> shift)  # the first block that begins in the run, or behind it
        guide = np.repeat(np.arange(len(self.slot), dtype=np.int32), np.diff(begins))
        steps = int(np.diff(guide, append=len(self.slot) - 1).max(initial=0))
        return shift, guide, steps


@dataclass(frozen=True)
class Selection:
    """What is wanted of the episodes that exist.

    Args:
        view: how items are cut.
        filter_meta: meta field (or "episode_lens") -> condition; filter_fields: field -> condition on step t. A
            condition is a scalar (equal), a set or list (member), (low, high) (low ≤ x < high, None is open), or a
            callable from the column to bools. All must hold.
        min_episode_len: timesteps.
        top_k: (meta field, k): only the k episodes where it is highest.
        split: name -> fraction of the episodes, and `part`, the name of the one that is wanted; by `split_seed`. An
            episode's part follows from its serial alone, so it never changes.
    """

    view: View
    filter_meta: Mapping[str, Any] = field(default_factory=dict)
    filter_fields: Mapping[str, Any] = field(default_factory=dict)
    min_episode_len: int = 1
    top_k: tuple[str, int] | None = None
    split: Mapping[str, float] | None = None
    part: str | None = None
    split_seed: int = 0

    def check(self, schema: Schema) -> None:
        """Raise SchemaError for a name that was not declared, or a condition that can never be meant."""
        if self.top_k is not None:
            _check_top_k(self.top_k, schema)
        for name in self.filter_meta:
            if name != "episode_lens" and name not in schema.meta_fields:
                raise schema.unknown(name, "filter_meta", [*schema.meta_fields, "episode_lens"])
        for name in self.filter_fields:
            if name not in schema.fields:
                raise schema.unknown(name, "filter_fields", schema.fields)
            if schema.fields[name].shape not in ((), (1,)):
                raise SchemaError(
                    f"filter_fields: {name!r} has shape {schema.fields[name].shape}; filter by a scalar field"
                )
        if self.filter_fields and self.view.per_episode:
            raise SchemaError("filter_fields needs a view of timesteps; filter whole episodes by filter_meta")
        if self.split is not None:
            _check_split(self.split, self.part)
        elif self.part is not None:
            raise SchemaError(f"part: got {self.part!r} without split; give split={{{self.part!r}: 0.9, …}} too")

    def without_callables(self) -> Selection:
        """What can be pickled; see `Index` for the episodes it leaves open."""
        meta = {name: c for name, c in self.filter_meta.items() if not callable(c)}
        fields = {name: c for name, c in self.filter_fields.items() if not callable(c)}
        return replace(self, filter_meta=meta, filter_fields=fields)

    def describe(self) -> str:
        """The view and what narrows it, for an error."""
        narrowed = [f"{name}={getattr(self, name)!r}" for name in ("filter_meta", "filter_fields", "top_k", "split")]
        given = [text for text in narrowed if not text.endswith(("={}", "=None"))]
        return ", ".join([f"view {type(self.view).__name__}", f"min_episode_len={self.min_episode_len}", *given])

    @property
    def has_callables(self) -> bool:
        return any(callable(c) for c in [*self.filter_meta.values(), *self.filter_fields.values()])

    def index(self, sources: Sources) -> Index:
        """The anchors that exist in the tables as last read."""
        folders = list(zip(sources.storages, sources.tables, strict=True))
        slots = [self._slots(number, *folder) for number, folder in enumerate(folders)]
        if self.top_k is not None:
            slots = _top_k(slots, sources, *self.top_k)
        parts = [self._runs(*folder, chosen) for folder, chosen in zip(folders, slots, strict=True)]
        source = np.repeat(np.arange(len(parts)), [len(part.slot) for part in parts])
        slot, serial, first, count = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("slot", "serial", "first", "count")
        )
        lasts = [part.last for part in parts if part.last is not None]
        return Index(
            *(slot, serial, first),
            starts=np.concatenate([[0], np.cumsum(count)]),
            stride=self.view.stride,
            source=None if sources.single else source,
            last=np.concatenate(lasts) if lasts else None,
        )

    def _slots(self, number: int, storage: Storage, table: EpisodeTable) -> IntArray:
        """The slots of the episodes that pass, oldest first."""
        slots = table.visible
        keep = table.length[slots] >= self.min_episode_len
        for name, condition in self.filter_meta.items():
            keep &= _matches(_episode_column(storage, table, name, slots), condition, name)
        if self.split is not None:
            keep &= self._in_part(table.serial[slots], number)
        return slots[keep]

    def _runs(self, storage: Storage, table: EpisodeTable, slots: IntArray) -> _Runs:
        ended = _ended(storage, table, slots, self.view.terminal_field)
        schema, has_final = storage.layout.schema, table.flags[slots] & FINAL != 0
        spans = self.view.spans(schema, table.length[slots], has_final, ended)
        runs = _Runs(slots, table.serial[slots], spans.first, spans.count, spans.last)
        if self.filter_fields:
            return _filtered(runs, storage, self.filter_fields, self.view.stride)
        return runs.where(np.flatnonzero(spans.count > 0))

    def _in_part(self, serial: IntArray, number: int) -> BoolArray:
        """Where a hash of (seed, source, serial) falls into the part's share of [0, 1)."""
        shares = dict(self.split or {})
        names = list(shares)
        edges = np.concatenate([[0.0], np.cumsum([shares[name] for name in names])])
        edges[edges > 1 - 1e-9] = np.inf  # all that is left, though a sum of fractions may miss 1 by a bit
        start, stop = edges[names.index(self.part or "") :][:2]
        x = serial.astype(np.uint64) + np.uint64(
            (self.split_seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**64
        )
        # splitmix64's finaliser: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        u = (x ^ (x >> np.uint64(31))).astype(np.float64) / 2.0**64
        return np.asarray((u >= start) & (u < stop))


def _check_top_k(top_k: object, schema: Schema) -> None:
    if not (isinstance(top_k, tuple) and len(top_k) == 2 and type(top_k[1]) is int and top_k[1] > 0):
        raise SchemaError(f"top_k: got {top_k!r}, expected (meta field, how many), such as ('return', 10)")
    name = top_k[0]
    if name == "episode_lens":
        return
    if name not in schema.meta_fields:
        raise schema.unknown(name, "top_k", [*schema.meta_fields, "episode_lens"])
    if schema.meta_fields[name].shape not in ((), (1,)):
        raise SchemaError(f"top_k: {name!r} has shape {schema.meta_fields[name].shape}; give a field of one number")


def _check_split(split: object, part: str | None) -> None:
    fractions = list(split.values()) if isinstance(split, Mapping) else []
    if not fractions or part not in split or min(fractions) < 0 or sum(fractions) > 1 + 1e-9:  # type: ignore[operator]
        raise SchemaError(
            f"split: got {split!r} and part={part!r}, expected fractions of at most 1 in all and the name of one of "
            "them, such as split={'train': 0.9, 'val': 0.1}, part='train'"
        )


@dataclass(frozen=True)
class _Runs:
    """Runs of one folder, as in `Index`, with a count each."""

    slot: IntArray
    serial: IntArray
    first: IntArray
    count: IntArray
    last: IntArray | None

    def where(self, chosen: IntArray) -> _Runs:
        last = None if self.last is None else self.last[chosen]
        return _Runs(self.slot[chosen], self.serial[chosen], self.first[chosen], self.count[chosen], last)


def _episode_column(storage: Storage, table: EpisodeTable, name: str, slots: IntArray) -> Array:
    """A meta field, or the lengths as "episode_lens", of some slots."""
    if name == "episode_lens":
        return table.length[slots]
    return decode(storage.maps.meta[name][slots], storage.layout.schema.meta_fields[name].dtype)


def _ended(storage: Storage, table: EpisodeTable, slots: IntArray, name: str | None) -> BoolArray:
    """Which episodes ended by the field `name`: the record tells for `terminated`, else the last step is read."""
    if name in (None, "terminated") or name not in storage.layout.schema.fields:
        return np.asarray(table.flags[slots] & TERMINATED != 0)
    final = storage.layout.schema.fields[name].final
    rows = storage.first_row(slots, final) + table.length[slots] - 1
    values = storage.maps.rows[name][rows]
    return np.asarray(values.any(axis=tuple(range(1, values.ndim))))


def _matches(column: Array, condition: Any, name: str) -> BoolArray:
    """Where a condition holds, (n,) bool."""
    if callable(condition):
        result = np.asarray(condition(column))
        if result.shape != column.shape[:1] or result.dtype != bool:
            raise SchemaError(
                f"filter {name!r}: the callable gave {result.dtype} {result.shape}, expected bool {column.shape[:1]}"
            )
        return result
    flat = column.reshape(len(column), int(np.prod(column.shape[1:])))
    if flat.shape[1] != 1:
        raise SchemaError(f"filter {name!r}: it has shape {column.shape[1:]}; give a callable from the column to bools")
    values = flat[:, 0]
    if isinstance(condition, tuple):
        return _in_range(values, condition, name)
    if hasattr(condition, "item") and getattr(condition, "ndim", 1) == 0:
        condition = condition.item()  # a numpy or torch scalar
    if isinstance(condition, (set, frozenset, list, range, np.ndarray)):
        return _is_member(values, list(condition))
    return np.asarray(values == condition)


def _is_member(values: Array, members: list[Any]) -> BoolArray:
    if not members:
        return np.zeros(len(values), np.bool_)
    wanted = np.asarray(members)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            wanted = wanted.astype(values.dtype)  # 0.1 means the float32 next to it, as it does to `==`
    return np.isin(values, wanted)


def _in_range(values: Array, condition: tuple[Any, ...], name: str) -> BoolArray:
    if len(condition) != 2:
        raise SchemaError(f"filter {name!r}: got {condition!r}; a tuple is (low, high), use a set or list for members")
    low, high = condition
    keep = np.ones(len(values), np.bool_)
    if low is not None:
        keep &= values >= low
    if high is not None:
        keep &= values < high
    return keep


def _top_k(slots: list[IntArray], sources: Sources, name: str, k: int) -> list[IntArray]:
    """The k episodes of all folders where a meta field is highest; the newer one where equal."""
    folders = zip(sources.storages, sources.tables, slots, strict=True)
    columns = [_episode_column(storage, table, name, chosen) for storage, table, chosen in folders]
    values = np.concatenate([column.reshape(-1) for column in columns])
    best = np.zeros(len(values), np.bool_)
    best[np.argsort(values, kind="stable")[::-1][:k]] = True
    cuts = np.cumsum([len(chosen) for chosen in slots])[:-1]
    return [chosen[mask] for chosen, mask in zip(slots, np.split(best, cuts), strict=True)]


def _filtered(runs: _Runs, storage: Storage, filters: Mapping[str, Any], stride: int) -> _Runs:
    """Split runs into those whose every anchor passes the filters: one scan of the columns, in chunks."""
    runs = _split(runs, stride)
    pieces = [_scan(runs, chunk, storage, filters, stride) for chunk in _chunks(runs.count)]
    if not pieces:
        return runs
    run, first, count = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return replace(runs.where(run), first=first, count=count)


def _split(runs: _Runs, stride: int) -> _Runs:
    """The same anchors in runs of at most `CHUNK_STEPS`, as an episode may say that it has billions."""
    parts = -(-runs.count // CHUNK_STEPS)
    run = np.repeat(np.arange(len(parts)), parts)
    before = (np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)) * CHUNK_STEPS
    count = np.minimum(runs.count[run] - before, CHUNK_STEPS)
    return replace(runs.where(run), first=runs.first[run] + before * stride, count=count)


def _chunks(count: IntArray) -> Iterator[IntArray]:
    """Run numbers, in groups of some `CHUNK_STEPS` anchors."""
    group = np.cumsum(count) // CHUNK_STEPS
    return (np.flatnonzero(group == number) for number in np.unique(group))


def _scan(
    runs: _Runs, chunk: IntArray, storage: Storage, filters: Mapping[str, Any], stride: int
) -> tuple[IntArray, IntArray, IntArray]:
    """(run, first, count) of the runs that survive in a chunk."""
    part = runs.where(chunk)
    run = np.repeat(np.arange(len(chunk)), part.count)
    t = part.first[run] + (np.arange(len(run)) - np.repeat(np.cumsum(part.count) - part.count, part.count)) * stride
    if part.last is not None:
        t = np.minimum(t, part.last[run])
    keep = t >= 0
    for name, condition in filters.items():
        field = storage.layout.schema.fields[name]
        rows = storage.first_row(part.slot, field.final)[run] + np.maximum(t, 0)
        keep &= _matches(decode(storage.maps.rows[name].take(rows, axis=0), field.dtype), condition, name)
    joined = keep[1:] & keep[:-1] & (run[1:] == run[:-1])
    begins = np.flatnonzero(keep & ~np.concatenate([[False], joined]))
    ends = np.flatnonzero(keep & ~np.concatenate([joined, [False]]))
    return chunk[run[begins]], t[begins], ends - begins + 1
