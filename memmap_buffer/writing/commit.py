"""Writing one slot: rows as they come, then the record that makes them an episode.

Every way to write ends here, in `commit`. The order of the writes is in `format`, "Publishing".
"""

from __future__ import annotations

import errno
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError, EpisodeStateError
from memmap_buffer.format.blobs import contents_of, encode_many, end_of, index_of
from memmap_buffer.format.checksums import EMPTY, Sums, add_rows, checksum, checksum_row, crc32, digest_of
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.host import file_system, stores_are_writes
from memmap_buffer.format.layout import BLOBS, Layout
from memmap_buffer.format.lock import WriterLock
from memmap_buffer.format.records import (
    CHECK,
    CHECKED,
    CUT,
    EVERY_SLOT,
    EXTENT,
    GENERATION,
    JOURNAL,
    MAX_SERIAL,
    OPEN,
    RECORD,
    SHOWN,
    STATE_WORD,
    Words,
    check_of,
    seal,
)
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import BLOCK, allocate, barrier, close_all, punch, write_all, write_word
from memmap_buffer.schema import MEMBERS
from memmap_buffer.writing.blob_column import BlobColumn

MEMORY = ("tmpfs", "ramfs")
_CHANGES, _JOURNAL, _NEXT = STATE_WORD["changes"], STATE_WORD["journal"], STATE_WORD["next"]
BLOBS_AT_ONCE = 16 << 20  # bytes of timesteps whose blobs are written at once
RECORDS_AT_ONCE = 1024  # records of which several are written with all between them
PIECE = 1 << 18  # bytes that are written, then read for their checksum while the processor has them: 2/3 of the time


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
        headers = (len(arrays[key].header) for key in ("/state", "/episodes", "/checksums"))
        self._state, self._records, self._checksums = headers
        self._following = 0
        self.behind = False
        for key, array in arrays.items():
            self.fd[key] = storage.folder.open_to_write(array)
        self.stores = not power and stores_are_writes(storage.path)
        self._counters = self._mapped_counters()
        self.mapped: Mapping[str, Array] = {}  # field -> its rows, once they are mapped for stores
        longest = self.layout.max_timesteps
        self._row = {
            name: (self.fd[name], len(arrays[name].header), size, longest + field.final, piece)
            for name, field in self.layout.schema.fields.items()
            for size in [field.in_file.itemsize]
            for piece in [max(1, PIECE // size) if checksum else longest + field.final]
        }
        # Fields of which what a slot held before may take so much space that it is given back. A reader that is late
        # copies what was given back, before it sees that the episode is gone.
        may_give_back = not storage.state("reserved") and self.holes_are_harmless
        self._large = [row for row in self._row.values() if may_give_back and row[2] * row[3] >= BLOCK]
        self._coded = [name for name in self.layout.coded if may_give_back]
        # Of each slot, one more than the timesteps that may have space on the disk; 0: that is not known.
        self.reach = np.zeros(self.layout.slots, np.uint32)

    def close(self) -> None:
        """Close the descriptors; twice is fine."""
        self._finalizer()

    def map(self, key: str) -> Array:
        """A file mapped so that stores reach it. Raises OSError, ValueError: it cannot be."""
        fd, array = self.storage.folder.map_to_change(self.layout.arrays[key], shared=True)
        close_all({"": fd})
        return array

    def _mapped_counters(self) -> Words | None:
        """The words of state.npy for stores, at a tenth of the time of a write each; None where they are written.

        Raises: OSError: the disk is full or broken; nothing can be published on it by writes, either.
        """
        if not self.stores:
            return None
        try:
            allocate(self.fd["/state"], 0, self.layout.arrays["/state"].size)  # a copy may have holes
            return self.map("/state").view(np.uint64)
        except (OSError, ValueError, CorruptBufferError) as error:  # no memory for another map, say
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            return None

    def write_state(self, name: str, value: int, word: int = 0) -> None:
        """Write one word of state.npy; `word` counts on within those of several words."""
        write_word(self.fd["/state"], value, self._state + 8 * (STATE_WORD[name] + word))

    def changed(self, slots: Sequence[int] | IntArray = (EVERY_SLOT,), following: int = 0) -> None:
        """Tell readers and trees that something visible changed, in these slots; `following`: the next serial."""
        state = self.storage.maps.state
        changes, raised = state.item(_CHANGES), state.item(_NEXT) < following
        if len(slots) > JOURNAL // 8:
            slots = (EVERY_SLOT,)
        first, count, counters = (changes + 1) % JOURNAL, len(slots), self._counters
        if counters is None:
            for i, slot in enumerate(slots, first):
                self.write_state("journal", int(slot), i % JOURNAL)
            if raised:
                self.write_state("next", following)
            self.write_state("changes", (changes + count) % 2**64)
            return
        room = JOURNAL - first
        counters[_JOURNAL + first : _JOURNAL + min(first + count, JOURNAL)] = slots[:room]
        if count > room:
            counters[_JOURNAL : _JOURNAL + count - room] = slots[room:]
        if raised:
            counters[_NEXT] = following
        counters[_CHANGES] = (changes + count) % 2**64

    def announce(self, following: int, slots: Sequence[int] | IntArray = (EVERY_SLOT,)) -> None:
        """Raise the next serial and tell readers. Should it fail, `catch_up` makes up for it: the episode stands."""
        self._following, self.behind = max(self._following, following), True
        self.changed(slots, self._following)
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
        self.write_record(slot, seal(**{**self.storage.record(slot), **values}), first=1)

    def raise_flag(self, slots: IntArray, flag: int) -> Iterator[IntArray]:
        """Raise a flag in the records of ascending slots, their generations unchanged: each atomic to every reader.

        Records between them are written again as they are: a write takes longer than the bytes of a block.

        Yields: the slots whose records were written just now.
        """
        blocks = np.flatnonzero(np.diff(slots // RECORDS_AT_ONCE, prepend=-1))
        for part in np.split(slots, blocks[1:]) if len(slots) else ():
            first, stop = part.item(0), part.item(-1) + 1
            words = self.storage.maps.words[first:stop].copy()
            words[part - first, EXTENT] |= np.uint64(flag << 32)
            words[part - first, CHECK] = check_of(words[part - first])
            write_all(self.fd["/episodes"], words, self._records + first * RECORD.itemsize)
            yield part

    def write_shown(self, slot: int, start: int, stop: int) -> None:
        """Show the steps start … stop - 1 of a slot's episode: atomic to every reader, and not part of the check."""
        write_word(self.fd["/episodes"], start | stop << 32, self._records + slot * RECORD.itemsize + 8 * SHOWN)

    def write_rows(
        self,
        columns: Mapping[str, Array],
        rows: range,
        slot: int,
        t: int,
        sums: Mapping[str, Sums] | None,
        *,
        final: bool = False,
        room: int = 0,
    ) -> dict[str, Sums]:
        """Write some rows of fields' columns from timestep `t` of a slot on.

        Args:
            columns: field -> rows.
            rows: which of these.
            slot: where the episode is.
            t: the timestep of the first of them.
            sums: field -> of the rows before these, for their checksums; None: these are not wanted.
            final: of fields with `final`, one row more.
            room: timesteps before this one are stored into the mapped files, where there are some: their blocks are
                allocated.

        Returns:
            The same, these rows included.
        """
        checksum, longest = self.checksum and sums is not None, self.layout.max_timesteps
        sums = dict(sums or {})
        for name, array in columns.items():
            fd, header, itemsize, stride, piece = self._row[name]
            stop = rows.stop + final * (stride - longest)
            if name in self.layout.coded:
                self._write_blobs(name, array, range(rows.start, stop), slot, t, sums if checksum else None)
                continue
            row, at = rows.start, slot * stride + t - rows.start
            mapped = self.mapped.get(name) if t + stop - row <= room else None
            while row < stop:
                data = np.ascontiguousarray(array[row : stop if stop - row <= piece else row + piece])
                if mapped is None:
                    write_all(fd, data, header + (at + row) * itemsize)
                else:
                    mapped[at + row : at + row + len(data)] = data
                if checksum:
                    sums[name] = add_rows(sums[name], data)
                row += piece
        return sums

    def _write_blobs(
        self, name: str, column: Array | BlobColumn, rows: range, slot: int, t: int, sums: dict[str, Sums] | None
    ) -> None:
        """Write some rows of a compressed field: their blobs behind those before, then their index."""
        field, row = self.layout.coded[name], slot * self._row[name][3] + t
        count = max(1, BLOBS_AT_ONCE // field.itemsize)
        for begin in range(rows.start, rows.stop, count):
            some = slice(begin, min(begin + count, rows.stop))
            blobs = column.blobs(some) if isinstance(column, BlobColumn) else encode_many(field, column[some])
            index = index_of(field, blobs, self.end_of_blobs(name, slot, t))
            data = b"".join(blobs)
            require_room(self.layout, name, slot, int(index[0, 0]) + len(data))
            write_all(self.fd[name + BLOBS], data, self.layout.arrays[name + BLOBS].offset(0) + int(index[0, 0]))
            write_all(self.fd[name], index, self.layout.row_offset(name, row))
            if sums is not None:
                sums[name] = add_rows(sums[name], contents_of(index, blobs))
            row, t = row + len(blobs), t + len(blobs)

    def end_of_blobs(self, name: str, slot: int, t: int) -> int:
        """Where the blob of timestep `t` of a slot begins in a field's file of blobs: behind the one before."""
        region = self.layout.region(name, slot)
        if t == 0:
            return region.start
        end = end_of(self.storage.maps.rows[name][slot * self._row[name][3] + t - 1])
        if not region.start <= end <= region.stop:
            if self.storage.maps.words.item(slot, GENERATION) & 1:
                return region.start  # a ring gave the open episode up, and the index with it: none of it is read
            raise self.storage.damaged_blob(name, f"timestep {t - 1} of slot {slot} has a blob of another slot")
        return end

    @property
    def holes_are_harmless(self) -> bool:
        """Whether holes may be looked at through a map: on a tmpfs that is full, that would kill."""
        return file_system(self.storage.path) not in MEMORY

    def give_back(self, slot: int, start: int, stop: int) -> None:
        """Give the space of timesteps `start` to `stop` of a slot back; what lies there is of no episode any more."""
        for fd, header, itemsize, stride, *_ in self._large:
            final = stride - self.layout.max_timesteps  # one row more, which may be the new episode's
            first = header + (slot * stride + final) * itemsize
            end = first + stop * itemsize
            if not start:  # the rest of the last block is nobody's, either, up to the next slot
                end = min(-(-end // BLOCK) * BLOCK, header + (slot + 1) * stride * itemsize)
            punch(fd, first + start * itemsize, end)
        for name in self._coded:
            header, field = self.layout.arrays[name + BLOBS].offset(0), self.layout.coded[name]
            end = self.end_of_blobs(name, slot, start) + field.final * field.blob_bytes
            punch(self.fd[name + BLOBS], header + end, header + self.layout.region(name, slot).stop)

    def write_meta(self, name: str, slot: int, value: Array) -> None:
        write_all(self.fd[name], value, self.layout.arrays[name].offset(slot))

    def write_checksums(self, slot: int, row: bytes) -> None:
        """Write a slot's row of checksums.npy."""
        write_all(self.fd["/checksums"], row, self._checksums + slot * len(row))

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


def require_room(layout: Layout, name: str, slot: int, end: int) -> None:
    """Raise EpisodeStateError where the blobs of an episode, which end there, are more than there is room for."""
    if end > layout.region(name, slot).stop:
        raise EpisodeStateError(
            f"field {name!r}: the lists of an episode have more members than there is room for, {MEMBERS} a timestep "
            f"on an average over max_timesteps={layout.max_timesteps}; end the episode before, or create the buffer "
            "with a larger max_timesteps"
        )


class SlotWriter:
    """A slot that is being written. After an error the same calls may be made again, or the slot be left.

    Args:
        files: the open files.
        slot: a slot that is neither visible nor another's.

    Attributes:
        serial: the number of the episode, from its first record on.
        flags: of the next record; OPEN leaves the episode to be appended to.
        published: whether a record of it stands.
        length: timesteps written.
        meta: as written.
        sums: for the checksum of each field, of the steps that `sum_up` has seen.
        state: "open", or "published" once its episode was given up to be published, by itself or with others.
        room: before which timestep there is room on the disk for stores into maps.
        round: of the next record: in which its last step was published, or its first one if it is OPEN; see `slots`.
        appends: whether its record stands, and what is shown next are only more of its timesteps.
    """

    def __init__(self, files: WriteHandles, slot: int) -> None:
        self.files = files
        self.slot = slot
        self.serial = -1
        self.flags = 0
        self.published = False
        self.length = 0
        self.meta: dict[str, Array] = {}
        # Of the first `_summed` steps; likewise of all and the final observation.
        self.sums, self._summed = dict.fromkeys(files.layout.schema.fields, EMPTY), 0
        self._final_sums: dict[str, Sums] | None = None
        self._sealed = b""  # the last record
        self.state, self.appends = "open", False
        self.round = self.room = 0
        words, reach = files.storage.maps.words, files.reach.item(slot)
        generation, extent = words.item(slot, GENERATION), words.item(slot, EXTENT)
        # How far rows reach that were there before: unknown where a writer died, or left an episode open.
        unknown = generation & 1 or extent >> 32 & (CUT | OPEN)
        before = files.layout.max_timesteps if unknown else min(extent & 0xFFFFFFFF, files.layout.max_timesteps)
        self._before = reach - 1 if reach else before
        self._generation = generation | 1 if generation < MAX_SERIAL // 2 else 1  # a void record may say anything
        self._begun = False

    @property
    def num_published(self) -> int:
        """Timesteps that are published."""
        return self._shown >> 32 if self.published else 0

    @property
    def start(self) -> int:
        """The first of them that is shown, once there are some."""
        return self._shown & 0xFFFFFFFF

    @property
    def _shown(self) -> int:
        return self.files.storage.maps.words.item(self.slot, SHOWN)

    def stored(self, length: int) -> None:
        """Know of the timesteps up to `length`, which were stored into the mapped files."""
        self.files.reach[self.slot] = 0
        self.length, self._final_sums = length, None

    def sum_up(self) -> None:
        """Take the steps that were written without into the sums."""
        if self.files.checksum:
            storage, sums = self.files.storage, self.sums.copy()
            for name, before in self.sums.items():
                first = storage.start_of(name, self.slot)
                sums[name] = storage.sums_of_rows(name, first + self._summed, first + self.length, before)
            self.sums, self._summed = sums, self.length

    def write(
        self, columns: Mapping[str, Array], base: int, stop: int, *, add: bool = True, final: bool = False
    ) -> None:
        """Write the timesteps up to `stop` that are not written yet, beyond what is visible.

        Args:
            columns: field -> its rows from timestep `base` on.
            base: see there.
            stop: how many timesteps are written then.
            add: add them to the sums now, while the processor has them; else when these are asked for.
            final: of fields with `final` one row more: the observation after the last action.
        """
        if not self._begun:  # the record that stands in the slot becomes void, as that of one that a ring gave up is
            if self.files.storage.maps.words.item(self.slot, GENERATION) != self._generation:
                self.files.write_generation(self.slot, self._generation)
            self._begun = True
        start = self.length
        if start < stop or final:
            if add and self._summed < start:
                self.sum_up()
            self.files.reach[self.slot] = 0
            rows, before = range(start - base, stop - base), self.sums if add else None
            sums = self.files.write_rows(columns, rows, self.slot, start, before, final=final, room=self.room)
            self.length, self._final_sums = stop, sums if final else None
            if add and not final:
                self.sums, self._summed = sums, stop

    def write_meta(self, meta: Mapping[str, Array]) -> None:
        """Write the meta fields, each of its declared shape."""
        for name, value in meta.items():
            self.files.write_meta(name, self.slot, value)
        self.meta = dict(meta)

    def seal(self) -> None:
        """Write the checksums, and make the record that `show` writes."""
        flags, row, columns = self.flags, b"", 0
        if not flags & OPEN:
            self.give_back()
        if self.files.checksum:
            checksums = {}
            if self._final_sums is None and self._summed < self.length:
                self.sum_up()
            for name, (crc, rest) in (self._final_sums or self.sums).items():
                checksums[name] = crc32(rest, crc)
            for name, value in self.meta.items():
                checksums[name] = checksum(value)
            row, columns = checksum_row(self.files.layout, checksums), self.files.layout.used_columns
            flags |= CHECKED
            if not flags & OPEN:
                self.files.write_checksums(self.slot, row)
        self._sealed = seal(
            generation=self._generation + 1,
            serial=self.serial,
            length=self.length,
            flags=flags,
            first_row=self.slot * self.files.layout.max_timesteps,
            time=int(time.time()),
            round=self.round % 2**32,
            term=self.files.lock.term,
            digest=digest_of(row, columns),
            columns=columns,
            start=self.start if self.published else 0,
        )

    def show(self) -> None:
        """Show the timesteps that are written, by the record that was last sealed or beside the one that stands."""
        if self.appends:
            self.files.write_shown(self.slot, self.start, self.length)
        else:
            self.files.write_record(self.slot, self._sealed, first=self.published)
            self.published = True

    @property
    def is_shown(self) -> bool:
        """Whether what `show` writes stands on the disk."""
        return self._shown >> 32 == self.length and (self.appends or self._is_sealed)

    @property
    def _is_sealed(self) -> bool:
        """Whether the record that was last sealed stands on the disk."""
        check = self.files.storage.maps.words.item(self.slot, CHECK)
        return bool(self._sealed) and check == int.from_bytes(self._sealed[8 * CHECK :], "little")

    def settle(self) -> None:
        """Whatever went wrong: if the record that was last sealed stands on the disk, that much is published."""
        if self._is_sealed:
            self.published = True
        generation = self.files.storage.maps.words.item(self.slot, GENERATION)
        if self.published and generation % 2 == 0 and self._generation != generation - 1:
            self.sums, self._summed = dict.fromkeys(self.sums, EMPTY), 0  # its rows were changed in place
            self._generation = generation - 1  # last: an interruption before it has this done again

    def rewind(self) -> None:
        """Forget the rows that were written beyond what is published."""
        self.length, self._final_sums = self.num_published, None
        if self._summed > self.length:
            self.sums, self._summed = dict.fromkeys(self.sums, EMPTY), 0

    def give_back(self) -> None:
        """Once all rows are written, give the space back that an episode before took beyond them."""
        room = self.room
        self._before = before = max(self._before, room)
        self.room = min(self.length, room)  # first: should its end fail, stores may go on
        if self.length < before or (before and self.files.layout.coded):  # fewer timesteps may have had larger blobs
            self.files.give_back(self.slot, self.length, before)
        self.files.reach[self.slot] = max(self.length, room) + 1


def commit(files: WriteHandles, slot_writers: Sequence[SlotWriter]) -> None:
    """Make what was written episodes, or timesteps of them, with one barrier per file for all. Readers are to be told.

    Args:
        files: the open files.
        slot_writers: in the order of their serials.

    Raises:
        OSError: what is not `published` now did not become visible; a failed barrier poisons the lock.
    """
    for slot_writer in slot_writers:
        if not slot_writer.appends:
            slot_writer.seal()
    if files.power:
        _show_for_good(files, slot_writers)
        return
    for slot_writer in slot_writers:
        slot_writer.show()


def _show_for_good(files: WriteHandles, slot_writers: Sequence[SlotWriter]) -> None:
    """Show what was sealed once it is on the disk, and wait until that is, too."""
    sealed = [slot_writer for slot_writer in slot_writers if not slot_writer.appends]
    new = [slot_writer.serial for slot_writer in sealed if not slot_writer.published]
    files.sync(*((*files.layout.keys_of_episodes, "/checksums") if sealed else files.layout.keys_of_steps))
    show(files, slot_writers)
    if new:
        files.trust(new[0], new[-1] + 1)
        if any(slot_writer.flags & OPEN for slot_writer in sealed):
            files.barriers("/state")  # it is by this that the steps are trusted that follow


def show(files: WriteHandles, slot_writers: Sequence[SlotWriter]) -> None:
    """Show what was written and sealed; twice is fine."""
    sector = None
    for slot_writer in slot_writers:
        if files.power:
            # Sectors reach the disk in any order, and there must be no gap.
            before, sector = sector, files.sector_of(slot_writer.slot)
            if not slot_writer.appends and before not in (None, sector):
                files.sync("/episodes")
        slot_writer.show()
    if files.power:
        files.sync("/episodes")
