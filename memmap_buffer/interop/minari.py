"""Minari data sets, import and export: episodes, infos, metadata of episodes, spaces and the environment's spec.

The metadata of the data set as a whole is stored in the folder's `extra/minari.json`, so that an export restores it;
keys that are no identifiers are changed into such, and restored as well. Infos become `info.<name>`. If infos begin
with those of the reset, they have one entry more than there are steps, and become fields with `final`: row t was known
before action t.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer import Field, ReplayBuffer, Schema, SchemaError
from memmap_buffer.adapters import (
    AnyPath,
    IfExists,
    Names,
    Target,
    decode_space,
    encode_space,
    exported_episodes,
    extra,
    flatten,
    import_episodes,
    names_of,
    path_of,
    spaces_of,
)
from memmap_buffer.interop.columns import InferredFields, as_text, put
from memmap_buffer.interop.episodes import (
    ends_of,
    put_when_whole,
    read_extra,
    read_names,
    require_kinds,
    require_storable,
)

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

# Minari writes these keys anew for each copy of a data set.
OF_THE_COPY = {"total_episodes", "total_steps", "dataset_size", "data_format", "jpeg_encoding", "minari_version"}
OWN_META = ("id", "total_steps", "seed")
RENAMED = {"rewards": "reward", "terminations": "terminated", "truncations": "truncated"}
GIVEN = "given"


def import_minari(
    dataset: AnyPath | MinariDataset,
    folder: AnyPath,
    *,
    if_exists: IfExists = "error",
    infos: bool | Sequence[str] = True,
    download: bool = False,
    **options: Any,
) -> ReplayBuffer:
    """Copy a Minari data set into a folder.

    The data set is read twice, first for its dtypes; the values are exact. If only some episodes have the metadata
    <name>, the bool meta field `given.<name>` is True for these; `given.seed` is True for episodes that have a seed.

    Args:
        dataset: the id of the data set, the folder of its data, or a `MinariDataset`, also a filtered one.
        folder: where the buffer is made; see `ReplayBuffer`.
        if_exists: what to do if something is in the folder: "error" raises; "resume" goes on with an import of this
            source that was interrupted; "overwrite" replaces it when the import is whole.
        infos: True: import all; False: none; or a list of the names of infos to import.
        download: whether Minari downloads a missing data set, from the place that its `MINARI_REMOTE` names.
        options: of `ReplayBuffer`; by default `max_episodes` and `max_timesteps` are as many as the episodes need.

    Returns:
        The buffer, open for writing.

    Raises:
        SchemaError: no field can hold an info or a metadatum; the text names it.
    """
    target = Target.checked(folder, if_exists, options)
    source = dataset if isinstance(dataset, MinariDataset) else _load(dataset, download)
    names = names_of(source.observation_space, source.action_space)
    columns, metadata, lengths = InferredFields("column"), InferredFields("metadatum", lead=0), []
    finals: dict[str, bool] = {}
    for episode, meta in _episodes(source, infos, names):
        columns.add(episode)
        metadata.add(meta)
        lengths.append(len(episode["reward"]))
        for name, extra_row in _with_reset(episode).items():
            if finals.setdefault(name, extra_row) != extra_row:
                raise SchemaError(f"info {name!r}: it begins with the reset's in some episodes only; leave it out")
    columns.require_complete()
    fields = {n: Field(f.dtype, f.shape, final=finals.get(n, False)) for n, f in columns.fields.items()}
    flags = {f"{GIVEN}.{name}": "bool" for name, n in metadata.counts.items() if n < len(source)}
    flags |= {f"{GIVEN}.seed": "bool"}

    def episodes() -> Iterator[dict[str, Any]]:
        for episode, meta in _episodes(source, infos, names):
            present = {flag: True for flag in flags if flag.removeprefix(f"{GIVEN}.") in flatten(meta)}
            yield {**episode, **meta, **present}

    raw = MinariStorage.read_raw_metadata(source.storage.data_path)
    return import_episodes(
        target,
        episodes(),
        fields,
        {**metadata.fields, **flags, "seed": Field("uint64", default=0)},  # Minari's own seeds have 64 bits
        lengths=lengths,
        source=source.storage.data_path,
        asked={"infos": infos, "episodes": source.episode_indices.tolist()},
        names=names,
        extra={"minari": {key: value for key, value in raw.items() if key not in OF_THE_COPY}},
    )


def export_minari(
    buffer: ReplayBuffer,
    dataset_id: str,
    *,
    env: str | gymnasium.Env[Any, Any] | None = None,
    data_format: str = "hdf5",
    **metadata: Any,
) -> MinariDataset:
    """Copy a buffer into a new local Minari data set. Images are stored without loss, not as JPEG.

    Args:
        buffer: with the fields `observation` (with `final`), `action`, `reward`, as `import_minari` and
            `RecordEpisodes` make them; the fields that end its episodes become Minari's `terminations` and
            `truncations`. Other fields, such as `info.<name>`, become infos.
        dataset_id: of the new data set, such as "pen/human-v0".
        env: the environment, or its id; default: the environment of the imported data set.
        data_format: one of Minari's; with others than "hdf5" all infos must have `final`, as each episode is a table.
        metadata: author, algorithm_name, description, …; they replace those of the imported data set.

    Returns:
        The new data set.

    Raises:
        SchemaError: an episode has no final observation, there is no `reward`, no environment is known, a field is of
            lists or of a kind that the format cannot hold, two fields would be one info or one within the other, or
            Minari is so old that it stores images only as JPEG.
    """
    names, table = read_names(buffer), data_format != "hdf5"
    places = {name: "/".join(map(str, _place(name, names))) for name in _infos_of(buffer.schema)}
    require_storable(buffer, "Minari", needs=("reward",), places=places)
    _require_kinds(buffer.schema, data_format, table=table)
    as_they_are = _as_they_are(buffer)
    imported: dict[str, Any] = read_extra(buffer, "minari") or {}
    made = gymnasium.make(env) if isinstance(env, str) else env
    if made is None and "observation_space" not in imported:
        raise SchemaError(f"{buffer.folder}: it does not say of which environment it is; pass env=…")
    spaces = (
        spaces_of(made)
        if made is not None
        else tuple(map(deserialize_space, (imported["observation_space"], imported["action_space"])))
    )
    env_spec = imported.get("env_spec")
    spec = made.spec if made is not None else env_spec and gymnasium.envs.registration.EnvSpec.from_json(env_spec)
    namespace, path = parse_dataset_id(dataset_id)[0], Path(get_dataset_path(dataset_id)) / "data"
    if path.exists():
        raise SchemaError(f"dataset_id: a data set {dataset_id!r} is already available at {path}; give another id")
    of_environment = ("observation_space", "action_space", "env_spec")
    metadata = {key: value for key, value in imported.items() if key not in of_environment} | metadata
    metadata |= {"dataset_id": dataset_id, "minari_version": minari.__version__}
    sets = {key: set(value) for key, value in metadata.items() if key in ("author", "author_email")}
    with put_when_whole(path) as new:
        storage = MinariStorage.new(new / path.name, *spaces, env_spec=spec, data_format=data_format, **as_they_are)
        storage.update_metadata(metadata | sets)
        for i, (rows, columns) in enumerate(exported_episodes(buffer)):
            storage.update_episodes([_episode_buffer(buffer, columns, len(rows), i, spaces, names, table=table)])
            meta = _metadata_of(buffer, columns, names, as_json=table)
            if meta:
                storage.update_episode_metadata([meta], [i])
    if namespace is not None and namespace not in list_local_namespaces():
        create_namespace(namespace)
    return MinariDataset(path)


def _require_kinds(schema: Schema, data_format: str, *, table: bool) -> None:
    """Raise SchemaError if Minari cannot store a field. `table`: a format with a row for each observation."""
    require_kinds(schema.fields, f"Minari's {data_format!r}", "c" if table else "")
    for name, field in schema.fields.items():
        if field.entries.kind == "U" and field.shape:
            what = f"got {field.dtype} {field.shape}, and Minari has no arrays of text; export"
        elif table and not field.final and name in _infos_of(schema):
            what = f"got no `final`, and {data_format!r} has rows for observations; give data_format='hdf5', or export"
        else:
            continue
        raise SchemaError(f"field {name!r}: {what} a copy without it (`snapshot`, then `drop_field`)", field=name)


def _infos_of(schema: Schema) -> list[str]:
    """The names of the fields that become infos."""
    own = {"reward", *schema.ends}
    return [name for name in schema.fields if name not in own and name.split(".")[0] not in ("observation", "action")]


def _place(name: str, names: Names) -> list[Any]:
    """The keys of a field among the infos."""
    path = names.path(name)
    return path[1:] if path[0] == "info" else path


def _as_they_are(buffer: ReplayBuffer) -> dict[str, bool]:
    """Minari's option for images without JPEG. Before 0.5.4 Minari has none, and stores all arrays of uint8 as JPEG.

    Raises:
        SchemaError: Minari is older, and the buffer has arrays of uint8.
    """
    if "jpeg_encoding" in inspect.signature(MinariStorage.new).parameters:
        return {"jpeg_encoding": False}
    fields = {name: field for name, field in buffer.schema.fields.items() if name not in buffer.schema.ends}
    lossy = [name for name, field in fields.items() if field.storage == np.uint8 and field.shape]
    if lossy:
        raise SchemaError(
            f"{', '.join(lossy)}: got arrays of uint8, which Minari {minari.__version__} stores as JPEG, with a loss; "
            "install Minari 0.5.4 or newer, which needs Python 3.11"
        )
    return {}


def _load(dataset: AnyPath, download: bool) -> MinariDataset:
    path = path_of(dataset)
    if isinstance(dataset, str) and not path.exists():
        return minari.load_dataset(dataset, download=download)
    return MinariDataset(path)


def _episodes(
    source: MinariDataset, infos: bool | Sequence[str], names: Names
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(columns, metadata) of each episode."""
    pairs = zip(source.iterate_episodes(), source.storage.get_episode_metadata(source.episode_indices), strict=True)
    for episode, metadata in pairs:
        episode_infos = episode.infos or {}
        if not isinstance(infos, bool):
            episode_infos = {name: episode_infos[name] for name in infos if name in episode_infos}
        columns = {
            "observation": _columns(encode_space(source.observation_space, episode.observations)),
            "action": _columns(encode_space(source.action_space, episode.actions)),
            **{ours: getattr(episode, theirs) for theirs, ours in RENAMED.items()},
        }
        if episode_infos and infos:
            columns |= names.ours({"info": _columns(episode_infos)})
        own = {} if metadata.get("seed") is None else {"seed": int(metadata["seed"])}
        others = {key: value for key, value in metadata.items() if key not in OWN_META}
        yield columns, own | names.ours(_columns(others))


def _columns(tree: Any) -> Any:
    """Nested dicts of arrays from Minari's values, which may be lists, bytes or, in a table, a dict for each step."""
    if isinstance(tree, Mapping):
        return {key: _columns(value) for key, value in tree.items()}
    array = np.asarray(tree)
    if array.dtype.kind == "O" and array.ndim == 1 and len(array) and isinstance(array[0], Mapping):
        return {key: _columns([row[key] for row in array]) for key in array[0]}
    if array.dtype.kind == "O":
        array = np.asarray([as_text(value) for value in array.tolist()])
    return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array


def _with_reset(episode: Mapping[str, Any]) -> dict[str, bool]:
    """Dotted name of each column -> whether it has one entry more than there are steps."""
    length = len(episode["reward"])
    counts = {name: len(array) - length for name, array in flatten(episode).items()}
    for name, more in counts.items():
        if more not in (0, 1):
            raise SchemaError(
                f"{name}: got {length + more} entries in an episode of {length} steps, expected {length} or one more; "
                "name the infos that fit by infos=[…]",
                field=name,
            )
    return {name: more == 1 for name, more in counts.items()}


def _episode_buffer(
    buffer: ReplayBuffer,
    columns: Mapping[str, Any],
    length: int,
    i: int,
    spaces: Any,
    names: Names,
    *,
    table: bool,
) -> EpisodeBuffer:
    episode: dict[str, Any] = {}
    for name, column in columns.items():
        if name.split(".")[0] == "observation" and len(column) == length:
            raise SchemaError(f"episode {i}: it has no final observation, and Minari needs one; leave it out")
        put(episode, name.split("."), column)
    infos: dict[str, Any] = {}
    for name in _infos_of(buffer.schema):
        put(infos, _place(name, names), columns[name])
    values = _values(infos, lists=table)
    seed = int(columns.get("seed", -1)) if columns.get(f"{GIVEN}.seed", True) else -1
    terminations, truncations = ends_of(buffer.schema, columns, length)
    return EpisodeBuffer(
        seed=seed if seed >= 0 else None,
        observations=decode_space(spaces[0], episode["observation"], _values),
        actions=decode_space(spaces[1], episode["action"], _values),
        infos=values or None,
        rewards=episode["reward"],
        terminations=terminations,
        truncations=truncations,
    )


def _values(tree: Any, *, lists: bool = False) -> Any:
    """Nested values with text as lists of str. `lists`: numbers as lists, too, as Minari 0.5.4 needs for tables."""
    if isinstance(tree, Mapping):
        return {key: _values(value, lists=lists) for key, value in tree.items()}
    if tree.dtype.kind == "U":
        return tree.tolist()
    return list(tree) if lists and tree.ndim == 1 else tree


def _metadata_of(buffer: ReplayBuffer, values: Mapping[str, Any], names: Names, *, as_json: bool) -> dict[str, Any]:
    """The metadata that the episode was given. `as_json`: nested dicts of JSON's values; else keys such as "a/b"."""
    out: dict[str, Any] = {}
    for name in buffer.schema.meta_fields:
        if name == "seed" or name.startswith(f"{GIVEN}.") or not values.get(f"{GIVEN}.{name}", True):
            continue
        value = np.asarray(values[name])
        plain = value.tolist() if as_json or value.dtype.kind == "U" else value[()]
        put(out, list(map(str, names.path(name))) if as_json else [names.key(name, "/")], plain)
    return out
