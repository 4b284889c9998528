"""Real power cuts: ext4 on an image, shut down under a writer without writing its journal, and mounted again."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_injection import fork
from kill_writer import RING, exact, make, told_by, whole
from mounts import on_ext4
from power import boot

from memmap_buffer import ReplayBuffer

EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, struct.pack("I", 2)


def cut_power_of(writer: Callable[[Callable[[Any], None]], None], disk: Path, delay: float) -> list[Any]:
    """What a writer on `disk` told before its power went; then the disk is mounted again, as after a start."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        try:
            writer(lambda message: os.write(writing, json.dumps(message).encode() + b"\n"))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        first = pipe.readline()  # it is at work
        time.sleep(delay)
        mounted = os.open(disk, os.O_RDONLY)
        try:
            fcntl.ioctl(mounted, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH)
        finally:
            os.close(mounted)
        os.kill(child, signal.SIGKILL)
        told = [json.loads(line) for line in (first, *pipe)]
    os.waitpid(child, 0)
    for command in (["umount", str(disk)], ["mount", "-o", "loop", str(disk.with_suffix(".img")), str(disk)]):
        subprocess.run(command, check=True, capture_output=True)
    return told


def survive(tell: Callable[[Any], None], disk: Path, durability: str, cuts: int) -> None:
    """Cut the power of one writer after the other on one buffer; tells how many episodes were acknowledged."""
    rng, acknowledged, lost, folder = random.Random(cuts), 0, 0, disk / "buffer"
    told_by(lambda tell: make(folder, durability="power").close())  # in a child: this process must map no file
    for number in range(cuts):
        with boot(2 * number + 1):
            told = cut_power_of(
                lambda tell: whole(ReplayBuffer.from_folder(folder, durability=durability), tell),
                disk,
                rng.uniform(0, 0.15),
            )
        acknowledged += len(told)
        with boot(2 * number + 2):
            (serials,) = told_by(lambda tell: tell(shown(folder, "never" if durability == "power" else "auto")))
        last, newest = told[-1][0], max(serials, default=-1)
        lost += newest < last
        if durability == "power":
            assert last <= newest <= last + 1
            assert serials == list(range(max(0, newest + 1 - RING["max_episodes"]), newest + 1))
    assert bool(lost) == (durability == "process")  # the cuts are real
    tell(acknowledged)


def shown(folder: Path, verify: str) -> list[int]:
    """The serials that are served, each exact."""
    with ReplayBuffer.from_folder(folder, read_only=True, verify=verify) as buffer:
        buffer.get_all_data()  # whatever is to be verified is
        return exact(buffer)


@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("cuts", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_what_was_acknowledged_before_the_power_went_is_there(tmp_path: Path, durability: str, cuts: int) -> None:
    """Fault 11: "power" loses nothing, with nothing verified; "process" serves nothing wrong."""
    disk = tmp_path / "disk"
    (acknowledged,) = on_ext4(disk, lambda tell: survive(tell, disk, durability, cuts))
    assert acknowledged >= cuts
