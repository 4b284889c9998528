"""A small folder, and everything that can be wrong with one: what each damage does, and what it must cost.

The folder has six slots and shows the episodes 2 … 5, in the slots of the same numbers; 0 and 1 are retired. Even
episodes have their final observation. All is computed from the format here, without the library's own offsets.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from textwrap import dedent

import numpy as np
from fault_injection import in_child, shown, system
from inside import take_lock
from specification import check_of

from memmap_buffer import Field, ReplayBuffer, pack, verify

FIELDS = {
    "number": "int",
    "observation": Field("float32", (3,), final=True),
    "camera": {"left": ("uint8", (2, 2))},
    "half": "bfloat16",
    "text": "U12",
}
META_FIELDS = {"task": "int32", "name": "U12"}
SLOTS, MAX_TIMESTEPS, VISIBLE = 6, 5, (2, 3, 4, 5)
LENGTHS = (3, 4, 5, 2, 3, 4)
FILES = {
    "episodes.npy": "",
    "state.npy": "",
    "checksums.npy": "",
    "data/number.npy": "number",
    "data/observation.npy": "observation",
    "data/camera.left.npy": "camera.left",
    "data/half.npy": "half",
    "data/text.npy": "text",
    "meta/task.npy": "task",
    "meta/name.npy": "name",
}
ROW_BYTES = {"number": 8, "observation": 12, "camera.left": 4, "half": 2, "text": 48, "task": 4, "name": 48}


def record(buffer: ReplayBuffer, number: int, length: int) -> None:
    with buffer.one_episode(task=number, name=f"e{number}") as episode:
        for t in range(length):
            row = {"number": 100 * number + t, "half": number + t / 4, "text": f"{number}:{t}"}
            episode.store(**row, observation=[number, t, 1], camera={"left": [[number % 256, t], [1, 2]]})
        if number % 2 == 0:
            episode.final(observation=[number, length, 1])


def make(folder: Path, **options: object) -> ReplayBuffer:
    """A new buffer of these fields, empty."""
    sizes = {"max_episodes": 4, "max_timesteps": MAX_TIMESTEPS, "spare_slots": 2, "circular": True}
    return ReplayBuffer(folder, fields=FIELDS, meta_fields=META_FIELDS, **{**sizes, **options})


@cache
def example() -> Path:
    """The folder; not to be changed."""
    folder = Path(mkdtemp()) / "example"
    with make(folder) as buffer:
        for number, length in enumerate(LENGTHS):
            record(buffer, number, length)
    return folder


def copy_of_example(folder: Path) -> Path:
    return Path(shutil.copytree(example(), folder))


@cache
def other_example() -> Path:
    """Another buffer of the same content; not to be changed."""
    return another_buffer(copy_of_example(Path(mkdtemp()) / "other"))


def another_buffer(copy: str | Path) -> Path:
    """The folder of a copy that passes for another buffer: it has an id of its own."""
    file = Path(copy) / "schema.json"
    file.write_text(re.sub(r'"id": "\w+"', f'"id": "{secrets.token_hex(16)}"', file.read_text()))
    return Path(copy)


# Where things are


def packed(folder: Path, name: str = "packed") -> Path:
    """The example's episodes 2 … 5 in a packed folder, in the slots 0 … 3."""
    pack(folder, folder.parent / name)
    return folder.parent / name


def retired() -> dict[int, dict[str, object]]:
    """The episodes whose slots were not written again; one comes back where a newer one's record is gone."""
    folder = example().parent / "retired"
    if not folder.exists():
        with make(folder, max_episodes=5) as buffer:
            for number, length in enumerate(LENGTHS[:2]):
                record(buffer, number, length)
    return dict(shown(folder))


def killed(folder: Path, at: int, work: str) -> int:
    """Do something to the folder in a child that is killed at an operation; its status."""

    def run(tell: object) -> None:
        buffer = ReplayBuffer.from_folder(folder)
        take_lock(buffer)
        with system(at, kill=True):
            if work == "update":
                buffer.update(1, number=np.arange(LENGTHS[3]) * 7)
            else:
                record(buffer, 9, 3)
        os._exit(0)

    return in_child(run).status


def header_size(path: Path) -> int:
    return 10 + struct.unpack("<H", path.read_bytes()[8:10])[0]


def rows_of(name: str, serial: int) -> tuple[int, int]:
    """The bytes, from which to which, behind the header, of an episode's rows of a field or meta field."""
    size = ROW_BYTES[name]
    if name in META_FIELDS:
        return serial * size, (serial + 1) * size
    final = name == "observation"
    first = serial * (MAX_TIMESTEPS + final)
    return first * size, (first + LENGTHS[serial] + (final and serial % 2 == 0)) * size


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Change bits of a byte; a negative offset counts from the end."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ mask]))


def rewrite_record(folder: Path, slot: int, **changes: int) -> None:
    """Change fields of a slot's record, its check right again unless it is given; all its steps are shown."""
    changes = {"stop": changes.get("length", record_of(folder, slot)["stop"]), **changes}
    path = folder / "episodes.npy"
    records = np.lib.format.open_memmap(path, mode="r+")
    for name, value in changes.items():
        records[slot][name] = value
    if "check" not in changes:
        records[slot]["check"] = check_of(records[slot].tobytes())
    records.flush()


def record_of(folder: Path, slot: int) -> np.void:
    return np.load(folder / "episodes.npy")[slot]


def rewrite_state(folder: Path, **changes: int) -> None:
    state = np.lib.format.open_memmap(folder / "state.npy", mode="r+")
    for name, value in changes.items():
        state[0][name] = value
    state.flush()


def serials_of_exact(folder: Path) -> list[int]:
    """The serials that a folder shows, in which every value is what `record` and updates of whole millions make it."""
    assert verify(folder) == []
    serials = []
    for serial, episode in shown(folder):
        number = np.array(episode["number"])
        change = number - 100 * serial - np.arange(len(number))
        assert (change == change[0]).all()
        assert change[0] % 10**6 == 0
        assert episode["observation"][: len(number)] == [[serial, t, 1] for t in range(len(number))]
        assert episode["text"] == [f"{serial}:{t}" for t in range(len(number))]
        assert episode["task"] == serial
        serials.append(serial)
    assert serials == list(range(serials[0], serials[-1] + 1))
    return serials


def count_of(work: Callable[[], object]) -> int:
    """How many operations that change files `work` tries; done in a child."""

    def counted(tell: Callable[[object], None]) -> None:
        with system() as seen:
            work()
        tell(seen.count)

    child = in_child(counted)
    assert child.status == 0, child.told
    return int(child.told[-1])


# A writer in another process

WRITER = """
    import sys, itertools
    sys.path[:0] = {path!r}
    import damage
    import numpy as np
    from memmap_buffer import ReplayBuffer
    buffer = ReplayBuffer.from_folder({folder!r}, publish={publish!r})
    print("ready", flush=True)
    for number in itertools.count(6):
        damage.record(buffer, number, 1 + number % 5)
        if {updates} and number % 3 == 0:
            i = number % 4
            serial, length = int(buffer.serials[i]), int(buffer.episode_lens[i])
            buffer.update(i, number=10**6 * (number % 7) + 100 * serial + np.arange(length))
"""


@contextmanager
def writer(folder: Path, publish: str, *, updates: bool) -> Iterator[None]:
    """A process that wraps the ring as fast as it can, killed at the end."""
    here = sys.path
    code = dedent(WRITER).format(path=here, folder=str(folder), publish=publish, updates=updates)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


# The damages


@dataclass(frozen=True)
class Damage:
    """One damage.

    Args:
        do: does it to a folder. file: the file that is to be named.
        episodes: those that must be given up. fields: those that must leave the schema.
        field, slots: what else is to be named of each.
    """

    name: str
    do: Callable[[Path], object]
    file: str
    episodes: frozenset[int] = frozenset()
    fields: frozenset[str] = frozenset()
    field: str = ""
    slots: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return self.name


def cuts(file: str) -> list[Damage]:
    """The file cut to the lengths of the catalogue, and made one byte longer."""
    path = example() / file
    size, head = path.stat().st_size, header_size(path)
    lengths = {
        "nothing": 0,
        "10": 10,
        "header-1": head - 1,
        "header": head,
        "half": (head + size) // 2,
        "size-1": size - 1,
    }
    made = [_cut(file, f"{file} cut to {what}", length, head) for what, length in lengths.items()]
    return [*made, Damage(f"{file} one byte longer", lambda folder: _append(folder / file), file, field=FILES[file])]


def _cut(file: str, name: str, length: int, head: int) -> Damage:
    field = FILES[file]

    def do(folder: Path) -> None:
        os.truncate(folder / file, length)

    if not field:
        return Damage(name, do, file)
    lost = {serial for serial in VISIBLE if head + rows_of(field, serial)[1] > length}
    if lost == set(VISIBLE):
        return Damage(name, do, file, fields=frozenset({field}), field=field)
    return Damage(name, do, file, frozenset(lost), field=field, slots=frozenset(lost))


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def replaced(file: str) -> list[Damage]:
    """The file gone, or something else in its place."""
    field = FILES[file]
    lost = frozenset({field} - {""})

    def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
        def do(folder: Path) -> None:
            (folder / file).unlink()
            make(folder / file)

        return do

    def link(path: Path) -> None:
        victim = path.parents[len(Path(file).parts)] / "victim"
        victim.write_bytes((example() / file).read_bytes())
        path.symlink_to(victim)

    made = {"missing": lambda path: None, "a link": link, "a pipe": os.mkfifo, "a folder": os.mkdir}
    return [Damage(f"{file} is {what}", instead(make), file, fields=lost, field=field) for what, make in made.items()]


def headers(file: str) -> list[Damage]:
    """Another header, every element where it was."""
    field = FILES[file]

    def garbage(folder: Path) -> None:
        with (folder / file).open("r+b") as out:
            out.write(b"\xff" * 64)

    flips = [Damage(f"{file}, byte {i} of its header", _flipper(file, i), file, field=field) for i in (0, 6, 8, 30, 63)]
    return [*flips, Damage(f"{file}, its header overwritten", garbage, file, field=field)]


def _flipper(file: str, offset: int, mask: int = 1) -> Callable[[Path], None]:
    return lambda folder: flip(folder / file, offset, mask)


def linked(file: str) -> Damage:
    """The file has a second name, outside."""
    return Damage(
        f"{file} is a hard link", lambda folder: os.link(folder / file, folder.parent / "victim"), file, field=""
    )


def rotten() -> list[Damage]:
    """A bit of an episode's rows, the first or the last."""
    made = []
    for file, field in FILES.items():
        for serial in VISIBLE[::2] if field else ():
            head = header_size(example() / file)
            start, stop = (head + end for end in rows_of(field, serial))
            for where, offset, mask in (("first", start, 1), ("last", stop - 1, 128)):
                name = f"{file}, the {where} bit of episode {serial}"
                hit = frozenset({serial})
                made.append(Damage(name, _flipper(file, offset, mask), file, hit, field=field, slots=hit))
    return made


def records() -> list[Damage]:
    """Records that are wrong in one byte, or in more, or that cannot be."""
    file, one = "episodes.npy", frozenset({3})
    head = header_size(example() / file)
    flips = [
        Damage(f"byte {i} of a record", _flipper(file, head + 64 * 3 + i, 0x55), file, slots=one)
        for i in range(0, 64, 7)
    ]

    def crafted(name: str, **changes: int) -> Damage:
        return Damage(name, lambda folder: rewrite_record(folder, 3, **changes), file, one, slots=one)

    return [
        *flips,
        crafted("a record of nonsense", serial=2**61 + 7, length=3, time=9, check=12345),
        crafted("a length of 0", length=0),
        crafted("a length beyond the slot", length=MAX_TIMESTEPS + 1),
        crafted("a length of -1", length=2**32 - 1),
        crafted("an unknown flag", flags=128),
        crafted("a digest of other checksums", digest=7),
        crafted("a first row of another slot", first_row=0),
        crafted("a serial beyond all", serial=2**62),
        crafted("a generation of 0", generation=0),
        Damage(
            "a serial in two slots",
            lambda folder: rewrite_record(folder, 3, serial=4),
            file,
            frozenset({3, 4}),
            slots=frozenset({3, 4}),
        ),
    ]


def states() -> list[Damage]:
    """Counters that cannot be."""
    return [
        Damage(f"{name} is {value}", lambda folder, n=name, v=value: rewrite_state(folder, **{n: v}), "state.npy")
        for name, value in [
            ("base", 7),
            ("base", 2**63),
            ("next", 2**62),
            ("next", 2**64 - 1),
            ("synced", 2**40),
            ("suspect", 2**40),
            ("term", 2**64 - 1),
            ("clean", 3),
        ]
    ]


def checksums() -> list[Damage]:
    """A bit of a checksum, its data being right."""
    head, columns = header_size(example() / "checksums.npy"), np.load(example() / "checksums.npy").shape[1]
    made = []
    for column, field in enumerate([*FILES.values()][3:]):
        offset = head + 4 * (4 * columns + column)
        hit = frozenset({4})
        name = f"a bit of the checksum of {field}"
        made.append(Damage(name, _flipper("checksums.npy", offset, 16), "checksums.npy", field=field, slots=hit))
    return made


def every() -> list[Damage]:
    """All of them."""
    files = [d for file in FILES for d in (*cuts(file), *replaced(file), *headers(file), linked(file))]
    return [*files, *rotten(), *records(), *states(), *checksums()]


HOPELESS = frozenset(
    f"episodes.npy {what}"
    for what in (
        *("cut to nothing", "cut to 10", "cut to header-1", "cut to header"),
        *("is missing", "is a link", "is a pipe", "is a folder"),
    )
)
