"""The reading half of every buffer: what it holds, its episodes, datasets, loaders, samples.

torch is loaded when a loader or a tensor is first asked for.
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
from memmap_buffer.choices import Shuffle, Tail
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
    update_priorities,
)
from memmap_buffer.loading.samplers import UniformSampler
from memmap_buffer.pictures import Picture, picture_of, table_of
from memmap_buffer.priority.options import Prioritized
from memmap_buffer.schema import LENGTHS, Schema, nest
from memmap_buffer.views.folders import Folders
from memmap_buffer.views.windows import Trajectory
from memmap_buffer.writing.validation import positions_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from memmap_buffer.loading.datasets import EpisodeDataset, EpisodeLoader
    from memmap_buffer.loading.options import ArrayBatch, BatchOptions, EpisodeOptions, LoaderOptions, TensorBatch
    from memmap_buffer.loading.prefetch import Device

MAX_KEPT = 32  # sets of options whose sampler, with its index, is kept
P = ParamSpec("P")
T = TypeVar("T")


def _retried(read: Callable[Concatenate[Readable, P], T]) -> Callable[Concatenate[Readable, P], T]:
    """A method that is called again where another thread changes the columns meanwhile, with this object."""

    @wraps(read)
    def call(self: Readable, /, *arguments: P.args, **options: P.kwargs) -> T:
        while True:
            folders = self._folders
            try:
                result = read(self, *arguments, **options)
            except SchemaMismatchError:
                if self._settled() is folders:
                    raise
            except Exception:  # of names that are not those of the folders any more, say
                if self._folders is folders:
                    raise
            else:
                if self._folders is folders:
                    return result

    return call


class Readable(Markable):
    """The reading half of `ReplayBuffer` and `ConcatBuffer`.

    Args:
        folders: what is read.
        weights: the exact share of each folder in a batch, or None.
    """

    def __init__(self, folders: Folders, weights: Sequence[float] | None = None) -> None:
        self._folders = folders
        self._weights = weights
        self._rng: np.random.Generator | None = None
        self._samplers: dict[Any, UniformSampler | PrioritizedDraws] = {}
        self._priorities: dict[str, NamedPriorities] = {}
        self._opening = Turn()

    # What is there

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
        """How many episodes are visible; not those of which a `capacity` has forgotten the first steps."""
        return sum(len(table.whole) for table in self._folders.refresh())

    @property
    @_retried
    def num_steps(self) -> int:
        """How many timesteps are visible, those of trimmed episodes included."""
        return sum(table.steps for table in self._folders.refresh())

    @property
    def num_published(self) -> int:
        """How many episodes were ever published, by any process; those that are gone count, too."""
        return sum(storage.state("next") for storage in self._folders.storages if not storage.withdrawn)

    @property
    def episode_lens(self) -> IntArray:
        """(episodes,) int64 timesteps of each episode, oldest first."""
        return np.concatenate([table.length[table.whole] for table in self._tables()])

    @property
    def serials(self) -> IntArray:
        """(episodes,) int64 the number of each episode, which it keeps for ever; oldest first."""
        return np.concatenate([table.serial[table.whole] for table in self._tables()])

    @property
    @_retried
    def episode_times(self) -> IntArray:
        """(episodes,) int64 when each episode was published, in seconds since 1970; oldest first."""
        folders = self._folders.by_number(self._folders.refresh())
        return np.concatenate([published_at(storage, table.whole) for _, storage, table in folders])

    @_retried
    def _tables(self) -> list[EpisodeTable]:
        """The tables as they are now, folder by folder."""
        return [table for _, _, table in self._folders.by_number(self._folders.refresh())]

    def _chosen(self, options: EpisodeOptions) -> list[NumberedFolder]:
        """The folders that are there, by number, with tables that show only the episodes that the options choose."""
        each = self._folders.by_number(self._folders.refresh())
        slots = selection_of_episodes(options, self.schema).slots(each)
        return [
            (number, storage, replace(table, visible=chosen))
            for (number, storage, table), chosen in zip(each, slots, strict=True)
            if not storage.withdrawn
        ]

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
        """See what was published since; every property, `sample` and new epoch does so by itself."""
        self._folders.refresh()

    # Whole episodes

    @_retried
    def episode(self, i: int) -> dict[str, Any]:
        """A whole episode as numpy arrays, which `store_episode` takes as they are.

        Args:
            i: its position, 0 the oldest, -1 the newest.

        Returns:
            Fields (T, *field), those with `final` (T + 1, *field) if it has its final observation, and meta fields;
            lists padded with zeros to the longest, and `_lens_<key>` (T,), or (T + 1,), how long each is.

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
            indices: positions among the episodes that the options choose, or a slice of them; None for all.
            options: those of `Options` for whole episodes, such as fields, filter_meta, split, part, return_indices.

        Returns:
            Fields (E, Tmax, *field) padded with zeros, `_lens` (E,), of lists `_lens_<key>` (E, Tmax), meta fields
            (E, *field).

        Raises:
            SchemaError: an option is not for whole episodes.
            EpisodeIndexError: there is no such episode; an IndexError.
        """
        data = self._read_whole(indices, **options)
        fields = self.schema.all
        return {key: decode(data[key], fields[key].dtype) if key in fields else data[key] for key in data}

    @_retried
    def show(self, i: int = -1, fields: Sequence[str] | None = None) -> Picture:
        """A picture of one episode: frames of its images, curves of its numbers. A notebook shows it.

        Args:
            i: its position, 0 the oldest, -1 the newest.
            fields: the fields that are drawn; default: all that can be, which text and lists cannot.

        Raises:
            EpisodeIndexError: there is no such episode; an IndexError.
            SchemaError: a name is unknown, a field that is named cannot be drawn, or none can.
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
        """The item `i` of `dataset()`: one episode as tensors, unpadded, with `_lens`."""
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
        """Everything at once, as tensors padded to the longest episode.

        Args:
            fields: the fields that are wanted.
            meta_fields: the meta fields that are wanted; with both left out all, and `episode_lens`.
            device: where to put them.

        Returns:
            Fields (E, Tmax, *field), of lists `_lens_<key>` (E, Tmax), too, meta fields (E, *field); an empty dict
            where there are no episodes.

        Raises:
            SchemaError: a name is unknown.
        """
        from memmap_buffer.loading.prefetch import to_device
        from memmap_buffer.loading.tensors import to_tensors

        every = fields is None and meta_fields is None
        names = self.fieldnames if every else self.schema.require(fields or (), "fields", self.schema.fields)
        meta_names = (*self.meta_fieldnames, "episode_lens")
        meta = meta_names if every else self.schema.require(meta_fields or (), "meta_fields", meta_names)
        if not self.num_episodes:
            return {}
        batch = self._read_whole(view=Trajectory(names))
        batch["episode_lens"] = batch.pop("_lens")
        lengths = [LENGTHS + name for name in names if name in self.schema.lists]
        data = to_tensors({name: batch[name] for name in (*names, *lengths, *meta)})
        return data if device is None else to_device(data, device)

    def _read_whole(self, positions: Any = None, **options: Unpack[Options]) -> dict[str, Array]:
        """Episodes by position, None for all; looked up again where a writer went on in the middle of reading."""
        reader = BatchReader(self._folders, {**options, "on_stale": "raise"})
        if not reader.selection.view.per_episode:
            raise SchemaError(
                "episodes: these options cut episodes into parts; use dataset(), dataloader() or sample()"
            )
        reader.selection = replace(reader.selection, filter_fields={})  # by position, whatever `valid` excludes
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
        *,
        format: Literal["torch"] | None = None,
        to_named_tuple: Iterable[str] | None = None,
        **options: Unpack[BatchOptions],
    ) -> EpisodeDataset: ...
    @overload
    def dataset(self, **options: Unpack[Options]) -> ItemDataset: ...
    def dataset(self, **options: Any) -> ItemDataset:
        """A map-style dataset: PyTorch's, or with format="numpy" one that needs no torch.

        Args:
            options: those of `Options`.

        Raises:
            SchemaError: options contradict each other or the schema.
            NotEnoughDataError: there is nothing to read.
        """
        return self._dataset(options)

    @_retried
    def _dataset(self, options: Mapping[str, Any]) -> ItemDataset:
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
            batch_size: how many items a batch has.
            shuffle: give the items of each epoch in a random order that (seed, epoch) fixes, each once. "block" is for
                a store larger than memory: blocks of neighbouring items are read in a random order, 64 at a time, and
                shuffled within that window. With `prioritized` every batch is drawn by priority, in this process:
                workers only read.
            drop_last: leave out an incomplete last batch.
            seed: fixes the order; None draws a seed from torch's generator. Of ranks that are given as `rank` all need
                the same, by `seed` or in a state that is loaded before an epoch begins.
            shuffle_window: with "block": how many items the window has; default: as many as take 256 MiB. The
                system's page cache must hold two windows, this one and the next; nothing else grows with it. From a URL
                `cache_bytes` that cannot hold several makes them smaller, which the log says.
            rank: which part of every epoch this process gives; default: as torch.distributed says if it is
                initialised. Then every rank must begin each epoch, where rank 0 tells the others its seed and which
                episodes there are. Give 0, and 1 as `world_size`, to a loader that only one rank uses.
            world_size: how many parts an epoch has; default: as torch.distributed says.
            tail: where the items do not divide by the ranks: "pad" repeats a few, "drop" leaves a few out, and "uneven"
                gives every item once, so that some ranks have one more, or a batch: to validate with.
            device: move batches there.
            prefetch: how many batches a thread of this process keeps ready: read, pinned and moved.
            dataset: read this one, instead of one made from the options.
            dataset_kwargs: more options, as memmap-replay-buffer takes them.
            options: those of `Options`, and any argument of `torch.utils.data.DataLoader`, such as num_workers.

        Raises:
            SchemaError: options contradict each other or the schema.
            NotEnoughDataError: there is no batch to give.
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
        # `state_dict` tells the numbers in those of Python.
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
        **options: Unpack[Options],
    ) -> Any: ...
    def sample(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        device: Device = None,
        replacement: bool = True,
        **options: Any,
    ) -> Any:
        """A batch drawn uniformly, without a loader: the same options, the same batch.

        Args:
            batch_size: how many items.
            seed: the same seed gives the same batch, as long as the episodes are the same; without it draws go on from
                a seed that torch's generator gave at the first call, or numpy's if that was for arrays.
            device: move the batch there.
            replacement: whether an item may be drawn twice. Without, only one that stands for an item whose episode was
                overwritten while it was read may be there already.
            options: those of `Options`.

        Raises:
            SchemaError: options contradict each other or the schema.
            NotEnoughDataError: there is nothing to draw from, or not so much.
        """
        folders = self._folders
        try:  # as `_retried`, which takes 0.5 us
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
            reader, alone = sampler.reader, seed is not None
            columns = sampler.next(batch_size, rng, alone) if replacement else sampler.distinct(batch_size, rng)
            data = finished(reader, columns, lambda: rng)
            return data if device is None and not reader.output.tuple_names else handed_out(reader, data, device)
        except SchemaMismatchError:
            if self._settled() is folders:
                raise
        return self.sample(batch_size, seed=seed, device=device, replacement=replacement, **options)

    @overload
    def batch(
        self, indices: Any = None, *, format: Literal["numpy"], **options: Unpack[BatchOptions]
    ) -> ArrayBatch: ...
    @overload
    def batch(
        self,
        indices: Any = None,
        *,
        device: Device = None,
        format: Literal["torch"] | None = None,
        **options: Unpack[BatchOptions],
    ) -> TensorBatch: ...
    @overload
    def batch(self, indices: Any = None, *, device: Device = None, **options: Unpack[Options]) -> Any: ...
    def batch(self, indices: Any = None, *, device: Device = None, **options: Any) -> Any:
        """The items of `dataset` at some positions, or those that were drawn before, as one batch.

        Args:
            indices: (B,) positions, negative ones from the end; or the `_indices` of a batch, (B, 2) of (serial,
                timestep), of a `ConcatBuffer` (B, 3), which are cut again. Of whole episodes and crops these have one
                column less: `_index[:, None]`. None for all items.
            device: move the batch there.
            options: those of `Options`.

        Raises:
            SchemaError: options contradict each other or the schema.
            NotEnoughDataError: there are no items.
            IndexError: there are not so many.
            StaleEpisodeError: an episode of `_indices` is gone; with on_stale="redraw" another item stands for it.
        """
        if indices is not None and to_numpy(indices).ndim == 2:
            options = {**options, "on_stale": options.get("on_stale") or "raise"}
        return self._batch(indices, device, options)

    @_retried
    def _batch(self, indices: Any, device: Device, options: Mapping[str, Any]) -> Any:
        return batch_of(self._sampler_of(options).reader, indices, device)

    @_retried
    def batch_spec(self, batch_size: int | None = None, **options: Unpack[Options]) -> dict[str, ArraySpec]:
        """The keys, shapes and dtypes of a batch before it is transformed. Nothing is read.

        Args:
            batch_size: the first axis, if it is known.
            options: those of `Options`.

        Returns:
            Dotted key -> `ArraySpec` (shape, dtype); an axis is None where only a batch tells.

        Raises:
            SchemaError: options contradict each other or the schema.
        """
        reader = BatchReader(self._folders, options)
        spec = reader.batch_spec(batch_size)
        return spec if reader.output.format == "torch" else {key: column.of_arrays for key, column in spec.items()}

    def _sampler_of(self, options: Mapping[str, Any]) -> UniformSampler | PrioritizedDraws:
        """The sampler of these options, kept for the next time."""
        sampler, dicts = None, False
        try:
            sampler = self._samplers.get(tuple(options.items()))  # most options are their own key
        except TypeError:
            with suppress(TypeError):
                sampler, dicts = self._samplers.get(key_of_dicts(options)), True
        fresh = sampler is not None and sampler.reader.folders is self._folders
        if sampler is not None and fresh and not (dicts and sampler.reader.options != options):  # a dict may change
            return sampler
        key = key_of(options)
        sampler = self._samplers.get(key)
        # A list, or what a closure holds, may have changed since; or another thread changed the columns.
        if sampler is None or sampler.reader.folders is not self._folders or key_of(sampler.reader.options) != key:
            sampler = self._make_sampler(BatchReader(self._folders, options))
            self._samplers = {**({} if len(self._samplers) >= MAX_KEPT else self._samplers), key: sampler}
        return sampler

    # Priorities

    def update_priorities(self, indices: Any, td_errors: Any, *, name: str = "td") -> int:
        """Give the steps of a batch the priorities of their errors δ: (|δ| + ε)^α.

        Nothing need have been drawn before. α and ε are those of the last `Prioritized` of the name; where there was
        none yet, in this process or another, its defaults.

        Args:
            indices: `_indices` or `_index` of the batch. Where this buffer drew nothing but steps by these priorities,
                numbers of one axis are refused; serials as a column, (B, 1), are whole episodes always.
            td_errors: (B,), or (B, L) for the L steps from each item's first on; (B,) of whole episodes is given to
                every step.
            name: of the `Prioritized` that draws by them.

        Returns:
            How many items were dropped because they were overwritten, forgotten or cleared meanwhile.

        Raises:
            SchemaError: shapes do not fit, numbers of one axis after draws of steps, or an error is no finite number.
            BufferLockedError: another process owns the priorities of the name.

        Where ranks of `torch.distributed` share a loader of the name, each gives its batch's errors, as often as the
        others, and all ranks take in those of all.
        """
        gathered = None
        while True:
            folders = self._folders
            try:
                priorities = self._priorities.get(name) or self._named(name)
                if gathered is None:  # once, as ranks wait for each other: so this is not `_retried`
                    gathered = gathered_errors(priorities, indices, td_errors)
                return update_priorities(priorities, gathered)
            except SchemaMismatchError:
                if self._settled() is folders:
                    raise

    @_retried
    def priorities(self, indices: Any, *, name: str = "td") -> Array:
        """The priorities of steps: p = (|δ| + ε)^α, in proportion to which they are drawn.

        Args:
            indices: `_indices` of a batch: (B, 2) serials and steps, with several folders (B, 3).
            name: of the `Prioritized` that draws by them.

        Returns:
            (B,) float64; 0 where a step is gone.

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
        how = reader.prioritized
        if how is None:
            return UniformSampler(reader, self._weights)
        priorities = self._priorities_of(how) if how.weight_field is None else None
        return PrioritizedDraws(reader, how, priorities, self._weights)

    def _priorities_of(self, how: Prioritized) -> NamedPriorities:
        with self._opening.lock:
            priorities = self._named(how.name, alpha=how.alpha, epsilon=how.epsilon)
            priorities.use(how)
            return priorities

    def _named(self, name: str, **how: float) -> NamedPriorities:
        priorities = self._priorities.get(name)
        if priorities is None:
            with self._opening.lock:
                priorities = self._priorities.get(name)
                if priorities is None:
                    priorities = NamedPriorities(self._folders, name, **how)
                    priorities.open()
                    self._priorities[name] = priorities
        return priorities

    def _settled(self) -> Folders:
        """The folders as they are once no other thread is changing their columns."""
        return self._folders

    def _read_from(self, folders: Folders) -> None:
        """Go on with the same folders, opened again as their columns were changed."""
        self._folders, self._samplers = folders, {}
        for priorities in list(self._priorities.values()):
            priorities.move_to(folders)

    def _close_priorities(self) -> None:
        while self._priorities:
            self._priorities.popitem()[1].close()


def _position(i: Any) -> list[int]:
    try:
        return [operator.index(i)]
    except TypeError:
        raise SchemaError(f"episode: got {i!r}, expected one position, a whole number; see `episodes`") from None
