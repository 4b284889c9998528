"""The PyTorch contract: a dataset that cuts whole batches, its collate function, and the loader. torch begins here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from memmap_buffer.errors import CorruptBufferError, NotEnoughDataError, SchemaError
from memmap_buffer.reading.gather import BFloat16Bits
from memmap_buffer.reading.options import Output, ReadOptions, make_tuple, unknown_option
from memmap_buffer.reading.prioritized import PrioritizedDraws, PrioritizedSampler
from memmap_buffer.reading.reader import Reader
from memmap_buffer.reading.samplers import Draws, EpochSampler
from memmap_buffer.reading.sources import Anchors
from memmap_buffer.schema import nest
from memmap_buffer.values import Array

Device = torch.device | str | int | None


def seeded_rng() -> np.random.Generator:
    """A generator seeded from torch's, so that `manual_seed` fixes it and every worker has another."""
    return np.random.default_rng(int(torch.empty((), dtype=torch.int64).random_()))


def to_tensor(array: Array) -> Any:
    """A tensor over an array's memory; text becomes lists of str."""
    if array.dtype.kind == "U":
        try:
            return array.tolist()
        except ValueError as error:
            raise CorruptBufferError(f"a text field holds what is no text ({error}); see `verify`") from None
    tensor = torch.from_numpy(array.view(np.ndarray))
    return tensor.view(torch.bfloat16) if isinstance(array, BFloat16Bits) else tensor


def to_tensors(batch: Mapping[str, Array]) -> dict[str, Any]:
    """A batch of arrays as (nested) tensors."""
    return nest({key: to_tensor(array) for key, array in batch.items()})


def to_device(batch: Any, device: Device) -> Any:
    """A batch, however nested, on a device; pinned memory is copied without waiting."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(to_device(value, device) for value in batch)
    return batch


class Batch(Sequence[dict[str, Any]]):
    """A batch that was gathered at once, seen as its items: dicts of views of its rows, so any collate works."""

    def __init__(self, data: dict[str, Any], size: int) -> None:
        self.data = data
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(self._size))]
        if not -self._size <= i < self._size:
            raise IndexError(i)
        return _item(self.data, i)


def _item(data: Any, i: int) -> Any:
    return {key: _item(value, i) for key, value in data.items()} if isinstance(data, dict) else data[i]


class EpisodeDataset(Dataset[dict[str, Any]]):
    """A map-style dataset of one view's items, oldest episode first.

    It pickles as a path, options and the index (32 bytes an episode), and each process maps the files itself. The
    number of items is of the last `refresh`; loaders made by `dataloader` refresh at every epoch.

    Args: reader: what is read.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader.index())

    def refresh(self) -> None:
        """Look for episodes that were published since."""
        self.reader.index(refresh=True)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Item `i` as a dict of tensors without the batch axis; a whole episode has its own length."""
        item: dict[str, Any] = self.__getitems__([i])[0]
        return item

    def __getitems__(self, indices: Sequence[int] | Anchors) -> Batch:
        """Many items at once, gathered once: by position, or at anchors."""
        anchors = indices if isinstance(indices, Anchors) else self._locate(indices)
        return Batch(to_tensors(self.reader.read(anchors)), anchors.size)

    def _locate(self, indices: Sequence[int]) -> Anchors:
        index = self.reader.index()
        positions = np.asarray(indices, np.int64)
        outside = (positions < -len(index)) | (positions >= len(index))
        if outside.any():
            raise IndexError(
                f"item {positions[outside][0]}: the dataset has {len(index)}; call refresh() to see newer ones"
            )
        return self.reader.crop(index.locate(positions % len(index)), seeded_rng)


class Collate:
    """Turns what the dataset gathered into what the user gets: a dict of tensors, or a named tuple of them."""

    def __init__(self, output: Output) -> None:
        self.tuple_names = output.tuple_names

    def __call__(self, batch: Any) -> Any:
        data = batch.data if isinstance(batch, Batch) else default_collate(batch)
        return self.named(data)

    def named(self, data: dict[str, Any]) -> Any:
        """The batch as a named tuple, if one was asked for."""
        if not self.tuple_names:
            return data
        return make_tuple(self.tuple_names, [_at(data, key) for key in self.tuple_names])


def _at(data: dict[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        value = value[part]
    return value


class EpisodeLoader(DataLoader[Any]):
    """A DataLoader over an `EpisodeDataset`; the sampler draws in this process, workers only gather.

    Args:
        dataset, sampler: what, and in which order. device: where batches go, from this process.
        kwargs: any other argument of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: EpisodeDataset,
        sampler: EpochSampler | PrioritizedSampler,
        *,
        device: Device = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("collate_fn", Collate(dataset.reader.output))
        super().__init__(dataset, batch_sampler=sampler, **kwargs)  # type: ignore[arg-type]
        self.device = device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        return batches if self.device is None else (to_device(batch, self.device) for batch in batches)


_LOADER_OPTIONS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {"self", "dataset"}


def make_loader(
    reader: Reader,
    *,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    seed: int | None,
    weights: Sequence[float] | None,
    device: Device,
    dataset: EpisodeDataset | None,
    draws: PrioritizedDraws | None = None,
    **kwargs: Any,
) -> EpisodeLoader:
    """The loader of `dataloader`. Without a seed one is drawn from torch's generator, so `manual_seed` fixes it."""
    for name in kwargs:
        if name not in _LOADER_OPTIONS:
            known = [*ReadOptions.__annotations__, *_LOADER_OPTIONS, "seed", "device", "dataset"]
            raise unknown_option(name, known)
    for name in ("sampler", "batch_sampler"):
        if kwargs.get(name) is not None:
            raise SchemaError(
                f"{name}: the order is the library's here; give dataset() to a DataLoader of your own for another"
            )
    _check_batch_size(batch_size)
    dataset = dataset or EpisodeDataset(reader)
    reader = dataset.reader
    reader.require(reader.index(refresh=True))
    if drop_last and len(reader.index()) < batch_size:
        have = len(reader.index())
        raise NotEnoughDataError(f"drop_last=True and batch_size={batch_size} give no batch of {have} items; lower one")
    if seed is None:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=kwargs.get("generator")))
    sampler: EpochSampler | PrioritizedSampler
    if draws is not None:
        sampler = PrioritizedSampler(draws, batch_size=batch_size, drop_last=drop_last, seed=seed)
    else:
        sampler = EpochSampler(
            reader, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed, weights=weights
        )
    return EpisodeLoader(dataset, sampler, device=device, **kwargs)


def _check_batch_size(batch_size: object) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise SchemaError(f"batch_size: got {batch_size!r}, expected a whole number from 1")


def sample(
    draws: Draws | PrioritizedDraws, batch_size: int, rng: np.random.Generator, device: Device, alone: bool
) -> Any:
    """One batch drawn with replacement, as a loader of the same options would give it."""
    _check_batch_size(batch_size)
    data = Collate(draws.reader.output).named(to_tensors(draws.reader.read(draws.next(batch_size, rng, alone))))
    return data if device is None else to_device(data, device)
