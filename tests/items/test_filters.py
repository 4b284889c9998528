"""What a condition of a filter keeps is what Python's own comparisons keep, for every dtype of a column."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from specification import NUMERIC
from strategies import few

from memmap_buffer import ReplayBuffer, SchemaError
from memmap_buffer.adapters import matches

REAL = [name for name in NUMERIC if name not in ("bfloat16", "complex64", "complex128")]
EDGES = [0, 1, 5, 2**24, 2**31, 2**53, 2**63, 2**64, 10**400]
NEAR = [sign * edge + step for edge in EDGES for sign in (1, -1) for step in (-1, 0, 1, 500)]
INTEGERS = st.one_of(st.sampled_from(NEAR), st.integers(-(2**65), 2**65))
FLOATS = st.one_of(
    st.sampled_from([5.0, 5.5, -0.0, 0.1, math.inf, -math.inf, math.nan, 2.0**53, 2.0**63, 2.0**64, 1e300]), st.floats()
)
NUMBERS = st.one_of(INTEGERS, FLOATS, st.booleans())
TEXTS = st.text(st.sampled_from("ab\u00e9\U0001f600"), max_size=3)


def of(column, value):
    """A number as a column takes it: a float is meant as precisely as a column of floats holds it."""
    if isinstance(value, float) and column.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return float(column.dtype.type(value))
    return value


def passes(column, condition):
    """By the definition: one value after another, compared by Python, which rounds nothing."""
    out = []
    for value in column.tolist():
        if isinstance(condition, tuple):
            low, high = (of(column, end) for end in condition)
            out.append((low is None or low <= value) and (high is None or value < high))
        else:
            members = condition if isinstance(condition, (set, list, range)) else [condition]
            out.append(any(value == of(column, member) for member in members))
    return out


@st.composite
def columns(draw):
    dtype = np.dtype(draw(st.sampled_from(REAL)))
    if dtype.kind == "b":
        values = draw(st.lists(st.booleans(), max_size=6))
    elif dtype.kind in "iu":
        least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        ends = [n for n in NEAR if least <= n <= most]
        values = draw(st.lists(st.one_of(st.sampled_from(ends), st.integers(least, most)), max_size=6))
    else:
        values = draw(st.lists(st.floats(width=8 * dtype.itemsize), max_size=6))
        whole = draw(st.lists(st.sampled_from([5, 2**11, 2**24, 2**53, 2**63]), max_size=3))
        values += [n for n in whole if n <= float(np.finfo(dtype).max)]
    return np.array(values, dtype)


def conditions(values):
    ends = st.one_of(st.none(), values)
    return st.one_of(values, st.sets(values, max_size=5), st.lists(values, max_size=5), st.tuples(ends, ends))


class TestNumbers:
    @few
    @given(columns(), st.data())
    def test_every_condition_keeps_what_python_keeps(self, column, data):
        there = [st.sampled_from(column.tolist())] if len(column) else []  # or it would hit few
        condition = data.draw(conditions(st.one_of(NUMBERS, *there)))
        assert matches(column, condition, "x").tolist() == passes(column, condition)

    @few
    @given(columns(), st.lists(NUMBERS, max_size=4), st.sampled_from(["array", "scalars", "axis"]))
    def test_numpy_values_mean_what_they_hold(self, column, members, how):
        members = [n for n in members if isinstance(n, float) or -(2**63) <= n < 2**63]
        arrays = [np.asarray(member) for member in members]
        given_as = {"array": np.array([float(n) for n in members]), "scalars": [array[()] for array in arrays]}
        condition = given_as.get(how, members)
        meant = condition.tolist() if how == "array" else members
        column = column[:, None] if how == "axis" else column
        assert matches(column, condition, "x").tolist() == passes(column.reshape(-1), meant)

    @pytest.mark.parametrize("dtype", ["int64", "uint64"])
    @pytest.mark.parametrize(
        "condition",
        [2**62, {2**62}, {2**62, 5}, {2**62, 5.0}, [2**62, -1], {2**62, 2**63}, (2**62, 2**62 + 1), {2**62, 5.5}],
        ids=str,
    )
    def test_a_large_integer_is_not_its_neighbour(self, dtype, condition):
        column = np.array([2**62 - 1, 2**62, 2**62 + 1, 2**62 + 500], dtype)
        assert matches(column, condition, "id").tolist() == [False, True, False, False]

    def test_a_member_above_int64_beside_a_small_one_is_exact(self):
        column = np.array([5, 2**63, 2**63 + 500, 2**64 - 1], np.uint64)
        assert matches(column, {2**63, 5}, "id").tolist() == [True, True, False, False]
        assert matches(column, (2**63 + 1, 2**64), "id").tolist() == [False, False, True, True]
        assert matches(column, (-1, 2**63), "id").tolist() == [True, False, False, False]
        assert matches(column, {-1, 5.0, 5.5, math.nan}, "id").tolist() == [True, False, False, False]

    def test_a_float_is_meant_as_precisely_as_the_column_holds_it(self):
        assert matches(np.array([0.1, 0.2], np.float32), 0.1, "x").tolist() == [True, False]
        assert matches(np.array([0.1, 0.2], np.float32), {0.1, 7}, "x").tolist() == [True, False]
        assert matches(np.array([0.1, 0.2], np.float32), (0.1, 0.2), "x").tolist() == [True, False]
        assert matches(np.array([1.0, math.inf], np.float32), (1e300, None), "x").tolist() == [False, True]

    def test_fractions_and_tensors_are_numbers(self):
        column = np.array([0, 1, 2], np.uint8)
        assert matches(column, (Fraction(1, 2), Fraction(3, 2)), "x").tolist() == [False, True, False]
        assert matches(column, torch.tensor([2, 7]), "x").tolist() == [False, False, True]
        assert matches(column, {torch.tensor(1)}, "x").tolist() == [False, True, False]

    def test_complex_numbers_are_equal_or_not_and_have_no_order(self):
        column = np.array([1, 1j, 2], np.complex64)
        assert matches(column, {1, 1j}, "z").tolist() == [True, True, False]
        assert matches(column, 2**53 + 1, "z").tolist() == [False, False, False]
        assert matches(np.array([1, 2], np.int64), {1 + 0j, 2 + 1j}, "x").tolist() == [True, False]
        with pytest.raises(SchemaError, match=r"filter 'z': got \(0, 2\), and complex numbers have no order; give"):
            matches(column, (0, 2), "z")
        with pytest.raises(SchemaError, match=r"filter 'x': got \(1j, None\), and complex numbers have no order; give"):
            matches(np.arange(3), (1j, None), "x")


class TestText:
    @few
    @given(st.lists(TEXTS, max_size=6), conditions(TEXTS))
    @example(["a", "aa"], (None, "aa"))
    def test_every_condition_keeps_what_python_keeps(self, values, condition):
        column = np.array(values, "U3")
        assert matches(column, condition, "x").tolist() == passes(column, condition)

    def test_text_that_no_field_can_hold_is_refused(self):
        with pytest.raises(SchemaError, match="no text that is stored ends in NUL, so strip it"):
            matches(np.array(["a"]), {"a\0"}, "x")


class TestBuffer:
    def test_ids_of_64_bits_choose_their_own_episodes_and_timesteps(self, tmp_path):
        ids = [5, 2**63, 2**63 + 500, 2**64 - 1]
        buffer = ReplayBuffer(tmp_path, 9, 9, {"x": "uint64"}, {"id": "uint64"})
        for number in ids:
            buffer.store_episode(x=np.array([number, 7], np.uint64), id=number)
        for condition, kept in (({2**63, 5}, [0, 1]), ((2**63, 2**63 + 500), [1]), (2**64 - 1, [3])):
            found = buffer.batch(filter_meta={"id": condition}, return_indices=True)
            assert found["_index"].tolist() == kept
            steps = buffer.batch(timestep_level=True, filter_fields={"x": condition}, return_indices=True)
            assert steps["_indices"].tolist() == [[serial, 0] for serial in kept]
