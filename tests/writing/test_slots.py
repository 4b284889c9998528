"""Which slot is written next, as whoever opens the folder in the middle of it sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memmap_buffer import ReplayBuffer
from memmap_buffer.writing.commit import WriteHandles


@pytest.mark.parametrize("spare_slots", [1, 3])
@pytest.mark.parametrize("capacity", [None, 16])
def test_while_a_slot_is_overwritten_no_retired_episode_comes_back(tmp_path, monkeypatch, capacity, spare_slots):
    """Also where a short one would be within `capacity` again, were a longer one overwritten before it."""
    seen: list[tuple[list[int], list[int]]] = []
    begin = WriteHandles.write_generation

    def watched(self: WriteHandles, *where: Any) -> None:
        before = ReplayBuffer.from_folder(tmp_path, read_only=True).serials.tolist()
        begin(self, *where)
        seen.append((before, ReplayBuffer.from_folder(tmp_path, read_only=True).serials.tolist()))

    monkeypatch.setattr(WriteHandles, "write_generation", watched)
    rng = np.random.default_rng(0)
    options = {"circular": True, "capacity": capacity, "spare_slots": spare_slots}
    for number in range(200):
        if number % 2 == 0:  # a new writer finds the slots as they are
            buffer = ReplayBuffer(tmp_path, 5, 6, {"x": "int"}, **options)
        if number % 7 == 3:
            buffer.begin_episode().abort()
        buffer.store_episode(x=np.arange(rng.integers(1, 7)))
    assert len(seen) == 200
    assert all(shown == before for before, shown in seen)
    assert all(len(before) > 1 for before, _ in seen[10:])


def test_a_fresh_buffer_fills_from_slot_0_and_a_full_ring_goes_round(tmp_path):
    with ReplayBuffer(tmp_path, 3, 2, {"x": "int"}, circular=True) as buffer:
        slots = []
        for number in range(8):
            buffer.store_episode(x=[number])
            slots.append(int(buffer._storage.refresh().visible[-1]))
    assert slots == [0, 1, 2, 3, 0, 1, 2, 3]
