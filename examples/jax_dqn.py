"""Learn CartPole with JAX: DQN from a buffer of flashbax's face whose steps lie in a folder.

    python examples/jax_dqn.py --folder demo_output

You may stop the program at any time: a second run opens the folder, and learns from the steps that are there, too.

Source: Mnih et al. 2015, algorithm 1.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from cartpole import make_environment
from memmap_buffer.interop.jax import DiskBuffer, make_flat_buffer, prefetch

GAMMA, RATE, FOLLOW, BATCH = 0.99, 1e-3, 0.01, 64
WARM_UP, UPDATES = 500, 4  # steps before the first update; updates after every fourth step
STEP = {
    "obs": np.zeros(4, np.float32),
    "action": np.zeros((), np.int32),
    "reward": np.zeros((), np.float32),
    "terminated": np.zeros((), np.bool_),
    "ended": np.zeros((), np.bool_),
}
Tree = Any


def network(key: Any, sizes: tuple[int, ...] = (4, 64, 64, 2)) -> Tree:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (m, n)) * np.sqrt(2 / m), jnp.zeros(n))
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


@jax.jit
def values(params: Tree, obs: Any) -> Any:
    """The value of each action, (B, 2)."""
    for weight, bias in params[:-1]:
        obs = jax.nn.relu(obs @ weight + bias)
    return obs @ params[-1][0] + params[-1][1]


def loss(params: Tree, target: Tree, first: Tree, second: Tree) -> Any:
    """The squared TD error of pairs of steps; where an episode was cut, the second is of another one, and left out."""
    goes_on = 1.0 - first["terminated"]
    wanted = first["reward"] + GAMMA * goes_on * values(target, second["obs"]).max(axis=1)
    chosen = jnp.take_along_axis(values(params, first["obs"]), first["action"][:, None], axis=1)[:, 0]
    known = ~first["ended"] | first["terminated"]
    return (known * (chosen - jax.lax.stop_gradient(wanted)) ** 2).mean()


@jax.jit
def learn(learner: Tree, pair: Any) -> Tree:
    """One step of Adam, and of the target network after the other."""
    params, target, mean, square, number = learner
    gradient, number = jax.grad(loss)(params, target, pair.first, pair.second), number + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, gradient)
    step = partial(_adam, rate=RATE * jnp.sqrt(1 - 0.999**number) / (1 - 0.9**number))
    params = jax.tree.map(step, params, mean, square)
    target = jax.tree.map(lambda t, p: t + FOLLOW * (p - t), target, params)
    return params, target, mean, square, number


def _adam(p: Any, m: Any, s: Any, rate: Any) -> Any:
    return p - rate * m / (jnp.sqrt(s) + 1e-8)


def play(buffer: DiskBuffer, num_steps: int, seed: int) -> list[float]:
    """Play, add and learn; the returns of the episodes."""
    environment, rng, keys = make_environment(), np.random.default_rng(seed), map(jax.random.key, count(seed))
    params = network(next(keys))
    zeros = jax.tree.map(jnp.zeros_like, params)
    learner = params, params, zeros, zeros, 0
    state = buffer.init(STEP)
    if state.time:
        print(f"going on with {min(int(state.time), state.length)} steps")
    returns, total = [], 0.0
    obs, _ = environment.reset(seed=seed)
    for step in range(num_steps):
        greedy = rng.random() > max(0.05, 1 - step / 3000)
        action = int(np.argmax(values(learner[0], obs))) if greedy else int(rng.integers(2))
        following, reward, terminated, truncated, _ = environment.step(action)
        total, ended = total + float(reward), terminated or truncated
        given = {"obs": obs, "action": action, "reward": reward, "terminated": terminated, "ended": ended}
        state = buffer.add(state, {name: np.asarray(value, STEP[name].dtype) for name, value in given.items()})
        obs = following
        if ended:
            returns, total = [*returns, total], 0.0
            obs, _ = environment.reset()
        if step % UPDATES == 0 and buffer.can_sample(state):
            for batch in prefetch(buffer.sample(state, next(keys)) for _ in range(UPDATES)):
                learner = learn(learner, batch.experience)
    state.disk.close()
    return returns


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole with JAX.")
    parser.add_argument("--folder", type=Path, default=Path("demo_output"), help="everything is written below it")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    buffer = make_flat_buffer(50_000, WARM_UP, BATCH, folder=arguments.folder / "jax_dqn")
    returns = play(buffer, arguments.steps, arguments.seed)
    first, last = np.mean(returns[:20]), np.mean(returns[-20:])
    print(f"mean return of the first 20 episodes {first:.0f}, of the last 20 {last:.0f}")


if __name__ == "__main__":
    main()
