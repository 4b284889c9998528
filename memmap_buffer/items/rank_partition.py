"""`RankPartition`: the items of an epoch that one rank of a distributed training reads; and `Ranks`, the ranks.

`loading.epochs` makes one for each epoch, also for a single rank. `loading.distributed` has `Ranks` with connections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray


@dataclass(frozen=True)
class Ranks:
    """The processes that share an epoch: those that the user gave by number, without a connection between them.

    Args:
        rank: the number of this process.
        world_size: the number of processes.

    Raises:
        SchemaError: the numbers are not whole numbers with 0 ≤ rank < world_size.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        whole = type(self.rank) is int and type(self.world_size) is int
        if not (whole and 0 <= self.rank < self.world_size):
            raise SchemaError(
                f"rank, world_size: got {self.rank!r}, {self.world_size!r}, expected whole numbers with "
                "0 ≤ rank < world_size"
            )

    def now(self) -> Ranks:
        """The ranks at the begin of an epoch."""
        return self

    @property
    def need_seed(self) -> bool:
        """Whether the user must give a seed: several ranks that cannot agree on one."""
        return self.world_size > 1 and not self.connected

    def require_seed(self, seed: int | None) -> int:
        """The seed of an epoch that begins. Raises SchemaError: it is None."""
        if seed is None:
            raise SchemaError(
                "seed: got None, and the ranks that were given cannot agree on one; give all the same, or load a state"
            )
        return seed

    @property
    def connected(self) -> bool:
        """Whether `agree` reaches the other ranks."""
        return False

    def agree(self, value: dict[str, Any]) -> dict[str, Any]:
        """The value of rank 0; every rank must call it."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; every rank must call it."""
        return [value]

    def require_equal(self, batches: int, error: Exception | None = None) -> None:
        """Raise on every rank if one has an error, or another number of batches; every rank must call it."""


@dataclass(frozen=True)
class RankPartition:
    """The items that one rank reads of an epoch, by their numbers in its order.

    The ranks take turns, a batch each, so that the items that all ranks together have read are always the first ones of
    the epoch. A last turn that is not full is divided equally.

    Args:
        items: the number of items in the whole epoch.
        begin: the number of items that were read before.
        batch_size: the items in a batch of one rank.
        ranks: this rank, and how many there are.
        drop_last: leave out an incomplete last batch.
        tail: the items of the last turn that cannot be divided equally: "pad": some are read twice; "drop": they are
            left out; "uneven": each is read once, so the first ranks have one more item, or one more batch.
    """

    items: int
    begin: int
    batch_size: int
    ranks: Ranks
    drop_last: bool
    tail: str

    @property
    def full(self) -> int:
        """The number of full turns."""
        return max(0, self.items - self.begin) // self._turn

    @property
    def last(self) -> int:
        """The number of items in this rank's batch of the last, incomplete turn; 0 if it has none."""
        share, more = self._rest
        size = share + {"pad": more > 0, "drop": False, "uneven": self.ranks.rank < more}[self.tail]
        return 0 if self.drop_last and size < self.batch_size else size

    @property
    def before(self) -> int:
        """The number of batches that this rank read before, if there were as many ranks then."""
        return self.begin // self._turn

    def __len__(self) -> int:
        """The number of batches of this rank."""
        return self.full + (self.last > 0)

    def num_given(self, batches: int) -> int:
        """The number of items of the epoch that are read, by all ranks together, after `batches` batches of each."""
        return min(self.begin + batches * self._turn, max(self.begin, self.items))

    def chunks(self, size: int) -> Iterator[IntArray]:
        """The numbers of this rank's items, (batches, items of a batch): first one batch, as it is waited for; then
        four times as many in each array, up to about `size` items.
        """
        turn, step, most_batches = 0, 1, max(1, size // self.batch_size)
        within = np.arange(self.batch_size)
        while turn < self.full:
            turns = np.arange(turn, min(turn + step, self.full))
            yield self._first(turns, self.batch_size)[:, None] + within
            turn, step = turn + step, min(4 * step, most_batches)
        if self.last:
            extra = min(self.ranks.rank, self._rest[1]) if self.tail == "uneven" else 0
            size = self._rest[0] if self.tail == "uneven" else self.last
            yield self._first(np.array([self.full]), size)[:, None] + extra + np.arange(self.last)

    @property
    def _rest(self) -> tuple[int, int]:
        """(items of the last, incomplete turn for each rank, items that are left over)."""
        return divmod(max(0, self.items - self.begin) % self._turn, self.ranks.world_size)

    @property
    def _turn(self) -> int:
        """The number of items in a full turn."""
        return self.batch_size * self.ranks.world_size

    def _first(self, turns: IntArray, size: int) -> IntArray:
        """The number of this rank's first item in each of `turns`, if each rank has `size` items in them."""
        return self.begin + turns * self._turn + self.ranks.rank * size
