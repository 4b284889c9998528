"""Learn CartPole from scratch while playing it: double DQN with prioritised 3-step transitions.

    python examples/prioritized_dqn.py --folder demo_output

Each step can be drawn as soon as it is stored (`publish="step"`). `sample()` draws batches by priority, `_weights`
weight the loss, and the TD errors become the new priorities. You may stop the program at any time: a second run opens
the folder and continues, with the same priorities and the same network.

Sources: van Hasselt et al. 2016, eq. 4 (double DQN); Schaul et al. 2016, algorithm 1 (prioritised replay).
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor, nn

from cartpole import evaluate_policy, make_environment
from memmap_buffer import Field, Prioritized, ReplayBuffer
from offline_rl import follow
from training import Curve, greedy_policy, make_network

mpl.use("Agg")  # a plot is saved, none is shown
import matplotlib.pyplot as plt

SOLVED = 475.0  # as Gymnasium defines it for CartPole-v1
BATCH, GAMMA, WARM_UP = 64, 0.99, 500
BETA_STEPS = 30_000
HOW = Prioritized(alpha=0.6, beta=0.4, beta_steps=BETA_STEPS)


class Learner:
    """A network of action values, its slow copy, and what it has learned so far.

    Args:
        buffer: the transitions.
        path: the file that `save` writes, and from which a new run starts.
    """

    def __init__(self, buffer: ReplayBuffer, path: Path) -> None:
        self.buffer, self.path = buffer, path
        self.network, self.curve, self.steps, self.how = make_network(), Curve(), 0, HOW
        self.target = copy.deepcopy(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=5e-4)
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self.network.load_state_dict(saved["network"])
            self.target.load_state_dict(saved["target"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.steps, self.curve = saved["steps"], Curve(saved["updates"], saved["returns"])
        done = max(0, self.steps - WARM_UP)  # β is not in the folder, so a resumed run computes it
        self.how = replace(HOW, beta=HOW.beta_at(done), beta_steps=max(1, BETA_STEPS - done))

    def save(self) -> None:
        """Write the networks, the optimizer and the curve for the next run."""
        saved = {"network": self.network, "target": self.target, "optimizer": self.optimizer}
        state = {name: module.state_dict() for name, module in saved.items()}
        told = {"steps": self.steps, "updates": self.curve.updates, "returns": self.curve.returns}
        torch.save({**state, **told}, self.path)

    def learn(self) -> None:
        """One update on transitions that are drawn by priority."""
        batch = self.buffer.sample(
            BATCH,
            n_steps=3,
            gamma=GAMMA,
            current_fields=("observation", "action"),
            next_fields=("observation",),
            prioritized=self.how,
        )
        errors = self._errors(batch)
        loss = (batch["_weights"] * nn.functional.smooth_l1_loss(errors, torch.zeros(BATCH), reduction="none")).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 10.0)
        self.optimizer.step()
        follow(self.target, self.network, rate=0.005)
        self.buffer.update_priorities(batch["_indices"], errors)

    def _errors(self, batch: dict[str, Tensor]) -> Tensor:
        """The TD error of each transition, (B,)."""
        values = self.network(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
        with torch.no_grad():
            best = self.network(batch["next_observation"]).argmax(dim=1, keepdim=True)
            bootstrap = self.target(batch["next_observation"]).gather(1, best)[:, 0]
        return batch["_return"] + batch["_discount"] * bootstrap - values


def play(learner: Learner, num_steps: int, seed: int) -> None:
    """Play, record and learn until the task is solved or the steps are used up."""
    environment, rng = make_environment(), np.random.default_rng((seed, learner.steps))
    end, solved = learner.steps + num_steps, False
    while learner.steps < end and not solved:
        observation, _ = environment.reset(seed=int(rng.integers(2**31)))
        ended, due = False, False
        with learner.buffer.one_episode(keep_partial=True) as episode:
            while not ended and learner.steps < end:
                action = choose(learner, observation, rng)
                following, reward, terminated, truncated, _ = environment.step(action)
                episode.store(
                    observation=observation, action=action, reward=reward, terminated=terminated, truncated=truncated
                )
                learner.steps += 1
                due |= learner.steps % 1000 == 0
                observation, ended = following, terminated or truncated
                if learner.steps > WARM_UP:
                    learner.learn()
            episode.final(observation=observation)
        solved = due and measured(learner, seed) >= SOLVED


def choose(learner: Learner, observation: np.ndarray, rng: np.random.Generator) -> int:
    """The best action so far, or a random one with a chance that falls from 1 to 0.05 over 3000 steps."""
    if rng.random() < max(0.05, 1 - learner.steps / 3000):
        return int(rng.integers(2))
    return int(greedy_policy(learner.network)(observation[None])[0])


def measured(learner: Learner, seed: int) -> float:
    """Add a point to the learning curve: the mean return of twenty unrecorded episodes, of a hundred if it is high."""
    learner.curve.measure(learner.target, learner.steps, seed + learner.steps)
    learner.save()
    returned = learner.curve.returns[-1]
    print(f"{learner.steps:6} steps: mean return {returned:5.1f}")
    if returned < SOLVED:
        return returned
    return float(evaluate_policy(greedy_policy(learner.target), 100, seed).mean())


def save_plot(path: Path, curve: Curve) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(curve.updates, curve.returns, marker="o", markersize=3)
    axes.axhline(SOLVED, linestyle=":", color="grey")
    axes.set(xlabel="steps", ylabel="mean return of 20 episodes", title="Prioritised double DQN, CartPole-v1")
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole with prioritised replay.")
    parser.add_argument("--folder", type=Path, default=Path("demo_output"), help="everything is written below it")
    parser.add_argument("--steps", type=int, default=40_000, help="at most, in this run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # a second thread only costs time for a network this small
    arguments.folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "observation": Field("float32", (4,), final=True),
        "action": "int",
        "reward": "float",
        "terminated": "bool",
        "truncated": "bool",
    }
    with ReplayBuffer(
        arguments.folder / "played", 2000, 500, fields, circular=True, capacity=50_000, publish="step"
    ) as buffer:
        learner = Learner(buffer, arguments.folder / "prioritized_dqn.pt")
        if learner.steps:
            print(f"continuing after {learner.steps} steps, {buffer.num_steps} of them in the buffer")
        play(learner, arguments.steps, arguments.seed)
        learner.save()
    save_plot(arguments.folder / "prioritized_dqn.png", learner.curve)
    best = max(learner.curve.returns, default=0.0)
    print(f"prioritised DQN: best mean return {best:.0f} within {learner.steps} steps")


if __name__ == "__main__":
    main()
