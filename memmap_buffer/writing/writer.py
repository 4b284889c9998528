"""The writer of one folder: it hands out open episodes, publishes, updates, deletes and clears.

It takes the lock at the first write. What an episode's steps are is `episode`'s; which slot is free is `slots`'; in
which order bytes are written is `commit`'s and `redo`'s.

Threads take turns at it. What an interruption or an error leaves half done is settled at once, or, where that is
interrupted too, by the next call: no line of a change needs to run for what comes after it to be right.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet, ref

import numpy as np

from memmap_buffer.choices import Checksum, Durability, Publish, Stage, check_choice
from memmap_buffer.dtypes import Array, check_count
from memmap_buffer.errors import EpisodeStateError, MemmapBufferError, ReadOnlyError, SchemaError, StaleEpisodeError
from memmap_buffer.format.creation import discard_unfinished
from memmap_buffer.format.episode_table import IntArray
from memmap_buffer.format.lock import WriterLock
from memmap_buffer.format.open_episodes import Statement
from memmap_buffer.format.records import CUT, DELETED, EXTENT, FINAL, GENERATION, INNER_END, OPEN, TERMINATED
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import name_in
from memmap_buffer.writing import redo
from memmap_buffer.writing.commit import SlotWriter, WriteHandles, commit, show
from memmap_buffer.writing.episode import Appended, End, Episode, Staging
from memmap_buffer.writing.recovery import close_abandoned, count, take_over
from memmap_buffer.writing.rounds import MappedFiles, MappedRound, Round, WrittenRound
from memmap_buffer.writing.slots import SlotAllocator
from memmap_buffer.writing.staged_round import StagedRound
from memmap_buffer.writing.validation import Whole, copied

TOLD = 16  # deleted slots that readers are told of by name, so that they look at no other
T = TypeVar("T")
_slot_of, _writer_of = attrgetter("slot"), attrgetter("writer")


@dataclass(frozen=True)
class WriteOptions:
    """How a buffer is written.

    Args:
        durability: "process": a published episode survives everything but a crash of the machine; "power": that too,
            by a barrier on each file.
        sync_every: with "power": publish so many episodes behind the same barriers; they become visible together.
        checksum: "crc32" (of sums of blocks: see `format`), or None for none.
        publish: "episode": an episode is visible when it is complete; "step": each step at once.
        stage: "ram": an open episode is in memory; "disk": it is written to its slot in chunks as it grows, for
            episodes too long for memory.

    Raises:
        SchemaError: a value that is not one of these, or two that exclude each other.
    """

    durability: Durability = "process"
    sync_every: int = 1
    checksum: Checksum = "crc32"
    publish: Publish = "episode"
    stage: Stage = "ram"

    def __post_init__(self) -> None:
        check_choice("durability", self.durability, Durability)
        check_choice("checksum", self.checksum, Checksum)
        check_choice("publish", self.publish, Publish)
        check_choice("stage", self.stage, Stage)
        check_count("sync_every", self.sync_every)
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
    what += f" need a spare slot each, and there are {spare_slots}"
    raise EpisodeStateError(f"{path}: {what}; create the buffer with spare_slots={needed}")


class Writer:
    """Writes to one folder.

    Args:
        storage: the folder.
        lock: the lock, held already by whoever created the folder, or not.
        how: how it is written.

    Raises:
        EpisodeStateError: `sync_every` is more than the spare slots.
    """

    def __init__(self, storage: Storage, lock: WriterLock, how: WriteOptions) -> None:
        self.storage = storage
        self.schema = storage.layout.schema
        self.max_timesteps = storage.layout.max_timesteps
        how.require_spare(storage.path, storage.layout.spare_slots)
        self.how = how
        self.in_place = how.in_place
        self.no_meta = {name: field.fill for name, field in self.schema.meta_fields.items()}
        self.lock = lock
        self._files: WriteHandles | None = None  # once it has the lock
        self._slots: SlotAllocator
        self._slot_writers: dict[ref[Episode], SlotWriter] = {}  # of open episodes that have a slot
        self._taken: dict[int, ref[Episode]] = {}  # of a slot, the open episode that had it last
        self._dropped: list[ref[Episode]] = []  # keys of these: the episode was collected, or is over
        self._pending: list[SlotWriter] = []  # written, and waiting for the next commit, in the order of their serials
        self._showing: list[SlotWriter] = []  # what a commit is showing of one step of several episodes
        self._rounds: WeakSet[MappedRound] = WeakSet()  # each appends to several episodes together
        self.staging = Staging()  # of all episodes
        self._settled = True  # whether the last change ran to its end, or `_settle` did after it
        self._closed = False
        self._given_up: list[int] = []  # slots whose space is given back once readers were told
        self._mapped: tuple[MappedFiles | None, ...] = ()  # (the maps to store to, if that may be), once it was looked

    def begin(self, *, publishing: bool = False) -> WriteHandles:
        """The open files, with nothing left half done; takes the lock at the first call.

        Args: publishing: what follows only publishes, and changes nothing that is visible. Then it is looked 20 times a
            second at most whether the folder still stands at its path; with durability "power" each time.

        Raises:
            ReadOnlyError: the buffer only reads.
            BufferLockedError: another process writes.
            WriterLostError: this object may not write any more.
            EpisodeStateError: it was closed.
        """
        with self.lock.turn:
            return self._begin(publishing)

    def _begin(self, publishing: bool) -> WriteHandles:
        files = self._files
        if files is None:
            files = self._take_over()
        else:
            (self.lock.glance if publishing and not files.power else self.lock.check)(self.storage)
            if files.behind:
                files.catch_up()
        if not self._settled:
            self._settle(files)
        episodes = self.lock.episodes
        abandoned = episodes.abandoned() if episodes.watched else []
        if abandoned or self._dropped:
            self._end_what_was_left(files, abandoned)
        return files

    def _take_over(self) -> WriteHandles:
        self.require_writable()
        self.lock.require_place(self.storage)
        self.storage.require_schema(to_write=True)
        self.lock.acquire()
        self._tidy()
        files = WriteHandles(
            self.storage, self.lock, power=self.how.durability == "power", checksum=self.how.checksum is not None
        )
        self._slots, self._files = take_over(files), files
        if self._slots.surplus:  # what a writer that was killed had still to forget
            self._change(partial(self._tell, slots=[]))
        return files

    def _change(self, work: Callable[[WriteHandles], T], *, publishing: bool = False) -> T:
        """Do a change in its turn; see `begin`. Whatever it ends with, what is on the disk then is what happened."""
        with self.lock.turn:
            return self._carry_out(work, self._begin(publishing))

    def _carry_out(self, work: Callable[[WriteHandles], T], files: WriteHandles) -> T:
        """`_change` for a caller that has the turn, and `_begin` behind it."""
        try:
            self._settled = False
            done = work(files)
            self._settled = True
            return done
        except BaseException as error:
            self._settle_after(error, files)
            raise

    def _settle_after(self, error: BaseException, files: WriteHandles) -> None:
        """Settle a change that ended with an error."""
        name_in(error, self.storage.path)
        if self.lock.mine:
            with suppress(OSError):  # of a disk that is full, say: then the next call does it, or raises
                self._settle(files)

    def settle(self) -> None:
        """Complete a change that was interrupted, and whose end was, too: so readers know what happened.

        It leaves a change alone that this thread is in the middle of, as a handler of a signal may ask.
        """
        turn = self.lock.turn
        if self._settled or not self.lock.mine or turn._is_owned():
            return
        try:
            if turn.acquire(False):  # else another thread writes, and has completed it
                with suppress(MemmapBufferError, OSError):  # which the next call raises, if it cannot do it either
                    self.begin()
        finally:
            if turn._is_owned():
                turn.release()

    def _settle(self, files: WriteHandles) -> None:
        """Take what is on the disk for what happened: finish a rewrite, count anew, and tell the readers."""
        redo.finish(files)
        if any([slot_writer.is_shown for slot_writer in self._showing]):  # for some is for all
            show(files, self._showing)
            for joint in self._rounds:
                joint.show_all()
        self._showing = []
        self._slots = count(files)
        surplus = self._slots.surplus
        if surplus:
            self._forget(files, surplus)
        files.announce(self._slots.next)
        self._give_back(files)
        for slot_writer in [*self._slot_writers.values(), *self._pending]:
            slot_writer.settle()
        for reference, slot_writer in list(self._slot_writers.items()):
            self._settle_episode(reference, slot_writer)
        over = (each for each in self._slot_writers if (episode := each()) is not None and episode.state != "open")
        self._dropped.extend(over)
        for joint in self._rounds:
            joint.settle()
        self._pending = [
            slot_writer
            for slot_writer in self._pending
            if slot_writer.state == "published" and not slot_writer.published
        ]
        self._settled = True

    def _settle_episode(self, reference: ref[Episode], slot_writer: SlotWriter) -> None:
        """Whatever interrupted the work on an episode: it is what its slot writer says."""
        episode = reference()
        if self.how.publish == "step" and slot_writer.state == "published":  # it was to end with its last step
            slot_writer.state = "open"
            is_over = slot_writer.published and not self.storage.record(slot_writer.slot)["flags"] & OPEN
            if is_over and episode is not None and episode.state == "open":
                self._close(episode, "published")
        if slot_writer.published:
            if self.how.publish == "step":
                self._follow(episode)
            return
        waits = slot_writer.state == "published"  # with others for their commit: it is over
        if episode is not None and episode.state == "open":
            if waits:
                self._close(episode, "published")
            else:
                episode.serial = -1  # another one may get that
        if waits or not self.in_place:
            self._slot_writers.pop(reference)  # it is staged still, and its slot is free

    def _end_what_was_left(self, files: WriteHandles, abandoned: Iterable[Episode]) -> None:
        """End open episodes whose `with` statement is over, and those that nobody holds any more."""
        for episode in abandoned:
            self._end(files, ref(episode))
            self._drop(episode)
        while self._dropped:
            self._end(files, self._dropped[0])
            del self._dropped[0]

    def _end(self, files: WriteHandles, reference: ref[Episode]) -> None:
        """End an episode that was written to its slot: published if any of it is shown."""
        slot_writer = self._slot_writers.get(reference)
        if slot_writer is None:
            return
        if slot_writer.published:
            close_abandoned(files, np.array([slot_writer.slot]))
        episode = reference()
        if episode is not None and episode.state == "open":
            self._close(episode, "published" if slot_writer.published else "aborted")
        self._slot_writers.pop(reference)

    def _close(self, episode: Episode, state: str) -> None:
        """An episode is over."""
        episode.state = state
        self.lock.episodes.remove(ref(episode))

    def _tidy(self) -> None:
        """Under the lock: no other schema than this one stands, and nothing of a change that was not finished."""
        try:
            self.lock.require_place(self.storage)
            self.storage.require_schema(to_write=True)
            with suppress(MemmapBufferError):  # it is not ours
                discard_unfinished(self.storage.folder)
        except BaseException:
            self.lock.release()
            raise

    def begin_alone(self, what: str) -> WriteHandles:
        """The open files, where no episode is open and nothing waits; what was retired stays retired.

        Raises:
            MemmapBufferError: as `begin` raises it.
            EpisodeStateError: an episode is open.
        """
        files, episodes = self.begin(), [*self.lock.episodes]
        if episodes:
            raise EpisodeStateError(f"{what}: {len(episodes)} episodes are open; end them first")
        self.commit_pending()
        self._change(self._retire)
        return files

    def detach(self) -> None:
        """Let go of the files, as another writer of the same folder goes on under the same lock."""
        files, self._files, self._closed = self._files, None, True
        if files is not None:
            files.close()

    @property
    def begun(self) -> bool:
        """Whether this object was the folder's writer before, and is not closed."""
        return self._files is not None

    @property
    def holds(self) -> bool:
        """Whether this object is the folder's writer now."""
        return self._files is not None and self.lock.mine

    def require_writable(self) -> None:
        """Raise EpisodeStateError or ReadOnlyError where nothing can be written whoever holds the lock."""
        if self._closed:
            raise EpisodeStateError(f"{self.storage.path}: the buffer was closed; reopen it with from_folder")
        if self.storage.read_only or not self.storage.layout.writable:
            why = "was opened with read_only=True; open one to write to"
            if not self.storage.layout.writable:
                why = "is packed, which is a layout to read; `unpack` it into another folder to write to that"
            raise ReadOnlyError(f"{self.storage.path} {why}")

    def show_steps(self, count: int) -> bool:
        """Publish each timestep at once from now on, if so many episodes may be open then; whether that is so.

        Episodes that are open now are not written like that, and with `sync_every` none is.
        """
        if len([*self.lock.episodes]) or self.how.sync_every > 1 or count > self._most_in_place:
            return False
        self.in_place = True  # first: on its own it is right, too
        self.how = replace(self.how, publish="step")
        return True

    # Episodes

    def open(
        self, meta: Mapping[str, Any], *, keep_partial: bool = False, statement: Statement | None = None
    ) -> Episode:
        """A new open episode, which ends with a `with` statement if it is given.

        Raises BufferFullError, EpisodeStateError: it could not be published.
        """
        with self.lock.turn:
            self._begin(publishing=True)
            self._require_room_for_another()
            episode = Episode(self, meta, keep_partial=keep_partial)
            try:
                self.lock.episodes.add(episode, statement)
                return episode
            except BaseException:
                self._close(episode, "aborted")  # whoever asked for it never gets it
                raise

    def _require_room_for_another(self) -> None:
        if self._slots.circular and not self.in_place:
            return
        most, waiting = len(self.lock.episodes) + 1, len(self._pending)
        if self._slots.has_room(most + waiting, 1) and (most <= self._most_in_place or not self.in_place):
            return
        for episode in self.lock.episodes:
            slot_writer = self._slot_writers.get(ref(episode))
            waiting += slot_writer is None or not slot_writer.published
        self._slots.require_room(waiting + 1, 1)
        self.require_spare_slots(1)

    @property
    def _most_in_place(self) -> float:
        """How many open episodes the slots are enough for: a ring shows `max_episodes` beside those that are open."""
        return self.storage.layout.spare_slots if self.storage.layout.circular else math.inf

    def require_spare_slots(self, more: int) -> None:
        """Raise EpisodeStateError where so many more episodes cannot be open at a time."""
        count = len([*self.lock.episodes]) + more
        if self.in_place and count > self._most_in_place:
            self._refuse_spare(f"{count} open episodes that are written in place", count)

    def require_within(self, length: int) -> None:
        """Raise EpisodeStateError where an episode of so many timesteps is too long."""
        limit = self.max_timesteps
        if length > limit:
            raise EpisodeStateError(
                f"timestep {limit}: the episode is longer than max_timesteps ({limit}); create the buffer with "
                "a larger max_timesteps, or end the episode here and go on in a new one"
            )

    def store(self, whole: Whole) -> SlotWriter:
        """Publish a whole episode. Raises as `open` and `publish` raise it."""
        self.require_within(whole.length)
        with self.lock.turn:
            files = self._begin(publishing=True)
            self._require_room_for_another()
            return self._carry_out(partial(self._store, whole), files)

    def _store(self, whole: Whole, files: WriteHandles) -> SlotWriter:
        """Write a whole episode to a free slot, and commit it, or have it wait for `sync_every` of them."""
        columns, length, has_final, meta = whole
        flags, ended = FINAL * has_final, ""
        for name in self.schema.ends:
            ends = columns[name]
            if np.count_nonzero(ends[: length - 1]):
                flags |= INNER_END
            ended = ended or name * bool(ends.item(length - 1))
        slot_writer = SlotWriter(files, *self._free_slots(1))
        slot_writer.write(columns, 0, length, final=has_final)
        flags |= TERMINATED * (ended == self.schema.terminated)
        self._prepare([(slot_writer, {**self.no_meta, **meta}, flags)])
        if len(self._pending) >= self.how.sync_every:
            self._commit_pending(files)
        slot_writer.state = "published"
        return slot_writer

    def publish(self, cut: Mapping[Episode, bool]) -> None:
        """Make staged episodes visible, as many by one commit as there are free slots for.

        On an error those that are not visible stay as they were, and may be published again.

        Args: cut: of each, whether it was cut short.
        """
        with self.lock.turn:
            episodes, done = [*cut], 0
            if {*map(_writer_of, episodes)} - {self}:
                for episode in episodes:  # some were handed on while this thread waited for its turn
                    episode.writer.publish({episode: cut[episode]})
                return
            try:
                while True:  # a condition here would be a jump that passes by the end of the turn, from Python 3.12 on
                    if done == len(episodes):
                        break
                    publish = partial(self._publish, episodes, done, cut)
                    done = self._carry_out(publish, self._begin(publishing=True))
            except (MemmapBufferError, OSError):
                if len(cut) > 1:
                    with suppress(MemmapBufferError, OSError):  # what stops one of them stops none before it
                        for episode in episodes[done:]:
                            self.publish({episode: cut[episode]})
                raise

    def _publish(self, every: list[Episode], start: int, cut: Mapping[Episode, bool], files: WriteHandles) -> int:
        """Publish episodes from one on, as many as there are free slots for; returns the place of the next one."""
        slots = self._free_slots(len(every) - start, least=ref(every[start]) not in self._slot_writers)[::-1]
        episodes, slot_writers, rewrites, prepared = [], [], [], []
        for episode in islice(every, start, None):
            if not slots and ref(episode) not in self._slot_writers:
                break
            episodes.append(episode)
            if episode.state != "open":
                episode.require_open()
            final, terminated = bool(episode.finals), episode.ended == self.schema.terminated
            flags = FINAL * final | CUT * cut[episode] | TERMINATED * terminated
            slot_writer = self._slot_writer_of(episode, files, slots)
            if slot_writer.published:
                slot_writer.rewind()  # to what is shown, as it may have been appended to together with others
            slot_writer.write(episode.columns, episode.base, episode.length)
            slot_writers.append(slot_writer)
            episode.tried = True
            if slot_writer.published and self._meta_changed(slot_writer, episode):
                slot_writer.round = self._slots.last_round(slot_writer.slot)
                rewrites.append(redo.plan_end(files, slot_writer, flags, episode.finals, episode.meta))
                continue
            if final:
                rows = {name: value[None] for name, value in episode.finals.items()}
                slot_writer.write(rows, episode.length, episode.length, final=True)
            slot_writer.appends = False
            prepared.append((slot_writer, episode.meta, flags))
        self._prepare(prepared)
        for episode, slot_writer in zip(episodes, slot_writers, strict=True):
            episode.serial = slot_writer.serial
        if rewrites:
            self.lock.check(self.storage)  # it is a change of what is visible
            self._rewrite(rewrites, files)
        if len(self._pending) >= self.how.sync_every or any([each.published for each in self._pending]):
            self._commit_pending(files)
        self._close_published(files, zip(episodes, slot_writers, strict=True))
        return start + len(episodes)

    def _close_published(self, files: WriteHandles, over: Iterable[tuple[Episode, SlotWriter]]) -> None:
        """Episodes that were published, or are to be with others, are over."""
        over = [*over]
        if self.storage.layout.capacity is not None:
            self._give_up_empty(files, [slot_writer.slot for _, slot_writer in over if slot_writer.published])
        for episode, slot_writer in over:
            slot_writer.state = "published"
            self._close(episode, "published")
            self._slot_writers.pop(ref(episode))
        if self._given_up:
            self._give_back(files)

    def _rewrite(self, rewrites: Iterable[redo.Rewrite], files: WriteHandles) -> None:
        if self.storage.state("base") < self._slots.oldest:  # what was retired is not seen in its place meanwhile
            self._retire(files)
        redo.carry_out(files, rewrites)

    def _meta_changed(self, slot_writer: SlotWriter, episode: Episode) -> bool:
        """Whether meta fields must be written anew; not those of an episode that a ring gave up while it was open."""
        if self.storage.maps.words.item(slot_writer.slot, GENERATION) & 1:
            return False
        return any(slot_writer.meta[name].tobytes() != value.tobytes() for name, value in episode.meta.items())

    def meta_of(self, episode: Episode) -> Mapping[str, Array]:
        """The meta fields of an open episode as they are shown, or will be with its first timestep."""
        slot_writer = self._slot_writers.get(ref(episode))
        return slot_writer.meta if slot_writer is not None and slot_writer.published else episode.meta

    def complete(self, episode: Episode, finals: Mapping[str, Array]) -> None:
        """Add the final observation to an episode that was published as cut short, if it is still there: atomic."""
        self._change(partial(self._complete, episode, finals))

    def _complete(self, episode: Episode, finals: Mapping[str, Array], files: WriteHandles) -> None:
        self._commit_pending(files)
        table = self.storage.refresh()
        place = bisect_left(table.visible, episode.serial, key=table.serial.item)
        for slot in table.visible[place : place + 1].tolist():
            if table.serial.item(slot) == episode.serial:
                self._rewrite([redo.plan_update(files, slot, {}, {}, finals)], files)

    def withdraw(self, episode: Episode) -> None:
        """Forget an aborted episode; steps of it that were published are deleted."""
        with self.lock.turn:
            if episode.writer is not self:
                episode.writer.withdraw(episode)
                return
            if not self._settled and self.lock.mine:
                self.begin()
            slot_writer = self._slot_writers.get(ref(episode))
            if slot_writer is not None and slot_writer.published:
                self._change(partial(self._delete, np.array([slot_writer.slot])))
            self._drop(episode)

    def _drop(self, episode: Episode) -> None:
        if episode.state == "open":
            self._close(episode, "aborted")
        self._slot_writers.pop(ref(episode), None)

    def commit_pending(self) -> None:
        """Make the episodes visible that wait for others behind the same barriers."""
        self._change(self._commit_pending)

    def move_episodes(self, other: Writer) -> None:
        """Have another writer, to a folder of the same fields, publish the episodes that are open and staged here.

        Interrupted anywhere each of them has one of the two writers, and the same call moves the rest.
        """
        with self.lock.turn, other.lock.turn:
            if self.begun and not self._settled:
                self.begin()  # one that is published may not be known to be
            other.staging = self.staging
            for episode in self.lock.episodes.every():
                other.lock.episodes.add(episode, self.lock.episodes.watched.get(ref(episode)))
                episode.serial, episode.writer = -1, other
                self.lock.episodes.remove(ref(episode))

    @property
    def num_given(self) -> int:
        """The episodes that were published in this folder, those included that wait for others."""
        return self.storage.state("next") + len(self._pending)

    def append(self, appended: Sequence[Appended]) -> None:
        """Publish timesteps of some episodes that are not yet: those of all of them or of none.

        Whatever happens, each ends behind the last step of it that is visible.
        """
        try:
            self._change(partial(self._append, appended), publishing=True)
        except BaseException:
            for step in appended:
                self._follow(step.episode)
            raise

    def _append(self, appended: Sequence[Appended], files: WriteHandles) -> None:
        together = len(appended) > 1
        self._write_steps(appended, files, together=together)
        self._commit_pending(files, together=together)
        for episode, _, _, stop in appended:
            episode.base = episode.length = stop

    def _write_steps(self, appended: Sequence[Appended], files: WriteHandles, *, together: bool) -> None:
        """Write timesteps to the slots of their episodes, to be committed."""
        new = len(appended) - sum([ref(each.episode) in self._slot_writers for each in appended])
        slots = self._free_slots(new)[::-1] if new else []
        written = []
        for episode, columns, base, stop in appended:
            episode.ended = next((name for name in self.schema.ends if columns[name].item(stop - 1 - base)), "")
            slot_writer = self._slot_writer_of(episode, files, slots)
            # Steps that no record vouches for are trusted after a power cut only where their serial is.
            trusted = not files.power or self.storage.state("synced") > slot_writer.serial
            slot_writer.appends = slot_writer.published and trusted and not episode.ended
            slot_writer.write(columns, base, stop, add=not slot_writer.appends)
            flags = OPEN | TERMINATED * (episode.ended == self.schema.terminated)
            written.append((slot_writer, episode.meta, flags))
        self._prepare(written, together=together)
        for (episode, *_), (slot_writer, *_) in zip(appended, written, strict=True):
            episode.serial = slot_writer.serial

    def follow(self, episode: Episode) -> None:
        """Where every step is shown, take for an episode's steps those that are."""
        if self.how.publish == "step":
            self.begin(publishing=True)
            self._follow(episode)

    def _follow(self, episode: Episode | None) -> None:
        """An episode has the steps that are shown, and ended where the last of them says so."""
        if episode is None:
            return
        slot_writer, visible, ended = self._slot_writers.get(ref(episode)), 0, ""
        if slot_writer is not None:
            slot_writer.rewind()
            visible = slot_writer.length
            ended = next((name for name in self.schema.ends if visible and self._last(slot_writer, name).any()), "")
        episode.base, episode.length, episode.ended = visible, visible, ended

    def _last(self, slot_writer: SlotWriter, name: str) -> Array:
        """The value of a field at the last step of an open episode, (1, *field)."""
        row = self.storage.start_of(name, slot_writer.slot) + slot_writer.length - 1
        return self.storage.read_rows(name, slice(row, row + 1), slot_writer.slot, slot_writer.serial)

    # A timestep of several environments

    def new_round(self, size: int) -> Round:
        """A round of so many environments, none of them a member yet, of the kind that this buffer is written by."""
        if self.how.publish != "step":
            return StagedRound(self, size)
        with self.lock.turn:
            files = self._begin(publishing=True)
            if not self._mapped:
                self._mapped = (MappedFiles.of(files),)
            maps = self._mapped[0]
            if maps is None:
                return WrittenRound(self, size)
            joint = MappedRound(self, size, files, maps)
            self._rounds.add(joint)
            return joint

    def slot_writers_of(self, episodes: Mapping[int, Episode], files: WriteHandles) -> dict[int, SlotWriter]:
        """The writers of the slots of some open episodes, which are shown step by step; new ones get slots."""
        with self.lock.turn:
            new = len(episodes) - sum([ref(episode) in self._slot_writers for episode in episodes.values()])
            files = self._begin(publishing=True) if new else files
            slots = self._free_slots(new)[::-1] if new else []
            slot_writers = {}
            for i, episode in episodes.items():
                episode.require_open()
                slot_writers[i] = self._slot_writer_of(episode, files, slots)
                slot_writers[i].rewind()  # what was written before, and is not shown, is of a step that is not there
            return slot_writers

    def append_round(self, joint: MappedRound, columns: Mapping[str, Array], ends: Sequence[End] = ()) -> None:
        """Append one timestep to the episodes of a round, and publish it: to all of them or to none.

        Who calls it has the turn.

        Args:
            joint: the round.
            columns: field -> (environments, *field).
            ends: of those episodes that end with it, by environment; they are published with the timestep.
        """
        if self._closed or joint.files is not self._files or joint.files.behind or not self._settled:
            self.begin(publishing=True)
        self.lock.glance(self.storage)
        slots, new = joint.slots, joint.new
        if not self._slots.circular:
            self._slots.require_room(len(new), len(slots))
        if joint.room <= 0:
            joint.prepare()
        try:
            self._settled = False
            for *_, slot_writer in new:
                slot_writer.write({}, 0, 0)  # no rows yet, but what stands there is void
            joint.write(columns)
            if new or ends:
                self._show_records(joint, columns, ends)
            else:
                joint.show()
                self._slots.show_round(slots)
                surplus = self._slots.surplus
                if surplus:
                    slots = np.concatenate([slots, self._forget(joint.files, surplus)])
                joint.files.changed(slots)
                if self._given_up:
                    self._give_back(joint.files)
            self._settled = True
        except BaseException as error:
            self._settle_after(error, joint.files)
            raise

    def _show_records(self, joint: MappedRound, columns: Mapping[str, Array], ends: Sequence[End]) -> None:
        """Show a timestep of a round, which is the first of some of its episodes, or the last that it publishes."""
        new, terminated = joint.new, self.schema.terminated
        is_last = None if terminated is None else columns[terminated]
        ending = {end.place: end for end in ends}
        closed, written = [], []
        for i, episode, slot_writer in [*new, *[(i, *joint.member(i)) for i in ending if joint.lengths.item(i)]]:
            length, end = joint.lengths.item(i) + 1, ending.get(i)
            slot_writer.stored(length)
            if end is None:
                flags = OPEN | TERMINATED * (is_last is not None and bool(is_last.item(i)))
            else:
                finals = copied(self.schema, end.finals)
                if finals:
                    slot_writer.write({name: row[None] for name, row in finals.items()}, length, length, final=True)
                flags = FINAL * bool(finals) | CUT * (not end.ended) | TERMINATED * (end.ended == terminated)
                slot_writer.appends, slot_writer.state = False, "published"  # `_settle_episode` looks whether it is
                closed.append((episode, slot_writer))
            written.append((slot_writer, episode.meta, flags))
        self._prepare(written, together=True)
        for _, episode, slot_writer in new:
            episode.serial = slot_writer.serial
        self._commit_pending(joint.files, joint, together=True)
        self._close_published(joint.files, closed)

    def spill(self, episode: Episode) -> None:
        """Write the steps that are staged to the episode's slot, which makes room for others."""
        self._change(partial(self._spill, episode), publishing=True)

    def _spill(self, episode: Episode, files: WriteHandles) -> None:
        self._slot_writer_of(episode, files).write(episode.columns, episode.base, episode.length)

    def _slot_writer_of(self, episode: Episode, files: WriteHandles, slots: list[int] | None = None) -> SlotWriter:
        """The writer of an episode's slot: of the last one of those that are free, where it has none."""
        reference = ref(episode)
        slot_writer = self._slot_writers.get(reference)
        if slot_writer is None:
            slot_writer = SlotWriter(files, (slots or self._free_slots(1)).pop())
            self._taken[slot_writer.slot] = reference  # first, as the slot is free without
            self._slot_writers[ref(episode, self._dropped.append)] = slot_writer
        return slot_writer

    def _free_slots(self, count: int, *, least: int | None = None) -> list[int]:
        """Slots that are neither visible nor being written, at least so many of them.

        Raises: EpisodeStateError: there are less.
        """
        pending = {*map(_slot_of, self._pending)}

        def is_busy(slot: int) -> bool:
            reference = self._taken.get(slot)
            if slot in pending or reference is None:
                return slot in pending
            # One that was collected right now is not ended yet; of these no other reference is the key.
            keys = self._dropped if reference() is None else [reference]
            slot_writers = [self._slot_writers.get(key) for key in keys]
            return any([each is not None and each.slot == slot for each in slot_writers])

        slots = self._slots.find(is_busy if self._slot_writers else pending.__contains__, count)
        if len(slots) < (count if least is None else least):
            busy = len({*map(_slot_of, self._slot_writers.values()), *pending})
            what = f"{busy} episodes that are being written in place, and {count} to publish"
            self._refuse_spare(what, busy + count)
        return slots

    def _prepare(
        self, written: Iterable[tuple[SlotWriter, Mapping[str, Array], int]], *, together: bool = False
    ) -> None:
        """Have what was written be published by the next commit.

        Args:
            written: each with its meta fields and flags.
            together: all that the next commit publishes is one round.
        """
        new = waiting = 0  # episodes that wait to be published, and timesteps
        for other in self._pending:
            new += not other.published
            waiting += other.length - other.num_published
        for slot_writer, meta, flags in written:
            first, added = not slot_writer.published, slot_writer.length
            if not first:
                added -= slot_writer.num_published
            if not self._slots.circular:
                self._slots.require_room(new + first, added + waiting)
            if first:
                if meta:
                    slot_writer.write_meta(meta)
                slot_writer.serial = self._slots.next + new
            if not slot_writer.appends:
                slot_writer.flags = flags
                if added:
                    slot_writer.round = self._slots.round + (0 if together else waiting) + added - 1
                else:
                    slot_writer.round = self._slots.last_round(slot_writer.slot)
                if flags & OPEN:  # its last step is still to come
                    slot_writer.round -= slot_writer.length - 1
            new, waiting = new + first, waiting + added
            self._pending.append(slot_writer)

    def _commit_pending(self, files: WriteHandles, joint: MappedRound | None = None, *, together: bool = False) -> None:
        """Publish what waits for it, and with it the step of a round that was written; together or not."""
        if self._pending:
            if together:
                self._showing = [*self._pending]
                if joint is not None:
                    joint.begin_to_show()
            shown = [*map(_slot_of, self._pending)] if joint is None else joint.slots
            new = self._pending if joint is None else [slot_writer for *_, slot_writer in joint.new]
            commit(files, self._pending)
            if joint is not None:
                joint.show()
            for slot_writer in new:
                length = slot_writer.length if joint is None else 0  # its step is of the round
                self._slots.show(slot_writer.serial, slot_writer.slot, length, alone=not together)
            if joint is not None:
                self._slots.show_round(joint.slots)
            elif together:
                self._slots.round += 1
            self._pending, self._showing = [], []
            self._tell(files, shown)

    def _tell(self, files: WriteHandles, slots: Sequence[int] | IntArray) -> None:
        """Let the steps beyond `capacity` leave, then tell the readers which slots changed."""
        if self.storage.layout.capacity is not None:
            if self._slots.hides:
                self._retire(files)
                self._slots.hides = False
            retired, self._slots.retired = self._slots.retired, []
            for slot in retired:
                stop = self._slots.stop.item(slot)
                files.write_shown(slot, stop, stop)
            if retired:
                self._give_up(files, retired)
                slots = [*slots, *retired]
            surplus = self._slots.surplus
            if surplus:
                slots = np.concatenate([slots, self._forget(files, surplus)])
        files.announce(self._slots.next, slots)
        if self._given_up:
            self._give_back(files)

    def _forget(self, files: WriteHandles, count: int) -> IntArray:
        """Show the oldest steps no more, so many; an episode that has none left gives its disk space back."""
        moved = self._slots.forget(count)
        maps = self._mapped[0] if self._mapped else None
        if maps is not None and len(moved) == 1:  # by plain numbers, in a third of the time
            slot = moved.item()
            first, end = self._slots.start.item(slot), self._slots.stop.item(slot)
            maps.shown[slot] = first | end << 32
            empty = [slot] if first == end else []
        else:
            start, stop = self._slots.start.take(moved), self._slots.stop.take(moved)
            if maps is not None:
                maps.shown[moved] = (start | stop << 32).view(np.uint64)
            else:
                for slot, first, end in zip(moved.tolist(), start.tolist(), stop.tolist(), strict=True):
                    files.write_shown(slot, first, end)
            empty = moved[start == stop].tolist()
        if files.power:
            files.barriers("/episodes")
        if empty:
            extent = self.storage.maps.words[:, EXTENT]
            self._give_up_empty(files, [slot for slot in empty if not extent.item(slot) >> 32 & OPEN])
        return moved

    def _give_up_empty(self, files: WriteHandles, slots: Sequence[int]) -> None:
        """Episodes of which nothing is shown any more leave; who is late at reading one finds that it is gone."""
        start, stop = self._slots.start, self._slots.stop
        empty = [slot for slot in slots if start.item(slot) == stop.item(slot)]
        if empty:
            self._give_up(files, empty)
            self._slots.hide_all(np.array(empty))

    def _give_up(self, files: WriteHandles, slots: Sequence[int]) -> None:
        generation = self.storage.maps.words[:, GENERATION]
        for slot in slots:
            files.write_generation(slot, generation.item(slot) | 1)
        files.barriers("/episodes")
        self._given_up += slots

    def _give_back(self, files: WriteHandles) -> None:
        """Give back the space of episodes that left; not before readers were told, who take a row for what it was."""
        given_up, self._given_up = self._given_up, []
        extent = self.storage.maps.words[:, EXTENT]
        for slot in given_up:
            if not extent.item(slot) >> 32 & OPEN:  # else stores go on there, into blocks that must stay, until its end
                files.give_back(slot, 0, (files.reach.item(slot) or self.max_timesteps + 1) - 1)
                files.reach[slot] = 1

    def _refuse_spare(self, what: str, needed: int) -> NoReturn:
        _refuse_spare(self.storage.path, what, self.storage.layout.spare_slots, needed)

    # Changing what is published

    @property
    def _growing(self) -> dict[int, SlotWriter]:
        """The writers of open episodes whose steps are published, by slot."""
        return {each.slot: each for each in self._slot_writers.values() if each.published}

    def update(
        self, slots: IntArray, rows: Mapping[str, Sequence[redo.Steps]], meta: Mapping[str, Sequence[Array]]
    ) -> None:
        """Replace timesteps of fields, and meta fields, of visible slots; atomic for each episode.

        Args:
            slots: (n,) of visible episodes.
            rows: name -> n times new values of timesteps.
            meta: name -> n values.

        Raises:
            EpisodeStateError: one of these episodes is open, and its end writes these values.
        """
        self._change(partial(self._update, slots, rows, meta))

    def _update(
        self,
        slots: IntArray,
        rows: Mapping[str, Sequence[redo.Steps]],
        meta: Mapping[str, Sequence[Array]],
        files: WriteHandles,
    ) -> None:
        if not self.storage.trust(slots):
            raise StaleEpisodeError(f"{self.storage.path}: an episode to be updated fails its checksums; see `verify`")
        growing = self._growing
        of_end = [*meta, *(name for name in rows if name in self.schema.ends)]
        if of_end and not growing.keys().isdisjoint(slots.tolist()):
            raise EpisodeStateError(f"an episode of these is open, and its end writes {of_end[0]!r}; end it first")

        def of(values: Mapping[str, Sequence[Any]], i: int) -> dict[str, Any]:
            return {name: each[i] for name, each in values.items()}

        plans = (redo.plan_update(files, slot, of(rows, i), of(meta, i)) for i, slot in enumerate(slots.tolist()))
        self._rewrite(plans, files)
        for slot_writer in growing.values():
            slot_writer.settle()

    def delete(self, slots: IntArray) -> None:
        """Make visible slots invisible for good, in one pass. What was retired before stays retired.

        Raises: EpisodeStateError: one of these episodes is open.
        """
        slots = np.sort(slots)  # as `unique` does in a tenth of its time
        self._change(partial(self._delete_closed, slots[np.diff(slots, prepend=-1) > 0]))

    def _delete_closed(self, slots: IntArray, files: WriteHandles) -> None:
        if not self._growing.keys().isdisjoint(slots.tolist()):
            raise EpisodeStateError(
                "delete: an episode of these is open, and its end would show it again; end it first"
            )
        self._delete(slots, files)

    def _delete(self, slots: IntArray, files: WriteHandles) -> None:
        self._retire(files)
        files.behind = True  # whatever ends this, readers are told: now, or by the next call
        try:
            for part in files.raise_flag(slots, DELETED):
                self._slots.hide_all(part)
            files.barriers("/episodes")
            if 0 < len(slots) <= TOLD:  # of none: every reader looks, also at whether the folder is still its buffer
                files.announce(0, slots)
        finally:
            files.catch_up()

    def _retire(self, files: WriteHandles) -> None:
        """Episodes that are not visible any more never come back, whatever leaves."""
        files.write_state("base", self._slots.oldest)
        files.barriers("/state")

    def clear(self) -> None:
        """Make every episode invisible, in one write. Episodes that are open and staged are not touched."""
        self._change(self._clear)

    def _clear(self, files: WriteHandles) -> None:
        if self._growing:
            raise EpisodeStateError("clear: an episode whose steps are published is still open; end it first")
        self._commit_pending(files)
        files.write_state("base", self._slots.next)
        files.barriers("/state")
        files.changed()
        self._slots.clear()

    # Ending

    def flush(self) -> None:
        """Wait until everything published is on the disk. Raises OSError, and then nothing more may be written."""
        with self.lock.turn:
            if self._files is not None:
                self.commit_pending()
                self.begin().sync()
                self._change(self._seal_open)

    def _seal_open(self, files: WriteHandles) -> None:
        """Give open episodes, whose steps are on the disk now, records that vouch for these steps."""
        growing = [] if files.power else [*self._growing.values()]
        for slot_writer in growing:
            slot_writer.rewind()
            slot_writer.flags = self.storage.record(slot_writer.slot)["flags"] & (OPEN | TERMINATED)
            slot_writer.round, slot_writer.appends = (
                self._slots.last_round(slot_writer.slot) - (slot_writer.length - 1),
                False,
            )
        if growing:
            commit(files, growing)
            files.announce(self._slots.next, [slot_writer.slot for slot_writer in growing])
            files.sync("/episodes")

    def close(self) -> None:
        """Flush, mark the folder clean, and let go of the lock. Open episodes are dropped. Twice is fine."""
        with self.lock.turn:
            files = self._files
            try:
                if files is not None and self.holds:
                    self._finish()
            finally:
                self._closed, self._files = True, None
                if files is not None:
                    files.close()
                self.lock.release()

    def _finish(self) -> None:
        self.begin()
        for episode in self.lock.episodes:
            if self.how.publish == "step":
                episode.publish(cut=True)
            else:
                episode.abort()
        self.flush()
        files = self.begin()
        files.write_state("clean", 1)
        files.sync("/state")
