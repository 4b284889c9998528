"""Count, mean, standard deviation, extremes and quantiles of fields, read block by block; normalisation by them.

`api.buffer` and `api.concat` call `statistics`, which makes a `RunningStatistics` for each field; `kept_statistics`
stores them in the folder. Means and variances of blocks are merged as in Chan, Golub and LeVeque (1983, "Algorithms for
computing the sample variance", eq. 1.5), in float64. Quantiles are those of a uniform sample of K entries without
replacement, interpolated linearly: no rank is off by more than sqrt(ln(2/δ) / 2K) with probability 1 - δ (Dvoretzky,
Kiefer, Wolfowitz; Massart 1990). They are exact for at most K entries.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memmap_buffer.choices import QUANTILES, Scaling, check_choice
from memmap_buffer.dtypes import Array, decode
from memmap_buffer.errors import NotEnoughDataError, SchemaError, WriterLostError
from memmap_buffer.format.checksums import crc32
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.records import FINAL
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.weights import NumberedFolder
from memmap_buffer.progress import progress
from memmap_buffer.schema import Schema, flatten
from memmap_buffer.views.anchors import BoolArray

log = logging.getLogger("memmap_buffer")

SAMPLE = 1 << 16  # the most entries of a sample: ranks are off by 0.0076 at most, but for one case in a thousand
SAMPLE_BYTES = 1 << 26  # the most bytes of a sample; but 1024 entries it has at least
DELTA = 0.001  # the probability that a rank is off by more than `rank_error`
BLOCK_BYTES = 1 << 22  # bytes that are read at a time
NARROW = 8  # entries of up to so many numbers are transposed: numpy reduces short rows two to four times slower
FILE = "extra/statistics.json"
MAX_BYTES = 1 << 28  # the most bytes that are read of `FILE`


@dataclass(frozen=True)
class FieldStatistics:
    """The statistics of one field, each array of the field's shape, float64.

    Attributes:
        count: the number of entries: shown timesteps, with final observations; of a meta field, episodes.
        mean: the mean of the entries.
        std: the standard deviation of the population, divided by `count`.
        min: the smallest values.
        max: the largest values.
        quantiles: q -> value.
        rank_error: the rank of a quantile is off by at most this, with probability 0.999; 0 where they are exact.
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
    """The statistics of the episodes that were visible at one moment.

    Attributes:
        fields: name -> its statistics; fields of text, lists and complex numbers are left out.
        last_serial: the serial of the newest of these episodes (in the last folder).
        num_episodes: the number of these episodes.
    """

    fields: dict[str, FieldStatistics]
    last_serial: int
    num_episodes: int

    def __repr__(self) -> str:
        return f"<Statistics of {self.num_episodes} episodes, the newest {self.last_serial}: {', '.join(self.fields)}>"

    def __getitem__(self, name: str) -> FieldStatistics:
        return self.fields[name]

    def normalize(
        self, *names: str, by: Scaling = "std", eps: float = 1e-6, add_eps: bool = False, keep_padding: bool = False
    ) -> Normalize:
        """A transform of batches to mean 0 and standard deviation 1, or to -1 … 1.

        Args:
            names: the fields; default: all that have statistics.
            by: "std", "range" (minimum and maximum become -1 and 1) or "quantiles" (the lowest and the highest quantile
                become -1 and 1; values beyond are not clipped).
            eps: numbers of a field whose scale is not above this are only shifted.
            add_eps: every number is divided by its scale + `eps` instead, as CORL and d3rlpy do.
            keep_padding: timesteps that do not exist stay 0; see `Normalize`.

        Returns:
            The transform.

        Raises:
            SchemaError: a field or `by` is unknown.
        """
        check_choice("by", by, Scaling)
        unknown = [name for name in names if name not in self.fields]
        if unknown:
            raise SchemaError(f"normalize: got {unknown[0]!r}, there are statistics of {', '.join(self.fields)}")
        scales = {name: _shift_and_scale(self.fields[name], by, eps, add_eps) for name in names or self.fields}
        return Normalize(scales, keep_padding)


@dataclass(frozen=True)
class Normalize:
    """A transform of batches: (x - shift) / scale for each field, its `next_` and its `seq_`, computed in float64.

    The results have the field's dtype; those of whole numbers are float32.

    Attributes:
        scales: dotted name -> (shift, scale), each of the field's shape.
        keep_padding: timesteps that do not exist are 0 afterwards. Which ones, the batch's `_mask`, `_mask_<field>`,
            `_lens` or `n_step_lens` tells.
    """

    scales: Mapping[str, tuple[Array, Array]]
    keep_padding: bool = False

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A new batch with the fields normalised.

        Args:
            batch: key -> tensor or array (B, …); groups as nested dicts.

        Raises:
            SchemaError: `keep_padding`, and the batch does not tell which of its timesteps exist.
        """
        return self._each(batch, lambda x, shift, scale: (x - shift) / scale, keep_padding=self.keep_padding)

    def inverse(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A new batch with the fields scaled back: x · scale + shift.

        Args:
            batch: key -> tensor or array, such as a policy's actions.
        """
        return self._each(batch, lambda x, shift, scale: x * scale + shift, keep_padding=False)

    def _each(self, batch: dict[str, Any], change: Callable[..., Any], *, keep_padding: bool) -> dict[str, Any]:
        """A copy of a batch in which `change`(x, shift, scale) replaces each field, its `next_` and its `seq_`."""
        values, out = flatten(batch), batch
        for name, (shift, scale) in self.scales.items():
            for prefix in ("", "next_", "seq_"):
                if (key := prefix + name) in values:
                    new = _computed(values[key], shift, scale, change)
                    new = _with_zeros(values, prefix, name, np.ndim(shift), new) if keep_padding else new
                    out = _replaced(out, key, new)
        return dict(out)


def statistics(
    folders: Sequence[NumberedFolder],
    names: Sequence[str] | None = None,
    quantiles: Sequence[float] = QUANTILES,
    *,
    seed: int = 0,
    schema: Schema | None = None,
) -> Statistics:
    """The statistics of the episodes that the tables of folders show, read field by field in blocks of a few megabytes.

    Args:
        folders: (number, folder, episode table) of each; the fields must be equal.
        names: the fields; default: all of real numbers.
        quantiles: numbers from 0 to 1.
        seed: fixes the samples.
        schema: the fields that are read; default: the schema of the first folder.

    Returns:
        The statistics.

    Raises:
        NotEnoughDataError: there are no episodes.
        SchemaError: a field is unknown or holds no real numbers, or a quantile is out of range.
    """
    schema = schema or folders[0][1].layout.schema
    if any(not 0 <= q <= 1 for q in quantiles):
        raise SchemaError(f"quantiles: got {tuple(quantiles)!r}, expected numbers from 0 to 1")
    chosen = _numeric(schema, names)
    tables = [table for *_, table in folders]
    if not any(map(len, tables)):
        raise NotEnoughDataError(f"{folders[0][1].path}: there are no episodes to describe", episodes=0)
    rng = np.random.default_rng(seed)
    fields = {name: _of_field(folders, name, quantiles, rng) for name in progress(chosen, "statistics")}
    last = int(tables[-1].serial[tables[-1].visible].max(initial=-1))
    return Statistics(fields, last, sum(map(len, tables)))


def fingerprint(table: EpisodeTable) -> dict[str, int]:
    """Numbers by which it is known whether two tables show the same episodes.

    The change counter alone is not enough: it begins anew in a folder that is overwritten, and in a copy. Nor are the
    records: their checks do not change when a field is added.
    """
    return {"changes": table.changes, "records": crc32(np.ascontiguousarray(table.check[table.visible]))}


def kept_statistics(
    storage: Storage,
    names: Sequence[str] | None,
    quantiles: Sequence[float],
    *,
    seed: int,
    may_keep: Callable[[], bool],
) -> Statistics:
    """The statistics of a folder: the stored ones if its episodes are still the same, else computed and stored.

    Args:
        storage, names, quantiles, seed: see `statistics`.
        may_keep: called after the computation; true if this process holds the lock of the folder, so that it may write.
    """
    if (kept := _kept(storage, names, quantiles)) is not None:
        return kept
    table = storage.refresh()
    result = statistics([(0, storage, table)], names, quantiles, seed=seed)
    if may_keep():
        _keep(storage.folder, result, fingerprint(table))
    return result


def _kept(storage: Storage, names: Sequence[str] | None, quantiles: Sequence[float]) -> Statistics | None:
    """The stored statistics, if they have these fields and are of the episodes that are visible now; else None."""
    chosen, schema = _numeric(storage.layout.schema, names), storage.layout.schema.all
    try:
        document = json.loads(storage.folder.read(FILE, MAX_BYTES))
        if {key: document[key] for key in ("changes", "records")} != fingerprint(storage.refresh()):
            return None
        fields = {name: _from_json(document["fields"][name], schema[name].shape) for name in chosen}
        last_serial, num_episodes = (int(document[key]) for key in ("last_serial", "num_episodes"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # no statistics of these fields are stored, or another program wrote them
    if any(tuple(field.quantiles) != tuple(quantiles) for field in fields.values()):
        return None
    return Statistics(fields, last_serial, num_episodes)


def _keep(folder: Folder, result: Statistics, episodes: Mapping[str, int]) -> None:
    """Write statistics, and the fingerprint of their episodes, to `FILE`; an error is only logged."""
    fields = {name: vars(field) | {"quantiles": [*field.quantiles.items()]} for name, field in result.fields.items()}
    document = {**episodes, "last_serial": result.last_serial, "num_episodes": result.num_episodes, "fields": fields}
    try:
        folder.replace_file(FILE, json.dumps(document, default=np.ndarray.tolist).encode())
    except (OSError, WriterLostError) as error:
        log.warning("%s: the statistics could not be kept in %s: %s", folder.path, FILE, error)


def _numeric(schema: Schema, names: Sequence[str] | None) -> tuple[str, ...]:
    numeric = [name for name, field in schema.all.items() if field.storage.kind in "biuf"]
    for name in {*(names or ())} & schema.all.keys() - {*numeric}:
        holds = {"O": "lists", "U": "text"}.get(schema.all[name].storage.kind, "complex numbers")
        raise SchemaError(
            f"statistics: field {name!r} holds {holds}, and only fields of real numbers of one shape have statistics; "
            "leave it out"
        )
    return tuple(numeric) if names is None else schema.require(names, "statistics", numeric)


def _of_field(
    folders: Sequence[NumberedFolder], name: str, quantiles: Sequence[float], rng: np.random.Generator
) -> FieldStatistics:
    field = folders[0][1].layout.schema.all[name]
    total = sum(int(_entries(storage, table, name).sum()) for _, storage, table in folders)
    running = RunningStatistics(field.shape, total, quantiles, seed=rng)
    for _, storage, table in folders:
        for rows, valid in _read_blocks(storage, table, name):
            running.add(decode(rows, field.dtype), valid)
    result = running.result()
    if result is None:
        raise NotEnoughDataError(f"field {name!r}: every episode was overwritten before it was read", episodes=0)
    return result


class RunningStatistics:
    """The statistics of the entries of a field, which are added block by block.

    Args:
        shape: the shape of an entry.
        total: the number of entries that will be added.
        quantiles: numbers from 0 to 1.
        seed: fixes the sample for the quantiles; or a generator.
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
        self._quantiles, self._exact = tuple(map(float, quantiles)), size == total
        self._sample: list[Array] = []
        self._seen = self._count = 0  # entries, and those that count
        self._mean, self._squares = np.zeros(shape), np.zeros(shape)  # squared deviations from the mean, their sum
        self._min, self._max = np.full(shape, np.inf), np.full(shape, -np.inf)

    def __repr__(self) -> str:
        return f"<RunningStatistics: {self._seen} entries so far, of {len(self._chosen)} a sample is kept>"

    def add(self, rows: Array, valid: BoolArray | None = None) -> None:
        """Add the next entries.

        Args:
            rows: (n, *shape).
            valid: (n,) bool, true for the entries that count; default: all.
        """
        values, valid = np.asarray(rows, np.float64), np.ones(len(rows), bool) if valid is None else valid
        if valid.any():
            with np.errstate(over="ignore", invalid="ignore"):  # of NaN, infinities, and the largest numbers
                self._merge(values[valid] if not valid.all() else values)
        first, stop = np.searchsorted(self._chosen, [self._seen, self._seen + len(rows)])
        drawn = self._chosen[first:stop] - self._seen
        self._sample.append(values[drawn[valid[drawn]]])
        self._seen += len(rows)

    def result(self) -> FieldStatistics | None:
        """The statistics of the entries so far; None if none counted."""
        if not self._count:
            return None
        sample = np.concatenate(self._sample)
        with np.errstate(over="ignore", invalid="ignore"):
            quantiles = dict(zip(self._quantiles, np.quantile(sample, self._quantiles, axis=0), strict=True))
        rank_error = 0.0 if self._exact else math.sqrt(math.log(2 / DELTA) / (2 * len(sample)))
        std = np.sqrt(self._squares / self._count)
        return FieldStatistics(self._count, self._mean, std, self._min, self._max, quantiles, rank_error)

    def _merge(self, values: Array) -> None:
        """Merge the mean, the deviations and the extremes of a block, (n, *shape) float64, n > 0."""
        n, axis = len(values), 0
        if values[0].size <= NARROW:
            values, axis = np.ascontiguousarray(np.moveaxis(values, 0, -1)), -1
        mean = values.mean(axis=axis)
        total, shift = self._count + n, mean - self._mean
        deviations = values - np.expand_dims(mean, axis)
        self._squares = self._squares + (deviations**2).sum(axis=axis) + shift**2 * (self._count * n / total)
        self._mean = self._mean + shift * (n / total)
        self._min = np.minimum(self._min, values.min(axis=axis))
        self._max = np.maximum(self._max, values.max(axis=axis))
        self._count = total


def _entries(storage: Storage, table: EpisodeTable, name: str) -> IntArray:
    """(E,) int64: the number of entries of a field that each visible episode shows."""
    schema, slots = storage.layout.schema, table.visible
    if name in schema.meta_fields:
        return np.ones(len(slots), np.int64)
    counts = table.length[slots] - table.start[slots]
    return counts + (table.flags[slots] & FINAL != 0) if schema.fields[name].final else counts


def _read_blocks(storage: Storage, table: EpisodeTable, name: str) -> Iterator[tuple[Array, BoolArray]]:
    """(entries (n, *field) as stored, (n,) whether each is valid), block by block: not if damaged or overwritten."""
    schema, counts = storage.layout.schema, _entries(storage, table, name)
    field, meta, stops = schema.all[name], storage.maps.meta.get(name), np.cumsum(counts)
    size = max(1, BLOCK_BYTES // max(1, field.itemsize))
    for begin in range(0, int(counts.sum()), size):  # of all entries of all episodes, one after the other
        first, last = np.searchsorted(stops, [begin, begin + size - 1], "right")
        slots, before = table.visible[first : last + 1], (stops - counts)[first : last + 1]
        start = np.maximum(begin - before, 0)
        num = np.minimum(begin + size - before, counts[first : last + 1]) - start
        row = slots if meta is not None else storage.first_row(slots, field.final) + table.start[slots]
        storage.trust(slots)  # hides an episode that fails its check
        valid = storage.table.shows(slots, table.serial[slots])
        parts = zip(slots.tolist(), map(slice, (row + start).tolist(), (row + start + num).tolist()), strict=True)
        rows = np.concatenate(
            [
                storage.read_rows(name, part, slot, table.serial[slot]) if meta is None else meta[part]
                for slot, part in parts
            ]
        )
        valid &= storage.unmoved(slots, table.serial[slots], table.generation[slots], table.changes)
        yield rows, np.repeat(valid, num)


def _shift_and_scale(field: FieldStatistics, by: str, eps: float, add_eps: bool) -> tuple[Array, Array]:
    low, high = field.min, field.max
    if by == "quantiles":
        low, high = field.quantiles[min(field.quantiles)], field.quantiles[max(field.quantiles)]
    shift, scale = (field.mean, field.std) if by == "std" else ((low + high) / 2, (high - low) / 2)
    return shift, scale + eps if add_eps else np.where(scale > eps, scale, 1.0)


def _replaced(batch: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A copy of a batch with another value for a dotted name; all else stays, whatever transforms have put in."""
    key, _, rest = name.partition(".")
    return {**batch, key: _replaced(batch[key], rest, value)} if rest and name not in batch else {**batch, name: value}


def _with_zeros(batch: Mapping[str, Any], prefix: str, name: str, axes: int, values: Any) -> Any:
    """Values (B, T, *field) with zeros at timesteps that do not exist; ragged values, and those without T, as they are.

    Args: batch: dotted name -> value. axes: the number of axes of the field.
    """
    if isinstance(values, list) or getattr(values, "is_nested", False) or values.ndim != axes + 2:
        return values
    field_mask = None if prefix else batch.get(f"_mask_{name}")
    mask = batch.get("_mask") if field_mask is None and not prefix else field_mask
    if mask is None or mask.shape[1] != values.shape[1]:
        lens = batch.get("n_step_lens" if prefix else "_lens")
        steps = 0 if lens is None else int(lens.max()) if mask is None else mask.shape[1]
        finals = not prefix and "_has_final" in batch and values.shape[1] > steps  # with final observations
        if lens is None or (finals and values.shape[1] > steps + 1):
            raise SchemaError(
                f"normalize: keep_padding: the batch does not tell which timesteps of {prefix + name!r} exist; leave "
                "keep_padding out, or let it have `_mask` or `_lens`, as windows, offsets and whole episodes do"
            )
        lens = lens.reshape(-1) + batch["_has_final"] * 1 if finals else lens.reshape(-1)
        positions = np.arange(values.shape[1])
        mask = (positions if isinstance(values, np.ndarray) else lens.new_tensor(positions)) < lens[:, None]
    values[~mask] = 0  # `values` is a copy already
    return values


def _computed(value: Any, shift: Array, scale: Array, change: Any) -> Any:
    """`change`(value, shift, scale) of a tensor or array, in float64, so that a large mean costs no digits.

    The result is cast back to the dtype of the value, or from whole numbers to float32.
    """
    if isinstance(value, list):  # sequences without padding
        return type(value)(_computed(rows, shift, scale, change) for rows in value)
    if isinstance(value, np.ndarray):
        return change(value.astype(np.float64), shift, scale).astype(value.dtype if value.dtype.kind == "f" else "f4")
    wide = value.float() if value.device.type == "mps" else value.double()  # MPS has no float64
    # A jagged tensor of torch 2.4 cannot be combined with a tensor that has no axes.
    result = change(wide, *(wide.new_tensor(operand) if operand.ndim else operand.item() for operand in (shift, scale)))
    return result.to(value.dtype) if value.is_floating_point() else result.float()


def _from_json(spec: Mapping[str, Any], shape: tuple[int, ...]) -> FieldStatistics:
    mean, std, low, high = (_array(spec[key], shape) for key in ("mean", "std", "min", "max"))
    quantiles = {float(q): _array(value, shape) for q, value in spec["quantiles"]}
    return FieldStatistics(int(spec["count"]), mean, std, low, high, quantiles, float(spec["rank_error"]))


def _array(value: Any, shape: tuple[int, ...]) -> Array:
    array = np.array(value, np.float64)
    if array.shape != shape:
        raise ValueError(f"got shape {array.shape}, expected {shape}")
    return array
