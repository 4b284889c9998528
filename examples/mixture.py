"""Train one network on three unlike robots: other cameras, other actions, one without a camera.

    python examples/mixture.py --folder mixture_output

A pendulum and a car are seen by cameras of other sizes, and have one action; a hopper has three actions and no camera.
Each is recorded into a folder of its own. `mixture_loader` joins their items: what a robot has not is zeros, and
`_present_<key>` says so, by which the loss leaves it out. The network imitates the three controllers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from memmap_buffer import Field, ReplayBuffer, Source, mixture_loader
from memmap_buffer.progress import progress
from training import batches

Controller = Callable[[np.ndarray], np.ndarray]
LENGTH, STRIDE = 200, 10  # steps of an episode; every tenth row and column of what is rendered
HOPPER = np.random.default_rng(1).normal(size=(3, 11)) / 4  # a controller that nobody tuned, but a function of states


def swing_up(state: np.ndarray) -> np.ndarray:
    """Pump energy into the pendulum, and hold it upright."""
    cosine, sine, velocity = state
    energy = velocity**2 / 6 + 5 * (cosine - 1)
    torque = -10 * np.arctan2(sine, cosine) - 3 * velocity if cosine > 0.9 else -velocity * energy / 4
    return np.clip([torque], -2, 2)


ROBOTS: dict[str, tuple[str, float, Controller]] = {  # environment, share of a batch, controller
    "pendulum": ("Pendulum-v1", 0.4, swing_up),
    "car": ("MountainCarContinuous-v0", 0.3, lambda state: np.sign(state[1:])),
    "hopper": ("Hopper-v5", 0.3, lambda state: np.tanh(HOPPER @ state)),
}


def record(folder: Path, robot: str, num_episodes: int, seed: int) -> ReplayBuffer:
    """Episodes of a robot under its controller, to which noise is added that is not recorded."""
    name, _, controller = ROBOTS[robot]
    has_camera, rng = robot != "hopper", np.random.default_rng(seed)
    environment = gymnasium.make(name, max_episode_steps=LENGTH, render_mode="rgb_array" if has_camera else None)
    state, _ = environment.reset(seed=seed)
    fields = {"state": ("float32", state.shape), "action": Field("float32", environment.action_space.shape)}
    if has_camera:
        fields["camera"] = ("uint8", environment.render()[::STRIDE, ::STRIDE].shape)
    buffer = ReplayBuffer(folder / robot, num_episodes, LENGTH, fields, overwrite=True)
    for _ in progress(range(num_episodes), f"record {robot}"):
        ended = False
        with buffer.one_episode() as episode:
            while not ended:
                action = controller(state)
                camera = {"camera": environment.render()[::STRIDE, ::STRIDE]} if has_camera else {}
                episode.store(state=state, action=action, **camera)
                noisy = action + rng.normal(scale=0.3, size=action.shape)
                state, _, terminated, truncated, _ = environment.step(noisy.astype(np.float32))
                ended = terminated or truncated
        state, _ = environment.reset(seed=int(rng.integers(2**31)))
    return buffer


class Policy(nn.Module):
    """States (B, S), cameras (B, H, W, 3) and the number of the robot (B,) to actions (B, A)."""

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.camera = nn.Sequential(
            *(nn.Conv2d(3, 16, 5, stride=3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(288, 32)),
        )
        self.robot = nn.Embedding(len(ROBOTS), 16)
        self.head = nn.Sequential(nn.Linear(states + 48, 128), nn.ReLU(), nn.Linear(128, actions))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        camera = self.camera(batch["camera"].permute(0, 3, 1, 2) / 255)
        camera = camera * batch["_present_camera"].flatten(1).any(dim=1, keepdim=True)
        out: Tensor = self.head(torch.cat([batch["state"], camera, self.robot(batch["_source"])], dim=1))
        return out


def errors(policy: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(B,) the mean squared error over the actions that each robot has."""
    present = batch["_present_action"]
    return ((policy(batch) - batch["action"]) ** 2 * present).sum(dim=1) / present.sum(dim=1)


def train(buffers: dict[str, ReplayBuffer], num_updates: int, seed: int) -> tuple[list[float], list[float]]:
    """Imitate; the error of each robot's episodes that are left out, before and behind the training."""
    torch.manual_seed(seed)

    def loader(part: str, **how: int | str) -> torch.utils.data.DataLoader[dict[str, Tensor]]:
        split = {"train": 0.75, "val": 0.25}
        sources = {
            robot: Source(buffer, ROBOTS[robot][1], timestep_level=True, split=split, part=part)
            for robot, buffer in buffers.items()
        }
        return mixture_loader(sources, 64, seed=seed, **how)

    held_out = list(loader("val", length=640))
    policy = Policy(held_out[0]["state"].shape[1], held_out[0]["action"].shape[1])
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

    @torch.no_grad()
    def measured() -> list[float]:
        robots = torch.cat([batch["_source"] for batch in held_out])
        every = torch.cat([errors(policy, batch) for batch in held_out])
        return [float(every[robots == number].mean()) for number in range(len(buffers))]

    before = measured()
    for batch in batches(loader("train"), num_updates, "train"):
        loss = errors(policy, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return before, measured()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one network on three unlike robots.")
    parser.add_argument("--folder", type=Path, default=Path("mixture_output"))
    parser.add_argument("--episodes", type=int, default=8, help="of each robot")
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    buffers = {robot: record(arguments.folder, robot, arguments.episodes, arguments.seed) for robot in ROBOTS}
    before, after = train(buffers, arguments.updates, arguments.seed)
    for robot, first, last in zip(buffers, before, after, strict=True):
        print(f"{robot}: {len(buffers[robot])} episodes, error {first:.3f} before, {last:.3f} after")


if __name__ == "__main__":
    main()
