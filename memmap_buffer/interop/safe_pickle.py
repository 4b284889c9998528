"""Pickles of plain values and of arrays, read without unpickling: no function is looked up or called."""

from __future__ import annotations

import pickletools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memmap_buffer import SchemaError

_MARK = object()
_ARGUMENTS = frozenset(  # opcodes that push their argument
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
)
_PUSHED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list}
_BYTES = frozenset(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"))
_TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "TUPLE": 0, "APPENDS": 0, "SETITEMS": 0}
_NUMPY = re.compile(r"numpy(\._?core(\.numeric|\.multiarray)?)?")


@dataclass
class _Call:
    """A call that a pickle asks for; it is never made. `state`: the state that the result would get."""

    name: str
    arguments: Any = None
    state: Any = None


def safe_loads(data: bytes) -> Any:
    """The value of a pickle of protocol 2 or later: None, bools, numbers, texts, dicts, lists and tuples.

    Raises:
        SchemaError: the data holds any other value, or is no pickle; nothing of it was executed.
    """
    return _run(data, _step)


def array_loads(data: bytes) -> npt.NDArray[Any]:
    """The array, read-only, in a pickle of protocol 3 or later that holds one array of numbers.

    Raises:
        SchemaError: the data holds any other value, or is no pickle; nothing of it was executed.
    """
    call = _run(data, _step_of_array)
    try:
        if call.name == "_frombuffer":
            content, dtype, shape, order = call.arguments
        elif call.name == "_reconstruct":
            _, shape, dtype, columns_first, content = call.state
            order = "F" if columns_first else "C"
        else:
            raise ValueError(call.name)
        code, byte_order = dtype.arguments[0], dtype.state[1]
        if dtype.name != "dtype" or not re.fullmatch(r"[biufc]\d+", code):
            raise ValueError(code)
        return np.frombuffer(content, np.dtype(byte_order + code)).reshape(shape, order=order)
    except (AttributeError, ValueError, TypeError, IndexError) as error:
        raise SchemaError(f"got a pickle of something else than an array of numbers ({error})") from error


def _run(data: bytes, step: Any) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            step(opcode.name, argument, stack, memo)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, MemoryError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(f"got no whole pickle ({type(error).__name__}: {error})") from error
    if len(stack) != 1 or stack[0] is _MARK:
        raise SchemaError("got no whole pickle: it ends with no single value")
    return stack[0]


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _ARGUMENTS:
        stack.append(argument)
    elif name in _PUSHED:
        stack.append(_PUSHED[name])
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name in _TAKEN:
        _collect(name, stack)
    elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
        memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name not in ("PROTO", "FRAME", "STOP"):
        raise SchemaError(f"got a pickle that does more than hold plain values ({name}), and carried nothing of it out")


def _step_of_array(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """As `_step`, and the calls of numpy's own functions, as `_Call`."""
    if name in _BYTES:
        stack.append(bytes(argument))
    elif name in ("STACK_GLOBAL", "GLOBAL"):
        module, function = [stack.pop(-2), stack.pop()] if name == "STACK_GLOBAL" else argument.split(" ")
        if not _NUMPY.fullmatch(module):
            raise SchemaError(f"got a pickle that names {module}.{function}, and carried nothing of it out")
        stack.append(_Call(function))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_Call(stack.pop().name, arguments))
    elif name == "BUILD":
        state = stack.pop()
        stack[-1].state = state
    else:
        _step(name, argument, stack, memo)


def _collect(name: str, stack: list[Any]) -> None:
    """Put as many values from the stack as `_TAKEN` says, 0: all behind the mark, into a tuple, list or dict."""
    count = _TAKEN[name]
    at = len(stack) - count if count else max(i for i, value in enumerate(stack) if value is _MARK)
    values = stack[at:] if count else stack[at + 1 :]
    del stack[at:]
    if name.startswith("TUPLE"):
        stack.append(tuple(values))
    elif name.startswith("APPEND"):
        stack[-1].extend(values)
    else:
        stack[-1].update(zip(values[::2], values[1::2], strict=True))
