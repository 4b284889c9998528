"""The table of all episodes, kept up to date with the buffer and its marks.

It is filtered, sorted and cut into pages here, so the browser never holds all rows. The name of an episode is its
serial; in a root of shards it is the shard's number and the serial.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer.conditions import column_of, matching
from memmap_buffer.dtypes import Array
from memmap_buffer.episode_columns import EpisodeColumns, column_of_objects, histogram_of, order_of, places_of, tags_of
from memmap_buffer.errors import MemmapBufferError, SchemaError

if TYPE_CHECKING:
    from memmap_buffer import ConcatBuffer, ReplayBuffer

LOOK_SECONDS = 0.5  # between two looks at the buffer and its marks
TRIES = 3
EXACT = 2**53  # floats of 64 bits, as those of JavaScript, round whole numbers beyond
RESERVED = ("mark", "note", "published", "nan", "constant")


class EpisodeList:
    """The episodes of a buffer as columns: those of `EpisodeColumns`, `published`, `mark`, `note`, and others added.

    A thread adds returns and ends, the newest episodes first.

    Args:
        buffer: the buffer whose episodes are listed.
        reward: the field of one number a step whose sum is the return.
        marks: the file of the marks; "" for the file in each folder; None: there are no marks.
    """

    def __init__(self, buffer: ReplayBuffer | ConcatBuffer, reward: str = "reward", marks: str | None = None) -> None:
        self.buffer, self.marks = buffer, marks
        self.version = 0  # counts up whenever the columns change
        self._table = EpisodeColumns(buffer, reward, RESERVED)
        self._tags: dict[str, Array] | None = None
        self._added: tuple[Array, dict[str, Array]] = self.names, {}
        self._turn = threading.Lock()
        self._looked = -np.inf
        self._closed = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._add_sums, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    @property
    def names(self) -> Array:
        """(episodes, 1) serials, or (episodes, 2) of (shard, serial), in the order of the columns."""
        return self._table.names

    @property
    def reward(self) -> str | None:
        return self._table.reward

    @property
    def progress(self) -> float:
        """The share of episodes whose return and end are known."""
        return self._table.progress

    @property
    def columns(self) -> dict[str, Array]:
        """Name -> (episodes,), of the buffer as it was at most `LOOK_SECONDS` ago."""
        with self._turn:
            if self._tags is None or time.monotonic() - self._looked > LOOK_SECONDS:
                self._look()
            assert self._tags is not None
            return self._table.columns | self._tags

    def look_again(self) -> int:
        """Look at the buffer and its marks now. Returns the version of the columns."""
        with self._turn:
            self._look()
            return self.version

    def add_columns(self, names: Array, columns: dict[str, Array]) -> None:
        """Add columns, tuples of labels for each episode in `names`; for other episodes the tuples are empty."""
        with self._turn:
            self._added = names, columns
            self._look()

    def rows(self, where: Iterable[str] = (), sort: str | None = None, reverse: bool = False) -> dict[str, Array]:
        """The columns, filtered and sorted.

        Args:
            where: conditions that all rows fulfil, see `matching`.
            sort: the column to sort by; None: the newest episodes come first.
            reverse: whether the highest value comes first; without effect if `sort` is None.

        Raises:
            SchemaError: a condition cannot be read, or there is no such column.
        """
        table = matching(self.columns, where)
        if sort is None:
            order = np.arange(len(table["serial"]))[::-1]
        else:
            order = order_of(column_of(table, sort, "sort"), reverse)
        return {name: values[order] for name, values in table.items()}

    def page(self, where: Iterable[str], sort: str | None, reverse: bool, number: int, size: int) -> dict[str, Any]:
        """Page `number`, from 1, of the rows, as JSON can hold them; each row has its episode's name as `_id`."""
        table = self.rows(where, sort, reverse)
        count, begin = len(table["serial"]), (max(1, number) - 1) * size
        part = {name: values[begin : begin + size].tolist() for name, values in table.items()}
        rows = [dict(zip(part, map(_plain, row), strict=True)) for row in zip(*part.values(), strict=True)]
        for row in rows:
            row["_id"] = f"{row['shard']}-{row['serial']}" if "shard" in row else str(row["serial"])
        pages = max(1, -(-count // size))
        return {"data": rows, "last_page": pages, "last_row": count, "total": len(self.names)}

    def histograms(self, where: Iterable[str] = ()) -> dict[str, tuple[list[int], list[float]]]:
        """Column of numbers -> (how many episodes lie in each of equal parts of its range, the edges of the parts)."""
        out = {}
        for name, values in matching(self.columns, where).items():
            if values.dtype.kind in "iuf" and name not in ("serial", "shard", "published"):
                counts, edges = histogram_of(values)
                if len(counts) > 1:
                    out[name] = (counts.tolist(), edges.tolist())
        return out

    def name_of(self, text: str) -> tuple[int, ...]:
        """The name of an episode from its text, such as "12", or "3-12" in a root.

        Raises:
            SchemaError: the text is no name of an episode.
        """
        numbers = text.split("-")
        if len(numbers) != self.names.shape[1] or not all(n.isdecimal() and len(n) < 19 for n in numbers):
            raise SchemaError(f"episode: got {text!r}, expected its number, in a root behind its shard's, as in 3-12")
        return tuple(map(int, numbers))

    def _look(self) -> None:
        """Look at the buffer and its marks. After an error `_tags` is None, so `columns` looks again."""
        self._looked = time.monotonic()
        before, self._tags = self._tags, None
        changed = self._table.follow()
        tags = {"published": self._published()} | self._marked() | self._others()
        if changed or before is None or not _alike(tags, before):
            self.version += 1
        self._tags = tags

    def _published(self) -> Array:
        """When each episode was published, in seconds since 1970; 0 where that is not known yet."""
        for _ in range(TRIES):
            serials, times = self.buffer.serials, self.buffer.episode_times
            if not np.array_equal(serials, self.buffer.serials):
                continue  # episodes came or went between the calls
            if self.names.shape[1] == 1:
                place, is_there = places_of(self.names, serials[:, None])
                return np.where(is_there, times[place], 0) if len(times) else np.zeros(len(self.names), np.int64)
            if np.array_equal(serials, self.names[:, 1]):
                return times
        return np.zeros(len(self.names), np.int64)

    def _marked(self) -> dict[str, Array]:
        """The columns `mark`, tuples of labels, and `note`."""
        if self.marks is None:
            return {}
        return tags_of(self.buffer, self.names, self.marks or None)

    def _others(self) -> dict[str, Array]:
        """The columns of `add_columns`, for the episodes that are in the table now."""
        place, is_there = places_of(self.names, self._added[0])
        pairs = [*zip(place.tolist(), is_there.tolist(), strict=True)]
        return {
            name: column_of_objects([values[at] if there else () for at, there in pairs])
            for name, values in self._added[1].items()
        }

    def _add_sums(self) -> None:
        while not self._closed.is_set():
            with self._turn:
                names = self._table.pending()
            added = False
            try:
                data = self._table.read(names) if len(names) else None
                with self._turn:
                    if data is not None and self._table.add(names, data):
                        self.version, added = self.version + 1, True
                    elif len(names):  # some of these episodes are gone, or have become longer
                        self._look()
            except (MemmapBufferError, OSError):  # a damaged file, a server that does not answer: tried again later
                pass
            if not added:
                self._closed.wait(LOOK_SECONDS)


def _alike(tags: dict[str, Array], others: dict[str, Array]) -> bool:
    return tags.keys() == others.keys() and all(np.array_equal(tags[name], others[name]) for name in tags)


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, float) and not np.isfinite(value):
        return None if np.isnan(value) else str(value)
    as_text = isinstance(value, complex) or (isinstance(value, int) and abs(value) > EXACT)
    return str(value) if as_text else value
