"""The writer of one folder: it hands out open episodes, publishes, updates, deletes and clears.

It takes the lock at the first write. What an episode's steps are is `episode`'s; which slot is free is `ring`'s; in
which order bytes are written is `publication`'s and `redo`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from memmap_buffer.errors import EpisodeStateError, MemmapBufferError, ReadOnlyError, SchemaError, StaleEpisodeError
from memmap_buffer.store import redo
from memmap_buffer.store.creation import discard_unfinished
from memmap_buffer.store.episode import Episode
from memmap_buffer.store.lock import WriterLock
from memmap_buffer.store.publication import Files, Publication, commit
from memmap_buffer.store.records import CUT, DELETED, FINAL, INNER_END, OPEN, TERMINATED
from memmap_buffer.store.recovery import count, take_over
from memmap_buffer.store.ring import Ring
from memmap_buffer.store.staging import Staging
from memmap_buffer.store.storage import Storage
from memmap_buffer.store.table import IntArray
from memmap_buffer.values import Array


@dataclass(frozen=True)
class Durability:
    """How a buffer is written.

    Args:
        durability: "process": a published episode survives everything but a crash of the machine; "power": that too,
            by a barrier on each file.
        sync_every: with "power": publish so many episodes behind the same barriers; they become visible together.
        checksum: "crc32", or None for none.
        publish: "episode": an episode is visible when it is complete; "step": each step at once.
        stage: "ram": an open episode is in memory; "disk": it is written to its slot in chunks as it grows, for
            episodes too long for memory.

    Raises: SchemaError: a value that is not one of these, or two that exclude each other.
    """

    durability: str = "process"
    sync_every: int = 1
    checksum: str | None = "crc32"
    publish: str = "episode"
    stage: str = "ram"

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[Any, ...]] = {
            "durability": ("process", "power"),
            "checksum": ("crc32", None),
            "publish": ("episode", "step"),
            "stage": ("ram", "disk"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                expected = ", ".join(map(repr, values))
                raise SchemaError(f"{name}: got {getattr(self, name)!r}, expected one of {expected}")
        if isinstance(self.sync_every, bool) or not isinstance(self.sync_every, int) or self.sync_every < 1:
            raise SchemaError(f"sync_every: got {self.sync_every!r}, expected a whole number from 1")
        if self.sync_every > 1 and (self.durability != "power" or self.publish == "step"):
            raise SchemaError("sync_every > 1 shares barriers, so it needs durability='power' and publish='episode'")

    @property
    def in_place(self) -> bool:
        """Whether an episode takes its slot while it is open."""
        return self.publish == "step" or self.stage == "disk"

    def require_spare(self, path: object, spare_slots: int) -> None:
        """Raise EpisodeStateError where `sync_every` is more than the spare slots."""
        if self.sync_every > max(1, spare_slots):
            what = f"sync_every={self.sync_every} writes as many episodes side by side, which"
            _refuse_spare(path, what, spare_slots, self.sync_every)


def _refuse_spare(path: object, what: str, spare_slots: int, needed: int) -> NoReturn:
    raise EpisodeStateError(
        f"{path}: {what} need a spare slot each, and there are {spare_slots}; create the buffer with "
        f"spare_slots={needed}"
    )


class Writer:
    """Writes to one folder.

    Args:
        storage: the folder. lock: the lock, held already by whoever created the folder, or not. how: see there.

    Raises: SchemaError: `sync_every` is more than the spare slots.
    """

    def __init__(self, storage: Storage, lock: WriterLock, how: Durability) -> None:
        self.storage = storage
        self.schema = storage.layout.schema
        self.max_timesteps = storage.layout.max_timesteps
        how.require_spare(storage.path, storage.layout.spare_slots)
        self.how = how
        self._lock = lock
        self._files: Files | None = None
        self._ring: Ring
        self._publications: dict[Episode, Publication] = {}
        self._last_cut: WeakKeyDictionary[Episode, Publication] = WeakKeyDictionary()
        self._pending: list[tuple[Publication, int, int]] = []
        self._staging = Staging()
        self._unfinished = False
        self._closed = False

    def begin(self) -> Files:
        """The open files; takes the lock at the first call.

        Raises: ReadOnlyError, BufferLockedError, WriterLostError. EpisodeStateError: it was closed.
        """
        if self._files is not None:
            self._lock.check(self.storage)
            self._files.catch_up()
            if self._unfinished:
                redo.finish(self._files)
                self._unfinished = False
            return self._files
        self.require_writable()
        self._lock.require_place(self.storage)
        self.storage.require_schema(to_write=True)
        if not self._lock.held:
            self._lock.acquire()
        self._tidy()
        files = Files(
            self.storage, self._lock, power=self.how.durability == "power", checksum=self.how.checksum is not None
        )
        self._ring = take_over(files)
        self._files = files
        return files

    def _tidy(self) -> None:
        """Under the lock: no other schema than this one stands, and nothing of a change that was not finished."""
        try:
            self._lock.require_place(self.storage)
            self.storage.require_schema(to_write=True)
            with suppress(MemmapBufferError):  # it is not ours
                discard_unfinished(self.storage.folder)
        except BaseException:
            self._lock.release()
            raise

    def begin_alone(self, what: str) -> Files:
        """The open files, where no episode is open and nothing waits; what was retired stays retired.

        Raises: as `begin`. EpisodeStateError: an episode is open.
        """
        files = self.begin()
        if self._lock.open_episodes:
            raise EpisodeStateError(f"{what}: {len(self._lock.open_episodes)} episodes are open; end them first")
        self._commit_pending(files)
        self._retire(files)
        return files

    def detach(self) -> WriterLock:
        """Let go of the files, for another writer of the same folder that goes on under the same lock."""
        if self._files is not None:
            self._files.close()
        self._files, self._closed = None, True
        return self._lock

    @property
    def begun(self) -> bool:
        """Whether this object was the folder's writer before, and is not closed."""
        return self._files is not None

    @property
    def holds(self) -> bool:
        """Whether this object is the folder's writer now."""
        return self._files is not None and self._lock.mine

    def require_writable(self) -> None:
        """Raise EpisodeStateError or ReadOnlyError where nothing can be written whoever holds the lock."""
        if self._closed:
            raise EpisodeStateError(f"{self.storage.path}: the buffer was closed; reopen it with from_folder")
        if self.storage.read_only or not self.storage.layout.writable:
            why = "was opened with read_only=True; open one to write to"
            if not self.storage.layout.writable:
                why = "is packed, which is a layout to read; `unpack` it into another folder to write to that"
            raise ReadOnlyError(f"{self.storage.path} {why}")

    # Episodes

    def open(self, meta: Mapping[str, Any], *, keep_partial: bool = False) -> Episode:
        """A new open episode. Raises BufferFullError or EpisodeStateError when it could not be published."""
        self.begin()
        started = [self._publications.get(episode) for episode in self._lock.open_episodes]
        waiting = sum(p is None or not p.published for p in started) + len(self._pending)
        self._ring.require_room(self.storage.path, waiting + 1, 1)
        in_place = len(self._lock.open_episodes) + 1
        if self.how.in_place and in_place > self.storage.layout.spare_slots:
            self._refuse_spare(f"{in_place} open episodes that are written in place", in_place)
        episode = Episode(
            self,
            meta,
            keep_partial=keep_partial,
            on_step=self._append if self.how.publish == "step" else None,
            spill=self._spill if self.how.in_place else None,
            staging=self._staging,
        )
        self._lock.open_episodes.add(episode)
        return episode

    def publish(self, episode: Episode, *, cut: bool) -> None:
        """Make a staged episode visible; on an error it stays as it was and may be published again."""
        flags = FINAL * bool(episode.finals) | CUT * cut | INNER_END * episode.has_inner_end
        flags |= TERMINATED * self._terminated(episode)
        try:
            publication = self._write(episode)
            if publication.published and self._meta_changed(publication, episode):
                files = self.begin()
                self._rewrite(redo.close(files, publication, flags, episode.finals, episode.meta))
            else:
                publication.write_final(episode.finals)
                self._commit(publication, episode, flags, at_once=publication.published)
            episode.state = "published"
            if cut and not episode.finals:
                self._last_cut[episode] = publication
            self._lock.open_episodes.discard(episode)
            if publication.published:
                self._publications.pop(episode, None)
        except BaseException:
            self._settle()
            raise

    def _terminated(self, episode: Episode) -> bool:
        return bool(episode.ended) and episode.ended == self.schema.terminated

    def _settle(self) -> None:
        """After an error or an interruption at any line, count anew: what is on the disk is what happened."""
        if self._files is None or not self._lock.mine:
            return
        self._ring = count(self._files)
        self._unfinished = self.storage.folder.exists(redo.NAME)
        kept: dict[Episode, Publication] = {}
        for episode, publication in self._publications.items():
            publication.settle()
            waiting = episode.state == "published" and not publication.published
            if waiting or (episode.state == "open" and (publication.published or self.how.in_place)):
                kept[episode] = publication
        self._publications = kept
        closed = [publication for episode, publication in kept.items() if episode.state == "published"]
        self._pending = [entry for entry in self._pending if entry[0] in closed]
        self._lock.open_episodes = {episode for episode in self._lock.open_episodes if episode.state == "open"}

    def _meta_changed(self, publication: Publication, episode: Episode) -> bool:
        return any(publication.meta[name].tobytes() != value.tobytes() for name, value in episode.meta.items())

    def _rewrite(self, rewrite: redo.Rewrite) -> None:
        """Carry a rewrite out; should it fail half way, it is finished before anything else is done."""
        files = self.begin()
        if self.storage.state("base") < self._ring.oldest:  # what was retired is not seen in its place meanwhile
            self._retire(files)
        try:
            redo.carry_out(files, rewrite)
        except BaseException:
            self._unfinished = True
            raise

    def complete(self, episode: Episode, finals: Mapping[str, Array]) -> None:
        """Add the final observation to an episode that was published as cut short, if it is still there: atomic."""
        files, publication = self.begin(), self._last_cut.get(episode)
        self._commit_pending(files)
        if publication is not None and publication.published:
            slot, serial = np.array([[publication.slot], [publication.serial]])
            if self.storage.refresh().shows(slot, serial)[0]:
                self._rewrite(redo.plan(files, publication.slot, {}, {}, finals))

    def withdraw(self, episode: Episode) -> None:
        """Forget an aborted episode; steps of it that were published are deleted."""
        publication = self._publications.get(episode)
        if publication is not None and publication.published:
            self.delete([publication.slot])
        self._publications.pop(episode, None)
        self._lock.open_episodes.discard(episode)

    def _append(self, episode: Episode) -> None:
        """Publish the step that was just stored. On an error it is as if it had never been, unless it is visible."""
        publication = None
        try:
            publication = self._write(episode)
            flags = OPEN | TERMINATED * self._terminated(episode)
            self._commit(publication, episode, flags, at_once=True)
        except BaseException:
            self._settle()
            if publication is not None:
                publication.rewind()
            if publication is None or publication.length < episode.length:
                episode.drop_last()
            raise

    def _spill(self, episode: Episode) -> None:
        self._write(episode)

    def _write(self, episode: Episode) -> Publication:
        """Write the steps that are staged to the episode's slot."""
        files = self.begin()
        publication = self._publications.get(episode)
        if publication is None:
            slot = self._ring.take({other.slot for other in self._publications.values()})
            if slot is None:
                busy = len(self._publications)
                self._refuse_spare(f"{busy} episodes that are being written in place, and one to publish", busy + 1)
            publication = self._publications[episode] = Publication(files, slot)
        publication.write(episode.columns, episode.base, episode.length)
        return publication

    def _commit(self, publication: Publication, episode: Episode, flags: int, *, at_once: bool) -> None:
        first = not publication.published
        added = publication.length - publication.visible
        self._ring.require_room(self.storage.path, len(self._pending) + first, added)
        if first:
            publication.write_meta(episode.meta)
        serial = self._ring.next + len(self._pending) if first else publication.serial
        self._pending.append((publication, serial, flags))
        if at_once or len(self._pending) >= self.how.sync_every:
            self._commit_pending(publication.files)

    def _commit_pending(self, files: Files) -> None:
        if not self._pending:
            return
        entries = self._pending
        try:
            commit(files, entries)
        finally:
            self._pending = [entry for entry in entries if not entry[0].published]
            for publication, serial, _ in entries:
                if publication.published:
                    self._ring.show(serial, publication.slot, publication.length)
        for episode in [e for e, p in self._publications.items() if p.published and e.state == "published"]:
            self._publications.pop(episode, None)

    def _refuse_spare(self, what: str, needed: int) -> NoReturn:
        _refuse_spare(self.storage.path, what, self.storage.layout.spare_slots, needed)

    # Changing what is published

    def update(self, slots: IntArray, rows: Mapping[str, Sequence[Array]], meta: Mapping[str, Sequence[Array]]) -> None:
        """Replace the first timesteps of fields, and meta fields, of visible slots; atomic for each episode.

        Args:
            slots: (n,). rows: name -> n arrays (t, *field), t at most the length. meta: name -> n values.
        """
        files = self.begin()
        self._refuse_open_steps("update")
        if not self.storage.trust(slots):
            raise StaleEpisodeError(f"{self.storage.path}: an episode to be updated fails its checksums; see `verify`")
        for i, slot in enumerate(slots.tolist()):
            new_rows = {name: arrays[i] for name, arrays in rows.items()}
            self._rewrite(redo.plan(files, slot, new_rows, {name: values[i] for name, values in meta.items()}))

    def delete(self, slots: Sequence[int]) -> None:
        """Make visible slots invisible for good, in one pass. What was retired before stays retired."""
        files = self.begin()
        self._retire(files)
        table = self.storage.refresh()
        files.behind = True  # whatever ends this, readers are told: now, or by the next call
        try:
            for slot in slots:
                files.amend(slot, flags=int(table.flags[slot]) | DELETED)
                self._ring.hide(int(table.serial[slot]))
            files.barriers("/episodes")
        finally:
            files.catch_up()

    def _retire(self, files: Files) -> None:
        """What is not visible any more never comes back, whatever leaves."""
        files.write_state("base", self._ring.oldest)
        files.barriers("/state")

    def clear(self) -> None:
        """Make every episode invisible, in one write. Episodes that are open and staged are not touched."""
        files = self.begin()
        self._refuse_open_steps("clear")
        self._commit_pending(files)
        files.write_state("base", self._ring.next)
        files.barriers("/state")
        files.changed()
        self._ring.clear()

    def _refuse_open_steps(self, what: str) -> None:
        if any(publication.published for publication in self._publications.values()):
            raise EpisodeStateError(f"{what}: an episode whose steps are published is still open; end it first")

    # Ending

    def flush(self) -> None:
        """Wait until everything published is on the disk. Raises OSError, and then nothing more may be written."""
        if self._files is not None:
            files = self.begin()
            self._commit_pending(files)
            files.sync()

    def close(self) -> None:
        """Flush, mark the folder clean, and let go of the lock. Open episodes are dropped. Twice is fine."""
        files = self._files
        try:
            if files is not None and self.holds:
                self._finish(files)
        finally:
            self._closed, self._files = True, None
            if files is not None:
                files.close()
            self._lock.release()

    def _finish(self, files: Files) -> None:
        self.begin()
        for episode in list(self._lock.open_episodes):
            if self.how.publish == "step":
                episode.publish(cut=True)
            else:
                episode.abort()
        self._commit_pending(files)
        files.sync()
        files.write_state("clean", 1)
        files.sync("/state")
