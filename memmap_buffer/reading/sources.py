"""Several folders read as one: where an anchor's rows lie, and the gather over them. One folder is the common case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memmap_buffer.errors import SchemaMismatchError
from memmap_buffer.store.records import FINAL, TERMINATED
from memmap_buffer.store.storage import EpisodeTable, IntArray, Storage
from memmap_buffer.values import Array


class Anchors(NamedTuple):
    """From where a view cuts one item each: (B,) arrays; `source` is None for a single folder.

    With draws by priority each has its importance weight and its probability.
    """

    source: IntArray | None
    slot: IntArray
    serial: IntArray
    t: IntArray
    weight: npt.NDArray[np.float32] | None = None
    probability: npt.NDArray[np.float64] | None = None

    @property
    def size(self) -> int:
        """How many; a named tuple's own `len` counts its fields."""
        return len(self.slot)

    def where(self, chosen: npt.NDArray[Any]) -> Anchors:
        """The anchors at an index array or a mask."""
        return Anchors(*(None if column is None else column[chosen] for column in self))  # type: ignore[arg-type]

    def replaced(self, chosen: IntArray, others: Anchors) -> Anchors:
        """The same anchors, but `others` at the positions `chosen`; there, what was not drawn by priority weighs 0."""
        out = Anchors(*(None if column is None else column.copy() for column in self))  # type: ignore[arg-type]
        for column, new in zip(out, others, strict=True):
            if column is not None:
                column[chosen] = 0 if new is None else new
        return out


class Episodes(NamedTuple):
    """What is known of the episode of each anchor, all (B,): `fresh` says that the slot still holds its serial."""

    length: IntArray
    has_final: npt.NDArray[np.bool_]
    terminated: npt.NDArray[np.bool_]
    generation: npt.NDArray[np.uint64]
    fresh: npt.NDArray[np.bool_]


class Sources:
    """The folders that are read as one; they must hold the same fields.

    Raises: SchemaMismatchError: the fields differ; the text lists how.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        self.storages = tuple(storages)
        layout = self.storages[0].layout
        self.schema = layout.schema
        self.max_timesteps = max(storage.layout.max_timesteps for storage in self.storages)
        for storage in self.storages[1:]:
            lines = [line for line in layout.differences(storage.layout) if line.startswith(("fields", "meta_fields"))]
            if lines:
                text = "\n  ".join([f"{storage.path} and {self.storages[0].path} have different fields:", *lines])
                raise SchemaMismatchError(text, differences=lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return Sources, (self.storages,)

    @property
    def single(self) -> bool:
        return len(self.storages) == 1

    @property
    def tables(self) -> tuple[EpisodeTable, ...]:
        return tuple(storage.table for storage in self.storages)

    def refresh(self) -> tuple[EpisodeTable, ...]:
        """The episode tables as they are now."""
        return tuple(storage.refresh() for storage in self.storages)

    def episodes(self, anchors: Anchors) -> Episodes:
        """Look the anchors' episodes up; once more in fresh tables, if one is not where it was."""
        found = self._episodes(anchors)
        if not found.fresh.all():
            self.refresh()
            found = self._episodes(anchors)
        return found

    def _episodes(self, anchors: Anchors) -> Episodes:
        def look_up(storage: Storage, i: Any) -> tuple[Array, ...]:
            table, slot = storage.table, anchors.slot[i]
            if not storage.trust(slot):
                table = storage.table
            flags = table.flags[slot]
            fresh = table.shows(slot, anchors.serial[i])
            return table.length[slot], flags & FINAL != 0, flags & TERMINATED != 0, table.generation[slot], fresh

        return Episodes(*self._each(anchors.source, anchors.size, look_up))

    def unchanged(self, anchors: Anchors, generation: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """(B,) whether each episode is still as it was seen before its rows were copied."""

        def look(storage: Storage, i: Any) -> tuple[Array]:
            return (storage.unmoved(anchors.slot[i], anchors.serial[i], generation[i]),)

        return np.asarray(self._each(anchors.source, anchors.size, look)[0])

    def first_rows(self, anchors: Anchors, final: bool) -> IntArray:
        (rows,) = self._each(
            anchors.source, anchors.size, lambda storage, i: (storage.first_row(anchors.slot[i], final),)
        )
        return rows

    def take(self, name: str, source: IntArray | None, rows: IntArray) -> Array:
        """Copy rows of a per-timestep field: (B, K) row numbers give (B, K, *field)."""

        def take(storage: Storage, i: Any) -> tuple[Array]:
            return (storage.maps.rows[name].take(rows[i], axis=0, mode="clip"),)

        return self._each(source, len(rows), take)[0]

    def take_meta(self, name: str, anchors: Anchors) -> Array:
        """Copy a meta field of each anchor's episode: (B, *field)."""

        def take(storage: Storage, i: Any) -> tuple[Array]:
            return (storage.maps.meta[name].take(anchors.slot[i], axis=0, mode="clip"),)

        return self._each(anchors.source, anchors.size, take)[0]

    def _each(
        self, source: IntArray | None, count: int, read: Callable[[Storage, Any], tuple[Array, ...]]
    ) -> tuple[Array, ...]:
        """`read` of every folder that is drawn from, on its part of the batch, put together again."""
        if source is None:
            return read(self.storages[0], slice(None))
        out: tuple[Array, ...] = ()
        for number in np.unique(source).tolist():
            chosen = np.flatnonzero(source == number)
            parts = read(self.storages[number], chosen)
            if not out:
                out = tuple(np.empty((count, *part.shape[1:]), part.dtype) for part in parts)
            for whole, part in zip(out, parts, strict=True):
                whole[chosen] = part
        return out or read(self.storages[0], slice(None))
