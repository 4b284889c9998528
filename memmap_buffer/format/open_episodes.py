"""`OpenEpisodes`: the open episodes of one folder, by weak references. No I/O.

To begin or to end an episode takes the same time however many are open. So those of `with` statements, which may be
over without having ended their episode, are in a dict of their own (`watched`). An episode that is collected is taken
out by the next `add`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias
from weakref import ref

# Tells whether a `with` statement is over: a weak reference to what only that holds, so it gives None then.
Statement: TypeAlias = Callable[[], object]


def ended_statement() -> None:
    """The `Statement` of an episode that nobody got: it is ended by the next call that writes."""


def unknown_statement() -> bool:
    """The `Statement` of a block that no `with` statement began, such as that of an `ExitStack`: it is never over."""
    return True


class OpenEpisodes:
    """Open episodes, in the order in which they were begun; `len` may count some that are over.

    Attributes: watched: weak references to the episodes of `with` statements, and these `Statement`s.
    """

    def __init__(self) -> None:
        self._every: dict[ref[Any], None] = {}
        self._collected: list[ref[Any]] = []  # of episodes that nobody holds any more, and of some that were removed
        self.watched: dict[ref[Any], Statement] = {}

    def __len__(self) -> int:
        return len(self._every)

    def __iter__(self) -> Iterator[Any]:
        """The open episodes, without those that were left."""
        return iter([episode for episode in self.every() if not self.was_left(episode)])

    def every(self) -> list[Any]:
        """All open episodes, also those that were left."""
        return self._open(list(self._every))

    def was_left(self, episode: Any) -> bool:
        """Whether the `with` statement of an open episode is over: the next call that writes ends the episode."""
        return self.watched.get(ref(episode), unknown_statement)() is None

    def abandoned(self) -> list[Any]:
        """The open episodes that were left."""
        references = []
        for reference, statement in list(self.watched.items()):
            if statement() is None or reference() is None:
                references.append(reference)
        return self._open(references) if references else []

    def add(self, episode: Any, statement: Statement | None = None) -> None:
        """Add an episode; see `watch`."""
        if statement is not None:
            self.watched[ref(episode)] = statement
        while self._collected:
            self._every.pop(self._collected.pop(), None)
        # A function of Python's own that raises nothing: of what comes while a reference calls, Ctrl-C say, nobody is
        # told; and who looked through all references may hold one that was removed.
        self._every[ref(episode, self._collected.append)] = None

    def remove(self, reference: ref[Any]) -> None:
        """Remove an episode: it is over, or belongs to another folder now."""
        self._every.pop(reference, None)
        self.watched.pop(reference, None)

    def watch(self, episode: Any, statement: Statement | None) -> None:
        """Have an episode end with a `with` statement; None: not any more, as somebody holds it, or its end failed."""
        if statement is None:
            self.watched.pop(ref(episode), None)
        else:
            self.watched[ref(episode)] = statement

    def _open(self, references: Iterable[ref[Any]]) -> list[Any]:
        """The episodes that are open in this folder; removes others, which an interruption may have left here."""
        episodes = []
        for reference in references:
            episode = reference()
            if episode is not None and episode.state == "open" and episode.writer.lock.episodes is self:
                episodes.append(episode)
            else:
                self.remove(reference)
        return episodes
