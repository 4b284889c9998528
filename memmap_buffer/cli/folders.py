"""Opening the folders that commands read, and making new files and folders.

A new file or folder appears when it is whole: it is made under a temporary name in the same folder, and renamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memmap_buffer import ReplayBuffer, shards_at
from memmap_buffer.adapters import Verify, is_url, put_when_whole
from memmap_buffer.cli.minimal import agreed, say, shards_of
from memmap_buffer.cli.terminal import Problem


def opened(place: Path | str, *, verify: Verify = "auto") -> ReplayBuffer:
    """The buffer of a folder, or of the URL of a published folder, opened for reading; `with` closes it.

    Raises:
        Problem: the URL is that of a root.
        NotABufferError: there is no buffer in the folder; for a root `minimal.explained` adds what to do.
    """
    if is_url(place) and (names := _published_at(str(place))):
        raise Problem(f"this is the URL of a root of {len(names)} folders: name one behind it: {', '.join(names)}")
    return ReplayBuffer.from_folder(place, read_only=True, verify=verify)


def folders_at(place: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """The paths, or URLs, of the folders in a root; [] if `place` is a single folder."""
    if not is_url(place):
        return list(map(str, shards_of(Path(place))))
    root, mark, query = place.partition("?")
    return [f"{root.rstrip('/')}/{name}{mark}{query}" for name in _published_at(place, storage_options)]


def name_of(place: str) -> str:
    """The last part of a path or URL."""
    return place.partition("?")[0].rstrip("/").rpartition("/")[2] if is_url(place) else Path(place).resolve().name


def _published_at(url: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    return [name for name in shards_at(url, storage_options=storage_options) if name]


def disk_use(folder: Path) -> tuple[int, int]:
    """(bytes that the files of a folder take on the disk, their sizes, which include holes)."""
    statuses = [path.lstat() for path in list(folder.rglob("*")) if not path.is_symlink() and path.is_file()]
    return sum(status.st_blocks * 512 for status in statuses), sum(status.st_size for status in statuses)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill in the block; it is renamed to `target` at the end, and removed if the block fails.

    Raises:
        Problem: `target` exists.
    """
    require_new(target)
    with put_when_whole(target, replace=True) as new:  # an empty folder, at most
        (new / target.name).mkdir()
        yield new / target.name


@contextmanager
def new_file(out: Path, yes: bool) -> Iterator[Path]:
    """A path for the block to write a file or folder at; it is moved to `out` at the end. Asks before replacing a file.

    Raises:
        Problem: the user did not agree, or `out` is a folder.
    """
    if out.is_dir():
        raise Problem(f"{out}: there is a folder already; give a new name")
    if out.exists() and not agreed(f"Replace {out}?", yes):
        raise Problem(f"{out}: it is there already, and was left as it is")
    if not out.parent.is_dir():
        raise Problem(f"{out}: there is no folder {out.parent}; make it first")
    with put_when_whole(out, replace=True) as new:
        yield new / out.name
    say(f"wrote {out}")


def require_new(target: Path) -> None:
    """Raise Problem unless `target` is missing or an empty folder."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise Problem(f"{target}: there is something already; give a new folder")
