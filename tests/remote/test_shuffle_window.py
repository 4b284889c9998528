"""`shuffle="block"` through a cache that is smaller than a window: each block is fetched about once, and all agree."""

from __future__ import annotations

import logging
import multiprocessing
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cli_cases import main, read_json
from hypothesis import given
from hypothesis import strategies as st
from range_server import RangeServer

from memmap_buffer import ConcatBuffer, Field, ReplayBuffer, SchemaError, Source, Window, mixture_loader, publish
from memmap_buffer.format.source import BLOCK, WINDOWS
from memmap_buffer.items.shuffle import BLOCKS, Shuffle
from memmap_buffer.loading.shuffle_window import CacheUse
from memmap_buffer.remote.cache import OFTEN

STEPS, EPISODES, SHARDS = 100, 15, 2
FIELDS = {"frame": Field("uint8", (64, 64)), "ids": ("int64", (None,)), "number": "int", "terminated": "bool"}
BLOCKS_OF_CACHE = 24
OPTIONS: dict[str, Any] = {"timestep_level": True, "shuffle": "block", "seed": 1}


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 12 MB that were published."""
    place = tmp_path_factory.mktemp("far")
    for shard in range(SHARDS):
        rng = np.random.default_rng(shard)
        with ReplayBuffer(place / f"shard-{shard:05}", EPISODES, STEPS, FIELDS) as buffer:
            for episode in range(EPISODES):
                first = (shard * EPISODES + episode) * STEPS
                frame = rng.integers(0, 255, (STEPS, 64, 64), np.uint8)
                ids = [np.arange(t % 4) for t in range(STEPS)]
                buffer.store_episode(
                    frame=frame,
                    ids=ids,
                    number=np.arange(first, first + STEPS),
                    terminated=np.arange(STEPS) == STEPS - 1,
                )
        publish(buffer.folder, f"file://{place}/url")
    return place / "url"


def size_of(far: Path, *names: str) -> int:
    return sum(path.stat().st_size for path in far.rglob("data/*.npy") if not names or path.name.split(".")[0] in names)


def opened(far: Path | str, cache: Path, blocks: int = BLOCKS_OF_CACHE) -> ConcatBuffer:
    url = far if isinstance(far, str) else f"file://{far}"
    return ConcatBuffer.from_root(url, cache=cache, cache_bytes=blocks * BLOCK)


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch["number"]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"shuffle_window": 2000},
        {"fields": ["frame", "number"]},
        {"timestep_level": False, "view": Window(4, stride=4)},
    ],
    ids=str,
)
def test_every_block_is_fetched_about_once_and_the_log_and_info_say_so(
    far: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    caplog.set_level(logging.INFO, "memmap_buffer")
    monkeypatch.setattr("memmap_buffer.remote.layout.GAP_BYTES", 0)  # what is sent beside the blocks is not told
    with RangeServer(far) as server:
        data = opened(server.url, tmp_path)
        loader = data.dataloader(16, **{**OPTIONS, **options})
        asked = len(server.requests)
        given = numbers(batch if batch["number"].ndim == 1 else {"number": batch["number"].ravel()} for batch in loader)
        ranges = [r.range for r in server.requests[asked:] if r.range and "/data/" in r.path]
        sent = sum(stop - first for first, stop in ranges)
        assert sorted(given) == list(range(SHARDS * EPISODES * STEPS))
        assert given != sorted(given)
        most = 2.5 if "num_workers" in options else 1.6  # what is drawn for workers is several of these small windows
        assert sent < most * size_of(far, *options.get("fields", ()))
        assert main("info", server.url, "--cache", tmp_path, "--json") == 0
        told = read_json(capsys.readouterr().out)
    assert told["fetched"] == sent
    assert told["needed"] >= 0.9 * size_of(far, *options.get("fields", ()))
    said = [record for record in caplog.records if "has room" in record.message or "were fetched" in record.message]
    often = told["fetched"] > OFTEN * told["needed"]
    assert [record.levelno for record in said] == [logging.WARNING, logging.WARNING if often else logging.INFO]
    assert f"cache_bytes={BLOCKS_OF_CACHE * BLOCK} has room for windows of" in said[0].message
    ratio = told["fetched"] / told["needed"]
    assert f"epoch 0: {told['fetched'] / 1e6:.1f} MB were fetched for" in said[1].message
    assert f"each block {ratio:.2f} times" in said[1].message


def test_a_window_that_was_read_before_its_turn_to_be_fetched_ahead_is_fetched_no_more(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("memmap_buffer.remote.mirror.bring_later", asked.append)
    list(opened(far, tmp_path).dataloader(16, **OPTIONS))
    assert len(asked) > 4
    assert [bool(wanted) for wanted in asked] == [False] * (len(asked) - 1) + [True]


def test_blocks_that_are_fetched_again_and_again_are_a_warning(
    far: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = opened(far, tmp_path)
    list(data.dataloader(16, shuffle=True, seed=1, view=Window(4, stride=1, fields=["frame"])))
    (said,) = [record for record in caplog.records if "were fetched" in record.message]
    assert said.levelno == logging.WARNING
    assert "times; give a larger cache_bytes, or shuffle='block'" in said.message


def test_a_window_that_the_cache_holds_is_shuffled_as_from_folders(
    far: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near = ConcatBuffer.from_root(far.parent)
    expected = numbers(near.dataloader(16, **OPTIONS))
    whole = ConcatBuffer.from_root(f"file://{far}", cache=tmp_path / "unbounded")
    assert numbers(whole.dataloader(16, **OPTIONS)) == expected
    assert numbers(opened(far, tmp_path / "bounded", 80).dataloader(16, **OPTIONS)) == expected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert numbers(opened(far, tmp_path / "small").dataloader(16, **OPTIONS)) != expected


def test_an_epoch_that_is_gone_on_with_has_its_windows_whatever_the_cache(far: Path, tmp_path: Path) -> None:
    loader = opened(far, tmp_path / "one").dataloader(16, **OPTIONS)
    batches = iter(loader)
    begun = numbers(next(batches) for _ in range(20))
    state = loader.state_dict()
    rest = numbers(batches)
    assert sorted(begun + rest) == list(range(SHARDS * EPISODES * STEPS))
    for blocks in (BLOCKS_OF_CACHE, 2 * BLOCKS_OF_CACHE, 200):
        other = opened(far, tmp_path / str(blocks), blocks).dataloader(16, **OPTIONS)
        other.load_state_dict(state)
        assert numbers(other) == rest
    large = ConcatBuffer.from_root(f"file://{far}", cache=tmp_path / "large").dataloader(16, **OPTIONS)
    iter(large)
    small = opened(far, tmp_path / "small").dataloader(16, **OPTIONS)
    with pytest.raises(SchemaError, match=r"cache_bytes: got 6,291,456, expected at least .*the epoch was begun with"):
        small.load_state_dict(large.state_dict())


def test_ranks_that_are_given_are_refused_where_their_caches_would_choose_their_windows(
    far: Path, tmp_path: Path
) -> None:
    """They cannot tell each other; what each can hold is the same for all."""
    ranks: dict[str, Any] = {**OPTIONS, "world_size": 2}
    with pytest.raises(SchemaError, match=r"cache_bytes: got 6,291,456, expected at least [0-9,]+.*initialise torch"):
        opened(far, tmp_path).dataloader(16, **ranks, rank=0)
    with pytest.raises(SchemaError, match=r"cache_bytes: got 6,291,456, expected at least [0-9,]+.*initialise torch"):
        mixed(opened(far, tmp_path), rank=0, world_size=2)
    each = [
        numbers(opened(far, tmp_path / str(rank), blocks).dataloader(16, **ranks, rank=rank, tail="uneven"))
        for rank, blocks in enumerate((80, 120))
    ]
    assert sorted(each[0] + each[1]) == list(range(SHARDS * EPISODES * STEPS))


def mixed(data: ConcatBuffer, **options: Any) -> Any:
    sources = {"far": Source(data, timestep_level=True)}
    return mixture_loader(sources, batch_size=16, seed=OPTIONS["seed"], shuffle="block", length="longest", **options)


def rank_main(rank: int, far: Path, place: Path, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    data = opened(far, place / str(rank), (100, BLOCKS_OF_CACHE)[rank])
    loader = data.dataloader(16, **OPTIONS, tail="uneven")
    given = numbers(loader)
    iter(loader)
    window = loader.state_dict()["window"]
    mixture = mixed(data, tail="uneven")
    given_mixed = numbers(mixture)
    iter(mixture)
    results.put((given, given_mixed, window, mixture.state_dict()["sources"]["far"]["window"]))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_with_caches_of_their_own_agree_on_the_windows_of_the_smallest(far: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=rank_main, args=(rank, far, tmp_path, results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        parts = [results.get(timeout=120) for _ in processes]
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    for one, other in list(zip(*parts, strict=True))[:2]:
        assert sorted(one + other) == list(range(SHARDS * EPISODES * STEPS))
    alone = opened(far, tmp_path / "alone").dataloader(16, **OPTIONS)
    iter(alone)
    assert {window for *_, first, second in parts for window in (first, second)} == {alone.state_dict()["window"]}


def test_a_cache_that_is_too_small_is_refused_and_what_is_named_is_enough(tmp_path: Path) -> None:
    """Of many fields, each of which takes a block wherever a place begins."""
    names, steps = [f"x{i}" for i in range(12)], 3000
    with ReplayBuffer(tmp_path / "shard-00000", 1, steps, {name: ("float32", 64) for name in names}) as buffer:
        buffer.store_episode(**{name: np.full((steps, 64), number) for number, name in enumerate(names)})
    publish(buffer.folder, f"file://{tmp_path}/url")
    text = r"cache_bytes: got 4,194,304, expected at least ([0-9,]+) for shuffle='block', .*; give more, or read fewer"
    with pytest.raises(SchemaError, match=text) as told:
        opened(tmp_path / "url", tmp_path / "cache", 16).dataloader(16, **OPTIONS)
    found = re.search(text, str(told.value))
    assert found is not None
    least = int(found[1].replace(",", ""))
    with RangeServer(tmp_path / "url") as server:
        data = ConcatBuffer.from_root(server.url, cache=tmp_path / "cache", cache_bytes=least)
        assert sum(len(batch["x3"]) for batch in data.dataloader(16, **OPTIONS)) == steps
        assert server.sent < 2.5 * size_of(tmp_path / "url")
    few = opened(tmp_path / "url", tmp_path / "few", 16).dataloader(16, **OPTIONS, fields=names[:3])
    assert sum(len(batch["x2"]) for batch in few) == steps


@given(
    st.integers(1, 10**7),
    st.floats(1, 10**7),
    st.integers(1, 40),
    st.integers(16, 10**5),
    st.integers(1, 10**6),
    st.integers(1, 4),
)
def test_a_smaller_window_fits_and_is_no_larger_than_what_was_asked_for(
    items: int, each: float, files: int, blocks: int, window: int, orders: int
) -> None:
    use = CacheUse(items, int(items * each), each, files * BLOCK, orders, blocks * BLOCK)
    asked = Shuffle("block", window)
    try:
        found = use.fitted(asked)
    except SchemaError:
        smallest = orders * (max(each, files * BLOCK) + files * BLOCK)
        assert use.limit < 2 * smallest + 2 * orders
        return
    assert found.window <= window
    assert found.blocks <= BLOCKS
    assert found == asked or found.block * found.blocks == found.window
    assert use.stays(found, 2)
    if found.blocks > 1 and found != asked:
        assert use.stays(found, WINDOWS)
