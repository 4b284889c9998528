"""A disk-backed store of episodes for reinforcement and imitation learning, read as PyTorch batches.

The layers; a module imports only from levels above its own line, never sideways:

    level 0   errors
    level 1   values
    level 2   schema, transforms
    level 3   store.files, store.records
    level 4   store.layout
    level 5   store.storage
    level 6   store.lock, store.episode, store.ring
    level 7   store.publication, store.group, store.edits
    level 8   store.redo
    level 9   store.recovery
    level 10  store.writer
    level 11  reading.sources
    level 12  reading.gather
    level 13  reading.views
    level 14  reading.index
    level 15  reading.options, reading.order
    level 16  reading.reader
    level 17  reading.samplers
    level 18  reading.datasets
    level 19  reading.readable
    level 20  buffer
    level 21  concat

torch is imported by reading.datasets alone, which is loaded when a dataset, loader or batch is first asked for.
"""

from memmap_buffer.buffer import ReplayBuffer
from memmap_buffer.concat import ConcatBuffer, ConcatReplayBuffer
from memmap_buffer.errors import (
    BufferFullError,
    BufferLockedError,
    CorruptBufferError,
    EpisodeStateError,
    MemmapBufferError,
    NotABufferError,
    NotEnoughDataError,
    ReadOnlyError,
    SchemaError,
    SchemaMismatchError,
    StaleEpisodeError,
    WriterLostError,
)
from memmap_buffer.reading.views import Crop, NStep, Offsets, Timestep, Trajectory, View, Window
from memmap_buffer.schema import Field, Schema

__version__ = "0.1.0"

__all__ = [
    "BufferFullError",
    "BufferLockedError",
    "ConcatBuffer",
    "ConcatReplayBuffer",
    "CorruptBufferError",
    "Crop",
    "EpisodeStateError",
    "Field",
    "MemmapBufferError",
    "NStep",
    "NotABufferError",
    "NotEnoughDataError",
    "Offsets",
    "ReadOnlyError",
    "ReplayBuffer",
    "Schema",
    "SchemaError",
    "SchemaMismatchError",
    "StaleEpisodeError",
    "Timestep",
    "Trajectory",
    "View",
    "Window",
    "WriterLostError",
]
