"""A timestep of several environments whose episodes are in memory: one assignment per field for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.writing.blob_column import BlobColumn
from memmap_buffer.writing.episode import End, Episode
from memmap_buffer.writing.rounds import Round

if TYPE_CHECKING:
    from memmap_buffer.writing.writer import Writer

AT_FIRST = 64 << 20  # bytes of all environments together; pages that are not written to cost nothing


class StagedRound(Round):
    """Several environments, the staged episodes of which are appended to together.

    The rows of a field are one array, and of each episode `columns` are views of it. Compressed fields have a column
    for each episode, which encodes meanwhile.

    Args:
        writer: of the episodes.
        size: how many environments there are.
    """

    shows = False

    def __init__(self, writer: Writer, size: int) -> None:
        self._schema = writer.schema
        self._rows: dict[str, Array] = {}  # field -> (environments, capacity, *field), of those that are not compressed
        self._coded = [name for name, field in self._schema.fields.items() if field.codec is not None]
        self._capacity = 0
        super().__init__(writer, size)
        self.most = 1 if writer.in_place else self._longest

    def _take_in(self, episodes: Mapping[int, Episode]) -> None:
        counts = {i: episode.length - episode.base for i, episode in episodes.items()}
        longest = max(counts.values(), default=-1)
        if longest >= self._capacity:
            self._grow(max(self._first_capacity(next(iter(episodes.values()))), longest + 1))
        for i, episode in episodes.items():
            count = counts[i]
            self.lengths[i], self._until[i] = episode.base + count, episode.base + self._capacity
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

    def _first_capacity(self, episode: Episode) -> int:
        step = sum(field.itemsize for field in self._schema.fields.values() if field.codec is None) or 1
        first = episode.first_capacity()
        return min(first, max(8, AT_FIRST // step // self._size)) if episode.staged else first

    def _grow(self, capacity: int) -> None:
        before, rows, capacity = self._rows, {}, min(self._longest, capacity)
        for name, field in self._schema.fields.items():
            if field.codec is None:
                rows[name] = np.empty((self._size, capacity, *field.cell), field.storage)
                if before:
                    rows[name][:, : self._capacity] = before[name]
        self._until += capacity - self._capacity
        self._rows, self._capacity = rows, capacity
        for i, episode in self._episodes.items():
            for name in self._coded:
                episode.columns[name].capacity = capacity  # type: ignore[attr-defined]
            episode.columns.update({name: each[i] for name, each in rows.items()})

    def prepare(self, count: int = 1) -> None:
        """Have room for so many timesteps. Raises OSError: an episode that is written in chunks met a full disk."""
        short = self.members[self.lengths[self.members] + count > self._until[self.members]].tolist()
        if short and not self._episodes[short[0]].staged:
            for i in short:
                episode = self._episodes[i]
                episode.spill()
                self._until[i] = episode.base + self._capacity
        else:
            self._grow(max(2 * self._capacity, self._capacity - self.room + count))
        self.look()

    def look(self) -> None:
        """See which environments are members now, and from which timestep on each is in memory."""
        super().look()
        self._base = self._until - self._capacity

    def append(self, columns: Mapping[str, Array], chosen: IntArray | None = None) -> None:
        """See `Round`; with `chosen`, whatever the others have, `look` follows. Fields of lists take `extend`."""
        if self.room <= 0:
            self.prepare()
        some = self.members if chosen is None else chosen
        at = self.lengths[some] - self._base[some]
        for name, rows in self._rows.items():
            rows[some, at] = columns[name] if len(some) == self._size else columns[name][some]
        for name in self._coded:
            for i, row in zip(some.tolist(), at.tolist(), strict=True):
                self._episodes[i].columns[name][row] = columns[name][i]
        self.lengths[some] += 1
        self.room -= 1
        self.remaining -= 1

    def extend(self, columns: Mapping[str, Array], rows: range, chosen: IntArray, ends: Sequence[End]) -> None:
        """See `Round`."""
        count, some, environments = len(rows), slice(rows.start, rows.stop), chosen.tolist()
        if count > self.room:
            self.prepare(count)
        for i in environments if self._schema.lists else ():
            self._episodes[i].count_lists({name: columns[name][some, i] for name in self._schema.lists})
        if count == 1:
            self.append({name: column[rows.start] for name, column in columns.items()}, chosen)
        else:
            for i in environments:
                at = self.lengths.item(i) - self._base.item(i)
                for name, column in self._episodes[i].columns.items():
                    column[at : at + count] = columns[name][some, i]
            self.lengths[chosen] += count
        self.look()
