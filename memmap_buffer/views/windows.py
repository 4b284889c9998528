"""How an item is cut around its anchor: Trajectory, Timestep, Window, Crop, Offsets; `transitions` has NStep.

A view says which timesteps of an episode may be anchors (`spans`), and cuts a batch around given anchors (`cut`). It
reads through `BatchBuilder` alone, so it knows neither slots nor folders, and it is a value: frozen, picklable, comparable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import check_count
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import Schema
from memmap_buffer.views.batch_builder import BatchBuilder, check_padding
from memmap_buffer.views.ends import Ends
from memmap_buffer.views.folders import BoolArray

BOUNDARIES = ("pad", "shift", "drop")
REPEAT = "repeat"
Names: TypeAlias = Iterable[str] | None
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spans:
    """The anchors of each episode: t = min(first + i * stride, last) for i < count; all (E,) int64."""

    first: IntArray
    count: IntArray
    last: IntArray | None = None


class View(ABC):
    """How an item is cut around its anchor."""

    stride: int = 1
    per_episode: ClassVar[bool] = False
    random: ClassVar[bool] = False

    @abstractmethod
    def keys(self, schema: Schema) -> list[str]:
        """The keys of a batch before meta, in order. Raises SchemaError for a field that was not declared."""

    @abstractmethod
    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        """Which timesteps of each episode may be anchors; the arrays are (E,)."""

    @abstractmethod
    def cut(self, gather: BatchBuilder) -> None:
        """Put the batch together."""

    def ends(self, schema: Schema) -> Ends:
        """How it knows that an episode ended, and how far around its anchor it looks."""
        return Ends.of(schema, before=self.before, after=self.reach)

    def crop(self, length: IntArray, u: FloatArray) -> IntArray:
        """Where chance, u (B,) in [0, 1), moves the anchors of episodes of these lengths; only if `random`."""
        raise NotImplementedError

    def sequences(self, schema: Schema) -> dict[str, str]:
        """The keys of a batch that are padded behind the end, and the key that says how long each item is."""
        return {}

    @property
    def reach(self) -> int:
        """How many timesteps from the anchor on an item may have; 0: all of them, whatever ends in their middle."""
        return 1

    @property
    def before(self) -> int:
        """How many timesteps before the anchor an item may have of the same episode."""
        return 0

    def _keep_names(self, *arguments: str) -> None:
        """Keep names as tuples, however they were given, so that views are values."""
        for argument in arguments:
            object.__setattr__(self, argument, names_of(argument, getattr(self, argument)))


def names_of(where: str, given: Names) -> tuple[str, ...] | None:
    """Names as a tuple; a single one may stand alone. Raises SchemaError where it is something else."""
    if given is None or isinstance(given, str):
        return given if given is None else (given,)
    if not isinstance(given, Iterable):
        raise SchemaError(f"{where}: got {given!r}, expected a name, or several")
    return tuple(given)


def named(schema: Schema, names: Names, where: str) -> tuple[str, ...]:
    """Per-timestep fields by name, groups expanded; None for all. Raises SchemaError for an unknown one."""
    return tuple(schema.fields) if names is None else schema.require(names, where, schema.fields)


@dataclass(frozen=True)
class Trajectory(View):
    """Whole episodes, padded with zeros to the longest of the batch, as they were stored.

    A batch: fields (B, Tmax, *field), `_lens` (B,).

    Args:
        fields: which; default all.
        return_mask: add `_mask` (B, Tmax), True where a step exists.
        return_lens: add `_lens`.
        to_length: pad to this many steps instead of the longest of the batch.
        final_observation: fields declared with `final` get one more entry, (B, Tmax + 1, *field), at `_lens` of the
            episodes that have their final observation: `_has_final` (B,).
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
    def reach(self) -> int:
        return 0

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        return Spans(np.zeros(len(length), np.int64), np.ones_like(length))

    def cut(self, gather: BatchBuilder) -> None:
        names = named(gather.schema, self.fields, "fields")
        longest = int(gather.length.max(initial=0))
        if self.to_length is not None and self.to_length < longest:
            raise SchemaError(
                f"to_length: got {self.to_length}, an episode has {longest} timesteps and is never cut off"
            )
        steps, needed = range(self.to_length or longest), None if self.to_length else gather.length
        finals = [name for name in names if self.final_observation and gather.schema.fields[name].final]
        gather.put([name for name in names if name not in finals], steps, limit=gather.length, needed=needed)
        gather.put(finals, range(len(steps) + 1), needed=None if needed is None else needed + 1)
        if self.return_lens:
            gather.batch["_lens"] = gather.length
        if self.final_observation:
            gather.batch["_has_final"] = gather.has_final
        if self.return_mask:
            gather.put_mask("_mask", steps, needed)


@dataclass(frozen=True)
class Timestep(View):
    """Single timesteps: fields (B, *field)."""

    fields: Names = None

    def __post_init__(self) -> None:
        self._keep_names("fields")

    def keys(self, schema: Schema) -> list[str]:
        return list(named(schema, self.fields, "fields"))

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        return Spans(np.zeros(len(length), np.int64), length)

    def cut(self, gather: BatchBuilder) -> None:
        gather.put_at(named(gather.schema, self.fields, "fields"), gather.t)


@dataclass(frozen=True)
class Window(View):
    """Windows of `length` consecutive timesteps that begin every `stride` steps and never leave their episode.

    A batch: fields (B, L, *field), `_lens` (B,) existing steps, `_mask` (B, L), `_start` (B,), `_reaches_episode_end`
    (B,).

    Args:
        length: L. stride: steps between starts.
        fields: which; default all.
        boundary: "pad": every start, padded behind the end; "shift": a window that would pass the end is moved back
            to end there; "repeat": that too, but every start gives one, so item i begins at step i of all, or where
            its window just fits; "drop": only windows that lie inside.
        padding: "zero", "edge" or "default".
        pad_before: windows may begin this many steps before the episode, padded in front.
    """

    length: int
    stride: int = 1
    fields: Names = None
    boundary: str = "pad"
    padding: str = "zero"
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

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        stop = length - (self.length - 1)
        if self.boundary == REPEAT:
            every = _inside(length, 0, 0, length, "pad", self.stride)
            return Spans(every.first, every.count, np.maximum(stop - 1, 0))
        return _inside(length, -self.pad_before, 0, stop, self.boundary, self.stride)

    def cut(self, gather: BatchBuilder) -> None:
        steps, t = range(self.length), gather.t
        gather.put(named(gather.schema, self.fields, "fields"), steps, limit=gather.length, padding=self.padding)
        rest = gather.length - t
        lens = np.minimum(rest, self.length) + np.minimum(t, 0)
        ends = rest <= self.length
        gather.batch |= {
            "_lens": lens,
            "_mask": gather.exists(steps),
            "_start": t + gather.begin,
            "_reaches_episode_end": ends,
        }


@dataclass(frozen=True)
class RandomCrop(View):
    """One crop of at most `length` steps from each episode, at a random place, zero-padded.

    A batch: as `Window`, without `_mask`. The place is drawn by the sampler.
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

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        return Spans(np.zeros(len(length), np.int64), np.ones_like(length))

    def crop(self, length: IntArray, u: FloatArray) -> IntArray:
        places = np.maximum(length - self.length, 0) + 1
        return np.asarray((u * places).astype(np.int64))

    def cut(self, gather: BatchBuilder) -> None:
        Window(self.length, fields=self.fields).cut(gather)
        del gather.batch["_mask"]


class Offsets(View):
    """Fields at offsets of their own around one timestep: frame stacks, histories, action chunks.

    A batch: for each field (B, K, *field) and `_mask_<field>` (B, K).

    Args:
        offsets: field -> whole numbers, `Offsets(observation=(-1, 0), action=range(16))`; dotted names by
            `Offsets({"camera.left": (-3, -2, -1, 0)})`. A group's name stands for all its fields.
        boundary: "pad": every timestep; "drop": those whose offsets all exist; "shift": those too, and one padded
            item of an episode that is too short.
        padding: "zero", "edge" or "default".
        stride: steps between anchors.
    """

    def __init__(
        self,
        offsets: Mapping[str, Iterable[int]] | None = None,
        /,
        *,
        boundary: str = "pad",
        padding: str = "zero",
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
        return isinstance(other, Offsets) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((tuple(self.offsets.items()), self.boundary, self.padding, self.stride))

    def keys(self, schema: Schema) -> list[str]:
        names = [name for group in self.offsets for name in schema.require([group], "offsets", schema.fields)]
        return [key for name in names for key in (name, f"_mask_{name}")]

    @property
    def reach(self) -> int:
        return max(1, *(max(values) + 1 for values in self.offsets.values()))

    @property
    def before(self) -> int:
        return max(0, *(-min(values) for values in self.offsets.values()))

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        low, stop = 0, length
        for group, values in self.offsets.items():
            low = min(low, *values)
            for name in schema.require([group], "offsets", schema.fields):
                exist = length + has_final if schema.fields[name].final else length
                stop = np.minimum(stop, exist - max(0, *values))
        return _inside(length, 0, low, stop, self.boundary, self.stride)

    def cut(self, gather: BatchBuilder) -> None:
        for group, values in self.offsets.items():
            for name in gather.schema.require([group], "offsets", gather.schema.fields):
                offsets = _consecutive(values)
                gather.put([name], offsets, padding=self.padding)
                gather.batch[f"_mask_{name}"] = gather.exists(offsets, gather.limit(gather.schema.fields[name].final))


def _inside(length: IntArray, start: int, low: int, stop: IntArray, boundary: str, stride: int) -> Spans:
    """Anchors from `start` on, every `stride` steps; those whose offsets all exist are -low … stop - 1."""
    first = np.full_like(length, start if boundary == "pad" else max(start, -low))
    stop = length if boundary == "pad" else stop
    count = np.maximum(-(-(stop - first) // stride), 0)
    if boundary != "shift":
        return Spans(first, count)
    first = np.minimum(first, length - 1)  # of an episode too short, some step
    last = np.maximum(stop - 1, first)
    flush = (first + (count - 1) * stride < stop - 1).astype(np.int64)
    return Spans(first, np.maximum(count + flush, 1), last)


def _consecutive(values: tuple[int, ...]) -> IntArray | range:
    """Offsets as a range, where they are one."""
    whole = range(values[0], values[0] + len(values))
    return whole if values == tuple(whole) else np.array(values)


def _check_boundary(boundary: str, known: tuple[str, ...] = BOUNDARIES) -> None:
    if boundary not in known:
        raise SchemaError(f"boundary: got {boundary!r}, expected one of {', '.join(map(repr, known))}")
