"""How an item is cut around its anchor: Trajectory, Timestep, NStep, Window, Crop, Offsets.

A view says which timesteps of an episode may be anchors (`spans`), and cuts a batch around given anchors (`cut`). It
reads through `Gather` alone, so it knows neither slots nor folders, and it is a value: frozen, picklable, comparable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.reading.gather import Gather, check_padding
from memmap_buffer.reading.sources import BoolArray
from memmap_buffer.schema import Schema
from memmap_buffer.store.storage import IntArray
from memmap_buffer.transforms import n_step_return

BOUNDARIES = ("pad", "shift", "drop")
Names = tuple[str, ...] | None


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
    terminal_field: str | None = None

    @abstractmethod
    def keys(self, schema: Schema) -> list[str]:
        """The keys of a batch before meta, in order. Raises SchemaError for a field that was not declared."""

    @abstractmethod
    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        """Which timesteps of each episode may be anchors; the arrays are (E,)."""

    @abstractmethod
    def cut(self, gather: Gather) -> None:
        """Put the batch together."""

    def crop(self, length: IntArray, rng: np.random.Generator) -> IntArray:
        """Where chance moves the anchors of episodes of these lengths (B,) to; only where the view is `random`."""
        raise NotImplementedError


def _named(schema: Schema, names: Names, where: str) -> tuple[str, ...]:
    return tuple(schema.fields) if names is None else schema.require(names, where, schema.fields)


def _tuple(names: Iterable[str] | str | None) -> Names:
    return None if names is None else (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class Trajectory(View):
    """Whole episodes, padded with zeros to the longest of the batch.

    A batch: fields (B, Tmax, *field), `_lens` (B,).

    Args:
        fields: which; default all.
        return_mask: add `_mask` (B, Tmax), True where a step exists.
        return_lens: add `_lens`.
        to_length: pad to this many steps instead of the longest of the batch.
        final_observation: fields declared with `final` get one more entry, (B, Tmax + 1, *field).
    """

    fields: Names = None
    return_mask: bool = False
    return_lens: bool = True
    to_length: int | None = None
    final_observation: bool = False
    per_episode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.to_length is not None:
            _check_count("to_length", self.to_length)

    def keys(self, schema: Schema) -> list[str]:
        return [*_named(schema, self.fields, "fields"), *["_lens"] * self.return_lens, *["_mask"] * self.return_mask]

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        return Spans(np.zeros_like(length), np.ones_like(length))

    def cut(self, gather: Gather) -> None:
        names = _named(gather.schema, self.fields, "fields")
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
        if self.return_mask:
            gather.put_mask("_mask", steps, needed)


@dataclass(frozen=True)
class Timestep(View):
    """Single timesteps: fields (B, *field)."""

    fields: Names = None

    def keys(self, schema: Schema) -> list[str]:
        return list(_named(schema, self.fields, "fields"))

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        return Spans(np.zeros_like(length), length)

    def cut(self, gather: Gather) -> None:
        gather.put_at(_named(gather.schema, self.fields, "fields"), gather.t)


@dataclass(frozen=True)
class NStep(View):
    """Transitions over n steps: what is at t, what came until t + k, and what is at t + k.

    k = min(n, length - t) where the episode has its final observation or ended by `terminated`, else
    min(n, length - t - 1); a step with k = 0 has no successor and is not served. So with either, the last step and
    its reward are always reached. A successor that does not exist is zeros.

    A batch: current fields (B, *field), `next_` (B, *field), `seq_` (B, n, *field) zero from k on, `n_step_lens` (B,)
    int64; with `gamma` also `_return` and `_discount` (B,), see `transforms.n_step_return`.

    Args:
        n: the most steps.
        current_fields, next_fields: which; default all. sequence_fields: which; default none.
        gamma: γ; None leaves return and discount out.
        reward, terminated: the names of these fields.
    """

    n: int
    current_fields: Names = None
    next_fields: Names = None
    sequence_fields: Names = ()
    gamma: float | None = None
    reward: str = "reward"
    terminated: str = "terminated"

    def __post_init__(self) -> None:
        _check_count("n_steps", self.n)
        if self.gamma is not None and not 0 <= self.gamma <= 1:
            raise SchemaError(f"gamma: got {self.gamma}, expected 0 … 1")

    @property
    def terminal_field(self) -> str:  # type: ignore[override]
        return self.terminated

    def keys(self, schema: Schema) -> list[str]:
        if self.gamma is not None:
            schema.require([self.reward], "reward", schema.fields)
        if self.terminated != "terminated":
            schema.require([self.terminated], "terminated", schema.fields)
        return [
            *_named(schema, self.current_fields, "current_fields"),
            *[f"next_{name}" for name in _named(schema, self.next_fields, "next_fields")],
            *[f"seq_{name}" for name in _named(schema, self.sequence_fields, "sequence_fields")],
            "n_step_lens",
            *["_return", "_discount"] * (self.gamma is not None),
        ]

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        return Spans(np.zeros_like(length), length - ~(has_final | terminated))

    def cut(self, gather: Gather) -> None:
        schema, t, length = gather.schema, gather.t, gather.length
        ended = _ended(gather, self.terminated)
        k = np.minimum(np.maximum(length - t - ~(gather.has_final | ended), 1), self.n)
        gather.put_at(_named(schema, self.current_fields, "current_fields"), t)
        gather.put_at(_named(schema, self.next_fields, "next_fields"), t + k, prefix="next_")
        steps = range(self.n)
        gather.put(_named(schema, self.sequence_fields, "sequence_fields"), steps, prefix="seq_", limit=t + k)
        gather.batch["n_step_lens"] = k
        if self.gamma is not None:
            self._put_return(gather, steps, k, ended & (t + k == length))

    def _put_return(self, gather: Gather, steps: range, k: IntArray, terminated: BoolArray) -> None:
        rewards = gather.look(self.reward, steps, limit=gather.t + k)
        returns, discount = n_step_return(rewards, k, terminated, self.gamma or 0.0)
        without = (gather.t + k == gather.length) & ~gather.has_final
        gather.batch |= {"_return": returns, "_discount": np.where(without, discount.dtype.type(0), discount)}


@dataclass(frozen=True)
class Window(View):
    """Windows of `length` consecutive timesteps that begin every `stride` steps and never leave their episode.

    A batch: fields (B, L, *field), `_lens` (B,) existing steps, `_mask` (B, L), `_start` (B,), `_reaches_episode_end`
    (B,).

    Args:
        length: L. stride: steps between starts.
        fields: which; default all.
        boundary: "pad": every start, padded behind the end; "shift": a window that would pass the end is moved back
            to end there; "drop": only windows that lie inside.
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
        _check_count("length", self.length)
        _check_count("stride", self.stride)
        _check_boundary(self.boundary)
        check_padding(self.padding)
        if not 0 <= self.pad_before < self.length:
            raise SchemaError(
                f"pad_before: got {self.pad_before}, expected 0 … length - 1, so that a window has a step"
            )
        if self.pad_before and self.boundary != "pad":
            raise SchemaError(f"pad_before pads, and boundary={self.boundary!r} does not; leave one out")

    def keys(self, schema: Schema) -> list[str]:
        return [*_named(schema, self.fields, "fields"), "_lens", "_mask", "_start", "_reaches_episode_end"]

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        return _inside(length, -self.pad_before, 0, length - (self.length - 1), self.boundary, self.stride)

    def cut(self, gather: Gather) -> None:
        steps, t = range(self.length), gather.t
        gather.put(_named(gather.schema, self.fields, "fields"), steps, limit=gather.length, padding=self.padding)
        rest = gather.length - t
        lens = np.minimum(rest, self.length) + np.minimum(t, 0)
        ends = rest <= self.length
        gather.batch |= {"_lens": lens, "_mask": gather.exists(steps), "_start": t, "_reaches_episode_end": ends}


@dataclass(frozen=True)
class Crop(View):
    """One crop of at most `length` steps from each episode, at a random place, zero-padded.

    A batch: as `Window`, without `_mask`. The place is drawn by the sampler.
    """

    length: int
    fields: Names = None
    per_episode: ClassVar[bool] = True
    random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_count("window_length", self.length)

    def keys(self, schema: Schema) -> list[str]:
        return [*_named(schema, self.fields, "fields"), "_lens", "_start", "_reaches_episode_end"]

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        return Spans(np.zeros_like(length), np.ones_like(length))

    def crop(self, length: IntArray, rng: np.random.Generator) -> IntArray:
        # One number of the sequence an item, so that a part of an epoch is cropped as in the whole of it.
        places = np.maximum(length - self.length, 0) + 1
        return np.asarray((rng.random(len(length)) * places).astype(np.int64))

    def cut(self, gather: Gather) -> None:
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
        _check_count("stride", stride)
        self.boundary, self.padding, self.stride = boundary, padding, stride

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offsets) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((tuple(self.offsets.items()), self.boundary, self.padding, self.stride))

    def keys(self, schema: Schema) -> list[str]:
        names = [name for group in self.offsets for name in schema.require([group], "offsets", schema.fields)]
        return [key for name in names for key in (name, f"_mask_{name}")]

    def spans(self, schema: Schema, length: IntArray, has_final: BoolArray, terminated: BoolArray) -> Spans:
        low, stop = 0, length
        for group, values in self.offsets.items():
            low = min(low, *values)
            for name in schema.require([group], "offsets", schema.fields):
                exist = length + has_final if schema.fields[name].final else length
                stop = np.minimum(stop, exist - max(0, *values))
        return _inside(length, 0, low, stop, self.boundary, self.stride)

    def cut(self, gather: Gather) -> None:
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


def _ended(gather: Gather, name: str) -> BoolArray:
    """(B,) whether each anchor's episode ended by the field `name`."""
    if name == "terminated" or name not in gather.schema.fields:
        return gather.terminated
    last = gather.look_at(name, gather.length - 1)
    return np.asarray(last.reshape(len(last), -1).any(axis=1))


def _consecutive(values: tuple[int, ...]) -> IntArray | range:
    """Offsets as a range, where they are one."""
    whole = range(values[0], values[0] + len(values))
    return whole if values == tuple(whole) else np.array(values)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise SchemaError(f"{name}: got {value!r}, expected a whole number from 1")


def _check_boundary(boundary: str) -> None:
    if boundary not in BOUNDARIES:
        raise SchemaError(f"boundary: got {boundary!r}, expected one of {', '.join(map(repr, BOUNDARIES))}")
