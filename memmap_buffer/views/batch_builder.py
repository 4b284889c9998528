"""The one engine under every view: rows = first row + t + offsets, clipped into the episode, padded, masked.

A view puts columns into a `BatchBuilder`: arrays as they are, or which rows of which field stand there. Its `gather`
then copies these rows, and `fresh` tells whether every episode is still what it was when its record was looked up.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import FALSE, TRUE, Array, decode
from memmap_buffer.errors import NotEnoughDataError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.journal import CHANGES
from memmap_buffer.format.records import FINAL, FIRST_ROW, FLAGS, INNER_END, OPEN, START, STOP, TERMINATED, Words
from memmap_buffer.schema import DECLARED, Schema
from memmap_buffer.views.anchors import Anchors, BoolArray
from memmap_buffer.views.folders import INDEX_BYTES, FieldGroup, Folders, Found
from memmap_buffer.views.gather import MAX_BATCH_BYTES, Column, Columns, Gather, RowGather, refuse_size
from memmap_buffer.views.row_ranges import Further, RowRanges

LOOK = 256  # timesteps that are looked at together for the end of an episode
NONE = np.empty(0, np.int64)


class Ends(NamedTuple):
    """How a view knows that an episode ended, also in the middle of what was stored as one: no item reaches across.

    Attributes:
        terminated: the field that is true where nothing follows, or None.
        recorded: whether the records of the episodes tell whether they terminated, so that no row is looked at.
        names: the fields that are true where an episode ends, `terminated` among them.
        marked: whether the records tell whether any of `names` is true before the last step.
        before, after: how many timesteps before its anchor, and from it on, an item may have.
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
        """By a field; default: the one that was declared."""
        name = schema.terminated if terminated == DECLARED else terminated
        names = tuple(dict.fromkeys([end for end in (name, schema.truncated) if end is not None]))
        recorded = terminated == DECLARED or name == schema.terminated
        return cls(name, recorded, names, marked={*names} <= {*schema.ends}, before=before, after=after)


class Following(NamedTuple):
    """The episodes that items run on into, all (P,), item by item.

    Attributes:
        item: whose.
        records: of these episodes.
        start: the first step of each that is shown.
        lead, end: the entries of the item that it has: lead … end - 1.
    """

    item: IntArray
    records: Found
    start: IntArray
    lead: IntArray
    end: IntArray

    def rows(self, final: bool, begin: int) -> Further:
        """The rows of those entries, of fields with or without `final`, from one entry on."""
        anchors = self.records.anchors
        row = anchors.words.view(np.int64)[:, FIRST_ROW] + self.start  # type: ignore[union-attr]
        row = row + anchors.slot if final else row
        lead, end = np.maximum(self.lead - begin, 0), self.end - begin
        row, needed = row + lead - (self.lead - begin), end > lead
        return Further(self.item[needed], row[needed], lead[needed], end[needed])


class BatchBuilder:
    """A batch as it is put together around its anchors.

    Args:
        folders: the folders that are read.
        records: of the timesteps (B,) at which items are cut.
        ends: how episodes end for the view.
        plan: what the view found before.

    Attributes:
        folders: that are read.
        plan: see there.
        batch: key -> `Column`, filled by the `put` methods and by views; fields whose rows lie alike are one, by the
            key of the first.
        records, anchors: with the records of their episodes.
        gather: copies rows.
        t, length: (B,) int64 of each anchor and its episode, or of the part of it between two ends.
        begin: (B,) the timestep at which that part begins; 0 where there is none.
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
        self._there: BoolArray | None = None
        if since is None:  # else all were there, and `fresh` tells whether they still are
            there = self.t < self.length
            if FALSE in there.tobytes():
                self._there = there
                self._set_aside(~there)
        self.begin: IntArray | int = 0
        if ends.before and halves[:, START].any():
            # What a ring has forgotten does not exist; an anchor that it forgot since it was drawn begins its episode.
            self._begin_at(np.minimum(halves[:, START], np.maximum(self.t, 0)).astype(np.int64))
        # Of what was known at a change counter no episode has a marked end in its middle, see `LiveIndex`; whether that
        # is so still, `fresh` tells.
        self._since, unseen = since, since is not None and ends.marked
        marks = ends.marked and not unseen and np.bitwise_or.reduce(self._flags, initial=0) & INNER_END
        if ends.names and ends.after and (not ends.marked or marks):
            self._keep_between_ends()

    def _set_aside(self, gone: BoolArray) -> None:
        """Cut items of lost episodes from the first row of their slot, which always exists: they are drawn again."""
        self.t, self.length, self._first = np.where(gone, 0, self.t), np.where(gone, 1, self.length), self._first.copy()
        for storage, chosen, *_ in self.records.groups:
            self._first[chosen] = np.where(
                gone[chosen], storage.first_row(self.anchors.slot[chosen], False), self._first[chosen]
            )

    def _keep_between_ends(self) -> None:
        """Take the steps between two ends for the episode, as far as items reach: what is beyond does not exist."""
        ends, whole = self._ends, self.length
        begin, stop = np.full_like(whole, -1), whole.copy()
        for start in range(0, ends.after, LOOK):
            steps = range(start, min(start + LOOK, ends.after))
            is_end = self._is_end(steps)
            here = is_end.any(axis=1) & (stop == whole)
            stop = np.where(here, self.t + start + is_end.argmax(axis=1) + 1, stop)
            if not ((stop == whole) & (self.t + steps.stop < whole)).any():
                break
        for start in range(0, ends.before, LOOK):
            steps = range(-min(start + LOOK, ends.before), -start)
            is_end = self._is_end(steps)[:, ::-1]
            here = is_end.any(axis=1) & (begin < 0)
            begin = np.where(here, self.t - start - is_end.argmax(axis=1), begin)
            if not ((begin < 0) & (self.t + steps.start > 0)).any():
                break
        self.has_final = (self._flags & FINAL).astype(np.bool_) & (stop == whole)
        self.length, self._parted = stop, True
        self._begin_at(np.maximum(begin, 0))

    def _begin_at(self, begin: IntArray) -> None:
        """Take a timestep of each episode for its first one."""
        self.begin = self.begin + begin
        self._first = self._first + begin
        self.t, self.length = self.t - begin, self.length - begin

    def _is_end(self, steps: range) -> BoolArray:
        """(B, K) whether a field that ends episodes is true at `t + steps`."""
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
        """(B,) whether something is known to follow the last step: an observation, or that nothing does."""
        recorded = self._ends.recorded and not self._parted
        return (self._flags & (FINAL | TERMINATED)).astype(np.bool_) if recorded else self.has_final | self.terminated

    def limit(self, final: bool) -> IntArray:
        """(B,) how many entries each anchor's episode has of fields with or without `final`."""
        return self.length + self.has_final if final else self.length

    def first(self, final: bool) -> IntArray:
        """(B,) the row of step 0 of each anchor's episode, of fields with or without `final`."""
        return self._first + self.anchors.slot if final else self._first

    # What an item is, where that is more or less than its episode from the anchor on

    def pad_in_front(self, steps: int) -> None:
        """Take each anchor for its episode's first step, and anchor items of fewer than `steps` steps before it."""
        self._begin_at(self.t)
        self.t = np.minimum(self.length - steps, 0)

    def run_on(self, steps: int) -> IntArray:
        """Let ranges of `steps` rows from the anchors on go on in the episodes that follow.

        Returns:
            (B,) the timesteps that exist are below it; those beyond the episode are of others.
        """
        item, records = find_following(self.folders, self.anchors)
        halves: npt.NDArray[np.uint32] = records.anchors.words.view(np.uint32)  # type: ignore[union-attr]
        start, stop = halves[:, START].astype(np.int64), halves[:, STOP].astype(np.int64)
        sums = np.append(0, np.cumsum(stop - start))
        # Behind the item's own steps, and those of the episodes before it.
        before = sums[:-1] - sums[np.searchsorted(item, item)]
        own = np.maximum(self.length - self.t, 0)  # of an episode that left meanwhile, the item is drawn again
        lead = np.minimum(own[item] + before, steps)
        end = np.minimum(lead + stop - start, steps)
        self._following = Following(item, records, start, lead, end)
        return self.length + np.bincount(item, stop - start, len(self.t)).astype(np.int64)

    def put_ends(self, first: str, last: str, steps: range) -> None:
        """Put (B, K) where episodes begin in an item that runs on, and its own first step; and where they end."""
        item, records, start, lead, end = self._following  # type: ignore[misc]
        flags = records.anchors.words.view(np.uint32)[:, FLAGS]  # type: ignore[union-attr]
        begins, ends = np.zeros((2, len(self.t), len(steps)), np.bool_)
        begins[:, 0] = True
        begins[item[end > lead], lead[end > lead]] = True
        own, whole = self.length - self.t, records.anchors.length - start == end - lead
        # What is still appended to an episode follows its last step of now.
        over = np.flatnonzero((own > 0) & (own <= len(steps)) & (self._flags & OPEN == 0))
        ends[over, own[over] - 1] = True
        over = np.flatnonzero((end > lead) & whole & (flags & OPEN == 0))
        ends[item[over], end[over] - 1] = True
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
        """Put (B, K, 2) the serial and the timestep of `t + steps`, or (B, K, 3) with the folder first; -1 for none."""
        own, anchors = self.exists(steps), self.anchors
        folder = [] if anchors.folder is None else [anchors.folder]
        out = np.full((*own.shape, 2 + len(folder)), -1)
        for i, column in enumerate((*folder, anchors.serial)):
            out[..., i] = np.where(own, column[:, None], -1)
        out[..., -1] = np.where(own, (self.t + self.begin)[:, None] + array_of(steps), -1)
        if self._following is not None:
            item, records, start, lead, end = self._following
            each = np.repeat(np.arange(len(item)), end - lead)
            since = np.arange(len(each)) - np.repeat(np.cumsum(end - lead) - (end - lead), end - lead)
            columns = [column[item[each]] for column in folder]
            columns += [records.anchors.serial[each], start[each] + since]
            out[item[each], lead[each] + since] = np.stack(columns, axis=-1)
        self.batch[key] = out

    def require_steps(self, steps: int) -> None:
        """Raise NotEnoughDataError where an episode has fewer than `steps` steps from its anchor on."""
        short = self.length - self.t < steps
        short = short if self._there is None else short & self._there
        if short.any():
            serial, length = int(self.anchors.serial[short][0]), int(self.length[short][0])
            raise NotEnoughDataError(
                f"episode {serial} has {length} timesteps, fewer than the {steps} that were asked for; lower the "
                "length, leave such episodes out by min_episode_len, or leave allow_short=True, which pads",
                serial=serial,
            )

    # The columns of a batch

    def put_at(self, names: Iterable[str], t: IntArray, *, prefix: str = "") -> None:
        """Put fields at one timestep an item, zero where it does not exist.

        Args:
            names: per-timestep fields.
            t: (B,).
            prefix: each field is put under `prefix` + name.
        """
        plans: dict[bool, tuple[IntArray, IntArray | None]] = {}
        row, beyond = self._first + t, NONE
        if t is not self.t:
            outside = t.view(np.uint64) >= self.length.view(np.uint64)  # a negative one is a huge one
            beyond = outside.nonzero()[0] if TRUE in outside.tobytes() else NONE
        for group in self.folders.groups[(prefix, *names)]:
            final = group.final
            if len(t) * group.largest > MAX_BATCH_BYTES:
                self._refuse_fields(group, 1)
            if final not in plans:
                there = row + self.anchors.slot if final else row
                plans[final] = self._nearest_at(t, there, beyond, final) if len(beyond) else (there, None)
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
            offsets: (K,) int64, or (B, K) of each item's own; a range of step 1 is copied in one piece.
            prefix: each field is put under `prefix` + name.
            limit: (B,) the timesteps that exist are below it; default: the episode's, with its final observation.
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
        """Put (B, K) whether timestep `t + offsets` exists, final observations not counted."""
        self._require_mask(offsets)
        one_by_one = offsets.step == 1
        self.batch[key] = self._ranges(offsets, False, self.length, "zero") if one_by_one else self.exists(offsets)

    def put_meta(self, names: Iterable[str]) -> None:
        """Put meta fields, one entry an item."""
        for name in names:
            self.batch[name] = self.gather.meta(name)

    # Values that a view computes with

    def look(self, name: str, offsets: range, limit: IntArray | None = None) -> Array:
        """A field at `t + offsets` as numpy can compute with it, (B, K, *field), zero where it does not exist."""
        values, dtype = self._stored(name, offsets, limit), self.schema.fields[name].dtype
        return values if dtype != "bfloat16" else decode(values, dtype)

    def _stored(self, name: str, offsets: range, limit: IntArray | None) -> Array:
        if len(self.t) * len(offsets) * max(INDEX_BYTES, self.schema.largest) > MAX_BATCH_BYTES:
            self.require_size(name, len(offsets))
        steps = self.t[:, None] + np.arange(offsets.start, offsets.stop, offsets.step)
        rows, missing = self._nearest(steps, self.schema.fields[name].final, limit)
        values = self.gather.copied(name, rows)
        if missing is not None:
            values[missing] = values.dtype.type()
        return values

    def look_at(self, name: str, t: IntArray) -> Array:
        """A field at one timestep an item, (B, *field), that is known to exist."""
        field = self.schema.fields[name]
        row = self._first + t
        values = self.gather.copied(name, row + self.anchors.slot if field.final else row)
        return values if field.dtype != "bfloat16" else decode(values, field.dtype)

    def exists(self, offsets: IntArray | range, limit: IntArray | None = None) -> BoolArray:
        """(B, K) whether timestep `t + offsets` exists, the final observation not counted unless in `limit`."""
        self._require_mask(offsets)
        steps = array_of(offsets)
        there = steps < ((self.length if limit is None else limit) - self.t)[:, None]
        if int(steps.min(initial=0)) + int(self.t.min(initial=0)) < 0:
            there &= steps >= -self.t[:, None]
        return np.asarray(there)

    # Where rows lie

    def _nearest_at(
        self, t: IntArray, row: IntArray, beyond: IntArray, final: bool
    ) -> tuple[IntArray, IntArray | None]:
        """The rows of the nearest timesteps that exist, where `row` (B,) has those of `t`; which do not exist.

        Args: beyond: those that are no step of their episode.
        """
        wanted, limit = t.take(beyond), self.length.take(beyond)
        if final:
            limit += self.has_final.take(beyond)
        nearest = np.minimum(np.maximum(wanted, 0), limit - 1)
        there = row.copy()
        there[beyond] += nearest - wanted
        missing = beyond[nearest != wanted]
        return there, missing if len(missing) else None

    def _nearest(
        self, wanted: IntArray, final: bool, limit: IntArray | None = None
    ) -> tuple[IntArray, BoolArray | None]:
        """The rows of the nearest timesteps that exist; which wanted ones (B, K) do not exist, None for none."""
        first = self.first(final)[:, None]
        limit = (self.limit(final) if limit is None else limit)[:, None]
        clipped = np.minimum(np.maximum(wanted, 0), limit - 1)
        missing = wanted != clipped
        return first + clipped, missing if TRUE in missing.tobytes() else None

    def _ranges(self, offsets: range, final: bool, limit: IntArray, padding: str) -> RowRanges:
        begin, steps = self.t + offsets.start, len(offsets)
        lead = np.minimum(np.maximum(-begin, 0), steps)
        stop = np.maximum(np.minimum(limit - begin, steps), 0)
        nearest = np.minimum(np.maximum(begin, 0), limit - 1)
        further = None if self._following is None else self._following.rows(final, offsets.start)
        return RowRanges(self.first(final) + nearest, lead, stop, steps, padding, further)

    # The end

    def fresh(self) -> BoolArray | None:
        """(B,) whether the rows that were copied are those of the anchors, None for all; true only after all copying.

        What a folder showed at a value of its change counter is as it was as long as that stands.
        """
        since, has_since, only = self._since, self._since is not None, self.records.only
        gather = self.gather
        copied = gather.broken is None and not gather.fetched
        nothing_else = copied and self._there is None and self._following is None
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
        return same if self._there is None else same & self._there

    def kept(self, columns: Columns, chosen: BoolArray, fitted: bool) -> Columns:
        """Some items of a batch that was copied.

        Args:
            columns: that batch.
            chosen: (B,) whether an item is kept.
            fitted: sequences are as long as the longest episode of the batch, so they may become shorter.
        """
        out = {key: values[chosen] for key, values in columns.items()}
        less = int(self.length.max() - self.length[chosen].max()) if fitted else 0
        for first, column in self.batch.items() if less else ():
            keys, rows = (column.group.keys, column.rows) if isinstance(column, RowGather) else ((first,), column)
            if isinstance(rows, RowRanges):
                out |= {key: out[key][:, :-less] for key in keys}
        return out

    def _refuse_fields(self, group: FieldGroup, steps: int) -> None:
        name = max(group.names, key=lambda name: self.schema.fields[name].itemsize)
        refuse_size(len(self.t), f"field {name!r}", len(self.t) * steps * group.largest)

    def require_size(self, name: str, steps: int) -> None:
        """Raise SchemaError where so many timesteps an item of a field are too many."""
        group = self.folders.groups["", name][0]
        if len(self.t) * steps * group.largest > MAX_BATCH_BYTES:
            self._refuse_fields(group, steps)

    def _require_mask(self, offsets: IntArray | range) -> None:
        size = len(self.t) * len(offsets) * INDEX_BYTES
        if size > MAX_BATCH_BYTES:
            refuse_size(len(self.t), "the mask", size)


def find_following(folders: Folders, anchors: Anchors) -> tuple[IntArray, Found]:
    """(whose, the records of) the episodes that items run on into; those that are gone have a length of 0."""
    following = np.empty((anchors.size, 0, 2), np.int64) if anchors.following is None else anchors.following
    item, place = np.nonzero(following[..., 1] >= 0)
    slot, serial = following[item, place].T.copy()
    folder = None if anchors.folder is None else anchors.folder[item]
    return item, folders.find(Anchors(folder, slot, serial, np.zeros_like(slot)))


def array_of(offsets: IntArray | range) -> IntArray:
    """Offsets as an array; a range of any step."""
    return np.arange(offsets.start, offsets.stop, offsets.step) if isinstance(offsets, range) else offsets


def placed(parts: list[tuple[IntArray, Columns]], count: int) -> Columns:
    """A batch of `count` items out of parts, each with the places of its items; short sequences end in zeros."""
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
