"""Several open episodes that step together; a step is stored for all of them or for none.

What an episode's timesteps are is `episode`'s; how it becomes visible is the writer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import MemmapBufferError, SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.open_episodes import ended_statement
from memmap_buffer.schema import Field
from memmap_buffer.writing.episode import Block, End, Episode
from memmap_buffer.writing.rounds import Round
from memmap_buffer.writing.steps import Errors, Steps
from memmap_buffer.writing.validation import add_defaults, whole_final
from memmap_buffer.writing.writer import Writer

NOTHING: Mapping[str, Array] = {}


class EpisodeGroup(Block):
    """B open episodes that step together; `episodes` are its members, in the order of the batch axis.

    As a context manager it publishes all of them at the end of the block, and aborts all on any exception.

    Args:
        writer: who publishes them.
        episodes: the members.
        size: B, where there are not so many yet.
    """

    def __init__(self, writer: Writer, episodes: Sequence[Episode], *, size: int | None = None) -> None:
        self.schema = writer.schema
        self.episodes = list(episodes)
        self.thread = get_ident()
        self._writer, self._limit = writer, writer.max_timesteps
        self._size = len(self.episodes) if size is None else size
        self._everyone: IntArray = np.arange(self._size)
        self._round: Round | None = None  # what appends to the episodes together, once it is needed
        self._missing: object = None  # steps that were given, and may not all be stored
        self._following: dict[str, Array] = {}  # what was seen after the last step

    def __len__(self) -> int:
        return self._size

    @property
    def state(self) -> str:
        """ "open" as long as one of them is, then "ended"."""
        return "open" if any(episode.state == "open" for episode in self.episodes) else "ended"

    @property
    def _members(self) -> Sequence[Episode]:
        return self.episodes

    def store(self, **batch: Any) -> None:
        """Append one timestep to every episode.

        Args:
            batch: field -> (B, *field).

        Raises:
            SchemaError: as `Episode.store` raises it; then no episode got the step.
            EpisodeStateError: likewise.
            OSError: likewise.
        """
        where = f"timestep {self.episodes[0].length}"
        columns = self._encode(self.schema.flatten(batch), self.schema.fields, where)
        add_defaults(self.schema, columns, (len(self),), where)
        while True:
            writer = self.episodes[0].writer
            with writer.lock.turn:
                if writer is self.episodes[0].writer:  # they may have been handed on while this thread waited
                    self._store(columns, writer)
                    return

    def _store(self, columns: Mapping[str, Array], writer: Writer) -> None:
        self._settle_interrupted()
        if writer is not self._writer:
            self._writer, self._round = writer, None
        for episode in self.episodes:
            if episode.state != "open" or episode.ended or episode.finals:
                episode.refuse()
        joint = self._round or writer.new_round(self._size)
        self._join(joint, [i for i, each in enumerate(self.episodes) if each.lengths is not joint.lengths])
        if joint.remaining <= 0:
            writer.require_within(1 + self._limit)
        try:
            if not self._append_to_all(columns):
                self._missing = steps = Steps.of(self.schema, columns, {})
                steps.recorded = self._everyone
                self._append_some(joint, steps)
            self._missing = None
        except BaseException:  # now, as a member may be given a step of its own next
            with suppress(MemmapBufferError, OSError):  # of a disk that is full, say: then the next call does it
                self._settle_interrupted()
            raise

    def final(self, **batch: Any) -> None:
        """Store every episode's observation after the last action: field -> (B, *field)."""
        columns = self._encode(whole_final(self.schema, batch), self.schema.fields, "final")
        self._settle_interrupted()
        for i, episode in enumerate(self.episodes):
            episode.set_final({name: rows[i] for name, rows in columns.items()})

    def update(self, meta: Mapping[str, Any]) -> None:
        """Set meta fields: name -> (B, *field)."""
        columns = self._encode(self.schema.flatten(meta), self.schema.meta_fields, "meta")
        for i, episode in enumerate(self.episodes):
            episode.set_meta({name: rows[i] for name, rows in columns.items()})

    def __setitem__(self, name: str, values: Any) -> None:
        self.update({name: values})

    def publish(self) -> None:
        """Publish the episodes, in the order of the batch axis."""
        self._settle_interrupted()
        self._publish(dict.fromkeys([episode for episode in self.episodes if episode.state == "open"], False))

    def _publish(self, cut: Mapping[Episode, bool]) -> None:
        """Publish open episodes together, those that were `cut` short flagged; those without steps are dropped."""
        self._writer.publish({episode: is_cut for episode, is_cut in cut.items() if episode.length})
        for episode in cut:
            if episode.length:
                episode.release()
            else:
                episode.abort()

    def abort(self) -> None:
        """Drop all that are open."""
        for episode in self.episodes:
            episode.abort()

    def leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """The end of its block, as for each of its episodes."""
        try:
            self._settle_interrupted()
            if kind is None:
                self.publish()
            for episode in self.episodes:
                episode.leave(kind)
        except Exception:
            self.watch(None)
            raise
        except BaseException:
            self.watch(ended_statement)
            raise

    def _encode(self, batch: Mapping[str, Any], fields: Mapping[str, Field], where: str) -> dict[str, Array]:
        self.schema.require_fields(batch, where, fields)
        columns = self.schema.encode_all(fields, batch, 1, f", {where}")
        for name, rows in columns.items():
            if len(rows) != len(self):
                what = f"got a batch of {len(rows)}, expected {len(self)}"
                raise SchemaError(f"field {name!r}, {where}: {what}", field=name)
        return columns

    # A step of all of them

    def _append_to_all(
        self, columns: Mapping[str, Array], meta: Mapping[str, Array] = NOTHING, errors: Errors | None = None
    ) -> bool:
        """Append a timestep (B, *field) that ends no episode; False where it may, or not all are appended to together.

        It may not be stored, and not all be told of it, as long as `_missing` is not None.
        """
        joint = self._round
        if joint is None or not joint.is_whole or joint.remaining <= 1 or self.schema.lists:
            return False
        for name in self.schema.ends:
            if np.count_nonzero(columns[name]):
                return False
        following = self._following
        self._missing, self._following = (self.episodes[0], joint.lengths.item(0), columns, meta, errors), {}
        try:
            joint.append(columns)
        except MemmapBufferError:  # it was refused, and the episodes go on
            self._missing, self._following, self._round = None, following, None
            raise
        except OSError:
            self._round = None
            self._account_and_keep()
            raise
        return True

    def _append_some(self, joint: Round, steps: Steps) -> None:
        """Append timesteps up to the next end: for all environments or for none."""
        chosen = steps.recorded
        strangers = joint.without(chosen if joint.shows else self._everyone).tolist()
        if steps.meta and joint.shows:
            self._begin_with_meta(steps, strangers)
        self._join(joint, strangers)
        start, stop = steps.done, self._stop(joint, steps)
        self._require_lists(steps, stop)
        if not len(chosen):
            steps.before = None
            steps.over[:], steps.done = False, stop
            return
        ends = self._ends(steps, stop - 1, joint, stop - start)
        steps.begin_to_store(self.episodes[chosen.item(0)], ends)
        try:
            published = self._published_with(steps, ends) if joint.shows else ()
            joint.extend(steps.fields, range(start, stop), chosen, published)
        finally:
            self._account()

    def _join(self, joint: Round, environments: Sequence[int]) -> None:
        """Append to the episodes of some environments together with others from now on; those that left are out."""
        if environments or not joint.is_whole:
            self._round = None  # interrupted in between, where the next step belongs is not known to it
            joint.join({i: self.episodes[i] for i in environments})
        self._round = joint

    def _stop(self, joint: Round, steps: Steps) -> int:
        """Up to which timestep all can be stored at once: only the last of them may end an episode, or be left out."""
        if len(steps.recorded) < self._size or len(steps.ends) == 1:
            return steps.done + 1
        stop = min(len(steps.ends), steps.done + min(joint.most, joint.remaining))
        ended = np.flatnonzero(steps.ends[steps.done : stop].any(axis=1))
        return steps.done + int(ended[0]) + 1 if ended.size else stop

    def _settle_interrupted(self) -> None:
        """Have a step that was interrupted be of all episodes or of none."""
        if self._missing is not None:
            self._settle()
            self._missing = None

    def _settle(self) -> None:
        """Whatever interrupted a step: all environments have it or none."""
        self._round = None
        for episode in self.episodes:
            if episode.state == "open":
                self._writer.follow(episode)
        self._account()
        if isinstance(self._missing, Steps):
            self._missing.before = None  # what is not stored by now never is: its episode may be over

    def _account(self) -> None:
        """Tell what is to be known of given timesteps as far as they are stored, if it was not told to its end."""
        if isinstance(self._missing, tuple):  # one that went the short way
            episode, length, *columns = self._missing
            steps = Steps.of(self.schema, *columns)
            steps.recorded, steps.over = self._everyone, np.zeros(self._size, np.bool_)
            steps.before = episode, length, 0
            self._missing = steps
        if isinstance(self._missing, Steps):
            count = self._missing.count()
            if count:
                self._tell(self._missing, count)
                self._missing.before = None

    def _account_and_keep(self) -> None:
        """Account for given timesteps, and have copies of the rest: after an error their arrays may be used again."""
        self._account()
        if isinstance(self._missing, Steps):
            self._missing.keep()

    def _require_lists(self, steps: Steps, stop: int) -> None:
        """Raise EpisodeStateError where lists have no room, before any environment has a timestep."""
        for i in steps.recorded.tolist() if self.schema.lists else ():
            rows = {name: [*steps.fields[name][steps.done : stop, i]] for name in self.schema.lists}
            if steps.following and (
                steps.ends[stop - 1, i] or self.episodes[i].length + stop - steps.done == self._limit
            ):
                for name in self.schema.final_names & rows.keys():
                    rows[name].append(steps.following[name][stop - 1, i])
            self.episodes[i].require_lists(rows)

    def _begin_with_meta(self, steps: Steps, environments: Iterable[int]) -> None:
        """Give episodes that begin the meta fields of their first timestep, from which on they may be visible."""
        for i in environments:
            if not self.episodes[i].length:
                self.episodes[i].set_meta({name: values[steps.done, i] for name, values in steps.meta.items()})

    def _ends(self, steps: Steps, at: int, joint: Round, count: int) -> list[End]:
        """The ends of episodes that a timestep ends, or with which they are as long as they may be: `count` longer."""
        chosen, following, over = steps.recorded, steps.following.items(), steps.ends[at]
        if joint.remaining <= count:
            over = over | (joint.lengths == self._limit - count)
        flags = [(name, steps.fields[name][at]) for name in self.schema.ends]
        ends = []
        for i in chosen[over[chosen]].tolist():
            ended = next((name for name, flag in flags if flag.item(i)), "")
            ends.append(End(i, ended, {name: rows[at, i] for name, rows in following}))
        return ends

    def _published_with(self, steps: Steps, ends: Sequence[End]) -> Sequence[End]:
        """The ends that are published with the timestep: in a group none, as its episodes end with its block."""
        return ()

    def _tell(self, steps: Steps, count: int) -> None:
        """Tell episodes that they ended with the last of some timesteps, and what else is known; twice is fine."""
        for i, ended, finals in steps.last:
            episode = self.episodes[i]
            episode.ended = ended
            if episode.state != "open":
                episode.finals = dict(finals)  # published with it
            elif finals and not episode.finals:
                episode.set_final(finals)
