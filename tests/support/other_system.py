"""Take features of this system away, so that the package goes the ways that it goes where these are missing.

    python other_system.py macOS FOLDER    a life of folders there; what they hold in the end is printed as JSON
    MISSING=macOS PYTHONPATH=tests/support python -m pytest -p other_system tests/writing    tests, as if there

That is before the package is imported, as it looks for most features once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

FULL_FSYNC = 51  # macOS's F_FULLFSYNC, which Linux refuses with EINVAL
full_syncs: list[int] = []


def without(module: Any, *names: str) -> Callable[[], None]:
    def take_away() -> None:
        for name in names:
            delattr(module, name)

    return take_away


def without_fallocate() -> None:
    class Library(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("fallocate") or name.endswith("64"):
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = Library  # type: ignore[misc]


def without_proc() -> None:
    """No file of /proc; the disk is of an unknown kind, and `sysctl` is not there to ask."""
    read_text, exists = Path.read_text, Path.exists

    def read(self: Path, *arguments: Any, **options: Any) -> str:
        if self.parts[:2] == ("/", "proc"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return read_text(self, *arguments, **options)

    Path.read_text = read  # type: ignore[method-assign]
    Path.exists = lambda self, **options: self.parts[:2] != ("/", "proc") and exists(self, **options)  # type: ignore[method-assign]


def with_sysctl() -> None:
    """macOS has no /proc, but tells by sysctl(8) when it was started."""
    without_proc()
    real = subprocess.run

    def run(command: Any, *arguments: Any, **options: Any) -> Any:
        if command[0] == "/usr/sbin/sysctl":
            return subprocess.CompletedProcess(command, 0, stdout="5EED5EED-0000-4000-8000-5EED5EED5EED\n")
        return real(command, *arguments, **options)

    subprocess.run = run


def with_full_fsync() -> None:
    real = fcntl.fcntl

    def call(fd: int, command: int, *arguments: Any) -> Any:
        if command != FULL_FSYNC:
            return real(fd, command, *arguments)
        full_syncs.append(fd)
        os.fsync(fd)
        return 0

    fcntl.fcntl = call
    fcntl.F_FULLFSYNC = FULL_FSYNC  # type: ignore[attr-defined]


def full_fsync_refused() -> None:
    fcntl.F_FULLFSYNC = FULL_FSYNC  # type: ignore[attr-defined]


def on_arm() -> None:
    platform.machine = lambda: "aarch64"


MISSING: dict[str, Callable[[], None]] = {
    "posix_fallocate": without(os, "posix_fallocate"),
    "holes punched": without_fallocate,
    "holes told": without(os, "SEEK_HOLE", "SEEK_DATA"),
    "posix_fadvise": without(os, "posix_fadvise"),
    "madvise": without(mmap, "MADV_WILLNEED"),
    "copy_file_range": without(os, "copy_file_range"),
    "fdatasync": without(os, "fdatasync"),
    "fsync that is enough": with_full_fsync,
    "full fsync": full_fsync_refused,
    "proc": without_proc,
    "proc, not sysctl": with_sysctl,
    "ordered stores": on_arm,
    "scheduling": without(os, "sched_getaffinity", "sched_setscheduler", "SCHED_BATCH"),
    "usage of threads": without(resource, "RUSAGE_THREAD"),
}
MACOS = set(MISSING) - {"madvise", "holes told", "full fsync", "proc"}  # what macOS on 64-bit Arm lacks
TOGETHER: dict[str, set[str]] = {
    "nothing": set(),
    "macOS": MACOS,
    "files": {"posix_fallocate", "holes punched", "holes told", "copy_file_range", "fdatasync"},
    "memory": {"madvise", "posix_fadvise", "proc", "usage of threads", "scheduling"},
    "order and barriers": {"ordered stores", "full fsync"},
}


def leave_out(name: str) -> None:
    for each in TOGETHER[name]:
        MISSING[each]()


def live(root: Path) -> dict[str, Any]:
    """Make folders in every way to write; what they hold, and how often `full_syncs` were asked for."""
    import numpy as np

    from memmap_buffer import Field, ReplayBuffer, pack, repair, unpack, verify
    from memmap_buffer.maintenance.disk import measure_disk_speed

    def held(folder: Path) -> list[Any]:
        assert verify(folder) == [], folder
        with ReplayBuffer.from_folder(folder, read_only=True) as buffer:
            steps = buffer.batch(timestep_level=True, format="numpy")
            episodes = [buffer.episode(i) for i in range(len(buffer))]
            return [{key: told(np.asarray(value)) for key, value in each.items()} for each in (steps, *episodes)]

    def told(array: np.ndarray) -> Any:
        return array.tolist() if array.ndim < 3 else [*array.shape, zlib.crc32(array.tobytes())]

    fields = {"image": Field("uint8", (100, 100), final=True), "n": "int"}
    for name, options in {"ring": {}, "power": {"durability": "power"}, "steps": {"publish": "step"}}.items():
        with ReplayBuffer(root / name, 3, 20, fields, circular=True, **options) as buffer:
            for number, length in enumerate((20, 20, 4, 20, 2, 3)):
                with buffer.one_episode() as episode:
                    for t in range(length):
                        episode.store(image=np.full((100, 100), t), n=100 * number + t)
                    episode.final(image=np.full((100, 100), 255))
            buffer.update(1, n=[-1, -2])
            buffer.delete(0)
    with ReplayBuffer(root / "streams", capacity=30, max_timesteps=8, fields={"x": "float32", "n": "int"}) as buffer:
        for t in range(40):
            buffer.add(x=np.array([t, -t], np.float32), n=np.array([t, -t]))
    with ReplayBuffer.from_folder(root / "ring") as buffer:
        buffer.add_field("more", Field("float32", default=0.5))
        buffer.snapshot(root / "snapshot")
        buffer.store_episode(image=np.ones((2, 100, 100)), n=[7, 8], more=[1, 2])
    try:
        with ReplayBuffer(root / "reserved", 3, 20, fields, reserve=True) as buffer:
            buffer.store_episode(image=np.ones((3, 100, 100)), n=[1, 2, 3])
        reserved = held(root / "reserved")
    except OSError as error:
        reserved = [errno.errorcode[error.errno or 0]]
    pack(root / "ring", root / "packed")
    unpack(root / "packed", root / "unpacked", max_episodes=4)
    with (root / "steps" / "state.npy").open("r+b") as file:
        file.truncate(200)
    repair(root / "steps")
    measure_disk_speed(root / "ring", 0.01, larger=True)
    folders = ("ring", "power", "steps", "streams", "snapshot", "packed", "unpacked")
    return {"reserved": reserved, "full syncs": len(full_syncs), **{name: held(root / name) for name in folders}}


if name := os.environ.get("MISSING"):
    leave_out(name)
if __name__ == "__main__":
    leave_out(sys.argv[1])
    json.dump(live(Path(sys.argv[2])), sys.stdout)
