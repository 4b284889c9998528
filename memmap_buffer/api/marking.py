"""Marks of episodes that people set by eye, and the page to set them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from memmap_buffer.dtypes import to_numpy
from memmap_buffer.errors import ReadOnlyError, SchemaError
from memmap_buffer.format.marks import Mark, Marks
from memmap_buffer.format.records import GENERATION, SERIAL
from memmap_buffer.format.storage import Storage
from memmap_buffer.items.marked import marks_of
from memmap_buffer.paths import AnyPath, path_of
from memmap_buffer.views.folders import Folders

if TYPE_CHECKING:
    from memmap_buffer.api.buffer import ReplayBuffer
    from memmap_buffer.api.concat import ConcatBuffer
    from memmap_buffer.browse.server import Page


class Markable:
    """The marks of `ReplayBuffer` and `ConcatBuffer`: they need no writer's lock, and are set beside a recorder."""

    _folders: Folders

    def browse(
        self,
        *,
        reward: str = "reward",
        title: str = "",
        rate: float | None = None,
        read_only: bool = False,
        marks: AnyPath | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> Page:
        """A page for a browser: all episodes, each with its frames and curves, statistics; and to mark them by eye.

        It is served by a thread of this process until `close`, and shows new episodes by itself. A notebook shows its
        address as a link; in a program, `print(page.address)` and `page.wait()`.

        Args:
            reward: the field whose sum is an episode's return.
            title: of the page; default: the name of the folder.
            rate: the steps a second at which episodes are played; default: those of the data set that was imported,
                where it told them, else 10.
            read_only: show and set no marks.
            marks: the file that they are in; default: `extra/marks.json` of each folder. Behind a URL, or of a buffer
                that is read-only, there are none without it.
            host: the address to listen at; beyond 127.0.0.1 whoever knows the page's address reads all episodes.
            port: the port; default: any that is free.

        Returns:
            The page, with its `address`, `wait` and `close`, which `with` calls.

        Raises:
            ImportError: the extra `browse` is not installed.
            SchemaError: there is no folder for the file of marks.
            OSError: the port is taken.
        """
        from memmap_buffer.browse.server import Page

        storages = self._folders.storages
        kept = "" if all(self._may_mark(storage) for storage in storages) else None
        chosen = None if read_only else kept if marks is None else str(path_of(marks))
        if chosen:
            Marks.in_file(path_of(chosen)).create()
        title = title or ", ".join(storage.path.name for storage in storages[:3]) + ", …" * (len(storages) > 3)
        source = cast("ReplayBuffer | ConcatBuffer", self)
        return Page(source, title, places=self._places, reward=reward, rate=rate, marks=chosen, host=host, port=port)

    def _places(self) -> dict[str, str]:
        """The paths or URLs of the folders, by number, of a single one by ""."""
        folders = self._folders.by_number(self._folders.tables)
        return {"" if self._folders.single else str(number): str(storage.where) for number, storage, _ in folders}

    def _may_mark(self, storage: Storage) -> bool:
        return storage.mirror is None and not self._forbids_marks

    @property
    def _forbids_marks(self) -> bool:
        """Whether it was opened to write nothing at all."""
        return False

    def marks(self, file: AnyPath | None = None) -> dict[Any, Mark]:
        """The marks of visible episodes.

        Args:
            file: the file that they are in; default: `extra/marks.json` of each folder.

        Returns:
            Serial -> mark, of a `ConcatBuffer` (folder, serial) -> mark; episodes without one are left out.

        Raises:
            SchemaError: the file that is named is not there.
            CorruptBufferError: the file is damaged.
        """
        out: dict[Any, Mark] = {}
        for number, storage, table in self._folders.by_number(self._folders.refresh()):
            shown = {*table.serial[table.whole].tolist()}
            for serial, mark in marks_of(storage, None if file is None else path_of(file)).items():
                if serial in shown:
                    out[serial if self._folders.single else (number, serial)] = mark
        return out

    def mark(
        self,
        indices: Any,
        *,
        add: Iterable[str] = (),
        remove: Iterable[str] = (),
        note: str | None = None,
        file: AnyPath | None = None,
    ) -> int:
        """Change the marks of episodes; a recorder, and others who mark, may go on meanwhile.

        Args:
            indices: (n,) serials, of a `ConcatBuffer` (n, 2) of (folder, serial), as `_index` of a batch; or one.
            add: labels that they get, such as "good" or "bad".
            remove: labels that they lose.
            note: another note; "" removes it.
            file: the file that the marks are in; default: `extra/marks.json` of each folder.

        Returns:
            How many of the episodes are gone, and were not marked. Marks of episodes that are gone are dropped.

        Raises:
            SchemaError: the indices, a label or the note do not fit.
            ReadOnlyError: a folder may not be written to; name a `file`.
            CorruptBufferError: the file is damaged; it stays as it is.
        """
        labels, less = _labels(add, "add"), _labels(remove, "remove")
        names = np.atleast_1d(to_numpy(indices))
        if not names.size:
            return 0
        several = not self._folders.single
        names = names.reshape(-1, 2) if several and names.size == 2 else names
        if names.dtype.kind not in "iu" or names.shape[1:] != ((2,) if several else ()):
            raise SchemaError(
                f"mark: got indices of {names.dtype} and shape {names.shape}, expected "
                f"{'(n, 2) of (folder, serial)' if several else '(n,) serials'}, as `_index` of a batch"
            )
        gone = len(names)
        for number, storage, table in self._folders.by_number(self._folders.refresh()):
            wanted = (names[names[:, 0] == number, 1] if several else names).tolist()
            shown = {*table.serial[table.whole].tolist()}
            if not (there := shown.intersection(wanted)):
                continue
            if file is None and not self._may_mark(storage):
                raise ReadOnlyError(
                    f"{storage.where}: it is read-only, and holds no marks; give a file for them: mark(…, file=…), "
                    "browse(marks=…), or --marks"
                )
            marks = Marks(storage.folder) if file is None else Marks.in_file(path_of(file))
            marks.change(storage.layout.id, there, lambda mark: mark.changed(labels, less, note), _oldest(storage))
            gone -= sum(serial in there for serial in wanted)
        return gone


def _oldest(storage: Storage) -> int:
    """A serial below which no episode can be seen by anybody: the lowest that stands in a record, of whatever worth."""
    words = storage.maps.words
    serials = words[:, SERIAL][words[:, GENERATION] != 0]
    return int(serials.min()) if len(serials) else 0


def _labels(labels: Iterable[str], where: str) -> tuple[str, ...]:
    each = () if isinstance(labels, (str, Mapping)) else tuple(labels)
    if isinstance(labels, (str, Mapping)) or not all(isinstance(label, str) for label in each):
        raise SchemaError(f"mark: got {where}={labels!r}, expected several labels, as in {where}=['bad']")
    return each
