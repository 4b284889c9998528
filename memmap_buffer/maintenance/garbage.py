"""`collect_garbage`: objects at a URL that no list names any more are removed, beside readers and publishers.

What is removed: versions that neither `root.json`, `shard.json` nor an entry names, shards that were joined into others
(`maintenance.compaction`) or that would have had others joined into them, had nobody been killed, objects in `heads/`
that `root.json` does not name, entries whose shard is listed or that a newer one supersedes, and `*.new`, which a
killed publisher left in a file system. All must be older than the caller says, and that is a day at least. Any other
object stays, and so does what a publisher left that was killed before the first version of a shard was there: nothing
tells that it is ours.

Why nothing is lost, whoever reads or publishes at the time, and wherever a collector is killed:

- A version stays as long as one of its objects, `shard.json`, or the object with the head that `root.json` lists its
  shard by, is younger than that. The last two are written when another version takes its place, so readers of a version
  have that long to read on.
- An object is looked at directly before it is removed, and stays if it is younger now. A publisher trusts what another
  left there only up to half a day of age, far from the day at which a collector may remove it, even by a clock that is
  hours wrong; what is older it writes anew. So of a version that is published after the lists were read, a collector
  removes at most what it had looked at before that was written: within one request. A publisher that wrote something
  anew waits longer than a request takes, and each looks, once its shard is listed, whether all objects are there, and
  sends what is missing.
- Of a version the head goes first, so that what a kill leaves cannot be opened. Of a shard that was joined `shard.json`
  goes last, as it tells that the rest is ours; its readers have as long as the shard that has its episodes is listed.
- Of a shard that others are to be joined into `shard.json` keeps nothing until the shard is listed. So a publisher that
  finds it there trusts what it names no longer than other leftovers, writes it anew, waits, and looks at it again. It
  looks once more when the shard is listed: of two collectors the second may remove late what the first one did before.
- An object of `heads/` may be gone a moment after a reader read a list that named it. It reads the list once more, and
  else the head of each version; so does a publisher that puts heads together.
- An entry that is listed stays until the head that its shard is listed by is as old: a publisher that read the list
  before, and is about to replace it, lists the entry again. The newest entry of a shard goes last, as the one before it
  would count in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any

from memmap_buffer.errors import SchemaError
from memmap_buffer.format.shards import is_joined_name
from memmap_buffer.maintenance.publish import entries_in
from memmap_buffer.paths import url_of
from memmap_buffer.progress import progress
from memmap_buffer.remote.layout import (
    BLOCKS_FILE,
    ENTRIES,
    HEAD,
    HEADS,
    ROOT,
    SHARD,
    Root,
    head_object,
    is_shard_name,
    joined_name,
)
from memmap_buffer.remote.objects import Objects, Stored
from memmap_buffer.remote.published import nothing_at, read_root, read_shard

YOUNGEST = timedelta(days=1)
TOGETHER = 16  # objects that are removed at a time
_FILES = rf"(data/[^/]+|{re.escape(HEAD)}|{re.escape(BLOCKS_FILE)})"
_VERSION = re.compile(rf"(?P<name>[^/]+)/(?P<version>[0-9a-f]{{32}})/{_FILES}(\.[0-9]+\.new)?")
_SHARD = re.compile(rf"([^/]+)/{re.escape(SHARD)}")
_HEAD = re.compile(rf"{HEADS}/[0-9a-f]{{32}}\.bin")
_NEW = re.compile(rf"({ROOT}|[^/]+/{SHARD}|{HEADS}/[^/]+|{ENTRIES}/[^/]+|[^/]+/[0-9a-f]{{32}}/.+)\.[0-9]+\.new")
Listing = Mapping[str, Stored]


def collect_garbage(
    url: str,
    *,
    older_than: timedelta = timedelta(days=7),
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> dict[str, int]:
    """Remove the objects of a root that no list names any more, beside readers and publishers.

    Versions that were published over, what killed publishers left, and lists of shards that newer ones replaced. What
    is interrupted, or fails, has removed some of them, and the next call removes the others.

    Args:
        url: of the root.
        older_than: how long ago they must have been written, and a version must have been published over: as long as
            the longest epoch of a reader takes. A day at least.
        storage_options: for the file system of fsspec.
        dry_run: nothing is removed.

    Returns:
        Path under the URL -> bytes, of each version and each other object that was removed, or would be.

    Raises:
        SchemaError: `older_than` is less than a day; or nothing can be removed by this protocol; or the store does not
            tell when its objects were written.
        NotABufferError: there is no root.
        CorruptBufferError: a list is damaged, so nothing is removed.
        RemoteError: the store fails.
    """
    if not isinstance(older_than, timedelta) or older_than < YOUNGEST:
        raise SchemaError(f"older_than: got {older_than!r}, expected a timedelta of {YOUNGEST} at least")
    objects, seconds = Objects(url_of(url), storage_options), older_than.total_seconds()
    if not objects.writable:
        raise SchemaError(f"{objects}: nothing can be removed by this protocol; give the URL of the store itself")
    listing = _listing(objects)  # before the lists, so that what is named after it was seen is known to be
    root = read_root(objects)
    if ROOT not in listing or not root.shards:
        raise nothing_at(objects, ROOT)
    entries, leftovers = list(_entries(listing, root, seconds)), list(_heads_and_leftovers(listing, root, seconds))
    rest = {path: listing[path] for path in listing.keys() - {*entries, *leftovers}}
    garbage = [*entries, *leftovers, *_versions(objects, rest, root, seconds)]
    removed: dict[str, int] = {}
    for path in garbage if dry_run else progress(_removed(objects, garbage, seconds), "removing", len(garbage)):
        told_as = _version_of(path) or path
        removed[told_as] = removed.get(told_as, 0) + listing[path].size
    return removed


def _version_of(path: str) -> str:
    """The folder of the version that an object belongs to; "" where it is none, or was not written to its end."""
    match = _VERSION.fullmatch(path)
    return "" if match is None or path.endswith(".new") else f"{match['name']}/{match['version']}"


def _listing(objects: Objects) -> Listing:
    """All objects. Raises SchemaError where it is not told when they were written."""
    listing = objects.listing()
    if objects.local is not None:  # what a link leads to is not ours
        place = objects.local.resolve()
        listing = {path: stored for path, stored in listing.items() if (place / path).resolve() == place / path}
    if timeless := [path for path, stored in listing.items() if stored.written is None]:
        raise SchemaError(
            f"{objects.name_of(timeless[0])}: the store does not tell when this was written, so nothing can be "
            "removed from it safely"
        )
    return listing


def _entries(listing: Listing, root: Root, seconds: float) -> Iterator[str]:
    """Entries that are superseded or listed, of each shard the oldest first."""
    entries = entries_in(listing)
    newest = {entry["name"]: path for path, entry in entries.items()}
    kept: set[str] = set()  # shards of which a younger entry stays, and so all that are newer
    for path, entry in entries.items():
        name, is_listed = entry["name"], root.has(entry["name"], entry["version"])
        if path == newest[name] and not (is_listed and _is_listed_for(listing, root, name, seconds)):
            continue
        if listing[path].is_older(seconds) and name not in kept:
            yield path
        else:
            kept.add(name)


def _is_listed_for(listing: Listing, root: Root, name: str, seconds: float) -> bool:
    """Whether a shard, or what it was joined into, has been listed for so long: its head was written just before."""
    head = listing.get(head_object(root.shards[root.holder(name)].head[0]))
    return head is not None and head.is_older(seconds)


def _heads_and_leftovers(listing: Listing, root: Root, seconds: float) -> Iterator[str]:
    heads = {head_object(key) for key in root.heads}
    for path, stored in listing.items():
        if stored.is_older(seconds) and (_NEW.fullmatch(path) or (_HEAD.fullmatch(path) and path not in heads)):
            yield path


def _versions(objects: Objects, listing: Listing, root: Root, seconds: float) -> list[str]:
    """The objects of versions that nothing in a listing names, all their heads first.

    Only of shards that were published, as `shard.json` says, and of folders that hold nothing else: whatever another
    program keeps under a name like theirs is none of ours.
    """
    versions: dict[tuple[str, str], list[str]] = {}
    for path in listing:
        if (match := _VERSION.fullmatch(path)) and is_shard_name(match["name"]):
            versions.setdefault((match["name"], match["version"]), []).append(path)
    entered = [(entry["name"], entry["version"]) for entry in entries_in(listing).values()]
    for named in (*entered, *((name, shard.version) for name, shard in root.shards.items())):
        versions.pop(named, None)
    unnamed = {
        (name, version): paths
        for (name, version), paths in versions.items()
        if all(listing[path].is_older(seconds) for path in paths)
        and (root.holder(name) not in root.shards or _is_listed_for(listing, root, name, seconds))
    }
    described = {match[1]: path for path in listing if (match := _SHARD.fullmatch(path))}
    names = {name for name, _ in unnamed} | {name for name in described if name in root.joined or is_joined_name(name)}
    shards = {
        name: read_shard(objects, path)
        for name, path in described.items()
        if name in names and listing[path].is_older(seconds)
    }
    over = {name for name, shard in shards.items() if shard is not None and _is_over(root, name, shard.id)}
    over |= {name for name, _ in unnamed if name not in described and _is_over(root, name)}
    foreign = {
        tuple(path.split("/", 2)[:2]) for path in listing if path.count("/") > 1 and not _VERSION.fullmatch(path)
    }
    garbage = [
        path
        for (name, version), paths in unnamed.items()
        if (name, version) not in foreign
        and (name in over or ((shard := shards.get(name)) is not None and shard.version != version))
        for path in paths
    ]
    kept = {path.partition("/")[0] for path in listing.keys() - {*garbage} - {*described.values()}}
    garbage += [described[name] for name in sorted((over & described.keys()) - kept)]
    return sorted(garbage, key=_order)


def _is_over(root: Root, name: str, id: str | None = None) -> bool:
    """Whether a shard, of this id if it is described, was joined, or is what others would have been joined into."""
    if name in root.shards:
        return False
    return is_joined_name(name) if id is None else name in root.joined or name == joined_name(id)


def _removed(objects: Objects, garbage: list[str], seconds: float) -> Iterator[str]:
    """The garbage that was removed: entries one by one, then the others, several at a time, in their order."""
    remove = partial(_remove, objects, seconds)
    with ThreadPoolExecutor(TOGETHER) as pool:
        for kind, part in groupby(garbage, _order):
            paths = list(part)
            done = (pool.map if kind else map)(remove, paths)
            yield from (path for path, removed in zip(paths, done, strict=True) if removed)


def _order(path: str) -> int:
    """The place of its kind: all of one kind are removed before any of the next."""
    entry, head, shard = f"{ENTRIES}/", f"/{HEAD}", f"/{SHARD}"
    return 0 if path.startswith(entry) else 1 if path.endswith(head) else 3 if path.endswith(shard) else 2


def _remove(objects: Objects, seconds: float, path: str) -> bool:
    """Whether an object was still to be removed; the folders that it was the last file of go with it."""
    if not objects.remove_older(path, seconds):
        return False
    if objects.local is not None and (version := _version_of(path)):
        for folder in (objects.local / version / "data", objects.local / version):
            with suppress(OSError):
                folder.rmdir()
    return True
