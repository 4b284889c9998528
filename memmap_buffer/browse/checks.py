"""Checks before a long training: statistics, entries that never change, NaN, episodes in which a field is constant."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from memmap_buffer.browse.episode_list import EXACT, EpisodeList
from memmap_buffer.dtypes import Array
from memmap_buffer.episode_columns import column_of_objects, places_of
from memmap_buffer.errors import MemmapBufferError, NotEnoughDataError, StaleEpisodeError
from memmap_buffer.schema import flatten

ENTRIES = 32  # of a field: so many are listed at most
CHUNK_BYTES = 1 << 24


class Checks:
    """Checks of all episodes, made by a thread that the first `report` starts.

    They add two columns to the list: `nan`, the fields of an episode that hold NaN or an infinity, and `constant`, the
    fields that never change in the episode.

    Args:
        episodes: the list, which gets the columns.
        names: the fields of numbers to check.
    """

    def __init__(self, episodes: EpisodeList, names: list[str]) -> None:
        self._episodes, self._names = episodes, names
        self._failure = ""
        self._checked: Array = np.zeros((0, episodes.names.shape[1]), np.int64)
        self._odd: dict[str, list[tuple[str, ...]]] = {"nan": [], "constant": []}  # one value for each of `_checked`
        self._rows: list[dict[str, Any]] = []
        self._dead: list[dict[str, Any]] = []
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def report(self) -> dict[str, Any]:
        """The findings so far; starts the thread if there are episodes to check and it does not run.

        Returns:
            `rows` of statistics; `dead` entries, which never change; `odd`: column -> field -> in how many episodes the
            column has this field; `checked` of `total` episodes; `done`, whether no thread runs; and its `failure`.
        """
        columns = self._episodes.columns
        with self._turn:
            total, running = len(self._episodes.names), self._thread is not None and self._thread.is_alive()
            pending = len(self._unchecked())
            if not running and (pending or self._thread is None or self._failure):
                self._thread, running = threading.Thread(target=self._run, daemon=True), True
                self._thread.start()
        odd = {
            kind: {name: sum(name in names for names in columns[kind]) for name in self._names}
            for kind in self._odd
            if kind in columns
        }
        facts = {"checked": total - pending, "total": total, "done": not running, "failure": self._failure}
        return {**facts, "rows": self._rows, "dead": self._dead, "odd": odd}

    def _unchecked(self) -> Array:
        names = self._episodes.names
        return names[~places_of(names, self._checked)[1]]

    def _run(self) -> None:
        self._failure = ""
        try:
            self._check_each()
            if not self._closed.is_set():
                self._summarize()
        except (MemmapBufferError, OSError) as error:
            self._failure = str(error)

    def _summarize(self) -> None:
        rows, dead_entries = [], []
        for name, of in self._episodes.buffer.statistics(self._names).fields.items():
            columns = {"mean": of.mean, "std": of.std, "min": of.min, "max": of.max}
            columns |= {f"{100 * q:g}%": values for q, values in of.quantiles.items()}
            spelled = [f"{name}[{', '.join(map(str, at))}]" if at else name for at in np.ndindex(of.mean.shape)]
            entries = {key: values.reshape(-1).tolist() for key, values in columns.items()}
            for i, entry in enumerate(spelled[:ENTRIES]):
                numbers = {key: v[i] if np.isfinite(v[i]) else None for key, v in entries.items()}
                rows.append({"entry": entry, "count": of.count, **numbers})
            alike = of.min.reshape(-1) == of.max.reshape(-1)
            if self._episodes.buffer.schema.fields[name].storage.kind in "iu":
                alike &= np.abs(of.max.reshape(-1)) < EXACT  # larger ones are rounded, and may have differed
            dead = np.flatnonzero(alike).tolist()
            if dead:
                listed = ", ".join(spelled[i] for i in dead[:ENTRIES]) + (", …" if len(dead) > ENTRIES else "")
                dead_entries.append({"entries": listed, "number": len(dead), "of": len(spelled)})
        self._rows, self._dead = rows, dead_entries

    def _check_each(self) -> None:
        """Check the episodes that are not checked yet, and add the two columns."""
        buffer, names = self._episodes.buffer, self._unchecked()
        width = sum(buffer.schema.fields[name].itemsize for name in self._names)
        size = max(1, CHUNK_BYTES // max(1, buffer.max_timesteps * width))
        for begin in range(0, len(names), size):
            if self._closed.is_set():
                return
            part, data = self._read(names[begin : begin + size])
            flags = {name: _flags(data[name], data["_lens"]) for name in self._names}
            for i in range(len(part)):
                self._odd["nan"].append(tuple(name for name, (bad, _) in flags.items() if bad[i]))
                self._odd["constant"].append(tuple(name for name, (_, same) in flags.items() if same[i]))
            with self._turn:
                self._checked = np.concatenate([self._checked, part])
        order = np.lexsort(self._checked.T[::-1])
        columns = {kind: column_of_objects(values)[order] for kind, values in self._odd.items()}
        self._episodes.add_columns(self._checked[order], columns)

    def _read(self, names: Array) -> tuple[Array, dict[str, Array]]:
        """(the names of the episodes that are still there, their fields)."""
        while len(names):
            try:
                data = self._episodes.buffer.batch(names, fields=self._names, include_metadata=False, format="numpy")
                return names, flatten(data)
            except (StaleEpisodeError, NotEnoughDataError):
                self._episodes.look_again()
                names = names[places_of(names, self._episodes.names)[1]]
        empty = np.zeros((0, 1))
        return names, {"_lens": empty[:, 0], **dict.fromkeys(self._names, empty)}


def _flags(values: Array, lengths: Array) -> tuple[Array, Array]:
    """(n,) whether each episode holds a NaN or an infinity; (n,) whether it has several steps, all of them equal."""
    flat = values.reshape(*values.shape[:2], -1)
    there = (np.arange(flat.shape[1]) < lengths[:, None])[:, :, None]
    bad = ~np.isfinite(flat) & there if flat.dtype.kind == "f" else np.zeros(flat.shape, np.bool_)
    same = ((flat == flat[:, :1]) | ~there).all(axis=(1, 2)) & (lengths > 1)
    return np.asarray(bad.any(axis=(1, 2))), np.asarray(same)
