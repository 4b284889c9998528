"""Dtypes by name, and the exact conversion of a user's values into them.

Owns the allow-list of dtypes and the rule that says which casts are lossy. It is the only module below the PyTorch
layer that knows torch, through `sys.modules`, so that it never imports torch. Does no I/O and knows no schema.

These casts are lossy, and refused: an integer or bool that does not come back equal, a non-integral or non-finite float
into an integer, a finite float that becomes infinite, a string that is longer than declared. Rounding among floats is
allowed.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memmap_buffer.choices import did_you_mean
from memmap_buffer.errors import SchemaError

Array: TypeAlias = npt.NDArray[Any]
FloatArray: TypeAlias = npt.NDArray[np.float64]

MAX_STRING = 4096
FALSE, TRUE = 0, 1  # the bytes of a mask
FEW = 4096  # numbers whose squares are summed to bound them: for more, BLAS may wake threads
NUMERIC = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
)
_SPELLINGS = {"float": "float32", "int": "int64", "complex": "complex64", "half": "float16", "double": "float64"}
_BUILTINS = {float: "float32", int: "int64", bool: "bool", complex: "complex64"}
_TYPECODES = {np.dtype(name).str[1:]: name for name in NUMERIC if name != "bfloat16"}
_ROUNDED = "the integer would be rounded; declare an integer or a wider float field"
_STRING = re.compile(r"U([1-9][0-9]{0,3})")


def dtype_name(spec: object) -> str:
    """The canonical name of a dtype, from any spelling of it.

    Args:
        spec: "float" (float32), "int" (int64), a numpy or torch dtype or its name, a Python type, or "U<n>" for
            strings of at most n characters.

    Returns:
        One of `NUMERIC`, or "U1" … "U4096".

    Raises:
        SchemaError: the dtype cannot be stored, as those of objects and datetimes.
    """
    if isinstance(spec, str):
        name = _SPELLINGS.get(spec, spec.removeprefix("torch.").lstrip("<=|"))
        name = _TYPECODES.get(name, name)
    elif isinstance(spec, type) and spec in _BUILTINS:
        name = _BUILTINS[spec]
    elif str(spec).startswith("torch."):
        name = str(spec).removeprefix("torch.")
    elif isinstance(spec, np.dtype) or (isinstance(spec, type) and issubclass(spec, np.generic)):
        dtype = np.dtype(spec)
        name = dtype.str[1:] if dtype.kind == "U" else dtype.name
    else:
        name = ""
    if is_dtype_name(name):
        return name
    hint = did_you_mean(spec, [*_SPELLINGS, *NUMERIC]) if isinstance(spec, str) else ""
    raise SchemaError(
        f"dtype: got {spec!r}{hint and f'; {hint}'}, expected one of float, int, {', '.join(NUMERIC)} or 'U1' … "
        f"'U{MAX_STRING}' (objects cannot be mapped from a file; store an index or a fixed-width string instead)"
    )


def is_dtype_name(name: str) -> bool:
    """Whether `name` is the canonical name of a dtype; a schema file may hold no other name."""
    string = _STRING.fullmatch(name)
    return name in NUMERIC or (string is not None and int(string[1]) <= MAX_STRING)


@cache
def storage_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy dtype in which the canonical `name` is stored; bfloat16 as its bits, uint16."""
    # Made from its text: on a little-endian machine that gives numpy's own object, so comparing two dtypes is one `is`.
    return np.dtype(np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<").str)


def to_numpy(value: Any) -> Array:
    """A value as an array, which may share the value's memory.

    Args:
        value: a tensor on any device, an array, a list or a scalar. Tensors of bfloat16 become float32.

    Raises:
        SchemaError: a ragged list, a string that ends in NUL, or a tensor that numpy cannot hold.
    """
    if type(value) is np.ndarray:
        return value
    torch = loaded_torch()
    if torch is not None:
        value = _without_tensors(value, torch)
    if isinstance(value, (str, list, tuple)) and _ends_in_nul(value):
        raise SchemaError("got a string that ends in NUL, which fixed-width text cannot keep; strip it")
    try:
        array = np.asarray(value)
    except ValueError as error:  # numpy raises it for a ragged list
        raise SchemaError(
            f"got a value that is no rectangular array ({error}); pad it, or store its length too"
        ) from None
    return array


def loaded_torch() -> Any:
    """torch if it is imported, else None; None, too, while another thread still imports it: no tensor exists yet."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """`value` as an int.

    Args:
        name: the option, as the error calls it.
        value: any value.
        least: the smallest number allowed.
        most: the largest number allowed; None: there is none.

    Raises:
        SchemaError: the value is no whole number (a bool is none), or is out of range.
    """
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        limit = "" if most is None else f" to {most}" if most < 2**16 else f" to 2**{most.bit_length() - 1}"
        raise SchemaError(f"{name}: got {value!r}, expected a whole number from {least}{limit}")
    return int(value)


def check_number(name: str, value: Any, low: float = 0, high: float = 1) -> None:
    """Raise SchemaError, which calls the value `name`, unless it is a number from `low` to `high`."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise SchemaError(f"{name}: got {value!r}, expected a number from {low} to {high}")


def all_of(mask: Array) -> bool:
    """Whether all entries of a mask are true, in a third of the time of numpy's `all` for the mask of a batch."""
    return FALSE not in mask.tobytes()


def any_of(mask: Array) -> bool:
    """Whether any entry of a mask is true, as fast as `all_of`."""
    return TRUE in mask.tobytes()


def encode(value: Any, name: str, shape: tuple[int, ...], lead: int = 0) -> Array:
    """A value as it is stored: the dtype of `name`, shape `(*lead dimensions, *shape)`.

    A scalar for shape (1,) and the reverse are accepted.

    Args:
        value: a tensor, array, list or scalar.
        name: the canonical dtype name.
        shape: the declared shape of one entry.
        lead: how many dimensions stand before those of an entry: 0 for one step, 1 for an episode or a batch.

    Raises:
        SchemaError: another shape, or a lossy cast; the text says got and expected but not where.
    """
    array = to_numpy(value)
    entry = array.shape[lead:]
    if entry != shape or array.ndim < lead:
        if array.ndim < lead or (entry, shape) not in (((), (1,)), ((1,), ())):
            expected = f"expected ({', '.join([*'*' * lead, *map(str, shape)])})" if lead else f"declared {shape}"
            raise SchemaError(f"got shape {array.shape}, {expected}; {_remedy(entry, shape, lead)}")
        array = array.reshape(array.shape[:lead] + shape)
    if array.dtype == np.float64 and isinstance(value, (list, tuple)):
        return _cast_list(value, array, name)
    return _cast(array, name)


def _remedy(entry: tuple[int, ...], shape: tuple[int, ...], lead: int) -> str:
    if not lead and entry[1:] == shape:
        return "store one entry, not a batch"
    if sorted(entry) == sorted(shape):
        return "its axes are in another order, transpose it"
    return "give that shape, or declare the other"


def of_mask(array: Array) -> str:
    """The remedy that an error about indices adds if `array` is a mask; "" if it is none."""
    return "; of a mask give np.flatnonzero(mask)" if array.dtype.kind == "b" else ""


def decode(array: Array, name: str) -> Array:
    """Stored values as numpy can compute with them: bfloat16 as float32, all others unchanged.

    Args:
        array: as stored; bfloat16 as its bits, uint16.
        name: the canonical dtype name.
    """
    if name != "bfloat16":
        return array
    return (array.astype(np.uint32, subok=False) << np.uint32(16)).view(np.float32)


def _without_tensors(value: Any, torch: Any) -> Any:
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple, torch.Tensor)):
        return [_without_tensors(item, torch) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy(force=True)
    except (TypeError, NotImplementedError, RuntimeError) as error:
        raise SchemaError(f"got a tensor of {value.dtype} ({value.layout}) that numpy cannot hold: {error}") from None


def _cast_list(value: Any, array: Array, name: str) -> Array:
    """`_cast` of a list that numpy made float64; with integers above 2**53, which float64 may round, item by item."""
    items = np.array(value, dtype=object).ravel()
    if not any(isinstance(item, int) and abs(item) > 2**53 for item in items):
        return _cast(array, name)
    return np.array([_cast(np.asarray(item), name) for item in items], storage_dtype(name)).reshape(array.shape)


def _ends_in_nul(value: Any) -> bool:
    if isinstance(value, str):
        return value.endswith("\0")
    return isinstance(value, (list, tuple)) and any(_ends_in_nul(v) for v in value if isinstance(v, (str, list, tuple)))


def _cast(array: Array, name: str) -> Array:
    target = storage_dtype(name)
    if array.dtype == target and name != "bfloat16":
        return array
    if target.kind == "U":
        return _cast_string(array, name, target)
    if array.dtype.kind not in "biufc":
        shown = repr(array.item()) if array.ndim == 0 else f"an array of {array.dtype}"
        raise SchemaError(f"got {shown[:80]}, declared {name}: only numbers and bools convert; store a number")
    if name == "bfloat16":
        bits = _to_bfloat16(_cast_number(array, np.dtype(np.float32), name))
        if array.dtype.kind in "iu" and (rounded := decode(bits, name) != array).any():
            raise _lossy(array, rounded, name, _ROUNDED)
        return bits
    return _cast_number(array, target, name)


def _cast_number(array: Array, target: np.dtype[Any], name: str) -> Array:
    if array.dtype == target or not array.size:
        return array.astype(target)
    if target.kind == "c":
        return _cast_complex(array, target, name)
    if array.dtype.kind == "c":
        why = "an imaginary part would be lost; store `.real`, or declare a complex field"
        raise _lossy(array, np.ones(array.shape), name, why)
    if target.kind in "biu":
        return _cast_integral(array, target, name)
    may_be_summed = array.size <= FEW and array.dtype.kind == target.kind == "f"
    # None is larger than the root of the sum of their squares, which takes a third of the time of all that follows.
    if may_be_summed and float(np.vdot(array, array)) ** 0.5 <= _largest(target):
        return array.astype(target)
    with np.errstate(over="ignore", invalid="ignore"):  # `invalid`: a signalling NaN, which stays a NaN
        out = array.astype(target)
    if array.dtype.kind == "f":
        if not all_of(np.isfinite(out)) and (lost := np.isinf(out) & np.isfinite(array)).any():
            raise _lossy(array, lost, name, "it would become infinite")
    elif array.dtype.kind in "iu" and (rounded := _rounded(array, out)).any():
        raise _lossy(array, rounded, name, _ROUNDED)
    return out


@cache
def _largest(target: np.dtype[Any]) -> float:
    return float(np.finfo(target).max)


def _cast_integral(array: Array, target: np.dtype[Any], name: str) -> Array:
    if np.can_cast(array.dtype, target, "safe"):
        return array.astype(target)
    low, high = (0, 1) if target.kind == "b" else (int(np.iinfo(target).min), int(np.iinfo(target).max))
    if array.dtype.kind == "f" and not (whole := np.isfinite(array) & (np.trunc(array) == array)).all():
        raise _lossy(array, ~whole, name, "not a whole number; round it first, or declare a float field")
    if int(array.min()) < low or int(array.max()) > high:
        # By plain numbers: numpy would compare 2**64 - 1 as the float 2**64.
        beyond = np.array([not low <= int(value) <= high for value in array.ravel().tolist()]).reshape(array.shape)
        raise _lossy(array, beyond, name, f"out of range {low} … {high}; declare a wider field")
    return array.astype(target)


def _cast_complex(array: Array, target: np.dtype[Any], name: str) -> Array:
    part = np.dtype(np.float32 if target.itemsize == 8 else np.float64)
    out = np.empty(array.shape, target)
    out.real = _cast_number(array.real, part, name)
    out.imag = _cast_number(array.imag, part, name)
    return out


def _cast_string(array: Array, name: str, target: np.dtype[Any]) -> Array:
    if array.dtype.kind != "U":
        raise SchemaError(f"got {array.dtype}, declared {name} (text); pass a str, or decode bytes first")
    limit = target.itemsize // 4
    longest = int(np.char.str_len(array).max()) if array.size else 0
    if longest > limit:
        raise SchemaError(f"got a string of {longest} characters, declared {name}; shorten it, or declare 'U{longest}'")
    return array.astype(target)


def _to_bfloat16(array: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even, and return the bits. A NaN keeps its upper 16 bits."""
    bits = array.view(np.uint32).astype(np.uint64)
    nearest = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    upper = bits >> np.uint64(16)
    upper |= np.where(upper & np.uint64(0x7F) == 0, np.uint64(0x40), np.uint64(0))  # else it would read as infinite
    rounded = np.where(np.isnan(array), upper, nearest)
    overflow = ((rounded & np.uint64(0x7FFF)) == 0x7F80) & np.isfinite(array)
    if overflow.any():
        raise _lossy(array, overflow, "bfloat16", "it would become infinite")
    return np.asarray(rounded, np.uint16)


def _rounded(integers: Array, floats: Array) -> Any:
    """A mask of the integers that differ from what they became as floats."""
    exact = 2 ** (np.finfo(floats.dtype).nmant + 1)
    if -exact <= int(integers.min()) and int(integers.max()) <= exact:
        return np.False_
    # Python compares an int with a float exactly; numpy would round the int first.
    differ = [i != f for i, f in zip(integers.ravel().tolist(), floats.ravel().tolist(), strict=True)]
    return np.array(differ).reshape(integers.shape)


def _lossy(values: Array, lost: Any, name: str, why: str) -> SchemaError:
    """The error for values of which some, where `lost` is true, cannot be kept."""
    at = tuple(np.argwhere(lost)[0].tolist())
    where = f" at {list(at)}" if at else ""
    return SchemaError(f"got {values[at].item()}{where} ({values.dtype}), declared {name}: {why}")
