"""Every way to copy episodes, with every kind of field: it comes back equal, or is refused before a byte is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_cases import main

from memmap_buffer import ConcatBuffer, Field, ReplayBuffer, SchemaError, Trajectory, pack, publish, pull, unpack
from memmap_buffer.adapters import flatten
from memmap_buffer.interop.pandas import to_dataframe

LENGTHS = (3, 1, 4)
BASE = {
    "observation": Field("float32", (2,), final=True),
    "action": ("float32", (1,)),
    "reward": "float32",
    "terminated": "bool",
    "truncated": "bool",
}
# The fields of a kind, by what follows their names; each is declared without and, as `last_…`, with `final`.
KINDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "bool": {"": ("bool", ())},
    "array": {"": ("int16", (2,))},
    "float16": {"": ("float16", ())},
    "uint64": {"": ("uint64", ())},
    "complex": {"": ("complex64", ())},
    "nested": {".left": ("int16", (2,)), ".right.far": ("float32", ())},
    "text": {"": ("U6", ())},
    "texts": {"": ("U6", (2,))},
    "bfloat16": {"": ("bfloat16", (2,))},
    "codec": {"": ("uint8", (4, 4, 3), "zstd")},
    "list": {"": ("int16", (None,))},
    "list of arrays": {"": ("float32", (None, 2))},
}
LISTS = ("list", "list of arrays")

Episodes = list[dict[str, Any]]


def fields_of(kinds: Iterable[str], names: tuple[str, ...] = ("value", "last")) -> dict[str, Field]:
    """The fields of some kinds by dotted names; those named `last` with `final`."""
    return {
        f"{name}_{kind.replace(' ', '_')}{end}": Field(dtype, shape, None, name == "last", *codec)
        for kind in kinds
        for name in names
        for end, (dtype, shape, *codec) in KINDS[kind].items()
    }


def entry(field: Field, rng: np.random.Generator, t: int, number: int, *, loud: bool) -> Any:
    """A value that is hard to keep: NaNs with bits of their own, empty texts and lists.

    Args: loud: with infinities and signalling NaNs, with which one cannot compute.
    """
    if field.dtype.startswith("U"):
        return np.array(rng.choice(["", "é", "a b,\n", "twelve", "'\"🙂"], field.shape), field.entries)
    count = 0 if number == 1 else (3 * t + number) % 4
    shape = (count, *field.shape[1:]) if field.is_list else field.shape
    if field.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if field.dtype == "bfloat16":
        bits = rng.choice(np.array([0x7FC0, 0xFFC1, 0x8000, 0x3F80, *[0x7F81, 0x7F80] * loud], np.uint16), shape)
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if field.entries.kind in "fc":
        return rng.normal(size=shape).astype(field.entries)
    return rng.integers(0, np.iinfo(field.entries).max, shape, field.entries, endpoint=True)


def truth_of(fields: dict[str, Field], *, loud: bool = False) -> list[dict[str, list[Any]]]:
    """The entries of each episode, one for each timestep and the final one."""
    rngs = {name: np.random.default_rng([*name.encode()]) for name in fields}
    return [
        {name: [entry(field, rngs[name], t, i, loud=loud) for t in range(n + 1)] for name, field in fields.items()}
        for i, n in enumerate(LENGTHS)
    ]


def record(folder: Path, fields: dict[str, Field], *, loud: bool = False) -> ReplayBuffer:
    buffer = ReplayBuffer(folder, 4, 6, BASE | fields)
    for number, (length, entries) in enumerate(zip(LENGTHS, truth_of(fields, loud=loud), strict=True)):
        ends = np.arange(length) == length - 1
        with buffer.one_episode() as episode:
            for t in range(length):
                own = {name: rows[t] for name, rows in entries.items()}
                base = {"observation": [t, number], "action": [t], "reward": number}
                episode.store(**base, **own, terminated=ends[t] and number != 1, truncated=ends[t] and number == 1)
            finals = {name: rows[length] for name, rows in entries.items() if fields[name].final}
            episode.final(observation=[length, number], **finals)
    return buffer


# Ways: each gives the episodes of the copy by dotted names, of lists their padding and their lengths


def read(buffer: ReplayBuffer | ConcatBuffer) -> Episodes:
    try:
        return [flatten(buffer.episode(i)) for i in range(len(buffer))]
    finally:
        if isinstance(buffer, ReplayBuffer):
            buffer.close()


def empty(buffer: ReplayBuffer, place: Path) -> ReplayBuffer:
    return ReplayBuffer(place / "copy", 4, 6, buffer.schema)


def by_store_episode(buffer: ReplayBuffer, place: Path) -> Episodes:
    copy = empty(buffer, place)
    for i in range(len(buffer)):
        copy.store_episode(**buffer.episode(i))
    return read(copy)


def by_store_of_tensors(buffer: ReplayBuffer, place: Path) -> Episodes:
    copy, view = empty(buffer, place), Trajectory(final_observation=True)
    for item in buffer.dataset(view=view):
        length = int(item.pop("_lens"))
        assert item.pop("_has_final")
        copy.store_episode(**item)
        assert copy.episode_lens[-1] == length
    return read(copy)


def by_extend(buffer: ReplayBuffer, place: Path) -> Episodes:
    copy = empty(buffer, place)
    for i in range(len(buffer)):
        with copy.one_episode() as episode:
            episode.extend(**buffer.episode(i))
    return read(copy)


def by_add(buffer: ReplayBuffer, place: Path) -> Episodes:
    """Transitions as a batch has them, as the steps of one environment."""
    copy = empty(buffer, place)
    options = {"next_fields": [name for name, field in buffer.schema.fields.items() if field.final]}
    for step in buffer.dataloader(1, n_steps=1, return_indices=False, **options):
        del step["n_step_lens"]
        copy.add(**step)
    return read(copy)


def by_concat(buffer: ReplayBuffer, place: Path) -> Episodes:
    both, copy = ConcatBuffer([buffer]), empty(buffer, place)
    for i in range(len(both)):
        copy.store_episode(**both.episode(i))
    return read(copy)


def by_get_all_data(buffer: ReplayBuffer, place: Path) -> Episodes:
    found = flatten(buffer.get_all_data())
    lengths, copy = found.pop("episode_lens").tolist(), empty(buffer, place)
    for i, length in enumerate(lengths):
        copy.store_episode(**{name: column[i][:length] for name, column in found.items()})
    return read(copy)


def by_update(buffer: ReplayBuffer, place: Path) -> Episodes:
    """Everything but the final observations, which `update` does not take, over episodes of other values."""
    buffer.snapshot(place / "copy")
    copy = ReplayBuffer.from_folder(place / "copy")
    for i, length in enumerate(buffer.episode_lens.tolist()):
        first = flatten(buffer.episode(2))
        copy.update(i, **{name: rows[:length] for name, rows in first.items() if not name.startswith("observation")})
        copy.update(i, **{name: rows[:length] for name, rows in flatten(buffer.episode(i)).items()})
    return read(copy)


def unpack_of(packed: Path, place: Path) -> ReplayBuffer:
    unpack(packed, place / "copy")
    return ReplayBuffer.from_folder(place / "copy")


def by_merge(buffer: ReplayBuffer, place: Path) -> Episodes:

    buffer.close()
    assert main("merge", place / "copy", buffer.folder) == 0
    return read(ReplayBuffer.from_folder(place / "copy"))


def by_pack(buffer: ReplayBuffer, place: Path) -> Episodes:
    pack(buffer.folder, place / "packed")
    return read(ReplayBuffer.from_folder(place / "packed"))


def by_unpack(buffer: ReplayBuffer, place: Path) -> Episodes:
    pack(buffer.folder, place / "packed")
    return read(unpack_of(place / "packed", place))


def by_snapshot(buffer: ReplayBuffer, place: Path) -> Episodes:
    buffer.snapshot(place / "copy")
    return read(ReplayBuffer.from_folder(place / "copy"))


def by_publish(buffer: ReplayBuffer, place: Path) -> Episodes:
    publish(buffer.folder, f"file://{place}/store")
    pull(f"file://{place}/store", place / "copy")
    return read(ConcatBuffer.from_root(place / "copy"))


OWN: dict[str, Callable[[ReplayBuffer, Path], Episodes]] = {
    "store_episode": by_store_episode,
    "store_episode of tensors": by_store_of_tensors,
    "extend": by_extend,
    "add": by_add,
    "ConcatBuffer": by_concat,
    "get_all_data": by_get_all_data,
    "update": by_update,
    "merge": by_merge,
    "pack": by_pack,
    "unpack": by_unpack,
    "snapshot": by_snapshot,
    "publish": by_publish,
}


def by_format(name: str, buffer: ReplayBuffer, place: Path, target: str = "data", **options: Any) -> Episodes:
    module = import_module(f"memmap_buffer.interop.{name}")
    source = target if name == "minari" else place / target
    getattr(module, f"export_{name}")(buffer, source, **options)
    return read(getattr(module, f"import_{name}")(source, place / "copy"))


def by_torchrl(buffer: ReplayBuffer, place: Path) -> Episodes:
    """Transitions, as torchrl has them, dumped by its own storage."""
    from memmap_buffer.interop.torchrl import import_torchrl, to_tensordict

    finals = [name for name, field in buffer.schema.fields.items() if field.final]
    batch = buffer.batch(n_steps=1, next_fields=finals)
    del batch["n_step_lens"]
    data = import_module("torchrl.data")
    storage = data.TensorDictReplayBuffer(storage=data.LazyMemmapStorage(20), batch_size=2)
    storage.extend(to_tensordict(batch))
    storage.dumps(place / "data")
    return read(import_torchrl(place / "data", place / "copy"))


def numpy_of(value: Any, kind: Any, field: Field) -> Any:
    """A value that Arrow gives, in the dtype of its column; the shape of no arrays is that of the field."""
    while pa.types.is_nested(kind):
        kind, value = kind.value_type, value.flatten() if isinstance(value, pa.Array) else value.values
    found = value.to_numpy(zero_copy_only=False) if isinstance(value, pa.Array) else np.array(value.as_py())
    found = found.astype(str if pa.types.is_string(kind) else kind.to_pandas_dtype())
    return found.reshape([-1 if n is None else n for n in field.shape])


def by_parquet(buffer: ReplayBuffer, place: Path) -> Episodes:
    from memmap_buffer.interop.parquet import export_parquet

    export_parquet(buffer, place / "tables")
    steps, episodes = (pq.read_table(place / "tables" / f"{name}.parquet") for name in ("steps", "episodes"))
    out: Episodes = [{} for _ in range(episodes.num_rows)]
    for name, field in buffer.schema.fields.items():
        kind, start = steps[name].type, 0
        assert pa.types.is_list(kind) == field.is_list
        for episode, length in zip(range(len(out)), episodes["_length"].to_pylist(), strict=True):
            rows = [*steps[name].slice(start, length)]
            rows += [episodes[f"final.{name}"][episode]] if field.final else []
            out[episode][name] = [numpy_of(row, row.type, field) for row in rows]
            start += length
    return out


def by_dataframe(buffer: ReplayBuffer, place: Path) -> Episodes:
    table = to_dataframe(buffer)
    return [{name: [*rows.to_numpy()] for name, rows in group.items()} for _, group in table.groupby("_episode")]


def by_dataframe_of_episodes(buffer: ReplayBuffer, place: Path) -> Episodes:
    table = to_dataframe(buffer, view=Trajectory(), ragged=True)
    return [{name: row[name] for name in table} for _, row in table.iterrows()]


class Env(gymnasium.Env):
    """Spaces for Minari."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)


FORMATS: dict[str, Callable[[ReplayBuffer, Path], Episodes]] = {
    "d4rl": partial(by_format, "d4rl"),
    "ogbench": partial(by_format, "ogbench"),
    "robomimic": partial(by_format, "robomimic"),
    "minari": partial(by_format, "minari", target="minari/kinds-v0", env=Env()),
    "minari arrow": partial(by_format, "minari", target="minari/kinds-v0", env=Env(), data_format="arrow"),
    "lerobot": partial(by_format, "lerobot", fps=10),
    "memmap_replay_buffer": partial(by_format, "memmap_replay_buffer"),
    "torchrl": by_torchrl,
    "parquet": by_parquet,
    "to_dataframe": by_dataframe,
    "to_dataframe of episodes": by_dataframe_of_episodes,
}

TEXT = dict.fromkeys(("text", "texts"), "has no text")
COMPLEX = {"complex": "has no complex numbers"}
NO_LISTS = dict.fromkeys(LISTS, "has no lists")
REFUSED: dict[str, dict[str, str]] = {
    "d4rl": {**TEXT, **NO_LISTS},
    "ogbench": NO_LISTS,
    "robomimic": {**TEXT, **NO_LISTS},
    "minari": {"texts": "has no arrays of text", **NO_LISTS},
    "minari arrow": {"texts": "has no arrays of text", **COMPLEX, **NO_LISTS},
    "lerobot": {**COMPLEX, **NO_LISTS},
    "memmap_replay_buffer": {
        "uint64": "more than int32 holds",
        **dict.fromkeys(("complex", "nested", "text", "texts"), "expected numbers, and no groups"),
        **NO_LISTS,
    },
    "torchrl": dict.fromkeys(LISTS, "the lengths of lists that are padded"),
    "parquet": COMPLEX,
    "to_dataframe": {},
    "to_dataframe of episodes": {},
}
# What the pages and docstrings say of formats: which of our fields they have no place for, and what they store wider.
FINAL_ONLY = ("ogbench", "minari arrow")
NO_FINALS = ("d4rl", "robomimic", "lerobot", "memmap_replay_buffer", "to_dataframe", "to_dataframe of episodes")
LEFT_OUT = {"torchrl": ("text", "texts")}
PREFIX = dict.fromkeys(("d4rl", "minari", "minari arrow"), "info.")
WIDER: dict[str, dict[str, Any]] = {
    "memmap_replay_buffer": {"value_array": "i4", "last_array": "i4", "value_float16": "f4", "last_float16": "f4"},
    "minari arrow": {"last_nested.right.far": "f8"},
}
NOT_BY_TORCH = ("uint64", "complex")  # its memory-mapped tensors are of other dtypes


def assert_equal(found: Any, expected: list[Any], dtype: Any, where: str) -> None:
    assert len(found) == len(expected), where
    for one, other in zip(found, expected, strict=True):
        got = np.asarray(one)
        assert got.shape == other.shape, where
        if dtype.kind == "U":
            assert got.dtype.kind == "U" and (got == other).all(), where
        else:
            assert got.dtype == dtype and got.tobytes() == other.astype(dtype).tobytes(), where


def rows_of(episode: dict[str, Any], name: str) -> list[Any]:
    lengths = episode.get(f"_lens_{name}")
    return [*episode[name]] if lengths is None else [row[:n] for row, n in zip(episode[name], lengths, strict=True)]


def check(found: Episodes, fields: dict[str, Field], way: str, *, finals: bool = True, loud: bool = False) -> None:
    assert len(found) == len(LENGTHS)
    for i, expected in enumerate(truth_of(fields, loud=loud)):
        for name, rows in expected.items():
            kept = rows if fields[name].final and finals else rows[:-1]
            dtype = np.dtype(WIDER.get(way, {}).get(name, rows[0].dtype))
            assert_equal(rows_of(found[i], f"{PREFIX.get(way, '')}{name}"), kept, dtype, f"episode {i}, {name}")


@pytest.mark.parametrize("way", OWN)
def test_a_copy_of_our_own_is_equal_to_the_bit(tmp_path: Path, way: str) -> None:
    fields = fields_of(KINDS)
    buffer = record(tmp_path / "source", fields, loud=True)
    check(OWN[way](buffer, tmp_path), fields, way, finals=way != "get_all_data", loud=True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where data sets of other systems are written."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(place))
    return place


@pytest.mark.parametrize("way", FORMATS)
def test_a_format_gives_back_what_it_was_given(tmp_path: Path, place: Path, way: str) -> None:
    kinds = [kind for kind in KINDS if kind not in REFUSED[way] and not (way == "torchrl" and kind in NOT_BY_TORCH)]
    fields = fields_of(kinds, ("last",) if way in FINAL_ONLY else ("value", "last"))
    found = FORMATS[way](record(tmp_path / "source", fields), place)
    left_out = fields_of(LEFT_OUT.get(way, ()))
    assert not any(left_out.keys() & episode.keys() for episode in found)
    check(found, {name: fields[name] for name in fields if name not in left_out}, way, finals=way not in NO_FINALS)


@pytest.mark.parametrize(("way", "kind"), [(way, kind) for way, kinds in REFUSED.items() for kind in kinds])
def test_what_a_format_has_no_place_for_is_refused_before_anything_is_written(
    tmp_path: Path, place: Path, way: str, kind: str
) -> None:
    fields = fields_of([kind], ("last",) if way in FINAL_ONLY else ("value", "last"))
    buffer = record(tmp_path / "source", fields)
    with pytest.raises(SchemaError, match=f"(value|last)_.*{REFUSED[way][kind]}"):
        FORMATS[way](buffer, place)
    assert [path.name for path in place.iterdir()] == ["data"] * (way == "torchrl")  # the dump that is refused


def test_a_table_of_minari_takes_no_info_without_final(tmp_path: Path, place: Path) -> None:
    buffer = record(tmp_path / "source", fields_of(["bool"]))
    with pytest.raises(SchemaError, match=r"'value_bool': got no `final`, and 'arrow' .* give data_format='hdf5'"):
        FORMATS["minari arrow"](buffer, place)
    assert not [*place.iterdir()]
