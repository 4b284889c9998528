"""Conditions on the columns of a table as text, such as "length>=20", which the command and the browser's page take."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import SchemaError

_CONDITION = re.compile(r"\s*([\w.]+)\s*(==|=|!=|<=|>=|<|>)\s*(.*?)\s*", re.DOTALL)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def matching(table: dict[str, Array], conditions: Iterable[str]) -> dict[str, Array]:
    """The rows for which all conditions hold.

    Args:
        table: name -> (n,). A column of objects holds tuples of labels: "mark=bad" chooses the rows that have this
            label, "mark!=bad" those that have not, and "mark=" those that have no label.
        conditions: texts of a column, one of = != < <= > >=, and a value.

    Returns:
        Name -> (m,), in the order of `table`.

    Raises:
        SchemaError: a condition cannot be read, names no column, or its value does not fit the column.
    """
    for text in conditions:
        condition = _CONDITION.fullmatch(text)
        if condition is None:
            raise SchemaError(
                f"--where {text!r}: expected a column, one of = != < <= > >=, and a value, as in 'length>=20'"
            )
        column = column_of(table, condition[1], "--where")
        chosen = _holds(column, condition[2], condition[3], text)
        table = {name: values[chosen] for name, values in table.items()}
    return table


def column_of(table: dict[str, Array], name: str, where: str) -> Array:
    """The column of a name.

    Args:
        table: name -> (n,).
        name: of the column.
        where: the option that has the name, for the error.

    Raises:
        SchemaError: there is no such column; the text lists the columns.
    """
    if name not in table:
        raise SchemaError(f"{where}: there is no column {name!r}; there are {', '.join(table)}")
    return table[name]


def _holds(column: Array, sign: str, value: str, condition: str) -> Array:
    if column.dtype.kind != "O":
        return np.asarray(_COMPARE[sign](column, _value_like(column, value, condition)))
    if sign not in ("=", "==", "!="):
        raise SchemaError(f"--where {condition!r}: labels have no order; use = or !=")
    has = np.fromiter((value in labels if value else not labels for labels in column), np.bool_, len(column))
    return ~has if sign == "!=" else has


def _value_like(column: Array, text: str, condition: str) -> Any:
    """`text` as a value of the column's kind. Raises SchemaError, which quotes `condition`, if it is none."""
    try:
        if column.dtype.kind == "U":
            return text
        if column.dtype.kind == "b":
            return _TRUTH[text.lower()]
        if column.dtype.kind == "c":
            return complex(text)
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except (KeyError, ValueError):
        raise SchemaError(f"--where {condition!r}: {text!r} is no value of a column of {column.dtype}") from None
