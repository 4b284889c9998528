"""Facts about this machine and its file systems, as the system tells them. Reads only."""

from __future__ import annotations

import stat
from pathlib import Path

from memmap_buffer.format.syscalls import machine_names

IN_PLACE = ("ext2", "ext3", "ext4", "tmpfs")  # file systems that overwrite written blocks where they are
ORDERED = ("x86_64", "AMD64")  # processors whose stores are seen by others in the order in which they were made
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "glusterfs", "sshfs", "beegfs")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # proc(5); macOS has none: there sysctl(8) tells the boot
MEMORY_INFO = Path("/proc/meminfo")  # proc(5); likewise
MOUNTS = Path("/proc/self/mountinfo")  # proc(5); macOS has none
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
    """A value of sysctl(8) as text, on systems without /proc. Raises: OSError: the system has no such value."""
    import subprocess

    try:
        return subprocess.run([SYSCTL, "-n", name], capture_output=True, text=True, timeout=5, check=True).stdout
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from None


def file_system(path: Path) -> str:
    """The kind of file system that `path` lies on, or "" where it cannot be known."""
    try:
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    place = path.resolve()
    # proc(5): field 4 is the mount point, the file system's type follows the separator "-"; later ones lie above
    mount_points = [(m[4], m[m.index("-") + 1]) for m in mounts if place.is_relative_to(m[4].replace("\\040", " "))]
    return max(reversed(mount_points), key=lambda mount: len(mount[0]), default=("", ""))[1]


def overwrites_in_place(path: Path) -> bool:
    """Whether a store into a block that was written before needs no new block, so that it cannot fail."""
    return file_system(path) in IN_PLACE


def stores_are_writes(path: Path) -> bool:
    """Whether stores into a map of allocated blocks are as good as writes: none fails, and all see them in order."""
    return machine_names()[1] in ORDERED and overwrites_in_place(path)


def network_filesystem(path: Path) -> str:
    """The kind of network file system that `path` lies on, or "" for a local one."""
    kind = file_system(path)
    return kind if kind.removeprefix("fuse.") in NETWORK else ""


def anyone_may_rename(path: Path) -> bool:
    """Whether any user of the machine could replace this folder: its parent is open to all, without the sticky bit."""
    mode = path.resolve().parent.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def available_memory() -> int | None:
    """The bytes that the system can give without swapping (macOS: all that it has); None where it does not tell."""
    try:
        if not MEMORY_INFO.exists():
            return int(sysctl("hw.memsize"))
        lines = dict(line.split(":", 1) for line in MEMORY_INFO.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
