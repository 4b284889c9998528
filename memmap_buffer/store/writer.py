"""The writer of one folder: it hands out open episodes, chooses their slots, and publishes, updates and clears.

It takes the lock at the first write. What an episode's steps are is `episode`'s; in which order bytes are written is
`publication`'s and `redo`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memmap_buffer.errors import BufferFullError, EpisodeStateError, ReadOnlyError, SchemaError
from memmap_buffer.store import redo
from memmap_buffer.store.episode import Episode
from memmap_buffer.store.files import this_process
from memmap_buffer.store.lock import WriterLock
from memmap_buffer.store.publication import Files, Publication
from memmap_buffer.store.records import CUT, DELETED, FINAL, OPEN, STATE_WORD, TERMINATED
from memmap_buffer.store.storage import IntArray, Storage
from memmap_buffer.values import Array

DURABILITIES = ("process", "power")
CHECKSUMS = ("crc32", None)
PUBLISH = ("episode", "step")


class Writer:
    """Writes to one folder.

    Args:
        storage: the folder. lock: the lock, held already by whoever created the folder, or not.
        durability: "process" survives everything but a crash of the machine; "power" that too, by barriers.
        checksum: "crc32", or None for none.
        publish: "episode": an episode is visible when it is complete; "step": each step at once.
    """

    def __init__(
        self,
        storage: Storage,
        lock: WriterLock,
        *,
        durability: str = "process",
        checksum: str | None = "crc32",
        publish: str = "episode",
    ) -> None:
        _one_of("durability", durability, DURABILITIES)
        _one_of("checksum", checksum, CHECKSUMS)
        _one_of("publish", publish, PUBLISH)
        self.storage = storage
        self.schema = storage.layout.schema
        self.max_timesteps = storage.layout.max_timesteps
        self._lock = lock
        self._power = durability == "power"
        self._checksum = checksum is not None
        self._by_step = publish == "step"
        self._files: Files | None = None
        self._publications: dict[Episode, Publication] = {}
        self._live: deque[list[int]] = deque()  # [serial, slot, length] of what is visible, oldest first
        self._steps = 0
        self._free: deque[int] = deque()
        self._next = 0
        self._closed = False

    # Taking the folder

    def begin(self) -> Files:
        """The open files; takes the lock at the first call.

        Raises: ReadOnlyError, BufferLockedError, WriterLostError.
        """
        if self._files is not None:
            self._lock.check(self.storage)
            return self._files
        if self._closed:
            raise EpisodeStateError(f"{self.storage.path}: the buffer was closed; reopen it with from_folder")
        if self.storage.read_only or not self.storage.layout.writable:
            why = "was opened with read_only=True" if self.storage.read_only else "is packed, which is a layout to read"
            raise ReadOnlyError(f"{self.storage.path} {why}; open or make one to write to")
        if not self._lock.held:
            self._lock.acquire()
        files = Files(self.storage, self._lock, power=self._power, checksum=self._checksum)
        self._take_over(files)
        self._files = files
        return files

    def _take_over(self, files: Files) -> None:
        """Raise the epoch, then put right what a dead writer left."""
        state = self.storage.state
        pid, now, host, boot = this_process()
        self._lock.epoch = state("epoch") + 1
        words = {"epoch": self._lock.epoch, "pid": pid, "time": now} | self._doubts(boot)
        for name, value in words.items():
            files.write_state(name, value)
        for i in range(2):
            files.write_state("boot", int.from_bytes(boot[8 * i : 8 * i + 8], "little"), word=i)
        for i in range(8):
            files.write_state("host", int.from_bytes(host.ljust(64, b"\0")[8 * i : 8 * i + 8], "little"), word=i)
        files.sync("/state")
        redo.finish(files)
        table = self.storage.refresh()
        serials = table.serial[table.valid]
        self._next = max(state("next"), int(serials.max()) + 1 if serials.size else 0)
        self._close_abandoned(files)
        self._live = deque([int(table.serial[s]), int(s), int(table.length[s])] for s in table.visible)
        self._steps = table.steps
        empty = np.setdiff1d(np.arange(self.storage.layout.slots), table.visible)
        # Slots in the order of their serials, those never written first: a fresh buffer fills from slot 0.
        order = np.lexsort((empty, np.where(table.valid[empty], table.serial[empty], -1)))
        self._free = deque(int(s) for s in empty[order])

    def _doubts(self, boot: bytes) -> dict[str, int]:
        """What this writer may leave trusted of what earlier ones wrote ("Creating, opening, trusting")."""
        state = self.storage.state
        stored = self.storage.maps.state[STATE_WORD["boot"] : STATE_WORD["boot"] + 2].tobytes()
        words = {"clean": 0}
        following = max(state("next"), int(self.storage.table.serial.max(initial=-1)) + 1)
        if not state("clean") and state("epoch") and (stored != boot or not any(boot)):
            words["suspect"] = following
        if not self._power:
            words["synced"] = 0
        elif state("clean") and not state("suspect"):
            words["synced"] = following
        return words

    def _close_abandoned(self, files: Files) -> None:
        """Episodes that a dead writer left open are complete as far as they go: flag them as cut short."""
        table = self.storage.table
        for slot in table.visible[table.flags[table.visible] & OPEN != 0]:
            flags = int(table.flags[slot])
            crcs = dict(self.storage.column_crcs(int(slot), int(table.length[slot]), bool(flags & FINAL)))
            files.write_checksums(int(slot), crcs)
            files.barriers("/checksums")
            files.amend(int(slot), flags=flags & ~OPEN | CUT, digest=0)
            files.barriers("/episodes")
            files.changed()

    # Episodes

    def open(self, meta: Mapping[str, Any], *, keep_partial: bool = False) -> Episode:
        """A new open episode. Raises BufferFullError when it could not be published."""
        layout = self.begin().layout
        waiting = [e for e in self._lock.open_episodes if e not in self._publications]
        if not layout.circular and len(self._live) + len(waiting) >= layout.max_episodes:
            self._refuse_full(f"{len(self._live)} episodes are published, {len(waiting)} more are open")
        episode = Episode(self, meta, keep_partial=keep_partial, on_step=self._append if self._by_step else None)
        self._lock.open_episodes.add(episode)
        return episode

    def publish(self, episode: Episode, *, cut: bool) -> None:
        """Make a staged episode visible; on an error it stays as it was and may be published again."""
        publication = self._publication(episode)
        try:
            flags = FINAL * bool(episode.finals) | CUT * cut
            publication.write(episode.columns, episode.length)
            publication.write_final(episode.finals)
            self._commit(publication, episode, flags)
            if any(not np.array_equal(publication.meta[name], value) for name, value in episode.meta.items()):
                redo.carry_out(self.begin(), redo.plan(self.begin(), publication.slot, {}, episode.meta))
        except BaseException:
            if not publication.published:
                self._release(episode)
            raise
        self._release(episode)
        self._lock.open_episodes.discard(episode)

    def withdraw(self, episode: Episode) -> None:
        """Forget an aborted episode; steps of it that were published are deleted."""
        self._lock.open_episodes.discard(episode)
        publication = self._publications.get(episode)
        if publication is not None:
            if publication.published:
                self.delete([publication.slot])
            self._release(episode)

    def _append(self, episode: Episode) -> None:
        """Publish the step that was just stored (and any before it that could not be)."""
        publication = self._publication(episode)
        publication.write(episode.columns, episode.length)
        self._commit(publication, episode, OPEN)

    def _publication(self, episode: Episode) -> Publication:
        files = self.begin()
        found = self._publications.get(episode)
        if found is not None:
            return found
        if not self._free:
            open_now = len(self._publications)
            raise EpisodeStateError(
                f"{self.storage.path}: {open_now} episodes are being written in place, which takes a spare slot each, "
                f"and one to publish; create the buffer with spare_slots={open_now + 1}"
            )
        made = self._publications[episode] = Publication(files, self._free.popleft())
        return made

    def _commit(self, publication: Publication, episode: Episode, flags: int) -> None:
        layout, first = self.storage.layout, not publication.published
        added = publication.length - (0 if first else self._live_length(publication))
        if not layout.circular:
            self._check_room(first, added)
        if first:
            publication.write_meta(episode.meta)
        terminated = TERMINATED * (episode.ended == "terminated")
        publication.commit(self._next if first else publication.serial, flags | terminated)
        if first:
            self._next += 1
            self._live.append([publication.serial, publication.slot, publication.length])
        self._steps += added
        self._set_live_length(publication)
        self._retire()

    def _live_length(self, publication: Publication) -> int:
        return next(
            (length for serial, _, length in reversed(self._live) if serial == publication.serial), publication.length
        )

    def _set_live_length(self, publication: Publication) -> None:
        for entry in reversed(self._live):
            if entry[0] == publication.serial:
                entry[2] = publication.length
                return

    def _check_room(self, first: bool, added: int) -> None:
        layout = self.storage.layout
        if first and len(self._live) >= layout.max_episodes:
            self._refuse_full(f"{len(self._live)} episodes are published")
        if layout.max_steps is not None and self._steps + added > layout.max_steps:
            self._refuse_full(f"{self._steps} timesteps are published and max_steps is {layout.max_steps}")

    def _refuse_full(self, what: str) -> None:
        raise BufferFullError(
            f"{self.storage.path} is full: {what}, of max_episodes={self.storage.layout.max_episodes}; create it with "
            "circular=True to overwrite the oldest, with more max_episodes, or clear() it"
        )

    def _retire(self) -> None:
        """The oldest episodes leave the visible window; their slots may be written again."""
        layout = self.storage.layout
        while len(self._live) > layout.max_episodes or (layout.max_steps and self._steps > layout.max_steps):
            _, slot, length = self._live.popleft()
            self._steps -= length
            self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        if all(publication.slot != slot for publication in self._publications.values()):
            self._free.append(slot)

    def _release(self, episode: Episode) -> None:
        publication = self._publications.pop(episode)
        if all(slot != publication.slot for _, slot, _ in self._live):
            self._free.appendleft(publication.slot)

    # Changing what is published

    def update(self, slots: IntArray, rows: Mapping[str, Sequence[Array]], meta: Mapping[str, Sequence[Array]]) -> None:
        """Replace the first timesteps of fields, and meta fields, of visible slots; atomic for each episode.

        Args:
            slots: (n,). rows: name -> n arrays (t, *field), t at most the length. meta: name -> n values.
        """
        files = self.begin()
        self._refuse_open_steps("update")
        for i, slot in enumerate(slots.tolist()):
            new_rows = {name: arrays[i] for name, arrays in rows.items()}
            redo.carry_out(files, redo.plan(files, slot, new_rows, {name: values[i] for name, values in meta.items()}))

    def delete(self, slots: Sequence[int]) -> None:
        """Make visible slots invisible for good. What was retired before stays retired."""
        files = self.begin()
        if self._live:
            files.write_state("base", self._live[0][0])
            files.barriers("/state")
        for slot in slots:
            flags = int(self.storage.refresh().flags[slot])
            files.amend(slot, flags=flags | DELETED)
            files.barriers("/episodes")
            files.changed()
            for entry in [entry for entry in self._live if entry[1] == slot]:
                self._live.remove(entry)
                self._steps -= entry[2]
                self._give_back(slot)

    def clear(self) -> None:
        """Make every episode invisible, in one write. Episodes that are open and staged are not touched."""
        files = self.begin()
        self._refuse_open_steps("clear")
        files.write_state("base", self._next)
        files.barriers("/state")
        files.changed()
        self._free.extend(slot for _, slot, _ in self._live)
        self._live.clear()
        self._steps = 0

    def _refuse_open_steps(self, what: str) -> None:
        if any(publication.published for publication in self._publications.values()):
            raise EpisodeStateError(f"{what}: an episode whose steps are published is still open; end it first")

    # Ending

    def flush(self) -> None:
        """Wait until everything published is on the disk. Raises OSError, and then nothing more may be written."""
        if self._files is not None:
            self.begin().sync()

    def close(self) -> None:
        """Flush, mark the folder clean, and let go of the lock. Open episodes are dropped. Twice is fine."""
        self._closed = True
        files, self._files = self._files, None
        if files is not None:
            try:
                self._finish(files)
            finally:
                files.close()
        self._lock.release()

    def _finish(self, files: Files) -> None:
        if not self._lock.mine:
            return
        self._files = files
        for episode in list(self._lock.open_episodes):
            if self._by_step:
                episode.publish(cut=True)
            else:
                episode.abort()
        self._files = None
        files.sync()
        files.write_state("clean", 1)
        files.sync("/state")


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise SchemaError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, allowed))}")
