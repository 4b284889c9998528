"""`RecordEpisodes` and `RecordVectorEpisodes`: what is published is what each environment would have done alone."""

import functools
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import Autoreset, TimeAwareObservation

from memmap_buffer import BufferFullError, Field, ReplayBuffer, SchemaError
from memmap_buffer.adapters import read_names
from memmap_buffer.interop.record import RecordEpisodes, RecordVectorEpisodes

LIMIT = 12  # steps, so that episodes end by it as well as by themselves


INFOS = {"goal": {"distance": "float64"}, "contacts": ("int", 2), "is_success": ("bool", (), False)}


class Probe(gymnasium.Env):
    """An environment of nested spaces and infos; with `reuse` it writes every image into the same array."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (2, 3), np.uint8),
            "pose": spaces.Tuple([spaces.Discrete(9, start=-3), spaces.Box(-9, 9, (2,), np.float64)]),
            "flags": spaces.MultiBinary(3),
            "word": spaces.Text(5),
        }
    )
    action_space = spaces.Dict({"gripper": spaces.Discrete(3), "arm": spaces.Box(-1, 1, (2,), np.float32)})

    def __init__(self, reuse=False):
        self._reuse = reuse
        self._pixels = np.zeros((2, 3), np.uint8)

    def _observe(self):
        self._pixels = self._pixels if self._reuse else np.zeros((2, 3), np.uint8)
        self._pixels[:] = self.np_random.integers(256, size=(2, 3))
        pose = (np.int64(self.np_random.integers(-3, 6)), self.np_random.uniform(-9, 9, 2))
        flags = self.np_random.integers(2, size=3).astype(np.int8)
        return {"camera": self._pixels, "pose": pose, "flags": flags, "word": "abcde"[: self.np_random.integers(5)]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._observe(), {"goal": {"distance": -1.0}}

    def step(self, action):
        self._t += 1
        reward = float(action["arm"].sum() + action["gripper"]) + self.np_random.normal()
        terminated = bool(self.np_random.random() < 0.15)
        info = {"goal": {"distance": self.np_random.normal()}, "contacts": np.arange(2) + self._t}
        if terminated:
            info["is_success"] = self._t > 3
        return self._observe(), reward, terminated, self._t == LIMIT, info


def make(name):
    """An environment of at most LIMIT steps."""
    if name == "Probe":
        return Probe()
    if name == "Probe, reusing":
        return Probe(reuse=True)
    if name == "TimeAware":
        return TimeAwareObservation(gymnasium.make("CartPole-v1", max_episode_steps=LIMIT), flatten=False)
    return gymnasium.make(name, max_episode_steps=LIMIT)


CLASSIC = ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0"]
TOYS = [  # the newest that the installed Gymnasium has
    max(each for each in gymnasium.registry if each.startswith(f"{name}-v"))
    for name in ("FrozenLake", "Taxi", "CliffWalking", "Blackjack")
]
MUJOCO = ["InvertedPendulum-v5", "Hopper-v5"]
NAMES = [*CLASSIC, *TOYS, *MUJOCO, "TimeAware", "Probe"]
every_environment = pytest.mark.parametrize("name", NAMES)
every_mode = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)


@dataclass(eq=False)
class Alone:
    """One episode as a plain loop over a plain environment saw it."""

    observations: list = field(default_factory=list)
    actions: list = field(default_factory=list)
    rewards: list = field(default_factory=list)
    terminated: list = field(default_factory=list)
    truncated: list = field(default_factory=list)
    infos: list = field(default_factory=list)
    seed: int = -1


def copied(value):
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {f"item{i}": copied(item) for i, item in enumerate(value)}
    return np.array(value)


def run_alone(name, seed, actions, *, skips_after_end):
    """The finished episodes of one environment that takes these actions; with `skips_after_end` one is lost at each."""
    env = make(name)
    episodes, current, skip = [], None, False
    for action in actions:
        if skip:
            skip = False
            continue
        if current is None:
            current = Alone(seed=seed if not episodes else -1)
            current.observations.append(copied(env.reset(seed=seed if not episodes else None)[0]))
        observation, reward, terminated, truncated, info = env.step(action)
        current.actions.append(copied(action))
        current.rewards.append(reward)
        current.terminated.append(terminated)
        current.truncated.append(truncated)
        current.infos.append(info)
        current.observations.append(copied(observation))
        if terminated or truncated:
            episodes.append(current)
            current, skip = None, skips_after_end
    env.close()
    return episodes


def stacked(values):
    """Dicts of arrays from a list of them."""
    if isinstance(values[0], dict):
        return {key: stacked([value[key] for value in values]) for key in values[0]}
    return np.stack(values)


def assert_equal_trees(got, expected):
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal_trees(got[key], value)
    else:
        np.testing.assert_array_equal(got, expected)


def assert_recorded(got, alone):
    """A published episode equals one that was run alone, to the bit, but that rewards are float32."""
    assert_equal_trees(got["observation"], stacked(alone.observations))
    assert_equal_trees(got["action"], stacked(alone.actions))
    np.testing.assert_array_equal(got["reward"], np.array(alone.rewards, np.float32))
    np.testing.assert_array_equal(got["terminated"], alone.terminated)
    np.testing.assert_array_equal(got["truncated"], alone.truncated)
    assert got["episode_length"] == len(alone.rewards)
    np.testing.assert_allclose(got["episode_return"], sum(map(float, alone.rewards)), rtol=1e-12, atol=1e-12)
    assert (int(got["seed"]), bool(got["given"]["seed"])) == (max(0, alone.seed), alone.seed >= 0)
    assert got["success"] == int(alone.infos[-1].get("is_success", -1))
    if "info" in got:
        info = {"goal": {"distance": -1.0}, "contacts": np.zeros(2, int), "is_success": False}
        assert_equal_trees(got["info"], stacked([copied(info | given) for given in alone.infos]))


def step_actions(name, count, num_envs, seed=7):
    """(count steps) x (num_envs) actions, each environment's own stream."""
    space = make(name).action_space
    space.seed(seed)
    return [[space.sample() for _ in range(num_envs)] for _ in range(count)]


def batched(space, actions):
    """Actions of several environments as Gymnasium batches them."""
    if isinstance(space, spaces.Dict):
        return {key: batched(sub, [action[key] for action in actions]) for key, sub in space.spaces.items()}
    return np.stack(actions)


# One environment


@pytest.mark.parametrize("name", [*NAMES, "Probe, reusing"])
def test_one_environment_is_recorded_as_it_runs_unwrapped(tmp_path, name):
    actions = [each[0] for each in step_actions(name, 60, 1)]
    recorder = RecordEpisodes(make(name), tmp_path / "b", max_episodes=60, max_timesteps=LIMIT)
    recorder.reset(seed=5)
    for action in actions:
        _, _, terminated, truncated, _ = recorder.step(action)
        if terminated or truncated:
            recorder.reset()
    recorder.close()
    expected = run_alone(name, 5, actions, skips_after_end=False)
    buffer = ReplayBuffer.from_folder(tmp_path / "b", read_only=True)
    assert len(buffer) == len(expected) > 0
    for i, alone in enumerate(expected):
        assert_recorded(buffer.episode(i), alone)


def test_what_the_caller_gets_is_what_the_environment_gave(tmp_path):
    plain, recorder = Probe(), RecordEpisodes(Probe(), tmp_path / "b", max_episodes=9, max_timesteps=LIMIT)
    assert_equal_trees(copied(recorder.reset(seed=1)[0]), copied(plain.reset(seed=1)[0]))
    for action in [each[0] for each in step_actions("Probe", 3, 1)]:
        got, expected = recorder.step(action), plain.step(action)
        assert_equal_trees(copied(got[0]), copied(expected[0]))
        assert got[1:4] == expected[1:4]
    recorder.close()


def test_the_autoreset_wrapper_inside_is_recorded_like_resets_by_hand(tmp_path):
    actions = [each[0] for each in step_actions("CartPole-v1", 80, 1)]
    with RecordEpisodes(Autoreset(make("CartPole-v1")), tmp_path / "b", max_episodes=60, max_timesteps=LIMIT) as env:
        env.reset(seed=5)
        for action in actions:
            env.step(action)
    expected = run_alone("CartPole-v1", 5, actions, skips_after_end=True)
    buffer = ReplayBuffer.from_folder(tmp_path / "b")
    assert len(buffer) == len(expected) > 3
    for i, alone in enumerate(expected):
        assert_recorded(buffer.episode(i), alone)


def test_the_selected_infos_are_recorded_at_their_steps(tmp_path):
    actions = [each[0] for each in step_actions("Probe", 60, 1)]
    recorder = RecordEpisodes(Probe(), tmp_path / "b", infos=INFOS, max_episodes=60, max_timesteps=LIMIT)
    recorder.reset(seed=5)
    for action in actions:
        if any(recorder.step(action)[2:4]):
            recorder.reset()
    expected = run_alone("Probe", 5, actions, skips_after_end=False)
    assert len(recorder.buffer) == len(expected) > 3
    for i, alone in enumerate(expected):
        assert_recorded(recorder.buffer.episode(i), alone)
    recorder.close()


def test_an_info_that_a_step_lacks_and_that_has_no_default_is_an_error(tmp_path):
    recorder = RecordEpisodes(Probe(), tmp_path / "b", infos={"lap": "int"}, max_episodes=9, max_timesteps=LIMIT)
    recorder.reset(seed=1)
    with pytest.raises(SchemaError, match=r"info\.lap.*no default"):
        recorder.step(step_actions("Probe", 1, 1)[0][0])
    recorder.close()


def test_an_exception_in_a_step_loses_the_open_episode_and_nothing_else(tmp_path):
    recorder = RecordEpisodes(make("CartPole-v1"), tmp_path / "b", max_episodes=9)
    recorder.reset(seed=3)
    while not any(recorder.step(0)[2:4]):
        pass
    recorder.reset()
    recorder.step(0)
    recorder.env.step, whole = interrupted, recorder.env.step
    with pytest.raises(KeyboardInterrupt, match="in the loop"):
        recorder.step(0)
    recorder.env.step = whole
    while not any(recorder.step(0)[2:4]):  # a caller who goes on gets no episode with a hole
        pass
    assert len(recorder.buffer) == 1
    recorder.reset(seed=3)
    while not any(recorder.step(0)[2:4]):
        pass
    recorder.close()
    first, second = map(ReplayBuffer.from_folder(tmp_path / "b").episode, range(2))
    assert_equal_trees(first, second)


LOOP = """
import sys, test_record
from memmap_buffer.interop.record import RecordEpisodes

with RecordEpisodes(test_record.make("CartPole-v1"), sys.argv[1], max_episodes=100_000) as env:
    env.reset(seed=5)
    while True:
        for action in (0, 1, 1):
            if any(env.step(action)[2:4]):
                print(len(env.buffer), flush=True)
                env.reset()
"""


def test_ctrl_c_in_the_loop_leaves_every_episode_that_had_ended(tmp_path):
    tests = Path(__file__).parent
    command = [sys.executable, "-c", LOOP, str(tmp_path / "b")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tests, text=True) as child:
        for _ in range(5):
            child.stdout.readline()
        child.send_signal(signal.SIGINT)
        told, error = child.stdout.read(), child.stderr.read()  # `communicate` would lose lines that are buffered
    assert error.rstrip().endswith("KeyboardInterrupt")
    buffer = ReplayBuffer.from_folder(tmp_path / "b", read_only=True)
    assert len(buffer) in (5 + told.count("\n"), 6 + told.count("\n"))  # it may stop between an end and its line
    expected = run_alone("CartPole-v1", 5, [0, 1, 1] * int(buffer.num_steps), skips_after_end=False)
    for i in range(len(buffer)):
        assert_recorded(buffer.episode(i), expected[i])


def interrupted(*_):
    raise KeyboardInterrupt("in the loop")


@pytest.mark.parametrize("keep", [False, True])
def test_an_episode_that_is_left_is_kept_only_on_request(tmp_path, keep):
    recorder = RecordEpisodes(make("CartPole-v1"), tmp_path / "b", keep_partial=keep, max_episodes=9)
    recorder.reset(seed=3)
    left = [recorder.step(t % 2)[0] for t in range(3)]
    recorder.reset(seed=4)
    recorder.step(0)
    recorder.close()
    buffer = ReplayBuffer.from_folder(tmp_path / "b")
    assert buffer.episode_lens.tolist() == [3, 1] * keep
    if keep:
        episode = buffer.episode(0)
        np.testing.assert_array_equal(episode["observation"][1:], left)
        assert (episode["seed"], episode["episode_return"], episode["terminated"].any()) == (3, 3, False)


def test_an_episode_longer_than_the_buffer_takes_becomes_several_that_lack_nothing(tmp_path):
    actions = [t % 2 for t in range(LIMIT)]
    (alone,) = run_alone("CartPole-v1", 3, actions, skips_after_end=False)
    with RecordEpisodes(make("CartPole-v1"), tmp_path / "b", max_episodes=9, max_timesteps=5) as recorder:
        recorder.reset(seed=3)
        for action in actions:
            recorder.step(action)
    pieces = [ReplayBuffer.from_folder(tmp_path / "b").episode(i) for i in range(3)]
    assert [piece["episode_length"] for piece in pieces] == [5, 5, 2]
    np.testing.assert_array_equal(np.concatenate([p["observation"][:-1] for p in pieces]), alone.observations[:-1])
    for piece, following in zip(
        pieces, [*(p["observation"][0] for p in pieces[1:]), alone.observations[-1]], strict=True
    ):
        np.testing.assert_array_equal(piece["observation"][-1], following)
    assert [piece["truncated"].sum() for piece in pieces] == [0, 0, 1]


class Endless(Probe):
    """A Probe that does not end; all but its fourth step say that they are a success."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, {**info, "success": self._t != 4}


def test_each_part_of_a_long_episode_is_a_success_where_its_last_info_says_so(tmp_path):
    with RecordEpisodes(Endless(), tmp_path, max_episodes=9, max_timesteps=2, keep_partial=True) as recorder:
        recorder.reset(seed=0)
        for _ in range(5):
            recorder.step(recorder.action_space.sample())
    parts = ReplayBuffer.from_folder(tmp_path).episodes(fields=())
    assert parts["success"].tolist() == [1, 0, -1]  # the last one was left


def test_a_buffer_that_is_open_already_is_given_what_it_declares_and_stays_open(tmp_path):
    fields = {"observation": ("float", 4), "action": "int", "mine": ("int", (), 7)}
    buffer = ReplayBuffer(tmp_path / "b", 9, LIMIT, fields, {"seed": "int", "task": "U8"})
    recorder = RecordEpisodes(make("CartPole-v1"), buffer, meta={"task": "balance"})
    recorder.reset(seed=3)
    while not any(recorder.step(0)[2:4]):
        pass
    recorder.meta["task"] = "again"
    recorder.reset()
    while not any(recorder.step(0)[2:4]):
        pass
    recorder.close()
    assert [(e["seed"], str(e["task"]), set(e["mine"])) for e in map(buffer.episode, range(2))] == [
        (3, "balance", {7}),
        (0, "again", {7}),
    ]
    assert len(buffer.episode(0)["observation"]) == buffer.episode_lens[0]
    buffer.store_episode(observation=np.zeros((1, 4)), action=[0])
    buffer.close()


def test_a_folder_is_continued_with_the_meta_fields_that_were_added(tmp_path):
    for task in ("push", "pull"):
        options = {"meta": {"task": task}, "max_episodes": 9}
        with RecordEpisodes(make("CartPole-v1"), tmp_path / "b", **options) as recorder:
            recorder.reset(seed=1)
            while not any(recorder.step(1)[2:4]):
                pass
    assert ReplayBuffer.from_folder(tmp_path / "b").get_all_data(meta_fields=["task"])["task"] == ["push", "pull"]


def test_what_cannot_be_recorded_is_refused_at_once(tmp_path):
    env = make("CartPole-v1")
    with pytest.raises(SchemaError, match="max_episodes: got None"):
        RecordEpisodes(env, tmp_path / "b")
    with pytest.raises(SchemaError, match=r"max_timesteps: got None, .*; pass max_timesteps="):
        RecordEpisodes(Probe(), tmp_path / "b", max_episodes=3)
    with ReplayBuffer(tmp_path / "b", 3, 5, {"observation": ("float", 4), "lidar": "float"}) as buffer:
        with pytest.raises(SchemaError, match="field 'lidar' of the buffer: the environment gives observation"):
            RecordEpisodes(env, buffer)
        with pytest.raises(SchemaError, match="max_episodes, infos: the buffer is open already"):
            RecordEpisodes(env, buffer, max_episodes=3, infos={"x": "int"})


def test_a_full_buffer_refuses_a_step_before_it_is_taken(tmp_path):
    recorder = RecordEpisodes(make("CartPole-v1"), tmp_path / "b", max_episodes=1)
    recorder.reset(seed=3)
    while not any(recorder.step(0)[2:4]):
        pass
    recorder.reset(seed=4)
    before = copied(recorder.unwrapped.state)
    with pytest.raises(BufferFullError, match="full"):
        recorder.step(0)
    np.testing.assert_array_equal(recorder.unwrapped.state, before)
    recorder.buffer.clear()
    while not any(recorder.step(0)[2:4]):
        pass
    assert recorder.buffer.episode(0)["seed"] == 4
    recorder.close()


class Kitchen(gymnasium.Env):
    """As FrankaKitchen: its goals have names with spaces; so have its infos."""

    GOALS = ("bottom burner", "bottom_burner", "kettle")
    observation_space = spaces.Dict({"goal": spaces.Dict({name: spaces.Box(-9, 9, (2,)) for name in GOALS})})
    action_space = spaces.Dict({"left arm": spaces.Box(-1, 1, (2,), np.float32)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        info = {"to do": {"how many?": 9 - self.t}}
        return self._observe(), 0.0, self.t == 3, False, info

    def _observe(self):
        return {"goal": {name: np.full(2, self.t + i, np.float32) for i, name in enumerate(self.GOALS)}}


def record_kitchen(folder, **options):
    infos = {"to do": {"how many?": "int"}}
    recorder = RecordEpisodes(Kitchen(), folder, infos=infos, max_episodes=9, max_timesteps=5, **options)
    recorder.reset()
    while not any(recorder.step({"left arm": np.full(2, 0.5, np.float32)})[2:4]):
        pass
    return recorder


def test_keys_that_are_no_identifiers_are_recorded_under_names_that_are(tmp_path):
    for count in (1, 2):  # the second time the folder is continued
        with record_kitchen(tmp_path / "b") as recorder:
            assert len(recorder.buffer) == count
    with ReplayBuffer.from_folder(tmp_path / "b") as buffer:
        for i in range(2):
            episode = buffer.episode(i)
            goal = episode["observation"]["goal"]
            assert {name: values[:, 0].tolist() for name, values in goal.items()} == {
                "bottom_burner_2": [0, 1, 2, 3],
                "bottom_burner": [1, 2, 3, 4],
                "kettle": [2, 3, 4, 5],
            }
            assert episode["action"]["left_arm"].tolist() == [[0.5, 0.5]] * 3
            assert episode["info"]["to_do"]["how_many_"].tolist() == [8, 7, 6]
        assert read_names(buffer).path("info.to_do.how_many_") == ["info", "to do", "how many?"]
        recorder = RecordEpisodes(Kitchen(), buffer)  # an open buffer is recorded to alike
        recorder.reset()
        recorder.step({"left arm": np.zeros(2, np.float32)})
        recorder.close()


def test_several_environments_record_keys_that_are_no_identifiers(tmp_path):
    env, infos = SyncVectorEnv([Kitchen] * 2), {"to do": {"how many?": "int"}}
    with RecordVectorEpisodes(env, tmp_path / "b", infos=infos, max_episodes=9, max_timesteps=5) as recorder:
        recorder.reset()
        for _ in range(3):
            recorder.step({"left arm": np.zeros((2, 2), np.float32)})
        for i in range(2):
            assert recorder.buffer.episode(i)["info"]["to_do"]["how_many_"].tolist() == [8, 7, 6]


def test_fields_and_meta_fields_are_declared_beside_those_that_are_recorded(tmp_path):
    more = {"fields": {"mine": ("int", (), 7)}, "meta_fields": {"task": "U8", "level": "int"}, "meta": {"task": "fry"}}
    with record_kitchen(tmp_path / "b", **more) as recorder:
        recorder.meta["level"] = 3
        recorder.reset(seed=4)
        while not any(recorder.step(recorder.action_space.sample())[2:4]):
            pass
        episode = recorder.buffer.episode(1)
    assert (str(episode["task"]), int(episode["level"]), int(episode["seed"])) == ("fry", 3, 4)
    assert episode["mine"].tolist() == [7, 7, 7]
    assert episode["info"]["to_do"]["how_many_"].tolist() == [8, 7, 6]


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_floating_point_observations_are_recorded_as_the_dtype_that_is_asked_for(tmp_path, dtype):
    spec = {"max_episodes": 4, "max_timesteps": 50, "dtype": dtype, "keep_partial": True}
    with RecordEpisodes(Probe(), tmp_path / "one", **spec) as one:
        seen, _ = one.reset(seed=1)
        one.step(one.action_space.sample())
    with RecordVectorEpisodes(SyncVectorEnv([Probe] * 2), tmp_path / "two", **spec) as two:
        two.reset(seed=1)
        two.step(two.action_space.sample())
    for folder in ("one", "two"):
        episode = ReplayBuffer.from_folder(tmp_path / folder, read_only=True).episode(0)
        pose, arm = episode["observation"]["pose"], episode["action"]["arm"]
        assert pose["item1"].dtype == (dtype or "float64") and arm.dtype == (dtype or "float32")
        assert np.array_equal(pose["item1"][0], seen["pose"][1].astype(dtype or "float64"))
        assert pose["item0"].dtype == "int64"


def test_a_seed_of_64_bits_is_kept_and_one_that_cannot_be_is_refused_before_the_reset(tmp_path):
    with record_kitchen(tmp_path / "b") as recorder:
        recorder.reset(seed=2**64 - 1)
        recorder.step(recorder.action_space.sample())
        with pytest.raises(SchemaError, match=r"seed: got 18446744073709551616.*declared uint64"):
            recorder.reset(seed=2**64)
        while not any(recorder.step(recorder.action_space.sample())[2:4]):
            pass
        assert int(recorder.buffer.episode(1)["seed"]) == 2**64 - 1
        batch = recorder.buffer.sample(4, timestep_level=True)
    assert set(batch["seed"].tolist()) <= {0, 2**64 - 1}


# Several environments


def run_vector(env, name, actions, seed, reset_mask):
    """Step a vector environment through the actions; with `reset_mask` it is reset by hand where episodes end."""
    env.reset(seed=seed)
    for each in actions:
        _, _, terminations, truncations, _ = env.step(batched(make(name).action_space, each))
        ends = np.logical_or(terminations, truncations)
        if reset_mask and ends.any():
            env.reset(options={"reset_mask": ends})


@every_mode
@every_environment
def test_several_environments_are_recorded_as_each_runs_alone(tmp_path, name, mode):
    record_several(SyncVectorEnv, tmp_path / "b", name, step_actions(name, 60, 3), mode)


@every_mode
@pytest.mark.parametrize("name", ["TimeAware", "Blackjack-v1", "Probe"])
def test_environments_in_processes_of_their_own_are_recorded_alike(tmp_path, name, mode):
    options = {"copy": False} if name != "Probe" else {"shared_memory": False}  # it garbles text, in 1.4.0
    record_several(AsyncVectorEnv, tmp_path / "b", name, step_actions(name, 40, 2), mode, **options)


def record_several(kind, folder, name, actions, mode, **options):
    env = kind([functools.partial(make, name)] * len(actions[0]), autoreset_mode=mode, **options)
    infos = INFOS if name == "Probe" else None
    recorder = RecordVectorEpisodes(env, folder, infos=infos, max_episodes=200, max_timesteps=LIMIT)
    run_vector(recorder, name, actions, 11, mode is AutoresetMode.DISABLED)
    recorder.close()
    check_alone(folder, name, actions, 11, mode)


@every_mode
def test_an_exception_in_a_step_of_several_loses_only_the_open_episodes(tmp_path, mode):
    actions = step_actions("Probe", 60, 3)
    env = SyncVectorEnv([functools.partial(make, "Probe")] * 3, autoreset_mode=mode)
    recorder = RecordVectorEpisodes(env, tmp_path / "b", infos=INFOS, max_episodes=200, max_timesteps=LIMIT)
    run_vector(recorder, "Probe", actions[:40], 11, mode is AutoresetMode.DISABLED)
    env.envs[1].unwrapped.step = interrupted
    with pytest.raises(KeyboardInterrupt, match="in the loop"):
        run_vector(recorder, "Probe", actions[40:], None, mode is AutoresetMode.DISABLED)
    check_alone(tmp_path / "b", "Probe", actions[:40], 11, mode)
    recorder.close()
    check_alone(tmp_path / "b", "Probe", actions[:40], 11, mode)


@every_mode
def test_several_environments_fill_a_buffer_to_the_last_episode(tmp_path, mode):
    name, actions = "CartPole-v1", step_actions("CartPole-v1", 200, 3)
    env = SyncVectorEnv([functools.partial(make, name)] * 3, autoreset_mode=mode)
    recorder = RecordVectorEpisodes(env, tmp_path / "b", max_episodes=7, max_timesteps=LIMIT)
    with pytest.raises(BufferFullError, match="full"):
        run_vector(recorder, name, actions, 11, mode is AutoresetMode.DISABLED)
    buffer = ReplayBuffer.from_folder(tmp_path / "b", read_only=True)
    assert len(buffer) == 7
    expected = alone_in(name, actions, 11, mode)
    assert all(any(is_recorded(buffer.episode(i), alone) for alone in expected) for i in range(7))
    recorder.close()


def test_a_vector_that_does_not_say_how_it_resets_is_refused(tmp_path):
    env = SyncVectorEnv([functools.partial(make, "CartPole-v1")])
    env.metadata = {}
    with pytest.raises(SchemaError, match=r"autoreset_mode: got None .*; pass autoreset_mode="):
        RecordVectorEpisodes(env, tmp_path / "b", max_episodes=7)
    env.close()


def alone_in(name, actions, seed, mode):
    skips = mode is AutoresetMode.NEXT_STEP
    streams = [[each[i] for each in actions] for i in range(len(actions[0]))]
    return [e for i, stream in enumerate(streams) for e in run_alone(name, seed + i, stream, skips_after_end=skips)]


def check_alone(folder, name, actions, seed, mode):
    expected = alone_in(name, actions, seed, mode)
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    assert len(buffer) == len(expected) >= len(actions[0])
    for i in range(len(buffer)):
        expected.remove(next(alone for alone in expected if is_recorded(buffer.episode(i), alone)))


def is_recorded(episode, alone):
    try:
        assert_recorded(episode, alone)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("truncated", ["timeout", "done"])
def test_the_flags_of_the_environment_go_into_the_fields_that_were_declared(tmp_path, truncated):
    fields = {"observation": Field("float32", 4, final=True), "done": "bool", "timeout": ("int8", 1, 0)}
    with ReplayBuffer(tmp_path, 9, 20, fields, terminated="done", truncated=truncated) as buffer:
        env = RecordEpisodes(gymnasium.make("CartPole-v1", max_episode_steps=12), buffer)
        for seed in range(3):
            env.reset(seed=seed)
            over = False
            while not over:
                *_, terminated, truncated, _ = env.step(1 if seed else seed % 2)
                over = terminated or truncated
        for i in range(len(buffer)):
            episode = buffer.episode(i)
            assert not episode["done"][:-1].any() and not episode["timeout"][:-1].any()
            assert episode["done"][-1] or episode["timeout"][-1, 0]
