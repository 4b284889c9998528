"""Loading in other processes: the same batches under every start method, and what travels there and back."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from multiprocessing import reduction

import numpy as np
import pytest
import torch
from conftest import assert_same, flat
from inside import sent_to_workers, set_inside
from torch.utils.data import DataLoader

from memmap_buffer import ConcatBuffer, ReplayBuffer, StaleEpisodeError, Timestep, Window

# Python 3.12 warns of every fork of a process with threads, and torch has some; torch also warns on a single core.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
METHODS = [method for method in ("fork", "spawn", "forkserver") if method in multiprocessing.get_all_start_methods()]
OPTIONS = {
    "n_steps": 3,
    "gamma": 0.9,
    "current_fields": ["number", "t", "camera", "half", "text"],
    "next_fields": ["observation"],
    "sequence_fields": ["reward", "text"],
    "return_indices": True,
}
NAMES = ("number", "t", "camera", "half", "text", "seq_text", "name", "_return", "_indices")
VIEWS = {
    "trajectory": {"return_mask": True, "return_indices": True},
    "timestep": {"timestep_level": True},
    "crop": {"window_length": 3},
    "window": {"view": Window(4)},
    "continue": {"view": Window(6, boundary="continue")},
    "n-step": OPTIONS,
}


def loader(buffer, num_workers=0, **more):
    options = {"batch_size": 4, "shuffle": True, "seed": 5, "num_workers": num_workers} | more
    if num_workers:
        options |= {"persistent_workers": options.get("persistent_workers", True)}
    return buffer.dataloader(**options)


def epochs(batches, count=2):
    return [batch for _ in range(count) for batch in batches]


def assert_same_batches(got, expected):
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, tuple):
            assert a._fields == b._fields
            a, b = a._asdict(), b._asdict()
        assert_same(a, b)


# The same batches


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_every_start_method_gives_the_same_named_tuples_filtered_by_a_lambda(recorded, method, num_workers):
    """Fault 37."""
    buffer, here = recorded(), os.getpid()

    def in_this_process(keep):
        def condition(column):
            assert os.getpid() == here, "a filter was evaluated in a worker"
            return keep(column)

        return condition

    options = OPTIONS | {
        "filter_meta": {"task_id": in_this_process(lambda column: column >= 0)},
        "filter_fields": {"t": in_this_process(lambda column: column > 0)},
        "to_named_tuple": NAMES,
    }
    expected = epochs(loader(buffer, **options))
    got = epochs(loader(buffer, num_workers, multiprocessing_context=method, **options))
    assert len(got) == 2 * 4
    assert_same_batches(got, expected)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_gives_the_same_batches_with_workers(recorded, view):
    buffer = recorded()
    expected = epochs(loader(buffer, **VIEWS[view]))
    for num_workers, persistent in ((1, False), (2, True)):
        more = {"multiprocessing_context": "fork", "persistent_workers": persistent}
        assert_same_batches(epochs(loader(buffer, num_workers, **more, **VIEWS[view])), expected)


@pytest.mark.parametrize("method", METHODS)
def test_several_folders_give_the_same_batches_with_workers(recorded, record, method):
    first, second = recorded((3, 4), name="a"), recorded((), name="b")
    record(second, 7, 5)
    both = ConcatBuffer([first, second.folder], weights=[0.25, 0.75])
    expected = epochs(loader(both, **VIEWS["n-step"]))
    assert_same_batches(epochs(loader(both, 1, multiprocessing_context=method, **VIEWS["n-step"])), expected)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # there may be nothing to pin it for
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pinned_memory_keeps_batches_and_named_tuples(recorded, num_workers):
    buffer = recorded()
    for options in (OPTIONS, OPTIONS | {"to_named_tuple": NAMES}):
        expected = epochs(loader(buffer, **options))
        assert_same_batches(epochs(loader(buffer, num_workers, pin_memory=True, **options)), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_batches_move_to_the_gpu(recorded):
    buffer = recorded()
    expected = epochs(loader(buffer, **OPTIONS))
    got = epochs(loader(buffer, 1, pin_memory=True, device="cuda", **OPTIONS))
    tensors = [value for batch in got for value in flat(batch).values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    for a, b in zip(got, expected, strict=True):
        assert_same({k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in flat(a).items()}, flat(b))


def test_batches_of_workers_are_fresh_and_writable(recorded):
    buffer = recorded()
    for batch in loader(buffer, 1, timestep_level=True):
        batch["number"].mul_(2)
    assert buffer.episode(3)["number"].tolist() == [3] * 6


# What is published meanwhile


@pytest.mark.parametrize("method", METHODS[:2])
def test_the_workers_of_a_loader_of_ones_own_see_what_refresh_found_or_say_how(recorded, record, method):
    buffer = recorded((3, 4))
    dataset = buffer.dataset(timestep_level=True)
    how = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": method}
    kept = DataLoader(dataset, persistent_workers=True, **how)
    assert sum(len(batch["t"]) for batch in kept) == 7
    record(buffer, 2, 5)
    assert sum(len(batch["t"]) for batch in kept) == 7
    dataset.refresh()
    with pytest.raises(
        IndexError, match=r"(?s)item 7: this worker's copy .* has 7.*make the DataLoader anew.*dataloader"
    ):
        list(kept)
    remedies = (
        DataLoader(dataset, **how),
        DataLoader(dataset, persistent_workers=True, **how),
        buffer.dataloader(2, timestep_level=True, num_workers=1, multiprocessing_context=method),
    )
    for other in remedies:
        assert sum(len(batch["t"]) for batch in other) == 12
    with pytest.raises(IndexError, match=r"item 12: the dataset has 12; call refresh\(\) to see newer ones"):
        dataset[12]


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_new_epoch_of_workers_sees_the_episodes_published_since(recorded, record, persistent_workers):
    buffer = recorded((3, 4))
    batches = loader(buffer, 2, timestep_level=True, shuffle=False, persistent_workers=persistent_workers)
    assert sum(len(batch["t"]) for batch in batches) == 7
    record(buffer, 2, 5)
    assert len(batches) == 3
    text = [text for batch in batches for text in batch["text"]]
    assert text == [f"{number}:{t}" for number, length in enumerate((3, 4, 5)) for t in range(length)]


def test_an_episode_that_is_gone_raises_in_the_main_process(recorded, record):
    buffer = recorded((5, 5), max_episodes=2, circular=True)
    dataset = buffer.dataset(timestep_level=True, on_stale="raise")
    sampler = iter(buffer.dataloader(4, dataset=dataset).batch_sampler)
    drawn = [next(sampler), next(sampler)]
    for number in (2, 3, 4):
        record(buffer, number, 5)
    with pytest.raises(StaleEpisodeError, match="were overwritten or cleared"):
        list(DataLoader(dataset, batch_sampler=drawn, num_workers=1))


# Crops in a DataLoader of the user's own, where no sampler of ours draws them


@pytest.fixture
def long_episodes(recorded):
    buffer = recorded((), max_timesteps=10_000, fields={"t": "int"}, meta_fields={})
    for _ in range(4):
        buffer.store_episode(t=np.arange(10_000))
    return buffer


def crop_starts(dataset):
    own = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork")
    return [batch["_start"].tolist() for batch in own]


def test_in_a_users_own_dataloader_crops_differ_between_workers_and_epochs(long_episodes):
    dataset = long_episodes.dataset(window_length=2)
    (first, second), again = crop_starts(dataset), crop_starts(dataset)
    assert first != second
    assert [first, second] != again


def test_torch_manual_seed_fixes_the_crops_of_a_users_own_dataloader(long_episodes):
    dataset, runs = long_episodes.dataset(window_length=2), []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([dataset[i]["_start"].item() for i in range(4)] + crop_starts(dataset))
    assert runs[0] == runs[1]


# Pickling


@pytest.mark.parametrize("view", VIEWS)
def test_a_pickled_dataset_gives_the_same_items(recorded, view):
    dataset = recorded().dataset(**VIEWS[view])
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == len(dataset)
    torch.manual_seed(0)
    expected = dataset.__getitems__([2, 0, 1]).data
    torch.manual_seed(0)
    assert_same(copy.__getitems__([2, 0, 1]).data, expected)


def test_a_dataset_pickles_as_a_path_without_its_data(recorded):
    """Fault 37; defect (I) of memmap-replay-buffer."""
    sizes = []
    for name, length in (("a", 2), ("b", 1000)):
        buffer = recorded((), name=name, max_timesteps=1000, fields={"x": ("float", (64,))}, meta_fields={})
        for _ in range(3):
            buffer.store_episode(x=np.ones((length, 64), np.float32))
        dataset = buffer.dataset(timestep_level=True)
        next(iter(DataLoader(dataset, batch_size=2)))  # the maps are open now, and must not travel
        sizes.append(len(pickle.dumps(dataset)))
    assert max(sizes) < 2**16
    assert abs(sizes[0] - sizes[1]) < 64  # numbers pickle to a byte more or less


def test_workers_of_a_loader_are_started_without_the_index(recorded):
    sizes = []
    for name, count in (("a", 2), ("b", 200)):
        buffer = recorded([2] * count, name=name, max_episodes=200)
        made = loader(buffer, 1, timestep_level=True)
        next(iter(made.dataset))
        sizes.append(len(pickle.dumps(sent_to_workers(made))))
    assert abs(sizes[0] - sizes[1]) < 64


@pytest.mark.parametrize(
    "method", [m if m == "spawn" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS[1:]]
)
def test_workers_that_are_started_with_an_index_map_it(recorded, monkeypatch, method):
    """Those of a DataLoader of one's own, and those of a loader with a filter that no worker can call."""
    set_inside(monkeypatch, shared_least=0)
    sizes, dump = [], reduction.dump

    def counted(obj, file, *more):
        dump(obj, file, *more)
        sizes.append(file.tell())

    monkeypatch.setattr(reduction, "dump", counted)
    for name, count in (("a", 3), ("b", 200)):
        buffer = recorded([2] * count, name=name, max_episodes=200)
        dataset = buffer.dataset(
            timestep_level=True, return_indices=True, filter_meta={"episode_lens": lambda n: n > 0}
        )
        options = {"batch_size": 64, "multiprocessing_context": method, "num_workers": 1}
        (first, *_) = DataLoader(dataset, **options)
        assert_same(first, dataset.__getitems__(range(len(first["_indices"]))).whole)
    assert abs(max(sizes[: len(sizes) // 2]) - max(sizes[len(sizes) // 2 :])) < 64


def test_a_pickled_dataset_reads_in_a_fresh_process(recorded, tmp_path):
    dataset = recorded().dataset(view=Timestep(("number", "t")), filter_meta={"task_id": 1}, return_indices=True)
    (tmp_path / "dataset.pickle").write_bytes(pickle.dumps(dataset))
    program = (
        "import pickle, pathlib; dataset = pickle.loads(pathlib.Path('dataset.pickle').read_bytes()); "
        "print([dataset[i]['_indices'].tolist() for i in range(len(dataset))])"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str([[n, t] for n, length in ((1, 4), (3, 6)) for t in range(length)])


def test_a_dataset_with_callable_filters_pickles_without_them(recorded):
    dataset = recorded().dataset(
        timestep_level=True,
        filter_meta={"task_id": lambda column: column == 1},
        filter_fields={"t": lambda column: column > 1},
    )
    copy = pickle.loads(pickle.dumps(dataset))
    expected = [(1, 2), (1, 3), (3, 2), (3, 3), (3, 4), (3, 5)]
    assert [(copy[i]["number"], copy[i]["t"]) for i in range(len(copy))] == expected


def test_a_batch_as_a_named_tuple_pickles(recorded):
    batch = recorded().sample(2, timestep_level=True, to_named_tuple=("t", "name"))
    copy = pickle.loads(pickle.dumps(batch))
    assert copy._fields == batch._fields == ("t", "name")
    assert_same(copy._asdict(), batch._asdict())


# Memory: what is private to a process, beyond what it has with torch alone. The pages of the files are shared.

MEMORY = """
import multiprocessing, pathlib, re, sys, threading
import torch

def private(pid="self"):
    return int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) / 1024

(torch.ones(500, 500) @ torch.ones(500, 500)).sum()
idle = private()
from memmap_buffer import ReplayBuffer
folder, method, prefetch = sys.argv[1], sys.argv[2], int(sys.argv[3])
workers = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True} if method else {}
if __name__ == "__main__":
    buffer = ReplayBuffer.from_folder(folder, read_only=True)
    loader = buffer.dataloader(256, n_steps=1, shuffle=True, seed=0, prefetch=prefetch, **workers)
    most = [0, 0]
    for epoch in range(4):
        for i, batch in enumerate(loader):
            if i % 20 == 0:
                children = [private(child.pid) for child in multiprocessing.active_children()]
                most = [max(most[0], private()), max(most[1], *children)] if children else [max(most[0], private()), 0]
    print(*(round(value - idle, 1) for value in most))
"""
LIMIT = 60  # MB


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two stores of images of 3 KB, one of them with 30 times as many episodes, 100 times as many of a few steps."""
    folder = tmp_path_factory.mktemp("stores")
    for name, long, short in (("small", 4, 20), ("large", 120, 2000)):
        fields = {"image": ("uint8", (32, 32, 3)), "t": "int", "text": "U8"}
        with ReplayBuffer(folder / name, long + short, 100, fields) as buffer:
            for n in range(long + short):
                length = 100 if n < long else 2
                rows = {"image": np.full((length, 32, 32, 3), n % 251, np.uint8), "t": np.arange(length)}
                buffer.store_episode(**rows, text=np.full(length, f"{n}"))
    return folder


def private_megabytes(store, tmp_path, method="", prefetch=0):
    (tmp_path / "memory.py").write_text(MEMORY)
    arguments = [sys.executable, "memory.py", store, method, prefetch]
    run = subprocess.run(list(map(str, arguments)), cwd=tmp_path, capture_output=True, text=True, check=True)
    return [float(value) for value in run.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
@pytest.mark.parametrize(
    ("method", "prefetch"),
    [
        ("", 0),
        ("", 3),
        ("fork", 0),
        *(pytest.param(one, 0, marks=pytest.mark.slow) for one in METHODS if one != "fork"),
    ],
)
def test_private_memory_of_a_loader_and_of_its_workers_stays_small(stores, tmp_path, method, prefetch):
    assert max(private_megabytes(stores / "large", tmp_path, method, prefetch)) < LIMIT


@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
def test_private_memory_does_not_grow_with_the_store(stores, tmp_path):
    small, large = (private_megabytes(stores / name, tmp_path, METHODS[0]) for name in ("small", "large"))
    assert all(b < a + LIMIT / 6 for a, b in zip(small, large, strict=True))
