"""A consistent copy of a live buffer, taken without its lock."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from memmap_buffer.errors import SchemaMismatchError, StaleEpisodeError
from memmap_buffer.store.files import close_all, copy_range, write_all, write_word
from memmap_buffer.store.folder import Folder
from memmap_buffer.store.lock import WriterLock
from memmap_buffer.store.records import FINAL, GENERATION, RECORD, STATE_WORD, Words
from memmap_buffer.store.storage import EpisodeTable, Storage, creating

ROUNDS = 100
BESIDE = ("priority", "extra")


def snapshot(source: Storage, path: Path) -> None:
    """Copy the visible episodes into a new folder; a writer may go on meanwhile.

    Slots are copied, then their generations read again; what moved is copied again from a fresh table, and the
    records come last. An episode that was visible at the end of the call is in the copy as it was at one moment.

    Args: source: the folder, open. path: where the copy goes; no buffer may be there.
    Raises: SchemaMismatchError: one is. StaleEpisodeError: the ring turns faster than it can be copied.
    """
    target = Folder(path)
    target.create()
    lock = WriterLock(target)
    lock.acquire()
    try:
        if target.exists("schema.json"):
            raise SchemaMismatchError(f"{path} holds a buffer already; give a folder without one", path=path)
        with creating(target, source.layout):
            _copy(source, target)
        for name in [f"{sub}/{name}" for sub in BESIDE for name in source.folder.list(sub)]:
            source.folder.copy_file(name, target)
    finally:
        lock.release()


def _copy(source: Storage, target: Folder) -> None:
    arrays = source.layout.arrays
    here: dict[str, int] = {}
    there: dict[str, int] = {}
    try:
        for key, array in arrays.items():
            here[key] = source.folder.open_to_read(array.name, array.header, array.size)
            there[key] = target.open_to_write(array.name, array.header, array.size)
        table, records = _copy_slots(source, here, there)
        for slot, record in records.items():
            write_all(there["/episodes"], record, arrays["/episodes"].offset(slot))
        following = max(source.state("next"), int(table.serial[table.visible].max(initial=-1)) + 1)
        words = {"next": following, "base": source.state("base"), "changes": 1, "clean": 1, "epoch": 1}
        for name, value in words.items():
            write_word(there["/state"], value, arrays["/state"].offset(0) + 8 * STATE_WORD[name])
    finally:
        close_all(here)
        close_all(there)


def _copy_slots(source: Storage, here: dict[str, int], there: dict[str, int]) -> tuple[EpisodeTable, dict[int, bytes]]:
    """Copy until no visible slot was overwritten during it; (the table, slot -> record)."""
    copied: dict[int, bytes] = {}
    for _ in range(ROUNDS):
        table = source.refresh()
        slots = table.visible
        words = source.maps.words[slots]
        if not np.array_equal(words[:, GENERATION], table.generation[slots]):
            continue
        for slot, word in zip(slots.tolist(), words, strict=True):
            record = word.tobytes()
            if copied.get(slot) != record:
                _copy_slot(source, *_extent(word), slot, here, there)
                copied[slot] = record
        if np.array_equal(source.generations(slots), words[:, GENERATION]):
            return table, {slot: copied[slot] for slot in slots.tolist()}
    raise StaleEpisodeError(
        f"{source.path}: the ring turns faster than it can be copied; pause its writer, or copy less"
    )


def _copy_slot(
    source: Storage, length: int, flags: int, slot: int, here: dict[str, int], there: dict[str, int]
) -> None:
    layout = source.layout
    for name, field in layout.schema.fields.items():
        first = int(source.first_row(np.array([slot]), field.final)[0])
        count = length + (field.final and bool(flags & FINAL))
        copy_range(here[name], there[name], layout.row_offset(name, first), count * field.itemsize)
    for name in ("/checksums", *layout.schema.meta_fields):
        array = layout.arrays[name]
        copy_range(here[name], there[name], array.offset(slot), array.offset(slot + 1) - array.offset(slot))


def _extent(word: Words) -> tuple[int, int]:
    """(length, flags) of a record."""
    record = word.view(RECORD)[0]
    return int(record["length"]), int(record["flags"])
