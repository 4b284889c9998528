"""`Folders`: the folders that are read as one, their episode tables, and the records of the episodes of a batch.

Each buffer and each `ConcatBuffer` has one `Folders`. It reads the tables anew when a change counter has moved
(`refresh`), and looks up the records of a batch of anchors (`find`). The `Found` that this gives keeps the batch with
the same folders, whatever other threads do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.errors import MemmapBufferError, SchemaError, SchemaMismatchError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.records import GENERATION, WORDS
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import renew_after_fork
from memmap_buffer.schema import ENDS, Field
from memmap_buffer.views.anchors import Anchors, BoolArray
from memmap_buffer.views.by_address import Reach
from memmap_buffer.views.memory_pool import Pool

EVERY = slice(None)
INDEX_BYTES = 32  # about the memory that the row number of one row takes, with all arrays on the way to it
APART = (
    "'stored' is of the second, 'given' of the first; draw a batch from each and join the two, or make their columns "
    "alike by rename_field, drop_field or add_field"
)
COMMON = "; what they have in common is read by ConcatBuffer(…, fields={!r})"
_TABLE = attrgetter("table")  # mapped over many folders, it takes half the time of a comprehension


class FieldGroup(NamedTuple):
    """Fields that are read together, as the same rows of their files are read.

    Attributes:
        keys, names: the key of each field in a batch, and its name.
        final: whether they are declared with `final`.
        plain: whether a batch holds the values as stored; False with bfloat16 among them.
        largest: bytes of a row of the largest field, at least `INDEX_BYTES`; for bounds of memory.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    final: bool
    plain: bool
    largest: int


class FieldGroups(dict[tuple[str, ...], tuple[FieldGroup, ...]]):
    """(prefix, *names) -> these fields in their order, neighbours that can be read together as one group.

    The key of each field in a batch is `prefix` + name. Entries are made when first asked for. It is a dict, so that
    a lookup of an existing entry calls no Python function.
    """

    def __init__(self, fields: Mapping[str, Field]) -> None:
        super().__init__()
        self._fields = fields

    def __missing__(self, key: tuple[str, ...]) -> tuple[FieldGroup, ...]:
        fields, prefix, all_names = self._fields, key[0], key[1:]
        neighbours = [(final, [*names]) for final, names in groupby(all_names, lambda name: fields[name].final)]
        self[key] = tuple(
            FieldGroup(
                tuple(prefix + name for name in names),
                tuple(names),
                final,
                plain=all(fields[name].dtype != "bfloat16" for name in names),
                largest=max(INDEX_BYTES, *(fields[name].itemsize for name in names)),
            )
            for final, names in neighbours
        )
        return self[key]


class Group(NamedTuple):
    """The anchors of a batch that point into one folder.

    Attributes:
        storage: the folder.
        chosen: the positions of its anchors in the batch, an index array or `EVERY`.
        changes: the change counter at which its episodes were looked up.
    """

    storage: Storage
    chosen: Any
    changes: int


class Found:
    """Anchors with the records of their episodes, and the folders that they point into.

    Args:
        anchors: the anchors, `words` included.
        reach: the folders; None if `only` is given.
        places: (B,) int64 the position in `reach` of each anchor's folder; None if `only` is given.
        only: the one folder, if all anchors are known to be of one.
        changes: the change counter of `only` at which the records were looked up.
        since: a change counter of `only` at which it showed the episodes of all anchors; None if none is known.
    """

    def __init__(
        self,
        anchors: Anchors,
        reach: Reach | None = None,
        places: IntArray | None = None,
        only: Storage | None = None,
        changes: int = 0,
        since: int | None = None,
    ) -> None:
        self.anchors, self.reach, self.folder_places = anchors, reach, places
        self.only, self._changes, self.since = only, changes, since

    @property
    def groups(self) -> Sequence[Group]:
        """The groups, one for each folder that is read from, at least one; a single one has the position `EVERY`."""
        return self._grouped if self.only is None else (Group(self.only, EVERY, self._changes),)

    @cached_property
    def _grouped(self) -> Sequence[Group]:
        reach, places = self.reach, self.folder_places
        assert reach is not None and places is not None
        return grouped(reach, places)

    def is_beside(self, other: Found) -> bool:
        """Whether both point into the same folders. Between two lookups another shard may replace one of the same name.

        True where one folder is read.
        """
        if self.reach is None or other.reach is None:
            return True
        return all(map(is_, self.reach.storages, other.reach.storages))

    def unchanged(self) -> BoolArray:
        """(B,) whether each episode is still as it was looked up. Called after the copy, it proves the copied rows."""
        _, slot, serial, *_, words = self.anchors
        generation = words[:, GENERATION]  # type: ignore[index]
        if self.reach is not None and self.folder_places is not None and self.reach.unchanged(self.folder_places):
            return np.asarray(generation != 0)
        same = np.empty(len(slot), np.bool_)
        for storage, chosen, changes in self.groups:
            same[chosen] = storage.unmoved(slot[chosen], serial[chosen], generation[chosen], changes)
        return same


def grouped(reach: Reach, places: IntArray) -> Sequence[Group]:
    """The anchors of each folder, see `Found.groups`, for anchors whose folders stand at `places` (B,)."""
    order = np.argsort(places.astype(np.uint16 if len(reach.storages) <= 1 << 16 else np.int64), kind="stable")
    by_folder = places[order]
    starts = np.flatnonzero(by_folder[1:] != by_folder[:-1]) + 1
    chosen = np.split(order, starts) if len(starts) else [EVERY]
    numbers = by_folder[[0, *starts]].tolist()
    return [Group(reach.storages[i], each, reach.changes.item(i)) for i, each in zip(numbers, chosen, strict=True)]


class Tables(NamedTuple):
    """The episode tables of some folders.

    Attributes: token: `Storage.token` from before they were read: as long as it stands, no table has changed.
    """

    token: object
    storages: tuple[Storage, ...]
    tables: tuple[EpisodeTable, ...]


class Folders:
    """Folders that are read as one. All must have the same fields, or at least those that are read.

    Fields of text may have different widths, and are read with the widest.

    The shards of a root come and go, and another shard may appear under an old number. So a batch looks its records up
    once (`find`), and its rows are copied from the folders that were found then.

    Args:
        storages: the folders; empty with `shards`.
        shards: the root (`Shards`) whose shards are read, with those that appear later; None: `storages` alone.
        fields: the fields and meta fields that are read; fields that end episodes are added. None: all.

    Attributes:
        schema: the schema of the fields that are read.
        storages: the folders.
        numbers: (N,) int64 the numbers by which anchors name the folders: those in the names of shards, 0, 1, 2, … for
            other folders. At least as many as storages, in the same order. A folder keeps its position; another folder
            may take that over, never a second position.
        single: whether there is one folder, and never another.
        groups: the fields as they are read together.
        pool: the memory of batches.
        coded: the fields that are compressed in some of the folders.
        mirrored: whether rows of some folders must be fetched before they are copied.
        uneven: the fields of text that are narrower in some folders than in `schema`.

    Raises:
        SchemaMismatchError: the fields differ; the text lists how.
        SchemaError: a buffer and a copy of it are among the folders, or a field is unknown.
        NotABufferError: the root has no shard yet.
    """

    def __init__(self, storages: Sequence[Storage], shards: Any = None, fields: Sequence[str] | None = None) -> None:
        fields = (fields,) if isinstance(fields, str) else fields
        self.shards, self._fields = shards, fields
        by_number = dict(enumerate(storages)) if shards is None else shards.look()
        first = next(iter(by_number.values()))
        self._where, self._layout = first.where, first.layout
        schemas = {id(storage.layout.schema): storage.layout.schema for storage in by_number.values()}
        self.schema = first.layout.schema if fields is None else first.layout.schema.only(fields)
        self.schema = self.schema.as_wide_as(schemas.values())
        self._texts = [name for name, field in self.schema.all.items() if field.storage.kind == "U"]
        self.single = shards is None and len(storages) == 1
        self.pool = Pool()
        self.coded: frozenset[str] = frozenset()
        self.uneven: frozenset[str] = frozenset()
        self.mirrored = False
        self.numbers = np.empty(0, np.int64)
        self._lock = threading.Lock()
        renew_after_fork(self)
        self._looked = True
        self._by_number: Mapping[int, Storage] = {}
        self._places: tuple[tuple[Storage, ...], IntArray] = (), self.numbers  # see `_places`
        self._tables = Tables(None, (), ())
        self._reached: Reach | None = None
        self._sought: dict[tuple[int, int], Any] = {}  # (number, serial) -> path, see `catch_up`
        self.groups = FieldGroups(self.schema.fields)
        self._take_in(by_number)

    def renew(self) -> None:
        """In a forked child: make a new lock. Another thread of the parent may have held it, during a slow request."""
        self._lock = threading.Lock()

    def __str__(self) -> str:
        """The paths of the folders, at most two of them."""
        paths = [repr(str(storage.path)) for storage in self.storages if not storage.withdrawn]
        return ", ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")

    def __reduce__(self) -> tuple[Any, ...]:
        return Folders, (self.storages if self.shards is None else (), self.shards, self._fields)

    def _take_in(self, storages: Mapping[int, Storage]) -> None:
        """Read these folders (number -> storage) from now on, instead of those before."""
        before, places = set(self.storages), self._places[1]
        for storage in storages.values():
            if storage in before or storage.withdrawn:  # a withdrawn one has the schema of a folder taken in before
                continue
            self._take_in_fields(storage)
        self.coded = self.coded.union(*(storage.layout.coded for storage in storages.values()))
        self.mirrored = self.mirrored or any(storage.mirror is not None for storage in storages.values())
        buffers: dict[str, Storage] = {}
        for storage in storages.values():
            other = storage if storage.withdrawn else buffers.setdefault(storage.layout.id, storage)
            if other is not storage:
                raise SchemaError(
                    f"{storage.where} and {other.where} are one buffer twice, or a copy of it: both have the "
                    f"id {storage.layout.id}; leave one out"
                )
        numbers = np.fromiter(storages, np.int64, len(storages))
        if len(numbers) > len(self.numbers):
            self.numbers, places = numbers, _places(numbers)
        self._by_number, self._places = storages, (tuple(storages.values()), places)
        self._reached = None  # it would keep the files of a removed shard mapped

    def _take_in_fields(self, storage: Storage) -> None:
        """Take in the widths of a folder's texts.

        Raises SchemaMismatchError: the folder lacks fields that are read, or has a wider text.
        """
        schema, ours = storage.layout.schema, self.schema.all
        lines: dict[str, str] = {}
        if schema is not self._layout.schema:  # schemas of one text are one object
            lines = self._layout.field_differences(storage.layout, widths=False)
        if self._fields is not None:
            lines = {name: line for name, line in lines.items() if name in ours or name in ENDS}
        for name in self._texts if not lines else ():
            dtype, widest = schema.all[name].storage, ours[name].storage
            if dtype != widest:
                self.uneven |= {name}
            if dtype.itemsize > widest.itemsize:
                lines[name] = f"field {name!r} is {dtype}, wider than {widest} of those that were read first; open anew"
        if lines:
            ends = {*ENDS, *self.schema.ends}  # they are read with any fields, so a choice of fields is no remedy
            common = [name for name in ours if name not in {*lines, *ends}]
            remedy = COMMON.format(common) if common and lines.keys().isdisjoint(ends) else ""
            text = [f"{storage.where} and {self._where} have different fields:", *lines.values(), APART + remedy]
            raise SchemaMismatchError("\n  ".join(text), differences=[*lines.values()])

    @property
    def storages(self) -> tuple[Storage, ...]:
        return self._places[0]

    @property
    def max_timesteps(self) -> int:
        return max(storage.layout.max_timesteps for storage in self.storages)

    @property
    def tables(self) -> tuple[EpisodeTable, ...]:
        """The episode tables as last read, one for each of `storages`; the same tuple as long as all are the same."""
        return self._tables_of(self.storages)

    def _tables_of(self, storages: tuple[Storage, ...]) -> tuple[EpisodeTable, ...]:
        """The tables of these folders. `self.storages` may be another tuple by now: another thread takes in shards."""
        token, current = Storage.token, self._tables
        if current.token is not token or current.storages is not storages:
            tables = tuple(map(_TABLE, storages))
            current = self._tables = Tables(token, storages, current.tables if tables == current.tables else tables)
        return current.tables

    def refresh(self) -> tuple[EpisodeTable, ...]:
        """The episode tables as of now, with new shards; the same tuple if nothing changed."""
        if self.single:
            return (self._places[0][0].refresh(),)
        with self._lock:
            self._look()
            self._looked = True
            storages = self.storages
            for place in self._reach(storages, self._tables_of(storages)).changed():
                storages[place].refresh()
            return self._tables_of(storages)

    def _look(self) -> None:
        """Take in the shards that the root has now; call it with the lock."""
        if self.shards is not None:
            storages = self.shards.look()
            if storages is not self._by_number:
                self._take_in(storages)

    def _look_on(self) -> None:
        """Take in the shards that the root has now, in a process that never refreshes, such as a worker of a loader.

        An error is left to the next refresh; until then the shards of before are read. A removed shard stays readable
        as long as it is mapped.
        """
        wanted = self.shards is not None and not self._looked  # `refresh` has just looked, if it drew this batch
        if wanted and self._lock.acquire(blocking=False):  # no waiting: another thread may hold it during a request
            try:
                with suppress(MemmapBufferError, OSError):
                    self._look()
            finally:
                self._lock.release()
        self._looked = False

    def look_anew(self) -> None:
        """Have the next refresh look at the shards of the root, whenever that was last done."""
        if self.shards is not None:
            self.shards.forget()

    def catch_up(self, anchors: Anchors) -> bool:
        """Look anew for items (B,) that are not there, where another process may have drawn them by a newer list.

        An item may be of a newer version of its shard if its episode comes after all that the shard has, or is there
        but ends before it. Where a look gives no other version, it is not looked for again until there is one.

        Returns: whether there was a look.
        """
        if self.shards is None or anchors.folder is None:
            return False
        versions: dict[tuple[int, int], Storage] = {}
        for number, storage, chosen, place, shown in self._sorted_in(anchors, np.arange(anchors.size)):
            serial = anchors.serial[chosen]
            may_grow = (place == len(shown)) | (np.append(shown, -1)[place] == serial)
            versions |= {(number, each): storage for each in serial[may_grow].tolist()}
        versions = {key: storage for key, storage in versions.items() if self._sought.get(key) != storage.path}
        if versions:
            self.look_anew()
            self.refresh()
            in_vain = {key: each.path for key, each in versions.items() if self.numbered(key[0]) is each}
            self._sought = self._sought | in_vain
        return bool(versions)

    # Numbers

    def reach(self, numbers: IntArray) -> None:
        """Take in the shards of these numbers (N,); a storage without episodes stands for a shard that is gone."""
        if self.shards is not None and not self._has(numbers):
            with self._lock:
                self._take_in(self.shards.reach(np.unique(numbers).tolist()))

    def _has(self, numbers: IntArray) -> bool:
        """Whether each of these numbers has a folder, or a storage that stands for one that is gone."""
        places = self._places[1]
        return int(numbers.max(initial=-1)) < len(places) and int(places.take(numbers).min(initial=0)) >= 0

    def places(self, numbers: IntArray) -> tuple[tuple[Storage, ...], IntArray] | None:
        """(the folders, (B,) the position among them of each number); None if a number has no folder."""
        if int(numbers.min(initial=0)) < 0 or not self._has(numbers):
            return None
        storages, places = self._places  # read again: another thread may have added folders; it removes none
        return storages, places.take(numbers)

    def numbered(self, number: int) -> Storage | None:
        """The folder of a number; None if there never was one."""
        return self._by_number.get(number)

    def by_number(self, tables: Sequence[EpisodeTable]) -> list[tuple[int, Storage, EpisodeTable]]:
        """(number, folder, table) by ascending numbers, for the folders that `tables` are of: the first ones."""
        return sorted(zip(self.numbers.tolist(), self.storages, tables, strict=False), key=itemgetter(0))

    # Records

    def find(self, anchors: Anchors, *, trusted: bool = True) -> Found:
        """Look up the records of the episodes of a batch; where one is missing, once more in fresh tables.

        Args:
            anchors: the anchors of the batch.
            trusted: first check episodes whose content is still to be checked; one that fails counts as gone.

        Returns:
            the anchors with the words of their records, zeros where an episode is gone.
        """
        if anchors.folder is not None and anchors.size:
            self._look_on()
            self.reach(anchors.folder)
        records, same = self._looked_up(anchors, trusted)
        if not same.all():
            self.refresh()
            records, same = self._looked_up(self._relocated(anchors, ~same), trusted)
            records.anchors.words[~same] = 0  # type: ignore[index]
        return records

    def _relocated(self, anchors: Anchors, lost: BoolArray) -> Anchors:
        """The anchors, the `lost` ones (B,) in the slots that their episodes have by now: a shard may be made anew."""
        if self.shards is None or anchors.folder is None:
            return anchors
        slots = anchors.slot.copy()
        for _, storage, chosen, place, shown in self._sorted_in(anchors, np.flatnonzero(lost)):
            there = place < len(shown)
            slots[chosen[there]] = storage.table.visible[place[there]]  # another episode's, where that is gone
        return Anchors(anchors.folder, slots, *anchors[2:])

    def _sorted_in(
        self, anchors: Anchors, positions: IntArray
    ) -> Iterator[tuple[int, Storage, IntArray, IntArray, IntArray]]:
        """For each shard, unless it was removed, that some of the anchors at `positions` (N,) are of.

        Returns: its number, the shard, the positions, the places of their serials among those that it shows, and these.
        """
        folder = anchors.folder[positions]  # type: ignore[index]
        for number in np.unique(folder).tolist():
            storage = self.numbered(number)
            if storage is not None and not storage.withdrawn:
                chosen, table = positions[folder == number], storage.table
                shown = table.of(table.serial, table.visible)
                yield number, storage, chosen, shown.searchsorted(anchors.serial[chosen]), shown

    def at(self, anchors: Anchors, changes: int) -> Found:
        """The anchors of a single folder with their records, unchecked: it showed all of them at `changes`.

        `BatchBuilder.fresh` compares that change counter after the copy.
        """
        storage = self._places[0][0]
        words = storage.maps.words.take(anchors.slot, 0)
        return Found(Anchors(*anchors[:-1], words), only=storage, changes=changes, since=changes)

    def _looked_up(self, anchors: Anchors, trusted: bool) -> tuple[Found, BoolArray]:
        """(the anchors with their records, (B,) whether each slot holds its episode), by the tables as last read."""
        storages, places = self._places
        if anchors.folder is None or not anchors.size:
            words, same, changes = storages[0].look_up(anchors.slot, anchors.serial, trusted)
            return Found(Anchors(*anchors[:-1], words), only=storages[0], changes=changes), same
        folder_places = places.take(anchors.folder)
        reach = self._reach(storages, self._tables_of(storages))
        if reach.usable:
            anchors, same = reach.look_up(folder_places, anchors)
            return Found(anchors, reach, folder_places), same
        slot, words = reach.slots_there(folder_places, anchors.slot), np.empty((anchors.size, WORDS), np.uint64)
        same = np.empty(anchors.size, np.bool_)
        for storage, chosen, *_ in grouped(reach, folder_places):
            words[chosen], same[chosen], _ = storage.look_up(slot[chosen], anchors.serial[chosen], trusted)
        # `reach` has the tables of before the lookups: by newer ones, which another thread may have read, `unchanged`
        # would pass a record that has changed since.
        return Found(Anchors(anchors.folder, slot, *anchors[2:-1], words), reach, folder_places), same

    def _reach(self, storages: tuple[Storage, ...], tables: tuple[EpisodeTable, ...]) -> Reach:
        """The `Reach` of these folders and tables; the last one, if it is of the same."""
        reach = self._reached
        if reach is None or reach.storages is not storages or reach.tables is not tables:
            reach = self._reached = Reach(storages, tables, reach)
        return reach


def id_of(storage: Storage) -> str:
    """The id of a folder's buffer; "" for a folder that is gone."""
    return "" if storage.withdrawn else storage.layout.id


def _places(numbers: IntArray) -> IntArray:
    """(max + 1,) the position in `numbers` of each number from 0 to the highest, -1 for numbers that are not there."""
    places = np.full(numbers.max(initial=-1) + 1, -1)
    places[numbers] = np.arange(len(numbers))
    return places
