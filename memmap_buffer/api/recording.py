"""`Recording`: the writing part of `ReplayBuffer`: single episodes, several side by side, whole ones, `add`.

The work is done in `writing`: an `Episode` or `EpisodeGroup` holds open episodes, an `EpisodeStream` those of `add`,
and the `Writer` publishes. Here it is found out which of them a call means. `Editing` inherits `Recording`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import ref

import numpy as np

from memmap_buffer.api.reading import Readable
from memmap_buffer.dtypes import FloatArray, check_count, to_numpy
from memmap_buffer.errors import BufferFullError, BufferLockedError, EpisodeStateError, MemmapBufferError, SchemaError
from memmap_buffer.format.folder import UPDATE
from memmap_buffer.format.open_episodes import Statement, ended_statement
from memmap_buffer.views.folders import Folders
from memmap_buffer.writing import validation
from memmap_buffer.writing.episode import Block, Episode
from memmap_buffer.writing.episode_group import EpisodeGroup
from memmap_buffer.writing.steps import Steps, Waiting
from memmap_buffer.writing.vector_env import EpisodeStream
from memmap_buffer.writing.writer import Writer

if TYPE_CHECKING:
    from memmap_buffer.format.episode_table import EpisodeTable
    from memmap_buffer.format.storage import Storage
    from memmap_buffer.maintenance.publisher import Publisher

log = logging.getLogger("memmap_buffer")
CUTS = (
    "%s: publish_steps: steps cannot be published one by one here, so each call ends the episodes of all environments; "
    "create the buffer with publish='step' or spare_slots=%d"
)
Opened = TypeVar("Opened", bound=Episode | EpisodeGroup)


class Scope(Block, Generic[Opened]):
    """The block of `one_episode` or `batched_episode`. In it `store` of the same thread means the opened episode.

    Args: recording: the buffer. begin: a function that opens the episode, or the batch of them, for a statement.

    Attributes: statement: whether it is over, see `Statement`. opened: what `store` means.
    """

    statement: Statement
    opened: Opened

    def __init__(self, recording: Recording, begin: Callable[[Statement], Opened]) -> None:
        self._recording, self._begin = recording, begin

    def __enter__(self) -> Opened:  # type: ignore[override]
        thread, statement = get_ident(), self._statement
        scope = self._recording._scopes.get(thread)
        if scope is not None and scope.is_open:
            raise EpisodeStateError(
                "an episode is open already, and `store` could mean either; end it first, or use begin_episode() and "
                "episode.store() for several side by side"
            )
        opened = self._begin(statement)
        self.thread, self.statement, self.opened = thread, statement, opened  # not where it is refused within itself
        self._recording._scopes[thread] = self
        return opened

    @property
    def is_open(self) -> bool:
        """Whether its statement still runs, and the episode, or one of the batch, did not end before."""
        return self.statement() is not None and self.opened.state == "open"

    def leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the episode, or the batch; `store` means it no longer."""
        try:
            self.opened.leave(kind)
        finally:
            self._recording._scopes.pop(self.thread, None)
        if self._recording._publisher is not None:
            self._recording._finish_shard_if_due()


class Recording(Readable):
    """The writing part of `ReplayBuffer`."""

    _storage: Storage
    _writer: Writer
    _unfinished: Callable[[], None] | None = None  # completes a change that is under way, or was interrupted
    _publisher: Publisher | None = None  # of the shards that are recorded; only with `publish_to`
    _skips_resets: bool  # whether the step after an episode's end is the environment's reset, and is left out
    _told_of_cuts = False  # whether `CUTS` was logged
    _stream: EpisodeStream | None = None  # the episodes of `add`
    _num_added_before = 0  # the timesteps of earlier streams
    _resets_at_once = False  # whether the step that ends an episode is known to give the observation of the reset

    def _begin(self, writer: Writer) -> None:
        """Write by this writer from now on, with no episode open. An update that a dead writer began is completed."""
        self._storage, self._writer = writer.storage, writer
        self._scopes: dict[int, Scope[Any]] = {}  # thread -> its block
        self._begun: tuple[ref[Episode], ...] = ()  # the episodes of `begin_episode`
        # Thread -> its last one of `_begun`: this reference keeps it alive for `store`, if the user holds none.
        self._newest: dict[int, Episode] = {}
        self._let_stream_go()
        self._errors: dict[str, Waiting] = {}  # by the name of the priorities
        if writer.lock.is_held:
            writer.begin()  # the lock was taken to create the folder: this is its writer from the start
        if not self._storage.read_only and self._storage.layout.writable and self._storage.folder.exists(UPDATE):
            with suppress(BufferLockedError):  # the writer of the update is alive, and completes it
                writer.begin()
                self._storage.check_always()

    @property
    def turn(self) -> AbstractContextManager[Any, None]:
        """A `with` block in which no other thread writes to this buffer: to read and then update, say.

        First a change of columns, or a switch of shards, that was interrupted is completed.
        """
        turn: AbstractContextManager[Any, None]
        turn = self._writer.lock.turn if self._publisher is None else self._publisher.turn
        if self._unfinished is not None:
            with turn:
                if self._unfinished is not None:  # an interruption left it, and no other thread completed it meanwhile
                    self._unfinished()
        return turn

    def _counted(self) -> Iterable[EpisodeTable]:
        self._writer.settle()  # these numbers tell whether a step that was interrupted is stored
        return super()._counted()

    def _settled(self) -> Folders:
        with self.turn:
            return self._folders

    def one_episode(self, *, keep_partial: bool = False, **meta: Any) -> Scope[Episode]:
        """Record one episode in a `with` block: it is published at the end, and dropped on an exception.

        Args:
            keep_partial: on an exception publish the steps that were stored so far, flagged as cut short.
            meta: meta fields known at the start; later ones by `episode[name] = value`.

        Raises:
            EpisodeStateError: another episode is open.
            BufferFullError: there is no room, and the buffer is not circular.
            BufferLockedError: another process writes.
            ReadOnlyError: the buffer only reads.
            WriterLostError: this object may not write any more.
        """

        def begin(statement: Statement) -> Episode:
            with self.turn:
                return self._writer_with_room().open(meta, keep_partial=keep_partial, statement=statement)

        return Scope(self, begin)

    def begin_episode(self, *, keep_partial: bool = False, **meta: Any) -> Episode:
        """Open an episode, to `store` to, `publish` or `abort`; several may be open at once.

        An open episode to which no reference is left is dropped, unless it is the last one that its thread began.

        Args:
            keep_partial: as for `one_episode`.
            meta: as for `one_episode`.
        """
        with self.turn:
            episode = self._writer_with_room().open(meta, keep_partial=keep_partial)
            try:
                self._begun = (*map(ref, self._begun_ones()), ref(episode))
                self._newest = {**self._newest_ones(), get_ident(): episode}
                return episode
            except BaseException:
                episode.abort()  # the caller never gets it
                raise

    def begin_batch(self, batch_size: int, **meta_batch: Any) -> EpisodeGroup:
        """Open episodes of several synchronised environments, to `store` to together, `publish` or `abort`.

        Store by the methods of the result: `store_batch` of the buffer means only the batch of a `with` block. The
        episodes are dropped when no reference to the result is left.

        Args:
            batch_size: the number of environments.
            meta_batch: meta field -> (batch_size, *field).

        Returns:
            The batch, which has `store`, `update`, `publish` and `abort`, and its `episodes`.

        Raises:
            BufferFullError: there is no room for all of them; none is open.
            MemmapBufferError: as `one_episode` raises it.
        """
        check_count("batch_size", batch_size)
        return self._open_batch(batch_size, meta_batch)

    @property
    def open_episodes(self) -> list[Episode | EpisodeGroup]:
        """The open episodes, and batches of a block, that `store` could mean: of this thread, else of all threads."""
        return self._open_ones() if self._writer.holds else []

    def batched_episode(self, batch_size: int, **meta_batch: Any) -> Scope[EpisodeGroup]:
        """Record an episode of each of several synchronised environments in a `with` block, by `store_batch`.

        Args:
            batch_size: the number of environments.
            meta_batch: meta field -> (batch_size, *field).
        """
        check_count("batch_size", batch_size)
        return Scope(self, partial(self._open_batch, batch_size, meta_batch))

    def _open_batch(
        self, batch_size: int, meta_batch: Mapping[str, Any], statement: Statement | None = None
    ) -> EpisodeGroup:
        """Open the episodes of a batch, or none of them."""
        episodes: list[Episode] = []
        try:
            with self.turn:
                self._writer.require_spare_slots(batch_size)
                for _ in range(batch_size):
                    episodes.append(self._writer_with_room().open({}, statement=statement))
                group = EpisodeGroup(self._writer, episodes)
                group.update(meta_batch)
                return group
        except BaseException:
            for episode in episodes:
                episode.abort()
            raise

    def store(self, **step: Any) -> Any:
        """Append one timestep to the open episode; see `Episode.store`.

        Args:
            step: field -> (*field).

        Returns:
            A named tuple of the stored values.

        Raises:
            EpisodeStateError: no episode is open, or several are.
            SchemaError: a field is unknown or missing, or a value does not fit.
        """
        scope = self._scopes.get(get_ident())
        if scope is None or scope.statement() is None or type(scope.opened) is not Episode:
            return self._current().store(**step)
        return scope.opened.store(**step)

    def store_batch(self, **batch: Any) -> None:
        """Append one timestep to every episode of the open batch.

        Args:
            batch: field -> (B, *field).
        """
        self._group("store_batch").store(**batch)

    def store_meta_batch(self, **meta_batch: Any) -> None:
        """Set meta fields of the open batch.

        Args:
            meta_batch: meta field -> (B, *field).
        """
        self._group("store_meta_batch").update(meta_batch)

    def store_episode(self, *, priority: Any = None, priority_name: str = "td", **arrays: Any) -> None:
        """Publish a whole episode.

        If a field that ends episodes is true before the last step, the steps after it are read like another episode: no
        item reaches across. Views of whole episodes give all steps.

        Args:
            priority: (T,) the TD error of each step, as for `add`.
            priority_name: as for `add`.
            arrays: field -> (T, *field); with `final` also (T + 1, *field), the final observation last; meta field ->
                (*field).

        Raises:
            SchemaError: a field is unknown or missing, or a value does not fit.
            EpisodeStateError: the episode is longer than max_timesteps.
            BufferLockedError: errors are given, and another process owns their priorities.
        """
        with self.turn:
            if priority is not None:
                priority = self._priority(priority, arrays)
            whole = validation.whole_episode(self._storage.layout.schema, arrays)
            errors = None
            if priority is not None:
                errors = self._errors_given(priority, priority_name, (whole.length,), "(T,)")
            episode = self._writer_with_room().store(whole)
            if errors is not None:
                self._errors.setdefault(priority_name, {})[episode] = [*enumerate(errors.tolist())]
                self._settle_errors()
            self._finish_shard_if_due()

    def advance_episode(self) -> None:
        """Publish the episode that `begin_episode` opened, and open the next one if there is room for it.

        An episode without steps stays open.
        """
        episode = self._current()
        if episode.length:
            episode.publish()
            self._finish_shard_if_due()
            with suppress(BufferFullError):  # the next `store` says that no episode is open
                self.begin_episode()

    # Transitions of environments that run on

    def add(self, *, priority: Any = None, priority_name: str = "td", **step: Any) -> None:
        """Append one timestep of each of B environments that run side by side.

        `terminated` or `truncated` ends the episode of an environment: it is published, and the next call begins
        another. An episode of `max_timesteps` steps is published as cut short, and continued in a new one. If no
        `next_<field>` is given, the next step gives the final observation of the cut episode.

        Args:
            priority: (B,) the TD error δ of each step: it gets the priority (|δ| + ε)^α as soon as it is published, as
                by `update_priorities`. Without errors a step gets the highest priority so far. In a buffer with a field
                `priority` this argument is the field.
            priority_name: the name of the `Prioritized` that draws by these priorities.
            step: field -> (B, *field), or (*field) for a single environment. Meta fields likewise; the last value
                counts. `next_<field>` of fields with `final`: the observation after the step, which is kept where an
                episode ends or is cut. A warning is logged once if it seems to be the observation of a reset.

        Raises:
            MemmapBufferError: as `one_episode` and `store` raise it, or B has changed. No environment got the step.
            BufferLockedError: errors are given, and another process owns their priorities. No environment got the step.
            OSError: the disk is full, say. All environments have the step or none, as after Ctrl-C. If it may be
                missing, the next call ends the episodes before it, and begins others. Episodes that could not be
                published are published by the next call.
        """
        try:  # around everything: whenever an interruption comes, `_missed` must note it
            self._extend(step, priority, priority_name, time=False)
        except BaseException as error:
            self._missed(error, step, priority, time=False)
            raise

    def extend(self, *, priority: Any = None, priority_name: str = "td", **steps: Any) -> None:
        """Append T timesteps of each of B environments, as T calls of `add` do.

        Args:
            priority: (T, B) TD errors, or (T,) for a single environment; see `add`.
            priority_name: as for `add`.
            steps: field -> (T, B, *field), or (T, *field) for a single environment.

        Raises:
            BufferFullError: an episode did not fit; the timesteps before it are stored.
            MemmapBufferError: as `add` raises it.
            OSError: as `add` raises it.
        """
        try:  # around everything, as in `add`
            self._extend(steps, priority, priority_name, time=True)
        except BaseException as error:
            self._missed(error, steps, priority, time=True)
            raise

    def end_episodes(self, environments: Any = None) -> None:
        """Publish the open episodes of `add`, flagged as cut short. `close` does so, too.

        Args:
            environments: the numbers of the environments whose episodes end, or a mask of all, (B,); the next `add`
                begins others there, and goes on elsewhere. None: all, and the next `add` may be of another B.

        Raises:
            SchemaError: there is no environment of such a number, or the mask is not of the B that run.
        """
        with self.turn:
            if environments is None:
                if self._stream is not None:
                    self._stream.publish()
                self._let_stream_go()
            elif self._stream is not None:
                self._stream.end(_numbers_of(environments, len(self._stream)))
            self._settle_errors()

    @property
    def num_added(self) -> int:
        """The number of timesteps that `add` and `extend` of this object stored, of all environments, gone ones too."""
        return self._num_added_before + (0 if self._stream is None else self._stream.num_added)

    def _let_stream_go(self) -> None:
        """Let the next `add` begin a new stream, for any number of environments."""
        self._num_added_before, self._stream = self.num_added, None

    def publish_steps(self) -> None:
        """Make all added timesteps visible: open episodes of `add` are published as cut short, and go on in new ones.

        From then on each timestep is published at once, as with `publish="step"`. That needs a spare slot for each
        environment, no other open episode, and neither `sync_every` nor `publish_to`. Else the next call cuts the
        episodes again, and a warning is logged once.
        """
        with self.turn:
            stream, writer = self._stream, self._writer
            if stream is None or writer.how.publish == "step":
                return
            stream.begin_anew()
            writer.commit_pending()
            self._settle_errors()
            self._finish_shard_if_due()
            if self._publisher is None and writer.show_steps(len(stream)):
                return
            if not self._told_of_cuts:
                log.warning(CUTS, self._storage.path, len(stream))
            self._told_of_cuts = True

    def _extend(self, values: dict[str, Any], priority: Any, name: str, *, time: bool) -> None:
        """`add`, or with `time` `extend`: by the fast way of the stream if it takes the values as they are."""
        with self.turn:
            stream = self._stream
            if priority is not None:
                priority = self._priority(priority, values)
            try:
                went_on = False
                if not time and stream is not None:
                    went_on = stream.go_on(values) if priority is None else self._go_on(stream, values, priority, name)
                if not went_on:
                    self._append(values, priority, name, time=time)
            finally:
                if self._errors:
                    self._settle_errors()
            if self._publisher is not None:
                self._finish_shard_if_due()

    def _go_on(self, stream: EpisodeStream, values: Mapping[str, Any], priority: Any, name: str) -> bool:
        """`EpisodeStream.go_on` for a timestep that is given with its errors; False: the slow way must be taken."""
        try:
            errors = _errors_of(priority, (len(stream),), "(B)")
        except SchemaError:
            return False  # the slow way raises it, after the checks that come first
        self._named(name)
        return stream.go_on(values, (self._errors.setdefault(name, {}), errors[None]))

    def _append(self, values: dict[str, Any], priority: Any, name: str, *, time: bool) -> None:
        """Append timesteps that may come with their errors, as they are given."""
        self._writer.require_writable()
        steps = Steps(self._storage.layout.schema, values, time=time)
        try:
            axes = "(T, B)" if time else "(B)"
            errors = self._errors_given(priority, name, steps.ends.shape[not time :], axes)
            if errors is not None:
                steps.errors = self._errors.setdefault(name, {}), errors.reshape(steps.ends.shape)
            stream = self._stream_of(steps.num_envs)
            stream.lead = steps.lead - time
            stream.extend(steps)
        except OSError:
            if self._stream is not None and steps.done < len(steps.ends):
                self._stream.interrupt(steps)
            raise

    def _stream_of(self, size: int) -> EpisodeStream:
        """The stream for `size` environments. Raises SchemaError: it runs with another number of them."""
        if self._stream is None:
            self._stream = self._new_stream(size)
        if len(self._stream) != size:
            count_given = f"{size} environment" + "s" * (size > 1)
            raise SchemaError(
                f"got {count_given}, expected the {len(self._stream)} that run; call end_episodes() before others"
            )
        return self._stream

    def _missed(self, error: BaseException, values: dict[str, Any], priority: Any, *, time: bool) -> None:
        """Note that given steps may be missing, and which.

        Not for a MemmapBufferError or OSError: those tell that the steps were refused, or are handled where steps are
        stored.
        """
        stream = self._stream
        if stream is not None and not isinstance(error, (MemmapBufferError, OSError)):
            stream.interrupt()
            with suppress(Exception):  # of values that would have been refused
                self._priority(priority, values)
                stream.interrupt(Steps(self._storage.layout.schema, values, time=time))

    def _priority(self, priority: Any, values: dict[str, Any]) -> Any:
        """`priority`, or None if it is a field: then it is moved into `values`."""
        if priority is not None and "priority" in self._storage.layout.schema.all:
            values["priority"] = priority
            return None
        return priority

    def _errors_given(self, priority: Any, name: str, shape: tuple[int, ...], axes: str) -> FloatArray | None:
        """The checked errors of steps, None for none. The priorities `name` are opened for writing before any step is
        stored.
        """
        if priority is None:
            return None
        errors = _errors_of(priority, shape, axes)
        self._named(name)
        return errors

    def _settle_errors(self) -> None:
        """Hand over the errors of steps that were published meanwhile, and drop those of aborted episodes."""
        published = self._storage.state("next")
        for name, waiting in self._errors.items():
            ready = [episode for episode in waiting if 0 <= episode.serial < published or episode.state == "aborted"]
            steps = [(episode.serial, *step) for episode in ready for step in waiting[episode] if episode.serial >= 0]
            if steps:
                serials, t, errors = zip(*steps, strict=True)
                self.update_priorities(np.array([serials, t]).T, np.array(errors), name=name)
            for episode in ready:
                del waiting[episode]

    def _new_stream(self, size: int) -> EpisodeStream:
        """A stream of episodes for `size` environments."""
        begin = None if self._publisher is None else partial(_begin_in_stream, ref(self))
        resets = {"skips_resets": self._skips_resets, "resets_at_once": self._resets_at_once}
        return EpisodeStream(self._writer, size, **resets, begin=begin)

    # The shard, which is published when it is full (`publish_to`)

    def _writer_with_room(self) -> Writer:
        """The writer for another episode: that of a new shard, if this shard is full or due to be published."""
        if self._publisher is not None:
            count, limit = self._writer.num_given, self._storage.layout.max_episodes
            if count and count + len([*self._writer.lock.episodes]) >= limit:
                self._finish_shard()
            else:
                self._finish_shard_if_due(wait=False)
        return self._writer

    def _finish_shard_if_due(self, *, wait: bool = True) -> None:
        """Finish the shard if it has enough episodes, or its time is over. An error is logged.

        Args: wait: do not finish it as long as the final observation of a cut episode is still to come.
        """
        publisher = self._publisher
        if publisher is not None:
            with self.turn:
                if self._writer.holds and publisher.is_due(self._writer.num_given):
                    try:
                        if not wait or self._stream is None or self._stream.complete():
                            self._finish_shard()
                    except (MemmapBufferError, OSError) as error:
                        log.warning("%s: no shard can be begun after it yet: %s", self._storage.path, error)

    def _finish_shard(self) -> None:
        """Hand this shard over to be published, and continue in a new one with the open episodes."""
        assert self._publisher is not None
        with self.turn:
            before = self._writer
            before.begin()  # raises if this object may not write any more
            if self._stream is not None:
                self._stream.complete()
            before.commit_pending()
            self._settle_errors()  # of all episodes that were published in this shard
            priorities = self._priorities
            layout, reserve = self._storage.layout, bool(self._storage.state("reserved"))
            writer = self._publisher.new_shard(layout, before.how, self._storage.verify, reserve)
            self._unfinished = partial(self._switch_shards, before, writer)
            self._unfinished()
            for old_priorities in priorities.values():
                with suppress(OSError):  # such as a full disk: nothing is drawn by these priorities any more
                    old_priorities.close()

    def _switch_shards(self, before: Writer, writer: Writer) -> None:
        """Complete the switch that `_finish_shard` prepared. No line of it fails.

        After an interruption `turn` calls it again, and it begins again from the first line.
        """
        assert self._publisher is not None
        before.move_episodes(writer)
        if self._stream is not None:
            self._stream.go_on_with(writer)
        self._storage, self._writer, self._priorities = writer.storage, writer, {}
        self._read_from(Folders([writer.storage]))
        self._publisher.add(before)
        self._unfinished = None

    # The open episode

    def _current(self) -> Episode:
        """The open episode of this thread, else the only one. Raises EpisodeStateError: there is none, or several."""
        episodes = self._open_ones()
        if len(episodes) == 1 and isinstance(episodes[0], EpisodeGroup):
            raise EpisodeStateError("store: a batch of episodes is open; use store_batch")
        if len(episodes) == 1 and isinstance(episodes[0], Episode):
            return episodes[0]
        problem = (
            f"{len(episodes)} episodes are open; use episode.store()"
            if episodes
            else "no episode is open; store within `with buffer.one_episode():`, or after begin_episode()"
        )
        raise EpisodeStateError(f"{self._storage.path}: {problem}")

    def _newest_ones(self) -> dict[int, Episode]:
        """`_newest` without the episodes that are not open any more."""
        return {thread: episode for thread, episode in self._newest.items() if episode.state == "open"}

    def _begun_ones(self) -> list[Episode]:
        """The episodes of `begin_episode` that are still open."""
        episodes = [episode for reference in self._begun if (episode := reference()) is not None]
        return [each for each in episodes if each.state == "open" and not each.writer.lock.episodes.was_left(each)]

    def _open_ones(self) -> list[Episode | EpisodeGroup]:
        """See `open_episodes`."""
        thread = get_ident()
        own_scope = self._scopes.get(thread)
        if own_scope is not None and own_scope.statement() is not None:
            return [own_scope.opened]
        self._writer.require_writable()
        begun = self._begun_ones()
        opened = [scope.opened for scope in list(self._scopes.values()) if scope.is_open]
        return [episode for episode in begun if episode.thread == thread] or [*opened, *begun]

    def _group(self, what: str) -> EpisodeGroup:
        """The open batch of this thread's block, else the only one. `what` is the method, for the error."""
        scopes = {thread: scope for thread, scope in list(self._scopes.items()) if scope.statement() is not None}
        scope = scopes.get(get_ident()) or (next(iter(scopes.values())) if len(scopes) == 1 else None)
        if scope is None or not isinstance(scope.opened, EpisodeGroup):
            raise EpisodeStateError(f"{what}: no batch is open; use it within `with buffer.batched_episode(n):`")
        return scope.opened


def _begin_in_stream(reference: ref[Recording]) -> Episode:
    """Open an episode for a stream. The stream refers to its buffer weakly, as the buffer holds the stream."""
    buffer = reference()
    assert buffer is not None
    return buffer._writer_with_room().open({}, statement=ended_statement)


def _numbers_of(environments: Any, size: int) -> list[int]:
    """The numbers of environments, of `size` that run. Raises SchemaError: they are no numbers or mask of these."""
    which = np.atleast_1d(to_numpy(environments))
    numbers = np.flatnonzero(which) if which.dtype == np.bool_ and which.shape == (size,) else which
    is_wrong = numbers.ndim > 1 or numbers.dtype.kind not in "iu"
    if numbers.size and (is_wrong or numbers.min() < 0 or numbers.max() >= size):
        raise SchemaError(
            f"end_episodes: got environments={which.tolist()}, expected numbers from 0 to {size - 1}, or a mask of "
            f"{size} bools"
        )
    return [int(number) for number in numbers]


def _errors_of(values: Any, shape: tuple[int, ...], axes: str) -> FloatArray:
    """TD errors as a float64 array of the given shape.

    Args:
        values: numbers.
        shape: the shape; for a single environment its axis may be left out.
        axes: the names of the axes, for the error.

    Raises:
        SchemaError: they have another shape, or are not all finite numbers.
    """
    errors = to_numpy(values)
    alone = shape[:-1] if shape[-1] == 1 and axes.endswith("B)") else shape
    if errors.shape not in (shape, alone) or errors.dtype.kind not in "fiu" or not np.isfinite(errors).all():
        raise SchemaError(
            f"priority: got {errors.dtype} {errors.shape}, expected a finite number for the TD error of each step, "
            f"{axes} = {shape}"
        )
    return errors.astype(np.float64).reshape(shape)
