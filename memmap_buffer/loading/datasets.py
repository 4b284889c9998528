"""The classes that PyTorch asks for: a dataset that reads whole batches, its collate function, and the loader.

Read `EpisodeLoader` first, which `ReplayBuffer.dataloader` returns. Its sampler (`epochs.py`) draws anchors in the main
process; an `EpisodeDataset` reads the batch at these anchors, in this process or in workers (`transport.py`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError
from memmap_buffer.items.epoch import Handing
from memmap_buffer.loading.batches import Batch, Item, ItemDataset
from memmap_buffer.loading.distributed import Drawn, EpochBatches, anchors_of, samplers_of
from memmap_buffer.loading.epochs import EpochSampler, PrioritizedSampler
from memmap_buffer.loading.options import NamedBatch, make_tuple, require_known
from memmap_buffer.loading.prefetch import Device, Move, Prefetched, to_device
from memmap_buffer.loading.tensors import to_tensor
from memmap_buffer.loading.transport import TASK_BATCHES, Arrivals, Carrier, Tasks, unchanged
from memmap_buffer.views.anchors import Anchors


def collate(batch: Any) -> Any:
    """The batch as the user gets it, if it was read whole; other items are joined by PyTorch's default collate."""
    return batch.whole if isinstance(batch, Batch) else default_collate(batch)


def _default_of_items(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """A batch, or a list of our items joined to one: PyTorch's default collate calls this by the type of the first."""
    if isinstance(batch, Batch):
        return batch.whole
    first: Any = batch[0]
    join = partial(torch_collate, collate_fn_map=collate_fn_map)
    if isinstance(first, NamedBatch):
        return make_tuple(first._fields, [join(list(values)) for values in zip(*batch, strict=True)])
    return {key: join([item[key] for item in batch]) for key in first}


default_collate_fn_map.update({Item: _default_of_items, NamedBatch: _default_of_items})


class EpisodeDataset(ItemDataset, Dataset[dict[str, Any]]):
    """Items as PyTorch's `Dataset`. Loaders of this library ask for batches by anchors, others by positions."""

    def __getitems__(self, indices: Sequence[int] | Anchors | Drawn) -> Batch:
        """Many items, read at once.

        Args:
            indices: (B,) positions, or the anchors that a sampler of this library gave.

        Raises:
            SchemaError: they are positions, though the options or the weights say which items are drawn.
            IndexError: a position is not below the number of items.
        """
        anchors = anchors_of(indices)
        return super().__getitems__(indices) if anchors is None else self._read(anchors)


class EpisodeLoader(DataLoader[Any]):
    """A DataLoader over an `EpisodeDataset`; the sampler draws in this process, workers only read.

    Args:
        dataset: reads the batches.
        sampler: draws the anchors of each batch.
        device: the device that this process moves batches to; None leaves them in memory.
        prefetch: how many batches a thread of this process keeps ready, pinned and moved; 0 for no thread.
        batch_sampler: in the place of `sampler`: one that a trainer made from a loader's own.
        kwargs: any other argument of `torch.utils.data.DataLoader`; batch_size, shuffle and drop_last are the
            sampler's.
    """

    def __init__(
        self,
        dataset: EpisodeDataset,
        sampler: EpochSampler[Any] | None = None,
        *,
        device: Device = None,
        prefetch: int = 0,
        batch_sampler: EpochBatches | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("batch_size", "shuffle", "drop_last")}
        kwargs.setdefault("collate_fn", collate)
        order: Any = sampler if batch_sampler is None else batch_sampler.order
        items, whole = samplers_of(dataset, order)
        super().__init__(dataset, order.batch_size, sampler=items, drop_last=order.drop_last, **kwargs)
        # PyTorch takes one sampler only, with which it would read item by item, and forbids to set attributes later.
        object.__setattr__(self, "batch_sampler", whole if batch_sampler is None else batch_sampler)
        self.device = device
        self._order: EpochSampler[Any] = order
        self._drawn: EpochBatches | EpochSampler[Any] = order if batch_sampler is None else batch_sampler
        # Pinning would delay the loop, so a thread does it; so does PyTorch where there are workers.
        self._pinned = bool(self.num_workers and self.pin_memory and torch.cuda.is_available())
        self.prefetch = prefetch or int(self._pinned)
        # By priority one batch a task: one drawn earlier would not know the errors of the batches before it.
        self._tasks = Tasks(self._drawn, self.num_workers, 1 if isinstance(order, PrioritizedSampler) else TASK_BATCHES)
        self._processes = self._carriers(kwargs) if self.num_workers else None
        self._ahead: weakref.ref[Prefetched] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state without the prefetching iterator of a running epoch, whose thread is of this process."""
        return self.__dict__ | {"_ahead": None}

    def __repr__(self) -> str:
        order = self._order
        how = f"{len(self)} batches of {self.batch_size}, shuffle={order.shuffle!r}, seed={order.seed}"
        return f"<EpisodeLoader: {how}, num_workers={self.num_workers}, of {self.dataset!r}>"

    def __len__(self) -> int:
        """The number of batches in this rank's part of the next epoch."""
        return len(self._drawn)

    @property
    def _index_sampler(self) -> Any:
        """The sampler that PyTorch's own iterators draw from: this rank's part."""
        return self._drawn

    def _carriers(self, kwargs: dict[str, Any]) -> DataLoader[Any]:
        """The DataLoader that has the worker processes, with the same options; it gives `Shipment`s."""
        carrier = Carrier(self.dataset, self.collate_fn)
        own = {"collate_fn": unchanged, "pin_memory": False}
        return DataLoader(carrier, batch_sampler=self._tasks, **(kwargs | own))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of one epoch; `state_dict` counts those that were handed out, however many are made ahead."""
        if self.persistent_workers and self._ahead is not None and (last_prefetched := self._ahead()) is not None:
            last_prefetched.close()  # else its thread and the new epoch would share one iterator over the workers
        epoch: Handing = self._order.begin()
        processes = self._processes  # the workers read, if there are any
        batches = self._made() if processes is None else Arrivals(iter(processes), self._tasks, self._pinned)
        if self.prefetch:
            prefetched = Prefetched(batches, self.prefetch, Move(self.device))
            # Lightning may record what is assigned to a loader, and pickle it with that; a weakref does not pickle.
            self.__dict__["_ahead"] = weakref.ref(prefetched)
            return epoch.delivering(prefetched)
        batches = epoch.delivering(batches)
        return batches if self.device is None else map(partial(to_device, device=self.device), batches)

    def _made(self) -> Iterator[Any]:
        """Batches that this process reads. PyTorch's own iterator, used for pinning, adds 15 µs to each."""
        if self.pin_memory:
            return super().__iter__()
        read: Callable[[Any], Any] = self.dataset.__getitems__  # type: ignore[attr-defined]
        collate = self.collate_fn
        return map(lambda anchors: collate(read(anchors)), self._drawn)

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, as numbers, strings and lists; see `EpochSampler.state_dict`."""
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], on_stale: str = "raise") -> None:
        """Make the next epoch the rest of the one in which `state_dict` was called.

        Args:
            state: as `state_dict` gave it.
            on_stale: see `EpochSampler.load_state_dict`.
        """
        self._order.load_state_dict(state, on_stale)


_LOADER_OPTIONS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {"self", "dataset"}


def check_loader_options(options: Mapping[str, Any], own_options: Iterable[str]) -> None:
    """Raise SchemaError for an option that is no argument of PyTorch's DataLoader, or that would set the order."""
    require_known(options, _LOADER_OPTIONS, sorted({*own_options, *_LOADER_OPTIONS} - {"self", "options"}))
    for name in ("sampler", "batch_sampler"):
        if options.get(name) is not None:
            raise SchemaError(
                f"{name}: the order is the library's here; give dataset() to a DataLoader of your own for another"
            )


class RowsDataset(Dataset[dict[str, Any]]):
    """A dataset over columns in memory, one item a row.

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
    """A PyTorch DataLoader over the rows of arrays in memory, (n, *field) each; batches go to `device`."""
    rows = RowsDataset({name: to_tensor(np.array(column)) for name, column in columns.items()}, names)
    return DataLoader(rows, batch_size, collate_fn=partial(_collated, device), **options)


def _collated(device: Device, batch: Batch) -> Any:
    return batch.whole if device is None else to_device(batch.whole, device)
