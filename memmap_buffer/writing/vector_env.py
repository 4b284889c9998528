"""Transitions of environments that run on: which of them make an episode, and when it ends.

What an episode's steps are is `episode`'s; how it becomes visible is the writer's. Nothing is kept here but the open
episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array, to_numpy
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import Schema
from memmap_buffer.writing.episode import Episode, require_default
from memmap_buffer.writing.episode_group import EpisodeGroup

NEXT = "next_"


class EpisodeStream(EpisodeGroup):
    """B environments side by side, each with its own episode ends; `episodes` are those they are in.

    An episode that is cut where it is as long as it may be has what was seen next as its final observation: by `next_`
    of its last step, or else by the step that follows, which adds it.

    Args:
        schema: the fields. size: B. limit: the longest episode. begin: opens an episode. skips_resets: the step after
            an episode's end is the environment's reset, no step of an episode, and is left out.
    """

    def __init__(
        self, schema: Schema, size: int, limit: int, begin: Callable[[], Episode], *, skips_resets: bool = False
    ) -> None:
        super().__init__(schema, [])
        self._size, self._limit, self._begin, self._skips_resets = size, limit, begin, skips_resets
        self.over = np.zeros(size, np.bool_)  # of which environments the last step ended an episode
        self._following: dict[str, Array] = {}  # what was seen after the last step
        # By environment, an episode that was cut without its final observation, and that, once it was seen.
        self._cut: dict[int, tuple[Episode, dict[str, Array]]] = {}

    def __len__(self) -> int:
        return self._size

    def extend(self, steps: Steps) -> None:
        """Append timesteps to every environment; an episode that ends, or is as long as it may be, is published.

        Raises: BufferFullError: of the timesteps, those are stored that lie before an episode for which there is no
            room. OSError: what could not be written is kept, and written by the next call. Called again with the same
            `steps` it goes on where it stood.
        """
        count = len(steps.ends)
        while steps.done < count:
            self._publish_what_ended()
            self._see(steps)
            self._begin_where_needed()
            start, recorded = steps.done, self._recorded()
            if all(episode.staged for episode in self.episodes):
                self._append(steps, self._stop(steps, recorded), recorded)
            else:
                self._append_in_place(steps, recorded)
            if steps.done > start:
                self.over[:] = False
                self.over[recorded] = steps.ends[steps.done - 1, recorded]
                self._following = {name: rows[steps.done - 1].copy() for name, rows in steps.following.items()}
        self._publish_what_ended()

    def publish(self, *, cut: bool = True) -> None:
        """Publish what is open, as `cut` short where it did not end; what was seen last is the final observation."""
        for i, episode in enumerate(self.episodes):
            if episode.state == "open":
                if episode.length and self._following and not (episode.ended or episode.finals):
                    episode.final(**{name: rows[i] for name, rows in self._following.items()})
                episode.publish(cut=(cut or episode.length == self._limit) and not episode.ended)

    def _see(self, steps: Steps) -> None:
        """Keep what the next step begins with: the final observation of the episodes that were cut before it."""
        if not steps.ahead:  # else some environments have that step already
            for i, (episode, _) in self._cut.items():
                names = self.schema.final_names
                self._cut[i] = episode, {name: steps.fields[name][steps.done, i].copy() for name in names}

    def _publish_what_ended(self) -> None:
        for i, (episode, final) in [*self._cut.items()]:
            if final:
                episode.complete(**final)
                del self._cut[i]
        for i, episode in enumerate(self.episodes):
            if episode.state == "open" and (episode.ended or episode.length == self._limit):
                episode.publish(cut=not episode.ended)
                if self.schema.final_names and not (episode.ended or episode.finals):
                    self._cut[i] = episode, {}

    def _recorded(self) -> IntArray:
        """The environments whose next step is one of an episode."""
        return np.flatnonzero(~self.over) if self._skips_resets else np.arange(self._size)

    def _stop(self, steps: Steps, recorded: IntArray) -> int:
        """Up to which timestep all can be stored together: only the last of them may end an episode, or be left out."""
        if len(recorded) < self._size:
            return steps.done + 1
        stop = min(len(steps.ends), steps.done + self._limit - max(episode.length for episode in self.episodes))
        ended = np.flatnonzero(steps.ends[steps.done : stop].any(axis=1))
        return steps.done + int(ended[0]) + 1 if ended.size else stop

    def _begin_where_needed(self) -> None:
        while len(self.episodes) < self._size:
            self.episodes.append(self._begin())
        for i, episode in enumerate(self.episodes):
            if episode.state != "open":
                self.episodes[i] = self._begin()

    def _append(self, steps: Steps, stop: int, recorded: IntArray) -> None:
        """Store timesteps up to `stop`, of which only the last may end an episode: for all of them or for none."""
        before, start = [episode.length for episode in self.episodes], steps.done
        for i in recorded:
            self.episodes[i].require_room(stop - start)
        try:
            for i in recorded:
                self._store(steps, i, start, stop)
            steps.done = stop
        except BaseException:
            for episode, length in zip(self.episodes, before, strict=True):
                episode.drop_last(episode.length - length)
                episode.finals = {}
            raise

    def _append_in_place(self, steps: Steps, recorded: IntArray) -> None:
        """Store one timestep. What was shown is not taken back: after an error the environments before have it."""
        for i in recorded[steps.ahead :]:
            self.episodes[i].require_room()
        for i in recorded[steps.ahead :]:
            before = self.episodes[i].length
            try:
                self._store(steps, i, steps.done, steps.done + 1)
            finally:
                steps.ahead += self.episodes[i].length > before  # it may have become visible before the error
        steps.done, steps.ahead = steps.done + 1, 0

    def _store(self, steps: Steps, i: int, start: int, stop: int) -> None:
        """Store some timesteps of one environment, and what is known with the last of them."""
        episode = self.episodes[i]
        episode.store_rows({name: rows[start:stop, i] for name, rows in steps.fields.items()}, stop - start)
        episode.update({name: values[stop - 1, i] for name, values in steps.meta.items()})
        if steps.following and (episode.ended or episode.length == self._limit):
            episode.final(**{name: rows[stop - 1, i] for name, rows in steps.following.items()})


class Steps:
    """Timesteps of several environments, checked and encoded.

    Args:
        schema: the fields. given: field -> (T, B, *field), (B, *field) for one timestep, (T, *field) or (*field) for
            one environment; meta fields alike; `next_<field>` of fields with `final`: what was seen after the step.
        time: whether there is an axis of time.

    Attributes:
        fields, meta, following: name -> (T, B, *field). ends: (T, B) bool, where an episode ends. done: how many of
            the timesteps a stream has stored; ahead: how many environments have one more.

    Raises:
        SchemaError: an unknown field, a missing one without a default, a wrong shape, axes that differ, a lossy cast.
    """

    def __init__(self, schema: Schema, given: Mapping[str, Any], *, time: bool) -> None:
        self.done = self.ahead = 0
        groups = {name.split(".")[0] for name in schema.all}
        later = {name for name in given if name.startswith(NEXT) and name.split(".")[0] not in groups}
        flat = schema.flatten({name: value for name, value in given.items() if name not in later})
        following = schema.flatten({name.removeprefix(NEXT): given[name] for name in later})
        if not flat:
            raise SchemaError("no field was given; give field=values for every environment")
        schema.require(flat, "timesteps")
        schema.require(following, "`next_` of fields declared with final=True", schema.final_names)
        if following and following.keys() != schema.final_names:
            missing = ", ".join(f"{NEXT}{name}" for name in sorted(schema.final_names - following.keys()))
            raise SchemaError(f"{missing} missing; all fields with final=True belong together")
        lead = _leading(schema, {**{f"{NEXT}{name}": value for name, value in following.items()}, **flat}, time)
        self.following = {name: _encode(schema, name, value, lead, time) for name, value in following.items()}
        columns = {name: _encode(schema, name, value, lead, time) for name, value in flat.items()}
        self._axes = _require_same_axes({**self.following, **columns})
        self.fields = {name: columns[name] for name in schema.fields if name in columns}
        self.meta = {name: columns[name] for name in schema.meta_fields if name in columns}
        for name, field in schema.fields.items():
            if name not in columns:
                row = require_default(field, name, "timesteps")
                self.fields[name] = np.broadcast_to(row, (*self._axes, *field.shape))
        self.ends = np.zeros(self._axes, np.bool_)
        for name in schema.ends:
            self.ends |= self.fields[name].reshape(self._axes) != 0

    @property
    def num_envs(self) -> int:
        return self._axes[1]


def _leading(schema: Schema, flat: Mapping[str, Any], time: bool) -> int:
    """How many axes stand before those of the fields: time, if there is one, and the environments, if several."""
    found = {}
    for name, value in flat.items():
        field = schema.all[name] if name in schema.all else schema.fields[name.removeprefix(NEXT)]
        ndim = getattr(value, "ndim", None)
        found[name] = (to_numpy(value).ndim if ndim is None else int(ndim)) - len(field.shape)
    lead = next(iter(found.values()))
    if set(found.values()) != {lead} or lead not in (time, time + 1):
        shown = ", ".join(f"{name}: {axes}" for name, axes in found.items())
        wanted = "(T, *field) or (T, B, *field)" if time else "(*field) or (B, *field)"
        raise SchemaError(f"got so many axes before those of a field: {shown}; expected every field as {wanted}")
    return lead


def _encode(schema: Schema, name: str, value: Any, lead: int, time: bool) -> Array:
    """(T, B, *field) of a field as it was given."""
    field = schema.all[name]
    try:
        rows = field.encode(value, lead=lead)
    except SchemaError as error:
        raise SchemaError(f"field {name!r}: {error}", field=name) from None
    axes = rows.shape[:lead]
    return rows.reshape((*(axes if time else (1, *axes)), *([1] if lead == time else []), *field.shape))


def _require_same_axes(columns: Mapping[str, Array]) -> tuple[int, int]:
    axes = {name: column.shape[:2] for name, column in columns.items()}
    first = next(iter(axes.values()))
    if set(axes.values()) != {first} or 0 in first:
        shown = ", ".join(f"{name}: {time} × {envs}" for name, (time, envs) in axes.items())
        raise SchemaError(f"got timesteps × environments {shown}; expected the same number for every field, from 1")
    return first[0], first[1]
