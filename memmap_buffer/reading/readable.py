"""What every buffer can be asked: its episodes, datasets, loaders, samples. torch is loaded when first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.errors import EpisodeIndexError, SchemaError, StaleEpisodeError
from memmap_buffer.reading.options import ReadOptions
from memmap_buffer.reading.reader import TRIES, Reader
from memmap_buffer.reading.samplers import Draws
from memmap_buffer.reading.sources import Anchors, Sources
from memmap_buffer.reading.views import Trajectory, View
from memmap_buffer.schema import Schema, nest
from memmap_buffer.store.records import FINAL
from memmap_buffer.store.storage import IntArray
from memmap_buffer.values import Array, decode

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from memmap_buffer.reading.datasets import EpisodeDataset, EpisodeLoader
    from memmap_buffer.reading.prefetch import Device

MAX_KEPT = 32  # option sets whose index `sample` keeps


class Readable:
    """The reading half of `ReplayBuffer` and `ConcatBuffer`.

    Args: sources: the folders. weights: exact shares of each batch by source, or None.
    """

    def __init__(self, sources: Sources, weights: Sequence[float] | None = None) -> None:
        self._sources = sources
        self._weights = weights
        self._rng: np.random.Generator | None = None
        self._draws: dict[Any, Draws] = {}

    # What is there

    @property
    def schema(self) -> Schema:
        """The fields and meta fields."""
        return self._sources.schema

    @property
    def fieldnames(self) -> tuple[str, ...]:
        return tuple(self.schema.fields)

    @property
    def meta_fieldnames(self) -> tuple[str, ...]:
        return tuple(self.schema.meta_fields)

    def __len__(self) -> int:
        return self.num_episodes

    @property
    def num_episodes(self) -> int:
        """Visible episodes."""
        return sum(len(table) for table in self._sources.refresh())

    @property
    def num_steps(self) -> int:
        """Visible timesteps."""
        return sum(table.steps for table in self._sources.refresh())

    @property
    def episode_lens(self) -> IntArray:
        """(episodes,) int64 timesteps of each episode, oldest first."""
        return np.concatenate([table.length[table.visible] for table in self._sources.refresh()])

    @property
    def serials(self) -> IntArray:
        """(episodes,) int64 the number of each episode, which it keeps for ever; oldest first."""
        return np.concatenate([table.serial[table.visible] for table in self._sources.refresh()])

    @property
    def max_episodes(self) -> int:
        return sum(storage.layout.max_episodes for storage in self._sources.storages)

    @property
    def max_timesteps(self) -> int:
        return max(storage.layout.max_timesteps for storage in self._sources.storages)

    def refresh(self) -> None:
        """See what was published since; every property, `sample` and new epoch does so by itself."""
        self._sources.refresh()

    # Whole episodes

    def episode(self, i: int) -> dict[str, Any]:
        """One episode whole, as numpy arrays: fields (T, *field), those with `final` (T + 1, *field) if it has its
        final observation, and its meta fields.

        Args: i: its position, 0 the oldest, -1 the newest. Raises: IndexError.
        """
        anchors, data = self._read_whole(Trajectory(final_observation=True), [i])
        has_final = bool(self._sources.look_up(anchors).has(FINAL)[0])
        batch = {key: values[0] for key, values in data.items()}
        out: dict[str, Any] = {}
        for name, field in self.schema.all.items():
            stop = batch["_lens"] + (field.final and has_final)
            out[name] = decode(batch[name][:stop] if name in self.schema.fields else batch[name], field.dtype)
        return nest(out)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """The item `i` of `dataset()`: one episode as tensors, unpadded, with `_lens`."""
        from memmap_buffer.reading.datasets import Batch, to_tensors

        item: dict[str, Any] = Batch(to_tensors(self._read_whole(Trajectory(), [i])[1]), 1)[0]
        return item

    def get_all_data(
        self,
        fields: Sequence[str] | None = None,
        meta_fields: Sequence[str] | None = None,
        device: Device = None,
    ) -> dict[str, Any]:
        """Everything at once, as tensors padded to the longest episode: fields (E, Tmax, *field), meta (E, *field).

        Args:
            fields, meta_fields: which; with both left out all, and `episode_lens`.
            device: where to put them.
        """
        from memmap_buffer.reading.datasets import to_tensors
        from memmap_buffer.reading.prefetch import to_device

        every = fields is None and meta_fields is None
        wanted = None if every else self.schema.require(fields or (), "fields", self.schema.fields)
        if not self.num_episodes:
            return {}
        _, batch = self._read_whole(Trajectory(wanted), None)
        batch["episode_lens"] = batch.pop("_lens")
        meta = (
            self.meta_fieldnames if every else self.schema.require(meta_fields or (), "meta_fields", self._meta_names())
        )
        keep = [*(self.fieldnames if wanted is None else wanted), *meta, *["episode_lens"] * every]
        data = to_tensors({name: batch[name] for name in keep})
        return data if device is None else to_device(data, device)

    def _meta_names(self) -> tuple[str, ...]:
        return (*self.meta_fieldnames, "episode_lens")

    def _read_whole(self, view: View, positions: Sequence[int] | None) -> tuple[Anchors, dict[str, Array]]:
        """Episodes by position, None for all; looked up again where a writer went on in the middle of reading."""
        reader = Reader(self._sources, {"view": view, "on_stale": "raise"})
        for _ in range(TRIES - 1):
            anchors = self._whole(reader, positions)
            with suppress(StaleEpisodeError):
                return anchors, reader.read(anchors)
        anchors = self._whole(reader, positions)
        return anchors, reader.read(anchors)

    def _whole(self, reader: Reader, positions: Sequence[int] | None) -> Anchors:
        index = reader.index(refresh=True)
        wanted = np.arange(len(index)) if positions is None else np.asarray(positions, np.int64)
        if ((wanted < -len(index)) | (wanted >= len(index))).any():
            raise EpisodeIndexError(f"episode {wanted[0]}: the buffer has {len(index)}", position=int(wanted[0]))
        return index.locate(wanted % len(index))

    # Batches

    def dataset(self, **options: Unpack[ReadOptions]) -> EpisodeDataset:
        """A map-style PyTorch dataset; see `Options` for the options.

        Raises: SchemaError: options that contradict each other or the schema. NotEnoughDataError: nothing to read.
        """
        from memmap_buffer.reading.datasets import EpisodeDataset

        reader = Reader(self._sources, options)
        reader.require(reader.index(refresh=True))
        return EpisodeDataset(reader)

    def dataloader(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int | None = None,
        device: Device = None,
        prefetch: int = 0,
        dataset: EpisodeDataset | None = None,
        dataset_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> EpisodeLoader:
        """A PyTorch DataLoader whose batches are gathered whole; every epoch sees the episodes published since.

        Args:
            batch_size: items a batch.
            shuffle: draw each epoch without replacement in an order fixed by (seed, epoch).
            drop_last: leave out an incomplete last batch.
            seed: fixes the order; None draws one from torch's generator.
            device: move batches there.
            prefetch: keep this many batches ready, by a thread of this process that gathers, pins and moves them.
            dataset: read this one, instead of one made from the options.
            options: those of `Options` (`dataset_kwargs` adds to them), and any argument of
                `torch.utils.data.DataLoader`, such as num_workers.

        Raises: SchemaError, NotEnoughDataError.
        """
        from memmap_buffer.reading.datasets import make_loader

        own = {
            name: value for name, value in options.items() if name in ReadOptions.__annotations__ and value is not None
        }
        loader_options = {name: value for name, value in options.items() if name not in ReadOptions.__annotations__}
        own |= dataset_kwargs or {}
        if dataset is not None and own:
            raise SchemaError(
                f"options: a dataset has its own; give {', '.join(own)} to dataset(), or leave it out here"
            )
        reader = Reader(self._sources, own) if dataset is None else dataset.reader
        return make_loader(
            reader,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            weights=self._weights,
            device=device,
            prefetch=prefetch,
            dataset=dataset,
            **loader_options,
        )

    def sample(
        self, batch_size: int, *, seed: int | None = None, device: Device = None, **options: Unpack[ReadOptions]
    ) -> Any:
        """One batch drawn uniformly with replacement, without a loader: the same options, the same batch.

        Args: seed: the same seed gives the same batch, as long as the episodes are the same; without it draws go on
            from a seed that torch's generator gave at the first call.
        Raises: SchemaError. NotEnoughDataError: there is nothing to draw from.
        """
        from memmap_buffer.reading.datasets import sample, seeded_rng

        key: Any = tuple(options.items())
        try:
            draws = self._draws.get(key)
        except TypeError:  # a list, say
            key = _frozen(options)
            draws = self._draws.get(key)
        if draws is None:
            draws = Draws(Reader(self._sources, options), self._weights)
            self._draws = {key: draws} if len(self._draws) >= MAX_KEPT else {**self._draws, key: draws}
        if self._rng is None:
            self._rng = seeded_rng()
        rng = self._rng if seed is None else np.random.default_rng(seed)
        return sample(draws, batch_size, rng, device, alone=seed is not None)


def _frozen(value: Any) -> Any:
    """Options as a key of a dict."""
    if isinstance(value, Mapping):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, (np.ndarray,)):
        return value.shape, value.dtype.str, value.tobytes()
    try:
        hash(value)
    except TypeError:
        raise SchemaError(
            f"option value {value!r} cannot be kept; give numbers, names, lists, sets or a view"
        ) from None
    return value
