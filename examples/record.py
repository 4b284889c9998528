"""Record CartPole episodes into a folder: some by the expert, the others by an expert whose hand slips.

    python examples/record.py --folder demo_output

Every third episode is the expert's own. In the others, random actions replace some of the expert's; their share is
drawn anew for each episode, so these episodes show poor, middling and good behaviour. An episode is published when its
`with` block ends, without any close or flush. An episode that is interrupted leaves nothing behind.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import numpy as np

from cartpole import expert_policy, make_environment
from memmap_buffer import Field, ReplayBuffer
from memmap_buffer.progress import progress


def create_buffer(folder: Path, num_episodes: int) -> ReplayBuffer:
    """An empty buffer for CartPole; it replaces an older one in the same folder."""
    return ReplayBuffer(
        folder,
        max_episodes=num_episodes,
        max_timesteps=500,
        fields={
            "observation": Field("float32", (4,), final=True),  # one more per episode: after the last action
            "action": "int",
            "reward": "float",
            "terminated": "bool",
            "truncated": "bool",
        },
        meta_fields={"expert": "bool", "episode_return": "float", "success": "bool"},
        overwrite=True,
    )


def record_episode(
    buffer: ReplayBuffer, environment: gymnasium.Env, exploration: float, rng: np.random.Generator
) -> None:
    """Play one episode, a share `exploration` of its actions at random, and store it."""
    observation, _ = environment.reset(seed=int(rng.integers(2**31)))
    terminated = truncated = False
    episode_return = 0.0
    with buffer.one_episode(expert=exploration == 0) as episode:
        while not (terminated or truncated):
            action = rng.integers(2) if rng.random() < exploration else expert_policy(observation)
            next_observation, reward, terminated, truncated, _ = environment.step(int(action))
            episode.store(
                observation=observation, action=action, reward=reward, terminated=terminated, truncated=truncated
            )
            observation = next_observation
            episode_return += float(reward)
        episode.final(observation=observation)
        episode["episode_return"] = episode_return
        episode["success"] = truncated  # still upright when the time was up


def record(folder: Path, num_episodes: int, seed: int) -> None:
    """Record `num_episodes` episodes into the buffer in `folder`, every third of them by the expert alone."""
    rng = np.random.default_rng(seed)
    environment = make_environment()
    with create_buffer(folder, num_episodes) as buffer:
        for i in progress(range(num_episodes), "record"):
            exploration = 0.0 if i % 3 == 0 else rng.uniform(0.3, 1.0)
            record_episode(buffer, environment, exploration, rng)
        print(f"recorded {buffer.num_episodes} episodes, {buffer.num_steps} steps, into {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Record CartPole episodes into a memmap buffer.")
    parser.add_argument("--folder", type=Path, default=Path("demo_output"), help="everything is written below it")
    parser.add_argument("--episodes", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    record(arguments.folder / "episodes", arguments.episodes, arguments.seed)


if __name__ == "__main__":
    main()
