"""OGBench's npz files, import and export: flat arrays of steps; a row with `terminals` holds an episode's last state.

Such a row becomes the final observation. Its action was never carried out, and OGBench's own loader leaves that action
out, too: it is not imported, and is exported as zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile

from memmap_buffer import Field, ReplayBuffer, SchemaError
from memmap_buffer.adapters import AnyPath, Array, IfExists, Names, path_of
from memmap_buffer.interop.columns import dtype_of
from memmap_buffer.interop.episodes import (
    exported_episodes,
    import_episodes,
    put_when_whole,
    read_names,
    require_kinds,
)
from memmap_buffer.interop.target import Target

NAMES = {"observation": "observations", "action": "actions", "reward": "rewards"}
OF_ACTIONS = frozenset({"action", "reward"})  # fields that have no final entry


def import_ogbench(path: AnyPath, folder: AnyPath, *, if_exists: IfExists = "error", **options: Any) -> ReplayBuffer:
    """Copy an OGBench file into a folder, cut into its episodes; the whole file is in memory during the import.

    Every array is imported, and must have a row for each step: `observations` and `actions` as `observation` and
    `action`, others, such as `qpos`, by their names. The last step of an episode is `truncated`: OGBench's data sets
    have no other end.

    Args:
        path: the file.
        folder: where the buffer is made; see `ReplayBuffer`.
        if_exists: what to do if something is in the folder: "error" raises; "resume" goes on with an import of this
            source that was interrupted; "overwrite" replaces it when the import is whole.
        options: of `ReplayBuffer`; by default `max_episodes` and `max_timesteps` are as many as the episodes need.

    Returns:
        The buffer, open for writing.

    Raises:
        SchemaError: the path is no such file, or an episode has no step.
    """
    target = Target.checked(folder, if_exists, options)
    arrays = _read(path_of(path))
    ends = np.flatnonzero(arrays.pop("terminals"))
    names = Names(fixed=NAMES)
    columns = {names.named(key.split(".")): array for key, array in arrays.items()}
    count = len(columns["observation"])
    for name, array in columns.items():
        if array.ndim < 1 or len(array) != count:
            raise SchemaError(f"{path}: {name} has shape {array.shape}, expected {count} rows", field=name)
    starts = np.concatenate([[0], ends + 1])
    if not ends.size or ends[-1] != count - 1 or (np.diff(starts) < 2).any():
        raise SchemaError(f"{path}: expected terminals at the last of {count} rows, and two rows or more an episode")
    fields = {name: Field(a.dtype, a.shape[1:], final=name not in OF_ACTIONS) for name, a in columns.items()}
    bounds = list(zip(starts[:-1].tolist(), ends.tolist(), strict=True))

    def episode(start: int, end: int) -> dict[str, Any]:
        rows = {name: array[start : end + (name not in OF_ACTIONS)] for name, array in columns.items()}
        return {**rows, "truncated": np.arange(start, end) == end - 1}

    return import_episodes(
        target,
        (episode(start, end) for start, end in bounds),
        {**fields, "truncated": "bool"},
        lengths=[end - start for start, end in bounds],
        source=path,
        names=names,
    )


def export_ogbench(buffer: ReplayBuffer, path: AnyPath) -> None:
    """Copy a buffer into a new file in OGBench's layout; all its fields are in memory during the export.

    Args:
        buffer: with the fields `observation` (with `final`) and `action`; other fields with `final` are copied, too.
        path: the file; one that is there already is replaced.

    Raises:
        SchemaError: a field is missing or of lists, or an episode has no final observation.
    """
    schema = buffer.schema
    wanted = [name for name in schema.fields if name in schema.final_names or name in OF_ACTIONS]
    if not {"observation", "action"} <= set(wanted) or "observation" not in schema.final_names:
        raise SchemaError(
            f"{buffer.folder}: it has the fields {', '.join(schema.fields)}, expected `observation` with final=True, "
            "and `action`"
        )
    require_kinds({name: schema.fields[name] for name in wanted}, "OGBench")
    episodes = exported_episodes(buffer)
    count = episodes.num_steps + len(episodes)
    out = {name: np.zeros((count, *schema.fields[name].shape), dtype_of(schema.fields[name])) for name in wanted}
    terminals = np.zeros(count, np.float32)
    for i, (rows, episode) in enumerate(episodes):
        if len(episode["observation"]) == len(rows):
            raise SchemaError(f"episode {i}: it has no final observation, and OGBench needs one; leave it out")
        for name, column in out.items():
            column[rows.start + i : rows.start + i + len(episode[name])] = episode[name]
        terminals[rows.stop + i] = 1
    names = read_names(buffer, NAMES)
    named: dict[str, Any] = {names.key(name): column for name, column in out.items()}
    place = path_of(path)
    with put_when_whole(place, replace=True) as new, (new / place.name).open("wb") as file:  # to a path numpy adds .npz
        np.savez_compressed(file, **named, terminals=terminals)


def _read(path: Path) -> dict[str, Array]:
    try:
        with NpzFile(path) as archive:  # type: ignore[arg-type]  # it takes a path, too
            arrays: dict[str, Array] = {name: np.asarray(archive[name]) for name in archive}  # none of objects
    except (BadZipFile, ValueError) as error:
        raise SchemaError(f"{path}: it is no npz file of plain arrays ({error})") from error
    if missing := {"observations", "actions", "terminals"} - arrays.keys():
        raise SchemaError(f"{path}: it has no {', '.join(sorted(missing))}; it has {', '.join(arrays)}")
    return arrays
