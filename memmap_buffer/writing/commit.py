"""Writing one slot: rows as they come, then the record that makes them an episode.

Every way to write ends here, in `commit`. The order of the writes is in `files`, "Publishing".
"""

from __future__ import annotations

import struct
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from memmap_buffer.dtypes import Array
from memmap_buffer.format.host import file_system
from memmap_buffer.format.layout import Layout
from memmap_buffer.format.lock import WriterLock
from memmap_buffer.format.records import CHECKED, CUT, EXTENT, GENERATION, MAX_SERIAL, OPEN, RECORD, STATE_WORD, seal
from memmap_buffer.format.storage import Storage, crc32, digest_of
from memmap_buffer.format.syscalls import BLOCK, barrier, close_all, punch, write_all, write_word

Piece: TypeAlias = tuple[str, int, bytes]  # (file key, offset, bytes)
MEMORY = ("tmpfs", "ramfs")
PIECE = 1 << 18  # bytes that are written, then read for their CRC-32 while the processor has them: 2/3 of the time


class WriteHandles:
    """The folder's files opened for writing, and what every write to them needs: the lock, barriers, words."""

    def __init__(self, storage: Storage, lock: WriterLock, *, power: bool, checksum: bool) -> None:
        self.storage = storage
        self.layout: Layout = storage.layout
        self.lock = lock
        self.power = power
        self.checksum = checksum
        arrays = self.layout.arrays
        self.fd: dict[str, int] = {}
        self._finalizer = weakref.finalize(self, close_all, self.fd)
        self._finalizer.atexit = False
        self._state, self._records = (len(arrays[key].header) for key in ("/state", "/episodes"))
        self._following = 0
        self.behind = False
        for key, array in arrays.items():
            self.fd[key] = storage.folder.open_to_write(array.name, array.header, array.size)
        longest, column_of = self.layout.max_timesteps, self.layout.column_of
        self._row = {
            name: (self.fd[name], len(arrays[name].header), size, longest + field.final, column_of[name], piece)
            for name, field in self.layout.schema.fields.items()
            for size in [field.itemsize]
            for piece in [max(1, PIECE // size) if checksum else longest + field.final]
        }
        self._large = dict(self._rows_given_back())

    def close(self) -> None:
        """Close the descriptors; twice is fine."""
        self._finalizer()

    def write_state(self, name: str, value: int, word: int = 0) -> None:
        """Write one word of state.npy; `word` counts on within those of several words."""
        write_word(self.fd["/state"], value, self._state + 8 * (STATE_WORD[name] + word))

    def changed(self) -> None:
        """Tell readers and trees that something visible changed."""
        self.write_state("changes", (self.storage.state("changes") + 1) % 2**64)

    def announce(self, following: int) -> None:
        """Raise the next serial and tell readers. Should it fail, `catch_up` makes up for it: the episode stands."""
        self._following, self.behind = max(self._following, following), True
        if self.storage.state("next") < self._following:
            self.write_state("next", self._following)
        self.changed()
        self.behind = False

    def catch_up(self) -> None:
        """Announce what could not be announced when it was published."""
        if self.behind:
            self.announce(self._following)

    def write_generation(self, slot: int, generation: int) -> None:
        write_word(self.fd["/episodes"], generation, self._records + slot * RECORD.itemsize)

    def write_record(self, slot: int, record: bytes, first: int = 0) -> None:
        """A slot's record in one write, from its word `first` on: 0, or 1 where the generation stays as it is."""
        skip = 8 * first
        write_all(self.fd["/episodes"], record[skip:], self._records + slot * RECORD.itemsize + skip)

    def sector_of(self, slot: int) -> int:
        """The sector of 512 bytes that holds a slot's record."""
        return (self._records + slot * RECORD.itemsize) // 512

    def amend(self, slot: int, **values: int) -> None:
        """Replace some words of a slot's record, its generation unchanged: atomic to every reader."""
        record = self.storage.maps.words[slot].view(RECORD)[0]
        self.write_record(slot, seal(**({key: int(record[key]) for key in RECORD.names or ()} | values)), first=1)

    def write_rows(self, columns: Mapping[str, Array], rows: range, slot: int, t: int, crcs: list[int]) -> list[int]:
        """Write some rows of fields' columns from timestep `t` of a slot on.

        Args: crcs: a CRC-32 for each column of checksums.npy, of the rows before these.
        Returns: the same, these rows included.
        """
        crcs, stop = crcs.copy(), rows.stop
        for name, array in columns.items():
            fd, header, itemsize, stride, column, piece = self._row[name]
            offset = header + (slot * stride + t - rows.start) * itemsize
            row = rows.start
            while row < stop:
                data = array[row : stop if stop - row <= piece else row + piece]
                write_all(fd, data, offset + row * itemsize)
                if self.checksum:
                    crcs[column] = crc32(data, crcs[column])
                row += piece
        return crcs

    @property
    def holes_are_harmless(self) -> bool:
        """Whether holes may be looked at through a map: on a tmpfs that is full, that would kill."""
        return file_system(self.storage.path) not in MEMORY

    def _rows_given_back(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The fields of which what a slot held before may take so much space that it is given back."""
        # A reader that is late copies what was given back, before it sees that the episode is gone.
        if not self.storage.state("reserved") and self.holes_are_harmless:
            for name, row in self._row.items():
                if row[2] * row[3] >= BLOCK:
                    yield name, row

    def give_back(self, slot: int, start: int, stop: int) -> None:
        """Give the space of timesteps `start` to `stop` of a slot back; what lies there is of no episode any more."""
        for fd, header, itemsize, stride, *_ in self._large.values():
            final = stride - self.layout.max_timesteps  # one row more, which may be the new episode's
            first = slot * stride + final
            punch(fd, header + (first + start) * itemsize, header + (first + stop) * itemsize)

    def write_meta(self, name: str, slot: int, value: Array) -> None:
        write_all(self.fd[name], value, self.layout.arrays[name].offset(slot))

    def write_checksums(self, slot: int, row: bytes) -> None:
        """Write a slot's row of checksums.npy."""
        write_all(self.fd["/checksums"], row, self.layout.arrays["/checksums"].offset(slot))

    def trust(self, first: int, stop: int) -> None:
        """Every serial below `stop` is on the disk, unless some before `first` are in doubt."""
        state = self.storage.state
        if state("synced") == first and state("suspect") <= first:
            self.write_state("synced", stop)

    def barriers(self, *keys: str) -> None:
        """Under durability "power", wait for these files; after a failure nothing may be written any more."""
        if self.power:
            self.sync(*keys)

    def sync(self, *keys: str) -> None:
        try:
            for key in keys or self.fd:
                barrier(self.fd[key])
        except OSError:
            self.lock.poison()
            with suppress(OSError):  # whoever opens the folder next checks what may be lost
                self.write_state("synced", 0)
                self.write_state("suspect", int(self.storage.reread().serial.max(initial=-1)) + 1)
            raise


class SlotWriter:
    """One slot being written. After an error the same calls may be made again, or the slot be left.

    Args:
        files: the open files. slot: a slot that is neither visible nor another's.

    Attributes:
        serial, published: what its record says, if it stands. length: timesteps written. meta: as written.
        given: whether its episode was given up to be published, by itself or with others.
    """

    def __init__(self, files: WriteHandles, slot: int) -> None:
        self.files = files
        self.slot = slot
        self.serial = -1
        self.published = False
        self.length = 0
        self.meta: dict[str, Array] = {}
        # CRC-32s in the columns of checksums.npy: of the rows so far, and of these with the final observation.
        self._crcs = [0] * files.layout.columns
        self._final_crcs = self._crcs
        self._shown = (0, self._crcs)
        self.given = False
        self._sealed: tuple[int, bytes, tuple[int, list[int]]] | None = None
        words = files.storage.maps.words
        generation, extent = words.item(slot, GENERATION), words.item(slot, EXTENT)
        # How far rows reach that were there before: unknown where a writer died, or left an episode open.
        unknown = generation & 1 or extent >> 32 & (CUT | OPEN)
        self._before = files.layout.max_timesteps if unknown else min(extent & 0xFFFFFFFF, files.layout.max_timesteps)
        self._generation = generation | 1 if generation < MAX_SERIAL // 2 else 1  # a void record may say anything
        self._begun = False

    @property
    def visible(self) -> int:
        """Timesteps that are published."""
        return self._shown[0]

    def write(self, columns: Mapping[str, Array], base: int, stop: int) -> None:
        """Write the timesteps up to `stop` that are not written yet, beyond what is visible.

        Args: columns: field -> its rows from timestep `base` on.
        """
        self._begin()
        start = self.length
        if start < stop:
            crcs = self.files.write_rows(columns, range(start - base, stop - base), self.slot, start, self._crcs)
            self._crcs, self._final_crcs, self.length = crcs, crcs, stop  # at once: an interruption may come anywhere

    def write_final(self, final: Mapping[str, Array]) -> None:
        """Write the observation after the last action behind the last step, for every field with `final`."""
        if final:
            rows = {name: value[None] for name, value in final.items()}
            self._final_crcs = self.files.write_rows(rows, range(1), self.slot, self.length, self._crcs)

    def write_meta(self, meta: Mapping[str, Array]) -> None:
        """Write the meta fields, each of its declared shape."""
        self._begin()
        for name, value in meta.items():
            self.files.write_meta(name, self.slot, value)
        self.meta = dict(meta)

    def seal(self, serial: int, flags: int) -> bytes:
        """Write the checksums; the record that makes this an episode of that number, to be committed.

        Args:
            serial: its number. flags: of `records`; OPEN leaves it to be appended to.
        """
        if not flags & OPEN:
            self._give_back()
        row = self._checksums()
        if row is not None:
            flags |= CHECKED
            if not flags & OPEN:
                self.files.write_checksums(self.slot, row)
        record = self._record(self._generation + 1, serial, flags, row)
        self._sealed = serial, record, (self.length, self._crcs)
        return record

    def _record(self, generation: int, serial: int, flags: int, checksums: bytes | None) -> bytes:
        columns = 0 if checksums is None else self.files.layout.used_columns
        return seal(
            generation=generation,
            serial=serial,
            length=self.length,
            flags=flags,
            first_row=self.slot * self.files.layout.max_timesteps,
            time=time.time_ns(),
            epoch=self.files.lock.epoch,
            digest=digest_of(checksums or b"", columns),
            columns=columns,
        )

    def show(self, record: bytes) -> None:
        """Write the record: the commit."""
        self.files.write_record(self.slot, record, first=self.published)

    def settle(self) -> None:
        """Whatever went wrong: if the record that was last sealed stands on the disk, that much is published."""
        words = self.files.storage.maps.words[self.slot]
        if self._sealed is not None and words.tobytes() == self._sealed[1]:
            self.published, (self.serial, _, self._shown) = True, self._sealed
        if self.published and words[GENERATION] % 2 == 0:
            self._generation = int(words[GENERATION]) - 1  # a redo file may have moved it on

    def rewind(self) -> None:
        """Forget the rows that were written beyond what is published."""
        self.length, self._crcs = self._shown
        self._final_crcs = self._crcs

    def closing(self, flags: int, final: Mapping[str, Array], meta: Mapping[str, Array]) -> tuple[bytes, list[Piece]]:
        """(record, pieces) that end an episode whose steps are published, its final observation and meta included."""
        self._give_back()
        layout = self.files.layout
        pieces: list[Piece] = []
        crcs, column_of = self._crcs.copy(), layout.column_of
        last = self.slot * (layout.max_timesteps + 1) + self.length
        for name, value in final.items():
            pieces.append((name, layout.row_offset(name, last), value.tobytes()))
            crcs[column_of[name]] = crc32(value, crcs[column_of[name]])
        for name, value in meta.items():
            pieces.append((name, layout.arrays[name].offset(self.slot), value.tobytes()))
            crcs[column_of[name]] = crc32(value)
        if self.files.checksum:
            flags |= CHECKED
            row = struct.pack(layout.checksum_format, *crcs)
            pieces.append(("/checksums", layout.arrays["/checksums"].offset(self.slot), row))
            return self._record(self._generation + 3, self.serial, flags, row), pieces
        return self._record(self._generation + 3, self.serial, flags, None), pieces

    def _give_back(self) -> None:
        """The rows are all written: what was longer before is not needed."""
        if self.length < self._before:
            self.files.give_back(self.slot, self.length, self._before)

    def _begin(self) -> None:
        if not self._begun:
            self.files.write_generation(self.slot, self._generation)
            self._begun = True

    def _checksums(self) -> bytes | None:
        """The slot's row of checksums.npy, or None where none are kept."""
        if not self.files.checksum:
            return None
        layout, crcs = self.files.layout, self._final_crcs.copy()
        for name, value in self.meta.items():
            crcs[layout.column_of[name]] = crc32(value)
        return struct.pack(layout.checksum_format, *crcs)


def commit(files: WriteHandles, entries: Sequence[tuple[SlotWriter, int, int]]) -> None:
    """Make what was written episodes, with one barrier per file for all: visible to every process when this returns.

    Args: entries: (publication, serial, flags) in the order of their serials.
    Raises: OSError: what is not `published` now did not become visible; a failed barrier poisons the lock.
    """
    records = [publication.seal(serial, flags) for publication, serial, flags in entries]
    first: list[int] = []
    if files.power:
        files.barriers(*files.layout.schema.all, "/checksums")
        first = [serial for publication, serial, _ in entries if not publication.published]
    try:
        for i, (publication, _, _) in enumerate(entries):
            # Sectors reach the disk in any order, and there must be no gap.
            if i and files.sector_of(publication.slot) != files.sector_of(entries[i - 1][0].slot):
                files.barriers("/episodes")
            publication.show(records[i])
        files.barriers("/episodes")
    finally:
        for publication, _, _ in entries:
            publication.settle()
    if first:
        files.trust(first[0], first[-1] + 1)
    files.announce(entries[-1][1] + 1)
