"""What crosses from worker processes: every batch as it was made, in few blocks, none overwritten while it is held."""

import collections
import functools
import multiprocessing
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import assert_same, flat
from hypothesis import given
from hypothesis import strategies as st
from inside import blocks_at, blocks_kept
from profiles import examples
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import default_collate

from memmap_buffer import SchemaError
from memmap_buffer.loading.transport import (
    SPARE,
    TASK_BATCHES,
    TASK_BYTES,
    Arrivals,
    Blocks,
    Carrier,
    Leaf,
    Packing,
    Task,
    Tasks,
    Unpacking,
    lend,
    map_leaves,
)
from memmap_buffer.views.memory_pool import ALIGN

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
METHODS = [method for method in ("fork", "spawn", "forkserver") if method in multiprocessing.get_all_start_methods()]
DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.complex128]
Pair = collections.namedtuple("Pair", "left right")


def packed(batch):
    """A batch after it was packed into a block and unpacked from it, and the block's bytes."""
    packing = Packing()
    shipped = packing.add(batch)
    memory = torch.full((packing.nbytes,), 7, dtype=torch.uint8)
    packing.copy_to(memory)
    return map_leaves(shipped, Leaf, Unpacking(memory)), memory


def tensors():
    def make(shape, dtype, seed):
        return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return st.builds(make, st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.integers(0, 1000))


LEAVES = tensors() | st.text(max_size=3) | st.integers() | st.none() | st.lists(st.text(max_size=3))
BATCHES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
)


def assert_identical(got, expected):
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_identical(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_identical(a, b)
    else:
        assert got == expected


# Packing


@examples(150)
@given(BATCHES)
def test_any_nested_batch_comes_out_as_it_went_in(batch):
    assert_identical(packed(batch)[0], batch)


@examples(50)
@given(st.lists(tensors(), min_size=1, max_size=6))
def test_tensors_are_aligned_apart_from_each_other_and_from_the_first_bytes(batch):
    got, memory = packed(batch)
    ranges = sorted((t.data_ptr() - memory.data_ptr(), t.nbytes) for t in got if t.numel())
    assert all(start % ALIGN == 0 and start >= ALIGN for start, _ in ranges)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(ranges))
    assert memory[:ALIGN].unique().tolist() == [7]


def test_a_tensor_in_another_order_of_memory_keeps_it():
    image = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    batch = [
        image.to(memory_format=torch.channels_last),
        image.permute(3, 0, 2, 1),
        image[..., ::2],
        image.expand(2, -1, -1, -1),
    ]
    got, _ = packed(batch)
    assert_identical(got, batch)
    assert got[0].is_contiguous(memory_format=torch.channels_last)
    assert got[1].stride() == batch[1].stride()


def test_what_is_no_plain_tensor_in_memory_is_left_as_it_is():
    odd = [
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64).conj(),
    ]
    packing = Packing()
    assert all(a is b for a, b in zip(packing.add(odd), odd, strict=True))
    assert packing.nbytes == ALIGN


def test_dicts_of_another_class_keep_it():
    ordered = collections.OrderedDict(b=torch.ones(2), a=[torch.zeros(1)])
    counted = collections.defaultdict(list, x=torch.ones(1))
    got, _ = packed([ordered, counted])
    assert_identical(got, [ordered, counted])
    assert got[1]["new"] == []


# Blocks


def test_a_block_is_given_back_by_a_collection_in_the_middle_of_a_trace():
    memory = torch.ones(8192, dtype=torch.uint8)
    held = [lend(memory, 5000)]
    with FakeTensorMode():  # as `torch.compile` traces
        held.clear()
    assert memory[0] == 0 and memory[1:].all()


def test_a_block_is_taken_again_only_when_the_other_side_let_go_of_it():
    blocks = Blocks()
    number, memory, new = blocks.take(5000)
    assert new and memory.is_shared() and memory.nbytes >= 5000
    lent = lend(memory, 5000)
    second, _, new = blocks.take(100)
    assert new and second != number
    part = lent[70:80].numpy()[2:]
    del lent
    assert blocks.take(100)[0] not in (number, second)
    del part
    assert blocks.take(4000)[::2] == (number, False)


def _drop(holder, out):
    out.put(len(holder.pop()))


def test_a_forked_child_that_drops_what_it_inherited_gives_nothing_back():
    blocks, context = Blocks(), multiprocessing.get_context("fork")
    number, memory, _ = blocks.take(5000)
    holder, out = [lend(memory, 5000)], context.SimpleQueue()
    child = context.Process(target=_drop, args=(holder, out))
    child.start()
    child.join()
    assert out.get() == 5000
    assert blocks.take(5000)[0] != number
    holder.clear()
    assert blocks.take(5000)[0] == number


def test_unused_blocks_are_let_go_of_but_for_a_few():
    blocks = Blocks()
    taken = [blocks.take(size) for size in (10_000, 50_000, 20_000, 40_000, 30_000)]
    assert blocks.drop_spare() == ()
    for _, memory, _ in taken:
        memory[0] = 0
    assert set(blocks.drop_spare()) == {number for number, memory, _ in taken if memory.nbytes < 40_000}
    assert {blocks.take(30_000)[0] for _ in range(SPARE)} == {taken[1][0], taken[3][0]}


class Squares:
    """A dataset whose batch of `[n]` is n items of the number n."""

    def by_anchors(self):
        return self

    def __getitems__(self, anchors):
        (n,) = anchors
        if n == 13:
            raise ValueError("thirteen")
        return {"n": torch.full((n,), n), "square": [torch.full((n, n), n * n), str(n)]}


def shipments(tasks, carrier):
    return (carrier.__getitems__(task) for task in tasks)


@examples(40)
@given(st.lists(st.integers(1, 60).filter(lambda n: n != 13), max_size=60), st.integers(0, 1000))
def test_batches_arrive_in_order_and_none_that_is_held_is_overwritten(numbers, seed):
    carrier, tasks, chance, held = (
        Carrier(Squares(), lambda batch: batch),
        Tasks([[n] for n in numbers], 1),
        random.Random(seed),
        [],
    )
    arrived = []
    for batch in Arrivals(shipments(tasks, carrier), tasks, pin=False):
        arrived.append(len(batch["n"]))
        held.append(chance.choice([batch, {"n": batch["n"][:1], "square": [batch["square"][0][-1:].numpy(), ""]}]))
        del batch
        held = [old for old in held if chance.random() < 0.7]
        for old in held:
            n = int(old["n"][0])
            assert (np.asarray(old["n"]) == n).all() and (np.asarray(old["square"][0]) == n * n).all()
    assert arrived == numbers


def test_small_batches_cross_many_at_a_time_and_large_ones_alone():
    tasks = Tasks([[i] for i in range(200)], 1)
    for nbytes, size in ((10, TASK_BATCHES), (TASK_BYTES // 4, 4), (10 * TASK_BYTES, 1)):
        tasks.learn(nbytes)
        epoch = list(tasks)
        assert {len(task.batches) for task in epoch[:-1]} == {size}
        assert [batch for task in epoch for batch in task.batches] == [[i] for i in range(200)]


@pytest.mark.parametrize(("batches", "workers"), [(1, 1), (7, 2), (20, 2), (100, 3), (1000, 4)])
def test_an_epoch_of_few_batches_is_still_shared_by_all_workers(batches, workers):
    tasks = Tasks([[i] for i in range(batches)], workers)
    tasks.learn(1)
    assert len(list(tasks)) >= min(batches, 8 * workers)


def test_a_loop_that_drops_its_batches_needs_few_blocks():
    carrier, tasks = Carrier(Squares(), lambda batch: batch), Tasks([[50]] * 2000, 1)
    made = []

    def watched():
        for shipment in shipments(tasks, carrier):
            if shipment.memory is not None:
                made.append(shipment.block)
            yield shipment

    for batch in Arrivals(watched(), tasks, pin=False):
        assert batch["n"][0] == 50
    assert len(made) <= 4


def test_both_sides_know_the_same_blocks_and_a_new_epoch_begins_with_none():
    carrier, tasks = Carrier(Squares(), lambda batch: batch), Tasks([[n] for n in (5, 50, 5, 40, 50)] * 20, 1)
    for _ in range(2):
        arrivals, hoard = Arrivals(shipments(tasks, carrier), tasks, pin=False), []
        for i, batch in enumerate(arrivals):
            hoard = [*hoard, batch] if i % 30 else []
            assert blocks_at(arrivals) == blocks_kept(carrier)
    carrier.__getitems__(Task(99, [[1]]))
    assert len(blocks_kept(carrier)) == 1


def test_a_failing_batch_raises_in_its_own_place_and_the_others_of_its_task_still_come():
    carrier, tasks = Carrier(Squares(), lambda batch: batch), Tasks([[n] for n in (11, 12, 13, 14, *[1] * 60)], 1)
    tasks.learn(1)
    arrivals = Arrivals(shipments(tasks, carrier), tasks, pin=False)
    assert [len(next(arrivals)["n"]) for _ in range(2)] == [11, 12]
    with pytest.raises(ValueError, match=r"Caught ValueError in DataLoader worker process 0(.|\n)*thirteen"):
        next(arrivals)
    assert len(next(arrivals)["n"]) == 14
    assert len(list(arrivals)) == 60


# Through the library


def scaled(batch, by=2):
    """A transform that a spawned worker can import."""
    tiles = batch["camera"]["left"].unfold(1, 2, 1).permute(0, 3, 1, 2)  # in an order of memory of its own
    return batch | {"t": batch["t"] * by, "tiles": tiles, "pair": Pair(batch["half"], [batch["number"], None])}


def stacked(items):
    """A user's own collate function, for items one by one."""
    return Pair(default_collate([{"t": item["t"], "half": item["half"]} for item in items]), [i["text"] for i in items])


def noisy(batch):
    return batch | {"noise": torch.rand(len(batch["t"]))}


def failing(batch):
    if (batch["t"] == 5).any():
        raise ArithmeticError("a transform that fails")
    return batch


@pytest.mark.parametrize("method", METHODS)
def test_transforms_and_collate_functions_run_in_workers_of_every_kind(recorded, method):
    buffer = recorded()
    for options in ({"transform": functools.partial(scaled, by=3)}, {"collate_fn": stacked}):
        options |= {"timestep_level": True, "shuffle": True, "seed": 2}
        workers = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
        expected, loader = buffer.dataloader(4, **options), buffer.dataloader(4, **options, **workers)
        for _ in range(2):
            for a, b in zip(loader, expected, strict=True):
                assert_identical(a, b)


def test_a_transform_gives_the_same_by_sample_loader_and_dataset(recorded):
    buffer = recorded()
    options = {"timestep_level": True, "transform": scaled, "to_named_tuple": ("t", "tiles", "text")}
    first = next(iter(buffer.dataloader(4, **options)))
    assert first.t.tolist() == [0, 2, 4, 0]
    sampled = buffer.sample(18, **options, return_indices=True)
    assert sampled.t.remainder(2).sum() == 0 and sampled.tiles.shape[:2] == (18, 2)
    doubled = [2 * t for length in (3, 4, 5, 6) for t in range(length)]
    assert [item.t.item() for item in buffer.dataset(**options)] == doubled


def test_a_transform_that_is_none_or_returns_none_or_misses_a_name_is_refused(recorded):
    buffer = recorded()
    with pytest.raises(SchemaError, match="transform: got 3, expected a function"):
        buffer.dataset(transform=3)
    with pytest.raises(SchemaError, match="returned None, expected the batch; return it"):
        buffer.sample(2, timestep_level=True, transform=dict.clear)
    with pytest.raises(SchemaError, match="to_named_tuple: the batch has no 'nothing'; it has 'number'"):
        buffer.sample(2, timestep_level=True, transform=scaled, to_named_tuple=("t", "nothing"))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_random_transform_is_fixed_by_torchs_seed(recorded, num_workers):
    buffer, runs = recorded(), []
    for _ in range(2):
        torch.manual_seed(4)
        loader = buffer.dataloader(1, timestep_level=True, transform=noisy, num_workers=num_workers)
        runs.append([batch["noise"].item() for _ in range(2) for batch in loader])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 36


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_a_transform_is_raised_in_the_place_of_its_batch(recorded, num_workers):
    loader = recorded().dataloader(4, timestep_level=True, transform=failing, num_workers=num_workers)
    seen = 0
    with pytest.raises(ArithmeticError, match="a transform that fails"):
        for batch in loader:
            seen += len(batch["t"])
    assert seen == 16


def test_an_epoch_that_is_given_up_leaves_the_next_one_whole(recorded):
    loader = recorded().dataloader(2, timestep_level=True, num_workers=2, persistent_workers=True)
    expected = [batch["t"].tolist() for batch in recorded(name="same").dataloader(2, timestep_level=True)]
    held = []
    for stop in (1, 3, 9):
        batches = iter(loader)
        held.append([next(batches) for _ in range(stop)])
    assert [batch["t"].tolist() for batch in loader] == expected
    for batches in held:
        assert [batch["t"].tolist() for batch in batches] == expected[: len(batches)]


def test_batches_of_workers_are_held_and_changed_without_touching_each_other(recorded):
    held = list(recorded().dataloader(1, timestep_level=True, num_workers=2))
    for i, batch in enumerate(held):
        for tensor in flat(batch).values():
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(i % 2)
    assert all((batch["t"] == i % 2).all() and (batch["half"] == i % 2).all() for i, batch in enumerate(held))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", [None, "cuda"])
def test_batches_of_workers_are_pinned_and_moved(recorded, device):
    options = {"timestep_level": True, "shuffle": True, "seed": 1}
    buffer = recorded()
    loader = buffer.dataloader(4, **options, num_workers=1, pin_memory=True, device=device)
    for got, expected in zip(loader, buffer.dataloader(4, **options), strict=True):
        for key, value in flat(got).items():
            assert not isinstance(value, torch.Tensor) or (value.is_cuda if device else value.is_pinned()), key
        assert_same({k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in flat(got).items()}, flat(expected))
