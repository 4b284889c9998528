"""`Source` fetches the rows of a folder whose files are not all on this machine, before they are copied.

Readers know nothing of where it fetches them from: they ask for rows, copy them, then ask whether all of them stayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from memmap_buffer.format.episode_table import IntArray

if TYPE_CHECKING:
    from memmap_buffer.format.storage import Storage

BLOCK = 1 << 18  # bytes of a file that are fetched, and given back, together
WINDOWS = 6  # that a bound has room for where they are read ahead: five, as some are larger than others


class Rows(NamedTuple):
    """Rows of a field: (N,) ranges low … high - 1."""

    name: str
    low: IntArray
    high: IntArray


Wanted: TypeAlias = "Sequence[tuple[Storage, Sequence[Rows]]]"


class Fetched(Protocol):
    """Rows that were there when they were about to be copied."""

    def unchanged(self) -> bool:
        """Whether all of them were there all the time."""


class Traffic(Protocol):
    """The bytes that were fetched since some moment."""

    def tell(self, what: str) -> None:
        """Say in the log how much it was."""


class Source(Protocol):
    """Fetches rows of one folder, and keeps what it fetched; several of one kind fetch together."""

    @property
    def limit(self) -> int | None:
        """The bytes that it keeps at most; None where it keeps everything."""

    def head(self) -> Mapping[str, bytes]:
        """The files that are there whole: all but those of the fields."""

    @property
    def num_rows(self) -> int:
        """How many timesteps the folder has."""

    def sizes_of(self, fields: Sequence[str]) -> list[int]:
        """The bytes of each file that rows of fields are read from."""

    def whole(self) -> Fetched | None:
        """Everything, where all of it is there; else None: rows are to be asked for."""

    def bring(self, wanted: Wanted) -> Fetched:
        """Have rows there, of this folder and others."""

    def bring_later(self, wanted: Wanted) -> None:
        """Have rows fetched in a thread, of this folder and others; what fails is told when they are read."""

    def traffic(self, storages: Sequence[Storage]) -> Traffic:
        """The traffic from now on, of this folder and others."""
