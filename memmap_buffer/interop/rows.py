"""B endless rows of timesteps in a folder, read by time: the ring buffers of JAX's libraries, without JAX.

A row has no end, but the steps of a folder are in episodes. So rows are stored in parts, an episode for each row; all
rows are cut at the same time. A part begins with the last steps of the part before, so that every window of a row lies
within one part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer import Field, NotEnoughDataError, Prioritized, ReplayBuffer, SchemaError, Window
from memmap_buffer.adapters import AnyPath, Array, flatten
from memmap_buffer.interop.columns import IntArray
from memmap_buffer.interop.trainer_memory import SPARE_SLOTS

ROW, START = "row", "start"  # meta fields of a part: its row, and the time of its first step
SPARE_STEPS = 16  # room in each row: a process that dies while it adds a step leaves some rows one step longer
LONGEST = 1000  # default timesteps of a part


class Part(NamedTuple):
    """A stretch of every row.

    Args:
        start: the time of its first step.
        before: how many steps of a row were published before this part; a step stored in two parts counts twice.
        serials: (B,) its episodes, row by row.
    """

    start: int
    before: int
    serials: IntArray


class Rows:
    """The newest steps of B rows. Opened again, rows go on, also after the writing process was killed.

    Args:
        folder: where the steps are; made if it is missing.
        fields: of a step.
        num_rows: B.
        length: at least so many newest steps of each row can be read.
        window: the length of the windows that are read.
        period: windows drawn by `draw` begin every so many steps.
        options: of `ReplayBuffer`, such as `durability`; `max_timesteps` is the length of a part.

    Attributes:
        num_rows: B.
        disk: the buffer. Each of its episodes is one row of a part.
        time: how many steps were ever added to each row.

    Raises:
        SchemaMismatchError: the folder holds other rows.
    """

    def __init__(
        self,
        folder: AnyPath,
        fields: Mapping[str, Field],
        num_rows: int,
        length: int,
        window: int,
        period: int = 1,
        **options: Any,
    ) -> None:
        taken = {ROW, START} & fields.keys()
        if taken:
            raise SchemaError(f"fields: got {', '.join(sorted(taken))}, which name the parts of rows; rename it")
        self.num_rows, self._window, self._period = num_rows, window, period
        longest = int(options.pop("max_timesteps", max(2 * window, min(LONGEST, length))))
        if longest < 2 * window:
            raise SchemaError(f"max_timesteps: got {longest}, expected two windows at least, {2 * window}")
        cuts = length // (longest - window) + 2
        self._kept = length + cuts * (window - 1)
        self.disk = ReplayBuffer(
            folder,
            max_episodes=max(1000, 2 * num_rows * (cuts + 1)),
            max_timesteps=longest,
            fields=fields,
            meta_fields={ROW: "int", START: "int"},
            capacity=num_rows * (self._kept + SPARE_STEPS),
            spare_slots=max(SPARE_SLOTS, num_rows),
            publish="step",
            terminated=None,
            truncated=None,
            **options,
        )
        self._view = Window(window, boundary="drop")
        self.time = self._begun = self._used = self._published = 0
        self._parts: tuple[Part, ...] = ()
        self._resume()

    @property
    def oldest(self) -> int:
        """The time of the oldest step that is sure to be readable."""
        if not self._parts:
            return 0
        number = max(0, self._published - self._kept)
        part = [part for part in self._parts if part.before <= number][-1]
        return part.start + number - part.before

    def add(self, columns: Mapping[str, Array]) -> None:
        """Append T steps to each row.

        Args:
            columns: field -> (B, T, *field).

        Raises:
            MemmapBufferError: as `ReplayBuffer.extend` raises it; `time` then says how many steps are stored.
        """
        steps = {name: np.asarray(column).swapaxes(0, 1) for name, column in columns.items()}
        try:
            self._append_all(steps, len(next(iter(steps.values()))))
        except BaseException:
            self.disk.end_episodes()
            self._resume()
            raise

    def _append_all(self, steps: dict[str, Any], count: int) -> None:
        done = 0
        while done < count:
            if self._used == self.disk.max_timesteps:
                self._cut()
            stop = min(count, done + self.disk.max_timesteps - self._used)
            self._append({name: values[done:stop] for name, values in steps.items()}, stop - done)
            self.time, done = self.time + stop - done, stop

    def _cut(self) -> None:
        """Begin a part. Store again, as its first steps, those of windows that the part before holds incompletely."""
        incomplete = max(0, self.time - self._window + 1)
        start = min(-(-incomplete // self._period) * self._period, self.time)
        count, rows = self.time - start, np.arange(self.num_rows)
        again = self._read(rows, np.full_like(rows, start), Window(count, boundary="drop")) if count else {}
        self._begun = start
        self._used = 0
        if count:
            self._append({name: values.swapaxes(0, 1) for name, values in again.items()}, count)

    def _append(self, steps: Mapping[str, Any], count: int) -> None:
        """Append (T, B, *field) to the newest part; the first steps of a part make it known to readers."""
        if self._used:
            if count == 1:
                self.disk.add(**{name: values[0] for name, values in steps.items()})
            else:
                self.disk.extend(**steps)
        else:
            axes = (count, self.num_rows)
            place: dict[str, Any] = {
                ROW: np.broadcast_to(np.arange(self.num_rows), axes),
                START: np.full(axes, self._begun),
            }
            self.disk.extend(**steps, **place)
            part = Part(self._begun, self._published, self.disk.serials[-self.num_rows :])
            self._set([*(old for old in self._parts if old.start + self.disk.max_timesteps > self.oldest), part])
        self._used += count
        self._published += count

    def _set(self, parts: Sequence[Part]) -> None:
        """Publish the list of parts to `read` and `oldest`, which other threads may call."""
        self._table = np.array([part.start for part in parts]), np.array([part.serials for part in parts])
        self._parts = tuple(parts)

    def _resume(self) -> None:
        """Find the parts that the folder has; the next step begins a new part."""
        self._used, self._published, self.time = self.disk.max_timesteps, 0, 0
        self._set([])
        if not self.disk.num_steps:
            return
        longest = self.disk.max_timesteps
        view = Window(longest, stride=longest, fields=(), boundary="pad")  # one an episode, from its first visible step
        batch = self.disk.batch(view=view, format="numpy", return_indices=True)
        serials, first = batch["_indices"].T
        parts: list[Part] = []
        for start in np.unique(batch[START]).tolist():
            here = np.flatnonzero(batch[START] == start)
            here = here[np.argsort(batch[ROW][here], kind="stable")]
            if len(here) == self.num_rows:  # else rows were retired, or the process died as the part began
                skipped = int(first[here].max())
                before = self._published - skipped
                parts.append(Part(start, before, serials[here]))
                end = int((first + batch["_lens"])[here].min())
                self._published, self.time = before + end, start + end
        self._set(parts)

    # Reading

    def read(self, rows: IntArray, times: IntArray) -> dict[str, Array]:
        """Windows by their rows and the times of their first steps.

        Args:
            rows: (n,) from 0 to B - 1.
            times: (n,) from `oldest` to `time` - `window`.

        Returns:
            Field -> (n, window, *field).

        Raises:
            NotEnoughDataError: a window is not complete yet, or is overwritten.
        """
        if not (self.oldest <= times.min() and times.max() <= self.time - self._window):
            where = f"{self.disk.folder}: got windows of {self._window} from {times.min()} to {times.max()}"
            raise NotEnoughDataError(f"{where}, rows have the steps from {self.oldest} to {self.time - 1}; add more")
        return self._read(rows, times, self._view)

    def steps(self, times: IntArray) -> dict[str, Array]:
        """Single steps of every row.

        Args:
            times: (n,) from `oldest` to `time` - 1.

        Returns:
            Field -> (B, n, *field).
        """
        count, every = len(times), np.arange(self.num_rows)
        if not count:
            spec = self.disk.schema.fields
            return {name: np.zeros((self.num_rows, 0, *spec[name].shape), spec[name].storage) for name in spec}
        columns = self._read(np.repeat(every, count), np.tile(times, self.num_rows), Window(1, boundary="drop"))
        return {name: column.reshape(self.num_rows, count, *column.shape[2:]) for name, column in columns.items()}

    def _read(self, rows: IntArray, times: IntArray, view: Window) -> dict[str, Array]:
        starts, serials = self._table
        part = np.searchsorted(starts, times, side="right") - 1
        indices = np.stack([serials[part, rows], times - starts[part]], axis=1)
        return self._fields(self.disk.batch(indices, view=view, format="numpy", include_metadata=False))

    def draw(
        self, count: int, seed: int, prioritized: Prioritized | None = None, conditions: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Array], Array, Array | None]:
        """Draw windows from all that are stored; some may begin up to `window` steps before the newest `length` steps.

        Args:
            count: n, how many windows.
            seed: decides which windows are drawn; the same as long as steps and priorities are the same.
            prioritized: how to draw by priority; None: uniformly.
            conditions: on the first step of a window; see `filter_fields`.

        Returns:
            (field -> (n, window, *field); (n, 2) indices for `update_priorities`; (n,) probabilities, None if uniform).

        Raises:
            NotEnoughDataError: there is nothing to draw.
        """
        batch = self.disk.sample(
            count,
            seed=seed,
            view=Window(self._window, stride=self._period, boundary="drop"),
            prioritized=prioritized,
            filter_fields=conditions,
            return_indices=True,
            include_metadata=False,
            format="numpy",
        )
        return self._fields(batch), batch["_indices"], batch.get("_probabilities")

    def _fields(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """The fields of a batch by dotted name."""
        flat = flatten(batch)
        return {name: flat[name] for name in self.disk.fieldnames}
