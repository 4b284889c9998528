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
from memmap_buffer.views.row_ranges import Further, RowRanges

LOOK = 256  # the most timesteps of each item that are searched at once for the end of an episode
NONE = np.empty(0, np.int64)


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
    """The episodes that items run on into: P pairs of an item and an episode, item by item.

    Attributes:
        item: (P,) the position of the item in the batch.
        records: the records of the P episodes.
        start: (P,) the first step that the episode shows.
        lead, end: (P,) the episode has the entries lead … end - 1 of the item.
    """

    item: IntArray
    records: Found
    start: IntArray
    lead: IntArray
    end: IntArray

    def rows(self, final: bool, begin: int) -> Further:
        """The rows of the entries from `begin` on, of fields with or without `final`; entry `begin` gets number 0."""
        anchors = self.records.anchors
        row = anchors.words.view(np.int64)[:, FIRST_ROW] + self.start  # type: ignore[union-attr]
        row = row + anchors.slot if final else row
        lead, end = np.maximum(self.lead - begin, 0), self.end - begin
        row, needed = row + lead - (self.lead - begin), end > lead
        return Further(self.item[needed], row[needed], lead[needed], end[needed])


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
        ends, whole = self._ends, self.length
        begin, stop = np.full_like(whole, -1), whole.copy()
        for start in range(0, ends.after, LOOK):
            steps = range(start, min(start + LOOK, ends.after))
            is_end = self._is_end(steps)
            ends_here = is_end.any(axis=1) & (stop == whole)
            stop = np.where(ends_here, self.t + start + is_end.argmax(axis=1) + 1, stop)
            if not ((stop == whole) & (self.t + steps.stop < whole)).any():
                break
        for start in range(0, ends.before, LOOK):
            steps = range(-min(start + LOOK, ends.before), -start)
            is_end = self._is_end(steps)[:, ::-1]
            ends_here = is_end.any(axis=1) & (begin < 0)
            begin = np.where(ends_here, self.t - start - is_end.argmax(axis=1), begin)
            if not ((begin < 0) & (self.t + steps.start > 0)).any():
                break
        self.has_final = (self._flags & FINAL).astype(np.bool_) & (stop == whole)
        self.length, self._parted = stop, True
        self._begin_at(np.maximum(begin, 0))

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
        halves: npt.NDArray[np.uint32] = records.anchors.words.view(np.uint32)  # type: ignore[union-attr]
        start, stop = halves[:, START].astype(np.int64), halves[:, STOP].astype(np.int64)
        count = stop - start
        before = count.cumsum() - count
        # The steps of the same item's following episodes before this one.
        before -= before.take(item.searchsorted(item))
        own = np.maximum(self.length - self.t, 0)  # 0: the episode left meanwhile, and the item is drawn again
        lead = np.minimum(own.take(item) + before, steps)
        end = np.minimum(lead + count, steps)
        self._following = Following(item, records, start, lead, end)
        return self.length + np.bincount(item, count, len(self.t)).astype(np.int64)

    def put_ends(self, first: str, last: str, steps: range) -> None:
        """Put two masks (B, K): the entries at which an item or an episode in it begins, and those at which one ends.

        Called after `run_on`.
        """
        item, records, start, lead, end = self._following  # type: ignore[misc]
        flags = records.anchors.words.view(np.uint32)[:, FLAGS]  # type: ignore[union-attr]
        begins, ends = np.zeros((2, len(self.t), len(steps)), np.bool_)
        begins[:, 0] = True
        reached = end > lead
        begins[item[reached], lead[reached]] = True
        own, whole = self.length - self.t, records.anchors.length - start == end - lead
        # The last step of an open episode is no end: steps are still appended behind it.
        last_steps = ((own > 0) & (own <= len(steps)) & (self._flags & OPEN == 0)).nonzero()[0]
        ends[last_steps, own[last_steps] - 1] = True
        last_steps = (reached & whole & (flags & OPEN == 0)).nonzero()[0]
        ends[item[last_steps], end[last_steps] - 1] = True
        if self._ends.names and (
            not self._ends.marked or ((self._flags & INNER_END).any() | (flags & INNER_END).any())
        ):
            for name in self._ends.names:
                values = self.gather.copied(
                    name, self._ranges(steps, self.schema.fields[name].final, self.length, "zero")
                )
                ends |= values.any(axis=tuple(range(2, values.ndim)))
            begins[:, 1:] |= ends[:, :-1]
        self.batch |= {first: begins, last: ends}

    def put_steps(self, key: str, steps: range) -> None:
        """Put int64 (B, K, 2): serial and timestep of each entry `t + steps`, -1 where none exists.

        With several folders (B, K, 3), the number of the folder first.
        """
        own, anchors = self.exists(steps), self.anchors
        folder = [] if anchors.folder is None else [anchors.folder]
        out = np.empty((*own.shape, 2 + len(folder)), np.int64)
        for i, column in enumerate((*folder, anchors.serial)):
            out[..., i] = column[:, None]
        np.add((self.t + self.begin)[:, None], array_of(steps), out=out[..., -1])
        if not all_of(own):
            out[~own] = -1
        if self._following is not None:
            item, records, start, lead, end = self._following
            count = end - lead
            pair = np.arange(len(item)).repeat(count)
            step = np.arange(len(pair)) - (count.cumsum() - count).take(pair)
            entries = item.take(pair), lead.take(pair) + step
            for i, column in enumerate((*[column.take(item) for column in folder], records.anchors.serial)):
                out[(*entries, i)] = column.take(pair)
            out[(*entries, -1)] = start.take(pair) + step
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
        plans: dict[bool, tuple[IntArray, IntArray | None]] = {}
        row, beyond = self._first + t, NONE
        if t is not self.t:
            outside = t.view(np.uint64) >= self.length.view(np.uint64)  # a negative t is a huge uint64
            beyond = outside.nonzero()[0] if TRUE in outside.tobytes() else NONE
        for group in self.folders.groups[(prefix, *names)]:
            final = group.final
            if len(t) * group.largest > MAX_BATCH_BYTES:
                self._refuse_fields(group, 1)
            if final not in plans:
                rows = row + self.anchors.slot if final else row
                plans[final] = self._nearest_at(t, rows, beyond, final) if len(beyond) else (rows, None)
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
        in_one_piece = isinstance(offsets, range) and offsets.step == 1
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
                    else self._nearest(self.t[:, None] + array_of(offsets), final, exist)
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
        steps = self.t[:, None] + np.arange(offsets.start, offsets.stop, offsets.step)
        rows, missing = self._nearest(steps, self.schema.fields[name].final, limit)
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

    def _nearest_at(
        self, t: IntArray, row: IntArray, beyond: IntArray, final: bool
    ) -> tuple[IntArray, IntArray | None]:
        """(rows (B,) of the nearest timesteps that exist, the positions that had to be moved, None for none).

        Args:
            t: (B,) the wanted timesteps.
            row: (B,) the rows that they would have.
            beyond: the positions at which `t` is no step of its episode; the final observation may be there.
        """
        wanted, limit = t.take(beyond), self.length.take(beyond)
        if final:
            limit += self.has_final.take(beyond)
        nearest = np.minimum(np.maximum(wanted, 0), limit - 1)
        rows = row.copy()
        rows[beyond] += nearest - wanted
        missing = beyond[nearest != wanted]
        return rows, missing if len(missing) else None

    def _nearest(
        self, wanted: IntArray, final: bool, limit: IntArray | None = None
    ) -> tuple[IntArray, BoolArray | None]:
        """(rows (B, K) of the nearest timesteps that exist, a mask of the `wanted` ones that do not, None for none)."""
        first = self.first(final)[:, None]
        limit = (self.limit(final) if limit is None else limit)[:, None]
        clipped = np.minimum(np.maximum(wanted, 0), limit - 1)
        missing = wanted != clipped
        return first + clipped, missing if TRUE in missing.tobytes() else None

    def _ranges(self, offsets: range, final: bool, limit: IntArray, padding: str) -> RowRanges:
        """The rows at `t + offsets`, a range of step 1, as one range for each item."""
        begin, steps = self.t + offsets.start, len(offsets)
        lead = np.minimum(np.maximum(-begin, 0), steps)
        stop = np.maximum(np.minimum(limit - begin, steps), 0)
        nearest = np.minimum(np.maximum(begin, 0), limit - 1)
        further = None if self._following is None else self._following.rows(final, offsets.start)
        return RowRanges(self.first(final) + nearest, lead, stop, steps, padding, further)

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
