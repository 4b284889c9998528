"""Several environments side by side: a group of episodes that step together, or a stream that begins and ends them.

What an episode's timesteps are is `episode`'s; how it becomes visible is the writer's.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from threading import get_ident
from types import TracebackType
from typing import Any

import numpy as np
from numpy import ndarray

from memmap_buffer.dtypes import Array, all_of, to_numpy
from memmap_buffer.errors import EpisodeStateError, MemmapBufferError, SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.schema import LENGTHS, Field, Schema
from memmap_buffer.writing.episode import Appended, Block, Episode, Held, Scalars, left
from memmap_buffer.writing.rounds import Round
from memmap_buffer.writing.staged_round import StagedRound
from memmap_buffer.writing.validation import require_default, whole_final
from memmap_buffer.writing.writer import Writer

log = logging.getLogger("memmap_buffer")
NEXT = "next_"
NUMBERS = (bool, int, float)  # of Python, which have no axes
_GIVEN = "fields", "meta", "following"  # of `Steps`
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


class EpisodeGroup(Block):
    """B open episodes that step together; `episodes` are its members, in the order of the batch axis.

    As a context manager it publishes all of them at the end of the block, and aborts all on any exception.

    Args:
        schema: the fields.
        episodes: the members.
        held: of the block that they were opened for, see `Block`.
    """

    def __init__(self, schema: Schema, episodes: Sequence[Episode], held: Held | None = None) -> None:
        self.schema = schema
        self.episodes = list(episodes)
        self.held, self.thread = held, get_ident()

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def state(self) -> str:
        """ "open" as long as one of them is, then "ended"."""
        return "open" if any(episode.state == "open" for episode in self.episodes) else "ended"

    def store(self, **batch: Any) -> None:
        """Append one timestep to every episode.

        Args:
            batch: field -> (B, *field).

        Raises:
            SchemaError: as `Episode.store` raises it; then no episode got the step.
            EpisodeStateError: likewise.
        """
        where = f"timestep {self.episodes[0].length}"
        columns = self._encode(self.schema.flatten(batch), self.schema.fields, where)
        for name, field in self.schema.fields.items():
            if name not in columns:
                columns[name] = np.broadcast_to(require_default(field, name, where), (len(self), *field.cell))
        for i, episode in enumerate(self.episodes):
            episode.require_room()
            episode.require_lists({name: columns[name][i : i + 1] for name in self.schema.lists})
        for i, episode in enumerate(self.episodes):
            episode.store_rows({name: rows[i : i + 1] for name, rows in columns.items()})

    def final(self, **batch: Any) -> None:
        """Store every episode's observation after the last action: field -> (B, *field)."""
        columns = self._encode(whole_final(self.schema, batch), self.schema.fields, "final")
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
        for episode in self.episodes:
            if episode.state == "open":
                episode.publish()

    def abort(self) -> None:
        """Drop all that are open."""
        for episode in self.episodes:
            episode.abort()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The end of its block, as for each of its episodes."""
        try:
            for episode in self.episodes:
                episode.held = None  # none of them is over as long as this runs
            for episode in self.episodes:
                episode.leave(kind, error, trace)
        except Exception:
            raise
        except BaseException:
            for episode in self.episodes:
                episode.settle()
            raise

    def _encode(self, batch: Mapping[str, Any], known: Mapping[str, Field], where: str) -> dict[str, Array]:
        out: dict[str, Array] = {}
        for name, values in batch.items():
            if name not in known:
                raise self.schema.unknown(name, where, known)
            rows = self.schema.encode(name, values, 1, f", {where}")
            if len(rows) != len(self):
                raise SchemaError(
                    f"field {name!r}, {where}: got a batch of {len(rows)}, expected {len(self)}", field=name
                )
            out[name] = rows
        return out


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
        super().__init__(writer.schema, [])
        self._begin = begin
        self._writer, self._size, self._limit, self._skips_resets = writer, size, writer.max_timesteps, skips_resets
        fields = writer.schema.fields
        known = {**{NEXT + name: fields[name] for name in writer.schema.final_names}, **fields}
        # What a timestep may give, without the axis of environments and with it: the dtype and the shape of arrays that
        # are stored as they are, and which numbers are.
        self._plans = [
            {
                name: (field, (*axes, *field.shape), Scalars.of(field.dtype, field.shape))
                for name, field in known.items()
            }
            for axes in ((), (size,))
        ]
        self.lead = 1  # axes that the last step had before those of a field
        # What appends to several episodes together; None where that cannot be, or is to be seen.
        self._round: Round | StagedRound | None = None
        self._sure = False  # whether what is kept of the episodes holds, and none needs a look that did not just end
        self._idle: list[int] = []  # environments without an open episode
        self.over = np.zeros(size, np.bool_)  # of which environments the last step ended an episode
        self._following: dict[str, Array] = {}  # what was seen after the last step
        self._missing: object = None  # steps that were given, and may not all be stored
        self._before: IntArray | None = None  # the lengths that staged episodes go back to
        self._looks = LOOKS if skips_resets or resets_at_once else 0  # at ends, still to come
        self._linked: bool | None = None  # whether what is seen next is what follows, within an episode
        self._seen_again: list[Any] = []  # at ends one behind the other, what was seen next and then again
        # By environment, an episode that was cut without its final observation, and that, once it was seen.
        self._cut: dict[int, tuple[Episode, dict[str, Array]]] = {}

    def __len__(self) -> int:
        return self._size

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
            self._missing, self.over = steps, over | steps.ends[-1]
            try:
                self._extend(steps, over)
            except (MemmapBufferError, OSError) as error:
                self._round, self._sure = None, False
                self._following = self._following or (following if steps.done == start else {})
                if isinstance(error, MemmapBufferError) or steps.done == len(steps.ends):
                    self._missing, self.over = None, over
                raise
            self._missing, self.over = None, over

    def interrupt(self, ends: Any) -> None:
        """Know that a step was given, and may not be stored; and of which environments it ends an episode, (B,)."""
        self._missing, self.over = self, self.over | ends

    def _settle(self) -> None:
        """Whatever interrupted a step: all environments have it or none."""
        if isinstance(self._round, StagedRound):
            self._take_back(self._round)
        self._round, self._sure = None, False
        for episode in self.episodes:
            if episode.state == "open":
                self._writer.follow(episode)

    def _cut_off(self, steps: Steps) -> None:
        """End all episodes, as a step may be missing behind them."""
        self.complete()
        self._cut.clear()
        self.publish()
        self._following = {}
        self.over &= ~steps.ends[steps.done]  # a step that ends an episode is no reset

    def _extend(self, steps: Steps, over: Array) -> None:
        while steps.done < len(steps.ends):
            self._publish_what_ended(over)
            self._see(steps)
            self._begin_where_needed()
            start, steps.recorded = steps.done, self._recorded(over)
            if self._looks and self._following and (self._linked is None or over.any()):
                self._look(steps, over)
            self._following = {}
            try:
                self._append_some(steps)
            finally:  # also after an error, where the step is stored
                if steps.done > start:
                    over[:] = False
                    over[steps.recorded] = steps.ends[steps.done - 1, steps.recorded]
                    self._following = {name: rows[steps.done - 1].copy() for name, rows in steps.following.items()}
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
            forgotten = len(self._seen_again) >= SAME and any(one != seen for one in self._seen_again)
            if not same if self._skips_resets else forgotten:
                self._looks = 0
                text = RESET if self._skips_resets else FORGOTTEN.format(count=len(self._seen_again))
                warnings.warn(text, UserWarning, stacklevel=2)
                return
        self._looks *= self._linked is not False  # of who gives something else as seen next nothing is known

    def _append_some(self, steps: Steps) -> None:
        """Append timesteps up to the next end: for all environments or for none."""
        joint = self._round
        if isinstance(joint, StagedRound):
            self._append_staged(joint, steps, self._stop(steps) if self._writer.how.stage == "ram" else steps.done + 1)
        else:
            self._append_shown(joint, steps)

    def go_on(self, step: Mapping[str, Any]) -> bool:
        """Append one timestep that is given as it is to be stored; False where that is not so, and nothing was done."""
        looks = self._looks and self._following
        if self._skips_resets and not (self._cut or looks) and self._missing is None and all_of(self.over):
            self.over[:], self._following = False, {}  # a reset of every environment, which is no timestep
            return True
        columns = self._encoded(step)
        if columns is None:
            return False
        if (
            self._round is None
            or not self._round.is_whole
            or self._cut
            or self._missing is not None
            or self._round.remaining <= 1
            or any([np.count_nonzero(columns[end]) for end in self.schema.ends])
        ):
            self.extend(Steps.of(self.schema, columns))
            return True
        self._missing, self._following = self, {}
        if isinstance(self._round, StagedRound):
            self._round.append(columns)
        else:
            self._writer.append_round(self._round, columns)
        told = self.schema.final_names if len(columns) > len(self.schema.fields) else ()
        self._following = {name: columns[NEXT + name].copy() for name in told}
        self._missing = None
        return True

    def _encoded(self, step: Mapping[str, Any]) -> dict[str, Array] | None:
        """Every field of a timestep as (B, *field), and `next_<field>` where given; None where it is not so simple."""
        columns, lead = {}, self.lead
        plan = self._plans[lead]
        for name, value in step.items():
            if name not in plan:
                return None
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
            columns[name] = value if lead else value[None]
        complete = len(columns) == len(plan) or columns.keys() == self.schema.fields.keys()
        return columns if complete else None

    def publish(self, *, cut: bool = True) -> None:
        """Publish what is open, as `cut` short where it did not end; what was seen last is the final observation."""
        if self._missing is not None:
            self._settle()  # an end that was shown counts, also where the program ends behind an interruption
        for i, episode in enumerate(self.episodes):
            if episode.state == "open":
                final = {name: rows[i] for name, rows in self._following.items()}
                if episode.length and final and not (episode.ended or episode.finals) and _has_room(episode, final):
                    episode.set_final(final)
                episode.publish(cut=(cut or episode.length == self._limit) and not episode.ended)

    def _see(self, steps: Steps) -> None:
        """Keep what the next step begins with: the final observation of the episodes that were cut before it."""
        for i, (episode, _) in self._cut.items():
            names = self.schema.final_names
            self._cut[i] = episode, {name: steps.fields[name][steps.done, i].copy() for name in names}

    def _open(self) -> Episode:
        return self._writer.open({}, held=left) if self._begin is None else self._begin()

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
        self._writer, self._round, self._sure = writer, None, False
        self._cut.clear()

    def _publish_what_ended(self, over: Array) -> None:
        """Publish the episodes that ended, of which `over` knows, or are as long as they may be."""
        self.complete()
        none_is_full = self._round is not None and self._round.remaining > 0
        looked = np.flatnonzero(over).tolist() if self._sure and none_is_full else range(len(self.episodes))
        for i in looked:
            episode = self.episodes[i]
            if episode.state == "open" and (episode.ended or episode.length == self._limit):
                if self._round is not None:
                    self._round.leave(i)
                episode.publish(cut=not episode.ended)
                self._idle.append(i)
                if self.schema.final_names and not (episode.ended or episode.finals):
                    self._cut[i] = episode, {}
        if self._round is not None and self._idle:
            self._round.look()

    def _recorded(self, over: Array) -> IntArray:
        """The environments whose next step is one of an episode."""
        return np.flatnonzero(~over) if self._skips_resets else np.arange(self._size)

    def _stop(self, steps: Steps) -> int:
        """Up to which timestep all can be stored at once: only the last of them may end an episode, or be left out."""
        if len(steps.recorded) < self._size:
            return steps.done + 1
        stop = min(len(steps.ends), steps.done + (self._limit if self._round is None else self._round.remaining))
        ended = np.flatnonzero(steps.ends[steps.done : stop].any(axis=1))
        return steps.done + int(ended[0]) + 1 if ended.size else stop

    def _begin_where_needed(self) -> None:
        looked = self._idle if self._sure else range(self._size)
        self._idle, self._sure = [], True
        for i in looked:
            if i == len(self.episodes) or self.episodes[i].state != "open":
                self.episodes[i : i + 1] = [self._open()]
                self.episodes[i].held = None  # until it stands there it is nobody's, and dropped by the next call
        if not self._sure:  # it went on in another folder, where others may be needed
            self._begin_where_needed()
            return
        if self._round is None:
            self._round, looked = self._new_round(), range(self._size)
        self._join(looked)

    def _new_round(self) -> Round | StagedRound | None:
        if self._writer.how.publish == "step":
            return self._writer.new_round(self._size)
        return StagedRound(self.schema, self._size, self._limit)

    def _join(self, environments: Sequence[int]) -> None:
        """Append to the episodes of some environments together with others from now on, as far as that can be."""
        joint = self._round
        if joint is None or not environments:
            return
        for i in environments:
            if isinstance(joint, Round):
                self._writer.join(joint, i, self.episodes[i])
            else:
                joint.join(i, self.episodes[i])
        joint.look()

    def _append_staged(self, joint: StagedRound, steps: Steps, stop: int) -> None:
        """Store timesteps up to `stop`, of which only the last may end an episode: for all of them or for none."""
        start, chosen = steps.done, steps.recorded
        self._require_lists(steps, stop)
        joint.prepare(stop - start)
        self._before = joint.lengths
        try:
            joint.extend({name: rows[start:stop] for name, rows in steps.fields.items()}, chosen)
            self._tell_of_ends(steps, stop - 1)
        except BaseException:
            self._take_back(joint)
            raise
        steps.done, self._before = stop, None

    def _take_back(self, joint: StagedRound) -> None:
        """Drop the timesteps that were not stored for all environments."""
        if self._before is not None:
            joint.back_to(self._before)
        joint.settle()
        self._before = None

    def _require_lists(self, steps: Steps, stop: int) -> None:
        """Raise EpisodeStateError where lists have no room, before any environment has a timestep."""
        for i in steps.recorded.tolist() if self.schema.lists else ():
            rows = {name: steps.fields[name][steps.done : stop, i] for name in self.schema.lists}
            self.episodes[i].require_lists(rows)

    def _append_shown(self, joint: Round | None, steps: Steps) -> None:
        """Store one timestep, which is shown at once: for all environments or for none."""
        at, chosen = steps.done, steps.recorded
        self._require_lists(steps, at + 1)
        others = np.ones(self._size, np.bool_)
        if joint is not None:
            others[joint.members] = False
        alone = chosen[others[chosen]].tolist()
        appended = [self._appended(steps, i) for i in alone]
        first = self.episodes[chosen[0]] if len(chosen) else None
        length = 0 if first is None else first.length
        try:
            if joint is not None and len(joint.members):
                self._writer.append_round(joint, {name: rows[at] for name, rows in steps.fields.items()}, appended)
            elif appended:
                self._writer.append(appended)
        finally:
            steps.done += first is None or first.length > length
        self._join(alone)
        self._tell_of_ends(steps, at)

    def _appended(self, steps: Steps, i: int) -> Appended:
        """The next timestep of an environment, with the meta fields that its episode begins with."""
        episode, at = self.episodes[i], steps.done
        if steps.meta and not episode.length:  # it may be visible from its first timestep on
            episode.set_meta({name: values[at, i] for name, values in steps.meta.items()})
        return episode.to_append({name: rows[at : at + 1, i] for name, rows in steps.fields.items()})

    def _tell_of_ends(self, steps: Steps, at: int) -> None:
        """Tell episodes that they ended with a timestep, and what else is known with it."""
        chosen, joint = steps.recorded, self._round
        ended = chosen[steps.ends[at, chosen]].tolist()
        for i in ended:
            ends = (name for name in self.schema.ends if steps.fields[name][at, i].any())
            self.episodes[i].ended = next(ends)
        none_is_full = joint is not None and joint.remaining > 0
        for i in ended if none_is_full and not steps.meta else chosen.tolist():
            self._tell(steps, i, at)

    def _tell(self, steps: Steps, i: int, at: int) -> None:
        """Tell an episode what is known with its last timestep, beside the fields."""
        episode = self.episodes[i]
        if steps.meta:
            episode.set_meta({name: values[at, i] for name, values in steps.meta.items()})
        if steps.following and (episode.ended or episode.length == self._limit):
            episode.set_final({name: rows[at, i] for name, rows in steps.following.items()})


def _bytes(columns: Mapping[str, Array], at: Any) -> list[bytes]:
    return [np.asarray(rows[at]).tobytes() for rows in columns.values()]


def _has_room(episode: Episode, final: Mapping[str, Array]) -> bool:
    """Whether the lists of a final observation have room; if not, the log says that the episode goes without one."""
    try:
        episode.require_lists({name: [row] for name, row in final.items()})
    except EpisodeStateError as error:
        log.warning("an episode of %d timesteps has no final observation: %s", episode.length, error)
        return False
    return True


class Steps:
    """Timesteps of several environments, checked and encoded.

    Args:
        schema: the fields.
        given: field -> (T, B, *field), (B, *field) for one timestep, (T, *field) or (*field) for one environment; meta
            fields alike; `next_<field>` of fields with `final`: the observation after the step.
        time: whether there is an axis of time.

    Attributes:
        lead: the axes that were given before those of a field.
        fields: name -> (T, B, *field).
        meta: likewise.
        following: likewise, the observations after each step.
        ends: (T, B) bool, where an episode ends.
        done: how many of the timesteps a stream has stored.
        recorded: the environments of which the last of them was one of an episode.
        over: (B,) of which environments it ended one.

    Raises:
        SchemaError: an unknown field, a missing one without a default, a wrong shape, axes that differ, a lossy cast.
    """

    def __init__(self, schema: Schema, given: Mapping[str, Any], *, time: bool) -> None:
        self.done = 0
        groups = {name.split(".")[0] for name in schema.all}
        own = {name: name.removeprefix(LENGTHS) for name in given}
        later = {name for name in given if own[name].startswith(NEXT) and own[name].split(".")[0] not in groups}
        flat = schema.flatten({name: value for name, value in given.items() if name not in later})
        following = schema.flatten({name.replace(NEXT, "", 1): given[name] for name in later})
        if not flat:
            raise SchemaError("no field was given; give field=values for every environment")
        schema.require(flat, "timesteps")
        schema.require(following, "`next_` of fields declared with final=True", schema.final_names)
        if following and following.keys() != schema.final_names:
            missing = ", ".join(f"{NEXT}{name}" for name in sorted(schema.final_names - following.keys()))
            raise SchemaError(f"{missing} missing; all fields with final=True belong together")
        self.lead = _leading(schema, {**{f"{NEXT}{name}": value for name, value in following.items()}, **flat}, time)
        self.following = {name: _encode(schema, name, value, self.lead, time) for name, value in following.items()}
        columns = {name: _encode(schema, name, value, self.lead, time) for name, value in flat.items()}
        self._axes = _require_same_axes({**self.following, **columns})
        self.fields = {name: columns[name] for name in schema.fields if name in columns}
        self.meta = {name: columns[name] for name in schema.meta_fields if name in columns}
        for name, field in schema.fields.items():
            if name not in columns:
                row = require_default(field, name, "timesteps")
                self.fields[name] = np.broadcast_to(row, (*self._axes, *field.cell))
        self._find_ends(schema)

    @classmethod
    def of(cls, schema: Schema, columns: Mapping[str, Array]) -> Steps:
        """One timestep, of every field as (B, *field), and `next_<field>` where given."""
        steps = cls.__new__(cls)
        steps.done, steps.meta = 0, {}
        steps.fields = {name: columns[name][None] for name in schema.fields}
        steps.following = {
            name.removeprefix(NEXT): columns[name][None] for name in columns.keys() - steps.fields.keys()
        }
        steps._axes = next(iter(steps.fields.values())).shape[:2]
        steps._find_ends(schema)
        return steps

    def _find_ends(self, schema: Schema) -> None:
        self.recorded: IntArray = np.arange(self._axes[1])
        self.over = np.zeros(self._axes[1], np.bool_)
        self.ends = np.zeros(self._axes, np.bool_)
        for name in schema.ends:
            if np.count_nonzero(self.fields[name]):
                self.ends |= self.fields[name].reshape(self._axes) != 0

    @property
    def num_envs(self) -> int:
        return self._axes[1]

    def part(self, t: int) -> Steps:
        """One of the timesteps."""
        part, here = copy(self), slice(t, t + 1)
        part.done, part._axes, part.ends = 0, (1, self.num_envs), self.ends[here]
        for name in _GIVEN:
            setattr(part, name, {field: rows[here] for field, rows in getattr(self, name).items()})
        return part


def _leading(schema: Schema, flat: Mapping[str, Any], time: bool) -> int:
    """How many axes stand before those of the fields: time, if there is one, and the environments, if several."""
    found = {}
    for name, value in flat.items():
        field = schema.all[name] if name in schema.all else schema.fields[name.removeprefix(NEXT)]
        if field.is_list:  # it does not tell
            continue
        ndim = getattr(value, "ndim", None)
        found[name] = (to_numpy(value).ndim if ndim is None else int(ndim)) - len(field.shape)
    lead = next(iter(found.values()), time + 1)
    if {lead, *found.values()} != {lead} or lead not in (time, time + 1):
        shown = ", ".join(f"{name}: {axes}" for name, axes in found.items())
        wanted = "(T, *field) or (T, B, *field)" if time else "(*field) or (B, *field)"
        raise SchemaError(f"got so many axes before those of a field: {shown}; expected every field as {wanted}")
    return lead


def _encode(schema: Schema, name: str, value: Any, lead: int, time: bool) -> Array:
    """(T, B, *field) of a field as it was given."""
    if not lead and schema.all[name].is_list:
        value, lead = [value], 1  # of one environment: encoded with its axis, as a list's own tells nothing
    rows = schema.encode(name, value, lead)
    axes, shape = rows.shape[:lead], rows.shape[lead:]
    return rows.reshape((*(axes if time else (1, *axes)), *([1] if lead == time else []), *shape))


def _require_same_axes(columns: Mapping[str, Array]) -> tuple[int, int]:
    axes = {name: column.shape[:2] for name, column in columns.items()}
    first = next(iter(axes.values()))
    if set(axes.values()) != {first} or 0 in first:
        shown = ", ".join(f"{name}: {time} × {envs}" for name, (time, envs) in axes.items())
        raise SchemaError(f"got timesteps × environments {shown}; expected the same number for every field, from 1")
    return first[0], first[1]
