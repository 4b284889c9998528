"""Who may write: the folder's lock, the epoch that fences a broken one, and the guards against fork and poison.

One object per process and folder holds the lock; a newer one takes it over unless an episode is open. Nothing here
touches episodes.
"""

from __future__ import annotations

import datetime
import weakref
from typing import Any

from memmap_buffer.errors import BufferLockedError, MemmapBufferError, WriterLostError
from memmap_buffer.store.files import process_id
from memmap_buffer.store.folder import Folder
from memmap_buffer.store.storage import Storage

# Which object of this process holds which folder. It must be known across objects: a second lock on the same file
# would wait for the first for ever (flock belongs to the open file, not to the process).
_holders: weakref.WeakValueDictionary[tuple[int, int], WriterLock] = weakref.WeakValueDictionary()

_REMEDY = {
    "forked": "a forked child may read, not write; open the buffer anew in the child, or write in the parent",
    "fenced": "another process took the folder over (the lock does not hold on this file system); reopen it",
    "taken over": "a newer object of this process writes to the folder now; use that one",
    "poisoned": "a barrier failed, so what was written may be lost; reopen the buffer, which checks it",
    "closed": "the buffer was closed; reopen it with from_folder",
    "moved": "its folder was moved, removed or overwritten, and what stands at the path is another; open that anew",
}


class WriterLock:
    """The right to write to one folder, which is held as long as this has its lock."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock: Any = None
        self._pid = 0
        self.epoch = 0
        self.open_episodes: set[Any] = set()
        self.lost = ""

    @property
    def held(self) -> bool:
        return self._lock is not None

    @property
    def in_use(self) -> bool:
        """Whether an object of this process holds the folder."""
        holder = _holders.get(self._folder.lock_key())
        return holder is not None and holder.mine

    def acquire(self) -> None:
        """Take the lock, from an older object of this process if need be.

        Raises: BufferLockedError: another process holds it, or an object of this one with an episode open that it can
            still publish.
        """
        if self.held:
            return
        self._folder.hold()
        try:
            self._acquire()
        finally:
            if not self.held:
                self._folder.let_go()

    def _acquire(self) -> None:
        key = self._folder.lock_key()
        holder = _holders.get(key)
        if holder is not None and holder.held and holder._pid == process_id():
            if holder.open_episodes and not holder.lost:
                raise BufferLockedError(
                    f"{self._folder.path}: another ReplayBuffer object of this process has an episode open; "
                    "finish that episode, or use that object",
                    path=self._folder.path,
                    pid=process_id(),
                )
            self._lock, holder._lock, holder.lost = holder._lock, None, "taken over"
        else:
            self._lock = self._take()
        self._pid = process_id()
        _holders[key] = self

    def _take(self) -> Any:
        try:
            return self._folder.lock()
        except BufferLockedError as error:
            raise _with_holder(error, self._folder) from None

    def check(self, storage: Storage) -> None:
        """Raise WriterLostError unless this object may still write."""
        if self._lock is not None and process_id() != self._pid:
            self._fail("forked")
        if self.lost:
            self._fail(self.lost)
        self.require_place(storage)
        if storage.state("epoch") != self.epoch:
            self.lost = "fenced"
            self._fail("fenced")

    def require_place(self, storage: Storage) -> None:
        """Raise WriterLostError where another folder than the one that was opened, or none, stands at the path."""
        if not storage.in_place:
            self.lost = "moved"
            self._fail("moved")

    @property
    def mine(self) -> bool:
        """Whether this object, in this process, may still write."""
        return self.held and process_id() == self._pid and not self.lost

    def poison(self) -> None:
        self.lost = "poisoned"

    def release(self) -> None:
        """Let go; twice is fine, and in a forked child it does nothing."""
        lock, self._lock = self._lock, None
        self._folder.let_go()
        if lock is not None and process_id() == self._pid:
            lock.release()

    def _fail(self, reason: str) -> None:
        raise WriterLostError(f"{self._folder.path}: this object may not write: {_REMEDY[reason]}", reason=reason)


def _with_holder(error: BufferLockedError, folder: Folder) -> BufferLockedError:
    """The same error, naming the holder as far as the folder tells."""
    if not folder.exists("schema.json"):
        return error
    storage = Storage(folder)
    try:
        pid, since = storage.state("pid"), storage.state("time")
        host = storage.maps.state[11:19].tobytes().rstrip(b"\0").decode(errors="replace")
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
