"""The writing half of `ReplayBuffer`: one episode, several side by side, whole ones, environments that run on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import ref

import numpy as np

from memmap_buffer.api.editing import Editing
from memmap_buffer.dtypes import FloatArray, check_count, to_numpy
from memmap_buffer.errors import BufferFullError, EpisodeStateError, MemmapBufferError, SchemaError
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.writing import validation
from memmap_buffer.writing.episode import Block, BlockEnd, Episode, interrupted_end
from memmap_buffer.writing.episode_group import EpisodeGroup
from memmap_buffer.writing.steps import Steps
from memmap_buffer.writing.vector_env import EpisodeStream
from memmap_buffer.writing.writer import Writer

log = logging.getLogger("memmap_buffer")
CUTS = (
    "%s: publish_steps: steps cannot be published one by one here, so each call ends the episodes of all environments; "
    "create the buffer with publish='step' or spare_slots=%d"
)
Opened = TypeVar("Opened", bound=Episode | EpisodeGroup)


class Scope(Block, Generic[Opened]):
    """The block of `one_episode` or `batched_episode`; what it opens is what its thread stores to.

    Args: recording: whose block it is. begin: opens it, for the block that is held.
    """

    def __init__(self, recording: Recording, begin: Callable[[BlockEnd | None], Opened]) -> None:
        self._recording, self._begin = recording, begin

    def __enter__(self) -> Opened:  # type: ignore[override]
        super().__enter__()
        scopes = self._recording._scopes
        scope = scopes.get(get_ident())
        if scope is not None and scope.state == "open" and not scope.was_left:
            raise EpisodeStateError(
                "an episode is open already, and `store` could mean either; end it first, or use begin_episode() and "
                "episode.store() for several side by side"
            )
        opened = self._begin(self.block_end)
        scopes[get_ident()] = self._opened = opened
        return opened

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the episode, or the batch; the thread stores to it no longer."""
        try:
            self._opened.leave(kind, error, trace)
        finally:
            self._recording._scopes.pop(self._opened.thread, None)
        if self._recording._publisher is not None:
            self._recording._finish_shard_if_due()


class GivenErrors:
    """The errors of steps that are not published yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Any, list[tuple[int, float]]]] = {}

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def add(self, name: str, episode: Any, t: int, error: float) -> None:
        """Take the error of a step for the priorities of a name."""
        self._waiting.setdefault(name, {}).setdefault(episode, []).append((t, error))

    def settle(self, published: int, give: Callable[[str, IntArray, FloatArray], Any]) -> None:
        """Give those of episodes that are published; those of episodes that were dropped are forgotten.

        Args:
            published: the serials below are.
            give: takes a name, (B, 2) serials and steps, and (B,) errors.
        """
        for name, waiting in self._waiting.items():
            ready = [episode for episode in waiting if 0 <= episode.serial < published or episode.state == "aborted"]
            steps = [(episode.serial, *step) for episode in ready for step in waiting[episode] if episode.serial >= 0]
            if steps:
                serials, t, errors = zip(*steps, strict=True)
                give(name, np.array([serials, t]).T, np.array(errors))
            for episode in ready:
                del waiting[episode]


class Recording(Editing):
    """The writing half of `ReplayBuffer`."""

    _skips_resets: bool  # whether the step after an episode's end is the environment's reset
    _told_of_cuts = False
    _stream: EpisodeStream | None = None
    _num_added_before = 0  # by streams that were let go
    _resets_at_once = False  # whether it is known that the step that ends an episode gives the observation of the reset

    def _record_to(self, writer: Writer) -> None:
        self._storage, self._writer = writer.storage, writer
        self._scopes: dict[int, Episode | EpisodeGroup] = {}  # by thread
        self._begun: tuple[ref[Episode], ...] = ()
        # By thread, of those that were begun: what `store` finds without a handle.
        self._newest: dict[int, Episode] = {}
        self._let_stream_go()
        self._errors = GivenErrors()

    def _own_priorities(self, name: str) -> None:
        """Open the priorities of that name. Raises BufferLockedError."""
        raise NotImplementedError

    def _give_errors(self, name: str, indices: IntArray, td_errors: FloatArray) -> Any:
        """Give published steps the priorities of their errors."""
        raise NotImplementedError

    def one_episode(self, *, keep_partial: bool = False, **meta: Any) -> Scope[Episode]:
        """Record one episode: `store` in the block, published at its end, dropped on any exception.

        Args:
            keep_partial: on an exception publish what was stored so far, flagged as cut short.
            meta: meta fields known at the start; later ones by `episode[name] = value`.

        Raises:
            EpisodeStateError: another one is open.
            BufferFullError: there is no room, and it is not circular.
            BufferLockedError: another process writes.
            ReadOnlyError: the buffer only reads.
            WriterLostError: this object may not write any more.
        """

        def begin(block: BlockEnd | None) -> Episode:
            with self._turn:
                return self._writer_with_room().open(meta, keep_partial=keep_partial, block_end=block)

        return Scope(self, begin)

    def begin_episode(self, *, keep_partial: bool = False, **meta: Any) -> Episode:
        """An open episode to `store` to, `publish` or `abort`; several may be open at once.

        An episode that nobody holds any more, and that is not the last one begun, is dropped.

        Args:
            keep_partial: as for `one_episode`.
            meta: as for `one_episode`.
        """
        with self._turn:
            episode = self._writer_with_room().open(meta, keep_partial=keep_partial)
            try:
                self._begun = (*map(ref, self._begun_ones()), ref(episode))
                self._newest = {**self._newest_ones(), get_ident(): episode}
                return episode
            except BaseException:
                episode.abort()  # whoever asked for it never gets it
                raise

    def begin_batch(self, batch_size: int, **meta_batch: Any) -> EpisodeGroup:
        """Open episodes of several synchronised environments, to `store` to together, `publish` or `abort`.

        `store_batch` knows only the batch of a block: this one is stored to by what is returned. Where nobody holds
        that any more, they are dropped.

        Args:
            batch_size: how many environments.
            meta_batch: meta field -> (batch_size, *field).

        Returns:
            The batch, which has `store`, `update`, `publish` and `abort`, and its `episodes`.

        Raises:
            BufferFullError: there is no room for all of them; none is open.
            MemmapBufferError: as `one_episode` raises it.
        """
        check_count("batch_size", batch_size)
        episodes: list[Episode] = []
        try:
            with self._turn:
                for _ in range(batch_size):
                    episodes.append(self._writer_with_room().open({}))
                group = EpisodeGroup(self._writer, episodes)
                group.update(meta_batch)
                return group
        except BaseException:
            for episode in episodes:
                episode.abort()
            raise

    @property
    def open_episodes(self) -> list[Episode | EpisodeGroup]:
        """The open episodes, and batches of a block, that `store` could mean: those of this thread, else of all."""
        return self._open_ones() if self._writer.holds else []

    def batched_episode(self, batch_size: int, **meta_batch: Any) -> Scope[EpisodeGroup]:
        """Record an episode of each of several synchronised environments: `store_batch` in the block.

        Args:
            batch_size: how many environments.
            meta_batch: meta field -> (batch_size, *field).
        """
        check_count("batch_size", batch_size)

        def begin(block: BlockEnd | None) -> EpisodeGroup:
            with self._turn:
                self._writer.require_spare_slots(batch_size)
                episodes = [self._writer_with_room().open({}, block_end=block) for _ in range(batch_size)]
                group = EpisodeGroup(self._writer, episodes, block_end=block)
            group.update(meta_batch)
            return group

        return Scope(self, begin)

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
        return (scope if type(scope) is Episode else self._current()).store(**step)

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

        Where a field that ends episodes is true before the last step, the steps after it are served as those of another
        episode: no item reaches across. Whole episodes are given as they were stored.

        Args:
            priority: (T,) the TD error of each step, as for `add`.
            priority_name: as for `add`.
            arrays: field -> (T, *field), with `final` (T + 1, *field) to give the final observation; meta field ->
                (*field).

        Raises:
            SchemaError: a field is unknown or missing, or a value does not fit.
            EpisodeStateError: the episode is longer than max_timesteps.
            BufferLockedError: errors are given, and another process owns their priorities.
        """
        with self._turn:
            if priority is not None:
                priority = self._priority(priority, arrays)
            whole = validation.whole_episode(self._storage.layout.schema, arrays)
            errors = None
            if priority is not None:
                errors = self._errors_given(priority, priority_name, (whole.length,), "(T,)")
            episode = self._writer_with_room().store(whole)
            if errors is not None:
                for t, error in enumerate(errors.tolist()):
                    self._errors.add(priority_name, episode, t, error)
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
        another. One that is as long as `max_timesteps` is published as cut short, and goes on in a new one; where no
        `next_<field>` is given, the next step adds what was seen after it.

        Args:
            priority: (B,) the TD error δ of each step, from which it has the priority (|δ| + ε)^α as soon as it is
                published, as by `update_priorities`; without, the highest so far. In a buffer with a field of that name
                it is the field.
            priority_name: of the `Prioritized` that draws by them.
            step: field -> (B, *field), or (*field) where there is one environment. Meta fields alike: the last value
                counts. `next_<field>` of fields with `final`: the observation after the step, kept where an episode
                ends or is cut. One warning tells where it seems to be that of a reset.

        Raises:
            MemmapBufferError: as `one_episode` and `store` raise it, or B is another one. No environment got the step.
            BufferLockedError: errors are given, and another process owns their priorities. Likewise.
            OSError: the disk is full, say. All environments have the step or none, as after Ctrl-C; where it may be
                missing, the next call ends the episodes before it, and begins others. What could not be published is
                published by the next call.
        """
        try:  # first of all: of what comes before it nobody could know
            self._extend(step, priority, priority_name, time=False)
        except BaseException as error:
            self._missed(error, step)
            raise

    def extend(self, *, priority: Any = None, priority_name: str = "td", **steps: Any) -> None:
        """Append T timesteps of each of B environments, as so many calls of `add`.

        Args:
            priority: (T, B) TD errors, or (T,) where there is one environment; see `add`.
            priority_name: as for `add`.
            steps: field -> (T, B, *field), or (T, *field) where there is one environment.

        Raises:
            BufferFullError: an episode did not fit; the timesteps before it are stored.
            MemmapBufferError: as `add` raises it.
            OSError: as `add` raises it.
        """
        try:  # first of all: of what comes before it nobody could know
            self._extend(steps, priority, priority_name, time=True)
        except BaseException as error:
            self._missed(error, steps)
            raise

    def end_episodes(self) -> None:
        """Publish the episodes that `add` has open, flagged as cut short; `close` does so, too."""
        with self._turn:
            if self._stream is not None:
                self._stream.publish()
            self._let_stream_go()
            self._settle_errors()

    @property
    def num_added(self) -> int:
        """How many timesteps `add` and `extend` of this object stored, of all environments, those that are gone too."""
        return self._num_added_before + (0 if self._stream is None else self._stream.num_added)

    def _let_stream_go(self) -> None:
        self._num_added_before, self._stream = self.num_added, None

    def publish_steps(self) -> None:
        """Have what was added be visible: the episodes that `add` has open are published as cut short, others go on.

        From then on each timestep is published at once, as `publish="step"` does. Where that cannot be, the next call
        cuts again, and the log says so: it takes a spare slot for each environment, no other episode that is open, and
        neither `sync_every` nor `publish_to`.
        """
        with self._turn:
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
        with self._turn:
            stream = self._stream
            if priority is not None:
                priority = self._priority(priority, values)
            if not time and stream is not None:
                went_on = stream.go_on(values) if priority is None else self._go_on(stream, values, priority, name)
                if went_on:
                    self._finish_shard_if_due()
                    return
            self._writer.require_writable()
            steps = Steps(self._storage.layout.schema, values, time=time)
            try:
                axes = "(T, B)" if time else "(B)"
                errors = self._errors_given(priority, name, steps.ends.shape[not time :], axes)
                stream = self._stream_of(steps.num_envs)
                stream.lead = steps.lead - time
                self._append(stream, steps, errors, name)
            except OSError:
                if self._stream is not None and steps.done < len(steps.ends):
                    self._stream.interrupt(steps.ends[-1])
                raise
            self._finish_shard_if_due()

    def _go_on(self, stream: EpisodeStream, values: Mapping[str, Any], priority: Any, name: str) -> bool:
        """`EpisodeStream.go_on` of a timestep that is given with its errors."""
        size, before = len(stream), stream.num_added
        try:
            errors = _errors_of(priority, (size,), "(B)")
        except SchemaError:
            return False  # there it is told in full
        self._own_priorities(name)
        try:
            return stream.go_on(values)
        finally:
            stored = stream.num_added - before
            if stored:
                recorded = range(size) if stored == size else stream.recorded.tolist()
                self._keep_errors(name, [(stream.episodes[i], errors.item(i)) for i in recorded])

    def _keep_errors(self, name: str, last_steps: Iterable[tuple[Episode, float]]) -> None:
        """Take the errors of the last timesteps of episodes, and give those that are published."""
        for episode, error in last_steps:
            self._errors.add(name, episode, episode.length - 1, error)
        self._settle_errors()

    def _stream_of(self, size: int) -> EpisodeStream:
        if self._stream is None:
            self._stream = self._new_stream(size)
        if len(self._stream) != size:
            count_given = f"{size} environment" + "s" * (size > 1)
            raise SchemaError(
                f"got {count_given}, expected the {len(self._stream)} that run; call end_episodes() before others"
            )
        return self._stream

    def _missed(self, error: BaseException, values: Mapping[str, Any]) -> None:
        """Steps that were given may be missing, unless the error is of themselves; the last may have ended episodes."""
        stream, schema = self._stream, self._storage.layout.schema
        if stream is not None and not isinstance(error, (MemmapBufferError, OSError)):
            stream.interrupt(False)
            flat = schema.flatten(values)
            for name in schema.ends:
                with suppress(ValueError):  # of steps that would have been refused
                    stream.interrupt(np.reshape(to_numpy(flat.get(name, False)), (-1, len(stream)))[-1] != 0)

    def _append(self, stream: EpisodeStream, steps: Steps, errors: FloatArray | None, name: str) -> None:
        """Append timesteps; where there are errors one by one, as what was stored of each gets its priorities."""
        if errors is None:
            stream.extend(steps)
            return
        for t, row in enumerate(errors.reshape(-1, len(stream))):
            step = steps.part(t)
            try:
                stream.extend(step)
            finally:
                steps.done += step.done
                stored = step.recorded.tolist() if step.done else ()
                self._keep_errors(name, [(stream.episodes[i], row.item(i)) for i in stored])

    def _priority(self, priority: Any, values: dict[str, Any]) -> Any:
        """The errors that were given, unless `priority` is a field."""
        if priority is not None and "priority" in self._storage.layout.schema.all:
            values["priority"] = priority
            return None
        return priority

    def _errors_given(self, priority: Any, name: str, shape: tuple[int, ...], axes: str) -> FloatArray | None:
        """The errors of steps that are not stored yet, if there are any; their priorities are owned from then on."""
        if priority is None:
            return None
        errors = _errors_of(priority, shape, axes)
        self._own_priorities(name)
        return errors

    def _settle_errors(self) -> None:
        """Give the errors of steps that were published meanwhile."""
        self._errors.settle(self._storage.state("next"), self._give_errors)

    def _new_stream(self, size: int) -> EpisodeStream:
        begin = None if self._publisher is None else partial(_begin_in_stream, ref(self))
        resets = {"skips_resets": self._skips_resets, "resets_at_once": self._resets_at_once}
        return EpisodeStream(self._writer, size, **resets, begin=begin)

    # The shard, where it is published as it is full

    def _writer_with_room(self) -> Writer:
        """The writer for another episode: of a new shard where this one is to be followed, or has no room."""
        if self._publisher is not None:
            count, limit = self._writer.num_given, self._storage.layout.max_episodes
            if count and count + len([*self._writer.lock.episodes]) >= limit:
                self._finish_shard()
            else:
                self._finish_shard_if_due(wait=False)
        return self._writer

    def _finish_shard_if_due(self, *, wait: bool = True) -> None:
        """Finish the shard if it has its episodes, or its time; what stands in the way of that is logged.

        Args: wait: not while the final observation of an episode that was cut is still to come.
        """
        publisher = self._publisher
        if publisher is not None:
            with self._turn:
                if self._writer.holds and publisher.is_due(self._writer.num_given):
                    try:
                        if not wait or self._stream is None or self._stream.complete():
                            self._finish_shard()
                    except (MemmapBufferError, OSError) as error:
                        log.warning("%s: no shard can be begun after it yet: %s", self._storage.path, error)

    def _finish_shard(self) -> None:
        """Have this shard published, and go on in a new one with the episodes that are open."""
        raise NotImplementedError

    # The open episode

    def _current(self) -> Episode:
        """The open episode of this thread, else the only one that is open."""
        episodes = self._open_ones()
        if len(episodes) == 1 and isinstance(episodes[0], EpisodeGroup):
            raise EpisodeStateError("store: a batch of episodes is open; use store_batch")
        if len(episodes) == 1 and isinstance(episodes[0], Episode):
            return episodes[0]
        some = (
            f"{len(episodes)} episodes are open; use episode.store()"
            if episodes
            else "no episode is open; store within `with buffer.one_episode():`, or after begin_episode()"
        )
        raise EpisodeStateError(f"{self._storage.path}: {some}")

    def _newest_ones(self) -> dict[int, Episode]:
        return {thread: episode for thread, episode in self._newest.items() if episode.state == "open"}

    def _begun_ones(self) -> list[Episode]:
        episodes = [reference() for reference in self._begun]
        return [episode for episode in episodes if episode is not None and episode.state == "open"]

    def _open_ones(self) -> list[Episode | EpisodeGroup]:
        thread = get_ident()
        mine = self._scopes.get(thread)
        if mine is not None:
            return [mine]
        self._writer.require_writable()
        begun = self._begun_ones()
        scopes = [scope for scope in list(self._scopes.values()) if scope.state == "open"]
        return [episode for episode in begun if episode.thread == thread] or [*scopes, *begun]

    def _group(self, what: str) -> EpisodeGroup:
        scopes = self._scopes
        mine = scopes.get(get_ident()) or (next(iter(scopes.values())) if len(scopes) == 1 else None)
        if not isinstance(mine, EpisodeGroup):
            raise EpisodeStateError(f"{what}: no batch is open; use it within `with buffer.batched_episode(n):`")
        return mine


def _begin_in_stream(reference: ref[Recording]) -> Episode:
    """An episode of the buffer that holds the stream, which does not hold it."""
    buffer = reference()
    assert buffer is not None
    return buffer._writer_with_room().open({}, block_end=interrupted_end)


def _errors_of(values: Any, shape: tuple[int, ...], axes: str) -> FloatArray:
    """Errors as they were given.

    Args:
        values: numbers.
        shape: that they must have; of one environment its axis may be left out.
        axes: what the axes are, for the error.

    Raises:
        SchemaError: another shape, or no finite numbers.
    """
    errors = to_numpy(values)
    alone = shape[:-1] if shape[-1] == 1 and axes.endswith("B)") else shape
    if errors.shape not in (shape, alone) or errors.dtype.kind not in "fiu" or not np.isfinite(errors).all():
        raise SchemaError(
            f"priority: got {errors.dtype} {errors.shape}, expected a finite number for the TD error of each step, "
            f"{axes} = {shape}"
        )
    return errors.astype(np.float64).reshape(shape)
