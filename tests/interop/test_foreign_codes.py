"""What the replay buffers of foreign training codes give, and what the calls that stand in their place give.

Each test plays CartPole and keeps its steps twice: as that code does, restated here from its definition in NumPy, and
in a folder. Then every item that its sampler can draw is compared with ours, array by array. Where the two differ, the
docstring says how. docs/trainers.md has a table of them ("Other codes").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from memmap_buffer import Field, Prioritized, ReplayBuffer, Window

GAMMA = 0.9
N = 3  # steps of an item, where there are several
TRANSITION = ("number", "observation", "action", "next_observation", "_return", "_discount")
SEGMENT = ("number", "observation", "action", "reward", "terminated", "truncated", "_mask")
Arrays = dict[str, np.ndarray]


class Upright(gymnasium.RewardWrapper):
    """Rewards that differ from step to step."""

    def reward(self, reward: Any) -> float:
        return float(np.cos(self.unwrapped.state[2]) + self.unwrapped.state[0])  # type: ignore[attr-defined]


def make_envs(count: int) -> SyncVectorEnv:
    """Of the episodes of a random policy some fall, and some come to the time limit."""
    make = [lambda: Upright(gymnasium.make("CartPole-v1", max_episode_steps=20))] * count
    return SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)


def play(envs: SyncVectorEnv, count: int) -> Arrays:
    """(T, B, …) transitions, numbered; `next_observation` is the one before any reset."""
    envs.action_space.seed(1)
    observation, _ = envs.reset(seed=1)
    steps = []
    for t in range(count):
        action = envs.action_space.sample()
        following, reward, terminated, truncated, infos = envs.step(action)
        ended, after = terminated | truncated, following.copy()
        if ended.any():
            after[ended] = np.stack(infos["final_obs"][ended])
        number = t * envs.num_envs + np.arange(envs.num_envs)
        step = {"number": number, "observation": observation, "action": action, "reward": reward.astype(np.float32)}
        steps.append(step | {"terminated": terminated, "truncated": truncated, "next_observation": after})
        observation = following
    played = together(steps)
    assert played["terminated"].any() and (played["truncated"] & ~played["terminated"]).any()
    return played


def record(folder: Path, envs: SyncVectorEnv, played: Arrays, **options: Any) -> ReplayBuffer:
    """A buffer that was given the steps one by one."""
    how = {"capacity": 10_000, "fields": {"number": "int", "reward": "float"}, **options}
    buffer = ReplayBuffer.for_env(envs, folder, **how)
    for t in range(len(played["number"])):
        buffer.add(**{name: values[t] for name, values in played.items()})
    return buffer


def together(items: Sequence[Mapping[str, Any]]) -> Arrays:
    return {name: np.stack([item[name] for item in items]) for name in items[0]}


def chosen(items: Arrays, which: np.ndarray) -> Arrays:
    return {name: values[which] for name, values in items.items()}


def in_order(items: Arrays) -> Arrays:
    return chosen(items, np.argsort(items["number"]))


def require_equal(found: Arrays, expected: Arrays, names: Sequence[str]) -> None:
    for name in names:
        assert found[name].shape == expected[name].shape, name
        assert np.allclose(found[name], expected[name], rtol=1e-6), name


def of_one(played: Arrays) -> Arrays:
    """(T, …) steps of the only environment."""
    return {name: values[:, 0] for name, values in played.items()}


def ends_of(steps: Arrays) -> np.ndarray:
    """Where the next episode begins."""
    return np.flatnonzero(steps["terminated"] | steps["truncated"]) + 1


def episodes_of(played: Arrays) -> list[Arrays]:
    """Those of the only environment that ended."""
    steps = of_one(played)
    return [chosen(steps, np.arange(*span)) for span in pairwise([0, *ends_of(steps)])]


def require_even_episodes(drawn: np.ndarray, steps: Arrays) -> None:
    """The numbers that were drawn are of each episode equally often."""
    _, counts = np.unique(np.searchsorted(ends_of(steps), drawn, side="right"), return_counts=True)
    assert len(counts) == len(ends_of(steps))
    assert np.allclose(counts / counts.mean(), 1, atol=0.15)


def as_fast_td3_ends(played: Arrays) -> Arrays:
    """Its `dones` are of both kinds, and a step that ended in both ways counts as a time limit."""
    return played | {"terminated": played["terminated"] & ~played["truncated"]}


def test_fast_td3(tmp_path: Path) -> None:
    """`SimpleReplayBuffer`: a ring for each environment, with the next observation of every step.

    Differs: the newest step of an environment can be drawn from its next `add` on, as what is seen next comes with it.
    """
    envs = make_envs(4)
    played = as_fast_td3_ends(play(envs, 150))
    kept = {name: values[-100:].reshape(-1, *values.shape[2:]) for name, values in played.items()}
    dones = kept["terminated"] | kept["truncated"]
    expected = kept | {"_return": kept["reward"], "_discount": GAMMA * (kept["truncated"] | ~dones)}

    buffer = record(tmp_path, envs, played, capacity=100 * 4)
    found = buffer.batch(n_steps=1, gamma=GAMMA, format="numpy")
    require_equal(in_order(found), chosen(expected, dones | (kept["number"] < 149 * 4)), TRANSITION)
    buffer.end_episodes()
    require_equal(in_order(buffer.batch(n_steps=1, gamma=GAMMA, format="numpy")), expected, TRANSITION)


@pytest.mark.parametrize("size", [150, 100], ids=["begun", "full"])
def test_fast_td3_of_several_steps(tmp_path: Path, size: int) -> None:
    """`SimpleReplayBuffer(n_steps=n)`: rewards until an end, and the next observation of the last of them.

    Differs: until its ring is full, theirs does not draw the newest n - 1 steps. Afterwards the newest step counts as a
    time limit there, but rewards and their number go on behind it, to the oldest steps of the ring: such a return has
    rewards of another episode. Ours has those that there are.
    """
    envs = make_envs(4)
    played = as_fast_td3_ends(play(envs, 150 if size < 150 else 149))
    count = len(played["number"])
    head = count % size
    ring = {name: np.roll(values[-size:], head, axis=0) for name, values in played.items()}
    length, full = len(ring["number"]), count >= size
    dones, truncated = ring["terminated"] | ring["truncated"], ring["truncated"].copy()
    if full:
        truncated[head - 1] = ~dones[head - 1]
    items = []
    for t in range(length if full else length - N + 1):
        for env in range(4):
            span = (t + np.arange(N)) % length
            rewarded = span[: np.append(np.flatnonzero(dones[span, env]), N - 1)[0] + 1]
            last = span[np.append(np.flatnonzero((dones | truncated)[span, env]), N - 1)[0]]
            item = {name: ring[name][t, env] for name in ("number", "observation", "action")}
            item["next_observation"] = ring["next_observation"][last, env]
            item["_return"] = ring["reward"][rewarded, env] @ GAMMA ** np.arange(len(rewarded))
            item["_discount"] = GAMMA ** len(rewarded) * (ring["truncated"][last, env] | ~dones[last, env])
            items.append(item | {"through_the_head": full and (head - 1) % length in rewarded[:-1]})
    expected = in_order(together(items))

    buffer = record(tmp_path, envs, played, capacity=size * 4)
    buffer.end_episodes()
    found = in_order(buffer.batch(n_steps=N, gamma=GAMMA, format="numpy"))
    drawn = np.isin(found["number"], expected["number"])
    assert drawn.all() if full else (found["number"][~drawn] >= 4 * (count - N + 1)).all()
    found, through = chosen(found, drawn), expected["through_the_head"]
    assert through.any() == full
    require_equal(chosen(found, ~through), chosen(expected, ~through), TRANSITION)
    require_equal(found, expected, ("number", "observation", "action", "next_observation"))
    assert (found["n_step_lens"][through] < N).all()


def as_dreamer_records(played: Arrays) -> Arrays:
    """(T, B, …) what is known before each action; the last record of an episode has no action."""
    streams = []
    for env in range(played["number"].shape[1]):
        records: list[Mapping[str, Any]] = []
        reward, first, none = np.float32(0), True, {"is_last": False, "is_terminal": False}
        for t in range(len(played["number"])):
            step = {name: values[t, env] for name, values in played.items()}
            shown = {"observation": step["observation"], "action": step["action"], "reward": reward, "is_first": first}
            records.append(shown | none)
            reward, first = step["reward"], bool(step["terminated"] | step["truncated"])
            if first:
                shown = {"observation": step["next_observation"], "action": 0, "reward": reward, "is_first": False}
                records.append(shown | {"is_last": True, "is_terminal": step["terminated"]})
                reward = np.float32(0)
        streams.append(records)
    count = min(map(len, streams))
    return together([together([records[t] for records in streams]) for t in range(count)])


@pytest.mark.parametrize("one_by_one", [False, True])
def test_dreamer_v3(tmp_path: Path, one_by_one: bool) -> None:
    """`embodied.Replay`: each run of `length` records of a worker, over the ends of episodes, the newest; `update`.

    Differs: its capacity counts items, and ours steps: of each worker `length` - 1 more.
    """
    workers, length, num_items = 3, 8, 90
    records = as_dreamer_records(play(make_envs(workers), 100))
    count = len(records["reward"])
    records["number"] = np.arange(count * workers).reshape(count, workers)

    fields = {"observation": ("float", 4), "action": "int", "reward": "float", "number": "int", "is_last": "bool"}
    buffer = ReplayBuffer(
        tmp_path,
        capacity=num_items + workers * (length - 1),
        max_timesteps=1000,
        fields=fields | {"is_terminal": "bool", "latent": ("float", 2, 0.0)},
        meta_fields={"worker": "int"},
        terminated="is_terminal",
        truncated="is_last",
        publish="step",
    )
    given = {name: values for name, values in records.items() if name != "is_first"}
    opened: dict[int, Any] = {}
    for t in range(count):
        if not one_by_one:
            buffer.add(**{name: values[t] for name, values in given.items()}, worker=np.arange(workers))
            continue
        for worker in range(workers):
            if worker not in opened:
                opened[worker] = buffer.begin_episode(worker=worker)
            opened[worker].store(**{name: values[t, worker] for name, values in given.items()})
            if given["is_last"][t, worker]:
                opened.pop(worker).publish()
    view = Window(length, boundary="continue", stream="worker", return_steps=True)

    starts = [(t, worker) for t in range(count - length + 1) for worker in range(workers)][-num_items:]
    expected = together([{name: v[t : t + length, worker] for name, v in records.items()} for t, worker in starts])
    expected["_is_first"] = expected["is_first"].copy()
    expected["_is_first"][:, 0] = True
    expected["_is_last"] = expected["is_last"] | np.pad(expected["_is_first"][:, 1:], [(0, 0), (0, 1)])
    found = buffer.batch(view=view, format="numpy")
    found = chosen(found, np.argsort(found["number"][:, 0]))
    require_equal(found, expected, [*fields, "is_terminal", "_is_first", "_is_last"])
    assert found["_is_last"][:, :-1].any() and found["_is_first"][:, 1:].any()

    rng, latents = np.random.default_rng(0), np.zeros((count * workers, 2), np.float32)
    for seed in range(3):  # `update`: where sequences overlap, the later one wins
        batch = buffer.sample(32, view=view, seed=seed, format="numpy")
        values = rng.random((32, length, 2), np.float32)
        for sequence, given in zip(batch["number"], values, strict=True):
            latents[sequence] = given
        assert buffer.write(batch["_steps"], latent=values) == 0
    found = buffer.batch(view=view, format="numpy")
    assert np.array_equal(found["latent"], latents[found["number"]])


def test_serl(tmp_path: Path) -> None:
    """`ReplayBuffer`: a ring of transitions; `masks` is 0 where nothing follows, `dones` true at either end.

    Differs: the newest step can be drawn from the next `add` on, as the next observation comes with it.
    """
    envs = make_envs(1)
    played = play(envs, 150)
    kept = chosen(of_one(played), np.arange(50, 150))
    expected = kept | {"_discount": 1.0 - kept["terminated"], "_return": kept["reward"]}
    buffer = record(tmp_path, envs, played, capacity=100)
    assert len(buffer.batch(n_steps=1)["action"]) == 99 + (kept["terminated"] | kept["truncated"])[-1]
    buffer.end_episodes()
    found = in_order(buffer.batch(n_steps=1, gamma=1.0, format="numpy"))
    require_equal(found, expected, [*TRANSITION, "terminated", "truncated"])


def test_serl_with_frames(tmp_path: Path) -> None:
    """`MemoryEfficientReplayBuffer`: frames lie once, and an item has those that the environment's wrapper stacked."""
    env = gymnasium.wrappers.FrameStackObservation(gymnasium.make("CartPole-v1", max_episode_steps=20), 4)
    env.action_space.seed(1)
    fields = {
        "observation": Field("float", 4, final=True),
        "reward": "float",
        "terminated": "bool",
        "truncated": "bool",
    }
    buffer = ReplayBuffer(tmp_path, capacity=1000, max_timesteps=100, fields=fields, publish="step")
    stacks = []
    observation, _ = env.reset(seed=1)
    for _ in range(100):
        after, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        step = {"reward": reward, "terminated": terminated, "truncated": truncated}
        buffer.add(observation=observation[-1], **step, next_observation=after[-1])
        stacks.append({"observation": observation, "next_observation": after})
        observation = env.reset()[0] if terminated or truncated else after
    buffer.end_episodes()
    found = buffer.batch(n_steps=1, stack={"observation": 4}, padding="edge", format="numpy")
    require_equal(found, together(stacks), ("observation", "next_observation"))


def test_cleanrl_rainbow(tmp_path: Path) -> None:
    """`PrioritizedReplayBuffer` of rainbow_atari.py: n steps behind each other, priorities, and weights of a batch.

    Both leave out the last n - 1 steps of an episode: `boundary="drop"`. Differs: theirs is never told of time limits,
    so it has items, too, whose rewards are summed across one, into the next episode.
    """
    envs = make_envs(1)
    played = play(envs, 200)
    steps = of_one(played)
    starts, waiting = [], []
    for t, done in enumerate(steps["terminated"]):
        waiting = [*waiting[-N + 1 :], t]
        if len(waiting) == N:
            starts.append(waiting[0])
            waiting = [] if done else waiting
    spans = np.array(starts)[:, None] + np.arange(N)
    crosses = (steps["truncated"] & ~steps["terminated"])[spans[:, :-1]].any(axis=1)
    done = steps["terminated"][spans].any(axis=1)
    expected = {name: steps[name][spans[:, 0]] for name in ("number", "observation", "action")}
    expected["next_observation"] = steps["next_observation"][spans[:, -1]]
    expected["_return"] = steps["reward"][spans] @ GAMMA ** np.arange(N)
    expected["_discount"] = GAMMA**N * (1.0 - done)
    assert crosses.any() and done.any()

    buffer = record(tmp_path, envs, played)
    how = {"n_steps": N, "gamma": GAMMA, "boundary": "drop", "format": "numpy"}
    found = in_order(buffer.batch(**how, return_indices=True))
    require_equal(found, chosen(expected, ~crosses), TRANSITION)

    errors = np.random.default_rng(0).gamma(1.0, 1.0, len(found["number"]))
    priorities = Prioritized(alpha=0.5, epsilon=1e-6, beta=0.4, normalize="batch")
    buffer.sample(1, prioritized=priorities, **how)
    buffer.update_priorities(found["_indices"], errors)
    batch = buffer.sample(64, prioritized=priorities, **how)
    p = (errors + 1e-6) ** 0.5
    chance = p[np.searchsorted(found["number"], batch["number"])] / p.sum()
    weights = (len(p) * chance) ** -0.4
    require_equal(
        batch, {"_probabilities": chance, "_weights": weights / weights.max()}, ("_probabilities", "_weights")
    )


def test_drq_v2(tmp_path: Path) -> None:
    """`ReplayBuffer`: an episode by chance, then a step with n steps from it on; discounts of dm_env.

    An episode that has not ended is not drawn from: `publish="episode"`.
    """
    envs = make_envs(1)
    played = play(envs, 200)
    played["discount"] = 1 - played["terminated"].astype(np.float32)
    items = []
    for episode in episodes_of(played):
        for t in range(len(episode["number"]) - N + 1):
            value, discount = np.float32(0), np.float32(1)
            for i in range(t, t + N):
                value += discount * episode["reward"][i]
                discount *= episode["discount"][i] * np.float32(GAMMA)
            item = {name: episode[name][t] for name in ("number", "observation", "action")}
            item["next_observation"] = episode["next_observation"][t + N - 1]
            items.append(item | {"_return": value, "_discount": discount})

    fields = {"number": "int", "reward": "float", "discount": "float"}
    buffer = record(tmp_path, envs, played, publish="episode", fields=fields)
    how = {"n_steps": N, "gamma": GAMMA, "discount": "discount", "boundary": "drop", "format": "numpy"}
    require_equal(in_order(buffer.batch(**how)), together(items), TRANSITION)
    drawn = buffer.sample(20_000, weight_by=lambda columns: 1 / columns["items"], seed=0, **how)
    require_even_episodes(drawn["number"], of_one(played))


def test_pfrl(tmp_path: Path) -> None:
    """`ReplayBuffer(num_steps=n)`, `batch_experiences`: n steps, or as many as there are before an episode's end.

    A batch has no item twice: `replacement=False`. Differs: of an episode that goes on theirs has no item of fewer than
    n steps, and ours has what is known so far; the newest observation comes with the next `add`, or the end.
    """
    envs = make_envs(2)
    played = play(envs, 150)
    items = []
    for env in range(2):
        steps = {name: values[:, env] for name, values in played.items()}
        for begin, end in pairwise([0, *ends_of(steps), 150]):
            open_one = end not in ends_of(steps)
            for t in range(begin, end - N + 1 if open_one else end):
                span = slice(t, min(t + N, end))
                reward = steps["reward"][span]
                item = {name: steps[name][t] for name in ("number", "observation", "action")}
                item["next_observation"] = steps["next_observation"][span][-1]
                item["_return"] = reward @ GAMMA ** np.arange(len(reward))
                item["_discount"] = GAMMA ** len(reward) * (1.0 - steps["terminated"][span].any())
                items.append(item)
    expected = in_order(together(items))

    buffer = record(tmp_path, envs, played)
    buffer.end_episodes()
    found = in_order(buffer.batch(n_steps=N, gamma=GAMMA, format="numpy"))
    common = np.isin(found["number"], expected["number"])
    require_equal(chosen(found, common), expected, TRANSITION)
    assert 0 < (~common).sum() <= 2 * (N - 1)
    assert (found["n_step_lens"][~common] < N).all()
    drawn = buffer.sample(100, n_steps=N, replacement=False, format="numpy")["number"]
    assert len(set(drawn.tolist())) == 100


def segment(episode: Arrays, start: int, stop: int) -> Arrays:
    """Rows from start to stop, zeros where there are none, and which there are."""
    there = np.arange(start, stop)
    mask = (there >= 0) & (there < len(episode["number"]))
    cut = chosen(episode, there.clip(0, len(episode["number"]) - 1))
    for values in cut.values():
        values[~mask] = 0
    return cut | {"_mask": mask}


@pytest.mark.parametrize("from_start", [True, False])
def test_iris(tmp_path: Path, from_start: bool) -> None:
    """`EpisodesDataset.sample_batch`: an episode by chance, then any step of it as the first of a segment, or the last.

    Its `ends` is `terminated | truncated`. Its data set has the steps of open episodes, too: `publish="step"`.
    """
    length = 6
    envs = make_envs(1)
    played = play(envs, 150)
    expected = []
    for episode in episodes_of(played):
        count = len(episode["number"])
        starts = range(count) if from_start else range(1 - length, count - length + 1)
        expected += [segment(episode, start, start + length) for start in starts]
    view = Window(length) if from_start else Window(length, pad_before=length - 1, pad_after=0)
    buffer = record(tmp_path, envs, played, publish="episode")
    require_equal(buffer.batch(view=view, format="numpy"), together(expected), SEGMENT)
    drawn = buffer.sample(20_000, view=view, weight_by=lambda columns: 1 / columns["items"], seed=0, format="numpy")
    require_even_episodes(drawn["number"].max(axis=1), of_one(played))


@pytest.mark.parametrize("beyond", [True, False])
def test_diamond(tmp_path: Path, beyond: bool) -> None:
    """`BatchSampler` and `make_segment`: a step by chance, and a segment that has it at any of its places.

    So segments at the borders of an episode are less likely than others, where windows are drawn alike: here steps are
    drawn, too, and the windows are named by them.
    """
    length = 5
    envs = make_envs(1)
    played = play(envs, 150)
    episodes = episodes_of(played)
    buffer = record(tmp_path, envs, played, publish="episode")
    steps = buffer.sample(500, timestep_level=True, return_indices=True, seed=0, format="numpy")["_indices"]
    behind = np.random.default_rng(0).integers(length, size=500)
    starts = steps[:, 1] - behind
    if not beyond:
        starts = np.minimum(buffer.episode_lens[steps[:, 0]] - length, steps[:, 1] + 1 + behind - length)
    view = Window(length, pad_before=length - 1)
    found = buffer.batch(np.stack([steps[:, 0], starts], 1), view=view, format="numpy")
    cut = [segment(episodes[i], start, start + length) for i, start in zip(steps[:, 0], starts, strict=True)]
    require_equal(found, together(cut), SEGMENT)


def test_muzero_general(tmp_path: Path) -> None:
    """`ReplayBuffer.get_batch`: targets of positions behind each other, values of `td` steps; `update_game_history`.

    A position has the action and the reward before it; nothing follows the limit of moves. Differs: behind the end of a
    game theirs has random actions and even policies, ours zeros.
    """
    unroll, td = 4, 3
    envs = make_envs(1)
    played = play(envs, 150)
    rng = np.random.default_rng(0)
    played["done"] = played["terminated"] | played["truncated"]
    played["root_value"] = rng.random((150, 1), np.float32)
    played["visits"] = rng.dirichlet([1, 1], (150, 1)).astype(np.float32)
    fields = {"number": "int", "reward": "float", "done": "bool", "root_value": "float", "visits": ("float", 2)}
    ends = {"terminated": "done", "truncated": None}
    buffer = record(tmp_path, envs, played, publish="episode", fields=fields, **ends)
    length = 1 + unroll + 1 + td  # the position before, and those behind whose values are looked up
    view = Window(length, pad_before=1, pad_after=length - 2, n_steps=td, gamma=GAMMA)

    for reanalysed in (False, True):
        if reanalysed:
            played["root_value"] = rng.random((150, 1), np.float32)
            steps = buffer.batch(timestep_level=True, return_indices=True, format="numpy")
            assert buffer.write(steps["_indices"], root_value=played["root_value"][steps["number"], 0]) == 0
        expected = [
            together([muzero_target(game, position + i, td) for i in range(unroll + 1)])
            for game in episodes_of(played)
            for position in range(len(game["number"]))
        ]
        found = buffer.batch(view=view, format="numpy")
        here, before = slice(1, unroll + 2), slice(unroll + 1)
        value = found["_return"][:, here] + found["_discount"][:, here] * found["root_value"][:, 1 + td :]
        targets = {"value": value, "visits": found["visits"][:, here]}
        targets |= {"reward": found["reward"][:, before], "action": found["action"][:, before]}
        require_equal(targets, together(expected), ("value", "visits", "reward", "action"))


def muzero_target(game: Arrays, t: int, td: int) -> Mapping[str, Any]:
    rewards, actions, count = np.append(0, game["reward"]), np.append(0, game["action"]), len(game["number"])
    ahead = rewards[t + 1 : t + td + 1]
    return {
        "value": ahead @ GAMMA ** np.arange(len(ahead))
        + (GAMMA**td * game["root_value"][t + td] if t + td < count else 0),
        "reward": rewards[t] if t <= count else 0,
        "action": actions[t] if t <= count else 0,
        "visits": game["visits"][t] if t < count else np.zeros(2),
    }
