"""The open arrays of one folder and its episode table.

`Storage` opens and reads; it never writes to a folder that is complete. It pickles as a path and opens its maps on
first use, so a DataLoader worker costs no copy of the data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.cached import cached_property
from memmap_buffer.choices import Verify, check_choice
from memmap_buffer.dtypes import Array, all_of
from memmap_buffer.errors import CorruptBufferError, NotABufferError, SchemaMismatchError
from memmap_buffer.format.blobs import CodedRows, Dictionary, sums_of
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
    columns_of,
)
from memmap_buffer.format.source import Source
from memmap_buffer.paths import path_of
from memmap_buffer.schema import Field

log = logging.getLogger("memmap_buffer")

FEW = 16  # slots, of which numbers are quicker than arrays
MAX_VIEWS = 256  # of several rows as one item, that are kept
ROUNDS = 16  # in which records are copied again that a writer changed meanwhile
_DELETED_WORD = np.uint64(DELETED << 32)
_CHANGES, _JOURNAL = STATE_WORD["changes"], STATE_WORD["journal"]


@dataclass(frozen=True)
class Maps:
    """The mapped files: `words` (slots, 8) u8, `state` (1056,) u8, `checksums`, per-timestep rows and meta by name.

    Of compressed fields `rows` has the index, and `coded` what it takes to decode them.
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
        path: the folder, or who holds it already.
        read_only: nothing may ever be written through this object.
        verify: when checksums are compared: "auto" (what may have been lost in a crash of the machine or in copying
            beside a writer, when it is first read), "always" (everything, on opening), "read" (at every read), "never".

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
        self._void: dict[int, int] = {}
        self.num_damaged = 0  # episodes that were found damaged so far
        self._stamp: tuple[int, int] | None = None
        self._readable: tuple[int, int] | None = None  # a later schema, whose fields include those that are read
        self._state_file: tuple[int, int] | None = None
        self._row_views: dict[tuple[str, int], Array] = {}
        self.mirror: Source | None = None  # where rows have to be fetched before they are copied

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
            return cls.open(path, read_only=read_only, verify=verify)  # a field went after the schema was read
        storage.check_always()
        return storage

    def withdraw(self, path: Path) -> Storage:
        """A storage for a folder that is not there, with the layout and the maps of this one, and without episodes."""
        state = self.maps.state.copy()
        state[_CHANGES] = self.table.changes  # a copy, so the counter never moves, and the table stays
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
        self._stamp = self.folder.stamp("schema.json")
        return Layout.from_json(self.folder.read("schema.json", MAX_SCHEMA_BYTES), str(self.path / "schema.json"))

    @property
    def where(self) -> str:
        """Where it is: its path, or the URL that it was published at."""
        return str(self.path)

    @property
    def schema_replaced(self) -> bool:
        """Whether `schema.json` is another file than the one that was read."""
        return self._stamp is not None and self.folder.stamp("schema.json") != self._stamp

    @property
    def in_place(self) -> bool:
        """Whether the folder that was opened stands at its path still."""
        return self.folder.in_place and self.is_of(self.folder)

    def is_of(self, folder: Folder) -> bool:
        """Whether it is this folder's files that are mapped."""
        try:
            return folder.file_key("state.npy") == self.state_file
        except (FileNotFoundError, NotADirectoryError):
            return False

    def require_schema(self, *, to_write: bool = False) -> None:
        """Raise SchemaMismatchError where fields were dropped, renamed or, `to_write`, added since this was opened.

        A folder that was moved away or removed can be read on, as its files are mapped.
        """
        try:
            layout, stamp = self.layout, self.folder.stamp("schema.json")
        except NotABufferError:
            if to_write or self._table is None or self.path.exists():
                raise
            return
        if stamp == self._stamp or (stamp == self._readable and not to_write):
            return
        now = Layout.from_json(self.folder.read("schema.json", MAX_SCHEMA_BYTES), str(self.path / "schema.json"))
        if now.id != layout.id:
            raise SchemaMismatchError(f"{self.path}: another buffer took its place; open it again with from_folder")
        if not now.keeps(layout) or (to_write and not layout.keeps(now)):
            differences = layout.differences(now)
            text = "\n  ".join([f"{self.path}: its schema was changed since it was opened:", *differences])
            raise SchemaMismatchError(f"{text}\nOpen it again with from_folder.", differences=differences)
        self._readable = stamp

    @cached_property
    def maps(self) -> Maps:
        arrays = self.layout.arrays
        with self.folder.held() as folder:  # all of one
            mapped = {key: folder.map(a.name, a.header, a.dtype, a.shape) for key, a in arrays.items()}
            self._state_file = folder.file_key(arrays["/state"].name)
        schema = self.layout.schema
        return Maps(
            mapped["/episodes"].view(np.uint64).reshape(-1, WORDS),
            mapped["/state"].view(np.uint64).reshape(-1),
            mapped["/checksums"],
            {name: mapped[name].reshape(self.layout.rows_shape(name)) for name in schema.fields},
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
            rows: which.
            slots: (N,) or one, where their episodes are; of one that is overwritten meanwhile, rows may be anything.
            serials: the numbers of these episodes, likewise.

        Raises:
            CorruptBufferError: a timestep of an episode that is as it was cannot be decoded.
        """
        stored, coded = self.maps.rows[name], self.maps.coded.get(name)
        if coded is None:
            return stored[rows] if isinstance(rows, slice) else stored.take(rows, 0, None, "clip")
        rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        field = self.layout.schema.fields[name]
        out = np.empty((len(rows), *field.cell), field.storage)
        broken = coded.decode_into(stored.take(rows, 0, None, "clip"), out, np.arange(len(rows)))
        if len(broken):  # what is not being overwritten is the same when it is read again
            slots, serials = (np.broadcast_to(of, len(rows))[broken] for of in (slots, serials))
            generations, again = self.generations(slots), np.zeros(len(broken), np.bool_)
            again[coded.decode_into(stored.take(rows[broken], 0, None, "clip"), out, broken)] = True
            again &= self.unmoved(slots, serials, generations, None)
            if again.any():
                raise self.damaged_blob(name, f"a timestep of episode {serials[again][0]} cannot be decoded")
        return out

    def damaged_blob(self, name: str, why: object) -> CorruptBufferError:
        """The error for a compressed field of which a blob cannot be decoded."""
        path = self.path / self.layout.arrays[name + BLOBS].name
        return CorruptBufferError(
            f"{path}: {why}; it was changed by another program, see `memmap-buffer verify`", path=path
        )

    def sums_of_rows(self, name: str, first: int, stop: int, sums: Sums = EMPTY) -> Sums:
        """The sums, for the checksum of a field, of what was before, and of some rows."""
        rows, coded = self.maps.rows[name][first:stop], self.maps.coded.get(name)
        return add_rows(sums, rows) if coded is None else sums_of(coded.contents(rows), sums)

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
        while num_damaged != self.num_damaged:  # another thread may find more meanwhile
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
        """The highest of all records of the table, also of episodes that were found damaged; -1 where there is none."""
        table = self.table
        return max(int(table.serial.max(initial=-1, where=table.valid)), *self._void.values(), -1)

    def columns(self) -> Columns:
        """The columns of all records as they are now, but for what is damaged or in doubt."""
        changes = self.changes
        columns = columns_of(self.maps.words, self.layout.max_timesteps, self.layout.rows)
        if self.layout.rows is None:
            self._copy_again(columns, changes)
        if self._doubts is not None:
            columns = self._cut_back(columns)
        if self._void:
            good = columns.valid.copy()
            for slot, number in tuple(self._void.items()):  # at once: another thread may find more
                good[slot] &= columns.serial[slot] != number
            columns = columns._replace(valid=good)
        return columns

    def _copy_again(self, columns: Columns, changes: int) -> None:
        """Copy records again, one by one, that a writer changed while all of them were copied.

        One of them may be half an older one; and where another is newer, an episode between these two was left out.

        Args: changes: the change counter before all were copied.
        """
        words, longest = self.maps.words, self.layout.max_timesteps
        doubtful = np.flatnonzero(~columns.valid & (columns.generation != 0))
        for _ in range(ROUNDS):
            now, changed = self.changes, self.changed_since(changes)
            slots = np.arange(len(words)) if changed is None else np.union1d(changed, doubtful)
            if not len(slots):
                return
            again = columns_of(words[slots], longest, None, slots)
            for name, values in again._asdict().items():
                getattr(columns, name)[slots] = values
            changes, doubtful = now, slots[~again.valid & (words[slots, GENERATION] != again.generation)]

    @property
    def changes(self) -> int:
        """The change counter as it is now: as long as it stays, no step that was shown at it moves."""
        return self.maps.state.item(_CHANGES)

    def changed_since(self, changes: int) -> IntArray | None:
        """The slots, ascending, that changed after the change counter had a value; None where that is not known."""
        state = self.maps.state
        count = state.item(_CHANGES) - changes
        if not 0 < count <= JOURNAL // 2:  # while these are read, others may be written
            return np.empty(0, np.int64) if count == 0 else None
        if count <= FEW:  # by plain numbers, in a fifth of the time
            few = sorted({state.item(_JOURNAL + (changes + 1 + i) % JOURNAL) for i in range(count)})
            whole = few[-1] < len(self.maps.words) and state.item(_CHANGES) - changes <= JOURNAL // 2
            return np.array(few) if whole else None
        first, journal = (changes + 1) % JOURNAL, state[_JOURNAL:].view(np.int64)
        if first + count <= JOURNAL:
            slots = np.sort(journal[first : first + count])
        else:
            slots = np.sort(np.concatenate([journal[first:], journal[: first + count - JOURNAL]]))
        once = slots[1:] != slots[:-1]
        if not all_of(once):
            slots = np.concatenate([slots[:1], slots[1:][once]])
        if slots[0] < 0 or slots[-1] >= len(self.maps.words) or state.item(_CHANGES) - changes > JOURNAL // 2:
            return None
        return slots

    def slices_of(self, name: str, steps: int) -> Array:
        """A view (N - K + 1,) of a field's N rows whose items are K rows each, as bytes: one index copies many.

        Numpy copies an item of bytes in half the time that it takes for as short a row, but keeps the interpreter.
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
        """Records as they are on disk now.

        Args:
            slots, serials: (B,) of episodes.
            trusted: first check episodes whose content is still to be checked; one that fails is not visible.

        Returns: their words (B, 8); (B,) whether each is, unchanged, that of the visible episode of that serial; the
            change counter of the table that showed them.
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
        """The row of step 0 of each slot, in files with or without `final`; any that exists where it has no episode."""
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
        return int(self.first_row(np.array([slot]), self.layout.schema.fields[name].final)[0])

    def record(self, slot: int) -> dict[str, int]:
        """The record of a slot as it is on disk now, by the names of its words."""
        record = self.maps.words[slot].view(RECORD)[0]
        return {name: int(record[name]) for name in RECORD.names or ()}

    def unmoved(
        self, slots: IntArray, serials: IntArray, generations: Words, since: int | None
    ) -> npt.NDArray[np.bool_]:
        """Whether episodes that were shown are as they were: not rewritten, cleared or deleted.

        Args: since: `changes` of the table that showed them, None if nobody knows.
        """
        if self.maps.state.item(_CHANGES) == since:
            return np.asarray(generations != 0)  # of a record that was not found it is 0
        words = self.maps.words.reshape(-1)
        same: npt.NDArray[np.bool_] = (words.take(slots * WORDS) == generations) & (generations & np.uint64(1) == 0)
        same &= words.take(slots * WORDS + SERIAL) == serials.view(np.uint64)
        flags = words.take(slots * WORDS + EXTENT)  # above the length
        same &= (serials >= self.state("base")) & (flags & _DELETED_WORD == 0)
        return same

    def generations(self, slots: IntArray) -> Words:
        """The generation of each slot as it is on disk now."""
        return self.maps.words.reshape(-1).take(slots * WORDS)

    # Trust: what a crash of the machine, or copying beside a writer, may have spoilt is compared with its checksums
    # before it is served.

    @property
    def first_unsettled(self) -> int | None:
        """The first serial that the last writer left in doubt (`format`, "Creating, opening, trusting"); None: none."""
        if self.state("clean") or not self.state("term"):
            return None
        boot = self.maps.state[STATE_WORD["boot"] : STATE_WORD["boot"] + 2].tobytes()
        rebooted = boot != boot_id() or not any(boot)
        if self._is_copy(rebooted):
            return 0
        return self.state("synced") if rebooted else None

    def _is_copy(self, rebooted: bool) -> bool:
        """Whether the files were copied, as `state.npy` is another one than it says of itself."""
        if self.state_file is None or not self.state("inode"):
            return False
        device, inode = self.state_file
        return inode != self.state("inode") or (device != self.state("device") and not rebooted)

    @cached_property
    def _doubts(self) -> tuple[int, int] | None:
        """The serials from the first to before the second are in doubt; None where none is."""
        first, suspect = self.first_unsettled, self.state("suspect")
        if first is None:
            return (self.state("synced"), suspect) if suspect else None
        serials = self.maps.words[:, SERIAL]  # what is recorded from now on is in no doubt
        return first, int(serials[serials < MAX_SERIAL].max(initial=0)) + 1

    @property
    def in_doubt(self) -> bool:
        """Whether some episodes may be spoilt, whose open ones are shown in part."""
        return self._doubts is not None

    def _cut_back(self, columns: Columns) -> Columns:
        """Of open episodes that are in doubt, show what their checksums are of: later steps may not be on the disk."""
        first, stop = self._doubts or (0, 0)
        doubtful = (columns.flags & OPEN != 0) & (columns.serial >= first) & (columns.serial < stop)
        slots = np.flatnonzero(doubtful)
        length = columns.length.copy()
        length[slots] = (self.maps.words[slots, EXTENT] & np.uint64(2**32 - 1)).astype(np.int64)
        return columns._replace(length=length, start=np.minimum(columns.start, length)) if len(slots) else columns

    @cached_property
    def _unverified(self) -> npt.NDArray[np.bool_] | None:
        """(slots,) which slots are still to be checked, or None where all is trusted."""
        if self.verify in ("never", "always", "read"):
            return None
        if self._doubts is None:
            return None
        serial, (first, stop) = self.table.serial, self._doubts
        doubtful = (serial >= first) & (serial < stop)
        return doubtful if bool((doubtful & self.table.valid).any()) else None

    @property
    def trusted(self) -> bool:
        """Whether nothing is left to check, whatever slot is read."""
        return self.verify != "read" and self._unverified is None

    @property
    def tells_by_counter(self) -> bool:
        """Whether whatever was shown at a value of the change counter is right, and as it was, while that stands."""
        doubted = self.verify == "read" or self._unverified is not None or self._doubts is not None
        return not (doubted or self.num_damaged)

    def trust(self, slots: IntArray) -> bool:
        """Check those of `slots` that are still to be checked; False if one failed and is void from now on."""
        if self.verify == "read":
            return not self.check(np.unique(slots))
        pending = self._unverified
        if pending is None or not pending[slots].any():
            return True
        first = np.unique(slots[pending[slots]])
        whole = not self.check(first)
        pending[first] = (
            False  # not before: another thread, or one that is interrupted here, would serve them unchecked
        )
        return whole

    def check(self, slots: IntArray) -> list[tuple[int, str]]:
        """Compare the visible rows of `slots` with their checksums; those that differ are void for this object.

        Returns: (serial, field) of each that differs.
        """
        damaged = [(int(slot), name) for slot in slots for name in self.damaged(int(slot))]
        out = [(int(self.table.serial[slot]), name) for slot, name in damaged]
        self.void([(slot, f"fails the checksum of {name!r}") for slot, name in damaged])
        return out

    def void(self, damaged: list[tuple[int, str]]) -> None:
        """Serve the episodes of slots no more, as each is damaged in a way."""
        for slot, what in damaged:
            self._void[slot] = int(self.table.serial[slot])
            self.num_damaged = len(self._void)
            log.warning("%s: episode %d %s and is not served", self.path, self._void[slot], what)
        if damaged:
            self.journal.doubt()
            self._keep(self.journal.at_once(self))

    def check_always(self) -> None:
        """With `verify="always"`, check everything, also what would come back in the place of damaged episodes."""
        if self.verify == "always":
            self.check(np.flatnonzero(self.refresh().valid))

    def damaged(self, slot: int) -> list[str]:
        """The fields of a slot that differ from their checksums, unless it was rewritten or appended to meanwhile."""
        table = self.table
        length, flags = self.checked_length(slot), int(table.flags[slot])
        if not table.valid[slot] or not flags & CHECKED:
            return []
        bad = self.mismatches(slot, flags, self.checksums_of(slot, length, bool(flags & FINAL)))
        same = self.maps.words[slot, [GENERATION, CHECK]] == (table.generation[slot], table.check[slot])
        return bad if same.all() else []

    def checked_length(self, slot: int) -> int:
        """The timesteps that the checksums of a slot are of: of an open episode fewer than are shown."""
        return self.maps.words.item(slot, EXTENT) & (2**32 - 1)

    def mismatches(self, slot: int, flags: int, checksums: Mapping[str, int]) -> list[str]:
        """The names of which the checksums of a slot are not those that are stored."""
        record, column_of = self.record(slot), self.layout.column_of
        if flags & OPEN and record["columns"] > self.layout.used_columns:
            return []  # its digest is of fields, too, that were added since this was opened
        row = checksum_row(self.layout, checksums) if flags & OPEN else self.maps.checksums[slot].tobytes()
        stored = np.frombuffer(row, "<u4")
        bad = [name for name, value in checksums.items() if value != stored[column_of[name]]]
        if not bad and digest_of(row, record["columns"]) != record["digest"]:
            return ["/checksums"]  # the row is another episode's, or an open episode differs somewhere
        return bad

    def checksums_of(self, slot: int, length: int, has_final: bool) -> dict[str, int]:
        """The checksum of each field, over the first `length` rows of a slot, and of each meta field."""
        checksums = {}
        for name in self.maps.rows:
            first, final = self.start_of(name, slot), self.layout.schema.fields[name].final
            checksums[name] = checksum_of(self.sums_of_rows(name, first, first + length + (final and has_final)))
        return checksums | {name: checksum(values[slot : slot + 1]) for name, values in self.maps.meta.items()}


def slices_of(rows: Array, steps: int) -> Array:
    """A view (N - K + 1,) of N rows whose items are K rows each, as bytes."""
    width = rows.itemsize * math.prod(rows.shape[1:])
    return np.ndarray(len(rows) - steps + 1, (np.void, steps * width), rows, strides=(width,))
