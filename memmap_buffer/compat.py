"""What users of other systems look for and `ReplayBuffer` says in other words: functions that take a buffer.

    memorax               `can_sample`
    functional JAX        `add_and_sample`
    ReAgent               `DeclaringBuffer`, `add_count`, `cursor`, `episode_count`, `is_empty`, `is_full`, `set_valid`
                          (its `set_index_valid_status`), `step_spec` (its `get_add_args_signature`), `storage_spec`
                          (its `get_storage_signature`)

The names of memmap-replay-buffer are in `memmap_buffer.memmap_replay_buffer`; docs/five-systems.md has every name of
five systems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from memmap_buffer import ConcatBuffer, ReadOnlyError, ReplayBuffer, Schema, SchemaError
from memmap_buffer.adapters import AnyPath, check_count

if TYPE_CHECKING:
    from typing_extensions import Self

REQUIRED = ("observation", "action", "reward", "terminal")
IDS, SCORES = ("int64", (None,)), ("float32", (None,))
NARROWED = {"float64": "float32"}


class StepSpec(NamedTuple):
    """The form in which `store` takes a field.

    Args:
        shape: of one timestep.
        dtype: its name.
        required: whether it must be given.
        final: whether an episode has one entry more of it.
        meta: whether it is a meta field, one value an episode.
    """

    shape: tuple[int, ...]
    dtype: str
    required: bool
    final: bool
    meta: bool


class StorageSpec(NamedTuple):
    """An array of the folder.

    Args:
        path: its file, which `numpy.load` opens.
        shape: of the whole array; the first axis is the slots.
        dtype: as it is stored.
        size: of the file, in bytes.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int


def can_sample(buffer: ReplayBuffer | ConcatBuffer, *, min_steps: int = 1, min_episodes: int = 1) -> bool:
    """Whether so many timesteps and episodes are visible, or as many as fit; `sample` itself says why it has nothing.

    Args:
        buffer: what would be sampled from.
        min_steps: at least so many timesteps.
        min_episodes: at least so many episodes.
    """
    check_count("min_steps", min_steps, 0)
    check_count("min_episodes", min_episodes, 0)
    steps, episodes, capacity = buffer.num_steps, buffer.num_episodes, getattr(buffer, "capacity", None)
    full = episodes >= buffer.max_episodes or (capacity is not None and steps >= capacity)
    return full or (steps >= min_steps and episodes >= min_episodes)


class DeclaringBuffer:
    """A `ReplayBuffer` that is made by its first `add`, whose step declares the fields.

    `observation`, `action`, `reward` and `terminal` are required, and where `terminal` is true an episode ends. float64
    is stored as float32. In a dict a list is one of ids, as many as there are at that step, and a pair of lists are ids
    and their scores: fields of lists, which `ragged=True` reads as they are.

    Args:
        folder: as for `ReplayBuffer`.
        options: likewise, all but the fields.

    Attributes: buffer: None before the first `add`.
    """

    buffer: ReplayBuffer | None = None

    def __init__(self, folder: AnyPath, **options: Any) -> None:
        self._folder, self._options = folder, {"terminated": "terminal", **options}

    def add(self, **step: Any) -> None:
        """`ReplayBuffer.add` of one environment.

        Raises:
            SchemaError: the first step lacks a field that is required, or options of the buffer are wrong.
            SchemaMismatchError: the folder has a buffer of other fields.
            MemmapBufferError: as `ReplayBuffer.add` raises it.
        """
        if self.buffer is None:
            missing = [name for name in REQUIRED if name not in step]
            if missing:
                raise SchemaError(f"add: the first step lacks {', '.join(missing)}; give {', '.join(REQUIRED)}, too")
            self.buffer = ReplayBuffer(self._folder, fields=self._fields_of(step), **self._options)
        self.buffer.add(**step)

    @classmethod
    def _fields_of(cls, step: Mapping[str, Any], group: str = "") -> dict[str, Any]:
        """The declaration of the fields of a step, by dotted names; `group` and a dot stand before those in a dict."""
        fields: dict[str, Any] = {}
        for key, value in step.items():
            name = f"{group}{key}"
            if isinstance(value, Mapping):
                fields |= cls._fields_of(value, f"{name}.")
            elif group and isinstance(value, list):
                fields[name] = IDS
            elif group and isinstance(value, tuple) and [type(part) for part in value] == [list, list]:
                fields |= {f"{name}.item0": IDS, f"{name}.item1": SCORES}
            else:
                dense = Schema.from_example({name: value}).fields
                fields |= {
                    each: replace(field, dtype=NARROWED.get(field.dtype, field.dtype)) for each, field in dense.items()
                }
        return fields

    def close(self) -> None:
        """As `ReplayBuffer.close`; twice is fine, and without a buffer."""
        if self.buffer is not None:
            self.buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def add_count(buffer: ReplayBuffer) -> int:
    """How many timesteps `add` and `extend` stored by this object, those that are gone included.

    ReAgent counts blanks between episodes, too, which are none here.
    """
    return buffer.num_added


def cursor(buffer: ReplayBuffer) -> int:
    """`add_count` modulo the capacity, from 0 on: where ReAgent would store the next step.

    Raises: SchemaError: the buffer has no `capacity`.
    """
    if buffer.capacity is None:
        raise SchemaError("cursor: the buffer has no capacity, in timesteps; create it with capacity=…")
    return add_count(buffer) % buffer.capacity


def episode_count(buffer: ReplayBuffer | ConcatBuffer) -> int:
    """How many episodes were ever published, those that are gone included, by any process."""
    return buffer.num_published


def is_empty(buffer: ReplayBuffer | ConcatBuffer) -> bool:
    """Whether no timestep is visible."""
    return buffer.num_steps == 0


def is_full(buffer: ReplayBuffer) -> bool:
    """Whether the next timestep, or without a `capacity` the next episode, overwrites the oldest or does not fit."""
    if buffer.capacity is not None and buffer.num_steps >= buffer.capacity:
        return True
    trimmed = buffer.num_steps > buffer.episode_lens.sum()  # a `capacity` has forgotten first steps of the oldest one
    return bool(buffer.num_episodes + trimmed >= buffer.max_episodes)


def add_and_sample(buffer: ReplayBuffer, step: Mapping[str, Any], batch_size: int, **options: Any) -> Any:
    """`add` a timestep of each environment, then `sample` a batch of all that was added, this one included.

    A buffer that publishes whole episodes publishes each timestep from the first call on, see `publish_steps`.

    Args:
        buffer: what is added to and sampled from.
        step: as for `add`.
        batch_size: as for `sample`.
        options: as for `sample`; the same seed gives the same batch.

    Raises:
        NotEnoughDataError: there is no such item yet; the step is kept all the same.
        MemmapBufferError: as `add`, `publish_steps` and `sample` raise it; the latter two keep the step.
    """
    buffer.add(**step)
    buffer.publish_steps()
    return buffer.sample(batch_size, **options)


def set_valid(buffer: ReplayBuffer, indices: Any, flag: Any = False) -> int:
    """`ReplayBuffer.set_valid`: exclude timesteps from being drawn, or include them again.

    Raises:
        ReadOnlyError: the buffer only reads.
        SchemaError: as that raises it.
    """
    if not isinstance(buffer, ReplayBuffer):
        raise ReadOnlyError("set_valid: a ConcatBuffer only reads; write to one of its sources")
    return buffer.set_valid(indices, flag)


def step_spec(buffer: ReplayBuffer) -> dict[str, StepSpec]:
    """The fields to pass to `store`, `store_episode` and `add`, by dotted name."""
    schema = buffer.schema
    return {
        name: StepSpec(field.shape, field.dtype, not meta and field.default is None, field.final, meta)
        for name, field in schema.all.items()
        for meta in (name in schema.meta_fields,)
    }


def storage_spec(buffer: ReplayBuffer) -> dict[str, StorageSpec]:
    """Where each field is stored, as `ReplayBuffer.files` says it."""
    folder = buffer.folder
    return {name: StorageSpec(folder / a.name, a.shape, a.dtype, a.size) for name, a in buffer.files.items()}
