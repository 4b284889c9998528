"""Minari data sets, in and out: episodes, infos, per-episode metadata, spaces and the environment's spec.

What Minari knows of the data set as a whole is kept in the folder's `extra/minari.json`, so that an export gives it
back; so are keys that are no identifiers, which are changed into some. Infos become `info.<name>`. Where they begin
with the reset's, Minari has one entry more than there are steps: those are fields with `final`, and their row t is what
was known before action t.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer.api.buffer import ReplayBuffer
from memmap_buffer.environments import decode_space, encode_space, names_of, spaces_of
from memmap_buffer.errors import SchemaError
from memmap_buffer.extras import extra
from memmap_buffer.interop.extra_json import read_beside, read_names, write_beside, write_names
from memmap_buffer.interop.survey import Survey, flat
from memmap_buffer.names import Names
from memmap_buffer.schema import Field

with extra("minari"):
    import gymnasium
    import minari
    from minari import MinariDataset
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.dataset.minari_storage import MinariStorage
    from minari.namespace import create_namespace, list_local_namespaces
    from minari.serialization import deserialize_space
    from minari.storage.local import get_dataset_path

# Written by whoever holds the data set, so of no use in another copy of it.
OF_THE_COPY = {"total_episodes", "total_steps", "dataset_size", "data_format", "jpeg_encoding", "minari_version"}
OWN_META = ("id", "total_steps", "seed")
RENAMED = {"rewards": "reward", "terminations": "terminated", "truncations": "truncated"}
GIVEN = "given"


def import_minari(
    dataset: str | PathLike[str] | MinariDataset,
    folder: str | PathLike[str],
    *,
    infos: bool | Sequence[str] = True,
    **options: Any,
) -> ReplayBuffer:
    """Copy a local Minari data set into a folder.

    It is read twice, first for its dtypes: what comes out is what Minari gives, to the bit. Metadata that only some
    episodes have is told by a bool meta field `given.<name>`, whether there is a seed by `given.seed`.

    Args:
        dataset: its id, the folder of its data, or the data set, also a filtered one.
        folder: where; see `ReplayBuffer`.
        infos: all of them, none, or which.
        options: of `ReplayBuffer`; `max_episodes` and `max_timesteps` are as many as needed.

    Returns: the buffer, open to be written.
    Raises: SchemaError: an info or metadatum that no field can hold; the text names it.
    """
    source = dataset if isinstance(dataset, MinariDataset) else _load(dataset)
    names = names_of(source.observation_space, source.action_space)
    columns, metadata, longest = Survey("column"), Survey("metadatum", lead=0), 1
    finals: dict[str, bool] = {}
    for episode, given in _episodes(source, infos, names):
        columns.add(episode)
        metadata.add(given)
        longest = max(longest, len(episode["reward"]))
        for name, extra_row in _with_reset(episode).items():
            if finals.setdefault(name, extra_row) != extra_row:
                raise SchemaError(f"info {name!r}: it begins with the reset's in some episodes only; leave it out")
    columns.require_complete()
    fields = {n: Field(f.dtype, f.shape, final=finals.get(n, False)) for n, f in columns.fields.items()}
    flags = {f"{GIVEN}.{name}": "bool" for name, n in metadata.counts.items() if n < len(source)}
    sizes = {"max_episodes": len(source), "max_timesteps": longest}
    flags |= {f"{GIVEN}.seed": "bool"}
    meta_fields = {**metadata.fields, **flags, "seed": Field("uint64", default=0)}  # Minari's own seeds have 64 bits
    buffer = ReplayBuffer(folder, fields=fields, meta_fields=meta_fields, **(sizes | options))
    for episode, given in _episodes(source, infos, names):
        present = {flag: True for flag in flags if flag.removeprefix(f"{GIVEN}.") in flat(given)}
        buffer.store_episode(**episode, **given, **present)
    write_names(buffer, names)
    raw = MinariStorage.read_raw_metadata(source.storage.data_path)
    write_beside(buffer, "minari", {key: value for key, value in raw.items() if key not in OF_THE_COPY})
    return buffer


def export_minari(
    buffer: ReplayBuffer,
    dataset_id: str,
    *,
    env: str | gymnasium.Env[Any, Any] | None = None,
    data_format: str = "hdf5",
    **metadata: Any,
) -> MinariDataset:
    """Copy a buffer into a new local Minari data set. Images are stored as they are, not as JPEG.

    Args:
        buffer: with the fields `observation` (with `final`), `action`, `reward`, `terminated`, `truncated`, as
            `import_minari` and `RecordEpisodes` make them, and `info`. Other fields become infos.
        dataset_id: of the new one, such as "pen/human-v0".
        env: the environment, or its id; default: what the imported data set said.
        data_format: one of Minari's; with others than "hdf5" all infos must have `final`, as each episode is a table.
        metadata: author, algorithm_name, description, …; over what the imported data set said.

    Returns: the new data set.
    Raises: SchemaError: an episode has no final observation, or no environment is known.
    """
    kept: dict[str, Any] = read_beside(buffer, "minari") or {}
    made = gymnasium.make(env) if isinstance(env, str) else env
    if made is None and "observation_space" not in kept:
        raise SchemaError(f"{buffer.folder}: it does not say of which environment it is; pass env=…")
    spaces = (
        spaces_of(made)
        if made is not None
        else tuple(map(deserialize_space, (kept["observation_space"], kept["action_space"])))
    )
    spec = made.spec if made is not None else _spec(kept.get("env_spec"))
    storage = MinariStorage.new(
        _new_path(dataset_id), *spaces, env_spec=spec, data_format=data_format, jpeg_encoding=False
    )
    described = {
        key: value for key, value in kept.items() if key not in ("observation_space", "action_space", "env_spec")
    }
    described |= metadata | {"dataset_id": dataset_id, "minari_version": minari.__version__}
    sets = {key: set(value) for key, value in described.items() if key in ("author", "author_email")}
    storage.update_metadata(described | sets)
    names, table = read_names(buffer), data_format != "hdf5"
    for i in range(len(buffer)):
        episode = buffer.episode(i)
        storage.update_episodes([_episode_buffer(buffer, episode, i, spaces, names, table=table)])
        given = _metadata_of(buffer, episode, names, plain=table)
        if given:
            storage.update_episode_metadata([given], [i])
    return MinariDataset(storage)


def _load(dataset: str | PathLike[str]) -> MinariDataset:
    if isinstance(dataset, str) and not Path(dataset).exists():
        return minari.load_dataset(dataset)
    return MinariDataset(dataset)


def _episodes(
    source: MinariDataset, infos: bool | Sequence[str], names: Names
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(columns, metadata) of each episode."""
    found = zip(source.iterate_episodes(), source.storage.get_episode_metadata(source.episode_indices), strict=True)
    for episode, metadata in found:
        given = episode.infos or {}
        if not isinstance(infos, bool):
            given = {name: given[name] for name in infos if name in given}
        columns = {
            "observation": _columns(encode_space(source.observation_space, episode.observations)),
            "action": _columns(encode_space(source.action_space, episode.actions)),
            **{ours: getattr(episode, theirs) for theirs, ours in RENAMED.items()},
        }
        if given and infos:
            columns |= names.ours({"info": _columns(given)})
        own = {} if metadata.get("seed") is None else {"seed": int(metadata["seed"])}
        others = {key: value for key, value in metadata.items() if key not in OWN_META}
        yield columns, own | names.ours(_columns(others))


def _columns(tree: Any) -> Any:
    """Arrays where Minari has lists, bytes or, of nested infos in a table, dicts."""
    if isinstance(tree, Mapping):
        return {key: _columns(value) for key, value in tree.items()}
    array = np.asarray(tree)
    if array.dtype.kind == "O" and array.ndim == 1 and len(array) and isinstance(array[0], Mapping):
        return {key: _columns([row[key] for row in array]) for key in array[0]}
    if array.dtype.kind == "O":
        array = np.asarray([value.decode("utf-8") if isinstance(value, bytes) else value for value in array.tolist()])
    return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array


def _with_reset(episode: Mapping[str, Any]) -> dict[str, bool]:
    """Dotted name of each column that is no action -> whether it has one entry more than there are steps."""
    length = len(episode["reward"])
    counts = {name: len(array) - length for name, array in flat(episode).items()}
    for name, more in counts.items():
        if more not in (0, 1):
            raise SchemaError(
                f"{name}: got {length + more} entries in an episode of {length} steps, expected {length} or one more; "
                "name the infos that fit by infos=[…]",
                field=name,
            )
    return {name: more == 1 for name, more in counts.items()}


def _episode_buffer(
    buffer: ReplayBuffer, episode: dict[str, Any], i: int, spaces: Any, names: Names, *, table: bool
) -> EpisodeBuffer:
    length = int(buffer.episode_lens[i])
    if any(len(column) == length for column in flat({"observation": episode["observation"]}).values()):
        raise SchemaError(f"episode {i}: it has no final observation, and Minari needs one; leave it out")
    own = {"observation", "action", *RENAMED.values(), *buffer.schema.meta_fields, "info"}
    others = {name: value for name, value in episode.items() if name not in own and name in _groups(buffer)}
    infos = {**names.theirs(episode.get("info", {}), "info"), **names.theirs(others)}
    values = _values(infos, lists=table)
    seed = int(episode.get("seed", -1)) if flat(episode).get(f"{GIVEN}.seed", True) else -1
    return EpisodeBuffer(
        seed=seed if seed >= 0 else None,
        observations=decode_space(spaces[0], episode["observation"], _values),
        actions=decode_space(spaces[1], episode["action"], _values),
        infos=values or None,
        **{theirs: episode[ours] for theirs, ours in RENAMED.items()},
    )


def _groups(buffer: ReplayBuffer) -> set[str]:
    return {name.split(".")[0] for name in buffer.schema.fields}


def _values(tree: Any, *, lists: bool = False) -> Any:
    """Text as lists of str; with `lists` also one number a step: from tables Minari reads these alone, in 0.5.4."""
    if isinstance(tree, Mapping):
        return {key: _values(value, lists=lists) for key, value in tree.items()}
    if tree.dtype.kind == "U":
        return tree.tolist()
    return list(tree) if lists and tree.ndim == 1 else tree


def _metadata_of(buffer: ReplayBuffer, episode: dict[str, Any], names: Names, *, plain: bool) -> dict[str, Any]:
    """The metadata that the episode was given; nested as dicts where it becomes `plain` JSON, else under a/b."""
    values = flat(episode)
    out: dict[str, Any] = {}
    for name in buffer.schema.meta_fields:
        if name == "seed" or name.startswith(f"{GIVEN}.") or not values.get(f"{GIVEN}.{name}", True):
            continue
        value = np.asarray(values[name])
        path = [str(key) for key in names.path(name)]
        *groups, leaf = path if plain else ["/".join(path)]
        place = out
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value.tolist() if plain or value.dtype.kind == "U" else value[()]
    return out


def _new_path(dataset_id: str) -> Path:
    namespace = parse_dataset_id(dataset_id)[0]
    if namespace is not None and namespace not in list_local_namespaces():
        create_namespace(namespace)
    path = Path(get_dataset_path(dataset_id)) / "data"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _spec(text: str | None) -> Any:
    return None if text is None else gymnasium.envs.registration.EnvSpec.from_json(text)
