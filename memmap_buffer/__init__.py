"""A disk-backed store of episodes for reinforcement and imitation learning, read as PyTorch batches.

The layers; a module imports only from levels above its own line, never sideways:

    level 0   errors, interop.extras, progress
    level 1   values, interop.plain
    level 2   schema, transforms, reading.memory
    level 3   store.files, store.records, store.tree, interop.gymnasium
    level 4   store.layout, store.host, store.folder
    level 5   store.storage, store.creation
    level 6   store.lock, store.episode, store.ring, store.nodes
    level 7   store.publication, store.group, store.edits, store.snapshot, store.treefile
    level 8   store.stream, store.columns, store.redo, store.pack, store.priority
    level 9   store.recovery, store.checkup
    level 10  store.writer
    level 11  store.repair, store.recording, store.editing
    level 12  reading.slices, reading.conditions, reading.split, reading.weighting
    level 13  reading.sources, reading.runs
    level 14  reading.gather
    level 15  reading.views
    level 16  reading.index
    level 17  reading.options, reading.order, reading.extent, reading.transport, reading.masses
    level 18  reading.reader, reading.readahead
    level 19  reading.samplers, reading.distributed, reading.prefetch, reading.prioritized
    level 20  reading.datasets
    level 21  reading.readable, collector, statistics
    level 22  buffer
    level 23  concat, cli.plain, interop.lanes, interop.beside, interop.survey
    level 24  interop.record, interop.minari, interop.d4rl, interop.ogbench, interop.robomimic
    level 25  cli.terminal, interop.upstream, interop.torchrl, interop.trainers
    level 26  cli.episodes
    level 27  cli.look, cli.mend, cli.measure
    level 28  cli.change, cli.draw
    level 29  cli.view, cli.exchange
    level 30  cli.app
    level 31  cli.command

torch is imported by reading.datasets, .transport, .prefetch and .distributed alone, which are loaded when a dataset,
loader or batch is first asked for.
"""

from memmap_buffer.buffer import ReplayBuffer
from memmap_buffer.collector import Collector
from memmap_buffer.concat import ConcatBuffer, ConcatReplayBuffer
from memmap_buffer.errors import (
    BufferFullError,
    BufferLockedError,
    CorruptBufferError,
    EpisodeIndexError,
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
from memmap_buffer.reading.options import Options
from memmap_buffer.reading.views import Crop, NStep, Offsets, Timestep, Trajectory, View, Window
from memmap_buffer.reading.weighting import Prioritized
from memmap_buffer.schema import Field, Schema
from memmap_buffer.statistics import Normalize, Statistics
from memmap_buffer.store.checkup import Finding, verify
from memmap_buffer.store.pack import pack, unpack
from memmap_buffer.store.repair import repair
from memmap_buffer.transforms import compute_importance_weights

__version__ = "0.1.0"

__all__ = [
    "BufferFullError",
    "BufferLockedError",
    "Collector",
    "ConcatBuffer",
    "ConcatReplayBuffer",
    "CorruptBufferError",
    "Crop",
    "EpisodeIndexError",
    "EpisodeStateError",
    "Field",
    "Finding",
    "MemmapBufferError",
    "NStep",
    "Normalize",
    "NotABufferError",
    "NotEnoughDataError",
    "Offsets",
    "Options",
    "Prioritized",
    "ReadOnlyError",
    "ReplayBuffer",
    "Schema",
    "SchemaError",
    "SchemaMismatchError",
    "StaleEpisodeError",
    "Statistics",
    "Timestep",
    "Trajectory",
    "View",
    "Window",
    "WriterLostError",
    "compute_importance_weights",
    "pack",
    "repair",
    "unpack",
    "verify",
]
