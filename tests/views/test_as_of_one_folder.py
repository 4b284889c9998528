"""Eight folders read as one against one folder that holds the same episodes: every view, every kind of field and row.

The folders have other sizes than each other, some are packed. So each item is looked for in another file, at another
row, and both ways to copy are taken: by addresses, and folder by folder where rows are wide or compressed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inside import get_inside

from memmap_buffer import ConcatBuffer, Field, Hindsight, NStep, Offsets, ReplayBuffer, Trajectory, Window, pack

LONGEST = 12
FIELDS: dict[str, Any] = {
    "flag": ("bool", (3,)),
    "half": Field("float16", (5,), default=0.5),
    "brain": Field("bfloat16", (2,), final=True),
    "odd": ("uint8", (7,)),
    "wave": "complex128",
    "text": "U5",
    "wide": Field("int16", (get_inside("widest_address") // 2 + 1,), final=True),
    "widest": ("uint8", (get_inside("most_at") + 1,)),
    "coded": Field("int32", (6,), codec="zstd"),
    "list": ("float32", (None, 2)),
    "goal": ("float32", (2,)),
    "achieved": Field("float32", (2,), final=True),
    "reward": "float",
    "terminated": "bool",
    "truncated": "bool",
}
META = {"home": "int", "name": ("U3", (2,)), "share": "float64", "far": ("uint8", (get_inside("most_at") + 1,))}
SMALL = ("flag", "half", "brain", "odd", "wave", "text", "reward")


def distance(achieved, goal, info):
    return -np.abs(achieved - goal).sum(axis=-1).astype(np.float32)


def hindsight(strategy):
    return Hindsight(distance, goal="goal", achieved="achieved", strategy=strategy)


HOW: dict[str, dict[str, Any]] = {
    "episodes": {"return_mask": True},
    "episodes with final observations": {"view": Trajectory(final_observation=True)},
    "timesteps": {"timestep_level": True},
    "some timesteps": {"timestep_level": True, "filter_fields": {"reward": (0.0, None)}, "min_episode_len": 4},
    "transitions": {"n_steps": 1},
    "returns": {"n_steps": 3, "gamma": 0.9, "sequence_fields": ("odd", "wide", "brain")},
    "a timeline": {"n_steps": 2, "timeline": True, "filter_meta": {"home": {1, 2, 5}}},
    "stacks": {"n_steps": 2, "stack": {"odd": 3, "wide": 2, "coded": 2}, "padding": "edge"},
    "stacks of defaults": {"n_steps": 2, "stack": {"half": 4}, "padding": "default"},
    "windows": {"view": Window(5, pad_before=2, padding="edge")},
    "windows in front": {"view": Window(7, 2, pad_in_front=True)},
    "windows that fit": {"view": Window(4, boundary="drop")},
    "windows moved back": {
        "view": Window(6, boundary="shift", burn_in=2, start_fields="achieved"),
        "weight_by": "share",
    },
    "windows with returns": {"view": Window(4, boundary="repeat", n_steps=2, gamma=0.9)},
    "windows that run on": {"view": Window(9, fields=SMALL, boundary="continue", stream="home")},
    "crops": {"window_length": 4},
    "offsets": {"view": Offsets(odd=(-3, 0, 2), achieved=(0, 1), wide=(-1, 4), brain=range(-2, 3))},
    "offsets that exist": {"view": Offsets(half=range(3), text=(-1, 0), boundary="drop")},
    "later goals": {"n_steps": 2, "gamma": 0.9, "hindsight": hindsight("future")},
    "goals of others": {"view": NStep(1), "hindsight": hindsight("random")},
    "the best": {"timestep_level": True, "top_k": ("share", 6)},
}


def values_of(rng, field, count):
    shape = (count, *field.cell)
    if field.is_list:
        return [rng.random((int(rng.integers(4)), 2), np.float32) for _ in range(count)]
    if field.dtype == "bfloat16":
        return rng.integers(-99, 99, shape).astype(np.float32)
    if field.storage.kind == "U":
        return np.array(["", "a", "bcd", "\u03b3"])[rng.integers(0, 4, shape)]
    if field.storage.kind in "fc":
        return rng.normal(size=shape).astype(field.storage)
    return rng.integers(0, 2 if field.storage.kind == "b" else 100, shape).astype(field.storage)


def episode(rng, schema, home):
    """An episode of any length, with or without final observations, and with ends in its middle."""
    length, final = int(rng.integers(1, LONGEST + 1)), bool(rng.integers(2))
    out = {name: values_of(rng, field, length + (field.final and final)) for name, field in schema.fields.items()}
    out |= {name: values_of(rng, field, 1)[0] for name, field in schema.meta_fields.items()} | {"home": home}
    out["share"] = abs(out["share"])
    out["terminated"] = (np.arange(length) == length - 1) & bool(rng.integers(2))
    out["truncated"] = rng.random(length) < 0.1
    return out


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(eight folders as one, the one folder, (folder, serial) -> the serial there)."""
    place, rng = tmp_path_factory.mktemp("both"), np.random.default_rng(0)
    root = place / "root"
    root.mkdir()
    one, serials = ReplayBuffer(place / "one", 60, LONGEST + 8, FIELDS, META), {}
    for home in range(8):
        packed = home % 3 == 1
        shard = root / f"shard-{home:05}"
        folder = place / "grid" / shard.name if packed else shard
        with ReplayBuffer(folder, 6 + home, LONGEST + 8 - home, FIELDS, META, spare_slots=1 + home % 2) as buffer:
            for serial in range(0 if home == 3 else 2 + home % 5):
                serials[home, serial] = len(serials)
                content = episode(rng, buffer.schema, home)
                buffer.store_episode(**content)
                one.store_episode(**content)
        if packed:
            pack(folder, shard)
    one.close()
    return ConcatBuffer.from_root(root), one, serials


def assert_equal(got, expected, serials):
    """All but how items are named is equal, to the bit, and the names are of the same."""
    assert got.keys() == expected.keys()
    for key, values in got.items():
        want = expected[key]
        if key in ("_indices", "_index", "_goal"):
            named = [[-1, -1] if row[0] < 0 else [serials[row[0], row[1]], *row[2:]] for row in values.tolist()]
            assert named == want.reshape(len(want), -1).tolist(), key
        else:
            assert (values.dtype, values.shape) == (want.dtype, want.shape), key
            assert values.tobytes() == want.tobytes(), key


@pytest.mark.parametrize("how", HOW)
def test_eight_folders_are_read_as_one_that_holds_the_same(both, how):
    several, one, serials = both
    options = {**HOW[how], "return_indices": True, "format": "numpy"}
    if "weight_by" not in options and "window_length" not in options and "hindsight" not in options:
        assert_equal(several.batch(**options), one.batch(**options), serials)
    for seed, size in enumerate((1, 2, 5, 17, 64, 200)):
        assert_equal(several.sample(size, seed=seed, **options), one.sample(size, seed=seed, **options), serials)


@pytest.mark.parametrize("how", ["episodes", "returns", "stacks", "windows", "windows that run on", "offsets"])
def test_epochs_of_eight_folders_are_those_of_one(both, how):
    several, one, serials = both
    options = {**HOW[how], "return_indices": True, "shuffle": True, "seed": 3, "format": "numpy"}
    for got, expected in zip(several.dataloader(7, **options), one.dataloader(7, **options), strict=True):
        assert_equal(got, expected, serials)
