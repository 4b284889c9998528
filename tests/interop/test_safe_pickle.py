"""Pickles of plain values are read without unpickling: what they hold is given, what they would do is not done."""

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from memmap_buffer import SchemaError
from memmap_buffer.interop.safe_pickle import array_loads, safe_loads

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300)
KEYS = st.text(max_size=5) | st.integers()
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=40,
)


@given(TREES, st.integers(2, pickle.HIGHEST_PROTOCOL))
@examples(150)
def test_plain_values_are_what_unpickling_gives(tree, protocol):
    data = pickle.dumps(tree, protocol)
    assert safe_loads(data) == tree
    assert repr(safe_loads(data)) == repr(pickle.loads(data))  # 1 is not True, and 0.0 not -0.0


def test_a_value_that_is_held_twice_is_given_twice():
    twice = ["x", 1]
    assert safe_loads(pickle.dumps({"a": twice, "b": twice})) == {"a": twice, "b": twice}


class Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("what", ["call", "array", "class", "set", "bytes"])
def test_what_is_more_than_plain_values_is_refused_and_not_carried_out(tmp_path, what, protocol):
    trace = tmp_path / "carried out"
    hostile = {"call": Call(open, str(trace), "w"), "array": np.ones(2), "class": dict, "set": {1}, "bytes": b"x"}[what]
    with pytest.raises(SchemaError, match="more than hold plain values"):
        safe_loads(pickle.dumps({"max_episodes": 3, "fields": hostile}, protocol))
    assert not trace.exists()


@given(TREES, st.data())
@examples(60)
def test_a_pickle_that_is_cut_is_refused(tree, data):
    whole = pickle.dumps(tree)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(SchemaError, match="got no whole pickle"):
        safe_loads(cut)


@given(st.binary(max_size=200))
@examples(200)
def test_any_bytes_are_read_or_refused(data):
    try:
        safe_loads(b"\x80\x04" + data + b".")
    except SchemaError as error:
        assert "pickle" in str(error)


def test_a_length_beyond_the_data_takes_no_memory():
    with pytest.raises(SchemaError, match="got no whole pickle"):
        safe_loads(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.")


@pytest.mark.parametrize(
    "value",
    [{}, [], (), None, True, -5, 2**31 - 1, 0.1, "ü", {"a": [1, (2.5, "b", None), {}], "c": (False, ("x",), [[]])}],
)
def test_what_an_export_writes_is_read(value):
    assert repr(safe_loads(pickle.dumps(value, protocol=2))) == repr(value)


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
        np.arange(16)[::2],
        np.zeros((0, 4), np.uint8),
        np.array(True),
    ],
    ids=["floats", "columns first", "strided", "empty", "one bool"],
)
def test_an_array_comes_out_of_its_pickle_without_unpickling(array, protocol):
    found = array_loads(pickle.dumps(array, protocol=protocol))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


@pytest.mark.parametrize(
    "value", [print, np.array(["a", None]), np.array(["text"]), np.dtype("f4"), 3, None, [np.zeros(2)]], ids=repr
)
def test_pickles_of_anything_but_an_array_of_numbers_are_refused(value):
    with pytest.raises(SchemaError, match=r"got a pickle (of something else than an array|that names builtins.print)"):
        array_loads(pickle.dumps(value))
