"""The part of an epoch that a rank gives: as many batches as every other rank, and a share of the last turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray


@dataclass(frozen=True)
class Ranks:
    """The processes that share an epoch, as they were given.

    Args:
        rank: of this process.
        world_size: how many there are.

    Raises:
        SchemaError: there can be no such rank.
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
        """The ranks as they are when an epoch begins."""
        return self

    @property
    def need_seed(self) -> bool:
        """Whether each would draw a seed of its own, as they can agree on none."""
        return self.world_size > 1 and not self.connected

    def require_seed(self, seed: int | None) -> int:
        """The seed of an epoch that begins. Raises SchemaError where there is none."""
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
        """The value that rank 0 gave; every rank must call it."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values that the ranks gave, by rank; every rank must call it."""
        return [value]

    def require_equal(self, batches: int, error: Exception | None = None) -> None:
        """Raise on every rank where one has an error, or not as many batches; every rank must call it."""


@dataclass(frozen=True)
class RankPartition:
    """The items that one rank gives of an epoch, by their numbers in its order.

    The ranks take turns, a batch each, so that what all have given is always the beginning of the epoch. A last turn
    that is not full is divided equally.

    Args:
        items: in the whole epoch.
        begin: how many of them were given before.
        batch_size: of one rank.
        ranks: which this is, of how many.
        drop_last: leave out an incomplete last batch.
        tail: items of the last turn that do not divide by the ranks: "pad" repeats a few more, "drop" leaves them out,
            "uneven" gives each once, so that the first ranks have one item more, or a batch.
    """

    items: int
    begin: int
    batch_size: int
    ranks: Ranks
    drop_last: bool
    tail: str

    @property
    def full(self) -> int:
        """Full turns."""
        return max(0, self.items - self.begin) // self._turn

    @property
    def last(self) -> int:
        """Items of this rank's last batch, if it is not full; 0 if there is none."""
        each, more = self._rest
        size = each + {"pad": more > 0, "drop": False, "uneven": self.ranks.rank < more}[self.tail]
        return 0 if self.drop_last and size < self.batch_size else size

    @property
    def before(self) -> int:
        """Batches that this rank gave before, if the ranks were as many then."""
        return self.begin // self._turn

    def __len__(self) -> int:
        """Batches of this rank."""
        return self.full + (self.last > 0)

    def num_given(self, batches: int) -> int:
        """How many items of the epoch all ranks have given after so many batches of each."""
        return min(self.begin + batches * self._turn, max(self.begin, self.items))

    def chunks(self, size: int) -> Iterator[IntArray]:
        """The numbers of this rank's items, (batches, items of a batch): first one batch, soon some `size` together."""
        at, step, most = 0, 1, max(1, size // self.batch_size)
        within = np.arange(self.batch_size)
        while at < self.full:
            turns = np.arange(at, min(at + step, self.full))
            yield self._first(turns, self.batch_size)[:, None] + within
            at, step = at + step, min(4 * step, most)
        if self.last:
            extra = min(self.ranks.rank, self._rest[1]) if self.tail == "uneven" else 0
            size = self._rest[0] if self.tail == "uneven" else self.last
            yield self._first(np.array([self.full]), size)[:, None] + extra + np.arange(self.last)

    @property
    def _rest(self) -> tuple[int, int]:
        """Of the last turn: items for each rank, and how many are left over."""
        return divmod(max(0, self.items - self.begin) % self._turn, self.ranks.world_size)

    @property
    def _turn(self) -> int:
        return self.batch_size * self.ranks.world_size

    def _first(self, turns: IntArray, size: int) -> IntArray:
        return self.begin + turns * self._turn + self.ranks.rank * size
