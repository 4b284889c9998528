"""A memory of skrl in a folder gives the transitions that its own has, and goes on from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skrl", reason="skrl is not installed")
import gymnasium
import torch
from skrl.memories.torch import Memory, RandomMemory

from memmap_buffer import NotEnoughDataError, SchemaMismatchError, verify
from memmap_buffer.interop.skrl import DiskMemory

SIZES = {"observations": 3, "next_observations": 3, "actions": 2, "rewards": 1}
NAMES = [*SIZES, "terminated"]


def declared(memory: Memory) -> Any:
    """A memory with the tensors of their SAC."""
    for name, size in SIZES.items():
        assert memory.create_tensor(name=name, size=size, dtype=torch.float32)
    assert memory.create_tensor(name="terminated", size=1, dtype=torch.bool)
    assert not memory.create_tensor(name="states", size=None)
    return memory


def play(num_envs: int, count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Steps as their agents give them: time limits are not told."""
    rng = torch.Generator().manual_seed(seed)
    steps, now = [], torch.rand(num_envs, 3, generator=rng)
    for _ in range(count):
        following = torch.rand(num_envs, 3, generator=rng)
        ended, late = (torch.rand(num_envs, 1, generator=rng) < p for p in (0.1, 0.05))
        more = {"actions": torch.rand(num_envs, 2, generator=rng), "rewards": torch.rand(num_envs, 1, generator=rng)}
        steps.append({"observations": now, "next_observations": following, "terminated": ended, "states": None, **more})
        now = torch.where(ended | late, torch.rand(num_envs, 3, generator=rng), following)
    return steps


def rows(tensors: list[torch.Tensor]) -> set[tuple[float, ...]]:
    return {tuple(row) for row in torch.cat([t.double().reshape(len(t), -1) for t in tensors], 1).tolist()}


@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_transitions_are_those_of_their_memory(tmp_path: Path, num_envs: int) -> None:
    sizes = {"memory_size": 60, "num_envs": num_envs, "device": "cpu"}
    theirs, memory = declared(RandomMemory(**sizes)), declared(DiskMemory(**sizes, folder=tmp_path, max_timesteps=8))
    for step in play(num_envs, 50):
        theirs.add_samples(**step)
        memory.add_samples(**step)
        (batch,) = memory.sample(NAMES, batch_size=5)
        assert len(rows(batch)) <= 5
    memory.save()
    expected = theirs.sample(NAMES, batch_size=10_000)[0]
    (found,) = memory.sample_by_index(NAMES, indexes=range(50 * num_envs))
    assert rows(found) == rows(expected) and len(memory) == 50 * num_envs
    assert [(t.shape[1:], t.dtype) for t in found] == [(t.shape[1:], t.dtype) for t in expected]
    assert verify(tmp_path) == []


def test_mini_batches_share_a_batch_as_theirs_do(tmp_path: Path) -> None:
    sizes = {"memory_size": 60, "num_envs": 2, "device": "cpu"}
    theirs, memory = declared(RandomMemory(**sizes)), declared(DiskMemory(**sizes, folder=tmp_path))
    with pytest.raises(NotEnoughDataError, match="agent makes them"):
        DiskMemory(memory_size=60, folder=tmp_path).sample(NAMES, batch_size=5)
    for step in play(2, 20):
        theirs.add_samples(**step)
        memory.add_samples(**step)
    names = ["rewards", "states", "observations"]
    ours, expected = (m.sample(names, batch_size=10, mini_batches=3) for m in (memory, theirs))
    shapes = [[None if t is None else t.shape for t in batch] for batch in ours]
    assert shapes == [[None if t is None else t.shape for t in batch] for batch in expected]
    again = memory.sample_by_index(names, indexes=memory.get_sampling_indexes(), mini_batches=3)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(ours, again, strict=True))
    with pytest.raises(ValueError, match="single steps"):
        memory.sample(names, batch_size=10, sequence_length=2)


def test_a_run_goes_on_from_its_folder(tmp_path: Path) -> None:
    memory = declared(DiskMemory(memory_size=30, num_envs=2, device="cpu", folder=tmp_path))
    steps = play(2, 40)
    for step in steps[:20]:
        memory.add_samples(**step)
    memory.close()
    again = declared(DiskMemory(memory_size=30, num_envs=2, device="cpu", folder=tmp_path))
    assert len(again) == 40
    for step in steps[20:]:
        again.add_samples(**step)
    again.save()
    assert len(again) == 60
    again.reset()
    assert len(again) == 0
    again.close()
    with pytest.raises(SchemaMismatchError, match="capacity"):
        len(declared(DiskMemory(memory_size=31, num_envs=2, device="cpu", folder=tmp_path)))


def test_what_cannot_be_stored_is_told(tmp_path: Path) -> None:
    memory = declared(DiskMemory(memory_size=30, num_envs=2, device="cpu", folder=tmp_path))
    with pytest.raises(ValueError, match="no samples"):
        memory.add_samples()
    with pytest.raises(ValueError, match="Expected 'observations' of shape"):
        memory.add_samples(**play(3, 1)[0])
    with pytest.raises(ValueError, match="already"):
        memory.create_tensor(name="rewards", size=2, dtype=torch.float32)
    assert not memory.create_tensor(name="rewards", size=gymnasium.spaces.Box(0, 1, (1,)), dtype=torch.float32)
