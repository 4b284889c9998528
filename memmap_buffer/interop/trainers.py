"""Loaders for trainers: Lightning and Accelerate take a DataLoader apart where several processes train.

In one process every loader works in both as it is. In several, they put a sampler of their own in its place, or take
every second batch, as they cannot know that a loader of this library gives each rank its own part already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memmap_buffer.reading.datasets import EpisodeLoader


class Batches:
    """The batches of a loader, of which trainers use what they are given and change nothing.

    It is no DataLoader: Lightning's `fit`, `validate`, `test` and `predict` iterate over it, and Accelerate's `prepare`
    gives it back as it is. What moves batches is the loader's `device`, and Lightning.

    Args: loader: made by `dataloader`. It shares every epoch among the ranks of torch.distributed by itself.
    """

    def __init__(self, loader: EpisodeLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        """The batches of one epoch, which begins with the first: Lightning asks for an iterator once too often."""
        yield from self.loader

    def __len__(self) -> int:
        """Batches of this rank's part of the next epoch."""
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands; Lightning keeps it in its checkpoints."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next epoch the rest of the one that `state_dict` told of."""
        self.loader.load_state_dict(state)
