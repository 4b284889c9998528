"""`OpenEpisodes`: the open episodes of one folder, by weak references. No I/O.

To begin or to end an episode takes the same time however many are open. So episodes whose block may have been left
without running through its end are kept in a dict of their own (`watched`), and an episode that is collected removes
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref


class OpenEpisodes:
    """Open episodes, in the order in which they were begun; `len` may count some that are over.

    Attributes: watched: weak references to the episodes whose block may be left from now on (`Episode.was_left`).
    """

    def __init__(self) -> None:
        self._every: dict[ref[Any], None] = {}
        self.watched: dict[ref[Any], None] = {}

    def __len__(self) -> int:
        return len(self._every)

    def __iter__(self) -> Iterator[Any]:
        """The open episodes whose block was not left."""
        return iter([episode for episode in self.every() if not episode.was_left])

    def every(self) -> list[Any]:
        """All open episodes, also those whose block was left."""
        return self._open(self._every)

    def add(self, episode: Any, *, watched: bool = False) -> None:
        """Add an episode, and watch it if its block may be left, or was left already."""
        reference = ref(episode, self.remove)
        if watched:
            self.watched[reference] = None
        self._every[reference] = None

    def remove(self, reference: ref[Any]) -> None:
        """Remove an episode: it is over, or belongs to another folder now, or was collected."""
        self._every.pop(reference, None)
        self.watched.pop(reference, None)

    def watch(self, episode: Any) -> None:
        """Watch an episode, which may be left from now on: it has a block, or its caller has not got it yet."""
        self.watched[ref(episode, self.remove)] = None

    def trust(self, episode: Any) -> None:
        """Stop watching an episode: its block ended, so it cannot be left any more."""
        self.watched.pop(ref(episode), None)

    def abandoned(self) -> list[Any]:
        """The open episodes whose block was left. Only `watched` ones can be among them."""
        return [episode for episode in self._open(self.watched) if episode.was_left]

    def _open(self, episodes: dict[ref[Any], None]) -> list[Any]:
        """The episodes that are open in this folder; removes others, which an interruption may have left here."""
        living = [episode for each in list(episodes) if (episode := each()) is not None]
        for episode in living:
            if episode.state != "open" or episode.writer.lock.episodes is not self:
                self.remove(ref(episode))
        return [episode for episode in living if ref(episode) in episodes]
