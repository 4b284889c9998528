"""Timesteps of several environments as they were given: checked, encoded, with both axes, and where they end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array, FloatArray, to_numpy
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import LENGTHS, Schema
from memmap_buffer.writing.episode import End, Episode
from memmap_buffer.writing.validation import add_defaults

NEXT = "next_"
# TD errors of steps that are not published yet: episode -> (t, error) pairs.
Waiting: TypeAlias = dict[Any, list[tuple[int, float]]]
# (T, B) TD errors that timesteps are given with, and before them where those of steps that are stored are kept.
Errors: TypeAlias = tuple[Waiting, FloatArray]


class Steps:
    """Timesteps of several environments, checked and encoded.

    Args:
        schema: the fields.
        values: field -> (T, B, *field), (B, *field) for one timestep, (T, *field) or (*field) for one environment; meta
            fields alike; `next_<field>` of fields with `final`: the observation after the step.
        time: whether there is an axis of time.

    Attributes:
        lead: the axes that were given before those of a field.
        fields: name -> (T, B, *field).
        meta: likewise.
        following: likewise, the observations after each step.
        ends: (T, B) bool, where an episode ends.
        done: how many of the timesteps a stream has stored.
        recorded: the environments of which the last of them was one of an episode.
        over: (B,) of which environments it ended one.
        errors: the TD errors that they are given with, if any.
        last: the ends of episodes with the last of the timesteps that are being stored.

    Raises:
        SchemaError: an unknown field, a missing one without a default, a wrong shape, axes that differ, a lossy cast.
    """

    recorded: IntArray
    over: Array
    errors: Errors | None = None
    last: Sequence[End] = ()
    # Until all is told of those that are stored, an episode that gets them, and how many it had, and were done, before.
    before: tuple[Episode, int, int] | None = None

    def __init__(self, schema: Schema, values: Mapping[str, Any], *, time: bool) -> None:
        self.done = 0
        groups = {name.split(".")[0] for name in schema.all}
        own = {name: name.removeprefix(LENGTHS) for name in values}
        later = {name for name in values if own[name].startswith(NEXT) and own[name].split(".")[0] not in groups}
        flat = schema.flatten({name: value for name, value in values.items() if name not in later})
        following = schema.flatten({name.replace(NEXT, "", 1): values[name] for name in later})
        if not flat:
            raise SchemaError("no field was given; give field=values for every environment")
        schema.require(flat, "timesteps")
        schema.require(following, "`next_` of fields declared with final=True", schema.final_names)
        if following and following.keys() != schema.final_names:
            missing = ", ".join(f"{NEXT}{name}" for name in sorted(schema.final_names - following.keys()))
            raise SchemaError(f"{missing} missing; all fields with final=True belong together")
        self.lead = _leading(schema, {**{f"{NEXT}{name}": value for name, value in following.items()}, **flat}, time)
        self.following = {name: _encode(schema, name, value, self.lead, time) for name, value in following.items()}
        columns = {name: _encode(schema, name, value, self.lead, time) for name, value in flat.items()}
        self._axes = _require_same_axes({**self.following, **columns})
        self.fields = {name: columns[name] for name in schema.fields if name in columns}
        self.meta = {name: columns[name] for name in schema.meta_fields if name in columns}
        add_defaults(schema, self.fields, self._axes, "timesteps")
        self._find_ends(schema)

    @classmethod
    def of(
        cls, schema: Schema, columns: Mapping[str, Array], meta: Mapping[str, Array], errors: Errors | None = None
    ) -> Steps:
        """A timestep, of every field as (B, *field), and `next_<field>` where given; meta fields alike."""
        steps = cls.__new__(cls)
        steps.done, steps.errors, steps.meta = 0, errors, {name: values[None] for name, values in meta.items()}
        steps.fields = {name: columns[name][None] for name in schema.fields}
        steps.following = {
            name.removeprefix(NEXT): rows[None] for name, rows in columns.items() if name not in steps.fields
        }
        steps._axes = next(iter(steps.fields.values())).shape[:2]
        steps._find_ends(schema)
        return steps

    def _find_ends(self, schema: Schema) -> None:
        flags = [self.fields[name].reshape(self._axes).astype(np.bool_, copy=False) for name in schema.ends]
        self.ends: Array = reduce(or_, flags) if flags else np.zeros(self._axes, np.bool_)

    def begin_to_store(self, episode: Episode, ends: Sequence[End]) -> None:
        """Know an episode that gets the timesteps that are next, as all do that get them or none; what ends with them.

        Args: ends: of episodes, with the last of these timesteps.
        """
        self.last, self.before = ends, (episode, episode.length, self.done)

    def count(self) -> int:
        """See by the length of that episode how many are stored; those that nobody was told of yet."""
        if self.before is None:
            return 0
        episode, length, done = self.before
        self.done = done + episode.length - length
        return self.done - done

    def keep(self) -> None:
        """Have copies of the arrays that were given."""
        self.fields, self.meta, self.following = (
            {name: rows.copy() for name, rows in values.items()} for values in (self.fields, self.meta, self.following)
        )
        self.ends = self.ends.copy()

    @property
    def num_envs(self) -> int:
        return self._axes[1]


def keep_errors(
    errors: Errors, episodes: Sequence[Any], lengths: Sequence[int], chosen: Iterable[int], steps: slice
) -> None:
    """Keep the errors of the last timesteps of some environments' episodes: `steps` of those that were given."""
    waiting, values = errors
    by_environment = values[steps].T.tolist()
    for i in chosen:
        episode, kept = episodes[i], by_environment[i]
        waiting.setdefault(episode, []).extend(enumerate(kept, lengths[i] - len(kept)))


def _leading(schema: Schema, flat: Mapping[str, Any], time: bool) -> int:
    """How many axes stand before those of the fields: time, if there is one, and the environments, if several."""
    axes_of = {}
    for name, value in flat.items():
        field = schema.all[name] if name in schema.all else schema.fields[name.removeprefix(NEXT)]
        if field.is_list:  # it does not tell
            continue
        ndim = getattr(value, "ndim", None)
        axes_of[name] = (to_numpy(value).ndim if ndim is None else int(ndim)) - len(field.shape)
    lead = next(iter(axes_of.values()), time + 1)
    if {lead, *axes_of.values()} != {lead} or lead not in (time, time + 1):
        shown = ", ".join(f"{name}: {axes}" for name, axes in axes_of.items())
        wanted = "(T, *field) or (T, B, *field)" if time else "(*field) or (B, *field)"
        raise SchemaError(f"got so many axes before those of a field: {shown}; expected every field as {wanted}")
    return lead


def _encode(schema: Schema, name: str, value: Any, lead: int, time: bool) -> Array:
    """(T, B, *field) of a field as it was given."""
    if not lead and schema.all[name].is_list:
        value, lead = [value], 1  # of one environment: encoded with its axis, as a list's own tells nothing
    rows = schema.encode(name, value, lead)
    axes, shape = rows.shape[:lead], rows.shape[lead:]
    return rows.reshape((*(axes if time else (1, *axes)), *([1] if lead == time else []), *shape))


def _require_same_axes(columns: Mapping[str, Array]) -> tuple[int, int]:
    axes = {name: column.shape[:2] for name, column in columns.items()}
    first = next(iter(axes.values()))
    if set(axes.values()) != {first} or 0 in first:
        shown = ", ".join(f"{name}: {time} × {envs}" for name, (time, envs) in axes.items())
        raise SchemaError(f"got timesteps × environments {shown}; expected the same number for every field, from 1")
    return first[0], first[1]
