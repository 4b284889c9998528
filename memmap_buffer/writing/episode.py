"""An open episode: its timesteps, checked as they come, in memory until its writer takes them. Touches no file.

`Block` is what `with` takes, `Staging` is the memory that the timesteps of an episode stand in.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from operator import itemgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, overload
from weakref import ref

import numpy as np
from numpy import ndarray

from memmap_buffer.dtypes import Array, storage_dtype
from memmap_buffer.errors import EpisodeStateError, SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.open_episodes import Statement, ended_statement, unknown_statement
from memmap_buffer.writing import validation
from memmap_buffer.writing.blob_column import BlobColumn
from memmap_buffer.writing.commit import require_room
from memmap_buffer.writing.validation import require_default

if TYPE_CHECKING:
    from typing_extensions import Self

    from memmap_buffer.writing.writer import Writer

FIRST_CAPACITY = 64
CHUNK_BYTES = 4 << 20  # staged at a time by an episode that is written in place, and at first by any other
KEPT_BYTES = 64 << 20

Leave: TypeAlias = Callable[[type[BaseException] | None, object, object], None]


class _Exit:
    """The descriptor of `__exit__`: each look-up makes a new object, which only the `with` statement holds.

    The statement lets go of it once the end of the block has run or was interrupted, be it before its first line. A
    traceback, which a notebook keeps, holds the frames and with them the block, but not this object. It is a `partial`,
    which a call holds as long as it lasts; a bound method may be taken apart before the first line of its function.
    """

    @overload
    def __get__(self, block: None, kind: type[Block]) -> Callable[..., None]: ...
    @overload
    def __get__(self, block: Block, kind: type[Block]) -> Leave: ...
    def __get__(self, block: Block | None, kind: type[Block]) -> Callable[..., None]:
        try:
            if block is None:
                return kind.leave  # for `contextlib.ExitStack`, which asks the class: such blocks are not watched
            leave = partial(kind.leave, block)
            block._asked = ref(leave)
            return leave
        except BaseException:
            if block is not None:
                block.watch(ended_statement)  # the block is never entered
            raise


class Block:
    """A context manager whose episodes end with the `with` statement, however that is interrupted.

    Attributes:
        thread: the thread that entered the block.
    """

    thread = 0
    _asked: Statement = staticmethod(unknown_statement)

    def __enter__(self) -> Self:
        try:
            self.thread = get_ident()
            self.watch(self._statement)
            return self
        except BaseException:
            self.watch(ended_statement)
            raise

    __exit__ = _Exit()

    @property
    def _statement(self) -> Statement:
        """Of the `with` statement that is being entered: it has asked for the end of the block already."""
        return unknown_statement if self._asked() is None else self._asked

    @property
    def _members(self) -> Sequence[Episode]:
        """The episodes that end with it; none before they are opened."""
        return ()

    @property
    def in_block(self) -> bool:
        """Whether an episode of it ends with a `with` statement."""
        return any(ref(episode) in episode.writer.lock.episodes.watched for episode in self._members)

    def watch(self, statement: Statement | None) -> None:
        """Have the episodes end with a `with` statement; None: not any more."""
        for episode in self._members:
            episode.writer.lock.episodes.watch(episode, statement)

    def leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """The end of the block, with the kind of the exception that left it, if one did."""
        raise NotImplementedError


class Episode(Block):
    """An episode being written. Nothing of it is visible before `publish`, unless the buffer publishes every step.

    As a context manager it publishes at the end of the block and aborts on any exception; with `keep_partial` it
    publishes, flagged as cut short, what was stored before the exception.

    Args:
        writer: who publishes it.
        meta: what is known at the start.
        keep_partial: see above.

    Attributes:
        writer: who publishes it; another one where its recorder has gone on to another folder.
        length: timesteps stored.
        lengths: the array in which its length stands, where it is appended to together with others.
        columns: while it is open, field -> its staged rows, from timestep `base` on.
        finals: the final observation, as stored.
        meta: the meta fields, as stored.
        state: "open", "published" or "aborted".
        capacity: timesteps that its own memory has room for; 0 where its rows stand in somebody else's.
        serial: its number, from when it is written to be published, else -1.
        tried: whether it was written to be published, also if that failed.
        ended: the field that ended it, or "".
        staged: whether nothing of it is written anywhere before it is published.
        thread: which opened it.
    """

    def __init__(self, writer: Writer, meta: Mapping[str, Any], *, keep_partial: bool = False) -> None:
        self.writer = writer
        self.state = "open"
        self._schema = writer.schema
        self._shows_steps = writer.how.publish == "step"
        self.staged = not writer.in_place
        self.keep_partial, self.thread = keep_partial, get_ident()
        self._length = self._place = self.base = 0
        self.lengths: IntArray | None = None
        self.columns: dict[str, Array] = {}
        self.finals: dict[str, Array] = {}
        self.meta: dict[str, Array] = dict(writer.no_meta)
        self.serial = -1
        self.tried = False
        self.ended = ""
        # Of fields of lists, the bytes up to the end of each timestep; of those from `length` on they do not count.
        self._list_ends: dict[str, list[int]] = {}
        self._plan: list[Column] = []
        self.capacity = 0
        self._stop = 0
        self._made, self._pick, self._ends = _step_type(tuple(self._schema.fields), self._schema.ends)
        if meta:
            self.update(meta)

    @property
    def length(self) -> int:
        """See above."""
        return self._length if self.lengths is None else self.lengths.item(self._place)

    @length.setter
    def length(self, length: int) -> None:
        if self.lengths is None:
            self._length = length
        else:
            self.lengths[self._place] = length

    def share_length(self, lengths: IntArray, place: int) -> None:
        """Be appended to together with others: its length is what stands at a place of their array from now on."""
        self.own_length()
        self._stop = 0  # a step of its own takes the length back first
        self._place, self.lengths = place, lengths

    def own_length(self) -> None:
        """Be appended to alone, or not at all: its length stands where it is, whatever the array is used for next."""
        self._length = self.length
        self.lengths = None

    @property
    def _members(self) -> Sequence[Episode]:
        return (self,)

    def __repr__(self) -> str:
        number = "" if self.serial < 0 else f" {self.serial}"
        return f"<Episode{number}: {self.state}, {self.length} timesteps>"

    # Storing

    def store(self, **step: Any) -> Any:
        """Append one timestep. Where it raises the step is not stored (`length` tells), and the episode goes on.

        Args:
            step: field -> value: a tensor, array, list or scalar of the field's shape; nested dicts for groups. What
                is left out gets its default.

        Returns:
            A named tuple of the values as given, in the order of the schema.

        Raises:
            SchemaError: an unknown field, a missing one without a default, a wrong shape, a lossy cast.
            EpisodeStateError: the episode is over, or longer than `max_timesteps`.
            OSError: with `publish="step"` or `stage="disk"`, the disk is full, say.
        """
        t = self._length
        if t >= self._stop or self.state != "open" or self.ended or self.finals:
            self.require_room()
            t = self._length
        row = t - self.base
        try:
            values = self._pick(step)
        except KeyError:
            values = ()
        if len(values) != len(step) or not values:
            values = self._completed(step, t)
        for value, (array, dtype, shape, exact, others, name) in zip(values, self._plan):  # noqa: B905 `strict` takes 0.1 us
            kind = type(value)
            if kind is ndarray:
                fits = (value.dtype is dtype or value.dtype == dtype) and value.shape == shape
            else:
                fits = kind in exact or (kind in others.kinds and others.low <= value <= others.high)
            array[row] = value if fits else self._encode(name, value, t)
        if self._schema.lists:
            self.count_lists({name: self.columns[name][row : row + 1] for name in self._schema.lists})
        ended = ""
        for name, place in self._ends:
            if values[place] is not False and self.columns[name].item(row):
                ended = name
                break
        self.ended, self._length = ended, t + 1  # at once: an end is that of the last step
        if self._shows_steps:
            self.writer.append([Appended(self, self.columns, self.base, t + 1)])
        return self._made(values)

    def extend(self, **steps: Any) -> None:
        """Append several timesteps at once; those before an error of the disk stay stored (`length` tells).

        Args:
            steps: field -> (T, *field); with `final` (T + 1, *field) to give the final observation; meta field ->
                (*field).

        Raises:
            SchemaError: as `store_episode` raises it.
            EpisodeStateError: the episode is over, longer than `max_timesteps`, or ends before the last timestep.
            OSError: with `publish="step"` or `stage="disk"`, the disk is full, say.
        """
        columns, count, has_final, meta = validation.whole_episode(self._schema, steps, "extend")
        self.writer.require_within(self.length + count)
        ends = [name for name in self._schema.ends if np.count_nonzero(columns[name][: count - 1])]
        if ends:
            raise EpisodeStateError(f"extend: `{ends[0]}` is true before the last timestep; give each episode its own")
        self.require_room(count)
        if meta:
            self.set_meta(meta)
        self._extend({name: column[:count] for name, column in columns.items()}, count)
        if has_final:
            self.set_final({name: columns[name][count] for name in self._schema.final_names})

    def _extend(self, rows: Mapping[str, Array], count: int) -> None:
        """Append timesteps that are encoded already: every field -> (count, *field); only the last one may end it.

        With `publish="step"` they are written at once; with `stage="disk"` part by part, as they fill the memory.
        """
        if self._shows_steps:
            self.writer.append([self.to_append(rows, count)])
            return
        if self._schema.lists:
            self.count_lists({name: rows[name][:count] for name in self._schema.lists})
        at = 0
        while at < count:
            self.require_room(count if self.staged else 1)
            here = min(count - at, self._stop - self.length)
            self._store_rows({name: column[at : at + here] for name, column in rows.items()}, here)
            at += here

    def require_lists(self, rows: Mapping[str, Iterable[Array]]) -> dict[str, list[int]]:
        """Raise EpisodeStateError where the lists of the next timesteps, or of the final observation, have no room.

        Args: rows: field -> (N,) lists, encoded; of other fields anything.
        Returns: field of lists -> (N,) the bytes up to the end of each.
        """
        after = {}
        for name in self._schema.lists:
            if name in rows:
                before = self._list_ends[name][self.length - 1] if self.length else 0
                after[name] = [*accumulate([row.nbytes for row in rows[name]], initial=before)][1:]
                require_room(self.writer.storage.layout, name, 0, after[name][-1])
        return after

    def count_lists(self, rows: Mapping[str, Iterable[Array]]) -> None:
        """Count the lists of the next timesteps; see `require_lists`."""
        for name, ends in self.require_lists(rows).items():
            self._list_ends.setdefault(name, [])[self.length :] = ends

    def _store_rows(self, rows: Mapping[str, Array], count: int) -> None:
        row = self.length - self.base
        for name, staged in self.columns.items():
            staged[row : row + count] = rows[name]
        row += count - 1
        ended = next((name for name in self._schema.ends if self.columns[name].item(row)), "")
        self.ended, self._length = ended, self._length + count  # at once, as in `store`

    def to_append(self, rows: Mapping[str, Array], count: int = 1) -> Appended:
        """Timesteps as a writer takes them that shows every step."""
        if self.state != "open" or self.ended or self.finals:
            self.refuse()
        stop = self.length + count
        self.writer.require_within(stop)
        if self._schema.lists:
            self.count_lists({name: rows[name][:count] for name in self._schema.lists})
        return Appended(self, rows, self.length, stop)

    def final(self, **observation: Any) -> None:
        """Store the observation after the last action: every field that was declared with `final`, once.

        Args:
            observation: field -> (*field).

        Raises:
            SchemaError: a field was not declared so, or one is missing.
            EpisodeStateError: no step was stored yet, or it was called before.
        """
        self.require_open()
        values = validation.whole_final(self._schema, observation)
        self.set_final({name: self._encode(name, value, self.length) for name, value in values.items()})

    def set_final(self, stored: Mapping[str, Array]) -> None:
        """Take the final observation, every field with `final` encoded already."""
        self.require_open()
        if self.length == 0 or self.finals:
            what = "called before the first step" if self.length == 0 else "called twice"
            raise EpisodeStateError(f"final: {what}; call it once, after the last `store`")
        self.require_lists({name: [row] for name, row in stored.items()})
        self.finals = validation.copied(self._schema, stored)

    def complete(self, stored: Mapping[str, Array]) -> None:
        """Add the final observation to an episode that was published without; to one that is gone meanwhile, nothing.

        Args:
            stored: every field with `final`, encoded already.

        Raises:
            OSError: the disk is full, say; the next write adds it if this did not.
        """
        assert self.state == "published" and not self.finals
        self.writer.complete(self, validation.copied(self._schema, stored))

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a meta field; it may be known only at the end."""
        self.update({name: value})

    def update(self, meta: Mapping[str, Any]) -> None:
        """Set meta fields.

        Args:
            meta: meta field -> (*field); nested dicts for groups.

        Raises:
            SchemaError: an unknown field, a wrong shape, or a lossy cast.
            EpisodeStateError: the episode is over.
        """
        self.require_open()
        flat, fields = self._schema.flatten(meta), self._schema.meta_fields
        self._schema.require_fields(flat, "meta", fields)
        self.meta |= validation.copied(self._schema, self._schema.encode_all(fields, flat, 0))

    def set_meta(self, stored: Mapping[str, Array]) -> None:
        """Set meta fields that are encoded already."""
        self.require_open()
        self.meta |= validation.copied(self._schema, stored)

    # Ending

    def publish(self, *, cut: bool = False) -> None:
        """Publish the episode: visible to every process when this returns. An episode without steps is dropped.

        Args:
            cut: it was cut short, so the flag that says so is set.

        Raises:
            EpisodeStateError: the episode is over.
            OSError: the disk is full, say. Nothing became visible, and the episode can be published again.
        """
        if (self._length or self.length) and self.state == "open":
            self.writer.publish({self: cut})
            self.release()
        else:
            self.require_open()
            self.abort()

    def abort(self) -> None:
        """Drop the episode; steps that `publish="step"` had shown are withdrawn."""
        if self.state == "open":
            self.writer.withdraw(self)
            self.release()

    def leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """The end of its block. After an error of the disk it is still open; if interrupted, the next call ends it."""
        try:
            if self.state != "open":
                return
            if kind is None:
                self.publish()
            elif self.length and (self.keep_partial or self._shows_steps):
                self.publish(cut=True)  # steps that were published are kept: they were promised to last
            else:
                self.abort()
        except Exception:
            self.watch(None)
            raise
        except BaseException:
            self.watch(ended_statement)
            raise

    # Within

    def require_open(self) -> None:
        """Raise EpisodeStateError where it was published or aborted."""
        if self.state != "open":
            raise EpisodeStateError(f"this episode was {self.state}; begin a new one with one_episode()")

    def require_room(self, count: int = 1) -> None:
        """Raise EpisodeStateError unless so many more steps can be stored."""
        if self.state != "open" or self.ended or self.finals:
            self.refuse()
        if self.lengths is not None:
            self.writer.follow(self)
            self.own_length()
        if self._length + (count if self.staged else 1) > self._stop:
            self._grow(self._length + count)

    def refuse(self) -> NoReturn:
        """Raise EpisodeStateError, as it is over, or ended with its last step."""
        self.require_open()
        what = f"ended at timestep {self.length - 1} by `{self.ended}`" if self.ended else "has its final observation"
        raise EpisodeStateError(f"timestep {self.length}: the episode {what}; begin a new one for the steps after it")

    def _grow(self, needed: int) -> None:
        longest = self.writer.max_timesteps
        if needed > longest:
            self.writer.require_within(needed)
        if self.capacity and not self.staged:
            self.spill()
            self._stop = self._length + self.capacity
            return
        before, fields = self.columns, self._schema.fields
        columns = {} if before else self.writer.staging.take(needed)
        if not columns:
            capacity = min(longest, max(needed, self.first_capacity(), 2 * self.capacity))
            columns = {name: self._new_column(name, capacity) for name in fields}
        count = self._length - self.base
        for name, rows in before.items():
            if isinstance(rows, np.ndarray):
                columns[name][:count] = rows[:count]
        plan: list[Column] = []
        for name, field in fields.items():
            numbers = Scalars.of(field.dtype, field.shape)
            plan.append((columns[name], field.direct, field.shape, numbers.exact, numbers, name))
        self._plan = plan
        self.columns = columns  # not before they are copied: whatever interrupts this, the steps stay
        self.capacity = len(self._plan[0][0])
        self._stop = self.base + self.capacity

    def spill(self) -> None:
        """Have the timesteps that are in memory written to the slot, so that there is room for others."""
        self.writer.spill(self)
        for column in self.columns.values():
            if isinstance(column, BlobColumn):
                column.clear()
        self.base = self.length

    def _new_column(self, name: str, capacity: int) -> Any:
        """Memory for the rows of a field; that of compressed ones is the same as before, as they are on their way."""
        field = self._schema.fields[name]
        if field.codec is None:
            return np.empty((capacity, *field.cell), field.storage)
        column: Any = self.columns.get(name) or BlobColumn(field, capacity)
        column.capacity = capacity
        return column

    def first_capacity(self) -> int:
        """For how many timesteps there is room in memory at first."""
        # Pages that are not written to yet cost nothing; where they are written out in between, no more is staged.
        fields = self._schema.fields.values()
        step = sum(field.itemsize for field in fields if field.codec is None or not self.staged) or 1
        return max(FIRST_CAPACITY if self.staged else 1, CHUNK_BYTES // step)

    def stand_in(self, columns: dict[str, Array]) -> None:
        """Have its rows, from timestep `base` on, in arrays that it shares with other episodes (`StagedRound`)."""
        self.columns, self._plan, self.capacity, self._stop = columns, [], 0, 0

    def release(self) -> None:
        """Give the memory back, unless the columns are a user's."""
        columns, own = self.columns, self.capacity
        self.columns, self._plan, self.capacity, self._stop = {}, [], 0, 0
        if own:
            self.writer.staging.keep(columns)  # last, so that it is given back once

    def _encode(self, name: str, value: Any, t: int) -> Array:
        try:
            return self._schema.fields[name].encode(value)
        except SchemaError as error:
            raise SchemaError(f"field {name!r}, timestep {t}: {error}", field=name, timestep=t) from None

    def _completed(self, step: Mapping[str, Any], t: int) -> tuple[Any, ...]:
        """The values of a step that is nested, or leaves fields to their defaults, in the order of the schema."""
        fields, defaults = self._schema.fields, self._schema.defaults
        full = {**defaults, **step}
        if full.keys() != fields.keys():
            full = {**defaults, **self._schema.flatten(step)}
            self._schema.require_fields(full, f"timestep {t}", fields)
            for name, field in fields.items():
                if name not in full:
                    require_default(field, name, f"timestep {t}")
        return self._pick(full)


class Appended(NamedTuple):
    """Timesteps of an open episode that are to be shown.

    Attributes: columns: field -> its rows from timestep `base` on. stop: as many timesteps it has then.
    """

    episode: Episode
    columns: Mapping[str, Array]
    base: int
    stop: int


class End(NamedTuple):
    """The end of an episode of several that are appended to together.

    Attributes:
        place: of the episode among these.
        ended: the field that ended it, or "" where it is as long as it may be.
        finals: field -> the final observation, encoded; nothing where it is not known.
    """

    place: int
    ended: str
    finals: Mapping[str, Array]


@lru_cache(maxsize=64)
def _step_type(
    names: tuple[str, ...], ends: tuple[str, ...]
) -> tuple[Any, Callable[[Mapping[str, Any]], tuple[Any, ...]], list[tuple[str, int]]]:
    """Functions that make the named tuple of a step and take its values as the schema orders them; places of ends."""
    pick = itemgetter(*names) if len(names) > 1 else lambda step: (step[names[0]],)
    step = namedtuple("Step", [name.replace(".", "_") for name in names], rename=True)  # type: ignore[misc]
    return partial(tuple.__new__, step), pick, [(name, names.index(name)) for name in ends]


class Staging:
    """Memory that ended episodes had, for those that follow: to write to fresh pages takes several times as long."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, dict[str, Array]]] = []

    def take(self, needed: int) -> dict[str, Array]:
        """Columns of an episode that ended, with room for so many steps; or nothing."""
        try:
            kept = self._kept.pop()  # at once, as another thread may want it, too
        except IndexError:
            return {}
        if len(next(iter(kept[1].values()))) >= needed:  # of all fields there is room for as many
            return kept[1]
        self._kept.append(kept)
        return {}

    def keep(self, columns: dict[str, Array]) -> None:
        """Take columns that nothing refers to any more, unless more than KEPT_BYTES would be kept."""
        size = 0
        for column in columns.values():
            if isinstance(column, BlobColumn):
                column.clear()
            size += column.nbytes
        if size + sum(map(itemgetter(0), self._kept)) <= KEPT_BYTES:
            self._kept.append((size, columns))


class Scalars(NamedTuple):
    """The numbers that fit a field without dimensions: any of the types `exact`, of `kinds` from `low` to `high`."""

    exact: frozenset[type]
    kinds: frozenset[type]
    low: Any
    high: Any

    @staticmethod
    @lru_cache(maxsize=256)
    def of(dtype: str, shape: tuple[int | None, ...]) -> Scalars:
        """The numbers that fit a field of a dtype and a shape."""
        storage, low, high = storage_dtype(dtype), 0, 1
        kinds = _KINDS.get(storage.kind, ()) if shape == () and dtype != "bfloat16" else ()
        if storage.kind == "f":
            low, high = float(np.finfo(storage).min), float(np.finfo(storage).max)  # type: ignore[assignment]
        elif storage.kind in "iu":
            low, high = int(np.iinfo(storage).min), int(np.iinfo(storage).max)
        exact = (kind for kind in kinds if kind is not int and np.can_cast(kind, storage))
        return Scalars(frozenset(exact), frozenset(kinds), low, high)


# A field's staged rows (capacity, *field), and which values can be assigned to one of them as they are: the dtype and
# the shape of arrays; the types of numbers that can, whatever they are; what other numbers can; its name. A plain
# tuple, as Python takes four times as long to unpack a named one.
Column: TypeAlias = tuple[Array, np.dtype[Any], tuple[int, ...], frozenset[type], Scalars, str]


_KINDS: dict[str, tuple[type, ...]] = {
    "f": (float, np.float64, np.float32),
    "i": (int, np.int64, np.int32),
    "u": (int, np.int64, np.int32),
    "b": (bool, np.bool_),
}
