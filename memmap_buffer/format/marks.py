"""Marks that people set on episodes by eye: labels and a note, by folder id and serial, in a JSON file of its own.

The file is `extra/marks.json` in the folder. For folders that cannot be written to (behind a URL, for example), the
user names another file. It is replaced as a whole under a lock of its own, `.marks.lock` beside the folder's `.lock`.
So several processes, and a writer of episodes beside them, may work at once, and no mark is lost. Readers need no lock.
"""

from __future__ import annotations

import json
import re
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
MAX_KEPT = 64  # files whose marks are kept in memory until they change
SETTLED_NS = 100_000_000  # two changes within this time may bear the same time stamp
_NO_TEXT = re.compile("[\ud800-\udfff]")  # as Python reads bytes of a command that are no UTF-8
WAIT_SECONDS = 10.0  # for another process that is changing the file

# Used by single operations of a dict, so that it needs no lock: a process may be forked while another thread is here.
_kept: dict[Path, tuple[tuple[int, int, int], dict[str, dict[int, Mark]]]] = {}


@dataclass(frozen=True)
class Mark:
    """The labels of an episode, such as "good" or "bad", in the order of the alphabet, and a note."""

    labels: tuple[str, ...] = ()
    note: str = ""

    def changed(self, add: Collection[str] = (), remove: Collection[str] = (), note: str | None = None) -> Mark:
        """This mark with labels removed, labels added, and another note unless `note` is None."""
        labels = ({*self.labels} - {*remove}) | {*add}
        return Mark(tuple(sorted(labels)), self.note if note is None else note)


class Marks:
    """The marks in one file, by folder id.

    Args:
        folder: where the file is.
        name: of the file. One that a user named, another than `FILE`, must exist when it is read.
        lock: the name of its lock.
    """

    def __init__(self, folder: Folder, name: str = FILE, lock: str = LOCK) -> None:
        self.folder, self.name, self.lock = folder, name, lock

    @classmethod
    def in_file(cls, path: Path) -> Marks:
        """The marks in a file that a user named.

        Raises:
            SchemaError: the folder of the file does not exist.
        """
        if not path.parent.is_dir():
            raise SchemaError(f"marks: got {path}, but there is no folder {path.parent}; make it first")
        return cls(Folder(path.parent), path.name, f".{path.name}.lock")

    @property
    def stamp(self) -> tuple[int, int, int]:
        """A value that changes whenever the file is replaced."""
        return self.folder.marks(self.name)

    def of(self, folder_id: str) -> dict[int, Mark]:
        """Serial -> mark, of one folder.

        Raises:
            SchemaError: the file that the user named does not exist.
            CorruptBufferError: the file is damaged, or of a newer version.
        """
        path, stamp = self.folder.path / self.name, self.stamp
        if self.name != FILE and stamp[2] < 0:
            raise SchemaError(f"marks: there is no file {path}; check the path, or make it by mark(…, file=…)")
        if (kept := _kept.get(path)) is not None and kept[0] == stamp:
            return kept[1].get(folder_id, {})
        marks = self._read()
        if time.time_ns() - stamp[1] > SETTLED_NS:  # else the file may be replaced by another with the same stamp
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
            change: a function from an episode's mark to its new mark.
            oldest: a serial: marks of older episodes are dropped. Marks of newer ones are kept, also of episodes that
                this process does not see yet: another process may have published and marked them.

        Returns:
            Serial -> mark, of all episodes of the folder.

        Raises:
            SchemaError: a label or a note does not fit.
            ReadOnlyError: nothing may be written there.
            BufferLockedError: the lock was held by others for ten seconds.
            CorruptBufferError: the file is damaged; it stays as it is.
        """
        try:
            with self.folder.locked(self.lock, WAIT_SECONDS):
                return self._write_changed(folder_id, serials, change, oldest)
        except BufferLockedError as error:
            path = self.folder.path / self.lock
            raise BufferLockedError(f"{path}: somebody has been changing marks for too long") from error

    def _write_changed(
        self, folder_id: str, serials: Iterable[int], change: Callable[[Mark], Mark], oldest: int
    ) -> dict[int, Mark]:
        """Change marks with the lock held: in the block that holds it a signal could end a loop without its end."""
        everything = self._read()
        marks = {serial: mark for serial, mark in everything.get(folder_id, {}).items() if serial >= oldest}
        for serial in serials:
            marks[serial] = _checked(change(marks.get(serial, Mark())))
        everything[folder_id] = {serial: mark for serial, mark in sorted(marks.items()) if mark != Mark()}
        data = text_of(everything)
        if len(data) > MAX_BYTES:
            got = f"{self.folder.path / self.name}: got {len(data):,} bytes of marks"
            raise SchemaError(f"{got}, expected at most {MAX_BYTES:,}; shorten notes")
        self.folder.replace_file(self.name, data)
        return everything[folder_id]

    def _read(self) -> dict[str, dict[int, Mark]]:
        try:
            data = self.folder.read(self.name, MAX_BYTES)
        except FileNotFoundError:
            return {}
        return parsed(data, str(self.folder.path / self.name))


def parsed(data: bytes, where: str) -> dict[str, dict[int, Mark]]:
    """Folder id -> serial -> mark, from the bytes of a file. Raises CorruptBufferError: they are no marks."""
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
    """The bytes of a file that holds the marks."""
    folders = {
        folder_id: {str(serial): {"labels": mark.labels, "note": mark.note} for serial, mark in each.items()}
        for folder_id, each in marks.items()
        if each
    }
    return json.dumps({**FORMAT, "folders": folders}, indent=1, ensure_ascii=False).encode()


def renamed(data: bytes, old: str, new: str) -> bytes:
    """The bytes of a file of marks for a copy of folder `old` that has the id `new`."""
    marks = parsed(data, FILE)
    return text_of({new if folder_id == old else folder_id: each for folder_id, each in marks.items()})


def _checked(mark: Mark) -> Mark:
    for label in mark.labels:
        if not isinstance(label, str) or not 0 < len(label) <= MAX_LABEL or not label.isprintable() or "!" in label[:1]:
            raise SchemaError(
                f"mark: got the label {label!r}, expected text of 1 to {MAX_LABEL} characters that can be printed and "
                "does not begin with '!'"
            )
    if not isinstance(mark.note, str) or _NO_TEXT.search(mark.note):
        raise SchemaError(f"mark: got the note {mark.note!r}, expected text")
    if len(mark.note) > MAX_TEXT:
        raise SchemaError(f"mark: got a note of {len(mark.note)} characters, at most {MAX_TEXT} are kept; shorten it")
    return mark
