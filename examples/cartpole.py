"""CartPole-v1 as the examples use it: the task, its expert, and the return that a policy reaches.

A policy is a function from observations (N, 4) to actions (N,): 0 pushes the cart to the left, 1 to the right. Every
step upright is worth 1, and an episode is cut short (`truncated`) after 500 of them, so 500 is the best return.
"""

from __future__ import annotations

from collections.abc import Callable

import gymnasium
import numpy as np

Policy = Callable[[np.ndarray], np.ndarray]


def make_environment() -> gymnasium.Env:
    """The environment that is recorded and in which policies are judged."""
    return gymnasium.make("CartPole-v1")


def expert_policy(observations: np.ndarray) -> np.ndarray:
    """Push to the side to which the pole is falling; the gains were set by hand and never fail."""
    gains = np.array([0.1, 0.5, 3.0, 1.0])  # cart position, cart velocity, pole angle, pole velocity
    return (observations @ gains > 0).astype(np.int64)


def random_policy(seed: int) -> Policy:
    """Push to either side with equal chance."""
    rng = np.random.default_rng(seed)
    return lambda observations: rng.integers(2, size=len(observations))


def evaluate_policy(policy: Policy, num_episodes: int, seed: int) -> np.ndarray:
    """Play `num_episodes` episodes side by side and return what each of them earned, (num_episodes,)."""
    environments = gymnasium.make_vec("CartPole-v1", num_envs=num_episodes, vectorization_mode="sync")
    observations, _ = environments.reset(seed=seed)
    returns, running = np.zeros(num_episodes), np.ones(num_episodes, dtype=bool)
    while running.any():
        observations, rewards, terminated, truncated, _ = environments.step(policy(observations))
        returns += rewards * running
        running &= ~(terminated | truncated)
    environments.close()
    return returns
