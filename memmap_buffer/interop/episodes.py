"""What importers, exporters and trainers' buffers share: storing and reading whole episodes, and facts of a data set.

Facts of a data set that are no field are JSON documents in the folder's `extra/`, which `pack` and `snapshot` copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EEXIST
from itertools import chain, islice, pairwise
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np

from memmap_buffer import (
    ConcatBuffer,
    CorruptBufferError,
    Field,
    MemmapBufferError,
    ReplayBuffer,
    Schema,
    SchemaError,
    Trajectory,
)
from memmap_buffer.adapters import AnyPath, Names, path_of, progress
from memmap_buffer.interop.columns import BoolArray, IntArray
from memmap_buffer.interop.target import Target, origin_of

NAMES = "names"
KINDS = {"U": "text", "c": "complex numbers"}  # `kind` of a NumPy dtype -> its name in errors


def import_episodes(
    target: Target,
    episodes: Iterable[Mapping[str, Any] | Iterator[Mapping[str, Any]]],
    fields: Mapping[str, Any] | Schema,
    meta_fields: Mapping[str, Any] | None = None,
    *,
    lengths: Sequence[int],
    source: AnyPath | None = None,
    asked: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
    names: Names | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ReplayBuffer:
    """Store episodes in a new buffer, which appears in its folder when it is whole.

    Args:
        target: the folder, and the caller's options of `ReplayBuffer`.
        episodes: each as for `ReplayBuffer.store_episode`, or an iterator of its parts, each as for
            `Episode.extend`. With `if_exists="resume"` episodes that are stored already are skipped; their iterators
            of parts are not begun.
        fields: as for `ReplayBuffer`.
        meta_fields: as for `ReplayBuffer`.
        lengths: of the episodes, in steps.
        source: the file or folder that they come from; None: an interrupted import leaves nothing and is not resumed.
        asked: the importer's arguments that change which episodes the source gives.
        sizes: default options of `ReplayBuffer`, which `target.options` override; None: as large as the episodes need.
        names: the changed keys, to be stored for exports.
        extra: name -> JSON value, to be stored in the folder's `extra/`.

    Returns:
        The buffer, open for writing.

    Raises:
        SchemaError: something is in the way, the source changed during the import, or it is not the source of the
            import that is to be resumed.
    """
    sizes = sizes or {"max_episodes": len(lengths), "max_timesteps": max([1, *lengths])}
    arguments = {"fields": fields, "meta_fields": meta_fields, **sizes, **target.options}

    def origin() -> dict[str, Any] | None:
        arguments = {**(asked or {}), **target.options}
        return None if source is None else origin_of(path_of(source), lengths, arguments)

    begun = origin()
    if target.is_whole(begun):
        return ReplayBuffer(target.folder, **arguments)
    with target.filling(arguments, begun, lengths) as buffer:
        for name, value in (extra or {}).items():
            write_extra(buffer, name, value)
        done = buffer.num_episodes
        for episode in progress(islice(episodes, done, None), "episodes", len(lengths) - done):
            _store(buffer, episode)
        if names is not None:
            write_names(buffer, names)
        if origin() != begun:
            raise SchemaError(f"{source}: it changed while it was imported; import it again, by if_exists='overwrite'")
        return target.put(buffer, arguments)


def _store(buffer: ReplayBuffer, episode: Mapping[str, Any] | Iterator[Mapping[str, Any]]) -> None:
    parts = iter([episode]) if isinstance(episode, Mapping) else episode
    first, second = next(parts), next(parts, None)
    if second is None:
        buffer.store_episode(**first)
        return
    with buffer.one_episode() as opened:
        for part in chain([first, second], parts):
            opened.extend(**part)


def exported_episodes(buffer: ReplayBuffer) -> ExportedEpisodes:
    """The whole episodes that a buffer has now, see `ExportedEpisodes`."""
    there = buffer.episodes(fields=(), include_metadata=False, return_indices=True)
    return ExportedEpisodes(buffer, there["_index"], there["_lens"])


@dataclass(frozen=True)
class ExportedEpisodes:
    """Episodes to be exported, the oldest first, whatever a writer does meanwhile; an iteration reads them.

    Each is given as (its rows among the timesteps of all episodes, its columns by dotted name). A column of lists is an
    array of objects, each the array of one list. StaleEpisodeError is raised if an episode is overwritten before it is
    read.

    Attributes:
        buffer: the buffer.
        serials: (episodes,) int64; of several folders (episodes, 2), the number of the folder before.
        lengths: (episodes,) int64, in steps.
    """

    buffer: ReplayBuffer
    serials: IntArray
    lengths: IntArray

    def __len__(self) -> int:
        return len(self.serials)

    @property
    def num_steps(self) -> int:
        """The number of timesteps of all episodes."""
        return int(self.lengths.sum())

    def __iter__(self) -> Iterator[tuple[range, dict[str, Any]]]:
        schema, start = self.buffer.schema, 0
        if not len(self):
            return  # a data set of nothing would be refused
        items = self.buffer.dataset(
            view=Trajectory(final_observation=True),
            filter_fields=with_excluded(self.buffer),
            on_stale="raise",
            format="numpy",
        )
        placed = zip(self.serials.reshape(len(self), -1).tolist(), self.lengths.tolist(), strict=True)
        for place, length in progress(placed, "episodes", len(self)):
            item = items.at([place])[0]
            has_final = item.pop("_has_final") and item["_lens"] == length  # not if it has become longer since
            del item["_lens"]
            columns = schema.flatten(item)
            for name, field in schema.fields.items():
                columns[name] = columns[name][: length + (field.final and has_final)]
            yield range(start, start + length), columns
            start += length


@contextmanager
def put_when_whole(*places: Path, replace: bool = False) -> Iterator[Path]:
    """A new folder in which the block makes files and folders by the names of `places`; at its end each is moved there.

    After an error or a kill nothing is at the places that would look like the whole of it. A kill leaves the new
    folder, which is hidden.

    Args:
        places: of files and folders in one folder, which is made if it is missing. The block need not make all of them;
            they are moved in this order.
        replace: whether a file that is at its place already is replaced; a link stays, and the file it leads to is.

    Raises:
        FileExistsError: something is at a place already, or came to it during the block.
    """

    def require_new() -> None:
        for place in () if replace else places:
            _require_nothing(place)

    def with_places(text: str) -> str:
        for place in places:
            text = text.replace(str(new / place.name), str(place))
        return text.replace(str(new), str(places[0].parent))

    require_new()
    with _folder_beside(places[0]) as new:
        try:
            yield new
            require_new()
            for place in places:
                made = new / place.name
                if replace and made.exists():
                    made.replace(place.resolve())
                elif made.exists():
                    _put(made, place)
        except (MemmapBufferError, OSError) as error:
            _reword(error, with_places)  # it names the new folder
            raise


@contextmanager
def _folder_beside(place: Path) -> Iterator[Path]:
    """A hidden folder in the folder of a place. At the end it is removed, and folders made for it that are empty."""
    parent = place.resolve().parent
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        try:
            new = Path(mkdtemp(prefix=f".{place.name[:50]}.", dir=parent))  # 255 bytes at most, as UTF-8, too
        except OSError as error:
            error.filename = str(place)
            raise
        try:
            yield new
        finally:
            rmtree(new, ignore_errors=True)
    finally:
        for folder in missing:
            with suppress(OSError):  # it is not empty, or was not made
                folder.rmdir()


def _require_nothing(place: Path) -> None:
    if place.exists() or place.is_symlink():
        raise FileExistsError(EEXIST, "it exists already; give a new name", str(place))


def _put(made: Path, place: Path) -> None:
    """Move a file or folder to its place, unless something came to it meanwhile."""
    try:
        if made.is_dir():
            made.rename(place)  # onto an empty folder at most
        else:
            place.hardlink_to(made)
    except OSError:
        _require_nothing(place)
        made.rename(place)  # the file system has no links; any other error is raised again


def _reword(error: Exception, change: Callable[[str], str]) -> None:
    """Change the texts that an error is told by."""
    error.args = tuple(change(part) if isinstance(part, str) else part for part in error.args)
    for name in ("strerror", "filename"):
        if isinstance(text := getattr(error, name, None), str):
            with suppress(AttributeError):  # PyAV's errors look for their `filename` in `args`
                setattr(error, name, change(text))


def ends_of(schema: Schema, episode: Mapping[str, Any], length: int) -> tuple[BoolArray, BoolArray]:
    """(terminated, truncated), (length,) bool each, of the fields that the schema declares to end episodes.

    Args:
        schema: of the buffer; an end that it does not declare is False at every step.
        episode: columns by dotted names.
        length: of the episode.
    """
    terminated, truncated = (
        np.zeros(length, bool) if name is None else np.asarray(episode[name]).reshape(length) != 0
        for name in (schema.terminated, schema.truncated)
    )
    return terminated, truncated


def require_storable(
    buffer: ReplayBuffer, format_name: str, *, needs: Iterable[str], places: Mapping[str, str], kinds: str = ""
) -> None:
    """Raise SchemaError unless a format has a place for every field of a buffer.

    Args:
        buffer: the buffer.
        format_name: for the error.
        needs: fields, and not groups of fields, that must be there.
        places: as for `require_places`.
        kinds: as for `require_kinds`.
    """
    for name in needs:
        if name not in buffer.schema.fields:
            raise SchemaError(
                f"{buffer.folder}: it has no field {name!r}, which {format_name} needs flat; flatten or rename it"
            )
    require_kinds(buffer.schema.fields, format_name, kinds)
    require_places(places, format_name)


def require_kinds(fields: Mapping[str, Field], format_name: str, kinds: str = "", *, lists: bool = False) -> None:
    """Raise SchemaError if a format has no place for a field.

    Args:
        fields: the fields to be written.
        format_name: for the error.
        kinds: the kinds of NumPy's dtypes that the format lacks: "U" text, "c" complex numbers.
        lists: whether the format has lists of any length.
    """
    for name, field in fields.items():
        what = (
            "lists" if field.is_list and not lists else KINDS[field.entries.kind] if field.entries.kind in kinds else ""
        )
        if what:
            raise SchemaError(
                f"field {name!r}: got {field.dtype} {field.shape}, and {format_name} has no {what}; export a copy "
                "without it (`snapshot`, then `drop_field`)",
                field=name,
            )


def require_places(places: Mapping[str, str], format_name: str, own: Iterable[str] = ()) -> None:
    """Raise SchemaError if a field has the place of another one, or one within it.

    Args:
        places: name of a field -> its place in a file of the format; "a/b" lies within "a".
        format_name: for the error.
        own: the places at which the format has something else.
    """
    holders = {place: f"field {name!r}" for name, place in reversed([*places.items()])}
    holders |= dict.fromkeys(own, f"what {format_name} counts itself")
    for name, place in places.items():
        within = [place[:end] for end, letter in enumerate(place) if letter == "/"]
        for part in (place, *within):
            if holders.get(part, f"field {name!r}") != f"field {name!r}":
                where = f"as {holders[part]} is" if part == place else f"within {holders[part]}"
                raise SchemaError(
                    f"field {name!r}: it would be {place!r} in {format_name}, {where}; export a copy in which one has "
                    "another name (`snapshot`, then `rename_field`)",
                    field=name,
                )


def episode_bounds(ends: Any) -> list[tuple[int, int]]:
    """(first row, row after the last) of each episode in flat arrays.

    Args:
        ends: (rows,) bool, true at the last row of an episode; the very last row ends an episode in any case.
    """
    stops = np.union1d(np.flatnonzero(ends) + 1, len(ends)).tolist()
    return list(pairwise([0, *stops])) if len(ends) else []


# Buffers of trainers


def opened(folder: Any) -> Any:
    """The buffer of a folder, opened for reading; a buffer that is open already is returned as it is."""
    is_open = isinstance(folder, ReplayBuffer | ConcatBuffer)
    return folder if is_open else ReplayBuffer.from_folder(folder, read_only=True)


def with_excluded(buffer: Any) -> dict[str, Any]:
    """The `filter_fields` by which timesteps are read that the field `valid` would exclude."""
    field = buffer.schema.fields.get("valid")
    return {} if field is None or field.dtype != "bool" else {"valid": {True, False}}


# Facts of a data set


def write_extra(buffer: ReplayBuffer, name: str, value: Any) -> None:
    """Store a value that JSON can hold as `extra/<name>.json`; the file is replaced whole or not at all."""
    path = _path(buffer, name)
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".json.new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(path)


def read_extra(buffer: ReplayBuffer, name: str) -> Any:
    """The value of `extra/<name>.json`; None if there is no such file.

    Raises:
        CorruptBufferError: the file holds no JSON.
    """
    path = _path(buffer, name)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptBufferError(f"{path}: {error}; remove it to go on without", path=path) from error


def read_names(buffer: ReplayBuffer, fixed: Mapping[str, Any] | None = None) -> Names:
    """The stored `Names`: the keys that importers changed into names of fields; `fixed` as for `Names`."""
    return Names(read_extra(buffer, NAMES), fixed)


def write_names(buffer: ReplayBuffer, names: Names) -> None:
    """Store the changed keys of `names`, so that every export restores them."""
    if names.changed != (read_extra(buffer, NAMES) or {}):
        write_extra(buffer, NAMES, names.changed)


def _path(buffer: ReplayBuffer, name: str) -> Path:
    return buffer.folder / "extra" / f"{name}.json"
