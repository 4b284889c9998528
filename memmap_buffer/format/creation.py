"""Making a buffer's files, and removing them: absent or complete, wherever it ends."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from memmap_buffer.errors import CorruptBufferError, SchemaError
from memmap_buffer.format.folder import UPDATE, Folder
from memmap_buffer.format.layout import BLOBS, MAX_SCHEMA_BYTES, Layout
from memmap_buffer.format.records import STATE_WORD
from memmap_buffer.format.syscalls import CAN_RESERVE, write_word

LEFT_BEHIND = ("schema.json.new", "schema.json.old")
RESERVED = ("/episodes", "/state")  # files whose every entry readers look at, which kills at a hole of a full tmpfs
log = logging.getLogger("memmap_buffer")


def create(folder: Folder, layout: Layout, reserve: bool = False) -> None:
    """Make a new, empty buffer in a folder whose lock is held. Killed anywhere, it leaves none.

    Args: reserve: take the disk space of every file now, so that no episode ever meets a full disk.
    Raises: CorruptBufferError: a file of another is in the way. SchemaError: too large for the file system. OSError.
    """
    with creating(folder, layout, reserve):
        if reserve:
            state = layout.arrays["/state"]
            with folder.writing(state.name, state.header, state.size) as fd:
                write_word(fd, 1, state.offset(0) + 8 * STATE_WORD["reserved"])


@contextmanager
def creating(
    folder: Folder, layout: Layout, reserve: bool = False, only: Collection[str] | None = None
) -> Iterator[None]:
    """The files of a new buffer, there to be filled in the block; it is a buffer only when the block has ended.

    Args: only: the keys of the files that are new, where the folder holds a buffer already.
    """
    discard_unfinished(folder)
    made = {key: array for key, array in layout.arrays.items() if only is None or key in only}
    arrays = list(made.values())
    folder.require_free(array.name for array in arrays)
    # `pack` makes files of blobs with room for timesteps that do not shrink, and cuts them in the end
    sure = [key for key in made if layout.rows is None or not key.endswith(BLOBS)]
    total, free = sum(map(layout.grown_bytes, sure)), folder.free_bytes()
    if total > free and not reserve:
        text = "%s: the buffer may grow to %.1f GB, %.1f GB are free here; writing raises ENOSPC when they are used up"
        log.warning(text, folder.path, total / 1e9, free / 1e9)
    folder.write_new("schema.json.new", layout.to_json(), sync=True)
    mine = set[str]()
    try:
        for key, array in made.items():
            whole = CAN_RESERVE and key in RESERVED
            with _claimed(mine, array.name):
                folder.create_array(array.name, array.header, array.size, reserve or whole)
        yield
        for array in arrays:
            folder.sync_array(array.name)
        folder.sync_folders(*{array.name.rpartition("/")[0] for array in arrays})
        folder.rename("schema.json.new", "schema.json")
    except BaseException:
        discard_unfinished(folder, mine)  # nothing, once it was renamed
        raise


@contextmanager
def _claimed(mine: set[str], name: str) -> Iterator[None]:
    """A file is made in the block; it is not ours where that failed as there is one, by who does not heed the lock."""
    mine.add(name)
    try:
        yield
    except CorruptBufferError:
        mine.remove(name)
        raise


def replace(folder: Folder, old: Layout, new: Layout, links: Mapping[str, str] | None = None) -> None:
    """Another schema in the place of a buffer's; what only the old one names goes.

    Args: links: file -> its other name, by which only the new one knows it.
    Raises: OSError: there are no second links to files. CorruptBufferError: a file of another is in the way.
    """
    discard_unfinished(folder)
    kept = {array.name for array in old.arrays.values()}
    folder.require_free(array.name for array in new.arrays.values() if array.name not in kept)
    folder.write_new("schema.json.old", old.to_json(), sync=True)
    try:
        folder.write_new("schema.json.new", new.to_json(), sync=True)
    except BaseException:
        folder.unlink("schema.json.old")
        raise
    mine, linked = set[str](), False
    try:
        for name, other in (links or {}).items():
            with _claimed(mine, other):
                folder.link(name, other)
        linked = True
        folder.rename("schema.json.new", "schema.json")
    finally:
        discard_unfinished(folder, None if linked else mine)


def discard_unfinished(folder: Folder, only: Collection[str] | None = None) -> None:
    """Remove what only a `schema.json.new` or `.old` names: what a creation or a change of the schema left behind.

    Args: only: the files of these that may be removed; default: all.
    """
    for name in LEFT_BEHIND:
        with suppress(FileNotFoundError):
            _discard(folder, name, only)


def _discard(folder: Folder, schema: str, only: Collection[str] | None) -> None:
    kept = _listed(folder, "schema.json") if folder.exists("schema.json") else set()
    gone = {name for name in _listed(folder, schema) - kept if only is None or name in only}
    for name in gone:
        folder.unlink(name, missing_ok=True)
    # Not before the files are gone for good: without it nobody could tell whose they are.
    for sub in {name.rpartition("/")[0] for name in gone}:
        with suppress(FileNotFoundError, CorruptBufferError):  # it was never made, or is not ours
            folder.sync_folders(sub)
    folder.unlink(schema)


def is_unfinished(folder: Folder) -> bool:
    """Whether a folder whose lock is held has nothing but what a kill left of a buffer to record to."""
    new, names = LEFT_BEHIND[0], {".lock", LEFT_BEHIND[0]}
    if folder.exists("schema.json"):
        return False
    if folder.exists(new) and (layout := _layout(folder, new)) is not None:
        if not layout.writable:  # a copy goes on where it was interrupted
            return False
        names |= _files(layout)
    paths = (path for path in folder.path.rglob("*") if path.is_symlink() or not path.is_dir())
    return names.issuperset(path.relative_to(folder.path).as_posix() for path in paths)


def remove(folder: Folder) -> None:
    """Remove a buffer whose lock is held: it becomes one that was never finished, and is discarded as such."""
    _listed(folder, "schema.json")  # refuse one that tells of no files
    discard_unfinished(folder)
    for name in (UPDATE, f"{UPDATE}.bad"):
        folder.unlink(name, missing_ok=True)
    for name in folder.list("priority"):
        if name.endswith(".head.npy"):  # it names serials, which begin anew
            folder.unlink(f"priority/{name}")
    folder.rename("schema.json", "schema.json.new")
    discard_unfinished(folder)


def _listed(folder: Folder, name: str) -> set[str]:
    layout = _layout(folder, name)
    return set() if layout is None else _files(layout)


def _files(layout: Layout) -> set[str]:
    return {array.name for array in layout.arrays.values()}


def _layout(folder: Folder, name: str) -> Layout | None:
    """The layout that a schema tells; None of one that a power cut tore."""
    data = folder.read(name, MAX_SCHEMA_BYTES)
    try:
        return Layout.from_json(data, name)
    except (CorruptBufferError, SchemaError):
        if name in LEFT_BEHIND and Layout.may_be_torn(data):
            return None  # it is complete on the disk before the first file is made
        raise
