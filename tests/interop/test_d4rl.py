"""D4RL's files in and out: written here by h5py alone after the published layout, and cut as its own code does."""

import h5py
import numpy as np
import pytest

from memmap_buffer import ReplayBuffer, SchemaError
from memmap_buffer.interop.d4rl import export_d4rl, import_d4rl

LENGTHS = (4, 1, 6, 3)
TERMINATED = (True, False, True, False)


def write(path, *, final=True, timeouts=True, last_ends=True, lengths=LENGTHS, odd=False):
    """A file of episodes that the environment ended (TERMINATED) or the clock."""
    rng, columns = np.random.default_rng(1), {}
    states = [rng.normal(size=(length + 1, 3)).astype(np.float32) for length in lengths]
    total = sum(lengths)
    ends = np.cumsum(lengths) - 1
    columns["observations"] = np.concatenate([each[:-1] for each in states])
    if final:
        columns["next_observations"] = np.concatenate([each[1:] for each in states])
    columns["actions"] = rng.uniform(-1, 1, (total, 2)).astype(np.float32)
    columns["rewards"] = rng.normal(size=total).astype(np.float32)
    columns["terminals"], clock = np.zeros(total, bool), np.zeros(total, bool)
    for end, terminated in zip(ends, TERMINATED, strict=True):
        (columns["terminals"] if terminated else clock)[end] = True
    clock[-1] &= last_ends
    if timeouts:
        columns["timeouts"] = clock
    columns["infos/qpos"] = rng.normal(size=(total, 5))
    columns["infos/action_log_probs"] = rng.normal(size=total)
    if odd:
        columns["infos/goal pos/x-y"], columns["infos/goal_pos/x_y"] = rng.normal(size=(2, total))
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file.create_dataset(name, data=column, compression="gzip")
        file["metadata/algorithm"] = "SAC"
        file["metadata/iteration"] = 1000
        file["metadata/policy/fc0/weight"] = rng.normal(size=(2, 2))
    return columns


def sequences(columns, limit=None):
    """Episodes as D4RL's `sequence_dataset` cuts them: a list of rows each, the last one also if it has no end."""
    found, rows = [], []
    for i in range(len(columns["rewards"])):
        rows.append(i)
        timeout = columns["timeouts"][i] if "timeouts" in columns else len(rows) == limit
        if columns["terminals"][i] or timeout:
            found.append(rows)
            rows = []
    return found + [rows] * bool(rows)


@pytest.mark.parametrize("last_ends", [True, False])
@pytest.mark.parametrize("final", [True, False])
def test_episodes_are_cut_where_they_end(tmp_path, final, last_ends):
    columns = write(tmp_path / "d.hdf5", final=final, last_ends=last_ends)
    buffer = import_d4rl(tmp_path / "d.hdf5", tmp_path / "b")
    expected = sequences(columns)
    assert [len(rows) for rows in expected] == buffer.episode_lens.tolist() == list(LENGTHS)
    for i, rows in enumerate(expected):
        episode = buffer.episode(i)
        observations = columns["observations"][rows]
        if final:
            observations = np.concatenate([observations, columns["next_observations"][rows[-1:]]])
        np.testing.assert_array_equal(episode["observation"], observations)
        np.testing.assert_array_equal(episode["action"], columns["actions"][rows])
        np.testing.assert_array_equal(episode["reward"], columns["rewards"][rows])
        np.testing.assert_array_equal(episode["terminated"], columns["terminals"][rows])
        np.testing.assert_array_equal(episode["truncated"], columns["timeouts"][rows])
        np.testing.assert_array_equal(episode["info"]["qpos"], columns["infos/qpos"][rows])
    buffer.close()


def test_without_timeouts_the_time_limit_cuts(tmp_path):
    columns = write(tmp_path / "d.hdf5", timeouts=False, final=False)
    buffer = import_d4rl(tmp_path / "d.hdf5", tmp_path / "b", max_episode_steps=3, infos=False)
    expected = sequences(columns, limit=3)
    assert buffer.episode_lens.tolist() == [len(rows) for rows in expected]
    assert buffer.fieldnames == ("observation", "action", "reward", "terminated", "truncated")
    for i, rows in enumerate(expected):
        ends = [len(rows) == 3 and not columns["terminals"][rows[-1]]]
        assert buffer.episode(i)["truncated"].tolist() == [False] * (len(rows) - 1) + ends
    buffer.close()


@pytest.mark.parametrize("last_ends", [True, False])
@pytest.mark.parametrize("final", [True, False])
def test_a_file_comes_back_equal_to_the_bit(tmp_path, final, last_ends):
    columns = write(tmp_path / "d.hdf5", final=final, last_ends=last_ends, odd=True)
    with import_d4rl(tmp_path / "d.hdf5", tmp_path / "b") as buffer:
        export_d4rl(buffer, tmp_path / "e.hdf5")
    with h5py.File(tmp_path / "e.hdf5") as file:
        found = []
        file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
        assert set(found) == {*columns, "metadata/algorithm", "metadata/iteration"}
        for name, column in columns.items():
            assert (file[name].dtype, file[name][()].tobytes()) == (column.dtype, column.tobytes()), name
        assert (file["metadata/algorithm"].asstr()[()], file["metadata/iteration"][()]) == ("SAC", 1000)


def test_what_of_a_file_does_not_come_back_is_what_the_page_says(tmp_path):
    """Ends are bools, of every episode but the last; the rest is equal to the bit."""
    columns = write(tmp_path / "d.hdf5", timeouts=False, lengths=(4, 6, 6, 3))
    with h5py.File(tmp_path / "d.hdf5", "a") as file:
        terminals = file["terminals"][()].astype(np.float32)
        del file["terminals"]
        file["terminals"] = terminals
        file["seed"] = 3
    with import_d4rl(tmp_path / "d.hdf5", tmp_path / "b", max_episode_steps=6) as buffer:
        export_d4rl(buffer, tmp_path / "e.hdf5")
    with h5py.File(tmp_path / "e.hdf5") as file:
        assert set(file) == {*(name.split("/")[0] for name in columns), "timeouts", "metadata"}
        assert "policy" not in file["metadata"]
        for name in ("terminals", "timeouts"):
            assert file[name].dtype == bool
        assert file["terminals"][()].tolist() == terminals.astype(bool).tolist()
        assert not (file["timeouts"][()] & file["terminals"][()]).any()
        for name in set(columns) - {"terminals"}:
            assert (file[name].dtype, file[name][()].tobytes()) == (columns[name].dtype, columns[name].tobytes())


def test_an_end_that_nothing_marks_is_found_by_the_observations_that_follow(tmp_path):
    write(tmp_path / "d.hdf5", timeouts=False)
    with pytest.raises(
        SchemaError, match=r"next_observations: what follows step 4 is not what step 5 has.*pass max_episode_steps="
    ):
        import_d4rl(tmp_path / "d.hdf5", tmp_path / "b")


def test_what_is_no_such_file_is_refused(tmp_path):
    with h5py.File(tmp_path / "d.hdf5", "w") as file:
        file["observations"] = np.zeros((3, 2))
    with pytest.raises(SchemaError, match="it has no 'actions', so it is no file of D4RL; it has observations"):
        import_d4rl(tmp_path / "d.hdf5", tmp_path / "b")
    with h5py.File(tmp_path / "d.hdf5", "a") as file:
        file["actions"], file["terminals"], file["infos/goal"] = np.zeros((3, 1)), np.zeros(3), np.zeros(2)
    with pytest.raises(SchemaError, match=r"info\.goal has shape \(2,\), expected 3 steps; import without infos"):
        import_d4rl(tmp_path / "d.hdf5", tmp_path / "b")


@pytest.mark.parametrize("name", ["observations", "next_observations", "actions", "rewards", "terminals", "timeouts"])
def test_groups_in_the_place_of_arrays_are_refused(tmp_path, name):
    write(tmp_path / "d.hdf5")
    with h5py.File(tmp_path / "d.hdf5", "a") as file:
        del file[name]
        file[f"{name}/a"] = np.zeros(3)
    with pytest.raises(SchemaError, match=f"'{name}' is a group, and D4RL has an array"):
        import_d4rl(tmp_path / "d.hdf5", tmp_path / "b")


def test_what_cannot_be_exported_is_refused(tmp_path):
    nested = ReplayBuffer(tmp_path / "b", 3, 5, {"observation": {"a": "float"}, "action": "int"})
    with nested, pytest.raises(SchemaError, match="it has no field 'observation', which D4RL needs flat"):
        export_d4rl(nested, tmp_path / "e.hdf5")
    columns = write(tmp_path / "d.hdf5")
    with import_d4rl(tmp_path / "d.hdf5", tmp_path / "c", max_episodes=9) as buffer:
        steps = {"action": np.zeros((1, 2)), "reward": [0], "terminated": [True], "truncated": [False]}
        infos = {"qpos": np.zeros((1, 5)), "action_log_probs": [0]}
        buffer.store_episode(observation=columns["observations"][:1], info=infos, **steps)
        with pytest.raises(SchemaError, match="steps 14 to 15: no final observation, which the episodes before have"):
            export_d4rl(buffer, tmp_path / "e.hdf5")


def test_a_declared_end_is_exported_as_a_terminal(tmp_path):
    fields = {"observation": ("float", 2), "action": ("float", 1), "reward": "float", "info": {"done": "bool"}}
    with ReplayBuffer(tmp_path / "a", 2, 5, fields, terminated="info.done") as buffer:
        for length in (2, 3):
            steps = {"observation": np.zeros((length, 2)), "action": np.zeros((length, 1)), "reward": np.zeros(length)}
            buffer.store_episode(**steps, info={"done": np.arange(length) == length - 1})
        export_d4rl(buffer, tmp_path / "out.hdf5")
    with h5py.File(tmp_path / "out.hdf5") as file:
        assert file["terminals"][()].tolist() == [False, True, False, False, True]
        assert not file["timeouts"][()].any()
        assert "infos" not in file
