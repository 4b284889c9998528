"""`ReplayBuffer` with the habits of memmap-replay-buffer: `store` opens episodes, and `data` has arrays on the disk."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

import memmap_buffer
from memmap_buffer import (
    BufferFullError,
    ConcatBuffer,
    EpisodeIndexError,
    EpisodeStateError,
    NotABufferError,
    ReadOnlyError,
    Schema,
    SchemaError,
)
from memmap_buffer.adapters import AnyPath, Array, Episode, EpisodeGroup, decode, to_numpy
from memmap_buffer.memmap_replay_buffer.collector import EpisodeCollector
from memmap_buffer.memmap_replay_buffer.columns import Column, EpisodeIndex
from memmap_buffer.memmap_replay_buffer.films import trajectory_to_video

if TYPE_CHECKING:
    from typing_extensions import Self

    from memmap_buffer.adapters import EpisodeDataset

LENS = "episode_lens"
log = logging.getLogger("memmap_buffer")


class FolderMissingError(NotABufferError, AssertionError):
    """There is no buffer to read; also an AssertionError, which memmap-replay-buffer raises."""


class ConcatReadOnlyError(ReadOnlyError, NotImplementedError):
    """A `ConcatReplayBuffer` only reads; also a NotImplementedError, which memmap-replay-buffer raises."""


class ReplayBuffer(memmap_buffer.ReplayBuffer):
    """A buffer with the habits of memmap-replay-buffer.

    - `store` and `store_batch` open an episode if none is open; `advance_episode` publishes it, and so does `close`.
    - A field without a default is stored as zeros where a step leaves it out.
    - By default no field ends an episode: an episode goes on after `terminated`, and n-step items need a successor, as
      in that package.
    - `data` and `meta_data` are arrays on the disk. In their indices, and in `update`, an array names episodes by
      serial.

    Args:
        folder: as for `memmap_buffer.ReplayBuffer`.
        max_episodes: as for `memmap_buffer.ReplayBuffer`.
        max_timesteps: as for `memmap_buffer.ReplayBuffer`.
        fields: as for `memmap_buffer.ReplayBuffer`.
        meta_fields: as for `memmap_buffer.ReplayBuffer`.
        circular: as for `memmap_buffer.ReplayBuffer`.
        overwrite: as for `memmap_buffer.ReplayBuffer`: False by default, unlike in memmap-replay-buffer.
        read_only: as for `memmap_buffer.ReplayBuffer`.
        flush_every_store_step: accepted, without effect.
        terminated: as for `memmap_buffer.ReplayBuffer`, but None by default.
        truncated: as for `memmap_buffer.ReplayBuffer`, but None by default.
        options: any other argument of `memmap_buffer.ReplayBuffer`.
    """

    _own: dict[int, Episode | EpisodeGroup]  # thread -> the episode or the batch that `store` or `store_batch` opened
    _asked: WeakKeyDictionary[Episode | EpisodeGroup, int]  # how many episodes a batch was to have; fewer may fit
    _ahead: WeakKeyDictionary[Episode, dict[str, Array]]  # values assigned to its next timestep before that is stored

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

    def __new__(cls, *args: Any, **options: Any) -> Self:  # runs for every way to open a buffer
        self = super().__new__(cls)
        self._own, self._asked, self._ahead = {}, WeakKeyDictionary(), WeakKeyDictionary()
        return self

    # What is open

    @property
    def episode_index(self) -> int:
        """The position of the open episode, or of the next one: `num_episodes` modulo `max_episodes`.

        So `(episode_index - 1) % max_episodes` is the newest episode, also in a full ring.
        """
        index = EpisodeIndex(self.num_episodes % self.max_episodes)
        opened = self._opened()
        if not opened:
            return int(index)
        index.episode = opened[0]
        return index

    @property
    def timestep_index(self) -> int:
        """How many timesteps the open episode has; 0 if none is open."""
        opened = self._opened()
        return opened[0].length if opened else 0

    @property
    def is_new_episode(self) -> bool:
        """Whether the next timestep is the first of its episode: the open one is empty, or none is open."""
        return self.timestep_index == 0

    @property
    def open_episodes(self) -> list[Episode | EpisodeGroup]:
        """As of `memmap_buffer.ReplayBuffer`; an open batch of `store_batch` stands alone unless a block is open."""
        opened, own = super().open_episodes, self._own.get(get_ident())
        if not isinstance(own, EpisodeGroup) or own.state != "open" or not own.episodes[0].writer.holds:
            return opened
        entered = any(block.in_block and block.thread == get_ident() for block in opened)
        return opened if entered else [own]

    def _opened(self) -> list[Episode]:
        """The open episode as a list, or the episodes of the open batch; [] if none is open, or several are."""
        opened = self.open_episodes
        return _members(opened[0]) if len(opened) == 1 else []

    def _open_at(self, position: int | np.integer[Any]) -> Episode | None:
        """The open episode at a position that `episode_index` gave, or that lies behind the newest episode; else None.

        None, too, for an episode that is written in place: its timesteps are on the disk already.
        """
        opened = [episode for episode in self._opened() if episode.staged]
        if isinstance(position, EpisodeIndex):
            return position.episode if position.episode in opened else None
        k = int(position) - self.num_episodes
        return opened[k] if 0 <= k < len(opened) else None

    # Writing

    def store(self, **step: Any) -> Any:
        """As of `memmap_buffer.ReplayBuffer`; opens an episode if none is open.

        Args:
            step: field -> (*field); a field that is left out, or None, gets its default, else zeros.
        """
        opened = self.open_episodes
        if not opened:
            self._own[get_ident()] = self.begin_episode()
            opened = [self._own[get_ident()]]
        episode = opened[0]
        if len(opened) > 1 or isinstance(episode, EpisodeGroup):
            batch = "a batch of episodes is open; use store_batch"
            raise EpisodeStateError(f"store: {batch if len(opened) == 1 else _several(opened)}")
        ahead = self._ahead.pop(episode, {}) if self._ahead else {}
        schema = self.schema
        return episode.store(**{**schema.zeros, **ahead, **_by_name(schema, step)})

    def store_batch(self, **batch: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`; opens episodes if no batch is open.

        If a buffer that is not circular has room for only some of the B episodes, the first of them are stored, and the
        log says so.

        Args:
            batch: field -> (B, *field); a field that is left out gets its default, else zeros.
        """
        self._in_batch("store_batch", batch, lambda group, values: group.store(**self._completed(group, values)))

    def store_meta_batch(self, **meta_batch: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`; opens episodes if no batch is open.

        Args:
            meta_batch: meta field -> (B, *field).
        """
        self._in_batch("store_meta_batch", meta_batch, EpisodeGroup.update)

    def _in_batch(
        self, what: str, batch: dict[str, Any], store: Callable[[EpisodeGroup, dict[str, Any]], None]
    ) -> None:
        """Pass a batch to the open episodes. Opens new ones if none are open, and drops these if `store` raises."""
        arrays = {name: to_numpy(value) for name, value in _by_name(self.schema, batch).items()}
        if not arrays:
            raise SchemaError(f"{what}: no data was given; pass field=values")
        opened = self.open_episodes
        groups = [group for group in opened or [self._begin_batch(what, arrays)] if isinstance(group, EpisodeGroup)]
        if len(groups) != 1:
            raise EpisodeStateError(f"{what}: no batch is open; use it within `with buffer.batched_episode(n):`")
        group = groups[0]
        size = len(group)
        asked = self._asked.get(group, size)
        try:
            store(group, {n: array[:size] if array.shape[:1] == (asked,) else array for n, array in arrays.items()})
        except BaseException:
            if not opened:
                group.abort()
            raise

    def _begin_batch(self, what: str, arrays: Mapping[str, Array]) -> EpisodeGroup:
        sizes = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        size = next(iter(sizes.values()))
        if not size:
            raise SchemaError(f"{what}: got {sizes} episodes, expected (B, *field), a batch of at least one")
        group = self._batch_of_at_most(size)
        if len(group) < size:
            log.warning("%s: %s of %s episodes fit; the others are dropped", self.folder, len(group), size)
        self._own[get_ident()], self._asked[group] = group, size
        return group

    def _batch_of_at_most(self, size: int) -> EpisodeGroup:
        """A batch of `size` episodes, else of as many as there is room for. Raises BufferFullError if there is none."""

        def is_too_large(count: int) -> bool:
            try:
                self.begin_batch(count).abort()
            except BufferFullError:
                return True
            return False

        with self.turn:
            with suppress(BufferFullError):
                return self.begin_batch(size)
            return self.begin_batch(max(1, bisect_left(range(1, size), True, key=is_too_large)))

    def _completed(self, group: EpisodeGroup, values: Mapping[str, Array]) -> dict[str, Array]:
        """The values of a batch; for fields without one the values that were assigned ahead, else zeros."""
        ahead = [self._ahead.pop(episode, {}) for episode in group.episodes] if self._ahead else []
        fields = {name: self.schema.fields[name] for row in ahead for name in row}
        assigned = {n: np.stack([row.get(n, decode(f.fill, f.dtype)) for row in ahead]) for n, f in fields.items()}
        return {**self._zeros(len(group)), **assigned, **values}

    def _zeros(self, count: int) -> dict[str, Array]:
        """Name -> (count, *field) zeros, for the fields without a default, which a step may leave out."""
        return {name: np.broadcast_to(zero, (count, *zero.shape)) for name, zero in self.schema.zeros.items()}

    def store_episode(self, **arrays: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`.

        Args:
            arrays: as for `memmap_buffer.ReplayBuffer`; a field that is left out gets its default, else zeros.
        """
        values = _by_name(self.schema, arrays)
        lengths = [len(array) for n in values if n in self.schema.fields and (array := to_numpy(values[n])).ndim]
        super().store_episode(**{**(self._zeros(lengths[0]) if lengths else {}), **values})

    def advance_episode(self, batch_size: int = 1) -> None:
        """Publish the open episode or batch of episodes; the next `store` or `store_batch` opens another.

        A single episode without a timestep stays open; the episodes of a batch without one are dropped.

        Args:
            batch_size: how many episodes are open.

        Raises:
            SchemaError: another number of episodes is open.
            EpisodeStateError: several episodes are open, and they are no batch.
        """
        opened = self.open_episodes
        if len(opened) > 1:
            raise EpisodeStateError(f"advance_episode: {_several(opened)}")
        for each in opened:
            size = len(_members(each))
            if batch_size not in (size, self._asked.get(each, size)):
                raise SchemaError(
                    f"advance_episode: got batch_size={batch_size}, {size} episodes are open; give {size}"
                )
            if isinstance(each, EpisodeGroup) or each.length:
                each.publish()
                self._own.pop(get_ident(), None)

    def clear(self) -> None:
        """Remove every episode, and drop the open ones that `store` and `store_batch` opened."""
        self._end_own(Episode.abort)
        super().clear()

    reset_ = clear

    def close(self) -> None:
        """As of `memmap_buffer.ReplayBuffer`; first publishes episodes of `store` and `store_batch`, as cut short."""
        with self.turn:
            try:
                self._end_own(lambda episode: episode.publish(cut=True))
            finally:
                super().close()

    def _end_own(self, end: Callable[[Episode], None]) -> None:
        for episode in [episode for opened in self._own.values() for episode in _members(opened)]:
            if episode.state == "open" and episode.writer.holds:
                end(episode)
        self._own.clear()

    # Changing

    def update(self, indices: Any = None, **data: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`; an array or a list names episodes by serial, as `_index` of a batch does.

        Args:
            indices: a position, a slice of positions, an array or a list of serials, or None for all episodes.
            data: as for `memmap_buffer.ReplayBuffer`.

        Raises:
            EpisodeIndexError: no visible episode has one of the serials.
        """
        with self.turn:
            if not (indices is None or isinstance(indices, slice | int | np.integer)):
                serials = to_numpy(indices)
                self._require_shown(serials)
                indices = np.searchsorted(self.serials, serials)
            super().update(indices, **data)

    def _require_shown(self, serials: Array) -> None:
        """Raise EpisodeIndexError for the first of some serials that no visible episode has."""
        gone = serials[~np.isin(serials, self.serials)]
        if gone.size:
            raise EpisodeIndexError(
                f"episode {gone.flat[0]}: no visible one has this serial; an array names episodes by serial, as "
                "`_index` of a batch does, and a whole number by position",
                serial=int(gone.flat[0]),
            )

    def store_datapoint(self, episode_index: int, timestep_index: int, name: str, datapoint: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`; also for the open episode.

        Args:
            episode_index: the position of the episode.
            timestep_index: the timestep.
            name: the field.
            datapoint: (*field).
        """
        if self._open_at(episode_index) is None:
            super().store_datapoint(episode_index, timestep_index, name, datapoint)
        else:
            self._column(name, self.fieldnames)[episode_index, timestep_index] = datapoint

    def store_meta_datapoint(self, episode_index: int, name: str, datapoint: Any) -> None:
        """As of `memmap_buffer.ReplayBuffer`; also for the open episode.

        Args:
            episode_index: the position of the episode.
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
        """A field or meta field of the episodes of these serials, as `episodes` gives it. Raises EpisodeIndexError."""
        meta = name in self.meta_fieldnames
        fields = () if meta else (name,)
        while True:
            positions = np.searchsorted(self.serials, serials).tolist()
            data = self.episodes(positions, fields=fields, include_metadata=meta, return_indices=True)
            if np.array_equal(data["_index"], serials):
                return data
            self._require_shown(np.array(serials, np.int64))  # else positions moved between the two calls: once more

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Field -> the shape of one timestep."""
        return {name: field.shape for name, field in self.schema.fields.items()}

    @property
    def meta_shapes(self) -> dict[str, tuple[int, ...]]:
        """Meta field -> its shape."""
        return {name: field.shape for name, field in self.schema.meta_fields.items()}

    def dataset(self, **options: Any) -> EpisodeDataset:
        """As of `memmap_buffer.ReplayBuffer`; of the dataset class for the options, such as `ReplayDatasetNStep`.

        Args:
            options: those of `Options`.
        """
        from memmap_buffer.memmap_replay_buffer.datasets import kind_of

        return kind_of(options)(self, **options)

    # Films

    def image_fields(self) -> list[str]:
        """The names of the fields of at least two dimensions."""
        return [name for name, shape in self.shapes.items() if len(shape) >= 2]

    def default_image_field(self) -> str:
        """The only name in `image_fields`. Raises SchemaError if there is none, or several."""
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
            num_groups: how many groups step together, such as environments.
            fieldnames: the fields that are collected; default: all.
            meta_fieldnames: the meta fields that are collected; default: all.
            strict: whether an unknown name raises; otherwise it is collected, and not stored.
        """
        return EpisodeCollector(self, num_groups, fieldnames, meta_fieldnames, strict)

    create_rollout_collector = create_collector


class ConcatReplayBuffer(ConcatBuffer):
    """A `ConcatBuffer` whose methods that would write raise `ConcatReadOnlyError`, which is a NotImplementedError."""

    _refusal = ConcatReadOnlyError


def _by_name(schema: Schema, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name, without those that are None."""
    return schema.flatten({name: value for name, value in values.items() if value is not None})


def _members(opened: Episode | EpisodeGroup) -> list[Episode]:
    return opened.episodes if isinstance(opened, EpisodeGroup) else [opened]


def _several(opened: Sequence[object]) -> str:
    return f"{len(opened)} episodes are open; use episode.store()"
