"""Functions that take a buffer, by names that users of other systems look for; `ReplayBuffer` has other names for them.

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
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer import ConcatBuffer, ReplayBuffer, Schema, SchemaError
from memmap_buffer.adapters import AnyPath, check_count

REQUIRED = ("observation", "action", "reward", "terminal")
IDS, SCORES = ("int64", (None,)), ("float32", (None,))
NARROWED = {"float64": "float32"}


class StepSpec(NamedTuple):
    """The values that `store` takes for a field.

    Args:
        shape: of one timestep; of a meta field, of its one value an episode.
        dtype: the name of the dtype.
        required: whether each step must give the field.
        final: whether an episode has one more entry of the field than steps.
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
        shape: of the whole array; the first axis is the slots, in a packed folder all steps for a per-timestep field.
        dtype: of the array in the file.
        size: of the file, in bytes.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int


def can_sample(buffer: ReplayBuffer | ConcatBuffer, *, min_steps: int = 1, min_episodes: int = 1) -> bool:
    """Whether at least so many timesteps and episodes are visible, or the buffer is full.

    A buffer for which this is True may have no item for `sample` all the same; the error of `sample` then says why.

    Args:
        buffer: the buffer to sample from.
        min_steps: the fewest timesteps.
        min_episodes: the fewest episodes.

    Raises:
        SchemaError: a count is no whole number from 0.
    """
    check_count("min_steps", min_steps, 0)
    check_count("min_episodes", min_episodes, 0)
    steps, episodes, capacity = buffer.num_steps, buffer.num_episodes, getattr(buffer, "capacity", None)
    full = episodes >= buffer.max_episodes or (capacity is not None and steps >= capacity)
    return full or (steps >= min_steps and episodes >= min_episodes)


class DeclaringBuffer(AbstractContextManager["DeclaringBuffer"]):
    """A `ReplayBuffer` that is made by its first `add`, whose step declares the fields.

    `observation`, `action`, `reward` and `terminal` are required; an episode ends where `terminal` is true. float64
    is stored as float32. Inside a dict, a list is a list of ids (int64) of any length, and a tuple of two lists is a
    list of ids and a list of their scores (float32). Both become fields of lists, which `ragged=True` reads unpadded.

    Args:
        folder: of the buffer, see `ReplayBuffer`.
        options: of `ReplayBuffer`, all but `fields`.

    Attributes:
        buffer: the `ReplayBuffer`; None before the first `add`.
    """

    buffer: ReplayBuffer | None = None

    def __init__(self, folder: AnyPath, **options: Any) -> None:
        self._folder, self._options = folder, {"terminated": "terminal", **options}

    def add(self, **step: Any) -> None:
        """Store a timestep of one environment, see `ReplayBuffer.add`; the first call makes the buffer.

        Args:
            step: name -> value or nested dict.

        Raises:
            SchemaError: the first step lacks a required field, or an option of the buffer is wrong.
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
        """The declarations of a step's fields by dotted name. `group`: the prefix of the names, which ends in a dot."""
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
        """Close the buffer, if there is one, see `ReplayBuffer.close`; closing twice is fine."""
        if self.buffer is not None:
            self.buffer.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def add_count(buffer: ReplayBuffer) -> int:
    """How many timesteps `add` and `extend` of this object stored, including timesteps that are overwritten by now.

    ReAgent also counts blank timesteps between episodes; a buffer here has none.

    Args:
        buffer: the buffer.
    """
    return buffer.num_added


def cursor(buffer: ReplayBuffer) -> int:
    """`add_count` modulo the capacity: the position, from 0, where ReAgent would store the next timestep.

    Args:
        buffer: the buffer.

    Raises:
        SchemaError: the buffer has no `capacity`.
    """
    if buffer.capacity is None:
        raise SchemaError("cursor: the buffer has no capacity, in timesteps; create it with capacity=…")
    return add_count(buffer) % buffer.capacity


def episode_count(buffer: ReplayBuffer | ConcatBuffer) -> int:
    """How many episodes any process ever published, including episodes that are not visible any more.

    Args:
        buffer: the buffer.
    """
    return buffer.num_published


def is_empty(buffer: ReplayBuffer | ConcatBuffer) -> bool:
    """Whether no timestep is visible.

    Args:
        buffer: the buffer.
    """
    return buffer.num_steps == 0


def is_full(buffer: ReplayBuffer) -> bool:
    """Whether the next timestep (with a `capacity`) or the next episode overwrites the oldest one, or does not fit.

    Args:
        buffer: the buffer.
    """
    if buffer.capacity is not None and buffer.num_steps >= buffer.capacity:
        return True
    trimmed = buffer.num_steps > buffer.episode_lens.sum()  # the oldest is trimmed: `episode_lens` lacks it
    return bool(buffer.num_episodes + trimmed >= buffer.max_episodes)


def add_and_sample(buffer: ReplayBuffer, step: Mapping[str, Any], batch_size: int, **options: Any) -> Any:
    """`add` a timestep of each environment, then `sample` a batch of all visible timesteps, the new ones included.

    From the first call on the buffer publishes each timestep, even if it published whole episodes before, see
    `publish_steps`.

    Args:
        buffer: the buffer to add to and to sample from.
        step: as for `add`.
        batch_size: as for `sample`.
        options: as for `sample`; the same seed gives the same batch.

    Returns:
        The batch, as `sample` gives it.

    Raises:
        NotEnoughDataError: there is no item to sample yet; the step is stored all the same.
        MemmapBufferError: as `add`, `publish_steps` and `sample` raise it; the step is stored unless `add` raises.
    """
    buffer.add(**step)
    buffer.publish_steps()
    return buffer.sample(batch_size, **options)


def set_valid(buffer: ReplayBuffer, indices: Any, flag: Any = False) -> int:
    """Exclude timesteps from being drawn, or include them again, see `ReplayBuffer.set_valid`.

    Args:
        buffer: the buffer.
        indices: as for `ReplayBuffer.set_valid`.
        flag: as for `ReplayBuffer.set_valid`.

    Returns:
        How many of them were dropped because their episode was overwritten or cleared meanwhile.

    Raises:
        ReadOnlyError: the buffer only reads, as a `ConcatBuffer` does.
        SchemaError: as `ReplayBuffer.set_valid` raises it.
    """
    return buffer.set_valid(indices, flag)


def step_spec(buffer: ReplayBuffer) -> dict[str, StepSpec]:
    """Dotted name -> the values that `store`, `store_episode` and `add` take for this field.

    Args:
        buffer: the buffer.
    """
    schema = buffer.schema
    return {
        name: StepSpec(field.shape, field.dtype, not meta and field.default is None, field.final, meta)
        for name, field in schema.all.items()
        for meta in (name in schema.meta_fields,)
    }


def storage_spec(buffer: ReplayBuffer) -> dict[str, StorageSpec]:
    """Name, as in `ReplayBuffer.files`, -> the array of a field in the folder.

    Args:
        buffer: the buffer.
    """
    folder = buffer.folder
    return {name: StorageSpec(folder / a.name, a.shape, a.dtype, a.size) for name, a in buffer.files.items()}
