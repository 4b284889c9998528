"""Lightning's data module over a folder: its parts, its seed, and a run that goes on where its checkpoint stood."""

import pickle
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainer_ranks import QUIET, Model

from memmap_buffer import ReplayBuffer, SchemaError
from memmap_buffer.interop.lightning import EpisodeDataModule

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning's, with torch 2.13
]
EPISODES, LENGTH = 30, 6
SPLIT = {"train": 0.5, "val": 0.25, "test": 0.25}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with ReplayBuffer(
        tmp_path / "b", 40, LENGTH, {"observation": ("float", 3), "number": "int", "reward": "float"}
    ) as b:
        for episode in range(EPISODES):
            add(b, episode)
    return tmp_path / "b"


def add(buffer: ReplayBuffer, episode: int) -> None:
    numbers = [LENGTH * episode + t for t in range(LENGTH)]
    buffer.store_episode(observation=[[n, 0, 1] for n in numbers], number=numbers, reward=[0.1] * LENGTH)


def module(folder: Any, **options: Any) -> EpisodeDataModule:
    return EpisodeDataModule(folder, 4, **{"timestep_level": True, "split": SPLIT, "seed": 5} | options)


def trainer(folder: Path, **options: Any) -> lightning.Trainer:
    options = {"max_epochs": 2, "default_root_dir": folder, "num_sanity_val_steps": 0, **QUIET} | options
    return lightning.Trainer(**options)


def numbers(loader: Any) -> list[list[int]]:
    return [batch["number"].tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [n for batch in batches for n in batch]


class Seeing(Model):
    """It keeps the batches of each part apart."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[list[int]] = []

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated.append(batch["number"].tolist())

    test_step = validation_step


def test_each_episode_is_in_one_part_and_stays_there(folder: Path, tmp_path: Path) -> None:
    model, data = Seeing(), module(folder)
    trainer(tmp_path).fit(model, data)
    assert data.buffer is None
    epochs, validated = (flat(model.seen), flat(model.validated))
    half = len(epochs) // 2
    assert sorted(epochs[:half]) == sorted(epochs[half:]) and epochs[:half] != epochs[half:]
    assert validated == 2 * sorted(set(validated))
    tested = Seeing()
    trainer(tmp_path).test(tested, data, verbose=False)
    parts = [set(epochs), set(validated), set(flat(tested.validated))]
    assert sorted(n for part in parts for n in part) == list(range(EPISODES * LENGTH))
    predicted = trainer(tmp_path).predict(Model(), data)
    assert [n for batch in predicted for n in batch.tolist()] == list(range(EPISODES * LENGTH))
    with ReplayBuffer.from_folder(folder) as buffer:
        add(buffer, EPISODES)
        for name, part in zip(SPLIT, parts, strict=True):
            later = set(flat(numbers(getattr(module(buffer), f"{name}_dataloader")())))
            assert part <= later and {n // LENGTH for n in later - part} <= {EPISODES}


def test_options_are_of_all_parts_or_of_one(folder: Path) -> None:
    data = module(folder, val={"timestep_level": None}, train={"shuffle": False}, fields=("number",))
    assert flat(numbers(data.train_dataloader())) == sorted(flat(numbers(data.train_dataloader())))
    batch = next(iter(data.val_dataloader()))
    assert batch["number"].shape[1] == LENGTH
    assert "reward" not in batch


def test_a_run_goes_on_in_the_middle_of_an_epoch_with_the_seed_and_split_of_the_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    whole = Seeing()
    trainer(tmp_path).fit(whole, module(folder))
    at = len(whole.seen) // 2 + 3

    class Saving(Seeing):
        def on_train_batch_end(self, *_: Any) -> None:
            if len(self.seen) == at:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")
                raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="1"):
        trainer(tmp_path).fit(Saving(), module(folder))
    model = Seeing()
    other = module(folder, seed=1, split={"train": 1.0}, split_seed=3)
    trainer(tmp_path).fit(model, other, ckpt_path=tmp_path / "middle.ckpt")
    assert model.seen == whole.seen[at:]
    assert other.state_dict() == module(folder).state_dict()


def test_parts_that_are_left_out_have_no_loader(folder: Path, tmp_path: Path) -> None:
    model = Seeing()
    trainer(tmp_path, max_epochs=1).fit(model, module(folder, split={"train": 1.0}))
    assert sorted(flat(model.seen)) == list(range(EPISODES * LENGTH))
    assert model.validated == []
    with pytest.raises(MisconfigurationException, match="val_dataloader"):
        trainer(tmp_path).validate(Seeing(), pickle.loads(pickle.dumps(module(folder, split={"train": 1.0}))))
    with pytest.raises(SchemaError, match="'training', expected some of train, val, test, predict"):
        module(folder, split={"training": 1})


def test_a_loader_pickles_in_the_middle_of_an_epoch_though_lightning_records_what_it_is_assigned(folder: Path) -> None:
    """As within `Trainer.fit`, and, since Lightning does not take it back then, after one that failed."""
    with _replace_dunder_methods(DataLoader):
        loader = ReplayBuffer.from_folder(folder, read_only=True).dataloader(4, timestep_level=True, prefetch=2)
        batches = iter(loader)
        first = next(batches)["number"].tolist()
        assert next(iter(pickle.loads(pickle.dumps(loader))))["number"].tolist() == first


def test_it_pickles_as_the_name_of_the_folder(folder: Path) -> None:
    data = pickle.loads(pickle.dumps(module(folder)))
    assert numbers(data.train_dataloader()) == numbers(module(folder).train_dataloader())


def test_a_buffer_that_is_open_stays_open(folder: Path, tmp_path: Path) -> None:
    with ReplayBuffer.from_folder(folder) as buffer:
        trainer(tmp_path, max_epochs=1).fit(Seeing(), module(buffer))
        add(buffer, EPISODES)
        assert len(buffer) == EPISODES + 1
