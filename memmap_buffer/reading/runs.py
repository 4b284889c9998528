"""Runs of anchors in one folder, and which of them pass the filters on timesteps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memmap_buffer.reading.conditions import matches
from memmap_buffer.store.storage import Storage
from memmap_buffer.store.table import IntArray
from memmap_buffer.values import decode

CHUNK_STEPS = 1 << 20  # steps whose filter columns are looked at together


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
        last = None if self.last is None or others.last is None else _both(self.last, others.last)
        slot, serial = _both(self.slot, others.slot), _both(self.serial, others.serial)
        runs = Runs(slot, serial, _both(self.first, others.first), _both(self.count, others.count), last)
        ascending = not (len(self.slot) and len(others.slot)) or self.serial[-1] < others.serial[0]
        return runs if ascending else runs.where(np.argsort(serial, kind="stable"))


def _both(a: IntArray, b: IntArray) -> IntArray:
    return np.concatenate([a, b]) if len(b) else a


def filtered(runs: Runs, storage: Storage, filters: Mapping[str, Any], stride: int) -> Runs:
    """Split runs into those whose every anchor passes the filters: one scan of the columns, in chunks."""
    runs = _split(runs, stride)
    pieces = [_scan(runs, chunk, storage, filters, stride) for chunk in _chunks(runs.count)]
    if not pieces:
        return runs
    run, first, count = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return replace(runs.where(run), first=first, count=count)


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
    keep = t >= 0
    for name, condition in filters.items():
        field = storage.layout.schema.fields[name]
        rows = storage.first_row(part.slot, field.final)[run] + np.maximum(t, 0)
        keep &= matches(decode(storage.maps.rows[name].take(rows, axis=0), field.dtype), condition, name)
    joined = keep[1:] & keep[:-1] & (run[1:] == run[:-1])
    begins = np.flatnonzero(keep & ~np.concatenate([[False], joined]))
    ends = np.flatnonzero(keep & ~np.concatenate([joined, [False]]))
    return chunk[run[begins]], t[begins], ends - begins + 1
