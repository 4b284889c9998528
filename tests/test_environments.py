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
from memmap_buffer.adapters import decode_space, encode_space, schema_of

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


def test_a_codec_is_that_of_the_observations_that_are_images_alone():
    members = {"image": SPACES["image"], "bytes": spaces.Box(0, 255, (9,), np.uint8), "state": SPACES["box"]}
    fields = Schema(schema_of(spaces.Dict(members), SPACES["image"], "zstd")).fields
    assert {name for name, field in fields.items() if field.codec is not None} == {"observation.image"}
    assert fields["observation.image"] == Field("uint8", (4, 4, 3), final=True, codec="zstd")


def test_a_dtype_is_that_of_floating_point_observations_and_actions_alone():
    double = spaces.Box(-1, 1, (3,), np.float64)
    observation = spaces.Dict({"image": SPACES["image"], "state": double, "part": spaces.Tuple((double, DISCRETE))})
    for dtype in ("float32", np.float32, "bfloat16"):
        fields = Schema(schema_of(observation, double, dtype=dtype)).fields
        changed = {name for name, field in fields.items() if field.dtype == Field(dtype).dtype}
        assert changed - {"reward"} == {"observation.state", "observation.part.item0", "action"}
        assert fields["observation.image"].dtype == "uint8" and fields["observation.state"].final
    assert Schema(schema_of(observation, double)).fields["action"] == Field("float64", 3)
    with pytest.raises(SchemaError, match="dtype: got 'uint8', expected one of float16, bfloat16, float32, float64"):
        schema_of(observation, double, dtype="uint8")


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
    code = "import sys; sys.modules['gymnasium'] = None\nimport memmap_buffer.environments"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "install it by: pip install 'memmap-buffer[gymnasium]'" in ran.stderr


# Environments that reset themselves, by `add`


class Counting(gymnasium.Env):
    """Observations tell (environment, episode, t); episodes of 2, 4, 3, … steps terminate and are truncated in turn."""

    observation_space = spaces.Box(-1, 1000, (3,), np.float64)
    action_space = spaces.Discrete(1000)

    def __init__(self, number):
        self.number, self.episode = number, -1

    def observe(self):
        return np.array([self.number, self.episode, self.t], np.float64)

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        over = self.t == 2 + (self.number + 2 * self.episode) % 3
        return self.observe(), float(action), over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}


def by_hand(number, count):
    """(observation, action, reward, terminated, truncated, next observation) of the first transitions of one."""
    env, out = Counting(number), []
    observation, _ = env.reset()
    while len(out) < count:
        following, reward, *ends, _ = env.step(7)
        out.append((*observation, 7, reward, *ends, *following))
        observation = env.reset()[0] if any(ends) else following
    return out


def stored(buffer):
    """The same of what is in a buffer, by environment."""
    out = {}
    for i in range(len(buffer)):
        episode = buffer.episode(i)
        seen = episode["observation"]
        assert len(seen) == len(episode["reward"]) + 1
        columns = (*seen[:-1].T, *(episode[k] for k in ("action", "reward", "terminated", "truncated")), *seen[1:].T)
        out.setdefault(int(seen[0, 0]), []).extend(zip(*(column.tolist() for column in columns), strict=True))
    return out


def run(envs, add, steps=40):
    """Step as code does that knows nothing of resets, but for what each mode asks of it."""
    mode = envs.metadata["autoreset_mode"]
    observations, _ = envs.reset()
    for _ in range(steps):
        actions = np.full(envs.num_envs, 7)
        following, rewards, terminated, truncated, infos = envs.step(actions)
        ended = terminated | truncated
        last = following.copy()
        if mode is AutoresetMode.SAME_STEP and ended.any():
            last[ended] = np.stack(infos["final_obs"][ended])
        step = {"observation": observations, "action": actions, "reward": rewards}
        add(**step, terminated=terminated, truncated=truncated, next_observation=last)
        observations = following
        if mode is AutoresetMode.DISABLED and ended.any():
            observations, _ = envs.reset(options={"reset_mask": ended})


HOW = {"ram": {}, "disk": {"stage": "disk", "spare_slots": 3}, "step": {"publish": "step", "spare_slots": 3}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_added_steps_of_a_vector_are_those_of_each_environment_alone(tmp_path, mode, how):
    envs = gymnasium.vector.SyncVectorEnv([lambda i=i: Counting(i) for i in range(3)], autoreset_mode=mode)
    with ReplayBuffer.for_env(envs, tmp_path, max_episodes=200, max_timesteps=3, **HOW[how]) as buffer:
        run(envs, buffer.add)
        buffer.end_episodes()
        got = stored(buffer)
    assert sorted(got) == [0, 1, 2]
    for number, transitions in got.items():
        wanted = by_hand(number, 40)
        if mode is AutoresetMode.NEXT_STEP:  # which spends a step on each reset
            ended = np.array([row[5] or row[6] for row in wanted])
            calls = np.arange(1, 41) + np.cumsum(ended) - ended
            wanted = wanted[: np.count_nonzero(calls <= 40)]
        assert transitions == wanted


def test_extended_and_collected_steps_are_too(tmp_path):
    envs = gymnasium.vector.SyncVectorEnv([lambda i=i: Counting(i) for i in range(3)])
    options = {"max_episodes": 200, "max_timesteps": 20}
    with ReplayBuffer.for_env(envs, tmp_path / "a", **options) as buffer:
        steps = []
        run(envs, lambda **step: steps.append(step))
        for chunk in (steps[:1], steps[1:17], steps[17:]):
            buffer.extend(**{name: np.stack([step[name] for step in chunk]) for name in steps[0]})
        buffer.end_episodes()
        got = stored(buffer)
    with ReplayBuffer.for_env(envs, tmp_path / "b", **options) as buffer:
        collector = buffer.create_collector(3)
        for t, step in enumerate(steps):
            collector.append(**step)
            if t % 6 == 5:
                collector.store()
        collector.store()
        assert stored(buffer) == got
    assert got == {number: by_hand(number, len(rows)) for number, rows in got.items()}


def test_a_single_environment_that_resets_itself_is_known_too(tmp_path):
    env = gymnasium.wrappers.Autoreset(Counting(0))
    with ReplayBuffer.for_env(env, tmp_path, max_episodes=20, max_timesteps=20) as buffer:
        observation, _ = env.reset()
        for _ in range(20):
            following, reward, terminated, truncated, _ = env.step(7)
            step = {"observation": observation, "action": 7, "reward": reward}
            buffer.add(**step, terminated=terminated, truncated=truncated, next_observation=following)
            observation = following
        buffer.end_episodes()
        got = stored(buffer)[0]
    assert got == by_hand(0, len(got)) and len(got) < 20


# The time limit


@pytest.mark.parametrize("vector", [gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv])
def test_the_time_limit_of_a_vector_is_the_longest_among_its_environments(tmp_path, vector):
    def limited(number, limit):
        return lambda: gymnasium.wrappers.TimeLimit(Counting(number), limit)

    envs = vector([limited(0, 12), limited(1, 30)])
    with ReplayBuffer.for_env(envs, tmp_path / "a", max_episodes=2) as buffer:
        assert buffer.max_timesteps == 30
    envs.close()
    envs = vector([limited(0, 12), lambda: Counting(1)])
    with pytest.raises(SchemaError, match="max_timesteps: got None, and the environment has no time limit"):
        ReplayBuffer.for_env(envs, tmp_path / "b", max_episodes=2)
    envs.close()


def test_the_time_limit_that_an_environment_was_registered_with_is_found_in_a_vector(tmp_path):
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    assert ReplayBuffer.for_env(envs, tmp_path / "a", max_episodes=2).max_timesteps == 500
    env = gymnasium.wrappers.TimeLimit(Counting(0), 9)  # registered nowhere
    assert ReplayBuffer.for_env(env, tmp_path / "b", max_episodes=2).max_timesteps == 9
