"""Every value of the options that say how a buffer is written and trusted does what its docstring says."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import Faulty, flags_of, in_child, system
from inside import get_inside, place_of_row, set_inside
from kill_writer import FIELDS, META_FIELDS, RING, content, exact, following, make, same, staged, steps
from specification import CHECKED, CUT, OPEN, STATE_BYTES, STATE_WORD

from memmap_buffer import EpisodeStateError, ReplayBuffer, SchemaError, WriterLostError, verify

CHUNK = 3 * 4300  # bytes: three steps
COLUMNS = len(FIELDS) + len(META_FIELDS)


def filled(folder: Path, count: int = 3, **options: Any) -> ReplayBuffer:
    buffer = make(folder, **options)
    for serial in range(count):
        buffer.store_episode(**content(serial))
    return buffer


def barriers_of(work: Callable[[], Any]) -> int:
    with system(only=("barrier",)) as seen:
        work()
    return seen.count


def store(buffer: ReplayBuffer, serial: int) -> Callable[[], None]:
    return lambda: buffer.store_episode(**content(serial))


# durability and sync_every


def test_process_waits_for_no_disk_and_power_for_each_file_and_the_records(tmp_path):
    """durability: one barrier a file (fields, meta fields, checksums), then one for the records."""
    with filled(tmp_path / "process", durability="process") as buffer:
        assert barriers_of(store(buffer, 3)) == 0
        assert barriers_of(buffer.flush) > COLUMNS
    with filled(tmp_path / "power", durability="power") as buffer:
        assert barriers_of(store(buffer, 3)) == COLUMNS + 1 + 1
        assert barriers_of(lambda: buffer.update(0, version=1)) <= COLUMNS + 2 + 1


class Watched(Faulty):
    """Notes how many episodes another reader sees at each barrier."""

    def __init__(self, folder: Path) -> None:
        super().__init__(only=("barrier",))
        self.seen: list[int] = []
        self._folder = folder

    def _do(self, name: str, *arguments: Any) -> Any:
        if name == "barrier":
            self.seen.append(len(ReplayBuffer.from_folder(self._folder, read_only=True)))
        return super()._do(name, *arguments)


def test_power_puts_the_barriers_of_the_data_before_the_record(tmp_path, monkeypatch):
    """durability="power": nothing is visible while a barrier of its rows is outstanding, all before the last."""
    with filled(tmp_path / "buffer", durability="power") as buffer:
        watched = Watched(tmp_path / "buffer")
        set_inside(monkeypatch, system=watched)
        buffer.store_episode(**content(3))
        monkeypatch.undo()
    assert watched.seen == [3] * (COLUMNS + 1) + [4]


def test_group_commit_shares_its_barriers_and_shows_its_episodes_together(tmp_path):
    """sync_every=3: two episodes wait unseen; the third shows all of them, behind one set of barriers."""
    folder = tmp_path / "buffer"
    with filled(folder, durability="power", sync_every=3) as buffer:
        other = ReplayBuffer.from_folder(folder, read_only=True)
        for turn in range(3):
            first = 3 + 3 * turn
            before = exact(other)
            assert barriers_of(store(buffer, first)) == 0
            assert barriers_of(store(buffer, first + 1)) == 0
            assert exact(other) == exact(buffer) == before
            sectors = (1, 2)  # one barrier for the records of each sector that the group's slots lie in
            assert barriers_of(store(buffer, first + 2)) - (COLUMNS + 1) in sectors
            assert exact(other) == exact(buffer) == [*before, first, first + 1, first + 2][-RING["max_episodes"] :]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_flush_and_close_show_a_group_that_is_not_full(tmp_path, end):
    """sync_every: what was returned is never waiting for an episode that does not come."""
    buffer = filled(tmp_path / "buffer", 2, durability="power", sync_every=3)
    assert exact(tmp_path / "buffer") == []
    getattr(buffer, end)()
    assert exact(tmp_path / "buffer") == [0, 1]
    buffer.close()


def test_flush_hides_no_open_episode_from_who_read_it_before(tmp_path):
    """publish="step": the record that vouches for its steps is told of."""
    with ReplayBuffer(tmp_path / "buffer", 4, 8, {"x": "int"}, publish="step", spare_slots=2) as buffer:
        reader = ReplayBuffer.from_folder(tmp_path / "buffer", read_only=True)
        episodes = [buffer.begin_episode() for _ in range(2)]
        for t in range(2):
            for episode in episodes:
                episode.store(x=t)
        everything = [source.get_all_data()["x"].tolist() for source in (buffer, reader)]
        buffer.flush()
        assert [source.get_all_data()["x"].tolist() for source in (buffer, reader)] == everything


def test_what_needs_more_spare_slots_is_refused_at_once_and_names_the_number(tmp_path):
    """sync_every, and episodes written in place: before anything is created, and before a step is stored."""
    folder = tmp_path / "buffer"
    with pytest.raises(EpisodeStateError, match=r"sync_every=5 .* create the buffer with spare_slots=5"):
        make(folder, durability="power", sync_every=5)
    assert not folder.exists()
    for options in ({"stage": "disk"}, {"publish": "step"}):
        with make(folder, overwrite=True, **options) as buffer:
            episodes = [buffer.begin_episode() for _ in range(RING["spare_slots"])]
            with pytest.raises(EpisodeStateError, match=r"4 open episodes .* create the buffer with spare_slots=4"):
                buffer.begin_episode()
            episodes[0].abort()
            buffer.begin_episode()
    with pytest.raises(EpisodeStateError, match="create the buffer with spare_slots=4"):
        ReplayBuffer.from_folder(folder, durability="power", sync_every=4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"durability": "disk"}, "durability: got 'disk', expected one of 'process', 'power'"),
        ({"checksum": "md5"}, "checksum: got 'md5', expected one of 'crc32', None"),
        ({"publish": "now"}, "publish: got 'now', expected one of 'episode', 'step'"),
        ({"stage": "gpu"}, "stage: got 'gpu', expected one of 'ram', 'disk'"),
        ({"verify": True}, "verify: got True, expected one of"),
        ({"sync_every": 0}, "sync_every: got 0, expected a whole number from 1"),
        ({"sync_every": True}, "sync_every: got True"),
        ({"sync_every": 2}, "needs durability='power' and publish='episode'"),
        ({"sync_every": 2, "durability": "power", "publish": "step"}, "needs durability='power' and publish='episode'"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_is_created(tmp_path, options, text):
    """Every option: the text names the value and what is possible."""
    with pytest.raises(SchemaError, match=text):
        make(tmp_path / "buffer", **options)
    assert not (tmp_path / "buffer").exists()


# stage and publish


def test_staging_on_disk_bounds_the_memory_of_an_episode(tmp_path):
    """stage="disk": ten times as long as the chunk, it takes as much memory as the chunk and little more."""
    step, chunk = 1 << 16, get_inside("staged_bytes")
    length = 10 * chunk // step
    peaks = {}
    for stage in ("ram", "disk"):
        with ReplayBuffer(tmp_path / stage, 1, length, {"x": ("uint8", (step,))}, stage=stage) as buffer:
            x = np.arange(step, dtype=np.uint8)
            tracemalloc.start()
            with buffer.one_episode():
                for t in range(length):
                    x[0] = t % 251
                    buffer.store(x=x)
            peaks[stage] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            got = buffer.episode(0)["x"]
            assert (got[:, 0] == np.arange(length) % 251).all()
            assert (got[:, 1:] == x[1:]).all()
    assert peaks["disk"] < 2 * chunk
    assert peaks["ram"] > 10 * chunk


@pytest.mark.parametrize("stage", ["ram", "disk"])
def test_an_episode_is_visible_when_it_is_complete(tmp_path, monkeypatch, stage):
    """publish="episode": not before, even where its steps are on the disk already; an abort frees its slot."""
    set_inside(monkeypatch, staged_bytes=CHUNK)
    folder = tmp_path / "buffer"
    with filled(folder, stage=stage) as buffer:
        serial = next(s for s in range(3, 99) if len(content(s)["t"]) > 12)
        while following(buffer) < serial:
            buffer.store_episode(**content(following(buffer)))
        before = exact(buffer)
        for _ in range(3 * RING["spare_slots"]):
            staged(buffer, serial).abort()
        episode = staged(buffer, serial)
        assert exact(folder) == exact(buffer) == before
        episode.publish()
        assert exact(folder) == exact(buffer) == [*before, serial][-RING["max_episodes"] :]


@pytest.mark.parametrize("durability", ["process", "power"])
def test_each_step_is_visible_at_once_and_stays(tmp_path, durability):
    """publish="step": to another reader too; an exception keeps what was stored, flagged as cut short."""
    folder = tmp_path / "buffer"
    serial = next(s for s in range(99) if len(content(s)["t"]) > 5)
    with make(folder, publish="step", durability=durability) as buffer:
        other = ReplayBuffer.from_folder(folder, read_only=True)
        with (
            pytest.raises(RuntimeError, match="stop here"),
            buffer.one_episode(task=content(serial)["task"]) as episode,
        ):
            for t, step in enumerate(steps(serial)):
                episode.store(**step)
                other.refresh()
                assert other.episode_lens.tolist() == [t + 1]
                assert flags_of(folder)[0] & OPEN
                if t == 3:
                    raise RuntimeError("stop here")
        assert same(other.episode(0) | {"serial": np.full(4, serial)}, serial, length=4)
        assert flags_of(folder)[0] & (OPEN | CUT) == CUT


# checksum and verify


def spoil(folder: Path, slot: int, name: str = "image") -> None:
    """Change one byte of a slot's rows."""
    path, offset = place_of_row(folder, name, slot)
    with path.open("r+b") as file:
        offset += 7
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def reboot(folder: Path) -> None:
    """What the folder is after another boot: the words by which the boot is known are of an earlier one."""
    with (folder / "state.npy").open("r+b") as file:
        file.seek(8 * STATE_WORD["boot"] - STATE_BYTES, os.SEEK_END)
        file.write(b"another boot id!")


def leave_unclean(folder: Path, count: int = 3, **options: Any) -> None:
    """A buffer whose writer ended without `close`."""

    def write(_: Any) -> None:
        filled(folder, count, **options)

    assert in_child(write).status == 0


@pytest.fixture
def checks(monkeypatch) -> Counter[int]:
    """How often each slot is compared with its checksums."""
    counted, real = Counter[int](), get_inside("damaged")

    def damaged(self: Any, slot: int) -> list[str]:
        counted[slot] += 1
        return real(self, slot)

    set_inside(monkeypatch, damaged=damaged)
    return counted


def test_no_checksum_means_none_is_stored_or_compared(tmp_path):
    """checksum=None: the flag says so, damage goes unseen; "crc32" finds it and names the field."""
    for checksum in ("crc32", None):
        folder = tmp_path / str(checksum)
        filled(folder, checksum=checksum).close()
        assert all(bool(flags & CHECKED) == (checksum is not None) for flags in flags_of(folder).values())
        spoil(folder, slot=1)
        found = [(finding.serial, finding.field) for finding in verify(folder)]
        assert found == ([(1, "image")] if checksum else [])
        assert ReplayBuffer.from_folder(folder, verify="always").serials.tolist() == ([0, 2] if checksum else [0, 1, 2])


def test_verify_says_when_checksums_are_compared(tmp_path, checks):
    """verify: "always" on opening, "read" at every read, "never" and (after a clean close) "auto" not at all."""
    filled(tmp_path / "buffer").close()
    for verification, opening, reading in [("always", 1, 0), ("read", 0, 2), ("never", 0, 0), ("auto", 0, 0)]:
        checks.clear()
        buffer = ReplayBuffer.from_folder(tmp_path / "buffer", read_only=True, verify=verification)
        assert checks == Counter(dict.fromkeys(range(3), opening) if opening else {})
        checks.clear()
        for _ in range(2):
            buffer.episode(1)
        assert (checks[1] >= reading) if reading else not checks


@pytest.mark.parametrize(("verification", "served"), [("auto", True), ("read", False), ("never", True)])
def test_verify_decides_whether_damage_on_the_disk_is_served(tmp_path, verification, served):
    """verify: damage that happened since the episode was first read is seen by "read" alone."""
    filled(tmp_path / "buffer").close()
    buffer = ReplayBuffer.from_folder(tmp_path / "buffer", read_only=True, verify=verification)
    assert exact(buffer) == [0, 1, 2]
    spoil(tmp_path / "buffer", slot=1)
    batch = buffer.sample(500, timestep_level=True)
    assert (1 in batch["serial"].tolist()) == served
    assert len(buffer) == 2 + served


def test_damage_between_two_batches_is_seen_by_the_second(tmp_path):
    """verify="read": also where batches are planned many at a time."""
    filled(tmp_path / "buffer").close()
    buffer = ReplayBuffer.from_folder(tmp_path / "buffer", read_only=True, verify="read")
    batches = iter(buffer.dataloader(1, timestep_level=True))
    for _ in range(5):
        buffer.sample(200, timestep_level=True)
        next(batches)
    spoil(tmp_path / "buffer", slot=1)
    assert 1 not in buffer.sample(200, timestep_level=True)["serial"].tolist()
    assert 1 not in [batch["serial"].item() for batch in batches]


def test_after_another_boot_lost_episodes_are_dropped_and_named_and_the_rest_is_exact(tmp_path, caplog, checks):
    """Fault 12: durability="process", random sectors gone; each slot is checked once, when it is first read."""
    folder = tmp_path / "buffer"
    leave_unclean(folder, 12)
    spoil(folder, slot=6)
    spoil(folder, slot=9, name="state")
    lost = {6, 9}
    reboot(folder)
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    assert buffer.serials.tolist() == list(range(4, 12))
    assert not checks
    with caplog.at_level(logging.WARNING, "memmap_buffer"):
        batch = buffer.sample(500, timestep_level=True, return_indices=True)
    assert not set(batch["_indices"][:, 0].tolist()) & lost
    assert sorted(text for text in caplog.messages if "fails the checksum" in text) == [
        f"{folder}: episode {serial} fails the checksum of {name!r} and is not served"
        for serial, name in ((6, "image"), (9, "state"))
    ]
    assert set(exact(buffer)) >= set(range(4, 12)) - lost
    assert not set(exact(buffer)) & lost
    assert set(checks.values()) == {1}


@pytest.mark.parametrize(
    ("how", "moved"),
    [
        ("clean", None),
        ("same boot", None),
        ("power", None),
        ("clean", shutil.copytree),
        ("same boot", os.rename),
        ("power", os.rename),
    ],
)
def test_nothing_is_checked_where_nothing_can_be_lost(tmp_path, checks, how, moved):
    """Fault 15: after a clean close, without another boot, or where every publication had its barriers.

    Also where the folder has another name, and of a folder that was closed in a copy.
    """
    folder = tmp_path / "buffer"
    if how == "clean":
        filled(folder).close()
    else:
        leave_unclean(folder, durability="power" if how == "power" else "process")
    if how != "same boot":
        reboot(folder)
    if moved:
        moved(folder, tmp_path / "moved")
        folder = tmp_path / "moved"
    buffer = ReplayBuffer.from_folder(folder)
    buffer.sample(50, timestep_level=True)
    assert exact(buffer) == [0, 1, 2]
    store(buffer, 3)()
    assert exact(buffer) == [0, 1, 2, 3]
    buffer.close()
    assert not checks


def test_a_writer_after_another_boot_leaves_the_doubts_to_later_readers(tmp_path, checks):
    """Fault 12: a new writer of this boot does not make older episodes trusted; its own are."""
    folder = tmp_path / "buffer"
    leave_unclean(folder)
    spoil(folder, slot=1)
    reboot(folder)
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.store_episode(**content(3))
    reader = ReplayBuffer.from_folder(folder, read_only=True)
    for i in range(3):
        reader.episode(min(i, len(reader) - 1))
    assert exact(reader) == [0, 2, 3]
    assert 3 not in checks


# Copies


def told(folder: Path) -> dict[str, int]:
    """What a folder says of its `state.npy`: the device and the inode."""
    words = np.load(folder / "state.npy").view("<u8")
    return {name: int(words[STATE_WORD[name]]) for name in ("device", "inode")}


def tell(folder: Path, **words: int) -> None:
    with (folder / "state.npy").open("r+b") as file:
        for name, value in words.items():
            file.seek(8 * STATE_WORD[name] - STATE_BYTES, os.SEEK_END)
            file.write(value.to_bytes(8, "little"))


def test_whoever_takes_the_lock_says_which_file_the_counters_are_in(tmp_path):
    folder, copy = tmp_path / "buffer", tmp_path / "copy"
    make(folder).close()
    shutil.copytree(folder, copy)
    with ReplayBuffer.from_folder(copy) as buffer:
        assert told(copy) == told(folder)
        buffer.store_episode(**content(0))
    for each in (folder, copy):
        status = (each / "state.npy").stat()
        assert told(each) == {"device": status.st_dev, "inode": status.st_ino}


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_copy_of_a_folder_that_was_not_closed_is_checked_until_a_writer_settled_it_and_later(
    tmp_path, checks, durability
):
    """What was copied beside a writer may be of two moments, whatever barriers there were; what follows is trusted."""
    leave_unclean(tmp_path / "buffer", durability=durability)
    folder = Path(shutil.copytree(tmp_path / "buffer", tmp_path / "copy"))
    spoil(folder, slot=1)
    reader = ReplayBuffer.from_folder(folder, read_only=True)
    with ReplayBuffer.from_folder(folder, durability=durability) as writer:
        writer.store_episode(**content(3))
        writer.sample(50, timestep_level=True)
        assert exact(writer) == [0, 2, 3]
    assert told(folder)["inode"] == (folder / "state.npy").stat().st_ino
    for buffer in (reader, ReplayBuffer.from_folder(folder, read_only=True)):
        checks.clear()
        buffer.sample(50, timestep_level=True)
        assert exact(buffer) == [0, 2, 3]
        assert checks.keys() == {0, 1, 2}


def test_a_snapshot_of_such_a_copy_is_checked_as_the_copy_is(tmp_path):
    leave_unclean(tmp_path / "buffer")
    folder = Path(shutil.copytree(tmp_path / "buffer", tmp_path / "copy"))
    spoil(folder, slot=1)
    ReplayBuffer.from_folder(folder, read_only=True).snapshot(tmp_path / "snapshot")
    buffer = ReplayBuffer.from_folder(tmp_path / "snapshot", read_only=True)
    buffer.sample(50, timestep_level=True)
    assert exact(buffer) == [0, 2]


@pytest.mark.parametrize(
    ("said", "rebooted", "checked"),
    [
        ({}, False, False),
        ({"inode": 0}, False, False),  # of a folder that was written before there were such words
        ({"inode": 0, "device": 0}, True, False),
        ({"inode": 1}, False, True),
        ({"inode": 1}, True, True),
        ({"device": 1}, False, True),
        ({"device": 1}, True, False),  # devices are numbered anew when the machine starts
    ],
)
def test_a_folder_is_a_copy_if_it_names_another_file(tmp_path, checks, said, rebooted, checked):
    """durability="power", so that another boot is no reason of its own."""
    folder = tmp_path / "buffer"
    leave_unclean(folder, durability="power")
    tell(folder, **said)
    if rebooted:
        reboot(folder)
    assert exact(ReplayBuffer.from_folder(folder, read_only=True)) == [0, 1, 2]
    assert bool(checks) is checked


# A barrier that fails


@pytest.mark.parametrize("at", range(1, COLUMNS + 3))
def test_a_failed_barrier_ends_this_writer_and_never_asks_again(tmp_path, at):
    """Fault 22: EIO at barrier `at`, then success, as Linux reports it; what was acknowledged stays."""
    folder = tmp_path / "buffer"
    buffer = filled(folder, durability="power")
    episode = staged(buffer, 3)
    with system(at=at, error=errno.EIO, only=("barrier",)) as faulty:
        with pytest.raises(OSError, match="Input/output error") as caught:
            episode.publish()
        assert caught.value.errno == errno.EIO
        for write in (episode.publish, buffer.flush, store(buffer, 3), lambda: buffer.update(0, version=1)):
            with pytest.raises(WriterLostError, match="a barrier failed") as lost:
                write()
            assert lost.value.reason == "poisoned"
        buffer.close()
        assert faulty.count == at
    assert exact(buffer)[:3] == exact(folder)[:3] == [0, 1, 2]
    assert not np.load(folder / "state.npy")["clean"].item()
    with ReplayBuffer.from_folder(folder, durability="power") as again:
        again.store_episode(**content(following(again)))
    assert exact(folder) in ([0, 1, 2, 3], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("when", ["flush", "close"])
def test_after_a_failed_barrier_reopening_checks_what_may_be_lost(tmp_path, when):
    """Fault 22: the kernel forgets pages that it could not write, in the same boot; they are never served."""
    folder = tmp_path / "buffer"
    buffer = filled(folder)
    with system(at=1, error=errno.EIO, only=("barrier",)), pytest.raises(OSError, match="Input/output error"):
        getattr(buffer, when)()
    buffer.close()
    spoil(folder, slot=1)
    with ReplayBuffer.from_folder(folder) as again:
        [again.episode(min(i, len(again) - 1)) for i in range(3)]
        assert exact(again) == [0, 2]


# Where every byte goes through


def test_writing_to_a_full_device_raises_enospc():
    """Fault 24: the one function through which every byte goes."""
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            get_inside("write_all")(fd, b"1234", 0)
    finally:
        os.close(fd)
