"""What may not grow with the number of steps: the index, a draw, the start of a shuffled epoch. Counted, not timed.

The folders are forged: records of published episodes over files made of holes, so that 10^9 steps take no disk.
"""

from __future__ import annotations

import gc
import math
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import set_inside

from bench.data import forge
from memmap_buffer import ReplayBuffer, Window, verify

STEPS = 1000
BATCH = 16  # a fault in a hole has the system read zeros ahead, megabytes of them on some disks
FEW, MANY = 10**5, 10**9
FIELDS = {"x": ("float", 4), "reward": "float"}
DRAWS = {
    "steps": {"timestep_level": True},
    "windows": {"view": Window(16)},
    "5-step items": {"n_steps": 5, "gamma": 0.9, "terminated": None},
}
each_draw = pytest.mark.parametrize("options", DRAWS.values(), ids=DRAWS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Steps in all -> a folder of so many."""
    root = tmp_path_factory.mktemp("forged")
    return {steps: forge(root / str(steps), steps // STEPS, STEPS, FIELDS) for steps in (FEW, MANY)}


@pytest.fixture(scope="module")
def buffers(folders: dict[int, Path]) -> Iterator[dict[int, ReplayBuffer]]:
    opened = {steps: ReplayBuffer.from_folder(folder, read_only=True) for steps, folder in folders.items()}
    yield opened
    for buffer in opened.values():
        buffer.close()


def peak(action: Callable[[], Any]) -> tuple[int, int]:
    """(bytes that are kept, most bytes at a time) of what an action allocates, its result included."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = action()
        sizes = tracemalloc.get_traced_memory()
        del kept
        return sizes
    finally:
        tracemalloc.stop()


def faults(action: Callable[[], object]) -> int:
    """Pages that an action met for the first time."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    action()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt


# The folders that are counted on


def test_a_forged_folder_is_a_buffer_like_any_other_and_takes_no_disk(
    folders: dict[int, Path], buffers: dict[int, ReplayBuffer], tmp_path: Path
) -> None:
    assert buffers[MANY].num_steps == MANY
    assert buffers[MANY].serials[[0, -1]].tolist() == [0, MANY // STEPS - 1]
    taken = sum(path.stat().st_blocks for path in (folders[MANY] / "data").iterdir()) * 512
    assert taken < 1 << 20
    assert verify(forge(tmp_path / "forged", 3, 5, FIELDS)) == []
    with ReplayBuffer.from_folder(tmp_path / "forged") as changed:
        changed.delete(0)
        changed.store_episode(x=np.ones((2, 4)), reward=np.ones(2))
        assert changed.serials.tolist() == [1, 2, 3]


# Opening and the index


def opened(folder: Path) -> Any:
    """A buffer and a dataset of its steps, with their index."""
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    return buffer, buffer.dataset(timestep_level=True)


def test_opening_and_indexing_costs_the_same_memory_for_short_and_for_long_episodes(tmp_path: Path) -> None:
    short, long = (forge(tmp_path / str(steps), 10**4, steps, FIELDS) for steps in (2, 10**5))
    opened(short)
    assert peak(lambda: opened(long)) == pytest.approx(peak(lambda: opened(short)), rel=0.03)


def test_opening_and_indexing_costs_a_few_bytes_an_episode(folders: dict[int, Path]) -> None:
    opened(folders[FEW])
    few, many = (peak(lambda folder=folders[steps]: opened(folder)) for steps in (FEW, MANY))
    more = (MANY - FEW) // STEPS
    kept, most = ((b - a) / more for a, b in zip(few, many, strict=True))
    assert kept <= 100
    assert most <= 300


def test_opening_reads_no_page_of_any_step(folders: dict[int, Path]) -> None:
    found = opened(folders[MANY])
    assert resident(folders[MANY] / "data") == 0
    del found


def resident(folder: Path) -> int:
    """Bytes of the maps of a folder's files that this process has touched (proc(5), smaps)."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@each_draw
def test_the_index_takes_32_bytes_an_episode_whatever_the_view(
    buffers: dict[int, ReplayBuffer], options: dict[str, Any]
) -> None:
    index = buffers[MANY].dataset(**options).reader.index()
    arrays = [part for part in vars(index).values() if isinstance(part, np.ndarray)]
    assert sum(array.nbytes for array in arrays) <= 32 * (MANY // STEPS) + 8


# Draws


@each_draw
def test_a_draw_from_10000_times_the_steps_allocates_no_more(
    buffers: dict[int, ReplayBuffer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Asking the disk is no matter of size.
    set_inside(monkeypatch, answer_seconds=math.inf, disk_answer_seconds=math.inf)
    most = {}
    for steps, buffer in buffers.items():
        buffer.sample(BATCH, **options)  # what is kept for the next draws
        most[steps] = max(peak(lambda b=buffer: b.sample(BATCH, **options))[1] for _ in range(3))
    assert most[MANY] <= 1.1 * most[FEW] + 4096  # of other threads


@each_draw
def test_a_draw_meets_no_more_pages_than_it_has_rows(folders: dict[int, Path], options: dict[str, Any]) -> None:
    buffer = ReplayBuffer.from_folder(folders[MANY], read_only=True)
    buffer.sample(BATCH, **options)
    found = min(faults(lambda: buffer.sample(BATCH, **options)) for _ in range(3))
    across = 1.1  # a window of 16 rows of 16 bytes begins on one page and ends on the next, once in 16 times
    assert found <= len(FIELDS) * BATCH * across + 50


def test_what_is_drawn_comes_from_the_whole_of_the_store(buffers: dict[int, ReplayBuffer]) -> None:
    options: dict[str, Any] = {"timestep_level": True, "fields": (), "return_indices": True}
    serials = buffers[MANY].sample(4096, **options, seed=1)["_indices"][:, 0]
    by_tenth = np.bincount(serials.numpy() * 10 // (MANY // STEPS), minlength=10)
    assert by_tenth.min() > 300  # 410 are expected, and their standard deviation is 19


# Shuffled epochs


@each_draw
def test_a_shuffled_epoch_starts_without_a_permutation_in_memory(
    buffers: dict[int, ReplayBuffer], options: dict[str, Any]
) -> None:
    most = {}
    for steps, buffer in buffers.items():
        dataset = buffer.dataset(**options)
        start_epoch(buffer, dataset)
        most[steps] = peak(lambda b=buffer, d=dataset: start_epoch(b, d))[1]
    assert most[MANY] <= 1.5 * most[FEW] + (64 << 10)  # a permutation would take 8 GB
    assert most[MANY] < MANY / 100  # a permutation takes 30 bits a step


def start_epoch(buffer: ReplayBuffer, dataset: Any) -> Any:
    return next(iter(buffer.dataloader(BATCH, shuffle=True, seed=0, dataset=dataset)))


def test_a_shuffled_epoch_of_10_to_the_9_steps_repeats_none_of_its_first_100000(
    buffers: dict[int, ReplayBuffer],
) -> None:
    options: dict[str, Any] = {"timestep_level": True, "fields": (), "return_indices": True}
    loader = buffers[MANY].dataloader(10**4, shuffle=True, seed=1, **options)
    assert len(loader) == MANY // 10**4
    batches = [batch["_indices"].numpy() for batch, _ in zip(loader, range(10), strict=False)]
    serial, t = np.concatenate(batches).T
    number = serial * STEPS + t
    assert len(np.unique(number)) == 10**5
    assert abs(np.corrcoef(number[:-1], number[1:])[0, 1]) < 0.02  # nor are they in any order: 6 standard deviations


# A draw after each step that is recorded


@pytest.mark.parametrize(
    "options",
    [
        *DRAWS.values(),
        {"view": Window(16, boundary="continue")},
    ],
    ids=[*DRAWS, "windows that run on"],
)
def test_a_draw_after_a_step_that_is_added_allocates_no_more_for_100_times_the_episodes(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_inside(monkeypatch, answer_seconds=math.inf, disk_answer_seconds=math.inf)
    most = {}
    for episodes in (20, 2_000):
        with ReplayBuffer.from_folder(forge(tmp_path / str(episodes), episodes, 20, FIELDS), publish="step") as buffer:
            buffer.delete(0)  # for the slot of the episode that is recorded
            step = {"x": np.zeros(4, np.float32), "reward": 0.0}
            for _ in range(3):  # the first of an episode, and what is kept for the next draws
                buffer.add(**step)
                buffer.sample(BATCH, **options)
            peaks = []
            for _ in range(3):
                buffer.add(**step)
                peaks.append(peak(lambda b=buffer: b.sample(BATCH, **options))[1])
            most[episodes] = min(peaks)
    assert most[2_000] <= 1.1 * most[20] + 4096  # of other threads
