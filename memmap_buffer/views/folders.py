"""Several folders read as one: where an anchor's rows lie, and the gather over them. One folder is the common case."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array, all_of
from memmap_buffer.errors import MemmapBufferError, SchemaError, SchemaMismatchError
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.folder import disk_reads, will_need
from memmap_buffer.format.records import FLAGS, LENGTH, Words
from memmap_buffer.format.shards import Shards
from memmap_buffer.format.storage import Storage
from memmap_buffer.schema import ENDS
from memmap_buffer.views.memory_pool import SMALL, Pool
from memmap_buffer.views.row_ranges import RowRanges, joined
from memmap_buffer.views.together import Together

BoolArray = npt.NDArray[np.bool_]
ANSWER_SECONDS = 2e-4  # a batch that waited for several rows took longer, as no disk answers much sooner
GAP_BYTES = 16 << 10  # rows so near to each other are one request: it costs a disk as much as these bytes
GOLDEN = 0x9E3779B97F4A7C15


class Anchors(NamedTuple):
    """From where a view cuts one item each: (B,) arrays; `source` is None for a single folder.

    With draws by priority each has its importance weight and its probability.
    `chance` (B,) uint64 are random numbers, for what is drawn within an item, or None.
    `words` (B, 8) are the records of their episodes, looked up before, or None. All zeros: it was not there any more.
    """

    source: IntArray | None
    slot: IntArray
    serial: IntArray
    t: IntArray
    weight: npt.NDArray[np.float32] | None = None
    probability: npt.NDArray[np.float64] | None = None
    chance: npt.NDArray[np.uint64] | None = None
    words: Words | None = None

    @property
    def size(self) -> int:
        """How many; a named tuple's own `len` counts its fields."""
        return len(self.slot)

    def where(self, chosen: Any) -> Anchors:
        """The anchors at an index array, a mask or a slice."""
        return Anchors._make([None if column is None else column[chosen] for column in self])

    @staticmethod
    def joined(parts: Sequence[Anchors]) -> Anchors:
        """Several, one behind another; all have the same columns."""
        columns = zip(*parts, strict=True)
        return Anchors._make([None if column[0] is None else np.concatenate(column) for column in columns])

    def replaced(self, chosen: IntArray, others: Anchors) -> Anchors:
        """The same anchors, but `others` at the positions `chosen`; there, what was not drawn by priority weighs 0.

        Their episodes are to be looked up again.
        """
        out = Anchors(*(None if column is None else column.copy() for column in self[:7]))  # type: ignore[arg-type]
        for column, new in zip(out[:7], others[:7], strict=True):
            if column is not None:
                column[chosen] = 0 if new is None else new
        return out

    @property
    def length(self) -> IntArray:
        """(B,) int64 timesteps of each episode that was looked up."""
        return self.words.view(np.uint32)[:, LENGTH].astype(np.int64)  # type: ignore[union-attr]

    def uniform(self, i: int) -> npt.NDArray[np.float64]:
        """(B,) numbers in [0, 1), the `i`-th that chance gives each item."""
        assert self.chance is not None
        words = self.chance if i == 0 else splitmix(self.chance + np.uint64(i * GOLDEN % 2**64))
        return np.asarray((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def has(self, flags: int) -> BoolArray:
        """(B,) whether some of these flags of `records` is set of each episode that was looked up."""
        of: npt.NDArray[np.uint32] = self.words.view(np.uint32)[:, FLAGS]  # type: ignore[union-attr]
        return (of & flags).astype(np.bool_)


class Disk(threading.local):
    """Whether this thread's batches come from the disk, or from memory as most do.

    Memory that the system has to fill first stops a copy at every row. Whoever asks for all of them before has the disk
    read many at a time; but that is a system call each, so nobody asks as long as all is there.

    Attributes: slow: whether something had to be read for the last batch; True before the first, as nobody knows.
    """

    def __init__(self) -> None:
        self.slow = True
        self._reads = disk_reads()

    def took(self, seconds: float) -> None:
        """To be told how long each batch took to copy, what was asked for it included."""
        if self.slow or seconds > ANSWER_SECONDS:
            before, self._reads = self._reads, disk_reads()
            self.slow = self._reads != before


class Folders:
    """The folders that are read as one; they must hold the same fields.

    The folders of a root come and go, and one may be another under its old number. So whoever reads takes those of one
    moment (`find`), a list that stays the same, and holds it until all is copied: no row is looked up here, read there.

    Args: storages: the folders. shards: where they come from, if that is a root in which more may appear.

    Attributes:
        storages: the folders. numbers: at least as many, what anchors call them: those of a root by the names of its
            shards, others 0, 1, 2, … Another folder may take the place of one; no folder takes another place.
        single: whether there is one folder, and never another.

    Raises: SchemaMismatchError: the fields differ; the text lists how. SchemaError: a buffer and a copy of it.
    """

    def __init__(self, storages: Sequence[Storage], shards: Shards | None = None) -> None:
        self.storages: tuple[Storage, ...] = ()
        self.numbers = np.empty(0, np.int64)
        self._places: IntArray | None = None  # by their numbers, -1 where there is none; None where they are these
        self.shards = shards
        found = dict(enumerate(storages)) if shards is None else shards.look()
        self.pool = Pool()
        self.disk = Disk()
        first = next(iter(found.values()))
        self._path, self._layout = first.path, first.layout
        self.schema = self._layout.schema
        self._lock = threading.Lock()
        self.single = shards is None and len(storages) == 1
        self._of_root, self._looked = shards is not None, True
        self._listed: Folders | None = None  # a root's folders of now
        self._of: Mapping[int, Storage] = {}  # what was found last
        self._take_in(found)

    @classmethod
    def of_root(cls, shards: Shards) -> Folders:
        """The shards of a root, those included that appear later. Raises NotABufferError where there is none yet."""
        return cls((), shards)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Folders, (self.storages,)) if self.shards is None else (Folders.of_root, (self.shards,))

    def _take_in(self, found: Mapping[int, Storage]) -> None:
        """Read these from now on, by their numbers."""
        known = set(self.storages)
        for storage in found.values():
            if storage in known or storage.withdrawn:  # that is shaped as one that was taken in
                continue
            differences = self._layout.differences(storage.layout)
            ends = (key for key in ENDS if getattr(storage.layout.schema, key) != getattr(self.schema, key))
            lines = [line for line in differences if line.startswith(("fields", "meta_fields", *ends))]
            if lines:
                text = "\n  ".join([f"{storage.path} and {self._path} have different fields:", *lines])
                raise SchemaMismatchError(text, differences=lines)
        places: dict[str, Storage] = {}
        for storage in found.values():
            other = storage if storage.withdrawn else places.setdefault(storage.layout.id, storage)
            if other is not storage:
                raise SchemaError(
                    f"{storage.path} and {other.path} are one buffer twice, or a copy of it: both have the id "
                    f"{storage.layout.id}; leave one out"
                )
        numbers = np.fromiter(found, np.int64, len(found))
        if len(numbers) > len(self.numbers):
            self.numbers, self._places = numbers, _places(numbers)
        self.storages, self._of = tuple(found.values()), found
        if self.shards is not None:
            listed = Folders.__new__(Folders)
            vars(listed).update(vars(self), shards=None, _listed=None)
            self._listed = listed

    @property
    def _present(self) -> Folders:
        """The folders of now as a list that stays the same."""
        return self._listed or self

    @property
    def max_timesteps(self) -> int:
        return max(storage.layout.max_timesteps for storage in self.storages)

    @property
    def tables(self) -> tuple[EpisodeTable, ...]:
        """The episode tables as last read; of folders that were found since, too."""
        return tuple(storage.table for storage in self.storages)

    @property
    def ids(self) -> tuple[str, ...]:
        """Of each folder its buffer's; "" of what is not there."""
        return tuple("" if storage.withdrawn else storage.layout.id for storage in self.storages)

    @property
    def seen(self) -> int | None:
        """What the table of the one folder knew of the change counter; None where there are several."""
        return self.storages[0].table.changes if self.single else None

    @property
    def changes(self) -> int | None:
        """The change counter of the one folder, as it is now; None where there are several, whose would take long."""
        return self.storages[0].state("changes") if self.single else None

    def refresh(self) -> tuple[EpisodeTable, ...]:
        """The episode tables as they are now, and those of shards that appeared."""
        if self.single:
            return (self.storages[0].refresh(),)
        with self._lock:
            self._look()
            self._looked = True
            return self._present._together.refresh()

    def _look(self) -> None:
        """Read the shards that the root has now."""
        if self.shards is not None:
            found = self.shards.look()
            if found is not self._of:
                self._take_in(found)

    def _look_on(self) -> None:
        """The same for who reads and never refreshes, as workers do: an old shard is whole for as long as it is mapped.

        What hinders it is raised by the next refresh; until then the shards of before are read.
        """
        wanted = self.shards is not None and not self._looked  # a batch that is drawn has just done so
        if wanted and self._lock.acquire(blocking=False):  # a worker may be forked while another thread holds it
            try:
                with suppress(MemmapBufferError, OSError):
                    self._look()
            finally:
                self._lock.release()
        self._looked = False

    def reach(self, numbers: IntArray) -> None:
        """Have something in the place of each of these numbers, where they are a root's shards."""
        if self.shards is not None and not self._has(numbers):
            with self._lock:
                self._take_in(self.shards.reach(np.unique(numbers).tolist()))

    def _has(self, numbers: IntArray) -> bool:
        places = self._places
        count = len(self.numbers) if places is None else len(places)
        if int(numbers.max(initial=-1)) >= count:
            return False
        return places is None or int(places.take(numbers).min(initial=0)) >= 0

    def numbered(self, number: int) -> Storage | None:
        """The folder of a number, None where there never was one."""
        present, wanted = self._present, np.array([number])
        return present.storages[int(present._place(wanted)[0])] if number >= 0 and present._has(wanted) else None

    def by_number(self, tables: Sequence[EpisodeTable]) -> list[tuple[int, Storage, EpisodeTable]]:
        """Each folder, with its table of some that were read before, ascending; others may have been found since."""
        return sorted(zip(self.numbers.tolist(), self.storages, tables, strict=False), key=itemgetter(0))

    def _place(self, numbers: IntArray) -> IntArray:
        """Where folders stand in `storages`."""
        return numbers if self._places is None else self._places.take(numbers)

    @cached_property
    def _together(self) -> Together:
        """Of a list that stays the same, never of a root itself."""
        return Together(self.storages, self._of_root)

    def look_up(self, anchors: Anchors) -> Anchors:
        """The anchors with the records of their episodes; once more in fresh tables, if one is not where it was."""
        return self.find(anchors, trusted=False)[1]

    def find(self, anchors: Anchors, *, trusted: bool = True) -> tuple[Folders, Anchors]:
        """As `look_up`, with the folders that were looked at: what is read of the anchors is to be read of these.

        Args: trusted: check those episodes whose content is still to be checked; one that fails is not there.
        """
        if anchors.source is not None and anchors.size:
            self._look_on()
            self.reach(anchors.source)
        present, anchors, fresh = self._found(anchors, trusted)
        if not all_of(fresh):
            self.refresh()
            present, anchors, fresh = self._found(anchors, trusted)
            anchors.words[~fresh] = 0  # type: ignore[index]
        return present, anchors

    def _found(self, anchors: Anchors, trusted: bool) -> tuple[Folders, Anchors, BoolArray]:
        present, source = self._present, anchors.source
        if source is None:
            storage = present.storages[0]
            if trusted:
                storage.trust(anchors.slot)
            words, fresh = storage.look_up(anchors.slot, anchors.serial)
        else:
            together, place = present._together, present._place(source)
            anchors = anchors._replace(slot=together.slots(place, anchors.slot))
            if trusted:
                present._trust(source, anchors.slot)
            words, fresh = together.look_up(place, anchors.slot, anchors.serial)
        return present, Anchors(*anchors[:-1], words), fresh

    def _trust(self, source: IntArray, slots: IntArray) -> None:
        """Check those episodes whose content is still to be checked; one that fails is void from now on."""

        def trust(storage: Storage, i: Any) -> tuple[Array]:
            return (np.full(len(slots[i]), storage.trust(slots[i])),)

        if not self._together.trusted and not self._each(source, len(slots), trust)[0].all():
            self._together.refresh(again=True)

    def unchanged(self, anchors: Anchors, generation: Words, since: int | None) -> BoolArray:
        """(B,) whether each episode is still as it was seen before its rows were copied.

        Args: since: what the table of the one folder that they were looked up in knew of; None if nobody knows.
        """
        if anchors.source is None:
            return self.storages[0].unmoved(anchors.slot, anchors.serial, generation, since)
        return self._together.unmoved(self._place(anchors.source), anchors.slot, anchors.serial, generation)

    def first_rows(self, anchors: Anchors) -> IntArray:
        """(B,) the row of step 0 of each anchor's slot, whatever its record says; in files without `final`."""
        return self._each(
            anchors.source, anchors.size, lambda storage, i: (storage.first_row(anchors.slot[i], False),)
        )[0]

    def take(self, name: str, source: IntArray | None, rows: IntArray | RowRanges) -> Array:
        """Copy rows of a per-timestep field: (B, …) row numbers give (B, …, *field), slices (B, K, *field)."""
        if source is None:
            return self._take(self.storages[0], name, rows)
        if not isinstance(rows, RowRanges) and (span := self._together.rows(name)) is not None:
            return span.take(self._place(source), rows)
        count = len(rows.row if isinstance(rows, RowRanges) else rows)
        return self._each(source, count, lambda storage, i: (self._take(storage, name, rows[i]),))[0]

    def will_need(self, name: str, low: IntArray, high: IntArray, source: IntArray | None = None) -> None:
        """Ask for rows low … high - 1 (B,) of a per-timestep field, without waiting for them."""
        gap = GAP_BYTES // max(1, self.schema.fields[name].itemsize)
        places = None if source is None else self._place(source)
        for place in [0] if places is None else np.unique(places).tolist():
            mine = slice(None) if places is None else places == place
            will_need(self.storages[place].maps.rows[name], joined(low[mine], high[mine], gap))

    def _take(self, storage: Storage, name: str, rows: IntArray | RowRanges) -> Array:
        if isinstance(rows, RowRanges):
            return rows.copy(storage, name, self.pool)
        stored = storage.maps.rows[name]
        if rows.size * stored.strides[0] < SMALL:
            return stored.take(rows, 0, None, "clip")
        out = self.pool.empty((*rows.shape, *stored.shape[1:]), stored.dtype)
        return stored.take(rows, 0, out, "clip")

    def take_meta(self, name: str, anchors: Anchors) -> Array:
        """Copy a meta field of each anchor's episode: (B, *field)."""

        def take(storage: Storage, i: Any) -> tuple[Array]:
            return (storage.maps.meta[name].take(anchors.slot[i], axis=0, mode="clip"),)

        if anchors.source is not None and (span := self._together.meta(name)) is not None:
            return span.take(self._place(anchors.source), anchors.slot)
        return self._each(anchors.source, anchors.size, take)[0]

    def _each(
        self, source: IntArray | None, count: int, read: Callable[[Storage, Any], tuple[Array, ...]]
    ) -> tuple[Array, ...]:
        """`read` of every folder that is drawn from, on its part of the batch, put together again."""
        if source is None:
            return read(self.storages[0], slice(None))
        out: tuple[Array, ...] = ()
        places = self._place(source)
        for place in np.unique(places).tolist():
            chosen = np.flatnonzero(places == place)
            parts = read(self.storages[place], chosen)
            if not out:
                out = tuple(self.pool.empty((count, *part.shape[1:]), part.dtype) for part in parts)
            for whole, part in zip(out, parts, strict=True):
                whole[chosen] = part
        return out or read(self.storages[0], slice(None))


def _places(numbers: IntArray) -> IntArray | None:
    """Where each number stands in a list of them, -1 for those that do not; None where they are 0, 1, 2, …"""
    if (numbers == np.arange(len(numbers))).all():
        return None
    places = np.full(numbers.max() + 1, -1)
    places[numbers] = np.arange(len(numbers))
    return places


def splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Whole numbers (n,) scattered over all 64 bits.

    Source: the finaliser of Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(x ^ (x >> np.uint64(31)))
