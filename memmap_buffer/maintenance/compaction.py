"""`compact`: small shards at a URL are joined into larger ones, beside readers and publishers.

A group of shards is pulled to this machine and joined there, and what comes of it is published like any other folder;
`root.json` lists it in their place by the same replacement by which it lists them no more. Until then nothing has
changed, wherever it ends. Nothing is removed: `maintenance.garbage` does that, once the shards have been listed as
joined for so long.

Whose episodes count, whoever reads or publishes at the time:

- A reader that has some of the shards open goes on with them, and reads none that has their episodes, too; of shards
  that it had not seen it reads the own versions (`Root.as_held`). A reader that opens the root afterwards reads the
  joined ones. No reader has an episode twice, or not at all.
- `root.json` keeps the name, the version and the place of a shard that was joined. So readers give all others the
  numbers that they had, and a publisher that was killed and sends it again does not list it again.
- The id of a joined shard follows from the versions of its parts, as its name does, and its bytes from them: whoever
  joins the same again sends nothing again. As its id is another, states of epochs that name its parts are refused.
- The list is replaced only if each part is listed in the version that was joined.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from memmap_buffer.dtypes import check_count
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.layout import Layout
from memmap_buffer.format.marks import FILE
from memmap_buffer.format.storage import Storage
from memmap_buffer.maintenance.pack import join
from memmap_buffer.maintenance.publish import heads_of, names_by_object, publish_packed
from memmap_buffer.maintenance.pull import pull_shard
from memmap_buffer.paths import url_of
from memmap_buffer.progress import progress
from memmap_buffer.remote.layout import ROOT, Root, Shard, digest, joined_name, open_head
from memmap_buffer.remote.objects import Objects
from memmap_buffer.remote.published import Published, nothing_at, read_root

TOGETHER = 8  # shards that are pulled at a time
Group = dict[str, Shard]


def compact(
    url: str, *, max_bytes: int = 1 << 30, storage_options: Mapping[str, Any] | None = None, dry_run: bool = False
) -> dict[str, list[str]]:
    """Join small published shards into larger ones, beside readers and publishers.

    Episodes keep their order and marks, and get the serials 0, 1, 2, … of a shard of another name and id. Shards are
    joined whose fields, codecs and files in `extra/` are the same, but none that has a dictionary. The temporary folder
    of this machine (`TMPDIR`) takes twice what a shard may have. What is interrupted, or fails, has joined some, and
    the next call joins the others.

    Args:
        url: of the root.
        max_bytes: of a joined shard; a shard of more than half of that stays as it is.
        storage_options: for the file system of fsspec.
        dry_run: nothing is joined.

    Returns:
        Name of each joined shard -> the names of the shards whose episodes it has, in their order.

    Raises:
        SchemaError: the store cannot replace the list of shards on condition.
        NotABufferError: there is no root.
        SchemaMismatchError: another version of a shard was published meanwhile; what was joined before stays so.
        CorruptBufferError: a list or a shard is damaged.
        RemoteError: the store fails.
        OSError: the disk has no room.
    """
    objects = Objects(url_of(url), storage_options)
    if not (objects.replaces_on_condition or objects.local is not None):
        raise SchemaError(
            f"{objects}: this store cannot replace the list of shards only if nobody else has, so shards that are "
            "published meanwhile could be lost; `pull` the root, and `compact` and `publish` it elsewhere"
        )
    root = read_root(objects)
    if not root.shards:
        raise nothing_at(objects, ROOT)
    groups = list(_groups(objects, root, check_count("max_bytes", max_bytes)))
    ids = [digest("".join(shard.version for shard in group.values()).encode()) for group in groups]
    for id, group in () if dry_run else progress(list(zip(ids, groups, strict=True)), "joining shards"):
        _join(objects, id, group)
    return {joined_name(id): list(group) for id, group in zip(ids, groups, strict=True)}


def _groups(objects: Objects, root: Root, max_bytes: int) -> Iterator[Group]:
    """The shards that are to be joined: neighbours in the list among those of their kind."""
    kinds, open_groups = _kinds(objects, root, max_bytes), dict[str, Group]()
    for name, shard in root.shards.items():
        if kind := kinds.get(name):
            group = open_groups.setdefault(kind, {})
            if sum(other.num_bytes for other in group.values()) + shard.num_bytes > max_bytes:
                yield from (group,) * (len(group) > 1)
                group = open_groups[kind] = {}
            group[name] = shard
    yield from (group for group in open_groups.values() if len(group) > 1)


def _kinds(objects: Objects, root: Root, max_bytes: int) -> dict[str, str]:
    """Name of each shard that may be joined -> a text that is the same for those that may be joined with it."""
    kinds: dict[str, str] = {}
    for key, names in names_by_object(root, {}).items():
        small = [name for name in names if 2 * root.shards[name].num_bytes <= max_bytes]
        for name, head in heads_of(objects, root, key, small).items() if small else ():
            files = open_head(head, objects.name_of(name))
            layout = Layout.from_json(files["schema.json"], objects.name_of(name))
            if not layout.dictionaries:
                kinds[name] = _kind(files)
    return kinds


def _kind(files: Mapping[str, bytes]) -> str:
    schema = json.loads(files["schema.json"])
    for field in schema["fields"].values():
        field.pop("blobs", None)  # a size
    facts = [schema.get(key) for key in ("fields", "meta_fields", "ends", "skips_resets")]
    extras = {name: digest(data) for name, data in files.items() if name.startswith("extra/") and name != FILE}
    return json.dumps([facts, sorted(extras.items())])


def _join(objects: Objects, id: str, group: Group) -> None:
    with tempfile.TemporaryDirectory(prefix="memmap-buffer-") as temporary, ThreadPoolExecutor(TOGETHER) as pool:
        place, name = Path(temporary), joined_name(id)
        parts = [Published(objects, shard, part) for part, shard in group.items()]
        list(pool.map(lambda part: pull_shard(part, place / part.name), parts))
        join([Storage.open(place / part.name, read_only=True, verify="never") for part in parts], place / name, id)
        publish_packed(place / name, objects, name, group)
