"""Marks that people set on episodes by eye: labels and a note, by folder id and serial, in a JSON file of its own.

Of a folder it is `extra/marks.json`; of folders that cannot be written to, as behind a URL, any file that is named. It
is replaced as a whole under a lock of its own, `.marks.lock` beside the folder's `.lock`, so marks are set beside a
writer of episodes, and from several processes, and none is lost. Who reads needs no lock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memmap_buffer.errors import BufferLockedError, CorruptBufferError, SchemaError
from memmap_buffer.format.folder import Folder

FILE = "extra/marks.json"
LOCK = ".marks.lock"
FORMAT = {"format": "memmap-buffer-marks", "version": 1}
MAX_BYTES = 1 << 28
MAX_TEXT = 10_000  # characters of a note
MAX_LABEL = 64
MAX_KEPT = 64  # files whose marks are kept while they stay as they are
SETTLED_NS = 100_000_000
WAIT_SECONDS, POLL_SECONDS = 10.0, 0.01  # for who changes the file at the same time

# By single operations of a dict, without a lock: a process may be forked while another thread is here.
_kept: dict[Path, tuple[tuple[int, int, int], dict[str, dict[int, Mark]]]] = {}


@dataclass(frozen=True)
class Mark:
    """The labels of an episode, such as "good" or "bad", in the order of the alphabet, and a note."""

    labels: tuple[str, ...] = ()
    note: str = ""

    def changed(self, add: Collection[str] = (), remove: Collection[str] = (), note: str | None = None) -> Mark:
        """The mark with some labels more, some less, and another note, where one is given."""
        labels = ({*self.labels} - {*remove}) | {*add}
        return Mark(tuple(sorted(labels)), self.note if note is None else note)


class Marks:
    """The marks in one file, by folder id.

    Args:
        folder: where the file is.
        name: of the file.
        lock: the name of its lock.
        named: whether a user named it: then it must be there to be read.
    """

    def __init__(self, folder: Folder, name: str = FILE, lock: str = LOCK, named: bool = False) -> None:
        self.folder = folder
        self.name = name
        self.lock = lock
        self.named = named

    @classmethod
    def in_file(cls, path: Path) -> Marks:
        """The marks in a file that is named.

        Raises:
            SchemaError: there is no folder for it.
        """
        if not path.parent.is_dir():
            raise SchemaError(f"marks: got {path}, but there is no folder {path.parent}; make it first")
        return cls(Folder(path.parent), path.name, f".{path.name}.lock", named=True)

    @property
    def stamp(self) -> tuple[int, int, int]:
        """Another one whenever the file was replaced."""
        return self.folder.marks(self.name)

    def of(self, folder_id: str) -> dict[int, Mark]:
        """Serial -> mark, of one folder.

        Raises:
            SchemaError: a file that was named is not there.
            CorruptBufferError: the file is damaged, or of a newer version.
        """
        path, stamp = self.folder.path / self.name, self.stamp
        if self.named and stamp[2] < 0:
            raise SchemaError(f"marks: there is no file {path}; check the path, or make it by mark(…, file=…)")
        if (kept := _kept.get(path)) is not None and kept[0] == stamp:
            return kept[1].get(folder_id, {})
        marks = self._read()
        if time.time_ns() - stamp[1] > SETTLED_NS:  # else another one may yet take its place with the same stamp
            if len(_kept) >= MAX_KEPT:
                _kept.clear()
            _kept[path] = stamp, marks
        return marks.get(folder_id, {})

    def create(self) -> None:
        """Make the file, without marks, where there is none."""
        if self.stamp[2] < 0:
            self.change("", (), lambda mark: mark, 0)

    def change(
        self, folder_id: str, serials: Iterable[int], change: Callable[[Mark], Mark], oldest: int
    ) -> dict[int, Mark]:
        """Change the marks of some episodes: all of them, or after an error none.

        Args:
            folder_id: their folder.
            serials: the episodes.
            change: from the mark that one has to the one that it gets.
            oldest: marks of older episodes are dropped. Of newer ones none is, though this process may not see them:
                another one may have published and marked them meanwhile.

        Returns:
            Serial -> mark, of all episodes of the folder.

        Raises:
            SchemaError: a label or a note does not fit.
            ReadOnlyError: nothing may be written there.
            BufferLockedError: another process holds the lock for ten seconds.
            CorruptBufferError: the file is damaged; it stays as it is.
        """
        lock = self._taken()
        try:
            everything = self._read()
            marks = {serial: mark for serial, mark in everything.get(folder_id, {}).items() if serial >= oldest}
            for serial in serials:
                marks[serial] = _checked(change(marks.get(serial, Mark())))
            everything[folder_id] = {serial: mark for serial, mark in sorted(marks.items()) if mark != Mark()}
            self._write(everything)
            return everything[folder_id]
        finally:
            lock.release()

    def _taken(self) -> Any:
        end = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                return self.folder.lock(self.lock)
            except BufferLockedError as error:
                if time.monotonic() > end:
                    path = self.folder.path / self.lock
                    raise BufferLockedError(f"{path}: somebody has been changing marks for too long") from error
            time.sleep(POLL_SECONDS)

    def _read(self) -> dict[str, dict[int, Mark]]:
        try:
            data = self.folder.read(self.name, MAX_BYTES)
        except FileNotFoundError:
            return {}
        return parsed(data, str(self.folder.path / self.name))

    def _write(self, marks: Mapping[str, Mapping[int, Mark]]) -> None:
        self.folder.unlink(f"{self.name}.new", missing_ok=True)  # of one who was killed
        self.folder.write_new(f"{self.name}.new", text_of(marks), sync=True)
        self.folder.rename(f"{self.name}.new", self.name)


def parsed(data: bytes, where: str) -> dict[str, dict[int, Mark]]:
    """Folder id -> serial -> mark. Raises CorruptBufferError: the bytes are no marks."""
    try:
        document = json.loads(data)
        if {key: document[key] for key in FORMAT} != FORMAT:
            raise ValueError(f"got {document['format']} {document['version']}, this is version {FORMAT['version']}")
        return {
            folder_id: {int(serial): _checked(Mark(_tuple(m["labels"]), m["note"])) for serial, m in marks.items()}
            for folder_id, marks in document["folders"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptBufferError(
            f"{where}: no marks that can be read ({error}); move it away to go on without", path=where
        ) from error


def _tuple(labels: Any) -> tuple[Any, ...]:
    if not isinstance(labels, list):
        raise TypeError(f"labels are {labels!r}, not a list")
    return tuple(labels)


def text_of(marks: Mapping[str, Mapping[int, Mark]]) -> bytes:
    """The file that holds them."""
    folders = {
        folder_id: {str(serial): {"labels": mark.labels, "note": mark.note} for serial, mark in each.items()}
        for folder_id, each in marks.items()
        if each
    }
    return json.dumps({**FORMAT, "folders": folders}, indent=1, ensure_ascii=False).encode()


def renamed(data: bytes, old: str, new: str) -> bytes:
    """The file for a copy of a folder, which has another id."""
    marks = parsed(data, FILE)
    return text_of({new if folder_id == old else folder_id: each for folder_id, each in marks.items()})


def _checked(mark: Mark) -> Mark:
    for label in mark.labels:
        if not isinstance(label, str) or not 0 < len(label) <= MAX_LABEL or not label.isprintable() or "!" in label[:1]:
            raise SchemaError(
                f"mark: got the label {label!r}, expected text of 1 to {MAX_LABEL} characters that can be printed and "
                "does not begin with '!'"
            )
    if not isinstance(mark.note, str):
        raise SchemaError(f"mark: got the note {mark.note!r}, expected text")
    if len(mark.note) > MAX_TEXT:
        raise SchemaError(f"mark: got a note of {len(mark.note)} characters, at most {MAX_TEXT} are kept; shorten it")
    return mark
