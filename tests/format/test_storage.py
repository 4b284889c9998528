"""A folder as a whole: made whole or not at all, opened without a trace, its table what the records say."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import re
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import KILLED, in_child, listing, system
from hypothesis import given
from hypothesis import strategies as st
from inside import storage_of
from profiles import examples
from strategies import MEMORY, Churn, churns

from memmap_buffer import CorruptBufferError, Field, NotABufferError, ReplayBuffer, Schema, SchemaError
from memmap_buffer.format import journal
from memmap_buffer.format.creation import discard_unfinished
from memmap_buffer.format.layout import Layout
from memmap_buffer.format.records import STATE, STATE_WORD
from memmap_buffer.format.storage import Storage

FIELDS = {"a": "float", "b": Field("uint8", (2, 2), final=True)}
META_FIELDS = {"m": "U4"}
LAYOUT = Layout(Schema(FIELDS, META_FIELDS), 3, 4)
FILES = sorted(["schema.json", *(array.name for array in LAYOUT.arrays.values())])


def make(folder: Path, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(folder, 3, 4, FIELDS, META_FIELDS, **options)


def store(buffer: ReplayBuffer, number: int, length: int = 2) -> None:
    buffer.store_episode(a=[number + t for t in range(length)], b=np.full((length + 1, 2, 2), number), m=f"e{number}")


def files_in(folder: Path) -> list[str]:
    """Every file below a folder, but for the lock."""
    return sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if (p.is_symlink() or p.is_file()) and p.name != ".lock"
    )


def works(folder: Path) -> bool:
    """Whether a buffer can be made or opened there, written and read."""
    with make(folder) as buffer:
        store(buffer, 1)
    return files_in(folder) == FILES and ReplayBuffer.from_folder(folder, read_only=True).episode(0)["a"].tolist() == [
        1,
        2,
    ]


# Creating


def test_creation_makes_exactly_the_files_of_the_schema_and_sparse(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "new" / "buffer", 1000, 1000, {"a": ("float", 100)}) as buffer:
        assert files_in(buffer.folder) == ["checksums.npy", "data/a.npy", "episodes.npy", "schema.json", "state.npy"]
        status = (buffer.folder / "data" / "a.npy").stat()
        assert status.st_size > 400_000_000
        assert status.st_blocks * 512 < 1_000_000


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
def test_creation_that_fails_at_any_operation_leaves_nothing_and_can_be_repeated(tmp_path: Path, error: int) -> None:
    """Fault 26: ENOSPC, EIO, EMFILE at each system call of creation."""
    for at in itertools.count(1):
        path = tmp_path / str(at)
        with system(at, error=error) as seen, contextlib.suppress(OSError):
            make(path).close()
        if seen.count < at:
            break
        renamed = "rename" in dict(seen.done)
        assert files_in(path) == (FILES if renamed else []), at
        assert works(path), at
    assert at > 30


@pytest.mark.parametrize("half", [False, True], ids=["before it", "in the middle of a write"])
def test_creation_killed_at_any_operation_leaves_no_buffer_or_a_whole_one(tmp_path: Path, half: bool) -> None:
    """Fault 3: absent or complete, never half; the next creation removes what is left, and works."""
    for at in itertools.count(1 + half, 2):
        path = tmp_path / str(at)

        def work(tell: Any, at: int = at, path: Path = path) -> None:
            with system(at, kill=True, half=half):
                make(path).close()

        if in_child(work).status != KILLED:
            break
        if (path / "schema.json").exists():
            assert len(ReplayBuffer.from_folder(path)) == 0
        else:
            with pytest.raises(NotABufferError, match=r"creation did not finish|there is no schema\.json"):
                ReplayBuffer.from_folder(path)
        assert works(path), at
    assert at > 30


def test_creation_without_enough_descriptors_leaves_nothing(tmp_path: Path) -> None:
    """Fault 26: RLIMIT_NOFILE reached anywhere."""

    def work(tell: Any) -> None:
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = [number for number in range(max(used) + 41) if number not in used]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for more in range(1, 40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], hard))  # a limit on the numbers, not on how many
            try:
                make(tmp_path / str(more)).close()
                outcome = "made"
            except OSError as error:
                outcome = os.strerror(error.errno)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            tell([more, outcome])

    child = in_child(work)
    assert child.status == 0, child.told
    assert {outcome for _, outcome in child.told} == {"made", "Too many open files"}
    for more, _ in child.told:
        assert files_in(tmp_path / str(more)) in ([], FILES), more
        assert works(tmp_path / str(more)), more


@pytest.mark.parametrize("error", [errno.EFBIG, errno.EINVAL, errno.EOVERFLOW])
def test_a_file_beyond_what_the_file_system_allows_is_refused_naming_the_sizes_to_change(
    tmp_path: Path, error: int
) -> None:
    with (
        system(4, error=error, only=("truncate",)),
        pytest.raises(
            SchemaError,
            match=r"a\.npy: a file of .* TiB is more than this file system allows; lower max_episodes or max_timesteps",
        ) as caught,
    ):
        make(tmp_path)
    assert Path(caught.value.path) == tmp_path / "data" / "a.npy"
    assert files_in(tmp_path) == []


def test_a_buffer_larger_than_the_disk_is_made_with_a_warning_that_names_both_sizes(
    tmp_path: Path, caplog: Any
) -> None:
    """Fault 25: the files are sparse, so it may well fit; `reserve=True` is there to be sure."""
    with ReplayBuffer(tmp_path, 2**20, 2**10, {"a": ("float", 512)}):
        assert re.search(r"the buffer may grow to 2199\.\d GB, \d+\.\d GB are free here", caplog.text)


# What is in the way


@pytest.mark.parametrize("name", [name for name in FILES if name != "schema.json"])
def test_a_file_of_somebody_else_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"precious")
    (tmp_path / "notes.txt").write_bytes(b"precious too")
    for overwrite in (False, True):
        with pytest.raises(CorruptBufferError, match=rf"{name} is in the way and is not ours to replace; move it away"):
            make(tmp_path, overwrite=overwrite)
    assert files_in(tmp_path) == sorted([name, "notes.txt"])
    assert (tmp_path / name).read_bytes() == b"precious"


@pytest.mark.parametrize("sub", ["data", "meta"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_subfolder_that_is_no_folder_of_ours_is_refused_and_nothing_is_left(
    tmp_path: Path, sub: str, kind: str
) -> None:
    """Fault 50: a link where `data` belongs must not lead the new files elsewhere."""
    folder, elsewhere = tmp_path / "buffer", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / sub).write_bytes(b"precious") if kind == "file" else (folder / sub).symlink_to(elsewhere)
    for _ in range(2):
        with pytest.raises(CorruptBufferError, match=rf"{sub}.* is a link or no folder"):
            make(folder)
        assert files_in(folder) == [sub]
        assert list(elsewhere.iterdir()) == []
    (folder / sub).unlink()
    assert works(folder)


def test_other_files_may_stand_beside_a_buffer_and_overwriting_leaves_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("notes.txt", "data/notes.txt", "data/c.npy"):
        (tmp_path / name).write_bytes(b"precious")
    make(tmp_path).close()
    ReplayBuffer(tmp_path, 2, 2, {"z": "int"}, overwrite=True).close()
    assert files_in(tmp_path) == [
        "checksums.npy",
        "data/c.npy",
        "data/notes.txt",
        "data/z.npy",
        "episodes.npy",
        "notes.txt",
        "schema.json",
        "state.npy",
    ]
    assert (tmp_path / "data/c.npy").read_bytes() == b"precious"


def test_only_what_the_unfinished_schema_names_is_removed(tmp_path: Path) -> None:
    """A torn or complete `schema.json.new` beside a whole buffer costs nothing of the buffer."""
    with make(tmp_path) as buffer:
        store(buffer, 1)
    more = Layout(Schema({**FIELDS, "c": "int"}, META_FIELDS), 3, 4)
    (tmp_path / "data" / "c.npy").write_bytes(b"half a column")
    (tmp_path / "data" / "d.npy").write_bytes(b"somebody's")
    for text in (more.to_json(), more.to_json()[:100], b""):
        (tmp_path / "schema.json.new").write_bytes(text)
        discard_unfinished(Storage(tmp_path).folder)
        assert files_in(tmp_path) == sorted([*FILES, "data/d.npy"])
    assert ReplayBuffer.from_folder(tmp_path).episode(0)["a"].tolist() == [1, 2]


# Opening


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with make(tmp_path / "buffer") as buffer:
        for number in range(3):
            store(buffer, number, number + 1)
    return tmp_path / "buffer"


@pytest.mark.parametrize("verify", ["auto", "always", "read", "never"])
def test_opening_and_reading_leave_no_trace(folder: Path, verify: str) -> None:
    """Fault 40: no lock, no new file, no changed time, from a folder that cannot be written."""
    (folder / ".lock").unlink()
    for path in (folder, folder / "data", folder / "meta"):
        path.chmod(0o500)
    before = listing(folder)
    buffer = ReplayBuffer.from_folder(folder, read_only=True, verify=verify)
    assert [buffer.episode(i)["a"].tolist() for i in range(3)] == [[0], [1, 2], [2, 3, 4]]
    assert len(buffer.sample(4, timestep_level=True)["a"]) == 4
    for path in (folder, folder / "data", folder / "meta"):
        path.chmod(0o700)
    assert listing(folder) == before


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_or_means_no_buffer(folder: Path, name: str) -> None:
    (folder / name).unlink()
    before = listing(folder)
    for door in (Storage.open, ReplayBuffer.from_folder):
        with pytest.raises((CorruptBufferError, NotABufferError), match=r"is missing|there is no schema\.json"):
            door(folder)
    assert listing(folder) == before


@pytest.mark.parametrize(
    ("path", "what"), [("nowhere", "there is no such folder"), ("file", "is a file, and a buffer is a folder")]
)
def test_a_path_that_is_no_folder_is_no_buffer(tmp_path: Path, path: str, what: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotABufferError, match=f"{what}; check the path"):
        Storage.open(tmp_path / path)
    assert not (tmp_path / "nowhere").exists()


def test_an_unknown_verify_is_refused(folder: Path) -> None:
    with pytest.raises(SchemaError, match="verify: got 'sometimes', expected one of 'auto', 'always', 'read', 'never'"):
        Storage.open(folder, verify="sometimes")


def test_a_storage_pickles_as_a_path(folder: Path) -> None:
    storage = Storage.open(folder, read_only=True, verify="never")
    raw = pickle.dumps(storage)
    assert len(raw) < 1000
    again = pickle.loads(raw)
    assert (again.path, again.read_only, again.verify) == (folder, True, "never")
    np.testing.assert_array_equal(again.maps.rows["a"], storage.maps.rows["a"])


def test_mapped_arrays_cannot_be_written_and_are_no_memmaps(folder: Path) -> None:
    maps = Storage.open(folder).maps
    for array in (maps.words, maps.state, maps.checksums, *maps.rows.values(), *maps.meta.values()):
        assert type(array) is np.ndarray
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_the_table_is_read_again_only_after_a_change(folder: Path) -> None:
    storage = Storage.open(folder)
    first = storage.table
    assert storage.refresh() is first
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.clear()
        assert storage.table is first
        assert len(storage.refresh()) == 0
        store(buffer, 9)
        assert storage.refresh().serial[storage.table.visible].tolist() == [3]


def test_foreign_files_are_ignored_and_nothing_is_ever_unpickled(folder: Path, monkeypatch: Any) -> None:
    """Fault 52: `metadata.pkl`, `pickle.pkl`, arrays of objects in the folder."""
    for name in ("metadata.pkl", "pickle.pkl", "data/metadata.pkl", "fields.pkl"):
        (folder / name).write_bytes(pickle.dumps(Path))
    np.save(folder / "data" / "objects.npy", np.array([Path], object))
    before = listing(folder)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for place, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (np, "load"),
        (np.lib.format, "read_array"),
    ):
        monkeypatch.setattr(place, name, refuse)
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    assert buffer.episode(1)["a"].tolist() == [1.0, 2.0]
    assert len(buffer.sample(2)["a"]) == 2
    assert listing(folder) == before


# Checksums


def flip(folder: Path, name: str, offset_from_end: int) -> None:
    raw = bytearray((folder / name).read_bytes())
    raw[-offset_from_end] ^= 1
    (folder / name).write_bytes(raw)


# In slot 1 of 4, an episode of two steps: a (4, 4) float, b (4, 5, 2, 2) uint8 with a final entry, m (4,) U4.
DAMAGE = {
    "a": ("data/a.npy", 3 * 16 - 4),
    "b": ("data/b.npy", 3 * 20 - 4),
    "the final b": ("data/b.npy", 3 * 20 - 8),
    "m": ("meta/m.npy", 3 * 16),
}
UNUSED = {"a": ("data/a.npy", 3 * 16 - 8), "b": ("data/b.npy", 3 * 20 - 12), "another slot": ("meta/m.npy", 16)}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_flipped_bit_is_found_by_episode_and_field_and_that_episode_is_not_served(
    folder: Path, what: str, caplog: Any
) -> None:
    """Fault 46: in a step, in the final observation, in a meta field."""
    flip(folder, *DAMAGE[what])
    field = what.split()[-1]
    storage = Storage.open(folder, verify="never")
    assert storage.check(storage.table.visible) == [(1, field)]
    assert f"episode 1 fails the checksum of '{field}' and is not served" in caplog.text
    assert storage.table.serial[storage.table.visible].tolist() == [0, 2]
    always = Storage.open(folder, verify="always")
    assert always.table.serial[always.table.visible].tolist() == [0, 2]


@pytest.mark.parametrize("what", UNUSED)
def test_a_flipped_bit_in_rows_that_hold_nothing_is_no_damage(folder: Path, what: str) -> None:
    flip(folder, *UNUSED[what])
    storage = Storage.open(folder, verify="always")
    assert len(storage.table) == 3


def test_after_a_clean_end_nothing_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 15: the checksums of a folder that was closed are not compared under verify="auto"."""
    monkeypatch.setattr(Storage, "damaged", lambda *_: pytest.fail("a checksum was compared"))
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    assert [buffer.episode(i)["a"].tolist() for i in range(3)] == [[0], [1, 2], [2, 3, 4]]


@pytest.mark.parametrize(
    ("clean", "other_boot", "kept"), [(0, True, [0, 2]), (1, True, [0, 1, 2]), (0, False, [0, 1, 2])]
)
def test_after_a_crash_of_the_machine_what_it_spoilt_is_dropped_and_only_then(
    folder: Path, clean: int, other_boot: bool, kept: list[int]
) -> None:
    """Fault 12: another boot id without the clean flag; the rest stays exact."""
    flip(folder, *DAMAGE["a"])
    raw = bytearray((folder / "state.npy").read_bytes())
    words = np.frombuffer(raw, "<u8")[-STATE.itemsize // 8 :]
    words[STATE_WORD["clean"]] = clean
    words[STATE_WORD["boot"]] ^= np.uint64(other_boot)
    (folder / "state.npy").write_bytes(raw)
    storage = Storage.open(folder)
    assert storage.trust(storage.table.visible) == (kept == [0, 1, 2])
    assert storage.table.serial[storage.table.visible].tolist() == kept


# Refreshing


@examples(150)
@given(churns, st.sampled_from([None, 20]))
def test_a_table_that_is_refreshed_is_the_one_that_is_read_anew(operations: Any, capacity: int | None) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        churn = Churn(folder, capacity=capacity)
        often, seldom = (Storage.open(folder, verify="never") for _ in range(2))
        for number, (name, value) in enumerate(operations):
            churn.run(name, value)
            assert_same_table(often, folder)
            if number % 5 == 4:
                assert_same_table(seldom, folder)
        churn.buffer.close()


def assert_same_table(storage: Storage, folder: str) -> None:
    refreshed, anew = storage.refresh(), Storage.open(folder, verify="never").table
    assert (refreshed.changes, refreshed.base) == (anew.changes, anew.base)
    assert refreshed.visible.tolist() == anew.visible.tolist()
    assert refreshed.shown.tolist() == anew.shown.tolist()
    for mine, theirs in zip(refreshed.columns, anew.columns, strict=True):
        assert mine.tolist() == theirs.tolist()


def test_what_fails_its_checksum_stays_away_when_others_are_published(folder: Path) -> None:
    flip(folder, *DAMAGE["a"])
    storage = Storage.open(folder, verify="always")
    before = storage.table.valid
    with make(folder) as buffer:
        buffer.delete(0)
        store(buffer, 7)
    assert storage.refresh().serial[storage.table.visible].tolist() == [2, 3]
    assert before.tolist() == [True, False, True, False]


def test_a_refresh_shares_what_did_not_change_and_leaves_earlier_tables_as_they_were(tmp_path: Path) -> None:
    with make(tmp_path / "a", circular=True, publish="step") as buffer:
        store(buffer, 1)
        with buffer.one_episode(m="open") as episode:
            episode.store(a=1, b=np.zeros((2, 2)))
            before = storage_of(buffer).refresh()
            episode.store(a=2, b=np.zeros((2, 2)))
            after = storage_of(buffer).refresh()
        assert after.serial is before.serial and after.visible is before.visible
        assert (before.length[before.visible].tolist(), after.length[after.visible].tolist()) == ([2, 1], [2, 2])


def test_episodes_side_by_side_are_not_copied_and_others_are_found_where_they_lie(tmp_path: Path) -> None:
    with make(tmp_path / "a", circular=True) as buffer:
        for number in range(7):
            store(buffer, number, 1 + number % 3)
            table = storage_of(buffer).refresh()
            assert table.of(table.serial, table.visible).tolist() == list(range(max(0, number - 2), number + 1))
            assert table.of(table.length, table.visible).tolist() == table.length[table.visible].tolist()
            assert (table.of(table.length, table.visible).base is not None) == (number not in (4, 5))


def test_a_reader_does_not_wait_for_an_episode_that_a_ring_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generation is odd for good, as that of one which is being updated is for a moment."""
    slept: list[float] = []
    monkeypatch.setattr(journal.time, "sleep", slept.append)
    fields = {"x": "float", "terminated": "bool"}
    with ReplayBuffer(tmp_path, max_timesteps=5, capacity=10, fields=fields) as buffer:
        reader = Storage.open(tmp_path, read_only=True)
        for _ in range(6):
            buffer.store_episode(x=np.zeros(5), terminated=np.arange(5) == 4)
            assert len(reader.refresh()) <= 2
    assert not slept
