"""How batches cross from a worker process: several in one block of shared memory, and the block is used again.

PyTorch sends each tensor as a shared-memory file of its own, opened, mapped, faulted in and unmapped on both sides,
which takes longer than reading the tensor. Here a task is several batches. The worker (`Carrier`) copies all their
tensors into one block, and sends the batches with a `Leaf` in the place of each tensor; the block's file crosses the
first time only. The main process (`Arrivals`) makes tensors that are views of the block. The block's first byte is 1
while any view lives, and the main process clears it when the last one dies: so a worker never writes into a block that
is in use, and neither side waits. `datasets.EpisodeLoader` makes both ends.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import ExceptionWrapper  # what PyTorch's own workers send: it pickles whatever was raised
from torch.utils.data import Dataset, get_worker_info

from memmap_buffer.dtypes import NUMERIC, Array
from memmap_buffer.format.syscalls import process_id
from memmap_buffer.views.gather import RaggedRows
from memmap_buffer.views.memory_pool import ALIGN, array_over

TASK_BATCHES = 16  # the most batches that cross together: 10,600 batches a second, and 1,200 one at a time
TASK_BYTES = 1 << 20  # the most bytes that cross together: larger batches cross one by one
WORKER_TASKS = 8  # the fewest tasks of each worker in an epoch, so that all end at about the same time
SENT = frozenset(np.dtype(name) for name in NUMERIC if name != "bfloat16")  # dtypes of arrays that cross in blocks
SPARE = 2  # the unused blocks that a worker keeps


def map_leaves(data: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A batch with `change` applied to each `kind` object in it, within dicts, lists, tuples and named tuples too."""
    if isinstance(data, kind):
        return change(data)
    if type(data) is dict:
        return {key: map_leaves(value, kind, change) for key, value in data.items()}
    if isinstance(data, dict):
        clone = copy.copy(data)
        clone.update((key, map_leaves(value, kind, change)) for key, value in data.items())
        return clone
    if type(data) in (list, RaggedRows):
        text = data and type(data[0]) is str  # a text field has one str a row
        return data if text else type(data)(map_leaves(value, kind, change) for value in data)
    if isinstance(data, tuple):
        values = (map_leaves(value, kind, change) for value in data)
        return data._make(values) if hasattr(data, "_make") else tuple(values) if type(data) is tuple else data
    return data


class Leaf:
    """The place of a tensor in its block. It is no tuple, so that no tuple in a user's batch is taken for one.

    Args:
        dtype: the tensor's dtype.
        start: the offset of the tensor in the block, in elements of that dtype.
        shape: the tensor's shape.
        stride: the tensor's strides, in elements.
    """

    __slots__ = ("dtype", "shape", "start", "stride")

    def __init__(self, dtype: torch.dtype, start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.dtype, self.start, self.shape, self.stride = dtype, start, shape, stride

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dtype, self.start, self.shape, self.stride)


class ArrayLeaf(Leaf):
    """The place of a numpy array, which becomes an array again on arrival."""

    __slots__ = ()


class Task(NamedTuple):
    """Work for a worker: the anchors of several batches, and how many epochs the loader had begun by then."""

    epoch: int
    batches: Sequence[Any]


class Tasks:
    """The batches of a sampler, grouped into tasks: one batch a task, until `learn` has told how large batches are.

    Args:
        sampler: a batch sampler with a length.
        workers: the number of processes that share an epoch's tasks.
        most: the most batches of a task.
    """

    def __init__(self, sampler: Any, workers: int, most: int = TASK_BATCHES) -> None:
        self._sampler = sampler
        self._workers = workers
        self._most = most
        self._epoch = 0
        self._size = 1

    def __iter__(self) -> Iterator[Task]:
        self._epoch += 1
        most = max(1, len(self._sampler) // (self._workers * WORKER_TASKS))
        batches = (batch for batch in self._sampler)  # Lightning's iterator begins anew at `iter`, which islice calls
        while group := list(islice(batches, min(self._size, most))):
            yield Task(self._epoch, group)

    def learn(self, nbytes: int) -> None:
        """Set the size of the next tasks by the bytes of one batch."""
        self._size = max(1, min(self._most, TASK_BYTES // max(nbytes, 1)))


class Shipment(NamedTuple):
    """A task's batches on their way to the main process.

    Args:
        worker: the number of the process that sends them.
        block: the worker's number of the block that holds their tensors.
        nbytes: the bytes of the block that are in use.
        memory: the block itself, when it is sent for the first time; else None.
        dropped: the numbers of blocks that the worker has freed.
        batches: each batch with a `Leaf` for each tensor, or the exception that was raised in its place.
    """

    worker: int
    block: int
    nbytes: int
    memory: torch.Tensor | None
    dropped: tuple[int, ...]
    batches: list[Any]


class Carrier(Dataset[Shipment]):
    """The dataset of the worker processes: a task in, a shipment out.

    Args:
        dataset: reads a batch by `__getitems__`. A worker gets the copy that `dataset.by_anchors()` makes.
        collate: the loader's collate function.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self._collate = collate
        self._blocks = Blocks()
        self._epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "dataset": self.dataset.by_anchors()}

    def __getitems__(self, task: Task) -> Shipment:
        if task.epoch != self._epoch:
            # The main process drops the shipments of an abandoned epoch unopened, so their blocks never come back.
            self._blocks, self._epoch = Blocks(), task.epoch
        info = get_worker_info()
        number = 0 if info is None else info.id
        layout = Packing()
        batches = [layout.add(self._made(anchors, number)) for anchors in task.batches]
        block, memory, new = self._blocks.take(layout.nbytes)
        layout.copy_to(memory)
        dropped = self._blocks.drop_spare()
        return Shipment(number, block, layout.nbytes, memory if new else None, dropped, batches)

    def _made(self, anchors: Any, worker: int) -> Any:
        try:
            return self._collate(self.dataset.__getitems__(anchors))
        except Exception:  # `Arrivals` raises it in the place of this batch; the task's other batches are kept
            return ExceptionWrapper(where=f"in DataLoader worker process {worker}")  # type: ignore[no-untyped-call]


def unchanged(shipment: Shipment) -> Shipment:
    """The collate function of a carrier's DataLoader: a shipment is complete already."""
    return shipment


class Packing:
    """The places of the tensors of several batches in one block, from offset `ALIGN` on: byte 0 is the block's own."""

    def __init__(self) -> None:
        self.nbytes = ALIGN
        self._parts: list[tuple[Leaf, torch.Tensor]] = []

    def add(self, batch: Any) -> Any:
        """Reserve places for a batch; returns it with a `Leaf` for each array and plain CPU tensor; others stay."""
        return map_leaves(map_leaves(batch, torch.Tensor, self._leaf), np.ndarray, self._leaf_of_array)

    def _leaf_of_array(self, array: npt.NDArray[Any]) -> Any:
        if type(array) is not np.ndarray or not array.flags.writeable or array.dtype not in SENT:
            return array
        return self._leaf(torch.from_numpy(np.ascontiguousarray(array)), ArrayLeaf)

    def _leaf(self, tensor: torch.Tensor, kind: type[Leaf] = Leaf) -> Any:
        plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
        if not plain or tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return tensor
        like = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")  # keeps the memory format
        leaf = kind(tensor.dtype, self.nbytes // tensor.itemsize, tuple(tensor.shape), like.stride())
        self._parts.append((leaf, tensor))
        self.nbytes += -(-tensor.nbytes // ALIGN) * ALIGN
        return leaf

    def copy_to(self, memory: torch.Tensor) -> None:
        """Copy the tensors to their places in a block, (nbytes,) uint8."""
        place = Unpacking(memory)
        for leaf, tensor in self._parts:
            place.tensor(leaf).copy_(tensor)


class Unpacking:
    """The tensors and arrays of leaves, as views of their block."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, leaf: Leaf) -> torch.Tensor:
        if leaf.dtype not in self._typed:
            self._typed[leaf.dtype] = self._memory.view(leaf.dtype)
        return self._typed[leaf.dtype].as_strided(leaf.shape, leaf.stride, leaf.start)

    def __call__(self, leaf: Leaf) -> Any:
        return self.tensor(leaf).numpy() if type(leaf) is ArrayLeaf else self.tensor(leaf)


class Blocks:
    """A worker's blocks of shared memory, (n,) uint8 each; byte 0 is 1 while the main process refers to the block."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}
        self._made = 0

    def take(self, nbytes: int) -> tuple[int, torch.Tensor, bool]:
        """(number, block, whether it is new) of a block of at least `nbytes`, marked as in use."""
        fits = [number for number in self._unused() if self._blocks[number].nbytes >= nbytes]
        if fits:
            number = min(fits, key=lambda n: self._blocks[n].nbytes)
        else:
            self._made += 1
            number = self._made
            step = 1 << max(nbytes.bit_length() - 4, 12)  # sizes are rounded up, so that similar batches share a block
            fresh = torch.empty(-(-nbytes // step) * step, dtype=torch.uint8)
            self._blocks[number] = fresh.share_memory_()  # type: ignore[no-untyped-call]
        block = self._blocks[number]
        block[0] = 1
        return number, block, not fits

    def drop_spare(self) -> tuple[int, ...]:
        """Free unused blocks, the smallest first, until `SPARE` are left; returns the numbers of the freed ones."""
        unused = sorted(self._unused(), key=lambda n: self._blocks[n].nbytes)
        dropped = tuple(unused[: max(0, len(unused) - SPARE)])
        for number in dropped:
            del self._blocks[number]
        return dropped

    def _unused(self) -> list[int]:
        return [number for number, block in self._blocks.items() if not block.numpy()[0]]


class Arrivals:
    """The batches of an epoch in the main process, as views of the blocks that they came in.

    Args:
        shipments: an iterator over what the workers send.
        tasks: the tasks of the epoch, which learn here how large batches are.
        pin: whether each block is copied to pinned memory.
    """

    def __init__(self, shipments: Iterator[Shipment], tasks: Tasks, pin: bool) -> None:
        self._shipments = shipments
        self._tasks = tasks
        self._pin = pin
        self._blocks: dict[tuple[int, int], torch.Tensor] = {}
        self._waiting: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._waiting:
            self._open(next(self._shipments))
        batch = self._waiting.popleft()
        if isinstance(batch, ExceptionWrapper):
            batch.reraise()  # type: ignore[no-untyped-call]
        return batch

    def _open(self, shipment: Shipment) -> None:
        self._tasks.learn(shipment.nbytes // len(shipment.batches))
        if shipment.memory is not None:
            self._blocks[shipment.worker, shipment.block] = shipment.memory
        memory = lend(self._blocks[shipment.worker, shipment.block], shipment.nbytes)
        for block in shipment.dropped:
            del self._blocks[shipment.worker, block]
        batches = shipment.batches
        if self._pin:
            memory = memory.pin_memory()
            batches = map_leaves(batches, torch.Tensor, torch.Tensor.pin_memory)
        self._waiting.extend(map_leaves(batches, Leaf, Unpacking(memory)))


def lend(block: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first `nbytes` of a block, (nbytes,) uint8; byte 0 is cleared when no tensor refers to them any more."""
    # Not in `_give_back`: the collector may call that while `torch.compile` traces, when no tensor has data.
    whole = block.numpy()
    array = array_over(whole, np.uint8, nbytes)
    weakref.finalize(array.base, _give_back, whole, process_id()).atexit = False
    return torch.from_numpy(array)


def _give_back(block: Array, process: int) -> None:
    if process_id() == process:  # not in a child that was forked since: the parent may still use the block
        block[0] = 0
