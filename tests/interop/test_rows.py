"""Rows of steps without an end: every window of their newest steps is read, whatever parts they are stored in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import in_child

from memmap_buffer import Field, NotEnoughDataError, Prioritized, ReplayBuffer, SchemaError, SchemaMismatchError, verify
from memmap_buffer.interop.rows import Rows

FIELDS = {"group.x": Field("int64", (2,))}


def values(rows: int, times: Any) -> Any:
    """(B, T, 2) of steps that tell their row and time."""
    row, time = np.broadcast_arrays(np.arange(rows)[:, None], np.asarray(times)[None])
    return np.stack([row, time], axis=-1)


def added(rows: Rows, count: int) -> None:
    rows.add({"group.x": values(rows.num_rows, np.arange(rows.time, rows.time + count))})


def require_every_window(rows: Rows, length: int, window: int) -> None:
    assert rows.oldest <= max(0, rows.time - length)
    times = np.arange(rows.oldest, rows.time - window + 1)
    if not len(times):
        return
    for row in range(rows.num_rows):
        found = rows.read(np.full_like(times, row), times)["group.x"]
        assert np.array_equal(found[..., 1], times[:, None] + np.arange(window)) and (found[..., 0] == row).all()


@pytest.mark.parametrize(("window", "length", "num_rows"), [(2, 20, 1), (5, 13, 3), (1, 7, 2), (13, 13, 2)])
def test_every_window_of_the_newest_steps_is_read(tmp_path: Path, window: int, length: int, num_rows: int) -> None:
    rng = np.random.default_rng(0)
    rows = Rows(tmp_path, FIELDS, num_rows, length, window)
    for i in range(40):
        added(rows, int(rng.integers(1, 7)))
        if i % 15 == 14:
            rows.disk.close()
            before, rows = rows.time, Rows(tmp_path, FIELDS, num_rows, length, window)
            assert rows.time == before
        require_every_window(rows, length, window)
    rows.disk.close()
    assert verify(tmp_path) == []


@pytest.mark.parametrize("period", [1, 3])
def test_windows_are_drawn_each_once_whatever_the_parts(tmp_path: Path, period: int) -> None:
    rows = Rows(tmp_path, FIELDS, 2, 100, 4, period, max_timesteps=11)
    added(rows, 50)
    drawn, indices, probabilities = rows.draw(4000, 1, Prioritized(alpha=1.0, epsilon=0.0))
    begun = drawn["group.x"][:, 0]
    assert (drawn["group.x"][:, :, 1] == begun[:, 1:] + np.arange(4)).all()
    starts = range(0, 47, period)
    assert set(map(tuple, begun.tolist())) == {(row, time) for row in (0, 1) for time in starts}
    assert np.allclose(probabilities, 1 / (2 * len(starts)))
    rows.disk.update_priorities(indices, (begun[:, 1] == 24).astype(float))
    again, _, _ = rows.draw(100, 2, Prioritized(alpha=1.0, epsilon=0.0))
    assert (again["group.x"][:, 0, 1] == 24).all()


def test_rows_go_on_after_a_kill(tmp_path: Path) -> None:
    def play(_: Any) -> None:
        rows = Rows(tmp_path, FIELDS, 3, 40, 4, max_timesteps=10)
        added(rows, 33)
        for _ in range(4):
            added(rows, 1)
        os._exit(7)

    assert in_child(play).status == 7
    rows = Rows(tmp_path, FIELDS, 3, 40, 4, max_timesteps=10)
    assert rows.time == 37
    require_every_window(rows, 40, 4)
    for _ in range(50):
        added(rows, 1)
        require_every_window(rows, 40, 4)


def test_a_part_that_was_begun_in_some_rows_only_is_left_out(tmp_path: Path) -> None:
    rows = Rows(tmp_path, FIELDS, 3, 40, 4, max_timesteps=10)
    added(rows, 15)
    rows.disk.end_episodes()
    rows.disk.add(**{"group.x": values(2, [11])[:, 0], "row": np.arange(2), "start": np.full(2, 11)})
    rows.disk.close()
    rows = Rows(tmp_path, FIELDS, 3, 40, 4, max_timesteps=10)
    assert rows.time == 15
    for _ in range(70):
        added(rows, 1)
        require_every_window(rows, 40, 4)


def test_after_an_error_rows_go_on_with_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(tmp_path, FIELDS, 2, 20, 3)
    added(rows, 5)

    def failing(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(ReplayBuffer, "add", failing)
        added(rows, 1)
    assert rows.time == 5
    added(rows, 6)
    require_every_window(rows, 20, 3)


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows", FIELDS, 2, 20, 3)
    with pytest.raises(NotEnoughDataError, match="add more"):
        rows.read(np.zeros(1, np.int64), np.zeros(1, np.int64))
    with pytest.raises(SchemaMismatchError, match="capacity"):
        Rows(tmp_path / "rows", FIELDS, 2, 30, 3)
    with pytest.raises(SchemaError, match="row"):
        Rows(tmp_path / "other", {"row": Field("int")}, 2, 20, 3)
    with pytest.raises(SchemaError, match="two windows"):
        Rows(tmp_path / "other", FIELDS, 2, 20, 3, max_timesteps=5)


def test_meta_fields_of_a_first_step_are_visible_with_it(tmp_path: Path) -> None:
    fields, meta = {"x": "int"}, {"number": "int"}
    with ReplayBuffer(tmp_path, 10, 10, fields, meta, publish="step", spare_slots=2) as buffer:
        buffer.add(x=[1, 2], number=[5, 6])
        assert buffer.episodes()["number"].tolist() == [5, 6]
