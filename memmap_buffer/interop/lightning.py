"""Lightning: a data module for the episodes of a folder, whose loaders go on where a checkpoint stood.

trainer.fit(model, EpisodeDataModule("data", 32, n_steps=1), ckpt_path="last")
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from memmap_buffer import ConcatBuffer, ReplayBuffer, SchemaError
from memmap_buffer.adapters import AnyPath, extra
from memmap_buffer.interop.episodes import opened

with extra("lightning"):
    from lightning import LightningDataModule

PARTS = ("train", "val", "test", "predict")
SPLIT = {"train": 0.9, "val": 0.1}


class EpisodeDataModule(LightningDataModule):
    """The episodes of a folder for `fit`, `validate`, `test` and `predict`.

    Training items come in a random order that seed and epoch fix. Items of the other parts come in their order; all
    ranks together give each item once. An episode stays in its part when others are added. A checkpoint has the seed
    and the split, which a run that continues takes over, and the place within an epoch.

    Args:
        folder: the folder of the buffer, opened in each process; or an open buffer.
        batch_size: items of a batch, on each rank.
        split: "train", "val", "test", "predict" -> fraction of the episodes; default: 0.9 for "train", 0.1 for "val".
            A part that is left out has no loader; only "predict" then has every episode.
        split_seed: decides which episodes each part gets.
        seed: of the order of training items.
        train: options of `ReplayBuffer.dataloader` for this part alone.
        val: options of `ReplayBuffer.dataloader` for this part alone.
        test: options of `ReplayBuffer.dataloader` for this part alone.
        predict: options of `ReplayBuffer.dataloader` for this part alone.
        options: of `ReplayBuffer.dataloader` for all parts, such as `n_steps`, `view`, `num_workers`, `prefetch`.

    Attributes:
        buffer: the `ReplayBuffer` or `ConcatBuffer`, from `setup` to `teardown`.

    Raises:
        SchemaError: `split` names another part.
    """

    def __init__(
        self,
        folder: AnyPath | ReplayBuffer | ConcatBuffer,
        batch_size: int,
        *,
        split: Mapping[str, float] | None = None,
        split_seed: int = 0,
        seed: int = 0,
        train: Mapping[str, Any] | None = None,
        val: Mapping[str, Any] | None = None,
        test: Mapping[str, Any] | None = None,
        predict: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.folder, self.batch_size = folder, batch_size
        self.split, self.split_seed, self.seed = dict(SPLIT if split is None else split), split_seed, seed
        unknown = [name for name in self.split if name not in PARTS]
        if unknown:
            raise SchemaError(f"split: got the part {unknown[0]!r}, expected some of {', '.join(PARTS)}")
        self.options = options
        self.options_of = dict(zip(PARTS, (train or {}, val or {}, test or {}, predict or {}), strict=True))
        self.buffer: ReplayBuffer | ConcatBuffer | None = None
        self._offer()

    def _offer(self) -> None:
        """Give missing parts the loaders of Lightning's base class, so that Lightning sees them as not implemented."""
        for name in PARTS[:3]:
            self.__dict__.pop(f"{name}_dataloader", None)
            if name not in self.split:
                setattr(self, f"{name}_dataloader", partial(getattr(LightningDataModule, f"{name}_dataloader"), self))

    def setup(self, stage: str | None = None) -> None:
        """Open the folder; the trainer calls it in each process.

        Args:
            stage: the trainer's method: "fit", "validate", "test" or "predict"; without effect.
        """
        if self.buffer is None:
            self.buffer = opened(self.folder)

    def teardown(self, stage: str | None = None) -> None:
        """Close the buffer that `setup` opened.

        Args:
            stage: the trainer's method: "fit", "validate", "test" or "predict"; without effect.
        """
        if isinstance(self.buffer, ReplayBuffer) and self.buffer is not self.folder:
            self.buffer.close()
        self.buffer = None

    def train_dataloader(self) -> Any:
        """The loader of "train": shuffled, the same number of batches on each rank."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> Any:
        """The loader of "val"."""
        return self._loader("val", tail="uneven")

    def test_dataloader(self) -> Any:
        """The loader of "test"."""
        return self._loader("test", tail="uneven")

    def predict_dataloader(self) -> Any:
        """The loader of "predict"; of every episode if there is no such part."""
        return self._loader("predict", tail="uneven")

    def _loader(self, part: str, **how: Any) -> Any:
        self.setup()
        assert self.buffer is not None
        chosen = {"split": self.split, "part": part, "split_seed": self.split_seed} if part in self.split else {}
        options = {"seed": self.seed, **how, **chosen, **self.options, **self.options_of[part]}
        return self.buffer.dataloader(self.batch_size, **options)

    def state_dict(self) -> dict[str, Any]:
        """The seed and the split, for a checkpoint; the loader saves the place in an epoch."""
        return {"seed": self.seed, "split": dict(self.split), "split_seed": self.split_seed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the seed and the split of a checkpoint, so that no episode changes its part.

        Args:
            state_dict: as `state_dict` gave it.
        """
        self.seed, self.split = state_dict["seed"], dict(state_dict["split"])
        self.split_seed = state_dict["split_seed"]
        self._offer()
