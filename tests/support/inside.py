"""Parts of the library's objects that no public door shows, each named here alone: a rebuild changes this one place.

A test asks for one of them only where neither a public method nor the files on the disk tell what it must know.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer import ConcatBuffer, ReplayBuffer
from memmap_buffer.format import layout, syscalls
from memmap_buffer.format.folder import Folder

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


def let_go(buffer: ReplayBuffer) -> None:
    """Give the lock of its folder to others, as at the end of the process."""
    buffer._writer.close()


# Copies and what is published


@contextmanager
def after_each_call(patch: pytest.MonkeyPatch, module: str, name: str, work: Callable[[int], Any]) -> Iterator[None]:
    """`work(n)` after the n-th call of a function of `maintenance`, as if a writer did it meanwhile."""
    place = import_module(f"memmap_buffer.maintenance.{module}")  # only now, as few tests need it
    real, counted = getattr(place, name), itertools.count()

    def slow(*arguments: Any) -> Any:
        value = real(*arguments)
        work(next(counted))
        return value

    patch.setattr(place, name, slow)
    yield


def after_each_packed_episode(patch: pytest.MonkeyPatch, work: Callable[[int], Any]) -> AbstractContextManager[None]:
    """`work(n)` after the rows of the n-th episode were packed."""
    return after_each_call(patch, "pack", "_copy_arrays", work)


def after_each_copied_slot(patch: pytest.MonkeyPatch, work: Callable[[int], Any]) -> AbstractContextManager[None]:
    """`work(n)` after the rows of the n-th episode were copied for a snapshot."""
    return after_each_call(patch, "snapshot", "_copy_slot", work)


def before_the_rest_is_asked_for(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work before a snapshot asks whether the episodes that it has not have retired."""
    from memmap_buffer.maintenance import snapshot

    real = snapshot._retired

    def late(*arguments: Any) -> bool:
        work()
        return real(*arguments)

    patch.setattr(snapshot, "_retired", late)


def publish_now(buffer: ReplayBuffer) -> None:
    """Begin a thread that publishes each shard that is finished, as a recorder does with the next one."""
    buffer._publisher.begin()


def root_with_shards(store: Any, root: Any, new: dict[str, Any]) -> Any:
    """The list of a root at a URL with more shards, each with its head."""
    from memmap_buffer.maintenance import publish

    return publish._with_shards(store, root, new)


def disk_sample_of(storage: Any) -> Any:
    """The timesteps by which the speed of a disk is measured."""
    from memmap_buffer.maintenance import disk

    return disk._Sample(storage)


def sampled_rows(sample: Any, name: str) -> Any:
    """The rows of a field that a sample has."""
    return sample._places[name].begin


# Folders at a URL


def mirrors_of(buffer: ReplayBuffer | ConcatBuffer) -> list[Any]:
    """The local copies, in part, of the folders at a URL that it reads."""
    return [storage.mirror for storage in folders_of(buffer).storages]


def mirror_of(buffer: ReplayBuffer) -> Any:
    """The local copy, in part, of the folder at a URL that it reads."""
    (mirror,) = mirrors_of(buffer)
    return mirror


def locks_of(buffer: ConcatBuffer) -> list[Any]:
    """The locks that its threads hold while they look for folders and fetch blocks."""
    mirrors = mirrors_of(buffer)
    return [*(mirror.blocks._changed for mirror in mirrors), folders_of(buffer)._lock, mirrors[0].cache._turn]


def retry(buffer: ConcatBuffer, tries: int) -> None:
    """Have each request of its store be made so often before it is given up."""
    for store in {mirror.objects for mirror in mirrors_of(buffer)}:
        store._tries = tries


def before_asking_again(patch: pytest.MonkeyPatch, work: Callable[[], Any]) -> None:
    """Work after each request that failed, before it is known whether it is made again."""
    from memmap_buffer.remote import objects

    may_pass = objects._may_pass

    def late(error: Exception) -> bool:
        work()
        return may_pass(error)

    patch.setattr(objects, "_may_pass", late)


def give_back(mirror: Any, block: int) -> bool:
    """Give the space of a block back, unless somebody is at it."""
    from memmap_buffer.remote import cache

    with Folder(mirror.path).held() as folder:
        return cache._give_back(folder, mirror.blocks, mirror.files, block)


def keep_blocks(patch: pytest.MonkeyPatch) -> None:
    """As where every block is in use, so that none can be given back."""
    from memmap_buffer.remote import cache

    patch.setattr(cache.Cache, "_give_back", lambda self, size, keep: 0)


def forget_schemas() -> None:
    """As in a process that has opened no folder."""
    layout._schema_of.cache_clear()


def num_schemas_parsed() -> int:
    """How many documents were parsed since they were forgotten."""
    return layout._schema_of.cache_info().misses
