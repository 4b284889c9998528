"""A timestep of several environments at once: one store per field into the mapped files, one word per episode.

A store into a map kills the process where the block under it is not there and the disk is full. So the blocks of some
timesteps to come are allocated first, which raises where there is no room; then stores go where they can only succeed,
on file systems that overwrite in place. Elsewhere, and under durability "power", timesteps are written one by one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.host import machine, overwrites_in_place
from memmap_buffer.format.layout import ArrayFile
from memmap_buffer.format.records import EVERY_SLOT, JOURNAL, SHOWN, STATE_WORD, WORDS
from memmap_buffer.format.syscalls import allocate, close_all
from memmap_buffer.writing.commit import SlotWriter, WriteHandles
from memmap_buffer.writing.episode import Episode

ORDERED = ("x86_64", "AMD64")  # processors whose stores are seen by others in the order in which they were made
AHEAD = 1 << 18  # bytes of a field that are allocated at a time
LOOK_SECONDS = 0.05  # how often it is looked whether the folder is still at its path
_CHANGES, _JOURNAL = STATE_WORD["changes"], STATE_WORD["journal"]
_STEP = np.uint64(1 << 32)


class MappedFiles:
    """The files of timesteps, the records and the counters, mapped so that stores reach them.

    Args:
        files: the open files.
    """

    def __init__(self, files: WriteHandles) -> None:
        self._files = files
        layout = files.layout
        arrays = layout.arrays
        self.words = self._mapped(arrays["/episodes"]).view(np.uint64).reshape(-1)
        self.state = self._mapped(arrays["/state"]).view(np.uint64).reshape(-1)
        self.rows = {name: self._mapped(arrays[name]) for name in layout.schema.fields}
        self._sizes = [
            (files.fd[name], len(arrays[name].header), layout.max_timesteps + field.final, field.itemsize)
            for name, field in layout.schema.fields.items()
        ]

    @staticmethod
    def may_be_used(files: WriteHandles) -> bool:
        """Whether stores into maps are as good as writes here."""
        in_place = overwrites_in_place(files.storage.path) and not files.layout.coded  # blobs are of any length
        return in_place and machine() in ORDERED and not files.power

    def _mapped(self, array: ArrayFile) -> Array:
        fd, mapped = self._files.storage.folder.map_to_change(array.name, array.header, array.size, shared=True)
        close_all({"": fd})
        out: Array = np.frombuffer(mapped, array.dtype, offset=len(array.header)).reshape(array.shape)
        return out

    def prepare(self, slot: int, t: int) -> int:
        """Have room on the disk for timesteps of a slot from `t` on; up to which one. Raises OSError: it is full."""
        stop = self._files.layout.max_timesteps
        for *_, itemsize in self._sizes:
            stop = min(stop, t + max(1, AHEAD // itemsize))
        for fd, header, stride, itemsize in self._sizes:
            allocate(fd, header + (slot * stride + t) * itemsize, (stop - t) * itemsize)
        return stop


class Round:
    """Several episodes of which every timestep is shown at once, appended to together.

    Args:
        files: the open files.
        maps: the same, mapped.
        episodes: published ones, still open.
        slot_writers: of each.
    """

    def __init__(
        self, files: WriteHandles, maps: MappedFiles, episodes: Sequence[Episode], slot_writers: Sequence[SlotWriter]
    ) -> None:
        self.files, self.maps = files, maps
        self._pairs = list(zip(episodes, slot_writers, strict=True))
        self.slots: IntArray = np.array([one.slot for one in slot_writers])
        self._t: IntArray = np.array([one.length for one in slot_writers])
        self._shown = self.slots * WORDS + SHOWN
        # One slot alone is assigned by plain numbers, in a third of the time.
        self._single = (int(self.slots[0]), int(self._t[0])) if len(self.slots) == 1 else None
        self._room = 0
        self._looked = 0.0

    @property
    def left(self) -> int:
        """How many more rounds no episode becomes as long as it may be."""
        return self.files.layout.max_timesteps - int(self._t.max())

    def prepare(self) -> None:
        """Have room for the next timestep of each. Raises OSError: the disk is full; nothing has changed."""
        if self._room <= 0:
            rooms = []
            for (_, slot_writer), t in zip(self._pairs, self._t.tolist(), strict=True):
                if slot_writer.room <= t:
                    slot_writer.room = self.maps.prepare(slot_writer.slot, t)
                rooms.append(slot_writer.room - t)
            self._room = min(rooms)

    def check(self) -> None:
        """Raise WriterLostError unless this object may still write; the path is looked at now and then."""
        storage, lock = self.files.storage, self.files.lock
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS or not lock.mine or storage.state("term") != lock.term:
            lock.check(storage)
            self._looked = now

    def store(self, columns: Mapping[str, Array]) -> None:
        """Write the next timestep of each, field -> (B, *field), and show it. Readers are still to be told."""
        if self._single is None:
            slots, t = self.slots, self._t
            for name, rows in self.maps.rows.items():
                rows[slots, t] = columns[name]
        else:
            slot, step = self._single
            for name, rows in self.maps.rows.items():
                rows[slot, step] = columns[name][0]
            self._single = slot, step + 1
        self.maps.words[self._shown] += _STEP
        self._t += 1
        self._room -= 1
        for episode, slot_writer in self._pairs:
            slot_writer.length += 1
            episode.base = episode.length = slot_writer.length

    def settle(self) -> None:
        """Whatever interrupted `store`: what is shown is what was stored."""
        for i, (episode, slot_writer) in enumerate(self._pairs):
            slot_writer.length = episode.base = episode.length = slot_writer.num_published
            self._t[i] = slot_writer.length
        if self._single is not None:
            self._single = int(self.slots[0]), int(self._t[0])

    def forget(self, slots: IntArray, start: IntArray) -> None:
        """Show the steps of some slots from `start` on alone."""
        at = slots * WORDS + SHOWN
        words = self.maps.words
        words[at] = (words.take(at) >> np.uint64(32) << np.uint64(32)) | start.astype(np.uint64)

    def tell(self, slots: IntArray) -> None:
        """Tell the readers which slots changed."""
        state = self.maps.state
        changes, count = state.item(_CHANGES), len(slots)
        if count > JOURNAL // 8:
            state[_JOURNAL + (changes + 1) % JOURNAL], count = EVERY_SLOT, 1
        elif count == 1:
            state[_JOURNAL + (changes + 1) % JOURNAL] = slots.item(0)
        else:
            state[_JOURNAL + np.arange(changes + 1, changes + count + 1) % JOURNAL] = slots
        state[_CHANGES] = changes + count


def mapped_files(files: WriteHandles) -> MappedFiles | None:
    """The files mapped for stores; None where these are not as good as writes."""
    try:
        return MappedFiles(files) if MappedFiles.may_be_used(files) else None
    except (OSError, ValueError, CorruptBufferError):  # no memory for so many maps, say
        return None
