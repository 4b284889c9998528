"""robomimic's HDF5 files, in and out: a group for each demonstration, and masks that name parts of them.

`obs/<name>` becomes `observation.<name>`, with its final one where there is `next_obs`; `actions`, `rewards`, `dones`
and `states` become `action`, `reward`, `done` and `state`; other arrays keep their names. A mask becomes the bool meta
field `mask.<name>`, so that `filter_meta={"mask.train": True}` reads that part. `done` is no `terminated`: robomimic
may mark each step at which the task is done. What else the file says, environment and models among it, is in
`extra/robomimic.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from memmap_buffer.buffer import ReplayBuffer
from memmap_buffer.errors import SchemaError
from memmap_buffer.interop.beside import read_beside, write_beside
from memmap_buffer.interop.extras import extra
from memmap_buffer.interop.survey import Survey, flat
from memmap_buffer.schema import Field

with extra("hdf5"):
    import h5py

NAMES = {"actions": "action", "rewards": "reward", "dones": "done", "states": "state"}
OBSERVATION, NEXT, MASK = "observation.", "next_obs/", "mask."


def import_robomimic(path: str | PathLike[str], folder: str | PathLike[str], **options: Any) -> ReplayBuffer:
    """Copy a robomimic file into a folder, an episode for each demonstration, in the order of their numbers.

    Args: path: the file. folder: where; see `ReplayBuffer`.
        options: of `ReplayBuffer`; `max_episodes` and `max_timesteps` are as many as needed.
    Returns: the buffer, open to be written.
    Raises: SchemaError: it is no such file, demonstrations differ in their arrays, or `next_obs` is not what follows.
    """
    with h5py.File(path, "r") as file:
        if "data" not in file or not len(file["data"]):
            raise SchemaError(f"{path}: it has no demonstrations in 'data', so it is no file of robomimic")
        demos = sorted(file["data"], key=_number)
        survey, longest = Survey("array"), 1
        paths: dict[str, str] = {}
        for demo in demos:
            columns, places, _ = _read(file["data"][demo])
            survey.add(columns)
            paths |= places
            longest = max(longest, len(columns["action"]))
        survey.require_complete()
        has_final = all("next_obs" in file["data"][demo] for demo in demos)
        final = {name for name in survey.fields if has_final and name.startswith(OBSERVATION)}
        fields = {name: Field(field.dtype, field.shape, final=name in final) for name, field in survey.fields.items()}
        masks = {f"{MASK}{_legal(name)}": (name, set(_texts(file["mask"][name]))) for name in file.get("mask", {})}
        meta_fields = {"demo": f"U{max(map(len, demos))}", **dict.fromkeys(masks, "bool")}
        sizes = {"max_episodes": len(demos), "max_timesteps": longest}
        buffer = ReplayBuffer(folder, fields=fields, meta_fields=meta_fields, **(sizes | options))
        for demo in demos:
            columns, _, after = _read(file["data"][demo])
            last = {name: np.concatenate([columns[name], after[name][-1:]]) for name in final}
            meta = {name: demo in members for name, (_, members) in masks.items()}
            buffer.store_episode(**(columns | last), demo=demo, **meta)
        kept = {
            "attributes": _attributes(file["data"]),
            "demos": {demo: _attributes(file["data"][demo]) for demo in demos},
            "paths": paths,
            "masks": {name: theirs for name, (theirs, _) in masks.items()},
        }
        write_beside(buffer, "robomimic", kept)
    return buffer


def export_robomimic(buffer: ReplayBuffer, path: str | PathLike[str]) -> None:
    """Copy a buffer into a new file in robomimic's layout.

    Demonstrations are named by the meta field `demo`, else `demo_0`, …; bool meta fields `mask.<name>` become masks.
    `env_args`, without which robomimic makes no environment, are those of the file that was imported.

    Args: buffer: with a field `action`. `terminated` and `truncated` together become `dones`, if there is no `done`.
    Raises: SchemaError: there is no `action`. OSError: there is a file.
    """
    if "action" not in buffer.schema.fields:
        raise SchemaError(f"{buffer.folder}: it has no field 'action', which robomimic needs; rename one to it")
    kept: dict[str, Any] = read_beside(buffer, "robomimic") or {}
    masks: dict[str, list[str]] = {name: [] for name in buffer.meta_fieldnames if name.startswith(MASK)}
    with h5py.File(path, "x") as file:
        data = file.create_group("data")
        data.attrs.update({**kept.get("attributes", {}), "total": buffer.num_steps})
        for i, length in enumerate(buffer.episode_lens.tolist()):
            episode = flat(buffer.episode(i))
            demo = str(episode.get("demo", f"demo_{i}"))
            group = data.create_group(demo)
            group.attrs.update({**kept.get("demos", {}).get(demo, {}), "num_samples": length})
            for name, column in _exported(buffer, episode).items():
                place = kept.get("paths", {}).get(name) or _place(name)
                group[place] = column[:length]
                if len(column) > length and place.startswith("obs/"):
                    group[f"{NEXT}{place.removeprefix('obs/')}"] = column[1:]
            for name in masks:
                masks[name] += [demo] if episode[name] else []
        for name, members in masks.items():
            theirs = kept.get("masks", {}).get(name, name.removeprefix(MASK))
            file[f"mask/{theirs}"] = np.array(members, dtype="S")


def _read(demo: Any) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The columns of a demonstration, the path of each in its group, and the observations that follow each step's."""
    columns, paths, after = {}, {}, {}
    for path, item in flat(demo, separator="/").items():
        if path.startswith(NEXT):
            after[OBSERVATION + _legal(path.removeprefix(NEXT))] = item[()]
            continue
        name = (
            OBSERVATION + _legal(path.removeprefix("obs/"))
            if path.startswith("obs/")
            else _legal(NAMES.get(path, path))
        )
        columns[name], paths[name] = item[()], path
    if "action" not in columns:
        raise SchemaError(f"{demo.name}: it has no 'actions'; it has {', '.join(demo)}")
    for name, following in after.items():
        if name not in columns or not np.array_equal(columns[name][1:], following[:-1]):
            raise SchemaError(f"{demo.name}/next_obs: {name} is not what follows in obs; remove next_obs", field=name)
    return columns, paths, after


def _exported(buffer: ReplayBuffer, episode: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted name -> column of what becomes an array."""
    columns = {name: episode[name] for name in buffer.schema.fields}
    ends = [columns.pop(name) for name in ("terminated", "truncated") if name in columns]
    if ends and "done" not in columns:
        columns["done"] = np.logical_or.reduce(ends).astype(np.int64)
    return columns


def _place(name: str) -> str:
    if name == "observation":
        return "obs/flat"
    if name.startswith(OBSERVATION):
        return f"obs/{name.removeprefix(OBSERVATION).replace('.', '/')}"
    return {ours: theirs for theirs, ours in NAMES.items()}.get(name, name.replace(".", "/"))


def _legal(path: str) -> str:
    """A path in the file as a field's name."""
    parts = (re.sub(r"[^A-Za-z0-9_]", "_", part) for part in path.split("/"))
    return ".".join(part if part[:1].isalpha() else f"n{part}" for part in parts)


def _number(demo: str) -> tuple[int, str]:
    digits = re.search(r"\d+$", demo)
    return int(digits[0]) if digits else -1, demo


def _texts(dataset: Any) -> list[str]:
    return [text.decode("utf-8") if isinstance(text, bytes) else str(text) for text in dataset[()]]


def _attributes(group: Any) -> dict[str, Any]:
    """The attributes that JSON can hold; what the buffer itself knows is left out."""
    found = {
        name: np.asarray(value).tolist() for name, value in group.attrs.items() if name not in ("total", "num_samples")
    }
    return {name: v.decode("utf-8") if isinstance(v, bytes) else v for name, v in found.items()}
