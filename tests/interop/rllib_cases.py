"""What `test_rllib.py` runs in a process of its own, against the real RLlib on two CPUs."""

import runpy
import shutil
import warnings
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from pages import blocks_alone, blocks_of

from memmap_buffer import ConcatBuffer, Field, NotABufferError, ReplayBuffer, SchemaError
from memmap_buffer.adapters import encode_space, schema_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import msgpack
    import ray
    import ray.data
    from ray.rllib.algorithms.bc import BCConfig
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.rllib.core.rl_module.torch import TorchRLModule
    from ray.rllib.offline.offline_env_runner import OfflineSingleAgentEnvRunner

    from memmap_buffer.interop.rllib import import_rllib
    from memmap_buffer.interop.rllib_offline import DiskOfflineData, read_rllib

pytestmark = pytest.mark.filterwarnings("ignore")  # what RLlib says of its own parts

CARTPOLE = gymnasium.make("CartPole-v1")


class Rooms(gymnasium.Env):
    """A dict of observations, a tuple of actions, infos; ten steps at most."""

    observation_space = spaces.Dict(
        {"bottom burner": spaces.Discrete(100), "image": spaces.Box(0, 255, (2, 3), np.uint8)}
    )
    action_space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (2,), np.float32)})

    def __init__(self, config=None):
        self._rng = np.random.default_rng(0)

    def _seen(self):
        image = self._rng.integers(0, 256, (2, 3), np.uint8)
        return {"bottom burner": self._t, "image": image}, {"time": self._t, "at": np.array([self._t, 0.5])}

    def reset(self, *, seed=None, options=None):
        self._t = 0
        return self._seen()

    def step(self, action):
        self._t += 1
        observation, info = self._seen()
        return observation, float(self._t), bool(self._rng.random() < 0.2), self._t == 10, info


@pytest.fixture(scope="session", autouse=True)
def cluster():
    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    yield
    ray.shutdown()


@pytest.fixture
def folder(tmp_path):
    """Six episodes of CartPole, whose last one has no end yet."""
    fields = schema_of(CARTPOLE.observation_space, CARTPOLE.action_space)
    rng = np.random.default_rng(0)
    with ReplayBuffer(tmp_path / "folder", 10, 500, fields, {"task": "int"}) as buffer:
        for number in range(6):
            length = int(rng.integers(5, 30))
            last = np.arange(length) == length - 1
            buffer.store_episode(
                observation=rng.random((length + (number != 4), 4), np.float32),  # one terminates without a final one
                action=rng.integers(0, 2, length),
                reward=rng.random(length, np.float32),
                terminated=last & (number % 2 == 0),
                truncated=last & (number in (1, 3)),
                task=number,
            )
    return tmp_path / "folder"


# Import


class Untrained(TorchRLModule):
    """Is not asked: the actions are random."""

    def setup(self):
        pass


def recorded(env, place, **options):
    """Two runs of RLlib's own recorder, and the episodes that it returned."""
    config = PPOConfig().environment(env).env_runners(num_env_runners=0, batch_mode="complete_episodes")
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=Untrained))
    config.offline_data(output=f"local://{place}", **options)
    runner = OfflineSingleAgentEnvRunner(config=config, worker_index=1)
    return [episode for _ in range(2) for episode in runner.sample(num_episodes=1, random_actions=True)]


@pytest.mark.parametrize(
    ("env", "packed", "compressed"),
    [
        ("CartPole-v1", True, []),
        ("CartPole-v1", False, []),
        ("CartPole-v1", False, ["obs", "new_obs"]),
        (Rooms, True, []),
    ],
    ids=["packed", "rows", "compressed rows", "packed dicts"],
)
def test_what_rllib_recorded_comes_in_whole(tmp_path, env, packed, compressed):
    theirs = recorded(env, tmp_path / "out", output_write_episodes=packed, output_compress_columns=compressed)
    space = (CARTPOLE if env is not Rooms else Rooms()).observation_space
    with import_rllib(tmp_path / "out", tmp_path / "in") as buffer:
        assert len(buffer) == 2
        for ours, episode in zip((buffer.episode(i) for i in range(2)), theirs, strict=True):
            assert ours["episode_id"] == episode.id_
            np.testing.assert_array_equal(ours["reward"], episode.get_rewards())
            assert bool(ours["terminated"][-1]) == episode.is_terminated
            assert bool(ours["truncated"][-1]) == episode.is_truncated
            for t, (observed, action) in enumerate(
                zip(episode.get_observations(), [*episode.get_actions(), None], strict=True)
            ):
                assert_same(ours["observation"], t, encode_space(space, observed))
                if action is not None:
                    assert_same(ours["action"], t, action)
            if env is Rooms:
                assert ours["info"]["time"].tolist() == [info["time"] for info in episode.get_infos()[1:]]
                assert ours["info"]["at"].shape == (len(episode), 2)


def test_dicts_that_ray_pickles_in_rows_are_refused(tmp_path):
    recorded(Rooms, tmp_path / "out", output_write_episodes=False, output_compress_columns=[])
    with pytest.raises(SchemaError, match=r"column 'obs' is of ray.data.arrow_pickled_object.*output_write_episodes"):
        import_rllib(tmp_path / "out", tmp_path / "in")


def assert_same(columns, t, value):
    if isinstance(value, dict):
        for name, part in value.items():
            assert_same(columns[name], t, part)
    else:
        np.testing.assert_array_equal(columns[t], value)


# Reading


def test_transitions_and_episodes_go_out_as_rllib_records_them_and_come_back(folder, tmp_path):
    source = ReplayBuffer.from_folder(folder, read_only=True)
    for packed in (False, True):
        read_rllib(folder, episodes=packed, override_num_blocks=3).write_parquet(str(tmp_path / f"out{packed}"))
        with import_rllib(tmp_path / f"out{packed}", tmp_path / f"in{packed}") as copy:
            assert len(copy) == len(source)
            for place in range(len(source)):
                ours, theirs = source.episode(place), copy.episode(place)
                length = len(ours["reward"])
                np.testing.assert_array_equal(theirs["observation"][:length], ours["observation"][:length])
                for name in ("action", "reward", "terminated"):
                    np.testing.assert_array_equal(theirs[name], ours[name])
                if place != 4:
                    np.testing.assert_array_equal(theirs["observation"], ours["observation"])
                assert bool(theirs["truncated"][-1]) == (place in (1, 3) or (packed and place == 5))


def test_a_dict_of_observations_goes_out_in_episodes(tmp_path):
    fields = {
        "observation": {"image": Field("uint8", (2, 3), final=True), "state": Field("float", final=True)},
        "action": "int",
        "reward": "float",
        "logp": "float",
    }
    rng = np.random.default_rng(0)
    image, state = rng.integers(0, 256, (6, 2, 3), np.uint8), rng.random(6, np.float32)
    with ReplayBuffer(tmp_path / "folder", 2, 9, fields) as buffer:
        buffer.store_episode(
            observation={"image": image, "state": state}, action=range(5), reward=range(5), logp=rng.random(5)
        )
    with pytest.raises(SchemaError, match=r"'observation': it is a group of fields.*input_read_episodes=True"):
        read_rllib(tmp_path / "folder")
    read_rllib(tmp_path / "folder", episodes=True, outputs=["logp"]).write_parquet(str(tmp_path / "out"))
    with import_rllib(tmp_path / "out", tmp_path / "in") as copy:
        found = copy.episode(0)
        np.testing.assert_array_equal(found["observation"]["image"], image)
        np.testing.assert_array_equal(found["observation"]["state"], state)
        assert found["action"].tolist() == [0, 1, 2, 3, 4]
        assert found["truncated"].tolist() == [False] * 4 + [True]
        assert "logp" in found


def losses(**where):
    """Of three updates of BC; the same for the same batches."""
    config = BCConfig().environment(
        "CartPole-v1", observation_space=CARTPOLE.observation_space, action_space=CARTPOLE.action_space
    )
    config.offline_data(dataset_num_iters_per_learner=1, map_batches_kwargs={"concurrency": 1}, **where)
    config.training(train_batch_size_per_learner=16, lr=0.01).debugging(seed=1)
    algorithm = config.build_algo()
    found = [float(algorithm.train()["learners"]["default_policy"]["policy_loss"]) for _ in range(3)]
    algorithm.stop()
    return found


def test_bc_learns_from_a_folder_what_it_learns_from_rllibs_parquet(folder, tmp_path):
    read_rllib(folder, override_num_blocks=1).write_parquet(str(tmp_path / "parquet"))
    theirs = losses(input_=[str(tmp_path / "parquet")], input_compress_columns=[])
    ours = losses(input_=[str(folder)], offline_data_class=DiskOfflineData)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert ours[-1] != ours[0]


def test_fields_of_other_names_are_named_by_the_schema_of_rllib(folder, tmp_path):
    with ReplayBuffer.from_folder(folder) as buffer:
        buffer.rename_field("observation", "state")
    data = partial(BCConfig().copy, copy_frozen=False)

    def read(**options):
        config = data()
        config.offline_data(input_=str(folder), **options)
        return DiskOfflineData(config).data

    with pytest.raises(SchemaError, match=r"'obs': there is no field 'observation', there are \['state'"):
        read()
    rows = read(input_read_schema={"obs": "state"}, input_read_method_kwargs={"filter_meta": {"task": 1}}).take_all()
    first = ConcatBuffer([folder]).episode(1)
    np.testing.assert_array_equal([row["obs"] for row in rows], first["state"][:-1])
    np.testing.assert_array_equal([row["new_obs"] for row in rows], first["state"][1:])
    with pytest.raises(SchemaError, match="expected names among"):
        read(input_read_schema={"observation": "state"})
    with pytest.raises(SchemaError, match="a folder has no sample batches"):
        read(input_read_schema={"obs": "state"}, input_read_sample_batches=True)
    with pytest.raises(NotABufferError, match="no subfolder holds a buffer"):
        read_rllib(tmp_path / "none")


def test_several_folders_are_one_set_whose_episodes_have_ids_of_their_own(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    config = BCConfig().copy(copy_frozen=False)
    config.offline_data(input_=[str(folder), str(tmp_path / "other")], input_read_episodes=True)
    rows = DiskOfflineData(config).data.take_all()
    assert len({msgpack.unpackb(row["item"])["id_"] for row in rows}) == len(rows) == 12


# The page


@pytest.mark.parametrize("number", [None, 1])
def test_the_blocks_of_the_page_run(number, tmp_path, monkeypatch):
    """All blocks in order, and each alone behind the set-up."""
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).resolve().parents[2] / "docs" / "rllib.md"
    assert len(blocks_of(page)) == 2
    blocks = blocks_of(page) if number is None else blocks_alone(page, number)
    Path("page.py").write_text("\n".join(block["code"] for block in blocks))
    runpy.run_path("page.py")
