"""The creation, the change of schema and the removal of a buffer: interrupted or killed anywhere, each leaves either a
whole buffer or remains that the next writer discards.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from memmap_buffer.errors import CorruptBufferError, SchemaError
from memmap_buffer.format.folder import UPDATE, Folder
from memmap_buffer.format.layout import BLOBS, MAX_SCHEMA_BYTES, Layout
from memmap_buffer.format.records import STATE_WORD
from memmap_buffer.format.syscalls import CAN_RESERVE, naming, write_word

LEFT_BEHIND = ("schema.json.new", "schema.json.old")
RESERVED = ("/episodes", "/state")  # readers look at every entry of these: a hole in a full tmpfs would kill them
log = logging.getLogger("memmap_buffer")


def create(folder: Folder, layout: Layout, reserve: bool = False) -> None:
    """Make a new, empty buffer in a folder whose lock is held. Killed before its end, it leaves no buffer.

    Args: reserve: take the disk space of every file now, so that no episode ever meets a full disk.
    Raises: CorruptBufferError: a file that is not ours is in the way. SchemaError: too large for the file system.
        OSError.
    """
    with creating(folder, layout, reserve):
        if reserve:
            state = layout.arrays["/state"]
            with folder.writing(state) as fd:
                write_word(fd, 1, state.offset(0) + 8 * STATE_WORD["reserved"])


@contextmanager
def creating(
    folder: Folder, layout: Layout, reserve: bool = False, only: Collection[str] | None = None
) -> Iterator[None]:
    """Make the files of a buffer, to be filled in the block; they are part of a buffer only when the block has ended.

    Args: only: the keys of the files to make, where the folder holds a buffer already; None: all.
    """
    discard_unfinished(folder)
    made = {key: array for key, array in layout.arrays.items() if only is None or key in only}
    arrays = list(made.values())
    folder.require_free(array.name for array in arrays)
    # `pack` makes its files of blobs too large, with room for timesteps that do not shrink, and cuts them in the end.
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
                folder.create_array(array, reserve or whole)
        with naming(folder.path):
            yield
        for array in arrays:
            folder.sync_array(array.name)
        folder.sync_folders(*{array.name.rpartition("/")[0] for array in arrays})
        folder.rename("schema.json.new", "schema.json")
    except BaseException:
        discard_unfinished(folder, mine)  # removes nothing once the schema was renamed
        raise


@contextmanager
def _claimed(mine: set[str], name: str) -> Iterator[None]:
    """Note in `mine` a file that the block makes, but not one that is there already, by a program without the lock."""
    mine.add(name)
    try:
        yield
    except CorruptBufferError:
        mine.remove(name)
        raise


def replace(folder: Folder, old: Layout, new: Layout, links: Mapping[str, str] | None = None) -> None:
    """Replace the schema of a buffer, and remove the files that only the old schema names.

    Args: links: name of a file in the old schema -> its name in the new one: a second link to the file.
    Raises: OSError: the file system has no such links. CorruptBufferError: a file that is not ours is in the way.
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
    """Remove the files that only `schema.json.new` or `.old` names: the remains of a creation or change of schema.

    Args: only: the names of files that may be removed; None: any.
    """
    for name in LEFT_BEHIND:
        with suppress(FileNotFoundError):
            _discard(folder, name, only)


def _discard(folder: Folder, schema: str, only: Collection[str] | None) -> None:
    kept = _listed(folder, "schema.json") if folder.exists("schema.json") else set()
    gone = {name for name in _listed(folder, schema) - kept if only is None or name in only}
    folder.unlink(*gone, missing_ok=True)
    # The files must be gone for good before their schema goes: without it nobody could tell whose they are.
    for sub in {name.rpartition("/")[0] for name in gone}:
        with suppress(FileNotFoundError, CorruptBufferError):  # the subfolder was never made, or is not ours
            folder.sync_folders(sub)
    folder.unlink(schema)


def is_unfinished(folder: Folder) -> bool:
    """Whether a folder whose lock is held contains only the remains of a killed creation of a buffer to record to."""
    new, names = LEFT_BEHIND[0], {".lock", LEFT_BEHIND[0]}
    if folder.exists("schema.json"):
        return False
    if folder.exists(new) and (layout := _layout(folder, new)) is not None:
        if not layout.writable:  # a packed copy that was interrupted: who calls again goes on with it
            return False
        names |= _files(layout)
    paths = (path for path in folder.path.rglob("*") if path.is_symlink() or not path.is_dir())
    return names.issuperset(path.relative_to(folder.path).as_posix() for path in paths)


def remove(folder: Folder) -> None:
    """Remove a buffer whose lock is held: it becomes a creation that was not finished, and is discarded as such."""
    _listed(folder, "schema.json")  # raises before anything is removed, if the schema does not tell the files
    discard_unfinished(folder)
    folder.unlink(UPDATE, f"{UPDATE}.bad", missing_ok=True)
    heads = (name for name in folder.list("priority") if name.endswith(".head.npy"))
    folder.unlink(*(f"priority/{name}" for name in heads))  # they name serials, which the next buffer counts from 0
    folder.rename("schema.json", "schema.json.new")
    discard_unfinished(folder)


def _listed(folder: Folder, name: str) -> set[str]:
    layout = _layout(folder, name)
    return set() if layout is None else _files(layout)


def _files(layout: Layout) -> set[str]:
    return {array.name for array in layout.arrays.values()}


def _layout(folder: Folder, name: str) -> Layout | None:
    """The layout that a schema file describes; None of a `.new` or `.old` one that a power cut tore."""
    data = folder.read(name, MAX_SCHEMA_BYTES)
    try:
        return Layout.from_json(data, name)
    except (CorruptBufferError, SchemaError):
        if name in LEFT_BEHIND and Layout.may_be_torn(data):
            return None  # no file was made by it: the schema is complete on the disk before the first one
        raise
