"""A consistent copy of a live buffer, taken without its lock. Writes nothing to the source.

`snapshot` is called by `api.buffer`. `pack` shares the parts that any copy needs: `new_copy` makes the new folder,
`visible` lists the episodes of one moment, `counters` and `write_counters` make its state.npy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError, SchemaMismatchError, StaleEpisodeError
from memmap_buffer.format import marks
from memmap_buffer.format.blobs import lengths_of
from memmap_buffer.format.creation import creating
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.layout import BLOBS, DICTIONARY, ArrayFile, Layout
from memmap_buffer.format.records import (
    CHECK,
    DELETED,
    FINAL,
    GENERATION,
    MAX_SERIAL,
    RECORD,
    STATE_WORD,
    Words,
    check_of,
)
from memmap_buffer.format.shards import require_new_place
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import close_all, copy_range, write_all, write_word

ROUNDS, FEW = 100, 5  # the most rounds of a copy; rounds after which `visible` is content with the older episodes
SUBFOLDERS = ("priority", "extra")  # copied file by file


def snapshot(source: Storage, path: Path) -> None:
    """Copy the visible episodes into a new folder; a writer may go on meanwhile.

    All episodes of the copy were visible together, at one moment during the call, and are as they were then. Episodes
    that a circular buffer overwrote before they were copied are left out: the oldest ones, as few as possible.

    Args:
        source: the folder, open.
        path: the new folder; no buffer may be there.

    Raises:
        SchemaMismatchError: there is a buffer at `path`; or the source was replaced by another buffer.
        SchemaError: the source is at a URL.
        StaleEpisodeError: the ring turns faster than one episode can be copied.
        OSError: the disk is full, say; then there is no buffer at `path`.
    """
    layout = source.layout
    if source.mirror is not None:  # of a folder at a URL, only what was read is on this disk
        url = source.where
        raise SchemaError(f"snapshot: got {url}, expected a folder on a disk; `pull({url!r}, {str(path)!r})` copies it")
    with new_copy(source, path, layout, SUBFOLDERS) as there:
        with source.folder.kept_open() as folder, _opened(folder.open_to_read, layout) as here:
            if not source.is_of(folder):
                raise SchemaMismatchError(
                    f"{source.path}: another buffer took its place; open it again with from_folder", path=source.path
                )
            for name in layout.dictionaries:
                array = layout.arrays[name + DICTIONARY]
                copy_range(here[name + DICTIONARY], there[name + DICTIONARY], array.offset(0), array.shape[0])
            for slot, record in _copy_slots(source, here, there).items():
                write_all(there["/episodes"], record, layout.arrays["/episodes"].offset(slot))
        words = counters(source) | {name: source.state(name) for name in ("term", "nonce", "changes")}
        if source.state("suspect") or source.first_unsettled is not None:  # in doubt here: in doubt in the copy, too
            words["suspect"] = words["next"]
        write_counters(there["/state"], layout, words)


@contextmanager
def new_copy(source: Storage, path: Path, layout: Layout, subfolders: Sequence[str]) -> Iterator[dict[str, int]]:
    """Create a new folder whose array files, key -> descriptor, are filled in the block; a buffer once the block ended.

    Args:
        source: the folder that is copied.
        path: the new folder.
        layout: its schema and sizes.
        subfolders: subfolders of the source, whose files are copied as they are.

    Raises: SchemaMismatchError: there is a buffer at `path`.
    """
    place = Folder(path)
    _require_none(place)
    place.create()
    with place.kept_open() as target, target.locked():
        _require_none(target)
        names = [f"{sub}/{name}" for sub in subfolders for name in source.folder.list(sub)]
        if target.exists("schema.json.new"):  # files of a copy that was killed
            target.unlink(*names, missing_ok=True)
        target.require_free(names)
        copied = list[str]()
        try:
            with creating(target, layout):
                with _opened(target.open_to_write, layout) as there:
                    yield there
                for name in names:
                    if name == marks.FILE and layout.id != source.layout.id:
                        data = source.folder.read(name, marks.MAX_BYTES)
                        target.write_new(name, marks.renamed(data, source.layout.id, layout.id), sync=True)
                    else:
                        source.folder.copy_file(name, target)
                    copied.append(name)
                target.sync_folders(*{name.partition("/")[0] for name in names})
        except BaseException:
            if not target.exists("schema.json"):
                target.unlink(*copied, missing_ok=True)
            raise


@contextmanager
def _opened(opener: Callable[[ArrayFile], int], layout: Layout) -> Iterator[dict[str, int]]:
    """Key -> file descriptor of each array file, open within the block."""
    opened: dict[str, int] = {}
    try:
        for key, array in layout.arrays.items():
            opened[key] = opener(array)
        yield opened
    finally:
        close_all(opened)


def _require_none(target: Folder) -> None:
    require_new_place(target)
    if target.exists("schema.json"):
        raise SchemaMismatchError(f"{target.path} holds a buffer already; give a folder without one", path=target.path)


def counters(source: Storage) -> dict[str, int]:
    """The words of the state.npy of a copy, by their names."""
    return {"next": _following(source), "changes": 1, "clean": 1, "term": 1}


def write_counters(fd: int, layout: Layout, words: dict[str, int]) -> None:
    """Write words of a state.npy, which is open as `fd`."""
    for name, value in words.items():
        write_word(fd, value, layout.arrays["/state"].offset(0) + 8 * STATE_WORD[name])


def _following(source: Storage) -> int:
    """The serial after the last published one."""
    table, stated = source.refresh(), source.state("next")
    least = int(table.serial[table.valid].max(initial=-1)) + 1
    return max(stated, least) if stated < MAX_SERIAL else least  # a higher word is damaged


def _copy_slots(source: Storage, here: dict[str, int], there: dict[str, int]) -> dict[int, bytes]:
    """Copy the episodes of one moment; returns slot -> record, as bytes.

    Each round copies the episodes that changed since the last round, and counts those that were overwritten during it.
    In a ring that turns faster than it is copied, some always are, so each round is content with fewer. `here` and
    `there`: key -> file descriptor, of the source and of the copy.
    """
    copied: dict[int, bytes] = {}
    for attempt in range(ROUNDS):
        table, slots = visible(source)
        words = source.maps.words[slots]
        whole = (words[:, GENERATION] == table.generation[slots]) & (words[:, CHECK] == check_of(words))
        for slot, word in zip(slots[whole].tolist(), words[whole], strict=True):
            record = word.tobytes()
            if copied.get(slot) != record:
                _copy_slot(source, word, slot, here, there)
                copied[slot] = record
        whole &= source.generations(slots) == table.generation[slots]
        enough = len(slots) * (1 - (attempt / ROUNDS) ** 3)
        oldest_left = not (whole[:-1] & ~whole[1:]).any()  # slots are by age; else one was changed in place
        may_end = oldest_left and whole.sum() >= enough and (whole.any() or not len(table))
        if may_end and _retired(source, table.serial[slots[~whole]]):
            return {slot: copied[slot] for slot in slots[whole].tolist()}
    raise StaleEpisodeError(
        f"{source.path}: the ring turns faster than it can be copied; pause its writer, or make the ring larger"
    )


def visible(source: Storage) -> tuple[EpisodeTable, IntArray]:
    """(an episode table, the slots (E,) of its episodes that were visible at one moment, by ascending serials).

    Reading a table takes time: it may have a new episode and lack the one before, whose slot was read too early. But of
    the serials below `next`, read before the table, none is missing: all were published by then. Only an episode under
    an `update` may be, which is waited for.
    """
    for attempt in range(ROUNDS):
        following = _following(source)
        table = source.refresh()
        slots = table.visible[table.serial[table.visible] < following]
        if _being_updated(source, table.serial[slots]):
            time.sleep(0.001)  # a dead writer's update does not end: its episode stays hidden until the next writer
        elif len(slots) == len(table) or (len(slots) and attempt >= FEW):
            break
    return table, slots


def _being_updated(source: Storage, serials: IntArray) -> bool:
    """Whether an `update` is changing an episode that is no older than the oldest of these serials."""
    words = source.maps.words
    words_before = words[words[:, GENERATION] & np.uint64(1) == 1]
    words_before[:, GENERATION] -= np.uint64(1)
    record = words_before.view(RECORD)[:, 0]
    shown = (words_before[:, CHECK] == check_of(words_before)) & (record["flags"] & DELETED == 0)
    return bool((record["serial"][shown] >= serials.min(initial=MAX_SERIAL)).any())


def _retired(source: Storage, serials: IntArray) -> bool:
    """Whether all episodes with these serials have left the ring; an episode that an `update` changed has not."""
    table = source.refresh()
    return bool((serials < table.serial[table.visible].min(initial=MAX_SERIAL)).all())


def _copy_slot(source: Storage, word: Words, slot: int, here: dict[str, int], there: dict[str, int]) -> None:
    """Copy the files' parts that belong to a slot: of rows and blobs, as many as its record `word` (8,) names."""
    layout, record = source.layout, word.view(RECORD)[0]
    for name, field in layout.schema.fields.items():
        first = int(source.first_row(np.array([slot]), field.final)[0])
        count = int(record["stop"]) + (field.final and bool(record["flags"] & FINAL))
        copy_range(here[name], there[name], layout.row_offset(name, first), count * field.in_file.itemsize)
        if name in layout.coded:
            used = _extent(source.maps.rows[name][first : first + count], layout, name, slot)
            begin = layout.arrays[name + BLOBS].offset(0) + used.start
            copy_range(here[name + BLOBS], there[name + BLOBS], begin, len(used))
    for name in ("/checksums", *layout.schema.meta_fields):
        array = layout.arrays[name]
        copy_range(here[name], there[name], array.offset(slot), array.offset(slot + 1) - array.offset(slot))


def _extent(index: Array, layout: Layout, name: str, slot: int) -> range:
    """The byte range of an episode's blobs, from their index (T, 2); bounded, should the index be damaged."""
    length = lengths_of(index)
    has_blob = length > 0
    if not has_blob.any():
        return range(0)
    packed = range(layout.blobs.get(name, 0))
    within = layout.region(name, slot) if layout.writable else packed
    begin = np.clip(index[has_blob, 0], within.start, within.stop)
    start, stop = int(begin.min()), int((begin + length[has_blob]).max())
    field = layout.coded[name]
    bound = within.stop if field.is_list else start + len(index) * field.itemsize
    return range(start, min(stop, within.stop, bound))
