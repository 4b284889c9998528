"""File systems of a child's own, made by a test and gone when the child ends."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_injection import in_child

DISK = 8 << 20

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source: str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    _checked(LIBC.mount(source.encode(), str(target).encode(), kind.encode() or None, flags, data.encode() or None))


def private_mounts() -> None:
    """From here on this process mounts for itself alone; as an ordinary user in a user namespace."""
    user, group = os.geteuid(), os.getegid()
    _checked(LIBC.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount("none", Path("/"), flags=MS_REC | MS_PRIVATE)


def in_namespace(prepare: Callable[[], None], work: Callable[..., Any]) -> list[Any]:
    """What `work(tell)` tells in a child that has its own mounts, made by `prepare`; skips where that is refused."""

    def child(tell: Callable[[Any], None]) -> None:
        try:
            private_mounts()
            prepare()
        except (OSError, AttributeError, subprocess.CalledProcessError) as error:
            tell({"refused": str(error)})
        else:
            work(tell)

    status, told = in_child(child)
    if told and isinstance(told[0], dict) and "refused" in told[0]:
        pytest.skip(f"mounts are refused here: {told[0]['refused']}")
    assert status == 0, told
    return told


def on_tmpfs(folder: Path, work: Callable[..., Any]) -> list[Any]:
    folder.mkdir()
    return in_namespace(lambda: mount("tmpfs", folder, "tmpfs", 0, f"size={DISK}"), work)


def on_ext4(folder: Path, work: Callable[..., Any], block: int = 4096) -> list[Any]:
    if not shutil.which("mkfs.ext4"):
        pytest.skip("there is no mkfs.ext4")
    folder.mkdir()
    image = folder.with_suffix(".img")

    def prepare() -> None:
        image.touch()
        os.truncate(image, 2 * DISK)
        for command in (
            ["mkfs.ext4", "-q", "-m", "0", "-b", str(block), str(image)],
            ["mount", "-o", "loop", str(image), str(folder)],
        ):
            subprocess.run(command, check=True, capture_output=True)

    return in_namespace(prepare, work)


def fill(path: Path, leave: int = 0) -> None:
    """Take the whole disk but `leave` bytes."""
    with path.open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        ballast.truncate(max(0, ballast.tell() - leave))
        try:
            os.fsync(ballast)
        except OSError as error:
            assert error.errno == errno.ENOSPC
