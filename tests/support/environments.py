"""Environments whose every observation says where it is of, and what must be true of whatever is drawn of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memmap_buffer import Field, ReplayBuffer

FIELDS = {
    "observation": Field("int64", 3, final=True),
    "reward": "float64",
    "terminated": "bool",
    "truncated": "bool",
}
GAMMA = 0.5


class Environments:
    """Environments side by side; an observation is (environment, episode, t), a reward is t + 1.

    Args:
        size: how many.
        skips_resets: the step after an episode's end is a reset, its observation the last one of that episode.

    Attributes:
        lengths: (environment, episode) -> at which t it ended, and whether it terminated.
    """

    def __init__(self, size: int, *, skips_resets: bool = False) -> None:
        self._at = np.stack([np.arange(size), np.zeros(size, np.int64), np.zeros(size, np.int64)], -1)
        self._skips_resets, self._over = skips_resets, np.zeros(size, np.bool_)
        self.lengths: dict[tuple[int, int], tuple[int, bool]] = {}

    def step(self, ends: Sequence[int]) -> dict[str, Any]:
        """The next step of all; of each 0, or 1 where it terminates, 2 where it is truncated."""
        kinds = np.where(self._over, 0, ends)
        step = {"observation": self._at.copy(), "reward": np.where(self._over, 0.0, self._at[:, 2] + 1.0)}
        after = np.where(self._over[:, None], self._first(), self._at + np.array([0, 0, 1]))
        step |= {"terminated": kinds == 1, "truncated": kinds == 2, "next_observation": after.copy()}
        for i in np.flatnonzero(kinds):
            self.lengths[i, int(self._at[i, 1])] = int(after[i, 2]), bool(kinds[i] == 1)
        self._over = (kinds > 0) & self._skips_resets
        self._at = np.where(((kinds > 0) & ~self._over)[:, None], self._first(), after)
        return step

    def _first(self) -> np.ndarray:
        """The first observation of each one's next episode."""
        return self._at * np.array([1, 1, 0]) + np.array([0, 1, 0])

    @property
    def recorded(self) -> np.ndarray:
        """Whose next step is one of an episode."""
        return ~self._over


def steps_in(buffer: ReplayBuffer | Path) -> set[tuple[int, ...]]:
    """(environment, episode, t) of every step that is shown; each stands there once."""
    if isinstance(buffer, Path):
        with ReplayBuffer.from_folder(buffer, read_only=True) as reader:
            return steps_in(reader)
    if not buffer.num_steps:
        return set()
    found = [tuple(row) for row in buffer.batch(timestep_level=True, format="numpy")["observation"].tolist()]
    assert len(set(found)) == len(found)
    return set(found)


def require_true_successors(buffer: ReplayBuffer, environments: Environments) -> int:
    """Every item of one step and of three leads to what followed in its environment; how many there are."""
    count = 0
    for n in (1, 3):
        batch = buffer.batch(n_steps=n, gamma=GAMMA, format="numpy") if buffer.num_steps else {"observation": ()}
        for i, (env, episode, t) in enumerate(batch["observation"]):
            k, goes_on, after = int(batch["n_step_lens"][i]), batch["_discount"][i], batch["next_observation"][i]
            length, terminated = environments.lengths.get((env, episode), (t + k, False))
            assert 1 <= k <= n
            assert t + k <= length, f"{(env, episode, t)} goes {k} steps, its episode ended at {length}"
            assert (goes_on == 0) == (terminated and t + k == length), (env, episode, t, k, goes_on)
            assert np.isclose(batch["_return"][i], sum(GAMMA**j * (t + j + 1) for j in range(k))), (env, episode, t)
            if goes_on:
                assert after.tolist() == [env, episode, t + k], f"{(env, episode, t)} leads {k} steps on to {after}"
        count += len(batch["observation"])
    return count
