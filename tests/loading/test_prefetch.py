"""Batches that a thread makes ahead: the same ones, and no thread that outlives its loop."""

import gc
import itertools
import pickle
import subprocess
import sys
import threading
import traceback

import pytest
import torch
from conftest import assert_same, flat

from memmap_buffer import ConcatBuffer, SchemaError
from memmap_buffer.loading.prefetch import Move, Prefetched

OPTIONS = {"timestep_level": True, "shuffle": True, "seed": 3}


def prefetched(source, count=2):
    return Prefetched(iter(source), count, Move(None))


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = {*others()}  # of other tests, which may end meanwhile
    yield
    gc.collect()  # a caught exception refers to the frames that it went through
    assert {*others()} <= before


def others():
    """The threads that are not kept for codecs, which come and go with what other tests have read."""
    return [thread for thread in threading.enumerate() if not thread.name.startswith("memmap_buffer-codec")]


# The same batches


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_prefetched_batches_are_the_same_in_the_same_order(recorded, count):
    buffer = recorded()
    for options in (OPTIONS, OPTIONS | {"to_named_tuple": ("t", "text", "camera")}, {"window_length": 3, "seed": 1}):
        plain, ahead = buffer.dataloader(4, **options), buffer.dataloader(4, **options, prefetch=count)
        for _ in range(2):
            for a, b in zip(ahead, plain, strict=True):
                assert type(a) is type(b)
                assert_same(*(x if isinstance(x, dict) else x._asdict() for x in (a, b)))


def test_several_iterators_at_once_do_not_disturb_each_other(recorded):
    buffer = recorded()
    both = ConcatBuffer([buffer, recorded(name="b")])
    loader = both.dataloader(4, timestep_level=True, prefetch=2)
    expected = [batch["t"].tolist() for batch in both.dataloader(4, timestep_level=True)]
    first, second = iter(loader), iter(loader)
    got = [[next(first)["t"].tolist(), next(second)["t"].tolist()] for _ in expected]
    assert got == [[batch, batch] for batch in expected]
    for batches in (first, second):
        assert list(batches) == []


def test_an_epoch_is_fixed_when_its_iterator_is_made(recorded, record):
    buffer = recorded((3, 4))
    loaders = [buffer.dataloader(2, timestep_level=True, shuffle=True, seed=0, prefetch=n) for n in (0, 2)]
    for loader in loaders:
        loader.batch_sampler.set_epoch(7)
    epochs = [iter(loader) for loader in loaders]
    record(buffer, 2, 5)
    loaders[1].batch_sampler.set_epoch(9)
    plain, ahead = (torch.cat([batch["t"] for batch in epoch]).tolist() for epoch in epochs)
    assert plain == ahead
    assert len(plain) == 3 + 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_batches_of_workers_can_be_prefetched_too(recorded):
    buffer = recorded()
    ahead = buffer.dataloader(4, **OPTIONS, num_workers=2, prefetch=2)
    for a, b in zip(ahead, buffer.dataloader(4, **OPTIONS), strict=True):
        assert_same(a, b)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_new_epoch_of_persistent_workers_ends_the_one_that_is_still_held(recorded):
    buffer = recorded()
    expected = [batch["t"].tolist() for batch in buffer.dataloader(1, timestep_level=True)]
    loader = buffer.dataloader(1, timestep_level=True, num_workers=2, persistent_workers=True, prefetch=3)
    held = []
    for stop in (1, 3, 7):
        held.append(iter(loader))
        assert [next(held[-1])["t"].tolist() for _ in range(stop)] == expected[:stop]
    assert [batch["t"].tolist() for batch in loader] == expected
    assert [list(batches) for batches in held] == [[], [], []]


def test_closing_twice_is_fine_and_ends_it():
    batches = prefetched(itertools.count())
    assert next(batches) == 0
    batches.close()
    batches.close()
    assert list(batches) == []


def test_a_loader_pickles_in_the_middle_of_an_epoch(recorded):
    loader = recorded().dataloader(4, timestep_level=True, prefetch=2)
    batches = iter(loader)
    first = next(batches)
    assert_same(next(iter(pickle.loads(pickle.dumps(loader)))), first)


def test_prefetched_batches_are_moved(recorded):
    for batch in recorded().dataloader(4, **OPTIONS, prefetch=2, device="meta"):
        assert {value.device.type for value in flat(batch).values() if isinstance(value, torch.Tensor)} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_prefetched_batches_are_whole_on_the_gpu_on_any_stream(recorded, pin_memory):
    buffer = recorded()
    options = {"view": None, "n_steps": 2} | {k: v for k, v in OPTIONS.items() if k != "timestep_level"}
    expected = [batch["observation"].sum().item() for batch in buffer.dataloader(4, **options)]
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            ahead = buffer.dataloader(4, **options, prefetch=3, device="cuda", pin_memory=pin_memory)
            sums = []
            for batch in ahead:
                sums.append(batch["observation"].sum())
                del batch
            assert torch.stack(sums).tolist() == expected


@pytest.mark.parametrize("count", [-1, 1.5, True, "2"])
def test_a_count_that_is_no_whole_number_is_refused(recorded, count):
    with pytest.raises(SchemaError, match="prefetch: got"):
        recorded().dataloader(4, prefetch=count)


# How far ahead


def test_no_more_than_count_items_are_made_ahead():
    made, wait = [], threading.Semaphore(0)

    def source():
        for i in itertools.count():
            made.append(i)
            wait.release()
            yield i

    batches = prefetched(source(), 3)
    assert made == []
    for taken in range(1, 20):
        assert next(batches) == taken - 1
        for _ in range(3 if taken == 1 else 0):
            wait.acquire()
        wait.acquire()  # the item that the one just taken made room for
        assert len(made) == taken + 3


# Ends


def test_the_end_comes_again_when_asked_for_again():
    batches = prefetched(range(3))
    assert list(batches) == [0, 1, 2]
    assert list(batches) == []


def test_an_exception_is_raised_in_its_place_with_its_traceback():
    def boom():
        raise ArithmeticError("in the thread")

    class Source:
        def __init__(self):
            self.n = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.n += 1
            return boom() if self.n == 3 else self.n

    batches = prefetched(Source())
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(ArithmeticError, match="in the thread") as caught:
        next(batches)
    assert "boom" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert [next(batches), next(batches)] == [4, 5]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_exit_in_the_thread_ends_the_iterator(kind):
    def source():
        yield 1
        raise kind("now")

    batches = prefetched(source())
    assert next(batches) == 1
    with pytest.raises(kind, match="now"):
        next(batches)
    assert list(batches) == []


def test_leaving_a_loop_ends_its_thread(recorded):
    buffer = recorded()
    before = len(others())
    for _ in range(20):
        for _batch in buffer.dataloader(1, **OPTIONS, prefetch=4):
            assert len(others()) == before + 1
            break
        assert len(others()) == before


def test_an_exception_in_a_loop_ends_its_thread(recorded):
    buffer, before = recorded(), len(others())

    def train():
        for _ in buffer.dataloader(1, **OPTIONS, prefetch=4):
            raise RuntimeError("a step that fails")

    with pytest.raises(RuntimeError, match="a step that fails"):
        train()
    gc.collect()
    assert len(others()) == before


def test_an_iterator_in_a_cycle_ends_its_thread_when_it_is_collected(recorded):
    before = len(others())
    batches = iter(recorded().dataloader(1, **OPTIONS, prefetch=4))
    cycle = [batches]
    cycle.append(cycle)
    next(batches)
    assert len(others()) == before + 1
    del batches, cycle
    gc.collect()
    assert len(others()) == before


def test_an_iterator_that_was_never_asked_for_anything_has_no_thread(recorded):
    before = len(others())
    batches = iter(recorded().dataloader(1, **OPTIONS, prefetch=4))
    assert len(others()) == before
    del batches


def test_a_source_that_is_left_is_closed():
    closed = []

    def source():
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    batches = prefetched(source())
    next(batches)
    del batches
    gc.collect()
    assert closed == [True]


PROGRAM = """
import atexit, sys, threading
from memmap_buffer import ReplayBuffer
buffer = ReplayBuffer.from_folder(sys.argv[1], read_only=True)
assert "torch" not in sys.modules  # which registers the end of the workers, so that they are gone when this is called:
atexit.register(lambda: sys.stderr.writelines(t.name for t in threading.enumerate() if "prefetch" in t.name))
batches = iter(buffer.dataloader(2, timestep_level=True, prefetch=3, num_workers=int(sys.argv[2])))
next(batches)
if sys.argv[3] == "raise":
    raise RuntimeError("at the end")
"""


@pytest.mark.parametrize(
    ("how", "num_workers"),
    [
        ("return", "0"),
        ("raise", "1"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("raise", "0"), ("return", "1"))),
    ],
)
def test_the_interpreter_exits_in_the_middle_of_an_epoch(recorded, how, num_workers):
    """At once, and without a word; no thread waits for a batch of a worker that is gone."""
    folder = recorded().folder
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    arguments = [sys.executable, *warnings, "-c", PROGRAM, folder, num_workers, how]
    run = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert run.returncode == (how == "raise")
    assert run.stderr == "" if how == "return" else run.stderr.endswith("RuntimeError: at the end\n")
