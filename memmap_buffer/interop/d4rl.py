"""D4RL's HDF5 files, in and out: flat arrays of steps in which `terminals` and `timeouts` say where episodes end.

`infos/<name>` becomes the field `info.<name>`. What the file says of itself in `metadata/` is kept in
`extra/d4rl.json`, but for arrays, such as the weights of the policy that recorded it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.errors import SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.interop.extra_json import read_beside, read_names, write_beside, write_names
from memmap_buffer.interop.survey import first_difference, flat
from memmap_buffer.names import Names
from memmap_buffer.schema import Field, Schema

with extra("hdf5"):
    import h5py

STEPS = {"observations": "observation", "actions": "action", "rewards": "reward"}
ENDS = {"terminals": "terminated", "timeouts": "truncated"}  # as the schema calls what ends its episodes


def import_d4rl(
    path: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    max_episode_steps: int | None = None,
    infos: bool = True,
    **options: Any,
) -> ReplayBuffer:
    """Copy a D4RL file into a folder, cut into its episodes.

    An episode ends where `terminals` or `timeouts` is true, and after `max_episode_steps`. Steps after the last end are
    an episode of their own, which neither terminated nor was truncated. With `next_observations` in the file each
    episode has its final observation.

    Args:
        path: the file. folder: where; see `ReplayBuffer`.
        max_episode_steps: the time limit of the environment, for files without `timeouts`; its ends become `truncated`.
        infos: whether to import them.
        options: of `ReplayBuffer`; `max_episodes` and `max_timesteps` are as many as needed.

    Returns: the buffer, open to be written.
    Raises: SchemaError: arrays are missing or differ in length, or `next_observations` are not those that follow, so
        that an end of an episode is not marked.
    """
    with h5py.File(path, "r") as file:
        names = Names()
        columns = _columns(file, infos, names)
        terminated = np.asarray(file["terminals"]).astype(bool)
        truncated = np.asarray(file["timeouts"]).astype(bool) if "timeouts" in file else np.zeros_like(terminated)
        bounds = list(_episodes(terminated, truncated, max_episode_steps))
        has_final = "next_observations" in file
        fields = {
            name: Field(array.dtype, array.shape[1:], final=has_final and name == "observation")
            for name, array in columns.items()
        }
        flags = {"terminated": "bool", "truncated": "bool"}
        sizes = {"max_episodes": len(bounds), "max_timesteps": max(stop - start for start, stop in bounds)}
        buffer = ReplayBuffer(folder, fields={**fields, **flags}, **(sizes | options))
        for start, stop in bounds:
            episode = {name: array[start:stop] for name, array in columns.items()}
            if has_final:
                episode["observation"] = _with_final(file, start, stop)
            limit = truncated[start:stop].copy()
            limit[-1] |= stop - start == max_episode_steps and not terminated[stop - 1]
            buffer.store_episode(**episode, terminated=terminated[start:stop], truncated=limit)
        write_names(buffer, names)
        write_beside(buffer, "d4rl", _metadata(file.get("metadata", {})))
    return buffer


def export_d4rl(buffer: ReplayBuffer, path: str | PathLike[str]) -> None:
    """Copy a buffer into a new file in D4RL's layout.

    The last step of every episode that did not terminate is a timeout; of the last episode only if it was truncated.

    Args: buffer: with the fields `observation` and `action`; fields that D4RL has no name for become infos.
    Raises: SchemaError: observations are nested, or only some episodes have their final one. OSError: there is a file.
    """
    keys = {name: read_names(buffer).path(name) for name in buffer.fieldnames}
    keys = {name: path[1:] if name.startswith("info.") else path for name, path in keys.items()}
    names = {name: "/".join(["infos", *map(str, path)]) for name, path in keys.items()}
    names |= {ours: theirs for theirs, ours in STEPS.items() if ours in names}
    names = {name: place for name, place in names.items() if name not in buffer.schema.ends}
    for name in ("observation", "action"):
        if name not in names:
            raise SchemaError(f"{buffer.folder}: it has no field {name!r}, which D4RL needs flat; flatten or rename it")
    bounds = np.concatenate([[0], np.cumsum(buffer.episode_lens)])
    with h5py.File(path, "x") as file:
        for name, place in names.items():
            field = buffer.schema.fields[name]
            file.create_dataset(place, (bounds[-1], *field.shape), field.storage)
        for place in ENDS:
            file.create_dataset(place, (bounds[-1],), bool)
        for i, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            _write_episode(file, buffer.schema, buffer.episode(i), names, start, stop, last=i == len(buffer) - 1)
        for name, value in (read_beside(buffer, "d4rl") or {}).items():
            file[f"metadata/{name}"] = value


def _columns(file: Any, infos: bool, names: Names) -> dict[str, Any]:
    """Our name -> array in the file, all of one length."""
    for name in ("observations", "actions", "terminals"):
        if name not in file:
            raise SchemaError(
                f"{file.filename}: it has no {name!r}, so it is no file of D4RL; it has {', '.join(file)}"
            )
    found = {ours: file[theirs] for theirs, ours in STEPS.items() if theirs in file}
    if infos and "infos" in file:
        found |= flat(names.ours({"info": file["infos"]}))
    count = len(file["observations"])
    for name, array in found.items():
        if array.ndim < 1 or len(array) != count:
            raise SchemaError(
                f"{file.filename}: {name} has shape {array.shape}, expected {count} steps; import without infos"
            )
    return found


def _episodes(terminated: Any, truncated: Any, limit: int | None) -> Iterator[tuple[int, int]]:
    """First step and the one after the last of each episode."""
    if not len(terminated):
        raise SchemaError("terminals: got no steps, expected at least one")
    start = 0
    for end in np.append(np.flatnonzero(terminated | truncated), len(terminated) - 1).tolist():
        while start <= end:
            stop = end + 1 if limit is None else min(end + 1, start + limit)
            yield start, stop
            start = stop


def _with_final(file: Any, start: int, stop: int) -> Any:
    """The observations of an episode and its final one, of which the file says those in between twice."""
    here, following = file["observations"][start:stop], file["next_observations"][start:stop]
    wrong = first_difference(here[1:], following[:-1])
    if wrong is not None:
        step = start + wrong
        raise SchemaError(
            f"{file.filename}: next_observations[{step}] is not observations[{step + 1}], yet no episode ends there; "
            "pass max_episode_steps=… if the file has no timeouts"
        )
    return np.concatenate([here, following[-1:]])


def _metadata(group: Mapping[str, Any]) -> dict[str, Any]:
    """Texts and numbers."""
    found = {name.replace(".", "/"): item[()] for name, item in flat(group).items() if item.shape == ()}
    return {name: v.decode("utf-8") if isinstance(v, bytes) else v.item() for name, v in found.items()}


def _write_episode(
    file: Any, schema: Schema, episode: dict[str, Any], names: Mapping[str, str], start: int, stop: int, *, last: bool
) -> None:
    columns, none = flat(episode), np.zeros(stop - start, bool)
    for name, place in names.items():
        file[place][start:stop] = columns[name][: stop - start]
    whole = episode["observation"]
    if len(whole) > stop - start:
        if start == 0:
            shape = file["observations"].shape
            file.create_dataset("next_observations", shape, whole.dtype)
        elif "next_observations" not in file:
            raise SchemaError(f"steps {start} to {stop}: a final observation, which the episodes before do not have")
        file["next_observations"][start:stop] = whole[1:]
    elif "next_observations" in file:
        raise SchemaError(
            f"steps {start} to {stop}: no final observation, which the episodes before have; leave it out"
        )
    terminated = np.asarray(columns.get(schema.terminated or "", none)).reshape(-1) != 0
    truncated = np.array(columns.get(schema.truncated or "", none)).reshape(-1) != 0
    truncated[-1] |= not last and not terminated[-1]
    file["terminals"][start:stop], file["timeouts"][start:stop] = terminated, truncated
