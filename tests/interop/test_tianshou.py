"""The recipe of the page for Tianshou keeps what a collector plays, and fills a buffer of a later run with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("tianshou", reason="tianshou is not installed")
from pages import run_blocks
from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import Batch, VectorReplayBuffer
from tianshou.env import DummyVectorEnv

from memmap_buffer import ReplayBuffer

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


class Drawn(Policy):
    """Actions by chance."""

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        return Batch(act=np.array([self.action_space.sample() for _ in range(len(batch.obs))]))


def test_the_block_of_the_page_runs(tmp_path: Path) -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = (section for section in sections if section.startswith("Tianshou\n"))
    env = gymnasium.make("CartPole-v1")
    disk = ReplayBuffer.for_env(env, tmp_path / "tianshou", capacity=100_000)
    buffer, policy = VectorReplayBuffer(1000, 2), Drawn(action_space=env.action_space)
    envs = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(2)])
    names = {"policy": policy, "envs": envs, "buffer": buffer, "disk": disk}
    parts = text.split("# in a later run\n")
    (tmp_path / "now.md").write_text(parts[0].replace("```py\n", "```python\n") + "```\n")
    (tmp_path / "later.md").write_text("```python\n" + parts[1])
    run_blocks(tmp_path / "now.md", names)
    names["collector"].reset()
    names["collector"].collect(n_episode=3)
    assert disk.num_episodes == 3
    run_blocks(tmp_path / "later.md", names)
    filled = names["filled"]
    assert len(filled) == disk.num_steps == len(buffer)
    episode = disk.episode(0)
    np.testing.assert_array_equal(filled.obs[: len(episode["reward"])], episode["observation"][:-1])
    np.testing.assert_array_equal(filled.obs_next[: len(episode["reward"])], episode["observation"][1:])
