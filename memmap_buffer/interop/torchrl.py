"""torchrl: batches and buffers as TensorDicts, and import of the dump of a LazyMemmapStorage.

A dump is read as JSON and plain arrays, so this needs neither torchrl nor unpickling.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer import ConcatBuffer, CorruptBufferError, Field, NotABufferError, ReplayBuffer, Schema, SchemaError
from memmap_buffer.adapters import AnyPath, IfExists, Names, Target, decode, extra, flatten, import_episodes, path_of
from memmap_buffer.interop.columns import LENGTHS, with_final
from memmap_buffer.interop.episodes import episode_bounds

if TYPE_CHECKING:
    from tensordict import TensorDict

OF_NEXT = ("reward", "terminated", "truncated", "done")
REMEDY = "no episode ends there: mark the end by ('next', 'done') or ('collector', 'traj_ids')"
SIGNS = r'[/<>:"|?*\\ %\x00-\x1f\x7f]'  # characters that tensordict replaces in the names of files
LEFT_OUT = frozenset({"index", "done", "terminated", "truncated"})  # at the root; these ends belong to the step before


def to_tensordict(
    source: Mapping[str, Any] | ReplayBuffer | ConcatBuffer,
    *,
    schema: Schema | None = None,
    names: Names | None = None,
) -> TensorDict:
    """A batch as a TensorDict over the same memory, or all steps of a buffer as a TensorDict.

    In an n-step batch the keys `next_<name>`, `reward` and the fields that end episodes go below "next", where torchrl
    looks for them: the ends as `terminated` and `truncated`, and with them `done`. Rewards and ends become (B, 1), as
    torchrl's losses expect. Rewards and ends of a group go below "next", too, as ("next", "agents", "reward"), in their
    own shape. Text is left out, as it is no tensor.

    Args:
        source: a batch of any view, which is not copied; or a buffer, whose steps are copied, the oldest first.
        schema: of the batch's buffer; needed if the fields that end its episodes are not named `terminated` and
            `truncated`.
        names: the keys that importers changed into names of fields; they are restored.

    Returns:
        A TensorDict of batch size (B,), or of a buffer (steps,) with `_indices`, the serial and timestep of each.

    Raises:
        SchemaError: the batch is empty.
        ImportError: tensordict is not installed.
    """
    with extra("torchrl"):
        from tensordict import TensorDict
    batch = source if isinstance(source, Mapping) else source.batch(timestep_level=True, return_indices=True)
    tensors = {name: value for name, value in flatten(batch).items() if hasattr(value, "ndim")}
    if not tensors:
        raise SchemaError("to_tensordict: got a batch without tensors, expected one of `dataloader` or `sample`")
    is_transition = any(name.startswith("next_") for name in tensors)
    of_next = _of_next(schema, tensors) if is_transition else {}
    # The reward of the following step does not belong to this transition, and torchrl has no place for it.
    later = {f"next_{name}" for name in (*OF_NEXT, *of_next)}
    below = {
        tuple(_key(name, of_next, names or Names())): value for name, value in tensors.items() if name not in later
    }
    for key in below.keys() & {("next", name) for name in OF_NEXT}:
        below[key] = below[key].unsqueeze(-1) if below[key].ndim == 1 else below[key]
    ends = below.keys() & {("next", "terminated"), ("next", "truncated")}
    below |= {key: below[key].bool() for key in ends}
    if ends:
        below["next", "done"] = reduce(operator.or_, (below[key] for key in ends))
    size = len(next(iter(tensors.values())))
    return TensorDict(below, batch_size=[size])


def import_torchrl(path: AnyPath, folder: AnyPath, *, if_exists: IfExists = "error", **options: Any) -> ReplayBuffer:
    """Copy the dump of a replay buffer over a LazyMemmapStorage of one dimension into a folder.

    An episode ends where ("next", "done") is true, where ("collector", "traj_ids") changes, and at the newest entry.
    A key that is at the root and below "next", such as an observation, becomes a field with `final`; its value below
    "next" must equal the next entry's value at the root. Rewards and ends are taken from "next".

    Args:
        path: the folder that `dumps` wrote, or its `storage`.
        folder: where the buffer is made; see `ReplayBuffer`.
        if_exists: what to do if something is in the folder: "error" raises; "resume" goes on with an import of this
            source that was interrupted; "overwrite" replaces it when the import is whole.
        options: of `ReplayBuffer`; by default `max_episodes` and `max_timesteps` are as many as the episodes need.

    Returns:
        The buffer, open for writing.

    Raises:
        NotABufferError: the path is no such dump.
        CorruptBufferError: a file does not have the size that the dump says.
        SchemaError: a value is no tensor or of lists, or within an episode "next" is not the entry that follows.
    """
    target, root = Target.checked(folder, if_exists, options), path_of(path)
    root = root / "storage" if (root / "storage").is_dir() else root
    length = int(_json(root / "storage_metadata.json")["len"])
    names = Names()
    arrays = flatten(names.ours(_arrays(root)))
    cursor = _json(root.parent / "writer" / "metadata.json")["cursor"] if (root.parent / "writer").is_dir() else 0
    rows = np.arange(length)  # in the order of time
    if length == len(next(iter(arrays.values()))):
        rows = np.roll(rows, -int(cursor))
    fields, after = columns_of_steps(arrays)
    bounds = _bounds(arrays, rows)
    specs = {name: Field(_dtype(column), column.shape[1:], final=name in after) for name, column in fields.items()}

    def episode(start: int, stop: int) -> dict[str, Any]:
        columns = {name: _decoded(column[rows[start:stop]]) for name, column in fields.items()}
        for name, column in after.items():
            following = _decoded(column[rows[start:stop]])
            columns[name] = with_final(f"('next', {name!r})", columns[name], following, start, REMEDY)
        return columns

    episodes = (episode(start, stop) for start, stop in bounds)
    lengths = [stop - start for start, stop in bounds]
    return import_episodes(target, episodes, specs, lengths=lengths, source=path, names=names)


def _of_next(schema: Schema | None, keys: Iterable[str]) -> dict[str, str | None]:
    """Field of a reward or an end, known only after its step -> torchrl's key below "next"; None: its own path."""
    final = () if schema is None else schema.final_names  # they stand at the root, too
    names: dict[str, str | None] = {name: None for name in keys if _is_of_group(name) and name not in final}
    names |= {name: name for name in OF_NEXT}
    if schema is not None:
        for theirs, ours in (("truncated", schema.truncated), ("terminated", schema.terminated)):
            names.pop(theirs)
            names |= {} if ours is None else {ours: theirs}
    return names


def _is_of_group(name: str) -> bool:
    """Whether a key is the reward, or an end, of a group of fields, such as "agents.reward", at the step itself."""
    group, _, leaf = name.rpartition(".")
    return bool(group) and leaf in OF_NEXT and not group.startswith(("next_", "seq_"))


def _key(name: str, of_next: Mapping[str, str | None], names: Names) -> list[Any]:
    if name in of_next:
        theirs = of_next[name]
        return ["next", *(names.path(name) if theirs is None else [theirs])]
    below = name.removeprefix("next_")
    return names.path(name) if below == name else ["next", *names.path(below)]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotABufferError(f"{path} is missing, so it is no dump of a LazyMemmapStorage", path=path) from None
    except ValueError as error:
        raise CorruptBufferError(f"{path}: {error}", path=path) from error


def _arrays(folder: Path) -> dict[str, Any]:
    """Nested dicts of mapped arrays by their keys; bfloat16 as structures with the entry "bfloat16", its bits."""
    out: dict[str, Any] = {}
    for key, about in _json(folder / "meta.json").items():
        if key == "shape" and len(about) != 1:
            raise SchemaError(f"{folder}: got a storage of shape {about}, expected one dimension; flatten it")
        if key.startswith(LENGTHS):  # nothing says which keys are the lists that `to_tensordict` padded
            raise SchemaError(
                f"{folder}: got {key!r}, the lengths of lists that are padded; copy the folder that they come from "
                "(`snapshot`, `pack`), or leave them out of the dump",
                field=key.removeprefix(LENGTHS),
            )
        if not isinstance(about, Mapping):
            continue
        if about.get("type") == "TensorDict":
            out[key] = _arrays(_file_of(folder, key))
        elif "dtype" in about:
            out[key] = _map(_file_of(folder, key, ".memmap"), about)
        else:
            raise SchemaError(f"{folder}: {key!r} is no tensor but {about.get('type')!r}; leave it out of the dump")
    return out


def _file_of(folder: Path, key: str, suffix: str = "") -> Path:
    """The file of a key: tensordict writes characters of `SIGNS` as %XX; older versions left them as they are."""
    encoded = "%2E" * len(key) if key in (".", "..") else re.sub(SIGNS, lambda sign: f"%{ord(sign[0]):02X}", key) or "%"
    before = folder / f"{key}{suffix}"
    return before if re.fullmatch(r"[\w -]+", key) and before.exists() else folder / f"{encoded}{suffix}"


def _map(path: Path, about: Mapping[str, Any]) -> Any:
    name = str(about["dtype"]).removeprefix("torch.")
    dtype = np.dtype([("bfloat16", "<u2")]) if name == "bfloat16" else Schema({"x": name}).fields["x"].storage
    shape = tuple(int(n) for n in about["shape"])
    expected = dtype.itemsize * int(np.prod(shape))
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        raise CorruptBufferError(f"{path}: got {size} bytes, expected {expected} for {shape} of {name}", path=path)
    return np.memmap(path, dtype, "r", shape=shape)


def _dtype(column: Any) -> Any:
    return "bfloat16" if column.dtype.names else column.dtype


def _decoded(column: Any) -> Any:
    """A column of `_arrays` as numbers: bfloat16 as float32, others unchanged."""
    return decode(column["bfloat16"], "bfloat16") if column.dtype.names else column


def columns_of_steps(columns: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(columns that become fields; for fields with a final entry, the column of the entries that follow each step)."""
    groups = ("next.", "collector.")
    below = {name.removeprefix("next."): c for name, c in columns.items() if name.startswith("next.")}
    left_out = LEFT_OUT if below else {"index"}
    fields = {name: c for name, c in columns.items() if not name.startswith(groups) and name not in left_out}
    after = {name: below[name] for name in fields if name in below}
    ends = [name for name in ("terminated", "truncated") if name in below]
    for name in ("reward", *ends) if ends else ("reward", "done"):
        if name in below:
            after.pop(name, None)
            fields[name] = below[name]
    return fields | {name: c for name, c in below.items() if _is_of_group(name) and name not in fields}, after


def _bounds(columns: Mapping[str, Any], rows: Any) -> list[tuple[int, int]]:
    """(first, last + 1) among the steps, which have these rows of the columns, of each episode."""
    if not len(rows):
        raise SchemaError("storage: got no entry, expected at least one")
    ends = np.zeros(len(rows), bool)
    for name in OF_NEXT[1:]:
        if f"next.{name}" in columns:
            ends |= _decoded(columns[f"next.{name}"][rows]).reshape(len(rows), -1).any(axis=1)
    if "collector.traj_ids" in columns:
        ids = columns["collector.traj_ids"][rows].ravel()
        ends[:-1] |= ids[1:] != ids[:-1]
    return episode_bounds(ends)
