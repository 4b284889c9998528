"""Whose folder it is: a writer never touches what another put in the place of its own, and folders have an identity."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import fork, in_child, listing, shown
from inside import get_inside, lock_folder, set_inside

from memmap_buffer import (
    BufferLockedError,
    ConcatBuffer,
    CorruptBufferError,
    ReplayBuffer,
    SchemaError,
    StaleEpisodeError,
    WriterLostError,
    pack,
    unpack,
)
from memmap_buffer.adapters import Readable
from memmap_buffer.compat import set_valid

FIELDS = {"x": "float", "reward": "float"}


def make(folder: Path, *values: float, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(folder, 4, 5, FIELDS, {"task": "int"}, circular=True, **options)
    for value in values:
        buffer.store_episode(x=[value, value], reward=[value, value])
    return buffer


def another(folder: Path) -> None:
    """A buffer of the same schema that another process put there, an update of it begun."""
    assert in_child(lambda tell: make(folder, 7, 8).close()).status == 0
    (folder / ".redo").write_bytes(b"another's")
    (folder / "extra").mkdir(exist_ok=True)
    (folder / "extra" / "statistics.json.new").write_bytes(b"another's")


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def in_a_loop(buffer: ReplayBuffer) -> None:
    with buffer.one_episode():
        buffer.store(x=1, reward=1)


CHANGES: dict[str, Callable[[ReplayBuffer], Any]] = {
    "one_episode": in_a_loop,
    "store_episode": lambda b: b.store_episode(x=[1], reward=[1]),
    "update": lambda b: b.update(0, x=3.0),
    "set_valid": lambda b: set_valid(b, [0], False),
    "add_field": lambda b: b.add_field("y", ("int", (), 1)),
    "drop_field": lambda b: b.drop_field("x"),
    "rename_field": lambda b: b.rename_field("x", "z"),
    "recompute": lambda b: b.recompute("x", lambda episode: episode["x"] + 1),
    "delete": lambda b: b.delete(0),
    "clear": lambda b: b.clear(),
    "flush": lambda b: b.flush(),
    "close": lambda b: b.close(),
}


@pytest.fixture
def looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publications look at the path, too, which they do 20 times a second at most."""
    set_inside(monkeypatch, path_look_seconds=0.0)


@pytest.mark.usefixtures("looked_at_each_time")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("away", [moved, removed, emptied])
def test_a_writer_whose_folder_went_away_never_touches_what_stands_at_its_path(
    tmp_path: Path, away: Callable[[Path], None], change: Callable[[ReplayBuffer], Any]
) -> None:
    folder = tmp_path / "buffer"
    buffer = make(folder, 1, 2)
    away(folder)
    another(folder)
    before = listing(folder)
    with pytest.raises(WriterLostError, match=r"was moved, removed or overwritten") as caught:
        change(buffer)
    assert caught.value.reason == "moved"
    buffer.close()
    assert listing(folder) == before


@pytest.mark.parametrize("power", [False, True])
def test_what_is_published_looks_at_the_path_now_and_then_and_all_else_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power: bool
) -> None:
    now = 0.0
    set_inside(monkeypatch, lock_clock=lambda: now)
    folder, elsewhere = tmp_path / "buffer", tmp_path / "elsewhere"
    buffer = make(folder, 1, 2, durability="power" if power else "process")
    moved(folder)
    for publish in (CHANGES["one_episode"], CHANGES["store_episode"]):
        if power:
            with pytest.raises(WriterLostError, match="was moved"):
                publish(buffer)
        else:  # to the folder that it has, as it would a moment before
            publish(buffer)
        assert not folder.exists()
    assert len(shown(elsewhere)) == (2 if power else 4)
    now = 0.051  # as the text of the format says
    with pytest.raises(WriterLostError, match="was moved"):
        CHANGES["store_episode"](buffer)


@pytest.mark.parametrize("change", list(CHANGES)[2:])
def test_what_changes_episodes_looks_at_the_path_right_behind_a_publication(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "buffer"
    buffer = make(folder, 1, 2)
    CHANGES["store_episode"](buffer)
    moved(folder)
    before = listing(folder.with_name("elsewhere"))
    with pytest.raises(WriterLostError, match="was moved"):
        CHANGES[change](buffer)
    assert listing(folder.with_name("elsewhere")) == before


@pytest.mark.usefixtures("looked_at_each_time")
@pytest.mark.parametrize("away", [moved, removed])
def test_a_writer_whose_folder_went_away_makes_none_in_its_place(tmp_path: Path, away: Callable[[Path], None]) -> None:
    folder = tmp_path / "buffer"
    buffer = make(folder, 1, 2)
    away(folder)
    for change in (in_a_loop, CHANGES["add_field"], CHANGES["update"]):
        with pytest.raises(WriterLostError, match="was moved, removed or overwritten"):
            change(buffer)
    buffer.close()
    assert not folder.exists()


@pytest.mark.parametrize("change", list(CHANGES.values())[:10], ids=list(CHANGES)[:10])
@pytest.mark.parametrize("copied", [False, True], ids=["another", "a copy"])
def test_what_was_opened_before_another_was_put_in_its_place_never_writes_to_that(
    tmp_path: Path, copied: bool, change: Callable[[ReplayBuffer], Any]
) -> None:
    """It has no lock yet, and its first write would take the other's."""
    folder = tmp_path / "buffer"
    make(folder, 1, 2).close()
    buffer = ReplayBuffer.from_folder(folder)
    moved(folder)
    if copied:
        shutil.copytree(folder.with_name("elsewhere"), folder)
    else:
        another(folder)
    before = listing(folder)
    with pytest.raises(WriterLostError, match="was moved, removed or overwritten"):
        change(buffer)
    assert listing(folder) == before


@pytest.mark.usefixtures("looked_at_each_time")
def test_a_writer_whose_folder_was_moved_is_read_on_and_the_folder_is_written_on_where_it_is(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "buffer", tmp_path / "elsewhere"
    buffer = make(folder, 1, 2)
    episode = buffer.begin_episode()
    episode.store(x=3, reward=3)
    moved(folder)
    with pytest.raises(WriterLostError, match="was moved"):
        episode.publish()
    assert [e["x"] for _, e in shown(buffer)] == [[1, 1], [2, 2]]
    buffer.close()
    with ReplayBuffer.from_folder(elsewhere) as again:
        again.store_episode(x=[4], reward=[4])
        assert [e["x"] for _, e in shown(again)] == [[1, 1], [2, 2], [4]]


def test_a_writer_whose_folder_was_moved_does_not_lock_what_stands_at_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"
    buffer = make(folder, 1)
    moved(folder)
    make(folder, 7).close()

    def work(tell: Callable[[Any], None]) -> None:
        with ReplayBuffer.from_folder(folder) as other:
            other.store_episode(x=[9], reward=[9])
        try:
            ReplayBuffer.from_folder(folder.with_name("elsewhere")).clear()
        except BufferLockedError:
            tell("its own is locked still")

    with suppress(WriterLostError):
        buffer.store_episode(x=[1], reward=[1])
    assert in_child(work).told == ["its own is locked still"]


def test_statistics_of_a_moved_folder_are_told_and_not_kept_in_what_stands_at_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"
    buffer = make(folder, 1, 3)
    moved(folder)
    another(folder)
    before = listing(folder)
    assert buffer.statistics(["x"])["x"].mean == 2
    assert listing(folder) == before


def test_priorities_of_a_moved_folder_never_touch_those_that_stand_at_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"
    buffer = make(folder, 1, 2)
    early = ReplayBuffer.from_folder(folder)
    draw = {"timestep_level": True, "prioritized": True, "seed": 1}
    batch = buffer.sample(4, **draw)
    moved(folder)
    with make(folder, 7, 8) as other:
        other.sample(4, **draw)
        other.flush()
    before = listing(folder)
    with pytest.raises(WriterLostError, match="was moved, removed or overwritten"):
        early.sample(4, **draw)
    buffer.update_priorities(batch["_indices"], np.ones(4))
    with pytest.raises(WriterLostError, match="was moved, removed or overwritten"):
        Readable.flush(buffer)  # of the priorities alone
    with pytest.raises(WriterLostError, match="was moved, removed or overwritten"):
        buffer.close()
    assert listing(folder) == before


def test_a_relative_path_is_that_of_the_moment_when_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with make(Path("buffer"), 1) as buffer:
        monkeypatch.chdir(tmp_path / "there")
        make(Path("buffer"), 7).close()
        before = listing(tmp_path / "there")
        buffer.store_episode(x=[2], reward=[2])
        buffer.add_field("y", ("int", (), 1))
        buffer.update(0, x=3.0)
        assert [e["x"] for _, e in shown(buffer)] == [[3, 1], [2]]
    assert listing(tmp_path / "there") == before


def test_a_copy_in_another_process_reads_the_folder_of_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with make(Path("buffer"), 1) as buffer:
        monkeypatch.chdir("there")
        copy = pickle.loads(pickle.dumps(buffer))
        assert shown(copy) == shown(buffer)


# What could not be made as there is one is another's: nothing removes it


def test_an_update_never_removes_the_redo_file_of_another(tmp_path: Path) -> None:
    with make(tmp_path, 1, 2) as buffer:
        (tmp_path / ".redo").write_bytes(b"another's")
        with pytest.raises(CorruptBufferError, match="redo"):
            buffer.update(0, x=3.0)
        assert (tmp_path / ".redo.bad").read_bytes() == b"another's"  # it is put aside, as what it is nobody knows
        buffer.update(0, x=3.0)


@pytest.mark.parametrize("name", ["data/x.npy", "meta/task.npy", "checksums.npy", "schema.json.new"])
def test_a_creation_never_removes_a_file_that_another_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = get_inside("require_free")

    def late(self: Any, names: Any) -> None:
        real(self, names)
        (self.path / name).parent.mkdir(exist_ok=True)
        (self.path / name).write_bytes(b"another's")

    set_inside(monkeypatch, require_free=late)
    with pytest.raises(CorruptBufferError, match=Path(name).name):
        make(tmp_path)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {".lock", name} and (tmp_path / name).read_bytes() == b"another's"


@pytest.mark.parametrize("name", ["data/z.npy", "schema.json.new", "schema.json.old"])
def test_a_change_of_the_schema_never_removes_a_file_that_another_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with make(tmp_path, 1) as buffer:
        before = listing(tmp_path)
        real = get_inside("require_free")

        def late(self: Any, names: Any) -> None:
            real(self, names)
            (self.path / name).write_bytes(b"another's")

        set_inside(monkeypatch, require_free=late)
        with pytest.raises(CorruptBufferError, match=Path(name).name):
            buffer.rename_field("x", "z")
        assert (tmp_path / name).read_bytes() == b"another's"
        (tmp_path / name).unlink()
        assert listing(tmp_path).keys() == before.keys()
        buffer.store_episode(x=[2], reward=[2])


def test_a_copy_never_removes_a_file_that_another_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path / "buffer", 1) as buffer:
        for name in ("a", "b"):
            (tmp_path / "buffer" / "extra").mkdir(exist_ok=True)
            (tmp_path / "buffer" / "extra" / name).write_bytes(b"ours")
        place = tmp_path / "copy" / "extra" / "b"

        real = get_inside("copy_file")

        def late(self: Any, name: str, target: Any, new: str = "") -> None:
            if name == "extra/b":
                place.write_bytes(b"another's")
            real(self, name, target, new)

        set_inside(monkeypatch, copy_file=late)
        with pytest.raises(CorruptBufferError, match="b"):
            buffer.snapshot(tmp_path / "copy")
    left = [path.name for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert sorted(left) == [".lock", "b"] and place.read_bytes() == b"another's"


# The lock


def test_a_lock_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "buffer", 1).close()
    lock = tmp_path / "buffer" / ".lock"
    for put in (lambda: lock.symlink_to(tmp_path / "elsewhere"), lambda: os.mkfifo(lock), lock.mkdir):
        lock.unlink() if not lock.is_dir() else lock.rmdir()
        put()
        with pytest.raises(CorruptBufferError, match="is a link or no plain file"):
            ReplayBuffer.from_folder(tmp_path / "buffer").clear()
    assert not (tmp_path / "elsewhere").exists()


def test_a_forked_child_neither_frees_its_parents_lock_nor_keeps_it(tmp_path: Path) -> None:
    buffer = make(tmp_path, 1)
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(writing)
        buffer.close()
        os.read(reading, 1)  # until the parent is done with the lock
        os._exit(0)
    os.close(reading)

    def write(tell: Callable[[Any], None]) -> None:
        try:
            ReplayBuffer.from_folder(tmp_path).clear()
            tell("written")
        except BufferLockedError:
            tell("locked")

    try:
        assert in_child(write).told == ["locked"]
        buffer.close()
        assert in_child(write).told == ["written"]
    finally:
        os.close(writing)
        os.waitpid(pid, 0)


def test_a_lock_goes_with_the_last_reference_to_it(tmp_path: Path) -> None:
    buffer = make(tmp_path, 1)
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    (tmp_path / "other").mkdir()
    for _ in range(3):
        taken = lock_folder(tmp_path / "other")
        with pytest.raises(BufferLockedError, match="has another writer"):
            lock_folder(tmp_path / "other")
        del taken
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors
    buffer.close()


# The id of a folder


def id_of(folder: Path) -> str:
    found = json.loads((folder / "schema.json").read_text())["id"]
    assert isinstance(found, str) and len(bytes.fromhex(found)) == 16
    return found


def nonce_of(folder: Path) -> int:
    return int(np.load(folder / "state.npy")[0]["nonce"])


def test_every_creation_and_every_overwriting_gives_a_folder_a_new_id(tmp_path: Path) -> None:
    make(tmp_path / "a", 1).close()
    make(tmp_path / "b", 1).close()
    first, other = id_of(tmp_path / "a"), id_of(tmp_path / "b")
    make(tmp_path / "a", 2).close()
    assert id_of(tmp_path / "a") == first
    make(tmp_path / "a", 1, overwrite=True).close()
    assert len({first, other, id_of(tmp_path / "a")}) == 3


def test_every_copy_of_a_folder_keeps_its_id_and_so_does_a_change_of_its_schema(tmp_path: Path) -> None:
    with make(tmp_path / "a", 1, 2, 3) as buffer:
        wanted = id_of(tmp_path / "a")
        buffer.snapshot(tmp_path / "snapshot")
        pack(tmp_path / "a", tmp_path / "packed")
        unpack(tmp_path / "packed", tmp_path / "unpacked", episodes=[0, 1, 2])
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        buffer.add_field("y", ("int", (), 1))
        buffer.rename_field("y", "z")
        buffer.drop_field("z")
    assert {id_of(tmp_path / name) for name in ("a", "snapshot", "packed", "unpacked", "copy")} == {wanted}


def test_a_part_of_a_folder_has_an_id_that_follows_from_the_folder_and_its_episodes(tmp_path: Path) -> None:
    make(tmp_path / "a", 1, 2, 3).close()
    for name, episodes in {"head": [0, 1], "again": slice(2), "tail": [2]}.items():
        pack(tmp_path / "a", tmp_path / name, episodes=episodes)
    assert id_of(tmp_path / "head") == id_of(tmp_path / "again")
    assert len({id_of(tmp_path / name) for name in ("a", "head", "tail")}) == 3
    assert len(ConcatBuffer([tmp_path / "head", tmp_path / "tail"])) == 3


def test_whoever_takes_the_lock_draws_another_nonce_and_a_snapshot_stands_where_its_source_does(tmp_path: Path) -> None:
    seen = []
    for value in (1, 2):
        with make(tmp_path / "a", value):
            seen.append(nonce_of(tmp_path / "a"))
    assert seen[0] != seen[1]
    ReplayBuffer.from_folder(tmp_path / "a", read_only=True).snapshot(tmp_path / "copy")
    a, copy = (np.load(tmp_path / name / "state.npy")[0] for name in ("a", "copy"))
    assert all(a[word] == copy[word] for word in ("term", "nonce", "changes", "next"))


@pytest.mark.parametrize("value", [None, "", "x" * 32, "A" * 32, "0" * 31, 5])
def test_a_schema_without_an_id_is_refused(tmp_path: Path, value: Any) -> None:
    make(tmp_path, 1).close()
    schema = json.loads((tmp_path / "schema.json").read_text())
    schema["id"] = value
    if value is None:
        del schema["id"]
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    with pytest.raises(SchemaError, match=r"\bid\b"):
        ReplayBuffer.from_folder(tmp_path)


def test_one_buffer_twice_in_a_root_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "shard-00000", 1).close()
    make(tmp_path / "shard-00001", 1).close()
    root = ConcatBuffer.from_root(tmp_path)
    assert len(root) == 2
    shutil.copytree(tmp_path / "shard-00000", tmp_path / "shard-00003")
    text = "shard-00003 and .*shard-00000 are one buffer twice, or a copy of it: both have the id .*; leave one out"
    for read in (root.refresh, lambda: ConcatBuffer.from_root(tmp_path)):
        with pytest.raises(SchemaError, match=text):
            read()
    folders = [tmp_path / "shard-00000", tmp_path / "shard-00001"]
    for again in (folders[0], tmp_path / "shard-00003"):
        with pytest.raises(SchemaError, match="are one buffer twice"):
            ConcatBuffer([*folders, again])
    shutil.rmtree(tmp_path / "shard-00003")
    root.refresh()
    assert len(root) == 2


LEVEL = {"timestep_level": True, "return_indices": True, "seed": 3}


def test_an_epoch_is_gone_on_with_on_a_copy_and_on_no_other_buffer(tmp_path: Path) -> None:
    make(tmp_path / "a", 1, 2).close()
    make(tmp_path / "b", 1, 2).close()
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    loader = ReplayBuffer.from_folder(tmp_path / "a", read_only=True).dataloader(1, shuffle=True, **LEVEL)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch["_indices"].tolist() for batch in batches]
    other = ReplayBuffer.from_folder(tmp_path / "b", read_only=True).dataloader(1, shuffle=True, **LEVEL)
    with pytest.raises(
        SchemaError, match=f"has the id {id_of(tmp_path / 'b')}, the epoch is of {id_of(tmp_path / 'a')}"
    ):
        other.load_state_dict(state)
    with ReplayBuffer.from_folder(tmp_path / "copy") as copy:
        copy.store_episode(x=[3], reward=[3])  # another writer: the epoch is of the same buffer all the same
        again = copy.dataloader(1, shuffle=True, **LEVEL)
        again.load_state_dict(state)
        assert [batch["_indices"].tolist() for batch in again] == rest


def test_a_shard_that_took_the_place_of_another_is_none_of_an_epoch_that_was_begun_before(tmp_path: Path) -> None:
    make(tmp_path / "shard-00000", 1, 2).close()
    make(tmp_path / "shard-00001", 1, 2).close()
    loader = ConcatBuffer.from_root(tmp_path).dataloader(1, shuffle=True, **LEVEL)
    next(iter(loader))
    state = loader.state_dict()
    shutil.rmtree(tmp_path / "shard-00001")
    make(tmp_path / "shard-00001", 7, 8).close()
    again = ConcatBuffer.from_root(tmp_path).dataloader(1, shuffle=True, **LEVEL)
    with pytest.raises(StaleEpisodeError, match=r"shard-00001: 2 episodes of the epoch, \[0, 1\] first"):
        again.load_state_dict(state)
