"""What users of other systems look for and `ReplayBuffer` says in other words: functions that take a buffer.

    memorax               `can_sample`
    functional JAX        `add_and_sample`
    ReAgent               `add_count`, `is_empty`, `is_full`, `set_valid` (its `set_index_valid_status`), `step_spec`
                          (its `get_add_args_signature`),
                          `storage_spec` (its `get_storage_signature`)

The names of memmap-replay-buffer are in `memmap_buffer.memmap_replay_buffer`; docs/five-systems.md has every name of
five systems.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.api.concat import ConcatBuffer
from memmap_buffer.api.editing import with_flags
from memmap_buffer.dtypes import check_count
from memmap_buffer.errors import ReadOnlyError, SchemaError
from memmap_buffer.items.filters import VALID


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


def add_count(buffer: ReplayBuffer | ConcatBuffer) -> int:
    """How many episodes were ever published, those that are gone included.

    ReAgent counts timesteps, and blanks between episodes; timesteps that were overwritten are counted nowhere here.
    """
    return sum(storage.state("next") for storage in buffer._folders.storages if not storage.withdrawn)


def is_empty(buffer: ReplayBuffer | ConcatBuffer) -> bool:
    """Whether no timestep is visible."""
    return buffer.num_steps == 0


def is_full(buffer: ReplayBuffer) -> bool:
    """Whether the next timestep, or without a `capacity` the next episode, overwrites the oldest or does not fit."""
    if buffer.capacity is not None and buffer.num_steps >= buffer.capacity:
        return True
    return len(buffer._storage.refresh()) >= buffer.max_episodes


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
    """Exclude timesteps from being drawn, or include them again: written to the field `valid`.

    Where there is no such field it is added, a bool that is True for every timestep. Each episode changes at once.

    Args:
        buffer: what is changed.
        indices: (n, 2) of (serial, timestep), as `_indices` of a batch, or (n,) serials, as `_index`.
        flag: a bool, or (n,) of them; the last one given for a timestep counts.

    Returns:
        How many of them were dropped because their episode was overwritten or cleared meanwhile.

    Raises:
        SchemaError: there is no such timestep, or `valid` is a field of another kind.
        ReadOnlyError: the buffer only reads.
    """
    if not isinstance(buffer, ReplayBuffer):
        raise ReadOnlyError("set_valid: a ConcatBuffer only reads; write to one of its sources")
    schema = buffer.schema
    if VALID not in schema.all:
        buffer.add_field(VALID, ("bool", (), True))
    elif schema.fields.get(VALID) is None or schema.fields[VALID].dtype != "bool" or schema.fields[VALID].shape:
        raise SchemaError("set_valid: `valid` is no bool field of one value a timestep here; rename it", field=VALID)
    with buffer._turn:
        buffer._writer.begin()
        slots, rows, num_gone = with_flags(buffer._storage, VALID, indices, flag)
        buffer._replace(slots, {VALID: rows})
        return num_gone


def step_spec(buffer: ReplayBuffer) -> dict[str, StepSpec]:
    """The fields to pass to `store`, `store_episode` and `add`, by dotted name."""
    schema = buffer.schema
    return {
        name: StepSpec(field.shape, field.dtype, not meta and field.default is None, field.final, meta)
        for name, field in schema.all.items()
        for meta in (name in schema.meta_fields,)
    }


def storage_spec(buffer: ReplayBuffer) -> dict[str, StorageSpec]:
    """Where each field is stored, by dotted name; of a compressed one the index, and `<name>/blobs` besides."""
    arrays = {key: array for key, array in buffer._storage.layout.arrays.items() if not key.startswith("/")}
    return {name: StorageSpec(buffer.folder / a.name, a.shape, a.dtype, a.size) for name, a in arrays.items()}
