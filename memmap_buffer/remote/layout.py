"""The layout at a URL: the files of packed folders, the objects that describe them, and how both are checked. No I/O.

A root::

    <root>/root.json                    the shards that count, where their heads are, the ranges of their values
    <root>/heads/<digest>.bin           the heads of some shards, one after the other
    <root>/<shard>/shard.json           the description of a shard: its newest version
    <root>/<shard>/<version>/data/…     the data files of a packed folder
    <root>/<shard>/<version>/head.bin   its head: all that is needed to open it, in one piece
    <root>/<shard>/<version>/blocks.npy (blocks + groups,) u8: the digests of the blocks and groups of its data files
    <root>/entries/…                    see below

A head is a line of JSON `[[name, bytes], …]`, then these files one after the other: all files of a packed folder but
`data/…`, and `blocks.json`, `{<data file>: <bytes of its blocks>, …}` with each data file. A data file, its header
included, is cut into blocks; the last block is what is left. Their bytes are a power of two from 4096 to `BLOCK`, such
that a block is about a row: whoever reads single rows fetches few bytes in vain. In the same way each data file is cut
into groups of `BLOCK` bytes: whoever reads much fetches and checks whole groups. Blocks and groups are numbered through
all data files, in the order of the files' names. A digest is BLAKE2b, of 8 bytes for a block or a group, else of 16.

In version 1 heads have no `blocks.json`: all blocks have `BLOCK` bytes, and `blocks.npy` has (blocks,) digests.

No object changes once it is there, but `root.json` and `shard.json`, each of which is replaced whole. So a reader of a
shard can go on when the shard is published again: the new version is in another folder, whose name is the digest of the
digests of its head and of its blocks. Versions and heads that are named no more are never looked for again, and stay
until `maintenance.garbage` removes them.

`root.json` tells of each shard in the order in which they were published, by which readers number them. A shard whose
episodes were joined with others' into another shard (`maintenance.compaction`) keeps its place there, and has in it
nothing but `{"joined": <that shard>, "version": <its own version>}`.

A shard counts once `root.json` lists it, or, read by its own URL, once `shard.json` is there. Both are written only
when everything that they name is there. Whoever publishes replaces `root.json` on condition that it did not change
since it was read, where the store can do that (`If-Match` of S3 and Azure); in a local folder, while holding the lock
of `.lock`. Any other store first gets an object of its own for each shard, `entries/<time>.<version>.<shard>.json`,
with the bytes of `shard.json`; then `root.json` is written with all entries in it, and again until it lacks none.
Readers need neither the entries nor any listing.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from memmap_buffer.errors import CorruptBufferError, NotABufferError, SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.layout import ArrayFile, Layout
from memmap_buffer.format.shards import JOINED
from memmap_buffer.format.source import BLOCK

ROOT, SHARD, HEAD, BLOCKS_FILE, HEADS = "root.json", "shard.json", "head.bin", "blocks.npy", "heads"
BLOCK_SIZES = "blocks.json"
FORMAT_OF_ROOT, FORMAT_OF_SHARD, VERSION = "memmap-buffer-root", "memmap-buffer-shard", 2
READ_VERSIONS = (1, 2)
MAX_ROOT_BYTES, MAX_SHARD_BYTES, MAX_LINE = 1 << 26, 1 << 16, 1 << 20
VALUE_BYTES = 12  # the fewest bytes a value in JSON, on average: `[]` takes 20 times its bytes in memory; ours has 20
MERGED, MERGED_BYTES = 1024, 1 << 26  # the most shards, and bytes, whose heads become one object
MAX_HEAD_BYTES = 1 << 31
MAX_SIZES_BYTES = 1 << 22  # of `blocks.json`, which names each field of a schema three times at most
LEAST_BLOCK = 4096  # bytes: of a page, the least that a file system gives back
# Of a shard, unless larger ones are too many, too: 8 MB of digests are fetched before its first row.
MOST_BLOCKS = 1 << 20
MAX_BLOCKS = 1 << 22  # of a shard that readers accept, if some have less than `BLOCK` bytes: they take memory and locks
PIECE_BYTES = 16 * BLOCK  # the most in one request
GAP_BYTES = 16 << 10  # blocks at most so many bytes apart are one request: another takes longer than these bytes
ENTRIES, DATA = "entries", "data/"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILE = re.compile(r"((schema|blocks)\.json|(episodes|state|checksums)\.npy|(meta|extra)/[A-Za-z0-9][A-Za-z0-9._-]*)")
_HEX = re.compile(r"[0-9a-f]{32}")


def digest(data: Any) -> str:
    """The digest that names the bytes of a head or a list of digests: 32 hexadecimal digits."""
    from hashlib import blake2b  # it takes 4 ms to load

    return blake2b(data, digest_size=16).hexdigest()


def block_digest(data: Any) -> int:
    """The digest of a block."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def num_blocks(size: int, block: int = BLOCK) -> int:
    """The number of blocks of `block` bytes of a file of `size` bytes."""
    return -(-size // block)


def blocks_file(count: int) -> ArrayFile:
    """The file with `count` digests."""
    return ArrayFile(BLOCKS_FILE, np.dtype("<u8"), (count,))


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges (first, stop), one for each run of successive numbers."""
    array = np.asarray(numbers)
    if not array.size:
        return []
    apart = np.flatnonzero(np.diff(array) != 1)
    first = array[np.append(0, apart + 1)]
    stop = array[np.append(apart, len(array) - 1)] + 1
    return list(zip(first.tolist(), stop.tolist(), strict=True))


def sizes_of_blocks(layout: Layout) -> dict[str, int]:
    """Data file -> the bytes of its blocks in a new version: as many as a row has, or the next power of two."""
    files = {array.name: array.size for array in layout.arrays.values() if is_data(array)}
    rows, least = {name: size // max(1, layout.rows or 1) for name, size in files.items()}, LEAST_BLOCK
    while True:
        fitting = {name: min(BLOCK, max(least, 1 << max(row - 1, 0).bit_length())) for name, row in rows.items()}
        sizes = {name: fitting[name] if size > BLOCK else BLOCK for name, size in files.items()}
        if least == BLOCK or sum(num_blocks(size, sizes[name]) for name, size in files.items()) <= MOST_BLOCKS:
            return sizes
        least *= 2


class DataFiles:
    """The data files of a packed folder, which are read block by block; blocks are numbered through all files.

    Args:
        layout: of the folder.
        sizes: the content of `blocks.json`; None: there is none.

    Attributes:
        sizes: file -> its bytes, in the order of their blocks.
        block: file -> the bytes of its blocks.
        first: file -> the number of its first block.
        count: the number of all blocks.
        num_digests: the number of digests in `blocks.npy`.
        groups: (groups,) the number of the first block of each group.

    Raises:
        CorruptBufferError: `sizes` is no such content.
    """

    def __init__(self, layout: Layout, sizes: bytes | None = None) -> None:
        self.sizes = dict(sorted((array.name, array.size) for array in layout.arrays.values() if is_data(array)))
        self.block = {name: BLOCK for name in self.sizes} if sizes is None else _block_sizes(sizes, self.sizes)
        counts = [num_blocks(size, self.block[name]) for name, size in self.sizes.items()]
        *starts, self.count = accumulate(counts, initial=0)
        self.first = dict(zip(self.sizes, starts, strict=True))
        self._names, self._starts = list(self.sizes), starts
        parts = zip(starts, counts, self.block.values(), strict=True)
        of_files = [np.arange(first, first + count, BLOCK // block) for first, count, block in parts]
        self._cuts: IntArray = np.concatenate([np.zeros(0, np.int64), *of_files, [self.count]])
        self.groups = self._cuts[:-1]
        self.num_digests = self.count + (0 if sizes is None else len(self.groups))

    def place(self, block: int) -> tuple[str, int, int]:
        """(file, first byte, byte after the last) of a block."""
        name = self._names[bisect_right(self._starts, block) - 1]
        begin = (block - self.first[name]) * self.block[name]
        return name, begin, min(begin + self.block[name], self.sizes[name])

    def range_of(self, piece: Sequence[int]) -> tuple[str, int, int]:
        """(file, first byte, byte after the last) of ascending blocks in one file, and of those between them."""
        name, begin, _ = self.place(piece[0])
        return name, begin, self.place(piece[-1])[2]

    def pieces(self, blocks: Sequence[int] | IntArray) -> list[list[int]]:
        """Ascending blocks, divided into what is requested together: `PIECE_BYTES` of a file, without large gaps."""
        block = np.asarray(blocks, np.int64)
        if not block.size:
            return []
        file = np.searchsorted(self._starts, block, side="right") - 1
        size = np.array(list(self.block.values()))[file]
        begin = (block - np.asarray(self._starts)[file]) * size
        is_apart = (file[1:] != file[:-1]) | (begin[1:] - begin[:-1] - size[:-1] > GAP_BYTES)
        is_apart |= begin[1:] // PIECE_BYTES != begin[:-1] // PIECE_BYTES
        return [piece.tolist() for piece in np.split(block, np.flatnonzero(is_apart) + 1)]

    def groups_of(self, blocks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(the first block of each group that some blocks are in, the block after its last, how many of them it has)"""
        groups, counts = np.unique(np.searchsorted(self.groups, blocks, side="right") - 1, return_counts=True)
        return self._cuts[groups], self._cuts[groups + 1], counts

    def in_groups(self, blocks: IntArray) -> IntArray:
        """All blocks, ascending, of the groups that some blocks are in."""
        first, stop, _ = self.groups_of(blocks)
        return expanded(first, stop)

    def are_right(self, data: bytes | memoryview, piece: Sequence[int], digests: Any) -> bool:
        """Whether `data` is the bytes of `range_of` a piece. Args: digests: (num_digests,) of all blocks and groups."""
        name, begin, stop = self.range_of(piece)
        if len(data) != stop - begin:  # as of a file that was cut short
            return False
        size, view, at, first = self.block[name], memoryview(data), 0, self.first[name]
        group = int(np.searchsorted(self.groups, first)) + self.count
        while at < len(data):
            place, num_bytes, number = begin + at, size, first + (begin + at) // size
            is_whole = len(data) - at >= BLOCK or place + len(data) - at == self.sizes[name]
            if self.num_digests > self.count and place % BLOCK == 0 and is_whole:
                num_bytes, number = BLOCK, group + place // BLOCK  # by one call, in which other threads run
            if block_digest(view[at : at + num_bytes]) != digests[number]:
                return False
            at += num_bytes
        return True

    def block_sizes(self) -> IntArray:
        """(count,) the bytes of each block; the last block of a file is what is left of it."""
        sizes = np.full(self.count, BLOCK, np.int64)
        for name, first in self.first.items():
            count = num_blocks(self.sizes[name], self.block[name])
            sizes[first : first + count] = self.block[name]
            sizes[first + count - 1] = self.sizes[name] - (count - 1) * self.block[name]
        return sizes


@dataclass(frozen=True)
class Shard:
    """The facts about a shard that are known before any of its files is opened.

    Args:
        id: the id of the buffer.
        episodes, steps: the numbers of visible episodes and steps.
        num_bytes: the bytes of all its files.
        version: the name of the folder that its files are in, see `version_of`.
        head: (digest of the object that contains its head, the head's first byte there, its number of bytes). In
            `shard.json` the object is the version's `head.bin`, in `root.json` one of `heads/`.
        blocks: the digest of the elements of `blocks.npy` as bytes.
        ranges: the lowest and highest values of the lengths of its episodes and of its meta fields of numbers, see
            `remote.ranges`; "": they are not told.
    """

    id: str
    episodes: int
    steps: int
    num_bytes: int
    version: str
    head: tuple[str, int, int]
    blocks: str
    ranges: str = ""

    def prefix(self, name: str = "") -> str:
        """The beginning of the paths of its files: under a root its name is needed, under its own URL it is not."""
        return f"{name}/{self.version}/" if name else f"{self.version}/"

    @property
    def mirror(self) -> str:
        """The name of its folder in a cache; another version has another name."""
        return f"{self.id}-{self.version}"

    def is_head(self, head: bytes) -> bool:
        """Whether these bytes are its head, wherever they were read."""
        return len(head) == self.head[2] and version_of(head, self.blocks) == self.version

    def to_json(self) -> bytes:
        """The bytes of `shard.json`."""
        return _dumps({"format": FORMAT_OF_SHARD, "version": VERSION, "block": BLOCK, "shard": _facts(self)})

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Shard:
        """Parse `shard.json`. Raises NotABufferError, SchemaError, CorruptBufferError."""
        return _shard(_parse(data, where, FORMAT_OF_SHARD).get("shard"), where)


@dataclass(frozen=True)
class Root:
    """The content of `root.json`.

    Args:
        shards: name -> the facts about the shard.
        heads: digest of an object in `heads/` -> its number of bytes.
        joined: name of a shard whose episodes are in another one now -> (the name of that one, its own version).
        order: the names of all of these, in the order in which they were published; (): that of `shards`.
    """

    shards: Mapping[str, Shard] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", tuple(self.shards))

    def to_json(self) -> bytes:
        """The bytes of `root.json`. Raises SchemaError: they are more than a reader accepts."""
        facts: dict[str, dict[str, Any]] = {name: _facts(shard) for name, shard in self.shards.items()}
        facts |= {name: {"joined": into, "version": version} for name, (into, version) in self.joined.items()}
        shards = {name: facts[name] for name in self.order}
        data = _dumps(
            {"format": FORMAT_OF_ROOT, "version": VERSION, "block": BLOCK, "heads": dict(self.heads), "shards": shards}
        )
        if len(data) > MAX_ROOT_BYTES:
            what = f"a list of {len(shards)} shards has {len(data)} bytes, expected at most {MAX_ROOT_BYTES}"
            raise SchemaError(f"{ROOT}: {what}; publish to another root")
        return data

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Root:
        """Parse `root.json`. Raises NotABufferError, SchemaError, CorruptBufferError."""
        document = _parse(data, where, FORMAT_OF_ROOT)
        try:
            heads = {str(name): _whole(size) for name, size in dict(document["heads"]).items()}
            specs = {str(name): dict(spec) for name, spec in dict(document["shards"]).items()}
            joined = {n: (str(spec["joined"]), str(spec["version"])) for n, spec in specs.items() if "joined" in spec}
            shards = {name: _shard(spec, where) for name, spec in specs.items() if name not in joined}
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptBufferError(f"{where} is no valid list of shards ({error}); publish them again") from None
        for name, shard in shards.items():
            if not is_shard_name(name) or shard.head[0] not in heads:
                raise CorruptBufferError(f"{where}: shard {name!r} has no head, or no name that a shard may have")
            if sum(shard.head[1:]) > heads[shard.head[0]]:
                raise CorruptBufferError(f"{where}: shard {name!r}: its head lies behind the end; publish it again")
        for size in heads.values():
            _require_size("heads", size, where)
        place = {name: i for i, name in enumerate(specs)}
        for name, (into, version) in joined.items():
            if not (is_shard_name(name) and _HEX.fullmatch(version) and place[name] < place.get(into, -1)):
                raise CorruptBufferError(f"{where}: shard {name!r} was joined into {into!r}, which is none behind it")
        return cls(shards, heads, joined, tuple(specs))

    def has(self, name: str, version: str) -> bool:
        """Whether this version of a shard is listed."""
        return name in self.shards and self.shards[name].version == version

    def with_shards(self, shards: Mapping[str, Shard], heads: Mapping[str, int]) -> Root:
        """The root with shards added or replaced by name, and without heads that no shard uses any more."""
        shards = {**self.shards, **shards}
        used, order = {shard.head[0] for shard in shards.values()}, tuple(dict.fromkeys((*self.order, *shards)))
        heads = {key: size for key, size in {**self.heads, **heads}.items() if key in used}
        return replace(self, shards=shards, heads=heads, order=order)

    def with_joined(self, names: Collection[str], into: str) -> Root:
        """The root in which the episodes of these shards are in another one, which has to be added to it."""
        shards = {name: shard for name, shard in self.shards.items() if name not in names}
        joined = {name: (into, self.shards[name].version) for name in names}
        return replace(self, shards=shards, joined={**self.joined, **joined})

    def holder(self, name: str) -> str:
        """The shard that has the episodes of a shard now: itself, unless it was joined."""
        while name in self.joined:
            name = self.joined[name][0]
        return name

    def as_held(self, before: Root, shard_of: Callable[[str], Shard | None]) -> Root:
        """The root for a reader that has shards open which were joined since: these stay, and what they became is not
        read, so that no episode is there twice.

        Args:
            before: the root as the reader has read it.
            shard_of: the facts about the newest version of a shard; one that was not joined is not read.
        """
        kept = {name: shard for name, shard in before.shards.items() if name in self.joined}
        if not kept:
            return self
        apart: set[str] = set()  # shards in whose place those are read that were joined into them
        for name in kept:
            while name in self.joined and (name := self.joined[name][0]) not in apart:
                apart.add(name)
        shards = {}
        for name in self.order:
            shard = self.shards.get(name) or kept.get(name)
            is_joined_here = name not in apart and name in self.joined and self.joined[name][0] in apart
            if is_joined_here and (shard is None or shard.version != self.joined[name][1]):
                newest = shard_of(name)
                shard = newest if newest is not None and newest.version == self.joined[name][1] else shard
            if shard is not None and name not in apart:
                shards[name] = shard
        return replace(self, shards=shards, heads={**before.heads, **self.heads})


def is_data(array: ArrayFile) -> bool:
    """Whether an array's file is read block by block."""
    return array.name.startswith(DATA)


def _block_sizes(content: bytes, files: Mapping[str, int]) -> dict[str, int]:
    allowed = {LEAST_BLOCK << i for i in range((BLOCK // LEAST_BLOCK).bit_length())}
    with suppress(ValueError, RecursionError, AttributeError):
        sizes: Any = json.loads(content) if len(content) <= MAX_SIZES_BYTES else None
        if sizes.keys() == files.keys() and all(type(size) is int and size in allowed for size in sizes.values()):
            count = sum(num_blocks(size, sizes[name]) for name, size in files.items())
            if count <= MAX_BLOCKS or set(sizes.values()) == {BLOCK}:
                return {name: sizes[name] for name in files}
    raise CorruptBufferError(
        f"{BLOCK_SIZES}: got {content[:80]!r}, expected the sizes of the blocks of {list(files)}; publish it again"
    )


def expanded(low: IntArray, high: IntArray) -> IntArray:
    """The numbers low … high - 1 of each range, one range after the other; none where high is not above low."""
    counts = np.maximum(high - low, 0)
    rows: IntArray = np.repeat(low, counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows


def version_of(head: bytes, blocks: str) -> str:
    """The name of a version of a shard. It is a digest, by which the head is checked, too.

    Args:
        head: the bytes of its head.
        blocks: the digest of the elements of its `blocks.npy`.
    """
    return digest(f"{digest(head)}{blocks}".encode())


def head_object(name: str) -> str:
    """The path of the object with heads of shards whose digest is `name`."""
    return f"{HEADS}/{name}.bin"


def is_shard_name(name: str) -> bool:
    """Whether a folder of this name may be published."""
    return _NAME.fullmatch(name) is not None and name not in (HEADS, ENTRIES, ROOT)


def joined_name(id: str) -> str:
    """The name of a shard that others were joined into, of this id: no other publisher gives it."""
    return JOINED + id


def is_head_file(name: str) -> bool:
    """Whether a head may hold a file of this name."""
    return _FILE.fullmatch(name) is not None


def make_head(files: Mapping[str, bytes]) -> bytes:
    """The head of a shard. Args: files: name -> content."""
    line = json.dumps([[name, len(data)] for name, data in files.items()]).encode() + b"\n"
    return line + b"".join(files.values())


def open_head(data: bytes, where: str) -> dict[str, bytes]:
    """Name -> content of the files in a head. Raises CorruptBufferError: it is no head."""
    line, newline, _ = data[:MAX_LINE].partition(b"\n")
    try:
        sizes = [(str(name), _whole(size)) for name, size in json.loads(line)]
        if not newline or sum(size for _, size in sizes) != len(data) - len(line) - 1:
            raise ValueError("the sizes do not add up")
        if not all(is_head_file(name) for name, _ in sizes) or len(dict(sizes)) != len(sizes):
            raise ValueError("a name is none of a file that it may hold")
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptBufferError(f"{where} is no head of a shard ({error}); publish it again") from None
    files, at = {}, len(line) + 1
    for name, size in sizes:
        files[name] = data[at : at + size]
        at += size
    return files


def _facts(shard: Shard) -> dict[str, Any]:
    return {name: value for name, value in asdict(shard).items() if value != ""}


def _shard(spec: Any, where: str) -> Shard:
    try:
        name, first, size = spec["head"]
        episodes, steps, total = (_whole(spec[key]) for key in ("episodes", "steps", "num_bytes"))
        head = str(name), _whole(first), _whole(size)
        texts = {key: str(spec[key]) for key in ("id", "version", "blocks")} | {"ranges": str(spec.get("ranges", ""))}
        shard = Shard(episodes=episodes, steps=steps, num_bytes=total, head=head, **texts)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptBufferError(f"{where} does not tell of a shard as it should ({error!r})") from None
    if not all(_HEX.fullmatch(text) for text in (shard.id, shard.version, shard.head[0], shard.blocks)):
        raise CorruptBufferError(f"{where}: an id or a digest is no 32 hexadecimal digits")
    _require_size("a head", size, where)
    return shard


def _require_size(what: str, size: int, where: str) -> None:
    """Raise CorruptBufferError if heads, which are read into memory, are said to be larger than heads may be."""
    if size > MAX_HEAD_BYTES:
        text = f"{what} of {size} bytes, expected at most {MAX_HEAD_BYTES}; publish it again"
        raise CorruptBufferError(f"{where}: {text}")


def _parse(data: bytes, where: str, kind: str) -> dict[str, Any]:
    values = data.count(b",") + 1
    if values * VALUE_BYTES > len(data) > MAX_SHARD_BYTES:
        text = f"{values} values in {len(data)} bytes, expected one in {VALUE_BYTES} at most"
        raise CorruptBufferError(f"{where} is no valid list of shards ({text}); publish them again")
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptBufferError(f"{where} is no JSON ({error}); publish it again") from None
    if not isinstance(document, dict) or document.get("format") != kind:
        raise NotABufferError(f"{where} does not describe what a published buffer has; another program wrote it")
    if document.get("version") not in READ_VERSIONS or document.get("block") != BLOCK:
        got = f"got version {document.get('version')!r}, blocks of {document.get('block')!r} bytes"
        raise SchemaError(
            f"{where}: {got}; this release reads {' and '.join(map(str, READ_VERSIONS))}, {BLOCK}; publish to another "
            "URL, or use another release"
        )
    return document


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"got {value!r}, expected a whole number")
    return value


def _dumps(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
