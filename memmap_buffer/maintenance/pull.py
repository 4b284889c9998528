"""`pull`: copies of published folders, as packed folders on this machine. Each byte is checked by a digest.

After an interruption the same call goes on: blocks that are there are checked, and the others are fetched. Read
`pull` first, the public function; `remote.published` knows what is at a URL.
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
from memmap_buffer.paths import path_of, url_of
from memmap_buffer.progress import progress
from memmap_buffer.remote.cache import Cache, fetched
from memmap_buffer.remote.layout import BLOCK_SIZES, PIECE_BYTES, ROOT, Root, Shard, num_blocks
from memmap_buffer.remote.objects import Objects
from memmap_buffer.remote.published import Published, nothing_at, read_root, read_shard, require_digests
from memmap_buffer.remote.shards import CACHE

BATCH_BYTES = 16 * PIECE_BYTES  # of a file, which are requested at a time


def shards_at(url: str, *, storage_options: Mapping[str, Any] | None = None) -> dict[str, Shard]:
    """The shards at a URL, from `root.json` or `shard.json` alone.

    Args:
        url: the URL of a root, or of a shard.
        storage_options: options for the file system of fsspec.

    Returns:
        Name -> the description of a shard; the name is "" if the URL is of the shard itself.

    Raises:
        NotABufferError: nothing was published there; or a folder was published to `folder`, or shards stand in it.
        RemoteError: the store fails.
    """
    objects = Objects(url_of(url), storage_options)
    return shards_of(objects, read_root(objects))


def fetched_of(shards: Iterable[Shard], cache: str | PathLike[str] | None = None) -> tuple[int, int]:
    """The bytes of shards that were fetched into a cache, by all processes that share it.

    Args:
        shards: values of `shards_at`.
        cache: the folder of the cache; default: the one that readers use by default.

    Returns:
        (all fetched bytes, the same without those that were fetched again).
    """
    if not (place := path_of(CACHE if cache is None else cache)).is_dir():
        return 0, 0
    return fetched(Cache(place, keep_bound=True).counters([shard.mirror for shard in shards]), {})


def pull(url: str, folder: str | PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Copy a published folder, or all of a root, to this machine, checked by digests.

    Args:
        url: the URL of one folder, or of a root: then each of its folders becomes one in `folder`.
        folder: the new folder. After an interruption the same call goes on. A folder that is complete is not changed.
        storage_options: options for the file system of fsspec.

    Raises:
        NotABufferError: nothing was published there.
        SchemaMismatchError: `folder` holds another buffer, or another version of this one; or the URL is of a root, and
            `folder` is a buffer itself, or holds shards that `compact` has joined since.
        CorruptBufferError: what was published is damaged; or a file that is not ours is in the way.
        RemoteError: the store fails.
        OSError: the disk is full, say.
    """
    objects, target = Objects(url_of(url), storage_options), path_of(folder)
    root, place = read_root(objects), Folder(target)
    shards = shards_of(objects, root)
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
        _require_no_parts(objects, root, place)
    for name, shard in shards.items():
        pull_shard(Published(objects, shard, name), target / name)


def shards_of(objects: Objects, root: Root) -> dict[str, Shard]:
    """The shards of a store whose `root.json` says this, as `shards_at` returns them."""
    if root.shards:
        return dict(root.shards)
    if (shard := read_shard(objects)) is not None:
        return {"": shard}
    raise nothing_at(objects, ROOT)


def _require_no_parts(objects: Objects, root: Root, place: Folder) -> None:
    """Raise SchemaMismatchError where shards stand that were joined with others since they were pulled."""
    if parts := [name for name in root.joined if place.exists(f"{name}/schema.json")]:
        raise SchemaMismatchError(
            f"{place.path / parts[0]}: its episodes are in {root.holder(parts[0])} of {objects} by now, and would be "
            f"there twice; pull to a new folder, or remove what was joined ({len(parts)} folders)",
            path=place.path,
        )


def pull_shard(published: Published, path: Path) -> None:
    """Copy one shard to a folder, as `pull` does."""
    files = published.head()
    schema, _ = files.pop("schema.json"), files.pop(BLOCK_SIZES, None)
    folder = Folder(path)
    folder.create()
    with folder.kept_open() as target, target.locked():
        if _is_there(target, schema):
            return
        _claim(target, published.layout, schema, files)
        for _ in progress(_pull_blocks(published, target), "fetching", published.files.count):
            pass
        target.sync_folders("data")
        for file, data in files.items():
            target.unlink(file, missing_ok=True)  # of an interrupted call
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
    """Write `schema.json.new`, which tells whose the files in the folder are, unless an interrupted call wrote it.

    Raises: CorruptBufferError: a file that does not belong to it is in the way.
    """
    if target.exists("schema.json.new"):
        if target.read("schema.json.new", MAX_SCHEMA_BYTES) == schema:
            return
        discard_unfinished(target)  # of another version
        target.unlink(*files, missing_ok=True)
    target.require_free([*(array.name for array in layout.arrays.values()), *files])
    target.write_new("schema.json.new", schema, sync=True)


def _pull_blocks(published: Published, target: Folder) -> Iterator[None]:
    """Fetch the blocks of all data files that are not on the disk yet; yields once for each block, for the progress."""
    require_digests([published])  # before: in a check they would wait for room that the checked block takes
    arrays = {array.name: array for array in published.layout.arrays.values()}
    for name, first in published.files.first.items():
        array, block = arrays[name], published.files.block[name]
        is_new, stop = _make(target, array), first + num_blocks(array.size, block)
        with target.writing(array) as fd:
            for begin in range(first, stop, BATCH_BYTES // block):
                blocks = range(begin, min(begin + BATCH_BYTES // block, stop))
                missing = [block for block in blocks if is_new or not _is_whole(published, fd, block)]
                _fetch(published, missing, fd)
                yield from (None for _ in blocks)


def _fetch(published: Published, blocks: Sequence[int], fd: int) -> None:
    pieces = published.files.pieces(blocks)
    ranges = [published.range_of(piece) for piece in pieces]
    for i, data in published.objects.stream(ranges, lambda i, data: published.is_right(pieces[i], data)):
        write_all(fd, data, ranges[i][1])


def _make(target: Folder, array: ArrayFile) -> bool:
    """Create a file, unless an interrupted call began it; returns whether it was created."""
    if target.exists(array.name):
        try:
            with target.writing(array):
                return False
        except CorruptBufferError:  # its size or header is wrong: of another version, or not yet written
            target.unlink(array.name)
    target.create_array(array)
    return True


def _is_whole(published: Published, fd: int, block: int) -> bool:
    _, first, stop = published.files.place(block)
    return published.is_right([block], read_at(fd, stop - first, first))
