"""The key by which `sample` finds the sampler that it made of the same options before.

Keys are equal for options that mean the same, also where they are written anew at each call, as an inline lambda, a
list of names or `Normalize(…)` is. The key of a function has its code and the objects that it refers to; where these
may have changed since, the caller compares the keys once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set, ValuesView
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

import numpy as np

PLAIN = (bool, int, float, str, bytes, type(None))


class Same:
    """A key that is equal for one object alone, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(options: Mapping[str, Any]) -> Hashable:
    """The key of options; where all are numbers, names and views it is `tuple(options.items())`."""
    return tuple((name, _key(value)) for name, value in options.items())


def key_of_dicts(options: Mapping[str, Any]) -> Hashable:
    """The key of options where all are numbers, names, views and dicts of these, in a tenth of the time."""
    return tuple((name, (Mapping, *value.items()) if type(value) is dict else value) for name, value in options.items())


def _key(value: Any) -> Hashable:
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, partial):
        return partial, _key(value.func), tuple(map(_of_object, value.args)), _attributes(value.keywords)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.shape, value.dtype.str, value.tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return _of_dataclass(value)
    return _of_container(value)


def _of_container(value: Any) -> Hashable:
    if type(value) is tuple:
        keys = tuple(map(_key, value))
        return value if _are_same(keys, value) else keys
    if isinstance(value, Mapping):
        return (Mapping, *((_key(name), _key(item)) for name, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return Set, frozenset(map(_key, value))
    if isinstance(value, (list, Set, ValuesView)):
        return (list, *map(_key, value))
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return value  # type: ignore[no-any-return]


def _of_dataclass(value: Any) -> Hashable:
    """By its fields, if it is frozen; itself where they are their own keys, so that it is found at once."""
    if not type(value).__dataclass_params__.frozen:
        return Same(value)
    values = [getattr(value, field.name) for field in fields(value)]
    keys = [_key(each) for each in values]
    return value if _are_same(keys, values) else (type(value), *keys)


def _are_same(keys: Sequence[Any], values: Sequence[Any]) -> bool:
    return all(key is value for key, value in zip(keys, values, strict=True))


def _of_function(function: FunctionType) -> Hashable:
    """By its code, and by the objects that it refers to now."""
    refers = tuple(map(_content, function.__closure__ or ())), tuple(map(_of_object, function.__defaults__ or ()))
    others = _attributes(function.__kwdefaults__ or {}), _attributes(function.__dict__)
    return function.__code__, Same(function.__globals__), refers, others


def _content(cell: CellType) -> Hashable:
    try:
        return _of_object(cell.cell_contents)
    except ValueError:  # it is empty: a name that was not given a value yet
        return Same(cell)


def _of_object(value: Any) -> Hashable:
    """A plain value by its type and text, as 1, 1.0 and True differ; any other object by itself."""
    return (type(value), repr(value)) if type(value) in PLAIN or isinstance(value, np.generic) else Same(value)


def _attributes(values: Mapping[str, Any]) -> Hashable:
    return tuple((name, _of_object(value)) for name, value in values.items())
