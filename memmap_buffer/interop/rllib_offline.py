"""RLlib: its offline algorithms, BC, MARWIL, CQL and IQL of the new API stack, train from a folder without an export.

    config.offline_data(input_="data", offline_data_class=DiskOfflineData)

The rest of RLlib's pipeline, `OfflinePreLearner` with its connectors and `iter_batches`, works as on RLlib's Parquet
files. `memmap_buffer.interop.rllib.import_rllib` imports the files that RLlib records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any
from zlib import crc32

import numpy as np

from memmap_buffer import Schema, SchemaError
from memmap_buffer.adapters import extra
from memmap_buffer.interop.columns import put
from memmap_buffer.interop.episodes import require_kinds
from memmap_buffer.interop.rllib import ENDS, OURS

with extra("rllib"):
    import msgpack
    import msgpack_numpy
    import pyarrow as pa
    import ray.data
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
    from ray.rllib.offline.offline_data import OfflineData

    from memmap_buffer.interop.ray import open_root, read_ray

EPISODES_A_BLOCK = 64  # episodes that are packed at once


class DiskOfflineData(OfflineData):  # type: ignore[misc]
    """A folder, or a root of shards, as the offline data of a config: `offline_data_class=DiskOfflineData`.

    These options of RLlib's `offline_data` say what is read:

    - `input_`: the folder or root, or a list of them.
    - `input_read_episodes`: True: rows are whole episodes, as RLlib packs them; False: transitions.
    - `input_read_schema`: RLlib's column -> field, for fields of other names; see `read_rllib`.
    - `input_read_method_kwargs`: further arguments of `read_rllib`.

    Raises:
        NotABufferError: there is no buffer at `input_`.
        SchemaError: a field is missing, or `input_read_sample_batches` is set.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        if config.input_read_sample_batches:
            raise SchemaError("input_read_sample_batches: a folder has no sample batches; use input_read_episodes=True")
        paths = config.input_ if isinstance(config.input_, list) else [config.input_]
        episodes, columns = config.input_read_episodes, config.input_read_schema
        read = partial(read_rllib, episodes=episodes, columns=columns, **config.input_read_method_kwargs)
        first, *others = map(read, paths)
        # The parent class sets up the rest. It always reads data, by a method of `ray.data`; here it reads the paths.
        own = config.copy(copy_frozen=False)
        own.offline_data(
            input_=list(map(str, paths)),
            input_read_method="from_items",
            input_read_method_kwargs={},
            input_read_schema={},
        )
        super().__init__(own)
        self.data = first.union(*others) if others else first
        if self.materialize_data:
            self.data = self.data.materialize()


def read_rllib(
    root: str | PathLike[str],
    *,
    episodes: bool = False,
    columns: Mapping[str, str] | None = None,
    outputs: Sequence[str] = (),
    **options: Any,
) -> ray.data.Dataset:
    """The transitions or episodes of a folder in the form in which RLlib records them; `.write_parquet(path)` exports.

    A last step without a final observation is left out unless it terminated, as in n-step views. It is also left out of
    whole episodes, whose last observation then serves as the final one. An episode without an end is given to RLlib as
    truncated, as RLlib takes no episodes without an end.

    Args:
        root: a folder of buffers, or a single buffer.
        episodes: True: rows are whole episodes, packed by msgpack, in the column "item" (`output_write_episodes=True`);
            False: transitions, with the columns eps_id, obs, actions, rewards, new_obs, terminateds, truncateds.
        columns: RLlib's column -> field; default: observation, action, reward, and the fields that end episodes. With
            `episodes` it may also be the name of a group of fields, such as a dict observation.
        outputs: more fields, such as "action_logp", which become extra model outputs.
        options: of `read_ray`, such as override_num_blocks, filter_meta, split, part.

    Raises:
        NotABufferError: there is no buffer at the root.
        SchemaError: a field is missing, or observations or actions of transitions are a group of fields.
        NotEnoughDataError: there are no episodes.
    """
    buffer = open_root(root)
    schema, names = buffer.schema, _names(buffer.schema, columns or {}, outputs)
    own = f"{crc32('|'.join(map(str, buffer.folders)).encode()):08x}"  # RLlib drops an episode whose id it has seen
    if episodes:
        fields = [field for name in names.values() for field in _members(schema, name)]
        items = read_ray(root, fields=fields, return_indices=True, **options)
        pack = partial(_packed, own=own, names=names, schema=schema)
        return items.map_batches(pack, batch_size=EPISODES_A_BLOCK, zero_copy_batch=True)
    for name in names.values():
        if name not in schema.fields:
            raise SchemaError(
                f"{name!r}: it is a group of fields, and RLlib's transitions have one array each; "
                f"set input_read_episodes=True (episodes=True)"
            )
    fields_of: dict[str, Any] = {"current_fields": tuple(names.values()), "next_fields": (names["obs"],)}
    items = read_ray(root, n_steps=1, include_metadata=False, return_indices=True, **fields_of, **options)
    rename = partial(_transitions, own=own, names=names)
    return items.map_batches(rename, batch_size=None, batch_format="pyarrow", zero_copy_batch=True)


def _names(schema: Schema, columns: Mapping[str, str], outputs: Sequence[str]) -> dict[str, str]:
    """RLlib's column -> field or group of fields of the folder. Raises SchemaError if there is no such field."""
    ends = dict(zip(ENDS, (schema.terminated, schema.truncated), strict=True))
    defaults = {**OURS, **{column: field for column, field in ends.items() if field is not None}}
    if unknown := [column for column in columns if column not in {*OURS, *ENDS}]:
        raise SchemaError(f"columns: got {unknown}, expected names among {[*OURS, *ENDS]}; name others as `outputs`")
    names = defaults | dict(columns) | {name: name for name in outputs}
    for column, name in names.items():
        if not _members(schema, name):
            raise SchemaError(
                f"{column!r}: there is no field {name!r}, there are {[*schema.fields]}; "
                f"name it by input_read_schema={{{column!r}: …}} (columns=)"
            )
    require_kinds({field: schema.fields[field] for name in names.values() for field in _members(schema, name)}, "RLlib")
    return names


def _members(schema: Schema, name: str) -> list[str]:
    return [field for field in schema.fields if field == name or field.startswith(f"{name}.")]


def _transitions(table: Any, own: str, names: Mapping[str, str]) -> Any:
    """A block of 1-step transitions with RLlib's names of columns."""
    ids = zip(table["_source"].to_pylist(), table["_serial"].to_pylist(), strict=True)
    out = {"eps_id": pa.array([f"{own}-{source}-{serial}" for source, serial in ids], pa.string())}
    out |= {column: table[name] for column, name in names.items()}
    out["new_obs"] = table[f"next_{names['obs']}"]
    return pa.table({**{end: pa.array(np.zeros(table.num_rows, np.bool_)) for end in ENDS}, **out})


def _packed(batch: Mapping[str, Any], own: str, names: Mapping[str, str], schema: Schema) -> dict[str, Any]:
    """Whole episodes, each as the packed state of RLlib's own object."""
    ids = [f"{own}-{a}-{b}" for a, b in zip(batch["_source"].tolist(), batch["_serial"].tolist(), strict=True)]
    episodes = (_episode(batch, row, name, names, schema) for row, name in enumerate(ids))
    packed = [msgpack.packb(e.get_state(), default=msgpack_numpy.encode) for e in episodes if len(e)]
    return {"item": packed}


def _episode(batch: Mapping[str, Any], row: int, id_: str, names: Mapping[str, str], schema: Schema) -> Any:
    """The episode of a row as RLlib's object; empty if no observation follows any of its steps."""
    length = int(batch["_lens"][row])
    ends = {end: bool(np.any(batch[names[end]][row][length - 1])) for end in ENDS if end in names}
    terminated = ends.get("terminateds", False)
    # After a terminated step any observation will do.
    count = length if terminated else len(batch[_members(schema, names["obs"])[0]][row]) - 1

    def steps(column: str, stop: int) -> Any:
        return InfiniteLookbackBuffer(_value(batch, row, _members(schema, names[column]), names[column], stop))

    return SingleAgentEpisode(
        id_=id_,
        observations=steps("obs", count + 1),
        actions=steps("actions", count),
        rewards=steps("rewards", count),
        terminated=terminated,
        truncated=ends.get("truncateds", False) or not terminated,
        extra_model_outputs={name: steps(name, count) for name in names if name not in {*OURS, *ENDS}},
        len_lookback_buffer=0,
    )


def _value(batch: Mapping[str, Any], row: int, members: Sequence[str], name: str, stop: int) -> Any:
    """The first `stop` steps of a field, or of a group as nested dicts. Where one is missing, the last is repeated."""
    tree: dict[str, Any] = {}
    for member in members:
        values = np.asarray(batch[member][row])
        values = values[np.minimum(np.arange(stop), len(values) - 1)]
        put(tree, ["", *filter(None, member.removeprefix(name).split("."))], values)
    return tree[""]
