"""Episodes for the commands: named by serial, and listed as a table of columns that can be filtered and sorted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from memmap_buffer import ReplayBuffer
from memmap_buffer.adapters import Array, EpisodeColumns, progress, tags_of
from memmap_buffer.cli.terminal import Problem

TRIES = 100
Read = TypeVar("Read")


def table_of(buffer: ReplayBuffer, reward: str = "reward") -> dict[str, Array]:
    """The columns of `EpisodeColumns`, with the returns and ends of all episodes."""
    table = EpisodeColumns(buffer, reward)
    for names in progress(_pending(table), "reading"):
        data = table.read(names)
        if data is None:
            table.follow()  # the ring has retired one of these episodes
        else:
            table.add(names, data)
    return table.columns


def _pending(table: EpisodeColumns) -> Iterator[Array]:
    while len(names := table.pending()):
        yield names


def marked_table_of(buffer: ReplayBuffer, reward: str = "reward") -> dict[str, Array]:
    """The columns of `table_of`, and the marks of the episodes."""
    table = table_of(buffer, reward)
    return table | tags_of(buffer, table["serial"][:, None])


def serials_of(buffer: ReplayBuffer, names: Sequence[str]) -> list[int]:
    """The serials of the episodes that `names` name: each a serial, a range such as 3-7, "first" or "last".

    Raises:
        Problem: a name is none of these, or there is no such episode.
    """
    there, serials = buffer.serials, []
    for name in names:
        if name in ("first", "last"):
            if not len(there):
                raise Problem(f"episode {name}: {buffer.folder} shows no episode")
            serials.append(int(there[0 if name == "first" else -1]))
            continue
        wanted = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", name)
        if wanted is None:
            raise Problem(f"episode {name!r}: expected its number, a range such as 3-7, 'first' or 'last'")
        low, high = int(wanted[1]), int(wanted[2] or wanted[1])
        inside = there[(there >= low) & (there <= high)].tolist()
        if not inside:
            have = f"{there[0]} to {there[-1]}" if len(there) else "none"
            raise Problem(f"episode {name}: the buffer does not show it; it has {have}")
        serials += inside
    return list(dict.fromkeys(serials))


def serial_of(buffer: ReplayBuffer, name: str) -> int:
    """The serial of the episode that `name` names; of a range the first."""
    return serials_of(buffer, [name])[0]


def read_episode(buffer: ReplayBuffer, serial: int) -> dict[str, Any]:
    """The episode of a serial, as `ReplayBuffer.episode` gives it, by dotted names. Errors as of `read_at`."""
    return buffer.schema.flatten(read_at(buffer, serial, buffer.episode))


def read_at(buffer: ReplayBuffer, serial: int, read: Callable[[int], Read]) -> Read:
    """The result of `read` for the position of an episode, named by serial.

    Raises:
        Problem: the episode is not visible any more.
    """
    for _ in range(TRIES):
        positions = np.flatnonzero(buffer.serials == serial).tolist()
        if not positions:
            break
        data = read(positions[0])
        # Serials only grow, so an episode that is still at its position was there all the time.
        if np.flatnonzero(buffer.serials == serial).tolist() == positions:
            return data
    raise Problem(f"episode {serial}: it is not there any more; the ring went on")
