"""Parts of the library's objects that no public door shows, each named here alone: a rebuild changes this one place.

A test asks for one of them only where neither a public method nor the files on the disk tell what it must know.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer import ConcatBuffer, ReplayBuffer
from memmap_buffer.format import syscalls

if TYPE_CHECKING:
    import pytest

# What a folder is, and what is written to it


def storage_of(buffer: ReplayBuffer) -> Any:
    """The folder as it is mapped: its files, layout, episode table and journal."""
    return buffer._storage


def slot_of(folder: Path, serial: int) -> int:
    """The slot of an episode, as the records on the disk tell it."""
    (slots,) = np.nonzero(np.load(folder / "episodes.npy")["serial"] == serial)
    return int(slots[-1])


def take_lock(buffer: ReplayBuffer) -> None:
    """Make it the writer of its folder, which settles what a dead one left, and write nothing else."""
    buffer.begin_episode().abort()


def files_of(buffer: ReplayBuffer) -> Any:
    """The files of the folder's writer, which has its lock then."""
    return buffer._writer.begin()


def turn_of(buffer: ReplayBuffer) -> Any:
    """The lock of the threads that write to the folder."""
    return buffer._writer.lock.turn


def open_episodes(buffer: ReplayBuffer) -> list[Any]:
    """The episodes that the folder's writer has open."""
    return buffer._writer.lock.episodes.every()


# What batches are drawn from


def folders_of(buffer: ReplayBuffer | ConcatBuffer) -> Any:
    """The folders that it reads as one."""
    return buffer._folders


def samplers_of(buffer: ReplayBuffer | ConcatBuffer) -> list[Any]:
    """The samplers that are kept, one for each set of options."""
    return [*buffer._samplers.values()]


def expect_no_slow_disk(buffer: ReplayBuffer) -> None:
    """As once it is known that no batch waits for a disk: what is traced takes as long as one that does."""
    for sampler in samplers_of(buffer):
        sampler.reader._disk.watches = False


# The writer


def shows_steps(buffer: ReplayBuffer) -> bool:
    """Whether each timestep is published at once."""
    return buffer._writer.how.publish == "step"


def slots_taken(buffer: ReplayBuffer) -> int:
    """How many slots are taken for open episodes."""
    return len(buffer._writer._slot_writers)


def next_serial(buffer: ReplayBuffer) -> int:
    """The number of the next episode, once it has the lock."""
    return buffer._writer._slots.next


def publishing_turn_of(buffer: ReplayBuffer) -> Any:
    """The lock of the threads that hand on a shard to be published."""
    return buffer._publisher.turn


def without_fallocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system that cannot give back a part of a file."""
    monkeypatch.setattr(syscalls, "_fallocate", None)
