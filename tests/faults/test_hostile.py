"""A folder from a stranger: whatever is in it, no code runs, nothing outside is touched, nothing hangs or explodes.

Each hostile folder is taken through every door: opened to be read and to be written, verified, repaired, copied,
replaced. A door gives right data, or one of our errors.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import damage
import numpy as np
import pytest
from damage import header_size, killed, rewrite_record, rewrite_state
from doors import DOORS, copy, look, mend, read, replace, write
from fault_injection import KILLED, in_child, listing, shown, without_barriers
from inside import create_empty, get_inside, opened, place_of_row, set_inside
from specification import sealed

from memmap_buffer import (
    CorruptBufferError,
    MemmapBufferError,
    Prioritized,
    ReplayBuffer,
    Schema,
    SchemaError,
    Window,
    pack,
    repair,
    verify,
)

HANGS_AFTER = 20  # seconds
MAX_SERIAL = get_inside("max_serial")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return damage.copy_of_example(tmp_path / "buffer")


@pytest.fixture(autouse=True)
def _no_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, and the disk takes milliseconds for each barrier."""
    without_barriers(monkeypatch)


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def hangs(*_: Any) -> None:
        raise AssertionError(f"it hangs for more than {HANGS_AFTER} seconds")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_AFTER)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def outside(here: Path) -> list[Any]:
    """What lies beside the folder, and the bytes of the victims."""
    victim = here / "victim"
    names = sorted(path.name for path in here.iterdir() if path.name != "copy")
    return [names, listing(here / "victims"), victim.read_bytes(), victim.stat().st_mtime_ns]


def enter(prepare: Callable[[Path], Any], place: Path, doors: tuple[Any, ...] = DOORS) -> dict[str, str]:
    """Take the folder, prepared anew, through each door; door -> the error, or "".

    Beside it lies `victim`, the example's bytes, and `victims`, a folder of them; nobody may touch either.
    """
    outcomes = {}
    for door in doors:
        here = place / door.__name__
        folder = damage.copy_of_example(here / "buffer")
        (here / "victim").write_bytes((folder / "data/text.npy").read_bytes())
        shutil.copytree(folder / "data", here / "victims")
        prepare(folder)
        before = outside(here)
        outcomes[door.__name__] = ""
        try:
            door(folder)
        except MemmapBufferError as error:
            outcomes[door.__name__] = f"{type(error).__name__}: {error}"
        assert outside(here) == before
    return outcomes


# 1. No code


def test_no_code_of_a_folder_is_run(folder: Path, tmp_path: Path) -> None:
    """Fault 52: files of other programs are ignored, whatever their names; the interpreter itself is the witness."""
    bomb = b"cos\nsystem\n(S'touch " + str(tmp_path / "pwned").encode() + b"'\ntR."
    objects = get_inside("npy_header")("'|O'", (1,)) + bomb
    for name in ("metadata.pkl", "pickle.pkl", "schema.pkl", "extra/splits.pkl", "data/more.npy", "priority/tree.npy"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(objects if name.endswith("npy") else bomb)
    for name in ("__init__.py", "conftest.py", "sitecustomize.py", "numpy.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')")
    code = """
        import sys
        sys.path[:0] = {path!r}
        from pathlib import Path
        import doors
        folder, seen = Path({folder!r}), set()

        def watch(event, arguments):
            if event in {events!r}:
                seen.add(event)
            if event == "open" and arguments[0] and arguments[1] and str(arguments[0]).startswith(str(folder)):
                seen.add(f"open {{arguments[0]}}")  # the library opens by name, relative to the folder
            if event in ("import", "compile") and str(folder) in str(arguments):
                seen.add(f"{{event}} {{arguments}}")

        def enter(folder):
            for door in doors.DOORS:
                if door is not doors.replace:
                    door(folder)

        enter(Path({example!r}))  # imports and caches are made here
        sys.addaudithook(watch)
        enter(folder)
        print(sorted(seen))
    """
    path, example = sys.path, damage.copy_of_example(tmp_path / "example" / "buffer")
    events = ("pickle.find_class", "marshal.loads", "os.system", "os.exec", "subprocess.Popen", "ctypes.dlopen")
    values = {"path": path, "folder": str(folder), "example": str(example), "events": events}
    done = subprocess.run(
        [sys.executable, "-c", dedent(code).format(**values)], capture_output=True, text=True, cwd=folder.parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '|O', 'fortran_order': False, 'shape': (6, 5), }",
        b"__import__('os').system('touch pwned')",
        b"{'descr': '<f4', 'fortran_order': True, 'shape': (6, 5), }",
        b"{'descr': '>i8', 'fortran_order': False, 'shape': (6, 5), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000000,), }",
        b"{'descr': [('a', '<i8'), ('b', '|O')], 'fortran_order': False, 'shape': (6, 5), }",
        b"(" * 4000,
    ],
    ids=lambda header: header[:30].decode(),
)
def test_a_header_is_compared_and_never_evaluated(tmp_path: Path, header: bytes) -> None:
    """Fault 51."""
    version = 1 + len(header) % 3

    def prepare(folder: Path) -> None:
        path = folder / "data/number.npy"
        whole = path.read_bytes()
        size = len(header).to_bytes(2 if version == 1 else 4, "little")
        path.write_bytes((b"\x93NUMPY" + bytes([version, 0]) + size + header + whole)[: len(whole)])

    found = enter(prepare, tmp_path)
    assert found.pop("look") == ""
    assert found.pop("mend") == ""
    assert found.pop("replace") == ""
    assert all(text.startswith("CorruptBufferError") for text in found.values())
    assert not Path("pwned").exists()


# 2. No way out of the folder


@pytest.mark.parametrize(
    "name",
    ["..", "../x", "../../victim", "/etc/passwd", "a/b", "a\\b", "C:x", "a\0b", "\ud800", "x" * 300, "a..b", ".a", ""],
    ids=lambda name: ascii(name)[:20],
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """Fault 48, through every door."""

    def prepare(folder: Path) -> None:
        document = json.loads((folder / "schema.json").read_text())
        group = "fields" if len(name) % 2 else "meta_fields"
        document[group][name] = {**document["fields"]["number"], "column": 20}
        (folder / "schema.json").write_text(json.dumps(document))
        (folder / "schema.json.new").write_text(json.dumps(document))

    found = enter(prepare, tmp_path)
    assert found.pop("look") == ""
    assert all(text for text in found.values()), found


def odd_files() -> dict[str, Callable[[Path, Path], Any]]:
    """What may stand where a file should: (the path, the victim) -> it is there."""

    def pipe(path: Path, victim: Path) -> None:
        os.mkfifo(path)

    def device(path: Path, victim: Path) -> None:
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("only root may make devices")

    def unix_socket(path: Path, victim: Path) -> None:
        here = Path.cwd()
        os.chdir(path.parent)
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(here)

    return {
        "a link": lambda path, victim: path.symlink_to(victim),
        "a link to nothing": lambda path, victim: path.symlink_to(victim.parent / "nothing"),
        "a link to a device": lambda path, victim: path.symlink_to("/dev/zero"),
        "a link to itself": lambda path, victim: path.symlink_to(path.name),
        "a hard link": lambda path, victim: os.link(victim, path),
        "a pipe": pipe,
        "a device": device,
        "a socket": unix_socket,
        "a folder": lambda path, victim: path.mkdir(),
    }


PLACES = (
    "schema.json",
    "schema.json.new",
    ".redo",
    ".redo.bad",
    ".lock",
    "episodes.npy",
    "state.npy",
    "data/text.npy",
    "meta/name.npy",
)


@pytest.mark.parametrize("what", odd_files())
@pytest.mark.parametrize("place", PLACES)
def test_no_link_pipe_or_device_is_followed_waited_for_or_written_to(tmp_path: Path, place: str, what: str) -> None:
    """Fault 50, through every door; `.lock` too (CVE-2025-68146, CVE-2026-22701)."""

    def prepare(folder: Path) -> None:
        (folder / place).unlink(missing_ok=True)
        odd_files()[what](folder / place, folder.parent / "victim")

    found = enter(prepare, tmp_path)
    assert place != "data/text.npy" or what == "a hard link" or found["read"].startswith("CorruptBufferError")
    if place.startswith((".", "schema.json.new")):
        assert found["read"] == found["look"] == ""


@pytest.mark.parametrize("what", odd_files())
@pytest.mark.parametrize("place", ["td.npy", "td.npy.new", "td.head.npy", "td.head.npy.new", "td.lock", "td.lock/a"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_what_stands_where_priorities_lie_is_no_error_of_others(
    tmp_path: Path, place: str, what: str, used: bool
) -> None:
    """A link, a folder, a pipe in the place of a tree, of its head, its lock, or of what it is renamed from."""

    def draw(folder: Path) -> None:
        with ReplayBuffer.from_folder(folder) as buffer:
            buffer.sample(4, timestep_level=True, prioritized=Prioritized())

    def prepare(folder: Path) -> None:
        if used:
            draw(folder)
        path = folder / "priority" / place
        if path.parent.is_file():
            path.parent.unlink()
        path.parent.mkdir(exist_ok=True, parents=True)
        path.unlink(missing_ok=True)
        odd_files()[what](path, folder.parent / "victim")

    enter(prepare, tmp_path, (draw, read, copy, replace))


@pytest.mark.parametrize("sub", ["data", "meta", "lost+found"])
@pytest.mark.parametrize("what", ["a link", "a link to nothing", "a pipe", "a hard link"])
def test_no_subfolder_is_followed_out(tmp_path: Path, sub: str, what: str) -> None:
    """Fault 50."""

    def prepare(folder: Path) -> None:
        victim = folder.parent / ("victims" if what == "a link" else "victim")
        shutil.rmtree(folder / sub, ignore_errors=True)
        odd_files()[what](folder / sub, victim)
        damage.flip(folder / "state.npy", 3)  # so that `repair` has something to do

    found = enter(prepare, tmp_path)
    assert found["mend"].startswith("CorruptBufferError") or sub == "meta"


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    """Fault 50: whoever names the folder chose the link."""
    (tmp_path / "link").symlink_to(folder)
    assert shown(tmp_path / "link") == shown(folder)
    write(tmp_path / "link")


# 2b. No row of another, in a packed folder


def packed_records() -> dict[str, dict[int, dict[str, int]]]:
    """What -> slot -> what its record says. The lengths are 5, 2, 3 and 4, so the first rows 0, 5, 7 and 10 of 14."""
    return {
        "a row behind the last": {3: {"first_row": 11}},
        "all rows behind the last": {3: {"first_row": 14}},
        "a first row of 2**63": {1: {"first_row": 2**63}},
        "a first row that wraps around": {0: {"first_row": 2**64 - 2}},
        "a length beyond the file": {3: {"length": 5}},
        "a length of 2**32 - 1": {2: {"length": 2**32 - 1}},
        "the rows of another": {2: {"first_row": 5}},
        "a row of the one before": {1: {"first_row": 4}},
        "a row of the one behind": {1: {"length": 3}},
        "rows of all others": {0: {"first_row": 0, "length": 5}, 1: {"first_row": 3}, 2: {"first_row": 4}},
        "the same rows for all": {slot: {"first_row": 0} for slot in range(4)},
        "swapped": {0: {"first_row": 9}, 3: {"first_row": 0}},
    }


@pytest.mark.parametrize("what", packed_records())
def test_no_packed_record_shows_a_row_of_another_or_none(tmp_path: Path, what: str) -> None:
    """Fault 45, in a packed folder: what it touches is void, or fails its checksum; the others are as they were."""
    changes = packed_records()[what]
    whole = {serial: episode for serial, episode in shown(damage.example()) if serial - 2 not in changes}

    def prepare(folder: Path) -> None:
        shutil.rmtree(folder)
        pack(damage.example(), folder)
        for slot, values in changes.items():
            rewrite_record(folder, slot, **values)

    found = enter(prepare, tmp_path)
    assert found.pop("write").startswith("ReadOnlyError")
    assert all("no episode is left" in text for text in found.values() if text), found
    prepare(damage.copy_of_example(tmp_path / "again"))
    assert verify(tmp_path / "again")
    unchecked = dict(shown(tmp_path / "again"))
    assert all(unchecked[serial] == whole[serial] for serial in unchecked.keys() & whole.keys())
    checked = dict(shown(ReplayBuffer.from_folder(tmp_path / "again", read_only=True, verify="always")))
    assert checked.items() <= whole.items()


@pytest.mark.parametrize("rows", [1, 13, 15, 2**40, 2**62])
def test_a_packed_schema_of_other_rows_is_refused(tmp_path: Path, rows: int) -> None:
    """Fault 43, in a packed folder: every file is of exactly the size that the schema says."""

    def prepare(folder: Path) -> None:
        shutil.rmtree(folder)
        pack(damage.example(), folder)
        document = json.loads((folder / "schema.json").read_text())
        (folder / "schema.json").write_text(json.dumps({**document, "rows": rows}))

    found = enter(prepare, tmp_path, tuple(door for door in DOORS if door not in (look, mend, replace)))
    text = "SchemaError" if rows == 2**62 else "CorruptBufferError"
    assert all(error.startswith(text) for error in found.values()), found


def test_an_update_left_in_a_packed_folder_is_not_carried_out(tmp_path: Path, folder: Path) -> None:
    assert killed(folder, 5, "update") == KILLED
    pack(damage.example(), tmp_path / "packed")
    shutil.copy(folder / ".redo", tmp_path / "packed" / ".redo")
    before = listing(tmp_path / "packed")
    assert shown(ReplayBuffer.from_folder(tmp_path / "packed")) == shown(damage.example())
    assert listing(tmp_path / "packed") == before


# 3. No bomb


def small(work: Callable[[], Any], limit: int = 50 * 2**20) -> None:
    """Do it within this much memory."""
    tracemalloc.start()
    try:
        work()
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def bombs() -> dict[str, bytes]:
    document = json.loads((damage.example() / "schema.json").read_text())
    number = document["fields"]["number"]

    def but(**changes: Any) -> bytes:
        return json.dumps({**document, **changes}).encode()

    many = {f"f{i}": {**number, "column": i} for i in range(1024)}
    deep: Any = 0
    for _ in range(400):
        deep = [deep]
    return {
        "2 MiB": b" " * 2**21,
        "a sparse GiB": b"",
        "100,000 lists": b"[" * 100_000,
        "100,000 objects": b'{"a":' * 100_000,
        "a number of 500,000 digits": b'{"format": "memmap-buffer", "version": ' + b"9" * 500_000 + b"}",
        "an exponent": but(max_episodes=1).replace(b'"max_episodes": 1', b'"max_episodes": 1e999999'),
        "60,000 keys": json.dumps({str(i): 0 for i in range(60_000)}).encode(),
        "one key twice, 10,000 times": b"{" + b'"a":1,' * 10_000 + b'"a":1}',
        "1,024 fields": but(fields={name: {**spec, "shape": [2**60]} for name, spec in many.items()}),
        "33 dimensions": but(fields={"a": {**number, "shape": [1] * 33}}),
        "16 dimensions": but(fields={"a": {**number, "shape": [2**61] * 16}}),
        "a default of 400 lists": but(fields={"a": {**number, "default": deep}}),
        "a default of 50,000 numbers": but(fields={"a": {**number, "shape": [2**40], "default": [1] * 50_000}}),
        "a text of 4,096 characters": but(fields={"a": {**number, "dtype": "U4096", "shape": [2**50]}}),
        "all slots": but(max_episodes=2**62),
        "most slots": but(max_episodes=2**24 - 2, max_timesteps=2**31),
        "all columns": but(columns=2**31),
    }


@pytest.mark.parametrize("what", bombs())
def test_no_schema_takes_much_memory_or_time(folder: Path, what: str) -> None:
    """Fault 47: less than 50 MiB; and a few hundredths of a second, where `_no_hang` allows some."""
    (folder / "schema.json").write_bytes(bombs()[what])
    if what == "a sparse GiB":
        os.truncate(folder / "schema.json", 2**30)
    before = [path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))]
    with pytest.raises(MemmapBufferError, match=r"schema\.json|\.npy"):
        small(lambda: ReplayBuffer.from_folder(folder, read_only=True))
    small(lambda: verify(folder))
    assert [path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))] == before


def peak_of(code: str, *arguments: object) -> tuple[int, int]:
    """(MiB that a new process needs beyond importing the library, blocks that it reads from a disk) for some code."""
    program = f"""
        import resource, sys
        import memmap_buffer, numpy as np, torch
        from memmap_buffer import ReplayBuffer, verify
        usage = lambda: resource.getrusage(resource.RUSAGE_SELF)
        before = usage()
        folder = sys.argv[1]
        {code}
        after = usage()
        print(after.ru_maxrss - before.ru_maxrss >> 10, after.ru_inblock - before.ru_inblock)
    """
    command = [sys.executable, "-c", dedent(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mebibytes, blocks = done.stdout.split()[-2:]
    return int(mebibytes), int(blocks)


def test_opening_a_sparse_buffer_of_16_tebibytes_costs_no_reading_and_little_memory(tmp_path: Path) -> None:
    fields = {f"x{i}": ("uint8", 2**14) for i in range(4)}
    try:
        with ReplayBuffer(tmp_path / "buffer", 255, 2**20, fields) as buffer:
            buffer.store_episode(**{name: np.full((2, 2**14), 7, np.uint8) for name in fields})
    except SchemaError as error:
        pytest.skip(str(error))
    assert sum(path.stat().st_size for path in (tmp_path / "buffer").rglob("*")) > 15 * 2**40
    code = """
        buffer = ReplayBuffer.from_folder(folder, verify='always')
        assert buffer.sample(64)['x0'][0, 0, 0] == 7
        assert verify(folder) == []
        buffer.snapshot(folder + '.copy')
    """
    mebibytes, blocks = peak_of(dedent(code).replace("\n", "\n        "), tmp_path / "buffer")
    assert mebibytes < 128
    assert blocks < 2**14  # of 512 bytes
    copied = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_blocks * 512 for path in copied) < 2**20


@pytest.mark.slow
def test_the_most_slots_that_a_schema_can_ask_for_can_be_opened(tmp_path: Path) -> None:
    """The table is the one thing that is read whole: some 100 bytes a slot, however empty."""
    signal.alarm(0)
    create_empty(tmp_path / "buffer", Schema({"x": "bool"}), 2**24 - 1, 2)
    rewrite_record(tmp_path / "buffer", 7, generation=2, length=1, first_row=14)
    mebibytes, _ = peak_of("assert len(ReplayBuffer.from_folder(folder, read_only=True)) == 1", tmp_path / "buffer")
    assert mebibytes < 3000  # a GiB of it is the mapped file


def test_an_episode_of_billions_of_steps_is_refused_or_cut_into_windows(tmp_path: Path) -> None:
    """A crafted length costs nothing until its rows are asked for, and then no more than the limit of a batch."""
    with ReplayBuffer(tmp_path / "buffer", 1, 2**31, {"x": ("uint8", 64), "text": "U2"}) as buffer:
        buffer.store_episode(x=np.full((2, 64), 7, np.uint8), text=["a", "b"])
    rewrite_record(tmp_path / "buffer", 0, length=2**31, flags=0)
    code = """
        buffer = ReplayBuffer.from_folder(folder, read_only=True, verify='always')
        assert buffer.num_steps == 2**31
        assert buffer.sample(64, view=memmap_buffer.Window(8))['x'].shape == (64, 8, 64)
        for work in (lambda: buffer.episode(0), lambda: buffer.sample(1), buffer.get_all_data):
            try:
                work()
            except memmap_buffer.MemmapBufferError as error:
                assert 'GiB' in str(error)
            else:
                raise AssertionError('it was read')
    """
    assert peak_of(dedent(code).replace("\n", "\n        "), tmp_path / "buffer")[0] < 256


@pytest.mark.parametrize(
    "options", [{"timestep_level": True}, {"view": Window(3, stride=2, boundary="shift")}], ids=str
)
def test_a_filter_looks_at_a_long_episode_in_pieces(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a crafted length costs time, and no memory."""
    options = {**options, "filter_fields": {"number": lambda number: number % 100 != 2}, "return_indices": True}
    whole = [batch["_indices"].tolist() for batch in ReplayBuffer.from_folder(folder).dataloader(2, **options)]
    set_inside(monkeypatch, filtered_steps=2)
    looked_at: list[int] = []
    matches = get_inside("matches")
    set_inside(monkeypatch, matches=lambda column, *rest: looked_at.append(len(column)) or matches(column, *rest))
    assert [batch["_indices"].tolist() for batch in ReplayBuffer.from_folder(folder).dataloader(2, **options)] == whole
    assert max(looked_at) <= 4


# 4. Records, counters, text: the checks are right, and the contents are not


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 0},
        {"length": damage.MAX_TIMESTEPS + 1},
        {"length": 2**31},
        {"length": 2**32 - 1},
        {"first_row": 2**63},
        {"first_row": 0},
        {"serial": 2**64 - 1},
        {"serial": MAX_SERIAL},
        {"serial": MAX_SERIAL - 1},
        {"generation": 2**64 - 2},
        {"generation": 2**64 - 1},
        {"generation": MAX_SERIAL},
        {"generation": 0},
        {"flags": 2**15},
        {"flags": 8},
        {"flags": 32 + 8},
        {"flags": 0xFFFF},
        {"flags": 8, "stop": damage.MAX_TIMESTEPS},
        {"start": 1},
        {"start": 2},
        {"start": 3},
        {"start": 2**32 - 1},
        {"stop": 1},
        {"stop": 3},
        {"stop": 2**32 - 1},
        {"time": 2**32 - 1, "round": 2**32 - 1, "term": 2**32 - 1, "digest": 2**32 - 1, "columns": 7},
    ],
    ids=str,
)
def test_a_crafted_record_is_void_or_read_within_its_slot(tmp_path: Path, changes: dict[str, int]) -> None:
    """Fault 45: also after it, episodes that are published are there, or it is said that they cannot be."""
    found = enter(lambda folder: rewrite_record(folder, 3, **changes), tmp_path)
    assert found["look"] == found["mend"] == found["copy"] == found["replace"] == ""
    assert not found["write"] or changes.get("serial") == MAX_SERIAL - 1, found


@pytest.mark.parametrize("value", [2**64 - 1, MAX_SERIAL, MAX_SERIAL - 1, 7])
@pytest.mark.parametrize("name", ["base", "next", "synced", "changes", "term", "pid", "time", "clean", "suspect"])
def test_a_crafted_counter_loses_no_episode_that_is_published_later(tmp_path: Path, name: str, value: int) -> None:
    """Fault 44: what a writer publishes is visible, or it says that it cannot publish."""
    found = enter(lambda folder: rewrite_state(folder, **{name: value}), tmp_path)
    assert found["look"] == found["mend"] == found["copy"] == found["replace"] == ""
    assert not found["write"] or "`memmap-buffer repair` mends it" in found["write"], found


def test_each_bit_of_the_counters_lets_a_writer_publish_or_say_that_it_cannot(folder: Path, tmp_path: Path) -> None:
    """Fault 44."""
    bits = [(byte, bit) for byte in range(72) for bit in range(8)]
    for byte, bit in random.Random(1).sample(bits, 60):
        path = damage.copy_of_example(tmp_path / f"{byte}.{bit}")
        damage.flip(path / "state.npy", header_size(path / "state.npy") + byte, 1 << bit)
        try:
            write(path)
        except MemmapBufferError as error:
            assert "repair" in str(error)
            mend(path)
            write(path)
        shutil.rmtree(path)


@pytest.mark.parametrize("time", [2**64 - 1, 2**63, 0])
def test_a_crafted_time_does_not_hide_who_holds_the_lock(folder: Path, time: int) -> None:
    def hold(tell: Callable[[Any], None]) -> None:
        buffer = ReplayBuffer.from_folder(folder)
        damage.record(buffer, 6, 1)
        rewrite_state(folder, time=time, host=b"\xff" * 64, pid=2**64 - 1)
        tell(in_child(lambda tell: tell(error_of(write, folder))))

    child = in_child(hold)
    assert child.status == 0, child.told
    assert child.told[0][1][0].startswith("BufferLockedError")


def error_of(door: Callable[[Path], Any], folder: Path) -> str:
    try:
        door(folder)
    except MemmapBufferError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("point", [0x110000, 0xFFFFFFFF, 0xD800, 0x7FFFFFFF])
@pytest.mark.parametrize("name", ["text", "name"])
def test_text_that_is_no_text_is_one_of_our_errors(tmp_path: Path, name: str, point: int) -> None:
    """Code points that do not exist, with checksums that are right."""

    def prepare(folder: Path) -> None:
        path = folder / damage_file(name)
        start = header_size(path) + damage.rows_of(name, 3)[0]
        with path.open("r+b") as file:
            file.seek(start)
            file.write(point.to_bytes(4, "little"))
        rewrite_record(folder, 3, flags=0)

    found = enter(prepare, tmp_path)
    assert found["look"] == ""
    if point > 0x10FFFF:
        assert found["read"].startswith("CorruptBufferError")
        assert "no text" in found["read"]


def test_text_that_is_no_text_costs_the_batch_that_it_is_in_and_no_other(tmp_path: Path) -> None:
    """However many batches are worked out together."""
    folder = tmp_path / "buffer"
    with ReplayBuffer(folder, 31, 8, {"x": "int", "word": "U4"}) as buffer:
        for _ in range(31):
            buffer.store_episode(x=np.arange(8), word=["word"] * 8)
    with (folder / "data" / "word.npy").open("r+b") as file:
        file.seek(header_size(folder / "data" / "word.npy") + 16 * (8 * 14 + 5))
        file.write(b"\xff\xff\xff\x7f")
    batches = iter(ReplayBuffer.from_folder(folder, read_only=True).dataloader(4, timestep_level=True))
    given = [error_of(lambda _: next(batches), folder) for _ in range(62)]
    assert [i for i, error in enumerate(given) if error] == [29]


def damage_file(name: str) -> str:
    return next(file for file, field in damage.FILES.items() if field == name)


# 5. Updates that were never begun


def redo(head: Any, data: bytes = b"", /, **start: int) -> bytes:
    """A redo file of this head and these pieces; of other numbers at its start where they are given."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    own = {"head": len(text), "size": 32 + len(text) + len(data), "head_crc": zlib.crc32(text), "crc": zlib.crc32(data)}
    return struct.pack("<8sQQII", b"MBREDO1\n", *{**own, **start}.values()) + text + data


def redos() -> dict[str, bytes]:
    """Redo files with a right CRC, most of which say what no writer says."""
    old = np.load(damage.example() / "episodes.npy")[3]
    values = {name: int(old[name]) for name in old.dtype.names}
    generation = values["generation"]
    record = sealed(**values | {"generation": generation + 2})
    arrays = opened(damage.example(), read_only=True).layout.arrays
    at = {key: array.offset(3) for key, array in arrays.items()}
    head = {
        "slot": 3,
        "serial": 3,
        "generation": generation,
        "record": record.hex(),
        "pieces": [["number", at["number"], 8]],
    }

    def but(data: bytes = b"x" * 8, **changes: Any) -> bytes:
        return redo([{**head, **changes}], data)

    def piece(key: Any, offset: Any, length: Any, data: bytes = b"x" * 8) -> bytes:
        return but(data, pieces=[[key, offset, length]])

    size = arrays["number"].size
    return {
        "right": but(),
        "empty": b"",
        "a magic": b"MBREDO1\n",
        "a magic and zeros": b"MBREDO1\n" + bytes(16),
        "no JSON": redo(b"{"),
        "no rewrite": redo([]),
        "a number": redo(7),
        "a rewrite alone": redo(head, b"x" * 8),
        "no object": redo([7], b"x" * 8),
        "nothing in it": redo([{}]),
        "a rewrite and a number": redo([head, 7], b"x" * 8),
        "deep": redo(b"[" * 100_000),
        "long": redo(b" " * 2**21),
        "a size beyond the file": redo([head], b"x" * 8, size=2**63),
        "a size of 2**64 - 1": redo([head], b"x" * 8, size=2**64 - 1),
        "a size before the end of the file": redo([head], b"x" * 8, size=100),
        "a head beyond the file": redo([head], b"x" * 8, head=2**63),
        "a head of 2**64 - 1": redo([head], b"x" * 8, head=2**64 - 1),
        "another CRC": redo([head], b"x" * 8, crc=7),
        "another CRC of the head": redo([head], b"x" * 8, head_crc=7),
        **{f"slot {value!r}": but(slot=value) for value in (-1, 6, 2**31, 2**64, 3.0, "3", None, True, [3])},
        **{f"serial {value!r}": but(serial=value) for value in (-1, 4, 2**64, 3.0, "3", None)},
        **{f"generation {value!r}": but(generation=value) for value in (-2, 1, 2**64, 2.5, None, generation - 2)},
        **{f"record {value!r}": but(record=value) for value in ("", "zz", "00" * 63, "00" * 64, "00" * 65, None, 7)},
        "a record of another serial": but(record=sealed(**values | {"generation": generation + 2, "serial": 2}).hex()),
        "a record of another length": but(record=sealed(**values | {"generation": generation + 2, "length": 5}).hex()),
        "a record of another slot": but(record=sealed(**values | {"generation": generation + 2, "first_row": 0}).hex()),
        "a record of this generation": but(record=sealed(**values).hex()),
        "a record with a wrong check": but(record=(record[:-1] + b"\0").hex()),
        **{f"pieces {value!r}": but(pieces=value) for value in (None, 7, "abc", [7], [[]], [["number", 1]], {"a": 1})},
        "another slot": piece("number", at["number"] - 8, 8),
        "the next slot": piece("number", arrays["number"].offset(4), 8),
        "over the end of the slot": piece("number", arrays["number"].offset(4) - 4, 8),
        "the header": piece("number", 0, 8),
        "before the file": piece("number", -8, 8),
        "behind the file": piece("number", size, 8),
        "far behind the file": piece("number", 2**62, 8),
        "a length of -8": piece("number", at["number"], -8),
        "a length that is not there": piece("number", at["number"], 2**40),
        "the records": piece("/episodes", at["/episodes"], 8),
        "the counters": piece("/state", at["/state"], 8),
        "the next checksums": piece("/checksums", arrays["/checksums"].offset(4), 8),
        "another field": piece("nothing", 0, 8),
        "a path": piece("../victim", 0, 8),
        "a list for a name": piece(["number"], at["number"], 8),
        "a float for an offset": piece("number", float(at["number"]), 8),
        "many pieces": but(b"", pieces=[["number", at["number"], 0]] * 30_000),
        "a huge count": but(b"", pieces=[["number", at["number"], 2**61]] * 8),
        "more bytes than pieces": but(b"x" * 100),
    }


@pytest.mark.parametrize("what", redos())
def test_no_redo_file_changes_anything_but_the_rows_of_its_slot(tmp_path: Path, what: str) -> None:
    """Whatever it says: it is carried out within its slot, or dropped, or put aside."""

    def prepare(folder: Path) -> None:
        (folder / ".redo").write_bytes(redos()[what])

    found = enter(prepare, tmp_path, (read, look, write, mend))
    assert not any(found.values()), found
    folder = damage.copy_of_example(tmp_path / "again")
    prepare(folder)
    ReplayBuffer.from_folder(folder).close()
    assert not (folder / ".redo").exists()
    before, after = dict(shown(damage.example())), dict(shown(folder))
    if what != "right":
        assert after == before
    else:
        assert {**after, 3: before[3]} == before
        assert after[3]["number"] == [int.from_bytes(b"x" * 8, "little"), 301]
    for file in damage.FILES:
        assert (folder / file).stat().st_size == (damage.example() / file).stat().st_size
    untouched = set(damage.FILES) - {"episodes.npy", "state.npy", "data/number.npy"}
    assert all((folder / file).read_bytes() == (damage.example() / file).read_bytes() for file in untouched)


def sparse_redos() -> dict[str, Callable[[int], bytes]]:
    """How redo files of so many bytes begin, the rest being a hole: some are as long as they say."""
    right, head = redos()["right"], {"slot": 3, "serial": 3, "generation": 2, "record": "00" * 64}
    return {
        "longer than it says": lambda size: right,
        "longer than any change": lambda size: redo({**head, "pieces": [["number", 0, size]]}, size=size),
        "a head without an end": lambda size: redo(b"[", head=size - 32, size=size),
        "no magic": lambda size: b"",
    }


@pytest.mark.parametrize("what", sparse_redos())
@pytest.mark.parametrize("size", [6 * 2**30, 2**40])
def test_a_sparse_redo_file_is_put_aside_unread(tmp_path: Path, what: str, size: int) -> None:
    def prepare(folder: Path) -> None:
        (folder / ".redo").write_bytes(sparse_redos()[what](size))
        os.truncate(folder / ".redo", size)

    def little(door: Callable[[Path], None]) -> Callable[[Path], None]:
        def through(folder: Path) -> None:
            small(lambda: door(folder))

        through.__name__ = door.__name__
        return through

    assert not any(enter(prepare, tmp_path, tuple(map(little, (read, look, write, mend)))).values())
    folder = damage.copy_of_example(tmp_path / "again")
    prepare(folder)
    (finding,) = verify(folder)
    assert (finding.file, finding.lost) == (".redo", False)
    ReplayBuffer.from_folder(folder).close()
    (finding,) = verify(folder)
    assert (finding.file, finding.lost) == (".redo.bad", False)
    assert (folder / ".redo.bad").stat().st_size == size


def test_a_redo_file_of_a_large_slot_is_read_piece_by_piece(tmp_path: Path) -> None:
    """It is as long as it says and as its episode can be, a hole but for its head: some MB of memory, not all of it."""
    steps, size = 2**20, 2**28
    with ReplayBuffer(tmp_path / "buffer", 2, steps, {"x": ("uint8", 2**8)}) as buffer:
        buffer.store_episode(x=np.full((2, 2**8), 7, np.uint8))
    rewrite_record(tmp_path / "buffer", 0, length=steps, flags=0)
    old = np.load(tmp_path / "buffer/episodes.npy")[0]
    values = {name: int(old[name]) for name in old.dtype.names}
    generation = values["generation"]
    record = sealed(**values | {"generation": generation + 2}).hex()
    _, offset = place_of_row(tmp_path / "buffer", "x", 0)
    head = {"slot": 0, "serial": 0, "generation": generation, "record": record, "pieces": [["x", offset, size]]}
    text = json.dumps(head).encode()
    (tmp_path / "buffer/.redo").write_bytes(redo(text, size=32 + len(text) + size, crc=7))
    os.truncate(tmp_path / "buffer/.redo", 32 + len(text) + size)
    small(lambda: verify(tmp_path / "buffer"))
    small(lambda: ReplayBuffer.from_folder(tmp_path / "buffer").close())
    assert (tmp_path / "buffer/.redo.bad").exists()


def test_a_real_redo_file_of_another_folder_is_dropped(tmp_path: Path) -> None:
    other = damage.copy_of_example(tmp_path / "other")
    with ReplayBuffer.from_folder(other) as buffer:
        buffer.update(1, number=[5, 6])
    assert killed(other, 4, "update") == KILLED

    def prepare(folder: Path) -> None:
        shutil.copy(other / ".redo", folder)

    assert not any(enter(prepare, tmp_path).values())


# 6. Permissions


@pytest.mark.parametrize("mask", [0, 0o022, 0o027, 0o077])
def test_what_is_made_has_the_modes_of_the_umask_and_locks_are_for_their_owner_alone(tmp_path: Path, mask: int) -> None:
    """Section 5, point 8: who can lock a folder can stop its writer."""
    before = os.umask(mask)
    try:
        with damage.make(tmp_path / "deep" / "buffer") as buffer:
            damage.record(buffer, 0, 2)
            buffer.snapshot(tmp_path / "copy")
            buffer.mark(buffer.serials[:1], add=["good"])
        damage.flip(tmp_path / "copy" / "data/text.npy", 3)
        repair(tmp_path / "copy")
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in tmp_path.rglob("*")}
    locks = {path.name for path in modes if path.name.endswith("lock")}
    assert locks == {".lock", ".marks.lock"}
    for path, mode in modes.items():
        expected = 0o600 if path.name in locks else (0o777 if path.is_dir() else 0o666) & ~mask
        assert mode == expected, (path, oct(mode))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_another_user_reads_what_the_umask_lets_them_and_can_stop_no_writer(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        place.chmod(0o755)
        with damage.make(place / "buffer") as buffer:
            damage.record(buffer, 0, 2)

            def read(tell: Any) -> None:
                os.setgid(65534)
                os.setuid(65534)
                try:
                    tell(len(ReplayBuffer.from_folder(place / "buffer", read_only=True)))
                except (OSError, MemmapBufferError) as error:
                    tell(type(error).__name__)
                try:
                    damage.record(ReplayBuffer.from_folder(place / "buffer"), 2, 3)
                except (OSError, MemmapBufferError) as error:
                    tell(type(error).__name__)

            told = in_child(read).told
            damage.record(buffer, 2, 3)
    finally:
        os.umask(before)
        shutil.rmtree(place)
    assert told == ([1, "ReadOnlyError"] if mask == 0o022 else ["PermissionError"] * 2)


def test_the_limits_are_those_of_the_security_page() -> None:
    """SECURITY.md names numbers; they are these."""
    text = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    assert f"{get_inside('max_schema_bytes') >> 20} MiB" in text
    assert f"2^{int(math.log2(get_inside('max_slots')))}" in text
    assert f"{get_inside('batch_bytes') >> 30} GiB" in text


@contextmanager
def limited(memory: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_damaged_file_is_an_error_of_ours_and_an_oserror(folder: Path) -> None:
    os.truncate(folder / "data/text.npy", 5)
    with pytest.raises(CorruptBufferError, match="has 5 bytes, the schema says"):
        ReplayBuffer.from_folder(folder)


def test_priorities_of_billions_of_steps_in_memory_are_refused(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "buffer", 1, 2**31, {"x": "uint8"}) as buffer:
        buffer.store_episode(x=np.ones(2, np.uint8))
    rewrite_record(tmp_path / "buffer", 0, length=2**31, flags=0)

    def child(tell: Callable[[Any], None]) -> None:
        buffer = ReplayBuffer.from_folder(tmp_path / "buffer", read_only=True)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (2**36, hard))
        # Which of the two looks refuses them depends on how much memory is free.
        with pytest.raises(SchemaError, match=r"(4294967296 steps take 96 GiB|GiB of memory).*open (it|the folder) to"):
            buffer.sample(4, timestep_level=True, prioritized=Prioritized())

    assert in_child(child).status == 0
