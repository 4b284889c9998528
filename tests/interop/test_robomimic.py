"""robomimic's files in and out: written here by h5py alone after the published layout, and read back by it."""

import json

import gymnasium
import h5py
import numpy as np
import pytest

from memmap_buffer import ReplayBuffer, SchemaError
from memmap_buffer.adapters import read_extra
from memmap_buffer.interop.record import RecordEpisodes
from memmap_buffer.interop.robomimic import export_robomimic, import_robomimic

LENGTHS = {"demo_0": 4, "demo_2": 3, "demo_10": 5}  # numbers, not letters, order them
MASKS = {"train": ["demo_0", "demo_10"], "valid": ["demo_2"], "20_percent": ["demo_10"]}
MODEL = "<mujoco>" + "x" * 6000 + "</mujoco>"  # longer than any text field


def write(path, *, following=True):
    """Name -> arrays by their path."""
    rng, out = np.random.default_rng(1), {}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(LENGTHS.values())
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {"robots": ["Panda"]}})
        for demo, length in LENGTHS.items():
            images = rng.integers(256, size=(length + 1, 4, 4, 3), dtype=np.uint8)
            positions = rng.normal(size=(length + 1, 3))
            arrays = {
                "obs/agentview_image": images[:-1],
                "obs/robot0_eef_pos": positions[:-1],
                "actions": rng.uniform(-1, 1, (length, 7)),
                "rewards": rng.integers(2, size=length).astype(np.float64),
                "dones": np.ones(length, np.int64),  # done at each step, not only at the last
                "states": rng.normal(size=(length, 32)),
                "action_dict/rel-pos": rng.normal(size=(length, 3)),
                "action_dict/rel_pos": rng.normal(size=(length, 3)),
                "action": rng.normal(size=length),  # beside "actions", which have this name here
            }
            positions[1, 2] = np.nan
            if following:
                arrays |= {"next_obs/agentview_image": images[1:], "next_obs/robot0_eef_pos": positions[1:]}
            group = data.create_group(demo)
            group.attrs["num_samples"] = length
            group.attrs["model_file"] = MODEL + demo
            for name, array in arrays.items():
                group[name] = array
            out[demo] = arrays
        for name, demos in MASKS.items():
            file[f"mask/{name}"] = np.array(demos, dtype="S")
    return out


@pytest.mark.parametrize("following", [True, False])
def test_each_demonstration_is_an_episode_and_each_mask_a_part(tmp_path, following):
    written = write(tmp_path / "r.hdf5", following=following)
    buffer = import_robomimic(tmp_path / "r.hdf5", tmp_path / "b")
    assert buffer.episode_lens.tolist() == list(LENGTHS.values())
    for i, (demo, arrays) in enumerate(written.items()):
        episode = buffer.episode(i)
        images = arrays["obs/agentview_image"]
        if following:
            images = np.concatenate([images, arrays["next_obs/agentview_image"][-1:]])
        np.testing.assert_array_equal(episode["observation"]["agentview_image"], images)
        for name, theirs in {"action": "actions", "reward": "rewards", "done": "dones", "state": "states"}.items():
            np.testing.assert_array_equal(episode[name], arrays[theirs])
            assert episode[name].dtype == arrays[theirs].dtype
        np.testing.assert_array_equal(episode["action_dict"]["rel_pos_2"], arrays["action_dict/rel-pos"])
        np.testing.assert_array_equal(episode["action_dict"]["rel_pos"], arrays["action_dict/rel_pos"])
        np.testing.assert_array_equal(episode["action_2"], arrays["action"])
        assert str(episode["demo"]) == demo
    names = {"train": "mask.train", "valid": "mask.valid", "20_percent": "mask.n20_percent"}
    for name, demos in MASKS.items():
        batch = next(iter(buffer.dataloader(9, filter_meta={names[name]: True})))
        assert batch["demo"] == demos
    buffer.close()


def everything(path):
    """Path -> bytes of each array, and the attributes of each group."""
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: found.update(
                {name: (str(item.dtype), item.shape, item[()].tobytes())}
                if isinstance(item, h5py.Dataset)
                else {f"{name}/": dict(item.attrs)}
            )
        )
    return found


@pytest.mark.parametrize("following", [True, False])
def test_a_file_comes_back_equal_to_the_bit(tmp_path, following):
    write(tmp_path / "r.hdf5", following=following)
    with import_robomimic(tmp_path / "r.hdf5", tmp_path / "b") as buffer:
        export_robomimic(buffer, tmp_path / "s.hdf5")
    assert everything(tmp_path / "s.hdf5") == everything(tmp_path / "r.hdf5")


def test_observations_that_next_obs_lacks_have_no_final_entry(tmp_path):
    write(tmp_path / "r.hdf5")
    with h5py.File(tmp_path / "r.hdf5", "a") as file:
        for demo in LENGTHS:
            del file[f"data/{demo}/next_obs/robot0_eef_pos"]
    with import_robomimic(tmp_path / "r.hdf5", tmp_path / "b") as buffer:
        assert buffer.schema.final_names == {"observation.agentview_image"}
        export_robomimic(buffer, tmp_path / "s.hdf5")
    assert everything(tmp_path / "s.hdf5") == everything(tmp_path / "r.hdf5")


def test_images_can_be_compressed_and_go_out_as_they_came(tmp_path):
    write(tmp_path / "r.hdf5")
    with h5py.File(tmp_path / "r.hdf5", "a") as file:
        for demo, length in LENGTHS.items():
            images = np.random.default_rng(2).integers(9, size=(length + 1, 16, 12, 3), dtype=np.uint8)
            file[f"data/{demo}/obs/wrist_image"], file[f"data/{demo}/next_obs/wrist_image"] = images[:-1], images[1:]
    with import_robomimic(tmp_path / "r.hdf5", tmp_path / "b", codec="zstd") as buffer:
        coded = {name for name, field in buffer.schema.fields.items() if field.codec}
        assert coded == {"observation.wrist_image"}  # 4 x 4 is no image
        assert json.loads(read_extra(buffer, "robomimic")["attributes"]["env_args"])["env_name"] == "Lift"
        export_robomimic(buffer, tmp_path / "s.hdf5")
    assert everything(tmp_path / "s.hdf5") == everything(tmp_path / "r.hdf5")


def test_any_buffer_with_actions_can_be_exported(tmp_path):
    fields = {"observation": {"pose": ("float", 2)}, "action": ("float", 1), "terminated": "bool", "truncated": "bool"}
    with ReplayBuffer(tmp_path / "b", 3, 5, fields, {"mask": {"train": "bool"}}) as buffer:
        for train in (True, False):
            pose, ends = (
                np.random.default_rng(3).normal(size=(2, 2)),
                {"terminated": [0, train], "truncated": [0, 1 - train]},
            )
            buffer.store_episode(observation={"pose": pose}, action=np.zeros((2, 1)), mask={"train": train}, **ends)
        export_robomimic(buffer, tmp_path / "s.hdf5")
    with h5py.File(tmp_path / "s.hdf5") as file:
        assert (file["data"].attrs["total"], file["data/demo_1"].attrs["num_samples"]) == (4, 2)
        assert file["mask/train"][()].tolist() == [b"demo_0"]
        for demo in ("demo_0", "demo_1"):
            assert file[f"data/{demo}/dones"][()].tolist() == [0, 1]
            np.testing.assert_array_equal(file[f"data/{demo}/obs/pose"], pose.astype(np.float32))


def test_the_fields_that_are_declared_to_end_episodes_become_dones(tmp_path):
    fields = {"action": ("float", 1), "over": ("uint8", 1), "terminated": "bool"}
    with ReplayBuffer(tmp_path / "b", 3, 5, fields, terminated="over", truncated=None) as buffer:
        buffer.store_episode(action=np.zeros((3, 1)), over=[[0], [0], [2]], terminated=[1, 1, 0])
        export_robomimic(buffer, tmp_path / "s.hdf5")
    with h5py.File(tmp_path / "s.hdf5") as file:
        assert file["data/demo_0/dones"][()].tolist() == [0, 0, 1]
        assert file["data/demo_0/terminated"][()].tolist() == [True, True, False]
        assert "over" not in file["data/demo_0"]


@pytest.mark.parametrize(
    ("env", "name", "kwargs"),
    [
        (None, "", {}),
        ("CartPole-v1", "CartPole-v1", {}),
        (gymnasium.make("Pendulum-v1", g=9.0), "Pendulum-v1", {"g": 9.0}),
        ({"env_name": "Lift", "type": 2, "env_kwargs": {"x": 1}}, "Lift", {"x": 1}),
    ],
)
def test_the_environment_is_written_where_robomimic_looks_for_it(tmp_path, env, name, kwargs):
    with ReplayBuffer(tmp_path / "b", 3, 5, {"action": ("float", 1)}) as buffer:
        buffer.store_episode(action=np.zeros((2, 1)))
        export_robomimic(buffer, tmp_path / "s.hdf5", env=env)
        with pytest.raises(SchemaError, match=r"env: got .*, which has no spec; pass its id"):
            export_robomimic(buffer, tmp_path / "t.hdf5", env=3)
    assert not (tmp_path / "t.hdf5").exists()
    with h5py.File(tmp_path / "s.hdf5") as file:
        assert json.loads(file["data"].attrs["env_args"]) == {"env_name": name, "type": 2, "env_kwargs": kwargs}


def test_observations_of_an_environment_keep_their_keys(tmp_path):
    space = gymnasium.spaces.Dict({"bottom burner": gymnasium.spaces.Box(-9, 9, (2,))})
    env = gymnasium.Env()
    env.observation_space, env.action_space = space, gymnasium.spaces.Box(-1, 1, (1,))
    env.reset = lambda **_: (space.sample(), {})
    env.step = lambda action: (space.sample(), 0.0, True, False, {})
    with RecordEpisodes(env, tmp_path / "b", max_episodes=2, max_timesteps=2) as recorder:
        recorder.reset()
        recorder.step(np.zeros(1, np.float32))
        export_robomimic(recorder.buffer, tmp_path / "s.hdf5")
    with h5py.File(tmp_path / "s.hdf5") as file:
        assert list(file["data/demo_0/obs"]) == list(file["data/demo_0/next_obs"]) == ["bottom burner"]


def test_what_is_no_such_file_is_refused(tmp_path):
    with h5py.File(tmp_path / "r.hdf5", "w") as file:
        file["observations"] = np.zeros(3)
    with pytest.raises(SchemaError, match="it has no demonstrations in 'data'"):
        import_robomimic(tmp_path / "r.hdf5", tmp_path / "b")
    write(tmp_path / "r.hdf5")
    with h5py.File(tmp_path / "r.hdf5", "a") as file:
        file["data/demo_2/next_obs/robot0_eef_pos"][0] += 1
    with pytest.raises(SchemaError, match=r"demo_2/next_obs: observation\.robot0_eef_pos: what follows step 0 is not"):
        import_robomimic(tmp_path / "r.hdf5", tmp_path / "b")
    write(tmp_path / "r.hdf5", following=False)
    with h5py.File(tmp_path / "r.hdf5", "a") as file:
        del file["data/demo_2/states"]
    with pytest.raises(SchemaError, match="array 'state': only 2 of 3 episodes have it; leave it out"):
        import_robomimic(tmp_path / "r.hdf5", tmp_path / "b")
    with h5py.File(tmp_path / "r.hdf5", "a") as file:
        del file["data/demo_0/actions"]
    with pytest.raises(SchemaError, match="/data/demo_0: it has no 'actions'"):
        import_robomimic(tmp_path / "r.hdf5", tmp_path / "b")


def test_a_buffer_without_actions_is_refused(tmp_path):
    buffer = ReplayBuffer(tmp_path / "b", 3, 5, {"x": "float"})
    with buffer, pytest.raises(SchemaError, match="it has no field 'action', which robomimic needs"):
        export_robomimic(buffer, tmp_path / "s.hdf5")
