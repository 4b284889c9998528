"""robomimic's HDF5 files, import and export: a group for each demonstration, and masks that name subsets of these.

`obs/<name>` becomes `observation.<name>`, with a final entry if there is `next_obs/<name>`; `actions`, `rewards`,
`dones` and `states` become `action`, `reward`, `done` and `state`; other arrays keep their names if these are
identifiers. A mask becomes the bool meta field `mask.<name>`, so that `filter_meta={"mask.train": True}` reads that
subset. `done` does not become `terminated`: robomimic may mark each step at which the task is done. The attributes of
the file, such as environment and models, are stored in `extra/robomimic.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from memmap_buffer import Field, ReplayBuffer, SchemaError
from memmap_buffer.adapters import AnyPath, IfExists, Names, extra, flatten, is_image, path_of
from memmap_buffer.interop.columns import InferredFields, as_text, with_final
from memmap_buffer.interop.episodes import (
    ends_of,
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

NAMES = {"observation": "obs", "action": "actions", "reward": "rewards", "done": "dones", "state": "states"}
NEXT, MASK = "next_obs", "mask."
GYM_ARGS = {"env_name": "", "type": 2, "env_kwargs": {}}  # 2: robomimic's number for environments of Gym


def import_robomimic(
    path: AnyPath, folder: AnyPath, *, if_exists: IfExists = "error", codec: Any = None, **options: Any
) -> ReplayBuffer:
    """Copy a robomimic file into a folder, an episode for each demonstration, in the order of their numbers.

    Args:
        path: the file.
        folder: where the buffer is made; see `ReplayBuffer`.
        if_exists: what to do if something is in the folder: "error" raises; "resume" goes on with an import of this
            source that was interrupted; "overwrite" replaces it when the import is whole.
        codec: of the fields that are images, uint8 (height, width, 1 or 3), as for `Field`; "zstd" is lossless, "jpeg"
            is not.
        options: of `ReplayBuffer`; by default `max_episodes` and `max_timesteps` are as many as the episodes need.

    Returns:
        The buffer, open for writing.

    Raises:
        SchemaError: the path is no such file, demonstrations differ in their arrays, or a row of `next_obs` is not the
            observation of the next step.
    """
    target = Target.checked(folder, if_exists, options)
    with h5py.File(path_of(path), "r") as file:
        if "data" not in file or not len(file["data"]):
            raise SchemaError(f"{path}: it has no demonstrations in 'data', so it is no file of robomimic")
        demos = sorted(file["data"], key=_number)
        arrays, lengths, names = InferredFields("array"), [], Names(fixed=NAMES)
        finals = []
        for demo in demos:
            columns = _read(file["data"][demo], names)
            arrays.add(columns)
            lengths.append(len(columns["action"]))
            finals.append({name for name, column in columns.items() if len(column) > lengths[-1]})
        arrays.require_complete()
        final = set.intersection(*finals)
        masks = flatten(names.ours({"mask": file.get("mask", {})}))
        members = {name: {str(as_text(demo)) for demo in item[()]} for name, item in masks.items()}

        def episode(demo: str) -> dict[str, Any]:
            columns = _read(file["data"][demo], names)
            stop = len(columns["action"])
            rows = {name: column[: stop + (name in final)] for name, column in columns.items()}
            return {**rows, "demo": demo, **{name: demo in demos for name, demos in members.items()}}

        attributes = {demo: _attributes(file["data"][demo]) for demo in demos}
        return import_episodes(
            target,
            map(episode, demos),
            {
                name: Field(field.dtype, field.shape, final=name in final, codec=codec if _is_image(field) else None)
                for name, field in arrays.fields.items()
            },
            {"demo": f"U{max(map(len, demos))}", **dict.fromkeys(masks, "bool")},
            lengths=lengths,
            source=path,
            asked={"codec": codec},
            names=names,
            extra={"robomimic": {"attributes": _attributes(file["data"]), "demos": attributes}},
        )


def export_robomimic(buffer: ReplayBuffer, path: AnyPath, *, env: Any = None) -> None:
    """Copy a buffer into a new file in robomimic's layout.

    Demonstrations are named by the meta field `demo`, else `demo_0`, …; bool meta fields `mask.<name>` become masks.
    Of final entries only those of `observation` and `observation.<name>` are written.

    Args:
        buffer: with a field `action`. The fields that end its episodes become `dones`, if there is no `done`.
        path: the file.
        env: the environment that robomimic makes for rollouts (`env_args`): a Gymnasium environment, its id, or a dict
            in robomimic's form; default: the environment of the file or Minari data set that was imported. If none is
            known, `env_args` names no environment: robomimic can learn from the file, but make no rollouts.

    Raises:
        SchemaError: there is no `action`, a field is of text or lists, or two fields would be one array or one within
            the other.
        OSError: there is a file already.
    """
    names, schema = read_names(buffer, NAMES), buffer.schema
    written = [name for name in schema.fields if name == "done" or name not in schema.ends]
    makes_done = bool(schema.ends) and "done" not in written  # of the fields that end episodes
    places = {name: _place(name, names) for name in (*written, *["done"] * makes_done)}
    require_storable(buffer, "robomimic", needs=("action",), places=places, kinds="U")
    imported: dict[str, Any] = read_extra(buffer, "robomimic") or {}
    attributes = dict(imported.get("attributes", {}))
    if env is not None or not imported:
        attributes["env_args"] = _env_args(buffer, env)
    masks: dict[str, list[str]] = {name: [] for name in buffer.meta_fieldnames if name.startswith(MASK)}
    episodes, place = exported_episodes(buffer), path_of(path)
    with put_when_whole(place) as new, h5py.File(new / place.name, "x") as file:
        data = file.create_group("data")
        data.attrs.update({**attributes, "total": episodes.num_steps})
        for i, (rows, episode) in enumerate(episodes):
            length, demo = len(rows), str(episode.get("demo", f"demo_{i}"))
            group = data.create_group(demo)
            group.attrs.update({**imported.get("demos", {}).get(demo, {}), "num_samples": length})
            if makes_done:
                terminated, truncated = ends_of(schema, episode, length)
                episode["done"] = (terminated | truncated).astype(np.int64)
            for name, array in places.items():
                column = episode[name]
                group[array] = column[:length]
                if len(column) > length and array.startswith("obs/"):
                    group[f"{NEXT}/{array.removeprefix('obs/')}"] = column[1:]
            for name in masks:
                masks[name] += [demo] if episode[name] else []
        for name, members in masks.items():
            file[names.key(name, "/")] = np.array(members, dtype="S")


def _read(demo: Any, names: Names) -> dict[str, Any]:
    """The columns of a demonstration; those of observations have a final entry if there is `next_obs`."""
    arrays = {key: item for key, item in demo.items() if key != NEXT}
    columns = {name: item[()] for name, item in flatten(names.ours(arrays)).items()}
    if "action" not in columns:
        raise SchemaError(f"{demo.name}: it has no 'actions'; it has {', '.join(demo)}")
    for name, item in flatten(names.ours({"obs": demo[NEXT]}) if NEXT in demo else {}).items():
        if name not in columns:
            raise SchemaError(f"{demo.name}/next_obs: {name} is not in obs; remove next_obs", field=name)
        columns[name] = with_final(f"{demo.name}/next_obs: {name}", columns[name], item[()], 0, "remove next_obs")
    return columns


def _is_image(field: Field) -> bool:
    return field.dtype == "uint8" and is_image(field) and field.shape[2:] in ((1,), (3,))


def _place(name: str, names: Names) -> str:
    """The path of a field in its demonstration's group."""
    return "obs/flat" if name == "observation" else names.key(name, "/")


def _env_args(buffer: ReplayBuffer, env: Any) -> str:
    """The JSON text by which robomimic makes an environment."""
    if isinstance(env, Mapping):
        return json.dumps(dict(env))
    env_spec: Mapping[str, Any] = json.loads((read_extra(buffer, "minari") or {}).get("env_spec") or "{}")
    if isinstance(env, str):
        env_spec = {"id": env}
    elif env is not None:
        spec = getattr(env, "spec", None)
        if spec is None:
            raise SchemaError(f"env: got {env!r}, which has no spec; pass its id, or a dict such as {GYM_ARGS}")
        env_spec = {"id": spec.id, "kwargs": spec.kwargs}
    return json.dumps(GYM_ARGS | {"env_name": env_spec.get("id", ""), "env_kwargs": env_spec.get("kwargs", {})})


def _number(demo: str) -> tuple[int, str]:
    digits = re.search(r"\d+$", demo)
    return int(digits[0]) if digits else -1, demo


def _attributes(group: Any) -> dict[str, Any]:
    """The attributes of a group as JSON can hold them, without counts, which an export writes anew."""
    attributes = {name: value for name, value in group.attrs.items() if name not in ("total", "num_samples")}
    return {name: as_text(np.asarray(value).tolist()) for name, value in attributes.items()}
