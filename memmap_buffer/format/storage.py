"""The mapped arrays of one folder, its episode table, and the checks of what may be damaged.

`Storage` opens, reads and checks a folder; it never writes to it. It pickles as a path and maps the files on first use,
so a DataLoader worker costs no copy of the data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.choices import Verify, check_choice
from memmap_buffer.dtypes import Array, all_of
from memmap_buffer.errors import CorruptBufferError, NotABufferError, SchemaMismatchError
from memmap_buffer.format.blobs import CodedRows, Dictionary
from memmap_buffer.format.checksums import EMPTY, Sums, add_rows, checksum, checksum_of, checksum_row, digest_of
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.host import boot_id
from memmap_buffer.format.journal import Journal
from memmap_buffer.format.layout import BLOBS, DICTIONARY, MAX_SCHEMA_BYTES, Layout
from memmap_buffer.format.records import (
    CHECK,
    CHECKED,
    DELETED,
    EXTENT,
    FINAL,
    FIRST_ROW,
    GENERATION,
    JOURNAL,
    MAX_SERIAL,
    OPEN,
    RECORD,
    SERIAL,
    STATE_WORD,
    STOP,
    WORDS,
    Columns,
    Words,
    changed_records,
    columns_of,
)
from memmap_buffer.format.source import Source
from memmap_buffer.paths import path_of
from memmap_buffer.schema import Field

log = logging.getLogger("memmap_buffer")

FEW = 32  # up to so many slots are read as plain numbers, which is quicker than arrays
MAX_VIEWS = 256  # views of `slices_of` that are kept
ROUNDS = 4  # how often records are copied again while a writer goes on changing them
_DELETED_WORD = np.uint64(DELETED << 32)
_CHANGES, _JOURNAL = STATE_WORD["changes"], STATE_WORD["journal"]


@dataclass(frozen=True)
class Maps:
    """The mapped files: `words` (slots, 8) u8, `state` (1056,) u8, `checksums`, per-timestep rows and meta by name.

    For a compressed field, `rows` has its index and `coded` its blobs and dictionary.
    """

    words: Words
    state: Words
    checksums: Array
    rows: Mapping[str, Array]
    meta: Mapping[str, Array]
    coded: Mapping[str, CodedRows]


class Storage:
    """A folder, open for reading.

    Args:
        path: the path of the folder, or a `Folder` that may hold it already.
        read_only: nothing may ever be written through this object.
        verify: when checksums are compared: "auto" (only of episodes that a crash of the machine, or copying beside a
            writer, may have spoilt, at their first read), "always" (of everything, on opening), "read" (at every
            read), "never".

    Attributes: token: another object whenever any storage of this process has another table.
    """

    token = object()

    def __init__(self, path: str | PathLike[str] | Folder, *, read_only: bool = False, verify: str = "auto") -> None:
        folder = path if isinstance(path, Folder) else Folder(path_of(path))
        self.folder, self.path = folder, folder.path
        self.read_only = read_only
        self.verify = verify
        self.withdrawn = False
        self.journal = Journal()  # the visible episodes, followed change by change
        self._table: EpisodeTable | None = None
        self._void: dict[int, int] = {}  # slot -> serial of an episode that was found damaged
        self.num_damaged = 0  # the length of `_void`
        self._stamp: tuple[int, int] | None = None  # of the `schema.json` that was read
        self._readable: tuple[int, int] | None = None  # of a later `schema.json` that has all fields of the one read
        self._state_file: tuple[int, int] | None = None
        self._row_views: dict[tuple[str, int], Array] = {}
        self.mirror: Source | None = None  # fetches rows before they are copied; None: all files are here

    @classmethod
    def open(cls, path: str | PathLike[str] | Folder, *, read_only: bool = False, verify: str = "auto") -> Storage:
        """Open and check a folder.

        Raises:
            NotABufferError: there is no buffer.
            SchemaError: an unknown version.
            CorruptBufferError: a file is missing, a link, or not exactly of the size and header that the schema says.
        """
        check_choice("verify", verify, Verify)
        storage = cls(path, read_only=read_only, verify=verify)
        try:
            storage.refresh()
        except (CorruptBufferError, FileNotFoundError):
            if not storage.schema_replaced:
                raise
            return cls.open(path, read_only=read_only, verify=verify)  # a field was removed after the schema was read
        storage.check_always()
        return storage

    def withdraw(self, path: Path) -> Storage:
        """A storage without episodes for a folder that is gone; it has the layout and the maps of this one."""
        state = self.maps.state.copy()
        state[_CHANGES] = self.table.changes  # in a copy the counter never moves, so the table is never read anew
        other = Storage(path, read_only=True, verify="never")
        other.layout, other.maps = self.layout, replace(self.maps, state=state)
        other._keep(replace(self.table, visible=np.empty(0, np.int64)))
        other.withdrawn = True
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "read_only": self.read_only, "verify": self.verify}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @cached_property
    def layout(self) -> Layout:
        self.folder.require()
        data, self._stamp = self.folder.read_with_stamp("schema.json", MAX_SCHEMA_BYTES)
        return Layout.from_json(data, f"{self.path}/schema.json")

    @property
    def where(self) -> str:
        """The path of the folder, or the URL that it was published at."""
        return str(self.path)

    @property
    def schema_replaced(self) -> bool:
        """Whether `schema.json` is another file than the one that was read."""
        return self._stamp is not None and self.folder.stamp("schema.json") != self._stamp

    @property
    def in_place(self) -> bool:
        """Whether the folder that was opened still stands at its path."""
        return self.folder.in_place and self.is_of(self.folder)

    def is_of(self, folder: Folder) -> bool:
        """Whether the mapped files are those of `folder`."""
        try:
            return folder.file_key("state.npy") == self.state_file
        except (FileNotFoundError, NotADirectoryError):
            return False

    def require_schema(self, *, to_write: bool = False) -> None:
        """Raise SchemaMismatchError if the folder is another buffer, or lost fields, since this was opened.

        Fields that were renamed count as lost. `to_write` refuses fields that were added, too. A folder that was moved
        away or removed can still be read, as its files are mapped.
        """
        try:
            layout, stamp = self.layout, self.folder.stamp("schema.json")
        except NotABufferError:
            if to_write or self._table is None or self.path.exists():
                raise
            return
        if stamp == self._stamp or (stamp == self._readable and not to_write):
            return
        now = Layout.from_json(self.folder.read("schema.json", MAX_SCHEMA_BYTES), f"{self.path}/schema.json")
        if now.id != layout.id:
            raise SchemaMismatchError(f"{self.path}: another buffer took its place; open it again with from_folder")
        if not now.keeps(layout) or (to_write and not layout.keeps(now)):
            differences = layout.differences(now)
            text = "\n  ".join([f"{self.path}: its schema was changed since it was opened:", *differences])
            raise SchemaMismatchError(f"{text}\nOpen it again with from_folder.", differences=differences)
        self._readable = stamp

    @cached_property
    def maps(self) -> Maps:
        layout = self.layout
        with self.folder.kept_open() as folder:  # all files of one folder, even if another takes its place now
            maps = folder.map_all([*layout.arrays.values()])
            self._state_file = folder.file_key(layout.arrays["/state"].name)
        mapped, schema = dict(zip(layout.arrays, maps, strict=True)), layout.schema
        return Maps(
            mapped["/episodes"].view(np.uint64).reshape(-1, WORDS),
            mapped["/state"].view(np.uint64),
            mapped["/checksums"],
            {name: mapped[name].reshape(layout.rows_shape(name)) for name in schema.fields},
            {name: mapped[name] for name in schema.meta_fields},
            {name: self._coded(name, field, mapped) for name, field in self.layout.coded.items()},
        )

    @property
    def state_file(self) -> tuple[int, int] | None:
        """The device and the inode of the `state.npy` that is mapped."""
        _ = self.maps
        return self._state_file

    @staticmethod
    def _coded(name: str, field: Field, mapped: Mapping[str, Array]) -> CodedRows:
        content = mapped.get(name + DICTIONARY)
        return CodedRows(
            field, mapped[name + BLOBS].reshape(-1), None if content is None else Dictionary.of(content.copy())
        )

    def read_rows(self, name: str, rows: IntArray | slice, slots: Any, serials: Any) -> Array:
        """Rows of a per-timestep field as stored, (N, *field), decoded where they are compressed.

        Args:
            name: the field.
            rows: their numbers in the field's file.
            slots: (N,) or a single one: the slots of the rows' episodes. Rows of a slot that is overwritten during the
                call may be anything.
            serials: (N,) or a single one: the serials of these episodes.

        Raises:
            CorruptBufferError: a timestep cannot be decoded, though its episode did not change.
        """
        stored, coded = self.maps.rows[name], self.maps.coded.get(name)
        if coded is None:
            return stored[rows] if isinstance(rows, slice) else stored.take(rows, 0, None, "clip")
        rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        field = self.layout.schema.fields[name]
        out = np.empty((len(rows), *field.cell), field.storage)
        broken = coded.decode_into(stored.take(rows, 0, None, "clip"), out, np.arange(len(rows)))
        if len(broken):  # a writer may have overwritten them: only rows of unchanged episodes are damaged
            slots, serials = (np.broadcast_to(of, len(rows))[broken] for of in (slots, serials))
            generations, again = self.generations(slots), np.zeros(len(broken), np.bool_)
            again[coded.decode_into(stored.take(rows[broken], 0, None, "clip"), out, broken)] = True
            again &= self.unmoved(slots, serials, generations, None)
            if again.any():
                raise self.damaged_blob(name, f"a timestep of episode {serials[again][0]} cannot be decoded")
        return out

    def mend(self, name: str, slots: Any) -> bool:
        """Have rows of a field fetched again that are not as they were published; whether there were some."""
        return False

    def damaged_blob(self, name: str, why: object) -> CorruptBufferError:
        """The error for a blob of a compressed field that cannot be decoded."""
        path = self.path / self.layout.arrays[name + BLOBS].name
        return CorruptBufferError(
            f"{path}: {why}; it was changed by another program, see `memmap-buffer verify`", path=path
        )

    def sums_of_rows(self, name: str, first: int, stop: int, sums: Sums = EMPTY) -> Sums:
        """The sums for the checksum of a field: `sums`, of earlier rows, continued by the rows first … stop - 1."""
        rows, coded = self.maps.rows[name][first:stop], self.maps.coded.get(name)
        return add_rows(sums, rows) if coded is None else reduce(add_rows, coded.contents(rows), sums)

    def state(self, name: str) -> int:
        """A word of state.npy."""
        return self.maps.state.item(STATE_WORD[name])

    @property
    def table(self) -> EpisodeTable:
        """The episode table as last read."""
        return self._table if self._table is not None else self.refresh()

    def refresh(self) -> EpisodeTable:
        """The episode table as it is now: one look at the change counter, then only what changed."""
        table = self._table
        if table is not None and table.changes == self.maps.state.item(_CHANGES):
            return table
        num_damaged = -1
        while num_damaged != self.num_damaged:  # another thread may have found a damaged episode during the call
            num_damaged, table = self.num_damaged, self._keep(self.journal.at_once(self))
        return table  # type: ignore[return-value]

    def reread(self) -> EpisodeTable:
        """The episode table from all records, without a look at the change counter."""
        return self._keep(self.journal.at_once(self, anew=True))

    def _keep(self, table: EpisodeTable) -> EpisodeTable:
        if table is not self._table:
            Storage.token = object()  # before, as an interruption may be between the two
            self._table = table
            Storage.token = object()  # and after: whoever has this one reads this table
        return table

    @property
    def highest_serial(self) -> int:
        """The highest serial of all valid records, damaged episodes included; -1 where there is none."""
        table = self.table
        return max(int(table.serial.max(initial=-1, where=table.valid)), *self._void.values(), -1)

    def columns(self) -> Columns:
        """The columns of all records as they are now: damaged episodes as not valid, open ones in doubt cut back."""
        changes = self.changes
        columns = columns_of(self.maps.words, self.layout.max_timesteps, self.layout.rows)
        if self.layout.rows is None:
            self._copy_again(columns, changes)
        if self._doubts is not None:
            columns = self._cut_back(columns)
        if self._void:
            good = columns.valid.copy()
            for slot, number in tuple(self._void.items()):  # a copy: another thread may add to it
                good[slot] &= columns.serial[slot] != number
            columns = columns._replace(valid=good)
        return columns

    def _copy_again(self, columns: Columns, changes: int) -> None:
        """Copy those records again that a writer changed while all records were copied.

        Such a copy may be half of the older record and half of the newer one. It may also be too old: beside a newer
        episode that was copied, an episode published before that one would be missing.

        Args:
            columns: the copies, changed in place.
            changes: the change counter before all records were copied.
        """
        words, longest = self.maps.words, self.layout.max_timesteps
        doubtful = np.flatnonzero(~columns.valid & (columns.generation != 0))
        for _ in range(ROUNDS):
            now = self.changes
            if now == changes and not len(doubtful):
                return
            changed = self.changed_since(changes)
            slots = changed_records(words, columns) if changed is None else np.union1d(changed, doubtful)
            if not len(slots):
                return
            again = columns_of(words[slots], longest, None, slots)
            for name, values in again._asdict().items():
                getattr(columns, name)[slots] = values
            changes, doubtful = now, slots[~again.valid & (words[slots, GENERATION] != again.generation)]

    @property
    def changes(self) -> int:
        """The change counter as it is now: as long as it stays, so do all steps that were shown at it."""
        return self.maps.state.item(_CHANGES)

    def changed_since(self, changes: int) -> IntArray | None:
        """The slots, ascending, that changed since the change counter was `changes`; None where nobody can tell."""
        state = self.maps.state
        count = state.item(_CHANGES) - changes
        if not 0 < count <= JOURNAL // 2:  # only half: a writer may overwrite the oldest entries during the reading
            return np.empty(0, np.int64) if count == 0 else None
        first, journal = (changes + 1) % JOURNAL, state[_JOURNAL:].view(np.int64)
        entries = journal[first : first + count]
        if first + count > JOURNAL:
            entries = np.concatenate([entries, journal[: first + count - JOURNAL]])
        if count <= FEW:  # as plain numbers, in half of the time
            slots = np.array(sorted({*entries.tolist()}))
        else:
            slots = np.sort(entries)
            once = slots[1:] != slots[:-1]
            if not all_of(once):
                slots = np.concatenate([slots[:1], slots[1:][once]])
        if slots.item(0) < 0 or slots.item(-1) >= len(self.maps.words) or state.item(_CHANGES) - changes > JOURNAL // 2:
            return None
        return slots

    def slices_of(self, name: str, steps: int) -> Array:
        """A view (N - K + 1,) of a field's N rows whose items are K rows each, as bytes: one index copies K rows.

        Numpy copies an item of bytes in half the time of a row that is as short, but without releasing the GIL.
        """
        view = self._row_views.get((name, steps))
        if view is None:
            view = slices_of(self.maps.rows[name], steps)
            kept = self._row_views if len(self._row_views) < MAX_VIEWS else {}
            self._row_views = {**kept, (name, steps): view}
        return view

    def look_up(
        self, slots: IntArray, serials: IntArray, trusted: bool = True
    ) -> tuple[Words, npt.NDArray[np.bool_], int]:
        """The records of episodes as they are on disk now.

        Args:
            slots, serials: (B,) of the episodes.
            trusted: first check episodes whose content is still to be checked; one that fails is not visible.

        Returns: the words of the records (B, 8); (B,) whether the slot still holds the episode of that serial, visible
            and unchanged since the table was read; the change counter of that table.
        """
        if trusted:
            self.trust(slots)
        table, words = self.table, self.maps.words.take(slots, axis=0)
        if self._doubts is not None:
            words.view(np.uint32)[:, STOP] = table.length.take(slots)
        differs = words[:, CHECK] ^ table.served.take(slots)
        differs |= words[:, SERIAL] ^ serials.view(np.uint64)
        differs |= words[:, GENERATION] & np.uint64(1)
        return words, differs == 0, table.changes

    def first_row(self, slots: IntArray, final: bool) -> IntArray:
        """The row of step 0 of each slot, in files with or without `final`; any row if the slot has no episode."""
        if self.layout.rows is None:
            return slots * (self.layout.max_timesteps + final)
        first = np.minimum(self.maps.words.reshape(-1)[slots * WORDS + FIRST_ROW], self.layout.rows - 1)
        first = first.astype(np.int64)
        return first + slots if final else first

    def rows_of(self, slot: int, final: bool) -> slice:
        """The rows of an episode in files with or without `final`, its final observation included where it has one."""
        first, table = int(self.first_row(np.array([slot]), final)[0]), self.table
        return slice(first, first + int(table.length[slot]) + (final and bool(table.flags[slot] & FINAL)))

    def start_of(self, name: str, slot: int) -> int:
        """The row of step 0 of one slot, in the file of a field."""
        if self.layout.rows is None:  # by plain numbers, in a fifth of the time
            return slot * (self.layout.max_timesteps + self.layout.schema.fields[name].final)
        return int(self.first_row(np.array([slot]), self.layout.schema.fields[name].final)[0])

    def record(self, slot: int) -> dict[str, int]:
        """The record of a slot as it is on disk now, by the names of its words."""
        record = self.maps.words[slot].view(RECORD)[0]
        return {name: int(record[name]) for name in RECORD.names or ()}

    def unmoved(
        self, slots: IntArray, serials: IntArray, generations: Words, since: int | None
    ) -> npt.NDArray[np.bool_]:
        """(B,) whether episodes that were shown are unchanged: not rewritten, cleared or deleted.

        Args:
            slots, serials, generations: (B,) of the episodes when they were shown; generation 0: it was not found.
            since: `changes` of the table that showed them; None where it is not known.
        """
        if self.maps.state.item(_CHANGES) == since:
            return np.asarray(generations != 0)
        words = self.maps.words.reshape(-1)
        same: npt.NDArray[np.bool_] = (words.take(slots * WORDS) == generations) & (generations & np.uint64(1) == 0)
        same &= words.take(slots * WORDS + SERIAL) == serials.view(np.uint64)
        flags = words.take(slots * WORDS + EXTENT)  # they lie above the length
        same &= (serials >= self.state("base")) & (flags & _DELETED_WORD == 0)
        return same

    def generations(self, slots: IntArray) -> Words:
        """The generation of each slot as it is on disk now."""
        return self.maps.words.reshape(-1).take(slots * WORDS)

    # Trust: episodes that a crash of the machine, or copying beside a writer, may have spoilt are compared with their
    # checksums before they are served.

    @property
    def first_unsettled(self) -> int | None:
        """The first serial that the last writer left in doubt, or None: see `format`, "Creating, opening, trusting"."""
        if self.state("clean") or not self.state("term"):
            return None
        boot = self.maps.state[STATE_WORD["boot"] : STATE_WORD["boot"] + 2].tobytes()
        rebooted = boot != boot_id() or not any(boot)
        if self._is_copy(rebooted):
            return 0
        return self.state("synced") if rebooted else None

    def _is_copy(self, rebooted: bool) -> bool:
        """Whether the folder is a copy: the inode of `state.npy`, or in one boot its device, is not the one stored."""
        if self.state_file is None or not self.state("inode"):
            return False
        device, inode = self.state_file
        return inode != self.state("inode") or (device != self.state("device") and not rebooted)

    @cached_property
    def _doubts(self) -> tuple[int, int] | None:
        """(first, stop): the serials first … stop - 1 are in doubt. None where none is."""
        first, suspect = self.first_unsettled, self.state("suspect")
        if first is None:
            return (self.state("synced"), suspect) if suspect else None
        return first, self.written_serials  # as of now: episodes that are recorded later are not in doubt

    @property
    def written_serials(self) -> int:
        """Serials below this one are of records that were ever written, valid or not."""
        words = self.maps.words
        serials = words[(words[:, SERIAL] < MAX_SERIAL) & (words[:, GENERATION] != 0), SERIAL]
        return int(serials.max(initial=0)) + 1 if len(serials) else 0

    @property
    def in_doubt(self) -> bool:
        """Whether some episodes are in doubt; open ones among them are cut back."""
        return self._doubts is not None

    def _cut_back(self, columns: Columns) -> Columns:
        """Cut open episodes in doubt back to the steps that their checksums cover: others may not be on the disk."""
        first, stop = self._doubts or (0, 0)
        doubtful = (columns.flags & OPEN != 0) & (columns.serial >= first) & (columns.serial < stop)
        slots = np.flatnonzero(doubtful)
        length = columns.length.copy()
        length[slots] = (self.maps.words[slots, EXTENT] & np.uint64(2**32 - 1)).astype(np.int64)
        return columns._replace(length=length, start=np.minimum(columns.start, length)) if len(slots) else columns

    @cached_property
    def _unverified(self) -> npt.NDArray[np.bool_] | None:
        """(slots,) whether a slot is still to be checked; None where none is, or `verify` is not "auto"."""
        if self.verify != "auto" or self._doubts is None:
            return None
        serial, (first, stop) = self.table.serial, self._doubts
        doubtful = (serial >= first) & (serial < stop)
        return doubtful if bool((doubtful & self.table.valid).any()) else None

    @property
    def tells_by_counter(self) -> bool:
        """Whether all that was shown at a change counter is right and unchanged for as long as the counter stays."""
        return not (self.verify == "read" or self.num_damaged) and self._doubts is None

    def trust(self, slots: IntArray) -> bool:
        """Check those of `slots` that are still to be checked; False if one failed, which is not served any more."""
        if self.verify == "read":
            return not self.check(np.unique(slots))
        pending = self._unverified
        if pending is None or not pending[slots].any():
            return True
        first = np.unique(slots[pending[slots]])
        whole = not self.check(first)
        pending[first] = False  # after the check: else an interruption or another thread would serve them unchecked
        return whole

    def check(self, slots: IntArray) -> list[tuple[int, str]]:
        """Compare the rows of `slots` with their checksums; this object stops serving episodes that differ.

        Returns: (serial, field) of each field that differs.
        """
        damaged = [(int(slot), name) for slot in slots for name in self.damaged(int(slot))]
        out = [(int(self.table.serial[slot]), name) for slot, name in damaged]
        self.void([(slot, f"fails the checksum of {name!r}") for slot, name in damaged])
        return out

    def void(self, damaged: list[tuple[int, str]]) -> None:
        """Stop serving damaged episodes. Args: damaged: (slot, reason for the log)."""
        for slot, what in damaged:
            self._void[slot] = int(self.table.serial[slot])
            self.num_damaged = len(self._void)
            log.warning("%s: episode %d %s and is not served", self.path, self._void[slot], what)
        if damaged:
            self.journal.doubt()
            self._keep(self.journal.at_once(self))

    def check_always(self) -> None:
        """With `verify="always"`, check all episodes, also hidden ones that would become visible for damaged ones."""
        if self.verify == "always":
            self.check(np.flatnonzero(self.refresh().valid))

    def damaged(self, slot: int) -> list[str]:
        """The fields of a slot that differ from their checksums; none where a writer changed the slot in between."""
        table = self.table
        length, flags = self.checked_length(slot), int(table.flags[slot])
        if not table.valid[slot] or not flags & CHECKED:
            return []
        bad = self.mismatches(slot, flags, self.checksums_of(slot, length, bool(flags & FINAL)))
        same = self.maps.words[slot, [GENERATION, CHECK]] == (table.generation[slot], table.check[slot])
        return bad if same.all() else []

    def checked_length(self, slot: int) -> int:
        """How many timesteps the checksums of a slot cover: of an open episode perhaps fewer than are shown."""
        return self.maps.words.item(slot, EXTENT) & (2**32 - 1)

    def mismatches(self, slot: int, flags: int, checksums: Mapping[str, int]) -> list[str]:
        """The fields whose checksums, counted from the rows of a slot, differ from the stored ones."""
        record, column_of = self.record(slot), self.layout.column_of
        if flags & OPEN and record["columns"] > self.layout.used_columns:
            return []  # its digest covers fields that were added since this was opened
        row = checksum_row(self.layout, checksums) if flags & OPEN else self.maps.checksums[slot].tobytes()
        stored = np.frombuffer(row, "<u4")
        bad = [name for name, value in checksums.items() if value != stored[column_of[name]]]
        if not bad and digest_of(row, record["columns"]) != record["digest"]:
            return ["/checksums"]  # the row of checksums is another episode's, or some field of an open episode differs
        return bad

    def checksums_of(self, slot: int, length: int, has_final: bool) -> dict[str, int]:
        """The checksum of each field, over the first `length` rows of a slot, and of each meta field."""
        checksums = {}
        for name in self.maps.rows:
            first, final = self.start_of(name, slot), self.layout.schema.fields[name].final
            checksums[name] = checksum_of(self.sums_of_rows(name, first, first + length + (final and has_final)))
        return checksums | {name: checksum(values[slot : slot + 1]) for name, values in self.maps.meta.items()}


def slices_of(rows: Array, steps: int) -> Array:
    """A view (N - K + 1,) of N rows whose items are K = `steps` rows each, as bytes."""
    width = rows.itemsize * math.prod(rows.shape[1:])
    return np.ndarray(len(rows) - steps + 1, (np.void, steps * width), rows, strides=(width,))
