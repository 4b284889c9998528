"""`ConcatBuffer`: several folders with common fields, read as one. Users make it from a list, or by `from_root`.

All reading is that of `Readable`, over a `Folders` of several storages; here is how the folders are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import ref

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.api.reading import Readable
from memmap_buffer.choices import OnDamaged
from memmap_buffer.errors import NotABufferError, ReadOnlyError, SchemaError
from memmap_buffer.format.folder import Folder, folders_in
from memmap_buffer.format.shards import Shards, is_read_by_number, opened
from memmap_buffer.format.storage import Storage
from memmap_buffer.paths import AnyPath, is_url, path_of
from memmap_buffer.views.folders import Folders
from memmap_buffer.writing.new_values import steps_and_values


class ConcatBuffer(Readable):
    """Several buffers read as one. Episodes are listed source by source, oldest first.

    Args:
        sources: folders, or open buffers.
        weights: one positive number for each source: every batch, and every part of a batch, has exactly these shares,
            however many items a source has; the sources take turns, and remainders are carried over to the next batch.
            Without weights every item counts the same.
        fields: the fields, groups and meta fields that are read, if the sources have others that differ; the fields
            that end episodes are added. Default: all, which every source must have.

    A field of text may have another width in each source, and is read with the widest.

    Raises:
        SchemaMismatchError: the fields differ.
        SchemaError: there is no source, `sources` is no list, the weights do not fit, or a field is unknown.
    """

    _refusal: type[ReadOnlyError] = ReadOnlyError
    _buffers: Mapping[int, ref[ReplayBuffer]] = MappingProxyType({})  # number -> the source, if it was an open buffer

    def __init__(
        self,
        sources: Sequence[AnyPath | ReplayBuffer],
        weights: Sequence[float] | None = None,
        *,
        fields: Sequence[str] | None = None,
    ) -> None:
        if isinstance(sources, str | PathLike | ReplayBuffer):
            raise SchemaError(
                f"ConcatBuffer: got {sources!r} alone, expected a list of folders or buffers; write ConcatBuffer([…]), "
                "or ConcatBuffer.from_root for the folders in it"
            )
        if not sources:
            raise SchemaError("ConcatBuffer: got no source, expected at least one folder or buffer")
        if weights is not None and (len(weights) != len(sources) or not all(0 < w < float("inf") for w in weights)):
            raise SchemaError(
                f"weights: got {list(weights)!r}, expected one positive number for each of {len(sources)} sources"
            )
        super().__init__(Folders([_storage(source) for source in sources], fields=fields), weights)
        self._buffers = {i: ref(source) for i, source in enumerate(sources) if isinstance(source, ReplayBuffer)}

    @classmethod
    def from_root(
        cls,
        root: AnyPath,
        weights: Sequence[float] | None = None,
        *,
        fields: Sequence[str] | None = None,
        on_damaged: OnDamaged = "raise",
        storage_options: Mapping[str, Any] | None = None,
        cache: AnyPath | None = None,
        cache_bytes: int | None = None,
        filter_shards: Mapping[str, Any] | None = None,
    ) -> ConcatBuffer:
        """The buffers that are direct subfolders of `root`, or that were published to it.

        If `root` holds shards (`shard-00000` …, as `ReplayBuffer(root, …, shard="auto")` makes them), these are read,
        and shards that appear later, too: `refresh`, every `sample` and every new epoch look for them. The number in a
        shard's name is its first number in `_indices` and `_index`, whichever other shards there are. The episodes of a
        removed shard are gone, like those that a ring overwrites. Without shards, or with `weights`, the folders that
        are there now are read, by name.

        A shard that lacks a file or the end of one, as while it is being copied, is left out until it is whole; a
        warning is logged.

        Args:
            root: the folder of the buffers, or the URL that they were published to. From a URL only the parts that are
                read are fetched, and kept in `cache`.
            weights: as for `ConcatBuffer`, in the order of the folders' names.
            fields: as for `ConcatBuffer`.
            on_damaged: "skip" leaves out other folders that cannot be opened, too, with their weights; "raise" raises.
            storage_options: for a URL: options of fsspec.
            cache: for a URL: the folder for fetched files, default `~/.cache/memmap_buffer`. Processes may share it.
            cache_bytes: the most bytes that are kept there; None: all. With few bytes `shuffle="block"` mixes less.
            filter_shards: for a URL: conditions as in `filter_meta`, but no callables, on meta fields of numbers and
                "episode_lens". A shard is not opened if the list of shards tells that none of its episodes can pass.
                Of the other shards all episodes are there, so give `filter_meta` when you read, too.

        Raises:
            NotABufferError: there is no buffer in it, or `root` is one itself.
            SchemaMismatchError: the fields differ.
            CorruptBufferError: a file is damaged.
            SchemaError: a schema is damaged.
        """
        if is_url(root):
            from memmap_buffer.remote.shards import RemoteShards, cache_of

            local_cache, conditions = cache_of(cache, cache_bytes), _checked(filter_shards)
            published = RemoteShards(str(root), storage_options, local_cache, conditions=conditions)
            return cls._of_published(published, weights, fields, conditions)
        if filter_shards is not None:
            raise SchemaError(f"filter_shards: got {root}, expected a URL, whose list of shards tells what is in them")
        return cls._of_folders(path_of(root), weights, fields, on_damaged)

    @classmethod
    def _of_published(
        cls, shards: Any, weights: Sequence[float] | None, fields: Sequence[str] | None, names: Iterable[str]
    ) -> ConcatBuffer:
        """The buffers of a root at a URL. Raises SchemaError: `names`, of `filter_shards`, are no meta fields."""
        if weights is not None:
            buffer = cls(shards.by_name(), weights, fields=fields)
        else:
            buffer = cls.__new__(cls)
            Readable.__init__(buffer, Folders((), shards, fields))
        buffer.schema.require_fields(names, "filter_shards", [*buffer.schema.meta_fields, "episode_lens"])
        return buffer

    @classmethod
    def _of_folders(
        cls, root: Path, weights: Sequence[float] | None, fields: Sequence[str] | None, on_damaged: OnDamaged
    ) -> ConcatBuffer:
        """The buffers of a root on this machine, see `from_root`."""
        if (root / "schema.json").exists():
            raise NotABufferError(
                f"{root}: this is a buffer, not a folder of buffers; open it by ReplayBuffer.from_folder", path=root
            )
        shards = Shards(root, on_damaged)
        if weights is None and is_read_by_number(root):
            buffer = cls.__new__(cls)
            Readable.__init__(buffer, Folders((), shards, fields))
            return buffer
        folders = folders_in(root)
        try:
            storages = [opened(folder, on_damaged) for folder in folders]
        except (NotABufferError, FileNotFoundError):
            if folders_in(root) == folders:
                raise
            return cls._of_folders(root, weights, fields, on_damaged)  # again: a folder was moved away meanwhile
        if weights is not None and len(weights) == len(folders):
            weights = list(compress(weights, storages))
        sources: list[Any] = list(filter(None, storages))
        if not sources:
            why = Folder(root).published()
            raise NotABufferError(f"{root}: no subfolder holds a buffer" + (f": {why}" if why else ""), path=root)
        return cls(sources, weights, fields=fields)

    def __repr__(self) -> str:
        counts = f"{self.num_episodes} episodes, {self.num_steps} steps"
        return f"<ConcatBuffer of {self._folders}: {counts}, fields {', '.join(self.fieldnames)}>"

    @property
    def folders(self) -> tuple[Path, ...]:
        """The paths of the folders."""
        return tuple(storage.path for _, storage in self._present)

    @property
    def shards(self) -> tuple[int, ...]:
        """The number of each folder, the first one in `_indices` and `_index`."""
        return tuple(number for number, _ in self._present)

    @property
    def read_only(self) -> bool:
        """True."""
        return True

    @property
    def _present(self) -> list[tuple[int, Storage]]:
        """(number, folder) of the folders that were not removed, by ascending numbers."""
        return [
            (n, storage) for n, storage, _ in self._folders.by_number(self._folders.tables) if not storage.withdrawn
        ]

    def write(self, indices: Any, **data: Any) -> int:
        """Overwrite timesteps as `ReplayBuffer.write` does, in sources that were given as open buffers.

        Args:
            indices: (B, 3) of (folder, serial, timestep), or (B, L, 3). Of a single source the folder may be left out,
                as in its batches.
            data: as for `ReplayBuffer.write`.

        Returns:
            The number of timesteps that were not written, as they were overwritten, deleted or dropped meanwhile.

        Raises:
            ReadOnlyError: a source was not given as a buffer that is open for writing; nothing was written.
        """
        without_folder = self._folders.single and np.shape(indices)[-1:] == (2,)
        steps, values = steps_and_values(self.schema, indices, data, "write", folders=not without_folder)
        if without_folder:
            steps = np.insert(steps, 0, 0, axis=1)
        buffers = {}
        for number in np.unique(steps[:, 0][steps[:, 0] >= 0]).tolist():
            buffers[number] = buffer = self._buffers[number]() if number in self._buffers else None
            if buffer is None or buffer.read_only:
                raise self._refusal(
                    f"folder {number} is only read here; give ConcatBuffer the buffer that writes to it"
                )
        gone = 0
        for number, buffer in buffers.items():
            assert buffer is not None
            in_folder = steps[:, 0] == number
            gone += buffer.write(steps[in_folder, 1:], **{name: value[in_folder] for name, value in values.items()})
        return gone

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Raise ReadOnlyError: in the place of each method that writes."""
        raise self._refusal("a ConcatBuffer only reads; write to one of its sources")

    one_episode = begin_episode = begin_batch = batched_episode = store = store_batch = store_meta_batch = _refuse
    store_episode = store_datapoint = store_meta_datapoint = advance_episode = update = clear = reset_ = _refuse
    add = extend = end_episodes = create_collector = delete = _refuse
    set_valid = publish_steps = _refuse
    add_field = drop_field = rename_field = recompute = _refuse


ConcatReplayBuffer = ConcatBuffer


def _storage(source: AnyPath | ReplayBuffer | Storage) -> Storage:
    """The storage of a source; a folder is opened for reading."""
    if isinstance(source, Storage):
        return source
    if isinstance(source, ReplayBuffer):
        return source._storage
    return Storage.open(source, read_only=True)


def _checked(conditions: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """`filter_shards`, {} for None. Raises SchemaError: a condition is a callable, for which a shard has no column."""
    for name, condition in (conditions or {}).items():
        if callable(condition):
            raise SchemaError(
                f"filter_shards: got a callable for {name!r}, expected a value, a set or list, or a tuple (low, high)"
            )
    return conditions or {}
