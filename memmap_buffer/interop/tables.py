"""Batches as the columns of a table, one item a row, and rows of timesteps as an episode. Imports no table library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memmap_buffer.schema import Schema

VIEW_OPTIONS = ("view", "n_steps", "timestep_level", "window_length")
INDICES = {"_index": ("_source", "_serial"), "_indices": ("_source", "_serial", "_t")}


def columns_of(
    batch: dict[str, Any], finals: Mapping[str, bool], lens: str = "_lens", has_final: str = "_has_final"
) -> dict[str, Any]:
    """A batch as columns: whole episodes without their padding, indices as numbers.

    Args:
        batch: key -> tensor or list of texts.
        finals: for whole episodes, key -> whether it includes the final observation.
        lens: the key of the episodes' lengths.
        has_final: the key of the flags of episodes that have a final observation.
    """
    columns = {name: _column(values) for name, values in batch.items()}
    if finals:
        steps, ends = columns[lens], columns.pop(has_final)
        for name in columns.keys() & finals.keys():
            stops = (steps + (ends & finals[name])).tolist()
            columns[name] = _objects([row[:stop] for row, stop in zip(batch[name], stops, strict=True)])
    for name, parts in INDICES.items():
        if name in columns:
            numbers = columns.pop(name)
            numbers = numbers.reshape(len(numbers), -1)
            columns |= dict.fromkeys(parts, np.zeros(len(numbers), np.int64))  # of one folder there is no `_source`
            columns |= dict(zip(parts[-numbers.shape[1] :], numbers.T, strict=True))
    return columns


def as_episode(schema: Schema, order: str | None, steps: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of an episode as one row."""
    count = len(next(iter(steps.values())))
    rows = np.arange(count) if order is None else np.argsort(steps[order], kind="stable")
    columns = {name: steps[name][rows] for name in schema.fields if name in steps}
    finals = [name for name, field in schema.fields.items() if field.final]
    if all(f"next_{name}" in steps for name in finals):
        for name in finals:
            columns[name] = np.concatenate([columns[name], steps[f"next_{name}"][rows[-1:]]])
    episode = {
        name: _objects([column.tolist() if column.dtype == object else column]) for name, column in columns.items()
    }
    return episode | {name: steps[name][rows[:1]] for name in schema.meta_fields if name in steps}


def to_numpy(tensor: Any) -> Any:
    """A tensor as an array, bfloat16 as float32."""
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def _column(values: Any) -> Any:
    if isinstance(values, list):
        return _objects(values) if values and isinstance(values[0], list) else np.asarray(values)
    return _objects(list(values.unbind())) if values.is_nested else to_numpy(values)


def _objects(rows: Sequence[Any]) -> Any:
    """A column of arrays, or lists of text, each of its own length."""
    out = np.empty(len(rows), object)
    for i, row in enumerate(rows):
        out[i] = row if isinstance(row, (list, np.ndarray)) else to_numpy(row)
    return out
