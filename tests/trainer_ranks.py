"""Train with Lightning and with Accelerate as one of several processes, and write down what each rank was given."""

import json
import logging
import sys
import warnings
from pathlib import Path

import lightning
import torch
from accelerate import Accelerator

from memmap_buffer import ReplayBuffer
from memmap_buffer.interop.trainers import Batches

OPTIONS = {"timestep_level": True, "shuffle": True, "seed": 5, "tail": "drop"}
QUIET = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "accelerator": "cpu",
}


class Model(lightning.LightningModule):
    """Regression of one number; it notes the batches that it sees."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen = []

    def training_step(self, batch, _):
        self.seen.append(batch["number"].tolist())
        return (self.layer(batch["observation"])[:, 0] - batch["reward"]).pow(2).mean()

    def predict_step(self, batch, _):
        return batch["number"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def batches(folder):
    return Batches(ReplayBuffer.from_folder(folder, read_only=True).dataloader(4, **OPTIONS))


def with_lightning(folder):
    model = Model()
    trainer = lightning.Trainer(devices=2, strategy="ddp", max_epochs=2, default_root_dir=folder, **QUIET)
    trainer.fit(model, batches(folder))
    return trainer.global_rank, model.seen


def with_accelerate(folder):
    accelerator = Accelerator(cpu=True)
    layer = torch.nn.Linear(3, 1)
    model, optimizer, loader = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 1e-3), batches(folder))
    seen = []
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward((model(batch["observation"])[:, 0] - batch["reward"]).pow(2).mean())
            optimizer.step()
            seen.append(batch["number"].tolist())
    return accelerator.process_index, seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    path, out, how = Path(sys.argv[1]), Path(sys.argv[2]), {"lightning": with_lightning, "accelerate": with_accelerate}
    rank, given = how[sys.argv[3]](path)
    (out / f"{rank}.json").write_text(json.dumps(given))
