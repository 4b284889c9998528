"""Learn the expert's actions with several processes that share every batch: behaviour cloning under torchrun.

    torchrun --nproc-per-node 2 examples/ddp_imitation.py --folder demo_output
    python examples/ddp_imitation.py --folder demo_output

Both make the same updates. The loader knows the ranks of torch.distributed, and gives each rank its part of one global
order, so that the ranks together have the items that one process would have in its larger batch.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memmap_buffer import ReplayBuffer
from training import batches, make_network

GLOBAL_BATCH = 256  # timesteps an update, of all processes together


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """(rank, world size), as torchrun has set them; one process alone without it."""
    if "WORLD_SIZE" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def imitate(buffer: ReplayBuffer, num_updates: int, seed: int, world_size: int) -> list[float]:
    """Fit a network to the expert's actions; return the loss of each global batch."""
    torch.manual_seed(seed)  # the same network in every rank
    network: nn.Module = make_network()
    if world_size > 1:
        network = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loader = buffer.dataloader(
        GLOBAL_BATCH // world_size,
        timestep_level=True,
        shuffle=True,
        drop_last=True,
        seed=seed,
        filter_meta={"expert": True},
    )
    losses = []
    for batch in batches(loader, num_updates, "imitation"):
        loss = nn.functional.cross_entropy(network(batch["observation"]), batch["action"])
        optimizer.zero_grad()
        loss.backward()  # DistributedDataParallel averages the gradients over the ranks
        optimizer.step()
        losses.append(mean_over_ranks(loss.detach(), world_size))
    return losses


def mean_over_ranks(loss: torch.Tensor, world_size: int) -> float:
    """The loss of the global batch, of which every rank has an equal part."""
    if world_size > 1:
        dist.all_reduce(loss)
    return float(loss) / world_size


def main() -> None:
    parser = argparse.ArgumentParser(description="Imitate the expert from a recorded memmap buffer, under torchrun.")
    parser.add_argument("--folder", type=Path, default=Path("demo_output"), help="where record.py has written")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with process_group() as (rank, world_size):
        buffer = ReplayBuffer.from_folder(arguments.folder / "episodes", read_only=True)
        losses = imitate(buffer, arguments.updates, arguments.seed, world_size)
        if rank == 0:
            (arguments.folder / f"losses-{world_size}.json").write_text(json.dumps(losses))
            print(f"imitation by {world_size}: loss {losses[-1]:.3f} after {len(losses)} updates")


if __name__ == "__main__":
    main()
