"""What is asked of the disk before its time: the rows that will be read, each window in turn, and little else."""

from __future__ import annotations

from types import SimpleNamespace

import coded_folder
import numpy as np
import pytest
from inside import get_inside, set_inside, storage_of

from memmap_buffer import ConcatBuffer, Field, Offsets, ReplayBuffer, Window

FIELDS = {"t": "int", "observation": Field("float", (3,), final=True), "other": "float"}
VIEWS = {
    "timestep": {"timestep_level": True, "fields": ["t", "observation"]},
    "n-step": {"n_steps": 1, "current_fields": ["t"], "next_fields": ["observation"]},
    "trajectory": {"fields": ["observation", "t"]},
    "window": {"view": Window(2, fields=("t", "observation"), boundary="drop")},
    "filtered": {"timestep_level": True, "fields": ["t", "observation"], "filter_fields": {"t": lambda t: t % 5 != 2}},
}
ASK = get_inside("disk_ask")
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
    copy = get_inside("copy_rows")

    def asked(array, ranges):
        seen.extend(("ask", id(array), set(range(*each))) for each in ranges)
        get_inside("ask_kernel")(array, ranges)

    def copied(self, batch):
        for column in batch.values():
            if isinstance(column, get_inside("row_gather")):
                for storage, chosen, *_ in self.records.groups:
                    rows = numbers(column.rows[chosen])
                    seen.extend(("read", id(storage.maps.rows[name]), rows) for name in column.group.names)
        return copy(self, batch)

    set_inside(monkeypatch, will_need=asked, gap_bytes=0, copy_rows=copied)
    set_inside(monkeypatch, disk_ask=lambda self, builder: None)  # windows alone are asked for
    return seen


def numbers(rows):
    """The rows that are read."""
    if not isinstance(rows, get_inside("row_ranges")):
        return set(np.ravel(rows).tolist())
    ranges = zip(rows.row.tolist(), (rows.stop - rows.lead).tolist(), strict=True)
    return {row + i for row, count in ranges for i in range(count)}


def rows_of(events, what):
    out = {}
    for kind, array, rows in events:
        if kind == what:
            out.setdefault(array, set()).update(rows)
    return out


@pytest.mark.parametrize("chunk", [8, 64, 1 << 14])
@pytest.mark.parametrize("view", VIEWS)
def test_every_row_is_asked_for_before_it_is_read(buffer, events, monkeypatch, view, chunk):
    set_inside(monkeypatch, epoch_chunk=chunk)
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


def test_no_more_is_asked_for_than_one_window_ahead(buffer, events):
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
    set_inside(monkeypatch, gap_bytes=1 << 17)
    list(buffer.dataloader(8, timestep_level=True, fields="t", **{**BLOCK, "shuffle_window": 10_000}))
    asks = [rows for kind, _, rows in events if kind == "ask"]
    assert len(asks) < 100
    assert all(len(rows) == max(rows) - min(rows) + 1 for rows in asks)


# Batches that come from the disk


@pytest.fixture
def disk(monkeypatch, events):
    """Counts up with every batch, as if each had the disk read something, unless it is told to stand still."""
    reads = iter(range(2**40, 2**41))
    disk = SimpleNamespace(busy=True, count=0)

    def count():
        disk.count = next(reads) if disk.busy else disk.count
        return disk.count

    def asked(array, ranges):
        events.extend(("ask", id(array), set(range(*each))) for each in ranges)
        get_inside("ask_kernel")(array, ranges)

    set_inside(monkeypatch, disk_ask=ASK, disk_reads=count, will_need=asked, answer_seconds=0, disk_answer_seconds=0)
    set_inside(monkeypatch, row_gap=0)
    return disk


ON_DISK = {**VIEWS, "offsets": {"view": Offsets({"t": (-3, 0), "observation": range(2)})}}
ON_DISK["sequence"] = {"n_steps": 3, "current_fields": ["t"], "sequence_fields": ["t"], "next_fields": ["observation"]}


@pytest.mark.parametrize("two", [False, True], ids=["one folder", "two"])
@pytest.mark.parametrize("view", ON_DISK)
def test_the_rows_of_a_batch_are_asked_for_at_once_if_it_is_the_first_or_the_last_one_had_to_be_read(
    buffer, events, disk, tmp_path, view, two
):
    if two:
        other = ReplayBuffer(tmp_path / "b", 30, 20, FIELDS)
        record(other, 9)
    where = ConcatBuffer([buffer, other]) if two else buffer
    batches = iter(where.dataloader(8, shuffle=True, seed=1, **ON_DISK[view]))
    for _ in batches:
        asked, read = rows_of(events, "ask"), rows_of(events, "read")
        assert asked.keys() <= read.keys()
        for array, rows in read.items():
            assert rows <= asked.get(array, set())
            assert len(asked.get(array, set()) - rows) <= 8  # of a sequence without a row, the nearest one
        kinds = "".join(kind[0] for kind, *_ in events)
        assert kinds == "a" * kinds.count("a") + "r" * kinds.count("r")
        events.clear()


def test_the_disk_is_not_asked_any_more_once_nothing_had_to_be_read(buffer, events, disk):
    for _ in range(3):
        buffer.sample(8, n_steps=1)
    assert rows_of(events, "ask")
    disk.busy = False
    buffer.sample(8, n_steps=1)
    events.clear()
    for _ in range(20):
        buffer.sample(8, n_steps=1)
    assert rows_of(events, "ask") == {}


def test_what_this_thread_reads_between_batches_does_not_count(buffer, events, disk):
    disk.busy = False
    buffer.sample(8, n_steps=1)
    events.clear()
    for _ in range(20):
        disk.count += 1  # a step that is written to a fresh page, say
        buffer.sample(8, n_steps=1)
    assert rows_of(events, "ask") == {}


def test_what_this_thread_has_the_disk_read_is_counted(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    before = get_inside("disk_reads")()
    for _ in range(3):
        assert path.read_bytes() == bytes(1 << 20)
    assert get_inside("disk_reads")() == before  # it is in memory


def test_any_rows_of_a_field_can_be_asked_for(buffer):
    for rows in storage_of(buffer).maps.rows.values():
        for first, stop in ((0, 0), (0, 1), (0, len(rows)), (len(rows) - 1, len(rows)), (3, len(rows) + 5)):
            get_inside("ask_kernel")(rows, [(first, stop)])
    assert buffer.episode(2)["t"].tolist() == list(range(7))


# Compressed fields


@pytest.fixture
def asked_blobs(monkeypatch):
    """The bytes of blobs, by the address of their map, that were asked for."""
    seen = {}

    def asked(array, ranges):
        ranges = list(ranges)
        if array.dtype == np.uint8 and array.ndim == 1:
            for begin, stop in ranges:
                seen.setdefault(id(array), set()).update(range(begin, stop))
        get_inside("ask_kernel")(array, ranges)

    set_inside(monkeypatch, will_need=asked, gap_bytes=0)
    return seen


def blobs_of(storage, name):
    """(address of the map of the blobs, the bytes of each row's blob)."""
    index = storage.maps.rows[name]
    parts = [range(begin, begin + (word & 0xFFFFFFFF)) for begin, word in index.tolist()]
    return id(storage.maps.coded[name].data), parts


@pytest.mark.parametrize("kind", ["grid", "dense"])
def test_the_blobs_of_a_batch_are_asked_for_and_no_others(asked_blobs, kind):
    with ReplayBuffer.from_folder(coded_folder.example(kind), read_only=True) as buffer:
        storage = storage_of(buffer)
        chosen = buffer.sample(6, view=Window(2, fields=("frame", "noise"), boundary="drop"), return_indices=True)
        slots = {int(storage.table.serial[slot]): slot for slot in storage.table.visible.tolist()}
        wanted = set()
        for serial, t in np.asarray(chosen["_indices"])[:, :2].tolist():
            first = storage.start_of("frame", slots[serial])
            wanted |= {first + t, first + t + 1}
        data, parts = blobs_of(storage, "frame")
        assert asked_blobs[data] == {byte for row in wanted for byte in parts[row]}
        assert id(storage.maps.coded["camera.left"].data) not in asked_blobs


def test_the_blobs_of_a_window_are_asked_for_before_it_is_read(asked_blobs, monkeypatch):
    set_inside(monkeypatch, disk_ask=lambda self, builder: None)
    with ReplayBuffer.from_folder(coded_folder.example(), read_only=True) as buffer:
        list(buffer.dataloader(8, timestep_level=True, fields=["frame"], **BLOCK))
        storage = storage_of(buffer)
        data, parts = blobs_of(storage, "frame")
        for slot, length in enumerate(coded_folder.LENGTHS):
            first = storage.start_of("frame", slot)
            assert all(set(part) <= asked_blobs[data] for part in parts[first : first + length])


def test_what_a_spoilt_index_says_is_not_asked_for(tmp_path, asked_blobs):
    folder = coded_folder.copy_of("grid", tmp_path / "buffer")
    index = coded_folder.open_index(folder, "noise")
    index[:30] = [[0, 0], [2**63, 9], [2**64 - 1, 2**32 - 1], [5, 2**32 - 2], [2**40, 2**20]] * 6
    with ReplayBuffer.from_folder(folder, read_only=True) as buffer:
        rows = np.arange(30)
        get_inside("ask_for_blobs")(storage_of(buffer), "noise", rows, rows + 1, 0)
        get_inside("ask_for_blobs")(storage_of(buffer), "noise", rows, rows + 3, 0)
    assert sum(map(len, asked_blobs.values())) < 100
