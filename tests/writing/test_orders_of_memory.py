"""Arrays may lie in memory as they like, in Fortran's order, strided, broadcast: what is stored is the same."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from memmap_buffer import Field, ReplayBuffer, verify

ENVS, STEPS = 6, 5
FIELDS = {
    "observation": Field("float32", (4, 3), final=True),
    "wide": ("float64", (3, 700)),  # larger than a block
    "camera": Field("uint8", (4, 4), codec="zstd"),
    "reward": "float",
    "terminated": "bool",
}
META = {"goal": ("float", (4, 3))}
ORDERS = {
    "Fortran": np.asfortranarray,
    "transposed": lambda x: torch.from_numpy(np.ascontiguousarray(x.T)).permute(*range(x.ndim)[::-1]),
    "strided": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "reversed": lambda x: x[::-1].copy()[::-1],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
}
HOW = {
    "step": {"max_episodes": 40, "publish": "step", "spare_slots": 8},
    "episode": {"max_episodes": 40},
    "disk": {"max_episodes": 40, "stage": "disk", "spare_slots": 8},
    "capacity": {"capacity": 1000, "publish": "step"},
}


def random_steps(steps):
    """(T, B, *field) of each field: the rows after these of `observation` are the final ones."""
    rng = np.random.default_rng(3)
    lead = (steps, ENVS)
    return {
        "observation": rng.normal(size=(steps + 1, ENVS, 4, 3)).astype(np.float32),
        "wide": rng.normal(size=(*lead, 3, 700)),
        "camera": rng.integers(0, 255, (*lead, 4, 4), np.uint8),
        "reward": rng.normal(size=lead).astype(np.float32),
        "terminated": np.arange(steps)[:, None].repeat(ENVS, 1) == steps - 1,
        "goal": rng.normal(size=(ENVS, 4, 3)).astype(np.float32),
    }


def add(buffer, data, lay):
    for t in range(STEPS):
        step = {name: lay(data[name][t]) for name in FIELDS}
        buffer.add(**step, next_observation=lay(data["observation"][t + 1]), goal=lay(data["goal"]))


def extend(buffer, data, lay):
    steps = {name: lay(data[name][:STEPS]) for name in FIELDS}
    goal = np.broadcast_to(np.asarray(lay(data["goal"])), (STEPS, ENVS, 4, 3))
    buffer.extend(**steps, next_observation=lay(data["observation"][1:]), goal=goal)


def store_batch(buffer, data, lay):
    with buffer.batched_episode(ENVS, goal=lay(data["goal"])) as group:
        for t in range(STEPS):
            buffer.store_batch(**{name: lay(data[name][t]) for name in FIELDS})
        group.final(observation=lay(data["observation"][STEPS]))


def store_episode(buffer, data, lay):
    for i in range(ENVS):
        buffer.store_episode(**{name: lay(data[name][:, i]) for name in FIELDS}, goal=lay(data["goal"][i]))


def store(buffer, data, lay):
    for i in range(ENVS):
        with buffer.one_episode() as episode:
            episode["goal"] = lay(data["goal"][i])
            for t in range(STEPS):
                step = {name: data[name][t, i] for name in FIELDS}
                episode.store(**{name: lay(value) if np.ndim(value) else value for name, value in step.items()})
            episode.final(observation=lay(data["observation"][STEPS, i]))


def extend_an_episode(buffer, data, lay):
    for i in range(ENVS):
        with buffer.begin_episode() as episode:
            episode.extend(**{name: lay(data[name][:, i]) for name in FIELDS}, goal=lay(data["goal"][i]))


WAYS = (add, extend, store_batch, store_episode, store, extend_an_episode)


def contents(folder, how, way, lay):
    with ReplayBuffer(folder, max_timesteps=9, fields=FIELDS, meta_fields=META, **HOW[how]) as buffer:
        way(buffer, random_steps(STEPS), lay)
        buffer.end_episodes()
        buffer.flush()
        assert len(buffer) == ENVS
        return [buffer.episode(i) for i in range(ENVS)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("order", ORDERS)
def test_where_the_entries_lie_in_memory_does_not_matter(tmp_path, order, how, way):
    lay = ORDERS[order]
    found = contents(tmp_path / "a", how, way, lay)
    wanted = contents(tmp_path / "b", how, way, lambda x: np.array(np.asarray(lay(x)), order="C"))
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys() == {*FIELDS, "goal"}
        for name in one:
            assert_array_equal(one[name], other[name], err_msg=name)
    assert not verify(tmp_path / "a")
