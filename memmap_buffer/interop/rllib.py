"""RLlib: import of the files that its offline recording writes (`config.offline_data(output=…)`); needs no Ray.

RLlib writes Parquet files, `output/<env>/run-<worker>-<number>/*.parquet`: a row for each step, or a row for each
packed piece of an episode (`output_write_episodes`). Pieces of an episode may lie in several files, and without
`output_max_rows_per_file` every run repeats all rows of the runs before. No pickle is loaded, neither of packed nor of
compressed columns.

`memmap_buffer.interop.rllib_offline` gives a folder to RLlib.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer import Field, ReplayBuffer, SchemaError
from memmap_buffer.adapters import IfExists, Names, Target, equal_rows, extra, flatten, import_episodes, path_of
from memmap_buffer.interop.columns import InferredFields
from memmap_buffer.interop.episodes import episode_bounds
from memmap_buffer.interop.safe_pickle import array_loads

with extra("rllib"):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow.compute import list_value_length

Columns = dict[str, Any]

OURS = {"obs": "observation", "actions": "action", "rewards": "reward"}  # RLlib's column -> field
ENDS = ("terminateds", "truncateds")
RENAMED = {**OURS, "terminateds": "terminated", "truncateds": "truncated", "new_obs": "next"}
LEFT_OUT = {"eps_id", "agent_id", "module_id", "infos", "t"}
REQUIRED = ("obs", "actions", "rewards")
ROWS = 1 << 14  # so many rows of a file are in memory at once
PACKED = "item"
LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)


def import_rllib(
    source: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    if_exists: IfExists = "error",
    infos: bool | Sequence[str] = True,
    outputs: bool | Sequence[str] = True,
    **options: Any,
) -> ReplayBuffer:
    """Copy the episodes that RLlib recorded into a folder, with their final observations.

    The files are read twice, first for their dtypes. Fields are observation, action, reward, terminated, truncated;
    `info.<key>`, the infos that the step returned; and the outputs of the model by their own names, such as
    `action_logp`. The meta field `episode_id` is RLlib's id. If rows of an episode are missing, as RLlib does not write
    all of its files, the episode is stored in parts. A part before a gap, and an episode whose recording stopped,
    neither terminates nor is truncated.

    Args:
        source: a Parquet file, or a folder, whose subfolders are read, too.
        folder: where the buffer is made; see `ReplayBuffer`.
        if_exists: what to do if something is in the folder: "error" raises; "resume" goes on with an import of this
            source that was interrupted; "overwrite" replaces it when the import is whole.
        infos: True: import the infos that every step has; False: none; or a list of keys. Only packed episodes have
            infos.
        outputs: True: import the outputs that every step has; False: none; or a list of names.
        options: of `ReplayBuffer`; by default `max_episodes` and `max_timesteps` are as many as the episodes need.

    Returns:
        The buffer, open for writing.

    Raises:
        SchemaError: there is no Parquet file, columns are missing, an info or output that is named is not in every
            step, or no field can hold a value.
        ImportError: pyarrow is not installed; or msgpack for packed episodes, or lz4 for compressed columns.
    """
    target, place = Target.checked(folder, if_exists, options), path_of(source)
    columns, lengths, names, width = InferredFields("column"), [], Names(), 32  # the width of RLlib's own ids
    for episode in _episodes(place, names):
        columns.add({name: value for name, value in episode.items() if name != "episode_id"})
        lengths.append(len(episode["reward"]))
        width = max(width, len(episode["episode_id"]))
    kept = [name for name in columns.fields if _wanted(name, columns, infos, outputs, names)]
    keys = {_key(name, names) for name in kept}
    if missing := [key for wanted in (infos, outputs) if not isinstance(wanted, bool) for key in {*wanted} - keys]:
        raise SchemaError(f"{place}: not every step has {sorted(missing)}; there are {[*columns.fields]}")
    fields = {
        name: Field(field.dtype, field.shape, final=name.split(".")[0] == "observation")
        for name, field in columns.fields.items()
        if name in kept
    }
    return import_episodes(
        target,
        ({name: episode[name] for name in (*kept, "episode_id")} for episode in _episodes(place, names)),
        fields,
        {"episode_id": f"U{width}"},
        lengths=lengths,
        source=place,
        asked={"infos": infos, "outputs": outputs},
        names=names,
    )


def _wanted(name: str, columns: InferredFields, infos: bool | Sequence[str], outputs: Any, names: Names) -> bool:
    """Whether a column becomes a field."""
    group = name.split(".")[0]
    if group in RENAMED.values():
        return True
    chosen = infos if group == "info" else outputs
    chosen_here = chosen if isinstance(chosen, bool) else _key(name, names) in chosen
    return columns.counts[name] == columns.episodes and chosen_here


def _key(name: str, names: Names) -> str:
    """The key of an info, or the name of an output."""
    path = names.path(name)
    return str(path[1] if path[0] == "info" else path[0])


# Episodes, joined from the pieces in which they were recorded


def _episodes(place: Path, names: Names) -> Iterator[Columns]:
    """Episodes as `store_episode` takes them, in the order of their ends; episodes without an end come last."""
    unfinished: dict[str | None, Columns] = {}
    ended: set[str] = set()
    for files in _runs(place):
        pieces: dict[str | None, list[Columns]] = {}
        for name, piece in (pair for file in files for pair in _pieces(file, names)):
            if name in ended:
                continue
            pieces.setdefault(name, []).append(piece)
            if piece["terminated"][-1] or piece["truncated"][-1]:
                yield from _parts(name, _continued(unfinished.pop(name, None), pieces.pop(name)))
                if name is not None:
                    ended.add(name)
        unfinished |= {name: _continued(unfinished.get(name), added) for name, added in pieces.items()}
    for name, episode in unfinished.items():
        yield from _parts(name, episode)


def _runs(place: Path) -> list[list[Path]]:
    """The files of each folder; folders and files are in the order of the numbers in their names."""
    files = [place] if place.is_file() else sorted(place.rglob("*.parquet"), key=_numbered)
    if not files:
        raise SchemaError(f"{place}: there is no Parquet file; give the folder that RLlib's `output` names")
    return [list(group) for _, group in groupby(files, key=lambda path: path.parent)]


def _numbered(path: Path) -> Path:
    """A key that sorts paths by the numbers in their names: 10 comes after 9."""
    return Path(re.sub(r"\d+", lambda number: number[0].zfill(20), str(path)))


def _continued(episode: Columns | None, pieces: Sequence[Columns]) -> Columns:
    """An episode continued by the pieces of another run, which may begin with all of the episode's rows again."""
    added = _joined(pieces)
    if episode is None:
        return added
    count = len(episode["reward"])
    again = {
        name: value[:count] for name, value in added.items() if name in episode and value.dtype == episode[name].dtype
    }
    repeats = len(added["reward"]) >= count and equal_rows({name: episode[name] for name in again}, again).all()
    return added if repeats else _joined([episode, added])


def _joined(pieces: Sequence[Columns]) -> Columns:
    """Pieces joined one after another, with the columns that all of them have."""
    names = [name for name in pieces[0] if all(name in piece for piece in pieces)]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in names}


def _parts(name: str | None, episode: Columns) -> Iterator[Columns]:
    """An episode, cut where rows are missing, with the observation that follows the last row of each part."""
    following = {f"observation{key[4:]}": value for key, value in episode.items() if key.split(".")[0] == "next"}
    columns = {key: value for key, value in episode.items() if key.split(".")[0] not in ("next", "t")}
    cuts = np.zeros(len(columns["reward"]), np.bool_)
    if following:
        after = {key: value[:-1] for key, value in following.items()}
        cuts[:-1] |= ~equal_rows(after, {key: columns[key][1:].astype(value.dtype) for key, value in after.items()})
    if "t" in episode:
        cuts[:-1] |= np.diff(episode["t"]) != 1
    for start, stop in episode_bounds(cuts):
        part = {key: value[start:stop] for key, value in columns.items()}
        last = {key: np.concatenate([part[key], value[stop - 1 : stop]]) for key, value in following.items()}
        yield part | last | {"episode_id": name or ""}


# Files


def _pieces(path: Path, names: Names) -> Iterator[tuple[str | None, Columns]]:
    """(id, columns) of the pieces in a file: a piece is neighbouring rows of one episode."""
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise SchemaError(f"{path}: it is no Parquet file ({error}); leave it out") from error
    with file:
        packed = file.schema_arrow.names == [PACKED]
        if not packed and (missing := [name for name in REQUIRED if name not in file.schema_arrow.names]):
            raise SchemaError(
                f"{path}: it has no column {missing[0]!r}, there are {file.schema_arrow.names}; rename them as RLlib's"
            )
        for batch in file.iter_batches(ROWS):
            if packed:
                for item in batch.column(0).to_pylist():
                    yield from _unpacked(path, item, names)
            else:
                yield from _pieces_of_rows(path, batch, file.schema_arrow, names)


def _pieces_of_rows(path: Path, batch: Any, schema: Any, names: Names) -> Iterator[tuple[str | None, Columns]]:
    count = batch.num_rows
    ids = batch.column("eps_id").to_pylist() if "eps_id" in batch.schema.names else [None] * count
    tree = {}
    for name in batch.schema.names:
        column = batch.column(name)
        if column.null_count and name in REQUIRED:
            raise SchemaError(f"{path}: column {name!r} has no value in some rows; leave them out")
        if name not in LEFT_OUT and not column.null_count:
            tree[RENAMED.get(name, name)] = _values(path, name, column, schema.field(name))
    columns = flatten(names.ours(tree))
    for end in ("terminated", "truncated"):
        columns[end] = columns.get(end, np.zeros(count)).astype(np.bool_)
    cuts = columns["terminated"] | columns["truncated"]
    cuts[:-1] |= np.array([before != after for before, after in pairwise(ids)], np.bool_)
    for start, stop in episode_bounds(cuts):
        yield ids[start], {name: value[start:stop] for name, value in columns.items()}


def _values(path: Path, name: str, column: Any, field: Any) -> Any:
    """A column as an array (n, …); a struct as a dict of arrays. Raises SchemaError if no field can hold the values."""
    about = field.metadata or {}
    kind, shape = about.get(b"ARROW:extension:name", b"").decode(), None
    if isinstance(column, pa.ExtensionArray):  # once Ray is imported, pyarrow knows its types
        kind, shape, column = column.type.extension_name, getattr(column.type, "shape", None), column.storage
    elif kind:
        shape = _shape(about.get(b"ARROW:extension:metadata", b""))
    if pa.types.is_struct(column.type) and not kind:
        parts = zip(column.type, column.flatten(), strict=True)
        return {part.name: _values(path, name, values, part) for part, values in parts}
    if pa.types.is_string(column.type) and name in ("obs", "new_obs", "actions"):
        return np.stack([_decompressed(path, name, text) for text in column.to_pylist()])
    sizes: list[int] = []
    while isinstance(column.type, LISTS):
        size = len(column.flatten()) // max(1, len(column))
        if (list_value_length(column).to_numpy(zero_copy_only=False) != size).any():
            kind = "lists of several lengths"
            break
        sizes, column = [*sizes, size], column.flatten()
    if pa.types.is_nested(column.type) or pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        raise SchemaError(
            f"{path}: column {name!r} is of {kind or column.type}, which no field holds; "
            f"record whole episodes (output_write_episodes=True)"
        )
    values = column.to_numpy(zero_copy_only=False)
    values = values.astype(str) if values.dtype == object else values
    return values.reshape(-1, *(shape or sizes)) if sizes else values


def _shape(serialized: bytes) -> list[int] | None:
    """The shape of a tensor that Ray stored as a list, from the parameters of its type; None if they are no JSON."""
    try:
        parameters = json.loads(serialized)
    except ValueError:
        return None
    shape = parameters.get("shape") if isinstance(parameters, dict) else parameters
    return shape if isinstance(shape, list) else None


def _decompressed(path: Path, name: str, text: str) -> Any:
    """A value of a column of `output_compress_columns`: base64 of LZ4 of a pickled array."""
    with extra("rllib"):
        import lz4.frame
    try:
        return array_loads(lz4.frame.decompress(base64.b64decode(text)))
    except (SchemaError, ValueError, RuntimeError) as error:
        raise SchemaError(f"{path}: column {name!r} is text, but no compressed array ({error})") from error


# Packed episodes


def _unpacked(path: Path, item: bytes, names: Names) -> Iterator[tuple[str, Columns]]:
    """(id, columns) of a packed `SingleAgentEpisode`, if it has a step. Reads without RLlib and without pickle."""
    with extra("rllib"):
        import msgpack
    try:
        state = msgpack.unpackb(item, object_hook=_decoded)
        rewards = np.asarray(_own(state["rewards"]), np.float64)
        length, start = len(rewards), int(state["t_started"])
        if length:
            outputs = state["extra_model_outputs"] or {}
            tree = {name: _own(values) for name, values in outputs.items()}
            tree |= {"observation": _own(state["observations"]), "action": _own(state["actions"])}
            following = state["infos"]["data"][state["infos"]["lookback"] :][1:]
            tree |= {"reward": rewards, "info": _infos(following)}
            ends = {end: bool(state[f"is_{end}"]) for end in ("terminated", "truncated")}
            yield str(state["id_"]), _piece(flatten(names.ours(tree)), length, start, ends)
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise SchemaError(f"{path}: it holds an episode that cannot be read ({error!r}); leave it out") from error


def _piece(columns: Columns, length: int, start: int, ends: Mapping[str, bool]) -> Columns:
    observed = {name: columns.pop(name) for name in [*columns] if name.split(".")[0] == "observation"}
    columns |= {name: value[:length] for name, value in observed.items()}
    columns |= {f"next{name[11:]}": value[1 : length + 1] for name, value in observed.items()}
    last = np.arange(length) == length - 1
    return columns | {end: last & ended for end, ended in ends.items()} | {"t": np.arange(start, start + length)}


def _decoded(value: Any) -> Any:
    """The array or number that msgpack_numpy packed. Arrays of objects, which it would unpickle, are refused."""
    if b"nd" in value:
        array = np.frombuffer(value[b"data"], np.dtype(value[b"type"]))
        return array.reshape(value[b"shape"]) if value[b"nd"] else array[0]
    return complex(value[b"data"]) if b"complex" in value else value


def _own(state: Mapping[str, Any]) -> Any:
    """The values of an `InfiniteLookbackBuffer` as arrays, without its lookback, which belongs to the piece before."""
    values, start = state["data"], int(state["lookback"])
    return _cut(values, start) if state["finalized"] else _together(values[start:])


def _cut(tree: Any, start: int) -> Any:
    """The arrays of a structure from step `start` on; dicts and tuples as a dict of arrays."""
    if isinstance(tree, Mapping):
        return {name: _cut(value, start) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):  # of a tuple space
        return {f"item{i}": _cut(value, start) for i, value in enumerate(tree)}
    return tree[start:]


def _together(values: Sequence[Any]) -> Any:
    """Values of one structure, one for each step, as an array; dicts and tuples as a dict of arrays."""
    first = values[0] if len(values) else None
    if isinstance(first, Mapping):
        return {name: _together([value[name] for value in values]) for name in first}
    if isinstance(first, (list, tuple)):
        return {f"item{i}": _together([value[i] for value in values]) for i in range(len(first))}
    return np.asarray(values)


def _infos(infos: Sequence[Mapping[str, Any]]) -> Columns:
    """Key -> array of the infos that every step has and that an array can hold."""
    shared = [key for key in infos[0] if all(key in info for info in infos)] if infos else []
    return {key: column for key in shared if (column := _info([info[key] for info in infos])) is not None}


def _info(values: Sequence[Any]) -> Any:
    simple = all(isinstance(value, (bool, int, float, str, np.ndarray, np.generic)) for value in values)
    alike = len({(np.shape(value), isinstance(value, str)) for value in values}) == 1
    column = np.asarray(values) if simple and alike else None
    return None if column is None or column.dtype == object else column
