"""Batches as users get them, as arrays or tensors, and map-style datasets of items. Torch is imported for tensors only.

`finished` turns the columns that a `BatchReader` read into the user's batch; all ways to read end there. `ItemDataset`
is what `ReplayBuffer.dataset` returns (with torch, its subclass `datasets.EpisodeDataset`), `batch_of` does `batch`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from reprlib import repr as shortly
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from memmap_buffer.dtypes import Array, all_of, decode, loaded_torch, of_mask, to_numpy
from memmap_buffer.errors import SchemaError
from memmap_buffer.items.index import Index
from memmap_buffer.loading.batch_reader import BatchReader
from memmap_buffer.loading.options import make_tuple
from memmap_buffer.schema import LENGTHS, nest
from memmap_buffer.views.anchors import Anchors
from memmap_buffer.views.gather import BFloat16Bits, Columns, RaggedRows

if TYPE_CHECKING:
    from typing_extensions import Self


class Form(NamedTuple):
    """The functions that differ between `format="torch"` and `format="numpy"`.

    Attributes:
        make: columns -> a batch: key -> tensor, array or list.
        unpadded: sequences (B, T, …), lengths (B,) -> the sequences without padding.
        seed: draws a seed from the global generator.
        move: batch, device -> the batch on the device.
    """

    make: Callable[[Columns], dict[str, Any]]
    unpadded: Callable[[Any, Any], Any]
    seed: Callable[[], int]
    move: Callable[[Any, Any], Any]

    def rng(self) -> np.random.Generator:
        """A generator with a seed drawn from the global one, for reads that have no seed of their own."""
        return np.random.default_rng(self.seed())


@cache
def form_of(format: str) -> Form:
    """The form that the option `format` names; torch is imported at the first call for it."""
    if format == "numpy":
        return Form(arrays_of, _rows, numpy_seed, _stay)
    from memmap_buffer.loading import prefetch, tensors

    return Form(tensors.tensors_of, tensors.unpadded, tensors.torch_seed, prefetch.to_device)


def arrays_of(columns: Columns) -> dict[str, Any]:
    """Columns as arrays that numpy can compute with: bfloat16 becomes float32."""
    return {
        key: decode(values.view(np.ndarray), "bfloat16") if isinstance(values, BFloat16Bits) else values
        for key, values in columns.items()
    }


def numpy_seed() -> int:
    """A seed drawn from numpy's global generator, so that `numpy.random.seed` fixes it."""
    return int(np.random.randint(2**63, dtype=np.uint64))


def _rows(values: Array, lens: Array) -> list[Array]:
    return RaggedRows(row[:n] for row, n in zip(values, lens.tolist(), strict=True))


def _stay(batch: Any, device: object) -> Any:
    raise SchemaError(
        f"device: got {device!r}, but arrays stay in this process's memory; leave it or format='numpy' out"
    )


def finished(reader: BatchReader, columns: Columns, rng: Callable[[], np.random.Generator]) -> Any:
    """The user's batch: (nested) arrays or tensors, ragged where the options say so, and transformed.

    Args:
        reader: the reader that read the columns.
        columns: key -> (B, …).
        rng: makes the generator for the transforms that take one.
    """
    output, form = reader.output, form_of(reader.output.format)
    flat = form.make(columns)
    for key, lens in output.ragged.items():
        flat[key] = form.unpadded(flat[key], flat[lens].reshape(-1))
    for key in output.lists if output.jagged else ():
        if flat[LENGTHS + key].ndim == 1:  # with several timesteps an item, lists stay padded
            flat[key] = form.unpadded(flat[key], flat[LENGTHS + key])
    batch = nest(flat) if output.nested else flat
    return output.transformed(batch, rng) if output.transforms else batch


class Item(dict[str, Any]):
    """An item of a batch that was read whole. PyTorch's default collate knows the type, see `datasets`."""


class Batch(Sequence[Any]):
    """A batch that was read whole, as a sequence of its items, so that any collate function works. Items are views.

    Args:
        data: the batch, as `finished` returned it.
        size: the number of its items.
        names: the keys of the named tuple that a batch or an item becomes, or ().
        kind: the class of an item, a dict.
    """

    def __init__(self, data: Any, size: int, names: tuple[str, ...] = (), kind: type[dict[str, Any]] = Item) -> None:
        self.data = data
        self._size = size
        self._names = names
        self._kind = kind

    @property
    def whole(self) -> Any:
        """The batch as the user gets it: a dict or a named tuple, or whatever a transform returned."""
        return named(self.data, self._names)

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        contents = ", ".join(self.data) if isinstance(self.data, dict) else type(self.data).__name__
        return f"<Batch of {self._size} items: {contents}>"

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(self._size))]
        if not -self._size <= i < self._size:
            raise IndexError(i)
        item = _item(self.data, i % self._size)
        return named(self._kind(item), self._names) if isinstance(item, dict) else item


def _item(data: Any, i: int) -> Any:
    if isinstance(data, dict):
        return {key: _item(value, i) for key, value in data.items()}
    if isinstance(data, tuple):  # a transform may return anything
        values = [_item(value, i) for value in data]
        return data._make(values) if hasattr(data, "_make") else tuple(values)
    if type(data) is list and data and not isinstance(data[0], (str, list)):  # text, or ragged: one entry an item
        return [_item(value, i) for value in data]
    if not hasattr(data, "__getitem__") or getattr(data, "ndim", 1) == 0:
        return data
    if getattr(data, "is_nested", False):  # before PyTorch 2.6 a nested tensor cannot be indexed
        start, stop = data.offsets()[i : i + 2].tolist()
        return data.values()[start:stop]
    return data[i]


def named(data: Any, names: tuple[str, ...]) -> Any:
    """A batch or an item as a named tuple of `names`; as it is if there are none."""
    return make_tuple(names, [_at(data, key) for key in names]) if names else data


def _at(data: dict[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        if part not in value:  # a transform removed it
            raise SchemaError(f"to_named_tuple: the batch has no {key!r}; it has {', '.join(map(repr, data))}")
        value = value[part]
    return value


class ItemDataset:
    """A map-style dataset of one view's items, oldest episode first.

    It pickles as paths, options and the index, and each process maps the files itself. The index (36 bytes an episode)
    is shared with processes that are started with it. The number of items is that of the last `refresh`; loaders made
    by `dataloader` refresh at every epoch. Workers of another DataLoader have copies from when they were started: with
    `persistent_workers=True`, make that DataLoader anew after `refresh`.

    Args:
        reader: reads the batches.
        weights: the shares of the folders in a batch, which only loaders of this library draw by.
    """

    def __init__(self, reader: BatchReader, weights: Sequence[float] | None = None) -> None:
        self.reader = reader
        self.weights = weights

    def __len__(self) -> int:
        return len(self.reader.index())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.reader}: {len(self)} items>"

    def by_anchors(self) -> Self:
        """A copy for workers that get anchors, not positions, and so pickles without the index."""
        other = copy.copy(self)
        other.reader = self.reader.by_anchors()
        return other

    def refresh(self) -> None:
        """Take in the episodes that were published since the last refresh."""
        self.reader.index(refresh=True)

    def __getitem__(self, i: Any) -> Any:
        """Item `i`, a dict or a named tuple without the batch axis; an episode has its own length."""
        return self.at([i])[0]

    def __getitems__(self, indices: Any) -> Batch:
        """Many items, read at once.

        Args:
            indices: (B,) positions.

        Raises:
            SchemaError: the options or the weights say which items are drawn.
            IndexError: a position is not below the number of items.
        """
        if self.weights is not None:
            raise _not_by_position("weights", self.weights)
        if self.reader.selection.weight_by is not None:
            raise _not_by_position("weight_by", self.reader.selection.weight_by, " and shuffle=True")
        return self.at(indices)

    def at(self, indices: Any) -> Batch:
        """The items at some positions, or with some `_indices`.

        Args:
            indices: (B,) positions, or (B, 1 … 3) as `items_at` takes them.

        Raises:
            SchemaError: they are neither, or items are drawn by priority.
            IndexError: a position is not below the number of items.
            StaleEpisodeError: an episode is gone.
        """
        if self.reader.prioritized is not None:
            raise _not_by_position("prioritized", self.reader.prioritized, " or sample()")
        anchors = self._located(np.asarray(indices), indices)
        return self._read(self.reader.crop(anchors, form_of(self.reader.output.format).rng))

    def _read(self, anchors: Anchors) -> Batch:
        data = finished(self.reader, self.reader.read(anchors), partial(rng_of, anchors))
        output = self.reader.output
        return Batch(data, anchors.size, output.tuple_names, Item if output.format == "torch" else dict)

    def _located(self, numbers: Array, indices: object) -> Anchors:
        index = self.reader.index()
        if numbers.ndim not in (1, 2) or (numbers.size and numbers.dtype.kind not in "iu"):
            raise SchemaError(f"dataset: got {shortly(indices)}, expected whole numbers, the positions of items")
        if numbers.ndim == 2:
            return items_at(self.reader, index, numbers)
        outside = (numbers < -len(index)) | (numbers >= len(index))
        if outside.any():
            raise IndexError(_outside(int(numbers[outside][0]), len(index)))
        return index.locate(numbers.astype(np.int64) % len(index))


def items_at(reader: BatchReader, index: Index, indices: Array) -> Anchors:
    """The anchors (B,) of items that are given by the indices of a batch.

    Args:
        reader: the reader of the items.
        index: the items that exist.
        indices: (B, 2) serials and timesteps, as `_indices` of a batch; for whole episodes and crops (B, 1) serials, as
            `_index`. With several folders the number of the folder comes first, one column more.

    Raises:
        SchemaError: the shape is another, or the options leave such an item out.
        NotEnoughDataError: there are no items.
        StaleEpisodeError: an episode is gone, and `on_stale` is "raise".
    """
    by_folder, by_step = not reader.folders.single, not reader.selection.view.per_episode
    width = 1 + by_folder + by_step
    if indices.shape[1] != width:
        names = ", ".join(["folder"] * by_folder + ["serial"] + ["timestep"] * by_step)
        raise SchemaError(
            f"batch: got indices of shape {indices.shape}, expected positions (B,), or (B, {width}): {names}, as "
            f"{'`_indices`' if by_step else '`_index`'} of a batch of these options has them"
        )
    reader.require(index)
    columns = indices.astype(np.int64)
    serial, t = columns[:, int(by_folder)], columns[:, -1] if by_step else np.zeros(len(columns), np.int64)
    folder = columns[:, 0] if by_folder else None
    anchors, exists = index.find(folder, serial, t)
    anchors = index.followed(anchors)
    if all_of(exists):
        return anchors
    missing = np.flatnonzero(~exists)
    missing_anchors = anchors.where(missing)
    _require_gone(reader, missing_anchors)
    if reader.on_stale == "raise":
        raise reader.gone(missing_anchors.serial)
    rng = form_of(reader.output.format).rng()
    return anchors.replaced(missing, reader.crop(index.draw_like(missing_anchors, rng), lambda: rng))


def _require_gone(reader: BatchReader, missing: Anchors) -> None:
    """Raise SchemaError unless each missing item's episode or timestep is gone: else the options leave it out."""
    folders, numbers = reader.folders, np.zeros_like(missing.serial) if missing.folder is None else missing.folder
    folders.reach(numbers)
    tables = {number: table for number, _, table in folders.by_number(folders.tables)}
    for number, serial, t in zip(numbers.tolist(), missing.serial.tolist(), missing.t.tolist(), strict=True):
        if number not in tables:
            raise SchemaError(f"batch: folder {number}: there is none of that number; the folders are {[*tables]}")
        table = tables[number]
        slots = table.visible[table.serial[table.visible] == serial]
        if slots.size and not 0 <= t < table.start[slots[0]]:  # below `start`: a ring trimmed the timestep away
            length = table.length[slots[0]]
            remedy = "give the options by which it was drawn, or others that include it"
            if t == length:
                remedy = f"a final observation, if there is one, is `next_` of timestep {t - 1} with n_steps=1"
            raise SchemaError(
                f"batch: timestep {t} of episode {serial}, of {length} timesteps, is no item for "
                f"{reader.selection.describe()}; {remedy}"
            )


def _outside(position: int, items: int) -> str:
    """The error's text for a position beyond the items; a worker's dataset is a copy, so `refresh` is no remedy."""
    torch = loaded_torch()
    if torch is None or torch.utils.data.get_worker_info() is None:
        return f"item {position}: the dataset has {items}; call refresh() to see newer ones"
    return (
        f"item {position}: this worker's copy of the dataset has {items}, those of when the worker was started; after "
        "refresh() make the DataLoader anew, or leave out persistent_workers=True, or take buffer.dataloader(…), whose "
        "workers read what the main process draws"
    )


def _not_by_position(option: str, value: object, more: str = "") -> SchemaError:
    return SchemaError(
        f"dataset: {option}={value!r} says which items are drawn, and here they are asked for by position, as a "
        f"DataLoader of your own does; use buffer.dataloader(batch_size, dataset=…){more}, or leave {option} out"
    )


def rng_of(anchors: Anchors) -> np.random.Generator:
    """The generator for the transforms of a batch, fixed by the random number of its first item."""
    assert anchors.chance is not None
    return np.random.default_rng(anchors.chance[:1])


def handed_out(reader: BatchReader, data: Any, device: Any) -> Any:
    """A finished batch, as a named tuple and on a device if these are asked for."""
    if reader.output.tuple_names:
        data = named(data, reader.output.tuple_names)
    return data if device is None else form_of(reader.output.format).move(data, device)


def batch_of(reader: BatchReader, indices: Any, device: Any) -> Any:
    """A batch of the items at some positions (B,) or with some `_indices`, None for all, as a loader would give it."""
    index = reader.index(refresh=True)
    reader.require(index)
    numbers = np.arange(len(index)) if indices is None else to_numpy(indices)
    if numbers.ndim not in (1, 2) or numbers.dtype.kind not in "iu" or not numbers.size:
        raise SchemaError(
            f"batch: got {shortly(indices)}, expected positions (B,) of items or their `_indices`, whole numbers, at "
            f"least one{of_mask(numbers)}"
        )
    return handed_out(reader, ItemDataset(reader).at(numbers).data, device)
