"""The one engine under every view: rows = first row + t + offsets, clipped into the episode, copied, padded, masked.

A view puts columns into a `BatchBuilder`: arrays as they are, or which rows of which field stand there. `copy` then
copies all of them, and `fresh` tells whether every episode is still what it was when its record was looked up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.choices import Padding
from memmap_buffer.dtypes import FALSE, TRUE, Array, decode
from memmap_buffer.errors import NotEnoughDataError, SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.records import FINAL, FIRST_ROW, FLAGS, INNER_END, OPEN, START, STOP, TERMINATED, Words
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import MOST_AT, bytes_at
from memmap_buffer.remote.mirror import Rows, Taken, bring
from memmap_buffer.schema import DECLARED, LENGTHS, Field, Schema
from memmap_buffer.views.anchors import Anchors, BoolArray
from memmap_buffer.views.folders import EVERY, Folders, Found
from memmap_buffer.views.memory_pool import SMALL, Pool
from memmap_buffer.views.row_ranges import LARGE, Further, RowRanges

MAX_BATCH_BYTES = 16 << 30  # a length that a stranger wrote must not take all memory
INDEX_BYTES = 32  # memory that it takes to find one row
ANCHOR = range(1)
WIDE = 1 << 10  # bytes of a row: wider ones are copied folder by folder, into memory that is used again
LOOK = 256  # timesteps that are looked at together for the end of an episode
PADDINGS = get_args(Padding)


class BFloat16Bits(np.ndarray[Any, np.dtype[np.uint16]]):
    """uint16 that are the bits of bfloat16 numbers, so that the PyTorch layer knows."""


class RaggedRows(list[Array]):
    """Sequences of their own lengths, one array an item; a list that a transform makes may hold whole columns."""


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
    def of(cls, schema: Schema, terminated: str | None = DECLARED, *, before: int = 0, after: int = 1) -> Ends:
        """By a field; default: the one that was declared."""
        name = schema.terminated if terminated == DECLARED else terminated
        names = tuple(dict.fromkeys([end for end in (name, schema.truncated) if end is not None]))
        recorded = terminated == DECLARED or name == schema.terminated
        return cls(name, recorded, names, marked={*names} <= {*schema.ends}, before=before, after=after)


class RowGather(NamedTuple):
    """A field's rows, to be copied; `missing` (B,) or (B, K) of them do not exist, and get `padding`."""

    name: str
    rows: IntArray | RowRanges
    missing: BoolArray | None = None
    padding: str = "zero"


class Following(NamedTuple):
    """The episodes that items run on into, all (P,), item by item.

    Attributes:
        item: whose.
        found: their records.
        start: the first step of each that is shown.
        lead, end: the entries of the item that it has: lead … end - 1.
    """

    item: IntArray
    found: Found
    start: IntArray
    lead: IntArray
    end: IntArray

    def rows(self, final: bool) -> Further:
        """The rows of those entries, of fields with or without `final`."""
        anchors = self.found.anchors
        row = anchors.words.view(np.int64)[:, FIRST_ROW] + self.start  # type: ignore[union-attr]
        row = row + anchors.slot if final else row
        needed = self.end > self.lead
        return Further(self.item[needed], row[needed], self.lead[needed], self.end[needed])


Column: TypeAlias = Array | RowGather | RowRanges  # as it is; rows to copy; the mask of the rows that exist
Columns: TypeAlias = dict[str, Array]


class BatchBuilder:
    """A batch as it is put together around its anchors.

    Args:
        folders: the folders that are read.
        anchors: (B,) the timesteps at which items are cut.
        ends: how episodes end for the view.

    Attributes:
        folders: that are read.
        batch: key -> `Column`, filled by the `put` methods and by views.
        anchors: with the records of their episodes.
        t, length: (B,) int64 of each anchor and its episode, or of the part of it between two ends.
        begin: (B,) the timestep at which that part begins; 0 where there is none.
    """

    def __init__(self, folders: Folders, anchors: Anchors, ends: Ends, since: int | None = None) -> None:
        self.schema = folders.schema
        self.found: Found = folders.find(anchors, since=since)
        self.anchors = self.found.anchors
        self.batch: dict[str, Column] = {}
        self._pool, self.folders = folders.pool, folders
        self._following: Following | None = None
        self._ends, self._parted = ends, False
        self._taken: list[Taken] = []
        self._broken: tuple[Storage, str, BoolArray] | None = None  # a field of which some items cannot be decoded
        words: Words = self.anchors.words  # type: ignore[assignment]
        halves: npt.NDArray[np.uint32] = words.view(np.uint32)
        self.t, self.length = anchors.t, halves[:, STOP].astype(np.int64)
        self._flags = halves[:, FLAGS]
        self._first: IntArray = words.view(np.int64)[:, FIRST_ROW]
        there = self.t < self.length
        self._there: BoolArray | None = None if FALSE not in there.tobytes() else there
        if self._there is not None:
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
        for storage, chosen, *_ in self.found.groups:
            self._first[chosen] = np.where(
                gone[chosen], storage.first_row(self.anchors.slot[chosen], False), self._first[chosen]
            )

    def _keep_between_ends(self) -> None:
        """Take the steps between two ends for the episode, as far as items reach: what is beyond does not exist."""
        ends, whole = self._ends, self.length
        begin, stop = np.full_like(whole, -1), whole.copy()
        for start in range(0, ends.after, LOOK):
            steps = range(start, min(start + LOOK, ends.after))
            found = self._is_end(steps)
            here = found.any(axis=1) & (stop == whole)
            stop = np.where(here, self.t + start + found.argmax(axis=1) + 1, stop)
            if not ((stop == whole) & (self.t + steps.stop < whole)).any():
                break
        for start in range(0, ends.before, LOOK):
            steps = range(-min(start + LOOK, ends.before), -start)
            found = self._is_end(steps)[:, ::-1]
            here = found.any(axis=1) & (begin < 0)
            begin = np.where(here, self.t - start - found.argmax(axis=1), begin)
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
        told = self._ends.recorded and not self._parted
        return (self._flags & (FINAL | TERMINATED)).astype(np.bool_) if told else self.has_final | self.terminated

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
        item, found = find_following(self.folders, self.anchors)
        halves: npt.NDArray[np.uint32] = found.anchors.words.view(np.uint32)  # type: ignore[union-attr]
        start, stop = halves[:, START].astype(np.int64), halves[:, STOP].astype(np.int64)
        sums = np.append(0, np.cumsum(stop - start))
        # Behind the item's own steps, and those of the episodes before it.
        before = sums[:-1] - sums[np.searchsorted(item, item)]
        lead = np.minimum((self.length - self.t)[item] + before, steps)
        end = np.minimum(lead + stop - start, steps)
        self._following = Following(item, found, start, lead, end)
        return self.length + np.bincount(item, stop - start, len(self.t)).astype(np.int64)

    def put_ends(self, first: str, last: str, steps: range) -> None:
        """Put (B, K) where episodes begin in an item that runs on, and its own first step; and where they end."""
        item, found, start, lead, end = self._following  # type: ignore[misc]
        flags = found.anchors.words.view(np.uint32)[:, FLAGS]  # type: ignore[union-attr]
        begins, ends = np.zeros((2, len(self.t), len(steps)), np.bool_)
        begins[:, 0] = True
        begins[item[end > lead], lead[end > lead]] = True
        own, whole = self.length - self.t, found.anchors.length - start == end - lead
        # What is still appended to an episode follows its last step of now.
        over = np.flatnonzero((own <= len(steps)) & (self._flags & OPEN == 0))
        ends[over, own[over] - 1] = True
        over = np.flatnonzero((end > lead) & whole & (flags & OPEN == 0))
        ends[item[over], end[over] - 1] = True
        if self._ends.names and (
            not self._ends.marked or ((self._flags & INNER_END).any() | (flags & INNER_END).any())
        ):
            for name in self._ends.names:
                values = self._copied(name, self._ranges(steps, self.schema.fields[name].final, self.length, "zero"))
                ends |= values.any(axis=tuple(range(2, values.ndim)))
            begins[:, 1:] |= ends[:, :-1]
        self.batch |= {first: begins, last: ends}

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
        plans: dict[bool, tuple[IntArray, BoolArray | None]] = {}
        fields, large = self.schema.fields, len(t) * max(self.schema.largest, INDEX_BYTES) > MAX_BATCH_BYTES
        for name in names:
            if large:
                self._require_size(name, 1)
            final = fields[name].final
            if final not in plans:
                plans[final] = self._nearest(t, final)
            self.batch[prefix + name] = RowGather(name, *plans[final])

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
        plans: dict[bool, RowGather] = {}
        for name in names:
            final = self.schema.fields[name].final
            self._require_size(name, len(offsets) if isinstance(offsets, range) else offsets.shape[-1])
            if final not in plans:
                plans[final] = self._around(name, offsets, limit, padding)
            self.batch[prefix + name] = plans[final]._replace(name=name)

    def put_mask(self, key: str, offsets: range) -> None:
        """Put (B, K) whether timestep `t + offsets` exists, final observations not counted."""
        self._require_mask(offsets)
        one_by_one = offsets.step == 1
        self.batch[key] = self._ranges(offsets, False, self.length, "zero") if one_by_one else self.exists(offsets)

    def put_meta(self, names: Iterable[str]) -> None:
        """Put meta fields, one entry an item."""
        for name in names:
            self.batch[name] = self.look_meta(name)

    # Values that a view computes with

    def look(self, name: str, offsets: range, limit: IntArray | None = None) -> Array:
        """A field at `t + offsets` as numpy can compute with it, (B, K, *field), zero where it does not exist."""
        if offsets == ANCHOR and limit is not None:  # every limit lies behind the anchor
            return self.look_at(name, self.t)[:, None]
        return decode(self._stored(name, offsets, limit), self.schema.fields[name].dtype)

    def _stored(self, name: str, offsets: range, limit: IntArray | None) -> Array:
        self._require_size(name, len(offsets))
        steps = self.t[:, None] + np.arange(offsets.start, offsets.stop, offsets.step)
        rows, missing = self._nearest(steps, self.schema.fields[name].final, limit)
        values = self._copied(name, rows)
        if missing is not None:
            values[missing] = values.dtype.type()
        return values

    def look_at(self, name: str, t: IntArray) -> Array:
        """A field at one timestep an item, (B, *field), that is known to exist."""
        field = self.schema.fields[name]
        return decode(self._copied(name, self.first(field.final) + t), field.dtype)

    def look_meta(self, name: str) -> Array:
        """A meta field of each item's episode, as stored: (B, *field)."""
        slot, field = self.anchors.slot, self.schema.meta_fields[name]
        width, reach, of = field.itemsize, self.found.reach, self.found.of
        begin = None
        if reach is not None and of is not None and 0 < width <= MOST_AT:
            begin = reach.meta_at(name, of, slot)
        if begin is not None:
            found = bytes_at(begin + width * slot, width)
            return marked(field, found.view(field.storage).reshape(len(slot), *field.shape))
        groups = self.found.groups
        out = np.empty((len(slot), *field.shape), field.storage)
        for storage, chosen, *_ in groups:
            out[chosen] = storage.maps.meta[name].take(slot[chosen], 0, None, "clip")
        return marked(field, out)

    def exists(self, offsets: IntArray | range, limit: IntArray | None = None) -> BoolArray:
        """(B, K) whether timestep `t + offsets` exists, the final observation not counted unless in `limit`."""
        self._require_mask(offsets)
        steps = array_of(offsets)
        found = steps < ((self.length if limit is None else limit) - self.t)[:, None]
        if int(steps.min(initial=0)) + int(self.t.min(initial=0)) < 0:
            found &= steps >= -self.t[:, None]
        return np.asarray(found)

    # Where rows lie

    def _nearest(
        self, wanted: IntArray, final: bool, limit: IntArray | None = None
    ) -> tuple[IntArray, BoolArray | None]:
        """The rows of the nearest timesteps that exist; which wanted timesteps do not exist, None for none."""
        first = self._first + self.anchors.slot if final else self._first
        if wanted is self.t:
            return first + wanted, None
        if limit is None:
            inside = wanted.ndim == 1 and wanted.view(np.uint64) < self.length.view(np.uint64)  # -1 is a huge one
            if inside is not False and FALSE not in inside.tobytes():
                return first + wanted, None
            limit = self.length + self.has_final if final else self.length
        if wanted.ndim > 1:
            first, limit = first[:, None], limit[:, None]
        clipped = np.minimum(np.maximum(wanted, 0), limit - 1)
        missing = wanted != clipped
        return first + clipped, missing if TRUE in missing.tobytes() else None

    def _around(self, name: str, offsets: IntArray | range, limit: IntArray | None, padding: str) -> RowGather:
        final = self.schema.fields[name].final
        limit = self.limit(final) if limit is None else limit
        if isinstance(offsets, range) and offsets.step == 1:
            return RowGather(name, self._ranges(offsets, final, limit, padding))
        return RowGather(name, *self._nearest(self.t[:, None] + array_of(offsets), final, limit), padding)

    def _ranges(self, offsets: range, final: bool, limit: IntArray, padding: str) -> RowRanges:
        begin, steps = self.t + offsets.start, len(offsets)
        lead = np.minimum(np.maximum(-begin, 0), steps)
        stop = np.maximum(np.minimum(limit - begin, steps), 0)
        nearest = np.minimum(np.maximum(begin, 0), limit - 1)
        further = None if self._following is None else self._following.rows(final)
        return RowRanges(self.first(final) + nearest, lead, stop, steps, padding, further)

    # The copy

    def copy(self) -> Columns:
        """Copy everything: key -> (B, …), as stored."""
        out: Columns = {}
        only, fields, coded, later = self.found.only, self.schema.fields, self.folders.coded, dict[str, None]()
        stored = None if only is None else only.maps.rows
        if self.folders.mirrored:
            self._bring([column for column in self.batch.values() if type(column) is RowGather])
        for key, column in self.batch.items():
            if type(column) is not RowGather:
                out[key] = column.exist() if type(column) is RowRanges else column  # type: ignore[assignment]
                continue
            name, rows, missing, padding = column
            if name in coded:
                later[name] = None
                out[key] = rows  # type: ignore[assignment]  # in its place
                continue
            if stored is not None and type(rows) is np.ndarray and rows.size * stored[name].strides[0] < SMALL:
                values = stored[name].take(rows, 0, None, "clip")
            else:
                values = self._copied_there(name, rows)
            if missing is not None and padding != "edge":  # the nearest row, which "edge" asks for, was copied
                values[missing] = values.dtype.type() if padding == "zero" else fields[name].fill
            out[key] = values.view(BFloat16Bits) if fields[name].dtype == "bfloat16" else values
        for name in later:
            wanted = {key: c for key, c in self.batch.items() if type(c) is RowGather and c.name == name}
            if fields[name].is_list:
                for key, gather in wanted.items():
                    out[key], out[LENGTHS + key] = self._padded_lists(gather)
            else:
                out |= zip(wanted, self._decoded(name, list(wanted.values())), strict=True)
        return out

    def _padded_lists(self, gather: RowGather) -> tuple[Array, IntArray]:
        """The lists of some rows (B, …, L, *members), zeros behind the end of each; (B, …) how long they are."""
        name, rows, *_ = gather
        field, count = self.schema.fields[name], len(self.t)
        lead = (count, rows.steps) if isinstance(rows, RowRanges) else rows.shape
        length = np.zeros(lead, np.int64)
        groups = []
        for storage, chosen, *_ in self.found.groups:
            members, counts, bad = storage.maps.coded[name].lists(self._rows_in_file(storage, chosen, gather))
            length[chosen] = counts.reshape(length[chosen].shape)
            if bad.any():
                items = np.zeros(count, np.bool_) if self._broken is None else self._broken[2]
                items[chosen] |= bad.reshape(length[chosen].shape).reshape(len(items[chosen]), -1).any(axis=1)
                self._broken = storage, name, items
            groups.append((chosen, members))
        longest = int(length.max(initial=0))
        if length.size * longest * field.itemsize > MAX_BATCH_BYTES:
            self._refuse_size(f"field {name!r}", length.size * longest * field.itemsize)
        out: Array = np.zeros((*lead, longest, *field.shape[1:]), field.entries)
        there = np.arange(longest) < length[..., None]
        for chosen, members in groups:
            if chosen is EVERY:
                out[there] = members
            else:
                part = out[chosen]
                part[there[chosen]] = members
                out[chosen] = part
        return out, length

    def _decoded(self, name: str, wanted: Sequence[RowGather]) -> list[Array]:
        """Rows of a compressed field, each (B, …, *field): a blob that is wanted several times is decoded once."""
        field, count = self.schema.fields[name], len(self.t)
        leads = [(count, g.rows.steps) if isinstance(g.rows, RowRanges) else g.rows.shape for g in wanted]
        stops = np.cumsum([0, *map(math.prod, leads)])
        out = self._pool.empty((int(stops[-1]), *field.shape), field.storage)
        for storage, chosen, *_ in self.found.groups:
            of = np.concatenate([self._rows_in_file(storage, chosen, gather) for gather in wanted])
            place = np.arange(len(out))
            if self.found.order is not None:
                parts = [place[start:stop].reshape(count, -1) for start, stop in pairwise(stops.tolist())]
                place = np.concatenate([part[chosen].ravel() for part in parts])
            if name not in storage.maps.coded:
                out[place] = of
                continue
            bad = storage.maps.coded[name].decode_into(of, out, place)
            if len(bad):
                starts = stops[np.searchsorted(stops, place[bad], side="right") - 1]
                per_item = np.diff(stops)[np.searchsorted(stops, place[bad], side="right") - 1] // count
                items = np.zeros(count, np.bool_) if self._broken is None else self._broken[2]
                items[(place[bad] - starts) // per_item] = True
                self._broken = storage, name, items
        parts = [out[start:stop] for start, stop in pairwise(stops.tolist())]
        return [marked(field, part.reshape(*lead, *field.shape)) for lead, part in zip(leads, parts, strict=True)]

    def _rows_in_file(self, storage: Storage, chosen: Any, gather: RowGather) -> Array:
        """The rows of some items (n, …) in the file of a field of one folder, with its padding, one behind the other.

        Of a compressed field they are its index.
        """
        name, rows, missing, padding = gather
        field = storage.layout.schema.fields[name].in_file
        if isinstance(rows, RowRanges):
            return rows[chosen].copy(storage, name, self._pool).reshape(-1, *field.shape)
        values: Array = storage.maps.rows[name].take(rows[chosen], 0, None, "clip")
        if missing is not None and padding != "edge":
            values[missing[chosen]] = values.dtype.type() if padding == "zero" else field.fill
        return values.reshape(-1, *field.shape)

    def _bring(self, gathers: Sequence[RowGather]) -> None:
        """Have rows fetched that are about to be copied; a mirror that is there whole is asked for none."""
        taken = Taken()
        wanted = [
            (storage, [Rows(gather.name, *_ranges_of(gather.rows, len(self.t), chosen)) for gather in gathers])
            for storage, chosen, *_ in self.found.groups
            if storage.mirror is not None and not taken.add_whole(storage.mirror)
        ]
        self._taken.append(taken)
        if wanted:
            taken += bring(wanted)

    def _copied(self, name: str, rows: IntArray | RowRanges) -> Array:
        """Rows of a field, folder by folder: (B, …, *field)."""
        if self.folders.mirrored:
            self._bring([RowGather(name, rows)])
        if name in self.folders.coded:
            return self._decoded(name, [RowGather(name, rows)])[0]
        return self._copied_there(name, rows)

    def _copied_there(self, name: str, rows: IntArray | RowRanges) -> Array:
        """The same of a field that is not compressed, whose rows are there."""
        values = self._copied_at_once(name, rows)
        if values is not None:
            return values
        order, groups = self.found.order, self.found.groups
        if order is None:
            storage = groups[0].storage
            if isinstance(rows, RowRanges):
                return rows.copy(storage, name, self._pool)
            return taken(storage.maps.rows[name], rows, self._pool)
        rows, field = rows[order], self.schema.fields[name]
        lead = (len(rows.row), rows.steps) if isinstance(rows, RowRanges) else rows.shape
        by_folder = self._pool.empty((*lead, *field.shape), field.storage)
        for storage, _, part, _ in groups:
            if isinstance(rows, RowRanges):
                by_folder[part] = rows[part].copy(storage, name, self._pool)
            else:
                storage.maps.rows[name].take(rows[part], 0, by_folder[part], "clip")
        out = self._pool.empty(by_folder.shape, by_folder.dtype)
        return by_folder.take(self.found.place, 0, out, "clip")

    def _copied_at_once(self, name: str, rows: IntArray | RowRanges) -> Array | None:
        """The same out of many folders by one call; None where a call for each is less than the bytes."""
        reach, of, field = self.found.reach, self.found.of, self.schema.fields[name]
        if reach is None or of is None:
            return None
        low, high = (part.reshape(len(self.t), -1) for part in _ranges_of(rows, len(self.t), EVERY))
        begin, width = reach.rows_at(name, of, low, high), field.itemsize
        if begin is None:
            return None
        if isinstance(rows, RowRanges):
            return rows.copy_from(begin, field, self._pool) if 0 < rows.steps * width <= MOST_AT else None
        if not 0 < width <= WIDE or rows.size * width >= LARGE:
            return None
        found = bytes_at(begin.reshape(-1, *(1,) * (rows.ndim - 1)) + width * rows, width)
        return found.view(field.storage).reshape(*rows.shape, *field.shape)

    def fresh(self) -> BoolArray | None:
        """(B,) whether the rows that were copied are those of the anchors, None for all; true only after all copying.

        What a folder showed at a value of its change counter is as it was as long as that stands.
        """
        since, known = self._since, self._since is not None
        if known and self._there is None and self._broken is None and self.found.groups[0].storage.changes == since:
            return None
        same = self.found.unchanged()
        if known and self._ends.names and self._ends.after and self._ends.marked:
            same &= self._flags & INNER_END == 0
        if self._taken and not all(taken.unchanged() for taken in self._taken):
            same[:] = False  # a block was given back before its rows were copied
        if self._following is not None:
            item, found, *_ = self._following
            same[item[~(found.unchanged() & self.found.is_beside(found))]] = False
        if self._broken is not None:  # while it was copied it may have been overwritten
            storage, name, items = self._broken
            if (same & items).any():
                serial = int(self.anchors.serial[same & items][0])
                raise storage.damaged_blob(name, f"episode {serial} has a timestep that cannot be decoded")
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
        for key, column in self.batch.items() if less else ():
            if isinstance(column.rows if isinstance(column, RowGather) else column, RowRanges):
                out[key] = out[key][:, :-less]
        return out

    def row_ranges(self) -> Iterator[tuple[str, IntArray, IntArray]]:
        """The rows that `copy` will read: (field, first rows, ends of rows), (B,) or (B * K,) each, item by item."""
        for column in self.batch.values():
            if type(column) is RowGather:
                yield column.name, *_ranges_of(column.rows, len(self.t), EVERY)

    def _require_size(self, name: str, steps: int) -> None:
        size = len(self.t) * steps * max(self.schema.fields[name].itemsize, INDEX_BYTES)
        if size > MAX_BATCH_BYTES:
            self._refuse_size(f"field {name!r}", size)

    def _require_mask(self, offsets: IntArray | range) -> None:
        size = len(self.t) * len(offsets) * INDEX_BYTES
        if size > MAX_BATCH_BYTES:
            self._refuse_size("the mask", size)

    def _refuse_size(self, what: str, size: int) -> None:
        raise SchemaError(
            f"{what}: a batch of {len(self.t)} items takes {size / 2**30:.1f} GiB, more than "
            f"{MAX_BATCH_BYTES >> 30}; lower batch_size, leave it out, or cut windows"
        )


def taken(stored: Array, rows: IntArray, pool: Pool) -> Array:
    """Rows of a field's file, `rows.shape` of them."""
    if rows.size * stored.strides[0] < SMALL:
        return stored.take(rows, 0, None, "clip")
    return stored.take(rows, 0, pool.empty((*rows.shape, *stored.shape[1:]), stored.dtype), "clip")


def _ranges_of(rows: IntArray | RowRanges, count: int, chosen: Any) -> tuple[IntArray, IntArray]:
    """(first rows, ends of rows), those of some of `count` items, item by item."""
    low, high = rows.rows() if isinstance(rows, RowRanges) else (rows.ravel(), rows.ravel() + 1)
    if chosen is not EVERY:
        low, high = (part.reshape(count, -1)[chosen].ravel() for part in (low, high))
    return low, high


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


def marked(field: Field, values: Array) -> Array:
    """The values of a field, marked as bfloat16 where they are."""
    return values.view(BFloat16Bits) if field.dtype == "bfloat16" else values


def placed(parts: list[tuple[IntArray, Columns]], count: int) -> Columns:
    """One batch of `count` items out of parts, each with the places of its items; short sequences end in zeros."""
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


def cut(columns: Columns, size: int) -> list[Columns]:
    """Columns (N, …) as batches of `size` items each, the last one of what is left; views of the columns."""
    if len(next(iter(columns.values()), ())) <= size:
        return [columns]
    parts = (pieces(values, size) for values in columns.values())
    return [dict(zip(columns, batch, strict=True)) for batch in zip(*parts, strict=True)]


def pieces(values: Array, size: int) -> list[Array]:
    """An array (N, …) cut into views of `size` items each, the last one of what is left."""
    if len(values) <= size:
        return [values]
    whole = len(values) - len(values) % size
    out = list(values[:whole].reshape(-1, size, *values.shape[1:]))  # half of what a slice for each would take
    return [*out, values[whole:]] if whole < len(values) else out


def check_padding(padding: str) -> None:
    """Raise SchemaError unless `padding` is one of `PADDINGS`."""
    if padding not in PADDINGS:
        raise SchemaError(f"padding: got {padding!r}, expected one of {', '.join(map(repr, PADDINGS))}")
