"""The loop of online learning: add a step of E environments, then draw 256 transitions, again and again.

Each contender does both in one round, and what counts is the time of its thread. The bound only gathers, of arrays in
memory: five takes of 256 rows; of frames, the rows of two stacks. Stacks of frames are drawn by priority, and get new
priorities in the same round; each frame is added and stored once.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from bench.data import Arrays, Run
from bench.frames import ALPHA, BETA, EPISODE, GAMMA, SIDE, STACK, Frames, N, errors_of
from bench.measure import BOUND, OURS, Call, Goal, Row, finish
from bench.peers import Checked, StableBaselines, contenders
from memmap_buffer import Field, Prioritized, ReplayBuffer
from memmap_buffer.loading.options import Options

LENGTH, BATCH = 1000, 256
CAPACITY = 32 * LENGTH  # with 64 open episodes it is still less than a hundred episodes
GOALS = {1: 1.1, 8: 1.5, 64: 3.0}  # environments -> time over that of Stable-Baselines3
NEEDED = {"current_fields": ("observation", "action"), "next_fields": ("observation",)}  # with _return and _discount
MAX_EPISODES = (10**2, 10**4, 10**6)
FIELDS = {
    "observation": Field("float32", (17,), final=True),
    "action": ("float", 6),
    "reward": "float",
    "terminated": "bool",
    "truncated": "bool",
}
FRAME_NUM_ENVS, FRAME_BATCHES = (1, 8), (32, 256)
FRAME_FIELDS = {
    "observation": Field("uint8", (SIDE, SIDE), final=True),
    "action": "int",
    "reward": "float",
    "terminated": "bool",
    "truncated": "bool",
}
BY_PRIORITY: Options = {
    "n_steps": N,
    "gamma": GAMMA,
    "stack": {"observation": STACK},
    "padding": "edge",
    "current_fields": ("observation", "action"),
    "next_fields": ("observation",),
    "prioritized": Prioritized(alpha=ALPHA, beta=BETA),
}


@dataclass(frozen=True)
class Loop:
    """What the environments do, from their first step on. The first number of an observation counts them.

    Args: num_envs: how many run side by side. rounds: so many steps are known after those that fill a buffer.
    """

    num_envs: int
    rounds: int

    @cached_property
    def steps(self) -> list[Arrays]:
        """The steps after the fill: field -> (num_envs, *field)."""
        return [self.step(t) for t in range(CAPACITY, CAPACITY + self.rounds)]

    def step(self, t: int) -> Arrays:
        rng, each = np.random.default_rng(t), np.arange(self.num_envs)
        return {
            "observation": self._observations(rng, t),
            "action": rng.standard_normal((self.num_envs, 6), np.float32),
            "reward": np.full(self.num_envs, t, np.float32),
            "terminated": (t + each * LENGTH // self.num_envs) % LENGTH == LENGTH - 1,
            "truncated": np.zeros(self.num_envs, np.bool_),
            "next_observation": self._observations(rng, t + 1),
        }

    def _observations(self, rng: np.random.Generator, t: int) -> np.ndarray:
        found = rng.standard_normal((self.num_envs, 17), np.float32)
        found[:, 0] = t
        return found

    @cached_property
    def filling(self) -> Arrays:
        """CAPACITY transitions, episode by episode: field -> (CAPACITY, *field)."""
        rng, t = np.random.default_rng(0), np.arange(CAPACITY)
        found = {
            "observation": rng.standard_normal((CAPACITY, 17), np.float32),
            "action": rng.standard_normal((CAPACITY, 6), np.float32),
            "reward": t.astype(np.float32),
            "terminated": t % LENGTH == LENGTH - 1,
            "truncated": np.zeros(CAPACITY, np.bool_),
        }
        found["observation"][:, 0] = t
        found["next_observation"] = np.roll(found["observation"], -1, axis=0)
        found["next_observation"][:, 0] = t + 1
        return found


def add_and_sample(run: Run) -> Iterator[Row]:
    """A row for each number of environments and of `max_episodes`; all contenders of a number take turns."""
    for num_envs, goal in GOALS.items():
        loop = Loop(num_envs, run.repeats + 2)
        with ExitStack() as opened:
            ours = {
                f"{OURS} {most}": opened.enter_context(Ours(run, loop, most)).round
                for most in MAX_EPISODES
                if most <= max(run.steps, min(MAX_EPISODES))
            }
            calls = {**ours, BOUND: takes(loop), **contenders(run, "low-dim", "online", loop)}
            taken = thread_medians(calls, run.repeats, check)
        bound, peers = taken[BOUND], {name: taken[name] for name in taken if name not in (*ours, BOUND)}
        yield from (_row(num_envs, name, taken[name], bound, peers, goal) for name in ours)


def _row(num_envs: int, name: str, ours: float, bound: float, peers: Mapping[str, float], goal: float) -> Row:
    reference = peers.get(StableBaselines.name)
    most = len(name.removeprefix(f"{OURS} ")) - 1
    case = f"add {num_envs} and sample({BATCH}), 10^{most} episodes"
    figure, reach = (ours / bound, Goal(None)) if reference is None else (ours / reference, Goal(goal, at_most=True))
    return finish(case, "us", ours, bound, figure, reach, peers)


class Ours:
    """A ring of steps that is full, and what one round of the loop does with it."""

    def __init__(self, run: Run, loop: Loop, max_episodes: int) -> None:
        options = {"capacity": CAPACITY, "publish": "step"}
        self._buffer = ReplayBuffer(run.folder("online"), max_episodes, LENGTH, FIELDS, **options)
        for first in range(0, CAPACITY, LENGTH):
            episode = {name: rows[first : first + LENGTH] for name, rows in loop.filling.items()}
            last = episode.pop("next_observation")[-1:]
            episode["observation"] = np.concatenate([episode["observation"], last])
            self._buffer.store_episode(**episode)
        self._steps = iter(loop.steps)

    def round(self) -> Checked:
        self._buffer.add(**next(self._steps))
        batch = self._buffer.sample(BATCH, n_steps=1, gamma=0.99, **NEEDED)
        return batch["observation"], batch["next_observation"], batch["_return"]

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer.close()


def takes(loop: Loop) -> Call:
    """The bound: the rows of one batch from arrays in memory."""
    arrays = {name: rows for name, rows in loop.filling.items() if name != "truncated"}
    rng = np.random.default_rng(1)
    picks = itertools.cycle(rng.integers(CAPACITY, size=(64, BATCH)))

    def gather() -> Checked:
        rows = next(picks)
        batch = {name: array.take(rows, axis=0) for name, array in arrays.items()}
        return batch["observation"], batch["next_observation"], batch["reward"]

    return gather


def add_and_sample_frames(run: Run) -> Iterator[Row]:
    """A row for each number of environments and size of batch; the contenders take turns."""
    for num_envs, size in itertools.product(FRAME_NUM_ENVS, FRAME_BATCHES):
        repeats = -(-run.repeats * min(FRAME_BATCHES) // size)
        # Some of the steps that fill it are there to the end, as the bound has no others.
        capacity = max(run.steps_of("image") // 2, 4 * EPISODE, 2 * repeats * num_envs)
        loop = Frames(num_envs, capacity // num_envs, repeats + 2)
        with ExitStack() as opened:
            calls = {
                OURS: opened.enter_context(OursOfFrames(run, loop, size)).round,
                BOUND: takes_of_frames(loop, size),
            }
            calls |= contenders(run, "image", "online_frames", loop, size)
            taken = thread_medians(calls, repeats, partial(loop.check, size))
        ours, bound = taken.pop(OURS), taken.pop(BOUND)
        figure, goal = (ours / min(taken.values()), Goal(1, at_most=True)) if taken else (ours / bound, Goal(None))
        yield finish(f"add {num_envs} and sample({size}), frames", "us", ours, bound, figure, goal, taken)


class OursOfFrames:
    """A ring of steps that is full, and what one round of the loop does with it."""

    def __init__(self, run: Run, loop: Frames, size: int) -> None:
        options = {"capacity": loop.fill * loop.num_envs, "publish": "step"}
        self._buffer = ReplayBuffer(run.folder("frames"), None, EPISODE, FRAME_FIELDS, **options)
        for step in loop.filling:
            self._buffer.add(**step)
        self._steps, self._size, self._errors = iter(loop.steps), size, errors_of(size)

    def round(self) -> Checked:
        self._buffer.add(**next(self._steps))
        batch = self._buffer.sample(self._size, **BY_PRIORITY)
        self._buffer.update_priorities(batch["_indices"], self._errors)
        return batch["observation"], batch["next_observation"], batch["_return"]

    def __enter__(self) -> OursOfFrames:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer.close()


def takes_of_frames(loop: Frames, size: int) -> Call:
    """The bound: the frames of one batch and their returns, from arrays in memory."""
    rng, env = np.random.default_rng(1), np.arange(loop.num_envs)
    t, env = (some.ravel() for some in np.meshgrid(np.arange(STACK, loop.fill - N), env))
    phase = loop.phase(t, env)
    inside = np.flatnonzero((phase >= STACK) & (phase < EPISODE - N))
    frames, rows = loop.frames.reshape(-1, SIDE, SIDE), t * loop.num_envs + env
    rewards, every = np.repeat(np.arange(len(loop.frames), dtype=np.float32), loop.num_envs), loop.num_envs
    picks = itertools.cycle(rows[rng.choice(inside, (64, size, 1))])

    def gather() -> Checked:
        now = next(picks)
        stack, ahead = now - every * np.arange(STACK)[::-1], now + every * np.arange(N)
        returns = (rewards.take(ahead) * GAMMA ** np.arange(N)).sum(axis=1)
        return frames.take(stack, axis=0), frames.take(stack + every * N, axis=0), returns

    return gather


def thread_medians(
    calls: Mapping[str, Call], repeats: int, check: Callable[[object, int], None], burst: int = 100
) -> dict[str, float]:
    """Microseconds of the thread in one call of each: medians; they take turns, `burst` calls at a time.

    The first call, which makes what later ones use, and the last one are not timed: what they return is checked, with
    the number of calls until then.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        check(call(), 1)
    for done in range(0, repeats, burst):
        for name, call in calls.items():
            taken[name] += [_thread_time(call) for _ in range(min(burst, repeats - done))]
    for call in calls.values():
        check(call(), repeats + 2)
    return {name: 1e6 * statistics.median(times) for name, times in taken.items()}


def _thread_time(call: Call) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def check(batch: object, rounds: int) -> None:
    """The three columns belong together: the next observation is that of the step after."""
    observation, following, reward = (np.asarray(column) for column in batch)  # type: ignore[attr-defined]
    assert observation.shape == following.shape == (BATCH, 17)
    assert np.array_equal(observation[:, 0], reward.reshape(-1)), "a reward is another step's"
    assert np.array_equal(following[:, 0], observation[:, 0] + 1), "a next observation is another step's"
