"""Environments that run on side by side: each begins an episode where its last one ended."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from memmap_buffer.dtypes import Array, all_of
from memmap_buffer.errors import EpisodeStateError, MemmapBufferError, SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.open_episodes import ended_statement
from memmap_buffer.writing.episode import End, Episode, Scalars
from memmap_buffer.writing.episode_group import EpisodeGroup
from memmap_buffer.writing.rounds import Round
from memmap_buffer.writing.steps import NEXT, Errors, Steps, keep_errors
from memmap_buffer.writing.validation import add_defaults
from memmap_buffer.writing.writer import Writer

log = logging.getLogger("memmap_buffer")
NUMBERS = (bool, int, float)  # of Python, which have no axes
LOOKS = 100  # ends of episodes at which it is looked whether what was given as seen next can be right
SAME = 3  # ends one behind the other at which it is the observation of a reset, until that is said
FORGOTTEN = (
    "add: where an episode ended, `next_observation` is what the next step begins with, {count} times one behind the "
    "other: it seems to be of the reset, and truncated episodes would bootstrap from it. Give what was seen "
    'last: of AutoresetMode.SAME_STEP that is `infos["final_obs"][i]`. It is right only if episodes begin where the '
    "last one ended."
)
RESET = (
    "add: the step after the end of an episode does not begin with its `next_observation`, so it is no reset by "
    "AutoresetMode.NEXT_STEP, as which it is left out, and steps before it may lead to those behind it. Call "
    "end_episodes() before you reset the environments yourself; if they reset in another mode, create the buffer with "
    "skips_resets=False."
)


class EpisodeStream(EpisodeGroup):
    """B environments side by side, each with its own episode ends; `episodes` are those they are in.

    An episode that is cut where it is as long as it may be has what was seen next as its final observation: by `next_`
    of its last step, or else by the step that follows, which adds it.

    A step is stored for all environments or for none. After one that was interrupted, and may not be there, the next
    begins other episodes: no item leads from the step before it to the one behind.

    Args:
        writer: opens and publishes the episodes.
        size: B.
        skips_resets: the step after an episode's end is the environment's reset, and is left out.
        resets_at_once: the step that ends an episode gives the observation of the reset, so what is given as seen next
            there may be that, which is told.
        begin: opens an episode that is nobody's, after it gave the stream another writer if need be; None: the writer
            does.
    """

    def __init__(
        self,
        writer: Writer,
        size: int,
        *,
        skips_resets: bool = False,
        resets_at_once: bool = False,
        begin: Callable[[], Episode] | None = None,
    ) -> None:
        super().__init__(writer, [], size=size)
        self._begin, self._skips_resets = begin, skips_resets
        fields = writer.schema.fields
        all_fields = {**{NEXT + name: fields[name] for name in writer.schema.final_names}, **fields}
        all_fields |= writer.schema.meta_fields
        # What a timestep may give, without the axis of environments and with it: the dtype and the shape of arrays that
        # are stored as they are, and which numbers are.
        self._plans = [
            {
                name: (field, (*axes, *field.shape), Scalars.of(field.dtype, field.shape))
                for name, field in all_fields.items()
            }
            for axes in ((), (size,))
        ]
        self.lead = 1  # axes that the last step had before those of a field
        self.num_added = 0  # timesteps, of all environments
        self.recorded = self._everyone  # the environments whose last step is one of an episode
        self._sure = False  # whether what is kept of the episodes holds, and none needs a look that did not just end
        self._idle: list[int] = []  # environments without an open episode
        self.over = np.zeros(size, np.bool_)  # of which environments the last step ended an episode
        self._doubtful: Steps | None = None  # as `over` does not know yet of those that were given last
        self._looks = LOOKS if skips_resets or resets_at_once else 0  # at ends, still to come
        self._linked: bool | None = None  # whether what is seen next is what follows, within an episode
        self._seen_again: list[Any] = []  # at ends one behind the other, what was seen next and then again
        # Meta fields that were given last, (B, *field) each, and for which environments their episodes are to be told.
        self._meta: Mapping[str, Array] = {}
        self._meta_waits = np.zeros(size, np.bool_)
        # By environment, an episode that was cut without its final observation, and that, once it was seen.
        self._cut: dict[int, tuple[Episode, dict[str, Array]]] = {}

    @property
    def lengths(self) -> list[int]:
        """The lengths of the episodes."""
        joint = self._round
        if joint is not None and joint.is_whole:
            lengths: list[int] = joint.lengths.tolist()
            return lengths
        return [episode.length for episode in self.episodes]

    def extend(self, steps: Steps) -> None:
        """Append timesteps to every environment; an episode that ends, or is as long as it may be, is published.

        Called again with the same steps, it goes on where it stood.

        Args:
            steps: of all environments.

        Raises:
            BufferFullError: there is no room for another episode; the timesteps before it are stored.
            OSError: the disk is full, say; `steps.done` tells how many are stored.
        """
        with self._writer.lock.turn:
            if self._missing is not None:
                self._settle()
            if self._missing not in (None, steps):
                self._cut_off(steps)
            over = steps.over if self._missing is steps else self.over.copy()
            following, start, steps.over = self._following, steps.done, over
            self._missing = self._doubtful = steps
            try:
                self._extend(steps)
            except (MemmapBufferError, OSError) as error:
                self._round, self._sure = None, False
                self._following = self._following or (following if steps.done == start else {})
                if isinstance(error, MemmapBufferError) or steps.done == len(steps.ends):
                    self._missing, self._doubtful, self.over = None, None, over
                else:
                    steps.keep()
                raise
            self._missing, self._doubtful, self.over = None, None, over

    def interrupt(self, steps: Steps | None = None) -> None:
        """Know that timesteps were given, and may not be stored; and which, if that is known."""
        self._missing, self._round = self._missing or self, None
        self._account_and_keep()
        if steps is not None and self._skips_resets and steps.num_envs == self._size:
            if steps is not self._doubtful:
                self._find_resets(steps)
            steps.keep()
            self._doubtful = steps

    def _find_resets(self, steps: Steps) -> None:
        """Find out for which environments a timestep behind others that were interrupted is a reset.

        It may be one of these, given again, or the one that follows them.
        """
        others = self._doubtful
        if others is not None:
            now, ends = _bytes(steps.fields, steps.done), others.ends
            at = next((t for t in range(len(ends)) if _bytes(others.fields, t) == now), len(ends))
            self.over, self._doubtful = ends[at - 1].copy() if at else self.over, None

    def _settle(self) -> None:
        super()._settle()
        self._sure = False

    def _cut_off(self, steps: Steps) -> None:
        """End all episodes, as a step may be missing behind them."""
        self.complete()
        self._cut.clear()
        self.publish()
        self._following = {}
        if steps.done < len(steps.ends):
            self._find_resets(steps)

    def _extend(self, steps: Steps) -> None:
        over = steps.over
        while steps.done < len(steps.ends):
            self._publish_what_ended(over)
            self._see(steps)
            joint = self._begin_where_needed()
            steps.recorded = self.recorded = self._recorded(over)
            if self._looks and self._following and (self._linked is None or over.any()):
                self._look(steps, over)
            self._following = {}
            self._append_some(joint, steps)
        self._publish_what_ended(over)

    def _look(self, steps: Steps, over: Array) -> None:
        """Warn, once, where what was given as seen next cannot be right: at ends, as elsewhere the next step has it."""
        first = self._linked is None
        for i in np.flatnonzero(over != first).tolist():
            seen = _bytes(self._following, i)
            same = seen == _bytes({name: steps.fields[name] for name in self._following}, (steps.done, i))
            if first:
                self._linked = same and self._linked is not False
                continue
            self._looks -= 1
            self._seen_again = [*self._seen_again, seen] if same else []
            forgotten = len(self._seen_again) >= SAME and any(other != seen for other in self._seen_again)
            if not same if self._skips_resets else forgotten:
                self._looks = 0
                text = RESET if self._skips_resets else FORGOTTEN.format(count=len(self._seen_again))
                warnings.warn(text, UserWarning, stacklevel=2)
                return
        self._looks *= self._linked is not False  # of who gives something else as seen next nothing is known

    def go_on(self, step: Mapping[str, Any], errors: Errors | None = None) -> bool:
        """Append one timestep that is given as it is to be stored; False where that is not so, and nothing was done."""
        looks = self._looks and self._following
        if self._skips_resets and not (self._cut or looks) and self._missing is None and all_of(self.over):
            self.over[:], self._following = False, {}  # a reset of every environment, which is no timestep
            return True
        encoded = self._encoded(step)
        if encoded is None:
            return False
        columns, meta = encoded
        if self._cut or self._missing is not None or not self._append_to_all(columns, meta, errors):
            self.extend(Steps.of(self.schema, columns, meta, errors))
            return True
        if meta:
            self._keep_meta(meta, ...)
        if errors is not None:
            keep_errors(errors, self.episodes, self.lengths, range(self._size), slice(None))
        finals = self.schema.final_names if len(columns) > len(self.schema.fields) else ()
        self._following = {name: columns[NEXT + name].copy() for name in finals}
        self._missing, self.num_added = None, self.num_added + self._size  # together, as `_settle` does the same
        return True

    def _encoded(self, step: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Array]] | None:
        """(every field of a timestep as (B, *field), and `next_<field>` where given; meta fields that were given).

        None where it is not so simple.
        """
        columns: dict[str, Array] = {}
        meta: dict[str, Array] = {}
        lead, meta_fields = self.lead, self.schema.meta_fields
        plan = self._plans[lead]
        for name, value in step.items():
            if name not in plan:
                flat = self.schema.flatten(step)  # of groups
                return self._encoded(flat) if flat.keys() <= plan.keys() else None
            field, shape, numbers = plan[name]
            kind = type(value)
            if kind is ndarray and value.dtype == field.direct and value.shape == shape:
                pass
            elif lead == 0 and (
                kind in numbers.exact or (kind in numbers.kinds and numbers.low <= value <= numbers.high)
            ):
                value = np.array(value, field.direct)
            elif lead == 0 and kind not in NUMBERS and getattr(value, "ndim", None) != len(shape):
                return None  # it may have the axis that steps before it had not
            else:
                try:
                    value = field.encode(value, lead)
                except SchemaError:
                    return None  # there it is told in full
                if value.shape != shape:
                    return None
            (meta if name in meta_fields else columns)[name] = value if lead else value[None]
        fields, most = self.schema.fields.keys(), len(plan) - len(meta_fields)
        if len(columns) != most and columns.keys() != fields and not columns.keys().isdisjoint(fields):
            try:
                add_defaults(self.schema, columns, (self._size,), "")
            except SchemaError:
                return None  # likewise
        return (columns, meta) if len(columns) == most or columns.keys() == fields else None

    def _keep_meta(self, meta: Mapping[str, Array], chosen: Any) -> None:
        """Keep the meta fields of a timestep of some environments: what was given last counts when an episode ends."""
        if meta.keys() != self._meta.keys():
            self._tell_meta(range(len(self.episodes)))
        self._meta = {name: values.copy() for name, values in meta.items()}
        self._meta_waits[chosen] = True

    def _tell_meta(self, environments: Iterable[int]) -> None:
        """Tell the episodes of some environments, which may be about to be published, the meta fields that wait."""
        for i in environments:
            if self._meta_waits.item(i) and self.episodes[i].state == "open":
                self.episodes[i].set_meta({name: values[i] for name, values in self._meta.items()})
            self._meta_waits[i] = False

    def _published_with(self, steps: Steps, ends: Sequence[End]) -> Sequence[End]:
        """The ends of episodes whose meta fields stay as they are shown: others are changed by a rewrite."""
        if not (steps.meta or self._meta):
            return ends
        meta, same = {name: values[steps.done] for name, values in steps.meta.items()}, []
        for end in ends:
            i, episode = end.place, self.episodes[end.place]
            later = {**self._meta, **meta} if self._meta_waits.item(i) else meta
            last = {**episode.meta, **{name: values[i] for name, values in later.items()}}
            shown = self._writer.meta_of(episode)
            if all(shown[name].tobytes() == value.tobytes() for name, value in last.items()):
                same.append(end)
        return same

    def _tell(self, steps: Steps, count: int) -> None:
        super()._tell(steps, count)
        at, recorded = steps.done - 1, steps.recorded
        if steps.errors is not None:
            some = slice(steps.done - count, steps.done)
            keep_errors(steps.errors, self.episodes, self.lengths, recorded.tolist(), some)
        self._are_over([end.place for end in steps.last if self.episodes[end.place].state == "published"])
        if steps.meta:
            self._keep_meta({name: values[at] for name, values in steps.meta.items()}, recorded)
        steps.over[:] = False
        steps.over[recorded] = steps.ends[at, recorded]
        self._following = {name: rows[at].copy() for name, rows in steps.following.items()}
        # Together, as twice would not be fine.
        steps.before, self.num_added = None, self.num_added + count * len(recorded)

    def end(self, environments: Collection[int]) -> None:
        """Publish the open episodes of some environments, as cut short; their next timesteps begin others."""
        for i in environments:  # first: whatever interrupts this, what comes next is not seen as what followed
            self._cut.pop(i, None)
            self.over[i] = False
        if self._doubtful is not None:
            self._doubtful.ends = self._doubtful.ends & ~np.isin(self._everyone, [*environments])
        if environments:
            self.publish(among=environments)

    def publish(self, *, cut: bool = True, among: Collection[int] | None = None) -> None:
        """Publish what is open, as `cut` short where it did not end; what was seen last is the final observation.

        Args:
            cut: whether it is cut short.
            among: the environments whose episodes are published; None: all.
        """
        if self._missing is not None:
            self._settle()  # an end that was shown counts, also where the program ends behind an interruption
        missing, self._missing = self._missing, self  # if this is interrupted, the next step ends the others
        self._round, self._sure = None, False  # also behind the last of them: none is appended to again
        ends = {}
        for i, episode in enumerate(self.episodes):
            if episode.state == "open" and (among is None or i in among):
                self._tell_meta([i])
                final = {name: rows[i] for name, rows in self._following.items()}
                if episode.length and final and not (episode.ended or episode.finals) and _has_room(episode, final):
                    episode.set_final(final)
                ends[episode] = (cut or episode.length == self._limit) and not episode.ended
        self._publish(ends)
        self._missing = missing

    def begin_anew(self) -> None:
        """Publish what is open, as cut short; the next timestep begins other episodes, and is seen next in these."""
        if self._missing is not None:
            self._settle()
        growing = [(i, episode) for i, episode in enumerate(self.episodes) if episode.state == "open"]
        self.publish()
        for i, episode in growing:
            if self.schema.final_names and episode.state == "published" and not (episode.ended or episode.finals):
                self._cut[i] = episode, {}

    def _see(self, steps: Steps) -> None:
        """Keep what the next step begins with: the final observation of the episodes that were cut before it."""
        for i, (episode, _) in self._cut.items():
            names = self.schema.final_names
            self._cut[i] = episode, {name: steps.fields[name][steps.done, i].copy() for name in names}

    def _open(self) -> Episode:
        return self._writer.open({}, statement=ended_statement) if self._begin is None else self._begin()

    def complete(self) -> bool:
        """Give episodes that were cut their final observations; whether that of all of them was seen."""
        for i, (episode, final) in [*self._cut.items()]:
            if final:
                if _has_room(episode, final):
                    episode.complete(final)
                del self._cut[i]
        return not self._cut

    def go_on_with(self, writer: Writer) -> None:
        """Have another writer open the episodes; of those that it did not get the final observation is not kept."""
        if self._missing is not None:
            self._settle()
        self._writer, self._round, self._sure = writer, None, False
        self._cut.clear()

    def _publish_what_ended(self, over: Array) -> None:
        """Publish the episodes that ended, of which `over` knows, or are as long as they may be."""
        self.complete()
        none_is_full = self._round is not None and self._round.remaining > 0
        looked = over.nonzero()[0].tolist() if self._sure and none_is_full else range(len(self.episodes))
        ended = []
        for i in looked:
            episode = self.episodes[i]
            tried = episode.tried and self._writer.how.publish == "episode"
            if episode.state == "open" and (tried or episode.ended or episode.length == self._limit):
                ended.append(i)
        if ended:
            self._tell_meta(ended)
            try:
                self._publish({self.episodes[i]: not self.episodes[i].ended for i in ended})
            finally:
                self._are_over(ended)

    def _are_over(self, ended: Sequence[int]) -> None:
        """Go on without episodes that ended; the next step may tell what was seen last in those that are published."""
        self._idle += ended
        for i in ended:
            episode = self.episodes[i]
            if self._round is not None:
                self._round.leave(i)
            if self.schema.final_names and episode.state == "published" and not (episode.ended or episode.finals):
                self._cut[i] = episode, {}

    def _recorded(self, over: Array) -> IntArray:
        """The environments whose next step is one of an episode."""
        return (~over).nonzero()[0] if self._skips_resets else self._everyone

    def _begin_where_needed(self) -> Round:
        if self.episodes and not self._sure:
            self._writer.begin(publishing=True)  # an episode that an interruption left to nobody is over then
        looked = self._idle if self._sure else range(self._size)
        if not self.episodes:
            self._writer.require_spare_slots(self._size)
        self._idle, self._sure = [], True
        for i in looked:
            if i == len(self.episodes) or self.episodes[i].state != "open":
                self._meta_waits[i] = False  # of an episode that is over
                self.episodes[i : i + 1] = [self._open()]
                self.episodes[i].watch(None)  # until it stands there it is nobody's, and dropped by the next call
        if not self._sure:  # it went on in another folder, where others may be needed
            return self._begin_where_needed()
        self._round = self._round or self._writer.new_round(self._size)
        return self._round


def _bytes(columns: Mapping[str, Array], at: Any) -> list[bytes]:
    """The bytes of some columns, other than lists, at a place."""
    return [np.asarray(rows[at]).tobytes() for rows in columns.values() if not rows.dtype.hasobject]


def _has_room(episode: Episode, final: Mapping[str, Array]) -> bool:
    """Whether the lists of a final observation have room; if not, the log says that the episode goes without one."""
    try:
        episode.require_lists({name: [row] for name, row in final.items()})
    except EpisodeStateError as error:
        log.warning("an episode of %d timesteps has no final observation: %s", episode.length, error)
        return False
    return True
