"""The row arithmetic of all views: row = first row of the episode + t + offset, clipped into the episode, with padding
and masks.

`loading.batch_reader` makes one `BatchBuilder` for each batch. A view's `cut` puts columns into it: finished arrays, or
the rows of a field that are to be copied. The builder's `gather` then copies all rows, and `fresh` tells which episodes
are still as they were when their records were looked up.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import FALSE, TRUE, Array, all_of, any_of, decode
from memmap_buffer.errors import NotEnoughDataError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.journal import CHANGES
from memmap_buffer.format.records import FINAL, FIRST_ROW, FLAGS, INNER_END, OPEN, START, STOP, TERMINATED, Words
from memmap_buffer.schema import DECLARED, LENGTHS, Schema
from memmap_buffer.views.anchors import Anchors, BoolArray
from memmap_buffer.views.folders import INDEX_BYTES, FieldGroup, Folders, Found
from memmap_buffer.views.gather import MAX_BATCH_BYTES, Column, Columns, Gather, RowGather, refuse_size
from memmap_buffer.views.row_ranges import RowRanges

LOOK = 256  # the most timesteps of each item that are searched at once for the end of an episode


class Ends(NamedTuple):
    """The fields by which a view knows that an episode ended. No item reaches across an end in the middle of one.

    Attributes:
        terminated: the field that is true where nothing follows, or None.
        recorded: whether the records tell which episodes terminated, so that no row is read for it.
        names: the fields that are true where an episode ends, `terminated` among them.
        marked: whether the records tell which episodes have one of `names` true before their last step.
        before, after: the most timesteps that an item has before its anchor, and from its anchor on.
    """

    terminated: str | None
    recorded: bool
    names: tuple[str, ...]
    marked: bool
    before: int = 0
    after: int = 1

    @classmethod
    @lru_cache(maxsize=128)
    def of(cls, schema: Schema, terminated: str | None = DECLARED, *, before: int = 0, after: int = 1) -> Ends:
        """The ends by a field `terminated`, and by the schema's `truncated`; default: the field that was declared."""
        name = schema.terminated if terminated == DECLARED else terminated
        names = tuple(dict.fromkeys([end for end in (name, schema.truncated) if end is not None]))
        recorded = terminated == DECLARED or name == schema.terminated
        return cls(name, recorded, names, marked={*names} <= {*schema.ends}, before=before, after=after)


class Following(NamedTuple):
    """The episodes that items run on into: P pairs of an item and an episode, and where each of the (B, K) entries is.

    Attributes:
        item: (P,) the position of the item in the batch.
        records: the records of the P episodes.
        episodes: the episodes of the B items, then these P.
        first, stop: (B + P,) the row of step 0 of each, in files without `final`, and the end of its steps.
        place: (B, K) the position in `episodes` of the episode of each entry.
        step: (B, K) the timestep of each entry there.
        missing: (B, K) whether it does not exist, as it is from `stop` on; None if all exist.
    """

    item: IntArray
    records: Found
    episodes: Anchors
    first: IntArray
    stop: IntArray
    place: IntArray
    step: IntArray
    missing: BoolArray | None


class BatchBuilder:
    """A batch that is put together around its anchors.

    Where an episode has an end in its middle, or lost its first steps to a ring, the part around the anchor is taken
    for the episode: `t` and `length` count from its first step, which is timestep `begin` of the whole.

    Args:
        folders: the folders that are read.
        records: the anchors (B,) of the items, with the records of their episodes.
        ends: how episodes end for the view.
        plan: the result of `View.plan`.

    Attributes:
        folders, records, plan: as given.
        anchors: the anchors of `records`.
        batch: key -> `Column`, filled by the `put` methods and by views. Fields with the same rows are one entry, by
            the key of the first.
        gather: copies rows.
        t: (B,) int64 the timestep of each anchor.
        length: (B,) int64 the number of timesteps of its episode.
        begin: (B,) int64, or 0 for all.
    """

    def __init__(self, folders: Folders, records: Found, ends: Ends, plan: Any = None) -> None:
        self.schema, self.plan = folders.schema, plan
        self.records, self.anchors, since = records, records.anchors, records.since
        self.batch: dict[str, Column] = {}
        self.folders, self.gather = folders, Gather(folders, records)
        self._following: Following | None = None
        self._ends, self._parted = ends, False
        words: Words = self.anchors.words  # type: ignore[assignment]
        halves: npt.NDArray[np.uint32] = words.view(np.uint32)
        self.t, self.length = self.anchors.t, halves[:, STOP].astype(np.int64)
        self._flags = halves[:, FLAGS]
        self._first: IntArray = words.view(np.int64)[:, FIRST_ROW]
        self._is_shown: BoolArray | None = None
        if since is None:  # else all episodes were there, and `fresh` tells whether they still are
            is_shown = self.t < self.length
            if FALSE in is_shown.tobytes():
                self._is_shown = is_shown
                self._set_aside(~is_shown)
        self.begin: IntArray | int = 0
        if ends.before and halves[:, START].any():
            # Steps that a ring has dropped do not exist. If it dropped the anchor after the draw, begin at the anchor.
            self._begin_at(np.minimum(halves[:, START], np.maximum(self.t, 0)).astype(np.int64))
        # With `since`, no episode had a marked end in its middle, see `LiveIndex`; `fresh` tells whether that holds.
        self._since, unseen = since, since is not None and ends.marked
        marks = ends.marked and not unseen and np.bitwise_or.reduce(self._flags, initial=0) & INNER_END
        if ends.names and ends.after and (not ends.marked or marks):
            self._keep_between_ends()

    def _set_aside(self, lost: BoolArray) -> None:
        """Let `lost` items (B,), whose episodes are gone, read the first row of their slot: they are drawn again."""
        self.t, self.length, self._first = np.where(lost, 0, self.t), np.where(lost, 1, self.length), self._first.copy()
        for storage, chosen, *_ in self.records.groups:
            self._first[chosen] = np.where(
                lost[chosen], storage.first_row(self.anchors.slot[chosen], False), self._first[chosen]
            )

    def _keep_between_ends(self) -> None:
        """Take the steps between two ends for the episode. Ends are searched only as far as items reach."""
        after, before = self._steps_to_end(self._ends.after, 1), self._steps_to_end(self._ends.before, -1)
        begin, stop = np.where(before < 0, 0, self.t - before), np.where(after < 0, self.length, self.t + after + 1)
        self.has_final = (self._flags & FINAL).astype(np.bool_) & (stop == self.length)
        self.length, self._parted = stop, True
        self._begin_at(begin)

    def _steps_to_end(self, reach: int, way: int) -> IntArray:
        """(B,) the distance of the next end from the anchor, or with `way` -1 from the step before it; -1: none near.

        Args: reach: how many timesteps are searched.
        """
        distance, rest = np.full_like(self.t, -1), self.length - self.t if way > 0 else self.t
        for start in range(0, reach, LOOK):
            stop, begin = min(start + LOOK, reach), min(way, 0)
            is_end = self._is_end(range(begin + way * start, begin + way * stop, way))
            distance = np.where((distance < 0) & is_end.any(axis=1), start + is_end.argmax(axis=1), distance)
            if not ((distance < 0) & (stop < rest)).any():
                break
        return distance

    def _begin_at(self, begin: IntArray) -> None:
        """Take timestep `begin` (B,) of each episode for its first one."""
        self.begin = self.begin + begin
        self._first = self._first + begin
        self.t, self.length = self.t - begin, self.length - begin

    def _is_end(self, steps: range) -> BoolArray:
        """(B, K) whether a field of `Ends.names` is true at `t + steps`."""
        out = np.zeros((len(self.t), len(steps)), np.bool_)
        for name in self._ends.names:
            values = self._stored(name, steps, self.length)
            out |= values.any(axis=tuple(range(2, values.ndim)))
        return out

    @cached_property
    def has_final(self) -> BoolArray:
        """(B,) whether each anchor's episode has its final observation."""
        return (self._flags & FINAL).astype(np.bool_)

    @cached_property
    def terminated(self) -> BoolArray:
        """(B,) whether each anchor's episode terminated."""
        ends = self._ends
        if ends.recorded and not self._parted:
            return (self._flags & TERMINATED).astype(np.bool_)
        if ends.terminated is None:
            return np.zeros(len(self.t), np.bool_)
        last = self.look_at(ends.terminated, self.length - 1)
        return np.asarray(last.any(axis=tuple(range(1, last.ndim))))

    @cached_property
    def goes_on(self) -> BoolArray:
        """(B,) whether the last step can be served: its final observation is stored, or nothing follows it."""
        recorded = self._ends.recorded and not self._parted
        return (self._flags & (FINAL | TERMINATED)).astype(np.bool_) if recorded else self.has_final | self.terminated

    def limit(self, final: bool) -> IntArray:
        """(B,) the number of entries that each anchor's episode has of fields with or without `final`."""
        return self.length + self.has_final if final else self.length

    def first(self, final: bool) -> IntArray:
        """(B,) the row of step 0 of each anchor's episode, of fields with or without `final`."""
        return self._first + self.anchors.slot if final else self._first

    # Items that do not lie in their episode from the anchor on

    def pad_in_front(self, steps: int) -> None:
        """Take each anchor for its episode's first step, then move it back where fewer than `steps` steps follow.

        There `t` gets negative: the padding of the item stands in front.
        """
        self._begin_at(self.t)
        self.t = np.minimum(self.length - steps, 0)

    def run_on(self, steps: int) -> IntArray:
        """Let ranges of `steps` rows from the anchors on continue in the episodes that follow.

        Returns:
            (B,) the first timestep that does not exist, where the steps of the following episodes are counted on.
        """
        item, records = find_following(self.folders, self.anchors, self._since)
        words: Words = records.anchors.words  # type: ignore[assignment]
        count = records.anchors.length - words.view(np.uint32)[:, START]
        stop = self.length + np.bincount(item, count, len(self.t)).astype(np.int64)
        # The episodes in the order of their entries: each item's own one, then those that follow it.
        items = np.concatenate([np.arange(len(self.t)), item])
        order = np.argsort(items, kind="stable")
        items, counts = items[order], np.concatenate([np.maximum(self.length - self.t, 0), count])[order]
        before = counts.cumsum() - counts
        before -= before.take(items.searchsorted(items))
        begin = items * steps + np.minimum(before, steps)  # an episode has the entries until the next one begins
        size = np.diff(begin, append=steps * len(self.t))
        first_step = np.concatenate([self.t, records.anchors.length - count])
        step = np.arange(steps * len(self.t)) + (first_step[order] - begin).repeat(size)
        place, step = order.repeat(size).reshape(-1, steps), step.reshape(-1, steps)
        ends = np.concatenate([self.length, np.maximum(records.anchors.length, 1)])
        self._following = Following(
            item,
            records,
            Anchors.joined([Anchors(*each[:4], words=each.words) for each in (self.anchors, records.anchors)]),
            np.concatenate([self._first, words.view(np.int64)[:, FIRST_ROW]]),
            ends,
            place,
            step,
            step >= ends.take(place) if any_of(stop - self.t < steps) else None,
        )
        return stop

    def put_ends(self, first: str, last: str, steps: range) -> None:
        """Put two masks (B, K): the entries at which an item or an episode in it begins, and those at which one ends.

        Called after `run_on`.
        """
        _, _, episodes, _, stop, place, step, _ = self._following  # type: ignore[misc]
        flags = episodes.words.view(np.uint32)[:, FLAGS]  # type: ignore[union-attr]
        begins = np.diff(place, axis=1, prepend=-1) != 0
        # The last step of an open episode is no end: steps are still appended behind it.
        ends = step == np.where(flags & OPEN, -1, stop - 1).take(place)
        if self._ends.names and (not self._ends.marked or (flags & INNER_END).any()):
            ends |= self._is_end(steps)
            begins[:, 1:] |= ends[:, :-1]
        self.batch |= {first: begins, last: ends}

    def put_steps(self, key: str, steps: range) -> None:
        """Put int64 (B, K, 2): serial and timestep of each entry `t + steps`, -1 where none exists.

        With several folders (B, K, 3), the number of the folder first.
        """
        if self._following is None:
            anchors, exist = self.anchors, self.exists(steps)
            missing = None if all_of(exist) else ~exist
            place, step = np.arange(len(self.t))[:, None], self.t[:, None] + array_of(steps)
        else:
            _, _, anchors, _, _, place, step, missing = self._following
        columns = [column.take(place) for column in (anchors.folder, anchors.serial) if column is not None]
        out = np.empty((*step.shape, len(columns) + 1), np.int64)
        for i, column in enumerate([*columns, step + np.reshape(self.begin, (-1, 1))]):
            out[..., i] = column
        if missing is not None:
            out[missing] = -1
        self.batch[key] = out

    def require_steps(self, steps: int) -> None:
        """Raise NotEnoughDataError where an episode has fewer than `steps` steps from its anchor on."""
        short = self.length - self.t < steps
        short = short if self._is_shown is None else short & self._is_shown
        if short.any():
            serial, length = int(self.anchors.serial[short][0]), int(self.length[short][0])
            raise NotEnoughDataError(
                f"episode {serial} has {length} timesteps, fewer than the {steps} that were asked for; lower the "
                "length, leave such episodes out by min_episode_len, or leave allow_short=True, which pads",
                serial=serial,
            )

    # The columns of a batch

    def put_at(self, names: Iterable[str], t: IntArray, *, prefix: str = "") -> None:
        """Put fields at one timestep of each item, zeros where it does not exist.

        Args:
            names: per-timestep fields.
            t: (B,) int64 the timesteps.
            prefix: each field is put under `prefix` + name.
        """
        plans: dict[bool, tuple[IntArray, BoolArray | None]] = {}
        # A negative t is a huge uint64.
        outside = t is not self.t and TRUE in (t.view(np.uint64) >= self.length.view(np.uint64)).tobytes()
        for group in self.folders.groups[(prefix, *names)]:
            final = group.final
            if len(t) * group.largest > MAX_BATCH_BYTES:
                self._refuse_fields(group, 1)
            if final not in plans:
                first, limit = self._first, self.length
                if final:  # as `first` and `limit` tell, which are calls
                    first, limit = first + self.anchors.slot, limit + self.has_final if outside else limit
                plans[final] = nearest(first, t, limit) if outside else (first + t, None)
            self.batch[group.keys[0]] = RowGather(group, *plans[final])

    def put(
        self,
        names: Iterable[str],
        offsets: IntArray | range,
        *,
        prefix: str = "",
        limit: IntArray | None = None,
        padding: str = "zero",
    ) -> None:
        """Put fields at `t + offsets`.

        Args:
            names: per-timestep fields.
            offsets: (K,) int64, or (B, K) if items differ; the rows of a range of step 1 are copied in one piece.
            prefix: each field is put under `prefix` + name.
            limit: (B,) the first timestep that does not exist; default: as `limit` tells, final observation included.
            padding: the values of timesteps that do not exist: "zero", "edge" (the nearest one) or "default".
        """
        plans: dict[bool, tuple[IntArray | RowRanges, BoolArray | None]] = {}
        in_one_piece = isinstance(offsets, range) and offsets.step == 1 and self._following is None
        steps = len(offsets) if isinstance(offsets, range) else offsets.shape[-1]
        for group in self.folders.groups[(prefix, *names)]:
            final = group.final
            if len(self.t) * steps * group.largest > MAX_BATCH_BYTES:
                self._refuse_fields(group, steps)
            if final not in plans:
                exist = self.limit(final) if limit is None else limit
                plans[final] = (
                    (self._ranges(offsets, final, exist, padding), None)  # type: ignore[arg-type]
                    if in_one_piece
                    else self._rows(offsets, final, exist)
                )
            self.batch[group.keys[0]] = RowGather(group, *plans[final], padding)

    def put_mask(self, key: str, offsets: range) -> None:
        """Put a mask (B, K) of the timesteps `t + offsets` that exist; final observations do not count."""
        self._require_mask(offsets)
        one_by_one = offsets.step == 1
        self.batch[key] = self._ranges(offsets, False, self.length, "zero") if one_by_one else self.exists(offsets)

    def put_meta(self, names: Iterable[str]) -> None:
        """Put meta fields, (B, *field)."""
        for name in names:
            self.batch[name] = self.gather.meta(name)

    # Values that a view computes with

    def look(self, name: str, offsets: range, limit: IntArray | None = None) -> Array:
        """A field at `t + offsets`, (B, K, *field), zero where it does not exist; bfloat16 as float32."""
        values, dtype = self._stored(name, offsets, limit), self.schema.fields[name].dtype
        return values if dtype != "bfloat16" else decode(values, dtype)

    def _stored(self, name: str, offsets: range, limit: IntArray | None) -> Array:
        """`look` with the values as stored: bfloat16 as its bits."""
        if len(self.t) * len(offsets) * max(INDEX_BYTES, self.schema.largest) > MAX_BATCH_BYTES:
            self.require_size(name, len(offsets))
        final = self.schema.fields[name].final
        rows, missing = self._rows(offsets, final, self.limit(final) if limit is None else limit)
        values = self.gather.copied(name, rows)
        if missing is not None:
            values[missing] = values.dtype.type()
        return values

    def look_at(self, name: str, t: IntArray) -> Array:
        """A field at timesteps t (B,) that exist, (B, *field); bfloat16 as float32."""
        field = self.schema.fields[name]
        row = self._first + t
        values = self.gather.copied(name, row + self.anchors.slot if field.final else row)
        return values if field.dtype != "bfloat16" else decode(values, field.dtype)

    def exists(self, offsets: IntArray | range, limit: IntArray | None = None) -> BoolArray:
        """(B, K) whether timestep `t + offsets` exists: it is from 0 on, and below `limit` (B,), default `length`."""
        self._require_mask(offsets)
        steps = array_of(offsets)
        mask = steps < ((self.length if limit is None else limit) - self.t)[:, None]
        lowest = offsets.start if isinstance(offsets, range) and offsets.step > 0 else int(steps.min(initial=0))
        if any_of(self.t < -lowest):
            mask &= steps >= -self.t[:, None]
        return np.asarray(mask)

    # Where rows lie

    def _rows(self, offsets: IntArray | range, final: bool, limit: IntArray) -> tuple[IntArray, BoolArray | None]:
        """The rows at `t + offsets`, (B, K), see `nearest`; `limit` (B,) holds for items that stay in their episode."""
        if self._following is None:
            return nearest(self.first(final)[:, None], self.t[:, None] + array_of(offsets), limit[:, None])
        _, _, episodes, first, stop, place, step, missing = self._following
        rows = (first + episodes.slot if final else first).take(place)
        rows += step if missing is None else np.minimum(step, stop.take(place) - 1)
        chosen = array_of(offsets)
        return rows.take(chosen, axis=1), None if missing is None else missing.take(chosen, axis=1)

    def _ranges(self, offsets: range, final: bool, limit: IntArray, padding: str) -> RowRanges:
        """The rows at `t + offsets`, a range of step 1, as one range for each item."""
        begin, steps = self.t + offsets.start, len(offsets)
        lead = np.minimum(np.maximum(-begin, 0), steps)
        stop = np.maximum(np.minimum(limit - begin, steps), 0)
        row = np.minimum(np.maximum(begin, 0), limit - 1)
        return RowRanges(self.first(final) + row, lead, stop, steps, padding)

    # The end

    def fresh(self) -> BoolArray | None:
        """(B,) whether the copied rows are those of the item's episode; None if all are. Call it after all copying.

        As long as the change counter of a folder stays the same, no row of a visible episode has changed.
        """
        since, has_since, only = self._since, self._since is not None, self.records.only
        gather = self.gather
        copied = gather.broken is None and not gather.fetched
        nothing_else = copied and self._is_shown is None
        if has_since and nothing_else and only is not None and only.maps.state.item(CHANGES) == since:
            return None
        same = self.records.unchanged()
        if has_since and self._ends.names and self._ends.after and self._ends.marked:
            same &= self._flags & INNER_END == 0
        if self._following is not None:
            item, records, *_ = self._following
            same[item[~(records.unchanged() & self.records.is_beside(records))]] = False
        if not copied:
            gather.require(same)
        return same if self._is_shown is None else same & self._is_shown

    def kept(self, columns: Columns, chosen: BoolArray, fitted: bool) -> Columns:
        """The columns of the chosen items.

        Args:
            columns: the copied batch.
            chosen: (B,) whether an item is kept.
            fitted: sequences are as long as the longest episode of the batch, so they are cut to the longest kept one.

        Lists are cut to the longest kept one in any case.
        """
        out = {key: values[chosen] for key, values in columns.items()}
        less = int(self.length.max() - self.length[chosen].max()) if fitted else 0
        for first, column in self.batch.items() if less else ():
            keys, rows = (column.group.keys, column.rows) if isinstance(column, RowGather) else ((first,), column)
            if isinstance(rows, RowRanges):
                keys += tuple(LENGTHS + key for key in keys if LENGTHS + key in out)
                out |= {key: out[key][:, :-less] for key in keys}
        for key in [key for key in out if LENGTHS + key in out]:  # lists, which are as long as the longest
            lengths = out[LENGTHS + key]
            out[key] = out[key][(*map(slice, lengths.shape), slice(lengths.max(initial=0)))]
        return out

    def _refuse_fields(self, group: FieldGroup, steps: int) -> None:
        """Raise SchemaError: `steps` timesteps of each item are too many; it names the largest field."""
        name = max(group.names, key=lambda name: self.schema.fields[name].itemsize)
        refuse_size(len(self.t), f"field {name!r}", len(self.t) * steps * group.largest)

    def require_size(self, name: str, steps: int) -> None:
        """Raise SchemaError if `steps` timesteps of each item take more than `MAX_BATCH_BYTES`."""
        group = self.folders.groups["", name][0]
        if len(self.t) * steps * group.largest > MAX_BATCH_BYTES:
            self._refuse_fields(group, steps)

    def _require_mask(self, offsets: IntArray | range) -> None:
        size = len(self.t) * len(offsets) * INDEX_BYTES
        if size > MAX_BATCH_BYTES:
            refuse_size(len(self.t), "the mask", size)


def find_following(folders: Folders, anchors: Anchors, since: int | None = None) -> tuple[IntArray, Found]:
    """(items (P,), records of P episodes): the episodes that items run on into; a lost episode has the length 0.

    Args: since: a change counter at which the single folder showed all of these episodes; None if none is known.
    """
    following = np.empty((anchors.size, 0, 2), np.int64) if anchors.following is None else anchors.following
    item, place = (following[..., 1] >= 0).nonzero()
    slot, serial = following[item, place].T.copy()
    folder = None if anchors.folder is None else anchors.folder[item]
    others = Anchors(folder, slot, serial, np.zeros_like(slot))
    return item, folders.find(others) if since is None else folders.at(others, since)


def nearest(first: IntArray, wanted: IntArray, limit: IntArray) -> tuple[IntArray, BoolArray | None]:
    """(the rows of the nearest timesteps that exist, a mask of the `wanted` ones that do not, None for none).

    Args:
        first, limit: the row of step 0 of each episode, and its number of timesteps.
    """
    clipped = np.minimum(np.maximum(wanted, 0), limit - 1)
    missing = wanted != clipped
    return first + clipped, missing if TRUE in missing.tobytes() else None


def array_of(offsets: IntArray | range) -> IntArray:
    """Offsets as an array."""
    return np.arange(offsets.start, offsets.stop, offsets.step) if isinstance(offsets, range) else offsets


def placed(parts: list[tuple[IntArray, Columns]], count: int) -> Columns:
    """A batch of `count` items made of parts (positions of its items, columns); shorter sequences end in zeros."""
    out: Columns = {}
    for key, first in parts[0][1].items():
        shape = np.maximum.reduce([columns[key].shape[1:] for _, columns in parts]).astype(int).tolist()
        whole: Array = np.zeros((count, *shape), first.dtype).view(type(first))
        for places, columns in parts:
            values = columns[key]
            within: tuple[Any, ...] = (places, *map(slice, values.shape[1:]))
            whole[within] = values
        out[key] = whole
    return out
