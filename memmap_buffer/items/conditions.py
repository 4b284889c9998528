"""Conditions on a column: a value, a set, a range, or a function of the user's."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Number
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError

BoolArray = npt.NDArray[np.bool_]


def matches(column: Array, condition: Any, name: str) -> BoolArray:
    """Where a condition holds.

    Args: column: (n, …). condition: as `Selection` says. name: of the column, for an error.
    Returns: (n,) bool.
    Raises: SchemaError: the condition does not fit the column.
    """
    if callable(condition):
        result = np.asarray(condition(column))
        if result.shape != column.shape[:1] or result.dtype != bool:
            raise SchemaError(
                f"filter {name!r}: the callable gave {result.dtype} {result.shape}, expected bool {column.shape[:1]}"
            )
        return result
    flat = column.reshape(len(column), int(np.prod(column.shape[1:])))
    if flat.shape[1] != 1:
        raise SchemaError(f"filter {name!r}: it has shape {column.shape[1:]}; give a callable from the column to bools")
    values = flat[:, 0]
    if hasattr(condition, "tolist"):
        condition = condition.tolist()  # a numpy or torch array, or scalar
    several = isinstance(condition, (tuple, set, frozenset, list, range))
    _require_alike(values, condition if several else [condition], condition, name)
    with np.errstate(over="ignore"):  # 1e300 is infinite as a float32, and so it compares
        if isinstance(condition, tuple):
            return _in_range(values, condition, name)
        return _is_member(values, list(condition)) if several else np.asarray(values == condition)


def _require_alike(values: Array, among: Iterable[Any], condition: Any, name: str) -> None:
    """Raise SchemaError where text would be compared with numbers, or with what is neither."""
    text = values.dtype.kind == "U"
    if isinstance(condition, tuple):
        among = [end for end in among if end is not None]
    if not all(_is_alike(each, text) for each in among):
        what = "text" if text else f"numbers ({values.dtype})"
        raise SchemaError(f"filter {name!r}: got {condition!r}, but it holds {what}; give such, or a callable")


def _is_alike(value: Any, text: bool) -> bool:
    number = isinstance(value, Number) or hasattr(value, "item")  # a numpy or torch scalar
    return isinstance(value, str) if text else number and not isinstance(value, str)


def _is_member(values: Array, members: list[Any]) -> BoolArray:
    if not members:
        return np.zeros(len(values), np.bool_)
    wanted = np.asarray(members)
    if values.dtype.kind == "f":
        wanted = wanted.astype(values.dtype)  # 0.1 means the float32 next to it, as it does to `==`
    return np.isin(values, wanted)


def _in_range(values: Array, condition: tuple[Any, ...], name: str) -> BoolArray:
    if len(condition) != 2:
        raise SchemaError(f"filter {name!r}: got {condition!r}; a tuple is (low, high), use a set or list for members")
    low, high = (end.item() if hasattr(end, "item") else end for end in condition)
    keep = np.ones(len(values), np.bool_)
    if low is not None:
        keep &= values >= low
    if high is not None:
        keep &= values < high
    return keep
