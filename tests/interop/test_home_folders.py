"""`~` in the paths of importers, exporters and recorders, as in every other path."""

import importlib

import gymnasium
import numpy as np
import pytest

from memmap_buffer import Field, MemmapBufferError, ReplayBuffer
from memmap_buffer.interop.record import RecordEpisodes

FIELDS = {
    "observation": Field("float", (2,), final=True),
    "action": ("float", 1),
    "reward": "float",
    "terminated": "bool",
    "truncated": "bool",
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder; the working directory is an empty folder beside it, and stays empty."""
    for name in ("home", "now"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "now")
    yield tmp_path / "home"
    assert list((tmp_path / "now").iterdir()) == []


def functions(name):
    module = importlib.import_module(f"memmap_buffer.interop.{name}")
    return getattr(module, f"import_{name}", None), getattr(module, f"export_{name}", None)


@pytest.mark.parametrize("name", ["d4rl", "ogbench", "robomimic", "lerobot", "parquet"])
def test_a_data_set_is_written_to_the_home_folder_and_read_from_there(home, name):
    import_, export = functions(name)
    with ReplayBuffer("~/b", 2, 3, FIELDS) as buffer:
        ends = {"terminated": [0, 0], "truncated": [0, 1]}
        buffer.store_episode(observation=np.eye(3, 2), action=np.zeros((2, 1)), reward=[0, 1], **ends)
        export(buffer, "~/data", **({"fps": 10} if name == "lerobot" else {}))
    assert (home / "data").exists()
    if import_ is not None:
        with import_("~/data", "~/c") as again:
            assert (again.folder, again.num_steps) == (home / "c", 2)


@pytest.mark.parametrize("name", ["torchrl", "memmap_replay_buffer"])
def test_a_source_that_is_missing_in_the_home_folder_is_named_there(home, name):
    with pytest.raises(MemmapBufferError, match=f"{home}/data.*it is no "):
        functions(name)[0]("~/data", "~/c")


def test_a_minari_data_set_is_read_from_the_home_folder(home, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(home))
    import_, export = functions("minari")
    with RecordEpisodes(gymnasium.make("CartPole-v1", max_episode_steps=3), "~/b", max_episodes=2) as env:
        env.reset(seed=1)
        while not any(env.step(1)[2:4]):
            pass
        assert env.buffer.folder == home / "b"
        export(env.buffer, "cart-v0", env=env)
    with import_("~/cart-v0/data", "~/c") as again:
        assert (again.folder, again.num_steps) == (home / "c", 3)
