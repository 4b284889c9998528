"""Runs of anchors in one folder, and which of them pass the filters on timesteps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array, decode
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.conditions import matches

CHUNK_STEPS = 1 << 20  # steps whose filter columns are looked at together
START = "_start"  # in filters: the anchor's timestep itself, as `Window` calls it in a batch
VALID = "valid"  # the field that `set_valid` writes


@dataclass(frozen=True)
class Runs:
    """Runs of one folder, as in `Index`, with a count each."""

    slot: IntArray
    serial: IntArray
    first: IntArray
    count: IntArray
    last: IntArray | None

    def where(self, chosen: IntArray | slice) -> Runs:
        last = None if self.last is None else self.last[chosen]
        return Runs(self.slot[chosen], self.serial[chosen], self.first[chosen], self.count[chosen], last)

    def joined(self, others: Runs) -> Runs:
        """These and others, of other episodes, in the order of their serials."""
        if not len(self.slot) or not len(others.slot):
            return self if len(self.slot) else others
        last = None if self.last is None or others.last is None else _both(self.last, others.last)
        slot, serial = _both(self.slot, others.slot), _both(self.serial, others.serial)
        runs = Runs(slot, serial, _both(self.first, others.first), _both(self.count, others.count), last)
        ascending = not (len(self.slot) and len(others.slot)) or self.serial[-1] < others.serial[0]
        return runs if ascending else runs.where(np.argsort(serial, kind="stable"))


def _both(a: IntArray, b: IntArray) -> IntArray:
    return np.concatenate([a, b]) if len(b) else a


def filtered(runs: Runs, storage: Storage, filters: Mapping[str, Any], stride: int) -> Runs:
    """Split runs into those whose every anchor passes the filters: one scan of the columns, in chunks."""
    bounds = _bounds(filters.get(START)) if runs.last is None else None
    if bounds is not None:  # of any number of timesteps at no cost
        runs = _between(runs, *bounds, stride)
        filters = {name: condition for name, condition in filters.items() if name != START}
        if not filters:
            return runs
    runs = _split(runs, stride)
    pieces = [_scan(runs, chunk, storage, filters, stride) for chunk in _chunks(runs.count)]
    if not pieces:
        return runs
    run, first, count = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return replace(runs.where(run), first=first, count=count)


def _bounds(condition: Any) -> tuple[int | None, int | None] | None:
    """The whole numbers low ≤ x < high that a condition on the timestep keeps, if it is so plain."""
    if type(condition) is int:
        return condition, condition + 1
    if isinstance(condition, tuple) and len(condition) == 2 and {type(end) for end in condition} <= {int, type(None)}:
        return condition
    return None


def _between(runs: Runs, low: int | None, high: int | None, stride: int) -> Runs:
    """The anchors with low ≤ t < high."""
    begin = 0 if low is None else np.clip(-(-(low - runs.first) // stride), 0, runs.count)
    end = runs.count if high is None else np.clip(-(-(high - runs.first) // stride), begin, runs.count)
    kept = replace(runs, first=runs.first + begin * stride, count=np.asarray(end - begin))
    return kept.where(np.flatnonzero(kept.count > 0))


def _split(runs: Runs, stride: int) -> Runs:
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
    runs: Runs, chunk: IntArray, storage: Storage, filters: Mapping[str, Any], stride: int
) -> tuple[IntArray, IntArray, IntArray]:
    """(run, first, count) of the runs that survive in a chunk."""
    part = runs.where(chunk)
    run = np.repeat(np.arange(len(chunk)), part.count)
    t = part.first[run] + (np.arange(len(run)) - np.repeat(np.cumsum(part.count) - part.count, part.count)) * stride
    if part.last is not None:
        t = np.minimum(t, part.last[run])
    keep = np.ones(len(t), np.bool_)
    for name, condition in filters.items():
        keep &= matches(_column(storage, name, part.slot[run], t), condition, name)
        if name not in (START, VALID):
            keep &= t >= 0  # there is no step
    joined = keep[1:] & keep[:-1] & (run[1:] == run[:-1])
    begins = np.flatnonzero(keep & ~np.concatenate([[False], joined]))
    ends = np.flatnonzero(keep & ~np.concatenate([joined, [False]]))
    return chunk[run[begins]], t[begins], ends - begins + 1


def _column(storage: Storage, name: str, slot: IntArray, t: IntArray) -> Array:
    """A field, or the timesteps themselves as "_start", at (slot, t); before an episode its first step stands."""
    if name == START:
        return t
    field = storage.layout.schema.fields[name]
    rows = storage.first_row(slot, field.final) + np.maximum(t, 0)
    return decode(storage.maps.rows[name].take(rows, axis=0), field.dtype)
