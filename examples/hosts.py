"""Hosts that share nothing, on one machine: each in namespaces of its own, where this process may make them.

A host has a network, which a bridge joins to this process; a name; process numbers; and of the folder of all hosts it
sees its own part alone. That takes Linux, root, iproute2 and util-linux. Elsewhere hosts are plain processes.
"""

from __future__ import annotations

import subprocess
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path

HERE = "127.0.0.1"
# Seen from now on: of $folder nothing but the paths that follow the host's name, each where it was.
ENTER = """set -e
folder=$1 hold=$2 name=$3; shift 3
hostname "$name"
mount -t tmpfs tmpfs "$hold"
n=0
for path in "$folder/$name" "$@"; do
    [ "$path" != -- ] || break
    n=$((n + 1)); mkdir "$hold/$n"; mount --bind "$path" "$hold/$n"
done
mount -t tmpfs tmpfs "$folder"
n=0
for path in "$folder/$name" "$@"; do
    [ "$path" != -- ] || break
    n=$((n + 1)); mkdir -p "$path"; mount --bind "$hold/$n" "$path"
done
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


class Hosts:
    """Hosts by name, as long as it is entered.

    Args:
        folder: each host has a folder of its name in it.
        names: of the hosts.
        shown: folders in `folder` that every host sees.

    Attributes:
        address: where the hosts reach a server of this process.
        why_not: why they are plain processes; empty where they are apart.
    """

    def __init__(self, folder: Path, names: list[str], shown: list[Path]) -> None:
        self.folder, self.names, self.shown = folder, names, shown
        self.address, self.why_not = HERE, ""
        self._mark = uuid.uuid4().hex[:6]
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        for path in [self.folder / name for name in self.names] + self.shown:
            path.mkdir(parents=True, exist_ok=True)
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self._stack.close()
            output = (getattr(error, "stderr", None) or b"").decode().strip() or str(error)
            self.address, self.why_not = HERE, output.splitlines()[0]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def command(self, name: str, program: list[str]) -> list[str]:
        """The command that runs a program on a host; killing its process kills the program."""
        if self.why_not:
            return program
        namespaces = ["--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = ["sh", "-c", ENTER, "enter", str(self.folder), self._hold, name, *map(str, self.shown), "--"]
        return ["ip", "netns", "exec", self._namespace(name), "unshare", *namespaces, *enter, *program]

    def _namespace(self, name: str) -> str:
        return f"lab-{self._mark}-{name}"

    def _make(self) -> None:
        """A bridge, and for each host a network namespace with an end of it; of 198.18.0.0/15, which is for tests."""
        self._hold = self._stack.enter_context(
            tempfile.TemporaryDirectory()
        )  # where a host keeps what it goes on seeing
        bridge, subnet = f"lab{self._mark}", f"198.18.{int(self._mark, 16) % 256}"
        self._with("link", "del", bridge, make=("link", "add", bridge, "type", "bridge"))
        ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(self.names):
            namespace, outer, inner = self._namespace(name), f"o{self._mark}{number}", f"i{self._mark}{number}"
            self._with("netns", "del", namespace, make=("netns", "add", namespace))
            ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
            ip("link", "set", outer, "master", bridge, "up")
            ip("-n", namespace, "addr", "add", f"{subnet}.{number + 2}/24", "dev", inner)
            ip("-n", namespace, "link", "set", inner, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        self.address = f"{subnet}.1"
        for name in self.names:
            subprocess.run(self.command(name, ["true"]), check=True, capture_output=True, timeout=60)

    def _with(self, *undo: str, make: tuple[str, ...]) -> None:
        ip(*make)
        self._stack.callback(ip, *undo)


def ip(*arguments: str) -> None:
    """Change this machine's networks, by iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)
