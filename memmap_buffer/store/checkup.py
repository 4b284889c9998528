"""Looking a folder over: every damage named by file, slot and field. Reads only, and opens what `Storage` refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from memmap_buffer.errors import CorruptBufferError, MemmapBufferError
from memmap_buffer.store import redo
from memmap_buffer.store.layout import Layout
from memmap_buffer.store.records import CHECK, GENERATION, RECORD, Words, check_of, valid
from memmap_buffer.store.storage import Storage


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        file: its name in the folder. what: a sentence. slot, serial, field: where, as far as it applies.
        lost: whether something that was published cannot be read; else it is only unfinished or unused.
    """

    file: str
    what: str
    slot: int | None = None
    serial: int | None = None
    field: str | None = None
    lost: bool = True

    def __str__(self) -> str:
        where = "" if self.serial is None else f" (episode {self.serial}, slot {self.slot})"
        return f"{self.file}: {self.what}{where}"


def verify(folder: str | PathLike[str]) -> list[Finding]:
    """Check a folder whole: the schema, every file's size and header, every record, every checksum.

    Args: folder: it may be in use; what changes meanwhile is not reported.
    Returns: what was found, the gravest first; empty when all is well.
    Raises: NotABufferError: there is no buffer.
    """
    storage = Storage(Path(folder), read_only=True, verify="never")
    storage.folder.require()
    try:
        layout = storage.layout
    except MemmapBufferError as error:
        return [Finding("schema.json", f"cannot be read: {error}")]
    broken = [finding for finding in map(_file_finding, [storage] * len(layout.arrays), layout.arrays) if finding]
    if broken:
        return broken + list(_leftovers(storage))
    found = [*_record_findings(storage), *_checksum_findings(storage), *_state_findings(storage), *_leftovers(storage)]
    return sorted(found, key=lambda finding: not finding.lost)


def _file_finding(storage: Storage, key: str) -> Finding | None:
    array = storage.layout.arrays[key]
    try:
        storage.folder.map(array.name, array.header, array.dtype, array.shape)
    except (CorruptBufferError, OSError) as error:
        return Finding(array.name, str(error), field=None if key.startswith("/") else key)
    return None


def _record_findings(storage: Storage) -> Iterator[Finding]:
    words = storage.maps.words.copy()
    good = valid(words, storage.layout.max_timesteps, storage.layout.rows)
    used = words.any(axis=1)
    odd = words[:, GENERATION] & np.uint64(1) == 1
    for slot in np.flatnonzero(used & ~good & ~odd).tolist():
        if storage.maps.words[slot].tobytes() == words[slot].tobytes():
            yield Finding("episodes.npy", f"the record of slot {slot} {_fault(words[slot], storage.layout)}", slot)
    yield from _interrupted(storage, words, odd)
    serial = words.view(RECORD)[:, 0]["serial"]
    numbers, counts = np.unique(serial[good], return_counts=True)
    for number in numbers[counts > 1].tolist():
        slots = np.flatnonzero(good & (serial == number)).tolist()
        yield Finding(
            "episodes.npy", f"serial {number} stands in slots {slots}, so neither is served", slots[0], number
        )


def _fault(word: Words, layout: Layout) -> str:
    if word[CHECK] != check_of(word[None])[0]:
        return "fails its check"
    return f"is out of bounds (length {word.view(RECORD)[0]['length']}, max_timesteps {layout.max_timesteps})"


def _interrupted(storage: Storage, words: Words, odd: np.ndarray) -> Iterator[Finding]:
    """Slots under an odd generation that no living writer is filling are unused, unless an update was cut off."""
    for slot in np.flatnonzero(odd & (storage.maps.words[:, GENERATION] == words[:, GENERATION])).tolist():
        yield Finding("episodes.npy", f"slot {slot} is being written, or its writer died", slot, lost=False)


def _checksum_findings(storage: Storage) -> Iterator[Finding]:
    table = storage.table
    for slot in table.visible.tolist():
        for name in storage.damaged(slot):
            file = storage.layout.arrays[name].name if name in storage.layout.arrays else "data"
            yield Finding(file, f"{name!r} fails its checksum", slot, int(table.serial[slot]), name)


def _state_findings(storage: Storage) -> Iterator[Finding]:
    serial = storage.table.serial[storage.table.valid]
    following = int(serial.max(initial=-1)) + 1
    if storage.state("base") > max(storage.state("next"), following):
        yield Finding(
            "state.npy", f"base {storage.state('base')} lies beyond the last serial, which hides every episode"
        )


def _leftovers(storage: Storage) -> Iterator[Finding]:
    folder = storage.folder
    if folder.exists("schema.json.new"):
        yield Finding(
            "schema.json.new", "a change of the schema was not finished; the next writer removes it", lost=False
        )
    if folder.exists(redo.NAME):
        torn = redo.Rewrite.from_bytes(folder.read(redo.NAME, redo.MAX_BYTES)) is None
        what = "a torn update, which changed nothing" if torn else "an update that the next writer finishes"
        yield Finding(redo.NAME, what, lost=False)
