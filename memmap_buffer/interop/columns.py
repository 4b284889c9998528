"""Columns of episodes: nested ones made flat, the fields that can hold those of every episode, comparisons. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.schema import Field, Schema


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
        for name, found in (Schema.from_example(columns).fields if columns else {}).items():
            shape, known = found.shape[self._lead :], self.fields.get(name)
            if known is not None and known.shape != shape:
                raise SchemaError(
                    f"{self._kind} {name!r}: got entries of shape {shape} in episode {self.episodes - 1}, and of "
                    f"{known.shape} before; leave it out, or pad it",
                    field=name,
                )
            self.fields[name] = Field(found.dtype if known is None else _wider(known.dtype, found.dtype), shape)
            self.counts[name] = self.counts.get(name, 0) + 1

    def require_complete(self) -> None:
        """Raise SchemaError naming a column that only some episodes have."""
        for name, count in self.counts.items():
            if count != self.episodes:
                raise SchemaError(
                    f"{self._kind} {name!r}: only {count} of {self.episodes} episodes have it; leave it out", field=name
                )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts, or the groups of an HDF5 file, as one dict of dotted names."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        out |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return out


def as_text(value: Any) -> Any:
    """Bytes decoded from UTF-8; any other value as it is."""
    return value.decode("utf-8") if isinstance(value, bytes) else value


def first_difference(one: Any, other: Any) -> int | None:
    """The first row at which two columns of one shape differ, None where they are equal; NaN equals NaN."""
    differ = one != other
    if one.dtype.kind in "fc" and other.dtype.kind in "fc":
        differ &= (one == one) | (other == other)
    rows = np.flatnonzero(differ.any(axis=tuple(range(1, differ.ndim))))
    return int(rows[0]) if rows.size else None


def _wider(one: str, other: str) -> Any:
    """The dtype that holds both."""
    if one.startswith("U") and other.startswith("U"):
        return max(one, other, key=lambda name: int(name[1:]))
    try:
        return np.result_type(one, other)
    except TypeError:
        raise SchemaError(f"got {one} and {other}, which no dtype holds both; leave it out") from None
