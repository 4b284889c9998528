"""Changing a published episode in place, atomically: first all new bytes into `.redo`, then the files.

The file is `MBREDO1\\n`, a u8 length and a u8 CRC-32, then that many bytes of JSON {slot, serial, generation, record,
pieces: [[file, offset, size], …]} and the pieces' bytes one after another; the CRC covers all behind it. `generation`
is the even one before the change; `record` is the new record in hexadecimal.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from memmap_buffer.store.files import write_all
from memmap_buffer.store.layout import Layout
from memmap_buffer.store.publication import Files, Publication
from memmap_buffer.store.records import CHECK, CHECKED, FINAL, GENERATION, INNER_END, RECORD, TERMINATED, check_of, seal
from memmap_buffer.store.storage import Storage, crc32, digest_of
from memmap_buffer.values import Array

log = logging.getLogger("memmap_buffer")

NAME = ".redo"
MAGIC = b"MBREDO1\n"
MAX_HEAD = 1 << 20


@dataclass(frozen=True)
class Rewrite:
    """New bytes for one slot: `pieces` are (file key, offset, bytes), `record` is the whole new record."""

    slot: int
    serial: int
    generation: int
    record: bytes
    pieces: list[tuple[str, int, bytes]]

    def to_bytes(self) -> bytes:
        head = {"slot": self.slot, "serial": self.serial, "generation": self.generation, "record": self.record.hex()}
        text = json.dumps({**head, "pieces": [[key, offset, len(data)] for key, offset, data in self.pieces]}).encode()
        body = text + b"".join(data for _, _, data in self.pieces)
        return MAGIC + len(text).to_bytes(8, "little") + crc32(body).to_bytes(8, "little") + body

    @classmethod
    def from_bytes(cls, raw: bytes) -> Rewrite | None:
        """The rewrite, or None if the file is torn, or none that `to_bytes` makes."""
        size, crc, body = int.from_bytes(raw[8:16], "little"), int.from_bytes(raw[16:24], "little"), raw[24:]
        if raw[:8] != MAGIC or size > min(len(body), MAX_HEAD) or crc32(body) != crc:
            return None
        try:
            head = json.loads(body[:size])
            pieces, start = [], size
            for key, offset, length in head["pieces"]:
                pieces.append((str(key), _whole(offset), body[start : start + _whole(length)]))
                start += length
            slot, serial, generation = (_whole(head[key]) for key in ("slot", "serial", "generation"))
            record = bytes.fromhex(head["record"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        whole = start == len(body) and len(record) == RECORD.itemsize
        return cls(slot, serial, generation, record, pieces) if whole else None


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise TypeError(f"got {value!r}, expected a whole number")
    return value


def plan(
    files: Files,
    slot: int,
    rows: Mapping[str, Array],
    meta: Mapping[str, Array],
    finals: Mapping[str, Array] | None = None,
) -> Rewrite:
    """The rewrite that replaces the first timesteps of some fields, and some meta fields, of a visible slot.

    Args:
        rows: name -> (t, *field) stored values for steps 0 … t - 1, t at most the episode's length.
        meta: name -> one stored value. finals: the final observation, for an episode that has none.
    """
    storage, layout = files.storage, files.layout
    record = storage.maps.words[slot].view(RECORD)[0]
    values = {key: int(record[key]) for key in RECORD.names or ()}
    length, flags = values["length"], values["flags"]
    column_of, checksums = layout.column_of, storage.maps.checksums[slot].copy()
    pieces = []
    if not rows.keys().isdisjoint(layout.schema.ends):
        flags = flags & ~(TERMINATED | INNER_END) | _ended(storage, slot, length, rows)
    for name, new in rows.items():
        final = layout.schema.fields[name].final
        first = int(storage.first_row(np.array([slot]), final)[0])
        pieces.append((name, layout.row_offset(name, first), new.tobytes()))
        kept = storage.maps.rows[name][first + len(new) : first + length + (final and bool(flags & FINAL))]
        checksums[column_of[name]] = crc32(kept, crc32(new))
    for name, value in (finals or {}).items():
        first, flags = int(storage.first_row(np.array([slot]), True)[0]), flags | FINAL
        pieces.append((name, layout.row_offset(name, first + length), value.tobytes()))
        checksums[column_of[name]] = crc32(value, crc32(storage.maps.rows[name][first : first + length]))
    for name, value in meta.items():
        pieces.append((name, layout.arrays[name].offset(slot), value.tobytes()))
        checksums[column_of[name]] = crc32(value)
    if flags & CHECKED and files.checksum:
        pieces.append(("/checksums", layout.arrays["/checksums"].offset(slot), checksums.tobytes()))
    else:
        flags &= ~CHECKED
    generation, columns = values["generation"], values["columns"] * bool(flags & CHECKED)
    digest = digest_of(checksums.tobytes(), columns)
    values |= {"generation": generation + 2, "flags": flags, "columns": columns, "digest": digest}
    return Rewrite(slot, values["serial"], generation, seal(**values), pieces)


def _ended(storage: Storage, slot: int, length: int, rows: Mapping[str, Array]) -> int:
    """The flags that say how an episode ends, once the first timesteps of some fields are replaced."""
    schema, flags = storage.layout.schema, 0
    for name in schema.ends:
        first = int(storage.first_row(np.array([slot]), schema.fields[name].final)[0])
        column = storage.maps.rows[name][first : first + length].copy()
        column[: len(rows.get(name, ()))] = rows.get(name, 0)
        flags |= INNER_END * bool(column[:-1].any()) | TERMINATED * (
            name == schema.terminated and bool(column[-1].any())
        )
    return flags


def close(
    files: Files, publication: Publication, flags: int, final: Mapping[str, Array], meta: Mapping[str, Array]
) -> Rewrite:
    """The rewrite that ends an episode whose steps are published, with meta that was set after the first of them."""
    record, pieces = publication.closing(flags, final, meta)
    generation = int(files.storage.maps.words[publication.slot, GENERATION])
    return Rewrite(publication.slot, publication.serial, generation, record, pieces)


def carry_out(files: Files, rewrite: Rewrite) -> None:
    """Write the redo file, then the change itself.

    Raises: OSError: before the redo file was whole nothing changed; after it, the next holder of the lock finishes.
    """
    folder = files.storage.folder
    try:
        folder.write_new(NAME, rewrite.to_bytes(), sync=files.power)
    except BaseException:
        folder.unlink(NAME, missing_ok=True)
        raise
    _apply(files, rewrite, files.barriers)


def finish(files: Files) -> None:
    """Carry a redo file that a dead writer left through to its end; drop a torn one."""
    folder = files.storage.folder
    if not folder.exists(NAME):
        return
    slot = sum(array.offset(1) - array.offset(0) for array in files.layout.arrays.values())
    rewrite = Rewrite.from_bytes(folder.read(NAME, MAX_HEAD + slot))
    if rewrite is None or not _applies(files, rewrite):
        files.changed()  # it may have been carried out, but for this
        folder.unlink(NAME)
        return
    log.warning("%s: finishing an update of episode %d that was interrupted", folder.path, rewrite.serial)
    _apply(files, rewrite, files.sync)  # whatever the durability of this writer: the dead one's may have been "power"


def _applies(files: Files, rewrite: Rewrite) -> bool:
    """Whether the slot still holds the episode that was being changed, and every piece lies within its rows."""
    layout = files.layout
    if not layout.writable or rewrite.slot >= layout.slots:
        return False
    words, new = files.storage.maps.words[rewrite.slot], np.frombuffer(rewrite.record, np.uint64)
    old, record = words.view(RECORD)[0], new.view(RECORD)[0]
    steps = int(words[GENERATION]) - rewrite.generation
    same = all(old[name] == record[name] for name in ("serial", "length", "first_row"))
    sealed = new[CHECK] == check_of(new[None])[0] and int(record["generation"]) == rewrite.generation + 2
    return bool(
        (same and sealed and old["serial"] == rewrite.serial and 0 <= steps <= 1)
        and all(_inside(layout, rewrite.slot, *piece) for piece in rewrite.pieces)
    )


def _inside(layout: Layout, slot: int, key: str, offset: int, data: bytes) -> bool:
    """Whether a piece lies within the bytes of a slot: `.redo` may come from a stranger."""
    if key not in layout.schema.all and key != "/checksums":
        return False
    array = layout.arrays[key]
    return array.offset(slot) <= offset <= array.offset(slot + 1) - len(data)


def _apply(files: Files, rewrite: Rewrite, wait: Callable[..., None]) -> None:
    files.write_generation(rewrite.slot, rewrite.generation | 1)
    for key, offset, data in rewrite.pieces:
        write_all(files.fd[key], data, offset)
    wait(*dict.fromkeys(key for key, _, _ in rewrite.pieces))
    files.write_record(rewrite.slot, rewrite.record)
    wait("/episodes")
    files.changed()
    files.storage.folder.unlink(NAME)
