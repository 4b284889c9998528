"""A table of a buffer's episodes, kept up to date with the buffer: serial, length, return, end, meta fields.

Serials, lengths and meta fields are there at once. Returns and ends are computed from the rewards and the end fields of
all steps, so they are read and added a part of the episodes at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import NotEnoughDataError, StaleEpisodeError
from memmap_buffer.schema import flatten

if TYPE_CHECKING:
    from memmap_buffer.api.reading import Readable

CHUNK_BYTES = 1 << 25  # bytes of padded rows that are read at a time
TAGS = ("mark", "note")
REWARD = "reward"  # the usual name of the field of rewards
BINS = 24  # the most bars of a histogram


class EpisodeColumns:
    """A table of the visible episodes: a row each, the oldest first.

    Args:
        buffer: the buffer whose episodes are listed.
        reward: the scalar field whose sum over an episode's steps is `return`; without a field "reward", the default,
            there is no `return`.
        reserved: names of columns that the caller adds.

    Attributes:
        columns: name -> (episodes,): `serial`; `shard` (the folder's number), if there are several folders; `length`;
            `return` (NaN until it is known); `end` ("terminated", "truncated" or ""); and every scalar meta field, as
            "meta.<name>" if its name is one of these or is reserved. The arrays are replaced, never changed in place.
        names: (episodes, 1) serials; with several folders (episodes, 2) of (shard, serial).

    Raises:
        SchemaError: `reward` names another field than the default, and it has not one number a timestep.
    """

    def __init__(self, buffer: Readable, reward: str = REWARD, reserved: tuple[str, ...] = TAGS) -> None:
        self.buffer, self.reserved = buffer, reserved
        self.columns: dict[str, Array] = {"length": np.zeros(0, np.int64)}
        self.names: Array = np.zeros((0, 1), np.int64)
        schema, fields = buffer.schema, buffer.schema.fields.items()
        numbers = [name for name, field in fields if field.shape in ((), (1,)) and field.storage.kind in "biuf"]
        if reward not in numbers and reward != REWARD:
            raise schema.unknown(reward, "reward", numbers)
        self.reward = reward if reward in numbers else None
        self.ends = {kind: name for kind in ("terminated", "truncated") if (name := getattr(schema, kind)) is not None}
        self._summed = np.zeros(0, np.bool_)
        self.follow()

    @property
    def progress(self) -> float:
        """The share of episodes whose return and end are known."""
        return float(self._summed.mean()) if len(self._summed) else 1.0

    def follow(self) -> bool:
        """Update the table to the episodes that are visible now. Returns whether it changed."""
        schema = self.buffer.schema
        scalar = [name for name, field in schema.meta_fields.items() if field.shape in ((), (1,))]
        data = self.buffer.episodes(fields=[], return_indices=True)
        index = data["_index"]
        names = index[:, None] if index.ndim == 1 else index
        columns = {"serial": names[:, -1], "length": data["_lens"]}
        if names.shape[1] > 1:
            columns = {"shard": names[:, 0], **columns}
        place, same = places_of(names, self.names)
        same[same] = self.columns["length"][place[same]] == columns["length"][same]
        summed = np.zeros(len(names), np.bool_)
        summed[same] = self._summed[place[same]]
        if not (self.reward or self.ends):
            summed[:] = True
        for name, values in self._empty(len(names)).items():
            if summed.any():
                values[summed] = self.columns[name][place[summed]]
            columns[name] = values
        taken = {*columns, *self.reserved}
        columns |= {f"meta.{name}" if name in taken else name: data[name].reshape(-1) for name in scalar}
        if _alike(columns, self.columns):
            return False
        self.names, self.columns, self._summed = names, columns, summed
        return True

    def pending(self) -> Array:
        """The names of the episodes to `read` next, the newest first; (0, …) once all returns and ends are known."""
        width = 8 * max(1, bool(self.reward) + len(self.ends))
        size = max(1, CHUNK_BYTES // (width * self.buffer.max_timesteps))
        return self.names[np.flatnonzero(~self._summed)[::-1][:size]]

    def read(self, names: Array) -> dict[str, Array] | None:
        """Read the rewards and end fields of episodes.

        Args:
            names: of the episodes, (n, 1) or (n, 2), as `pending` gives them.

        Returns:
            Field -> (n, longest episode, *field), with their lengths `_lens` (n,); None if an episode is not visible
            any more.
        """
        wanted = [*([self.reward] if self.reward else []), *self.ends.values()]
        try:
            return flatten(self.buffer.batch(names, fields=wanted, include_metadata=False, format="numpy"))
        except (StaleEpisodeError, NotEnoughDataError):
            return None

    def add(self, names: Array, data: dict[str, Array]) -> bool:
        """Add returns and ends. Episodes that are not in the table, or have another length there, are left out.

        Args:
            names: of the episodes.
            data: as `read` gives it.

        Returns:
            Whether any was added.
        """
        place, same = places_of(names, self.names)
        same[same] = self.columns["length"][place[same]] == data["_lens"][same]
        columns, at = dict(self.columns), place[same]
        if self.reward:
            rewards = data[self.reward].reshape(len(names), -1)
            with np.errstate(over="ignore", invalid="ignore"):  # the sum of infinities, or of the largest numbers
                columns["return"] = _replaced(columns["return"], at, rewards.sum(axis=1, dtype=np.float64)[same])
        if self.ends:
            ended = np.full(len(names), "", "U10")
            for kind, name in reversed([*self.ends.items()]):
                ended[data[name].reshape(len(names), -1).any(axis=1)] = kind
            columns["end"] = _replaced(columns["end"], at, ended[same])
        self._summed[at] = True
        self.columns = columns
        return bool(len(at))

    def _empty(self, count: int) -> dict[str, Array]:
        empty: dict[str, Array] = {"return": np.full(count, np.nan)} if self.reward else {}
        return empty | ({"end": np.full(count, "", "U10")} if self.ends else {})


def tags_of(buffer: Readable, names: Array, file: str | None = None) -> dict[str, Array]:
    """The columns `TAGS` of episodes: `mark`, tuples of labels, and `note`, text.

    Args:
        buffer: the buffer that has the episodes.
        names: of the episodes, as `EpisodeColumns.names`.
        file: the file of the marks; None: `extra/marks.json` of each folder.

    Returns:
        Name -> (episodes,).
    """
    marks = buffer.marks(file)
    keys = names[:, 0].tolist() if names.shape[1] == 1 else [*map(tuple, names.tolist())]
    each = [marks.get(key) for key in keys]
    labels = column_of_objects([mark.labels if mark else () for mark in each])
    return {"mark": labels, "note": np.array([mark.note if mark else "" for mark in each], np.str_)}


def order_of(column: Array, reverse: bool = False) -> Array:
    """The rows of a column in ascending order; NaN stands last in either order.

    Args:
        column: (n,) numbers or texts, or tuples of labels.
        reverse: whether the highest value comes first.

    Returns:
        (n,) int64 rows.
    """
    if column.dtype == object:
        column = np.array([", ".join(labels) for labels in column], np.str_)
    order = np.argsort(column, kind="stable")
    order = order[::-1] if reverse else order
    is_nan = column[order] != column[order]
    return np.concatenate([order[~is_nan], order[is_nan]])


def histogram_of(values: Array) -> tuple[Array, Array]:
    """How many values lie in each of at most 24 equal parts of their range; each has equally many whole numbers.

    Args:
        values: (n,) numbers; those that are not finite do not count.

    Returns:
        (parts,) counts; (parts + 1,) float64 edges. A range wider than the largest float is one part.
    """
    numbers = values.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    low, high = (numbers.min(), numbers.max()) if len(numbers) else (0.0, 0.0)
    with np.errstate(over="ignore"):
        extent = high - low
    if not np.isfinite(extent):
        return np.array([len(numbers)]), np.array([low, high])
    width, count = extent / BINS or 1.0, BINS if extent else 1
    if (numbers == np.round(numbers)).all():
        width = np.ceil((extent + 1) / BINS)
        count = int(np.ceil((extent + 1) / width))
    edges = low + width * np.arange(count + 1)
    parts = np.searchsorted(edges[1:-1], numbers, side="right")
    return np.bincount(parts, minlength=count), edges


def column_of_objects(values: list[tuple[str, ...]]) -> Array:
    """A column of tuples of labels."""
    column = np.empty(len(values), object)
    column[:] = values
    return column


def places_of(names: Array, among: Array) -> tuple[Array, Array]:
    """(the row of each of `names` in the sorted `among`, 0 if there is none; whether there is one)."""
    if not len(among) or not len(names):
        return np.zeros(len(names), np.int64), np.zeros(len(names), np.bool_)
    sought, keys = _keys(names, among)
    place = np.searchsorted(keys, sought)
    place[place == len(keys)] = 0
    return place, keys[place] == sought


def _keys(names: Array, others: Array) -> tuple[Array, Array]:
    """Both arrays of names as single numbers, which are in the same order as the names."""
    if names.shape[1] == 1:
        return names[:, 0], others[:, 0]
    both = np.concatenate([names, others])
    serials, rank = np.unique(both[:, 1], return_inverse=True)
    keys = both[:, 0] * len(serials) + rank
    return keys[: len(names)], keys[len(names) :]


def _replaced(column: Array, at: Array, values: Array) -> Array:
    out = column.copy()  # a caller may hold the old column, which must not change
    out[at] = values
    return out


def _alike(columns: dict[str, Array], others: dict[str, Array]) -> bool:
    """Whether two tables show the same episodes: their columns are equal, but for `return` and `end`, which follow."""
    return columns.keys() == others.keys() and all(
        np.array_equal(values, others[name], equal_nan=values.dtype.kind == "f")
        for name, values in columns.items()
        if name not in ("return", "end")
    )
