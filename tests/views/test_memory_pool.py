"""Memory for batches comes back when nothing refers to it any more, and never sooner."""

import gc
import multiprocessing
import random
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inside import folders_of, pool_lock
from profiles import examples

from memmap_buffer import ConcatBuffer, ReplayBuffer
from memmap_buffer.views.memory_pool import ALIGN, KEEP, SMALL, Pool

SHAPE = (256, 1024)  # a quarter of a megabyte


def address(array):
    return array.__array_interface__["data"][0]


def filled(pool, value, shape=SHAPE, dtype=np.uint8):
    array = pool.empty(shape, dtype)
    array[...] = value
    return array


HOLDS = {
    "the array": lambda a: a,
    "a row": lambda a: a[3],
    "a slice": lambda a: a[5:9, ::2],
    "a view of a view": lambda a: a[1:].reshape(-1)[7:].view(np.int8),
    "a view of another class": lambda a: a.view(np.recarray).view(np.ndarray)[2:4],
    "a transposed view": lambda a: a.T,
    "a memoryview": lambda a: memoryview(a)[1:],
    "a tensor": torch.from_numpy,
    "a row of a tensor": lambda a: torch.from_numpy(a)[4],
    "a tensor of other bits": lambda a: torch.from_numpy(a).view(torch.int16)[:, 3],
    "the storage of a tensor": lambda a: torch.from_numpy(a).untyped_storage(),
    "an array over a tensor": lambda a: torch.from_numpy(a)[2:].numpy(),
    "an array over a row of a tensor": lambda a: np.asarray(torch.from_numpy(a)[2])[5:],
    "a tensor by dlpack": lambda a: torch.from_dlpack(torch.from_numpy(a)[1:]),
    "a detached tensor": lambda a: torch.from_numpy(a).detach()[:2],
    "a tensor over a buffer": lambda a: torch.frombuffer(a, dtype=torch.uint8, offset=64),
    "a tensor in a closure": lambda a: (lambda tensor: lambda: tensor)(torch.from_numpy(a)[7]),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_memory_is_not_given_out_again_while_anything_refers_to_it(hold):
    pool = Pool()
    array = filled(pool, 1)
    start, held = address(array), hold(array)
    del array
    others = [filled(pool, 2) for _ in range(4)]
    assert start not in map(address, others)
    assert pool.lent >= 5 * np.prod(SHAPE)
    del held
    gc.collect()
    assert address(filled(pool, 3)) == start


def test_a_copy_does_not_hold_memory():
    pool = Pool()
    array = filled(pool, 1)
    start, copies = address(array), [array.copy(), torch.from_numpy(array).clone(), array.tolist()]
    del array
    assert address(filled(pool, 2)) == start
    assert copies[0].max() == copies[1].max() == 1


@examples(60)
@given(st.integers(0, 2**32), st.integers(0, 3 * 2**20))
def test_no_held_array_ever_changes_whatever_is_dropped_in_between(seed, keep):
    pool, chance, held = Pool(keep), random.Random(seed), {}
    for number in range(60):
        shape = (chance.choice([1, 128, 256, 300, 512]), chance.choice([512, 1024]))
        array = filled(pool, number, shape, np.int32)
        held[number] = chance.choice([lambda a: a, lambda a: a[1:], lambda a: torch.from_numpy(a)[::3].numpy()])(array)
        del array
        for gone in chance.sample(sorted(held), chance.randrange(len(held))):
            del held[gone]
        assert all((view == value).all() for value, view in held.items())
    lent = pool.lent
    assert pool.unused <= max(keep, lent)
    held.clear()
    assert (pool.lent, pool.unused <= keep) == (0, True)


@pytest.mark.parametrize("dtype", ["u1", "<f4", "<i8", "?", "<U5", "c16"])
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (7,), (300, 1000), (513, 3, 111)])
def test_an_array_has_the_shape_and_dtype_asked_for_and_is_aligned(shape, dtype):
    pool = Pool()
    for _ in range(3):
        array = pool.empty(shape, dtype)
        assert (array.shape, array.dtype.str[1:]) == (shape, np.dtype(dtype).str[1:])
        assert array.flags.writeable and array.flags.c_contiguous and type(array) is np.ndarray
        assert array.nbytes < SMALL or address(array) % ALIGN == 0
        array[...] = array.dtype.type()


def test_batches_of_nearly_equal_length_share_memory():
    pool, seen = Pool(), set()
    for length in range(960, 1024):
        seen.add(address(pool.empty((256, length), np.uint8)))
    assert len(seen) <= 4


def test_what_lies_unused_is_bounded_by_what_is_in_use():
    pool = Pool()
    hoard = [pool.empty((1 << 20,), np.uint8) for _ in range(200)]
    assert pool.lent >= 200 << 20
    while hoard:
        hoard.pop()
        assert pool.unused <= max(KEEP, pool.lent)
    assert pool.lent == 0
    large = pool.empty((KEEP,), np.uint16)
    assert pool.lent >= 2 * KEEP
    del large
    assert pool.unused <= KEEP


def test_threads_never_share_memory():
    pool, wrong = Pool(), []

    def work(value):
        for _ in range(300):
            arrays = [filled(pool, value) for _ in range(3)]
            wrong.extend(array for array in arrays if (array != value).any())

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.lent == 0


def test_a_pool_that_is_busy_elsewhere_gives_fresh_memory_and_takes_back_later():
    pool = Pool()
    array = filled(pool, 1)
    with pool_lock(pool):  # as in a child that was forked in the middle, or a collection within `empty`
        assert filled(pool, 2).shape == SHAPE
        start = address(array)
        del array
    assert pool.lent == 0
    assert address(filled(pool, 3)) == start


# Through the library


@pytest.fixture
def images(recorded):
    """`images(name)`: 3 episodes of 40 images; every byte of one is the number of the episode + its timestep."""

    def make(name="images"):
        fields = {"t": "int", "image": ("uint8", (3, 32, 32))}
        buffer = recorded((), name=name, fields=fields, meta_fields={}, max_timesteps=40)
        for _ in range(3):
            buffer.store_episode(
                t=np.arange(40), image=np.broadcast_to(np.arange(40)[:, None, None, None], (40, 3, 32, 32))
            )
        return buffer

    return make


def right(batch, prefix=""):
    rows = batch[f"{prefix}image"].flatten(1)
    return bool((rows == batch[f"{prefix}t"][:, None]).all())


def test_no_batch_that_is_still_held_is_overwritten_by_a_later_one(images):
    buffer, chance = images(), random.Random(1)
    batches = (
        batch for _ in range(10**6) for batch in buffer.dataloader(60, timestep_level=True, shuffle=True, seed=0)
    )
    held = []
    for i in range(80):
        batch = buffer.sample(64, n_steps=2) if i % 2 else next(batches)
        held.append(batch if i % 3 else {"t": batch["t"][10:20], "image": batch["image"][10:20].numpy()})
        del batch
        held = [old for old in held if chance.random() < 0.8]
        for old in held:
            assert right({key: torch.as_tensor(value) for key, value in old.items()})


def test_a_loop_that_drops_its_batches_uses_the_same_memory_again(images):
    both = ConcatBuffer([images("a"), images("b")])
    for buffer in (images(), both):
        seen = set()
        for _ in range(200):
            batch = buffer.sample(64, n_steps=1)
            assert right(batch) and right(batch, "next_")
            seen.add(batch["image"].data_ptr())
        assert len(seen) <= 40  # some batches are copied together, each to its place


def _sample_in_a_child(buffer, out):
    batches = [buffer.sample(64, timestep_level=True) for _ in range(5)]
    # By numpy: torch's own threads do not live on in a forked child.
    out.put(all((b["image"].numpy() == b["t"].numpy()[:, None, None, None]).all() for b in batches))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_in_memory_of_its_own(images):
    buffer, context = images(), multiprocessing.get_context("fork")
    held = buffer.sample(64, timestep_level=True)
    out = context.SimpleQueue()
    with pool_lock(folders_of(buffer).pool):  # another thread of the parent was in the middle
        child = context.Process(target=_sample_in_a_child, args=(buffer, out))
        child.start()
    child.join()
    assert out.get()
    assert right(held)


def test_a_batch_that_is_dropped_is_held_by_nobody(tmp_path):
    with ReplayBuffer(tmp_path, 4, 20, {"image": ("uint8", (64, 64))}) as buffer:
        for _ in range(4):
            buffer.store_episode(image=np.zeros((20, 64, 64), np.uint8))
        for size in (300, 40, 40, 40, 40, 40, 40, 40):  # alone, then several as one until the last is handed out
            batch = buffer.sample(size, timestep_level=True)
            assert folders_of(buffer).pool.lent > 0
            del batch
        assert folders_of(buffer).pool.lent == 0


def test_at_the_death_of_a_batch_no_line_runs_in_which_an_interruption_would_be_lost():
    pool, called = Pool(), []
    array = filled(pool, 1)
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del array
    finally:
        sys.setprofile(None)
    assert called == []
    assert (pool.lent, pool.unused) == (0, np.prod(SHAPE))


def test_of_many_batches_that_are_dropped_together_little_stays_without_another_look():
    tracemalloc.start()
    try:
        pool = Pool(keep=1 << 20)
        arrays = [filled(pool, i) for i in range(40)]
        before = tracemalloc.get_traced_memory()[0]
        assert before > 40 * np.prod(SHAPE)
        arrays.clear()
        assert tracemalloc.get_traced_memory()[0] < before / 4
    finally:
        tracemalloc.stop()
