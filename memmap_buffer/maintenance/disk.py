"""The disk under a folder: its kind, free space and speed, and how much of the folder is in memory. Writes nothing.

The functions here are public; `memmap-buffer doctor` and `info` show their results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer.codecs import codec_to_json
from memmap_buffer.dtypes import Array
from memmap_buffer.format.blobs import beyond, lengths_of
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.folder import Folder, in_memory, will_need
from memmap_buffer.format.host import anyone_may_rename, file_system, network_filesystem
from memmap_buffer.format.host import available_memory as available_memory
from memmap_buffer.format.layout import BLOBS
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import CAN_FORGET
from memmap_buffer.paths import AnyPath, path_of
from memmap_buffer.writing.commit import MEMORY

SAMPLE = 4096  # timesteps that are read to measure a disk
FIRST, BATCH = 8, 256  # timesteps that are read at a time: 8 at first, which take a slow disk 0.1 s, then up to 256
IN_MEMORY = 0.95  # the part of a sample from which on batches hardly wait for the disk


@dataclass(frozen=True)
class Disk:
    """The disk under a folder.

    Attributes:
        network: the kind of network file system, "" for a local one.
        anyone_may_rename: whether any user of the machine could replace the folder.
        free_bytes: the bytes that are free for this user.
    """

    network: str
    anyone_may_rename: bool
    free_bytes: int


def disk_of(folder: AnyPath) -> Disk:
    """The disk under a folder.

    Args:
        folder: the path of a buffer, or of any other folder.

    Raises:
        OSError: there is no such folder.
    """
    path = path_of(folder)
    return Disk(network_filesystem(path), anyone_may_rename(path), Folder(path).free_bytes())


@dataclass(frozen=True)
class DiskSpeed:
    """How fast timesteps, all fields of each, are read from the disk.

    Attributes:
        cached: the fraction of the sample that was in memory before.
        batch: how many timesteps were read at once.
        rate: timesteps a second; 0 if no page of the sample could be dropped, as other processes use all of them.
        timestep_bytes: the bytes of one timestep, in files.
    """

    cached: float
    batch: int
    rate: float
    timestep_bytes: int


def measure_disk_speed(folder: AnyPath, seconds: float, *, larger: bool) -> DiskSpeed | None:
    """Measure how fast a folder is read from the disk, if batches will have to wait for it.

    Args:
        folder: the path of a buffer.
        seconds: how long to measure.
        larger: whether the data is larger than memory; smaller data is measured only if it is not in memory now.

    Returns:
        The speed; None if the data is in memory, the file system has no disk, there are no timesteps, or the operating
        system cannot drop pages from its cache.

    Raises:
        NotABufferError: there is no buffer.
    """
    path = path_of(folder)
    storage = Storage.open(path, read_only=True, verify="never")
    if not CAN_FORGET or file_system(path) in MEMORY or not storage.table.steps:
        return None
    sample = _Sample(storage)
    cached = 1 - len(sample.missing()) / sample.size
    if cached > IN_MEMORY and not larger:
        return None
    sample.forget()
    seconds_by_batch = _measured(sample, seconds)
    rate = 1 / float(np.median(seconds_by_batch[max(seconds_by_batch)])) if seconds_by_batch else 0.0
    return DiskSpeed(cached, max(seconds_by_batch, default=0), rate, sample.timestep_bytes)


def _measured(sample: _Sample, seconds: float) -> dict[int, list[float]]:
    """Number of timesteps read at once -> seconds a timestep, of each batch that had to wait for the disk."""
    seconds_by_batch: dict[int, list[float]] = {}
    unread, end, batch = sample.missing(), perf_counter() + seconds, FIRST
    while len(unread) and (not seconds_by_batch or perf_counter() < end):
        part, unread = sample.missing(unread[:batch]), unread[batch:]  # some share pages with those that were read
        if len(part):
            begin = perf_counter()
            sample.read(part)
            seconds_by_batch.setdefault(batch, []).append((perf_counter() - begin) / len(part))
        batch = min(2 * batch, BATCH)
    return seconds_by_batch


def bytes_to_copy(source: AnyPath) -> int:
    """The bytes that a copy of a folder, by `pack` or `snapshot`, will have.

    Args:
        source: the path of a buffer.

    Returns:
        The bytes of the visible episodes, timesteps that a ring has trimmed included, and of their meta fields.

    Raises:
        NotABufferError: there is no buffer.
    """
    storage = Storage.open(path_of(source), read_only=True, verify="never")
    schema, table, episodes = storage.layout.schema, storage.table, len(storage.table.visible)
    steps = int(table.length[table.visible].sum())
    raw = [field for field in schema.fields.values() if not field.is_coded]
    rows = sum(field.itemsize * (steps + field.final * episodes) for field in raw)
    blobs = sum(_compression(storage, name).stored for name in storage.layout.coded)
    return rows + blobs + sum(field.itemsize * episodes for field in schema.meta_fields.values())


class Compression(NamedTuple):
    """The bytes of a field's timesteps in visible episodes, compressed and not, without unused parts of disk blocks.

    Attributes:
        codec: the codec, as JSON in the schema; None for lists.
        stored: the bytes of the blobs, their index and the dictionary.
        raw: the bytes of the same timesteps as rows.
    """

    codec: dict[str, Any] | None
    stored: int
    raw: int


def compression_of(folder: AnyPath) -> dict[str, Compression]:
    """How much smaller compression makes a folder.

    Args:
        folder: the path of a buffer.

    Returns:
        Field -> its bytes, for each field with a codec or of lists, in the order of the schema.

    Raises:
        NotABufferError: there is no buffer.
    """
    storage = Storage.open(path_of(folder), read_only=True, verify="never")
    return {name: _compression(storage, name) for name in storage.layout.coded}


def _compression(storage: Storage, name: str) -> Compression:
    field, table = storage.layout.coded[name], storage.table
    stored, rows = storage.layout.dictionaries.get(name, 0), 0
    for slot in table.visible.tolist():
        index = storage.maps.rows[name][storage.rows_of(slot, field.final)]
        stored, rows = stored + int(lengths_of(index).sum()) + index.nbytes, rows + len(index)
    codec = None if field.codec is None else codec_to_json(field.codec)
    return Compression(codec, stored, rows * field.itemsize)


class _Sample:
    """Random visible timesteps of a folder that this process has not read: the system drops no page that is mapped."""

    def __init__(self, storage: Storage) -> None:
        self._storage, table = storage, storage.table
        total = int(table.length[table.visible].sum())
        self.size = min(SAMPLE, total)
        # Another seed each time, as the timesteps of the last measurement are in memory now.
        slots, t = table.locate(table.visible, np.random.default_rng().choice(total, self.size, replace=False))
        self._places: dict[str, _Places] = {}
        for name, field in storage.layout.schema.fields.items():
            rows = storage.first_row(slots, field.final) + t
            stored = storage.maps.rows[name]
            if name in storage.maps.coded:  # the index is small, and in memory after this; the blobs are not
                index = stored[rows]
                self._places[name + BLOBS] = _Places(
                    storage.maps.coded[name].data,
                    *np.where(
                        beyond(storage.maps.coded[name], index), 0, [index[:, 0], index[:, 0] + lengths_of(index)]
                    ).astype(np.int64),
                )
            else:
                self._places[name] = _Places(stored, rows, rows + 1)
        sizes = (place.sizes for place in self._places.values())
        self.timestep_bytes = round(float(np.mean(sum(sizes)))) if self._places else 0

    def missing(self, part: IntArray | None = None) -> IntArray:
        """The numbers, of those in `part` (default: all), of timesteps with a page that is not in memory."""
        part = np.arange(self.size) if part is None else part
        cached = np.ones(len(part), bool)
        for place in self._places.values():
            cached &= in_memory(place.array, place.ranges(part))
        return part[~cached]

    def forget(self) -> None:
        """Drop the pages of the sample from the system's page cache."""
        for key, place in self._places.items():
            file = self._storage.layout.arrays[key]
            width, head = place.array.nbytes // max(1, len(place.array)), len(file.header)
            byte_ranges = zip((head + place.begin * width).tolist(), (head + place.stop * width).tolist(), strict=True)
            self._storage.folder.forget(file, byte_ranges)

    def read(self, part: IntArray) -> None:
        """Read timesteps of the sample, as batches are read: request all pages, then copy the rows, or blobs."""
        for place in self._places.values():
            will_need(place.array, sorted(place.ranges(part)))
        for place in self._places.values():
            for begin, stop in sorted(place.ranges(part)):
                place.array[begin:stop].copy()


class _Places(NamedTuple):
    """Ranges begin … stop - 1, (N,) int64, of rows or bytes of a mapped array, one for each timestep of a sample."""

    array: Array
    begin: IntArray
    stop: IntArray

    @property
    def sizes(self) -> IntArray:
        """(N,) the bytes of each range."""
        return (self.stop - self.begin) * (self.array.nbytes // max(1, len(self.array)))

    def ranges(self, part: IntArray) -> Iterator[tuple[int, int]]:
        """(begin, stop) of the timesteps with the numbers `part`."""
        return zip(self.begin[part].tolist(), self.stop[part].tolist(), strict=True)
