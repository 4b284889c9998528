"""Lightning, Accelerate and `torch.compile` train with the loaders: what their steps see is what the loaders give."""

import json
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from accelerate import Accelerator
from trainer_ranks import QUIET, Model

from memmap_buffer import Field, ReplayBuffer
from memmap_buffer.interop.trainers import Batches

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


@pytest.mark.parametrize("wrap", [lambda loader: loader, Batches], ids=["loader", "Batches"])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"prefetch": 2}, {"num_workers": 1}], ids=str)
def test_lightning_sees_the_batches_of_every_epoch(buffer, tmp_path, wrap, options):
    seen = fit(Model(), wrap(loader(buffer, **options)), tmp_path)
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


def test_lightning_predicts_on_what_it_does_not_take_apart(buffer, tmp_path):
    trainer = lightning.Trainer(default_root_dir=tmp_path, **QUIET)
    predicted = trainer.predict(Model(), Batches(loader(buffer, shuffle=False)))
    assert [batch.tolist() for batch in predicted] == numbers_of(loader(buffer, shuffle=False))


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


def test_accelerate_gives_back_what_is_no_dataloader(buffer):
    batches = Batches(loader(buffer))
    assert Accelerator(cpu=True).prepare(batches) is batches
    assert len(batches) == 12


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lightning", "accelerate"])
def test_two_processes_share_every_epoch(buffer, tmp_path, how):
    buffer.close()
    script = Path(__file__).with_name("trainer_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run([*launch, str(tmp_path / "b"), str(tmp_path), how], check=True, capture_output=True, timeout=250)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [len(seen) for seen in ranks] == [12, 12]
    for epoch in range(2):
        numbers = [n for seen in ranks for batch in seen[6 * epoch : 6 * epoch + 6] for n in batch]
        assert sorted(numbers) == [100 * episode + t for episode in range(4) for t in range(12)]


def test_the_place_in_an_epoch_is_kept_beside_the_model(buffer):
    batches = Batches(loader(buffer))
    expected = numbers_of(loader(buffer))
    epoch = iter(batches)
    first = [next(epoch)["number"].tolist() for _ in range(5)]
    resumed = Batches(loader(buffer))
    resumed.load_state_dict(batches.state_dict())
    assert first + numbers_of(resumed) == expected


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
    torch._dynamo.reset()
