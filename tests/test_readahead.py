"""What is asked of the disk before its time: the rows that will be read, each window in turn, and little else."""

from __future__ import annotations

import numpy as np
import pytest

from memmap_buffer import ConcatBuffer, Field, ReplayBuffer, Window
from memmap_buffer.reading import readahead, samplers
from memmap_buffer.reading.slices import Slices
from memmap_buffer.reading.sources import Sources
from memmap_buffer.store.folder import will_need

FIELDS = {"t": "int", "observation": Field("float", (3,), final=True), "other": "float"}
VIEWS = {
    "timestep": {"timestep_level": True, "fields": ["t", "observation"]},
    "n-step": {"n_steps": 1, "current_fields": ["t"], "next_fields": ["observation"]},
    "trajectory": {"fields": ["observation", "t"]},
    "window": {"view": Window(2, fields=("t", "observation"), boundary="drop")},
    "filtered": {"timestep_level": True, "fields": ["t", "observation"], "filter_fields": {"t": lambda t: t % 5 != 2}},
}
BLOCK = {"shuffle": "block", "shuffle_window": 64, "seed": 3}


@pytest.fixture
def buffer(tmp_path):
    with ReplayBuffer(tmp_path / "a", 30, 20, FIELDS) as buffer:
        record(buffer, 30)
        yield buffer


def record(buffer, episodes):
    for n in range(episodes):
        length = 5 + n % 16
        t = np.arange(length)
        buffer.store_episode(t=t, other=t, observation=np.zeros((length + 1, 3)))


@pytest.fixture
def events(monkeypatch):
    """What happens, in order: ("ask", array, rows) and ("read", array, rows)."""
    seen = []
    take = Sources.take

    def asked(array, first, stop):
        seen.append(("ask", id(array), set(range(first, stop))))
        will_need(array, first, stop)

    def taken(self, name, source, rows):
        for number, storage in enumerate(self.storages):
            mine = rows if source is None else rows[source == number]
            seen.append(("read", id(storage.maps.rows[name]), numbers(mine)))
        return take(self, name, source, rows)

    monkeypatch.setattr(readahead, "will_need", asked)
    monkeypatch.setattr(readahead, "GAP_BYTES", 0)
    monkeypatch.setattr(Sources, "take", taken)
    return seen


def numbers(rows):
    """The rows that are read."""
    if not isinstance(rows, Slices):
        return set(np.ravel(rows).tolist())
    spans = zip(rows.row.tolist(), (rows.stop - rows.lead).tolist(), strict=True)
    return {row + i for row, count in spans for i in range(count)}


def rows_of(events, what):
    out = {}
    for kind, array, rows in events:
        if kind == what:
            out.setdefault(array, set()).update(rows)
    return out


@pytest.mark.parametrize("chunk", [8, 64, 1 << 14])
@pytest.mark.parametrize("view", VIEWS)
def test_every_row_is_asked_for_before_it_is_read(buffer, events, monkeypatch, view, chunk):
    monkeypatch.setattr(samplers, "CHUNK", chunk)
    list(buffer.dataloader(8, **BLOCK, **VIEWS[view]))
    asked = {}
    for kind, array, rows in events:
        if kind == "ask":
            asked.setdefault(array, set()).update(rows)
        else:
            assert rows <= asked.get(array, set())


@pytest.mark.parametrize("view", ["timestep", "trajectory"])
def test_little_else_is_asked_for_than_what_is_read(buffer, events, view):
    list(buffer.dataloader(8, **BLOCK, **VIEWS[view]))
    asked, read = rows_of(events, "ask"), rows_of(events, "read")
    assert asked.keys() == read.keys()  # no field that the view leaves out
    for array, rows in read.items():
        assert len(asked[array] - rows) <= 30  # a final row of each episode, that no timestep shows


def test_no_more_is_asked_for_than_one_window_ahead(buffer, events, monkeypatch):
    monkeypatch.setattr(samplers, "CHUNK", 8)
    batches = iter(buffer.dataloader(8, timestep_level=True, fields="t", **BLOCK))
    for number in range(1, 40):
        next(batches)
        (asked,) = rows_of(events, "ask").values()
        windows = (8 * number - 1) // 64 + 2
        assert len(asked) <= windows * 64 * 2  # a block is one item here, and is asked for with its successor


def test_several_folders_are_asked(buffer, events, tmp_path):
    with ReplayBuffer(tmp_path / "b", 30, 20, FIELDS) as other:
        record(other, 9)
        list(ConcatBuffer([buffer, other]).dataloader(8, timestep_level=True, **BLOCK))
    asked, read = rows_of(events, "ask"), rows_of(events, "read")
    assert len(read) == 6
    assert all(read[array] <= asked[array] for array in read)


@pytest.mark.parametrize("options", [{"shuffle": True, "seed": 1}, {}], ids=["shuffled", "in order"])
def test_other_orders_ask_for_nothing(buffer, events, options):
    list(buffer.dataloader(8, timestep_level=True, **options))
    assert rows_of(events, "ask") == {}


def test_near_rows_are_asked_for_in_one_go(buffer, events, monkeypatch):
    monkeypatch.setattr(readahead, "GAP_BYTES", 1 << 17)
    list(buffer.dataloader(8, timestep_level=True, fields="t", **{**BLOCK, "shuffle_window": 10_000}))
    asks = [rows for kind, _, rows in events if kind == "ask"]
    assert len(asks) < 100
    assert all(len(rows) == max(rows) - min(rows) + 1 for rows in asks)


def test_any_rows_of_a_field_can_be_asked_for(buffer):
    for rows in buffer._storage.maps.rows.values():
        for first, stop in ((0, 0), (0, 1), (0, len(rows)), (len(rows) - 1, len(rows)), (3, len(rows) + 5)):
            will_need(rows, first, stop)
    assert buffer.episode(2)["t"].tolist() == list(range(7))
