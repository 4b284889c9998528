"""Count, mean, standard deviation, extremes and quantiles of fields, streamed over the store; normalisation by them.

Means and variances of parts are merged as Chan, Golub and LeVeque do (1983, "Algorithms for computing the sample
variance", eq. 1.5), in float64. Quantiles are those of a uniform sample of entries without replacement, interpolated
linearly: with K of them no rank is off by more than sqrt(ln(2/δ) / 2K) with probability 1 - δ (Dvoretzky, Kiefer,
Wolfowitz; Massart 1990); of at most K entries they are exact.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array, decode
from memmap_buffer.errors import NotEnoughDataError, SchemaError, WriterLostError
from memmap_buffer.format.episode_table import EpisodeTable
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.records import FINAL
from memmap_buffer.format.storage import Storage, crc32
from memmap_buffer.progress import progress
from memmap_buffer.schema import Schema

log = logging.getLogger("memmap_buffer")

BoolArray = npt.NDArray[np.bool_]
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
SAMPLE = 1 << 16  # entries of a sample: ranks within 0.0076 of the truth, but for one case in a thousand
SAMPLE_BYTES = 1 << 26
MISSED = 0.001  # δ
PART_BYTES = 1 << 22
NARROW = 8  # numbers of an entry: numpy reduces so short rows two to four times slower than long columns
FILE = "extra/statistics.json"
MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class FieldStatistics:
    """Of one field, every array of the field's shape, float64.

    Attributes:
        count: entries, final observations included. std: of the population. quantiles: q -> value. rank_error: how far
            the rank of a quantile may be off, with probability 0.999; 0 where they are exact.
    """

    count: int
    mean: Array
    std: Array
    min: Array
    max: Array
    quantiles: dict[float, Array]
    rank_error: float


@dataclass(frozen=True)
class Statistics:
    """Of the visible episodes at one moment.

    Attributes: fields: name -> its statistics, text and complex fields left out; last_serial: the newest episode
        described (of the last source); num_episodes.
    """

    fields: dict[str, FieldStatistics]
    last_serial: int
    num_episodes: int

    def __getitem__(self, name: str) -> FieldStatistics:
        return self.fields[name]

    def normalize(self, *names: str, by: str = "std", eps: float = 1e-6) -> Normalize:
        """A transform of batches to mean 0 and standard deviation 1, or to -1 … 1.

        Args:
            names: of which fields; default: all that are described.
            by: "std", "range" (minimum and maximum to -1 and 1) or "quantiles" (the lowest and the highest that there
                are to -1 and 1, not clipped).
            eps: an entry that varies less than this is only shifted.

        Raises: SchemaError: an unknown field or `by`.
        """
        if by not in ("std", "range", "quantiles"):
            raise SchemaError(f"by: got {by!r}, expected 'std', 'range' or 'quantiles'")
        unknown = [name for name in names if name not in self.fields]
        if unknown:
            raise SchemaError(f"normalize: got {unknown[0]!r}, there are statistics of {', '.join(self.fields)}")
        scales = {name: _shift_and_scale(self.fields[name], by, eps) for name in names or self.fields}
        return Normalize(scales)


@dataclass(frozen=True)
class Normalize:
    """A transform of batches: (x - shift) / scale, of each field, its `next_` and its `seq_`, computed in float64.

    What it gives has the floats of the field, float32 for whole numbers.

    Attributes: scales: dotted name -> (shift, scale).
    """

    scales: Mapping[str, tuple[Array, Array]]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch with the fields normalised; the given one stays as it is."""
        return _mapped(batch, self.scales, lambda x, shift, scale: (x - shift) / scale)

    def inverse(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The same backwards: x · scale + shift, of what a policy gave, say."""
        return _mapped(batch, self.scales, lambda x, shift, scale: x * scale + shift)


def statistics(
    storages: Sequence[Storage],
    names: Sequence[str] | None = None,
    quantiles: Sequence[float] = QUANTILES,
    *,
    seed: int = 0,
) -> Statistics:
    """The statistics of the visible episodes, field by field, in parts of a few megabytes.

    Args: storages: folders of equal fields. names: which; default: all of numbers. seed: of the samples.
    Raises: NotEnoughDataError: there are no episodes. SchemaError: an unknown field, one of text, or a bad quantile.
    """
    schema = storages[0].layout.schema
    if any(not 0 <= q <= 1 for q in quantiles):
        raise SchemaError(f"quantiles: got {tuple(quantiles)!r}, expected numbers from 0 to 1")
    chosen = _numeric(schema, names)
    tables = [storage.refresh() for storage in storages]
    if not any(map(len, tables)):
        raise NotEnoughDataError(f"{storages[0].path}: there are no episodes to describe", episodes=0)
    rng = np.random.default_rng(seed)
    parts = list(zip(storages, tables, strict=True))
    fields = {name: _describe(parts, name, quantiles, rng) for name in progress(chosen, "statistics")}
    last = int(tables[-1].serial[tables[-1].visible].max(initial=-1))
    return Statistics(fields, last, sum(map(len, tables)))


def described(table: EpisodeTable) -> dict[str, int]:
    """What tells the episodes that a table shows from any others.

    The change counter alone would not: it begins anew where a folder is overwritten, and in a copy of it. Nor would the
    records: they do not count the columns that were added to them.
    """
    return {"changes": table.changes, "records": crc32(np.ascontiguousarray(table.check[table.visible]))}


def kept(storage: Storage, names: Sequence[str] | None, quantiles: Sequence[float]) -> Statistics | None:
    """What `keep` wrote, if it describes these fields of the episodes that are visible now."""
    chosen, schema = _numeric(storage.layout.schema, names), storage.layout.schema.all
    try:
        document = json.loads(storage.folder.read(FILE, MAX_BYTES))
        if {key: document[key] for key in ("changes", "records")} != described(storage.refresh()):
            return None
        found = {name: _from_json(document["fields"][name], schema[name].shape) for name in chosen}
        last_serial, num_episodes = (int(document[key]) for key in ("last_serial", "num_episodes"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # none was kept of these, or by another program
    if any(tuple(one.quantiles) != tuple(quantiles) for one in found.values()):
        return None
    return Statistics(found, last_serial, num_episodes)


def keep(folder: Folder, found: Statistics, of: Mapping[str, int]) -> None:
    """Write them into the folder, whose lock is held; `of` is what `described` said of what they are of.

    Where that fails nothing is lost but time.
    """
    fields = {name: _to_json(one) for name, one in found.fields.items()}
    document = {**of, "last_serial": found.last_serial, "num_episodes": found.num_episodes, "fields": fields}
    try:
        folder.unlink(f"{FILE}.new", missing_ok=True)
        folder.write_new(f"{FILE}.new", json.dumps(document).encode(), sync=True)
        folder.rename(f"{FILE}.new", FILE)
    except (OSError, WriterLostError) as error:
        log.warning("%s: the statistics could not be kept in %s: %s", folder.path, FILE, error)


def _numeric(schema: Schema, names: Sequence[str] | None) -> tuple[str, ...]:
    numeric = [name for name, field in schema.all.items() if field.storage.kind in "biuf"]
    return tuple(numeric) if names is None else schema.require(names, "statistics", numeric)


def _describe(
    parts: Sequence[tuple[Storage, EpisodeTable]], name: str, quantiles: Sequence[float], rng: np.random.Generator
) -> FieldStatistics:
    field = parts[0][0].layout.schema.all[name]
    total = sum(count for storage, table in parts for _, count in _episodes(storage, table, name))
    running = RunningStatistics(field.shape, total, quantiles, seed=rng)
    for rows, good in (part for storage, table in parts for part in _parts(storage, table, name)):
        running.add(decode(rows, field.dtype), good)
    found = running.found()
    if found is None:
        raise NotEnoughDataError(f"field {name!r}: every episode was overwritten before it was read", episodes=0)
    return found


class RunningStatistics:
    """The statistics of entries that come in parts, from anywhere.

    Args: shape: of an entry. total: how many will come. quantiles: which. seed: of the sample for them, or a generator.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        total: int,
        quantiles: Sequence[float] = QUANTILES,
        *,
        seed: int | np.random.Generator = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        size = min(total, SAMPLE, max(1024, SAMPLE_BYTES // (8 * max(1, math.prod(shape)))))
        self._chosen = np.sort(rng.choice(total, size, replace=False, shuffle=False))
        self._moments, self._quantiles, self._exact = _Moments(shape), tuple(map(float, quantiles)), size == total
        self._sample: list[Array] = []
        self._seen = 0

    def add(self, rows: Array, good: BoolArray | None = None) -> None:
        """The next entries, (n, *shape), and which of them count; default: all."""
        values, good = np.asarray(rows, np.float64), np.ones(len(rows), bool) if good is None else good
        if good.any():
            self._moments.merge(values[good] if not good.all() else values)
        first, stop = np.searchsorted(self._chosen, [self._seen, self._seen + len(rows)])
        drawn = self._chosen[first:stop] - self._seen
        self._sample.append(values[drawn[good[drawn]]])
        self._seen += len(rows)

    def found(self) -> FieldStatistics | None:
        """The statistics; None where no entry counted."""
        moments = self._moments
        if not moments.count:
            return None
        sample = np.concatenate(self._sample)
        cut = dict(zip(self._quantiles, np.quantile(sample, self._quantiles, axis=0), strict=True))
        rank_error = 0.0 if self._exact else math.sqrt(math.log(2 / MISSED) / (2 * len(sample)))
        std = np.sqrt(moments.squares / moments.count)
        return FieldStatistics(moments.count, moments.mean, std, moments.min, moments.max, cut, rank_error)


class _Moments:
    """Count, mean, sum of squared differences from it, and extremes, of parts merged one after another."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean, self.squares = np.zeros(shape), np.zeros(shape)
        self.min, self.max = np.full(shape, np.inf), np.full(shape, -np.inf)

    def merge(self, values: Array) -> None:
        """Add (n, *shape) float64."""
        n, axis = len(values), 0
        if values[0].size <= NARROW:
            values, axis = np.ascontiguousarray(np.moveaxis(values, 0, -1)), -1
        mean = values.mean(axis=axis)
        both, away = self.count + n, mean - self.mean
        apart = values - np.expand_dims(mean, axis)
        self.squares = self.squares + (apart**2).sum(axis=axis) + away**2 * (self.count * n / both)
        self.mean = self.mean + away * (n / both)
        self.min = np.minimum(self.min, values.min(axis=axis))
        self.max = np.maximum(self.max, values.max(axis=axis))
        self.count = both


def _episodes(storage: Storage, table: EpisodeTable, name: str) -> Iterator[tuple[int, int]]:
    """(slot, entries of the field) of every visible episode."""
    schema = storage.layout.schema
    final = name in schema.final_names
    for slot in table.visible.tolist():
        count = int(table.length[slot]) + (final and bool(table.flags[slot] & FINAL))
        yield slot, 1 if name in schema.meta_fields else count


def _parts(storage: Storage, table: EpisodeTable, name: str) -> Iterator[tuple[Array, BoolArray]]:
    """(entries, which of them count) of the visible episodes; not those of one that is gone or in doubt."""
    schema = storage.layout.schema
    field, step = schema.all[name], max(1, PART_BYTES // max(1, schema.all[name].itemsize))
    source = storage.maps.meta[name] if name in schema.meta_fields else storage.maps.rows[name]
    for pieces in _pieces(_episodes(storage, table, name), step):
        slots = np.array([slot for slot, _, _ in pieces])
        first = slots if name in schema.meta_fields else storage.first_row(slots, field.final)
        storage.trust(slots)  # what fails is not shown any more
        good = storage.table.shows(slots, table.serial[slots])
        begun = zip(first.tolist(), pieces, strict=True)
        rows = np.concatenate([source[row + start : row + stop] for row, (_, start, stop) in begun])
        good &= storage.unmoved(slots, table.serial[slots], table.generation[slots], table.changes)
        yield rows, np.repeat(good, [stop - start for _, start, stop in pieces])


def _pieces(episodes: Iterable[tuple[int, int]], step: int) -> Iterator[list[tuple[int, int, int]]]:
    """Lists of (slot, start, stop) that hold `step` entries at most."""
    part: list[tuple[int, int, int]] = []
    size = 0
    for slot, count in episodes:
        for start in range(0, count, step):
            stop = min(count, start + step)
            if size + stop - start > step:
                yield part
                part, size = [], 0
            part.append((slot, start, stop))
            size += stop - start
    if part:
        yield part


def _shift_and_scale(found: FieldStatistics, by: str, eps: float) -> tuple[Array, Array]:
    low, high = found.min, found.max
    if by == "quantiles":
        low, high = found.quantiles[min(found.quantiles)], found.quantiles[max(found.quantiles)]
    shift, scale = (found.mean, found.std) if by == "std" else ((low + high) / 2, (high - low) / 2)
    return shift, np.where(scale > eps, scale, 1.0)


def _mapped(batch: Mapping[str, Any], scales: Mapping[str, tuple[Array, Array]], change: Any) -> dict[str, Any]:
    """The batch with each field of `scales` changed, wherever it stands in it."""
    out = dict(batch)
    for name, (shift, scale) in scales.items():
        *groups, leaf = name.split(".")
        for prefix in ("", "next_", "seq_"):
            path = [f"{prefix}{groups[0]}", *groups[1:], leaf] if groups else [f"{prefix}{leaf}"]
            _change(out, path, lambda x, s=shift, c=scale: _computed(x, s, c, change))
    return out


def _change(place: dict[str, Any], path: list[str], change: Any) -> None:
    """Change what stands at a path, if anything does; dicts on the way are copied, not changed."""
    if path[0] not in place:
        return
    if len(path) > 1:
        place[path[0]] = dict(place[path[0]])
        _change(place[path[0]], path[1:], change)
    else:
        place[path[0]] = change(place[path[0]])


def _computed(value: Any, shift: Array, scale: Array, change: Any) -> Any:
    """What `change` makes of a tensor or array in float64, so that a large mean takes no digits; in its own floats."""
    if isinstance(value, np.ndarray):
        return change(value.astype(np.float64), shift, scale).astype(value.dtype if value.dtype.kind == "f" else "f4")
    wide = value.float() if value.device.type == "mps" else value.double()  # which has no float64
    out = change(wide, wide.new_tensor(shift), wide.new_tensor(scale))
    return out.to(value.dtype) if value.is_floating_point() else out.float()


def _to_json(found: FieldStatistics) -> dict[str, Any]:
    arrays = {key: getattr(found, key).tolist() for key in ("mean", "std", "min", "max")}
    cut = [[q, value.tolist()] for q, value in found.quantiles.items()]
    return {"count": found.count, **arrays, "quantiles": cut, "rank_error": found.rank_error}


def _from_json(spec: Mapping[str, Any], shape: tuple[int, ...]) -> FieldStatistics:
    mean, std, low, high = (_array(spec[key], shape) for key in ("mean", "std", "min", "max"))
    cut = {float(q): _array(value, shape) for q, value in spec["quantiles"]}
    return FieldStatistics(int(spec["count"]), mean, std, low, high, cut, float(spec["rank_error"]))


def _array(value: Any, shape: tuple[int, ...]) -> Array:
    array = np.array(value, np.float64)
    if array.shape != shape:
        raise ValueError(f"got shape {array.shape}, expected {shape}")
    return array
