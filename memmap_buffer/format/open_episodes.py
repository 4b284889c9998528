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
        self._watched: dict[ref[Any], None] = {}

    def __len__(self) -> int:
        return len(self._every)

    def __iter__(self) -> Iterator[Any]:
        """The episodes whose block was not left."""
        return iter([episode for episode in self.every() if not episode.was_left])

    def every(self) -> list[Any]:
        """All of them."""
        return self._open(self._every)

    def add(self, episode: Any) -> None:
        """Know of one more."""
        self._keep(self._every, episode)

    def remove(self, episode: Any) -> None:
        """An episode is over, or another folder's."""
        self._every.pop(ref(episode), None)
        self._watched.pop(ref(episode), None)

    def watch(self, episode: Any) -> None:
        """An episode may be left from now on: it has a block, or nobody has it yet."""
        self._keep(self._watched, episode)

    def trust(self, episode: Any) -> None:
        """An episode can be left no more."""
        self._watched.pop(ref(episode), None)

    def abandoned(self) -> list[Any]:
        """The episodes whose block was left."""
        if not self._watched:
            return []
        return [episode for episode in self._open(self._watched) if episode.was_left]

    def _open(self, episodes: dict[ref[Any], None]) -> list[Any]:
        """The ones that are open here; whatever an interruption left that is over, or another's, is gone then."""
        living = [episode for each in list(episodes) if (episode := each()) is not None]
        for episode in living:
            if episode.state != "open" or episode.writer.lock.episodes is not self:
                self.remove(episode)
        return [episode for episode in living if ref(episode) in episodes]

    @staticmethod
    def _keep(episodes: dict[Any, None], episode: Any) -> None:
        episodes[ref(episode, lambda gone: episodes.pop(gone, None))] = None
