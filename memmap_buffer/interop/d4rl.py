"""D4RL's HDF5 files, import and export: flat arrays of steps; `terminals` and `timeouts` say where episodes end.

`infos/<name>` becomes the field `info.<name>`. Texts and numbers in the file's `metadata/` are stored in
`extra/d4rl.json`; its arrays, such as the weights of the policy that recorded the file, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memmap_buffer import Field, ReplayBuffer, Schema, SchemaError
from memmap_buffer.adapters import AnyPath, IfExists, Names, extra, flatten, path_of
from memmap_buffer.interop.columns import as_text, dtype_of, with_final
from memmap_buffer.interop.episodes import (
    ends_of,
    episode_bounds,
    exported_episodes,
    import_episodes,
    put_when_whole,
    read_extra,
    read_names,
    require_storable,
)
from memmap_buffer.interop.target import Target

with extra("hdf5"):
    import h5py

STEPS = {"observations": "observation", "actions": "action", "rewards": "reward"}
REMEDY = "no episode ends there: pass max_episode_steps=… if the file has no timeouts"
ENDS = {"terminals": "terminated", "timeouts": "truncated"}  # array of the file -> end of a `Schema`


def import_d4rl(
    path: AnyPath,
    folder: AnyPath,
    *,
    if_exists: IfExists = "error",
    max_episode_steps: int | None = None,
    infos: bool = True,
    **options: Any,
) -> ReplayBuffer:
    """Copy a D4RL file into a folder, cut into its episodes.

    An episode ends where `terminals` or `timeouts` is true, and after `max_episode_steps`. Steps after the last end are
    an episode of their own, which neither terminated nor was truncated. If the file has `next_observations`, each
    episode gets its final observation.

    Args:
        path: the file.
        folder: where the buffer is made; see `ReplayBuffer`.
        if_exists: what to do if something is in the folder: "error" raises; "resume" goes on with an import of this
            source that was interrupted; "overwrite" replaces it when the import is whole.
        max_episode_steps: the time limit of the environment, for files without `timeouts`; its ends become `truncated`.
        infos: whether to import the arrays in `infos/`.
        options: of `ReplayBuffer`; by default `max_episodes` and `max_timesteps` are as many as the episodes need.

    Returns:
        The buffer, open for writing.

    Raises:
        SchemaError: arrays are missing or differ in length, or a row of `next_observations` within an episode is not
            the observation of the next step.
    """
    target = Target.checked(folder, if_exists, options)
    with h5py.File(path_of(path), "r") as file:
        names = Names()
        columns = _columns(file, infos, names)
        terminated = np.asarray(file["terminals"]).astype(bool)
        truncated = np.asarray(file["timeouts"]).astype(bool) if "timeouts" in file else np.zeros_like(terminated)
        if not len(terminated):
            raise SchemaError("terminals: got no steps, expected at least one")
        bounds = [
            (first, min(first + (max_episode_steps or stop), stop))
            for start, stop in episode_bounds(terminated | truncated)
            for first in range(start, stop, max_episode_steps or stop)
        ]
        has_final, where = "next_observations" in file, f"{file.filename}: next_observations"
        fields = {
            name: Field(array.dtype, array.shape[1:], final=has_final and name == "observation")
            for name, array in columns.items()
        }
        flags = {"terminated": "bool", "truncated": "bool"}

        def episode(start: int, stop: int) -> dict[str, Any]:
            rows = {name: array[start:stop] for name, array in columns.items()}
            if has_final:
                following = file["next_observations"][start:stop]
                rows["observation"] = with_final(where, rows["observation"], following, start, REMEDY)
            limit = truncated[start:stop].copy()
            limit[-1] |= stop - start == max_episode_steps and not terminated[stop - 1]
            return {**rows, "terminated": terminated[start:stop], "truncated": limit}

        return import_episodes(
            target,
            (episode(start, stop) for start, stop in bounds),
            {**fields, **flags},
            lengths=[stop - start for start, stop in bounds],
            source=path,
            asked={"max_episode_steps": max_episode_steps, "infos": infos},
            names=names,
            extra={"d4rl": _metadata(file.get("metadata", {}))},
        )


def export_d4rl(buffer: ReplayBuffer, path: AnyPath) -> None:
    """Copy a buffer into a new file in D4RL's layout.

    The last step of every episode that did not terminate is marked as a timeout; that of the last episode only if it
    was truncated. Of final observations only those of the field `observation` are written.

    Args:
        buffer: with the fields `observation` and `action`; fields that D4RL has no name for become infos.
        path: the file.

    Raises:
        SchemaError: observations are nested, only some episodes have their final one, a field is of text or lists, or
            two fields would be one array or one within the other.
        OSError: there is a file already.
    """
    keys = read_names(buffer)
    places = {name: f"infos/{keys.key(name, '/')}" for name in buffer.fieldnames if name not in buffer.schema.ends}
    places |= {name: "/".join(["infos", *map(str, keys.path(name)[1:])]) for name in places if name.startswith("info.")}
    places |= {ours: theirs for theirs, ours in STEPS.items() if ours in places}
    require_storable(buffer, "D4RL", needs=("observation", "action"), places=places, kinds="U")
    episodes, place = exported_episodes(buffer), path_of(path)
    with put_when_whole(place) as new, h5py.File(new / place.name, "x") as file:
        steps = episodes.num_steps
        for name, array in places.items():
            field = buffer.schema.fields[name]
            file.create_dataset(array, (steps, *field.shape), dtype_of(field))
        for array in ENDS:
            file.create_dataset(array, (steps,), bool)
        for rows, episode in episodes:
            _write_episode(file, buffer.schema, episode, places, rows.start, rows.stop, last=rows.stop == steps)
        for name, value in (read_extra(buffer, "d4rl") or {}).items():
            file[f"metadata/{name}"] = value


def _columns(file: Any, infos: bool, names: Names) -> dict[str, Any]:
    """Name of a field -> array in the file, all of one length."""
    for name in ("observations", "actions", "terminals"):
        if name not in file:
            raise SchemaError(
                f"{file.filename}: it has no {name!r}, so it is no file of D4RL; it has {', '.join(file)}"
            )
    for name in ("next_observations", *STEPS, *ENDS):
        if isinstance(file.get(name), h5py.Group):
            raise SchemaError(f"{file.filename}: {name!r} is a group, and D4RL has an array; it is no file of D4RL")
    columns = {ours: file[theirs] for theirs, ours in STEPS.items() if theirs in file}
    if infos and "infos" in file:
        columns |= flatten(names.ours({"info": file["infos"]}))
    count = len(file["observations"])
    for name, array in columns.items():
        if array.ndim < 1 or len(array) != count:
            raise SchemaError(
                f"{file.filename}: {name} has shape {array.shape}, expected {count} steps; import without infos"
            )
    return columns


def _metadata(group: Mapping[str, Any]) -> dict[str, Any]:
    """The texts and numbers in the file's `metadata/`, by their paths."""
    single = {name.replace(".", "/"): item[()] for name, item in flatten(group).items() if item.shape == ()}
    return {name: as_text(value) if isinstance(value, bytes) else value.item() for name, value in single.items()}


def _write_episode(
    file: Any, schema: Schema, episode: dict[str, Any], places: Mapping[str, str], start: int, stop: int, *, last: bool
) -> None:
    for name, place in places.items():
        file[place][start:stop] = episode[name][: stop - start]
    whole = episode["observation"]
    has_final = len(whole) > stop - start
    if start == 0 and has_final:
        file.create_dataset("next_observations", file["observations"].shape, whole.dtype)
    if has_final != ("next_observations" in file):
        what, before = ("a", "do not have") if has_final else ("no", "have")
        raise SchemaError(
            f"steps {start} to {stop}: {what} final observation, which the episodes before {before}; leave it out"
        )
    if has_final:
        file["next_observations"][start:stop] = whole[1:]
    terminated, truncated = ends_of(schema, episode, stop - start)
    truncated[-1] |= not last and not terminated[-1]
    file["terminals"][start:stop], file["timeouts"][start:stop] = terminated, truncated
