"""`Published`: a version of a packed folder at a URL, which never changes: its head, layout and digests of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError, NotABufferError
from memmap_buffer.format.layout import Layout
from memmap_buffer.remote.layout import (
    BLOCK_SIZES,
    BLOCKS_FILE,
    HEAD,
    MAX_ROOT_BYTES,
    MAX_SHARD_BYTES,
    ROOT,
    SHARD,
    DataFiles,
    Root,
    Shard,
    blocks_file,
    digest,
    is_data,
    open_head,
)

if TYPE_CHECKING:
    from memmap_buffer.remote.objects import Objects, Range


def read_root(objects: Objects) -> Root:
    """The root that `root.json` describes; an empty one where there is none."""
    data = objects.read(ROOT, MAX_ROOT_BYTES)
    return Root() if data is None else Root.from_json(data, objects.name_of(ROOT))


def read_shard(objects: Objects, path: str = SHARD) -> Shard | None:
    """The shard that a `shard.json` describes; None where there is none."""
    data = objects.read(path, MAX_SHARD_BYTES)
    return None if data is None else Shard.from_json(data, objects.name_of(path))


def nothing_at(objects: Objects, path: str) -> NotABufferError:
    """The error for a URL at which there is nothing to read."""
    return NotABufferError(f"{objects.name_of(path)}: nothing was published here; check the URL, or `publish` a folder")


class Published:
    """A packed folder at a URL.

    Args:
        objects: the store.
        shard: the facts about it.
        name: the name of the shard, if the URL is that of its root; else "".
    """

    def __init__(self, objects: Objects, shard: Shard, name: str = "") -> None:
        self.objects, self.shard, self.name = objects, shard, name
        self.prefix = shard.prefix(name)
        self._block_sizes: bytes | None = None

    @property
    def where(self) -> str:
        """The URL, without credentials."""
        return self.objects.name_of(self.name)

    def read_head(self) -> bytes:
        """The bytes of its head. Raises CorruptBufferError, RemoteError."""
        wanted = [(self.prefix + HEAD, 0, self.shard.head[2])]
        (head,) = self.objects.read_ranges(wanted, lambda i, data: self.shard.is_head(data))
        return head

    def head(self) -> dict[str, bytes]:
        """File -> its bytes, for the files that are always there whole: all but the files of fields.

        Their sizes and headers are checked by the layout. Raises: CorruptBufferError, RemoteError.
        """
        files = open_head(self.read_head(), self.where)
        if "layout" not in vars(self):
            self._block_sizes = files.get(BLOCK_SIZES)  # before the layout: `files` needs both
            self.__dict__["layout"] = Layout.from_json(files.get("schema.json", b""), self.where)
        layout = self.layout
        wrong = [
            array.name
            for array in layout.arrays.values()
            if not is_data(array)
            and not (len(data := files.get(array.name, b"")) == array.size and data.startswith(array.header))
        ]
        if layout.writable or layout.id != self.shard.id or wrong:
            raise CorruptBufferError(
                f"{self.where}: the head is not what its schema says {wrong}; publish the folder again"
            )
        return files

    @cached_property
    def layout(self) -> Layout:
        """The layout, which is read with the head. Raises as `head`."""
        self.head()
        layout: Layout = self.__dict__["layout"]
        return layout

    @cached_property
    def files(self) -> DataFiles:
        """The files that are fetched block by block. Raises as `head`."""
        layout = self.layout  # first, as it reads the head
        return DataFiles(layout, self._block_sizes)

    @cached_property
    def digests(self) -> Array:
        """The digests of all blocks and groups, u8, fetched when the first of them is needed."""
        require_digests([self])
        digests: Array = self.__dict__["digests"]
        return digests

    def has_digests(self) -> bool:
        """Whether the digests are loaded; then they are kept where `keep_digests` does that."""
        return "digests" in vars(self)

    def kept_digests(self) -> bytes:
        """The bytes of the digests that `keep_digests` kept; b"" where it kept none."""
        return b""

    def keep_digests(self, content: bytes) -> None:
        """Keep digests for the next time, if there is room."""

    def take_digests(self, content: bytes) -> bool:
        """Take bytes as the digests if they are those that were published; returns whether they are."""
        if digest(content) != self.shard.blocks:
            return False
        self.__dict__["digests"] = np.frombuffer(content, np.uint64)
        return True

    def range_of(self, piece: Sequence[int]) -> Range:
        """(path in the store, first byte, byte after the last) of ascending blocks of a file."""
        name, begin, stop = self.files.range_of(piece)
        return self.prefix + name, begin, stop

    def is_right(self, piece: Sequence[int], data: bytes) -> bool:
        """Whether `data` is the bytes of the blocks `piece`, and of those between them."""
        return self.files.are_right(data, piece, self.digests)


def require_digests(folders: Sequence[Published]) -> None:
    """Load the digests of folders: those that were kept, and from the store all others together.

    Raises:
        RemoteError: the store fails, or its digests are not those that were published.
    """
    lacking = [each for each in folders if not each.has_digests() and not each.take_digests(each.kept_digests())]
    for objects in {each.objects for each in lacking}:
        mine = [each for each in lacking if each.objects is objects]
        files = [blocks_file(each.files.num_digests) for each in mine]
        ranges = [(e.prefix + BLOCKS_FILE, len(file.header), file.size) for e, file in zip(mine, files, strict=True)]
        for i, content in objects.stream(ranges, lambda i, data, mine=mine: mine[i].take_digests(data)):  # type: ignore[misc]
            mine[i].keep_digests(content)
