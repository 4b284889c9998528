"""How many Python functions a batch passes through, and how often its way moves from one file to another."""

from itertools import pairwise

import numpy as np
import pytest
from inside import expect_no_slow_disk
from ways import way_of

from memmap_buffer import Field, ReplayBuffer

OPTIONS = {
    "timesteps": {"timestep_level": True},
    "n-step": {"n_steps": 3, "gamma": 0.99},
    "one-step": {"n_steps": 1, "gamma": 0.99},
}


@pytest.fixture
def buffer(tmp_path):
    observation = Field("float32", (17,), final=True)
    fields = {"observation": observation, "action": ("float", 6), "reward": "float", "terminated": "bool"}
    with ReplayBuffer(tmp_path, 5, 100, fields, publish="step") as buffer:
        for _ in range(4):
            steps = {name: np.zeros((100, *shape), "f4") for name, shape in {"action": (6,), "reward": ()}.items()}
            buffer.store_episode(observation=np.zeros((101, 17), "f4"), terminated=np.zeros(100, bool), **steps)
        yield buffer


def require_short(way, what, most_calls, most_moves):
    moves = sum(before != after for (before, _), (after, _) in pairwise(way.functions))
    assert len(way.functions) <= most_calls, f"{what}: {way}"
    assert moves <= most_moves, f"{what}: {way}"


@pytest.mark.parametrize(("name", "most_calls", "most_moves"), [("timesteps", 49, 24), ("n-step", 70, 32)])
def test_a_batch_passes_few_functions_and_its_way_seldom_leaves_a_file(buffer, name, most_calls, most_moves):
    for _ in range(3):  # then every map is open, and the disk is known not to be slow
        buffer.sample(256, seed=1, **OPTIONS[name])
    way = way_of(lambda: buffer.sample(256, seed=1, **OPTIONS[name]))
    require_short(way, name, most_calls, most_moves)


@pytest.mark.parametrize(
    ("name", "most_calls", "most_moves"), [("timesteps", 51, 30), ("n-step", 72, 37), ("one-step", 55, 36)]
)
def test_after_one_appended_step_a_batch_looks_at_one_episode_anew(buffer, name, most_calls, most_moves):
    with buffer.one_episode() as episode:
        for _ in range(4):
            episode.store(observation=np.zeros(17), action=np.zeros(6), reward=0.0, terminated=False)
            expect_no_slow_disk(buffer)
            way = way_of(lambda: buffer.sample(256, **OPTIONS[name]))
        require_short(way, f"{name} after a step", most_calls, most_moves)
