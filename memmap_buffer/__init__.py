"""A disk-backed store of episodes for reinforcement and imitation learning, read as PyTorch batches.

The layers; a module imports only from levels above its own line, never sideways:

    level 0   errors, interop.extras, progress
    level 1   values, interop.plain, store.records, store.block, reading.option_keys
    level 2   schema, transforms, reading.memory, store.kernels
    level 3   store.files, store.staging, store.tree, interop.names, interop.rows
    level 4   store.layout, store.host, store.folder, store.table, interop.gymnasium
    level 5   store.storage, store.creation
    level 6   store.lock, store.episode, store.ring, store.nodes, store.cold
    level 7   store.publication, store.group, store.edits, store.snapshot, store.treefile, store.shards
    level 8   store.stream, store.columns, store.redo, store.pack, store.priority
    level 9   store.recovery, store.checkup
    level 10  store.writer
    level 11  store.repair, store.recording, store.editing, reading.spans, reading.ends
    level 12  reading.together, reading.slices, reading.conditions, reading.split, reading.weighting, reading.hindsight
    level 13  reading.sources, reading.runs
    level 14  reading.gather, reading.index
    level 15  reading.views, reading.relabelling
    level 16  reading.selection, reading.transitions
    level 17  reading.options, reading.order, reading.extent, reading.transport, reading.masses
    level 18  reading.reader, reading.readahead, reading.epoch
    level 19  reading.samplers, reading.distributed, reading.prefetch, reading.prioritized
    level 20  reading.datasets, interop.pandas
    level 21  reading.contents
    level 22  reading.readable, collector, statistics
    level 23  buffer
    level 24  concat, cli.plain, interop.beside, interop.survey, interop.described
    level 25  interop.parquet, interop.lanes, interop.minari, interop.d4rl, interop.ogbench, interop.robomimic
    level 26  interop.record, interop.upstream, interop.torchrl, interop.lerobot, interop.ray, cli.terminal
    level 27  cli.episodes
    level 28  cli.look, cli.mend, cli.measure
    level 29  cli.change, cli.draw
    level 30  cli.view, cli.exchange
    level 31  cli.app
    level 32  cli.command
    level 33  __main__

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
from memmap_buffer.reading.hindsight import Hindsight
from memmap_buffer.reading.options import Options
from memmap_buffer.reading.transitions import NStep
from memmap_buffer.reading.views import Crop, Offsets, Timestep, Trajectory, View, Window
from memmap_buffer.reading.weighting import Prioritized
from memmap_buffer.schema import Field, Schema
from memmap_buffer.statistics import Normalize, RunningStatistics, Statistics
from memmap_buffer.store.checkup import Finding, verify
from memmap_buffer.store.pack import pack, unpack
from memmap_buffer.store.repair import repair
from memmap_buffer.transforms import Returns, Scale, compute_importance_weights, discounted_returns

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
    "Hindsight",
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
    "Returns",
    "RunningStatistics",
    "Scale",
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
    "discounted_returns",
    "pack",
    "repair",
    "unpack",
    "verify",
]
