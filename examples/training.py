"""Code that the learners share: the network, its learning curve, its file, and an endless supply of batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cartpole import Policy, evaluate_policy
from memmap_buffer.progress import progress


@dataclass(frozen=True)
class Curve:
    """Mean return in the environment after so many updates."""

    updates: list[int] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)

    def measure(self, network: nn.Module, update: int, seed: int) -> None:
        """Add a point: the mean of twenty episodes, for the plot only; nothing is chosen by it."""
        self.updates.append(update)
        self.returns.append(float(evaluate_policy(greedy_policy(network), 20, seed).mean()))


def make_network() -> nn.Sequential:
    """Observation (B, 4) to one number per action (B, 2): logits when imitating, values in offline RL."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def greedy_policy(network: nn.Module) -> Policy:
    """Take the action with the largest output."""

    @torch.no_grad()
    def policy(observations: np.ndarray) -> np.ndarray:
        actions: np.ndarray = network(torch.as_tensor(observations)).argmax(dim=1).numpy()
        return actions

    return policy


def batches(loader: Iterable[dict[str, Tensor]], num_updates: int, description: str) -> Iterator[dict[str, Tensor]]:
    """Go round the loader, epoch after epoch, until it has given `num_updates` batches."""
    epochs = itertools.repeat(loader)
    yield from progress(itertools.islice(itertools.chain.from_iterable(epochs), num_updates), description, num_updates)


def save_policy(path: Path, network: nn.Module, curve: Curve) -> None:
    """Write the network's weights and its learning curve to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"network": network.state_dict(), "updates": curve.updates, "returns": curve.returns}, path)


def load_policy(path: Path) -> tuple[Policy, Curve]:
    """Read the file that `save_policy` wrote."""
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    network = make_network()
    network.load_state_dict(saved["network"])
    return greedy_policy(network), Curve(saved["updates"], saved["returns"])
