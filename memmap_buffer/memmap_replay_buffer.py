"""The names of memmap-replay-buffer, for code that was written for it: one import changes, and it runs.

    from memmap_replay_buffer import …   becomes   from memmap_buffer.memmap_replay_buffer import …

`ReplayBuffer` here is the library's own, with what only that package's users look for. What differs from the package
all the same, and why, stands in docs/migration.md. The dataset classes load torch, so they are found when asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from memmap_buffer.api import buffer as api
from memmap_buffer.api.collector import Collector
from memmap_buffer.api.concat import ConcatBuffer
from memmap_buffer.dtypes import Array, decode, encode, to_numpy
from memmap_buffer.errors import (
    BufferFullError,
    EpisodeIndexError,
    EpisodeStateError,
    NotABufferError,
    ReadOnlyError,
    SchemaError,
)
from memmap_buffer.interop.video import sheet_of, write_video
from memmap_buffer.items.filters import matches
from memmap_buffer.paths import AnyPath
from memmap_buffer.schema import Schema
from memmap_buffer.writing.episode import Episode
from memmap_buffer.writing.episode_group import EpisodeGroup
from memmap_buffer.writing.writer import Writer

if TYPE_CHECKING:
    from memmap_buffer.loading.datasets import EpisodeDataset
    from memmap_buffer.loading.prefetch import Device
    from memmap_buffer.memmap_replay_datasets import ReplayDataset as ReplayDataset
    from memmap_buffer.memmap_replay_datasets import ReplayDatasetNStep as ReplayDatasetNStep
    from memmap_buffer.memmap_replay_datasets import ReplayDatasetTimestep as ReplayDatasetTimestep
    from memmap_buffer.memmap_replay_datasets import ReplayDatasetTimeWindow as ReplayDatasetTimeWindow
    from memmap_buffer.memmap_replay_datasets import ReplayDatasetTrajectory as ReplayDatasetTrajectory

LENS = "episode_lens"
log = logging.getLogger("memmap_buffer")


class FolderMissingError(NotABufferError, AssertionError):
    """There is no buffer to read; memmap-replay-buffer asserts that there is one."""


class ConcatReadOnlyError(ReadOnlyError, NotImplementedError):
    """A `ConcatReplayBuffer` only reads; memmap-replay-buffer has not implemented it."""


def __getattr__(name: str) -> Any:
    if name.startswith("ReplayDataset"):
        from memmap_buffer import memmap_replay_datasets

        return getattr(memmap_replay_datasets, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class EpisodeIndex(int):
    """The position of an open episode, that of the oldest one in a full ring: it knows which of the two is meant.

    Attributes:
        episode: the open episode.
    """

    episode: Episode


class Part(np.ndarray[Any, Any]):
    """Values that were read from a `Column`: an assignment to them, or a computation in place, changes it, too."""

    _assign: Callable[[Any, Any], None] | None = None  # to what was read, where it changed
    _whole: Any = None  # all that was read, of which this is a part

    def __array_finalize__(self, source: Any) -> None:
        self._assign, self._whole = getattr(source, "_assign", None), getattr(source, "_whole", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        with self._written():
            super().__setitem__(key, value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        plain = [value.view(np.ndarray) if isinstance(value, Part) else value for value in inputs]
        with ExitStack() as written:
            if out:
                for part in (array for array in out if isinstance(array, Part)):
                    written.enter_context(part._written())
                options["out"] = tuple(array.view(np.ndarray) if isinstance(array, Part) else array for array in out)
            result = getattr(ufunc, method)(*plain, **options)
        return out[0] if len(out) == 1 else result

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Assign the values that change in the block, and no others: those may have changed on the disk meanwhile."""
        if self._assign is None or not np.may_share_memory(self, self._whole):  # it is a copy of a part
            yield
            return
        before, now = self._whole.copy(), self._whole
        yield
        self._assign(now, ~((before == now) | ((before != before) & (now != now))))


class Column:
    """A field of all episodes, (episodes, max_timesteps, *field), or a meta field, (episodes, *field), on the disk.

    What is assigned by an index is written as by `update`, each episode at once or not at all; and so is what is
    assigned to an array that was read by one. Timesteps behind an episode's end read as the default, else as zeros, and
    are not kept. The first index names episodes: a whole number, a slice or a mask by position, 0 the oldest, and an
    array of numbers by serial, as `_index` of a batch does. The open episode is at `episode_index`.

    Args:
        buffer: the buffer.
        name: of the field or meta field.
    """

    def __init__(self, buffer: ReplayBuffer, name: str) -> None:
        self._buffer, self._name = buffer, name
        self._meta = name in buffer.meta_fieldnames
        self._field = buffer.schema.all[name]
        self._fill = decode(self._field.fill, self._field.dtype)
        self.dtype = self._fill.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(episodes, max_timesteps, *field) or (episodes, *field)."""
        return (len(self), *self._row)

    @property
    def _row(self) -> tuple[int, ...]:
        return self._field.shape if self._meta else (self._buffer.max_timesteps, *self._field.shape)

    @property
    def ndim(self) -> int:
        """How many axes `shape` has."""
        return 1 + len(self._row)

    def __len__(self) -> int:
        return self._buffer.num_episodes

    def __repr__(self) -> str:
        return f"<Column {self._name!r} of {str(self._buffer.folder)!r}: {self.dtype} {self.shape}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)

    def __getitem__(self, key: Any) -> Any:
        episodes, key = self._resolved(key)
        values = self._read(episodes)[0][key]
        if not isinstance(values, np.ndarray):
            return values
        part = values.view(Part)
        part._assign, part._whole = partial(self._assign, episodes, key), values
        return part

    def __setitem__(self, key: Any, value: Any) -> None:
        with self._buffer._turn:
            self._assign(*self._resolved(key), value)

    def _assign(self, episodes: list[Episode | int], key: tuple[Any, ...], value: Any, where: Any = True) -> None:
        array = to_numpy(value)
        values = decode(encode(array, self._field.dtype, (), array.ndim), self._field.dtype)  # refuses what is lossy
        with self._buffer._turn:
            # A part may have been read while its episode was open.
            episodes = [
                episode if isinstance(episode, int) or episode.state == "open" else episode.serial
                for episode in episodes
            ]
            rows, ends = self._read(episodes)
            if not self._meta and len(key) > 1 and isinstance(key[1], int | np.integer):
                self._require_within(int(key[1]), ends)
            if where is not True:
                values = np.where(where, values, rows[key])
            rows[key] = values
            self._write(episodes, rows, ends)

    def _resolved(self, key: Any) -> tuple[list[Episode | int], tuple[Any, ...]]:
        """The open episodes and the serials of the others that a key names, and the key among the rows of these."""
        first, *rest = key if isinstance(key, tuple) else (key,)
        serials = self._buffer.serials
        if isinstance(first, slice) or first is Ellipsis:
            chosen = serials[first] if isinstance(first, slice) else serials
            return chosen.tolist(), (slice(None) if isinstance(first, slice) else first, *rest)
        if isinstance(first, int | np.integer):
            return [self._at(first)], (0, *rest)
        array = to_numpy(first)
        if array.dtype == np.bool_:
            shape = (len(serials), *self._row)
            if not array.ndim or array.shape != shape[: array.ndim]:
                raise SchemaError(f"{self._name!r}: got a mask of shape {array.shape}, the column has {shape}")
            if array.ndim > 1:
                return serials.tolist(), (array, *rest)
            array = serials[array]
        if array.dtype.kind not in "iu":
            raise SchemaError(
                f"{self._name!r}: got {first!r}, expected a position, a slice, a mask, or an array of serials"
            )
        wanted, inverse = np.unique(array, return_inverse=True)
        gone = wanted[~np.isin(wanted, serials)]
        if len(gone):
            raise EpisodeIndexError(
                f"episode {gone[0]}: no visible one has this serial; an array names episodes by serial, as `_index` of "
                "a batch does, and a whole number by position",
                serial=int(gone[0]),
            )
        return wanted.tolist(), (inverse.reshape(array.shape), *rest)

    def _at(self, position: int | np.integer[Any]) -> Episode | int:
        """The open episode or the serial at a position."""
        serials, opened = self._buffer.serials, self._buffer._open_at(position)
        if opened is not None:
            return opened
        if isinstance(position, EpisodeIndex) and position.episode.serial in serials:
            return position.episode.serial
        if not -len(serials) <= position < len(serials):
            raise EpisodeIndexError(f"episode {position}: the buffer has {len(serials)}", position=position)
        return int(serials[position])

    def _read(self, episodes: list[Episode | int]) -> tuple[Array, list[int]]:
        """Rows (E, *row), and up to which timestep each can be assigned to."""
        rows = np.zeros((len(episodes), *self._row), self.dtype)  # pages that are not touched take no memory
        if any(self._fill.tobytes()):
            rows[...] = self._fill
        data = self._buffer._of_serials([episode for episode in episodes if isinstance(episode, int)], self._name)
        stored, ends = zip(data[self._name], data["_lens"].tolist(), strict=True), []
        for k, episode in enumerate(episodes):
            values, end = next(stored) if isinstance(episode, int) else self._staged(episode)
            if self._meta:
                rows[k] = values
            else:
                rows[k, :end] = values[:end]
            ends.append(end)
        return rows, ends

    def _staged(self, episode: Episode) -> tuple[Array, int]:
        """The rows of an open episode, with what was assigned to the next one; or its value of a meta field."""
        if self._meta:
            return decode(episode.meta[self._name], self._field.dtype), 0
        length, following = episode.length, self._buffer._ahead.get(episode, {})
        stored = episode.columns[self._name][:length] if length else np.empty((0, *self._field.shape), self.dtype)
        if length == self._buffer.max_timesteps:
            return decode(stored, self._field.dtype), length
        ahead = following.get(self._name, self._fill)
        return np.concatenate([decode(stored, self._field.dtype), ahead[None]]), length + 1

    def _require_within(self, t: int, ends: list[int]) -> None:
        t %= self._buffer.max_timesteps
        if ends and t >= min(ends):
            raise EpisodeStateError(
                f"field {self._name!r}, timestep {t}: the episode has {min(ends)}; assign to a timestep that is stored"
            )

    def _write(self, episodes: list[Episode | int], rows: Array, ends: list[int]) -> None:
        published = {k: episode for k, episode in enumerate(episodes) if isinstance(episode, int)}
        if published:
            positions = np.searchsorted(self._buffer.serials, list(published.values()))
            longest = max(ends[k] for k in published)
            values = rows[list(published)] if self._meta else rows[list(published), :longest]
            api.ReplayBuffer.update(self._buffer, positions, **{self._name: values})
        for k, episode in enumerate(episodes):
            if isinstance(episode, Episode):
                self._stage(episode, rows[k])

    def _stage(self, episode: Episode, values: Array) -> None:
        if self._meta:
            episode[self._name] = values
            return
        length = episode.length
        if length:
            episode.columns[self._name][:length] = self._field.encode(values[:length], lead=1)
        if length < len(values) and values[length].tobytes() != self._fill.tobytes():
            self._buffer._ahead.setdefault(episode, {})[self._name] = values[length]


class ReplayBuffer(api.ReplayBuffer):
    """A buffer with the habits of memmap-replay-buffer.

    - `store` and `store_batch` open an episode where none is open; `advance_episode` publishes it, and so does `close`.
    - A field that is left out, and has no default, is zeros.
    - No field ends an episode: one goes on behind `terminated`, and n-step items need a successor, as there.
    - `data` and `meta_data` are arrays on the disk. An array names episodes by serial there, and in `update`.

    Args:
        folder: as for `memmap_buffer.ReplayBuffer`.
        max_episodes: likewise.
        max_timesteps: likewise.
        fields: likewise.
        meta_fields: likewise.
        circular: likewise.
        overwrite: likewise: False is the default here.
        read_only: likewise.
        flush_every_store_step: accepted and without effect.
        terminated: likewise, but None is the default.
        truncated: likewise.
        options: any other argument of `memmap_buffer.ReplayBuffer`.
    """

    def __init__(
        self,
        folder: AnyPath,
        max_episodes: int | None = None,
        max_timesteps: int | None = None,
        fields: Mapping[str, Any] | Schema | None = None,
        meta_fields: Mapping[str, Any] | None = None,
        circular: bool | None = None,
        overwrite: bool = False,
        read_only: bool = False,
        flush_every_store_step: int = 1,
        *,
        terminated: str | None = None,
        truncated: str | None = None,
        **options: Any,
    ) -> None:
        sizes = (max_episodes, max_timesteps, fields, meta_fields, circular, overwrite, read_only)
        try:
            super().__init__(folder, *sizes, terminated=terminated, truncated=truncated, **options)
        except NotABufferError as error:
            raise FolderMissingError(str(error), **error.named) from error

    def _record_to(self, writer: Writer) -> None:
        super()._record_to(writer)
        fields = writer.schema.fields
        self._zeros = {
            name: decode(field.fill, field.dtype)
            for name, field in fields.items()
            if field.default is None and "." not in name
        }
        self._own: dict[int, Episode | EpisodeGroup] = {}  # what `store` and `store_batch` opened, by thread
        self._asked: dict[int, int] = {}  # how many episodes a batch was to have, by thread
        self._ahead: WeakKeyDictionary[Episode, dict[str, Array]] = WeakKeyDictionary()  # assigned before it is stored

    # What is open

    @property
    def episode_index(self) -> int:
        """The position of the open episode, or of the next one: `num_episodes` modulo `max_episodes`.

        So `(episode_index - 1) % max_episodes` is the newest episode, in a full ring, too.
        """
        index = EpisodeIndex(self.num_episodes % self.max_episodes)
        opened = self._opened()
        if not opened:
            return int(index)
        index.episode = opened[0]
        return index

    @property
    def timestep_index(self) -> int:
        """How many timesteps the open episode has; 0 where none is open."""
        opened = self._opened()
        return opened[0].length if opened else 0

    @property
    def is_new_episode(self) -> bool:
        """Whether no timestep of an open episode is stored."""
        return self.timestep_index == 0

    def _opened(self) -> list[Episode]:
        """The episode that `store` stores to, or those of `store_batch`."""
        if self.read_only or not self._writer.holds:
            return []
        opened = self._open_ones()
        if len(opened) != 1:
            return []
        return opened[0].episodes if isinstance(opened[0], EpisodeGroup) else opened  # type: ignore[return-value]

    def _open_at(self, position: int | np.integer[Any]) -> Episode | None:
        """The open episode that is meant by what `episode_index` gave, or by a position behind the newest.

        One that is written in place is none: its timesteps are on the disk.
        """
        opened = [] if self._writer.how.in_place else self._opened()
        if isinstance(position, EpisodeIndex):
            return position.episode if position.episode in opened else None
        k = int(position) - self.num_episodes
        return opened[k] if 0 <= k < len(opened) else None

    def _own_batch(self) -> EpisodeGroup | None:
        """The batch that `store_batch` opened, if it is open still and no block is entered."""
        own = self._own.get(get_ident()) if get_ident() not in self._scopes else None
        return own if isinstance(own, EpisodeGroup) and own.state == "open" else None

    def _open_ones(self) -> list[Episode | EpisodeGroup]:
        own = self._own_batch()
        return super()._open_ones() if own is None else [own]

    def _current(self) -> Episode:
        if not self._open_ones():
            self._own[get_ident()] = self.begin_episode()
        return super()._current()

    def _group(self, what: str) -> EpisodeGroup:
        return self._own_batch() or super()._group(what)

    # Writing

    def store(self, **step: Any) -> Any:
        """As of `memmap_buffer.ReplayBuffer`; opens an episode where none is open.

        Args:
            step: field -> (*field); a field that is left out, or None, gets its default, else zeros.
        """
        scope = self._scopes.get(get_ident())
        episode = scope if type(scope) is Episode else self._current()
        ahead = self._ahead.pop(episode, {}) if self._ahead else {}
        values = {name: value for name, value in step.items() if value is not None}
        return episode.store(**{**self._zeros, **ahead, **values})

    def store_batch(self, **batch: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`; opens episodes where no batch is open.

        Where a buffer that is not circular has room for some of them only, the first ones are stored, and the log says
        so.

        Args:
            batch: field -> (B, *field); a field that is left out gets its default, else zeros.
        """
        self._in_batch("store_batch", batch, lambda group, values: group.store(**self._completed(group, values)))

    def store_meta_batch(self, **meta_batch: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`; opens episodes where no batch is open.

        Args:
            meta_batch: meta field -> (B, *field).
        """
        self._in_batch("store_meta_batch", meta_batch, lambda group, values: group.update(values))

    def _in_batch(
        self, what: str, batch: dict[str, Any], store: Callable[[EpisodeGroup, dict[str, Any]], None]
    ) -> None:
        """Give a batch to the open episodes, or to new ones, which go again where they do not take it."""
        if not batch:
            raise SchemaError(f"{what}: no data was given; pass field=values")
        arrays = {name: to_numpy(value) for name, value in batch.items() if value is not None}
        thread, new = get_ident(), not self._open_ones()
        if new:
            self._own[thread] = self._begin_batch(what, arrays)
        group = self._group(what)
        if group is self._own.get(thread) and self._asked[thread] > len(group):
            arrays = {n: a[: len(group)] if len(a) == self._asked[thread] else a for n, a in arrays.items()}
        try:
            store(group, arrays)
        except BaseException:
            if new:
                group.abort()
            raise

    def _begin_batch(self, what: str, arrays: Mapping[str, Array]) -> EpisodeGroup:
        sizes = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        size = next(iter(sizes.values()))
        if not size:
            raise SchemaError(f"{what}: got {sizes} episodes, expected (B, *field), a batch of at least one")
        episodes: list[Episode] = []
        with self._turn:
            for _ in range(size):
                try:
                    episodes.append(self._writer.open({}))
                except BufferFullError:
                    if not episodes:
                        raise
                    log.warning("%s: %s of %s episodes fit; the others are dropped", self.folder, len(episodes), size)
                    break
            self._asked[get_ident()] = size
            return EpisodeGroup(self._writer, episodes)

    def _completed(self, group: EpisodeGroup, values: dict[str, Any]) -> dict[str, Any]:
        """A batch with what was assigned ahead, and zeros."""
        ahead = [self._ahead.pop(episode, {}) for episode in group.episodes] if self._ahead else []
        zeros = {name: np.broadcast_to(zero, (len(group), *zero.shape)) for name, zero in self._zeros.items()}
        for name in {name for row in ahead for name in row}:
            field = self.schema.fields[name]
            zeros[name] = np.stack([row.get(name, decode(field.fill, field.dtype)) for row in ahead])
        return {**zeros, **values}

    def store_episode(self, **arrays: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`.

        Args:
            arrays: as there; a field that is left out gets its default, else zeros.
        """
        values = {name: value for name, value in arrays.items() if value is not None}
        columns = [to_numpy(value) for name, value in values.items() if name in self.schema.fields]
        if columns and columns[0].ndim:
            length = len(columns[0])
            values = {n: np.broadcast_to(zero, (length, *zero.shape)) for n, zero in self._zeros.items()} | values
        super().store_episode(**values)

    def advance_episode(self, batch_size: int = 1) -> None:
        """Publish what `store` or `store_batch` opened; the next one opens another.

        Episodes without a timestep are dropped, where there are several; a single one stays open.

        Args:
            batch_size: how many episodes are open.

        Raises:
            SchemaError: it is another number.
        """
        episodes = self._open_ones()
        if not episodes:
            return
        opened = episodes[0] if isinstance(episodes[0], EpisodeGroup) else self._current()
        size = len(opened) if isinstance(opened, EpisodeGroup) else 1
        if batch_size not in (size, self._asked.get(get_ident(), size)):
            raise SchemaError(f"advance_episode: got batch_size={batch_size}, {size} episodes are open; give {size}")
        if isinstance(opened, EpisodeGroup) or opened.length:
            opened.publish()
            self._own.pop(get_ident(), None)
            self._asked.pop(get_ident(), None)

    def clear(self) -> None:
        """Remove every episode, and drop what `store` and `store_batch` opened."""
        self._end_own(lambda episode: episode.abort())
        super().clear()

    reset_ = clear

    def close(self) -> None:
        """As of `memmap_buffer.ReplayBuffer`; what `store` and `store_batch` opened is published, as cut short."""
        with self._turn:
            try:
                if self._writer.holds:
                    self._end_own(lambda episode: episode.publish(cut=True))
            finally:
                super().close()

    def _end_own(self, end: Callable[[Episode], None]) -> None:
        for opened in self._own.values():
            for episode in opened.episodes if isinstance(opened, EpisodeGroup) else [opened]:
                if episode.state == "open":
                    end(episode)
        self._own.clear()
        self._asked.clear()

    # Changing

    def update(self, indices: Any = None, **data: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`; an array or a list names episodes by serial, as `_index` of a batch does.

        Args:
            indices: a position, a slice of them, serials, or None for all.
            data: as there.
        """
        if indices is None or isinstance(indices, slice | int | np.integer):
            super().update(indices, **data)
            return
        with self._turn:
            wanted, serials = to_numpy(indices), self.serials
            gone = wanted[~np.isin(wanted, serials)]
            if gone.size:
                raise EpisodeIndexError(
                    f"update: no visible episode has serial {gone.flat[0]}", serial=int(gone.flat[0])
                )
            super().update(np.searchsorted(serials, wanted), **data)

    def store_datapoint(self, episode_index: int, timestep_index: int, name: str, datapoint: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`, of the open episode, too.

        Args:
            episode_index: its position.
            timestep_index: the timestep.
            name: the field.
            datapoint: (*field).
        """
        if self._open_at(episode_index) is None:
            super().store_datapoint(episode_index, timestep_index, name, datapoint)
        else:
            self._column(name, self.fieldnames)[episode_index, timestep_index] = datapoint

    def store_meta_datapoint(self, episode_index: int, name: str, datapoint: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`, of the open episode, too.

        Args:
            episode_index: its position.
            name: the meta field.
            datapoint: (*field).
        """
        if self._open_at(episode_index) is None:
            super().store_meta_datapoint(episode_index, name, datapoint)
        else:
            self._column(name, self.meta_fieldnames)[episode_index] = datapoint

    # Arrays

    @property
    def data(self) -> dict[str, Column]:
        """Field -> its `Column`."""
        return {name: Column(self, name) for name in self.fieldnames}

    @property
    def meta_data(self) -> dict[str, Any]:
        """Meta field -> its `Column`; and `episode_lens`, an array."""
        return {**{name: Column(self, name) for name in self.meta_fieldnames}, LENS: self.episode_lens}

    def _column(self, name: str, among: Sequence[str]) -> Column:
        self.schema.require([name], "column", among)
        return Column(self, name)

    def _of_serials(self, serials: Sequence[int], name: str) -> dict[str, Array]:
        """A field or meta field of episodes, as `episodes` gives it."""
        meta = name in self.meta_fieldnames
        fields = () if meta else (name,)
        while True:
            positions = np.searchsorted(self.serials, serials).tolist()
            data = self.episodes(positions, fields=fields, include_metadata=meta, return_indices=True)
            if np.array_equal(data["_index"], serials):
                return data
            gone = set(serials) - set(self.serials.tolist())  # another process writes
            if gone:
                raise EpisodeIndexError(f"episode {min(gone)}: it is gone", serial=min(gone))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Field -> the shape of one timestep."""
        return {name: field.shape for name, field in self.schema.fields.items()}

    @property
    def meta_shapes(self) -> dict[str, tuple[int, ...]]:
        """Meta field -> its shape."""
        return {name: field.shape for name, field in self.schema.meta_fields.items()}

    def dataset(self, **options: Any) -> EpisodeDataset:
        """As of `memmap_buffer.ReplayBuffer`, an object of the dataset class of the options' level.

        Args:
            options: those of `Options`.
        """
        from memmap_buffer.memmap_replay_datasets import kind_of

        return kind_of(options)(self, **options)

    # Films

    def image_fields(self) -> list[str]:
        """The fields of at least two dimensions."""
        return [name for name, shape in self.shapes.items() if len(shape) >= 2]

    def default_image_field(self) -> str:
        """The only one of them. Raises SchemaError where there is none, or several."""
        names = self.image_fields()
        if len(names) != 1:
            some = f"multiple fields look like images, {', '.join(names)}" if names else "no field looks like images"
            raise SchemaError(f"field: {some}; name one by field=…")
        return names[0]

    def episode_frames(self, episode_index: int | Sequence[int] = 0, field: str | None = None) -> Array:
        """The images of one episode, or of several, one after the other.

        Args:
            episode_index: a position, or several.
            field: the field of images; None: the only one.

        Returns:
            (T, *field).

        Raises:
            SchemaError: there is no such field, or no position was given.
            EpisodeIndexError: there is no such episode; an IndexError.
        """
        name = self.default_image_field() if field is None else field
        if name not in self.schema.fields:
            raise SchemaError(f"field: invalid field name {name!r}; declared are {', '.join(self.fieldnames)}")
        positions = to_numpy(episode_index).reshape(-1).tolist()
        if not positions:
            raise SchemaError("episode_index: got none, expected at least one")
        outside = [i for i in positions if not 0 <= i < self.num_episodes]
        if outside:
            raise EpisodeIndexError(f"episode {outside[0]} is out of range: the buffer has {self.num_episodes}")
        data = self.episodes(positions, fields=(name,), include_metadata=False)
        return np.concatenate([rows[:n] for rows, n in zip(data[name], data["_lens"].tolist(), strict=True)])

    def save_video(
        self, path: AnyPath, episode_index: int | Sequence[int] = 0, field: str | None = None, fps: int = 30
    ) -> Path:
        """Write the images of episodes as a film; see `trajectory_to_video`.

        Args:
            path: the file.
            episode_index: as for `episode_frames`.
            field: as for `episode_frames`.
            fps: images a second.
        """
        return trajectory_to_video(self.episode_frames(episode_index, field), path, fps)

    # The collector

    def create_collector(
        self,
        num_groups: int,
        fieldnames: Sequence[str] | None = None,
        meta_fieldnames: Sequence[str] | None = None,
        strict: bool = True,
    ) -> EpisodeCollector:
        """An `EpisodeCollector` of this buffer.

        Args:
            num_groups: how many groups.
            fieldnames: the fields that are collected; default: all.
            meta_fieldnames: the meta fields that are collected; default: all.
            strict: whether an unknown name raises; otherwise it is collected, and not stored.
        """
        return EpisodeCollector(self, num_groups, fieldnames, meta_fieldnames, strict)

    create_rollout_collector = create_collector


class ConcatReplayBuffer(ConcatBuffer):
    """A `ConcatBuffer`; what would write raises NotImplementedError, too."""

    _refusal = ConcatReadOnlyError


class EpisodeCollector(Collector):
    """A `Collector` whose columns are asked for by name.

    Args:
        replay_buffer: the buffer to which the timesteps are stored.
        num_groups: G.
        fieldnames: the fields that are collected; default: all.
        meta_fieldnames: the meta fields that are collected; default: all.
        strict: whether an unknown name raises; otherwise it is collected, and not stored.
    """

    def append(self, **step: Any) -> None:
        """Append one timestep of every group.

        Args:
            step: field -> (G, *field) or (G, 1, *field); meta field -> one value for all groups. A field that no
                timestep has is stored as its default, else as zeros.
        """
        super().append(**{name: self._of_groups(name, value) for name, value in step.items()})

    def extend(self, **steps: Any) -> None:
        """Append T timesteps of every group; or add columns to the T timesteps that were appended.

        Args:
            steps: field -> (T, G, *field).
        """
        if not len(self):
            super().extend(**steps)
            return
        for name, values in steps.items():
            if self._strict:
                self._known.require([name], "extend")
            self[name] = values

    def _extend(self, values: dict[str, Any], *, time: bool) -> None:
        schema = self._known
        if not len(self):
            fields = {name: field for name, field in schema.fields.items() if name in values}
            meta = {name: field for name, field in schema.meta_fields.items() if name in values}
            self._collected = schema.with_fields(fields, meta) if fields else schema
        super()._extend(values, time=time)

    def _of_groups(self, name: str, value: Any) -> Any:
        field, array = self._known.all.get(name), to_numpy(value)
        if field is None:
            return value
        if name in self._known.meta_fields and array.shape == field.shape:
            return np.broadcast_to(array, (self.num_groups, *field.shape))
        return array[:, 0] if array.shape == (self.num_groups, 1, *field.shape) else array

    def groups(self, name: str) -> list[Any]:  # type: ignore[override]
        """A column of each group: (T, *field); of a meta field its last value.

        Args:
            name: of the column.
        """
        return list(self.env_major(name))

    def time_major(self, name: str) -> Any:  # type: ignore[override]
        """A column, (T, G, *field); of a meta field (G, *field).

        Args:
            name: of the column.
        """
        return self._tensors({name: self._column(name)})[name]

    def env_major(self, name: str) -> Any:  # type: ignore[override]
        """A column, (G, T, *field); of a meta field (G, *field).

        Args:
            name: of the column.
        """
        column = self.time_major(name)
        return column if name in self._known.meta_fields else column.swapaxes(0, 1)

    def all_data(self, fields: Sequence[str] | None = None, device: Device = None) -> dict[str, Any]:  # type: ignore[override]
        """Name -> (G, T, *field).

        Args:
            fields: the columns that are wanted; default: those that are no meta fields.
            device: where to put them.
        """
        from memmap_buffer.loading.prefetch import to_device

        names = [name for name in self._columns() if name not in self._known.meta_fields] if fields is None else fields
        data = {name: self.env_major(name) for name in names}
        return data if device is None else to_device(data, device)

    def dataloader(
        self,
        batch_size: int,
        fields: Sequence[str] | None = None,
        filter_fields: Mapping[str, Any] | None = None,
        to_named_tuple: Sequence[str] = (),
        shuffle: bool = False,
        device: Device = None,
        **options: Any,
    ) -> Any:
        """A PyTorch DataLoader of the G · T timesteps, group by group: name -> (B, *field).

        Args:
            batch_size: how many timesteps a batch has.
            fields: the columns that are wanted; default: those that are no meta fields.
            filter_fields: column -> condition; only timesteps for which all hold.
            to_named_tuple: the columns of the named tuple that a batch becomes.
            shuffle: in a random order, another one each epoch.
            device: where to put batches.
            options: any other argument of `torch.utils.data.DataLoader`.

        Raises:
            SchemaError: nothing was collected, or there is no such column.
        """
        from memmap_buffer.loading.datasets import loader_of

        columns = {n: c.swapaxes(0, 1) for n, c in self._columns().items() if n not in self._known.meta_fields}
        flat = {name: column.reshape(-1, *column.shape[2:]) for name, column in columns.items()}
        keep = np.ones(len(self) * self.num_groups, np.bool_)
        for name, condition in (filter_fields or {}).items():
            keep &= matches(self._among(name, flat), condition, name)
        wanted = {name: self._among(name, flat)[keep] for name in (flat if fields is None else fields)}
        return loader_of(wanted, batch_size, tuple(to_named_tuple), device, shuffle=shuffle, **options)

    def _column(self, name: str) -> Array:
        column = self._among(name, self._columns())
        return column[-1] if name in self._known.meta_fields else column

    def _among(self, name: str, columns: Mapping[str, Array]) -> Array:
        if name not in columns:
            raise SchemaError(f"column {name!r}: collected are {', '.join(columns) or 'none'}")
        return columns[name]

    def _stored(self, schema: Schema) -> dict[str, Array]:
        stored = super()._stored(schema)
        lead = (len(self), self.num_groups)
        for name, field in schema.fields.items():
            if name not in stored and field.default is None:
                stored[name] = np.broadcast_to(decode(field.fill, field.dtype), (*lead, *field.shape))
        return stored


def trajectory_to_video(frames: Any, path: AnyPath, fps: int = 30) -> Path:
    """Write images as a film.

    Args:
        frames: (T, H, W), (T, H, W, C) or (T, C, H, W), bytes, or floats from 0 to 1.
        path: a file that ends in .gif, or in .mp4, .mkv or .mov.
        fps: images a second.

    Returns:
        The path.

    Raises:
        SchemaError: these are no images, or the path ends in something else.
        ImportError: the extra `video` is not installed.
    """
    return write_video(path, to_numpy(frames), fps)


def frames_to_sheet(frames: Any, rows: int = 2, columns: int = 5) -> Array:
    """Images spread evenly over a film, in rows from left to right.

    Args:
        frames: as for `trajectory_to_video`.
        rows: how many rows.
        columns: how many images a row has.

    Returns:
        (rows · H, columns · W, 3) uint8.
    """
    return sheet_of(to_numpy(frames), rows, columns)
