"""Learn the expert's actions from its recorded timesteps: behaviour cloning.

    python examples/imitation.py --folder demo_output

The program opens the folder read-only, as any training program that does not record. One item of the loader is one
timestep, (B, *field) per key; `filter_meta` keeps only the episodes of the expert.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from memmap_buffer import ReplayBuffer
from training import Curve, batches, make_network, save_policy


def imitate(buffer: ReplayBuffer, num_updates: int, seed: int) -> tuple[nn.Module, Curve]:
    """Fit the network to the actions in the expert's episodes by cross-entropy."""
    torch.manual_seed(seed)
    network, curve = make_network(), Curve()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loader = buffer.dataloader(
        batch_size=256, timestep_level=True, shuffle=True, seed=seed, filter_meta={"expert": True}
    )
    curve.measure(network, 0, seed)
    for update, batch in enumerate(batches(loader, num_updates, "imitation"), start=1):
        loss = nn.functional.cross_entropy(network(batch["observation"]), batch["action"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % max(1, num_updates // 10) == 0:
            curve.measure(network, update, seed + update)
    return network, curve


def main() -> None:
    parser = argparse.ArgumentParser(description="Imitate the expert from a recorded memmap buffer.")
    parser.add_argument("--folder", type=Path, default=Path("demo_output"), help="where record.py has written")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a second thread only costs time for a network this small
    buffer = ReplayBuffer.from_folder(arguments.folder / "episodes", read_only=True)
    network, curve = imitate(buffer, arguments.updates, arguments.seed)
    save_policy(arguments.folder / "imitation.pt", network, curve)
    print(f"imitation: mean return {curve.returns[-1]:.0f} after {curve.updates[-1]} updates")


if __name__ == "__main__":
    main()
