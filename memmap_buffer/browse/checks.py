"""Checks before a long training: statistics, entries that never change, NaN, episodes of one action."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from memmap_buffer.browse.episode_list import EpisodeList
from memmap_buffer.dtypes import Array
from memmap_buffer.episode_columns import column_of_objects, places_of
from memmap_buffer.errors import MemmapBufferError, NotEnoughDataError, StaleEpisodeError

ENTRIES = 32  # of a field that are listed
CHUNK_BYTES = 1 << 24


class Checks:
    """Checks of all episodes by a thread, begun when they are first asked for.

    Two columns of the list tell of each episode which fields hold NaN or an infinity, `nan`, and which never change
    in it, `constant`.

    Args:
        episodes: the list, which gets the columns.
        names: of the fields of numbers that are checked.
    """

    def __init__(self, episodes: EpisodeList, names: list[str]) -> None:
        self._episodes, self._names = episodes, names
        self._progress, self._failure = 0.0, ""
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
        """The findings so far: `rows` of statistics, `dead` entries, and in how many episodes which field is odd."""
        with self._turn:
            if self._thread is None or (self._failure and not self._thread.is_alive()):
                self._failure, self._rows, self._dead = "", [], []
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
        columns = self._episodes.columns
        odd = {
            kind: {name: sum(name in names for names in columns[kind]) for name in self._names}
            for kind in ("nan", "constant")
            if kind in columns
        }
        facts = {"progress": self._progress, "failure": self._failure, "rows": self._rows, "dead": self._dead}
        return {**facts, "odd": odd}

    def _run(self) -> None:
        try:
            self._check_each()
            if self._closed.is_set():
                return
            summary = self._episodes.buffer.statistics(self._names)
        except (MemmapBufferError, OSError) as error:
            self._failure = str(error)
            return
        for name, of in summary.fields.items():
            columns = {"mean": of.mean, "std": of.std, "min": of.min, "max": of.max}
            columns |= {f"{100 * q:g}%": values for q, values in of.quantiles.items()}
            spelled = [f"{name}[{', '.join(map(str, at))}]" if at else name for at in np.ndindex(of.mean.shape)]
            flat = {key: values.reshape(-1).tolist() for key, values in columns.items()}
            for i, entry in enumerate(spelled[:ENTRIES]):
                numbers = {key: v[i] if np.isfinite(v[i]) else None for key, v in flat.items()}
                self._rows.append({"entry": entry, "count": of.count, **numbers})
            dead = np.flatnonzero(of.min.reshape(-1) == of.max.reshape(-1)).tolist()
            if dead:
                listed = ", ".join(spelled[i] for i in dead[:ENTRIES]) + (", …" if len(dead) > ENTRIES else "")
                self._dead.append({"entries": listed, "number": len(dead), "of": len(spelled)})
        self._progress = 1.0

    def _check_each(self) -> None:
        buffer, names = self._episodes.buffer, self._episodes.names
        width = sum(buffer.schema.fields[name].itemsize for name in self._names)
        size = max(1, CHUNK_BYTES // max(1, buffer.max_timesteps * width))
        odd: dict[str, list[tuple[str, ...]]] = {"nan": [], "constant": []}
        checked = names[:0]
        for begin in range(0, len(names) if self._names else 0, size):
            if self._closed.is_set():
                return
            part, data = self._read(names[begin : begin + size])
            flags = {name: _flags(data[name], data["_lens"]) for name in self._names}
            for i in range(len(part)):
                odd["nan"].append(tuple(name for name, (bad, _) in flags.items() if bad[i]))
                odd["constant"].append(tuple(name for name, (_, same) in flags.items() if same[i]))
            checked = np.concatenate([checked, part])
            self._progress = 0.9 * (begin + len(part)) / len(names)
        self._episodes.add_columns(checked, {kind: column_of_objects(values) for kind, values in odd.items()})

    def _read(self, names: Array) -> tuple[Array, dict[str, Array]]:
        """The fields of some episodes, and which of them are still there."""
        while len(names):
            try:
                return names, self._episodes.buffer.batch(
                    names, fields=self._names, include_metadata=False, format="numpy"
                )
            except (StaleEpisodeError, NotEnoughDataError):
                self._episodes.look_again()
                names = names[places_of(names, self._episodes.names)[1]]
        empty = np.zeros((0, 1))
        return names, {"_lens": empty[:, 0], **dict.fromkeys(self._names, empty)}


def _flags(values: Array, lengths: Array) -> tuple[Array, Array]:
    """(n,) whether each episode holds what is no number; (n,) whether nothing changes in it."""
    flat = values.reshape(*values.shape[:2], -1)
    there = (np.arange(flat.shape[1]) < lengths[:, None])[:, :, None]
    bad = ~np.isfinite(flat) & there if flat.dtype.kind == "f" else np.zeros(flat.shape, np.bool_)
    same = ((flat == flat[:, :1]) | ~there).all(axis=(1, 2)) & (lengths > 1)
    return np.asarray(bad.any(axis=(1, 2))), np.asarray(same)
