"""The folder that an import makes: filled beside its place, and renamed to its place when it is whole.

    .<name>.import/new    the new folder while it is filled; `if_exists="resume"` goes on with it
    .<name>.import/old    the folder that it replaces, for the moment between two renames

A kill between the two renames leaves both folders whole, and the next import of that name puts the old one back.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from memmap_buffer import (
    CorruptBufferError,
    MemmapBufferError,
    NotABufferError,
    ReplayBuffer,
    SchemaError,
    WriterLostError,
    verify,
)
from memmap_buffer.adapters import LOST, AnyPath, IfExists, check_choice, path_of

Origin: TypeAlias = dict[str, Any]

TOLD = "extra/import.json"  # the file of a folder's origin
REPLACES = "replaces"  # its key that says whether the import may replace the content of its place
ELSEWHERE = ("shard", "publish_to", "read_only")  # options of `ReplayBuffer` by which it fills another folder, or none
OF_A_BUFFER = {"schema.json", "episodes.npy", "state.npy", "checksums.npy", "data", "meta", "extra", "priority"}
OF_A_BUFFER |= {LOST}
CHOICES = (
    "give a new folder, if_exists='overwrite' to replace it when the import is whole, or if_exists='resume' to go on "
    "with an import that was interrupted"
)


@dataclass(frozen=True)
class Target:
    """The place of an import.

    Args:
        folder: the folder as the caller named it.
        place: its absolute path, with links resolved.
        if_exists: see `checked`.
        options: of `ReplayBuffer`.
    """

    folder: Path
    place: Path
    if_exists: IfExists
    options: Mapping[str, Any]

    @classmethod
    def checked(
        cls, folder: AnyPath, if_exists: IfExists = "error", options: Mapping[str, Any] | None = None
    ) -> Target:
        """A target that an import may fill. To be called before anything of the source is read.

        Args:
            folder: the folder of the new buffer; made if it is missing.
            if_exists: what to do if something is in the folder: "error", "resume" or "overwrite".
            options: of `ReplayBuffer`; `overwrite=True` means `if_exists="overwrite"`.

        Raises:
            SchemaError: something is in the folder that must not be replaced, or an argument is wrong.
        """
        check_choice("if_exists", if_exists, IfExists)
        buffer_options = dict(options or {})
        if wrong := [name for name in ELSEWHERE if buffer_options.get(name)]:
            raise SchemaError(
                f"{', '.join(wrong)}: an import fills one folder of its own; leave it out, and name a shard as the "
                "folder, as in root/shard-00000"
            )
        if buffer_options.pop("overwrite", False):
            if_exists = "overwrite"
        path = path_of(folder)
        target = cls(path, path.resolve(), if_exists, buffer_options)
        if target.place.is_mount():
            raise SchemaError(f"{path}: a disk is mounted there, so no folder can be put in its place; give one in it")
        target._settle()
        if target.exists:
            if if_exists == "error":
                raise target.in_the_way
            target._require_buffer()
        return target

    @property
    def exists(self) -> bool:
        """Whether something is at the place; an empty folder is nothing."""
        return self.place.exists() and (not self.place.is_dir() or any(self.place.iterdir()))

    @property
    def staged(self) -> Path:
        """The folder beside the place that is filled first."""
        return self._beside / "new"

    @property
    def in_the_way(self) -> SchemaError:
        """The error that something is at the place already."""
        return SchemaError(f"{self.folder}: there is something already; {CHOICES}")

    def is_whole(self, origin: Origin | None) -> bool:
        """Whether the import that is to be resumed was finished: its buffer is at its place.

        Raises:
            SchemaError: something else is at the place.
        """
        if self.if_exists != "resume" or not self.exists or self._replaces:
            return False
        earlier = _origin_in(self.place)
        if earlier is None:
            raise self.in_the_way
        self._require_same(earlier, origin)
        return True

    @contextmanager
    def filling(
        self, arguments: Mapping[str, Any], origin: Origin | None, lengths: Sequence[int]
    ) -> Iterator[ReplayBuffer]:
        """The staged buffer. The block fills it and calls `put`; after an error the import can be resumed.

        Args:
            arguments: of `ReplayBuffer`.
            origin: see `origin_of`; None: an error leaves nothing behind.
            lengths: of all episodes, in steps. If the buffer has episodes already, these are the first ones.

        Raises:
            SchemaError: with `resume`, the staged buffer is of another origin.
            CorruptBufferError: with `resume`, the staged buffer is damaged.
            BufferLockedError: another process fills it.
        """
        buffer = self._opened(arguments, origin, lengths)
        try:
            yield buffer
        except BaseException as error:
            self._keep(buffer, origin, error)
            raise
        finally:
            with suppress(WriterLostError):  # its folder was renamed or removed
                buffer.close()

    def put(self, buffer: ReplayBuffer, arguments: Mapping[str, Any]) -> ReplayBuffer:
        """Rename the filled folder to its place. Returns its buffer, opened anew; its lock is held all the time.

        Raises:
            SchemaError: something has come to the place that must not be replaced.
            BufferLockedError: another process writes to the buffer that is to be replaced.
        """
        buffer.flush()
        if self.place.is_dir():
            self.staged.chmod(self.place.stat().st_mode & 0o7777)
        if self.exists:
            self._replace()
        else:
            self.staged.rename(self.place)  # replaces an empty folder (rename(2))
        self._tidy()
        return _reopened(buffer, self.folder, arguments)

    def _opened(self, arguments: Mapping[str, Any], origin: Origin | None, lengths: Sequence[int]) -> ReplayBuffer:
        whole_episodes = {**arguments, "publish": "episode"}  # a killed import leaves no half of an episode
        if self._goes_on(origin, lengths):
            buffer = ReplayBuffer(self.staged, **whole_episodes)
            buffer.delete([])  # takes the lock
            return buffer
        replaces = self._replaces
        self._clear()
        try:
            buffer = _reopened(ReplayBuffer(self.staged, **arguments), self.staged, whole_episodes)
        except BaseException:
            self._clear()
            raise
        if origin is not None:
            (self.staged / TOLD).parent.mkdir(exist_ok=True)
            (self.staged / TOLD).write_text(json.dumps({**origin, REPLACES: replaces}), encoding="utf-8")
        return buffer

    def _goes_on(self, origin: Origin | None, lengths: Sequence[int]) -> bool:
        """Whether the import can be resumed: the staged buffer holds the first of these episodes, and no others."""
        earlier = _origin_in(self.staged) if self.if_exists == "resume" else None
        if earlier is None:
            return False
        self._require_same(earlier, origin)
        with ReplayBuffer.from_folder(self.staged, read_only=True) as there:
            if there.max_episodes < len(lengths) or (there.capacity or sum(lengths)) < sum(lengths):
                return False  # the ring may have dropped episodes, so their number does not say where to go on
        if lost := [finding for finding in verify(self.staged) if finding.lost]:
            raise CorruptBufferError(
                f"{self.staged}: {lost[0]}; import it from the beginning, by if_exists='overwrite'", path=self.staged
            )
        return True

    def _require_same(self, earlier: Origin, origin: Origin | None) -> None:
        other = [name for name, value in (origin or {}).items() if earlier.get(name) != value]
        if other:
            raise SchemaError(
                f"{self.folder}: the import to be resumed had other {' and '.join(other)}; give those of then, or "
                "import from the beginning, by if_exists='overwrite'"
            )

    @property
    def _replaces(self) -> bool:
        """Whether the import may replace the content of its place; a resumed import may if it was begun so."""
        origin = _origin_in(self.staged) if self.if_exists == "resume" else None
        return self.if_exists == "overwrite" or bool(origin and origin[REPLACES])

    def _keep(self, buffer: ReplayBuffer, origin: Origin | None, error: BaseException) -> None:
        """After an error: keep a staged buffer that can be resumed, with a note in `error`; remove any other."""
        count = 0 if origin is None else buffer.num_episodes
        if not count:
            with suppress(MemmapBufferError, OSError):
                self._clear()
        elif self.staged.exists() and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"{count} episodes are imported; if_exists='resume' goes on behind them")

    def _clear(self) -> None:
        """Remove the staged folder of an earlier import. Raises BufferLockedError if another process still fills it."""
        with suppress(NotABufferError, CorruptBufferError), _locked(self.staged):
            shutil.rmtree(self.staged)
        if self.staged.exists():
            shutil.rmtree(self.staged)
        self._tidy()

    def _replace(self) -> None:
        if not self._replaces:
            raise self.in_the_way
        self._require_buffer()
        with _locked(self.place):
            try:
                self.place.rename(self._old)
                self.staged.rename(self.place)
            finally:
                self._settle()

    def _settle(self) -> None:
        """Undo or complete a replacement that was interrupted."""
        if self._old.exists() and not self.exists:
            self._old.rename(self.place)
        shutil.rmtree(self._old, ignore_errors=True)
        self._tidy()

    def _tidy(self) -> None:
        with suppress(OSError):  # the folder is missing, or not empty
            self._beside.rmdir()

    def _require_buffer(self) -> None:
        """Raise SchemaError unless the place holds a buffer, and no other files, which would be removed with it."""
        if not (self.place / "schema.json").exists():
            raise SchemaError(f"{self.folder}: there is something already, and it is no buffer; give a new folder")
        names = {path.name for path in self.place.iterdir() if not path.name.startswith(".")}
        if foreign := sorted(names - OF_A_BUFFER):
            raise SchemaError(
                f"{self.folder}: {', '.join(foreign)}: not of the buffer there, and would be removed with it; move it "
                "away, or give a new folder"
            )

    @property
    def _beside(self) -> Path:
        return self.place.parent / f".{self.place.name}.import"

    @property
    def _old(self) -> Path:
        return self._beside / "old"


def origin_of(source: Path, lengths: Sequence[int], arguments: Mapping[str, Any]) -> Origin:
    """The facts that identify an import, as JSON: the files of its source, its episodes and its arguments."""
    names = [""] if source.is_file() else sorted(str(path.relative_to(source)) for path in source.rglob("*"))
    shown = [name for name in names if not re.search(r"(^|/)\.", name) and (source / name).is_file()]
    files = [(name, *_stamp(source / name)) for name in shown]
    return {
        "files": sha256(json.dumps([str(source.resolve()), files]).encode()).hexdigest(),
        "episodes": [len(lengths), sum(lengths)],
        "arguments": {name: repr(value) for name, value in sorted(arguments.items())},
    }


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _origin_in(folder: Path) -> Origin | None:
    """The origin of the import that filled a folder; None: there is none, or a kill came before its first episode."""
    try:
        origin: Origin = json.loads((folder / TOLD).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return origin


def _reopened(before: ReplayBuffer, folder: Path, arguments: Mapping[str, Any]) -> ReplayBuffer:
    """The buffer `before`, opened anew at its new place by other arguments; its lock is held all the time."""
    after = ReplayBuffer(folder, **arguments)
    after.delete([])  # takes the lock over
    before.close()
    return after


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A block that moves or removes a buffer's folder; no other process writes to the buffer meanwhile."""
    buffer = ReplayBuffer.from_folder(folder)
    try:
        if not buffer.read_only:
            buffer.delete([])  # takes the lock
        yield
    finally:
        with suppress(WriterLostError):  # the block moved or removed its folder
            buffer.close()
