"""`Selection`: the anchors that the options of a reader choose (view, filters, split, weights), and the index of them.

`loading.options` makes a `Selection`; `Selection.index` makes the `Index` of the anchors that exist in given tables.
The way there: `_passing` chooses the slots of a folder, `_cut` has the view cut their anchors into runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import FloatArray, all_of, check_count
from memmap_buffer.errors import NotEnoughDataError, SchemaError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.journal import NO_SLOTS
from memmap_buffer.format.records import FINAL, INNER_END, TERMINATED
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.filters import START, VALID, filtered, matches
from memmap_buffer.items.index import FolderTable, Index, sums
from memmap_buffer.items.marked import Marked
from memmap_buffer.items.streams import Streams
from memmap_buffer.items.weights import (
    EPISODE_COLUMNS,
    NumberedFolder,
    WeightBy,
    episode_column,
    weighing,
    weights_of,
)
from memmap_buffer.schema import Schema
from memmap_buffer.views.anchors import GOLDEN, BoolArray, Runs, splitmix
from memmap_buffer.views.batch_builder import Ends
from memmap_buffer.views.folders import Folders, id_of
from memmap_buffer.views.view import View, described

MAX_BLOCK = 1000  # the most successive serials among which a split deals out exact shares, see `_block`


@dataclass(frozen=True)
class Selection:
    """The choice of anchors among all episodes: a view, filters, a split, weights.

    Args:
        view: how items are cut.
        filter_meta: meta field, or one of `EPISODE_COLUMNS` -> condition: a scalar (equal), a set or list (member),
            (low, high) (low ≤ x < high, None is open), or a callable from the column to bools. All must hold.
        filter_fields: field -> condition on the anchor's timestep t; "_start" is t itself, so {"_start": 0} serves
            items that begin with their episode. If a bool field `valid` of shape () is declared, {"valid": True} is
            added unless another condition on it is given; see `excluding`.
        min_episode_len: the least number of timesteps of an episode.
        top_k: (meta field, k): only the k episodes with the highest values.
        mark: a condition on the marks that a person set.
        weight_by: a meta field, or one of `EPISODE_COLUMNS`: the weight of each anchor of an episode; anchors are drawn
            in proportion to it. Or (name, a function from the column to weights), or a function from `EpisodeColumns`
            to weights.
        split: name -> fraction of the episodes: the part of an episode depends on its serial alone, so it never
            changes. Or name -> number of episodes, of the oldest ones, before any filter.
        part: the name of the part of the split that is wanted.
        split_seed: it chooses which episodes each part gets.
        random: whether each item needs random numbers (`Anchors.chance`).
        mixes: whether an item holds rows of other items of its batch, so that batches cannot be read together.
    """

    view: View
    filter_meta: Mapping[str, Any] = field(default_factory=dict)
    filter_fields: Mapping[str, Any] = field(default_factory=dict)
    min_episode_len: int = 1
    top_k: tuple[str, int] | None = None
    mark: Marked | None = None
    split: Mapping[str, float] | None = None
    part: str | None = None
    split_seed: int = 0
    weight_by: WeightBy | None = None
    random: bool = False
    mixes: bool = False

    def check(self, schema: Schema) -> None:
        """Raise SchemaError: a name is not declared, or an option has a value that makes no sense."""
        check_count("min_episode_len", self.min_episode_len, 0)
        if not isinstance(self.split_seed, int):
            raise SchemaError(f"split_seed: got {self.split_seed!r}, expected a whole number")
        _check_top_k(self.top_k, schema)
        _check_number("weight_by", weighing(self.weight_by)[0], schema)
        for name in self.filter_meta:
            if name not in EPISODE_COLUMNS and name not in schema.meta_fields:
                raise schema.unknown(name, "filter_meta", [*schema.meta_fields, *EPISODE_COLUMNS], "filter_fields")
        for name in self.filter_fields.keys() - {START}:
            if name not in schema.fields:
                raise schema.unknown(name, "filter_fields", [*schema.fields, START], "filter_meta")
            if schema.fields[name].shape not in ((), (1,)):
                raise SchemaError(
                    f"filter_fields: {name!r} has shape {schema.fields[name].shape}; filter by a scalar field"
                )
        if self.filter_fields.keys() - {VALID} and self.view.per_episode:
            raise SchemaError("filter_fields needs a view of timesteps; filter whole episodes by filter_meta")
        if self.split is not None:
            _check_split(self.split, self.part)
        elif self.part is not None:
            raise SchemaError(f"part: got {self.part!r} without split; give split={{{self.part!r}: 0.9, …}} too")

    def excluding(self, schema: Schema) -> Selection:
        """The selection without the anchors that the field `valid` excludes, if the schema has that field.

        The timestep of the anchor must be valid: the first step of a transition or a window, or offset 0. An anchor
        before its episode stands for the first step. The other steps of an item are not filtered: the later ones of a
        window are in the batch, with `valid` among the fields. Whole episodes and crops are served if any of their
        steps is valid.
        """
        field = schema.fields.get(VALID)
        if field is None or field.dtype != "bool" or field.shape or VALID in self.filter_fields:
            return self
        return replace(self, filter_fields={VALID: True, **self.filter_fields})

    def without_callables(self) -> Selection:
        """The selection without callables among its filters, so that it can be pickled."""
        meta = {name: c for name, c in self.filter_meta.items() if not callable(c)}
        fields = {name: c for name, c in self.filter_fields.items() if not callable(c)}
        name, weigh = weighing(self.weight_by)
        weight_by = described(weigh) if name is None and weigh is not None else name
        return replace(self, filter_meta=meta, filter_fields=fields, weight_by=weight_by)

    def describe(self) -> str:
        """The view and the options that narrow the choice, for the text of an error."""
        least = f"min_episode_len={self.min_episode_len}"
        return ", ".join([f"view {described(self.view)}", least, *self.narrowed])

    @property
    def narrowed(self) -> list[str]:
        """The options by which episodes and timesteps are chosen, as `name=value`."""
        names = ("filter_meta", "filter_fields", "top_k", "split", "part", "weight_by")
        narrowed = [
            f"{name}={described(getattr(self, name))}" for name in names if getattr(self, name) not in (None, {})
        ]
        return [*narrowed, *[f"mark={self.mark!r}"] * (self.mark is not None)]

    @property
    def has_callables(self) -> bool:
        """Whether a filter or the weight is a callable, which may look at all episodes together."""
        weigh = weighing(self.weight_by)[1]
        return any(map(callable, [*self.filter_meta.values(), *self.filter_fields.values(), weigh]))

    def index(
        self, folders: Folders, tables: Sequence[EpisodeTable] | None = None, before: Index | None = None
    ) -> Index:
        """The index of the chosen anchors that exist.

        Args:
            folders: the folders that are read.
            tables: one for each folder; default: the tables as last read.
            before: an earlier index of the same selection, folders and marks: the runs of episodes that did not change
                are taken from it.
        """
        numbered = folders.by_number(folders.tables if tables is None else tables)
        streams = None
        if self.compares:
            slots = self.slots(numbered)
            parts = [self._cut(*folder[1:], chosen) for folder, chosen in zip(numbered, slots, strict=True)]
            if self.view.continues:
                streams = self._streams(numbered, slots)
                fitting = [
                    streams[folder[0]].fitting(part, self.view.stride)
                    for folder, part in zip(numbered, parts, strict=True)
                ]
                parts = [part.where(np.flatnonzero(part.count)) for part in fitting]
        else:  # with callables, an episode that did not change may pass or fail because of others that did
            earlier = () if before is None or self.has_callables else before.by_folder()
            earlier_by_number = {made_of.number: (made_of.table, runs) for made_of, runs in earlier}
            parts = [self._runs(*folder, *earlier_by_number.get(folder[0], ())) for folder in numbered]
        weight = None
        if self.weight_by is not None:
            weights = weights_of(numbered, parts, self.weight_by)
            parts = [part.where(np.flatnonzero(w)) for part, w in zip(parts, weights, strict=True)]
            weight = np.concatenate(weights)
        runs, sizes = Runs.joined(parts), [len(part.slot) for part in parts]
        return Index(
            *(runs.slot, runs.serial, runs.first, sums(runs.count)),
            stride=self.view.stride,
            folder=None if folders.single else np.repeat([number for number, *_ in numbered], sizes),
            last=runs.last if runs.slot.size else None,
            weight_sums=None if weight is None else sums(runs.count * weight[weight > 0]),
            tables=tuple([FolderTable(number, id_of(storage), table) for number, storage, table in numbered]),
            streams=streams,
        )

    def slots(self, numbered: Sequence[NumberedFolder]) -> list[IntArray]:
        """The slots whose episodes pass the filters, for each folder."""
        slots = [self._passing(*folder, folder[-1].visible) for folder in numbered]
        if _counts(self.split):
            serials = zip(numbered, slots, self._members(numbered), strict=True)
            slots = [chosen[np.isin(table.serial[chosen], members)] for (*_, table), chosen, members in serials]
        return slots if self.top_k is None else _highest(numbered, slots, *self.top_k)

    def _streams(self, numbered: Sequence[NumberedFolder], slots: Sequence[IntArray]) -> dict[int, Streams]:
        """Number of a folder -> the streams of its episodes that pass, which are in `slots`."""
        streams = {}
        for (number, storage, table), passing in zip(numbered, slots, strict=True):
            streams[number] = self.no_streams(table)
            self.follow(streams[number], storage, table, NO_SLOTS, passing)
        return streams

    def no_streams(self, table: EpisodeTable) -> Streams:
        """The streams of a folder, still without episodes."""
        return Streams(self.view.continues, len(table.serial))

    def follow(
        self, streams: Streams, storage: Storage, table: EpisodeTable, hidden: IntArray, shown: IntArray
    ) -> IntArray | None:
        """Let the streams of a folder take in changed slots, see `Streams.take_in`."""
        name, unknown = self.view.stream, streams.unknown(table, shown)
        names = None if name is None or not len(unknown) else episode_column(storage, table, name, unknown)
        return streams.take_in(table, hidden, shown, unknown, names)

    @property
    def compares(self) -> bool:
        """Whether the anchors of an episode depend on which other episodes there are."""
        return self.top_k is not None or bool(self.view.continues) or _counts(self.split)

    @cached_property
    def by_episode(self) -> bool:
        """Whether the anchors of an episode depend on that episode alone, so that `runs_of` finds them."""
        return not (self.compares or self.weight_by or self.has_callables) and self.mark is None

    @property
    def in_streams(self) -> bool:
        """Whether the anchors of an episode depend on it and its neighbours in its stream, and none is left out."""
        return bool(self.view.continues) and self.takes_every_episode and self.top_k is None and self.weight_by is None

    @property
    def takes_every_episode(self) -> bool:
        """Whether no option can leave out an episode."""
        return self.min_episode_len <= 1 and not self.filter_meta and self.mark is None and self.split is None

    def by_steps(self, schema: Schema) -> bool:
        """Whether a step that is appended or dropped adds or removes one anchor of its episode, and no more changes."""
        ends = self.view.ends(schema)
        return self.view.one_per_step and self.takes_every_episode and (ends.recorded or ends.terminated is None)

    def runs_of(self, number: int, storage: Storage, table: EpisodeTable, slots: IntArray) -> Runs:
        """The runs of visible slots of a folder, by their episodes alone; right where `by_episode` is true."""
        return self._cut(storage, table, self._passing(number, storage, table, slots))

    def _runs(
        self,
        number: int,
        storage: Storage,
        table: EpisodeTable,
        before: EpisodeTable | None = None,
        runs: Runs | None = None,
    ) -> Runs:
        """The runs of a folder, oldest episode first. Unchanged episodes keep their `runs`, of the table `before`."""
        if before is None or runs is None or len(before.check) != len(table.check):
            return self.runs_of(number, storage, table, table.visible)
        if table is before:
            return runs
        changed = (table.check != before.check) | (table.shown != before.shown)
        changed |= (table.start != before.start) | (table.length != before.length)
        new = self.runs_of(number, storage, table, table.visible[changed.take(table.visible)])
        stay = np.flatnonzero(~changed.take(runs.slot))
        # Usually the oldest episodes leave and the newest grow: then the runs that stay are a slice, which is a view.
        between = len(stay) > 0 and stay[-1] - stay[0] == len(stay) - 1
        kept = runs.where(slice(stay[0], stay[-1] + 1) if between else stay)
        runs = Runs.joined([kept, new])
        in_order = not len(new.slot) or not len(stay) or kept.serial[-1] < new.serial[0]
        return runs if in_order else runs.where(np.argsort(runs.serial, kind="stable"))

    def _passing(self, number: int, storage: Storage, table: EpisodeTable, slots: IntArray) -> IntArray:
        """The slots, among these visible ones, whose episodes pass the filters."""
        if self.view.per_episode and table.whole is not table.visible:  # a ring has dropped steps of some episodes
            slots = slots[table.start[slots] == 0]
        if self.takes_every_episode:
            return slots
        keep = table.of(table.length, slots) - table.of(table.start, slots) >= self.min_episode_len
        for name, condition in self.filter_meta.items():
            keep &= matches(episode_column(storage, table, name, slots), condition, name)
        if self.mark is not None:
            keep &= self.mark.keep(storage, table.serial[slots])
        if self.split is not None and not _counts(self.split):
            keep &= self._in_part(table.serial[slots], number)
        return slots if keep.all() else slots[keep]

    def _cut(self, storage: Storage, table: EpisodeTable, slots: IntArray) -> Runs:
        """The runs of anchors of visible slots: what the view gives, split at ends in the middle, then filtered."""
        if not len(slots):
            return Runs(slots, slots, slots, slots)
        schema, flags, length = storage.layout.schema, table.of(table.flags, slots), table.of(table.length, slots)
        episodes = Runs(slots, table.of(table.serial, slots), np.zeros(len(slots), np.int64), length)
        ends, has_final = self.view.ends(schema), flags & FINAL != 0
        ended = _ended(storage, episodes, flags, ends)
        inner = (flags & INNER_END).nonzero()[0] if ends.names else NO_SLOTS
        start = table.of(table.start, slots)
        if (len(inner) or np.count_nonzero(start)) and not self.view.per_episode:
            parts = _parts(storage, episodes, start, inner, ends)
            runs = parts.anchors(self.view, schema, episodes, has_final, ended)
        else:
            runs = self.view.anchors(schema, episodes, has_final, ended)
        if self.filter_fields and not self.view.per_episode:
            return filtered(runs, storage, self.filter_fields, self.view.stride)
        keep = runs.count > 0
        if self.view.per_episode:
            keep &= start == 0  # an episode of which a ring has dropped steps is not whole
        if self.filter_fields:
            keep &= np.isin(slots, filtered(episodes, storage, self.filter_fields, 1).slot)
        return runs if all_of(keep) else runs.where(np.flatnonzero(keep))

    def _in_part(self, serial: IntArray, number: int) -> BoolArray:
        """(E,) whether episodes are in the part, by a hash of (seed, folder, serial).

        Serials are taken in blocks of so many that every share of a block is a whole number. Within a block episodes
        are ranked by their hashes, and each part gets exactly its share of the ranks.
        """
        edges, start = self._edges()
        block = _block(*edges.tolist())
        edges[edges > 1 - 1e-9] = np.inf  # the last part gets the rest: a sum of fractions may miss 1 by rounding
        blocks, place = np.unique(serial // block, return_inverse=True)
        chance = self._chance(blocks[:, None] * block + np.arange(block), number)
        rank = np.argsort(np.argsort(chance, axis=1), axis=1)
        u = (rank[place, serial % block] + 0.5) / block
        return np.asarray((u >= edges[start]) & (u < edges[start + 1]))

    def _members(self, numbered: Sequence[NumberedFolder]) -> list[IntArray]:
        """The serials in the part, for each folder, where the split counts episodes."""
        edges, start = self._edges()
        serials = [table.serial[table.visible] for *_, table in numbered]
        numbers = np.repeat([number for number, *_ in numbered], [len(part) for part in serials])
        count, every = int(edges[-1]), np.concatenate(serials)
        if len(every) < count:
            text = f"split: {dict(self.split or {})} takes {count} episodes, there are {len(every)}; give lower numbers"
            raise NotEnoughDataError(f"{numbered[0][1].path}: {text}, or fractions", episodes=len(every))
        chance = [self._chance(part, number) for (number, *_), part in zip(numbered, serials, strict=True)]
        order = np.argsort(np.concatenate(chance)[:count], kind="stable")[int(edges[start]) : int(edges[start + 1])]
        return [every[order[numbers[order] == number]] for number, *_ in numbered]

    def _edges(self) -> tuple[FloatArray, int]:
        """(the cumulative shares, from 0 to the sum of all; i: the part is from edge i to edge i + 1)."""
        shares = dict(self.split or {})
        return np.cumsum([0.0, *shares.values()]), [*shares].index(self.part or "")

    def _chance(self, serial: IntArray, number: int) -> npt.NDArray[np.uint64]:
        """A pseudorandom uint64 for each episode of a folder, by its serial: the same at every call."""
        key = np.uint64((self.split_seed * GOLDEN + number * 0xD1B54A32D192ED03) % 2**64)
        return splitmix(serial.astype(np.uint64) + key)


def _highest(numbered: Sequence[NumberedFolder], slots: Sequence[IntArray], name: str, k: int) -> list[IntArray]:
    """The slots of the k episodes, among those of all folders, with the highest values; of equal values the newer.

    NaN is the lowest.
    """
    columns = [episode_column(*folder[1:], name, chosen) for folder, chosen in zip(numbered, slots, strict=True)]
    values = np.concatenate([column.reshape(-1) for column in columns])
    best = np.zeros(len(values), np.bool_)
    best[np.lexsort((values, ~np.isnan(values)))[::-1][:k]] = True
    masks = np.split(best, np.cumsum([len(chosen) for chosen in slots])[:-1])
    return [chosen[mask] for chosen, mask in zip(slots, masks, strict=True)]


def _check_top_k(top_k: object, schema: Schema) -> None:
    """Raise SchemaError: `top_k` is not (a column of numbers, k)."""
    if top_k is None:
        return
    if not (isinstance(top_k, tuple) and len(top_k) == 2 and type(top_k[1]) is int and top_k[1] > 0):
        raise SchemaError(f"top_k: got {top_k!r}, expected (meta field, how many), such as ('return', 10)")
    _check_number("top_k", top_k[0], schema)


def _check_number(where: str, name: str | None, schema: Schema) -> None:
    """Raise SchemaError, about the option `where`: `name` is no column of single numbers."""
    if name is None or (name in EPISODE_COLUMNS and name not in schema.meta_fields):
        return
    if name not in schema.meta_fields:
        raise schema.unknown(name, where, [*schema.meta_fields, *EPISODE_COLUMNS])
    field = schema.meta_fields[name]
    if field.shape not in ((), (1,)) or field.storage.kind == "U":
        why = "holds text" if field.storage.kind == "U" else f"has shape {field.shape}"
        raise SchemaError(f"{where}: {name!r} {why}; give a field of one number")


def _check_split(split: object, part: str | None) -> None:
    shares = list(split.values()) if isinstance(split, Mapping) else []
    numbers = all(isinstance(share, (int, float, np.number)) and not isinstance(share, bool) for share in shares)
    most = np.inf if _counts(split) else 1 + 1e-9
    if not shares or not numbers or part not in split or min(shares) < 0 or sum(shares) > most:  # type: ignore[operator]
        raise SchemaError(
            f"split: got {split!r} and part={part!r}, expected fractions of at most 1 in all, or whole numbers of "
            "episodes, and the name of one of them, such as split={'train': 0.9, 'val': 0.1}, part='train'"
        )
    if _counts(split) and sum(shares) == 1:
        raise SchemaError(
            f"split: got {split!r}, which may mean one episode, or all: whole numbers are numbers of episodes; write "
            "1.0 for all, and choose a single episode by filter_meta"
        )


def _counts(split: object) -> bool:
    """Whether a split gives numbers of episodes, not fractions."""
    shares = split.values() if isinstance(split, Mapping) else ()
    return bool(shares) and all(isinstance(share, (int, np.integer)) for share in shares)


@lru_cache(maxsize=32)
def _block(*ends: float) -> int:
    """The smallest number of episodes that the edges divide into whole numbers; if it is too high, one that gives each
    part about two episodes at least.
    """
    edges = np.array(ends)
    for count in range(1, MAX_BLOCK):
        if (np.abs(edges * count - np.rint(edges * count)) < 1e-6).all():
            return count
    shares = np.diff(edges)
    return int(min(MAX_BLOCK, np.ceil(2 / shares[shares > 0].min())))


class _Parts(NamedTuple):
    """Episodes cut into P parts, behind each end in their middle.

    Attributes:
        number: (P,) the position of the part's episode.
        begin, stop: (P,) the timesteps of the part are begin … stop - 1.
        is_last: (P,) whether it is the last part of its episode.
        ended: (P,) whether the episode terminated at the end of the part; only right for parts that are not the last.
    """

    number: IntArray
    begin: IntArray
    stop: IntArray
    is_last: BoolArray
    ended: BoolArray

    def anchors(self, view: View, schema: Schema, episodes: Runs, has_final: BoolArray, ended: BoolArray) -> Runs:
        """The anchors of the parts, each taken for an episode.

        Padding in front is for parts that begin an episode. Other parts have steps before them: their anchors before
        the first step are dropped.
        """
        parts = episodes.where(self.number).replaced(count=self.stop - self.begin)
        final = has_final[self.number] & self.is_last
        terminated = np.where(self.is_last, ended[self.number], self.ended)
        runs = view.anchors(schema, parts, final, terminated)
        early = np.where(self.begin > 0, np.maximum(-runs.first, 0), 0)
        first, last = runs.first + early + self.begin, None if runs.last is None else runs.last + self.begin
        if early.any():  # count again for parts without `early` anchors; a part that had an anchor keeps one
            fewer = view.anchors(schema, parts.replaced(count=parts.count - early), final, terminated)
            runs = runs.replaced(count=np.maximum(fewer.count, np.minimum(runs.count, 1)))
        return Runs(runs.slot, runs.serial, first, runs.count, last)


def _parts(storage: Storage, episodes: Runs, start: IntArray, inner: IntArray, ends: Ends) -> _Parts:
    """The parts of episodes (E,) from step `start` (E,) on. Those at the positions `inner` are cut at ends in their
    middle, for which the fields of `ends` are read.
    """
    slots, serials, length = episodes.slot, episodes.serial, episodes.count
    if not len(inner):
        last = np.ones(len(slots), np.bool_)
        return _Parts(np.arange(len(slots)), start, length, last, ~last)
    numbers, stops, ended = [np.arange(len(slots))], [length], [np.zeros(len(slots), np.bool_)]
    for i in inner.tolist():
        is_end, terminated = np.zeros((2, int(length[i]) - 1), np.bool_)
        for name in ends.names:
            first = int(storage.first_row(slots[i : i + 1], storage.layout.schema.fields[name].final)[0])
            column = storage.read_rows(name, slice(first, first + len(is_end)), slots[i], serials[i])
            is_true = column.any(axis=tuple(range(1, column.ndim)))
            is_end |= is_true
            terminated |= is_true & (name == ends.terminated)
        ends_at = np.flatnonzero(is_end)
        ends_at = ends_at[ends_at >= start[i]]
        numbers.append(np.full(len(ends_at), i))
        stops.append(ends_at + 1)
        ended.append(terminated[ends_at])
    number, stop = np.concatenate(numbers), np.concatenate(stops)
    order = np.lexsort((stop, number))
    number, stop = number[order], stop[order]
    is_first = np.append(True, number[1:] != number[:-1])
    begin = np.where(is_first, start[number], np.append(0, stop[:-1]))
    return _Parts(number, begin, stop, np.append(is_first[1:], True), np.concatenate(ended)[order])


def _ended(storage: Storage, episodes: Runs, flags: npt.NDArray[np.uint32], ends: Ends) -> BoolArray:
    """(E,) whether the episodes terminated: the record tells, or the last step is read."""
    slots, serials, length = episodes.slot, episodes.serial, episodes.count
    name = ends.terminated
    if ends.recorded:
        return np.asarray(flags & TERMINATED != 0)
    if name is None:
        return np.zeros(len(slots), np.bool_)
    final = storage.layout.schema.fields[name].final
    rows = storage.first_row(slots, final) + np.maximum(length - 1, 0)
    values = storage.read_rows(name, rows, slots, serials)
    return np.asarray(values.any(axis=tuple(range(1, values.ndim))))
