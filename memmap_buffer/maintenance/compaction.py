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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memmap_buffer.dtypes import check_count
from memmap_buffer.errors import SchemaError
from memmap_buffer.format.layout import MAX_DERIVED_BYTES, MAX_SLOTS, Layout
from memmap_buffer.format.marks import FILE
from memmap_buffer.format.storage import Storage
from memmap_buffer.maintenance.pack import join
from memmap_buffer.maintenance.publish import heads_of, names_by_object, publish_packed
from memmap_buffer.maintenance.pull import pull_shard
from memmap_buffer.maintenance.recoding import blob_room
from memmap_buffer.paths import url_of
from memmap_buffer.progress import progress
from memmap_buffer.remote.layout import ROOT, Root, Shard, digest, joined_name, open_head
from memmap_buffer.remote.objects import Objects
from memmap_buffer.remote.published import Published, nothing_at, read_root
from memmap_buffer.remote.shards import number_shards

TOGETHER = 8  # shards that are pulled at a time
MAX_FILES = 10_000  # of shards that are joined into one: all are mapped, and Linux lets a process map some 65,000
Group = dict[str, Shard]


def compact(
    url: str, *, max_bytes: int = 1 << 30, storage_options: Mapping[str, Any] | None = None, dry_run: bool = False
) -> dict[str, list[str]]:
    """Join small published shards into larger ones, beside readers and publishers.

    Episodes keep their marks, and get the serials 0, 1, 2, … of a shard of another name and id, which comes last.
    Shards are joined whose fields, codecs and files in `extra/` are the same, but none that has a dictionary. The
    temporary folder of this machine (`TMPDIR`) takes twice what a shard may have. What is interrupted, or fails, has
    joined some, and the next call joins the others.

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
            "published meanwhile could be lost; `pull` the root, `publish` its folders to a folder of this machine, as "
            "file:///tmp/root, and `compact` that"
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
    """The shards that are to be joined: neighbours, by their numbers, among those of their kind."""
    parts, numbers = _parts(objects, root, max_bytes), number_shards(root.order, {})
    groups, last = list[_Growing](), dict[str, _Growing]()
    for name in sorted(parts, key=numbers.__getitem__):
        shard, part = root.shards[name], parts[name]
        if part.kind not in last or not last[part.kind].add(name, shard, part, max_bytes):
            last[part.kind] = _Growing({name: shard}, {shard.id}, shard.num_bytes, shard.episodes, part.blob_room)
            groups.append(last[part.kind])
    yield from (group.shards for group in groups if len(group.shards) > 1)


class _Part(NamedTuple):
    """The facts that the head of a shard that may be joined tells.

    Args: kind: a text that is the same for those that may be joined with it. num_files: how many it has.
        blob_room: the most bytes that the blobs of one of its episodes may take in a field of lists.
    """

    kind: str
    num_files: int
    blob_room: int


@dataclass
class _Growing:
    """A group, and the sums of its shards that have limits."""

    shards: Group
    ids: set[str]
    num_bytes: int
    episodes: int
    blob_room: int

    def add(self, name: str, shard: Shard, part: _Part, max_bytes: int) -> bool:
        """Add a shard, if what they are joined into then keeps the limits; returns whether it does."""
        num_bytes, episodes = self.num_bytes + shard.num_bytes, self.episodes + shard.episodes
        room = max(self.blob_room, part.blob_room)
        fits = num_bytes <= max_bytes and episodes <= MAX_SLOTS and episodes * room <= MAX_DERIVED_BYTES
        if not fits or (len(self.shards) + 1) * part.num_files > MAX_FILES or shard.id in self.ids:
            return False
        self.num_bytes, self.episodes, self.blob_room = num_bytes, episodes, room
        self.shards[name] = shard
        self.ids.add(shard.id)
        return True


def _parts(objects: Objects, root: Root, max_bytes: int) -> dict[str, _Part]:
    """The shards that may be joined, by name."""
    parts: dict[str, _Part] = {}
    for key, names in names_by_object(root, {}).items():
        small = [name for name in names if 2 * root.shards[name].num_bytes <= max_bytes]
        for name, head in heads_of(objects, root, key, small).items() if small else ():
            files = open_head(head, objects.name_of(name))
            layout = Layout.from_json(files["schema.json"], objects.name_of(name))
            if not layout.dictionaries:
                lists = (field for field in layout.schema.fields.values() if field.is_list)
                room = max((blob_room(field, layout.max_timesteps) for field in lists), default=0)
                parts[name] = _Part(_kind(files), len(layout.arrays), room)
    return parts


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
