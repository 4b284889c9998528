"""Learn an Atari game from its pixels, with a compressed ring of the newest million frames as the replay buffer.

    python examples/atari_dqn.py --folder demo_output
    python examples/atari_dqn.py --folder demo_output --game Catch

The first plays Pong; it needs `pip install ale-py opencv-python-headless`. The second plays a game that is drawn below.
Both need `pip install 'memmap-buffer[zstd]'`. A frame is stored once, by Zstandard, so nothing is lost, and read as the
latest of a stack of four. What is printed is the disk space: raw, a million frames of 84 x 84 take 7.1 GB.

Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning", with the double Q-learning of van
Hasselt et al. 2016, eq. 4.
"""

from __future__ import annotations

import argparse
import copy
from collections import deque
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from memmap_buffer import ReplayBuffer
from memmap_buffer.progress import progress

SIDE, STACK, BATCH, GAMMA = 84, 4, 32, 0.99
LEARN_EVERY, FOLLOW_EVERY = 4, 1_000  # steps


class Catch(gymnasium.Env[np.ndarray, int]):
    """A ball falls from the top; the paddle at the bottom has to be where it lands."""

    observation_space = spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
    action_space = spaces.Discrete(3)  # left, stay, right

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.ball, self.paddle = np.array([0, self.np_random.integers(21)]), 10
        return self._frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.paddle = int(np.clip(self.paddle + action - 1, 1, 19))
        self.ball[0] += 1
        landed = bool(self.ball[0] == 20)
        caught = abs(self.ball[1] - self.paddle) <= 1
        return self._frame(), float(2 * caught - 1) if landed else 0.0, landed, False, {}

    def _frame(self) -> np.ndarray:
        frame = np.zeros((21, 21), np.uint8)
        frame[20, self.paddle - 1 : self.paddle + 2] = 144
        frame[tuple(self.ball)] = 236
        return frame.repeat(4, 0).repeat(4, 1)


def make(game: str) -> gymnasium.Env[np.ndarray, int]:
    if game == "Catch":
        return Catch()
    import ale_py

    gymnasium.register_envs(ale_py)
    raw = gymnasium.make(f"ALE/{game}-v5", frameskip=1)
    return gymnasium.wrappers.AtariPreprocessing(raw, screen_size=SIDE, noop_max=30)


class Values(nn.Module):
    """A stack of frames (B, 4, 84, 84) to a value for each action (B, A)."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(STACK, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, num_actions)),
        )

    def forward(self, frames: Tensor) -> Tensor:
        values: Tensor = self.network(frames.float() / 255)
        return values


class Learner:
    """The values, their slow copy, and the optimizer."""

    def __init__(self, num_actions: int, rate: float) -> None:
        self.values = Values(num_actions)
        self.target = copy.deepcopy(self.values)
        self.optimizer = torch.optim.Adam(self.values.parameters(), lr=rate)

    @torch.no_grad()
    def act(self, frames: deque[np.ndarray]) -> int:
        return int(self.values(torch.from_numpy(np.stack(frames)[None])).argmax())

    def learn(self, buffer: ReplayBuffer) -> None:
        """One update, of a batch of stacks that the frames of the ring are put together to."""
        batch = buffer.sample(
            BATCH,
            n_steps=1,
            gamma=GAMMA,
            current_fields=("observation", "action"),
            next_fields=("observation",),
            stack={"observation": STACK},
            padding="edge",
        )
        values = self.values(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
        with torch.no_grad():
            best = self.values(batch["next_observation"]).argmax(dim=1, keepdim=True)
            bootstrap = self.target(batch["next_observation"]).gather(1, best)[:, 0]
            wanted = batch["_return"].sign() + batch["_discount"] * bootstrap
        loss = nn.functional.smooth_l1_loss(values, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def play(
    env: gymnasium.Env[np.ndarray, int], buffer: ReplayBuffer, learner: Learner, given: argparse.Namespace
) -> None:
    """Step, add, and learn from every fourth step on; what the returns and the disk space are, every so often."""
    rng, returns, returned = np.random.default_rng(given.seed), deque[float](maxlen=100), 0.0
    frame, _ = env.reset(seed=given.seed)
    frames = deque([frame] * STACK, maxlen=STACK)
    for t in progress(range(1, given.steps + 1), given.game):
        explore = rng.random() < max(0.05, 1 - t / given.explore)
        action = int(rng.integers(env.action_space.n)) if explore else learner.act(frames)
        following, reward, terminated, truncated, _ = env.step(action)
        buffer.add(
            observation=frames[-1],
            action=action,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            next_observation=following,
        )
        returned += float(reward)
        frames.append(following)
        if terminated or truncated:
            returns.append(returned)
            frame, _ = env.reset()
            frames, returned = deque([frame] * STACK, maxlen=STACK), 0.0
        if t >= given.warm_up and t % LEARN_EVERY == 0:
            learner.learn(buffer)
        if t % FOLLOW_EVERY == 0:
            learner.target.load_state_dict(learner.values.state_dict())
        if t % given.report == 0:
            mean = np.mean(returns) if returns else float("nan")
            print(f"{t:8} steps: mean return {mean:6.2f}, {told(buffer)}")


def told(buffer: ReplayBuffer) -> str:
    """The disk space of the frames, and what a million of them would take."""
    buffer.flush()
    used = sum(path.stat().st_blocks * 512 for path in (buffer.folder / "data").glob("observation*"))
    frame = used / (buffer.num_steps + len(buffer))  # and the one after the last action of each episode
    return f"{used / 1e6:.1f} MB of frames, {frame:.0f} bytes each, so a million take {frame / 1e3:.2f} GB, raw 7.06 GB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn a game from its pixels, from a compressed ring of frames.")
    parser.add_argument("--folder", type=Path, default=Path("demo_output"), help="everything is written below it")
    parser.add_argument("--game", default="Pong", help="of Atari, as ale-py calls it, or Catch")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--warm-up", type=int, default=10_000, help="steps before the first update")
    parser.add_argument("--explore", type=int, default=100_000, help="steps in which chance gives way to the network")
    parser.add_argument("--capacity", type=int, default=1_000_000, help="the newest so many steps are kept")
    parser.add_argument("--rate", type=float, default=1e-4, help="of learning")
    parser.add_argument("--report", type=int, default=10_000, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    env = make(given.game)
    folder = given.folder / f"dqn-{given.game}"
    with ReplayBuffer.for_env(env, folder, capacity=given.capacity, codec="zstd") as buffer:
        learner = Learner(int(env.action_space.n), given.rate)
        play(env, buffer, learner, given)
        print(f"DQN on {given.game}: {buffer.num_steps} steps in the buffer, {told(buffer)}")
    torch.save(learner.values.state_dict(), folder.with_suffix(".pt"))
    env.close()


if __name__ == "__main__":
    main()
