"""`pack`: a dense, read-only copy of a buffer; `unpack`: a copy that can be written to. Writes nothing to the source.

Both call `_transfer`, which copies the rows of chosen episodes to a folder of another layout (a `_Plan` says where to),
and compares every checksum on the way; `join` does so with those of several folders. A writer may go on meanwhile: as
in every reader, the generations of the records are compared after the rows were copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.errors import CorruptBufferError, NotEnoughDataError, SchemaError, StaleEpisodeError
from memmap_buffer.format import marks
from memmap_buffer.format.checksums import checksum, checksum_row, digest_of
from memmap_buffer.format.episode_table import EpisodeTable, IntArray
from memmap_buffer.format.folder import Folder
from memmap_buffer.format.layout import Layout
from memmap_buffer.format.records import (
    CHECK,
    CHECKED,
    CUT,
    DELETED,
    FINAL,
    GENERATION,
    OPEN,
    RECORD,
    Words,
    check_of,
    seal,
)
from memmap_buffer.format.storage import Storage
from memmap_buffer.format.syscalls import write_all
from memmap_buffer.maintenance.recoding import DamagedError, Recoding, close_up, copy_rows
from memmap_buffer.maintenance.snapshot import ROUNDS, counters, new_copy, visible, write_counters
from memmap_buffer.paths import path_of
from memmap_buffer.progress import progress
from memmap_buffer.writing.validation import positions_of

Shape: TypeAlias = "Callable[[Layout, IntArray, int, Recoding], Layout]"
Part: TypeAlias = "tuple[Storage, EpisodeTable, IntArray]"  # a folder, its table, the slots of it that are copied


def pack(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    codec: Mapping[str, Any] | None = None,
    episodes: Any = None,
) -> list[int]:
    """Copy a buffer into a new folder that is read-only, dense and without holes: made to be kept and published.

    The copy has the episodes that were visible when the call began, each as it was at one moment of the call, with
    their serials, and is read like any other folder. The same episodes give the same bytes. Episodes that fail their
    checksums are left out with a warning, and so are the oldest of a ring that turns faster than they are copied.
    Priorities are not copied, as they are stored by slot. The `id` is that of the source; where `episodes` leaves some
    out, it is computed from that and from the episodes.

    Blobs of compressed fields are copied as they are, unless `codec` names the field: then its timesteps are decoded
    and encoded anew. What a lossy codec lost stays lost, and another lossy one loses more; one that the field has
    already is not applied again. For Zstandard, a dictionary is trained with a sample of all timesteps, and kept if it
    saves more bytes than it takes.

    Args:
        src: a folder of any layout; its writer may go on meanwhile.
        dst: the new folder; no buffer may be there.
        codec: field -> its codec in the copy, as in `Field`; None for raw. "zstd" has level 12 here, as a packed folder
            is written once. Fields that are not named keep theirs.
        episodes: positions: an int, list, array or slice; None for all, those that a ring has trimmed included.

    Returns:
        The serials that were left out; empty when all are there. After an error there is no buffer at `dst`.

    Raises:
        SchemaMismatchError: `dst` holds a buffer.
        NotEnoughDataError: there is no episode to copy.
        EpisodeIndexError: there is no such episode; an IndexError.
        StaleEpisodeError: episodes change faster than they are copied.
        SchemaError: `codec` names no field, or a codec that does not fit.
        ImportError: the package of a codec is not installed.
        OSError: the disk is full, say.
    """
    return _transfer(src, dst, episodes, codec, _dense)


def unpack(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    max_episodes: int | None = None,
    max_timesteps: int | None = None,
    *,
    codec: Mapping[str, Any] | None = None,
    episodes: Any = None,
    circular: bool = False,
    capacity: int | None = None,
    spare_slots: int = 1,
) -> list[int]:
    """Copy a buffer, packed or not, into a new folder that can be written to; serials go on from the highest.

    Args:
        src: as for `pack`.
        dst: as for `pack`.
        max_episodes: as for `ReplayBuffer`; None for that of the source.
        max_timesteps: as for `ReplayBuffer`; None for that of the source.
        codec: as for `pack`, but "zstd" has level 3, as for `Field`: episodes recorded later are compressed by it, too.
        episodes: as for `pack`.
        circular: as for `ReplayBuffer`.
        capacity: as for `ReplayBuffer`.
        spare_slots: as for `ReplayBuffer`.

    Returns:
        The serials that were left out, as `pack` does.

    Raises:
        SchemaError: a size is too small for the episodes, or as `pack` raises it.
        MemmapBufferError: as `pack` raises it.
        ImportError: as `pack` raises it.
        OSError: the disk is full, say.
    """

    def grid(source: Layout, lengths: IntArray, steps: int, recoding: Recoding) -> Layout:
        most = source.max_episodes if max_episodes is None else max_episodes
        longest = source.max_timesteps if max_timesteps is None else max_timesteps
        layout = recoding.layout(most, longest, spare_slots=spare_slots, circular=circular, capacity=capacity)
        needed = {"max_episodes": len(lengths), "max_timesteps": int(lengths.max()), "capacity": steps}
        for name, size in needed.items():
            limit = getattr(layout, name)
            if limit is not None and limit < size:
                raise SchemaError(
                    f"{name}: got {limit}, the episodes need {size}; give more, or fewer episodes by `episodes`"
                )
        return layout

    return _transfer(src, dst, episodes, codec, grid)


def _dense(source: Layout, lengths: IntArray, steps: int, recoding: Recoding) -> Layout:
    columns = len(source.schema.all)
    return recoding.layout(len(lengths), source.max_timesteps, int(lengths.sum()), spare_slots=0, columns=columns)


@dataclass(frozen=True)
class _Plan:
    """The places of a copy: the i-th episode goes to slot i of the new layout, its steps to the rows from `first` on.

    Attributes: sources: (n,) the folder of each. slots, serials, start, length, flags, first: (n,), in the order of the
        serials, as they were when it was made. recoding: how the fields of the copy are compressed. numbered: whether
        the i-th has the serial i there.
    """

    sources: list[Storage]
    slots: IntArray
    serials: IntArray
    start: IntArray
    length: IntArray
    flags: npt.NDArray[np.uint32]
    first: IntArray
    layout: Layout
    recoding: Recoding
    numbered: bool = False


class _Left(Exception):
    """Not all of a plan could be copied. Args: how many of its oldest episodes were overwritten before."""


def _transfer(
    src: str | PathLike[str], dst: str | PathLike[str], episodes: Any, codec: Mapping[str, Any] | None, shape: Shape
) -> list[int]:
    source = Storage.open(src, read_only=True, verify="never")  # each checksum is compared all the same
    table, slots = visible(source)
    chosen = slots if episodes is None else slots[table.start[slots] == 0]  # positions are those of whole episodes
    chosen = chosen[np.unique(positions_of(episodes, len(chosen))[0])]
    wanted = serials = table.serial[chosen]
    id = source.layout.id if len(chosen) == len(slots) else source.layout.part_id(wanted.tolist())
    recoding = Recoding.of(source, codec, chosen, dense=shape is _dense)
    for _ in range(ROUNDS):
        table, slots = visible(source)
        plan = _plan([(source, table, slots[np.isin(table.serial[slots], serials)])], recoding, shape, id)
        try:
            with _new_folder(plan, path_of(dst), {}) as there:
                _copy(plan, there)
        except _Left as left:
            # The files are made for all that were planned, so they are made anew; a ring that overtook the copy once
            # would do it again, so as many more of its oldest are not tried.
            serials = plan.serials[source.refresh().shows(plan.slots, plan.serials)]
            serials = serials[min(left.args[0], len(serials) - 1) :]
        else:
            return sorted({*wanted.tolist()} - {*plan.serials.tolist()})
    raise StaleEpisodeError(f"{source.path}: episodes change faster than they can be copied; pause the writer")


def join(sources: Sequence[Storage], dst: PathLike[str], id: str) -> None:
    """Copy the episodes of packed folders into a new one, in their order, with serials from 0 on.

    Args:
        sources: they have the same fields, with the same codecs and no dictionaries, and files in `extra/` that do not
            differ, but for marks.
        dst: where; no buffer may be there.
        id: of the new one.

    Raises:
        CorruptBufferError: an episode is damaged.
        OSError: the disk is full, say.
    """
    recoding = Recoding(sources[0].layout.schema, frozenset(), {})
    plan = replace(_plan([(source, *visible(source)) for source in sources], recoding, _dense, id), numbered=True)
    with _new_folder(plan, path_of(dst), {"next": len(plan.sources)}) as there:
        for i, source in enumerate(progress(plan.sources, "joining")):
            if not _copy_episode(plan, i, there):
                raise CorruptBufferError(
                    f"{source.where}: episode {plan.serials[i]} is damaged; publish the folder again", path=source.path
                )
    marked = {source: marks.Marks(source.folder).of(source.layout.id) for source in sources}
    named = enumerate(zip(plan.sources, plan.serials.tolist(), strict=True))
    kept = {i: marked[source][serial] for i, (source, serial) in named if serial in marked[source]}
    target = Folder(path_of(dst))
    target.unlink(marks.FILE, missing_ok=True)
    if kept:
        target.write_new(marks.FILE, marks.text_of({id: kept}), sync=True)


def _plan(parts: Sequence[Part], recoding: Recoding, shape: Shape, id: str) -> _Plan:
    """The plan of a copy that has this id."""

    def column(name: str) -> Any:
        return np.concatenate([getattr(table, name)[slots] for _, table, slots in parts])

    source, start, length = parts[0][0], column("start"), column("length")
    if not len(length):
        raise NotEnoughDataError(
            f"{source.path}: no episode is left to be copied; record some, or pause the writer of a ring that turns "
            "faster than it can be read"
        )
    longest = max(each.layout.max_timesteps for each, *_ in parts)
    layout = shape(replace(source.layout, max_timesteps=longest), length, int((length - start).sum()), recoding)
    layout = replace(layout, id=id, skips_resets=source.layout.skips_resets)
    first = np.cumsum(length) - length if layout.rows is not None else np.arange(len(length)) * layout.max_timesteps
    sources = [each for each, _, slots in parts for _ in slots]
    slots = np.concatenate([slots for *_, slots in parts])
    return _Plan(sources, slots, column("serial"), start, length, column("flags"), first, layout, recoding)


@contextmanager
def _new_folder(plan: _Plan, path: Path, words: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Create the folder of a plan, whose array files, key -> descriptor, are filled in the block.

    Args: words: those of its state.npy that differ from the ones of another copy.
    """
    source, layout = plan.sources[0], plan.layout
    with new_copy(source, path, layout, ("extra",)) as there:
        plan.recoding.write_dictionaries(layout, there)
        yield there
        write_counters(there["/state"], layout, {**counters(source), **words})
        if layout.rows is not None and layout.coded:
            _replace_schema(Folder(path), close_up(layout, there))


def _replace_schema(target: Folder, layout: Layout) -> None:
    """Have an unfinished copy be of another layout of the same files; killed here, it is discarded like any other."""
    target.write_new("schema.json.old", layout.to_json(), sync=True)
    target.rename("schema.json.old", "schema.json.new")


def _copy(plan: _Plan, there: dict[str, int]) -> None:
    """Copy the planned episodes of a folder, the oldest first, as a ring overwrites them first; again, if they were
    updated.

    Raises: _Left: an episode was overwritten before it was copied, or is damaged.
    """
    source = plan.sources[0]
    damaged = source.num_damaged
    copied = np.zeros(len(plan.slots), np.uint64)  # the generation of each when it was copied, 0 where it was not
    pending = np.arange(len(copied))
    for attempt in range(ROUNDS):
        for i in progress(pending.tolist(), "encoding" if plan.recoding.anew else "copying"):
            copied[i] = _copy_episode(plan, i, there)
        table = source.refresh()
        moved = table.generation[plan.slots] != copied
        pending = np.flatnonzero(moved & table.shows(plan.slots, plan.serials))
        if not len(pending):
            break
        time.sleep(attempt / 1000)  # an update is being carried out
    if not copied.all():
        raise _Left(int((copied == 0).sum()) - (source.num_damaged - damaged))


def _copy_episode(plan: _Plan, i: int, there: dict[str, int]) -> int:
    """Copy episode `i` of a plan; returns its generation, or 0 if it is damaged or was rewritten meanwhile."""
    source, slot = plan.sources[i], int(plan.slots[i])
    word = source.maps.words[slot].copy()
    record, generation = word.view(RECORD)[0], int(word[GENERATION])
    if generation & 1 or record["serial"] != plan.serials[i] or word[CHECK] != check_of(word[None])[0]:
        return 0
    planned, now, why = int(plan.flags[i]), int(record["flags"]), ""
    flags = (planned | CUT) & ~OPEN if planned & OPEN else now & ~DELETED  # an open episode ends at the planned length
    try:
        before, after = _copy_arrays(plan, i, bool(flags & FINAL), there)
    except DamagedError as error:
        before, after, why = {}, {}, str(error)
    is_checked = now & CHECKED and record["length"] == plan.length[i] and (now ^ planned) & OPEN == 0
    is_damaged = bool(why or (is_checked and source.mismatches(slot, now, before)))
    if source.maps.words[slot, GENERATION] != generation:
        return 0
    if is_damaged:
        if source.maps.words[slot, CHECK] == word[CHECK]:
            source.void([(slot, why)]) if why else source.check(np.array([slot]))
        return 0
    _write_record(plan, i, word, flags, after, there)
    return generation


def _copy_arrays(plan: _Plan, i: int, has_final: bool, there: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Copy an episode's rows and meta fields; returns the checksums by field, in the source and in the copy."""
    source, slot, length, before, after = plan.sources[i], plan.slots[i], int(plan.length[i]), {}, {}
    for name, field in plan.layout.schema.fields.items():
        first, row = int(source.first_row(slot[None], field.final)[0]), int(plan.first[i]) + i * field.final
        rows = range(first, first + length + (field.final and has_final))
        before[name], after[name] = copy_rows(source, name, rows, plan.recoding, plan.layout, i, row, there)
        if field.final and not has_final:  # the row exists all the same; zeros, not a hole
            empty = bytes(field.in_file.itemsize)
            write_all(there[name], empty, plan.layout.row_offset(name, row + length))
    for name in plan.layout.schema.meta_fields:
        value = source.maps.meta[name][slot : slot + 1]
        write_all(there[name], value, plan.layout.arrays[name].offset(i))
        before[name] = after[name] = checksum(value)
    return before, after


def _write_record(
    plan: _Plan, i: int, word: Words, flags: int, checksums: dict[str, int], there: dict[str, int]
) -> None:
    layout, record = plan.layout, word.view(RECORD)[0]
    row = checksum_row(layout, checksums)
    write_all(there["/checksums"], row, layout.arrays["/checksums"].offset(i))
    was_open = bool(record["flags"] & OPEN)  # the `round` of an open record is that of its first step
    values = {name: int(record[name]) for name in RECORD.names or ()} | {
        "serial": i if plan.numbered else int(record["serial"]),
        "generation": 2,
        "length": int(plan.length[i]),
        "start": int(plan.start[i]),
        "stop": int(plan.length[i]),
        "flags": flags | CHECKED,
        "first_row": int(plan.first[i]),
        "round": (int(record["round"]) + (int(plan.length[i]) - 1) * was_open) % 2**32,
        "digest": digest_of(row, layout.used_columns),
        "columns": layout.used_columns,
    }
    write_all(there["/episodes"], seal(**values), layout.arrays["/episodes"].offset(i))
