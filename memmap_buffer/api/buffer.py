"""`ReplayBuffer`: one folder of episodes, opened or created, to write, read and change.

Its methods are in a row of base classes: `Readable` (reading), on it `Recording` (writing), on it `Editing` (changing).
Here are the ways to open a folder, and the end of its use.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memmap_buffer.api.collector import Collector
from memmap_buffer.api.editing import Editing
from memmap_buffer.choices import Checksum, Durability, Publish, Shard, Stage, Verify, check_choice
from memmap_buffer.errors import MemmapBufferError, ReadOnlyError, SchemaError, SchemaMismatchError
from memmap_buffer.format import creation
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.layout import FEWEST_SPARE_SLOTS, ArrayFile, Layout, spare_slots_of
from memmap_buffer.format.lock import WriterLock
from memmap_buffer.format.shards import require_new_place, take_free, tell_readers
from memmap_buffer.format.storage import Storage
from memmap_buffer.paths import AnyPath, is_url, path_of
from memmap_buffer.schema import Schema, declared
from memmap_buffer.views.folders import Folders
from memmap_buffer.writing.writer import WriteOptions, Writer

if TYPE_CHECKING:
    from datetime import timedelta

    from typing_extensions import Self


WITHOUT_A_TIME_LIMIT = 1000  # `max_timesteps` where no limit is known: longer episodes are continued in the next one


class ReplayBuffer(Editing):
    """A folder of episodes, one memory-mapped array per field.

    An existing folder with the same schema is opened and keeps its episodes. The writer's lock is taken by creating, by
    `overwrite=True`, or by the first write, and held until `close` or the end of the process; readers need no lock.

    - Opening: the constructor, from_folder, for_env; snapshot; flush, close
    - Writing: one_episode, begin_episode, store, advance_episode: one episode; store_episode: a whole one;
      batched_episode, store_batch, store_meta_batch, begin_batch: several of one length; add, extend, end_episodes,
      publish_steps, num_added: environments that run on; create_collector; open_episodes, turn: what is open, and its
      writer's turn
    - Reading: dataloader, dataset, sample, batch; priorities, update_priorities; episode, episodes, get_all_data
    - Changing: update, write, store_datapoint, store_meta_datapoint, set_valid: values; delete, clear, reset_:
      episodes; add_field, drop_field, rename_field, recompute: columns; mark: labels and notes
    - Looking: num_episodes, num_steps, num_published, episode_lens, episode_times, serials, marks, refresh; schema,
      fieldnames, meta_fieldnames, batch_spec, show, browse, statistics; folder, files, read_only; capacity,
      max_episodes, max_timesteps, circular, spare_slots

    Args:
        folder: the path of the folder, which is made if it is missing. As in every path, `~` is the home folder.
        max_episodes: the most episodes that are visible at a time. Beside a `capacity` it may be left out: then there
            is room for the capacity in episodes of ten timesteps, and for at least a thousand episodes, unless a file
            would be larger than 8 TiB.
        max_timesteps: the most timesteps of an episode.
        fields: per-timestep fields: name -> "float", ("float", shape), ("float", shape, default), a `Field`, any
            numpy or torch dtype, or a nested dict of these; or a `Schema`.
        meta_fields: per-episode fields, given in the same forms.
        circular: True: publishing into a full buffer retires the oldest episode; False: it raises BufferFullError.
            None: True beside a `capacity`, else False.
        overwrite: delete the buffer in the folder first, exactly the files that its schema lists.
        read_only: open an existing folder, and never write to it.
        flush_every_store_step: accepted and without effect; nothing is on disk before an episode is published.
        capacity: only the newest `capacity` timesteps are visible, in the order of their publication: a ring of steps.
        spare_slots: slots beyond `max_episodes`. A ring needs one for each episode that is written in place at a
            time, such as the open ones with `publish="step"`. None: beside a `capacity` one for every hundred of its
            steps, at least 64 and at most 16,384, as they take no disk space until they are used; with `reserve` 64.
            Else 1.
        durability: "process": a published episode survives everything but a crash of the machine; "power": that, too,
            by a barrier on each file.
        sync_every: with "power": this many episodes are published behind the same barriers, and get visible together.
        checksum: "crc32" (of sums of blocks: see `format`), or None for none.
        publish: "episode": an episode is visible when it is complete; "step": each timestep at once.
        stage: "ram": an open episode is in memory; "disk": it is written to its slot in chunks as it grows, for
            episodes too long for memory.
        verify: when checksums are compared: "auto" (of episodes that a crash of the machine may have spoilt, when they
            are first read), "always" (of all, on opening), "read" (at every read) or "never".
        reserve: take the whole disk space when creating, instead of as episodes are written.
        shard: "auto": `folder` is a root of shards. This object writes to the first shard that has no writer, was
            created with these arguments and has room; else to a new one. As long as this object has the lock, no other
            object takes the shard, in this process, either. `ConcatBuffer.from_root` reads all shards.
        publish_to: with shard="auto", the URL of a root in a store. Each full shard is published there by a thread,
            under a name that no other host has; a new shard takes over the open episodes. `close` publishes the last
            one. This object shows only the shard that it records to. Errors are logged, and publishing is tried again
            at the next shard, and by the next recorder of `folder`.
        publish_every: publish a shard after this many episodes, or after this time, a `timedelta`; None: when it is
            full.
        keep_published: the number of published shards, the newest ones, that stay in `folder/published`; None: all.
        storage_options: for `publish_to`: options of fsspec.
        terminated: the field that is true where an episode ended and nothing follows; None: there is none. It and
            `truncated` end the episodes of `add`, and stop n-step returns; they are kept in the folder.
        truncated: the field that is true where an episode was ended early, by a time limit, say; None: there is none.
        skips_resets: whether the step after an episode's end is the environment's reset, which `add` and `extend` leave
            out. A new folder keeps it for later objects. None: as the folder has it, False for a new one.

    Raises:
        SchemaMismatchError: the folder, or the root at `publish_to`, holds another schema; the text lists the
            differences.
        SchemaError: an argument has a wrong value.
        NotABufferError: `read_only`, and there is no buffer in the folder; or another one was published to the folder.
        CorruptBufferError: a file is damaged.
        BufferLockedError: another process writes, and this object was to create or overwrite.
    """

    def __init__(
        self,
        folder: AnyPath,
        max_episodes: int | None = None,
        max_timesteps: int | None = None,
        fields: Mapping[str, Any] | Schema | None = None,
        meta_fields: Mapping[str, Any] | None = None,
        circular: bool | None = None,
        overwrite: bool = False,
        read_only: bool = False,
        flush_every_store_step: int = 1,
        *,
        capacity: int | None = None,
        spare_slots: int | None = None,
        durability: Durability = "process",
        sync_every: int = 1,
        checksum: Checksum = "crc32",
        publish: Publish = "episode",
        stage: Stage = "ram",
        verify: Verify = "auto",
        reserve: bool = False,
        shard: Shard | None = None,
        terminated: str | None = "terminated",
        truncated: str | None = "truncated",
        publish_to: str | None = None,
        publish_every: int | timedelta | None = None,
        keep_published: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        skips_resets: bool | None = None,
    ) -> None:
        schema = _schema_of(folder, fields, meta_fields).ending_by(terminated, truncated)
        layout = Layout.derived(
            schema,
            max_episodes,
            max_timesteps,
            spare_slots=FEWEST_SPARE_SLOTS if reserve and capacity and spare_slots is None else spare_slots,
            circular=circular,
            capacity=capacity,
            skips_resets=bool(skips_resets),
        )
        how = WriteOptions(durability, sync_every, checksum, publish, stage)
        check_choice("verify", verify, Verify)
        how.require_spare(folder, layout.spare_slots)
        if read_only and overwrite:
            raise ReadOnlyError(f"{folder}: overwrite=True and read_only=True exclude each other; drop one")
        if shard is not None:
            _require_auto(shard, overwrite or read_only)
        place = Folder(path_of(folder))
        if not read_only and (overwrite or not place.exists("schema.json")):
            layout.to_json()  # raises before anything is made or replaced
            if shard is None:
                require_new_place(place)
            else:
                place.require_not_published()
        if publish_to is not None:
            _require_publishable(layout, how, shard)
            from memmap_buffer.maintenance.publisher import Publisher

            publisher = Publisher(path_of(folder), publish_to, publish_every, keep_published, storage_options, layout)
            self._setup(publisher.new_shard(layout, how, verify, reserve), skips_resets)
            self._publisher = publisher
            publisher.begin()
            self._begin_timer()
            return
        if publish_every is not None or keep_published is not None or storage_options is not None:
            raise SchemaError("publish_every, keep_published and storage_options belong to publish_to; give that, too")
        if shard is None:
            lock = WriterLock(place)
        else:
            place, lock = take_free(folder, layout)
        if not read_only and (overwrite or not place.exists("schema.json")):
            _create(place, lock, layout, overwrite, reserve)
        opened = Storage.open(place, read_only=read_only, verify=verify)
        sizes = {"max_episodes": max_episodes, "spare_slots": spare_slots}
        differences = opened.layout.differences(layout, [name for name, size in sizes.items() if size is None])
        if differences:
            text = "\n  ".join([f"{place.path} holds a buffer of a different configuration:", *differences])
            hint = "\nOpen it with from_folder, give the stored values, or pass overwrite=True to replace it."
            raise SchemaMismatchError(text + hint, differences=differences)
        self._setup(Writer(opened, lock, how), skips_resets)

    @classmethod
    def from_folder(
        cls,
        folder: AnyPath,
        read_only: bool = False,
        *,
        durability: Durability = "process",
        sync_every: int = 1,
        checksum: Checksum = "crc32",
        publish: Publish = "episode",
        stage: Stage = "ram",
        verify: Verify = "auto",
        storage_options: Mapping[str, Any] | None = None,
        cache: AnyPath | None = None,
        cache_bytes: int | None = None,
    ) -> Self:
        """Open an existing folder with the schema that it holds.

        Args:
            folder: the path of the folder; or the URL of a published one, of which only the parts that are read are
                fetched, and kept.
            read_only: never write to it.
            durability: as for the constructor.
            sync_every: as for the constructor.
            checksum: as for the constructor.
            publish: as for the constructor.
            stage: as for the constructor.
            verify: as for the constructor.
            storage_options: for a URL, as for `ConcatBuffer.from_root`.
            cache: for a URL, as for `ConcatBuffer.from_root`.
            cache_bytes: for a URL, as for `ConcatBuffer.from_root`.

        Raises:
            NotABufferError: there is no buffer in the folder.
            SchemaError: an argument has a wrong value, or the schema has an unknown version.
            CorruptBufferError: a file is damaged.
        """
        buffer = cls.__new__(cls)
        if is_url(folder):
            from memmap_buffer.remote.shards import cache_of, open_url

            mirror = open_url(str(folder), storage_options, cache_of(cache, cache_bytes))
            opened: Storage = mirror.storage(verify)
        else:
            opened = Storage.open(folder, read_only=read_only, verify=verify)
        lock = WriterLock(opened.folder)
        buffer._setup(Writer(opened, lock, WriteOptions(durability, sync_every, checksum, publish, stage)))
        return buffer

    @classmethod
    def for_env(
        cls,
        env: Any,
        folder: AnyPath,
        *,
        max_episodes: int | None = None,
        max_timesteps: int | None = None,
        capacity: int | None = None,
        spare_slots: int | None = None,
        publish: Publish | None = None,
        fields: Mapping[str, Any] | None = None,
        codec: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> Self:
        """A buffer with the fields of a Gymnasium environment's timesteps; for a vector, those of a single environment.

        `observation` (with `final`), `action`, `reward`, `terminated`, `truncated`; see `environments.schema_of`.

        Args:
            env: a Gymnasium environment or vector environment. If the step after an episode's end is its reset
                (`AutoresetMode.NEXT_STEP`, the default of vectors, or the wrapper `Autoreset`), `add`, `extend` and
                collectors of this object leave that step out; call `end_episodes` before a reset of your own. A new
                folder keeps this fact for objects that open it without an environment; here that of `env` counts.
            folder: as for the constructor.
            max_episodes: as for the constructor.
            max_timesteps: default: the time limit of the environment, or the longest one of a vector. Without a limit,
                beside a `capacity`, 1,000: longer episodes are stored in parts.
            capacity: as for the constructor.
            spare_slots: default: as for the constructor, but at least one for each environment in a ring whose episodes
                are written in place.
            publish: default: "step" beside a `capacity`, otherwise "episode".
            fields: more fields, such as log_prob, or replacements of these.
            codec: the codec of observations that are images (uint8, two axes or more), as for `Field`: "zstd", say.
            dtype: the dtype of floating-point observations and actions: "float32" stores the float64 of MuJoCo in half
                the space. Default: that of the spaces.
            options: any other argument of the constructor.

        Raises:
            ImportError: Gymnasium is not installed.
            SchemaError: a space has no fixed size, there is no time limit, or `dtype` is of no floating-point numbers.
        """
        from memmap_buffer import environments

        own = environments.schema_of(*environments.spaces_of(env), codec, dtype)
        all_fields = {**own, **declared("fields", fields or {})}
        limit = max_timesteps or environments.max_steps_of(env) or (None if capacity is None else WITHOUT_A_TIME_LIMIT)
        if limit is None:
            raise SchemaError("max_timesteps: got None, and the environment has no time limit; pass max_timesteps=…")
        publish = publish or ("episode" if capacity is None else "step")
        in_place, circular = publish == "step" or options.get("stage") == "disk", options.get("circular")
        if spare_slots is None and in_place and (capacity is not None if circular is None else circular):
            usual = 1 if capacity is None else spare_slots_of(Schema(all_fields), limit, capacity)
            count = environments.count_of(env)
            spare_slots = count if count > usual else None
        options.update(capacity=capacity, spare_slots=spare_slots, publish=publish)
        options.setdefault("skips_resets", environments.resets_by_a_step(env))
        buffer = cls(folder, max_episodes, limit, all_fields, **options)
        buffer._resets_at_once = environments.resets_at_once(env)
        return buffer

    def _setup(self, writer: Writer, skips_resets: bool | None = None) -> None:
        """Begin with the folder of this writer; the common end of all constructors."""
        super().__init__(Folders([writer.storage]))
        self._forbids_marks = writer.storage.read_only
        self._skips_resets = writer.storage.layout.skips_resets if skips_resets is None else skips_resets
        self._begin(writer)

    def _begin_timer(self) -> None:
        """Start the timer of `publish_every`, which calls `_on_time`."""
        assert self._publisher is not None
        self._publisher.begin_timer(partial(_on_time, weakref.ref(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        how = {**asdict(self._writer.how), "verify": self._storage.verify}
        return partial(type(self).from_folder, self.folder, self._storage.read_only, **how), ()

    def __repr__(self) -> str:
        table, layout = self._storage.refresh(), self._storage.layout
        mode = "read-only" if self.read_only else "circular" if layout.circular else "until full"
        steps = table.steps if layout.capacity is None else f"{table.steps} of {layout.capacity}"
        return (
            f"<ReplayBuffer {str(self.folder)!r}: {len(table)} of {layout.max_episodes} episodes, {steps} steps, "
            f"max_timesteps {layout.max_timesteps}, spare_slots {layout.spare_slots}, {mode}, "
            f"fields {', '.join(self.fieldnames)}>"
        )

    @property
    def folder(self) -> Path:
        """The absolute path of the folder."""
        return self._storage.path

    @property
    def files(self) -> dict[str, ArrayFile]:
        """Dotted name of a field -> its `.npy` file; of a compressed one the index, and the blobs as `<name>/blobs`."""
        return {name: file for name, file in self._storage.layout.arrays.items() if not name.startswith("/")}

    @property
    def read_only(self) -> bool:
        """Whether the buffer may only be read: it was opened with `read_only`, or is packed."""
        return self._storage.read_only or not self._storage.layout.writable

    @property
    def circular(self) -> bool:
        """Whether publishing into a full buffer retires the oldest episode."""
        return self._storage.layout.circular

    @property
    def capacity(self) -> int | None:
        """The number of newest timesteps that are visible; None: all."""
        return self._storage.layout.capacity

    @property
    def spare_slots(self) -> int:
        """The slots beyond `max_episodes`: the most episodes that may be written in place at a time."""
        return self._storage.layout.spare_slots

    def create_collector(
        self,
        num_groups: int,
        fieldnames: Sequence[str] | None = None,
        meta_fieldnames: Sequence[str] | None = None,
        strict: bool = True,
    ) -> Collector:
        """A `Collector`: rollouts of several groups in memory, to learn from and then to store in this buffer.

        Args:
            num_groups: the number of groups.
            fieldnames: the fields that are collected; default: all.
            meta_fieldnames: the meta fields that are collected; default: all.
            strict: True: an unknown name raises; False: it is collected, and not stored.
        """
        return Collector(self, num_groups, fieldnames, meta_fieldnames, strict)

    # Ending

    def snapshot(self, path: AnyPath) -> None:
        """Copy the published episodes into a new buffer, from any process; a writer may go on meanwhile.

        Args:
            path: the path of the new folder.

        Raises:
            SchemaMismatchError: there is a buffer already, or this buffer was overwritten since it was opened.
            SchemaError: this buffer is at a URL; `pull` copies it.
            CorruptBufferError: an episode fails its checksums.
            OSError: the disk is full, say.
        """
        from memmap_buffer.maintenance.snapshot import snapshot

        snapshot(self._storage, path_of(path))

    def flush(self) -> None:
        """Wait until all published episodes, and the priorities, are on the disk.

        Raises:
            OSError: the disk reports an error; the published episodes stay visible.
        """
        with self.turn:
            self._writer.flush()
            self._settle_errors()
            if self._publisher is not None:
                self._publisher.flush()
        super().flush()

    def close(self) -> None:
        """Flush, and release the lock; closing twice is fine. Open episodes are dropped; those of `add` are published.

        Raises:
            RemoteError: with `publish_to`, shards could not be published; the text names them. They stay on this
                machine, and another call of `close` tries again.
            BufferLockedError: the same, because another process has held such a shard for a minute.
        """
        with self.turn:
            try:
                if self._writer.holds:
                    self.end_episodes()
                    if any(self._errors.values()):  # TD errors of episodes that `sync_every` holds back
                        self._writer.flush()
                        self._settle_errors()
                self._close_priorities()
            finally:
                self._writer.close()
        if self._publisher is not None:
            self._publisher.close()

    def _close_priorities(self) -> None:
        """Close all open priorities. In `close` itself a signal could end this loop without the end of the block."""
        while self._priorities:
            self._priorities.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _on_time(reference: weakref.ref[ReplayBuffer]) -> None:
    """The call of the timer. It has a weak reference, so that it does not keep the buffer alive."""
    buffer = reference()
    if buffer is not None and buffer._publisher is not None:
        with buffer.turn:
            if buffer._writer.holds:
                buffer._finish_shard_if_due()
                buffer._publisher.begin()  # publishes shards that failed before, too
                buffer._begin_timer()


def _schema_of(
    folder: AnyPath, fields: Mapping[str, Any] | Schema | None, meta_fields: Mapping[str, Any] | None
) -> Schema:
    """The schema that is given. Raises SchemaError: there is none, or it cannot be stored."""
    if fields is None:
        raise SchemaError(
            "fields: got None, expected a dict by name, such as {'reward': 'float'}; to open a folder as it is, "
            f"call ReplayBuffer.from_folder({str(folder)!r})"
        )
    return fields if isinstance(fields, Schema) else Schema(fields, meta_fields)


def _require_publishable(layout: Layout, how: WriteOptions, shard: str | None) -> None:
    """Raise SchemaError: these options cannot be combined with `publish_to`."""
    if shard is None:
        raise SchemaError("publish_to publishes the shards of a root; give shard='auto', too")
    if layout.circular:
        raise SchemaError(
            "publish_to: got circular=True or a capacity, by which episodes could leave before they are published; "
            "leave them out: a shard that is full is followed by another"
        )
    if how.in_place:
        raise SchemaError(
            "publish_to: got publish='step' or stage='disk', expected 'episode' and 'ram': episodes that are open when "
            "a shard is published go on in the next one"
        )


def _require_auto(shard: str, excluded: bool) -> None:
    """Raise SchemaError: `shard` is not "auto", or an option is given that excludes it."""
    if shard != "auto":
        raise SchemaError(f"shard: got {shard!r}, expected 'auto' or None; open one of your own by its path")
    if excluded:
        raise SchemaError("shard='auto' adds to the shards that are there; leave out overwrite and read_only")


def _create(folder: Folder, lock: WriterLock, layout: Layout, overwrite: bool, reserve: bool) -> None:
    """Create the buffer in a folder, and keep the lock."""
    folder.create()
    lock.acquire()
    try:
        if overwrite and folder.exists("schema.json"):
            with suppress(MemmapBufferError, OSError):  # a damaged buffer can be replaced, too
                # `begin` raises the term, which stops another writer whose lock did not hold
                Writer(Storage(folder), lock, WriteOptions()).begin()
            creation.remove(folder)
        if not folder.exists("schema.json"):
            creation.create(folder, layout, reserve)
            tell_readers(folder)
    except BaseException:
        lock.release()
        raise
