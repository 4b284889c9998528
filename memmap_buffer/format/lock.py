"""The right to write to a folder: its lock, the term that fences a writer whose lock failed, guards against fork and
poison.

One object per process and folder holds the lock; a newer object takes it over unless an episode is open. The threads of
a process take turns, whichever object of the folder they write with. Nothing here reads or writes episodes.
"""

from __future__ import annotations

import datetime
import math
import threading
import time
import weakref
from typing import Any

from memmap_buffer.cached import cached_property
from memmap_buffer.errors import BufferLockedError, MemmapBufferError, WriterLostError
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.open_episodes import OpenEpisodes
from memmap_buffer.format.records import STATE_WORD
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import process_id, renew_after_fork

LOOK_SECONDS = 0.05  # how often `glance` looks whether the folder is still at its path
_TERM, _HOST = STATE_WORD["term"], STATE_WORD["host"]
ATTEMPTS = 50  # to take a lock that this process itself seems to hold, see `WriterLock._take`


class Turn:
    """A re-entrant lock between threads, which a forked child finds free whoever held it in the parent.

    Attributes:
        lock: taken by `with turn.lock`. It is the lock itself: Ctrl-C in an `__enter__` of ours would leave it held.
    """

    def __init__(self) -> None:
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """In a forked child: begin with a free lock, as another thread of the parent may have held it."""
        self.lock: Any = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, ()


# Which object of this process holds which folder. All objects must know it: flock belongs to the open file, not to the
# process, so a second object that locks the same file is refused like another process.
_holders: weakref.WeakValueDictionary[tuple[int, int], WriterLock] = weakref.WeakValueDictionary()
_turns: weakref.WeakValueDictionary[tuple[int, int], Turn] = weakref.WeakValueDictionary()
_finding = Turn()

_REMEDY = {
    "forked": "a forked child may read, not write; open the buffer anew in the child, or write in the parent",
    "fenced": "another process took the folder over (the lock does not hold on this file system); reopen it",
    "taken over": "a newer object of this process writes to the folder now; use that one",
    "poisoned": "a barrier failed, so what was written may be lost; reopen the buffer, which checks it",
    "closed": "the buffer was closed; reopen it with from_folder",
    "moved": "its folder was moved, removed or overwritten, and what stands at the path is another; open that anew",
}


class WriterLock:
    """The right of one object to write to one folder.

    Attributes:
        episodes: the open episodes; as long as there are some, no other object of the process takes the lock over.
        term: the term of this writer, to be compared with the one in state.npy.
        lost: why this object may not write any more, a key of `_REMEDY`; "" while it may.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.episodes = OpenEpisodes()
        self._lock: Any = None
        self._pid = 0
        self._turn: Turn | None = None
        self.term, self._looked = 0, 0.0
        self.lost = ""
        renew_after_fork(self)

    def renew(self) -> None:
        """In a forked child: have the next `glance` check everything, and so find that it may not write here."""
        self._looked = -math.inf
        vars(self).pop("turn", None)

    @cached_property
    def turn(self) -> Any:
        """The lock between threads, to be held by `with` for every write: all objects of the folder share it."""
        with _finding.lock:
            if self._turn is None:
                self._turn = self._found_turn()
        return self._turn.lock

    def _found_turn(self) -> Turn:
        try:
            key = self._folder.lock_key()
        except (FileNotFoundError, NotADirectoryError):  # the folder was removed: nobody else writes to it
            return Turn()
        turn = _turns.get(key)
        if turn is None:
            turn = _turns[key] = Turn()
        return turn

    @property
    def is_held(self) -> bool:
        return self._lock is not None

    @property
    def in_use(self) -> bool:
        """Whether an object of this process holds the folder."""
        holder = _holders.get(self._folder.lock_key())
        return holder is not None and holder.mine

    def acquire(self) -> None:
        """Take the lock, from an older object of this process if need be.

        Raises: BufferLockedError: another process holds it, or another object of this process that has an episode open
            and may still publish it.
        """
        if self.is_held:
            return
        try:
            with self.turn:
                self._folder.hold()
                self._pid = process_id()
                self._lock = self._taken_over() or self._take()
                _holders[self._folder.lock_key()] = self
        except BaseException:
            self.release()
            raise

    def _taken_over(self) -> Any:
        """The lock, taken over from an older object of this process; None where none holds it."""
        holder = _holders.get(self._folder.lock_key())
        if holder is None or not holder.is_held or holder._pid != process_id():
            return None
        if [*holder.episodes] and not holder.lost:
            raise BufferLockedError(
                f"{self._folder.path}: another ReplayBuffer object of this process has an episode open; "
                "finish that episode, or use that object",
                path=self._folder.path,
                pid=process_id(),
            )
        self._lock, holder._lock, holder.lost = holder._lock, None, "taken over"
        return self._lock

    def _take(self) -> Any:
        for _ in range(ATTEMPTS):
            try:
                return self._folder.lock()
            except BufferLockedError as error:
                refused = _with_holder(error, self._folder)
            if refused.named.get("pid") != process_id():
                break
            # This process holds it, but no object does: another thread is collecting the object that did, whose weak
            # references end before its lock.
            time.sleep(0.002)
        raise refused

    def check(self, storage: Storage) -> None:
        """Raise WriterLostError unless this object may still write."""
        if self._lock is not None and process_id() != self._pid:
            self._fail("forked")
        if self.lost:
            self._fail(self.lost)
        self.require_place(storage)
        if storage.state("term") != self.term:
            self.lost = "fenced"
            self._fail("fenced")

    def glance(self, storage: Storage) -> None:
        """Do what `check` does, but look at the path only every `LOOK_SECONDS`: for many calls a second."""
        now = time.monotonic()
        unsure = now - self._looked > LOOK_SECONDS or self._lock is None or self.lost
        if unsure or storage.maps.state.item(_TERM) != self.term:
            self.check(storage)
            self._looked = now

    def require_place(self, storage: Storage) -> None:
        """Raise WriterLostError unless the folder that was opened still stands at its path."""
        if not storage.in_place:
            self.lost = "moved"
            self._fail("moved")

    @property
    def mine(self) -> bool:
        """Whether this object, in this process, may still write."""
        return self.is_held and process_id() == self._pid and not self.lost

    def poison(self) -> None:
        self.lost = "poisoned"

    def release(self) -> None:
        """Let go of the lock; twice is fine, and in a forked child the parent keeps it."""
        try:
            self._let_go()
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self._lock is not None and process_id() == self._pid:
            self._lock.release()
        self._lock = None
        self._folder.let_go()

    def _fail(self, reason: str) -> None:
        raise WriterLostError(f"{self._folder.path}: this object may not write: {_REMEDY[reason]}", reason=reason)


def _with_holder(error: BufferLockedError, folder: Folder) -> BufferLockedError:
    """The error, with the name of the writer that holds the lock, as far as state.npy tells."""
    if not folder.exists("schema.json"):
        return error
    storage = Storage(folder)
    try:
        pid, since = storage.state("pid"), storage.state("time")
        host = storage.maps.state[_HOST : _HOST + 8].tobytes().rstrip(b"\0").decode(errors="replace")
        when = datetime.datetime.fromtimestamp(since / 1e9).isoformat(sep=" ", timespec="seconds")
    except (MemmapBufferError, OSError, ValueError, OverflowError):  # damaged; the lock is held all the same
        return error
    return BufferLockedError(
        f"{folder.path} has another writer: process {pid} on {host}, since {when}; wait for it, stop it, or write "
        "to a folder of your own and read both with ConcatBuffer",
        path=folder.path,
        pid=pid,
        host=host,
        since=since,
    )
