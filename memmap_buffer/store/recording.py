"""What records: open episodes, whole ones, groups. `ReplayBuffer`'s words for the writer; no logic of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memmap_buffer.errors import BufferFullError, EpisodeStateError, SchemaError
from memmap_buffer.store import edits
from memmap_buffer.store.episode import Episode
from memmap_buffer.store.group import EpisodeGroup
from memmap_buffer.store.storage import Storage
from memmap_buffer.store.stream import EpisodeStream, Steps
from memmap_buffer.store.writer import Writer
from memmap_buffer.values import check_count


class ToStore(NamedTuple):
    """What `store` takes of a field: its shape and dtype, whether it must be given, whether there is one more entry an
    episode (`final`), and whether it is a meta field, one value an episode.
    """

    shape: tuple[int, ...]
    dtype: str
    required: bool
    final: bool
    meta: bool


class Stored(NamedTuple):
    """An array of the folder: its file, which `numpy.load` opens, its shape and dtype there, and the file's bytes."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int


class Recording:
    """The writing half of `ReplayBuffer`."""

    _storage: Storage
    _writer: Writer
    _skips_resets = False  # whether the step after an episode's end is the environment's reset

    def _record_to(self, storage: Storage, writer: Writer) -> None:
        self._storage = storage
        self._writer = writer
        self._scope: Episode | EpisodeGroup | None = None
        self._begun: list[Episode] = []
        self._stream: EpisodeStream | None = None

    @contextmanager
    def one_episode(self, *, keep_partial: bool = False, **meta: Any) -> Iterator[Episode]:
        """Record one episode: `store` in the block, published at its end, dropped on any exception.

        Args:
            keep_partial: on an exception publish what was stored so far, flagged as cut short.
            meta: meta fields known at the start; later ones by `episode[name] = value`.

        Raises: EpisodeStateError: nested. BufferFullError, BufferLockedError, ReadOnlyError, WriterLostError.
        """
        self._require_no_scope()
        with self._entered(self._writer.open(meta, keep_partial=keep_partial)) as episode:
            yield episode

    def begin_episode(self, *, keep_partial: bool = False, **meta: Any) -> Episode:
        """An open episode to `store` to, `publish` or `abort`; several may be open at once."""
        episode = self._writer.open(meta, keep_partial=keep_partial)
        self._begun = [*(other for other in self._begun if other.state == "open"), episode]
        return episode

    @contextmanager
    def batched_episode(self, batch_size: int, **meta_batch: Any) -> Iterator[EpisodeGroup]:
        """Record `batch_size` synchronised environments: `store_batch` in the block.

        Args: meta_batch: meta field -> (batch_size, *field).
        """
        check_count("batch_size", batch_size)
        self._require_no_scope()
        with self._entered(EpisodeGroup(self._storage.layout.schema, [])) as group:
            for _ in range(batch_size):
                group.add(self._writer.open({}))
            group.update(meta_batch)
            yield group

    def store(self, **step: Any) -> Any:
        """Append one timestep to the open episode; see `Episode.store`.

        Raises: EpisodeStateError: no episode is open, or several are. SchemaError.
        """
        scope = self._scope
        return (scope if type(scope) is Episode else self._current()).store(**step)

    def store_batch(self, **batch: Any) -> None:
        """Append one timestep to every episode of the open batch: field -> (B, *field)."""
        self._group("store_batch").store(**batch)

    def store_meta_batch(self, **meta_batch: Any) -> None:
        """Set meta fields of the open batch: name -> (B, *field)."""
        self._group("store_meta_batch").update(meta_batch)

    def store_episode(self, **arrays: Any) -> None:
        """Publish a whole episode.

        Where a field that ends episodes is true before the last step, the steps after it are served as those of
        another episode are: no item reaches across. Whole episodes are given as they were stored.

        Args: arrays: field -> (T, *field), with `final` (T + 1, *field) to give the final observation; meta fields.
        Raises: SchemaError. EpisodeStateError: longer than max_timesteps.
        """
        columns, meta, finals, length = edits.whole_episode(self._storage.layout.schema, arrays)
        episode = self._writer.open(meta)
        try:
            episode.fill(columns, length)
            episode.finals = finals
            episode.publish()
        except BaseException:
            episode.abort()
            raise

    def advance_episode(self) -> None:
        """Publish the episode that `begin_episode` opened, and open the next one if there is room for it.

        An episode without steps stays open.
        """
        episode = self._current()
        if episode.length:
            episode.publish()
            with suppress(BufferFullError):  # the next `store` says that no episode is open
                self.begin_episode()

    # What there is to store, and where it lies

    def elements_to_store(self) -> dict[str, ToStore]:
        """What to pass to `store`, `store_episode` and `add`: dotted name -> `ToStore`."""
        schema = self._storage.layout.schema
        return {
            name: ToStore(field.shape, field.dtype, not meta and field.default is None, field.final, meta)
            for name, field in schema.all.items()
            for meta in (name in schema.meta_fields,)
        }

    def elements_stored(self) -> dict[str, Stored]:
        """Where each field is stored: dotted name -> `Stored`; the first axis of each array is the slots."""
        layout = self._storage.layout
        arrays = {name: layout.arrays[name] for name in layout.schema.all}
        return {name: Stored(self._storage.path / a.name, a.shape, a.dtype, a.size) for name, a in arrays.items()}

    # Transitions of environments that run on

    def add(self, **step: Any) -> None:
        """Append one timestep of each of B environments that run side by side.

        `terminated` or `truncated` ends the episode of an environment: it is published, and the next call begins
        another. One that is as long as `max_timesteps` is published as cut short, and goes on in a new one; where no
        `next_<field>` is given, the next step adds what was seen after it.

        Args:
            step: field -> (B, *field), or (*field) where there is one environment. Meta fields alike: the last value
                counts. `next_<field>` of fields with `final`: what was seen after the step, kept where an episode ends
                or is cut.

        Raises:
            SchemaError: as `Episode.store`, or another B; BufferFullError, BufferLockedError, ReadOnlyError,
                WriterLostError, EpisodeStateError. No environment got the step.
            OSError: an episode that ended could not be published; it is kept, and published by the next call.
        """
        self._extend(step, time=False)

    def extend(self, **steps: Any) -> None:
        """Append T timesteps of each of B environments, as so many calls of `add`.

        Args: steps: field -> (T, B, *field), or (T, *field) where there is one environment.
        Raises: as `add`; after BufferFullError the timesteps stay that lie before the episode that did not fit.
        """
        self._extend(steps, time=True)

    def end_stream(self) -> None:
        """Publish the episodes that `add` has open, flagged as cut short; `close` does so, too."""
        if self._stream is not None:
            self._stream.publish()
        self._stream = None

    def _extend(self, given: Mapping[str, Any], *, time: bool) -> None:
        self._writer.require_writable()
        steps = Steps(self._storage.layout.schema, given, time=time)
        if self._stream is None:
            self._stream = self._new_stream(steps.num_envs)
        if len(self._stream) != steps.num_envs:
            raise SchemaError(
                f"got {steps.num_envs} environments, {len(self._stream)} are running; call end_stream() before others"
            )
        self._stream.extend(steps)

    def _new_stream(self, size: int) -> EpisodeStream:
        layout = self._storage.layout
        begin = partial(self._writer.open, {})
        return EpisodeStream(layout.schema, size, layout.max_timesteps, begin, skips_resets=self._skips_resets)

    # Within

    @contextmanager
    def _entered(self, scope: Any) -> Iterator[Any]:
        self._scope = scope
        try:
            with scope:
                yield scope
        finally:
            self._scope = None

    def _require_no_scope(self) -> None:
        if self._scope is not None:
            raise EpisodeStateError(
                "an episode is open already, and `store` could mean either; end it first, or use begin_episode() and "
                "episode.store() for several side by side"
            )

    def _current(self) -> Episode:
        if isinstance(self._scope, EpisodeGroup):
            raise EpisodeStateError("store: a batch of episodes is open; use store_batch")
        if self._scope is not None:
            return self._scope
        self._writer.require_writable()
        self._begun = [episode for episode in self._begun if episode.state == "open"]
        if len(self._begun) != 1:
            some = (
                f"{len(self._begun)} episodes are open; use episode.store()"
                if self._begun
                else ("no episode is open; store within `with buffer.one_episode():`, or after begin_episode()")
            )
            raise EpisodeStateError(f"{self._storage.path}: {some}")
        return self._begun[0]

    def _group(self, what: str) -> EpisodeGroup:
        if not isinstance(self._scope, EpisodeGroup):
            raise EpisodeStateError(f"{what}: no batch is open; use it within `with buffer.batched_episode(n):`")
        return self._scope
