"""`pull`: a published folder, or a root of them, as packed folders on this machine. Each byte is checked by a digest.

Whoever is interrupted calls it again: what is there by then is checked, and the rest is fetched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from memmap_buffer.errors import CorruptBufferError, SchemaMismatchError
from memmap_buffer.format.creation import discard_unfinished
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.layout import MAX_SCHEMA_BYTES, ArrayFile, Layout
from memmap_buffer.format.shards import require_new_place
from memmap_buffer.format.syscalls import read_at, write_all
from memmap_buffer.maintenance.publish import locked
from memmap_buffer.paths import path_of, url_of
from memmap_buffer.progress import progress
from memmap_buffer.remote.cache import Cache, fetched
from memmap_buffer.remote.layout import PIECE, ROOT, Shard, num_blocks
from memmap_buffer.remote.objects import Objects
from memmap_buffer.remote.published import Published, nothing_at, read_root, read_shard, require_digests
from memmap_buffer.remote.shards import CACHE

BATCH = 16 * PIECE  # blocks that are asked for at a time


def shards_at(url: str, *, storage_options: Mapping[str, Any] | None = None) -> dict[str, Shard]:
    """The shards that stand at a URL, from `root.json` or `shard.json` alone.

    Args:
        url: of a root, or of a shard.
        storage_options: for the file system of fsspec.

    Returns:
        Name -> what is known of a shard; "" for the one whose own URL it is.

    Raises:
        NotABufferError: nothing was published there; or a folder was published to `folder`, or shards stand in it.
        RemoteError: the store fails.
    """
    return shards_of(Objects(url_of(url), storage_options))


def fetched_of(shards: Iterable[Shard], cache: str | PathLike[str] | None = None) -> tuple[int, int]:
    """The bytes that were fetched of shards to be read, by all who share a cache.

    Args:
        shards: as `shards_at` gives them.
        cache: as for reading.

    Returns:
        All of them, and those without repetitions.
    """
    if not (place := path_of(CACHE if cache is None else cache)).is_dir():
        return 0, 0
    return fetched(Cache(place, keep_bound=True).counters([shard.mirror for shard in shards]), {})


def pull(url: str, folder: str | PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Copy a published folder, or all of a root, to this machine, checked by digests.

    Args:
        url: of one folder, or of a root: then each of its folders becomes one in `folder`.
        folder: where. After an interruption the same call goes on. A folder that is whole already is left as it is.
        storage_options: for the file system of fsspec.

    Raises:
        NotABufferError: nothing was published there.
        SchemaMismatchError: `folder` holds another buffer, or another version of this one; or the URL is of a root, and
            `folder` is a buffer itself.
        CorruptBufferError: what was published is damaged; or a file that is not ours is in the way.
        RemoteError: the store fails.
        OSError: the disk is full, say.
    """
    objects, target = Objects(url_of(url), storage_options), path_of(folder)
    shards = shards_of(objects)
    place = Folder(target)
    if "" in shards:
        require_new_place(place)
    else:
        place.require_not_published()
        if place.exists("schema.json"):
            shard_url = objects.name_of(next(iter(shards)))
            raise SchemaMismatchError(
                f"{target}: got a folder that holds a buffer, expected one for the shards of the root {objects}, each "
                f"of which becomes a folder in it; give another folder, or the URL of one shard, as {shard_url}, and a "
                "new folder",
                path=target,
            )
    for name, shard in shards.items():
        _pull(Published(objects, shard, name), target / name)


def shards_of(objects: Objects) -> dict[str, Shard]:
    """The shards of a store, as `shards_at` returns them."""
    if shards := read_root(objects).shards:
        return dict(shards)
    if (shard := read_shard(objects)) is not None:
        return {"": shard}
    raise nothing_at(objects, ROOT)


def _pull(published: Published, path: Path) -> None:
    layout, files = published.open()
    schema = files.pop("schema.json")
    folder = Folder(path)
    folder.create()
    with folder.kept_open() as target, locked(target):
        if _is_there(target, schema):
            return
        _claim(target, layout, schema, files)
        for _ in progress(_pull_blocks(published, target), "fetching", published.files.count):
            pass
        target.sync_folders("data")
        for file, data in files.items():
            target.unlink(file, missing_ok=True)  # of a call before that was interrupted
            target.write_new(file, data, sync=True)
        target.rename("schema.json.new", "schema.json")


def _is_there(target: Folder, schema: bytes) -> bool:
    if not target.exists("schema.json"):
        return False
    if target.read("schema.json", MAX_SCHEMA_BYTES) != schema:
        raise SchemaMismatchError(
            f"{target.path} holds another buffer, or another version of this one; give a folder without one",
            path=target.path,
        )
    return True


def _claim(target: Folder, layout: Layout, schema: bytes, files: Collection[str]) -> None:
    """Have `schema.json.new` say whose the files here are: those of a call before, or that are made from now on.

    Raises: CorruptBufferError: a file of another is in the way.
    """
    if target.exists("schema.json.new"):
        if target.read("schema.json.new", MAX_SCHEMA_BYTES) == schema:
            return
        discard_unfinished(target)  # of another version
        for file in files:
            target.unlink(file, missing_ok=True)
    target.require_free([*(array.name for array in layout.arrays.values()), *files])
    target.write_new("schema.json.new", schema, sync=True)


def _pull_blocks(published: Published, target: Folder) -> Iterator[None]:
    """Have the blocks of all data files on the disk; one item for each."""
    require_digests([published])  # not by a check, which has room in the line that they would wait for
    arrays = {array.name: array for array in published.layout.arrays.values()}
    for name, first in published.files.first.items():
        array, stop = arrays[name], first + num_blocks(arrays[name].size)
        fresh = _make(target, array)
        with target.writing(name, array.header, array.size) as fd:
            for begin in range(first, stop, BATCH):
                blocks = range(begin, min(begin + BATCH, stop))
                missing = [block for block in blocks if fresh or not _is_whole(published, fd, block)]
                _fetch(published, missing, fd)
                yield from (None for _ in blocks)


def _fetch(published: Published, blocks: Sequence[int], fd: int) -> None:
    pieces = list(published.files.pieces(blocks))
    ranges = [published.range_of(piece) for piece in pieces]
    for i, data in published.objects.stream(ranges, lambda i, data: published.is_right(pieces[i], data)):
        write_all(fd, data, ranges[i][1])


def _make(target: Folder, array: ArrayFile) -> bool:
    """Whether a file had to be made, else it is one that was begun before."""
    if target.exists(array.name):
        try:
            with target.writing(array.name, array.header, array.size):
                return False
        except CorruptBufferError:  # of another version, or not even its header was written
            target.unlink(array.name)
    target.create_array(array.name, array.header, array.size)
    return True


def _is_whole(published: Published, fd: int, block: int) -> bool:
    _, first, stop = published.files.place(block)
    return published.is_right(range(block, block + 1), read_at(fd, stop - first, first))
