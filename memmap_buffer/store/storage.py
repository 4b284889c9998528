"""The open arrays of one folder and its episode table.

`Storage` creates and opens; it never writes to a folder that is complete. It pickles as a path and opens its maps on
first use, so a DataLoader worker costs no copy of the data. `EpisodeTable` is what the records said at one moment.
"""

from __future__ import annotations

import logging
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.errors import CorruptBufferError, SchemaError
from memmap_buffer.store.files import CAN_RESERVE
from memmap_buffer.store.folder import Folder
from memmap_buffer.store.host import boot_id
from memmap_buffer.store.layout import MAX_SCHEMA_BYTES, Layout
from memmap_buffer.store.records import (
    CHECK,
    CHECKED,
    DELETED,
    FINAL,
    GENERATION,
    OPEN,
    RECORD,
    STATE_WORD,
    WORDS,
    Words,
    valid,
)
from memmap_buffer.values import Array

log = logging.getLogger("memmap_buffer")

IntArray = npt.NDArray[np.int64]
crc32: Callable[..., int] = zlib.crc32  # of any buffer; numpy does not tell mypy that arrays are
VERIFY = ("auto", "always", "read", "never")
_DELETED_WORD = np.uint64(DELETED << 32)


@dataclass(frozen=True)
class EpisodeTable:
    """The records at one moment, by slot, and the visible slots in the order of their serials.

    Attributes: changes: the change counter before the records were read; generation, serial, length, flags, check, and
        valid (whether the slot holds an episode, visible or not): (slots,); visible: (episodes,) slots, oldest first.
    """

    changes: int
    generation: Words
    serial: IntArray
    length: IntArray
    flags: npt.NDArray[np.uint32]
    check: Words
    valid: npt.NDArray[np.bool_]
    visible: IntArray

    def __len__(self) -> int:
        return len(self.visible)

    def shows(self, slots: IntArray, serials: IntArray) -> npt.NDArray[np.bool_]:
        """Whether each slot holds the visible episode of that serial."""
        return np.asarray((self.serial[slots] == serials) & self._shown[slots])

    @cached_property
    def _shown(self) -> npt.NDArray[np.bool_]:
        shown = np.zeros(len(self.serial), np.bool_)
        shown[self.visible] = True
        return shown

    @cached_property
    def steps(self) -> int:
        """Visible timesteps."""
        return int(self.length[self.visible].sum())


@dataclass(frozen=True)
class Maps:
    """The mapped files: `words` (slots, 8) u8, `state` (32,) u8, `checksums`, per-timestep rows and meta by name."""

    words: Words
    state: Words
    checksums: Array
    rows: dict[str, Array]
    meta: dict[str, Array]


def check_verify(verify: str) -> None:
    """Raise SchemaError unless `verify` is one of `VERIFY`."""
    if verify not in VERIFY:
        raise SchemaError(f"verify: got {verify!r}, expected one of {', '.join(map(repr, VERIFY))}")


class Storage:
    """One folder, open for reading.

    Args:
        path: the folder. read_only: nothing may ever be written through this object.
        verify: when checksums are compared: "auto" (what may have been lost in a crash of the machine, when it is
            first read), "always" (everything, on opening), "read" (at every read), "never".
    """

    def __init__(self, path: str | PathLike[str], *, read_only: bool = False, verify: str = "auto") -> None:
        self.path = Path(path)
        self.folder = Folder(self.path)
        self.read_only = read_only
        self.verify = verify
        self._table: EpisodeTable | None = None
        self._void: dict[int, int] = {}

    @classmethod
    def open(cls, path: str | PathLike[str], *, read_only: bool = False, verify: str = "auto") -> Storage:
        """Open and check a folder.

        Raises: NotABufferError. SchemaError: an unknown version. CorruptBufferError: a file is missing, a link, or not
            exactly of the size and header that the schema says.
        """
        check_verify(verify)
        storage = cls(path, read_only=read_only, verify=verify)
        storage.refresh()
        storage.check_always()
        return storage

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "read_only": self.read_only, "verify": self.verify}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @cached_property
    def layout(self) -> Layout:
        self.folder.require()
        return Layout.from_json(self.folder.read("schema.json", MAX_SCHEMA_BYTES), str(self.path / "schema.json"))

    @cached_property
    def maps(self) -> Maps:
        arrays = self.layout.arrays
        mapped = {key: self.folder.map(a.name, a.header, a.dtype, a.shape) for key, a in arrays.items()}
        schema = self.layout.schema
        return Maps(
            mapped["/episodes"].view(np.uint64).reshape(-1, WORDS),
            mapped["/state"].view(np.uint64).reshape(-1),
            mapped["/checksums"],
            {name: mapped[name].reshape(self.layout.rows_shape(name)) for name in schema.fields},
            {name: mapped[name] for name in schema.meta_fields},
        )

    def state(self, name: str) -> int:
        """A word of state.npy."""
        return int(self.maps.state[STATE_WORD[name]])

    @property
    def table(self) -> EpisodeTable:
        """The episode table as last read."""
        return self._table if self._table is not None else self.refresh()

    def refresh(self) -> EpisodeTable:
        """The episode table as it is now: one look at the change counter, then only what changed."""
        changes = self.state("changes")
        if self._table is not None and self._table.changes == changes:
            return self._table
        table = self._read_table(changes)
        for _ in range(20):
            # A visible episode may be under an odd generation for the moment of an `update`; a dead writer's stays odd.
            if self._table is None or not self._being_updated(table, self._table):
                break
            time.sleep(0.001)
            table = self._read_table(changes)
        self._table = table
        return table

    def reread(self) -> EpisodeTable:
        """The episode table from the records, without a look at the change counter."""
        self._table = self._read_table(self.state("changes"))
        return self._table

    def _being_updated(self, new: EpisodeTable, old: EpisodeTable) -> bool:
        gone = old.visible[~new.valid[old.visible]]
        same = self.maps.words[gone, GENERATION] & np.uint64(1) == 1
        return bool((same & (new.serial[gone] == old.serial[gone])).any())

    def _read_table(self, changes: int) -> EpisodeTable:
        words = self.maps.words.copy()
        record = words.view(RECORD)[:, 0]
        good = valid(words, self.layout.max_timesteps, self.layout.rows)
        serial = record["serial"].astype(np.int64)
        for slot, number in self._void.items():
            good[slot] &= serial[slot] != number
        length, flags = record["length"].astype(np.int64), record["flags"].copy()
        shown = good & (serial >= self.state("base"))
        visible = self._visible(np.flatnonzero(shown), serial, length, flags)
        generation, check = words[:, GENERATION].copy(), words[:, CHECK].copy()
        return EpisodeTable(changes, generation, serial, length, flags, check, good, visible)

    def _visible(self, slots: IntArray, serial: IntArray, length: IntArray, flags: npt.NDArray[np.uint32]) -> IntArray:
        slots = slots[np.argsort(serial[slots], kind="stable")]
        twice = np.diff(serial[slots]) == 0
        if twice.any():
            numbers = np.unique(serial[slots][1:][twice])
            log.warning("%s: serials %s stand in two slots each and are not served; see `verify`", self.path, numbers)
            slots = slots[~np.isin(serial[slots], numbers)]
        slots = slots[flags[slots] & DELETED == 0][-self.layout.max_episodes :]
        if self.layout.max_steps is not None:
            fits = np.cumsum(length[slots][::-1])[::-1] <= self.layout.max_steps
            slots = slots[fits]
        return slots

    def first_row(self, slots: IntArray, final: bool) -> IntArray:
        """The row of step 0 of each slot, in files with or without `final`."""
        if self.layout.rows is None:
            return slots * (self.layout.max_timesteps + final)
        first = self.maps.words.reshape(-1)[slots * WORDS + 3].astype(np.int64)
        return first + slots if final else first

    def unmoved(self, slots: IntArray, serials: IntArray, generations: Words) -> npt.NDArray[np.bool_]:
        """Whether episodes that the table shows are as they were then: not rewritten, cleared or deleted since."""
        same: npt.NDArray[np.bool_] = self.generations(slots) == generations
        if self.state("changes") != self.table.changes:
            flags = self.maps.words.reshape(-1).take(slots * WORDS + 2)  # length and flags
            same &= (serials >= self.state("base")) & (flags & _DELETED_WORD == 0)
        return same

    def generations(self, slots: IntArray) -> Words:
        """The generation of each slot as it is on disk now."""
        return self.maps.words.reshape(-1).take(slots * WORDS)

    # Trust: what was written before a crash of the machine is compared with its checksums before it is served.

    @cached_property
    def _unverified(self) -> npt.NDArray[np.bool_] | None:
        """(slots,) which slots are still to be checked, or None where all is trusted."""
        if self.verify in ("never", "always", "read"):
            return None
        serial = self.table.serial
        boot = self.maps.state[STATE_WORD["boot"] : STATE_WORD["boot"] + 2].tobytes()
        rebooted = not self.state("clean") and (boot != boot_id() or not any(boot)) and self.state("epoch") > 0
        doubtful = (serial >= self.state("synced")) & (rebooted | (serial < self.state("suspect")))
        return doubtful if bool((doubtful & self.table.valid).any()) else None

    def trust(self, slots: IntArray) -> bool:
        """Check those of `slots` that are still to be checked; False if one failed and is void from now on."""
        if self.verify == "read":
            return not self.check(np.unique(slots))
        pending = self._unverified
        if pending is None or not pending[slots].any():
            return True
        first = np.unique(slots[pending[slots]])
        pending[first] = False
        return not self.check(first)

    def check(self, slots: IntArray) -> list[tuple[int, str]]:
        """Compare the visible rows of `slots` with their checksums; those that differ are void for this object.

        Returns: (serial, field) of each that differs.
        """
        damaged = [(int(slot), name) for slot in slots for name in self.damaged(int(slot))]
        out = [(int(self.table.serial[slot]), name) for slot, name in damaged]
        for slot, name in damaged:
            self._void[slot] = int(self.table.serial[slot])
            log.warning("%s: episode %d fails the checksum of %r and is not served", self.path, self._void[slot], name)
        if damaged:
            self._table = self._read_table(self.table.changes)
        return out

    def check_always(self) -> None:
        """With `verify="always"`, check everything, also what would come back in the place of damaged episodes."""
        if self.verify == "always":
            self.check(np.flatnonzero(self.refresh().valid))

    @property
    def num_damaged(self) -> int:
        """How many episodes were found damaged so far."""
        return len(self._void)

    def damaged(self, slot: int) -> list[str]:
        """The fields of a slot that differ from their checksums, unless it was rewritten or appended to meanwhile."""
        table = self.table
        generation = table.generation[slot]
        length, flags = int(table.length[slot]), int(table.flags[slot])
        if not table.valid[slot] or not flags & CHECKED:
            return []
        crcs = dict(self.column_crcs(slot, length, bool(flags & FINAL)))
        record, column_of = self.maps.words[slot].view(RECORD)[0], self.layout.column_of
        row = checksum_row(self.layout, crcs) if flags & OPEN else self.maps.checksums[slot].tobytes()
        stored = np.frombuffer(row, "<u4")
        bad = [name for name, crc in crcs.items() if crc != stored[column_of[name]]]
        if not bad and digest_of(row, int(record["columns"])) != int(record["digest"]):
            bad = ["/checksums"]  # the row is another episode's, or an open episode differs somewhere
        same = self.generations(np.array([slot]))[0] == generation and self.maps.words[slot, CHECK] == table.check[slot]
        return bad if same else []

    def column_crcs(self, slot: int, length: int, has_final: bool) -> Iterator[tuple[str, int]]:
        """(name, CRC-32 over the visible rows) of every field and meta field of a slot."""
        for name, rows in self.maps.rows.items():
            final = self.layout.schema.fields[name].final
            first = int(self.first_row(np.array([slot]), final)[0])
            yield name, crc32(rows[first : first + length + (final and has_final)])
        for name, values in self.maps.meta.items():
            yield name, crc32(values[slot : slot + 1])


def checksum_row(layout: Layout, crcs: Mapping[str, int]) -> bytes:
    """A slot's row of checksums.npy: each name's CRC-32 in its column, zeros in the spare ones."""
    row = [0] * layout.columns
    for name, crc in crcs.items():
        row[layout.column_of[name]] = crc
    return struct.pack(f"<{layout.columns}I", *row)


def digest_of(row: bytes, columns: int) -> int:
    """What the record carries of its row of checksums.npy: CRC-32 of the first `columns` entries."""
    return crc32(row[: 4 * columns])


def create(folder: Folder, layout: Layout, reserve: bool = False) -> None:
    """Make a new, empty buffer in a folder whose lock is held. Killed anywhere, it leaves none.

    Args: reserve: take the disk space of every file now, so that no episode ever meets a full disk.
    Raises: CorruptBufferError: a file of another is in the way. SchemaError: too large for the file system. OSError.
    """
    with creating(folder, layout, reserve):
        pass


@contextmanager
def creating(folder: Folder, layout: Layout, reserve: bool = False) -> Iterator[None]:
    """The files of a new buffer, open to be filled in the block; it is a buffer only when the block has ended."""
    discard_unfinished(folder)
    arrays = list(layout.arrays.values())
    for array in arrays:
        if folder.exists(array.name):
            path = folder.path / array.name
            raise CorruptBufferError(f"{path} is in the way and is not ours to replace; move it away", path=path)
    total, free = sum(array.size for array in arrays), folder.free_bytes()
    if total > free and not reserve:
        text = "%s: the buffer may grow to %.1f GB, %.1f GB are free here; writing raises ENOSPC when they are used up"
        log.warning(text, folder.path, total / 1e9, free / 1e9)
    try:
        folder.write_new("schema.json.new", layout.to_json(), sync=True)
        for key, array in layout.arrays.items():
            whole = CAN_RESERVE and key in ("/episodes", "/state")
            folder.create_array(array.name, array.header, array.size, reserve or whole)
        yield
        for array in arrays:
            folder.sync_array(array.name)
        folder.sync_folders(*{array.name.rpartition("/")[0] for array in arrays})
        folder.rename("schema.json.new", "schema.json")
    except BaseException:
        discard_unfinished(folder)  # nothing, once it was renamed
        raise


def discard_unfinished(folder: Folder) -> None:
    """Remove what only a `schema.json.new` names: a creation or an added field that was never finished."""
    try:
        planned = _listed(folder, "schema.json.new")
    except FileNotFoundError:
        return
    kept = _listed(folder, "schema.json") if folder.exists("schema.json") else set()
    for name in planned - kept:
        folder.unlink(name, missing_ok=True)
    # Not before the files are gone for good: without it nobody could tell whose they are.
    for sub in {name.rpartition("/")[0] for name in planned - kept}:
        with suppress(FileNotFoundError, CorruptBufferError):  # it was never made, or is not ours
            folder.sync_folders(sub)
    folder.unlink("schema.json.new")


def remove(folder: Folder) -> None:
    """Remove a buffer whose lock is held: it becomes one that was never finished, and is discarded as such."""
    _listed(folder, "schema.json")  # refuse one that tells of no files
    discard_unfinished(folder)
    folder.unlink(".redo", missing_ok=True)
    for name in folder.list("priority"):
        if name.endswith(".head.npy"):  # it names serials, which begin anew
            folder.unlink(f"priority/{name}")
    folder.rename("schema.json", "schema.json.new")
    discard_unfinished(folder)


def _listed(folder: Folder, name: str) -> set[str]:
    data = folder.read(name, MAX_SCHEMA_BYTES)
    try:
        return {array.name for array in Layout.from_json(data, name).arrays.values()}
    except (CorruptBufferError, SchemaError):
        if name == "schema.json.new" and Layout.may_be_torn(data):
            return set()  # it is complete on the disk before the first file is made
        raise
