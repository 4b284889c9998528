"""`Marked`: the episodes that a person marked so, or did not, as a filter; and the marks of a folder."""

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

LOOK_SECONDS = 0.05  # between two looks at whether marks changed
NOT = "!"


@dataclass(frozen=True)
class Marked:
    """A condition on the marks of an episode.

    Args:
        labels: of which it has one; none: of these it has any, or none at all.
        without: labels of which it has none.
        unlabelled: it has no label at all.
        file: where the marks are; default: with each folder.
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
            file: where the marks are.

        Raises:
            SchemaError: it names none.
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
        """(n,) whether the episodes of a folder are marked so.

        Raises:
            CorruptBufferError: the file of the marks is damaged.
        """
        marks = marks_of(storage, self.file)
        bare = Mark()
        return np.fromiter(
            (self._holds(marks.get(serial, bare)) for serial in serials.tolist()), np.bool_, len(serials)
        )

    def _holds(self, mark: Mark) -> bool:
        has = not self.without.intersection(mark.labels)
        if self.labels or self.unlabelled:
            has = has and bool(self.labels.intersection(mark.labels) or (self.unlabelled and not mark.labels))
        return has


class Watch:
    """A look, now and then, at whether the marks of some folders changed."""

    def __init__(self, marked: Marked) -> None:
        self._marked, self._looked = marked, -1.0
        self._stamp: tuple[Any, ...] = ()

    def stamp(self, storages: Sequence[Storage]) -> tuple[Any, ...]:
        """Another one where they did."""
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            file = self._marked.file
            places = [Marks(storage.folder) for storage in storages if storage.mirror is None]
            self._stamp = tuple(each.stamp for each in (places if file is None else [Marks.in_file(file)]))
        return self._stamp


def marks_of(storage: Storage, file: Path | None) -> dict[int, Mark]:
    """Serial -> mark, of a folder; those that were published with it, behind a URL.

    Raises:
        SchemaError: a file that is named is not there.
        CorruptBufferError: the file is damaged.
    """
    if file is not None or storage.mirror is None:
        marks = Marks(storage.folder) if file is None else Marks.in_file(file)
        return marks.of(storage.layout.id)
    data = storage.mirror.head().get(FILE)
    return {} if data is None else parsed(data, f"{storage.where}/{FILE}").get(storage.layout.id, {})
