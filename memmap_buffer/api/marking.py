"""`Markable`: the labels and notes that people give to episodes by eye, and the browser page to set them in.

`Readable` inherits it, so every buffer has it. The file of the marks is `format.marks`, the page `browse.server`.
"""

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
    """The marks of `ReplayBuffer` and `ConcatBuffer`. They need no writer's lock, so a recorder may go on meanwhile."""

    _folders: Folders
    _forbids_marks = False  # whether the buffer was opened with `read_only`

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
        """A page for a browser: all episodes with their frames and curves, statistics, and marks to set by eye.

        A thread of this process serves the page until `close`; new episodes appear by themselves. A notebook shows its
        address as a link; in a program, call `print(page.address)` and `page.wait()`.

        Args:
            reward: the field whose sum is an episode's return.
            title: the title of the page; default: the name of the folder.
            rate: the steps a second at which episodes are played; default: the rate of the data set that was imported,
                if it has one, else 10.
            read_only: neither show nor set marks.
            marks: the file of the marks; default: `extra/marks.json` of each folder. Without it, a buffer at a URL or
                one that is read-only has no marks.
            host: the address to listen at; with others than 127.0.0.1, all who know the page's address can read all
                episodes.
            port: the port; default: any that is free.

        Returns:
            The page, with its `address`, `wait` and `close`, which `with` calls.

        Raises:
            ImportError: the extra `browse` is not installed.
            SchemaError: there is no folder for the file of marks, or `reward` is no field of one number a timestep.
            OSError: the port is taken.
        """
        from memmap_buffer.browse.server import Page

        storages = self._folders.storages
        default = "" if all(self._may_mark(storage) for storage in storages) else None
        file = None if read_only else default if marks is None else str(path_of(marks))
        if file:
            Marks.in_file(path_of(file)).create()
        title = title or ", ".join(storage.path.name for storage in storages[:3]) + ", …" * (len(storages) > 3)
        source = cast("ReplayBuffer | ConcatBuffer", self)
        return Page(source, title, places=self._places, reward=reward, rate=rate, marks=file, host=host, port=port)

    def _places(self) -> dict[str, str]:
        """Number of a folder, as text -> its path or URL; a single folder has the key ""."""
        folders = self._folders.by_number(self._folders.tables)
        return {"" if self._folders.single else str(number): str(storage.where) for number, storage, _ in folders}

    def _may_mark(self, storage: Storage) -> bool:
        """Whether marks can be kept with this folder."""
        return storage.mirror is None and not self._forbids_marks

    def marks(self, file: AnyPath | None = None) -> dict[Any, Mark]:
        """The marks of visible episodes.

        Args:
            file: the file of the marks; default: `extra/marks.json` of each folder.

        Returns:
            Serial -> mark, of a `ConcatBuffer` (folder, serial) -> mark; episodes without a mark are left out.

        Raises:
            SchemaError: `file` is given, and is not there.
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
        """Change the marks of episodes. A recorder, and others who set marks, may go on meanwhile.

        Args:
            indices: (n,) serials, of a `ConcatBuffer` (n, 2) of (folder, serial), as `_index` of a batch; or one.
            add: labels that the episodes get, such as "good" or "bad".
            remove: labels that they lose.
            note: the new note; "" removes it, None keeps it.
            file: the file of the marks; default: `extra/marks.json` of each folder.

        Returns:
            The number of these episodes that are gone, and were not marked. Earlier marks of such episodes are dropped.

        Raises:
            SchemaError: the indices, a label or the note has a wrong form.
            ReadOnlyError: a folder may not be written to; name a `file`.
            CorruptBufferError: the file is damaged; it stays as it is.
        """
        labels, removed = _labels(add, "add"), _labels(remove, "remove")
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
            if not (present := shown.intersection(wanted)):
                continue
            if file is None and not self._may_mark(storage):
                raise ReadOnlyError(
                    f"{storage.where}: it is read-only, and holds no marks; give a file for them: mark(…, file=…), "
                    "browse(marks=…), or --marks"
                )
            marks = Marks(storage.folder) if file is None else Marks.in_file(path_of(file))
            marks.change(storage.layout.id, present, lambda mark: mark.changed(labels, removed, note), _oldest(storage))
            gone -= sum(serial in present for serial in wanted)
        return gone


def _oldest(storage: Storage) -> int:
    """A serial below which no process can see an episode: the lowest one in any record, visible or not."""
    words = storage.maps.words
    serials = words[:, SERIAL][words[:, GENERATION] != 0]
    return int(serials.min()) if len(serials) else 0


def _labels(labels: Iterable[str], where: str) -> tuple[str, ...]:
    """Labels as a tuple. Raises SchemaError, about the argument `where`: they are a single text, or no texts."""
    texts = () if isinstance(labels, (str, Mapping)) else tuple(labels)
    if isinstance(labels, (str, Mapping)) or not all(isinstance(label, str) for label in texts):
        raise SchemaError(f"mark: got {where}={labels!r}, expected several labels, as in {where}=['bad']")
    return texts
