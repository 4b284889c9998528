"""A disk-backed store of episodes for reinforcement and imitation learning, read as PyTorch batches.

The packages, from the top floor down; imports between them go down this list only, and within one never in a circle:

    cli           the command `memmap-buffer`
    memmap_replay_buffer  the names of that package, on the public names alone
    interop       data sets and libraries of others, on the public names alone
    api           what users call: ReplayBuffer, ConcatBuffer, Collector
    browse        episodes in a browser, by the public methods of a buffer
    maintenance   verify, repair, pack, publish, snapshot, schema changes, statistics
    remote        published folders at a URL: which parts are fetched, and which are kept
    loading       samplers, batches, datasets, loaders, workers; torch begins here
    priority      the sum tree on the disk, the priorities of items, importance weights
    items         which items exist, by filters and splits, and in which order they are drawn
    views         one batch: anchors, folders, views around them, the copy of their rows
    writing       episodes, the slot of each, the commit, recovery
    format        the bytes: the specification, system calls, one open folder

Between interop and api stand this module and adapters: the packages above know api, and all below it, only through
these two. Above all stands compat, functions that users of other systems look for. Below all packages stand schema,
codecs, dtypes, errors, and ten modules that know no folder: choices, conditions, environments, episode_columns, names,
paths, pictures, extras, first_use, progress. Only `loading.tensors`, `datasets`, `transport`, `prefetch` and
`distributed` import torch; they are loaded when tensors or a loader are first asked for.
"""

from typing import TYPE_CHECKING

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.api.collector import Collector
from memmap_buffer.api.concat import ConcatBuffer, ConcatReplayBuffer
from memmap_buffer.api.mixture import Source, mixture_loader
from memmap_buffer.codecs import Jpeg, Zstd
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
    RemoteError,
    SchemaError,
    SchemaMismatchError,
    StaleEpisodeError,
    WriterLostError,
)
from memmap_buffer.first_use import on_first_use
from memmap_buffer.format.marks import Mark
from memmap_buffer.items.weights import Balanced
from memmap_buffer.loading.options import Options
from memmap_buffer.priority.options import Prioritized, compute_importance_weights
from memmap_buffer.priority.sum_tree import SumTree
from memmap_buffer.schema import Field, Schema
from memmap_buffer.views.hindsight import Hindsight
from memmap_buffer.views.n_step import NStep
from memmap_buffer.views.transforms import Advantages, Returns, Scale, advantages, discounted_returns
from memmap_buffer.views.view import View
from memmap_buffer.views.windows import Offsets, RandomCrop, Timestep, Trajectory, Window

if TYPE_CHECKING:
    from memmap_buffer.maintenance.caches import CacheContents, cache_contents, check_cache, clear_cache
    from memmap_buffer.maintenance.compaction import compact
    from memmap_buffer.maintenance.disk import (
        Compression,
        Disk,
        DiskSpeed,
        available_memory,
        bytes_to_copy,
        compression_of,
        disk_of,
        measure_disk_speed,
    )
    from memmap_buffer.maintenance.garbage import collect_garbage
    from memmap_buffer.maintenance.pack import pack, unpack
    from memmap_buffer.maintenance.publish import publish
    from memmap_buffer.maintenance.pull import fetched_of, pull, shards_at
    from memmap_buffer.maintenance.repair import repair
    from memmap_buffer.maintenance.statistics import FieldStatistics, Normalize, RunningStatistics, Statistics
    from memmap_buffer.maintenance.store import Store, measure_store
    from memmap_buffer.maintenance.verification import Finding, verify

__version__ = "0.1.0"

__all__ = [
    "Advantages",
    "Balanced",
    "BufferFullError",
    "BufferLockedError",
    "CacheContents",
    "Collector",
    "Compression",
    "ConcatBuffer",
    "ConcatReplayBuffer",
    "CorruptBufferError",
    "Disk",
    "DiskSpeed",
    "EpisodeIndexError",
    "EpisodeStateError",
    "Field",
    "FieldStatistics",
    "Finding",
    "Hindsight",
    "Jpeg",
    "Mark",
    "MemmapBufferError",
    "NStep",
    "Normalize",
    "NotABufferError",
    "NotEnoughDataError",
    "Offsets",
    "Options",
    "Prioritized",
    "RandomCrop",
    "ReadOnlyError",
    "RemoteError",
    "ReplayBuffer",
    "Returns",
    "RunningStatistics",
    "Scale",
    "Schema",
    "SchemaError",
    "SchemaMismatchError",
    "Source",
    "StaleEpisodeError",
    "Statistics",
    "Store",
    "SumTree",
    "Timestep",
    "Trajectory",
    "View",
    "Window",
    "WriterLostError",
    "Zstd",
    "advantages",
    "available_memory",
    "bytes_to_copy",
    "cache_contents",
    "check_cache",
    "clear_cache",
    "collect_garbage",
    "compact",
    "compression_of",
    "compute_importance_weights",
    "discounted_returns",
    "disk_of",
    "fetched_of",
    "measure_disk_speed",
    "measure_store",
    "mixture_loader",
    "pack",
    "publish",
    "pull",
    "repair",
    "shards_at",
    "unpack",
    "verify",
]

_LATER = {  # training needs none of them, and they would take a quarter of the import's time
    "maintenance.caches": "CacheContents cache_contents check_cache clear_cache",
    "maintenance.compaction": "compact",
    "maintenance.disk": "Compression Disk DiskSpeed available_memory bytes_to_copy compression_of disk_of "
    "measure_disk_speed",
    "maintenance.garbage": "collect_garbage",
    "maintenance.pack": "pack unpack",
    "maintenance.publish": "publish",
    "maintenance.pull": "fetched_of pull shards_at",
    "maintenance.repair": "repair",
    "maintenance.statistics": "FieldStatistics Normalize RunningStatistics Statistics",
    "maintenance.store": "Store measure_store",
    "maintenance.verification": "Finding verify",
}
__getattr__ = on_first_use(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
