"""Where the steps of an open episode stand before they are written: memory, and which values fit it. No I/O."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.schema import Field

KEPT_BYTES = 64 << 20


class Staging:
    """Memory that ended episodes had, for those that follow: to write to fresh pages takes several times as long."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, dict[str, Array]]] = []

    def take(self, needed: int) -> dict[str, Array]:
        """Columns of an episode that ended, with room for so many steps; or nothing."""
        try:
            kept = self._kept.pop()  # at once, as another thread may want it, too
        except IndexError:
            return {}
        if all(len(column) >= needed for column in kept[1].values()):
            return kept[1]
        self._kept.append(kept)
        return {}

    def keep(self, columns: dict[str, Array]) -> None:
        """Take columns that nothing refers to any more, unless more than KEPT_BYTES would be kept."""
        size = sum(column.nbytes for column in columns.values())
        if size + sum(kept for kept, _ in self._kept) <= KEPT_BYTES:
            self._kept.append((size, columns))


class Scalars(NamedTuple):
    """The numbers that fit a field without dimensions: those of `kinds` from `low` to `high`."""

    name: str
    field: Field
    kinds: frozenset[type]
    low: Any
    high: Any

    @classmethod
    def of(cls, name: str, field: Field) -> Scalars:
        """Those that fit `field`."""
        kind, low, high = field.storage.kind, 0, 1
        kinds = _KINDS.get(kind, ()) if field.shape == () and field.dtype != "bfloat16" else ()
        if kind == "f":
            low, high = float(np.finfo(field.storage).min), float(np.finfo(field.storage).max)  # type: ignore[assignment]
        elif kind in "iu":
            low, high = int(np.iinfo(field.storage).min), int(np.iinfo(field.storage).max)
        return cls(name, field, frozenset(kinds), low, high)


# A field's staged rows (capacity, *field), and which values can be assigned to one of them as they are: the dtype and
# the shape of arrays; the types of numbers that can, whatever they are; what other numbers can. A plain tuple, as
# Python takes four times as long to unpack a named one.
Column: TypeAlias = tuple[Array, np.dtype[Any], tuple[int, ...], frozenset[type], Scalars]


def column(name: str, field: Field, rows: Array) -> Column:
    """The column of a field that is staged in `rows`."""
    scalars = Scalars.of(name, field)
    exact = (kind for kind in scalars.kinds if kind is not int and np.can_cast(kind, field.storage))
    return rows, field.direct, field.shape, frozenset(exact), scalars


_KINDS: dict[str, tuple[type, ...]] = {
    "f": (float, np.float64, np.float32),
    "i": (int, np.int64, np.int32),
    "u": (int, np.int64, np.int32),
    "b": (bool, np.bool_),
}
