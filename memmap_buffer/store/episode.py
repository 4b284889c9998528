"""An open episode: its steps staged in memory, checked as they come. Touches no file; publishing is the sink's."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from memmap_buffer.errors import EpisodeStateError, SchemaError
from memmap_buffer.schema import Field, Schema
from memmap_buffer.values import Array

if TYPE_CHECKING:
    from typing_extensions import Self

FIRST_CAPACITY = 64
CHUNK_BYTES = 4 << 20  # staged at a time by an episode that is written in place
ENDS = ("terminated", "truncated")


class Sink(Protocol):
    """Where an episode goes: the writer."""

    schema: Schema
    max_timesteps: int

    def publish(self, episode: Episode, *, cut: bool) -> None:
        """Make it visible, and set its state to "published"."""

    def withdraw(self, episode: Episode) -> None:
        """Forget it."""


class Episode:
    """One episode being written. Nothing of it is visible before `publish`, unless the buffer publishes every step.

    As a context manager it publishes at the end of the block and aborts on any exception; with `keep_partial` it
    publishes, flagged as cut short, what was stored before the exception.

    Args:
        sink: who publishes it. meta: what is known at the start. keep_partial: see above.
        on_step: called after each stored step, or None: it publishes the steps stored so far.
        spill: called when CHUNK_BYTES are staged, or None: it writes them out, so that no more is ever staged.

    Attributes:
        length: timesteps stored. columns: field -> its staged rows, from timestep `base` on.
        finals, meta: the final observation and the meta fields, as stored.
        state: "open", "published" or "aborted". ended: the flag that ended it, or "".
    """

    def __init__(
        self,
        sink: Sink,
        meta: Mapping[str, Any],
        *,
        keep_partial: bool = False,
        on_step: Callable[[Episode], None] | None = None,
        spill: Callable[[Episode], None] | None = None,
    ) -> None:
        self._sink = sink
        self._schema = sink.schema
        self._on_step = on_step
        self._spill = spill
        self.keep_partial = keep_partial
        self.length = 0
        self.base = 0
        self.columns: dict[str, Array] = {}
        self.finals: dict[str, Array] = {}
        self.meta: dict[str, Array] = {name: field.fill for name, field in self._schema.meta_fields.items()}
        self.state = "open"
        self.ended = ""
        self._plan: dict[str, _Column] = {}
        self._capacity = 0
        self._ends = tuple(name for name in ENDS if _is_flag(self._schema.fields.get(name)))
        self._step_type = _step_type(tuple(self._schema.fields))
        self.update(meta)

    # Storing

    def store(self, **step: Any) -> Any:
        """Append one timestep.

        Args:
            step: field -> value: a tensor, array, list or scalar of the field's shape; nested dicts for groups. What
                is left out gets its default.

        Returns:
            A named tuple of the values as given, in the order of the schema.

        Raises:
            SchemaError: an unknown field, a missing one without a default, a wrong shape, a lossy cast.
            EpisodeStateError: the episode is over, or longer than `max_timesteps`.
            OSError: with `publish="step"` or `stage="disk"`, the disk is full, say.
            In each case the step was not stored (`length` tells), and the episode goes on as it was.
        """
        t = self._room()
        plan, row = self._plan, t - self.base
        for name, value in step.items():
            column = plan.get(name)
            if column is None:
                return self.store(**self._flattened(step, t))
            array, dtype, shape, scalars, low, high, field = column
            kind = type(value)
            if kind is np.ndarray:
                fits = (value.dtype is dtype or value.dtype == dtype) and value.shape == shape
            else:
                fits = kind in scalars and low <= value <= high
            array[row] = value if fits else self._encode(field, name, value, t)
        if len(step) != len(plan):
            step = self._with_defaults(step, t)
        self._advance(t)
        return self._step_type._make(map(step.__getitem__, plan))

    def store_rows(self, rows: Mapping[str, Array], count: int = 1) -> None:
        """Append timesteps that are encoded already: every field -> (count, *field), ended by the last of them at most.

        What is written in place is written step by step.
        """
        if count > 1 and not self.staged:
            for t in range(count):
                self.store_rows({name: column[t : t + 1] for name, column in rows.items()})
            return
        t = self._room(count)
        row = t - self.base
        for name, column in self._plan.items():
            column.array[row : row + count] = rows[name]
        self._advance(t + count - 1)

    def fill(self, columns: Mapping[str, Array], length: int) -> None:
        """Take whole encoded columns, (length, *field) each, as the episode's steps."""
        self._require_within(length)
        for name in self._ends:
            early = np.flatnonzero(columns[name][: length - 1])
            if early.size:
                raise EpisodeStateError(
                    f"timestep {early[0]} of {length} is {name}, yet steps follow it; "
                    "split the data into episodes there"
                )
        self.columns, self.length, self.base = dict(columns), length, 0
        self._ended_at(length - 1)
        self._plan, self._capacity = {}, 0

    @property
    def staged(self) -> bool:
        """Whether nothing of it is written anywhere before it is published."""
        return self._on_step is None and self._spill is None

    def drop_last(self, count: int = 1) -> None:
        """Take the last stored timesteps back."""
        self.length, self.ended = self.length - count, ""

    def final(self, **observation: Any) -> None:
        """Store the observation after the last action: every field that was declared with `final`, once.

        Raises: SchemaError: a field that has none, or one is missing. EpisodeStateError: no step was stored yet.
        """
        self._require_open()
        names = self._schema.final_names
        if self.length == 0 or self.finals:
            what = "called before the first step" if self.length == 0 else "called twice"
            raise EpisodeStateError(f"final: {what}; call it once, after the last `store`")
        given = self._schema.flatten(observation)
        for name in given:
            if name not in names:
                raise self._schema.unknown(name, "final (fields declared with final=True)", names)
        missing = sorted(names - given.keys())
        if missing:
            raise SchemaError(
                f"final: {', '.join(map(repr, missing))} missing; all fields with final=True belong together"
            )
        fields = self._schema.fields
        self.finals = {
            name: self._encode(fields[name], name, value, self.length).copy() for name, value in given.items()
        }

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a meta field; it may be known only at the end."""
        self.update({name: value})

    def update(self, meta: Mapping[str, Any]) -> None:
        """Set meta fields. Raises SchemaError naming an unknown one, a wrong shape, or a lossy cast."""
        self._require_open()
        known = self._schema.meta_fields
        for name, value in self._schema.flatten(meta).items():
            if name not in known:
                raise self._schema.unknown(name, "meta", known)
            self.meta[name] = self._encode(known[name], name, value, None).copy()

    # Ending

    def publish(self, *, cut: bool = False) -> None:
        """Publish the episode: visible to every process when this returns. An episode without steps is dropped.

        Raises: OSError: the disk is full, say. Nothing became visible, and the staged episode can be published again.
        """
        self._require_open()
        if self.length:
            self._sink.publish(self, cut=cut)
        else:
            self.abort()

    def abort(self) -> None:
        """Drop the episode; steps that `publish="step"` had shown are withdrawn."""
        if self.state == "open":
            self._sink.withdraw(self)
            self.state = "aborted"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.state != "open":
            return
        if kind is None:
            self.publish()
        elif self.length and (self.keep_partial or self._on_step is not None):
            self.publish(cut=True)  # steps that were published are kept: they were promised to last
        else:
            self.abort()

    # Within

    def _require_open(self) -> None:
        if self.state != "open":
            raise EpisodeStateError(f"this episode was {self.state}; begin a new one with one_episode()")

    def require_room(self, count: int = 1) -> None:
        """Raise EpisodeStateError unless so many more steps can be stored."""
        self._room(count if self._spill is None else 1)

    def _room(self, count: int = 1) -> int:
        if self.state != "open" or self.ended or self.finals:
            self._refuse()
        if self.length + count > self.base + self._capacity:
            self._grow(self.length + count)
        return self.length

    def _refuse(self) -> None:
        self._require_open()
        what = f"ended at timestep {self.length - 1} by `{self.ended}`" if self.ended else "has its final observation"
        raise EpisodeStateError(f"timestep {self.length}: the episode {what}; begin a new one for the steps after it")

    def _require_within(self, length: int) -> None:
        limit = self._sink.max_timesteps
        if length > limit:
            raise EpisodeStateError(
                f"timestep {limit}: the episode is longer than max_timesteps ({limit}); create the buffer with "
                "a larger max_timesteps, or end the episode here and go on in a new one"
            )

    def _grow(self, needed: int) -> None:
        self._require_within(needed)
        limit = self._sink.max_timesteps
        if self._spill is not None and self._capacity:
            self._spill(self)
            self.base = self.length
            return
        capacity = min(limit, max(needed, self._first_capacity(), 2 * self._capacity))
        for name, field in self._schema.fields.items():
            array = np.empty((capacity, *field.shape), field.storage)
            if self.length:
                array[: self.length] = self.columns[name][: self.length]
            self.columns[name] = array
            self._plan[name] = _column(field, array)
        self._capacity = capacity

    def _first_capacity(self) -> int:
        if self._spill is None:
            return FIRST_CAPACITY
        step = sum(field.itemsize for field in self._schema.fields.values())
        return max(1, CHUNK_BYTES // step)

    def _advance(self, t: int) -> None:
        self._ended_at(t)
        self.length = t + 1
        if self._on_step is not None:
            self._on_step(self)

    def _ended_at(self, t: int) -> None:
        for name in self._ends:
            if self.columns[name][t - self.base]:
                self.ended = name
                return

    def _encode(self, field: Field, name: str, value: Any, t: int | None) -> Array:
        try:
            return field.encode(value)
        except SchemaError as error:
            where = f"meta field {name!r}" if t is None else f"field {name!r}, timestep {t}"
            hint = "; store one step, not a batch" if t is not None and "shape" in str(error) else ""
            raise SchemaError(f"{where}: {error}{hint}", field=name, timestep=t) from None

    def _flattened(self, step: Mapping[str, Any], t: int) -> dict[str, Any]:
        flat = self._schema.flatten(step)
        for name in flat:
            if name not in self._plan:
                raise self._schema.unknown(name, f"timestep {t}", self._schema.fields)
        return flat

    def _with_defaults(self, step: dict[str, Any], t: int) -> dict[str, Any]:
        full = dict(step)
        for name, column in self._plan.items():
            if name not in full:
                full[name] = column.array[t - self.base] = require_default(column.field, name, f"timestep {t}")
        return full


class _Column(NamedTuple):
    """What `store` needs to know of a field: the staging array, and which values fit it without a cast."""

    array: Array
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    scalars: frozenset[type]
    low: Any
    high: Any
    field: Field


_SCALARS = {
    "f": frozenset({float, np.float64, np.float32}),
    "i": frozenset({int, np.int64, np.int32}),
    "u": frozenset({int, np.int64, np.int32}),
    "b": frozenset({bool, np.bool_}),
}


def _column(field: Field, array: Array) -> _Column:
    kind, low, high = field.storage.kind, 0, 1
    scalars = _SCALARS.get(kind, frozenset()) if field.shape == () and field.dtype != "bfloat16" else frozenset()
    if kind == "f":
        low, high = float(np.finfo(field.storage).min), float(np.finfo(field.storage).max)  # type: ignore[assignment]
    elif kind in "iu":
        low, high = int(np.iinfo(field.storage).min), int(np.iinfo(field.storage).max)
    return _Column(array, field.direct, field.shape, scalars, low, high, field)


def require_default(field: Field, name: str, where: str) -> Array:
    """The default of a field that was left out. Raises SchemaError where it has none."""
    if field.default is None:
        raise SchemaError(
            f"field {name!r}, {where}: missing, and it has no default; store it, or declare one: "
            f"({field.dtype!r}, {field.shape}, default)",
            field=name,
        )
    return field.fill


def _is_flag(field: Field | None) -> bool:
    """Whether a field can say that the episode ended: one number or bool, true where it is not 0."""
    return field is not None and field.shape in ((), (1,)) and field.storage.kind in "biuf"


@lru_cache(maxsize=64)
def _step_type(names: tuple[str, ...]) -> Any:
    return namedtuple("Step", [name.replace(".", "_") for name in names], rename=True)
