"""Which machine and file system this is. Reads only."""

from __future__ import annotations

import stat
from pathlib import Path

from memmap_buffer.format.syscalls import machine_names

IN_PLACE = ("ext2", "ext3", "ext4", "tmpfs")
ORDERED = ("x86_64", "AMD64")  # processors whose stores are seen by others in the order in which they were made
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "glusterfs", "sshfs", "beegfs")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # proc(5); what has none is asked by sysctl(8): macOS
MEMORY_INFO = Path("/proc/meminfo")  # likewise
SYSCTL = "/usr/sbin/sysctl"


def host_name() -> str:
    """The name of this machine."""
    return machine_names()[0]


def boot_id() -> bytes:
    """16 bytes that change when this machine starts anew; zeros where they cannot be known."""
    try:
        text = BOOT_ID.read_text() if BOOT_ID.exists() else sysctl("kern.bootsessionuuid")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def sysctl(name: str) -> str:
    """A value that a system without /proc says of itself, as text. Raises: OSError: it says nothing."""
    import subprocess

    try:
        return subprocess.run([SYSCTL, "-n", name], capture_output=True, text=True, timeout=5, check=True).stdout
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from None


def machine() -> str:
    """The kind of processor, as the system calls it."""
    return machine_names()[1]


def file_system(path: Path) -> str:
    """The kind of file system that `path` lies on, or "" where it cannot be known."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return ""
    place = path.resolve()
    # mountinfo(5): field 4 is the mount point, the file system's type follows the separator "-"
    mount_points = [(m[4], m[m.index("-") + 1]) for m in mounts if place.is_relative_to(m[4].replace("\\040", " "))]
    return max(mount_points, key=lambda mount: len(mount[0]), default=("", ""))[1]


def overwrites_in_place(path: Path) -> bool:
    """Whether a store into a block that is written already needs no other block, so that none can fail."""
    return file_system(path) in IN_PLACE


def stores_are_writes(path: Path) -> bool:
    """Whether stores into a map of blocks that are there cannot fail, and are seen in their order, as writes are."""
    return machine() in ORDERED and overwrites_in_place(path)


def network_filesystem(path: Path) -> str:
    """The kind of network file system that `path` lies on, or "" for a local one."""
    kind = file_system(path)
    return kind if kind.removeprefix("fuse.") in NETWORK else ""


def anyone_may_rename(path: Path) -> bool:
    """Whether any user of the machine could replace this folder: its parent is open to all, without the sticky bit."""
    mode = path.resolve().parent.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def available_memory() -> int | None:
    """Bytes that the system could give without swapping (of macOS: that it has), None where it does not say."""
    try:
        if not MEMORY_INFO.exists():
            return int(sysctl("hw.memsize"))
        lines = dict(line.split(":", 1) for line in MEMORY_INFO.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
