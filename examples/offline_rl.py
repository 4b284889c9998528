"""Learn to act from recorded transitions alone, without the expert's episodes: offline reinforcement learning.

    python examples/offline_rl.py --folder demo_output

The learner is double DQN on n-step returns with the conservative penalty of CQL. It reads only the exploring episodes
(`filter_meta`), most of which end in a fall, and learns a better policy than they show. The loader prepares the
transitions, and no item crosses the border of an episode. `_return` is the discounted sum of up to n rewards.
`next_observation` is the observation after these rewards, at the end of an episode its final observation. `_discount`
is gamma**k, or 0 where the pole fell (`terminated`), but not where the time was up (`truncated`).

Sources: van Hasselt et al. 2016, eq. 4 (double DQN); Kumar et al. 2020, eq. 4 (CQL(H)).
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from memmap_buffer import ReplayBuffer
from training import Curve, batches, make_network, save_policy


def conservative_loss(network: nn.Module, target: nn.Module, batch: dict[str, Tensor], penalty: float) -> Tensor:
    """The double DQN loss, and `penalty` times how far the values of all actions rise above the recorded one's."""
    values = network(batch["observation"])
    recorded = values.gather(1, batch["action"][:, None])[:, 0]
    with torch.no_grad():
        best = network(batch["next_observation"]).argmax(dim=1, keepdim=True)
        bootstrap = target(batch["next_observation"]).gather(1, best)[:, 0]
        goal = batch["_return"] + batch["_discount"] * bootstrap
    optimism = (values.logsumexp(dim=1) - recorded).mean()
    return nn.functional.smooth_l1_loss(recorded, goal) + penalty * optimism


@torch.no_grad()
def follow(target: nn.Module, network: nn.Module, rate: float) -> None:
    """Move the target's weights a little towards the network's."""
    for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
        slow.lerp_(fast, rate)


def learn(buffer: ReplayBuffer, num_updates: int, seed: int) -> tuple[nn.Module, Curve]:
    """Fit action values to the exploring episodes; the slowly moving target network is the result."""
    torch.manual_seed(seed)
    network, curve = make_network(), Curve()
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loader = buffer.dataloader(
        batch_size=256,
        n_steps=5,
        gamma=0.97,
        current_fields=("observation", "action"),
        next_fields=("observation",),
        shuffle=True,
        seed=seed,
        filter_meta={"expert": False},
    )
    curve.measure(target, 0, seed)
    for update, batch in enumerate(batches(loader, num_updates, "offline RL"), start=1):
        loss = conservative_loss(network, target, batch, penalty=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(target, network, rate=0.005)
        if update % max(1, num_updates // 10) == 0:
            curve.measure(target, update, seed + update)
    return target, curve


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn action values from a recorded memmap buffer.")
    parser.add_argument("--folder", type=Path, default=Path("demo_output"), help="where record.py has written")
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a second thread only costs time for a network this small
    buffer = ReplayBuffer.from_folder(arguments.folder / "episodes", read_only=True)
    network, curve = learn(buffer, arguments.updates, arguments.seed)
    save_policy(arguments.folder / "offline_rl.pt", network, curve)
    print(f"offline RL: mean return {curve.returns[-1]:.0f} after {curve.updates[-1]} updates")


if __name__ == "__main__":
    main()
