"""The arrays `data` and `meta_data`: read from the disk, and written to it by an assignment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer import EpisodeIndexError, EpisodeStateError, Field, SchemaError
from memmap_buffer.adapters import Array, Episode, decode, to_numpy

if TYPE_CHECKING:
    from memmap_buffer.memmap_replay_buffer.buffer import ReplayBuffer


class EpisodeIndex(int):
    """The position of an open episode. In a full ring the oldest episode has the same number; this means the open one.

    Attributes:
        episode: the open episode.
    """

    episode: Episode


class Part(np.ndarray[Any, Any]):
    """Values that were read from a `Column`. Assigning to them, or computing in place, changes the column, too."""

    _assign: Callable[[Any, Any], None] | None = None  # takes new values of `_whole`, and a mask of those that changed
    _whole: Any = None  # all values that were read; this array is a part of them

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
        """Assign the values that the block changes, and no others: these may have changed on the disk since."""
        if self._assign is None or not np.may_share_memory(self, self._whole):  # a copy does not change the column
            yield
            return
        before, now = self._whole.copy(), self._whole
        yield
        self._assign(now, ~((before == now) | ((before != before) & (now != now))))


class Column:
    """A field of all episodes, (episodes, max_timesteps, *field), or a meta field, (episodes, *field), on the disk.

    An assignment by an index is written as by `update`, each episode at once or not at all; so is an assignment to an
    array that an index gave. Timesteps behind an episode's end read as the default, else as zeros; values assigned to
    them are not kept. The first index names episodes: a whole number, a slice or a mask by position, 0 the oldest, and
    an array of numbers by serial, as `_index` of a batch does. The open episode is at `episode_index`.

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
        with self._buffer.turn:
            self._assign(*self._resolved(key), value)

    def _assign(self, episodes: Episode | list[int], key: tuple[Any, ...], value: Any, where: Any = True) -> None:
        array = to_numpy(value)
        plain = Field(self._field.dtype, ()).encode(array, lead=array.ndim)  # refuses a lossy cast
        values = decode(plain, self._field.dtype)
        with self._buffer.turn:
            # Values may have been read while their episode was open, and be assigned when it is published.
            if isinstance(episodes, Episode) and episodes.state != "open":
                episodes = [episodes.serial]
            rows, ends = self._read(episodes)
            if not self._meta and len(key) > 1 and isinstance(key[1], int | np.integer):
                self._require_within(int(key[1]), ends)
            if where is not True:
                values = np.where(where, values, rows[key])
            rows[key] = values
            if isinstance(episodes, Episode):
                self._stage(episodes, rows[0])
            elif episodes:
                self._buffer.update(episodes, **{self._name: rows if self._meta else rows[:, : max(ends)]})

    def _resolved(self, key: Any) -> tuple[Episode | list[int], tuple[Any, ...]]:
        """(the open episode or the serials of the episodes that a key names; the key for an array of their rows)."""
        first, *rest = key if isinstance(key, tuple) else (key,)
        serials = self._buffer.serials
        if first is Ellipsis:
            return serials.tolist(), (first, *rest)
        if isinstance(first, slice):
            return serials[first].tolist(), (slice(None), *rest)
        if isinstance(first, int | np.integer):
            return self._at(first), (0, *rest)
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
        self._buffer._require_shown(wanted)
        return wanted.tolist(), (inverse.reshape(array.shape), *rest)

    def _at(self, position: int | np.integer[Any]) -> Episode | list[int]:
        """The open episode, or the serial, at a position."""
        serials, opened = self._buffer.serials, self._buffer._open_at(position)
        if opened is not None:
            return opened
        if isinstance(position, EpisodeIndex) and position.episode.serial in serials:
            return [position.episode.serial]
        if not -len(serials) <= position < len(serials):
            raise EpisodeIndexError(f"episode {position}: the buffer has {len(serials)}", position=position)
        return [int(serials[position])]

    def _read(self, episodes: Episode | list[int]) -> tuple[Array, list[int]]:
        """(rows (E, *row) of the episodes; for each the number of timesteps that can be assigned to)."""
        if isinstance(episodes, Episode):
            values, end = self._staged(episodes)
            stored, ends = values[None], [end]
        else:
            data = self._buffer._of_serials(episodes, self._name)
            stored, ends = data[self._name], data["_lens"].tolist()
        if self._meta:
            return stored, ends
        rows = np.zeros((len(ends), *self._row), self.dtype)  # pages that are not touched take no memory
        if any(self._fill.tobytes()):
            rows[...] = self._fill
        for row, values, end in zip(rows, stored, ends, strict=True):
            row[:end] = values[:end]
        return rows, ends

    def _staged(self, episode: Episode) -> tuple[Array, int]:
        """(rows of an open episode and of its next timestep, their number); of a meta field (its value, 0)."""
        if self._meta:
            return decode(episode.meta[self._name], self._field.dtype).copy(), 0
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

    def _stage(self, episode: Episode, values: Array) -> None:
        if self._meta:
            episode[self._name] = values
            return
        length = episode.length
        if length:
            episode.columns[self._name][:length] = self._field.encode(values[:length], lead=1)
        if length < len(values):
            self._buffer._ahead.setdefault(episode, {})[self._name] = values[length].copy()
