"""The ranks of torch.distributed, how they agree on an epoch, and the samplers that trainers find in a loader.

Lightning replaces a loader's `sampler` unless it is a `DistributedSampler`, and to predict it makes another batch
sampler, of the same class, over that sampler. Accelerate takes the `batch_sampler` and shares its batches among the
ranks itself. So a loader's `sampler` (`EpochItems`) is this rank's part of an epoch, and its `batch_sampler`
(`EpochBatches`) the whole epoch; both pass on the batches of an `epochs.EpochSampler`. `EpisodeLoader` makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from memmap_buffer.dtypes import check_count
from memmap_buffer.errors import SchemaError
from memmap_buffer.items.rank_partition import Ranks
from memmap_buffer.loading.epochs import EpochSampler
from memmap_buffer.loading.tensors import torch_seed
from memmap_buffer.views.anchors import Anchors, MixedAnchors


@dataclass(frozen=True)
class ProcessRanks(Ranks):
    """The ranks of the default process group, if there is one when an epoch begins; else a single process."""

    def now(self) -> Ranks:
        return ProcessRanks(dist.get_rank(), dist.get_world_size()) if _connected() else self

    @property
    def connected(self) -> bool:
        return self.world_size > 1

    def agree(self, value: dict[str, Any]) -> dict[str, Any]:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def require_equal(self, batches: int, error: Exception | None = None) -> None:
        """Raise SchemaError where ranks differ, or none would ever end waiting for the gradients of another."""
        answers: list[tuple[int, str]] = self.gather((batches, "" if error is None else str(error) or repr(error)))
        wrong = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
        if wrong and error is None:
            raise SchemaError(f"an epoch that not every rank can give: {'; '.join(wrong)}", ranks=len(wrong))
        counts = [count for count, _ in answers]
        if not wrong and len(set(counts)) > 1:
            raise SchemaError(
                f"an epoch of unequal length: the ranks have {counts} batches; give each the same batch_size, "
                "drop_last and tail"
            )


def ranks_of(rank: int | None, world_size: int | None) -> Ranks:
    """The ranks of a loader: `ProcessRanks` if none are given, or if the given ones are those of torch.distributed.

    Raises:
        SchemaError: one of the two is given without the other, or there is no such rank.
    """
    if rank is None and world_size is None:
        return ProcessRanks()
    if rank is None or world_size is None:
        raise SchemaError(f"rank, world_size: got {rank!r}, {world_size!r}; give both, or none for torch.distributed's")
    ranks = Ranks(rank, world_size)
    is_same = _connected() and (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    return ProcessRanks() if is_same else ranks


def seed_of(seed: int | None, ranks: Ranks, generator: Any, *, by_chance: bool = True) -> int | None:
    """The seed of a loader: the given one, or one drawn from torch's generator.

    Args:
        seed: the option of the user, or None.
        ranks: the ranks of the loader.
        generator: torch's; None for the global one.
        by_chance: whether anything depends on the seed.

    Returns:
        The seed; None if each rank would draw another one and they cannot agree: then a state must bring it.

    Raises:
        SchemaError: `seed` is no whole number from 0.
    """
    if seed is None and not (ranks.need_seed and by_chance):
        seed = torch_seed(generator)
    if seed is None:
        return None
    check_count("seed", seed, 0)
    return int(seed)


def _connected() -> bool:
    return dist.is_available() and dist.is_initialized()


class Drawn(Sequence[Any]):
    """A batch that was drawn but not read, as a sequence of its items, for trainers that split, join or fill batches.

    Args:
        anchors: (B,) of the batch.
    """

    def __init__(self, anchors: Anchors | MixedAnchors) -> None:
        self.anchors = anchors

    def __len__(self) -> int:
        return self.anchors.size

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return Drawn(self.anchors.where(i))
        position = range(len(self))[i]
        return self.anchors.where(slice(position, position + 1))

    def __add__(self, others: Sequence[Any]) -> list[Any]:
        return [*self, *others]


def anchors_of(batch: Any) -> Any:
    """The anchors of a batch as a sampler of this library gave it, or a trainer joined it; None for anything else."""
    if isinstance(batch, (Anchors, MixedAnchors)):
        return batch
    if isinstance(batch, Drawn):
        return batch.anchors
    is_list = type(batch) is list and batch and isinstance(batch[0], (Anchors, MixedAnchors))
    return type(batch[0]).joined(batch) if is_list else None


class EpochItems(DistributedSampler[Any]):
    """The items of each epoch: a loader's `sampler`, of a class that trainers do not replace.

    Args:
        dataset: the loader's dataset.
        order: the loader's sampler of batches.
        ranks: the rank whose part of an epoch is given; None for the whole epoch.
    """

    def __init__(self, dataset: Sized, order: EpochSampler[Any], ranks: Ranks | None) -> None:
        among = ranks or Ranks()
        super().__init__(dataset, num_replicas=among.world_size, rank=among.rank)  # type: ignore[arg-type]
        self.order = order
        self.whole = ranks is None

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(map(Drawn, self.order.whole() if self.whole else self.order))

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; without it epochs count up by themselves."""
        self.order.set_epoch(epoch)


class ItemsInOrder(EpochItems, SequentialSampler):
    """The items of each epoch without shuffling: Lightning's `overfit_batches` asks for a `SequentialSampler`."""


class EpochBatches(BatchSampler):
    """The batches of each epoch: a loader's `batch_sampler`. Trainers share out its batches, or make more of its class.

    Args:
        sampler: a loader's `EpochItems`, of a whole epoch or of a rank's part.
        batch_size: as in PyTorch.
        drop_last: as in PyTorch.

    Raises:
        SchemaError: `sampler` is another sampler.
    """

    sampler: EpochItems

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        if not isinstance(sampler, EpochItems):
            raise SchemaError(
                f"sampler: got a {type(sampler).__name__}, expected the loader's own: the order is the library's; "
                "where Lightning is to overfit, give the loader shuffle=False"
            )
        super().__init__(sampler, batch_size, drop_last)
        self.order = sampler.order if sampler.whole else sampler.order.complete(batch_size, drop_last)

    def __len__(self) -> int:
        return self.order.num_batches(Ranks()) if self.sampler.whole else len(self.order)

    def __iter__(self) -> Iterator[Any]:
        return map(Drawn, self.order.whole() if self.sampler.whole else self.order)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; without it epochs count up by themselves."""
        self.order.set_epoch(epoch)


def samplers_of(dataset: Sized, order: EpochSampler[Any]) -> tuple[EpochItems, EpochBatches]:
    """(sampler, batch sampler) of a loader: this rank's items, and the batches of the whole epoch."""
    kind = EpochItems if order.shuffle else ItemsInOrder
    whole = EpochBatches(kind(dataset, order, None), order.batch_size, order.drop_last)
    return kind(dataset, order, ProcessRanks().now()), whole
