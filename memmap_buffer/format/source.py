"""`Source` fetches the rows of a folder whose files are not all on this machine, before they are copied.

Readers do not know where the rows come from: they ask for rows, copy them, then ask whether all of them stayed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from memmap_buffer.format.episode_table import IntArray

if TYPE_CHECKING:
    from memmap_buffer.format.storage import Storage

BLOCK = 1 << 18  # the bytes of a file that are fetched, and given back, together
WINDOWS = 6  # windows of rows that a bound must have room for: reading ahead needs five, and some are larger


class Rows(NamedTuple):
    """Rows of a field: (N,) ranges of rows, low … high - 1 each."""

    name: str
    low: IntArray
    high: IntArray


Wanted: TypeAlias = "Sequence[tuple[Storage, Sequence[Rows]]]"


class Fetched(Protocol):
    """Rows that were there when they were about to be copied."""

    def unchanged(self) -> bool:
        """Whether all of these rows have been there ever since."""


class Traffic(Protocol):
    """The bytes that were fetched since some moment."""

    def tell(self, what: str) -> None:
        """Say in the log how much traffic `what` (an epoch, for example) caused."""


class Source(Protocol):
    """Fetches rows of one folder, and keeps what it fetched; several of one kind fetch together."""

    @property
    def limit(self) -> int | None:
        """The bytes that it keeps at most; None where it keeps everything."""

    def head(self) -> Mapping[str, bytes]:
        """File -> its bytes, for the files that are always there whole: all but the files of fields."""

    @property
    def num_rows(self) -> int:
        """The number of timesteps in the folder."""

    def sizes_of(self, fields: Sequence[str]) -> list[int]:
        """The size in bytes of each file of these fields."""

    def whole(self) -> Fetched | None:
        """All rows of the folder, if all are there; else None: ask for the rows by `bring`."""

    def bring(self, wanted: Wanted) -> Fetched:
        """Fetch rows of this folder and others that are not there yet, and wait for them."""

    def bring_later(self, wanted: Wanted) -> None:
        """Fetch rows of this folder and others in another thread; an error is raised only when they are read."""

    def traffic(self, storages: Sequence[Storage]) -> Traffic:
        """The traffic from now on, of this folder and others."""
