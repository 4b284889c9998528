"""Gymnasium's spaces as fields: what a space samples comes back as an element of it, alone and from vectors."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from memmap_buffer import Field, ReplayBuffer, Schema, SchemaError
from memmap_buffer.interop.gymnasium import decode_space, encode_space, schema_of

DISCRETE = spaces.Discrete(3, start=-1)
SPACES = {
    "box": spaces.Box(-2, 2, (2, 3), np.float64),
    "scalar box": spaces.Box(0, 1, ()),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "discrete": DISCRETE,
    "multi discrete": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multi binary": spaces.MultiBinary([2, 3]),
    "text": spaces.Text(7),
    "dict": spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Dict({"c": DISCRETE, "d": spaces.Text(3)})}),
    "tuple": spaces.Tuple((DISCRETE, spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.Text(4))))),
    "texts": spaces.Tuple((spaces.Text(2), spaces.Text(3))),
    "dict of tuples": spaces.Dict({"x": spaces.Tuple((DISCRETE, spaces.Dict({"y": spaces.MultiBinary(2)})))}),
}


def buffer_of(folder, space, action=DISCRETE):
    return ReplayBuffer(folder, 4, 8, schema_of(space, action))


def element(space, value):
    """What was read, as the space spells it."""
    if isinstance(space, spaces.Dict):
        return {key: element(member, value[key]) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(element(member, value[f"item{i}"]) for i, member in enumerate(space.spaces))
    if isinstance(space, spaces.Box):
        return np.asarray(value)  # `contains` warns of numpy's scalars
    return str(value) if isinstance(space, spaces.Text) else value


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return np.array_equal(a, b) and (isinstance(a, str) or np.asarray(a).dtype == np.asarray(b).dtype)


def row(data, t):
    return {key: row(value, t) for key, value in data.items()} if isinstance(data, dict) else data[t]


@pytest.mark.parametrize("encode", [True, False], ids=["encoded", "as it is"])
@pytest.mark.parametrize("name", SPACES)
def test_what_a_space_samples_comes_back_as_an_element_of_it(tmp_path, name, encode):
    space = SPACES[name]
    space.seed(0)
    values = [space.sample() for _ in range(4)]
    given = [encode_space(space, value) if encode else value for value in values]
    with buffer_of(tmp_path, space, space) as buffer:
        with buffer.one_episode() as episode:
            for value in given[:3]:
                episode.store(observation=value, action=value, reward=0.5, terminated=False, truncated=False)
            episode.final(observation=given[3])
        data = buffer.episode(0)
    for key, number in (("observation", 4), ("action", 3)):
        for t in range(number):
            got = element(space, row(data[key], t))
            assert space.contains(got) and same(got, values[t])


@pytest.mark.parametrize("name", SPACES)
def test_what_a_vector_samples_is_one_episode_each(tmp_path, name):
    space, count = SPACES[name], 3
    batched = batch_space(space, count)
    batched.seed(0)
    value = batched.sample()
    flags = {"reward": [0] * count, "terminated": [False] * count, "truncated": [False] * count}
    with buffer_of(tmp_path, space) as buffer:
        with buffer.batched_episode(count):
            buffer.store_batch(observation=encode_space(batched, value), action=[0] * count, **flags)
        for i, expected in enumerate(iterate(batched, value)):
            got = element(space, row(buffer.episode(i)["observation"], 0))
            assert same(got, expected if not isinstance(expected, np.ndarray) or expected.shape else expected[()])


def test_the_fields_are_those_of_a_timestep_and_the_observation_has_a_final_one():
    fields = Schema(schema_of(SPACES["tuple"], SPACES["image"])).fields
    assert list(fields) == [
        *("observation.item0", "observation.item1.item0", "observation.item1.item1"),
        *("action", "reward", "terminated", "truncated"),
    ]
    assert fields["action"] == Field("uint8", (4, 4, 3)) and fields["observation.item0"] == Field("int64", final=True)
    assert [name for name, field in fields.items() if field.final] == list(fields)[:3]


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Sequence(DISCRETE), "observation: got Sequence.*expected Box.*fixed size"),
        (spaces.Dict({"a": spaces.OneOf((DISCRETE, DISCRETE))}), "observation.a: got OneOf"),
    ],
)
def test_a_space_that_cannot_be_stored_is_refused_by_name(space, text):
    with pytest.raises(SchemaError, match=text):
        schema_of(space, DISCRETE)


def test_keys_that_are_no_identifiers_become_some_and_values_go_along_and_back():
    inner = spaces.Tuple([spaces.Dict({"a.b": DISCRETE})])
    space = spaces.Dict({"left-camera": DISCRETE, "left_camera": DISCRETE, "x": inner})
    value = {"left-camera": 1, "left_camera": 2, "x": ({"a.b": 3},)}
    encoded = encode_space(space, value)
    assert encoded == {"left_camera_2": 1, "left_camera": 2, "x": {"item0": {"a_b": 3}}}
    schema = Schema(schema_of(space, DISCRETE))
    assert schema.flatten({"observation": encoded}).keys() < schema.fields.keys()
    assert decode_space(space, encoded, lambda leaf: leaf) == value


def test_a_buffer_for_a_vector_records_what_its_environments_did(tmp_path):
    count = 3
    options = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}}
    envs = gymnasium.make_vec("CartPole-v1", count, **options)
    episodes = [[] for _ in range(count)]
    ended = []
    with ReplayBuffer.for_env(envs, tmp_path, max_episodes=50, fields={"log_prob": "float"}) as buffer:
        assert buffer.max_timesteps == 500
        observation, _ = envs.reset(seed=0)
        envs.action_space.seed(0)
        for t in range(60):
            action = envs.action_space.sample()
            following, reward, terminated, truncated, info = envs.step(action)
            last = following.copy()
            for i in np.flatnonzero(terminated | truncated):
                last[i] = info["final_obs"][i]
            step = {"observation": observation, "action": action, "reward": reward, "log_prob": np.full(count, t)}
            buffer.add(**step, terminated=terminated, truncated=truncated, next_observation=last)
            for i in range(count):
                episodes[i].append(observation[i].copy())
                if terminated[i] or truncated[i]:
                    ended.append([*episodes[i], last[i]])
                    episodes[i] = []
            observation = following
        assert len(ended) > 5
        for i, expected in enumerate(ended):
            got = buffer.episode(i)
            np.testing.assert_array_equal(got["observation"], np.array(expected))
            assert got["terminated"].tolist() == [False] * (len(expected) - 2) + [True]
    envs.close()


def test_a_buffer_for_an_environment_needs_a_time_limit_and_spaces(tmp_path):
    env = gymnasium.make("CartPole-v1").unwrapped
    with pytest.raises(SchemaError, match=r"max_timesteps: got None.*no time limit"):
        ReplayBuffer.for_env(env, tmp_path, max_episodes=2)
    with ReplayBuffer.for_env(env, tmp_path, max_episodes=2, max_timesteps=9, circular=True) as buffer:
        assert buffer.max_timesteps == 9 and buffer.circular
    with pytest.raises(SchemaError, match="env: got 3, expected a Gymnasium environment"):
        ReplayBuffer.for_env(3, tmp_path, max_episodes=2, max_timesteps=9)


def test_without_gymnasium_the_error_names_the_extra():
    code = "import sys; sys.modules['gymnasium'] = None\nimport memmap_buffer.interop.gymnasium"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "install it by: pip install 'memmap-buffer[gymnasium]'" in ran.stderr
