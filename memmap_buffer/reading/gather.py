"""The one engine under every view: rows = first row + t + offsets, clipped into the episode, taken, padded, masked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.errors import SchemaError
from memmap_buffer.reading.sources import Anchors, Sources
from memmap_buffer.store.storage import IntArray
from memmap_buffer.values import Array, decode

MAX_BATCH_BYTES = 16 << 30  # a length that a stranger wrote must not take all memory
INDEX_BYTES = 32  # what finding one row takes
PADDINGS = ("zero", "edge", "default")
BoolArray = npt.NDArray[np.bool_]


class BFloat16Bits(np.ndarray[Any, np.dtype[np.uint16]]):
    """uint16 that are the bits of bfloat16 numbers, so that the PyTorch layer knows."""


class Gather:
    """One batch being cut.

    Args:
        sources: the folders. anchors: (B,) where to cut.

    Attributes:
        batch: key -> (B, …), filled by the `put` methods.
        t, length: (B,) int64.  has_final, terminated: (B,) bool of each anchor's episode.
    """

    def __init__(self, sources: Sources, anchors: Anchors) -> None:
        self.sources = sources
        self.schema = sources.schema
        self.anchors = anchors
        self._episodes = sources.episodes(anchors)
        self.t = anchors.t
        # A stale anchor is cut from its first row, which always exists, and drawn again afterwards.
        self.length = np.maximum(self._episodes.length, 1)
        self.has_final, self.terminated = self._episodes.has_final, self._episodes.terminated
        self.batch: dict[str, Array] = {}
        self._first: dict[bool, IntArray] = {}

    def put(
        self,
        names: Iterable[str],
        offsets: IntArray,
        *,
        prefix: str = "",
        single: bool = False,
        limit: IntArray | None = None,
        padding: str = "zero",
    ) -> BoolArray:
        """Gather fields at `t + offsets` into the batch.

        Args:
            names: per-timestep fields, put under `prefix` + name.
            offsets: (K,) or (B, K) int64.
            single: K is 1 and its axis is dropped.
            limit: (B,) the timesteps that exist are below it; default: the episode's, with its final observation.
            padding: what stands where none exists: "zero", "edge" (the nearest existing) or "default".

        Returns: (B, K) bool, True where the row of a field without `final` exists.
        """
        names = list(names)
        for name in names:
            self._require_size(name, offsets.shape[-1])
        wanted = self.t[:, None] + offsets
        plans: dict[bool, tuple[IntArray, BoolArray | None]] = {}
        for name in names:
            final = self.schema.fields[name].final
            if final not in plans:
                plans[final] = self._plan(wanted, final, limit)
            rows, missing = plans[final]
            values = self.sources.take(name, self.anchors.source, rows)
            if missing is not None and padding != "edge":
                values[missing] = values.dtype.type() if padding == "zero" else self.schema.fields[name].fill
            self._put(prefix + name, name, values[:, 0] if single else values)
        return np.asarray((wanted >= 0) & (wanted < (self.length if limit is None else limit)[:, None]))

    def steps(self, count: int, names: Iterable[str]) -> IntArray:
        """0 … count - 1. Raises SchemaError where a batch of so many steps of some fields is too large."""
        for name in names:
            self._require_size(name, count)
        return np.arange(count)

    def put_meta(self, names: Iterable[str]) -> None:
        """Gather meta fields, one entry an item."""
        for name in names:
            self._put(name, name, self.sources.take_meta(name, self.anchors))

    def look(self, name: str, offsets: IntArray, limit: IntArray | None = None) -> Array:
        """A field at `t + offsets` as numpy can compute with it, (B, K, *field), zero where it does not exist."""
        field = self.schema.fields[name]
        rows, missing = self._plan(self.t[:, None] + offsets, field.final, limit)
        values = self.sources.take(name, self.anchors.source, rows)
        if missing is not None:
            values[missing] = values.dtype.type()
        return decode(values, field.dtype)

    def fresh(self) -> BoolArray:
        """(B,) whether what was copied is what the anchor meant. To be asked after all copying."""
        return self._episodes.fresh & self.sources.unchanged(self.anchors, self._episodes.generation)

    def _plan(self, wanted: IntArray, final: bool, limit: IntArray | None) -> tuple[IntArray, BoolArray | None]:
        if limit is None:
            limit = self.length + self.has_final if final else self.length
        clipped = np.clip(wanted, 0, limit[:, None] - 1)
        missing = wanted != clipped
        return self._first_rows(final)[:, None] + clipped, missing if missing.any() else None

    def _require_size(self, name: str, steps: int) -> None:
        rows = len(self.t) * steps
        size = rows * max(self.schema.fields[name].itemsize, INDEX_BYTES)
        if size > MAX_BATCH_BYTES:
            raise SchemaError(
                f"field {name!r}: a batch of {rows} rows takes {size / 2**30:.1f} GiB, more than "
                f"{MAX_BATCH_BYTES >> 30}; lower batch_size, leave the field out, or cut windows"
            )

    def _first_rows(self, final: bool) -> IntArray:
        if final not in self._first:
            self._first[final] = self.sources.first_rows(self.anchors, final)
        return self._first[final]

    def _put(self, key: str, name: str, values: Array) -> None:
        if self.schema.all[name].dtype == "bfloat16":
            values = values.view(BFloat16Bits)
        self.batch[key] = values


def check_padding(padding: str) -> None:
    """Raise SchemaError unless `padding` is one of `PADDINGS`."""
    if padding not in PADDINGS:
        raise SchemaError(f"padding: got {padding!r}, expected one of {', '.join(map(repr, PADDINGS))}")
