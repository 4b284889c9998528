"""How fast rows come from the disk: some are dropped from the system's cache, and read again. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.folder import in_memory, will_need
from memmap_buffer.format.host import file_system
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import CAN_FORGET

NO_DISK = ("tmpfs", "ramfs")
SAMPLE = 4096  # timesteps that are looked at, and dropped
FIRST, BATCH = 8, 256  # timesteps read at a time: few at first, as a slow disk takes 0.1 s for these
IN_MEMORY = 0.95  # of a sample: batches hardly wait for the rest


@dataclass(frozen=True)
class FromDisk:
    """How fast timesteps, all fields of each, come from the disk.

    Attributes: cached: the part of the sample that was in memory before. batch: how many were asked for at once. rate:
        timesteps a second; 0 where none could be dropped, as others use them. timestep_bytes: of one.
    """

    cached: float
    batch: int
    rate: float
    timestep_bytes: int


def from_disk(path: Path, seconds: float, *, larger: bool) -> FromDisk | None:
    """Measure it, where it matters.

    Args:
        seconds: after these no batch is begun.
        larger: whether the data is larger than memory; otherwise it matters only if it is not in memory now.

    Returns: None where it is in memory, on a file system without a disk, where there are no timesteps, or where the
        system cannot tell.
    """
    storage = Storage.open(path, read_only=True, verify="never")
    if not CAN_FORGET or file_system(path) in NO_DISK or not storage.table.steps:
        return None
    sample = _Sample(storage)
    cached = 1 - len(sample.missing()) / sample.size
    if cached > IN_MEMORY and not larger:
        return None
    sample.forget()
    took = _measured(sample, seconds)
    rate = 1 / float(np.median(took[max(took)])) if took else 0.0
    return FromDisk(cached, max(took, default=0), rate, sample.timestep_bytes)


def _measured(sample: _Sample, seconds: float) -> dict[int, list[float]]:
    """Timesteps asked for at once -> seconds that one of them took, in each batch that had to wait for the disk."""
    took: dict[int, list[float]] = {}
    left, end, batch = sample.missing(), perf_counter() + seconds, FIRST
    while len(left) and (not took or perf_counter() < end):
        part, left = sample.missing(left[:batch]), left[batch:]  # some came in the same pages as those before
        if len(part):
            begin = perf_counter()
            sample.read(part)
            took.setdefault(batch, []).append((perf_counter() - begin) / len(part))
        batch = min(2 * batch, BATCH)
    return took


class _Sample:
    """Random visible timesteps of a folder of which this process has read nothing: what is mapped is not dropped."""

    def __init__(self, storage: Storage) -> None:
        self._storage, table = storage, storage.table
        slots, fields = table.visible, storage.layout.schema.fields
        stops = np.cumsum(table.length[slots], dtype=np.int64)
        self.size = min(SAMPLE, int(stops[-1]))
        # another seed each time: what the last measurement read is in memory now
        steps = np.random.default_rng().choice(int(stops[-1]), self.size, replace=False)
        episode = np.searchsorted(stops, steps, side="right")
        t = steps - (stops - table.length[slots])[episode]
        self._rows = {name: storage.first_row(slots[episode], field.final) + t for name, field in fields.items()}
        self.timestep_bytes = sum(field.itemsize for field in fields.values())

    def missing(self, part: IntArray | None = None) -> IntArray:
        """Those of a part of the sample, default all, that have a page which is not in memory."""
        part = np.arange(self.size) if part is None else part
        maps, found = self._storage.maps, np.ones(len(part), bool)
        for name, rows in self._rows.items():
            found &= in_memory(maps.rows[name], rows[part].tolist())
        return part[~found]

    def forget(self) -> None:
        """Drop the pages of the sample from the cache."""
        arrays = self._storage.layout.arrays
        for name, rows in self._rows.items():
            file = arrays[name]
            width = self._storage.layout.schema.fields[name].itemsize
            starts = len(file.header) + rows * width
            self._storage.folder.forget(
                file.name, file.header, file.size, zip(starts.tolist(), (starts + width).tolist(), strict=True)
            )

    def read(self, part: IntArray) -> None:
        """As batches are read: all are asked for, then copied."""
        sorted_rows = {name: np.sort(rows[part]) for name, rows in self._rows.items()}
        maps = self._storage.maps.rows
        for name, rows in sorted_rows.items():
            will_need(maps[name], zip(rows.tolist(), (rows + 1).tolist(), strict=True))
        for name, rows in sorted_rows.items():
            maps[name].take(rows, axis=0)
