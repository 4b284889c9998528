"""Random bytes over random files of a small buffer: one of our errors, or right data; never a crash, a hang or a bomb.

Fault 53. Each example is opened, read through every view, written to, checked and repaired in a child process, whose
memory is bounded and whom an alarm ends, so that whatever happens to it is seen.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import damage
import pytest
from conftest import flat
from damage import killed, retired
from doors import copy, look, read_all, write
from fault_injection import in_child, shown
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from specification import RECORD

from memmap_buffer import CorruptBufferError, MemmapBufferError, ReplayBuffer, repair, verify

MEMORY = 2**30  # bytes that an example may take beyond what the process had
SECONDS = 60
QUICK, ALL, PARTS = 60, 2000, 8

Mutation = Callable[[Path], Any]


# What is done to a folder

INTERESTING = [0, 1, 2, 3, 7, 8, 63, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**62 - 1, 2**62, 2**63, 2**64 - 1]
files = st.sampled_from([*damage.FILES, "schema.json", "episodes.npy", "state.npy"])
garbage = st.one_of(st.binary(min_size=1, max_size=64), st.sampled_from([b"\0" * 64, b"\xff" * 64, b"{", b"\x93NUMPY"]))


def overwrite(file: str, where: float, data: bytes) -> Mutation:
    def do(folder: Path) -> None:
        path = folder / file
        whole = bytearray(path.read_bytes())
        at = int(where * len(whole))
        whole[at : at + len(data)] = data[: len(whole) - at]
        path.write_bytes(whole)

    return named(do, f"overwrite {file} at {where}: {data!r}")


def set_word(file: str, word: int, value: int) -> Mutation:
    """Behind the header, which is 128 bytes in the small files, and where a record or a counter begins."""

    def do(folder: Path) -> None:
        path = folder / file
        start = damage.header_size(path) if path.stat().st_size > 10 else 0
        with path.open("r+b") as out:
            out.seek(start + 8 * word)
            out.write(value.to_bytes(8, "little"))

    return named(do, f"set word {word} of {file} to {value}")


def craft(slot: int, field: str, value: int) -> Mutation:
    bits = 8 * RECORD[field].itemsize
    return named(
        lambda folder: damage.rewrite_record(folder, slot, **{field: value % 2**bits}),
        f"record {slot}: {field}={value}",
    )


def cut(file: str, length: int) -> Mutation:
    return named(lambda folder: os.truncate(folder / file, length), f"cut {file} to {length}")


def append(file: str, data: bytes) -> Mutation:
    def do(folder: Path) -> None:
        with (folder / file).open("ab") as out:
            out.write(data)

    return named(do, f"append to {file}: {data!r}")


def exchange(one: str, other: str) -> Mutation:
    return named(lambda folder: shutil.copyfile(folder / one, folder / other), f"copy {one} over {other}")


def beside(name: str, data: bytes) -> Mutation:
    return named(lambda folder: (folder / name).write_bytes(data), f"{name}: {data!r}")


def in_schema(path: list[str], value: Any) -> Mutation:
    """Change a value of the schema, or add one."""

    def do(folder: Path) -> None:
        try:
            document = json.loads((folder / "schema.json").read_text())
            place = document
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            (folder / "schema.json").write_text(json.dumps(document))
        except (ValueError, KeyError, TypeError):
            pass  # another mutation was there first

    return named(do, f"schema: {path} = {value!r}")


def redo_of(change: tuple[str, Any], data: bytes) -> Mutation:
    """A redo file whose CRC is right."""

    def do(folder: Path) -> None:
        raw = real_redo()
        size = int.from_bytes(raw[8:16], "little")
        text = json.dumps({**json.loads(raw[32 : 32 + size]), change[0]: change[1]}).encode()
        rest = data or raw[32 + size :]
        sizes = len(text), 32 + len(text) + len(rest)
        start = struct.pack("<8sQQII", b"MBREDO1\n", *sizes, zlib.crc32(text), zlib.crc32(rest))
        (folder / ".redo").write_bytes(start + text + rest)

    return named(do, f"redo: {change}, {data!r}")


@cache
def real_redo() -> bytes:
    folder = damage.copy_of_example(Path(tempfile.mkdtemp()) / "buffer")
    killed(folder, 4, "update")
    return (folder / ".redo").read_bytes()


def named(do: Mutation, name: str) -> Mutation:
    do.__qualname__ = do.__name__ = name  # so that hypothesis prints what an example was
    return do


json_values = st.one_of(
    st.sampled_from([*INTERESTING, -1, None, True, 1.5, "", "float64", "U4096", "object", [], {}, [2**61] * 16, ["a"]]),
    st.text(max_size=3),
    st.integers(-(2**70), 2**70),
)
keys = st.sampled_from(
    [
        *([key] for key in json.loads((damage.example() / "schema.json").read_text())),
        *(
            ["fields", name, key]
            for name in ("number", "text")
            for key in ("dtype", "shape", "default", "final", "column")
        ),
        *(["fields", "../x"], ["meta_fields", "number"], ["fields", "number"], ["more"]),
    ]
)
parts = st.sampled_from(["/state", "/episodes", "/checksums", "number", "text", "x"])
redo_changes = st.tuples(
    st.sampled_from(["slot", "serial", "generation", "record", "pieces"]),
    st.one_of(
        json_values,
        st.lists(
            st.tuples(
                st.sampled_from([*["/state", "/episodes", "/checksums", "number", "text", "x"]]),
                json_values,
                json_values,
            ),
            max_size=3,
        ),
    ),
)
mutations = st.one_of(
    st.builds(overwrite, files, st.floats(0, 1, exclude_max=True), garbage),
    st.builds(
        set_word,
        st.sampled_from(["episodes.npy", "state.npy", "checksums.npy"]),
        st.integers(0, 47),
        st.sampled_from(INTERESTING),
    ),
    st.builds(
        craft,
        st.integers(0, 5),
        st.sampled_from(RECORD.names),
        st.one_of(st.sampled_from(INTERESTING), st.integers(0, 2**64 - 1)),
    ),
    st.builds(cut, files, st.integers(0, 3000)),
    st.builds(append, files, garbage),
    st.builds(exchange, files, files).filter(lambda do: len({*do.__name__.split()[1::3]}) == 2),
    st.builds(beside, st.sampled_from([".redo", "schema.json.new", ".lock", "data/more.npy"]), garbage),
    st.builds(in_schema, keys, json_values),
    st.builds(redo_of, redo_changes, st.sampled_from([b"", b"x" * 8, b"x" * 1000])),
)


# What must come of it


@cache
def every_episode() -> dict[int, list[Any]]:
    """serial -> the values of the episode, of every one that was ever stored."""
    return {serial: values_of(e) for serial, e in {**retired(), **dict(shown(damage.example()))}.items()}


def values_of(episode: dict[str, Any]) -> list[Any]:
    return [value.tolist() if hasattr(value, "tolist") else value for value in flat(episode).values()]


def require_right(folder: Path, partly: bool = False) -> None:
    """What is served with `verify="always"` is what was stored, unless it is not served at all.

    A schema that names fewer fields, and is right for the rest, is as one from which fields were dropped.
    """
    buffer = ReplayBuffer.from_folder(folder, read_only=True, verify="always")
    for i, serial in enumerate(buffer.serials.tolist()):
        right, got = every_episode().get(serial), values_of(buffer.episode(i))
        assert right is not None, f"there never was an episode {serial}"
        some = partly or len(got) < len(right)
        assert got == right or (some and all(value in right for value in got)), f"episode {serial} is {got}"
    read_all(buffer)


def tamed(work: Callable[[], Any]) -> None:
    try:
        work()
    except MemmapBufferError:
        return


def trusting(folder: Path) -> None:
    """Without checksums anything may be served; it must be served all the same."""
    read_all(ReplayBuffer.from_folder(folder, read_only=True, verify="never"))


def mended(folder: Path) -> None:
    try:
        repair(folder)
    except CorruptBufferError:
        return
    assert verify(folder) == []
    require_right(folder, partly=True)
    write(folder)


def examine(folder: Path, crafted: bool) -> None:
    right = trusting if crafted else require_right
    for name, work in {"look": look, "right": right, "trusting": trusting, "copy": copy}.items():
        tamed(lambda name=name, work=work: work(folder))
    for name, work in {"write": write, "mended": trusting if crafted else mended}.items():
        twin = folder.parent / name / "buffer"
        shutil.copytree(folder, twin)
        tamed(lambda work=work, twin=twin: work(twin))


def bounded(work: Callable[[], Any]) -> Callable[[Any], None]:
    """The same in a child of little memory and little time."""

    def do(tell: Callable[[Any], None]) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        if sys.platform == "linux":
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        work()

    return do


def check(changes: list[Mutation]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = damage.copy_of_example(Path(place) / "buffer")
        for change in changes:
            with suppress(Exception):  # what it would change is gone, or no array any more
                change(folder)
        every_episode()
        # A record or a redo file whose check is right may say what it likes, of rows that nobody has checked.
        crafted = any(change.__name__.startswith(("record", "redo")) for change in changes)
        child = in_child(bounded(lambda: examine(folder, crafted)))
        assert child.status == 0, child.told or f"it ended by signal {-child.status}"


lenient = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@given(changes=st.lists(mutations, min_size=1, max_size=4))
@example(changes=[in_schema(["meta_fields"], {})])
@settings(lenient, max_examples=QUICK, derandomize=True)
def test_random_damage_gives_one_of_our_errors_or_right_data(changes: list[Mutation]) -> None:
    """Fault 53."""
    check(changes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@given(changes=st.lists(mutations, min_size=1, max_size=4))
@settings(lenient, max_examples=ALL // PARTS)
def test_much_random_damage_gives_one_of_our_errors_or_right_data(part: int, changes: list[Mutation]) -> None:
    """Fault 53, the figure of the catalogue, in parts that run side by side; each draws others."""
    check(changes)
