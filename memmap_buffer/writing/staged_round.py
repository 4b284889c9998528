"""A timestep of several environments whose episodes are in memory: one assignment per field for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import Schema
from memmap_buffer.writing.blob_column import BlobColumn
from memmap_buffer.writing.episode import Episode

AT_FIRST = 64 << 20  # bytes of all environments together; pages that are not written to cost nothing


class StagedRound:
    """Several environments, the staged episodes of which are appended to together.

    The rows of a field are one array, and of each episode `columns` are views of it. Compressed fields have a column
    for each episode, which encodes meanwhile.

    Args:
        schema: the fields.
        size: how many environments there are.
        longest: how long an episode may be.

    Attributes: members, is_whole, remaining, lengths: see `Round`.
    """

    def __init__(self, schema: Schema, size: int, longest: int) -> None:
        self._schema, self._size, self._longest = schema, size, longest
        self._episodes: dict[int, Episode] = {}
        self._is_member = np.zeros(size, np.bool_)
        self._rows: dict[str, Array] = {}  # field -> (environments, capacity, *field), of those that are not compressed
        self._coded = [name for name, field in schema.fields.items() if field.codec is not None]
        self._capacity = 0
        # By environment, how long its episode is, and from which timestep on it is in memory. The episodes share the
        # first.
        self.lengths, self._base = np.zeros((2, size), np.int64)
        self.look()

    def join(self, i: int, episode: Episode) -> None:
        """Append to the open episode of an environment, once `look` was called."""
        self.lengths[i], self._base[i] = episode.length, episode.base
        count = episode.length - episode.base
        if count >= self._capacity:
            step = sum(field.itemsize for field in self._schema.fields.values() if field.codec is None) or 1
            first = episode.first_capacity()
            if episode.staged:
                first = min(first, max(8, AT_FIRST // step // self._size))
            self._grow(min(self._longest, max(first, count + 1)))
        columns: dict[str, Any] = {}
        for name, field in self._schema.fields.items():
            rows = self._rows.get(name)
            if rows is None:
                columns[name] = episode.columns.get(name) or BlobColumn(field, self._capacity)
                columns[name].capacity = self._capacity
                continue
            columns[name] = rows[i]
            if count:
                rows[i, :count] = episode.columns[name][:count]
        episode.stand_in(columns)
        self._is_member[i] = True
        self._episodes[i] = episode
        episode.share_length(self.lengths, i)  # last: interrupted before it, the episode joins once more

    def leave(self, i: int) -> None:
        """The episode of an environment is appended to no longer, once `look` was called."""
        episode = self._episodes.get(i)
        if episode is not None and episode.lengths is self.lengths:
            episode.own_length()
        self._episodes.pop(i, None)
        self._is_member[i] = self.is_whole = False

    def look(self) -> None:
        """See which environments are members now."""
        self.members = members = self._is_member.nonzero()[0]
        self.is_whole = len(members) == self._size
        self.remaining = self._longest - int(self.lengths[members].max(initial=0))
        self._room = self._capacity - int((self.lengths - self._base)[members].max(initial=0))

    def _grow(self, capacity: int) -> None:
        before, rows = self._rows, {}
        for name, field in self._schema.fields.items():
            if field.codec is None:
                rows[name] = np.empty((self._size, capacity, *field.cell), field.storage)
                if before:
                    rows[name][:, : self._capacity] = before[name]
        self._rows, self._capacity = rows, capacity
        for i, episode in self._episodes.items():
            for name in self._coded:
                episode.columns[name].capacity = capacity  # type: ignore[attr-defined]
            episode.columns.update({name: each[i] for name, each in rows.items()})

    def prepare(self, count: int = 1) -> None:
        """Have room for so many timesteps. Raises OSError: an episode that is written in chunks met a full disk."""
        if count <= self._room:
            return
        short = self.members[(self.lengths - self._base)[self.members] + count > self._capacity].tolist()
        if short and not self._episodes[short[0]].staged:
            for i in short:
                episode = self._episodes[i]
                episode.spill()
                self._base[i] = episode.base
        else:
            self._grow(min(self._longest, max(2 * self._capacity, self._capacity - self._room + count)))
        self.look()

    def append(self, columns: Mapping[str, Array], chosen: IntArray | None = None) -> None:
        """Append one timestep to all episodes, or to some: field -> (environments, *field). Lists take `extend`."""
        if self._room <= 0:
            self.prepare()
        some = self.members if chosen is None else chosen
        at = self.lengths[some] - self._base[some]
        for name, rows in self._rows.items():
            rows[some, at] = columns[name] if chosen is None and self.is_whole else columns[name][some]
        for name in self._coded:
            for i, row in zip(some.tolist(), at.tolist(), strict=True):
                self._episodes[i].columns[name][row] = columns[name][i]
        self.lengths[some] += 1
        if chosen is not None:  # it may be none of the longest
            self.look()
            return
        self._room -= 1
        self.remaining -= 1

    def extend(self, columns: Mapping[str, Array], chosen: IntArray) -> None:
        """Append several timesteps to some episodes: field -> (T, environments, *field)."""
        count = len(next(iter(columns.values())))
        self.prepare(count)
        for i in chosen.tolist() if self._schema.lists else ():
            self._episodes[i].count_lists({name: columns[name][:, i] for name in self._schema.lists})
        if count == 1:
            self.append({name: rows[0] for name, rows in columns.items()}, chosen)
            return
        for i in chosen.tolist():
            at = self.lengths.item(i) - self._base.item(i)
            for name, column in self._episodes[i].columns.items():
                column[at : at + count] = columns[name][:, i]
        self.lengths[chosen] += count
        self.look()

    def back_to(self, lengths: IntArray) -> None:
        """Drop the timesteps beyond; these episodes had not ended."""
        self.lengths[:] = lengths
        for episode in self._episodes.values():
            episode.ended, episode.finals = "", {}
        self.look()
