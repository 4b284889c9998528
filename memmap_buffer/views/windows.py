"""The views but for transitions: whole episodes, timesteps, windows, crops, and fields at offsets of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

import numpy as np

from memmap_buffer.choices import Boundary, Padding, WindowBoundary
from memmap_buffer.dtypes import check_count
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import Schema
from memmap_buffer.views.anchors import BoolArray, Runs
from memmap_buffer.views.batch_builder import BatchBuilder, check_padding
from memmap_buffer.views.view import FloatArray, Names, View, named

BOUNDARIES = get_args(Boundary)
REPEAT = "repeat"


@dataclass(frozen=True)
class Trajectory(View):
    """Whole episodes, padded with zeros to the longest of the batch, as they were stored.

    A batch: fields (B, Tmax, *field), `_lens` (B,).

    Args:
        fields: the fields of a batch; default all.
        return_mask: add `_mask` (B, Tmax), True where a step exists.
        return_lens: add `_lens`.
        to_length: pad to this many steps instead of the longest of the batch.
        final_observation: fields declared with `final` get one more entry, (B, Tmax + 1, *field), at `_lens` of the
            episodes that have their final observation: `_has_final` (B,).

    Raises:
        SchemaError: `to_length` is no whole number from 1; later, an episode that is longer.
    """

    fields: Names = None
    return_mask: bool = False
    return_lens: bool = True
    to_length: int | None = None
    final_observation: bool = False
    per_episode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._keep_names("fields")
        if self.to_length is not None:
            check_count("to_length", self.to_length)

    def keys(self, schema: Schema) -> list[str]:
        names, final = named(schema, self.fields, "fields"), ["_has_final"] * self.final_observation
        return [*names, *["_lens"] * self.return_lens, *final, *["_mask"] * self.return_mask]

    def sequences(self, schema: Schema) -> dict[str, str]:
        names = named(schema, self.fields, "fields") if self.return_lens else ()
        return {name: "_lens" for name in names if not (self.final_observation and schema.fields[name].final)}

    @property
    def pads_to_longest(self) -> bool:
        return self.to_length is None

    @property
    def reach(self) -> int:
        return 0

    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        return episodes.replaced(count=np.ones_like(episodes.count))

    def cut(self, builder: BatchBuilder) -> None:
        names = named(builder.schema, self.fields, "fields")
        longest = int(builder.length.max(initial=0))
        if self.to_length is not None and self.to_length < longest:
            raise SchemaError(
                f"to_length: got {self.to_length}, an episode has {longest} timesteps and is never cut off"
            )
        steps = range(self.to_length or longest)
        finals = [name for name in names if self.final_observation and builder.schema.fields[name].final]
        builder.put([name for name in names if name not in finals], steps, limit=builder.length)
        builder.put(finals, range(len(steps) + 1))
        if self.return_lens:
            builder.batch["_lens"] = builder.length
        if self.final_observation:
            builder.batch["_has_final"] = builder.has_final
        if self.return_mask:
            builder.put_mask("_mask", steps)


@dataclass(frozen=True)
class Timestep(View):
    """Single timesteps: fields (B, *field).

    Args:
        fields: the fields of a batch; default all.
    """

    one_per_step: ClassVar[bool] = True

    fields: Names = None

    def __post_init__(self) -> None:
        self._keep_names("fields")

    def keys(self, schema: Schema) -> list[str]:
        return list(named(schema, self.fields, "fields"))

    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        return episodes

    def cut(self, builder: BatchBuilder) -> None:
        builder.put_at(named(builder.schema, self.fields, "fields"), builder.t)


@dataclass(frozen=True)
class Window(View):
    """Windows of `length` consecutive timesteps that begin every `stride` steps and never leave their episode.

    A batch: fields (B, L, *field), `_lens` (B,) existing steps, `_mask` (B, L), `_start` (B,), `_reaches_episode_end`
    (B,).

    Args:
        length: L.
        stride: steps between starts.
        fields: the fields of a batch; default all.
        boundary: "pad": every start, padded behind the end; "shift": a window that would pass the end is moved back
            to end there; "repeat": likewise, but every start gives one, so item i begins at step i of all, or where
            its window just fits; "drop": only windows that lie inside.
        padding: the values of timesteps that do not exist: "zero", "edge" (the nearest one) or "default".
        pad_before: windows may begin this many steps before the episode, padded in front.

    Raises:
        SchemaError: a value that is not one of these.
    """

    length: int
    stride: int = 1
    fields: Names = None
    boundary: WindowBoundary = "pad"
    padding: Padding = "zero"
    pad_before: int = 0

    def __post_init__(self) -> None:
        self._keep_names("fields")
        check_count("length", self.length)
        check_count("stride", self.stride)
        _check_boundary(self.boundary, (*BOUNDARIES, REPEAT))
        check_padding(self.padding)
        check_count("pad_before", self.pad_before, 0)
        if self.pad_before >= self.length:
            raise SchemaError(
                f"pad_before: got {self.pad_before}, expected 0 … length - 1, so that a window has a step"
            )
        if self.pad_before and self.boundary != "pad":
            raise SchemaError(f"pad_before pads, and boundary={self.boundary!r} does not; leave one out")

    def keys(self, schema: Schema) -> list[str]:
        return [*named(schema, self.fields, "fields"), "_lens", "_mask", "_start", "_reaches_episode_end"]

    def sequences(self, schema: Schema) -> dict[str, str]:
        names = () if self.pad_before else named(schema, self.fields, "fields")
        return dict.fromkeys(names, "_lens")

    @property
    def reach(self) -> int:
        return self.length

    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        stop = episodes.count - (self.length - 1)
        if self.boundary == REPEAT:
            every = _inside(episodes, 0, 0, stop, "pad", self.stride)
            return every.replaced(last=np.maximum(stop - 1, 0))
        return _inside(episodes, -self.pad_before, 0, stop, self.boundary, self.stride)

    def cut(self, builder: BatchBuilder) -> None:
        steps, t = range(self.length), builder.t
        builder.put(named(builder.schema, self.fields, "fields"), steps, limit=builder.length, padding=self.padding)
        rest = builder.length - t
        lens = np.minimum(rest, self.length) + np.minimum(t, 0)
        ends = rest <= self.length
        builder.batch |= {
            "_lens": lens,
            "_mask": builder.exists(steps),
            "_start": t + builder.begin,
            "_reaches_episode_end": ends,
        }


@dataclass(frozen=True)
class RandomCrop(View):
    """One crop of at most `length` steps from each episode, at a random place, zero-padded.

    A batch: as `Window`, without `_mask`. The place is drawn by the sampler.

    Args:
        length: the most steps.
        fields: the fields of a batch; default all.

    Raises:
        SchemaError: a length that is no whole number from 1.
    """

    length: int
    fields: Names = None
    per_episode: ClassVar[bool] = True
    random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._keep_names("fields")
        check_count("window_length", self.length)

    def keys(self, schema: Schema) -> list[str]:
        return [*named(schema, self.fields, "fields"), "_lens", "_start", "_reaches_episode_end"]

    def sequences(self, schema: Schema) -> dict[str, str]:
        return dict.fromkeys(named(schema, self.fields, "fields"), "_lens")

    @property
    def reach(self) -> int:
        return self.length

    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        return episodes.replaced(count=np.ones_like(episodes.count))

    def crop(self, length: IntArray, u: FloatArray) -> IntArray:
        places = np.maximum(length - self.length, 0) + 1
        return np.asarray((u * places).astype(np.int64))

    def cut(self, builder: BatchBuilder) -> None:
        Window(self.length, fields=self.fields).cut(builder)
        del builder.batch["_mask"]


class Offsets(View):
    """Fields at offsets of their own around one timestep: frame stacks, histories, action chunks.

    A batch: for each field (B, K, *field) and `_mask_<field>` (B, K).

    Args:
        offsets: field -> whole numbers, `Offsets(observation=(-1, 0), action=range(16))`; dotted names by
            `Offsets({"camera.left": (-3, -2, -1, 0)})`. A group's name stands for all its fields.
        boundary: "pad": an item at every timestep; "drop": at those whose offsets all exist; "shift": likewise, and one
            padded item of an episode that is too short.
        padding: the values of timesteps that do not exist: "zero", "edge" (the nearest one) or "default".
        stride: steps between anchors.
        fields: the same as `offsets`, by keyword.

    Raises:
        SchemaError: a value that is not one of these.
    """

    def __init__(
        self,
        offsets: Mapping[str, Iterable[int]] | None = None,
        /,
        *,
        boundary: Boundary = "pad",
        padding: Padding = "zero",
        stride: int = 1,
        **fields: Iterable[int],
    ) -> None:
        given = {**(offsets or {}), **fields}
        self.offsets = {name: tuple(values) for name, values in given.items()}
        every = [k for values in self.offsets.values() for k in values]
        if (
            not self.offsets
            or not all(self.offsets.values())
            or not all(isinstance(k, (int, np.integer)) for k in every)
        ):
            raise SchemaError(f"offsets: got {given!r}, expected at least one whole number for at least one field")
        _check_boundary(boundary)
        check_padding(padding)
        check_count("stride", stride)
        self.boundary, self.padding, self.stride = boundary, padding, stride

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offsets) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        how = f"boundary={self.boundary!r}, padding={self.padding!r}, stride={self.stride!r}"
        return f"Offsets({self.offsets!r}, {how})"

    @property
    def _value(self) -> tuple[object, ...]:
        return tuple(self.offsets.items()), self.boundary, self.padding, self.stride

    def keys(self, schema: Schema) -> list[str]:
        names = [name for group in self.offsets for name in schema.require([group], "offsets", schema.fields)]
        return [key for name in names for key in (name, f"_mask_{name}")]

    @property
    def reach(self) -> int:
        return max(1, *(max(values) + 1 for values in self.offsets.values()))

    @property
    def before(self) -> int:
        return max(0, *(-min(values) for values in self.offsets.values()))

    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        low, stop = 0, episodes.count
        for group, values in self.offsets.items():
            low = min(low, *values)
            for name in schema.require([group], "offsets", schema.fields):
                exist = episodes.count + has_final if schema.fields[name].final else episodes.count
                stop = np.minimum(stop, exist - max(0, *values))
        return _inside(episodes, 0, low, stop, self.boundary, self.stride)

    def cut(self, builder: BatchBuilder) -> None:
        for group, values in self.offsets.items():
            for name in builder.schema.require([group], "offsets", builder.schema.fields):
                offsets = _consecutive(values)
                builder.put([name], offsets, padding=self.padding)
                builder.batch[f"_mask_{name}"] = builder.exists(
                    offsets, builder.limit(builder.schema.fields[name].final)
                )


def _inside(episodes: Runs, start: int, low: int, stop: IntArray, boundary: str, stride: int) -> Runs:
    """Anchors from `start` on, every `stride` steps; the offsets of those from -low to stop - 1 all exist."""
    length = episodes.count
    first = np.full_like(length, start if boundary == "pad" else max(start, -low))
    stop = length if boundary == "pad" else stop
    count = np.maximum(-(-(stop - first) // stride), 0)
    if boundary != "shift":
        return episodes.replaced(first=first, count=count)
    first = np.minimum(first, length - 1)  # an episode that is too short has one padded item
    last = np.maximum(stop - 1, first)
    flush = (first + (count - 1) * stride < stop - 1).astype(np.int64)
    return episodes.replaced(first=first, count=np.maximum(count + flush, 1), last=last)


def _consecutive(values: tuple[int, ...]) -> IntArray | range:
    """Offsets as a range, where they are one."""
    whole = range(values[0], values[0] + len(values))
    return whole if values == tuple(whole) else np.array(values)


def _check_boundary(boundary: str, known: tuple[str, ...] = BOUNDARIES) -> None:
    if boundary not in known:
        raise SchemaError(f"boundary: got {boundary!r}, expected one of {', '.join(map(repr, known))}")
