"""The ranks of torch.distributed, and how they agree on an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from memmap_buffer.errors import SchemaError
from memmap_buffer.reading.split import Ranks


@dataclass(frozen=True)
class ProcessRanks(Ranks):
    """The ranks of the default process group, if there is one when an epoch begins; else one process alone."""

    def now(self) -> Ranks:
        return ProcessRanks(dist.get_rank(), dist.get_world_size()) if _connected() else self

    @property
    def connected(self) -> bool:
        return self.world_size > 1

    def agree(self, value: dict[str, Any]) -> dict[str, Any]:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def require_equal(self, batches: int, error: Exception | None = None) -> None:
        """Raise SchemaError where ranks differ, so that none waits for ever for a gradient of another."""
        told: list[tuple[int, str]] = [(0, "")] * self.world_size
        dist.all_gather_object(told, (batches, "" if error is None else str(error)))
        wrong = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]
        if wrong and error is None:
            raise SchemaError(f"an epoch that not every rank can give: {'; '.join(wrong)}", ranks=len(wrong))
        counts = [count for count, _ in told]
        if not wrong and len(set(counts)) > 1:
            raise SchemaError(
                f"an epoch of unequal length: the ranks have {counts} batches; give each the same batch_size, "
                "drop_last and tail"
            )


def ranks_of(rank: int | None, world_size: int | None) -> Ranks:
    """The ranks as given; those of torch.distributed if none were, or if they are the same.

    Raises: SchemaError: one without the other, or no such rank.
    """
    if rank is None and world_size is None:
        return ProcessRanks()
    if rank is None or world_size is None:
        raise SchemaError(f"rank, world_size: got {rank!r}, {world_size!r}; give both, or none for torch.distributed's")
    given = Ranks(rank, world_size)
    same = _connected() and (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    return ProcessRanks() if same else given


def _connected() -> bool:
    return dist.is_available() and dist.is_initialized()
