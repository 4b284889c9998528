"""`Publisher`: what recorders leave in a root goes to a store, shard by shard, beside the recording.

A shard is a folder `<host>-<12 hexadecimal digits>-<number>`, named apart from those of every other recorder, as hosts
that share nothing publish to one root. It is recorded by one process, which holds its lock, and never written to again
afterwards. So any shard whose lock is free is to be published: by whoever recorded it, by the next recorder of its
root if that was killed, or by another one that runs there. It goes by its own name and id, so publishing it twice lists
it once. Then it is moved to `published/`; what stands beside that is what was not published yet.
"""

from __future__ import annotations

import datetime
import logging
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from memmap_buffer.dtypes import check_count
from memmap_buffer.errors import BufferLockedError, CorruptBufferError, MemmapBufferError, RemoteError, SchemaError
from memmap_buffer.format import creation
from memmap_buffer.format.folder import PUBLISHED, UPDATE, Folder
from memmap_buffer.format.host import host_name
from memmap_buffer.format.layout import Layout, new_id
from memmap_buffer.format.lock import Turn, WriterLock
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import process_id
from memmap_buffer.maintenance.publish import publish, require_fields
from memmap_buffer.paths import url_of
from memmap_buffer.remote.layout import ROOT
from memmap_buffer.remote.objects import Objects
from memmap_buffer.writing.writer import WriteOptions, Writer

WAIT_SECONDS, WAIT_PAUSE = 60.0, 0.1  # for another recorder that is publishing a shard of a recorder that is closed
REMOVALS = 8  # a folder is removed again where a thread that had found it took its lock, a new file, meanwhile
START_SECONDS = 5.0  # in which the store says whether it has shards of other fields, else recording begins all the same
log = logging.getLogger("memmap_buffer")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*-[0-9a-f]{12}-[0-9]{5,}")


class Publisher:
    """Publishes the shards of a root that nobody records any more.

    Args:
        root: the folder that they are in.
        url: of the root in the store.
        every: of so many episodes, or from so much time, is a shard; None: of as many as it has room for.
        keep: how many of those that are published stay in `published/`, the newest; None: all.
        storage_options: for the file system of fsspec.
        layout: of the shards.

    Attributes:
        turn: see `Turn.lock`; held by whoever writes to a shard through the recorder, whichever shard that is by now.

    Raises:
        SchemaError: an argument is not what it must be, or nothing can be written by this protocol.
        SchemaMismatchError: the root in the store has shards of other fields.
    """

    def __init__(
        self,
        root: Path,
        url: str,
        every: int | datetime.timedelta | None,
        keep: int | None,
        storage_options: Mapping[str, Any] | None,
        layout: Layout,
    ) -> None:
        self._every: int | None = None
        self._seconds: float | None = None
        if isinstance(every, datetime.timedelta):
            self._seconds = every.total_seconds()
            if self._seconds <= 0:
                raise SchemaError(f"publish_every: got {every!r}, expected more than no time")
        elif every is not None:
            check_count("publish_every", every)
            self._every = every
        if keep is not None:
            check_count("keep_published", keep, 0)
        url = url_of(url)
        objects = Objects(url, storage_options)
        if not objects.writable:
            raise SchemaError(f"publish_to: nothing can be written to {objects}; give the URL of the store itself")
        if objects.local is not None and objects.local.resolve().is_relative_to(root.resolve()):
            raise SchemaError(f"publish_to: {objects} is in the root {root} of the recorder; give a folder elsewhere")
        away: Exception | None = None  # what the store failed by
        try:  # at once, as nothing is recorded yet
            asked = Objects(url, storage_options, tries=1, timeout=START_SECONDS)
            require_fields(asked, f"what is recorded to {root}", layout)
        except (RemoteError, CorruptBufferError) as error:
            away = error
            log.warning("%s: recording begins, and is published later: %s", root, error)
        self._root, self._url, self._keep, self._storage_options = root, url, keep, storage_options
        self._where = str(objects)
        host = re.sub(r"[^A-Za-z0-9.-]", "-", host_name().split(".")[0])[:64].lstrip("-.")
        self._prefix, self._number = f"{host or 'host'}-{uuid.uuid4().hex[:12]}", 0
        self._turn = Turn()
        self._process = process_id()
        self._begun = 0.0  # when the shard that is recorded was, by the clock of `time.monotonic`
        self._finished: list[Writer] = []
        self._ending, self._looking = threading.RLock(), threading.Lock()
        self._again = False
        self._is_away = isinstance(away, RemoteError)  # whether the store could not be reached the last time
        # Why shards wait, and how many do.
        self._last_report: tuple[set[str], int] = set() if away is None else {_reason(away)}, 0
        self._thread: threading.Thread | None = None
        self._timer: threading.Timer | None = None

    @property
    def turn(self) -> Any:
        return self._turn.lock

    def new_shard(self, layout: Layout, how: WriteOptions, verify: str, reserve: bool) -> Writer:
        """The writer of the next shard, which holds its lock; what fails or is interrupted leaves no folder."""
        self._number, self._begun = self._number + 1, time.monotonic()
        folder = Folder(self._root / f"{self._prefix}-{self._number - 1:05}")
        lock = WriterLock(folder)
        try:
            folder.create()
            lock.acquire()
            creation.create(folder, replace(layout, id=new_id()), reserve)
            writer = Writer(Storage.open(folder, verify=verify), lock, how)
            writer.begin()
            return writer
        except BaseException as error:
            _remove(folder.path)
            lock.release()
            if not isinstance(error, BufferLockedError):
                raise
        return self.new_shard(layout, how, verify, reserve)  # as another one looked whether a kill had left that

    def is_due(self, num_episodes: int) -> bool:
        """Whether the shard that is recorded, of so many episodes, has enough of them, or its time is over."""
        if self._every is not None:
            return num_episodes >= self._every
        return num_episodes > 0 and self._seconds is not None and not self._seconds_left()

    def _seconds_left(self) -> float:
        assert self._seconds is not None
        return max(0.0, self._begun + self._seconds - time.monotonic())

    def add(self, writer: Writer) -> None:
        """Take a shard that nothing more is recorded to, and publish it in a thread; twice is fine."""
        self._finished.append(writer)
        self.begin()

    def begin(self) -> None:
        """Publish what can be, in a thread; what fails is logged, and tried again the next time."""
        with self._looking:
            self._again = True
            if self._thread is None or not self._thread.is_alive():  # it may have been interrupted before its start
                self._thread = threading.Thread(target=self._work, name="memmap-buffer publish", daemon=True)
                self._start(self._thread)

    def begin_timer(self, call: Callable[[], None]) -> None:
        """Have this called in a thread when the time of the shard that is recorded is over, if it has one."""
        if self._seconds is not None:
            self._timer = threading.Timer(self._seconds_left() or self._seconds, call)
            self._timer.daemon = True
            self._start(self._timer)

    def _start(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # there are as many as there may be, or the program ends
            log.warning("%s: nothing is published before the next episodes, or `close`: %s", self._root, error)

    def flush(self) -> None:
        """Have what was recorded to finished shards on the disk.

        Raises: the first error of a shard; all are ended then, that one as a killed recorder leaves it.
        """
        with self._ending:
            failed = self._end_finished()
        if failed:
            raise failed[0]

    def _end_finished(self) -> list[Exception]:
        failed: list[Exception] = []
        while self._finished:
            try:
                self._finished[0].close()
            except (MemmapBufferError, OSError) as error:
                log.warning("%s: %s; it is published as it is", self._finished[0].storage.path, error)
                failed.append(error)
            del self._finished[0]
        return failed

    def close(self) -> None:
        """Publish what is left, and return when it is, by whomever.

        Raises: RemoteError: the store failed; which shards are not published. Another error of a shard likewise.
        """
        if self._process != process_id():
            return
        if self._timer is not None:
            self._timer.cancel()
        mine = [path for path in shards_in(self._root) if path.name.startswith(self._prefix)]
        if num_shards := sum(map(_has_episodes, mine)):
            text = f"{self._root}: closing: {num_shards} shards are left to be published to {self._where}"
            if self._is_away:
                log.warning("%s, which did not answer", text)
            else:
                log.info("%s", text)
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join()
        failed, until = self._publish_all(), time.monotonic() + WAIT_SECONDS
        while failed and all(_is_taken(error, path) for path, error in failed.items()) and time.monotonic() < until:
            time.sleep(WAIT_PAUSE)
            failed = self._publish_all()
        if failed:
            raise _unpublished_error(failed, self._root, self._where)

    def _work(self) -> None:
        while True:
            with self._looking:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            try:
                self._publish_all()
            except Exception:
                log.exception("%s: publishing to %s failed; it is tried again", self._root, self._where)

    def _publish_all(self) -> dict[Path, Exception]:
        """Publish all that can be; which shards of this recorder could not be, and which others failed, and why.

        Those of this recorder in their order: none before one that is still being written, or published elsewhere.
        A store that cannot be reached is found out by one shard: as long as it does not answer no other is tried.
        """
        with suppress(MemmapBufferError, OSError):  # which was logged
            self.flush()
        self._remove_unfinished()
        failed, taken = dict[Path, Exception](), set[Path]()
        away = self._asked() if self._is_away else None
        for path in shards_in(self._root):
            mine = path.name.startswith(self._prefix)
            try:
                if mine and any(other.name.startswith(self._prefix) for other in taken):
                    raise BufferLockedError(f"{path}: the shard before it is in use", path=path)
                self._publish(path, away)
            except (MemmapBufferError, OSError, ImportError) as error:
                if not Folder(path).exists("schema.json"):
                    continue  # another one has published it meanwhile
                if isinstance(error, RemoteError) and away is None:
                    away = self._asked()
                if _is_taken(error, path):
                    taken.add(path)
                if path not in taken or mine:
                    failed[path] = error
        self._is_away = away is not None
        self._tell({path: error for path, error in failed.items() if path not in taken})
        return failed

    def _tell(self, failed: Mapping[Path, Exception]) -> None:
        """Say why shards are not published, each reason once as long as it lasts; else how many they are."""
        reasons, count = self._last_report
        self._last_report = {_reason(error) for error in failed.values()}, len(failed)
        for path, error in failed.items():
            if _reason(error) not in reasons:
                log.warning("%s is not published to %s yet: %s", path, self._where, error)
                reasons, count = {*reasons, _reason(error)}, max(count, 1)
        if len(failed) > count:
            log.warning("%d shards are not published to %s yet", len(failed), self._where)

    def _remove_unfinished(self) -> None:
        """Remove what other recorders that were killed had made of a shard."""
        for path in (lock.parent for lock in self._root.glob("*/.lock")):
            is_others = _NAME.fullmatch(path.name) and not path.name.startswith(self._prefix)
            if is_others and not Folder(path).exists("schema.json"):
                with suppress(MemmapBufferError, OSError), Folder(path).locked():
                    if creation.is_unfinished(Folder(path)):
                        _remove(path)

    def _asked(self) -> RemoteError | None:
        """The error that the store fails by when it is asked for something small, once; None where it answers."""
        try:
            Objects(self._url, self._storage_options, tries=1).size(ROOT)
        except RemoteError as error:
            return error
        return None

    def _publish(self, path: Path, away: RemoteError | None) -> None:
        """Publish a shard.

        Args: away: what the store failed by, if it cannot be reached; raised where something had to be sent.
        Raises: BufferLockedError: somebody records it, or publishes it at this moment.
        """
        with Folder(path).locked():  # before anything else: a writer would take the place of one in this process
            interrupted = Folder(path).exists(UPDATE)
        if interrupted:
            with closing(Writer(Storage.open(path), WriterLock(Folder(path)), WriteOptions())) as writer:
                writer.begin()  # which does the update that a kill interrupted
        with Folder(path).locked():
            num_episodes = len(Storage.open(path, read_only=True).refresh())
            if num_episodes and away is not None:
                raise away
            if num_episodes and (left_out := publish(path, self._url, storage_options=self._storage_options)):
                log.warning("%s: published without the damaged episodes %s", path, left_out)
            (self._root / PUBLISHED).mkdir(exist_ok=True)
            path.rename(self._root / PUBLISHED / path.name)
        if not num_episodes:
            _remove(self._root / PUBLISHED / path.name)
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove those that are published beyond the newest ones."""
        if self._keep is None:
            return
        marks = {path: Folder(path).marks("schema.json") for path in (self._root / PUBLISHED).iterdir()}
        made = sorted((time, path) for path, (_, time, _) in marks.items() if _NAME.fullmatch(path.name))
        cut = [path for time, path in made if time < 0]  # by a kill in the middle of this
        whole = [path for time, path in made if time >= 0]
        for path in [*cut, *whole[: max(0, len(whole) - self._keep)]]:
            _remove(path)


def shards_in(root: Path) -> list[Path]:
    """The shards in a root, or in its `published/`, that a publisher named; by recorder and in their order."""
    return sorted(path.parent for path in root.glob("*/schema.json") if _NAME.fullmatch(path.parent.name))


def _has_episodes(path: Path) -> bool:
    """Whether a shard has something to publish; not one that was published, and moved, meanwhile."""
    try:
        return len(Storage.open(path, read_only=True, verify="never").refresh()) > 0
    except (MemmapBufferError, OSError):
        return False


def _is_taken(error: Exception, path: Path) -> bool:
    """Whether a shard is not published as another one has its lock."""
    return isinstance(error, BufferLockedError) and error.named.get("path") == path


def _reason(error: Exception) -> str:
    """Why something failed, whichever shard it was: without paths and URLs."""
    named = error.named if isinstance(error, MemmapBufferError) else {}
    return re.sub(r"\S*/\S*", "", f"{type(error).__name__}: {named.get('came', error)}")


def _remove(path: Path) -> None:
    (path / "schema.json").unlink(missing_ok=True)  # first, so that what a kill leaves is no buffer
    for _ in range(REMOVALS):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            break


def _unpublished_error(failed: Mapping[Path, Exception], root: Path, where: str) -> Exception:
    """The error that says which shards are not published."""
    first = next(iter(failed.values()))
    names = ", ".join([path.name for path in failed][:3]) + (f" and {len(failed) - 3} more" if len(failed) > 3 else "")
    text = (
        f"{root}: {len(failed)} shards are not published to {where} yet: {names}; they are whole there, and the next "
        f"recorder of that root, or `memmap-buffer publish`, sends them. The first failed by: {first}"
    )
    if not isinstance(first, MemmapBufferError):
        return MemmapBufferError(text)
    return type(first)(text, **first.named)
