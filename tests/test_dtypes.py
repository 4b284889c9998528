"""Conversion of a user's values: exact or refused, for every dtype and every kind of value."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from specification import NUMERIC

from memmap_buffer import ReplayBuffer, SchemaError, dtypes
from memmap_buffer.adapters import decode
from memmap_buffer.dtypes import dtype_name, encode, storage_dtype

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
PRECISION = {"bfloat16": (8, 128), "float16": (11, 16), "float32": (24, 128), "float64": (53, 1024)}
FLOATS = [name for name in PRECISION if name != "bfloat16"]

integers = st.one_of(
    st.integers(-300, 300),
    st.integers(-(2**70), 2**70),
    st.builds(
        lambda power, sign, more: sign * 2**power + more,
        st.integers(0, 64),
        st.sampled_from([-1, 1]),
        st.integers(-2, 2),
    ),
)


def limits(name: str) -> tuple[int, int]:
    return (0, 1) if name == "bool" else (int(np.iinfo(name).min), int(np.iinfo(name).max))


def representable(number: int, name: str) -> bool:
    """Whether a float format has this integer, from the number of bits alone."""
    precision, exponent = PRECISION[name]
    size = abs(number)
    odd = size // (size & -size) if size else 0
    return odd.bit_length() <= precision and size.bit_length() <= exponent


def rounds_to_infinity(number: float, name: str) -> bool:
    """Whether the nearest value of a float format, ties away at the end of its range, is beyond its range."""
    precision, exponent = PRECISION[name]
    return abs(Fraction(number)) >= Fraction(2) ** exponent - Fraction(2) ** (exponent - precision - 1)


def accepted(value: Any, name: str, shape: tuple[int, ...] = ()) -> np.ndarray | None:
    """The stored value as numpy computes with it, or None where it was refused."""
    try:
        return decode(encode(value, name, shape), name)
    except SchemaError:
        return None


# Integers


@pytest.mark.parametrize("name", ["bool", *INTEGERS])
@given(number=integers)
def test_an_integer_is_stored_in_an_integer_field_exactly_or_refused(name: str, number: int) -> None:
    low, high = limits(name)
    got = accepted(number, name)
    assert (got is not None) == (low <= number <= high)
    assert got is None or int(got) == number


@pytest.mark.parametrize("name", PRECISION)
@given(number=integers)
@example(number=257)
@example(number=2**53 + 1)
@example(number=-(2**53) - 1)
@example(number=2**63 - 1)
@example(number=2**64 - 1)
def test_an_integer_is_stored_in_a_float_field_exactly_or_refused(name: str, number: int) -> None:
    got = accepted(number, name)
    if -(2**63) <= number < 2**64:
        assert (got is not None) == representable(number, name)
    assert got is None or Fraction(float(got)) == number


@pytest.mark.parametrize(("name", "part"), [("complex64", "float32"), ("complex128", "float64")])
@given(number=st.integers(-(2**63), 2**64 - 1))
@example(number=2**53 + 1)
def test_an_integer_is_stored_in_a_complex_field_exactly_or_refused(name: str, part: str, number: int) -> None:
    got = accepted(number, name)
    assert (got is not None) == representable(number, part)
    assert got is None or (Fraction(float(got.real)), float(got.imag)) == (number, 0.0)


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("name", ["bool", *INTEGERS, *PRECISION])
def test_an_array_of_any_integer_dtype_is_stored_exactly_or_refused(source: str, name: str) -> None:
    low, high = limits(source)
    near = {0, 1, 2, 100, 127, 128, 255, 256, 257, 2049, 2**24 + 1, 2**31, 2**53 + 1, low, high, low + 1, high - 1}
    for number in sorted(n for n in near if low <= n <= high):
        got = accepted(np.array([number], source), name, (1,))
        fits = representable(number, name) if name in PRECISION else limits(name)[0] <= number <= limits(name)[1]
        assert (got is not None) == fits, (source, number, name)
        assert got is None or Fraction(got[0].item()) == number


@given(numbers=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=4))
@example(numbers=[2**63 + 5, 0])
def test_a_list_of_integers_is_stored_exactly_in_a_uint64_field(numbers: list[int]) -> None:
    """numpy makes floats of a list that holds both 2**63 + 5 and 0."""
    got = accepted(numbers, "uint64", (len(numbers),))
    assert got is not None
    assert got.tolist() == numbers


@given(numbers=st.lists(integers, min_size=2, max_size=3))
@example(numbers=[2**63 + 5, -1])
def test_a_list_of_integers_is_stored_exactly_in_an_int64_field_or_refused(numbers: list[int]) -> None:
    got = accepted(numbers, "int64", (len(numbers),))
    assert (got is not None) == all(-(2**63) <= number < 2**63 for number in numbers)
    assert got is None or got.tolist() == numbers


@pytest.mark.parametrize("name", ["int64", "float64"])
def test_a_list_that_mixes_integers_and_floats_does_not_round_the_integers(name: str) -> None:
    with pytest.raises(SchemaError, match=r"9007199254740993|not a whole number"):
        encode([2**53 + 1, math.nan], name, (2,))
    if name == "int64":
        assert encode([2**53 + 1, 2.0], name, (2,)).tolist() == [2**53 + 1, 2]
    else:
        with pytest.raises(SchemaError, match="9007199254740993"):
            encode([2**53 + 1, 2.0], name, (2,))
    assert encode([3, 2.0], name, (2,)).tolist() == [3, 2]


# Floats


@pytest.mark.parametrize("name", ["bool", *INTEGERS])
@given(
    number=st.one_of(st.floats(), st.integers(-(2**66), 2**66).map(float), st.integers(-600, 600).map(lambda n: n / 2))
)
@example(number=2.0**63)
@example(number=-(2.0**63))
@example(number=2.0**64)
@example(number=-0.0)
def test_a_float_is_stored_in_an_integer_field_exactly_or_refused(name: str, number: float) -> None:
    low, high = limits(name)
    got = accepted(number, name)
    assert (got is not None) == (math.isfinite(number) and number == math.trunc(number) and low <= number <= high)
    assert got is None or int(got) == number


@pytest.mark.parametrize("name", FLOATS)
@given(number=st.floats())
@example(number=65519.99)
@example(number=65520.0)
@example(number=float(2**128 - 2**103))
def test_a_float_is_rounded_to_the_nearest_and_refused_where_it_would_become_infinite(name: str, number: float) -> None:
    got = accepted(number, name)
    if math.isfinite(number) and rounds_to_infinity(number, name):
        assert got is None
        return
    assert got is not None
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, np.float64(number).astype(name))
    assert np.signbit(got) == np.signbit(number) or math.isnan(number)


@given(number=st.floats(width=32))
@example(number=float.fromhex("0x1.ff0000p+127"))
@example(number=1.00390625)
def test_bfloat16_rounds_as_torch_does_and_refuses_what_would_become_infinite(number: float) -> None:
    got = accepted(number, "bfloat16")
    expected = torch.tensor(number, dtype=torch.float32).to(torch.bfloat16).float().numpy()
    if math.isfinite(number) and not np.isfinite(expected):
        assert got is None
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["float16", "float32", "bfloat16", "complex64"])
def test_nan_and_infinity_stay_what_they_are(name: str) -> None:
    got = accepted([math.nan, math.inf, -math.inf], name, (3,))
    np.testing.assert_array_equal(got, np.array([math.nan, math.inf, -math.inf]))


@pytest.mark.parametrize("name", ["float16", "float32", "bfloat16"])
def test_a_signalling_nan_is_a_nan_like_any_other(name: str) -> None:
    signalling = np.array([0x7FF0000000000001], np.uint64).view(np.float64)
    assert np.isnan(accepted(signalling, name, (1,))).all()
    assert np.isnan(accepted(np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32), name, (2,))).all()


@pytest.mark.parametrize("value", [1j, 1 + 0j, np.array(2 + 0j), np.complex64(1j), complex(math.nan)])
@pytest.mark.parametrize("name", ["float32", "int64", "bool", "bfloat16"])
def test_a_complex_value_is_refused_where_its_imaginary_part_has_no_place(value: Any, name: str) -> None:
    with pytest.raises(SchemaError, match="an imaginary part would be lost"):
        encode(value, name, ())


def test_a_complex_value_that_would_become_infinite_is_refused() -> None:
    with pytest.raises(SchemaError, match="complex64: it would become infinite"):
        encode(complex(1.0, 1e300), "complex64", ())


# Errors say what was got, what was declared, and what to do


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        (2.9, "int64", r"got 2\.9 .*declared int64: not a whole number; round it first"),
        (math.nan, "int64", r"got nan .*declared int64: not a whole number"),
        (2**40, "int32", r"got 1099511627776 .*declared int32: out of range -2147483648 … 2147483647"),
        (300, "uint8", r"got 300 .*declared uint8: out of range 0 … 255; declare a wider field"),
        (-1, "uint64", r"got -1 .*declared uint64: out of range 0 …"),
        (2, "bool", r"got 2 .*declared bool: out of range 0 … 1"),
        (1e39, "float32", r"got 1e\+39 .*declared float32: it would become infinite"),
        (2**24 + 1, "float32", r"got 16777217 .*declared float32: the integer would be rounded"),
        (2**53 + 1, "float64", r"got 9007199254740993 .*declared float64: the integer would be rounded"),
        (2**53 + 1, "complex128", r"got 9007199254740993 .*declared complex128: the integer would be rounded"),
        (257, "bfloat16", r"got 257 .*declared bfloat16: the integer would be rounded"),
        (2**70, "int64", r"got .*declared int64"),
        ("fives", "U4", r"got a string of 5 characters, declared U4; .*declare 'U5'"),
        (5, "U4", r"got .*, declared U4 \(text\); pass a str"),
        (b"five", "U4", r"got .*, declared U4 \(text\); pass a str, or decode bytes first"),
        ("5", "int64", r"got .*, declared int64: only numbers and bools convert"),
        (["a", "tail\0"], "U8", "a string that ends in NUL"),
        (np.datetime64(1, "D"), "int64", r"got .*, declared int64"),
        ([1.0, math.nan], "int64", r"got nan at \[1\] \(float64\)"),
        ([1, 300], "uint8", r"got 300 at \[1\] "),
        ([1.0, 2.0**64], "uint64", r"got 1\.8446744073709552e\+19 at \[1\] "),
        ([2.0, 1e39], "float32", r"got 1e\+39 at \[1\] "),
        ([1, 2**53 + 1], "float64", r"got 9007199254740993 at \[1\] "),
        ([1, 257], "bfloat16", r"got 257 at \[1\] "),
        ([1.0, 1e39], "bfloat16", r"got 1e\+39 at \[1\] "),
        ([None, [3]], "int64", "no rectangular array"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_got_expected_and_remedy(value: Any, name: str, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        encode(value, name, (2,) if isinstance(value, list) else ())


# Shapes


@pytest.mark.parametrize("value", [5, 5.0, np.float32(5), np.array(5), [5], np.array([5]), torch.tensor([5])], ids=repr)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scalar_for_shape_one_and_the_reverse_are_accepted(value: Any, shape: tuple[int, ...]) -> None:
    got = encode(value, "float32", shape)
    assert (got.shape, got.dtype, got.sum()) == (shape, np.float32, 5)


def test_the_scalar_rule_holds_behind_leading_dimensions_too() -> None:
    assert encode(np.zeros(7), "float32", (1,), lead=1).shape == (7, 1)
    assert encode(np.zeros((7, 1)), "float32", (), lead=1).shape == (7,)


@pytest.mark.parametrize(
    ("given_shape", "shape", "lead"),
    [((2,), (3,), 0), ((1, 3), (3,), 0), ((), (2,), 0), ((1, 1), (), 0), ((4, 2), (3,), 1), ((), (), 1)],
)
def test_another_shape_is_refused_naming_both(given_shape: tuple[int, ...], shape: tuple[int, ...], lead: int) -> None:
    with pytest.raises(SchemaError, match=r"got shape \(.*(declared|expected) \("):
        encode(np.zeros(given_shape), "float32", shape, lead)


# Every kind of value


SAME = [
    *([1, 2], (1, 2), range(1, 3), [np.int8(1), np.int8(2)], [torch.tensor(1), torch.tensor(2)]),
    *(np.array([1, 9, 2])[::2], np.array([2, 1])[::-1], np.array([1, 2], ">i4"), torch.tensor([1, 2])),
]


@pytest.mark.parametrize("value", SAME, ids=repr)
def test_lists_tuples_views_big_endian_arrays_and_tensors_are_the_same_value(value: Any) -> None:
    got = encode(value, "int64", (2,))
    assert (got.tolist(), got.dtype) == ([1, 2], np.dtype("<i8"))


def test_a_tensor_that_requires_grad_is_stored() -> None:
    leaf = torch.tensor([1.5, 2.5], requires_grad=True)
    for value in (leaf, leaf * 1, [leaf[0], leaf[1]]):
        assert encode(value, "float32", (2,)).tolist() == [1.5, 2.5]
    assert encode([[leaf[0], leaf[1]]], "float32", (1, 2)).tolist() == [[1.5, 2.5]]


def test_a_tensor_that_is_not_contiguous_is_stored() -> None:
    value = torch.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(encode(value.T, "int64", (3, 2)), value.numpy().T)
    np.testing.assert_array_equal(encode(value[:, ::2], "int64", (2, 2)), value.numpy()[:, ::2])
    np.testing.assert_array_equal(encode(value[:1].expand(2, 3), "int64", (2, 3)), [[0, 1, 2]] * 2)


def test_conjugate_and_negative_views_of_tensors_are_stored_as_their_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert value.conj().is_conj() and value.conj().imag.is_neg()
    assert encode(value.conj(), "complex64", (2,)).tolist() == [1 - 2j, 3 + 4j]
    assert encode(value.conj().imag, "float32", (2,)).tolist() == [-2.0, 4.0]


def test_bfloat16_is_stored_and_stored_again_to_the_bit_also_every_nan() -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    value = bits.view(torch.bfloat16)
    stored = encode(value, "bfloat16", (2**16,))
    np.testing.assert_array_equal(stored, bits.numpy())
    np.testing.assert_array_equal(encode(decode(stored, "bfloat16"), "bfloat16", (2**16,)), stored)
    assert encode([value[1], value[2]], "bfloat16", (2,)).tolist() == [1, 2]


def test_the_numeric_dtypes_are_those_of_the_format() -> None:
    assert dtypes.NUMERIC == NUMERIC


@pytest.mark.parametrize("name", NUMERIC)
def test_a_tensor_of_every_dtype_is_stored_as_it_is(name: str) -> None:
    value = torch.tensor([0, 1, 1]).to(getattr(torch, name))
    got = encode(value, name, (3,))
    assert got.dtype == storage_dtype(name)
    assert decode(got, name).tolist() == [0, 1, 1]


FOREIGN = [torch.zeros(2).to(torch.float8_e5m2), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")]


@pytest.mark.parametrize("value", FOREIGN, ids=["float8", "sparse", "meta"])
def test_a_tensor_that_numpy_cannot_hold_is_refused_clearly(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"got a .*tensor"):
        encode(value, "float32", (2,))


def test_uint16_numbers_for_a_bfloat16_field_are_numbers_and_not_bits() -> None:
    assert decode(encode(np.array([2], np.uint16), "bfloat16", (1,)), "bfloat16").tolist() == [2.0]


@given(text=st.text(st.characters(codec="utf-32"), max_size=6).filter(lambda s: not s.endswith("\0")))
def test_text_round_trips_exactly(text: str) -> None:
    assert encode(text, "U6", ()).item() == text
    assert encode([text, ""], "U8", (2,)).tolist() == [text, ""]


# Names of dtypes


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        *((name, name) for name in NUMERIC),
        *((f"torch.{name}", name) for name in NUMERIC),
        *((getattr(torch, name), name) for name in NUMERIC),
        *((np.dtype(name), name) for name in NUMERIC if name != "bfloat16"),
        *((getattr(np, name if name != "bool" else "bool_"), name) for name in NUMERIC if name != "bfloat16"),
        *((np.dtype(name).str, name) for name in NUMERIC if name != "bfloat16"),
        ("float", "float32"), ("int", "int64"), ("complex", "complex64"), ("half", "float16"), ("double", "float64"),
        (float, "float32"), (int, "int64"), (bool, "bool"), (complex, "complex64"),
        ("f4", "float32"), ("i8", "int64"), ("u1", "uint8"), (np.dtype(">f4"), "float32"),
        ("U1", "U1"), ("U4096", "U4096"), ("<U5", "U5"), (np.dtype("U5"), "U5"),
    ],
)  # fmt: skip
def test_every_spelling_of_a_dtype_has_one_name(spec: Any, name: str) -> None:
    assert dtype_name(spec) == name


UNMAPPABLE = [
    *("O", "object", object, np.dtype(object), "V8", "V1000000000", np.void, np.dtype("f4,i8"), "f4,(2,)i8"),
    *("M8[ns]", "m8", np.datetime64, "float128", np.longdouble, "complex256", ">f4", "", None, 5, [1], "floaty"),
    *("U", "U0", "U4097", "U1000000", "U-1", "U٣", "S5", bytes, str, np.str_),
    *("torch.float8_e5m2", torch.complex32, torch.qint8),
]


@pytest.mark.parametrize("spec", UNMAPPABLE)
def test_what_cannot_be_mapped_from_a_file_is_refused_as_a_dtype(spec: Any) -> None:
    with pytest.raises(SchemaError, match=r"dtype: got .*, expected one of float, int, bool, int8.*'U1' … 'U4096'"):
        dtype_name(spec)


# Through a buffer and back

EXTREMES: dict[str, list[Any]] = {
    "bool": [False, True, True],
    **{name: [*limits(name), 7] for name in INTEGERS},
    **{name: [float(np.finfo(name).max), float(np.finfo(name).smallest_subnormal), math.nan] for name in FLOATS},
    "bfloat16": [float(torch.finfo(torch.bfloat16).max), 2.0**-133, math.nan],
    "complex64": [complex(1.5, -math.inf), complex(math.nan, 0.0), complex(-0.0, 2**-149)],
    "complex128": [complex(1e300, -math.inf), complex(math.nan, 5e-324), complex(-0.0, 1.0)],
    "U5": ["", "naïve", "a\0\U0001f916b"],
}


@pytest.mark.parametrize("name", EXTREMES)
def test_every_dtype_round_trips_exactly_through_a_buffer_and_numpy_load(name: str, tmp_path: Path) -> None:
    values = EXTREMES[name]
    fields = {"one": name, "pair": (name, 2)}
    with ReplayBuffer(tmp_path, 2, 3, fields, {"label": name}) as buffer:
        with buffer.one_episode(label=values[2]) as episode:
            for value in values:
                episode.store(one=value, pair=[value, values[0]])
        buffer.store_episode(one=values, pair=[[v, v] for v in values], label=values[0])
    reopened = ReplayBuffer.from_folder(tmp_path, read_only=True)
    exact = np.array(values, np.float32 if name == "bfloat16" else storage_dtype(name))
    for i, label in enumerate((exact[2], exact[0])):
        loaded = np.load(tmp_path / "data" / "one.npy", mmap_mode="r")[i]
        assert loaded.dtype == storage_dtype(name)
        np.testing.assert_array_equal(decode(np.array(loaded), name), exact)
        got = reopened.episode(i)
        np.testing.assert_array_equal(got["one"], exact)
        np.testing.assert_array_equal(got["pair"], np.stack([exact, np.full(3, exact[0]) if i == 0 else exact], 1))
        np.testing.assert_array_equal(got["label"], label)
