"""`OpenEpisodes`: the episodes of one folder that are open, as long as somebody holds them. No I/O.

To begin an episode, or to end one, takes as long however many there are: those that may have been left in the middle of
their end are watched apart, and an episode that nobody holds any more takes itself out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref


class OpenEpisodes:
    """Open episodes, in the order in which they were begun; `len` is how many there are at most."""

    def __init__(self) -> None:
        self._every: dict[ref[Any], None] = {}
        self.watched: dict[ref[Any], None] = {}

    def __len__(self) -> int:
        return len(self._every)

    def __iter__(self) -> Iterator[Any]:
        """The episodes whose block was not left."""
        return iter([episode for episode in self.every() if not episode.was_left])

    def every(self) -> list[Any]:
        """All of them."""
        return self._open(self._every)

    def add(self, episode: Any, *, watched: bool = False) -> None:
        """Know of one more, which may be left already if it is to be watched."""
        reference = ref(episode, self.remove)
        if watched:
            self.watched[reference] = None
        self._every[reference] = None

    def remove(self, reference: ref[Any]) -> None:
        """The episode of a reference is over, or another folder's, or nobody holds it any more."""
        self._every.pop(reference, None)
        self.watched.pop(reference, None)

    def watch(self, episode: Any) -> None:
        """An episode may be left from now on: it has a block, or nobody has it yet."""
        self.watched[ref(episode, self.remove)] = None

    def trust(self, episode: Any) -> None:
        """An episode can be left no more."""
        self.watched.pop(ref(episode), None)

    def abandoned(self) -> list[Any]:
        """The episodes whose block was left, which are some of the `watched`."""
        return [episode for episode in self._open(self.watched) if episode.was_left]

    def _open(self, episodes: dict[ref[Any], None]) -> list[Any]:
        """The ones that are open here; whatever an interruption left that is over, or another's, is gone then."""
        living = [episode for each in list(episodes) if (episode := each()) is not None]
        for episode in living:
            if episode.state != "open" or episode.writer.lock.episodes is not self:
                self.remove(ref(episode))
        return [episode for episode in living if ref(episode) in episodes]
