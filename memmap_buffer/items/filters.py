"""Filters: conditions on columns of episodes and of timesteps, and the runs of anchors that pass them.

`Selection` calls `matches` for each condition of `filter_meta`, and `filtered` for those of `filter_fields`. Numbers
are compared exactly: a condition is first brought into the dtype of the column (`_rounded`, `_least_from`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array, decode
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.storage import Storage
from memmap_buffer.views.anchors import BoolArray, Runs

CHUNK_STEPS = 1 << 20  # about the number of steps whose columns are read at once
START = "_start"  # in filters: the anchor's timestep itself, by the key that `Window` gives it in a batch
VALID = "valid"  # the field that `set_valid` writes


def matches(column: Array, condition: Any, name: str) -> BoolArray:
    """(n,) whether a condition holds for each entry of a column.

    Args:
        column: (n, …) numbers, bools or text.
        condition: see `Selection`, `filter_meta`.
        name: the name of the column, for errors.

    Raises:
        SchemaError: the condition does not fit the column.
    """
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
    if values.dtype == bool:
        values = values.view(np.uint8)
    if hasattr(condition, "tolist"):
        condition = condition.tolist()  # a numpy or torch array, or scalar
    several = isinstance(condition, (tuple, set, frozenset, list, range))
    members = [each.item() if hasattr(each, "item") else each for each in (condition if several else [condition])]
    if isinstance(condition, tuple):
        return _in_range(values, members, condition, name)
    _require_alike(values, members, condition, name)
    return _is_member(values, members)


def _require_alike(values: Array, members: list[Any], condition: Any, name: str) -> None:
    """Raise SchemaError: the condition is not of text, or numbers, as the column is. `members`: its values."""
    text = values.dtype.kind == "U"
    if not all(isinstance(member, str if text else Number) for member in members):
        kind = "text" if text else f"numbers ({values.dtype})"
        raise SchemaError(f"filter {name!r}: got {condition!r}, but it holds {kind}; give such, or a callable")
    if text and any(member.endswith("\0") for member in members):
        raise SchemaError(f"filter {name!r}: got {condition!r}; no text that is stored ends in NUL, so strip it")


def _is_member(values: Array, members: list[Any]) -> BoolArray:
    """(n,) whether each of `values` (n,) equals a member, exactly."""
    if values.dtype.kind in "biuf":  # leave out members that the dtype cannot hold: they would be rounded to it
        real = [_rounded(member.real, values.dtype) for member in members if not member.imag]
        exact = [least for member in real if (least := _least_from(member, values.dtype)) == member]
        members = [member for member in exact if values.dtype.kind == "f" or isinstance(member, int)]
    if not members:
        return np.zeros(len(values), np.bool_)
    wanted = np.array(members) if values.dtype.kind == "U" else np.array(members, values.dtype)
    return np.isin(values, wanted) if len(wanted) > 1 else np.asarray(values == wanted[0])


def _in_range(values: Array, ends: list[Any], condition: tuple[Any, ...], name: str) -> BoolArray:
    """(n,) whether low ≤ x < high for each of `values` (n,), exactly; `ends` are (low, high), None is open."""
    if len(ends) != 2:
        raise SchemaError(f"filter {name!r}: got {condition!r}; a tuple is (low, high), use a set or list for members")
    bounds = [end for end in ends if end is not None]
    _require_alike(values, bounds, condition, name)
    if values.dtype.kind == "c" or any(isinstance(end, complex) for end in bounds):
        raise SchemaError(
            f"filter {name!r}: got {condition!r}, and complex numbers have no order; give a callable from the column "
            "to bools"
        )
    if values.dtype.kind != "U":
        ends = [None if end is None else _least_from(_rounded(end, values.dtype), values.dtype) for end in ends]
    low, high = ends
    keep = np.ones(len(values), np.bool_)
    if low is not None:
        keep &= values >= low
    if high is not None:
        keep &= values < high
    return keep


def _rounded(number: Any, dtype: np.dtype[Any]) -> Any:
    """A float as a column of floats holds it: 0.1 becomes the nearest float32. Other numbers stay as they are."""
    if dtype.kind != "f" or not isinstance(number, float):
        return number
    with np.errstate(over="ignore"):  # 1e300 becomes infinite as a float32, which compares as it should
        return float(dtype.type(number))


def _least_from(number: Any, dtype: np.dtype[Any]) -> Any:
    """The smallest value of a dtype that is at least `number`: for every x of the dtype, x < number if x < this value.

    It is a Python number, as numpy rounds an int before it compares it with a float; inf if no value is that high.
    """
    if isinstance(number, float) and (dtype.kind == "f" or not math.isfinite(number)):
        return number
    if dtype.kind != "f":
        least = max(math.ceil(number), int(np.iinfo(dtype).min))
        return least if least <= np.iinfo(dtype).max else math.inf
    try:
        near = _rounded(float(number), dtype)
    except OverflowError:
        near = math.inf if number > 0 else -math.inf
    return near if near >= number else float(np.nextafter(dtype.type(near), dtype.type(math.inf)))


def filtered(runs: Runs, storage: Storage, filters: Mapping[str, Any], stride: int) -> Runs:
    """The runs of the anchors that pass the filters: a run may become several, or none.

    The columns are read in chunks of about `CHUNK_STEPS` timesteps; a plain condition on "_start" reads nothing.
    """
    bounds = _bounds(filters.get(START)) if runs.last is None else None
    if bounds is not None:
        runs = _between(runs, *bounds, stride)
        filters = {name: condition for name, condition in filters.items() if name != START}
        if not filters:
            return runs
    runs = _split(runs, stride)
    pieces = [_scan(runs, chunk, storage, filters, stride) for chunk in _chunks(runs.count)]
    if not pieces:
        return runs
    run, first, count = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return runs.where(run).replaced(first=first, count=count)


def _bounds(condition: Any) -> tuple[int | None, int | None] | None:
    """(low, high) if a condition on the timestep t means low ≤ t < high with whole numbers; else None."""
    if type(condition) is int:
        return condition, condition + 1
    if isinstance(condition, tuple) and len(condition) == 2 and {type(end) for end in condition} <= {int, type(None)}:
        return condition
    return None


def _between(runs: Runs, low: int | None, high: int | None, stride: int) -> Runs:
    """The runs of the anchors with low ≤ t < high."""
    begin = 0 if low is None else np.clip(-(-(low - runs.first) // stride), 0, runs.count)
    end = runs.count if high is None else np.clip(-(-(high - runs.first) // stride), begin, runs.count)
    kept = runs.replaced(first=runs.first + begin * stride, count=np.asarray(end - begin))
    return kept.where(np.flatnonzero(kept.count > 0))


def _split(runs: Runs, stride: int) -> Runs:
    """Runs of at most `CHUNK_STEPS` with the same anchors: a forged record may claim billions of timesteps."""
    parts = -(-runs.count // CHUNK_STEPS)
    run = np.repeat(np.arange(len(parts)), parts)
    before = (np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)) * CHUNK_STEPS
    count = np.minimum(runs.count[run] - before, CHUNK_STEPS)
    return runs.where(run).replaced(first=runs.first[run] + before * stride, count=count)


def _chunks(count: IntArray) -> Iterator[IntArray]:
    """The numbers of the runs, in groups of about `CHUNK_STEPS` anchors. Args: count: (R,) anchors of each run."""
    group = np.cumsum(count) // CHUNK_STEPS
    return (np.flatnonzero(group == number) for number in np.unique(group))


def _scan(
    runs: Runs, chunk: IntArray, storage: Storage, filters: Mapping[str, Any], stride: int
) -> tuple[IntArray, IntArray, IntArray]:
    """(run that it is a part of, first, count) of each run of anchors that pass, among the runs numbered `chunk`."""
    part = runs.where(chunk)
    run = np.repeat(np.arange(len(chunk)), part.count)
    t = part.first[run] + (np.arange(len(run)) - np.repeat(np.cumsum(part.count) - part.count, part.count)) * stride
    if part.last is not None:
        t = np.minimum(t, part.last[run])
    keep = np.ones(len(t), np.bool_)
    for name, condition in filters.items():
        keep &= matches(_column(storage, name, part.slot[run], part.serial[run], t), condition, name)
        if name not in (START, VALID):
            keep &= t >= 0  # an anchor before its episode has no step to which the condition could apply
    joined = keep[1:] & keep[:-1] & (run[1:] == run[:-1])
    begins = np.flatnonzero(keep & ~np.concatenate([[False], joined]))
    ends = np.flatnonzero(keep & ~np.concatenate([joined, [False]]))
    return chunk[run[begins]], t[begins], ends - begins + 1


def _column(storage: Storage, name: str, slot: IntArray, serial: IntArray, t: IntArray) -> Array:
    """A field at the timesteps t (n,), of the first step for t < 0; for "_start" the timesteps themselves."""
    if name == START:
        return t
    field = storage.layout.schema.fields[name]
    rows = storage.first_row(slot, field.final) + np.maximum(t, 0)
    return decode(storage.read_rows(name, rows, slot, serial), field.dtype)
