"""The views of states in sequence: whole episodes, timesteps, windows, crops, and fields at offsets of their own.

`Timestep` is the shortest example, `Window` the one with most options. `n_step` has the view of transitions. Who calls
a view, and when, is said in `view`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from memmap_buffer.choices import Boundary, Padding, WindowBoundary, check_choice
from memmap_buffer.dtypes import check_count, check_number
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import DECLARED, Schema
from memmap_buffer.views.anchors import BoolArray, Runs
from memmap_buffer.views.batch_builder import BatchBuilder, Ends
from memmap_buffer.views.n_step import require_returns, step_returns
from memmap_buffer.views.view import FloatArray, Names, View, named

REPEAT, CONTINUE = "repeat", "continue"


@dataclass(frozen=True)
class Trajectory(View):
    """Whole episodes, padded with zeros to the longest of the batch, as they were stored.

    A batch: fields (B, Tmax, *field), `_lens` (B,).

    Args:
        fields: the fields of a batch; default all.
        return_mask: add `_mask` (B, Tmax), True where a step exists.
        return_lens: add `_lens`.
        to_length: pad to this many steps instead of the longest of the batch.
        final_observation: fields declared with `final` have one more entry, (B, Tmax + 1, *field): entry `_lens` is the
            final observation of the episodes that have one, which `_has_final` (B,) tells.

    Raises:
        SchemaError: `to_length` is no whole number from 1; later, an episode is longer.
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
        return dict.fromkeys(self.plan(schema)[0] if self.return_lens else (), "_lens")

    @property
    def pads_to_longest(self) -> bool:
        return self.to_length is None

    @property
    def reach(self) -> int:
        return 0

    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        return episodes.replaced(count=np.ones_like(episodes.count))

    def plan(self, schema: Schema) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(the fields without a final observation in the batch, the fields with it)."""
        names = named(schema, self.fields, "fields")
        finals = tuple(name for name in names if self.final_observation and schema.fields[name].final)
        return tuple(name for name in names if name not in finals), finals

    def cut(self, builder: BatchBuilder) -> None:
        longest, (names, finals) = int(builder.length.max(initial=0)), builder.plan
        if self.to_length is not None and self.to_length < longest:
            raise SchemaError(
                f"to_length: got {self.to_length}, an episode has {longest} timesteps and is never cut off"
            )
        steps = range(self.to_length or longest)
        builder.put(names, steps, limit=builder.length)
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

    fields: Names = None

    def __post_init__(self) -> None:
        self._keep_names("fields")

    @property
    def one_per_step(self) -> bool:
        return True

    def keys(self, schema: Schema) -> list[str]:
        return list(named(schema, self.fields, "fields"))

    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        return episodes

    def plan(self, schema: Schema) -> tuple[str, ...]:
        """The names of the fields."""
        return named(schema, self.fields, "fields")

    def cut(self, builder: BatchBuilder) -> None:
        builder.put_at(builder.plan, builder.t)


class LastEntries(NamedTuple):
    """The fields of which a batch has the same number of entries, the last ones of each window.

    Attributes:
        last: the number of entries.
        plain: the fields without a final observation.
        finals: the fields with it.
    """

    last: int
    plain: tuple[str, ...]
    finals: tuple[str, ...]


@dataclass(frozen=True)
class Window(View):
    """Windows of `length` consecutive timesteps that begin every `stride` steps; only "continue" leaves the episode.

    A batch: fields (B, L, *field), `_lens` (B,) the number of steps that exist, `_mask` (B, L) which entries exist,
    `_start` (B,), `_reaches_episode_end` (B,). Entry k is timestep `_start + k`.

    Args:
        length: L.
        stride: steps between starts.
        fields: the fields of a batch; default all.
        boundary: "pad": a window at every start, padded behind the end; "shift": a window that would pass the end is
            moved back to end there; "repeat": the same, but every start has a window of its own, so the last window of
            an episode comes several times; "drop": only windows that lie inside; "continue": windows run on into the
            episodes that follow in their stream, and a start has a window where L steps follow it there.
        padding: the values of timesteps that do not exist: "zero", "edge" (the nearest one) or "default".
        pad_before: windows may begin up to this many steps before the episode, padded in front. Where steps came before
            (behind an end in the middle, or where a ring has dropped the first steps), the first window begins with
            the first step that is left.
        pad_after: windows may end up to this many steps behind the episode; default: L - 1.
        pad_in_front: a window with fewer than L steps has its padding before them instead of behind.
        allow_short: with "shift" and "repeat": True: an episode shorter than L has a padded window; False: an error is
            raised when it is drawn.
        stream: with "continue", the meta field that names the environment of an episode: the next episode with the same
            value follows; default: the episode of the next serial. Only episodes that pass the filters count. A batch
            has `_is_first` (B, L), true where a window or an episode begins, and `_is_last` (B, L), where one ends.
        burn_in: the first `burn_in` entries of a window only warm up a recurrent state: `_loss_mask` (B, L) leaves them
            out. In a window without the padding of `pad_before`, as steps came before it, they are `pad_before` fewer.
        n_steps: n, with `gamma`: a batch has the returns and discounts of n steps from every entry on, as `NStep` gives
            them, `_return` (B, L) and `_discount` (B, L), and `n_step_lens` (B, L), the k of each entry, 0 for an entry
            without a successor. Fields with `final` hold the final observation behind the last step (`_mask_<field>`
            tells where), so that the successor of entry i is entry i + k. `_loss_mask` leaves out the last n entries:
            their successors may lie behind the window.
        gamma: γ.
        reward: the field of the rewards.
        terminated: the field that is true where nothing follows; default: the one that the buffer declared.
        discount: the field of a discount of every step, as for `NStep`.
        only: field, or group -> k: a batch has the entries of the last k steps alone, (B, k, *field), and the rows
            before them are not read. With k < L, `_mask_<field>` (B, k) tells which exist. `padding`,
            `final_observation` and `n_steps` hold for these fields as for others.
        final_observation: fields with `final` have one more entry, (B, L + 1, *field): the observation after the last
            step. `_mask_<field>` (B, L + 1) tells which exist.
        start_fields: fields of which a window has its first existing step alone, (B, *field), such as a recurrent state
            that was stored.
        return_steps: a batch has `_steps` (B, L, 2), the serial and the timestep of every entry, as `write` takes them;
            -1 for an entry that does not exist. With several folders (B, L, 3), the number of the folder first.

    Raises:
        SchemaError: a value that is not allowed, or two that exclude each other; later, an unknown field.
        NotEnoughDataError: later, an episode is shorter than L, and `allow_short` is False.

    Source of `burn_in` and `start_fields`: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed
        Reinforcement Learning".
    """

    length: int
    stride: int = 1
    fields: Names = None
    boundary: WindowBoundary = "pad"
    padding: Padding = "zero"
    pad_before: int = 0
    pad_after: int | None = None
    pad_in_front: bool = False
    allow_short: bool = True
    stream: str | None = None
    burn_in: int = 0
    n_steps: int | None = None
    gamma: float | None = None
    reward: str = "reward"
    terminated: str | None = DECLARED
    start_fields: Names = ()
    return_steps: bool = False
    discount: str | None = None
    final_observation: bool = False
    only: Mapping[str, int] | tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        self._keep_names("fields", "start_fields")
        check_count("length", self.length)
        pairs = tuple(self.only.items()) if isinstance(self.only, Mapping) else self.only
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise SchemaError(f"only: got {self.only!r}, expected {{field: steps}}, such as {{'image': 2}}")
        object.__setattr__(self, "only", pairs)  # so that views are values
        for name, steps in pairs:
            check_count(f"only[{name!r}]", steps)
            if steps > self.length:
                raise SchemaError(f"only: got {steps} steps of {name!r}, expected 1 … length={self.length}")
        check_count("stride", self.stride)
        check_choice("boundary", self.boundary, WindowBoundary)
        check_choice("padding", self.padding, Padding)
        for name in ("pad_before", "pad_after", "burn_in"):
            steps = getattr(self, name)
            check_count(name, steps or 0, 0)
            if (steps or 0) >= self.length:
                raise SchemaError(f"{name}: got {steps}, expected 0 … length - 1, so that a window has a step")
        if self.n_steps is not None:
            check_count("n_steps", self.n_steps)
            check_number("gamma", self.gamma)
        self._check_together()

    def _check_together(self) -> None:
        boundary = f"boundary={self.boundary!r}"
        rules = (
            *[
                (f"{name} pads, and {boundary} does not; leave one out", getattr(self, name) and self.boundary != "pad")
                for name in ("pad_before", "pad_after", "pad_in_front")
            ],
            ("pad_before and pad_in_front exclude each other; leave one out", self.pad_before and self.pad_in_front),
            (
                f"allow_short=False goes with 'shift' and 'repeat', got {boundary}; 'drop' leaves short episodes out",
                not self.allow_short and self.boundary not in ("shift", REPEAT),
            ),
            (f"stream goes with boundary='continue', got {boundary}", self.stream and self.boundary != CONTINUE),
            (
                "final_observation is of one episode, and boundary='continue' goes on in others; leave one out",
                self.final_observation and self.continues,
            ),
            ("discount goes with n_steps and gamma; give these", self.discount and not self.n_steps),
            ("gamma goes with n_steps; give both", (self.gamma is None) != (self.n_steps is None)),
            ("n_steps ends with its episode, and boundary='continue' does not", self.n_steps and self.continues),
        )
        for text, broken in rules:
            if broken:
                raise SchemaError(text)

    def keys(self, schema: Schema) -> list[str]:
        if self.stream is not None and self.stream not in schema.meta_fields:
            raise schema.unknown(self.stream, "stream", schema.meta_fields)
        if self.n_steps:
            require_returns(schema, self.reward, self.terminated, self.discount)
        (names, at_start), masked = self._names(schema), self._masked(schema)
        return [
            *names,
            *at_start,
            *["_lens", "_mask", "_start", "_reaches_episode_end"],
            *["_is_first", "_is_last"] * bool(self.continues),
            *["_steps"] * self.return_steps,
            *["n_step_lens", "_return", "_discount"] * bool(self.n_steps),
            *[f"_mask_{name}" for name in names if name in masked],
            *["_loss_mask"] * bool(self.burn_in or self.n_steps),
        ]

    def _names(self, schema: Schema) -> tuple[list[str], tuple[str, ...]]:
        """(the fields with an entry for each step, the fields of which a window has one step)."""
        at_start = named(schema, self.start_fields, "start_fields")
        return [name for name in named(schema, self.fields, "fields") if name not in at_start], at_start

    def sequences(self, schema: Schema) -> dict[str, str]:
        padded_behind = not (self.pad_before or self.pad_in_front or self.continues or self.n_steps)
        masked = self._masked(schema)
        return {name: "_lens" for name in self._names(schema)[0] if padded_behind and name not in masked}

    def _masked(self, schema: Schema) -> set[str]:
        """The fields whose entries are not the window's, so that a batch has masks of their own for them."""
        groups, _ = self.plan(schema)
        return {name for last, plain, finals in groups for name in (*finals, *plain * (last < self.length))}

    @property
    def reach(self) -> int:
        return self.length + (self.n_steps or 1) - 1

    @property
    def repeats(self) -> bool:
        return self.boundary == REPEAT

    @property
    def continues(self) -> int:
        return self.length if self.boundary == CONTINUE else 0

    def ends(self, schema: Schema) -> Ends:
        before = int(bool(self.burn_in and self.pad_before))  # the step before an anchor: `cut` asks for ends there
        return Ends.of(schema, self.terminated, before=before, after=0 if self.continues else self.reach)

    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        stop = episodes.count - (self.length - 1)
        if self.boundary in (REPEAT, CONTINUE):
            starts = _inside(episodes, 0, 0, stop, "pad", self.stride)
            return starts if self.continues else starts.replaced(last=np.maximum(stop - 1, 0))
        end = episodes.count if self.pad_after is None else stop + self.pad_after
        return _inside(episodes, -self.pad_before, 0, stop, self.boundary, self.stride, end)

    def plan(self, schema: Schema) -> tuple[list[LastEntries], tuple[str, ...]]:
        """(the fields with an entry for each step, grouped by the number of entries; the fields with one step)."""
        names, at_start = self._names(schema)
        last = dict.fromkeys(names, self.length)
        for group, steps in dict(self.only).items():
            last |= dict.fromkeys(schema.require([group], "only", names), steps)
        groups, shows_final = [], self.n_steps or self.final_observation
        for steps in dict.fromkeys([self.length, *last.values()]):
            finals = tuple(name for name in names if last[name] == steps and shows_final and schema.fields[name].final)
            plain = tuple(name for name in names if last[name] == steps and name not in finals)
            groups.append(LastEntries(steps, plain, finals))
        return groups, at_start

    def cut(self, builder: BatchBuilder) -> None:
        if not self.allow_short:
            builder.require_steps(self.length)
        if self.pad_in_front:
            builder.pad_in_front(self.length)
        steps, t, (groups, at_start) = range(self.length), builder.t, builder.plan
        stop = builder.run_on(self.length) if self.continues else builder.length
        self._put_fields(builder, groups, stop)
        if at_start:
            builder.put_at(at_start, np.maximum(t, 0))
        rest = stop - t
        mask = builder.exists(steps, stop)
        builder.batch |= {
            "_lens": np.minimum(rest, self.length) + np.minimum(t, 0),
            "_mask": mask,
            "_start": t + builder.begin,
            "_reaches_episode_end": builder.length - t <= self.length,
        }
        if self.continues:
            builder.put_ends("_is_first", "_is_last", steps)
        if self.return_steps:
            builder.put_steps("_steps", steps)
        learned = mask
        if self.n_steps:
            returns = step_returns(builder, steps, self.n_steps, self.gamma or 0.0, self.reward, self.discount)
            builder.batch |= returns
            learned = mask & (returns["n_step_lens"] > 0) & (np.arange(self.length) < self.length - self.n_steps)
        if self.burn_in or self.n_steps:
            unpadded = (t == 0) & (np.asarray(builder.begin) > 0)
            warm = self.burn_in - self.pad_before * unpadded[:, None]
            builder.batch["_loss_mask"] = learned & (np.arange(self.length) >= warm)

    def _put_fields(self, builder: BatchBuilder, groups: Sequence[LastEntries], stop: IntArray) -> None:
        """Put the fields with an entry for each step, and the masks of those whose entries are not the window's."""
        for last, names, finals in groups:
            steps = range(self.length - last, self.length)
            builder.put(names, steps, limit=builder.length, padding=self.padding)
            if last < self.length and names:
                exist = builder.exists(steps, stop)
                builder.batch |= {f"_mask_{name}": exist for name in names}
            if finals:
                observed = range(steps.start, self.length + self.final_observation)
                builder.put(finals, observed, padding=self.padding)
                exist = builder.exists(observed, builder.limit(True))
                builder.batch |= {f"_mask_{name}": exist for name in finals}


@dataclass(frozen=True)
class RandomCrop(View):
    """A crop of at most `length` steps from each episode, at a random place, zero-padded.

    A batch: as that of `Window`, without `_mask`. The sampler draws the place.

    Args:
        length: the most steps of a crop.
        fields: the fields of a batch; default all.

    Raises:
        SchemaError: `length` is no whole number from 1.
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

    def plan(self, schema: Schema) -> Any:
        """The plan of a `Window` with the same fields."""
        return Window(self.length, fields=self.fields).plan(schema)

    def cut(self, builder: BatchBuilder) -> None:
        Window(self.length, fields=self.fields).cut(builder)
        del builder.batch["_mask"]


class Offsets(View):
    """Fields at offsets of their own around one timestep: frame stacks, histories, action chunks.

    A batch: for each field (B, K, *field) and `_mask_<field>` (B, K).

    Args:
        offsets: field -> whole numbers, `Offsets(observation=(-1, 0), action=range(16))`; dotted names by
            `Offsets({"camera.left": (-3, -2, -1, 0)})`. A group's name stands for all its fields.
        boundary: "pad": an item at every timestep; "drop": only where all offsets exist; "shift": the same, but an
            episode that is too short has one padded item.
        padding: the values of timesteps that do not exist: "zero", "edge" (the nearest one) or "default".
        stride: steps between anchors.
        drop_last: the last timesteps of an episode at which there is no item, padded or not.
        pad_after: an item may reach up to this many steps behind the episode; default: as far as its offsets do.
        fields: the same as `offsets`, by keyword.

    Raises:
        SchemaError: a value that is not allowed; later, an unknown field.
    """

    def __init__(
        self,
        offsets: Mapping[str, Iterable[int]] | None = None,
        /,
        *,
        boundary: Boundary = "pad",
        padding: Padding = "zero",
        stride: int = 1,
        drop_last: int = 0,
        pad_after: int | None = None,
        **fields: Iterable[int],
    ) -> None:
        by_field = {**(offsets or {}), **fields}
        self.offsets = {name: tuple(values) for name, values in by_field.items()}
        every = [k for values in self.offsets.values() for k in values]
        if (
            not self.offsets
            or not all(self.offsets.values())
            or not all(isinstance(k, (int, np.integer)) for k in every)
        ):
            raise SchemaError(f"offsets: got {by_field!r}, expected at least one whole number for at least one field")
        check_choice("boundary", boundary, Boundary)
        check_choice("padding", padding, Padding)
        check_count("stride", stride)
        check_count("drop_last", drop_last, 0)
        check_count("pad_after", pad_after or 0, 0)
        if pad_after is not None and boundary != "pad":
            raise SchemaError(f"pad_after pads, and boundary={boundary!r} does not; leave one out")
        self.boundary, self.padding, self.stride, self.drop_last = boundary, padding, stride, drop_last
        self.pad_after = pad_after

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offsets) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        how = f"boundary={self.boundary!r}, padding={self.padding!r}, stride={self.stride!r}"
        how += f", drop_last={self.drop_last}" * bool(self.drop_last)
        how += f", pad_after={self.pad_after}" * (self.pad_after is not None)
        return f"Offsets({self.offsets!r}, {how})"

    @property
    def _value(self) -> tuple[object, ...]:
        how = self.boundary, self.padding, self.stride, self.drop_last, self.pad_after
        return tuple(self.offsets.items()), *how

    def keys(self, schema: Schema) -> list[str]:
        return [key for name, _ in self.plan(schema) for key in (name, f"_mask_{name}")]

    def plan(self, schema: Schema) -> list[tuple[str, IntArray | range]]:
        """(a field, its offsets) for each field."""
        by_group = [(schema.require([name], "offsets", schema.fields), k) for name, k in self.offsets.items()]
        return [(name, _consecutive(values)) for names, values in by_group for name in names]

    @property
    def reach(self) -> int:
        return max(1, *(max(values) + 1 for values in self.offsets.values()))

    @property
    def before(self) -> int:
        return max(0, *(-min(values) for values in self.offsets.values()))

    def anchors(self, schema: Schema, episodes: Runs, has_final: BoolArray, terminated: BoolArray) -> Runs:
        stop = episodes.count
        for name, offsets in self.plan(schema):
            exist = episodes.count + has_final if schema.fields[name].final else episodes.count
            stop = np.minimum(stop, exist - max(0, *offsets))
        beyond = 0 if self.pad_after is None else self.reach - 1 - self.pad_after
        end = episodes.count - max(self.drop_last, beyond)
        return _inside(episodes, 0, -self.before, stop, self.boundary, self.stride, end)

    def cut(self, builder: BatchBuilder) -> None:
        for name, offsets in builder.plan:
            builder.put([name], offsets, padding=self.padding)
            builder.batch[f"_mask_{name}"] = builder.exists(offsets, builder.limit(builder.schema.fields[name].final))


def _inside(
    episodes: Runs, start: int, low: int, stop: IntArray, boundary: str, stride: int, end: IntArray | None = None
) -> Runs:
    """The anchors of episodes (E,), every `stride` steps, as `boundary` says.

    Args:
        start: the first anchor, where items may be padded in front.
        low: the lowest offset of an item, at most 0: from -low on, an item needs no padding in front.
        stop: (E,) the first anchor whose item needs padding behind.
        end: (E,) all anchors are below it; default: the length of the episode.
    """
    length, end = episodes.count, episodes.count if end is None else end
    first = np.full_like(length, start if boundary == "pad" else max(start, -low))
    stop = end if boundary == "pad" else np.minimum(stop, end)
    count = np.maximum(-(-(stop - first) // stride), 0)
    if boundary != "shift":
        return episodes.replaced(first=first, count=count)
    first = np.minimum(first, length - 1)  # an episode that is too short has one padded item
    last = np.maximum(stop - 1, first)
    flush = (first + (count - 1) * stride < stop - 1).astype(np.int64)  # one more anchor: its item ends at the end
    return episodes.replaced(first=first, count=np.maximum(count + flush, 1), last=last)


def _consecutive(values: tuple[int, ...]) -> IntArray | range:
    """Offsets (K,) as a range if each is one more than the one before, else as an array."""
    whole = range(values[0], values[0] + len(values))
    return whole if values == tuple(whole) else np.array(values)
