"""The two Parquet tables against the episodes, read back by pyarrow and by pandas."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from inside import set_inside

from memmap_buffer import ConcatBuffer, Field, ReplayBuffer, SchemaError
from memmap_buffer.adapters import flatten
from memmap_buffer.interop.parquet import export_parquet

FIELDS = {
    "observation": Field("float32", (2, 3), final=True),
    "camera": {"left": ("uint8", 4)},
    "number": "int",
    "half": "bfloat16",
    "small": "float16",
    "text": "U8",
    "terminated": "bool",
}


@pytest.fixture
def buffer(tmp_path):
    rng = np.random.default_rng(0)
    with ReplayBuffer(tmp_path / "buffer", 8, 9, FIELDS, {"task": "U8", "goal": ("float", 2)}, circular=True) as buffer:
        for number in range(10):
            length = 1 + number % 9
            buffer.store_episode(
                observation=rng.random((length + number % 2, 2, 3)),
                camera={"left": rng.integers(0, 256, (length, 4))},
                number=np.arange(length) + 2**53 + number,
                half=np.arange(length) / 4,
                small=np.arange(length),
                text=[f"{number}:{t}" for t in range(length)],
                terminated=np.arange(length) == length - 1,
                task=f"task {number}",
                goal=[number, -number],
            )
        yield buffer


@pytest.mark.parametrize("group", [1, 1 << 16])
def test_every_timestep_and_every_episode_is_a_row_with_equal_values(buffer, tmp_path, monkeypatch, group):
    set_inside(monkeypatch, group_steps=group)
    export_parquet(buffer, tmp_path / "tables")
    steps, episodes = (pq.read_table(tmp_path / "tables" / name) for name in ("steps.parquet", "episodes.parquet"))
    assert pq.ParquetFile(tmp_path / "tables" / "steps.parquet").num_row_groups == (8 if group == 1 else 1)
    assert steps.column_names == ["_episode", "_t", *buffer.fieldnames]
    assert steps.num_rows == buffer.num_steps
    assert episodes["_episode"].to_pylist() == buffer.serials.tolist()
    assert episodes["_length"].to_pylist() == buffer.episode_lens.tolist()
    assert str(steps["observation"].type).startswith("fixed_size_list<")
    assert str(episodes["final.observation"].type).startswith("list<")  # older readers know no null of a fixed size
    start = 0
    for i, length in enumerate(buffer.episode_lens.tolist()):
        expected, rows = flatten(buffer.episode(i)), steps.slice(start, length)
        assert rows["_t"].to_pylist() == list(range(length))
        for name in buffer.fieldnames:
            assert rows[name].to_pylist() == expected[name][:length].tolist(), name
        finals = expected["observation"][length:].tolist()
        assert episodes["final.observation"][i].as_py() == (finals[0] if finals else None)
        for name in buffer.meta_fieldnames:
            assert episodes[name][i].as_py() == expected[name].tolist(), name
        start += length


def test_episodes_of_several_folders_are_told_apart_by_the_number_of_the_folder(tmp_path):
    buffers = [ReplayBuffer(tmp_path / name, 2, 3, {"reward": "float"}) for name in "ab"]
    for buffer, reward in zip(buffers, [0.0, 1.0], strict=True):
        buffer.store_episode(reward=[reward, reward])
    export_parquet(ConcatBuffer(buffers), tmp_path / "out")
    steps = pd.read_parquet(tmp_path / "out" / "steps.parquet")
    assert [*zip(steps["_shard"], steps["_episode"], steps["reward"], strict=True)] == [(0, 0, 0.0)] * 2 + [
        (1, 0, 1.0)
    ] * 2
    assert pd.read_parquet(tmp_path / "out" / "episodes.parquet")["_shard"].tolist() == [0, 1]


def test_pandas_reads_them_with_the_dtypes_of_the_fields(buffer, tmp_path):
    export_parquet(buffer, tmp_path / "tables")
    steps = pd.read_parquet(tmp_path / "tables" / "steps.parquet")
    kinds = {name: str(steps[name].dtype) for name in ("number", "half", "small", "terminated")}
    assert kinds == {"number": "int64", "half": "float32", "small": "float16", "terminated": "bool"}
    longest = steps.groupby("_episode")["_t"].max() + 1
    assert longest.tolist() == buffer.episode_lens.tolist()


def test_no_episode_with_a_final_observation_gives_a_column_of_nulls(tmp_path):
    with ReplayBuffer(tmp_path / "buffer", 2, 3, {"x": Field("float", final=True)}) as buffer:
        buffer.store_episode(x=[1, 2])
        export_parquet(buffer, tmp_path / "tables")
    assert pq.read_table(tmp_path / "tables" / "episodes.parquet")["final.x"].to_pylist() == [None]


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(buffer, tmp_path):
    export_parquet(buffer, tmp_path / "tables")
    before = (tmp_path / "tables" / "steps.parquet").read_bytes()
    with pytest.raises(SchemaError, match="there are tables already"):
        export_parquet(buffer, tmp_path / "tables")
    assert (tmp_path / "tables" / "steps.parquet").read_bytes() == before
    empty = ReplayBuffer(tmp_path / "empty", 2, 3, {"x": "float"})
    with pytest.raises(SchemaError, match="it has no episodes"):
        export_parquet(empty, tmp_path / "none")
    with ReplayBuffer(tmp_path / "complex", 2, 3, {"z": "complex"}) as waves:
        waves.store_episode(z=[1j])
        with pytest.raises(
            SchemaError, match=r"'z': got complex64 .*, and Parquet has no complex numbers; export a copy"
        ):
            export_parquet(waves, tmp_path / "none")
    assert not (tmp_path / "none").exists()
