"""The doors through which a folder can be taken: each reads, checks, changes or copies it.

A door gives right data, or one of the library's errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import damage

from memmap_buffer import ConcatBuffer, NStep, Offsets, ReplayBuffer, Window, pack, repair, unpack, verify


def read(folder: Path) -> None:
    for verify_ in ("auto", "always"):
        read_all(ReplayBuffer.from_folder(folder, read_only=True, verify=verify_))


def read_all(buffer: Any) -> None:
    """Read through every view."""
    if not len(buffer):
        return
    buffer.episode(0)
    buffer.get_all_data()
    buffer.sample(4, n_steps=2)
    name = buffer.fieldnames[0]
    for view in (Window(3), NStep(2, terminated=name), Offsets({name: (-1, 0)})):
        buffer.sample(4, view=view)
    for options in ({}, {"timestep_level": True}):
        for _ in buffer.dataloader(2, **options):
            pass


def write(folder: Path) -> None:
    with ReplayBuffer.from_folder(folder) as buffer:
        damage.record(buffer, 9, 2)
        assert buffer.episode(-1)["text"].tolist() == ["9:0", "9:1"]  # what is published is there


def replace(folder: Path) -> None:
    with damage.make(folder, overwrite=True) as buffer:
        damage.record(buffer, 9, 2)
        assert buffer.serials.tolist() == [0]


def look(folder: Path) -> None:
    verify(folder)


def mend(folder: Path) -> None:
    repair(folder)
    assert verify(folder) == []
    read(folder)


def copy(folder: Path) -> None:
    ReplayBuffer.from_folder(folder, read_only=True).snapshot(folder.parent / "copy")
    read(folder.parent / "copy")


def pack_it(folder: Path) -> None:
    packed, back = folder.parent / "copy/packed", folder.parent / "copy/back"
    pack(folder, packed)
    found = [finding.what for finding in verify(packed)]
    assert not found or any("the serial is the last there is" in what for what in found)
    read(packed)
    unpack(packed, back, max_episodes=90)
    write(back)


def concatenate(folder: Path) -> None:
    read_all(ConcatBuffer([folder, damage.other_example()]))


DOORS = (read, write, replace, look, mend, copy, pack_it, concatenate)
