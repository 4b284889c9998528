"""`Readable`: the reading part of every buffer: its properties, whole episodes, datasets, loaders, samples, priorities.

The methods check few things themselves: options become a `BatchReader` (`loading.batch_reader`), which reads batches of
the items that a sampler of `loading.samplers` or `loading.epochs` chose. torch is imported when a loader or a tensor is
first asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import numpy as np

from memmap_buffer.api.marking import Markable
from memmap_buffer.choices import QUANTILES, Shuffle, Tail
from memmap_buffer.dtypes import Array, check_count, decode, to_numpy
from memmap_buffer.errors import NotEnoughDataError, SchemaError, SchemaMismatchError, StaleEpisodeError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.lock import Turn
from memmap_buffer.items.weights import NumberedFolder, published_at
from memmap_buffer.loading.batch_reader import ArraySpec, BatchReader, Patience
from memmap_buffer.loading.batches import Batch, ItemDataset, batch_of, finished, form_of, handed_out
from memmap_buffer.loading.epochs import EpochSampler, OrderedSampler, PrioritizedSampler
from memmap_buffer.loading.option_keys import key_of, key_of_dicts
from memmap_buffer.loading.options import Options, selection_of_episodes
from memmap_buffer.loading.prioritized import (
    NamedPriorities,
    PrioritizedDraws,
    gathered_errors,
    read_priorities,
)
from memmap_buffer.loading.samplers import UniformSampler
from memmap_buffer.pictures import Picture, picture_of, table_of
from memmap_buffer.schema import LENGTHS, Schema, nest
from memmap_buffer.views.folders import Folders
from memmap_buffer.views.windows import Trajectory
from memmap_buffer.writing.validation import positions_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from memmap_buffer.loading.datasets import EpisodeDataset, EpisodeLoader
    from memmap_buffer.loading.options import ArrayBatch, BatchOptions, EpisodeOptions, LoaderOptions, TensorBatch
    from memmap_buffer.loading.prefetch import Device
    from memmap_buffer.maintenance.statistics import Statistics

MAX_KEPT = 32  # the most sets of options whose samplers, with their indexes, are kept
P = ParamSpec("P")
T = TypeVar("T")


def _retried(read: Callable[Concatenate[Readable, P], T]) -> Callable[Concatenate[Readable, P], T]:
    """A decorator of methods that read: they are called again if another thread of this object changed the columns."""

    @wraps(read)
    def call(self: Readable, /, *arguments: P.args, **options: P.kwargs) -> T:
        while True:
            folders = self._folders
            try:
                result = read(self, *arguments, **options)
            except SchemaMismatchError:
                if self._settled() is folders:
                    raise
            except Exception:  # such as an unknown name: the fields may have changed
                if self._folders is folders:
                    raise
            else:
                if self._folders is folders:
                    return result

    return call


class Readable(Markable):
    """The reading part of `ReplayBuffer` and `ConcatBuffer`.

    Args:
        folders: the folders that are read.
        weights: the exact share of each folder in a batch; None: every item counts the same.
    """

    _writer: Any = None  # of a `ReplayBuffer`, its `Writer`

    def __init__(self, folders: Folders, weights: Sequence[float] | None = None) -> None:
        self._folders = folders
        self._weights = weights
        self._rng: np.random.Generator | None = None
        self._samplers: dict[Any, UniformSampler | PrioritizedDraws] = {}
        self._priorities: dict[str, NamedPriorities] = {}
        self._opening = Turn()

    # Properties

    @property
    def schema(self) -> Schema:
        """The fields and meta fields."""
        return self._folders.schema

    @property
    def fieldnames(self) -> tuple[str, ...]:
        """The dotted names of the fields."""
        return tuple(self.schema.fields)

    @property
    def meta_fieldnames(self) -> tuple[str, ...]:
        """The dotted names of the meta fields."""
        return tuple(self.schema.meta_fields)

    def __len__(self) -> int:
        return self.num_episodes

    @property
    @_retried
    def num_episodes(self) -> int:
        """The number of visible episodes, without those of which a `capacity` has dropped the first steps."""
        return sum(len(table.whole) for table in self._counted())

    @property
    @_retried
    def num_steps(self) -> int:
        """The number of visible timesteps, with those of trimmed episodes."""
        return sum(table.steps for table in self._counted())

    @property
    def num_published(self) -> int:
        """The number of episodes that were ever published, by any process; those that are gone count, too."""
        return sum(storage.state("next") for storage in self._folders.storages if not storage.withdrawn)

    @property
    def episode_lens(self) -> IntArray:
        """(episodes,) int64 the number of timesteps of each episode, oldest first."""
        return np.concatenate([table.length[table.whole] for *_, table in self._numbered()])

    @property
    def serials(self) -> IntArray:
        """(episodes,) int64 the serial of each episode, a number that it keeps for ever; oldest first."""
        return np.concatenate([table.serial[table.whole] for *_, table in self._numbered()])

    @property
    def episode_times(self) -> IntArray:
        """(episodes,) int64 the time of publication of each episode, in seconds since 1970; oldest first."""
        return np.concatenate([published_at(storage, table.whole) for _, storage, table in self._numbered()])

    @_retried
    def _numbered(self) -> list[NumberedFolder]:
        """(number, folder, table as of now) of each folder, by ascending numbers."""
        return self._folders.by_number(self._folders.refresh())

    def _chosen(self, options: EpisodeOptions) -> list[NumberedFolder]:
        """(number, folder, table) of each folder; its table shows only the episodes that options choose."""
        numbered = self._numbered()
        slots = selection_of_episodes(options, self.schema).slots(numbered)
        return [
            (number, storage, replace(table, visible=chosen))
            for (number, storage, table), chosen in zip(numbered, slots, strict=True)
            if not storage.withdrawn
        ]

    def statistics(
        self,
        names: Sequence[str] | None = None,
        quantiles: Sequence[float] = QUANTILES,
        *,
        seed: int = 0,
        **options: Unpack[EpisodeOptions],
    ) -> Statistics:
        """Count, mean, standard deviation, extremes and quantiles of fields, over the visible episodes.

        A `ReplayBuffer` that writes keeps the statistics of all episodes in its folder; they are computed again when
        something visible has changed. Those of a `ConcatBuffer` are as of one buffer, and no folder keeps them.

        Args:
            names: the fields; default: all fields of numbers.
            quantiles: numbers between 0 and 1; `rank_error` of each field says how exact they are.
            seed: the seed of the samples from which quantiles are taken.
            options: those of `EpisodeOptions`: which episodes, such as split={"train": 0.9, "val": 0.1}, part="train".

        Raises:
            NotEnoughDataError: there are no episodes.
            SchemaError: a field is unknown, a quantile is not between 0 and 1, or an option does not choose episodes.
        """
        from memmap_buffer.maintenance.statistics import kept_statistics, statistics

        if options or self._writer is None:
            return statistics(self._chosen(options), names, quantiles, seed=seed, schema=self.schema)
        storage = self._folders.storages[0]
        return kept_statistics(storage, names, quantiles, seed=seed, may_keep=lambda: self._writer.holds)

    @property
    def max_episodes(self) -> int:
        """The most episodes that are visible at a time."""
        return sum(storage.layout.max_episodes for storage in self._folders.storages if not storage.withdrawn)

    @property
    def max_timesteps(self) -> int:
        """The most timesteps of an episode."""
        return self._folders.max_timesteps

    @_retried
    def refresh(self) -> None:
        """Take in what was published since. Every property, `sample` and new epoch does so by itself."""
        self._folders.refresh()

    # Whole episodes

    @_retried
    def episode(self, i: int) -> dict[str, Any]:
        """A whole episode as numpy arrays, which `store_episode` takes as they are.

        Args:
            i: its position: 0 is the oldest, -1 the newest.

        Returns:
            Fields (T, *field); those with `final` (T + 1, *field) if the episode has its final observation; and meta
            fields. Lists are padded with zeros to the longest, and `_lens_<key>` (T,), or (T + 1,), has their lengths.

        Raises:
            EpisodeIndexError: there is no such episode; an IndexError.
        """
        whole = self._read_whole(_position(i), view=Trajectory(final_observation=True))
        batch = {key: values[0] for key, values in whole.items()}
        out: dict[str, Any] = {}
        for name, field in self.schema.all.items():
            stop = batch["_lens"] + (field.final and batch["_has_final"])
            out[name] = decode(batch[name][:stop] if name in self.schema.fields else batch[name], field.dtype)
            if field.is_list:
                out[LENGTHS + name] = batch[LENGTHS + name][:stop]
        return nest(out)

    @_retried
    def episodes(
        self, indices: Sequence[int] | slice | int | None = None, **options: Unpack[Options]
    ) -> dict[str, Array]:
        """Several episodes, or some of their fields, as numpy arrays under dotted names, without torch.

        Args:
            indices: positions among the episodes that the options choose, or a slice; None for all.
            options: those of `Options` for whole episodes, such as fields, filter_meta, split, part, return_indices.

        Returns:
            Fields (E, Tmax, *field) padded with zeros, `_lens` (E,), for lists `_lens_<key>` (E, Tmax), meta fields
            (E, *field).

        Raises:
            SchemaError: an option is not one for whole episodes.
            EpisodeIndexError: there is no such episode; an IndexError.
        """
        data = self._read_whole(indices, **options)
        fields = self.schema.all
        return {key: decode(data[key], fields[key].dtype) if key in fields else data[key] for key in data}

    @_retried
    def show(self, i: int = -1, fields: Sequence[str] | None = None) -> Picture:
        """A picture of one episode: frames of its images, curves of its numbers. A notebook shows it.

        Args:
            i: its position: 0 is the oldest, -1 the newest.
            fields: the fields that are drawn; default: all but text and lists.

        Raises:
            EpisodeIndexError: there is no such episode; an IndexError.
            SchemaError: a name is unknown, a named field is text or a list, or there is no other field.
            ImportError: the extra `plot` is not installed.
        """
        names = self.schema.require(fields or self.fieldnames, "fields", self.schema.fields)
        whole = self.episodes([_position(i)[0]], return_indices=True, fields=names)
        length, data = int(whole["_lens"][0]), {name: whole[name][0] for name in names}
        drawn = {name: self.schema.fields[name] for name in names}
        serial = np.atleast_1d(whole["_index"][0]).tolist()
        title = f"episode {', '.join(map(str, serial))}: {length} timesteps"
        return picture_of(title, {name: values[:length] for name, values in data.items()}, drawn, named=fields or ())

    def _repr_html_(self) -> str:
        return table_of(repr(self), self.schema.fields, self.schema.meta_fields)

    @_retried
    def __getitem__(self, i: int) -> dict[str, Any]:
        """Item `i` of `dataset()`: one episode as tensors, unpadded, with `_lens`."""
        from memmap_buffer.loading.tensors import to_tensors

        item: dict[str, Any] = Batch(to_tensors(self._read_whole(_position(i))), 1)[0]
        return item

    @_retried
    def get_all_data(
        self,
        fields: Sequence[str] | None = None,
        meta_fields: Sequence[str] | None = None,
        device: Device = None,
    ) -> dict[str, Any]:
        """All episodes at once, as tensors padded to the longest episode.

        Args:
            fields: the fields that are wanted.
            meta_fields: the meta fields that are wanted. If both are left out: all fields and meta fields, and
                `episode_lens`.
            device: the device of the tensors.

        Returns:
            Fields (E, Tmax, *field), for lists also `_lens_<key>` (E, Tmax), meta fields (E, *field); an empty dict if
            there are no episodes.

        Raises:
            SchemaError: a name is unknown.
        """
        from memmap_buffer.loading.prefetch import to_device
        from memmap_buffer.loading.tensors import to_tensors

        all_fields = fields is None and meta_fields is None
        names = self.fieldnames if all_fields else self.schema.require(fields or (), "fields", self.schema.fields)
        meta_names = (*self.meta_fieldnames, "episode_lens")
        meta = meta_names if all_fields else self.schema.require(meta_fields or (), "meta_fields", meta_names)
        if not self.num_episodes:
            return {}
        batch = self._read_whole(view=Trajectory(names))
        batch["episode_lens"] = batch.pop("_lens")
        lengths = [LENGTHS + name for name in names if name in self.schema.lists]
        data = to_tensors({name: batch[name] for name in (*names, *lengths, *meta)})
        return data if device is None else to_device(data, device)

    def _read_whole(self, positions: Any = None, **options: Unpack[Options]) -> dict[str, Array]:
        """Whole episodes by position, None for all; read again if a writer overwrote one in the middle of it."""
        reader = BatchReader(self._folders, {**options, "on_stale": "raise"})
        if not reader.selection.view.per_episode:
            raise SchemaError(
                "episodes: these options cut episodes into parts; use dataset(), dataloader() or sample()"
            )
        reader.selection = replace(reader.selection, filter_fields={})  # positions count episodes without valid steps
        patience = Patience()
        while True:
            try:
                index = reader.index(refresh=True)
                return reader.read(index.locate(positions_of(positions, len(index))[0]))
            except StaleEpisodeError:
                if not patience.wait():
                    raise

    # Batches

    @overload
    def dataset(
        self,
        /,
        *,
        format: Literal["torch"] | None = None,
        to_named_tuple: Iterable[str] | None = None,
        **options: Unpack[BatchOptions],
    ) -> EpisodeDataset: ...
    @overload
    def dataset(self, /, **options: Unpack[Options]) -> ItemDataset: ...
    @_retried
    def dataset(self, /, **options: Any) -> ItemDataset:
        """A map-style dataset: PyTorch's, or with format="numpy" one that needs no torch.

        Args:
            options: those of `Options`.

        Raises:
            SchemaError: options contradict each other or the schema.
            NotEnoughDataError: there is nothing to read.
        """
        reader = BatchReader(self._folders, options)
        reader.require(reader.index(refresh=True))
        if reader.output.format == "numpy":
            return ItemDataset(reader, self._weights)
        from memmap_buffer.loading.datasets import EpisodeDataset

        return EpisodeDataset(reader, self._weights)

    @_retried
    def dataloader(
        self,
        batch_size: int,
        *,
        shuffle: Shuffle = False,
        drop_last: bool = False,
        seed: int | None = None,
        shuffle_window: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail = "pad",
        device: Device = None,
        prefetch: int = 0,
        dataset: ItemDataset | None = None,
        dataset_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[LoaderOptions],
    ) -> EpisodeLoader:
        """A PyTorch DataLoader whose batches are read whole; every epoch sees the episodes published since.

        `state_dict` and `load_state_dict` of the loader resume an epoch in another process.

        Args:
            batch_size: the number of items in a batch.
            shuffle: give the items of each epoch in a random order that (seed, epoch) fixes, each once. "block" is for
                a store larger than memory: blocks of neighbouring items are read in a random order, 64 at a time, and
                shuffled within that window. With `prioritized` every batch is drawn by priority, in this process:
                workers only read.
            drop_last: leave out an incomplete last batch.
            seed: fixes the order; None draws a seed from torch's generator. If ranks are given by `rank`, all need the
                same seed, by this argument or in a state that is loaded before an epoch begins.
            shuffle_window: with "block": the number of items in a window; default: as many as take 256 MiB. The
                system's page cache must hold two windows, the present and the next; nothing else grows with it. With a
                URL, a `cache_bytes` that cannot hold several windows makes them smaller, and a warning is logged.
            rank: the part of every epoch that this process reads; default: the rank of torch.distributed, if that is
                initialised. Then all ranks must begin each epoch together, and rank 0 tells the others its seed and
                its episodes. For a loader that only one rank uses, give rank=0 and world_size=1.
            world_size: the number of parts of an epoch; default: the world size of torch.distributed.
            tail: the items that cannot be divided equally among the ranks: "pad" repeats a few, "drop" leaves them out,
                "uneven" gives every item once, so that some ranks have one more item or batch: use it to validate.
            device: the device to which batches are moved.
            prefetch: the number of batches that a thread of this process keeps ready: read, pinned and moved.
            dataset: the dataset to read, instead of one made from the options.
            dataset_kwargs: more options, as memmap-replay-buffer takes them.
            options: those of `Options`, and any argument of `torch.utils.data.DataLoader`, such as num_workers.

        Raises:
            SchemaError: options contradict each other or the schema.
            NotEnoughDataError: there is not a single batch.
        """
        from memmap_buffer.loading.datasets import EpisodeDataset, EpisodeLoader, check_loader_options
        from memmap_buffer.loading.distributed import ranks_of, seed_of

        loader_options: dict[str, Any] = dict(options)
        own = {name: loader_options.pop(name) for name in options if name in Options.__annotations__}
        own |= dataset_kwargs or {}
        check_loader_options(loader_options, [*Options.__annotations__, *signature(Readable.dataloader).parameters])
        check_count("batch_size", batch_size)
        check_count("prefetch", prefetch, 0)
        option_names = [name for name, value in own.items() if value is not None or name == "terminated"]
        if dataset is not None and option_names:
            raise SchemaError(
                f"options: a dataset has its own; give {', '.join(option_names)} to dataset(), or leave it out here"
            )
        reader = BatchReader(self._folders, own) if dataset is None else dataset.reader
        if not isinstance(dataset, EpisodeDataset):
            dataset = EpisodeDataset(reader)
        if device is not None and reader.output.format == "numpy":
            raise SchemaError(f"device: got {device!r} with format='numpy'; arrays stay where they are; leave one out")
        ranks = ranks_of(rank, world_size)
        reader.require(reader.index(refresh=True))
        by_chance = bool(shuffle) or reader.selection.random
        seed = seed_of(seed, ranks, loader_options.get("generator"), by_chance=by_chance)
        draws = self._make_sampler(reader)
        sampler: EpochSampler[Any]
        # `state_dict` must hold Python's own ints.
        sizes: dict[str, Any] = {"batch_size": int(batch_size), "drop_last": drop_last, "seed": seed}
        if isinstance(draws, PrioritizedDraws):
            sampler = PrioritizedSampler(draws, **sizes, ranks=ranks, tail=tail)
        else:
            order: dict[str, Any] = {"shuffle": shuffle, "window": shuffle_window, "weights": self._weights}
            sampler = OrderedSampler(reader, **sizes, **order, ranks=ranks, tail=tail)
        if not len(sampler):
            raise NotEnoughDataError(
                f"drop_last={drop_last}, tail={tail!r} and batch_size={batch_size} for {ranks.now().world_size} ranks "
                f"give no batch of {len(reader.index())} items; lower one"
            )
        return EpisodeLoader(dataset, sampler=sampler, device=device, prefetch=prefetch, **loader_options)

    @overload
    def sample(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        replacement: bool = True,
        new_every: int | None = None,
        format: Literal["numpy"],
        **options: Unpack[BatchOptions],
    ) -> ArrayBatch: ...
    @overload
    def sample(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        device: Device = None,
        replacement: bool = True,
        new_every: int | None = None,
        format: Literal["torch"] | None = None,
        **options: Unpack[BatchOptions],
    ) -> TensorBatch: ...
    @overload
    def sample(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        device: Device = None,
        replacement: bool = True,
        new_every: int | None = None,
        **options: Unpack[Options],
    ) -> Any: ...
    def sample(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        device: Device = None,
        replacement: bool = True,
        new_every: int | None = None,
        **options: Any,
    ) -> Any:
        """Draw a batch uniformly, or by priority, without a loader. It has the form of a loader's batch.

        Args:
            batch_size: the number of items.
            seed: the same seed gives the same batch, as long as the episodes are the same. Without a seed draws go on
                from one taken at the first call: from torch's generator, or numpy's if that call was for arrays.
            device: the device to which the batch is moved.
            replacement: whether an item may be drawn twice. If not, an item may still come twice when it replaces one
                whose episode was overwritten during the read.
            new_every: the batch begins with the items that came since the first such call, each once, in the order in
                which they came; the rest of it is drawn. Of every `new_every` timesteps of an episode the first item is
                given: all items with 1, windows of L timesteps that share none with L. A view that runs on counts the
                timesteps of its stream. The items that wait are kept in memory, for each set of options.
            options: those of `Options`.

        Raises:
            SchemaError: options contradict each other or the schema.
            NotEnoughDataError: there are no items, or without replacement fewer than `batch_size`.
        """
        folders = self._folders
        try:  # the same as `_retried`, which would take 0.5 us more
            sampler = self._sampler_of(options)
            if type(batch_size) is not int or batch_size < 1:
                check_count("batch_size", batch_size)
                batch_size = int(batch_size)
            if seed is not None:
                check_count("seed", seed, 0)
                rng = np.random.default_rng(seed)
            elif self._rng is None:
                rng = self._rng = form_of(sampler.reader.output.format).rng()
            else:
                rng = self._rng
            reader, alone = sampler.reader, seed is not None or not replacement
            if new_every is not None:
                _check_new_every(new_every, seed, replacement)
            columns = sampler.next(batch_size, rng, alone, not replacement, new_every)
            data = finished(reader, columns, lambda: rng)
            return data if device is None and not reader.output.tuple_names else handed_out(reader, data, device)
        except SchemaMismatchError:
            if self._settled() is folders:
                raise
        drawn: dict[str, Any] = {"seed": seed, "replacement": replacement, "new_every": new_every}
        return self.sample(batch_size, device=device, **drawn, **options)

    @overload
    def batch(
        self, /, indices: Any = None, *, format: Literal["numpy"], **options: Unpack[BatchOptions]
    ) -> ArrayBatch: ...
    @overload
    def batch(
        self,
        /,
        indices: Any = None,
        *,
        device: Device = None,
        format: Literal["torch"] | None = None,
        **options: Unpack[BatchOptions],
    ) -> TensorBatch: ...
    @overload
    def batch(self, /, indices: Any = None, *, device: Device = None, **options: Unpack[Options]) -> Any: ...
    @_retried
    def batch(self, /, indices: Any = None, *, device: Device = None, **options: Any) -> Any:
        """The items of `dataset` at given positions, or items that were drawn before, as one batch.

        Args:
            indices: (B,) positions, negative ones from the end; or the `_indices` of an earlier batch, (B, 2) of
                (serial, timestep), with a `ConcatBuffer` (B, 3), to read these items again. For whole episodes and
                crops one column less: `_index[:, None]`. None for all items.
            device: the device to which the batch is moved.
            options: those of `Options`.

        Raises:
            SchemaError: options contradict each other or the schema.
            NotEnoughDataError: there are no items.
            IndexError: a position is beyond the last item.
            StaleEpisodeError: an episode of `_indices` is gone; with on_stale="redraw" another item stands for it.
        """
        if indices is not None and to_numpy(indices).ndim == 2:
            options = {**options, "on_stale": options.get("on_stale") or "raise"}
        return batch_of(self._sampler_of(options).reader, indices, device)

    @_retried
    def batch_spec(self, batch_size: int | None = None, **options: Unpack[Options]) -> dict[str, ArraySpec]:
        """The keys, shapes and dtypes of a batch, before transforms. No rows are read.

        Args:
            batch_size: the length of the first axis, if it is known.
            options: those of `Options`.

        Returns:
            Dotted key -> `ArraySpec` (shape, dtype); the length of an axis that differs between batches is None.

        Raises:
            SchemaError: options contradict each other or the schema.
        """
        reader = BatchReader(self._folders, options)
        spec = reader.batch_spec(batch_size)
        return spec if reader.output.format == "torch" else {key: column.of_arrays for key, column in spec.items()}

    def _sampler_of(self, options: Mapping[str, Any]) -> UniformSampler | PrioritizedDraws:
        """The sampler for these options, which is kept for the next call. The first lookups are the cheap ones."""
        sampler, dicts = None, False
        try:
            sampler = self._samplers.get(tuple(options.items()))  # most options are hashable
        except TypeError:
            with suppress(TypeError):
                sampler, dicts = self._samplers.get(key_of_dicts(options)), True
        fresh = sampler is not None and sampler.reader.folders is self._folders
        # The reader holds dicts of the caller, which may have changed since the sampler was kept.
        if sampler is not None and fresh and not (dicts and sampler.reader.options != options):
            return sampler
        key = key_of(options)
        sampler = self._samplers.get(key)
        # A list, or the variables of a closure, may have changed since; or another thread changed the columns.
        if sampler is None or sampler.reader.folders is not self._folders or key_of(sampler.reader.options) != key:
            sampler = self._make_sampler(BatchReader(self._folders, options))
            self._samplers = {**({} if len(self._samplers) >= MAX_KEPT else self._samplers), key: sampler}
        return sampler

    # Priorities

    def update_priorities(self, indices: Any, td_errors: Any, *, name: str = "td") -> int:
        """Set the priorities of the steps of a batch by their TD errors δ: (|δ| + ε)^α.

        The steps need not have been drawn by priority. α and ε are those of the last `Prioritized` with this name, or
        its defaults if no process has used one.

        Args:
            indices: `_indices` or `_index` of the batch. (B,) are serials of whole episodes; after draws of steps by
                these priorities (B,) is refused, and serials must be a column (B, 1).
            td_errors: (B,), or (B, L) for the L steps from each item's first on. For whole episodes (B,) counts for
                every step.
            name: the name of the `Prioritized` that draws by these priorities.

        Returns:
            The number of items that had no effect, as they were overwritten, dropped or cleared meanwhile.

        Raises:
            SchemaError: shapes do not fit, `indices` is (B,) after draws of steps, or an error is no finite number.
            BufferLockedError: another process owns the priorities of the name.

        If ranks of `torch.distributed` share a loader of the name, each rank calls this with the errors of its own
        batch, as often as the others, and all ranks get the errors of all.
        """
        gathered = None
        while True:
            folders = self._folders
            try:
                priorities = self._priorities.get(name) or self._named(name)
                if gathered is None:  # only once, as ranks wait for each other; that is why `_retried` does not do
                    gathered = gathered_errors(priorities, indices, td_errors)
                return priorities.update(*gathered)
            except SchemaMismatchError:
                if self._settled() is folders:
                    raise

    @_retried
    def priorities(self, indices: Any, *, name: str = "td") -> Array:
        """The priorities of steps: p = (|δ| + ε)^α, in proportion to which steps are drawn.

        Args:
            indices: `_indices` of a batch: (B, 2) serials and steps, with several folders (B, 3).
            name: the name of the `Prioritized` that draws by these priorities.

        Returns:
            (B,) float64; 0 for a step that is gone.

        Raises:
            SchemaError: shapes do not fit, or an episode has no such step.
            BufferLockedError: another process owns the priorities of the name.
        """
        return read_priorities(self._named(name), to_numpy(indices))

    def flush(self) -> None:
        """Wait until the priorities are on the disk."""
        for priorities in list(self._priorities.values()):
            priorities.checkpoint()

    def _make_sampler(self, reader: BatchReader) -> UniformSampler | PrioritizedDraws:
        """A sampler for the options of a reader."""
        how = reader.prioritized
        if how is None:
            return UniformSampler(reader, self._weights)
        priorities = None
        if how.weight_field is None:
            with self._opening.lock:
                priorities = self._named(how.name, alpha=how.alpha, epsilon=how.epsilon)
                priorities.use(how)
        return PrioritizedDraws(reader, how, priorities, self._weights)

    def _named(self, name: str, **how: float) -> NamedPriorities:
        """The priorities of a name, opened if they are not open yet."""
        priorities = self._priorities.get(name)
        if priorities is None:
            with self._opening.lock:
                priorities = self._priorities.get(name)
                if priorities is None:
                    priorities = NamedPriorities(self._folders, name, **how)
                    priorities.open()
                    self._priorities[name] = priorities
        return priorities

    def _counted(self) -> Iterable[EpisodeTable]:
        """The episode table of each folder as it is now, to count by."""
        return self._folders.refresh()

    def _settled(self) -> Folders:
        """The folders, after waiting for another thread that is changing the columns."""
        return self._folders

    def _read_from(self, folders: Folders) -> None:
        """Read from now on by these storages of the same folders: they were opened again after a change of columns."""
        self._folders, self._samplers = folders, {}
        for priorities in list(self._priorities.values()):
            priorities.move_to(folders)


def _check_new_every(new_every: Any, seed: object, replacement: bool) -> None:
    check_count("new_every", new_every)
    if seed is not None or not replacement:
        what = "replacement=False" if seed is None else "seed"
        raise SchemaError(f"new_every and {what} exclude each other: which items are new depends on the batches before")


def _position(i: Any) -> list[int]:
    """A single position as a list. Raises SchemaError: it is no whole number."""
    try:
        return [operator.index(i)]
    except TypeError:
        raise SchemaError(f"episode: got {i!r}, expected one position, a whole number; see `episodes`") from None
