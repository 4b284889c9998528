"""`Folders`: the folders that are read as one, their episode tables, and the records of the episodes of a batch."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
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
INDEX_BYTES = 32  # memory that it takes to find one row
APART = (
    "'stored' is of the second, 'given' of the first; draw a batch from each and join the two, or make their columns "
    "alike by rename_field, drop_field or add_field"
)
COMMON = "; what they have in common is read by ConcatBuffer(…, fields={!r})"
_TABLE = attrgetter("table")  # of many folders, in half the time


class FieldGroup(NamedTuple):
    """Fields that are read together: their rows lie at the same places of their files.

    Attributes:
        keys, names: of each its key in a batch, and its name.
        final: whether they are declared with `final`.
        plain: whether what is stored is what a batch holds.
        largest: bytes that a row of the largest takes in a batch, and to be found.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    final: bool
    plain: bool
    largest: int


class FieldGroups(dict[tuple[str, ...], tuple[FieldGroup, ...]]):
    """By (prefix, *names): these fields in their order, as groups of neighbours; each is `prefix` + name in a batch.

    A dict, so that what is there is found without a call.
    """

    def __init__(self, fields: Mapping[str, Field]) -> None:
        super().__init__()
        self._fields = fields

    def __missing__(self, key: tuple[str, ...]) -> tuple[FieldGroup, ...]:
        fields, prefix, names = self._fields, key[0], key[1:]
        neighbours = [(final, [*each]) for final, each in groupby(names, lambda name: fields[name].final)]
        self[key] = tuple(
            FieldGroup(
                tuple(prefix + name for name in each),
                tuple(each),
                final,
                plain=all(fields[name].dtype != "bfloat16" for name in each),
                largest=max(INDEX_BYTES, *(fields[name].itemsize for name in each)),
            )
            for final, each in neighbours
        )
        return self[key]


class Group(NamedTuple):
    """The anchors of one folder.

    Attributes:
        storage: the folder.
        chosen: its anchors in the batch, `EVERY` or an index array.
        part: its anchors as a slice of `Found.order`.
        changes: the change counter at which its episodes were looked up.
    """

    storage: Storage
    chosen: Any
    part: slice
    changes: int


class Found:
    """Anchors with the records of their episodes, and the folders that they point into.

    Args:
        anchors: with their records.
        reach: the folders.
        of: (B,) the place in `reach` of each anchor's folder.
        group: instead of these two, where all of them are of one folder.
        since: the change counter of the one folder at which all of them were shown, if it is known.

    Attributes: only: the folder, where it is known to be one without a look at all anchors.
    """

    def __init__(
        self,
        anchors: Anchors,
        reach: Reach | None = None,
        of: IntArray | None = None,
        group: Group | None = None,
        since: int | None = None,
    ) -> None:
        self.anchors, self.reach, self.of, self._group, self.since = anchors, reach, of, group, since
        self.only = None if group is None else group.storage

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups, one a folder, at least one."""
        return self._grouped[0] if self._group is None else (self._group,)

    @property
    def order(self) -> IntArray | None:
        """(B,) the anchors folder by folder; None where it is one folder."""
        return self._grouped[1] if self._group is None else None

    @cached_property
    def place(self) -> IntArray:
        """(B,) where each anchor stands in `order`."""
        assert self.order is not None
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(place))
        return place

    @cached_property
    def _grouped(self) -> tuple[tuple[Group, ...], IntArray | None]:
        reach, of = self.reach, self.of
        assert reach is not None and of is not None
        return grouped(reach, of)

    def is_beside(self, other: Found) -> bool:
        """Whether both are of the same folders: another shard may have taken the place of one between the two."""
        if self.reach is None or other.reach is None:
            return True
        return all(map(is_, self.reach.storages, other.reach.storages))

    def unchanged(self) -> BoolArray:
        """(B,) whether each episode is still as it was looked up; true only after its rows were copied."""
        _, slot, serial, *_, words = self.anchors
        generation = words[:, GENERATION]  # type: ignore[index]
        if self.reach is not None and self.of is not None and self.reach.unchanged(self.of):
            return np.asarray(generation != 0)
        order = self.order
        if order is None:
            return self.groups[0].storage.unmoved(slot, serial, generation, self.groups[0].changes)
        slot, serial, generation = slot[order], serial[order], generation[order]
        same = [storage.unmoved(slot[p], serial[p], generation[p], changes) for storage, _, p, changes in self.groups]
        return np.concatenate(same).take(self.place)


def grouped(reach: Reach, of: IntArray) -> tuple[tuple[Group, ...], IntArray | None]:
    """The anchors of each folder, and their order, folder by folder; None where they are of one."""
    order = np.argsort(of.astype(np.uint16 if len(reach.storages) <= 1 << 16 else np.int64), kind="stable")
    by_folder = of[order]
    groups, start = [], 0
    for stop in [*(np.flatnonzero(by_folder[1:] != by_folder[:-1]) + 1).tolist(), len(order)]:
        place = by_folder.item(start)
        changes = reach.changes.item(place)
        groups.append(Group(reach.storages[place], order[start:stop], slice(start, stop), changes))
        start = stop
    if len(groups) == 1:
        return (groups[0]._replace(chosen=EVERY, part=EVERY),), None
    return tuple(groups), order


class Tables(NamedTuple):
    """The episode tables of some folders.

    Attributes: token: `Storage.token` from before they were read.
    """

    token: object
    storages: tuple[Storage, ...]
    tables: tuple[EpisodeTable, ...]


class Folders:
    """The folders that are read as one; they must hold the same fields, or those that are read of them.

    Texts may be of different widths, and are read as the widest.

    The shards of a root come and go, and another may appear under an old number. So a batch looks its records up once
    (`find`), and its rows are copied from the folders that were found then.

    Args:
        storages: the folders.
        shards: the root that they are in, if more may appear there.
        fields: the fields and meta fields that are read, those that end episodes beside them; None: all.

    Attributes:
        schema: of the fields that are read.
        storages: the folders.
        numbers: by which anchors name the folders: shards by their names, other folders 0, 1, 2, … There are at least
            as many as storages. Another folder may take the place of one; no folder takes another place.
        single: whether there is one folder, and never another.
        groups: its fields as they are read together.
        pool: the memory of batches.
        coded: the fields that are compressed in some of them.
        mirrored: whether rows of some have to be fetched before they are copied.
        uneven: the fields of text that are narrower in some of them than in `schema`.

    Raises:
        SchemaMismatchError: the fields differ; the text lists how.
        SchemaError: a buffer and a copy of it, or a field is unknown.
    """

    def __init__(self, storages: Sequence[Storage], shards: Any = None, fields: Sequence[str] | None = None) -> None:
        fields = (fields,) if isinstance(fields, str) else fields
        self.shards, self._fields = shards, fields
        by_number = dict(enumerate(storages)) if shards is None else shards.look()
        first = next(iter(by_number.values()))
        self._where, self._layout = first.where, first.layout
        schemas = {id(each.layout.schema): each.layout.schema for each in by_number.values()}
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
        self.groups = FieldGroups(self.schema.fields)
        self._take_in(by_number)

    def renew(self) -> None:
        """In a forked child: another thread may have been looking for shards, for as long as a request takes."""
        self._lock = threading.Lock()

    @classmethod
    def of_root(cls, shards: Any, fields: Sequence[str] | None = None) -> Folders:
        """The shards of a root, those included that appear later. Raises NotABufferError where there is none yet."""
        return cls((), shards, fields)

    def __str__(self) -> str:
        """Where they are."""
        paths = [repr(str(storage.path)) for storage in self.storages if not storage.withdrawn]
        return ", ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")

    def __reduce__(self) -> tuple[Any, ...]:
        if self.shards is None:
            return Folders, (self.storages, None, self._fields)
        return Folders.of_root, (self.shards, self._fields)

    def _take_in(self, storages: Mapping[int, Storage]) -> None:
        """Read these from now on, by their numbers."""
        before, places = set(self.storages), self._places[1]
        for storage in storages.values():
            if storage in before or storage.withdrawn:  # a withdrawn one is shaped as one that was taken in
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
        self._reached = None  # which would hold the maps of a shard that was removed

    def _take_in_fields(self, storage: Storage) -> None:
        """Raise SchemaMismatchError unless a folder has the fields that are read, its texts no wider."""
        schema, ours = storage.layout.schema, self.schema.all
        lines: dict[str, str] = {}
        if schema is not self._layout.schema:  # of another text
            lines = self._layout.field_differences(storage.layout, widths=False)
        if self._fields is not None:
            lines = {name: line for name, line in lines.items() if name in ours or name in ENDS}
        for name in self._texts if not lines else ():
            there, here = schema.all[name].storage, ours[name].storage
            if there != here:
                self.uneven |= {name}
            if there.itemsize > here.itemsize:
                lines[name] = f"field {name!r} is {there}, wider than {here} of those that were read first; open anew"
        if lines:
            ends = {*ENDS, *self.schema.ends}  # they come with others
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
        """The episode tables as last read, of folders that were found since, too; the same tuple if none is another."""
        return self._tables_of(self.storages)

    def _tables_of(self, storages: tuple[Storage, ...]) -> tuple[EpisodeTable, ...]:
        """The tables of folders as they were asked for: another thread may take in more of them meanwhile."""
        token, kept = Storage.token, self._tables
        if kept.token is not token or kept.storages is not storages:
            tables = tuple(map(_TABLE, storages))
            kept = self._tables = Tables(token, storages, kept.tables if tables == kept.tables else tables)
        return kept.tables

    @property
    def ids(self) -> tuple[str, ...]:
        """The id of each folder's buffer; "" of a folder that is not there."""
        return tuple(map(id_of, self.storages))

    def refresh(self) -> tuple[EpisodeTable, ...]:
        """The episode tables as they are now, and those of shards that appeared; the same tuple if nothing changed."""
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
        """Read the shards that the root has now."""
        if self.shards is not None:
            storages = self.shards.look()
            if storages is not self._by_number:
                self._take_in(storages)

    def _look_on(self) -> None:
        """A look by a worker, which reads and never refreshes; a shard that was removed is whole while it is mapped.

        An error is raised by the next refresh; until then the shards of before are read.
        """
        wanted = self.shards is not None and not self._looked  # a batch that is drawn has just done so
        if wanted and self._lock.acquire(blocking=False):  # a worker may be forked while another thread holds it
            try:
                with suppress(MemmapBufferError, OSError):
                    self._look()
            finally:
                self._lock.release()
        self._looked = False

    # Numbers

    def reach(self, numbers: IntArray) -> None:
        """Look for the shards of these numbers; one that is gone is replaced by a storage that shows no episode."""
        if self.shards is not None and not self._has(numbers):
            with self._lock:
                self._take_in(self.shards.reach(np.unique(numbers).tolist()))

    def _has(self, numbers: IntArray) -> bool:
        places = self._places[1]
        return int(numbers.max(initial=-1)) < len(places) and int(places.take(numbers).min(initial=0)) >= 0

    def places(self, numbers: IntArray) -> tuple[tuple[Storage, ...], IntArray] | None:
        """The folders, and which of them has each number; None where there is none of a number."""
        if int(numbers.min(initial=0)) < 0 or not self._has(numbers):
            return None
        storages, places = self._places  # at least those that were looked at, as another thread may have found more
        return storages, places.take(numbers)

    def numbered(self, number: int) -> Storage | None:
        """The folder of a number, None where there never was one."""
        return self._by_number.get(number)

    def by_number(self, tables: Sequence[EpisodeTable]) -> list[tuple[int, Storage, EpisodeTable]]:
        """(number, folder, table) by ascending numbers; `tables` were read before folders that were found since."""
        return sorted(zip(self.numbers.tolist(), self.storages, tables, strict=False), key=itemgetter(0))

    # Records

    def find(self, anchors: Anchors, *, trusted: bool = True) -> Found:
        """The anchors with the records of their episodes; looked up again in fresh tables where one is missing.

        Args:
            anchors: of a batch.
            trusted: first check episodes whose content is still to be checked; one that fails is missing.

        Returns:
            the anchors with the words of their records, zeros where an episode is gone.
        """
        if anchors.folder is not None and anchors.size:
            self._look_on()
            self.reach(anchors.folder)
        records, same = self._looked_up(anchors, trusted)
        if not same.all():
            self.refresh()
            records, same = self._looked_up(anchors, trusted)
            records.anchors.words[~same] = 0  # type: ignore[index]
        return records

    def at(self, anchors: Anchors, changes: int) -> Found:
        """The anchors with their records, where the one folder showed all of them at a value of its change counter."""
        storage = self._places[0][0]
        words = storage.maps.words.take(anchors.slot, axis=0)
        return Found(Anchors(*anchors[:-1], words), group=Group(storage, EVERY, EVERY, changes), since=changes)

    def _looked_up(self, anchors: Anchors, trusted: bool) -> tuple[Found, BoolArray]:
        storages, places = self._places
        if anchors.folder is None or not anchors.size:
            words, same, changes = storages[0].look_up(anchors.slot, anchors.serial, trusted)
            return Found(Anchors(*anchors[:-1], words), group=Group(storages[0], EVERY, EVERY, changes)), same
        of = places.take(anchors.folder)
        reach = self._reach(storages, self._tables_of(storages))
        if reach.usable:
            anchors, same = reach.look_up(of, anchors)
            return Found(anchors, reach, of), same
        slot, words = reach.slots_there(of, anchors.slot), np.empty((anchors.size, WORDS), np.uint64)
        same = np.empty(anchors.size, np.bool_)
        for storage, chosen, *_ in grouped(reach, of)[0]:
            words[chosen], same[chosen], _ = storage.look_up(slot[chosen], anchors.serial[chosen], trusted)
        # Not the tables of now: another thread may have read newer ones since a record was looked up.
        return Found(Anchors(anchors.folder, slot, *anchors[2:-1], words), reach, of), same

    def _reach(self, storages: tuple[Storage, ...], tables: tuple[EpisodeTable, ...]) -> Reach:
        """The folders as of their tables now."""
        reach = self._reached
        if reach is None or reach.storages is not storages or reach.tables is not tables:
            reach = self._reached = Reach(storages, tables, reach)
        return reach


def id_of(storage: Storage) -> str:
    """The id of a folder's buffer; "" of a folder that is not there."""
    return "" if storage.withdrawn else storage.layout.id


def _places(numbers: IntArray) -> IntArray:
    """(N,) where each number stands in a list of them, -1 for those that do not."""
    places = np.full(numbers.max(initial=-1) + 1, -1)
    places[numbers] = np.arange(len(numbers))
    return places
