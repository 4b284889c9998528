"""`format="numpy"`: the same draws as arrays; and what of it must not need torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import flat
from torch.utils.data import DataLoader

from memmap_buffer import Advantages, ConcatBuffer, Normalize, Offsets, Prioritized, Returns, Scale, SchemaError, Window

KINDS = {
    "episodes": {"return_mask": True},
    "timesteps": {"timestep_level": True, "return_indices": True},
    "transitions": {"n_steps": 3, "gamma": 0.9, "sequence_fields": ["reward", "text"], "expand_scalars": True},
    "windows": {"view": Window(4, stride=2), "filter_fields": {"t": (1, None)}},
    "offsets": {"view": Offsets(observation=(-1, 0), half=(0, 2)), "fieldname_map": {"half": "action"}},
    "crops": {"window_length": 3},
    "by priority": {"timestep_level": True, "prioritized": True},
    "ragged": {"ragged": True},
}
by_step = pytest.mark.parametrize("how", [KINDS["timesteps"], KINDS["transitions"]], ids=["timesteps", "transitions"])
each_kind = pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)


def same(array, tensor):
    """Whether an array has the values, shape and dtype of what the other format gives for it."""
    if isinstance(array, list):
        rows = tensor if isinstance(tensor, list) else tensor.unbind()
        return all(same(a, b) for a, b in zip(array, rows, strict=True))
    if not isinstance(tensor, torch.Tensor):
        return array.dtype.kind == "U" and array.tolist() == tensor
    wanted = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return array.dtype == wanted.numpy().dtype and np.array_equal(array, wanted.numpy())


def assert_alike(arrays, tensors):
    arrays, tensors = flat(arrays), flat(tensors)
    assert arrays.keys() == tensors.keys()
    for key, array in arrays.items():
        assert same(array, tensors[key]), key


@each_kind
def test_a_sample_has_the_same_values_as_arrays(recorded, how):
    buffer = recorded()
    assert_alike(buffer.sample(7, seed=3, format="numpy", **how), buffer.sample(7, seed=3, **how))


@pytest.mark.parametrize("how", [KINDS[name] for name in ("episodes", "timesteps", "transitions", "windows")])
def test_so_have_batches_and_items_of_a_dataset(recorded, how):
    buffer = recorded()
    assert_alike(buffer.batch([2, 0, -1], format="numpy", **how), buffer.batch([2, 0, -1], **how))
    dataset, other = buffer.dataset(format="numpy", **how), buffer.dataset(**how)
    assert len(dataset) == len(other)
    for i in (0, 2, -1):
        item, wanted = flat(dataset[i]), flat(other[i])
        assert item.keys() == wanted.keys()
        for key, value in item.items():
            value, want = np.asarray(value), wanted[key]
            assert value.tolist() == (want.tolist() if isinstance(want, torch.Tensor) else want), key


def assert_loaders_alike(buffer, how, **more):
    arrays = list(buffer.dataloader(5, format="numpy", shuffle=True, seed=5, **how, **more))
    for got, want in zip(arrays, buffer.dataloader(5, shuffle=True, seed=5, **how), strict=True):
        assert_alike(got, want)


@each_kind
def test_a_loader_gives_the_same_batches_as_arrays(recorded, how):
    assert_loaders_alike(recorded(), how)


@by_step
@pytest.mark.parametrize("more", [{"num_workers": 1}, {"prefetch": 1}], ids=["worker", "thread"])
def test_so_it_does_by_a_worker_and_by_a_thread(recorded, how, more):
    assert_loaders_alike(recorded(), how, **more)


def test_a_batch_of_a_worker_may_be_kept_and_written_to(recorded):
    loader = recorded().dataloader(2, timestep_level=True, format="numpy", num_workers=1)
    kept = list(loader)
    before = [batch["t"].copy() for batch in kept]
    kept[0]["reward"][:] = -1
    list(loader)
    assert all(np.array_equal(batch["t"], t) for batch, t in zip(kept, before, strict=True))
    assert kept[1]["reward"].min() > 0


def test_a_dataset_of_arrays_goes_into_a_loader_of_the_librarys_and_of_pytorchs(recorded):
    buffer = recorded()
    dataset = buffer.dataset(timestep_level=True, format="numpy", include_metadata=False)
    assert not isinstance(dataset, torch.utils.data.Dataset)
    (batch,) = buffer.dataloader(99, dataset=dataset)
    assert isinstance(batch["t"], np.ndarray)
    batch = next(iter(DataLoader(dataset, batch_size=4)))  # PyTorch's own collate makes tensors of arrays
    assert batch["t"].tolist() == [0, 1, 2, 0]
    assert batch["text"] == ["0:0", "0:1", "0:2", "1:0"]


def test_named_tuples_transforms_and_specs_are_of_arrays_too(recorded):
    buffer = recorded()
    statistics = buffer.statistics(["observation"])
    scale, returns = Scale("camera.left"), Returns()
    both = [buffer.batch(transform=[scale, returns, statistics.normalize()], format=f) for f in ("numpy", "torch")]
    assert isinstance(statistics.normalize(), Normalize)
    assert_alike(*both)
    batch = buffer.sample(4, n_steps=1, to_named_tuple=["reward", "next_observation"], format="numpy")
    assert batch._fields == ("reward", "next_observation")
    assert batch.next_observation.shape == (4, 3)
    assert buffer.batch_spec(4, timestep_level=True, format="numpy")["half"] == ((4,), "float32")


def test_several_folders_are_read_as_arrays(recorded):
    two = ConcatBuffer([recorded(name="a"), recorded((5, 2), name="b")])
    how = {"n_steps": 2, "return_indices": True, "seed": 1}
    assert_alike(two.sample(9, format="numpy", **how), two.sample(9, **how))


def test_without_a_seed_numpys_generator_gives_one(recorded):
    recorded()
    drawn = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        buffer = recorded(())
        drawn.append(buffer.sample(8, timestep_level=True, return_indices=True, format="numpy")["_indices"])
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda buffer: buffer.sample(2, format="jax"), "format: got 'jax', expected one of 'torch', 'numpy'"),
        (lambda buffer: buffer.sample(2, format="numpy", device="cpu"), "device: got 'cpu', but arrays stay"),
        (lambda buffer: buffer.batch(format="numpy", device="cpu"), "device: got 'cpu', but arrays stay"),
        (lambda buffer: buffer.dataloader(2, format="numpy", device="cpu"), "device: got 'cpu' with format='numpy'"),
    ],
)
def test_what_arrays_cannot_be_is_refused(recorded, call, match):
    with pytest.raises(SchemaError, match=match):
        call(recorded())


WITHOUT_TORCH = """
import sys
from memmap_buffer import ConcatBuffer, Prioritized, ReplayBuffer, Window
with ReplayBuffer({folder!r}, 4, 9, {{"x": "bfloat16", "name": ("U3", 2)}}) as buffer:
    for n in (4, 7):
        buffer.store_episode(x=range(n), name=[["a", "b"]] * n)
    how = dict(timestep_level=True, format="numpy", return_indices=True)
    batch = buffer.sample(8, **how)
    assert batch["x"].dtype == "float32" and batch["x"].tolist() == batch["_indices"][:, 1].tolist()
    assert buffer.sample(8, window_length=3, format="numpy")["x"].shape == (8, 3)
    assert buffer.batch([0, 10], **how)["name"].tolist() == [["a", "b"]] * 2
    assert buffer.batch(batch["_indices"], view=Window(2), format="numpy")["x"].shape == (8, 2)
    assert [item["x"].item() for item in buffer.dataset(**how)] == [*range(4), *range(7)]
    drawn = buffer.sample(8, prioritized=Prioritized(), **how)
    buffer.update_priorities(drawn["_indices"], drawn["x"])
    assert ConcatBuffer([buffer]).sample(2, **how)["x"].shape == (2,)
    print(buffer.dataset(**how), "torch" in sys.modules)
"""


def test_reading_arrays_does_not_import_torch(tmp_path):
    code = WITHOUT_TORCH.format(folder=str(tmp_path / "buffer"))
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip().endswith("False")


def test_priorities_are_learned_from_batches_of_arrays(recorded):
    buffer = recorded()
    how = {"timestep_level": True, "prioritized": Prioritized(epsilon=0, alpha=1), "format": "numpy"}
    batch = buffer.sample(64, **how)
    assert buffer.update_priorities(batch["_indices"], np.float32(batch["t"] == 1)) == 0
    assert set(buffer.sample(64, seed=1, **how)["t"].tolist()) == {1}


@pytest.mark.parametrize("format", ["numpy", "torch"])
def test_a_ragged_item_is_the_whole_sequence_of_its_episode(recorded, format):
    dataset = recorded((3, 4, 7)).dataset(format=format, ragged=True)
    for items in ([dataset[i] for i in range(3)], dataset.__getitems__([0, 1, 2])):
        assert [np.asarray(item["t"]).tolist() for item in items] == [list(range(n)) for n in (3, 4, 7)]
        assert [len(item["text"]) for item in items] == [3, 4, 7]


@pytest.mark.parametrize("format", ["numpy", "torch"])
def test_transforms_of_values_take_ragged_sequences_and_those_over_time_refuse_them(recorded, format):
    buffer = recorded((3, 4))
    for transform in (Scale("t", 4), Normalize({"t": (np.float64(0), np.float64(4))}, keep_padding=True)):
        found = buffer.batch(format=format, ragged=True, transform=transform)["t"]
        rows = found if format == "numpy" else found.unbind()
        assert [row.tolist() for row in rows] == [[0, 0.25, 0.5], [0, 0.25, 0.5, 0.75]]
    for transform in (Returns(), Advantages("reward", terminated=None)):
        with pytest.raises(SchemaError, match="leave ragged=True out"):
            buffer.batch(format=format, ragged=True, transform=transform)
