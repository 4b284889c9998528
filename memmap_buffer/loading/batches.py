"""Batches as users get them, as arrays or tensors; and datasets of their items. It needs torch for tensors alone."""

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
    """The form that the columns of a batch take.

    Attributes:
        make: makes a batch of columns.
        unpadded: cuts sequences (B, T, …) to their lengths (B,).
        seed: draws a seed for what has none.
        move: brings a batch to a device.
    """

    make: Callable[[Columns], dict[str, Any]]
    unpadded: Callable[[Any, Any], Any]
    seed: Callable[[], int]
    move: Callable[[Any, Any], Any]

    def rng(self) -> np.random.Generator:
        """A generator for what has no seed."""
        return np.random.default_rng(self.seed())


@cache
def form_of(format: str) -> Form:
    """The form of the option `format`; torch is imported for the first batch of tensors."""
    if format == "numpy":
        return Form(arrays_of, _rows, numpy_seed, _stay)
    from memmap_buffer.loading import prefetch, tensors

    return Form(tensors.tensors_of, tensors.unpadded, tensors.torch_seed, prefetch.to_device)


def arrays_of(columns: Columns) -> dict[str, Any]:
    """Columns as arrays that numpy can compute with."""
    return {
        key: decode(values.view(np.ndarray), "bfloat16") if isinstance(values, BFloat16Bits) else values
        for key, values in columns.items()
    }


def numpy_seed() -> int:
    """A seed drawn from numpy's global generator: so `numpy.random.seed` fixes it."""
    return int(np.random.randint(2**63, dtype=np.uint64))


def _rows(values: Array, lens: Array) -> list[Array]:
    return RaggedRows(row[:n] for row, n in zip(values, lens.tolist(), strict=True))


def _stay(batch: Any, device: object) -> Any:
    raise SchemaError(
        f"device: got {device!r}, but arrays stay in this process's memory; leave it or format='numpy' out"
    )


def finished(reader: BatchReader, columns: Columns, rng: Callable[[], np.random.Generator]) -> Any:
    """A batch as (nested) arrays or tensors, ragged where the options say so, and transformed.

    Args:
        reader: what read it.
        columns: as it did.
        rng: makes the generator of the transforms that take one.
    """
    output, form = reader.output, form_of(reader.output.format)
    flat = form.make(columns)
    for key, lens in output.ragged.items():
        flat[key] = form.unpadded(flat[key], flat[lens].reshape(-1))
    for key in output.lists if output.jagged else ():
        if flat[LENGTHS + key].ndim == 1:  # of several timesteps an item they stay padded
            flat[key] = form.unpadded(flat[key], flat[LENGTHS + key])
    batch = nest(flat) if output.nested else flat
    return output.transformed(batch, rng) if output.transforms else batch


class Item(dict[str, Any]):
    """An item of a batch that was read whole; by its type PyTorch's default collate gives the whole batch."""


class Batch(Sequence[Any]):
    """A batch that was read whole, as a sequence of its items: views of its rows, so any collate works.

    Args:
        data: the batch.
        size: how many items it has.
        names: the keys of the named tuple that it becomes, or ().
        kind: of dict that an item is.
    """

    def __init__(self, data: Any, size: int, names: tuple[str, ...] = (), kind: type[dict[str, Any]] = Item) -> None:
        self.data = data
        self._size = size
        self._names = names
        self._kind = kind

    @property
    def whole(self) -> Any:
        """The batch as the user gets it: a dict of tensors, or a named tuple of them."""
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
    if type(data) is list and data and not isinstance(data[0], (str, list)):  # else text or ragged, one entry an item
        return [_item(value, i) for value in data]
    if not hasattr(data, "__getitem__") or getattr(data, "ndim", 1) == 0:
        return data
    if getattr(data, "is_nested", False):  # before PyTorch 2.6 it has no items
        start, stop = data.offsets()[i : i + 2].tolist()
        return data.values()[start:stop]
    return data[i]


def named(data: Any, names: tuple[str, ...]) -> Any:
    """A batch or an item as a named tuple of these keys, if there are any."""
    return make_tuple(names, [_at(data, key) for key in names]) if names else data


def _at(data: dict[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        if part not in value:  # a transform took it away
            raise SchemaError(f"to_named_tuple: the batch has no {key!r}; it has {', '.join(map(repr, data))}")
        value = value[part]
    return value


class ItemDataset:
    """A map-style dataset of one view's items, oldest episode first.

    It pickles as a path, options and the index, and each process maps the files itself. The index (36 bytes an episode)
    is shared by processes that are started with it. The number of items is of the last `refresh`; loaders made by
    `dataloader` refresh at every epoch. The workers of any other DataLoader have copies of when they were started: with
    `persistent_workers` make it anew after `refresh`.

    Args:
        reader: what reads its batches.
        weights: the shares of its folders, which a loader of the library's gives.
    """

    def __init__(self, reader: BatchReader, weights: Sequence[float] | None = None) -> None:
        self.reader = reader
        self.weights = weights

    def __len__(self) -> int:
        return len(self.reader.index())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.reader}: {len(self)} items>"

    def by_anchors(self) -> Self:
        """A copy for processes that take no positions: it pickles without the index."""
        other = copy.copy(self)
        other.reader = self.reader.by_anchors()
        return other

    def refresh(self) -> None:
        """Look for episodes that were published since."""
        self.reader.index(refresh=True)

    def __getitem__(self, i: Any) -> Any:
        """Item `i`, a dict or a named tuple without the batch axis; an episode has its own length."""
        return self.at([i])[0]

    def __getitems__(self, indices: Any) -> Batch:
        """Many items, read at once.

        Args:
            indices: positions.

        Raises:
            SchemaError: the options or the weights say which items are drawn.
            IndexError: there are not so many items.
        """
        if self.weights is not None:
            raise _not_by_position("weights", self.weights)
        if self.reader.selection.weight_by is not None:
            raise _not_by_position("weight_by", self.reader.selection.weight_by, " and shuffle=True")
        return self.at(indices)

    def at(self, indices: Any) -> Batch:
        """The items at some positions, or of some `_indices`.

        Args:
            indices: (B,) positions, or (B, …) as `items_at` takes them.

        Raises:
            SchemaError: they are neither, or items are drawn by priority.
            IndexError: there are not so many items.
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
    """The anchors of items that are named as a batch names them.

    Args:
        reader: of the items.
        index: the items that exist.
        indices: (B, 2) serials and timesteps, `_indices`; of whole episodes and crops (B, 1) serials, `_index`. With
            several folders the number of the folder comes first, one column more.

    Raises:
        SchemaError: the shape is another, or the options leave such an item out.
        NotEnoughDataError: there are no items.
        StaleEpisodeError: an episode is gone, and no other item may stand for it.
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
    anchors, there = index.find(folder, serial, t)
    anchors = index.followed(anchors)
    if all_of(there):
        return anchors
    missing = np.flatnonzero(~there)
    lost = anchors.where(missing)
    _require_gone(reader, lost)
    if reader.on_stale == "raise":
        raise reader.gone(lost.serial)
    rng = form_of(reader.output.format).rng()
    return anchors.replaced(missing, reader.crop(index.draw_like(lost, rng), lambda: rng))


def _require_gone(reader: BatchReader, lost: Anchors) -> None:
    """Raise SchemaError where an item is missing though its timestep is there, or never was."""
    folders, numbers = reader.folders, np.zeros_like(lost.serial) if lost.folder is None else lost.folder
    folders.reach(numbers)
    tables = {number: table for number, _, table in folders.by_number(folders.tables)}
    for number, serial, t in zip(numbers.tolist(), lost.serial.tolist(), lost.t.tolist(), strict=True):
        if number not in tables:
            raise SchemaError(f"batch: folder {number}: there is none of that number; the folders are {[*tables]}")
        table = tables[number]
        slots = table.visible[table.serial[table.visible] == serial]
        if slots.size and not 0 <= t < table.start[slots[0]]:  # those a ring has forgotten
            length = table.length[slots[0]]
            remedy = "give the options by which it was drawn, or others that include it"
            if t == length:
                remedy = f"a final observation, if there is one, is `next_` of timestep {t - 1} with n_steps=1"
            raise SchemaError(
                f"batch: timestep {t} of episode {serial}, of {length} timesteps, is no item for "
                f"{reader.selection.describe()}; {remedy}"
            )


def _outside(position: int, items: int) -> str:
    """The error's text for a position beyond the items: a worker's dataset is a copy, which nobody can refresh."""
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
    """The generator of a batch."""
    assert anchors.chance is not None
    return np.random.default_rng(anchors.chance[:1])


def handed_out(reader: BatchReader, data: Any, device: Any) -> Any:
    """A finished batch as a named tuple, and on a device, where these are asked for."""
    if reader.output.tuple_names:
        data = named(data, reader.output.tuple_names)
    return data if device is None else form_of(reader.output.format).move(data, device)


def batch_of(reader: BatchReader, indices: Any, device: Any) -> Any:
    """A batch of the items at some positions or of some `_indices`, None for all, as a loader would give it."""
    index = reader.index(refresh=True)
    reader.require(index)
    numbers = np.arange(len(index)) if indices is None else to_numpy(indices)
    if numbers.ndim not in (1, 2) or numbers.dtype.kind not in "iu" or not numbers.size:
        raise SchemaError(
            f"batch: got {shortly(indices)}, expected positions (B,) of items or their `_indices`, whole numbers, at "
            f"least one{of_mask(numbers)}"
        )
    return handed_out(reader, ItemDataset(reader).at(numbers).data, device)
