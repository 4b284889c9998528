"""Folders of memmap-replay-buffer, of any of its versions on PyPI, in its memmap and its HDF5 layout. In only.

Its configuration is a pickle, which is read without unpickling; a folder whose pickle holds more than plain values is
refused. Its first versions wrote none: then the names of the files are the names of the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.errors import CorruptBufferError, NotABufferError, SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.interop.episodes import import_episodes
from memmap_buffer.interop.safe_pickle import safe_loads
from memmap_buffer.paths import path_of
from memmap_buffer.schema import Field

LENGTHS = "episode_lens"
INTERNAL = frozenset({LENGTHS, "_initted"})
MAX_CONFIG = 1 << 20  # bytes; a configuration of a thousand fields takes less than a tenth


def import_memmap_replay_buffer(
    path: str | PathLike[str], folder: str | PathLike[str], *, keep_partial: bool = False, **options: Any
) -> ReplayBuffer:
    """Copy a folder of memmap-replay-buffer, its oldest episode first.

    Args:
        path: the folder of memmap-replay-buffer.
        folder: where; see `ReplayBuffer`.
        keep_partial: whether to import an episode that was still open when the folder was last written.
        options: of `ReplayBuffer`; `max_episodes`, `max_timesteps`, `circular` are those of the folder.

    Returns:
        The buffer, open for writing.

    Raises:
        NotABufferError: it is no such folder.
        CorruptBufferError: a file is damaged, or does not fit the others.
        SchemaError: its configuration holds more than plain values.
    """
    source = path_of(path)
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

        return import_episodes(
            folder,
            map(episode, _order(lengths, state, keep_partial)),
            {name: _field(array, 2, config.get("fields"), name) for name, array in fields.items()},
            {name: _field(array, 1, config.get("meta_fields"), name) for name, array in meta.items()},
            lengths=[max_timesteps] * max_episodes,
            options={"circular": bool(config.get("circular")), **options},
        )


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
    found = {path.name: path for path in sorted(source.glob("*.npy"))}
    meta = {
        name.removesuffix(".data.meta.npy"): path for name, path in found.items() if name.endswith(".data.meta.npy")
    }
    fields = {name.removesuffix(".data.npy"): path for name, path in found.items() if name.endswith(".data.npy")}
    state = {name.removesuffix(".state.npy"): path for name, path in found.items() if name.endswith(".state.npy")}
    arrays = [{name: _map(path) for name, path in each.items()} for each in (fields, meta, state)]
    return arrays[0], arrays[1], {name: int(array) for name, array in arrays[2].items()}


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
    """The arrays in the order of the configuration; others belonged to a buffer that was overwritten."""
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
    """The slots of episodes, oldest first: a ring goes on where the next would be written."""
    first = state.get("episode_index", 0) % len(lengths)
    slots = [*range(first, len(lengths)), *range(first)]
    if state.get("timestep_index", 0) > 0:
        slots = slots[1:] + slots[:1] * keep_partial
    return [slot for slot in slots if lengths[slot] > 0]
