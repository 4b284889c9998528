"""`verify`: every damage of a folder, named by file, slot and field. Reads only, and opens what `Storage` refuses.

`Survey` does the work: a `Storage` that maps of each file what is there. `repair` uses it to learn what to mend.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import numpy as np

from memmap_buffer.cached import cached_property
from memmap_buffer.dtypes import Array
from memmap_buffer.errors import MemmapBufferError
from memmap_buffer.format.blobs import beyond, fault
from memmap_buffer.format.creation import LEFT_BEHIND
from memmap_buffer.format.folder import UPDATE
from memmap_buffer.format.layout import BLOBS, ArrayFile, PlainFile
from memmap_buffer.format.records import (
    CHECK,
    CHECKED,
    DELETED,
    FINAL,
    GENERATION,
    MAX_SERIAL,
    MAX_TERM,
    OPEN,
    RECORD,
    STATE,
    WORDS,
    Words,
    check_of,
    columns_of,
)
from memmap_buffer.format.storage import Maps, Storage
from memmap_buffer.format.syscalls import npy_header
from memmap_buffer.paths import path_of
from memmap_buffer.progress import progress
from memmap_buffer.writing import redo

MAX_TRIED = 1000  # the most damaged records whose one wrong byte is searched for: that takes a millisecond each
WRITING_SECONDS = 0.05  # in which a writer that is at work on a slot ends
LAST = MAX_SERIAL - 1  # the highest serial
_HEADER = re.compile(rb"\{'descr': (.+), 'fortran_order': False, 'shape': \(([0-9, ]*)\), \}")
_NUMBER = re.compile(r"'[<|]([biufcU])([0-9]{1,4})'")


@dataclass(frozen=True)
class Finding:
    """A damage, or another thing in a folder that is not as it should be.

    Attributes:
        file: the name of the file in the folder.
        what: a sentence that describes it.
        slot: the slot; None if it does not apply.
        serial: the number of the episode; None if it does not apply.
        field: the name of the field; None if it does not apply.
        lost: whether something that was published cannot be read; else it is only unfinished, unused or in the way.
    """

    file: str
    what: str
    slot: int | None = None
    serial: int | None = None
    field: str | None = None
    lost: bool = True

    def __str__(self) -> str:
        episode = "" if self.serial is None else f"episode {self.serial}, "
        return f"{self.file}: {self.what}" + ("" if self.slot is None else f" ({episode}slot {self.slot})")


def verify(folder: str | PathLike[str]) -> list[Finding]:
    """Check a folder whole: the schema, every file's size and header, every record, every checksum.

    Args:
        folder: its path. It may be in use: changes made meanwhile are not reported.

    Returns:
        The findings, those that are `lost` first; empty when all is well.

    Raises:
        NotABufferError: there is no buffer.
    """
    return Survey(path_of(folder)).findings()


class Survey(Storage):
    """A folder, read as far as each file goes, so that one broken file does not hide the state of the others.

    Args: path: the folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, read_only=True, verify="never")
        self._broken: dict[str, OSError] = {}

    def findings(self) -> list[Finding]:
        """The findings that `verify` returns."""
        self.folder.require()
        try:
            _ = self.layout
        except MemmapBufferError as error:
            return [Finding("schema.json", f"cannot be read: {self._reason(error, 'schema.json')}")]
        findings = [*self._files(), *self._leftovers()]
        if not self.strangers:  # else the schema may be wrong, and so all that it says of records and rows
            findings += [*self._records(), *self._serials(), *self._episodes(), *self._state()]
        return sorted(findings, key=lambda finding: not finding.lost)

    # The files

    @cached_property
    def maps(self) -> Maps:
        schema = self.layout.schema
        parts = {key: self._entries(key) for key in self.layout.arrays}
        if self.folder.exists("state.npy"):
            self._state_file = self.folder.file_key("state.npy")
        return Maps(
            parts["/episodes"].view(np.uint64).reshape(-1, WORDS),
            parts["/state"].view(np.uint64).reshape(-1),
            parts["/checksums"],
            {name: parts[name] for name in schema.fields if len(parts[name])},
            {name: parts[name] for name in schema.meta_fields if len(parts[name])},
            {name: self._coded(name, field, parts) for name, field in self.layout.coded.items()},
        )

    @property
    def broken(self) -> dict[str, OSError]:
        """Key of each array file that is not as the schema says -> the error of mapping it."""
        _ = self.maps
        return self._broken

    def nothing_of(self, key: str) -> bool:
        """Whether a file is broken and holds no whole entry."""
        if key not in self.broken:
            return False
        entry = math.prod(self._shape(key)[1:]) * self.layout.arrays[key].dtype.itemsize
        return self.size_of(key) - len(self.layout.arrays[key].header) < entry

    def is_lost(self, name: str) -> bool:
        """Whether nothing of a field can be read, as one of its files holds no whole entry."""
        return any(self.nothing_of(key) for key in (name, name + BLOBS) if key in self.layout.arrays)

    def is_broken(self, name: str) -> bool:
        """Whether a file of a field is broken."""
        return not self.broken.keys().isdisjoint(self.layout.keys_of(name))

    def size_of(self, key: str) -> int:
        """The bytes of a broken file; 0 if it is missing or no plain file."""
        return _size(self.broken[key])

    def _shape(self, key: str) -> tuple[int, ...]:
        """The shape (entries, …) of a file; an entry is a record, a row, a value of a meta field, a byte of blobs."""
        if key.endswith(BLOBS):
            return (math.prod(self.layout.arrays[key].shape),)
        return self.layout.rows_shape(key) if key in self.layout.schema.fields else self.layout.arrays[key].shape

    def _entries(self, key: str) -> Array:
        """The whole entries of a file, (entries, …) of its dtype; a short state.npy is padded with zeros."""
        array, shape = self.layout.arrays[key], self._shape(key)[1:]
        raw = self._bytes(key, array)
        if key == "/state" and len(raw) < STATE.itemsize:
            raw = np.concatenate([raw, np.zeros(STATE.itemsize - len(raw), np.uint8)])
        count = len(raw) // (math.prod(shape) * array.dtype.itemsize)
        return raw[: count * math.prod(shape) * array.dtype.itemsize].view(array.dtype).reshape(count, *shape)

    def _bytes(self, key: str, array: ArrayFile) -> Array:
        """The bytes of a file after its header, (n,) uint8, as many as are there."""
        try:
            return self.folder.map(array).reshape(-1).view(np.uint8)
        except OSError as error:
            self._broken[key] = error
            start, size = len(array.header), _size(error)
        if size <= start:
            return np.empty(0, np.uint8)
        return self.folder.map(PlainFile(array.name, size))[start : array.size]

    @cached_property
    def strangers(self) -> dict[str, str]:
        """Key of each file that is whole in itself, but not as the schema says -> its own shape and dtype, as text."""
        own_words = {key: self._own_words(key) for key in self.broken if self.size_of(key)}
        return {key: words for key, words in own_words.items() if words}

    def _own_words(self, key: str) -> str:
        """The shape and dtype in the header of a broken file, if its size fits them: another buffer's file. Else ""."""
        array, size = self.layout.arrays[key], self.size_of(key)
        head = self.folder.map(PlainFile(array.name, size))[:4096].tobytes()
        match = _HEADER.match(head, 10)
        if match is None or size == array.size:
            return ""
        descr, shape = match[1].decode("latin1"), tuple(int(n) for n in match[2].split(b",") if n.strip())
        number = _NUMBER.fullmatch(descr)
        itemsize = int(number[2]) * (4 if number[1] == "U" else 1) if number else array.dtype.itemsize
        header = npy_header(descr, shape)
        is_whole = head.startswith(header) and size == len(header) + math.prod(shape) * itemsize
        return f"shape {shape} of {descr}" if is_whole else ""

    def _files(self) -> Iterator[Finding]:
        for key, array in self.layout.arrays.items():
            field = key.partition("/")[0] or None
            if key in self.strangers:
                what = f"holds {self.strangers[key]}, and schema.json says {array.shape}: one is of another buffer"
                yield Finding(array.name, what, field=field)
            elif key in self.broken:
                yield Finding(array.name, self._reason(self.broken[key], array.name), field=field)
            if self.linked(key):
                yield Finding(array.name, "has another name (a hard link), so it is not written to", lost=False)

    def linked(self, key: str) -> bool:
        """Whether a plain file has a second name, a hard link."""
        is_there = key not in self.broken or self.size_of(key) > 0
        return is_there and not self.folder.alone(self.layout.arrays[key].name)

    def _reason(self, error: Exception, name: str) -> str:
        """The text of an error, without the path and the remedy."""
        return str(error).removeprefix(f"{self.path / name} ").removeprefix(f"{self.path / name}: ").partition(";")[0]

    # The records

    @cached_property
    def spoilt(self) -> dict[int, Words]:
        """Slot -> the words (8,) of its record, for records that are neither valid nor empty."""
        words = self.maps.words.copy()
        good = columns_of(words, self.layout.max_timesteps, self.layout.rows).valid
        odd = words[:, GENERATION] & np.uint64(1) == 1
        return {slot: words[slot] for slot in np.flatnonzero(~good & (odd | words[:, 1:].any(axis=1))).tolist()}

    @cached_property
    def repaired(self) -> Survey:
        """The folder with each spoilt record mended as `repaired_record` can: so it shows the episodes to be saved."""
        survey, words = Survey(self.path), self.maps.words.copy()
        for i, (slot, word) in enumerate(self.spoilt.items()):
            words[slot] = repaired_record(word) if i < MAX_TRIED else word
        survey.layout, survey.maps, survey._broken = self.layout, replace(self.maps, words=words), self.broken
        return survey

    def _records(self) -> Iterator[Finding]:
        served = set(self.repaired.table.visible.tolist())
        candidates = {slot: self._record(slot, word, slot in served) for slot, word in self.spoilt.items()}
        findings = {slot: finding for slot, finding in candidates.items() if finding is not None}
        if any(finding.lost and self.spoilt[slot][GENERATION] & np.uint64(1) for slot, finding in findings.items()):
            time.sleep(WRITING_SECONDS)  # a writer at work on the slot ends, so that its record is another
        for slot, finding in findings.items():
            if self.maps.words[slot].tobytes() == self.spoilt[slot].tobytes():
                yield finding

    def _record(self, slot: int, word: Words, served: bool) -> Finding | None:
        """The finding for a spoilt record; None if nothing is lost: a ring trimmed all of its steps, or the next
        writer finishes its update.

        Args:
            slot, word: the slot, and the words (8,) of its record.
            served: whether the mended record is of a visible episode.
        """
        odd, is_valid = bool(word[GENERATION] & np.uint64(1)), bool(self.repaired.table.valid[slot])
        serial = int(self.repaired.table.serial[slot]) if is_valid else None
        if odd and (is_valid or not word[1:].any()):
            if is_valid and self.repaired.table.start[slot] == self.repaired.table.length[slot]:
                return None  # a ring trimmed all of its steps
            if not served:
                what = "the slot holds no episode: it is being written, or its writer died"
                return Finding("episodes.npy", what, slot, lost=False)
            if slot in self.pending:
                return None
            return Finding("episodes.npy", "the episode was being changed, and what into is lost", slot, serial)
        if is_valid:
            return Finding("episodes.npy", "the record fails its check, in one byte", slot, serial, lost=served)
        if word[CHECK] != check_of(word[None])[0]:
            return Finding("episodes.npy", "the record fails its check", slot)
        what = "out of bounds" if self.layout.rows is None else "out of bounds, or has rows of another"
        return Finding("episodes.npy", f"the record is {what} (length {word.view(RECORD)[0]['length']})", slot)

    def _serials(self) -> Iterator[Finding]:
        table = self.table
        counted = table.valid & (table.serial >= self.state("base"))
        serials, counts = np.unique(table.serial[counted], return_counts=True)
        shown = table.serial[counted & (table.flags & DELETED == 0)]
        for number in np.intersect1d(serials[counts > 1], shown).tolist():
            for slot in np.flatnonzero(counted & (table.serial == number)).tolist():
                yield Finding("episodes.npy", "the serial stands in two slots, so neither is served", slot, number)
        for slot in np.flatnonzero(table.valid & (table.serial == LAST)).tolist():
            yield Finding("episodes.npy", "the serial is the last there is, so none can follow it", slot, LAST)

    # The episodes

    def _episodes(self) -> Iterator[Finding]:
        for slot in progress(self.table.visible.tolist(), "checking"):
            yield from self.episode(slot)

    def episode(self, slot: int) -> Iterator[Finding]:
        """The findings in the rows and checksums of a visible slot."""
        serial, cut = int(self.table.serial[slot]), self.cut(slot)
        for name in cut:
            key = name if name in self.broken else name + BLOBS
            yield Finding(self.layout.arrays[key].name, f"{name!r} is cut off", slot, serial, name)
        faults = {name: self._fault(name, slot) for name in self.layout.coded if name not in cut}
        seen = self.table.generation[slot], self.table.check[slot]
        for name, why in faults.items():
            if why and (self.maps.words[slot, [GENERATION, CHECK]] == seen).all():
                yield Finding(self.layout.arrays[name].name, f"{name!r} {why}", slot, serial, name)
        cut += [name for name, why in faults.items() if why]
        flags = int(self.table.flags[slot])
        if (flags & OPEN and self.broken) or not flags & CHECKED or slot >= len(self.maps.checksums):
            return
        for name in self.damaged(slot):
            if self.maps.words[slot, CHECK] != self.table.check[slot]:
                return  # meanwhile a step was appended, or the episode was closed
            if name in self.layout.schema.all and name not in cut:
                yield self._checksum(slot, serial, name)
            elif name not in cut:
                what = (
                    "open episode fails its checksum" if flags & OPEN else "rows and checksums are of another episode"
                )
                yield Finding("episodes.npy", f"the {what}", slot, serial)

    def _fault(self, name: str, slot: int) -> str:
        """A text that says what is wrong with the index of an episode's blobs; "" if nothing is."""
        field, is_grid = self.layout.coded[name], self.layout.rows is None
        index = self.maps.rows[name][self.rows_of(slot, field.final)].copy() if name in self.maps.rows else None
        region = self.layout.region(name, slot) if is_grid else None
        return "" if index is None else fault(self.maps.coded[name], index, region)

    def _checksum(self, slot: int, serial: int, name: str) -> Finding:
        table = self.table
        checksums = self.checksums_of(slot, self.checked_length(slot), bool(table.flags[slot] & FINAL))
        stored = int(self.maps.checksums[slot, self.layout.column_of[name]])
        # The CRC-32 of changed rows differs in one bit alone in one case of 10^8: so the stored checksum is wrong.
        if (stored ^ checksums[name]).bit_count() == 1:
            return Finding("checksums.npy", f"one bit of the checksum of {name!r} is wrong", slot, serial, name)
        file = self.layout.arrays[name + BLOBS if name in self.layout.coded else name].name
        return Finding(file, f"{name!r} fails its checksum", slot, serial, name)

    def cut(self, slot: int) -> list[str]:
        """The fields whose file, not wholly lost, ends before the last row, blob or value of a visible slot."""
        fields, rows, meta = self.layout.schema.fields, self.maps.rows, self.maps.meta
        cut = [n for n in self.broken.keys() & rows if self.rows_of(slot, fields[n].final).stop > len(rows[n])]
        for name in (name for name in self.layout.coded if name + BLOBS in self.broken and name in rows):
            if beyond(self.maps.coded[name], rows[name][self.rows_of(slot, fields[name].final)]).any():
                cut.append(name)
        return sorted({*cut, *(name for name in self.broken.keys() & meta if slot >= len(meta[name]))})

    def cut_slots(self, fields: set[str]) -> set[int]:
        """The slots of episodes, mended ones included, of which some of these fields are cut off; see `cut`."""
        return {slot for slot in self.repaired.table.visible.tolist() if fields & {*self.repaired.cut(slot)}}

    # The rest

    @property
    def least(self) -> dict[str, int]:
        """The lowest possible values of the counters `next` and `term`, as they follow from the records."""
        table = self.repaired.table
        serials = table.serial[table.valid & (table.serial < LAST)]
        terms = self.repaired.maps.words.view(RECORD)[:, 0]["term"][table.valid]
        return {"next": int(serials.max(initial=-1)) + 1, "term": min(int(terms.max(initial=0)), MAX_TERM // 2) + 1}

    def state_faults(self) -> dict[str, int]:
        """Words of state.npy with an impossible value -> the value that each should have."""
        state, least = self.state, self.least
        # Read before `next`, which only rises: a writer beside this sets no other word higher than `next` is by then.
        words = {name: state(name) for name in ("base", "synced", "suspect", "clean", "term")}
        corrected = {} if state("next") < MAX_SERIAL else {"next": least["next"]}
        following = max(least["next"], corrected.get("next", state("next")))
        bounds = {"base": (following, 0), "synced": (following, 0), "suspect": (following, following), "clean": (1, 0)}
        bounds["term"] = (MAX_TERM - 1, least["term"])
        return corrected | {name: value for name, (highest, value) in bounds.items() if words[name] > highest}

    def _state(self) -> Iterator[Finding]:
        for name, value in self.state_faults().items() if "/state" not in self.broken else ():
            what = f"the word {name!r} is {self.state(name)}, which cannot be; it should be {value}"
            yield Finding("state.npy", what, lost=name == "base")

    @cached_property
    def update_left(self) -> redo.Unfinished:
        """The update in `.redo` that is to be finished; else the reason why there is none."""
        try:
            with redo.unfinished(self) as update:
                return update
        except OSError as error:
            return redo.Unfinished(why=self._reason(error, UPDATE))

    @property
    def pending(self) -> dict[int, redo.Rewrite]:
        """Slot -> the unfinished update of its episode, which the next writer can finish."""
        return {rewrite.slot: rewrite for rewrite in self.update_left.rewrites}

    @property
    def lockable(self) -> bool:
        """Whether `.lock` is a plain file, or missing."""
        lock = self.path / ".lock"
        return not self.folder.exists(".lock") or (lock.is_file() and not lock.is_symlink())

    def _leftovers(self) -> Iterator[Finding]:
        if not self.lockable:
            yield Finding(".lock", "is a link or no plain file, so nothing can be written", lost=False)
        for name in filter(self.folder.exists, LEFT_BEHIND):
            yield Finding(name, "a change of the schema that was not finished", lost=False)
        if self.folder.exists(redo.BAD):
            yield Finding(redo.BAD, "an update that was cut off, and failed its check when it was finished", lost=False)
        if not self.folder.exists(UPDATE):
            return
        for slot, rewrite in self.pending.items():
            what = "an update that is being carried out, or that the next writer finishes"
            yield Finding(UPDATE, what, slot, rewrite.serial, lost=False)
        if self.update_left.why:
            yield Finding(UPDATE, f"it {self.update_left.why}, so no update is finished by it", lost=False)
        elif not self.pending:
            yield Finding(UPDATE, "an update that was not finished, or of no episode that is here", lost=False)


def _size(error: OSError) -> int:
    """The bytes of the file that an error of `Folder` is about; 0 if there is no such file."""
    return int(getattr(error, "named", {}).get("size", 0))


def repaired_record(word: Words) -> Words:
    """A record, (8,) uint64, with its generation made even, or with its one wrong byte corrected; else as it is.

    Whether a candidate is right, the check tells: of 64 bits, it fits one of the 16,320 records that differ in one byte
    by accident with a probability of 10⁻¹⁵.
    """
    even = word.copy()
    even[GENERATION] &= ~np.uint64(1)
    if even[CHECK] == check_of(even[None])[0]:
        return _within_its_length(even)
    candidates = np.repeat(word[None], 255 * RECORD.itemsize, axis=0)
    which = np.arange(len(candidates))
    candidates.view(np.uint8)[which, which % RECORD.itemsize] ^= (1 + which // RECORD.itemsize).astype(np.uint8)
    fitting = candidates[candidates[:, CHECK] == check_of(candidates)]
    return np.asarray(fitting[0] if len(fitting) == 1 else word)


def _within_its_length(word: Words) -> Words:
    """The record with possible shown steps, which its check does not cover: a closed episode shows its last step."""
    record = word.view(RECORD)
    if not record["flags"] & OPEN:
        record["stop"] = record["length"]
    record["start"] *= record["start"] <= record["stop"]
    return word
