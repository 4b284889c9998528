"""What RLlib recorded comes in, from files as it writes them; its algorithms' tests run in a process of their own."""

from __future__ import annotations

import base64
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import run_cases

from memmap_buffer import ReplayBuffer, SchemaError
from memmap_buffer.interop.rllib import import_rllib

CASES = Path(__file__).parent / "rllib_cases.py"
needs_rllib = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ray", "tree", "lz4", "msgpack_numpy")),
    reason="RLlib is not installed: pip install 'memmap-buffer[rllib]'",
)


@needs_rllib
def test_what_rllib_records_comes_in_and_its_algorithms_learn_from_a_folder_as_the_cases_say() -> None:
    run_cases(CASES, "not slow")


def episode(number: int, length: int, end: str = "terminateds") -> dict[str, Any]:
    """An episode's columns, whose values follow from its number."""
    rng = np.random.default_rng(number)
    observed = rng.random((length + 1, 2, 3), np.float32)
    last = np.arange(length) == length - 1
    columns = {
        "eps_id": np.full(length, f"id{number}"),
        "obs": observed[:-1],
        "actions": rng.integers(0, 9, length),
        "rewards": rng.random(length),
        "new_obs": observed[1:],
        "terminateds": last & (end == "terminateds"),
        "truncateds": last & (end == "truncateds"),
        "action_logp": rng.random(length, np.float32),
    }
    return columns


def rows(columns: dict[str, Any], which: slice) -> dict[str, Any]:
    return {name: values[which] for name, values in columns.items()}


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def write(path: Path, columns: dict[str, Any]) -> None:
    """A file as Ray Data writes it: arrays are lists with a shape beside them."""
    arrays, fields = [], []
    for name, values in columns.items():
        about = None
        if values.ndim > 1:
            ends = np.arange(len(values) + 1) * values[0].size
            array = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(values.reshape(-1)))
            shape = str(list(values.shape[1:]))
            about = {"ARROW:extension:name": "ray.data.arrow_tensor_v2", "ARROW:extension:metadata": shape}
        else:
            array = pa.array(values.tolist() if values.dtype.kind == "U" else values)
        arrays.append(array)
        fields.append(pa.field(name, array.type, metadata=about))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), path)


def assert_equal(buffer: ReplayBuffer, place: int, columns: dict[str, Any], final: bool = True) -> None:
    found = buffer.episode(place)
    observed = np.concatenate([columns["obs"], columns["new_obs"][-1:]]) if final else columns["obs"]
    np.testing.assert_array_equal(found["observation"], observed)
    for name, theirs in (("action", "actions"), ("reward", "rewards"), ("action_logp", "action_logp")):
        np.testing.assert_array_equal(found[name], columns[theirs])
    for name, theirs in (("terminated", "terminateds"), ("truncated", "truncateds")):
        np.testing.assert_array_equal(found[name], columns[theirs])
    assert found["episode_id"] == columns["eps_id"][0]


def test_episodes_are_put_together_from_the_runs_in_which_they_were_written(tmp_path: Path) -> None:
    first, second, third = episode(1, 5), episode(2, 7, "truncateds"), episode(3, 4, "")
    run = tmp_path / "out" / "env"
    write(run / "run-000001-00009" / "a_000000-0.parquet", rows(first, slice(2)))
    write(run / "run-000001-00009" / "a_000010-0.parquet", rows(third, slice(3)))
    write(run / "run-000001-00009" / "a_000002-0.parquet", rows(second, slice(4)))
    write(run / "run-000001-00010" / "a_000000-0.parquet", joined(rows(first, slice(2, 5)), rows(second, slice(4, 7))))
    write(run / "run-000001-00011" / "a_000000-0.parquet", rows(third, slice(3, 4)))
    with import_rllib(tmp_path / "out", tmp_path / "in") as buffer:
        assert len(buffer) == 3
        for place, columns in enumerate((first, second, third)):
            assert_equal(buffer, place, columns)
        assert buffer.schema.fields["observation"].final
        assert buffer.schema.fields["action_logp"].dtype == "float32"


def test_rows_that_every_run_writes_once_more_come_in_once(tmp_path: Path) -> None:
    first, second = episode(1, 5), episode(2, 6)
    written = rows(first, slice(3))
    for number, more in enumerate((rows(first, slice(3, 5)), rows(second, slice(2)), rows(second, slice(2, 6)))):
        write(tmp_path / f"run-000001-0000{number}" / "a.parquet", written)
        written = joined(written, more)
    write(tmp_path / "run-000001-00004" / "a.parquet", written)
    with import_rllib(tmp_path, tmp_path / "in") as buffer:
        assert len(buffer) == 2
        assert_equal(buffer, 0, first)
        assert_equal(buffer, 1, second)


def test_an_episode_is_cut_where_rows_are_missing(tmp_path: Path) -> None:
    columns = episode(1, 9)
    write(tmp_path / "a.parquet", joined(rows(columns, slice(3)), rows(columns, slice(5, 9))))
    with import_rllib(tmp_path / "a.parquet", tmp_path / "in") as buffer:
        assert buffer.episode_lens.tolist() == [3, 4]
        assert_equal(buffer, 0, rows(columns, slice(3)))
        assert_equal(buffer, 1, rows(columns, slice(5, 9)))


def test_files_of_others_need_no_ids_and_no_following_observations(tmp_path: Path) -> None:
    parts = [episode(1, 3), episode(2, 4)]
    columns = joined(*parts)
    write(tmp_path / "a.parquet", {name: columns[name] for name in ("obs", "actions", "rewards", "terminateds")})
    with import_rllib(tmp_path, tmp_path / "in") as buffer:
        assert buffer.episode_lens.tolist() == [3, 4]
        for place, part in enumerate(parts):
            np.testing.assert_array_equal(buffer.episode(place)["observation"], part["obs"])
        assert not buffer.episode(0)["truncated"].any()


def test_outputs_are_chosen_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", episode(1, 3))
    with import_rllib(tmp_path, tmp_path / "none", outputs=False) as buffer:
        assert "action_logp" not in buffer.schema.fields
    with import_rllib(tmp_path, tmp_path / "one", outputs=["action_logp"]) as buffer:
        assert "action_logp" in buffer.schema.fields
    with pytest.raises(SchemaError, match="not every step has \\['vf_preds'\\]"):
        import_rllib(tmp_path, tmp_path / "in", outputs=["vf_preds"])


def test_compressed_columns_are_read_and_nothing_in_them_is_executed(tmp_path: Path) -> None:
    frame = pytest.importorskip("lz4.frame", reason="lz4 is not installed")

    def packed(values: Any) -> Any:
        return np.array([base64.b64encode(frame.compress(pickle.dumps(v, protocol=5))).decode() for v in values])

    columns = episode(1, 5)
    write(tmp_path / "good" / "a.parquet", {**columns, **{name: packed(columns[name]) for name in ("obs", "new_obs")}})
    with import_rllib(tmp_path / "good", tmp_path / "in") as buffer:
        assert_equal(buffer, 0, columns)
    write(tmp_path / "bad" / "a.parquet", {**columns, "obs": packed([print] * 5)})
    with pytest.raises(SchemaError, match=r"column 'obs' is text, but no compressed array .*builtins.print"):
        import_rllib(tmp_path / "bad", tmp_path / "other")


def state(columns: dict[str, Any], start: int, lookback: int) -> dict[str, Any]:
    """A piece of an episode as RLlib packs it: lists that begin with values of the piece before."""
    before, length = start - lookback, len(columns["obs"])
    observed = [*columns["obs"], columns["new_obs"][-1]][before:]

    def buffer(values: list[Any]) -> dict[str, Any]:
        return {"data": values, "lookback": lookback, "finalized": False, "space": None}

    infos = [{"lives": t, "only": 1} if t == 2 else {"lives": t} for t in range(length + 1)]
    return {
        "id_": str(columns["eps_id"][0]),
        "observations": buffer(observed),
        "actions": buffer([*columns["actions"]][before:]),
        "rewards": buffer(columns["rewards"].tolist()[before:]),
        "infos": buffer(infos[before:]),
        "extra_model_outputs": {"action_logp": buffer([*columns["action_logp"]][before:])},
        "is_terminated": bool(columns["terminateds"][-1]),
        "is_truncated": bool(columns["truncateds"][-1]),
        "t_started": start,
    }


def packed_as_numpy(value: Any) -> Any:
    """What msgpack_numpy makes of arrays and of numpy's numbers."""
    about = {b"nd": isinstance(value, np.ndarray), b"type": value.dtype.str, b"data": value.tobytes()}
    return {**about, b"kind": b"", b"shape": value.shape} if about[b"nd"] else about


def test_packed_episodes_come_in_with_their_infos(tmp_path: Path) -> None:
    msgpack = pytest.importorskip("msgpack", reason="msgpack is not installed")
    first, second = episode(1, 6), episode(2, 4, "truncateds")
    pieces = [
        [state(rows(first, slice(4)), 0, 0), state(second, 0, 0)],
        [state(rows(first, slice(4)), 0, 0), state(second, 0, 0), state(first, 4, 1)],
    ]
    for number, states in enumerate(pieces):
        items = [msgpack.packb(piece, default=packed_as_numpy) for piece in states]
        place = tmp_path / "out" / f"run-000001-0000{number}"
        place.mkdir(parents=True)
        pq.write_table(pa.table({"item": pa.array(items, pa.binary())}), place / "a.parquet")
    with import_rllib(tmp_path / "out", tmp_path / "in") as buffer:
        assert len(buffer) == 2
        assert_equal(buffer, 0, second)
        assert_equal(buffer, 1, first)
        assert buffer.episode(1)["info"]["lives"].tolist() == [1, 2, 3, 4, 5, 6]
        assert "info.only" not in buffer.schema.fields
    with import_rllib(tmp_path / "out", tmp_path / "none", infos=False) as buffer:
        assert not any(name.startswith("info") for name in buffer.schema.fields)
    hostile = {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": (1,), b"data": pickle.dumps([print])}
    bad = {**state(first, 0, 0), "rewards": {"data": hostile, "lookback": 0, "finalized": True}}
    item = msgpack.packb(bad, default=packed_as_numpy)
    pq.write_table(pa.table({"item": pa.array([item], pa.binary())}), tmp_path / "bad.parquet")
    with pytest.raises(SchemaError, match=r"an episode that cannot be read .*leave it out"):
        import_rllib(tmp_path / "bad.parquet", tmp_path / "other")


@pytest.mark.parametrize("finalized", [True, False])
def test_observations_of_tuples_of_dicts_come_in(tmp_path: Path, finalized: bool) -> None:
    msgpack = pytest.importorskip("msgpack", reason="msgpack is not installed")
    columns, count = episode(1, 4), np.arange(5.0)
    each = [({"image": columns["obs"][0] + t, "count": (t,)}, np.float32(-t)) for t in count]
    whole = ({"image": columns["obs"][0] + count[:, None, None], "count": (count,)}, -count.astype(np.float32))
    observed = {"data": whole if finalized else each, "lookback": 0, "finalized": finalized}
    item = msgpack.packb({**state(columns, 0, 0), "observations": observed}, default=packed_as_numpy)
    pq.write_table(pa.table({"item": pa.array([item], pa.binary())}), tmp_path / "a.parquet")
    with import_rllib(tmp_path, tmp_path / "in") as buffer:
        found = buffer.episode(0)["observation"]
        assert found["item0"]["count"]["item0"].tolist() == count.tolist()
        assert found["item1"].tolist() == (-count).tolist()
        np.testing.assert_allclose(found["item0"]["image"], whole[0]["image"])


def test_what_cannot_come_in_is_told(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="there is no Parquet file; give the folder that RLlib's `output` names"):
        import_rllib(tmp_path, tmp_path / "in")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(SchemaError, match="it is no Parquet file"):
        import_rllib(tmp_path, tmp_path / "in")
    columns = episode(1, 3)
    write(tmp_path / "a.parquet", {"o_t": columns["obs"], "actions": columns["actions"], "rewards": columns["rewards"]})
    with pytest.raises(SchemaError, match="it has no column 'obs', there are"):
        import_rllib(tmp_path, tmp_path / "in")
    ragged = pa.array([[1.0], [1.0, 2.0]])
    pq.write_table(pa.table({"obs": ragged, "actions": [0, 1], "rewards": [0.0, 1.0]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match="column 'obs' is of lists of several lengths"):
        import_rllib(tmp_path, tmp_path / "in")
