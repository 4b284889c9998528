"""The option `weight_by`: columns with a value for each episode, and the weights of anchors that are made of them.

`weights_of`, which `Selection.index` calls, is the place to begin. `episode_column` serves the filters, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array, FloatArray, decode
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.records import TIME
from memmap_buffer.format.storage import Storage
from memmap_buffer.views.anchors import Runs
from memmap_buffer.views.view import described

Weigh: TypeAlias = Callable[[Any], Any]
WeightBy: TypeAlias = str | tuple[str, Weigh] | Weigh
NumberedFolder: TypeAlias = tuple[int, Storage, EpisodeTable]  # as `Folders.by_number` gives it
EPISODE_COLUMNS = ("episode_lens", "episode_time")  # timesteps; time of publication, in seconds since 1970


def episode_column(storage: Storage, table: EpisodeTable, name: str, slots: IntArray) -> Array:
    """(n, …) a meta field, or one of `EPISODE_COLUMNS`, of the episodes in `slots` (n,)."""
    field = storage.layout.schema.meta_fields.get(name)
    if field is not None:  # it may be called "episode_time", and comes first
        return decode(storage.maps.meta[name][slots], field.dtype)
    if name == "episode_lens":
        return table.length[slots] - table.start[slots]
    return published_at(storage, slots)


def published_at(storage: Storage, slots: IntArray) -> IntArray:
    """(n,) int64 the time of publication of the episodes in `slots` (n,), in seconds since 1970."""
    return np.asarray(storage.maps.words.view(np.uint32)[slots, TIME].astype(np.int64))


class EpisodeColumns(Mapping[str, Array]):
    """The columns of the E episodes that have anchors: (E,) or (E, …), folder by folder, oldest first.

    A column is read when it is asked for. Its names: all meta fields; and, unless a meta field has the name,
    `EPISODE_COLUMNS`; "serial"; "items", the number of items; "age", the number of newer episodes among these, by time
    of publication if there are several folders.

    Args:
        numbered: the folders.
        parts: the runs of each folder; runs of one episode stand side by side.

    Attributes:
        num_episodes: the number of these episodes in each folder.
        of_run: (R,) the position of each run's episode among the E, for the runs of all folders.
    """

    def __init__(self, numbered: Sequence[NumberedFolder], parts: Sequence[Runs]) -> None:
        begins = [np.diff(part.serial, prepend=-1) != 0 for part in parts]
        self._folders = [
            (storage, table, part.slot[is_first], part.serial[is_first])
            for (_, storage, table), part, is_first in zip(numbered, parts, begins, strict=True)
        ]
        self._schema = numbered[0][1].layout.schema
        self._names = [*dict.fromkeys([*self._schema.meta_fields, *EPISODE_COLUMNS, "serial", "age", "items"])]
        self._counts = np.concatenate([part.count for part in parts])
        self.num_episodes = [len(slots) for _, _, slots, _ in self._folders]
        self.of_run = np.cumsum(np.concatenate(begins)) - 1

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Array:
        if name in self._schema.meta_fields or name in EPISODE_COLUMNS:
            read = [episode_column(storage, table, name, slots) for storage, table, slots, _ in self._folders]
            column = np.concatenate(read)
            return column[:, 0] if column.shape[1:] == (1,) else column
        if name == "serial":
            return np.concatenate([serial for *_, serial in self._folders])
        if name == "items":
            return np.bincount(self.of_run, self._counts, sum(self.num_episodes)).astype(np.int64)
        if name != "age":
            raise self._schema.unknown(name, "weight_by", self._names)
        order = np.arange(len(self["serial"]))
        if len(self._folders) > 1:
            times = [published_at(storage, slots) for storage, _, slots, _ in self._folders]
            order = np.argsort(np.concatenate(times), kind="stable")
        age = np.empty_like(order)
        age[order] = np.arange(len(order))[::-1]
        return age


@dataclass(frozen=True)
class Balanced:
    """A `weight_by` that draws each value of a meta field, such as the task, equally often on average.

    Args:
        name: the meta field.
        shares: value -> its share of the items, relative to the others; values that are not named are never drawn.
            Default: equal shares.
    """

    name: str
    shares: tuple[tuple[Any, float], ...] | Mapping[Any, float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.shares, Mapping):
            object.__setattr__(self, "shares", tuple(self.shares.items()))

    def __call__(self, columns: Mapping[str, Array]) -> FloatArray:
        """(E,) float64 the weight of each item of an episode."""
        values, places = np.unique(columns[self.name], axis=0, return_inverse=True)
        places = places.reshape(-1)
        share = 1.0 if self.shares is None else np.array([dict(self.shares).get(value, 0) for value in values.tolist()])
        return np.asarray((share / np.bincount(places, columns["items"]))[places])


def weighing(weight_by: object) -> tuple[str | None, Weigh | None]:
    """`weight_by` as (name of a column or None, function or None). Without a name the function gets all columns."""
    if weight_by is None or isinstance(weight_by, str):
        return weight_by, None
    if callable(weight_by):
        return None, weight_by
    if not isinstance(weight_by, tuple) or len(weight_by) != 2 or not callable(weight_by[1]):
        raise SchemaError(
            f"weight_by: got {weight_by!r}, expected a meta field, or (meta field, a function from its column to "
            "weights), or a function of all columns"
        )
    return weight_by


def weights_of(numbered: Sequence[NumberedFolder], parts: Sequence[Runs], weight_by: WeightBy) -> list[FloatArray]:
    """(R,) float64 for each folder: the weight of each run's episode.

    Raises SchemaError: the function gives a wrong shape, or a weight is negative or not finite.
    """
    name, weigh = weighing(weight_by)
    columns, what = EpisodeColumns(numbered, parts), described(weigh) if name is None else name
    count = sum(columns.num_episodes)
    values: Any = columns if name is None else columns[name]
    if weigh is not None:
        values = weigh(values) if count else []
    weight = np.asarray(values, np.float64)
    if weight.shape != (count,):
        raise SchemaError(f"weight_by: the function of {what!r} gave shape {weight.shape}, expected {(count,)}")
    wrong = np.flatnonzero(~((weight >= 0) & np.isfinite(weight)))
    if wrong.size:
        folder = int(np.searchsorted(np.cumsum(columns.num_episodes), wrong[0], side="right"))
        serial = int(columns["serial"][wrong[0]])
        raise SchemaError(
            f"{numbered[folder][1].path}: weight_by: {what!r} of episode {serial} is {weight[wrong[0]]}, expected a "
            "number from 0; filter such episodes out by filter_meta",
            serial=serial,
        )
    return np.split(weight[columns.of_run], np.cumsum([len(part.slot) for part in parts])[:-1])
