"""The folder that mirrors lie in, and its bound: the blocks that were not used for longest are given back."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.host import file_system
from memmap_buffer.format.layout import MAX_SCHEMA_BYTES, Layout
from memmap_buffer.format.remote_layout import BLOCK, data_files, num_blocks
from memmap_buffer.format.syscalls import locked, read_at, write_word
from memmap_buffer.remote.blocks import COUNTER, LOCAL, USED, Blocks

log = logging.getLogger("memmap_buffer")
USAGE = "usage"
AT_ONCE = 20  # of the bound, a part that is given back together, so that it is not looked for too often
MEMORY = ("tmpfs", "ramfs")


class Cache:
    """A folder of mirrors, shared by all processes of a host.

    Args:
        path: where; made if it is missing.
        limit: bytes of blocks, or None.

    Raises:
        SchemaError: the limit is less than some blocks, or the folder lies where none can be kept.
    """

    def __init__(self, path: Path, limit: int | None = None) -> None:
        if limit is not None and (type(limit) is not int or limit < 16 * BLOCK):
            raise SchemaError(f"cache_bytes: got {limit!r}, expected a number of bytes from {16 * BLOCK:,}, or None")
        Folder(path).create()
        self.path, self.limit = path, limit
        self._files: dict[Path, dict[str, int]] = {}  # of each mirror, which never change
        if limit is not None and file_system(path) in MEMORY:
            raise SchemaError(
                f"cache: {path} lies in memory, where blocks cannot be given back safely; leave cache_bytes"
            )

    def __reduce__(self) -> tuple[type[Cache], tuple[Path, int | None]]:
        return Cache, (self.path, self.limit)

    def reserve(self, blocks: int) -> None:
        """Have room for some blocks more: others are given back for them where that takes it."""
        size = blocks * BLOCK
        with locked(str(self.path / USAGE)) as fd:
            data = read_at(fd, 8, 0)
            used = int.from_bytes(data, "little") if len(data) == 8 else self._count()
            if self.limit is not None and used + size > self.limit:
                used = self._count()  # what a kill left uncounted
                if used + size > self.limit:
                    used -= self._give_back(used + size - self.limit + self.limit // AT_ONCE)
            write_word(fd, used + size, 0)

    def require_room(self, blocks: int) -> None:
        """Raise SchemaError where so many blocks, which are needed together, are more than the bound."""
        if self.limit is not None and blocks * BLOCK > self.limit:
            raise SchemaError(
                f"cache_bytes: {self.limit:,} are less than the {blocks * BLOCK:,} bytes of blocks that a batch is "
                "read from; give more, or read smaller batches"
            )

    def _mirrors(self) -> list[tuple[Path, Blocks, dict[str, int]]]:
        """Every mirror: where it is, its blocks, and its files with their sizes."""
        found = []
        for path in sorted(self.path.iterdir()):
            folder = Folder(path)
            if path.is_dir() and ".new" not in path.name and folder.exists("mirror/blocks.npy"):
                files = self._files.get(path)
                if files is None:
                    layout = Layout.from_json(folder.read("schema.json", MAX_SCHEMA_BYTES), str(path))
                    files = self._files[path] = data_files(layout)
                found.append((path, Blocks.of(path, sum(map(num_blocks, files.values()))), files))
        return found

    def _count(self) -> int:
        """The bytes of the blocks that may be on the disk."""
        return BLOCK * sum(int(np.count_nonzero(blocks.words[:, LOCAL])) for _, blocks, _ in self._mirrors())

    def _give_back(self, size: int) -> int:
        """Give so many bytes of the longest unused blocks back; how many were."""
        mirrors = self._mirrors()
        used = np.concatenate([blocks.words[:, USED] for _, blocks, _ in mirrors])
        local = np.concatenate([blocks.words[:, LOCAL] for _, blocks, _ in mirrors])
        starts = np.cumsum([0, *(len(blocks.words) for _, blocks, _ in mirrors)])
        order = np.flatnonzero(local)
        order = order[np.argsort(used[order], kind="stable")]
        freed = 0
        for place in order.tolist():
            if freed >= size:
                break
            number = int(np.searchsorted(starts, place, side="right")) - 1
            path, blocks, files = mirrors[number]
            freed += BLOCK * _give_back(path, blocks, files, place - int(starts[number]))
        return freed


def _give_back(path: Path, blocks: Blocks, files: dict[str, int], block: int) -> bool:
    """Give one block back, unless somebody is at it."""
    with blocks.try_taken(block) as mine:
        if not mine:
            return False
        if not blocks.words[block, COUNTER] & np.uint32(1):
            blocks.change(block)
        first = block
        for name, size in files.items():
            if first < num_blocks(size):
                Folder(path).punch(name, first * BLOCK, min((first + 1) * BLOCK, size))
                break
            first -= num_blocks(size)
        blocks.words[block, LOCAL] = 0
        return True
