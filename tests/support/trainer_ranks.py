"""Train with Lightning and with Accelerate as one of several processes, and write down what each rank was given."""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader

from memmap_buffer import ReplayBuffer

ORDERED = {"shuffle": False}
WAYS = {
    "plain": ({}, {}),
    "workers": ({}, {"num_workers": 1}),
    "split": ({"split_batches": True}, {}),
    "uneven": ({"even_batches": False}, {}),
    "drop_last": ({}, {"drop_last": True}),
    "dispatch": ({"dispatch_batches": True}, {}),
    "dispatch split": ({"dispatch_batches": True, "split_batches": True}, {}),
    "dispatch workers": ({"dispatch_batches": True}, {"num_workers": 1}),
}
FITS = {
    "plain": {"tail": "drop"},
    "workers": {"tail": "drop", "num_workers": 1},
    "prefetch": {"tail": "drop", "prefetch": 2},
    "pad": {"tail": "pad"},
}
QUIET = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "accelerator": "cpu",
}


class Model(lightning.LightningModule):
    """Regression of one number; it notes the batches that it sees."""

    def __init__(self, loader=None):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen = []
        self.loader = loader

    def training_step(self, batch, _):
        self.seen.append(batch["number"].tolist())
        return (self.layer(batch["observation"])[:, 0] - batch["reward"]).pow(2).mean()

    def validation_step(self, batch, _):
        self.seen.append(batch["number"].tolist())

    test_step = validation_step

    def predict_step(self, batch, _):
        return batch["number"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Hooked(Model):
    """The same, which makes its loaders itself: Lightning remembers the arguments of those."""

    def train_dataloader(self):
        return self.loader(tail="drop")

    def predict_dataloader(self):
        return self.loader(**ORDERED)


class Indices(BasePredictionWriter):
    """Reads again what Lightning says that the predictions are of."""

    def __init__(self, dataset):
        super().__init__("batch")
        self.dataset = dataset
        self.seen = []

    def write_on_batch_end(self, trainer, module, prediction, indices, *_):
        self.seen.append(self.dataset.__getitems__(indices).data["number"].tolist())


def lists(batches):
    return [batch.tolist() for batch in batches]


def with_lightning(buffer, rank):
    """name -> the batches of this rank."""

    def loader(**options):
        return buffer.dataloader(4, **{"timestep_level": True, "shuffle": True} | options)

    def trainer(**options):
        return lightning.Trainer(devices=2, strategy="ddp", max_epochs=2, **QUIET, **options)

    out = {}
    for name, options in FITS.items():
        model = Model()
        trainer().fit(model, loader(**options))
        out[f"fit {name}"] = model.seen
    for name in ("validate", "test"):
        model = Model()
        getattr(trainer(), name)(model, loader(tail="uneven"), verbose=False)
        out[name] = model.seen
    for name, options in {"": {}, " workers": {"num_workers": 1}, " without last": {"drop_last": True}}.items():
        writer = Indices(buffer.dataset(timestep_level=True))
        predicted = trainer(callbacks=[writer]).predict(Model(), loader(**ORDERED, **options))
        out[f"predict{name}"], out[f"indices{name}"] = lists(predicted), writer.seen
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    prepared = fabric.setup_dataloaders(loader(tail="uneven", num_workers=1))
    out["fabric"] = [batch["number"].tolist() for batch in prepared]
    model = Hooked(loader)
    trainer().fit(model)
    out["fit hooked"], out["predict hooked"] = model.seen, lists(trainer().predict(model))
    return out


def with_accelerate(buffer, rank):
    """name -> the batches of this rank; the same of PyTorch's loader; and what all ranks gathered."""
    numbers = [int(n) for batch in buffer.dataloader(64, timestep_level=True) for n in batch["number"]]
    out = {}
    for name, (config, options) in WAYS.items():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        expected, ordered, shuffled = accelerator.prepare(
            DataLoader(numbers, batch_size=4, **options),
            buffer.dataloader(4, timestep_level=True, **options),
            buffer.dataloader(4, timestep_level=True, shuffle=True, **options),
        )
        out[f"expected {name}"] = lists(expected)
        out[f"ordered {name}"] = [batch["number"].tolist() for batch in ordered]
        assert len(ordered) == len(expected) >= len(out[f"ordered {name}"])
        together = accelerator.gather_for_metrics if accelerator.even_batches else lambda numbers: numbers
        for epoch in range(2):
            out[f"gathered {name} {epoch}"] = lists(together(batch["number"]) for batch in shuffled)
    return out


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    path, out, how = Path(sys.argv[1]), Path(sys.argv[2]), {"lightning": with_lightning, "accelerate": with_accelerate}
    number = int(os.environ["RANK"])
    torch.manual_seed(number)  # so that the loaders of the ranks have seeds of their own
    with ReplayBuffer.from_folder(path, read_only=True) as buffer:
        given = how[sys.argv[3]](buffer, number)
    (out / f"{number}.json").write_text(json.dumps(given))
    torch.distributed.barrier()  # a rank that leaves first closes what another may still be waiting for
    torch.distributed.destroy_process_group()
