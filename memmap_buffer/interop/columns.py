"""Columns of tables: fields that can hold the columns of imported episodes, and batches as columns. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer import Field, Schema, SchemaError
from memmap_buffer.adapters import Array, to_numpy

IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
VIEW_OPTIONS = ("view", "n_steps", "timestep_level", "window_length")
LENGTHS = "_lens_"  # before the key of padded lists in a batch: the key of their lengths
POSITION = ("_source", "_serial", "_t")


class InferredFields:
    """The fields that can hold the columns of every episode that was added: their names, widest dtypes and shapes.

    Args:
        kind: the word for a column in errors.
        lead: the number of axes before an entry: 1 for columns over time, 0 for single values.

    Attributes:
        fields: dotted name -> field.
        counts: dotted name -> the number of episodes that have it.
        episodes: the number of episodes.
    """

    def __init__(self, kind: str, lead: int = 1) -> None:
        self.fields: dict[str, Field] = {}
        self.counts: dict[str, int] = {}
        self.episodes = 0
        self._kind, self._lead = kind, lead

    def add(self, columns: Mapping[str, Any]) -> None:
        """Widen the fields to hold one more episode.

        Args:
            columns: name -> array, list of str, or a nested dict of them.

        Raises:
            SchemaError: a column cannot be a field, or its entries have another shape than before.
        """
        self.episodes += 1
        for name, field in (Schema.from_example(columns).fields if columns else {}).items():
            shape, earlier = field.shape[self._lead :], self.fields.get(name)
            if earlier is not None and earlier.shape != shape:
                raise SchemaError(
                    f"{self._kind} {name!r}: got entries of shape {shape} in episode {self.episodes - 1}, and of "
                    f"{earlier.shape} before; leave it out, or pad it",
                    field=name,
                )
            self.fields[name] = Field(field.dtype if earlier is None else _wider(earlier.dtype, field.dtype), shape)
            self.counts[name] = self.counts.get(name, 0) + 1

    def require_complete(self) -> None:
        """Raise SchemaError naming a column that only some episodes have."""
        for name, count in self.counts.items():
            if count != self.episodes:
                raise SchemaError(
                    f"{self._kind} {name!r}: only {count} of {self.episodes} episodes have it; leave it out", field=name
                )


def dtype_of(field: Field) -> np.dtype[Any]:
    """The dtype of a field's columns: float32 for bfloat16."""
    return np.dtype(np.float32) if field.dtype == "bfloat16" else field.entries


def put(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Put a value into nested dicts at a path of keys; missing groups are made."""
    *groups, leaf = path
    for group in groups:
        tree = tree.setdefault(group, {})
    tree[leaf] = value


def as_text(value: Any) -> Any:
    """Bytes decoded from UTF-8; any other value unchanged."""
    return value.decode("utf-8") if isinstance(value, bytes) else value


def with_final(where: str, column: Any, following: Any, first: int, remedy: str) -> Any:
    """A column of an episode with its final entry, (T + 1, …), from a file that also holds the entry after each step.

    Args:
        where: the place of `following`, for errors.
        column: (T, …), the entry at each step.
        following: (T, …), the entry after each step.
        first: the number of the first step in the file, for errors.
        remedy: what to do about a difference, for errors.

    Raises:
        SchemaError: the entry after a step is not the entry at the next one; NaN equals NaN.
    """
    here, after = column[1:], following[:-1]
    differ = here != after
    if here.dtype.kind in "fc" and after.dtype.kind in "fc":
        differ &= (here == here) | (after == after)
    rows = np.flatnonzero(differ.any(axis=tuple(range(1, differ.ndim))))
    if rows.size:
        step = first + int(rows[0])
        raise SchemaError(f"{where}: what follows step {step} is not what step {step + 1} has; {remedy}")
    return np.concatenate([column, following[-1:]])


def equal_rows(columns: Mapping[str, Array], other: Mapping[str, Array]) -> BoolArray:
    """(N,) bool, whether a row of all `columns` equals the row of `other` to the last bit: NaN equals itself.

    Args:
        columns: name -> (N, …).
        other: the same names at least, with the same dtypes and shapes.
    """
    count = len(next(iter(other.values()), ()))
    same = np.ones(count, np.bool_)
    for name, rows in columns.items():
        if rows.tobytes() != other[name].tobytes():  # most often they are equal, and this takes a quarter of the time
            pair = (np.ascontiguousarray(a).view(np.uint8).reshape(count, rows[:1].nbytes) for a in (rows, other[name]))
            same &= np.equal(*pair).all(axis=1)
    return same


def _wider(dtype: str, other: str) -> Any:
    """The dtype that holds the values of both. Raises SchemaError if none does."""
    if dtype.startswith("U") and other.startswith("U"):
        return max(dtype, other, key=lambda name: int(name[1:]))
    try:
        return np.result_type(dtype, other)
    except TypeError:
        raise SchemaError(f"got {dtype} and {other}, which no dtype holds both; leave it out") from None


# Batches


def columns_of(
    batch: Mapping[str, Any],
    finals: Mapping[str, bool] | None = None,
    lens: str = "_lens",
    has_final: str = "_has_final",
) -> dict[str, Any]:
    """A batch as columns of a table: whole episodes without padding, indices as columns of numbers, see `POSITION`.

    Args:
        batch: dotted key -> tensor, array or list of texts.
        finals: for whole episodes, key -> whether its column includes the final observation; None: no whole episodes.
        lens: the key of the episodes' lengths.
        has_final: the key of the flags of episodes that have a final observation.
    """
    columns = {name: _column(values) for name, values in batch.items()}
    if finals:
        steps, ends = columns[lens], columns.pop(has_final)
        for name in columns.keys() & finals.keys():
            stops = (steps + (ends & finals[name])).tolist()
            for key in {name, LENGTHS + name} & columns.keys():
                columns[key] = objects([row[:stop] for row, stop in zip(batch[key], stops, strict=True)])
    for key, stop in (("_indices", 3), ("_index", 2)):
        if key in columns:
            numbers = columns.pop(key)
            numbers = numbers.reshape(len(numbers), -1)  # a batch of a single folder has no `_source`
            columns = dict(zip(POSITION[stop - numbers.shape[1] : stop], numbers.T, strict=True)) | columns
    return columns


def as_episode(schema: Schema, order: str | None, steps: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of an episode, in any order, as one row: field -> (1,) objects, meta field -> its first value.

    Args:
        schema: of the buffer.
        order: the column by which steps are sorted; None: they are in order.
        steps: column -> (n, …). If all final fields have columns "next_<field>", their last rows are the final entries.
    """
    count = len(next(iter(steps.values())))
    rows = np.arange(count) if order is None else np.argsort(steps[order], kind="stable")
    columns = {name: _steps(steps, name)[rows] for name in schema.fields if name in steps}
    finals = [name for name, field in schema.fields.items() if field.final]
    if all(f"next_{name}" in steps for name in finals):
        for name in finals:
            columns[name] = np.concatenate([columns[name], _steps(steps, f"next_{name}")[rows[-1:]]])
    episode = {
        name: objects([column.tolist() if column.dtype == object else column]) for name, column in columns.items()
    }
    return episode | {name: steps[name][rows[:1]] for name in schema.meta_fields if name in steps}


def unpadded(rows: Any, counts: Any) -> Any:
    """Padded lists (n, L, …) cut to lengths (n,), as objects; or lists of lists (n, T, L, …) to (n, T or more)."""
    if not np.ndim(counts):
        return rows[:counts]
    return objects([unpadded(row, count) for row, count in zip(rows, counts, strict=False)])


def _steps(steps: Mapping[str, Any], name: str) -> Any:
    """A column (n, …); a column of lists as objects, without padding."""
    return unpadded(steps[name], steps[LENGTHS + name]) if LENGTHS + name in steps else steps[name]


def _column(values: Any) -> Any:
    if isinstance(values, (list, np.ndarray)):
        return objects(values) if len(values) and isinstance(values[0], list) else np.asarray(values)
    return objects(list(values.unbind())) if values.is_nested else to_numpy(values)


def objects(rows: Any) -> Any:
    """A column (n,) of objects: an array, or a list of texts, for each row."""
    out = np.empty(len(rows), object)
    for i, row in enumerate(rows):
        out[i] = row if isinstance(row, (list, np.ndarray)) else to_numpy(row)
    return out
