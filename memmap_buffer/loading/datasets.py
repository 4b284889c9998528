"""What PyTorch asks for: a dataset that reads whole batches, its collate function, and the loader."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.random  # numpy loads it when it is first used, which would be in the middle of the first batch
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from memmap_buffer.dtypes import Array, to_numpy
from memmap_buffer.errors import CorruptBufferError, SchemaError
from memmap_buffer.loading.batch_group import BatchGroup, CurrentBatch, PlannedBatch
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.loading.distributed import Drawn, EpochBatches, anchors_of, samplers_of
from memmap_buffer.loading.options import NamedBatch, make_tuple, unknown_option
from memmap_buffer.loading.prefetch import Device, Move, Prefetched, to_device
from memmap_buffer.loading.prioritized import PrioritizedDraws, PrioritizedSampler
from memmap_buffer.loading.samplers import EpochSampler, UniformSampler
from memmap_buffer.loading.transport import Arrivals, Carrier, Tasks, unchanged
from memmap_buffer.schema import nest
from memmap_buffer.views.anchors import Anchors
from memmap_buffer.views.batch_builder import BFloat16Bits, Columns, pieces


def torch_seed(generator: torch.Generator | None = None) -> int:
    """A seed drawn from torch's generator: so `manual_seed` fixes it, and every worker has another."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def torch_seeded_rng() -> np.random.Generator:
    """A generator whose seed torch's gives."""
    return np.random.default_rng(torch_seed())


def _maker(array: Array) -> Callable[[Array], Any]:
    """The function that makes a tensor of each part of an array."""
    return torch.from_numpy if array.dtype.kind != "U" and type(array) is np.ndarray else to_tensor


def to_tensor(array: Array) -> Any:
    """A tensor over an array's memory; text becomes lists of str."""
    if array.dtype.kind == "U":
        try:
            return array.tolist()
        except ValueError as error:
            raise CorruptBufferError(f"a text field holds what is no text ({error}); see `verify`") from None
    if isinstance(array, BFloat16Bits):
        return torch.from_numpy(array.view(np.ndarray)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_tensors(batch: Mapping[str, Array]) -> dict[str, Any]:
    """A batch of arrays as (nested) tensors."""
    return nest({key: to_tensor(array) for key, array in batch.items()})


def tensors_of(columns: Columns, size: int) -> list[dict[str, Any]]:
    """Columns (N, …) as tensors, cut into batches of `size` items, each in memory that is seen to end where it does."""
    if len(next(iter(columns.values()), ())) <= size:
        return [
            {
                key: torch.from_numpy(values)
                if type(values) is np.ndarray and values.dtype.kind != "U"
                else to_tensor(values)
                for key, values in columns.items()
            }
        ]
    parts = [map(_maker(values), pieces(values, size)) for values in columns.values()]
    return [dict(zip(columns, batch, strict=True)) for batch in zip(*parts, strict=True)]


def _unpadded(values: Any, lens: torch.Tensor) -> Any:
    if isinstance(values, list):
        return [row[:n] for row, n in zip(values, lens.tolist(), strict=True)]
    mask = torch.arange(values.shape[1]) < lens[:, None]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values[mask], offsets)


def read(
    reader: BatchReader, anchors: Anchors | PlannedBatch | CurrentBatch, rng: Callable[[], np.random.Generator]
) -> dict[str, Any]:
    """A batch as (nested) tensors, ragged where the options say so, and transformed.

    Args:
        reader: what reads it.
        anchors: of its items.
        rng: makes the generator of the transforms that take one.
    """
    output = reader.output
    tensors = reader.read(anchors, tensors_of) if isinstance(anchors, Anchors) else anchors.read(tensors_of)
    for key, lens in output.ragged.items():
        tensors[key] = _unpadded(tensors[key], tensors[lens].reshape(-1))
    batch = nest(tensors) if output.nested else tensors
    return output.transformed(batch, rng) if output.transforms else batch


class Item(dict[str, Any]):
    """An item of a batch that was read whole; by its type PyTorch's default collate gives the whole batch."""


class Batch(Sequence[Any]):
    """A batch that was read whole, as a sequence of its items: views of its rows, so any collate works.

    Args:
        data: the batch.
        size: how many items it has.
        names: the keys of the named tuple that it becomes, or ().
    """

    def __init__(self, data: dict[str, Any], size: int, names: tuple[str, ...] = ()) -> None:
        self.data = data
        self._size = size
        self._names = names

    @property
    def whole(self) -> Any:
        """The batch as the user gets it: a dict of tensors, or a named tuple of them."""
        return named(self.data, self._names)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(self._size))]
        if not -self._size <= i < self._size:
            raise IndexError(i)
        return named(Item(_item(self.data, i % self._size)), self._names)


def _item(data: Any, i: int) -> Any:
    if isinstance(data, dict):
        return {key: _item(value, i) for key, value in data.items()}
    if getattr(data, "is_nested", False):  # before PyTorch 2.6 it has no items
        start, stop = data.offsets()[i : i + 2].tolist()
        return data.values()[start:stop]
    return data[i]


def named(data: dict[str, Any], names: tuple[str, ...]) -> Any:
    """A batch or an item as a named tuple of these keys, if there are any."""
    return make_tuple(names, [_at(data, key) for key in names]) if names else data


def _at(data: dict[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        if part not in value:  # a transform took it away
            raise SchemaError(f"to_named_tuple: the batch has no {key!r}; it has {', '.join(map(repr, data))}")
        value = value[part]
    return value


def collate(batch: Any) -> Any:
    """A batch that was read whole as the user gets it; other items as PyTorch's default collate joins them."""
    return batch.whole if isinstance(batch, Batch) else default_collate(batch)


def _default_of_items(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """The default collate of our items, which it calls by the type of the first, with all of them."""
    if isinstance(batch, Batch):
        return batch.whole
    first: Any = batch[0]
    join = partial(torch_collate, collate_fn_map=collate_fn_map)
    if isinstance(first, NamedBatch):
        return make_tuple(first._fields, [join(list(values)) for values in zip(*batch, strict=True)])
    return {key: join([item[key] for item in batch]) for key in first}


default_collate_fn_map.update({Item: _default_of_items, NamedBatch: _default_of_items})


class EpisodeDataset(Dataset[dict[str, Any]]):
    """A map-style dataset of one view's items, oldest episode first.

    It pickles as a path, options and the index (36 bytes an episode), and each process maps the files itself. The
    number of items is of the last `refresh`; loaders made by `dataloader` refresh at every epoch. The workers of
    any other DataLoader have copies of when they were started: with `persistent_workers` make it anew after `refresh`.

    Args:
        reader: what reads its batches.
        weights: the shares of its folders, which a loader of the library's gives.
    """

    def __init__(self, reader: BatchReader, weights: Sequence[float] | None = None) -> None:
        self.reader = reader
        self.weights = weights

    def __len__(self) -> int:
        return len(self.reader.index())

    def refresh(self) -> None:
        """Look for episodes that were published since."""
        self.reader.index(refresh=True)

    def __getitem__(self, i: int) -> Any:
        """Item `i` as a dict of tensors without the batch axis, or a named tuple; an episode has its own length."""
        return self.at([i])[0]

    def __getitems__(self, indices: Sequence[int] | Anchors | PlannedBatch | Drawn) -> Batch:
        """Many items, read at once.

        Args:
            indices: positions, or the anchors that a sampler of ours gave.

        Raises:
            SchemaError: they are positions, though the options or the weights say which items are drawn.
            IndexError: there are not so many items.
        """
        anchors = anchors_of(indices)
        if anchors is not None:
            return self._read(anchors)
        self._require_free_order()
        return self.at(indices)  # type: ignore[arg-type]

    def at(self, positions: Sequence[int] | Array) -> Batch:
        """The items at some positions.

        Raises:
            SchemaError: they are no positions, or items are drawn by priority.
            IndexError: there are not so many items.
        """
        if self.reader.prioritized is not None:
            raise _not_by_position("prioritized", self.reader.prioritized, " or sample()")
        return self._read(self._locate(positions))

    def _read(self, anchors: Anchors | PlannedBatch) -> Batch:
        data = read(self.reader, anchors, partial(_rng_of, anchors))
        return Batch(data, anchors.size, self.reader.output.tuple_names)

    def _require_free_order(self) -> None:
        """Raise SchemaError where no other sampler may say which items a batch has."""
        if self.weights is not None:
            raise _not_by_position("weights", self.weights)
        if self.reader.selection.weight_by is not None:
            raise _not_by_position("weight_by", self.reader.selection.weight_by, " and shuffle=True")

    def grouped(self, batches: Sequence[Anchors]) -> Sequence[Anchors | PlannedBatch]:
        """Batches that are read one after another, as one group where that is possible."""
        batches = [anchors_of(batch) for batch in batches]  # type: ignore[misc]
        size = batches[0].size
        even = all(batch.size == size for batch in batches[:-1]) and batches[-1].size <= size
        if not even or not self.reader.reads_together:
            return batches
        return BatchGroup(self.reader, Anchors.joined(batches), size).batches()

    def _locate(self, indices: Sequence[int] | Array) -> Anchors:
        index = self.reader.index()
        positions = np.asarray(indices)
        if positions.ndim != 1 or (positions.size and positions.dtype.kind not in "iu"):
            raise SchemaError(f"dataset: got {indices!r}, expected whole numbers, the positions of items")
        outside = (positions < -len(index)) | (positions >= len(index))
        if outside.any():
            raise IndexError(_outside(int(positions[outside][0]), len(index)))
        return self.reader.crop(index.locate(positions.astype(np.int64) % len(index)), torch_seeded_rng)


def _outside(position: int, items: int) -> str:
    """The error's text for a position beyond the items: a worker's dataset is a copy, which nobody can refresh."""
    if get_worker_info() is None:
        return f"item {position}: the dataset has {items}; call refresh() to see newer ones"
    return (
        f"item {position}: this worker's copy of the dataset has {items}, those of when the worker was started; after "
        "refresh() make the DataLoader anew, or leave out persistent_workers=True, or take buffer.dataloader(…), whose "
        "workers read what the main process draws"
    )


def _not_by_position(option: str, given: object, more: str = "") -> SchemaError:
    return SchemaError(
        f"dataset: {option}={given!r} says which items are drawn, and here they are asked for by position, as a "
        f"DataLoader of your own does; use buffer.dataloader(batch_size, dataset=…){more}, or leave {option} out"
    )


def _rng_of(anchors: Anchors | PlannedBatch) -> np.random.Generator:
    """The generator of a batch; batches of a group have none."""
    assert isinstance(anchors, Anchors)
    assert anchors.chance is not None
    return np.random.default_rng(anchors.chance[:1])


class EpisodeLoader(DataLoader[Any]):
    """A DataLoader over an `EpisodeDataset`; the sampler draws in this process, workers only read.

    Args:
        dataset: what is read.
        sampler: in which order.
        device: where batches go, from this process.
        prefetch: how many batches a thread of this process keeps ready, pinned and moved; 0 for no thread.
        batch_sampler: in the place of `sampler`: one that a trainer made from a loader's own.
        kwargs: any other argument of `torch.utils.data.DataLoader`; batch_size, shuffle and drop_last follow from the
            order.
    """

    def __init__(
        self,
        dataset: EpisodeDataset,
        sampler: EpochSampler | PrioritizedSampler | None = None,
        *,
        device: Device = None,
        prefetch: int = 0,
        batch_sampler: EpochBatches | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("batch_size", "shuffle", "drop_last")}
        kwargs.setdefault("collate_fn", collate)
        order: Any = sampler if batch_sampler is None else batch_sampler.order
        items, whole = samplers_of(dataset, order, order.shuffle)
        super().__init__(dataset, order.batch_size, sampler=items, drop_last=order.drop_last, **kwargs)
        # PyTorch takes one sampler only, would ask for the items one by one, and forbids to set its attributes later.
        object.__setattr__(self, "batch_sampler", whole if batch_sampler is None else batch_sampler)
        self.device = device
        self._order: EpochSampler | PrioritizedSampler = order
        self._drawn: EpochBatches | EpochSampler | PrioritizedSampler = (
            order if batch_sampler is None else batch_sampler
        )
        order.plans = not self.num_workers and batch_sampler is None
        # Pinning would hold up the loop; PyTorch leaves it to a thread too, where there are workers.
        self._pinned = bool(self.num_workers and self.pin_memory and torch.cuda.is_available())
        self.prefetch = prefetch or int(self._pinned)
        self._tasks = Tasks(self._drawn, self.num_workers)
        self._processes = self._carriers(kwargs) if self.num_workers else None
        self._ahead: weakref.ref[Prefetched] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All but the loop that is under way, which is of this process."""
        return self.__dict__ | {"_ahead": None}

    def __len__(self) -> int:
        """Batches of this rank's part of the next epoch."""
        return len(self._drawn)

    @property
    def _index_sampler(self) -> Any:
        """What PyTorch's own iterators draw from: this rank's part."""
        return self._drawn

    def _carriers(self, kwargs: dict[str, Any]) -> DataLoader[Any]:
        """The loader that has the worker processes: of the same options, but batches cross packed."""
        carrier = Carrier(self.dataset, self.collate_fn)
        own = {"collate_fn": unchanged, "pin_memory": False}
        return DataLoader(carrier, batch_sampler=self._tasks, **(kwargs | own))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of one epoch; those that it gave count in `state_dict`, however many are made ahead."""
        if self.persistent_workers and self._ahead is not None and (last := self._ahead()) is not None:
            last.close()  # its thread and the new epoch would share one iterator over the processes
        epoch = self._order.begin()
        batches = self._made() if self._processes is None else self._arriving(self._processes)
        if self.prefetch:
            ahead = Prefetched(batches, self.prefetch, Move(self.device))
            self._ahead = weakref.ref(ahead)
            return epoch.delivering(ahead)
        batches = epoch.delivering(batches)
        return batches if self.device is None else map(partial(to_device, device=self.device), batches)

    def _made(self) -> Iterator[Any]:
        """Batches of this process. PyTorch's own iterator takes 15 µs for each besides."""
        if self.pin_memory:
            return super().__iter__()
        read: Callable[[Any], Any] = self.dataset.__getitems__  # type: ignore[attr-defined]
        collate = self.collate_fn
        return map(lambda anchors: collate(read(anchors)), self._drawn)

    def _arriving(self, processes: DataLoader[Any]) -> Iterator[Any]:
        """Batches of the worker processes."""
        return Arrivals(iter(processes), self._tasks, self._pinned)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as numbers, strings and lists; see `EpochSampler.state_dict`."""
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], on_stale: str = "raise") -> None:
        """Make the next epoch the rest of the one in which `state_dict` was called.

        Args:
            state: as `state_dict` gave it.
            on_stale: see `EpochSampler.load_state_dict`.
        """
        self._order.load_state_dict(state, on_stale)


_LOADER_OPTIONS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {"self", "dataset"}


def check_loader_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise SchemaError unless each is an argument of PyTorch's DataLoader that leaves the order to the library."""
    for name, value in options.items():
        if name not in _LOADER_OPTIONS:
            raise unknown_option(name, [*known, *_LOADER_OPTIONS])
        if name in ("sampler", "batch_sampler") and value is not None:
            raise SchemaError(
                f"{name}: the order is the library's here; give dataset() to a DataLoader of your own for another"
            )


def sample(
    draws: UniformSampler | PrioritizedDraws,
    batch_size: int,
    rng: np.random.Generator,
    device: Device,
    alone: bool,
    replacement: bool = True,
) -> Any:
    """One batch drawn at random, as a loader of the same options would give it."""
    drawn = draws.next(batch_size, rng, alone) if replacement else draws.distinct(batch_size, rng)
    data = read(draws.reader, drawn, lambda: rng)
    data = named(data, draws.reader.output.tuple_names)
    return data if device is None else to_device(data, device)


def batch_of(reader: BatchReader, indices: Any, device: Device) -> Any:
    """One batch of the items at some positions, None for all, as a loader of the same options would give it."""
    index = reader.index(refresh=True)
    reader.require(index)
    positions = np.arange(len(index)) if indices is None else to_numpy(indices)
    if positions.ndim != 1 or positions.dtype.kind not in "iu":
        raise SchemaError(f"batch: got {indices!r}, expected positions (B,) of items, whole numbers, at least one")
    data = EpisodeDataset(reader).at(positions).whole
    return data if device is None else to_device(data, device)


class RowsDataset(Dataset[dict[str, Any]]):
    """The rows of columns in memory.

    Args:
        columns: name -> (n, *field), as tensors.
        names: the columns of the named tuple that a row becomes, or ().
    """

    def __init__(self, columns: Mapping[str, Any], names: tuple[str, ...]) -> None:
        self._columns, self._names = columns, names

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        return Batch({name: column[rows] for name, column in self._columns.items()}, len(rows), self._names)


def loader_of(
    columns: Mapping[str, Array], batch_size: int, names: tuple[str, ...], device: Device, **options: Any
) -> DataLoader[Any]:
    """A PyTorch DataLoader over the rows of columns in memory, (n, *field) each; batches go to `device`."""
    rows = RowsDataset({name: to_tensor(np.array(column)) for name, column in columns.items()}, names)
    return DataLoader(rows, batch_size, collate_fn=partial(_collated, device), **options)


def _collated(device: Device, batch: Batch) -> Any:
    return batch.whole if device is None else to_device(batch.whole, device)
