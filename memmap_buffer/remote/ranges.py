"""The lowest and highest values that a list of shards tells of each, so that only those are opened that can match.

They are one text a shard, `name dtype lowest highest;…`, of the lengths of its episodes and its meta fields of numbers:
a list is read whole, and is bounded in the values of JSON that it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.items.filters import matches

MAX_TEXT = 4096  # bytes a shard; fields beyond them are not told, so that a list of 10,000 shards can be read
_PART = re.compile(r"([A-Za-z][\w.]*) ([<|][iuf][1248]) (\S+) (\S+)", re.ASCII)


def ranges_of(columns: Mapping[str, Array]) -> str:
    """The text for columns (episodes, …); without those that are no numbers, or have a NaN, which has no order."""
    text = ""
    for name, column in columns.items():
        column = column.view(np.uint8) if column.dtype == bool else column
        if column.ndim == 1 and column.size and column.dtype.kind in "iuf" and not np.isnan(column).any():
            part = f"{name} {column.dtype.str} {column.min().item()!r} {column.max().item()!r}"
            text += f";{part}" if len(text) + len(part) < MAX_TEXT else ""
    return text[1:]


def may_match(ranges: str, conditions: Mapping[str, Any]) -> bool:
    """Whether an episode of a shard may pass conditions; also where its text does not tell.

    Args:
        ranges: of the shard.
        conditions: as `filter_meta` has them, but no callables.

    Raises:
        SchemaError: a condition does not fit its column.
    """
    parts = (_PART.fullmatch(part) for part in ranges.split(";"))
    return all(_may_match(part, conditions[part[1]]) for part in parts if part and part[1] in conditions)


def _may_match(part: re.Match[str], condition: Any) -> bool:
    name, dtype, low, high = part.groups()
    number = float if "f" in dtype else int
    try:
        lowest, highest = (np.array([number(text)], dtype) for text in (low, high))
    except (ValueError, OverflowError):  # a list that somebody spoilt
        return True

    def overlaps(first: Any, beyond: Any) -> bool:
        return bool(matches(highest, (first, None), name)[0] and matches(lowest, (None, beyond), name)[0])

    if isinstance(condition, tuple):
        matches(lowest, condition, name)  # which raises where it is none
        return overlaps(*condition)
    condition = condition.tolist() if hasattr(condition, "tolist") else condition
    members = condition if isinstance(condition, (set, frozenset, list, range)) else [condition]
    try:
        members = _between(members, lowest, highest)
    except (TypeError, ValueError, ArithmeticError):  # some have no order
        matches(lowest, condition, name)
    return any(overlaps(each, each) or bool(matches(lowest, [each], name)[0]) for each in members)


def _between(members: Iterable[Any], lowest: Array, highest: Array) -> list[Any]:
    """The members that may lie between two numbers; a float is compared as the column would round it."""
    if lowest.dtype.kind == "f":
        with np.errstate(all="ignore"):
            lowest, highest = np.nextafter(lowest, -np.inf), np.nextafter(highest, np.inf)
    low, high = lowest.item(), highest.item()
    numbers = [each.item() if hasattr(each, "item") else each for each in members]
    return [each for each in numbers if low <= each <= high]
