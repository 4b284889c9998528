"""`publish`: a folder to a store, packed and by parts that never change; `root.json` lists what is whole there.

What stands at a URL is told in `remote.layout`. Nothing that a reader may hold is changed or removed, and what
is listed is there: a publisher that is killed leaves objects that nobody looks for, and the next one takes them over,
or `maintenance.garbage` removes them, which tells how the two go together.
"""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import BufferLockedError, CorruptBufferError, RemoteError, SchemaError, SchemaMismatchError
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.layout import Layout
from memmap_buffer.format.source import BLOCK
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import FileLock, read_at
from memmap_buffer.items.weights import episode_column
from memmap_buffer.maintenance.disk import bytes_to_copy
from memmap_buffer.maintenance.pack import pack
from memmap_buffer.maintenance.verification import verify
from memmap_buffer.paths import path_of, url_of
from memmap_buffer.progress import progress
from memmap_buffer.remote.layout import (
    BLOCK_SIZES,
    BLOCKS_FILE,
    ENTRIES,
    HEAD,
    MAX_HEAD_BYTES,
    MAX_LINE,
    MAX_ROOT_BYTES,
    MERGED,
    MERGED_BYTES,
    ROOT,
    SHARD,
    DataFiles,
    Root,
    Shard,
    block_digest,
    blocks_file,
    digest,
    head_object,
    is_data,
    is_head_file,
    is_shard_name,
    joined_name,
    make_head,
    sizes_of_blocks,
    version_of,
)
from memmap_buffer.remote.objects import Objects
from memmap_buffer.remote.published import Published, read_root, read_shard
from memmap_buffer.remote.ranges import ranges_of

ROUNDS = 1000  # how often others may be faster
LOCK_SECONDS = 60.0
REUSE_SECONDS = 43200.0  # the age of what a publisher that was killed left, up to which no collector may remove it
LOOKS = 3  # how often what was sent is looked at: the host may sleep for days between two requests
SETTLE_SECONDS = 30.0  # longer than a collector's request takes that saw what was written over
_ENTRY = re.compile(rf"{ENTRIES}/(?P<time>[0-9]{{20}})\.(?P<version>[0-9a-f]{{32}})\.(?P<name>.+)\.json")
Contents: TypeAlias = dict[str, "bytes | Path"]
FileMarks: TypeAlias = dict[str, tuple[int, int, int]]


def publish(folder: str | PathLike[str], url: str, *, storage_options: Mapping[str, Any] | None = None) -> list[int]:
    """Copy a folder to a store, whence it is read by `from_root(url)`; again: only what is new.

    It counts once it is there whole. Readers of what was published before under its name go on with that; who opens the
    root anew reads the new episodes. Several processes may publish to one root at a time.

    Args:
        folder: of any layout; its writer may go on meanwhile. One that is not packed is packed first, into a folder
            beside it, for which there must be room. Its name is that of the shard.
        url: of the root, of any kind that fsspec can write to, as in "s3://bucket/run7".
        storage_options: for the file system of fsspec.

    Returns:
        The serials that were left out, as `pack` does.

    Raises:
        SchemaError: the folder's name or the URL will not do.
        SchemaMismatchError: the root has a shard of that name that is another buffer's, or shards of other fields, with
            which this one could not be read.
        CorruptBufferError: the folder is damaged, or changes meanwhile.
        RemoteError: the store fails.
        MemmapBufferError: as `pack` raises it.
        OSError: the disk has no room for the packed copy; the text says how much it takes.
    """
    source, objects = path_of(folder), Objects(url_of(url), storage_options)
    name = source.resolve().name
    if not is_shard_name(name):
        raise SchemaError(
            f"{source}: got the name {name!r}, expected letters, digits, '.', '_' and '-', at most 128; rename it"
        )
    if not objects.writable:
        raise SchemaError(f"{objects}: nothing can be published by this protocol; give the URL of the store itself")
    if objects.local is not None and (objects.local / name).resolve() == source.resolve():
        raise SchemaError(f"{source}: got {objects}, the root that it is in itself, expected another one")
    require_fields(objects, str(source), Storage.open(source, read_only=True, verify="never").layout, name)
    with _packed(source) as (packed, left_out):
        publish_packed(packed, objects, name)
    return left_out


def publish_packed(
    packed: Path, objects: Objects, name: str, joined: Mapping[str, Shard] = MappingProxyType({})
) -> None:
    """Have a packed folder stand in a store as a shard of a root, and be listed there.

    Args:
        packed: the folder.
        objects: the root.
        name: of the shard.
        joined: shards by name whose episodes it has; it is listed in their place, if all of them are still listed so.

    Raises:
        SchemaMismatchError: there is a shard of that name that is another buffer's, or that was joined with others
            before this one changed; or `joined` are not listed any more.
        RemoteError: the store fails.
    """
    shard, head, contents, marks, in_version_1 = _described(packed)
    root = read_root(objects)
    if _was_joined(objects, name, shard, root, in_version_1):
        return
    # A collector removes `shard.json`, and what it names, of a shard that others are joined into until that is listed.
    is_kept = root.has(name, shard.version) or name != joined_name(shard.id)
    try:
        before = _upload(packed, objects, name, shard, contents, marks, is_kept)
    except RemoteError as error:
        if not error.missing or error.asked != "write":
            raise
        text = f"{objects}: there is no such bucket, or folder, to write to ({error.url}: {error.came})"
        raise RemoteError(f"{text}; make it, or check the URL", **error.named) from None
    try:
        _list(objects, name, shard, head, joined)
    except SchemaMismatchError:
        if before is not None:  # if it was joined meanwhile, readers look here for the version that was
            objects.write(f"{name}/{SHARD}", before.to_json())
        raise
    _send(objects, shard.prefix(name), contents, math.inf)  # what a collector removed meanwhile
    if not is_kept and read_shard(objects, f"{name}/{SHARD}") != shard:
        objects.write(f"{name}/{SHARD}", shard.to_json())


def require_fields(objects: Objects, what: str, layout: Layout, name: str = "") -> None:
    """Raise SchemaMismatchError unless what has this layout can be read together with the shards of a root.

    All of these have the same fields, so one of them is looked at.

    Args:
        objects: the root.
        what: for the text.
        layout: what would be published.
        name: of the shard that it is; one that is there under this name is replaced, so it does not count.

    Raises:
        SchemaError: another program wrote the list of shards, or another release.
        CorruptBufferError: the list, or the head of a shard, is damaged.
        RemoteError: the store fails.
    """
    for other, shard in read_root(objects).shards.items():
        if other != name:
            there = Published(objects, shard, other)
            if lines := [*there.layout.field_differences(layout).values()]:
                text = "\n  ".join([f"{there.where} has other fields than {what}, and a root is read as one:", *lines])
                raise SchemaMismatchError(f"{text}\nPublish to another root.", differences=lines)
            return


@contextmanager
def _packed(source: Path) -> Iterator[tuple[Path, list[int]]]:
    """A packed copy of a folder, or itself if it is packed, and the serials that it lacks."""
    if not Storage.open(source, read_only=True, verify="never").layout.writable:
        lost = [finding for finding in verify(source) if finding.lost]
        if lost:
            raise CorruptBufferError(f"{source}: {lost[0]}; `repair` it, then publish it", path=source)
        yield source, []
        return
    with _temporary(source.resolve()) as temporary:
        packed = temporary / "packed"
        try:
            left_out = pack(source, packed)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            text = (
                f"{error.strerror}: {source} is packed into a copy here to be published, of "
                f"{bytes_to_copy(source):,} bytes; make room: shards of a recorder that lie in `published/` may be "
                "removed, which keep_published=n does"
            )
            raise OSError(error.errno, text, str(packed)) from None
        yield packed, left_out


@contextmanager
def _temporary(source: Path) -> Iterator[Path]:
    """A folder beside another; those that a publisher that was killed left there are removed."""
    prefix = f".{source.name}.publish-"
    for leftover in source.parent.glob(f"{prefix}*"):
        with suppress(BufferLockedError, OSError), Folder(leftover).locked():
            shutil.rmtree(leftover, ignore_errors=True)
    place, lock = _new_folder(prefix, source.parent)
    with ExitStack() as ends:
        ends.callback(lock.release)
        ends.callback(shutil.rmtree, place, ignore_errors=True)
        yield place


def _new_folder(prefix: str, beside: Path) -> tuple[Path, FileLock]:
    """A new folder, and its lock."""
    try:
        place = Path(tempfile.mkdtemp(prefix=prefix, dir=beside))
    except OSError:  # a folder in which only others may write
        place = Path(tempfile.mkdtemp(prefix="memmap-buffer-"))
    try:
        return place, Folder(place).lock()
    except (BufferLockedError, FileNotFoundError):  # another publisher took it for one that was left
        return _new_folder(prefix, beside)


# The objects of a shard


def _described(packed: Path) -> tuple[Shard, bytes, Contents, FileMarks, str]:
    """The facts about a packed folder, its head, what its objects have in them, what its files were like, and the name
    of the version that format version 1 would have made of it: there the blocks were what the groups are now.
    """
    storage = Storage.open(packed, read_only=True, verify="never")
    sizes = json.dumps(sizes_of_blocks(storage.layout)).encode()
    files = DataFiles(storage.layout, sizes)
    marks = {file: storage.folder.marks(file) for file in files.sizes}
    head_files = _head_files(storage)
    head = make_head(head_files | {BLOCK_SIZES: sizes})
    digests, at = np.empty(files.num_digests, np.dtype("<u8")), 0
    for number, (blocks, whole) in enumerate(progress(_digests(storage.folder, files), "reading", len(files.groups))):
        digests[at : at + len(blocks)], digests[files.count + number] = blocks, whole
        at += len(blocks)
    shard = _shard(storage, files, head, digests)
    contents: Contents = {file: packed / file for file in files.sizes}
    contents |= {BLOCKS_FILE: blocks_file(files.num_digests).header + digests.tobytes(), HEAD: head}
    in_version_1 = version_of(make_head(head_files), digest(digests[files.count :].tobytes()))
    return shard, head, contents, marks, in_version_1


def _upload(
    packed: Path, objects: Objects, name: str, shard: Shard, contents: Contents, marks: FileMarks, is_kept: bool
) -> Shard | None:
    """Have all that a shard consists of stand in the store.

    Args: is_kept: no collector removes its `shard.json`, nor what that names.
    Returns: what `shard.json` said before.
    """
    _require_same_buffer(objects, name, shard, there := read_shard(objects, f"{name}/{SHARD}"))
    is_named = is_kept and there is not None and there.version == shard.version
    for _ in range(LOOKS):
        sent, replaced = _send(objects, shard.prefix(name), contents, math.inf if is_named else REUSE_SECONDS)
        if replaced:
            settle()
        if not sent:
            break
    if marks != {file: Folder(packed).marks(file) for file in marks}:
        raise CorruptBufferError(f"{packed}: its files changed while they were sent; publish it again", path=packed)
    if there != shard or not is_kept:
        objects.write(f"{name}/{SHARD}", shard.to_json())
    if there is not None and not is_kept:
        settle()
        if read_shard(objects, f"{name}/{SHARD}") != shard:
            objects.write(f"{name}/{SHARD}", shard.to_json())
    return there


def settle() -> None:
    """Wait until a collector that saw what was written over has done what it was about to do."""
    time.sleep(SETTLE_SECONDS)


def _send(
    objects: Objects, prefix: str, contents: Mapping[str, bytes | Path], reuse_seconds: float
) -> tuple[int, bool]:
    """Have the objects of a version stand in the store.

    Returns: how many were sent; whether some that were older than told were written over.
    """
    there, replaced = objects.listing(prefix), False
    sizes = {file: len(c) if isinstance(c, bytes) else c.stat().st_size for file, c in contents.items()}
    missing = []
    for file, size in sizes.items():
        stored = there.get(prefix + file)
        is_old = stored is not None and stored.is_older(reuse_seconds)
        if stored is None or stored.size != size or is_old:  # else a publisher that was killed sent it whole
            missing.append(file)
            replaced |= is_old
    for file in progress(missing, f"uploading {prefix.partition('/')[0]}", len(missing)):
        objects.write(prefix + file, contents[file])
    return len(missing), replaced


def _head_files(storage: Storage) -> dict[str, bytes]:
    """All files but those of data."""
    folder = storage.folder
    names = [array.name for array in storage.layout.arrays.values() if not is_data(array)]
    names = ["schema.json", *names, *(f"extra/{name}" for name in folder.list("extra"))]
    if bad := [name for name in names if not is_head_file(name)]:
        raise SchemaError(f"{bad[0]}: got a name with more than letters, digits, '.', '_' and '-'; rename or remove it")
    size = MAX_LINE + sum(folder.marks(name)[0] for name in names)
    if size > MAX_HEAD_BYTES:  # else nobody could read the list of shards any more
        raise SchemaError(
            f"{storage.path}: its records, meta fields and files in extra/ have {size:,} bytes, expected at most "
            f"{MAX_HEAD_BYTES:,}; `pack` fewer episodes into a folder, or declare large meta fields as fields"
        )
    return {name: folder.read(name, MAX_HEAD_BYTES) for name in names}


def _digests(folder: Folder, files: DataFiles) -> Iterator[tuple[list[int], int]]:
    """(the digests of its blocks, its own) of each group."""
    for name, size in files.sizes.items():
        block = files.block[name]
        with folder.reading(name) as (fd, _):
            for first in range(0, size, BLOCK):
                data = memoryview(read_at(fd, min(BLOCK, size - first), first))
                whole = block_digest(data)
                each = (
                    [block_digest(data[i : i + block]) for i in range(0, len(data), block)]
                    if block < BLOCK
                    else [whole]
                )
                yield each, whole


def _shard(storage: Storage, files: DataFiles, head: bytes, digests: Array) -> Shard:
    layout, table = storage.layout, storage.refresh()
    size, blocks = len(head) + sum(files.sizes.values()), digest(digests.tobytes())
    at = digest(head), 0, len(head)
    columns = ("episode_lens", *layout.schema.meta_fields)
    ranges = ranges_of({name: episode_column(storage, table, name, table.visible) for name in columns})
    return Shard(layout.id, len(table), table.steps, size, version_of(head, blocks), at, blocks, ranges)


def _require_same_buffer(objects: Objects, name: str, shard: Shard, there: Shard | None) -> None:
    if there is not None and there.id != shard.id:
        raise SchemaMismatchError(
            f"{objects.name_of(name)} has another buffer's episodes (id {there.id}, this one is {shard.id}); rename "
            "the folder, or publish it to another root"
        )


def _was_joined(objects: Objects, name: str, shard: Shard, root: Root, in_version_1: str = "") -> bool:
    """Whether a shard was joined into another, also as `in_version_1`.

    Raises: SchemaMismatchError: another version of it was.
    """
    if name in root.joined and root.joined[name][1] not in (shard.version, in_version_1):
        raise SchemaMismatchError(
            f"{objects.name_of(name)}: it was joined with others into {root.holder(name)}, and the folder has changed "
            "since; record what is new to another folder, or publish to another root"
        )
    return name in root.joined


# The list of shards


def _list(objects: Objects, name: str, shard: Shard, head: bytes, joined: Mapping[str, Shard]) -> None:
    """Have `root.json` list a shard, in the place of others if they are given, whoever else changes it meanwhile."""
    new = {name: (shard, head)}
    if objects.replaces_on_condition:
        _list_on_condition(objects, new, joined)
    elif objects.local is not None:
        Folder(objects.local).create()
        with Folder(objects.local).locked(seconds=LOCK_SECONDS):
            _rewrite(objects, new, joined)
    else:
        assert not joined
        _list_by_entry(objects, name, shard)


def _list_on_condition(objects: Objects, new: Mapping[str, tuple[Shard, bytes]], joined: Mapping[str, Shard]) -> None:
    for _ in range(ROUNDS):
        data, tag = objects.read_tagged(ROOT, MAX_ROOT_BYTES)
        root = Root.from_json(data, objects.name_of(ROOT)) if tag else Root()
        listed = _with_shards(objects, root, new, joined)
        if listed is root or objects.replace_tagged(ROOT, listed.to_json(), tag):
            return
    url, came = objects.name_of(ROOT), "it changes faster than it can be written"
    raise RemoteError(
        f"{url}: replace: {came} (tries: {ROUNDS}); publish again later",
        url=url,
        asked="replace",
        came=came,
        tries=ROUNDS,
        missing=False,
    )


def _list_by_entry(objects: Objects, name: str, shard: Shard) -> None:
    """Where nothing can be replaced on condition: who writes last has seen all entries, or looks again."""
    root = read_root(objects)
    _require_same_buffer(objects, name, shard, root.shards.get(name))
    if not root.has(name, shard.version):
        entries = entries_in(objects.listing(ENTRIES)).values()
        last = max((int(entry["time"]) for entry in entries if entry["name"] == name), default=-1)
        at = max(time.time_ns(), last + 1)  # the clock may have been put back
        objects.write(f"{ENTRIES}/{at:020}.{shard.version}.{name}.json", shard.to_json())
    for _ in range(ROUNDS):
        files = entries_in(objects.listing(ENTRIES))
        root = read_root(objects)
        newest = {entry["name"]: entry for entry in files.values()}
        unlisted = {
            shard_name: entered
            for shard_name, entry in newest.items()
            if not root.has(shard_name, entry["version"])
            and shard_name not in root.joined
            and (entered := _entered(objects, entry)) is not None
        }
        ours = {n: new for n, new in unlisted.items() if n not in root.shards or root.shards[n].id == new[0].id}
        _rewrite(objects, ours, {})
        if entries_in(objects.listing(ENTRIES)).keys() == files.keys():
            break
    for path, entry in files.items():
        if entry["name"] == name and entry is not newest[name]:
            objects.remove(path)
    _require_same_buffer(objects, name, shard, read_root(objects).shards.get(name))


def entries_in(paths: Iterable[str]) -> dict[str, re.Match[str]]:
    """Path -> the `time`, `version` and `name` of a shard, of those objects that are entries, in the order of time."""
    return {path: entry for path in sorted(paths) if (entry := _ENTRY.fullmatch(path))}


def _entered(objects: Objects, entry: re.Match[str]) -> tuple[Shard, bytes] | None:
    """The shard of an entry, and its head; None where a newer one has taken the place of the entry."""
    shard = read_shard(objects, entry[0])
    return None if shard is None else (shard, Published(objects, shard, entry["name"]).read_head())


def _rewrite(objects: Objects, new: Mapping[str, tuple[Shard, bytes]], joined: Mapping[str, Shard]) -> None:
    root = read_root(objects)
    listed = _with_shards(objects, root, new, joined)
    if listed is not root:
        objects.write(ROOT, listed.to_json())


def _with_shards(
    objects: Objects, root: Root, new: Mapping[str, tuple[Shard, bytes]], joined: Mapping[str, Shard]
) -> Root:
    """A root with more shards, in the place of others, whose heads stand in the store; the same one where it has them.

    Heads go into one object with those of objects that hold no more of them, so that there are few objects, and each
    head is written a dozen times at most however many shards come.
    """
    for name, (shard, _) in new.items():
        _require_same_buffer(objects, name, shard, root.shards.get(name))
    if all(root.has(name, s.version) or _was_joined(objects, name, s, root) for name, (s, _) in new.items()):
        return root
    if changed := [name for name, shard in joined.items() if not root.has(name, shard.version)]:
        raise SchemaMismatchError(
            f"{objects.name_of(changed[0])}: it is another by now, so it is not joined; try again"
        )
    for name in new:
        root = root.with_joined(joined, name)
    heads = {name: head for name, (_, head) in new.items()}
    for key, names in sorted(names_by_object(root, heads).items(), key=lambda item: len(item[1])):
        size = sum(map(len, heads.values())) + sum(root.shards[name].head[2] for name in names)
        if len(names) > len(heads):
            break
        if len(names) + len(heads) <= MERGED and size <= MERGED_BYTES:
            heads |= heads_of(objects, root, key, names)
    merged = b"".join(heads.values())
    key, first, shards = digest(merged), 0, dict[str, Shard]()
    objects.write(head_object(key), merged)
    for name, head in heads.items():
        shard = new[name][0] if name in new else root.shards[name]
        shards[name] = replace(shard, head=(key, first, len(head)))
        first += len(head)
    return root.with_shards(shards, {key: len(merged)})


def names_by_object(root: Root, but: Mapping[str, bytes]) -> dict[str, list[str]]:
    """Digest of each object with heads -> the names of the shards that have theirs in it, but for some."""
    names: dict[str, list[str]] = {}
    for name, shard in root.shards.items():
        if name not in but:
            names.setdefault(shard.head[0], []).append(name)
    return names


def heads_of(objects: Objects, root: Root, key: str, names: list[str]) -> dict[str, bytes]:
    """Name -> head of shards that have theirs in one object."""
    try:
        (data,) = objects.read_ranges([(head_object(key), 0, root.heads[key])], lambda i, data: digest(data) == key)
    except RemoteError as error:
        if not error.missing:
            raise
        return {name: Published(objects, root.shards[name], name).read_head() for name in names}
    heads = {}
    for name in names:
        _, first, size = root.shards[name].head
        heads[name] = data[first : first + size]
    return heads
