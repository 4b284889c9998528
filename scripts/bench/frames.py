"""Environments that show frames, for the loop of online learning; what a batch of stacks of them must be.

An item is a stack of frames, that of N steps later, and the return in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bench.data import Array, Arrays

SIDE, STACK, N, GAMMA, ACTIONS = 84, 4, 3, 0.99, 18
ALPHA, BETA = 0.5, 0.4
EPISODE = 500  # steps of an episode


@dataclass(frozen=True)
class Frames:
    """What the environments show. The first pixels of a frame tell its environment and its step, which is the reward.

    Args: num_envs: how many run side by side. fill: steps of each that fill a buffer. rounds: steps of each after them.
    """

    num_envs: int
    fill: int
    rounds: int

    @cached_property
    def frames(self) -> Array:
        """(fill + rounds + 1, num_envs, SIDE, SIDE), with a picture for each step and the one after the last."""
        rng, count = np.random.default_rng(0), self.fill + self.rounds + 1
        found = rng.integers(256, size=(count, self.num_envs, SIDE, SIDE), dtype=np.uint8)
        found[:, :, 0, :4] = np.arange(count, dtype="<u4").view(np.uint8).reshape(-1, 1, 4)
        found[:, :, 0, 4] = np.arange(self.num_envs)
        return found

    def step(self, t: int) -> Arrays:
        """The step `t` of all: field -> (num_envs, *field)."""
        return {
            "observation": self.frames[t],
            "action": np.full(self.num_envs, t % ACTIONS),
            "reward": np.full(self.num_envs, t, np.float32),
            "terminated": self.phase(np.array(t), np.arange(self.num_envs)) == EPISODE - 1,
            "truncated": np.zeros(self.num_envs, np.bool_),
            "next_observation": self.frames[t + 1],
        }

    @property
    def filling(self) -> Iterator[Arrays]:
        return map(self.step, range(self.fill))

    @cached_property
    def steps(self) -> list[Arrays]:
        """The steps after the fill."""
        return [self.step(t) for t in range(self.fill, self.fill + self.rounds)]

    def phase(self, t: Array, env: Array) -> Array:
        """How many steps of its episode an environment has behind it at `t`; its first one begins in the middle."""
        return (t + env * EPISODE // self.num_envs) % EPISODE

    def stacked(self, t: Array, env: Array) -> tuple[Array, Array]:
        """Where the stacks of `t` are among the frames, (B, STACK): an episode's first stands for those before it."""
        first = np.maximum(t - self.phase(t, env), 0)
        return np.maximum(t[:, None] - np.arange(STACK)[::-1], first[:, None]), env[:, None]

    def check(self, size: int, batch: object, rounds: int) -> None:
        """Stacks, those of N steps later and returns belong together; so many rounds were added after the fill.

        Contenders differ in what stands for frames that left, before the oldest steps, and for those that are not known
        yet, after the newest; and in the observation after an episode's end.
        """
        observation, following, returns = (np.asarray(column) for column in batch)  # type: ignore[attr-defined]
        assert observation.shape == following.shape == (size, STACK, SIDE, SIDE)
        t, env = self.told(observation[:, -1])
        whole = t >= rounds + STACK
        same = observation == self.frames[self.stacked(t, env)]
        assert whole.any() and same[whole].all() and same[:, -1].all(), "a stack is another step's"
        left = EPISODE - self.phase(t, env)
        known = (left <= N) | (t + N < self.fill + rounds)
        expected = sum(np.where(i < left, GAMMA**i * (t + i), 0) for i in range(N))
        assert np.allclose(returns.reshape(-1)[known], expected[known], rtol=1e-5), "a return is another step's"
        known &= left > N
        rows = self.stacked(t[known] + N, env[known])
        assert known.any() and np.array_equal(following[known], self.frames[rows]), "a next stack is another step's"

    @staticmethod
    def told(frames: Array) -> tuple[Array, Array]:
        """The steps and environments of frames."""
        return np.ascontiguousarray(frames[:, 0, :4]).view("<u4")[:, 0].astype(np.int64), frames[:, 0, 4].astype(int)


def errors_of(size: int) -> Array:
    """TD errors, the same for all contenders."""
    return np.random.default_rng(2).random(size)
