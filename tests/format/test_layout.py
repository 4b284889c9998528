"""`schema.json` and the files that follow from it; what a stranger's `schema.json` can do: nothing."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_injection import listing
from hypothesis import given
from hypothesis import strategies as st
from specification import NUMERIC

from memmap_buffer import (
    CorruptBufferError,
    Field,
    MemmapBufferError,
    NotABufferError,
    ReplayBuffer,
    Schema,
    SchemaError,
    SchemaMismatchError,
)
from memmap_buffer.format.layout import Layout
from memmap_buffer.format.storage import Storage

SCHEMA = Schema(
    {"observation": {"image": ("uint8", (2, 2)), "state": Field("float", 3, 0.5, final=True)}, "reward": "float64"},
    {"task": ("U8", (), "none"), "weight": ("complex64", 2, 1 + 2j)},
)
GRID = Layout(SCHEMA, 4, 5, spare_slots=2, circular=True, capacity=10)
PACKED = Layout(SCHEMA, 4, 5, spare_slots=0, rows=17)
MAX_PEAK = 50 * 2**20  # bytes that refusing a document may take


def document(layout: Layout = GRID) -> dict[str, Any]:
    return json.loads(layout.to_json())


# What a layout says


@pytest.mark.parametrize("layout", [GRID, PACKED], ids=["grid", "packed"])
def test_a_layout_read_back_from_its_json_is_the_same(layout: Layout) -> None:
    again = Layout.from_json(layout.to_json(), "here")
    assert again.to_json() == layout.to_json()
    assert again.schema.all == layout.schema.all
    assert again.arrays == layout.arrays
    assert layout.differences(again) == []


floats = st.floats(width=32)
specs = st.one_of(
    *(st.tuples(st.just(name), st.just(2)) for name in NUMERIC),
    st.tuples(st.just("float32"), st.just(()), floats),
    st.tuples(st.just("float32"), st.just((2, 1)), st.lists(floats.map(lambda x: [x]), min_size=2, max_size=2)),
    st.tuples(st.just("complex128"), st.just(()), st.complex_numbers()),
    st.tuples(st.just("uint64"), st.just(2), st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=2)),
    st.tuples(st.just("U4"), st.just(()), st.text('aé\U0001f916"\\\n', max_size=4)),
    st.tuples(st.just("bool"), st.just(3), st.booleans()),
)


@given(spec=specs, final=st.booleans(), sizes=st.tuples(*[st.integers(1, 2**20)] * 3))
def test_any_schema_survives_json(spec: tuple[Any, ...], final: bool, sizes: tuple[int, int, int]) -> None:
    field = Field(*spec, final=final) if len(spec) == 3 else Field(*spec, None, final)
    layout = Layout(Schema({"a": field}, {"m": spec}), *sizes)
    again = Layout.from_json(layout.to_json(), "here")
    assert again.to_json() == layout.to_json()
    np.testing.assert_array_equal(again.schema.fields["a"].fill, field.fill)


def test_what_follows_from_a_text_is_shared_by_buffers_that_differ_in_their_id() -> None:
    one, other = (Layout(Schema({"x": "int"}), 3, 5) for _ in range(2))
    read, again = (Layout.from_json(layout.to_json(), "") for layout in (one, other))
    assert (read.to_json(), again.to_json()) == (one.to_json(), other.to_json())
    assert read.arrays is again.arrays
    assert Layout.from_json(Layout(Schema({"x": "int"}), 4, 5).to_json(), "").arrays["x"].shape == (5, 5)


def test_an_id_that_stands_twice_or_elsewhere_is_refused_though_the_rest_was_read_before() -> None:
    layout = Layout(Schema({"x": "int"}), 3, 5)
    text, line = layout.to_json(), f'"id": "{layout.id}"'.encode()
    assert Layout.from_json(text, "").to_json() == text
    for wrong in (text.replace(line, line + b", " + line), text.replace(line, b'"x": {' + line + b"}")):
        with pytest.raises((SchemaError, CorruptBufferError), match=r"a key stands twice|are unknown or missing"):
            Layout.from_json(wrong, "schema.json")
        assert Layout.from_json(text, "").to_json() == text


def test_the_files_of_a_grid_have_one_row_a_slot() -> None:
    assert {key: (array.name, array.shape) for key, array in GRID.arrays.items()} == {
        "/episodes": ("episodes.npy", (6,)),
        "/state": ("state.npy", (1,)),
        "/checksums": ("checksums.npy", (6, GRID.columns)),
        "observation.image": ("data/observation.image.npy", (6, 5, 2, 2)),
        "observation.state": ("data/observation.state.npy", (6, 6, 3)),
        "reward": ("data/reward.npy", (6, 5)),
        "task": ("meta/task.npy", (6,)),
        "weight": ("meta/weight.npy", (6, 2)),
    }
    assert GRID.columns >= 5


def test_the_files_of_a_packed_folder_are_dense() -> None:
    shapes = {key: array.shape for key, array in PACKED.arrays.items() if array.name.startswith("data/")}
    assert shapes == {"observation.image": (17, 2, 2), "observation.state": (17 + 4, 3), "reward": (17,)}
    assert not PACKED.writable and GRID.writable


@pytest.mark.parametrize("layout", [GRID, PACKED], ids=["grid", "packed"])
def test_a_file_is_its_header_and_its_elements_and_offsets_follow(layout: Layout) -> None:
    for key, array in layout.arrays.items():
        assert len(array.header) % 64 == 0
        assert array.size == len(array.header) + math.prod(array.shape) * array.dtype.itemsize
        assert array.offset(array.shape[0]) == array.size
        if key in layout.schema.fields:
            assert layout.row_offset(key, math.prod(layout.rows_shape(key)[:1])) == array.size


@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        ((0, 5), {}, "max_episodes: got 0, expected a whole number from 1"),
        ((-1, 5), {}, "max_episodes: got -1"),
        ((True, 5), {}, "max_episodes: got True"),
        ((2.0, 5), {}, r"max_episodes: got 2\.0"),
        ((4, 0), {}, "max_timesteps: got 0"),
        ((4, "5"), {}, "max_timesteps: got '5'"),
        ((2**24 + 1, 5), {}, r"max_episodes: got 16777217, expected a whole number from 1 to 2\*\*24"),
        ((4, 2**31 + 1), {}, r"max_timesteps: got 2147483649, expected a whole number from 1 to 2\*\*31"),
        ((4, 5), {"spare_slots": 0}, "spare_slots: got 0, expected a whole number from 1"),
        *(((4, 5), {"capacity": v}, "capacity: got") for v in (0, True, 10.5, "10", 2**63)),
        ((2**24, 5), {}, "multiply to more than any file can hold; lower max_episodes or max_timesteps"),
        ((2**23, 2**31), {}, "multiply to more than any file can hold"),
    ],
)
def test_sizes_out_of_bounds_are_refused_by_name(sizes: tuple[Any, Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        Layout(Schema({"a": ("float", (64,))}), *sizes, **options)


def test_numpy_integers_are_sizes() -> None:
    sizes = {"spare_slots": np.int64(2), "circular": True, "capacity": np.int64(10)}
    layout = Layout(SCHEMA, np.int64(4), np.int32(5), **sizes, id=GRID.id)
    assert layout.to_json() == GRID.to_json()


def test_another_schema_lists_what_differs(tmp_path: Path) -> None:
    ReplayBuffer(tmp_path, 4, 5, {"a": "float", "b": "int"}, {"m": "int"}).close()
    with pytest.raises(SchemaMismatchError, match="holds a buffer of a different configuration") as caught:
        ReplayBuffer(tmp_path, 8, 5, {"a": ("float", 2), "c": "int"}, {"m": "int"}, circular=True)
    assert [line.split(":")[0] for line in caught.value.differences] == [
        *("max_episodes", "circular", "fields 'a'", "fields 'b'", "fields 'c'"),
    ]
    assert caught.value.differences[0] == "max_episodes: stored 4, given 8"


@pytest.mark.parametrize("size", [0, 1, 20, 511, 512, 700, None])
def test_what_a_power_cut_leaves_of_a_schema_is_known_as_ours(size: int | None) -> None:
    """Any of its sectors may not have reached the disk, and it may be shorter."""
    whole = GRID.to_json()
    sectors = [whole[at : at + 512] for at in range(0, len(whole), 512)]
    assert len(sectors) > 1
    for missing in product([False, True], repeat=len(sectors)):
        left = b"".join(bytes(len(s)) if gone else s for s, gone in zip(sectors, missing, strict=True))
        assert Layout.may_be_torn(left[:size])


@pytest.mark.parametrize("text", [b"{}", b"[1, 2]", b'{"format": "another"}', b" ", b"\0precious"])
def test_what_another_wrote_is_not_taken_for_ours(text: bytes) -> None:
    assert not Layout.may_be_torn(text)


# From a stranger


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A good buffer with one episode, beside a file that is nobody's business."""
    (tmp_path / "victim.npy").write_bytes(b"victim")
    path = tmp_path / "buffer"
    with ReplayBuffer(path, 4, 5, SCHEMA, spare_slots=2, circular=True, capacity=10) as buffer:
        buffer.store_episode(observation={"image": np.ones((1, 2, 2)), "state": np.ones((1, 3))}, reward=[1.0])
    yield path
    shutil.rmtree(path)


def refused(folder: Path, text: bytes | str) -> MemmapBufferError:
    """The error of opening the folder with this `schema.json`, by every door; nothing may have been touched."""
    (folder / "schema.json").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    before = listing(folder.parent)
    tracemalloc.start()
    with pytest.raises(MemmapBufferError, match=r"schema\.json") as caught:
        Storage.open(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for read_only in (True, False):
        with pytest.raises(type(caught.value), match=r"schema\.json"):
            ReplayBuffer.from_folder(folder, read_only=read_only)
    with pytest.raises(MemmapBufferError, match=r"schema\.json"):
        ReplayBuffer(folder, 4, 5, SCHEMA, spare_slots=2, circular=True, capacity=10)
    assert listing(folder.parent) == before
    assert peak < MAX_PEAK
    return caught.value


def test_the_unchanged_document_opens(folder: Path) -> None:
    (folder / "schema.json").write_bytes(GRID.to_json())
    assert len(ReplayBuffer.from_folder(folder, read_only=True)) == 1


@pytest.mark.parametrize(
    "text",
    {
        "empty": b"",
        "not JSON": b"replay",
        "byte order mark": b"\xef\xbb\xbf" + GRID.to_json(),
        "UTF-16": GRID.to_json().decode().encode("utf-16"),
        "no UTF-8": GRID.to_json().replace(b"none", b"\xff\xfe"),
        "2 MiB": GRID.to_json() + b" " * 2**21,
        "cut short": GRID.to_json()[:-9],
        "trailing text": GRID.to_json() + b"{}",
        "100,000 levels": b"[" * 100_000,
        "100,000 levels of objects": b'{"a":' * 100_000,
        "5,000 digits": GRID.to_json().replace(b'"max_episodes": 4', b'"max_episodes": ' + b"9" * 5000),
        "a key twice": GRID.to_json().replace(b'"rows": null', b'"rows": null, "rows": null'),
        "a field twice": GRID.to_json().replace(b'"observation.image"', b'"reward"'),
        "NaN": GRID.to_json().replace(b"0.5", b"NaN"),
        "Infinity": GRID.to_json().replace(b"0.5", b"-Infinity"),
        "1e999": GRID.to_json().replace(b"0.5", b"1e999"),
    }.items(),
    ids=lambda item: item[0],
)
def test_text_that_is_no_strict_json_is_refused_untouched(folder: Path, text: tuple[str, bytes]) -> None:
    """Fault 47: empty, BOM, UTF-16, 2 MiB, nesting, 5,000 digits, duplicate keys, NaN, Infinity."""
    assert isinstance(refused(folder, text[1]), CorruptBufferError)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"memmap-buffer"', "{}", '{"format": "zarr"}', '{"format": 1}'])
def test_another_programs_schema_is_not_a_buffer(folder: Path, text: str) -> None:
    """Fault 47: a `schema.json` that is JSON, and not ours."""
    assert isinstance(refused(folder, text), NotABufferError)


def test_a_missing_schema_is_not_a_buffer(folder: Path) -> None:
    """Fault 47: missing."""
    (folder / "schema.json").unlink()
    before = listing(folder)
    for read_only in (True, False):
        with pytest.raises(NotABufferError, match="is not a buffer: there is no schema"):
            ReplayBuffer.from_folder(folder, read_only=read_only)
    with pytest.raises(CorruptBufferError, match="is in the way and is not ours to replace; move it away"):
        ReplayBuffer(folder, 4, 5, SCHEMA)
    assert listing(folder) == {**before, ".lock": listing(folder)[".lock"]}


INTEGERS = ("max_episodes", "max_timesteps", "spare_slots", "columns", "capacity")
BAD_INTEGERS = (True, 4.0, 1e18, "4", [4], {}, -1, 2**63, 10**30)


@pytest.mark.parametrize("value", BAD_INTEGERS, ids=repr)
@pytest.mark.parametrize("key", INTEGERS)
def test_a_size_that_is_no_whole_number_in_bounds_is_refused(folder: Path, key: str, value: Any) -> None:
    """Fault 47: bool for int, float for int, negative, beyond every bound."""
    assert isinstance(refused(folder, json.dumps({**document(), key: value})), SchemaError)


@pytest.mark.parametrize(
    "change",
    [
        *({"version": v} for v in (0, 2, True, 1.0, "1", None)),
        *({key: None} for key in ("max_episodes", "max_timesteps", "spare_slots", "columns", "circular", "layout")),
        *({"fields": v} for v in (None, [], {}, 3, "a")),
        *({"meta_fields": v} for v in (None, [], 3)),
        {"comment": "hello"}, {"circular": 1}, {"circular": "true"}, {"columns": 4}, {"columns": 10**6},
        {"spare_slots": 0},
        {"layout": "packed"}, {"layout": "sparse"}, {"layout": ["grid"]}, {"rows": 5}, {"layout": "packed", "rows": -1},
        {"max_episodes": 2**31}, {"max_timesteps": 2**31, "max_episodes": 2**30}, {"capacity": 0},
    ],
    ids=repr,
)  # fmt: skip
def test_unknown_versions_keys_and_kinds_are_refused(folder: Path, change: dict[str, Any]) -> None:
    """Fault 47: unknown version, unknown key, wrong types, sizes whose product overflows."""
    assert isinstance(refused(folder, json.dumps({**document(), **change})), SchemaError)


@pytest.mark.parametrize("key", [key for key in document() if key != "format"])
def test_a_missing_key_is_refused(folder: Path, key: str) -> None:
    """Fault 47: nothing is guessed."""
    assert isinstance(refused(folder, json.dumps({k: v for k, v in document().items() if k != key})), SchemaError)


def with_field(**change: Any) -> str:
    changed = document()
    changed["fields"]["reward"] |= change
    return json.dumps(changed)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"shape": v}
            for v in ([-1], [0], [10**18], [2**62], [True], [1.0], ["1"], [[1]], [1] * 33, 3, None, "2", {})
        ),
        *({"shape": [2**31] * n} for n in (2, 3, 16)),
        *({"final": v} for v in (None, 0, "false")),
        *({"column": v} for v in (0, -1, 10**6, True, 1.0, None)),
        *(
            {"default": v}
            for v in ("x", "NaN", [1.0, 2.0], {}, {"real": 1}, {"real": 1, "imag": 2}, 10**400, [[]], [None])
        ),
        *({"default": {"real": v, "imag": 0}} for v in ([1], None, 10**400, "x", {}, True)),
        {"unit": "m/s"},
    ],
    ids=lambda change: repr(change)[:40],
)
def test_a_field_that_is_not_exactly_as_we_write_it_is_refused(folder: Path, change: dict[str, Any]) -> None:
    """Fault 47: negative, zero, huge shapes, 33 dimensions, defaults of no number."""
    assert isinstance(refused(folder, with_field(**change)), SchemaError)


@pytest.mark.parametrize("levels", [65, 400, 900])
def test_a_deeply_nested_default_is_refused(folder: Path, levels: int) -> None:
    """Fault 47: nesting that json accepts and numpy or the recursion limit does not."""
    text = with_field(default="@").replace('"@"', "[" * levels + "1" + "]" * levels)
    assert isinstance(refused(folder, text), (SchemaError, CorruptBufferError))


@pytest.mark.parametrize("spec", [None, 3, "float32", [], {}, {"dtype": "float32"}])
def test_a_field_that_is_no_complete_object_is_refused(folder: Path, spec: Any) -> None:
    """Fault 47: a field without its keys."""
    changed = document()
    changed["fields"]["reward"] = spec
    assert isinstance(refused(folder, json.dumps(changed)), SchemaError)


def test_a_schema_that_no_reader_would_accept_is_never_written(tmp_path: Path) -> None:
    large = Field("float64", (100_000,), default=[1 / 3] * 100_000)
    with pytest.raises(SchemaError, match=r"schema\.json: got .* bytes, expected at most 1048576; give fewer fields"):
        ReplayBuffer(tmp_path / "new", max_episodes=1, max_timesteps=1, fields={"x": large})
    with ReplayBuffer(tmp_path / "there", max_episodes=1, max_timesteps=1, fields={"x": "int"}) as buffer:
        buffer.store_episode(x=[7])
        with pytest.raises(SchemaError, match=r"schema\.json: got"):
            buffer.add_field("y", large)
    with pytest.raises(SchemaError, match=r"schema\.json: got"):
        ReplayBuffer(tmp_path / "there", max_episodes=1, max_timesteps=1, fields={"x": large}, overwrite=True)
    with pytest.raises(SchemaError, match=r"schema\.json: got"):
        ReplayBuffer(tmp_path / "root", max_episodes=1, max_timesteps=1, fields={"x": large}, shard="auto")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    with ReplayBuffer.from_folder(tmp_path / "there") as buffer:
        assert buffer.fieldnames == ("x",) and buffer.episode(0)["x"].tolist() == [7]


def test_too_many_fields_are_refused(folder: Path) -> None:
    """Fault 47: 2,000 fields."""
    spec = document()["fields"]["reward"]
    fields = {f"f{i}": {**spec, "column": i} for i in range(2000)}
    assert isinstance(refused(folder, json.dumps({**document(), "fields": fields, "columns": 2000})), SchemaError)


NAMES = ["", "..", ".", "../x", "../victim", "/x", "/etc/passwd", "a/b", "a\\b", "C:x", "a\0b", "\ud800", "x" * 300]
NAMES += ["a.", "a ", "a.../b", " a", "Reward", "REWARD", "reward.x", "_a", "episode_lens", "é", "a\n"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:30])
@pytest.mark.parametrize("group", ["fields", "meta_fields"])
def test_a_name_that_is_no_identifier_is_refused_and_nothing_outside_is_touched(
    folder: Path, group: str, name: str
) -> None:
    """Fault 48: paths, NUL, lone surrogates, 300 characters, the same name in another case."""
    changed = document()
    spec = {**document()["fields"]["reward"], "column": 9}
    changed[group][name] = spec
    error = refused(folder, json.dumps(changed))
    assert isinstance(error, SchemaError)
    assert len(str(error)) < 2000


@pytest.mark.parametrize("name", ["CON", "nul", "a.aux", "com1.x", "LPT9"])
def test_a_name_that_windows_keeps_for_a_device_is_refused(folder: Path, name: str) -> None:
    """Fault 48: `data/CON.npy` cannot be copied to such a system."""
    changed = document()
    changed["fields"][name] = {**document()["fields"]["reward"], "column": 9}
    assert isinstance(refused(folder, json.dumps(changed)), SchemaError)


DTYPES = ["O", "object", "V1000000000", "U1000000", "U4097", "U0", "U", "f4,(2,)i8", ">f4", "<f4", "f4", "M8[ns]", "m8"]
DTYPES += [
    "float128",
    "float",
    "int",
    "torch.float32",
    "bool_",
    "S4",
    "",
    "U5\n",
    "U٣",
    3,
    None,
    ["float32"],
    {"a": "f4"},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_a_dtype_that_is_not_one_of_our_names_is_refused(folder: Path, dtype: Any) -> None:
    """Fault 49: objects, records, other byte orders, dates; the text never reaches numpy."""
    assert isinstance(refused(folder, with_field(dtype=dtype)), SchemaError)
