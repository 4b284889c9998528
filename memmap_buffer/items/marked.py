"""`Marked`: the filter by the marks (labels) that a person gave to episodes, as `Selection.mark` holds it.

Marks change without a change of the folder, so readers ask a `Watch` whether the index must be made anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer.errors import SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.marks import FILE, Mark, Marks, parsed
from memmap_buffer.format.storage import Storage
from memmap_buffer.views.anchors import BoolArray

LOOK_SECONDS = 0.05  # the least time between two looks at the files of marks
NOT = "!"  # before a label: the episode must not have it


@dataclass(frozen=True)
class Marked:
    """A condition on the labels of an episode.

    Args:
        labels: it has one of these labels; none: any label, or no label, will do.
        without: it has none of these labels.
        unlabelled: it may also have no label at all; without `labels` it must have none.
        file: the file of the marks; default: that of each folder.
    """

    labels: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    unlabelled: bool = False
    file: Path | None = None

    @classmethod
    def parse(cls, mark: Any, file: Path | None) -> Marked:
        """The condition that the option `mark` names.

        Args:
            mark: a label, "!" and a label, "" for no label at all, or several of these.
            file: the file of the marks, or None.

        Raises:
            SchemaError: `mark` is none of these.
        """
        texts = [mark] if isinstance(mark, str) else mark
        if not isinstance(texts, Iterable) or not (texts := [*texts]) or not all(isinstance(t, str) for t in texts):
            raise SchemaError(
                f"mark: got {mark!r}, expected a label, such as 'good', '!bad' for episodes without it, '' for those "
                "without any, or several of these"
            )
        without = frozenset(text[len(NOT) :] for text in texts if text.startswith(NOT))
        if "" in without:
            raise SchemaError(f"mark: got {mark!r}, expected a label behind {NOT!r}, as in '!bad'")
        labels = frozenset(text for text in texts if text and not text.startswith(NOT))
        return cls(labels, without, "" in texts, file)

    def __repr__(self) -> str:
        texts = [*sorted(self.labels), *(NOT + label for label in sorted(self.without)), *[""] * self.unlabelled]
        return repr(texts[0] if len(texts) == 1 else texts)

    def keep(self, storage: Storage, serials: IntArray) -> BoolArray:
        """(n,) whether the condition holds for the episodes with these serials (n,) of a folder.

        Raises:
            CorruptBufferError: the file of the marks is damaged.
        """
        marks = marks_of(storage, self.file)
        no_mark = Mark()
        return np.fromiter(
            (self._holds(marks.get(serial, no_mark)) for serial in serials.tolist()), np.bool_, len(serials)
        )

    def _holds(self, mark: Mark) -> bool:
        """Whether the condition holds for an episode with this mark."""
        holds = not self.without.intersection(mark.labels)
        if self.labels or self.unlabelled:
            holds = holds and bool(self.labels.intersection(mark.labels) or (self.unlabelled and not mark.labels))
        return holds


class Watch:
    """It tells whether the marks of folders changed, by a look at their files at most every `LOOK_SECONDS`; and at once
    where the folders are others.
    """

    def __init__(self, marked: Marked) -> None:
        self._marked, self._looked = marked, -1.0
        self._storages: Sequence[Storage] = ()
        self._stamp: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, (self._marked,)  # without the folders

    def stamp(self, storages: Sequence[Storage]) -> tuple[Any, ...]:
        """A value that differs after a change of the marks."""
        now = time.monotonic()
        if storages is not self._storages or now - self._looked > LOOK_SECONDS:
            self._storages, self._looked = storages, now
            file = self._marked.file
            self._stamp = tuple(map(_stamp_of, storages)) if file is None else (Marks.in_file(file).stamp,)
        return self._stamp


def _stamp_of(storage: Storage) -> Any:
    """A value that differs after a change of a folder's marks; of one at a URL, with each version that is published."""
    return Marks(storage.folder).stamp if storage.mirror is None else storage.path


def marks_of(storage: Storage, file: Path | None) -> dict[int, Mark]:
    """Serial -> mark, for the marked episodes of a folder; of a folder at a URL, the marks that were published with it.

    Raises:
        SchemaError: `file` is given, and is not there.
        CorruptBufferError: the file is damaged.
    """
    if file is not None or storage.mirror is None:
        marks = Marks(storage.folder) if file is None else Marks.in_file(file)
        return marks.of(storage.layout.id)
    data = storage.mirror.head().get(FILE)
    return {} if data is None else parsed(data, f"{storage.where}/{FILE}").get(storage.layout.id, {})
