"""How batches cross from a worker process: several in one block of shared memory, and the block is used again.

PyTorch sends each tensor as a shared-memory file of its own, opened, mapped, faulted in and unmapped on both sides,
which costs more than reading it did. Here a task is several batches. The worker copies all their tensors into one block
and sends the batches with a `Leaf` in the place of each tensor; the block's file crosses the first time only. The
block's first byte says whether the main process still refers to it, and is cleared there when the last view dies; so a
worker never writes into a block that anybody sees, and neither side waits.
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

TASK_BATCHES = 16  # how many batches cross together at most: 10,600 a second, one at a time 1,200
TASK_BYTES = 1 << 20  # how many bytes cross together at most, so that large batches still come one by one
WORKER_TASKS = 8  # tasks that every worker has in an epoch at least, which makes tasks smaller: none is left waiting
SENT = frozenset(np.dtype(name) for name in NUMERIC if name != "bfloat16")  # arrays that cross as tensors do
SPARE = 2  # blocks that lie unused in a worker


def map_leaves(data: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A batch with every leaf of a kind changed; dicts, lists, tuples and named tuples are gone through."""
    if isinstance(data, kind):
        return change(data)
    if type(data) is dict:
        return {key: map_leaves(value, kind, change) for key, value in data.items()}
    if isinstance(data, dict):
        clone = copy.copy(data)
        clone.update((key, map_leaves(value, kind, change)) for key, value in data.items())
        return clone
    if type(data) in (list, RaggedRows):
        text = data and type(data[0]) is str  # a text field, one str a row
        return data if text else type(data)(map_leaves(value, kind, change) for value in data)
    if isinstance(data, tuple):
        values = (map_leaves(value, kind, change) for value in data)
        return data._make(values) if hasattr(data, "_make") else tuple(values) if type(data) is tuple else data
    return data


class Leaf:
    """The place of a tensor in its block; no tuple, so that none of a user's is taken for one.

    Args:
        dtype: of the tensor.
        start: of the tensor in the block, in its own elements, not bytes.
        shape: of the tensor.
        stride: of the tensor.
    """

    __slots__ = ("dtype", "shape", "start", "stride")

    def __init__(self, dtype: torch.dtype, start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.dtype, self.start, self.shape, self.stride = dtype, start, shape, stride

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dtype, self.start, self.shape, self.stride)


class ArrayLeaf(Leaf):
    """The place of an array."""

    __slots__ = ()


class Task(NamedTuple):
    """Work for a worker: the anchors of some batches, and the epoch of this loader that they belong to."""

    epoch: int
    batches: Sequence[Any]


class Tasks:
    """The batches of a sampler, several a task: as many as their size allows, once one was seen.

    Args:
        sampler: any batch sampler, which has a length.
        workers: how many share an epoch's tasks.
        most: batches a task at most.
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
        """Note how many bytes a batch takes."""
        self._size = max(1, min(self._most, TASK_BYTES // max(nbytes, 1)))


class Shipment(NamedTuple):
    """A task's batches on their way.

    Args:
        worker: the number of the process that sends them.
        block: the number of the block that they are packed in.
        nbytes: how many bytes of it they take.
        memory: the block itself, the first time; None afterwards.
        dropped: the numbers of blocks that the worker let go of.
        batches: each packed, or the exception that it raised.
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
        dataset: reads batches by `__getitems__`; a process that is started gets what its `by_anchors` gives.
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
            # Shipments of an epoch that was given up are thrown away unseen, so their blocks never come back.
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
        except Exception:  # raised where the batch is asked for; the others of the task are not lost
            return ExceptionWrapper(where=f"in DataLoader worker process {worker}")  # type: ignore[no-untyped-call]


def unchanged(shipment: Shipment) -> Shipment:
    """The collate function of a carrier's DataLoader."""
    return shipment


class Packing:
    """Where the tensors of some batches go in one block; the first `ALIGN` bytes of it are the block's own."""

    def __init__(self) -> None:
        self.nbytes = ALIGN
        self._parts: list[tuple[Leaf, torch.Tensor]] = []

    def add(self, batch: Any) -> Any:
        """The batch with a `Leaf` in the place of each array and plain tensor in memory; other tensors stay."""
        return map_leaves(map_leaves(batch, torch.Tensor, self._leaf), np.ndarray, self._leaf_of_array)

    def _leaf_of_array(self, array: npt.NDArray[Any]) -> Any:
        if type(array) is not np.ndarray or not array.flags.writeable or array.dtype not in SENT:
            return array
        return self._leaf(torch.from_numpy(np.ascontiguousarray(array)), ArrayLeaf)

    def _leaf(self, tensor: torch.Tensor, kind: type[Leaf] = Leaf) -> Any:
        plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
        if not plain or tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return tensor
        like = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")  # keeps channels last
        leaf = kind(tensor.dtype, self.nbytes // tensor.itemsize, tuple(tensor.shape), like.stride())
        self._parts.append((leaf, tensor))
        self.nbytes += -(-tensor.nbytes // ALIGN) * ALIGN
        return leaf

    def copy_to(self, memory: torch.Tensor) -> None:
        """Copy the tensors to their places."""
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
    """A worker's blocks of shared memory, (n,) uint8 each; the first byte is 1 while the other side refers to it."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}
        self._made = 0

    def take(self, nbytes: int) -> tuple[int, torch.Tensor, bool]:
        """A block of at least `nbytes`: its number, itself, and whether it is new."""
        fits = [number for number in self._unused() if self._blocks[number].nbytes >= nbytes]
        if fits:
            number = min(fits, key=lambda n: self._blocks[n].nbytes)
        else:
            self._made += 1
            number = self._made
            step = 1 << max(nbytes.bit_length() - 4, 12)  # batches of nearly equal length share
            fresh = torch.empty(-(-nbytes // step) * step, dtype=torch.uint8)
            self._blocks[number] = fresh.share_memory_()  # type: ignore[no-untyped-call]
        block = self._blocks[number]
        block[0] = 1
        return number, block, not fits

    def drop_spare(self) -> tuple[int, ...]:
        """Let go of unused blocks but for `SPARE`, the smallest first; return their numbers."""
        unused = sorted(self._unused(), key=lambda n: self._blocks[n].nbytes)
        dropped = tuple(unused[: max(0, len(unused) - SPARE)])
        for number in dropped:
            del self._blocks[number]
        return dropped

    def _unused(self) -> list[int]:
        return [number for number, block in self._blocks.items() if not block.numpy()[0]]


class Arrivals:
    """The batches of an epoch in this process, as views of the blocks that they came in.

    Args:
        shipments: from the workers.
        tasks: the tasks of the epoch, which learn how large batches are.
        pin: copy each block to pinned memory.
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
    """The first bytes of a block, whose own first byte is cleared when nothing refers to them any more."""
    whole = block.numpy()  # here, as while `torch.compile` traces, where memory may be collected, no tensor has data
    array = array_over(whole, np.uint8, nbytes)
    weakref.finalize(array.base, _give_back, whole, process_id()).atexit = False
    return torch.from_numpy(array)


def _give_back(block: Array, process: int) -> None:
    if process_id() == process:  # not in a child that was forked since: the parent may still see the block
        block[0] = 0
