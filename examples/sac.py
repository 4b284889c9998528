"""Soft actor-critic on a MuJoCo task, with a ring of the newest steps on the disk as its replay buffer.

    python examples/sac.py --folder demo_output
    python examples/sac.py --folder demo_output --environment Pendulum-v1

The first learns Hopper-v5, which needs `pip install 'gymnasium[mujoco]'`; the second does without. Any
environment will do whose observations and actions are vectors. You may stop the program at any time: a second run opens
the folder and continues, with the same steps, networks and optimizers.

Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (algorithm 1, with a learned temperature).
"""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn

from memmap_buffer import Field, ReplayBuffer
from memmap_buffer.progress import progress

GAMMA, TAU, BATCH, WIDTH = 0.99, 0.005, 256, 256
LOG_STD = (-5.0, 2.0)  # of the policy, before tanh
REPORT, SAVE = 1_000, 5_000  # steps


def perceptron(inputs: int, outputs: int) -> nn.Sequential:
    hidden = nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


class Actor(nn.Module):
    """A policy: a Gaussian, squashed by tanh into the bounds of the actions."""

    def __init__(self, space: gymnasium.spaces.Box, num_observations: int) -> None:
        super().__init__()
        self.network = perceptron(num_observations, 2 * space.shape[0])
        self.register_buffer("scale", torch.as_tensor((space.high - space.low) / 2))
        self.register_buffer("middle", torch.as_tensor((space.high + space.low) / 2))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Actions, and the logarithms of their densities: (B, *action), (B,)."""
        mean, log_std = self.network(observation).chunk(2, dim=-1)
        low, high = LOG_STD
        normal = torch.distributions.Normal(mean, (low + (high - low) * (log_std.tanh() + 1) / 2).exp())
        raw = normal.rsample()
        slope = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))  # log(1 - tanh²), without its cancellation
        return self.middle + self.scale * raw.tanh(), (normal.log_prob(raw) - slope - self.scale.log()).sum(dim=-1)


class Critic(nn.Module):
    """Two estimates of an action's value, (2, B)."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(perceptron(num_inputs, 1) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        inputs = torch.cat([observation, action], dim=-1)
        return torch.stack([network(inputs)[:, 0] for network in self.networks])


class Agent:
    """The networks, their optimizers, and how many steps they have seen; kept in a file.

    Args:
        envs: the environments, whose spaces give the sizes.
        path: the file that `save` writes, and from which a new run starts.
    """

    def __init__(self, envs: gymnasium.vector.VectorEnv, path: Path) -> None:
        observations, actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        self.path, self.steps, self.curve = path, 0, []
        self.actor, self.critic = Actor(envs.single_action_space, observations), Critic(observations + actions)
        self.target, self.log_alpha = copy.deepcopy(self.critic), nn.Parameter(torch.zeros(()))
        self.target_entropy = -float(actions)
        self.parts = {
            "actor": self.actor,
            "critic": self.critic,
            "target": self.target,
            "actor_optimizer": torch.optim.Adam(self.actor.parameters(), lr=3e-4),
            "critic_optimizer": torch.optim.Adam(self.critic.parameters(), lr=1e-3),
            "alpha_optimizer": torch.optim.Adam([self.log_alpha], lr=1e-3),
        }
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self.steps, self.curve = saved["steps"], saved["curve"]
            self.log_alpha.data.copy_(saved["log_alpha"])
            for name, part in self.parts.items():
                part.load_state_dict(saved[name])

    def save(self) -> None:
        """Replace the file: one that is half written is never there."""
        told = {"steps": self.steps, "curve": self.curve, "log_alpha": self.log_alpha.detach()}
        torch.save({**told, **{name: part.state_dict() for name, part in self.parts.items()}}, f"{self.path}.new")
        Path(f"{self.path}.new").replace(self.path)

    @torch.no_grad()
    def act(self, observation: np.ndarray) -> np.ndarray:
        return self.actor(torch.as_tensor(observation, dtype=torch.float32))[0].numpy()

    def learn(self, batch: dict[str, Tensor]) -> None:
        """One update of the critic, the policy and the temperature."""
        observation, alpha = batch["observation"], self.log_alpha.exp().detach()
        with torch.no_grad():
            action, log_density = self.actor(batch["next_observation"])
            value = self.target(batch["next_observation"], action).min(dim=0).values - alpha * log_density
            wanted = batch["_return"] + batch["_discount"] * value  # the discount is 0 where the episode terminated
        error = self.critic(observation, batch["action"]) - wanted
        self._descend("critic_optimizer", error.square().mean(dim=1).sum())
        action, log_density = self.actor(observation)
        self._descend(
            "actor_optimizer", (alpha * log_density - self.critic(observation, action).min(dim=0).values).mean()
        )
        excess = -(log_density.detach() + self.target_entropy).mean()
        self._descend("alpha_optimizer", self.log_alpha.exp() * excess)
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                slow.lerp_(fast, TAU)

    def _descend(self, name: str, loss: Tensor) -> None:
        self.parts[name].zero_grad()
        loss.backward()
        self.parts[name].step()


def train(agent: Agent, buffer: ReplayBuffer, envs: gymnasium.vector.VectorEnv, steps: int, warm_up: int) -> None:
    """Step, add, draw and learn, for so many steps of all environments together."""
    returns: list[float] = []
    observation, _ = envs.reset(seed=agent.steps)
    for _ in progress(range(0, steps, envs.num_envs), "SAC"):
        action = agent.act(observation) if agent.steps >= warm_up else envs.action_space.sample()
        following, reward, terminated, truncated, infos = envs.step(action)
        buffer.add(
            observation=observation,
            action=action,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            next_observation=following,
        )
        observation = following
        returns += infos["episode"]["r"][infos["_episode"]].tolist() if "episode" in infos else []
        before, agent.steps = agent.steps, agent.steps + envs.num_envs
        if agent.steps > warm_up:
            agent.learn(
                buffer.sample(
                    BATCH,
                    n_steps=1,
                    gamma=GAMMA,
                    current_fields=("observation", "action"),
                    next_fields=("observation",),
                )
            )
        if agent.steps // REPORT > before // REPORT and returns:
            agent.curve.append((agent.steps, float(np.mean(returns))))
            print(f"{agent.steps:7} steps: mean return {agent.curve[-1][1]:8.1f} of {len(returns)} episodes")
            returns.clear()
        if agent.steps // SAVE > before // SAVE:
            agent.save()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn a continuous control task with soft actor-critic.")
    parser.add_argument("--folder", type=Path, default=Path("demo_output"), help="everything is written below it")
    parser.add_argument("--environment", default="Hopper-v5", help="Pendulum-v1 needs no MuJoCo")
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30_000, help="of all environments together, in this run")
    parser.add_argument("--warm-up", type=int, default=5_000, help="steps of random actions before the first update")
    parser.add_argument("--capacity", type=int, default=1_000_000, help="the newest so many steps are kept")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # a second thread only costs time for networks this small
    folder = arguments.folder / f"sac-{arguments.environment}"
    folder.mkdir(parents=True, exist_ok=True)
    thunks = [lambda: gymnasium.make(arguments.environment) for _ in range(arguments.num_envs)]
    envs = RecordEpisodeStatistics(SyncVectorEnv(thunks))
    single = {
        "observation": Field("float32", envs.single_observation_space.shape, final=True)
    }  # as the networks take it
    with ReplayBuffer.for_env(envs, folder / "replay", capacity=arguments.capacity, fields=single) as buffer:
        agent = Agent(envs, folder / "sac.pt")
        if agent.steps:
            print(f"continuing after {agent.steps} steps, {buffer.num_steps} of them in the buffer")
        torch.manual_seed(arguments.seed + agent.steps)
        envs.action_space.seed(arguments.seed + agent.steps)
        train(agent, buffer, envs, arguments.steps, arguments.warm_up)
        agent.save()
    envs.close()
    print(f"SAC on {arguments.environment}: {agent.steps} steps, {buffer.num_steps} of them in the buffer")


if __name__ == "__main__":
    main()
