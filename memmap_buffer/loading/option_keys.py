"""The key by which `sample` finds the sampler that it made for equal options before; `api.reading` calls `key_of`.

Keys are equal for options that mean the same, also if they are new objects at each call, as an inline lambda, a list of
names or `Normalize(…)` is. The key of a function consists of its code and the objects that it refers to. As these may
change meanwhile, the caller also compares with a new key of the options that the sampler was made with.
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
    """A key that is equal for one and the same object only; it keeps the object alive, so that its id stays its own."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(options: Mapping[str, Any]) -> Hashable:
    """The key of options; `tuple(options.items())` where all values are numbers, names and views."""
    return tuple((name, _key(value)) for name, value in options.items())


def key_of_dicts(options: Mapping[str, Any]) -> Hashable:
    """The key of options with numbers, names, views and dicts of these only, in a tenth of the time of `key_of`."""
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
    """A frozen dataclass by its fields; the object itself where these are their own keys, as that is found faster."""
    if not type(value).__dataclass_params__.frozen:
        return Same(value)
    values = [getattr(value, field.name) for field in fields(value)]
    keys = [_key(field_value) for field_value in values]
    return value if _are_same(keys, values) else (type(value), *keys)


def _are_same(keys: Sequence[Any], values: Sequence[Any]) -> bool:
    return all(key is value for key, value in zip(keys, values, strict=True))


def _of_function(function: FunctionType) -> Hashable:
    """A function by its code, its globals, and the objects that its closure, defaults and attributes refer to now."""
    referred = tuple(map(_content, function.__closure__ or ())), tuple(map(_of_object, function.__defaults__ or ()))
    attributes = _attributes(function.__kwdefaults__ or {}), _attributes(function.__dict__)
    return function.__code__, Same(function.__globals__), referred, attributes


def _content(cell: CellType) -> Hashable:
    try:
        return _of_object(cell.cell_contents)
    except ValueError:  # the cell is empty: its variable has no value yet
        return Same(cell)


def _of_object(value: Any) -> Hashable:
    """A plain value by its type and text, so that 1, 1.0 and True differ; any other object by its identity."""
    return (type(value), repr(value)) if type(value) in PLAIN or isinstance(value, np.generic) else Same(value)


def _attributes(values: Mapping[str, Any]) -> Hashable:
    return tuple((name, _of_object(value)) for name, value in values.items())
