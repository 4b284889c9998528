"""Folders of memmap-replay-buffer, of any version on PyPI: import of its memmap and HDF5 layouts, export to HDF5.

Its configuration is a pickle, which is read without unpickling; a folder whose pickle holds more than plain values is
refused. Its first versions wrote no configuration: then the names of the files are the names of the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from pickle import dumps
from typing import Any

import numpy as np

from memmap_buffer import CorruptBufferError, Field, NotABufferError, ReplayBuffer, SchemaError
from memmap_buffer.adapters import AnyPath, IfExists, extra, path_of
from memmap_buffer.interop.episodes import exported_episodes, import_episodes, put_when_whole, require_kinds
from memmap_buffer.interop.safe_pickle import safe_loads
from memmap_buffer.interop.target import Target

LENGTHS = "episode_lens"
KINDS: dict[str, Any] = {"bool": np.bool_, "uint8": np.uint8, "int": np.int32, "float": np.float32}
MAX_CONFIG = 1 << 20  # bytes; a configuration of a thousand fields takes less than a tenth


def import_memmap_replay_buffer(
    path: AnyPath, folder: AnyPath, *, if_exists: IfExists = "error", keep_partial: bool = False, **options: Any
) -> ReplayBuffer:
    """Copy a folder of memmap-replay-buffer, its oldest episode first.

    Args:
        path: the folder of memmap-replay-buffer.
        folder: where the buffer is made; see `ReplayBuffer`.
        if_exists: what to do if something is in the folder: "error" raises; "resume" goes on with an import of this
            source that was interrupted; "overwrite" replaces it when the import is whole.
        keep_partial: whether to import an episode that was still open when the folder was last written.
        options: of `ReplayBuffer`; by default `max_episodes`, `max_timesteps` and `circular` are as in the folder.

    Returns:
        The buffer, open for writing.

    Raises:
        NotABufferError: the path is no such folder.
        CorruptBufferError: a file is damaged, or does not fit the others.
        SchemaError: the configuration holds more than plain values.
    """
    target, source = Target.checked(folder, if_exists, options), path_of(path)
    config = _config(source)
    with ExitStack() as opened:
        fields, meta, state = _read_hdf5(source, opened) if (source / "data.h5").exists() else _read_arrays(source)
        fields, meta = _declared(fields, config.get("fields")), _declared(meta, config.get("meta_fields"))
        max_episodes, max_timesteps = _check_shapes(source, fields, meta)
        lengths = np.asarray(meta.pop(LENGTHS)).astype(np.int64)
        if ((lengths < 0) | (lengths > max_timesteps)).any():
            raise CorruptBufferError(f"{source}: episode_lens lie outside 0 … {max_timesteps}: {lengths}", path=source)

        def episode(slot: int) -> dict[str, Any]:
            rows = {name: array[slot, : lengths[slot]] for name, array in fields.items()}
            return {**rows, **{name: array[slot] for name, array in meta.items()}}

        order = _order(lengths, state, keep_partial)
        return import_episodes(
            target,
            map(episode, order),
            {name: _field(array, 2, config.get("fields"), name) for name, array in fields.items()},
            {name: _field(array, 1, config.get("meta_fields"), name) for name, array in meta.items()},
            lengths=lengths[order].tolist(),
            source=path,
            asked={"keep_partial": keep_partial},
            sizes={
                "max_episodes": max_episodes,
                "max_timesteps": max_timesteps,
                "circular": bool(config.get("circular")),
            },
        )


def export_memmap_replay_buffer(
    buffer: ReplayBuffer, path: AnyPath, *, max_episodes: int | None = None, compression: str | None = None
) -> None:
    """Copy a buffer into a new folder in the HDF5 layout, which `ReplayBufferH5PY.from_folder` opens.

    That layout has no final observations, so these are left out.

    Args:
        buffer: of dtypes that the layout has: bool, uint8, whole numbers (stored as int32) and floats (as float32).
        path: the folder.
        max_episodes: of the new folder; default: as many episodes as the buffer has.
        compression: of h5py, such as "gzip"; None for none.

    Raises:
        SchemaError: the layout has no such name or dtype, or int32 does not hold a number.
        OSError: there is a folder already.
    """
    with extra("hdf5"):
        import h5py
    schema, episodes = buffer.schema, exported_episodes(buffer)
    stored = len(episodes)
    count = int(max_episodes or max(1, stored))
    if count < stored:
        raise SchemaError(f"max_episodes: got {count}, the buffer has {stored} episodes; give more")
    require_kinds(schema.all, "memmap-replay-buffer")
    kinds = {name: _kind_of(name, field) for name, field in schema.all.items()}
    declarations = {name: (kinds[name], field.shape, *_plain(field.default)) for name, field in schema.all.items()}
    config = {
        "max_episodes": count,
        "max_timesteps": buffer.max_timesteps,
        "fields": {name: declarations[name] for name in schema.fields},
        "meta_fields": {name: declarations[name] for name in schema.meta_fields},
        "circular": buffer.circular,
        "h5py_compression": compression,
        "h5py_compression_opts": None,
    }
    folder, columns = path_of(path), {}
    with put_when_whole(folder) as new:
        made = new / folder.name
        made.mkdir()
        with h5py.File(made / "data.h5", "x") as file:
            for name, field in schema.all.items():
                place, lead = (
                    ("meta", (count,)) if name in schema.meta_fields else ("data", (count, buffer.max_timesteps))
                )
                how = {"chunks": (*[1] * len(lead), *field.shape), "compression": compression} if compression else {}
                shape = (*lead, *field.shape)
                columns[name] = file.create_dataset(f"{place}_{name}", shape, KINDS[kinds[name]], **how)
            for i, (rows, episode) in enumerate(episodes):
                for name, column in columns.items():
                    values = _narrowed(name, episode[name], kinds[name])
                    if name in schema.fields:
                        column[i, : len(rows)] = values[: len(rows)]
                    else:
                        column[i] = values
            file[f"meta_{LENGTHS}"] = np.pad(episodes.lengths, (0, count - stored)).astype(np.int32)
            file["meta__initted"] = np.arange(count) < stored
            file.attrs.update({"num_episodes": stored, "episode_index": stored % count, "timestep_index": 0})
        (made / "metadata.pkl").write_bytes(dumps(config, protocol=2))


def _kind_of(name: str, field: Field) -> str:
    """memmap-replay-buffer's spelling of a field's dtype. Raises SchemaError if it has none, or the name has a dot."""
    spelling = {"bool": "bool", "uint8": "uint8", "bfloat16": "float"}.get(field.dtype)
    spelling = spelling or {"i": "int", "u": "int", "f": "float"}.get(field.storage.kind)
    if spelling is None or "." in name:
        raise SchemaError(
            f"field {name!r}: got {field.dtype}, expected numbers, and no groups; export a copy without it "
            "(`snapshot`, then `drop_field`)"
        )
    return spelling


def _narrowed(name: str, values: Any, kind: str) -> Any:
    """Values as the layout has them. Raises SchemaError if int32 does not hold one of some whole numbers."""
    low, high = (values.min(), values.max()) if kind == "int" and values.size else (0, 0)
    if not -(2**31) <= low <= high < 2**31:
        raise SchemaError(
            f"field {name!r}: got {low} … {high}, more than int32 holds, which memmap-replay-buffer has for whole "
            "numbers; export a copy without it (`snapshot`, then `drop_field`)",
            field=name,
        )
    return values.astype(KINDS[kind])


def _plain(default: Any) -> tuple[Any, ...]:
    return (default,) if isinstance(default, (bool, int, float)) else ()


def _config(source: Path) -> dict[str, Any]:
    path = source / "metadata.pkl"
    if not path.exists():
        return {}
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG)
    try:
        config = safe_loads(data)
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}; move it away, and the names of the files tell the fields") from error
    if not isinstance(config, dict):
        raise CorruptBufferError(f"{path}: got a {type(config).__name__}, expected a dict", path=path)
    return config


def _read_arrays(source: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """The fields, the meta fields and the state of a folder of .npy files."""
    fields, meta, state = (
        {path.name.removesuffix(suffix): _map(path) for path in sorted(source.glob(f"*{suffix}"))}
        for suffix in (".data.npy", ".data.meta.npy", ".state.npy")
    )
    return fields, meta, {name: int(array) for name, array in state.items()}


def _read_hdf5(source: Path, opened: ExitStack) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """The fields, the meta fields and the state of a folder with a file data.h5."""
    with extra("hdf5"):
        import h5py
    file = opened.enter_context(h5py.File(source / "data.h5", "r"))
    fields = {name.removeprefix("data_"): item for name, item in file.items() if name.startswith("data_")}
    meta = {name.removeprefix("meta_"): item for name, item in file.items() if name.startswith("meta_")}
    return fields, meta, {name: int(value) for name, value in file.attrs.items()}


def _map(path: Path) -> Any:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError) as error:  # the file is cut short, is no .npy file, or holds objects
        raise CorruptBufferError(f"{path}: {error}", path=path) from error


def _declared(arrays: dict[str, Any], declared: Any) -> dict[str, Any]:
    """The arrays that the configuration names, in its order; others belong to a buffer that was overwritten."""
    if not isinstance(declared, Mapping):
        return arrays
    names = [*declared, *(name for name in (LENGTHS,) if name in arrays and name not in declared)]
    return {name: arrays[name] for name in names if name in arrays}


def _check_shapes(source: Path, fields: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[int, int]:
    if LENGTHS not in meta or not fields:
        raise NotABufferError(
            f"{source}: it has no {LENGTHS}.data.meta.npy or no field, so it is no folder of memmap-replay-buffer"
        )
    shape = next(iter(fields.values())).shape[:2]
    wrong = [name for name, array in fields.items() if array.shape[:2] != shape or len(shape) < 2]
    wrong += [name for name, array in meta.items() if array.shape[:1] != shape[:1]]
    if wrong:
        raise CorruptBufferError(f"{source}: {', '.join(wrong)}: expected {shape} episodes and steps", path=source)
    return int(shape[0]), int(shape[1])


def _field(array: Any, lead: int, declared: Any, name: str) -> Field:
    spelling = declared.get(name) if isinstance(declared, Mapping) else None
    default = spelling[2] if isinstance(spelling, tuple) and len(spelling) == 3 else None
    return Field(array.dtype, array.shape[lead:], default)


def _order(lengths: Any, state: Mapping[str, int], keep_partial: bool) -> list[int]:
    """The slots of episodes, the oldest first: in a ring that is the slot where the next episode would be written."""
    first = state.get("episode_index", 0) % len(lengths)
    slots = [*range(first, len(lengths)), *range(first)]
    if state.get("timestep_index", 0) > 0:
        slots = slots[1:] + slots[:1] * keep_partial
    return [slot for slot in slots if lengths[slot] > 0]
