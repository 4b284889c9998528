"""What several episodes have in common, where a data set does not say it: `Survey`; `flat` trees; whether a column is
what follows another: `first_difference`. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.schema import Field, Schema


class Survey:
    """The fields that hold the columns of every episode that was added: their names, widest dtypes and shapes.

    Args: what: the word for them in errors. lead: how many dimensions stand before an entry: 1, time, or 0.

    Attributes: fields, counts: dotted name -> field, and how many episodes have it. episodes: how many there are.
    """

    def __init__(self, what: str, lead: int = 1) -> None:
        self.what = what
        self.fields: dict[str, Field] = {}
        self.counts: dict[str, int] = {}
        self.episodes = 0
        self._lead = lead

    def add(self, columns: Mapping[str, Any]) -> None:
        """One episode more: name -> array, list of str, or a nested dict of them.

        Raises: SchemaError: what cannot be a field, or entries of another shape than before.
        """
        self.episodes += 1
        for name, found in (Schema.from_example(columns).fields if columns else {}).items():
            shape, known = found.shape[self._lead :], self.fields.get(name)
            if known is not None and known.shape != shape:
                raise SchemaError(
                    f"{self.what} {name!r}: got entries of shape {shape} in episode {self.episodes - 1}, and of "
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
                    f"{self.what} {name!r}: only {count} of {self.episodes} episodes have it; leave it out", field=name
                )


def flat(tree: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Nested dicts, or the groups of an HDF5 file, as one dict of joined names."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        out |= flat(value, path + separator, separator) if isinstance(value, Mapping) else {path: value}
    return out


def first_difference(one: Any, other: Any) -> int | None:
    """The first row at which two columns of one shape differ, None where they do not; NaN is NaN."""
    differ = one != other
    if one.dtype.kind in "fc" and other.dtype.kind in "fc":
        differ &= (one == one) | (other == other)
    wrong = np.flatnonzero(differ.any(axis=tuple(range(1, differ.ndim))))
    return int(wrong[0]) if wrong.size else None


def _wider(one: str, other: str) -> Any:
    """The dtype that holds both."""
    if one.startswith("U") and other.startswith("U"):
        return max(one, other, key=lambda name: int(name[1:]))
    try:
        return np.result_type(one, other)
    except TypeError:
        raise SchemaError(f"got {one} and {other}, which no dtype holds both; leave it out") from None
