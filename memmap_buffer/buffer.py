"""`ReplayBuffer`: the user's words for one folder, wired to the writer and the readers. No logic of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memmap_buffer.errors import (
    BufferFullError,
    BufferLockedError,
    EpisodeStateError,
    MemmapBufferError,
    ReadOnlyError,
    SchemaError,
    SchemaMismatchError,
)
from memmap_buffer.reading.readable import Readable
from memmap_buffer.reading.sources import Sources
from memmap_buffer.schema import Schema
from memmap_buffer.store import creation, edits, storage
from memmap_buffer.store.episode import Episode
from memmap_buffer.store.folder import Folder
from memmap_buffer.store.group import EpisodeGroup
from memmap_buffer.store.layout import Layout
from memmap_buffer.store.lock import WriterLock
from memmap_buffer.store.snapshot import snapshot
from memmap_buffer.store.storage import Storage
from memmap_buffer.store.writer import Durability, Writer

if TYPE_CHECKING:
    from typing_extensions import Self


class ReplayBuffer(Readable):
    """A folder of episodes, one memory-mapped array per field.

    Opening an existing folder of the same schema goes on where it stood. The writer's lock is taken by creating, by
    `overwrite=True`, or by the first write, and held until `close` or the end of the process; readers need none.

    Args:
        folder: where; it is made if it is missing.
        max_episodes: how many episodes it shows at most.
        max_timesteps: the longest episode.
        fields: per-timestep fields: name -> "float", ("float", shape), ("float", shape, default), a `Field`, any
            numpy or torch dtype, or a nested dict of these; or a `Schema`.
        meta_fields: per-episode fields, spelled alike.
        circular: publishing into a full buffer retires the oldest episode, instead of raising BufferFullError.
        overwrite: delete the buffer in the folder first, exactly the files that its schema lists.
        read_only: open an existing folder, and never write to it.
        flush_every_store_step: accepted and without effect; nothing is on disk before an episode is published.
        max_steps: show at most this many timesteps: publishing retires the oldest episodes until the rest fits.
        spare_slots: slots beyond `max_episodes`, one for every episode that is written in place at a time.
        durability, sync_every, checksum, publish, stage: how it is written, see `Durability`.
        verify: when checksums are compared on reading: "auto" (what a crash of the machine may have spoilt, when it
            is first read), "always" (all of it, on opening), "read" (at every read) or "never".
        reserve: take the whole disk space when creating, instead of as episodes are written.

    Raises:
        SchemaMismatchError: the folder holds another schema; the text lists the differences.
        SchemaError, NotABufferError, CorruptBufferError, BufferLockedError.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        max_episodes: int,
        max_timesteps: int,
        fields: Mapping[str, Any] | Schema,
        meta_fields: Mapping[str, Any] | None = None,
        circular: bool = False,
        overwrite: bool = False,
        read_only: bool = False,
        flush_every_store_step: int = 1,
        *,
        max_steps: int | None = None,
        spare_slots: int = 1,
        durability: str = "process",
        sync_every: int = 1,
        checksum: str | None = "crc32",
        publish: str = "episode",
        stage: str = "ram",
        verify: str = "auto",
        reserve: bool = False,
    ) -> None:
        schema = fields if isinstance(fields, Schema) else Schema(fields, meta_fields)
        layout = Layout(
            schema, max_episodes, max_timesteps, spare_slots=spare_slots, circular=bool(circular), max_steps=max_steps
        )
        how = Durability(durability, sync_every, checksum, publish, stage)
        storage.check_verify(verify)
        how.require_spare(folder, layout.spare_slots)
        place = Folder(Path(folder))
        lock = WriterLock(place)
        if read_only and overwrite:
            raise ReadOnlyError(f"{place.path}: overwrite=True and read_only=True exclude each other; drop one")
        if not read_only and (overwrite or not place.exists("schema.json")):
            _create(place, lock, layout, overwrite, reserve)
        opened = Storage.open(place.path, read_only=read_only, verify=verify)
        differences = opened.layout.differences(layout)
        if differences:
            text = "\n  ".join([f"{place.path} holds a buffer of another schema:", *differences])
            hint = "\nOpen it with from_folder, give the stored values, or pass overwrite=True to replace it."
            raise SchemaMismatchError(text + hint, differences=differences)
        self._setup(opened, lock, how)

    @classmethod
    def from_folder(
        cls,
        folder: str | PathLike[str],
        read_only: bool = False,
        *,
        durability: str = "process",
        sync_every: int = 1,
        checksum: str | None = "crc32",
        publish: str = "episode",
        stage: str = "ram",
        verify: str = "auto",
    ) -> Self:
        """Open an existing folder with the schema that it holds; arguments as for the constructor.

        Raises: NotABufferError, SchemaError, CorruptBufferError.
        """
        buffer = cls.__new__(cls)
        opened = Storage.open(Path(folder), read_only=read_only, verify=verify)
        lock = WriterLock(opened.folder)
        buffer._setup(opened, lock, Durability(durability, sync_every, checksum, publish, stage))
        return buffer

    def _setup(self, opened: Storage, lock: WriterLock, how: Durability) -> None:
        super().__init__(Sources([opened]))
        self._storage = opened
        self._writer = Writer(opened, lock, how)
        self._scope: Episode | EpisodeGroup | None = None
        self._begun: list[Episode] = []
        if lock.held:
            self._writer.begin()  # who creates is the writer from the start
        if not self.read_only and opened.folder.exists(".redo"):
            with suppress(BufferLockedError):  # its writer lives, and is at it
                self._writer.begin()
                opened.check_always()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (
            type(self),
            self.folder,
            self._storage.read_only,
            {**vars(self._writer.how), "verify": self._storage.verify},
        )

    def __repr__(self) -> str:
        table, layout = self._storage.refresh(), self._storage.layout
        mode = "read-only" if self.read_only else "circular" if layout.circular else "until full"
        return (
            f"<ReplayBuffer {str(self.folder)!r}: {len(table)} of {layout.max_episodes} episodes, {table.steps} steps, "
            f"{mode}, fields {', '.join(self.fieldnames)}>"
        )

    @property
    def folder(self) -> Path:
        return self._storage.path

    @property
    def read_only(self) -> bool:
        return self._storage.read_only or not self._storage.layout.writable

    @property
    def circular(self) -> bool:
        return self._storage.layout.circular

    # Writing

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
        self._require_no_scope()
        with self._entered(EpisodeGroup(self.schema, [])) as group:
            for _ in range(batch_size):
                group.add(self._writer.open({}))
            group.update(meta_batch)
            yield group

    def store(self, **step: Any) -> Any:
        """Append one timestep to the open episode; see `Episode.store`.

        Raises: EpisodeStateError: no episode is open, or several are. SchemaError.
        """
        scope = self._scope
        return (scope if type(scope) is Episode else self._current()).append(step)

    def store_batch(self, **batch: Any) -> None:
        """Append one timestep to every episode of the open batch: field -> (B, *field)."""
        self._group("store_batch").store(**batch)

    def store_meta_batch(self, **meta_batch: Any) -> None:
        """Set meta fields of the open batch: name -> (B, *field)."""
        self._group("store_meta_batch").update(meta_batch)

    def store_episode(self, **arrays: Any) -> None:
        """Publish a whole episode.

        Args: arrays: field -> (T, *field), with `final` (T + 1, *field) to give the final observation; meta fields.
        Raises: SchemaError. EpisodeStateError: longer than max_timesteps, or steps follow `terminated`.
        """
        columns, meta, finals, length = edits.whole_episode(self.schema, arrays)
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

    # Changing what is published

    def update(self, indices: Any = None, **data: Any) -> None:
        """Overwrite data of published episodes in place; each episode changes at once or not at all.

        Args:
            indices: positions: an int, list, array, slice, or None for all.
            data: field -> (E, t, *field), the first t timesteps; meta field -> (E, *field); without the first axis
                for a single int; values broadcast.

        Raises: SchemaError, IndexError, EpisodeStateError.
        """
        if not data:
            raise SchemaError("update: no data was given; pass field=values")
        self._writer.begin()
        table = self._storage.refresh()
        positions, single = edits.positions_of(indices, len(table))
        slots = table.visible[positions]
        rows, meta = edits.changes(self._storage, slots, single, data)
        self._writer.update(slots, rows, meta)

    def store_datapoint(self, episode_index: int, timestep_index: int, name: str, datapoint: Any) -> None:
        """Overwrite one timestep of one field of a published episode."""
        self._writer.begin()
        rows = edits.one_step(self._storage, episode_index, timestep_index, name, datapoint)
        self._writer.update(*rows, {})

    def store_meta_datapoint(self, episode_index: int, name: str, datapoint: Any) -> None:
        """Overwrite one meta field of a published episode."""
        self.schema.require([name], "store_meta_datapoint", self.schema.meta_fields)
        self.update(int(episode_index), **{name: datapoint})

    def clear(self) -> None:
        """Remove every episode; the files keep their size."""
        self._writer.clear()

    reset_ = clear

    def delete(self, indices: Any) -> None:
        """Remove episodes: positions: an int, list, array or slice. Their serials are never used again."""
        self._writer.begin()
        table = self._storage.refresh()
        positions, _ = edits.positions_of(indices, len(table))
        self._writer.delete(table.visible[positions].tolist())

    def snapshot(self, path: str | PathLike[str]) -> None:
        """Copy what is published now into a new buffer at `path`, from any process, beside a writer that goes on.

        Raises: SchemaMismatchError: there is a buffer already. CorruptBufferError. OSError: the disk is full.
        """
        snapshot(self._storage, Path(path))

    # Ending

    def flush(self) -> None:
        """Wait until everything published is on the disk, and the priorities."""
        self._writer.flush()
        self.checkpoint()

    def close(self) -> None:
        """Flush and let go of the lock; open episodes are dropped. Nothing is lost without it; twice is fine."""
        try:
            self._close_priorities()
        finally:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
            raise EpisodeStateError(f"{self.folder}: {some}")
        return self._begun[0]

    def _group(self, what: str) -> EpisodeGroup:
        if not isinstance(self._scope, EpisodeGroup):
            raise EpisodeStateError(f"{what}: no batch is open; use it within `with buffer.batched_episode(n):`")
        return self._scope


def _create(folder: Folder, lock: WriterLock, layout: Layout, overwrite: bool, reserve: bool) -> None:
    """Make the folder's buffer, its lock held from then on."""
    folder.create()
    lock.acquire()
    try:
        if overwrite and folder.exists("schema.json"):
            with suppress(MemmapBufferError, OSError):  # a damaged one may be replaced all the same
                Writer(
                    Storage(folder.path), lock, Durability()
                ).begin()  # raises the epoch, which stops a writer whose lock failed
            creation.remove(folder)
        if not folder.exists("schema.json"):
            creation.create(folder, layout, reserve)
    except BaseException:
        lock.release()
        raise


def _reopen(kind: type[ReplayBuffer], folder: Path, read_only: bool, how: dict[str, Any]) -> ReplayBuffer:
    return kind.from_folder(folder, read_only, **how)
