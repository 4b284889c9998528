"""Lightning, Accelerate and `torch.compile` train with the loaders: what their steps see is what the loaders give."""

import json
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from accelerate import Accelerator
from trainer_ranks import FITS, QUIET, WAYS, Indices, Model

from memmap_buffer import Field, ReplayBuffer, SchemaError

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Consider setting .persistent_workers=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning's, with torch 2.13
]


@pytest.fixture
def buffer(tmp_path):
    """Steps of which each has a number of its own."""
    fields = {"observation": Field("float", 3, final=True), "number": "int", "reward": "float", "terminated": "bool"}
    with ReplayBuffer(tmp_path / "b", 9, 20, fields) as made:
        for episode in range(4):
            add(made, episode)
        yield made


def add(buffer, episode, length=12):
    numbers = torch.arange(length) + 100 * episode
    observation = torch.randn(length + 1, 3, generator=torch.Generator().manual_seed(episode))
    buffer.store_episode(observation=observation, number=numbers, reward=numbers / 100, terminated=numbers % 100 == 11)


def loader(buffer, **options):
    return buffer.dataloader(4, **{"timestep_level": True, "shuffle": True, "seed": 3} | options)


def fit(model, loaders, folder, **options):
    lightning.Trainer(**{"max_epochs": 2, "default_root_dir": folder, **QUIET} | options).fit(model, loaders)
    return model.seen


def joined(batches):
    return [n for batch in batches for n in batch]


def numbers_of(loader, epochs=1):
    return [batch["number"].tolist() for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"prefetch": 2}, {"num_workers": 1}], ids=str)
def test_lightning_sees_the_batches_of_every_epoch(buffer, tmp_path, options):
    seen = fit(Model(), loader(buffer, **options), tmp_path)
    assert seen == numbers_of(loader(buffer, **options), 2)
    assert sorted(joined(seen[:12])) == sorted(joined(seen[12:]))
    assert len(seen) == 24


def test_lightning_sees_episodes_that_were_published_since(buffer, tmp_path):
    class Growing(Model):
        def on_train_epoch_end(self):
            add(buffer, 4 + self.current_epoch)

    seen = fit(Growing(), loader(buffer), tmp_path, reload_dataloaders_every_n_epochs=1)
    assert [n for n in joined(seen[12:]) if n >= 400] != []


def test_lightning_trains_on_transitions_and_validates_on_trajectories(buffer, tmp_path):
    class Transitions(Model):
        def training_step(self, batch, _):
            target = batch["_return"] + batch["_discount"] * self.layer(batch["next_observation"])[:, 0].detach()
            return (self.layer(batch["observation"])[:, 0] - target).pow(2).mean()

        def validation_step(self, batch, _):
            self.seen.append(batch["_lens"].tolist())

    model = Transitions()
    training = buffer.dataloader(8, n_steps=3, gamma=0.9, shuffle=True)
    trainer = lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, num_sanity_val_steps=0, **QUIET)
    trainer.fit(model, training, buffer.dataloader(2))
    assert model.seen == [[12, 12], [12, 12]]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"prefetch": 2}, {"drop_last": True}], ids=str)
def test_lightning_predicts_on_every_item_and_says_which(buffer, tmp_path, options):
    add(buffer, 4, 3)
    writer = Indices(buffer.dataset(timestep_level=True))
    trainer = lightning.Trainer(default_root_dir=tmp_path, callbacks=[writer], **QUIET)
    predicted = trainer.predict(Model(), loader(buffer, shuffle=False, **options))
    assert [batch.tolist() for batch in predicted] == numbers_of(loader(buffer, shuffle=False)) == writer.seen


@pytest.mark.filterwarnings("ignore:You requested to overfit:lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
def test_lightning_overfits_to_what_is_in_order(buffer, tmp_path):
    seen = fit(Model(), loader(buffer, shuffle=False), tmp_path, overfit_batches=3)
    assert seen == 2 * numbers_of(loader(buffer, shuffle=False))[:3]
    with pytest.raises(SchemaError, match=r"sampler: got a SequentialSampler.*give the loader shuffle=False"):
        fit(Model(), loader(buffer), tmp_path, overfit_batches=3)


def test_lightning_goes_on_in_the_middle_of_an_epoch(buffer, tmp_path):
    class Saving(Model):
        def on_train_batch_end(self, *_):
            if len(self.seen) == 17:
                self.trainer.save_checkpoint(tmp_path / "place.ckpt")

    expected = fit(Saving(), loader(buffer), tmp_path)
    resumed = Model()
    trainer = lightning.Trainer(default_root_dir=tmp_path, max_epochs=2, **QUIET)
    trainer.fit(resumed, loader(buffer), ckpt_path=tmp_path / "place.ckpt", weights_only=False)
    assert resumed.seen == expected[17:]


def test_accelerate_prepares_a_loader_in_one_process(buffer):
    accelerator = Accelerator(cpu=True)
    layer = torch.nn.Linear(3, 1)
    model, optimizer, prepared = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 1e-3), loader(buffer))
    seen = []
    for batch in prepared:
        optimizer.zero_grad()
        accelerator.backward((model(batch["observation"])[:, 0] - batch["reward"]).pow(2).mean())
        optimizer.step()
        seen.append(batch["number"].tolist())
    assert seen == numbers_of(loader(buffer))


def test_accelerate_counts_the_epochs_of_a_shuffle(buffer):
    prepared = Accelerator(cpu=True).prepare(loader(buffer))
    assert numbers_of(prepared, 2) == numbers_of(loader(buffer), 2)
    prepared.set_epoch(7)
    again = loader(buffer)
    again.batch_sampler.set_epoch(7)
    assert numbers_of(prepared) == numbers_of(again)


def test_accelerate_skips_the_batches_that_were_seen(buffer):
    accelerator = Accelerator(cpu=True)
    skipping = accelerator.skip_first_batches(accelerator.prepare(loader(buffer)), 5)
    assert numbers_of(skipping) == numbers_of(loader(buffer))[5:]


def in_two_processes(buffer, folder, how):
    """Of each rank what `trainer_ranks` writes down; there are 51 items."""
    add(buffer, 4, 3)
    buffer.close()
    script = Path(__file__).parents[1] / "support" / "trainer_ranks.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run([*launch, str(folder / "b"), str(folder), how], check=True, capture_output=True, timeout=250)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


ITEMS = [100 * episode + t for episode in range(4) for t in range(12)] + [400, 401, 402]


@pytest.mark.slow
def test_lightning_gives_two_processes_disjoint_parts(buffer, tmp_path):
    ranks = in_two_processes(buffer, tmp_path, "lightning")
    for name in [*(f"fit {name}" for name in FITS), "fit hooked"]:
        epochs = [[n for rank in ranks for n in joined(rank[name][at : at + 7])] for at in (0, 7)]
        assert [len(rank[name]) for rank in ranks] == [14, 14], name
        for numbers in epochs:
            assert len(numbers) == (52 if name == "fit pad" else 50)
            assert len(set(numbers)) == (51 if name == "fit pad" else 50)
        assert epochs[0] != epochs[1]
    for name in ("validate", "test", "predict", "predict workers", "predict without last", "predict hooked", "fabric"):
        assert sorted(joined(ranks[0][name] + ranks[1][name])) == ITEMS, name
    for name in ("", " workers", " without last"):
        assert [rank["indices" + name] for rank in ranks] == [rank["predict" + name] for rank in ranks]


@pytest.mark.slow
def test_accelerate_gives_two_processes_what_it_gives_of_a_plain_loader(buffer, tmp_path):
    ranks = in_two_processes(buffer, tmp_path, "accelerate")
    for name in WAYS:
        assert [rank[f"ordered {name}"] for rank in ranks] == [rank[f"expected {name}"] for rank in ranks], name
        epochs = [[joined(rank[f"gathered {name} {epoch}"]) for rank in ranks] for epoch in range(2)]
        assert epochs[0] != epochs[1]
        for first, second in epochs:
            numbers = first + second if name == "uneven" else first
            assert name == "uneven" or first == second
            assert len(numbers) == len(set(numbers)) == (48 if name == "drop_last" else 51)


@pytest.mark.parametrize("names", [None, ("observation", "next_observation", "reward")], ids=["dict", "named tuple"])
def test_a_compiled_step_takes_batches_as_they_are(buffer, names):
    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 1)

    def loss(batch):
        if isinstance(batch, dict):
            batch = (batch["observation"], batch["next_observation"], batch["reward"])
        observation, following, reward = batch
        target = reward + layer(following)[:, 0].detach()
        return (layer(observation)[:, 0] - target).pow(2).mean()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for batch in buffer.dataloader(8, n_steps=3, drop_last=True, shuffle=True, seed=1, to_named_tuple=names):
        torch.testing.assert_close(compiled(batch), loss(batch))
    torch.compiler.reset()
