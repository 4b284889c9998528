"""Items of a buffer as pandas tables: a row for each item, also with the columns of ReAgent's pre-timeline tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from memmap_buffer import SchemaError
from memmap_buffer.adapters import extra, flatten
from memmap_buffer.interop.columns import LENGTHS, VIEW_OPTIONS, columns_of, unpadded

with extra("pandas"):
    import pandas

if TYPE_CHECKING:
    from memmap_buffer.adapters import Readable


def to_dataframe(buffer: Readable, indices: Any = None, **options: Any) -> pandas.DataFrame:
    """Items as a table, a row for each: a column for each field, by its dotted name, and the item's place.

    Numbers become a column of their dtype (bfloat16: float32), arrays a column of objects, lists a column of arrays
    without padding. With `ragged=True` sequences are arrays of each item's own length.

    Args:
        buffer: the buffer to read.
        indices: (B,) positions of items; None: all items, which must fit into memory.
        options: of `dataset`; the default view is single timesteps.

    Returns:
        The columns of the batch. Before them stand `_episode`, the serial, and `_t` instead of `_indices`; for a
        ConcatBuffer `_source`, too.

    Raises:
        SchemaError: as `dataset` raises it.
        NotEnoughDataError: there are no episodes.
        IndexError: an index is out of range.
        ImportError: pandas is not installed.
    """
    if not any(options.get(name) for name in VIEW_OPTIONS):
        options["timestep_level"] = True
    columns = columns_of(flatten(buffer.batch(indices, **{"return_indices": True, **options})))
    for key in [key for key in columns if key.startswith(LENGTHS)]:
        name = key.removeprefix(LENGTHS)
        columns[name] = unpadded(columns[name], columns.pop(key))
    table = {name: column if column.ndim == 1 else list(column) for name, column in columns.items()}
    return pandas.DataFrame(table).rename(columns={"_serial": "_episode"})


def to_pre_timeline(
    buffer: Readable,
    *,
    discrete: bool,
    observation: str = "observation",
    action: str = "action",
    reward: str = "reward",
    terminated: str | None = None,
    log_prob: str | None = "log_prob",
    ds: str = "2019-01-01",
) -> pandas.DataFrame:
    """The table that ReAgent's timeline operator takes, with its names of columns: a row for each timestep.

    Args:
        buffer: the buffer to read.
        discrete: True: actions are numbers that name an action; False: they are vectors.
        observation: a field of vectors.
        action: a scalar field with `discrete`, else a field of vectors.
        reward: a scalar field.
        terminated: a scalar field; default: the field that the schema declares.
        log_prob: a scalar field of the natural logarithm of the action's probability; None leaves the column
            action_probability out.
        ds: the date of all rows.

    Returns:
        The columns ds, mdp_id (the serial as text), sequence_number, state_features (dict index -> value), action
        (text, or a dict index -> value), action_probability, reward, metrics. With `discrete` also possible_actions,
        all actions that occur, and possible_actions_mask; both are empty at terminal steps.

    Raises:
        SchemaError: a field was not declared, or has another shape than expected.
        NotEnoughDataError: there are no episodes.
    """
    terminated = terminated or buffer.schema.terminated or "terminated"
    names = (observation, action, reward, terminated, *([] if log_prob is None else [log_prob]))
    buffer.schema.require(names, "to_pre_timeline", buffer.schema.fields)
    for name, dimensions in ((observation, 1), (action, 0 if discrete else 1), (reward, 0), (terminated, 0)):
        shape = buffer.schema.fields[name].shape
        if len(shape) != dimensions and not (shape == (1,) and not dimensions):
            raise SchemaError(f"to_pre_timeline: {name!r} has shape {shape}, expected {dimensions} dimensions")
    table = to_dataframe(buffer, fields=names, include_metadata=False)
    episode = table[[name for name in ("_source", "_episode") if name in table]].astype(str)
    rewards = _numbers(table[reward]).tolist()
    actions = [str(value) for value in _numbers(table[action]).tolist()] if discrete else _sparse(table[action])
    rows: dict[str, Any] = {"ds": ds, "mdp_id": episode.agg("-".join, axis=1), "sequence_number": table["_t"]}
    rows |= {"state_features": _sparse(table[observation]), "action": actions}
    if log_prob is not None:
        rows["action_probability"] = np.exp(_numbers(table[log_prob]))
    rows |= {"reward": rewards, "metrics": [{"reward": value} for value in rewards]}
    if discrete:
        possible_actions = [str(value) for value in np.unique(_numbers(table[action])).tolist()]
        ends = _numbers(table[terminated]).astype(bool).tolist()
        rows["possible_actions_mask"] = [[] if end else [1] * len(possible_actions) for end in ends]
        rows["possible_actions"] = [[] if end else possible_actions for end in ends]
    return pandas.DataFrame(rows)


def _numbers(column: Any) -> Any:
    return np.stack(column.to_list()).reshape(len(column))


def _sparse(column: Any) -> list[dict[int, Any]]:
    return [dict(enumerate(row.tolist())) for row in column]
